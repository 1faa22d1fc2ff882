//! Parsers for /proc files (proc(5)) and control group files. They allocate no memory, and return
//! `None` for malformed text.
//!
//! The crate `procfs` is not used here: every sample runs these parsers on files that stay open,
//! and the crate opens a file for each reading and allocates memory. What is read outside of
//! samples is read with the crate, except for two files:
//!
//! - `interrupts`: the crate does not read it.
//! - `net/unix`: a socket of any user whose name contains a line break makes the crate fail.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::str::FromStr;

/// Length of a clock tick in /proc, in microseconds (proc(5): 1/100 s on Linux).
pub const TICK_US: u64 = 10_000;

/// CPU time since boot in microseconds, summed over all processors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CpuTimes {
    pub total: u64,
    /// Time in which the processors were idle, including waits for disks.
    pub idle: u64,
}

impl CpuTimes {
    /// Returns the share of the time since `before` in which the processors were busy, 0.0 to 1.0;
    /// `None` if no time has passed.
    pub fn busy_since(self, before: CpuTimes) -> Option<f32> {
        let total = self.total.checked_sub(before.total).filter(|t| *t > 0)?;
        // The idle time of single processors can decrease slightly.
        let idle = self.idle.saturating_sub(before.idle).min(total);
        Some((total - idle) as f32 / total as f32)
    }
}

/// Reads an open file from its start into `text`. Returns the content, truncated to the length of
/// `text`.
///
/// # Errors
/// The error of the system; ESRCH for a process that has exited.
pub fn read_from_start<'a>(file: &File, text: &'a mut [u8]) -> io::Result<&'a [u8]> {
    loop {
        match file.read_at(text, 0) {
            Ok(len) => return Ok(&text[..len]),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Returns the kernel's list of all Unix sockets, one a line after a heading.
///
/// # Errors
/// The list cannot be read.
pub(crate) fn unix_sockets() -> io::Result<String> {
    std::fs::read_to_string("/proc/net/unix")
}

fn parse_number<T: FromStr>(word: &[u8]) -> Option<T> {
    std::str::from_utf8(word).ok()?.parse().ok()
}

/// Returns the first line and the text after it.
fn split_line(text: &[u8]) -> (&[u8], &[u8]) {
    let end = text.iter().position(|b| *b == b'\n').unwrap_or(text.len());
    (&text[..end], text.get(end + 1..).unwrap_or_default())
}

/// Returns the number at the beginning of a text and the text after the number; `None` if the first
/// word is not a number. Leading spaces are skipped.
fn leading_number(text: &[u8]) -> Option<(u64, &[u8])> {
    let text = text.trim_ascii_start();
    let len = text
        .iter()
        .position(|b| !b.is_ascii_digit())
        .unwrap_or(text.len());
    let add = |sum: u64, digit: &u8| sum.checked_mul(10)?.checked_add(u64::from(digit - b'0'));
    let number = text[..len].iter().try_fold(0, add)?;
    let whole = len > 0 && text.get(len).is_none_or(u8::is_ascii_whitespace);
    whole.then_some((number, &text[len..]))
}

fn words(line: &[u8]) -> impl Iterator<Item = &[u8]> {
    line.split(|b| b.is_ascii_whitespace())
        .filter(|w| !w.is_empty())
}

fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.split(|b| *b == b'\n')
}

/// Iterates over the numbers at the beginning of a text, up to the first word that is not a number.
pub fn leading_numbers(text: &[u8]) -> impl Iterator<Item = u64> {
    words(text).map_while(parse_number)
}

/// Returns the number after `name` in the first line that begins with `name`.
pub fn named_number(text: &[u8], name: &[u8]) -> Option<u64> {
    lines(text).find_map(|line| {
        let rest = line
            .strip_prefix(name)
            .filter(|rest| rest.first().is_some_and(u8::is_ascii_whitespace))?;
        Some(leading_number(rest)?.0)
    })
}

/// Returns the CPU time in microseconds from `cpu.stat` of a version 2 control group.
pub fn group_cpu_time(text: &[u8]) -> Option<u64> {
    named_number(text, b"usage_usec")
}

/// Returns the number of processors that `cpu.max` of a version 2 control group permits; `None` if
/// there is no limit.
pub fn quota_v2(text: &[u8]) -> Option<f32> {
    let mut numbers = leading_numbers(text);
    let (quota, period) = (
        numbers.next()?,
        numbers.next().filter(|period| *period > 0)?,
    );
    Some(quota as f32 / period as f32)
}

/// Returns the CPU times summed over all processors and the number of online processors, from
/// /proc/stat.
pub fn cpu_times(text: &[u8]) -> Option<(CpuTimes, u32)> {
    let (first, mut rest) = split_line(text);
    let mut fields = first.strip_prefix(b"cpu ")?;
    // Fields: user nice system idle iowait irq softirq steal. The guest times after them are part
    // of user and nice.
    let mut times = CpuTimes::default();
    let mut count = 0;
    while count < 8 && !fields.trim_ascii_start().is_empty() {
        let (ticks, behind) = leading_number(fields)?;
        let time = ticks.checked_mul(TICK_US)?;
        times.total = times.total.checked_add(time)?;
        if count == 3 || count == 4 {
            times.idle = times.idle.checked_add(time)?;
        }
        (count, fields) = (count + 1, behind);
    }
    // The text after the lines of the processors is long (a number for each interrupt) and is not
    // parsed.
    let mut cores = 0_usize;
    while rest.starts_with(b"cpu") && rest.get(3).is_some_and(u8::is_ascii_digit) {
        (cores, rest) = (cores + 1, split_line(rest).1);
    }
    (count >= 4 && cores > 0).then_some((times, u32::try_from(cores).ok()?))
}

/// Returns the load average over one minute and the number of runnable threads, from /proc/loadavg.
pub fn loadavg(text: &[u8]) -> Option<(f32, u32)> {
    let mut fields = words(text);
    let load1: f32 = parse_number(fields.next()?)?;
    let running = parse_number(fields.nth(2)?.split(|b| *b == b'/').next()?)?;
    (load1.is_finite() && load1 >= 0.0).then_some((load1, running))
}

/// Returns the memory that is available without swapping, in bytes, from /proc/meminfo.
pub fn available_bytes(text: &[u8]) -> Option<u64> {
    let line = lines(text).find_map(|l| l.strip_prefix(b"MemAvailable:"))?;
    leading_number(line)?.0.checked_mul(1024)
}

/// Returns the share of time in which at least one task waited for a processor, averaged over ten
/// seconds, from /proc/pressure/cpu.
pub fn cpu_pressure(text: &[u8]) -> Option<f32> {
    let line = lines(text).find_map(|l| l.strip_prefix(b"some "))?;
    let percent: f32 = parse_number(words(line).find_map(|w| w.strip_prefix(b"avg10="))?)?;
    percent
        .is_finite()
        .then_some((percent / 100.0).clamp(0.0, 1.0))
}

/// CPU use of one process, from /proc/PID/stat.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessUsage {
    /// CPU time in clock ticks that the process with all its threads has used, and child processes
    /// for which it has waited.
    pub cpu_ticks: u64,
    /// Start time in clock ticks since boot.
    pub start_ticks: u64,
}

/// Returns CPU time and start time of a process from /proc/PID/stat.
pub fn process_usage(text: &[u8]) -> Option<ProcessUsage> {
    // The program's name may contain any character, including brackets.
    let mut rest = &text[text.iter().rposition(|b| *b == b')')? + 1..];
    // The state, one letter, follows the name.
    rest = rest.trim_ascii_start().get(1..)?;
    let (mut ticks, mut at) = (0_u64, 4);
    loop {
        // Fields may be negative; the fields that are returned are not.
        rest = rest.trim_ascii_start();
        rest = rest.strip_prefix(b"-").unwrap_or(rest);
        let (value, behind) = leading_number(rest)?;
        match at {
            14..=17 => ticks = ticks.checked_add(value)?,
            22 => {
                return Some(ProcessUsage {
                    cpu_ticks: ticks,
                    start_ticks: value,
                });
            }
            _ => {}
        }
        (at, rest) = (at + 1, behind);
    }
}

/// Words that identify interrupt lines of keyboards and pointing devices.
const INPUT_DEVICE_WORDS: [&[u8]; 6] = [
    b"i8042",
    b"keyboard",
    b"mouse",
    b"hid",
    b"touchpad",
    b"trackpoint",
];

/// Returns the number of interrupts of keyboards and mice from /proc/interrupts; `None` if no line
/// belongs to such a device. Devices on a USB bus have no lines of their own.
pub fn input_interrupts(text: &[u8]) -> Option<u64> {
    let is_key = |line: &&[u8]| {
        let has = |word: &[u8]| {
            line.windows(word.len())
                .any(|part| part.eq_ignore_ascii_case(word))
        };
        INPUT_DEVICE_WORDS.iter().any(|word| has(word))
    };
    let count = |line: &[u8]| {
        let at = line.iter().position(|b| *b == b':')?;
        let (mut sum, mut rest) = (0_u64, &line[at + 1..]);
        while let Some((value, behind)) = leading_number(rest) {
            (sum, rest) = (sum.wrapping_add(value), behind);
        }
        Some(sum)
    };
    lines(text)
        .filter(is_key)
        .filter_map(count)
        .fold(None, |sum, n| Some(sum.unwrap_or(0_u64).wrapping_add(n)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STAT: &[u8] = b"cpu  100 20 30 800 50 0 5 5 70 0\ncpu0 50 10 15 400 25 0 5 0 0 0\n\
        cpu1 50 10 15 400 25 0 0 5 0 0\nintr 123 4 5\nctxt 99\nprocs_running 2\n";

    #[test]
    fn group_cpu_time_is_parsed() {
        assert_eq!(group_cpu_time(b"usage_usec 7\nuser_usec 1\n"), Some(7));
        assert_eq!(group_cpu_time(b"user_usec 1\n"), None);
    }

    /// The parsers return the expected numbers for sample files.
    #[test]
    fn known_files_are_parsed() {
        assert_eq!(
            cpu_times(STAT),
            Some((
                CpuTimes {
                    total: 10_100_000,
                    idle: 8_500_000
                },
                2
            ))
        );
        assert_eq!(loadavg(b"0.52 0.58 0.59 3/467 12345\n"), Some((0.52, 3)));
        assert_eq!(
            available_bytes(b"MemTotal: 8 kB\nMemFree: 1 kB\nMemAvailable:    5 kB\n"),
            Some(5120)
        );
        let psi = b"some avg10=12.50 avg60=0.00 avg300=0.00 total=5\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=0\n";
        assert_eq!(cpu_pressure(psi), Some(0.125));
    }

    /// `busy_since` returns the busy share of the elapsed time, even if the idle time decreases.
    #[test]
    fn busy_is_share_of_elapsed_time() {
        let (before, _) = cpu_times(STAT).expect("a good file");
        let after = CpuTimes {
            total: before.total + 200,
            idle: before.idle + 50,
        };
        assert_eq!(after.busy_since(before), Some(0.75));
        assert_eq!(before.busy_since(before), None);
        assert_eq!(before.busy_since(after), None);
        let backwards = CpuTimes {
            total: before.total + 10,
            idle: before.idle - 5,
        };
        assert_eq!(backwards.busy_since(before), Some(1.0));
    }

    /// CPU time and start time of a process are parsed, whatever characters its name contains.
    #[test]
    fn process_usage_is_parsed_with_any_name() {
        let stat =
            b"7 (a) b) (c) S 1 7 7 0 -1 4194560 100 200 0 0 11 22 33 44 20 0 1 0 5678 1000 2 18446744073709551615 1 1";
        assert_eq!(
            process_usage(stat),
            Some(ProcessUsage {
                cpu_ticks: 110,
                start_ticks: 5678
            })
        );
        assert_eq!(process_usage(b"7 (x) S 1 2 3"), None);
        assert_eq!(process_usage(b"7 x S 1 2 3"), None);
    }

    /// Interrupts of keyboards and mice are summed over all lines and processors.
    #[test]
    fn input_interrupts_are_summed() {
        let text = b"           CPU0       CPU1\n  1:          9         11   IO-APIC   1-edge      i8042\n\
            12:          5          0   IO-APIC  12-edge      i8042\n 16: 1 2 IO-APIC 16-fasteoi ehci_hcd:usb1\n\
            40: 3 4 PCI-MSI 1-edge i2c_HID_acpi\nNMI: 70 80 Non-maskable interrupts\n";
        assert_eq!(input_interrupts(text), Some(9 + 11 + 5 + 3 + 4));
        assert_eq!(
            input_interrupts(b"   CPU0\n 4: 10 IO-APIC 4-edge ttyS0\n"),
            None
        );
        assert_eq!(input_interrupts(b""), None);
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
            assert_eq!(cpu_times(text), None, "{text:?}");
        }
        for text in [
            &b""[..],
            b"0.1",
            b"0.1 0.1 0.1",
            b"0.1 0.1 0.1 x/9 1",
            b"nan 0 0 1/2 3",
            b"-1 0 0 1/2 3",
        ] {
            assert_eq!(loadavg(text), None, "{text:?}");
        }
        assert_eq!(
            available_bytes(b"MemAvailable: 99999999999999999999 kB"),
            None
        );
        assert_eq!(
            available_bytes(b"MemAvailable: 18446744073709551615 kB"),
            None
        );
        assert_eq!(cpu_pressure(b"some avg10=inf"), None);
        assert_eq!(cpu_pressure(b"full avg10=1.0"), None);
    }

    proptest! {
        /// Any bytes are parsed or refused without a panic; the idle time never exceeds the total.
        #[test]
        fn any_bytes_are_accepted(text in prop::collection::vec(any::<u8>(), 0..300), cut in 0..STAT.len()) {
            cpu_times(&text);
            loadavg(&text);
            available_bytes(&text);
            cpu_pressure(&text);
            process_usage(&text);
            input_interrupts(&text);
            let mixed = [&STAT[..cut], &text].concat();
            if let Some((times, _)) = cpu_times(&mixed) {
                prop_assert!(times.idle <= times.total);
            }
        }
    }
}
