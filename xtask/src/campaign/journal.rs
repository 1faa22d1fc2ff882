//! The journal of a campaign: a file with one line of JSON for each step that has ended.

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::Path;

/// The outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum StepOutcome {
    Passed,
    Failed,
    /// The machine lacks something that the step needs.
    Skipped,
}

/// The record of a step that has ended: one line of the journal.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct StepRecord {
    pub(super) step: String,
    pub(super) part: String,
    pub(super) outcome: StepOutcome,
    /// The reason of the outcome; empty if the step has passed.
    pub(super) why: String,
    pub(super) seconds: f64,
    pub(super) log: String,
}

/// The first line of a journal: the commit and the seed of the campaign.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct JournalHead {
    commit: String,
    seed: u64,
}

/// The journal of a campaign for one commit and one seed.
pub(super) struct Journal {
    pub(super) commit: String,
    pub(super) seed: u64,
    file: File,
    records: BTreeMap<String, StepRecord>,
}

impl Journal {
    /// Opens the journal in `folder`. Removes all its records if `fresh` is true, or if they belong
    /// to another commit or seed.
    ///
    /// # Errors
    /// The journal cannot be read or written.
    pub(super) fn open(folder: &Path, commit: &str, seed: u64, fresh: bool) -> Result<Journal> {
        let path = folder.join("journal.jsonl");
        let head = JournalHead {
            commit: commit.to_string(),
            seed,
        };
        let old = fs::read_to_string(&path).unwrap_or_default();
        let same = old
            .lines()
            .next()
            .and_then(|line| serde_json::from_str::<JournalHead>(line).ok())
            .is_some_and(|of| of == head);
        let goes_on = same && !fresh;
        let mut file = OpenOptions::new()
            .create(true)
            .write(true)
            .append(goes_on)
            .truncate(!goes_on)
            .open(&path)
            .with_context(|| path.display().to_string())?;
        let mut records = BTreeMap::new();
        if goes_on {
            // A line that is incomplete because of a crash is not a record, and is ignored.
            let lines = old.lines().skip(1);
            for record in lines.filter_map(|line| serde_json::from_str::<StepRecord>(line).ok()) {
                records.insert(record.step.clone(), record);
            }
            if !old.ends_with('\n') {
                writeln!(file)?;
            }
        } else {
            writeln!(file, "{}", serde_json::to_string(&head)?)?;
        }
        Ok(Journal {
            commit: head.commit,
            seed,
            file,
            records,
        })
    }

    /// True if the last run of a step in this campaign has passed.
    pub(super) fn has_passed(&self, step: &str) -> bool {
        self.last_record(step)
            .is_some_and(|record| record.outcome == StepOutcome::Passed)
    }

    /// Returns the record of a step's last run.
    pub(super) fn last_record(&self, step: &str) -> Option<&StepRecord> {
        self.records.get(step)
    }

    /// Appends a record to the journal.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn add(&mut self, record: StepRecord) -> Result<()> {
        writeln!(self.file, "{}", serde_json::to_string(&record)?)?;
        self.file.sync_data()?;
        self.records.insert(record.step.clone(), record);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(step: &str, outcome: StepOutcome) -> StepRecord {
        StepRecord {
            step: step.into(),
            part: "fuzz".into(),
            outcome,
            why: String::new(),
            seconds: 1.0,
            log: String::new(),
        }
    }

    /// A folder that the test removes at its end.
    struct Folder(std::path::PathBuf);

    impl Folder {
        fn new(name: &str) -> Folder {
            let name = format!("sempa-journal-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(&path).expect("a folder");
            Folder(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// A campaign that is started again skips steps that have passed, and runs failed ones again.
    #[test]
    fn journal_is_resumed() {
        let folder = Folder::new("resumed");
        let mut first = Journal::open(&folder.0, "abc", 1, false).expect("writable");
        first
            .add(record("a", StepOutcome::Passed))
            .expect("written");
        first
            .add(record("b", StepOutcome::Failed))
            .expect("written");
        drop(first);
        // Simulates a crash in the middle of a write: the last line is incomplete.
        let path = folder.0.join("journal.jsonl");
        let cut = fs::read_to_string(&path).expect("there") + "{\"step\": \"c\", \"pa";
        fs::write(&path, cut).expect("written");
        let mut second = Journal::open(&folder.0, "abc", 1, false).expect("readable");
        assert!(second.has_passed("a") && !second.has_passed("b") && !second.has_passed("c"));
        second
            .add(record("c", StepOutcome::Passed))
            .expect("written");
        drop(second);
        let third = Journal::open(&folder.0, "abc", 1, false).expect("readable");
        assert!(third.has_passed("a") && third.has_passed("c"));
    }

    /// Another commit, another seed or `--fresh` starts a new campaign.
    #[test]
    fn other_commit_or_seed_begins_anew() {
        for (commit, seed, fresh) in [("def", 1, false), ("abc", 2, false), ("abc", 1, true)] {
            let folder = Folder::new("anew");
            let mut first = Journal::open(&folder.0, "abc", 1, false).expect("writable");
            first
                .add(record("a", StepOutcome::Passed))
                .expect("written");
            drop(first);
            let second = Journal::open(&folder.0, commit, seed, fresh).expect("readable");
            assert!(!second.has_passed("a"));
        }
    }
}
