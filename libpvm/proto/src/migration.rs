//! The words of the migration protocol: steps, orders of the coordinator, reports of the two ends, and typed reasons.
//!
//! The order of steps is that of [`Step`]. Up to [`Step::Commit`] the task can go on at the source; after it only the
//! target may run it. The state machines that speak these words are in the `checkpoint` crate.

use crate::engine::{Asked, Begin, Engine, STATE_ENV};
use crate::ids::{HostId, Micros, MigrationId, RequestId, Tid};
use crate::suspend::Holds;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// The steps of a move, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Step {
    /// The source says what the task is and holds.
    Inspect,
    /// The target gives its verdict; nothing is frozen yet.
    Prepare,
    /// Memory goes ahead of a task that is large and may run on meanwhile, if it is to follow (pre-copy).
    PreCopy,
    /// The task's library lets go of everything that leads out of the process.
    Quiesce,
    /// The task's processes are stopped.
    Stop,
    /// The engine writes the images; the source stays stopped.
    Dump,
    /// The images travel to the target and are verified there.
    Transfer,
    /// The task is rebuilt on the target up to the point where nothing runs yet.
    Restore,
    /// The new location is recorded and made known under a new epoch.
    Commit,
    /// The source's copy is killed and reaped.
    KillSource,
    /// The target's copy runs.
    Run,
    /// All of its memory is at the target. Nothing is left to do there if it went with the images; else (post-copy) it follows a
    /// task that runs already.
    Arrive,
}

impl Step {
    /// All steps in order.
    pub const ALL: [Step; 12] = [
        Step::Inspect,
        Step::Prepare,
        Step::PreCopy,
        Step::Quiesce,
        Step::Stop,
        Step::Dump,
        Step::Transfer,
        Step::Restore,
        Step::Commit,
        Step::KillSource,
        Step::Run,
        Step::Arrive,
    ];
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Step::Inspect => "inspect",
            Step::Prepare => "prepare",
            Step::PreCopy => "pre-copy",
            Step::Quiesce => "quiesce",
            Step::Stop => "stop",
            Step::Dump => "dump",
            Step::Transfer => "transfer",
            Step::Restore => "restore",
            Step::Commit => "commit",
            Step::KillSource => "kill-source",
            Step::Run => "run",
            Step::Arrive => "arrive",
        })
    }
}

/// Why a move was asked for.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Cause {
    /// A user or program asked for it.
    Asked {
        /// The task that asked.
        by: Tid,
    },
    /// The owner of the machine came back.
    Owner {
        /// The watcher's sentence.
        why: String,
    },
    /// The load is uneven.
    Load {
        /// The resource manager's sentence.
        why: String,
    },
    /// The host is being emptied.
    Drain {
        /// The task that asked for it.
        by: Tid,
    },
    /// It does not move: it stands still for a checkpoint of its job.
    Checkpoint,
    /// It does not move: it is started again from a checkpoint of its job.
    Restart,
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Asked { by } => write!(f, "asked by {by}"),
            Cause::Owner { why } => write!(f, "owner: {why}"),
            Cause::Load { why } => write!(f, "load: {why}"),
            Cause::Drain { by } => write!(f, "drain: {by} has the host emptied"),
            Cause::Checkpoint => f.write_str("checkpoint of its job"),
            Cause::Restart => f.write_str("restart of its job from a checkpoint"),
        }
    }
}

/// One attempt to move one task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Move {
    /// Number of the attempt.
    pub id: MigrationId,
    /// The task.
    pub tid: Tid,
    /// Where it runs.
    pub from: HostId,
    /// Where it is to run.
    pub to: HostId,
    /// Why.
    pub cause: Cause,
}

/// A file that the task needs to find on the target as well.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileFact {
    /// Absolute path as the task sees it.
    pub path: PathBuf,
    /// Length in bytes.
    pub bytes: u64,
    /// What has to agree on both hosts.
    pub must: FileMatch,
}

/// How exactly a file has to agree.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileMatch {
    /// Same length and same BLAKE3 hash of the content: programs and libraries.
    Content(String),
    /// Same length: files open for reading.
    Length,
    /// It has to exist and be no shorter: files open for writing, which grow until the task stands still; files that are
    /// appended to and devices, of which no length is told.
    Exists,
    /// It has to be a directory.
    Directory,
    /// Same length; where there is none it is carried along.
    LengthOrCarried,
    /// As [`FileMatch::Exists`]; where there is none it is carried along.
    ExistsOrCarried,
}

impl FileMatch {
    /// True for a file that is carried along where there is none.
    pub fn is_carried(&self) -> bool {
        matches!(
            self,
            FileMatch::LengthOrCarried | FileMatch::ExistsOrCarried
        )
    }
}

/// What a task is and holds: the ground for the target's verdict.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskFacts {
    /// Its program, as it was asked for; empty where nobody knows it yet.
    pub program: Box<str>,
    /// Memory in bytes, resident or swapped out.
    pub resident_bytes: u64,
    /// User the task runs as.
    pub uid: u32,
    /// Processor features of the source, as /proc/cpuinfo names them, sorted.
    pub cpu_features: Vec<String>,
    /// What the kernel of the source can do and others may not, sorted: system calls by name, found by calling them. A program
    /// that has found one may go on using it.
    pub kernel_features: Vec<String>,
    /// Kernel release of the source, for people.
    pub kernel: Box<str>,
    /// Version of the dump engine at the source, for people.
    pub engine: String,
    /// Threads of all its processes.
    pub threads: u32,
    /// Files that must be found on the target.
    pub files: Vec<FileFact>,
    /// How it was started, and by which ways it can be taken elsewhere; nothing means by CRIU only. What is above is for CRIU.
    pub begin: Option<Box<Begin>>,
}

impl TaskFacts {
    /// True if it may be taken by CRIU.
    pub fn by_criu(&self) -> bool {
        self.begin.as_ref().is_none_or(|begin| begin.by_criu())
    }

    /// The signal that asks it for its state, if it is taken by its own checkpoint and asked by one.
    pub fn signal(&self) -> Option<i32> {
        match self.begin.as_ref()?.engines.first()? {
            Engine::Own {
                asked: Asked::Signal(signal),
                ..
            } => Some(*signal),
            _ => None,
        }
    }

    /// The first way that starts its program again.
    pub fn anew(&self) -> Option<Engine> {
        self.begin.as_ref().and_then(|begin| begin.anew())
    }
}

/// Why a task cannot move, or cannot move there. Nothing was frozen.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// There is no such task in the virtual machine.
    NoSuchTask,
    /// There is no such host in the virtual machine.
    NoSuchHost,
    /// It runs there already.
    AlreadyThere,
    /// Another move of the same task is under way.
    AlreadyMoving(MigrationId),
    /// It was started from a command line, not by the virtual machine, so nobody here is its parent.
    NotSpawned,
    /// It has not connected to its daemon, or has left the virtual machine.
    NotConnected,
    /// It belongs to one host: a load watcher, a console, a resource manager.
    Pinned,
    /// The host cannot dump or restore at all.
    NoEngine {
        /// The host that cannot.
        host: HostId,
        /// Why, and how to get it.
        why: String,
    },
    /// The task holds something that does not survive a move.
    Holds {
        /// What, in words (`io_uring ring`, `System V shared memory`, …).
        what: String,
    },
    /// The target's processor lacks features that the program may be using.
    CpuFeatures {
        /// What is missing there.
        missing: Vec<String>,
    },
    /// The target's kernel lacks system calls that the program may be using.
    KernelFeatures {
        /// What is missing there.
        missing: Vec<String>,
        /// Release at the source.
        source: String,
        /// Release at the target.
        target: String,
    },
    /// A file is missing or different on the target.
    File {
        /// Its path.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// Not enough free memory on the target.
    Memory {
        /// Bytes needed.
        need: u64,
        /// Bytes available.
        have: u64,
    },
    /// A control group of the target allows no more processes and threads.
    Threads {
        /// Threads of the task.
        need: u64,
        /// Threads that are allowed.
        have: u64,
    },
    /// The host did not answer in time or has left.
    HostLost(HostId),
    /// The owner of the target wants no guests to run there now.
    OwnerThere {
        /// The target.
        host: HostId,
        /// The sentence of its load watcher.
        why: String,
    },
    /// The owner of the target does not allow one more guest, or this program.
    OwnerLimits {
        /// The target.
        host: HostId,
        /// What the owner allows.
        why: String,
    },
    /// The coordinator has as many moves under way as it allows.
    TooManyMoves {
        /// The limit.
        limit: usize,
    },
    /// Its own policy keeps it where its files are.
    FilesStay {
        /// One that it has open.
        path: PathBuf,
    },
    /// Its open files are more than what is carried along.
    FilesTooLarge {
        /// Files.
        files: usize,
        /// Bytes of them.
        bytes: u64,
        /// Bytes that are carried at most.
        limit: u64,
    },
    /// It writes its own checkpoint, and is suspended.
    Suspended,
    /// It was asked in vain to write its own checkpoint, and may end by that yet.
    MayEndYet,
    /// It is to be asked for its own checkpoint by a signal that it does not handle, or not yet: it would just be ended by it.
    NotMinded {
        /// The signal.
        signal: i32,
    },
    /// A checkpoint of a job is written by CRIU or by the program itself, and the task wants neither.
    NotByCriu {
        /// How it wants to be taken.
        engine: Engine,
    },
    /// It writes its own checkpoint, and nobody has said into which files.
    NoState,
    /// There would be enough free memory on the target if others were not on their way there.
    MemoryPromised {
        /// Bytes needed.
        need: u64,
        /// Bytes available.
        have: u64,
        /// Bytes of these that tasks need which were accepted and are not all there yet.
        promised: u64,
    },
    /// Its images would become a process of another user than the virtual machine's.
    OtherUser {
        /// The user in the images.
        found: u32,
        /// The user as whom it would be built.
        expected: u32,
    },
    /// It was spawned to be debugged (`PvmTaskDebug`): whoever debugs it does so where it is.
    Debugged,
    /// The files that it needs there are more than can be named to a target.
    FilesTooMany {
        /// Files until then.
        files: usize,
        /// Bytes that name files at most.
        limit: u64,
    },
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::NoSuchTask => f.write_str("there is no such task"),
            Refusal::NoSuchHost => f.write_str("there is no such host"),
            Refusal::AlreadyThere => f.write_str("it runs there already"),
            Refusal::AlreadyMoving(id) => write!(f, "it is being moved already ({id})"),
            Refusal::NotSpawned => f.write_str("it was started from a command line, not spawned"),
            Refusal::NotConnected => f.write_str("it is not connected to its daemon"),
            Refusal::Pinned => f.write_str("it belongs to its host"),
            Refusal::NoEngine { host, why } => write!(f, "{host} cannot dump or restore: {why}"),
            Refusal::Holds { what } => write!(f, "it holds {what}"),
            Refusal::CpuFeatures { missing } => {
                write!(f, "the target's processor lacks {}", missing.join(" "))
            }
            Refusal::KernelFeatures {
                missing,
                source,
                target,
            } => {
                write!(
                    f,
                    "the target's kernel ({target}, the source's is {source}) lacks {}",
                    missing.join(" ")
                )
            }
            Refusal::File { path, why } => write!(f, "{}: {why}", path.display()),
            Refusal::Memory { need, have } => {
                write!(f, "it needs {need} bytes of memory, the target has {have}")
            }
            Refusal::Threads { need, have } => {
                write!(
                    f,
                    "it has {need} threads, and a control group of the target allows {have} more"
                )
            }
            Refusal::HostLost(host) => write!(f, "{host} does not answer"),
            Refusal::OwnerThere { host, why } => write!(f, "{host} takes no guests now: {why}"),
            Refusal::OwnerLimits { host, why } => write!(f, "{host} does not take it: {why}"),
            Refusal::TooManyMoves { limit } => write!(f, "{limit} moves are under way already"),
            Refusal::FilesStay { path } => {
                write!(
                    f,
                    "it has {} open, and is not to be moved then (SEMPA_FILES=refuse)",
                    path.display()
                )
            }
            Refusal::FilesTooLarge {
                files,
                bytes,
                limit,
            } => {
                write!(
                    f,
                    "its {files} open files have {bytes} bytes, and {limit} are carried along at most"
                )
            }
            Refusal::Suspended => {
                f.write_str("it is suspended, and has to run to write its own checkpoint")
            }
            Refusal::NotMinded { signal } => {
                write!(
                    f,
                    "it does not handle signal {signal}, or not yet, and would just be ended by it"
                )
            }
            Refusal::MayEndYet => {
                f.write_str("it was asked to write its own checkpoint, and may do so yet")
            }
            Refusal::NotByCriu { engine } => {
                write!(
                    f,
                    "checkpoints of jobs are written by CRIU or by programs themselves, and it wants to be taken by {engine}"
                )
            }
            Refusal::NoState => write!(
                f,
                "it writes its own checkpoint, and the environment of its spawn does not say into which files ({STATE_ENV}): for a checkpoint of its job they have to be kept"
            ),
            Refusal::MemoryPromised {
                need,
                have,
                promised,
            } => write!(
                f,
                "it needs {need} bytes, and of the {have} that the target has {promised} are promised to tasks on their way there: try again when they have arrived"
            ),
            Refusal::OtherUser { found, expected } => {
                write!(
                    f,
                    "its images are of user {found}, and tasks of user {expected} are built here"
                )
            }
            Refusal::Debugged => f.write_str("it was spawned to be debugged (PvmTaskDebug)"),
            Refusal::FilesTooMany { files, limit } => {
                write!(
                    f,
                    "it has more than {files} files open or mapped, whose names are more than {limit} bytes"
                )
            }
        }
    }
}

/// The target's answer before anything freezes; empty means that it would take the task.
pub type Verdict = Vec<Refusal>;

/// Which hosts would take a task, asked of all without a change anywhere.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Survey {
    /// The task.
    pub tid: Tid,
    /// Where it runs.
    pub from: HostId,
    /// Its memory in bytes, resident or swapped out.
    pub resident_bytes: u64,
    /// The other hosts that were asked, the nearest first, and what each has against it; nothing means that it would take it.
    pub verdicts: Vec<(HostId, Verdict)>,
    /// By which way it would go to those that would take it.
    pub engines: Vec<(HostId, Engine)>,
}

impl Survey {
    /// The nearest host that would take it.
    pub fn nearest(&self) -> Option<HostId> {
        self.verdicts
            .iter()
            .find(|(_, verdict)| verdict.is_empty())
            .map(|(host, _)| *host)
    }

    /// By which way it would go to this host.
    pub fn engine(&self, host: HostId) -> Engine {
        self.engines
            .iter()
            .find(|(other, _)| *other == host)
            .map(|(_, engine)| *engine)
            .unwrap_or_default()
    }
}

/// Why a step failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// The task or a host cannot: the verdict.
    Refused(Verdict),
    /// The step did not end in its time.
    Deadline {
        /// The time it had.
        allowed: Micros,
    },
    /// The engine's process was killed.
    Killed {
        /// By which signal.
        signal: i32,
    },
    /// The engine reported an error; its own words.
    Engine(String),
    /// The images did not arrive as they were sent.
    Images(String),
    /// A file operation failed.
    Io(String),
    /// A host left while it was needed.
    HostLost(HostId),
    /// The task ended by itself meanwhile.
    TaskEnded,
    /// The move was called off.
    CalledOff(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Refused(reasons) => {
                let reasons: Vec<String> = reasons.iter().map(Refusal::to_string).collect();
                write!(f, "refused: {}", reasons.join("; "))
            }
            Failure::Deadline { allowed } => write!(f, "not done within {} ms", allowed.0 / 1000),
            Failure::Killed { signal } => write!(f, "the engine was killed by signal {signal}"),
            Failure::Engine(text) => write!(f, "engine: {text}"),
            Failure::Images(text) => write!(f, "images: {text}"),
            Failure::Io(text) => f.write_str(text),
            Failure::HostLost(host) => write!(f, "{host} was lost"),
            Failure::TaskEnded => f.write_str("the task ended"),
            Failure::CalledOff(why) => write!(f, "called off: {why}"),
        }
    }
}

/// Processor time and memory that a task has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Time in user mode.
    pub user: Micros,
    /// Time in the kernel.
    pub system: Micros,
    /// Largest resident size in bytes.
    pub resident_max_bytes: u64,
}

impl Usage {
    /// Adds what the same task used on another host.
    #[must_use]
    pub fn plus(self, other: Usage) -> Usage {
        Usage {
            user: self.user + other.user,
            system: self.system + other.system,
            resident_max_bytes: self.resident_max_bytes.max(other.resident_max_bytes),
        }
    }
}

/// What a task is when its copy at the source is gone: its target goes on from there.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Parting {
    /// What it had used, as far as is known.
    pub used: Usage,
    /// For whom it stands still, and is to go on doing so.
    pub suspended: Holds,
}

/// What tasks that are started again from a checkpoint together have in common.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timeline {
    /// Its number; frames of links with an earlier one are of a time that did not happen.
    pub line: u16,
    /// All tasks that begin on it, and the timeline of each at the time of the checkpoint: one of them may have begun again
    /// then without the others, who had not heard of it.
    pub members: Vec<(Tid, u16)>,
    /// It is the virtual machine in which the checkpoint was made: tasks outside it may be those that they were.
    pub same: bool,
}

impl Timeline {
    /// The timeline of this task at the time of the checkpoint, if it is one of those that begin.
    pub fn before(&self, tid: Tid) -> Option<u16> {
        self.members
            .iter()
            .find(|(member, _)| *member == tid)
            .map(|(_, line)| *line)
    }
}

/// What the coordinator orders one end to do.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Order {
    /// Source: say what the task is. Nothing changes.
    Inspect,
    /// Target: give a verdict and make room.
    Prepare {
        /// What the task is.
        facts: TaskFacts,
        /// For whom it stands still, for those who ask before it runs there.
        suspended: Holds,
        /// It is started again from a checkpoint; `None`: it moves.
        timeline: Option<Timeline>,
        /// Its memory may follow it.
        memory_can_follow: bool,
        /// If it does, a part of it goes ahead.
        pre_copies: bool,
    },
    /// Source: quiesce, stop, dump and send the images to the target. `token` is where the target will wake the task.
    Leave {
        /// Path, on the target, of the file that wakes the quiesced library.
        token: PathBuf,
        /// Most of its memory stays, and is handed out when the target asks for it.
        memory_follows: bool,
        /// Before anything else what there is of its memory goes ahead.
        pre_copies: bool,
        /// By which way. Where that starts the program again, it is asked to end instead.
        engine: Engine,
    },
    /// Source, before the commit: the move is off; the task goes on here.
    Resume {
        /// Unless it stands still for somebody, who may have said so at the target.
        suspended: Holds,
    },
    /// Target, before the commit: throw everything away.
    Discard,
    /// Source, after the commit: kill and reap the copy, pass on what waits for the task.
    Yield,
    /// Target, after the source's copy is gone: let it run.
    Run(Parting),
    /// Source, for a checkpoint: quiesce and stop, and stay so.
    Stand,
    /// Source, for a checkpoint, when all tasks of the job stand still: write the images, let the task go on, and send them
    /// to the master.
    Write {
        /// Requests by which the task waits for others, as the master knows them. What else is open is answered already.
        open: Vec<RequestId>,
        /// Tasks of the job that have ended since its last checkpoint, and before its first one whoever has ended a moment ago: their
        /// last words, which nobody would say again, are heard before.
        ended: Vec<Tid>,
    },
    /// Source, for a checkpoint: it is off; the task goes on.
    GoOn,
}

/// What one end reports to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Report {
    /// Source: what the task is.
    Inspected {
        /// For the target's verdict.
        facts: TaskFacts,
        /// For whom it stands still. From now on the coordinator knows that best: the ends pass on what somebody wants.
        suspended: Holds,
        /// It is worth while, and possible as far as the source is concerned, that its memory follows it.
        memory_can_follow: bool,
        /// It is large enough for memory to go ahead.
        can_pre_copy: bool,
    },
    /// Target: the verdict, and where it will put the token that wakes the task.
    Prepared {
        /// Empty if it would take the task.
        verdict: Verdict,
        /// Path of the token file on the target.
        token: PathBuf,
        /// Its memory is to follow it: both ends can do that.
        memory_follows: bool,
        /// By which way.
        engine: Engine,
    },
    /// Source: so many bytes went ahead, and are at the target.
    PreCopied {
        /// Those that were sent again among them.
        bytes: u64,
    },
    /// Source: the library has let go.
    Quiesced,
    /// Source: nothing of the task runs any more.
    Stopped,
    /// Source: the images are written.
    Dumped {
        /// Their size.
        bytes: u64,
    },
    /// Target: all images are here and verified.
    Received {
        /// Their size.
        bytes: u64,
    },
    /// Target: the copy is complete and nothing of it runs.
    Restored,
    /// Source: the copy is gone; what it had used.
    SourceGone(Usage),
    /// Target: the task runs.
    Running,
    /// Target: nothing of it is missing.
    Arrived,
    /// Either end: the step failed. Source: the task still exists there. Target: nothing is left there. If it is
    /// [`Step::Arrive`] the task is dead.
    Failed {
        /// The step that failed.
        step: Step,
        /// Why.
        why: Failure,
    },
}

impl Report {
    /// The step that this report ends.
    pub fn step(&self) -> Step {
        match self {
            Report::Inspected { .. } => Step::Inspect,
            Report::Prepared { .. } => Step::Prepare,
            Report::PreCopied { .. } => Step::PreCopy,
            Report::Quiesced => Step::Quiesce,
            Report::Stopped => Step::Stop,
            Report::Dumped { .. } => Step::Dump,
            Report::Received { .. } => Step::Transfer,
            Report::Restored => Step::Restore,
            Report::SourceGone(_) => Step::KillSource,
            Report::Running => Step::Run,
            Report::Arrived => Step::Arrive,
            Report::Failed { step, .. } => *step,
        }
    }
}
