//! What is to be done, as pure functions of a [`Snapshot`]: where new tasks go ([`place()`]), which tasks leave their host
//! because of its owner ([`moves()`]) or for the sake of the load ([`balance()`]), whose turn it is ([`Fair`]), and who stands
//! still meanwhile ([`give_way()`], [`go_on()`]). Every
//! decision, and every decision not to act, carries a typed reason.
//!
//! Nothing here reads a clock, talks to the virtual machine or remembers anything: what has to be remembered (refusals,
//! recent moves, where the rotation stands) is in the snapshot.

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
    Condition, Figure, Has, Name, Op, Rank, Together, WANTS_BYTES_MAX, WANTS_ENV, Wants, WantsError,
};

use sempa_proto::load::{GuestLimits, LoadSample};
use sempa_proto::{HostId, Micros, Tid};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

/// A load sample older than this says nothing about now.
pub const SAMPLE_AGE_MAX: Micros = Micros::from_secs(15);

/// How new tasks are spread over hosts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Policy {
    /// In turn, in blocks, as PVM does; load does not count.
    RoundRobin,
    /// Where the predicted share of a processor is largest.
    #[default]
    Load,
    /// Where somebody else says, a batch system for example; hosts that a spawn names are used as ever.
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

/// Hosts that a sentence names as not used; of the others it gives the number.
pub const TOLD_HOSTS_MAX: usize = 16;

/// Hosts of a job whose zones count for where its tasks go.
const PEERS_MAX: usize = 64;

/// What things cost, for decisions to weigh.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// What a share of a processor counts, in thousandths, on a host in another zone than the task's peers, as long as no move
    /// has shown how fast the link is: messages take longer from there.
    pub far_permille: u32,
    /// What a move for the sake of the load must save, in percent of what it costs.
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

    /// What it counts behind a link so many times as fast as those among the peers, as far as that is known. One half as fast is
    /// what an unknown one is taken for.
    fn behind(self, speed: Option<f64>) -> u32 {
        let less = f64::from(1000u32.saturating_sub(self.far_permille));
        1000 - (less * 2.0 * (1.0 - speed.unwrap_or(0.5).clamp(0.0, 1.0))).min(1000.0) as u32
    }
}

/// All that decisions are made from.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The present, on the clock that all spans and deadlines in here use (it never jumps).
    pub now: Micros,
    /// How new tasks are spread.
    pub policy: Policy,
    /// The host that the last spawn in turn ended with; the next one begins behind it.
    pub rotation: HostId,
    /// What things cost.
    pub costs: Costs,
    /// What was learned of tasks and moves.
    pub estimates: Estimates,
    /// Jobs whose tasks wait for each other, by the task at their top.
    pub barriers: BTreeSet<Tid>,
    /// The hosts by rising id.
    pub hosts: Hosts,
}

/// One host.
#[derive(Clone, Debug)]
pub struct HostView {
    /// Its index.
    pub id: HostId,
    /// Its name in the host table.
    pub name: String,
    /// Its architecture.
    pub arch: String,
    /// Hosts of one zone reach each other over fast links.
    pub zone: u32,
    /// What the administrator says of it, for requirements.
    pub labels: Arc<BTreeMap<String, String>>,
    /// Relative speed, 1000 for an ordinary host.
    pub speed: i32,
    /// Processors as last heard, 1 when never heard.
    pub cores: u32,
    /// The newest sample, however old; `None` when there was never one.
    pub sample: Option<Sampled>,
    /// Demand for its processors that is not ours, over some minutes. `None`: as in the sample.
    pub foreign_mean: Option<ForeignMean>,
    /// What is known of its owner.
    pub owner: Owner,
    /// Bytes of memory that spawns have asked for since the sample's were read: they are as good as taken.
    pub promised: u64,
    /// What the owner lets guests do.
    pub terms: Terms,
    /// Why moves to it make no sense at present (its dump engine does not work), and until when.
    pub no_moves: Option<Until>,
    /// Tasks that are being started on it: they are load already.
    pub starting: u32,
    /// The tasks on it.
    pub tasks: Vec<TaskView>,
}

impl HostView {
    /// Memory that can still be had, as far as anybody knows.
    pub fn available_bytes(&self) -> Option<u64> {
        self.sample
            .as_ref()
            .map(|s| s.sample.available_bytes.saturating_sub(self.promised))
    }

    /// The sample, if it is not older than [`SAMPLE_AGE_MAX`].
    pub fn fresh_sample(&self, now: Micros) -> Option<&Sampled> {
        self.sample
            .as_ref()
            .filter(|s| now.since(s.at) <= SAMPLE_AGE_MAX)
    }
}

/// A sample and when it came.
#[derive(Clone, Debug)]
pub struct Sampled {
    /// The numbers.
    pub sample: LoadSample,
    /// When the report arrived, on the snapshot's clock.
    pub at: Micros,
    /// Tasks of ours that were on the host then; they are part of the numbers.
    pub own: u32,
}

/// What is known of a host's owner.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Owner {
    /// No watcher has reported.
    #[default]
    Unknown,
    /// Nobody uses the machine.
    Absent {
        /// When the last one left, on the snapshot's clock; `None` when nobody was seen.
        left: Option<Micros>,
    },
    /// Somebody may: guests stay, new ones go elsewhere first.
    Maybe {
        /// The watcher's sentence.
        why: String,
        /// Somebody is logged in, and idle; otherwise there is load that is not ours.
        idle: bool,
    },
    /// Somebody does.
    Present {
        /// The watcher's sentence.
        why: String,
    },
    /// Guests are not wanted at present, whoever uses the machine.
    Closed {
        /// The watcher's sentence.
        why: String,
    },
    /// Nobody who uses it sends guests away, but somebody has it emptied.
    Drained {
        /// Who asked for it.
        by: Tid,
    },
}

impl Owner {
    /// True when guests are not wanted: somebody uses the machine, its owner wants none at this time, or it is emptied.
    pub fn is_present(&self) -> bool {
        matches!(
            self,
            Owner::Present { .. } | Owner::Closed { .. } | Owner::Drained { .. }
        )
    }

    /// False where somebody is logged in and idle: new tasks go there only when there is no other place. Load that is not ours
    /// is weighed as load.
    fn is_calm(&self) -> bool {
        !matches!(self, Owner::Maybe { idle: true, .. })
    }

    /// Why the host is not used, if guests are not wanted there.
    fn keeps_out(&self) -> Option<Reason<&str>> {
        match self {
            Owner::Present { why } => Some(Reason::Owner { why }),
            Owner::Closed { why } => Some(Reason::Closed { why }),
            Owner::Drained { by } => Some(Reason::Drained { by: *by }),
            Owner::Unknown | Owner::Absent { .. } | Owner::Maybe { .. } => None,
        }
    }
}

/// When guests leave a host whose owner does not want them any more.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Leaving {
    /// At once.
    #[default]
    Now,
    /// Then, on the snapshot's clock, if they are still not wanted.
    At(Micros),
    /// They wait there until they are wanted again.
    Never,
    /// Their daemon ends them.
    Ended,
}

/// What the owner of a host lets guests do.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Terms {
    /// When they leave if they are not wanted.
    pub leaving: Leaving,
    /// The job of one that no other host takes is parked; else it stands still here.
    pub parks: bool,
    /// What they may have while they are welcome.
    pub limits: Arc<GuestLimits>,
}

impl Terms {
    /// Why the owner does not have this program of this user on the host.
    fn blocks(&self, user: u32, program: &str) -> Option<Reason<&str>> {
        if self.limits.users.contains(&user) {
            return Some(Reason::User { user });
        }
        self.limits
            .blocked(program)
            .map(|pattern| Reason::Program { pattern })
    }
}

/// A reason that holds for some time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Until {
    /// When it ends, on the snapshot's clock.
    pub at: Micros,
    /// The reason.
    pub why: String,
}

/// One task.
#[derive(Clone, Debug)]
pub struct TaskView {
    /// Its id.
    pub tid: Tid,
    /// It belongs to its host, or nobody here is its parent: it cannot move, and it is no guest.
    pub pinned: bool,
    /// It is on its way; the target if it is known.
    pub moving: Option<Option<HostId>>,
    /// It stands still until somebody lets it go on, and is no load.
    pub suspended: bool,
    /// Its user.
    pub user: u32,
    /// The task at the top of its job: the one that somebody started by hand, or that has no parent.
    pub job: Tid,
    /// Its program.
    pub name: Arc<str>,
    /// Since when it runs, on the snapshot's clock; for a task that was there before the resource manager, since then.
    pub since: Micros,
    /// The work that it has done, as far as can be told: time of an ordinary processor.
    pub done: Micros,
    /// Bytes of its memory when it was moved last; 0 when it was never moved.
    pub bytes: u64,
    /// Somebody chose its host by name, when it was started or later: it is not moved for the sake of the load.
    pub named: bool,
    /// What its spawn required.
    pub wants: Option<Arc<Wants>>,
    /// When it was moved for the sake of the load within the last hour, oldest first.
    pub shifts: Vec<Micros>,
    /// Its newest moves, oldest first: it rests from them before it is moved for the sake of the load.
    pub moves: Vec<Micros>,
    /// Why it cannot move anywhere for a while.
    pub held: Option<Until>,
    /// Targets that will not have it for a while.
    pub refused: Vec<(HostId, Until)>,
}

impl TaskView {
    /// True for a task that must leave when the owner of its host comes, and that is not on its way yet.
    pub fn is_settled_guest(&self) -> bool {
        !self.pinned && self.moving.is_none()
    }

    /// True for one that computes here: a part of its host's load, with work to do.
    pub fn computes(&self) -> bool {
        !self.pinned && !self.suspended
    }

    /// A task of which nothing is known but that it runs since then.
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
    /// Of these hosts, with nothing learned and the rotation of round robin at its beginning.
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

    /// The host with this index.
    pub fn host(&self, id: HostId) -> Option<&HostView> {
        self.hosts.position(id).map(|i| &self.hosts[i])
    }

    /// What each of our tasks on a host gets now, in thousandths of an ordinary processor.
    pub fn rate(&self, id: HostId) -> f64 {
        self.hosts
            .index(self.now)
            .load(id)
            .map_or(0.0, |load| load.rate())
    }

    /// How slow the hosts of a move are for its own work, as they are now.
    pub fn slowness(&self, from: HostId, to: HostId) -> f64 {
        // A host of which nothing is known counts as an ordinary one.
        let rate = |id| {
            Some(self.rate(id))
                .filter(|rate| *rate > 0.0)
                .unwrap_or(1e3)
        };
        slowness(rate(from), rate(to))
    }

    /// What a move costs this task between these hosts, of that [`slowness`].
    pub fn cost(&self, task: &TaskView, from: &HostView, to: &HostView, slowness: f64) -> Micros {
        let bytes = self.estimates.bytes(&task.name, task.bytes);
        self.estimates
            .cost(bytes, slowness, Some(Way::between(from, to)))
    }

    /// The hosts of those with whom a task of this job will talk: whoever spawns it, and the tasks that the job has.
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

    /// The zones of those with whom a task talks: the tasks of its job on other hosts. Empty for one that is alone there.
    fn zones_of_peers(&self, from: HostId, task: &TaskView) -> BTreeSet<u32> {
        let index = self.hosts.index(self.now);
        let others = index
            .hosts_of(task.job)
            .filter(|id| *id != from)
            .take(PEERS_MAX);
        others.filter_map(|id| index.zone(id)).collect()
    }

    /// What a share of a processor counts, in thousandths, in a zone for a task whose peers are in these: less behind a link that
    /// is slower than theirs.
    fn permille(&self, zone: u32, peers: &BTreeSet<u32>) -> u32 {
        match peers.is_empty() || peers.contains(&zone) {
            true => 1000,
            false => self.costs.behind(self.estimates.beside_within(zone, peers)),
        }
    }

    /// What a reckoned gain is worth; `told`: it rests on what programs have told of their work.
    fn trust(&self, told: bool) -> f64 {
        self.estimates.trust(self.now, told)
    }

    /// Name of a host, or its number when it is not known.
    pub fn name(&self, id: HostId) -> String {
        self.host(id)
            .map_or_else(|| id.to_string(), |h| h.name.clone())
    }

    /// "h1: reason; h2: reason; memory >= 2G excludes h3 (1.0G), h4 (512.0M); and 7 more".
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
