//! A record of what the resource manager was told, so that the same can be decided again under another policy.
//!
//! The file: a line with the version, then records, each its length as four bytes, low one first, and an [`Entry`] in
//! postcard. It grows to [`RECORD_BYTES_MAX`] and then no further. A record that is cut short, because its writer was
//! killed, ends the file.

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

/// A record grows no further.
pub const RECORD_BYTES_MAX: u64 = 256 << 20;
/// Version of the format beside that of the records it carries.
const VERSION: u16 = 3;

/// Something that the resource manager was told. New kinds come last, so that older records can be read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Input {
    /// The policy in force from now on.
    Policy(Conduct),
    /// The hosts there are from now on.
    Hosts(HostTable),
    /// A load watcher's report, and how many tasks of ours were on its host.
    Report {
        /// It.
        report: LoadReport,
        /// Tasks of ours.
        own: u32,
    },
    /// A spawn was asked for.
    Spawn {
        /// Who asks, and the wait id.
        number: (Tid, i32),
        /// The host of the task that asks.
        caller: HostId,
        /// Its user.
        user: u32,
        /// Its job.
        job: Tid,
        /// What it wants.
        request: SpawnRequest,
    },
    /// It was answered: the tasks that were started.
    Started {
        /// Who asked, and the wait id.
        number: (Tid, i32),
        /// The tasks.
        tids: Vec<Tid>,
    },
    /// A task ended.
    Ended {
        /// The task.
        tid: Tid,
        /// What it used.
        used: Usage,
    },
    /// A host is to be emptied, or may take tasks again.
    Drain {
        /// The host's name.
        host: String,
        /// Who asked for it.
        by: Tid,
        /// False: it may take tasks again.
        begun: bool,
        /// It is to be empty within this time.
        within: Option<Micros>,
    },
    /// What the administrator says of hosts, by their names.
    Labels(BTreeMap<String, BTreeMap<String, String>>),
}

impl Input {
    /// These labels; `None` when nothing is said of any host.
    pub fn labels(labels: &Labels) -> Option<Input> {
        let of_hosts = labels
            .iter()
            .map(|(host, of_host)| (host.clone(), BTreeMap::clone(of_host)));
        (!labels.is_empty()).then(|| Input::Labels(of_hosts.collect()))
    }
}

/// A record.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// When, on the resource manager's clock.
    pub at: Micros,
    /// What.
    pub input: Input,
}

/// What can go wrong with a record.
#[derive(Debug, Error)]
pub enum RecordError {
    /// The file cannot be made, read or written.
    #[error("{path}: {source}")]
    File {
        /// It.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is none.
    #[error(
        "{path} is no record of this version of pvm-rm: it begins with {found:?} and not with {wanted:?}"
    )]
    Foreign {
        /// The file.
        path: PathBuf,
        /// What it begins with.
        found: String,
        /// What ours begin with.
        wanted: String,
    },
    /// A record in it is damaged.
    #[error("{path}: the record at byte {at} is damaged: {why}")]
    Damaged {
        /// The file.
        path: PathBuf,
        /// Where.
        at: usize,
        /// Why.
        why: String,
    },
}

fn first_line() -> String {
    format!("sempa resource manager record {VERSION}.{WIRE_VERSION}\n")
}

/// A record that is being written.
#[derive(Debug)]
pub struct Recorder {
    file: File,
    bytes: u64,
    bytes_max: u64,
}

impl Recorder {
    /// Begins one. A file that is there, perhaps of a resource manager that has died, gets `.before` behind its name.
    ///
    /// # Errors
    /// When it cannot be written.
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

    /// The same with a limit of its own.
    ///
    /// # Errors
    /// When it cannot be written.
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

    /// Writes an entry down. Answers why nothing more is written, when that is so from now on.
    pub fn put(&mut self, at: Micros, input: Input) -> Option<String> {
        let entry = to_bytes(&Entry { at, input }).ok()?;
        let length = u32::try_from(entry.len()).ok()?;
        let bytes = [&length.to_le_bytes()[..], &entry].concat();
        self.bytes += bytes.len() as u64;
        if self.bytes > self.bytes_max {
            return Some(format!(
                "the record has {} bytes and grows no further",
                self.bytes_max
            ));
        }
        self.file
            .write_all(&bytes)
            .err()
            .map(|error| format!("the record cannot be written: {error}"))
    }
}

/// Reads a record.
///
/// # Errors
/// It is none, or damaged elsewhere than at its end.
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

    #[test]
    fn a_record_is_read_as_it_was_written_also_when_its_end_is_cut_off() {
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

    #[test]
    fn inputs_keep_their_numbers_so_that_older_records_are_read() {
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

    #[test]
    fn a_foreign_file_and_a_damaged_record_are_named_and_the_limit_is_kept() {
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
        assert!(told.is_some_and(|text| text.contains("grows no further")));
        assert!(path.metadata().expect("it is there").len() <= 100);
    }
}
