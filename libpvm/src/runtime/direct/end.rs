//! End of an established direct route: sends and receives whole frames without blocking.
//!
//! Outgoing frames are packed into TLS records of up to 16 KiB in one buffer, which is written to
//! the socket. Incoming records are decrypted in place, so that the frames in them become
//! contiguous. After [`RECORDS_PER_KEY`] records the sender switches to a new key.

use super::record::{
    CONTENT_BYTES_MAX, HEAD_BYTES, Key, Kind, RECORD_BYTES_MAX, TAIL_BYTES, length,
};
use super::{Ended, FRAME_BYTES_MAX, NoRoute};
use crate::runtime::process::Own;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send};
use rustls::ExtractedSecrets;
use rustls::client::ClientConnectionData;
use rustls::kernel::KernelConnection;
use rustls::server::ServerConnectionData;
use std::net::TcpStream;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// Size of the length before each frame.
const LENGTH_BYTES: usize = 4;
/// Size of the output buffer.
const OUT_BYTES: usize = 384 << 10;
/// Maximum buffer space for one frame: its bytes, plus headers and tags of the record that it
/// completes, those that it fills and the one that it begins, plus a key update.
const FRAME_ROOM: usize = LENGTH_BYTES
    + FRAME_BYTES_MAX
    + (FRAME_BYTES_MAX / CONTENT_BYTES_MAX + 3) * (HEAD_BYTES + TAIL_BYTES)
    + KEY_UPDATE.len()
    + HEAD_BYTES
    + TAIL_BYTES;
/// Size of the input buffer.
const IN_BYTES: usize = 384 << 10;
/// If less space than this is free, the data moves to the front of the buffer: reads should be
/// large.
const READ_BYTES_MIN: usize = 128 << 10;
/// Maximum number of bytes read in one call, so that a fast peer does not occupy the caller
/// forever.
const READ_BYTES_MAX: usize = 1 << 20;
/// Number of records encrypted with one key. TLS allows at most 2^24.5 for AES.
const RECORDS_PER_KEY: u64 = 1 << 23;
/// Handshake message that announces a new key and requests none.
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];
/// Alert that closes a connection properly.
const CLOSE_NOTIFY: [u8; 2] = [1, 0];

/// Part of the finished handshake that derives further keys.
pub(super) enum Keys {
    Connecting(KernelConnection<ClientConnectionData>),
    Listening(KernelConnection<ServerConnectionData>),
}

impl Keys {
    fn next_to_seal(&mut self) -> Option<Key> {
        let next = match self {
            Keys::Connecting(keys) => keys.update_tx_secret(),
            Keys::Listening(keys) => keys.update_tx_secret(),
        };
        Key::new(next.ok()?)
    }

    fn next_to_open(&mut self) -> Option<Key> {
        let next = match self {
            Keys::Connecting(keys) => keys.update_rx_secret(),
            Keys::Listening(keys) => keys.update_rx_secret(),
        };
        Key::new(next.ok()?)
    }
}

/// Output buffer: finished records from `from` to `to`, then one that is being filled. Unallocated
/// while the route is idle.
struct Out {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
    /// Number of content bytes in the last record, which is not encrypted yet.
    open: usize,
}

/// Input buffer: decrypted content from `plain_from` to `plain_to`, encrypted records from `from`
/// to `to`. Unallocated while the route is idle.
struct In {
    bytes: Vec<u8>,
    plain_from: usize,
    plain_to: usize,
    from: usize,
    to: usize,
}

/// End of an established route. Dropping it closes the connection.
pub(crate) struct DirectEnd {
    socket: Own<TcpStream>,
    seal: Key,
    open: Key,
    keys: Keys,
    records_per_key: u64,
    out: Out,
    come: In,
    /// Set when nothing more can be read.
    ended: Option<Ended>,
    /// Set when nothing more can be written. Data that the peer has sent before may still arrive.
    mute: Option<Ended>,
}

impl std::fmt::Debug for DirectEnd {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirectEnd")
            .field("fd", &self.socket.get().as_raw_fd())
            .field("ended", &self.ended)
            .finish()
    }
}

impl AsFd for DirectEnd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.get().as_fd()
    }
}

impl DirectEnd {
    /// Creates an end after a finished handshake, with the bytes that the handshake has not written
    /// and those that it has read in advance.
    pub(super) fn new(
        socket: Own<TcpStream>,
        secrets: ExtractedSecrets,
        keys: Keys,
        unsent: &[u8],
        come: &[u8],
    ) -> Result<DirectEnd, NoRoute> {
        let unknown = || NoRoute::Here("an unknown cipher was agreed upon".into());
        let seal = Key::new(secrets.tx).ok_or_else(unknown)?;
        let open = Key::new(secrets.rx).ok_or_else(unknown)?;
        let mut out = Out {
            bytes: vec![0; OUT_BYTES],
            from: 0,
            to: unsent.len(),
            open: 0,
        };
        out.bytes[..unsent.len()].copy_from_slice(unsent);
        let mut inward = In {
            bytes: vec![0; IN_BYTES],
            plain_from: 0,
            plain_to: 0,
            from: 0,
            to: come.len(),
        };
        inward.bytes[..come.len()].copy_from_slice(come);
        let records_per_key = RECORDS_PER_KEY;
        Ok(DirectEnd {
            socket,
            seal,
            open,
            keys,
            records_per_key,
            out,
            come: inward,
            ended: None,
            mute: None,
        })
    }

    /// Frees the buffers that are empty, until they are needed again.
    pub(crate) fn rest(&mut self) {
        if !self.wants_write() {
            self.out = Out {
                bytes: Vec::new(),
                from: 0,
                to: 0,
                open: 0,
            };
        }
        self.come.reset();
        if self.come.to == 0 {
            self.come.bytes = Vec::new();
        }
    }

    /// Returns the size of both buffers.
    #[cfg(test)]
    pub(crate) fn buffer_bytes(&self) -> usize {
        self.out.bytes.len() + self.come.bytes.len()
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
        OUT_BYTES - (self.out.pending() - self.out.from) >= FRAME_ROOM
    }

    /// True if data waits for the socket.
    pub(crate) fn wants_write(&self) -> bool {
        self.out.from < self.out.to || self.out.open > 0
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
        self.out.make_room();
        let length = u32::try_from(length).expect("frames are short");
        self.append(&length.to_le_bytes());
        parts.iter().for_each(|part| self.append(part));
        true
    }

    fn append(&mut self, mut part: &[u8]) {
        while !part.is_empty() {
            let (now, later) = part.split_at(part.len().min(CONTENT_BYTES_MAX - self.out.open));
            let at = self.out.to + HEAD_BYTES + self.out.open;
            self.out.bytes[at..at + now.len()].copy_from_slice(now);
            self.out.open += now.len();
            part = later;
            if self.out.open == CONTENT_BYTES_MAX {
                self.finish_record(Kind::Data);
            }
        }
    }

    /// Encrypts the record that is being filled.
    fn finish_record(&mut self, kind: Kind) {
        let end = self.out.pending();
        self.seal.seal(kind, &mut self.out.bytes[self.out.to..end]);
        (self.out.to, self.out.open) = (end, 0);
        if kind == Kind::Data && self.seal.records() >= self.records_per_key {
            self.append(&KEY_UPDATE);
            self.finish_record(Kind::Handshake);
            match self.keys.next_to_seal() {
                Some(key) => self.seal = key,
                None => self.mute = Some(Ended::Broken("there is no new key".into())),
            }
        }
    }

    /// Writes as much as the socket accepts without blocking.
    ///
    /// # Errors
    /// Nothing more can be written. [`read`](Self::read) still returns what has arrived.
    pub(crate) fn flush(&mut self) -> Result<(), Ended> {
        if self.out.open > 0 {
            self.finish_record(Kind::Data);
        }
        while self.mute.is_none() && self.out.from < self.out.to {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            match send(
                self.socket.get().as_raw_fd(),
                &self.out.bytes[self.out.from..self.out.to],
                flags,
            ) {
                Ok(sent) => self.out.from += sent,
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => break,
                Err(e) => self.mute = Some(Ended::Broken(e.desc().into())),
            }
        }
        if self.out.from == self.out.to {
            (self.out.from, self.out.to) = (0, 0);
        }
        self.mute.clone().map_or(Ok(()), Err)
    }

    /// Sends the closing alert, if the socket accepts it without blocking, and closes the
    /// connection.
    pub(crate) fn close(mut self) {
        if self.flush().is_ok() && self.out.from == self.out.to {
            self.out.make_room();
            self.append(&CLOSE_NOTIFY);
            self.finish_record(Kind::Alert);
            // The peer notices the end even without the alert.
            let _ = self.flush();
        }
    }

    // ---- input

    /// Passes the frames that have arrived to `take`. Must be called once when the route is
    /// established, because the first frames may have arrived with the end of the handshake, and
    /// then whenever the socket is readable. Returns true if data is left for the next call.
    ///
    /// # Errors
    /// The route has ended; all complete frames before the end were passed on.
    pub(crate) fn read(&mut self, take: &mut dyn FnMut(&[u8])) -> Result<bool, Ended> {
        let mut got = self.open_records(take);
        let (mut total, mut emptied) = (0, false);
        while got.is_ok() && self.ended.is_none() && !emptied && total < READ_BYTES_MAX {
            let room = self.come.make_room();
            match recv(self.socket.get().as_raw_fd(), room, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => got = Err(self.come.end_of_stream()),
                Ok(bytes) => {
                    // A read that does not fill the buffer has emptied the socket.
                    emptied = bytes < room.len();
                    self.come.to += bytes;
                    total += bytes;
                    got = self.open_records(take);
                }
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => emptied = true,
                Err(e) => got = Err(Ended::Broken(e.desc().into())),
            }
        }
        if let Err(ended) = got {
            self.ended.get_or_insert(ended);
        }
        self.ended
            .clone()
            .map_or_else(|| Ok(!emptied && self.has_more()), Err)
    }

    /// True if the socket has data.
    fn has_more(&self) -> bool {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK;
        recv(self.socket.get().as_raw_fd(), &mut [0], flags).is_ok_and(|bytes| bytes > 0)
    }

    /// Returns true when the empty frame has arrived by which the listening side confirms that this
    /// side is authenticated. Reads nothing after that frame.
    pub(super) fn is_confirmed(&mut self) -> Result<bool, Ended> {
        let room = self.come.make_room();
        match recv(self.socket.get().as_raw_fd(), room, MsgFlags::MSG_DONTWAIT) {
            Ok(0) => return Err(Ended::Closed),
            Ok(bytes) => self.come.to += bytes,
            Err(Errno::EAGAIN | Errno::EINTR) => {}
            Err(e) => return Err(Ended::Broken(e.desc().into())),
        }
        while self.come.plain_to - self.come.plain_from < LENGTH_BYTES {
            if !self.open_record()? {
                return Ok(false);
            }
        }
        let first = &self.come.bytes[self.come.plain_from..self.come.plain_from + LENGTH_BYTES];
        if first != [0; LENGTH_BYTES] {
            return Err(Ended::Garbage(
                "the first frame is not the one that confirms the route",
            ));
        }
        self.come.plain_from += LENGTH_BYTES;
        Ok(true)
    }

    /// Decrypts the complete records and passes on the frames in them.
    fn open_records(&mut self, take: &mut dyn FnMut(&[u8])) -> Result<(), Ended> {
        while self.open_record()? {
            self.come.hand_over(take)?;
        }
        self.come.hand_over(take)?;
        self.come.reset();
        Ok(())
    }

    /// Decrypts one record; returns false if none is complete.
    fn open_record(&mut self) -> Result<bool, Ended> {
        let come = &mut self.come;
        let Some(length) =
            length(&come.bytes[come.from..come.to])?.filter(|n| *n <= come.to - come.from)
        else {
            return Ok(false);
        };
        let (at, end) = (come.from - come.plain_to, come.from + length);
        let (content, kind) = self.open.open(&mut come.bytes[come.plain_to..end], at)?;
        come.from = end;
        let content = come.plain_to..come.plain_to + content;
        match kind {
            Kind::Data => come.plain_to = content.end,
            Kind::Handshake if come.bytes[content.clone()] == KEY_UPDATE => {
                self.open = self
                    .keys
                    .next_to_open()
                    .ok_or(Ended::Garbage("there is no new key"))?;
            }
            Kind::Handshake => return Err(Ended::Garbage("a handshake behind the handshake")),
            Kind::Alert if come.bytes[content] == CLOSE_NOTIFY => return Err(Ended::Closed),
            Kind::Alert => return Err(Ended::Broken("the peer complains".into())),
        }
        Ok(true)
    }
}

impl Out {
    /// Returns the position at which the record that is being filled will end.
    fn pending(&self) -> usize {
        if self.open == 0 {
            self.to
        } else {
            self.to + HEAD_BYTES + self.open + TAIL_BYTES
        }
    }

    /// Makes space for one frame after the queued data, by moving it to the front if necessary.
    fn make_room(&mut self) {
        if self.bytes.is_empty() {
            self.bytes = vec![0; OUT_BYTES];
        }
        if OUT_BYTES - self.pending() < FRAME_ROOM {
            let end = self.pending();
            self.bytes.copy_within(self.from..end, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
    }
}

impl In {
    /// Returns the space for the next read.
    fn make_room(&mut self) -> &mut [u8] {
        if self.bytes.is_empty() {
            self.bytes = vec![0; IN_BYTES];
        }
        if IN_BYTES - self.to < READ_BYTES_MIN {
            let (plain, records) = (self.plain_to - self.plain_from, self.to - self.from);
            self.bytes.copy_within(self.plain_from..self.plain_to, 0);
            self.bytes.copy_within(self.from..self.to, plain);
            (self.plain_from, self.plain_to) = (0, plain);
            (self.from, self.to) = (plain, plain + records);
        }
        &mut self.bytes[self.to..]
    }

    fn hand_over(&mut self, take: &mut dyn FnMut(&[u8])) -> Result<(), Ended> {
        while let Some(head) =
            self.bytes[self.plain_from..self.plain_to].first_chunk::<LENGTH_BYTES>()
        {
            let length = u32::from_le_bytes(*head) as usize;
            if length > FRAME_BYTES_MAX {
                return Err(Ended::Garbage("a frame is over the limit"));
            }
            let end = self.plain_from + LENGTH_BYTES + length;
            if end > self.plain_to {
                break;
            }
            take(&self.bytes[end - length..end]);
            self.plain_from = end;
        }
        Ok(())
    }

    /// Rewinds an empty buffer to its start, which is in the CPU cache.
    fn reset(&mut self) {
        if self.plain_from == self.plain_to {
            (self.plain_from, self.plain_to) = (0, 0);
            if self.from == self.to {
                (self.from, self.to) = (0, 0);
            }
        }
    }

    fn end_of_stream(&self) -> Ended {
        if self.from == self.to && self.plain_from == self.plain_to {
            Ended::Closed
        } else {
            Ended::Broken("it ended in the middle of a frame".into())
        }
    }
}

const _: () = assert!(
    OUT_BYTES >= 2 * FRAME_ROOM && IN_BYTES >= FRAME_BYTES_MAX + RECORD_BYTES_MAX + READ_BYTES_MIN
);
