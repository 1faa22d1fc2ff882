//! Pure state machine of a master-worker run.
//!
//! A *task* is a unit of work here, as in MW (Goux, Kulkarni, Linderoth, Yoder 2000); the processes
//! of the virtual machine that execute tasks are *workers*. Each dispatch of a task to a worker is
//! an *attempt* with a number of its own. [`Dispatcher`] decides which worker gets which task,
//! which result counts, and how many workers a run requests. It has no clock, socket, file or
//! random number: a shell passes events with the time of their arrival, carries out the outputs,
//! and keeps the contents of tasks and results.

mod copies;
mod dispatcher;
mod event;
mod grain;
mod held;
mod ids;
mod losses;
mod pool;
mod progress;
mod question;
mod results;
mod settings;
mod statistics;
mod target;
mod task_table;
mod waiting;
mod worker;

#[cfg(test)]
mod tests;

pub use dispatcher::{Dispatcher, RefusedTasks};
pub use event::{
    AttemptOutcome, AttemptReport, Event, LossReason, NewTask, Output, PauseCause, RunCounts,
    TaskFailure, UncountedResult,
};
pub use grain::Grain;
pub use ids::{AttemptId, ClassId, Groups, Key, Micros, TaskId, WorkerId};
pub use progress::Progress;
pub use question::{MAILBOX_PREFIX, QUESTION_TAG, Question};
pub use settings::{Limits, PausePolicy, RetryPolicy, Settings, WorkerOrder};
pub use statistics::{
    NumberSummary, RunStatistics, StatisticsReport, WorkerReport, WorkerTimes, WorkerTotals,
};
pub use target::ClassStatus;
pub use task_table::{AttemptRecord, QuarantinedTask};
pub use worker::{WorkerCondition, WorkerStage, WorkerView};
