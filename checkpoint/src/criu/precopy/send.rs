//! At the source: reads a task's memory while it runs, and sends it ahead.

use super::super::pagemap::Wanted;
use super::super::process::{come_late, hurry_thread};
use super::super::withheld;
use super::super::words::{AHEAD, ALL_AHEAD, Form, Head};
use crate::engine::pages::{BLOCK_PAGES, page_size};
use crate::engine::{PreCopyStop, SentPages};
use sempa_proto::migration::Failure;
use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Times that all memory is gone through: what was written meanwhile is sent again each time.
const ROUNDS_MAX: u32 = 4;
/// So few pages may be left for later.
const ENOUGH_PAGES: u64 = 1024;
/// A round that sends more than one in so many of what the one before has sent is the last: the task writes too fast.
const WORTH_WHILE: u64 = 2;
/// How long the other end may take nothing, or say nothing.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// How fast a way is cannot be seen by the first bytes: buffers on the way take them.
const BUFFERED_BYTES: u64 = 16 << 20;
/// It is seen by so many after them, again and again.
const JUDGED_BYTES: u64 = 32 << 20;

/// A process of the task.
struct Subject {
    pid: i32,
    number: u64,
    /// That of this program for good: should the process end or begin another program, nothing is read any more.
    memory: File,
}

impl Subject {
    /// `None`: it is gone.
    fn of(pid: i32) -> Option<Subject> {
        let number = withheld::number(pid)?;
        let memory = File::open(format!("/proc/{pid}/mem")).ok()?;
        Some(Subject {
            pid,
            number,
            memory,
        })
    }

    /// Where pages are in its own memory. A process that is gone has none. What is swapped out stays there until it has to follow.
    fn pages(&self) -> Vec<(u64, u64)> {
        let pages = |areas: Vec<_>| withheld::pages(self.pid, &areas, Wanted::InMemory);
        withheld::own_areas(self.pid)
            .and_then(pages)
            .unwrap_or_default()
    }
}

/// Sends the memory of these processes, which run, on this stream, and what of it they have written since, again; what was sent. No
/// more pages than the other end takes. To be called by a thread of its own: it comes behind others from then on, until all is sent.
///
/// # Errors
/// The other end has not taken all of it.
pub(in super::super) fn send(
    processes: &[i32],
    stream: &OwnedFd,
    stop: &PreCopyStop,
) -> Result<SentPages, Failure> {
    come_late();
    let failed = |e: io::Error| Failure::Io(format!("its memory cannot go ahead: {e}"));
    let mut stream = UnixStream::from(stream.try_clone().map_err(failed)?);
    stream
        .set_write_timeout(Some(SILENCE_MAX))
        .map_err(failed)?;
    stream.set_read_timeout(Some(SILENCE_MAX)).map_err(failed)?;
    let pages_max = heard(&mut stream)?.pages;
    let subjects: Vec<Subject> = processes
        .iter()
        .filter_map(|pid| Subject::of(*pid))
        .collect();
    let (sent, pace) = (SentPages::new(page_size()), Pace::new(Instant::now()));
    let mut sender = Sender {
        sent,
        stream: &stream,
        stop,
        room: Vec::new(),
        pages_max,
        pace,
    };
    sender.rounds(&subjects).map_err(failed)?;
    let sent = sender.sent;
    // Who is to leave waits for the rest of this.
    hurry_thread();
    let end = Head {
        command: ALL_AHEAD,
        pages: sent.pages(),
        address: 0,
        process: 0,
    };
    stream.write_all(&Form::Long.write(&end)).map_err(failed)?;
    heard(&mut stream)?;
    stream
        .set_read_timeout(None)
        .and_then(|()| stream.set_write_timeout(None))
        .map_err(failed)?;
    Ok(sent)
}

/// A word of the other end: before all else how many pages it takes, and in the end how many it has.
fn heard(stream: &mut UnixStream) -> Result<Head, Failure> {
    let mut word = [0; Form::Long.bytes()];
    let failed = |e: io::Error| {
        Failure::Io(format!(
            "its memory cannot go ahead: the target does not take it: {e}"
        ))
    };
    stream.read_exact(&mut word).map_err(failed)?;
    match Form::Long.read(&word) {
        head @ Head {
            command: ALL_AHEAD, ..
        } => Ok(head),
        other => Err(Failure::Images(format!(
            "the target says {other:?} to memory that goes ahead"
        ))),
    }
}

/// How fast memory passes, with what it takes to read it: of a way that is faster than this it cannot be seen how fast it is.
#[derive(Debug)]
struct Pace {
    /// What has to pass yet before it is judged.
    before: u64,
    bytes: u64,
    since: Instant,
}

impl Pace {
    fn new(now: Instant) -> Pace {
        Pace {
            before: BUFFERED_BYTES,
            bytes: 0,
            since: now,
        }
    }

    /// So many more bytes have passed. Bytes per second, when there were enough to say that.
    fn passed(&mut self, bytes: u64, now: Instant) -> Option<u64> {
        if self.before > 0 {
            (self.before, self.since) = (self.before.saturating_sub(bytes), now);
            return None;
        }
        self.bytes += bytes;
        if self.bytes < JUDGED_BYTES {
            return None;
        }
        let micros = now.saturating_duration_since(self.since).as_micros().max(1) as u64;
        let rate = self.bytes.saturating_mul(1_000_000) / micros;
        *self = Pace {
            before: 0,
            bytes: 0,
            since: now,
        };
        Some(rate)
    }
}

struct Sender<'a> {
    sent: SentPages,
    stream: &'a UnixStream,
    stop: &'a PreCopyStop,
    room: Vec<u8>,
    pages_max: u64,
    pace: Pace,
}

impl Sender<'_> {
    fn rounds(&mut self, subjects: &[Subject]) -> io::Result<()> {
        let mut before = u64::MAX;
        for _ in 0..ROUNDS_MAX {
            let begun = self.sent.bytes();
            for subject in subjects {
                if !self.stop.is_due() {
                    subject
                        .pages()
                        .into_iter()
                        .try_for_each(|stretch| self.stretch(subject, stretch))?;
                }
            }
            let pages = (self.sent.bytes() - begun) / self.sent.page_size();
            if self.stop.is_due() || pages <= ENOUGH_PAGES || pages > before / WORTH_WHILE {
                break;
            }
            before = pages;
        }
        Ok(())
    }

    fn stretch(&mut self, subject: &Subject, (start, end): (u64, u64)) -> io::Result<()> {
        let page = self.sent.page_size();
        let block_bytes = BLOCK_PAGES * page;
        let mut at = start;
        while at < end && !self.stop.is_due() {
            let until = end.min((at / block_bytes + 1) * block_bytes);
            self.room.resize((until - at) as usize, 0);
            // What it has given back meanwhile is passed over.
            let read = subject.memory.read_at(&mut self.room, at).unwrap_or(0) as u64;
            self.block(subject.number, at, (read / page) as usize)?;
            at = until;
        }
        Ok(())
    }

    /// Sends what is new of so many pages that were read, all of one block.
    fn block(&mut self, process: u64, address: u64, pages: usize) -> io::Result<()> {
        let page = self.sent.page_size() as usize;
        let mut run: Range<usize> = 0..0;
        for number in 0..=pages {
            let content = (number < pages).then(|| &self.room[number * page..(number + 1) * page]);
            let at = address + (number * page) as u64;
            if content.is_some_and(|content| self.sent.record(process, at, content, self.pages_max))
            {
                run = if run.is_empty() {
                    number..number + 1
                } else {
                    run.start..number + 1
                };
                continue;
            }
            if !run.is_empty() {
                let (pages, address) = (run.len() as u64, address + (run.start * page) as u64);
                self.stream.write_all(&Form::Long.write(&Head {
                    command: AHEAD,
                    pages,
                    address,
                    process,
                }))?;
                self.stream
                    .write_all(&self.room[run.start * page..run.end * page])?;
                let rate = self.pace.passed((run.len() * page) as u64, Instant::now());
                if let Some(rate) = rate {
                    self.stop.observe_rate(rate);
                }
                run = 0..0;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::{acknowledge, receive};
    use super::*;
    use std::sync::mpsc::channel;

    /// Memory of this process, and what says where it is.
    fn own(pages: usize) -> (Vec<u8>, u64) {
        let page = page_size() as usize;
        let memory: Vec<u8> = (0..(pages + 1) * page)
            .map(|at| (at / page + at) as u8)
            .collect();
        let first = (memory.as_ptr() as u64).next_multiple_of(page as u64);
        (memory, first)
    }

    fn later() -> PreCopyStop {
        PreCopyStop::at(Instant::now() + Duration::from_secs(600))
    }

    #[test]
    fn what_was_sent_ahead_is_here_and_what_was_written_since_is_known() {
        let page = page_size();
        let (mut memory, first) = own(300);
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        let (ours, theirs) = (OwnedFd::from(ours), OwnedFd::from(theirs));
        let pid = std::process::id() as i32;
        let number = withheld::number(pid).expect("it is there");
        let (tell, told) = channel();
        let taking = std::thread::spawn(move || {
            let store = receive(&theirs, u64::MAX).expect("all comes");
            acknowledge(&store, &theirs).expect("it listens");
            told.recv().expect("it is told");
            store
        });
        let sent = send(&[pid], &ours, &later()).expect("it is taken");
        tell.send(()).expect("it waits");
        let store = taking.join().expect("no panic");
        assert_eq!(store.bytes(), sent.pages() * page);
        let begin = (first - memory.as_ptr() as u64) as usize;
        let content = |memory: &[u8], at: usize| {
            memory[begin + at * page as usize..][..page as usize].to_vec()
        };
        for at in [0, 1, 150, 298] {
            let address = first + at as u64 * page;
            assert!(
                sent.has(number, address, &content(&memory, at)),
                "page {at}"
            );
            assert_eq!(store.get(number, address, 1), Some(content(&memory, at)));
        }
        memory[begin + 150 * page as usize + 7] ^= 1;
        assert!(
            !sent.has(number, first + 150 * page, &content(&memory, 150)),
            "one byte is another one"
        );
        assert!(
            !sent.has(number + 1, first, &content(&memory, 0)),
            "that is somebody else's"
        );
    }

    #[test]
    fn who_is_in_a_hurry_sends_no_more_and_is_answered_all_the_same() {
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        let (ours, theirs) = (OwnedFd::from(ours), OwnedFd::from(theirs));
        let taking = std::thread::spawn(move || {
            let store = receive(&theirs, 0).expect("nothing comes");
            acknowledge(&store, &theirs).map(|()| store.bytes())
        });
        let stop = later();
        stop.request();
        let sent = send(&[std::process::id() as i32], &ours, &stop).expect("it is taken");
        assert_eq!(
            (
                sent.bytes(),
                taking.join().expect("no panic").expect("it listens")
            ),
            (0, 0)
        );
    }

    #[test]
    fn a_way_is_fast_by_what_passes_when_what_is_on_it_has_filled_up() {
        let (mib, second) = (1 << 20, Duration::from_secs(1));
        let mut now = Instant::now();
        let mut pace = Pace::new(now);
        let mut pass = |mibs: u64, each: Duration| {
            let mut one = || {
                now += each;
                pace.passed(mib, now)
            };
            (0..mibs).filter_map(|_| one()).collect::<Vec<u64>>()
        };
        assert_eq!(pass(16, Duration::ZERO), [0; 0], "into buffers");
        assert_eq!(pass(31, second), [0; 0]);
        assert_eq!(pass(1, second), [mib]);
        assert_eq!(
            pass(64, second / 100),
            [100 * mib; 2],
            "it is looked at again and again"
        );
    }

    #[test]
    fn memory_stops_going_ahead_on_a_fast_way_and_does_not_on_another() {
        let sent_where = |fast| {
            let (ours, theirs) = UnixStream::pair().expect("descriptors");
            let (ours, theirs) = (OwnedFd::from(ours), OwnedFd::from(theirs));
            let (memory, _) = own(200 << 20 >> 12);
            let taking = std::thread::spawn(move || {
                let store = receive(&theirs, u64::MAX).expect("all comes");
                acknowledge(&store, &theirs).expect("it listens");
            });
            let sent = send(
                &[std::process::id() as i32],
                &ours,
                &later().or_above_rate(fast),
            )
            .expect("it is taken");
            taking.join().expect("no panic");
            drop(memory);
            sent.bytes()
        };
        let (bytes, enough) = (sent_where(0), BUFFERED_BYTES + JUDGED_BYTES);
        assert!((enough..enough + (4 << 20)).contains(&bytes), "{bytes}");
        assert!(sent_where(u64::MAX) > 200 << 20);
    }

    #[test]
    fn whoever_is_not_there_has_no_memory_and_a_target_that_is_gone_is_an_error() {
        assert!(Subject::of(i32::MAX).is_none());
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        drop(theirs);
        let sent = send(&[std::process::id() as i32], &ours.into(), &later());
        assert!(matches!(sent, Err(Failure::Io(why)) if why.contains("go ahead")));
    }
}
