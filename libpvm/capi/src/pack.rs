//! Packs and unpacks arrays, strings and whole messages (`pvm_pk*`, `pvm_upk*`).
//!
//! Formats by encoding:
//!
//! - XDR: numbers are big-endian and at least four bytes wide; the bytes and strings of each call
//!   are padded to a multiple of four bytes.
//! - Raw: elements are copied from memory, without padding.
//! - In place: only references to the program's memory are stored; the memory is read when the
//!   message is sent.
//! - Trace: like XDR, with a type and a count before the data of each call.

use crate::buffers::{BODY_BYTES_MAX, Buffer, Enc, Segment};
use crate::memory::{ProgramBytes, Strided};
use bytes::Bytes;
use libpvm::runtime::PackedBody;
use sempa_proto::buffer_pool;
use sempa_proto::{Message, PvmError, PvmResult, Tid};
use std::ffi::CStr;

/// Number of 32-bit header fields before a message that is packed into another message.
const MESSAGE_HEADER_WORDS: usize = 8;
/// First word of a user trace event (`TEV_MARK_USER_EVENT_RECORD`).
const USER_EVENT_MARK: i32 = -9;
/// Number of the trace event `user_defined`.
const USER_EVENT_NUMBER: i32 = 108;

/// Minimum size in bytes of an array that moves a body to memory that tasks of this host can read.
pub(crate) const POOLED_PIECE_BYTES_MIN: usize = 4 << 10;
/// Number of items that are encoded before they are appended to a large body, so few that they stay
/// in the cache.
const POOLED_CHUNK_ITEMS: usize = 2 << 10;

/// A number, or a pair of numbers (complex), that can be packed.
pub(crate) trait Packable: Copy {
    /// Number of bytes in XDR.
    const XDR_BYTES: usize;
    /// Type code in user trace events (`TEV_DATA_*`).
    const TRACE_TYPE: i32;
    /// Appends the value in XDR.
    fn append_xdr(self, out: &mut Vec<u8>);
    /// Reads the value from exactly `XDR_BYTES` bytes of XDR.
    fn from_xdr(bytes: &[u8]) -> Self;
}

macro_rules! wire {
    ($($t:ty as $wide:ty, $bytes:literal, $trace:literal;)*) => {$(
        impl Packable for $t {
            const XDR_BYTES: usize = $bytes;
            const TRACE_TYPE: i32 = $trace;
            fn append_xdr(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&<$wide>::from(self).to_be_bytes());
            }
            fn from_xdr(bytes: &[u8]) -> $t {
                // Of a value that was packed as a wider type, only the low bits are used.
                <$wide>::from_be_bytes(bytes.try_into().expect("the caller passes XDR_BYTES bytes")) as $t
            }
        }
    )*};
}

wire! {
    i16 as i32, 4, 10;
    u16 as u32, 4, 11;
    i32 as i32, 4, 6;
    u32 as u32, 4, 7;
    i64 as i64, 8, 8;
    u64 as u64, 8, 9;
    f32 as f32, 4, 5;
    f64 as f64, 8, 4;
}

macro_rules! pairs {
    ($($t:ty, $trace:literal;)*) => {$(
        impl Packable for [$t; 2] {
            const XDR_BYTES: usize = 2 * <$t>::XDR_BYTES;
            const TRACE_TYPE: i32 = $trace;
            fn append_xdr(self, out: &mut Vec<u8>) {
                self[0].append_xdr(out);
                self[1].append_xdr(out);
            }
            fn from_xdr(bytes: &[u8]) -> [$t; 2] {
                let (re, im) = bytes.split_at(<$t>::XDR_BYTES);
                [<$t>::from_xdr(re), <$t>::from_xdr(im)]
            }
        }
    )*};
}

pairs! {
    f32, 2;
    f64, 3;
}

fn pad_to_word(out: &mut Vec<u8>, len: usize) {
    out.resize(out.len() + len.next_multiple_of(4) - len, 0);
}

fn check_body_limit(body_bytes: usize, added_bytes: usize) -> PvmResult<()> {
    if body_bytes.saturating_add(added_bytes) > BODY_BYTES_MAX {
        Err(PvmError::NoMem)
    } else {
        Ok(())
    }
}

/// Appends the header of the data of one pack call in a user trace event. The header consists of
/// type and count.
fn append_trace_item_header(out: &mut Vec<u8>, kind: i32, count: usize) {
    (kind | 0x80).append_xdr(out);
    (count as i32).append_xdr(out);
}

/// Starts a user trace event: appends the marker, the event's number and name, and the time.
pub(crate) fn begin_trace_event(buffer: &mut Buffer, seconds: i32, micros: i32) {
    if let Ok(out) = buffer.body_mut() {
        USER_EVENT_MARK.append_xdr(out);
        USER_EVENT_NUMBER.append_xdr(out);
        let name = b"user_defined\0";
        (name.len() as i32).append_xdr(out);
        out.extend_from_slice(name);
        pad_to_word(out, name.len());
        seconds.append_xdr(out);
        micros.append_xdr(out);
    }
}

/// Appends an array to a large body, which is not contiguous memory of a `Vec`. `append_chunk`
/// encodes a part of the array.
fn pack_pooled<T: Copy>(
    buffer: &mut Buffer,
    items: &Strided<T>,
    append_chunk: impl Fn(&mut Vec<u8>, &Strided<T>),
) -> PvmResult<()> {
    let mut chunk = Vec::new();
    let mut start = 0;
    while start < items.len() {
        let part = items.range(start, POOLED_CHUNK_ITEMS);
        chunk.clear();
        append_chunk(&mut chunk, &part);
        buffer.append(&chunk)?;
        start += part.len();
    }
    Ok(())
}

/// Moves the body of a buffer to memory that tasks of this host can read, if the pack call that
/// follows makes a large message of it. `items` must be what that call packs.
pub(crate) fn prepare_large_body<T: Copy>(
    buffer: &mut Buffer,
    items: &Strided<T>,
    allocate_body: impl FnOnce(usize) -> Option<PackedBody>,
) {
    if !buffer.can_move_to_pool() {
        return;
    }
    let item_bytes = match buffer.enc {
        Enc::Xdr => size_of::<T>().next_multiple_of(4),
        _ => size_of::<T>(),
    };
    let item_bytes = if size_of::<T>() == 1 { 1 } else { item_bytes };
    let packed_bytes = items.len().saturating_mul(item_bytes).saturating_add(3);
    if let Some(body) = allocate_body(buffer.len().saturating_add(packed_bytes)) {
        buffer.move_to_pool(body);
    }
}

fn pack_in_place<T: Copy>(segments: &mut Vec<Segment>, items: &Strided<T>) -> PvmResult<()> {
    if items.stride() != 1 {
        return Err(PvmError::NotImpl);
    }
    if items.len() > 0 {
        segments.push(Segment::UserMemory(ProgramBytes::from_strided(items)));
    }
    Ok(())
}

/// Packs an array whose packed size is at most `packed_bytes_max` bytes. In a buffer packed in
/// place only a reference is stored; otherwise `append_data` appends the data.
fn pack_array<T: Copy>(
    buffer: &mut Buffer,
    items: &Strided<T>,
    packed_bytes_max: usize,
    append_data: impl FnOnce(&mut Vec<u8>, Enc),
) -> PvmResult<()> {
    if let Some(pieces) = buffer.segments() {
        return pack_in_place(pieces, items);
    }
    if items.len() == 0 {
        return Ok(());
    }
    let enc = buffer.enc;
    let out = buffer.body_mut()?;
    check_body_limit(out.len(), packed_bytes_max)?;
    buffer_pool::reserve(out, packed_bytes_max);
    append_data(out, enc);
    Ok(())
}

/// Packs numbers or pairs of numbers.
///
/// # Errors
/// `NotImpl` for a stride other than 1 in place, `BadMsg` if the buffer cannot be appended to,
/// `NoMem` if the body becomes longer than [`BODY_BYTES_MAX`].
pub(crate) fn pack_numbers<T: Packable>(buffer: &mut Buffer, items: &Strided<T>) -> PvmResult<()> {
    if let Some(out) = buffer.raw_body_with_space(items.byte_len())
        && let Some(bytes) = items.as_bytes()
    {
        // A copy of constant size needs no call.
        match <&[u8; 4]>::try_from(bytes) {
            Ok(word) => out.extend_from_slice(word),
            Err(_) => out.extend_from_slice(bytes),
        }
        return Ok(());
    }
    let packed_bytes_max = items.len().saturating_mul(T::XDR_BYTES.max(size_of::<T>()));
    if buffer.is_pooled() {
        check_body_limit(buffer.len(), packed_bytes_max)?;
        return match items.as_bytes().filter(|_| buffer.enc == Enc::Raw) {
            Some(bytes) => buffer.append(bytes),
            None if buffer.enc == Enc::Raw => {
                pack_pooled(buffer, items, |out, part| part.append_raw(out))
            }
            None => pack_pooled(buffer, items, |out, part| {
                (0..part.len()).for_each(|i| part.get(i).append_xdr(out))
            }),
        };
    }
    pack_array(buffer, items, packed_bytes_max, |out, enc| {
        if enc == Enc::Raw {
            return items.append_raw(out);
        }
        if enc == Enc::Trace {
            append_trace_item_header(out, T::TRACE_TYPE, items.len());
        }
        out.reserve(items.len() * T::XDR_BYTES);
        (0..items.len()).for_each(|i| items.get(i).append_xdr(out));
    })
}

/// Packs bytes. All encodings except raw pad the bytes of each call to a multiple of four.
///
/// # Errors
/// As [`pack_numbers`].
pub(crate) fn pack_bytes(buffer: &mut Buffer, items: &Strided<u8>) -> PvmResult<()> {
    if buffer.is_pooled() {
        check_body_limit(buffer.len(), items.len().saturating_add(16))?;
        match items.as_bytes() {
            Some(bytes) => buffer.append(bytes)?,
            None => pack_pooled(buffer, items, |out, part| part.append_raw(out))?,
        }
        let padding_bytes = items.len().next_multiple_of(4) - items.len();
        return match buffer.enc {
            Enc::Raw => Ok(()),
            _ => buffer.append(&[0; 3][..padding_bytes]),
        };
    }
    pack_array(buffer, items, items.len().saturating_add(16), |out, enc| {
        if enc == Enc::Trace {
            append_trace_item_header(out, 1, items.len());
        }
        items.append_raw(out);
        if enc != Enc::Raw {
            pad_to_word(out, items.len());
        }
    })
}

/// Packs a string: its length including the NUL, then the characters and the NUL.
///
/// # Errors
/// As [`pack_numbers`]; `NotImpl` in place.
pub(crate) fn pack_str(buffer: &mut Buffer, text: &[u8]) -> PvmResult<()> {
    if buffer.segments().is_some() {
        return Err(PvmError::NotImpl);
    }
    let enc = buffer.enc;
    let len = text.len() + 1;
    check_body_limit(buffer.len(), len.saturating_add(16))?;
    let mut separate_text = Vec::new();
    let is_pooled = buffer.is_pooled();
    let out = if is_pooled {
        &mut separate_text
    } else {
        buffer.body_mut()?
    };
    match enc {
        Enc::Raw => out.extend_from_slice(&(len as i32).to_ne_bytes()),
        Enc::Trace => {
            // In a trace event a string is an array of characters, without a length of its own and
            // without NUL.
            append_trace_item_header(out, 1, text.len());
            out.extend_from_slice(text);
            pad_to_word(out, text.len());
            return Ok(());
        }
        _ => (len as i32).append_xdr(out),
    }
    out.extend_from_slice(text);
    out.push(0);
    if enc != Enc::Raw {
        pad_to_word(out, len);
    }
    if is_pooled {
        buffer.append(&separate_text)?;
    }
    Ok(())
}

/// Packs a copy of a value, even into a buffer packed in place. `pvm_packf` takes single items by
/// value, so there is no memory of the program to which the buffer could refer.
///
/// # Errors
/// As [`pack_numbers`].
pub(crate) fn pack_value<T: Packable>(buffer: &mut Buffer, value: T) -> PvmResult<()> {
    let items = [value];
    let items = Strided::from_slice(&items);
    match buffer.segments() {
        Some(segments) => {
            let mut bytes = Vec::new();
            items.append_raw(&mut bytes);
            segments.push(Segment::CopiedBytes(bytes));
            Ok(())
        }
        None => pack_numbers(buffer, &items),
    }
}

/// Packs a string for `pvm_packf`, which allows strings in a buffer packed in place. In such a
/// buffer, length and characters are copied.
///
/// # Errors
/// As [`pack_numbers`].
pub(crate) fn pack_str_value(buffer: &mut Buffer, text: &[u8]) -> PvmResult<()> {
    let Some(segments) = buffer.segments() else {
        return pack_str(buffer, text);
    };
    let mut bytes = (text.len() as i32 + 1).to_ne_bytes().to_vec();
    bytes.extend_from_slice(text);
    bytes.push(0);
    segments.push(Segment::CopiedBytes(bytes));
    Ok(())
}

fn check_readable(buffer: &Buffer) -> PvmResult<()> {
    match buffer.enc {
        Enc::Foreign(_) | Enc::InPlace => Err(PvmError::BadMsg),
        Enc::Xdr | Enc::Raw | Enc::Trace => Ok(()),
    }
}

fn read_bytes<'a>(bytes: &'a [u8], position: &mut usize, len: usize) -> PvmResult<&'a [u8]> {
    let end = position.checked_add(len).ok_or(PvmError::NoData)?;
    let slice = bytes.get(*position..end).ok_or(PvmError::NoData)?;
    *position = end;
    Ok(slice)
}

/// Unpacks numbers or pairs into the program's array. If the message contains fewer elements, its
/// complete elements are stored before the error is returned.
///
/// # Errors
/// `NoData` past the end of the message, `BadMsg` if the buffer cannot be read.
pub(crate) fn unpack_numbers<T: Packable>(
    buffer: &mut Buffer,
    items: &Strided<T>,
) -> PvmResult<()> {
    if items.len() == 0 {
        return Ok(());
    }
    check_readable(buffer)?;
    let element_bytes = if buffer.enc == Enc::Raw {
        size_of::<T>()
    } else {
        T::XDR_BYTES
    };
    let unread_bytes = buffer.bytes().get(buffer.read_offset..).unwrap_or_default();
    let complete_elements = (unread_bytes.len() / element_bytes).min(items.len());
    if buffer.enc == Enc::Raw {
        items.fill_raw(&unread_bytes[..complete_elements * element_bytes]);
    } else {
        for (i, chunk) in unread_bytes
            .chunks_exact(element_bytes)
            .take(complete_elements)
            .enumerate()
        {
            items.set(i, T::from_xdr(chunk));
        }
    }
    buffer.read_offset += complete_elements * element_bytes;
    if complete_elements < items.len() {
        Err(PvmError::NoData)
    } else {
        Ok(())
    }
}

/// Unpacks bytes and skips the padding of one pack call. Bytes can be read even from raw data of a
/// machine with a different data layout.
///
/// # Errors
/// As [`unpack_numbers`].
pub(crate) fn unpack_bytes(buffer: &mut Buffer, items: &Strided<u8>) -> PvmResult<()> {
    if items.len() == 0 {
        return Ok(());
    }
    if buffer.enc == Enc::InPlace {
        return Err(PvmError::BadMsg);
    }
    let is_padded = matches!(buffer.enc, Enc::Xdr | Enc::Trace);
    let unread_bytes = buffer.bytes().get(buffer.read_offset..).unwrap_or_default();
    let copied_bytes = items.fill_raw(&unread_bytes[..unread_bytes.len().min(items.len())]);
    let consumed_bytes = if is_padded {
        copied_bytes.next_multiple_of(4)
    } else {
        copied_bytes
    };
    buffer.read_offset += consumed_bytes.min(unread_bytes.len());
    if copied_bytes < items.len() {
        Err(PvmError::NoData)
    } else {
        Ok(())
    }
}

fn read_int(buffer: &Buffer, position: &mut usize) -> PvmResult<i32> {
    let int_bytes = read_bytes(buffer.bytes(), position, 4)?
        .try_into()
        .expect("four bytes were taken");
    Ok(if buffer.enc == Enc::Raw {
        i32::from_ne_bytes(int_bytes)
    } else {
        i32::from_be_bytes(int_bytes)
    })
}

/// Unpacks a string and returns the string without its NUL. If the message ends within the string,
/// the read position is unchanged.
///
/// # Errors
/// `NoData` past the end of the message, `BadMsg` if the length is invalid or the buffer cannot be
/// read.
pub(crate) fn unpack_str(buffer: &mut Buffer) -> PvmResult<Vec<u8>> {
    check_readable(buffer)?;
    let mut position = buffer.read_offset;
    let len = usize::try_from(read_int(buffer, &mut position)?).map_err(|_| PvmError::BadMsg)?;
    let padded_len = if buffer.enc == Enc::Raw {
        len
    } else {
        len.next_multiple_of(4)
    };
    let text = read_bytes(buffer.bytes(), &mut position, padded_len)?;
    // `CStr` searches with `memchr`, which is many times faster than a loop over the bytes.
    let end = CStr::from_bytes_until_nul(&text[..len]).map_or(len, CStr::count_bytes);
    let text = text[..end].to_vec();
    buffer.read_offset = position;
    Ok(text)
}

/// Packs a message with its header as one item (`pvm_pkmesg`).
///
/// # Errors
/// As [`pack_numbers`]; also `NoMem` if the body's length does not fit into an `i32`.
pub(crate) fn pack_message(buffer: &mut Buffer, message: &Message) -> PvmResult<()> {
    let len = i32::try_from(message.body.len()).map_err(|_| PvmError::NoMem)?;
    let header: [i32; MESSAGE_HEADER_WORDS] = [
        len,
        message.ctx,
        message.tag,
        message.wid,
        message.enc,
        0,
        message.src.raw(),
        message.dst.raw(),
    ];
    for field in header {
        pack_value(buffer, field)?;
    }
    pack_value(buffer, len)?;
    match buffer.segments() {
        Some(segments) => segments.push(Segment::CopiedBytes(message.body.to_vec())),
        None => pack_bytes(buffer, &Strided::from_slice(&message.body))?,
    }
    Ok(())
}

/// Unpacks a message that [`pack_message`] packed. Its body may consist of several fragments.
///
/// # Errors
/// As [`unpack_numbers`]; after an error the read position is unchanged.
pub(crate) fn unpack_message(buffer: &mut Buffer) -> PvmResult<Message> {
    check_readable(buffer)?;
    let mut position = buffer.read_offset;
    let mut header = [0; MESSAGE_HEADER_WORDS];
    for field in &mut header {
        *field = read_int(buffer, &mut position)?;
    }
    let [len, ctx, tag, wid, enc, _crc, src, dst] = header;
    let len = usize::try_from(len).map_err(|_| PvmError::BadMsg)?;
    let mut body = Vec::new();
    loop {
        let fragment_len =
            usize::try_from(read_int(buffer, &mut position)?).map_err(|_| PvmError::BadMsg)?;
        let padded_len = if buffer.enc == Enc::Raw {
            fragment_len
        } else {
            fragment_len.next_multiple_of(4)
        };
        body.extend_from_slice(
            &read_bytes(buffer.bytes(), &mut position, padded_len)?[..fragment_len],
        );
        if body.len() > len || (fragment_len == 0 && body.len() < len) {
            return Err(PvmError::BadMsg);
        }
        if body.len() == len {
            break;
        }
    }
    buffer.read_offset = position;
    let (src, dst) = (Tid::from_raw(src), Tid::from_raw(dst));
    Ok(Message {
        src,
        dst,
        ctx,
        tag,
        wid,
        enc,
        body: Bytes::from(body),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packed_buffer(enc: Enc, pack_content: impl FnOnce(&mut Buffer)) -> Buffer {
        let mut buffer = Buffer::new(enc, 0);
        pack_content(&mut buffer);
        buffer
    }

    /// Packed sizes are the same as in PVM, except that longs have 64 bits.
    #[test]
    fn packed_sizes_match_pvm_with_64_bit_longs() {
        fn packed_sizes<T: Packable>(value: T) -> [usize; 2] {
            let len = |enc| {
                packed_buffer(enc, |b| {
                    pack_numbers(b, &Strided::from_slice(&[value; 3])).expect("fits")
                })
                .len()
            };
            [len(Enc::Xdr), len(Enc::Raw)]
        }
        assert_eq!(packed_sizes(1i16), [12, 6]);
        assert_eq!(packed_sizes(1u16), [12, 6]);
        assert_eq!(packed_sizes(1i32), [12, 12]);
        assert_eq!(packed_sizes(1u32), [12, 12]);
        assert_eq!(packed_sizes(1i64), [24, 24]);
        assert_eq!(packed_sizes(1u64), [24, 24]);
        assert_eq!(packed_sizes(1f32), [12, 12]);
        assert_eq!(packed_sizes(1f64), [24, 24]);
        assert_eq!(packed_sizes([1f32; 2]), [24, 24]);
        assert_eq!(packed_sizes([1f64; 2]), [48, 48]);
        let bytes_len = |enc, n| {
            packed_buffer(enc, |b| {
                pack_bytes(b, &Strided::from_slice(&vec![7; n])).expect("fits")
            })
            .len()
        };
        assert_eq!((bytes_len(Enc::Xdr, 5), bytes_len(Enc::Raw, 5)), (8, 5));
        let text_len = |enc| packed_buffer(enc, |b| pack_str(b, b"hello").expect("fits")).len();
        assert_eq!((text_len(Enc::Xdr), text_len(Enc::Raw)), (12, 10));
    }

    /// Unpacking past the end fails, but stores the elements that the message contains.
    #[test]
    fn short_message_fills_available_elements() {
        for enc in [Enc::Xdr, Enc::Raw] {
            let mut buffer = packed_buffer(enc, |b| {
                pack_numbers(b, &Strided::from_slice(&[1i32, 2])).expect("fits")
            });
            let mut target = [0i32; 4];
            assert_eq!(
                unpack_numbers(&mut buffer, &Strided::from_mut_slice(&mut target)),
                Err(PvmError::NoData)
            );
            assert_eq!(target, [1, 2, 0, 0]);
        }
    }

    /// Each pack call pads its bytes. An unpack call over the bytes of two pack calls also reads
    /// the padding between them.
    #[test]
    fn bytes_are_padded_per_pack_call() {
        let mut buffer = packed_buffer(Enc::Xdr, |b| {
            pack_bytes(b, &Strided::from_slice(b"abc")).expect("fits");
            pack_bytes(b, &Strided::from_slice(b"def")).expect("fits");
        });
        let mut target = [0u8; 6];
        assert_eq!(
            unpack_bytes(&mut buffer, &Strided::from_mut_slice(&mut target)),
            Ok(())
        );
        assert_eq!(&target, b"abc\0de");
    }

    /// Raw data of a machine with a different data layout can be read only as bytes.
    #[test]
    fn foreign_raw_data_is_readable_only_as_bytes() {
        let message = Message {
            src: Tid::NONE,
            dst: Tid::NONE,
            ctx: 0,
            tag: 0,
            wid: 0,
            enc: 0x1234,
            body: Bytes::from_static(b"12345678"),
        };
        let mut buffer = Buffer::from_message(message);
        assert_eq!(
            unpack_numbers(&mut buffer, &Strided::from_mut_slice(&mut [0i32])),
            Err(PvmError::BadMsg)
        );
        assert_eq!(unpack_str(&mut buffer), Err(PvmError::BadMsg));
        let mut bytes = [0u8; 3];
        assert_eq!(
            unpack_bytes(&mut buffer, &Strided::from_mut_slice(&mut bytes)),
            Ok(())
        );
        assert_eq!(&bytes, b"123");
    }

    /// Data packed in place is read when the message is sent, not when the data is packed. Strings
    /// are refused in such a buffer.
    #[test]
    fn in_place_data_is_read_at_send_time() {
        let mut data = vec![1i32, 2];
        let items = Strided::from_mut_slice(&mut data);
        let mut buffer =
            packed_buffer(Enc::InPlace, |b| pack_numbers(b, &items).expect("stride 1"));
        assert_eq!(buffer.len(), 0);
        items.set(0, 9);
        let body = buffer.wire_body().expect("small");
        assert_eq!(body[..4], 9i32.to_ne_bytes());
        assert_eq!(pack_str(&mut buffer, b"x"), Err(PvmError::NotImpl));
        drop(data);
    }

    /// A message that was packed into another message is unpacked unchanged.
    #[test]
    fn packed_message_unpacks_unchanged() {
        let inner_message = Message {
            src: Tid::from_raw(0x40001),
            dst: Tid::from_raw(0x40002),
            ctx: 3,
            tag: 4,
            wid: 5,
            enc: sempa_proto::message::ENC_XDR,
            body: Bytes::from_static(b"12345"),
        };
        for enc in [Enc::Xdr, Enc::Raw] {
            let mut outer_buffer =
                packed_buffer(enc, |b| pack_message(b, &inner_message).expect("fits"));
            assert_eq!(
                outer_buffer.len(),
                32 + 4 + if enc == Enc::Xdr { 8 } else { 5 }
            );
            assert_eq!(
                unpack_message(&mut outer_buffer).as_ref(),
                Ok(&inner_message)
            );
            assert_eq!(unpack_message(&mut outer_buffer), Err(PvmError::NoData));
        }
    }

    /// A string with a negative length or with a length beyond the end of the message is an error.
    /// A packed message with an empty fragment is an error, too.
    #[test]
    fn invalid_lengths_are_rejected() {
        let mut buffer = packed_buffer(Enc::Xdr, |b| {
            pack_numbers(b, &Strided::from_slice(&[i32::MAX])).expect("fits")
        });
        assert_eq!(unpack_str(&mut buffer), Err(PvmError::NoData));
        let mut buffer = packed_buffer(Enc::Xdr, |b| {
            pack_numbers(b, &Strided::from_slice(&[-1])).expect("fits")
        });
        assert_eq!(unpack_str(&mut buffer), Err(PvmError::BadMsg));
        let mut buffer = packed_buffer(Enc::Xdr, |b| {
            pack_numbers(b, &Strided::from_slice(&[9, 0, 0, 0, 0, 0, 0, 0, 0])).expect("fits")
        });
        assert_eq!(unpack_message(&mut buffer), Err(PvmError::BadMsg));
    }

    /// The header of a user trace event has 36 bytes.
    #[test]
    fn user_trace_event_header_has_36_bytes() {
        let mut buffer = Buffer::new(Enc::Trace, 0);
        begin_trace_event(&mut buffer, 1, 2);
        assert_eq!(buffer.len(), 36);
    }

    /// Packs content of all kinds, enough to make a body grow several times.
    fn pack_all_kinds(buffer: &mut Buffer) {
        let numbers: Vec<i16> = (0..30_001).map(|i| i as i16).collect();
        let doubles: Vec<f64> = (0..30_000).map(f64::from).collect();
        for _ in 0..3 {
            pack_str(buffer, b"text").expect("fits");
            pack_numbers(buffer, &Strided::from_slice(&numbers)).expect("fits");
            pack_numbers(buffer, &Strided::from_slice(&doubles)).expect("fits");
            pack_value(buffer, [1f32, 2.0]).expect("fits");
            let every_third_double =
                Strided::with_stride(&doubles[..29_998], 3).expect("within the slice");
            pack_numbers(buffer, &every_third_double).expect("fits");
            let bytes = b"1234567";
            pack_bytes(buffer, &Strided::from_slice(bytes)).expect("fits");
            let every_second_byte = Strided::with_stride(bytes, 2).expect("within the slice");
            pack_bytes(buffer, &every_second_byte).expect("fits");
        }
    }

    /// A body that is packed in the shared pool has the same bytes as one in ordinary memory. It is
    /// sent from where it was packed.
    #[test]
    fn pooled_body_has_the_same_bytes() {
        for enc in [Enc::Xdr, Enc::Raw] {
            let expected_buffer = packed_buffer(enc, pack_all_kinds);
            let mut buffer = packed_buffer(enc, |b| pack_str(b, b"first").expect("fits"));
            let first_bytes = buffer.len();
            let items = Strided::from_slice(&[0u8; 5000]);
            prepare_large_body(&mut buffer, &items, |capacity| {
                assert_eq!(capacity, first_bytes + 5003);
                PackedBody::in_separate_pool(capacity)
            });
            assert!(buffer.is_pooled());
            pack_all_kinds(&mut buffer);
            assert!(buffer.is_pooled(), "the pool has room for it");
            assert!(buffer.bytes()[first_bytes..] == *expected_buffer.bytes());
            let address = buffer.bytes().as_ptr();
            let body = buffer.wire_body().expect("packed");
            assert_eq!(body.as_ptr(), address, "not copied");
            pack_str(&mut buffer, b"more").expect("fits");
            assert_eq!(&buffer.bytes()[..body.len()], &body[..]);
            assert!(buffer.len() > body.len());
        }
    }

    /// A body that becomes too large for the pool continues in ordinary memory.
    #[test]
    fn body_too_large_for_the_pool_moves_out() {
        let mut buffer = packed_buffer(Enc::Raw, |_| ());
        let megabyte = vec![7u8; 1 << 20];
        let items = Strided::from_slice(&megabyte);
        prepare_large_body(&mut buffer, &items, PackedBody::in_separate_pool);
        for _ in 0..40 {
            pack_bytes(&mut buffer, &items).expect("fits");
        }
        assert!(!buffer.is_pooled());
        assert!(buffer.len() == 40 << 20 && buffer.bytes().iter().all(|byte| *byte == 7));
    }
}
