//! The hosts of a snapshot, with an index. The index ranks the hosts by the processor share that
//! one more task would get.
//!
//! After a change of a host or of one of its tasks, the update of the index takes O(log hosts). The
//! removal of a sample that has become too old takes the same time. A decision therefore examines
//! only the best hosts.
//!
//! Every mutable access marks the host as changed, and [`HostList::refresh`] reindexes the marked
//! hosts. A decision about a snapshot that was not refreshed builds a new index, which takes longer
//! but leads to the same result.

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
    started_at: Micros,
    /// True if the task can be preempted: it is not migrating, and its host accepts guests.
    preemptible: bool,
}

/// Index entry of a host.
#[derive(Clone, Debug)]
struct IndexedHost {
    load: HostLoad,
    /// Number of computing tasks that are not migrating to another host, including tasks that are
    /// being started.
    staying_task_count: u32,
    zone: u32,
    /// True if the host accepts guests and is in the ranking.
    ranked: bool,
    /// Time when the sample becomes too old; `None` without a valid sample.
    sample_expires_at: Option<Micros>,
    /// Targets of the tasks that migrate from the host, one entry per task.
    migration_targets: Vec<HostId>,
    migrating_task_count: usize,
    tasks: Vec<IndexedTask>,
}

/// Index of the hosts of a snapshot, for searches by decisions.
#[derive(Clone, Debug, Default)]
pub(super) struct HostIndex {
    /// Index entry of each host, by host number.
    entries: Vec<Option<Box<IndexedHost>>>,
    shares_by_zone: BTreeMap<u32, BTreeSet<ProcessorShare>>,
    /// Ranked hosts with tasks of the virtual machine, by the rate of each of these tasks in
    /// thousandths of an ordinary processor.
    hosts_by_task_rate: BTreeSet<(u64, HostId)>,
    closed_hosts: BTreeSet<HostId>,
    /// Guests on hosts that accept no guests, except migrating ones.
    evictable_guests: EvictableGuests,
    arriving_task_counts: BTreeMap<HostId, u32>,
    sample_expiries: BTreeSet<(Micros, HostId)>,
    migrating_task_count: usize,
    /// Pairs of a job and a host on which tasks of the job compute.
    hosts_by_job: BTreeSet<(Tid, HostId)>,
    /// Preemptible tasks as (user, start time, tid, host): by user, the most recently started
    /// first.
    preemptible_by_user: BTreeSet<(u32, Reverse<Micros>, Tid, HostId)>,
    /// Hosts with suspended tasks that are not migrating.
    suspended_task_hosts: BTreeSet<HostId>,
}

/// Merges sequences in descending order into one sequence in descending order.
pub(super) fn merge_descending<T: Ord, L: Iterator<Item = T>>(
    lists: impl Iterator<Item = L>,
) -> impl Iterator<Item = T> {
    let mut lists: Vec<L> = lists.collect();
    let mut heads: BinaryHeap<(T, usize)> = lists
        .iter_mut()
        .enumerate()
        .filter_map(|(i, list)| Some((list.next()?, i)))
        .collect();
    std::iter::from_fn(move || {
        let mut largest_head = heads.peek_mut()?;
        let i = largest_head.1;
        Some(match lists[i].next() {
            Some(next) => std::mem::replace(&mut *largest_head, (next, i)).0,
            None => PeekMut::pop(largest_head).0,
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
    pub(super) fn job_hosts(&self, job: Tid) -> impl Iterator<Item = HostId> {
        let job_range = (job, HostId::MASTER)..;
        self.hosts_by_job
            .range(job_range)
            .take_while(move |(entry_job, _)| *entry_job == job)
            .map(|(_, host)| *host)
    }

    /// Returns the number of computing tasks of a job on a host.
    pub(super) fn computing_task_count(&self, host: HostId, job: Tid) -> usize {
        let tasks = self.entry(host).map_or(&[][..], |entry| &entry.tasks);
        tasks.iter().filter(|task| task.job == job).count()
    }

    /// Returns the preemptible tasks of a user with their hosts, the most recently started task
    /// first.
    pub(super) fn preemptible_tasks(&self, user: u32) -> impl Iterator<Item = (Tid, HostId)> {
        let user_range = (user, Reverse(Micros(u64::MAX)), Tid::NONE, HostId::MASTER)..;
        self.preemptible_by_user
            .range(user_range)
            .take_while(move |(entry_user, ..)| *entry_user == user)
            .map(|(.., tid, host)| (*tid, *host))
    }

    /// Returns the hosts with suspended tasks that are not migrating, by ascending id.
    pub(super) fn hosts_with_suspended_tasks(&self) -> &BTreeSet<HostId> {
        &self.suspended_task_hosts
    }

    pub(super) fn shares_by_zone(&self) -> impl Iterator<Item = (&u32, &BTreeSet<ProcessorShare>)> {
        self.shares_by_zone.iter()
    }

    /// Returns the hosts that accept no guests, by ascending id.
    pub(super) fn closed_hosts(&self) -> &BTreeSet<HostId> {
        &self.closed_hosts
    }

    /// Returns the guests on hosts that accept no guests, except migrating ones.
    pub(super) fn evictable_guests(&self) -> &EvictableGuests {
        &self.evictable_guests
    }

    pub(super) fn migrating_task_count(&self) -> usize {
        self.migrating_task_count
    }

    /// Returns the ranked hosts with tasks of the virtual machine, the host with the slowest tasks
    /// first.
    pub(super) fn hosts_slowest_first(&self) -> impl Iterator<Item = HostId> {
        self.hosts_by_task_rate.iter().map(|(_, id)| *id)
    }

    /// Returns the ranked hosts by the share that one more task would get, the largest share first.
    pub(super) fn hosts_best_first(&self) -> impl Iterator<Item = HostId> {
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
        if load.vm_task_count > 0 {
            self.hosts_by_task_rate
                .insert((load.task_rate() as u64, load.host));
        }
    }

    fn unrank(&mut self, zone: u32, load: &HostLoad) {
        self.hosts_by_task_rate
            .remove(&(load.task_rate() as u64, load.host));
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
        self.evictable_guests.remove_host(id);
        self.suspended_task_hosts.remove(&id);
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
                self.preemptible_by_user.remove(&(
                    task.user,
                    Reverse(task.started_at),
                    task.tid,
                    id,
                ));
            }
        }
        if entry.ranked {
            self.unrank(entry.zone, &entry.load);
        }
        if let Some(expires_at) = entry.sample_expires_at {
            self.sample_expiries.remove(&(expires_at, id));
        }
        self.migrating_task_count -= entry.migrating_task_count;
        for target in &entry.migration_targets {
            let remaining_count = self
                .arriving_task_counts
                .get_mut(target)
                .expect("counted when it was put in");
            *remaining_count -= 1;
            if *remaining_count == 0 {
                self.arriving_task_counts.remove(target);
            }
        }
        entry.migration_targets
    }

    /// Adds a host to the index. Returns the targets of the host's migrating tasks.
    fn insert_host(&mut self, host: &HostView, now: Micros) -> Vec<HostId> {
        let (mut staying_count, mut migration_targets_here) =
            (host.starting_task_count, Vec::new());
        for task in host.tasks.iter().filter(|t| t.computes()) {
            match task.migration.flatten() {
                Some(to) => migration_targets_here.push(to),
                None => staying_count += 1,
            }
        }
        for to in &migration_targets_here {
            *self.arriving_task_counts.entry(*to).or_default() += 1;
        }
        let migrating_count = host.tasks.iter().filter(|t| t.migration.is_some()).count();
        self.migrating_task_count += migrating_count;
        let expiry = host
            .recent_sample(now)
            .map(|s| s.received_at + SAMPLE_AGE_MAX + Micros(1));
        self.sample_expiries.extend(expiry.map(|at| (at, host.id)));
        let load = HostLoad::compute(
            host,
            now,
            staying_count
                + self
                    .arriving_task_counts
                    .get(&host.id)
                    .copied()
                    .unwrap_or(0),
        );
        let ranked = !host.owner.excludes_guests();
        if ranked {
            self.rank(host.zone, &load);
        } else {
            self.closed_hosts.insert(host.id);
            self.evictable_guests.insert_host(host);
        }
        let tasks = self.insert_tasks(host);
        let (zone, to) = (host.zone, migration_targets_here.clone());
        let at = usize::from(host.id.index());
        if self.entries.len() <= at {
            self.entries.resize_with(at + 1, || None);
        }
        self.entries[at] = Some(Box::new(IndexedHost {
            load,
            staying_task_count: staying_count,
            zone,
            ranked,
            sample_expires_at: expiry,
            migration_targets: migration_targets_here,
            migrating_task_count: migrating_count,
            tasks,
        }));
        to
    }

    fn insert_tasks(&mut self, host: &HostView) -> Vec<IndexedTask> {
        if host
            .tasks
            .iter()
            .any(|task| task.suspended && task.migration.is_none())
        {
            self.suspended_task_hosts.insert(host.id);
        }
        let to_entry = |task: &TaskView| {
            let TaskView {
                tid,
                user,
                job,
                started_at: start_time,
                ..
            } = *task;
            IndexedTask {
                tid,
                user,
                job,
                started_at: start_time,
                preemptible: task.migration.is_none() && host.owner.exclusion_reason().is_none(),
            }
        };
        let tasks: Vec<IndexedTask> = host
            .tasks
            .iter()
            .filter(|task| task.computes())
            .map(to_entry)
            .collect();
        self.hosts_by_job
            .extend(tasks.iter().map(|task| (task.job, host.id)));
        let preemptible_entries = tasks.iter().filter(|task| task.preemptible);
        self.preemptible_by_user.extend(
            preemptible_entries
                .map(|task| (task.user, Reverse(task.started_at), task.tid, host.id)),
        );
        tasks
    }

    /// Updates the load of a host after the number of tasks that are migrating to the host has
    /// changed.
    fn update_arriving_count(&mut self, id: HostId) {
        let arriving_count = self.arriving_task_counts.get(&id).copied().unwrap_or(0);
        let Some(entry) = self
            .entries
            .get_mut(usize::from(id.index()))
            .and_then(Option::as_mut)
        else {
            return;
        };
        let (previous_load, ranked, zone) = (entry.load, entry.ranked, entry.zone);
        entry.load.vm_task_count = entry.staying_task_count + arriving_count;
        let new_load = entry.load;
        if ranked {
            self.unrank(zone, &previous_load);
            self.rank(zone, &new_load);
        }
    }

    fn reindex(&mut self, hosts: &[HostView], id: HostId, now: Micros) {
        let mut targets = self.remove_host(id);
        if let Ok(i) = position(hosts, id) {
            targets.extend(self.insert_host(&hosts[i], now));
        }
        targets
            .into_iter()
            .for_each(|target| self.update_arriving_count(target));
    }
}

/// Returns the position of a host in a list sorted by id; if the host is missing, its insertion
/// point as an error. Tries the position that follows from the host number first, because host
/// numbers are usually consecutive.
fn position(hosts: &[HostView], id: HostId) -> Result<usize, usize> {
    let guessed_position = usize::from(id.index()) - 1;
    if hosts
        .get(guessed_position)
        .is_some_and(|host| host.id == id)
    {
        return Ok(guessed_position);
    }
    hosts.binary_search_by_key(&id, |host| host.id)
}

/// Hosts sorted by id. Dereferences to a slice; every mutable access marks the host for reindexing.
#[derive(Clone, Debug, Default)]
pub struct HostList {
    hosts: Vec<HostView>,
    index: HostIndex,
    changed_ids: BTreeSet<HostId>,
}

impl HostList {
    /// Returns the position of a host in the list; `None` if the list does not contain the host.
    pub(super) fn position(&self, id: HostId) -> Option<usize> {
        position(&self.hosts, id).ok()
    }

    /// Adds or replaces a host.
    pub fn insert(&mut self, host: HostView) {
        self.changed_ids.insert(host.id);
        match position(&self.hosts, host.id) {
            Ok(i) => self.hosts[i] = host,
            Err(i) => self.hosts.insert(i, host),
        }
    }

    pub fn remove(&mut self, id: HostId) {
        if let Some(i) = self.position(id) {
            self.hosts.remove(i);
            self.changed_ids.insert(id);
        }
    }

    /// Returns a host for modification and marks it as changed. The caller must not change the
    /// host's id.
    pub fn edit(&mut self, id: HostId) -> Option<&mut HostView> {
        let i = self.position(id)?;
        self.changed_ids.insert(id);
        Some(&mut self.hosts[i])
    }

    /// Returns all hosts for modification and marks all of them as changed.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, HostView> {
        self.changed_ids.extend(self.hosts.iter().map(|h| h.id));
        self.hosts.iter_mut()
    }

    /// Reindexes marked hosts and hosts whose sample is too old at `now`.
    pub fn refresh(&mut self, now: Micros) {
        while let Some((expires_at, id)) = self
            .index
            .sample_expiries
            .first()
            .copied()
            .filter(|(expires_at, _)| *expires_at <= now)
        {
            self.index.sample_expiries.remove(&(expires_at, id));
            self.changed_ids.insert(id);
        }
        for id in std::mem::take(&mut self.changed_ids) {
            self.index.reindex(&self.hosts, id, now);
        }
    }

    /// Returns the index as of `now`. Builds a new index if the hosts were not refreshed since a
    /// change or since a sample became too old.
    pub(super) fn index(&self, now: Micros) -> Cow<'_, HostIndex> {
        if self.changed_ids.is_empty()
            && self
                .index
                .sample_expiries
                .first()
                .is_none_or(|(expires_at, _)| *expires_at > now)
        {
            return Cow::Borrowed(&self.index);
        }
        let mut index = HostIndex::default();
        self.hosts
            .iter()
            .for_each(|host| index.reindex(&self.hosts, host.id, now));
        Cow::Owned(index)
    }
}

impl Deref for HostList {
    type Target = [HostView];

    fn deref(&self) -> &[HostView] {
        &self.hosts
    }
}

impl std::ops::Index<usize> for HostList {
    type Output = HostView;

    fn index(&self, i: usize) -> &HostView {
        &self.hosts[i]
    }
}

impl IndexMut<usize> for HostList {
    fn index_mut(&mut self, i: usize) -> &mut HostView {
        self.changed_ids.insert(self.hosts[i].id);
        &mut self.hosts[i]
    }
}

impl FromIterator<HostView> for HostList {
    fn from_iter<I: IntoIterator<Item = HostView>>(hosts: I) -> Self {
        let mut host_list = Self::default();
        hosts.into_iter().for_each(|host| host_list.insert(host));
        host_list
    }
}

impl<'a> IntoIterator for &'a HostList {
    type Item = &'a HostView;
    type IntoIter = std::slice::Iter<'a, HostView>;

    fn into_iter(self) -> Self::IntoIter {
        self.hosts.iter()
    }
}
