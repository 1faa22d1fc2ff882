//! Where the tasks of one spawn go (`pvm_spawn`): which hosts the request allows, and how the policy spreads the tasks
//! over them.

use super::load::{Loads, unknown};
use super::{HostView, Policy, Reason, Snapshot};
use sempa_proto::task::{SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_HOST, SpawnRequest};
use sempa_proto::{HostId, PvmError};
use std::collections::BinaryHeap;

/// Tasks of one spawn at most; more are refused with `OutOfRes`.
pub const SPAWN_TASKS_MAX: u32 = 65_536;

/// One request for places.
#[derive(Clone, Copy, Debug)]
pub struct Ask<'a> {
    /// What the task asked for.
    pub request: &'a SpawnRequest,
    /// How many of its tasks need a place now.
    pub count: u32,
    /// The host of the task that asks: what `.` means.
    pub caller: HostId,
    /// Hosts that were lost while this request was carried out.
    pub without: &'a [HostId],
}

impl Ask<'_> {
    /// True when the request names one host or one architecture: if that fails, there is no other place.
    pub fn is_bound(&self) -> bool {
        self.request.flags & (SPAWN_HOST | SPAWN_ARCH) != 0
    }

    /// True when the request names exactly one host, which counts as a person's word.
    pub fn names_host(&self) -> bool {
        self.request.flags & SPAWN_HOST != 0 && self.request.flags & SPAWN_COMPLEMENT == 0
    }
}

/// Where the tasks go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// One entry per task, in the order of the tasks.
    pub hosts: Vec<Result<HostId, PvmError>>,
    /// One sentence.
    pub why: String,
    /// The hosts that were not used, and why not.
    pub excluded: Vec<(HostId, Reason)>,
    /// Where the rotation stands after this.
    pub rotation: HostId,
}

/// `where` up to the first colon; behind it comes a directory.
fn named(place: &str) -> &str {
    place.split(':').next().unwrap_or_default()
}

/// Why the request itself does not allow this host.
fn not_asked(ask: &Ask<'_>, host: &HostView) -> Option<Reason> {
    let (flags, name) = (ask.request.flags, named(&ask.request.place));
    let complement = flags & SPAWN_COMPLEMENT != 0;
    let chosen = if flags & SPAWN_HOST != 0 {
        if name == "." { host.id == ask.caller } else { host.name == name }
    } else if flags & SPAWN_ARCH != 0 {
        host.arch == name
    } else {
        true
    };
    match (chosen, complement) {
        (true, false) | (false, true) => None,
        (true, true) => Some(Reason::Complement),
        (false, false) if flags & SPAWN_HOST != 0 => Some(Reason::OtherHost),
        (false, false) => Some(Reason::OtherArch { has: host.arch.clone() }),
    }
}

/// Why a host that the request allows is not used all the same.
fn not_fit(ask: &Ask<'_>, host: &HostView) -> Option<Reason> {
    if ask.without.contains(&host.id) {
        return Some(Reason::NoAnswer);
    }
    match &host.owner {
        super::Owner::Present { why } if !ask.names_host() => Some(Reason::Owner { why: why.clone() }),
        _ => None,
    }
}

/// Places all tasks of a request together, one after another.
pub fn place(snapshot: &Snapshot, ask: &Ask<'_>) -> Placement {
    let count = ask.count as usize;
    let failed = |error: PvmError, why: String, excluded| Placement {
        hosts: vec![Err(error); count],
        why,
        excluded,
        rotation: snapshot.rotation,
    };
    let (mut excluded, mut fit, mut asked) = (Vec::new(), Vec::new(), 0_usize);
    for host in &snapshot.hosts {
        if let Some(why) = not_asked(ask, host) {
            excluded.push((host.id, why));
            continue;
        }
        asked += 1;
        match not_fit(ask, host) {
            Some(why) => excluded.push((host.id, why)),
            None => fit.push(host.id),
        }
    }
    if asked == 0 {
        return failed(PvmError::NoHost, "no host is what the request names".to_string(), excluded);
    }
    if fit.is_empty() {
        let lost = excluded.iter().any(|(_, why)| *why == Reason::NoAnswer);
        let error = if lost { PvmError::HostFail } else { PvmError::OutOfRes };
        let why = format!("no host is free: {}", snapshot.tell(&excluded));
        return failed(error, why, excluded);
    }
    let (hosts, rotation) = match snapshot.policy {
        Policy::RoundRobin => in_turn(snapshot.rotation, &fit, count),
        Policy::Load => (by_load(snapshot, &fit, count), snapshot.rotation),
    };
    let why = sentence(snapshot, ask, &hosts, &fit, &excluded);
    Placement { hosts: hosts.into_iter().map(Ok).collect(), why, excluded, rotation }
}

/// PVM's way: each host gets a consecutive run of tasks, the first host is the one behind the last one used.
fn in_turn(rotation: HostId, fit: &[HostId], count: usize) -> (Vec<HostId>, HostId) {
    let start = fit.iter().position(|id| *id > rotation).unwrap_or(0);
    let mut hosts = Vec::with_capacity(count);
    for (i, id) in fit[start..].iter().chain(&fit[..start]).enumerate() {
        let share = (count - hosts.len()).div_ceil(fit.len() - i);
        hosts.extend(std::iter::repeat_n(*id, share));
    }
    let last = hosts.last().copied().unwrap_or(rotation);
    (hosts, last)
}

/// Each task goes where it gets most, given where those before it went.
fn by_load(snapshot: &Snapshot, fit: &[HostId], count: usize) -> Vec<HostId> {
    let mut loads = Loads::of(snapshot);
    let mut best: BinaryHeap<_> = fit.iter().map(|id| loads.share(*id)).collect();
    let mut hosts = Vec::with_capacity(count);
    for _ in 0..count {
        let host = best.pop().expect("at least one host is fit, and each is put back").host();
        hosts.push(host);
        loads.add(host);
        best.push(loads.share(host));
    }
    hosts
}

fn sentence(
    snapshot: &Snapshot,
    ask: &Ask<'_>,
    hosts: &[HostId],
    fit: &[HostId],
    excluded: &[(HostId, Reason)],
) -> String {
    let mut why = if ask.names_host() {
        format!("{} was asked for", named(&ask.request.place))
    } else {
        match snapshot.policy {
            Policy::RoundRobin => format!(
                "in turn over {}",
                if fit.len() == 1 { "one host".to_string() } else { format!("{} hosts", fit.len()) }
            ),
            Policy::Load => {
                let best = hosts.first().map(|id| (snapshot.name(*id), Loads::of(snapshot).share(*id)));
                let best = best.map(|(name, share)| format!(", {:.2} on {name}", share.usable as f64 / 1e3));
                format!("largest share of a processor{}", best.unwrap_or_default())
            }
        }
    };
    let told: Vec<_> = excluded.iter().filter(|(_, r)| !matches!(r, Reason::OtherHost | Reason::Complement)).collect();
    if !told.is_empty() {
        let told: Vec<_> = told.into_iter().cloned().collect();
        why = format!("{why}; not used: {}", snapshot.tell(&told));
    }
    if snapshot.policy == Policy::Load && !ask.names_host() {
        let unknown = unknown(snapshot, |id| fit.contains(&id));
        if !unknown.is_empty() {
            why = format!("{why}; load unknown: {}", unknown.join(", "));
        }
    }
    why
}
