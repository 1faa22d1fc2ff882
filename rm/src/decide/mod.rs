//! The decisions of the resource manager, as pure functions of a [`Snapshot`].
//!
//! - [`place()`]: on which hosts new tasks start.
//! - [`plan_evictions()`]: which tasks leave their host because of its owner or a drain.
//! - [`plan_rebalances()`]: which tasks migrate for performance.
//! - [`FairShare`]: which waiting request is served first.
//! - [`select_victims()`]: which tasks are preempted.
//! - [`select_resumable()`]: which preempted tasks resume.
//!
//! Every decision, including a decision not to act, carries a typed reason.
//!
//! This module reads no clock and does not communicate. All state that a decision depends on
//! (refusals, recent migrations, the round-robin position) is part of the snapshot.

mod chooser;
mod constraints;
mod evictions;
mod exclusion_reason;
mod exclusions;
mod fair;
mod gain_feedback;
mod guest_classes;
mod host_load;
mod index;
mod link_speeds;
mod load;
mod makespan_moves;
mod makespan_sim;
mod placement;
mod placement_request;
mod placement_run;
mod predict;
mod prediction_feedback;
mod preemption;
mod rebalance;
mod rebalance_plan;
mod reserve;

pub use chooser::{CHOOSER_NAME_MAX, Chooser, ChooserName, Choosers, HostOffer, UnknownChooser};
pub use constraints::{
    ActualValue, Attribute, CONSTRAINTS_BYTES_MAX, CONSTRAINTS_ENV, Colocation, Condition,
    Constraints, ConstraintsError, Metric, Operator, Rank,
};
pub use evictions::{
    CONCURRENT_MIGRATIONS_MAX, Eviction, EvictionPlan, OWNER_RETURN_WINDOW, StayDecision,
    StayReason, assign_hosts, could_ever_fit, plan_evictions,
};
pub use exclusion_reason::ExclusionReason;
pub use exclusions::{EXCLUDED_HOSTS_MAX, Exclusions};
pub use fair::{
    FairShare, LimitError, Limits, PREEMPTION_MARGIN, QueuedRequest, USERS_MAX, UpDownRates,
    WAITING_MAX,
};
pub use gain_feedback::{CONFIDENCE_HALF_LIFE, CONFIDENCE_RANGE};
pub use host_load::{ExternalMean, ProcessorShare, external_demand};
pub use index::HostList;
pub use link_speeds::{HostPair, PAIRS_MAX};
pub use placement::{general_exclusion, host_restrictions, place, place_with_chooser};
pub use placement_request::{
    EXPLAINED_HOSTS_MAX, Placement, PlacementReason, PlacementRequest, SPAWN_TASKS_MAX,
};
pub use predict::{
    Estimates, LearnedCosts, MigrationSample, PROGRAMS_MAX, WORK_LEFT_MAX, slowness,
};
pub use prediction_feedback::{PENDING_PREDICTIONS_MAX, PendingPredictions, PredictionOutcome};
pub use preemption::{PREEMPTION_SCAN_MAX, ResumeAt, Victim, select_resumable, select_victims};
pub use rebalance::{GAIN_MARGIN, OWNER_AWAY_MIN, plan_rebalances};
pub use rebalance_plan::{
    COOLDOWN, IDLE_TARGET_COOLDOWN, REBALANCE_COOLDOWN, REBALANCES_MAX, REBALANCES_WINDOW,
    Rebalance, RebalanceReason,
};
pub use reserve::{RESERVE_AFTER, hosts_to_reserve};

use sempa_proto::load::{GuestLimits, LoadSample};
use sempa_proto::{HostId, Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// Maximum age of a load sample. An older sample counts as missing.
pub const SAMPLE_AGE_MAX: Micros = Micros::from_secs(15);

/// How new tasks are spread over hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlacementPolicy {
    /// Round robin in blocks, as in PVM. The load of the hosts is ignored.
    RoundRobin,
    /// Each task is placed on the host with the largest predicted processor share.
    #[default]
    Load,
    /// An external chooser selects the hosts, for example a batch system. If a spawn names its
    /// host, the chooser is not used.
    Choice(ChooserName),
}

impl fmt::Display for PlacementPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PlacementPolicy::RoundRobin => f.write_str("round-robin"),
            PlacementPolicy::Load => f.write_str("load"),
            PlacementPolicy::Choice(name) => write!(f, "choice:{}", name.as_str()),
        }
    }
}

/// Maximum number of excluded hosts that an explanation names. It gives only the number of further
/// ones.
pub const NAMED_HOSTS_MAX: usize = 16;

/// Maximum number of peer hosts whose zones are considered.
const PEERS_MAX: usize = 64;

/// Parameters for weighing the costs of decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Weight of a processor share, in thousandths, on a host outside the zones of the task's
    /// peers, because messages over such a link take longer. Applies until a migration has measured
    /// the link.
    pub other_zone_permille: u32,
    /// Minimum gain of a rebalancing migration, in percent of the migration's cost.
    pub margin_percent: u32,
}

impl Default for Costs {
    fn default() -> Costs {
        Costs {
            other_zone_permille: 900,
            margin_percent: (GAIN_MARGIN * 100.0) as u32,
        }
    }
}

impl Costs {
    fn margin(self) -> f64 {
        f64::from(self.margin_percent) / 100.0
    }

    /// Returns the weight of a processor share, in thousandths, on a host whose link to the peers
    /// has the relative speed `speed` (1.0: as fast as the links among the peers). An unknown link
    /// counts as half as fast, which yields `other_zone_permille`.
    fn link_weight_permille(self, speed: Option<f64>) -> u32 {
        let less = f64::from(1000u32.saturating_sub(self.other_zone_permille));
        1000 - (less * 2.0 * (1.0 - speed.unwrap_or(0.5).clamp(0.0, 1.0))).min(1000.0) as u32
    }
}

/// All input of the decisions.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Current time. All times and deadlines in the snapshot are on this monotonic clock.
    pub now: Micros,
    pub policy: PlacementPolicy,
    /// The last host used by round robin. The next placement starts with the host after it.
    pub round_robin_last: HostId,
    pub costs: Costs,
    /// Values learned from earlier tasks and migrations.
    pub estimates: Estimates,
    /// Jobs whose tasks wait for each other at barriers, by the task at the top of the job.
    pub barrier_jobs: BTreeSet<Tid>,
    /// All hosts, by ascending id.
    pub hosts: HostList,
}

/// State of one host as decisions see it.
#[derive(Clone, Debug)]
pub struct HostView {
    pub id: HostId,
    pub name: String,
    pub arch: String,
    /// Number of the host's zone. Fast links connect the hosts of a zone.
    pub zone: u32,
    /// Labels that the administrator gave the host, for constraints.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Relative speed; 1000 is an ordinary host.
    pub speed: i32,
    /// Processors in the last report; 1 if there was none.
    pub cores: u32,
    /// Newest sample regardless of its age; `None` before the first report.
    pub sample: Option<TimedSample>,
    /// Mean processor demand of other software over some minutes; `None` if only the demand in
    /// `sample` is known.
    pub external_mean: Option<ExternalMean>,
    pub owner: OwnerState,
    /// Memory in bytes that recent spawns have requested and that `sample` does not include yet. It
    /// counts as used.
    pub promised_bytes: u64,
    pub guest_policy: GuestPolicy,
    /// Why the host accepts no migrations at present, and until when. Set, for example, after its
    /// dump engine has failed.
    pub migration_obstacle: Option<Obstacle>,
    /// Number of tasks that are being started on the host. They count as load.
    pub starting_tasks: u32,
    pub tasks: Vec<TaskView>,
}

impl HostView {
    /// Returns the available memory in bytes, minus the promised memory. `None` without a sample.
    pub fn available_bytes(&self) -> Option<u64> {
        self.sample
            .as_ref()
            .map(|s| s.sample.available_bytes.saturating_sub(self.promised_bytes))
    }

    /// Returns the sample if it is at most [`SAMPLE_AGE_MAX`] old.
    pub fn fresh_sample(&self, now: Micros) -> Option<&TimedSample> {
        self.sample
            .as_ref()
            .filter(|s| now.since(s.received_at) <= SAMPLE_AGE_MAX)
    }
}

/// A load sample with its arrival time.
#[derive(Clone, Debug)]
pub struct TimedSample {
    pub sample: LoadSample,
    /// Arrival time of the report, on the snapshot's clock.
    pub received_at: Micros,
    /// Number of tasks of the virtual machine on the host at that time. The sample includes their
    /// load.
    pub own_tasks: u32,
}

/// State of a host's owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum OwnerState {
    /// No load watcher has reported.
    #[default]
    Unknown,
    /// The host is not in use.
    Absent {
        /// When the last user left, on the snapshot's clock; `None` if no user was seen.
        left_at: Option<Micros>,
    },
    /// The host may be in use. Guests stay. If a login is idle, new tasks are placed on other hosts
    /// first.
    PossiblyPresent {
        /// The load watcher's explanation.
        why: String,
        /// True if a user is logged in and idle. Otherwise, external load suggests that the host is
        /// in use.
        idle_login: bool,
    },
    /// A user is active on the host.
    Present {
        /// The load watcher's explanation.
        why: String,
    },
    /// The owner accepts no guests at present, whether or not the host is in use.
    Closed {
        /// The load watcher's explanation.
        why: String,
    },
    /// The host is being drained. Its owner would accept guests.
    Drained {
        /// Task that requested the drain.
        by: Tid,
    },
}

impl OwnerState {
    /// True if the host accepts no guests: it is in use, closed by its owner, or being drained.
    pub fn excludes_guests(&self) -> bool {
        matches!(
            self,
            OwnerState::Present { .. } | OwnerState::Closed { .. } | OwnerState::Drained { .. }
        )
    }

    /// False if a user is logged in and idle. Such a host gets new tasks only if no other host has
    /// room. External load does not matter, because decisions weigh it as load.
    fn is_unattended(&self) -> bool {
        !matches!(
            self,
            OwnerState::PossiblyPresent {
                idle_login: true,
                ..
            }
        )
    }

    /// Returns the reason why the host accepts no guests; `None` if it accepts them.
    fn exclusion_reason(&self) -> Option<ExclusionReason<&str>> {
        match self {
            OwnerState::Present { why } => Some(ExclusionReason::OwnerPresent { why }),
            OwnerState::Closed { why } => Some(ExclusionReason::Closed { why }),
            OwnerState::Drained { by } => Some(ExclusionReason::Drained { by: *by }),
            OwnerState::Unknown
            | OwnerState::Absent { .. }
            | OwnerState::PossiblyPresent { .. } => None,
        }
    }
}

/// When guests leave a host after its owner stops accepting them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaveTime {
    #[default]
    Now,
    /// At this time on the snapshot's clock, unless guests are accepted again before.
    At(Micros),
    /// Guests stay paused on the host until they are accepted again.
    Never,
    /// The host's daemon terminates the guests; no migration is planned.
    Terminated,
}

/// Conditions under which the owner of a host accepts guests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestPolicy {
    pub leave_time: LeaveTime,
    /// True if a guest that no other host accepts has its job vacated (checkpointed and ended).
    /// Otherwise the guest stays paused on the host.
    pub vacates_jobs: bool,
    /// Limits on guests while they are accepted.
    pub limits: Arc<GuestLimits>,
}

impl GuestPolicy {
    /// Returns the reason if the owner excludes this program or this user.
    fn block_reason(&self, user: u32, program: &str) -> Option<ExclusionReason<&str>> {
        if self.limits.users.contains(&user) {
            return Some(ExclusionReason::UserBlocked { user });
        }
        self.limits
            .blocking_pattern(program)
            .map(|pattern| ExclusionReason::ProgramBlocked { pattern })
    }
}

/// A temporary obstacle and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// End of the obstacle, on the snapshot's clock.
    pub until: Micros,
    pub reason: String,
}

/// State of one task as decisions see it.
#[derive(Clone, Debug)]
pub struct TaskView {
    pub tid: Tid,
    /// The task serves its host or was not spawned: it cannot migrate and is not a guest.
    pub pinned: bool,
    /// Set while the task migrates. The inner value is the target, if it is known.
    pub migrating: Option<Option<HostId>>,
    /// True while the task is suspended. It causes no load, and only an explicit resume continues
    /// it.
    pub suspended: bool,
    pub user: u32,
    /// Task at the top of the job: one that was started by hand or has no parent.
    pub job: Tid,
    pub name: Arc<str>,
    /// Start time on the snapshot's clock. If the resource manager did not see the start, the time
    /// when it first saw the task.
    pub started_at: Micros,
    /// Estimated work done so far, as time on an ordinary processor.
    pub work_done: Micros,
    /// Memory at the last migration, in bytes; 0 if the task has never migrated.
    pub memory_bytes: u64,
    /// True if a user or program chose the host by name, at the spawn or later. Such a task is not
    /// rebalanced.
    pub host_named: bool,
    /// Constraints of the task's spawn.
    pub constraints: Option<Arc<Constraints>>,
    /// Times of rebalancing migrations in the last hour, oldest first.
    pub recent_rebalances: Vec<Micros>,
    /// Times of the newest migrations for any cause, oldest first. A cooldown after each of them
    /// delays the next rebalancing migration.
    pub recent_migrations: Vec<Micros>,
    /// Obstacle that prevents any migration of the task for a while.
    pub obstacle: Option<Obstacle>,
    /// Hosts that refuse the task for a while, with the reason.
    pub refused_by: Vec<(HostId, Obstacle)>,
}

impl TaskView {
    /// True for a guest that is not migrating. Such a task must leave its host when the host stops
    /// accepting guests.
    pub fn is_evictable(&self) -> bool {
        !self.pinned && self.migrating.is_none()
    }

    /// True if the task is part of its host's load: neither pinned nor suspended.
    pub fn computes(&self) -> bool {
        !self.pinned && !self.suspended
    }

    /// Creates a task of which only the id and the start time are known.
    pub fn new(tid: Tid, since: Micros) -> TaskView {
        TaskView {
            tid,
            pinned: false,
            migrating: None,
            suspended: false,
            user: 0,
            job: tid,
            name: Arc::from(""),
            started_at: since,
            work_done: Micros::default(),
            memory_bytes: 0,
            host_named: false,
            constraints: None,
            recent_rebalances: Vec::new(),
            recent_migrations: Vec::new(),
            obstacle: None,
            refused_by: Vec::new(),
        }
    }
}

impl Snapshot {
    /// Creates a snapshot of these hosts without learned values. Round robin starts after the
    /// master's host.
    pub fn new(now: Micros, policy: PlacementPolicy, mut hosts: HostList) -> Snapshot {
        hosts.refresh(now);
        let (costs, estimates, barriers) =
            (Costs::default(), Estimates::default(), BTreeSet::new());
        Snapshot {
            now,
            policy,
            round_robin_last: HostId::MASTER,
            costs,
            estimates,
            barrier_jobs: barriers,
            hosts,
        }
    }

    pub fn host(&self, id: HostId) -> Option<&HostView> {
        self.hosts.position(id).map(|i| &self.hosts[i])
    }

    /// Returns the processor share of each task of the virtual machine on a host, in thousandths of
    /// an ordinary processor; 0 for an unknown host.
    pub fn rate(&self, id: HostId) -> f64 {
        self.hosts
            .index(self.now)
            .load(id)
            .map_or(0.0, |load| load.rate())
    }

    /// Returns how much slower than an ordinary processor the two hosts of a migration are at
    /// present; see the function [`slowness`].
    pub fn slowness(&self, from: HostId, to: HostId) -> f64 {
        // An unknown host counts as an ordinary one.
        let rate = |id| {
            Some(self.rate(id))
                .filter(|rate| *rate > 0.0)
                .unwrap_or(1e3)
        };
        slowness(rate(from), rate(to))
    }

    /// Returns the expected cost of migrating this task between hosts with this [`slowness`].
    pub fn migration_cost(
        &self,
        task: &TaskView,
        from: &HostView,
        to: &HostView,
        slowness: f64,
    ) -> Micros {
        let bytes = self.estimates.expected_bytes(&task.name, task.memory_bytes);
        self.estimates
            .migration_cost(bytes, slowness, Some(HostPair::between(from, to)))
    }

    /// Returns the hosts that a new task of this job will communicate with: the host of the
    /// spawning task and the hosts of the job's tasks.
    pub fn peer_hosts(&self, caller: HostId, job: Tid) -> Vec<HostId> {
        let index = self.hosts.index(self.now);
        std::iter::once(caller)
            .chain(
                index
                    .hosts_of(job)
                    .filter(|id| *id != caller)
                    .take(PEERS_MAX),
            )
            .collect()
    }

    /// Returns the zones of the other hosts that run tasks of the same job; empty if no other host
    /// does.
    fn peer_zones(&self, from: HostId, task: &TaskView) -> BTreeSet<u32> {
        let index = self.hosts.index(self.now);
        let others = index
            .hosts_of(task.job)
            .filter(|id| *id != from)
            .take(PEERS_MAX);
        others.filter_map(|id| index.zone(id)).collect()
    }

    /// Returns the weight, in thousandths, of a processor share in `zone` for a task whose peers
    /// are in the zones `peers`. The weight is lower if the link to the peers is slower.
    fn zone_weight_permille(&self, zone: u32, peers: &BTreeSet<u32>) -> u32 {
        match peers.is_empty() || peers.contains(&zone) {
            true => 1000,
            false => self
                .costs
                .link_weight_permille(self.estimates.relative_speed(zone, peers)),
        }
    }

    /// Returns the factor by which a computed gain is corrected, learned from earlier migrations.
    /// `declared`: the gain was computed from work that programs declared.
    fn confidence(&self, declared: bool) -> f64 {
        self.estimates.confidence(self.now, declared)
    }

    /// Returns the host's name, or its number if the host is unknown.
    pub fn host_name(&self, id: HostId) -> String {
        self.host(id)
            .map_or_else(|| id.to_string(), |h| h.name.clone())
    }

    /// Formats exclusions, for example "h1: reason; h2: reason; memory >= 2G excludes h3 (1.0G), h4
    /// (512.0M); and 7 more".
    fn describe_exclusions(&self, excluded: &Exclusions) -> String {
        let (reportable, unlisted) = excluded.reportable();
        let (mut parts, mut unmet) = (Vec::new(), Vec::<(String, Vec<String>)>::new());
        for (id, why) in reportable.iter().take(NAMED_HOSTS_MAX) {
            let ExclusionReason::Unmet { condition, has } = why else {
                parts.push(format!("{}: {why}", self.host_name(*id)));
                continue;
            };
            let (condition, host) = (
                condition.to_string(),
                format!("{} ({has})", self.host_name(*id)),
            );
            match unmet
                .iter_mut()
                .find(|(reportable, _)| *reportable == condition)
            {
                Some((_, hosts)) => hosts.push(host),
                None => unmet.push((condition, vec![host])),
            }
        }
        parts.extend(
            unmet
                .into_iter()
                .map(|(condition, hosts)| format!("{condition} excludes {}", hosts.join(", "))),
        );
        let unlisted = reportable.len().saturating_sub(NAMED_HOSTS_MAX) + unlisted;
        parts.extend((unlisted > 0).then(|| format!("and {unlisted} more")));
        parts.join("; ")
    }
}
