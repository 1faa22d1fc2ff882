//! Queries and commands to Sempa's resource manager about its decisions, resource usage and jobs.
//!
//! A query is a message to the resource manager in context [`CTX_RM`] with tag [`TAG_QUERY`]. The
//! reply has tag [`TAG_REPLY`] and the query's wait id. The bodies of query and reply are raw
//! bytes: the protocol version as two bytes, low byte first, then [`RmQuery`] or [`RmReply`] in
//! postcard. The reply to a query of another version is [`RmReply::UnsupportedVersion`], whose
//! encoding never changes. A resource manager other than Sempa's ignores these messages; the sender
//! stops waiting after a timeout.
//!
//! Hosts are identified by name, because a host may have left before a decision about it is
//! queried.

mod decision_kind;

pub use decision_kind::DecisionKind;

use crate::event::describe_status;
use crate::frame::{FrameError, from_bytes, to_bytes};
use crate::ids::{Micros, Tid};
use crate::migration::Usage;
use crate::suspend;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::fmt;

/// Version of the encoding of queries, replies and decisions.
pub const RM_VERSION: u16 = 6;
/// Context of the messages to the resource manager that Sempa defines in addition to PVM's.
pub const CTX_RM: i32 = 0x7ffe0;
pub const TAG_QUERY: i32 = 10;
pub const TAG_REPLY: i32 = 11;
/// Tag of an empty message of a daemon to a load watcher or resource manager of its host, which
/// must answer with [`crate::sm::SM_ALIVE`] in the same context.
pub const TAG_PING: i32 = 12;
/// Maximum number of rejected hosts that a decision lists by name. For further rejected hosts the
/// decision contains only their number.
pub const REJECTED_HOSTS_MAX: usize = 64;
/// Maximum number of entries in one reply. If there are more entries, the newest are returned.
pub const REPLY_ENTRIES_MAX: usize = 1000;

/// A query or command for the resource manager.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RmQuery {
    /// Lists the decisions about a task, or about a job and its tasks. → [`RmReply::Decisions`]
    TaskDecisions(Tid),
    /// Lists the decisions about a host, by its name. → [`RmReply::Decisions`]
    HostDecisions(String),
    /// Lists the resource usage of users. → [`RmReply::Users`]
    Users {
        /// Restricts the list to this user.
        user: Option<u32>,
    },
    /// Lists jobs. → [`RmReply::Jobs`]
    Jobs {
        /// Restricts the list to this user's jobs.
        user: Option<u32>,
    },
    /// Returns a job and its tasks. The tid may belong to any task of the job. → [`RmReply::Job`]
    Job(Tid),
    /// Suspends or resumes a job with all its tasks, including tasks that the job spawns later. →
    /// [`RmReply::Suspended`]
    Suspend {
        job: Tid,
        /// True to suspend the job, false to resume it.
        suspend: bool,
    },
    /// Drains a host: all tasks migrate from the host, and no tasks are placed on it. →
    /// [`RmReply::Drain`]
    Drain {
        host: String,
        /// Time limit for the drain; tasks that are still on the host afterwards are reported.
        /// `None` means no limit.
        time_limit: Option<Micros>,
    },
    /// Ends a drain: the host accepts tasks again. → [`RmReply::Drain`] with the tasks on the host
    Undrain { host: String },
    /// Reports the progress of a drain. → [`RmReply::Drain`]
    DrainStatus { host: String },
    /// Cancels the pending restart of a vacated job, which was checkpointed and ended because no
    /// host accepted the job. The tid may belong to any task of the job. →
    /// [`RmReply::VacatedCancelled`]
    CancelVacated(Tid),
    /// Ends all tasks of a job, including tasks that are being started. The tid may belong to any
    /// task of the job. The tasks are asked to exit, and killed after a timeout. →
    /// [`RmReply::KillProgress`] with the progress so far
    Kill(Tid),
    /// Reports the progress of [`RmQuery::Kill`] for the job. → [`RmReply::KillProgress`]
    KillStatus(Tid),
    /// Lists the spawns that wait for hosts. → [`RmReply::WaitingSpawns`]
    WaitingSpawns {
        /// Restricts the list to this user's spawns.
        user: Option<u32>,
    },
}

/// A reply of the resource manager. New variants must be added at the end, and
/// [`RmReply::UnsupportedVersion`] must stay the first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum RmReply {
    /// The query's version is not supported; contains the supported version.
    UnsupportedVersion(u16),
    /// Decisions about the task or host that the query names, oldest first.
    Decisions {
        /// The record of the task, if the query named a task.
        task: Option<TaskUsage>,
        decisions: Vec<Decision>,
        /// The current state of the host, if the query named a host.
        host_state: Option<HostState>,
    },
    /// Resource usage of users, in ascending order of the user ids.
    Users(Vec<UserUsage>),
    /// The selected jobs, oldest first.
    Jobs(Vec<JobUsage>),
    /// A job with its tasks.
    Job {
        job: JobUsage,
        /// The tasks of `job`, oldest first.
        tasks: Vec<TaskUsage>,
    },
    /// The resource manager knows no task, job or host of this name or tid.
    NotFound,
    /// The outcome of [`RmQuery::Suspend`].
    Suspended {
        job: Tid,
        /// Tasks that this query suspended or resumed.
        tasks: Vec<Tid>,
        /// Tasks whose state did not change, with reasons; at most [`REPLY_ENTRIES_MAX`].
        unchanged_tasks: Vec<(Tid, String)>,
    },
    /// State of a host's drain.
    Drain {
        /// True while the host is being drained or kept empty.
        is_drained: bool,
        /// Tasks on the host that can migrate, at most [`REPLY_ENTRIES_MAX`]. The text is the
        /// reason why the task is not migrating at present; `None` if the task is migrating.
        tasks: Vec<(Tid, Option<String>)>,
        /// Number of tasks that are bound to the host or not managed by the resource manager. These
        /// tasks stay until they end.
        bound_tasks: u32,
    },
    /// The outcome of [`RmQuery::CancelVacated`]: the pending restart of a vacated job was
    /// cancelled, unless `restart_started` is true.
    VacatedCancelled {
        /// First task of the job.
        job: Tid,
        /// Name of the job's checkpoint, which stays in the store.
        checkpoint: String,
        /// True if the restart is already in progress and cannot be cancelled.
        restart_started: bool,
    },
    /// Reports the progress of [`RmQuery::Kill`].
    KillProgress {
        job: Tid,
        /// Number of tasks that were asked to exit.
        exit_requests: u32,
        /// Number of tasks that did not exit on request and were killed.
        forced_kills: u32,
        /// Number of tasks and spawn requests of the job that have not ended yet.
        remaining_tasks: u32,
        /// Tasks that could not be signalled, with reasons; at most [`REPLY_ENTRIES_MAX`].
        signal_failures: Vec<(Tid, String)>,
    },
    /// Waiting spawns in queue order; at most [`REPLY_ENTRIES_MAX`].
    WaitingSpawns(Vec<WaitingSpawn>),
}

/// Encodes a query or reply with its version prefix.
///
/// # Errors
/// The value cannot be encoded.
pub fn encode<T: Serialize>(value: &T) -> Result<Vec<u8>, FrameError> {
    let mut out = RM_VERSION.to_le_bytes().to_vec();
    out.extend(to_bytes(value)?);
    Ok(out)
}

/// Decodes a query or reply. Returns `None` if the message has another version.
///
/// # Errors
/// The message has no version, or its content cannot be decoded.
pub fn decode<T: DeserializeOwned>(bytes: &[u8]) -> Result<Option<T>, FrameError> {
    let Some((version, rest)) = bytes.split_first_chunk::<2>() else {
        return Err(FrameError::BadBody("it has no version".into()));
    };
    if u16::from_le_bytes(*version) != RM_VERSION {
        return Ok(None);
    }
    from_bytes(rest).map(Some)
}

/// Returns the version prefix of a message; `None` if the message is too short.
pub fn version_prefix(bytes: &[u8]) -> Option<u16> {
    bytes
        .first_chunk::<2>()
        .map(|version| u16::from_le_bytes(*version))
}

/// How a task ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum TaskOutcome {
    /// The task's process ended with this wait status.
    Status(i32),
    /// The task ended with its host, or while no resource manager was running.
    Lost,
}

impl TaskOutcome {
    /// True for exit status 0.
    pub fn is_success(self) -> bool {
        self == Self::Status(0)
    }
}

impl fmt::Display for TaskOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status(status) => f.write_str(&describe_status(*status)),
            Self::Lost => f.write_str("lost"),
        }
    }
}

/// Start and cause of a suspension.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SuspensionStart {
    /// Start of the suspension, in microseconds since 1970.
    pub since: Micros,
    pub cause: suspend::SuspendCause,
}

impl fmt::Display for SuspensionStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.cause {
            suspend::SuspendCause::Requested { requested_by }
            | suspend::SuspendCause::JobRequested { requested_by } => {
                write!(f, "suspended by {requested_by}")
            }
            suspend::SuspendCause::Preempted { why } => write!(f, "preempted: {why}"),
        }
    }
}

/// The resource manager's record of a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TaskUsage {
    pub tid: Tid,
    /// First task of the job to which the task belongs.
    pub job: Tid,
    /// User id of the task.
    pub user: u32,
    /// The task's program; empty for a task from a command line.
    pub program: String,
    /// Name of the host on which the task runs, or on which it ended.
    pub host: String,
    /// Start time, in microseconds since 1970.
    pub started_at: Micros,
    /// Time and outcome of the task's end; `None` while the task runs.
    pub end: Option<(Micros, TaskOutcome)>,
    /// Resources that the task used; known only after its end.
    pub usage: Usage,
    pub migrations: u32,
    /// Number of evictions by owners. An eviction by migration also counts in `migrations`; an
    /// eviction that ended the task counts only here.
    pub evictions: u32,
    /// True if the task counts toward the limits of its user and job.
    pub counts_toward_limits: bool,
    /// Start and cause of the current suspension; `None` if the task is not suspended.
    pub suspension: Option<SuspensionStart>,
    /// Total duration of suspensions that have ended.
    pub suspended_time: Micros,
}

/// The resource manager's record of a job.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct JobUsage {
    /// First task of the job.
    pub job: Tid,
    /// User id of the job.
    pub user: u32,
    /// Program of the first task; empty for a task from a command line.
    pub program: String,
    /// Start time, in microseconds since 1970.
    pub started_at: Micros,
    /// Time at which the last task of the job ended; `None` while a task runs.
    pub ended_at: Option<Micros>,
    /// Totals over all tasks of the job.
    pub totals: UsageTotals,
    /// Start and cause of the current suspension of the job; `None` if the job is not suspended.
    /// The suspension also applies to tasks that the job spawns later.
    pub suspension: Option<SuspensionStart>,
}

/// The resource manager's record of a user.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct UserUsage {
    pub user: u32,
    /// Totals over the user's tasks.
    pub totals: UsageTotals,
    /// Priority index of the user in the Up-Down scheme. The index rises while the user's tasks use
    /// processors. The user with the lowest index is served first.
    pub up_down_index: f64,
}

/// Totals over the tasks of a job or user.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageTotals {
    /// Number of tasks started.
    pub task_count: u64,
    /// Number of tasks that have not ended.
    pub running_tasks: u64,
    /// Number of tasks with an outcome other than exit status 0.
    pub failed_tasks: u64,
    /// Total processor time and largest memory size of all ended tasks.
    pub usage: Usage,
    /// Sum of the run times of all ended tasks, without the times for which they were suspended.
    pub wall_time: Micros,
    pub migrations: u64,
    /// Number of evictions by owners. An eviction by migration also counts in `migrations`; an
    /// eviction that ended a task counts only here.
    pub evictions: u64,
}

/// A recorded decision of the resource manager, or a recorded event on which decisions are based.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Decision {
    /// Number of the decision, ascending.
    pub number: u64,
    /// Time of the decision, in microseconds since 1970.
    pub at: Micros,
    pub kind: DecisionKind,
}

/// The rule by which hosts were selected, or the reason why no host was selected.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlacementRule {
    /// The request names the host.
    #[serde(rename = "Asked")]
    HostRequested,
    /// Hosts are used in turn (round robin).
    #[serde(rename = "InTurn")]
    RoundRobin,
    /// Each task gets the host on which its share of a processor is largest.
    Load {
        /// Name of the first selected host.
        host: String,
        /// Usable speed of `host` in thousandths; 1000 is a processor of default speed.
        permille: u64,
    },
    /// The rank expression of the request determines the order of the hosts.
    Rank,
    /// All tasks must run on the same host.
    SameHost,
    /// An external policy program selects the hosts.
    #[serde(rename = "Chosen")]
    ExternalPolicy,
    /// A limit on the tasks of the user or of the job is reached.
    Limit,
    /// The request's constraints are invalid.
    #[serde(rename = "NotUnderstood")]
    InvalidConstraints,
    /// The request names no host of the virtual machine.
    NoSuchHost,
    #[serde(rename = "NoneFree")]
    NoHostFree,
}

/// One attempt to select hosts for the tasks of a spawn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacementAttempt {
    #[serde(rename = "choice")]
    pub rule: PlacementRule,
    /// Reason for the selection, in one sentence.
    #[serde(rename = "sentence")]
    pub reason: String,
    /// Hosts that were rejected.
    #[serde(rename = "not_used")]
    pub rejected_hosts: Vec<RejectedHost>,
}

/// A host that was rejected for a placement, with the reason.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RejectedHost {
    pub host: String,
    pub why: RejectionReason,
}

/// The reason why a host was rejected for a placement.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum RejectionReason {
    /// The request names another host.
    #[serde(rename = "NotAsked")]
    OtherHostRequested,
    /// The host has another architecture.
    Arch { has: String },
    /// The host's owner is present.
    Owner {
        /// The load watcher's reason, in one sentence.
        why: String,
    },
    /// The host violates a constraint of the request.
    #[serde(rename = "Unmet")]
    ConstraintViolated {
        condition: String,
        /// The host's actual value.
        has: String,
    },
    /// The host was lost or did not answer within the time limit.
    #[serde(rename = "NoAnswer")]
    Unresponsive,
    Other {
        /// The reason in one sentence.
        why: String,
    },
}

impl fmt::Display for RejectionReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherHostRequested => f.write_str("the request names another host"),
            Self::Arch { has } => write!(f, "its architecture is {has}"),
            Self::Owner { why } => write!(f, "its owner is present ({why})"),
            Self::ConstraintViolated { condition, has } => {
                write!(f, "{condition} does not hold ({has})")
            }
            Self::Unresponsive => f.write_str("it did not answer"),
            Self::Other { why } => f.write_str(why),
        }
    }
}

/// Current state of a host as seen by the placement of tasks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum HostState {
    /// The host is not in the virtual machine.
    Gone,
    /// No tasks are placed on the host.
    #[serde(rename = "LeftOut")]
    Excluded {
        /// The reason, if the host is excluded for a reason other than a drain.
        why: Option<RejectionReason>,
        /// The task that requested a drain, if the host is being drained.
        drain_requested_by: Option<Tid>,
    },
    /// Tasks are placed on the host; contains remarks about the host.
    Used(Vec<String>),
}

/// A spawn request in the resource manager's queue, which waits until hosts for its tasks are
/// available.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingSpawn {
    /// The program to spawn.
    pub program: String,
    /// Number of tasks to place.
    pub task_count: u32,
    pub requested_by: Tid,
    /// Job of the requesting task.
    pub job: Tid,
    /// User id of the requesting task.
    pub user: u32,
    /// Start of the wait, in microseconds since 1970.
    pub since: Micros,
    /// Position of the spawn in the queue, from 1.
    pub queue_position: u32,
    /// Result of the last attempt to place the spawn, in one sentence.
    pub last_result: String,
}

/// Expected or actual benefit and cost of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationBenefit {
    /// Time saved by the migration, summed over all affected tasks; 0 for a migration that is
    /// mandatory.
    pub gain: Micros,
    /// Time that the migration costs.
    pub cost: Micros,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_versions_are_recognized_and_garbage_refused() {
        let bytes = encode(&RmQuery::Jobs { user: Some(7) }).expect("it can be written");
        assert_eq!(
            decode::<RmQuery>(&bytes),
            Ok(Some(RmQuery::Jobs { user: Some(7) }))
        );
        let mut newer_query = bytes.clone();
        newer_query[0] = 99;
        assert_eq!(
            (
                decode::<RmQuery>(&newer_query),
                version_prefix(&newer_query)
            ),
            (Ok(None), Some(99))
        );
        assert!(decode::<RmQuery>(&bytes[..1]).is_err());
        assert!(decode::<RmQuery>(&bytes[..2]).is_err());
    }

    /// A placement decision concerns its tasks, the used hosts and the rejected hosts, but not
    /// hosts that the request does not name. The decision is described in one sentence.
    #[test]
    fn decision_concerns_its_tasks_and_hosts() {
        let (job, tid) = (Tid::from_raw(0x40001), Tid::from_raw(0x40002));
        let owner_host = RejectedHost {
            host: "h3".into(),
            why: RejectionReason::Owner {
                why: "olga on pts/1".into(),
            },
        };
        let unnamed_host = RejectedHost {
            host: "h4".into(),
            why: RejectionReason::OtherHostRequested,
        };
        let reason = "largest share of a processor, 1.00 on h2".to_string();
        let rule = PlacementRule::Load {
            host: "h2".into(),
            permille: 1000,
        };
        let decision = DecisionKind::Spawn {
            program: "worker".into(),
            requested_by: job,
            job,
            user: 0,
            count: 1,
            started: vec![(tid, "h2".into())],
            error: None,
            waited: Micros::from_millis(1500),
            attempts: vec![PlacementAttempt {
                rule,
                reason,
                rejected_hosts: vec![owner_host, unnamed_host],
            }],
        };
        let is_about = |task: Tid| decision.concerns_task(|candidate| candidate == task);
        assert!(is_about(tid) && is_about(job) && !is_about(Tid::from_raw(0x40003)));
        assert!(
            decision.concerns_host("h2")
                && decision.concerns_host("h3")
                && !decision.concerns_host("h4")
        );
        assert_eq!(
            decision.to_string(),
            "worker started for t40001 on h2: largest share of a processor, 1.00 on h2; it waited 1.5 s"
        );
    }
}
