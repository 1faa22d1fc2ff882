//! Whether the load watchers of the machine have read what `pvm owner` has written.

use super::status::daemon_name;
use crate::clock::unix_micros;
use crate::outcome::Outcome;
use crate::output::tables::process_count_text;
use pvm_load_watcher::host_daemons::{HostDaemon, daemons_without_watcher};
use pvm_load_watcher::status::{WatcherStatus, query_all_within};
use pvm_load_watcher::system::describe_clock;
use pvm_load_watcher::user_files::{FileContent, FileVersion, ReadFile};
use serde_json::json;
use std::io;
use std::time::{Duration, Instant};

/// Time for which a command waits until all load watchers have read what it has written.
const CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval at which the load watchers are asked.
const CONFIRMATION_POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Maximum time of one query. A load watcher that does not answer must not use up the time in which
/// another one reads the file.
const QUERY_TIMEOUT: Duration = Duration::from_secs(1);

/// The answers of load watchers, and an error sentence for each other one.
type WatcherAnswers = (Vec<WatcherStatus>, Vec<String>);

/// Which load watchers have reported that a written file is in force, and that their daemons have
/// received the directive that follows from it.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Confirmation {
    /// Load watchers that have read the file, as "virtual machine NAME of USER".
    pub(super) confirmed: Vec<String>,
    /// Sentences about load watchers that have not.
    pub(super) unconfirmed: Vec<String>,
    /// The clock of a load watcher that has answered; empty if none has.
    pub(super) clock: String,
}

impl Confirmation {
    /// Asks the load watchers of this host until all have read this version of the file, or know
    /// that the file was removed if `version` is `None`, but at most [`CONFIRMATION_TIMEOUT`].
    pub(super) fn wait(uid: u32, content: FileContent, version: Option<FileVersion>) -> Self {
        Self::wait_with(CONFIRMATION_TIMEOUT, query_all_within, |answers| {
            let (statuses, unanswered_lines) = answers;
            let pids: Vec<i32> = statuses.iter().map(|status| status.pid).collect();
            let mut confirmation =
                Self::from_answers(&statuses, unanswered_lines, uid, content, version);
            confirmation.add_unwatched(&daemons_without_watcher(&pids));
            confirmation
        })
    }

    /// Adds the virtual machines without a load watcher that answers: what is written does not
    /// reach them.
    fn add_unwatched(&mut self, daemons: &[HostDaemon]) {
        let sentence = |daemon: &HostDaemon| {
            let (name, count) = (daemon_name(daemon), daemon.task_processes.len());
            let count = process_count_text(u32::try_from(count).unwrap_or(u32::MAX));
            format!("no load watcher answers for the {name}, whose tasks are {count} here")
        };
        self.unconfirmed.extend(daemons.iter().map(sentence));
    }

    /// Returns the time by the clock to which hours refer, with its zone; `None` if no load watcher
    /// has reported it and this process has another clock.
    pub(super) fn clock(&self) -> Option<String> {
        if !self.clock.is_empty() {
            return Some(self.clock.clone());
        }
        let has_own_zone = std::env::var_os("TZ").is_some_and(|zone| !zone.is_empty());
        (!has_own_zone).then(|| describe_clock(unix_micros().0 / 1_000_000))
    }

    /// As [`Self::wait`], at most for `timeout`. `query` asks the load watchers within a time
    /// limit, and `judge` evaluates their answers.
    fn wait_with(
        timeout: Duration,
        mut query: impl FnMut(Duration) -> io::Result<WatcherAnswers>,
        judge: impl Fn(WatcherAnswers) -> Self,
    ) -> Self {
        let deadline = Instant::now() + timeout;
        let mut query_time = timeout;
        loop {
            let confirmation = match query(query_time.min(QUERY_TIMEOUT)) {
                Ok(answers) => judge(answers),
                Err(error) => Self {
                    confirmed: Vec::new(),
                    unconfirmed: vec![format!("load watchers cannot be found: {error}")],
                    clock: String::new(),
                },
            };
            if confirmation.unconfirmed.is_empty() {
                return confirmation;
            }
            std::thread::sleep(CONFIRMATION_POLL_INTERVAL);
            query_time = deadline.saturating_duration_since(Instant::now());
            // A query in the rest of the time would not reach the load watchers, and its result
            // would say less than the last one.
            if query_time < CONFIRMATION_POLL_INTERVAL {
                return confirmation;
            }
        }
    }

    fn from_answers(
        statuses: &[WatcherStatus],
        unanswered_lines: Vec<String>,
        uid: u32,
        content: FileContent,
        version: Option<FileVersion>,
    ) -> Self {
        let mut confirmation = Self {
            confirmed: Vec::new(),
            unconfirmed: unanswered_lines,
            clock: statuses
                .first()
                .map(|status| status.clock.clone())
                .unwrap_or_default(),
        };
        for status in statuses {
            let name = format!("virtual machine {} of {}", status.vm, status.user);
            let is_own = |file: &&ReadFile| file.uid == uid && file.content == content;
            let read_version = status
                .read_files
                .iter()
                .find(is_own)
                .map(|file| file.version);
            let directive_error = &status.directive_error;
            if read_version != version {
                let sentence = format!("the load watcher of {name} has not read it");
                confirmation.unconfirmed.push(sentence);
            } else if !directive_error.is_empty() {
                confirmation.unconfirmed.push(format!(
                    "the load watcher of {name} has read it, but its daemon has refused it: {directive_error}"
                ));
            } else {
                confirmation.confirmed.push(name);
            }
        }
        confirmation
    }

    /// True if there are load watchers and all have read the file.
    pub(super) fn is_complete(&self) -> bool {
        self.unconfirmed.is_empty() && !self.confirmed.is_empty()
    }

    /// Returns the outcome of a command that has written the file. `text` and `json` describe what
    /// was written.
    pub(super) fn outcome(self, mut text: String, mut json: serde_json::Value) -> Outcome {
        json["confirmed_by"] = json!(self.confirmed);
        for name in &self.confirmed {
            text.push_str(&format!("read by the load watcher of {name}\n"));
        }
        let failed = !self.is_complete();
        let mut errors: Vec<String> = self
            .unconfirmed
            .iter()
            .map(|line| format!("owner: {line}"))
            .collect();
        if failed {
            errors.push(match self.confirmed.is_empty() && self.unconfirmed.is_empty() {
                true => "owner: it is written, but no virtual machine uses this machine now, so nothing could confirm \
                         it; load watchers read it when they start"
                    .into(),
                false => "owner: it is written, but not confirmed: guests of that virtual machine may still run \
                          against it; 'owner status' shows more"
                    .into(),
            });
        }
        Outcome {
            errors,
            ..Outcome::with_json(text, json, failed)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn confirmed_by(name: &str) -> Confirmation {
        Confirmation {
            confirmed: vec![name.into()],
            ..Confirmation::default()
        }
    }

    /// The command succeeds only if every load watcher of the machine has read the new version.
    #[test]
    fn success_needs_confirmation_of_all_watchers() {
        let version = |inode| FileVersion {
            inode,
            changed_ns: 1,
        };
        let status = |vm: &str, read_version: Option<FileVersion>| WatcherStatus {
            vm: vm.into(),
            user: "alice".into(),
            read_files: read_version
                .map(|read_version| ReadFile::new(7, FileContent::Override, read_version))
                .into_iter()
                .chain([ReadFile::new(7, FileContent::Policy, version(5))])
                .chain([ReadFile::new(8, FileContent::Override, version(5))])
                .collect(),
            ..WatcherStatus::default()
        };
        let confirm = |statuses: &[WatcherStatus], lines: &[&str], version| {
            let lines = lines.iter().map(|line| line.to_string()).collect();
            Confirmation::from_answers(statuses, lines, 7, FileContent::Override, version)
        };
        let new = Some(version(2));
        let read = confirm(&[status("a", new)], &[], new);
        assert_eq!(read, confirmed_by("virtual machine a of alice"));
        assert!(read.is_complete());
        assert!(
            !confirm(&[status("a", new), status("b", Some(version(1)))], &[], new).is_complete()
        );
        assert!(!confirm(&[status("a", new)], &["silent"], new).is_complete());
        assert!(!confirm(&[status("a", new)], &[], None).is_complete());
        assert!(confirm(&[status("a", None)], &[], None).is_complete());
        assert!(!confirm(&[], &[], new).is_complete());
        for version in [new, None] {
            let refused = WatcherStatus {
                directive_error: "not allowed".into(),
                ..status("a", version)
            };
            let confirmation = confirm(&[status("b", version), refused], &[], version);
            assert_eq!(confirmation.confirmed, ["virtual machine b of alice"]);
            let line = &confirmation.unconfirmed[..];
            assert!(line[0].contains("a of alice has read it, but"), "{line:?}");
        }
    }

    /// A virtual machine whose load watcher does not answer is named with what runs in it.
    #[test]
    fn daemon_without_watcher_prevents_success() {
        let mut confirmation = confirmed_by("virtual machine a of alice");
        confirmation.add_unwatched(&[HostDaemon {
            pid: 17,
            uid: 0,
            task_processes: vec![(18, "worker".into())],
        }]);
        assert!(!confirmation.is_complete());
        let line = &confirmation.unconfirmed[0];
        assert!(
            line.contains("virtual machine of root, daemon process 17")
                && line.contains("1 process here"),
            "{line}"
        );
    }

    fn unconfirmed_by(name: &str) -> Confirmation {
        Confirmation {
            unconfirmed: vec![name.into()],
            ..Confirmation::default()
        }
    }

    /// A load watcher that has not read the file is named when the time is over. A query without
    /// time would find no load watcher, which must not be reported as if none ran.
    #[test]
    fn last_answer_counts_when_time_is_over() {
        let timeout = 4 * CONFIRMATION_POLL_INTERVAL;
        let mut query_count = 0;
        let query = |time: Duration| {
            query_count += 1;
            assert!(!time.is_zero() && time <= timeout, "{time:?}");
            Ok((vec![WatcherStatus::default()], Vec::new()))
        };
        let confirmation = Confirmation::wait_with(timeout, query, |(statuses, _)| {
            assert_eq!(statuses.len(), 1);
            unconfirmed_by("a")
        });
        assert_eq!(confirmation, unconfirmed_by("a"));
        assert!((1..=4).contains(&query_count), "{query_count}");
    }

    /// The load watchers are asked again until all have read the file. A silent one leaves time for
    /// that.
    #[test]
    fn watchers_are_asked_until_all_have_read() {
        let mut query_count = 0;
        let query = |time| {
            assert!(time <= QUERY_TIMEOUT, "{time:?}");
            query_count += 1;
            match query_count {
                1 => Err(io::Error::other("no list")),
                2 => Ok((Vec::new(), vec!["silent".to_string()])),
                _ => Ok((vec![WatcherStatus::default()], Vec::new())),
            }
        };
        // The limit is much longer than the test takes.
        let timeout = Duration::from_secs(60);
        let confirmation = Confirmation::wait_with(timeout, query, |(statuses, lines)| {
            match statuses.is_empty() {
                true => unconfirmed_by(&lines[0]),
                false => confirmed_by("a"),
            }
        });
        assert_eq!(confirmation, confirmed_by("a"));
        assert_eq!(query_count, 3);
    }

    /// What is not confirmed is an error that says what was written and what that means.
    #[test]
    fn unconfirmed_directive_is_an_error() {
        let outcome_of = |confirmation: Confirmation| {
            confirmation.outcome("your directives: here\n".into(), json!({}))
        };
        let outcome = outcome_of(confirmed_by("virtual machine pvm of alice"));
        assert!(!outcome.failed && outcome.errors.is_empty());
        assert!(
            outcome
                .text
                .ends_with("read by the load watcher of virtual machine pvm of alice\n")
        );
        let outcome = outcome_of(Confirmation::default());
        assert!(outcome.failed && outcome.text == "your directives: here\n");
        assert!(outcome.errors[0].contains("no virtual machine uses this machine now"));
        let unconfirmed = vec!["the load watcher at x does not answer".to_string()];
        let outcome = outcome_of(Confirmation {
            unconfirmed,
            ..Confirmation::default()
        });
        assert!(outcome.failed && outcome.errors.len() == 2);
        assert!(outcome.errors[1].contains("may still run against it"));
    }
}
