//! Ends whole jobs on request.
//!
//! 1. All tasks of the job get SIGTERM, including tasks that are being started.
//! 2. A task that has not ended after [`TERM_TIMEOUT`] gets SIGKILL.
//! 3. Both steps repeat until no task of the job remains.
//!
//! The job's tasks cannot spawn while the job is being ended.

use super::{SIGKILL, Service};
use crate::api::VmApi;
use sempa_proto::rm::{REPLY_ENTRIES_MAX, RmReply};
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Time between SIGTERM and SIGKILL.
pub const TERM_TIMEOUT: Micros = Micros::from_secs(10);
/// Maximum number of jobs that are being ended at once. Beyond it, the oldest one is abandoned.
pub const KILLS_MAX: usize = 64;
/// Maximum number of signals sent before other messages are processed.
const SIGNAL_BATCH_MAX: usize = 128;
/// Interval between checks for new tasks of the job and for tasks that have not ended.
const CHECK_INTERVAL: Micros = Micros::from_millis(500);
/// Time for which the result can be queried after the end of the job.
const RESULT_WINDOW: Micros = Micros::from_secs(60);
/// Time after which the resource manager stops sending signals to a job that still has tasks.
const KILL_TIMEOUT: Micros = Micros::from_secs(600);
const SIGTERM: i32 = 15;

/// A job that is being ended.
#[derive(Debug)]
struct JobKill {
    /// The requesting task. It is not ended, even if it belongs to the job.
    requester: Tid,
    started_at: Micros,
    next_check: Micros,
    /// Time of the last signal to each task.
    signalled_at: BTreeMap<Tid, Micros>,
    /// Tasks that got SIGKILL.
    killed: BTreeSet<Tid>,
    /// Errors of the last signal, by task.
    failed: BTreeMap<Tid, String>,
    remaining: usize,
}

impl JobKill {
    fn new(by: Tid, now: Micros) -> JobKill {
        let (asked, forced, failed) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        JobKill {
            requester: by,
            started_at: now,
            next_check: now,
            signalled_at: asked,
            killed: forced,
            failed,
            remaining: 0,
        }
    }

    /// Returns the signals that are due for `tasks`, the tasks of the job; at most
    /// [`SIGNAL_BATCH_MAX`].
    fn due_signals(&mut self, now: Micros, tasks: &[Tid]) -> Vec<(Tid, i32)> {
        let due = |tid: &Tid| match self.signalled_at.get(tid) {
            None => Some((*tid, SIGTERM)),
            Some(at) => (now.since(*at) >= TERM_TIMEOUT).then_some((*tid, SIGKILL)),
        };
        let mut signals: Vec<(Tid, i32)> = tasks.iter().filter_map(due).collect();
        self.next_check = if signals.len() > SIGNAL_BATCH_MAX {
            now
        } else {
            now + CHECK_INTERVAL
        };
        signals.truncate(SIGNAL_BATCH_MAX);
        for (tid, signal) in &signals {
            if *signal == SIGKILL {
                self.killed.insert(*tid);
            }
            // A task that survives SIGKILL gets it again after [`TERM_TIMEOUT`].
            self.signalled_at.insert(*tid, now);
        }
        signals
    }

    fn progress(&self, job: Tid) -> RmReply {
        let count = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let failed = self
            .failed
            .iter()
            .take(REPLY_ENTRIES_MAX)
            .map(|(tid, why)| (*tid, why.clone()))
            .collect();
        let (asked, forced, left) = (
            count(self.signalled_at.len()),
            count(self.killed.len()),
            count(self.remaining),
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

/// The jobs that are being ended or have been ended recently, by job.
#[derive(Debug, Default)]
pub(super) struct JobKills(BTreeMap<Tid, JobKill>);

impl JobKills {
    /// Returns when [`Service::send_due_signals`] is due.
    pub(super) fn next_deadline(&self) -> Option<Micros> {
        self.0
            .values()
            .filter(|ending| ending.remaining > 0)
            .map(|ending| ending.next_check)
            .min()
    }

    /// Handles the start of a task of this job. If the job counts as ended, for example because the
    /// task was still being started, ending it continues.
    pub(super) fn task_started(&mut self, now: Micros, job: Tid) {
        if let Some(ending) = self
            .0
            .get_mut(&job)
            .filter(|ending| ending.remaining == 0 && ending.next_check > now)
        {
            (ending.remaining, ending.next_check) = (1, now);
        }
    }

    /// True if the job is being ended and `task` did not request that.
    pub(super) fn is_being_killed(&self, job: Tid, task: Tid) -> bool {
        self.0
            .get(&job)
            .is_some_and(|ending| ending.remaining > 0 && ending.requester != task)
    }
}

impl<V: VmApi> Service<V> {
    /// Handles a request to end a whole job. `task_id`: any task of the job.
    pub(super) fn kill_job(&mut self, by: Tid, tid: Tid) -> RmReply {
        let now = self.vm.now();
        let in_books = self.history.writer.history.job_of(tid).map(|job| job.job);
        let Some(job) = in_books.or_else(|| {
            self.model
                .has_task(tid)
                .then(|| self.model.user_and_job(tid).1)
        }) else {
            return RmReply::NotFound;
        };
        self.job_kills.0.retain(|_, ending| {
            now.since(ending.started_at) < KILL_TIMEOUT
                && (ending.remaining > 0 || ending.next_check > now)
        });
        if self.job_kills.0.len() >= KILLS_MAX {
            let oldest = self
                .job_kills
                .0
                .iter()
                .min_by_key(|(_, ending)| ending.started_at)
                .map(|(job, _)| *job);
            oldest.map(|oldest| self.job_kills.0.remove(&oldest));
        }
        self.job_kills
            .0
            .retain(|other, ending| *other != job || ending.remaining > 0);
        self.job_kills
            .0
            .entry(job)
            .or_insert_with(|| JobKill::new(by, now));
        self.revoke_grants();
        self.continue_kill(now, job);
        self.kill_progress(job)
    }

    /// Returns the progress of ending the job that contains the task `tid`.
    pub(super) fn kill_progress(&self, tid: Tid) -> RmReply {
        let of =
            |(job, ending): (&Tid, &JobKill)| *job == tid || ending.signalled_at.contains_key(&tid);
        let found = self
            .job_kills
            .0
            .iter()
            .find(|(job, ending)| of((job, ending)));
        found.map_or(RmReply::NotFound, |(job, ending)| ending.progress(*job))
    }

    /// Sends the signals that are due in all jobs.
    pub(super) fn send_due_signals(&mut self, now: Micros) {
        let due = self
            .job_kills
            .0
            .iter()
            .filter(|(_, ending)| ending.remaining > 0 && ending.next_check <= now);
        let due: Vec<Tid> = due.map(|(job, _)| *job).collect();
        due.into_iter().for_each(|job| self.continue_kill(now, job));
    }

    fn continue_kill(&mut self, now: Micros, job: Tid) {
        let Some(mut ending) = self.job_kills.0.remove(&job) else {
            return;
        };
        let by = ending.requester;
        let tasks: Vec<Tid> = self
            .model
            .tasks_of(job)
            .into_iter()
            .filter(|tid| *tid != by)
            .collect();
        for (tid, signal) in ending.due_signals(now, &tasks) {
            match self.vm.signal(tid, signal) {
                Ok(()) => drop(ending.failed.remove(&tid)),
                // The event of the task's end will follow.
                Err(error) if error.code == PvmError::NoTask => {}
                Err(error) => drop(ending.failed.insert(tid, error.to_string())),
            }
        }
        ending.failed.retain(|tid, _| self.model.has_task(*tid));
        ending.remaining = tasks.len() + self.spawns.pending_spawns_of(job, by);
        if ending.remaining == 0 {
            ending.next_check = now + RESULT_WINDOW;
            let (asked, forced) = (ending.signalled_at.len(), ending.killed.len());
            let forced = if forced > 0 {
                format!(", {forced} of them by SIGKILL")
            } else {
                String::new()
            };
            self.log_note(format!(
                "job {job} was ended with {asked} tasks{forced}: requested by {by}"
            ));
        } else if now.since(ending.started_at) >= KILL_TIMEOUT {
            let left = ending.remaining;
            self.log_note(format!(
                "job {job}, which {by} asked to end, still has {left} tasks; no further signals are sent"
            ));
            return;
        }
        self.job_kills.0.insert(job, ending);
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

    /// Each task gets SIGTERM once, and SIGKILL after [`TERM_TIMEOUT`]. Signals are sent in batches
    /// of limited size.
    #[test]
    fn tasks_get_sigterm_once_then_sigkill_in_batches() {
        let (all, mut now) = (tasks(300), Micros::from_secs(100));
        let mut ending = JobKill::new(Tid::NONE, now);
        let mut asked = Vec::new();
        for _ in 0..3 {
            let signals = ending.due_signals(now, &all);
            assert!(
                signals.len() <= SIGNAL_BATCH_MAX
                    && signals.iter().all(|(_, signal)| *signal == SIGTERM)
            );
            asked.extend(signals.into_iter().map(|(tid, _)| tid));
        }
        assert_eq!(asked, all);
        assert_eq!(
            (ending.due_signals(now, &all), ending.next_check),
            (Vec::new(), now + CHECK_INTERVAL)
        );
        // Another task starts, and ends without SIGKILL. One of the first tasks does not end.
        let (late, stubborn) = (Tid::from_raw(0x50001), all[7]);
        now = now + CHECK_INTERVAL;
        assert_eq!(
            ending.due_signals(now, &[stubborn, late]),
            [(late, SIGTERM)]
        );
        now = now + TERM_TIMEOUT;
        assert_eq!(ending.due_signals(now, &[stubborn]), [(stubborn, SIGKILL)]);
        assert_eq!(ending.due_signals(now + CHECK_INTERVAL, &[stubborn]), []);
        assert_eq!(
            ending.due_signals(now + TERM_TIMEOUT, &[stubborn]),
            [(stubborn, SIGKILL)],
            "nobody has carried it out"
        );
        assert_eq!((ending.signalled_at.len(), ending.killed.len()), (301, 1));
    }
}
