//! Control messages between a daemon and the tasker of its host, over a socket pair that the tasker
//! inherits.
//!
//! The tasker is the parent of all spawned tasks and the only privileged program. It executes
//! requests and reports results; it makes no decisions. When its socket closes it kills all its
//! tasks and exits.

use crate::engine::Engine;
use crate::ids::{Micros, MigrationId, RequestId, Tid};
use crate::migration::{Failure, Refusal, TaskFacts, Usage, Verdict};
use crate::task::RedirectAddress;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Largest output chunk in one [`FromTasker::Output`]. PVM's collectors expect chunks of up to this
/// size.
pub const OUTPUT_CHUNK_BYTES_MAX: usize = 3999;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTask {
    /// Tid of the new task.
    pub tid: Tid,
    /// Absolute path of the program.
    pub path: PathBuf,
    /// All arguments, including argv[0].
    pub argv: Vec<Vec<u8>>,
    /// The complete environment, `NAME=value`.
    pub env: Vec<Vec<u8>>,
    /// Working directory. If it is not accessible, the task is not started.
    pub working_dir: PathBuf,
    /// The task is bound to its host and may access processes outside a PID namespace. It gets no
    /// PID namespace and never migrates.
    pub pinned: bool,
}

/// Capabilities of the tasker on this host.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Each task gets a PID namespace.
    pub pid_namespaces: bool,
    /// Version of the dump engine, or why none works and how to install one.
    pub engine: Result<String, String>,
    /// Ok if control groups freeze paused tasks; otherwise the reason why signals stop them.
    pub freezer: Result<(), String>,
}

/// Bytes to write into the memory of a stopped process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryWrite {
    pub address: RedirectAddress,
    pub bytes: Vec<u8>,
}

/// Result of a dump.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DumpReport {
    /// Total size of the image files.
    pub bytes: u64,
    /// Number of image files.
    pub files: u32,
}

/// A request of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToTasker {
    /// Start a task. → [`FromTasker::Started`] or [`FromTasker::StartFailed`]
    Start(StartTask),
    /// Send a signal to the task's process. No answer.
    ///
    /// While the task is stopped for a migration the signal is queued: it is delivered if the task
    /// continues here, and lost if it continues elsewhere. For a paused task SIGKILL takes effect
    /// immediately, after SIGTERM it may run for a short time, and other signals are queued.
    Signal { tid: Tid, signal: i32 },
    /// Ask the task's process to exit, so that the program can be restarted: by a signal, or by a
    /// message, which the daemon sends on [`FromTasker::ExitExpected`].
    ///
    /// If the process exits in the agreed way, all other processes of the task are killed before
    /// this is reported (without a PID namespace: are being killed). A paused task may run until
    /// the time limit. → [`FromTasker::Exited`] after its exit, or [`FromTasker::ExitNotRequested`]
    RequestExit {
        tid: Tid,
        /// The engine, with the way to ask and the agreed exit status.
        engine: Engine,
    },
    /// Withdraw [`ToTasker::RequestExit`]: an exit of the task is final from now on.
    WithdrawExitRequest { tid: Tid },
    /// Kill all processes of the task. → [`FromTasker::Exited`]
    Kill { tid: Tid },
    /// Report the task's properties and resources; nothing changes. → [`FromTasker::Inspected`]
    Inspect { migration: MigrationId, tid: Tid },
    /// Check whether the task handles this signal, which would ask it for its own checkpoint;
    /// nothing changes. → [`FromTasker::SignalChecked`]
    CheckSignal {
        /// Id of the migration or checkpoint.
        migration: MigrationId,
        tid: Tid,
        signal: i32,
    },
    /// Give a verdict on such a task and, if it is accepted, prepare a PID namespace. →
    /// [`FromTasker::Prepared`]
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
    /// As [`ToTasker::Prepare`], for a query without a migration: nothing is prepared. →
    /// [`FromTasker::QueryJudged`]
    QueryVerdict {
        /// Id of the query.
        query: RequestId,
        /// Properties of the task.
        facts: TaskFacts,
    },
    /// Pause the task, for the host's owner or because it is suspended. → [`FromTasker::Paused`],
    /// each time when it is stopped
    ///
    /// The task may run for `after`, at a priority below all other processes, so that its library
    /// can quiesce. Then all its processes are stopped, and they stay stopped until
    /// [`ToTasker::Resume`], whatever the outcome of a migration. A task that is already paused runs
    /// once more for that time. While a migration controls the task, the pause is deferred.
    Pause {
        tid: Tid,
        /// Time for which the task may still run.
        run_for: Micros,
    },
    /// As [`ToTasker::Pause`], for a task that was stopped before its library had quiesced. Where
    /// possible, only the library's threads run at first. → [`FromTasker::Paused`], once
    ResumeToQuiesce {
        tid: Tid,
        /// Time for which only the library runs. Afterwards the program runs, too, because it may
        /// hold locks that the library needs.
        library_only_for: Micros,
        /// Total time for which the task may run.
        run_for: Micros,
    },
    /// End a pause: resume the task, unless a migration controls it. No answer.
    Resume { tid: Tid },
    /// Source: pre-copy memory of the running task, over the connection on which the target will
    /// request the rest. Ends early if the task is paused. → [`FromTasker::PreCopied`]
    PreCopy {
        migration: MigrationId,
        tid: Tid,
        /// Socket on which the daemon listens.
        memory_socket: PathBuf,
    },
    /// Source: stop the pre-copy; its result is not needed. No answer.
    StopPreCopy { migration: MigrationId },
    /// Target: receive pre-copied memory over the connection on which the rest will be requested.
    /// No answer except [`FromTasker::PreCopyLost`].
    ReceivePreCopy {
        migration: MigrationId,
        /// Socket on which the daemon listens.
        memory_socket: PathBuf,
    },
    /// Stop all processes of the task. → [`FromTasker::Stopped`]
    Stop {
        migration: MigrationId,
        tid: Tid,
        /// Bytes to write into the stopped task. They tell a library that has already quiesced its
        /// next location.
        memory_write: Option<MemoryWrite>,
    },
    /// Write the images of the stopped task into this new directory; the task stays stopped. →
    /// [`FromTasker::Dumped`]
    Dump {
        migration: MigrationId,
        tid: Tid,
        /// Directory for the images.
        dir: PathBuf,
        /// Socket on which the daemon listens, for post-copy: most memory stays here and is served
        /// on request, also after the task was killed. `None`: all memory is written into the
        /// directory.
        memory_socket: Option<PathBuf>,
    },
    /// The migration is aborted: end a running dump and resume the task. →
    /// [`FromTasker::MigrationAborted`]
    AbortMigration { migration: MigrationId, tid: Tid },
    /// The migration is committed: kill the stopped task, reap it and read its last output. →
    /// [`FromTasker::SourceGone`]
    KillSource { migration: MigrationId, tid: Tid },
    /// Rebuild the task from these images, up to the point where it could run. →
    /// [`FromTasker::Restored`]
    Restore {
        migration: MigrationId,
        tid: Tid,
        /// Directory of the images.
        dir: PathBuf,
        /// For a restart from a checkpoint: bytes to write into the restored task, which tell it
        /// its next location. Files to which it had appended since the checkpoint are truncated.
        memory_write: Option<MemoryWrite>,
        /// Socket on which the daemon listens, for post-copy: most memory must be requested there.
        /// → [`FromTasker::MemoryArrived`], after [`FromTasker::Running`], unless the task is discarded
        memory_socket: Option<PathBuf>,
    },
    /// Start a program in place of a process that has ended on another host, up to the point where
    /// it could run. → [`FromTasker::Restored`]
    PrepareRestart {
        migration: MigrationId,
        /// The program to start.
        start: StartTask,
    },
    /// Run the rebuilt task. → [`FromTasker::Running`]
    Run {
        migration: MigrationId,
        /// Resources that it used elsewhere; [`FromTasker::Exited`] reports the sum.
        used: Usage,
        /// The migration is complete, but the task stays paused until [`ToTasker::Resume`].
        paused: bool,
    },
    /// The missing memory of a post-copied task will not arrive: the task must not continue. →
    /// [`FromTasker::MemoryArrived`] or [`FromTasker::Restored`]
    MemoryLost { migration: MigrationId, why: String },
    /// Target: discard everything that belongs to this migration. → [`FromTasker::Discarded`]
    Discard { migration: MigrationId },
}

/// A report of the tasker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromTasker {
    /// Must be the first message. It is sent again if a test of the engine, by a real dump and
    /// restore in the background, fails.
    Ready(Capabilities),
    Started {
        tid: Tid,
        /// Its process id in the tasker's PID namespace.
        pid: i32,
    },
    /// The process could not be created; no [`FromTasker::Exited`] follows.
    StartFailed {
        tid: Tid,
        /// The attempt and its failure.
        why: String,
    },
    /// From now on an exit of the program counts as requested; the daemon may send the message that
    /// asks it.
    ExitExpected { tid: Tid },
    /// The program was not asked to exit, because it would not handle the request.
    ExitNotRequested {
        tid: Tid,
        /// The reason in one sentence.
        why: String,
    },
    /// Bytes of standard output or standard error.
    Output {
        tid: Tid,
        /// Length is at most [`OUTPUT_CHUNK_BYTES_MAX`].
        bytes: Vec<u8>,
    },
    /// The process has ended, and all its output has been reported.
    Exited {
        tid: Tid,
        /// Wait status of the process.
        status: i32,
        /// Resources that it used, on this and earlier hosts.
        used: Usage,
    },
    /// The task's properties, or why it cannot migrate at all.
    ///
    /// The tasker does not know the index of its host. The daemon inserts it as the `host` of a
    /// [`Refusal::NoEngine`], here and in [`FromTasker::Prepared`].
    Inspected {
        migration: MigrationId,
        result: Result<TaskFacts, Refusal>,
        /// Post-copy is possible and pays off for this task.
        supports_post_copy: bool,
        /// Pre-copy should precede a post-copy.
        supports_pre_copy: bool,
    },
    /// Whether the task handles a signal, as far as can be determined.
    SignalChecked {
        /// Id of the migration or checkpoint.
        migration: MigrationId,
        /// True if the signal would do more than end the task.
        handles_signal: bool,
    },
    /// The target's verdict; empty: the task is accepted.
    Prepared {
        migration: MigrationId,
        verdict: Verdict,
        /// This host supports post-copy as target.
        supports_post_copy: bool,
    },
    /// As [`FromTasker::Inspected`], for a query.
    QueryInspected {
        /// Id of the query.
        query: RequestId,
        result: Result<TaskFacts, Refusal>,
    },
    /// As [`FromTasker::Prepared`], for a query.
    QueryJudged {
        /// Id of the query.
        query: RequestId,
        verdict: Verdict,
    },
    /// The task is paused: none of its processes runs.
    Paused { tid: Tid },
    /// Pre-copy has ended: the number of bytes at the target, or why none are usable.
    PreCopied {
        migration: MigrationId,
        result: Result<u64, Failure>,
    },
    /// Target: the pre-copied memory is lost or not usable.
    PreCopyLost {
        migration: MigrationId,
        why: Failure,
    },
    /// All processes of the task are stopped.
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
    SourceGone {
        migration: MigrationId,
        /// Resources that it used, on this and earlier hosts.
        used: Usage,
    },
    /// The restore has ended. On failure nothing is left of it. A failure may follow a success if
    /// the engine that holds the copy dies before [`ToTasker::Run`].
    Restored {
        migration: MigrationId,
        /// Process id of the restored task.
        result: Result<i32, Failure>,
    },
    /// The restored task runs, or could not be started.
    Running {
        migration: MigrationId,
        result: Result<(), Failure>,
    },
    /// All memory of a running task has arrived; on failure the task has been killed.
    MemoryArrived {
        migration: MigrationId,
        result: Result<(), Failure>,
    },
    /// Nothing is left of the migration on this host.
    Discarded { migration: MigrationId },
}
