//! Control messages between a daemon and the tasker of its host, over a socket pair that the tasker
//! inherits.
//!
//! The tasker is the parent of all spawned tasks and the only privileged program. It executes
//! requests and reports results; it makes no decisions. When the daemon's end of the socket closes,
//! or the daemon does not renew its lease, the tasker kills all its tasks and exits.

use crate::engine::Engine;
use crate::host_limit::HostLimit;
use crate::ids::{Micros, MigrationId, RequestId, Tid};
use crate::migration::{Failure, Refusal, TaskFacts, Usage, Verdict};
use crate::task::RedirectAddress;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Maximum size in bytes of the output in one [`FromTasker::Output`]. PVM's collectors expect
/// chunks of at most this size.
pub const OUTPUT_CHUNK_BYTES_MAX: usize = 3999;
/// Maximum number of process ids in one [`FromTasker::LeftBehind`] or [`FromTasker::NotStopped`].
pub const REPORTED_PIDS_MAX: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskStart {
    /// Tid of the new task.
    pub tid: Tid,
    /// Absolute path of the program.
    pub path: PathBuf,
    /// All arguments, including `argv[0]`.
    pub argv: Vec<Vec<u8>>,
    /// The complete environment of the task, as `NAME=value`.
    pub env: Vec<Vec<u8>>,
    /// Working directory of the task. If this directory is not accessible, the task is not started.
    pub working_dir: PathBuf,
    /// True if the task is bound to its host: the task gets no PID namespace and can access other
    /// processes of the host, and it never migrates.
    pub pinned: bool,
}

/// Capabilities of a tasker on its host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskerCapabilities {
    /// True if each task gets a PID namespace.
    pub pid_namespaces: bool,
    /// Version of the dump engine.
    pub engine_version: Result<String, EngineUnavailable>,
    /// `Ok` if control groups freeze paused tasks.
    pub freezer: Result<(), FreezerUnavailable>,
    /// Names of the capabilities that the tasker needs as root and lacks, such as `CAP_SYS_ADMIN`;
    /// empty for a tasker of an ordinary user.
    pub missing_capabilities: Vec<String>,
}

/// The reason why no dump engine works on a host, and how to install one. Tasks run on the host,
/// but no task can be dumped or restored there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{0}")]
pub struct EngineUnavailable(pub String);

/// The reason why control groups do not freeze the tasks of a host. Signals stop paused tasks
/// instead.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{0}")]
pub struct FreezerUnavailable(pub String);

/// Bytes that the tasker must write into the memory of a stopped process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryWrite {
    pub address: RedirectAddress,
    pub bytes: Vec<u8>,
}

/// Size and number of the image files that a dump has written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DumpReport {
    /// Total size of the image files, in bytes.
    pub image_bytes: u64,
    /// Number of image files.
    pub image_files: u32,
}

/// A request of the daemon to its tasker. The arrow names the report that answers the request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToTasker {
    /// Start a task. → [`FromTasker::Started`] or [`FromTasker::StartFailed`]
    Start(TaskStart),
    /// Send a signal to the task's process. No answer.
    ///
    /// While the task is stopped for a migration the signal is queued: it is delivered if the task
    /// continues on this host, and lost if the task continues on another host. For a paused task,
    /// SIGKILL takes effect immediately; after SIGTERM the task may run for a short time; other
    /// signals are queued.
    Signal { tid: Tid, signal: i32 },
    /// Ask the task's process to exit, so that the program can be restarted. The tasker sends a
    /// signal, or the daemon sends a message when it receives [`FromTasker::ExitExpected`].
    ///
    /// If the process exits in the agreed way, the tasker kills all other processes of the task
    /// before it reports the exit. Without a PID namespace, the tasker does not wait until these
    /// processes have ended. A paused task may run until the time limit. → [`FromTasker::Exited`]
    /// after the exit, or [`FromTasker::ExitNotRequested`]
    RequestExit {
        tid: Tid,
        /// The engine, which determines how the process is asked and the agreed exit status.
        engine: Engine,
    },
    /// Withdraw [`ToTasker::RequestExit`]: from now on the task ends when its process exits.
    WithdrawExitRequest { tid: Tid },
    /// Kill all processes of the task. → [`FromTasker::Exited`]
    Kill { tid: Tid },
    /// Report the task's properties and resources; nothing changes. → [`FromTasker::Inspected`]
    Inspect { migration: MigrationId, tid: Tid },
    /// Check whether the task handles the signal that would request its own checkpoint; nothing
    /// changes. → [`FromTasker::SignalChecked`]
    CheckSignal {
        /// Id of the migration or checkpoint.
        migration: MigrationId,
        tid: Tid,
        signal: i32,
    },
    /// Give a verdict on a task with these properties. If the task is accepted, also prepare a PID
    /// namespace. → [`FromTasker::Prepared`]
    Prepare {
        migration: MigrationId,
        tid: Tid,
        /// Properties of the task.
        facts: TaskFacts,
    },
    /// As [`ToTasker::Inspect`], for a query without a migration. → [`FromTasker::QueryInspected`]
    QueryInspect {
        /// Id of the query.
        query: RequestId,
        tid: Tid,
    },
    /// As [`ToTasker::Prepare`], for a query without a migration: gives the verdict and prepares
    /// nothing. → [`FromTasker::QueryVerdict`]
    QueryVerdict {
        /// Id of the query.
        query: RequestId,
        /// Properties of the task.
        facts: TaskFacts,
    },
    /// Pause the task, for the host's owner or because it is suspended. → [`FromTasker::Paused`],
    /// each time the task has stopped
    ///
    /// The task may run for `run_time`, at a priority below all other processes, so that its
    /// library can quiesce. Then all its processes are stopped until [`ToTasker::Resume`], whatever
    /// the outcome of a migration. A task that is already paused runs once more for `run_time`.
    /// While a migration controls the task, the pause is deferred.
    Pause {
        tid: Tid,
        /// Time for which the task may still run before it is stopped again.
        run_time: Micros,
    },
    /// Like [`ToTasker::Pause`], for a task that was stopped before its library had quiesced. If
    /// possible, only the library's threads run at first. → [`FromTasker::Paused`], once
    ResumeToQuiesce {
        tid: Tid,
        /// Time for which only the library's threads run. Afterwards the whole program runs,
        /// because the program may hold locks that the library needs.
        library_run_time: Micros,
        /// Time until the task is stopped again: `library_run_time` plus the time for which the
        /// whole program may run.
        run_time: Micros,
    },
    /// End a pause. The task is resumed unless a migration controls it. No answer.
    Resume { tid: Tid },
    /// Source: transfer memory of the running task, over the connection on which the target will
    /// later request the remaining memory. The pre-copy ends early if the task is paused. →
    /// [`FromTasker::PreCopied`]
    PreCopy {
        migration: MigrationId,
        tid: Tid,
        /// Path of the socket on which the daemon listens for the memory connection.
        memory_socket_path: PathBuf,
    },
    /// Source: stop the pre-copy; its result is not needed. No answer.
    StopPreCopy { migration: MigrationId },
    /// Target: receive the memory of a pre-copy, over the connection on which the remaining memory
    /// will be requested. No answer except [`FromTasker::PreCopyLost`].
    ReceivePreCopy {
        migration: MigrationId,
        /// Path of the socket on which the daemon listens for the memory connection.
        memory_socket_path: PathBuf,
    },
    /// Stop all processes of the task. → [`FromTasker::Stopped`]
    Stop {
        migration: MigrationId,
        tid: Tid,
        /// Bytes to write into the memory of the stopped task: a redirect for a library that has
        /// already quiesced.
        memory_write: Option<MemoryWrite>,
    },
    /// Write the images of the stopped task into a new directory; the task stays stopped. →
    /// [`FromTasker::Dumped`]
    Dump {
        migration: MigrationId,
        tid: Tid,
        /// Directory for the images.
        image_dir: PathBuf,
        /// For post-copy, path of the socket on which the daemon listens for the memory connection.
        /// Most memory stays in the stopped task and is served on request, also after the task was
        /// killed. `None` if all memory must be written into the directory.
        memory_socket_path: Option<PathBuf>,
    },
    /// The migration is aborted: end a running dump and resume the task. →
    /// [`FromTasker::MigrationAborted`]
    AbortMigration { migration: MigrationId, tid: Tid },
    /// The migration is committed: kill the stopped task, reap it and read its last output. →
    /// [`FromTasker::SourceKilled`]
    KillSource { migration: MigrationId, tid: Tid },
    /// Rebuild the task from the images in `image_dir`; its processes stay stopped. →
    /// [`FromTasker::Restored`]
    Restore {
        migration: MigrationId,
        tid: Tid,
        /// Directory of the images.
        image_dir: PathBuf,
        /// For a restart from a checkpoint: bytes to write into the memory of the restored task,
        /// which redirect its library to this host. If set, files to which the task had appended
        /// since the checkpoint are also truncated.
        memory_write: Option<MemoryWrite>,
        /// For post-copy, path of the socket on which the daemon listens: most memory must be
        /// requested over this socket. → [`FromTasker::MemoryArrived`], after
        /// [`FromTasker::Running`], unless the task is discarded
        memory_socket_path: Option<PathBuf>,
    },
    /// Start a program on this host, in place of a process that has exited on another host; the new
    /// process stays stopped. → [`FromTasker::Restored`]
    PrepareRestart {
        migration: MigrationId,
        /// The program to start.
        start: TaskStart,
    },
    /// Run the restored task. → [`FromTasker::Running`]
    Run {
        migration: MigrationId,
        /// Resources that the task used on other hosts. [`FromTasker::Exited`] reports the sum of
        /// these resources and the resources used on this host.
        earlier_usage: Usage,
        /// True if the migration is complete but the task must stay paused until
        /// [`ToTasker::Resume`].
        stays_paused: bool,
    },
    /// Target: the memory that has not arrived is lost, so a task that needs this memory must not
    /// continue. → [`FromTasker::MemoryArrived`] or [`FromTasker::Restored`], with a failure;
    /// [`FromTasker::PreCopyLost`] for the memory of a pre-copy; no answer if all memory has
    /// arrived
    MemoryLost {
        migration: MigrationId,
        reason: String,
    },
    /// Target: discard everything that belongs to this migration. → [`FromTasker::Discarded`]
    Discard { migration: MigrationId },
    /// The tasks may run until these times ([`crate::lease`]). Without a later renewal the tasker
    /// freezes all tasks, and then ends all tasks and itself. Before the first lease the tasks may
    /// run without a time limit. → [`FromTasker::LeaseRenewed`]
    RenewLease {
        /// Time on CLOCK_BOOTTIME at which the tasks are frozen.
        freeze_at: Micros,
        /// Time on CLOCK_BOOTTIME at which the tasks are ended, or [`crate::lease::NEVER`].
        kill_at: Micros,
    },
    /// Asks whether the tasker handles orders. → [`FromTasker::Pong`]
    Ping,
    /// Stop the leftover processes of a task that has ended. → [`FromTasker::LeftoversStopped`]
    StopLeftovers { tid: Tid },
    /// Let the leftover processes of a task that has ended run. No answer.
    ResumeLeftovers { tid: Tid },
    /// Kill the leftover processes of a task that has ended. → [`FromTasker::LeftBehind`] with a
    /// count of 0, when they have ended
    KillLeftovers { tid: Tid },
}

/// A report of the tasker to its daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromTasker {
    /// The capabilities of the tasker. Must be the first message, and is sent again if a later test
    /// of the engine fails. The test performs a real dump and restore in the background.
    Ready(TaskerCapabilities),
    Started {
        tid: Tid,
        /// Process id of the task in the tasker's PID namespace.
        pid: i32,
        /// Process id of the task in its own PID namespace; the same number if it has none.
        namespace_pid: i32,
    },
    /// The process could not be created; no [`FromTasker::Exited`] follows.
    StartFailed {
        tid: Tid,
        /// The failed operation and the reason.
        reason: String,
    },
    /// From now on an exit of the program counts as requested. If the engine asks the program by a
    /// message, the daemon must send this message.
    ExitExpected { tid: Tid },
    /// The tasker did not ask the program to exit, because the program would not handle the
    /// request.
    ExitNotRequested {
        tid: Tid,
        /// The reason in one sentence.
        reason: String,
    },
    /// Bytes that the task has written to standard output or standard error.
    Output {
        tid: Tid,
        /// The bytes; at most [`OUTPUT_CHUNK_BYTES_MAX`].
        bytes: Vec<u8>,
    },
    /// The task's process has ended, and all its output has been reported.
    Exited {
        tid: Tid,
        /// Wait status of the process.
        status: i32,
        /// Resources that the task used, on this host and earlier ones.
        usage: Usage,
    },
    /// The task's properties, or the reason why the task cannot migrate to any host.
    ///
    /// The tasker does not know the index of its host. The daemon inserts the index as the `host`
    /// of a [`Refusal::NoEngine`], here and in [`FromTasker::Prepared`].
    Inspected {
        migration: MigrationId,
        result: Result<TaskFacts, Refusal>,
        /// True if post-copy is possible and worthwhile for this task.
        supports_post_copy: bool,
        /// True if a post-copy of this task should be preceded by a pre-copy.
        supports_pre_copy: bool,
    },
    /// Reports the result of [`ToTasker::CheckSignal`].
    SignalChecked {
        /// Id of the migration or checkpoint.
        migration: MigrationId,
        /// True if the task handles the signal, as far as the tasker can determine; false if the
        /// signal would only end the task.
        handles_signal: bool,
    },
    /// The target's verdict; an empty verdict accepts the task.
    Prepared {
        migration: MigrationId,
        verdict: Verdict,
        /// True if this host supports post-copy as target.
        supports_post_copy: bool,
    },
    /// As [`FromTasker::Inspected`], for a query.
    QueryInspected {
        /// Id of the query.
        query: RequestId,
        result: Result<TaskFacts, Refusal>,
    },
    /// As [`FromTasker::Prepared`], for a query.
    QueryVerdict {
        /// Id of the query.
        query: RequestId,
        verdict: Verdict,
    },
    /// The task is paused: none of its processes runs.
    Paused { tid: Tid },
    /// Pre-copy has ended. `Ok` contains the number of bytes at the target; `Err` the reason why
    /// none of these bytes are usable.
    PreCopied {
        migration: MigrationId,
        result: Result<u64, Failure>,
    },
    /// Target: the pre-copied memory is lost or not usable.
    PreCopyLost {
        migration: MigrationId,
        failure: Failure,
    },
    /// All processes of the task have stopped, or they could not be stopped.
    Stopped {
        migration: MigrationId,
        result: Result<(), Failure>,
    },
    /// The dump has ended. On failure the task still exists and is still stopped.
    Dumped {
        migration: MigrationId,
        result: Result<DumpReport, Failure>,
    },
    /// The task continues on this host.
    MigrationAborted { migration: MigrationId },
    /// The source's copy is killed and reaped.
    SourceKilled {
        migration: MigrationId,
        /// Resources that the task used, on this host and earlier ones.
        usage: Usage,
    },
    /// The restore has ended. On failure everything that was restored has been discarded. A failure
    /// may follow a success, if the engine's process that controls the restored task dies before
    /// [`ToTasker::Run`].
    Restored {
        migration: MigrationId,
        /// Process id of the restored task, or the reason of the failure.
        result: Result<i32, Failure>,
    },
    /// The restored task runs, or could not be started.
    Running {
        migration: MigrationId,
        result: Result<(), Failure>,
    },
    /// All memory of a post-copied task has arrived. On failure the task has been killed.
    MemoryArrived {
        migration: MigrationId,
        result: Result<(), Failure>,
    },
    /// Everything that belonged to the migration on this host has been discarded.
    Discarded { migration: MigrationId },
    /// The lease is renewed.
    LeaseRenewed {
        /// Time for which the tasks were frozen until this renewal; 0 if they were not frozen.
        frozen_time: Micros,
    },
    /// The lease has run out: the tasker ends all tasks and exits.
    LeaseExpired {
        /// The reason in one sentence.
        reason: String,
    },
    /// The tasker handles orders.
    Pong,
    /// The number of processes that a task has left behind has changed. The first report of a task
    /// precedes its [`FromTasker::Exited`]. Leftover processes stay stopped if the task was paused.
    LeftBehind {
        tid: Tid,
        /// Number of processes; 0 when all have ended.
        process_count: u32,
        /// Process ids in the tasker's PID namespace, at most [`REPORTED_PIDS_MAX`].
        pids: Vec<i32>,
    },
    /// The leftover processes of a task are stopped: none of them runs.
    LeftoversStopped { tid: Tid },
    /// Processes of a paused task, or leftover processes, still run some time after the order to
    /// stop. [`FromTasker::Paused`] or [`FromTasker::LeftoversStopped`] follows when none of them
    /// runs any more.
    NotStopped {
        tid: Tid,
        /// Process ids in the tasker's PID namespace, at most [`REPORTED_PIDS_MAX`].
        pids: Vec<i32>,
    },
    /// The tasks of the user have exceeded a limit on this host, so the tasker has killed this
    /// task, which uses most. [`FromTasker::Exited`] or [`FromTasker::LeftBehind`] follows.
    KilledForLimit {
        tid: Tid,
        /// True if the task had ended before, and its leftover processes were killed.
        has_ended: bool,
        limit: HostLimit,
    },
}
