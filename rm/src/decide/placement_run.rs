//! Distributes the tasks of one spawn among the suitable hosts: the state and the strategies of one
//! placement decision. Also counts slots for preemption decisions.

use super::chooser::{Chooser, HostOffer};
use super::exclusions::ExclusionsBuilder;
use super::host_load::HostLoad;
use super::load::{WeightedShare, WorkingLoads, unknown_loads};
use super::placement_request::{
    EXPLAINED_HOSTS_MAX, Placement, PlacementReason, PlacementRequest, failed_placement,
    fit_exclusion, request_exclusion, where_host,
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
    placement_request: &'a PlacementRequest<'a>,
    constraints: Constraints,
    loads: WorkingLoads<'a>,
    /// Zones of the hosts of the request's peers.
    peer_zones: BTreeSet<u32>,
    exclusions: ExclusionsBuilder,
}

impl<'a> PlacementRun<'a> {
    pub(super) fn new(
        snapshot: &'a Snapshot,
        request: &'a PlacementRequest<'a>,
        constraints: Constraints,
    ) -> Self {
        let peer_zones = request
            .peer_hosts
            .iter()
            .filter_map(|id| snapshot.host(*id))
            .map(|h| h.zone)
            .collect();
        PlacementRun {
            snapshot,
            placement_request: request,
            constraints,
            loads: WorkingLoads::new(snapshot),
            peer_zones,
            exclusions: ExclusionsBuilder::default(),
        }
    }

    /// Selects the strategy and places the tasks.
    ///
    /// In a virtual machine with more than [`EXPLAINED_HOSTS_MAX`] hosts, a placement by load first
    /// searches by descending share. It scans all hosts only if that search places no task.
    pub(super) fn place_tasks(mut self, chooser: Option<&dyn Chooser>) -> Placement {
        let may_use_policy = chooser.is_none()
            && self.constraints.rank.is_none()
            && self.constraints.colocation != Colocation::SameHost;
        let places_by_load = may_use_policy
            && self.snapshot.policy == PlacementPolicy::Load
            && !self.placement_request.spawn_request.names_one_host();
        if places_by_load && self.snapshot.hosts.len() > EXPLAINED_HOSTS_MAX {
            let share_result = self.place_by_share(None);
            if let Some((hosts, examined_hosts)) =
                share_result.filter(|(hosts, _)| !hosts.is_empty())
            {
                self.record_closed_hosts();
                let unknown_load = unknown_loads(self.snapshot, examined_hosts.into_iter());
                let (placement_reason, last_round_robin_host) = (
                    self.share_reason(hosts.first()),
                    self.snapshot.last_round_robin_host,
                );
                return self.into_placement(
                    hosts,
                    unknown_load,
                    placement_reason,
                    last_round_robin_host,
                );
            }
            self.exclusions = ExclusionsBuilder::default();
        }
        self.place_after_scan(chooser, places_by_load)
    }

    fn exclusion_of<'h>(&self, host: &'h HostView) -> Option<ExclusionReason<&'h str>> {
        let load = || self.loads.load(host.id);
        request_exclusion(self.placement_request, host).or_else(|| {
            fit_exclusion(
                self.placement_request,
                &self.constraints,
                host,
                self.snapshot.now,
                load,
            )
        })
    }

    /// Returns how many tasks of this spawn the host can accept.
    fn capacity(&self, host: &HostView) -> u32 {
        self.constraints
            .task_capacity(host, self.snapshot.now)
            .min(self.loads.load(host.id).remaining_slots())
    }

    /// Checks every host, then places the tasks on the suitable hosts.
    fn place_after_scan(
        mut self,
        chooser: Option<&dyn Chooser>,
        places_by_load: bool,
    ) -> Placement {
        let snapshot = self.snapshot;
        let mut suitable_hosts = Vec::new();
        for host in &snapshot.hosts {
            match self.exclusion_of(host) {
                None => suitable_hosts.push(host),
                Some(why) => self.exclusions.add(host.id, why),
            }
        }
        if suitable_hosts.is_empty() {
            return self.no_placement();
        }
        let mut last_round_robin_host = snapshot.last_round_robin_host;
        let (hosts, reason) = if let Some(chooser) = chooser {
            let chooser_name = chooser.name().to_string();
            match self.place_by_chooser(chooser, &suitable_hosts) {
                Ok(hosts) => (
                    hosts,
                    PlacementReason::ChooserSelected {
                        chooser: chooser_name,
                    },
                ),
                Err(why) => {
                    return failed_placement(
                        snapshot,
                        self.placement_request,
                        PvmError::OutOfRes,
                        PlacementReason::ChooserFailed {
                            chooser: chooser_name,
                            why,
                        },
                        self.exclusions.build(),
                    );
                }
            }
        } else if self.constraints.colocation == Colocation::SameHost {
            let Some(host) = self.best_single_host(&suitable_hosts) else {
                return self.no_placement();
            };
            (
                vec![host.id; self.placement_request.task_count as usize],
                PlacementReason::SameHost {
                    host: host.name.clone(),
                },
            )
        } else if let Some(rank) = self.constraints.rank {
            let hosts = self.place_by_rank(rank, &suitable_hosts);
            let host = hosts
                .first()
                .map(|id| snapshot.host_name(*id))
                .unwrap_or_default();
            (hosts, PlacementReason::Rank { rank, host })
        } else if places_by_load {
            let saved_exclusions = std::mem::take(&mut self.exclusions);
            let hosts = self
                .place_by_share(Some(&suitable_hosts))
                .map(|(hosts, _)| hosts)
                .unwrap_or_default();
            self.exclusions = saved_exclusions;
            let reason = self.share_reason(hosts.first());
            (hosts, reason)
        } else {
            let (hosts, reason) = self.place_unattended_first(&suitable_hosts);
            if snapshot.policy == PlacementPolicy::RoundRobin {
                last_round_robin_host = hosts.last().copied().unwrap_or(last_round_robin_host);
            }
            (hosts, reason)
        };
        if hosts.is_empty() {
            return self.no_placement();
        }
        let explains_unknown_load = snapshot.policy == PlacementPolicy::Load
            && !self.placement_request.spawn_request.names_one_host();
        let unknown_load = if explains_unknown_load {
            unknown_loads(snapshot, suitable_hosts.iter().map(|h| h.id))
        } else {
            Vec::new()
        };
        self.into_placement(hosts, unknown_load, reason, last_round_robin_host)
    }

    /// Distributes the tasks as PVM does. A host with an idle login gets a task only if no other
    /// host has room for it.
    fn place_unattended_first(
        &self,
        suitable_hosts: &[&HostView],
    ) -> (Vec<HostId>, PlacementReason) {
        let task_count = self.placement_request.task_count as usize;
        let (unattended_hosts, attended_hosts): (Vec<_>, Vec<_>) = suitable_hosts
            .iter()
            .copied()
            .partition(|host: &&HostView| host.owner.is_unattended());
        let mut hosts = self.place_round_robin(&unattended_hosts, task_count);
        let unplaced_count = task_count - hosts.len();
        hosts.extend(self.place_round_robin(&attended_hosts, unplaced_count));
        let reason = if self.placement_request.spawn_request.names_one_host() {
            PlacementReason::HostNamed {
                host: where_host(&self.placement_request.spawn_request.where_arg).to_string(),
            }
        } else {
            let host_count = if unplaced_count == 0 {
                unattended_hosts.len()
            } else {
                suitable_hosts.len()
            };
            PlacementReason::RoundRobin { host_count }
        };
        (hosts, reason)
    }

    /// Returns a placement without hosts. The error is `HostFail` if a host was lost or did not
    /// answer, `OutOfRes` if a later attempt may succeed, and otherwise `NoHost`.
    fn no_placement(self) -> Placement {
        let (error, placement_reason) =
            if !self.exclusions.any_requested && !self.has_fitting_host() {
                (PvmError::NoHost, PlacementReason::NoSuchHost)
            } else if self.exclusions.any_unanswered {
                (PvmError::HostFail, PlacementReason::NoneAvailable)
            } else if self.exclusions.any_temporary || self.has_fitting_host() {
                (PvmError::OutOfRes, PlacementReason::NoneAvailable)
            } else {
                (PvmError::NoHost, PlacementReason::NoneAvailable)
            };
        failed_placement(
            self.snapshot,
            self.placement_request,
            error,
            placement_reason,
            self.exclusions.build(),
        )
    }

    /// True if at least one host is not excluded, whether or not it has room.
    fn has_fitting_host(&self) -> bool {
        self.exclusions.excluded_count() < self.snapshot.hosts.len()
    }

    fn into_placement(
        self,
        mut hosts: Vec<HostId>,
        unknown_hosts: Vec<String>,
        placement_reason: PlacementReason,
        last_round_robin_host: HostId,
    ) -> Placement {
        let task_count = self.placement_request.task_count as usize;
        hosts.truncate(task_count);
        let unplaced_count = task_count - hosts.len();
        let placed_hosts = hosts.into_iter().map(Ok);
        let hosts = placed_hosts
            .chain(std::iter::repeat_n(Err(PvmError::OutOfRes), unplaced_count))
            .collect();
        Placement {
            hosts,
            reason: placement_reason,
            exclusions: self.exclusions.build(),
            unknown_load: unknown_hosts,
            last_round_robin_host,
        }
    }

    fn share_reason(&self, first_host: Option<&HostId>) -> PlacementReason {
        let loads = WorkingLoads::new(self.snapshot);
        let (host, usable_permille) = first_host
            .map(|id| {
                (
                    self.snapshot.host_name(*id),
                    loads.share(*id).usable_permille,
                )
            })
            .unwrap_or_default();
        PlacementReason::LargestShare {
            host,
            usable_permille,
        }
    }

    /// Adds hosts that accept no guests to the explanation, at most [`EXPLAINED_HOSTS_MAX`].
    fn record_closed_hosts(&mut self) {
        let index = self.snapshot.hosts.index(self.snapshot.now);
        let closed_views = index
            .closed_hosts()
            .iter()
            .take(EXPLAINED_HOSTS_MAX)
            .filter_map(|id| self.snapshot.host(*id));
        let reasons: Vec<_> = closed_views
            .filter_map(|host| Some((host.id, self.exclusion_of(host)?)))
            .collect();
        reasons
            .into_iter()
            .for_each(|(host, why)| self.exclusions.add(host, why));
    }

    /// Distributes tasks as PVM does: each host gets a consecutive block of tasks. The first host
    /// is the one after the last host used.
    fn place_round_robin(&self, suitable_hosts: &[&HostView], task_count: usize) -> Vec<HostId> {
        let start = suitable_hosts
            .iter()
            .position(|h| h.id > self.snapshot.last_round_robin_host)
            .unwrap_or(0);
        let ordered_hosts: Vec<&HostView> = suitable_hosts[start..]
            .iter()
            .chain(&suitable_hosts[..start])
            .copied()
            .collect();
        let mut slots_left: Vec<usize> = ordered_hosts
            .iter()
            .map(|h| self.capacity(h) as usize)
            .collect();
        let mut hosts = Vec::with_capacity(task_count);
        while hosts.len() < task_count && slots_left.iter().any(|slots_left| *slots_left > 0) {
            for (i, host) in ordered_hosts.iter().enumerate() {
                let block_size = (task_count - hosts.len())
                    .div_ceil(ordered_hosts.len() - i)
                    .min(slots_left[i]);
                hosts.extend(std::iter::repeat_n(host.id, block_size));
                slots_left[i] -= block_size;
            }
        }
        hosts
    }

    /// Places each task on the host where it gets the largest share in addition to the tasks placed
    /// before it. `suitable_hosts`: the hosts to choose from; `None` for all hosts. Examines only
    /// the best of these hosts.
    ///
    /// Returns the hosts of the tasks, and the suitable hosts that were examined. Returns `None` if
    /// more than [`EXCLUDED_SCAN_MAX`] examined hosts are excluded.
    fn place_by_share(
        &mut self,
        suitable_hosts: Option<&[&HostView]>,
    ) -> Option<(Vec<HostId>, Vec<HostId>)> {
        let task_count = self.placement_request.task_count as usize;
        let mut excluded_count = 0;
        let (mut hosts, mut examined_hosts) = (Vec::with_capacity(task_count), Vec::new());
        let mut slots_by_host = BTreeMap::<HostId, u32>::new();
        let mut examined_shares = BinaryHeap::<WeightedShare>::new();
        let initial_loads = WorkingLoads::new(self.snapshot);
        let candidate = |host: &&HostView| {
            initial_loads.weighted_share(initial_loads.share(host.id), &self.peer_zones)
        };
        let mut suitable_shares: BinaryHeap<WeightedShare> = suitable_hosts
            .into_iter()
            .flatten()
            .map(candidate)
            .collect();
        let shares_of_all = suitable_hosts
            .is_none()
            .then(|| initial_loads.shares_best_first(&self.peer_zones))
            .into_iter()
            .flatten();
        let mut candidates = shares_of_all
            .chain(std::iter::from_fn(|| suitable_shares.pop()))
            .peekable();
        while hosts.len() < task_count {
            // Examine every host that may be better than the best host examined so far.
            while let Some(candidate) = candidates.next_if(|candidate| {
                examined_shares
                    .peek()
                    .is_none_or(|best_examined| candidate > best_examined)
            }) {
                let Some(host) = self.snapshot.host(candidate.share.host()) else {
                    continue;
                };
                let exclusion = self.exclusion_of(host);
                excluded_count += usize::from(exclusion.is_some());
                if excluded_count > EXCLUDED_SCAN_MAX {
                    return None;
                }
                match exclusion {
                    Some(why) if self.exclusions.excluded_count() < EXPLAINED_HOSTS_MAX => {
                        self.exclusions.add(host.id, why)
                    }
                    Some(_) => {}
                    None => {
                        examined_hosts.push(host.id);
                        slots_by_host.insert(host.id, self.capacity(host));
                        examined_shares.push(candidate);
                    }
                }
            }
            let Some(candidate) = examined_shares.pop() else {
                break;
            };
            let host = candidate.share.host();
            let Some(slots_left) = slots_by_host
                .get_mut(&host)
                .filter(|slots_left| **slots_left > 0)
            else {
                continue;
            };
            *slots_left -= 1;
            hosts.push(host);
            let next_share = self.loads.add_task(host);
            if *slots_left > 0 {
                examined_shares.push(self.loads.weighted_share(next_share, &self.peer_zones));
            }
        }
        Some((hosts, examined_hosts))
    }

    /// Returns the host on which the last of the tasks gets the largest share if all tasks run on
    /// this host. Returns `None` if no host has room for all tasks.
    fn best_single_host<'h>(&self, suitable_hosts: &[&'h HostView]) -> Option<&'h HostView> {
        let task_count = self.placement_request.task_count;
        let hosts_with_room = suitable_hosts
            .iter()
            .filter(|h| self.capacity(h) >= task_count);
        let last_task = |h: &HostView| {
            let load = self.loads.load(h.id);
            let last_task = HostLoad {
                vm_task_count: load.vm_task_count + task_count.saturating_sub(1),
                ..load
            };
            self.loads
                .weighted_share(last_task.share(), &self.peer_zones)
        };
        hosts_with_room.max_by_key(|h| last_task(h)).copied()
    }

    /// Places tasks by the requested rank: one task per processor on the first host, then on the
    /// next host. After the last host, continues with the first one.
    fn place_by_rank(&self, rank: Rank, suitable_hosts: &[&HostView]) -> Vec<HostId> {
        let sort_key = |h: &&HostView| {
            let rank_value = rank
                .metric
                .value_on(h, self.snapshot.now, || self.loads.load(h.id));
            let sort_value = rank_value.map(|n| if rank.ascending { u64::MAX - n } else { n });
            (!h.owner.is_unattended(), Reverse(sort_value), h.id)
        };
        // A heap is cheaper than sorting, because hosts that get no task need not be sorted.
        let mut unfilled_hosts: BinaryHeap<_> = suitable_hosts
            .iter()
            .enumerate()
            .map(|(i, host)| Reverse((sort_key(host), i)))
            .collect();
        let task_count = self.placement_request.task_count as usize;
        let (mut hosts, mut filled_hosts) = (Vec::with_capacity(task_count), Vec::new());
        while hosts.len() < task_count {
            let Some(Reverse((_, i))) = unfilled_hosts.pop() else {
                break;
            };
            let slots_left = self.capacity(suitable_hosts[i]);
            filled_hosts.push((
                suitable_hosts[i],
                slots_left - fill_host(&mut hosts, suitable_hosts[i], slots_left, task_count),
            ));
        }
        while hosts.len() < task_count && filled_hosts.iter().any(|(_, slots_left)| *slots_left > 0)
        {
            filled_hosts.iter_mut().for_each(|(host, slots_left)| {
                *slots_left -= fill_host(&mut hosts, host, *slots_left, task_count)
            });
        }
        hosts
    }

    /// Returns the hosts that the external chooser has selected, or an error text if the chooser
    /// fails or its selection is invalid.
    fn place_by_chooser(
        &self,
        chooser: &dyn Chooser,
        suitable_hosts: &[&HostView],
    ) -> Result<Vec<HostId>, String> {
        let share_and_capacity =
            |host: &&HostView| (self.loads.share(host.id), self.capacity(host));
        let offers: Vec<HostOffer<'_>> = suitable_hosts
            .iter()
            .map(|host| (*host, share_and_capacity(host)))
            .map(|(host, (share, capacity))| HostOffer {
                host,
                share,
                capacity,
            })
            .collect();
        let chosen_indices = chooser.choose(
            self.placement_request.spawn_request,
            &offers,
            self.placement_request.task_count as usize,
        )?;
        let mut slots_left: Vec<u32> = offers.iter().map(|o| o.capacity).collect();
        for i in &chosen_indices {
            let slots_left = slots_left
                .get_mut(*i)
                .ok_or_else(|| format!("host {i} was not offered"))?;
            *slots_left = slots_left
                .checked_sub(1)
                .ok_or_else(|| format!("{} has no more room", offers[*i].host.name))?;
        }
        Ok(chosen_indices
            .into_iter()
            .map(|i| offers[i].host.id)
            .collect())
    }
}

/// Adds a host to `hosts` once per processor, up to its room and the number of remaining tasks.
/// Returns the number of slots counted as used, which may exceed the number of tasks placed.
fn fill_host(hosts: &mut Vec<HostId>, host: &HostView, slots_left: u32, task_count: usize) -> u32 {
    let block_size = host.cores.max(1).min(slots_left);
    hosts.extend(std::iter::repeat_n(
        host.id,
        (block_size as usize).min(task_count - hosts.len()),
    ));
    block_size
}

/// Counts the tasks of a spawn that would get hosts if some running tasks were paused. The result
/// equals the number of tasks that [`super::place()`] would place. After a change, only the slots
/// of the changed host are computed again.
pub(super) struct SlotCounter<'a> {
    placement_run: PlacementRun<'a>,
    task_count: u64,
    totals: SlotTotals,
}

/// Number of slots, summed over all hosts.
#[derive(Clone, Copy, Default)]
struct SlotTotals {
    /// Number of slots for tasks of the spawn.
    task_slots: u64,
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
    ) -> Result<Self, ConstraintsError> {
        let constraints = Constraints::from_request(request.spawn_request)?;
        let run = PlacementRun::new(snapshot, request, constraints);
        let mut counter = SlotCounter {
            placement_run: run,
            task_count: u64::from(request.task_count),
            totals: SlotTotals::default(),
        };
        for host in &snapshot.hosts {
            counter.add_slots(counter.slots_on(host));
        }
        Ok(counter)
    }

    /// Returns the number of slots on a host; 0 if the host is excluded.
    fn slots_on(&self, host: &HostView) -> u64 {
        if self.placement_run.exclusion_of(host).is_some() {
            return 0;
        }
        u64::from(self.placement_run.capacity(host)).min(self.task_count)
    }

    fn add_slots(&mut self, host_slots: u64) {
        self.totals.task_slots += host_slots;
        self.totals.hosts_for_all += u64::from(host_slots == self.task_count);
    }

    fn subtract_slots(&mut self, host_slots: u64) {
        self.totals.task_slots -= host_slots;
        self.totals.hosts_for_all -= u64::from(host_slots == self.task_count);
    }

    fn placeable_task_count(&self) -> u64 {
        if self.placement_run.constraints.colocation == Colocation::SameHost {
            return if self.totals.hosts_for_all > 0 {
                self.task_count
            } else {
                0
            };
        }
        self.totals.task_slots.min(self.task_count)
    }

    /// True if all tasks of the spawn get hosts under the current assumptions.
    pub(super) fn all_placeable(&self) -> bool {
        self.placeable_task_count() == self.task_count
    }

    /// Assumes that `paused_count` tasks on this host are paused. If more tasks of the spawn then
    /// get hosts, keeps the assumption and returns true. Otherwise removes the assumption and
    /// returns false.
    pub(super) fn try_pausing(&mut self, id: HostId, paused_count: u32) -> bool {
        let Some(host) = self.placement_run.snapshot.host(id) else {
            return false;
        };
        let (previous_task_count, previous_slots, vm_task_count) = (
            self.placeable_task_count(),
            self.slots_on(host),
            self.placement_run.loads.load(id).vm_task_count,
        );
        self.placement_run
            .loads
            .set_vm_task_count(id, vm_task_count.saturating_sub(paused_count));
        let new_slots = self.slots_on(host);
        self.subtract_slots(previous_slots);
        self.add_slots(new_slots);
        let is_improvement = self.placeable_task_count() > previous_task_count;
        if !is_improvement {
            self.placement_run
                .loads
                .set_vm_task_count(id, vm_task_count);
            self.subtract_slots(new_slots);
            self.add_slots(previous_slots);
        }
        is_improvement
    }
}
