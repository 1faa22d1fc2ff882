//! Encrypted files. Without the key their content cannot be read, and changes are detected.
//!
//! A file is a stream ([`crate::sealed_stream`]) whose context is the role of the file: its
//! checkpoint and its task.

use super::id::CheckpointId;
use crate::sealed_stream::{StreamDecryptor, StreamEncryptor, StreamHead, StreamKey};
use sempa_proto::Tid;
use sempa_proto::checkpoint::ClaimKey;
use std::fmt;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

pub(super) use crate::sealed_stream::{DecryptError, KEY_BYTES, random_bytes};

/// Magic number of an encrypted file. The last byte is the version of the store's formats.
const MAGIC: [u8; 8] = *b"sempack\x01";

/// The secret key of a store, with its identifier.
pub(super) struct StoreKey {
    key: StreamKey,
    /// Path of the key file, for error messages.
    pub(super) path: PathBuf,
}

impl StoreKey {
    /// Creates a store key from the bytes `key`, and derives its identifier. `path` is the file
    /// from which the key was read, for error messages.
    pub(super) fn new(key: [u8; KEY_BYTES], path: &Path) -> io::Result<Self> {
        Ok(Self {
            key: StreamKey::new(MAGIC, Zeroizing::new(key))?,
            path: path.to_path_buf(),
        })
    }
}

impl fmt::Debug for StoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the key in {}", self.path.display())
    }
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
    /// Returns the context of the stream.
    fn context(self) -> Vec<u8> {
        let (kind, name, tid) = match self {
            Self::Manifest(id) => (1, id.to_string(), Tid::NONE),
            Self::Part(id, tid) => (2, id.to_string(), tid),
            Self::Claim(key) => (3, key.origin.0.to_string(), key.job),
        };
        [&[kind][..], &tid.raw().to_be_bytes(), name.as_bytes()].concat()
    }
}

/// Length and hash of a file that was encrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct EncryptedFile {
    /// Length in bytes of the encrypted file.
    pub(super) bytes: u64,
    /// Hash of the encrypted file.
    pub(super) blake3: [u8; 32],
}

/// Passes the bytes of an encrypted file to `write`, counts and hashes them.
struct HashedOutput<F> {
    write: F,
    hasher: blake3::Hasher,
    written_bytes: u64,
}

impl<F: FnMut(&[u8]) -> io::Result<()>> Write for HashedOutput<F> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        (self.write)(bytes)?;
        self.hasher.update(bytes);
        self.written_bytes += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Encrypts a file chunk by chunk, and passes the encrypted bytes to `write`.
pub(super) struct Encryptor<F>(StreamEncryptor<HashedOutput<F>>);

impl<F: FnMut(&[u8]) -> io::Result<()>> Encryptor<F> {
    /// Starts an encrypted file in the role `role`. `write` is called with the bytes of the file,
    /// in order.
    pub(super) fn new(store_key: &StoreKey, role: FileRole, write: F) -> io::Result<Self> {
        let mut output = HashedOutput {
            write,
            hasher: blake3::Hasher::new(),
            written_bytes: 0,
        };
        let head = StreamHead::generate(&store_key.key)?;
        output.write_all(head.as_bytes())?;
        let encryptor = StreamEncryptor::new(&store_key.key, head, &role.context(), output)?;
        Ok(Self(encryptor))
    }

    /// Appends bytes to the content of the file.
    pub(super) fn append(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.0.append(bytes)
    }

    /// Encrypts the last chunk. Returns the length and the hash of the file.
    pub(super) fn finish(self) -> io::Result<EncryptedFile> {
        let output = self.0.finish()?;
        Ok(EncryptedFile {
            bytes: output.written_bytes,
            blake3: *output.hasher.finalize().as_bytes(),
        })
    }
}

/// Reads an encrypted file and hashes its bytes.
struct HashedInput<R> {
    input: io::Take<R>,
    hasher: blake3::Hasher,
}

impl<R: Read> Read for HashedInput<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let bytes = self.input.read(buffer)?;
        self.hasher.update(&buffer[..bytes]);
        Ok(bytes)
    }
}

/// Decrypts a file chunk by chunk.
pub(super) struct Decryptor<R>(StreamDecryptor<HashedInput<R>>);

impl<R: Read> Decryptor<R> {
    /// Starts to decrypt a file of `bytes` bytes in the role `role`.
    ///
    /// # Errors
    /// The file was encrypted with another key, is too short, or cannot be read.
    pub(super) fn new(
        store_key: &StoreKey,
        role: FileRole,
        input: R,
        bytes: u64,
    ) -> Result<Self, DecryptError> {
        let mut input = HashedInput {
            input: input.take(bytes),
            hasher: blake3::Hasher::new(),
        };
        let head = StreamHead::read(&mut input, MAGIC)?;
        let decryptor = StreamDecryptor::new(&store_key.key, &head, &role.context(), input)?;
        Ok(Self(decryptor))
    }

    /// Returns the next bytes of the content, at most `bytes_max`; empty at the end.
    pub(super) fn next_bytes(&mut self, bytes_max: usize) -> Result<&[u8], DecryptError> {
        self.0.next_bytes(bytes_max)
    }

    /// Fills the whole buffer with the next bytes of the content.
    pub(super) fn fill(&mut self, buffer: &mut [u8]) -> Result<(), DecryptError> {
        self.0.fill(buffer)
    }

    /// Checks that the file has ended and that all its content was returned. Returns the hash of
    /// the encrypted file.
    pub(super) fn finish(self) -> Result<[u8; 32], DecryptError> {
        Ok(*self.0.finish()?.hasher.finalize().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sealed_stream::{CHUNK_BYTES, HEAD_BYTES, KEY_ID_BYTES, TAG_BYTES};
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
            assert_eq!(file.len(), HEAD_BYTES + bytes + chunk_count * TAG_BYTES);
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
        file[MAGIC.len()..][..KEY_ID_BYTES].copy_from_slice(&test_key(2).key.id());
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
        let chunks: Vec<&[u8]> = chunks.chunks(CHUNK_BYTES + TAG_BYTES).collect();
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
