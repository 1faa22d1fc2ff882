//! Preemption between users: suspends tasks of users with a high Up-Down index so that a waiting
//! request of a user with a low index gets hosts. The suspended tasks resume when a host has room
//! for them again.

use super::evictions::target_exclusion;
use super::host_load::HostLoad;
use super::index::HostIndex;
use super::placement_run::SlotCounter;
use super::{FairShare, HostView, PlacementRequest, Snapshot, TaskView};
use sempa_proto::{HostId, Micros, Tid};
use std::collections::{BTreeMap, BTreeSet};

/// Maximum number of tasks that are examined for one request, and of hosts that are examined for
/// one task to resume.
pub const PREEMPTION_SCAN_MAX: usize = 256;
/// Minimum time for which a preempted task stays suspended, so that the request can start its tasks
/// first.
const PREEMPTED_TIME_MIN: Micros = Micros::from_secs(20);
/// Idle processor time that a task needs on a host to resume, in hundredths of a processor.
const IDLE_PERCENT_MIN: u64 = 100;

/// A task selected for preemption.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Victim {
    pub tid: Tid,
    /// Explanation of the preemption, in one sentence.
    pub why: String,
}

/// Host on which a preempted task can resume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResumeTarget {
    /// The task resumes on its current host.
    CurrentHost,
    /// The task must first migrate to this host.
    OtherHost(HostId),
}

/// Selects the tasks to suspend so that a waiting request gets hosts. Returns an empty list if the
/// request needs no preemption. Tasks of the users with the highest indices come first. Among the
/// tasks of a user, the most recently started ones come first.
///
/// The request gets as many hosts as if no task of these users ran. This may be fewer hosts than
/// the request asks for. Tasks that each free a slot are selected first. Groups of tasks on one
/// host that free a slot only together follow.
pub fn select_victims(
    snapshot: &Snapshot,
    fair: &FairShare,
    request: &PlacementRequest<'_>,
) -> Vec<Victim> {
    let now = snapshot.now;
    let users = fair.preemptible_users(now, request.user);
    if users.is_empty() {
        return Vec::new();
    }
    let Ok(counter) = SlotCounter::new(snapshot, request) else {
        return Vec::new();
    };
    let mut selection = VictimSelection {
        slot_counter: counter,
        examined_count: 0,
        pending_by_host: BTreeMap::new(),
        victims: Vec::new(),
    };
    let index = snapshot.hosts.index(now);
    for user in users {
        let why = format!(
            "user {} waits for a host and has used less: index {:.1} against {:.1} of user {user}",
            request.user,
            fair.user_index(now, request.user),
            fair.user_index(now, user),
        );
        let remaining_tasks = selection.select_singles(index.preemptible_tasks(user), &why);
        selection.select_groups(remaining_tasks, &why);
    }
    selection.victims
}

/// State of the selection of victims for one request.
struct VictimSelection<'a> {
    slot_counter: SlotCounter<'a>,
    examined_count: usize,
    /// Tasks whose suspension has not freed a slot yet, by host. Includes tasks of the users
    /// examined before, because tasks of several users may share a host.
    pending_by_host: BTreeMap<HostId, Vec<Victim>>,
    victims: Vec<Victim>,
}

impl VictimSelection<'_> {
    /// Selects the tasks that free a slot each. Returns the examined tasks that were not selected.
    fn select_singles(
        &mut self,
        tasks: impl Iterator<Item = (Tid, HostId)>,
        why: &str,
    ) -> Vec<(Tid, HostId)> {
        let mut remaining_tasks = Vec::new();
        for (tid, host) in tasks {
            if self.is_complete() {
                break;
            }
            self.examined_count += 1;
            if self.slot_counter.try_pausing(host, 1) {
                self.victims.push(Victim {
                    tid,
                    why: why.to_string(),
                });
            } else {
                remaining_tasks.push((tid, host));
            }
        }
        remaining_tasks
    }

    /// Selects groups of tasks on one host that free a slot only if all tasks of the group are
    /// suspended.
    fn select_groups(&mut self, tasks: Vec<(Tid, HostId)>, why: &str) {
        for (tid, host) in tasks {
            if self.slot_counter.all_placeable() {
                break;
            }
            let group = self.pending_by_host.entry(host).or_default();
            group.push(Victim {
                tid,
                why: why.to_string(),
            });
            if self.slot_counter.try_pausing(host, group.len() as u32) {
                self.victims.append(group);
            }
        }
    }

    fn is_complete(&self) -> bool {
        self.slot_counter.all_placeable() || self.examined_count == PREEMPTION_SCAN_MAX
    }
}

/// Selects the preempted tasks that can resume, the longest suspended first. Returns for each task
/// its id, its current host, and where it resumes. `preempted_at`: time of the suspension of each
/// preempted task. `starting_hosts`: hosts on which tasks are being started.
///
/// A task resumes on its current host if a processor is idle there, otherwise on another host with
/// an idle processor. If no processor is idle, external load is ignored: it may last forever, and a
/// slow task is better than a suspended one. In this case too, the task resumes on its current
/// host, unless a task of another user has started there since the suspension.
///
/// Waiting requests need not be considered: they found no host although these tasks were
/// suspended, so they do not need the processors. If a later request needs them, the tasks are
/// preempted again. Only tasks that have been suspended for `PREEMPTED_TIME_MIN` are selected.
pub fn select_resumable(
    snapshot: &Snapshot,
    preempted_at: &BTreeMap<Tid, Micros>,
    starting_hosts: &BTreeSet<HostId>,
) -> Vec<(Tid, HostId, ResumeTarget)> {
    let now = snapshot.now;
    let index = snapshot.hosts.index(now);
    let hosts = index
        .hosts_with_suspended_tasks()
        .iter()
        .filter_map(|id| snapshot.host(*id));
    let hosted_tasks = hosts.flat_map(|host| host.tasks.iter().map(move |task| (host, task)));
    let long_suspension_start = |tid: &Tid| {
        preempted_at
            .get(tid)
            .copied()
            .filter(|suspended_at| now.since(*suspended_at) >= PREEMPTED_TIME_MIN)
    };
    let candidates = hosted_tasks.filter(|(_, task)| task.suspended && task.migration.is_none());
    let mut candidates: Vec<_> = candidates
        .filter_map(|(host, task)| Some((long_suspension_start(&task.tid)?, host, task)))
        .collect();
    candidates.sort_by_key(|(suspended_at, _, task)| (*suspended_at, task.tid));
    let mut capacity = ResumeCapacity {
        snapshot,
        index: &index,
        starting_hosts,
        resumed_counts: BTreeMap::new(),
    };
    let mut resumptions = Vec::new();
    // Resuming on the current host is tried first, so that no task migrates to a host on which
    // another suspended task can resume.
    for (may_migrate, ignore_external_load) in
        [(false, false), (true, false), (false, true), (true, true)]
    {
        candidates.retain(|(suspended_at, host, task)| {
            let target = match (may_migrate, ignore_external_load) {
                (false, false) => capacity.current_host_if_suitable(host, has_idle_processor),
                (false, true) => capacity.current_host_if_suitable(host, |load| {
                    has_room_beside_vm_tasks(load) || !newer_task_present(host, task, *suspended_at)
                }),
                (true, _) => capacity.find_other_host(host, task, ignore_external_load),
            };
            let Some(target) = target else { return true };
            *capacity.resumed_counts.entry(target).or_default() += 1;
            resumptions.push((
                task.tid,
                host.id,
                if may_migrate {
                    ResumeTarget::OtherHost(target)
                } else {
                    ResumeTarget::CurrentHost
                },
            ));
            false
        });
    }
    resumptions
}

/// Slots of the hosts, while tasks to resume are selected one after the other.
struct ResumeCapacity<'a> {
    snapshot: &'a Snapshot,
    index: &'a HostIndex,
    starting_hosts: &'a BTreeSet<HostId>,
    /// Number of tasks already selected to resume, by host.
    resumed_counts: BTreeMap<HostId, u32>,
}

impl ResumeCapacity<'_> {
    /// Returns the load of a host, with the tasks selected to resume there. `None` if the host does
    /// not accept one more task, or if a task is being started there.
    fn load_with_free_slot(&self, id: HostId) -> Option<HostLoad> {
        let load = self
            .index
            .load(id)
            .filter(|_| !self.starting_hosts.contains(&id))?;
        let count = load.vm_task_count + self.resumed_counts.get(&id).copied().unwrap_or(0);
        Some(HostLoad {
            vm_task_count: count,
            ..load
        })
        .filter(|load| load.remaining_slots() > 0)
    }

    /// Returns the task's current host if the host accepts the task and `is_sufficient` is true for
    /// the host's load.
    fn current_host_if_suitable(
        &self,
        host: &HostView,
        is_sufficient: impl Fn(HostLoad) -> bool,
    ) -> Option<HostId> {
        let load = self
            .load_with_free_slot(host.id)
            .filter(|_| host.owner.exclusion_reason().is_none());
        load.is_some_and(is_sufficient).then_some(host.id)
    }

    /// Returns the best other host with a processor for the task; `None` if there is no such host
    /// or the task must stay. `ignore_external_load`: a processor that external load uses too is
    /// sufficient.
    fn find_other_host(
        &self,
        host: &HostView,
        task: &TaskView,
        ignore_external_load: bool,
    ) -> Option<HostId> {
        let now = self.snapshot.now;
        if task.host_named
            || task
                .migration_obstacle
                .as_ref()
                .is_some_and(|migration_obstacle| migration_obstacle.until > now)
        {
            return None;
        }
        let is_suitable = |id: &HostId| {
            let has_recent_sample =
                |other: &&HostView| other.id != host.id && other.recent_sample(now).is_some();
            let Some(other) = self.snapshot.host(*id).filter(has_recent_sample) else {
                return false;
            };
            let is_sufficient = if ignore_external_load {
                has_room_beside_vm_tasks
            } else {
                has_idle_processor
            };
            target_exclusion(self.snapshot, other, host, task, true).is_none()
                && self.load_with_free_slot(*id).is_some_and(is_sufficient)
        };
        self.index
            .hosts_best_first()
            .take(PREEMPTION_SCAN_MAX)
            .find(is_suitable)
    }
}

/// True if a whole processor is idle.
fn has_idle_processor(load: HostLoad) -> bool {
    load.idle_percent() >= IDLE_PERCENT_MIN
}

/// True if the virtual machine's tasks, including one more, need at most all processors. If no task
/// runs, a fraction of a processor is sufficient.
fn has_room_beside_vm_tasks(load: HostLoad) -> bool {
    load.vm_task_count == 0 || u64::from(load.vm_task_count + 1) * 1000 <= load.processors_permille
}

/// True if a task of another user has started on the host since `task` was preempted. That task may
/// belong to the request for which `task` was preempted, or to a later request.
fn newer_task_present(host: &HostView, task: &TaskView, preempted_at: Micros) -> bool {
    let is_active_here = |other: &TaskView| other.computes() && other.migration.is_none();
    host.tasks.iter().any(|other| {
        is_active_here(other) && other.user != task.user && other.started_at >= preempted_at
    })
}
