//! Request and result of a placement: what a spawn asks for, which hosts that excludes, and which
//! hosts the tasks get, with the reason.

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
    pub request: &'a SpawnRequest,
    /// Number of tasks of the request that need a host.
    pub count: u32,
    /// Host of the requesting task, which `.` in `where` denotes.
    pub caller: HostId,
    /// Hosts of tasks with which the new tasks will communicate. Hosts near them are preferred.
    pub peers: &'a [HostId],
    /// Hosts that were lost while the request was carried out. They are excluded.
    pub lost_hosts: &'a [HostId],
    /// Hosts that declined tasks of this request shortly before. They are excluded: their daemons
    /// may know of an owner whom the load watcher has not reported yet.
    pub declined_by: &'a [HostId],
    /// Hosts that are reserved for another request.
    pub reserved_hosts: &'a [HostId],
}

impl<'a> PlacementRequest<'a> {
    /// Creates a request for `count` tasks without peers and without excluded hosts.
    pub fn new(
        user: u32,
        request: &'a SpawnRequest,
        count: u32,
        caller: HostId,
    ) -> PlacementRequest<'a> {
        PlacementRequest {
            user,
            request,
            count,
            caller,
            peers: &[],
            lost_hosts: &[],
            declined_by: &[],
            reserved_hosts: &[],
        }
    }
}

/// Why a placement has its hosts, or why there is no placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacementReason {
    /// The request names the host.
    HostNamed { host: String },
    /// The tasks were distributed round robin.
    RoundRobin {
        /// Number of hosts among which the tasks were distributed.
        hosts: usize,
    },
    /// Each task was placed on the host with the largest processor share for it.
    LargestShare {
        /// Host of the first task.
        host: String,
        /// Share on that host, in thousandths of an ordinary processor.
        usable: u64,
    },
    /// The hosts were used in the order that the request prefers.
    Rank {
        rank: Rank,
        /// Host of the first task.
        host: String,
    },
    /// All tasks were placed on the one host where they get the largest share together.
    SameHost { host: String },
    /// An external chooser selected the hosts.
    ChooserSelected {
        /// Name of the external chooser.
        by: String,
    },
    /// The external chooser failed or made an invalid choice.
    ChooserFailed {
        /// Name of the external chooser.
        by: String,
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
            PlacementReason::HostNamed { host } => write!(f, "the request names {host}"),
            PlacementReason::RoundRobin { hosts: 1 } => f.write_str("round robin over one host"),
            PlacementReason::RoundRobin { hosts } => write!(f, "round robin over {hosts} hosts"),
            PlacementReason::LargestShare { host, usable } => {
                write!(
                    f,
                    "largest share of a processor, {:.2} on {host}",
                    *usable as f64 / 1e3
                )
            }
            PlacementReason::Rank { rank, host } => {
                write!(
                    f,
                    "{} {}, first {host}",
                    if rank.ascending { "least" } else { "most" },
                    rank.by
                )
            }
            PlacementReason::SameHost { host } => {
                write!(f, "all on one host; {host} has the most to offer")
            }
            PlacementReason::ChooserSelected { by } => write!(f, "chosen by {by}"),
            PlacementReason::ChooserFailed { by, why } => write!(f, "{by} chose no host: {why}"),
            PlacementReason::InvalidConstraints(error) => error.fmt(f),
            PlacementReason::NoSuchHost => f.write_str("no host matches the request"),
            PlacementReason::NoneAvailable => f.write_str("no host is free"),
        }
    }
}

/// Result of a placement decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Host or error of each task, in task order.
    pub hosts: Vec<Result<HostId, PvmError>>,
    pub reason: PlacementReason,
    /// Hosts that were not used, with the reason for each.
    pub excluded: Exclusions,
    /// Examined hosts with unknown load, each as a text with the reason.
    pub unknown_load: Vec<String>,
    /// Last host used by round robin, including this placement.
    pub round_robin_last: HostId,
}

impl Placement {
    /// Describes the placement in one sentence for the event log.
    pub fn sentence(&self, snapshot: &Snapshot) -> String {
        let failed = matches!(
            self.reason,
            PlacementReason::NoneAvailable | PlacementReason::NoSuchHost
        );
        let exclusions = snapshot.describe_exclusions(&self.excluded);
        let mut text = self.reason.to_string();
        let placed = self.hosts.iter().filter(|r| r.is_ok()).count();
        if placed > 0 && placed < self.hosts.len() {
            text = format!("{text}; room for {placed} of {}", self.hosts.len());
        }
        if failed && !exclusions.is_empty() {
            text = format!("{text}: {exclusions}");
        } else if !exclusions.is_empty() {
            text = format!("{text}; not used: {exclusions}");
        }
        if !self.unknown_load.is_empty() {
            text = format!("{text}; load unknown: {}", self.unknown_load.join(", "));
        }
        text
    }
}

/// Returns a placement in which no task gets a host.
pub(super) fn failed_placement(
    snapshot: &Snapshot,
    request: &PlacementRequest<'_>,
    error: PvmError,
    why: PlacementReason,
    excluded: Exclusions,
) -> Placement {
    let hosts = vec![Err(error); request.count as usize];
    Placement {
        hosts,
        reason: why,
        excluded,
        unknown_load: Vec::new(),
        round_robin_last: snapshot.round_robin_last,
    }
}

/// Returns the part of a `where` argument before the first colon. A directory follows the colon.
pub(super) fn host_part(place: &str) -> &str {
    place.split(':').next().unwrap_or_default()
}

/// Returns the reason why the request does not match this host; `None` if it matches.
pub(super) fn request_exclusion<'a>(
    request: &PlacementRequest<'_>,
    host: &'a HostView,
) -> Option<ExclusionReason<&'a str>> {
    let (flags, name) = (request.request.flags, host_part(&request.request.place));
    let complement = flags & SPAWN_COMPLEMENT != 0;
    let chosen = if flags & SPAWN_HOST != 0 {
        if name == "." {
            host.id == request.caller
        } else {
            host.name == name
        }
    } else if flags & SPAWN_ARCH != 0 {
        host.arch == name
    } else {
        true
    };
    match (chosen, complement) {
        (true, false) | (false, true) => None,
        (true, true) => Some(ExclusionReason::Complement),
        (false, false) if flags & SPAWN_HOST != 0 => Some(ExclusionReason::OtherHost),
        (false, false) => Some(ExclusionReason::OtherArch { has: &host.arch }),
    }
}

/// Returns the reason why a host that matches the request cannot be used; `None` if it can.
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
    if request.declined_by.contains(&host.id) {
        return Some(ExclusionReason::Declined);
    }
    if request.reserved_hosts.contains(&host.id) {
        return Some(ExclusionReason::Reserved);
    }
    if let Some((condition, has)) = constraints.first_unmet(host, now, &load) {
        return Some(ExclusionReason::Unmet { condition, has });
    }
    let blocks = || {
        host.guest_policy
            .block_reason(request.user, &request.request.file)
    };
    // Also excludes a host that the spawn names, because the host's daemon starts no guest while
    // the owner accepts none.
    host.owner
        .exclusion_reason()
        .or_else(blocks)
        .or_else(|| limit_exclusion(host, now, 0, load))
}
