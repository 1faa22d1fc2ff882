//! The source of a pre-copy: reads the memory of a running task and sends it.

use super::super::lazy_pages_filter;
use super::super::page_server_wire::{HeaderLayout, PRE_COPY_COUNT, PRE_COPY_PAGES, PageHeader};
use super::super::pagemap::PageFilter;
use super::super::process::{lower_thread_priority, raise_thread_priority};
use crate::engine::pages::{BLOCK_PAGES, page_size};
use crate::engine::{PreCopyStopCondition, SentPages};
use sempa_proto::migration::Failure;
use std::fs::File;
use std::io::{self, Read, Write};
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// Maximum number of rounds over all memory. Each round sends the pages that were written since the
/// previous round.
const ROUNDS_MAX: u32 = 4;
/// Pre-copy ends after a round that sent at most this number of pages.
const CONVERGED_PAGES_MAX: u64 = 1024;
/// Minimum factor by which the number of sent pages must shrink from round to round. Pre-copy ends
/// if it shrinks less, because the task writes too fast.
const MIN_SHRINK_FACTOR: u64 = 2;
/// Timeout for the target to accept data or to reply.
const STREAM_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of bytes at the beginning that are not measured, because they only fill the buffers on
/// the path to the target.
const UNMEASURED_BYTES: u64 = 16 << 20;
/// Number of bytes in each rate measurement. Measurements follow each other without a gap.
const MEASURED_BYTES: u64 = 32 << 20;

/// A process of the task whose memory is being read.
struct SourceProcess {
    pid: i32,
    namespace_pid: u64,
    /// `/proc/PID/mem`. The file remains bound to the address space at the time of the open: after
    /// an exit or exec, reads return no data.
    memory: File,
}

impl SourceProcess {
    /// Opens the memory of a process. `None` if the process no longer exists.
    fn open(pid: i32) -> Option<SourceProcess> {
        let namespace_pid = lazy_pages_filter::namespace_pid(pid)?;
        let memory = File::open(format!("/proc/{pid}/mem")).ok()?;
        Some(SourceProcess {
            pid,
            namespace_pid,
            memory,
        })
    }

    /// Returns the ranges of populated pages of the process's private memory; empty if the process
    /// no longer exists. Omits swapped-out pages, which post-copy transfers.
    fn populated_ranges(&self) -> Vec<(u64, u64)> {
        let pages = |areas: Vec<_>| {
            lazy_pages_filter::populated_ranges(self.pid, &areas, PageFilter::InMemory)
        };
        lazy_pages_filter::lazy_areas(self.pid)
            .and_then(pages)
            .unwrap_or_default()
    }
}

/// Pre-copies the memory of these running processes on this stream: all pages in the first round,
/// then the pages that were written since. Sends at most as many pages as the target accepts. Must
/// be called on a dedicated thread, because it lowers the priority of the thread until all pages
/// are sent.
///
/// # Errors
/// The target has not received all pages.
pub(in super::super) fn send(
    processes: &[i32],
    stream: &OwnedFd,
    stop: &PreCopyStopCondition,
) -> Result<SentPages, Failure> {
    lower_thread_priority();
    let failed = |e: io::Error| Failure::Io(format!("its memory cannot go ahead: {e}"));
    let mut stream = UnixStream::from(stream.try_clone().map_err(failed)?);
    stream
        .set_write_timeout(Some(STREAM_TIMEOUT))
        .map_err(failed)?;
    stream
        .set_read_timeout(Some(STREAM_TIMEOUT))
        .map_err(failed)?;
    let pages_max = receive_page_count(&mut stream)?.pages;
    let sources: Vec<SourceProcess> = processes
        .iter()
        .filter_map(|pid| SourceProcess::open(*pid))
        .collect();
    let (sent, rate_meter) = (SentPages::new(page_size()), RateMeter::new(Instant::now()));
    let mut sender = PageSender {
        sent,
        stream: &stream,
        stop,
        buffer: Vec::new(),
        pages_max,
        rate_meter,
    };
    sender.send_rounds(&sources).map_err(failed)?;
    let sent = sender.sent;
    // From here on the migration waits for this thread.
    raise_thread_priority();
    let end = PageHeader {
        command: PRE_COPY_COUNT,
        pages: sent.distinct_page_count(),
        address: 0,
        process: 0,
    };
    stream
        .write_all(&HeaderLayout::Long.write(&end))
        .map_err(failed)?;
    receive_page_count(&mut stream)?;
    stream
        .set_read_timeout(None)
        .and_then(|()| stream.set_write_timeout(None))
        .map_err(failed)?;
    Ok(sent)
}

/// Receives a number of pages from the target: at the beginning the number that the target accepts,
/// at the end the number that it has received.
fn receive_page_count(stream: &mut UnixStream) -> Result<PageHeader, Failure> {
    let mut word = [0; HeaderLayout::Long.bytes()];
    let failed = |e: io::Error| {
        Failure::Io(format!(
            "its memory cannot go ahead: the target does not take it: {e}"
        ))
    };
    stream.read_exact(&mut word).map_err(failed)?;
    match HeaderLayout::Long.read(&word) {
        head @ PageHeader {
            command: PRE_COPY_COUNT,
            ..
        } => Ok(head),
        other => Err(Failure::Images(format!(
            "the target says {other:?} to memory that goes ahead"
        ))),
    }
}

/// Measures the transfer rate. The measured time includes reading the pages, so the rate is at most
/// the rate at which this thread reads.
#[derive(Debug)]
struct RateMeter {
    /// Number of bytes until the measurement starts.
    unmeasured_left: u64,
    measured_bytes: u64,
    measured_since: Instant,
}

impl RateMeter {
    fn new(now: Instant) -> RateMeter {
        RateMeter {
            unmeasured_left: UNMEASURED_BYTES,
            measured_bytes: 0,
            measured_since: now,
        }
    }

    /// Counts sent bytes. Returns the rate in bytes per second when a measurement is complete.
    fn record(&mut self, bytes: u64, now: Instant) -> Option<u64> {
        if self.unmeasured_left > 0 {
            (self.unmeasured_left, self.measured_since) =
                (self.unmeasured_left.saturating_sub(bytes), now);
            return None;
        }
        self.measured_bytes += bytes;
        if self.measured_bytes < MEASURED_BYTES {
            return None;
        }
        let micros = now
            .saturating_duration_since(self.measured_since)
            .as_micros()
            .max(1) as u64;
        let rate = self.measured_bytes.saturating_mul(1_000_000) / micros;
        *self = RateMeter {
            unmeasured_left: 0,
            measured_bytes: 0,
            measured_since: now,
        };
        Some(rate)
    }
}

struct PageSender<'a> {
    sent: SentPages,
    stream: &'a UnixStream,
    stop: &'a PreCopyStopCondition,
    buffer: Vec<u8>,
    pages_max: u64,
    rate_meter: RateMeter,
}

impl PageSender<'_> {
    fn send_rounds(&mut self, sources: &[SourceProcess]) -> io::Result<()> {
        let mut previous = u64::MAX;
        for _ in 0..ROUNDS_MAX {
            let bytes_before = self.sent.sent_bytes();
            for process in sources {
                if !self.stop.is_due() {
                    process
                        .populated_ranges()
                        .into_iter()
                        .try_for_each(|range| self.send_range(process, range))?;
                }
            }
            let pages = (self.sent.sent_bytes() - bytes_before) / self.sent.page_size();
            if self.stop.is_due()
                || pages <= CONVERGED_PAGES_MAX
                || pages > previous / MIN_SHRINK_FACTOR
            {
                break;
            }
            previous = pages;
        }
        Ok(())
    }

    fn send_range(&mut self, process: &SourceProcess, (start, end): (u64, u64)) -> io::Result<()> {
        let page = self.sent.page_size();
        let block_bytes = BLOCK_PAGES * page;
        let mut at = start;
        while at < end && !self.stop.is_due() {
            let until = end.min((at / block_bytes + 1) * block_bytes);
            self.buffer.resize((until - at) as usize, 0);
            // Pages that the process has just unmapped are skipped.
            let read = process.memory.read_at(&mut self.buffer, at).unwrap_or(0) as u64;
            self.send_block(process.namespace_pid, at, (read / page) as usize)?;
            at = until;
        }
        Ok(())
    }

    /// Sends those of the pages in `buffer` whose content was not sent before. The pages belong to
    /// one block.
    fn send_block(&mut self, process: u64, address: u64, pages: usize) -> io::Result<()> {
        let page = self.sent.page_size() as usize;
        let mut run: Range<usize> = 0..0;
        for number in 0..=pages {
            let content =
                (number < pages).then(|| &self.buffer[number * page..(number + 1) * page]);
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
                self.stream
                    .write_all(&HeaderLayout::Long.write(&PageHeader {
                        command: PRE_COPY_PAGES,
                        pages,
                        address,
                        process,
                    }))?;
                self.stream
                    .write_all(&self.buffer[run.start * page..run.end * page])?;
                let rate = self
                    .rate_meter
                    .record((run.len() * page) as u64, Instant::now());
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

    /// Allocates memory in the test process. Returns the memory and the address of its first whole
    /// page.
    fn own_memory(pages: usize) -> (Vec<u8>, u64) {
        let page = page_size() as usize;
        let memory: Vec<u8> = (0..(pages + 1) * page)
            .map(|at| (at / page + at) as u8)
            .collect();
        let first = (memory.as_ptr() as u64).next_multiple_of(page as u64);
        (memory, first)
    }

    fn distant_stop() -> PreCopyStopCondition {
        PreCopyStopCondition::at_deadline(Instant::now() + Duration::from_secs(600))
    }

    /// The target stores all sent pages, and the source recognizes a page that was written after it
    /// was sent.
    #[test]
    fn later_writes_make_sent_pages_outdated() {
        let page = page_size();
        let (mut memory, first) = own_memory(300);
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        let (ours, theirs) = (OwnedFd::from(ours), OwnedFd::from(theirs));
        let pid = std::process::id() as i32;
        let number = lazy_pages_filter::namespace_pid(pid).expect("it is there");
        let (tell, told) = channel();
        let taking = std::thread::spawn(move || {
            let store = receive(&theirs, u64::MAX).expect("all comes");
            acknowledge(&store, &theirs).expect("it listens");
            told.recv().expect("it is told");
            store
        });
        let sent = send(&[pid], &ours, &distant_stop()).expect("it is taken");
        tell.send(()).expect("it waits");
        let store = taking.join().expect("no panic");
        assert_eq!(store.stored_bytes(), sent.distinct_page_count() * page);
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

    /// A pre-copy that is stopped before its first round sends no pages and is still acknowledged.
    #[test]
    fn stopped_pre_copy_is_acknowledged() {
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        let (ours, theirs) = (OwnedFd::from(ours), OwnedFd::from(theirs));
        let taking = std::thread::spawn(move || {
            let store = receive(&theirs, 0).expect("nothing comes");
            acknowledge(&store, &theirs).map(|()| store.stored_bytes())
        });
        let stop = distant_stop();
        stop.request();
        let sent = send(&[std::process::id() as i32], &ours, &stop).expect("it is taken");
        assert_eq!(
            (
                sent.sent_bytes(),
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
        let mut rate_meter = RateMeter::new(now);
        let mut pass = |mibs: u64, each: Duration| {
            let mut one = || {
                now += each;
                rate_meter.record(mib, now)
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
            let (memory, _) = own_memory(200 << 20 >> 12);
            let taking = std::thread::spawn(move || {
                let store = receive(&theirs, u64::MAX).expect("all comes");
                acknowledge(&store, &theirs).expect("it listens");
            });
            let sent = send(
                &[std::process::id() as i32],
                &ours,
                &distant_stop().with_rate_limit(fast),
            )
            .expect("it is taken");
            taking.join().expect("no panic");
            drop(memory);
            sent.sent_bytes()
        };
        let (bytes, enough) = (sent_where(0), UNMEASURED_BYTES + MEASURED_BYTES);
        assert!((enough..enough + (4 << 20)).contains(&bytes), "{bytes}");
        assert!(sent_where(u64::MAX) > 200 << 20);
    }

    /// A pre-copy of a process that does not exist sends no pages. A stream that the target has
    /// closed is an error.
    #[test]
    fn closed_stream_is_an_error() {
        assert!(SourceProcess::open(i32::MAX).is_none());
        let (ours, theirs) = UnixStream::pair().expect("descriptors");
        drop(theirs);
        let sent = send(&[std::process::id() as i32], &ours.into(), &distant_stop());
        assert!(matches!(sent, Err(Failure::Io(why)) if why.contains("go ahead")));
    }
}
