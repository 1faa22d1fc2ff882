//! Checkpoints of jobs: all tasks of a job as they are at one moment, and the same tasks started again.

use crate::group::GroupState;
use crate::host::{Held, TaskRecord};
use crate::ids::{HostId, Micros, Tid};
use crate::message::Message;
use crate::migration::{Failure, Refusal, Step, TaskFacts};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Tasks in one checkpoint at most.
pub const SET_TASKS_MAX: usize = 1024;
/// Bytes in the mailbox that belong to the tasks of one checkpoint at most.
pub const SAVED_MAILBOX_BYTES_MAX: usize = 16 << 20;
/// Version of [`SetMeta`], [`PartRecord`] and of what lies beside the images.
pub const SET_VERSION: u16 = 5;

/// When a job is checkpointed by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Pace {
    /// Not any more.
    Never,
    /// Again and again: each is complete so long after the one before it was begun, if checkpoints take about as long as the last one
    /// did; but at least half of this time lies between the end of one and the beginning of the next.
    Every(Micros),
    /// So often that no more work than this is lost, if checkpoints take about as long as the last one did.
    Loss(Micros),
}

/// A complete set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetReport {
    /// By this name it can be started again.
    pub set: String,
    /// The first task of the job.
    pub job: Tid,
    /// Its tasks.
    pub tasks: Vec<Tid>,
    /// Bytes in the store.
    pub bytes: u64,
    /// From the moment at which the first task stood still until the last one was written.
    pub frozen: Micros,
    /// Those of its tasks that have written their own checkpoints, and were started again.
    pub own: Vec<Tid>,
}

/// One line of a list of sets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetEntry {
    /// Its name.
    pub set: String,
    /// The first task of the job.
    pub job: Tid,
    /// When it was made, in microseconds since 1970.
    pub made: Micros,
    /// Tasks in it.
    pub tasks: u32,
    /// Bytes in the store.
    pub bytes: u64,
    /// Why it cannot be used, if so.
    pub broken: Option<String>,
    /// When its job ended for good, in microseconds since 1970, if it did: then nobody is likely to want it.
    pub ended: Option<Micros>,
    /// Names of hosts that have a copy of it, as far as this virtual machine has made them.
    pub copies: Vec<String>,
}

/// Sets that somebody wants removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Unwanted {
    /// These, by their names.
    Sets(Vec<String>),
    /// All that this virtual machine has made of this job.
    Job(Tid),
}

/// Why a set stays that was to be removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum Stays {
    /// There is none of this name.
    #[error("there is no such checkpoint; 'pvm checkpoints' lists them")]
    Unknown,
    /// It is being read: a job is started from it.
    #[error("it is in use: a job is being started from it")]
    InUse,
    /// A job would have nothing to go back to.
    #[error(
        "job {0} goes back to it when a host is lost; 'pvm checkpoint --stop {0}' before, or remove older ones"
    )]
    Wanted(Tid),
    /// Another virtual machine has made it, which may still need it.
    #[error("the virtual machine {0:?} has made it; remove it there, or say --any if that is gone")]
    Foreign(String),
    /// The store could not remove it.
    #[error("{0}")]
    Store(String),
}

/// What became of sets that were to be removed: their bytes, or why one stays.
pub type Removed = Vec<(String, Result<u64, Stays>)>;

/// A job that runs again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartReport {
    /// The set.
    pub set: String,
    /// Its tasks and where they run.
    pub tasks: Vec<(Tid, HostId)>,
}

/// Why there is no checkpoint. Every task goes on, and the sets that were there before are untouched.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum CutFailure {
    /// There is no such task, and none of its descendants.
    NoSuchJob(Tid),
    /// More tasks than a set may have.
    TooMany {
        /// How many there are.
        tasks: usize,
    },
    /// Another checkpoint of the job, or a restart, is under way.
    UnderWay,
    /// One of the tasks cannot be written.
    Task {
        /// Which.
        tid: Tid,
        /// In which step.
        step: Step,
        /// Why.
        why: Failure,
    },
    /// The job has spawned these tasks meanwhile.
    Grew(Vec<Tid>),
    /// A host was lost.
    HostLost(HostId),
    /// Not all of it was done in time.
    Deadline {
        /// The time it had.
        allowed: Micros,
    },
    /// The store did not take it.
    Store(String),
    /// What its tasks have put into the mailbox is more than a set takes.
    Mailbox {
        /// Bytes of it.
        bytes: usize,
    },
}

impl CutFailure {
    /// True if the same may well succeed in a moment: the job was changing, or one of its tasks had to leave.
    pub fn may_try_again(&self) -> bool {
        use Failure::TaskEnded;
        let is_moving = |why: &Failure| matches!(why, Failure::Refused(all) if all.iter().all(|r| matches!(r, Refusal::AlreadyMoving(_) | Refusal::NotConnected | Refusal::NoSuchTask | Refusal::MayEndYet)));
        match self {
            CutFailure::Grew(_) => true,
            CutFailure::Task {
                why: TaskEnded | Failure::CalledOff(_),
                ..
            } => true,
            CutFailure::Task { why, .. } => is_moving(why),
            _ => false,
        }
    }
}

impl CutFailure {
    /// True if a program is still writing what it was asked for before.
    pub fn is_being_written(&self) -> bool {
        matches!(self, CutFailure::Task { why: Failure::Refused(all), .. } if all.contains(&Refusal::MayEndYet))
    }
}

impl fmt::Display for CutFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            CutFailure::NoSuchJob(tid) => {
                write!(f, "there is no task {tid}, and none that it has spawned")
            }
            CutFailure::TooMany { tasks } => {
                write!(
                    f,
                    "the job has {tasks} tasks, and a checkpoint takes {SET_TASKS_MAX} at most"
                )
            }
            CutFailure::UnderWay => {
                f.write_str("another checkpoint or a restart of this job is under way")
            }
            CutFailure::Task { tid, step, why } => write!(f, "{tid}: {step}: {why}"),
            CutFailure::Grew(tids) => {
                let tids: Vec<String> = tids.iter().map(Tid::to_string).collect();
                write!(f, "the job has spawned {} meanwhile", tids.join(" "))
            }
            CutFailure::HostLost(host) => write!(f, "{host} was lost"),
            CutFailure::Deadline { allowed } => {
                write!(f, "not done within {} s", allowed.0 / 1_000_000)
            }
            CutFailure::Store(why) => f.write_str(why),
            CutFailure::Mailbox { bytes } => {
                write!(
                    f,
                    "its tasks have {bytes} bytes in the mailbox, and a checkpoint takes {SAVED_MAILBOX_BYTES_MAX}"
                )
            }
        }
    }
}

/// Why a set was not started again. Nothing of it runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RestartFailure {
    /// The store has no such set, or cannot give it out.
    Store(String),
    /// These tasks of the set, or others with their numbers, are alive.
    Alive(Vec<Tid>),
    /// Groups of the set have members that are not of it.
    Groups(Vec<String>),
    /// Entries of the mailbox that are in the set are there already, and belong to others.
    Mailbox(Vec<String>),
    /// Contexts of the set belong to others.
    Contexts(Vec<i32>),
    /// There is no such host.
    NoHost(String),
    /// Another restart of this job, or a checkpoint of it, is under way.
    UnderWay,
    /// One of the tasks could not be started again.
    Task {
        /// Which.
        tid: Tid,
        /// Where.
        host: HostId,
        /// In which step.
        step: Step,
        /// Why.
        why: Failure,
    },
    /// A host was lost meanwhile.
    HostLost(HostId),
    /// Not all of it was done in time.
    Deadline {
        /// The time it had.
        allowed: Micros,
    },
}

/// The first of a list, and how many more there are.
fn some<T>(list: &[T], name: impl Fn(&T) -> String) -> String {
    const SHOWN: usize = 10;
    let mut text = list
        .iter()
        .take(SHOWN)
        .map(name)
        .collect::<Vec<_>>()
        .join(", ");
    if list.len() > SHOWN {
        text.push_str(&format!(" and {} more", list.len() - SHOWN));
    }
    text
}

impl fmt::Display for RestartFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RestartFailure::Store(why) => f.write_str(why),
            RestartFailure::Alive(tids) => write!(
                f,
                "{} are alive: end the job first, or start a new virtual machine, which gives none of these numbers away",
                some(tids, Tid::to_string)
            ),
            RestartFailure::Groups(names) => {
                write!(
                    f,
                    "the groups {} have other members: a task cannot be in them at its old place",
                    names.join(" ")
                )
            }
            RestartFailure::Mailbox(entries) => {
                let entries = some(entries, String::clone);
                write!(
                    f,
                    "the mailbox has entries of others where the tasks had theirs: {entries}"
                )
            }
            RestartFailure::Contexts(contexts) => write!(
                f,
                "others have been given the contexts {}: their messages would be taken for the job's; end them, or start \
                 a new virtual machine",
                some(contexts, |ctx| format!("{ctx:#x}"))
            ),
            RestartFailure::NoHost(name) => {
                write!(f, "there is no host {name} in the virtual machine")
            }
            RestartFailure::UnderWay => {
                f.write_str("another restart or a checkpoint of this job is under way")
            }
            RestartFailure::Task {
                tid,
                host,
                step,
                why,
            } => write!(f, "{tid} on {host}: {step}: {why}"),
            RestartFailure::HostLost(host) => write!(f, "{host} was lost"),
            RestartFailure::Deadline { allowed } => {
                write!(f, "not done within {} s", allowed.0 / 1_000_000)
            }
        }
    }
}

/// What a set is, beside the images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetMeta {
    /// [`SET_VERSION`].
    pub version: u16,
    /// Wire version of the libraries in it.
    pub wire: u16,
    /// The virtual machine, by the time of day at which it was founded, in microseconds.
    pub vm: Micros,
    /// The first task of the job.
    pub job: Tid,
    /// The latest timeline of the virtual machine.
    pub line: u16,
    /// Its tasks.
    pub parts: Vec<PartMeta>,
    /// Groups that they are in.
    pub groups: Vec<SavedGroup>,
    /// Their entries in the mailbox.
    pub mailbox: Vec<SavedEntry>,
    /// Contexts that belong to them.
    pub contexts: Vec<(i32, Tid)>,
    /// Whether it was checkpointed by itself.
    pub pace: Option<Pace>,
}

/// An entry of the mailbox as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedEntry {
    /// Its class.
    pub name: String,
    /// Its index there.
    pub index: i32,
    /// Who owns it.
    pub owner: Tid,
    /// As `pvm_putinfo` has them.
    pub flags: i32,
    /// What was stored.
    pub message: Message,
}

/// One task of a set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartMeta {
    /// The task.
    pub tid: Tid,
    /// Name of the host where it ran.
    pub host: String,
    /// For the verdict of whoever is to take it.
    pub facts: TaskFacts,
    /// The timeline that it lived on.
    pub line: u16,
}

/// A group as it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SavedGroup {
    /// Its name.
    pub name: Vec<u8>,
    /// Dynamic, static or broken.
    pub state: GroupState,
    /// Number of members when it was frozen.
    pub frozen: u32,
    /// By instance; NONE where there is none, or one that is not of the set.
    pub members: Vec<Tid>,
}

/// What the daemon of a task knew of it; lies beside its images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PartRecord {
    /// [`SET_VERSION`].
    pub version: u16,
    /// The task's record.
    pub record: TaskRecord,
    /// What waited for it. Of a task that has written its own checkpoint also what its process had said, and halves of messages
    /// that it had got.
    pub waiting: Vec<Held>,
}
