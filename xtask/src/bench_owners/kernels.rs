//! Measures the processor time of programs that do not record when they run. A thread reads the
//! operating system's counts of their processes all the time.

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
/// Maximum number of samples: enough for one process for some hours.
const SAMPLES_MAX: usize = 4_000_000;

/// The processor time that a process had used until a reading.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    /// Time of the reading, in microseconds since 1970.
    pub(super) at_us: u64,
    /// Processor time of all threads of the process.
    pub(super) used_us: ProcessorTime,
}

/// Processor time by purpose, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ProcessorTime {
    /// Processor time of the program itself.
    pub(super) program: u64,
    /// Processor time while the process was traced, that is, of a dump inside the process. The
    /// program does not run in that time.
    pub(super) dump: u64,
    /// Processor time until the first reading without memory: the operating system ended the
    /// process and reclaimed its memory.
    pub(super) end: u64,
}

/// To which purpose the processor time of a process is added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TimePurpose {
    Program,
    /// The process is traced, so its time is that of a dump.
    Tracer,
    /// The process has no memory: it is being killed, or is dead.
    Kernel,
}

/// A reading of the counts of one process.
#[derive(Clone, Copy, Debug)]
struct Reading {
    at_us: u64,
    /// Processor time of the threads that exist at the reading, in microseconds.
    counted: u64,
    whose: TimePurpose,
}

/// A process on a host, as (index of the host, process number on this machine).
pub(super) type Process = (u16, u32);

/// All samples by process, oldest first. Of several equal successive samples, only the first and
/// the last one are retained.
#[derive(Debug, Default)]
pub(super) struct ProcessSamples {
    pub(super) all: BTreeMap<Process, Vec<Sample>>,
    count: usize,
    last: BTreeMap<Process, Reading>,
}

impl ProcessSamples {
    /// Adds a reading. The operating system counts only threads that exist; if a thread has ended,
    /// the sum does not decrease. The time before or after a reading of a traced process belongs to
    /// the dump, because the process is stopped at the begin and at the end of a dump.
    fn add_reading(&mut self, process: Process, look: Reading) {
        let mut used = self
            .all
            .get(&process)
            .and_then(|list| list.last())
            .map_or(ProcessorTime::default(), |last| last.used_us);
        let last = self.last.insert(process, look);
        let more = look
            .counted
            .saturating_sub(last.map_or(0, |last| last.counted));
        match (look.whose, last.map(|last| last.whose)) {
            (TimePurpose::Kernel, _) => used.end += more,
            (TimePurpose::Tracer, _) | (_, Some(TimePurpose::Tracer)) => used.dump += more,
            _ => used.program += more,
        }
        let sample = Sample {
            at_us: look.at_us,
            used_us: used,
        };
        let list = self.all.entry(process).or_default();
        if let [.., before, last] = list.as_mut_slice()
            && before.used_us == sample.used_us
            && last.used_us == sample.used_us
        {
            last.at_us = sample.at_us;
        } else if self.count < SAMPLES_MAX {
            self.count += 1;
            list.push(sample);
        }
    }

    /// Returns the processor time of each process of a host between two times, as far as it is
    /// certain: from the first reading after `from` to the last reading before `to`. Omits
    /// processes with fewer than two readings in between.
    pub(super) fn processor_time_between(
        &self,
        host: u16,
        from: u64,
        to: u64,
    ) -> Vec<(Process, ProcessorTime)> {
        let of_host = self.all.iter().filter(|((on, _), _)| *on == host);
        of_host
            .filter_map(|(process, samples)| {
                Some((*process, certain_processor_time(samples, from, to)?))
            })
            .collect()
    }

    /// Returns the readings between two times at which a process had used more processor time than
    /// before, each with the difference.
    pub(super) fn steps(&self, process: Process, from: u64, to: u64) -> Vec<(u64, ProcessorTime)> {
        let samples = self.all.get(&process).map_or(&[][..], Vec::as_slice);
        let pairs = samples
            .iter()
            .zip(samples.iter().skip(1))
            .filter(|(_, after)| (from..=to).contains(&after.at_us));
        let pairs = pairs.map(|(before, after)| (after.at_us, after.used_us.minus(before.used_us)));
        pairs
            .filter(|(_, more)| *more != ProcessorTime::default())
            .collect()
    }
}

impl ProcessorTime {
    fn minus(self, before: ProcessorTime) -> ProcessorTime {
        ProcessorTime {
            program: self.program - before.program,
            dump: self.dump - before.dump,
            end: self.end - before.end,
        }
    }
}

/// Returns the certain processor time of one process between two times; see
/// [`ProcessSamples::processor_time_between`].
fn certain_processor_time(samples: &[Sample], from: u64, to: u64) -> Option<ProcessorTime> {
    let first = samples.partition_point(|sample| sample.at_us < from);
    let begin = samples.get(first)?;
    if begin.at_us > to {
        // If the counts do not change for some time, only the first and the last sample of that
        // time are retained.
        let before = samples.get(first.checked_sub(1)?)?;
        return (before.used_us == begin.used_us).then(ProcessorTime::default);
    }
    let last = samples
        .partition_point(|sample| sample.at_us <= to)
        .checked_sub(1)?;
    Some(samples[last].used_us.minus(begin.used_us))
}

/// A thread that reads the counts of processes.
pub(super) struct SamplingThread {
    stop: Arc<AtomicBool>,
    looks: JoinHandle<ProcessSamples>,
}

impl SamplingThread {
    /// Starts a thread that reads the counts of all processes on these hosts whose program name
    /// contains `word`. `hosts` are (index, host).
    pub(super) fn start(hosts: &[(u16, &Host)], word: &'static str) -> Result<SamplingThread> {
        let net = |(index, host): &(u16, &Host)| {
            Ok((
                fs::read_link(format!("/proc/{}/ns/net", host.init_pid()))?,
                *index,
            ))
        };
        let nets: BTreeMap<PathBuf, u16> = hosts.iter().map(net).collect::<Result<_>>()?;
        let stop = Arc::new(AtomicBool::new(false));
        let until = stop.clone();
        let looks = std::thread::Builder::new()
            .name("looks".into())
            .spawn(move || {
                let find = || {
                    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
                    let pids =
                        entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
                    let with_word = pids.filter(|pid| {
                        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                        String::from_utf8_lossy(&line)
                            .split('\0')
                            .next()
                            .is_some_and(|program| program.contains(word))
                    });
                    let on_host = |pid: u32| {
                        Some((
                            *nets.get(&fs::read_link(format!("/proc/{pid}/ns/net")).ok()?)?,
                            pid,
                        ))
                    };
                    with_word.filter_map(on_host).collect::<BTreeSet<Process>>()
                };
                let (mut seen, mut found, mut searched) =
                    (ProcessSamples::default(), find(), Instant::now());
                while !until.load(Ordering::Relaxed) {
                    if searched.elapsed() >= SEARCH_INTERVAL {
                        (found, searched) = (find(), Instant::now());
                    }
                    for process in &found {
                        if let Some(look) = read_counts(process.1) {
                            seen.add_reading(*process, look);
                        }
                    }
                    std::thread::sleep(READING_INTERVAL);
                }
                seen
            });
        Ok(SamplingThread {
            stop,
            looks: looks.context("a thread that looks at processes")?,
        })
    }

    /// Ends the thread. Returns its samples.
    pub(super) fn end(self) -> Result<ProcessSamples> {
        self.stop.store(true, Ordering::Relaxed);
        self.looks
            .join()
            .map_err(|_| anyhow::anyhow!("the thread that looks at processes has died"))
    }
}

/// Reads the counts of a process. Returns `None` if the process has ended.
fn read_counts(pid: u32) -> Option<Reading> {
    let counted = used_us(pid)?;
    let status = ProcFolder::new(pid.cast_signed()).ok()?.status().ok()?;
    let whose = match (status.tracerpid, status.vmsize) {
        (_, None) => TimePurpose::Kernel,
        (0, _) => TimePurpose::Program,
        _ => TimePurpose::Tracer,
    };
    Some(Reading {
        at_us: now_us(),
        counted,
        whose,
    })
}

/// Returns the processor time of all threads of a process in microseconds, as the scheduler of the
/// operating system counts it.
fn used_us(pid: u32) -> Option<u64> {
    let threads = ProcFolder::new(pid.cast_signed()).ok()?.tasks().ok()?;
    let times = threads.flatten().map(|thread| thread.schedstat());
    let all: Vec<u64> = times
        .flatten()
        .map(|times| times.sum_exec_runtime)
        .collect();
    (!all.is_empty()).then(|| all.iter().sum::<u64>() / 1000)
}

pub(super) fn now_us() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Process = (2, 77);

    /// Returns the samples of one process, from readings as (time, count, purpose).
    fn seen(looks: &[(u64, u64, TimePurpose)]) -> ProcessSamples {
        let mut seen = ProcessSamples::default();
        let note = |(at_us, counted, whose): &(u64, u64, TimePurpose)| {
            seen.add_reading(
                OURS,
                Reading {
                    at_us: *at_us,
                    counted: *counted,
                    whose: *whose,
                },
            );
        };
        looks.iter().for_each(note);
        seen
    }

    fn untraced(looks: &[(u64, u64)]) -> ProcessSamples {
        seen(
            &looks
                .iter()
                .map(|(at_us, counted)| (*at_us, *counted, TimePurpose::Program))
                .collect::<Vec<_>>(),
        )
    }

    fn program(seen: &ProcessSamples, host: u16, from: u64, to: u64) -> Vec<u64> {
        seen.processor_time_between(host, from, to)
            .into_iter()
            .map(|(_, used)| used.program)
            .collect()
    }

    #[test]
    fn only_certain_processor_time_is_returned() {
        let seen = untraced(&[
            (100, 10),
            (105, 14),
            (110, 14),
            (115, 14),
            (120, 14),
            (125, 19),
            (130, 19),
        ]);
        assert_eq!(
            seen.all[&OURS].len(),
            5,
            "those in the middle of a standstill say nothing"
        );
        assert_eq!(program(&seen, 2, 100, 130), [9]);
        assert_eq!(
            program(&seen, 2, 101, 124),
            [0],
            "from 105 to 120 it was paused"
        );
        assert_eq!(
            program(&seen, 2, 106, 118),
            [0],
            "nobody has to have looked just then"
        );
        assert_eq!(program(&seen, 2, 112, 128), [5], "from 120 on");
        assert_eq!(
            program(&seen, 1, 100, 130),
            [0; 0],
            "on the other host it is not"
        );
        assert_eq!(program(&seen, 2, 131, 140), [0; 0], "nobody has looked");
    }

    #[test]
    fn a_thread_that_ends_takes_nothing_back() {
        let seen = untraced(&[(100, 30), (105, 40), (110, 25), (115, 27)]);
        assert_eq!(program(&seen, 2, 100, 105), [10]);
        assert_eq!(program(&seen, 2, 105, 115), [2], "of the one that is left");
        assert_eq!(program(&seen, 2, 100, 115), [12]);
    }

    #[test]
    fn time_of_dump_is_not_the_programs() {
        let seen = seen(&[
            (100, 0, TimePurpose::Program),
            (105, 4, TimePurpose::Program),
            (110, 4, TimePurpose::Program),
            (115, 9, TimePurpose::Tracer),
            (120, 11, TimePurpose::Program),
            (125, 14, TimePurpose::Program),
        ]);
        assert_eq!(
            seen.processor_time_between(2, 100, 125),
            [(
                OURS,
                ProcessorTime {
                    program: 7,
                    dump: 7,
                    end: 0
                }
            )]
        );
        assert_eq!(
            seen.processor_time_between(2, 105, 120),
            [(
                OURS,
                ProcessorTime {
                    program: 0,
                    dump: 7,
                    end: 0
                }
            )]
        );
    }

    #[test]
    fn time_of_exit_is_not_the_programs() {
        let looks = [
            (100, 0, TimePurpose::Program),
            (105, 2, TimePurpose::Tracer),
            (110, 5, TimePurpose::Kernel),
            (115, 6, TimePurpose::Kernel),
        ];
        let seen = seen(&looks);
        assert_eq!(
            seen.processor_time_between(2, 100, 115),
            [(
                OURS,
                ProcessorTime {
                    program: 0,
                    dump: 2,
                    end: 4
                }
            )]
        );
        let more = |at, dump, end| {
            (
                at,
                ProcessorTime {
                    program: 0,
                    dump,
                    end,
                },
            )
        };
        assert_eq!(
            seen.steps(OURS, 100, 115),
            [more(105, 2, 0), more(110, 0, 3), more(115, 0, 1)]
        );
        assert_eq!(seen.steps(OURS, 106, 110), [more(110, 0, 3)]);
    }

    #[test]
    fn killed_process_has_no_memory_until_reaped() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        assert_eq!(
            read_counts(child.id()).map(|look| look.whose),
            Some(TimePurpose::Program)
        );
        child.kill().expect("killed");
        let dead = || {
            read_counts(child.id())
                .filter(|look| look.whose == TimePurpose::Kernel)
                .ok_or("it has memory")
        };
        let dead =
            sempa_tests::wait_for(Duration::from_secs(60), || dead().map_err(str::to_string));
        child.wait().expect("it has ended");
        dead.expect("killed");
    }

    #[test]
    fn a_process_that_nobody_traces_is_looked_at() {
        let look = read_counts(std::process::id()).expect("it runs");
        assert!(look.whose == TimePurpose::Program && look.at_us > 0);
    }

    #[test]
    fn the_time_that_this_process_takes_is_counted() {
        let pid = std::process::id();
        let before = used_us(pid).expect("it runs");
        let begin = Instant::now();
        while used_us(pid).expect("it runs") < before + 1000 {
            assert!(
                begin.elapsed() < Duration::from_secs(60),
                "it computes and is not counted"
            );
        }
    }
}
