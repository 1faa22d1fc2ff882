//! The source of a pre-copy: reads the memory of a running task and sends it.

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

/// Maximum number of rounds over all memory. Each round sends the pages that were written since the
/// round before.
const ROUNDS_MAX: u32 = 4;
/// Pre-copy ends after a round that sent at most this number of pages.
const ENOUGH_PAGES: u64 = 1024;
/// Pre-copy ends after a round that sent more pages than those of the round before divided by this:
/// the task writes too fast.
const WORTH_WHILE: u64 = 2;
/// Timeout for the target to accept data or to reply.
const SILENCE_MAX: Duration = Duration::from_secs(60);
/// Bytes at the beginning that are not measured, because buffers on the path take them at any rate.
const BUFFERED_BYTES: u64 = 16 << 20;
/// Bytes per rate measurement. Measurements follow each other without a gap.
const JUDGED_BYTES: u64 = 32 << 20;

/// A process of the task that is being read.
struct Subject {
    pid: i32,
    number: u64,
    /// `/proc/PID/mem`, which remains bound to the current address space: after an exit or exec,
    /// reads return nothing.
    memory: File,
}

impl Subject {
    /// Opens a process. `None` if it no longer exists.
    fn of(pid: i32) -> Option<Subject> {
        let number = withheld::number(pid)?;
        let memory = File::open(format!("/proc/{pid}/mem")).ok()?;
        Some(Subject {
            pid,
            number,
            memory,
        })
    }

    /// Returns the populated ranges of the process's private memory; none if it no longer exists.
    /// Swapped-out pages are left to the post-copy.
    fn pages(&self) -> Vec<(u64, u64)> {
        let pages = |areas: Vec<_>| withheld::pages(self.pid, &areas, Wanted::InMemory);
        withheld::own_areas(self.pid)
            .and_then(pages)
            .unwrap_or_default()
    }
}

/// Pre-copies the memory of these running processes on this stream, and again the pages that they
/// have written meanwhile. Sends at most as many pages as the target accepts. Must be called on a
/// thread of its own, because it lowers the priority of the thread until all pages are sent.
///
/// # Errors
/// The target has not received all of it.
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
    // From here on the migration waits for this thread.
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

/// Receives a page count from the target: at the beginning the number of pages that it accepts, at
/// the end the number that it has received.
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

/// Measures the transfer rate, including the time for reading the pages. A link that is faster than
/// this thread appears as fast as the thread.
#[derive(Debug)]
struct Pace {
    /// Bytes left before the measurement starts.
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

    /// Counts sent bytes. Returns the rate in bytes per second when a measurement is complete.
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
            // Pages that the process has unmapped meanwhile are skipped.
            let read = subject.memory.read_at(&mut self.room, at).unwrap_or(0) as u64;
            self.block(subject.number, at, (read / page) as usize)?;
            at = until;
        }
        Ok(())
    }

    /// Sends the new pages among those that were just read, which belong to one block.
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

    /// Allocates memory of this process. Returns it with the address of its first whole page.
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

    /// The target has all sent pages, and the source recognizes a page that was written since.
    #[test]
    fn later_writes_make_sent_pages_outdated() {
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

    /// A pre-copy that is stopped at once sends nothing and is still acknowledged.
    #[test]
    fn stopped_pre_copy_is_acknowledged() {
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

    /// The rate is measured repeatedly, but only after the buffers on the path are full.
    #[test]
    fn rate_is_measured_after_buffers_are_full() {
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

    /// A pre-copy stops above its rate limit and continues below it.
    #[test]
    fn pre_copy_stops_on_a_fast_link() {
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

    /// A process that does not exist has no memory, and a target that has closed the stream is an
    /// error.
    #[test]
    fn closed_stream_is_an_error() {
        assert!(Subject::of(i32::MAX).is_none());
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        drop(theirs);
        let sent = send(&[std::process::id() as i32], &ours.into(), &later());
        assert!(matches!(sent, Err(Failure::Io(why)) if why.contains("go ahead")));
    }
}
