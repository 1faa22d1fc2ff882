//! A proxy between `criu lazy-pages` and the source, which requests memory from the source before
//! CRIU needs it.
//!
//! `criu lazy-pages` has two kinds of requests (PS_IOV_GET):
//!
//! - The background transfer requests each process's missing memory from low to high addresses, one
//!   range at a time. After every page fault it starts again with short ranges.
//! - For a page fault of the task it requests a single page.
//!
//! Without the proxy each request takes a round trip between the hosts. The proxy splits the range
//! that the background transfer will request next into chunks and keeps some chunks in flight, so
//! that most of CRIU's requests are answered without a round trip.
//!
//! Rules:
//!
//! - Only pages that the images mark as lazy are requested. The source treats any other request as
//!   a protocol error.
//! - CRIU and the source each receive replies in the order of the requests.
//! - If pages were pre-copied ([`super::pre_copy`]), the proxy asks the source which of them have
//!   changed, and CRIU receives the merged pages.
//! - After the first message that is not a page request (in particular PS_IOV_CLOSE), all bytes are
//!   forwarded unchanged in both directions.

mod missing_memory;
mod reply;
mod thread;
mod uffd_batching;

pub(super) use thread::{PrefetchThread, start};

use super::page_server_wire::{
    CHANGED_PAGES, CLOSE_REPLY, GET_CHANGED, HeaderLayout, PE_PRESENT, PS_CMD_BITS, PS_IOV_ADD_F,
    PS_IOV_CLOSE, PS_IOV_FORCE_CLOSE, PS_IOV_GET, PageHeader,
};
use crate::engine::ReceivedPages;
use missing_memory::{MissingMemory, ProcessProgress};
use reply::{IncomingReply, UnexpectedReply};
use std::collections::{BTreeMap, VecDeque};
use std::io::{self, IoSlice, Write};
use std::time::{Duration, Instant};

/// Minimum size of a chunk in pages. The chunk size starts at the minimum and adapts to the
/// round-trip time.
const CHUNK_PAGES_MIN: u64 = 16;
/// Maximum size of a chunk in pages.
const CHUNK_PAGES_MAX: u64 = 128;
/// Maximum number of chunks in flight, not counting one chunk that CRIU waits for. The number is
/// low because the request for a page fault queues after the chunks.
const IN_FLIGHT_MAX: usize = 2;
/// Round-trip time above which the chunk size is halved.
const SLOW_ROUND_TRIP: Duration = Duration::from_millis(25);
/// Round-trip time below which the chunk size is doubled.
const FAST_ROUND_TRIP: Duration = Duration::from_millis(10);
/// Maximum number of chunks of one process that are in flight or stored before CRIU requests them.
const CHUNKS_PER_PROCESS_MAX: usize = 4;
/// Maximum number of stored or requested chunks of all processes, not counting chunks that CRIU has
/// requested.
const CHUNKS_MAX: usize = 32;
/// Maximum number of unanswered requests of CRIU; further requests remain in the socket. The number
/// of pending page faults is at most the number of the task's threads.
const PENDING_MAX: usize = 65_536;
/// Maximum number of unused buffers that are kept for further chunks.
const SPARE_BUFFERS_MAX: usize = 8;
/// Maximum number of bytes that are forwarded unchanged at once.
const PASSTHROUGH_BYTES_MAX: usize = 64 << 10;

/// Where the pages for the reply to a request of CRIU come from.
#[derive(Debug)]
enum ReplySource {
    Chunks,
    /// The same request was sent to the source. The value is the requested pages; `None` until they
    /// have arrived.
    DirectRequest(Option<Vec<u8>>),
}

/// An unanswered request of CRIU.
#[derive(Debug)]
struct PendingRequest {
    head: PageHeader,
    /// True for a request of the background transfer, false for a page fault.
    is_background: bool,
    reply_source: ReplySource,
}

/// A range that the background transfer has requested and that is not requested from the source
/// yet.
#[derive(Clone, Copy, Debug)]
struct BackgroundRange {
    process: u64,
    address: u64,
    end: u64,
}

/// A request to the source that is not answered yet.
#[derive(Debug)]
struct SourceRequest {
    process: u64,
    address: u64,
    pages: u64,
    is_chunk: bool,
    sent_at: Instant,
    /// The pre-copied pages of the range; then only the changed pages are requested. `None` if no
    /// pages of the range were pre-copied.
    pre_copied: Option<Vec<u8>>,
}

#[derive(Debug)]
struct Chunk {
    end: u64,
    /// Content of the chunk; `None` while it is in flight.
    bytes: Option<Vec<u8>>,
}

/// State of the proxy. It does no I/O except for writing to CRIU.
#[derive(Debug)]
struct Prefetcher {
    page_size: u64,
    now: Instant,
    processes: BTreeMap<u64, ProcessProgress>,
    /// Pages that were received by pre-copy before the restore.
    pre_copied: ReceivedPages,
    /// The header layout that CRIU uses; `None` until CRIU's first request.
    layout: Option<HeaderLayout>,
    /// True if data from CRIU is forwarded unchanged.
    passthrough: bool,
    /// Number of bytes of the reply to PS_IOV_CLOSE that the source has sent; `None` until CRIU has
    /// sent PS_IOV_CLOSE.
    close_reply_bytes: Option<usize>,
    request_bytes: Vec<u8>,
    pending: VecDeque<PendingRequest>,
    /// Number of bytes of the reply to the first pending request that CRIU has accepted.
    accepted_bytes: usize,
    /// True if CRIU's socket buffer is full.
    is_blocked: bool,
    background: VecDeque<BackgroundRange>,
    in_flight: VecDeque<SourceRequest>,
    /// The chunks in flight and in memory, by process and start address.
    chunks: BTreeMap<(u64, u64), Chunk>,
    /// Size of the next chunk in pages.
    chunk_pages: u64,
    incoming_reply: IncomingReply,
    spare_buffers: Vec<Vec<u8>>,
    to_source: Vec<u8>,
    passthrough_bytes: Vec<u8>,
    passthrough_buffer: Vec<u8>,
}

impl Prefetcher {
    fn new(
        missing: MissingMemory,
        pre_copied: ReceivedPages,
        page: u64,
        now: Instant,
    ) -> Prefetcher {
        Prefetcher {
            page_size: page,
            now,
            processes: missing.into_processes(),
            pre_copied,
            layout: None,
            passthrough: false,
            close_reply_bytes: None,
            request_bytes: Vec::new(),
            pending: VecDeque::new(),
            accepted_bytes: 0,
            is_blocked: false,
            background: VecDeque::new(),
            in_flight: VecDeque::new(),
            chunks: BTreeMap::new(),
            chunk_pages: CHUNK_PAGES_MIN,
            incoming_reply: IncomingReply::default(),
            spare_buffers: Vec::new(),
            to_source: Vec::new(),
            passthrough_bytes: Vec::new(),
            passthrough_buffer: Vec::new(),
        }
    }

    /// Sets the current time. Must be called before any other step.
    fn set_now(&mut self, now: Instant) {
        self.now = now;
    }

    /// True if CRIU has sent a message other than a page request, as it does before it exits
    /// successfully, or if no memory is missing.
    fn engine_is_done(&self) -> bool {
        self.passthrough || self.processes.is_empty()
    }

    /// True if CRIU has reported that it has all memory (PS_IOV_CLOSE).
    fn engine_has_all_memory(&self) -> bool {
        self.close_reply_bytes.is_some()
    }

    /// Returns the bytes of the reply to PS_IOV_CLOSE that have not arrived from the source.
    fn missing_close_reply(&self) -> &'static [u8] {
        &CLOSE_REPLY[self.close_reply_bytes.unwrap_or(0).min(CLOSE_REPLY.len())..]
    }

    /// True if CRIU has received the whole reply to PS_IOV_CLOSE, so that the proxy may end.
    fn is_finished(&self) -> bool {
        self.engine_has_all_memory()
            && self.missing_close_reply().is_empty()
            && self.passthrough_bytes.is_empty()
    }

    /// True if further requests of CRIU may be read.
    fn accepts_requests(&self) -> bool {
        self.pending.len() < PENDING_MAX
    }

    /// True if further data of the source may be read.
    fn accepts_replies(&self) -> bool {
        self.passthrough_bytes.len() < PASSTHROUGH_BYTES_MAX
    }

    /// True if data for CRIU waits because CRIU's socket buffer is full.
    fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Returns the bytes to be sent to the source. The caller removes the bytes that were sent.
    fn bytes_for_source(&mut self) -> &mut Vec<u8> {
        &mut self.to_source
    }

    // ---- The connection to CRIU

    fn receive_from_engine(&mut self, bytes: &[u8]) {
        self.request_bytes.extend(bytes);
        if !self.passthrough && self.layout.is_none() {
            self.layout = self.detect_layout();
            self.passthrough = self.layout.is_none();
        }
        while let (false, Some(layout)) = (self.passthrough, self.layout) {
            if self.request_bytes.len() < layout.bytes() {
                break;
            }
            let head = layout.read(&self.request_bytes);
            self.passthrough = head.command != PS_IOV_GET || head.pages == 0;
            if !self.passthrough {
                self.request_bytes.drain(..layout.bytes());
                self.add_request(head);
            }
        }
        if self.passthrough {
            if self.pending.is_empty() && is_close(&self.request_bytes) {
                self.close_reply_bytes.get_or_insert(0);
            }
            // Replies must follow the order of the requests, so all pending ranges are requested
            // before other bytes are forwarded.
            while self.request_background_chunk() {}
            self.to_source.append(&mut self.request_bytes);
        }
        self.request_chunks_ahead();
    }

    /// Detects the header layout: in the correct layout CRIU's first request is for a missing page.
    fn detect_layout(&self) -> Option<HeaderLayout> {
        let misses = |process, address| {
            self.processes
                .get(&process)
                .is_some_and(|of| of.missing_range_at(address).is_some())
        };
        HeaderLayout::detect(&self.request_bytes, misses)
    }

    fn add_request(&mut self, head: PageHeader) {
        let end = self.request_end(&head);
        let page = self.page_size;
        let mut is_background = false;
        if let Some(process) = self.processes.get_mut(&head.process) {
            is_background = process.record_request(head.address, end, page)
                && process.is_missing(head.address, end);
        }
        if is_background {
            self.background.push_back(BackgroundRange {
                process: head.process,
                address: head.address,
                end,
            });
        }
        let from = match is_background || self.is_covered(head.process, head.address, end) {
            true => ReplySource::Chunks,
            false => self.request_directly(&head),
        };
        self.pending.push_back(PendingRequest {
            head,
            is_background,
            reply_source: from,
        });
    }

    fn request_end(&self, head: &PageHeader) -> u64 {
        head.address
            .saturating_add(head.pages.saturating_mul(self.page_size))
    }

    /// True if the whole range is in chunks that are in memory or in flight.
    fn is_covered(&self, process: u64, address: u64, end: u64) -> bool {
        self.first_uncovered(process, address, end).is_none()
    }

    /// Returns the first address of the range that is in no chunk.
    fn first_uncovered(&self, process: u64, mut address: u64, end: u64) -> Option<u64> {
        while address < end {
            match self.chunk_at(process, address) {
                Some((_, chunk)) => address = chunk.end,
                None => return Some(address),
            }
        }
        None
    }

    fn chunk_at(&self, process: u64, address: u64) -> Option<(u64, &Chunk)> {
        let (&(of, start), chunk) = self.chunks.range(..=(process, address)).next_back()?;
        (of == process && address < chunk.end).then_some((start, chunk))
    }

    /// Writes the available replies until CRIU accepts no more data.
    fn write_replies(&mut self, out: &mut impl Write) -> io::Result<()> {
        self.is_blocked = false;
        while self.write_first_reply(out)? {}
        self.request_chunks_ahead();
        if self.pending.is_empty() {
            self.is_blocked = !write_from(out, &mut self.passthrough_bytes)?;
        }
        Ok(())
    }

    /// Answers the first pending request of CRIU. Returns true if the next request may be answered
    /// too.
    fn write_first_reply(&mut self, out: &mut impl Write) -> io::Result<bool> {
        let (Some(layout), Some(first)) = (self.layout, self.pending.front()) else {
            return Ok(false);
        };
        let (head, is_background) = (first.head, first.is_background);
        let mut found: Vec<&[u8]> = Vec::new();
        match &first.reply_source {
            ReplySource::DirectRequest(None) => return Ok(false),
            ReplySource::DirectRequest(Some(bytes)) => found.push(bytes),
            ReplySource::Chunks => {
                let end = self.request_end(&head);
                let mut at = head.address;
                while at < end {
                    let Some((start, chunk)) = self.chunk_at(head.process, at) else {
                        self.request_missing_part(&head, is_background, at);
                        return Ok(false);
                    };
                    let Some(bytes) = &chunk.bytes else {
                        return Ok(false);
                    };
                    let until = end.min(chunk.end);
                    found.push(&bytes[(at - start) as usize..(until - start) as usize]);
                    at = until;
                }
            }
        }
        let bytes: usize = found.iter().map(|part| part.len()).sum();
        let answer = PageHeader {
            command: PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F,
            pages: bytes as u64 / self.page_size,
            ..head
        };
        let answer = layout.write(&answer);
        found.insert(0, &answer);
        let whole = answer.len() + bytes;
        self.accepted_bytes += write_parts(out, &found, self.accepted_bytes)?;
        if self.accepted_bytes < whole {
            self.is_blocked = true;
            return Ok(false);
        }
        self.accepted_bytes = 0;
        let Some(done) = self.pending.pop_front() else {
            return Ok(false);
        };
        self.pre_copied
            .mark_delivered(head.process, head.address, bytes as u64 / self.page_size);
        if let ReplySource::DirectRequest(Some(bytes)) = done.reply_source {
            self.recycle(bytes);
        }
        if done.is_background {
            self.drop_chunks_before(head.process, head.address + bytes as u64);
        }
        Ok(true)
    }

    /// Requests from the source what the first pending request of CRIU still lacks at the address
    /// `at`. Either that page was not requested yet, or the source's reply for its chunk was
    /// shorter than requested.
    fn request_missing_part(&mut self, head: &PageHeader, is_background: bool, at: u64) {
        if !is_background {
            let from = self.request_directly(head);
            self.pending
                .front_mut()
                .expect("it was looked at")
                .reply_source = from;
            return;
        }
        let (process, end) = (head.process, self.request_end(head));
        let is_next_range = |range: &BackgroundRange| {
            range.process == process && (range.address..range.end).contains(&at)
        };
        if !self.background.iter().any(is_next_range) {
            self.background.push_front(BackgroundRange {
                process,
                address: at,
                end,
            });
        }
    }

    /// Drops the chunks below this address, which the background transfer no longer needs.
    fn drop_chunks_before(&mut self, process: u64, address: u64) {
        let obsolete = self.chunks.range((process, 0)..(process, address));
        let obsolete = obsolete.filter(|(_, chunk)| chunk.bytes.is_some() && chunk.end <= address);
        let obsolete: Vec<(u64, u64)> = obsolete.map(|(key, _)| *key).collect();
        for key in obsolete {
            if let Some(bytes) = self.chunks.remove(&key).and_then(|chunk| chunk.bytes) {
                self.recycle(bytes);
            }
        }
    }

    fn recycle(&mut self, bytes: Vec<u8>) {
        if self.spare_buffers.len() < SPARE_BUFFERS_MAX
            && bytes.capacity() as u64 <= CHUNK_PAGES_MAX * self.page_size
        {
            self.spare_buffers.push(bytes);
        }
    }

    // ---- The connection to the source

    fn send_request(&mut self, process: u64, address: u64, pages: u64, is_chunk: bool) {
        let Some(layout) = self.layout else { return };
        let pre_copied = self.pre_copied.get(process, address, pages);
        let command = if pre_copied.is_some() {
            GET_CHANGED
        } else {
            PS_IOV_GET
        };
        self.to_source.extend(layout.write(&PageHeader {
            command,
            pages,
            address,
            process,
        }));
        self.in_flight.push_back(SourceRequest {
            process,
            address,
            pages,
            is_chunk,
            sent_at: self.now,
            pre_copied,
        });
    }

    fn request_directly(&mut self, head: &PageHeader) -> ReplySource {
        let &PageHeader {
            process,
            address,
            pages,
            ..
        } = head;
        self.send_request(process, address, pages, false);
        ReplySource::DirectRequest(None)
    }

    /// Requests the next chunk of the pending background ranges. Returns false if there is none.
    fn request_background_chunk(&mut self) -> bool {
        while let Some(BackgroundRange {
            process,
            address,
            end,
        }) = self.background.pop_front()
        {
            let Some(at) = self.first_uncovered(process, address, end) else {
                continue;
            };
            let Some(until) = self.request_chunk(process, at) else {
                continue;
            };
            self.background.push_front(BackgroundRange {
                process,
                address: until,
                end,
            });
            return true;
        }
        false
    }

    /// Requests a chunk that starts at an address that no chunk contains. Returns the chunk's end
    /// address; `None` if the memory at `address` is not missing.
    fn request_chunk(&mut self, process: u64, address: u64) -> Option<u64> {
        let (_, end) = self.processes.get(&process)?.missing_range_at(address)?;
        let end = end.min(address + self.chunk_pages * self.page_size);
        let next = self
            .chunks
            .range((process, address)..)
            .next()
            .filter(|((of, _), _)| *of == process);
        let end = next.map_or(end, |((_, start), _)| end.min(*start));
        self.chunks
            .insert((process, address), Chunk { end, bytes: None });
        self.send_request(process, address, (end - address) / self.page_size, true);
        Some(end)
    }

    /// Requests chunks until enough are in flight. Chunks that CRIU waits for are requested first.
    fn request_chunks_ahead(&mut self) {
        while self.in_flight.len() <= IN_FLIGHT_MAX && self.request_background_chunk() {}
        if self.passthrough {
            return;
        }
        let started_transfers: Vec<(u64, u64)> = self
            .processes
            .iter()
            .filter_map(|(number, process)| Some((*number, process.background_position()?)))
            .collect();
        for (process, mut address) in started_transfers {
            for _ in 0..CHUNKS_PER_PROCESS_MAX {
                let known = self.chunk_at(process, address).map(|(_, chunk)| chunk.end);
                if known.is_none()
                    && (self.in_flight.len() >= IN_FLIGHT_MAX || self.chunks.len() >= CHUNKS_MAX)
                {
                    return;
                }
                let Some(end) = known.or_else(|| self.request_chunk(process, address)) else {
                    break;
                };
                match self
                    .processes
                    .get(&process)
                    .and_then(|p| p.next_missing(end))
                {
                    Some(next) => address = next,
                    None => break,
                }
            }
        }
    }

    /// True if data from the source is forwarded unchanged.
    fn source_passes_through(&self) -> bool {
        self.in_flight.is_empty() && (self.passthrough || self.layout.is_none())
    }

    /// Returns the buffer into which the next bytes from the source must be read.
    fn receive_buffer(&mut self) -> &mut [u8] {
        if self.source_passes_through() {
            self.passthrough_buffer.resize(PASSTHROUGH_BYTES_MAX, 0);
            return &mut self.passthrough_buffer;
        }
        self.incoming_reply
            .buffer(self.layout.map_or(0, HeaderLayout::bytes))
    }

    /// Processes `bytes` bytes that were read into the buffer of
    /// [`receive_buffer`](Self::receive_buffer).
    ///
    /// # Errors
    /// The source has sent something other than the expected reply.
    fn receive_from_source(&mut self, bytes: usize) -> Result<(), UnexpectedReply> {
        if self.source_passes_through() {
            self.passthrough_bytes
                .extend(&self.passthrough_buffer[..bytes]);
            self.close_reply_bytes = self.close_reply_bytes.map(|came| came + bytes);
            return Ok(());
        }
        let Some(layout) = self.layout else {
            return Ok(());
        };
        self.incoming_reply.advance(bytes);
        if let Some(head) = self.incoming_reply.header(layout) {
            self.handle_header(&head)?;
        }
        self.incoming_reply.apply_bitmap(self.page_size)?;
        if let Some(body) = self.incoming_reply.take_pages() {
            self.handle_pages(body);
        }
        self.request_chunks_ahead();
        Ok(())
    }

    fn handle_header(&mut self, head: &PageHeader) -> Result<(), UnexpectedReply> {
        let unasked = || UnexpectedReply::Unasked(*head);
        let request = self.in_flight.front_mut().ok_or_else(unasked)?;
        let &mut SourceRequest {
            process,
            address,
            pages,
            ..
        } = request;
        let is_of_it = (head.process, head.address) == (process, address);
        match (&mut request.pre_copied, head.command, head.pages) {
            (Some(known), CHANGED_PAGES, answered) if is_of_it && answered == pages => {
                self.incoming_reply
                    .expect_bitmap(std::mem::take(known), pages);
            }
            (None, command, answered)
                if is_of_it
                    && command == PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F
                    && (1..=pages).contains(&answered) =>
            {
                let mut body = self.spare_buffers.pop().unwrap_or_default();
                body.resize((answered * self.page_size) as usize, 0);
                self.incoming_reply.expect_pages(body);
            }
            _ => {
                return Err(UnexpectedReply::Different {
                    process,
                    address,
                    pages,
                    reply: *head,
                });
            }
        }
        Ok(())
    }

    fn handle_pages(&mut self, body: Vec<u8>) {
        let Some(request) = self.in_flight.pop_front() else {
            return;
        };
        if request.is_chunk {
            self.chunk_pages = match self.now.saturating_duration_since(request.sent_at) {
                took if took > SLOW_ROUND_TRIP => (self.chunk_pages / 2).max(CHUNK_PAGES_MIN),
                took if took < FAST_ROUND_TRIP => (self.chunk_pages * 2).min(CHUNK_PAGES_MAX),
                _ => self.chunk_pages,
            };
            if let Some(chunk) = self.chunks.get_mut(&(request.process, request.address)) {
                chunk.end = request.address + body.len() as u64;
                chunk.bytes = Some(body);
            }
        } else {
            let is_its = |wanted: &&mut PendingRequest| {
                let PageHeader {
                    process,
                    address,
                    pages,
                    ..
                } = wanted.head;
                let is_same =
                    (process, address, pages) == (request.process, request.address, request.pages);
                is_same && matches!(wanted.reply_source, ReplySource::DirectRequest(None))
            };
            if let Some(waits) = self.pending.iter_mut().find(is_its) {
                waits.reply_source = ReplySource::DirectRequest(Some(body));
            }
        }
    }
}

/// True if this is the message that CRIU sends before it exits successfully (PS_IOV_CLOSE).
fn is_close(words: &[u8]) -> bool {
    let command = words
        .first_chunk()
        .map(|command| u32::from_ne_bytes(*command));
    matches!(command, Some(PS_IOV_CLOSE | PS_IOV_FORCE_CLOSE))
}

/// Writes the concatenation of `parts` from byte `skipped` on. Returns the number of bytes that
/// were accepted.
fn write_parts(out: &mut impl Write, parts: &[&[u8]], skipped: usize) -> io::Result<usize> {
    let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut left = &mut slices[..];
    IoSlice::advance_slices(&mut left, skipped);
    let mut accepted_bytes = 0;
    while !left.is_empty() {
        match out.write_vectored(left) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => {
                accepted_bytes += written;
                IoSlice::advance_slices(&mut left, written);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
            Err(e) => return Err(e),
        }
    }
    Ok(accepted_bytes)
}

/// Writes these bytes and removes those that were accepted. Returns true if no bytes remain.
fn write_from(out: &mut impl Write, bytes: &mut Vec<u8>) -> io::Result<bool> {
    let accepted_bytes = write_parts(out, &[bytes], 0)?;
    bytes.drain(..accepted_bytes);
    Ok(bytes.is_empty())
}

#[cfg(test)]
mod tests;
