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
    /// The step could not run, because the machine lacks something that the step needs.
    Skipped,
}

/// The record of a step that has ended: one line of the journal.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct StepRecord {
    pub(super) step: String,
    pub(super) part: String,
    pub(super) outcome: StepOutcome,
    /// The reason for the outcome; empty if the step has passed.
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
    /// Opens the journal in `folder`. Starts an empty journal if `restarts` is true, or if the
    /// existing journal belongs to another commit or seed.
    ///
    /// # Errors
    /// The journal cannot be read or written.
    pub(super) fn open(folder: &Path, commit: &str, seed: u64, restarts: bool) -> Result<Self> {
        let path = folder.join("journal.jsonl");
        let journal_head = JournalHead {
            commit: commit.to_string(),
            seed,
        };
        let old_text = fs::read_to_string(&path).unwrap_or_default();
        let is_same_campaign = old_text
            .lines()
            .next()
            .and_then(|line| serde_json::from_str::<JournalHead>(line).ok())
            .is_some_and(|old_head| old_head == journal_head);
        let continues = is_same_campaign && !restarts;
        let mut file = OpenOptions::new()
            .create(true)
            .write(true)
            .append(continues)
            .truncate(!continues)
            .open(&path)
            .with_context(|| path.display().to_string())?;
        let mut records = BTreeMap::new();
        if continues {
            // A line that is incomplete because of a crash is ignored.
            let lines = old_text.lines().skip(1);
            for record in lines.filter_map(|line| serde_json::from_str::<StepRecord>(line).ok()) {
                records.insert(record.step.clone(), record);
            }
            if !old_text.ends_with('\n') {
                writeln!(file)?;
            }
        } else {
            writeln!(file, "{}", serde_json::to_string(&journal_head)?)?;
        }
        Ok(Self {
            commit: journal_head.commit,
            seed,
            file,
            records,
        })
    }

    /// True if the last run of the step has passed.
    pub(super) fn has_passed(&self, step: &str) -> bool {
        self.last_record(step)
            .is_some_and(|record| record.outcome == StepOutcome::Passed)
    }

    /// Returns the record of the last run of a step; `None` if the step has not run.
    pub(super) fn last_record(&self, step: &str) -> Option<&StepRecord> {
        self.records.get(step)
    }

    /// Appends a record to the journal.
    ///
    /// # Errors
    /// The file cannot be written.
    pub(super) fn append(&mut self, record: StepRecord) -> Result<()> {
        writeln!(self.file, "{}", serde_json::to_string(&record)?)?;
        self.file.sync_data()?;
        self.records.insert(record.step.clone(), record);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn step_record(step: &str, outcome: StepOutcome) -> StepRecord {
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
    struct TestFolder(std::path::PathBuf);

    impl TestFolder {
        fn new(name: &str) -> Self {
            let name = format!("sempa-journal-{name}-{}", std::process::id());
            let path = std::env::temp_dir().join(name);
            fs::create_dir_all(&path).expect("a folder");
            Self(path)
        }
    }

    impl Drop for TestFolder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// A step that has passed is not run again. A failed step is run again.
    #[test]
    fn journal_is_resumed() {
        let folder = TestFolder::new("resumed");
        let mut first_journal = Journal::open(&folder.0, "abc", 1, false).expect("writable");
        first_journal
            .append(step_record("a", StepOutcome::Passed))
            .expect("written");
        first_journal
            .append(step_record("b", StepOutcome::Failed))
            .expect("written");
        drop(first_journal);
        // The last line is incomplete, as after a crash during a write.
        let path = folder.0.join("journal.jsonl");
        let damaged_text = fs::read_to_string(&path).expect("there") + "{\"step\": \"c\", \"pa";
        fs::write(&path, damaged_text).expect("written");
        let mut second_journal = Journal::open(&folder.0, "abc", 1, false).expect("readable");
        assert!(
            second_journal.has_passed("a")
                && !second_journal.has_passed("b")
                && !second_journal.has_passed("c")
        );
        second_journal
            .append(step_record("c", StepOutcome::Passed))
            .expect("written");
        drop(second_journal);
        let third_journal = Journal::open(&folder.0, "abc", 1, false).expect("readable");
        assert!(third_journal.has_passed("a") && third_journal.has_passed("c"));
    }

    /// Another commit, another seed or `--fresh` starts a new campaign.
    #[test]
    fn other_commit_or_seed_begins_anew() {
        for (commit, seed, restarts) in [("def", 1, false), ("abc", 2, false), ("abc", 1, true)] {
            let folder = TestFolder::new("restarted");
            let mut first_journal = Journal::open(&folder.0, "abc", 1, false).expect("writable");
            first_journal
                .append(step_record("a", StepOutcome::Passed))
                .expect("written");
            drop(first_journal);
            let second_journal =
                Journal::open(&folder.0, commit, seed, restarts).expect("readable");
            assert!(!second_journal.has_passed("a"));
        }
    }
}
