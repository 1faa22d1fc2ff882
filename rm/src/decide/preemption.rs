//! Preemption between users: suspends tasks of users with a high index so that a waiting request of
//! a user with a low index gets hosts. The tasks resume when there is room again.

use super::evictions::target_exclusion;
use super::host_load::HostLoad;
use super::index::HostIndex;
use super::placement_run::SlotCounter;
use super::{FairShare, HostView, PlacementRequest, Snapshot, TaskView};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of tasks examined for one request, and of hosts examined for one task that should
/// resume.
pub const PREEMPTION_SCAN_MAX: usize = 256;
/// Minimum time for which a preempted task stays suspended, so that the request can start its tasks
/// first.
const PREEMPTED_TIME_MIN: Micros = Micros::from_secs(20);
/// Idle processor time that a task needs on a host to resume, in hundredths of a processor.
const FREE_PERCENT: u64 = 100;

/// A task selected for preemption.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Victim {
    pub tid: Tid,
    /// Explanation in one sentence.
    pub why: String,
}

/// Where a preempted task can resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeAt {
    /// The task resumes on its current host.
    CurrentHost,
    /// The task must first migrate to this host.
    OtherHost(HostId),
}

/// Selects the tasks to suspend so that a waiting request gets hosts: tasks of the users with the
/// highest indices, the most recently started first.
///
/// The request gets as many hosts as if none of these users' tasks ran, which may be fewer than it
/// asks for. First selects tasks that each free a slot, then groups of tasks on one host that free
/// a slot only if all of them are suspended. Empty if the request needs no preemption.
pub fn select_victims(
    snapshot: &Snapshot,
    fair: &FairShare,
    ask: &PlacementRequest<'_>,
) -> Vec<Victim> {
    let now = snapshot.now;
    let users = fair.preemptible_users(now, ask.user);
    if users.is_empty() {
        return Vec::new();
    }
    let Ok(places) = SlotCounter::new(snapshot, ask) else {
        return Vec::new();
    };
    let mut selection = VictimSelection {
        slots: places,
        examined: 0,
        pending_by_host: BTreeMap::new(),
        victims: Vec::new(),
    };
    let index = snapshot.hosts.index(now);
    for user in users {
        let why = format!(
            "user {} waits for a host and has used less: index {:.1} against {:.1} of user {user}",
            ask.user,
            fair.index(now, ask.user),
            fair.index(now, user),
        );
        let left = selection.select_singles(index.preemptible_tasks(user), &why);
        selection.select_groups(left, &why);
    }
    selection.victims
}

/// State of one victim selection.
struct VictimSelection<'a> {
    slots: SlotCounter<'a>,
    examined: usize,
    /// Tasks whose suspension has not freed a slot yet, by host. Includes tasks of the users
    /// examined before, because tasks of several users may share a host.
    pending_by_host: BTreeMap<HostId, Vec<Victim>>,
    victims: Vec<Victim>,
}

impl VictimSelection<'_> {
    /// Selects the tasks of which each one frees a slot. Returns the remaining tasks.
    fn select_singles(
        &mut self,
        tasks: impl Iterator<Item = (Tid, HostId)>,
        why: &str,
    ) -> Vec<(Tid, HostId)> {
        let mut remaining = Vec::new();
        for (tid, host) in tasks {
            if self.is_done() {
                break;
            }
            self.examined += 1;
            if self.slots.try_pausing(host, 1) {
                self.victims.push(Victim {
                    tid,
                    why: why.to_string(),
                });
            } else {
                remaining.push((tid, host));
            }
        }
        remaining
    }

    /// Selects groups of tasks on one host that free a slot only if the whole group is suspended.
    fn select_groups(&mut self, tasks: Vec<(Tid, HostId)>, why: &str) {
        for (tid, host) in tasks {
            if self.slots.suffice() {
                break;
            }
            let together = self.pending_by_host.entry(host).or_default();
            together.push(Victim {
                tid,
                why: why.to_string(),
            });
            if self.slots.try_pausing(host, together.len() as u32) {
                self.victims.append(together);
            }
        }
    }

    fn is_done(&self) -> bool {
        self.slots.suffice() || self.examined == PREEMPTION_SCAN_MAX
    }
}

/// Selects the preempted tasks that can resume, the longest suspended first. Returns each with its
/// current host. `preempted`: the preempted tasks, with the time of their suspension. `busy`:
/// hosts on which tasks are being started.
///
/// A task resumes on its own host if a processor is idle there, otherwise on another host with an
/// idle processor. If there is none, external load is ignored: it may last forever, and a slow task
/// is better than a suspended one. In that case the task also resumes on its own host, unless a
/// task of another user has started there since.
///
/// Waiting requests are not delayed by this. A request that found no host while these tasks were
/// suspended would find none if they stayed suspended, and they are preempted again if that helps.
pub fn select_resumable(
    snapshot: &Snapshot,
    preempted: &BTreeMap<Tid, Micros>,
    busy: &BTreeSet<HostId>,
) -> Vec<(Tid, HostId, ResumeAt)> {
    let now = snapshot.now;
    let index = snapshot.hosts.index(now);
    let hosts = index
        .hosts_with_suspended()
        .iter()
        .filter_map(|id| snapshot.host(*id));
    let all = hosts.flat_map(|host| host.tasks.iter().map(move |task| (host, task)));
    let suspended_long_enough = |tid: &Tid| {
        preempted
            .get(tid)
            .copied()
            .filter(|since| now.since(*since) >= PREEMPTED_TIME_MIN)
    };
    let ready = all.filter(|(_, task)| task.suspended && task.migrating.is_none());
    let mut ready: Vec<_> = ready
        .filter_map(|(host, task)| Some((suspended_long_enough(&task.tid)?, host, task)))
        .collect();
    ready.sort_by_key(|(since, _, task)| (*since, task.tid));
    let mut rooms = ResumeCapacity {
        snapshot,
        index: &index,
        busy,
        resumed: BTreeMap::new(),
    };
    let mut out = Vec::new();
    // Resuming on the own host is tried first, so that no task migrates to a host on which another
    // suspended task can resume.
    for (moves, slowly) in [(false, false), (true, false), (false, true), (true, true)] {
        ready.retain(|(since, host, task)| {
            let to = match (moves, slowly) {
                (false, false) => rooms.resume_in_place(host, has_idle_processor),
                (false, true) => rooms.resume_in_place(host, |load| {
                    has_unused_own_share(load) || !newer_task_present(host, task, *since)
                }),
                (true, _) => rooms.find_other_host(host, task, slowly),
            };
            let Some(to) = to else { return true };
            *rooms.resumed.entry(to).or_default() += 1;
            out.push((
                task.tid,
                host.id,
                if moves {
                    ResumeAt::OtherHost(to)
                } else {
                    ResumeAt::CurrentHost
                },
            ));
            false
        });
    }
    out
}

/// Room on hosts, while tasks to resume are selected one after the other.
struct ResumeCapacity<'a> {
    snapshot: &'a Snapshot,
    index: &'a HostIndex,
    busy: &'a BTreeSet<HostId>,
    /// Number of tasks already selected to resume, by host.
    resumed: BTreeMap<HostId, u32>,
}

impl ResumeCapacity<'_> {
    /// Returns the load of a host that accepts one more task; `None` if it does not, or if a task
    /// is being started there.
    fn load_for_one_more(&self, id: HostId) -> Option<HostLoad> {
        let load = self.index.load(id).filter(|_| !self.busy.contains(&id))?;
        let own = load.own_tasks + self.resumed.get(&id).copied().unwrap_or(0);
        Some(HostLoad {
            own_tasks: own,
            ..load
        })
        .filter(|load| load.remaining_slots() > 0)
    }

    /// Returns the task's own host if it accepts the task and `enough` is true for its load.
    fn resume_in_place(
        &self,
        host: &HostView,
        enough: impl Fn(HostLoad) -> bool,
    ) -> Option<HostId> {
        let load = self
            .load_for_one_more(host.id)
            .filter(|_| host.owner.exclusion_reason().is_none());
        load.is_some_and(enough).then_some(host.id)
    }

    /// Returns the best other host with a processor for the task. `slowly`: a processor that
    /// external load also uses is sufficient.
    fn find_other_host(&self, host: &HostView, task: &TaskView, slowly: bool) -> Option<HostId> {
        let now = self.snapshot.now;
        if task.host_named || task.obstacle.as_ref().is_some_and(|held| held.until > now) {
            return None;
        }
        let fits = |id: &HostId| {
            let fresh =
                |other: &&HostView| other.id != host.id && other.fresh_sample(now).is_some();
            let Some(other) = self.snapshot.host(*id).filter(fresh) else {
                return false;
            };
            let enough = if slowly {
                has_unused_own_share
            } else {
                has_idle_processor
            };
            target_exclusion(self.snapshot, other, host, task, true).is_none()
                && self.load_for_one_more(*id).is_some_and(enough)
        };
        self.index.best_first().take(PREEMPTION_SCAN_MAX).find(fits)
    }
}

/// True if a whole processor is idle.
fn has_idle_processor(load: HostLoad) -> bool {
    load.free_percent() >= FREE_PERCENT
}

/// True if the tasks of the virtual machine need less than all processors, so that one more task
/// fits. If no task runs, a fraction of a processor is sufficient.
fn has_unused_own_share(load: HostLoad) -> bool {
    load.own_tasks == 0 || u64::from(load.own_tasks + 1) * 1000 <= load.capacity
}

/// True if a task of another user has started on the host since this task was preempted. It may
/// belong to the request for which the task was preempted, or to a later one.
fn newer_task_present(host: &HostView, task: &TaskView, since: Micros) -> bool {
    let stays = |other: &TaskView| other.computes() && other.migrating.is_none();
    host.tasks
        .iter()
        .any(|other| stays(other) && other.user != task.user && other.started_at >= since)
}
