//! Messages of the migration protocol: steps, orders of the coordinator, reports of source and
//! target, and typed reasons.
//!
//! [`Step`] lists the steps in order. Before [`Step::Commit`] the task can continue at the source;
//! afterwards only the target may run it. The state machines of the protocol are in the
//! `checkpoint` crate.

use crate::engine::{AskMethod, Engine, LaunchInfo, STATE_ENV};
use crate::host_limit::HostLimit;
use crate::ids::{HostId, Micros, MigrationId, RequestId, Tid};
use crate::suspend::Suspensions;
use crate::text;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::IpAddr;
use std::path::PathBuf;

/// The steps of a migration, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Step {
    /// The source reports the task's properties and resources.
    Inspect,
    /// The target gives its verdict. Nothing is stopped yet.
    Prepare,
    /// For a large task that uses post-copy: part of the memory is sent while the task still runs.
    PreCopy,
    /// The task's library closes all connections out of its process.
    Quiesce,
    /// The task's processes are stopped.
    Stop,
    /// The engine writes the images; the source stays stopped.
    Dump,
    /// The images are transferred to the target, which verifies them.
    Transfer,
    /// The target rebuilds the task's processes, which stay stopped.
    Restore,
    /// The new location is recorded and distributed under a new epoch.
    Commit,
    /// The source's copy is killed and reaped.
    KillSource,
    /// The target's copy runs.
    Run,
    /// All memory is at the target. Without post-copy the memory has arrived before the task runs;
    /// with post-copy it arrives while the task runs.
    Arrive,
}

impl Step {
    pub const ALL: [Self; 12] = [
        Self::Inspect,
        Self::Prepare,
        Self::PreCopy,
        Self::Quiesce,
        Self::Stop,
        Self::Dump,
        Self::Transfer,
        Self::Restore,
        Self::Commit,
        Self::KillSource,
        Self::Run,
        Self::Arrive,
    ];
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Inspect => "inspect",
            Self::Prepare => "prepare",
            Self::PreCopy => "pre-copy",
            Self::Quiesce => "quiesce",
            Self::Stop => "stop",
            Self::Dump => "dump",
            Self::Transfer => "transfer",
            Self::Restore => "restore",
            Self::Commit => "commit",
            Self::KillSource => "kill-source",
            Self::Run => "run",
            Self::Arrive => "arrive",
        })
    }
}

/// The reason for a migration, a checkpoint or a restart of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigrationCause {
    /// A user or a program requested the migration.
    #[serde(rename = "Asked")]
    Requested {
        /// The task that sent the request.
        #[serde(rename = "by")]
        requested_by: Tid,
    },
    /// The owner of the host returned.
    Owner {
        /// The load watcher's reason, in one sentence.
        why: String,
    },
    /// The load is unbalanced.
    Load {
        /// The resource manager's reason, in one sentence.
        why: String,
    },
    /// The host is being drained.
    Drain {
        /// The task that requested the drain.
        #[serde(rename = "by")]
        requested_by: Tid,
    },
    /// Not a migration: the task stops for a checkpoint of its job.
    Checkpoint,
    /// Not a migration: the task is restarted from a checkpoint of its job.
    Restart,
}

impl fmt::Display for MigrationCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Requested { requested_by } => write!(f, "requested by {requested_by}"),
            Self::Owner { why } => write!(f, "owner: {}", text::reason(why)),
            Self::Load { why } => write!(f, "load: {}", text::reason(why)),
            Self::Drain { requested_by } => {
                write!(f, "drain: requested by {requested_by}")
            }
            Self::Checkpoint => f.write_str("checkpoint of its job"),
            Self::Restart => f.write_str("restart of its job from a checkpoint"),
        }
    }
}

/// One attempt to migrate one task. `cause` also marks checkpoints and restarts, which use the same
/// protocol.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Migration {
    pub id: MigrationId,
    pub tid: Tid,
    pub from: HostId,
    pub to: HostId,
    pub cause: MigrationCause,
}

/// A file of the source that the target must have for the task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequiredFile {
    /// Absolute path as the task sees it.
    pub path: PathBuf,
    /// Length at the source, in bytes.
    pub bytes: u64,
    /// Properties that must be equal on both hosts.
    pub requirement: FileRequirement,
}

/// The properties in which a file on the target must match the file on the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum FileRequirement {
    /// The length and the BLAKE3 hash of the content must be equal. Used for programs and
    /// libraries.
    Content(String),
    /// The length must be equal. Used for files that are open for reading.
    Length,
    /// The file must exist and be at least as long as on the source. Used for files that are open
    /// for writing, because they may grow until the task is stopped. No length is recorded for
    /// devices and for files in append mode.
    Exists,
    /// The path must be a directory.
    Directory,
    /// As [`FileRequirement::Length`], but a missing file is copied to the target.
    LengthOrCopy,
    /// As [`FileRequirement::Exists`], but a missing file is copied to the target.
    ExistsOrCopy,
}

impl FileRequirement {
    /// True if the file is copied to a target that lacks it.
    pub fn is_copied_if_missing(&self) -> bool {
        matches!(self, Self::LengthOrCopy | Self::ExistsOrCopy)
    }
}

/// Properties and resources of a task, on which the target bases its verdict.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskFacts {
    /// Program name as requested in the spawn; empty if not known yet.
    pub program: Box<str>,
    /// Memory of the task in bytes, resident or swapped out.
    pub memory_bytes: u64,
    /// User id of the task.
    pub uid: u32,
    /// Processor features of the source, as named in /proc/cpuinfo, sorted.
    pub cpu_features: Vec<String>,
    /// System calls that the source's kernel has and other kernels may lack, by name, sorted. The
    /// source detected each of them with a test call. A program may have detected such a call, too,
    /// and continue to use it.
    pub kernel_features: Vec<String>,
    /// Kernel release of the source; only for error messages.
    pub kernel_release: Box<str>,
    /// Version of the dump engine at the source; only for error messages.
    pub engine_version: String,
    /// Number of threads in all processes of the task.
    pub thread_count: u32,
    /// The highest process or thread id in the task's PID namespace; 0 if not known.
    pub highest_pid: u32,
    /// Files that the target must have.
    pub files: Vec<RequiredFile>,
    /// How the task was started, and the engines permitted for it; `None` if only CRIU is
    /// permitted. The fields above are needed only for CRIU.
    pub launch: Option<Box<LaunchInfo>>,
    /// Addresses of the source to which sockets of the task are bound.
    pub addresses: Vec<IpAddr>,
}

impl TaskFacts {
    /// True if CRIU is a permitted engine of the task.
    pub fn allows_criu(&self) -> bool {
        self.launch
            .as_ref()
            .is_none_or(|launch| launch.allows_criu())
    }

    /// Returns the signal that requests the task's own checkpoint; `None` unless the first engine
    /// of the task writes such a checkpoint and is asked by a signal.
    pub fn checkpoint_signal(&self) -> Option<i32> {
        match self.launch.as_ref()?.engines.first()? {
            Engine::SelfCheckpoint {
                ask_method: AskMethod::Signal(signal),
                ..
            } => Some(*signal),
            _ => None,
        }
    }

    /// Returns the first permitted engine that restarts the program.
    pub fn restart_engine(&self) -> Option<Engine> {
        self.launch.as_ref().and_then(|info| info.restart_engine())
    }
}

/// A reason why a task cannot migrate to any host, or cannot migrate to this target. When a
/// migration is refused, nothing has been stopped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Refusal {
    /// The virtual machine has no such task.
    NoSuchTask,
    /// The virtual machine has no such host.
    NoSuchHost,
    /// The task already runs on the target.
    AlreadyThere,
    /// Another migration of the task is in progress.
    #[serde(rename = "AlreadyMoving")]
    AlreadyMigrating(MigrationId),
    /// The task was started from a command line. Only spawned tasks can migrate, because their
    /// parent process belongs to the virtual machine.
    NotSpawned,
    /// The task has not connected to its daemon, or has left the virtual machine.
    NotConnected,
    /// The task is bound to its host, like a load watcher, a console or a resource manager.
    Pinned,
    /// The host has no working dump engine.
    NoEngine {
        host: HostId,
        /// The reason why no engine works, and how to install one.
        why: String,
    },
    /// The task has a resource that cannot be migrated.
    #[serde(rename = "Holds")]
    UnsupportedResource {
        /// Description of the resource (`io_uring ring`, `System V shared memory`, …).
        what: String,
    },
    /// The target's processor lacks features that the program may use.
    CpuFeatures {
        /// The features that the target lacks.
        missing: Vec<String>,
    },
    /// The target's kernel lacks system calls that the program may use.
    KernelFeatures {
        /// The system calls that the target lacks.
        missing: Vec<String>,
        /// Kernel release of the source.
        source: String,
        /// Kernel release of the target.
        target: String,
    },
    /// A file is missing or different on the target.
    File {
        path: PathBuf,
        /// The difference, in one sentence.
        why: String,
    },
    /// The target has too little free memory.
    Memory {
        /// Bytes that the task needs.
        need: u64,
        /// Bytes available on the target.
        have: u64,
    },
    /// A control group of the target permits fewer additional processes and threads than the task
    /// has.
    Threads {
        /// Threads of the task.
        need: u64,
        /// Threads that the limit still permits.
        have: u64,
    },
    /// The host did not answer within the time limit, or has left the virtual machine.
    HostLost(HostId),
    /// The owner of the target permits no guests at present.
    #[serde(rename = "OwnerThere")]
    OwnerPresent {
        host: HostId,
        /// The load watcher's reason, in one sentence.
        why: String,
    },
    /// A limit set by the owner of the target excludes the task. The limit may concern the number
    /// of guests, programs or users.
    OwnerLimits {
        host: HostId,
        /// The owner's limit, in one sentence.
        why: String,
    },
    /// The coordinator already performs the maximum number of concurrent migrations.
    #[serde(rename = "TooManyMoves")]
    TooManyMigrations { limit: usize },
    /// The task must not migrate while it has open files (`SEMPA_FILES=refuse`).
    #[serde(rename = "FilesStay")]
    OpenFilesRefused {
        /// One of the task's open files.
        path: PathBuf,
    },
    /// The task's open files exceed the limit for copying files to the target.
    #[serde(rename = "FilesTooLarge")]
    OpenFilesTooLarge {
        /// Number of open files to copy.
        files: usize,
        /// Total size of the files to copy, in bytes.
        bytes: u64,
        /// Maximum total size, in bytes, that is copied.
        limit: u64,
    },
    /// The task writes its own checkpoint for a migration, which is impossible while the task is
    /// suspended.
    Suspended,
    /// The task was asked to write its own checkpoint and has not written it yet. The task may
    /// still exit because of this request.
    #[serde(rename = "MayEndYet")]
    SelfCheckpointPending,
    /// The task has no handler for the signal that requests its own checkpoint, so the signal would
    /// only kill the task.
    #[serde(rename = "NotMinded")]
    SignalNotHandled { signal: i32 },
    /// Checkpoints of jobs are written by CRIU or by the program itself, and neither engine is
    /// permitted for the task.
    #[serde(rename = "NotByCriu")]
    NoCheckpointEngine {
        /// The first engine that is permitted for the task.
        engine: Engine,
    },
    /// The task writes its own checkpoint, but its state files are not configured.
    #[serde(rename = "NoState")]
    NoStateFiles,
    /// The target has enough memory in total, but a part of the memory is reserved for tasks that
    /// are migrating to the target.
    #[serde(rename = "MemoryPromised")]
    MemoryReserved {
        /// Bytes that the task needs.
        need: u64,
        /// Bytes available on the target.
        have: u64,
        /// Bytes of `have` that are reserved for accepted tasks whose memory has not completely
        /// arrived.
        #[serde(rename = "promised")]
        reserved_bytes: u64,
    },
    /// The target would restore the images as a process of a user other than the user of the
    /// virtual machine.
    OtherUser {
        /// User id in the images.
        found: u32,
        /// User id of restored tasks.
        expected: u32,
    },
    /// The task was spawned for debugging (`PvmTaskDebug`); the debugger works only on the task's
    /// host.
    Debugged,
    /// The task needs more files than the request to a target can list.
    FilesTooMany {
        /// Number of files after which the limit was reached.
        files: usize,
        /// Maximum size of the list, in bytes.
        limit: u64,
    },
    /// The target's kernel allows only lower process ids than those of the task, which a migration
    /// does not change.
    ProcessIds {
        /// The highest process or thread id of the task.
        highest: u32,
        /// The target allows ids below this number.
        limit: u32,
    },
    /// A property of the task or of a host cannot be read.
    Unreadable {
        /// The property, such as "its sockets" or "the target's processor features".
        property: String,
        /// The system's error, for example that no descriptors are left.
        why: String,
    },
    /// A socket of the task is bound to an address that the target does not have.
    Address { address: IpAddr },
    /// The target does not restore the images, because they contain something that the user could
    /// not have without the rights of root.
    ForbiddenImages {
        /// The violation, in one sentence.
        why: String,
    },
    /// A limit on what users have on the target excludes the task.
    HostLimit(HostLimit),
}

impl fmt::Display for Refusal {
    // tidy: long because the match is a table with one sentence for each refusal
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchTask => f.write_str("there is no such task"),
            Self::NoSuchHost => f.write_str("there is no such host"),
            Self::AlreadyThere => f.write_str("it already runs there"),
            Self::AlreadyMigrating(id) => write!(f, "it is already migrating ({id})"),
            Self::NotSpawned => f.write_str("it was started from a command line, not spawned"),
            Self::NotConnected => f.write_str("it is not connected to its daemon"),
            Self::Pinned => f.write_str("it is bound to its host"),
            Self::NoEngine { host, why } => write!(f, "{host} cannot dump or restore: {why}"),
            Self::UnsupportedResource { what } => {
                write!(f, "it has {what}")
            }
            Self::CpuFeatures { missing } => {
                write!(f, "the target's processor lacks {}", missing.join(" "))
            }
            Self::KernelFeatures {
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
            Self::File { path, why } => write!(f, "{}: {why}", path.display()),
            Self::Memory { need, have } => {
                write!(f, "it needs {need} bytes of memory, the target has {have}")
            }
            Self::Threads { need, have } => {
                write!(
                    f,
                    "it has {need} threads, and a control group of the target allows {have} more"
                )
            }
            Self::HostLost(host) => write!(f, "{host} does not answer"),
            Self::OwnerPresent { host, why } => {
                write!(f, "{host} accepts no guests at present: {why}")
            }
            Self::OwnerLimits { host, why } => write!(f, "{host} does not accept it: {why}"),
            Self::TooManyMigrations { limit } => {
                write!(f, "{limit} migrations are already in progress")
            }
            Self::OpenFilesRefused { path } => {
                write!(
                    f,
                    "it has {} open and must not migrate with open files (SEMPA_FILES=refuse)",
                    path.display()
                )
            }
            Self::OpenFilesTooLarge {
                files,
                bytes,
                limit,
            } => {
                write!(
                    f,
                    "its {files} open files have {bytes} bytes; at most {limit} are copied"
                )
            }
            Self::Suspended => {
                f.write_str("it is suspended, and must run to write its own checkpoint")
            }
            Self::SignalNotHandled { signal } => {
                write!(
                    f,
                    "it has no handler for signal {signal} (yet), which would kill it"
                )
            }
            Self::SelfCheckpointPending => {
                f.write_str("it was asked for its own checkpoint and may still be writing it")
            }
            Self::NoCheckpointEngine { engine } => {
                write!(
                    f,
                    "checkpoints of jobs are written by CRIU or by the programs themselves, and this task permits \
                     only {engine}"
                )
            }
            Self::NoStateFiles => write!(
                f,
                "it writes its own checkpoint, but {STATE_ENV} does not name the files, which a checkpoint of its job \
                 must include"
            ),
            Self::MemoryReserved {
                need,
                have,
                reserved_bytes: reservation,
            } => write!(
                f,
                "it needs {need} bytes; of the target's {have}, {reservation} are reserved for tasks that are migrating \
                 there: try again when they have arrived"
            ),
            Self::OtherUser { found, expected } => {
                write!(
                    f,
                    "its images belong to user {found}, but tasks run as user {expected} here"
                )
            }
            Self::Debugged => f.write_str("it was spawned to be debugged (PvmTaskDebug)"),
            Self::FilesTooMany { files, limit } => {
                write!(
                    f,
                    "it has more than {files} files open or mapped, and their names exceed {limit} bytes"
                )
            }
            Self::ProcessIds { highest, limit } => {
                write!(
                    f,
                    "it has the process id {highest}, but the target allows only ids below {limit}: set \
                     kernel.pid_max on the target as on the source, with sysctl"
                )
            }
            Self::Unreadable { property, why } => write!(f, "{property} cannot be read: {why}"),
            Self::Address { address } => write!(
                f,
                "it has a socket that is bound to {address}, which is no address of the target"
            ),
            Self::ForbiddenImages { why } => {
                write!(f, "its images are not restored: {}", text::reason(why))
            }
            Self::HostLimit(limit) => limit.fmt(f),
        }
    }
}

/// The target's answer before anything is stopped: its reasons to refuse the task. An empty list
/// means that the target accepts the task.
pub type Verdict = Vec<Refusal>;

/// Result of a placement query: the hosts that would accept a task. The query changes nothing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationTargets {
    pub tid: Tid,
    /// The host on which the task runs.
    pub from: HostId,
    /// Memory of the task in bytes, resident or swapped out.
    pub memory_bytes: u64,
    /// The queried hosts with their verdicts, nearest to the task's host first.
    pub verdicts: Vec<(HostId, Verdict)>,
    /// The hosts that would accept the task, each with the engine that a migration would use.
    pub usable_engines: Vec<(HostId, Engine)>,
}

impl MigrationTargets {
    /// Returns the nearest host that would accept the task; `None` if every host refuses it.
    pub fn nearest_host(&self) -> Option<HostId> {
        self.verdicts
            .iter()
            .find(|(_, verdict)| verdict.is_empty())
            .map(|(host, _)| *host)
    }

    /// Returns the engine that a migration to `host` would use; the default engine, CRIU, if `host`
    /// does not accept the task.
    pub fn engine(&self, host: HostId) -> Engine {
        self.usable_engines
            .iter()
            .find(|(candidate, _)| *candidate == host)
            .map(|(_, engine)| *engine)
            .unwrap_or_default()
    }
}

/// The reason why a step of a migration failed. Before the commit a failure leaves the task at the
/// source, where the task continues; the target's images are removed. After the commit the task
/// runs at the target, or has ended and is reported as ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Failure {
    /// The task cannot migrate, or a host refused it.
    Refused(Verdict),
    /// The step took longer than the time limit.
    Deadline { allowed: Micros },
    /// The engine's process was killed by a signal.
    Killed { signal: i32 },
    /// The engine reported an error; contains its message.
    Engine(String),
    /// The images that arrived differ from the images that were sent; contains the difference.
    Images(String),
    /// A file operation failed; contains the error.
    Io(String),
    /// A host that takes part in the migration has left the virtual machine.
    HostLost(HostId),
    /// The task exited during the migration.
    TaskEnded,
    /// The migration was cancelled; contains the reason.
    #[serde(rename = "CalledOff")]
    Cancelled(String),
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(reasons) if reasons.is_empty() => f.write_str("refused without a reason"),
            Self::Refused(reasons) => {
                let reasons: Vec<String> = reasons.iter().map(Refusal::to_string).collect();
                write!(f, "refused: {}", reasons.join("; "))
            }
            Self::Deadline { allowed } => write!(f, "not done within {} ms", allowed.0 / 1000),
            Self::Killed { signal } => write!(f, "the engine was killed by signal {signal}"),
            Self::Engine(text) => write!(f, "engine: {}", text::reason(text)),
            Self::Images(text) => write!(f, "images: {}", text::reason(text)),
            Self::Io(text) => f.write_str(text::reason(text)),
            Self::HostLost(host) => write!(f, "{host} was lost"),
            Self::TaskEnded => f.write_str("the task ended"),
            Self::Cancelled(why) => write!(f, "cancelled: {}", text::reason(why)),
        }
    }
}

/// Processor time and memory that a task has used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Processor time in user mode.
    pub user: Micros,
    /// Processor time in the kernel.
    pub system: Micros,
    /// Maximum resident size in bytes.
    pub resident_max_bytes: u64,
}

impl Usage {
    /// Adds the usage of the same task on another host: sums the times and takes the larger memory
    /// size.
    #[must_use]
    pub fn merged_with(self, other: Self) -> Self {
        Self {
            user: self.user + other.user,
            system: self.system + other.system,
            resident_max_bytes: self.resident_max_bytes.max(other.resident_max_bytes),
        }
    }
}

/// State of a task at the time when the source's copy was killed. The target continues with this
/// state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FinalSourceState {
    /// Resources that the task has used so far, as far as known.
    pub usage: Usage,
    /// Suspensions of the task that remain in force.
    pub suspensions: Suspensions,
}

/// The tasks that are restarted together from one checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartGroup {
    /// Incarnation of the restarted tasks. Link frames of earlier incarnations are void.
    pub incarnation: u16,
    /// All restarted tasks, each with its incarnation at the time of the checkpoint. The
    /// incarnations can differ: one task may have been restarted earlier, and the others may not
    /// have received a frame of the new incarnation before the checkpoint.
    pub members: Vec<(Tid, u16)>,
    /// True if the checkpoint is restarted in the virtual machine that made it. Tasks outside the
    /// group may then still be the tasks to which the checkpoint refers.
    pub same_vm: bool,
}

impl RestartGroup {
    /// Returns the incarnation of a restarted task at the time of the checkpoint; `None` if the
    /// task is not in the group.
    pub fn incarnation_at_checkpoint(&self, tid: Tid) -> Option<u16> {
        self.members
            .iter()
            .find(|(member, _)| *member == tid)
            .map(|(_, incarnation)| *incarnation)
    }
}

/// An order of the coordinator to the source or the target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MigrationOrder {
    /// Source: report the task's properties. Nothing changes.
    Inspect,
    /// Target: give a verdict and prepare for the task.
    Prepare {
        /// Properties of the task, for the verdict.
        facts: TaskFacts,
        /// Suspensions of the task. The target needs them for suspend requests that arrive before
        /// the task runs at the target.
        suspensions: Suspensions,
        /// The group that is restarted, if the task is restarted from a checkpoint; `None` for a
        /// migration.
        restart_group: Option<RestartGroup>,
        /// True if the source supports post-copy for this task.
        supports_post_copy: bool,
        /// True if the source performs pre-copy before the dump. Has an effect only with post-copy.
        pre_copy: bool,
    },
    /// Source: quiesce, stop, dump and send the images to the target.
    Depart {
        /// Path of the resume token on the target; the resume token is the file that wakes the
        /// quiesced library.
        resume_token_path: PathBuf,
        /// True for post-copy: most memory stays at the source and is served on demand.
        post_copy: bool,
        /// True for pre-copy: the source sends memory before any other step.
        pre_copy: bool,
        /// The engine of the migration. An engine that restarts the program asks the program to
        /// exit instead of dumping it.
        engine: Engine,
    },
    /// Source, before the commit: the migration is aborted; the task continues at the source.
    Resume {
        /// Suspensions that are in force, including suspensions that were requested at the target.
        /// A suspended task stays stopped.
        suspensions: Suspensions,
    },
    /// Target, before the commit: discard everything that belongs to the migration.
    Discard,
    /// Source, after the commit: kill and reap the source's copy, and forward the items that wait
    /// for the task.
    Release,
    /// Target, after the source's copy was killed: run the task.
    Run(FinalSourceState),
    /// Source, for a checkpoint: quiesce and stop the task, and keep it stopped.
    Pause,
    /// Source, for a checkpoint, when all tasks of the job are stopped: write the images, resume
    /// the task, and send the images to the master.
    Dump {
        /// Requests of the task that the master has not answered yet. All other requests are
        /// already answered.
        open_requests: Vec<RequestId>,
        /// Tasks of the job that ended since its last checkpoint; before the first checkpoint,
        /// tasks that ended recently. A restarted job cannot send their last messages again, so
        /// these messages are delivered before the dump.
        ended_tasks: Vec<Tid>,
    },
    /// Source, for a checkpoint: the checkpoint is aborted; resume the task.
    Abort,
}

/// A report of the source or the target to the coordinator.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum StepReport {
    /// Source: the task's properties.
    Inspected {
        /// Properties of the task, for the target's verdict.
        facts: TaskFacts,
        /// Suspensions of the task. From now on the coordinator decides on suspend requests: source
        /// and target forward such requests to the coordinator.
        suspensions: Suspensions,
        /// True if post-copy is worthwhile for this task and the source supports it.
        supports_post_copy: bool,
        /// True if the task is large enough for pre-copy.
        supports_pre_copy: bool,
    },
    /// Target: the verdict, and the preparations if the target accepts the task.
    Prepared {
        /// Reasons to refuse the task; empty if the target accepts the task.
        verdict: Verdict,
        /// Path of the resume token on the target; the resume token is the file that wakes the
        /// quiesced library.
        resume_token_path: PathBuf,
        /// True if both source and target support post-copy; the migration then uses post-copy.
        post_copy: bool,
        engine: Engine,
    },
    /// Source: pre-copy has ended.
    PreCopied {
        /// Number of bytes sent, including bytes that were sent more than once.
        sent_bytes: u64,
    },
    /// Source: the library has quiesced.
    Quiesced,
    /// Source: all processes of the task have stopped.
    Stopped,
    /// Source: the images have been written.
    Dumped {
        /// Size of the images, in bytes.
        image_bytes: u64,
    },
    /// Target: all images have arrived and are verified.
    Received {
        /// Size of the images, in bytes.
        image_bytes: u64,
    },
    /// Target: the task's copy is restored and stopped.
    Restored,
    /// Source: the source's copy was killed and reaped; contains the resources that the copy had
    /// used.
    SourceKilled(Usage),
    /// Target: the task runs.
    Running,
    /// Target: all memory has arrived.
    Arrived,
    /// Source or target: the step failed. At the source the task still exists. The target has
    /// discarded everything that belonged to the migration. If the step is [`Step::Arrive`], the
    /// task is dead.
    Failed {
        /// The step that failed.
        step: Step,
        failure: Failure,
    },
}

impl StepReport {
    /// Returns the step that this report completes, or the step that failed.
    pub fn step(&self) -> Step {
        match self {
            Self::Inspected { .. } => Step::Inspect,
            Self::Prepared { .. } => Step::Prepare,
            Self::PreCopied { .. } => Step::PreCopy,
            Self::Quiesced => Step::Quiesce,
            Self::Stopped => Step::Stop,
            Self::Dumped { .. } => Step::Dump,
            Self::Received { .. } => Step::Transfer,
            Self::Restored => Step::Restore,
            Self::SourceKilled(_) => Step::KillSource,
            Self::Running => Step::Run,
            Self::Arrived => Step::Arrive,
            Self::Failed { step, .. } => *step,
        }
    }
}
