//! Handles the end of an owner agent: a task that directs the guests of this host on behalf of its
//! owner.
//!
//! An owner agent is the host's load watcher or a program of the user. When it ends, its last
//! directive stays in force:
//!
//! 1. For [`SPEAKER_TIME`] nothing changes: paused guests stay paused, because the owner may still
//!    be present.
//! 2. Within this time the resource manager restarts its load watcher, which observes the owner
//!    itself.
//! 3. If it does not, because there is none or because it cannot, this daemon starts a load
//!    watcher, and repeats this every [`SPEAKER_TIME`] until one runs. The last directive stays in
//!    force until a load watcher sends one.
//! 4. The directive of an agent that is not restarted expires after [`SPEAKER_TIME`]. Otherwise
//!    guests could stay paused forever, because nothing would report that the owner has left.

use super::tasks::Task;
use super::{Machine, Timer};
use sempa_proto::load::{GuestLimits, LOAD_WATCHER_PROGRAM, is_load_watcher};
use sempa_proto::owner::{GuestAccess, GuestDirective};
use sempa_proto::rm::CTX_RM;
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::BTreeMap;

/// Time for which the last directive of an ended owner agent stays in force. Afterwards this daemon
/// starts a load watcher if none runs. Also the interval between such attempts.
pub(super) const SPEAKER_TIME: Micros = Micros::from_secs(10);

/// The owner agents of this host.
#[derive(Debug, Default)]
pub(super) struct Speakers {
    /// The last directive of each running agent.
    words: BTreeMap<Tid, GuestDirective>,
    /// Guest limits of the agent that ended last. They apply until a load watcher sends a directive
    /// or the agent's directive expires.
    left: Option<(Tid, GuestLimits)>,
    /// The load watcher has died, and none has been seen since.
    missing: bool,
    /// The event log reports that this daemon starts one.
    told: bool,
    /// The event log reports that this daemon cannot start one.
    told_failure: bool,
}

impl Speakers {
    /// Records a directive. With `watches` the sender is this host's load watcher, which knows the
    /// wishes of all owners.
    pub(super) fn spoke(&mut self, by: Tid, word: &GuestDirective, watches: bool) {
        self.words.insert(by, word.clone());
        if watches {
            self.left = None;
        }
    }

    /// Returns the guest limits of each agent. All of them apply: an agent that sets no limit does
    /// not lift another agent's.
    pub(super) fn limits(&self) -> impl Iterator<Item = &GuestLimits> {
        self.words
            .values()
            .map(|word| &word.limits)
            .chain(self.left.iter().map(|(_, limits)| limits))
    }
}

impl Machine {
    /// True if a load watcher runs on this host or is being started.
    fn has_watcher(&self) -> bool {
        let is = |task: &Task| task.servant && is_load_watcher(&task.name) && task.exited.is_none();
        self.tasks.live.values().any(is)
    }

    /// Handles the end of a task that may have been an owner agent.
    pub(super) fn speaker_gone(&mut self, tid: Tid) {
        let Some(word) = self.hosting.speakers.words.remove(&tid) else {
            return;
        };
        if word.limits != GuestLimits::default() {
            self.hosting.speakers.left = Some((tid, word.limits));
        }
        self.timer(SPEAKER_TIME, Timer::Speaker(tid));
        if !self.hosting.is_by(tid) {
            return;
        }
        // Another agent's directive was replaced by this one's without that agent's knowledge. It
        // applies again.
        if let Some((by, word)) = self.hosting.speakers.words.pop_last() {
            return self.take_word(by, word);
        }
        let seconds = SPEAKER_TIME.0 / 1_000_000;
        self.log(format!(
            "{tid}, which spoke for the owner, has ended; its last word counts for {seconds} s"
        ));
    }

    /// The last directive of an agent expires, unless a load watcher is expected.
    pub(super) fn speaker_time_over(&mut self, tid: Tid) {
        let has_left_limits = self
            .hosting
            .speakers
            .left
            .as_ref()
            .is_some_and(|(by, _)| *by == tid);
        let stops_guests = self.hosting.is_by(tid);
        if !has_left_limits && !stops_guests {
            return;
        }
        if self.hosting.speakers.missing || self.has_watcher() {
            return self.timer(SPEAKER_TIME, Timer::Speaker(tid));
        }
        if has_left_limits {
            self.hosting.speakers.left = None;
        }
        if stops_guests {
            let why = format!("{tid}, which spoke for the owner, has ended");
            self.take_word(
                tid,
                GuestDirective {
                    access: GuestAccess::Welcome,
                    reason: why,
                    limits: GuestLimits::default(),
                },
            );
            self.hosting.speakers.words.remove(&tid);
        }
    }

    /// Handles the end of this host's load watcher. Exit status 0 means that it is not needed;
    /// otherwise another one must be started.
    pub(super) fn watcher_ended(&mut self, task: &Task, status: i32) {
        if !task.servant
            || !is_load_watcher(&task.name)
            || self.stop.is_some()
            || self.has_watcher()
        {
            return;
        }
        let was_missing = std::mem::replace(&mut self.hosting.speakers.missing, status != 0);
        if status != 0 && !was_missing {
            self.timer(SPEAKER_TIME, Timer::Watcher);
        }
    }

    /// Starts a load watcher if none was started in the meantime. The timer is set again, because
    /// the start may fail.
    pub(super) fn watcher_due(&mut self) {
        if self.stop.is_some() || !self.hosting.speakers.missing {
            return;
        }
        if self.has_watcher() {
            let speakers = &mut self.hosting.speakers;
            (speakers.missing, speakers.told, speakers.told_failure) = (false, false, false);
            return;
        }
        if !std::mem::replace(&mut self.hosting.speakers.told, true) {
            let text = format!(
                "the load watcher of {} has died, and this daemon starts another one",
                self.config.name
            );
            self.note(text);
        }
        let mut words = vec![LOAD_WATCHER_PROGRAM.to_string()];
        if let Some(rm) = self.rm.current() {
            words.extend([
                "--report-to".to_string(),
                rm.tid.to_string(),
                "--ctx".into(),
                CTX_RM.to_string(),
            ]);
        }
        self.start_command(words);
        self.timer(SPEAKER_TIME, Timer::Watcher);
    }

    /// Reports that a load watcher could not be started.
    pub(super) fn no_watcher(&mut self, error: PvmError) {
        if !std::mem::replace(&mut self.hosting.speakers.told_failure, true) {
            let stay = if self.hosting.is_stopped() {
                "guests stay stopped, and "
            } else {
                ""
            };
            let (name, seconds) = (&self.config.name, SPEAKER_TIME.0 / 1_000_000);
            let text = format!(
                "{LOAD_WATCHER_PROGRAM} could not be started on {name}: {error}; its owner is not guarded; {stay}it is tried \
                 again every {seconds} s"
            );
            self.note(text);
        }
    }
}
