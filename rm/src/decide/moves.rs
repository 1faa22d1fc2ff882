//! Decides which tasks leave their host because its owner is present or accepts no guests at this
//! time. They leave when the owner's terms say so. Guests of a host that is being drained leave
//! immediately.
//!
//! - A task does not return when the owner leaves, and hosts that accept guests are never
//!   disturbed.
//! - A task leaves each time an owner comes, however often it has migrated before: as long as it
//!   stays, it is only paused.
//! - To avoid migrations back and forth, hosts whose owner has just left are the last choice
//!   ([`SETTLE`]).

use super::excluded::Excluding;
use super::guests::Guest;
use super::load::{Load, Loads, full};
use super::{Excluded, HostView, Leaving, Owner, Reason, Snapshot, TaskView};
use sempa_proto::migration::MigrationCause;
use sempa_proto::{HostId, Micros, Tid};
use std::fmt;

/// Maximum number of concurrent migrations in the virtual machine; further ones wait. Lower than
/// the master's limit, so that a request of a user finds room.
pub const MOVES_AT_ONCE_MAX: usize = 48;
/// A host whose owner left less than this ago is the last choice as a target, because the owner may
/// return.
pub const SETTLE: Micros = Micros::from_secs(10);

/// Obstacles that end within this time do not vacate a job.
const PATIENCE: Micros = Micros::from_secs(5);
/// Obstacles that end within this time are not logged.
const MOMENT: Micros = Micros::from_secs(1);

/// Decision to migrate one task.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveDecision {
    pub tid: Tid,
    pub from: HostId,
    pub to: HostId,
    /// Why the task must leave, for the event log.
    pub cause: MigrationCause,
    /// Why the target was chosen, in one sentence.
    pub why: String,
}

/// Why a guest stays although its host accepts no guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StayReason {
    /// No other host accepts the guest.
    NoHost {
        /// The other hosts with the reason for each.
        excluded: Excluded,
    },
    /// The guest cannot migrate to any host for a while.
    Held { why: String },
    /// [`MOVES_AT_ONCE_MAX`] migrations are running; the guest waits.
    Turn,
    /// The owner grants guests some time before they leave.
    Grace,
    /// The owner lets guests stay paused until the host accepts guests again.
    Waits,
    /// The host's daemon terminates the guests.
    Ended,
}

/// A guest that stays although its host accepts no guests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stay {
    pub tid: Tid,
    pub host: HostId,
    pub why: StayReason,
    /// When to decide again if nothing changes before, on the snapshot's clock.
    pub again: Option<Micros>,
}

impl fmt::Display for StayReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StayReason::NoHost { .. } => f.write_str("no host accepts it"),
            StayReason::Held { why } => f.write_str(why),
            StayReason::Turn => write!(f, "{MOVES_AT_ONCE_MAX} migrations are in progress"),
            StayReason::Grace => f.write_str("its owner grants it some time"),
            StayReason::Waits => {
                f.write_str("its owner lets it stay paused until guests are accepted again")
            }
            StayReason::Ended => f.write_str("its owner has it terminated there"),
        }
    }
}

impl Stay {
    /// False for reasons that are not logged because they end soon.
    pub fn is_news(&self, now: Micros) -> bool {
        match self.why {
            StayReason::Turn | StayReason::Grace | StayReason::Ended => false,
            StayReason::Held { .. } => self.again.is_none_or(|again| again.since(now) > MOMENT),
            StayReason::NoHost { .. } | StayReason::Waits => true,
        }
    }

    /// True if the owner wants the task's job checkpointed and ended instead.
    pub fn parks(&self, snapshot: &Snapshot) -> bool {
        let wants =
            |host: &HostView| host.terms.parks && !matches!(host.owner, Owner::Drained { .. });
        // A host that has refused a task is asked again, first after a short time.
        let passes = self
            .again
            .is_some_and(|again| again.since(snapshot.now) <= PATIENCE);
        let nowhere = matches!(
            self.why,
            StayReason::NoHost { .. } | StayReason::Held { .. }
        );
        nowhere && !passes && snapshot.host(self.host).is_some_and(wants)
    }

    /// Describes the reason, with the other hosts and why each is excluded.
    pub fn reason(&self, snapshot: &Snapshot) -> String {
        match &self.why {
            StayReason::NoHost { excluded } if !excluded.is_empty() => {
                format!("{} ({})", self.why, snapshot.tell(excluded))
            }
            why => why.to_string(),
        }
    }

    /// Describes the decision in one sentence for the event log.
    pub fn sentence(&self, snapshot: &Snapshot) -> String {
        let name = snapshot.name(self.host);
        let drained = |host: &HostView| matches!(host.owner, Owner::Drained { .. });
        let although = match snapshot.host(self.host).is_some_and(drained) {
            true => "it is being drained",
            false => "its owner is present",
        };
        format!(
            "{} stays on {name} although {although}: {}",
            self.tid,
            self.reason(snapshot)
        )
    }
}

/// Decisions about all guests of hosts that accept no guests.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// Tasks that migrate, ordered by host and tid.
    pub go: Vec<MoveDecision>,
    /// Tasks that should leave but stay.
    pub stay: Vec<Stay>,
}

impl Moves {
    /// Returns when to decide again if nothing changes before.
    pub fn again(&self) -> Option<Micros> {
        self.stay.iter().filter_map(|stay| stay.again).min()
    }
}

/// Decides about all guests of hosts that accept no guests.
pub fn moves(snapshot: &Snapshot) -> Moves {
    let index = snapshot.hosts.index(snapshot.now);
    let (loads, under_way) = (Loads::of(snapshot), index.under_way());
    let places = (0..index.guests().kinds()).map(|_| None).collect();
    let mut moving = Moving {
        snapshot,
        loads,
        under_way,
        places,
        out: Moves::default(),
    };
    for (host, at, guest) in index.guests().iter() {
        match guest
            .is_plain
            .then(|| moving.as_others(guest, host))
            .flatten()
        {
            Some(stay) => moving.out.stay.push(stay),
            None => moving.look(host, at, guest),
        }
    }
    moving.out
}

/// State of one decision about all guests.
struct Moving<'a> {
    snapshot: &'a Snapshot,
    loads: Loads<'a>,
    under_way: usize,
    /// Search result for each class of guests, by class index. When many owners come at once, a
    /// failed search runs once for each class instead of once for each task.
    places: Vec<Option<Place>>,
    out: Moves,
}

/// Whether guests of one class have a target.
enum Place {
    Somewhere,
    Nowhere(Nowhere),
}

impl Moving<'_> {
    /// Returns the decision for a guest that stays, if the result of its class determines it.
    fn as_others(&self, guest: Guest, host: HostId) -> Option<Stay> {
        match self.places[guest.kind].as_ref()? {
            Place::Nowhere(nowhere) => Some(nowhere.stay(guest.tid, host)),
            // The end of a migration makes room and is an event, so no timer is needed.
            Place::Somewhere if self.under_way >= MOVES_AT_ONCE_MAX => Some(Stay {
                tid: guest.tid,
                host,
                why: StayReason::Turn,
                again: None,
            }),
            Place::Somewhere => None,
        }
    }

    /// Decides about the guest at this position of its host's task list.
    fn look(&mut self, host: HostId, at: usize, guest: Guest) {
        let (snapshot, now) = (self.snapshot, self.snapshot.now);
        let Some(host) = snapshot.host(host) else {
            return;
        };
        let Some(task) = host.tasks.get(at) else {
            return;
        };
        let stay = |(why, again)| Stay {
            tid: task.tid,
            host: host.id,
            why,
            again,
        };
        // Refusals concern this task only, not its class.
        let refused = task.refused.iter().any(|(_, until)| until.at > now);
        let as_others = || self.as_others(guest, host.id).filter(|_| !refused);
        if let Some(stay) = waits(now, host, task).map(stay).or_else(as_others) {
            self.out.stay.push(stay);
            return;
        }
        let place = match target(snapshot, &self.loads, host, task) {
            Some(to) if self.under_way < MOVES_AT_ONCE_MAX => {
                self.go(host, task, to);
                Place::Somewhere
            }
            Some(_) => {
                self.out.stay.push(stay((StayReason::Turn, None)));
                Place::Somewhere
            }
            None => {
                let nowhere = Nowhere::of(snapshot, host, task);
                self.out.stay.push(nowhere.stay(task.tid, host.id));
                Place::Nowhere(nowhere)
            }
        };
        if !refused {
            self.places[guest.kind] = Some(place);
        }
    }

    fn go(&mut self, host: &HostView, task: &TaskView, to: &HostView) {
        let share = self.loads.share(to.id).usable as f64 / 1e3;
        let why = format!(
            "{} migrates to {}, share of a processor {share:.2}",
            task.tid, to.name
        );
        let Some(cause) = cause(&host.owner) else {
            return;
        };
        self.out.go.push(MoveDecision {
            tid: task.tid,
            from: host.id,
            to: to.id,
            cause,
            why,
        });
        self.under_way += 1;
        self.loads.add(to.id);
    }
}

/// Returns why a guest does not leave yet, regardless of targets, and when to decide again.
fn waits(now: Micros, host: &HostView, task: &TaskView) -> Option<(StayReason, Option<Micros>)> {
    let leaving = match host.owner {
        Owner::Drained { .. } => Leaving::Now,
        _ => host.terms.leaving,
    };
    match leaving {
        Leaving::At(at) if at > now => return Some((StayReason::Grace, Some(at))),
        Leaving::Never => return Some((StayReason::Waits, None)),
        Leaving::Ended => return Some((StayReason::Ended, None)),
        Leaving::Now | Leaving::At(_) => {}
    }
    let held = task.held.as_ref().filter(|held| held.at > now)?;
    Some((
        StayReason::Held {
            why: held.why.clone(),
        },
        Some(held.at),
    ))
}

/// Assigns hosts to `tasks` tasks of these users and programs that restart together: round robin,
/// within each owner's task limit. `None` if there is not room for all.
///
/// Hosts that admit all of `kept_for` stay unused: their room is reserved for that job.
pub fn room_for(
    snapshot: &Snapshot,
    tasks: u32,
    kinds: &[(u32, String)],
    kept_for: Option<&[(u32, String)]>,
) -> Option<Vec<HostId>> {
    let index = snapshot.hosts.index(snapshot.now);
    let load = |host: &HostView| {
        index
            .load(host.id)
            .expect("the index has the snapshot's hosts")
    };
    let moves = |host: &HostView| {
        host.no_moves
            .as_ref()
            .is_none_or(|no| no.at <= snapshot.now)
    };
    let is_kept = |host: &HostView| kept_for.is_some_and(|kinds| lets_in(host, kinds));
    let open = snapshot.hosts.into_iter().filter(|host| {
        host.owner.keeps_out().is_none()
            && full(host, snapshot.now, 0, || load(host)).is_none()
            && moves(host)
            && lets_in(host, kinds)
            && !is_kept(host)
    });
    let mut left: Vec<(HostId, u32)> = open.map(|host| (host.id, load(host).left())).collect();
    let mut places = Vec::new();
    while (places.len() as u64) < u64::from(tasks) {
        left.retain(|(_, left)| *left > 0);
        if left.is_empty() {
            return None;
        }
        let missing = tasks as usize - places.len();
        for (host, left) in left.iter_mut().take(missing) {
            places.push(*host);
            *left -= 1;
        }
    }
    Some(places)
}

/// True if `tasks` tasks of these users and programs would find room without any owner and any
/// other task.
pub fn room_ever(snapshot: &Snapshot, tasks: u32, kinds: &[(u32, String)]) -> bool {
    let hosts = snapshot
        .hosts
        .into_iter()
        .filter(|host| lets_in(host, kinds));
    hosts
        .map(|host| u64::from(host.terms.limits.guests_max.unwrap_or(u32::MAX)))
        .sum::<u64>()
        >= u64::from(tasks)
}

fn lets_in(host: &HostView, kinds: &[(u32, String)]) -> bool {
    kinds
        .iter()
        .all(|(user, program)| host.terms.blocks(*user, program).is_none())
}

/// Returns the cause of the migrations if tasks must leave the host of this owner.
fn cause(owner: &Owner) -> Option<MigrationCause> {
    match owner {
        Owner::Present { why } | Owner::Closed { why } => {
            Some(MigrationCause::Owner { why: why.clone() })
        }
        Owner::Drained { by } => Some(MigrationCause::Drain { requested_by: *by }),
        Owner::Unknown | Owner::Absent { .. } | Owner::Maybe { .. } => None,
    }
}

/// Returns the best target for a task that must leave; a host near the other tasks of its job
/// counts for more. Examines the best hosts first, and no more than necessary.
///
/// A host that meets the constraints of the spawn is preferred, even if its owner has just left. If
/// no host meets them, the task migrates all the same: the owner has priority.
fn target<'a>(
    snapshot: &'a Snapshot,
    loads: &Loads<'_>,
    from: &HostView,
    task: &TaskView,
) -> Option<&'a HostView> {
    let mut others = [None; 3];
    for near in loads.best(&snapshot.zones_of_peers(from.id, task)) {
        let host = snapshot.host(near.share.host())?;
        if host.id == from.id
            || unfit(snapshot, host, from, task, false).is_some()
            || loads.load(host.id).left() == 0
        {
            continue;
        }
        let settling = matches!(host.owner, Owner::Absent { left: Some(at) } if snapshot.now.since(at) < SETTLE);
        let meets = unmet(host, snapshot.now, || loads.load(host.id), task).is_none();
        match (meets, settling) {
            (true, false) => return Some(host),
            (true, true) => others[0] = others[0].or(Some(host)),
            (false, false) => others[1] = others[1].or(Some(host)),
            (false, true) => others[2] = others[2].or(Some(host)),
        }
    }
    others.into_iter().flatten().next()
}

/// Why no host is a target, and when one may become a target if nothing changes before.
struct Nowhere {
    excluded: Excluded,
    again: Option<Micros>,
}

impl Nowhere {
    fn of(snapshot: &Snapshot, from: &HostView, task: &TaskView) -> Nowhere {
        let (mut excluded, mut again) = (Excluding::default(), None::<Micros>);
        for host in &snapshot.hosts {
            let Some((why, until)) = unfit(snapshot, host, from, task, false) else {
                continue;
            };
            excluded.add(host.id, why);
            again = again.into_iter().chain(until).min();
        }
        Nowhere {
            excluded: excluded.done(),
            again,
        }
    }

    /// Returns the decision for a guest of the same class. Its own host is omitted from the
    /// reasons; the list contains it because of the owner.
    fn stay(&self, tid: Tid, host: HostId) -> Stay {
        let why = StayReason::NoHost {
            excluded: self.excluded.without(host),
        };
        Stay {
            tid,
            host,
            why,
            again: self.again,
        }
    }
}

fn unmet<'a>(
    host: &'a HostView,
    now: Micros,
    load: impl Fn() -> Load,
    task: &TaskView,
) -> Option<Reason<&'a str>> {
    let (condition, has) = task.wants.as_ref()?.unmet(host, now, load)?;
    Some(Reason::Unmet { condition, has })
}

/// Returns why a host is no target for this task, and until when. `strict`: the constraints of the
/// spawn must hold, too.
pub(super) fn unfit<'a>(
    snapshot: &Snapshot,
    host: &'a HostView,
    from: &HostView,
    task: &'a TaskView,
    strict: bool,
) -> Option<(Reason<&'a str>, Option<Micros>)> {
    let now = snapshot.now;
    if let Some(why) = host.owner.keeps_out() {
        return Some((why, None));
    }
    if let Some(why) = host.terms.blocks(task.user, &task.name) {
        return Some((why, None));
    }
    let load = || {
        snapshot
            .hosts
            .index(now)
            .load(host.id)
            .expect("the index has the snapshot's hosts")
    };
    if let Some(why) = full(host, now, task.bytes, load) {
        return Some((why, None));
    }
    if host.arch != from.arch {
        return Some((Reason::OtherArch { has: &host.arch }, None));
    }
    if let Some(no) = host.no_moves.as_ref().filter(|no| no.at > now) {
        return Some((Reason::NoMoves { why: &no.why }, Some(no.at)));
    }
    let refused = task
        .refused
        .iter()
        .find(|(id, until)| *id == host.id && until.at > now);
    if let Some((_, until)) = refused {
        return Some((Reason::Refused { why: &until.why }, Some(until.at)));
    }
    let unmet = strict.then(|| unmet(host, now, load, task)).flatten()?;
    Some((unmet, None))
}
