//! End of an established direct route: sends and receives whole frames without blocking.
//!
//! Outgoing frames are packed into TLS records of up to 16 KiB in one buffer, which is written to
//! the socket. Incoming records are decrypted in place, so that the frames in them become
//! contiguous. After [`RECORDS_PER_KEY`] records the sender switches to a new key.

use super::record::{
    CONTENT_BYTES_MAX, ContentType, HEAD_BYTES, RECORD_BYTES_MAX, TAIL_BYTES, TrafficKey,
    record_length,
};
use super::{FRAME_BYTES_MAX, RouteEnd, SetupError};
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
const OUT_BUFFER_BYTES: usize = 384 << 10;
/// Maximum buffer space that one frame needs: the frame itself, the headers and tags of all records
/// that the frame touches, and a key update.
const FRAME_SPACE_MAX: usize = FRAME_LENGTH_FIELD_BYTES
    + FRAME_BYTES_MAX
    + (FRAME_BYTES_MAX / CONTENT_BYTES_MAX + 3) * (HEAD_BYTES + TAIL_BYTES)
    + KEY_UPDATE_MESSAGE.len()
    + HEAD_BYTES
    + TAIL_BYTES;
const IN_BUFFER_BYTES: usize = 384 << 10;
/// Minimum free space for a read. If less space is free, the buffered data is moved to the front of
/// the buffer, because large reads are efficient.
const READ_BYTES_MIN: usize = 128 << 10;
/// Maximum number of bytes read in one call, so that a fast peer does not occupy the caller
/// forever.
const READ_BYTES_MAX: usize = 1 << 20;
/// Number of records encrypted with one key. TLS allows at most 2^24.5 for AES.
const RECORDS_PER_KEY: u64 = 1 << 23;
/// Handshake message that announces a new key and requests none.
const KEY_UPDATE_MESSAGE: [u8; 5] = [24, 0, 0, 1, 0];
/// Alert that closes a connection properly.
const CLOSE_NOTIFY_ALERT: [u8; 2] = [1, 0];

/// Part of the finished handshake that derives further keys.
pub(super) enum KeySchedule {
    Connecting(KernelConnection<ClientConnectionData>),
    Listening(KernelConnection<ServerConnectionData>),
}

impl KeySchedule {
    fn next_seal_key(&mut self) -> Option<TrafficKey> {
        let next = match self {
            KeySchedule::Connecting(keys) => keys.update_tx_secret(),
            KeySchedule::Listening(keys) => keys.update_tx_secret(),
        };
        TrafficKey::new(next.ok()?)
    }

    fn next_open_key(&mut self) -> Option<TrafficKey> {
        let next = match self {
            KeySchedule::Connecting(keys) => keys.update_rx_secret(),
            KeySchedule::Listening(keys) => keys.update_rx_secret(),
        };
        TrafficKey::new(next.ok()?)
    }
}

/// Output buffer: finished records from `from` to `to`, then the record that is being filled. The
/// buffer is not allocated while the route is idle.
struct OutBuffer {
    bytes: Vec<u8>,
    records_start: usize,
    records_end: usize,
    /// Number of content bytes in the record that is being filled and is not encrypted yet.
    unsealed_content_bytes: usize,
}

/// Input buffer: decrypted content from `plain_from` to `plain_to`, encrypted records from `from`
/// to `to`. The buffer is not allocated while the route is idle.
struct InBuffer {
    bytes: Vec<u8>,
    plain_start: usize,
    plain_end: usize,
    records_start: usize,
    records_end: usize,
}

/// End of an established route. Dropping it closes the connection.
pub(crate) struct FrameStream {
    socket: ProcessOwned<TcpStream>,
    seal_key: TrafficKey,
    open_key: TrafficKey,
    key_schedule: KeySchedule,
    records_per_key: u64,
    out: OutBuffer,
    input: InBuffer,
    /// Reason why nothing more can be read, once that is the case.
    read_end: Option<RouteEnd>,
    /// Reason why nothing more can be written, once that is the case. Data that the peer has sent
    /// before may still arrive.
    write_end: Option<RouteEnd>,
}

impl std::fmt::Debug for FrameStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirectEnd")
            .field("fd", &self.socket.get().as_raw_fd())
            .field("ended", &self.read_end)
            .finish()
    }
}

impl AsFd for FrameStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.get().as_fd()
    }
}

impl FrameStream {
    /// Creates the end of a route after a finished handshake. `unsent` are handshake bytes that are
    /// not written yet; `received` are bytes that the handshake has read beyond its end.
    pub(super) fn new(
        socket: ProcessOwned<TcpStream>,
        secrets: ExtractedSecrets,
        keys: KeySchedule,
        unsent: &[u8],
        received: &[u8],
    ) -> Result<FrameStream, SetupError> {
        let unknown = || SetupError::Local("an unknown cipher was agreed upon".into());
        let seal = TrafficKey::new(secrets.tx).ok_or_else(unknown)?;
        let open = TrafficKey::new(secrets.rx).ok_or_else(unknown)?;
        let mut out = OutBuffer {
            bytes: vec![0; OUT_BUFFER_BYTES],
            records_start: 0,
            records_end: unsent.len(),
            unsealed_content_bytes: 0,
        };
        out.bytes[..unsent.len()].copy_from_slice(unsent);
        let mut input = InBuffer {
            bytes: vec![0; IN_BUFFER_BYTES],
            plain_start: 0,
            plain_end: 0,
            records_start: 0,
            records_end: received.len(),
        };
        input.bytes[..received.len()].copy_from_slice(received);
        let records_per_key = RECORDS_PER_KEY;
        Ok(FrameStream {
            socket,
            seal_key: seal,
            open_key: open,
            key_schedule: keys,
            records_per_key,
            out,
            input,
            read_end: None,
            write_end: None,
        })
    }

    /// Frees the buffers that are empty, until they are needed again.
    pub(crate) fn release_buffers(&mut self) {
        if !self.wants_write() {
            self.out = OutBuffer {
                bytes: Vec::new(),
                records_start: 0,
                records_end: 0,
                unsealed_content_bytes: 0,
            };
        }
        self.input.rewind();
        if self.input.records_end == 0 {
            self.input.bytes = Vec::new();
        }
    }

    /// Returns the size of both buffers.
    #[cfg(test)]
    pub(crate) fn buffer_bytes(&self) -> usize {
        self.out.bytes.len() + self.input.bytes.len()
    }

    /// Sets the number of records after which the key changes.
    #[cfg(test)]
    pub(super) fn change_keys_after(&mut self, records: u64) {
        self.records_per_key = records;
    }

    /// Sends bytes that need not form a frame.
    #[cfg(test)]
    pub(super) fn push_bytes(&mut self, bytes: &[u8]) {
        self.append(bytes);
    }

    // ---- output

    /// True if there is space for a frame of any length.
    pub(crate) fn has_room(&self) -> bool {
        OUT_BUFFER_BYTES - (self.out.pending_end() - self.out.records_start) >= FRAME_SPACE_MAX
    }

    /// True if the output buffer contains data that is not written to the socket yet.
    pub(crate) fn wants_write(&self) -> bool {
        self.out.records_start < self.out.records_end || self.out.unsealed_content_bytes > 0
    }

    /// Queues a frame, given in parts, for [`flush`](Self::flush). Returns false, and queues
    /// nothing, if there is no space.
    ///
    /// # Panics
    /// The frame is longer than [`FRAME_BYTES_MAX`].
    pub(crate) fn push(&mut self, parts: &[&[u8]]) -> bool {
        let length = parts.iter().map(|part| part.len()).sum::<usize>();
        assert!(length <= FRAME_BYTES_MAX, "links cut what they send");
        if !self.has_room() {
            return false;
        }
        self.out.reserve_frame();
        let length = u32::try_from(length).expect("frames are short");
        self.append(&length.to_le_bytes());
        parts.iter().for_each(|part| self.append(part));
        true
    }

    fn append(&mut self, mut part: &[u8]) {
        while !part.is_empty() {
            let (now, later) = part.split_at(
                part.len()
                    .min(CONTENT_BYTES_MAX - self.out.unsealed_content_bytes),
            );
            let at = self.out.records_end + HEAD_BYTES + self.out.unsealed_content_bytes;
            self.out.bytes[at..at + now.len()].copy_from_slice(now);
            self.out.unsealed_content_bytes += now.len();
            part = later;
            if self.out.unsealed_content_bytes == CONTENT_BYTES_MAX {
                self.finish_record(ContentType::Data);
            }
        }
    }

    /// Encrypts the record that is being filled.
    fn finish_record(&mut self, kind: ContentType) {
        let end = self.out.pending_end();
        self.seal_key
            .seal(kind, &mut self.out.bytes[self.out.records_end..end]);
        (self.out.records_end, self.out.unsealed_content_bytes) = (end, 0);
        if kind == ContentType::Data && self.seal_key.record_count() >= self.records_per_key {
            self.append(&KEY_UPDATE_MESSAGE);
            self.finish_record(ContentType::Handshake);
            match self.key_schedule.next_seal_key() {
                Some(key) => self.seal_key = key,
                None => self.write_end = Some(RouteEnd::Broken("there is no new key".into())),
            }
        }
    }

    /// Writes as much as the socket accepts without blocking.
    ///
    /// # Errors
    /// Nothing more can be written. [`read`](Self::read) still returns what has arrived.
    pub(crate) fn flush(&mut self) -> Result<(), RouteEnd> {
        if self.out.unsealed_content_bytes > 0 {
            self.finish_record(ContentType::Data);
        }
        while self.write_end.is_none() && self.out.records_start < self.out.records_end {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match send(
                self.socket.get().as_raw_fd(),
                &self.out.bytes[self.out.records_start..self.out.records_end],
                flags,
            ) {
                Ok(sent) => self.out.records_start += sent,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => break,
                Err(e) => self.write_end = Some(RouteEnd::Broken(e.desc().into())),
            }
        }
        if self.out.records_start == self.out.records_end {
            (self.out.records_start, self.out.records_end) = (0, 0);
        }
        self.write_end.clone().map_or(Ok(()), Err)
    }

    /// Sends the closing alert, if the socket accepts it without blocking, and closes the
    /// connection.
    pub(crate) fn close(mut self) {
        if self.flush().is_ok() && self.out.records_start == self.out.records_end {
            self.out.reserve_frame();
            self.append(&CLOSE_NOTIFY_ALERT);
            self.finish_record(ContentType::Alert);
            // The peer notices the end even without the alert.
            let _ = self.flush();
        }
    }

    // ---- input

    /// Passes the frames that have arrived to `on_frame`. Must be called once when the route is
    /// established, because the first frames may have arrived with the end of the handshake, and
    /// then whenever the socket is readable. Returns true if data remains that the next call must
    /// read.
    ///
    /// # Errors
    /// The route has ended; all complete frames before the end were passed on.
    pub(crate) fn read(&mut self, on_frame: &mut dyn FnMut(&[u8])) -> Result<bool, RouteEnd> {
        let mut got = self.open_records(on_frame);
        let (mut total, mut emptied) = (0, false);
        while got.is_ok() && self.read_end.is_none() && !emptied && total < READ_BYTES_MAX {
            let room = self.input.reserve_read();
            match recv(self.socket.get().as_raw_fd(), room, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => got = Err(self.input.end_of_stream()),
                Ok(bytes) => {
                    // A read that does not fill the buffer has emptied the socket.
                    emptied = bytes < room.len();
                    self.input.records_end += bytes;
                    total += bytes;
                    got = self.open_records(on_frame);
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => emptied = true,
                Err(e) => got = Err(RouteEnd::Broken(e.desc().into())),
            }
        }
        if let Err(ended) = got {
            self.read_end.get_or_insert(ended);
        }
        self.read_end
            .clone()
            .map_or_else(|| Ok(!emptied && self.socket_has_data()), Err)
    }

    fn socket_has_data(&self) -> bool {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK;
        recv(self.socket.get().as_raw_fd(), &mut [0], flags).is_ok_and(|bytes| bytes > 0)
    }

    /// Returns true when the empty frame has arrived with which the listening side confirms that it
    /// has authenticated this side. Reads nothing after that frame.
    pub(super) fn is_confirmed(&mut self) -> Result<bool, RouteEnd> {
        let room = self.input.reserve_read();
        match recv(self.socket.get().as_raw_fd(), room, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => return Err(RouteEnd::Closed),
            Ok(bytes) => self.input.records_end += bytes,
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(e) => return Err(RouteEnd::Broken(e.desc().into())),
        }
        while self.input.plain_end - self.input.plain_start < FRAME_LENGTH_FIELD_BYTES {
            if !self.open_record()? {
                return Ok(false);
            }
        }
        let first = &self.input.bytes
            [self.input.plain_start..self.input.plain_start + FRAME_LENGTH_FIELD_BYTES];
        if first != [0; FRAME_LENGTH_FIELD_BYTES] {
            return Err(RouteEnd::ProtocolError(
                "the first frame is not the one that confirms the route",
            ));
        }
        self.input.plain_start += FRAME_LENGTH_FIELD_BYTES;
        Ok(true)
    }

    /// Decrypts the complete records and passes on the frames in them.
    fn open_records(&mut self, on_frame: &mut dyn FnMut(&[u8])) -> Result<(), RouteEnd> {
        while self.open_record()? {
            self.input.pass_frames(on_frame)?;
        }
        self.input.pass_frames(on_frame)?;
        self.input.rewind();
        Ok(())
    }

    /// Decrypts one record; returns false if none is complete.
    fn open_record(&mut self) -> Result<bool, RouteEnd> {
        let input = &mut self.input;
        let Some(length) = record_length(&input.bytes[input.records_start..input.records_end])?
            .filter(|n| *n <= input.records_end - input.records_start)
        else {
            return Ok(false);
        };
        let (at, end) = (
            input.records_start - input.plain_end,
            input.records_start + length,
        );
        let (content, kind) = self
            .open_key
            .open(&mut input.bytes[input.plain_end..end], at)?;
        input.records_start = end;
        let content = input.plain_end..input.plain_end + content;
        match kind {
            ContentType::Data => input.plain_end = content.end,
            ContentType::Handshake if input.bytes[content.clone()] == KEY_UPDATE_MESSAGE => {
                self.open_key = self
                    .key_schedule
                    .next_open_key()
                    .ok_or(RouteEnd::ProtocolError("there is no new key"))?;
            }
            ContentType::Handshake => {
                return Err(RouteEnd::ProtocolError(
                    "a handshake message after the handshake",
                ));
            }
            ContentType::Alert if input.bytes[content] == CLOSE_NOTIFY_ALERT => {
                return Err(RouteEnd::Closed);
            }
            ContentType::Alert => {
                return Err(RouteEnd::Broken("the peer sent an error alert".into()));
            }
        }
        Ok(true)
    }
}

impl OutBuffer {
    /// Returns the position at which the record that is being filled will end.
    fn pending_end(&self) -> usize {
        if self.unsealed_content_bytes == 0 {
            self.records_end
        } else {
            self.records_end + HEAD_BYTES + self.unsealed_content_bytes + TAIL_BYTES
        }
    }

    /// Makes space for one frame after the queued data, by moving it to the front if necessary.
    fn reserve_frame(&mut self) {
        if self.bytes.is_empty() {
            self.bytes = vec![0; OUT_BUFFER_BYTES];
        }
        if OUT_BUFFER_BYTES - self.pending_end() < FRAME_SPACE_MAX {
            let end = self.pending_end();
            self.bytes.copy_within(self.records_start..end, 0);
            (self.records_start, self.records_end) = (0, self.records_end - self.records_start);
        }
    }
}

impl InBuffer {
    /// Returns the space for the next read.
    fn reserve_read(&mut self) -> &mut [u8] {
        if self.bytes.is_empty() {
            self.bytes = vec![0; IN_BUFFER_BYTES];
        }
        if IN_BUFFER_BYTES - self.records_end < READ_BYTES_MIN {
            let (plain, records) = (
                self.plain_end - self.plain_start,
                self.records_end - self.records_start,
            );
            self.bytes.copy_within(self.plain_start..self.plain_end, 0);
            self.bytes
                .copy_within(self.records_start..self.records_end, plain);
            (self.plain_start, self.plain_end) = (0, plain);
            (self.records_start, self.records_end) = (plain, plain + records);
        }
        &mut self.bytes[self.records_end..]
    }

    fn pass_frames(&mut self, on_frame: &mut dyn FnMut(&[u8])) -> Result<(), RouteEnd> {
        while let Some(head) =
            self.bytes[self.plain_start..self.plain_end].first_chunk::<FRAME_LENGTH_FIELD_BYTES>()
        {
            let length = u32::from_le_bytes(*head) as usize;
            if length > FRAME_BYTES_MAX {
                return Err(RouteEnd::ProtocolError("a frame is over the limit"));
            }
            let end = self.plain_start + FRAME_LENGTH_FIELD_BYTES + length;
            if end > self.plain_end {
                break;
            }
            on_frame(&self.bytes[end - length..end]);
            self.plain_start = end;
        }
        Ok(())
    }

    /// Rewinds an empty buffer to its start, which is in the CPU cache.
    fn rewind(&mut self) {
        if self.plain_start == self.plain_end {
            (self.plain_start, self.plain_end) = (0, 0);
            if self.records_start == self.records_end {
                (self.records_start, self.records_end) = (0, 0);
            }
        }
    }

    fn end_of_stream(&self) -> RouteEnd {
        if self.records_start == self.records_end && self.plain_start == self.plain_end {
            RouteEnd::Closed
        } else {
            RouteEnd::Broken("it ended in the middle of a frame".into())
        }
    }
}

const _: () = assert!(
    OUT_BUFFER_BYTES >= 2 * FRAME_SPACE_MAX
        && IN_BUFFER_BYTES >= FRAME_BYTES_MAX + RECORD_BYTES_MAX + READ_BYTES_MIN
);
