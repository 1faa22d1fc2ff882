//! Vacates jobs: if a task must leave its host, no other host takes it, and the owner wants that,
//! the whole job is checkpointed and ended. It restarts from the checkpoint when there is room.
//!
//! The daemons carry this out, and the event log reports the results, so a restarted resource
//! manager continues from the history.

use super::Service;
use crate::api::VmApi;
use crate::decide::{Moves, room_ever, room_for};
use crate::store::books::parked::{PARKED_MAX, Parked};
use sempa_proto::event::EventKind;
use sempa_proto::rm::RmReply;
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::BTreeMap;

/// Delay before the next attempt after a checkpoint has failed.
const PARK_AGAIN: Micros = Micros::from_secs(60);
/// Delay before the next attempt if another checkpoint was being made.
const PARK_SOON: Micros = Micros::from_secs(5);
/// Time after which a missing answer is no longer awaited.
const WAIT_MAX: Micros = Micros::from_secs(4 * 3600);
/// Interval between checks whether there is room for a vacated job.
const LOOK_PAUSE: Micros = Micros::from_secs(5);
/// Delay before a failed restart is tried again. Doubles each time, up to [`TRY_PAUSE_MAX`].
const TRY_PAUSE: Micros = Micros::from_secs(10);
const TRY_PAUSE_MAX: Micros = Micros::from_secs(600);
/// Maximum number of restart attempts while there is room.
const TRIES_MAX: u32 = 20;

/// Waiting time after which room is reserved for a vacated job, so that smaller jobs do not go
/// first.
pub const KEEP_AFTER: Micros = Micros::from_secs(600);

/// Retry state of one checkpoint.
#[derive(Debug, Default)]
struct Try {
    next: Micros,
    pause: Micros,
    failed: u32,
}

/// State of vacated jobs that is not in the history.
#[derive(Debug, Default)]
pub(super) struct Parking {
    /// Jobs that are left alone until then: they are being checkpointed, or their checkpoint has
    /// failed.
    asked: BTreeMap<Tid, Micros>,
    tried: BTreeMap<String, Try>,
    /// The checkpoint that is being restarted, and until when no other one is.
    starting: Option<(String, Micros)>,
    /// Since when each checkpoint has waited, as far as this resource manager has seen.
    waiting: BTreeMap<String, Micros>,
    /// The checkpoint for which room is reserved.
    kept: Option<String>,
    /// Tasks of the jobs that this resource manager has vacated or is vacating.
    families: BTreeMap<Tid, Vec<Tid>>,
    /// Jobs that were cancelled while they were being checkpointed, with the requesting task.
    unwanted: BTreeMap<Tid, Tid>,
    look_at: Micros,
}

impl<V: VmApi> Service<V> {
    /// Vacates the jobs of tasks that should leave but stay, where the owner wants that.
    pub(super) fn park(&mut self, now: Micros, decided: &Moves) {
        let snapshot = self.model.snapshot(now);
        let stays = decided.stay.iter().filter(|stay| stay.parks(snapshot));
        let stays: Vec<_> = stays
            .map(|stay| (stay.tid, snapshot.name(stay.host), stay.reason(snapshot)))
            .collect();
        self.parking.asked.retain(|_, until| *until > now);
        let books = &self.memory.ledger.books;
        let (parking, parked) = (&mut self.parking, |job| {
            books.parked().any(|parked| parked.job == job)
        });
        parking
            .unwanted
            .retain(|job, _| parking.asked.contains_key(job) || parked(*job));
        parking
            .families
            .retain(|job, _| parking.asked.contains_key(job) || parked(*job));
        for (tid, host, why) in stays {
            // Tasks of a partly running job stay paused where they are: messages between the job's
            // tasks would be lost.
            let Some(job) = self.model.head_of(tid) else {
                continue;
            };
            // Holds also while the job's last tasks end.
            let is_parked = self
                .memory
                .ledger
                .books
                .parked()
                .any(|parked| parked.job == job);
            let full = self.memory.ledger.books.parked().count() >= PARKED_MAX;
            // The end of a migration is an event and triggers the next check. Tasks that a user has
            // suspended must be resumed by that user.
            if is_parked || full || self.parking.asked.contains_key(&job) || self.model.is_busy(job)
            {
                continue;
            }
            let until = match self.vm.checkpoint_and_end(job) {
                Ok(()) => {
                    self.note(format!(
                        "job {job} is checkpointed and ended: {tid} must leave {host}, and {why}"
                    ));
                    self.memory
                        .ledger
                        .books
                        .parks(self.vm.wall(), job, (tid, host), why);
                    WAIT_MAX
                }
                Err(error) if error.code == PvmError::Already => PARK_SOON,
                Err(error) => {
                    self.note(format!(
                        "job {job} was not checkpointed ({error}): {tid} stays on {host}"
                    ));
                    PARK_AGAIN
                }
            };
            self.parking.asked.insert(job, now + until);
            self.parking
                .families
                .insert(job, self.model.tasks_of(self.model.user_and_job(job).1));
        }
        let again = self.parking.asked.values().copied();
        self.again = self.again.into_iter().chain(again).min();
    }

    /// Handles events about checkpoints and restarts.
    pub(super) fn parking_heard(&mut self, kind: &EventKind) {
        let (now, parking) = (self.vm.now(), &mut self.parking);
        match kind {
            EventKind::CheckpointFailed { job, .. } => {
                if let Some(until) = parking.asked.get_mut(job) {
                    *until = now + PARK_AGAIN;
                }
            }
            EventKind::Checkpointed {
                checkpoint: set,
                job,
                vacated: true,
                ..
            } => {
                parking.asked.remove(job);
                // The job's tasks must end first.
                parking.tried.insert(
                    set.clone(),
                    Try {
                        next: now + LOOK_PAUSE,
                        pause: TRY_PAUSE,
                        failed: 0,
                    },
                );
            }
            EventKind::RestartFailed {
                checkpoint: set, ..
            } => {
                parking.starting.take_if(|(starting, _)| starting == set);
                if let Some(Try {
                    next,
                    pause,
                    failed,
                }) = parking.tried.get_mut(set)
                {
                    *failed += 1;
                    (*next, *pause) = (now + *pause, Micros(pause.0 * 2).min(TRY_PAUSE_MAX));
                }
            }
            EventKind::Restarted {
                checkpoint: set, ..
            } => {
                parking.starting.take_if(|(starting, _)| starting == set);
                parking.tried.remove(set);
            }
            _ => {}
        }
    }

    /// Returns when [`Service::start_parked`] is due.
    pub(super) fn parking_due(&self) -> Option<Micros> {
        self.memory
            .ledger
            .books
            .parked()
            .next()
            .map(|_| self.parking.look_at)
    }

    /// Restarts the vacated job that has waited longest and for which there is room, one at a time.
    pub(super) fn start_parked(&mut self, now: Micros) {
        if self.parking.look_at > now {
            return;
        }
        self.parking.look_at = now + LOOK_PAUSE;
        for (job, by) in self.parking.unwanted.clone() {
            if let RmReply::VacatedCancelled {
                starting: false, ..
            } = self.unpark(by, job)
            {
                self.parking.unwanted.remove(&job);
            }
        }
        self.give_up_parked();
        if self
            .parking
            .starting
            .as_ref()
            .is_some_and(|(_, until)| *until > now)
        {
            return;
        }
        let Some((set, on)) = self.next_parked(now) else {
            return;
        };
        let tried = self.parking.tried.entry(set.clone());
        tried
            .or_insert(Try {
                next: now,
                pause: TRY_PAUSE,
                failed: 0,
            })
            .next = now + TRY_PAUSE;
        match self.vm.restart(&set, &on) {
            // An event reports the result.
            Ok(()) => self.parking.starting = Some((set, now + WAIT_MAX)),
            Err(error) => self.note(format!("checkpoint {set} was not restarted: {error}")),
        }
    }

    /// Returns the longest waiting checkpoint for which there is room, and the host of each of its
    /// tasks. Reserves room for the first one that has waited very long, unless it could never fit.
    fn next_parked(&mut self, now: Micros) -> Option<(String, Vec<String>)> {
        let (books, parking) = (&self.memory.ledger.books, &mut self.parking);
        parking
            .waiting
            .retain(|set, _| books.parked().any(|parked| parked.set == *set));
        let snapshot = self.model.snapshot(now);
        let (mut kept, mut found): (Option<&Parked>, _) = (None, None);
        for parked in books.parked() {
            let since = *parking.waiting.entry(parked.set.clone()).or_insert(now);
            if found.is_some()
                || parking
                    .tried
                    .get(&parked.set)
                    .is_some_and(|tried| tried.next > now)
            {
                continue;
            }
            let Parked { tasks, kinds, .. } = parked;
            match room_for(snapshot, *tasks, kinds, kept.map(|first| &first.kinds[..])) {
                Some(places) => {
                    let hosts = places.iter().map(|host| snapshot.name(*host)).collect();
                    found = Some((parked.set.clone(), hosts));
                }
                None if kept.is_none()
                    && now.since(since) >= KEEP_AFTER
                    && room_ever(snapshot, *tasks, kinds) =>
                {
                    kept = Some(parked);
                }
                None => {}
            }
        }
        let kept = kept.map(|first| (first.set.clone(), first.job));
        self.tell_kept(kept);
        found
    }

    /// Logs the reservation for a checkpoint once.
    fn tell_kept(&mut self, kept: Option<(String, Tid)>) {
        let Some((set, job)) = kept else { return };
        if self.parking.kept.as_ref() == Some(&set) {
            return;
        }
        let minutes = KEEP_AFTER.0 / 60_000_000;
        self.note(format!(
            "checkpoint {set} of job {job} has waited {minutes} minutes for room: hosts that it could use are \
             reserved for it"
        ));
        self.parking.kept = Some(set);
    }

    /// Handles a request not to restart a vacated job.
    pub(super) fn unpark(&mut self, by: Tid, tid: Tid) -> RmReply {
        let of = self
            .parking
            .families
            .iter()
            .find(|(_, tasks)| tasks.contains(&tid))
            .map(|(job, _)| *job);
        let books = &self.memory.ledger.books;
        let parked = books.parked_with(tid).or_else(|| books.parked_with(of?));
        let Some(Parked { job, set, .. }) = parked.cloned() else {
            let being = of.filter(|job| self.parking.asked.contains_key(job));
            self.parking.unwanted.extend(being.map(|job| (job, by)));
            return RmReply::NotFound;
        };
        let (now, starting) = (self.vm.now(), self.parking.starting.as_ref());
        let starting = starting.is_some_and(|(other, until)| *other == set && *until > now);
        if !starting {
            self.memory.ledger.books.unpark(|parked| parked.set == set);
            self.parking.tried.remove(&set);
            self.note(format!(
                "job {job} is not restarted ({by} asked for it); its checkpoint {set} remains"
            ));
        }
        RmReply::VacatedCancelled {
            job,
            checkpoint: set,
            starting,
        }
    }

    /// Gives up checkpoints whose restart has failed too often; a user can still restart them.
    fn give_up_parked(&mut self) {
        let hopeless = |tried: &Try| tried.failed >= TRIES_MAX;
        let sets: Vec<String> = self
            .parking
            .tried
            .iter()
            .filter(|(_, tried)| hopeless(tried))
            .map(|(set, _)| set.clone())
            .collect();
        for set in sets {
            self.parking.tried.remove(&set);
            self.memory.ledger.books.unpark(|parked| parked.set == set);
            self.note(format!(
                "checkpoint {set} could not be restarted in {TRIES_MAX} attempts and is given up; 'pvm restart {set}' \
                 restarts it"
            ));
        }
    }
}
