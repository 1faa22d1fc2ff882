//! Encrypted files: without the key their content can be neither read nor changed.
//!
//! A file consists of a head (magic and version, key identifier, salt) and chunks of 1 MiB, each
//! encrypted with AES-256-GCM.
//!
//! - The key of a file is derived (HKDF-SHA256) from the key of the store and a random salt. So the
//!   nonce of a chunk can be its number.
//! - The nonce also marks the last chunk, so that a truncated file is detected.
//! - Each chunk is bound to the head and to the role of the file: which checkpoint, which task.
//!
//! This is the STREAM construction (Hoang, Reyhanitabar, Rogaway, Vizár 2015). A file is decrypted
//! chunk by chunk. Every byte that is returned is authentic at its place; that the file is complete
//! is known only at the end.

use super::id::SetId;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, MAX_TAG_LEN, NONCE_LEN, Nonce, UnboundKey};
use ring::hkdf::{HKDF_SHA256, KeyType, Salt};
use ring::rand::{SecureRandom, SystemRandom};
use sempa_proto::Tid;
use std::fmt;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

/// Size of a chunk; the last one may be smaller.
pub(super) const CHUNK_BYTES: usize = 1 << 20;
/// Size of the key of a store.
pub(super) const KEY_BYTES: usize = 32;
/// Magic number of an encrypted file. The last byte is the version of the store's formats.
const MARK: [u8; 8] = *b"sempack\x01";
const NAME_BYTES: usize = 16;
const SALT_BYTES: usize = 32;
const HEAD_BYTES: usize = MARK.len() + NAME_BYTES + SALT_BYTES;

/// The key of a store.
pub(super) struct Secret {
    key: [u8; KEY_BYTES],
    name: [u8; NAME_BYTES],
    /// Path of the key file, for errors.
    pub(super) path: PathBuf,
}

impl Secret {
    /// Derives the identifier of a key, which was read from this file.
    pub(super) fn new(key: [u8; KEY_BYTES], path: &Path) -> io::Result<Secret> {
        let mut name = [0; NAME_BYTES];
        let derived = Salt::new(HKDF_SHA256, &MARK).extract(&key);
        derived
            .expand(&[b"name of the key"], NameLength)
            .and_then(|okm| okm.fill(&mut name))
            .map_err(unspecified)?;
        Ok(Secret {
            key,
            name,
            path: path.to_path_buf(),
        })
    }

    fn file_key(&self, salt: &[u8]) -> io::Result<LessSafeKey> {
        let derived = Salt::new(HKDF_SHA256, salt).extract(&self.key);
        let okm = derived
            .expand(&[b"key of a file"], &AES_256_GCM)
            .map_err(unspecified)?;
        Ok(LessSafeKey::new(UnboundKey::from(okm)))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the key in {}", self.path.display())
    }
}

struct NameLength;

impl KeyType for NameLength {
    fn len(&self) -> usize {
        NAME_BYTES
    }
}

fn unspecified(_: ring::error::Unspecified) -> io::Error {
    io::Error::other("the cryptographic library failed")
}

/// Returns random bytes from the kernel.
pub(super) fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    SystemRandom::new()
        .fill(&mut bytes)
        .map_err(|_| io::Error::other("the kernel gave no random bytes"))?;
    Ok(bytes)
}

/// The role of an encrypted file. A file that replaces one of another role cannot be decrypted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    Manifest(SetId),
    /// The images of a task in a checkpoint.
    Part(SetId, Tid),
}

impl What {
    /// Returns the associated data of all chunks: the head and the role.
    fn bind(self, head: &[u8; HEAD_BYTES]) -> Vec<u8> {
        let (kind, id, tid) = match self {
            What::Manifest(id) => (1, id, Tid::NONE),
            What::Part(id, tid) => (2, id, tid),
        };
        let mut bound = head.to_vec();
        bound.push(kind);
        bound.extend(tid.raw().to_be_bytes());
        bound.extend(id.to_string().as_bytes());
        bound
    }
}

/// Returns the nonce of a chunk: its number, and whether it is the last one.
fn nonce(number: u64, last: bool) -> Nonce {
    let mut nonce = [0; NONCE_LEN];
    nonce[0] = u8::from(last);
    nonce[NONCE_LEN - 8..].copy_from_slice(&number.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// The result of encrypting a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Sealed {
    /// Length of the file.
    pub(super) bytes: u64,
    /// Hash of the encrypted file.
    pub(super) blake3: [u8; 32],
}

/// Encrypts a stream and passes the result to `write`, in pieces.
pub(super) struct Sealer<F> {
    write: F,
    key: LessSafeKey,
    bound: Vec<u8>,
    chunk: Vec<u8>,
    number: u64,
    hasher: blake3::Hasher,
    bytes: u64,
}

impl<F: FnMut(&[u8]) -> io::Result<()>> Sealer<F> {
    /// Starts a file; `write` gets its bytes.
    pub(super) fn new(secret: &Secret, what: What, write: F) -> io::Result<Sealer<F>> {
        let mut head = [0; HEAD_BYTES];
        head[..MARK.len()].copy_from_slice(&MARK);
        head[MARK.len()..][..NAME_BYTES].copy_from_slice(&secret.name);
        let salt = random::<SALT_BYTES>()?;
        head[HEAD_BYTES - SALT_BYTES..].copy_from_slice(&salt);
        let mut sealer = Sealer {
            write,
            key: secret.file_key(&salt)?,
            bound: what.bind(&head),
            chunk: Vec::with_capacity(CHUNK_BYTES + MAX_TAG_LEN),
            number: 0,
            hasher: blake3::Hasher::new(),
            bytes: 0,
        };
        sealer.out(&head)?;
        Ok(sealer)
    }

    /// Appends to the content.
    pub(super) fn put(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            if self.chunk.len() == CHUNK_BYTES {
                self.seal(false)?;
            }
            let (now, later) = bytes.split_at(bytes.len().min(CHUNK_BYTES - self.chunk.len()));
            self.chunk.extend_from_slice(now);
            bytes = later;
        }
        Ok(())
    }

    /// Encrypts the last chunk; returns length and hash of the file.
    pub(super) fn end(mut self) -> io::Result<Sealed> {
        self.seal(true)?;
        Ok(Sealed {
            bytes: self.bytes,
            blake3: *self.hasher.finalize().as_bytes(),
        })
    }

    fn seal(&mut self, last: bool) -> io::Result<()> {
        let mut chunk = std::mem::take(&mut self.chunk);
        let nonce = nonce(self.number, last);
        self.key
            .seal_in_place_append_tag(nonce, Aad::from(&self.bound), &mut chunk)
            .map_err(unspecified)?;
        self.number += 1;
        self.out(&chunk)?;
        chunk.clear();
        self.chunk = chunk;
        Ok(())
    }

    fn out(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.hasher.update(bytes);
        self.bytes += bytes.len() as u64;
        (self.write)(bytes)
    }
}

/// The reason why a file cannot be decrypted.
#[derive(Debug)]
pub(super) enum Broken {
    Io(io::Error),
    /// It was encrypted with another key.
    OtherKey,
    /// It is not what was encrypted; how that was detected.
    Changed(String),
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Broken {
        Broken::Io(error)
    }
}

/// Decrypts a file chunk by chunk.
pub(super) struct Opener<R> {
    input: R,
    /// Bytes of the file that have not been read.
    left: u64,
    key: LessSafeKey,
    bound: Vec<u8>,
    chunk: Vec<u8>,
    /// The part of the chunk that has not been returned.
    fresh: std::ops::Range<usize>,
    number: u64,
    hasher: blake3::Hasher,
}

impl<R: Read> Opener<R> {
    /// Starts to read a file of `bytes` bytes.
    pub(super) fn new(
        secret: &Secret,
        what: What,
        mut input: R,
        bytes: u64,
    ) -> Result<Opener<R>, Broken> {
        let mut head = [0; HEAD_BYTES];
        let Some(left) = bytes.checked_sub(HEAD_BYTES as u64) else {
            return Err(Broken::Changed(format!(
                "it has {bytes} bytes, which is less than the head of a sealed file"
            )));
        };
        read(&mut input, &mut head)?;
        if head[..MARK.len()] != MARK {
            return Err(Broken::Changed(
                "it does not begin like a sealed file of this version".into(),
            ));
        }
        if head[MARK.len()..][..NAME_BYTES] != secret.name {
            return Err(Broken::OtherKey);
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(&head);
        let key = secret.file_key(&head[HEAD_BYTES - SALT_BYTES..])?;
        Ok(Opener {
            input,
            left,
            key,
            bound: what.bind(&head),
            chunk: Vec::new(),
            fresh: 0..0,
            number: 0,
            hasher,
        })
    }

    /// Returns the next bytes of the content, at most `max`; empty at the end.
    pub(super) fn next(&mut self, max: usize) -> Result<&[u8], Broken> {
        if self.fresh.is_empty() && !self.at_end() {
            self.open()?;
        }
        let now = self.fresh.start..self.fresh.start + self.fresh.len().min(max);
        self.fresh.start = now.end;
        Ok(&self.chunk[now])
    }

    /// Fills the buffer with the next bytes.
    pub(super) fn fill(&mut self, mut room: &mut [u8]) -> Result<(), Broken> {
        while !room.is_empty() {
            let bytes = self.next(room.len())?;
            if bytes.is_empty() {
                return Err(Broken::Changed("its content ends in the middle".into()));
            }
            let (now, later) = std::mem::take(&mut room).split_at_mut(bytes.len());
            now.copy_from_slice(bytes);
            room = later;
        }
        Ok(())
    }

    /// Checks that the file has ended and everything was returned. Returns the hash of the
    /// encrypted file.
    pub(super) fn end(mut self) -> Result<[u8; 32], Broken> {
        if !self.next(1)?.is_empty() {
            return Err(Broken::Changed(
                "there is more in it than belongs there".into(),
            ));
        }
        Ok(*self.hasher.finalize().as_bytes())
    }

    /// True if the last chunk was read; each file has at least one.
    fn at_end(&self) -> bool {
        self.left == 0 && self.number > 0
    }

    fn open(&mut self) -> Result<(), Broken> {
        let bytes = self.left.min((CHUNK_BYTES + MAX_TAG_LEN) as u64);
        self.left -= bytes;
        self.chunk.resize(bytes as usize, 0);
        read(&mut self.input, &mut self.chunk)?;
        self.hasher.update(&self.chunk);
        let nonce = nonce(self.number, self.left == 0);
        let content = self
            .key
            .open_in_place(nonce, Aad::from(&self.bound), &mut self.chunk)
            .map_err(|_| {
                Broken::Changed(format!(
                    "its piece {} was changed, cut or put there",
                    self.number + 1
                ))
            })?;
        self.fresh = 0..content.len();
        self.number += 1;
        Ok(())
    }
}

fn read(input: &mut impl Read, room: &mut [u8]) -> Result<(), Broken> {
    input.read_exact(room).map_err(|e| match e.kind() {
        io::ErrorKind::UnexpectedEof => {
            Broken::Changed("it became shorter while it was read".into())
        }
        _ => Broken::Io(e),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::Micros;

    const JOB: Tid = Tid::from_raw(0x40001);

    fn secret(byte: u8) -> Secret {
        Secret::new([byte; KEY_BYTES], Path::new("key")).expect("a key")
    }

    fn id(second: u64) -> SetId {
        SetId::after(std::iter::empty(), JOB, Micros::from_secs(second))
    }

    fn seal(secret: &Secret, what: What, content: &[u8]) -> Vec<u8> {
        let mut file = Vec::new();
        let write = |bytes: &[u8]| {
            file.extend_from_slice(bytes);
            Ok(())
        };
        let mut sealer = Sealer::new(secret, what, write).expect("sealed");
        for piece in content.chunks(300_001) {
            sealer.put(piece).expect("sealed");
        }
        let sealed = sealer.end().expect("sealed");
        assert_eq!(
            sealed,
            Sealed {
                bytes: file.len() as u64,
                blake3: *blake3::hash(&file).as_bytes()
            }
        );
        file
    }

    fn open(secret: &Secret, what: What, file: &[u8]) -> Result<Vec<u8>, Broken> {
        let mut opener = Opener::new(secret, what, file, file.len() as u64)?;
        let mut content = Vec::new();
        loop {
            let bytes = opener.next(70_000)?;
            if bytes.is_empty() {
                break;
            }
            content.extend_from_slice(bytes);
        }
        assert_eq!(opener.end()?, *blake3::hash(file).as_bytes());
        Ok(content)
    }

    fn content(bytes: usize) -> Vec<u8> {
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
            let what = What::Part(id(1), JOB);
            let file = seal(&secret(1), what, &content(bytes));
            let chunks = bytes.div_ceil(CHUNK_BYTES).max(1);
            assert_eq!(file.len(), HEAD_BYTES + bytes + chunks * MAX_TAG_LEN);
            assert_eq!(
                open(&secret(1), what, &file).expect("opened"),
                content(bytes)
            );
        }
    }

    #[test]
    fn file_of_another_role_is_refused() {
        let other = Tid::from_raw(0x40002);
        let places = [
            What::Manifest(id(1)),
            What::Manifest(id(2)),
            What::Part(id(1), JOB),
            What::Part(id(1), other),
        ];
        for from in places {
            let file = seal(&secret(1), from, b"content");
            for to in places {
                let opened = open(&secret(1), to, &file);
                assert_eq!(opened.is_ok(), from == to, "{from:?} as {to:?}");
            }
        }
    }

    #[test]
    fn other_key_is_distinguished_from_change() {
        let what = What::Manifest(id(1));
        let mut file = seal(&secret(1), what, b"content");
        assert!(matches!(
            open(&secret(2), what, &file),
            Err(Broken::OtherKey)
        ));
        // An attacker without the key writes the identifier of the key into the file.
        file[MARK.len()..][..NAME_BYTES].copy_from_slice(&secret(2).name);
        assert!(matches!(
            open(&secret(2), what, &file),
            Err(Broken::Changed(_))
        ));
    }

    #[test]
    fn chunks_cannot_be_removed_swapped_repeated_or_added() {
        let what = What::Part(id(1), JOB);
        let file = seal(&secret(1), what, &content(3 * CHUNK_BYTES));
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
            let changed = [
                head,
                &order
                    .iter()
                    .map(|at| chunks[*at])
                    .collect::<Vec<_>>()
                    .concat(),
            ]
            .concat();
            assert!(
                matches!(open(&secret(1), what, &changed), Err(Broken::Changed(_))),
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
                    open(&secret(1), what, &file[..bytes]),
                    Err(Broken::Changed(_))
                ),
                "{bytes} bytes"
            );
        }
    }

    #[test]
    fn equal_content_encrypts_differently() {
        let what = What::Manifest(id(1));
        let (one, other) = (
            seal(&secret(1), what, b"content"),
            seal(&secret(1), what, b"content"),
        );
        assert_ne!(one[HEAD_BYTES..], other[HEAD_BYTES..]);
    }
}
