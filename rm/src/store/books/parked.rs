//! Jobs that were checkpointed and ended because no host took a task that had to go: they go on when there is room.

use super::{Books, Sheet};
use sempa_proto::event::EventKind;
use sempa_proto::rm::Decided;
use sempa_proto::{Micros, Tid};
use serde::{Deserialize, Serialize};

/// Jobs that are parked at most; others stand still where they are.
pub const PARKED_MAX: usize = 1024;

/// A job that is parked, or is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parked {
    /// The first task of it.
    pub job: Tid,
    /// When it was asked for, as time of day.
    pub since: Micros,
    /// Its checkpoint, when that is complete, and how many tasks are in it.
    pub set: Option<(String, u32)>,
}

impl Books {
    /// A job is to be parked: this task of it has to leave this host, and why it cannot move.
    pub fn park(&mut self, at: Micros, job: Tid, (tid, host): (Tid, String), why: String) {
        self.decided(at, Decided::Parked { job, tid, host, why });
        let number = self.number();
        self.parked.insert(number, Parked { job, since: at, set: None });
        self.dirty.insert((Sheet::Parked, number));
    }

    /// Jobs that are parked, or are to be; the one that waits longest first.
    pub fn parked(&self) -> impl Iterator<Item = &Parked> {
        self.parked.values()
    }

    /// True for a job that is to be parked and has no checkpoint yet.
    pub fn is_parking(&self, job: Tid) -> bool {
        self.parked.values().any(|parked| parked.job == job && parked.set.is_none())
    }

    /// A job is not parked any more, or is not to be.
    pub fn unpark(&mut self, which: impl Fn(&Parked) -> bool) {
        let gone: Vec<u64> =
            self.parked.iter().filter(|(_, parked)| which(parked)).map(|(number, _)| *number).collect();
        for number in gone {
            self.parked.remove(&number);
            self.dirty.insert((Sheet::Parked, number));
        }
    }

    /// What the event log tells of them.
    pub(super) fn parked_event(&mut self, kind: &EventKind) {
        match kind {
            EventKind::Checkpointed { set, job, tasks, .. } => {
                let parking = |parked: &Parked| parked.job == *job && parked.set.is_none();
                if let Some((number, parked)) = self.parked.iter_mut().find(|(_, parked)| parking(parked)) {
                    parked.set = Some((set.clone(), *tasks));
                    self.dirty.insert((Sheet::Parked, *number));
                }
            }
            EventKind::CheckpointFailed { job, .. } => {
                self.unpark(|parked| parked.job == *job && parked.set.is_none());
            }
            EventKind::Restarted { set, .. } => {
                self.unpark(|parked| parked.set.as_ref().is_some_and(|(name, _)| name == set));
            }
            _ => {}
        }
    }
}
