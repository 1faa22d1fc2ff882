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
    pub(super) used_us: u64,
}

/// A process on a host: the host's index, and its own number on this machine.
pub(super) type Process = (u16, u32);

/// All that was seen, oldest first. Of samples that say the same the first and the last one are kept.
#[derive(Debug, Default)]
pub(super) struct Seen {
    pub(super) all: BTreeMap<Process, Vec<Sample>>,
    count: usize,
    /// What threads had used that have ended since, by the last count with them.
    ended: BTreeMap<Process, Ended>,
}

/// The kernel counts for threads that are there.
#[derive(Debug, Default)]
struct Ended {
    counted: u64,
    before: u64,
}

impl Seen {
    /// `counted`: of the threads that are there, in microseconds.
    fn note(&mut self, process: Process, at_us: u64, counted: u64) {
        let ended = self.ended.entry(process).or_default();
        ended.before += ended.counted.saturating_sub(counted);
        ended.counted = counted;
        let sample = Sample { at_us, used_us: ended.before + counted };
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
    pub(super) fn got_us(&self, host: u16, from: u64, to: u64) -> Vec<u64> {
        let of_host = self.all.iter().filter(|((on, _), _)| *on == host).map(|(_, samples)| samples);
        of_host.filter_map(|samples| got(samples, from, to)).collect()
    }
}

/// See [`Seen::got_us`].
fn got(samples: &[Sample], from: u64, to: u64) -> Option<u64> {
    let first = samples.partition_point(|sample| sample.at_us < from);
    let begin = samples.get(first)?;
    if begin.at_us > to {
        // Of a standstill only the two ends are kept.
        return samples.get(first.checked_sub(1)?).filter(|before| before.used_us == begin.used_us).map(|_| 0);
    }
    let last = samples.partition_point(|sample| sample.at_us <= to).checked_sub(1)?;
    Some(samples[last].used_us - begin.used_us)
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
                    if let Some(counted) = used_us(process.1) {
                        seen.note(*process, now_us(), counted);
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

    fn seen(samples: &[(u64, u64)]) -> Seen {
        let mut seen = Seen::default();
        samples.iter().for_each(|(at_us, used_us)| seen.note((2, 77), *at_us, *used_us));
        seen
    }

    #[test]
    fn what_a_process_got_in_a_time_is_told_as_far_as_it_is_sure() {
        let seen = seen(&[(100, 10), (105, 14), (110, 14), (115, 14), (120, 14), (125, 19), (130, 19)]);
        assert_eq!(seen.all[&(2, 77)].len(), 5, "those in the middle of a standstill say nothing");
        assert_eq!(seen.got_us(2, 100, 130), [9]);
        assert_eq!(seen.got_us(2, 101, 124), [0], "from 105 to 120 it stood still");
        assert_eq!(seen.got_us(2, 106, 118), [0], "nobody has to have looked just then");
        assert_eq!(seen.got_us(2, 112, 128), [5], "from 120 on");
        assert_eq!(seen.got_us(1, 100, 130), [0; 0], "on the other host it is not");
        assert_eq!(seen.got_us(2, 131, 140), [0; 0], "nobody has looked");
    }

    #[test]
    fn a_thread_that_ends_takes_nothing_back() {
        let seen = seen(&[(100, 30), (105, 40), (110, 25), (115, 27)]);
        assert_eq!(seen.got_us(2, 100, 105), [10]);
        assert_eq!(seen.got_us(2, 105, 115), [2], "of the one that is left");
        assert_eq!(seen.got_us(2, 100, 115), [12]);
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
