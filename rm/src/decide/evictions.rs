//! Evictions: decides which tasks leave their host because its owner is present or accepts no
//! guests. The owner's policy determines when the tasks leave. Guests of a host that is being
//! drained leave immediately.
//!
//! - A task does not return to the host when the owner leaves. Tasks on hosts that accept guests
//!   are not migrated.
//! - The number of earlier migrations of a task is irrelevant, because a task that stays is paused.
//! - To avoid migrations back and forth, a host whose owner has just left is used as a target only
//!   if no other host is equally suitable ([`OWNER_RETURN_WINDOW`]).

use super::exclusions::ExclusionsBuilder;
use super::guest_classes::Guest;
use super::host_load::HostLoad;
use super::load::{WorkingLoads, limit_exclusion};
use super::{ExclusionReason, Exclusions, HostView, LeaveTime, OwnerState, Snapshot, TaskView};
use sempa_proto::migration::MigrationCause;
use sempa_proto::{HostId, Micros, Tid};
use std::fmt;

/// Maximum number of concurrent migrations in the virtual machine. Further tasks wait. The limit is
/// lower than the limit of the master, so that a migration requested by a user can start.
pub const CONCURRENT_MIGRATIONS_MAX: usize = 48;
/// Time after an owner's departure in which the owner may return. During this time, the host is
/// used as a target only if no other host is equally suitable.
pub const OWNER_RETURN_WINDOW: Micros = Micros::from_secs(10);

/// If an obstacle to a migration ends within this time, the job is not vacated.
const VACATE_RETRY_WINDOW: Micros = Micros::from_secs(5);
/// If an obstacle to a migration ends within this time, the obstacle is not logged.
const UNLOGGED_WINDOW: Micros = Micros::from_secs(1);

/// Decision to migrate one task away from its host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Eviction {
    pub tid: Tid,
    pub source: HostId,
    pub target: HostId,
    /// Reason why the task must leave its host, for the event log.
    pub cause: MigrationCause,
    /// Explanation of the choice of the target, in one sentence.
    pub why: String,
}

/// Reason why a guest stays on a host that accepts no guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StayReason {
    /// No other host accepts the guest.
    NoTargetHost {
        /// All other hosts, each with its reason.
        exclusions: Exclusions,
    },
    /// The guest cannot migrate to any host for a while.
    CannotMigrate { why: String },
    /// The guest waits because [`CONCURRENT_MIGRATIONS_MAX`] migrations are running.
    MigrationLimit,
    /// The owner allows guests to stay on the host for some time, which has not ended yet.
    GracePeriod,
    /// The owner allows guests to stay paused until the host accepts guests again.
    PausedForOwner,
    /// The owner's policy is to terminate guests. The host's daemon terminates them.
    Terminated,
}

/// A guest that stays on a host that accepts no guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StayDecision {
    pub tid: Tid,
    pub host: HostId,
    pub reason: StayReason,
    /// Time of the next decision if nothing changes earlier, on the snapshot's clock. `None` if no
    /// timer is needed.
    pub retry_at: Option<Micros>,
}

impl fmt::Display for StayReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoTargetHost { .. } => f.write_str("no host accepts it"),
            Self::CannotMigrate { why } => f.write_str(why),
            Self::MigrationLimit => {
                write!(f, "{CONCURRENT_MIGRATIONS_MAX} migrations are in progress")
            }
            Self::GracePeriod => f.write_str("its owner grants it some time"),
            Self::PausedForOwner => {
                f.write_str("its owner lets it stay paused until guests are accepted again")
            }
            Self::Terminated => f.write_str("its owner has it terminated there"),
        }
    }
}

impl StayDecision {
    /// True if the decision is logged. Decisions for reasons that soon cease to apply are not
    /// logged.
    pub fn is_logged(&self, now: Micros) -> bool {
        match self.reason {
            StayReason::MigrationLimit | StayReason::GracePeriod | StayReason::Terminated => false,
            StayReason::CannotMigrate { .. } => self
                .retry_at
                .is_none_or(|next_decision_at| next_decision_at.since(now) > UNLOGGED_WINDOW),
            StayReason::NoTargetHost { .. } | StayReason::PausedForOwner => true,
        }
    }

    /// True if the task's job must be vacated (checkpointed and ended): the policy of the host's
    /// owner requests this, the host is not being drained, and no other host will accept the task
    /// soon.
    pub fn vacates_job(&self, snapshot: &Snapshot) -> bool {
        let requests_vacating = |host: &HostView| {
            host.guest_policy.vacates_jobs && !matches!(host.owner, OwnerState::Drained { .. })
        };
        // A refusal by a host may end after a short time. The host is then tried again.
        let ends_soon = self.retry_at.is_some_and(|next_decision_at| {
            next_decision_at.since(snapshot.now) <= VACATE_RETRY_WINDOW
        });
        let has_no_target = matches!(
            self.reason,
            StayReason::NoTargetHost { .. } | StayReason::CannotMigrate { .. }
        );
        has_no_target && !ends_soon && snapshot.host(self.host).is_some_and(requests_vacating)
    }

    /// Describes the reason. If no host accepts the guest, lists the other hosts with the reason
    /// for each.
    pub fn describe(&self, snapshot: &Snapshot) -> String {
        match &self.reason {
            StayReason::NoTargetHost {
                exclusions: excluded_hosts,
            } if !excluded_hosts.is_empty() => {
                format!(
                    "{} ({})",
                    self.reason,
                    snapshot.describe_exclusions(excluded_hosts)
                )
            }
            other_reason => other_reason.to_string(),
        }
    }

    /// Describes the decision in one sentence for the event log.
    pub fn describe_stay(&self, snapshot: &Snapshot) -> String {
        let host_name_text = snapshot.host_name(self.host);
        let is_drained = |host: &HostView| matches!(host.owner, OwnerState::Drained { .. });
        let state_text = match snapshot.host(self.host).is_some_and(is_drained) {
            true => "it is being drained",
            false => "its owner is present",
        };
        format!(
            "{} stays on {host_name_text} although {state_text}: {}",
            self.tid,
            self.describe(snapshot)
        )
    }
}

/// Decisions about all guests of hosts that accept no guests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvictionPlan {
    /// Migrations to start, ordered by source and tid.
    pub evictions: Vec<Eviction>,
    /// Tasks that must leave their host but stay for a reason.
    pub stays: Vec<StayDecision>,
}

impl EvictionPlan {
    /// Returns the time of the next decision if nothing changes earlier; `None` if no timer is
    /// needed.
    pub fn retry_at(&self) -> Option<Micros> {
        self.stays.iter().filter_map(|stay| stay.retry_at).min()
    }
}

/// Decides about all guests of hosts that accept no guests.
pub fn plan_evictions(snapshot: &Snapshot) -> EvictionPlan {
    let index = snapshot.hosts.index(snapshot.now);
    let (loads, migrating_count) = (WorkingLoads::new(snapshot), index.migrating_task_count());
    let search_results = (0..index.evictable_guests().class_index_end())
        .map(|_| None)
        .collect();
    let mut planner = EvictionPlanner {
        snapshot,
        loads,
        migrating_count,
        class_results: search_results,
        plan: EvictionPlan::default(),
    };
    for (host, task_position, guest) in index.evictable_guests().iter() {
        match guest
            .class_decides
            .then(|| planner.decide_by_class(guest, host))
            .flatten()
        {
            Some(stay) => planner.plan.stays.push(stay),
            None => planner.decide_guest(host, task_position, guest),
        }
    }
    planner.plan
}

/// State of the decisions about all guests.
struct EvictionPlanner<'a> {
    snapshot: &'a Snapshot,
    loads: WorkingLoads<'a>,
    migrating_count: usize,
    /// Search result for each class of guests, by class index; `None` before the first search. When
    /// the owners of many hosts arrive at once, a search that fails runs once per class instead of
    /// once per task.
    class_results: Vec<Option<TargetSearch>>,
    plan: EvictionPlan,
}

/// Result of the search for a target for the guests of one class.
enum TargetSearch {
    Found,
    NotFound(FailedSearch),
}

impl EvictionPlanner<'_> {
    /// Returns the decision if the guest stays according to the search result of its class.
    /// Otherwise returns `None`.
    fn decide_by_class(&self, guest: Guest, host: HostId) -> Option<StayDecision> {
        match self.class_results[guest.class_index].as_ref()? {
            TargetSearch::NotFound(failed_search) => {
                Some(failed_search.stay_decision(guest.tid, host))
            }
            // No timer is needed, because the end of any migration is an event, after which the
            // next decision is made.
            TargetSearch::Found if self.migrating_count >= CONCURRENT_MIGRATIONS_MAX => {
                Some(StayDecision {
                    tid: guest.tid,
                    host,
                    reason: StayReason::MigrationLimit,
                    retry_at: None,
                })
            }
            TargetSearch::Found => None,
        }
    }

    /// Decides about one guest, which is the task at position `task_position` in the task list of
    /// `host`. Adds the decision to the plan.
    fn decide_guest(&mut self, host: HostId, task_position: usize, guest: Guest) {
        let (snapshot, now) = (self.snapshot, self.snapshot.now);
        let Some(host) = snapshot.host(host) else {
            return;
        };
        let Some(task) = host.tasks.get(task_position) else {
            return;
        };
        let stay = |(stay_cause, next_decision_at)| StayDecision {
            tid: task.tid,
            host: host.id,
            reason: stay_cause,
            retry_at: next_decision_at,
        };
        // A refusal concerns only this task. The search result of its class therefore does not
        // apply to the task.
        let has_refusals = task
            .target_obstacles
            .iter()
            .any(|(_, obstacle)| obstacle.until > now);
        let class_decision = || {
            self.decide_by_class(guest, host.id)
                .filter(|_| !has_refusals)
        };
        if let Some(stay) = stay_reason(now, host, task)
            .map(stay)
            .or_else(class_decision)
        {
            self.plan.stays.push(stay);
            return;
        }
        let search_result = match find_target(snapshot, &self.loads, host, task) {
            Some(target) if self.migrating_count < CONCURRENT_MIGRATIONS_MAX => {
                self.plan_eviction(host, task, target);
                TargetSearch::Found
            }
            Some(_) => {
                self.plan
                    .stays
                    .push(stay((StayReason::MigrationLimit, None)));
                TargetSearch::Found
            }
            None => {
                let failed_search = FailedSearch::collect(snapshot, host, task);
                self.plan
                    .stays
                    .push(failed_search.stay_decision(task.tid, host.id));
                TargetSearch::NotFound(failed_search)
            }
        };
        if !has_refusals {
            self.class_results[guest.class_index] = Some(search_result);
        }
    }

    fn plan_eviction(&mut self, host: &HostView, task: &TaskView, target_host: &HostView) {
        let share = self.loads.share(target_host.id).usable_permille as f64 / 1e3;
        let explanation = format!(
            "{} migrates to {}, share of a processor {share:.2}",
            task.tid, target_host.name
        );
        let Some(cause) = eviction_cause(&host.owner) else {
            return;
        };
        self.plan.evictions.push(Eviction {
            tid: task.tid,
            source: host.id,
            target: target_host.id,
            cause,
            why: explanation,
        });
        self.migrating_count += 1;
        self.loads.add_task(target_host.id);
    }
}

/// Returns the reason, and the time of the next decision, if the guest stays regardless of the
/// possible targets. Returns `None` if the guest can leave now.
fn stay_reason(
    now: Micros,
    host: &HostView,
    task: &TaskView,
) -> Option<(StayReason, Option<Micros>)> {
    let guest_leave_time = match host.owner {
        OwnerState::Drained { .. } => LeaveTime::Now,
        _ => host.guest_policy.leave_time,
    };
    match guest_leave_time {
        LeaveTime::At(leave_at) if leave_at > now => {
            return Some((StayReason::GracePeriod, Some(leave_at)));
        }
        LeaveTime::Never => return Some((StayReason::PausedForOwner, None)),
        LeaveTime::Terminated => return Some((StayReason::Terminated, None)),
        LeaveTime::Now | LeaveTime::At(_) => {}
    }
    let migration_obstacle = task
        .migration_obstacle
        .as_ref()
        .filter(|migration_obstacle| migration_obstacle.until > now)?;
    Some((
        StayReason::CannotMigrate {
            why: migration_obstacle.reason.clone(),
        },
        Some(migration_obstacle.until),
    ))
}

/// Assigns hosts to the `task_count` tasks of a vacated job that restart together: round robin,
/// within the owners' limits on the number of guests. `programs`: users and programs of these
/// tasks. Returns `None` if the hosts have too few slots.
///
/// `reserved_for`: users and programs of another vacated job. Hosts that admit all of these users
/// and programs are reserved for that job and are not used.
pub fn assign_hosts(
    snapshot: &Snapshot,
    task_count: u32,
    programs: &[(u32, String)],
    reserved_for: Option<&[(u32, String)]>,
) -> Option<Vec<HostId>> {
    let index = snapshot.hosts.index(snapshot.now);
    let load = |host: &HostView| {
        index
            .load(host.id)
            .expect("the index has the snapshot's hosts")
    };
    let accepts_migrations = |host: &HostView| {
        host.migration_obstacle
            .as_ref()
            .is_none_or(|obstacle| obstacle.until <= snapshot.now)
    };
    let is_reserved = |host: &HostView| reserved_for.is_some_and(|programs| admits(host, programs));
    let usable_hosts = snapshot.hosts.into_iter().filter(|host| {
        host.owner.exclusion_reason().is_none()
            && limit_exclusion(host, snapshot.now, 0, || load(host)).is_none()
            && accepts_migrations(host)
            && admits(host, programs)
            && !is_reserved(host)
    });
    let mut slots_left: Vec<(HostId, u32)> = usable_hosts
        .map(|host| (host.id, load(host).remaining_slots()))
        .collect();
    let mut assigned_hosts = Vec::new();
    while (assigned_hosts.len() as u64) < u64::from(task_count) {
        slots_left.retain(|(_, slots_left)| *slots_left > 0);
        if slots_left.is_empty() {
            return None;
        }
        let unassigned_count = task_count as usize - assigned_hosts.len();
        for (host, slots_left) in slots_left.iter_mut().take(unassigned_count) {
            assigned_hosts.push(*host);
            *slots_left -= 1;
        }
    }
    Some(assigned_hosts)
}

/// True if the hosts would have slots for `task_count` tasks of these users and programs in the
/// best case: all owners are absent, and no other task runs.
pub fn could_hosts_ever_fit(
    snapshot: &Snapshot,
    task_count: u32,
    programs: &[(u32, String)],
) -> bool {
    let hosts = snapshot
        .hosts
        .into_iter()
        .filter(|host| admits(host, programs));
    hosts
        .map(|host| u64::from(host.guest_policy.limits.guests_max.unwrap_or(u32::MAX)))
        .sum::<u64>()
        >= u64::from(task_count)
}

fn admits(host: &HostView, programs: &[(u32, String)]) -> bool {
    programs
        .iter()
        .all(|(user, program)| host.guest_policy.block_reason(*user, program).is_none())
}

/// Returns the cause of evictions from a host whose owner is in the state `owner`; `None` if the
/// host accepts guests.
fn eviction_cause(owner: &OwnerState) -> Option<MigrationCause> {
    match owner {
        OwnerState::Present { why } | OwnerState::Closed { why } => {
            Some(MigrationCause::Owner { why: why.clone() })
        }
        OwnerState::Drained { requester } => Some(MigrationCause::Drain {
            requested_by: *requester,
        }),
        OwnerState::Unknown | OwnerState::Absent { .. } | OwnerState::PossiblyPresent { .. } => {
            None
        }
    }
}

/// Returns the best target for a task that must leave its host; `None` if no host accepts the task.
/// Hosts with fast links to the other tasks of its job have a higher weight. The best hosts are
/// examined first, and the search ends at the first suitable host.
///
/// A host that meets the constraints of the spawn is preferred, even if its owner has just left. If
/// no host meets the constraints, they are ignored, because the owner has priority.
fn find_target<'a>(
    snapshot: &'a Snapshot,
    loads: &WorkingLoads<'_>,
    source_host: &HostView,
    task: &TaskView,
) -> Option<&'a HostView> {
    let mut fallback_hosts = [None; 3];
    for weighted_share in loads.shares_best_first(&snapshot.peer_zones(source_host.id, task)) {
        let host = snapshot.host(weighted_share.share.host())?;
        if host.id == source_host.id
            || target_exclusion(snapshot, host, source_host, task, false).is_some()
            || loads.load(host.id).remaining_slots() == 0
        {
            continue;
        }
        let owner_may_return = matches!(host.owner, OwnerState::Absent { left_at: Some(left_time) } if snapshot.now.since(left_time) < OWNER_RETURN_WINDOW);
        let meets_constraints =
            unmet_constraint(host, snapshot.now, || loads.load(host.id), task).is_none();
        match (meets_constraints, owner_may_return) {
            (true, false) => return Some(host),
            (true, true) => fallback_hosts[0] = fallback_hosts[0].or(Some(host)),
            (false, false) => fallback_hosts[1] = fallback_hosts[1].or(Some(host)),
            (false, true) => fallback_hosts[2] = fallback_hosts[2].or(Some(host)),
        }
    }
    fallback_hosts.into_iter().flatten().next()
}

/// Result of a search that found no target: the reasons, and the time when a host may become a
/// target if nothing changes earlier.
struct FailedSearch {
    exclusions: Exclusions,
    retry_at: Option<Micros>,
}

impl FailedSearch {
    fn collect(snapshot: &Snapshot, source_host: &HostView, task: &TaskView) -> Self {
        let (mut builder, mut earliest_retry) = (ExclusionsBuilder::default(), None::<Micros>);
        for host in &snapshot.hosts {
            let Some((exclusion, retry_time)) =
                target_exclusion(snapshot, host, source_host, task, false)
            else {
                continue;
            };
            builder.add(host.id, exclusion);
            earliest_retry = earliest_retry.into_iter().chain(retry_time).min();
        }
        Self {
            exclusions: builder.build(),
            retry_at: earliest_retry,
        }
    }

    /// Returns the decision for another guest of the same class, on `host`. The reasons do not
    /// include `host`, because the list contains `host` only as a host that accepts no guests.
    fn stay_decision(&self, tid: Tid, host: HostId) -> StayDecision {
        let stay_cause = StayReason::NoTargetHost {
            exclusions: self.exclusions.without_host(host),
        };
        StayDecision {
            tid,
            host,
            reason: stay_cause,
            retry_at: self.retry_at,
        }
    }
}

fn unmet_constraint<'a>(
    host: &'a HostView,
    now: Micros,
    load: impl Fn() -> HostLoad,
    task: &TaskView,
) -> Option<ExclusionReason<&'a str>> {
    let (condition, actual_value) = task.constraints.as_ref()?.first_unmet(host, now, load)?;
    Some(ExclusionReason::UnmetCondition {
        condition,
        actual: actual_value,
    })
}

/// Returns the reason why a host cannot be the target of this task, and the time when the reason
/// ends (`None` if unknown). Returns `None` if the host can be the target. `constraints_apply`:
/// also checks the constraints of the spawn.
pub(super) fn target_exclusion<'a>(
    snapshot: &Snapshot,
    host: &'a HostView,
    source_host: &HostView,
    task: &'a TaskView,
    constraints_apply: bool,
) -> Option<(ExclusionReason<&'a str>, Option<Micros>)> {
    let now = snapshot.now;
    if let Some(exclusion) = host.owner.exclusion_reason() {
        return Some((exclusion, None));
    }
    if let Some(exclusion) = host.guest_policy.block_reason(task.user, &task.name) {
        return Some((exclusion, None));
    }
    let load = || {
        snapshot
            .hosts
            .index(now)
            .load(host.id)
            .expect("the index has the snapshot's hosts")
    };
    if let Some(exclusion) = limit_exclusion(host, now, task.memory_bytes, load) {
        return Some((exclusion, None));
    }
    if host.arch != source_host.arch {
        return Some((ExclusionReason::OtherArch { arch: &host.arch }, None));
    }
    if let Some(host_obstacle) = host
        .migration_obstacle
        .as_ref()
        .filter(|host_obstacle| host_obstacle.until > now)
    {
        return Some((
            ExclusionReason::NoMigrations {
                why: &host_obstacle.reason,
            },
            Some(host_obstacle.until),
        ));
    }
    let refusal = task
        .target_obstacles
        .iter()
        .find(|(id, task_obstacle)| *id == host.id && task_obstacle.until > now);
    if let Some((_, task_obstacle)) = refusal {
        return Some((
            ExclusionReason::Refused {
                why: &task_obstacle.reason,
            },
            Some(task_obstacle.until),
        ));
    }
    let unmet_exclusion = constraints_apply
        .then(|| unmet_constraint(host, now, load, task))
        .flatten()?;
    Some((unmet_exclusion, None))
}
