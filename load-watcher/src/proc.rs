//! Parsers for /proc files (proc(5)) and control group files. The parsers allocate no memory, and
//! return `None` for malformed text.
//!
//! The crate `procfs` is not used here: every sample runs these parsers on files that stay open,
//! whereas the crate opens a file for each reading and allocates memory. Files that are read
//! outside of samples are read with the crate, except for two files:
//!
//! - `interrupts`: the crate does not read this file.
//! - `net/unix`: the crate fails if any user has a socket whose name contains a line break.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::str::FromStr;

/// Length of a clock tick in /proc, in microseconds (proc(5): 1/100 s on Linux).
pub const TICK_US: u64 = 10_000;

/// CPU time since boot in microseconds, summed over all processors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTimes {
    pub total_us: u64,
    /// Time in which the processors were idle, including waits for disks.
    pub idle_us: u64,
}

impl CpuTimes {
    /// Returns the share of the time since `earlier` in which the processors were busy, 0.0 to 1.0;
    /// `None` if no time has passed.
    pub fn busy_since(self, earlier: Self) -> Option<f32> {
        let total_us = self
            .total_us
            .checked_sub(earlier.total_us)
            .filter(|t| *t > 0)?;
        // The idle time of a single processor can decrease slightly.
        let idle_us = self.idle_us.saturating_sub(earlier.idle_us).min(total_us);
        Some((total_us - idle_us) as f32 / total_us as f32)
    }
}

/// Reads an open file from its start into `buffer`. Returns the content, truncated to the length of
/// `buffer`.
///
/// # Errors
/// The error of the system; ESRCH if the file belongs to a process that has exited.
pub fn read_from_start<'a>(file: &File, buffer: &'a mut [u8]) -> io::Result<&'a [u8]> {
    loop {
        match file.read_at(buffer, 0) {
            Ok(byte_count) => return Ok(&buffer[..byte_count]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Returns the kernel's list of all Unix sockets: one socket in each line, after a heading.
///
/// # Errors
/// The list cannot be read.
pub(crate) fn read_unix_sockets() -> io::Result<String> {
    std::fs::read_to_string("/proc/net/unix")
}

fn parse_number<T: FromStr>(word: &[u8]) -> Option<T> {
    std::str::from_utf8(word).ok()?.parse().ok()
}

/// Returns the first line without its line break, and the text after it.
fn split_line(text: &[u8]) -> (&[u8], &[u8]) {
    let end = text.iter().position(|b| *b == b'\n').unwrap_or(text.len());
    (&text[..end], text.get(end + 1..).unwrap_or_default())
}

/// Returns the number at the beginning of a text and the text after the number; `None` if the text
/// does not begin with a number that fits. Leading spaces are skipped.
fn leading_number(text: &[u8]) -> Option<(u64, &[u8])> {
    let text = text.trim_ascii_start();
    let len = text
        .iter()
        .position(|b| !b.is_ascii_digit())
        .unwrap_or(text.len());
    let append_digit =
        |sum: u64, digit: &u8| sum.checked_mul(10)?.checked_add(u64::from(digit - b'0'));
    let number = text[..len].iter().try_fold(0, append_digit)?;
    let is_complete = len > 0 && text.get(len).is_none_or(u8::is_ascii_whitespace);
    is_complete.then_some((number, &text[len..]))
}

fn split_words(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|b| b.is_ascii_whitespace())
        .filter(|w| !w.is_empty())
}

fn split_lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|b| *b == b'\n')
}

/// Iterates over the numbers at the beginning of a text, up to the first word that is not a number.
pub fn leading_numbers(text: &[u8]) -> impl Iterator<Item = u64> {
    split_words(text).map_while(parse_number)
}

/// Returns the number after `name` in the first line that begins with `name` and a space.
pub fn named_number(text: &[u8], name: &[u8]) -> Option<u64> {
    split_lines(text).find_map(|line| {
        let rest = line
            .strip_prefix(name)
            .filter(|rest| rest.first().is_some_and(u8::is_ascii_whitespace))?;
        Some(leading_number(rest)?.0)
    })
}

/// Returns the CPU time in microseconds from `cpu.stat` of a version 2 control group.
pub fn group_cpu_time_us(text: &[u8]) -> Option<u64> {
    named_number(text, b"usage_usec")
}

/// Returns the number of processors that `cpu.max` of a version 2 control group permits; `None` if
/// there is no limit.
pub fn processor_limit_v2(text: &[u8]) -> Option<f32> {
    let mut numbers = leading_numbers(text);
    let (quota, period) = (
        numbers.next()?,
        numbers.next().filter(|period| *period > 0)?,
    );
    Some(quota as f32 / period as f32)
}

/// Returns the CPU times summed over all processors and the number of online processors, from
/// /proc/stat.
pub fn parse_cpu_times(text: &[u8]) -> Option<(CpuTimes, u32)> {
    let (first_line, mut rest) = split_line(text);
    let mut fields = first_line.strip_prefix(b"cpu ")?;
    // Fields: user nice system idle iowait irq softirq steal. The guest times after them are part
    // of user and nice.
    let mut times = CpuTimes::default();
    let mut field_count = 0;
    while field_count < 8 && !fields.trim_ascii_start().is_empty() {
        let (ticks, remaining_fields) = leading_number(fields)?;
        let time_us = ticks.checked_mul(TICK_US)?;
        times.total_us = times.total_us.checked_add(time_us)?;
        if field_count == 3 || field_count == 4 {
            times.idle_us = times.idle_us.checked_add(time_us)?;
        }
        (field_count, fields) = (field_count + 1, remaining_fields);
    }
    // The text after the lines of the processors is long, because it contains a number for each
    // interrupt. It is not parsed.
    let mut cores = 0_usize;
    while rest.starts_with(b"cpu") && rest.get(3).is_some_and(u8::is_ascii_digit) {
        (cores, rest) = (cores + 1, split_line(rest).1);
    }
    (field_count >= 4 && cores > 0).then_some((times, u32::try_from(cores).ok()?))
}

/// Returns the load average over one minute and the number of runnable threads from /proc/loadavg.
pub fn parse_loadavg(text: &[u8]) -> Option<(f32, u32)> {
    let mut fields = split_words(text);
    let load1: f32 = parse_number(fields.next()?)?;
    let runnable_count = parse_number(fields.nth(2)?.split(|b| *b == b'/').next()?)?;
    (load1.is_finite() && load1 >= 0.0).then_some((load1, runnable_count))
}

/// Returns the memory that is available without swapping, in bytes, from /proc/meminfo.
pub fn parse_available_bytes(text: &[u8]) -> Option<u64> {
    let line = split_lines(text).find_map(|l| l.strip_prefix(b"MemAvailable:"))?;
    leading_number(line)?.0.checked_mul(1024)
}

/// Returns the share of time, 0 to 1, in which at least one task waited for a processor, averaged
/// over ten seconds, from /proc/pressure/cpu.
pub fn parse_cpu_pressure(text: &[u8]) -> Option<f32> {
    let line = split_lines(text).find_map(|l| l.strip_prefix(b"some "))?;
    let percent: f32 = parse_number(split_words(line).find_map(|w| w.strip_prefix(b"avg10="))?)?;
    percent
        .is_finite()
        .then_some((percent / 100.0).clamp(0.0, 1.0))
}

/// CPU use of one process, from /proc/PID/stat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessUsage {
    /// CPU time, in clock ticks, that the process and the child processes for which it has waited
    /// have used with all their threads.
    pub cpu_ticks: u64,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
}

/// Returns CPU time and start time of a process from /proc/PID/stat.
pub fn parse_process_usage(text: &[u8]) -> Option<ProcessUsage> {
    // The program's name is in brackets and may itself contain any character, also brackets.
    // Therefore the last closing bracket ends the name.
    let mut rest = &text[text.iter().rposition(|b| *b == b')')? + 1..];
    // After the name follows the state, one letter.
    rest = rest.trim_ascii_start().get(1..)?;
    let (mut ticks, mut field_number) = (0_u64, 4);
    loop {
        // Some fields may be negative, but not the fields that are returned.
        rest = rest.trim_ascii_start();
        rest = rest.strip_prefix(b"-").unwrap_or(rest);
        let (number, remaining_text) = leading_number(rest)?;
        match field_number {
            14..=17 => ticks = ticks.checked_add(number)?,
            22 => {
                return Some(ProcessUsage {
                    cpu_ticks: ticks,
                    start_ticks: number,
                });
            }
            _ => {}
        }
        (field_number, rest) = (field_number + 1, remaining_text);
    }
}

/// Texts that identify the lines of keyboards and pointing devices in /proc/interrupts, in any
/// case.
const INPUT_DEVICE_NAMES: [&[u8]; 6] = [
    b"i8042",
    b"keyboard",
    b"mouse",
    b"hid",
    b"touchpad",
    b"trackpoint",
];

/// Returns the number of interrupts of keyboards and mice from /proc/interrupts; `None` if no line
/// belongs to a keyboard or mouse. Devices on a USB bus have no lines of their own.
pub fn parse_input_interrupts(text: &[u8]) -> Option<u64> {
    let is_input_device = |line: &&[u8]| {
        let contains_name = |device_name: &[u8]| {
            line.windows(device_name.len())
                .any(|part| part.eq_ignore_ascii_case(device_name))
        };
        INPUT_DEVICE_NAMES
            .iter()
            .any(|device_name| contains_name(device_name))
    };
    let sum_counters = |line: &[u8]| {
        let colon_index = line.iter().position(|b| *b == b':')?;
        let (mut sum, mut rest) = (0_u64, &line[colon_index + 1..]);
        while let Some((number, remaining_text)) = leading_number(rest) {
            (sum, rest) = (sum.wrapping_add(number), remaining_text);
        }
        Some(sum)
    };
    split_lines(text)
        .filter(is_input_device)
        .filter_map(sum_counters)
        .fold(None, |sum, n| Some(sum.unwrap_or(0_u64).wrapping_add(n)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STAT_TEXT: &[u8] = b"cpu  100 20 30 800 50 0 5 5 70 0\ncpu0 50 10 15 400 25 0 5 0 0 0\n\
        cpu1 50 10 15 400 25 0 0 5 0 0\nintr 123 4 5\nctxt 99\nprocs_running 2\n";

    #[test]
    fn group_cpu_time_is_parsed() {
        assert_eq!(group_cpu_time_us(b"usage_usec 7\nuser_usec 1\n"), Some(7));
        assert_eq!(group_cpu_time_us(b"user_usec 1\n"), None);
    }

    #[test]
    fn known_files_are_parsed() {
        assert_eq!(
            parse_cpu_times(STAT_TEXT),
            Some((
                CpuTimes {
                    total_us: 10_100_000,
                    idle_us: 8_500_000
                },
                2
            ))
        );
        assert_eq!(
            parse_loadavg(b"0.52 0.58 0.59 3/467 12345\n"),
            Some((0.52, 3))
        );
        assert_eq!(
            parse_available_bytes(b"MemTotal: 8 kB\nMemFree: 1 kB\nMemAvailable:    5 kB\n"),
            Some(5120)
        );
        let pressure_file = b"some avg10=12.50 avg60=0.00 avg300=0.00 total=5\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(parse_cpu_pressure(pressure_file), Some(0.125));
    }

    /// The result is the busy share of the elapsed time. It is at most 1, even if the idle time
    /// decreases; without elapsed time there is no result.
    #[test]
    fn busy_is_share_of_elapsed_time() {
        let (first_times, _) = parse_cpu_times(STAT_TEXT).expect("a good file");
        let later_times = CpuTimes {
            total_us: first_times.total_us + 200,
            idle_us: first_times.idle_us + 50,
        };
        assert_eq!(later_times.busy_since(first_times), Some(0.75));
        assert_eq!(first_times.busy_since(first_times), None);
        assert_eq!(first_times.busy_since(later_times), None);
        let times_with_less_idle = CpuTimes {
            total_us: first_times.total_us + 10,
            idle_us: first_times.idle_us - 5,
        };
        assert_eq!(times_with_less_idle.busy_since(first_times), Some(1.0));
    }

    /// The name of the program may contain spaces and brackets.
    #[test]
    fn process_usage_is_parsed_with_any_name() {
        let stat =
            b"7 (a) b) (c) S 1 7 7 0 -1 4194560 100 200 0 0 11 22 33 44 20 0 1 0 5678 1000 2 18446744073709551615 1 1";
        assert_eq!(
            parse_process_usage(stat),
            Some(ProcessUsage {
                cpu_ticks: 110,
                start_ticks: 5678
            })
        );
        assert_eq!(parse_process_usage(b"7 (x) S 1 2 3"), None);
        assert_eq!(parse_process_usage(b"7 x S 1 2 3"), None);
    }

    /// Interrupts are summed over all lines of keyboards and mice and over all processors.
    #[test]
    fn input_interrupts_are_summed() {
        let text = b"           CPU0       CPU1\n  1:          9         11   IO-APIC   1-edge      i8042\n\
            12:          5          0   IO-APIC  12-edge      i8042\n 16: 1 2 IO-APIC 16-fasteoi ehci_hcd:usb1\n\
            40: 3 4 PCI-MSI 1-edge i2c_HID_acpi\nNMI: 70 80 Non-maskable interrupts\n";
        assert_eq!(parse_input_interrupts(text), Some(9 + 11 + 5 + 3 + 4));
        assert_eq!(
            parse_input_interrupts(b"   CPU0\n 4: 10 IO-APIC 4-edge ttyS0\n"),
            None
        );
        assert_eq!(parse_input_interrupts(b""), None);
    }

    #[test]
    fn malformed_text_gives_none() {
        for text in [
            &b""[..],
            b"\n",
            b"cpu",
            b"cpu 1 2 3",
            b"cpu a b c d e\ncpu0 1\n",
            b"cpu 1 2 3 4\nintr 1\n",
            b"x 1 2 3 4",
        ] {
            assert_eq!(parse_cpu_times(text), None, "{text:?}");
        }
        for text in [
            &b""[..],
            b"0.1",
            b"0.1 0.1 0.1",
            b"0.1 0.1 0.1 x/9 1",
            b"nan 0 0 1/2 3",
            b"-1 0 0 1/2 3",
        ] {
            assert_eq!(parse_loadavg(text), None, "{text:?}");
        }
        assert_eq!(
            parse_available_bytes(b"MemAvailable: 99999999999999999999 kB"),
            None
        );
        assert_eq!(
            parse_available_bytes(b"MemAvailable: 18446744073709551615 kB"),
            None
        );
        assert_eq!(parse_cpu_pressure(b"some avg10=inf"), None);
        assert_eq!(parse_cpu_pressure(b"full avg10=1.0"), None);
    }

    proptest! {
        /// Any bytes are parsed or refused without a panic; the idle time never exceeds the total.
        #[test]
        fn any_bytes_are_accepted(text in prop::collection::vec(any::<u8>(), 0..300), prefix_len in 0..STAT_TEXT.len()) {
            parse_cpu_times(&text);
            parse_loadavg(&text);
            parse_available_bytes(&text);
            parse_cpu_pressure(&text);
            parse_process_usage(&text);
            parse_input_interrupts(&text);
            let damaged_stat = [&STAT_TEXT[..prefix_len], &text].concat();
            if let Some((times, _)) = parse_cpu_times(&damaged_stat) {
                prop_assert!(times.idle_us <= times.total_us);
            }
        }
    }
}
