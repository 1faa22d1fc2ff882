//! Reserves hosts for a spawn that has waited for a long time. Otherwise smaller requests could use
//! every slot that becomes free, and a large one would never get all its slots.

use super::place::{Ask, not_asked};
use super::{HostView, Snapshot, Together, Wants};
use sempa_proto::{HostId, Micros};
use std::cmp::Reverse;

/// Waiting time after which hosts are reserved for a spawn.
pub const RESERVE_AFTER: Micros = Micros::from_secs(120);

/// Returns the number of tasks of a spawn that a host would accept if it were otherwise empty. 0 if
/// it can never accept one, or accepts no guests at present.
fn takes(snapshot: &Snapshot, ask: &Ask<'_>, wants: &Wants, host: &HostView) -> u64 {
    let closed = host.owner.keeps_out().is_some()
        || host.terms.blocks(ask.user, &ask.request.file).is_some();
    if closed
        || not_asked(ask, host).is_some()
        || ask.without.contains(&host.id)
        || wants.is_never_met(host, snapshot.now)
    {
        return 0;
    }
    let cores = host
        .fresh_sample(snapshot.now)
        .map_or(host.cores, |sampled| sampled.sample.cores)
        .max(1);
    let most = host.terms.limits.guests_max.unwrap_or(cores);
    match wants.together {
        Together::Spread(spread) => u64::from(most.min(spread)),
        Together::Any | Together::SameHost => u64::from(most),
    }
}

/// Returns hosts to reserve for a spawn: together they have slots for all its tasks when their
/// current tasks have ended. Prefers the hosts in `before`, then those with the fewest computing
/// tasks. Empty if all hosts together have too few slots.
pub fn reserve(snapshot: &Snapshot, ask: &Ask<'_>, before: &[HostId]) -> Vec<HostId> {
    let Ok(wants) = Wants::of(ask.request) else {
        return Vec::new();
    };
    let count = u64::from(ask.count);
    let least = if wants.together == Together::SameHost {
        count
    } else {
        1
    };
    let mut hosts: Vec<(Reverse<bool>, usize, HostId, u64)> = (snapshot.hosts.iter())
        .map(|host| (host, takes(snapshot, ask, &wants, host)))
        .filter(|(_, takes)| *takes >= least)
        .map(|(host, takes)| {
            let busy = host.tasks.iter().filter(|task| task.computes()).count();
            (Reverse(before.contains(&host.id)), busy, host.id, takes)
        })
        .collect();
    hosts.sort_unstable();
    let (mut kept, mut room) = (Vec::new(), 0);
    for (.., id, takes) in hosts {
        kept.push(id);
        room += takes;
        if room >= count {
            return kept;
        }
    }
    Vec::new()
}
