//! Which tasks leave their host because of its owner: he is there, or wants no guests at this time. They leave when he says. A task that is
//! elsewhere stays elsewhere when he has left, and a host without an owner is never disturbed. A host that somebody has emptied is
//! left in the same way, at once.
//!
//! However often a task had to go before, it goes again: each time an owner has come, and while it stays it only stands still.
//! Against moves to and fro hosts whose owners have just left are the last choice ([`SETTLE`]).

use super::excluded::Excluding;
use super::load::{Load, Loads, full};
use super::{Excluded, HostView, Leaving, Owner, Reason, Snapshot, TaskView};
use sempa_proto::migration::Cause;
use sempa_proto::{HostId, Micros, Tid};
use std::collections::BTreeMap;
use std::fmt;

/// Moves under way at once in the whole virtual machine; the others wait for their turn. Below the number that the
/// master carries out, so that a person's own request finds room.
pub const MOVES_AT_ONCE_MAX: usize = 48;
/// A host whose owner left less than this ago is the last choice as a target: he may be back in a moment.
pub const SETTLE: Micros = Micros::from_secs(10);

/// What passes within this is waited for before a job is parked.
const PATIENCE: Micros = Micros::from_secs(5);
/// What passes within this is not told.
const MOMENT: Micros = Micros::from_secs(1);

/// A task is to move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MoveDecision {
    /// The task.
    pub tid: Tid,
    /// Where it is.
    pub from: HostId,
    /// Where it is to go.
    pub to: HostId,
    /// Why it must go, for the event log.
    pub cause: Cause,
    /// Why it goes there: one sentence.
    pub why: String,
}

/// Why a task stays although the owner of its host is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StayReason {
    /// No host would take it.
    NoHost {
        /// The other hosts and why not.
        excluded: Excluded,
    },
    /// It cannot be moved at all for a while.
    Held {
        /// Why.
        why: String,
    },
    /// [`MOVES_AT_ONCE_MAX`] moves are under way; its turn comes.
    Turn,
    /// The owner lets guests wait for some time before they leave.
    Grace,
    /// The owner lets guests wait until he has left.
    Waits,
    /// The owner has guests ended where they are.
    Ended,
}

/// A task that stays although the owner of its host is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stay {
    /// The task.
    pub tid: Tid,
    /// Where it is.
    pub host: HostId,
    /// Why.
    pub why: StayReason,
    /// When to look again if nothing happens before, on the snapshot's clock.
    pub again: Option<Micros>,
}

impl fmt::Display for StayReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StayReason::NoHost { .. } => f.write_str("no host to go to"),
            StayReason::Held { why } => f.write_str(why),
            StayReason::Turn => write!(f, "{MOVES_AT_ONCE_MAX} moves are under way"),
            StayReason::Grace => f.write_str("he lets it wait for some time"),
            StayReason::Waits => f.write_str("he lets it stand still until he has left"),
            StayReason::Ended => f.write_str("he has it ended there"),
        }
    }
}

impl Stay {
    /// False for reasons that pass in a moment and are not worth an entry in the log.
    pub fn is_news(&self, now: Micros) -> bool {
        match self.why {
            StayReason::Turn | StayReason::Grace | StayReason::Ended => false,
            StayReason::Held { .. } => self.again.is_none_or(|again| again.since(now) > MOMENT),
            StayReason::NoHost { .. } | StayReason::Waits => true,
        }
    }

    /// True when the owner wants the task's job checkpointed and ended instead.
    pub fn parks(&self, snapshot: &Snapshot) -> bool {
        let wants = |host: &HostView| host.terms.parks && !matches!(host.owner, Owner::Drained { .. });
        // A host that has refused a task is asked again, first after a moment.
        let passes = self.again.is_some_and(|again| again.since(snapshot.now) <= PATIENCE);
        let nowhere = matches!(self.why, StayReason::NoHost { .. } | StayReason::Held { .. });
        nowhere && !passes && snapshot.host(self.host).is_some_and(wants)
    }

    /// Why, with the other hosts and what each has against it.
    pub fn reason(&self, snapshot: &Snapshot) -> String {
        match &self.why {
            StayReason::NoHost { excluded } if !excluded.is_empty() => {
                format!("{} ({})", self.why, snapshot.tell(excluded))
            }
            why => why.to_string(),
        }
    }

    /// One sentence for the event log.
    pub fn sentence(&self, snapshot: &Snapshot) -> String {
        let name = snapshot.name(self.host);
        let drained = |host: &HostView| matches!(host.owner, Owner::Drained { .. });
        let although = match snapshot.host(self.host).is_some_and(drained) {
            true => "it is to be emptied",
            false => "its owner is there",
        };
        format!("{} stays on {name} although {although}: {}", self.tid, self.reason(snapshot))
    }
}

/// All decisions about running tasks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    /// Tasks that go, in the order of hosts and tids.
    pub go: Vec<MoveDecision>,
    /// Tasks that should go and stay.
    pub stay: Vec<Stay>,
}

impl Moves {
    /// When to decide again if nothing happens before.
    pub fn again(&self) -> Option<Micros> {
        self.stay.iter().filter_map(|stay| stay.again).min()
    }
}

/// Decides for all tasks of hosts whose owner is there.
pub fn moves(snapshot: &Snapshot) -> Moves {
    let index = snapshot.hosts.index(snapshot.now);
    let mut under_way = index.under_way();
    let mut loads = Loads::of(snapshot);
    let mut out = Moves::default();
    let mut known = BTreeMap::<Kind<'_>, Option<Nowhere>>::new();
    for host in index.with_guests().iter().filter_map(|id| snapshot.host(*id)) {
        let waits = match host.terms.leaving {
            _ if matches!(host.owner, Owner::Drained { .. }) => None,
            Leaving::Now => None,
            Leaving::At(at) => (at > snapshot.now).then_some((StayReason::Grace, Some(at))),
            Leaving::Never => Some((StayReason::Waits, None)),
            Leaving::Ended => Some((StayReason::Ended, None)),
        };
        for task in host.tasks.iter().filter(|t| t.is_settled_guest()) {
            let stay = |why, again| Stay { tid: task.tid, host: host.id, why, again };
            if let Some((why, again)) = waits.clone() {
                out.stay.push(stay(why, again));
                continue;
            }
            if let Some(held) = task.held.as_ref().filter(|held| held.at > snapshot.now) {
                out.stay.push(stay(StayReason::Held { why: held.why.clone() }, Some(held.at)));
                continue;
            }
            let kind = Kind::of(snapshot.now, host, task);
            match kind.and_then(|kind| known.get(&kind)) {
                Some(Some(nowhere)) => {
                    out.stay.push(nowhere.stay(host, task));
                    continue;
                }
                // A move that ends makes room, and is an event; no need to look again by time.
                Some(None) if under_way >= MOVES_AT_ONCE_MAX => {
                    out.stay.push(stay(StayReason::Turn, None));
                    continue;
                }
                _ => {}
            }
            let target = target(snapshot, &loads, host, task);
            let nowhere = target.is_none().then(|| Nowhere::of(snapshot, host, task));
            out.stay.extend(nowhere.as_ref().map(|nowhere| nowhere.stay(host, task)));
            known.extend(kind.map(|kind| (kind, nowhere)));
            match target {
                None => {}
                Some(_) if under_way >= MOVES_AT_ONCE_MAX => out.stay.push(stay(StayReason::Turn, None)),
                Some(to) => {
                    let share = loads.share(to.id).usable as f64 / 1e3;
                    let goes = format!("{} goes to {}, share of a processor {share:.2}", task.tid, to.name);
                    let Some(cause) = cause(&host.owner) else { continue };
                    out.go.push(MoveDecision { tid: task.tid, from: host.id, to: to.id, cause, why: goes });
                    under_way += 1;
                    loads.add(to.id);
                }
            }
        }
    }
    out
}

/// Places for so many tasks of these users and programs that begin again together, as many on a host as its owner allows, in
/// turn; `None` if there is not room for all. Hosts that would take all of the kinds for which room is kept are not used.
pub fn room_for(
    snapshot: &Snapshot,
    tasks: u32,
    kinds: &[(u32, String)],
    kept_for: Option<&[(u32, String)]>,
) -> Option<Vec<HostId>> {
    let index = snapshot.hosts.index(snapshot.now);
    let load = |host: &HostView| index.load(host.id).expect("the index has the snapshot's hosts");
    let moves = |host: &HostView| host.no_moves.as_ref().is_none_or(|no| no.at <= snapshot.now);
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

/// True when so many tasks of these users and programs would find room if no owner and no other task were there.
pub fn room_ever(snapshot: &Snapshot, tasks: u32, kinds: &[(u32, String)]) -> bool {
    let hosts = snapshot.hosts.into_iter().filter(|host| lets_in(host, kinds));
    hosts.map(|host| u64::from(host.terms.limits.cores.unwrap_or(u32::MAX))).sum::<u64>() >= u64::from(tasks)
}

fn lets_in(host: &HostView, kinds: &[(u32, String)]) -> bool {
    kinds.iter().all(|(user, program)| host.terms.blocks(*user, program).is_none())
}

/// Why tasks leave the host of this owner, if they do.
fn cause(owner: &Owner) -> Option<Cause> {
    match owner {
        Owner::Present { why } | Owner::Closed { why } => Some(Cause::Owner { why: why.clone() }),
        Owner::Drained { by } => Some(Cause::Drain { by: *by }),
        Owner::Unknown | Owner::Absent { .. } | Owner::Maybe { .. } => None,
    }
}

/// The best host for a task that must leave; one near the others of its job counts for more. Looks at the best hosts first, and
/// at no more than it must. Requirements of
/// its spawn come before a host's rest, but where no host meets them it goes all the same: the owner comes first.
fn target<'a>(snapshot: &'a Snapshot, loads: &Loads<'_>, from: &HostView, task: &TaskView) -> Option<&'a HostView> {
    let mut others = [None; 3];
    for near in loads.best(&snapshot.zones_of_peers(from.id, task)) {
        let host = snapshot.host(near.share.host())?;
        if host.id == from.id || unfit(snapshot, host, from, task, false).is_some() || loads.load(host.id).left() == 0 {
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

/// Tasks of one kind can go to the same hosts. When many owners come at once, a decision looks for a place for each kind that
/// has none, and not for each task.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Kind<'a> {
    arch: &'a str,
    user: u32,
    program: &'a str,
}

impl<'a> Kind<'a> {
    /// `None` for a task that some host has refused: that is its own affair.
    fn of(now: Micros, from: &'a HostView, task: &'a TaskView) -> Option<Kind<'a>> {
        let refused = task.refused.iter().any(|(_, until)| until.at > now);
        (!refused).then_some(Kind { arch: &from.arch, user: task.user, program: &task.name })
    }
}

/// Why no host is fit, and when one may be again if nothing happens before.
struct Nowhere {
    excluded: Excluded,
    again: Option<Micros>,
}

impl Nowhere {
    fn of(snapshot: &Snapshot, from: &HostView, task: &TaskView) -> Nowhere {
        let (mut excluded, mut again) = (Excluding::default(), None::<Micros>);
        for host in &snapshot.hosts {
            let Some((why, until)) = unfit(snapshot, host, from, task, false) else { continue };
            excluded.add(host.id, why);
            again = again.into_iter().chain(until).min();
        }
        Nowhere { excluded: excluded.done(), again }
    }

    /// So it is for a task of the same kind. The host where it is is in here, too, because of its owner.
    fn stay(&self, host: &HostView, task: &TaskView) -> Stay {
        let why = StayReason::NoHost { excluded: self.excluded.without(host.id) };
        Stay { tid: task.tid, host: host.id, why, again: self.again }
    }
}

fn unmet(host: &HostView, now: Micros, load: impl Fn() -> Load, task: &TaskView) -> Option<Reason> {
    let (condition, has) = task.wants.as_ref()?.unmet(host, now, load)?;
    Some(Reason::Unmet { condition, has })
}

/// Why a host is no target for this task, and until when. `strict`: what its spawn required must hold, too.
pub(super) fn unfit(
    snapshot: &Snapshot,
    host: &HostView,
    from: &HostView,
    task: &TaskView,
    strict: bool,
) -> Option<(Reason, Option<Micros>)> {
    let now = snapshot.now;
    if let Some(why) = host.owner.keeps_out() {
        return Some((why, None));
    }
    if let Some(why) = host.terms.blocks(task.user, &task.name) {
        return Some((why, None));
    }
    let load = || snapshot.hosts.index(now).load(host.id).expect("the index has the snapshot's hosts");
    if let Some(why) = full(host, now, task.bytes, load) {
        return Some((why, None));
    }
    if host.arch != from.arch {
        return Some((Reason::OtherArch { has: host.arch.clone() }, None));
    }
    if let Some(no) = host.no_moves.as_ref().filter(|no| no.at > now) {
        return Some((Reason::NoMoves { why: no.why.clone() }, Some(no.at)));
    }
    let refused = task.refused.iter().find(|(id, until)| *id == host.id && until.at > now);
    if let Some((_, until)) = refused {
        return Some((Reason::Refused { why: until.why.clone() }, Some(until.at)));
    }
    let unmet = strict.then(|| unmet(host, now, load, task)).flatten()?;
    Some((unmet, None))
}
