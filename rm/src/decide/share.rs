//! Who stands still for whom: tasks of users who have taken much give way to a request of one who has taken little and waits
//! for a free host, and go on when there is room for them again.

use super::load::Load;
use super::moves::unfit;
use super::{Ask, Fair, Snapshot, TaskView, place};
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

/// Which tasks are to stand still so that a request that waits gets all its places: of the users who have taken most, those
/// that began last, and only if that is enough. Empty for a request that needs nobody to give way.
pub fn give_way(snapshot: &Snapshot, fair: &Fair, ask: &Ask<'_>) -> Vec<GivesWay> {
    let now = snapshot.now;
    let shares = fair.give_way(now, ask.user, ask.count);
    if shares.is_empty() {
        return Vec::new();
    }
    let of_user = |user: u32| shares.iter().position(|(id, _)| *id == user);
    let mut candidates: Vec<(usize, HostId, &TaskView)> = snapshot
        .hosts
        .iter()
        .filter(|host| host.owner.keeps_out().is_none())
        .flat_map(|host| host.tasks.iter().map(move |task| (host.id, task)))
        .filter(|(_, task)| task.computes() && task.moving.is_none())
        .filter_map(|(host, task)| Some((of_user(task.user)?, host, task)))
        .collect();
    candidates.sort_by_key(|(order, _, task)| (*order, std::cmp::Reverse(task.since), task.tid));
    let mut left: Vec<u32> = shares.iter().map(|(_, part)| *part).collect();
    let places = |snapshot: &Snapshot| place(snapshot, ask).hosts.iter().filter(|place| place.is_ok()).count();
    let (mut trial, mut out, mut best) = (snapshot.clone(), Vec::new(), places(snapshot));
    for (order, host, task) in candidates.into_iter().take(GIVING_MAX) {
        if left[order] == 0 {
            continue;
        }
        stand(&mut trial, host, task.tid, true);
        let with_it = places(&trial);
        if with_it <= best {
            stand(&mut trial, host, task.tid, false);
            continue;
        }
        (best, left[order]) = (with_it, left[order] - 1);
        let index = |user: u32| fair.index(now, user);
        let why = format!(
            "user {} waits for a place and has taken less: an index of {:.1} against {:.1} of user {}",
            ask.user,
            index(ask.user),
            index(task.user),
            task.user
        );
        out.push(GivesWay { tid: task.tid, why });
        if best == ask.count as usize {
            return out;
        }
    }
    Vec::new()
}

fn stand(trial: &mut Snapshot, host: HostId, tid: Tid, suspended: bool) {
    if let Some(task) = trial.hosts.edit(host).and_then(|host| host.tasks.iter_mut().find(|t| t.tid == tid)) {
        task.suspended = suspended;
    }
    trial.hosts.refresh(trial.now);
}

/// Which of the tasks that gave way, since then, come to their turn again; those first that have stood longest. They go on
/// where they are when there is a processor for them, else go to a host that has one. `busy`: hosts where something is being
/// started.
pub fn go_on(
    snapshot: &Snapshot,
    gave_way: &BTreeMap<Tid, Micros>,
    busy: &BTreeSet<HostId>,
) -> Vec<(Tid, HostId, Again)> {
    let now = snapshot.now;
    let index = snapshot.hosts.index(now);
    let mut loads: BTreeMap<HostId, Load> = BTreeMap::new();
    let all = snapshot.hosts.iter().flat_map(|host| host.tasks.iter().map(move |task| (host, task)));
    let rested = |tid: &Tid| gave_way.get(tid).copied().filter(|since| now.since(*since) >= STAND_MIN);
    let ready = all.filter(|(_, task)| task.suspended && task.moving.is_none());
    let mut ready: Vec<_> = ready.filter_map(|(host, task)| Some((rested(&task.tid)?, host, task))).collect();
    ready.sort_by_key(|(since, _, task)| (*since, task.tid));
    let mut out = Vec::new();
    for (_, host, task) in ready {
        let mut takes = |id: HostId| {
            let Some(load) = loads.get(&id).copied().or_else(|| index.load(id)) else { return false };
            let free = !busy.contains(&id) && load.free_percent() >= FREE_PERCENT && load.left() > 0;
            loads.insert(id, Load { own: load.own + u32::from(free), ..load });
            free
        };
        if host.owner.keeps_out().is_none() && takes(host.id) {
            out.push((task.tid, host.id, Again::Here));
            continue;
        }
        if task.named || task.held.as_ref().is_some_and(|held| held.at > now) {
            continue;
        }
        let fits = |id: &HostId| {
            let other = snapshot.host(*id).filter(|other| other.id != host.id && other.fresh_sample(now).is_some());
            other.is_some_and(|other| unfit(snapshot, other, host, task, true).is_none())
        };
        if let Some(to) = index.best().take(GIVING_MAX).filter(fits).find(|id| takes(*id)) {
            out.push((task.tid, host.id, Again::At(to)));
        }
    }
    out
}
