//! Who speaks for the owner of this host may die. Then its last word counts for [`SPEAKER_TIME`]: guests that stand still stay
//! so, because the owner is there as before. Within this time the resource manager starts its load watcher again, which sees for
//! itself. If it does not, because it is gone or cannot, this daemon does, again and again; the last word counts until a load
//! watcher speaks. Only the word of a speaker that nobody starts again is over with the time, because nobody would ever say
//! that the owner has left.

use super::tasks::Task;
use super::{Machine, Timer};
use sempa_proto::load::{GuestLimits, WATCHER_PROGRAM, is_watcher};
use sempa_proto::owner::{Guests, GuestsWord};
use sempa_proto::rm::CTX_RM;
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::BTreeMap;

/// The last word of who spoke for the owner counts for so long after his end; then, a load watcher is started if none runs.
pub(super) const SPEAKER_TIME: Micros = Micros::from_secs(10);

/// Those who speak for the owner of this host.
#[derive(Debug, Default)]
pub(super) struct Speakers {
    /// The last word of each that lives.
    words: BTreeMap<Tid, GuestsWord>,
    /// What guests might have by the last one that has ended; until a load watcher speaks, or its time is over.
    left: Option<(Tid, GuestLimits)>,
    /// The load watcher has died, and none has been seen since.
    missing: bool,
    /// That this daemon starts one is in the event log.
    told: bool,
    /// That it cannot as well.
    told_failure: bool,
}

impl Speakers {
    /// One speaks; `watches`: as the load watcher of this host, which knows all that owners say.
    pub(super) fn spoke(&mut self, by: Tid, word: &GuestsWord, watches: bool) {
        self.words.insert(by, word.clone());
        if watches {
            self.left = None;
        }
    }

    /// What each of them lets guests have. All of it counts: who says nothing of it takes nothing back.
    pub(super) fn limits(&self) -> impl Iterator<Item = &GuestLimits> {
        self.words
            .values()
            .map(|word| &word.limits)
            .chain(self.left.iter().map(|(_, limits)| limits))
    }
}

impl Machine {
    /// A load watcher runs here, or is about to.
    fn has_watcher(&self) -> bool {
        let is = |task: &Task| task.servant && is_watcher(&task.name) && task.exited.is_none();
        self.tasks.live.values().any(is)
    }

    /// A task has ended that may have spoken for the owner.
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
        // Another one has not been asked since it spoke last, and thinks that this counts.
        if let Some((by, word)) = self.hosting.speakers.words.pop_last() {
            return self.take_word(by, word);
        }
        let seconds = SPEAKER_TIME.0 / 1_000_000;
        self.log(format!(
            "{tid}, which spoke for the owner, has ended; its last word counts for {seconds} s"
        ));
    }

    /// The last word of a speaker has counted long enough, unless another load watcher is to speak.
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
                GuestsWord {
                    guests: Guests::Welcome,
                    why,
                    limits: GuestLimits::default(),
                },
            );
            self.hosting.speakers.words.remove(&tid);
        }
    }

    /// A task has ended; if it was the load watcher of this host, and has not ended because nobody needs it, another one has to
    /// come.
    pub(super) fn watcher_ended(&mut self, task: &Task, status: i32) {
        if !task.servant || !is_watcher(&task.name) || self.stop.is_some() || self.has_watcher() {
            return;
        }
        let was_missing = std::mem::replace(&mut self.hosting.speakers.missing, status != 0);
        if status != 0 && !was_missing {
            self.timer(SPEAKER_TIME, Timer::Watcher);
        }
    }

    /// If nobody else has started a load watcher meanwhile, this daemon does. It is looked at again, because it may not start.
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
        let mut words = vec![WATCHER_PROGRAM.to_string()];
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

    /// A load watcher could not be started.
    pub(super) fn no_watcher(&mut self, error: PvmError) {
        if !std::mem::replace(&mut self.hosting.speakers.told_failure, true) {
            let stay = if self.hosting.is_stopped() {
                "guests stay stopped, and "
            } else {
                ""
            };
            let (name, seconds) = (&self.config.name, SPEAKER_TIME.0 / 1_000_000);
            let text = format!(
                "{WATCHER_PROGRAM} could not be started on {name}: {error}; its owner is not guarded; {stay}it is tried \
                 again every {seconds} s"
            );
            self.note(text);
        }
    }
}
