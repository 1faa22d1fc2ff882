//! The hosts of a snapshot, with an index. The index ranks the hosts by the processor share that
//! one more task would get.
//!
//! Updating the index after a change of a host or of one of its tasks takes O(log hosts), and so
//! does removing a sample that has become too old. A decision therefore examines the best hosts
//! only.
//!
//! Every mutable access marks the host as changed, and [`HostList::refresh`] reindexes the marked
//! hosts. A decision about a snapshot that was not refreshed builds a new index. That is slower but
//! has the same result.

use super::guest_classes::EvictableGuests;
use super::host_load::{HostLoad, ProcessorShare};
use super::{HostView, SAMPLE_AGE_MAX, TaskView};
use sempa_proto::{HostId, Micros, Tid};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::ops::{Deref, IndexMut};

/// Index entry of a computing task.
#[derive(Clone, Copy, Debug)]
struct IndexedTask {
    tid: Tid,
    user: u32,
    job: Tid,
    since: Micros,
    /// True if the task can be preempted: it is not migrating, and its host accepts guests.
    preemptible: bool,
}

/// Index entry of a host.
#[derive(Clone, Debug)]
struct IndexedHost {
    load: HostLoad,
    /// Number of computing tasks that are not migrating away, including tasks that are being
    /// started.
    staying_tasks: u32,
    zone: u32,
    /// True if the host accepts guests and is in the ranking.
    ranked: bool,
    /// Time when the sample becomes too old; `None` without a valid sample.
    sample_expires_at: Option<Micros>,
    /// Targets of the tasks that migrate from the host, one entry per task.
    migration_targets: Vec<HostId>,
    migrating_tasks: usize,
    tasks: Vec<IndexedTask>,
}

/// Index of the hosts of a snapshot.
#[derive(Clone, Debug, Default)]
pub(super) struct HostIndex {
    /// Index entry of each host, by host number.
    entries: Vec<Option<Box<IndexedHost>>>,
    shares_by_zone: BTreeMap<u32, BTreeSet<ProcessorShare>>,
    /// Ranked hosts with tasks of the virtual machine, by the rate of each of these tasks.
    slowest: BTreeSet<(u64, HostId)>,
    closed_hosts: BTreeSet<HostId>,
    /// Guests on hosts that accept no guests, except migrating ones.
    guests: EvictableGuests,
    arriving_tasks: BTreeMap<HostId, u32>,
    sample_expiries: BTreeSet<(Micros, HostId)>,
    migrating_tasks: usize,
    /// Pairs of a job and a host on which the job has computing tasks.
    hosts_by_job: BTreeSet<(Tid, HostId)>,
    /// Preemptible tasks as (user, start time, tid, host): by user, the most recently started
    /// first.
    preemptible: BTreeSet<(u32, Reverse<Micros>, Tid, HostId)>,
    /// Hosts with suspended tasks that are not migrating.
    suspended: BTreeSet<HostId>,
}

/// Merges sequences in descending order into one sequence in descending order.
pub(super) fn merge_descending<T: Ord, L: Iterator<Item = T>>(
    lists: impl Iterator<Item = L>,
) -> impl Iterator<Item = T> {
    let mut lists: Vec<L> = lists.collect();
    let mut first: BinaryHeap<(T, usize)> = lists
        .iter_mut()
        .enumerate()
        .filter_map(|(i, list)| Some((list.next()?, i)))
        .collect();
    std::iter::from_fn(move || {
        let mut top = first.peek_mut()?;
        let i = top.1;
        Some(match lists[i].next() {
            Some(next) => std::mem::replace(&mut *top, (next, i)).0,
            None => PeekMut::pop(top).0,
        })
    })
}

impl HostIndex {
    fn entry(&self, host: HostId) -> Option<&IndexedHost> {
        self.entries.get(usize::from(host.index()))?.as_deref()
    }

    pub(super) fn load(&self, host: HostId) -> Option<HostLoad> {
        self.entry(host).map(|e| e.load)
    }

    pub(super) fn zone(&self, host: HostId) -> Option<u32> {
        self.entry(host).map(|e| e.zone)
    }

    pub(super) fn is_ranked(&self, host: HostId) -> bool {
        self.entry(host).is_some_and(|e| e.ranked)
    }

    /// Returns the hosts with computing tasks of this job, by ascending id.
    pub(super) fn hosts_of(&self, job: Tid) -> impl Iterator<Item = HostId> {
        let all = (job, HostId::MASTER)..;
        self.hosts_by_job
            .range(all)
            .take_while(move |(of, _)| *of == job)
            .map(|(_, host)| *host)
    }

    /// Returns the number of computing tasks of a job on a host.
    pub(super) fn computing_tasks(&self, host: HostId, job: Tid) -> usize {
        let tasks = self.entry(host).map_or(&[][..], |entry| &entry.tasks);
        tasks.iter().filter(|task| task.job == job).count()
    }

    /// Returns the preemptible tasks of a user with their hosts, the most recently started first.
    pub(super) fn preemptible_tasks(&self, user: u32) -> impl Iterator<Item = (Tid, HostId)> {
        let all = (user, Reverse(Micros(u64::MAX)), Tid::NONE, HostId::MASTER)..;
        self.preemptible
            .range(all)
            .take_while(move |(of, ..)| *of == user)
            .map(|(.., tid, host)| (*tid, *host))
    }

    /// Returns the hosts with suspended tasks that are not migrating, by ascending id.
    pub(super) fn hosts_with_suspended(&self) -> &BTreeSet<HostId> {
        &self.suspended
    }

    pub(super) fn shares_by_zone(&self) -> impl Iterator<Item = (&u32, &BTreeSet<ProcessorShare>)> {
        self.shares_by_zone.iter()
    }

    /// Returns the hosts that accept no guests, by ascending id.
    pub(super) fn closed_hosts(&self) -> &BTreeSet<HostId> {
        &self.closed_hosts
    }

    /// Returns the guests on hosts that accept no guests, except migrating ones.
    pub(super) fn guests(&self) -> &EvictableGuests {
        &self.guests
    }

    /// Returns the number of migrating tasks.
    pub(super) fn migrating_tasks(&self) -> usize {
        self.migrating_tasks
    }

    /// Returns the ranked hosts with tasks of the virtual machine, the host with the slowest tasks
    /// first.
    pub(super) fn slowest_first(&self) -> impl Iterator<Item = HostId> {
        self.slowest.iter().map(|(_, id)| *id)
    }

    /// Returns the ranked hosts, the one with the largest share for a further task first.
    pub(super) fn best_first(&self) -> impl Iterator<Item = HostId> {
        merge_descending(
            self.shares_by_zone
                .values()
                .map(|shares| shares.iter().rev()),
        )
        .map(ProcessorShare::host)
    }

    fn rank(&mut self, zone: u32, load: &HostLoad) {
        self.shares_by_zone
            .entry(zone)
            .or_default()
            .insert(load.share());
        if load.own_tasks > 0 {
            self.slowest.insert((load.rate() as u64, load.host));
        }
    }

    fn unrank(&mut self, zone: u32, load: &HostLoad) {
        self.slowest.remove(&(load.rate() as u64, load.host));
        if let Some(shares) = self.shares_by_zone.get_mut(&zone) {
            shares.remove(&load.share());
            if shares.is_empty() {
                self.shares_by_zone.remove(&zone);
            }
        }
    }

    /// Removes a host from the index. Returns the targets of the host's migrating tasks.
    fn remove_host(&mut self, id: HostId) -> Vec<HostId> {
        self.closed_hosts.remove(&id);
        self.guests.remove_host(id);
        self.suspended.remove(&id);
        let entry = self
            .entries
            .get_mut(usize::from(id.index()))
            .and_then(Option::take);
        let Some(entry) = entry else {
            return Vec::new();
        };
        for task in &entry.tasks {
            self.hosts_by_job.remove(&(task.job, id));
            if task.preemptible {
                self.preemptible
                    .remove(&(task.user, Reverse(task.since), task.tid, id));
            }
        }
        if entry.ranked {
            self.unrank(entry.zone, &entry.load);
        }
        if let Some(at) = entry.sample_expires_at {
            self.sample_expiries.remove(&(at, id));
        }
        self.migrating_tasks -= entry.migrating_tasks;
        for to in &entry.migration_targets {
            let remaining = self
                .arriving_tasks
                .get_mut(to)
                .expect("counted when it was put in");
            *remaining -= 1;
            if *remaining == 0 {
                self.arriving_tasks.remove(to);
            }
        }
        entry.migration_targets
    }

    /// Adds a host to the index. Returns the targets of the host's migrating tasks.
    fn insert_host(&mut self, host: &HostView, now: Micros) -> Vec<HostId> {
        let (mut staying, mut leaving) = (host.starting_tasks, Vec::new());
        for task in host.tasks.iter().filter(|t| t.computes()) {
            match task.migrating.flatten() {
                Some(to) => leaving.push(to),
                None => staying += 1,
            }
        }
        for to in &leaving {
            *self.arriving_tasks.entry(*to).or_default() += 1;
        }
        let under_way = host.tasks.iter().filter(|t| t.migrating.is_some()).count();
        self.migrating_tasks += under_way;
        let expires = host
            .fresh_sample(now)
            .map(|s| s.received_at + SAMPLE_AGE_MAX + Micros(1));
        self.sample_expiries.extend(expires.map(|at| (at, host.id)));
        let load = HostLoad::of(
            host,
            now,
            staying + self.arriving_tasks.get(&host.id).copied().unwrap_or(0),
        );
        let ranked = !host.owner.excludes_guests();
        if ranked {
            self.rank(host.zone, &load);
        } else {
            self.closed_hosts.insert(host.id);
            self.guests.insert_host(host);
        }
        let tasks = self.insert_tasks(host);
        let (zone, to) = (host.zone, leaving.clone());
        let at = usize::from(host.id.index());
        if self.entries.len() <= at {
            self.entries.resize_with(at + 1, || None);
        }
        self.entries[at] = Some(Box::new(IndexedHost {
            load,
            staying_tasks: staying,
            zone,
            ranked,
            sample_expires_at: expires,
            migration_targets: leaving,
            migrating_tasks: under_way,
            tasks,
        }));
        to
    }

    fn insert_tasks(&mut self, host: &HostView) -> Vec<IndexedTask> {
        if host
            .tasks
            .iter()
            .any(|task| task.suspended && task.migrating.is_none())
        {
            self.suspended.insert(host.id);
        }
        let indexed = |task: &TaskView| {
            let TaskView {
                tid,
                user,
                job,
                started_at: since,
                ..
            } = *task;
            IndexedTask {
                tid,
                user,
                job,
                since,
                preemptible: task.migrating.is_none() && host.owner.exclusion_reason().is_none(),
            }
        };
        let tasks: Vec<IndexedTask> = host
            .tasks
            .iter()
            .filter(|task| task.computes())
            .map(indexed)
            .collect();
        self.hosts_by_job
            .extend(tasks.iter().map(|task| (task.job, host.id)));
        let settled = tasks.iter().filter(|task| task.preemptible);
        self.preemptible
            .extend(settled.map(|task| (task.user, Reverse(task.since), task.tid, host.id)));
        tasks
    }

    /// Updates the load of a host after the number of tasks that migrate to it has changed.
    fn update_arriving(&mut self, id: HostId) {
        let arriving = self.arriving_tasks.get(&id).copied().unwrap_or(0);
        let Some(entry) = self
            .entries
            .get_mut(usize::from(id.index()))
            .and_then(Option::as_mut)
        else {
            return;
        };
        let (before, ranked, zone) = (entry.load, entry.ranked, entry.zone);
        entry.load.own_tasks = entry.staying_tasks + arriving;
        let after = entry.load;
        if ranked {
            self.unrank(zone, &before);
            self.rank(zone, &after);
        }
    }

    fn reindex(&mut self, list: &[HostView], id: HostId, now: Micros) {
        let mut targets = self.remove_host(id);
        if let Ok(i) = position(list, id) {
            targets.extend(self.insert_host(&list[i], now));
        }
        targets.into_iter().for_each(|to| self.update_arriving(to));
    }
}

/// Returns the position of a host in a list sorted by id, or its insertion point as an error. Tries
/// the position equal to the host number first, because host numbers are usually consecutive.
fn position(list: &[HostView], id: HostId) -> Result<usize, usize> {
    let guess = usize::from(id.index()) - 1;
    if list.get(guess).is_some_and(|host| host.id == id) {
        return Ok(guess);
    }
    list.binary_search_by_key(&id, |host| host.id)
}

/// Hosts sorted by id. Dereferences to a slice; every mutable access marks the host for reindexing.
#[derive(Clone, Debug, Default)]
pub struct HostList {
    list: Vec<HostView>,
    index: HostIndex,
    dirty: BTreeSet<HostId>,
}

impl HostList {
    /// Returns the position of a host in the list.
    pub(super) fn position(&self, id: HostId) -> Option<usize> {
        position(&self.list, id).ok()
    }

    /// Adds or replaces a host.
    pub fn insert(&mut self, host: HostView) {
        self.dirty.insert(host.id);
        match position(&self.list, host.id) {
            Ok(i) => self.list[i] = host,
            Err(i) => self.list.insert(i, host),
        }
    }

    pub fn remove(&mut self, id: HostId) {
        if let Some(i) = self.position(id) {
            self.list.remove(i);
            self.dirty.insert(id);
        }
    }

    /// Returns a host for modification and marks it as changed. Its id must not change.
    pub fn edit(&mut self, id: HostId) -> Option<&mut HostView> {
        let i = self.position(id)?;
        self.dirty.insert(id);
        Some(&mut self.list[i])
    }

    /// Returns all hosts for modification and marks all of them as changed.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, HostView> {
        self.dirty.extend(self.list.iter().map(|h| h.id));
        self.list.iter_mut()
    }

    /// Reindexes marked hosts and hosts whose sample is too old at `now`.
    pub fn refresh(&mut self, now: Micros) {
        while let Some((at, id)) = self
            .index
            .sample_expiries
            .first()
            .copied()
            .filter(|(at, _)| *at <= now)
        {
            self.index.sample_expiries.remove(&(at, id));
            self.dirty.insert(id);
        }
        for id in std::mem::take(&mut self.dirty) {
            self.index.reindex(&self.list, id, now);
        }
    }

    /// Returns the index as of `now`. Builds a new one if the hosts were not refreshed.
    pub(super) fn index(&self, now: Micros) -> Cow<'_, HostIndex> {
        if self.dirty.is_empty()
            && self
                .index
                .sample_expiries
                .first()
                .is_none_or(|(at, _)| *at > now)
        {
            return Cow::Borrowed(&self.index);
        }
        let mut index = HostIndex::default();
        self.list
            .iter()
            .for_each(|host| index.reindex(&self.list, host.id, now));
        Cow::Owned(index)
    }
}

impl Deref for HostList {
    type Target = [HostView];

    fn deref(&self) -> &[HostView] {
        &self.list
    }
}

impl std::ops::Index<usize> for HostList {
    type Output = HostView;

    fn index(&self, i: usize) -> &HostView {
        &self.list[i]
    }
}

impl IndexMut<usize> for HostList {
    fn index_mut(&mut self, i: usize) -> &mut HostView {
        self.dirty.insert(self.list[i].id);
        &mut self.list[i]
    }
}

impl FromIterator<HostView> for HostList {
    fn from_iter<I: IntoIterator<Item = HostView>>(hosts: I) -> HostList {
        let mut all = HostList::default();
        hosts.into_iter().for_each(|host| all.insert(host));
        all
    }
}

impl<'a> IntoIterator for &'a HostList {
    type Item = &'a HostView;
    type IntoIter = std::slice::Iter<'a, HostView>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.iter()
    }
}
