//! Where the tasks of one spawn go (`pvm_spawn`): which hosts the request allows, and how the policy spreads the tasks
//! over them.

use super::choice::Choice;
use super::load::{Load, Loads, full, why_unknown};
use super::placing::{Placing, nowhere};
use super::{Excluded, HostView, Owner, Policy, Rank, Reason, Snapshot, Wants, WantsError};
use sempa_proto::task::{SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_HOST, SpawnRequest};
use sempa_proto::{HostId, Micros, PvmError};
use std::fmt;

/// Tasks of one spawn at most; more are refused with `OutOfRes`.
pub const SPAWN_TASKS_MAX: u32 = 65_536;
/// In virtual machines of at most so many hosts a decision speaks of all of them. In larger ones, it speaks of those that
/// were looked at, and of as many beside an owner; only a request that finds no place looks at all.
pub const EXPLAINED_HOSTS_MAX: usize = 64;

/// One request for places.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// The user of the task that asks.
    pub user: u32,
    /// What the task asked for.
    pub request: &'a SpawnRequest,
    /// How many of its tasks need a place now.
    pub count: u32,
    /// The host of the task that asks: what `.` means.
    pub caller: HostId,
    /// Hosts of tasks with which the new ones will talk; hosts near them count for more.
    pub peers: &'a [HostId],
    /// Hosts that were lost while this request was carried out.
    pub without: &'a [HostId],
    /// Hosts that took none of its tasks a moment ago: their owners know more than this host does.
    pub declined: &'a [HostId],
    /// Hosts that are kept for another request.
    pub kept: &'a [HostId],
}

impl<'a> Ask<'a> {
    /// For so many tasks of a request, with no host near to anybody, and none left out.
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

/// Why the tasks go where they go, or nowhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Why {
    /// The request names the host.
    Asked {
        /// Its name.
        host: String,
    },
    /// One after another.
    InTurn {
        /// How many take part.
        hosts: usize,
    },
    /// Where a task gets most of a processor.
    Load {
        /// The first one.
        host: String,
        /// Thousandths of an ordinary processor there.
        usable: u64,
    },
    /// By the number that the request prefers.
    Rank {
        /// The preference.
        rank: Rank,
        /// The first one.
        host: String,
    },
    /// All on the one host where they get most.
    SameHost {
        /// Its name.
        host: String,
    },
    /// Somebody else chose.
    Chosen {
        /// Who.
        by: String,
    },
    /// Somebody else chose nothing, or what cannot be.
    NotChosen {
        /// Who.
        by: String,
        /// What is wrong.
        why: String,
    },
    /// The requirements are not understood.
    NotUnderstood(WantsError),
    /// The request names no host of the virtual machine.
    NoSuchHost,
    /// All hosts that the request names are excluded.
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

/// Where the tasks go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// One entry per task, in the order of the tasks.
    pub hosts: Vec<Result<HostId, PvmError>>,
    /// Why.
    pub why: Why,
    /// Hosts that were not used, and why not.
    pub excluded: Excluded,
    /// Hosts that were looked at although their load is unknown, with the reason.
    pub unknown: Vec<String>,
    /// Where the rotation stands after this.
    pub rotation: HostId,
}

impl Placement {
    /// One sentence for the event log.
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

/// `where` up to the first colon; behind it comes a directory.
pub(super) fn named(place: &str) -> &str {
    place.split(':').next().unwrap_or_default()
}

/// Why the request itself does not allow this host.
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

/// Why a host that the request allows is not used all the same.
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
    // Also where a spawn names it: the host's own daemon starts no guest beside its owner.
    host.owner
        .keeps_out()
        .or_else(blocks)
        .or_else(|| full(host, now, 0, load))
}

/// Why a host is not used whoever asks.
pub fn left_out(snapshot: &Snapshot, id: HostId) -> Option<Reason> {
    let host = snapshot.host(id)?;
    let full = || full(host, snapshot.now, 0, || Loads::of(snapshot).load(id));
    host.owner.keeps_out().or_else(full).map(Reason::own)
}

/// What there is to say of a host that is used all the same.
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

/// Places all tasks of a request together, by the snapshot's policy.
pub fn place(snapshot: &Snapshot, ask: &Ask<'_>) -> Placement {
    place_by(snapshot, ask, None)
}

/// Places all tasks of a request together; somebody else may choose among the hosts that are fit.
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
