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
const IN_FLIGHT_CHUNKS_MAX: usize = 2;
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
const PENDING_REQUESTS_MAX: usize = 65_536;
/// Maximum number of unused buffers that are stored for further chunks.
const SPARE_BUFFERS_MAX: usize = 8;
/// Maximum number of bytes that are forwarded unchanged at once.
const PASSTHROUGH_BYTES_MAX: usize = 64 << 10;

/// The origin of the pages for the reply to a request of CRIU.
#[derive(Debug)]
enum ReplySource {
    Chunks,
    /// The same request was sent to the source. The value contains the requested pages; `None`
    /// until the pages have arrived.
    DirectRequest(Option<Vec<u8>>),
}

/// An unanswered request of CRIU.
#[derive(Debug)]
struct PendingRequest {
    header: PageHeader,
    /// True for a request of the background transfer, false for a page fault.
    is_background: bool,
    reply_source: ReplySource,
}

/// A range that the background transfer has requested but the proxy has not requested from the
/// source yet.
#[derive(Clone, Copy, Debug)]
struct BackgroundRange {
    namespace_pid: u64,
    address: u64,
    end: u64,
}

/// A request to the source that is not answered yet.
#[derive(Debug)]
struct SourceRequest {
    namespace_pid: u64,
    address: u64,
    page_count: u64,
    is_chunk: bool,
    sent_at: Instant,
    /// Pre-copied content of the range. Only the pages that have changed since the pre-copy are
    /// requested. `None` if no pages of the range were pre-copied; then all pages are requested.
    pre_copied_content: Option<Vec<u8>>,
}

#[derive(Debug)]
struct Chunk {
    end: u64,
    /// Content of the chunk; `None` while it is in flight.
    content: Option<Vec<u8>>,
}

/// State of the proxy. It does no I/O except for writing to CRIU.
#[derive(Debug)]
struct Prefetcher {
    page_size: u64,
    now: Instant,
    processes: BTreeMap<u64, ProcessProgress>,
    /// Pages that were received by pre-copy before the restore.
    received_pages: ReceivedPages,
    /// The header layout that CRIU uses; `None` until CRIU's first request.
    layout: Option<HeaderLayout>,
    /// True if data from CRIU is forwarded unchanged.
    is_passthrough: bool,
    /// Number of bytes of the reply to PS_IOV_CLOSE that the source has sent; `None` until CRIU has
    /// sent PS_IOV_CLOSE.
    close_reply_bytes: Option<usize>,
    request_bytes: Vec<u8>,
    pending_requests: VecDeque<PendingRequest>,
    /// Number of bytes of the reply to the first pending request that CRIU has accepted.
    accepted_bytes: usize,
    /// True if CRIU's socket buffer is full.
    is_blocked: bool,
    background_ranges: VecDeque<BackgroundRange>,
    source_requests: VecDeque<SourceRequest>,
    /// The chunks in flight and in memory, by process and start address.
    chunks: BTreeMap<(u64, u64), Chunk>,
    /// Size of the next chunk in pages.
    chunk_pages: u64,
    incoming_reply: IncomingReply,
    spare_buffers: Vec<Vec<u8>>,
    source_output: Vec<u8>,
    passthrough_bytes: Vec<u8>,
    passthrough_buffer: Vec<u8>,
}

impl Prefetcher {
    fn new(
        missing_memory: MissingMemory,
        received_pages: ReceivedPages,
        page_size: u64,
        now: Instant,
    ) -> Self {
        Self {
            page_size,
            now,
            processes: missing_memory.into_processes(),
            received_pages,
            layout: None,
            is_passthrough: false,
            close_reply_bytes: None,
            request_bytes: Vec::new(),
            pending_requests: VecDeque::new(),
            accepted_bytes: 0,
            is_blocked: false,
            background_ranges: VecDeque::new(),
            source_requests: VecDeque::new(),
            chunks: BTreeMap::new(),
            chunk_pages: CHUNK_PAGES_MIN,
            incoming_reply: IncomingReply::default(),
            spare_buffers: Vec::new(),
            source_output: Vec::new(),
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
        self.is_passthrough || self.processes.is_empty()
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
        self.pending_requests.len() < PENDING_REQUESTS_MAX
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
        &mut self.source_output
    }

    // ---- The connection to CRIU

    fn receive_from_engine(&mut self, bytes: &[u8]) {
        self.request_bytes.extend(bytes);
        if !self.is_passthrough && self.layout.is_none() {
            self.layout = self.detect_layout();
            self.is_passthrough = self.layout.is_none();
        }
        while let (false, Some(layout)) = (self.is_passthrough, self.layout) {
            if self.request_bytes.len() < layout.bytes() {
                break;
            }
            let header = layout.decode(&self.request_bytes);
            self.is_passthrough = header.command != PS_IOV_GET || header.page_count == 0;
            if !self.is_passthrough {
                self.request_bytes.drain(..layout.bytes());
                self.add_request(header);
            }
        }
        if self.is_passthrough {
            if self.pending_requests.is_empty() && is_close_message(&self.request_bytes) {
                self.close_reply_bytes.get_or_insert(0);
            }
            // Replies must follow the order of the requests, so all pending ranges are requested
            // before other bytes are forwarded.
            while self.request_background_chunk() {}
            self.source_output.append(&mut self.request_bytes);
        }
        self.request_chunks_ahead();
    }

    /// Detects the header layout: in the correct layout CRIU's first request is for a missing page.
    fn detect_layout(&self) -> Option<HeaderLayout> {
        let is_missing = |namespace_pid, address| {
            self.processes
                .get(&namespace_pid)
                .is_some_and(|progress| progress.missing_range_at(address).is_some())
        };
        HeaderLayout::detect(&self.request_bytes, is_missing)
    }

    fn add_request(&mut self, header: PageHeader) {
        let end = self.request_end_address(&header);
        let page_size = self.page_size;
        let mut is_background = false;
        if let Some(process) = self.processes.get_mut(&header.namespace_pid) {
            is_background = process.record_request(header.address, end, page_size)
                && process.is_missing(header.address, end);
        }
        if is_background {
            self.background_ranges.push_back(BackgroundRange {
                namespace_pid: header.namespace_pid,
                address: header.address,
                end,
            });
        }
        let reply_source =
            match is_background || self.is_covered(header.namespace_pid, header.address, end) {
                true => ReplySource::Chunks,
                false => self.queue_direct_request(&header),
            };
        self.pending_requests.push_back(PendingRequest {
            header,
            is_background,
            reply_source,
        });
    }

    fn request_end_address(&self, header: &PageHeader) -> u64 {
        header
            .address
            .saturating_add(header.page_count.saturating_mul(self.page_size))
    }

    /// True if the whole range is in chunks that are in memory or in flight.
    fn is_covered(&self, namespace_pid: u64, address: u64, end: u64) -> bool {
        self.first_uncovered(namespace_pid, address, end).is_none()
    }

    /// Returns the first address of the range that is in no chunk.
    fn first_uncovered(&self, namespace_pid: u64, mut address: u64, end: u64) -> Option<u64> {
        while address < end {
            match self.chunk_at(namespace_pid, address) {
                Some((_, chunk)) => address = chunk.end,
                None => return Some(address),
            }
        }
        None
    }

    fn chunk_at(&self, namespace_pid: u64, address: u64) -> Option<(u64, &Chunk)> {
        let (&(chunk_process, start), chunk) =
            self.chunks.range(..=(namespace_pid, address)).next_back()?;
        (chunk_process == namespace_pid && address < chunk.end).then_some((start, chunk))
    }

    /// Writes the available replies until CRIU accepts no more data.
    fn write_replies(&mut self, out: &mut impl Write) -> io::Result<()> {
        self.is_blocked = false;
        while self.write_first_reply(out)? {}
        self.request_chunks_ahead();
        if self.pending_requests.is_empty() {
            self.is_blocked = !write_and_remove(out, &mut self.passthrough_bytes)?;
        }
        Ok(())
    }

    /// Answers the first pending request of CRIU. Returns true if the next request may be answered
    /// too.
    fn write_first_reply(&mut self, out: &mut impl Write) -> io::Result<bool> {
        let (Some(layout), Some(request)) = (self.layout, self.pending_requests.front()) else {
            return Ok(false);
        };
        let (header, is_background) = (request.header, request.is_background);
        let mut contents: Vec<&[u8]> = Vec::new();
        match &request.reply_source {
            ReplySource::DirectRequest(None) => return Ok(false),
            ReplySource::DirectRequest(Some(content_bytes)) => contents.push(content_bytes),
            ReplySource::Chunks => {
                let end = self.request_end_address(&header);
                let mut address = header.address;
                while address < end {
                    let Some((start, chunk)) = self.chunk_at(header.namespace_pid, address) else {
                        self.request_missing_part(&header, is_background, address);
                        return Ok(false);
                    };
                    let Some(content_bytes) = &chunk.content else {
                        return Ok(false);
                    };
                    let part_end = end.min(chunk.end);
                    contents.push(
                        &content_bytes[(address - start) as usize..(part_end - start) as usize],
                    );
                    address = part_end;
                }
            }
        }
        let content_bytes: usize = contents.iter().map(|part| part.len()).sum();
        let reply_header = PageHeader {
            command: PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F,
            page_count: content_bytes as u64 / self.page_size,
            ..header
        };
        let reply_header = layout.encode(&reply_header);
        contents.insert(0, &reply_header);
        let reply_bytes = reply_header.len() + content_bytes;
        self.accepted_bytes += write_parts(out, &contents, self.accepted_bytes)?;
        if self.accepted_bytes < reply_bytes {
            self.is_blocked = true;
            return Ok(false);
        }
        self.accepted_bytes = 0;
        let Some(answered_request) = self.pending_requests.pop_front() else {
            return Ok(false);
        };
        self.received_pages.mark_delivered(
            header.namespace_pid,
            header.address,
            content_bytes as u64 / self.page_size,
        );
        if let ReplySource::DirectRequest(Some(content_bytes)) = answered_request.reply_source {
            self.recycle_buffer(content_bytes);
        }
        if answered_request.is_background {
            self.drop_chunks_before(header.namespace_pid, header.address + content_bytes as u64);
        }
        Ok(true)
    }

    /// Handles that no chunk contains the page at the address `address`, which is missing for the
    /// reply to the first pending request of CRIU. Either the page was not requested yet, or the
    /// source's reply for its chunk was shorter than requested. A page-fault request is sent to the
    /// source; the rest of a background request is queued as a range.
    fn request_missing_part(&mut self, header: &PageHeader, is_background: bool, address: u64) {
        if !is_background {
            let reply_source = self.queue_direct_request(header);
            self.pending_requests
                .front_mut()
                .expect("it was looked at")
                .reply_source = reply_source;
            return;
        }
        let (namespace_pid, end) = (header.namespace_pid, self.request_end_address(header));
        let is_next_range = |range: &BackgroundRange| {
            range.namespace_pid == namespace_pid && (range.address..range.end).contains(&address)
        };
        if !self.background_ranges.iter().any(is_next_range) {
            self.background_ranges.push_front(BackgroundRange {
                namespace_pid,
                address,
                end,
            });
        }
    }

    /// Drops the chunks below this address, which the background transfer no longer needs.
    fn drop_chunks_before(&mut self, namespace_pid: u64, address: u64) {
        let obsolete_chunks = self
            .chunks
            .range((namespace_pid, 0)..(namespace_pid, address));
        let obsolete_chunks =
            obsolete_chunks.filter(|(_, chunk)| chunk.content.is_some() && chunk.end <= address);
        let obsolete_chunks: Vec<(u64, u64)> = obsolete_chunks.map(|(key, _)| *key).collect();
        for key in obsolete_chunks {
            if let Some(bytes) = self.chunks.remove(&key).and_then(|chunk| chunk.content) {
                self.recycle_buffer(bytes);
            }
        }
    }

    fn recycle_buffer(&mut self, bytes: Vec<u8>) {
        if self.spare_buffers.len() < SPARE_BUFFERS_MAX
            && bytes.capacity() as u64 <= CHUNK_PAGES_MAX * self.page_size
        {
            self.spare_buffers.push(bytes);
        }
    }

    // ---- The connection to the source

    fn queue_source_request(
        &mut self,
        namespace_pid: u64,
        address: u64,
        page_count: u64,
        is_chunk: bool,
    ) {
        let Some(layout) = self.layout else { return };
        let pre_copied_content = self.received_pages.get(namespace_pid, address, page_count);
        let command = if pre_copied_content.is_some() {
            GET_CHANGED
        } else {
            PS_IOV_GET
        };
        self.source_output.extend(layout.encode(&PageHeader {
            command,
            page_count,
            address,
            namespace_pid,
        }));
        self.source_requests.push_back(SourceRequest {
            namespace_pid,
            address,
            page_count,
            is_chunk,
            sent_at: self.now,
            pre_copied_content,
        });
    }

    fn queue_direct_request(&mut self, header: &PageHeader) -> ReplySource {
        let &PageHeader {
            namespace_pid,
            address,
            page_count: pages,
            ..
        } = header;
        self.queue_source_request(namespace_pid, address, pages, false);
        ReplySource::DirectRequest(None)
    }

    /// Requests the next chunk of the pending background ranges. Returns false if no chunk was
    /// requested.
    fn request_background_chunk(&mut self) -> bool {
        while let Some(BackgroundRange {
            namespace_pid: pid,
            address,
            end,
        }) = self.background_ranges.pop_front()
        {
            let Some(chunk_start) = self.first_uncovered(pid, address, end) else {
                continue;
            };
            let Some(chunk_end) = self.request_chunk(pid, chunk_start) else {
                continue;
            };
            self.background_ranges.push_front(BackgroundRange {
                namespace_pid: pid,
                address: chunk_end,
                end,
            });
            return true;
        }
        false
    }

    /// Requests a chunk that starts at an address that no chunk contains. Returns the chunk's end
    /// address; `None` if the memory at `address` is not missing.
    fn request_chunk(&mut self, namespace_pid: u64, address: u64) -> Option<u64> {
        let (_, end) = self
            .processes
            .get(&namespace_pid)?
            .missing_range_at(address)?;
        let end = end.min(address + self.chunk_pages * self.page_size);
        let next_chunk = self
            .chunks
            .range((namespace_pid, address)..)
            .next()
            .filter(|((chunk_process, _), _)| *chunk_process == namespace_pid);
        let end = next_chunk.map_or(end, |((_, start), _)| end.min(*start));
        self.chunks
            .insert((namespace_pid, address), Chunk { end, content: None });
        self.queue_source_request(
            namespace_pid,
            address,
            (end - address) / self.page_size,
            true,
        );
        Some(end)
    }

    /// Requests chunks until enough are in flight. Chunks that CRIU waits for are requested first.
    fn request_chunks_ahead(&mut self) {
        while self.source_requests.len() <= IN_FLIGHT_CHUNKS_MAX && self.request_background_chunk()
        {
        }
        if self.is_passthrough {
            return;
        }
        let started_transfers: Vec<(u64, u64)> = self
            .processes
            .iter()
            .filter_map(|(namespace_pid, process)| {
                Some((*namespace_pid, process.background_position()?))
            })
            .collect();
        for (process, mut address) in started_transfers {
            for _ in 0..CHUNKS_PER_PROCESS_MAX {
                let known_end = self.chunk_at(process, address).map(|(_, chunk)| chunk.end);
                if known_end.is_none()
                    && (self.source_requests.len() >= IN_FLIGHT_CHUNKS_MAX
                        || self.chunks.len() >= CHUNKS_MAX)
                {
                    return;
                }
                let Some(end) = known_end.or_else(|| self.request_chunk(process, address)) else {
                    break;
                };
                match self
                    .processes
                    .get(&process)
                    .and_then(|p| p.next_missing(end))
                {
                    Some(next_missing) => address = next_missing,
                    None => break,
                }
            }
        }
    }

    /// True if data from the source is forwarded unchanged.
    fn source_passes_through(&self) -> bool {
        self.source_requests.is_empty() && (self.is_passthrough || self.layout.is_none())
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

    /// Processes the `byte_count` bytes that the caller has read into the buffer of
    /// [`receive_buffer`](Self::receive_buffer).
    ///
    /// # Errors
    /// The source has sent something other than the expected reply.
    fn receive_from_source(&mut self, byte_count: usize) -> Result<(), UnexpectedReply> {
        if self.source_passes_through() {
            self.passthrough_bytes
                .extend(&self.passthrough_buffer[..byte_count]);
            self.close_reply_bytes = self
                .close_reply_bytes
                .map(|arrived_bytes| arrived_bytes + byte_count);
            return Ok(());
        }
        let Some(layout) = self.layout else {
            return Ok(());
        };
        self.incoming_reply.advance(byte_count);
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

    fn handle_header(&mut self, header: &PageHeader) -> Result<(), UnexpectedReply> {
        let unrequested_error = || UnexpectedReply::Unrequested(*header);
        let request = self
            .source_requests
            .front_mut()
            .ok_or_else(unrequested_error)?;
        let &mut SourceRequest {
            namespace_pid: pid,
            address,
            page_count: requested_page_count,
            ..
        } = request;
        let matches_request = (header.namespace_pid, header.address) == (pid, address);
        match (
            &mut request.pre_copied_content,
            header.command,
            header.page_count,
        ) {
            (Some(known_content), CHANGED_PAGES, reply_page_count)
                if matches_request && reply_page_count == requested_page_count =>
            {
                self.incoming_reply
                    .expect_bitmap(std::mem::take(known_content), requested_page_count);
            }
            (None, command, reply_page_count)
                if matches_request
                    && command == PE_PRESENT << PS_CMD_BITS | PS_IOV_ADD_F
                    && (1..=requested_page_count).contains(&reply_page_count) =>
            {
                let mut body = self.spare_buffers.pop().unwrap_or_default();
                body.resize((reply_page_count * self.page_size) as usize, 0);
                self.incoming_reply.expect_pages(body);
            }
            _ => {
                return Err(UnexpectedReply::Mismatch {
                    process: pid,
                    address,
                    pages: requested_page_count,
                    reply: *header,
                });
            }
        }
        Ok(())
    }

    fn handle_pages(&mut self, body: Vec<u8>) {
        let Some(request) = self.source_requests.pop_front() else {
            return;
        };
        if request.is_chunk {
            self.chunk_pages = match self.now.saturating_duration_since(request.sent_at) {
                round_trip_time if round_trip_time > SLOW_ROUND_TRIP => {
                    (self.chunk_pages / 2).max(CHUNK_PAGES_MIN)
                }
                round_trip_time if round_trip_time < FAST_ROUND_TRIP => {
                    (self.chunk_pages * 2).min(CHUNK_PAGES_MAX)
                }
                _ => self.chunk_pages,
            };
            if let Some(chunk) = self
                .chunks
                .get_mut(&(request.namespace_pid, request.address))
            {
                chunk.end = request.address + body.len() as u64;
                chunk.content = Some(body);
            }
        } else {
            let is_answered = |pending_request: &&mut PendingRequest| {
                let PageHeader {
                    namespace_pid: pid,
                    address,
                    page_count: pages,
                    ..
                } = pending_request.header;
                let is_same = (pid, address, pages)
                    == (request.namespace_pid, request.address, request.page_count);
                is_same
                    && matches!(
                        pending_request.reply_source,
                        ReplySource::DirectRequest(None)
                    )
            };
            if let Some(waiting_request) = self.pending_requests.iter_mut().find(is_answered) {
                waiting_request.reply_source = ReplySource::DirectRequest(Some(body));
            }
        }
    }
}

/// True if the bytes start with the message that CRIU sends before it exits successfully
/// (PS_IOV_CLOSE).
fn is_close_message(bytes: &[u8]) -> bool {
    let command = bytes
        .first_chunk()
        .map(|command| u32::from_ne_bytes(*command));
    matches!(command, Some(PS_IOV_CLOSE | PS_IOV_FORCE_CLOSE))
}

/// Writes the concatenation of `parts` without its first `skipped_bytes` bytes. Returns the number
/// of bytes that `out` has accepted.
fn write_parts(out: &mut impl Write, parts: &[&[u8]], skipped_bytes: usize) -> io::Result<usize> {
    let mut slices: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let mut remaining_slices = &mut slices[..];
    IoSlice::advance_slices(&mut remaining_slices, skipped_bytes);
    let mut accepted_bytes = 0;
    while !remaining_slices.is_empty() {
        match out.write_vectored(remaining_slices) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written_bytes) => {
                accepted_bytes += written_bytes;
                IoSlice::advance_slices(&mut remaining_slices, written_bytes);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
            Err(e) => return Err(e),
        }
    }
    Ok(accepted_bytes)
}

/// Writes these bytes and removes those that `out` has accepted. Returns true if no bytes remain.
fn write_and_remove(out: &mut impl Write, bytes: &mut Vec<u8>) -> io::Result<bool> {
    let accepted_bytes = write_parts(out, &[bytes], 0)?;
    bytes.drain(..accepted_bytes);
    Ok(bytes.is_empty())
}

#[cfg(test)]
mod tests;
