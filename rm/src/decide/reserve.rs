//! Reserves hosts for a spawn that has waited for a long time. Otherwise smaller requests could use
//! every slot that becomes free, and a large request would never get all its slots.

use super::placement_request::{PlacementRequest, request_exclusion};
use super::{Colocation, Constraints, HostView, Snapshot};
use sempa_proto::{HostId, Micros};
use std::cmp::Reverse;

/// Waiting time after which hosts are reserved for a spawn.
pub const RESERVATION_DELAY: Micros = Micros::from_secs(120);

/// Returns the number of tasks of a spawn that a host would accept if no other task ran there.
/// Returns 0 if the host can never accept one of the tasks, or accepts no guests at present.
fn slots_when_empty(
    snapshot: &Snapshot,
    placement_request: &PlacementRequest<'_>,
    constraints: &Constraints,
    host: &HostView,
) -> u64 {
    let is_closed = host.owner.exclusion_reason().is_some()
        || host
            .guest_policy
            .block_reason(
                placement_request.user,
                &placement_request.spawn_request.program,
            )
            .is_some();
    if is_closed
        || request_exclusion(placement_request, host).is_some()
        || placement_request.lost_hosts.contains(&host.id)
        || constraints.is_never_met(host, snapshot.now)
    {
        return 0;
    }
    let cores = host
        .recent_sample(snapshot.now)
        .map_or(host.cores, |timed_sample| timed_sample.sample.cores)
        .max(1);
    let guest_limit = host.guest_policy.limits.guests_max.unwrap_or(cores);
    match constraints.colocation {
        Colocation::Spread(tasks_per_host) => u64::from(guest_limit.min(tasks_per_host)),
        Colocation::Any | Colocation::SameHost => u64::from(guest_limit),
    }
}

/// Returns hosts to reserve for a spawn. Together these hosts have slots for all tasks of the spawn
/// when the tasks that now run on them have ended. Hosts in `previous_hosts` come first, then the
/// hosts with the fewest computing tasks. Returns an empty list if all hosts together have too few
/// slots.
pub fn hosts_to_reserve(
    snapshot: &Snapshot,
    placement_request: &PlacementRequest<'_>,
    previous_hosts: &[HostId],
) -> Vec<HostId> {
    let Ok(constraints) = Constraints::from_request(placement_request.spawn_request) else {
        return Vec::new();
    };
    let task_count = u64::from(placement_request.task_count);
    let host_slots_min = if constraints.colocation == Colocation::SameHost {
        task_count
    } else {
        1
    };
    let mut hosts: Vec<(Reverse<bool>, usize, HostId, u64)> = (snapshot.hosts.iter())
        .map(|host| {
            (
                host,
                slots_when_empty(snapshot, placement_request, &constraints, host),
            )
        })
        .filter(|(_, slots)| *slots >= host_slots_min)
        .map(|(host, slots)| {
            let computing_task_count = host.tasks.iter().filter(|task| task.computes()).count();
            (
                Reverse(previous_hosts.contains(&host.id)),
                computing_task_count,
                host.id,
                slots,
            )
        })
        .collect();
    hosts.sort_unstable();
    let (mut reserved_hosts, mut slot_sum) = (Vec::new(), 0);
    for (.., id, slots) in hosts {
        reserved_hosts.push(id);
        slot_sum += slots;
        if slot_sum >= task_count {
            return reserved_hosts;
        }
    }
    Vec::new()
}
