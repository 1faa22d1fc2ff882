//! The hosts of a snapshot, with an index. The index ranks the hosts by the processor share that
//! one more task would get.
//!
//! Updating the index after a change of a host or of one of its tasks takes O(log hosts), and so
//! does removing a sample that has become too old. A decision therefore examines the best hosts
//! only.
//!
//! Every mutable access marks the host as changed, and [`Hosts::refresh`] reindexes the marked
//! hosts. A decision about a snapshot that was not refreshed builds a new index. That is slower but
//! has the same result.

use super::guests::Guests;
use super::load::{Load, Share};
use super::{HostView, SAMPLE_AGE_MAX, TaskView};
use sempa_proto::{HostId, Micros, Tid};
use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::binary_heap::PeekMut;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::ops::{Deref, IndexMut};

/// Index entry of a computing task.
#[derive(Clone, Copy, Debug)]
struct Known {
    tid: Tid,
    user: u32,
    job: Tid,
    since: Micros,
    /// True if the task can be preempted: it is not migrating, and its host accepts guests.
    settled: bool,
}

/// Index entry of a host.
#[derive(Clone, Debug)]
struct Entry {
    load: Load,
    /// Number of computing tasks that are not migrating away, including tasks that are being
    /// started.
    staying: u32,
    zone: u32,
    /// True if the host accepts guests and is in the ranking.
    ranked: bool,
    /// Time when the sample becomes too old; `None` without a valid sample.
    expires: Option<Micros>,
    /// Targets of the tasks that migrate from the host, one entry per task.
    leaving: Vec<HostId>,
    under_way: usize,
    tasks: Vec<Known>,
}

/// Index of the hosts of a snapshot.
#[derive(Clone, Debug, Default)]
pub(super) struct Index {
    /// Index entry of each host, by host number.
    entries: Vec<Option<Box<Entry>>>,
    zones: BTreeMap<u32, BTreeSet<Share>>,
    /// Ranked hosts with tasks of the virtual machine, by the rate of each of these tasks.
    slowest: BTreeSet<(u64, HostId)>,
    with_owner: BTreeSet<HostId>,
    /// Guests on hosts that accept no guests, except migrating ones.
    guests: Guests,
    arriving: BTreeMap<HostId, u32>,
    expiry: BTreeSet<(Micros, HostId)>,
    under_way: usize,
    /// Pairs of a job and a host on which the job has computing tasks.
    jobs: BTreeSet<(Tid, HostId)>,
    /// Preemptible tasks as (user, start time, tid, host): by user, the most recently started
    /// first.
    settled: BTreeSet<(u32, Reverse<Micros>, Tid, HostId)>,
    /// Hosts with suspended tasks that are not migrating.
    suspended: BTreeSet<HostId>,
}

/// Merges sequences in descending order into one sequence in descending order.
pub(super) fn merged<T: Ord, L: Iterator<Item = T>>(
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

impl Index {
    fn entry(&self, host: HostId) -> Option<&Entry> {
        self.entries.get(usize::from(host.index()))?.as_deref()
    }

    pub(super) fn load(&self, host: HostId) -> Option<Load> {
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
        self.jobs
            .range(all)
            .take_while(move |(of, _)| *of == job)
            .map(|(_, host)| *host)
    }

    /// Returns the number of computing tasks of a job on a host.
    pub(super) fn computing(&self, host: HostId, job: Tid) -> usize {
        let tasks = self.entry(host).map_or(&[][..], |entry| &entry.tasks);
        tasks.iter().filter(|task| task.job == job).count()
    }

    /// Returns the preemptible tasks of a user with their hosts, the most recently started first.
    pub(super) fn settled(&self, user: u32) -> impl Iterator<Item = (Tid, HostId)> {
        let all = (user, Reverse(Micros(u64::MAX)), Tid::NONE, HostId::MASTER)..;
        self.settled
            .range(all)
            .take_while(move |(of, ..)| *of == user)
            .map(|(.., tid, host)| (*tid, *host))
    }

    /// Returns the hosts with suspended tasks that are not migrating, by ascending id.
    pub(super) fn suspended(&self) -> &BTreeSet<HostId> {
        &self.suspended
    }

    pub(super) fn zones(&self) -> impl Iterator<Item = (&u32, &BTreeSet<Share>)> {
        self.zones.iter()
    }

    /// Returns the hosts that accept no guests, by ascending id.
    pub(super) fn with_owner(&self) -> &BTreeSet<HostId> {
        &self.with_owner
    }

    /// Returns the guests on hosts that accept no guests, except migrating ones.
    pub(super) fn guests(&self) -> &Guests {
        &self.guests
    }

    /// Returns the number of migrating tasks.
    pub(super) fn under_way(&self) -> usize {
        self.under_way
    }

    /// Returns the ranked hosts with tasks of the virtual machine, the host with the slowest tasks
    /// first.
    pub(super) fn slowest(&self) -> impl Iterator<Item = HostId> {
        self.slowest.iter().map(|(_, id)| *id)
    }

    /// Returns the ranked hosts, the one with the largest share for a further task first.
    pub(super) fn best(&self) -> impl Iterator<Item = HostId> {
        merged(self.zones.values().map(|shares| shares.iter().rev())).map(Share::host)
    }

    fn rank(&mut self, zone: u32, load: &Load) {
        self.zones.entry(zone).or_default().insert(load.share());
        if load.own > 0 {
            self.slowest.insert((load.rate() as u64, load.host));
        }
    }

    fn unrank(&mut self, zone: u32, load: &Load) {
        self.slowest.remove(&(load.rate() as u64, load.host));
        if let Some(shares) = self.zones.get_mut(&zone) {
            shares.remove(&load.share());
            if shares.is_empty() {
                self.zones.remove(&zone);
            }
        }
    }

    /// Removes a host from the index. Returns the targets of the host's migrating tasks.
    fn forget(&mut self, id: HostId) -> Vec<HostId> {
        self.with_owner.remove(&id);
        self.guests.forget(id);
        self.suspended.remove(&id);
        let entry = self
            .entries
            .get_mut(usize::from(id.index()))
            .and_then(Option::take);
        let Some(entry) = entry else {
            return Vec::new();
        };
        for task in &entry.tasks {
            self.jobs.remove(&(task.job, id));
            if task.settled {
                self.settled
                    .remove(&(task.user, Reverse(task.since), task.tid, id));
            }
        }
        if entry.ranked {
            self.unrank(entry.zone, &entry.load);
        }
        if let Some(at) = entry.expires {
            self.expiry.remove(&(at, id));
        }
        self.under_way -= entry.under_way;
        for to in &entry.leaving {
            let left = self
                .arriving
                .get_mut(to)
                .expect("counted when it was put in");
            *left -= 1;
            if *left == 0 {
                self.arriving.remove(to);
            }
        }
        entry.leaving
    }

    /// Adds a host to the index. Returns the targets of the host's migrating tasks.
    fn learn(&mut self, host: &HostView, now: Micros) -> Vec<HostId> {
        let (mut staying, mut leaving) = (host.starting, Vec::new());
        for task in host.tasks.iter().filter(|t| t.computes()) {
            match task.moving.flatten() {
                Some(to) => leaving.push(to),
                None => staying += 1,
            }
        }
        for to in &leaving {
            *self.arriving.entry(*to).or_default() += 1;
        }
        let under_way = host.tasks.iter().filter(|t| t.moving.is_some()).count();
        self.under_way += under_way;
        let expires = host
            .fresh_sample(now)
            .map(|s| s.at + SAMPLE_AGE_MAX + Micros(1));
        self.expiry.extend(expires.map(|at| (at, host.id)));
        let load = Load::of(
            host,
            now,
            staying + self.arriving.get(&host.id).copied().unwrap_or(0),
        );
        let ranked = !host.owner.is_present();
        if ranked {
            self.rank(host.zone, &load);
        } else {
            self.with_owner.insert(host.id);
            self.guests.learn(host);
        }
        let tasks = self.learn_tasks(host);
        let (zone, to) = (host.zone, leaving.clone());
        let at = usize::from(host.id.index());
        if self.entries.len() <= at {
            self.entries.resize_with(at + 1, || None);
        }
        self.entries[at] = Some(Box::new(Entry {
            load,
            staying,
            zone,
            ranked,
            expires,
            leaving,
            under_way,
            tasks,
        }));
        to
    }

    fn learn_tasks(&mut self, host: &HostView) -> Vec<Known> {
        if host
            .tasks
            .iter()
            .any(|task| task.suspended && task.moving.is_none())
        {
            self.suspended.insert(host.id);
        }
        let known = |task: &TaskView| {
            let TaskView {
                tid,
                user,
                job,
                since,
                ..
            } = *task;
            Known {
                tid,
                user,
                job,
                since,
                settled: task.moving.is_none() && host.owner.keeps_out().is_none(),
            }
        };
        let tasks: Vec<Known> = host
            .tasks
            .iter()
            .filter(|task| task.computes())
            .map(known)
            .collect();
        self.jobs
            .extend(tasks.iter().map(|task| (task.job, host.id)));
        let settled = tasks.iter().filter(|task| task.settled);
        self.settled
            .extend(settled.map(|task| (task.user, Reverse(task.since), task.tid, host.id)));
        tasks
    }

    /// Updates the load of a host after the number of tasks that migrate to it has changed.
    fn recount(&mut self, id: HostId) {
        let arriving = self.arriving.get(&id).copied().unwrap_or(0);
        let Some(entry) = self
            .entries
            .get_mut(usize::from(id.index()))
            .and_then(Option::as_mut)
        else {
            return;
        };
        let (before, ranked, zone) = (entry.load, entry.ranked, entry.zone);
        entry.load.own = entry.staying + arriving;
        let after = entry.load;
        if ranked {
            self.unrank(zone, &before);
            self.rank(zone, &after);
        }
    }

    fn rank_again(&mut self, list: &[HostView], id: HostId, now: Micros) {
        let mut targets = self.forget(id);
        if let Ok(i) = position(list, id) {
            targets.extend(self.learn(&list[i], now));
        }
        targets.into_iter().for_each(|to| self.recount(to));
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
pub struct Hosts {
    list: Vec<HostView>,
    index: Index,
    marked: BTreeSet<HostId>,
}

impl Hosts {
    /// Returns the position of a host in the list.
    pub(super) fn position(&self, id: HostId) -> Option<usize> {
        position(&self.list, id).ok()
    }

    /// Adds or replaces a host.
    pub fn put(&mut self, host: HostView) {
        self.marked.insert(host.id);
        match position(&self.list, host.id) {
            Ok(i) => self.list[i] = host,
            Err(i) => self.list.insert(i, host),
        }
    }

    pub fn remove(&mut self, id: HostId) {
        if let Some(i) = self.position(id) {
            self.list.remove(i);
            self.marked.insert(id);
        }
    }

    /// Returns a host for modification and marks it as changed. Its id must not change.
    pub fn edit(&mut self, id: HostId) -> Option<&mut HostView> {
        let i = self.position(id)?;
        self.marked.insert(id);
        Some(&mut self.list[i])
    }

    /// Returns all hosts for modification and marks all of them as changed.
    pub fn iter_mut(&mut self) -> std::slice::IterMut<'_, HostView> {
        self.marked.extend(self.list.iter().map(|h| h.id));
        self.list.iter_mut()
    }

    /// Reindexes marked hosts and hosts whose sample is too old at `now`.
    pub fn refresh(&mut self, now: Micros) {
        while let Some((at, id)) = self
            .index
            .expiry
            .first()
            .copied()
            .filter(|(at, _)| *at <= now)
        {
            self.index.expiry.remove(&(at, id));
            self.marked.insert(id);
        }
        for id in std::mem::take(&mut self.marked) {
            self.index.rank_again(&self.list, id, now);
        }
    }

    /// Returns the index as of `now`. Builds a new one if the hosts were not refreshed.
    pub(super) fn index(&self, now: Micros) -> Cow<'_, Index> {
        if self.marked.is_empty() && self.index.expiry.first().is_none_or(|(at, _)| *at > now) {
            return Cow::Borrowed(&self.index);
        }
        let mut index = Index::default();
        self.list
            .iter()
            .for_each(|host| index.rank_again(&self.list, host.id, now));
        Cow::Owned(index)
    }
}

impl Deref for Hosts {
    type Target = [HostView];

    fn deref(&self) -> &[HostView] {
        &self.list
    }
}

impl std::ops::Index<usize> for Hosts {
    type Output = HostView;

    fn index(&self, i: usize) -> &HostView {
        &self.list[i]
    }
}

impl IndexMut<usize> for Hosts {
    fn index_mut(&mut self, i: usize) -> &mut HostView {
        self.marked.insert(self.list[i].id);
        &mut self.list[i]
    }
}

impl FromIterator<HostView> for Hosts {
    fn from_iter<I: IntoIterator<Item = HostView>>(hosts: I) -> Hosts {
        let mut all = Hosts::default();
        hosts.into_iter().for_each(|host| all.put(host));
        all
    }
}

impl<'a> IntoIterator for &'a Hosts {
    type Item = &'a HostView;
    type IntoIter = std::slice::Iter<'a, HostView>;

    fn into_iter(self) -> Self::IntoIter {
        self.list.iter()
    }
}
