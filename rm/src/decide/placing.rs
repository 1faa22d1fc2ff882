//! Distributes the tasks of one spawn among the hosts that fit. Holds the state of one placement
//! decision.

use super::choice::{Choice, Offer};
use super::excluded::Excluding;
use super::load::{Load, Loads, Near, unknown};
use super::place::{Ask, EXPLAINED_HOSTS_MAX, Placement, Why, named, not_asked, not_fit};
use super::{Excluded, HostView, Policy, Rank, Reason, Snapshot, Together, Wants, WantsError};
use sempa_proto::{HostId, PvmError};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

/// Maximum number of excluded hosts that a search by share may meet. Beyond it, a scan of all hosts
/// by id is faster.
const UNFIT_MAX: usize = 256;

/// Returns a placement in which no task gets a host.
pub(super) fn nowhere(
    snapshot: &Snapshot,
    ask: &Ask<'_>,
    error: PvmError,
    why: Why,
    excluded: Excluded,
) -> Placement {
    let hosts = vec![Err(error); ask.count as usize];
    Placement {
        hosts,
        why,
        excluded,
        unknown: Vec::new(),
        rotation: snapshot.rotation,
    }
}

/// State of one placement decision.
pub(super) struct Placing<'a> {
    snapshot: &'a Snapshot,
    ask: &'a Ask<'a>,
    wants: Wants,
    loads: Loads<'a>,
    /// Zones of the request's peers.
    zones: BTreeSet<u32>,
    excluded: Excluding,
}

impl<'a> Placing<'a> {
    pub(super) fn new(snapshot: &'a Snapshot, ask: &'a Ask<'a>, wants: Wants) -> Placing<'a> {
        let zones = ask
            .peers
            .iter()
            .filter_map(|id| snapshot.host(*id))
            .map(|h| h.zone)
            .collect();
        Placing {
            snapshot,
            ask,
            wants,
            loads: Loads::of(snapshot),
            zones,
            excluded: Excluding::default(),
        }
    }

    /// Selects the strategy and places the tasks.
    ///
    /// In a virtual machine with more than [`EXPLAINED_HOSTS_MAX`] hosts, a placement by load tries
    /// the best hosts first and scans all hosts only if that fails.
    pub(super) fn decide(mut self, choice: Option<&dyn Choice>) -> Placement {
        let plain = choice.is_none()
            && self.wants.rank.is_none()
            && self.wants.together != Together::SameHost;
        let by_load =
            plain && self.snapshot.policy == Policy::Load && !self.ask.request.names_one_host();
        if by_load && self.snapshot.hosts.len() > EXPLAINED_HOSTS_MAX {
            let quick = self.by_load(None);
            if let Some((hosts, looked_at)) = quick.filter(|(hosts, _)| !hosts.is_empty()) {
                self.add_owners();
                let unknown = unknown(self.snapshot, looked_at.into_iter());
                let (why, rotation) = (self.why_load(hosts.first()), self.snapshot.rotation);
                return self.done(hosts, unknown, why, rotation);
            }
            self.excluded = Excluding::default();
        }
        self.among_all(choice, by_load)
    }

    fn exclusion<'h>(&self, host: &'h HostView) -> Option<Reason<&'h str>> {
        let load = || self.loads.load(host.id);
        not_asked(self.ask, host)
            .or_else(|| not_fit(self.ask, &self.wants, host, self.snapshot.now, load))
    }

    /// Returns how many tasks of this spawn the host can take.
    fn capacity(&self, host: &HostView) -> u32 {
        self.wants
            .capacity(host, self.snapshot.now)
            .min(self.loads.load(host.id).left())
    }

    /// Checks every host, then places the tasks on those that fit.
    fn among_all(mut self, choice: Option<&dyn Choice>, by_load: bool) -> Placement {
        let snapshot = self.snapshot;
        let mut fit = Vec::new();
        for host in &snapshot.hosts {
            match self.exclusion(host) {
                None => fit.push(host),
                Some(why) => self.excluded.add(host.id, why),
            }
        }
        if fit.is_empty() {
            return self.none();
        }
        let mut rotation = snapshot.rotation;
        let (hosts, why) = if let Some(choice) = choice {
            match self.chosen(choice, &fit) {
                Ok(hosts) => (
                    hosts,
                    Why::Chosen {
                        by: choice.name().to_string(),
                    },
                ),
                Err(why) => {
                    let why = Why::NotChosen {
                        by: choice.name().to_string(),
                        why,
                    };
                    return nowhere(
                        snapshot,
                        self.ask,
                        PvmError::OutOfRes,
                        why,
                        self.excluded.done(),
                    );
                }
            }
        } else if self.wants.together == Together::SameHost {
            let Some(host) = self.same_host(&fit) else {
                return self.none();
            };
            (
                vec![host.id; self.ask.count as usize],
                Why::SameHost {
                    host: host.name.clone(),
                },
            )
        } else if let Some(rank) = self.wants.rank {
            let hosts = self.ranked(rank, &fit);
            let host = hosts
                .first()
                .map(|id| snapshot.name(*id))
                .unwrap_or_default();
            (hosts, Why::Rank { rank, host })
        } else if by_load {
            let already = std::mem::take(&mut self.excluded);
            let hosts = self
                .by_load(Some(&fit))
                .map(|(hosts, _)| hosts)
                .unwrap_or_default();
            self.excluded = already;
            let why = self.why_load(hosts.first());
            (hosts, why)
        } else {
            // Hosts with an idle login get only the tasks for which the other hosts have no room.
            let (calm, others): (Vec<_>, Vec<_>) = fit
                .iter()
                .copied()
                .partition(|host: &&HostView| host.owner.is_calm());
            let mut hosts = self.in_turn(&calm, self.ask.count as usize);
            let left = self.ask.count as usize - hosts.len();
            hosts.extend(self.in_turn(&others, left));
            if snapshot.policy == Policy::RoundRobin {
                rotation = hosts.last().copied().unwrap_or(rotation);
            }
            let among = if left == 0 { calm.len() } else { fit.len() };
            let asked = Why::Asked {
                host: named(&self.ask.request.place).to_string(),
            };
            (
                hosts,
                if self.ask.request.names_one_host() {
                    asked
                } else {
                    Why::InTurn { hosts: among }
                },
            )
        };
        if hosts.is_empty() {
            return self.none();
        }
        let of_load = snapshot.policy == Policy::Load && !self.ask.request.names_one_host();
        let unknown = if of_load {
            unknown(snapshot, fit.iter().map(|h| h.id))
        } else {
            Vec::new()
        };
        self.done(hosts, unknown, why, rotation)
    }

    /// Returns a placement without hosts. The error is `OutOfRes` if a later attempt may succeed.
    fn none(self) -> Placement {
        let (error, why) = if !self.excluded.asked_for && !self.has_fit() {
            (PvmError::NoHost, Why::NoSuchHost)
        } else if self.excluded.no_answer {
            (PvmError::HostFail, Why::NoneFree)
        } else if self.excluded.may_pass || self.has_fit() {
            (PvmError::OutOfRes, Why::NoneFree)
        } else {
            (PvmError::NoHost, Why::NoneFree)
        };
        nowhere(self.snapshot, self.ask, error, why, self.excluded.done())
    }

    /// True if some host is not excluded; it may still have no room.
    fn has_fit(&self) -> bool {
        self.excluded.count() < self.snapshot.hosts.len()
    }

    fn done(
        self,
        mut hosts: Vec<HostId>,
        unknown: Vec<String>,
        why: Why,
        rotation: HostId,
    ) -> Placement {
        let count = self.ask.count as usize;
        hosts.truncate(count);
        let missing = count - hosts.len();
        let placed = hosts.into_iter().map(Ok);
        let hosts = placed
            .chain(std::iter::repeat_n(Err(PvmError::OutOfRes), missing))
            .collect();
        Placement {
            hosts,
            why,
            excluded: self.excluded.done(),
            unknown,
            rotation,
        }
    }

    fn why_load(&self, first: Option<&HostId>) -> Why {
        let index = Loads::of(self.snapshot);
        let told = first.map(|id| (self.snapshot.name(*id), index.share(*id).usable));
        let (host, usable) = told.unwrap_or_default();
        Why::Load { host, usable }
    }

    /// Records some of the hosts that accept no guests, to explain the decision.
    fn add_owners(&mut self) {
        let index = self.snapshot.hosts.index(self.snapshot.now);
        let owned = index
            .with_owner()
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

    /// Distributes tasks as PVM does: each host gets a consecutive run of tasks, starting after the
    /// last host used.
    fn in_turn(&self, fit: &[&HostView], count: usize) -> Vec<HostId> {
        let start = fit
            .iter()
            .position(|h| h.id > self.snapshot.rotation)
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

    /// Places each task where it gets the largest share, given the tasks placed before.
    ///
    /// Examines the best hosts only, of all hosts or of `fit`. Returns the hosts of the tasks and
    /// the examined hosts that fit. `None` if a search among all hosts meets more than
    /// [`UNFIT_MAX`] excluded ones.
    fn by_load(&mut self, fit: Option<&[&HostView]>) -> Option<(Vec<HostId>, Vec<HostId>)> {
        let count = self.ask.count as usize;
        let mut unfit = 0;
        let (mut hosts, mut looked_at) = (Vec::with_capacity(count), Vec::new());
        let mut room = BTreeMap::<HostId, u32>::new();
        let mut heap = BinaryHeap::<Near>::new();
        let untouched = Loads::of(self.snapshot);
        let near = |host: &&HostView| untouched.near(untouched.share(host.id), &self.zones);
        let mut some: BinaryHeap<Near> = fit.into_iter().flatten().map(near).collect();
        let all = fit
            .is_none()
            .then(|| untouched.best(&self.zones))
            .into_iter()
            .flatten();
        let mut best = all.chain(std::iter::from_fn(|| some.pop())).peekable();
        while hosts.len() < count {
            // Examine every host that may be better than the best one examined so far.
            while let Some(near) = best.next_if(|near| heap.peek().is_none_or(|top| near > top)) {
                let Some(host) = self.snapshot.host(near.share.host()) else {
                    continue;
                };
                let exclusion = self.exclusion(host);
                unfit += usize::from(exclusion.is_some());
                if unfit > UNFIT_MAX {
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
            let next = self.loads.add(host);
            if *left > 0 {
                heap.push(self.loads.near(next, &self.zones));
            }
        }
        Some((hosts, looked_at))
    }

    /// Returns the host on which all tasks together get most; `None` if no host has room for all.
    fn same_host<'h>(&self, fit: &[&'h HostView]) -> Option<&'h HostView> {
        let count = self.ask.count;
        let room = fit.iter().filter(|h| self.capacity(h) >= count);
        let last = |h: &HostView| {
            let load = self.loads.load(h.id);
            let last = Load {
                own: load.own + count.saturating_sub(1),
                ..load
            };
            self.loads.near(last.share(), &self.zones)
        };
        room.max_by_key(|h| last(h)).copied()
    }

    /// Places tasks by the requested rank: fills the best host with one task per processor, then
    /// the next one. When all are filled, further rounds follow in the same order.
    fn ranked(&self, rank: Rank, fit: &[&HostView]) -> Vec<HostId> {
        let key = |h: &&HostView| {
            let number = rank.by.of(h, self.snapshot.now, || self.loads.load(h.id));
            let order = number.map(|n| if rank.least { u64::MAX - n } else { n });
            (!h.owner.is_calm(), Reverse(order), h.id)
        };
        // A heap instead of a sorted list: hosts after the last one that gets a task need no order.
        let mut behind: BinaryHeap<_> = fit
            .iter()
            .enumerate()
            .map(|(i, host)| Reverse((key(host), i)))
            .collect();
        let count = self.ask.count as usize;
        let (mut hosts, mut before) = (Vec::with_capacity(count), Vec::new());
        while hosts.len() < count {
            let Some(Reverse((_, i))) = behind.pop() else {
                break;
            };
            let room = self.capacity(fit[i]);
            before.push((fit[i], room - fill(&mut hosts, fit[i], room, count)));
        }
        while hosts.len() < count && before.iter().any(|(_, room)| *room > 0) {
            before
                .iter_mut()
                .for_each(|(host, room)| *room -= fill(&mut hosts, host, *room, count));
        }
        hosts
    }

    /// Returns the hosts that the external chooser selected, after checking them.
    fn chosen(&self, choice: &dyn Choice, fit: &[&HostView]) -> Result<Vec<HostId>, String> {
        let offer = |host: &&HostView| (self.loads.share(host.id), self.capacity(host));
        let offers: Vec<Offer<'_>> = fit
            .iter()
            .map(|host| (*host, offer(host)))
            .map(|(host, (share, capacity))| Offer {
                host,
                share,
                capacity,
            })
            .collect();
        let chosen = choice.choose(self.ask.request, &offers, self.ask.count as usize)?;
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

/// Gives a host one task per processor, limited by its room and the remaining tasks. Returns the
/// number of slots used, which may exceed the remaining tasks.
fn fill(hosts: &mut Vec<HostId>, host: &HostView, room: u32, count: usize) -> u32 {
    let share = host.cores.max(1).min(room);
    hosts.extend(std::iter::repeat_n(
        host.id,
        (share as usize).min(count - hosts.len()),
    ));
    share
}

/// Counts how many tasks of a spawn would get hosts if some running tasks were paused. The result
/// equals that of [`super::place()`] and is updated host by host.
pub(super) struct Places<'a> {
    placing: Placing<'a>,
    count: u64,
    room: Room,
}

/// Slots summed over some hosts.
#[derive(Clone, Copy, Default)]
struct Room {
    /// Slots for tasks of the spawn.
    tasks: u64,
    /// Hosts with slots for all tasks of the spawn.
    for_all: u64,
}

impl<'a> Places<'a> {
    /// Counts the slots of the unchanged snapshot.
    ///
    /// # Errors
    /// Those of [`Wants::of`].
    pub(super) fn of(snapshot: &'a Snapshot, ask: &'a Ask<'a>) -> Result<Places<'a>, WantsError> {
        let placing = Placing::new(snapshot, ask, Wants::of(ask.request)?);
        let mut places = Places {
            placing,
            count: u64::from(ask.count),
            room: Room::default(),
        };
        for host in &snapshot.hosts {
            places.add(places.room_on(host));
        }
        Ok(places)
    }

    /// Returns the slots on a host; 0 if it is excluded.
    fn room_on(&self, host: &HostView) -> u64 {
        if self.placing.exclusion(host).is_some() {
            return 0;
        }
        u64::from(self.placing.capacity(host)).min(self.count)
    }

    fn add(&mut self, tasks: u64) {
        self.room.tasks += tasks;
        self.room.for_all += u64::from(tasks == self.count);
    }

    fn sub(&mut self, tasks: u64) {
        self.room.tasks -= tasks;
        self.room.for_all -= u64::from(tasks == self.count);
    }

    fn tasks(&self) -> u64 {
        if self.placing.wants.together == Together::SameHost {
            return if self.room.for_all > 0 { self.count } else { 0 };
        }
        self.room.tasks.min(self.count)
    }

    /// True if all tasks get hosts.
    pub(super) fn are_enough(&self) -> bool {
        self.tasks() == self.count
    }

    /// Assumes that `several` tasks on this host are paused, and keeps that assumption if more
    /// tasks of the spawn get hosts. Returns whether they do.
    pub(super) fn gain_without(&mut self, id: HostId, several: u32) -> bool {
        let Some(host) = self.placing.snapshot.host(id) else {
            return false;
        };
        let (tasks, before, own) = (
            self.tasks(),
            self.room_on(host),
            self.placing.loads.load(id).own,
        );
        self.placing.loads.put(id, own.saturating_sub(several));
        let after = self.room_on(host);
        self.sub(before);
        self.add(after);
        let gains = self.tasks() > tasks;
        if !gains {
            self.placing.loads.put(id, own);
            self.sub(after);
            self.add(before);
        }
        gains
    }
}
