//! Injects faults into a migration: before a step begins, or after a step has ended and before the
//! end is reported.

use super::{Channel, LEASE, Sim, SimEvent, host, host_pair};
use crate::Event;
use sempa_proto::migration::{Failure, Step};
use sempa_proto::tasker::{FromTasker, ToTasker};
use sempa_proto::{HostId, Micros, MigrationId, Tid};
use std::collections::BTreeSet;

/// Events for a stopped daemon, in order.
pub(super) type DeferredEvents = Vec<Event>;

/// Interval between attempts to fetch memory from a stopped source.
const MEMORY_RETRY_INTERVAL: Micros = Micros::from_millis(50);

/// The edge of a step, or of the handling of a message, at which a fault occurs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::tests) enum StepEdge {
    /// The step has not begun.
    Start,
    /// The step is complete and not yet reported.
    End,
}

pub(in crate::tests) type FaultPoint = (Step, StepEdge);

/// The party that a fault hits. The migration has the source h2 and the target h3.
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
    pub(in crate::tests) const ALL: [Self; 9] = [
        Self::Source,
        Self::Target,
        Self::Master,
        Self::SourceTasker,
        Self::TargetTasker,
        Self::SourceEngine,
        Self::TargetEngine,
        Self::ResourceManager,
        Self::Session,
    ];

    pub(in crate::tests) fn host(self) -> HostId {
        match self {
            Self::Source | Self::SourceTasker | Self::SourceEngine | Self::Session => host(2),
            Self::Target | Self::TargetTasker | Self::TargetEngine => host(3),
            Self::Master | Self::ResourceManager => HostId::MASTER,
        }
    }

    /// Returns the faults that can hit this victim. Only daemons and sessions can be isolated for a
    /// time.
    pub(in crate::tests) fn faults(self) -> Vec<Fault> {
        let stop_faults = [Fault::Stop(SHORT_OUTAGE), Fault::Stop(LONG_OUTAGE)];
        let isolation_faults = [Fault::Isolate(SHORT_OUTAGE), Fault::Isolate(LONG_OUTAGE)];
        let can_be_isolated = matches!(
            self,
            Self::Source | Self::Target | Self::Master | Self::Session
        );
        let isolation_faults = isolation_faults.into_iter().filter(|_| can_be_isolated);
        std::iter::once(Fault::Kill)
            .chain(stop_faults)
            .chain(isolation_faults)
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
    /// No message reaches or leaves the victim for this duration.
    Isolate(Micros),
}

/// At most one planned fault, and the simulated taskers' state of migrations.
#[derive(Debug, Default)]
pub(in crate::tests) struct FaultInjection {
    planned_fault: Option<(FaultPoint, Victim, Fault)>,
    pub(in crate::tests) has_triggered: bool,
    /// True if all tasks use post-copy and pre-copy; if false, the use is random.
    pub(in crate::tests) always_live_copies: bool,
    /// The points that were reached, in order.
    pub(in crate::tests) reached_points: Vec<FaultPoint>,
    pub(in crate::tests) resource_manager_proc: Option<usize>,
    /// Hosts whose engine fails its next operation.
    failing_engine_hosts: BTreeSet<HostId>,
    /// Hosts whose tasker has died. The memory that the tasker served for post-copy tasks is lost.
    pub(super) memory_lost_hosts: BTreeSet<HostId>,
    /// Migrations whose source process was killed.
    pub(super) killed_sources: BTreeSet<MigrationId>,
    /// Migrations whose target process may run.
    pub(super) running_targets: BTreeSet<MigrationId>,
}

impl FaultInjection {
    /// True if a fault is planned or has occurred.
    pub(super) fn is_active(&self) -> bool {
        self.has_triggered || self.planned_fault.is_some()
    }

    /// True if a source process was killed in any migration.
    pub(in crate::tests) fn source_was_killed(&self) -> bool {
        !self.killed_sources.is_empty()
    }
}

impl Sim {
    /// Plans a fault for the time when a migration next reaches this point.
    pub(in crate::tests) fn plan_fault(&mut self, point: FaultPoint, victim: Victim, fault: Fault) {
        self.injection.planned_fault = Some((point, victim, fault));
    }

    /// Records that a migration has reached this point. Injects the fault that is planned for the
    /// point.
    pub(super) fn reach_point(&mut self, point: FaultPoint) {
        self.injection.reached_points.push(point);
        if let Some((_, victim, planned_fault)) = self
            .injection
            .planned_fault
            .take_if(|(planned_point, ..)| *planned_point == point)
        {
            self.injection.has_triggered = true;
            self.inject_fault(victim, planned_fault);
        }
    }

    pub(in crate::tests) fn inject_fault(&mut self, victim: Victim, fault: Fault) {
        let host_id = victim.host();
        match (victim, fault) {
            (Victim::Source | Victim::Target | Victim::Master, Fault::Kill) => {
                self.kill_host(host_id)
            }
            (Victim::Source | Victim::Target | Victim::Master, Fault::Isolate(duration)) => {
                self.isolate_host(host_id, duration)
            }
            (Victim::Source | Victim::Target | Victim::Master, Fault::Stop(duration)) => {
                self.nodes
                    .get_mut(&host_id)
                    .expect("it is there")
                    .deferred_events = Some(DeferredEvents::new());
                if duration > LEASE {
                    self.report_silence(host_id);
                }
                self.schedule(self.now + duration, SimEvent::VictimResumption(victim));
            }
            (Victim::SourceTasker | Victim::TargetTasker, Fault::Kill) => self.kill_tasker(host_id),
            (
                Victim::SourceTasker | Victim::TargetTasker,
                Fault::Stop(duration) | Fault::Isolate(duration),
            ) => {
                self.nodes
                    .get_mut(&host_id)
                    .expect("it is there")
                    .deferred_orders = Some(Vec::new());
                self.schedule(self.now + duration, SimEvent::VictimResumption(victim));
            }
            (Victim::SourceEngine | Victim::TargetEngine, Fault::Kill) => {
                self.injection.failing_engine_hosts.insert(host_id);
            }
            (
                Victim::SourceEngine | Victim::TargetEngine,
                Fault::Stop(duration) | Fault::Isolate(duration),
            ) => {
                let last_arrival = self
                    .last_arrivals
                    .entry(Channel::Tasker(host_id))
                    .or_default();
                *last_arrival = (*last_arrival).max(self.now + duration);
            }
            (Victim::ResourceManager, Fault::Kill) => self.exit_proc(
                self.injection.resource_manager_proc.expect("there is one"),
                9,
            ),
            (Victim::ResourceManager, Fault::Stop(duration) | Fault::Isolate(duration)) => {
                self.procs[self.injection.resource_manager_proc.expect("there is one")].paused =
                    true;
                self.schedule(self.now + duration, SimEvent::VictimResumption(victim));
            }
            // The hosts can connect again after 1 ms.
            (Victim::Session, Fault::Kill) => self.separate_hosts(host(2), host(3), Micros(1000)),
            (Victim::Session, Fault::Stop(duration)) => {
                self.delay_sessions(|pair| pair == (host(2), host(3)), duration)
            }
            (Victim::Session, Fault::Isolate(duration)) => {
                self.separate_hosts(host(2), host(3), duration)
            }
        }
    }

    /// Notifies the peers of a silent host, after the lease, that the host is lost.
    fn report_silence(&mut self, silent_host: HostId) {
        let sessions: Vec<(HostId, HostId)> = self
            .sessions
            .iter()
            .copied()
            .filter(|(a, b)| [*a, *b].contains(&silent_host))
            .collect();
        for (a, b) in sessions {
            let peer_host = if a == silent_host { b } else { a };
            let at = self.now + LEASE + Micros(self.rng.below(200_000));
            self.schedule(at, SimEvent::LossDetected(peer_host, silent_host));
            // The silent host itself is notified of the loss of its peers when it resumes.
            self.schedule(at, SimEvent::LossDetected(silent_host, peer_host));
        }
    }

    /// Isolates a host from all other hosts. A duration shorter than the lease only delays
    /// messages.
    fn isolate_host(&mut self, isolated_host: HostId, duration: Micros) {
        if duration < LEASE {
            return self.delay_sessions(|(a, b)| [a, b].contains(&isolated_host), duration);
        }
        let sessions: Vec<(HostId, HostId)> = self
            .sessions
            .iter()
            .copied()
            .filter(|(a, b)| [*a, *b].contains(&isolated_host))
            .collect();
        for (a, b) in sessions {
            self.sessions.remove(&(a, b));
            self.drop_in_flight(a, b);
            self.drop_in_flight(b, a);
            for (observer, lost_peer) in [(a, b), (b, a)] {
                // A slave's lease for its master is shorter than the master's lease for a slave.
                let (delay, scatter_us) = if lost_peer == HostId::MASTER {
                    (Micros(LEASE.0 / 2), 100_000)
                } else {
                    (LEASE, 200_000)
                };
                let at = self.now + delay + Micros(self.rng.below(scatter_us));
                self.schedule(at, SimEvent::LossDetected(observer, lost_peer));
            }
        }
    }

    /// Delays all messages on the sessions for which `is_affected` returns true by at least
    /// `duration`.
    fn delay_sessions(&mut self, is_affected: impl Fn((HostId, HostId)) -> bool, duration: Micros) {
        let earliest_arrival = self.now + duration;
        for (a, b) in self
            .sessions
            .iter()
            .copied()
            .filter(|pair_of_hosts| is_affected(*pair_of_hosts))
        {
            for (from, to) in [(a, b), (b, a)] {
                for channel in [Channel::Control(from, to), Channel::Data(from, to)] {
                    let last_arrival = self.last_arrivals.entry(channel).or_default();
                    *last_arrival = earliest_arrival.max(*last_arrival);
                }
            }
        }
        for (channel, last_arrival) in &mut self.last_arrivals {
            if matches!(channel, Channel::Lane((from, to, _), _) if is_affected(host_pair(*from, *to)))
            {
                *last_arrival = earliest_arrival.max(*last_arrival);
            }
        }
    }

    /// Replaces engines that a fault has killed and that have not been used since.
    pub(in crate::tests) fn replace_engines(&mut self) {
        self.injection.failing_engine_hosts.clear();
    }

    /// Resumes a stopped victim. The victim handles the events that arrived while it was stopped.
    pub(super) fn resume_victim(&mut self, victim: Victim) {
        let host_id = victim.host();
        match victim {
            Victim::SourceTasker | Victim::TargetTasker => {
                let deferred_inputs = self
                    .nodes
                    .get_mut(&host_id)
                    .and_then(|node| node.deferred_orders.take());
                deferred_inputs
                    .into_iter()
                    .flatten()
                    .for_each(|message| self.send_to_tasker(host_id, message));
                self.check_tasker_lease(host_id);
            }
            Victim::ResourceManager => {
                let proc = self.injection.resource_manager_proc.expect("there is one");
                self.procs[proc].paused = false;
                self.resume_proc(proc);
            }
            _ => {
                let deferred_inputs = self
                    .nodes
                    .get_mut(&host_id)
                    .and_then(|node| node.deferred_events.take());
                self.carry_out_outputs(host_id);
                deferred_inputs
                    .into_iter()
                    .flatten()
                    .for_each(|event| self.handle(host_id, event));
            }
        }
    }

    /// Passes a daemon's message to its tasker. The message is lost if the tasker is dead.
    pub(super) fn send_to_tasker(&mut self, host_id: HostId, message: ToTasker) {
        let node = self.nodes.get_mut(&host_id).expect("it speaks");
        if node.is_tasker_dead {
            return;
        }
        match &mut node.deferred_orders {
            Some(deferred_orders) => deferred_orders.push(message),
            None => self.handle_tasker_order(host_id, message),
        }
    }

    /// Returns the result of [`Sim::step_result`], or an error if the engine of this host was
    /// killed.
    pub(super) fn engine_step_result<T>(
        &mut self,
        host_id: HostId,
        success_value: T,
    ) -> Result<T, Failure> {
        if self.injection.failing_engine_hosts.remove(&host_id) {
            return Err(Failure::Engine("it was killed".into()));
        }
        self.random_step_result(success_value)
    }

    /// Reports that the remaining memory of a post-copy task has arrived. If the memory is lost,
    /// reports the failure and kills the task.
    pub(super) fn end_memory_transfer(
        &mut self,
        host_id: HostId,
        migration: MigrationId,
        source_host: HostId,
        tid: Tid,
    ) {
        let source = &self.nodes[&source_host];
        let is_lost = !source.is_alive
            || self.is_host_removed(source_host)
            || self.injection.memory_lost_hosts.contains(&source_host);
        if !is_lost && (source.deferred_events.is_some() || source.deferred_orders.is_some()) {
            let retry_event = SimEvent::MemoryTransferEnd(host_id, migration, source_host, tid);
            return self.schedule(self.now + MEMORY_RETRY_INTERVAL, retry_event);
        }
        let engine_failed = self.injection.failing_engine_hosts.contains(&source_host)
            || self.injection.failing_engine_hosts.contains(&host_id);
        let Some(proc) = self.find_spawned_proc(host_id, tid) else {
            return;
        };
        let has_failed = is_lost || engine_failed || self.session_is_broken();
        let reason = || Failure::Images("the rest of its memory cannot be fetched".into());
        self.send_from_tasker(
            host_id,
            FromTasker::MemoryArrived {
                migration,
                result: if has_failed { Err(reason()) } else { Ok(()) },
            },
        );
        if has_failed {
            self.exit_proc(proc, 9);
        }
    }

    /// True while any two separated hosts cannot connect again.
    pub(super) fn session_is_broken(&self) -> bool {
        self.queue
            .values()
            .any(|event| matches!(event, SimEvent::Reconnection(..)))
    }
}
