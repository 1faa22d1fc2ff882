//! Suspends tasks for two reasons: whole jobs on request, and tasks of users with a high Up-Down
//! index in order to make room for waiting requests (preemption). The daemons carry out
//! suspensions, and the event log reports them. A restarted resource manager therefore knows from
//! the history which tasks are suspended, and why.

use super::Service;
use crate::api::VmApi;
use crate::decide::{PlacementRequest, ResumeTarget, select_resumable, select_victims};
use libpvm::Error;
use sempa_proto::event::EventKind;
use sempa_proto::migration;
use sempa_proto::rm::{REPLY_ENTRIES_MAX, RmReply, SuspensionStart};
use sempa_proto::suspend::SuspendCause;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;

/// Interval between preemption checks.
const PREEMPTION_INTERVAL: Micros = Micros::from_secs(10);
/// Interval that is used instead of [`PREEMPTION_INTERVAL`] after a request has begun to wait, or
/// while more than one request waits.
const PREEMPTION_INTERVAL_SHORT: Micros = Micros::from_secs(1);
/// Maximum number of waiting requests that are examined in one check. The check ends at the first
/// request that gets hosts by preemption.
const PREEMPTION_REQUESTS_MAX: usize = 32;

/// State of suspended tasks and jobs.
#[derive(Debug, Default)]
pub(super) struct SuspensionState {
    /// Suspended jobs, each with the task that requested its suspension.
    job_requesters: BTreeMap<Tid, Tid>,
    /// True if suspended jobs may have running tasks. These tasks must be suspended.
    needs_job_check: bool,
    /// Preempted tasks, with the time of their suspension.
    preempted_at: BTreeMap<Tid, Micros>,
    /// Time of the last preemption check.
    checked_at: Option<Micros>,
    /// True if a request has begun to wait since the last preemption check.
    has_new_waiter: bool,
}

impl SuspensionState {
    /// Records that a task has started or that its job became known. Suspended jobs are then
    /// checked for running tasks.
    pub(super) fn request_job_check(&mut self) {
        self.needs_job_check |= !self.job_requesters.is_empty();
    }

    /// Records that a request begins to wait. The next preemption check is then due earlier.
    pub(super) fn record_waiting_request(&mut self) {
        self.has_new_waiter = true;
    }
}

impl<V: VmApi> Service<V> {
    /// Restores the suspensions that the history contains.
    pub(super) fn restore_suspensions(&mut self) {
        let (now, wall_time) = (self.vm.now(), self.vm.wall_clock());
        let stored_history = &self.history.writer.history;
        self.suspensions.job_requesters = stored_history.suspended_jobs().collect();
        self.suspensions.needs_job_check = true;
        let is_suspended_task = |tid: &Tid| self.model.is_suspended(*tid);
        let suspended_tasks = stored_history
            .running_tasks()
            .filter(|task| is_suspended_task(&task.tid));
        let suspended_tasks: Vec<(Tid, Tid, Option<SuspensionStart>)> = suspended_tasks
            .map(|task| (task.tid, task.job, task.suspension.clone()))
            .collect();
        for (tid, job, suspension_info) in suspended_tasks {
            self.spawns.record_suspension(now, tid, true);
            match suspension_info.map(|s| (s.cause, s.since)) {
                Some((SuspendCause::Preempted { .. }, since)) => {
                    let age = wall_time.since(since).min(now);
                    self.suspensions
                        .preempted_at
                        .insert(tid, Micros(now.0 - age.0));
                }
                // The previous resource manager ended before it had resumed all tasks of this job.
                Some((cause @ SuspendCause::JobRequested { .. }, _))
                    if !self.suspensions.job_requesters.contains_key(&job) =>
                {
                    self.set_task_suspended_or_log(tid, false, cause);
                }
                _ => {}
            }
        }
    }

    /// Handles the event that a task was suspended or resumed.
    pub(super) fn handle_suspension_change(&mut self, tid: Tid, suspended: bool) {
        self.spawns.record_suspension(self.vm.now(), tid, suspended);
        if !suspended {
            self.suspensions.preempted_at.remove(&tid);
        }
    }

    /// Marks a task as suspended again after a migration, because the model may have removed the
    /// task during the migration.
    pub(super) fn reapply_suspension(&mut self, tid: Tid) {
        if self.history.writer.history.is_suspended(tid) {
            self.model.set_suspended(tid, true);
        }
    }

    /// Returns the time at which the next preemption check ([`Service::preempt_and_resume`]) is
    /// due. Waiting requests are retried at the same time. `None` if no request waits and no task
    /// is preempted.
    pub(super) fn preemption_due(&self) -> Option<Micros> {
        let is_needed =
            !self.suspensions.preempted_at.is_empty() || self.spawns.waiting_count() > 0;
        let interval = if self.suspensions.has_new_waiter {
            PREEMPTION_INTERVAL_SHORT
        } else {
            PREEMPTION_INTERVAL
        };
        is_needed.then(|| {
            self.suspensions
                .checked_at
                .map_or(Micros(0), |last_check| last_check + interval)
        })
    }

    /// Handles a request of task `requester` to suspend or resume a whole job. `tid`: any task of
    /// the job. Returns the changed tasks, and the unchanged tasks with the reasons.
    pub(super) fn set_job_suspended(&mut self, requester: Tid, tid: Tid, suspend: bool) -> RmReply {
        let Some(job) = self.history.writer.history.job_of(tid).map(|job| job.job) else {
            return RmReply::NotFound;
        };
        let job_tasks = self.model.job_tasks(job);
        let (mut tasks, mut unchanged_tasks) = (Vec::new(), Vec::new());
        let is_job_suspended = self.suspensions.job_requesters.contains_key(&job);
        if suspend != is_job_suspended && !(suspend && job_tasks.is_empty()) {
            self.log_event(if suspend {
                EventKind::JobSuspended {
                    job,
                    requested_by: requester,
                }
            } else {
                EventKind::JobResumed {
                    job,
                    requested_by: requester,
                }
            });
            if suspend {
                self.suspensions.job_requesters.insert(job, requester);
            } else {
                self.suspensions.job_requesters.remove(&job);
            }
        }
        for tid in job_tasks.into_iter().filter(|tid| *tid != requester) {
            // Suspending a suspended task again is harmless, because its daemon ignores the order.
            // A resume must reach every task that the history lists as suspended.
            let is_suspended_now = self.model.is_suspended(tid)
                || (!suspend && self.history.writer.history.is_suspended(tid));
            if self.suspensions.preempted_at.contains_key(&tid)
                && let Err(error) = self.vm.set_suspended(
                    tid,
                    suspend,
                    SuspendCause::JobRequested {
                        requested_by: requester,
                    },
                )
            {
                // For a preempted task, the request of its job is a second cause of suspension,
                // which must be set or removed separately. If this fails, the end of the preemption
                // would resume or suspend the task separately from its job. The failure is
                // therefore reported.
                unchanged_tasks.push((tid, error.to_string()));
                continue;
            }
            match is_suspended_now {
                true if suspend => {
                    unchanged_tasks.push((tid, "it is suspended already".to_string()))
                }
                true if self.suspensions.preempted_at.contains_key(&tid) => {
                    unchanged_tasks.push((
                        tid,
                        "it is preempted for another user's task and resumes when there is room for it"
                            .to_string(),
                    ));
                }
                false if !suspend => {}
                _ => match self.set_task_suspended(
                    tid,
                    suspend,
                    SuspendCause::JobRequested {
                        requested_by: requester,
                    },
                ) {
                    Ok(()) => tasks.push(tid),
                    Err(error) => unchanged_tasks.push((tid, error.to_string())),
                },
            }
        }
        unchanged_tasks.truncate(REPLY_ENTRIES_MAX);
        RmReply::Suspended {
            job,
            tasks,
            unchanged_tasks,
        }
    }

    /// Orders the suspension or the resume of a task, and updates the model.
    fn set_task_suspended(
        &mut self,
        tid: Tid,
        suspend: bool,
        cause: SuspendCause,
    ) -> Result<(), Error> {
        self.vm.set_suspended(tid, suspend, cause)?;
        self.model.set_suspended(tid, suspend);
        self.handle_suspension_change(tid, suspend);
        self.needs_eviction_decision = true;
        Ok(())
    }

    /// Suspends or resumes a task when no client waits for the result. Logs an error, unless the
    /// task has ended.
    fn set_task_suspended_or_log(&mut self, tid: Tid, suspend: bool, cause: SuspendCause) {
        if let Err(error) = self.set_task_suspended(tid, suspend, cause)
            && error.code != sempa_proto::PvmError::NoTask
        {
            let action = if suspend { "suspended" } else { "resumed" };
            self.log_note(format!("{tid} was not {action}: {error}"));
        }
    }

    /// Suspends running tasks of suspended jobs, for example tasks that have started after the
    /// suspension.
    pub(super) fn suspend_new_tasks(&mut self) {
        if !std::mem::take(&mut self.suspensions.needs_job_check) {
            return;
        }
        let stored_history = &self.history.writer.history;
        self.suspensions.job_requesters.retain(|job, _| {
            stored_history
                .job_of(*job)
                .is_some_and(|job| job.ended_at.is_none())
        });
        for (job, requester) in self.suspensions.job_requesters.clone() {
            for tid in self.model.computing_job_tasks(job) {
                self.set_task_suspended_or_log(
                    tid,
                    true,
                    SuspendCause::JobRequested {
                        requested_by: requester,
                    },
                );
            }
        }
    }

    /// Makes a preemption check: preempts tasks for the first waiting request that gets hosts by
    /// preemption. If no request gets hosts, resumes preempted tasks for which there is room. If
    /// the policy no longer preempts, resumes all preempted tasks. Returns true if tasks were
    /// preempted, so that waiting requests should be retried.
    ///
    /// The caller must first have placed the requests that find hosts without preemption.
    pub(super) fn preempt_and_resume(&mut self, now: Micros) -> bool {
        (self.suspensions.checked_at, self.suspensions.has_new_waiter) = (Some(now), false);
        let stored_history = &self.history.writer.history;
        // The event log may not contain a recent suspension yet.
        let is_still_preempted = |tid: Tid, suspended_at: Micros| {
            stored_history.is_suspended(tid) || now.since(suspended_at) < PREEMPTION_INTERVAL
        };
        self.suspensions
            .preempted_at
            .retain(|tid, suspended_at| is_still_preempted(*tid, *suspended_at));
        if !self.options.policy.preempts {
            let resume_reason = "the policy does not preempt tasks any more".to_string();
            for tid in self
                .suspensions
                .preempted_at
                .keys()
                .copied()
                .collect::<Vec<Tid>>()
            {
                self.end_preemption(tid, resume_reason.clone());
            }
            return false;
        }
        let (snapshot, spawns) = (self.model.update_snapshot(now), &self.spawns);
        // If preemption cannot help a request, the next request is examined.
        let selections = spawns
            .requests_waiting_for_hosts(now)
            .take(PREEMPTION_REQUESTS_MAX)
            .map(|(incoming_spawn, task_count, other_reserved_hosts)| {
                let (user, caller_host, request) = (
                    incoming_spawn.user,
                    incoming_spawn.caller_host,
                    &incoming_spawn.request,
                );
                let placement_request = PlacementRequest {
                    peer_hosts: &snapshot.peer_hosts(caller_host, incoming_spawn.job),
                    reserved_hosts: other_reserved_hosts,
                    ..PlacementRequest::new(user, request, task_count, caller_host)
                };
                select_victims(snapshot, spawns.fair_share(), &placement_request)
            });
        let victims = selections
            .into_iter()
            .find(|victims| !victims.is_empty())
            .unwrap_or_default();
        for victim in &victims {
            self.set_task_suspended_or_log(
                victim.tid,
                true,
                SuspendCause::Preempted {
                    why: victim.why.clone(),
                },
            );
            self.suspensions.preempted_at.insert(victim.tid, now);
        }
        if victims.is_empty() {
            self.resume_preempted(now);
        } else {
            self.suspensions.has_new_waiter = self.spawns.waiting_count() > 1;
        }
        !victims.is_empty()
    }

    /// Resumes preempted tasks for which there is room. Some of them must first migrate to another
    /// host.
    fn resume_preempted(&mut self, now: Micros) {
        let suspended_jobs = &self.suspensions.job_requesters;
        let may_resume = |tid: &Tid| !suspended_jobs.contains_key(&self.model.user_and_job(*tid).1);
        let candidates = self
            .suspensions
            .preempted_at
            .iter()
            .filter(|(tid, _)| may_resume(tid))
            .map(|(tid, suspended_at)| (*tid, *suspended_at))
            .collect();
        let starting_hosts = self.spawns.hosts_starting_tasks();
        for (tid, source, resume_target) in select_resumable(
            self.model.update_snapshot(now),
            &candidates,
            &starting_hosts,
        ) {
            let (from_name, user) = (self.model.host_name(source), self.model.user_and_job(tid).0);
            match resume_target {
                ResumeTarget::CurrentHost => self.end_preemption(
                    tid,
                    format!("there is room on {from_name} for user {user} again"),
                ),
                ResumeTarget::OtherHost(target) => {
                    let to_name = self.model.host_name(target);
                    let cause_text = format!(
                        "it was preempted on {from_name}, where others run now, and there is room on {to_name}"
                    );
                    self.start_migration(
                        now,
                        tid,
                        (source, target),
                        migration::MigrationCause::Load { why: cause_text },
                        None,
                    );
                }
            }
        }
    }

    fn end_preemption(&mut self, tid: Tid, why: String) {
        let job = self.model.user_and_job(tid).1;
        if !self.suspensions.job_requesters.contains_key(&job) {
            self.set_task_suspended_or_log(tid, false, SuspendCause::Preempted { why });
        }
    }
}
