//! Restart of a run from its journal.

use crate::journal::{FailedAttempt, Record, Recovered, StoredTask, TaskStats};
use crate::master::RunError;
use crate::protocol::RawTask;
use crate::raw::{Failure, RawDriver, ResultInfo};
use crate::run::{Mode, Run};
use bytes::Bytes;
use sempa_work_dispatch::{
    AttemptRecord, Dispatcher, Groups, Key, Micros, NewTask, QuarantinedTask, RunStatistics,
    Settings, TaskId, WorkerId,
};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::collections::BTreeMap;
use std::fmt::Display;

/// Returns a value in the format of the journal's opaque parts.
pub(crate) fn encode<T: Serialize + ?Sized>(value: &T) -> Result<Bytes, RunError> {
    let bytes = postcard::to_allocvec(value);
    bytes
        .map(Bytes::from)
        .map_err(|error| RunError::Journal(error.to_string()))
}

fn decode<T: DeserializeOwned>(bytes: &[u8], part: &str) -> Result<T, RunError> {
    postcard::from_bytes(bytes).map_err(|error| cannot_restart(&format!("{part}: {error}")))
}

fn cannot_restart(why: &dyn Display) -> RunError {
    RunError::Start(format!(
        "the run cannot be restarted from its journal: {why}; the journal is unchanged"
    ))
}

fn driver_failed(callback: &str) -> impl Fn(Failure) -> RunError {
    move |error| cannot_restart(&format!("the driver failed in {callback}: {error}"))
}

/// Tasks of a run while its journal is read.
#[derive(Default)]
struct Tasks {
    open: BTreeMap<u64, StoredTask>,
    failed: BTreeMap<u64, Vec<AttemptRecord>>,
    quarantined: BTreeMap<u64, (StoredTask, Vec<AttemptRecord>)>,
    greatest_id: u64,
}

impl Tasks {
    fn add(&mut self, task: StoredTask) {
        self.greatest_id = self.greatest_id.max(task.id);
        self.quarantined.remove(&task.id);
        self.open.insert(task.id, task);
    }

    fn add_failure(&mut self, failed: &FailedAttempt) -> Result<(), RunError> {
        let record = decode(&failed.reason, "a failed attempt")?;
        self.failed.entry(failed.task).or_default().push(record);
        Ok(())
    }

    fn quarantine(&mut self, id: u64, history: Vec<AttemptRecord>) -> Option<Bytes> {
        let task = self.open.remove(&id)?;
        self.failed.remove(&id);
        let payload = task.payload.clone();
        self.quarantined.insert(id, (task, history));
        Some(payload)
    }
}

/// What a restarted master begins with.
pub(crate) struct Restart {
    pub(crate) run: Run,
    /// Number of results that were repeated for the driver.
    pub(crate) repeated_results: usize,
}

/// Restores the driver and the run from the contents of a journal.
///
/// # Errors
/// A part cannot be read, or the driver fails or behaves differently from the first time.
pub(crate) fn restart<D: RawDriver>(
    driver: &mut D,
    recovered: Recovered,
    settings: Settings,
    generation: u32,
    now: Micros,
) -> Result<Restart, RunError> {
    let state = recovered.driver_state.unwrap_or_default();
    driver.restore(&state).map_err(driver_failed("restore"))?;
    let statistics = restore_statistics(&recovered.counters, &recovered.records)?;
    let dispatcher = Dispatcher::new(settings, generation, statistics, now);
    let mut run = Run::new(dispatcher, generation, now);
    let mut tasks = Tasks::default();
    for task in recovered.open_tasks {
        tasks.add(task);
    }
    for failed in &recovered.failed_attempts {
        tasks.add_failure(failed)?;
    }
    for quarantined in recovered.quarantined {
        let id = quarantined.task.id;
        tasks.add(quarantined.task);
        tasks.quarantine(id, decode(&quarantined.history, "a quarantined task")?);
    }
    run.mode = Mode::Replay;
    let mut repeated_results = 0;
    for record in recovered.records {
        repeated_results += usize::from(matches!(record, Record::Accepted { .. }));
        repeat_record(driver, &mut run, &mut tasks, record)?;
    }
    run.mode = Mode::Live;
    restore_tasks(&mut run, tasks);
    Ok(Restart {
        run,
        repeated_results,
    })
}

/// Returns the tasks in a journal without a state of the driver: its master was killed at the
/// start.
pub(crate) fn abandoned_tasks(recovered: &Recovered) -> Vec<u64> {
    let added = recovered.records.iter().flat_map(|record| match record {
        Record::TasksAdded { tasks } => tasks.as_slice(),
        _ => &[],
    });
    recovered
        .open_tasks
        .iter()
        .chain(added)
        .map(|task| task.id)
        .collect()
}

/// Returns the newest stored statistics with the results that were accepted after them.
fn restore_statistics(counters: &Bytes, records: &[Record]) -> Result<RunStatistics, RunError> {
    let mut statistics = match counters.is_empty() {
        true => RunStatistics::default(),
        false => decode(counters, "the statistics")?,
    };
    for record in records {
        match record {
            Record::Statistics { statistics: newer } => {
                statistics = decode(newer, "the statistics")?;
            }
            Record::Accepted { stats, .. } => {
                let TaskStats {
                    factor,
                    cpu_us,
                    wall_us,
                } = *stats;
                statistics.add_recovered_task(factor, cpu_us, wall_us);
            }
            _ => {}
        }
    }
    Ok(statistics)
}

/// Applies a record, and repeats the driver's callback for it.
fn repeat_record<D: RawDriver>(
    driver: &mut D,
    run: &mut Run,
    tasks: &mut Tasks,
    record: Record,
) -> Result<(), RunError> {
    match record {
        Record::TasksAdded { tasks: added } => added.into_iter().for_each(|task| tasks.add(task)),
        Record::Accepted {
            task,
            result,
            added,
            returned,
            stats,
            ..
        } => {
            let Some(open) = tasks.open.remove(&task) else {
                return Err(cannot_restart(&format!("task {task} has two results")));
            };
            tasks.failed.remove(&task);
            let info = ResultInfo {
                task: TaskId(task),
                // The worker of an earlier master does not exist any more.
                worker: WorkerId(0),
                cpu_us: stats.cpu_us,
                wall_us: stats.wall_us,
            };
            let from_driver = added.get(returned as usize..).unwrap_or_default();
            run.begin_replay(from_driver.iter().map(|task| TaskId(task.id)));
            let repeated = driver.on_result(run, &info, &open.payload, &result);
            repeated.map_err(driver_failed("on_result"))?;
            check_repetition(run, task, from_driver)?;
            added.into_iter().for_each(|task| tasks.add(task));
        }
        Record::AttemptFailed(failed) => tasks.add_failure(&failed)?,
        Record::Quarantined { task, history } => {
            let history: Vec<AttemptRecord> = decode(&history, "a quarantined task")?;
            if let Some(payload) = tasks.quarantine(task, history.clone()) {
                // Tasks that the callback added follow in a record of their own.
                run.begin_replay(std::iter::empty());
                let repeated = driver.on_quarantined(run, TaskId(task), &payload, &history);
                repeated.map_err(driver_failed("on_quarantined"))?;
            }
        }
        Record::Pruned { tasks: pruned } => {
            for task in pruned {
                tasks.open.remove(&task);
                tasks.failed.remove(&task);
            }
        }
        Record::KeyChanged { task, key } => {
            if let Some(open) = tasks.open.get_mut(&task) {
                open.key = key;
            }
        }
        Record::Statistics { .. } | Record::Finished => {}
    }
    run.added.clear();
    Ok(())
}

/// Checks that a repeated callback has added the same tasks as the first time.
fn check_repetition(run: &Run, task: u64, stored: &[StoredTask]) -> Result<(), RunError> {
    let is_equal = |(added, stored): (&crate::run::AddedTask, &StoredTask)| {
        added.task.payload == stored.payload && added.task.groups.bits() == stored.groups
    };
    let is_same = run.added.len() == stored.len() && run.added.iter().zip(stored).all(is_equal);
    if is_same {
        return Ok(());
    }
    Err(cannot_restart(&format!(
        "on_result added other tasks for task {task} than before the restart ({} instead of {}): \
         on_result may depend only on the driver's saved state and its arguments",
        run.added.len(),
        stored.len()
    )))
}

fn new_task(task: &StoredTask) -> NewTask {
    NewTask {
        id: TaskId(task.id),
        key: Key::new(task.key).unwrap_or_default(),
        groups: Groups::from_bits(task.groups).unwrap_or_default(),
    }
}

/// Adds the open and quarantined tasks to the run, in their order.
fn restore_tasks(run: &mut Run, tasks: Tasks) {
    let mut open: Vec<StoredTask> = tasks.open.into_values().collect();
    open.sort_by_key(|task| (Key::new(task.key).unwrap_or_default(), task.position));
    let new_tasks: Vec<NewTask> = open.iter().map(new_task).collect();
    let greatest_id = Some(TaskId(tasks.greatest_id));
    run.dispatcher
        .restore_tasks(run.now, &new_tasks, greatest_id);
    for (task, history) in tasks.failed {
        run.dispatcher.restore_attempts(TaskId(task), history);
    }
    let mut restore_payload = |task: &StoredTask| {
        let raw = RawTask {
            key: task.key,
            groups: Groups::from_bits(task.groups).unwrap_or_default(),
            payload: task.payload.clone(),
        };
        run.restore_payload(TaskId(task.id), raw, task.position);
    };
    open.iter().for_each(&mut restore_payload);
    tasks
        .quarantined
        .values()
        .for_each(|(task, _)| restore_payload(task));
    for (task, (_, history)) in tasks.quarantined {
        let task = TaskId(task);
        run.dispatcher
            .restore_quarantined(QuarantinedTask { task, history });
    }
}
