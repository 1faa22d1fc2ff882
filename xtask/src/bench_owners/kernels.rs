//! Measures the processor time of programs that do not record when they run. A thread periodically
//! reads the operating system's counts for the processes of these programs.

use anyhow::{Context, Result};
use procfs::process::Process as ProcFolder;
use sempa_tests::testbed::Host;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Interval between two readings of the counts.
const READING_INTERVAL: Duration = Duration::from_millis(5);
/// Interval between two searches for processes.
const SEARCH_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum number of samples of all processes; enough for some hours of one process.
const SAMPLES_MAX: usize = 4_000_000;

/// The processor time that a process has used from its start until a reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UsageSample {
    /// Time of the reading, in microseconds since 1970.
    pub(super) at_us: u64,
    /// Processor time of all threads of the process, by purpose.
    pub(super) used_us: ProcessorTime,
}

/// Processor time by purpose, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ProcessorTime {
    /// Processor time of the program itself.
    pub(super) program_us: u64,
    /// Processor time while the process was traced. In that time a dump runs inside the process,
    /// and the program does not run.
    pub(super) dump_us: u64,
    /// Processor time until the first reading at which the process has no memory: the operating
    /// system has ended the process and reclaimed its memory.
    pub(super) exit_us: u64,
}

/// The purpose to which the processor time of a process is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TimePurpose {
    /// The process is not traced and has memory, so its time is used by the program.
    Program,
    /// The process is traced, so its time is used by a dump.
    Dump,
    /// The process has no memory, because it is being killed or is dead.
    Exit,
}

/// A reading of the counts of one process.
#[derive(Clone, Copy, Debug)]
struct CountReading {
    at_us: u64,
    /// Processor time in microseconds of the threads that exist at the time of the reading.
    counted_us: u64,
    purpose: TimePurpose,
}

/// A process on a host, as (index of the host, process number on this machine).
pub(super) type HostProcess = (u16, u32);

/// All samples by process, oldest first. Of several equal successive samples, only the first and
/// the last are retained.
#[derive(Debug, Default)]
pub(super) struct ProcessSamples {
    pub(super) samples: BTreeMap<HostProcess, Vec<UsageSample>>,
    sample_count: usize,
    last_readings: BTreeMap<HostProcess, CountReading>,
}

impl ProcessSamples {
    /// Adds a reading to the samples of a process. The operating system counts only existing
    /// threads. If a thread has ended and the count is lower, the recorded time does not decrease.
    /// The time immediately before and after a reading of a traced process belongs to the dump,
    /// because the process is stopped at the start and at the end of a dump.
    fn add_reading(&mut self, process: HostProcess, reading: CountReading) {
        let mut used_time = self
            .samples
            .get(&process)
            .and_then(|process_samples| process_samples.last())
            .map_or(ProcessorTime::default(), |previous_reading| {
                previous_reading.used_us
            });
        let previous_reading = self.last_readings.insert(process, reading);
        let increment_us = reading.counted_us.saturating_sub(
            previous_reading.map_or(0, |previous_reading| previous_reading.counted_us),
        );
        match (
            reading.purpose,
            previous_reading.map(|previous_reading| previous_reading.purpose),
        ) {
            (TimePurpose::Exit, _) => used_time.exit_us += increment_us,
            (TimePurpose::Dump, _) | (_, Some(TimePurpose::Dump)) => {
                used_time.dump_us += increment_us
            }
            _ => used_time.program_us += increment_us,
        }
        let sample = UsageSample {
            at_us: reading.at_us,
            used_us: used_time,
        };
        let process_samples = self.samples.entry(process).or_default();
        if let [.., second_last, previous_reading] = process_samples.as_mut_slice()
            && second_last.used_us == sample.used_us
            && previous_reading.used_us == sample.used_us
        {
            previous_reading.at_us = sample.at_us;
        } else if self.sample_count < SAMPLES_MAX {
            self.sample_count += 1;
            process_samples.push(sample);
        }
    }

    /// Returns the processor time that each process of a host has certainly used between two times:
    /// from the first reading after `start_us` to the last reading before `end_us`. Processes with
    /// fewer than two readings in this period are omitted.
    pub(super) fn processor_time_between(
        &self,
        host: u16,
        start_us: u64,
        end_us: u64,
    ) -> Vec<(HostProcess, ProcessorTime)> {
        let host_samples = self
            .samples
            .iter()
            .filter(|((host_index, _), _)| *host_index == host);
        host_samples
            .filter_map(|(process, samples)| {
                Some((*process, certain_processor_time(samples, start_us, end_us)?))
            })
            .collect()
    }

    /// Returns the readings between `start_us` and `end_us` at which a process had used more
    /// processor time than at the previous reading: the time of the reading and the difference.
    pub(super) fn usage_increments(
        &self,
        process: HostProcess,
        start_us: u64,
        end_us: u64,
    ) -> Vec<(u64, ProcessorTime)> {
        let samples = self.samples.get(&process).map_or(&[][..], Vec::as_slice);
        let pairs = samples
            .iter()
            .zip(samples.iter().skip(1))
            .filter(|(_, later_sample)| (start_us..=end_us).contains(&later_sample.at_us));
        let pairs = pairs.map(|(earlier_sample, later_sample)| {
            (
                later_sample.at_us,
                later_sample.used_us.minus(earlier_sample.used_us),
            )
        });
        pairs
            .filter(|(_, increment)| *increment != ProcessorTime::default())
            .collect()
    }
}

impl ProcessorTime {
    fn minus(self, earlier: Self) -> Self {
        Self {
            program_us: self.program_us - earlier.program_us,
            dump_us: self.dump_us - earlier.dump_us,
            exit_us: self.exit_us - earlier.exit_us,
        }
    }
}

/// Returns the processor time that one process has certainly used between two times, as described
/// at [`ProcessSamples::processor_time_between`]; `None` if there are too few readings.
fn certain_processor_time(
    samples: &[UsageSample],
    start_us: u64,
    end_us: u64,
) -> Option<ProcessorTime> {
    let first_index = samples.partition_point(|sample| sample.at_us < start_us);
    let first_sample = samples.get(first_index)?;
    if first_sample.at_us > end_us {
        // If the counts do not change for some time, only the first and the last sample of the
        // period are retained.
        let previous_sample = samples.get(first_index.checked_sub(1)?)?;
        return (previous_sample.used_us == first_sample.used_us).then(ProcessorTime::default);
    }
    let last_index = samples
        .partition_point(|sample| sample.at_us <= end_us)
        .checked_sub(1)?;
    Some(samples[last_index].used_us.minus(first_sample.used_us))
}

/// A thread that reads the counts of processes.
pub(super) struct SamplingThread {
    stop_flag: Arc<AtomicBool>,
    join_handle: JoinHandle<ProcessSamples>,
}

impl SamplingThread {
    /// Starts a thread that reads the counts of all processes on `hosts` whose program name
    /// contains `name_part`. `hosts` are pairs of host index and host.
    pub(super) fn start(hosts: &[(u16, &Host)], name_part: &'static str) -> Result<Self> {
        let net_namespace = |(index, host): &(u16, &Host)| {
            Ok((
                fs::read_link(format!("/proc/{}/ns/net", host.init_pid()))?,
                *index,
            ))
        };
        let host_by_namespace: BTreeMap<PathBuf, u16> =
            hosts.iter().map(net_namespace).collect::<Result<_>>()?;
        let stop_flag_arg = Arc::new(AtomicBool::new(false));
        let thread_stop_flag = stop_flag_arg.clone();
        let spawn_result = std::thread::Builder::new()
            .name("looks".into())
            .spawn(move || {
                let find_processes = || {
                    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
                    let pids =
                        entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
                    let matching_pids = pids.filter(|pid| {
                        let command_line =
                            fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                        String::from_utf8_lossy(&command_line)
                            .split('\0')
                            .next()
                            .is_some_and(|program| program.contains(name_part))
                    });
                    let host_process = |pid: u32| {
                        Some((
                            *host_by_namespace
                                .get(&fs::read_link(format!("/proc/{pid}/ns/net")).ok()?)?,
                            pid,
                        ))
                    };
                    matching_pids
                        .filter_map(host_process)
                        .collect::<BTreeSet<HostProcess>>()
                };
                let (mut samples, mut processes, mut last_search) =
                    (ProcessSamples::default(), find_processes(), Instant::now());
                while !thread_stop_flag.load(Ordering::Relaxed) {
                    if last_search.elapsed() >= SEARCH_INTERVAL {
                        (processes, last_search) = (find_processes(), Instant::now());
                    }
                    for process in &processes {
                        if let Some(reading) = read_counts(process.1) {
                            samples.add_reading(*process, reading);
                        }
                    }
                    std::thread::sleep(READING_INTERVAL);
                }
                samples
            });
        Ok(Self {
            stop_flag: stop_flag_arg,
            join_handle: spawn_result.context("a thread that looks at processes")?,
        })
    }

    /// Stops the thread, waits for its end and returns its samples.
    pub(super) fn stop_and_wait(self) -> Result<ProcessSamples> {
        self.stop_flag.store(true, Ordering::Relaxed);
        self.join_handle
            .join()
            .map_err(|_| anyhow::anyhow!("the thread that looks at processes has died"))
    }
}

/// Reads the counts of a process; `None` if the process has ended.
fn read_counts(pid: u32) -> Option<CountReading> {
    let count_us = processor_time_us(pid)?;
    let status = ProcFolder::new(pid.cast_signed()).ok()?.status().ok()?;
    let time_purpose = match (status.tracerpid, status.vmsize) {
        (_, None) => TimePurpose::Exit,
        (0, _) => TimePurpose::Program,
        _ => TimePurpose::Dump,
    };
    Some(CountReading {
        at_us: now_us(),
        counted_us: count_us,
        purpose: time_purpose,
    })
}

/// Returns the processor time of all threads of a process in microseconds, as counted by the
/// operating system's scheduler; `None` if the process has ended.
fn processor_time_us(pid: u32) -> Option<u64> {
    let threads = ProcFolder::new(pid.cast_signed()).ok()?.tasks().ok()?;
    let times = threads.flatten().map(|thread| thread.schedstat());
    let thread_times_ns: Vec<u64> = times
        .flatten()
        .map(|times| times.sum_exec_runtime)
        .collect();
    (!thread_times_ns.is_empty()).then(|| thread_times_ns.iter().sum::<u64>() / 1000)
}

pub(super) fn now_us() -> u64 {
    let time_since_epoch = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(time_since_epoch.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST_PROCESS: HostProcess = (2, 77);

    /// Returns the samples of one process. `readings` are its readings, as (time, count, purpose).
    fn samples_from_readings(readings: &[(u64, u64, TimePurpose)]) -> ProcessSamples {
        let mut samples = ProcessSamples::default();
        let add_to_samples = |(at_us, count_us, time_purpose): &(u64, u64, TimePurpose)| {
            samples.add_reading(
                TEST_PROCESS,
                CountReading {
                    at_us: *at_us,
                    counted_us: *count_us,
                    purpose: *time_purpose,
                },
            );
        };
        readings.iter().for_each(add_to_samples);
        samples
    }

    fn untraced_samples(readings: &[(u64, u64)]) -> ProcessSamples {
        samples_from_readings(
            &readings
                .iter()
                .map(|(at_us, count_us)| (*at_us, *count_us, TimePurpose::Program))
                .collect::<Vec<_>>(),
        )
    }

    fn program_times(samples: &ProcessSamples, host: u16, start_us: u64, end_us: u64) -> Vec<u64> {
        samples
            .processor_time_between(host, start_us, end_us)
            .into_iter()
            .map(|(_, processor_time)| processor_time.program_us)
            .collect()
    }

    #[test]
    fn only_certain_processor_time_is_returned() {
        let samples = untraced_samples(&[
            (100, 10),
            (105, 14),
            (110, 14),
            (115, 14),
            (120, 14),
            (125, 19),
            (130, 19),
        ]);
        assert_eq!(
            samples.samples[&TEST_PROCESS].len(),
            5,
            "those in the middle of a standstill say nothing"
        );
        assert_eq!(program_times(&samples, 2, 100, 130), [9]);
        assert_eq!(
            program_times(&samples, 2, 101, 124),
            [0],
            "from 105 to 120 it was paused"
        );
        assert_eq!(
            program_times(&samples, 2, 106, 118),
            [0],
            "nobody has to have looked just then"
        );
        assert_eq!(program_times(&samples, 2, 112, 128), [5], "from 120 on");
        assert_eq!(
            program_times(&samples, 1, 100, 130),
            [0; 0],
            "on the other host it is not"
        );
        assert_eq!(
            program_times(&samples, 2, 131, 140),
            [0; 0],
            "nobody has looked"
        );
    }

    /// If a thread has ended, the sum over the existing threads is lower, but the used time is not.
    #[test]
    fn end_of_thread_does_not_decrease_time() {
        let samples = untraced_samples(&[(100, 30), (105, 40), (110, 25), (115, 27)]);
        assert_eq!(program_times(&samples, 2, 100, 105), [10]);
        assert_eq!(
            program_times(&samples, 2, 105, 115),
            [2],
            "of the one that is left"
        );
        assert_eq!(program_times(&samples, 2, 100, 115), [12]);
    }

    #[test]
    fn time_of_dump_is_not_the_programs() {
        let samples = samples_from_readings(&[
            (100, 0, TimePurpose::Program),
            (105, 4, TimePurpose::Program),
            (110, 4, TimePurpose::Program),
            (115, 9, TimePurpose::Dump),
            (120, 11, TimePurpose::Program),
            (125, 14, TimePurpose::Program),
        ]);
        assert_eq!(
            samples.processor_time_between(2, 100, 125),
            [(
                TEST_PROCESS,
                ProcessorTime {
                    program_us: 7,
                    dump_us: 7,
                    exit_us: 0
                }
            )]
        );
        assert_eq!(
            samples.processor_time_between(2, 105, 120),
            [(
                TEST_PROCESS,
                ProcessorTime {
                    program_us: 0,
                    dump_us: 7,
                    exit_us: 0
                }
            )]
        );
    }

    #[test]
    fn time_of_exit_is_not_the_programs() {
        let readings = [
            (100, 0, TimePurpose::Program),
            (105, 2, TimePurpose::Dump),
            (110, 5, TimePurpose::Exit),
            (115, 6, TimePurpose::Exit),
        ];
        let samples = samples_from_readings(&readings);
        assert_eq!(
            samples.processor_time_between(2, 100, 115),
            [(
                TEST_PROCESS,
                ProcessorTime {
                    program_us: 0,
                    dump_us: 2,
                    exit_us: 4
                }
            )]
        );
        let increment = |at, dump, end| {
            (
                at,
                ProcessorTime {
                    program_us: 0,
                    dump_us: dump,
                    exit_us: end,
                },
            )
        };
        assert_eq!(
            samples.usage_increments(TEST_PROCESS, 100, 115),
            [
                increment(105, 2, 0),
                increment(110, 0, 3),
                increment(115, 0, 1)
            ]
        );
        assert_eq!(
            samples.usage_increments(TEST_PROCESS, 106, 110),
            [increment(110, 0, 3)]
        );
    }

    #[test]
    fn killed_process_has_no_memory_until_reaped() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        assert_eq!(
            read_counts(child.id()).map(|reading| reading.purpose),
            Some(TimePurpose::Program)
        );
        child.kill().expect("killed");
        let check_memory_released = || {
            read_counts(child.id())
                .filter(|reading| reading.purpose == TimePurpose::Exit)
                .ok_or("it has memory")
        };
        let memory_release_result = sempa_tests::wait_for(Duration::from_secs(60), || {
            check_memory_released().map_err(str::to_string)
        });
        child.wait().expect("it has ended");
        memory_release_result.expect("killed");
    }

    /// The process of this test is not traced, so its time is the program's.
    #[test]
    fn untraced_process_counts_as_program() {
        let reading = read_counts(std::process::id()).expect("it runs");
        assert!(reading.purpose == TimePurpose::Program && reading.at_us > 0);
    }

    /// The count grows while this process computes.
    #[test]
    fn processor_time_of_this_process_is_counted() {
        let pid = std::process::id();
        let start_us = processor_time_us(pid).expect("it runs");
        let start = Instant::now();
        while processor_time_us(pid).expect("it runs") < start_us + 1000 {
            assert!(
                start.elapsed() < Duration::from_secs(60),
                "it computes and is not counted"
            );
        }
    }
}
