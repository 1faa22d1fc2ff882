//! Measures the processor time of programs that do not watch their own clock. A thread reads the
//! kernel's counts of their processes all the time.

use anyhow::{Context, Result};
use sempa_tests::testbed::Host;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Pause between two readings of the counts, and between two searches for processes.
const LOOK: Duration = Duration::from_millis(5);
const SEARCH: Duration = Duration::from_millis(200);
/// Upper bound of samples: enough for one process for some hours.
const SAMPLES_MAX: usize = 4_000_000;

/// The processor time of a process at one time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    /// The time of the reading in microseconds since 1970.
    pub(super) at_us: u64,
    /// Microseconds of processor time, of all its threads.
    pub(super) used_us: Used,
}

/// Microseconds of processor time by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Used {
    /// Used by the program itself.
    pub(super) program: u64,
    /// Used while the process was traced, so by a dump inside of it. The program does not run then.
    pub(super) dump: u64,
    /// Used until the process was seen without memory: the kernel ended it and reclaimed its
    /// memory.
    pub(super) end: u64,
}

/// On whose account a process uses processor time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whose {
    Program,
    /// The process is traced, so its time belongs to the tracer.
    Tracer,
    /// The process has no memory: it is being killed, or is dead.
    Kernel,
}

/// One reading of a process.
#[derive(Clone, Copy, Debug)]
struct Look {
    at_us: u64,
    /// Processor time of the threads that exist, in microseconds.
    counted: u64,
    whose: Whose,
}

/// A process on a host: the host's index, and its own number on this machine.
pub(super) type Process = (u16, u32);

/// All samples, oldest first. Of equal successive samples the first and the last one are kept.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) all: BTreeMap<Process, Vec<Sample>>,
    count: usize,
    last: BTreeMap<Process, Look>,
}

impl Seen {
    /// Adds a reading. The kernel counts for threads that exist: if one ends, the count does not go
    /// back. Time until a reading at which the process was traced, or since one, belongs to the
    /// dump, which begins and ends with a stopped process.
    fn note(&mut self, process: Process, look: Look) {
        let mut used = self
            .all
            .get(&process)
            .and_then(|list| list.last())
            .map_or(Used::default(), |last| last.used_us);
        let last = self.last.insert(process, look);
        let more = look
            .counted
            .saturating_sub(last.map_or(0, |last| last.counted));
        match (look.whose, last.map(|last| last.whose)) {
            (Whose::Kernel, _) => used.end += more,
            (Whose::Tracer, _) | (_, Some(Whose::Tracer)) => used.dump += more,
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

    /// Returns the processor time of each process of a host between these times, as far as it is
    /// certain: from the first reading after the beginning to the last one before the end. Leaves
    /// out processes with fewer than two readings in that time.
    pub(super) fn got_us(&self, host: u16, from: u64, to: u64) -> Vec<(Process, Used)> {
        let of_host = self.all.iter().filter(|((on, _), _)| *on == host);
        of_host
            .filter_map(|(process, samples)| Some((*process, got(samples, from, to)?)))
            .collect()
    }

    /// Returns when a process was seen to have used more time, and how much more, between these
    /// times.
    pub(super) fn steps(&self, process: Process, from: u64, to: u64) -> Vec<(u64, Used)> {
        let samples = self.all.get(&process).map_or(&[][..], Vec::as_slice);
        let pairs = samples
            .iter()
            .zip(samples.iter().skip(1))
            .filter(|(_, after)| (from..=to).contains(&after.at_us));
        let pairs = pairs.map(|(before, after)| (after.at_us, after.used_us.less(before.used_us)));
        pairs.filter(|(_, more)| *more != Used::default()).collect()
    }
}

impl Used {
    fn less(self, before: Used) -> Used {
        Used {
            program: self.program - before.program,
            dump: self.dump - before.dump,
            end: self.end - before.end,
        }
    }
}

/// Returns the certain processor time of one process, as [`Seen::got_us`].
fn got(samples: &[Sample], from: u64, to: u64) -> Option<Used> {
    let first = samples.partition_point(|sample| sample.at_us < from);
    let begin = samples.get(first)?;
    if begin.at_us > to {
        // Of a time without progress only the two ends are kept.
        let before = samples.get(first.checked_sub(1)?)?;
        return (before.used_us == begin.used_us).then(Used::default);
    }
    let last = samples
        .partition_point(|sample| sample.at_us <= to)
        .checked_sub(1)?;
    Some(samples[last].used_us.less(begin.used_us))
}

/// A thread that reads the counts.
pub(super) struct Watch {
    stop: Arc<AtomicBool>,
    looks: JoinHandle<Seen>,
}

impl Watch {
    /// Starts to read the counts of all processes on these hosts whose program name contains
    /// `word`. Hosts are given with their indices.
    pub(super) fn start(hosts: &[(u16, &Host)], word: &'static str) -> Result<Watch> {
        let net = |(index, host): &(u16, &Host)| {
            Ok((
                fs::read_link(format!("/proc/{}/ns/net", host.init()))?,
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
                let (mut seen, mut found, mut searched) = (Seen::default(), find(), Instant::now());
                while !until.load(Ordering::Relaxed) {
                    if searched.elapsed() >= SEARCH {
                        (found, searched) = (find(), Instant::now());
                    }
                    for process in &found {
                        if let Some(look) = look_at(process.1) {
                            seen.note(*process, look);
                        }
                    }
                    std::thread::sleep(LOOK);
                }
                seen
            });
        Ok(Watch {
            stop,
            looks: looks.context("a thread that looks at processes")?,
        })
    }

    /// Ends the thread and returns its samples.
    pub(super) fn end(self) -> Result<Seen> {
        self.stop.store(true, Ordering::Relaxed);
        self.looks
            .join()
            .map_err(|_| anyhow::anyhow!("the thread that looks at processes has died"))
    }
}

/// Reads the counts of a process; `None` if it has ended.
fn look_at(pid: u32) -> Option<Look> {
    let counted = used_us(pid)?;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name));
    let whose = match (field("TracerPid:")?.trim(), field("VmSize:")) {
        (_, None) => Whose::Kernel,
        ("0", _) => Whose::Program,
        _ => Whose::Tracer,
    };
    Some(Look {
        at_us: now_us(),
        counted,
        whose,
    })
}

/// Returns the processor time of all threads of a process, as the kernel's scheduler counts it.
fn used_us(pid: u32) -> Option<u64> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
    let of_thread = |path: PathBuf| {
        let text = fs::read_to_string(path.join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    };
    let all: Vec<u64> = threads
        .filter_map(|thread| of_thread(thread.path()))
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

    /// Returns the samples of one process from readings: time, count, account.
    fn seen(looks: &[(u64, u64, Whose)]) -> Seen {
        let mut seen = Seen::default();
        let note = |(at_us, counted, whose): &(u64, u64, Whose)| {
            seen.note(
                OURS,
                Look {
                    at_us: *at_us,
                    counted: *counted,
                    whose: *whose,
                },
            );
        };
        looks.iter().for_each(note);
        seen
    }

    fn untraced(looks: &[(u64, u64)]) -> Seen {
        seen(
            &looks
                .iter()
                .map(|(at_us, counted)| (*at_us, *counted, Whose::Program))
                .collect::<Vec<_>>(),
        )
    }

    fn program(seen: &Seen, host: u16, from: u64, to: u64) -> Vec<u64> {
        seen.got_us(host, from, to)
            .into_iter()
            .map(|(_, used)| used.program)
            .collect()
    }

    #[test]
    fn what_a_process_got_in_a_time_is_told_as_far_as_it_is_sure() {
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
    fn what_a_dump_does_inside_of_a_process_is_not_the_programs() {
        let seen = seen(&[
            (100, 0, Whose::Program),
            (105, 4, Whose::Program),
            (110, 4, Whose::Program),
            (115, 9, Whose::Tracer),
            (120, 11, Whose::Program),
            (125, 14, Whose::Program),
        ]);
        assert_eq!(
            seen.got_us(2, 100, 125),
            [(
                OURS,
                Used {
                    program: 7,
                    dump: 7,
                    end: 0
                }
            )]
        );
        assert_eq!(
            seen.got_us(2, 105, 120),
            [(
                OURS,
                Used {
                    program: 0,
                    dump: 7,
                    end: 0
                }
            )]
        );
    }

    #[test]
    fn what_the_kernel_does_for_the_end_of_a_process_is_not_the_programs() {
        let looks = [
            (100, 0, Whose::Program),
            (105, 2, Whose::Tracer),
            (110, 5, Whose::Kernel),
            (115, 6, Whose::Kernel),
        ];
        let seen = seen(&looks);
        assert_eq!(
            seen.got_us(2, 100, 115),
            [(
                OURS,
                Used {
                    program: 0,
                    dump: 2,
                    end: 4
                }
            )]
        );
        let more = |at, dump, end| {
            (
                at,
                Used {
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
    fn a_process_that_was_killed_has_no_memory_until_somebody_takes_notice_of_its_end() {
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        assert_eq!(
            look_at(child.id()).map(|look| look.whose),
            Some(Whose::Program)
        );
        child.kill().expect("killed");
        let dead = || {
            look_at(child.id())
                .filter(|look| look.whose == Whose::Kernel)
                .ok_or("it has memory")
        };
        let dead =
            sempa_tests::eventually(Duration::from_secs(60), || dead().map_err(str::to_string));
        child.wait().expect("it has ended");
        dead.expect("killed");
    }

    #[test]
    fn a_process_that_nobody_traces_is_looked_at() {
        let look = look_at(std::process::id()).expect("it runs");
        assert!(look.whose == Whose::Program && look.at_us > 0);
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
