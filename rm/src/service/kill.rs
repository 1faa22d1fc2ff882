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
/// Maximum number of jobs that are being ended at once. If there are more, no further signals are
/// sent to the job whose request is oldest.
pub const JOB_KILLS_MAX: usize = 64;
/// Maximum number of signals that are sent to a job before other messages are processed.
const SIGNAL_BATCH_MAX: usize = 128;
/// Interval between checks for new tasks of the job and for tasks that have not ended.
const CHECK_INTERVAL: Micros = Micros::from_millis(500);
/// Time for which the progress can be queried after the end of the job.
const PROGRESS_QUERY_WINDOW: Micros = Micros::from_secs(60);
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
    killed_tasks: BTreeSet<Tid>,
    /// Error of the last signal to each task; tasks without an error are not in the map.
    signal_errors: BTreeMap<Tid, String>,
    remaining_count: usize,
}

impl JobKill {
    fn new(requesting_task: Tid, now: Micros) -> Self {
        let (no_signals, no_kills, no_errors) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        Self {
            requester: requesting_task,
            started_at: now,
            next_check: now,
            signalled_at: no_signals,
            killed_tasks: no_kills,
            signal_errors: no_errors,
            remaining_count: 0,
        }
    }

    /// Returns the signals that are due for `tasks`, the tasks of the job. Returns at most
    /// [`SIGNAL_BATCH_MAX`] signals.
    fn take_due_signals(&mut self, now: Micros, tasks: &[Tid]) -> Vec<(Tid, i32)> {
        let due_signal = |tid: &Tid| match self.signalled_at.get(tid) {
            None => Some((*tid, SIGTERM)),
            Some(last_signal_at) => {
                (now.since(*last_signal_at) >= TERM_TIMEOUT).then_some((*tid, SIGKILL))
            }
        };
        let mut signals: Vec<(Tid, i32)> = tasks.iter().filter_map(due_signal).collect();
        self.next_check = if signals.len() > SIGNAL_BATCH_MAX {
            now
        } else {
            now + CHECK_INTERVAL
        };
        signals.truncate(SIGNAL_BATCH_MAX);
        for (tid, signal) in &signals {
            if *signal == SIGKILL {
                self.killed_tasks.insert(*tid);
            }
            // A task that does not end after SIGKILL gets SIGKILL again after [`TERM_TIMEOUT`].
            self.signalled_at.insert(*tid, now);
        }
        signals
    }

    fn progress_reply(&self, job: Tid) -> RmReply {
        let to_u32 = |n: usize| u32::try_from(n).unwrap_or(u32::MAX);
        let error_list = self
            .signal_errors
            .iter()
            .take(REPLY_ENTRIES_MAX)
            .map(|(tid, error_text)| (*tid, error_text.clone()))
            .collect();
        let (signalled_count, killed_count, tasks_left) = (
            to_u32(self.signalled_at.len()),
            to_u32(self.killed_tasks.len()),
            to_u32(self.remaining_count),
        );
        RmReply::KillProgress {
            job,
            exit_requests: signalled_count,
            forced_kills: killed_count,
            remaining_tasks: tasks_left,
            signal_failures: error_list,
        }
    }
}

/// The jobs that are being ended or have been ended recently, by job.
#[derive(Debug, Default)]
pub(super) struct JobKills(BTreeMap<Tid, JobKill>);

impl JobKills {
    /// Returns the time at which [`Service::send_due_signals`] is due; `None` if no job is being
    /// ended.
    pub(super) fn next_deadline(&self) -> Option<Micros> {
        self.0
            .values()
            .filter(|kill| kill.remaining_count > 0)
            .map(|kill| kill.next_check)
            .min()
    }

    /// Handles the start of a task of this job. If the job counts as ended, for example because the
    /// task was still being started, the signals continue.
    pub(super) fn handle_task_start(&mut self, now: Micros, job: Tid) {
        if let Some(kill) = self
            .0
            .get_mut(&job)
            .filter(|kill| kill.remaining_count == 0 && kill.next_check > now)
        {
            (kill.remaining_count, kill.next_check) = (1, now);
        }
    }

    /// True if the job is being ended and `task` did not request this.
    pub(super) fn is_being_killed(&self, job: Tid, task: Tid) -> bool {
        self.0
            .get(&job)
            .is_some_and(|kill| kill.remaining_count > 0 && kill.requester != task)
    }
}

impl<V: VmApi> Service<V> {
    /// Handles a request of task `requesting_task` to end a whole job: sends the first signals and
    /// returns the progress. `tid`: any task of the job.
    pub(super) fn kill_job(&mut self, requesting_task: Tid, tid: Tid) -> RmReply {
        let now = self.vm.now();
        let recorded_job = self.history.writer.history.job_of(tid).map(|job| job.job);
        let Some(job) = recorded_job.or_else(|| {
            self.model
                .has_task(tid)
                .then(|| self.model.user_and_job(tid).1)
        }) else {
            return RmReply::NotFound;
        };
        self.job_kills.0.retain(|_, kill| {
            now.since(kill.started_at) < KILL_TIMEOUT
                && (kill.remaining_count > 0 || kill.next_check > now)
        });
        if self.job_kills.0.len() >= JOB_KILLS_MAX {
            let oldest_job = self
                .job_kills
                .0
                .iter()
                .min_by_key(|(_, kill)| kill.started_at)
                .map(|(job, _)| *job);
            oldest_job.map(|oldest_job| self.job_kills.0.remove(&oldest_job));
        }
        self.job_kills
            .0
            .retain(|other, kill| *other != job || kill.remaining_count > 0);
        self.job_kills
            .0
            .entry(job)
            .or_insert_with(|| JobKill::new(requesting_task, now));
        self.revoke_grants();
        self.signal_job(now, job);
        self.kill_progress(job)
    }

    /// Returns the progress of ending the job that contains the task `tid`.
    pub(super) fn kill_progress(&self, tid: Tid) -> RmReply {
        let concerns_task =
            |(job, kill): (&Tid, &JobKill)| *job == tid || kill.signalled_at.contains_key(&tid);
        let matching_kill = self
            .job_kills
            .0
            .iter()
            .find(|(job, kill)| concerns_task((job, kill)));
        matching_kill.map_or(RmReply::NotFound, |(job, kill)| kill.progress_reply(*job))
    }

    /// Sends the signals that are due in all jobs.
    pub(super) fn send_due_signals(&mut self, now: Micros) {
        let due_jobs = self
            .job_kills
            .0
            .iter()
            .filter(|(_, kill)| kill.remaining_count > 0 && kill.next_check <= now);
        let due_jobs: Vec<Tid> = due_jobs.map(|(job, _)| *job).collect();
        due_jobs
            .into_iter()
            .for_each(|job| self.signal_job(now, job));
    }

    fn signal_job(&mut self, now: Micros, job: Tid) {
        let Some(mut kill) = self.job_kills.0.remove(&job) else {
            return;
        };
        let requesting_task = kill.requester;
        let tasks: Vec<Tid> = self
            .model
            .job_tasks(job)
            .into_iter()
            .filter(|tid| *tid != requesting_task)
            .collect();
        for (tid, signal) in kill.take_due_signals(now, &tasks) {
            match self.vm.signal(tid, signal) {
                Ok(()) => drop(kill.signal_errors.remove(&tid)),
                // The event that reports the task's end will follow.
                Err(error) if error.code == PvmError::NoTask => {}
                Err(error) => drop(kill.signal_errors.insert(tid, error.to_string())),
            }
        }
        kill.signal_errors
            .retain(|tid, _| self.model.has_task(*tid));
        kill.remaining_count = tasks.len() + self.spawns.pending_spawn_count(job, requesting_task);
        if kill.remaining_count == 0 {
            kill.next_check = now + PROGRESS_QUERY_WINDOW;
            let (signalled_count, kill_text) = (kill.signalled_at.len(), kill.killed_tasks.len());
            let kill_text = if kill_text > 0 {
                format!(", {kill_text} of them by SIGKILL")
            } else {
                String::new()
            };
            self.log_note(format!(
                "job {job} was ended with {signalled_count} tasks{kill_text}: requested by {requesting_task}"
            ));
        } else if now.since(kill.started_at) >= KILL_TIMEOUT {
            let tasks_left = kill.remaining_count;
            self.log_note(format!(
                "job {job}, which {requesting_task} asked to end, still has {tasks_left} tasks; no further signals are sent"
            ));
            return;
        }
        self.job_kills.0.insert(job, kill);
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
        let (job_tasks, mut now) = (tasks(300), Micros::from_secs(100));
        let mut kill = JobKill::new(Tid::NONE, now);
        let mut signalled_tasks = Vec::new();
        for _ in 0..3 {
            let signals = kill.take_due_signals(now, &job_tasks);
            assert!(
                signals.len() <= SIGNAL_BATCH_MAX
                    && signals.iter().all(|(_, signal)| *signal == SIGTERM)
            );
            signalled_tasks.extend(signals.into_iter().map(|(tid, _)| tid));
        }
        assert_eq!(signalled_tasks, job_tasks);
        assert_eq!(
            (kill.take_due_signals(now, &job_tasks), kill.next_check),
            (Vec::new(), now + CHECK_INTERVAL)
        );
        // Another task starts, and ends without SIGKILL. One of the first tasks does not end.
        let (late_task, surviving_task) = (Tid::from_raw(0x50001), job_tasks[7]);
        now = now + CHECK_INTERVAL;
        assert_eq!(
            kill.take_due_signals(now, &[surviving_task, late_task]),
            [(late_task, SIGTERM)]
        );
        now = now + TERM_TIMEOUT;
        assert_eq!(
            kill.take_due_signals(now, &[surviving_task]),
            [(surviving_task, SIGKILL)]
        );
        assert_eq!(
            kill.take_due_signals(now + CHECK_INTERVAL, &[surviving_task]),
            []
        );
        assert_eq!(
            kill.take_due_signals(now + TERM_TIMEOUT, &[surviving_task]),
            [(surviving_task, SIGKILL)],
            "nobody has carried it out"
        );
        assert_eq!((kill.signalled_at.len(), kill.killed_tasks.len()), (301, 1));
    }
}
