//! The journal of a session: records on the disk, from which the next broker restores the session.
//!
//! Each record has its length (4 bytes, little-endian) and 8 bytes of a digest before it. A record
//! that was written in part is at the end and is dropped.

use crate::args::Durability;
use anyhow::{Context, Result};
use ring::digest;
use sempa_broker_session::{Record, State};
use std::fs::{File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

const FILE_NAME: &str = "journal";
/// Length of the digest before a record.
const DIGEST_BYTES: usize = 8;
/// Length of what is before a record.
const HEAD_BYTES: usize = 4 + DIGEST_BYTES;
/// Size up to which a journal is never replaced by a snapshot.
const SNAPSHOT_BYTES_MIN: u64 = 8 << 20;
/// A snapshot replaces a journal that is this many times as large as the last snapshot.
const SNAPSHOT_RATIO: u64 = 4;

#[derive(Debug)]
pub(crate) struct Journal {
    folder: PathBuf,
    file: File,
    durability: Durability,
    buffer: Vec<u8>,
    byte_count: u64,
    snapshot_byte_count: u64,
    must_sync: bool,
}

fn encode_record(buffer: &mut Vec<u8>, record: &Record) -> Result<()> {
    let bytes = postcard::to_stdvec(record).context("a record cannot be encoded")?;
    let length = u32::try_from(bytes.len()).context("a record is too large")?;
    buffer.extend(length.to_le_bytes());
    let digest = digest::digest(&digest::SHA256, &bytes);
    buffer.extend(&digest.as_ref()[..DIGEST_BYTES]);
    buffer.extend(bytes);
    Ok(())
}

/// Returns the records of a journal and the length of its complete part.
fn decode_records(bytes: &[u8]) -> (Vec<Record>, usize) {
    let mut records = Vec::new();
    let mut position = 0;
    while let Some((record, length)) = decode_record(&bytes[position..]) {
        records.push(record);
        position += length;
    }
    (records, position)
}

fn decode_record(bytes: &[u8]) -> Option<(Record, usize)> {
    let (length_bytes, rest) = bytes.split_first_chunk::<4>()?;
    let length = usize::try_from(u32::from_le_bytes(*length_bytes)).ok()?;
    let (digest_bytes, rest) = rest.split_first_chunk::<DIGEST_BYTES>()?;
    let bytes = rest.get(..length)?;
    let digest = digest::digest(&digest::SHA256, bytes);
    if &digest.as_ref()[..DIGEST_BYTES] != digest_bytes {
        return None;
    }
    Some((postcard::from_bytes(bytes).ok()?, HEAD_BYTES + length))
}

impl Journal {
    /// Opens the journal in a folder. Returns the state if the journal has records.
    ///
    /// # Errors
    /// The file cannot be opened, read or cut to its complete part.
    pub(crate) fn open(folder: &Path, durability: Durability) -> Result<(Self, Option<State>)> {
        let path = folder.join(FILE_NAME);
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .mode(0o600)
            .open(&path)
            .with_context(|| format!("the journal {} cannot be opened", path.display()))?;
        let mut bytes = Vec::new();
        file.read_to_end(&mut bytes)
            .with_context(|| format!("the journal {} cannot be read", path.display()))?;
        let (records, complete_length) = decode_records(&bytes);
        file.set_len(complete_length as u64)?;
        sync_folder(folder)?;
        let journal = Self {
            folder: folder.to_path_buf(),
            file,
            durability,
            buffer: Vec::new(),
            byte_count: complete_length as u64,
            snapshot_byte_count: 0,
            must_sync: false,
        };
        let state = (!records.is_empty()).then(|| State::recover(records));
        Ok((journal, state))
    }

    /// Adds a record. [`Journal::commit`] writes it.
    pub(crate) fn add(&mut self, record: &Record) -> Result<()> {
        self.must_sync |= record.must_be_synced();
        encode_record(&mut self.buffer, record)
    }

    /// Writes the added records; all are on the disk on return if one of them must be.
    ///
    /// # Errors
    /// The disk is full or broken. The broker must not tell that it has taken anything since.
    pub(crate) fn commit(&mut self) -> Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        self.file
            .write_all(&self.buffer)
            .context("the journal cannot be written")?;
        self.byte_count += self.buffer.len() as u64;
        self.buffer.clear();
        if self.must_sync && self.durability == Durability::Sync {
            self.file
                .sync_data()
                .context("the journal cannot be forced to the disk")?;
        }
        self.must_sync = false;
        Ok(())
    }

    /// Replaces a journal that has grown by a snapshot of the state.
    ///
    /// # Errors
    /// The snapshot cannot be written; the journal is as before.
    pub(crate) fn compact(&mut self, state: &State) -> Result<()> {
        let threshold = SNAPSHOT_BYTES_MIN.max(self.snapshot_byte_count * SNAPSHOT_RATIO);
        if self.byte_count < threshold {
            return Ok(());
        }
        let mut bytes = Vec::new();
        encode_record(&mut bytes, &Record::Snapshot(Box::new(state.clone())))?;
        let new_path = self.folder.join("journal.new");
        let mut file = OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&new_path)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        std::fs::rename(&new_path, self.folder.join(FILE_NAME))?;
        sync_folder(&self.folder)?;
        self.file = file;
        self.byte_count = bytes.len() as u64;
        self.snapshot_byte_count = self.byte_count;
        Ok(())
    }
}

fn sync_folder(folder: &Path) -> Result<()> {
    File::open(folder)?.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_broker_session::{Millis, Output, Session, SessionEnd, Settings};

    fn records() -> Vec<Record> {
        let mut session = Session::new("x", Settings::default(), Millis(0));
        let mut records = Vec::new();
        while let Some(output) = session.poll() {
            if let Output::Record(record) = output {
                records.push(record);
            }
        }
        records.push(Record::Ending(SessionEnd::Idle));
        records
    }

    /// A journal whose last record was written in part, or whose bytes were damaged, keeps the
    /// records before, and new records come after these.
    #[test]
    fn damaged_ends_are_dropped() {
        let mut bytes = Vec::new();
        let mut ends = vec![0];
        for record in records() {
            encode_record(&mut bytes, &record).expect("encodes");
            ends.push(bytes.len());
        }
        for length in 0..=bytes.len() {
            let (decoded, complete) = decode_records(&bytes[..length]);
            let whole = ends.iter().filter(|end| **end <= length).count() - 1;
            assert_eq!((decoded.len(), complete), (whole, ends[whole]));
            assert_eq!(decoded, records()[..whole]);
        }
        let damaged_at = ends[1] + HEAD_BYTES;
        bytes[damaged_at] ^= 1;
        assert_eq!(decode_records(&bytes).0, records()[..1]);
    }

    /// What was committed is there after the journal is opened again, also after a snapshot.
    #[test]
    fn committed_records_survive() {
        let folder = tempfile::tempdir().expect("a folder");
        let (mut journal, state) = Journal::open(folder.path(), Durability::Sync).expect("opens");
        assert!(state.is_none());
        for record in records() {
            journal.add(&record).expect("added");
        }
        journal.commit().expect("written");
        let (mut journal, state) = Journal::open(folder.path(), Durability::Write).expect("opens");
        let state = state.expect("records");
        assert_eq!(
            (state.session(), state.end()),
            ("x", Some(SessionEnd::Idle))
        );
        journal.byte_count = SNAPSHOT_BYTES_MIN;
        journal.compact(&state).expect("a snapshot");
        let (_, restored) = Journal::open(folder.path(), Durability::Sync).expect("opens");
        assert_eq!(restored, Some(state));
    }
}
