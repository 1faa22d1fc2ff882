//! Control messages between a daemon and the tasker of its host, over the socket pair that the tasker is started with.
//!
//! The tasker is the parent of all spawned tasks and the only privileged program. It does what it is told and reports;
//! it decides nothing. When its socket closes it kills every task it has and ends.

use crate::engine::Engine;
use crate::ids::{Micros, MigrationId, RequestId, Tid};
use crate::migration::{Failure, Refusal, TaskFacts, Usage, Verdict};
use crate::task::RedirectAt;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Bytes of output in one [`FromTasker::Output`] at most; PVM's collectors get chunks of up to this size.
pub const OUTPUT_CHUNK_BYTES_MAX: usize = 3999;

/// A program to start.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StartTask {
    /// The task it becomes.
    pub tid: Tid,
    /// Absolute path of the program.
    pub path: PathBuf,
    /// All arguments, argv[0] included.
    pub argv: Vec<Vec<u8>>,
    /// The whole environment, `NAME=value`.
    pub env: Vec<Vec<u8>>,
    /// Working directory; if it cannot be entered, the task is not started.
    pub dir: PathBuf,
    /// It belongs to its host and may have to do with the processes of others, which it could not name from a process-id
    /// namespace of its own: it gets none, and never moves.
    pub pinned: bool,
}

/// What the tasker can do here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Each task gets a process-id namespace of its own.
    pub pid_namespaces: bool,
    /// Version of the dump engine, or why there is none that works and how to get it.
    pub engine: Result<String, String>,
    /// Held tasks are frozen by control groups, or why they are stopped by signal instead.
    pub freezer: Result<(), String>,
}

/// Bytes to be written into the memory of a stopped process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Redirection {
    /// Where.
    pub place: RedirectAt,
    /// What.
    pub bytes: Vec<u8>,
}

/// What a dump wrote.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DumpReport {
    /// Bytes of all image files.
    pub bytes: u64,
    /// Number of image files.
    pub files: u32,
}

/// From the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToTasker {
    /// Start a task. → [`FromTasker::Started`] or [`FromTasker::StartFailed`]
    Start(StartTask),
    /// Send a signal to the task's process. No answer. While the task is stopped for a move the signal waits; it is
    /// delivered when the task goes on here, and lost if it goes on elsewhere. A task that is held for the owner is ended
    /// by SIGKILL at once, and gets a moment to end by itself after SIGTERM; other signals wait.
    Signal {
        /// The task.
        tid: Tid,
        /// Signal number.
        signal: i32,
    },
    /// Ask the task's process to end, so that the program can be started again: by a signal, or by a message, which the daemon
    /// sends when it hears that the end is expected (→ [`FromTasker::ExpectsEnd`]). If it ends in the way that was
    /// agreed, everybody else whom the task has is ended as well before that is reported (without a process-id namespace: is
    /// being ended). A task that is held may run so long
    /// for it. → [`FromTasker::Exited`], when it has ended, or [`FromTasker::NotAsked`]
    End {
        /// The task.
        tid: Tid,
        /// How it is asked, and what is agreed.
        engine: Engine,
    },
    /// What it was asked by [`ToTasker::End`] does not count any more: if it ends, it has ended.
    EndsForGood {
        /// The task.
        tid: Tid,
    },
    /// End every process of the task for sure. → [`FromTasker::Exited`]
    Kill {
        /// The task.
        tid: Tid,
    },
    /// Say what the task is and holds; nothing changes. → [`FromTasker::Inspected`]
    Inspect {
        /// The move.
        migration: MigrationId,
        /// The task.
        tid: Tid,
    },
    /// Has the task prepared for this signal, by which it is to be asked for its state? Nothing changes. → [`FromTasker::Minds`]
    Minds {
        /// The move or checkpoint.
        migration: MigrationId,
        /// The task.
        tid: Tid,
        /// The signal.
        signal: i32,
    },
    /// Would this host take such a task? Makes room (a fresh namespace) if so. → [`FromTasker::Prepared`]
    Prepare {
        /// The move.
        migration: MigrationId,
        /// The task.
        tid: Tid,
        /// What it is.
        facts: TaskFacts,
    },
    /// As [`ToTasker::Inspect`], for whoever only asks. → [`FromTasker::Seen`]
    Look {
        /// The question.
        question: RequestId,
        /// The task.
        tid: Tid,
    },
    /// As [`ToTasker::Prepare`], for whoever only asks: no room is made. → [`FromTasker::Judged`]
    Judge {
        /// The question.
        question: RequestId,
        /// What the task is.
        facts: TaskFacts,
    },
    /// Hold the task, for the owner of the host or because it is suspended: until the time is over it may run, behind
    /// everybody else, so that its library can let go; then all its processes are stopped, and they stay so whatever becomes
    /// of a move, until [`ToTasker::GoOn`]. Said again to a task that is stopped, it lets it run once more for that time.
    /// While a move has the task nothing happens at once. → [`FromTasker::Held`], each time when nothing of it runs
    Hold {
        /// The task.
        tid: Tid,
        /// How long it may run yet.
        after: Micros,
    },
    /// As [`ToTasker::Hold`], for a task that was stopped before its library had let go: at first, where that can be done, only
    /// the threads of its library run, and nothing of the program. → [`FromTasker::Held`], in the end
    Ease {
        /// The task.
        tid: Tid,
        /// How long they are alone: the program may have what they need.
        alone: Micros,
        /// How long it may run in all.
        after: Micros,
    },
    /// It need not stand still any more: let the task go on, unless a move has it. No answer.
    GoOn {
        /// The task.
        tid: Tid,
    },
    /// Source: send memory of the running task ahead, on the way on which it will be asked for the rest. It ends early when the task is
    /// held. → [`FromTasker::PreCopied`]
    PreCopy {
        /// The move.
        migration: MigrationId,
        /// The task.
        tid: Tid,
        /// Socket on which the daemon listens.
        memory_way: PathBuf,
    },
    /// Source: no memory goes ahead any more, and what has is of no use. No answer.
    EndPreCopy {
        /// The move.
        migration: MigrationId,
    },
    /// Target: keep the memory that comes ahead on this way, on which the rest will be asked for. No answer but
    /// [`FromTasker::PreCopyLost`].
    TakePreCopy {
        /// The move.
        migration: MigrationId,
        /// Socket on which the daemon listens.
        memory_way: PathBuf,
    },
    /// Stop all processes of the task. → [`FromTasker::Stopped`]
    Stop {
        /// The move.
        migration: MigrationId,
        /// The task.
        tid: Tid,
        /// What to write into it when it has stopped: a library that has let go already learns where it will go on.
        redirection: Option<Redirection>,
    },
    /// Write the images of the stopped task into this new directory; it stays stopped. → [`FromTasker::Dumped`]
    Dump {
        /// The move.
        migration: MigrationId,
        /// The task.
        tid: Tid,
        /// Where to.
        dir: PathBuf,
        /// Socket on which the daemon listens: most of the memory stays, and is handed out to whoever asks there, also when the
        /// task has been killed. `None`: all of it goes into the directory.
        memory_way: Option<PathBuf>,
    },
    /// The move is off: end a running dump if there is one and let the task go on. → [`FromTasker::Continued`]
    Continue {
        /// The move.
        migration: MigrationId,
        /// The task.
        tid: Tid,
    },
    /// The move is committed: kill the stopped task, reap it, read its last output. → [`FromTasker::SourceGone`]
    KillMoved {
        /// The move.
        migration: MigrationId,
        /// The task.
        tid: Tid,
    },
    /// Rebuild the task from these images up to the point where nothing runs yet. → [`FromTasker::Restored`]
    Restore {
        /// The move.
        migration: MigrationId,
        /// The task.
        tid: Tid,
        /// Where the images are.
        dir: PathBuf,
        /// It is started again from a checkpoint: files that have grown by what it wrote since then are cut back, and this
        /// is written into it when it is there, so that it learns where it goes on.
        again: Option<Redirection>,
        /// Socket on which the daemon listens: most of the memory is to be asked for there. → [`FromTasker::Arrived`], after
        /// [`FromTasker::Ran`], unless it is discarded
        memory_way: Option<PathBuf>,
    },
    /// Start a program anew, in the place of one that has ended on another host, up to the point where nothing of it runs yet.
    /// → [`FromTasker::Restored`]
    Build {
        /// The move.
        migration: MigrationId,
        /// What.
        start: StartTask,
    },
    /// Let the rebuilt task run. → [`FromTasker::Ran`]
    Run {
        /// The move.
        migration: MigrationId,
        /// What it had used elsewhere; added to what [`FromTasker::Exited`] reports.
        used: Usage,
        /// It is ours, but stays stopped until [`ToTasker::GoOn`].
        held: bool,
    },
    /// What is missing of the memory of a task that came here will not come: the task must not go on. →
    /// [`FromTasker::Arrived`] or [`FromTasker::Restored`]
    MemoryLost {
        /// The move.
        migration: MigrationId,
        /// Why.
        why: String,
    },
    /// Throw away whatever exists of this move on this host, as target. → [`FromTasker::Discarded`]
    Discard {
        /// The move.
        migration: MigrationId,
    },
}

/// From the tasker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FromTasker {
    /// The first message. It comes once more if the engine, tried in the background by a real dump and restore, turns out
    /// not to work here after all.
    Ready(Capabilities),
    /// The process exists.
    Started {
        /// The task.
        tid: Tid,
        /// Its process number as the tasker sees it.
        pid: i32,
    },
    /// The process could not be made; there will be no [`FromTasker::Exited`].
    StartFailed {
        /// The task.
        tid: Tid,
        /// What was tried and what happened.
        why: String,
    },
    /// A program that is to be asked by a message may end now.
    ExpectsEnd {
        /// The task.
        tid: Tid,
    },
    /// A program was not asked to end: it would not know why.
    NotAsked {
        /// The task.
        tid: Tid,
        /// One sentence.
        why: String,
    },
    /// Bytes of standard output or error.
    Output {
        /// The task.
        tid: Tid,
        /// At most [`OUTPUT_CHUNK_BYTES_MAX`].
        bytes: Vec<u8>,
    },
    /// The process has ended and all its output has been reported.
    Exited {
        /// The task.
        tid: Tid,
        /// Wait status.
        status: i32,
        /// What it used, here and before.
        used: Usage,
    },
    /// What the task is, or why it cannot move at all. The tasker does not know which host it is on: the `host` of a
    /// [`Refusal::NoEngine`] from it means "here", and the daemon puts its own index in. Likewise in
    /// [`FromTasker::Prepared`].
    Inspected {
        /// The move.
        migration: MigrationId,
        /// The answer.
        result: Result<TaskFacts, Refusal>,
        /// Most of its memory could follow it, and that would be worth while.
        memory_can_follow: bool,
        /// If it does, a part of it should go ahead.
        can_pre_copy: bool,
    },
    /// Whether a signal would do more than just end a task, as far as can be seen.
    Minds {
        /// The move or checkpoint.
        migration: MigrationId,
        /// The answer.
        minds: bool,
    },
    /// The verdict; empty means yes.
    Prepared {
        /// The move.
        migration: MigrationId,
        /// The answer.
        verdict: Verdict,
        /// Memory can follow a task to here.
        memory_can_follow: bool,
    },
    /// As [`FromTasker::Inspected`].
    Seen {
        /// The question.
        question: RequestId,
        /// The answer.
        result: Result<TaskFacts, Refusal>,
    },
    /// As [`FromTasker::Prepared`].
    Judged {
        /// The question.
        question: RequestId,
        /// The answer.
        verdict: Verdict,
    },
    /// Nothing of the task runs, because it is held.
    Held {
        /// The task.
        tid: Tid,
    },
    /// So many bytes went ahead of the task and are at the target, or nothing of use did.
    PreCopied {
        /// The move.
        migration: MigrationId,
        /// The answer.
        result: Result<u64, Failure>,
    },
    /// Target: the memory that was to come ahead does not come, or came in vain.
    PreCopyLost {
        /// The move.
        migration: MigrationId,
        /// Why.
        why: Failure,
    },
    /// Nothing of the task runs.
    Stopped {
        /// The move.
        migration: MigrationId,
        /// The answer.
        result: Result<(), Failure>,
    },
    /// The dump is over. On failure the task still exists and is still stopped.
    Dumped {
        /// The move.
        migration: MigrationId,
        /// The answer.
        result: Result<DumpReport, Failure>,
    },
    /// The task goes on here.
    Continued {
        /// The move.
        migration: MigrationId,
    },
    /// The source's copy is gone and reaped.
    SourceGone {
        /// The move.
        migration: MigrationId,
        /// What it had used, here and before.
        used: Usage,
    },
    /// The restore is over. On failure nothing is left of it. A failure may follow a success when the engine that holds
    /// the copy dies before [`ToTasker::Run`].
    Restored {
        /// The move.
        migration: MigrationId,
        /// Process number, or why not.
        result: Result<i32, Failure>,
    },
    /// The restored task runs, or could not be let go.
    Ran {
        /// The move.
        migration: MigrationId,
        /// The answer.
        result: Result<(), Failure>,
    },
    /// All memory of a task that runs is here; on failure the task has been killed.
    Arrived {
        /// The move.
        migration: MigrationId,
        /// The answer.
        result: Result<(), Failure>,
    },
    /// Nothing is left of the move on this host.
    Discarded {
        /// The move.
        migration: MigrationId,
    },
}
