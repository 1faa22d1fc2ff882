//! The migration protocol under faults: one task, two hosts, a coordinator, and failures at random
//! times.
//!
//! The two copies of the task, the daemons and the network are simulated; the three state machines
//! are the real ones.

#[path = "../../../libpvm/proto/tests/dice/mod.rs"]
mod dice;

use checkpoint_protocol::{
    Coordinator, CoordinatorOutput, Inspected, Source, SourceEvent, SourceOutput, Target,
    TargetEvent, TargetOutput,
};
use dice::Dice;
use sempa_proto::engine::Engine;
use sempa_proto::event::EventKind;
use sempa_proto::migration::{Cause, Failure, Order, Refusal, Report, Step, TaskFacts, Usage};
use sempa_proto::suspend::{self, Holds};
use sempa_proto::task::{MoveError, MoveReport};
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
enum Item {
    Order(HostId, sempa_proto::migration::Move, Order),
    Report(HostId, MigrationId, Report),
    Source(SourceEvent),
    Target(TargetEvent),
    Recorded(MigrationId),
    Located(MigrationId),
    LostSeen(HostId),
    Lose(HostId),
    EndTask,
    /// A user requests to suspend (true) or resume the task.
    Ask(bool),
    PassedOn(HostId, MigrationId, Asked),
    Decided(Option<Holds>, Asked),
}

/// A suspend request and its number, counted from 1. True: suspend.
type Asked = (bool, usize);

#[derive(Default)]
struct Faults {
    step_fails_percent: u64,
    stalls_percent: u64,
    /// Percentage of image transfers that complete without the source being notified. The source
    /// reports a failure some time later.
    unheard_percent: u64,
    lose: Option<(HostId, u64)>,
    end_task: Option<u64>,
    refuse: bool,
    /// Post-copy is used, unless a step of it fails.
    memory_follows: bool,
    /// Pre-copy is used, too.
    pre_copies: bool,
    /// Times of suspend requests (true) and resume requests.
    asks: Vec<(u64, bool)>,
}

struct World {
    dice: Dice,
    /// The engine that the target chooses. For every third seed the program is asked to exit and
    /// restarted.
    engine: Engine,
    faults: Faults,
    now: Micros,
    queue: BTreeMap<(Micros, u64), Item>,
    serial: u64,
    /// Last arrival per channel, because channels preserve the order.
    channel: HashMap<(u16, u16), Micros>,
    coordinator: Coordinator,
    source: Option<Source>,
    target: Option<Target>,
    copies: (Copy, Copy),
    lost: Vec<HostId>,
    held: bool,
    /// The source has opened the memory stream.
    way_is_open: bool,
    takes_pre_copy: bool,
    pre_copy_ended: bool,
    /// The source has deleted its images and closed its streams.
    dropped: bool,
    handed_over: bool,
    located_at: HostId,
    ended: Option<Result<MoveReport, MoveError>>,
    /// Values of the final event: resident memory, time stopped, and time until all memory had
    /// arrived.
    logged: Option<(u64, Micros, Micros)>,
    /// Suspensions of the two copies, as known to their daemons.
    holds: (Holds, Holds),
    target_runs: bool,
    /// The suspend requests so far.
    orders: Vec<bool>,
    /// The last request, if it was acknowledged to the requester.
    told: Option<Asked>,
    /// The host whose acknowledgement is awaited.
    waits_for: Option<HostId>,
}

fn order(suspend: bool) -> suspend::Order {
    let tid = Tid::task(host(2), 1).expect("good");
    suspend::Order {
        tid,
        suspend,
        cause: suspend::Cause::Asked { by: tid },
    }
}

fn host(index: u16) -> HostId {
    HostId::new(index).expect("small")
}

impl World {
    fn new(seed: u64, faults: Faults) -> World {
        let mut world = World {
            dice: Dice(seed | 1),
            engine: if seed.is_multiple_of(3) {
                Engine::Restart { wait: 5 }
            } else {
                Engine::Criu
            },
            faults,
            now: Micros(0),
            queue: BTreeMap::new(),
            serial: 0,
            channel: HashMap::new(),
            coordinator: Coordinator::new(),
            source: None,
            target: None,
            copies: (Copy::Running, Copy::None),
            lost: Vec::new(),
            held: false,
            way_is_open: false,
            takes_pre_copy: false,
            pre_copy_ended: false,
            dropped: false,
            handed_over: false,
            located_at: host(2),
            ended: None,
            logged: None,
            holds: Default::default(),
            target_runs: false,
            orders: Vec::new(),
            told: None,
            waits_for: None,
        };
        let tid = Tid::task(host(2), 1).expect("good");
        world
            .coordinator
            .begin(Micros(0), tid, host(2), host(3), Cause::Asked { by: tid })
            .expect("nothing forbids it");
        if let Some((lost, at)) = world.faults.lose {
            world.push(Micros(at), Item::Lose(lost));
        }
        if let Some(at) = world.faults.end_task {
            world.push(Micros(at), Item::EndTask);
        }
        for (at, suspend) in world.faults.asks.clone() {
            world.push(Micros(at), Item::Ask(suspend));
        }
        world
    }

    fn push(&mut self, at: Micros, item: Item) {
        self.serial += 1;
        self.queue.insert((at, self.serial), item);
    }

    fn soon(&mut self, item: Item) {
        let at = self.now + Micros(self.dice.roll(5_000));
        // Each tasker answers in order.
        let place = match &item {
            Item::Source(_) => (2, 0),
            Item::Target(_) => (3, 0),
            _ => return self.push(at, item),
        };
        let last = self.channel.entry(place).or_default();
        let at = at.max(*last);
        *last = at;
        self.push(at, item);
    }

    fn send(&mut self, from: HostId, to: HostId, item: Item) {
        if self.lost.contains(&from) || self.lost.contains(&to) {
            return;
        }
        let at = self.now + Micros(self.dice.roll(5_000));
        let last = self.channel.entry((from.index(), to.index())).or_default();
        let at = at.max(*last);
        *last = at;
        self.push(at, item);
    }

    /// Schedules the answer of a tasker: success, failure, or none.
    fn worker<T>(&mut self, good: T, wrap: impl Fn(Result<T, Failure>) -> Item) {
        if self.dice.roll(100) < self.faults.stalls_percent {
            return;
        }
        let result = if self.dice.roll(100) < self.faults.step_fails_percent {
            Err(Failure::Engine("dice".into()))
        } else {
            Ok(good)
        };
        self.soon(wrap(result));
    }

    fn run(mut self) -> World {
        for _ in 0..10_000 {
            self.drain();
            self.check();
            let next = self.queue.keys().next().copied();
            let timer = self.coordinator.next_wakeup();
            match (next, timer) {
                (Some((at, _)), timer) if timer.is_none_or(|t| at <= t) => {
                    let ((at, _), item) = self.queue.pop_first().expect("just seen");
                    self.now = self.now.max(at);
                    self.take(item);
                }
                (_, Some(at)) => {
                    self.now = self.now.max(at);
                    self.coordinator.wake(self.now);
                }
                (None, None) => return self,
                (Some(_), None) => unreachable!("the guard holds without a timer"),
            }
        }
        panic!("the protocol does not come to rest");
    }

    fn take(&mut self, item: Item) {
        match item {
            Item::Order(at, ..) if self.lost.contains(&at) => {}
            Item::Order(_, of, Order::Inspect) => self.source = Some(Source::new(of)),
            Item::Order(
                at,
                of,
                Order::Prepare {
                    facts,
                    memory_can_follow,
                    pre_copies,
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
            Item::Order(at, of, order) if at == of.from => {
                if let Order::Resume { suspended } = order {
                    self.holds.0 = suspended;
                }
                if self.source.is_none() && order == Order::Yield {
                    // The migration is over at the source, because the task has exited.
                    let report = Report::Failed {
                        step: Step::KillSource,
                        why: Failure::TaskEnded,
                    };
                    return self.send(at, HostId::MASTER, Item::Report(at, of.id, report));
                }
                self.source_event(SourceEvent::Order(order));
            }
            Item::Order(_, _, order) => {
                if let Order::Run(parting) = &order {
                    (self.holds.1, self.target_runs) = (parting.suspended, true);
                }
                self.target_event(TargetEvent::Order(order));
            }
            Item::Ask(suspend) => self.ask(suspend),
            Item::PassedOn(from, id, (suspend, number)) => {
                self.coordinator
                    .suspend(from, id, RequestId(number as u64), &order(suspend));
            }
            Item::Decided(holds, asked) => self.decided(holds, asked),
            Item::Report(from, id, report) => self.coordinator.report(self.now, from, id, report),
            Item::Source(event) => self.source_event(event),
            Item::Target(event) => self.target_event(event),
            Item::Recorded(id) => {
                let result = if self.dice.roll(100) < self.faults.step_fails_percent {
                    Err(Failure::Io("disk".into()))
                } else {
                    Ok(())
                };
                self.coordinator.recorded(id, result);
            }
            Item::Located(id) => self.coordinator.located(self.now, id),
            Item::LostSeen(host) => self.coordinator.host_lost(self.now, host),
            Item::Lose(lost) => {
                self.lost.push(lost);
                if lost == host(2) {
                    (self.source, self.copies.0) = (None, Copy::Dead);
                } else {
                    (self.target, self.copies.1) = (None, Copy::Dead);
                }
                self.soon(Item::LostSeen(lost));
            }
            Item::EndTask => {
                if self.copies.0 == Copy::Running || self.copies.0 == Copy::Stopped {
                    self.copies.0 = Copy::Dead;
                    self.source_event(SourceEvent::Ended);
                }
            }
        }
    }

    /// Sends a suspend request to the daemon of the host where the task is, after the previous one
    /// was acknowledged.
    fn ask(&mut self, suspend: bool) {
        if self.waits_for.is_some_and(|at| !self.lost.contains(&at)) {
            return self.push(self.now + Micros(1000), Item::Ask(suspend));
        }
        self.orders.push(suspend);
        let asked = (suspend, self.orders.len());
        let at = self.located_at;
        (self.told, self.waits_for) = (None, None);
        if self.lost.contains(&at) {
            return;
        }
        let source = self
            .source
            .as_ref()
            .filter(|source| at == host(2) && source.is_decided_elsewhere());
        let target = self
            .target
            .as_ref()
            .filter(|_| at == host(3) && !self.target_runs);
        if let Some(id) = source.map(|s| s.of().id).or(target.map(|t| t.of().id)) {
            self.waits_for = Some(at);
            return self.send(at, HostId::MASTER, Item::PassedOn(at, id, asked));
        }
        let holds = if at == host(2) {
            &mut self.holds.0
        } else {
            &mut self.holds.1
        };
        *holds = holds.after(&order(suspend));
        self.told = Some(asked);
    }

    fn decided(&mut self, holds: Option<Holds>, asked: Asked) {
        if asked.1 != self.orders.len() {
            return;
        }
        self.waits_for = None;
        let Some(holds) = holds else { return };
        if self.located_at == host(2) || !self.target_runs {
            self.holds.0 = holds;
        }
        if self.target_runs {
            self.holds.1 = holds;
        }
        self.told = Some(asked);
    }

    fn source_event(&mut self, event: SourceEvent) {
        // Update the simulated copy to the time of the answer.
        match &event {
            SourceEvent::Stopped(Ok(())) if self.copies.0 == Copy::Running => {
                self.copies.0 = Copy::Stopped
            }
            SourceEvent::Continued if self.copies.0 == Copy::Stopped => {
                self.copies.0 = Copy::Running
            }
            SourceEvent::Gone(_) => self.copies.0 = Copy::Dead,
            _ => {}
        }
        let now = |inspected| Inspected {
            suspended: self.holds.0,
            ..inspected
        };
        let event = match event {
            SourceEvent::Inspected(result) => SourceEvent::Inspected(result.map(now)),
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
            TargetEvent::Ran(Ok(())) if self.copies.1 == Copy::Stopped => {
                self.copies.1 = Copy::Running
            }
            TargetEvent::Discarded | TargetEvent::Arrived(Err(_)) => self.copies.1 = Copy::Dead,
            _ => {}
        }
        if let Some(target) = &mut self.target {
            target.handle(event);
        }
    }

    fn drain(&mut self) {
        let master = HostId::MASTER;
        while let Some(output) = self.coordinator.poll() {
            match output {
                CoordinatorOutput::Order { host, of, order } => {
                    self.send(master, host, Item::Order(host, of, order))
                }
                CoordinatorOutput::Record(of) => self.soon(Item::Recorded(of.id)),
                CoordinatorOutput::Locate(of) => {
                    self.located_at = of.to;
                    self.soon(Item::Located(of.id));
                }
                CoordinatorOutput::Event(EventKind::Moved {
                    resident,
                    frozen,
                    whole,
                    ..
                }) => {
                    self.logged = Some((resident, frozen, whole));
                }
                CoordinatorOutput::Event(_) => {}
                CoordinatorOutput::SuspendDecided {
                    host,
                    id,
                    suspended,
                    ..
                } => {
                    let number = id.0 as usize;
                    let suspend = self.orders[number - 1];
                    self.send(master, host, Item::Decided(suspended, (suspend, number)));
                }
                CoordinatorOutput::Ended { result, .. } => {
                    assert!(self.ended.replace(result).is_none(), "a move ends once");
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
        let id = self.source.as_ref().expect("it spoke").of().id;
        match output {
            SourceOutput::Report(report) => {
                self.send(host(2), HostId::MASTER, Item::Report(host(2), id, report))
            }
            SourceOutput::Inspect => {
                let (refuse, memory_can_follow) = (self.faults.refuse, self.faults.memory_follows);
                let can_pre_copy = self.faults.pre_copies;
                self.worker((), move |_| {
                    Item::Source(SourceEvent::Inspected(if refuse {
                        Err(Refusal::Pinned)
                    } else {
                        let facts = TaskFacts {
                            resident_bytes: RESIDENT,
                            ..TaskFacts::default()
                        };
                        Ok(Inspected {
                            memory_can_follow,
                            can_pre_copy,
                            facts,
                            ..Inspected::default()
                        })
                    }))
                });
            }
            SourceOutput::LendMemory => {
                assert!(
                    !std::mem::replace(&mut self.way_is_open, true),
                    "one way for one move"
                );
            }
            SourceOutput::PreCopy => {
                assert!(
                    self.way_is_open && !self.held && self.takes_pre_copy,
                    "the other end is ready, and the task runs"
                );
                self.worker(77, |r| Item::Source(SourceEvent::PreCopied(r)));
            }
            SourceOutput::EndPreCopy => self.pre_copy_ended = true,
            SourceOutput::Hold => self.held = true,
            SourceOutput::Quiesce { .. } => {
                self.worker((), |_| Item::Source(SourceEvent::Quiesced))
            }
            SourceOutput::End { engine, .. } => {
                assert_eq!(engine, self.engine);
                self.worker((), |r| Item::Source(SourceEvent::Stopped(r)));
            }
            SourceOutput::SendRecord => self.worker(0, |r| Item::Target(TargetEvent::Received(r))),
            SourceOutput::Stop => self.worker((), |r| Item::Source(SourceEvent::Stopped(r))),
            SourceOutput::Dump { memory_follows } => {
                assert_eq!(memory_follows, self.way_is_open);
                self.worker(DumpReport::default(), |r| {
                    Item::Source(SourceEvent::Dumped(r))
                });
            }
            SourceOutput::SendAhead => {
                if self.dice.roll(100) < self.faults.step_fails_percent {
                    let cut = || Failure::Images("cut".into());
                    self.worker((), move |_| Item::Source(SourceEvent::Sent(Err(cut()))));
                    self.worker((), move |_| Item::Target(TargetEvent::Received(Err(cut()))));
                }
            }
            SourceOutput::SendImages => {
                let bad = self.dice.roll(100) < self.faults.step_fails_percent;
                let unheard = self.dice.roll(100) < self.faults.unheard_percent;
                let cut = || Err(Failure::Images("cut".into()));
                let sent = Item::Source(SourceEvent::Sent(if bad || unheard {
                    cut()
                } else {
                    Ok(())
                }));
                if unheard {
                    let at = self.now + Micros(self.dice.roll(60_000));
                    self.push(at, sent);
                } else {
                    self.soon(sent);
                }
                if !bad {
                    self.worker(1, |r| Item::Target(TargetEvent::Received(r)));
                }
            }
            SourceOutput::Continue => self.soon(Item::Source(SourceEvent::Continued)),
            SourceOutput::WakeHere => self.soon(Item::Source(SourceEvent::Reconnected)),
            SourceOutput::Release => self.held = false,
            SourceOutput::KillMoved => self.soon(Item::Source(SourceEvent::Gone(Usage::default()))),
            SourceOutput::HandOver => self.handed_over = true,
            SourceOutput::DropImages => self.dropped = true,
            SourceOutput::Settle
            | SourceOutput::Close { .. }
            | SourceOutput::Collect
            | SourceOutput::Deposit => {
                panic!("a move keeps no images")
            }
            SourceOutput::Done => self.source = None,
        }
    }

    fn target_output(&mut self, output: TargetOutput) {
        let id = self.target.as_ref().expect("it spoke").of().id;
        match output {
            TargetOutput::Report(report) => {
                self.send(host(3), HostId::MASTER, Item::Report(host(3), id, report))
            }
            TargetOutput::Prepare(_) => {
                let engine = self.engine;
                self.worker((), move |r| {
                    let verdict = if r.is_ok() {
                        vec![]
                    } else {
                        vec![Refusal::Pinned]
                    };
                    Item::Target(TargetEvent::Prepared {
                        verdict,
                        memory_can_follow: true,
                        engine,
                    })
                });
            }
            TargetOutput::TakePreCopy => self.takes_pre_copy = true,
            TargetOutput::Restore => self.worker((), |r| Item::Target(TargetEvent::Restored(r))),
            TargetOutput::Run(_) => {
                self.soon(Item::Target(TargetEvent::Ran(Ok(()))));
                if self.target.as_ref().is_some_and(Target::memory_follows) {
                    // This step has no deadline, so the answer must not be lost.
                    let stalls = std::mem::take(&mut self.faults.stalls_percent);
                    self.worker((), |r| Item::Target(TargetEvent::Arrived(r)));
                    self.faults.stalls_percent = stalls;
                }
            }
            TargetOutput::Discard => self.soon(Item::Target(TargetEvent::Discarded)),
            TargetOutput::ExpectImages | TargetOutput::WakeHere | TargetOutput::DropImages => {}
            TargetOutput::Done => self.target = None,
        }
    }

    /// Checks the invariant that at most one copy is alive when the target's copy runs.
    fn check(&self) {
        // A stopped copy counts as alive: it could continue.
        assert!(
            self.copies.1 != Copy::Running || self.copies.0 == Copy::Dead,
            "two live copies: {:?}",
            self.copies
        );
    }
}

/// Resident memory of the task.
const RESIDENT: u64 = 2 << 30;

/// Simulates one migration until nothing happens any more.
fn settle(seed: u64, faults: Faults) -> World {
    World::new(seed, faults).run()
}

/// Without faults the task migrates, and the source transfers everything to the target.
#[test]
fn migration_without_faults_succeeds() {
    for seed in 1..500 {
        let world = settle(seed, Faults::default());
        assert!(
            matches!(world.ended, Some(Ok(_))),
            "seed {seed}: {:?}",
            world.ended
        );
        assert_eq!(world.copies, (Copy::Dead, Copy::Running), "seed {seed}");
        assert!(
            world.handed_over && world.source.is_none() && world.target.is_none(),
            "seed {seed}"
        );
        assert_eq!(world.located_at, host(3));
    }
}

/// The final event reports the resident memory, the time stopped, and the time until all memory had
/// arrived.
#[test]
fn event_reports_memory_and_transfer_time() {
    let mut later = 0;
    for seed in 1..200 {
        for memory_follows in [false, true] {
            let world = settle(
                seed,
                Faults {
                    memory_follows,
                    ..Faults::default()
                },
            );
            let (resident, frozen, whole) = world.logged.expect("it has moved");
            match (world.engine, memory_follows) {
                // All memory may have arrived by the time the task runs.
                (Engine::Criu, true) => {
                    assert!(resident == RESIDENT && whole >= frozen, "seed {seed}");
                    later += u32::from(whole > frozen);
                }
                (Engine::Criu, false) => {
                    assert!(resident == RESIDENT && whole == frozen, "seed {seed}")
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

/// A task that the source refuses to migrate keeps running there.
#[test]
fn refused_task_keeps_running() {
    let world = settle(
        7,
        Faults {
            refuse: true,
            ..Faults::default()
        },
    );
    let Some(Err(error)) = world.ended else {
        panic!("{:?}", world.ended)
    };
    assert_eq!(error.step, Step::Inspect);
    assert_eq!(error.why, Failure::Refused(vec![Refusal::Pinned]));
    assert_eq!(world.copies, (Copy::Running, Copy::None));
}

/// If any step fails or stalls, exactly one copy of the task runs afterwards.
#[test]
fn failed_step_leaves_exactly_one_running_copy() {
    let mut failures = 0;
    for seed in 1..20_000 {
        let world = settle(
            seed,
            Faults {
                step_fails_percent: 12,
                stalls_percent: 5,
                ..Faults::default()
            },
        );
        match &world.ended {
            Some(Ok(_)) => {
                assert_eq!(world.copies, (Copy::Dead, Copy::Running), "seed {seed}");
                assert_eq!(world.located_at, host(3), "seed {seed}");
            }
            Some(Err(_)) => {
                failures += 1;
                assert_eq!(
                    world.copies.0,
                    Copy::Running,
                    "seed {seed}: {:?}",
                    world.ended
                );
                assert_ne!(world.copies.1, Copy::Running, "seed {seed}");
                assert_eq!(world.located_at, host(2), "seed {seed}");
                assert!(!world.held, "seed {seed}: messages are kept for ever");
            }
            None => panic!("seed {seed}: the move never ended"),
        }
    }
    assert!(failures > 1000, "the faults must bite: {failures}");
}

/// If any step fails or stalls, or the target is lost, pre-copied memory is either used by the
/// target or discarded.
#[test]
fn failed_migration_discards_pre_copied_memory() {
    let (mut moved, mut stayed) = (0, 0);
    for seed in 1..20_000 {
        let lose = (seed % 4 == 0).then(|| (host(3), Dice(seed * 35 + 1).roll(60_000)));
        let (step_fails_percent, stalls_percent) = (8, 3);
        let (memory_follows, pre_copies) = (true, true);
        let faults = Faults {
            memory_follows,
            pre_copies,
            step_fails_percent,
            stalls_percent,
            lose,
            ..Faults::default()
        };
        let world = settle(seed, faults);
        match &world.ended {
            Some(Ok(_)) => {
                moved += u32::from(world.takes_pre_copy);
                let (_, frozen, whole) = world.logged.expect("it has moved");
                assert!(
                    whole > frozen || !world.takes_pre_copy,
                    "seed {seed}: the time for which memory went ahead counts"
                );
                assert!(!world.pre_copy_ended, "seed {seed}");
                // The target may have been lost afterwards.
                assert!(
                    world.copies == (Copy::Dead, Copy::Running) || !world.lost.is_empty(),
                    "seed {seed}"
                );
            }
            // From this step on the memory outlives the source's copy.
            Some(Err(error)) if error.step >= Step::KillSource => {}
            Some(Err(_)) => {
                assert!(!world.held, "seed {seed}: messages are kept for ever");
                assert_eq!(
                    world.copies.0,
                    Copy::Running,
                    "seed {seed}: {:?}",
                    world.ended
                );
                assert_eq!(
                    world.pre_copy_ended,
                    world.way_is_open && world.takes_pre_copy,
                    "seed {seed}: {:?}",
                    world.ended
                );
                stayed += u32::from(world.pre_copy_ended);
                assert!(
                    world.dropped || !world.way_is_open,
                    "seed {seed}: a way is left"
                );
            }
            None => panic!("seed {seed}: the move never ended"),
        }
    }
    assert!(moved > 1000 && stayed > 1000, "{moved} {stayed}");
}

/// With post-copy the task continues in one copy if all memory arrives. If some is lost it ends,
/// and the migration fails in the step Arrive.
#[test]
fn lost_post_copy_memory_ends_the_task()
{
    let (mut moved, mut died, mut stayed) = (0, 0, 0);
    for seed in 1..30_000 {
        let lose = (seed % 4 == 0).then(|| (host(2), Dice(seed * 33 + 1).roll(60_000)));
        let faults = Faults {
            memory_follows: true,
            step_fails_percent: 8,
            lose,
            ..Faults::default()
        };
        let world = settle(seed, faults);
        let lost = !world.lost.is_empty();
        match &world.ended {
            Some(Ok(_)) => {
                moved += 1;
                assert_eq!(world.copies, (Copy::Dead, Copy::Running), "seed {seed}");
            }
            Some(Err(error)) if error.step == Step::Arrive => {
                died += 1;
                assert_eq!(world.copies, (Copy::Dead, Copy::Dead), "seed {seed}");
                assert!(world.handed_over || lost, "seed {seed}");
            }
            Some(Err(_)) if lost => assert_ne!(world.copies.0, Copy::Running, "seed {seed}"),
            Some(Err(_)) => {
                stayed += 1;
                assert_eq!(
                    world.copies.0,
                    Copy::Running,
                    "seed {seed}: {:?}",
                    world.ended
                );
                assert_ne!(world.copies.1, Copy::Running, "seed {seed}");
            }
            None => panic!("seed {seed}: the move never ended"),
        }
    }
    assert!(
        moved > 1000 && died > 500 && stayed > 1000,
        "{moved} {died} {stayed}"
    );
}

/// If the source is not notified that the transfer is complete, its copy is still dead before the
/// target's copy runs.
#[test]
fn unacknowledged_transfer_leaves_one_copy() {
    let (mut moved, mut stayed) = (0, 0);
    for seed in 1..20_000 {
        let world = settle(
            seed,
            Faults {
                unheard_percent: 100,
                ..Faults::default()
            },
        );
        match &world.ended {
            Some(Ok(_)) => {
                moved += 1;
                assert_eq!(world.copies, (Copy::Dead, Copy::Running), "seed {seed}");
                assert!(world.handed_over && world.source.is_none(), "seed {seed}");
            }
            Some(Err(error)) => {
                stayed += 1;
                assert_eq!(error.step, Step::Transfer, "seed {seed}");
                assert_eq!(world.copies.0, Copy::Running, "seed {seed}");
                assert!(!world.held, "seed {seed}: messages are kept for ever");
            }
            None => panic!("seed {seed}: the move never ended"),
        }
    }
    assert!(moved > 1000 && stayed > 1000, "{moved} {stayed}");
}

/// The loss of a host leaves at most one copy. The loss of the target before the source has
/// released the task does not end the task.
#[test]
fn lost_host_leaves_at_most_one_copy()
 {
    for seed in 1..20_000 {
        let lost = host(2 + (seed % 2) as u16);
        let at = Dice(seed * 77 + 1).roll(60_000);
        let world = settle(
            seed,
            Faults {
                lose: Some((lost, at)),
                step_fails_percent: 3,
                ..Faults::default()
            },
        );
        if lost == host(2) {
            assert_ne!(world.copies.0, Copy::Running, "seed {seed}");
        } else if !world.handed_over && world.copies.0 != Copy::Dead {
            assert_eq!(
                world.copies.0,
                Copy::Running,
                "seed {seed}: {:?}",
                world.ended
            );
            assert_eq!(world.located_at, host(2), "seed {seed}");
        }
        assert!(world.ended.is_some(), "seed {seed}");
    }
}

/// A task that is killed during its migration ends, unless the migration was already committed.
#[test]
fn killed_task_ends_unless_committed() {
    for seed in 1..10_000 {
        let at = Dice(seed * 91 + 3).roll(60_000);
        let world = settle(
            seed,
            Faults {
                end_task: Some(at),
                step_fails_percent: 3,
                ..Faults::default()
            },
        );
        let runs_there = world.copies.1 == Copy::Running;
        match &world.ended {
            Some(Ok(_)) => assert!(runs_there && world.located_at == host(3), "seed {seed}"),
            Some(Err(error)) => assert!(!runs_there, "seed {seed}: {error:?}"),
            None => panic!("seed {seed}: the move never ended"),
        }
        assert!(
            !world.held || world.handed_over,
            "seed {seed}: messages are kept for ever"
        );
    }
}

/// The surviving copy is suspended exactly if the last acknowledged request says so, whichever host
/// is lost.
#[test]
fn surviving_copy_obeys_last_suspend_request()
{
    let (mut at_target, mut back, mut source_lost) = (0, 0, 0);
    for seed in 1..40_000 {
        let mut dice = Dice(seed * 13 + 5);
        let mut asks: Vec<(u64, bool)> = (0..1 + dice.roll(4))
            .map(|_| (dice.roll(60_000), dice.roll(2) == 0))
            .collect();
        asks.sort_unstable();
        let lose = (seed % 3 > 0).then(|| (host(1 + (seed % 3) as u16), dice.roll(60_000)));
        let step_fails_percent = 3 * (seed % 2);
        let world = settle(
            seed,
            Faults {
                asks,
                lose,
                step_fails_percent,
                ..Faults::default()
            },
        );
        let Some((suspended, _)) = world.told else {
            continue;
        };
        if world.copies.1 == Copy::Running {
            assert_eq!(world.holds.1.any(), suspended, "seed {seed}: at the target");
            at_target += u32::from(suspended);
            source_lost += u32::from(suspended && world.lost.contains(&host(2)));
        } else if world.copies.0 == Copy::Running {
            assert_eq!(world.holds.0.any(), suspended, "seed {seed}: at the source");
            back += u32::from(suspended);
        }
    }
    assert!(
        at_target > 1000 && back > 1000 && source_lost > 100,
        "{at_target} {back} {source_lost}"
    );
}
