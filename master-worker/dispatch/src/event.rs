//! Events that the shell reports, and outputs that the shell carries out.

use crate::{AttemptId, AttemptRecord, ClassId, Groups, Key, Micros, TaskId, WorkerId};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// A task for the waiting list. The content of the task stays with the shell.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct NewTask {
    pub id: TaskId,
    pub key: Key,
    pub groups: Groups,
}

/// Why a worker was lost, or why an attempt ended without a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LossReason {
    /// The owner of the host ended its guests.
    Owner,
    /// The host was drained.
    Drained,
    /// The worker's host was lost or left the virtual machine.
    HostLost,
    /// The run released the worker.
    Released,
    /// The worker had the task, but another worker returned the result first.
    OvertakenByCopy,
    /// The worker's program ended by itself with this exit status.
    Ended { status: i32 },
    /// A signal killed the worker.
    Killed { signal: i32 },
    /// The kernel or the task's limit ended the worker because of its memory.
    OutOfMemory,
    /// The attempt took longer than [`crate::Settings::attempt_timeout`].
    OverTime,
    /// The program of the worker reported that it cannot execute the task.
    Failed,
}

impl LossReason {
    /// True if the reason counts against the task that was being executed. A loss for an owner, a
    /// drain or a host says nothing about the task.
    pub fn counts(self) -> bool {
        match self {
            Self::Owner
            | Self::Drained
            | Self::HostLost
            | Self::Released
            | Self::OvertakenByCopy => false,
            Self::Ended { .. }
            | Self::Killed { .. }
            | Self::OutOfMemory
            | Self::OverTime
            | Self::Failed => true,
        }
    }
}

impl fmt::Display for LossReason {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::Owner => f.write_str("the owner of the host ended the worker"),
            Self::Drained => f.write_str("the host was drained"),
            Self::HostLost => f.write_str("the host was lost"),
            Self::Released => f.write_str("the run released the worker"),
            Self::OvertakenByCopy => f.write_str("another worker returned the result first"),
            Self::Ended { status } => {
                write!(f, "the worker's program ended with exit status {status}")
            }
            Self::Killed { signal } => write!(f, "signal {signal} killed the worker"),
            Self::OutOfMemory => f.write_str("the worker used too much memory"),
            Self::OverTime => f.write_str("the attempt took longer than its time limit"),
            Self::Failed => f.write_str("the worker reported a failure"),
        }
    }
}

/// Why a worker does not compute at present.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PauseCause {
    /// The owner of the host is present.
    Owner,
    /// A user or the resource manager suspended the worker.
    Suspended,
}

/// Result of an attempt, as the worker reports it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AttemptOutcome {
    Completed,
    /// The worker's program cannot execute the task.
    Failed,
}

/// What a worker reports about an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AttemptReport {
    pub task: TaskId,
    pub attempt: AttemptId,
    pub outcome: AttemptOutcome,
    /// Processor time of the worker's process for the task.
    pub cpu: Micros,
    /// Duration of the attempt by the worker's clock, including pauses.
    pub wall: Micros,
}

/// What happens to a run.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// The shell has started a worker of this class, or a worker has reported by itself. The worker
    /// is not ready yet.
    WorkerStarted {
        worker: WorkerId,
        class: ClassId,
        groups: Groups,
        host: Arc<str>,
    },
    /// The worker has its init data and, if there is a benchmark, has executed the benchmark in
    /// this time.
    WorkerReady {
        worker: WorkerId,
        benchmark: Option<Micros>,
    },
    /// A worker of an earlier master reports, with the attempts that the worker holds in their
    /// order of execution. The worker has its init data.
    WorkerReturned {
        worker: WorkerId,
        class: ClassId,
        groups: Groups,
        host: Arc<str>,
        benchmark: Option<Micros>,
        held_attempts: Vec<(TaskId, AttemptId)>,
    },
    WorkerLost {
        worker: WorkerId,
        reason: LossReason,
    },
    WorkerPaused {
        worker: WorkerId,
        cause: PauseCause,
    },
    WorkerResumed {
        worker: WorkerId,
    },
    WorkerMigrated {
        worker: WorkerId,
        host: Arc<str>,
    },
    /// The worker must get no further task, for example because its host is drained. The worker is
    /// released when its tasks are finished.
    WorkerUnwanted {
        worker: WorkerId,
    },
    /// Workers of this class could not be started.
    StartFailed {
        class: ClassId,
        count: u32,
    },
    /// A host joined the virtual machine, or became free for guests.
    HostAvailable,
    /// A worker reports an attempt.
    Attempt {
        worker: WorkerId,
        report: AttemptReport,
    },
    /// A worker returns attempts that the worker has not begun, after [`Output::Recall`].
    TasksReturned {
        worker: WorkerId,
        attempts: Vec<(TaskId, AttemptId)>,
    },
    /// Time has passed; at the latest at [`crate::Dispatcher::next_wakeup`].
    Tick,
}

/// Why a result does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum UncountedResult {
    /// The task is closed: an earlier result was accepted, or the task was pruned.
    TaskClosed,
    /// The task is quarantined.
    Quarantined,
    /// The run has never had such a task.
    UnknownTask,
}

/// What happens to a task after a failed attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TaskFailure {
    /// The task waits again.
    Waits,
    /// The task waits again after this delay.
    Delayed(Micros),
    /// Another worker executes a copy of the task.
    CopyContinues,
    /// The task is not tried again; [`Output::Quarantined`] follows.
    Quarantined,
}

/// What the shell must do.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// Send these tasks to the worker. `report_each` is true if the worker must report all earlier
    /// results before it begins each of these tasks.
    Dispatch {
        worker: WorkerId,
        attempts: Vec<(TaskId, AttemptId)>,
        report_each: bool,
    },
    /// Request the worker to return these tasks if it has not begun them.
    Recall {
        worker: WorkerId,
        attempts: Vec<(TaskId, AttemptId)>,
    },
    /// The result of this attempt is the first one: store the result and pass it to the driver.
    Accept {
        worker: WorkerId,
        task: TaskId,
        attempt: AttemptId,
    },
    /// The result of this attempt does not count: discard the result.
    Discard {
        worker: WorkerId,
        task: TaskId,
        attempt: AttemptId,
        why: UncountedResult,
    },
    /// The worker needs not finish this attempt: the task is closed. The worker's program may
    /// ignore the request.
    Cancel {
        worker: WorkerId,
        task: TaskId,
        attempt: AttemptId,
    },
    /// An attempt failed for a reason that counts: store the record.
    AttemptFailed {
        task: TaskId,
        record: AttemptRecord,
        then: TaskFailure,
    },
    /// An attempt that may have begun ended for a reason that does not count: store the record.
    AttemptLost { task: TaskId, record: AttemptRecord },
    /// The task is not tried again.
    Quarantined {
        task: TaskId,
        history: Vec<AttemptRecord>,
    },
    /// Start workers of a class.
    StartWorkers { class: ClassId, count: u32 },
    /// Migrate the worker off its host ([`crate::PausePolicy::Move`]).
    MoveWorker { worker: WorkerId },
    /// Tell the worker to end, after [`Event::WorkerLost`] of no kind: the dispatcher has removed
    /// the worker.
    ReleaseWorker { worker: WorkerId },
    /// No open task is left. The driver adds tasks or finishes the run.
    AllTasksClosed,
    /// The run cannot continue: too many tasks are quarantined.
    TooManyQuarantined { count: usize },
}

/// Numbers of tasks and results of a run. All numbers include those before restarts of the master.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunCounts {
    pub tasks_added: u64,
    pub results_accepted: u64,
    /// Results of closed tasks: of second copies, or of workers that were believed lost.
    pub results_discarded: u64,
    pub attempts: u64,
    /// Attempts that ended without a result for a reason that does not count against the task.
    pub attempts_lost: u64,
    /// Attempts that ended without a result for a reason that counts.
    pub attempts_failed: u64,
    pub tasks_pruned: u64,
    pub tasks_quarantined: u64,
    pub second_copies: u64,
    pub tasks_recalled: u64,
    pub workers_started: u64,
    pub workers_lost: u64,
    pub worker_migrations: u64,
    pub worker_pauses: u64,
}
