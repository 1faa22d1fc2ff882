//! One end of a direct route: whole frames in, whole frames out, never waiting.

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

/// Length in front of a frame.
const LENGTH_BYTES: usize = 4;
/// Bytes of records that may wait for the socket.
const OUT_BYTES: usize = 384 << 10;
/// Room that one frame may need: itself, a record that it fills up, those that it fills, and one that it begins.
const FRAME_ROOM: usize = LENGTH_BYTES
    + FRAME_BYTES_MAX
    + (FRAME_BYTES_MAX / CONTENT_BYTES_MAX + 3) * (HEAD_BYTES + TAIL_BYTES)
    + KEY_UPDATE.len()
    + HEAD_BYTES
    + TAIL_BYTES;
/// Room for what comes.
const IN_BYTES: usize = 384 << 10;
/// Room below which what is there moves to the front: reads should be large.
const READ_BYTES_MIN: usize = 128 << 10;
/// Bytes read in one call, so that a fast peer does not keep the caller for ever.
const READ_BYTES_MAX: usize = 1 << 20;
/// Records that one key seals; TLS wants fewer than 2^24.5 for AES.
const RECORDS_PER_KEY: u64 = 1 << 23;
/// The handshake message that announces a new key and asks for none.
const KEY_UPDATE: [u8; 5] = [24, 0, 0, 1, 0];
/// The alert that ends a connection in order.
const CLOSE_NOTIFY: [u8; 2] = [1, 0];

/// The part of the finished handshake that makes further keys.
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

/// What waits to be sent: records from `from` to `to`, and behind them one that is being filled. No memory while it rests.
struct Out {
    bytes: Vec<u8>,
    from: usize,
    to: usize,
    /// Content of the last record, which is not sealed yet.
    open: usize,
}

/// What has come: content from `plain_from` to `plain_to`, records that are not opened from `from` to `to`. No memory while it
/// rests.
struct In {
    bytes: Vec<u8>,
    plain_from: usize,
    plain_to: usize,
    from: usize,
    to: usize,
}

/// One end of a route that stands. Dropped, it closes.
pub(crate) struct DirectEnd {
    socket: Own<TcpStream>,
    seal: Key,
    open: Key,
    keys: Keys,
    records_per_key: u64,
    out: Out,
    come: In,
    /// Nothing more can be read.
    ended: Option<Ended>,
    /// Nothing more can be sent; what the peer has sent before may still be on its way.
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
    /// An end behind a finished handshake, with what was to be sent and has come already.
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

    /// Gives back the memory of what is empty, until there is something again.
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

    /// Bytes of memory for what comes and goes.
    #[cfg(test)]
    pub(crate) fn buffer_bytes(&self) -> usize {
        self.out.bytes.len() + self.come.bytes.len()
    }

    /// Changes keys after so many records.
    #[cfg(test)]
    pub(super) fn change_keys_after(&mut self, records: u64) {
        self.records_per_key = records;
    }

    /// Puts bytes on the route that need not be a frame.
    #[cfg(test)]
    pub(super) fn push_bytes(&mut self, bytes: &[u8]) {
        self.append(bytes);
    }

    // ---- out

    /// True when a frame of any length would be taken.
    pub(crate) fn has_room(&self) -> bool {
        OUT_BYTES - (self.out.pending() - self.out.from) >= FRAME_ROOM
    }

    /// True when something waits for the socket.
    pub(crate) fn wants_write(&self) -> bool {
        self.out.from < self.out.to || self.out.open > 0
    }

    /// Takes a frame in parts, to be sent by [`flush`](Self::flush). False when there is no room: nothing was taken.
    ///
    /// # Panics
    /// When the frame is longer than [`FRAME_BYTES_MAX`].
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

    /// Seals the record that is being filled.
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

    /// Sends what the socket takes at once.
    ///
    /// # Errors
    /// Nothing more can be sent. [`read`](Self::read) still hands over what has come.
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

    /// Says that nothing more will come, as far as the socket takes it at once, and closes.
    pub(crate) fn close(mut self) {
        if self.flush().is_ok() && self.out.from == self.out.to {
            self.out.make_room();
            self.append(&CLOSE_NOTIFY);
            self.finish_record(Kind::Alert);
            // The peer notices the end in any case.
            let _ = self.flush();
        }
    }

    // ---- in

    /// Hands over the whole frames that are there. To be called once when the route stands, because the first ones may
    /// have come with the end of the handshake, and then whenever the socket can be read. True when it has left something
    /// for the next call.
    ///
    /// # Errors
    /// The route has ended; all whole frames before that have been handed over.
    pub(crate) fn read(&mut self, take: &mut dyn FnMut(&[u8])) -> Result<bool, Ended> {
        let mut got = self.open_records(take);
        let (mut total, mut emptied) = (0, false);
        while got.is_ok() && self.ended.is_none() && !emptied && total < READ_BYTES_MAX {
            let room = self.come.make_room();
            match recv(self.socket.get().as_raw_fd(), room, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => got = Err(self.come.end_of_stream()),
                Ok(bytes) => {
                    // A read that does not fill its room has emptied the socket.
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

    /// True when the socket holds something.
    fn has_more(&self) -> bool {
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_PEEK;
        recv(self.socket.get().as_raw_fd(), &mut [0], flags).is_ok_and(|bytes| bytes > 0)
    }

    /// Waits for the empty frame by which the listening side says that it believes this one; true when it has come.
    /// Nothing behind it is looked at.
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

    /// Opens the records that are there, and hands over the frames in them.
    fn open_records(&mut self, take: &mut dyn FnMut(&[u8])) -> Result<(), Ended> {
        while self.open_record()? {
            self.come.hand_over(take)?;
        }
        self.come.hand_over(take)?;
        self.come.reset();
        Ok(())
    }

    /// Opens one record; false when none is whole.
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
    /// Where the record that is being filled will end.
    fn pending(&self) -> usize {
        if self.open == 0 {
            self.to
        } else {
            self.to + HEAD_BYTES + self.open + TAIL_BYTES
        }
    }

    /// Room behind what waits, which is little enough for it.
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
    /// Room for the next read.
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

    /// An empty buffer begins at its beginning, which is warm.
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
