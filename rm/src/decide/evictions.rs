//! Evictions: decides which tasks leave their host because its owner is present or accepts no
//! guests. The owner's terms determine when they leave. Guests of a host that is being drained
//! leave immediately.
//!
//! - A task does not return to the host when the owner leaves. Tasks on hosts that accept guests
//!   are not migrated.
//! - The number of earlier migrations of a task is irrelevant, because a task that stays is paused.
//! - To avoid migrations back and forth, a host whose owner has just left is used as a target only
//!   if there is no other ([`OWNER_RETURN_WINDOW`]).

use super::exclusions::ExclusionsBuilder;
use super::guest_classes::Guest;
use super::host_load::HostLoad;
use super::load::{WorkingLoads, limit_exclusion};
use super::{ExclusionReason, Exclusions, HostView, LeaveTime, OwnerState, Snapshot, TaskView};
use sempa_proto::migration::MigrationCause;
use sempa_proto::{HostId, Micros, Tid};
use std::fmt;

/// Maximum number of concurrent migrations in the virtual machine. Further tasks wait. The limit is
/// lower than the master's, so that a migration requested by a user can start.
pub const CONCURRENT_MIGRATIONS_MAX: usize = 48;
/// Time after an owner's departure in which the host is used as a target only if there is no other,
/// because the owner may return.
pub const OWNER_RETURN_WINDOW: Micros = Micros::from_secs(10);

/// If an obstacle to a migration ends within this time, the job is not vacated.
const VACATE_RETRY_WINDOW: Micros = Micros::from_secs(5);
/// If an obstacle to a migration ends within this time, it is not logged.
const UNLOGGED_WINDOW: Micros = Micros::from_secs(1);

/// Decision to migrate one task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Eviction {
    pub tid: Tid,
    pub from: HostId,
    pub to: HostId,
    /// Why the task must leave, for the event log.
    pub cause: MigrationCause,
    /// Why the target was chosen, in one sentence.
    pub why: String,
}

/// Why a guest stays on a host that accepts no guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StayReason {
    /// No other host accepts the guest.
    NoHost {
        /// The other hosts with the reason for each.
        excluded: Exclusions,
    },
    /// The guest cannot migrate to any host for a while.
    CannotMigrate { why: String },
    /// The guest waits because [`CONCURRENT_MIGRATIONS_MAX`] migrations are running.
    MigrationLimit,
    /// The owner lets guests stay on the host for some time, and that time has not ended.
    GracePeriod,
    /// The owner lets guests stay paused until the host accepts guests again.
    PausedForOwner,
    /// The host's daemon terminates the guests.
    Terminated,
}

/// A guest that stays on a host that accepts no guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StayDecision {
    pub tid: Tid,
    pub host: HostId,
    pub reason: StayReason,
    /// When to decide again if nothing changes before, on the snapshot's clock.
    pub retry_at: Option<Micros>,
}

impl fmt::Display for StayReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StayReason::NoHost { .. } => f.write_str("no host accepts it"),
            StayReason::CannotMigrate { why } => f.write_str(why),
            StayReason::MigrationLimit => {
                write!(f, "{CONCURRENT_MIGRATIONS_MAX} migrations are in progress")
            }
            StayReason::GracePeriod => f.write_str("its owner grants it some time"),
            StayReason::PausedForOwner => {
                f.write_str("its owner lets it stay paused until guests are accepted again")
            }
            StayReason::Terminated => f.write_str("its owner has it terminated there"),
        }
    }
}

impl StayDecision {
    /// False for reasons that are not logged because they end soon.
    pub fn is_logged(&self, now: Micros) -> bool {
        match self.reason {
            StayReason::MigrationLimit | StayReason::GracePeriod | StayReason::Terminated => false,
            StayReason::CannotMigrate { .. } => self
                .retry_at
                .is_none_or(|again| again.since(now) > UNLOGGED_WINDOW),
            StayReason::NoHost { .. } | StayReason::PausedForOwner => true,
        }
    }

    /// True if the task's job must be vacated (checkpointed and ended): the owner's terms request
    /// it, and no host accepts the task soon.
    pub fn vacates_job(&self, snapshot: &Snapshot) -> bool {
        let wants = |host: &HostView| {
            host.guest_policy.vacates_jobs && !matches!(host.owner, OwnerState::Drained { .. })
        };
        // A refusal by a host may end after a short time; then that host is tried again.
        let passes = self
            .retry_at
            .is_some_and(|again| again.since(snapshot.now) <= VACATE_RETRY_WINDOW);
        let nowhere = matches!(
            self.reason,
            StayReason::NoHost { .. } | StayReason::CannotMigrate { .. }
        );
        nowhere && !passes && snapshot.host(self.host).is_some_and(wants)
    }

    /// Describes the reason. If no host accepts the guest, lists the other hosts with the reason
    /// for each.
    pub fn describe(&self, snapshot: &Snapshot) -> String {
        match &self.reason {
            StayReason::NoHost { excluded } if !excluded.is_empty() => {
                format!(
                    "{} ({})",
                    self.reason,
                    snapshot.describe_exclusions(excluded)
                )
            }
            why => why.to_string(),
        }
    }

    /// Describes the decision in one sentence for the event log.
    pub fn sentence(&self, snapshot: &Snapshot) -> String {
        let name = snapshot.host_name(self.host);
        let drained = |host: &HostView| matches!(host.owner, OwnerState::Drained { .. });
        let although = match snapshot.host(self.host).is_some_and(drained) {
            true => "it is being drained",
            false => "its owner is present",
        };
        format!(
            "{} stays on {name} although {although}: {}",
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
    /// Tasks that should leave but stay.
    pub staying: Vec<StayDecision>,
}

impl EvictionPlan {
    /// Returns the time of the next decision if nothing changes before; `None` if none is needed.
    pub fn retry_at(&self) -> Option<Micros> {
        self.staying.iter().filter_map(|stay| stay.retry_at).min()
    }
}

/// Decides about all guests of hosts that accept no guests.
pub fn plan_evictions(snapshot: &Snapshot) -> EvictionPlan {
    let index = snapshot.hosts.index(snapshot.now);
    let (loads, under_way) = (WorkingLoads::of(snapshot), index.migrating_tasks());
    let places = (0..index.guests().class_bound()).map(|_| None).collect();
    let mut moving = EvictionPlanner {
        snapshot,
        loads,
        migrating: under_way,
        class_results: places,
        plan: EvictionPlan::default(),
    };
    for (host, at, guest) in index.guests().iter() {
        match guest
            .class_decides
            .then(|| moving.decide_by_class(guest, host))
            .flatten()
        {
            Some(stay) => moving.plan.staying.push(stay),
            None => moving.decide_guest(host, at, guest),
        }
    }
    moving.plan
}

/// State of the decision about all guests.
struct EvictionPlanner<'a> {
    snapshot: &'a Snapshot,
    loads: WorkingLoads<'a>,
    migrating: usize,
    /// Search result for each class of guests, by class index. When the owners of many hosts arrive
    /// at once, a search that fails runs once per class instead of once per task.
    class_results: Vec<Option<TargetSearch>>,
    plan: EvictionPlan,
}

/// Whether there is a target for the guests of one class.
enum TargetSearch {
    Found,
    NotFound(NoTarget),
}

impl EvictionPlanner<'_> {
    /// Returns the decision if the search result of the guest's class shows that the guest stays;
    /// otherwise `None`.
    fn decide_by_class(&self, guest: Guest, host: HostId) -> Option<StayDecision> {
        match self.class_results[guest.class].as_ref()? {
            TargetSearch::NotFound(nowhere) => Some(nowhere.stay(guest.tid, host)),
            // No timer is needed, because the end of any migration is an event that leads to the
            // next decision.
            TargetSearch::Found if self.migrating >= CONCURRENT_MIGRATIONS_MAX => {
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

    /// Decides about one guest: the task at position `at` in the task list of `host`.
    fn decide_guest(&mut self, host: HostId, at: usize, guest: Guest) {
        let (snapshot, now) = (self.snapshot, self.snapshot.now);
        let Some(host) = snapshot.host(host) else {
            return;
        };
        let Some(task) = host.tasks.get(at) else {
            return;
        };
        let stay = |(why, again)| StayDecision {
            tid: task.tid,
            host: host.id,
            reason: why,
            retry_at: again,
        };
        // Refusals concern this task only, so the search result of its class does not apply to it.
        let refused = task.refused_by.iter().any(|(_, until)| until.until > now);
        let as_others = || self.decide_by_class(guest, host.id).filter(|_| !refused);
        if let Some(stay) = stay_reason(now, host, task).map(stay).or_else(as_others) {
            self.plan.staying.push(stay);
            return;
        }
        let place = match find_target(snapshot, &self.loads, host, task) {
            Some(to) if self.migrating < CONCURRENT_MIGRATIONS_MAX => {
                self.evict(host, task, to);
                TargetSearch::Found
            }
            Some(_) => {
                self.plan
                    .staying
                    .push(stay((StayReason::MigrationLimit, None)));
                TargetSearch::Found
            }
            None => {
                let nowhere = NoTarget::of(snapshot, host, task);
                self.plan.staying.push(nowhere.stay(task.tid, host.id));
                TargetSearch::NotFound(nowhere)
            }
        };
        if !refused {
            self.class_results[guest.class] = Some(place);
        }
    }

    fn evict(&mut self, host: &HostView, task: &TaskView, to: &HostView) {
        let share = self.loads.share(to.id).usable as f64 / 1e3;
        let why = format!(
            "{} migrates to {}, share of a processor {share:.2}",
            task.tid, to.name
        );
        let Some(cause) = eviction_cause(&host.owner) else {
            return;
        };
        self.plan.evictions.push(Eviction {
            tid: task.tid,
            from: host.id,
            to: to.id,
            cause,
            why,
        });
        self.migrating += 1;
        self.loads.add_task(to.id);
    }
}

/// Returns a reason why a guest must or can not leave yet, whatever the targets, and the time of
/// the next decision.
fn stay_reason(
    now: Micros,
    host: &HostView,
    task: &TaskView,
) -> Option<(StayReason, Option<Micros>)> {
    let leaving = match host.owner {
        OwnerState::Drained { .. } => LeaveTime::Now,
        _ => host.guest_policy.leave_time,
    };
    match leaving {
        LeaveTime::At(at) if at > now => return Some((StayReason::GracePeriod, Some(at))),
        LeaveTime::Never => return Some((StayReason::PausedForOwner, None)),
        LeaveTime::Terminated => return Some((StayReason::Terminated, None)),
        LeaveTime::Now | LeaveTime::At(_) => {}
    }
    let held = task.obstacle.as_ref().filter(|held| held.until > now)?;
    Some((
        StayReason::CannotMigrate {
            why: held.reason.clone(),
        },
        Some(held.until),
    ))
}

/// Assigns hosts to the `tasks` tasks of a vacated job that restart together: round robin, within
/// the owners' limits on the number of guests. `programs`: users and programs of the tasks. `None`
/// if there is not enough room.
///
/// Hosts that admit all of `reserved_for` are not used, because they are reserved for that job.
pub fn assign_hosts(
    snapshot: &Snapshot,
    tasks: u32,
    programs: &[(u32, String)],
    reserved_for: Option<&[(u32, String)]>,
) -> Option<Vec<HostId>> {
    let index = snapshot.hosts.index(snapshot.now);
    let load = |host: &HostView| {
        index
            .load(host.id)
            .expect("the index has the snapshot's hosts")
    };
    let moves = |host: &HostView| {
        host.migration_obstacle
            .as_ref()
            .is_none_or(|no| no.until <= snapshot.now)
    };
    let is_kept = |host: &HostView| reserved_for.is_some_and(|programs| admits(host, programs));
    let open = snapshot.hosts.into_iter().filter(|host| {
        host.owner.exclusion_reason().is_none()
            && limit_exclusion(host, snapshot.now, 0, || load(host)).is_none()
            && moves(host)
            && admits(host, programs)
            && !is_kept(host)
    });
    let mut slots_left: Vec<(HostId, u32)> = open
        .map(|host| (host.id, load(host).remaining_slots()))
        .collect();
    let mut places = Vec::new();
    while (places.len() as u64) < u64::from(tasks) {
        slots_left.retain(|(_, slots_left)| *slots_left > 0);
        if slots_left.is_empty() {
            return None;
        }
        let missing = tasks as usize - places.len();
        for (host, slots_left) in slots_left.iter_mut().take(missing) {
            places.push(*host);
            *slots_left -= 1;
        }
    }
    Some(places)
}

/// True if there would be room for `tasks` tasks of these users and programs if all owners were
/// absent and no other task ran.
pub fn could_ever_fit(snapshot: &Snapshot, tasks: u32, programs: &[(u32, String)]) -> bool {
    let hosts = snapshot
        .hosts
        .into_iter()
        .filter(|host| admits(host, programs));
    hosts
        .map(|host| u64::from(host.guest_policy.limits.guests_max.unwrap_or(u32::MAX)))
        .sum::<u64>()
        >= u64::from(tasks)
}

fn admits(host: &HostView, programs: &[(u32, String)]) -> bool {
    programs
        .iter()
        .all(|(user, program)| host.guest_policy.block_reason(*user, program).is_none())
}

/// Returns the cause of the evictions from a host with this owner; `None` if the host accepts
/// guests.
fn eviction_cause(owner: &OwnerState) -> Option<MigrationCause> {
    match owner {
        OwnerState::Present { why } | OwnerState::Closed { why } => {
            Some(MigrationCause::Owner { why: why.clone() })
        }
        OwnerState::Drained { by } => Some(MigrationCause::Drain { requested_by: *by }),
        OwnerState::Unknown | OwnerState::Absent { .. } | OwnerState::PossiblyPresent { .. } => {
            None
        }
    }
}

/// Returns the best target for a task that must leave its host; `None` if no host accepts it. Hosts
/// near the other tasks of its job have a higher weight. Examines the best hosts first, and no more
/// than necessary.
///
/// A host that meets the constraints of the spawn is preferred, even if its owner has just left. If
/// no host meets them, they are ignored, because the owner has priority.
fn find_target<'a>(
    snapshot: &'a Snapshot,
    loads: &WorkingLoads<'_>,
    from: &HostView,
    task: &TaskView,
) -> Option<&'a HostView> {
    let mut fallbacks = [None; 3];
    for near in loads.best_first(&snapshot.peer_zones(from.id, task)) {
        let host = snapshot.host(near.share.host())?;
        if host.id == from.id
            || target_exclusion(snapshot, host, from, task, false).is_some()
            || loads.load(host.id).remaining_slots() == 0
        {
            continue;
        }
        let settling = matches!(host.owner, OwnerState::Absent { left_at: Some(at) } if snapshot.now.since(at) < OWNER_RETURN_WINDOW);
        let meets = unmet_constraint(host, snapshot.now, || loads.load(host.id), task).is_none();
        match (meets, settling) {
            (true, false) => return Some(host),
            (true, true) => fallbacks[0] = fallbacks[0].or(Some(host)),
            (false, false) => fallbacks[1] = fallbacks[1].or(Some(host)),
            (false, true) => fallbacks[2] = fallbacks[2].or(Some(host)),
        }
    }
    fallbacks.into_iter().flatten().next()
}

/// Result of a search without a target: the reasons, and the time when a host may become a target
/// if nothing changes before.
struct NoTarget {
    excluded: Exclusions,
    retry_at: Option<Micros>,
}

impl NoTarget {
    fn of(snapshot: &Snapshot, from: &HostView, task: &TaskView) -> NoTarget {
        let (mut excluded, mut again) = (ExclusionsBuilder::default(), None::<Micros>);
        for host in &snapshot.hosts {
            let Some((why, until)) = target_exclusion(snapshot, host, from, task, false) else {
                continue;
            };
            excluded.add(host.id, why);
            again = again.into_iter().chain(until).min();
        }
        NoTarget {
            excluded: excluded.build(),
            retry_at: again,
        }
    }

    /// Returns the decision for a guest of the same class. Omits the guest's own host from the
    /// reasons: the list contains that host because it accepts no guests.
    fn stay(&self, tid: Tid, host: HostId) -> StayDecision {
        let why = StayReason::NoHost {
            excluded: self.excluded.without_host(host),
        };
        StayDecision {
            tid,
            host,
            reason: why,
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
    let (condition, has) = task.constraints.as_ref()?.first_unmet(host, now, load)?;
    Some(ExclusionReason::Unmet { condition, has })
}

/// Returns the reason why a host cannot be the target of this task, and the time when that reason
/// ends. `constraints_apply`: also checks the constraints of the spawn.
pub(super) fn target_exclusion<'a>(
    snapshot: &Snapshot,
    host: &'a HostView,
    from: &HostView,
    task: &'a TaskView,
    constraints_apply: bool,
) -> Option<(ExclusionReason<&'a str>, Option<Micros>)> {
    let now = snapshot.now;
    if let Some(why) = host.owner.exclusion_reason() {
        return Some((why, None));
    }
    if let Some(why) = host.guest_policy.block_reason(task.user, &task.name) {
        return Some((why, None));
    }
    let load = || {
        snapshot
            .hosts
            .index(now)
            .load(host.id)
            .expect("the index has the snapshot's hosts")
    };
    if let Some(why) = limit_exclusion(host, now, task.memory_bytes, load) {
        return Some((why, None));
    }
    if host.arch != from.arch {
        return Some((ExclusionReason::OtherArch { has: &host.arch }, None));
    }
    if let Some(no) = host.migration_obstacle.as_ref().filter(|no| no.until > now) {
        return Some((
            ExclusionReason::NoMigrations { why: &no.reason },
            Some(no.until),
        ));
    }
    let refused = task
        .refused_by
        .iter()
        .find(|(id, until)| *id == host.id && until.until > now);
    if let Some((_, until)) = refused {
        return Some((
            ExclusionReason::Refused { why: &until.reason },
            Some(until.until),
        ));
    }
    let unmet = constraints_apply
        .then(|| unmet_constraint(host, now, load, task))
        .flatten()?;
    Some((unmet, None))
}
