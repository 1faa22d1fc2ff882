//! Encrypted files. Without the key their content cannot be read, and changes are detected.
//!
//! A file consists of a head (magic and version, key identifier, salt) and chunks of 1 MiB, each
//! encrypted with AES-256-GCM.
//!
//! - The key of a file is derived (HKDF-SHA256) from the key of the store and a random salt.
//!   Therefore the nonce of a chunk can be its number.
//! - The nonce also marks the last chunk, so that a truncated file is detected.
//! - Each chunk is bound to the head and to the role of the file: its checkpoint and its task.
//!
//! This is the STREAM construction (Hoang, Reyhanitabar, Rogaway, Vizár 2015). A file is decrypted
//! chunk by chunk. Every byte that is returned is authentic at its position; whether the file is
//! complete is known only at the end.

use super::id::CheckpointId;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, MAX_TAG_LEN, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use ring::rand::{SecureRandom, SystemRandom};
use sempa_proto::Tid;
use sempa_proto::checkpoint::ClaimKey;
use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Size in bytes of a chunk before its encryption. The last chunk may be smaller.
pub(super) const CHUNK_BYTES: usize = 1 << 20;
/// Size in bytes of the key of a store.
pub(super) const KEY_BYTES: usize = 32;
/// Magic number of an encrypted file. The last byte is the version of the store's formats.
const MAGIC: [u8; 8] = *b"sempack\x01";
const KEY_ID_BYTES: usize = 16;
const SALT_BYTES: usize = 32;
const HEAD_BYTES: usize = MAGIC.len() + KEY_ID_BYTES + SALT_BYTES;

/// The secret key of a store, with its identifier.
pub(super) struct StoreKey {
    key: [u8; KEY_BYTES],
    key_id: [u8; KEY_ID_BYTES],
    /// Path of the key file, for error messages.
    pub(super) path: PathBuf,
}

impl StoreKey {
    /// Creates a store key from the bytes `key`, and derives its identifier. `path` is the file
    /// from which the key was read, for error messages.
    pub(super) fn new(key: [u8; KEY_BYTES], path: &Path) -> io::Result<Self> {
        let mut id_bytes = [0; KEY_ID_BYTES];
        let derived_key = Salt::new(HKDF_SHA256, &MAGIC).extract(&key);
        derived_key
            .expand(&[b"name of the key"], KeyIdLength)
            .and_then(|output_key| output_key.fill(&mut id_bytes))
            .map_err(crypto_error)?;
        Ok(Self {
            key,
            key_id: id_bytes,
            path: path.to_path_buf(),
        })
    }

    fn file_key(&self, salt: &[u8]) -> io::Result<LessSafeKey> {
        let pseudorandom_key = Salt::new(HKDF_SHA256, salt).extract(&self.key);
        let output_key = pseudorandom_key
            .expand(&[b"key of a file"], &AES_256_GCM)
            .map_err(crypto_error)?;
        Ok(LessSafeKey::new(UnboundKey::from(output_key)))
    }
}

impl fmt::Debug for StoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the key in {}", self.path.display())
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
pub(super) fn random_bytes<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| io::Error::other("the kernel gave no random bytes"))?;
    Ok(bytes)
}

/// The role of an encrypted file. A file cannot be decrypted in the role of another file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileRole {
    Manifest(CheckpointId),
    /// The images of a task in a checkpoint.
    Part(CheckpointId, Tid),
    /// The claim of a job.
    Claim(ClaimKey),
}

impl FileRole {
    /// Returns the associated data of all chunks: the head and the role of the file.
    fn associated_data(self, head: &[u8; HEAD_BYTES]) -> Vec<u8> {
        let (kind, name, tid) = match self {
            Self::Manifest(id) => (1, id.to_string(), Tid::NONE),
            Self::Part(id, tid) => (2, id.to_string(), tid),
            Self::Claim(key) => (3, key.origin.0.to_string(), key.job),
        };
        let mut associated_bytes = head.to_vec();
        associated_bytes.push(kind);
        associated_bytes.extend(tid.raw().to_be_bytes());
        associated_bytes.extend(name.as_bytes());
        associated_bytes
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

/// Length and hash of a file that was encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EncryptedFile {
    /// Length in bytes of the encrypted file.
    pub(super) bytes: u64,
    /// Hash of the encrypted file.
    pub(super) blake3: [u8; 32],
}

/// Encrypts a stream chunk by chunk, and passes the encrypted bytes to `write`.
pub(super) struct Encryptor<F> {
    write: F,
    key: LessSafeKey,
    associated_data: Vec<u8>,
    chunk: Vec<u8>,
    chunk_number: u64,
    hasher: blake3::Hasher,
    written_bytes: u64,
}

impl<F: FnMut(&[u8]) -> io::Result<()>> Encryptor<F> {
    /// Starts an encrypted file in the role `role`. `write` is called with the bytes of the file,
    /// in order.
    pub(super) fn new(store_key: &StoreKey, role: FileRole, write: F) -> io::Result<Self> {
        let mut head = [0; HEAD_BYTES];
        head[..MAGIC.len()].copy_from_slice(&MAGIC);
        head[MAGIC.len()..][..KEY_ID_BYTES].copy_from_slice(&store_key.key_id);
        let salt = random_bytes::<SALT_BYTES>()?;
        head[HEAD_BYTES - SALT_BYTES..].copy_from_slice(&salt);
        let mut encryptor = Self {
            write,
            key: store_key.file_key(&salt)?,
            associated_data: role.associated_data(&head),
            chunk: Vec::with_capacity(CHUNK_BYTES + MAX_TAG_LEN),
            chunk_number: 0,
            hasher: blake3::Hasher::new(),
            written_bytes: 0,
        };
        encryptor.write_out(&head)?;
        Ok(encryptor)
    }

    /// Appends bytes to the content of the file.
    pub(super) fn append(&mut self, mut bytes: &[u8]) -> io::Result<()> {
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

    /// Encrypts the last chunk. Returns the length and the hash of the file.
    pub(super) fn finish(mut self) -> io::Result<EncryptedFile> {
        self.encrypt_chunk(true)?;
        Ok(EncryptedFile {
            bytes: self.written_bytes,
            blake3: *self.hasher.finalize().as_bytes(),
        })
    }

    fn encrypt_chunk(&mut self, is_last: bool) -> io::Result<()> {
        let mut chunk = std::mem::take(&mut self.chunk);
        let nonce = chunk_nonce(self.chunk_number, is_last);
        self.key
            .seal_in_place_append_tag(nonce, Aad::from(&self.associated_data), &mut chunk)
            .map_err(crypto_error)?;
        self.chunk_number += 1;
        self.write_out(&chunk)?;
        chunk.clear();
        self.chunk = chunk;
        Ok(())
    }

    fn write_out(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update(bytes);
        self.written_bytes += bytes.len() as u64;
        (self.write)(bytes)
    }
}

/// The reason why a file cannot be decrypted.
#[derive(Debug)]
pub(super) enum DecryptError {
    Io(io::Error),
    /// The file was encrypted with another key.
    OtherKey,
    /// The file was changed. The value describes how the change was detected.
    Changed(String),
}

impl From<io::Error> for DecryptError {
    fn from(error: io::Error) -> Self {
        Self::Io(error)
    }
}

/// Decrypts a file chunk by chunk.
pub(super) struct Decryptor<R> {
    input: R,
    /// Number of bytes of the encrypted file that were not read yet.
    remaining_bytes: u64,
    key: LessSafeKey,
    associated_data: Vec<u8>,
    chunk: Vec<u8>,
    /// Range of the chunk's bytes that were not returned yet.
    unread_range: std::ops::Range<usize>,
    chunk_number: u64,
    hasher: blake3::Hasher,
}

impl<R: Read> Decryptor<R> {
    /// Starts to decrypt a file of `bytes` bytes in the role `role`.
    ///
    /// # Errors
    /// The file was encrypted with another key, is too short, or cannot be read.
    pub(super) fn new(
        store_key: &StoreKey,
        role: FileRole,
        mut input: R,
        bytes: u64,
    ) -> Result<Self, DecryptError> {
        let mut head = [0; HEAD_BYTES];
        let Some(remaining_bytes) = bytes.checked_sub(HEAD_BYTES as u64) else {
            return Err(DecryptError::Changed(format!(
                "it has {bytes} bytes, which is less than the head of a sealed file"
            )));
        };
        read_exactly(&mut input, &mut head)?;
        if head[..MAGIC.len()] != MAGIC {
            return Err(DecryptError::Changed(
                "it does not begin with the header of a sealed file of this version".into(),
            ));
        }
        if head[MAGIC.len()..][..KEY_ID_BYTES] != store_key.key_id {
            return Err(DecryptError::OtherKey);
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&head);
        let key = store_key.file_key(&head[HEAD_BYTES - SALT_BYTES..])?;
        Ok(Self {
            input,
            remaining_bytes,
            key,
            associated_data: role.associated_data(&head),
            chunk: Vec::new(),
            unread_range: 0..0,
            chunk_number: 0,
            hasher,
        })
    }

    /// Returns the next bytes of the content, at most `bytes_max`; empty at the end.
    pub(super) fn next_bytes(&mut self, bytes_max: usize) -> Result<&[u8], DecryptError> {
        if self.unread_range.is_empty() && !self.is_at_end() {
            self.decrypt_chunk()?;
        }
        let range = self.unread_range.start
            ..self.unread_range.start + self.unread_range.len().min(bytes_max);
        self.unread_range.start = range.end;
        Ok(&self.chunk[range])
    }

    /// Fills the whole buffer with the next bytes of the content.
    pub(super) fn fill(&mut self, mut buffer: &mut [u8]) -> Result<(), DecryptError> {
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

    /// Checks that the file has ended and that all its content was returned. Returns the hash of
    /// the encrypted file.
    pub(super) fn finish(mut self) -> Result<[u8; 32], DecryptError> {
        if !self.next_bytes(1)?.is_empty() {
            return Err(DecryptError::Changed("it has surplus content".into()));
        }
        Ok(*self.hasher.finalize().as_bytes())
    }

    /// True if the last chunk was read. Each file has at least one chunk.
    fn is_at_end(&self) -> bool {
        self.remaining_bytes == 0 && self.chunk_number > 0
    }

    fn decrypt_chunk(&mut self) -> Result<(), DecryptError> {
        let bytes = self.remaining_bytes.min((CHUNK_BYTES + MAX_TAG_LEN) as u64);
        self.remaining_bytes -= bytes;
        self.chunk.resize(bytes as usize, 0);
        read_exactly(&mut self.input, &mut self.chunk)?;
        self.hasher.update(&self.chunk);
        let nonce = chunk_nonce(self.chunk_number, self.remaining_bytes == 0);
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
        Ok(())
    }
}

fn read_exactly(input: &mut impl Read, buffer: &mut [u8]) -> Result<(), DecryptError> {
    input.read_exact(buffer).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => {
            DecryptError::Changed("it became shorter while it was read".into())
        }
        _ => DecryptError::Io(e),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::Micros;

    const JOB: Tid = Tid::from_raw(0x40001);

    fn test_key(byte: u8) -> StoreKey {
        StoreKey::new([byte; KEY_BYTES], Path::new("key")).expect("a key")
    }

    fn checkpoint_id(start_second: u64) -> CheckpointId {
        CheckpointId::next_id(std::iter::empty(), JOB, Micros::from_secs(start_second))
    }

    fn encrypt(store_key: &StoreKey, role: FileRole, content: &[u8]) -> Vec<u8> {
        let mut file = Vec::new();
        let write = |bytes: &[u8]| {
            file.extend_from_slice(bytes);
            Ok(())
        };
        let mut encryptor = Encryptor::new(store_key, role, write).expect("sealed");
        for piece in content.chunks(300_001) {
            encryptor.append(piece).expect("sealed");
        }
        let encrypted_file = encryptor.finish().expect("sealed");
        assert_eq!(
            encrypted_file,
            EncryptedFile {
                bytes: file.len() as u64,
                blake3: *blake3::hash(&file).as_bytes()
            }
        );
        file
    }

    fn decrypt(store_key: &StoreKey, role: FileRole, file: &[u8]) -> Result<Vec<u8>, DecryptError> {
        let mut decryptor = Decryptor::new(store_key, role, file, file.len() as u64)?;
        let mut content = Vec::new();
        loop {
            let bytes = decryptor.next_bytes(70_000)?;
            if bytes.is_empty() {
                break;
            }
            content.extend_from_slice(bytes);
        }
        assert_eq!(decryptor.finish()?, *blake3::hash(file).as_bytes());
        Ok(content)
    }

    fn test_content(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i % 251) as u8).collect()
    }

    #[test]
    fn all_lengths_around_chunk_bounds_decrypt() {
        for bytes in [
            0,
            1,
            CHUNK_BYTES - 1,
            CHUNK_BYTES,
            CHUNK_BYTES + 1,
            2 * CHUNK_BYTES,
            2 * CHUNK_BYTES + 7,
        ] {
            let role = FileRole::Part(checkpoint_id(1), JOB);
            let file = encrypt(&test_key(1), role, &test_content(bytes));
            let chunk_count = bytes.div_ceil(CHUNK_BYTES).max(1);
            assert_eq!(file.len(), HEAD_BYTES + bytes + chunk_count * MAX_TAG_LEN);
            assert_eq!(
                decrypt(&test_key(1), role, &file).expect("opened"),
                test_content(bytes)
            );
        }
    }

    #[test]
    fn file_of_another_role_is_refused() {
        let other_tid = Tid::from_raw(0x40002);
        let roles = [
            FileRole::Manifest(checkpoint_id(1)),
            FileRole::Manifest(checkpoint_id(2)),
            FileRole::Part(checkpoint_id(1), JOB),
            FileRole::Part(checkpoint_id(1), other_tid),
        ];
        for encrypted_role in roles {
            let file = encrypt(&test_key(1), encrypted_role, b"content");
            for decrypted_role in roles {
                let result = decrypt(&test_key(1), decrypted_role, &file);
                assert_eq!(
                    result.is_ok(),
                    encrypted_role == decrypted_role,
                    "{encrypted_role:?} as {decrypted_role:?}"
                );
            }
        }
    }

    #[test]
    fn other_key_is_distinguished_from_change() {
        let role = FileRole::Manifest(checkpoint_id(1));
        let mut file = encrypt(&test_key(1), role, b"content");
        assert!(matches!(
            decrypt(&test_key(2), role, &file),
            Err(DecryptError::OtherKey)
        ));
        // Simulate an attacker who writes the identifier of the key into the file without having
        // the key.
        file[MAGIC.len()..][..KEY_ID_BYTES].copy_from_slice(&test_key(2).key_id);
        assert!(matches!(
            decrypt(&test_key(2), role, &file),
            Err(DecryptError::Changed(_))
        ));
    }

    #[test]
    fn chunks_cannot_be_removed_swapped_repeated_or_added() {
        let role = FileRole::Part(checkpoint_id(1), JOB);
        let file = encrypt(&test_key(1), role, &test_content(3 * CHUNK_BYTES));
        let (head, chunks) = file.split_at(HEAD_BYTES);
        let chunks: Vec<&[u8]> = chunks.chunks(CHUNK_BYTES + MAX_TAG_LEN).collect();
        for order in [
            &[][..],
            &[0],
            &[0, 1],
            &[2],
            &[1, 0, 2],
            &[0, 0, 2],
            &[0, 1, 1, 2],
            &[0, 1, 2, 2],
        ] {
            let changed_file = [
                head,
                &order
                    .iter()
                    .map(|chunk_index| chunks[*chunk_index])
                    .collect::<Vec<_>>()
                    .concat(),
            ]
            .concat();
            assert!(
                matches!(
                    decrypt(&test_key(1), role, &changed_file),
                    Err(DecryptError::Changed(_))
                ),
                "{order:?}"
            );
        }
        for bytes in [
            0,
            1,
            HEAD_BYTES - 1,
            HEAD_BYTES,
            HEAD_BYTES + 1,
            file.len() - 1,
        ] {
            assert!(
                matches!(
                    decrypt(&test_key(1), role, &file[..bytes]),
                    Err(DecryptError::Changed(_))
                ),
                "{bytes} bytes"
            );
        }
    }

    #[test]
    fn equal_content_encrypts_differently() {
        let role = FileRole::Manifest(checkpoint_id(1));
        let (first_file, second_file) = (
            encrypt(&test_key(1), role, b"content"),
            encrypt(&test_key(1), role, b"content"),
        );
        assert_ne!(first_file[HEAD_BYTES..], second_file[HEAD_BYTES..]);
    }
}
