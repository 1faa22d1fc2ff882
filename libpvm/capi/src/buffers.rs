//! Message buffers: messages that are being packed and messages that have arrived.
//!
//! A program refers to a buffer by its number (`mid`). [`Buffers`] is the table of all buffers of
//! the task.

use crate::memory::ProgramBytes;
use crate::receivable::{Header, ListEntry};
use bytes::Bytes;
use libpvm::SmallMessageHead;
use libpvm::runtime::PackedBody;
use sempa_proto::buffer_pool;
use sempa_proto::link::INLINE_BODY_BYTES_MAX;
use sempa_proto::message::{DSIG_X86_64, ENC_TRACE, ENC_XDR};
use sempa_proto::{Message, PvmError, PvmResult, Tid};

/// Value of `enc` that `pvm_getminfo` returns for a buffer that was packed in place.
const ENC_IN_PLACE: i32 = 0x2000_0000;
/// Maximum size of a message body in bytes: half of the maximum that may be queued for one
/// receiver.
pub(crate) const BODY_BYTES_MAX: usize = 1 << 35;
/// Maximum capacity in bytes of the memory of a freed buffer that the table reserves for a new one.
/// Larger memory goes to the pool.
const SPARE_BYTES_MAX: usize = 4 << 10;
const _: () = assert!(SPARE_BYTES_MAX <= buffer_pool::POOLED_BYTES_MIN);
/// Maximum number of such buffers: a send buffer and a receive buffer.
const SPARE_COUNT_MAX: usize = 2;
/// Maximum number of buffers that exist at the same time.
pub(crate) const BUFFER_COUNT_MAX: usize = 1 << 24;

/// Encoding of the data in a buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Enc {
    Xdr,
    Raw,
    InPlace,
    Trace,
    /// Raw data of a machine with a different data layout. The number identifies the layout as in
    /// the `enc` field of a message header. Programs can unpack such data only as bytes.
    Foreign(i32),
}

impl Enc {
    /// Converts the `encoding` argument of `pvm_mkbuf`; `BadParam` for an unknown encoding.
    pub(crate) fn from_arg(arg: i32) -> PvmResult<Self> {
        match arg {
            0 => Ok(Self::Xdr),
            1 => Ok(Self::Raw),
            2 => Ok(Self::InPlace),
            4 => Ok(Self::Trace),
            _ => Err(PvmError::BadParam),
        }
    }

    /// Converts the `enc` field of a received message header.
    pub(crate) fn from_header_field(field: i32) -> Self {
        match field {
            ENC_XDR => Self::Xdr,
            ENC_TRACE => Self::Trace,
            ENC_IN_PLACE => Self::InPlace,
            DSIG_X86_64 => Self::Raw,
            other => Self::Foreign(other),
        }
    }

    /// Returns the encoding as `pvm_getminfo` reports it.
    pub(crate) fn header_field(self) -> i32 {
        match self {
            Self::Xdr => ENC_XDR,
            Self::Raw => DSIG_X86_64,
            Self::InPlace => ENC_IN_PLACE,
            Self::Trace => ENC_TRACE,
            Self::Foreign(word) => word,
        }
    }

    /// Returns the `enc` field with which the message is sent: in-place data arrive as raw data.
    pub(crate) fn wire_header_field(self) -> i32 {
        if self == Self::InPlace {
            DSIG_X86_64
        } else {
            self.header_field()
        }
    }
}

/// One segment of an in-place message.
pub(crate) enum Segment {
    /// Memory of the program, read when the message is sent.
    UserMemory(ProgramBytes),
    /// Bytes that were copied when they were packed.
    CopiedBytes(Vec<u8>),
}

enum Body {
    Unsealed(Vec<u8>),
    /// Large body that is packed where tasks of this host will read it.
    Pooled(PackedBody),
    Sealed(Bytes),
    Segments(Vec<Segment>),
}

/// A message that is being packed, sent or read.
pub(crate) struct Buffer {
    pub(crate) enc: Enc,
    body: Body,
    /// Place of the message in the list of messages that can be received; `None` if the list does
    /// not contain the message.
    pub(crate) list_entry: Option<ListEntry>,
    /// Offset in the body at which the next unpack call reads.
    pub(crate) read_offset: usize,
    pub(crate) ctx: i32,
    pub(crate) tag: i32,
    pub(crate) wid: i32,
    pub(crate) src: i32,
    pub(crate) dst: i32,
}

impl Drop for Buffer {
    #[inline]
    fn drop(&mut self) {
        if let Body::Unsealed(bytes) = &mut self.body
            && bytes.capacity() > SPARE_BYTES_MAX
        {
            buffer_pool::recycle(std::mem::take(bytes));
        }
    }
}

impl Buffer {
    /// Creates an empty buffer for the task `src`.
    pub(crate) fn new(enc: Enc, src: i32) -> Self {
        let body = if enc == Enc::InPlace {
            Body::Segments(Vec::new())
        } else {
            Body::Unsealed(Vec::new())
        };
        Self {
            enc,
            body,
            list_entry: None,
            read_offset: 0,
            ctx: 0,
            tag: 0,
            wid: 0,
            src,
            dst: 0,
        }
    }

    /// Creates a buffer that contains a received message.
    pub(crate) fn from_message(message: Message) -> Self {
        Self {
            enc: Enc::from_header_field(message.enc),
            body: Body::Sealed(message.body),
            list_entry: None,
            read_offset: 0,
            ctx: message.ctx,
            tag: message.tag,
            wid: message.wid,
            src: message.src.raw(),
            dst: message.dst.raw(),
        }
    }

    /// Sets the header of a received message whose body is in [`Buffer::unsealed_memory`].
    #[inline]
    pub(crate) fn set_small_message_head(&mut self, head: &SmallMessageHead, dst: i32) {
        (self.enc, self.list_entry, self.read_offset) = (Enc::from_header_field(head.enc), None, 0);
        (self.ctx, self.tag, self.wid) = (head.ctx, head.tag, head.wid);
        (self.src, self.dst) = (head.src.raw(), dst);
    }

    /// Returns the part of the header by which receive calls select messages.
    #[inline]
    pub(crate) fn header(&self) -> Header {
        Header {
            src: self.src,
            tag: self.tag,
            ctx: self.ctx,
        }
    }

    /// Returns the number of packed bytes. The number is 0 for a buffer packed in place, because
    /// the bytes are read only when the buffer is sent.
    pub(crate) fn len(&self) -> usize {
        match &self.body {
            Body::Unsealed(bytes) => bytes.len(),
            Body::Pooled(body) => body.bytes().len(),
            Body::Sealed(bytes) => bytes.len(),
            Body::Segments(_) => 0,
        }
    }

    /// Returns the number of packed bytes as a C `int`, at most `i32::MAX`.
    pub(crate) fn len_as_int(&self) -> i32 {
        len_as_int(self.len())
    }

    /// Returns the packed bytes. The result is empty for a buffer packed in place.
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.body {
            Body::Unsealed(bytes) => bytes,
            Body::Pooled(body) => body.bytes(),
            Body::Sealed(bytes) => bytes,
            Body::Segments(_) => &[],
        }
    }

    /// Returns the body for appending.
    ///
    /// # Errors
    /// `BadMsg` if the buffer is packed in place or contains raw data of a machine with a different
    /// data layout.
    pub(crate) fn body_mut(&mut self) -> PvmResult<&mut Vec<u8>> {
        if matches!(self.enc, Enc::Foreign(_)) {
            return Err(PvmError::BadMsg);
        }
        match &mut self.body {
            // `Vec::from` reuses the memory without a copy if no other handle shares it.
            Body::Sealed(bytes) => {
                self.body = Body::Unsealed(Vec::from(std::mem::take(bytes)));
            }
            Body::Pooled(body) => self.body = Body::Unsealed(body.bytes().to_vec()),
            Body::Unsealed(_) | Body::Segments(_) => {}
        }
        match &mut self.body {
            Body::Unsealed(bytes) => Ok(bytes),
            _ => Err(PvmError::BadMsg),
        }
    }

    /// Returns the body of raw data for appending, if its memory has space for `added_bytes` bytes.
    #[inline]
    pub(crate) fn raw_body_with_space(&mut self, added_bytes: usize) -> Option<&mut Vec<u8>> {
        match &mut self.body {
            Body::Unsealed(bytes)
                if self.enc == Enc::Raw
                    && bytes.capacity() <= BODY_BYTES_MAX
                    && added_bytes <= bytes.capacity() - bytes.len() =>
            {
                Some(bytes)
            }
            _ => None,
        }
    }

    /// True if [`Buffer::move_to_pool`] can move the body.
    pub(crate) fn can_move_to_pool(&self) -> bool {
        matches!(self.body, Body::Unsealed(_)) && matches!(self.enc, Enc::Raw | Enc::Xdr)
    }

    /// Moves the body into memory that tasks of this host can read. The body stays where it is if
    /// the memory is too small.
    pub(crate) fn move_to_pool(&mut self, mut pooled_body: PackedBody) {
        if self.can_move_to_pool()
            && pooled_body.append(self.bytes())
            && let Body::Unsealed(bytes) =
                std::mem::replace(&mut self.body, Body::Pooled(pooled_body))
        {
            buffer_pool::recycle(bytes);
        }
    }

    /// True if the body is in memory that tasks of this host can read.
    pub(crate) fn is_pooled(&self) -> bool {
        matches!(self.body, Body::Pooled(_))
    }

    /// Appends bytes to the body.
    ///
    /// # Errors
    /// As [`Buffer::body_mut`].
    pub(crate) fn append(&mut self, bytes: &[u8]) -> PvmResult<()> {
        if let Body::Pooled(body) = &mut self.body
            && body.append(bytes)
        {
            return Ok(());
        }
        let body = self.body_mut()?;
        buffer_pool::reserve(body, bytes.len());
        body.extend_from_slice(bytes);
        Ok(())
    }

    /// Returns the segments of a buffer packed in place; `None` for other buffers.
    pub(crate) fn segments(&mut self) -> Option<&mut Vec<Segment>> {
        match &mut self.body {
            Body::Segments(pieces) => Some(pieces),
            _ => None,
        }
    }

    /// Returns the body in the form in which it is sent. Memory packed in place is read in this
    /// call. The content of the buffer is unchanged, so the buffer can be sent again.
    ///
    /// # Errors
    /// `NoMem` if the segments of an in-place message exceed [`BODY_BYTES_MAX`].
    pub(crate) fn wire_body(&mut self) -> PvmResult<Bytes> {
        self.wire_body_in(|_| None)
    }

    /// Returns the body as [`Buffer::wire_body`] does. Memory packed in place is copied to memory
    /// from `allocate_body`, if that returns any for the number of bytes.
    fn wire_body_in(
        &mut self,
        allocate_body: impl FnOnce(usize) -> Option<PackedBody>,
    ) -> PvmResult<Bytes> {
        match &mut self.body {
            Body::Pooled(_) => {
                let sealed_body =
                    match std::mem::replace(&mut self.body, Body::Sealed(Bytes::new())) {
                        Body::Pooled(body) => body.freeze(),
                        _ => unreachable!("the body was just examined"),
                    };
                self.body = Body::Sealed(sealed_body.clone());
                Ok(sealed_body)
            }
            Body::Unsealed(bytes) => {
                let sealed_body = buffer_pool::freeze(std::mem::take(bytes));
                self.body = Body::Sealed(sealed_body.clone());
                Ok(sealed_body)
            }
            Body::Sealed(bytes) => Ok(bytes.clone()),
            Body::Segments(segments) => {
                let segment_bytes = |segment: &Segment| match segment {
                    Segment::UserMemory(memory) => memory.len(),
                    Segment::CopiedBytes(bytes) => bytes.len(),
                };
                let total_bytes = segments
                    .iter()
                    .map(segment_bytes)
                    .fold(0usize, usize::saturating_add);
                if total_bytes > BODY_BYTES_MAX {
                    return Err(PvmError::NoMem);
                }
                let contents = segments.iter().map(|segment| match segment {
                    Segment::UserMemory(memory) => memory.as_slice(),
                    Segment::CopiedBytes(bytes) => bytes,
                });
                if let Some(mut body) = allocate_body(total_bytes)
                    && contents.clone().all(|content| body.append(content))
                {
                    return Ok(body.freeze());
                }
                let mut out = Vec::new();
                buffer_pool::reserve(&mut out, total_bytes);
                contents.for_each(|content| out.extend_from_slice(content));
                Ok(buffer_pool::freeze(out))
            }
        }
    }

    /// Returns the packed bytes if there are at most [`INLINE_BODY_BYTES_MAX`] bytes and they need
    /// no special handling. Returns `None` for a sealed body, an in-place buffer or a trace event.
    #[inline]
    pub(crate) fn small_body(&self) -> Option<&[u8]> {
        match &self.body {
            Body::Unsealed(bytes)
                if bytes.len() <= INLINE_BODY_BYTES_MAX && self.enc != Enc::Trace =>
            {
                Some(bytes)
            }
            _ => None,
        }
    }

    /// Records the header of a sent message, which `pvm_getminfo` returns afterwards.
    pub(crate) fn record_sent_header(&mut self, src: Tid, dst: Tid, ctx: i32, tag: i32) {
        (self.ctx, self.tag, self.dst, self.src) = (ctx, tag, dst.raw(), src.raw());
    }

    /// True if the body is unsealed and its memory is reserved for a new buffer when this buffer is
    /// freed.
    #[inline]
    fn has_small_memory(&self) -> bool {
        matches!(&self.body, Body::Unsealed(bytes) if bytes.capacity() <= SPARE_BYTES_MAX)
    }

    /// Makes this buffer, whose body is unsealed, an empty one. The memory of the body stays.
    #[inline]
    fn reset(&mut self, enc: Enc, src: i32) {
        self.unsealed_memory().clear();
        (self.enc, self.list_entry, self.read_offset) = (enc, None, 0);
        (self.ctx, self.tag, self.wid) = (0, 0, 0);
        (self.src, self.dst) = (src, 0);
    }

    /// Returns the memory of an unsealed body. A body of another kind is dropped.
    #[inline]
    pub(crate) fn unsealed_memory(&mut self) -> &mut Vec<u8> {
        if !matches!(self.body, Body::Unsealed(_)) {
            self.body = Body::Unsealed(Vec::new());
        }
        match &mut self.body {
            Body::Unsealed(bytes) => bytes,
            _ => unreachable!("the body was just replaced"),
        }
    }

    /// Returns the message to send. Also records context, tag, source and destination, which
    /// `pvm_getminfo` returns afterwards. Memory packed in place is copied to memory from
    /// `allocate_body`, if that returns any for the number of bytes.
    ///
    /// # Errors
    /// As [`Buffer::wire_body`].
    pub(crate) fn make_message(
        &mut self,
        (src, dst): (Tid, Tid),
        ctx: i32,
        tag: i32,
        allocate_body: impl FnOnce(usize) -> Option<PackedBody>,
    ) -> PvmResult<Message> {
        let body = self.wire_body_in(allocate_body)?;
        self.record_sent_header(src, dst, ctx, tag);
        Ok(Message {
            src,
            dst,
            ctx,
            tag,
            wid: self.wid,
            enc: self.enc.wire_header_field(),
            body,
        })
    }
}

/// Converts a length in bytes to a C `int`, at most `i32::MAX`.
pub(crate) fn len_as_int(len: usize) -> i32 {
    i32::try_from(len).unwrap_or(i32::MAX)
}

/// The buffers of a task by number. Numbers start at 1. The most recently freed number is assigned
/// first.
#[derive(Default)]
pub(crate) struct Buffers {
    slots: Vec<Option<Box<Buffer>>>,
    free_slots: Vec<usize>,
    /// Freed buffers with little memory, for new buffers.
    #[expect(
        clippy::vec_box,
        reason = "a buffer moves between this list and a slot by its address"
    )]
    spare_buffers: Vec<Box<Buffer>>,
}

impl Buffers {
    pub(crate) fn count(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Creates an empty buffer and returns its number. Reuses the memory of a freed buffer if there
    /// is any.
    ///
    /// # Errors
    /// As [`Buffers::add`].
    pub(crate) fn create(&mut self, enc: Enc, src: i32) -> PvmResult<i32> {
        if enc == Enc::InPlace {
            return self.add(Box::new(Buffer::new(enc, src)));
        }
        let mut buffer = self.take_spare_buffer();
        buffer.reset(enc, src);
        self.add(buffer)
    }

    /// Creates an empty buffer in the memory of the buffer `mid`, which is freed. Returns the
    /// number of the new buffer; `None` if the memory or the encoding is not suitable. Numbers are
    /// assigned as by [`Buffers::create`] and [`Buffers::free`].
    #[inline]
    pub(crate) fn recreate(&mut self, mid: i32, enc: Enc, src: i32) -> Option<i32> {
        let old_index = Self::slot_index(mid).ok()?;
        let old_slot = self.slots.get_mut(old_index)?;
        let is_suitable =
            |buffer: &Buffer| buffer.list_entry.is_none() && buffer.has_small_memory();
        // A trace event begins with a header, and a body packed in place consists of segments.
        let begins_empty = matches!(enc, Enc::Raw | Enc::Xdr);
        if !begins_empty || !old_slot.as_deref().is_some_and(is_suitable) {
            return None;
        }
        let new_index = std::mem::replace(self.free_slots.last_mut()?, old_index);
        let mut buffer = old_slot.take()?;
        buffer.reset(enc, src);
        self.slots[new_index] = Some(buffer);
        Some(new_index as i32 + 1)
    }

    /// Removes and returns a freed buffer, or creates one. Its body is unsealed.
    #[inline]
    pub(crate) fn take_spare_buffer(&mut self) -> Box<Buffer> {
        let spare_buffer = self.spare_buffers.pop();
        spare_buffer.unwrap_or_else(|| Box::new(Buffer::new(Enc::Raw, 0)))
    }

    /// Reserves the memory of a buffer for a new one, unless the memory is large.
    #[inline]
    pub(crate) fn keep_spare_buffer(&mut self, buffer: Box<Buffer>) {
        if self.spare_buffers.len() < SPARE_COUNT_MAX && buffer.has_small_memory() {
            self.spare_buffers.push(buffer);
        }
    }

    /// Frees a buffer. If its memory is small, the memory is reserved for a new buffer. Returns the
    /// place of the message in the list of messages that can be received, if the list contains it.
    ///
    /// # Errors
    /// As [`Buffers::get`].
    #[inline]
    pub(crate) fn free(&mut self, mid: i32) -> PvmResult<Option<ListEntry>> {
        let buffer = self.take(mid)?;
        let list_entry = buffer.list_entry;
        self.keep_spare_buffer(buffer);
        Ok(list_entry)
    }

    /// Empties the slot of the buffer with this number.
    #[inline]
    fn take(&mut self, mid: i32) -> PvmResult<Box<Buffer>> {
        let index = Self::slot_index(mid)?;
        let buffer = self.slots.get_mut(index).and_then(Option::take);
        let buffer = buffer.ok_or(PvmError::NoSuchBuf)?;
        self.free_slots.push(index);
        Ok(buffer)
    }

    /// Stores a buffer and returns its number.
    ///
    /// # Errors
    /// `NoMem` if there are [`BUFFER_COUNT_MAX`] buffers already.
    #[inline]
    pub(crate) fn add(&mut self, buffer: Box<Buffer>) -> PvmResult<i32> {
        let slot = match self.free_slots.pop() {
            Some(slot) => slot,
            None if self.slots.len() >= BUFFER_COUNT_MAX => return Err(PvmError::NoMem),
            None => {
                self.slots.push(None);
                self.slots.len() - 1
            }
        };
        self.slots[slot] = Some(buffer);
        Ok(slot as i32 + 1)
    }

    fn slot_index(mid: i32) -> PvmResult<usize> {
        match mid {
            1.. => Ok(mid as usize - 1),
            _ => Err(PvmError::BadParam),
        }
    }

    /// Returns the buffer with this number.
    ///
    /// # Errors
    /// `BadParam` for a number below 1, `NoSuchBuf` for any other number without a buffer.
    pub(crate) fn get(&self, mid: i32) -> PvmResult<&Buffer> {
        self.slots
            .get(Self::slot_index(mid)?)
            .and_then(Option::as_deref)
            .ok_or(PvmError::NoSuchBuf)
    }

    /// Returns the buffer with this number for modification.
    ///
    /// # Errors
    /// As [`Buffers::get`].
    pub(crate) fn get_mut(&mut self, mid: i32) -> PvmResult<&mut Buffer> {
        self.slots
            .get_mut(Self::slot_index(mid)?)
            .and_then(Option::as_deref_mut)
            .ok_or(PvmError::NoSuchBuf)
    }

    /// Removes a buffer from the table and returns it.
    ///
    /// # Errors
    /// As [`Buffers::get`].
    pub(crate) fn remove(&mut self, mid: i32) -> PvmResult<Buffer> {
        self.take(mid).map(|buffer| *buffer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_numbers_are_positive_and_reused() {
        let mut buffers = Buffers::default();
        let first_mid = buffers
            .add(Box::new(Buffer::new(Enc::Xdr, 0)))
            .expect("room");
        let second_mid = buffers
            .add(Box::new(Buffer::new(Enc::Raw, 0)))
            .expect("room");
        assert!(first_mid > 0 && second_mid > 0 && first_mid != second_mid);
        assert!(buffers.remove(first_mid).is_ok());
        assert_eq!(buffers.get(first_mid).err(), Some(PvmError::NoSuchBuf));
        assert_eq!(buffers.get(-1).err(), Some(PvmError::BadParam));
        assert_eq!(buffers.get(0).err(), Some(PvmError::BadParam));
        assert_eq!(buffers.get(i32::MAX).err(), Some(PvmError::NoSuchBuf));
        assert_eq!(
            buffers.add(Box::new(Buffer::new(Enc::Xdr, 0))),
            Ok(first_mid)
        );
    }

    /// Packing into a sent buffer and sending the buffer again does not change the first message.
    #[test]
    fn sent_buffer_can_be_extended_and_resent() {
        let mut buffer = Buffer::new(Enc::Xdr, 0);
        buffer
            .body_mut()
            .expect("a packing buffer")
            .extend_from_slice(b"abcd");
        let dst = Tid::from_raw(0x40001);
        let first_message = buffer
            .make_message((Tid::NONE, dst), 0, 1, |_| None)
            .expect("small");
        buffer
            .body_mut()
            .expect("still packing")
            .extend_from_slice(b"efgh");
        let second_message = buffer
            .make_message((Tid::NONE, dst), 0, 2, |_| None)
            .expect("small");
        assert_eq!(
            (&first_message.body[..], &second_message.body[..]),
            (&b"abcd"[..], &b"abcdefgh"[..])
        );
        assert_eq!((buffer.len(), buffer.tag, buffer.dst), (8, 2, 0x40001));
    }

    /// A received message can be forwarded with its encoding. Its content is still readable
    /// afterwards.
    #[test]
    fn received_message_can_be_forwarded_and_read() {
        let message = Message {
            src: Tid::from_raw(0x40001),
            dst: Tid::from_raw(0x40002),
            ctx: 0,
            tag: 3,
            wid: 0,
            enc: DSIG_X86_64,
            body: Bytes::from_static(b"1234"),
        };
        let mut buffer = Buffer::from_message(message);
        let forwarded_message = buffer
            .make_message(
                (Tid::from_raw(0x40002), Tid::from_raw(0x40003)),
                0,
                4,
                |_| None,
            )
            .expect("small");
        assert_eq!(
            (forwarded_message.enc, &forwarded_message.body[..]),
            (DSIG_X86_64, &b"1234"[..])
        );
        assert_eq!(buffer.bytes(), b"1234");
    }
}
