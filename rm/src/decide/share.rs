//! Preemption between users: tasks of users with a high index are suspended so that a waiting
//! request of a user with a low index gets hosts. They resume when there is room again.

use super::index::Index;
use super::load::Load;
use super::moves::unfit;
use super::placing::Places;
use super::{Ask, Fair, HostView, Snapshot, TaskView};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of tasks examined for one request, and of hosts examined for a task that resumes.
pub const GIVING_MAX: usize = 256;
/// Minimum time that a preempted task stays suspended. The request it made room for must have time
/// to start.
const STAND_MIN: Micros = Micros::from_secs(20);
/// Hundredths of a processor that must be idle where a task resumes.
const FREE_PERCENT: u64 = 100;

/// A task selected for preemption.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivesWay {
    pub tid: Tid,
    /// Explanation in one sentence.
    pub why: String,
}

/// Where a preempted task resumes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    /// On its current host.
    Here,
    /// After a migration to this host.
    At(HostId),
}

/// Selects the tasks to suspend so that a waiting request gets hosts: tasks of the users with the
/// highest indices, the most recently started first.
///
/// The request gets as many hosts as if none of these users' tasks ran, which may be fewer than it
/// asks for. Tasks that free a slot alone are selected first, then groups of tasks on one host that
/// free a slot only together. Empty if the request needs no preemption.
pub fn give_way(snapshot: &Snapshot, fair: &Fair, ask: &Ask<'_>) -> Vec<GivesWay> {
    let now = snapshot.now;
    let users = fair.give_way(now, ask.user);
    if users.is_empty() {
        return Vec::new();
    }
    let Ok(places) = Places::of(snapshot, ask) else {
        return Vec::new();
    };
    let mut giving = Giving {
        places,
        looked_at: 0,
        together: BTreeMap::new(),
        out: Vec::new(),
    };
    let index = snapshot.hosts.index(now);
    for user in users {
        let why = format!(
            "user {} waits for a host and has used less: index {:.1} against {:.1} of user {user}",
            ask.user,
            fair.index(now, ask.user),
            fair.index(now, user),
        );
        let left = giving.one_each(index.settled(user), &why);
        giving.several(left, &why);
    }
    giving.out
}

/// State of one victim selection.
struct Giving<'a> {
    places: Places<'a>,
    looked_at: usize,
    /// Tasks that do not free a slot yet, by host. Tasks of users examined before are kept, because
    /// several users may share a host.
    together: BTreeMap<HostId, Vec<GivesWay>>,
    out: Vec<GivesWay>,
}

impl Giving<'_> {
    /// Selects the tasks that free a slot alone. Returns the others.
    fn one_each(
        &mut self,
        tasks: impl Iterator<Item = (Tid, HostId)>,
        why: &str,
    ) -> Vec<(Tid, HostId)> {
        let mut left = Vec::new();
        for (tid, host) in tasks {
            if self.is_over() {
                break;
            }
            self.looked_at += 1;
            if self.places.gain_without(host, 1) {
                self.out.push(GivesWay {
                    tid,
                    why: why.to_string(),
                });
            } else {
                left.push((tid, host));
            }
        }
        left
    }

    /// Selects tasks that free a slot together with others on the same host.
    fn several(&mut self, tasks: Vec<(Tid, HostId)>, why: &str) {
        for (tid, host) in tasks {
            if self.places.are_enough() {
                break;
            }
            let together = self.together.entry(host).or_default();
            together.push(GivesWay {
                tid,
                why: why.to_string(),
            });
            if self.places.gain_without(host, together.len() as u32) {
                self.out.append(together);
            }
        }
    }

    fn is_over(&self) -> bool {
        self.places.are_enough() || self.looked_at == GIVING_MAX
    }
}

/// Selects the preempted tasks that resume, the longest suspended first. `gave_way`: the preempted
/// tasks and when they were suspended. `busy`: hosts on which tasks are being started.
///
/// A task resumes on its host if a processor is idle there, else on another host with an idle
/// processor. If there is none, external load is ignored: it may last forever, and a slow task is
/// better than a suspended one. The task's own host is then sufficient, too, unless a task of
/// another user has started there meanwhile.
///
/// Waiting requests lose nothing. A request that found no host while these tasks were suspended
/// would not find one if they stayed suspended, and they are preempted again as soon as that helps.
pub fn go_on(
    snapshot: &Snapshot,
    gave_way: &BTreeMap<Tid, Micros>,
    busy: &BTreeSet<HostId>,
) -> Vec<(Tid, HostId, Again)> {
    let now = snapshot.now;
    let index = snapshot.hosts.index(now);
    let hosts = index.suspended().iter().filter_map(|id| snapshot.host(*id));
    let all = hosts.flat_map(|host| host.tasks.iter().map(move |task| (host, task)));
    let rested = |tid: &Tid| {
        gave_way
            .get(tid)
            .copied()
            .filter(|since| now.since(*since) >= STAND_MIN)
    };
    let ready = all.filter(|(_, task)| task.suspended && task.moving.is_none());
    let mut ready: Vec<_> = ready
        .filter_map(|(host, task)| Some((rested(&task.tid)?, host, task)))
        .collect();
    ready.sort_by_key(|(since, _, task)| (*since, task.tid));
    let mut rooms = Rooms {
        snapshot,
        index: &index,
        busy,
        taken: BTreeMap::new(),
    };
    let mut out = Vec::new();
    // Tasks that resume in place come first, so that no task migrates to a host whose own task then
    // resumes there.
    for (moves, slowly) in [(false, false), (true, false), (false, true), (true, true)] {
        ready.retain(|(since, host, task)| {
            let to = match (moves, slowly) {
                (false, false) => rooms.stays(host, has_free),
                (false, true) => rooms.stays(host, |load| {
                    is_left_one(load) || !has_come(host, task, *since)
                }),
                (true, _) => rooms.other(host, task, slowly),
            };
            let Some(to) = to else { return true };
            *rooms.taken.entry(to).or_default() += 1;
            out.push((
                task.tid,
                host.id,
                if moves { Again::At(to) } else { Again::Here },
            ));
            false
        });
    }
    out
}

/// Capacity of hosts for tasks that resume one after the other.
struct Rooms<'a> {
    snapshot: &'a Snapshot,
    index: &'a Index,
    busy: &'a BTreeSet<HostId>,
    /// Tasks already selected to resume, by host.
    taken: BTreeMap<HostId, u32>,
}

impl Rooms<'_> {
    /// Returns the load of a host that may take one more own task. `None` if it may not, or if a
    /// task is being started there.
    fn load(&self, id: HostId) -> Option<Load> {
        let load = self.index.load(id).filter(|_| !self.busy.contains(&id))?;
        let own = load.own + self.taken.get(&id).copied().unwrap_or(0);
        Some(Load { own, ..load }).filter(|load| load.left() > 0)
    }

    /// Returns the task's own host if the task may resume there.
    fn stays(&self, host: &HostView, enough: impl Fn(Load) -> bool) -> Option<HostId> {
        let load = self
            .load(host.id)
            .filter(|_| host.owner.keeps_out().is_none());
        load.is_some_and(enough).then_some(host.id)
    }

    /// Returns the best other host with a processor for the task. `slowly`: a processor that is
    /// shared with external load is enough.
    fn other(&self, host: &HostView, task: &TaskView, slowly: bool) -> Option<HostId> {
        let now = self.snapshot.now;
        if task.named || task.held.as_ref().is_some_and(|held| held.at > now) {
            return None;
        }
        let fits = |id: &HostId| {
            let fresh =
                |other: &&HostView| other.id != host.id && other.fresh_sample(now).is_some();
            let Some(other) = self.snapshot.host(*id).filter(fresh) else {
                return false;
            };
            let enough = if slowly { is_left_one } else { has_free };
            unfit(self.snapshot, other, host, task, true).is_none()
                && self.load(*id).is_some_and(enough)
        };
        self.index.best().take(GIVING_MAX).find(fits)
    }
}

/// True if a whole processor is idle.
fn has_free(load: Load) -> bool {
    load.free_percent() >= FREE_PERCENT
}

/// True if own tasks leave a processor for one more task. A fraction of a processor is enough for
/// the only task.
fn is_left_one(load: Load) -> bool {
    load.own == 0 || u64::from(load.own + 1) * 1000 <= load.capacity
}

/// True if another user's task has started on the host since this one was preempted: the request it
/// made room for, or a later one.
fn has_come(host: &HostView, task: &TaskView, since: Micros) -> bool {
    let stays = |other: &TaskView| other.computes() && other.moving.is_none();
    host.tasks
        .iter()
        .any(|other| stays(other) && other.user != task.user && other.since >= since)
}
