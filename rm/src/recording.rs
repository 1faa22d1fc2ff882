//! A recording of the resource manager's input, so that the same input can be decided again under
//! another policy.
//!
//! The file starts with a line that contains the version. Records follow: the length as four bytes,
//! little-endian, and an [`Entry`] in postcard. The file grows to [`RECORD_BYTES_MAX`] at most. A
//! truncated record, whose writer was killed, ends the file.

use crate::model::Labels;
use crate::policy::Conduct;
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
pub const RECORD_BYTES_MAX: u64 = 256 << 20;
/// Version of the format, in addition to that of the records in it.
const VERSION: u16 = 3;

/// One input of the resource manager. New variants must be added at the end, so that older
/// recordings can be read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Input {
    /// The policy in force from now on.
    Policy(Conduct),
    /// The host table from now on.
    Hosts(HostTable),
    /// A load watcher's report.
    Report {
        report: LoadReport,
        /// Number of own tasks on the watcher's host.
        own: u32,
    },
    /// A spawn was requested.
    Spawn {
        /// Requesting task and wait id.
        number: (Tid, i32),
        /// Host of the requesting task.
        caller: HostId,
        user: u32,
        job: Tid,
        request: SpawnRequest,
    },
    /// A spawn was answered with these tasks.
    Started {
        /// Requesting task and wait id.
        number: (Tid, i32),
        tids: Vec<Tid>,
    },
    /// A task has ended.
    Ended { tid: Tid, used: Usage },
    /// The drain of a host begins or ends.
    Drain {
        host: String,
        /// Task that requested it.
        by: Tid,
        /// False at the end of the drain.
        begun: bool,
        /// Time within which the host must be empty.
        within: Option<Micros>,
    },
    /// Labels that the administrator gave the hosts, by host name.
    Labels(BTreeMap<String, BTreeMap<String, String>>),
}

impl Input {
    /// Returns the input for these labels; `None` if there are none.
    pub fn labels(labels: &Labels) -> Option<Input> {
        let of_hosts = labels
            .iter()
            .map(|(host, of_host)| (host.clone(), BTreeMap::clone(of_host)));
        (!labels.is_empty()).then(|| Input::Labels(of_hosts.collect()))
    }
}

/// One record of a recording.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Time on the resource manager's clock.
    pub at: Micros,
    pub input: Input,
}

/// Error of reading or writing a recording.
#[derive(Debug, Error)]
pub enum RecordError {
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
    Foreign {
        path: PathBuf,
        /// Actual first line, as far as it was read.
        found: String,
        /// First line of a valid recording.
        wanted: String,
    },
    /// A record in the file is damaged.
    #[error("{path}: the record at byte {at} is damaged: {why}")]
    Damaged {
        path: PathBuf,
        /// Byte offset of the record.
        at: usize,
        why: String,
    },
}

fn first_line() -> String {
    format!("sempa resource manager record {VERSION}.{WIRE_VERSION}\n")
}

/// A recording that is being written.
#[derive(Debug)]
pub struct Recorder {
    file: File,
    bytes: u64,
    bytes_max: u64,
}

impl Recorder {
    /// Starts a recording. An existing file, for example of a resource manager that died, is
    /// renamed with the suffix `.before`.
    ///
    /// # Errors
    /// The file cannot be renamed or written.
    pub fn create(path: &Path) -> Result<Recorder, RecordError> {
        let mut before = path.as_os_str().to_os_string();
        before.push(".before");
        match std::fs::rename(path, before) {
            Err(source) if source.kind() != std::io::ErrorKind::NotFound => {
                return Err(RecordError::File {
                    path: path.to_path_buf(),
                    source,
                });
            }
            _ => {}
        }
        Recorder::with_limit(path, RECORD_BYTES_MAX)
    }

    /// Starts a recording with another maximum size.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn with_limit(path: &Path, bytes_max: u64) -> Result<Recorder, RecordError> {
        let failed = |source| RecordError::File {
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
            .map_err(failed)?;
        let first = first_line();
        file.write_all(first.as_bytes()).map_err(failed)?;
        Ok(Recorder {
            file,
            bytes: first.len() as u64,
            bytes_max,
        })
    }

    /// Appends an entry. Returns why nothing can be written from now on, if so.
    pub fn put(&mut self, at: Micros, input: Input) -> Option<String> {
        let entry = to_bytes(&Entry { at, input }).ok()?;
        let length = u32::try_from(entry.len()).ok()?;
        let bytes = [&length.to_le_bytes()[..], &entry].concat();
        self.bytes += bytes.len() as u64;
        if self.bytes > self.bytes_max {
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

/// Reads a recording.
///
/// # Errors
/// The file is not a recording, or is damaged elsewhere than at its end.
pub fn read(path: &Path) -> Result<Vec<Entry>, RecordError> {
    let bytes = std::fs::read(path).map_err(|source| RecordError::File {
        path: path.to_path_buf(),
        source,
    })?;
    let wanted = first_line();
    let Some(mut rest) = bytes.strip_prefix(wanted.as_bytes()) else {
        let found = String::from_utf8_lossy(&bytes[..bytes.len().min(wanted.len())]).into_owned();
        return Err(RecordError::Foreign {
            path: path.to_path_buf(),
            found,
            wanted,
        });
    };
    let mut entries = Vec::new();
    while let Some((length, behind)) = rest.split_first_chunk::<4>() {
        let length = u32::from_le_bytes(*length) as usize;
        let Some((entry, behind)) = behind.split_at_checked(length) else {
            break;
        };
        let damaged = |why: String| RecordError::Damaged {
            path: path.to_path_buf(),
            at: bytes.len() - rest.len(),
            why,
        };
        entries.push(from_bytes(entry).map_err(|error| damaged(error.to_string()))?);
        rest = behind;
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ended(n: u32) -> Input {
        Input::Ended {
            tid: Tid::from_raw(0x40000 + n as i32),
            used: Usage::default(),
        }
    }

    /// A recording is read as it was written, and a truncated one up to the last complete record.
    #[test]
    fn truncated_recording_is_read_up_to_the_cut() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("record");
        let mut recorder = Recorder::create(&path).expect("it can be written");
        for n in 1..=3 {
            assert_eq!(recorder.put(Micros(u64::from(n)), ended(n)), None);
        }
        let whole = read(&path).expect("a record");
        assert_eq!(
            whole.iter().map(|e| e.input.clone()).collect::<Vec<_>>(),
            [ended(1), ended(2), ended(3)]
        );
        let bytes = std::fs::read(&path).expect("it is there");
        std::fs::write(&path, &bytes[..bytes.len() - 1]).expect("it can be written");
        assert_eq!(read(&path).expect("a record")[..], whole[..2]);
        drop(Recorder::create(&path).expect("it can be written"));
        assert_eq!(read(&path).expect("a record"), []);
        assert_eq!(
            read(&dir.path().join("record.before")).expect("the former one")[..],
            whole[..2]
        );
    }

    /// Variants keep their numbers, so that older recordings can be read.
    #[test]
    fn input_variants_keep_their_numbers() {
        let number = |input: &Input| to_bytes(input).expect("it can be written")[0];
        let drain = Input::Drain {
            host: "h2".into(),
            by: Tid::NONE,
            begun: true,
            within: None,
        };
        let all = [
            Input::Policy(Conduct::default()),
            ended(1),
            drain,
            Input::Labels(BTreeMap::new()),
        ];
        assert_eq!(all.each_ref().map(number), [0, 5, 6, 7]);
    }

    /// A foreign file and a damaged record are reported, and the maximum size is kept.
    #[test]
    fn foreign_and_damaged_files_fail_and_limit_holds() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("record");
        std::fs::write(&path, "#!/bin/sh\n").expect("it can be written");
        assert!(matches!(read(&path), Err(RecordError::Foreign { .. })));
        std::fs::write(
            &path,
            [first_line().as_bytes(), &[1, 0, 0, 0, 0xff, 9]].concat(),
        )
        .expect("it can be written");
        assert!(matches!(read(&path), Err(RecordError::Damaged { .. })));
        let mut recorder = Recorder::with_limit(&path, 100).expect("it can be written");
        let told = (0..100).find_map(|n| recorder.put(Micros(0), ended(n)));
        assert!(told.is_some_and(|text| text.contains("has reached its limit")));
        assert!(path.metadata().expect("it is there").len() <= 100);
    }
}
