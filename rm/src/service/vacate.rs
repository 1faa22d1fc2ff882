//! Vacates jobs. A job is vacated if one of its tasks must leave its host, no other host accepts
//! the task, and the owner requests vacating. The whole job is then checkpointed and ended. The job
//! is restarted from the checkpoint when hosts have room for it.
//!
//! The daemons make and restart the checkpoints, and the event log reports the results. A restarted
//! resource manager therefore continues from the history.

use super::Service;
use crate::api::VmApi;
use crate::decide::{EvictionPlan, assign_hosts, could_hosts_ever_fit};
use crate::store::history::vacated::{VACATED_JOBS_MAX, VacatedJob};
use sempa_proto::event::EventKind;
use sempa_proto::rm::RmReply;
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::BTreeMap;

/// Delay before the next attempt after a checkpoint has failed.
const CHECKPOINT_RETRY_DELAY: Micros = Micros::from_secs(60);
/// Delay before the next attempt if another checkpoint of the job is in progress.
const CHECKPOINT_BUSY_DELAY: Micros = Micros::from_secs(5);
/// Timeout for the result of a checkpoint or of a restart.
const CHECKPOINT_RESULT_TIMEOUT: Micros = Micros::from_secs(4 * 3600);
/// Interval between checks whether hosts have room for a vacated job.
const VACATED_CHECK_INTERVAL: Micros = Micros::from_secs(5);
/// Delay before a failed restart is retried. Doubles after each failure, up to
/// [`RESTART_DELAY_MAX`].
const RESTART_DELAY_MIN: Micros = Micros::from_secs(10);
const RESTART_DELAY_MAX: Micros = Micros::from_secs(600);
/// Maximum number of failed restarts of a checkpoint. After these failures, the checkpoint is not
/// restarted automatically.
const RESTART_FAILURES_MAX: u32 = 20;

/// Waiting time after which hosts are reserved for a vacated job, so that smaller jobs cannot be
/// restarted before it.
pub const VACATED_RESERVATION_DELAY: Micros = Micros::from_secs(600);

/// Retry state of the restart of one checkpoint.
#[derive(Debug, Default)]
struct RestartBackoff {
    next_attempt_at: Micros,
    delay: Micros,
    failure_count: u32,
}

/// State of vacated jobs that the history does not contain.
#[derive(Debug, Default)]
pub(super) struct VacateState {
    /// Jobs that must not be vacated before the given time, because their checkpoint is in progress
    /// or has failed.
    retry_at: BTreeMap<Tid, Micros>,
    restart_backoffs: BTreeMap<String, RestartBackoff>,
    /// The checkpoint that is being restarted. The time is the end of the interval in which no
    /// other checkpoint is restarted.
    current_restart: Option<(String, Micros)>,
    /// Time at which this resource manager first saw each checkpoint waiting for its restart.
    waiting_since: BTreeMap<String, Micros>,
    /// The checkpoint whose reservation was logged most recently.
    logged_reservation: Option<String>,
    /// Tasks of each job that this resource manager has vacated or is vacating.
    tasks_by_job: BTreeMap<Tid, Vec<Tid>>,
    /// Jobs whose restart was cancelled while they were being checkpointed, each with the task that
    /// requested the cancellation.
    cancellation_requesters: BTreeMap<Tid, Tid>,
    next_check_at: Micros,
}

impl<V: VmApi> Service<V> {
    /// Vacates the jobs of tasks that must leave their host but stay, if the owner's policy
    /// requests vacating.
    pub(super) fn vacate_jobs(&mut self, now: Micros, plan: &EvictionPlan) {
        let snapshot = self.model.update_snapshot(now);
        let vacating_stays = plan.stays.iter().filter(|stay| stay.vacates_job(snapshot));
        let vacating_stays: Vec<_> = vacating_stays
            .map(|stay| {
                (
                    stay.tid,
                    snapshot.host_name(stay.host),
                    stay.describe(snapshot),
                )
            })
            .collect();
        self.vacate_state
            .retry_at
            .retain(|_, retry_delay| *retry_delay > now);
        let stored_history = &self.history.writer.history;
        let (state, is_job_vacated) = (&mut self.vacate_state, |job| {
            stored_history
                .vacated_jobs()
                .any(|is_job_vacated| is_job_vacated.job == job)
        });
        state
            .cancellation_requesters
            .retain(|job, _| state.retry_at.contains_key(job) || is_job_vacated(*job));
        state
            .tasks_by_job
            .retain(|job, _| state.retry_at.contains_key(job) || is_job_vacated(*job));
        for (tid, host, reason) in vacating_stays {
            // If some tasks of the job have ended, the job is not vacated and its tasks stay
            // paused, because a restart from the checkpoint would lose messages between the job's
            // tasks.
            let Some(job) = self.model.checkpoint_root(tid) else {
                continue;
            };
            // The history lists the job until its last tasks have ended.
            let is_vacated = self
                .history
                .writer
                .history
                .vacated_jobs()
                .any(|is_job_vacated| is_job_vacated.job == job);
            let is_full = self.history.writer.history.vacated_jobs().count() >= VACATED_JOBS_MAX;
            // A job with a migrating task is skipped. The end of the migration is an event that
            // triggers the next check. A job with suspended tasks is skipped too, because its user
            // must resume it.
            if is_vacated
                || is_full
                || self.vacate_state.retry_at.contains_key(&job)
                || self.model.is_job_busy(job)
            {
                continue;
            }
            let retry_delay = match self.vm.checkpoint_and_end(job) {
                Ok(()) => {
                    self.log_note(format!(
                        "job {job} is checkpointed and ended: {tid} must leave {host}, and {reason}"
                    ));
                    self.history.writer.history.record_vacate(
                        self.vm.wall_clock(),
                        job,
                        (tid, host),
                        reason,
                    );
                    CHECKPOINT_RESULT_TIMEOUT
                }
                Err(error) if error.code == PvmError::Already => CHECKPOINT_BUSY_DELAY,
                Err(error) => {
                    self.log_note(format!(
                        "job {job} was not checkpointed ({error}): {tid} stays on {host}"
                    ));
                    CHECKPOINT_RETRY_DELAY
                }
            };
            self.vacate_state.retry_at.insert(job, now + retry_delay);
            self.vacate_state
                .tasks_by_job
                .insert(job, self.model.job_tasks(self.model.user_and_job(job).1));
        }
        let retry_times = self.vacate_state.retry_at.values().copied();
        self.eviction_decision_at = self
            .eviction_decision_at
            .into_iter()
            .chain(retry_times)
            .min();
    }

    /// Updates the retry state after events about checkpoints and restarts.
    pub(super) fn handle_vacate_event(&mut self, kind: &EventKind) {
        let (now, state) = (self.vm.now(), &mut self.vacate_state);
        match kind {
            EventKind::CheckpointFailed { job, .. } => {
                if let Some(retry_time) = state.retry_at.get_mut(job) {
                    *retry_time = now + CHECKPOINT_RETRY_DELAY;
                }
            }
            EventKind::Checkpointed {
                checkpoint: checkpoint_name,
                job,
                vacated: true,
                ..
            } => {
                state.retry_at.remove(job);
                // The first restart is delayed until the job's tasks have ended.
                state.restart_backoffs.insert(
                    checkpoint_name.clone(),
                    RestartBackoff {
                        next_attempt_at: now + VACATED_CHECK_INTERVAL,
                        delay: RESTART_DELAY_MIN,
                        failure_count: 0,
                    },
                );
            }
            EventKind::RestartFailed {
                checkpoint: checkpoint_name,
                ..
            } => {
                state
                    .current_restart
                    .take_if(|(restarting_name, _)| restarting_name == checkpoint_name);
                if let Some(RestartBackoff {
                    next_attempt_at,
                    delay,
                    failure_count,
                }) = state.restart_backoffs.get_mut(checkpoint_name)
                {
                    *failure_count += 1;
                    (*next_attempt_at, *delay) =
                        (now + *delay, Micros(delay.0 * 2).min(RESTART_DELAY_MAX));
                }
            }
            EventKind::Restarted {
                checkpoint: checkpoint_name,
                ..
            } => {
                state
                    .current_restart
                    .take_if(|(restarting_name, _)| restarting_name == checkpoint_name);
                state.restart_backoffs.remove(checkpoint_name);
            }
            _ => {}
        }
    }

    /// Returns the time at which [`Service::restart_next_vacated`] is due; `None` if no job is
    /// vacated.
    pub(super) fn vacated_check_due(&self) -> Option<Micros> {
        self.history
            .writer
            .history
            .vacated_jobs()
            .next()
            .map(|_| self.vacate_state.next_check_at)
    }

    /// Restarts at most one vacated job: among the jobs for which hosts have room, the job that has
    /// waited longest. First carries out requested cancellations, and removes the checkpoints whose
    /// restart has failed too often.
    pub(super) fn restart_next_vacated(&mut self, now: Micros) {
        if self.vacate_state.next_check_at > now {
            return;
        }
        self.vacate_state.next_check_at = now + VACATED_CHECK_INTERVAL;
        for (job, requester) in self.vacate_state.cancellation_requesters.clone() {
            if let RmReply::VacatedCancelled {
                restart_started: false,
                ..
            } = self.cancel_restart(requester, job)
            {
                self.vacate_state.cancellation_requesters.remove(&job);
            }
        }
        self.drop_failed_restarts();
        if self
            .vacate_state
            .current_restart
            .as_ref()
            .is_some_and(|(_, timeout)| *timeout > now)
        {
            return;
        }
        let Some((checkpoint_name, host_names)) = self.next_restartable(now) else {
            return;
        };
        let backoff_entry = self
            .vacate_state
            .restart_backoffs
            .entry(checkpoint_name.clone());
        backoff_entry
            .or_insert(RestartBackoff {
                next_attempt_at: now,
                delay: RESTART_DELAY_MIN,
                failure_count: 0,
            })
            .next_attempt_at = now + RESTART_DELAY_MIN;
        match self.vm.restart(&checkpoint_name, &host_names) {
            // An event reports the result of the restart.
            Ok(()) => {
                self.vacate_state.current_restart =
                    Some((checkpoint_name, now + CHECKPOINT_RESULT_TIMEOUT))
            }
            Err(error) => self.log_note(format!(
                "checkpoint {checkpoint_name} was not restarted: {error}"
            )),
        }
    }

    /// Returns the checkpoint to restart, with the host name of each of its tasks. Among the
    /// checkpoints for which hosts have room, this is the one that has waited longest.
    ///
    /// If a checkpoint has waited for [`VACATED_RESERVATION_DELAY`] and hosts could have room for
    /// it, the hosts that it could use are reserved: later checkpoints must not use them.
    fn next_restartable(&mut self, now: Micros) -> Option<(String, Vec<String>)> {
        let (stored_history, state) = (&self.history.writer.history, &mut self.vacate_state);
        state.waiting_since.retain(|checkpoint_name, _| {
            stored_history
                .vacated_jobs()
                .any(|vacated_job| vacated_job.checkpoint == *checkpoint_name)
        });
        let snapshot = self.model.update_snapshot(now);
        let (mut reservation, mut restart_choice): (Option<&VacatedJob>, _) = (None, None);
        for vacated_job in stored_history.vacated_jobs() {
            let waiting_from = *state
                .waiting_since
                .entry(vacated_job.checkpoint.clone())
                .or_insert(now);
            if restart_choice.is_some()
                || state
                    .restart_backoffs
                    .get(&vacated_job.checkpoint)
                    .is_some_and(|backoff| backoff.next_attempt_at > now)
            {
                continue;
            }
            let VacatedJob {
                task_count: task_total,
                programs: task_programs,
                ..
            } = vacated_job;
            match assign_hosts(
                snapshot,
                *task_total,
                task_programs,
                reservation.map(|reserved_job| &reserved_job.programs[..]),
            ) {
                Some(assigned_hosts) => {
                    let hosts = assigned_hosts
                        .iter()
                        .map(|host| snapshot.host_name(*host))
                        .collect();
                    restart_choice = Some((vacated_job.checkpoint.clone(), hosts));
                }
                None if reservation.is_none()
                    && now.since(waiting_from) >= VACATED_RESERVATION_DELAY
                    && could_hosts_ever_fit(snapshot, *task_total, task_programs) =>
                {
                    reservation = Some(vacated_job);
                }
                None => {}
            }
        }
        let reservation =
            reservation.map(|reserved_job| (reserved_job.checkpoint.clone(), reserved_job.job));
        self.log_vacated_reservation(reservation);
        restart_choice
    }

    /// Logs the reservation for a checkpoint, unless the last logged reservation was for the same
    /// checkpoint.
    fn log_vacated_reservation(&mut self, reservation: Option<(String, Tid)>) {
        let Some((checkpoint_name, job)) = reservation else {
            return;
        };
        if self.vacate_state.logged_reservation.as_ref() == Some(&checkpoint_name) {
            return;
        }
        let minutes = VACATED_RESERVATION_DELAY.0 / 60_000_000;
        self.log_note(format!(
            "checkpoint {checkpoint_name} of job {job} has waited {minutes} minutes for room: hosts that it could use are \
             reserved for it"
        ));
        self.vacate_state.logged_reservation = Some(checkpoint_name);
    }

    /// Handles a request of task `requester` not to restart the vacated job that contains the task
    /// `tid`. If the job is still being checkpointed, replies that no vacated job was found and
    /// carries out the cancellation later.
    pub(super) fn cancel_restart(&mut self, requester: Tid, tid: Tid) -> RmReply {
        let job_of_task = self
            .vacate_state
            .tasks_by_job
            .iter()
            .find(|(_, tasks)| tasks.contains(&tid))
            .map(|(job, _)| *job);
        let stored_history = &self.history.writer.history;
        let vacated_job = stored_history
            .vacated_job_of(tid)
            .or_else(|| stored_history.vacated_job_of(job_of_task?));
        let Some(VacatedJob {
            job,
            checkpoint: checkpoint_name,
            ..
        }) = vacated_job.cloned()
        else {
            let vacating_job =
                job_of_task.filter(|job| self.vacate_state.retry_at.contains_key(job));
            self.vacate_state
                .cancellation_requesters
                .extend(vacating_job.map(|job| (job, requester)));
            return RmReply::NotFound;
        };
        let (now, is_restarting) = (self.vm.now(), self.vacate_state.current_restart.as_ref());
        let is_restarting = is_restarting.is_some_and(|(restarting_name, timeout)| {
            *restarting_name == checkpoint_name && *timeout > now
        });
        if !is_restarting {
            self.history
                .writer
                .history
                .remove_vacated(|vacated_job| vacated_job.checkpoint == checkpoint_name);
            self.vacate_state.restart_backoffs.remove(&checkpoint_name);
            self.log_note(format!(
                "job {job} is not restarted ({requester} asked for it); its checkpoint {checkpoint_name} remains"
            ));
        }
        RmReply::VacatedCancelled {
            job,
            checkpoint: checkpoint_name,
            restart_started: is_restarting,
        }
    }

    /// Removes the checkpoints whose restart has failed [`RESTART_FAILURES_MAX`] times. A user can
    /// still restart them.
    fn drop_failed_restarts(&mut self) {
        let has_failed = |backoff: &RestartBackoff| backoff.failure_count >= RESTART_FAILURES_MAX;
        let checkpoints: Vec<String> = self
            .vacate_state
            .restart_backoffs
            .iter()
            .filter(|(_, backoff)| has_failed(backoff))
            .map(|(name, _)| name.clone())
            .collect();
        for name in checkpoints {
            self.vacate_state.restart_backoffs.remove(&name);
            self.history
                .writer
                .history
                .remove_vacated(|vacated_job| vacated_job.checkpoint == name);
            self.log_note(format!(
                "checkpoint {name} could not be restarted in {RESTART_FAILURES_MAX} attempts and is given up; 'pvm restart {name}' \
                 restarts it"
            ));
        }
    }
}
