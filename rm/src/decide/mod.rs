//! Decides what to do, as pure functions of a [`Snapshot`].
//!
//! - [`place()`]: on which hosts new tasks start.
//! - [`moves()`]: which tasks leave their host because of its owner or a drain.
//! - [`balance()`]: which tasks migrate for performance.
//! - [`Fair`]: which waiting request is served first.
//! - [`give_way()`], [`go_on()`]: which tasks are preempted, and which of them resume.
//!
//! Every decision, including a decision not to act, carries a typed reason.
//!
//! Nothing here reads a clock or communicates. The state that a decision depends on (refusals,
//! recent migrations, the round-robin position) is part of the snapshot.

mod rebalance;
mod chooser;
mod exclusions;
mod fair;
mod makespan_sim;
mod prediction_feedback;
mod guest_classes;
mod makespan_moves;
mod index;
mod link_speeds;
mod load;
mod evictions;
mod placement;
mod placement_run;
mod predict;
mod exclusion_reason;
mod reserve;
mod preemption;
mod constraints;

pub use rebalance::{
    GAIN_MARGIN, OWNER_AWAY_MIN, COOLDOWN, REBALANCE_COOLDOWN, IDLE_TARGET_COOLDOWN, REBALANCES_MAX, REBALANCES_WINDOW, Rebalance,
    RebalanceReason, plan_rebalances,
};
pub use chooser::{CHOOSER_NAME_MAX, Chooser, ChooserName, Choosers, UnknownChooser, HostOffer};
pub use exclusions::{EXCLUDED_HOSTS_MAX, Exclusions};
pub use fair::{FairShare, PREEMPTION_MARGIN, LimitError, Limits, USERS_MAX, UpDownRates, WAITING_MAX, QueuedRequest};
pub use prediction_feedback::{PredictionOutcome, PENDING_PREDICTIONS_MAX, PendingPredictions, CONFIDENCE_RANGE, CONFIDENCE_HALF_LIFE};
pub use index::HostList;
pub use link_speeds::{PAIRS_MAX, HostPair};
pub use load::{ExternalMean, ProcessorShare, external_demand};
pub use evictions::{
    CONCURRENT_MIGRATIONS_MAX, Eviction, EvictionPlan, OWNER_RETURN_WINDOW, StayDecision, StayReason, plan_evictions, could_ever_fit, assign_hosts,
};
pub use placement::{
    PlacementRequest, EXPLAINED_HOSTS_MAX, Placement, SPAWN_TASKS_MAX, PlacementReason, general_exclusion, place, place_with_chooser, host_restrictions,
};
pub use predict::{Estimates, MigrationSample, WORK_LEFT_MAX, LearnedCosts, PROGRAMS_MAX, slowness};
pub use exclusion_reason::ExclusionReason;
pub use reserve::{RESERVE_AFTER, hosts_to_reserve};
pub use preemption::{ResumeAt, PREEMPTION_SCAN_MAX, Victim, select_victims, select_resumable};
pub use constraints::{
    CONSTRAINTS_ENV, Condition, Metric, ActualValue, Attribute, Operator, Rank, Colocation, CONSTRAINTS_BYTES_MAX, Constraints,
    ConstraintsError,
};

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
    /// Round robin in blocks, as in PVM; load does not count.
    RoundRobin,
    /// The host with the largest predicted processor share.
    #[default]
    Load,
    /// An external chooser selects the hosts, for example a batch system. Hosts that a spawn names
    /// are used as they are.
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

/// Maximum number of excluded hosts that one sentence names; further ones are counted.
pub const NAMED_HOSTS_MAX: usize = 16;

/// Maximum number of peer hosts whose zones are considered.
const PEERS_MAX: usize = 64;

/// Costs that decisions weigh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Weight of a processor share, in thousandths, on a host outside the zones of the task's
    /// peers, because messages from there take longer. Used until a migration has measured the
    /// link.
    pub other_zone_permille: u32,
    /// Minimum gain of a rebalancing migration, in percent of its cost.
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

    /// Returns the weight of a processor share, in thousandths, behind a link with relative speed
    /// `speed` (1.0: as fast as the links among the peers). An unknown link counts as half as fast,
    /// which yields `far_permille`.
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
    /// Host at which the last round-robin spawn ended; the next one starts after it.
    pub round_robin_last: HostId,
    pub costs: Costs,
    /// Values learned from earlier tasks and migrations.
    pub estimates: Estimates,
    /// Jobs whose tasks wait for each other at barriers, by the task at the top of the job.
    pub barrier_jobs: BTreeSet<Tid>,
    /// Sorted by ascending id.
    pub hosts: HostList,
}

/// State of one host as decisions see it.
#[derive(Clone, Debug)]
pub struct HostView {
    pub id: HostId,
    pub name: String,
    pub arch: String,
    /// Hosts of one zone are connected by fast links.
    pub zone: u32,
    /// Labels that the administrator gave the host, for constraints.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Relative speed; 1000 is an ordinary host.
    pub speed: i32,
    /// Processors in the last report; 1 if there was none.
    pub cores: u32,
    /// Newest sample regardless of its age; `None` before the first report.
    pub sample: Option<TimedSample>,
    /// Mean processor demand of other software over some minutes. `None`: the sample's value
    /// counts.
    pub external_mean: Option<ExternalMean>,
    pub owner: OwnerState,
    /// Bytes of memory that recent spawns asked for and the sample does not show yet. They count as
    /// used.
    pub promised_bytes: u64,
    pub guest_policy: GuestPolicy,
    /// Why the host accepts no migrations at present (for example, its dump engine fails), and
    /// until when.
    pub migration_obstacle: Option<Obstacle>,
    /// Tasks that are being started on the host; they count as load.
    pub starting_tasks: u32,
    pub tasks: Vec<TaskView>,
}

impl HostView {
    /// Returns the available memory in bytes, less what is promised. `None` without a sample.
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
    /// Tasks of the virtual machine on the host at that time; the sample includes their load.
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
    /// The host may be in use: guests stay. With an idle login, new tasks go to other hosts first.
    PossiblyPresent {
        /// The load watcher's explanation.
        why: String,
        /// A user is logged in and idle. Otherwise the evidence is external load.
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
    /// The host is being drained; its owner alone would accept guests.
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

    /// False if a user is logged in and idle: such a host gets new tasks only if no other host has
    /// room. External load does not matter here; it is weighed as load.
    fn is_unattended(&self) -> bool {
        !matches!(self, OwnerState::PossiblyPresent { idle_login: true, .. })
    }

    /// Returns why the host is excluded, if it accepts no guests.
    fn exclusion_reason(&self) -> Option<ExclusionReason<&str>> {
        match self {
            OwnerState::Present { why } => Some(ExclusionReason::OwnerPresent { why }),
            OwnerState::Closed { why } => Some(ExclusionReason::Closed { why }),
            OwnerState::Drained { by } => Some(ExclusionReason::Drained { by: *by }),
            OwnerState::Unknown | OwnerState::Absent { .. } | OwnerState::PossiblyPresent { .. } => None,
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
    /// If no other host takes a guest, its job is vacated (checkpointed and ended). Otherwise the
    /// guest stays paused on the host.
    pub vacates_jobs: bool,
    /// Limits on guests while they are accepted.
    pub limits: Arc<GuestLimits>,
}

impl GuestPolicy {
    /// Returns why the owner excludes this program or this user, if so.
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
    /// Set while the task migrates; the inner value is the target, if known.
    pub migrating: Option<Option<HostId>>,
    /// The task is suspended until an explicit resume, and is no load.
    pub suspended: bool,
    pub user: u32,
    /// Task at the top of the job: one that was started by hand or has no parent.
    pub job: Tid,
    pub name: Arc<str>,
    /// Start time on the snapshot's clock. For a task that the resource manager found running, the
    /// time when it first saw the task.
    pub started_at: Micros,
    /// Estimated work done so far, in time of an ordinary processor.
    pub work_done: Micros,
    /// Memory at the last migration, in bytes; 0 if the task has never migrated.
    pub memory_bytes: u64,
    /// The host was chosen by name, at the spawn or later: the task is not rebalanced.
    pub host_named: bool,
    /// Constraints of the task's spawn.
    pub constraints: Option<Arc<Constraints>>,
    /// Times of rebalancing migrations in the last hour, oldest first.
    pub recent_rebalances: Vec<Micros>,
    /// Times of the newest migrations, oldest first. After each, a cooldown applies before the task
    /// is rebalanced.
    pub recent_migrations: Vec<Micros>,
    /// Why the task cannot migrate to any host for a while.
    pub obstacle: Option<Obstacle>,
    /// Hosts that refuse the task for a while.
    pub refused_by: Vec<(HostId, Obstacle)>,
}

impl TaskView {
    /// True for a guest that is not migrating. It must leave when its host stops accepting guests.
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
    /// Creates a snapshot of these hosts with nothing learned; round robin starts after the master.
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

    /// Returns what each task of the virtual machine gets on a host, in thousandths of an ordinary
    /// processor.
    pub fn rate(&self, id: HostId) -> f64 {
        self.hosts
            .index(self.now)
            .load(id)
            .map_or(0.0, |load| load.rate())
    }

    /// Returns the current [`slowness`] of two hosts for the work of a migration between them.
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
    pub fn migration_cost(&self, task: &TaskView, from: &HostView, to: &HostView, slowness: f64) -> Micros {
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

    /// Returns the zones of the other hosts on which the task's job runs; empty if there are none.
    fn peer_zones(&self, from: HostId, task: &TaskView) -> BTreeSet<u32> {
        let index = self.hosts.index(self.now);
        let others = index
            .hosts_of(task.job)
            .filter(|id| *id != from)
            .take(PEERS_MAX);
        others.filter_map(|id| index.zone(id)).collect()
    }

    /// Returns the weight of a processor share in `zone`, in thousandths, for a task with peers in
    /// the zones `peers`. A share behind a slower link counts less.
    fn zone_weight_permille(&self, zone: u32, peers: &BTreeSet<u32>) -> u32 {
        match peers.is_empty() || peers.contains(&zone) {
            true => 1000,
            false => self.costs.link_weight_permille(self.estimates.relative_speed(zone, peers)),
        }
    }

    /// Returns the factor that corrects a computed gain by experience. `told`: the gain rests on
    /// work that programs declared.
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
            let (condition, host) = (condition.to_string(), format!("{} ({has})", self.host_name(*id)));
            match unmet.iter_mut().find(|(reportable, _)| *reportable == condition) {
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
