//! Estimates how much work each task has done, from the load of its host. From these estimates,
//! measures the gain of rebalancing migrations.

use super::{ACCOUNT_PAUSE, Model};
use crate::decide::{Outcome, Shift};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeMap;

impl Model {
    /// Updates the work of all tasks before a change of load, unless the last update was less than
    /// half a second ago.
    pub fn account_change(&mut self, now: Micros) {
        if now.since(self.accounted) >= ACCOUNT_PAUSE {
            self.account(now);
        }
    }

    /// Adds the work that each task has done since the last update: the elapsed time multiplied by
    /// the processor share that the host's load allows.
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

    /// Starts measuring the actual gain of a rebalancing migration.
    pub fn promised(&mut self, shift: &Shift) {
        self.promises.made(shift);
    }

    /// Returns the results of rebalancing migrations since the last call.
    pub fn outcomes(&mut self) -> Vec<Outcome> {
        std::mem::take(&mut self.outcomes)
    }

    /// Compares the predictions about rebalanced tasks with the work done, and records results that
    /// are due.
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

    /// Records the result of the prediction about a task that has ended.
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
