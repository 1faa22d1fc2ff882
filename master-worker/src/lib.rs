//! Master-worker programs on a Sempa virtual machine.
//!
//! A *driver* (the application's part of the master) creates tasks and handles their results;
//! *workers* on many hosts execute the tasks. Hosts and workers come and go: a worker that is lost
//! gives its tasks back, a worker that migrates keeps them, and the first result of each task
//! counts, however often the task was executed. With a journal, a master that is killed continues
//! where it ended. The interface follows MW (Goux, Kulkarni, Linderoth, Yoder 2000).
//!
//! The shortest form of a program is [`map()`], which applies a function to many tasks. A program
//! that decides more implements [`Task`], [`Driver`] and [`Worker`], and calls [`run_program`]:
//!
//! ```
//! use master_worker::{
//!     Driver, Failure, Nothing, ProgramOptions, RunHandle, Task, TaskContext, Worker,
//! };
//! use serde::{Deserialize, Serialize};
//!
//! #[derive(Serialize, Deserialize)]
//! struct Square(u64);
//!
//! impl Task for Square {
//!     type Result = u64;
//! }
//!
//! #[derive(Serialize, Deserialize)]
//! struct Sum(u64);
//!
//! impl Driver for Sum {
//!     type Task = Square;
//!     type InitData = ();
//!     type Update = Nothing;
//!     type Partial = Nothing;
//!
//!     fn initial_tasks(
//!         &mut self,
//!         _run: &mut RunHandle<'_, Self>,
//!     ) -> Result<Vec<Square>, Failure> {
//!         Ok((1..=100).map(Square).collect())
//!     }
//!
//!     fn init_data(&mut self) -> Result<(), Failure> {
//!         Ok(())
//!     }
//!
//!     fn on_result(
//!         &mut self,
//!         _run: &mut RunHandle<'_, Self>,
//!         _task: Square,
//!         square: u64,
//!     ) -> Result<(), Failure> {
//!         self.0 += square;
//!         Ok(())
//!     }
//! }
//!
//! struct Squarer;
//!
//! impl Worker for Squarer {
//!     type Task = Square;
//!     type InitData = ();
//!     type Update = Nothing;
//!     type Partial = Nothing;
//!
//!     fn new(_data: ()) -> Result<Self, Failure> {
//!         Ok(Self)
//!     }
//!
//!     fn execute(
//!         &mut self,
//!         task: Square,
//!         _context: &mut TaskContext<'_, '_, Self>,
//!     ) -> Result<u64, Failure> {
//!         Ok(task.0 * task.0)
//!     }
//! }
//!
//! // With `in_process`, the run needs no virtual machine.
//! let options = ProgramOptions { in_process: true, ..ProgramOptions::new("squares", 4) };
//! let (sum, outcome) = master_worker::run_program::<Sum, Squarer>(Sum(0), &options)?;
//! assert!(outcome.is_finished);
//! assert_eq!(sum.0, 338_350);
//! # Ok::<(), Failure>(())
//! ```

mod arrivals;
mod callbacks;
mod context;
mod events;
mod host_store;
mod in_process;
mod init_hosts;
pub mod journal;
mod journal_state;
mod map;
mod master;
mod program;
pub mod protocol;
mod raw;
mod recovery;
mod run;
mod spinning;
mod start;
mod status;
#[cfg(test)]
mod tests;
mod typed;
mod vm_master;
mod vm_worker;
mod worker_loop;

pub use context::Context;
pub use in_process::run_in_process;
pub use map::{MapOutcome, TaskFailed, map};
pub use master::RunError;
pub use program::{ProgramOptions, is_worker, run_as_worker, run_program};
pub use protocol::RawTask;
pub use raw::{Failure, PoolEvent, RawDriver, RawWorker, ResultInfo};
pub use run::{Run, WorkerPlace, WorkerProgram};
pub use sempa_work_dispatch as dispatch;
pub use sempa_work_dispatch::{
    AttemptRecord, ClassId, Grain, Groups, PausePolicy, Progress, RetryPolicy, Settings,
    StatisticsReport, TaskId, WorkerId, WorkerOrder,
};
pub use start::{MasterOptions, RunOutcome};
pub use typed::{
    Driver, Nothing, PackedDriver, PackedWorker, RunHandle, Task, TaskContext, Worker,
};
pub use vm_master::run_master;
pub use vm_worker::work;
pub use worker_loop::WorkerEnd;
