//! Estimates how much work each task has done, from the load of its host. From these estimates,
//! measures the gain of rebalancing migrations.

use super::{ACCOUNTING_INTERVAL, Model};
use crate::decide::{PredictionOutcome, Rebalance};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeMap;

impl Model {
    /// Updates the work of all tasks before a change of load, unless the last update was less than
    /// half a second ago.
    pub fn account_if_due(&mut self, now: Micros) {
        if now.since(self.accounted_at) >= ACCOUNTING_INTERVAL {
            self.account_work(now);
        }
    }

    /// Adds the work that each task has done since the last update: the elapsed time multiplied by
    /// the processor share that the host's load allows.
    pub fn account_work(&mut self, now: Micros) {
        let span = now.since(self.accounted_at).0 as f64;
        self.accounted_at = now;
        let busy: Vec<HostId> = self
            .tasks_by_host
            .iter()
            .filter(|(_, tids)| !tids.is_empty())
            .map(|(id, _)| *id)
            .collect();
        let snapshot = self.snapshot(now);
        let rates: BTreeMap<HostId, f64> =
            busy.into_iter().map(|id| (id, snapshot.rate(id))).collect();
        for task in self.tasks.values_mut().filter(|t| t.computes()) {
            let share = span.min(now.since(task.started_at).0 as f64);
            let rate = rates.get(&task.host).copied().unwrap_or(0.0);
            task.work_done = task.work_done + Micros((share * rate / 1e3) as u64);
            self.dirty_hosts.insert(task.host);
        }
        self.check_predictions();
    }

    /// Starts measuring the actual gain of a rebalancing migration.
    pub fn follow_rebalance(&mut self, shift: &Rebalance) {
        self.predictions.follow(shift);
    }

    /// Returns the results of rebalancing migrations since the last call.
    pub fn take_outcomes(&mut self) -> Vec<PredictionOutcome> {
        std::mem::take(&mut self.outcomes)
    }

    /// Compares the predictions about rebalanced tasks with the work done, and records results that
    /// are due.
    fn check_predictions(&mut self) {
        for tid in self.predictions.tasks() {
            match self.tasks.get(&tid) {
                Some(task) => {
                    let (now, estimates) = (self.accounted_at, &mut self.snapshot.estimates);
                    self.outcomes.extend(self.predictions.check(
                        now,
                        tid,
                        task.work_done,
                        estimates,
                    ));
                }
                None => self.predictions.discard(tid),
            }
        }
    }

    /// Records the result of the prediction about a task that has ended.
    pub(super) fn conclude_prediction(&mut self, tid: Tid) {
        let Some(done) = self.tasks.get(&tid).map(|task| task.work_done) else {
            return;
        };
        self.outcomes.extend(self.predictions.conclude(
            self.accounted_at,
            tid,
            done,
            &mut self.snapshot.estimates,
        ));
    }
}
