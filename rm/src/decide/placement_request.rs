//! Request and result of a placement. Also checks which hosts a spawn request excludes.

use super::host_load::HostLoad;
use super::load::limit_exclusion;
use super::{Constraints, ConstraintsError, ExclusionReason, Exclusions, HostView, Rank, Snapshot};
use sempa_proto::task::{SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_HOST, SpawnRequest};
use sempa_proto::{HostId, Micros, PvmError};
use std::fmt;

/// Maximum number of tasks per spawn; larger requests are refused with `OutOfRes`.
pub const SPAWN_TASKS_MAX: u32 = 65_536;
/// Number of hosts up to which every placement decision explains all hosts. In larger virtual
/// machines a decision explains the hosts that it examined, and at most this many hosts that accept
/// no guests. All hosts are examined only if the request gets no placement.
pub const EXPLAINED_HOSTS_MAX: usize = 64;

/// Input of a placement decision, in addition to the snapshot.
#[derive(Clone, Copy, Debug)]
pub struct PlacementRequest<'a> {
    pub user: u32,
    pub spawn_request: &'a SpawnRequest,
    /// Number of tasks of the request that need a host.
    pub task_count: u32,
    /// Host of the requesting task. `.` in `where` denotes this host.
    pub caller_host: HostId,
    /// Hosts of tasks with which the new tasks will communicate. Hosts with fast links to these
    /// hosts are preferred.
    pub peer_hosts: &'a [HostId],
    /// Hosts that were lost while the request was carried out. They are excluded.
    pub lost_hosts: &'a [HostId],
    /// Hosts that declined tasks of this request shortly before. They are excluded, because their
    /// daemons may know of an owner whom the load watcher has not reported yet.
    pub declining_hosts: &'a [HostId],
    /// Hosts that are reserved for another request.
    pub reserved_hosts: &'a [HostId],
}

impl<'a> PlacementRequest<'a> {
    /// Creates a request for `count` tasks without peers and without excluded hosts.
    pub fn new(user: u32, request: &'a SpawnRequest, count: u32, caller: HostId) -> Self {
        PlacementRequest {
            user,
            spawn_request: request,
            task_count: count,
            caller_host: caller,
            peer_hosts: &[],
            lost_hosts: &[],
            declining_hosts: &[],
            reserved_hosts: &[],
        }
    }
}

/// Reason for the hosts of a placement, or reason why there is no placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacementReason {
    /// The request names the host.
    HostNamed { host: String },
    /// The tasks were distributed round robin.
    RoundRobin {
        /// Number of hosts among which the tasks were distributed.
        host_count: usize,
    },
    /// Each task was placed on the host with the largest processor share for it.
    LargestShare {
        /// Host of the first task.
        host: String,
        /// Share on that host, in thousandths of an ordinary processor.
        usable_permille: u64,
    },
    /// The hosts were used in the order that the request prefers.
    Rank {
        rank: Rank,
        /// Host of the first task.
        host: String,
    },
    /// All tasks were placed on one host: the host with the largest share for them among the hosts
    /// with room for all tasks.
    SameHost { host: String },
    /// An external chooser selected the hosts.
    ChooserSelected {
        /// Name of the external chooser.
        chooser: String,
    },
    /// The external chooser failed or made an invalid selection.
    ChooserFailed {
        /// Name of the external chooser.
        chooser: String,
        why: String,
    },
    /// The constraints text is invalid.
    InvalidConstraints(ConstraintsError),
    /// No host of the virtual machine matches the request.
    NoSuchHost,
    /// All hosts that match the request are excluded or full.
    NoneAvailable,
}

impl fmt::Display for PlacementReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::HostNamed { host } => write!(f, "the request names {host}"),
            Self::RoundRobin { host_count: 1 } => f.write_str("round robin over one host"),
            Self::RoundRobin {
                host_count: hosts_total,
            } => write!(f, "round robin over {hosts_total} hosts"),
            Self::LargestShare {
                host,
                usable_permille: usable_share,
            } => {
                write!(
                    f,
                    "largest share of a processor, {:.2} on {host}",
                    *usable_share as f64 / 1e3
                )
            }
            Self::Rank { rank, host } => {
                write!(
                    f,
                    "{} {}, first {host}",
                    if rank.ascending { "least" } else { "most" },
                    rank.metric
                )
            }
            Self::SameHost { host } => {
                write!(f, "all on one host; {host} has the most to offer")
            }
            Self::ChooserSelected {
                chooser: chooser_name,
            } => write!(f, "chosen by {chooser_name}"),
            Self::ChooserFailed {
                chooser: chooser_name,
                why,
            } => write!(f, "{chooser_name} chose no host: {why}"),
            Self::InvalidConstraints(error) => error.fmt(f),
            Self::NoSuchHost => f.write_str("no host matches the request"),
            Self::NoneAvailable => f.write_str("no host is free"),
        }
    }
}

/// Result of a placement decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Host of each task, or the error for a task without a host, in task order.
    pub hosts: Vec<Result<HostId, PvmError>>,
    pub reason: PlacementReason,
    /// Hosts that were not used, with the reason for each.
    pub exclusions: Exclusions,
    /// Examined hosts with unknown load, each as a text with the reason.
    pub unknown_load: Vec<String>,
    /// Last host used by round robin, including this placement.
    pub last_round_robin_host: HostId,
}

impl Placement {
    /// Describes the placement in one sentence for the event log.
    pub fn describe(&self, snapshot: &Snapshot) -> String {
        let is_failure = matches!(
            self.reason,
            PlacementReason::NoneAvailable | PlacementReason::NoSuchHost
        );
        let exclusions = snapshot.describe_exclusions(&self.exclusions);
        let mut description = self.reason.to_string();
        let placed_count = self.hosts.iter().filter(|r| r.is_ok()).count();
        if placed_count > 0 && placed_count < self.hosts.len() {
            description = format!(
                "{description}; room for {placed_count} of {}",
                self.hosts.len()
            );
        }
        if is_failure && !exclusions.is_empty() {
            description = format!("{description}: {exclusions}");
        } else if !exclusions.is_empty() {
            description = format!("{description}; not used: {exclusions}");
        }
        if !self.unknown_load.is_empty() {
            description = format!(
                "{description}; load unknown: {}",
                self.unknown_load.join(", ")
            );
        }
        description
    }
}

/// Returns a placement in which no task gets a host.
pub(super) fn failed_placement(
    snapshot: &Snapshot,
    request: &PlacementRequest<'_>,
    error: PvmError,
    placement_reason: PlacementReason,
    excluded_hosts: Exclusions,
) -> Placement {
    let hosts = vec![Err(error); request.task_count as usize];
    Placement {
        hosts,
        reason: placement_reason,
        exclusions: excluded_hosts,
        unknown_load: Vec::new(),
        last_round_robin_host: snapshot.last_round_robin_host,
    }
}

/// Returns the part of a `where` argument before the first colon. A directory follows the colon.
pub(super) fn where_host(where_text: &str) -> &str {
    where_text.split(':').next().unwrap_or_default()
}

/// Returns the reason why the request does not match this host; `None` if the request matches.
pub(super) fn request_exclusion<'a>(
    request: &PlacementRequest<'_>,
    host: &'a HostView,
) -> Option<ExclusionReason<&'a str>> {
    let (where_flags, where_name) = (
        request.spawn_request.flags,
        where_host(&request.spawn_request.where_arg),
    );
    let is_complement = where_flags & SPAWN_COMPLEMENT != 0;
    let is_named = if where_flags & SPAWN_HOST != 0 {
        if where_name == "." {
            host.id == request.caller_host
        } else {
            host.name == where_name
        }
    } else if where_flags & SPAWN_ARCH != 0 {
        host.arch == where_name
    } else {
        true
    };
    match (is_named, is_complement) {
        (true, false) | (false, true) => None,
        (true, true) => Some(ExclusionReason::Complement),
        (false, false) if where_flags & SPAWN_HOST != 0 => Some(ExclusionReason::OtherHost),
        (false, false) => Some(ExclusionReason::OtherArch { arch: &host.arch }),
    }
}

/// Returns the reason why a host that matches the request cannot be used; `None` if the host can be
/// used.
pub(super) fn fit_exclusion<'a>(
    request: &PlacementRequest<'_>,
    constraints: &Constraints,
    host: &'a HostView,
    now: Micros,
    load: impl Fn() -> HostLoad,
) -> Option<ExclusionReason<&'a str>> {
    if request.lost_hosts.contains(&host.id) {
        return Some(ExclusionReason::NoAnswer);
    }
    if request.declining_hosts.contains(&host.id) {
        return Some(ExclusionReason::Declined);
    }
    if request.reserved_hosts.contains(&host.id) {
        return Some(ExclusionReason::Reserved);
    }
    if let Some((condition, actual_value)) = constraints.first_unmet(host, now, &load) {
        return Some(ExclusionReason::UnmetCondition {
            condition,
            actual: actual_value,
        });
    }
    let policy_exclusion = || {
        host.guest_policy
            .block_reason(request.user, &request.spawn_request.program)
    };
    // Also excludes a host that the spawn names, because the host's daemon starts no guest while
    // the owner accepts none.
    host.owner
        .exclusion_reason()
        .or_else(policy_exclusion)
        .or_else(|| limit_exclusion(host, now, 0, load))
}
