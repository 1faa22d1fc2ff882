//! One side of an established direct route: sends and receives whole frames without blocking.
//!
//! Outgoing frames are packed into TLS records of up to 16 KiB in one buffer, and the buffer is
//! written to the socket. Incoming records are decrypted in place, so that the frames in them
//! become contiguous. After [`RECORDS_PER_KEY`] records the sender switches to a new key.

use super::record::{
    CONTENT_BYTES_MAX, ContentType, RECORD_BYTES_MAX, RECORD_HEAD_BYTES, RECORD_TAIL_BYTES,
    TrafficKey, record_length,
};
use super::{FRAME_BYTES_MAX, RouteEndReason, SetupError};
use crate::runtime::process::ProcessOwned;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};
use rustls::ExtractedSecrets;
use rustls::client::ClientConnectionData;
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Size of the length field before each frame.
const FRAME_LENGTH_FIELD_BYTES: usize = 4;
const OUTPUT_BUFFER_BYTES: usize = 384 << 10;
/// Maximum buffer space that one frame needs: the frame itself, the headers and tags of all records
/// that the frame touches, and a key update.
const FRAME_SPACE_BYTES_MAX: usize = FRAME_LENGTH_FIELD_BYTES
    + FRAME_BYTES_MAX
    + (FRAME_BYTES_MAX / CONTENT_BYTES_MAX + 3) * (RECORD_HEAD_BYTES + RECORD_TAIL_BYTES)
    + KEY_UPDATE_MESSAGE.len()
    + RECORD_HEAD_BYTES
    + RECORD_TAIL_BYTES;
const INPUT_BUFFER_BYTES: usize = 384 << 10;
/// Minimum free space for a read. If less space is free, the buffered data is moved to the front of
/// the buffer. The minimum is high because large reads are efficient.
const READ_SPACE_BYTES_MIN: usize = 128 << 10;
/// Maximum number of bytes read in one call. Because of this limit, a fast peer cannot occupy the
/// caller forever.
const READ_BYTES_MAX: usize = 1 << 20;
/// Number of records encrypted with one key. TLS allows at most 2^24.5 records for AES.
const RECORDS_PER_KEY: u64 = 1 << 23;
/// Handshake message that announces a new key and does not request a new key of the peer.
const KEY_UPDATE_MESSAGE: [u8; 5] = [24, 0, 0, 1, 0];
/// Alert that announces the orderly end of a connection.
const CLOSE_NOTIFY_ALERT: [u8; 2] = [1, 0];

/// TLS state of a finished handshake, from which further keys are derived.
pub(super) enum KeySchedule {
    Connecting(KernelConnection<ClientConnectionData>),
    Listening(KernelConnection<ServerConnectionData>),
}

impl KeySchedule {
    fn next_seal_key(&mut self) -> Option<TrafficKey> {
        let next_secrets = match self {
            Self::Connecting(keys) => keys.update_tx_secret(),
            Self::Listening(keys) => keys.update_tx_secret(),
        };
        TrafficKey::new(next_secrets.ok()?)
    }

    fn next_open_key(&mut self) -> Option<TrafficKey> {
        let next_secrets = match self {
            Self::Connecting(keys) => keys.update_rx_secret(),
            Self::Listening(keys) => keys.update_rx_secret(),
        };
        TrafficKey::new(next_secrets.ok()?)
    }
}

/// Output buffer: finished records from `records_start` to `records_end`, followed by the record
/// that is being filled. The buffer is not allocated while the route is idle.
struct OutputBuffer {
    bytes: Vec<u8>,
    records_start: usize,
    records_end: usize,
    /// Number of content bytes in the record that is being filled and is not encrypted yet.
    unsealed_content_bytes: usize,
}

/// Input buffer: decrypted content from `plain_start` to `plain_end`, and encrypted records from
/// `records_start` to `records_end`. The buffer is not allocated while the route is idle.
struct InputBuffer {
    bytes: Vec<u8>,
    plain_start: usize,
    plain_end: usize,
    records_start: usize,
    records_end: usize,
}

/// One side of an established route. Dropping the value closes the connection.
pub(crate) struct FrameStream {
    socket: ProcessOwned<TcpStream>,
    seal_key: TrafficKey,
    open_key: TrafficKey,
    key_schedule: KeySchedule,
    records_per_key_max: u64,
    output_buffer: OutputBuffer,
    input_buffer: InputBuffer,
    /// Reason why nothing more can be read; `None` while reading is possible.
    read_end_reason: Option<RouteEndReason>,
    /// Reason why nothing more can be written; `None` while writing is possible. Data that the peer
    /// has sent earlier may still arrive.
    write_end_reason: Option<RouteEndReason>,
}

impl std::fmt::Debug for FrameStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirectEnd")
            .field("fd", &self.socket.get().as_raw_fd())
            .field("ended", &self.read_end_reason)
            .finish()
    }
}

impl AsFd for FrameStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.get().as_fd()
    }
}

impl FrameStream {
    /// Creates one side of a route after a finished handshake. `unsent_bytes` contains handshake
    /// bytes that are not written yet. `early_input` contains received bytes that follow the
    /// handshake.
    pub(super) fn new(
        socket: ProcessOwned<TcpStream>,
        secrets: ExtractedSecrets,
        schedule: KeySchedule,
        unsent_bytes: &[u8],
        early_input: &[u8],
    ) -> Result<Self, SetupError> {
        let unknown_cipher_error =
            || SetupError::LocalFailure("an unknown cipher was agreed upon".into());
        let send_key = TrafficKey::new(secrets.tx).ok_or_else(unknown_cipher_error)?;
        let receive_key = TrafficKey::new(secrets.rx).ok_or_else(unknown_cipher_error)?;
        let mut output = OutputBuffer {
            bytes: vec![0; OUTPUT_BUFFER_BYTES],
            records_start: 0,
            records_end: unsent_bytes.len(),
            unsealed_content_bytes: 0,
        };
        output.bytes[..unsent_bytes.len()].copy_from_slice(unsent_bytes);
        let mut input = InputBuffer {
            bytes: vec![0; INPUT_BUFFER_BYTES],
            plain_start: 0,
            plain_end: 0,
            records_start: 0,
            records_end: early_input.len(),
        };
        input.bytes[..early_input.len()].copy_from_slice(early_input);
        let records_per_key = RECORDS_PER_KEY;
        Ok(Self {
            socket,
            seal_key: send_key,
            open_key: receive_key,
            key_schedule: schedule,
            records_per_key_max: records_per_key,
            output_buffer: output,
            input_buffer: input,
            read_end_reason: None,
            write_end_reason: None,
        })
    }

    /// Frees the buffers that are empty. A buffer is allocated again when it is needed.
    pub(crate) fn release_buffers(&mut self) {
        if !self.has_unwritten_data() {
            self.output_buffer = OutputBuffer {
                bytes: Vec::new(),
                records_start: 0,
                records_end: 0,
                unsealed_content_bytes: 0,
            };
        }
        self.input_buffer.rewind();
        if self.input_buffer.records_end == 0 {
            self.input_buffer.bytes = Vec::new();
        }
    }

    /// Returns the total size of both buffers in bytes.
    #[cfg(test)]
    pub(crate) fn buffer_bytes(&self) -> usize {
        self.output_buffer.bytes.len() + self.input_buffer.bytes.len()
    }

    /// Sets the number of records after which the key changes.
    #[cfg(test)]
    pub(super) fn set_records_per_key(&mut self, record_count: u64) {
        self.records_per_key_max = record_count;
    }

    /// Queues bytes that need not form a frame.
    #[cfg(test)]
    pub(super) fn push_bytes(&mut self, bytes: &[u8]) {
        self.append_content(bytes);
    }

    // ---- output

    /// True if there is space for a frame of any length.
    pub(crate) fn has_frame_space(&self) -> bool {
        OUTPUT_BUFFER_BYTES
            - (self.output_buffer.open_record_end() - self.output_buffer.records_start)
            >= FRAME_SPACE_BYTES_MAX
    }

    /// True if the output buffer contains data that is not written to the socket yet.
    pub(crate) fn has_unwritten_data(&self) -> bool {
        self.output_buffer.records_start < self.output_buffer.records_end
            || self.output_buffer.unsealed_content_bytes > 0
    }

    /// Queues a frame for [`write_queued`](Self::write_queued). The frame is the concatenation of
    /// `parts`. Returns false, and queues nothing, if there is no space.
    ///
    /// # Panics
    /// The frame is longer than [`FRAME_BYTES_MAX`].
    pub(crate) fn try_queue_frame(&mut self, parts: &[&[u8]]) -> bool {
        let frame_bytes = parts.iter().map(|part| part.len()).sum::<usize>();
        assert!(frame_bytes <= FRAME_BYTES_MAX, "links cut what they send");
        if !self.has_frame_space() {
            return false;
        }
        self.output_buffer.reserve_frame();
        let frame_bytes = u32::try_from(frame_bytes).expect("frames are short");
        self.append_content(&frame_bytes.to_le_bytes());
        parts.iter().for_each(|part| self.append_content(part));
        true
    }

    fn append_content(&mut self, mut content: &[u8]) {
        while !content.is_empty() {
            let (fitting_part, remaining_part) = content.split_at(
                content
                    .len()
                    .min(CONTENT_BYTES_MAX - self.output_buffer.unsealed_content_bytes),
            );
            let position = self.output_buffer.records_end
                + RECORD_HEAD_BYTES
                + self.output_buffer.unsealed_content_bytes;
            self.output_buffer.bytes[position..position + fitting_part.len()]
                .copy_from_slice(fitting_part);
            self.output_buffer.unsealed_content_bytes += fitting_part.len();
            content = remaining_part;
            if self.output_buffer.unsealed_content_bytes == CONTENT_BYTES_MAX {
                self.seal_record(ContentType::Data);
            }
        }
    }

    /// Encrypts the record that is being filled. After `records_per_key_max` records, announces a
    /// new key to the peer and switches to the new key.
    fn seal_record(&mut self, content_type: ContentType) {
        let record_end = self.output_buffer.open_record_end();
        self.seal_key.encrypt(
            content_type,
            &mut self.output_buffer.bytes[self.output_buffer.records_end..record_end],
        );
        (
            self.output_buffer.records_end,
            self.output_buffer.unsealed_content_bytes,
        ) = (record_end, 0);
        if content_type == ContentType::Data
            && self.seal_key.record_count() >= self.records_per_key_max
        {
            self.append_content(&KEY_UPDATE_MESSAGE);
            self.seal_record(ContentType::Handshake);
            match self.key_schedule.next_seal_key() {
                Some(key) => self.seal_key = key,
                None => {
                    self.write_end_reason =
                        Some(RouteEndReason::Broken("there is no new key".into()))
                }
            }
        }
    }

    /// Writes as much as the socket accepts without blocking.
    ///
    /// # Errors
    /// Nothing more can be written. [`read_frames`](Self::read_frames) still returns frames that
    /// have arrived.
    pub(crate) fn write_queued(&mut self) -> Result<(), RouteEndReason> {
        if self.output_buffer.unsealed_content_bytes > 0 {
            self.seal_record(ContentType::Data);
        }
        while self.write_end_reason.is_none()
            && self.output_buffer.records_start < self.output_buffer.records_end
        {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match send(
                self.socket.get().as_raw_fd(),
                &self.output_buffer.bytes
                    [self.output_buffer.records_start..self.output_buffer.records_end],
                flags,
            ) {
                Ok(sent_bytes) => self.output_buffer.records_start += sent_bytes,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => break,
                Err(e) => self.write_end_reason = Some(RouteEndReason::Broken(e.desc().into())),
            }
        }
        if self.output_buffer.records_start == self.output_buffer.records_end {
            (
                self.output_buffer.records_start,
                self.output_buffer.records_end,
            ) = (0, 0);
        }
        self.write_end_reason.clone().map_or(Ok(()), Err)
    }

    /// Sends the closing alert if the socket accepts the alert without blocking, and closes the
    /// connection.
    pub(crate) fn close(mut self) {
        if self.write_queued().is_ok()
            && self.output_buffer.records_start == self.output_buffer.records_end
        {
            self.output_buffer.reserve_frame();
            self.append_content(&CLOSE_NOTIFY_ALERT);
            self.seal_record(ContentType::Alert);
            // An error is ignored: the peer detects the end even without the alert.
            let _ = self.write_queued();
        }
    }

    // ---- input

    /// Passes the frames that have arrived to `on_frame`. Must be called once when the route is
    /// established, because the first frames may have arrived with the end of the handshake. After
    /// that the method must be called whenever the socket is readable. Returns true if data remains
    /// that the next call must read.
    ///
    /// # Errors
    /// The route has ended. All complete frames before the end were passed to `on_frame`.
    pub(crate) fn read_frames(
        &mut self,
        on_frame: &mut dyn FnMut(&[u8]),
    ) -> Result<bool, RouteEndReason> {
        let mut decrypt_result = self.open_records(on_frame);
        let (mut read_bytes, mut is_socket_empty) = (0, false);
        while decrypt_result.is_ok()
            && self.read_end_reason.is_none()
            && !is_socket_empty
            && read_bytes < READ_BYTES_MAX
        {
            let free_space = self.input_buffer.reserve_read();
            match recv(
                self.socket.get().as_raw_fd(),
                free_space,
                MsgFlags::MSG_DONTWAIT,
            ) {
                Ok(0) => decrypt_result = Err(self.input_buffer.end_of_stream_reason()),
                Ok(bytes) => {
                    // If the read does not fill the buffer, the socket is empty.
                    is_socket_empty = bytes < free_space.len();
                    self.input_buffer.records_end += bytes;
                    read_bytes += bytes;
                    decrypt_result = self.open_records(on_frame);
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => is_socket_empty = true,
                Err(e) => decrypt_result = Err(RouteEndReason::Broken(e.desc().into())),
            }
        }
        if let Err(end_reason) = decrypt_result {
            self.read_end_reason.get_or_insert(end_reason);
        }
        self.read_end_reason
            .clone()
            .map_or_else(|| Ok(!is_socket_empty && self.socket_has_data()), Err)
    }

    fn socket_has_data(&self) -> bool {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK;
        recv(self.socket.get().as_raw_fd(), &mut [0], flags).is_ok_and(|bytes| bytes > 0)
    }

    /// Returns true if the empty frame has arrived with which the listening side confirms that it
    /// has authenticated this side. Later frames stay in the input buffer.
    pub(super) fn read_confirmation(&mut self) -> Result<bool, RouteEndReason> {
        let free_space = self.input_buffer.reserve_read();
        match recv(
            self.socket.get().as_raw_fd(),
            free_space,
            MsgFlags::MSG_DONTWAIT,
        ) {
            Ok(0) => return Err(RouteEndReason::Closed),
            Ok(bytes) => self.input_buffer.records_end += bytes,
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(e) => return Err(RouteEndReason::Broken(e.desc().into())),
        }
        while self.input_buffer.plain_end - self.input_buffer.plain_start < FRAME_LENGTH_FIELD_BYTES
        {
            if !self.open_record()? {
                return Ok(false);
            }
        }
        let first_bytes = &self.input_buffer.bytes[self.input_buffer.plain_start
            ..self.input_buffer.plain_start + FRAME_LENGTH_FIELD_BYTES];
        if first_bytes != [0; FRAME_LENGTH_FIELD_BYTES] {
            return Err(RouteEndReason::ProtocolError(
                "the first frame is not the one that confirms the route",
            ));
        }
        self.input_buffer.plain_start += FRAME_LENGTH_FIELD_BYTES;
        Ok(true)
    }

    /// Decrypts the complete records and passes the frames in them to `on_frame`.
    fn open_records(&mut self, on_frame: &mut dyn FnMut(&[u8])) -> Result<(), RouteEndReason> {
        while self.open_record()? {
            self.input_buffer.pass_frames(on_frame)?;
        }
        self.input_buffer.pass_frames(on_frame)?;
        self.input_buffer.rewind();
        Ok(())
    }

    /// Decrypts one record, or switches to the peer's new key if the record announces a new key.
    /// Returns false if no complete record has arrived.
    fn open_record(&mut self) -> Result<bool, RouteEndReason> {
        let input = &mut self.input_buffer;
        let Some(length) = record_length(&input.bytes[input.records_start..input.records_end])?
            .filter(|n| *n <= input.records_end - input.records_start)
        else {
            return Ok(false);
        };
        let (record_start, record_end) = (
            input.records_start - input.plain_end,
            input.records_start + length,
        );
        let (content, content_type) = self
            .open_key
            .decrypt(&mut input.bytes[input.plain_end..record_end], record_start)?;
        input.records_start = record_end;
        let content = input.plain_end..input.plain_end + content;
        match content_type {
            ContentType::Data => input.plain_end = content.end,
            ContentType::Handshake if input.bytes[content.clone()] == KEY_UPDATE_MESSAGE => {
                self.open_key = self
                    .key_schedule
                    .next_open_key()
                    .ok_or(RouteEndReason::ProtocolError("there is no new key"))?;
            }
            ContentType::Handshake => {
                return Err(RouteEndReason::ProtocolError(
                    "a handshake message after the handshake",
                ));
            }
            ContentType::Alert if input.bytes[content] == CLOSE_NOTIFY_ALERT => {
                return Err(RouteEndReason::Closed);
            }
            ContentType::Alert => {
                return Err(RouteEndReason::Broken(
                    "the peer sent an error alert".into(),
                ));
            }
        }
        Ok(true)
    }
}

impl OutputBuffer {
    /// Returns the position at which the record that is being filled will end.
    fn open_record_end(&self) -> usize {
        if self.unsealed_content_bytes == 0 {
            self.records_end
        } else {
            self.records_end + RECORD_HEAD_BYTES + self.unsealed_content_bytes + RECORD_TAIL_BYTES
        }
    }

    /// Makes space for one frame after the queued data. If necessary, moves the queued data to the
    /// front of the buffer.
    fn reserve_frame(&mut self) {
        if self.bytes.is_empty() {
            self.bytes = vec![0; OUTPUT_BUFFER_BYTES];
        }
        if OUTPUT_BUFFER_BYTES - self.open_record_end() < FRAME_SPACE_BYTES_MAX {
            let data_end = self.open_record_end();
            self.bytes.copy_within(self.records_start..data_end, 0);
            (self.records_start, self.records_end) = (0, self.records_end - self.records_start);
        }
    }
}

impl InputBuffer {
    /// Returns the space for the next read. If necessary, allocates the buffer, or moves the
    /// buffered data to the front of the buffer.
    fn reserve_read(&mut self) -> &mut [u8] {
        if self.bytes.is_empty() {
            self.bytes = vec![0; INPUT_BUFFER_BYTES];
        }
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

    fn pass_frames(&mut self, on_frame: &mut dyn FnMut(&[u8])) -> Result<(), RouteEndReason> {
        while let Some(head) =
            self.bytes[self.plain_start..self.plain_end].first_chunk::<FRAME_LENGTH_FIELD_BYTES>()
        {
            let length = u32::from_le_bytes(*head) as usize;
            if length > FRAME_BYTES_MAX {
                return Err(RouteEndReason::ProtocolError("a frame is over the limit"));
            }
            let frame_end = self.plain_start + FRAME_LENGTH_FIELD_BYTES + length;
            if frame_end > self.plain_end {
                break;
            }
            on_frame(&self.bytes[frame_end - length..frame_end]);
            self.plain_start = frame_end;
        }
        Ok(())
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

    fn end_of_stream_reason(&self) -> RouteEndReason {
        if self.records_start == self.records_end && self.plain_start == self.plain_end {
            RouteEndReason::Closed
        } else {
            RouteEndReason::Broken("it ended in the middle of a frame".into())
        }
    }
}

const _: () = assert!(
    OUTPUT_BUFFER_BYTES >= 2 * FRAME_SPACE_BYTES_MAX
        && INPUT_BUFFER_BYTES >= FRAME_BYTES_MAX + RECORD_BYTES_MAX + READ_SPACE_BYTES_MIN
);
