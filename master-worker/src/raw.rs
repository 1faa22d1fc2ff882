//! Drivers and workers whose tasks and results are bytes. The typed interface of this crate and the
//! interfaces for C, C++ and Python are built on these traits.

use crate::context::Context;
use crate::run::Run;
use bytes::Bytes;
use sempa_work_dispatch::{AttemptRecord, PauseCause, TaskId, WorkerId};
use std::sync::Arc;

/// An error of the application. It ends the run or fails the attempt.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// What a result cost.
#[derive(Clone, Debug, PartialEq)]
pub struct ResultInfo {
    pub task: TaskId,
    pub worker: WorkerId,
    /// Processor time in microseconds.
    pub cpu_us: u64,
    pub wall_us: u64,
}

/// What happens to the hosts and workers of a run. These events are information for the driver; the
/// framework has already reacted.
#[derive(Clone, Debug, PartialEq)]
pub enum PoolEvent {
    HostAdded { host: Arc<str> },
    HostLost { host: Arc<str> },
    WorkerReady { worker: WorkerId, host: Arc<str> },
    WorkerPaused { worker: WorkerId, cause: PauseCause },
    WorkerResumed { worker: WorkerId },
    WorkerMigrated { worker: WorkerId, host: Arc<str> },
    WorkerLost { worker: WorkerId, reason: String },
}

/// The application's part of the master.
///
/// A master that starts again with the journal of a run restores the driver's newest saved state,
/// and repeats [`RawDriver::on_result`] and [`RawDriver::on_quarantined`] for the results after it.
/// So these two must depend only on the driver's state and their arguments.
pub trait RawDriver {
    /// Begins a new run: adds the first tasks and sets the targets. Not called on a restart.
    ///
    /// # Errors
    /// The application's; the run does not begin.
    fn start(&mut self, run: &mut Run) -> Result<(), Failure>;

    /// Sets what is not part of the saved state: targets, settings. Called after each start and
    /// restart.
    ///
    /// # Errors
    /// The application's; the run does not begin.
    fn configure(&mut self, _run: &mut Run) -> Result<(), Failure> {
        Ok(())
    }

    /// Returns the state for a restart.
    ///
    /// # Errors
    /// The application's; the run ends.
    fn save(&self) -> Result<Bytes, Failure>;

    /// Restores a state from [`RawDriver::save`].
    ///
    /// # Errors
    /// The application's; the restart fails, and the journal remains unchanged.
    fn restore(&mut self, state: &[u8]) -> Result<(), Failure>;

    /// Returns the data that each worker gets once before its first task.
    ///
    /// # Errors
    /// The application's; the run ends.
    fn init_data(&mut self) -> Result<Bytes, Failure>;

    /// Returns the payload of the benchmark task; `None` for no benchmark.
    fn benchmark(&mut self) -> Option<Bytes> {
        None
    }

    /// Handles the first result of a task.
    ///
    /// # Errors
    /// The application's; the run ends, and a restart repeats the call.
    fn on_result(
        &mut self,
        run: &mut Run,
        info: &ResultInfo,
        task: &Bytes,
        result: &Bytes,
    ) -> Result<(), Failure>;

    /// Handles a part of the result of a running task.
    ///
    /// # Errors
    /// The application's; the run ends.
    fn on_partial_result(
        &mut self,
        _run: &mut Run,
        _task: TaskId,
        _payload: &Bytes,
        _data: &Bytes,
    ) -> Result<(), Failure> {
        Ok(())
    }

    /// Handles a task that is not tried again.
    ///
    /// # Errors
    /// The application's; the run ends.
    fn on_quarantined(
        &mut self,
        _run: &mut Run,
        _task: TaskId,
        _payload: &Bytes,
        _history: &[AttemptRecord],
    ) -> Result<(), Failure> {
        Ok(())
    }

    /// Handles a change of the hosts or workers.
    ///
    /// # Errors
    /// The application's; the run ends.
    fn on_pool_event(&mut self, _run: &mut Run, _event: &PoolEvent) -> Result<(), Failure> {
        Ok(())
    }

    /// Handles the end of the last open task. The run is finished if the driver adds no task.
    ///
    /// # Errors
    /// The application's; the run ends, and its journal remains.
    fn on_all_closed(&mut self, _run: &mut Run) -> Result<(), Failure> {
        Ok(())
    }
}

/// The application's part of a worker.
pub trait RawWorker {
    /// Takes the init data. Called again when the driver replaces them, and for a new master whose
    /// init data differ.
    ///
    /// # Errors
    /// The application's; the worker ends.
    fn init(&mut self, data: Bytes) -> Result<(), Failure>;

    /// Executes a task and returns its result.
    ///
    /// # Errors
    /// The application's; the attempt fails and counts against the task.
    fn execute(&mut self, task: Bytes, context: &mut Context) -> Result<Bytes, Failure>;
}
