//! Places the tasks of one spawn (`pvm_spawn`): which hosts the request allows, and how the policy
//! distributes the tasks among them.

use super::choice::Choice;
use super::load::{Load, Loads, full, why_unknown};
use super::placing::{Placing, nowhere};
use super::{Excluded, HostView, Owner, Policy, Rank, Reason, Snapshot, Wants, WantsError};
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
pub struct Ask<'a> {
    pub user: u32,
    pub request: &'a SpawnRequest,
    /// Number of tasks of the request that need a host.
    pub count: u32,
    /// Host of the requesting task, which `.` in `where` denotes.
    pub caller: HostId,
    /// Hosts of tasks with which the new tasks will communicate. Hosts near them are preferred.
    pub peers: &'a [HostId],
    /// Hosts that were lost while the request was carried out. They are excluded.
    pub without: &'a [HostId],
    /// Hosts that declined tasks of this request shortly before. They are excluded: their daemons
    /// may know of an owner whom the load watcher has not reported yet.
    pub declined: &'a [HostId],
    /// Hosts that are reserved for another request.
    pub kept: &'a [HostId],
}

impl<'a> Ask<'a> {
    /// Creates a request for `count` tasks without peers and without excluded hosts.
    pub fn of(user: u32, request: &'a SpawnRequest, count: u32, caller: HostId) -> Ask<'a> {
        Ask {
            user,
            request,
            count,
            caller,
            peers: &[],
            without: &[],
            declined: &[],
            kept: &[],
        }
    }
}

/// Why a placement has its hosts, or why there is no placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// The request names the host.
    Asked { host: String },
    /// The tasks were distributed round robin.
    InTurn {
        /// Number of hosts among which the tasks were distributed.
        hosts: usize,
    },
    /// Each task was placed on the host with the largest processor share for it.
    Load {
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
    Chosen {
        /// Name of the external chooser.
        by: String,
    },
    /// The external chooser failed or made an invalid choice.
    NotChosen {
        /// Name of the external chooser.
        by: String,
        why: String,
    },
    /// The constraints text is invalid.
    NotUnderstood(WantsError),
    /// No host of the virtual machine matches the request.
    NoSuchHost,
    /// All hosts that match the request are excluded or full.
    NoneFree,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Asked { host } => write!(f, "{host} was asked for"),
            Why::InTurn { hosts: 1 } => f.write_str("in turn over one host"),
            Why::InTurn { hosts } => write!(f, "in turn over {hosts} hosts"),
            Why::Load { host, usable } => {
                write!(
                    f,
                    "largest share of a processor, {:.2} on {host}",
                    *usable as f64 / 1e3
                )
            }
            Why::Rank { rank, host } => {
                write!(
                    f,
                    "{} {}, first {host}",
                    if rank.least { "least" } else { "most" },
                    rank.by
                )
            }
            Why::SameHost { host } => write!(f, "all on one host, and {host} gives them most"),
            Why::Chosen { by } => write!(f, "chosen by {by}"),
            Why::NotChosen { by, why } => write!(f, "{by} chose no place: {why}"),
            Why::NotUnderstood(error) => error.fmt(f),
            Why::NoSuchHost => f.write_str("no host is what the request names"),
            Why::NoneFree => f.write_str("no host is free"),
        }
    }
}

/// Result of a placement decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Host or error of each task, in task order.
    pub hosts: Vec<Result<HostId, PvmError>>,
    pub why: Why,
    /// Hosts that were not used, with the reason for each.
    pub excluded: Excluded,
    /// Examined hosts with unknown load, each as a text with the reason.
    pub unknown: Vec<String>,
    /// Last host used by round robin, including this placement.
    pub rotation: HostId,
}

impl Placement {
    /// Describes the placement in one sentence for the event log.
    pub fn sentence(&self, snapshot: &Snapshot) -> String {
        let failed = matches!(self.why, Why::NoneFree | Why::NoSuchHost);
        let told = snapshot.tell(&self.excluded);
        let mut text = self.why.to_string();
        let placed = self.hosts.iter().filter(|r| r.is_ok()).count();
        if placed > 0 && placed < self.hosts.len() {
            text = format!("{text}; room for {placed} of {}", self.hosts.len());
        }
        if failed && !told.is_empty() {
            text = format!("{text}: {told}");
        } else if !told.is_empty() {
            text = format!("{text}; not used: {told}");
        }
        if !self.unknown.is_empty() {
            text = format!("{text}; load unknown: {}", self.unknown.join(", "));
        }
        text
    }
}

/// Returns the part of a `where` argument before the first colon. A directory follows the colon.
pub(super) fn named(place: &str) -> &str {
    place.split(':').next().unwrap_or_default()
}

/// Returns the reason why the request does not match this host; `None` if it matches.
pub(super) fn not_asked<'a>(ask: &Ask<'_>, host: &'a HostView) -> Option<Reason<&'a str>> {
    let (flags, name) = (ask.request.flags, named(&ask.request.place));
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
        (true, true) => Some(Reason::Complement),
        (false, false) if flags & SPAWN_HOST != 0 => Some(Reason::OtherHost),
        (false, false) => Some(Reason::OtherArch { has: &host.arch }),
    }
}

/// Returns the reason why a host that matches the request cannot be used; `None` if it can.
pub(super) fn not_fit<'a>(
    ask: &Ask<'_>,
    wants: &Wants,
    host: &'a HostView,
    now: Micros,
    load: impl Fn() -> Load,
) -> Option<Reason<&'a str>> {
    if ask.without.contains(&host.id) {
        return Some(Reason::NoAnswer);
    }
    if ask.declined.contains(&host.id) {
        return Some(Reason::Declined);
    }
    if ask.kept.contains(&host.id) {
        return Some(Reason::Kept);
    }
    if let Some((condition, has)) = wants.unmet(host, now, &load) {
        return Some(Reason::Unmet { condition, has });
    }
    let blocks = || host.terms.blocks(ask.user, &ask.request.file);
    // Also excludes a host that the spawn names, because the host's daemon starts no guest while
    // the owner accepts none.
    host.owner
        .keeps_out()
        .or_else(blocks)
        .or_else(|| full(host, now, 0, load))
}

/// Returns the reason why a host is excluded for every request; `None` if it is not.
pub fn left_out(snapshot: &Snapshot, id: HostId) -> Option<Reason> {
    let host = snapshot.host(id)?;
    let full = || full(host, snapshot.now, 0, || Loads::of(snapshot).load(id));
    host.owner.keeps_out().or_else(full).map(Reason::own)
}

/// Returns sentences about the restrictions that apply to a host although it is not excluded.
pub fn used_but(snapshot: &Snapshot, id: HostId) -> Vec<String> {
    let Some(host) = snapshot.host(id) else {
        return Vec::new();
    };
    let mut all = Vec::new();
    if let Owner::Maybe { why, idle: true } = &host.owner {
        all.push(format!(
            "tasks go to others first, because its owner may be there ({why})"
        ));
    }
    let limits = &host.terms.limits;
    let programs = limits.programs.iter().map(|pattern| {
        Reason::Program {
            pattern: pattern.as_str(),
        }
        .to_string()
    });
    let users = limits
        .users
        .iter()
        .map(|user| Reason::<&str>::User { user: *user }.to_string());
    all.extend(programs.chain(users));
    let unknown = why_unknown(host, snapshot.now).filter(|_| snapshot.policy == Policy::Load);
    all.extend(unknown.map(|why| format!("its load is not known ({why})")));
    let moves = host.no_moves.as_ref().filter(|no| no.at > snapshot.now);
    all.extend(moves.map(|no| format!("no running task moves there ({})", no.why)));
    all
}

/// Places all tasks of a request by the snapshot's policy.
pub fn place(snapshot: &Snapshot, ask: &Ask<'_>) -> Placement {
    place_by(snapshot, ask, None)
}

/// Places all tasks of a request. If `choice` is given, that external chooser selects among the
/// suitable hosts.
pub fn place_by(snapshot: &Snapshot, ask: &Ask<'_>, choice: Option<&dyn Choice>) -> Placement {
    match Wants::of(ask.request) {
        Ok(wants) => Placing::new(snapshot, ask, wants).decide(choice),
        Err(error) => nowhere(
            snapshot,
            ask,
            PvmError::BadParam,
            Why::NotUnderstood(error),
            Excluded::default(),
        ),
    }
}
