//! Jobs that were checkpointed and ended because no host took a task that had to go: they go on when there is room. What is
//! parked follows from the event of the checkpoint alone, whoever was told what before.

use super::{Books, Sheet};
use sempa_proto::event::EventKind;
use sempa_proto::rm::{Decided, TaskUse};
use sempa_proto::{Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Jobs that are parked at most; others stand still where they are.
pub const PARKED_MAX: usize = 1024;
/// Programs and users of one that are remembered, for owners who do not let them in.
const KINDS_MAX: usize = 64;

/// A job that is parked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parked {
    /// The first task of it.
    pub job: Tid,
    /// Its checkpoint.
    pub set: String,
    /// How many tasks are in it.
    pub tasks: u32,
    /// Users and programs of the tasks.
    pub kinds: Vec<(u32, String)>,
}

impl Books {
    /// A job is to be parked: this task of it has to leave this host, and why it cannot move.
    pub fn parks(&mut self, at: Micros, job: Tid, (tid, host): (Tid, String), why: String) {
        self.decided(
            at,
            Decided::Parked {
                job,
                tid,
                host,
                why,
            },
        );
    }

    /// Jobs that are parked; the one that waits longest first.
    pub fn parked(&self) -> impl Iterator<Item = &Parked> {
        self.parked.values()
    }

    /// The parked job that this is a task of.
    pub fn parked_with(&self, tid: Tid) -> Option<&Parked> {
        let family = |tid: Tid| self.known(tid).map_or(tid, |task| task.job);
        self.parked()
            .find(|parked| parked.job == tid || family(parked.job) == family(tid))
    }

    /// The first task of the job whose checkpoint this is: what is known of those that wait, else what the name begins with.
    pub(super) fn job_of_set(&self, set: &str) -> Option<Tid> {
        let waits = self
            .parked()
            .find(|parked| parked.set == set)
            .map(|parked| parked.job);
        let named = || u32::from_str_radix(set.strip_prefix('t')?.split('-').next()?, 16).ok();
        waits.or_else(|| Some(Tid::from_raw(named()?.cast_signed())).filter(|tid| tid.is_task()))
    }

    /// Jobs are not parked any more.
    pub fn unpark(&mut self, which: impl Fn(&Parked) -> bool) {
        let gone: Vec<u64> = self
            .parked
            .iter()
            .filter(|(_, parked)| which(parked))
            .map(|(number, _)| *number)
            .collect();
        for number in gone {
            self.parked.remove(&number);
            self.dirty.insert((Sheet::Parked, number));
        }
    }

    /// What the event log tells of them.
    pub(super) fn parked_event(&mut self, kind: &EventKind) {
        match kind {
            EventKind::Checkpointed {
                set,
                job,
                tasks,
                parked: true,
                ..
            } => {
                self.unpark(|parked| parked.job == *job);
                let family = self.known(*job).map_or(*job, |first| first.job);
                // All of them go because one has to, but for who was started by hand; their ends follow.
                let goes = |task: &&TaskUse| task.job == family && !task.program.is_empty();
                let go: Vec<Tid> = self.running().filter(goes).map(|task| task.tid).collect();
                go.into_iter().for_each(|tid| self.evicted(tid));
                let all = self.tasks.values().rev().filter(|task| task.job == family);
                let kinds: BTreeSet<(u32, String)> =
                    all.map(|task| (task.user, task.program.clone())).collect();
                let kinds = kinds.into_iter().take(KINDS_MAX).collect();
                let number = self.number();
                self.parked.insert(
                    number,
                    Parked {
                        job: *job,
                        set: set.clone(),
                        tasks: *tasks,
                        kinds,
                    },
                );
                self.dirty.insert((Sheet::Parked, number));
            }
            // From whichever set: it is there again.
            EventKind::Restarted { job, tasks, .. } => {
                self.unpark(|parked| {
                    parked.job == *job || tasks.iter().any(|(tid, _)| *tid == parked.job)
                });
            }
            _ => {}
        }
    }
}
