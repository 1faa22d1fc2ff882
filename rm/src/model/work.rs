//! What tasks have done, as far as the load of their hosts tells, and what came of moves for the sake of the load.

use super::{ACCOUNT_PAUSE, Model};
use crate::decide::{Outcome, Shift};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeMap;

impl Model {
    /// The same when something changes of which the load of hosts depends, but not too often.
    pub fn account_change(&mut self, now: Micros) {
        if now.since(self.accounted) >= ACCOUNT_PAUSE {
            self.account(now);
        }
    }

    /// Adds what the tasks have done since the last time, as far as can be told from the load of their hosts.
    pub fn account(&mut self, now: Micros) {
        let span = now.since(self.accounted).0 as f64;
        self.accounted = now;
        let busy: Vec<HostId> = self
            .on
            .iter()
            .filter(|(_, tids)| !tids.is_empty())
            .map(|(id, _)| *id)
            .collect();
        let snapshot = self.snapshot(now);
        let rates: BTreeMap<HostId, f64> =
            busy.into_iter().map(|id| (id, snapshot.rate(id))).collect();
        for task in self.tasks.values_mut().filter(|t| t.is_load()) {
            let share = span.min(now.since(task.since).0 as f64);
            let rate = rates.get(&task.host).copied().unwrap_or(0.0);
            task.done = task.done + Micros((share * rate / 1e3) as u64);
            self.touched.insert(task.host);
        }
        self.look_at_promises();
    }

    /// A task was told to go for the sake of the load: what comes of it is followed.
    pub fn promised(&mut self, shift: &Shift) {
        self.promises.made(shift);
    }

    /// What came of moves for the sake of the load since the last time.
    pub fn outcomes(&mut self) -> Vec<Outcome> {
        std::mem::take(&mut self.outcomes)
    }

    /// Tasks that were moved for the sake of the load are looked at.
    fn look_at_promises(&mut self) {
        for tid in self.promises.tasks() {
            match self.tasks.get(&tid) {
                Some(task) => {
                    let (now, estimates) = (self.accounted, &mut self.view.estimates);
                    self.outcomes
                        .extend(self.promises.look(now, tid, task.done, estimates));
                }
                None => self.promises.dropped(tid),
            }
        }
    }

    /// One of them has ended.
    pub(super) fn promise_ended(&mut self, tid: Tid) {
        let Some(done) = self.tasks.get(&tid).map(|task| task.done) else {
            return;
        };
        self.outcomes.extend(self.promises.ended(
            self.accounted,
            tid,
            done,
            &mut self.view.estimates,
        ));
    }
}
