//! Who stands still for whom: tasks of users who have taken much give way to a request of one who has taken little and waits
//! for a free host, and go on when there is room for them again.

use super::load::Load;
use super::moves::unfit;
use super::placing::Places;
use super::{Ask, Fair, Snapshot};
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
    let Ok(mut places) = Places::of(snapshot, ask) else { return Vec::new() };
    let index = snapshot.hosts.index(now);
    let (mut out, mut looked_at) = (Vec::new(), 0);
    for (user, part) in shares {
        let mut left = part;
        let why = format!(
            "user {} waits for a place and has taken less: an index of {:.1} against {:.1} of user {user}",
            ask.user,
            fair.index(now, ask.user),
            fair.index(now, user),
        );
        for (tid, host) in index.settled(user) {
            if left == 0 {
                break;
            }
            if looked_at == GIVING_MAX {
                return Vec::new();
            }
            looked_at += 1;
            if !places.gain_without_one(host) {
                continue;
            }
            left -= 1;
            out.push(GivesWay { tid, why: why.clone() });
            if places.are_enough() {
                return out;
            }
        }
    }
    Vec::new()
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
    let hosts = index.suspended().iter().filter_map(|id| snapshot.host(*id));
    let all = hosts.flat_map(|host| host.tasks.iter().map(move |task| (host, task)));
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
