//! Packing and unpacking of message bodies in PVM's encodings.
//!
//! `PvmDataDefault` is XDR: big-endian, every item a multiple of four bytes, byte arrays padded per call. `PvmDataRaw` is
//! native memory. Longs travel as 64 bits in both (PVM 3.4.6 cut them to 32 in the default encoding).

use crate::error::{PvmError, PvmResult};
use crate::message::{DSIG_X86_64, ENC_XDR};
use bytes::Bytes;

/// How a body is encoded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    /// XDR, readable everywhere (`PvmDataDefault`).
    #[default]
    Xdr,
    /// Native memory of the sender (`PvmDataRaw`, and what an in-place message becomes).
    Raw,
}

impl Encoding {
    /// The `enc` word of a message with this encoding made on this machine.
    pub fn word(self) -> i32 {
        match self {
            Encoding::Xdr => ENC_XDR,
            Encoding::Raw => DSIG_X86_64,
        }
    }

    /// The encoding of a received message, or `None` when this machine cannot read it.
    pub fn from_word(word: i32) -> Option<Encoding> {
        match word {
            ENC_XDR => Some(Encoding::Xdr),
            DSIG_X86_64 => Some(Encoding::Raw),
            _ => None,
        }
    }
}

/// A number that can be packed.
pub trait Item: Copy {
    /// Appends the value in XDR.
    fn put_xdr(self, out: &mut Vec<u8>);
    /// Appends the value as it lies in memory.
    fn put_raw(self, out: &mut Vec<u8>);
    /// Reads the value in XDR.
    fn get_xdr(reader: &mut Unpacker) -> PvmResult<Self>;
    /// Reads the value as it lies in memory.
    fn get_raw(reader: &mut Unpacker) -> PvmResult<Self>;
}

macro_rules! item {
    ($($t:ty as $wire:ty),*) => {$(
        impl Item for $t {
            fn put_xdr(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&<$wire>::from(self).to_be_bytes());
            }
            fn put_raw(self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_ne_bytes());
            }
            fn get_xdr(reader: &mut Unpacker) -> PvmResult<Self> {
                // A value that was packed as a wider type keeps its low bits, as in PVM.
                Ok(<$wire>::from_be_bytes(reader.array()?) as $t)
            }
            fn get_raw(reader: &mut Unpacker) -> PvmResult<Self> {
                Ok(<$t>::from_ne_bytes(reader.array()?))
            }
        }
    )*};
}
item!(
    i16 as i32, u16 as u32, i32 as i32, u32 as u32, i64 as i64, u64 as u64, f32 as f32, f64 as f64
);

/// Builds a body.
#[derive(Clone, Debug, Default)]
pub struct Packer {
    encoding: Encoding,
    bytes: Vec<u8>,
}

impl Packer {
    /// An empty body in the given encoding.
    pub fn new(encoding: Encoding) -> Packer {
        Packer {
            encoding,
            bytes: Vec::new(),
        }
    }

    /// The encoding given at the beginning.
    pub fn encoding(&self) -> Encoding {
        self.encoding
    }

    /// Bytes packed so far.
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// True when nothing has been packed.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// What has been packed so far.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes
    }

    /// Packs numbers.
    pub fn items<T: Item>(&mut self, items: impl IntoIterator<Item = T>) -> &mut Self {
        for item in items {
            match self.encoding {
                Encoding::Xdr => item.put_xdr(&mut self.bytes),
                Encoding::Raw => item.put_raw(&mut self.bytes),
            }
        }
        self
    }

    /// Packs one int.
    pub fn int(&mut self, value: i32) -> &mut Self {
        self.items([value])
    }

    /// Packs opaque bytes; in XDR padded to a multiple of four.
    pub fn bytes(&mut self, bytes: &[u8]) -> &mut Self {
        self.bytes.extend_from_slice(bytes);
        self.pad(bytes.len());
        self
    }

    /// Packs a string: length with the final NUL, then the characters and the NUL.
    pub fn str(&mut self, text: &[u8]) -> &mut Self {
        self.int(i32::try_from(text.len() + 1).unwrap_or(i32::MAX));
        self.bytes.extend_from_slice(text);
        self.bytes.push(0);
        self.pad(text.len() + 1);
        self
    }

    /// Packs a count and that many strings.
    pub fn strs<S: AsRef<[u8]>>(&mut self, texts: &[S]) -> &mut Self {
        self.int(texts.len() as i32);
        for text in texts {
            self.str(text.as_ref());
        }
        self
    }

    /// Appends bytes that are encoded already.
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

    /// The finished body.
    pub fn finish(self) -> Bytes {
        self.bytes.into()
    }
}

/// Reads a body from its beginning.
#[derive(Clone, Debug)]
pub struct Unpacker {
    encoding: Encoding,
    bytes: Bytes,
    position: usize,
}

impl Unpacker {
    /// A reader at the beginning of `bytes`.
    pub fn new(encoding: Encoding, bytes: Bytes) -> Unpacker {
        Unpacker {
            encoding,
            bytes,
            position: 0,
        }
    }

    /// A reader of an XDR body, as all documented daemon messages are.
    pub fn xdr(bytes: Bytes) -> Unpacker {
        Unpacker::new(Encoding::Xdr, bytes)
    }

    /// Bytes not yet read.
    pub fn remaining(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// The next `len` bytes.
    ///
    /// # Errors
    /// [`PvmError::NoData`] when fewer are left; the position does not move.
    pub fn take(&mut self, len: usize) -> PvmResult<Bytes> {
        if len > self.remaining() {
            return Err(PvmError::NoData);
        }
        let taken = self.bytes.slice(self.position..self.position + len);
        self.position += len;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> PvmResult<[u8; N]> {
        let end = self.position + N;
        let chunk = self.bytes.get(self.position..end).ok_or(PvmError::NoData)?;
        self.position = end;
        Ok(chunk.try_into().expect("the slice has N bytes"))
    }

    /// One number.
    ///
    /// # Errors
    /// [`PvmError::NoData`] past the end.
    pub fn item<T: Item>(&mut self) -> PvmResult<T> {
        match self.encoding {
            Encoding::Xdr => T::get_xdr(self),
            Encoding::Raw => T::get_raw(self),
        }
    }

    /// One int.
    ///
    /// # Errors
    /// [`PvmError::NoData`] past the end.
    pub fn int(&mut self) -> PvmResult<i32> {
        self.item()
    }

    /// `count` ints.
    ///
    /// # Errors
    /// [`PvmError::NoData`] past the end, [`PvmError::BadMsg`] for a negative count.
    pub fn ints(&mut self, count: i32) -> PvmResult<Vec<i32>> {
        let count = usize::try_from(count).map_err(|_| PvmError::BadMsg)?;
        if count.saturating_mul(4) > self.remaining() {
            return Err(PvmError::NoData);
        }
        (0..count).map(|_| self.int()).collect()
    }

    /// `len` opaque bytes, with the padding of one packing call.
    ///
    /// # Errors
    /// [`PvmError::NoData`] past the end.
    pub fn bytes(&mut self, len: usize) -> PvmResult<Bytes> {
        let padded = match self.encoding {
            Encoding::Xdr => len.checked_next_multiple_of(4).ok_or(PvmError::NoData)?,
            Encoding::Raw => len,
        };
        Ok(self.take(padded)?.slice(..len))
    }

    /// A string without its NUL.
    ///
    /// # Errors
    /// [`PvmError::NoData`] past the end, [`PvmError::BadMsg`] for an impossible length.
    pub fn str(&mut self) -> PvmResult<Bytes> {
        let len = usize::try_from(self.int()?).map_err(|_| PvmError::BadMsg)?;
        if len == 0 {
            return Err(PvmError::BadMsg);
        }
        let text = self.bytes(len)?;
        let end = text.iter().position(|b| *b == 0).unwrap_or(len);
        Ok(text.slice(..end))
    }

    /// A string as text; bytes that are not UTF-8 are replaced.
    ///
    /// # Errors
    /// As [`Unpacker::str`].
    pub fn string(&mut self) -> PvmResult<String> {
        Ok(String::from_utf8_lossy(&self.str()?).into_owned())
    }

    /// A count and that many strings.
    ///
    /// # Errors
    /// As [`Unpacker::str`].
    pub fn strings(&mut self) -> PvmResult<Vec<String>> {
        let count = usize::try_from(self.int()?).map_err(|_| PvmError::BadMsg)?;
        if count.saturating_mul(4) > self.remaining() {
            return Err(PvmError::NoData);
        }
        (0..count).map(|_| self.string()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_those_of_the_interface() {
        let mut p = Packer::new(Encoding::Xdr);
        assert_eq!(p.bytes(b"abc").len(), 4);
        assert_eq!(p.items([1i16, 2]).len(), 12);
        assert_eq!(p.items([1i64]).len(), 20);
        assert_eq!(p.str(b"hello").len(), 32);
        let mut p = Packer::new(Encoding::Raw);
        assert_eq!(p.bytes(b"abc").len(), 3);
        assert_eq!(p.items([1i16, 2]).len(), 7);
        assert_eq!(p.str(b"hello").len(), 17);
    }

    #[test]
    fn what_is_packed_comes_back_in_both_encodings() {
        for encoding in [Encoding::Xdr, Encoding::Raw] {
            let mut p = Packer::new(encoding);
            p.int(-2)
                .items([-2i64, i64::MAX])
                .items([1.5f32])
                .items([-2.5f64])
                .str(b"text")
                .items([40000u16, 7]);
            let mut u = Unpacker::new(encoding, p.finish());
            assert_eq!(u.int(), Ok(-2));
            assert_eq!(u.item::<i64>(), Ok(-2));
            assert_eq!(u.item::<i64>(), Ok(i64::MAX));
            assert_eq!(u.item::<f32>(), Ok(1.5));
            assert_eq!(u.item::<f64>(), Ok(-2.5));
            assert_eq!(u.string().as_deref(), Ok("text"));
            assert_eq!(u.item::<u16>(), Ok(40000));
            assert_eq!(u.item::<u16>(), Ok(7));
            assert_eq!(u.int(), Err(PvmError::NoData));
        }
    }

    #[test]
    fn byte_items_must_be_unpacked_in_the_groups_they_were_packed_in() {
        let mut p = Packer::new(Encoding::Xdr);
        p.bytes(b"abc").bytes(b"def");
        let mut u = Unpacker::xdr(p.finish());
        assert_eq!(u.bytes(6).as_deref(), Ok(&b"abc\0de"[..]));
    }

    #[test]
    fn hostile_lengths_are_errors() {
        let mut p = Packer::new(Encoding::Xdr);
        p.int(-1);
        assert_eq!(
            Unpacker::xdr(p.clone().finish()).str(),
            Err(PvmError::BadMsg)
        );
        assert_eq!(Unpacker::xdr(p.finish()).strings(), Err(PvmError::BadMsg));
        let mut p = Packer::new(Encoding::Xdr);
        p.int(i32::MAX);
        assert_eq!(
            Unpacker::xdr(p.clone().finish()).str(),
            Err(PvmError::NoData)
        );
        assert_eq!(
            Unpacker::xdr(p.clone().finish()).ints(i32::MAX),
            Err(PvmError::NoData)
        );
        assert_eq!(Unpacker::xdr(p.finish()).strings(), Err(PvmError::NoData));
    }
}
