//! Who stands still for whom: tasks of users who have taken much give way to a request of one who has taken little and waits
//! for a free host, and go on when there is room for them again.

use super::index::Index;
use super::load::Load;
use super::moves::unfit;
use super::placing::Places;
use super::{Ask, Fair, HostView, Snapshot, TaskView};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Tasks that are looked at for one request at most.
pub const GIVING_MAX: usize = 256;
/// A task that gave way stands still for so long at least: what it made room for is to begin there.
const STAND_MIN: Micros = Micros::from_secs(20);
/// Hundredths of a processor that have to be free where a task goes on.
const FREE_PERCENT: u64 = 100;

/// A task that is to stand still.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GivesWay {
    /// The task.
    pub tid: Tid,
    /// Why: one sentence.
    pub why: String,
}

/// How a task that gave way comes to its turn again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Again {
    /// It goes on where it is.
    Here,
    /// It has to go there first.
    At(HostId),
}

/// Which tasks are to stand still so that a request that waits gets its places: of the users who have taken most, those that
/// began last. As many places as it would get if nobody of them were there, and that may be fewer than it asks for. Empty for a
/// request that needs nobody to give way.
///
/// Those go first of which one is enough for a place; where several share a host, all that is needed of them.
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
            "user {} waits for a place and has taken less: an index of {:.1} against {:.1} of user {user}",
            ask.user,
            fair.index(now, ask.user),
            fair.index(now, user),
        );
        let left = giving.one_each(index.settled(user), &why);
        giving.several(left, &why);
    }
    giving.out
}

/// A decision on who gives way, while it is being made.
struct Giving<'a> {
    places: Places<'a>,
    looked_at: usize,
    /// Those that make no room yet, by host: of the users before, too, for a host may be shared by several who owe.
    together: BTreeMap<HostId, Vec<GivesWay>>,
    out: Vec<GivesWay>,
}

impl Giving<'_> {
    /// Tasks of which each makes room alone; answers the others.
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

    /// Tasks that make room together with others on the same hosts.
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

/// Which of the tasks that gave way, since then, come to their turn again; those first that have stood longest. `busy`: hosts
/// where something is being started.
///
/// They go on where they are when there is a free processor for them, else go to a host that has one. Where there is none, it
/// counts whose the load is. Tasks of other users that began meanwhile are not disturbed. Load that is not ours may stay for
/// ever, and beside it they rather run slowly. Nobody who waits has the worse of it: a request that has found no place while
/// they stand still finds none for that, and they give way again as soon as it helps.
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
    // So nobody goes to where another one has stood and goes on himself.
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

/// What hosts have for tasks that go on one after the other.
struct Rooms<'a> {
    snapshot: &'a Snapshot,
    index: &'a Index,
    busy: &'a BTreeSet<HostId>,
    /// Tasks that go on by now.
    taken: BTreeMap<HostId, u32>,
}

impl Rooms<'_> {
    /// The load of a host that may have one more task of ours; none where something is being started.
    fn load(&self, id: HostId) -> Option<Load> {
        let load = self.index.load(id).filter(|_| !self.busy.contains(&id))?;
        let own = load.own + self.taken.get(&id).copied().unwrap_or(0);
        Some(Load { own, ..load }).filter(|load| load.left() > 0)
    }

    /// The host of a task, if it may go on there.
    fn stays(&self, host: &HostView, enough: impl Fn(Load) -> bool) -> Option<HostId> {
        let load = self
            .load(host.id)
            .filter(|_| host.owner.keeps_out().is_none());
        load.is_some_and(enough).then_some(host.id)
    }

    /// The best other host that has a processor for a task, or where it goes on slowly.
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

/// Nobody uses one of the processors.
fn has_free(load: Load) -> bool {
    load.free_percent() >= FREE_PERCENT
}

/// None of our tasks uses one of the processors. A part of one is enough for one task.
fn is_left_one(load: Load) -> bool {
    load.own == 0 || u64::from(load.own + 1) * 1000 <= load.capacity
}

/// Another user's task has begun since this one gave way: the one that it made room for, or one that came after that.
fn has_come(host: &HostView, task: &TaskView, since: Micros) -> bool {
    let stays = |other: &TaskView| other.computes() && other.moving.is_none();
    host.tasks
        .iter()
        .any(|other| stays(other) && other.user != task.user && other.since >= since)
}
