//! Records and errors of checkpoints of jobs. A checkpoint contains all tasks of a job as they were
//! at one moment; the job can be restarted from the checkpoint.

use crate::WIRE_VERSION;
use crate::frame::{FrameError, decode_start, from_bytes};
use crate::group::GroupState;
use crate::ids::{HostId, Micros, Tid};
use crate::message::Message;
use crate::migration::{Failure, Refusal, Step, TaskFacts};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;

/// Maximum number of tasks in one checkpoint.
pub const CHECKPOINT_TASKS_MAX: usize = 1024;
/// Maximum total size, in bytes, of the mailbox entries that belong to the tasks of one checkpoint.
pub const SAVED_MAILBOX_BYTES_MAX: usize = 16 << 20;
/// Version of [`CheckpointMeta`], [`SavedTask`](crate::host::SavedTask) and the other files that
/// are stored next to the images. Each begins with its version, whatever follows.
pub const CHECKPOINT_VERSION: u16 = 7;

/// The reason why a checkpoint store did not do what was asked. Complete checkpoints are unchanged,
/// except that a checkpoint whose removal failed may be gone. A checkpoint that was being written
/// when the operation failed never becomes complete, and its files are removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{0}")]
pub struct StoreFailure(pub String);

/// The reason why another host has no copy of a checkpoint. The original is unchanged. If the host
/// reports later that the copy is stored, the copy is removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{0}")]
pub struct CopyFailure(pub String);

/// Schedule of automatic checkpoints of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckpointSchedule {
    /// Ends the automatic checkpoints of the job; checkpoints on request remain possible.
    Disabled,
    /// At a fixed interval, measured from the start of one checkpoint to the completion of the
    /// next, if the next one takes as long as the previous one. At least half of the interval
    /// passes between the end of one checkpoint and the start of the next.
    Interval(Micros),
    /// Often enough that at most this much work is lost, if a checkpoint takes as long as the
    /// previous one.
    MaxLoss(Micros),
}

/// Result of a completed checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointReport {
    /// Name by which a restart selects the checkpoint.
    pub name: String,
    /// First task of the job.
    pub job: Tid,
    pub tasks: Vec<Tid>,
    /// Size in the store, in bytes.
    pub stored_bytes: u64,
    /// Time from the stop of the first task until the images of the last task were written.
    pub frozen_time: Micros,
    /// Tasks that wrote their own checkpoints and were restarted.
    pub self_checkpointed_tasks: Vec<Tid>,
}

/// An entry in the list of the checkpoints of a store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointEntry {
    /// Name of the checkpoint.
    pub name: String,
    /// First task of the job.
    pub job: Tid,
    /// Creation time, in microseconds since 1970.
    pub created_at: Micros,
    /// Number of tasks in the checkpoint.
    pub task_count: u32,
    /// Size in the store, in bytes.
    pub stored_bytes: u64,
    /// The reason why the checkpoint is unusable; `None` if it is usable.
    pub unusable_reason: Option<String>,
    /// Time at which the checkpoint's job ended permanently, in microseconds since 1970; `None` if
    /// the job may still need the checkpoint.
    pub job_ended_at: Option<Micros>,
    /// Names of the hosts with a copy of the checkpoint. Copies made by other virtual machines are
    /// not listed.
    pub copy_hosts: Vec<String>,
}

/// Selection of checkpoints to remove.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RemovalSelection {
    /// The checkpoints with these names.
    Checkpoints(Vec<String>),
    /// All checkpoints of this job that this virtual machine made.
    Job(Tid),
}

/// The reason why a checkpoint was not removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum RemovalRefusal {
    /// No checkpoint has this name.
    #[error("there is no such checkpoint; 'pvm checkpoints' lists them")]
    NoSuchCheckpoint,
    /// A restart is reading the checkpoint.
    #[error("it is in use: a job is being restarted from it")]
    InUse,
    /// The checkpoint is the only one from which this job can be restarted.
    #[error(
        "job {0} needs it if a host is lost; run 'pvm checkpoint --stop {0}' first, or remove older ones"
    )]
    OnlyRestartPoint(Tid),
    /// The named virtual machine made the checkpoint and may still need it.
    #[error(
        "the virtual machine {0:?} made it; remove it there, or use --any if that machine is gone"
    )]
    OtherVm(String),
    /// The store reported an error.
    #[error("{0}")]
    Store(StoreFailure),
}

/// Results of a removal: the name of each selected checkpoint with its former size in bytes, or
/// with the reason why the checkpoint was not removed.
pub type RemovalResults = Vec<(String, Result<u64, RemovalRefusal>)>;

/// Result of a successful restart.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartReport {
    /// Name of the checkpoint.
    pub checkpoint: String,
    /// The restarted tasks and their hosts.
    pub tasks: Vec<(Tid, HostId)>,
}

/// The reason why a checkpoint failed. All tasks continue, and earlier checkpoints are intact.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CheckpointFailure {
    /// Neither the task with this tid nor any of its descendants exists.
    NoSuchJob(Tid),
    /// The job has more tasks than a checkpoint may have.
    TooManyTasks {
        /// Number of tasks of the job.
        task_count: usize,
    },
    /// Another checkpoint of the job, or a restart of the job, is in progress.
    InProgress,
    /// One of the tasks cannot be dumped; `step` failed.
    Task {
        tid: Tid,
        step: Step,
        failure: Failure,
    },
    /// The job spawned these tasks during the checkpoint.
    JobSpawnedTasks(Vec<Tid>),
    /// A host was lost during the checkpoint.
    HostLost(HostId),
    /// The checkpoint took longer than the time limit.
    Deadline { time_limit: Micros },
    /// The checkpoint store reported an error.
    Store(StoreFailure),
    /// The mailbox entries of the job's tasks exceed [`SAVED_MAILBOX_BYTES_MAX`].
    MailboxTooLarge {
        /// Total size of the mailbox entries, in bytes.
        bytes: usize,
    },
}

impl CheckpointFailure {
    /// True if a retry will probably succeed: the job was changing, or one of its tasks was
    /// migrating or had not written its own checkpoint yet.
    pub fn is_transient(&self) -> bool {
        use Failure::TaskEnded;
        let is_transient_refusal = |reason: &Failure| matches!(reason, Failure::Refused(refusals) if refusals.iter().all(|r| matches!(r, Refusal::AlreadyMigrating(_) | Refusal::NotConnected | Refusal::NoSuchTask | Refusal::SelfCheckpointPending)));
        match self {
            Self::JobSpawnedTasks(_) => true,
            Self::Task {
                failure: TaskEnded | Failure::Cancelled(_),
                ..
            } => true,
            Self::Task {
                failure: reason, ..
            } => is_transient_refusal(reason),
            _ => false,
        }
    }
}

impl CheckpointFailure {
    /// True if a task of the job is still writing its own checkpoint for an earlier request.
    pub fn is_self_checkpoint_pending(&self) -> bool {
        matches!(self, Self::Task { failure: Failure::Refused(refusals), .. } if refusals.contains(&Refusal::SelfCheckpointPending))
    }
}

impl fmt::Display for CheckpointFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoSuchJob(tid) => {
                write!(f, "there is neither a task {tid} nor a descendant of it")
            }
            Self::TooManyTasks { task_count: tasks } => {
                write!(
                    f,
                    "the job has {tasks} tasks; a checkpoint takes at most {CHECKPOINT_TASKS_MAX}"
                )
            }
            Self::InProgress => {
                f.write_str("another checkpoint or a restart of this job is in progress")
            }
            Self::Task {
                tid,
                step,
                failure: reason,
            } => write!(f, "{tid}: {step}: {reason}"),
            Self::JobSpawnedTasks(tids) => {
                let tids: Vec<String> = tids.iter().map(Tid::to_string).collect();
                write!(
                    f,
                    "the job spawned {} during the checkpoint",
                    tids.join(" ")
                )
            }
            Self::HostLost(host) => write!(f, "{host} was lost"),
            Self::Deadline { time_limit: limit } => {
                write!(f, "not done within {} s", limit.0 / 1_000_000)
            }
            Self::Store(reason) => reason.fmt(f),
            Self::MailboxTooLarge { bytes } => {
                write!(
                    f,
                    "its tasks have {bytes} bytes in the mailbox; a checkpoint takes at most {SAVED_MAILBOX_BYTES_MAX}"
                )
            }
        }
    }
}

/// The reason why a restart failed. No task of the checkpoint runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestartFailure {
    /// The store does not have the checkpoint or cannot read it.
    Store(StoreFailure),
    /// These tasks of the checkpoint are alive, or other tasks with the same tids are alive.
    TasksAlive(Vec<Tid>),
    /// These groups of the checkpoint have members that do not belong to the checkpoint.
    GroupsInUse(Vec<String>),
    /// These mailbox entries of the checkpoint already exist and belong to other tasks.
    MailboxInUse(Vec<String>),
    /// These contexts of the checkpoint belong to other tasks.
    ContextsInUse(Vec<i32>),
    /// The virtual machine has no host with this name.
    NoHost(String),
    /// Another restart of the job, or a checkpoint of the job, is in progress.
    InProgress,
    /// One of the tasks could not be restarted.
    Task {
        tid: Tid,
        host: HostId,
        step: Step,
        failure: Failure,
    },
    /// A host was lost during the restart.
    HostLost(HostId),
    /// The restart took longer than the time limit.
    Deadline { time_limit: Micros },
    /// The job runs in another virtual machine, according to the claim in the store.
    RunsElsewhere {
        holder: JobHolder,
        /// Time after which the restart is accepted by force.
        time_until_force: Micros,
    },
    /// The checkpoint was written by another version.
    OtherVersion(WriterVersion),
    /// Another virtual machine made the checkpoint, the store has no record of where the job runs,
    /// and it cannot be known whether that virtual machine still runs.
    MayRunElsewhere {
        /// Names of the hosts of that virtual machine that were asked and did not answer; `None` if
        /// its hosts are not known.
        silent_hosts: Option<Vec<String>>,
    },
    /// The virtual machine that made the checkpoint still runs: a daemon of it answers.
    VmAnswers {
        /// Name of the virtual machine.
        vm: String,
        /// Name of the host whose daemon answers.
        host: String,
        address: SocketAddr,
    },
}

/// The versions of the programs that wrote a checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WriterVersion {
    /// The [`CHECKPOINT_VERSION`] of the daemon that wrote the description.
    pub format: u16,
    /// Value of [`WIRE_VERSION`] in the libraries of the tasks.
    pub wire: u16,
}

impl WriterVersion {
    /// The version of this program.
    pub const OWN: Self = Self {
        format: CHECKPOINT_VERSION,
        wire: WIRE_VERSION,
    };
}

impl fmt::Display for WriterVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { format, wire } = self;
        write!(f, "checkpoint format {format} and protocol version {wire}")
    }
}

/// The reason why the metadata of a checkpoint cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum MetaError {
    /// Another version wrote it, so the rest of it may have another format.
    #[error("it was written with {0}, and this version uses {own}", own = WriterVersion::OWN)]
    OtherVersion(WriterVersion),
    /// It has the format of this version, and cannot be decoded.
    #[error(transparent)]
    Decode(FrameError),
}

/// Identifies a job in a store: its first task, and the start time of the virtual machine in which
/// the job was first checkpointed. Task ids alone are not unique, because virtual machines number
/// their tasks independently.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ClaimKey {
    pub job: Tid,
    /// In microseconds since 1970.
    pub origin: Micros,
}

/// Where a job runs, according to the claim in the store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobHolder {
    /// Name of the virtual machine.
    pub vm: String,
    /// The master's host and user, and the process number of its daemon.
    pub host: String,
    pub user: String,
    pub pid: u32,
    /// Time at which the virtual machine began to run the job, in microseconds since 1970.
    pub since: Micros,
}

impl fmt::Display for JobHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            vm,
            host,
            user,
            pid,
            ..
        } = self;
        write!(
            f,
            "virtual machine {vm} of user {user} (master on {host}, process {pid})"
        )
    }
}

/// The claim of a job in a checkpoint store: which virtual machine runs the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct JobClaim {
    /// Increases whenever another virtual machine takes over the job.
    pub term: u64,
    /// Increases with each renewal by the holder.
    pub renewal: u64,
    /// Random number that the holder's daemon has chosen at its start.
    pub instance: u64,
    /// True if the job does not run any more, as the holder has recorded.
    pub is_released: bool,
    /// Time after the end of the holder's daemon within which its tasks on other hosts end.
    pub lease: Micros,
    pub holder: JobHolder,
    /// Identity of the holder's daemon as a process of its machine.
    pub process: String,
}

/// Formats the first ten items of a list, and the number of the items that are not shown.
fn format_list_start<T>(list: &[T], format_item: impl Fn(&T) -> String) -> String {
    const ITEMS_SHOWN_MAX: usize = 10;
    let mut text = list
        .iter()
        .take(ITEMS_SHOWN_MAX)
        .map(format_item)
        .collect::<Vec<_>>()
        .join(", ");
    if list.len() > ITEMS_SHOWN_MAX {
        text.push_str(&format!(" and {} more", list.len() - ITEMS_SHOWN_MAX));
    }
    text
}

impl fmt::Display for RestartFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Store(reason) => reason.fmt(f),
            Self::TasksAlive(tids) => write!(
                f,
                "{} are alive: end the job first, or start a new virtual machine, which does not reuse these tids",
                format_list_start(tids, Tid::to_string)
            ),
            Self::GroupsInUse(names) => {
                write!(
                    f,
                    "the groups {} have other members: the tasks cannot get their old instance numbers",
                    names.join(" ")
                )
            }
            Self::MailboxInUse(entries) => {
                let entries = format_list_start(entries, String::clone);
                write!(
                    f,
                    "mailbox entries of the tasks now belong to other tasks: {entries}"
                )
            }
            Self::ContextsInUse(contexts) => write!(
                f,
                "the contexts {} now belong to other tasks, whose messages would be confused with the job's; end \
                 these tasks, or start a new virtual machine",
                format_list_start(contexts, |ctx| format!("{ctx:#x}"))
            ),
            Self::NoHost(name) => {
                write!(f, "there is no host {name} in the virtual machine")
            }
            Self::InProgress => {
                f.write_str("another restart or a checkpoint of this job is in progress")
            }
            Self::Task {
                tid,
                host,
                step,
                failure: reason,
            } => write!(f, "{tid} on {host}: {step}: {reason}"),
            Self::HostLost(host) => write!(f, "{host} was lost"),
            Self::Deadline { time_limit: limit } => {
                write!(f, "not done within {} s", limit.0 / 1_000_000)
            }
            Self::OtherVersion(version) => write!(
                f,
                "the checkpoint was written with {version}; this virtual machine uses {own}. The checkpoint is \
                 unchanged: restart it with the version that wrote it",
                own = WriterVersion::OWN
            ),
            Self::MayRunElsewhere { silent_hosts } => {
                write_unknown_origin(f, silent_hosts.as_deref())
            }
            Self::VmAnswers { vm, host, address } => write!(
                f,
                "virtual machine {vm}, which made the checkpoint, still runs: its daemon on {host} answers at \
                 {address}. The job would run twice, and both copies would write the same files. End it there first \
                 (on {host}: pvm halt)"
            ),
            Self::RunsElsewhere {
                holder,
                time_until_force,
            } => {
                write!(
                    f,
                    "its job runs in {holder}, according to the store: end it there first. If that virtual machine is \
                     lost for good, use --force"
                )?;
                match time_until_force.0.div_ceil(1_000_000) {
                    0 => Ok(()),
                    seconds => write!(
                        f,
                        ", which is accepted when the job's claim has not been renewed for another {seconds} s"
                    ),
                }
            }
        }
    }
}

/// Writes why a checkpoint is not restarted of which the store does not say where its job runs.
fn write_unknown_origin(
    f: &mut fmt::Formatter<'_>,
    silent_hosts: Option<&[String]>,
) -> fmt::Result {
    f.write_str(
        "another virtual machine made this checkpoint, and this store has no record that says where the \
         job runs (a copy has none). ",
    )?;
    match silent_hosts {
        None => f.write_str(
            "There is no note about that virtual machine on this host, so nobody could be asked whether it \
             still runs. ",
        )?,
        Some(hosts) => write!(
            f,
            "Its hosts were asked ({}) and do not answer: they are down, or cut off from this host. ",
            format_list_start(hosts, String::clone)
        )?,
    }
    f.write_str(
        "If the job still ran there, it would run twice, and both copies would write the same files. Make \
         sure that that virtual machine is gone, then use --force",
    )
}

/// Metadata of a checkpoint, stored next to the images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CheckpointMeta {
    /// Value of [`CHECKPOINT_VERSION`] in the program that wrote the checkpoint.
    pub version: u16,
    /// Wire version of the task libraries in the images.
    pub wire_version: u16,
    /// Start time of the virtual machine that made the checkpoint, in microseconds since 1970.
    /// Identifies the virtual machine.
    pub vm_start_time: Micros,
    /// First task of the job.
    pub job: Tid,
    /// Latest incarnation of any task in the virtual machine when the checkpoint was made.
    pub latest_incarnation: u16,
    pub tasks: Vec<TaskMeta>,
    /// Groups of which the tasks are members.
    pub groups: Vec<SavedGroup>,
    /// Mailbox entries of the tasks.
    pub mailbox_entries: Vec<SavedMailboxEntry>,
    /// Contexts with the tasks that own them.
    pub contexts: Vec<(i32, Tid)>,
    /// The job's schedule of automatic checkpoints.
    pub schedule: Option<CheckpointSchedule>,
    /// Start time of the virtual machine in which the job was first checkpointed. Together with
    /// the job's tid it identifies the job in a store, also after restarts elsewhere.
    pub origin: Micros,
}

impl CheckpointMeta {
    /// Decodes the metadata of a checkpoint.
    ///
    /// # Errors
    /// Another version wrote the metadata, or they cannot be decoded.
    pub fn decode(bytes: &[u8]) -> Result<Self, MetaError> {
        let (format, wire) = decode_start(bytes).map_err(MetaError::Decode)?;
        let writer = WriterVersion { format, wire };
        if writer != WriterVersion::OWN {
            return Err(MetaError::OtherVersion(writer));
        }
        from_bytes(bytes).map_err(MetaError::Decode)
    }

    /// Returns the key of the job in the claims of the store.
    #[must_use]
    pub fn claim_key(&self) -> ClaimKey {
        ClaimKey {
            job: self.job,
            origin: self.origin,
        }
    }
}

/// A mailbox entry at the time of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedMailboxEntry {
    pub name: String,
    /// Index of the entry within the mailbox class `name`.
    pub index: i32,
    pub owner: Tid,
    /// Bitwise combination of `PvmMbox*` values.
    pub flags: i32,
    pub message: Message,
}

/// Metadata of one task of a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskMeta {
    pub tid: Tid,
    /// Name of the host on which the task ran.
    pub host_name: String,
    /// Properties of the task, for the verdict of the host that restores it.
    pub facts: TaskFacts,
    /// Incarnation of the task at the time of the checkpoint.
    pub incarnation: u16,
}

/// A group at the time of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedGroup {
    pub name: Vec<u8>,
    pub state: GroupState,
    /// Number of members when the group was frozen.
    pub frozen_size: u32,
    /// Members by instance number; [`Tid::NONE`] for a free instance and for a member outside the
    /// checkpoint.
    pub members: Vec<Tid>,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frame::to_bytes;

    fn meta() -> CheckpointMeta {
        CheckpointMeta {
            version: CHECKPOINT_VERSION,
            wire_version: WIRE_VERSION,
            vm_start_time: Micros(1),
            job: Tid::from_raw(0x40001),
            latest_incarnation: 0,
            tasks: Vec::new(),
            groups: Vec::new(),
            mailbox_entries: Vec::new(),
            contexts: Vec::new(),
            schedule: None,
            origin: Micros(7),
        }
    }

    /// The metadata of another version are refused with that version, whatever their format is.
    #[test]
    fn other_version_is_named_whatever_follows() {
        let bytes = to_bytes(&meta()).expect("short");
        assert_eq!(CheckpointMeta::decode(&bytes), Ok(meta()));
        for (format, wire) in [
            (CHECKPOINT_VERSION - 1, WIRE_VERSION),
            (CHECKPOINT_VERSION, WIRE_VERSION + 1),
        ] {
            let mut bytes = to_bytes(&(format, wire)).expect("short");
            bytes.extend([0xff; 20]);
            let error = CheckpointMeta::decode(&bytes);
            let writer = WriterVersion { format, wire };
            assert_eq!(error, Err(MetaError::OtherVersion(writer)));
            let text = RestartFailure::OtherVersion(writer).to_string();
            assert!(
                text.contains(&format!("format {format} and")) && text.contains("unchanged"),
                "{text}"
            );
        }
        assert!(matches!(
            CheckpointMeta::decode(&[]),
            Err(MetaError::Decode(_))
        ));
    }
}
