//! Load of all hosts during a decision: ranks the hosts by the processor share that one more task
//! would get, after each task that the decision has placed. Also says what excludes a host because
//! of its load, and which loads are unknown.

use super::host_load::{HostLoad, ProcessorShare};
use super::index::{HostIndex, merge_descending};
use super::{ExclusionReason, HostView, SAMPLE_AGE_MAX, Snapshot};
use sempa_proto::load::HEADROOM_BYTES_PER_TASK;
use sempa_proto::{HostId, Micros};
use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

/// Returns the reason if the owner's limits exclude one more task with `bytes` of memory.
pub(super) fn limit_exclusion(
    host: &HostView,
    now: Micros,
    bytes: u64,
    load: impl Fn() -> HostLoad,
) -> Option<ExclusionReason<&str>> {
    let limits = &host.guest_policy.limits;
    if let Some(most) = limits.guests_max.filter(|_| load().remaining_slots() == 0) {
        return Some(ExclusionReason::TaskLimit { limit: most });
    }
    let (keeps, has) = (
        limits.memory_free,
        host.fresh_sample(now)?.sample.available_bytes,
    );
    (keeps > 0 && has < keeps.saturating_add(bytes.max(HEADROOM_BYTES_PER_TASK)))
        .then_some(ExclusionReason::MemoryKept { keeps, has })
}

/// A host with its share, weighted for the task's peers: behind a slower link to the peers, the
/// share counts less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WeightedShare {
    unattended: bool,
    has_memory: bool,
    usable: u64,
    pub(super) share: ProcessorShare,
}

impl WeightedShare {
    fn of(share: ProcessorShare, permille: u32) -> WeightedShare {
        WeightedShare {
            unattended: share.unattended,
            has_memory: share.has_memory,
            usable: share.usable * u64::from(permille),
            share,
        }
    }
}

/// Load of all hosts during a decision. Each placed task changes it.
#[derive(Debug)]
pub(super) struct WorkingLoads<'a> {
    index: Cow<'a, HostIndex>,
    snapshot: &'a Snapshot,
    changed: BTreeMap<HostId, HostLoad>,
    changed_shares: BTreeSet<ProcessorShare>,
}

impl<'a> WorkingLoads<'a> {
    /// Creates the load as of the snapshot. Migrating tasks count at their target.
    pub(super) fn of(snapshot: &'a Snapshot) -> WorkingLoads<'a> {
        let index = snapshot.hosts.index(snapshot.now);
        WorkingLoads {
            index,
            snapshot,
            changed: BTreeMap::new(),
            changed_shares: BTreeSet::new(),
        }
    }

    pub(super) fn load(&self, host: HostId) -> HostLoad {
        let of_index = || {
            self.index
                .load(host)
                .expect("loads are made from the snapshot's hosts")
        };
        self.changed.get(&host).copied().unwrap_or_else(of_index)
    }

    /// Returns the share that one more task would get on a host of the snapshot.
    pub(super) fn share(&self, host: HostId) -> ProcessorShare {
        self.load(host).share()
    }

    /// Adds a task to a host of the snapshot. Returns the share that the next task would get there.
    pub(super) fn add_task(&mut self, host: HostId) -> ProcessorShare {
        let before = self.load(host);
        let after = HostLoad {
            own_tasks: before.own_tasks + 1,
            memory_slots: before.memory_slots.saturating_sub(1),
            ..before
        };
        self.change(host, after)
    }

    /// Sets the number of own tasks on a host of the snapshot.
    pub(super) fn set_own_tasks(&mut self, host: HostId, own_tasks: u32) {
        let after = HostLoad {
            own_tasks,
            ..self.load(host)
        };
        self.change(host, after);
    }

    fn change(&mut self, host: HostId, after: HostLoad) -> ProcessorShare {
        if let Some(before) = self.changed.insert(host, after) {
            self.changed_shares.remove(&before.share());
        }
        if self.index.is_ranked(host) {
            self.changed_shares.insert(after.share());
        }
        after.share()
    }

    /// Returns the weight of a processor share on a host, in thousandths, for a task with peers in
    /// these zones.
    pub(super) fn weight_permille(&self, host: HostId, peers: &BTreeSet<u32>) -> u32 {
        self.index
            .zone(host)
            .map_or(1000, |zone| self.snapshot.zone_weight_permille(zone, peers))
    }

    pub(super) fn weighted(&self, share: ProcessorShare, peers: &BTreeSet<u32>) -> WeightedShare {
        WeightedShare::of(share, self.weight_permille(share.host(), peers))
    }

    /// Returns the hosts that accept guests, the best first. The iterator evaluates hosts only as
    /// far as it is consumed.
    pub(super) fn best_first(&self, peers: &BTreeSet<u32>) -> impl Iterator<Item = WeightedShare> {
        let lists = self.index.shares_by_zone().map(|(zone, shares)| {
            let permille = self.snapshot.zone_weight_permille(*zone, peers);
            let unchanged = shares
                .iter()
                .rev()
                .filter(|s| !self.changed.contains_key(&s.host()));
            unchanged.map(move |s| WeightedShare::of(*s, permille))
        });
        let mut lists = merge_descending(lists).peekable();
        let mut over: Vec<WeightedShare> = self
            .changed_shares
            .iter()
            .map(|s| self.weighted(*s, peers))
            .collect();
        over.sort_unstable();
        std::iter::from_fn(move || match (lists.peek(), over.last()) {
            (Some(near), Some(changed)) if changed > near => over.pop(),
            (Some(_), _) => lists.next(),
            (None, _) => over.pop(),
        })
    }
}

/// Describes the hosts with a missing or too old sample, with the age of the sample, for the
/// explanation of a decision.
pub(super) fn unknown_loads(
    snapshot: &Snapshot,
    among: impl Iterator<Item = HostId>,
) -> Vec<String> {
    let old = |host: &HostView| {
        Some(format!(
            "{} ({})",
            host.name,
            unknown_reason(host, snapshot.now)?
        ))
    };
    among
        .filter_map(|id| snapshot.host(id))
        .filter_map(old)
        .collect()
}

/// Returns the reason why the load of a host is unknown; `None` if it is known.
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
