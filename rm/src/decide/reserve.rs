//! Reserves hosts for a spawn that has waited for a long time. Otherwise smaller requests could use
//! every slot that becomes free, and a large one would never get all its slots.

use super::placement_request::{PlacementRequest, request_exclusion};
use super::{Colocation, Constraints, HostView, Snapshot};
use sempa_proto::{HostId, Micros};
use std::cmp::Reverse;

/// Waiting time after which hosts are reserved for a spawn.
pub const RESERVE_AFTER: Micros = Micros::from_secs(120);

/// Returns the number of tasks of a spawn that a host would accept if it were otherwise empty. 0 if
/// it can never accept one, or accepts no guests at present.
fn slots_when_empty(
    snapshot: &Snapshot,
    ask: &PlacementRequest<'_>,
    wants: &Constraints,
    host: &HostView,
) -> u64 {
    let closed = host.owner.exclusion_reason().is_some()
        || host
            .guest_policy
            .block_reason(ask.user, &ask.request.file)
            .is_some();
    if closed
        || request_exclusion(ask, host).is_some()
        || ask.lost_hosts.contains(&host.id)
        || wants.is_never_met(host, snapshot.now)
    {
        return 0;
    }
    let cores = host
        .fresh_sample(snapshot.now)
        .map_or(host.cores, |sampled| sampled.sample.cores)
        .max(1);
    let most = host.guest_policy.limits.guests_max.unwrap_or(cores);
    match wants.colocation {
        Colocation::Spread(spread) => u64::from(most.min(spread)),
        Colocation::Any | Colocation::SameHost => u64::from(most),
    }
}

/// Returns hosts to reserve for a spawn: together they have slots for all its tasks when their
/// current tasks have ended. Prefers the hosts in `previous`, then those with the fewest computing
/// tasks. Empty if all hosts together have too few slots.
pub fn hosts_to_reserve(
    snapshot: &Snapshot,
    ask: &PlacementRequest<'_>,
    previous: &[HostId],
) -> Vec<HostId> {
    let Ok(wants) = Constraints::from_request(ask.request) else {
        return Vec::new();
    };
    let count = u64::from(ask.count);
    let least = if wants.colocation == Colocation::SameHost {
        count
    } else {
        1
    };
    let mut hosts: Vec<(Reverse<bool>, usize, HostId, u64)> = (snapshot.hosts.iter())
        .map(|host| (host, slots_when_empty(snapshot, ask, &wants, host)))
        .filter(|(_, takes)| *takes >= least)
        .map(|(host, takes)| {
            let busy = host.tasks.iter().filter(|task| task.computes()).count();
            (Reverse(previous.contains(&host.id)), busy, host.id, takes)
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
