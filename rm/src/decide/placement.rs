//! Places the tasks of one spawn (`pvm_spawn`): which hosts the request allows, and how the policy
//! distributes the tasks among them.

use super::chooser::Chooser;
use super::load::{HostLoad, WorkingLoads, limit_exclusion, unknown_reason};
use super::placement_run::{PlacementRun, failed_placement};
use super::{Exclusions, HostView, OwnerState, PlacementPolicy, Rank, ExclusionReason, Snapshot, Constraints, ConstraintsError};
use sempa_proto::task::{SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_HOST, SpawnRequest};
use sempa_proto::{HostId, Micros, PvmError};
use std::fmt;

/// Maximum number of tasks per spawn; larger requests are refused with `OutOfRes`.
pub const SPAWN_TASKS_MAX: u32 = 65_536;
/// In virtual machines with at most this many hosts, a decision explains every host. In larger ones
/// it explains the hosts that it examined and at most this many hosts that accept no guests. Only a
/// request without a placement examines all hosts.
pub const EXPLAINED_HOSTS_MAX: usize = 64;

/// Request to place tasks.
#[derive(Clone, Copy, Debug)]
pub struct PlacementRequest<'a> {
    pub user: u32,
    pub request: &'a SpawnRequest,
    /// Tasks of the request that need a host.
    pub count: u32,
    /// Host of the requesting task: the meaning of `.` in `where`.
    pub caller: HostId,
    /// Hosts of tasks that the new ones will communicate with; hosts near them are preferred.
    pub peers: &'a [HostId],
    /// Hosts that were lost while the request was carried out.
    pub lost_hosts: &'a [HostId],
    /// Hosts that declined tasks of this request shortly before: their daemons know their owners'
    /// wishes first.
    pub declined_by: &'a [HostId],
    /// Hosts that are reserved for another request.
    pub reserved_hosts: &'a [HostId],
}

impl<'a> PlacementRequest<'a> {
    /// Creates a request for `count` tasks without peers and without excluded hosts.
    pub fn new(user: u32, request: &'a SpawnRequest, count: u32, caller: HostId) -> PlacementRequest<'a> {
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

/// Why the tasks are placed as they are, or not placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlacementReason {
    /// The request names the host.
    HostNamed { host: String },
    /// Round robin over the hosts.
    RoundRobin {
        /// Number of hosts that take part.
        hosts: usize,
    },
    /// Each task goes where it gets the largest processor share.
    LargestShare {
        /// Host of the first task.
        host: String,
        /// Share on that host, in thousandths of an ordinary processor.
        usable: u64,
    },
    /// Hosts in the order that the request prefers.
    Rank {
        rank: Rank,
        /// Host of the first task.
        host: String,
    },
    /// All tasks on the one host where they get most.
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
    /// The request matches no host of the virtual machine.
    NoSuchHost,
    /// All hosts that the request matches are excluded or full.
    NoneAvailable,
}

impl fmt::Display for PlacementReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlacementReason::HostNamed { host } => write!(f, "{host} was asked for"),
            PlacementReason::RoundRobin { hosts: 1 } => f.write_str("in turn over one host"),
            PlacementReason::RoundRobin { hosts } => write!(f, "in turn over {hosts} hosts"),
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
            PlacementReason::SameHost { host } => write!(f, "all on one host, and {host} gives them most"),
            PlacementReason::ChooserSelected { by } => write!(f, "chosen by {by}"),
            PlacementReason::ChooserFailed { by, why } => write!(f, "{by} chose no place: {why}"),
            PlacementReason::InvalidConstraints(error) => error.fmt(f),
            PlacementReason::NoSuchHost => f.write_str("no host is what the request names"),
            PlacementReason::NoneAvailable => f.write_str("no host is free"),
        }
    }
}

/// Result of a placement decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// One entry per task, in task order.
    pub hosts: Vec<Result<HostId, PvmError>>,
    pub reason: PlacementReason,
    /// Hosts that were not used, with reasons.
    pub excluded: Exclusions,
    /// Examined hosts whose load is unknown, with the reason.
    pub unknown_load: Vec<String>,
    /// Round-robin position after this placement.
    pub round_robin_last: HostId,
}

impl Placement {
    /// Describes the placement in one sentence for the event log.
    pub fn sentence(&self, snapshot: &Snapshot) -> String {
        let failed = matches!(self.reason, PlacementReason::NoneAvailable | PlacementReason::NoSuchHost);
        let told = snapshot.describe_exclusions(&self.excluded);
        let mut text = self.reason.to_string();
        let placed = self.hosts.iter().filter(|r| r.is_ok()).count();
        if placed > 0 && placed < self.hosts.len() {
            text = format!("{text}; room for {placed} of {}", self.hosts.len());
        }
        if failed && !told.is_empty() {
            text = format!("{text}: {told}");
        } else if !told.is_empty() {
            text = format!("{text}; not used: {told}");
        }
        if !self.unknown_load.is_empty() {
            text = format!("{text}; load unknown: {}", self.unknown_load.join(", "));
        }
        text
    }
}

/// Returns `where` up to the first colon; a directory follows the colon.
pub(super) fn host_part(place: &str) -> &str {
    place.split(':').next().unwrap_or_default()
}

/// Returns why the request itself does not match this host.
pub(super) fn request_exclusion<'a>(ask: &PlacementRequest<'_>, host: &'a HostView) -> Option<ExclusionReason<&'a str>> {
    let (flags, name) = (ask.request.flags, host_part(&ask.request.place));
    let complement = flags & SPAWN_COMPLEMENT != 0;
    let chosen = if flags & SPAWN_HOST != 0 {
        if name == "." {
            host.id == ask.caller
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

/// Returns why a host that the request matches cannot be used.
pub(super) fn fit_exclusion<'a>(
    ask: &PlacementRequest<'_>,
    wants: &Constraints,
    host: &'a HostView,
    now: Micros,
    load: impl Fn() -> HostLoad,
) -> Option<ExclusionReason<&'a str>> {
    if ask.lost_hosts.contains(&host.id) {
        return Some(ExclusionReason::NoAnswer);
    }
    if ask.declined_by.contains(&host.id) {
        return Some(ExclusionReason::Declined);
    }
    if ask.reserved_hosts.contains(&host.id) {
        return Some(ExclusionReason::Reserved);
    }
    if let Some((condition, has)) = wants.first_unmet(host, now, &load) {
        return Some(ExclusionReason::Unmet { condition, has });
    }
    let blocks = || host.guest_policy.block_reason(ask.user, &ask.request.file);
    // Applies also if the spawn names the host: the host's own daemon starts no guest while the
    // owner accepts none.
    host.owner
        .exclusion_reason()
        .or_else(blocks)
        .or_else(|| limit_exclusion(host, now, 0, load))
}

/// Returns why a host is excluded for every request.
pub fn general_exclusion(snapshot: &Snapshot, id: HostId) -> Option<ExclusionReason> {
    let host = snapshot.host(id)?;
    let full = || limit_exclusion(host, snapshot.now, 0, || WorkingLoads::of(snapshot).load(id));
    host.owner.exclusion_reason().or_else(full).map(ExclusionReason::into_owned)
}

/// Returns the restrictions of a host that is not excluded, as sentences.
pub fn host_restrictions(snapshot: &Snapshot, id: HostId) -> Vec<String> {
    let Some(host) = snapshot.host(id) else {
        return Vec::new();
    };
    let mut all = Vec::new();
    if let OwnerState::PossiblyPresent { why, idle_login: true } = &host.owner {
        all.push(format!(
            "tasks go to others first, because its owner may be there ({why})"
        ));
    }
    let limits = &host.guest_policy.limits;
    let programs = limits.programs.iter().map(|pattern| {
        ExclusionReason::ProgramBlocked {
            pattern: pattern.as_str(),
        }
        .to_string()
    });
    let users = limits
        .users
        .iter()
        .map(|user| ExclusionReason::<&str>::UserBlocked { user: *user }.to_string());
    all.extend(programs.chain(users));
    let unknown = unknown_reason(host, snapshot.now).filter(|_| snapshot.policy == PlacementPolicy::Load);
    all.extend(unknown.map(|why| format!("its load is not known ({why})")));
    let moves = host.migration_obstacle.as_ref().filter(|no| no.until > snapshot.now);
    all.extend(moves.map(|no| format!("no running task moves there ({})", no.reason)));
    all
}

/// Places all tasks of a request by the snapshot's policy.
pub fn place(snapshot: &Snapshot, ask: &PlacementRequest<'_>) -> Placement {
    place_with_chooser(snapshot, ask, None)
}

/// Places all tasks of a request. With `chooser`, an external chooser selects among the hosts that
/// fit.
pub fn place_with_chooser(snapshot: &Snapshot, ask: &PlacementRequest<'_>, chooser: Option<&dyn Chooser>) -> Placement {
    match Constraints::from_request(ask.request) {
        Ok(wants) => PlacementRun::new(snapshot, ask, wants).decide(chooser),
        Err(error) => failed_placement(
            snapshot,
            ask,
            PvmError::BadParam,
            PlacementReason::InvalidConstraints(error),
            Exclusions::default(),
        ),
    }
}
