//! Vacates jobs. If a task must leave its host, no other host accepts it, and the owner requests
//! it, then the whole job is checkpointed and ended. The job is restarted from the checkpoint when
//! hosts have room for it.
//!
//! The daemons make and restart the checkpoints, and the event log reports the results. A restarted
//! resource manager therefore continues from the history.

use super::Service;
use crate::api::VmApi;
use crate::decide::{EvictionPlan, assign_hosts, could_ever_fit};
use crate::store::history::vacated::{VACATED_MAX, VacatedJob};
use sempa_proto::event::EventKind;
use sempa_proto::rm::RmReply;
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::BTreeMap;

/// Delay before the next attempt after a checkpoint has failed.
const VACATE_RETRY_DELAY: Micros = Micros::from_secs(60);
/// Delay before the next attempt if another checkpoint of the job is in progress.
const VACATE_BUSY_DELAY: Micros = Micros::from_secs(5);
/// Timeout for the result of a checkpoint or of a restart.
const VACATE_ANSWER_TIMEOUT: Micros = Micros::from_secs(4 * 3600);
/// Interval between checks whether there is room for a vacated job.
const VACATED_CHECK_INTERVAL: Micros = Micros::from_secs(5);
/// Delay before a failed restart is retried. Doubles each time, up to [`RESTART_DELAY_MAX`].
const RESTART_DELAY_MIN: Micros = Micros::from_secs(10);
const RESTART_DELAY_MAX: Micros = Micros::from_secs(600);
/// Maximum number of failed restarts of a checkpoint. After them, it is not restarted
/// automatically.
const RESTART_TRIES_MAX: u32 = 20;

/// Waiting time after which room is reserved for a vacated job, so that smaller jobs cannot be
/// restarted before it.
pub const VACATED_RESERVE_AFTER: Micros = Micros::from_secs(600);

/// Retry state of the restart of one checkpoint.
#[derive(Debug, Default)]
struct RestartBackoff {
    next_try: Micros,
    delay: Micros,
    failures: u32,
}

/// State of vacated jobs that the history does not contain.
#[derive(Debug, Default)]
pub(super) struct VacateState {
    /// Jobs that must not be vacated before the given time, because their checkpoint is in progress
    /// or has failed.
    paused_until: BTreeMap<Tid, Micros>,
    backoffs: BTreeMap<String, RestartBackoff>,
    /// The checkpoint that is being restarted, and the time until which no other checkpoint is
    /// restarted.
    restarting: Option<(String, Micros)>,
    /// Time at which this resource manager first saw each checkpoint wait.
    waiting_since: BTreeMap<String, Micros>,
    /// The checkpoint whose reservation was logged last.
    reserved_for: Option<String>,
    /// Tasks of each job that this resource manager has vacated or is vacating.
    tasks_by_job: BTreeMap<Tid, Vec<Tid>>,
    /// Jobs whose restart was cancelled while they were being checkpointed, with the requesting
    /// task.
    cancelled_by: BTreeMap<Tid, Tid>,
    next_check: Micros,
}

impl<V: VmApi> Service<V> {
    /// Vacates the jobs of tasks that should leave their host but stay, if the owner's terms
    /// request it.
    pub(super) fn vacate_jobs(&mut self, now: Micros, decided: &EvictionPlan) {
        let snapshot = self.model.snapshot(now);
        let staying = decided
            .staying
            .iter()
            .filter(|stay| stay.vacates_job(snapshot));
        let staying: Vec<_> = staying
            .map(|stay| {
                (
                    stay.tid,
                    snapshot.host_name(stay.host),
                    stay.describe(snapshot),
                )
            })
            .collect();
        self.vacating.paused_until.retain(|_, until| *until > now);
        let books = &self.history.writer.history;
        let (parking, parked) = (&mut self.vacating, |job| {
            books.vacated_jobs().any(|parked| parked.job == job)
        });
        parking
            .cancelled_by
            .retain(|job, _| parking.paused_until.contains_key(job) || parked(*job));
        parking
            .tasks_by_job
            .retain(|job, _| parking.paused_until.contains_key(job) || parked(*job));
        for (tid, host, why) in staying {
            // If some tasks of the job have ended, the job is not vacated and its tasks stay
            // paused: a restart from the checkpoint would lose messages between the job's tasks.
            let Some(job) = self.model.checkpoint_root(tid) else {
                continue;
            };
            // The history lists the job until its last tasks have ended.
            let is_parked = self
                .history
                .writer
                .history
                .vacated_jobs()
                .any(|parked| parked.job == job);
            let full = self.history.writer.history.vacated_jobs().count() >= VACATED_MAX;
            // A job with a migrating task is skipped; the end of the migration is an event that
            // triggers the next check. A job with suspended tasks is skipped, because its user must
            // resume it.
            if is_parked
                || full
                || self.vacating.paused_until.contains_key(&job)
                || self.model.is_job_busy(job)
            {
                continue;
            }
            let until = match self.vm.checkpoint_and_end(job) {
                Ok(()) => {
                    self.log_note(format!(
                        "job {job} is checkpointed and ended: {tid} must leave {host}, and {why}"
                    ));
                    self.history.writer.history.record_vacate(
                        self.vm.wall_clock(),
                        job,
                        (tid, host),
                        why,
                    );
                    VACATE_ANSWER_TIMEOUT
                }
                Err(error) if error.code == PvmError::Already => VACATE_BUSY_DELAY,
                Err(error) => {
                    self.log_note(format!(
                        "job {job} was not checkpointed ({error}): {tid} stays on {host}"
                    ));
                    VACATE_RETRY_DELAY
                }
            };
            self.vacating.paused_until.insert(job, now + until);
            self.vacating
                .tasks_by_job
                .insert(job, self.model.tasks_of(self.model.user_and_job(job).1));
        }
        let again = self.vacating.paused_until.values().copied();
        self.decide_at = self.decide_at.into_iter().chain(again).min();
    }

    /// Updates the retry state after events about checkpoints and restarts.
    pub(super) fn handle_vacate_event(&mut self, kind: &EventKind) {
        let (now, parking) = (self.vm.now(), &mut self.vacating);
        match kind {
            EventKind::CheckpointFailed { job, .. } => {
                if let Some(until) = parking.paused_until.get_mut(job) {
                    *until = now + VACATE_RETRY_DELAY;
                }
            }
            EventKind::Checkpointed {
                checkpoint: set,
                job,
                vacated: true,
                ..
            } => {
                parking.paused_until.remove(job);
                // The first restart is delayed until the job's tasks have ended.
                parking.backoffs.insert(
                    set.clone(),
                    RestartBackoff {
                        next_try: now + VACATED_CHECK_INTERVAL,
                        delay: RESTART_DELAY_MIN,
                        failures: 0,
                    },
                );
            }
            EventKind::RestartFailed {
                checkpoint: set, ..
            } => {
                parking.restarting.take_if(|(starting, _)| starting == set);
                if let Some(RestartBackoff {
                    next_try,
                    delay,
                    failures,
                }) = parking.backoffs.get_mut(set)
                {
                    *failures += 1;
                    (*next_try, *delay) =
                        (now + *delay, Micros(delay.0 * 2).min(RESTART_DELAY_MAX));
                }
            }
            EventKind::Restarted {
                checkpoint: set, ..
            } => {
                parking.restarting.take_if(|(starting, _)| starting == set);
                parking.backoffs.remove(set);
            }
            _ => {}
        }
    }

    /// Returns when [`Service::restart_vacated`] is due.
    pub(super) fn vacated_check_due(&self) -> Option<Micros> {
        self.history
            .writer
            .history
            .vacated_jobs()
            .next()
            .map(|_| self.vacating.next_check)
    }

    /// Restarts at most one vacated job: of those for which there is room, the one that has waited
    /// longest.
    pub(super) fn restart_vacated(&mut self, now: Micros) {
        if self.vacating.next_check > now {
            return;
        }
        self.vacating.next_check = now + VACATED_CHECK_INTERVAL;
        for (job, by) in self.vacating.cancelled_by.clone() {
            if let RmReply::VacatedCancelled {
                starting: false, ..
            } = self.cancel_restart(by, job)
            {
                self.vacating.cancelled_by.remove(&job);
            }
        }
        self.drop_failed_restarts();
        if self
            .vacating
            .restarting
            .as_ref()
            .is_some_and(|(_, until)| *until > now)
        {
            return;
        }
        let Some((set, on)) = self.next_restartable(now) else {
            return;
        };
        let tried = self.vacating.backoffs.entry(set.clone());
        tried
            .or_insert(RestartBackoff {
                next_try: now,
                delay: RESTART_DELAY_MIN,
                failures: 0,
            })
            .next_try = now + RESTART_DELAY_MIN;
        match self.vm.restart(&set, &on) {
            // An event reports the result.
            Ok(()) => self.vacating.restarting = Some((set, now + VACATE_ANSWER_TIMEOUT)),
            Err(error) => self.log_note(format!("checkpoint {set} was not restarted: {error}")),
        }
    }

    /// Returns the checkpoint to restart, with the host of each of its tasks: of those for which
    /// there is room, the one that has waited longest.
    ///
    /// If a checkpoint has waited for [`VACATED_RESERVE_AFTER`] and room for it is possible, its
    /// room is reserved: later ones must not use it.
    fn next_restartable(&mut self, now: Micros) -> Option<(String, Vec<String>)> {
        let (books, parking) = (&self.history.writer.history, &mut self.vacating);
        parking
            .waiting_since
            .retain(|set, _| books.vacated_jobs().any(|parked| parked.checkpoint == *set));
        let snapshot = self.model.snapshot(now);
        let (mut reserved, mut found): (Option<&VacatedJob>, _) = (None, None);
        for parked in books.vacated_jobs() {
            let since = *parking
                .waiting_since
                .entry(parked.checkpoint.clone())
                .or_insert(now);
            if found.is_some()
                || parking
                    .backoffs
                    .get(&parked.checkpoint)
                    .is_some_and(|tried| tried.next_try > now)
            {
                continue;
            }
            let VacatedJob {
                tasks,
                programs: kinds,
                ..
            } = parked;
            match assign_hosts(
                snapshot,
                *tasks,
                kinds,
                reserved.map(|first| &first.programs[..]),
            ) {
                Some(places) => {
                    let hosts = places
                        .iter()
                        .map(|host| snapshot.host_name(*host))
                        .collect();
                    found = Some((parked.checkpoint.clone(), hosts));
                }
                None if reserved.is_none()
                    && now.since(since) >= VACATED_RESERVE_AFTER
                    && could_ever_fit(snapshot, *tasks, kinds) =>
                {
                    reserved = Some(parked);
                }
                None => {}
            }
        }
        let reserved = reserved.map(|first| (first.checkpoint.clone(), first.job));
        self.log_vacated_reservation(reserved);
        found
    }

    /// Logs the reservation for a checkpoint, unless the last logged one was for the same
    /// checkpoint.
    fn log_vacated_reservation(&mut self, kept: Option<(String, Tid)>) {
        let Some((set, job)) = kept else { return };
        if self.vacating.reserved_for.as_ref() == Some(&set) {
            return;
        }
        let minutes = VACATED_RESERVE_AFTER.0 / 60_000_000;
        self.log_note(format!(
            "checkpoint {set} of job {job} has waited {minutes} minutes for room: hosts that it could use are \
             reserved for it"
        ));
        self.vacating.reserved_for = Some(set);
    }

    /// Handles a request of task `by` not to restart the vacated job that contains task `tid`.
    pub(super) fn cancel_restart(&mut self, by: Tid, tid: Tid) -> RmReply {
        let job_of_task = self
            .vacating
            .tasks_by_job
            .iter()
            .find(|(_, tasks)| tasks.contains(&tid))
            .map(|(job, _)| *job);
        let books = &self.history.writer.history;
        let parked = books
            .vacated_job_of(tid)
            .or_else(|| books.vacated_job_of(job_of_task?));
        let Some(VacatedJob {
            job,
            checkpoint: set,
            ..
        }) = parked.cloned()
        else {
            let being_vacated =
                job_of_task.filter(|job| self.vacating.paused_until.contains_key(job));
            self.vacating
                .cancelled_by
                .extend(being_vacated.map(|job| (job, by)));
            return RmReply::NotFound;
        };
        let (now, starting) = (self.vm.now(), self.vacating.restarting.as_ref());
        let starting = starting.is_some_and(|(other, until)| *other == set && *until > now);
        if !starting {
            self.history
                .writer
                .history
                .remove_vacated(|parked| parked.checkpoint == set);
            self.vacating.backoffs.remove(&set);
            self.log_note(format!(
                "job {job} is not restarted ({by} asked for it); its checkpoint {set} remains"
            ));
        }
        RmReply::VacatedCancelled {
            job,
            checkpoint: set,
            starting,
        }
    }

    /// Stops restarting checkpoints after [`RESTART_TRIES_MAX`] failures. A user can still restart
    /// them.
    fn drop_failed_restarts(&mut self) {
        let hopeless = |tried: &RestartBackoff| tried.failures >= RESTART_TRIES_MAX;
        let sets: Vec<String> = self
            .vacating
            .backoffs
            .iter()
            .filter(|(_, tried)| hopeless(tried))
            .map(|(set, _)| set.clone())
            .collect();
        for set in sets {
            self.vacating.backoffs.remove(&set);
            self.history
                .writer
                .history
                .remove_vacated(|parked| parked.checkpoint == set);
            self.log_note(format!(
                "checkpoint {set} could not be restarted in {RESTART_TRIES_MAX} attempts and is given up; 'pvm restart {set}' \
                 restarts it"
            ));
        }
    }
}
