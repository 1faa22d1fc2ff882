//! Callbacks of the driver, and what the journal stores about them.
//!
//! A callback may take long. So the master handles all messages that have arrived, sends what the
//! dispatcher decides, and calls the driver afterwards, in the order of the events. The journal
//! gets its records in the same order.

use crate::journal::{FailedAttempt, Record, StoredTask, TaskStats};
use crate::master::{Master, RunError, RunState, Transport, driver_error};
use crate::protocol::{AttemptContent, AttemptResult, RawTask, ToWorker};
use crate::raw::{Failure, PoolEvent, RawDriver, ResultInfo};
use crate::recovery::encode;
use crate::run::{AddedTask, Run};
use bytes::Bytes;
use sempa_work_dispatch::{AttemptRecord, Micros, TaskId, WorkerId};
use std::time::Instant;

/// Number of waiting callbacks above which the master handles no further message.
const DEFERRED_MAX: usize = 1_024;

/// The first result of a task.
#[derive(Debug)]
pub(crate) struct AcceptedResult {
    pub(crate) worker: WorkerId,
    /// Factor of the worker when the result was accepted.
    pub(crate) factor: f64,
    pub(crate) result: AttemptResult,
}

/// A callback that waits, with its record.
#[derive(Debug)]
pub(crate) enum Deferred {
    Accepted(AcceptedResult),
    Partial {
        task: TaskId,
        data: Bytes,
    },
    /// A record without a callback: an attempt ended without a result.
    AttemptFailed {
        task: TaskId,
        record: AttemptRecord,
    },
    Quarantined {
        task: TaskId,
        history: Vec<AttemptRecord>,
    },
    PoolEvent(PoolEvent),
    AllClosed,
}

impl<D: RawDriver> Master<D> {
    /// True if further messages may be handled before the next callback.
    pub(crate) fn accepts_messages(&self, now: Micros) -> bool {
        let journal = self.journal.as_ref();
        // Statistics and states of the driver are stored when no callback waits.
        let is_turn = journal.is_some_and(|journal| journal.has_turn(now));
        self.deferred.len() < DEFERRED_MAX
            && !is_turn
            && !self.run.is_stopped
            && self.state == RunState::Running
    }

    /// Calls the driver for the next event. Returns false if no event waits.
    pub(crate) fn run_callback(
        &mut self,
        now: Micros,
        transport: &mut dyn Transport,
    ) -> Result<bool, RunError> {
        if self.state != RunState::Running {
            self.deferred.clear();
        }
        let Some(deferred) = self.deferred.pop_front() else {
            return Ok(false);
        };
        self.run.now = now;
        match deferred {
            Deferred::Accepted(accepted) => self.accept(accepted, transport)?,
            Deferred::Partial { task, data } => self.handle_partial(task, &data)?,
            Deferred::AttemptFailed { task, record } => self.store_failure(task, &record)?,
            Deferred::Quarantined { task, history } => self.quarantine(task, &history)?,
            Deferred::PoolEvent(event) => self.call_driver("on_pool_event", |driver, run| {
                driver.on_pool_event(run, &event)
            })?,
            Deferred::AllClosed => self.handle_all_closed(transport)?,
        }
        self.finish_callbacks(transport)?;
        self.carry_out(transport)?;
        Ok(true)
    }

    /// Passes the first result of a task to the driver, and stores the result together with the
    /// tasks that it adds.
    fn accept(
        &mut self,
        accepted: AcceptedResult,
        transport: &mut dyn Transport,
    ) -> Result<(), RunError> {
        let AcceptedResult {
            worker,
            factor,
            result: current,
        } = accepted;
        let (task, attempt) = (current.task, current.attempt);
        self.finish_callbacks(transport)?;
        let Some(stored) = self.run.payloads.remove(&task) else {
            return Ok(());
        };
        let AttemptContent::Completed {
            result,
            returned_tasks,
        } = current.content
        else {
            return Ok(());
        };
        let info = ResultInfo {
            task,
            worker,
            cpu_us: current.cpu_us,
            wall_us: current.wall_us,
        };
        let returned = self.run.add_tasks(returned_tasks);
        let returned = returned.map_err(driver_error("on_result"))?.len() as u32;
        let payload = stored.task.payload;
        self.call_driver("on_result", |driver, run| {
            driver.on_result(run, &info, &payload, &result)
        })?;
        let added = stored_tasks(&self.run.added);
        self.run.added.clear();
        let stats = TaskStats {
            cpu_us: current.cpu_us,
            wall_us: current.wall_us,
            factor,
        };
        let Some(journal) = &mut self.journal else {
            return self.finish_callbacks(transport);
        };
        let record = Record::Accepted {
            task: task.0,
            attempt: attempt.0,
            result,
            returned,
            added,
            stats,
        };
        let lsn = journal.append(record)?;
        journal.acknowledge_later(lsn, worker, attempt);
        self.finish_callbacks(transport)
    }

    fn store_failure(&mut self, task: TaskId, record: &AttemptRecord) -> Result<(), RunError> {
        let Some(journal) = &self.journal else {
            return Ok(());
        };
        let failed = FailedAttempt {
            task: task.0,
            attempt: record.attempt.0,
            reason: encode(record)?,
        };
        journal.append(Record::AttemptFailed(failed)).map(|_| ())
    }

    fn quarantine(&mut self, task: TaskId, history: &[AttemptRecord]) -> Result<(), RunError> {
        if let Some(journal) = &self.journal {
            journal.append(Record::Quarantined {
                task: task.0,
                history: encode(&history)?,
            })?;
        }
        let stored = self.run.payloads.get(&task);
        let payload = stored.map(|stored| stored.task.payload.clone());
        let payload = payload.unwrap_or_default();
        self.call_driver("on_quarantined", |driver, run| {
            driver.on_quarantined(run, task, &payload, history)
        })
    }

    fn handle_all_closed(&mut self, transport: &mut dyn Transport) -> Result<(), RunError> {
        // The callback of the last result may have added tasks. If these are closed again, their
        // callbacks wait, and the dispatcher has reported the end of all tasks again.
        let closes_task = |deferred: &Deferred| {
            matches!(
                deferred,
                Deferred::Accepted(_) | Deferred::Quarantined { .. }
            )
        };
        if self.state != RunState::Running
            || self.run.dispatcher.open_task_count() > 0
            || self.deferred.iter().any(closes_task)
        {
            return Ok(());
        }
        self.call_driver("on_all_closed", |driver, run| driver.on_all_closed(run))?;
        self.finish_callbacks(transport)?;
        if self.run.dispatcher.open_task_count() == 0 {
            self.end(RunState::Finished, transport);
        }
        Ok(())
    }

    fn handle_partial(&mut self, task: TaskId, data: &Bytes) -> Result<(), RunError> {
        let Some(stored) = self.run.payloads.get(&task) else {
            return Ok(());
        };
        let payload = stored.task.payload.clone();
        self.call_driver("on_partial_result", |driver, run| {
            driver.on_partial_result(run, task, &payload, data)
        })
    }

    /// Reports an event to the driver, after the callbacks that wait.
    pub(crate) fn report_pool_event(&mut self, event: PoolEvent) {
        self.deferred.push_back(Deferred::PoolEvent(event));
    }

    /// Calls the driver, and adds the duration of the call to the time of callbacks.
    fn call_driver(
        &mut self,
        callback: &'static str,
        call: impl FnOnce(&mut D, &mut Run) -> Result<(), Failure>,
    ) -> Result<(), RunError> {
        let begun = Instant::now();
        let outcome = call(&mut self.driver, &mut self.run);
        self.callback_time += begun.elapsed();
        outcome.map_err(driver_error(callback))
    }

    /// Stores what callbacks without a result have changed, and sends new updates and init data.
    pub(crate) fn finish_callbacks(
        &mut self,
        transport: &mut dyn Transport,
    ) -> Result<(), RunError> {
        let added = std::mem::take(&mut self.run.added);
        let pruned = std::mem::take(&mut self.run.pruned);
        let changed_keys = std::mem::take(&mut self.run.changed_keys);
        if let Some(journal) = &self.journal {
            if !added.is_empty() {
                let tasks = stored_tasks(&added);
                journal.append(Record::TasksAdded { tasks })?;
            }
            if !pruned.is_empty() {
                let tasks = pruned.iter().map(|task| task.0).collect();
                journal.append(Record::Pruned { tasks })?;
            }
            for (task, key) in changed_keys {
                journal.append(Record::KeyChanged { task: task.0, key })?;
            }
        }
        if std::mem::take(&mut self.run.update_is_new)
            && let Some(update) = self.run.update.clone()
        {
            let message = ToWorker::Update(update);
            for worker in self.run.dispatcher.worker_ids() {
                transport.send(worker, &message);
            }
        }
        for (worker, update) in std::mem::take(&mut self.run.worker_updates) {
            if self.run.dispatcher.has_worker(worker) {
                transport.send(worker, &ToWorker::Update(update));
            }
        }
        if let Some((data, groups)) = self.run.refresh.take() {
            self.refresh_init_data(data, groups, transport);
        }
        Ok(())
    }
}

pub(crate) fn stored_task(id: TaskId, raw: &RawTask, position: i64) -> StoredTask {
    StoredTask {
        id: id.0,
        key: raw.key,
        groups: raw.groups.bits(),
        position,
        payload: raw.payload.clone(),
    }
}

pub(crate) fn stored_tasks(added: &[AddedTask]) -> Vec<StoredTask> {
    let tasks = added.iter();
    let stored = |added: &AddedTask| stored_task(added.id, &added.task, added.position);
    tasks.map(stored).collect()
}
