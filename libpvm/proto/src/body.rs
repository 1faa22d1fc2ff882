//! Packing and unpacking of message bodies in PVM's encodings.
//!
//! `PvmDataDefault` is XDR: big-endian, every item a multiple of four bytes, and the bytes of each
//! packing call padded to a multiple of four. `PvmDataRaw` is native memory. Both encodings store
//! longs in 64 bits (PVM 3.4.6 truncates longs to 32 bits in the default encoding).

use crate::error::{PvmError, PvmResult};
use crate::message::{DSIG_X86_64, ENC_XDR};
use bytes::Bytes;

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// XDR, readable on every architecture (`PvmDataDefault`).
    #[default]
    Xdr,
    /// Native memory layout of the sender (`PvmDataRaw`, and the form of an in-place message).
    Raw,
}

impl Encoding {
    /// Returns the `enc` field of the header of a message that is packed in this encoding on this
    /// machine.
    pub fn enc_field(self) -> i32 {
        match self {
            Self::Xdr => ENC_XDR,
            Self::Raw => DSIG_X86_64,
        }
    }

    /// Returns the encoding for the `enc` field of a received message; `None` if this machine
    /// cannot decode the message.
    pub fn from_enc_field(enc: i32) -> Option<Self> {
        match enc {
            ENC_XDR => Some(Self::Xdr),
            DSIG_X86_64 => Some(Self::Raw),
            _ => None,
        }
    }
}

/// A number type that can be packed into a message body.
pub trait PackedNumber: Copy {
    /// Appends the value in XDR.
    fn put_xdr(self, out: &mut Vec<u8>);
    /// Appends the value in native byte order.
    fn put_raw(self, out: &mut Vec<u8>);
    fn get_xdr(reader: &mut Unpacker) -> PvmResult<Self>;
    /// Reads the value in native byte order.
    fn get_raw(reader: &mut Unpacker) -> PvmResult<Self>;
}

macro_rules! item {
    ($($t:ty as $wire:ty),*) => {$(
        impl PackedNumber for $t {
            fn put_xdr(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&<$wire>::from(self).to_be_bytes());
            }
            fn put_raw(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_ne_bytes());
            }
            fn get_xdr(reader: &mut Unpacker) -> PvmResult<Self> {
                // A value that was packed as a wider type keeps its low bits, as in PVM.
                Ok(<$wire>::from_be_bytes(reader.read_array()?) as $t)
            }
            fn get_raw(reader: &mut Unpacker) -> PvmResult<Self> {
                Ok(<$t>::from_ne_bytes(reader.read_array()?))
            }
        }
    )*};
}
item!(
    i16 as i32, u16 as u32, i32 as i32, u32 as u32, i64 as i64, u64 as u64, f32 as f32, f64 as f64
);

/// Builds a message body by appending packed values.
#[derive(Clone, Debug, Default)]
pub struct Packer {
    encoding: Encoding,
    bytes: Vec<u8>,
}

impl Packer {
    pub fn new(encoding: Encoding) -> Self {
        Self {
            encoding,
            bytes: Vec::new(),
        }
    }

    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub fn as_slice(&self) -> &[u8] {
        &self.bytes
    }

    pub fn pack_items<T: PackedNumber>(&mut self, items: impl IntoIterator<Item = T>) -> &mut Self {
        for item in items {
            match self.encoding {
                Encoding::Xdr => item.put_xdr(&mut self.bytes),
                Encoding::Raw => item.put_raw(&mut self.bytes),
            }
        }
        self
    }

    pub fn pack_int(&mut self, value: i32) -> &mut Self {
        self.pack_items([value])
    }

    /// Packs opaque bytes. In XDR, the bytes are padded to a multiple of four.
    pub fn pack_bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self.pad(bytes.len());
        self
    }

    /// Packs a string: its length including the final NUL, then the characters and the NUL.
    pub fn pack_str(&mut self, text: &[u8]) -> &mut Self {
        self.pack_int(i32::try_from(text.len() + 1).unwrap_or(i32::MAX));
        self.bytes.extend_from_slice(text);
        self.bytes.push(0);
        self.pad(text.len() + 1);
        self
    }

    /// Packs the number of strings, then the strings.
    pub fn pack_strs<S: AsRef<[u8]>>(&mut self, texts: &[S]) -> &mut Self {
        self.pack_int(texts.len() as i32);
        for text in texts {
            self.pack_str(text.as_ref());
        }
        self
    }

    /// Appends bytes that are already encoded.
    pub fn append_encoded(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self
    }

    fn pad(&mut self, len: usize) {
        if self.encoding == Encoding::Xdr {
            self.bytes
                .resize(self.bytes.len() + len.next_multiple_of(4) - len, 0);
        }
    }

    pub fn finish(self) -> Bytes {
        self.bytes.into()
    }
}

/// Reads a message body from its start.
#[derive(Clone, Debug)]
pub struct Unpacker {
    encoding: Encoding,
    bytes: Bytes,
    position: usize,
}

impl Unpacker {
    pub fn new(encoding: Encoding, bytes: Bytes) -> Self {
        Self {
            encoding,
            bytes,
            position: 0,
        }
    }

    /// Creates a reader for a body in XDR, the encoding of all documented daemon messages.
    pub fn new_xdr(bytes: Bytes) -> Self {
        Self::new(Encoding::Xdr, bytes)
    }

    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// Reads the next `len` bytes without regard to padding.
    ///
    /// # Errors
    /// [`PvmError::NoData`] if fewer bytes are left; the read position does not change.
    pub fn read_unpadded(&mut self, len: usize) -> PvmResult<Bytes> {
        if len > self.remaining() {
            return Err(PvmError::NoData);
        }
        let chunk = self.bytes.slice(self.position..self.position + len);
        self.position += len;
        Ok(chunk)
    }

    fn read_array<const N: usize>(&mut self) -> PvmResult<[u8; N]> {
        let end = self.position + N;
        let chunk = self.bytes.get(self.position..end).ok_or(PvmError::NoData)?;
        self.position = end;
        Ok(chunk.try_into().expect("the slice has N bytes"))
    }

    /// Reads one number.
    ///
    /// # Errors
    /// [`PvmError::NoData`] past the end.
    pub fn read_item<T: PackedNumber>(&mut self) -> PvmResult<T> {
        match self.encoding {
            Encoding::Xdr => T::get_xdr(self),
            Encoding::Raw => T::get_raw(self),
        }
    }

    /// Reads one 32-bit integer.
    ///
    /// # Errors
    /// [`PvmError::NoData`] past the end.
    pub fn read_int(&mut self) -> PvmResult<i32> {
        self.read_item()
    }

    /// Reads `count` 32-bit integers.
    ///
    /// # Errors
    /// [`PvmError::NoData`] past the end, [`PvmError::BadMsg`] for a negative count.
    pub fn read_ints(&mut self, count: i32) -> PvmResult<Vec<i32>> {
        let count = usize::try_from(count).map_err(|_| PvmError::BadMsg)?;
        if count.saturating_mul(4) > self.remaining() {
            return Err(PvmError::NoData);
        }
        (0..count).map(|_| self.read_int()).collect()
    }

    /// Reads `len` bytes that one packing call packed, and skips their padding.
    ///
    /// # Errors
    /// [`PvmError::NoData`] past the end.
    pub fn read_bytes(&mut self, len: usize) -> PvmResult<Bytes> {
        let padded_len = match self.encoding {
            Encoding::Xdr => len.checked_next_multiple_of(4).ok_or(PvmError::NoData)?,
            Encoding::Raw => len,
        };
        Ok(self.read_unpadded(padded_len)?.slice(..len))
    }

    /// Reads a string. Returns the characters before the first NUL.
    ///
    /// # Errors
    /// [`PvmError::NoData`] past the end, [`PvmError::BadMsg`] for a length below 1.
    pub fn read_str(&mut self) -> PvmResult<Bytes> {
        let len = usize::try_from(self.read_int()?).map_err(|_| PvmError::BadMsg)?;
        if len == 0 {
            return Err(PvmError::BadMsg);
        }
        let text = self.read_bytes(len)?;
        let end = text.iter().position(|b| *b == 0).unwrap_or(len);
        Ok(text.slice(..end))
    }

    /// Reads a string as UTF-8. Invalid bytes are replaced by U+FFFD.
    ///
    /// # Errors
    /// As [`Unpacker::read_str`].
    pub fn read_string(&mut self) -> PvmResult<String> {
        Ok(String::from_utf8_lossy(&self.read_str()?).into_owned())
    }

    /// Reads a list of strings: their number, then the strings.
    ///
    /// # Errors
    /// As [`Unpacker::read_str`].
    pub fn read_strings(&mut self) -> PvmResult<Vec<String>> {
        let count = usize::try_from(self.read_int()?).map_err(|_| PvmError::BadMsg)?;
        if count.saturating_mul(4) > self.remaining() {
            return Err(PvmError::NoData);
        }
        (0..count).map(|_| self.read_string()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_sizes_match_pvm() {
        let mut p = Packer::new(Encoding::Xdr);
        assert_eq!(p.pack_bytes(b"abc").len(), 4);
        assert_eq!(p.pack_items([1i16, 2]).len(), 12);
        assert_eq!(p.pack_items([1i64]).len(), 20);
        assert_eq!(p.pack_str(b"hello").len(), 32);
        let mut p = Packer::new(Encoding::Raw);
        assert_eq!(p.pack_bytes(b"abc").len(), 3);
        assert_eq!(p.pack_items([1i16, 2]).len(), 7);
        assert_eq!(p.pack_str(b"hello").len(), 17);
    }

    #[test]
    fn values_round_trip_in_both_encodings() {
        for encoding in [Encoding::Xdr, Encoding::Raw] {
            let mut p = Packer::new(encoding);
            p.pack_int(-2)
                .pack_items([-2i64, i64::MAX])
                .pack_items([1.5f32])
                .pack_items([-2.5f64])
                .pack_str(b"text")
                .pack_items([40000u16, 7]);
            let mut u = Unpacker::new(encoding, p.finish());
            assert_eq!(u.read_int(), Ok(-2));
            assert_eq!(u.read_item::<i64>(), Ok(-2));
            assert_eq!(u.read_item::<i64>(), Ok(i64::MAX));
            assert_eq!(u.read_item::<f32>(), Ok(1.5));
            assert_eq!(u.read_item::<f64>(), Ok(-2.5));
            assert_eq!(u.read_string().as_deref(), Ok("text"));
            assert_eq!(u.read_item::<u16>(), Ok(40000));
            assert_eq!(u.read_item::<u16>(), Ok(7));
            assert_eq!(u.read_int(), Err(PvmError::NoData));
        }
    }

    /// If two calls pack bytes and one call unpacks all of them, the result contains the padding of
    /// the first packing call.
    #[test]
    fn bytes_are_padded_per_packing_call() {
        let mut p = Packer::new(Encoding::Xdr);
        p.pack_bytes(b"abc").pack_bytes(b"def");
        let mut u = Unpacker::new_xdr(p.finish());
        assert_eq!(u.read_bytes(6).as_deref(), Ok(&b"abc\0de"[..]));
    }

    #[test]
    fn hostile_lengths_are_refused() {
        let mut p = Packer::new(Encoding::Xdr);
        p.pack_int(-1);
        assert_eq!(
            Unpacker::new_xdr(p.clone().finish()).read_str(),
            Err(PvmError::BadMsg)
        );
        assert_eq!(
            Unpacker::new_xdr(p.finish()).read_strings(),
            Err(PvmError::BadMsg)
        );
        let mut p = Packer::new(Encoding::Xdr);
        p.pack_int(i32::MAX);
        assert_eq!(
            Unpacker::new_xdr(p.clone().finish()).read_str(),
            Err(PvmError::NoData)
        );
        assert_eq!(
            Unpacker::new_xdr(p.clone().finish()).read_ints(i32::MAX),
            Err(PvmError::NoData)
        );
        assert_eq!(
            Unpacker::new_xdr(p.finish()).read_strings(),
            Err(PvmError::NoData)
        );
    }
}
