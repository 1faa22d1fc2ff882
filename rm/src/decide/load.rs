//! Load of all hosts during a decision. Ranks the hosts by the processor share that one more task
//! would get. The tasks that the decision has already placed are included. Also states which limits
//! of a host exclude one more task, and which loads are unknown.

use super::host_load::{HostLoad, ProcessorShare};
use super::index::{HostIndex, merge_descending};
use super::{ExclusionReason, HostView, SAMPLE_AGE_MAX, Snapshot};
use sempa_proto::load::FREE_BYTES_PER_TASK_MIN;
use sempa_proto::{HostId, Micros};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// Returns the reason if the owner's limits exclude one more task with `task_bytes` of memory;
/// otherwise `None`.
pub(super) fn limit_exclusion(
    host: &HostView,
    now: Micros,
    task_bytes: u64,
    load: impl Fn() -> HostLoad,
) -> Option<ExclusionReason<&str>> {
    let limits = &host.guest_policy.limits;
    if let Some(limit) = limits
        .stated_guests_max()
        .filter(|_| load().remaining_slots() == 0)
    {
        return Some(ExclusionReason::TaskLimit { limit });
    }
    let (reserved_bytes, free_bytes) = (
        limits.free_memory_bytes,
        host.recent_sample(now)?.sample.available_bytes,
    );
    (reserved_bytes > 0
        && free_bytes < reserved_bytes.saturating_add(task_bytes.max(FREE_BYTES_PER_TASK_MIN)))
    .then_some(ExclusionReason::MemoryReserved {
        reserved_bytes,
        free_bytes,
    })
}

/// A host with its share, weighted for the peers of one task. The slower the link to the peers is,
/// the lower is the weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WeightedShare {
    unattended: bool,
    has_memory: bool,
    weighted_usable: u64,
    pub(super) share: ProcessorShare,
}

impl WeightedShare {
    fn new(share: ProcessorShare, permille: u32) -> Self {
        Self {
            unattended: share.unattended,
            has_memory: share.has_memory,
            weighted_usable: share.usable_permille * u64::from(permille),
            share,
        }
    }
}

/// Load of all hosts during a decision. Each task that the decision places changes the load of its
/// host.
#[derive(Debug)]
pub(super) struct WorkingLoads<'a> {
    index: Cow<'a, HostIndex>,
    snapshot: &'a Snapshot,
    changed_loads: BTreeMap<HostId, HostLoad>,
    changed_shares: BTreeSet<ProcessorShare>,
}

impl<'a> WorkingLoads<'a> {
    /// Creates the loads as of the snapshot. A migrating task counts on its target.
    pub(super) fn new(snapshot: &'a Snapshot) -> Self {
        let index = snapshot.hosts.index(snapshot.now);
        WorkingLoads {
            index,
            snapshot,
            changed_loads: BTreeMap::new(),
            changed_shares: BTreeSet::new(),
        }
    }

    pub(super) fn load(&self, host: HostId) -> HostLoad {
        let indexed_load = || {
            self.index
                .load(host)
                .expect("loads are made from the snapshot's hosts")
        };
        self.changed_loads
            .get(&host)
            .copied()
            .unwrap_or_else(indexed_load)
    }

    /// Returns the share that one more task would get on a host of the snapshot.
    pub(super) fn share(&self, host: HostId) -> ProcessorShare {
        self.load(host).share()
    }

    /// Adds a task to a host of the snapshot. Returns the share that the next task would get on
    /// this host.
    pub(super) fn add_task(&mut self, host: HostId) -> ProcessorShare {
        let previous_load = self.load(host);
        let new_load = HostLoad {
            vm_task_count: previous_load.vm_task_count + 1,
            memory_slots: previous_load.memory_slots.saturating_sub(1),
            ..previous_load
        };
        self.set_load(host, new_load)
    }

    /// Sets the number of tasks of the virtual machine on a host of the snapshot.
    pub(super) fn set_vm_task_count(&mut self, host: HostId, count: u32) {
        let new_load = HostLoad {
            vm_task_count: count,
            ..self.load(host)
        };
        self.set_load(host, new_load);
    }

    fn set_load(&mut self, host: HostId, new_load: HostLoad) -> ProcessorShare {
        if let Some(previous_load) = self.changed_loads.insert(host, new_load) {
            self.changed_shares.remove(&previous_load.share());
        }
        if self.index.is_ranked(host) {
            self.changed_shares.insert(new_load.share());
        }
        new_load.share()
    }

    /// Returns the weight of a processor share on a host, in thousandths, for a task with peers in
    /// the zones `peer_zones`.
    pub(super) fn weight_permille(&self, host: HostId, peer_zones: &BTreeSet<u32>) -> u32 {
        self.index.zone(host).map_or(1000, |zone| {
            self.snapshot.zone_weight_permille(zone, peer_zones)
        })
    }

    pub(super) fn weighted_share(
        &self,
        share: ProcessorShare,
        peer_zones: &BTreeSet<u32>,
    ) -> WeightedShare {
        WeightedShare::new(share, self.weight_permille(share.host(), peer_zones))
    }

    /// Returns the hosts that accept guests, the best first. The iterator is lazy: it evaluates
    /// only the hosts that the caller requests.
    pub(super) fn shares_best_first(
        &self,
        peer_zones: &BTreeSet<u32>,
    ) -> impl Iterator<Item = WeightedShare> {
        let sorted_shares = self.index.shares_by_zone().map(|(zone, shares)| {
            let permille = self.snapshot.zone_weight_permille(*zone, peer_zones);
            let unchanged_shares = shares
                .iter()
                .rev()
                .filter(|s| !self.changed_loads.contains_key(&s.host()));
            unchanged_shares.map(move |s| WeightedShare::new(*s, permille))
        });
        let mut sorted_shares = merge_descending(sorted_shares).peekable();
        let mut changed_weighted_shares: Vec<WeightedShare> = self
            .changed_shares
            .iter()
            .map(|s| self.weighted_share(*s, peer_zones))
            .collect();
        changed_weighted_shares.sort_unstable();
        std::iter::from_fn(
            move || match (sorted_shares.peek(), changed_weighted_shares.last()) {
                (Some(unchanged_share), Some(changed_share)) if changed_share > unchanged_share => {
                    changed_weighted_shares.pop()
                }
                (Some(_), _) => sorted_shares.next(),
                (None, _) => changed_weighted_shares.pop(),
            },
        )
    }
}

/// Describes the hosts without a sample and the hosts with a sample that is too old, for the
/// explanation of a decision. The text contains the age of the sample.
pub(super) fn unknown_loads(
    snapshot: &Snapshot,
    host_ids: impl Iterator<Item = HostId>,
) -> Vec<String> {
    let describe_unknown = |host: &HostView| {
        Some(format!(
            "{} ({})",
            host.name,
            unknown_reason(host, snapshot.now)?
        ))
    };
    host_ids
        .filter_map(|id| snapshot.host(id))
        .filter_map(describe_unknown)
        .collect()
}

/// Returns the reason why the load of a host is unknown; `None` if the load is known.
pub(super) fn unknown_reason(host: &HostView, now: Micros) -> Option<String> {
    match &host.sample {
        None => Some("no sample".into()),
        Some(s) if now.since(s.received_at) > SAMPLE_AGE_MAX => Some(format!(
            "sample {} s old",
            now.since(s.received_at).0 / 1_000_000
        )),
        Some(_) => None,
    }
}
