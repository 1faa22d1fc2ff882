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
    StayReason, assign_hosts, could_hosts_ever_fit, plan_evictions,
};
pub use exclusion_reason::ExclusionReason;
pub use exclusions::{EXCLUDED_HOSTS_MAX, Exclusions};
pub use fair::{
    FairShare, LimitError, PREEMPTION_MARGIN, QUEUED_REQUESTS_MAX, QueuedRequest, TaskLimits,
    USERS_MAX, UpDownRates,
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
pub use preemption::{PREEMPTION_SCAN_MAX, ResumeTarget, Victim, select_resumable, select_victims};
pub use rebalance::{GAIN_MARGIN, OWNER_ABSENCE_MIN, plan_rebalances};
pub use rebalance_plan::{
    COOLDOWN, IDLE_TARGET_COOLDOWN, REBALANCE_COOLDOWN, REBALANCES_MAX, REBALANCES_WINDOW,
    Rebalance, RebalanceReason,
};
pub use reserve::{RESERVATION_DELAY, hosts_to_reserve};

use sempa_proto::load::{GuestLimits, LoadSample};
use sempa_proto::{HostId, Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// Maximum age of a load sample. An older sample counts as missing.
pub const SAMPLE_AGE_MAX: Micros = Micros::from_secs(15);

/// Rule by which new tasks are distributed over hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum PlacementPolicy {
    /// Round robin in blocks, as in PVM. The load of the hosts is ignored.
    RoundRobin,
    /// Each task is placed on the host with the largest predicted processor share.
    #[default]
    Load,
    /// An external chooser selects the hosts, for example a batch system. If a spawn names its
    /// host, the chooser is not used.
    Chooser(ChooserName),
}

impl fmt::Display for PlacementPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::RoundRobin => f.write_str("round-robin"),
            Self::Load => f.write_str("load"),
            Self::Chooser(name) => write!(f, "choice:{}", name.as_str()),
        }
    }
}

/// Maximum number of excluded hosts that an explanation names. An explanation contains only the
/// number of the further hosts.
pub const NAMED_HOSTS_MAX: usize = 16;

/// Maximum number of other hosts of a job whose zones a decision takes into account.
const PEER_HOSTS_MAX: usize = 64;

/// Parameters for weighing the costs of decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Weight, in thousandths, of a processor share on a host outside the zones of the task's
    /// peers. A value below 1000 accounts for the longer time of messages between zones. Applies
    /// until a migration has measured the link between the zones.
    pub other_zone_weight_permille: u32,
    /// Minimum gain of a rebalancing migration, in percent of the migration's cost.
    pub margin_percent: u32,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            other_zone_weight_permille: 900,
            margin_percent: (GAIN_MARGIN * 100.0) as u32,
        }
    }
}

impl Costs {
    fn margin_ratio(self) -> f64 {
        f64::from(self.margin_percent) / 100.0
    }

    /// Returns the weight of a processor share, in thousandths, on a host whose link to the peers
    /// has the relative speed `speed` (1.0: as fast as a link within a zone). An unknown link
    /// counts as half as fast, which yields `other_zone_weight_permille`.
    fn link_weight_permille(self, speed: Option<f64>) -> u32 {
        let other_zone_reduction =
            f64::from(1000u32.saturating_sub(self.other_zone_weight_permille));
        1000 - (other_zone_reduction * 2.0 * (1.0 - speed.unwrap_or(0.5).clamp(0.0, 1.0)))
            .min(1000.0) as u32
    }
}

/// All input of the decisions.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Current time. All times and deadlines in the snapshot are on this monotonic clock.
    pub now: Micros,
    pub policy: PlacementPolicy,
    /// The last host used by round robin. The next placement starts with the host after this one.
    pub last_round_robin_host: HostId,
    pub costs: Costs,
    /// Values learned from earlier tasks and migrations.
    pub estimates: Estimates,
    /// Jobs whose tasks wait for each other at barriers. Each job is identified by the tid of its
    /// first task.
    pub barrier_jobs: BTreeSet<Tid>,
    /// All hosts, by ascending id.
    pub hosts: HostList,
}

/// State of one host, as input of the decisions.
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
    /// Memory in bytes that recent spawns have requested and that `sample` does not include yet.
    /// This memory counts as used.
    pub promised_bytes: u64,
    pub guest_policy: GuestPolicy,
    /// The newest obstacle to migrations to the host, for example a failure of its dump engine.
    /// Does not apply after the end of the obstacle. `None` if there was no obstacle.
    pub migration_obstacle: Option<Obstacle>,
    /// Number of tasks that are being started on the host. These tasks count as load.
    pub starting_task_count: u32,
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
    pub fn recent_sample(&self, now: Micros) -> Option<&TimedSample> {
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
    /// Number of tasks of the virtual machine on the host when the report arrived. The sample
    /// includes the load of these tasks.
    pub vm_task_count: u32,
}

/// State of a host with regard to its owner and to drains.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum OwnerState {
    /// No load watcher has reported.
    #[default]
    Unknown,
    /// The host is not in use.
    Absent {
        /// Time at which the last user left, on the snapshot's clock; `None` if no user was seen.
        left_at: Option<Micros>,
    },
    /// The host may be in use. Guests stay. If an idle user is logged in, new tasks are placed on
    /// other hosts first.
    PossiblyPresent {
        /// The load watcher's explanation.
        why: String,
        /// True if a user is logged in and idle. False if only external load suggests that the host
        /// is in use.
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
        requester: Tid,
    },
}

impl OwnerState {
    /// True if the host accepts no guests: it is in use, closed by its owner, or being drained.
    pub fn excludes_guests(&self) -> bool {
        matches!(
            self,
            Self::Present { .. } | Self::Closed { .. } | Self::Drained { .. }
        )
    }

    /// True if no idle user is logged in. A host with an idle login gets new tasks only if no other
    /// host has room. External load does not change the result, because decisions take it into
    /// account as load.
    fn is_unattended(&self) -> bool {
        !matches!(
            self,
            Self::PossiblyPresent {
                idle_login: true,
                ..
            }
        )
    }

    /// Returns the reason why the host accepts no guests; `None` if it accepts them.
    fn exclusion_reason(&self) -> Option<ExclusionReason<&str>> {
        match self {
            Self::Present { why } => Some(ExclusionReason::OwnerPresent { why }),
            Self::Closed { why } => Some(ExclusionReason::Closed { why }),
            Self::Drained { requester } => Some(ExclusionReason::Drained {
                requester: *requester,
            }),
            Self::Unknown | Self::Absent { .. } | Self::PossiblyPresent { .. } => None,
        }
    }
}

/// Time at which guests leave a host whose owner has stopped accepting guests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LeaveTime {
    #[default]
    Now,
    /// At this time on the snapshot's clock, unless the host accepts guests again earlier.
    At(Micros),
    /// Guests stay paused on the host until it accepts guests again.
    Never,
    /// The host's daemon terminates the guests; no migration is planned.
    Terminated,
}

/// Conditions under which the owner of a host accepts guests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GuestPolicy {
    pub leave_time: LeaveTime,
    /// True if the job of a guest that no other host accepts is vacated (checkpointed and ended).
    /// Otherwise the guest stays paused on the host.
    pub vacates_jobs: bool,
    /// Limits that apply while the owner accepts guests.
    pub limits: Arc<GuestLimits>,
}

impl GuestPolicy {
    /// Returns the reason if the owner excludes this program or this user; otherwise `None`.
    fn block_reason(&self, user: u32, program: &str) -> Option<ExclusionReason<&str>> {
        if self.limits.blocked_users.contains(&user) {
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

/// State of one task, as input of the decisions.
#[derive(Clone, Debug)]
pub struct TaskView {
    pub tid: Tid,
    /// True if the task serves its host or was not spawned. Such a task cannot migrate and is not a
    /// guest.
    pub pinned: bool,
    /// Set while the task is migrating. The inner value is the target; `None` if it is not known.
    pub migration: Option<Option<HostId>>,
    /// True while the task is suspended. A suspended task causes no load, and continues only after
    /// an explicit resume.
    pub suspended: bool,
    pub user: u32,
    /// First task of the job: a task that a user has started by hand or that has no parent.
    pub job: Tid,
    pub name: Arc<str>,
    /// Start time on the snapshot's clock. If the resource manager did not see the start, this is
    /// the time when it first saw the task.
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
    /// Obstacle that prevents any migration of the task for a while; `None` if there is none.
    pub migration_obstacle: Option<Obstacle>,
    /// Hosts that refuse the task for a while, each with the reason.
    pub target_obstacles: Vec<(HostId, Obstacle)>,
}

impl TaskView {
    /// True for a guest that is not migrating. Such a task must leave its host when the host stops
    /// accepting guests.
    pub fn is_evictable(&self) -> bool {
        !self.pinned && self.migration.is_none()
    }

    /// True if the task is part of its host's load: neither pinned nor suspended.
    pub fn computes(&self) -> bool {
        !self.pinned && !self.suspended
    }

    /// Creates a task of which only the id and the start time are known.
    pub fn new(tid: Tid, start_time: Micros) -> Self {
        Self {
            tid,
            pinned: false,
            migration: None,
            suspended: false,
            user: 0,
            job: tid,
            name: Arc::from(""),
            started_at: start_time,
            work_done: Micros::default(),
            memory_bytes: 0,
            host_named: false,
            constraints: None,
            recent_rebalances: Vec::new(),
            recent_migrations: Vec::new(),
            migration_obstacle: None,
            target_obstacles: Vec::new(),
        }
    }
}

impl Snapshot {
    /// Creates a snapshot of these hosts without learned values. The first round-robin placement
    /// starts with the host after the master's host.
    pub fn new(now: Micros, policy: PlacementPolicy, mut hosts: HostList) -> Self {
        hosts.refresh(now);
        let (costs, estimates, jobs_with_barriers) =
            (Costs::default(), Estimates::default(), BTreeSet::new());
        Self {
            now,
            policy,
            last_round_robin_host: HostId::MASTER,
            costs,
            estimates,
            barrier_jobs: jobs_with_barriers,
            hosts,
        }
    }

    pub fn host(&self, id: HostId) -> Option<&HostView> {
        self.hosts.position(id).map(|i| &self.hosts[i])
    }

    /// Returns the processor share of each task of the virtual machine on a host, in thousandths of
    /// an ordinary processor; 0 for an unknown host.
    pub fn task_rate(&self, id: HostId) -> f64 {
        self.hosts
            .index(self.now)
            .load(id)
            .map_or(0.0, |load| load.task_rate())
    }

    /// Returns the factor by which the two hosts of a migration are slower than an ordinary
    /// processor at present; see the function [`slowness`].
    pub fn slowness(&self, source: HostId, target: HostId) -> f64 {
        // An unknown host counts as an ordinary one.
        let rate = |id| {
            Some(self.task_rate(id))
                .filter(|rate| *rate > 0.0)
                .unwrap_or(1e3)
        };
        slowness(rate(source), rate(target))
    }

    /// Returns the expected cost of migrating this task between hosts with this [`slowness`].
    pub fn migration_cost(
        &self,
        task: &TaskView,
        source: &HostView,
        target: &HostView,
        slowness: f64,
    ) -> Micros {
        let bytes = self.estimates.expected_bytes(&task.name, task.memory_bytes);
        self.estimates
            .migration_cost(bytes, slowness, Some(HostPair::between(source, target)))
    }

    /// Returns the hosts with which a new task of this job will communicate: the host of the
    /// spawning task and the hosts of the job's tasks.
    pub fn peer_hosts(&self, caller_host: HostId, job: Tid) -> Vec<HostId> {
        let index = self.hosts.index(self.now);
        std::iter::once(caller_host)
            .chain(
                index
                    .job_hosts(job)
                    .filter(|id| *id != caller_host)
                    .take(PEER_HOSTS_MAX),
            )
            .collect()
    }

    /// Returns the zones of the hosts other than `source` that run tasks of the same job. Empty if
    /// no other host runs such tasks.
    fn peer_zones(&self, source: HostId, task: &TaskView) -> BTreeSet<u32> {
        let index = self.hosts.index(self.now);
        let other_hosts = index
            .job_hosts(task.job)
            .filter(|id| *id != source)
            .take(PEER_HOSTS_MAX);
        other_hosts.filter_map(|id| index.zone(id)).collect()
    }

    /// Returns the weight, in thousandths, of a processor share in `zone` for a task whose peers
    /// are in the zones `zones_of_peers`. The slower the link to the peers is, the lower is the
    /// weight.
    fn zone_weight_permille(&self, zone: u32, zones_of_peers: &BTreeSet<u32>) -> u32 {
        match zones_of_peers.is_empty() || zones_of_peers.contains(&zone) {
            true => 1000,
            false => self
                .costs
                .link_weight_permille(self.estimates.relative_speed(zone, zones_of_peers)),
        }
    }

    /// Returns the factor by which a computed gain is corrected. The factor is learned from earlier
    /// migrations. `declared`: the gain was computed from work that programs declared.
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
    fn describe_exclusions(&self, excluded_hosts: &Exclusions) -> String {
        let (reportable_hosts, unlisted_count) = excluded_hosts.reportable_entries();
        let (mut sentences, mut hosts_by_condition) =
            (Vec::new(), Vec::<(String, Vec<String>)>::new());
        for (id, why) in reportable_hosts.iter().take(NAMED_HOSTS_MAX) {
            let ExclusionReason::UnmetCondition {
                condition,
                actual: actual_value,
            } = why
            else {
                sentences.push(format!("{}: {why}", self.host_name(*id)));
                continue;
            };
            let (condition, host) = (
                condition.to_string(),
                format!("{} ({actual_value})", self.host_name(*id)),
            );
            match hosts_by_condition
                .iter_mut()
                .find(|(reportable_hosts, _)| *reportable_hosts == condition)
            {
                Some((_, hosts)) => hosts.push(host),
                None => hosts_by_condition.push((condition, vec![host])),
            }
        }
        sentences.extend(
            hosts_by_condition
                .into_iter()
                .map(|(condition, hosts)| format!("{condition} excludes {}", hosts.join(", "))),
        );
        let unlisted_count =
            reportable_hosts.len().saturating_sub(NAMED_HOSTS_MAX) + unlisted_count;
        sentences.extend((unlisted_count > 0).then(|| format!("and {unlisted_count} more")));
        sentences.join("; ")
    }
}
