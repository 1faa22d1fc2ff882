//! Injects faults into a migration: before one of its steps begins, or after the step ended and
//! before that is reported.

use super::{Channel, Happening, LEASE, Sim, host, pair};
use crate::Event;
use sempa_proto::migration::{Failure, Step};
use sempa_proto::tasker::{FromTasker, ToTasker};
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::BTreeSet;

/// Events for a stopped daemon, in order.
pub(super) type Late = Vec<Event>;

/// Interval between attempts to fetch memory from a stopped source.
const MEMORY_PAUSE: Micros = Micros::from_millis(50);

/// The edge of a step at which a fault occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::tests) enum Edge {
    /// Nothing of the step is done.
    Before,
    /// The step is done and not reported.
    After,
}

pub(in crate::tests) type Point = (Step, Edge);

/// The party that a fault hits. The task migrates from h2 to h3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tests) enum Party {
    Source,
    Target,
    Master,
    SourceTasker,
    TargetTasker,
    SourceEngine,
    TargetEngine,
    Manager,
    /// The session between source and target.
    Session,
}

impl Party {
    pub(in crate::tests) const ALL: [Party; 9] = [
        Party::Source,
        Party::Target,
        Party::Master,
        Party::SourceTasker,
        Party::TargetTasker,
        Party::SourceEngine,
        Party::TargetEngine,
        Party::Manager,
        Party::Session,
    ];

    /// Returns the host of the victim.
    pub(in crate::tests) fn host(self) -> HostId {
        match self {
            Party::Source | Party::SourceTasker | Party::SourceEngine | Party::Session => host(2),
            Party::Target | Party::TargetTasker | Party::TargetEngine => host(3),
            Party::Master | Party::Manager => HostId::MASTER,
        }
    }

    /// Returns the faults that can hit this victim. Only daemons and sessions can be isolated.
    pub(in crate::tests) fn blows(self) -> Vec<Blow> {
        let stops = [Blow::Stop(A_MOMENT), Blow::Stop(LONG)];
        let cuts = [Blow::Cut(A_MOMENT), Blow::Cut(LONG)];
        let can_be_cut = matches!(
            self,
            Party::Source | Party::Target | Party::Master | Party::Session
        );
        let cuts = cuts.into_iter().filter(|_| can_be_cut);
        std::iter::once(Blow::Kill)
            .chain(stops)
            .chain(cuts)
            .collect()
    }
}

/// Shorter than the lease.
pub(in crate::tests) const A_MOMENT: Micros = Micros::from_millis(200);
/// Longer than the lease and than the timeout of any step.
pub(in crate::tests) const LONG: Micros = Micros::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tests) enum Blow {
    Kill,
    /// The victim does not run for this time.
    Stop(Micros),
    /// Nothing passes from or to the victim for this time.
    Cut(Micros),
}

/// One planned fault, and the migration state of the simulated taskers.
#[derive(Debug, Default)]
pub(in crate::tests) struct Strikes {
    wanted: Option<(Point, Party, Blow)>,
    pub(in crate::tests) struck: bool,
    /// All tasks use post-copy and pre-copy; otherwise that is random.
    pub(in crate::tests) pre_copies: bool,
    /// The points that were reached, in order.
    pub(in crate::tests) reached: Vec<Point>,
    pub(in crate::tests) manager: Option<usize>,
    /// Hosts whose engine fails its next operation.
    failing: BTreeSet<HostId>,
    /// Hosts that have lost the memory of post-copy tasks.
    pub(super) memory_lost: BTreeSet<HostId>,
    /// Migrations whose source process was killed.
    pub(super) killed: BTreeSet<MigrationId>,
    /// Migrations whose target process was released.
    pub(super) ran: BTreeSet<MigrationId>,
}

impl Strikes {
    /// A fault is planned or has occurred.
    pub(super) fn is_one(&self) -> bool {
        self.struck || self.wanted.is_some()
    }

    /// True if the source process of a migration was killed.
    pub(in crate::tests) fn is_killed(&self) -> bool {
        !self.killed.is_empty()
    }
}

impl Sim {
    /// Plans this fault for when the next migration reaches this point.
    pub(in crate::tests) fn strike_at(&mut self, point: Point, party: Party, blow: Blow) {
        self.strikes.wanted = Some((point, party, blow));
    }

    /// Records that a migration has reached this point, and injects the fault planned for it.
    pub(super) fn reaches(&mut self, point: Point) {
        self.strikes.reached.push(point);
        if let Some((_, party, blow)) = self.strikes.wanted.take_if(|(at, ..)| *at == point) {
            self.strikes.struck = true;
            self.strike(party, blow);
        }
    }

    pub(super) fn strike(&mut self, party: Party, blow: Blow) {
        let on = party.host();
        match (party, blow) {
            (Party::Source | Party::Target | Party::Master, Blow::Kill) => self.kill_host(on),
            (Party::Source | Party::Target | Party::Master, Blow::Cut(long)) => {
                self.cut_off(on, long)
            }
            (Party::Source | Party::Target | Party::Master, Blow::Stop(long)) => {
                self.nodes.get_mut(&on).expect("it is there").stands = Some(Late::new());
                if long > LEASE {
                    self.missed(on);
                }
                self.push(self.now + long, Happening::GoesOn(party));
            }
            (Party::SourceTasker | Party::TargetTasker, Blow::Kill) => self.kill_tasker(on),
            (Party::SourceTasker | Party::TargetTasker, Blow::Stop(long) | Blow::Cut(long)) => {
                self.nodes.get_mut(&on).expect("it is there").tasker_stands = Some(Vec::new());
                self.push(self.now + long, Happening::GoesOn(party));
            }
            (Party::SourceEngine | Party::TargetEngine, Blow::Kill) => {
                self.strikes.failing.insert(on);
            }
            (Party::SourceEngine | Party::TargetEngine, Blow::Stop(long) | Blow::Cut(long)) => {
                let last = self.channels.entry(Channel::Tasker(on)).or_default();
                *last = (*last).max(self.now + long);
            }
            (Party::Manager, Blow::Kill) => {
                self.exit(self.strikes.manager.expect("there is one"), 9)
            }
            (Party::Manager, Blow::Stop(long) | Blow::Cut(long)) => {
                self.procs[self.strikes.manager.expect("there is one")].held = true;
                self.push(self.now + long, Happening::GoesOn(party));
            }
            // A broken connection is reestablished at once.
            (Party::Session, Blow::Kill) => self.part(host(2), host(3), Micros(1000)),
            (Party::Session, Blow::Stop(long)) => {
                self.silence(|pair| pair == (host(2), host(3)), long)
            }
            (Party::Session, Blow::Cut(long)) => self.part(host(2), host(3), long),
        }
    }

    /// Other hosts notice that a host has been silent for longer than the lease.
    fn missed(&mut self, lost: HostId) {
        let with: Vec<(HostId, HostId)> = self
            .sessions
            .iter()
            .copied()
            .filter(|(a, b)| [*a, *b].contains(&lost))
            .collect();
        for (a, b) in with {
            let other = if a == lost { b } else { a };
            let at = self.now + LEASE + Micros(self.dice.below(200_000));
            self.push(at, Happening::LostSeen(other, lost));
            // The host notices the same when it resumes.
            self.push(at, Happening::LostSeen(lost, other));
        }
    }

    /// Isolates a host from all others.
    fn cut_off(&mut self, lost: HostId, long: Micros) {
        if long < LEASE {
            return self.silence(|(a, b)| [a, b].contains(&lost), long);
        }
        let with: Vec<(HostId, HostId)> = self
            .sessions
            .iter()
            .copied()
            .filter(|(a, b)| [*a, *b].contains(&lost))
            .collect();
        for (a, b) in with {
            self.sessions.remove(&(a, b));
            self.lose_words(a, b);
            self.lose_words(b, a);
            for (by, of) in [(a, b), (b, a)] {
                // A daemon's lease is shorter than the lease that the master grants it.
                let (span, scatter) = if of == HostId::MASTER {
                    (Micros(LEASE.0 / 2), 100_000)
                } else {
                    (LEASE, 200_000)
                };
                let at = self.now + span + Micros(self.dice.below(scatter));
                self.push(at, Happening::LostSeen(by, of));
            }
        }
    }

    /// Delays everything that is sent on these sessions by `long`.
    fn silence(&mut self, which: impl Fn((HostId, HostId)) -> bool, long: Micros) {
        let at = self.now + long;
        for (a, b) in self.sessions.iter().copied().filter(|ends| which(*ends)) {
            for (from, to) in [(a, b), (b, a)] {
                for channel in [Channel::Control(from, to), Channel::Data(from, to)] {
                    let last = self.channels.entry(channel).or_default();
                    *last = at.max(*last);
                }
            }
        }
        for (channel, last) in &mut self.channels {
            if matches!(channel, Channel::Lane((from, to, _), _) if which(pair(*from, *to))) {
                *last = at.max(*last);
            }
        }
    }

    /// Replaces engines that were killed while idle.
    pub(in crate::tests) fn engines_anew(&mut self) {
        self.strikes.failing.clear();
    }

    /// Resumes a stopped victim, which handles what arrived meanwhile.
    pub(super) fn goes_on(&mut self, party: Party) {
        let on = party.host();
        match party {
            Party::SourceTasker | Party::TargetTasker => {
                let late = self
                    .nodes
                    .get_mut(&on)
                    .and_then(|node| node.tasker_stands.take());
                late.into_iter()
                    .flatten()
                    .for_each(|message| self.tell_tasker(on, message));
            }
            Party::Manager => {
                let proc = self.strikes.manager.expect("there is one");
                self.procs[proc].held = false;
                self.thaw(proc);
            }
            _ => {
                let late = self.nodes.get_mut(&on).and_then(|node| node.stands.take());
                self.flush(on);
                late.into_iter()
                    .flatten()
                    .for_each(|event| self.handle(on, event));
            }
        }
    }

    /// Passes a daemon's message to its tasker.
    pub(super) fn tell_tasker(&mut self, on: HostId, message: ToTasker) {
        let node = self.nodes.get_mut(&on).expect("it speaks");
        if node.tasker_dead {
            return;
        }
        match &mut node.tasker_stands {
            Some(late) => late.push(message),
            None => self.tasker_gets(on, message),
        }
    }

    /// As [`Sim::step_result`], but fails if the engine of this host was killed.
    pub(super) fn step_result_of<T>(&mut self, on: HostId, good: T) -> Result<T, Failure> {
        if self.strikes.failing.remove(&on) {
            return Err(Failure::Engine("it was killed".into()));
        }
        self.step_result(good)
    }

    /// Delivers the remaining memory of a post-copy task. If that is lost, the task is killed.
    pub(super) fn memory_came(
        &mut self,
        on: HostId,
        migration: MigrationId,
        from: HostId,
        tid: Tid,
    ) {
        let source = &self.nodes[&from];
        let is_lost =
            !source.alive || self.is_out(from) || self.strikes.memory_lost.contains(&from);
        if !is_lost && (source.stands.is_some() || source.tasker_stands.is_some()) {
            let again = Happening::MemoryCame(on, migration, from, tid);
            return self.push(self.now + MEMORY_PAUSE, again);
        }
        let engine = self.strikes.failing.contains(&from) || self.strikes.failing.contains(&on);
        let Some(proc) = self.find_spawned(on, tid) else {
            return;
        };
        let lost = is_lost || engine || self.is_parted();
        let why = || Failure::Images("its memory does not come any more".into());
        self.tasker(
            on,
            FromTasker::MemoryArrived {
                migration,
                result: if lost { Err(why()) } else { Ok(()) },
            },
        );
        if lost {
            self.exit(proc, 9);
        }
    }

    /// True while the session of source and target is broken.
    pub(super) fn is_parted(&self) -> bool {
        self.queue
            .values()
            .any(|happening| matches!(happening, Happening::Joined(..)))
    }
}
