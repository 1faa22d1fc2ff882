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
/// In virtual machines with at most this many hosts, a decision explains every host. In larger ones
/// it explains the hosts that it examined and at most this many hosts that accept no guests. Only a
/// request without a placement examines all hosts.
pub const EXPLAINED_HOSTS_MAX: usize = 64;

/// Request to place tasks.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    pub user: u32,
    pub request: &'a SpawnRequest,
    /// Tasks of the request that need a host.
    pub count: u32,
    /// Host of the requesting task: the meaning of `.` in `where`.
    pub caller: HostId,
    /// Hosts of tasks that the new ones will communicate with; hosts near them are preferred.
    pub peers: &'a [HostId],
    /// Hosts that were lost while the request was carried out.
    pub without: &'a [HostId],
    /// Hosts that declined tasks of this request shortly before: their daemons know their owners'
    /// wishes first.
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

/// Why the tasks are placed as they are, or not placed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// The request names the host.
    Asked { host: String },
    /// Round robin over the hosts.
    InTurn {
        /// Number of hosts that take part.
        hosts: usize,
    },
    /// Each task goes where it gets the largest processor share.
    Load {
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
    /// The request matches no host of the virtual machine.
    NoSuchHost,
    /// All hosts that the request matches are excluded or full.
    NoneFree,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::Asked { host } => write!(f, "the request names {host}"),
            Why::InTurn { hosts: 1 } => f.write_str("round robin over one host"),
            Why::InTurn { hosts } => write!(f, "round robin over {hosts} hosts"),
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
            Why::SameHost { host } => write!(f, "all on one host; {host} has the most to offer"),
            Why::Chosen { by } => write!(f, "chosen by {by}"),
            Why::NotChosen { by, why } => write!(f, "{by} chose no host: {why}"),
            Why::NotUnderstood(error) => error.fmt(f),
            Why::NoSuchHost => f.write_str("no host matches the request"),
            Why::NoneFree => f.write_str("no host is free"),
        }
    }
}

/// Result of a placement decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// One entry per task, in task order.
    pub hosts: Vec<Result<HostId, PvmError>>,
    pub why: Why,
    /// Hosts that were not used, with reasons.
    pub excluded: Excluded,
    /// Examined hosts whose load is unknown, with the reason.
    pub unknown: Vec<String>,
    /// Round-robin position after this placement.
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

/// Returns `where` up to the first colon; a directory follows the colon.
pub(super) fn named(place: &str) -> &str {
    place.split(':').next().unwrap_or_default()
}

/// Returns why the request itself does not match this host.
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

/// Returns why a host that the request matches cannot be used.
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
    // Applies also if the spawn names the host: the host's own daemon starts no guest while the
    // owner accepts none.
    host.owner
        .keeps_out()
        .or_else(blocks)
        .or_else(|| full(host, now, 0, load))
}

/// Returns why a host is excluded for every request.
pub fn left_out(snapshot: &Snapshot, id: HostId) -> Option<Reason> {
    let host = snapshot.host(id)?;
    let full = || full(host, snapshot.now, 0, || Loads::of(snapshot).load(id));
    host.owner.keeps_out().or_else(full).map(Reason::own)
}

/// Returns the restrictions of a host that is not excluded, as sentences.
pub fn used_but(snapshot: &Snapshot, id: HostId) -> Vec<String> {
    let Some(host) = snapshot.host(id) else {
        return Vec::new();
    };
    let mut all = Vec::new();
    if let Owner::Maybe { why, idle: true } = &host.owner {
        all.push(format!(
            "other hosts are preferred, because its owner may be present ({why})"
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
    all.extend(moves.map(|no| format!("no running task migrates there ({})", no.why)));
    all
}

/// Places all tasks of a request by the snapshot's policy.
pub fn place(snapshot: &Snapshot, ask: &Ask<'_>) -> Placement {
    place_by(snapshot, ask, None)
}

/// Places all tasks of a request. With `choice`, an external chooser selects among the hosts that
/// fit.
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
