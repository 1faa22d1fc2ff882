//! Ends whole jobs on request.
//!
//! 1. All tasks of the job, including those that are being started, get SIGTERM.
//! 2. A task that has not ended after [`TERM_TIME`] gets SIGKILL.
//! 3. This repeats until no task of the job is left.
//!
//! Meanwhile the job's tasks cannot spawn.

use super::{SIGKILL, Service};
use crate::api::VmApi;
use sempa_proto::rm::{REPLY_ENTRIES_MAX, RmReply};
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Time between SIGTERM and SIGKILL.
pub const TERM_TIME: Micros = Micros::from_secs(10);
/// Maximum number of jobs that are being ended. Beyond it, the oldest request is dropped.
pub const KILLS_MAX: usize = 64;
/// Maximum number of signals sent before other messages are processed.
const SIGNALS_AT_ONCE: usize = 128;
/// Interval between checks for new tasks and for tasks that have not ended.
const LOOK_PAUSE: Micros = Micros::from_millis(500);
/// How long the result is available after the end of the job.
const TOLD_FOR: Micros = Micros::from_secs(60);
/// Time after which a job that still has tasks is given up.
const GIVEN_UP: Micros = Micros::from_secs(600);
const SIGTERM: i32 = 15;

/// A job that is being ended.
#[derive(Debug)]
struct Ending {
    /// The requesting task, which is spared.
    by: Tid,
    begun: Micros,
    look_at: Micros,
    /// When each task last got a signal.
    asked: BTreeMap<Tid, Micros>,
    /// Tasks that got SIGKILL.
    forced: BTreeSet<Tid>,
    /// Tasks to which no signal could be sent, and why.
    failed: BTreeMap<Tid, String>,
    left: usize,
}

impl Ending {
    fn new(by: Tid, now: Micros) -> Ending {
        let (asked, forced, failed) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        Ending {
            by,
            begun: now,
            look_at: now,
            asked,
            forced,
            failed,
            left: 0,
        }
    }

    /// Returns the signals that are due for the job's tasks `tasks`, at most [`SIGNALS_AT_ONCE`].
    fn signals(&mut self, now: Micros, tasks: &[Tid]) -> Vec<(Tid, i32)> {
        let due = |tid: &Tid| match self.asked.get(tid) {
            None => Some((*tid, SIGTERM)),
            Some(at) => (now.since(*at) >= TERM_TIME).then_some((*tid, SIGKILL)),
        };
        let mut signals: Vec<(Tid, i32)> = tasks.iter().filter_map(due).collect();
        self.look_at = if signals.len() > SIGNALS_AT_ONCE {
            now
        } else {
            now + LOOK_PAUSE
        };
        signals.truncate(SIGNALS_AT_ONCE);
        for (tid, signal) in &signals {
            if *signal == SIGKILL {
                self.forced.insert(*tid);
            }
            // A task that survives SIGKILL gets it again after the same time.
            self.asked.insert(*tid, now);
        }
        signals
    }

    fn answer(&self, job: Tid) -> RmReply {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let failed = self
            .failed
            .iter()
            .take(REPLY_ENTRIES_MAX)
            .map(|(tid, why)| (*tid, why.clone()))
            .collect();
        let (asked, forced, left) = (
            count(self.asked.len()),
            count(self.forced.len()),
            count(self.left),
        );
        RmReply::KillProgress {
            job,
            asked,
            forced,
            left,
            failed,
        }
    }
}

/// The jobs that are being ended.
#[derive(Debug, Default)]
pub(super) struct Killing(BTreeMap<Tid, Ending>);

impl Killing {
    /// Returns when [`Service::kills_due`] is due.
    pub(super) fn next_deadline(&self) -> Option<Micros> {
        self.0
            .values()
            .filter(|ending| ending.left > 0)
            .map(|ending| ending.look_at)
            .min()
    }

    /// Handles the start of a task of this job. The job may have been considered ended: the task
    /// was still being started.
    pub(super) fn task_began(&mut self, now: Micros, job: Tid) {
        if let Some(ending) = self
            .0
            .get_mut(&job)
            .filter(|ending| ending.left == 0 && ending.look_at > now)
        {
            (ending.left, ending.look_at) = (1, now);
        }
    }

    /// True for a job that is being ended, unless this task requested it.
    pub(super) fn is_ending(&self, job: Tid, task: Tid) -> bool {
        self.0
            .get(&job)
            .is_some_and(|ending| ending.left > 0 && ending.by != task)
    }
}

impl<V: VmApi> Service<V> {
    /// Handles a request to end a whole job. `tid`: any task of the job.
    pub(super) fn kill_job(&mut self, by: Tid, tid: Tid) -> RmReply {
        let now = self.vm.now();
        let in_books = self.memory.ledger.books.job_of(tid).map(|job| job.job);
        let Some(job) = in_books.or_else(|| {
            self.model
                .knows(tid)
                .then(|| self.model.user_and_job(tid).1)
        }) else {
            return RmReply::NotFound;
        };
        self.killing.0.retain(|_, ending| {
            now.since(ending.begun) < GIVEN_UP && (ending.left > 0 || ending.look_at > now)
        });
        if self.killing.0.len() >= KILLS_MAX {
            let oldest = self
                .killing
                .0
                .iter()
                .min_by_key(|(_, ending)| ending.begun)
                .map(|(job, _)| *job);
            oldest.map(|oldest| self.killing.0.remove(&oldest));
        }
        self.killing
            .0
            .retain(|other, ending| *other != job || ending.left > 0);
        self.killing
            .0
            .entry(job)
            .or_insert_with(|| Ending::new(by, now));
        self.take_grants_back();
        self.go_on_ending(now, job);
        self.killed(job)
    }

    /// Returns the progress of ending a job.
    pub(super) fn killed(&self, tid: Tid) -> RmReply {
        let of = |(job, ending): (&Tid, &Ending)| *job == tid || ending.asked.contains_key(&tid);
        let found = self
            .killing
            .0
            .iter()
            .find(|(job, ending)| of((job, ending)));
        found.map_or(RmReply::NotFound, |(job, ending)| ending.answer(*job))
    }

    /// Sends the signals that are due.
    pub(super) fn kills_due(&mut self, now: Micros) {
        let due = self
            .killing
            .0
            .iter()
            .filter(|(_, ending)| ending.left > 0 && ending.look_at <= now);
        let due: Vec<Tid> = due.map(|(job, _)| *job).collect();
        due.into_iter().for_each(|job| self.go_on_ending(now, job));
    }

    fn go_on_ending(&mut self, now: Micros, job: Tid) {
        let Some(mut ending) = self.killing.0.remove(&job) else {
            return;
        };
        let by = ending.by;
        let tasks: Vec<Tid> = self
            .model
            .tasks_of(job)
            .into_iter()
            .filter(|tid| *tid != by)
            .collect();
        for (tid, signal) in ending.signals(now, &tasks) {
            match self.vm.signal(tid, signal) {
                Ok(()) => drop(ending.failed.remove(&tid)),
                // The event of the task's end will follow.
                Err(error) if error.code == PvmError::NoTask => {}
                Err(error) => drop(ending.failed.insert(tid, error.to_string())),
            }
        }
        ending.failed.retain(|tid, _| self.model.knows(*tid));
        ending.left = tasks.len() + self.spawns.starting_for(job, by);
        if ending.left == 0 {
            ending.look_at = now + TOLD_FOR;
            let (asked, forced) = (ending.asked.len(), ending.forced.len());
            let forced = if forced > 0 {
                format!(", {forced} of them by SIGKILL")
            } else {
                String::new()
            };
            self.note(format!(
                "job {job} was ended with {asked} tasks{forced}: requested by {by}"
            ));
        } else if now.since(ending.begun) >= GIVEN_UP {
            let left = ending.left;
            self.note(format!(
                "job {job}, which {by} asked to end, still has {left} tasks; no further signals are sent"
            ));
            return;
        }
        self.killing.0.insert(job, ending);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tasks(n: u32) -> Vec<Tid> {
        (1..=n)
            .map(|n| Tid::from_raw(0x40000 + n.cast_signed()))
            .collect()
    }

    /// Each task gets SIGTERM once, and SIGKILL when its time is over, a limited number at a time.
    #[test]
    fn tasks_get_sigterm_once_then_sigkill_in_batches() {
        let (all, mut now) = (tasks(300), Micros::from_secs(100));
        let mut ending = Ending::new(Tid::NONE, now);
        let mut asked = Vec::new();
        for _ in 0..3 {
            let signals = ending.signals(now, &all);
            assert!(
                signals.len() <= SIGNALS_AT_ONCE
                    && signals.iter().all(|(_, signal)| *signal == SIGTERM)
            );
            asked.extend(signals.into_iter().map(|(tid, _)| tid));
        }
        assert_eq!(asked, all);
        assert_eq!(
            (ending.signals(now, &all), ending.look_at),
            (Vec::new(), now + LOOK_PAUSE)
        );
        // A further task starts, and ends without SIGKILL. One of the others does not end.
        let (late, stubborn) = (Tid::from_raw(0x50001), all[7]);
        now = now + LOOK_PAUSE;
        assert_eq!(ending.signals(now, &[stubborn, late]), [(late, SIGTERM)]);
        now = now + TERM_TIME;
        assert_eq!(ending.signals(now, &[stubborn]), [(stubborn, SIGKILL)]);
        assert_eq!(ending.signals(now + LOOK_PAUSE, &[stubborn]), []);
        assert_eq!(
            ending.signals(now + TERM_TIME, &[stubborn]),
            [(stubborn, SIGKILL)],
            "nobody has carried it out"
        );
        assert_eq!((ending.asked.len(), ending.forced.len()), (301, 1));
    }
}
