//! Encrypted streams. Without the key their content cannot be read, and changes are detected.
//!
//! A stream consists of a head (magic and version, key identifier, salt) and chunks of 1 MiB, each
//! encrypted with AES-256-GCM.
//!
//! - The key of a stream is derived (HKDF-SHA256) from a master key and a random salt. Therefore
//!   the nonce of a chunk can be its number.
//! - The nonce also marks the last chunk, so that a truncated stream is detected.
//! - Each chunk is bound to the head and to a context: a description of the stream that the reader
//!   must know.
//!
//! This is the STREAM construction (Hoang, Reyhanitabar, Rogaway, Vizár 2015). A stream is
//! decrypted chunk by chunk. Every byte that is returned is authentic at its position; whether the
//! stream is complete is known only at the end.

use ring::aead::{AES_256_GCM, Aad, LessSafeKey, MAX_TAG_LEN, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use ring::rand::{SecureRandom, SystemRandom};
use std::io::{self, Read, Write};
use std::ops::Range;
use zeroize::Zeroizing;

/// Size in bytes of a chunk before its encryption. The last chunk may be smaller.
pub(crate) const CHUNK_BYTES: usize = 1 << 20;
/// Number of bytes by which encryption lengthens a chunk.
#[cfg(test)]
pub(crate) const TAG_BYTES: usize = MAX_TAG_LEN;
/// Size in bytes of a master key.
pub(crate) const KEY_BYTES: usize = 32;
/// Size in bytes of the identifier of a master key.
pub(crate) const KEY_ID_BYTES: usize = 16;
/// Size in bytes of the magic number of a format.
pub(crate) const MAGIC_BYTES: usize = 8;
const SALT_BYTES: usize = 32;
/// Size in bytes of the head of a stream.
pub(crate) const HEAD_BYTES: usize = MAGIC_BYTES + KEY_ID_BYTES + SALT_BYTES;

/// A master key for the streams of one format.
pub(crate) struct StreamKey {
    /// Magic number of the format. The last byte is the version.
    magic: [u8; MAGIC_BYTES],
    key: Zeroizing<[u8; KEY_BYTES]>,
    id: [u8; KEY_ID_BYTES],
}

impl StreamKey {
    /// Creates a master key and derives its identifier, which does not reveal the key.
    pub(crate) fn new(
        magic: [u8; MAGIC_BYTES],
        key: Zeroizing<[u8; KEY_BYTES]>,
    ) -> io::Result<Self> {
        let mut id = [0; KEY_ID_BYTES];
        Salt::new(HKDF_SHA256, &magic)
            .extract(&*key)
            .expand(&[b"name of the key"], KeyIdLength)
            .and_then(|output_key| output_key.fill(&mut id))
            .map_err(crypto_error)?;
        Ok(Self { magic, key, id })
    }

    pub(crate) fn id(&self) -> [u8; KEY_ID_BYTES] {
        self.id
    }

    pub(crate) fn key_bytes(&self) -> &[u8; KEY_BYTES] {
        &self.key
    }

    fn derive(&self, salt: &[u8]) -> io::Result<LessSafeKey> {
        let pseudorandom_key = Salt::new(HKDF_SHA256, salt).extract(&*self.key);
        let output_key = pseudorandom_key
            .expand(&[b"key of a file"], &AES_256_GCM)
            .map_err(crypto_error)?;
        Ok(LessSafeKey::new(UnboundKey::from(output_key)))
    }
}

struct KeyIdLength;

impl KeyType for KeyIdLength {
    fn len(&self) -> usize {
        KEY_ID_BYTES
    }
}

fn crypto_error(_: ring::error::Unspecified) -> io::Error {
    io::Error::other("the cryptographic library failed")
}

/// Returns random bytes from the kernel.
pub(crate) fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| io::Error::other("the kernel gave no random bytes"))?;
    Ok(bytes)
}

/// The head of a stream. The head is not encrypted.
pub(crate) struct StreamHead([u8; HEAD_BYTES]);

impl StreamHead {
    /// Creates the head of a new stream, with a random salt.
    pub(crate) fn generate(stream_key: &StreamKey) -> io::Result<Self> {
        let mut head = [0; HEAD_BYTES];
        head[..MAGIC_BYTES].copy_from_slice(&stream_key.magic);
        head[MAGIC_BYTES..][..KEY_ID_BYTES].copy_from_slice(&stream_key.id);
        head[HEAD_BYTES - SALT_BYTES..].copy_from_slice(&random_bytes::<SALT_BYTES>()?);
        Ok(Self(head))
    }

    /// Reads the head of a stream of the format `magic`.
    ///
    /// # Errors
    /// The input is shorter than a head, has another format, or cannot be read.
    pub(crate) fn read(
        input: &mut impl Read,
        magic: [u8; MAGIC_BYTES],
    ) -> Result<Self, DecryptError> {
        let mut head = [0; HEAD_BYTES];
        read_exactly(input, &mut head)?;
        if head[..MAGIC_BYTES] != magic {
            return Err(DecryptError::Changed(
                "it does not begin with the header of a sealed file of this version".into(),
            ));
        }
        Ok(Self(head))
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// Returns the identifier of the master key with which the stream was encrypted.
    pub(crate) fn key_id(&self) -> [u8; KEY_ID_BYTES] {
        let mut key_id = [0; KEY_ID_BYTES];
        key_id.copy_from_slice(&self.0[MAGIC_BYTES..][..KEY_ID_BYTES]);
        key_id
    }

    fn salt(&self) -> &[u8] {
        &self.0[HEAD_BYTES - SALT_BYTES..]
    }

    /// Returns the associated data of all chunks: the head and the context.
    fn associated_data(&self, context: &[u8]) -> Vec<u8> {
        [&self.0[..], context].concat()
    }
}

/// Returns the nonce of a chunk. The nonce contains the chunk's number and whether the chunk is the
/// last one.
fn chunk_nonce(chunk_number: u64, is_last: bool) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[0] = u8::from(is_last);
    nonce[NONCE_LEN - 8..].copy_from_slice(&chunk_number.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// Encrypts the content of a stream chunk by chunk. The caller writes the head.
pub(crate) struct StreamEncryptor<W> {
    output: W,
    key: LessSafeKey,
    associated_data: Vec<u8>,
    chunk: Vec<u8>,
    chunk_number: u64,
}

impl<W: Write> StreamEncryptor<W> {
    /// Starts a stream with a head that was generated for this stream only.
    pub(crate) fn new(
        stream_key: &StreamKey,
        head: StreamHead,
        context: &[u8],
        output: W,
    ) -> io::Result<Self> {
        Ok(Self {
            output,
            key: stream_key.derive(head.salt())?,
            associated_data: head.associated_data(context),
            chunk: Vec::with_capacity(CHUNK_BYTES + MAX_TAG_LEN),
            chunk_number: 0,
        })
    }

    /// Appends bytes to the content of the stream.
    pub(crate) fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.chunk.len() == CHUNK_BYTES {
                self.encrypt_chunk(false)?;
            }
            let (chunk_part, remaining_part) =
                bytes.split_at(bytes.len().min(CHUNK_BYTES - self.chunk.len()));
            self.chunk.extend_from_slice(chunk_part);
            bytes = remaining_part;
        }
        Ok(())
    }

    /// Encrypts the last chunk. Returns the output.
    pub(crate) fn finish(mut self) -> io::Result<W> {
        self.encrypt_chunk(true)?;
        Ok(self.output)
    }

    fn encrypt_chunk(&mut self, is_last: bool) -> io::Result<()> {
        let nonce = chunk_nonce(self.chunk_number, is_last);
        self.key
            .seal_in_place_append_tag(nonce, Aad::from(&self.associated_data), &mut self.chunk)
            .map_err(crypto_error)?;
        self.chunk_number += 1;
        let result = self.output.write_all(&self.chunk);
        self.chunk.clear();
        result
    }
}

/// The reason why a stream cannot be decrypted.
#[derive(Debug)]
pub(crate) enum DecryptError {
    Io(io::Error),
    /// The stream was encrypted with another key.
    OtherKey,
    /// The stream was changed. The value describes how the change was detected.
    Changed(String),
}

impl From<io::Error> for DecryptError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Decrypts the content of a stream chunk by chunk. The stream ends where the input ends.
pub(crate) struct StreamDecryptor<R> {
    input: R,
    key: LessSafeKey,
    associated_data: Vec<u8>,
    chunk: Vec<u8>,
    /// Range of the chunk's bytes that were not returned yet.
    unread_range: Range<usize>,
    /// The first byte of the next chunk. The byte is read ahead because the nonce of a chunk
    /// depends on whether another chunk follows.
    next_byte: Option<u8>,
    chunk_number: u64,
    /// True if the last chunk was decrypted.
    is_at_end: bool,
}

impl<R: Read> StreamDecryptor<R> {
    /// Starts to decrypt the stream of `head`. The head was already read from `input`.
    ///
    /// # Errors
    /// The stream was encrypted with another key, or cannot be read.
    pub(crate) fn new(
        stream_key: &StreamKey,
        head: &StreamHead,
        context: &[u8],
        mut input: R,
    ) -> Result<Self, DecryptError> {
        if head.key_id() != stream_key.id {
            return Err(DecryptError::OtherKey);
        }
        let next_byte = read_byte(&mut input)?;
        Ok(Self {
            input,
            key: stream_key.derive(head.salt())?,
            associated_data: head.associated_data(context),
            chunk: Vec::with_capacity(CHUNK_BYTES + MAX_TAG_LEN),
            unread_range: 0..0,
            next_byte,
            chunk_number: 0,
            is_at_end: false,
        })
    }

    /// Returns the next bytes of the content, at most `bytes_max`; empty at the end.
    pub(crate) fn next_bytes(&mut self, bytes_max: usize) -> Result<&[u8], DecryptError> {
        if self.unread_range.is_empty() && !self.is_at_end {
            self.decrypt_chunk()?;
        }
        let range = self.unread_range.start
            ..self.unread_range.start + self.unread_range.len().min(bytes_max);
        self.unread_range.start = range.end;
        Ok(&self.chunk[range])
    }

    /// Fills the whole buffer with the next bytes of the content.
    pub(crate) fn fill(&mut self, mut buffer: &mut [u8]) -> Result<(), DecryptError> {
        while !buffer.is_empty() {
            let bytes = self.next_bytes(buffer.len())?;
            if bytes.is_empty() {
                return Err(DecryptError::Changed(
                    "its content ends in the middle".into(),
                ));
            }
            let (filled_part, remaining_part) =
                std::mem::take(&mut buffer).split_at_mut(bytes.len());
            filled_part.copy_from_slice(bytes);
            buffer = remaining_part;
        }
        Ok(())
    }

    /// Returns the next `N` bytes of the content.
    pub(crate) fn read_array<const N: usize>(&mut self) -> Result<[u8; N], DecryptError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// Checks that the stream has ended and that all its content was returned. Returns the input.
    pub(crate) fn finish(mut self) -> Result<R, DecryptError> {
        if !self.next_bytes(1)?.is_empty() {
            return Err(DecryptError::Changed("it has surplus content".into()));
        }
        Ok(self.input)
    }

    fn decrypt_chunk(&mut self) -> Result<(), DecryptError> {
        self.chunk.clear();
        self.chunk.extend(self.next_byte);
        let remaining_bytes = (CHUNK_BYTES + MAX_TAG_LEN - self.chunk.len()) as u64;
        (&mut self.input)
            .take(remaining_bytes)
            .read_to_end(&mut self.chunk)?;
        self.next_byte = read_byte(&mut self.input)?;
        let is_last = self.next_byte.is_none();
        let nonce = chunk_nonce(self.chunk_number, is_last);
        let content = self
            .key
            .open_in_place(nonce, Aad::from(&self.associated_data), &mut self.chunk)
            .map_err(|_| {
                DecryptError::Changed(format!(
                    "its chunk {} was changed, truncated or inserted",
                    self.chunk_number + 1
                ))
            })?;
        self.unread_range = 0..content.len();
        self.chunk_number += 1;
        self.is_at_end = is_last;
        Ok(())
    }
}

/// Reads one byte; `None` at the end of the input.
fn read_byte(input: &mut impl Read) -> io::Result<Option<u8>> {
    let mut byte = [0];
    loop {
        match input.read(&mut byte) {
            Ok(0) => return Ok(None),
            Ok(_) => return Ok(Some(byte[0])),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

/// Fills the whole buffer from the input.
///
/// # Errors
/// The input ends early, or cannot be read.
pub(crate) fn read_exactly(input: &mut impl Read, buffer: &mut [u8]) -> Result<(), DecryptError> {
    input.read_exact(buffer).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => DecryptError::Changed("it ends within its header".into()),
        _ => DecryptError::Io(e),
    })
}
