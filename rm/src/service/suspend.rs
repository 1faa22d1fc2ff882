//! Suspends tasks: whole jobs on request, and tasks of users with a high index to make room for
//! waiting requests (preemption). The daemons carry this out, and the event log reports it, so a
//! restarted resource manager knows from the history which tasks are suspended and why.

use super::Service;
use crate::api::VmApi;
use crate::decide::{ResumeAt, PlacementRequest, select_victims, select_resumable};
use libpvm::Error;
use sempa_proto::event::EventKind;
use sempa_proto::migration;
use sempa_proto::rm::{REPLY_ENTRIES_MAX, RmReply, SuspensionInfo};
use sempa_proto::suspend::SuspendCause;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;

/// Interval between preemption checks.
const PREEMPTION_INTERVAL: Micros = Micros::from_secs(10);
/// Shorter interval when a request has begun to wait, or when another request may profit.
const PREEMPTION_INTERVAL_SHORT: Micros = Micros::from_secs(1);
/// Maximum number of requests examined in one check, which ends with the first one that preemption
/// helps.
const PREEMPTION_REQUESTS_MAX: usize = 32;

/// State of suspended tasks and jobs.
#[derive(Debug, Default)]
pub(super) struct SuspensionState {
    /// Suspended jobs, with the task that requested it.
    jobs: BTreeMap<Tid, Tid>,
    /// The suspended jobs may have running tasks.
    recheck_jobs: bool,
    /// Preempted tasks, and when they were suspended.
    preempted: BTreeMap<Tid, Micros>,
    /// Time of the last preemption check.
    checked_at: Option<Micros>,
    /// A request has begun to wait since the last check.
    new_waiter: bool,
}

impl SuspensionState {
    /// Records the start of a task, or that its job became known.
    pub(super) fn task_started(&mut self) {
        self.recheck_jobs |= !self.jobs.is_empty();
    }

    /// Records that a request begins to wait.
    pub(super) fn request_waits(&mut self) {
        self.new_waiter = true;
    }
}

impl<V: VmApi> Service<V> {
    /// Restores the suspensions in the history.
    pub(super) fn restore_suspensions(&mut self) {
        let (now, wall) = (self.vm.now(), self.vm.wall_clock());
        let books = &self.history.writer.history;
        self.suspensions.jobs = books.suspended_jobs().collect();
        self.suspensions.recheck_jobs = true;
        let there = |tid: &Tid| self.model.is_suspended(*tid);
        let known = books.running().filter(|task| there(&task.tid));
        let known: Vec<(Tid, Tid, Option<SuspensionInfo>)> = known
            .map(|task| (task.tid, task.job, task.suspended.clone()))
            .collect();
        for (tid, job, suspended) in known {
            self.spawns.task_suspended(now, tid, true);
            match suspended.map(|s| (s.cause, s.since)) {
                Some((SuspendCause::Preempted { .. }, since)) => {
                    let age = wall.since(since).min(now);
                    self.suspensions.preempted.insert(tid, Micros(now.0 - age.0));
                }
                // The previous resource manager died while resuming this job.
                Some((cause @ SuspendCause::JobRequested { .. }, _))
                    if !self.suspensions.jobs.contains_key(&job) =>
                {
                    self.suspend_or_log(tid, false, cause);
                }
                _ => {}
            }
        }
    }

    /// Handles the event that a task was suspended or resumed.
    pub(super) fn suspension_changed(&mut self, tid: Tid, suspended: bool) {
        self.spawns.task_suspended(self.vm.now(), tid, suspended);
        if !suspended {
            self.suspensions.preempted.remove(&tid);
        }
    }

    /// The model may have dropped a task during its migration, and with it the suspension.
    pub(super) fn reapply_suspension(&mut self, tid: Tid) {
        if self.history.writer.history.is_suspended(tid) {
            self.model.task_suspended(tid, true);
        }
    }

    /// Returns when [`Service::share`] is due, or when waiting requests are tried again without an
    /// event.
    pub(super) fn preemption_due(&self) -> Option<Micros> {
        let wanted = !self.suspensions.preempted.is_empty() || self.spawns.waiting_count() > 0;
        let pause = if self.suspensions.new_waiter {
            PREEMPTION_INTERVAL_SHORT
        } else {
            PREEMPTION_INTERVAL
        };
        wanted.then(|| self.suspensions.checked_at.map_or(Micros(0), |at| at + pause))
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
            // A daemon ignores a repeated request. When a job resumes, every suspended task must
            // resume.
            let is_suspended_now = self.model.is_suspended(tid)
                || (!suspend && self.history.writer.history.is_suspended(tid));
            if self.suspensions.preempted.contains_key(&tid)
                && let Err(error) = self.vm.suspend(
                    tid,
                    suspend,
                    SuspendCause::JobRequested { requested_by: by },
                )
            {
                // Otherwise the task would be resumed, or stay suspended, without its job at the
                // end of the preemption.
                others.push((tid, error.to_string()));
                continue;
            }
            match is_suspended_now {
                true if suspend => others.push((tid, "it is suspended already".to_string())),
                true if self.suspensions.preempted.contains_key(&tid) => {
                    others.push((
                        tid,
                        "it gives way to another user's, and goes on when there is room for it"
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

    /// Suspends or resumes a task.
    fn suspend_task(&mut self, tid: Tid, suspend: bool, cause: SuspendCause) -> Result<(), Error> {
        self.vm.suspend(tid, suspend, cause)?;
        self.model.task_suspended(tid, suspend);
        self.suspension_changed(tid, suspend);
        self.needs_decision = true;
        Ok(())
    }

    /// Suspends or resumes a task without a client that waits for the result. A task that has ended
    /// is ignored; other errors are logged.
    fn suspend_or_log(&mut self, tid: Tid, suspend: bool, cause: SuspendCause) {
        if let Err(error) = self.suspend_task(tid, suspend, cause)
            && error.code != sempa_proto::PvmError::NoTask
        {
            let what = if suspend { "suspended" } else { "resumed" };
            self.log_note(format!("{tid} was not {what}: {error}"));
        }
    }

    /// Suspends tasks that started in suspended jobs.
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

    /// Preempts tasks for the first waiting request that this helps, and resumes preempted tasks
    /// for which there is room. Requests that find hosts without preemption have already been
    /// placed. True if there may be room for waiting requests.
    pub(super) fn preempt_and_resume(&mut self, now: Micros) -> bool {
        (self.suspensions.checked_at, self.suspensions.new_waiter) = (Some(now), false);
        let books = &self.history.writer.history;
        // A recent suspension may not be in the event log yet.
        let counts =
            |tid: Tid, since: Micros| books.is_suspended(tid) || now.since(since) < PREEMPTION_INTERVAL;
        self.suspensions
            .preempted
            .retain(|tid, since| counts(*tid, *since));
        if !self.options.policy.give_way {
            let why = "the policy has nobody give way any more".to_string();
            for tid in self.suspensions.preempted.keys().copied().collect::<Vec<Tid>>() {
                self.end_preemption(tid, why.clone());
            }
            return false;
        }
        let (snapshot, spawns) = (self.model.snapshot(now), &self.spawns);
        // A request that cannot be helped does not prevent helping others.
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
                        "it gave way on {from_name}, where others work now, and there is room on {to_name}"
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
