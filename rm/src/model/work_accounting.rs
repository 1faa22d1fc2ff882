//! Estimates how much work each task has done, from the load of its host. Measures the gain of
//! rebalancing migrations from these estimates.

use super::{ACCOUNTING_INTERVAL, Model};
use crate::decide::{PredictionOutcome, Rebalance};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeMap;

impl Model {
    /// Updates the work of all tasks before a change of load, unless the last update was less than
    /// `ACCOUNTING_INTERVAL` ago.
    pub fn account_if_due(&mut self, now: Micros) {
        if now.since(self.work_accounted_at) >= ACCOUNTING_INTERVAL {
            self.account_work(now);
        }
    }

    /// Adds the work that each task has done since the last update: the elapsed time multiplied by
    /// the processor share that the host's load allows.
    pub fn account_work(&mut self, now: Micros) {
        let elapsed_us = now.since(self.work_accounted_at).0 as f64;
        self.work_accounted_at = now;
        let occupied_hosts: Vec<HostId> = self
            .tasks_by_host
            .iter()
            .filter(|(_, tids)| !tids.is_empty())
            .map(|(id, _)| *id)
            .collect();
        let snapshot = self.update_snapshot(now);
        let rates: BTreeMap<HostId, f64> = occupied_hosts
            .into_iter()
            .map(|id| (id, snapshot.task_rate(id)))
            .collect();
        for task in self.tasks.values_mut().filter(|t| t.computes()) {
            let task_elapsed_us = elapsed_us.min(now.since(task.started_at).0 as f64);
            let rate = rates.get(&task.host).copied().unwrap_or(0.0);
            task.work_done = task.work_done + Micros((task_elapsed_us * rate / 1e3) as u64);
            self.changed_hosts.insert(task.host);
        }
        self.check_predictions();
    }

    /// Starts measuring the actual gain of a rebalancing migration.
    pub fn start_gain_measurement(&mut self, rebalance: &Rebalance) {
        self.pending_predictions.track(rebalance);
    }

    /// Returns the measured gains of rebalancing migrations that became available since the last
    /// call.
    pub fn take_prediction_outcomes(&mut self) -> Vec<PredictionOutcome> {
        std::mem::take(&mut self.prediction_outcomes)
    }

    /// Compares the predictions about rebalanced tasks with the work that the tasks have done.
    /// Records the outcomes that are due.
    fn check_predictions(&mut self) {
        for tid in self.pending_predictions.tracked_tasks() {
            match self.tasks.get(&tid) {
                Some(task) => {
                    let (now, estimates) = (self.work_accounted_at, &mut self.snapshot.estimates);
                    self.prediction_outcomes
                        .extend(self.pending_predictions.check_prediction(
                            now,
                            tid,
                            task.work_done,
                            estimates,
                        ));
                }
                None => self.pending_predictions.discard_prediction(tid),
            }
        }
    }

    /// Records the outcome of the prediction about a task that has ended.
    pub(super) fn conclude_prediction(&mut self, tid: Tid) {
        let Some(final_work) = self.tasks.get(&tid).map(|task| task.work_done) else {
            return;
        };
        self.prediction_outcomes
            .extend(self.pending_predictions.end_tracking(
                self.work_accounted_at,
                tid,
                final_work,
                &mut self.snapshot.estimates,
            ));
    }
}
