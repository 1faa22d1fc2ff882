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
/// Minimum factor by which the number of sent pages must decrease from round to round. If the
/// factor is smaller, the task writes too fast and the pre-copy ends.
const SHRINK_FACTOR_MIN: u64 = 2;
/// Timeout for the target to accept data or to reply.
const STREAM_TIMEOUT: Duration = Duration::from_secs(60);
/// Number of bytes at the beginning of a pre-copy that are not measured, because they only fill the
/// buffers on the path to the target.
const UNMEASURED_BYTES: u64 = 16 << 20;
/// Number of bytes in each rate measurement. Measurements follow each other without a gap.
const MEASURED_BYTES: u64 = 32 << 20;

/// A process of the task whose memory is being read.
struct SourceProcess {
    pid: i32,
    namespace_pid: u64,
    /// `/proc/PID/mem`. The file remains bound to the address space at the time of the open: after
    /// an exit or exec, reads return no data.
    memory_file: File,
}

impl SourceProcess {
    /// Opens the memory of a process. `None` if the process no longer exists.
    fn open(pid: i32) -> Option<Self> {
        let namespace_pid = lazy_pages_filter::namespace_pid(pid)?;
        let memory_file = File::open(format!("/proc/{pid}/mem")).ok()?;
        Some(Self {
            pid,
            namespace_pid,
            memory_file,
        })
    }

    /// Returns the ranges of populated pages of the process's private memory; empty if the process
    /// no longer exists. Omits swapped-out pages, which post-copy transfers.
    fn populated_ranges(&self) -> Vec<(u64, u64)> {
        let scan_areas = |areas: Vec<_>| {
            lazy_pages_filter::populated_pages(self.pid, &areas, PageFilter::InMemory)
        };
        lazy_pages_filter::lazy_areas(self.pid)
            .and_then(scan_areas)
            .unwrap_or_default()
            .ranges
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
    stop_condition: &PreCopyStopCondition,
) -> Result<SentPages, Failure> {
    lower_thread_priority();
    let to_failure = |e: io::Error| Failure::Io(format!("pre-copy failed: {e}"));
    let mut stream = UnixStream::from(stream.try_clone().map_err(to_failure)?);
    stream
        .set_write_timeout(Some(STREAM_TIMEOUT))
        .map_err(to_failure)?;
    stream
        .set_read_timeout(Some(STREAM_TIMEOUT))
        .map_err(to_failure)?;
    let pages_max = receive_count_header(&mut stream)?.page_count;
    let sources: Vec<SourceProcess> = processes
        .iter()
        .filter_map(|pid| SourceProcess::open(*pid))
        .collect();
    let (sent_pages, rate_meter) = (SentPages::new(page_size()), RateMeter::new(Instant::now()));
    let mut sender = PageSender {
        sent_pages,
        stream: &stream,
        stop_condition,
        buffer: Vec::new(),
        pages_max,
        rate_meter,
    };
    sender.send_rounds(&sources).map_err(to_failure)?;
    let sent_pages = sender.sent_pages;
    // From now on the migration waits for this thread.
    raise_thread_priority();
    let end_header = PageHeader {
        command: PRE_COPY_COUNT,
        page_count: sent_pages.distinct_page_count(),
        address: 0,
        namespace_pid: 0,
    };
    stream
        .write_all(&HeaderLayout::Long.encode(&end_header))
        .map_err(to_failure)?;
    receive_count_header(&mut stream)?;
    stream
        .set_read_timeout(None)
        .and_then(|()| stream.set_write_timeout(None))
        .map_err(to_failure)?;
    Ok(sent_pages)
}

/// Waits for a header with a number of pages from the target: at the beginning the number that the
/// target accepts, at the end the number that the target has received.
fn receive_count_header(stream: &mut UnixStream) -> Result<PageHeader, Failure> {
    let mut bytes = [0; HeaderLayout::Long.bytes()];
    let to_failure = |e: io::Error| {
        Failure::Io(format!(
            "pre-copy failed: the target does not receive it: {e}"
        ))
    };
    stream.read_exact(&mut bytes).map_err(to_failure)?;
    match HeaderLayout::Long.decode(&bytes) {
        head @ PageHeader {
            command: PRE_COPY_COUNT,
            ..
        } => Ok(head),
        other => Err(Failure::Images(format!(
            "the target sent {other:?} during the pre-copy"
        ))),
    }
}

/// Measures the transfer rate. The measured time includes reading the pages, so the rate is at most
/// the rate at which this thread reads.
#[derive(Debug)]
struct RateMeter {
    /// Number of bytes that are still sent before the measurement starts.
    remaining_unmeasured_bytes: u64,
    measured_bytes: u64,
    measured_since: Instant,
}

impl RateMeter {
    fn new(now: Instant) -> Self {
        Self {
            remaining_unmeasured_bytes: UNMEASURED_BYTES,
            measured_bytes: 0,
            measured_since: now,
        }
    }

    /// Adds `bytes` sent bytes to the measurement. Returns the rate in bytes per second if a
    /// measurement is complete, otherwise `None`.
    fn record(&mut self, bytes: u64, now: Instant) -> Option<u64> {
        if self.remaining_unmeasured_bytes > 0 {
            (self.remaining_unmeasured_bytes, self.measured_since) =
                (self.remaining_unmeasured_bytes.saturating_sub(bytes), now);
            return None;
        }
        self.measured_bytes += bytes;
        if self.measured_bytes < MEASURED_BYTES {
            return None;
        }
        let elapsed_us = now
            .saturating_duration_since(self.measured_since)
            .as_micros()
            .max(1) as u64;
        let bytes_per_second = self.measured_bytes.saturating_mul(1_000_000) / elapsed_us;
        *self = Self {
            remaining_unmeasured_bytes: 0,
            measured_bytes: 0,
            measured_since: now,
        };
        Some(bytes_per_second)
    }
}

struct PageSender<'a> {
    sent_pages: SentPages,
    stream: &'a UnixStream,
    stop_condition: &'a PreCopyStopCondition,
    buffer: Vec<u8>,
    pages_max: u64,
    rate_meter: RateMeter,
}

impl PageSender<'_> {
    fn send_rounds(&mut self, sources: &[SourceProcess]) -> io::Result<()> {
        let mut previous_pages = u64::MAX;
        for _ in 0..ROUNDS_MAX {
            let bytes_before = self.sent_pages.sent_bytes();
            for process in sources {
                if !self.stop_condition.is_due() {
                    process
                        .populated_ranges()
                        .into_iter()
                        .try_for_each(|range| self.send_range(process, range))?;
                }
            }
            let round_pages =
                (self.sent_pages.sent_bytes() - bytes_before) / self.sent_pages.page_size();
            if self.stop_condition.is_due()
                || round_pages <= CONVERGED_PAGES_MAX
                || round_pages > previous_pages / SHRINK_FACTOR_MIN
            {
                break;
            }
            previous_pages = round_pages;
        }
        Ok(())
    }

    fn send_range(&mut self, process: &SourceProcess, (start, end): (u64, u64)) -> io::Result<()> {
        let page_bytes = self.sent_pages.page_size();
        let block_bytes = BLOCK_PAGES * page_bytes;
        let mut address = start;
        while address < end && !self.stop_condition.is_due() {
            let block_end = end.min((address / block_bytes + 1) * block_bytes);
            self.buffer.resize((block_end - address) as usize, 0);
            // Pages that the process has just unmapped are skipped.
            let byte_count = process
                .memory_file
                .read_at(&mut self.buffer, address)
                .unwrap_or(0) as u64;
            self.send_block(
                process.namespace_pid,
                address,
                (byte_count / page_bytes) as usize,
            )?;
            address = block_end;
        }
        Ok(())
    }

    /// Sends those of the pages in `buffer` whose content was not sent before. The pages belong to
    /// one block.
    fn send_block(&mut self, namespace_pid: u64, address: u64, pages: usize) -> io::Result<()> {
        let page_bytes = self.sent_pages.page_size() as usize;
        let mut unsent_run: Range<usize> = 0..0;
        for index in 0..=pages {
            let content =
                (index < pages).then(|| &self.buffer[index * page_bytes..(index + 1) * page_bytes]);
            let page_address = address + (index * page_bytes) as u64;
            if content.is_some_and(|content| {
                self.sent_pages
                    .record(namespace_pid, page_address, content, self.pages_max)
            }) {
                unsent_run = if unsent_run.is_empty() {
                    index..index + 1
                } else {
                    unsent_run.start..index + 1
                };
                continue;
            }
            if !unsent_run.is_empty() {
                let (pages, address) = (
                    unsent_run.len() as u64,
                    address + (unsent_run.start * page_bytes) as u64,
                );
                self.stream
                    .write_all(&HeaderLayout::Long.encode(&PageHeader {
                        command: PRE_COPY_PAGES,
                        page_count: pages,
                        address,
                        namespace_pid,
                    }))?;
                self.stream.write_all(
                    &self.buffer[unsent_run.start * page_bytes..unsent_run.end * page_bytes],
                )?;
                let bytes_per_second = self
                    .rate_meter
                    .record((unsent_run.len() * page_bytes) as u64, Instant::now());
                if let Some(bytes_per_second) = bytes_per_second {
                    self.stop_condition.observe_rate(bytes_per_second);
                }
                unsent_run = 0..0;
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
    fn allocate_memory(page_count: usize) -> (Vec<u8>, u64) {
        let page_bytes = page_size() as usize;
        let memory: Vec<u8> = (0..(page_count + 1) * page_bytes)
            .map(|index| (index / page_bytes + index) as u8)
            .collect();
        let first_page = (memory.as_ptr() as u64).next_multiple_of(page_bytes as u64);
        (memory, first_page)
    }

    fn distant_stop_condition() -> PreCopyStopCondition {
        PreCopyStopCondition::at_deadline(Instant::now() + Duration::from_secs(600))
    }

    /// The target stores all sent pages, and the source recognizes a page that was written after it
    /// was sent.
    #[test]
    fn later_writes_make_sent_pages_outdated() {
        let page_bytes = page_size();
        let (mut memory, first_page) = allocate_memory(300);
        let (source_stream, target_stream) = UnixStream::pair().expect("descriptors");
        let (source_stream, target_stream) =
            (OwnedFd::from(source_stream), OwnedFd::from(target_stream));
        let pid = std::process::id() as i32;
        let namespace_pid = lazy_pages_filter::namespace_pid(pid).expect("it is there");
        let (signal_sender, signal_receiver) = channel();
        let receiver_thread = std::thread::spawn(move || {
            let received_pages = receive(&target_stream, u64::MAX).expect("all comes");
            acknowledge(&received_pages, &target_stream).expect("it listens");
            signal_receiver.recv().expect("it is told");
            received_pages
        });
        let sent_pages =
            send(&[pid], &source_stream, &distant_stop_condition()).expect("it is taken");
        signal_sender.send(()).expect("it waits");
        let received_pages = receiver_thread.join().expect("no panic");
        assert_eq!(
            received_pages.stored_bytes(),
            sent_pages.distinct_page_count() * page_bytes
        );
        let first_offset = (first_page - memory.as_ptr() as u64) as usize;
        let content = |memory: &[u8], index: usize| {
            memory[first_offset + index * page_bytes as usize..][..page_bytes as usize].to_vec()
        };
        for index in [0, 1, 150, 298] {
            let address = first_page + index as u64 * page_bytes;
            assert!(
                sent_pages.contains(namespace_pid, address, &content(&memory, index)),
                "page {index}"
            );
            assert_eq!(
                received_pages.get(namespace_pid, address, 1),
                Some(content(&memory, index))
            );
        }
        memory[first_offset + 150 * page_bytes as usize + 7] ^= 1;
        assert!(
            !sent_pages.contains(
                namespace_pid,
                first_page + 150 * page_bytes,
                &content(&memory, 150)
            ),
            "one byte is another one"
        );
        assert!(
            !sent_pages.contains(namespace_pid + 1, first_page, &content(&memory, 0)),
            "that is somebody else's"
        );
    }

    /// A pre-copy that is stopped before its first round sends no pages and is still acknowledged.
    #[test]
    fn stopped_pre_copy_is_acknowledged() {
        let (source_stream, target_stream) = UnixStream::pair().expect("descriptors");
        let (source_stream, target_stream) =
            (OwnedFd::from(source_stream), OwnedFd::from(target_stream));
        let receiver_thread = std::thread::spawn(move || {
            let received_pages = receive(&target_stream, 0).expect("nothing comes");
            acknowledge(&received_pages, &target_stream).map(|()| received_pages.stored_bytes())
        });
        let condition = distant_stop_condition();
        condition.request_stop();
        let sent_pages =
            send(&[std::process::id() as i32], &source_stream, &condition).expect("it is taken");
        assert_eq!(
            (
                sent_pages.sent_bytes(),
                receiver_thread
                    .join()
                    .expect("no panic")
                    .expect("it listens")
            ),
            (0, 0)
        );
    }

    /// The rate is measured repeatedly, but only after the buffers on the path are full.
    #[test]
    fn rate_is_measured_after_buffers_are_full() {
        let (mib, one_second) = (1 << 20, Duration::from_secs(1));
        let mut now = Instant::now();
        let mut rate_meter = RateMeter::new(now);
        let mut transfer = |mib_count: u64, time_per_mib: Duration| {
            let mut record_mib = || {
                now += time_per_mib;
                rate_meter.record(mib, now)
            };
            (0..mib_count)
                .filter_map(|_| record_mib())
                .collect::<Vec<u64>>()
        };
        assert_eq!(transfer(16, Duration::ZERO), [0; 0], "into buffers");
        assert_eq!(transfer(31, one_second), [0; 0]);
        assert_eq!(transfer(1, one_second), [mib]);
        assert_eq!(
            transfer(64, one_second / 100),
            [100 * mib; 2],
            "it is looked at again and again"
        );
    }

    /// A pre-copy stops above its rate limit and continues below it.
    #[test]
    fn pre_copy_stops_on_a_fast_link() {
        let sent_bytes_below = |rate_max| {
            let (source_stream, target_stream) = UnixStream::pair().expect("descriptors");
            let (source_stream, target_stream) =
                (OwnedFd::from(source_stream), OwnedFd::from(target_stream));
            let (memory, _) = allocate_memory(200 << 20 >> 12);
            let receiver_thread = std::thread::spawn(move || {
                let received_pages = receive(&target_stream, u64::MAX).expect("all comes");
                acknowledge(&received_pages, &target_stream).expect("it listens");
            });
            let sent_pages = send(
                &[std::process::id() as i32],
                &source_stream,
                &distant_stop_condition().with_rate_limit(rate_max),
            )
            .expect("it is taken");
            receiver_thread.join().expect("no panic");
            drop(memory);
            sent_pages.sent_bytes()
        };
        let (bytes, expected_bytes) = (sent_bytes_below(0), UNMEASURED_BYTES + MEASURED_BYTES);
        assert!(
            (expected_bytes..expected_bytes + (4 << 20)).contains(&bytes),
            "{bytes}"
        );
        assert!(sent_bytes_below(u64::MAX) > 200 << 20);
    }

    /// A pre-copy of a process that does not exist sends no pages. A stream that the target has
    /// closed is an error.
    #[test]
    fn closed_stream_is_an_error() {
        assert!(SourceProcess::open(i32::MAX).is_none());
        let (source_stream, target_stream) = UnixStream::pair().expect("descriptors");
        drop(target_stream);
        let result = send(
            &[std::process::id() as i32],
            &source_stream.into(),
            &distant_stop_condition(),
        );
        assert!(matches!(result, Err(Failure::Io(reason)) if reason.contains("pre-copy failed")));
    }
}
