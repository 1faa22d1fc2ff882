//! Injects faults into a migration: before one of its steps begins, or after a step has ended and
//! before its end is reported.

use super::{Channel, LEASE, Sim, SimEvent, host, pair};
use crate::Event;
use sempa_proto::migration::{Failure, Step};
use sempa_proto::tasker::{FromTasker, ToTasker};
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::BTreeSet;

/// Events for a stopped daemon, in order.
pub(super) type DeferredEvents = Vec<Event>;

/// Interval between attempts to fetch memory from a stopped source.
const MEMORY_RETRY_INTERVAL: Micros = Micros::from_millis(50);

/// The edge of a step at which a fault occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::tests) enum StepEdge {
    /// The step has not begun.
    Before,
    /// The step is done and not reported.
    After,
}

pub(in crate::tests) type FaultPoint = (Step, StepEdge);

/// The party that a fault hits. The task migrates from h2 to h3.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tests) enum Victim {
    Source,
    Target,
    Master,
    SourceTasker,
    TargetTasker,
    SourceEngine,
    TargetEngine,
    ResourceManager,
    /// The session between source and target.
    Session,
}

impl Victim {
    pub(in crate::tests) const ALL: [Victim; 9] = [
        Victim::Source,
        Victim::Target,
        Victim::Master,
        Victim::SourceTasker,
        Victim::TargetTasker,
        Victim::SourceEngine,
        Victim::TargetEngine,
        Victim::ResourceManager,
        Victim::Session,
    ];

    pub(in crate::tests) fn host(self) -> HostId {
        match self {
            Victim::Source | Victim::SourceTasker | Victim::SourceEngine | Victim::Session => {
                host(2)
            }
            Victim::Target | Victim::TargetTasker | Victim::TargetEngine => host(3),
            Victim::Master | Victim::ResourceManager => HostId::MASTER,
        }
    }

    /// Returns the faults that can hit this victim. Only daemons and sessions can be isolated.
    pub(in crate::tests) fn faults(self) -> Vec<Fault> {
        let stops = [Fault::Stop(SHORT_OUTAGE), Fault::Stop(LONG_OUTAGE)];
        let isolations = [Fault::Isolate(SHORT_OUTAGE), Fault::Isolate(LONG_OUTAGE)];
        let can_be_cut = matches!(
            self,
            Victim::Source | Victim::Target | Victim::Master | Victim::Session
        );
        let isolations = isolations.into_iter().filter(|_| can_be_cut);
        std::iter::once(Fault::Kill)
            .chain(stops)
            .chain(isolations)
            .collect()
    }
}

/// Shorter than the lease.
pub(in crate::tests) const SHORT_OUTAGE: Micros = Micros::from_millis(200);
/// Longer than the lease and than the timeout of any step.
pub(in crate::tests) const LONG_OUTAGE: Micros = Micros::from_secs(30);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::tests) enum Fault {
    Kill,
    /// The victim does not run for this duration.
    Stop(Micros),
    /// No message passes from or to the victim for this duration.
    Isolate(Micros),
}

/// One planned fault, and the migration state of the simulated taskers.
#[derive(Debug, Default)]
pub(in crate::tests) struct FaultInjection {
    planned: Option<(FaultPoint, Victim, Fault)>,
    pub(in crate::tests) triggered: bool,
    /// True if all tasks use post-copy and pre-copy; otherwise the use is random.
    pub(in crate::tests) always_live_copies: bool,
    /// The points that were reached, in order.
    pub(in crate::tests) reached_points: Vec<FaultPoint>,
    pub(in crate::tests) resource_manager: Option<usize>,
    /// Hosts whose engine fails its next operation.
    failing_engines: BTreeSet<HostId>,
    /// Hosts that have lost the memory of post-copy tasks.
    pub(super) memory_lost: BTreeSet<HostId>,
    /// Migrations whose source process was killed.
    pub(super) killed_sources: BTreeSet<MigrationId>,
    /// Migrations whose target process was released.
    pub(super) released_targets: BTreeSet<MigrationId>,
}

impl FaultInjection {
    /// True if a fault is planned or has occurred.
    pub(super) fn is_active(&self) -> bool {
        self.triggered || self.planned.is_some()
    }

    /// True if the source process of a migration was killed.
    pub(in crate::tests) fn source_was_killed(&self) -> bool {
        !self.killed_sources.is_empty()
    }
}

impl Sim {
    /// Plans a fault that occurs when the next migration reaches this point.
    pub(in crate::tests) fn plan_fault(&mut self, point: FaultPoint, victim: Victim, fault: Fault) {
        self.injection.planned = Some((point, victim, fault));
    }

    /// Records that a migration has reached this point, and injects the fault planned for it.
    pub(super) fn reach_point(&mut self, point: FaultPoint) {
        self.injection.reached_points.push(point);
        if let Some((_, party, blow)) = self.injection.planned.take_if(|(at, ..)| *at == point) {
            self.injection.triggered = true;
            self.inject(party, blow);
        }
    }

    pub(super) fn inject(&mut self, victim: Victim, fault: Fault) {
        let on = victim.host();
        match (victim, fault) {
            (Victim::Source | Victim::Target | Victim::Master, Fault::Kill) => self.kill_host(on),
            (Victim::Source | Victim::Target | Victim::Master, Fault::Isolate(duration)) => {
                self.isolate(on, duration)
            }
            (Victim::Source | Victim::Target | Victim::Master, Fault::Stop(duration)) => {
                self.nodes
                    .get_mut(&on)
                    .expect("it is there")
                    .deferred_events = Some(DeferredEvents::new());
                if duration > LEASE {
                    self.report_silence(on);
                }
                self.schedule(self.now + duration, SimEvent::VictimResumes(victim));
            }
            (Victim::SourceTasker | Victim::TargetTasker, Fault::Kill) => self.kill_tasker(on),
            (
                Victim::SourceTasker | Victim::TargetTasker,
                Fault::Stop(duration) | Fault::Isolate(duration),
            ) => {
                self.nodes
                    .get_mut(&on)
                    .expect("it is there")
                    .deferred_orders = Some(Vec::new());
                self.schedule(self.now + duration, SimEvent::VictimResumes(victim));
            }
            (Victim::SourceEngine | Victim::TargetEngine, Fault::Kill) => {
                self.injection.failing_engines.insert(on);
            }
            (
                Victim::SourceEngine | Victim::TargetEngine,
                Fault::Stop(duration) | Fault::Isolate(duration),
            ) => {
                let last = self.channels.entry(Channel::Tasker(on)).or_default();
                *last = (*last).max(self.now + duration);
            }
            (Victim::ResourceManager, Fault::Kill) => {
                self.exit(self.injection.resource_manager.expect("there is one"), 9)
            }
            (Victim::ResourceManager, Fault::Stop(duration) | Fault::Isolate(duration)) => {
                self.procs[self.injection.resource_manager.expect("there is one")].paused = true;
                self.schedule(self.now + duration, SimEvent::VictimResumes(victim));
            }
            // A broken connection is reestablished at once.
            (Victim::Session, Fault::Kill) => self.separate(host(2), host(3), Micros(1000)),
            (Victim::Session, Fault::Stop(duration)) => {
                self.delay_sessions(|pair| pair == (host(2), host(3)), duration)
            }
            (Victim::Session, Fault::Isolate(duration)) => {
                self.separate(host(2), host(3), duration)
            }
        }
    }

    /// Makes the other hosts notice that a host has been silent for longer than the lease.
    fn report_silence(&mut self, lost: HostId) {
        let with: Vec<(HostId, HostId)> = self
            .sessions
            .iter()
            .copied()
            .filter(|(a, b)| [*a, *b].contains(&lost))
            .collect();
        for (a, b) in with {
            let other = if a == lost { b } else { a };
            let at = self.now + LEASE + Micros(self.rng.below(200_000));
            self.schedule(at, SimEvent::LossNoticed(other, lost));
            // The host notices the same when it resumes.
            self.schedule(at, SimEvent::LossNoticed(lost, other));
        }
    }

    /// Isolates a host from all others.
    fn isolate(&mut self, lost: HostId, duration: Micros) {
        if duration < LEASE {
            return self.delay_sessions(|(a, b)| [a, b].contains(&lost), duration);
        }
        let with: Vec<(HostId, HostId)> = self
            .sessions
            .iter()
            .copied()
            .filter(|(a, b)| [*a, *b].contains(&lost))
            .collect();
        for (a, b) in with {
            self.sessions.remove(&(a, b));
            self.drop_in_flight(a, b);
            self.drop_in_flight(b, a);
            for (by, of) in [(a, b), (b, a)] {
                // A daemon's lease is shorter than the lease that the master grants it.
                let (span, scatter) = if of == HostId::MASTER {
                    (Micros(LEASE.0 / 2), 100_000)
                } else {
                    (LEASE, 200_000)
                };
                let at = self.now + span + Micros(self.rng.below(scatter));
                self.schedule(at, SimEvent::LossNoticed(by, of));
            }
        }
    }

    /// Delays everything that is sent on the affected sessions by `duration`.
    fn delay_sessions(&mut self, is_affected: impl Fn((HostId, HostId)) -> bool, duration: Micros) {
        let at = self.now + duration;
        for (a, b) in self
            .sessions
            .iter()
            .copied()
            .filter(|ends| is_affected(*ends))
        {
            for (from, to) in [(a, b), (b, a)] {
                for channel in [Channel::Control(from, to), Channel::Data(from, to)] {
                    let last = self.channels.entry(channel).or_default();
                    *last = at.max(*last);
                }
            }
        }
        for (channel, last) in &mut self.channels {
            if matches!(channel, Channel::Lane((from, to, _), _) if is_affected(pair(*from, *to))) {
                *last = at.max(*last);
            }
        }
    }

    /// Replaces engines that were killed while idle.
    pub(in crate::tests) fn replace_engines(&mut self) {
        self.injection.failing_engines.clear();
    }

    /// Resumes a stopped victim, which handles the events that arrived meanwhile.
    pub(super) fn resume_victim(&mut self, victim: Victim) {
        let on = victim.host();
        match victim {
            Victim::SourceTasker | Victim::TargetTasker => {
                let late = self
                    .nodes
                    .get_mut(&on)
                    .and_then(|node| node.deferred_orders.take());
                late.into_iter()
                    .flatten()
                    .for_each(|message| self.send_to_tasker(on, message));
            }
            Victim::ResourceManager => {
                let proc = self.injection.resource_manager.expect("there is one");
                self.procs[proc].paused = false;
                self.resume_proc(proc);
            }
            _ => {
                let late = self
                    .nodes
                    .get_mut(&on)
                    .and_then(|node| node.deferred_events.take());
                self.flush(on);
                late.into_iter()
                    .flatten()
                    .for_each(|event| self.handle(on, event));
            }
        }
    }

    /// Passes a daemon's message to its tasker.
    pub(super) fn send_to_tasker(&mut self, on: HostId, message: ToTasker) {
        let node = self.nodes.get_mut(&on).expect("it speaks");
        if node.tasker_dead {
            return;
        }
        match &mut node.deferred_orders {
            Some(late) => late.push(message),
            None => self.handle_tasker_order(on, message),
        }
    }

    /// As [`Sim::step_result`], but fails if the engine of this host was killed.
    pub(super) fn step_result_of<T>(&mut self, on: HostId, good: T) -> Result<T, Failure> {
        if self.injection.failing_engines.remove(&on) {
            return Err(Failure::Engine("it was killed".into()));
        }
        self.step_result(good)
    }

    /// Delivers the remaining memory of a post-copy task. If the memory is lost, the task is
    /// killed.
    pub(super) fn end_memory_transfer(
        &mut self,
        on: HostId,
        migration: MigrationId,
        from: HostId,
        tid: Tid,
    ) {
        let source = &self.nodes[&from];
        let is_lost =
            !source.is_alive || self.is_removed(from) || self.injection.memory_lost.contains(&from);
        if !is_lost && (source.deferred_events.is_some() || source.deferred_orders.is_some()) {
            let retry = SimEvent::MemoryTransferEnded(on, migration, from, tid);
            return self.schedule(self.now + MEMORY_RETRY_INTERVAL, retry);
        }
        let engine = self.injection.failing_engines.contains(&from)
            || self.injection.failing_engines.contains(&on);
        let Some(proc) = self.find_spawned(on, tid) else {
            return;
        };
        let lost = is_lost || engine || self.session_is_broken();
        let why = || Failure::Images("its memory does not come any more".into());
        self.send_from_tasker(
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
    pub(super) fn session_is_broken(&self) -> bool {
        self.queue
            .values()
            .any(|happening| matches!(happening, SimEvent::Reconnected(..)))
    }
}
