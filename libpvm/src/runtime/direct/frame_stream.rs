//! One side of an established direct route: sends and receives whole frames without blocking.
//!
//! Outgoing frames are packed into TLS records of up to 16 KiB in one buffer, and the buffer is
//! written to the socket. [`FrameReader`] reads incoming records. After [`RECORDS_PER_KEY`] records
//! the sender switches to a new key.

use super::frame_reader::{CLOSE_NOTIFY_ALERT, FrameReader};
use super::record::{
    CONTENT_BYTES_MAX, ContentType, RECORD_HEAD_BYTES, RECORD_TAIL_BYTES, TrafficKey,
};
use super::{FRAME_BYTES_MAX, FrameSink, IoCounts, RouteEndReason, SetupError};
use crate::runtime::process::ProcessOwned;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};
use rustls::ExtractedSecrets;
use rustls::client::ClientConnectionData;
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Size of the fields before each frame: the length of the frame, and the number of bytes of the
/// same message that follow the frame. Both are 32 bits, little-endian. The second one is a hint.
pub(super) const FRAME_HEAD_BYTES: usize = 8;
/// Minimum size of a payload that begins with a new record, so that the receiver can decrypt it in
/// its message.
pub(super) const PLACED_PAYLOAD_BYTES_MIN: usize = CONTENT_BYTES_MAX;
/// Size of the output buffer. The buffer is written completely before it is filled again from its
/// front.
const OUTPUT_BUFFER_BYTES: usize = 384 << 10;
/// Maximum buffer space that one frame needs: the frame itself, the headers and tags of all records
/// that the frame touches, and a key update.
const FRAME_SPACE_BYTES_MAX: usize = FRAME_HEAD_BYTES
    + FRAME_BYTES_MAX
    + (FRAME_BYTES_MAX / CONTENT_BYTES_MAX + 4) * (RECORD_HEAD_BYTES + RECORD_TAIL_BYTES)
    + KEY_UPDATE_MESSAGE.len()
    + RECORD_HEAD_BYTES
    + RECORD_TAIL_BYTES;
/// Number of records encrypted with one key. TLS allows at most 2^24.5 records for AES.
const RECORDS_PER_KEY: u64 = 1 << 23;
/// Handshake message that announces a new key and does not request a new key of the peer.
pub(super) const KEY_UPDATE_MESSAGE: [u8; 5] = [24, 0, 0, 1, 0];

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

    pub(super) fn next_open_key(&mut self) -> Option<TrafficKey> {
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

/// One side of an established route. Dropping the value closes the connection.
pub(crate) struct FrameStream {
    socket: ProcessOwned<TcpStream>,
    seal_key: TrafficKey,
    key_schedule: KeySchedule,
    records_per_key_max: u64,
    output_buffer: OutputBuffer,
    reader: FrameReader,
    /// Reason why nothing more can be written; `None` while writing is possible. Data that the peer
    /// has sent earlier may still arrive.
    write_end_reason: Option<RouteEndReason>,
    output_counts: IoCounts,
}

impl std::fmt::Debug for FrameStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirectEnd")
            .field("fd", &self.socket.get().as_raw_fd())
            .field("ended", &self.reader.end_reason())
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
        let records_per_key = RECORDS_PER_KEY;
        Ok(Self {
            socket,
            seal_key: send_key,
            key_schedule: schedule,
            records_per_key_max: records_per_key,
            output_buffer: output,
            reader: FrameReader::new(receive_key, early_input),
            write_end_reason: None,
            output_counts: IoCounts::default(),
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
        self.reader.release_buffer();
    }

    /// Returns the total size of both buffers in bytes.
    #[cfg(test)]
    pub(crate) fn buffer_bytes(&self) -> usize {
        self.output_buffer.bytes.len() + self.reader.buffer_bytes()
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

    /// Writes the first `byte_count` bytes of what is queued, or all of it.
    #[cfg(test)]
    pub(crate) fn write_part(&mut self, byte_count: usize) -> nix::Result<()> {
        if self.output_buffer.unsealed_content_bytes > 0 {
            self.seal_record(ContentType::Data);
        }
        let start = self.output_buffer.records_start;
        let end = self.output_buffer.records_end.min(start + byte_count);
        let part = &self.output_buffer.bytes[start..end];
        let fd = self.socket.get().as_raw_fd();
        self.output_buffer.records_start += send(fd, part, MsgFlags::MSG_NOSIGNAL)?;
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn output_counts(&self) -> IoCounts {
        self.output_counts
    }

    #[cfg(test)]
    pub(crate) fn input_counts(&self) -> IoCounts {
        self.reader.io_counts()
    }

    // ---- output

    /// True if there is space for a frame of any length.
    pub(crate) fn has_frame_space(&self) -> bool {
        OUTPUT_BUFFER_BYTES - self.output_buffer.open_record_end() >= FRAME_SPACE_BYTES_MAX
    }

    /// True if the output buffer contains data that is not written to the socket yet.
    pub(crate) fn has_unwritten_data(&self) -> bool {
        self.output_buffer.records_start < self.output_buffer.records_end
            || self.output_buffer.unsealed_content_bytes > 0
    }

    /// Queues a frame for [`write_queued`](Self::write_queued). The frame is the concatenation of
    /// `parts`; `following_bytes` of the same message follow it. Returns false, and queues nothing,
    /// if there is no space.
    ///
    /// # Panics
    /// The frame is longer than [`FRAME_BYTES_MAX`].
    pub(crate) fn try_queue_frame(
        &mut self,
        [head, parts @ ..]: &[&[u8]; 3],
        following_bytes: usize,
    ) -> bool {
        let payload_bytes = parts.iter().map(|part| part.len()).sum::<usize>();
        let frame_bytes = head.len() + payload_bytes;
        assert!(frame_bytes <= FRAME_BYTES_MAX, "links cut what they send");
        if !self.has_frame_space() {
            return false;
        }
        self.output_buffer.allocate();
        let frame_bytes = u32::try_from(frame_bytes).expect("frames are short");
        let following_bytes = u32::try_from(following_bytes).unwrap_or(u32::MAX);
        self.append_content(&frame_bytes.to_le_bytes());
        self.append_content(&following_bytes.to_le_bytes());
        self.append_content(head);
        if payload_bytes >= PLACED_PAYLOAD_BYTES_MIN
            && self.output_buffer.unsealed_content_bytes > 0
        {
            // The receiver decrypts the payload in the message.
            self.seal_record(ContentType::Data);
        }
        parts.iter().for_each(|part| self.append_content(part));
        true
    }

    fn append_content(&mut self, mut content: &[u8]) {
        self.output_counts.copied_bytes += content.len() as u64;
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
            self.output_counts.calls += 1;
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
            self.output_buffer.allocate();
            self.append_content(&CLOSE_NOTIFY_ALERT);
            self.seal_record(ContentType::Alert);
            // An error is ignored: the peer detects the end even without the alert.
            let _ = self.write_queued();
        }
    }

    // ---- input

    /// Passes the frames that have arrived to `sink`. Must be called once when the route is
    /// established, because the first frames may have arrived with the end of the handshake. After
    /// that the method must be called whenever the socket is readable. Returns true if data remains
    /// that the next call must read.
    ///
    /// # Errors
    /// The route has ended. All complete frames before the end were passed to `sink`.
    pub(crate) fn read_frames(&mut self, sink: &mut dyn FrameSink) -> Result<bool, RouteEndReason> {
        let may_have_data =
            self.reader
                .read_frames(self.socket.get(), &mut self.key_schedule, sink)?;
        Ok(may_have_data && self.socket_has_data())
    }

    fn socket_has_data(&self) -> bool {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK;
        recv(self.socket.get().as_raw_fd(), &mut [0], flags).is_ok_and(|bytes| bytes > 0)
    }

    /// Returns true if the empty frame has arrived with which the listening side confirms that it
    /// has authenticated this side. Later frames stay in the input buffer.
    pub(super) fn read_confirmation(&mut self) -> Result<bool, RouteEndReason> {
        self.reader
            .read_confirmation(self.socket.get(), &mut self.key_schedule)
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

    fn allocate(&mut self) {
        if self.bytes.is_empty() {
            self.bytes = vec![0; OUTPUT_BUFFER_BYTES];
        }
    }
}

const _: () = assert!(OUTPUT_BUFFER_BYTES >= 2 * FRAME_SPACE_BYTES_MAX);
