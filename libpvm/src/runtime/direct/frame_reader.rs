//! Reading side of an established direct route: decrypts records and passes the frames in them to a
//! [`FrameSink`].
//!
//! Small frames are read into a buffer, many at once. The payload of a large frame is read and
//! decrypted in the memory of its message: the kernel writes the records behind what the message
//! has already, and decryption moves each record's content to its place. The sender begins each
//! large payload with a new record, and tells how much of the message follows, so that a read ends
//! with the message. No layout of the records does harm: what does not belong to the message is
//! copied to the buffer.

use super::frame_stream::{
    FRAME_HEAD_BYTES, KEY_UPDATE_MESSAGE, KeySchedule, PLACED_PAYLOAD_BYTES_MIN,
};
use super::record::{
    CONTENT_BYTES_MAX, ContentType, RECORD_BYTES_MAX, RECORD_HEAD_BYTES, RECORD_TAIL_BYTES,
    TrafficKey, record_length,
};
use super::{FRAME_BYTES_MAX, FrameSink, IoCounts, RouteEndReason};
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use sempa_proto::buffer_pool;
use sempa_proto::link::{FRAGMENT_BYTES_MAX, SHORT_HEAD_BYTES};
use sempa_socket::receive_into_capacity;
use std::io::ErrorKind;
use std::net::TcpStream;
use std::os::fd::AsRawFd;

const INPUT_BUFFER_BYTES: usize = 384 << 10;
/// Minimum free space for a read into the buffer. If less space is free, the buffered data is moved
/// to the front of the buffer. The minimum is high because large reads are efficient.
const READ_SPACE_BYTES_MIN: usize = 128 << 10;
/// Maximum number of bytes read in one call. Because of this limit, a fast peer cannot occupy the
/// caller forever.
const READ_BYTES_MAX: usize = 1 << 20;
/// Maximum number of bytes of one read into a message, so few that they stay in the cache until
/// they are decrypted.
const PLACED_READ_BYTES_MAX: usize = 256 << 10;
/// Maximum number of bytes of a read into the buffer after a large message. Another large message
/// probably follows, and what the buffer has of it must be copied.
const READ_BYTES_AFTER_LARGE: usize = 4 << 10;
/// Memory of a message that is reserved for the heads and tags of the records of one read.
const RECORD_OVERHEAD_BYTES_MAX: usize = 8 << 10;
/// Size of the head and the tag of a record.
const RECORD_OVERHEAD_BYTES: usize = RECORD_HEAD_BYTES + RECORD_TAIL_BYTES;

/// Alert that announces the orderly end of a connection.
pub(super) const CLOSE_NOTIFY_ALERT: [u8; 2] = [1, 0];

/// Input buffer: decrypted content from `plain_start` to `plain_end`, and encrypted records from
/// `records_start` to `records_end`. The buffer is not allocated while the route is idle.
#[derive(Default)]
struct InputBuffer {
    bytes: Vec<u8>,
    plain_start: usize,
    plain_end: usize,
    records_start: usize,
    records_end: usize,
}

/// Head of a frame whose payload is written to its message.
#[derive(Clone, Copy)]
struct FrameHead {
    short_head: [u8; SHORT_HEAD_BYTES],
    payload_bytes: usize,
    /// Number of bytes of the message that follow the frame, as the peer says.
    following_bytes: usize,
}

/// Frame of which the message has the first `placed_bytes` of the payload.
#[derive(Clone, Copy)]
struct Placement {
    head: FrameHead,
    placed_bytes: usize,
    /// True after an attempt to complete the payload, for which not enough had arrived.
    is_interrupted: bool,
}

/// Positions in a message while records are decrypted in it: content from the start to `plain_end`,
/// encrypted records from `records_start` to the end.
struct MessageCursor {
    plain_end: usize,
    records_start: usize,
}

/// Limits of one call of [`FrameReader::read_frames`].
#[derive(Default)]
struct ReadBudget {
    read_bytes: usize,
    is_socket_empty: bool,
}

impl ReadBudget {
    fn is_spent(&self) -> bool {
        self.is_socket_empty || self.read_bytes >= READ_BYTES_MAX
    }

    /// Counts a read that asked for `limit` bytes. A read that returns less has emptied the socket.
    fn count(&mut self, byte_count: usize, limit: usize) {
        self.read_bytes += byte_count;
        self.is_socket_empty = byte_count < limit;
    }
}

/// What remains when no more of a payload can be written to its message now.
enum PlacementEnd {
    /// The rest of the payload has not arrived.
    Incomplete,
    /// The payload is complete. The given number of bytes of decrypted content follow it.
    Complete(usize),
}

pub(super) struct FrameReader {
    open_key: TrafficKey,
    buffer: InputBuffer,
    placement: Option<Placement>,
    /// Number of bytes of decrypted content that are dropped: the rest of a frame that has arrived
    /// on another route.
    dropped_content_bytes: usize,
    is_after_large_frame: bool,
    /// Reason why nothing more can be read; `None` while reading is possible.
    end_reason: Option<RouteEndReason>,
    io_counts: IoCounts,
}

/// Decrypts the record that begins at `record_start`, if it is complete at the end of `bytes`, and
/// moves its content to the start of `bytes`. Returns the end of the record and the length of its
/// content, or `None` if the record is incomplete. A record that announces a new key has no
/// content.
fn open_record(
    open_key: &mut TrafficKey,
    key_schedule: &mut KeySchedule,
    bytes: &mut [u8],
    record_start: usize,
) -> Result<Option<(usize, usize)>, RouteEndReason> {
    let Some(length) = record_length(&bytes[record_start..])?
        .filter(|length| *length <= bytes.len() - record_start)
    else {
        return Ok(None);
    };
    let record_end = record_start + length;
    let (content_bytes, content_type) = open_key.decrypt(&mut bytes[..record_end], record_start)?;
    let content = &bytes[..content_bytes];
    match content_type {
        ContentType::Data => Ok(Some((record_end, content_bytes))),
        ContentType::Handshake if *content == KEY_UPDATE_MESSAGE => {
            *open_key = key_schedule
                .next_open_key()
                .ok_or(RouteEndReason::ProtocolError("there is no new key"))?;
            Ok(Some((record_end, 0)))
        }
        ContentType::Handshake => Err(RouteEndReason::ProtocolError(
            "a handshake message after the handshake",
        )),
        ContentType::Alert if *content == CLOSE_NOTIFY_ALERT => Err(RouteEndReason::Closed),
        ContentType::Alert => Err(RouteEndReason::Broken(
            "the peer sent an error alert".into(),
        )),
    }
}

impl FrameHead {
    /// Decodes the head at the start of decrypted content. `None` if the content is too short, or
    /// if the frame is too small to be written to its message.
    fn decode_large(content: &[u8]) -> Result<Option<Self>, RouteEndReason> {
        let Some((length_fields, rest)) = content.split_first_chunk::<FRAME_HEAD_BYTES>() else {
            return Ok(None);
        };
        let (frame_bytes, following_bytes) = decode_length_fields(length_fields)?;
        let payload_bytes = frame_bytes.saturating_sub(SHORT_HEAD_BYTES);
        Ok(rest
            .first_chunk()
            .filter(|_| payload_bytes >= PLACED_PAYLOAD_BYTES_MIN)
            .map(|short_head| Self {
                short_head: *short_head,
                payload_bytes,
                following_bytes,
            }))
    }
}

/// Returns the length of a frame and the number of bytes of its message that follow it.
fn decode_length_fields(
    length_fields: &[u8; FRAME_HEAD_BYTES],
) -> Result<(usize, usize), RouteEndReason> {
    let [a, b, c, d, e, f, g, h] = *length_fields;
    let frame_bytes = u32::from_le_bytes([a, b, c, d]) as usize;
    let following_bytes = u32::from_le_bytes([e, f, g, h]) as usize;
    if frame_bytes > FRAME_BYTES_MAX {
        return Err(RouteEndReason::ProtocolError("a frame is over the limit"));
    }
    Ok((frame_bytes, following_bytes))
}

impl Placement {
    fn missing_bytes(&self) -> usize {
        self.head.payload_bytes - self.placed_bytes
    }

    /// Returns the length of the records with the rest of the payload and with those further
    /// fragments of the message that are large, if the sender divides them as this library does.
    fn record_bytes(&self) -> usize {
        let with_overhead =
            |content: usize| content + content.div_ceil(CONTENT_BYTES_MAX) * RECORD_OVERHEAD_BYTES;
        let (following, last) = (
            self.head.following_bytes / FRAGMENT_BYTES_MAX,
            self.head.following_bytes % FRAGMENT_BYTES_MAX,
        );
        let head_record_bytes = FRAME_HEAD_BYTES + SHORT_HEAD_BYTES + RECORD_OVERHEAD_BYTES;
        let last_frame_bytes = if last < PLACED_PAYLOAD_BYTES_MIN {
            0
        } else {
            head_record_bytes + with_overhead(last)
        };
        with_overhead(self.missing_bytes())
            + following * (head_record_bytes + with_overhead(FRAGMENT_BYTES_MAX))
            + last_frame_bytes
    }
}

impl FrameReader {
    /// Creates the reader of a route after the handshake. `early_input` contains received bytes
    /// that follow the handshake.
    pub(super) fn new(open_key: TrafficKey, early_input: &[u8]) -> Self {
        let mut buffer = InputBuffer {
            bytes: vec![0; INPUT_BUFFER_BYTES],
            records_end: early_input.len(),
            ..InputBuffer::default()
        };
        buffer.bytes[..early_input.len()].copy_from_slice(early_input);
        Self {
            open_key,
            buffer,
            placement: None,
            dropped_content_bytes: 0,
            is_after_large_frame: false,
            end_reason: None,
            io_counts: IoCounts::default(),
        }
    }

    pub(super) fn end_reason(&self) -> Option<&RouteEndReason> {
        self.end_reason.as_ref()
    }

    /// Frees the buffer if it is empty.
    pub(super) fn release_buffer(&mut self) {
        self.buffer.rewind();
        if self.buffer.records_end == 0 {
            self.buffer.bytes = Vec::new();
        }
    }

    #[cfg(test)]
    pub(super) fn io_counts(&self) -> IoCounts {
        self.io_counts
    }

    #[cfg(test)]
    pub(super) fn buffer_bytes(&self) -> usize {
        self.buffer.bytes.len()
    }

    /// Passes the frames that have arrived to `sink`. Returns true if the socket may have more.
    ///
    /// # Errors
    /// The route has ended. All complete frames before the end were passed to `sink`.
    pub(super) fn read_frames(
        &mut self,
        socket: &TcpStream,
        key_schedule: &mut KeySchedule,
        sink: &mut dyn FrameSink,
    ) -> Result<bool, RouteEndReason> {
        let mut budget = ReadBudget::default();
        if let Some(end_reason) = &self.end_reason {
            return Err(end_reason.clone());
        }
        let read_result = loop {
            let step_result = if self.placement.is_some() {
                self.read_into_message(socket, key_schedule, sink, &mut budget)
            } else {
                self.read_through_buffer(socket, key_schedule, sink, &mut budget)
            };
            match step_result {
                Ok(true) => {}
                Ok(false) => break Ok(!budget.is_socket_empty),
                Err(end_reason) => break Err(end_reason),
            }
        };
        self.end_reason = read_result.as_ref().err().cloned();
        read_result
    }

    /// Returns true if the empty frame has arrived with which the listening side confirms that it
    /// has authenticated this side. Later frames stay in the input buffer.
    pub(super) fn read_confirmation(
        &mut self,
        socket: &TcpStream,
        key_schedule: &mut KeySchedule,
    ) -> Result<bool, RouteEndReason> {
        let mut budget = ReadBudget::default();
        self.read_into_buffer(socket, &mut budget)?;
        while self.buffer.plain().len() < FRAME_HEAD_BYTES {
            if !self.open_buffered_record(key_schedule)? {
                return Ok(false);
            }
        }
        if self.buffer.plain()[..FRAME_HEAD_BYTES] != [0; FRAME_HEAD_BYTES] {
            return Err(RouteEndReason::ProtocolError(
                "the first frame is not the one that confirms the route",
            ));
        }
        self.buffer.plain_start += FRAME_HEAD_BYTES;
        Ok(true)
    }

    // ---- through the buffer

    /// Passes the frames in the buffer to `sink`, and reads more. Returns false if nothing more may
    /// be read now.
    fn read_through_buffer(
        &mut self,
        socket: &TcpStream,
        key_schedule: &mut KeySchedule,
        sink: &mut dyn FrameSink,
        budget: &mut ReadBudget,
    ) -> Result<bool, RouteEndReason> {
        self.pass_buffered_frames(key_schedule, sink)?;
        if self.placement.is_some() {
            return Ok(true);
        }
        if budget.is_spent() {
            return Ok(false);
        }
        self.read_into_buffer(socket, budget)?;
        Ok(true)
    }

    fn read_into_buffer(
        &mut self,
        socket: &TcpStream,
        budget: &mut ReadBudget,
    ) -> Result<(), RouteEndReason> {
        let limit = if self.is_after_large_frame {
            READ_BYTES_AFTER_LARGE
        } else {
            INPUT_BUFFER_BYTES
        };
        let read_bytes = self.receive_into_buffer(socket, limit, budget)?;
        self.is_after_large_frame &= read_bytes < READ_BYTES_AFTER_LARGE;
        Ok(())
    }

    /// Reads at most `limit` bytes into the buffer. Returns the number of bytes.
    fn receive_into_buffer(
        &mut self,
        socket: &TcpStream,
        limit: usize,
        budget: &mut ReadBudget,
    ) -> Result<usize, RouteEndReason> {
        self.io_counts.calls += 1;
        let free_space = self.buffer.reserve_read();
        let limit = limit.min(free_space.len());
        match recv(
            socket.as_raw_fd(),
            &mut free_space[..limit],
            MsgFlags::MSG_DONTWAIT,
        ) {
            Ok(0) => return Err(self.end_of_stream_reason()),
            Ok(byte_count) => {
                self.buffer.records_end += byte_count;
                budget.count(byte_count, limit);
                return Ok(byte_count);
            }
            Err(Errno::EINTR) => {}
            Err(Errno::EAGAIN) => budget.is_socket_empty = true,
            Err(e) => return Err(RouteEndReason::Broken(e.desc().into())),
        }
        Ok(0)
    }

    /// Decrypts the complete records in the buffer and passes the frames in them to `sink`, up to a
    /// frame that is written to its message.
    fn pass_buffered_frames(
        &mut self,
        key_schedule: &mut KeySchedule,
        sink: &mut dyn FrameSink,
    ) -> Result<(), RouteEndReason> {
        loop {
            self.pass_decrypted_frames(sink)?;
            if self.placement.is_some() {
                return Ok(());
            }
            if !self.open_buffered_record(key_schedule)? {
                self.buffer.rewind();
                return Ok(());
            }
        }
    }

    /// Decrypts one record of the buffer. Returns false if no complete record has arrived.
    fn open_buffered_record(
        &mut self,
        key_schedule: &mut KeySchedule,
    ) -> Result<bool, RouteEndReason> {
        let buffer = &mut self.buffer;
        let opened_record = open_record(
            &mut self.open_key,
            key_schedule,
            &mut buffer.bytes[buffer.plain_end..buffer.records_end],
            buffer.records_start - buffer.plain_end,
        )?;
        let Some((record_end, content_bytes)) = opened_record else {
            return Ok(false);
        };
        buffer.records_start = buffer.plain_end + record_end;
        buffer.plain_end += content_bytes;
        Ok(true)
    }

    fn pass_decrypted_frames(&mut self, sink: &mut dyn FrameSink) -> Result<(), RouteEndReason> {
        let dropped_bytes = self.dropped_content_bytes.min(self.buffer.plain().len());
        self.dropped_content_bytes -= dropped_bytes;
        self.buffer.plain_start += dropped_bytes;
        while let Some(length_fields) = self.buffer.plain().first_chunk() {
            let (frame_bytes, _) = decode_length_fields(length_fields)?;
            let content = &self.buffer.plain()[FRAME_HEAD_BYTES..];
            if let Some(frame) = content.get(..frame_bytes) {
                sink.on_frame(frame);
                self.count_copied(frame_bytes);
                self.buffer.plain_start += FRAME_HEAD_BYTES + frame_bytes;
                continue;
            }
            if let Some(head) = FrameHead::decode_large(self.buffer.plain())?
                && sink.begins_placement(&head.short_head)
            {
                self.buffer.plain_start += FRAME_HEAD_BYTES + SHORT_HEAD_BYTES;
                self.placement = Some(Placement {
                    head,
                    placed_bytes: 0,
                    is_interrupted: false,
                });
            }
            break;
        }
        Ok(())
    }

    fn end_of_stream_reason(&self) -> RouteEndReason {
        let buffer = &self.buffer;
        if self.placement.is_none()
            && buffer.records_start == buffer.records_end
            && buffer.plain_start == buffer.plain_end
        {
            RouteEndReason::Closed
        } else {
            RouteEndReason::Broken("it ended in the middle of a frame".into())
        }
    }

    // ---- into the message

    /// Reads and decrypts the rest of the frame of `self.placement`, and of the large frames of the
    /// same message after it, in the message. Returns false if nothing more may be read now.
    ///
    /// At its end the message has nothing behind the payloads, and the buffer has what arrived
    /// after them.
    fn read_into_message(
        &mut self,
        socket: &TcpStream,
        key_schedule: &mut KeySchedule,
        sink: &mut dyn FrameSink,
        budget: &mut ReadBudget,
    ) -> Result<bool, RouteEndReason> {
        let Some(mut placement) = self.placement else {
            return Ok(true);
        };
        if !sink.continues_placement(&placement.head.short_head, placement.placed_bytes) {
            self.placement = None;
            self.dropped_content_bytes = placement.missing_bytes();
            return Ok(true);
        }
        if placement.is_interrupted {
            match self.complete_buffered_record(socket, budget) {
                Ok(true) => {}
                Ok(false) => return Ok(false),
                Err(end_reason) => {
                    let accepted_bytes = sink.message().len() - placement.placed_bytes;
                    keep_accepted_payloads(sink, accepted_bytes);
                    return Err(end_reason);
                }
            }
        }
        let mut cursor = self.move_buffer_to_message(&mut placement, sink.message());
        let read_result = loop {
            let placement_end = self.place_records(
                socket,
                key_schedule,
                (&mut placement, &mut cursor),
                sink.message(),
                budget,
            );
            match placement_end {
                Ok(PlacementEnd::Incomplete) => {
                    placement.is_interrupted = true;
                    self.io_counts.interruptions += 1;
                    break Ok(Some(placement));
                }
                Ok(PlacementEnd::Complete(extra_bytes)) => {
                    let head = placement.head;
                    placement.placed_bytes = 0;
                    match self.finish_payload(key_schedule, &head, &mut cursor, extra_bytes, sink) {
                        Ok(Some(next_placement)) => placement = next_placement,
                        Ok(None) => break Ok(None),
                        Err(end_reason) => break Err(end_reason),
                    }
                }
                Err(end_reason) => break Err(end_reason),
            }
        };
        match &read_result {
            Ok(Some(_)) => {
                self.move_rest_to_buffer(&cursor, 0, sink.message());
                sink.set_placed_bytes(placement.placed_bytes);
            }
            Ok(None) => self.is_after_large_frame = true,
            Err(_) => keep_accepted_payloads(sink, cursor.plain_end - placement.placed_bytes),
        }
        self.placement = read_result?;
        Ok(self.placement.is_none())
    }

    /// Reads the rest of the first record in the buffer, if the buffer has a part of a record.
    /// Returns false if the record is still incomplete. An incomplete record stays in the buffer,
    /// so that no byte is moved more than twice, however little of the record arrives at a time.
    fn complete_buffered_record(
        &mut self,
        socket: &TcpStream,
        budget: &mut ReadBudget,
    ) -> Result<bool, RouteEndReason> {
        loop {
            let records = self.buffer.records();
            let missing_bytes = match record_length(records)? {
                Some(length) => length.saturating_sub(records.len()),
                None if records.is_empty() => 0,
                None => RECORD_HEAD_BYTES - records.len(),
            };
            if missing_bytes == 0 {
                return Ok(true);
            }
            if budget.is_spent() {
                return Ok(false);
            }
            self.receive_into_buffer(socket, missing_bytes, budget)?;
        }
    }

    /// Moves the content of the buffer to the end of the message.
    fn move_buffer_to_message(
        &mut self,
        placement: &mut Placement,
        message: &mut Vec<u8>,
    ) -> MessageCursor {
        let buffer = &self.buffer;
        let (plain, records) = (
            buffer.plain_start..buffer.plain_end,
            buffer.records_start..buffer.records_end,
        );
        let added_bytes = plain.len() + records.len();
        let copied_bytes = reserve(message, added_bytes, placement) + added_bytes;
        placement.placed_bytes += plain.len();
        message.extend_from_slice(&buffer.bytes[plain]);
        let plain_end = message.len();
        message.extend_from_slice(&buffer.bytes[records]);
        self.buffer.clear();
        self.count_copied(copied_bytes);
        MessageCursor {
            plain_end,
            records_start: plain_end,
        }
    }

    /// Moves what follows the payloads in the message to the buffer: `extra_bytes` of content and
    /// all encrypted records.
    fn move_rest_to_buffer(
        &mut self,
        cursor: &MessageCursor,
        extra_bytes: usize,
        message: &mut Vec<u8>,
    ) {
        let extra_end = cursor.plain_end + extra_bytes;
        self.buffer.set(
            &message[cursor.plain_end..extra_end],
            &message[cursor.records_start..],
        );
        self.count_copied(extra_bytes + message.len() - cursor.records_start);
        message.truncate(cursor.plain_end);
    }

    /// Decrypts records in the message, and reads more of them, until the payload is complete or
    /// nothing more may be read now.
    fn place_records(
        &mut self,
        socket: &TcpStream,
        key_schedule: &mut KeySchedule,
        (placement, cursor): (&mut Placement, &mut MessageCursor),
        message: &mut Vec<u8>,
        budget: &mut ReadBudget,
    ) -> Result<PlacementEnd, RouteEndReason> {
        while placement.missing_bytes() > 0 {
            let opened_record = open_record(
                &mut self.open_key,
                key_schedule,
                &mut message[cursor.plain_end..],
                cursor.records_start - cursor.plain_end,
            )?;
            if let Some((record_end, content_bytes)) = opened_record {
                cursor.records_start = cursor.plain_end + record_end;
                let payload_bytes = content_bytes.min(placement.missing_bytes());
                placement.placed_bytes += payload_bytes;
                cursor.plain_end += payload_bytes;
                if content_bytes > payload_bytes {
                    return Ok(PlacementEnd::Complete(content_bytes - payload_bytes));
                }
                continue;
            }
            if budget.is_spent() {
                return Ok(PlacementEnd::Incomplete);
            }
            self.io_counts.calls += 1;
            let unopened_bytes = message.len() - cursor.records_start;
            let limit = match placement.record_bytes().saturating_sub(unopened_bytes) {
                // The sender divides its messages in another way.
                0 => RECORD_BYTES_MAX,
                expected_bytes => expected_bytes.min(PLACED_READ_BYTES_MAX),
            };
            let copied_bytes = reserve(message, limit, placement);
            self.count_copied(copied_bytes);
            match receive_into_capacity(socket, message, limit) {
                Ok(0) => return Err(self.end_of_stream_reason()),
                Ok(byte_count) => budget.count(byte_count, limit),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => budget.is_socket_empty = true,
                Err(e) => return Err(RouteEndReason::Broken(e.to_string())),
            }
        }
        Ok(PlacementEnd::Complete(0))
    }

    /// Passes a complete payload to the sink. The message has `extra_bytes` of content and
    /// encrypted records after it. Returns the next frame if it is a large one of the same message.
    /// Otherwise the buffer receives what follows the payload.
    fn finish_payload(
        &mut self,
        key_schedule: &mut KeySchedule,
        head: &FrameHead,
        cursor: &mut MessageCursor,
        mut extra_bytes: usize,
        sink: &mut dyn FrameSink,
    ) -> Result<Option<Placement>, RouteEndReason> {
        if sink.is_last_of_message(&head.short_head) {
            self.move_rest_to_buffer(cursor, extra_bytes, sink.message());
            sink.accept_payload(&head.short_head, head.payload_bytes);
            return Ok(None);
        }
        sink.accept_payload(&head.short_head, head.payload_bytes);
        if extra_bytes == 0
            && let Some((record_end, content_bytes)) = open_record(
                &mut self.open_key,
                key_schedule,
                &mut sink.message()[cursor.plain_end..],
                cursor.records_start - cursor.plain_end,
            )?
        {
            cursor.records_start = cursor.plain_end + record_end;
            extra_bytes = content_bytes;
        }
        let extra = cursor.plain_end..cursor.plain_end + extra_bytes;
        let next_head = FrameHead::decode_large(&sink.message()[extra.clone()])?;
        let Some(next_head) = next_head.filter(|next| sink.begins_placement(&next.short_head))
        else {
            self.move_rest_to_buffer(cursor, extra_bytes, sink.message());
            return Ok(None);
        };
        // The record cannot contain the whole payload, because a large one is longer than a record.
        let payload_start = extra.start + FRAME_HEAD_BYTES + SHORT_HEAD_BYTES;
        let placed_bytes = extra.end - payload_start;
        sink.message()
            .copy_within(payload_start..extra.end, extra.start);
        self.count_copied(placed_bytes);
        cursor.plain_end += placed_bytes;
        Ok(Some(Placement {
            head: next_head,
            placed_bytes,
            is_interrupted: false,
        }))
    }

    /// Counts bytes that were copied in this process.
    fn count_copied(&mut self, byte_count: usize) {
        self.io_counts.copied_bytes += byte_count as u64;
    }
}

impl InputBuffer {
    fn plain(&self) -> &[u8] {
        &self.bytes[self.plain_start..self.plain_end]
    }

    fn records(&self) -> &[u8] {
        &self.bytes[self.records_start..self.records_end]
    }

    fn clear(&mut self) {
        (self.plain_start, self.plain_end) = (0, 0);
        (self.records_start, self.records_end) = (0, 0);
    }

    /// Replaces the content of the empty buffer. Both parts come from reads that fit the buffer.
    fn set(&mut self, plain: &[u8], records: &[u8]) {
        self.allocate();
        self.clear();
        let records_start = plain.len();
        self.bytes[..records_start].copy_from_slice(plain);
        self.bytes[records_start..records_start + records.len()].copy_from_slice(records);
        (self.plain_end, self.records_start) = (records_start, records_start);
        self.records_end = records_start + records.len();
    }

    fn allocate(&mut self) {
        if self.bytes.is_empty() {
            self.bytes = vec![0; INPUT_BUFFER_BYTES];
        }
    }

    /// Returns the space for the next read. If necessary, allocates the buffer, or moves the
    /// buffered data to the front of the buffer.
    fn reserve_read(&mut self) -> &mut [u8] {
        self.allocate();
        if INPUT_BUFFER_BYTES - self.records_end < READ_SPACE_BYTES_MIN {
            let (plain_bytes, record_bytes) = (
                self.plain_end - self.plain_start,
                self.records_end - self.records_start,
            );
            self.bytes.copy_within(self.plain_start..self.plain_end, 0);
            self.bytes
                .copy_within(self.records_start..self.records_end, plain_bytes);
            (self.plain_start, self.plain_end) = (0, plain_bytes);
            (self.records_start, self.records_end) = (plain_bytes, plain_bytes + record_bytes);
        }
        &mut self.bytes[self.records_end..]
    }

    /// Moves the start of an empty buffer back to the front of its memory, which is in the CPU
    /// cache.
    fn rewind(&mut self) {
        if self.plain_start == self.plain_end {
            (self.plain_start, self.plain_end) = (0, 0);
            if self.records_start == self.records_end {
                (self.records_start, self.records_end) = (0, 0);
            }
        }
    }
}

/// Removes all but the first `accepted_bytes` of the message, which are complete payloads.
fn keep_accepted_payloads(sink: &mut dyn FrameSink, accepted_bytes: usize) {
    sink.message().truncate(accepted_bytes);
    sink.set_placed_bytes(0);
}

/// Reserves space in a message for a read of `byte_count` bytes. At once reserves space for the
/// rest of the message, as far as the peer's word for its length is trusted. Returns the number of
/// bytes that were copied to larger memory.
fn reserve(message: &mut Vec<u8>, byte_count: usize, placement: &Placement) -> usize {
    let capacity = message.capacity();
    let expected_bytes = placement.missing_bytes() + placement.head.following_bytes;
    buffer_pool::reserve_expected(
        message,
        byte_count,
        expected_bytes.saturating_add(RECORD_OVERHEAD_BYTES_MAX),
    );
    if message.capacity() == capacity {
        0
    } else {
        message.len()
    }
}

const _: () = assert!(
    PLACED_PAYLOAD_BYTES_MIN >= CONTENT_BYTES_MAX
        && INPUT_BUFFER_BYTES >= FRAME_BYTES_MAX + RECORD_BYTES_MAX + READ_SPACE_BYTES_MIN
        && INPUT_BUFFER_BYTES >= PLACED_READ_BYTES_MAX + 2 * RECORD_BYTES_MAX
);
