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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Copy {
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
    stalls_percent: u64,
    /// Percentage of image transfers that complete although the source receives no acknowledgement.
    /// The source reports a failure after some time.
    lost_ack_percent: u64,
    lost_host: Option<(HostId, u64)>,
    task_killed_at: Option<u64>,
    refuse: bool,
    /// True if post-copy is used, unless a step of it fails.
    post_copy: bool,
    /// True if pre-copy is used in addition to post-copy.
    pre_copy: bool,
    /// Time of each request in microseconds, and its kind: suspend (true) or resume (false).
    suspend_requests: Vec<(u64, bool)>,
}

struct Simulation {
    dice: Rng,
    /// The engine that the target chooses. For every third seed it is the engine that asks the
    /// program to exit and restarts it.
    engine: Engine,
    faults: Faults,
    now: Micros,
    queue: BTreeMap<(Micros, u64), SimEvent>,
    next_event_number: u64,
    /// Time of the last arrival in each channel. Channels preserve the order of their events.
    last_arrival: HashMap<(u16, u16), Micros>,
    coordinator: Coordinator,
    source: Option<Source>,
    target: Option<Target>,
    copies: (Copy, Copy),
    lost_hosts: Vec<HostId>,
    source_is_buffering: bool,
    /// True when the source has opened the memory stream.
    memory_stream_open: bool,
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
    target_runs: bool,
    /// All requests so far, in order: suspend (true) or resume (false).
    requests: Vec<bool>,
    /// The most recent request, if it was acknowledged.
    acknowledged: Option<NumberedRequest>,
    /// The host that must acknowledge the most recent request.
    awaited_host: Option<HostId>,
}

fn suspend_order(suspend: bool) -> suspend::SuspendOrder {
    let tid = Tid::task(host(2), 1).expect("good");
    suspend::SuspendOrder {
        tid,
        suspend,
        cause: suspend::SuspendCause::Requested { requested_by: tid },
    }
}

fn host(index: u16) -> HostId {
    HostId::new(index).expect("small")
}

impl Simulation {
    fn new(seed: u64, faults: Faults) -> Simulation {
        let mut world = Simulation {
            dice: Rng(seed | 1),
            engine: if seed.is_multiple_of(3) {
                Engine::Restart { timeout_s: 5 }
            } else {
                Engine::Criu
            },
            faults,
            now: Micros(0),
            queue: BTreeMap::new(),
            next_event_number: 0,
            last_arrival: HashMap::new(),
            coordinator: Coordinator::new(),
            source: None,
            target: None,
            copies: (Copy::Running, Copy::None),
            lost_hosts: Vec::new(),
            source_is_buffering: false,
            memory_stream_open: false,
            target_receives_pre_copy: false,
            pre_copy_discarded: false,
            images_dropped: false,
            ownership_transferred: false,
            location: host(2),
            result: None,
            final_event_values: None,
            suspensions: Default::default(),
            target_runs: false,
            requests: Vec::new(),
            acknowledged: None,
            awaited_host: None,
        };
        let tid = Tid::task(host(2), 1).expect("good");
        world
            .coordinator
            .begin(
                Micros(0),
                tid,
                host(2),
                host(3),
                MigrationCause::Requested { requested_by: tid },
            )
            .expect("nothing forbids it");
        if let Some((lost, at)) = world.faults.lost_host {
            world.schedule(Micros(at), SimEvent::LoseHost(lost));
        }
        if let Some(at) = world.faults.task_killed_at {
            world.schedule(Micros(at), SimEvent::KillTask);
        }
        for (at, suspend) in world.faults.suspend_requests.clone() {
            world.schedule(Micros(at), SimEvent::SuspendRequest(suspend));
        }
        world
    }

    fn schedule(&mut self, at: Micros, item: SimEvent) {
        self.next_event_number += 1;
        self.queue.insert((at, self.next_event_number), item);
    }

    fn schedule_soon(&mut self, item: SimEvent) {
        let at = self.now + Micros(self.dice.below(5_000));
        // Each tasker answers in the order of its requests.
        let channel = match &item {
            SimEvent::Source(_) => (2, 0),
            SimEvent::Target(_) => (3, 0),
            _ => return self.schedule(at, item),
        };
        let last = self.last_arrival.entry(channel).or_default();
        let at = at.max(*last);
        *last = at;
        self.schedule(at, item);
    }

    fn send(&mut self, from: HostId, to: HostId, item: SimEvent) {
        if self.lost_hosts.contains(&from) || self.lost_hosts.contains(&to) {
            return;
        }
        let at = self.now + Micros(self.dice.below(5_000));
        let last = self
            .last_arrival
            .entry((from.index(), to.index()))
            .or_default();
        let at = at.max(*last);
        *last = at;
        self.schedule(at, item);
    }

    /// Schedules the answer of a tasker: a success, a failure, or no answer.
    fn answer_as_tasker<T>(
        &mut self,
        answer: T,
        to_event: impl Fn(Result<T, Failure>) -> SimEvent,
    ) {
        if self.dice.below(100) < self.faults.stalls_percent {
            return;
        }
        let result = if self.dice.below(100) < self.faults.step_fails_percent {
            Err(Failure::Engine("dice".into()))
        } else {
            Ok(answer)
        };
        self.schedule_soon(to_event(result));
    }

    fn run(mut self) -> Simulation {
        for _ in 0..10_000 {
            self.run_outputs();
            self.check_single_copy();
            let next = self.queue.keys().next().copied();
            let timer = self.coordinator.next_deadline();
            match (next, timer) {
                (Some((at, _)), timer) if timer.is_none_or(|t| at <= t) => {
                    let ((at, _), item) = self.queue.pop_first().expect("just seen");
                    self.now = self.now.max(at);
                    self.handle(item);
                }
                (_, Some(at)) => {
                    self.now = self.now.max(at);
                    self.coordinator.on_timer(self.now);
                }
                (None, None) => return self,
                (Some(_), None) => unreachable!("the guard holds without a timer"),
            }
        }
        panic!("the protocol does not come to rest");
    }

    fn handle(&mut self, item: SimEvent) {
        match item {
            SimEvent::Order(at, ..) if self.lost_hosts.contains(&at) => {}
            SimEvent::Order(_, of, MigrationOrder::Inspect) => self.source = Some(Source::new(of)),
            SimEvent::Order(
                at,
                of,
                MigrationOrder::Prepare {
                    facts,
                    supports_post_copy: memory_can_follow,
                    pre_copy: pre_copies,
                    ..
                },
            ) => {
                assert_eq!(at, of.to);
                self.target = Some(Target::new(
                    of,
                    facts,
                    PathBuf::from("/token"),
                    memory_can_follow,
                    pre_copies,
                ));
            }
            SimEvent::Order(at, of, order) if at == of.from => {
                if let MigrationOrder::Resume {
                    suspensions: suspended,
                } = order
                {
                    self.suspensions.0 = suspended;
                }
                if self.source.is_none() && order == MigrationOrder::Release {
                    // The task has exited, so the migration no longer exists at the source.
                    let report = StepReport::Failed {
                        step: Step::KillSource,
                        why: Failure::TaskEnded,
                    };
                    return self.send(at, HostId::MASTER, SimEvent::Report(at, of.id, report));
                }
                self.source_event(SourceEvent::Order(order));
            }
            SimEvent::Order(_, _, order) => {
                if let MigrationOrder::Run(parting) = &order {
                    (self.suspensions.1, self.target_runs) = (parting.suspensions, true);
                }
                self.target_event(TargetEvent::Order(order));
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
            SimEvent::SuspendDecision(holds, asked) => self.on_suspend_decision(holds, asked),
            SimEvent::Report(from, id, report) => {
                self.coordinator.on_report(self.now, from, id, report)
            }
            SimEvent::Source(event) => self.source_event(event),
            SimEvent::Target(event) => self.target_event(event),
            SimEvent::LocationRecorded(id) => {
                let result = if self.dice.below(100) < self.faults.step_fails_percent {
                    Err(Failure::Io("disk".into()))
                } else {
                    Ok(())
                };
                self.coordinator.on_location_recorded(id, result);
            }
            SimEvent::LocationAnnounced(id) => self.coordinator.on_location_announced(self.now, id),
            SimEvent::LossDetected(host) => self.coordinator.on_host_lost(self.now, host),
            SimEvent::LoseHost(lost) => {
                self.lost_hosts.push(lost);
                if lost == host(2) {
                    (self.source, self.copies.0) = (None, Copy::Dead);
                } else {
                    (self.target, self.copies.1) = (None, Copy::Dead);
                }
                self.schedule_soon(SimEvent::LossDetected(lost));
            }
            SimEvent::KillTask => {
                if self.copies.0 == Copy::Running || self.copies.0 == Copy::Stopped {
                    self.copies.0 = Copy::Dead;
                    self.source_event(SourceEvent::TaskExited);
                }
            }
        }
    }

    /// Sends a suspend request to the daemon of the task's current host, if the previous request
    /// was acknowledged.
    fn request_suspension(&mut self, suspend: bool) {
        if self
            .awaited_host
            .is_some_and(|at| !self.lost_hosts.contains(&at))
        {
            return self.schedule(self.now + Micros(1000), SimEvent::SuspendRequest(suspend));
        }
        self.requests.push(suspend);
        let request = (suspend, self.requests.len());
        let at = self.location;
        (self.acknowledged, self.awaited_host) = (None, None);
        if self.lost_hosts.contains(&at) {
            return;
        }
        let source = self
            .source
            .as_ref()
            .filter(|source| at == host(2) && source.coordinator_decides_suspension());
        let target = self
            .target
            .as_ref()
            .filter(|_| at == host(3) && !self.target_runs);
        if let Some(id) = source
            .map(|s| s.migration().id)
            .or(target.map(|t| t.migration().id))
        {
            self.awaited_host = Some(at);
            return self.send(
                at,
                HostId::MASTER,
                SimEvent::ForwardedRequest(at, id, request),
            );
        }
        let holds = if at == host(2) {
            &mut self.suspensions.0
        } else {
            &mut self.suspensions.1
        };
        *holds = holds.apply(&suspend_order(suspend));
        self.acknowledged = Some(request);
    }

    fn on_suspend_decision(&mut self, holds: Option<Suspensions>, request: NumberedRequest) {
        if request.1 != self.requests.len() {
            return;
        }
        self.awaited_host = None;
        let Some(holds) = holds else { return };
        if self.location == host(2) || !self.target_runs {
            self.suspensions.0 = holds;
        }
        if self.target_runs {
            self.suspensions.1 = holds;
        }
        self.acknowledged = Some(request);
    }

    fn source_event(&mut self, event: SourceEvent) {
        // Update the simulated copy to the time of the answer.
        match &event {
            SourceEvent::Stopped(Ok(())) if self.copies.0 == Copy::Running => {
                self.copies.0 = Copy::Stopped
            }
            SourceEvent::TaskResumed if self.copies.0 == Copy::Stopped => {
                self.copies.0 = Copy::Running
            }
            SourceEvent::Killed(_) => self.copies.0 = Copy::Dead,
            _ => {}
        }
        let with_suspensions = |inspected| InspectedTask {
            suspensions: self.suspensions.0,
            ..inspected
        };
        let event = match event {
            SourceEvent::Inspected(result) => SourceEvent::Inspected(result.map(with_suspensions)),
            event => event,
        };
        if let Some(source) = &mut self.source {
            source.handle(event);
        }
    }

    fn target_event(&mut self, event: TargetEvent) {
        match &event {
            TargetEvent::Restored(Ok(())) if self.copies.1 == Copy::None => {
                self.copies.1 = Copy::Stopped
            }
            TargetEvent::RunCompleted(Ok(())) if self.copies.1 == Copy::Stopped => {
                self.copies.1 = Copy::Running
            }
            TargetEvent::Discarded | TargetEvent::MemoryArrived(Err(_)) => {
                self.copies.1 = Copy::Dead
            }
            _ => {}
        }
        if let Some(target) = &mut self.target {
            target.handle(event);
        }
    }

    fn run_outputs(&mut self) {
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
                    transfer_time: whole,
                    ..
                }) => {
                    self.final_event_values = Some((resident, frozen, whole));
                }
                CoordinatorOutput::LogEvent(_) => {}
                CoordinatorOutput::SuspendDecided {
                    host,
                    request,
                    suspensions,
                    ..
                } => {
                    let number = request.0 as usize;
                    let suspend = self.requests[number - 1];
                    self.send(
                        master,
                        host,
                        SimEvent::SuspendDecision(suspensions, (suspend, number)),
                    );
                }
                CoordinatorOutput::Ended { result, .. } => {
                    assert!(self.result.replace(result).is_none(), "a move ends once");
                }
            }
        }
        while let Some(output) = self.source.as_mut().and_then(Source::poll) {
            self.source_output(output);
        }
        while let Some(output) = self.target.as_mut().and_then(Target::poll) {
            self.target_output(output);
        }
    }

    fn source_output(&mut self, output: SourceOutput) {
        let id = self.source.as_ref().expect("it spoke").migration().id;
        match output {
            SourceOutput::Report(report) => self.send(
                host(2),
                HostId::MASTER,
                SimEvent::Report(host(2), id, report),
            ),
            SourceOutput::Inspect => {
                let (refuse, supports_post_copy) = (self.faults.refuse, self.faults.post_copy);
                let supports_pre_copy = self.faults.pre_copy;
                self.answer_as_tasker((), move |_| {
                    SimEvent::Source(SourceEvent::Inspected(if refuse {
                        Err(Refusal::Pinned)
                    } else {
                        let facts = TaskFacts {
                            resident_bytes: RESIDENT_BYTES,
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
            SourceOutput::OpenMemoryStream => {
                assert!(
                    !std::mem::replace(&mut self.memory_stream_open, true),
                    "one way for one move"
                );
            }
            SourceOutput::PreCopy => {
                assert!(
                    self.memory_stream_open
                        && !self.source_is_buffering
                        && self.target_receives_pre_copy,
                    "the other end is ready, and the task runs"
                );
                self.answer_as_tasker(77, |r| SimEvent::Source(SourceEvent::PreCopied(r)));
            }
            SourceOutput::DiscardPreCopy => self.pre_copy_discarded = true,
            SourceOutput::BufferIncoming => self.source_is_buffering = true,
            SourceOutput::Quiesce { .. } => {
                self.answer_as_tasker((), |_| SimEvent::Source(SourceEvent::Quiesced))
            }
            SourceOutput::RequestExit { engine, .. } => {
                assert_eq!(engine, self.engine);
                self.answer_as_tasker((), |r| SimEvent::Source(SourceEvent::Stopped(r)));
            }
            SourceOutput::SendRecord => {
                self.answer_as_tasker(0, |r| SimEvent::Target(TargetEvent::Received(r)))
            }
            SourceOutput::Stop => {
                self.answer_as_tasker((), |r| SimEvent::Source(SourceEvent::Stopped(r)))
            }
            SourceOutput::Dump { post_copy } => {
                assert_eq!(post_copy, self.memory_stream_open);
                self.answer_as_tasker(DumpReport::default(), |r| {
                    SimEvent::Source(SourceEvent::Dumped(r))
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

    fn start_sending_images(&mut self) {
        if self.dice.below(100) < self.faults.step_fails_percent {
            let transfer_error = || Failure::Images("cut".into());
            self.answer_as_tasker((), move |_| {
                SimEvent::Source(SourceEvent::ImagesSent(Err(transfer_error())))
            });
            self.answer_as_tasker((), move |_| {
                SimEvent::Target(TargetEvent::Received(Err(transfer_error())))
            });
        }
    }

    fn finish_sending_images(&mut self) {
        let fails = self.dice.below(100) < self.faults.step_fails_percent;
        let ack_lost = self.dice.below(100) < self.faults.lost_ack_percent;
        let transfer_error = || Err(Failure::Images("cut".into()));
        let sent = SimEvent::Source(SourceEvent::ImagesSent(if fails || ack_lost {
            transfer_error()
        } else {
            Ok(())
        }));
        if ack_lost {
            let at = self.now + Micros(self.dice.below(60_000));
            self.schedule(at, sent);
        } else {
            self.schedule_soon(sent);
        }
        if !fails {
            self.answer_as_tasker(1, |r| SimEvent::Target(TargetEvent::Received(r)));
        }
    }

    fn target_output(&mut self, output: TargetOutput) {
        let id = self.target.as_ref().expect("it spoke").migration().id;
        match output {
            TargetOutput::Report(report) => self.send(
                host(3),
                HostId::MASTER,
                SimEvent::Report(host(3), id, report),
            ),
            TargetOutput::Prepare(_) => {
                let engine = self.engine;
                self.answer_as_tasker((), move |r| {
                    let verdict = if r.is_ok() {
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
            TargetOutput::Restore => {
                self.answer_as_tasker((), |r| SimEvent::Target(TargetEvent::Restored(r)))
            }
            TargetOutput::Run(_) => {
                self.schedule_soon(SimEvent::Target(TargetEvent::RunCompleted(Ok(()))));
                if self.target.as_ref().is_some_and(Target::uses_post_copy) {
                    // This step has no deadline, so the answer must not be lost.
                    let stalls = std::mem::take(&mut self.faults.stalls_percent);
                    self.answer_as_tasker((), |r| SimEvent::Target(TargetEvent::MemoryArrived(r)));
                    self.faults.stalls_percent = stalls;
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
            self.copies.1 != Copy::Running || self.copies.0 == Copy::Dead,
            "two live copies: {:?}",
            self.copies
        );
    }
}

/// Resident memory of the task in bytes.
const RESIDENT_BYTES: u64 = 2 << 30;

/// Simulates one migration until no event remains.
fn simulate(seed: u64, faults: Faults) -> Simulation {
    Simulation::new(seed, faults).run()
}

/// Without faults the task migrates, and the source transfers the ownership and all memory to the
/// target.
#[test]
fn migration_without_faults_succeeds() {
    for seed in 1..500 {
        let world = simulate(seed, Faults::default());
        assert!(
            matches!(world.result, Some(Ok(_))),
            "seed {seed}: {:?}",
            world.result
        );
        assert_eq!(world.copies, (Copy::Dead, Copy::Running), "seed {seed}");
        assert!(
            world.ownership_transferred && world.source.is_none() && world.target.is_none(),
            "seed {seed}"
        );
        assert_eq!(world.location, host(3));
    }
}

/// The final event reports the resident memory, the duration for which the task was stopped, and
/// the duration until all memory had arrived.
#[test]
fn event_reports_memory_and_transfer_time() {
    let mut later = 0;
    for seed in 1..200 {
        for post_copy in [false, true] {
            let world = simulate(
                seed,
                Faults {
                    post_copy,
                    ..Faults::default()
                },
            );
            let (resident, frozen, whole) = world.final_event_values.expect("it has moved");
            match (world.engine, post_copy) {
                // All memory may have arrived before the task runs.
                (Engine::Criu, true) => {
                    assert!(resident == RESIDENT_BYTES && whole >= frozen, "seed {seed}");
                    later += u32::from(whole > frozen);
                }
                (Engine::Criu, false) => {
                    assert!(resident == RESIDENT_BYTES && whole == frozen, "seed {seed}")
                }
                // A program that is restarted sends no memory.
                _ => assert_eq!(resident, 0, "seed {seed}"),
            }
        }
    }
    assert!(
        later > 20,
        "memory that follows comes later as a rule: {later}"
    );
}

/// A task that the source refuses to migrate keeps running at the source.
#[test]
fn refused_task_keeps_running() {
    let world = simulate(
        7,
        Faults {
            refuse: true,
            ..Faults::default()
        },
    );
    let Some(Err(error)) = world.result else {
        panic!("{:?}", world.result)
    };
    assert_eq!(error.step, Step::Inspect);
    assert_eq!(error.why, Failure::Refused(vec![Refusal::Pinned]));
    assert_eq!(world.copies, (Copy::Running, Copy::None));
}

/// Whichever host is lost, the surviving copy is suspended exactly if the last acknowledged request
/// was a suspend request.
#[test]
fn surviving_copy_obeys_last_suspend_request() {
    let (mut at_target, mut back, mut source_lost) = (0, 0, 0);
    for seed in 1..40_000 {
        let mut dice = Rng(seed * 13 + 5);
        let mut suspend_requests: Vec<(u64, bool)> = (0..1 + dice.below(4))
            .map(|_| (dice.below(60_000), dice.below(2) == 0))
            .collect();
        suspend_requests.sort_unstable();
        let lost_host = (seed % 3 > 0).then(|| (host(1 + (seed % 3) as u16), dice.below(60_000)));
        let step_fails_percent = 3 * (seed % 2);
        let world = simulate(
            seed,
            Faults {
                suspend_requests,
                lost_host,
                step_fails_percent,
                ..Faults::default()
            },
        );
        let Some((suspended, _)) = world.acknowledged else {
            continue;
        };
        if world.copies.1 == Copy::Running {
            assert_eq!(
                world.suspensions.1.is_suspended(),
                suspended,
                "seed {seed}: at the target"
            );
            at_target += u32::from(suspended);
            source_lost += u32::from(suspended && world.lost_hosts.contains(&host(2)));
        } else if world.copies.0 == Copy::Running {
            assert_eq!(
                world.suspensions.0.is_suspended(),
                suspended,
                "seed {seed}: at the source"
            );
            back += u32::from(suspended);
        }
    }
    assert!(
        at_target > 1000 && back > 1000 && source_lost > 100,
        "{at_target} {back} {source_lost}"
    );
}
