//! Suspends tasks for two reasons: whole jobs on request, and tasks of users with a high index to
//! make room for waiting requests (preemption). The daemons carry out suspensions, and the event
//! log reports them. A restarted resource manager therefore knows from the history which tasks are
//! suspended, and why.

use super::Service;
use crate::api::VmApi;
use crate::decide::{PlacementRequest, ResumeAt, select_resumable, select_victims};
use libpvm::Error;
use sempa_proto::event::EventKind;
use sempa_proto::migration;
use sempa_proto::rm::{REPLY_ENTRIES_MAX, RmReply, SuspensionInfo};
use sempa_proto::suspend::SuspendCause;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;

/// Interval between preemption checks.
const PREEMPTION_INTERVAL: Micros = Micros::from_secs(10);
/// Interval used instead of [`PREEMPTION_INTERVAL`] if a request has begun to wait or another
/// request may benefit.
const PREEMPTION_INTERVAL_SHORT: Micros = Micros::from_secs(1);
/// Maximum number of waiting requests examined in one check. The check ends at the first request
/// that gets hosts by preemption.
const PREEMPTION_REQUESTS_MAX: usize = 32;

/// State of suspended tasks and jobs.
#[derive(Debug, Default)]
pub(super) struct SuspensionState {
    /// Suspended jobs, each with the task that requested its suspension.
    jobs: BTreeMap<Tid, Tid>,
    /// True if suspended jobs may have running tasks, which must be suspended.
    recheck_jobs: bool,
    /// Preempted tasks, with the time of their suspension.
    preempted: BTreeMap<Tid, Micros>,
    /// Time of the last preemption check.
    checked_at: Option<Micros>,
    /// True if a request has begun to wait since the last preemption check.
    new_waiter: bool,
}

impl SuspensionState {
    /// Records that a task has started or that its job became known, so that suspended jobs are
    /// checked for running tasks.
    pub(super) fn task_started(&mut self) {
        self.recheck_jobs |= !self.jobs.is_empty();
    }

    /// Records that a request begins to wait.
    pub(super) fn request_waits(&mut self) {
        self.new_waiter = true;
    }
}

impl<V: VmApi> Service<V> {
    /// Restores the suspensions that the history contains.
    pub(super) fn restore_suspensions(&mut self) {
        let (now, wall) = (self.vm.now(), self.vm.wall_clock());
        let books = &self.history.writer.history;
        self.suspensions.jobs = books.suspended_jobs().collect();
        self.suspensions.recheck_jobs = true;
        let there = |tid: &Tid| self.model.is_suspended(*tid);
        let known = books.running().filter(|task| there(&task.tid));
        let known: Vec<(Tid, Tid, Option<SuspensionInfo>)> = known
            .map(|task| (task.tid, task.job, task.suspension.clone()))
            .collect();
        for (tid, job, suspended) in known {
            self.spawns.task_suspended(now, tid, true);
            match suspended.map(|s| (s.cause, s.since)) {
                Some((SuspendCause::Preempted { .. }, since)) => {
                    let age = wall.since(since).min(now);
                    self.suspensions
                        .preempted
                        .insert(tid, Micros(now.0 - age.0));
                }
                // The previous resource manager ended before it had resumed all tasks of this job.
                Some((cause @ SuspendCause::JobRequested { .. }, _))
                    if !self.suspensions.jobs.contains_key(&job) =>
                {
                    self.suspend_or_log(tid, false, cause);
                }
                _ => {}
            }
        }
    }

    /// Applies the event that a task was suspended or resumed.
    pub(super) fn suspension_changed(&mut self, tid: Tid, suspended: bool) {
        self.spawns.task_suspended(self.vm.now(), tid, suspended);
        if !suspended {
            self.suspensions.preempted.remove(&tid);
        }
    }

    /// Marks a task as suspended again after a migration. The model may have removed the task
    /// during the migration.
    pub(super) fn reapply_suspension(&mut self, tid: Tid) {
        if self.history.writer.history.is_suspended(tid) {
            self.model.task_suspended(tid, true);
        }
    }

    /// Returns when the next preemption check ([`Service::preempt_and_resume`]) is due. It also
    /// retries waiting requests. `None` if no request waits and no task is preempted.
    pub(super) fn preemption_due(&self) -> Option<Micros> {
        let wanted = !self.suspensions.preempted.is_empty() || self.spawns.waiting_count() > 0;
        let pause = if self.suspensions.new_waiter {
            PREEMPTION_INTERVAL_SHORT
        } else {
            PREEMPTION_INTERVAL
        };
        wanted.then(|| {
            self.suspensions
                .checked_at
                .map_or(Micros(0), |at| at + pause)
        })
    }

    /// Handles a request to suspend or resume a whole job.
    pub(super) fn suspend_job(&mut self, by: Tid, tid: Tid, suspend: bool) -> RmReply {
        let Some(job) = self.history.writer.history.job_of(tid).map(|job| job.job) else {
            return RmReply::NotFound;
        };
        let all = self.model.tasks_of(job);
        let (mut tasks, mut others) = (Vec::new(), Vec::new());
        let is_suspended = self.suspensions.jobs.contains_key(&job);
        if suspend != is_suspended && !(suspend && all.is_empty()) {
            self.log_event(if suspend {
                EventKind::JobSuspended {
                    job,
                    requested_by: by,
                }
            } else {
                EventKind::JobResumed {
                    job,
                    requested_by: by,
                }
            });
            if suspend {
                self.suspensions.jobs.insert(job, by);
            } else {
                self.suspensions.jobs.remove(&job);
            }
        }
        for tid in all.into_iter().filter(|tid| *tid != by) {
            // Suspending a suspended task again is harmless, because its daemon ignores it. A
            // resume must reach every task that the history lists as suspended.
            let is_suspended_now = self.model.is_suspended(tid)
                || (!suspend && self.history.writer.history.is_suspended(tid));
            if self.suspensions.preempted.contains_key(&tid)
                && let Err(error) = self.vm.suspend(
                    tid,
                    suspend,
                    SuspendCause::JobRequested { requested_by: by },
                )
            {
                // The task is preempted, so it also needs the job's suspension or resume as a cause
                // of its own. Without it, the task would resume or stay suspended separately from
                // its job when the preemption ends. So a failure is reported.
                others.push((tid, error.to_string()));
                continue;
            }
            match is_suspended_now {
                true if suspend => others.push((tid, "it is suspended already".to_string())),
                true if self.suspensions.preempted.contains_key(&tid) => {
                    others.push((
                        tid,
                        "it is preempted for another user's task and resumes when there is room for it"
                            .to_string(),
                    ));
                }
                false if !suspend => {}
                _ => match self.suspend_task(
                    tid,
                    suspend,
                    SuspendCause::JobRequested { requested_by: by },
                ) {
                    Ok(()) => tasks.push(tid),
                    Err(error) => others.push((tid, error.to_string())),
                },
            }
        }
        others.truncate(REPLY_ENTRIES_MAX);
        RmReply::Suspended {
            job,
            tasks,
            unchanged: others,
        }
    }

    /// Orders the suspension or the resume of a task, and updates the model.
    fn suspend_task(&mut self, tid: Tid, suspend: bool, cause: SuspendCause) -> Result<(), Error> {
        self.vm.suspend(tid, suspend, cause)?;
        self.model.task_suspended(tid, suspend);
        self.suspension_changed(tid, suspend);
        self.needs_decision = true;
        Ok(())
    }

    /// Suspends or resumes a task when no client waits for the result. Logs an error, unless the
    /// task has ended.
    fn suspend_or_log(&mut self, tid: Tid, suspend: bool, cause: SuspendCause) {
        if let Err(error) = self.suspend_task(tid, suspend, cause)
            && error.code != sempa_proto::PvmError::NoTask
        {
            let what = if suspend { "suspended" } else { "resumed" };
            self.log_note(format!("{tid} was not {what}: {error}"));
        }
    }

    /// Suspends running tasks of suspended jobs, for example tasks that have started since.
    pub(super) fn suspend_new_tasks(&mut self) {
        if !std::mem::take(&mut self.suspensions.recheck_jobs) {
            return;
        }
        let books = &self.history.writer.history;
        self.suspensions
            .jobs
            .retain(|job, _| books.job_of(*job).is_some_and(|job| job.ended.is_none()));
        for (job, by) in self.suspensions.jobs.clone() {
            for tid in self.model.computing_tasks_of(job) {
                self.suspend_or_log(tid, true, SuspendCause::JobRequested { requested_by: by });
            }
        }
    }

    /// Makes a preemption check: preempts tasks for the first waiting request that gets hosts by
    /// it. If there is none, resumes preempted tasks for which there is room. Returns true if tasks
    /// were preempted, so that waiting requests should be retried.
    ///
    /// Requests that find hosts without preemption must have been placed before.
    pub(super) fn preempt_and_resume(&mut self, now: Micros) -> bool {
        (self.suspensions.checked_at, self.suspensions.new_waiter) = (Some(now), false);
        let books = &self.history.writer.history;
        // The event log may not contain a recent suspension yet.
        let counts = |tid: Tid, since: Micros| {
            books.is_suspended(tid) || now.since(since) < PREEMPTION_INTERVAL
        };
        self.suspensions
            .preempted
            .retain(|tid, since| counts(*tid, *since));
        if !self.options.policy.give_way {
            let why = "the policy does not preempt tasks any more".to_string();
            for tid in self
                .suspensions
                .preempted
                .keys()
                .copied()
                .collect::<Vec<Tid>>()
            {
                self.end_preemption(tid, why.clone());
            }
            return false;
        }
        let (snapshot, spawns) = (self.model.snapshot(now), &self.spawns);
        // If preemption cannot help a request, the next ones are examined.
        let selections = spawns
            .waiting_for_hosts(now)
            .take(PREEMPTION_REQUESTS_MAX)
            .map(|(from, count, kept)| {
                let (user, caller, request) = (from.user, from.caller, &from.request);
                let ask = PlacementRequest {
                    peers: &snapshot.peer_hosts(caller, from.job),
                    reserved_hosts: kept,
                    ..PlacementRequest::new(user, request, count, caller)
                };
                select_victims(snapshot, spawns.fair_share(), &ask)
            });
        let victims = selections
            .into_iter()
            .find(|victims| !victims.is_empty())
            .unwrap_or_default();
        for victim in &victims {
            self.suspend_or_log(
                victim.tid,
                true,
                SuspendCause::Preempted {
                    why: victim.why.clone(),
                },
            );
            self.suspensions.preempted.insert(victim.tid, now);
        }
        if victims.is_empty() {
            self.resume_preempted(now);
        } else {
            self.suspensions.new_waiter = self.spawns.waiting_count() > 1;
        }
        !victims.is_empty()
    }

    /// Resumes preempted tasks for which there is room.
    fn resume_preempted(&mut self, now: Micros) {
        let jobs = &self.suspensions.jobs;
        let may = |tid: &Tid| !jobs.contains_key(&self.model.user_and_job(*tid).1);
        let gave_way = self
            .suspensions
            .preempted
            .iter()
            .filter(|(tid, _)| may(tid))
            .map(|(tid, at)| (*tid, *at))
            .collect();
        let busy = self.spawns.hosts_starting_tasks();
        for (tid, from, again) in select_resumable(self.model.snapshot(now), &gave_way, &busy) {
            let (from_name, user) = (self.model.host_name(from), self.model.user_and_job(tid).0);
            match again {
                ResumeAt::CurrentHost => self.end_preemption(
                    tid,
                    format!("there is room on {from_name} for user {user} again"),
                ),
                ResumeAt::OtherHost(to) => {
                    let to_name = self.model.host_name(to);
                    let why = format!(
                        "it was preempted on {from_name}, where others run now, and there is room on {to_name}"
                    );
                    self.start_migration(
                        now,
                        tid,
                        (from, to),
                        migration::MigrationCause::Load { why },
                        None,
                    );
                }
            }
        }
    }

    fn end_preemption(&mut self, tid: Tid, why: String) {
        let job = self.model.user_and_job(tid).1;
        if !self.suspensions.jobs.contains_key(&job) {
            self.suspend_or_log(tid, false, SuspendCause::Preempted { why });
        }
    }
}
