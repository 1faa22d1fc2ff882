//! Records the input of the resource manager in a file, so that the same input can be replayed
//! under another policy.
//!
//! The file starts with a text line that contains the version. The records follow. Each record
//! consists of a length (four bytes, little-endian) and a [`RecordingEntry`] in postcard. The
//! maximum size of the file is [`RECORDING_BYTES_MAX`]. A truncated record counts as the end of the
//! file, because its writer may have been killed.

use crate::model::HostLabels;
use crate::policy::EffectivePolicy;
use sempa_proto::frame::{from_bytes, to_bytes};
use sempa_proto::load::LoadReport;
use sempa_proto::migration::Usage;
use sempa_proto::table::HostTable;
use sempa_proto::task::SpawnRequest;
use sempa_proto::{HostId, Micros, Tid, WIRE_VERSION};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use thiserror::Error;

/// Maximum size of a recording in bytes.
pub const RECORDING_BYTES_MAX: u64 = 256 << 20;
/// Version of the file format. The first line also contains the version of the wire format, in
/// which hosts, reports and requests are recorded.
const FORMAT_VERSION: u16 = 3;

/// One input of the resource manager. New variants must be added at the end, so that older
/// recordings can be read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RecordedInput {
    /// A policy comes into force.
    Policy(EffectivePolicy),
    /// The host table has changed.
    Hosts(HostTable),
    /// A load watcher's report.
    Report {
        report: LoadReport,
        /// Number of tasks of the virtual machine on the watcher's host that are part of its load.
        vm_task_count: u32,
    },
    /// A spawn was requested.
    Spawn {
        /// Requesting task and wait id.
        request_id: (Tid, i32),
        /// Host of the requesting task.
        caller_host: HostId,
        user: u32,
        job: Tid,
        request: SpawnRequest,
    },
    /// A spawn was answered. `tids`: the started tasks.
    SpawnAnswered {
        /// Requesting task and wait id.
        request_id: (Tid, i32),
        tids: Vec<Tid>,
    },
    /// A task has ended, with the processor time and memory that it used.
    TaskEnded { tid: Tid, usage: Usage },
    /// The drain of a host begins or ends.
    Drain {
        host: String,
        /// Task that requested the start or the end of the drain.
        requester: Tid,
        /// True at the start of the drain, false at its end.
        is_start: bool,
        /// Time from the start of the drain until its deadline; `None` without a deadline.
        time_until_deadline: Option<Micros>,
    },
    /// Labels that the administrator gave the hosts, by host name.
    Labels(BTreeMap<String, BTreeMap<String, String>>),
}

impl RecordedInput {
    /// Returns the input for these labels; `None` if no host has labels.
    pub fn labels(labels: &HostLabels) -> Option<Self> {
        let labels_by_host = labels
            .iter()
            .map(|(host, host_labels)| (host.clone(), BTreeMap::clone(host_labels)));
        (!labels.is_empty()).then(|| Self::Labels(labels_by_host.collect()))
    }
}

/// One record of a recording.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RecordingEntry {
    /// Time of the input on the resource manager's clock.
    pub at: Micros,
    pub input: RecordedInput,
}

/// Error of reading or writing a recording.
#[derive(Debug, Error)]
pub enum RecordingError {
    /// The file cannot be created, read or written.
    #[error("{path}: {source}")]
    File {
        path: PathBuf,
        source: std::io::Error,
    },
    /// The file is not a recording of this version.
    #[error(
        "{path} is not a recording of this version of pvm-rm: it begins with {found:?} instead of {wanted:?}"
    )]
    NotARecording {
        path: PathBuf,
        /// Actual start of the file, at most as long as `wanted`.
        found: String,
        /// First line of a valid recording.
        wanted: String,
    },
    /// A record in the file cannot be decoded.
    #[error("{path}: the record at byte {at} is damaged: {why}")]
    Damaged {
        path: PathBuf,
        /// Byte offset of the record.
        at: usize,
        why: String,
    },
}

fn header_line() -> String {
    format!("sempa resource manager record {FORMAT_VERSION}.{WIRE_VERSION}\n")
}

/// A recording that is being written.
#[derive(Debug)]
pub struct Recorder {
    file: File,
    written_bytes: u64,
    bytes_max: u64,
}

impl Recorder {
    /// Creates a recording. An existing file is renamed with the suffix `.before`, because it may
    /// be the recording of a resource manager that was killed.
    ///
    /// # Errors
    ///
    /// The existing file cannot be renamed, or the new file cannot be written.
    pub fn create(path: &Path) -> Result<Self, RecordingError> {
        let mut renamed_path = path.as_os_str().to_os_string();
        renamed_path.push(".before");
        match std::fs::rename(path, renamed_path) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(RecordingError::File {
                    path: path.to_path_buf(),
                    source,
                });
            }
            _ => {}
        }
        Self::create_with_limit(path, RECORDING_BYTES_MAX)
    }

    /// Creates a recording with another maximum size. An existing file is overwritten.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn create_with_limit(path: &Path, bytes_max: u64) -> Result<Self, RecordingError> {
        let file_error = |source| RecordingError::File {
            path: path.to_path_buf(),
            source,
        };
        let mut options = OpenOptions::new();
        let mut file = options
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)
            .map_err(file_error)?;
        let header = header_line();
        file.write_all(header.as_bytes()).map_err(file_error)?;
        Ok(Self {
            file,
            written_bytes: header.len() as u64,
            bytes_max,
        })
    }

    /// Appends an entry. Returns a text if the recording ends here, because the file is full or
    /// cannot be written; otherwise `None`.
    pub fn append(&mut self, at: Micros, input: RecordedInput) -> Option<String> {
        let entry = to_bytes(&RecordingEntry { at, input }).ok()?;
        let length = u32::try_from(entry.len()).ok()?;
        let bytes = [&length.to_le_bytes()[..], &entry].concat();
        self.written_bytes += bytes.len() as u64;
        if self.written_bytes > self.bytes_max {
            return Some(format!(
                "the recording has reached its limit of {} bytes and ends here",
                self.bytes_max
            ));
        }
        self.file
            .write_all(&bytes)
            .err()
            .map(|error| format!("the record cannot be written: {error}"))
    }
}

/// Reads a recording. A truncated record at the end is ignored.
///
/// # Errors
/// The file cannot be read, is not a recording, or contains a damaged record.
pub fn read(path: &Path) -> Result<Vec<RecordingEntry>, RecordingError> {
    let bytes = std::fs::read(path).map_err(|source| RecordingError::File {
        path: path.to_path_buf(),
        source,
    })?;
    let expected_line = header_line();
    let Some(mut rest) = bytes.strip_prefix(expected_line.as_bytes()) else {
        let actual_line =
            String::from_utf8_lossy(&bytes[..bytes.len().min(expected_line.len())]).into_owned();
        return Err(RecordingError::NotARecording {
            path: path.to_path_buf(),
            found: actual_line,
            wanted: expected_line,
        });
    };
    let mut entries = Vec::new();
    while let Some((length, tail)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let Some((entry, tail)) = tail.split_at_checked(length) else {
            break;
        };
        let damage_error = |why: String| RecordingError::Damaged {
            path: path.to_path_buf(),
            at: bytes.len() - rest.len(),
            why,
        };
        entries.push(from_bytes(entry).map_err(|error| damage_error(error.to_string()))?);
        rest = tail;
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task_end(n: u32) -> RecordedInput {
        RecordedInput::TaskEnded {
            tid: Tid::from_raw(0x40000 + n as i32),
            usage: Usage::default(),
        }
    }

    /// A complete recording is read as it was written. A truncated recording is read up to the last
    /// complete record. A new recording renames the existing file.
    #[test]
    fn truncated_recording_is_read_up_to_the_cut() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("record");
        let mut recorder = Recorder::create(&path).expect("it can be written");
        for n in 1..=3 {
            assert_eq!(recorder.append(Micros(u64::from(n)), task_end(n)), None);
        }
        let complete_entries = read(&path).expect("a record");
        assert_eq!(
            complete_entries
                .iter()
                .map(|e| e.input.clone())
                .collect::<Vec<_>>(),
            [task_end(1), task_end(2), task_end(3)]
        );
        let bytes = std::fs::read(&path).expect("it is there");
        std::fs::write(&path, &bytes[..bytes.len() - 1]).expect("it can be written");
        assert_eq!(read(&path).expect("a record")[..], complete_entries[..2]);
        drop(Recorder::create(&path).expect("it can be written"));
        assert_eq!(read(&path).expect("a record"), []);
        assert_eq!(
            read(&dir.path().join("record.before")).expect("the former one")[..],
            complete_entries[..2]
        );
    }

    /// Variants keep their numbers, so that older recordings can be read.
    #[test]
    fn input_variants_keep_their_numbers() {
        let variant_number = |input: &RecordedInput| to_bytes(input).expect("it can be written")[0];
        let drain = RecordedInput::Drain {
            host: "h2".into(),
            requester: Tid::NONE,
            is_start: true,
            time_until_deadline: None,
        };
        let inputs = [
            RecordedInput::Policy(EffectivePolicy::default()),
            task_end(1),
            drain,
            RecordedInput::Labels(BTreeMap::new()),
        ];
        assert_eq!(inputs.each_ref().map(variant_number), [0, 5, 6, 7]);
    }

    /// A file that is not a recording and a damaged record cause errors. A recording does not
    /// exceed its maximum size.
    #[test]
    fn unreadable_files_fail_and_size_limit_holds() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("record");
        std::fs::write(&path, "#!/bin/sh\n").expect("it can be written");
        assert!(matches!(
            read(&path),
            Err(RecordingError::NotARecording { .. })
        ));
        std::fs::write(
            &path,
            [header_line().as_bytes(), &[1, 0, 0, 0, 0xff, 9]].concat(),
        )
        .expect("it can be written");
        assert!(matches!(read(&path), Err(RecordingError::Damaged { .. })));
        let mut recorder = Recorder::create_with_limit(&path, 100).expect("it can be written");
        let end_text = (0..100).find_map(|n| recorder.append(Micros(0), task_end(n)));
        assert!(end_text.is_some_and(|text| text.contains("has reached its limit")));
        assert!(path.metadata().expect("it is there").len() <= 100);
    }
}
