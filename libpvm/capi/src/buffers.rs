//! Message buffers: what is being packed, what has arrived, and the small numbers programs call them by.

use crate::memory::Span;
use bytes::Bytes;
use sempa_proto::link::SMALL_BYTES_MAX;
use sempa_proto::message::{DSIG_X86_64, ENC_TRACE, ENC_XDR};
use sempa_proto::pool;
use sempa_proto::{Message, PvmError, PvmResult, Tid};

/// `enc` that `pvm_getminfo` shows for a buffer packed in place.
const ENC_IN_PLACE: i32 = 0x2000_0000;
/// Bytes of a body at most: half of what may wait for one receiver.
pub(crate) const BODY_BYTES_MAX: usize = 1 << 35;
/// Memory of freed buffers that is packed into again is no larger than this.
const SPARE_BYTES_MAX: usize = 4 << 10;
/// Buffers that may exist at a time.
pub(crate) const BUFFERS_MAX: usize = 1 << 24;

/// How a buffer is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Enc {
    /// `PvmDataDefault`.
    Xdr,
    /// `PvmDataRaw`.
    Raw,
    /// `PvmDataInPlace`.
    InPlace,
    /// `PvmDataTrace`.
    Trace,
    /// Raw, from a machine with another layout: only bytes can be read.
    Alien(i32),
}

impl Enc {
    /// From the argument of `pvm_mkbuf`.
    pub(crate) fn from_arg(arg: i32) -> PvmResult<Enc> {
        match arg {
            0 => Ok(Enc::Xdr),
            1 => Ok(Enc::Raw),
            2 => Ok(Enc::InPlace),
            4 => Ok(Enc::Trace),
            _ => Err(PvmError::BadParam),
        }
    }

    /// From the header of a message.
    pub(crate) fn from_word(word: i32) -> Enc {
        match word {
            ENC_XDR => Enc::Xdr,
            ENC_TRACE => Enc::Trace,
            ENC_IN_PLACE => Enc::InPlace,
            DSIG_X86_64 => Enc::Raw,
            other => Enc::Alien(other),
        }
    }

    /// As `pvm_getminfo` shows it.
    pub(crate) fn word(self) -> i32 {
        match self {
            Enc::Xdr => ENC_XDR,
            Enc::Raw => DSIG_X86_64,
            Enc::InPlace => ENC_IN_PLACE,
            Enc::Trace => ENC_TRACE,
            Enc::Alien(word) => word,
        }
    }

    /// As the receiver of a message sees it: in-place data arrive raw.
    pub(crate) fn sent_word(self) -> i32 {
        if self == Enc::InPlace {
            DSIG_X86_64
        } else {
            self.word()
        }
    }
}

/// One piece of an in-place message.
pub(crate) enum Piece {
    /// Memory of the program, read when the message is sent.
    There(Span),
    /// Bytes of our own.
    Here(Vec<u8>),
}

enum Body {
    Open(Vec<u8>),
    Sealed(Bytes),
    Pieces(Vec<Piece>),
}

/// A message being packed, sent, or read.
pub(crate) struct Buffer {
    pub(crate) enc: Enc,
    body: Body,
    /// True while the message waits to be received.
    pub(crate) queued: bool,
    /// Where the next unpack reads.
    pub(crate) position: usize,
    pub(crate) ctx: i32,
    pub(crate) tag: i32,
    pub(crate) wid: i32,
    pub(crate) src: i32,
    pub(crate) dst: i32,
}

impl Drop for Body {
    fn drop(&mut self) {
        if let Body::Open(bytes) = self {
            pool::give(std::mem::take(bytes));
        }
    }
}

impl Buffer {
    /// An empty buffer of the task `src`.
    pub(crate) fn new(enc: Enc, src: i32) -> Buffer {
        let body = if enc == Enc::InPlace {
            Body::Pieces(Vec::new())
        } else {
            Body::Open(Vec::new())
        };
        Buffer {
            enc,
            body,
            queued: false,
            position: 0,
            ctx: 0,
            tag: 0,
            wid: 0,
            src,
            dst: 0,
        }
    }

    /// A buffer that holds an arrived message.
    pub(crate) fn of_message(message: Message) -> Buffer {
        Buffer {
            enc: Enc::from_word(message.enc),
            body: Body::Sealed(message.body),
            queued: false,
            position: 0,
            ctx: message.ctx,
            tag: message.tag,
            wid: message.wid,
            src: message.src.raw(),
            dst: message.dst.raw(),
        }
    }

    /// Bytes packed; 0 for a buffer packed in place, whose bytes are not known before it is sent.
    pub(crate) fn len(&self) -> usize {
        match &self.body {
            Body::Open(bytes) => bytes.len(),
            Body::Sealed(bytes) => bytes.len(),
            Body::Pieces(_) => 0,
        }
    }

    /// Bytes packed, as the interface's `int` can say it: no more than 2 GiB.
    pub(crate) fn told_len(&self) -> i32 {
        told_len(self.len())
    }

    /// What has been packed. Empty for a buffer packed in place.
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.body {
            Body::Open(bytes) => bytes,
            Body::Sealed(bytes) => bytes,
            Body::Pieces(_) => &[],
        }
    }

    /// Room to pack into, behind what is there.
    ///
    /// # Errors
    /// `BadMsg` when the buffer is packed in place or came from a machine with another layout.
    pub(crate) fn open(&mut self) -> PvmResult<&mut Vec<u8>> {
        if matches!(self.enc, Enc::Alien(_)) {
            return Err(PvmError::BadMsg);
        }
        if let Body::Sealed(bytes) = &mut self.body {
            // Takes the bytes back without copying when nobody else holds them any more.
            self.body = Body::Open(Vec::from(std::mem::take(bytes)));
        }
        match &mut self.body {
            Body::Open(bytes) => Ok(bytes),
            _ => Err(PvmError::BadMsg),
        }
    }

    /// The pieces of a buffer packed in place; `None` for others.
    pub(crate) fn pieces(&mut self) -> Option<&mut Vec<Piece>> {
        match &mut self.body {
            Body::Pieces(pieces) => Some(pieces),
            _ => None,
        }
    }

    /// The body as it travels now. Memory packed in place is read here. The buffer stays as it is.
    ///
    /// # Errors
    /// `NoMem` when the pieces of an in-place message exceed [`BODY_BYTES_MAX`].
    pub(crate) fn wire(&mut self) -> PvmResult<Bytes> {
        match &mut self.body {
            Body::Open(bytes) => {
                let sealed = pool::seal(std::mem::take(bytes));
                self.body = Body::Sealed(sealed.clone());
                Ok(sealed)
            }
            Body::Sealed(bytes) => Ok(bytes.clone()),
            Body::Pieces(pieces) => {
                let size = |piece: &Piece| match piece {
                    Piece::There(span) => span.len(),
                    Piece::Here(bytes) => bytes.len(),
                };
                let total = pieces.iter().map(size).fold(0usize, usize::saturating_add);
                if total > BODY_BYTES_MAX {
                    return Err(PvmError::NoMem);
                }
                let mut out = Vec::new();
                pool::make_room(&mut out, total);
                for piece in pieces {
                    match piece {
                        Piece::There(span) => span.append_to(&mut out),
                        Piece::Here(bytes) => out.extend_from_slice(bytes),
                    }
                }
                Ok(pool::seal(out))
            }
        }
    }

    /// What has been packed, if that is little, and simply bytes.
    #[inline]
    pub(crate) fn small(&self) -> Option<&[u8]> {
        match &self.body {
            Body::Open(bytes) if bytes.len() <= SMALL_BYTES_MAX && self.enc != Enc::Trace => {
                Some(bytes)
            }
            _ => None,
        }
    }

    /// Remembers what `pvm_getminfo` shows of a message that was sent.
    pub(crate) fn sent(&mut self, src: Tid, dst: Tid, ctx: i32, tag: i32) {
        (self.ctx, self.tag, self.dst, self.src) = (ctx, tag, dst.raw(), src.raw());
    }

    /// The memory that was packed into, to be used again, if it is small.
    pub(crate) fn take_small_memory(&mut self) -> Option<Vec<u8>> {
        match &mut self.body {
            Body::Open(bytes) if (1..=SPARE_BYTES_MAX).contains(&bytes.capacity()) => {
                Some(std::mem::take(bytes))
            }
            _ => None,
        }
    }

    /// The message to send. Remembers context, tag and destination, as `pvm_getminfo` shows them afterwards.
    ///
    /// # Errors
    /// As [`Buffer::wire`].
    pub(crate) fn message(&mut self, src: Tid, dst: Tid, ctx: i32, tag: i32) -> PvmResult<Message> {
        let body = self.wire()?;
        self.sent(src, dst, ctx, tag);
        Ok(Message {
            src,
            dst,
            ctx,
            tag,
            wid: self.wid,
            enc: self.enc.sent_word(),
            body,
        })
    }
}

/// A length in bytes as the interface's `int` can say it.
pub(crate) fn told_len(len: usize) -> i32 {
    i32::try_from(len).unwrap_or(i32::MAX)
}

/// The buffers of a task by number. Numbers are small, positive and used again soon.
#[derive(Default)]
pub(crate) struct Buffers {
    slots: Vec<Option<Buffer>>,
    free: Vec<usize>,
    /// Memory of a small buffer that was freed.
    spare: Vec<u8>,
}

impl Buffers {
    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Makes an empty buffer, in memory that was used before if there is some, and answers its number.
    ///
    /// # Errors
    /// As [`Buffers::add`].
    pub(crate) fn make(&mut self, enc: Enc, src: i32) -> PvmResult<i32> {
        let mut buffer = Buffer::new(enc, src);
        if let Body::Open(bytes) = &mut buffer.body {
            *bytes = std::mem::take(&mut self.spare);
            bytes.clear();
        }
        self.add(buffer)
    }

    /// Frees a buffer; memory of a small one is kept for the next.
    ///
    /// # Errors
    /// As [`Buffers::get`].
    pub(crate) fn free(&mut self, mid: i32) -> PvmResult<()> {
        let mut buffer = self.remove(mid)?;
        if let Some(memory) = buffer.take_small_memory() {
            self.spare = memory;
        }
        Ok(())
    }

    /// Stores a buffer and answers its number.
    ///
    /// # Errors
    /// `NoMem` at [`BUFFERS_MAX`].
    pub(crate) fn add(&mut self, buffer: Buffer) -> PvmResult<i32> {
        let slot = match self.free.pop() {
            Some(slot) => slot,
            None if self.slots.len() >= BUFFERS_MAX => return Err(PvmError::NoMem),
            None => {
                self.slots.push(None);
                self.slots.len() - 1
            }
        };
        self.slots[slot] = Some(buffer);
        Ok(slot as i32 + 1)
    }

    fn slot(mid: i32) -> PvmResult<usize> {
        match mid {
            1.. => Ok(mid as usize - 1),
            _ => Err(PvmError::BadParam),
        }
    }

    /// A buffer.
    ///
    /// # Errors
    /// `BadParam` for numbers below 1, `NoSuchBuf` for others without a buffer.
    pub(crate) fn get(&self, mid: i32) -> PvmResult<&Buffer> {
        self.slots
            .get(Self::slot(mid)?)
            .and_then(Option::as_ref)
            .ok_or(PvmError::NoSuchBuf)
    }

    /// A buffer to change.
    ///
    /// # Errors
    /// As [`Buffers::get`].
    pub(crate) fn get_mut(&mut self, mid: i32) -> PvmResult<&mut Buffer> {
        self.slots
            .get_mut(Self::slot(mid)?)
            .and_then(Option::as_mut)
            .ok_or(PvmError::NoSuchBuf)
    }

    /// Takes a buffer out.
    ///
    /// # Errors
    /// As [`Buffers::get`].
    pub(crate) fn remove(&mut self, mid: i32) -> PvmResult<Buffer> {
        let slot = Self::slot(mid)?;
        let buffer = self
            .slots
            .get_mut(slot)
            .and_then(Option::take)
            .ok_or(PvmError::NoSuchBuf)?;
        self.free.push(slot);
        Ok(buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_start_at_one_and_are_used_again() {
        let mut buffers = Buffers::default();
        let a = buffers.add(Buffer::new(Enc::Xdr, 0)).expect("room");
        let b = buffers.add(Buffer::new(Enc::Raw, 0)).expect("room");
        assert!(a > 0 && b > 0 && a != b);
        assert!(buffers.remove(a).is_ok());
        assert_eq!(buffers.get(a).err(), Some(PvmError::NoSuchBuf));
        assert_eq!(buffers.get(-1).err(), Some(PvmError::BadParam));
        assert_eq!(buffers.get(0).err(), Some(PvmError::BadParam));
        assert_eq!(buffers.get(i32::MAX).err(), Some(PvmError::NoSuchBuf));
        assert_eq!(buffers.add(Buffer::new(Enc::Xdr, 0)), Ok(a));
    }

    #[test]
    fn a_buffer_can_be_sent_twice_and_packed_further() {
        let mut buffer = Buffer::new(Enc::Xdr, 0);
        buffer
            .open()
            .expect("a packing buffer")
            .extend_from_slice(b"abcd");
        let dst = Tid::from_raw(0x40001);
        let first = buffer.message(Tid::NONE, dst, 0, 1).expect("small");
        buffer
            .open()
            .expect("still packing")
            .extend_from_slice(b"efgh");
        let second = buffer.message(Tid::NONE, dst, 0, 2).expect("small");
        assert_eq!(
            (&first.body[..], &second.body[..]),
            (&b"abcd"[..], &b"abcdefgh"[..])
        );
        assert_eq!((buffer.len(), buffer.tag, buffer.dst), (8, 2, 0x40001));
    }

    #[test]
    fn a_received_message_can_be_forwarded_and_read_on() {
        let message = Message {
            src: Tid::from_raw(0x40001),
            dst: Tid::from_raw(0x40002),
            ctx: 0,
            tag: 3,
            wid: 0,
            enc: DSIG_X86_64,
            body: Bytes::from_static(b"1234"),
        };
        let mut buffer = Buffer::of_message(message);
        let again = buffer
            .message(Tid::from_raw(0x40002), Tid::from_raw(0x40003), 0, 4)
            .expect("small");
        assert_eq!((again.enc, &again.body[..]), (DSIG_X86_64, &b"1234"[..]));
        assert_eq!(buffer.bytes(), b"1234");
    }
}
