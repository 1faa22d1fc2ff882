//! What the service does about tasks that have to leave a host whose owner wants them checkpointed where nobody takes them:
//! their jobs are written to the store and ended, and go on from there when there is room. The daemons carry it out, and the
//! event log tells what became of it; so a resource manager that begins again goes on with the books.

use super::Service;
use crate::api::VmApi;
use crate::decide::{Moves, open};
use crate::store::books::parked::PARKED_MAX;
use sempa_proto::event::EventKind;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeMap;

/// After a checkpoint that failed the job is left in peace for this long.
const PARK_AGAIN: Micros = Micros::from_secs(60);
/// A checkpoint of which nothing was heard for this long is not waited for any more.
const PARK_WAIT_MAX: Micros = Micros::from_secs(3600);
/// Pause between looks whether there is room for a parked job.
const LOOK_PAUSE: Micros = Micros::from_secs(5);
/// Pause before a job that could not be started is tried again; it doubles each time, up to the other one.
const TRY_PAUSE: Micros = Micros::from_secs(10);
const TRY_PAUSE_MAX: Micros = Micros::from_secs(600);

/// What is remembered of parked jobs beside the books.
#[derive(Debug, Default)]
pub(super) struct Parking {
    /// Jobs that could not be checkpointed, and until when they are left in peace.
    refused: BTreeMap<Tid, Micros>,
    /// Sets that wait: when they are tried next, and the pause after that if they cannot be started.
    tried: BTreeMap<String, (Micros, Micros)>,
    look_at: Micros,
}

impl<V: VmApi> Service<V> {
    /// Jobs of tasks that should go and stay are parked where the owner wants it so.
    pub(super) fn park(&mut self, now: Micros, decided: &Moves) {
        let snapshot = self.model.snapshot(now);
        let stays = decided.stay.iter().filter(|stay| stay.parks(snapshot));
        let stays: Vec<_> = stays.map(|stay| (stay.tid, snapshot.name(stay.host), stay.reason(snapshot))).collect();
        self.parking.refused.retain(|_, until| *until > now);
        for (tid, host, why) in stays {
            // A family without its head is part of a job only; it stands still where it is.
            let Some(job) = self.model.head_of(tid) else { continue };
            let books = &self.memory.ledger.books;
            // Also while its last tasks end.
            let is_parked = books.parked().any(|parked| parked.job == job);
            if is_parked || self.parking.refused.contains_key(&job) || books.parked().count() >= PARKED_MAX {
                continue;
            }
            match self.vm.checkpoint_and_end(job) {
                Ok(()) => {
                    self.note(format!("job {job} is checkpointed and ended: {tid} has to leave {host}, and {why}"));
                    self.memory.ledger.books.park(self.vm.wall(), job, (tid, host), why);
                }
                Err(error) => {
                    self.note(format!("job {job} was not checkpointed ({error}): {tid} stays on {host}"));
                    self.parking.refused.insert(job, now + PARK_AGAIN);
                }
            }
        }
        let again = self.parking.refused.values().copied();
        self.again = self.again.into_iter().chain(again).min();
    }

    /// The event log tells of a checkpoint or a restart; before the books hear of it.
    pub(super) fn parking_heard(&mut self, kind: &EventKind) {
        let now = self.vm.now();
        match kind {
            EventKind::CheckpointFailed { job, .. } if self.memory.ledger.books.is_parking(*job) => {
                self.parking.refused.insert(*job, now + PARK_AGAIN);
            }
            EventKind::Checkpointed { set, job, .. } if self.memory.ledger.books.is_parking(*job) => {
                // Its tasks have to end first.
                self.parking.tried.insert(set.clone(), (now + LOOK_PAUSE, TRY_PAUSE));
            }
            EventKind::RestartFailed { set, .. } => {
                if let Some((next, pause)) = self.parking.tried.get_mut(set) {
                    (*next, *pause) = (now + *pause, Micros(pause.0 * 2).min(TRY_PAUSE_MAX));
                }
            }
            EventKind::Restarted { set, .. } => drop(self.parking.tried.remove(set)),
            _ => {}
        }
    }

    /// When [`Service::start_parked`] has something to do.
    pub(super) fn parking_due(&self) -> Option<Micros> {
        self.memory.ledger.books.parked().next().map(|_| self.parking.look_at)
    }

    /// Starts the parked job that waits longest and has room.
    pub(super) fn start_parked(&mut self, now: Micros) {
        if self.parking.look_at > now {
            return;
        }
        self.parking.look_at = now + LOOK_PAUSE;
        let late = Micros(self.vm.wall().0.saturating_sub(PARK_WAIT_MAX.0));
        let books = &mut self.memory.ledger.books;
        books.unpark(|parked| parked.set.is_none() && parked.since < late);
        let sets: Vec<(String, u32)> = books.parked().filter_map(|parked| parked.set.clone()).collect();
        if sets.is_empty() {
            return;
        }
        let snapshot = self.model.snapshot(now);
        let open = open(snapshot);
        let room = open.iter().fold(0_u32, |room, (_, left)| room.saturating_add(*left));
        let on: Vec<String> = open.iter().map(|(host, _)| snapshot.name(*host)).collect();
        for (set, tasks) in sets {
            let (next, pause) = self.parking.tried.get(&set).copied().unwrap_or((now, TRY_PAUSE));
            if room < tasks || next > now {
                continue;
            }
            // An event tells what became of it; what is placed now is seen at the next look.
            self.parking.tried.insert(set.clone(), (now + TRY_PAUSE_MAX, pause));
            if let Err(error) = self.vm.restart(&set, &on) {
                self.note(format!("checkpoint {set} was not started again: {error}"));
            }
            return;
        }
    }
}
