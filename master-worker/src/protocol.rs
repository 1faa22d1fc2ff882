//! Messages between the master and the workers of a run.
//!
//! The messages use two tags of their own, so that drivers and workers may also send PVM messages
//! with other tags.

use bytes::Bytes;
use sempa_work_dispatch::{AttemptId, ClassId, Groups, TaskId};
use serde::{Deserialize, Serialize};

/// Tag of messages to a master.
pub const TO_MASTER_TAG: i32 = 0x5357_4d01;
/// Tag of messages to a worker.
pub const TO_WORKER_TAG: i32 = 0x5357_4d02;
/// Version of these messages. Masters and workers of one run must have the same one.
pub const PROTOCOL_VERSION: u32 = 2;
/// Environment variable of workers: name of the run.
pub const RUN_VARIABLE: &str = "SEMPA_WORK_RUN";
/// Environment variable of workers: number of the worker's class.
pub const CLASS_VARIABLE: &str = "SEMPA_WORK_CLASS";

/// A task that a driver or a worker creates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RawTask {
    /// Tasks with lower keys are dispatched first. NaN counts as 0.
    pub key: f64,
    /// Set of the groups, one bit for each.
    pub groups: Groups,
    pub payload: Bytes,
}

/// Result of an attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum AttemptContent {
    Completed {
        result: Bytes,
        /// Work that the attempt did not do. It becomes tasks if the result is accepted.
        returned_tasks: Vec<RawTask>,
    },
    Failed {
        message: String,
    },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct AttemptResult {
    pub(crate) task: TaskId,
    pub(crate) attempt: AttemptId,
    /// Processor time of the worker's process in microseconds.
    pub(crate) cpu_us: u64,
    pub(crate) wall_us: u64,
    pub(crate) content: AttemptContent,
}

/// The first message of a worker to a master.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Hello {
    pub(crate) protocol: u32,
    /// Number of the run whose init data the worker has.
    pub(crate) run: Option<u64>,
    /// Number of the init data that the worker has.
    pub(crate) init: Option<u64>,
    pub(crate) class: ClassId,
    pub(crate) groups: Groups,
    pub(crate) host: String,
    pub(crate) benchmark_us: Option<u64>,
    /// Attempts that the worker holds or has finished, in the order of execution.
    pub(crate) held_attempts: Vec<(TaskId, AttemptId)>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToMaster {
    Hello(Hello),
    /// The worker cannot read the init data on its host.
    InitDataMissing,
    /// The worker is between two tasks and wants the new init data, after
    /// [`ToWorker::InitChanged`].
    InitWanted,
    /// The worker has the init data of this number and has executed the benchmark, if there is one.
    Ready {
        init: u64,
        benchmark_us: Option<u64>,
    },
    /// The worker's program refused the init data, so the worker ends.
    InitFailed {
        message: String,
    },
    Results(Vec<AttemptResult>),
    /// Part of the result of a running attempt.
    Partial {
        task: TaskId,
        attempt: AttemptId,
        data: Bytes,
    },
    Returned(Vec<(TaskId, AttemptId)>),
}

/// Where a worker finds the init data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum InitSource {
    /// In this message. If `store_as` is a number, the worker stores the data on its host under
    /// this number for the other workers.
    Message { data: Bytes, store_as: Option<u64> },
    /// On the worker's host, where another worker has stored the data under this number.
    Host { stored_as: u64, length: u64 },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Welcome {
    pub(crate) run: u64,
    pub(crate) run_name: String,
    /// Number of the run's init data. Numbers of different data differ.
    pub(crate) init_number: u64,
    /// The data, unless the worker has them.
    pub(crate) init: Option<InitSource>,
    /// Payload of the benchmark task, if the run has one.
    pub(crate) benchmark: Option<Bytes>,
    /// The newest update, if there was one.
    pub(crate) update: Option<Update>,
    /// The worker must keep results until the master acknowledges them.
    pub(crate) keeps_results: bool,
    /// Time in milliseconds for which a worker waits for the next master of the run.
    pub(crate) master_wait_ms: u64,
}

/// Data for running workers. A newer update replaces an older one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Update {
    pub(crate) number: u64,
    pub(crate) data: Bytes,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct TaskOrder {
    pub(crate) task: TaskId,
    pub(crate) attempt: AttemptId,
    pub(crate) payload: Bytes,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) enum ToWorker {
    Welcome(Box<Welcome>),
    Tasks {
        /// The worker must report earlier results before it begins each of these tasks.
        report_each: bool,
        /// Time after which a task should return its remaining work.
        time_limit_us: Option<u64>,
        orders: Vec<TaskOrder>,
    },
    Recall(Vec<(TaskId, AttemptId)>),
    /// The worker must get the new init data before its next task.
    InitChanged,
    Cancel {
        task: TaskId,
        attempt: AttemptId,
    },
    /// The results of these attempts are stored, or do not count.
    Acknowledged(Vec<AttemptId>),
    Update(Update),
    /// The worker must end. `run_is_over` is false if only this worker is not needed any more.
    End {
        run_is_over: bool,
    },
    /// The master and the worker do not fit.
    Refused {
        why: String,
    },
}
