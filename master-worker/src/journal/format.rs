//! The file format: a header, then frames.
//!
//! ```text
//! header  magic 8 | format version u32 | length u32 | postcard(Header) | check 8
//! frame   length u32 | kind u8 | sequence u64 | body | check 8
//! ```
//!
//! Numbers are little-endian. The check is a keyed BLAKE3 hash, cut to eight bytes. The key of the
//! frames is derived from the header, so a frame of another file or run is never valid.
//!
//! A *mark* is a frame that contains its own offset. The writer writes a mark after each sync: all
//! bytes before the mark are on the disk. A damaged frame with a valid mark somewhere after it is
//! therefore corruption. Without such a mark the frame belongs to a write that was not complete
//! when the machine or the process ended, and nobody was told that its records are durable.

use super::error::Damage;
use super::storage::StoredReader;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::io::{self, Read};

const MAGIC: [u8; 8] = *b"sempa-mw";
/// Version of the file format that this program reads and writes.
pub(super) const FORMAT_VERSION: u32 = 1;
/// Bytes of a header at most. A program's name and version take most of them.
const HEADER_BYTES_MAX: u32 = 64 << 10;
const CHECK_BYTES: usize = 8;
const FRAME_HEAD_BYTES: usize = 4 + 1 + 8;
const FRAME_OVERHEAD: u64 = (FRAME_HEAD_BYTES + CHECK_BYTES) as u64;
const MARK_BODY_BYTES: usize = 8;
const MARK_BYTES: usize = FRAME_HEAD_BYTES + MARK_BODY_BYTES + CHECK_BYTES;
const HEADER_KEY_CONTEXT: &str = "sempa master-worker journal: header of version 1";
const FRAME_KEY_CONTEXT: &str = "sempa master-worker journal: frames of version 1";

/// The random number that distinguishes a run from all others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RunId(pub [u8; 16]);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum FileKind {
    Log,
    Snapshot,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Header {
    pub(super) kind: FileKind,
    pub(super) number: u64,
    pub(super) run: RunId,
    /// Name and version of the program.
    pub(super) program: String,
    /// Sequence number of the first frame of the log with this number.
    pub(super) first: u64,
}

/// The reason why a header cannot be used.
#[derive(Debug)]
pub(super) enum HeaderError {
    Io(io::Error),
    NotAJournal,
    Version(u32),
    Damaged,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FrameKind {
    Record = 1,
    /// The journal was opened. The body is the generation.
    Opened = 2,
    Mark = 3,
    SnapshotPart = 4,
}

/// The key of the checks of one file.
#[derive(Clone)]
pub(super) struct FrameKey([u8; 32]);

#[derive(Debug)]
pub(super) struct Frame {
    pub(super) kind: FrameKind,
    pub(super) sequence: u64,
    pub(super) offset: u64,
    /// The bytes of the frame as they are in the file.
    pub(super) raw: Vec<u8>,
}

#[derive(Debug)]
pub(super) enum FrameStep {
    Frame(Frame),
    End,
    Bad(Damage),
}

/// Reads the frames of one file in order.
pub(super) struct FrameReader {
    source: StoredReader,
    key: FrameKey,
    offset: u64,
}

impl fmt::Display for RunId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Header {
    /// Returns the encoded header, and the key of the frames that follow.
    pub(super) fn encode(&self) -> (Vec<u8>, FrameKey) {
        let body = postcard::to_stdvec(self).expect("numbers and strings can be serialized");
        let mut bytes = MAGIC.to_vec();
        bytes.extend(FORMAT_VERSION.to_le_bytes());
        bytes.extend((body.len() as u32).to_le_bytes());
        bytes.extend(&body);
        let key = FrameKey::of_frames(&bytes);
        bytes.extend(FrameKey::of_headers().check(&bytes));
        (bytes, key)
    }
}

impl FrameKey {
    fn of_headers() -> Self {
        Self(blake3::derive_key(HEADER_KEY_CONTEXT, &[]))
    }

    fn of_frames(header: &[u8]) -> Self {
        Self(blake3::derive_key(FRAME_KEY_CONTEXT, header))
    }

    fn check(&self, bytes: &[u8]) -> [u8; CHECK_BYTES] {
        let hash = blake3::keyed_hash(&self.0, bytes);
        std::array::from_fn(|index| hash.as_bytes()[index])
    }

    /// Appends a frame to a buffer.
    pub(super) fn push_frame<T: Serialize>(
        &self,
        buffer: &mut Vec<u8>,
        kind: FrameKind,
        sequence: u64,
        body: &T,
    ) {
        let start = buffer.len();
        push_head(buffer, kind, sequence);
        postcard::to_io(body, &mut *buffer).expect("records can be serialized into memory");
        self.complete_frame(buffer, start);
    }

    /// Appends a mark to a buffer. `offset` is the place of the mark in the file, `sequence` the
    /// number of the frame that follows.
    pub(super) fn push_mark(&self, buffer: &mut Vec<u8>, offset: u64, sequence: u64) {
        let start = buffer.len();
        push_head(buffer, FrameKind::Mark, sequence);
        buffer.extend(offset.to_le_bytes());
        self.complete_frame(buffer, start);
    }

    fn complete_frame(&self, buffer: &mut Vec<u8>, start: usize) {
        let body_bytes = buffer.len() - start - FRAME_HEAD_BYTES;
        let length = u32::try_from(body_bytes).expect("RECORD_BYTES_MAX limits the length");
        buffer[start..start + 4].copy_from_slice(&length.to_le_bytes());
        let check = self.check(&buffer[start..]);
        buffer.extend(check);
    }

    /// True if one of `bytes` begins a valid mark. `offset` is the place of `bytes` in the file.
    pub(super) fn finds_mark(&self, bytes: &[u8], offset: u64) -> bool {
        let mut pattern = (MARK_BODY_BYTES as u32).to_le_bytes().to_vec();
        pattern.push(FrameKind::Mark as u8);
        let is_mark = |(index, candidate): (usize, &[u8])| {
            let (content, check) = candidate.split_at(MARK_BYTES - CHECK_BYTES);
            let own_offset = offset + index as u64;
            content.starts_with(&pattern)
                && content.ends_with(&own_offset.to_le_bytes())
                && self.check(content) == check
        };
        bytes.windows(MARK_BYTES).enumerate().any(is_mark)
    }
}

impl FrameKind {
    fn from_number(number: u8) -> Option<Self> {
        [Self::Record, Self::Opened, Self::Mark, Self::SnapshotPart]
            .into_iter()
            .find(|kind| *kind as u8 == number)
    }
}

impl Frame {
    /// Returns the decoded body.
    ///
    /// # Errors
    /// The check is right, but the body is not a `T`.
    pub(super) fn decode<T: DeserializeOwned>(&self) -> Result<T, Damage> {
        postcard::from_bytes(self.body()).map_err(|_| Damage {
            offset: self.offset,
            what: "the content of a record has an unknown form",
        })
    }

    fn body(&self) -> &[u8] {
        &self.raw[FRAME_HEAD_BYTES..self.raw.len() - CHECK_BYTES]
    }
}

impl FrameReader {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// The reason why the file is not usable.
    pub(super) fn open(mut source: StoredReader) -> Result<(Header, Self), HeaderError> {
        let fixed_part = source.read_exactly(MAGIC.len() as u64 + 8)?;
        let Some((magic, numbers)) = fixed_part.split_at_checked(MAGIC.len()) else {
            return Err(HeaderError::NotAJournal);
        };
        if magic != MAGIC {
            return Err(HeaderError::NotAJournal);
        }
        let (Some(version), Some(length)) =
            (read_u32(numbers), numbers.get(4..).and_then(read_u32))
        else {
            return Err(HeaderError::Damaged);
        };
        if version != FORMAT_VERSION {
            return Err(HeaderError::Version(version));
        }
        if length > HEADER_BYTES_MAX {
            return Err(HeaderError::Damaged);
        }
        let rest = source.read_exactly(u64::from(length) + CHECK_BYTES as u64)?;
        let Some((body, check)) = rest.split_at_checked(length as usize) else {
            return Err(HeaderError::Damaged);
        };
        let covered = [&fixed_part[..], body].concat();
        if FrameKey::of_headers().check(&covered) != check {
            return Err(HeaderError::Damaged);
        }
        let header = postcard::from_bytes(body).map_err(|_| HeaderError::Damaged)?;
        let offset = (covered.len() + CHECK_BYTES) as u64;
        let key = FrameKey::of_frames(&covered);
        Ok((
            header,
            Self {
                source,
                key,
                offset,
            },
        ))
    }

    pub(super) fn key(&self) -> &FrameKey {
        &self.key
    }

    /// Returns the place of the next frame.
    pub(super) fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the next frame, whatever its sequence number.
    ///
    /// # Errors
    /// The file cannot be read. Damaged content is not an error.
    pub(super) fn next(&mut self) -> io::Result<FrameStep> {
        let bad = |what| {
            let offset = self.offset;
            Ok(FrameStep::Bad(Damage { offset, what }))
        };
        let rest = self.source.len.saturating_sub(self.offset);
        if rest == 0 {
            return Ok(FrameStep::End);
        }
        let mut raw = self.source.read_exactly(FRAME_HEAD_BYTES as u64)?;
        let (Some(length), Some(kind), Some(sequence)) =
            (read_u32(&raw), raw.get(4).copied(), read_u64(&raw, 5))
        else {
            return bad("the file ends inside a record");
        };
        if u64::from(length) + FRAME_OVERHEAD > rest {
            return bad("a record is longer than the rest of the file");
        }
        let body_and_check = u64::from(length) + CHECK_BYTES as u64;
        raw.extend(self.source.read_exactly(body_and_check)?);
        let Some((content, check)) = raw.split_at_checked(FRAME_HEAD_BYTES + length as usize)
        else {
            return bad("the file ends inside a record");
        };
        if self.key.check(content) != check {
            return bad("the check of a record is wrong");
        }
        let Some(kind) = FrameKind::from_number(kind) else {
            return bad("a record has an unknown kind");
        };
        let offset = self.offset;
        self.offset += raw.len() as u64;
        Ok(FrameStep::Frame(Frame {
            kind,
            sequence,
            offset,
            raw,
        }))
    }
}

impl From<io::Error> for HeaderError {
    fn from(cause: io::Error) -> Self {
        Self::Io(cause)
    }
}

impl StoredReader {
    /// Reads `count` bytes, or fewer if the file ends earlier.
    fn read_exactly(&mut self, count: u64) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        (&mut self.source).take(count).read_to_end(&mut bytes)?;
        Ok(bytes)
    }
}

fn push_head(buffer: &mut Vec<u8>, kind: FrameKind, sequence: u64) {
    buffer.extend([0; 4]);
    buffer.push(kind as u8);
    buffer.extend(sequence.to_le_bytes());
}

fn read_u32(bytes: &[u8]) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.first_chunk()?))
}

fn read_u64(bytes: &[u8], offset: usize) -> Option<u64> {
    Some(u64::from_le_bytes(*bytes.get(offset..)?.first_chunk()?))
}
