//! Distributes the tasks of one spawn among the suitable hosts: the state and the strategies of one
//! placement decision. Also counts slots for preemption decisions.

use super::chooser::{Chooser, HostOffer};
use super::exclusions::ExclusionsBuilder;
use super::host_load::HostLoad;
use super::load::{WeightedShare, WorkingLoads, unknown_loads};
use super::placement_request::{
    EXPLAINED_HOSTS_MAX, Placement, PlacementReason, PlacementRequest, failed_placement,
    fit_exclusion, host_part, request_exclusion,
};
use super::{
    Colocation, Constraints, ConstraintsError, ExclusionReason, HostView, PlacementPolicy, Rank,
    Snapshot,
};
use sempa_proto::{HostId, PvmError};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Maximum number of excluded hosts in a search by descending share. If there are more, a scan of
/// all hosts by id is faster.
const EXCLUDED_SCAN_MAX: usize = 256;

/// State of one placement decision.
pub(super) struct PlacementRun<'a> {
    snapshot: &'a Snapshot,
    request: &'a PlacementRequest<'a>,
    constraints: Constraints,
    loads: WorkingLoads<'a>,
    /// Zones of the request's peers.
    peer_zones: BTreeSet<u32>,
    excluded: ExclusionsBuilder,
}

impl<'a> PlacementRun<'a> {
    pub(super) fn new(
        snapshot: &'a Snapshot,
        request: &'a PlacementRequest<'a>,
        constraints: Constraints,
    ) -> PlacementRun<'a> {
        let peer_zones = request
            .peers
            .iter()
            .filter_map(|id| snapshot.host(*id))
            .map(|h| h.zone)
            .collect();
        PlacementRun {
            snapshot,
            request,
            constraints,
            loads: WorkingLoads::of(snapshot),
            peer_zones,
            excluded: ExclusionsBuilder::default(),
        }
    }

    /// Selects the strategy and places the tasks.
    ///
    /// In a virtual machine with more than [`EXPLAINED_HOSTS_MAX`] hosts, a placement by load first
    /// searches by descending share. It scans all hosts only if that search places no task.
    pub(super) fn decide(mut self, chooser: Option<&dyn Chooser>) -> Placement {
        let plain = chooser.is_none()
            && self.constraints.rank.is_none()
            && self.constraints.colocation != Colocation::SameHost;
        let by_load = plain
            && self.snapshot.policy == PlacementPolicy::Load
            && !self.request.request.names_one_host();
        if by_load && self.snapshot.hosts.len() > EXPLAINED_HOSTS_MAX {
            let quick = self.place_by_share(None);
            if let Some((hosts, looked_at)) = quick.filter(|(hosts, _)| !hosts.is_empty()) {
                self.record_closed_hosts();
                let unknown = unknown_loads(self.snapshot, looked_at.into_iter());
                let (why, rotation) = (
                    self.share_reason(hosts.first()),
                    self.snapshot.round_robin_last,
                );
                return self.finish(hosts, unknown, why, rotation);
            }
            self.excluded = ExclusionsBuilder::default();
        }
        self.place_after_scan(chooser, by_load)
    }

    fn exclusion<'h>(&self, host: &'h HostView) -> Option<ExclusionReason<&'h str>> {
        let load = || self.loads.load(host.id);
        request_exclusion(self.request, host).or_else(|| {
            fit_exclusion(
                self.request,
                &self.constraints,
                host,
                self.snapshot.now,
                load,
            )
        })
    }

    /// Returns how many tasks of this spawn the host can take.
    fn capacity(&self, host: &HostView) -> u32 {
        self.constraints
            .capacity(host, self.snapshot.now)
            .min(self.loads.load(host.id).remaining_slots())
    }

    /// Checks every host, then places the tasks on the suitable hosts.
    fn place_after_scan(mut self, chooser: Option<&dyn Chooser>, by_load: bool) -> Placement {
        let snapshot = self.snapshot;
        let mut fit = Vec::new();
        for host in &snapshot.hosts {
            match self.exclusion(host) {
                None => fit.push(host),
                Some(why) => self.excluded.add(host.id, why),
            }
        }
        if fit.is_empty() {
            return self.no_placement();
        }
        let mut rotation = snapshot.round_robin_last;
        let (hosts, reason) = if let Some(chooser) = chooser {
            let by = chooser.name().to_string();
            match self.place_by_chooser(chooser, &fit) {
                Ok(hosts) => (hosts, PlacementReason::ChooserSelected { by }),
                Err(why) => {
                    return failed_placement(
                        snapshot,
                        self.request,
                        PvmError::OutOfRes,
                        PlacementReason::ChooserFailed { by, why },
                        self.excluded.build(),
                    );
                }
            }
        } else if self.constraints.colocation == Colocation::SameHost {
            let Some(host) = self.best_single_host(&fit) else {
                return self.no_placement();
            };
            (
                vec![host.id; self.request.count as usize],
                PlacementReason::SameHost {
                    host: host.name.clone(),
                },
            )
        } else if let Some(rank) = self.constraints.rank {
            let hosts = self.place_by_rank(rank, &fit);
            let host = hosts
                .first()
                .map(|id| snapshot.host_name(*id))
                .unwrap_or_default();
            (hosts, PlacementReason::Rank { rank, host })
        } else if by_load {
            let excluded = std::mem::take(&mut self.excluded);
            let hosts = self
                .place_by_share(Some(&fit))
                .map(|(hosts, _)| hosts)
                .unwrap_or_default();
            self.excluded = excluded;
            let reason = self.share_reason(hosts.first());
            (hosts, reason)
        } else {
            let (hosts, reason) = self.place_unattended_first(&fit);
            if snapshot.policy == PlacementPolicy::RoundRobin {
                rotation = hosts.last().copied().unwrap_or(rotation);
            }
            (hosts, reason)
        };
        if hosts.is_empty() {
            return self.no_placement();
        }
        let of_load =
            snapshot.policy == PlacementPolicy::Load && !self.request.request.names_one_host();
        let unknown = if of_load {
            unknown_loads(snapshot, fit.iter().map(|h| h.id))
        } else {
            Vec::new()
        };
        self.finish(hosts, unknown, reason, rotation)
    }

    /// Distributes the tasks as PVM does. A host with an idle login gets a task only if no other
    /// host has room for it.
    fn place_unattended_first(&self, fit: &[&HostView]) -> (Vec<HostId>, PlacementReason) {
        let count = self.request.count as usize;
        let (unattended, others): (Vec<_>, Vec<_>) = fit
            .iter()
            .copied()
            .partition(|host: &&HostView| host.owner.is_unattended());
        let mut hosts = self.place_round_robin(&unattended, count);
        let missing = count - hosts.len();
        hosts.extend(self.place_round_robin(&others, missing));
        let reason = if self.request.request.names_one_host() {
            PlacementReason::HostNamed {
                host: host_part(&self.request.request.place).to_string(),
            }
        } else {
            let considered = if missing == 0 {
                unattended.len()
            } else {
                fit.len()
            };
            PlacementReason::RoundRobin { hosts: considered }
        };
        (hosts, reason)
    }

    /// Returns a placement without hosts. The error is `OutOfRes` if a later attempt may succeed.
    fn no_placement(self) -> Placement {
        let (error, why) = if !self.excluded.any_requested && !self.has_fitting_host() {
            (PvmError::NoHost, PlacementReason::NoSuchHost)
        } else if self.excluded.any_unanswered {
            (PvmError::HostFail, PlacementReason::NoneAvailable)
        } else if self.excluded.any_temporary || self.has_fitting_host() {
            (PvmError::OutOfRes, PlacementReason::NoneAvailable)
        } else {
            (PvmError::NoHost, PlacementReason::NoneAvailable)
        };
        failed_placement(
            self.snapshot,
            self.request,
            error,
            why,
            self.excluded.build(),
        )
    }

    /// True if at least one host is not excluded, whether or not it has room.
    fn has_fitting_host(&self) -> bool {
        self.excluded.count() < self.snapshot.hosts.len()
    }

    fn finish(
        self,
        mut hosts: Vec<HostId>,
        unknown: Vec<String>,
        why: PlacementReason,
        rotation: HostId,
    ) -> Placement {
        let count = self.request.count as usize;
        hosts.truncate(count);
        let missing = count - hosts.len();
        let placed = hosts.into_iter().map(Ok);
        let hosts = placed
            .chain(std::iter::repeat_n(Err(PvmError::OutOfRes), missing))
            .collect();
        Placement {
            hosts,
            reason: why,
            excluded: self.excluded.build(),
            unknown_load: unknown,
            round_robin_last: rotation,
        }
    }

    fn share_reason(&self, first: Option<&HostId>) -> PlacementReason {
        let loads = WorkingLoads::of(self.snapshot);
        let (host, usable) = first
            .map(|id| (self.snapshot.host_name(*id), loads.share(*id).usable))
            .unwrap_or_default();
        PlacementReason::LargestShare { host, usable }
    }

    /// Adds some of the hosts that accept no guests to the explanation.
    fn record_closed_hosts(&mut self) {
        let index = self.snapshot.hosts.index(self.snapshot.now);
        let owned = index
            .closed_hosts()
            .iter()
            .take(EXPLAINED_HOSTS_MAX)
            .filter_map(|id| self.snapshot.host(*id));
        let reasons: Vec<_> = owned
            .filter_map(|host| Some((host.id, self.exclusion(host)?)))
            .collect();
        reasons
            .into_iter()
            .for_each(|(host, why)| self.excluded.add(host, why));
    }

    /// Distributes tasks as PVM does: each host gets a consecutive block of tasks. The first host
    /// is the one after the last host used.
    fn place_round_robin(&self, fit: &[&HostView], count: usize) -> Vec<HostId> {
        let start = fit
            .iter()
            .position(|h| h.id > self.snapshot.round_robin_last)
            .unwrap_or(0);
        let order: Vec<&HostView> = fit[start..].iter().chain(&fit[..start]).copied().collect();
        let mut room: Vec<usize> = order.iter().map(|h| self.capacity(h) as usize).collect();
        let mut hosts = Vec::with_capacity(count);
        while hosts.len() < count && room.iter().any(|room| *room > 0) {
            for (i, host) in order.iter().enumerate() {
                let share = (count - hosts.len()).div_ceil(order.len() - i).min(room[i]);
                hosts.extend(std::iter::repeat_n(host.id, share));
                room[i] -= share;
            }
        }
        hosts
    }

    /// Places each task on the host where it gets the largest share, given the tasks placed before.
    ///
    /// Examines the best hosts only, of all hosts or of `fit`. Returns the hosts of the tasks, and
    /// the suitable hosts that were examined. Returns `None` if a search among all hosts finds more
    /// than [`EXCLUDED_SCAN_MAX`] excluded ones.
    fn place_by_share(&mut self, fit: Option<&[&HostView]>) -> Option<(Vec<HostId>, Vec<HostId>)> {
        let count = self.request.count as usize;
        let mut excluded_count = 0;
        let (mut hosts, mut looked_at) = (Vec::with_capacity(count), Vec::new());
        let mut room = BTreeMap::<HostId, u32>::new();
        let mut heap = BinaryHeap::<WeightedShare>::new();
        let untouched = WorkingLoads::of(self.snapshot);
        let near =
            |host: &&HostView| untouched.weighted(untouched.share(host.id), &self.peer_zones);
        let mut given: BinaryHeap<WeightedShare> = fit.into_iter().flatten().map(near).collect();
        let all = fit
            .is_none()
            .then(|| untouched.best_first(&self.peer_zones))
            .into_iter()
            .flatten();
        let mut best = all.chain(std::iter::from_fn(|| given.pop())).peekable();
        while hosts.len() < count {
            // Examine every host that may be better than the best examined one.
            while let Some(near) = best.next_if(|near| heap.peek().is_none_or(|top| near > top)) {
                let Some(host) = self.snapshot.host(near.share.host()) else {
                    continue;
                };
                let exclusion = self.exclusion(host);
                excluded_count += usize::from(exclusion.is_some());
                if excluded_count > EXCLUDED_SCAN_MAX {
                    return None;
                }
                match exclusion {
                    Some(why) if self.excluded.count() < EXPLAINED_HOSTS_MAX => {
                        self.excluded.add(host.id, why)
                    }
                    Some(_) => {}
                    None => {
                        looked_at.push(host.id);
                        room.insert(host.id, self.capacity(host));
                        heap.push(near);
                    }
                }
            }
            let Some(near) = heap.pop() else { break };
            let host = near.share.host();
            let Some(left) = room.get_mut(&host).filter(|left| **left > 0) else {
                continue;
            };
            *left -= 1;
            hosts.push(host);
            let next = self.loads.add_task(host);
            if *left > 0 {
                heap.push(self.loads.weighted(next, &self.peer_zones));
            }
        }
        Some((hosts, looked_at))
    }

    /// Returns the host on which all tasks together get the largest share; `None` if no host has
    /// room for all of them.
    fn best_single_host<'h>(&self, fit: &[&'h HostView]) -> Option<&'h HostView> {
        let count = self.request.count;
        let room = fit.iter().filter(|h| self.capacity(h) >= count);
        let last = |h: &HostView| {
            let load = self.loads.load(h.id);
            let last = HostLoad {
                own_tasks: load.own_tasks + count.saturating_sub(1),
                ..load
            };
            self.loads.weighted(last.share(), &self.peer_zones)
        };
        room.max_by_key(|h| last(h)).copied()
    }

    /// Places tasks by the requested rank: gives the first host one task per processor, then the
    /// next host. After the last host, continues with the first one.
    fn place_by_rank(&self, rank: Rank, fit: &[&HostView]) -> Vec<HostId> {
        let key = |h: &&HostView| {
            let number = rank
                .by
                .value_on(h, self.snapshot.now, || self.loads.load(h.id));
            let order = number.map(|n| if rank.ascending { u64::MAX - n } else { n });
            (!h.owner.is_unattended(), Reverse(order), h.id)
        };
        // A heap is cheaper than sorting, because the order of hosts that get no task is not
        // needed.
        let mut unfilled: BinaryHeap<_> = fit
            .iter()
            .enumerate()
            .map(|(i, host)| Reverse((key(host), i)))
            .collect();
        let count = self.request.count as usize;
        let (mut hosts, mut filled) = (Vec::with_capacity(count), Vec::new());
        while hosts.len() < count {
            let Some(Reverse((_, i))) = unfilled.pop() else {
                break;
            };
            let room = self.capacity(fit[i]);
            filled.push((fit[i], room - fill_host(&mut hosts, fit[i], room, count)));
        }
        while hosts.len() < count && filled.iter().any(|(_, room)| *room > 0) {
            filled
                .iter_mut()
                .for_each(|(host, room)| *room -= fill_host(&mut hosts, host, *room, count));
        }
        hosts
    }

    /// Returns the hosts that the external chooser has selected, or the error in its selection.
    fn place_by_chooser(
        &self,
        chooser: &dyn Chooser,
        fit: &[&HostView],
    ) -> Result<Vec<HostId>, String> {
        let offer = |host: &&HostView| (self.loads.share(host.id), self.capacity(host));
        let offers: Vec<HostOffer<'_>> = fit
            .iter()
            .map(|host| (*host, offer(host)))
            .map(|(host, (share, capacity))| HostOffer {
                host,
                share,
                capacity,
            })
            .collect();
        let chosen = chooser.choose(self.request.request, &offers, self.request.count as usize)?;
        let mut room: Vec<u32> = offers.iter().map(|o| o.capacity).collect();
        for i in &chosen {
            let room = room
                .get_mut(*i)
                .ok_or_else(|| format!("host {i} was not offered"))?;
            *room = room
                .checked_sub(1)
                .ok_or_else(|| format!("{} has no more room", offers[*i].host.name))?;
        }
        Ok(chosen.into_iter().map(|i| offers[i].host.id).collect())
    }
}

/// Gives a host one task per processor, up to its room and the number of remaining tasks. Returns
/// the number of slots counted as used, which may exceed the number of tasks placed.
fn fill_host(hosts: &mut Vec<HostId>, host: &HostView, room: u32, count: usize) -> u32 {
    let share = host.cores.max(1).min(room);
    hosts.extend(std::iter::repeat_n(
        host.id,
        (share as usize).min(count - hosts.len()),
    ));
    share
}

/// Counts the tasks of a spawn that would get hosts if some running tasks were paused. The count
/// equals that of [`super::place()`], and only the changed host is recomputed.
pub(super) struct SlotCounter<'a> {
    run: PlacementRun<'a>,
    count: u64,
    slots: SlotTotals,
}

/// Number of slots, summed over all hosts.
#[derive(Clone, Copy, Default)]
struct SlotTotals {
    /// Number of slots for tasks of the spawn.
    tasks: u64,
    /// Number of hosts with slots for all tasks of the spawn.
    hosts_for_all: u64,
}

impl<'a> SlotCounter<'a> {
    /// Counts the slots of the unchanged snapshot.
    ///
    /// # Errors
    /// Those of [`Constraints::from_request`].
    pub(super) fn new(
        snapshot: &'a Snapshot,
        request: &'a PlacementRequest<'a>,
    ) -> Result<SlotCounter<'a>, ConstraintsError> {
        let constraints = Constraints::from_request(request.request)?;
        let run = PlacementRun::new(snapshot, request, constraints);
        let mut counter = SlotCounter {
            run,
            count: u64::from(request.count),
            slots: SlotTotals::default(),
        };
        for host in &snapshot.hosts {
            counter.add(counter.slots_on(host));
        }
        Ok(counter)
    }

    /// Returns the number of slots on a host; 0 if it is excluded.
    fn slots_on(&self, host: &HostView) -> u64 {
        if self.run.exclusion(host).is_some() {
            return 0;
        }
        u64::from(self.run.capacity(host)).min(self.count)
    }

    fn add(&mut self, tasks: u64) {
        self.slots.tasks += tasks;
        self.slots.hosts_for_all += u64::from(tasks == self.count);
    }

    fn sub(&mut self, tasks: u64) {
        self.slots.tasks -= tasks;
        self.slots.hosts_for_all -= u64::from(tasks == self.count);
    }

    fn placeable_tasks(&self) -> u64 {
        if self.run.constraints.colocation == Colocation::SameHost {
            return if self.slots.hosts_for_all > 0 {
                self.count
            } else {
                0
            };
        }
        self.slots.tasks.min(self.count)
    }

    /// True if all tasks of the spawn get hosts.
    pub(super) fn suffice(&self) -> bool {
        self.placeable_tasks() == self.count
    }

    /// Assumes that `count` tasks on this host are paused. Keeps the assumption and returns true
    /// if more tasks of the spawn get hosts by it; otherwise undoes it and returns false.
    pub(super) fn try_pausing(&mut self, id: HostId, count: u32) -> bool {
        let Some(host) = self.run.snapshot.host(id) else {
            return false;
        };
        let (tasks, before, own) = (
            self.placeable_tasks(),
            self.slots_on(host),
            self.run.loads.load(id).own_tasks,
        );
        self.run.loads.set_own_tasks(id, own.saturating_sub(count));
        let after = self.slots_on(host);
        self.sub(before);
        self.add(after);
        let gains = self.placeable_tasks() > tasks;
        if !gains {
            self.run.loads.set_own_tasks(id, own);
            self.sub(after);
            self.add(before);
        }
        gains
    }
}
