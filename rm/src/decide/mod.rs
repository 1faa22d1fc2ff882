//! The decisions of the resource manager, as pure functions of a [`Snapshot`].
//!
//! - [`place()`]: on which hosts new tasks start.
//! - [`moves()`]: which tasks leave their host because of its owner or a drain.
//! - [`balance()`]: which tasks migrate for performance.
//! - [`Fair`]: which waiting request is served first.
//! - [`give_way()`]: which tasks are preempted.
//! - [`go_on()`]: which preempted tasks resume.
//!
//! Every decision, including a decision not to act, carries a typed reason.
//!
//! This module reads no clock and does not communicate. All state that a decision depends on
//! (refusals, recent migrations, the round-robin position) is part of the snapshot.

mod balance;
mod choice;
mod excluded;
mod fair;
mod farm;
mod gains;
mod guests;
mod hasten;
mod index;
mod links;
mod load;
mod moves;
mod place;
mod placing;
mod predict;
mod reason;
mod reserve;
mod share;
mod wants;

pub use balance::{
    MARGIN, OWNER_AWAY_MIN, REST, SHIFT_REST, SHIFT_REST_TO_EMPTY, SHIFTS_MAX, SHIFTS_SPAN, Shift,
    ShiftWhy, balance,
};
pub use choice::{CHOICE_NAME_MAX, Choice, ChoiceName, Choices, NoSuchChoice, Offer};
pub use excluded::{EXCLUDED_HOSTS_MAX, Excluded};
pub use fair::{Fair, GIVE_WAY_MARGIN, Limited, Limits, USERS_MAX, UpDown, WAITING_MAX, Waiting};
pub use gains::{Outcome, PROMISES_MAX, Promises, TRUST, TRUST_HALF};
pub use index::Hosts;
pub use links::{PAIRS_MAX, Way};
pub use load::{ForeignMean, Share, foreign_demand};
pub use moves::{
    MOVES_AT_ONCE_MAX, MoveDecision, Moves, SETTLE, Stay, StayReason, moves, room_ever, room_for,
};
pub use place::{
    Ask, EXPLAINED_HOSTS_MAX, Placement, SPAWN_TASKS_MAX, Why, left_out, place, place_by, used_but,
};
pub use predict::{Estimates, Journey, LEFT_MAX, Lessons, PROGRAMS_MAX, slowness};
pub use reason::Reason;
pub use reserve::{RESERVE_AFTER, reserve};
pub use share::{Again, GIVING_MAX, GivesWay, give_way, go_on};
pub use wants::{
    CONSTRAINTS_ENV, Condition, Figure, Has, Name, Op, Rank, Together, WANTS_BYTES_MAX, Wants,
    WantsError,
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
pub enum Policy {
    /// Round robin in blocks, as in PVM. The load of the hosts is ignored.
    RoundRobin,
    /// Each task is placed on the host with the largest predicted processor share.
    #[default]
    Load,
    /// An external chooser selects the hosts, for example a batch system. If a spawn names its
    /// host, the chooser is not used.
    Choice(ChoiceName),
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Policy::RoundRobin => f.write_str("round-robin"),
            Policy::Load => f.write_str("load"),
            Policy::Choice(name) => write!(f, "choice:{}", name.as_str()),
        }
    }
}

/// Maximum number of excluded hosts that an explanation names. It gives only the number of further
/// ones.
pub const TOLD_HOSTS_MAX: usize = 16;

/// Maximum number of peer hosts whose zones are considered.
const PEERS_MAX: usize = 64;

/// Parameters for weighing the costs of decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// Weight of a processor share, in thousandths, on a host outside the zones of the task's
    /// peers, because messages over such a link take longer. Applies until a migration has measured
    /// the link.
    pub far_permille: u32,
    /// Minimum gain of a rebalancing migration, in percent of the migration's cost.
    pub margin_percent: u32,
}

impl Default for Costs {
    fn default() -> Costs {
        Costs {
            far_permille: 900,
            margin_percent: (MARGIN * 100.0) as u32,
        }
    }
}

impl Costs {
    fn margin(self) -> f64 {
        f64::from(self.margin_percent) / 100.0
    }

    /// Returns the weight of a processor share, in thousandths, on a host whose link to the peers
    /// has the relative speed `speed` (1.0: as fast as the links among the peers). An unknown link
    /// counts as half as fast, which yields `far_permille`.
    fn behind(self, speed: Option<f64>) -> u32 {
        let less = f64::from(1000u32.saturating_sub(self.far_permille));
        1000 - (less * 2.0 * (1.0 - speed.unwrap_or(0.5).clamp(0.0, 1.0))).min(1000.0) as u32
    }
}

/// All input of the decisions.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// Current time. All times and deadlines in the snapshot are on this monotonic clock.
    pub now: Micros,
    pub policy: Policy,
    /// The last host used by round robin. The next placement starts with the host after it.
    pub rotation: HostId,
    pub costs: Costs,
    /// Values learned from earlier tasks and migrations.
    pub estimates: Estimates,
    /// Jobs whose tasks wait for each other at barriers, by the task at the top of the job.
    pub barriers: BTreeSet<Tid>,
    /// All hosts, by ascending id.
    pub hosts: Hosts,
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
    pub sample: Option<Sampled>,
    /// Mean processor demand of other software over some minutes; `None` if only the demand in
    /// `sample` is known.
    pub foreign_mean: Option<ForeignMean>,
    pub owner: Owner,
    /// Memory in bytes that recent spawns have requested and that `sample` does not include yet. It
    /// counts as used.
    pub promised: u64,
    pub terms: Terms,
    /// Why the host accepts no migrations at present, and until when. Set, for example, after its
    /// dump engine has failed.
    pub no_moves: Option<Until>,
    /// Number of tasks that are being started on the host. They count as load.
    pub starting: u32,
    pub tasks: Vec<TaskView>,
}

impl HostView {
    /// Returns the available memory in bytes, minus the promised memory. `None` without a sample.
    pub fn available_bytes(&self) -> Option<u64> {
        self.sample
            .as_ref()
            .map(|s| s.sample.available_bytes.saturating_sub(self.promised))
    }

    /// Returns the sample if it is at most [`SAMPLE_AGE_MAX`] old.
    pub fn fresh_sample(&self, now: Micros) -> Option<&Sampled> {
        self.sample
            .as_ref()
            .filter(|s| now.since(s.at) <= SAMPLE_AGE_MAX)
    }
}

/// A load sample with its arrival time.
#[derive(Clone, Debug)]
pub struct Sampled {
    pub sample: LoadSample,
    /// Arrival time of the report, on the snapshot's clock.
    pub at: Micros,
    /// Number of tasks of the virtual machine on the host at that time. The sample includes their
    /// load.
    pub own: u32,
}

/// State of a host's owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Owner {
    /// No load watcher has reported.
    #[default]
    Unknown,
    /// The host is not in use.
    Absent {
        /// When the last user left, on the snapshot's clock; `None` if no user was seen.
        left: Option<Micros>,
    },
    /// The host may be in use. Guests stay. If a login is idle, new tasks are placed on other hosts
    /// first.
    Maybe {
        /// The load watcher's explanation.
        why: String,
        /// True if a user is logged in and idle. Otherwise, external load suggests that the host is
        /// in use.
        idle: bool,
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

impl Owner {
    /// True if the host accepts no guests: it is in use, closed by its owner, or being drained.
    pub fn is_present(&self) -> bool {
        matches!(
            self,
            Owner::Present { .. } | Owner::Closed { .. } | Owner::Drained { .. }
        )
    }

    /// False if a user is logged in and idle. Such a host gets new tasks only if no other host has
    /// room. External load does not matter, because decisions weigh it as load.
    fn is_calm(&self) -> bool {
        !matches!(self, Owner::Maybe { idle: true, .. })
    }

    /// Returns the reason why the host accepts no guests; `None` if it accepts them.
    fn keeps_out(&self) -> Option<Reason<&str>> {
        match self {
            Owner::Present { why } => Some(Reason::Owner { why }),
            Owner::Closed { why } => Some(Reason::Closed { why }),
            Owner::Drained { by } => Some(Reason::Drained { by: *by }),
            Owner::Unknown | Owner::Absent { .. } | Owner::Maybe { .. } => None,
        }
    }
}

/// When guests leave a host after its owner stops accepting them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leaving {
    #[default]
    Now,
    /// At this time on the snapshot's clock, unless guests are accepted again before.
    At(Micros),
    /// Guests stay paused on the host until they are accepted again.
    Never,
    /// The host's daemon terminates the guests; no migration is planned.
    Ended,
}

/// Conditions under which the owner of a host accepts guests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    pub leaving: Leaving,
    /// True if a guest that no other host accepts has its job vacated (checkpointed and ended).
    /// Otherwise the guest stays paused on the host.
    pub parks: bool,
    /// Limits on guests while they are accepted.
    pub limits: Arc<GuestLimits>,
}

impl Terms {
    /// Returns the reason if the owner excludes this program or this user.
    fn blocks(&self, user: u32, program: &str) -> Option<Reason<&str>> {
        if self.limits.users.contains(&user) {
            return Some(Reason::User { user });
        }
        self.limits
            .blocking_pattern(program)
            .map(|pattern| Reason::Program { pattern })
    }
}

/// A temporary obstacle and its reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Until {
    /// End of the obstacle, on the snapshot's clock.
    pub at: Micros,
    pub why: String,
}

/// State of one task as decisions see it.
#[derive(Clone, Debug)]
pub struct TaskView {
    pub tid: Tid,
    /// The task serves its host or was not spawned: it cannot migrate and is not a guest.
    pub pinned: bool,
    /// Set while the task migrates. The inner value is the target, if it is known.
    pub moving: Option<Option<HostId>>,
    /// True while the task is suspended. It causes no load, and only an explicit resume continues
    /// it.
    pub suspended: bool,
    pub user: u32,
    /// Task at the top of the job: one that was started by hand or has no parent.
    pub job: Tid,
    pub name: Arc<str>,
    /// Start time on the snapshot's clock. If the resource manager did not see the start, the time
    /// when it first saw the task.
    pub since: Micros,
    /// Estimated work done so far, as time on an ordinary processor.
    pub done: Micros,
    /// Memory at the last migration, in bytes; 0 if the task has never migrated.
    pub bytes: u64,
    /// True if a user or program chose the host by name, at the spawn or later. Such a task is not
    /// rebalanced.
    pub named: bool,
    /// Constraints of the task's spawn.
    pub wants: Option<Arc<Wants>>,
    /// Times of rebalancing migrations in the last hour, oldest first.
    pub shifts: Vec<Micros>,
    /// Times of the newest migrations for any cause, oldest first. A cooldown after each of them
    /// delays the next rebalancing migration.
    pub moves: Vec<Micros>,
    /// Obstacle that prevents any migration of the task for a while.
    pub held: Option<Until>,
    /// Hosts that refuse the task for a while, with the reason.
    pub refused: Vec<(HostId, Until)>,
}

impl TaskView {
    /// True for a guest that is not migrating. Such a task must leave its host when the host stops
    /// accepting guests.
    pub fn is_settled_guest(&self) -> bool {
        !self.pinned && self.moving.is_none()
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
            moving: None,
            suspended: false,
            user: 0,
            job: tid,
            name: Arc::from(""),
            since,
            done: Micros::default(),
            bytes: 0,
            named: false,
            wants: None,
            shifts: Vec::new(),
            moves: Vec::new(),
            held: None,
            refused: Vec::new(),
        }
    }
}

impl Snapshot {
    /// Creates a snapshot of these hosts without learned values. Round robin starts after the
    /// master's host.
    pub fn new(now: Micros, policy: Policy, mut hosts: Hosts) -> Snapshot {
        hosts.refresh(now);
        let (costs, estimates, barriers) =
            (Costs::default(), Estimates::default(), BTreeSet::new());
        Snapshot {
            now,
            policy,
            rotation: HostId::MASTER,
            costs,
            estimates,
            barriers,
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
    pub fn cost(&self, task: &TaskView, from: &HostView, to: &HostView, slowness: f64) -> Micros {
        let bytes = self.estimates.bytes(&task.name, task.bytes);
        self.estimates
            .cost(bytes, slowness, Some(Way::between(from, to)))
    }

    /// Returns the hosts that a new task of this job will communicate with: the host of the
    /// spawning task and the hosts of the job's tasks.
    pub fn peers_of(&self, caller: HostId, job: Tid) -> Vec<HostId> {
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
    fn zones_of_peers(&self, from: HostId, task: &TaskView) -> BTreeSet<u32> {
        let index = self.hosts.index(self.now);
        let others = index
            .hosts_of(task.job)
            .filter(|id| *id != from)
            .take(PEERS_MAX);
        others.filter_map(|id| index.zone(id)).collect()
    }

    /// Returns the weight, in thousandths, of a processor share in `zone` for a task whose peers
    /// are in the zones `peers`. The weight is lower if the link to the peers is slower.
    fn permille(&self, zone: u32, peers: &BTreeSet<u32>) -> u32 {
        match peers.is_empty() || peers.contains(&zone) {
            true => 1000,
            false => self.costs.behind(self.estimates.beside_within(zone, peers)),
        }
    }

    /// Returns the factor by which a computed gain is corrected, learned from earlier migrations.
    /// `told`: the gain was computed from work that programs declared.
    fn trust(&self, told: bool) -> f64 {
        self.estimates.trust(self.now, told)
    }

    /// Returns the host's name, or its number if the host is unknown.
    pub fn name(&self, id: HostId) -> String {
        self.host(id)
            .map_or_else(|| id.to_string(), |h| h.name.clone())
    }

    /// Formats exclusions, for example "h1: reason; h2: reason; memory >= 2G excludes h3 (1.0G), h4
    /// (512.0M); and 7 more".
    fn tell(&self, excluded: &Excluded) -> String {
        let (told, more) = excluded.told();
        let (mut parts, mut unmet) = (Vec::new(), Vec::<(String, Vec<String>)>::new());
        for (id, why) in told.iter().take(TOLD_HOSTS_MAX) {
            let Reason::Unmet { condition, has } = why else {
                parts.push(format!("{}: {why}", self.name(*id)));
                continue;
            };
            let (condition, host) = (condition.to_string(), format!("{} ({has})", self.name(*id)));
            match unmet.iter_mut().find(|(told, _)| *told == condition) {
                Some((_, hosts)) => hosts.push(host),
                None => unmet.push((condition, vec![host])),
            }
        }
        parts.extend(
            unmet
                .into_iter()
                .map(|(condition, hosts)| format!("{condition} excludes {}", hosts.join(", "))),
        );
        let more = told.len().saturating_sub(TOLD_HOSTS_MAX) + more;
        parts.extend((more > 0).then(|| format!("and {more} more")));
        parts.join("; ")
    }
}
