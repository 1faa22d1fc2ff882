//! What processes of a program that does not watch its own clock get of the processors: the kernel counts it, and somebody
//! looks at the counts all the time.

use anyhow::{Context, Result};
use sempa_tests::testbed::Host;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// Pause between two looks at the counts, and between two looks for processes.
const LOOK: Duration = Duration::from_millis(5);
const SEARCH: Duration = Duration::from_millis(200);
/// Samples at most: of one at a time, some hours.
const SAMPLES_MAX: usize = 4_000_000;

/// What a process has used by then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sample {
    /// Microseconds since 1970.
    pub(super) at_us: u64,
    /// Microseconds of processor time, of all its threads.
    pub(super) used_us: Used,
}

/// Microseconds of processor time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Used {
    /// The program's.
    pub(super) program: u64,
    /// While a tracer had the process in its hands: what a dump does inside of it. The program does not run then.
    pub(super) dump: u64,
}

/// A look at a process.
#[derive(Clone, Copy, Debug)]
struct Look {
    at_us: u64,
    /// Microseconds of the threads that are there.
    counted: u64,
    traced: bool,
}

/// A process on a host: the host's index, and its own number on this machine.
pub(super) type Process = (u16, u32);

/// All that was seen, oldest first. Of samples that say the same the first and the last one are kept.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) all: BTreeMap<Process, Vec<Sample>>,
    count: usize,
    last: BTreeMap<Process, Look>,
}

impl Seen {
    /// The kernel counts for threads that are there: one that has ended takes nothing back. What a process used until a look at
    /// which it was traced, or since one, is the dump's: it begins with a process that stands still.
    fn note(&mut self, process: Process, look: Look) {
        let mut used = self.all.get(&process).and_then(|list| list.last()).map_or(Used::default(), |last| last.used_us);
        let last = self.last.insert(process, look);
        let more = look.counted.saturating_sub(last.map_or(0, |last| last.counted));
        if look.traced || last.is_some_and(|last| last.traced) {
            used.dump += more;
        } else {
            used.program += more;
        }
        let sample = Sample { at_us: look.at_us, used_us: used };
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

    /// What each process of a host got between these times, as far as that is sure: from the first look behind the beginning
    /// to the last one before the end. None of a process at which nobody looked twice in that time.
    pub(super) fn got_us(&self, host: u16, from: u64, to: u64) -> Vec<Used> {
        let of_host = self.all.iter().filter(|((on, _), _)| *on == host).map(|(_, samples)| samples);
        of_host.filter_map(|samples| got(samples, from, to)).collect()
    }
}

/// See [`Seen::got_us`].
fn got(samples: &[Sample], from: u64, to: u64) -> Option<Used> {
    let first = samples.partition_point(|sample| sample.at_us < from);
    let begin = samples.get(first)?;
    if begin.at_us > to {
        // Of a standstill only the two ends are kept.
        let before = samples.get(first.checked_sub(1)?)?;
        return (before.used_us == begin.used_us).then(Used::default);
    }
    let last = samples.partition_point(|sample| sample.at_us <= to).checked_sub(1)?;
    let (last, begin) = (samples[last].used_us, begin.used_us);
    Some(Used { program: last.program - begin.program, dump: last.dump - begin.dump })
}

/// Somebody who looks.
pub(super) struct Watch {
    stop: Arc<AtomicBool>,
    looks: JoinHandle<Seen>,
}

impl Watch {
    /// Looks at all processes whose program's name has this word, on these hosts by their indices.
    pub(super) fn start(hosts: &[(u16, &Host)], word: &'static str) -> Result<Watch> {
        let net = |(index, host): &(u16, &Host)| Ok((fs::read_link(format!("/proc/{}/ns/net", host.init()))?, *index));
        let nets: BTreeMap<PathBuf, u16> = hosts.iter().map(net).collect::<Result<_>>()?;
        let stop = Arc::new(AtomicBool::new(false));
        let until = stop.clone();
        let looks = std::thread::Builder::new().name("looks".into()).spawn(move || {
            let find = || {
                let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
                let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
                let with_word = pids.filter(|pid| {
                    let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                    String::from_utf8_lossy(&line).split('\0').next().is_some_and(|program| program.contains(word))
                });
                let on_host = |pid: u32| Some((*nets.get(&fs::read_link(format!("/proc/{pid}/ns/net")).ok()?)?, pid));
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
        Ok(Watch { stop, looks: looks.context("a thread that looks at processes")? })
    }

    /// Ends it; what was seen.
    pub(super) fn end(self) -> Result<Seen> {
        self.stop.store(true, Ordering::Relaxed);
        self.looks.join().map_err(|_| anyhow::anyhow!("the thread that looks at processes has died"))
    }
}

/// A look at a process, if it is there.
fn look_at(pid: u32) -> Option<Look> {
    let counted = used_us(pid)?;
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let tracer = status.lines().find_map(|line| line.strip_prefix("TracerPid:"))?;
    Some(Look { at_us: now_us(), counted, traced: tracer.trim() != "0" })
}

/// Processor time of all threads of a process, as the kernel's scheduler counts it.
fn used_us(pid: u32) -> Option<u64> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?.flatten();
    let of_thread = |path: PathBuf| {
        let text = fs::read_to_string(path.join("schedstat")).ok()?;
        text.split(' ').next()?.parse::<u64>().ok()
    };
    let all: Vec<u64> = threads.filter_map(|thread| of_thread(thread.path())).collect();
    (!all.is_empty()).then(|| all.iter().sum::<u64>() / 1000)
}

pub(super) fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Looks: when, what was counted, whether there was a tracer.
    fn seen(looks: &[(u64, u64, bool)]) -> Seen {
        let mut seen = Seen::default();
        let note = |(at_us, counted, traced): &(u64, u64, bool)| {
            seen.note((2, 77), Look { at_us: *at_us, counted: *counted, traced: *traced });
        };
        looks.iter().for_each(note);
        seen
    }

    fn untraced(looks: &[(u64, u64)]) -> Seen {
        seen(&looks.iter().map(|(at_us, counted)| (*at_us, *counted, false)).collect::<Vec<_>>())
    }

    fn program(seen: &Seen, host: u16, from: u64, to: u64) -> Vec<u64> {
        seen.got_us(host, from, to).into_iter().map(|used| used.program).collect()
    }

    #[test]
    fn what_a_process_got_in_a_time_is_told_as_far_as_it_is_sure() {
        let seen = untraced(&[(100, 10), (105, 14), (110, 14), (115, 14), (120, 14), (125, 19), (130, 19)]);
        assert_eq!(seen.all[&(2, 77)].len(), 5, "those in the middle of a standstill say nothing");
        assert_eq!(program(&seen, 2, 100, 130), [9]);
        assert_eq!(program(&seen, 2, 101, 124), [0], "from 105 to 120 it stood still");
        assert_eq!(program(&seen, 2, 106, 118), [0], "nobody has to have looked just then");
        assert_eq!(program(&seen, 2, 112, 128), [5], "from 120 on");
        assert_eq!(program(&seen, 1, 100, 130), [0; 0], "on the other host it is not");
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
            (100, 0, false),
            (105, 4, false),
            (110, 4, false),
            (115, 9, true),
            (120, 11, false),
            (125, 14, false),
        ]);
        assert_eq!(seen.got_us(2, 100, 125), [Used { program: 7, dump: 7 }]);
        assert_eq!(seen.got_us(2, 105, 120), [Used { program: 0, dump: 7 }]);
    }

    #[test]
    fn a_process_that_nobody_traces_is_looked_at() {
        let look = look_at(std::process::id()).expect("it runs");
        assert!(!look.traced && look.at_us > 0);
    }

    #[test]
    fn the_time_that_this_process_takes_is_counted() {
        let pid = std::process::id();
        let before = used_us(pid).expect("it runs");
        let begin = Instant::now();
        while used_us(pid).expect("it runs") < before + 1000 {
            assert!(begin.elapsed() < Duration::from_secs(60), "it computes and is not counted");
        }
    }
}
