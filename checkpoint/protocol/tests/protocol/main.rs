//! Tests the migration protocol with faults: one task, two hosts, a coordinator, and failures at
//! random times.
//!
//! The two copies of the task, the daemons and the network are simulated; the three state machines
//! are the production code.

mod faults;
#[path = "../../../../libpvm/proto/tests/rng/mod.rs"]
mod rng;

use checkpoint_protocol::{
    Coordinator, CoordinatorOutput, InspectedTask, Source, SourceEvent, SourceOutput, Target,
    TargetEvent, TargetOutput,
};
use rng::Rng;
use sempa_proto::engine::Engine;
use sempa_proto::event::EventKind;
use sempa_proto::migration::{
    Failure, MigrationCause, MigrationOrder, Refusal, Step, StepReport, TaskFacts, Usage,
};
use sempa_proto::suspend::{self, Suspensions};
use sempa_proto::task::{MigrationError, MigrationReport};
use sempa_proto::tasker::DumpReport;
use sempa_proto::{HostId, Micros, MigrationId, RequestId, Tid};
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

/// Time from the report that a host is lost until its copy of the task is considered dead.
const SOURCE_DEATH_DELAY: Micros = Micros::from_secs(2);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CopyState {
    None,
    Running,
    Stopped,
    Dead,
}

/// A simulated event: a message in transit, or the completion of work.
#[derive(Debug)]
enum SimEvent {
    Order(HostId, sempa_proto::migration::Migration, MigrationOrder),
    Report(HostId, MigrationId, StepReport),
    Source(SourceEvent),
    Target(TargetEvent),
    LocationRecorded(MigrationId),
    LocationAnnounced(MigrationId),
    LossDetected(HostId),
    LoseHost(HostId),
    KillTask,
    /// A user requests to suspend the task (true) or to resume it (false).
    SuspendRequest(bool),
    ForwardedRequest(HostId, MigrationId, NumberedRequest),
    SuspendDecision(Option<Suspensions>, NumberedRequest),
}

/// A suspend request (true) or resume request (false), and its number, counted from 1.
type NumberedRequest = (bool, usize);

#[derive(Default)]
struct Faults {
    step_fails_percent: u64,
    step_stalls_percent: u64,
    /// Percentage of image transfers that complete although the source receives no acknowledgement.
    /// The source reports a failure after some time.
    lost_ack_percent: u64,
    /// The host that is lost, and the time of the loss in microseconds.
    lost_host: Option<(HostId, u64)>,
    task_killed_at_us: Option<u64>,
    refuses_task: bool,
    /// True if post-copy is used, unless a step of the post-copy fails.
    uses_post_copy: bool,
    /// True if pre-copy is used in addition to post-copy.
    uses_pre_copy: bool,
    /// Time of each request in microseconds, and the request: suspend (true) or resume (false).
    suspend_requests: Vec<(u64, bool)>,
}

struct Simulation {
    rng: Rng,
    /// The engine that the target chooses. For every third seed this is the engine that asks the
    /// program to exit and restarts it.
    engine: Engine,
    faults: Faults,
    now: Micros,
    event_queue: BTreeMap<(Micros, u64), SimEvent>,
    next_event_number: u64,
    /// Time of the last arrival in each channel. Channels preserve the order of their events.
    last_arrival: HashMap<(u16, u16), Micros>,
    coordinator: Coordinator,
    source: Option<Source>,
    target: Option<Target>,
    /// States of the source's copy and of the target's copy.
    copies: (CopyState, CopyState),
    lost_hosts: Vec<HostId>,
    source_is_buffering: bool,
    /// True when the source has opened the memory stream.
    is_memory_stream_open: bool,
    target_receives_pre_copy: bool,
    pre_copy_discarded: bool,
    /// True when the source has deleted its images and closed its streams.
    images_dropped: bool,
    ownership_transferred: bool,
    location: HostId,
    result: Option<Result<MigrationReport, MigrationError>>,
    /// Values of the event that ends a successful migration: resident memory in bytes, duration for
    /// which the task was stopped, and duration until all memory had arrived.
    final_event_values: Option<(u64, Micros, Micros)>,
    /// Suspensions of the source's copy and of the target's copy, as known to their daemons.
    suspensions: (Suspensions, Suspensions),
    has_target_run: bool,
    /// All requests so far, in order: suspend (true) or resume (false).
    requests: Vec<bool>,
    /// The most recent request, if it was acknowledged.
    acknowledged_request: Option<NumberedRequest>,
    /// The host that must acknowledge the most recent request.
    awaited_host: Option<HostId>,
}

fn suspend_order(is_suspend: bool) -> suspend::SuspendOrder {
    let tid = Tid::for_task(host(2), 1).expect("good");
    suspend::SuspendOrder {
        tid,
        suspend: is_suspend,
        cause: suspend::SuspendCause::Requested { requested_by: tid },
    }
}

fn host(index: u16) -> HostId {
    HostId::new(index).expect("small")
}

impl Simulation {
    fn new(seed: u64, faults: Faults) -> Self {
        let mut simulation = Self {
            rng: Rng(seed | 1),
            engine: if seed.is_multiple_of(3) {
                Engine::Restart { timeout_s: 5 }
            } else {
                Engine::Criu
            },
            faults,
            now: Micros(0),
            event_queue: BTreeMap::new(),
            next_event_number: 0,
            last_arrival: HashMap::new(),
            coordinator: Coordinator::new(),
            source: None,
            target: None,
            copies: (CopyState::Running, CopyState::None),
            lost_hosts: Vec::new(),
            source_is_buffering: false,
            is_memory_stream_open: false,
            target_receives_pre_copy: false,
            pre_copy_discarded: false,
            images_dropped: false,
            ownership_transferred: false,
            location: host(2),
            result: None,
            final_event_values: None,
            suspensions: Default::default(),
            has_target_run: false,
            requests: Vec::new(),
            acknowledged_request: None,
            awaited_host: None,
        };
        let tid = Tid::for_task(host(2), 1).expect("good");
        simulation
            .coordinator
            .begin_migration(
                Micros(0),
                tid,
                host(2),
                host(3),
                MigrationCause::Requested { requested_by: tid },
            )
            .expect("nothing forbids it");
        if let Some((failed_host, time_us)) = simulation.faults.lost_host {
            simulation.schedule(Micros(time_us), SimEvent::LoseHost(failed_host));
        }
        if let Some(time_us) = simulation.faults.task_killed_at_us {
            simulation.schedule(Micros(time_us), SimEvent::KillTask);
        }
        for (time_us, is_suspend) in simulation.faults.suspend_requests.clone() {
            simulation.schedule(Micros(time_us), SimEvent::SuspendRequest(is_suspend));
        }
        simulation
    }

    fn schedule(&mut self, time: Micros, sim_event: SimEvent) {
        self.next_event_number += 1;
        self.event_queue
            .insert((time, self.next_event_number), sim_event);
    }

    fn schedule_soon(&mut self, sim_event: SimEvent) {
        let time = self.now + Micros(self.rng.below(5_000));
        // Each tasker answers in the order of its requests.
        let channel = match &sim_event {
            SimEvent::Source(_) => (2, 0),
            SimEvent::Target(_) => (3, 0),
            _ => return self.schedule(time, sim_event),
        };
        let last_arrival = self.last_arrival.entry(channel).or_default();
        let time = time.max(*last_arrival);
        *last_arrival = time;
        self.schedule(time, sim_event);
    }

    fn send(&mut self, from: HostId, to: HostId, sim_event: SimEvent) {
        if self.lost_hosts.contains(&from) || self.lost_hosts.contains(&to) {
            return;
        }
        let time = self.now + Micros(self.rng.below(5_000));
        let last_arrival = self
            .last_arrival
            .entry((from.index(), to.index()))
            .or_default();
        let time = time.max(*last_arrival);
        *last_arrival = time;
        self.schedule(time, sim_event);
    }

    /// Schedules the answer of a tasker: a success, a failure, or no answer.
    fn schedule_tasker_answer<T>(
        &mut self,
        answer: T,
        to_event: impl Fn(Result<T, Failure>) -> SimEvent,
    ) {
        if self.rng.below(100) < self.faults.step_stalls_percent {
            return;
        }
        let result = if self.rng.below(100) < self.faults.step_fails_percent {
            Err(Failure::Engine("dice".into()))
        } else {
            Ok(answer)
        };
        self.schedule_soon(to_event(result));
    }

    fn run_to_end(mut self) -> Self {
        for _ in 0..10_000 {
            self.execute_outputs();
            self.check_single_copy();
            let next_event = self.event_queue.keys().next().copied();
            let next_deadline = self.coordinator.next_deadline();
            match (next_event, next_deadline) {
                (Some((time, _)), next_deadline) if next_deadline.is_none_or(|t| time <= t) => {
                    let ((time, _), sim_event) = self.event_queue.pop_first().expect("just seen");
                    self.now = self.now.max(time);
                    self.handle(sim_event);
                }
                (_, Some(time)) => {
                    self.now = self.now.max(time);
                    self.coordinator.on_timer(self.now);
                }
                (None, None) => return self,
                (Some(_), None) => unreachable!("the guard holds without a timer"),
            }
        }
        panic!("the protocol does not come to rest");
    }

    fn handle(&mut self, sim_event: SimEvent) {
        match sim_event {
            SimEvent::Order(order_host, ..) if self.lost_hosts.contains(&order_host) => {}
            SimEvent::Order(_, order_migration, MigrationOrder::Inspect) => {
                self.source = Some(Source::new(order_migration))
            }
            SimEvent::Order(
                order_host,
                order_migration,
                MigrationOrder::Prepare {
                    facts,
                    supports_post_copy,
                    pre_copy: uses_pre_copy,
                    ..
                },
            ) => {
                assert_eq!(order_host, order_migration.to);
                self.target = Some(Target::new(
                    order_migration,
                    facts,
                    PathBuf::from("/token"),
                    supports_post_copy,
                    uses_pre_copy,
                ));
            }
            SimEvent::Order(order_host, order_migration, order)
                if order_host == order_migration.from =>
            {
                if let MigrationOrder::Resume { suspensions } = order {
                    self.suspensions.0 = suspensions;
                }
                if self.source.is_none() && order == MigrationOrder::Release {
                    // The task has exited, so the migration no longer exists at the source.
                    let report = StepReport::Failed {
                        step: Step::KillSource,
                        failure: Failure::TaskEnded,
                    };
                    return self.send(
                        order_host,
                        HostId::MASTER,
                        SimEvent::Report(order_host, order_migration.id, report),
                    );
                }
                self.handle_source_event(SourceEvent::Order(order));
            }
            SimEvent::Order(_, _, order) => {
                if let MigrationOrder::Run(source_state) = &order {
                    (self.suspensions.1, self.has_target_run) = (source_state.suspensions, true);
                }
                self.handle_target_event(TargetEvent::Order(order));
            }
            SimEvent::SuspendRequest(suspend) => self.request_suspension(suspend),
            SimEvent::ForwardedRequest(from, id, (suspend, number)) => {
                self.coordinator.on_suspend_request(
                    from,
                    id,
                    RequestId(number as u64),
                    &suspend_order(suspend),
                );
            }
            SimEvent::SuspendDecision(decision, request) => {
                self.on_suspend_decision(decision, request)
            }
            SimEvent::Report(from, id, report) => {
                self.coordinator.on_report(self.now, from, id, report)
            }
            SimEvent::Source(event) => self.handle_source_event(event),
            SimEvent::Target(event) => self.handle_target_event(event),
            SimEvent::LocationRecorded(id) => {
                let result = if self.rng.below(100) < self.faults.step_fails_percent {
                    Err(Failure::Io("disk".into()))
                } else {
                    Ok(())
                };
                self.coordinator.on_location_recorded(id, result);
            }
            SimEvent::LocationAnnounced(id) => self.coordinator.on_location_announced(self.now, id),
            SimEvent::LossDetected(host) => {
                let source_dead_at = self.now + SOURCE_DEATH_DELAY;
                self.coordinator
                    .on_host_lost(self.now, host, source_dead_at);
            }
            SimEvent::LoseHost(failed_host) => self.lose_host(failed_host),
            SimEvent::KillTask => {
                if self.copies.0 == CopyState::Running || self.copies.0 == CopyState::Stopped {
                    self.copies.0 = CopyState::Dead;
                    self.handle_source_event(SourceEvent::TaskExited);
                }
            }
        }
    }

    /// Removes a host with its copy of the task. The loss is detected later.
    fn lose_host(&mut self, failed_host: HostId) {
        self.lost_hosts.push(failed_host);
        if failed_host == host(2) {
            (self.source, self.copies.0) = (None, CopyState::Dead);
        } else {
            (self.target, self.copies.1) = (None, CopyState::Dead);
        }
        self.schedule_soon(SimEvent::LossDetected(failed_host));
    }

    /// Sends a suspend request to the daemon of the task's current host, if the previous request
    /// was acknowledged.
    fn request_suspension(&mut self, is_suspend: bool) {
        if self
            .awaited_host
            .is_some_and(|task_host| !self.lost_hosts.contains(&task_host))
        {
            return self.schedule(
                self.now + Micros(1000),
                SimEvent::SuspendRequest(is_suspend),
            );
        }
        self.requests.push(is_suspend);
        let request = (is_suspend, self.requests.len());
        let task_host = self.location;
        (self.acknowledged_request, self.awaited_host) = (None, None);
        if self.lost_hosts.contains(&task_host) {
            return;
        }
        let source = self
            .source
            .as_ref()
            .filter(|source| task_host == host(2) && source.coordinator_decides_suspension());
        let target = self
            .target
            .as_ref()
            .filter(|_| task_host == host(3) && !self.has_target_run);
        if let Some(id) = source
            .map(|s| s.migration().id)
            .or(target.map(|t| t.migration().id))
        {
            self.awaited_host = Some(task_host);
            return self.send(
                task_host,
                HostId::MASTER,
                SimEvent::ForwardedRequest(task_host, id, request),
            );
        }
        let suspensions = if task_host == host(2) {
            &mut self.suspensions.0
        } else {
            &mut self.suspensions.1
        };
        *suspensions = suspensions.apply_order(&suspend_order(is_suspend));
        self.acknowledged_request = Some(request);
    }

    fn on_suspend_decision(&mut self, suspensions: Option<Suspensions>, request: NumberedRequest) {
        if request.1 != self.requests.len() {
            return;
        }
        self.awaited_host = None;
        let Some(suspensions) = suspensions else {
            return;
        };
        if self.location == host(2) || !self.has_target_run {
            self.suspensions.0 = suspensions;
        }
        if self.has_target_run {
            self.suspensions.1 = suspensions;
        }
        self.acknowledged_request = Some(request);
    }

    fn handle_source_event(&mut self, event: SourceEvent) {
        // Update the simulated copy to its state at the time of the answer.
        match &event {
            SourceEvent::Stopped(Ok(())) if self.copies.0 == CopyState::Running => {
                self.copies.0 = CopyState::Stopped
            }
            SourceEvent::TaskResumed if self.copies.0 == CopyState::Stopped => {
                self.copies.0 = CopyState::Running
            }
            SourceEvent::Killed(_) => self.copies.0 = CopyState::Dead,
            _ => {}
        }
        let set_suspensions = |inspected_task| InspectedTask {
            suspensions: self.suspensions.0,
            ..inspected_task
        };
        let event = match event {
            SourceEvent::Inspected(result) => SourceEvent::Inspected(result.map(set_suspensions)),
            event => event,
        };
        if let Some(source) = &mut self.source {
            source.handle(event);
        }
    }

    fn handle_target_event(&mut self, event: TargetEvent) {
        match &event {
            TargetEvent::Restored(Ok(())) if self.copies.1 == CopyState::None => {
                self.copies.1 = CopyState::Stopped
            }
            TargetEvent::RunCompleted(Ok(())) if self.copies.1 == CopyState::Stopped => {
                self.copies.1 = CopyState::Running
            }
            TargetEvent::Discarded | TargetEvent::MemoryArrived(Err(_)) => {
                self.copies.1 = CopyState::Dead
            }
            _ => {}
        }
        if let Some(target) = &mut self.target {
            target.handle(event);
        }
    }

    fn execute_outputs(&mut self) {
        let master = HostId::MASTER;
        while let Some(output) = self.coordinator.poll() {
            match output {
                CoordinatorOutput::Order {
                    host,
                    migration,
                    order,
                } => self.send(master, host, SimEvent::Order(host, migration, order)),
                CoordinatorOutput::RecordLocation(migration) => {
                    self.schedule_soon(SimEvent::LocationRecorded(migration.id))
                }
                CoordinatorOutput::AnnounceLocation(migration) => {
                    self.location = migration.to;
                    self.schedule_soon(SimEvent::LocationAnnounced(migration.id));
                }
                CoordinatorOutput::LogEvent(EventKind::Migrated {
                    resident,
                    frozen,
                    transfer_time,
                    ..
                }) => {
                    self.final_event_values = Some((resident, frozen, transfer_time));
                }
                CoordinatorOutput::LogEvent(_) => {}
                CoordinatorOutput::SuspendDecided {
                    host,
                    request,
                    suspensions,
                    ..
                } => {
                    let request_number = request.0 as usize;
                    let is_suspend = self.requests[request_number - 1];
                    self.send(
                        master,
                        host,
                        SimEvent::SuspendDecision(suspensions, (is_suspend, request_number)),
                    );
                }
                CoordinatorOutput::Ended { result, .. } => {
                    assert!(self.result.replace(result).is_none(), "a move ends once");
                }
            }
        }
        while let Some(output) = self.source.as_mut().and_then(Source::poll) {
            self.execute_source_output(output);
        }
        while let Some(output) = self.target.as_mut().and_then(Target::poll) {
            self.execute_target_output(output);
        }
    }

    fn execute_source_output(&mut self, output: SourceOutput) {
        let id = self.source.as_ref().expect("it spoke").migration().id;
        match output {
            SourceOutput::Report(report) => self.send(
                host(2),
                HostId::MASTER,
                SimEvent::Report(host(2), id, report),
            ),
            SourceOutput::Inspect => self.inspect_task(),
            SourceOutput::OpenMemoryStream => {
                assert!(
                    !std::mem::replace(&mut self.is_memory_stream_open, true),
                    "one way for one move"
                );
            }
            SourceOutput::PreCopy => {
                assert!(
                    self.is_memory_stream_open
                        && !self.source_is_buffering
                        && self.target_receives_pre_copy,
                    "the other end is ready, and the task runs"
                );
                self.schedule_tasker_answer(77, |result| {
                    SimEvent::Source(SourceEvent::PreCopied(result))
                });
            }
            SourceOutput::DiscardPreCopy => self.pre_copy_discarded = true,
            SourceOutput::BufferIncoming => self.source_is_buffering = true,
            SourceOutput::Quiesce { .. } => {
                self.schedule_tasker_answer((), |_| SimEvent::Source(SourceEvent::Quiesced))
            }
            SourceOutput::RequestExit { engine, .. } => {
                assert_eq!(engine, self.engine);
                self.schedule_tasker_answer((), |result| {
                    SimEvent::Source(SourceEvent::Stopped(result))
                });
            }
            SourceOutput::SendRecord => self.schedule_tasker_answer(0, |result| {
                SimEvent::Target(TargetEvent::ImagesReceived(result))
            }),
            SourceOutput::Stop => self.schedule_tasker_answer((), |result| {
                SimEvent::Source(SourceEvent::Stopped(result))
            }),
            SourceOutput::Dump { post_copy } => {
                assert_eq!(post_copy, self.is_memory_stream_open);
                self.schedule_tasker_answer(DumpReport::default(), |result| {
                    SimEvent::Source(SourceEvent::Dumped(result))
                });
            }
            SourceOutput::StartSendingImages => self.start_sending_images(),
            SourceOutput::FinishSendingImages => self.finish_sending_images(),
            SourceOutput::ResumeTask => {
                self.schedule_soon(SimEvent::Source(SourceEvent::TaskResumed))
            }
            SourceOutput::WriteResumeToken => {
                self.schedule_soon(SimEvent::Source(SourceEvent::Reconnected))
            }
            SourceOutput::DeliverBuffered => self.source_is_buffering = false,
            SourceOutput::KillSource => {
                self.schedule_soon(SimEvent::Source(SourceEvent::Killed(Usage::default())))
            }
            SourceOutput::TransferOwnership => self.ownership_transferred = true,
            SourceOutput::DropImages => self.images_dropped = true,
            SourceOutput::AwaitReplies
            | SourceOutput::SaveTaskState { .. }
            | SourceOutput::CopyStateFiles
            | SourceOutput::Upload => {
                panic!("a move keeps no images")
            }
            SourceOutput::Done => self.source = None,
        }
    }

    /// Answers an inspection request for the task, as the faults of the run determine.
    fn inspect_task(&mut self) {
        let (refuses_task, supports_post_copy) =
            (self.faults.refuses_task, self.faults.uses_post_copy);
        let supports_pre_copy = self.faults.uses_pre_copy;
        self.schedule_tasker_answer((), move |_| {
            SimEvent::Source(SourceEvent::Inspected(if refuses_task {
                Err(Refusal::Pinned)
            } else {
                let facts = TaskFacts {
                    memory_bytes: RESIDENT_BYTES,
                    ..TaskFacts::default()
                };
                Ok(InspectedTask {
                    supports_post_copy,
                    supports_pre_copy,
                    facts,
                    ..InspectedTask::default()
                })
            }))
        });
    }

    fn start_sending_images(&mut self) {
        if self.rng.below(100) < self.faults.step_fails_percent {
            let transfer_error = || Failure::Images("cut".into());
            self.schedule_tasker_answer((), move |_| {
                SimEvent::Source(SourceEvent::ImagesSent(Err(transfer_error())))
            });
            self.schedule_tasker_answer((), move |_| {
                SimEvent::Target(TargetEvent::ImagesReceived(Err(transfer_error())))
            });
        }
    }

    fn finish_sending_images(&mut self) {
        let has_failed = self.rng.below(100) < self.faults.step_fails_percent;
        let is_ack_lost = self.rng.below(100) < self.faults.lost_ack_percent;
        let transfer_error = || Err(Failure::Images("cut".into()));
        let event = SimEvent::Source(SourceEvent::ImagesSent(if has_failed || is_ack_lost {
            transfer_error()
        } else {
            Ok(())
        }));
        if is_ack_lost {
            let time = self.now + Micros(self.rng.below(60_000));
            self.schedule(time, event);
        } else {
            self.schedule_soon(event);
        }
        if !has_failed {
            self.schedule_tasker_answer(1, |result| {
                SimEvent::Target(TargetEvent::ImagesReceived(result))
            });
        }
    }

    fn execute_target_output(&mut self, output: TargetOutput) {
        let id = self.target.as_ref().expect("it spoke").migration().id;
        match output {
            TargetOutput::Report(report) => self.send(
                host(3),
                HostId::MASTER,
                SimEvent::Report(host(3), id, report),
            ),
            TargetOutput::Prepare(_) => {
                let engine = self.engine;
                self.schedule_tasker_answer((), move |result| {
                    let verdict = if result.is_ok() {
                        vec![]
                    } else {
                        vec![Refusal::Pinned]
                    };
                    SimEvent::Target(TargetEvent::Prepared {
                        verdict,
                        supports_post_copy: true,
                        engine,
                    })
                });
            }
            TargetOutput::ReceivePreCopy => self.target_receives_pre_copy = true,
            TargetOutput::Restore => self.schedule_tasker_answer((), |result| {
                SimEvent::Target(TargetEvent::Restored(result))
            }),
            TargetOutput::Run(_) => {
                self.schedule_soon(SimEvent::Target(TargetEvent::RunCompleted(Ok(()))));
                if self.target.as_ref().is_some_and(Target::uses_post_copy) {
                    // This step has no deadline, so the answer must not be lost.
                    let stalls_percent = std::mem::take(&mut self.faults.step_stalls_percent);
                    self.schedule_tasker_answer((), |result| {
                        SimEvent::Target(TargetEvent::MemoryArrived(result))
                    });
                    self.faults.step_stalls_percent = stalls_percent;
                }
            }
            TargetOutput::Discard => self.schedule_soon(SimEvent::Target(TargetEvent::Discarded)),
            TargetOutput::ExpectImages
            | TargetOutput::WriteResumeToken
            | TargetOutput::DropImages => {}
            TargetOutput::Done => self.target = None,
        }
    }

    /// Asserts that the source's copy is dead when the target's copy runs.
    fn check_single_copy(&self) {
        // A stopped copy counts as alive because it could continue.
        assert!(
            self.copies.1 != CopyState::Running || self.copies.0 == CopyState::Dead,
            "two live copies: {:?}",
            self.copies
        );
    }
}

/// Resident memory of the task in bytes.
const RESIDENT_BYTES: u64 = 2 << 30;

/// Simulates one migration until no event remains.
fn simulate(seed: u64, faults: Faults) -> Simulation {
    Simulation::new(seed, faults).run_to_end()
}

/// Without faults the task migrates, and the source transfers the ownership and all memory to the
/// target.
#[test]
fn migration_without_faults_succeeds() {
    for seed in 1..500 {
        let simulation = simulate(seed, Faults::default());
        assert!(
            matches!(simulation.result, Some(Ok(_))),
            "seed {seed}: {:?}",
            simulation.result
        );
        assert_eq!(
            simulation.copies,
            (CopyState::Dead, CopyState::Running),
            "seed {seed}"
        );
        assert!(
            simulation.ownership_transferred
                && simulation.source.is_none()
                && simulation.target.is_none(),
            "seed {seed}"
        );
        assert_eq!(simulation.location, host(3));
    }
}

/// The final event reports the resident memory, the duration for which the task was stopped, and
/// the duration until all memory had arrived.
#[test]
fn event_reports_memory_and_transfer_time() {
    let mut longer_count = 0;
    for seed in 1..200 {
        for post_copy in [false, true] {
            let simulation = simulate(
                seed,
                Faults {
                    uses_post_copy: post_copy,
                    ..Faults::default()
                },
            );
            let (resident_bytes, stopped_duration, transfer_time) =
                simulation.final_event_values.expect("it has moved");
            match (simulation.engine, post_copy) {
                // All memory may have arrived before the task runs.
                (Engine::Criu, true) => {
                    assert!(
                        resident_bytes == RESIDENT_BYTES && transfer_time >= stopped_duration,
                        "seed {seed}"
                    );
                    longer_count += u32::from(transfer_time > stopped_duration);
                }
                (Engine::Criu, false) => {
                    assert!(
                        resident_bytes == RESIDENT_BYTES && transfer_time == stopped_duration,
                        "seed {seed}"
                    )
                }
                // A program that is restarted sends no memory.
                _ => assert_eq!(resident_bytes, 0, "seed {seed}"),
            }
        }
    }
    assert!(
        longer_count > 20,
        "memory that follows comes later as a rule: {longer_count}"
    );
}

/// A task that the source refuses to migrate keeps running at the source.
#[test]
fn refused_task_keeps_running() {
    let simulation = simulate(
        7,
        Faults {
            refuses_task: true,
            ..Faults::default()
        },
    );
    let Some(Err(error)) = simulation.result else {
        panic!("{:?}", simulation.result)
    };
    assert_eq!(error.step, Step::Inspect);
    assert_eq!(error.failure, Failure::Refused(vec![Refusal::Pinned]));
    assert_eq!(simulation.copies, (CopyState::Running, CopyState::None));
}

/// Whichever host is lost, the surviving copy is suspended exactly if the last acknowledged request
/// was a suspend request.
#[test]
fn surviving_copy_obeys_last_suspend_request() {
    let (mut target_count, mut source_count, mut source_lost_count) = (0, 0, 0);
    for seed in 1..40_000 {
        let mut rng = Rng(seed * 13 + 5);
        let mut suspend_requests: Vec<(u64, bool)> = (0..1 + rng.below(4))
            .map(|_| (rng.below(60_000), rng.below(2) == 0))
            .collect();
        suspend_requests.sort_unstable();
        let lost_host = (seed % 3 > 0).then(|| (host(1 + (seed % 3) as u16), rng.below(60_000)));
        let step_fails_percent = 3 * (seed % 2);
        let simulation = simulate(
            seed,
            Faults {
                suspend_requests,
                lost_host,
                step_fails_percent,
                ..Faults::default()
            },
        );
        let Some((is_suspended, _)) = simulation.acknowledged_request else {
            continue;
        };
        if simulation.copies.1 == CopyState::Running {
            assert_eq!(
                simulation.suspensions.1.is_suspended(),
                is_suspended,
                "seed {seed}: at the target"
            );
            target_count += u32::from(is_suspended);
            source_lost_count +=
                u32::from(is_suspended && simulation.lost_hosts.contains(&host(2)));
        } else if simulation.copies.0 == CopyState::Running {
            assert_eq!(
                simulation.suspensions.0.is_suspended(),
                is_suspended,
                "seed {seed}: at the source"
            );
            source_count += u32::from(is_suspended);
        }
    }
    assert!(
        target_count > 1000 && source_count > 1000 && source_lost_count > 100,
        "{target_count} {source_count} {source_lost_count}"
    );
}
