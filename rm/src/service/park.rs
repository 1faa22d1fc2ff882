//! What the service does about tasks that have to leave a host whose owner wants them checkpointed where nobody takes them:
//! their jobs are written to the store and ended, and go on from there when there is room. The daemons carry it out, and the
//! event log tells what became of it; so a resource manager that begins again goes on with the books.

use super::Service;
use crate::api::VmApi;
use crate::decide::{Moves, room_ever, room_for};
use crate::store::books::parked::{PARKED_MAX, Parked};
use sempa_proto::event::EventKind;
use sempa_proto::rm::Answer;
use sempa_proto::{Micros, PvmError, Tid};
use std::collections::BTreeMap;

/// After a checkpoint that failed the job is left in peace for this long.
const PARK_AGAIN: Micros = Micros::from_secs(60);
/// The same when another one was just being made.
const PARK_SOON: Micros = Micros::from_secs(5);
/// An answer that does not come for so long is not waited for any more.
const WAIT_MAX: Micros = Micros::from_secs(4 * 3600);
/// Pause between looks whether there is room for a parked job.
const LOOK_PAUSE: Micros = Micros::from_secs(5);
/// Pause before a job that could not be started is tried again; it doubles each time, up to the other one.
const TRY_PAUSE: Micros = Micros::from_secs(10);
const TRY_PAUSE_MAX: Micros = Micros::from_secs(600);
/// So often it is tried where there is room.
const TRIES_MAX: u32 = 20;

/// A parked job that has waited for room so long keeps what becomes free: none that is smaller goes first.
pub const KEEP_AFTER: Micros = Micros::from_secs(600);

/// A set that waits.
#[derive(Debug, Default)]
struct Try {
    next: Micros,
    pause: Micros,
    failed: u32,
}

/// What is remembered of parked jobs beside the books.
#[derive(Debug, Default)]
pub(super) struct Parking {
    /// Jobs that are left in peace until then: they are being checkpointed, or could not be.
    asked: BTreeMap<Tid, Micros>,
    tried: BTreeMap<String, Try>,
    /// The set that is being started, and until when nothing else is.
    starting: Option<(String, Micros)>,
    /// Since when sets wait, as far as this resource manager has seen.
    waiting: BTreeMap<String, Micros>,
    /// The set for which room is kept.
    kept: Option<String>,
    /// The tasks of jobs that are being parked or are parked, as far as this resource manager has parked them.
    families: BTreeMap<Tid, Vec<Tid>>,
    /// Jobs that somebody has ended while they were being checkpointed, and who.
    unwanted: BTreeMap<Tid, Tid>,
    look_at: Micros,
}

impl<V: VmApi> Service<V> {
    /// Jobs of tasks that should go and stay are parked where the owner wants it so.
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
            // Part of a job stands still where it is: what is spoken of it to the others would be lost.
            let Some(job) = self.model.head_of(tid) else {
                continue;
            };
            // Also while its last tasks end.
            let is_parked = self
                .memory
                .ledger
                .books
                .parked()
                .any(|parked| parked.job == job);
            let full = self.memory.ledger.books.parked().count() >= PARKED_MAX;
            // The end of a move is an event; then it is looked at again. What its user has stopped he has to let go on.
            if is_parked || full || self.parking.asked.contains_key(&job) || self.model.is_busy(job)
            {
                continue;
            }
            let until = match self.vm.checkpoint_and_end(job) {
                Ok(()) => {
                    self.note(format!(
                        "job {job} is checkpointed and ended: {tid} has to leave {host}, and {why}"
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

    /// The event log tells of a checkpoint or a restart.
    pub(super) fn parking_heard(&mut self, kind: &EventKind) {
        let (now, parking) = (self.vm.now(), &mut self.parking);
        match kind {
            EventKind::CheckpointFailed { job, .. } => {
                if let Some(until) = parking.asked.get_mut(job) {
                    *until = now + PARK_AGAIN;
                }
            }
            EventKind::Checkpointed {
                set,
                job,
                parked: true,
                ..
            } => {
                parking.asked.remove(job);
                // Its tasks have to end first.
                parking.tried.insert(
                    set.clone(),
                    Try {
                        next: now + LOOK_PAUSE,
                        pause: TRY_PAUSE,
                        failed: 0,
                    },
                );
            }
            EventKind::RestartFailed { set, .. } => {
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
            EventKind::Restarted { set, .. } => {
                parking.starting.take_if(|(starting, _)| starting == set);
                parking.tried.remove(set);
            }
            _ => {}
        }
    }

    /// When [`Service::start_parked`] has something to do.
    pub(super) fn parking_due(&self) -> Option<Micros> {
        self.memory
            .ledger
            .books
            .parked()
            .next()
            .map(|_| self.parking.look_at)
    }

    /// Starts the parked job that waits longest and has room, one at a time.
    pub(super) fn start_parked(&mut self, now: Micros) {
        if self.parking.look_at > now {
            return;
        }
        self.parking.look_at = now + LOOK_PAUSE;
        for (job, by) in self.parking.unwanted.clone() {
            if let Answer::Unparked {
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
            // An event tells what became of it.
            Ok(()) => self.parking.starting = Some((set, now + WAIT_MAX)),
            Err(error) => self.note(format!("checkpoint {set} was not started again: {error}")),
        }
    }

    /// The parked job that waits longest of those that have room, and the hosts where each of its tasks is to go. For the
    /// first that has waited very long room is kept, unless there could never be enough.
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

    /// Room is kept for this set: that is said once.
    fn tell_kept(&mut self, kept: Option<(String, Tid)>) {
        let Some((set, job)) = kept else { return };
        if self.parking.kept.as_ref() == Some(&set) {
            return;
        }
        let minutes = KEEP_AFTER.0 / 60_000_000;
        self.note(format!(
            "checkpoint {set} of job {job} has waited {minutes} minutes for room: none that is parked goes first where it could go"
        ));
        self.parking.kept = Some(set);
    }

    /// Somebody does not want a parked job to be started again.
    pub(super) fn unpark(&mut self, by: Tid, tid: Tid) -> Answer {
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
            return Answer::Unknown;
        };
        let (now, starting) = (self.vm.now(), self.parking.starting.as_ref());
        let starting = starting.is_some_and(|(other, until)| *other == set && *until > now);
        if !starting {
            self.memory.ledger.books.unpark(|parked| parked.set == set);
            self.parking.tried.remove(&set);
            self.note(format!(
                "job {job} is not started again ({by} wants it so); its checkpoint {set} stays"
            ));
        }
        Answer::Unparked { job, set, starting }
    }

    /// What could not be started so often is left to people.
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
                "checkpoint {set} could not be started {TRIES_MAX} times and is not tried any more; 'pvm restart {set}' does"
            ));
        }
    }
}
