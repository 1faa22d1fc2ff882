//! A virtual world: a master that can crash, workers that are killed, paused and migrated, and
//! messages that take time. All choices depend on one seed.

use sempa_work_dispatch::{
    AttemptId, AttemptOutcome, AttemptRecord, AttemptReport, ClassId, Dispatcher, Event, Groups,
    Key, LossReason, Micros, NewTask, Output, PauseCause, RunStatistics, Settings, TaskId,
    WorkerId,
};
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::sync::Arc;

/// Time from the acceptance of a result until the journal has stored it.
const COMMIT_TIME: Micros = 3_000;
/// Time from the crash of a master until the next one starts.
const MASTER_DOWN_TIME: Micros = 2_000_000;
const MESSAGE_TIME_MAX: Micros = 2_000;
const CLASS: ClassId = ClassId(0);
/// A run that takes more steps than this does not make progress.
const STEPS_MAX: u64 = 20_000_000;

/// Random numbers of the generator xorshift64*.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        (self.next() >> 11) % limit.max(1)
    }

    fn happens(&mut self, per_million: u64) -> bool {
        self.below(1_000_000) < per_million
    }
}

/// Rates of faults, per million finished attempts, and other parameters of a world.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) first_tasks: u64,
    /// Each of the first tasks adds this number of tasks when its result is accepted.
    pub(crate) children: u64,
    pub(crate) workers: u64,
    pub(crate) hosts: u64,
    pub(crate) duration_max: Micros,
    /// Every n-th of the first tasks kills its worker; 0: none.
    pub(crate) poison_every: u64,
    pub(crate) kills: u64,
    pub(crate) pauses: u64,
    pub(crate) pause_max: Micros,
    pub(crate) migrations: u64,
    pub(crate) crashes: u64,
    pub(crate) settings: Settings,
}

#[derive(Clone, Debug)]
enum Happening {
    /// The worker finishes its current attempt, if the number of the attempt is this one.
    Finish(WorkerId, AttemptId),
    ToMaster(u32, ToMaster),
    ToWorker(WorkerId, ToWorker),
    Committed(u32, TaskId),
    Resume(WorkerId),
    StartMaster,
    StartWorker,
    Wakeup,
}

#[derive(Clone, Debug)]
enum ToMaster {
    Hello(WorkerId),
    Report(WorkerId, AttemptReport),
    Returned(WorkerId, Vec<(TaskId, AttemptId)>),
    Lost(WorkerId, LossReason),
    Condition(WorkerId, bool),
    Migrated(WorkerId),
}

#[derive(Clone, Debug)]
enum ToWorker {
    Tasks(Vec<(TaskId, AttemptId)>),
    Recall(Vec<(TaskId, AttemptId)>),
    Cancel(AttemptId),
    /// The journal has stored the fate of this attempt's result.
    Acknowledged(AttemptId),
    End,
}

#[derive(Debug)]
struct SimWorker {
    host: Arc<str>,
    queue: VecDeque<(TaskId, AttemptId)>,
    current: Option<(TaskId, AttemptId, Micros)>,
    /// Reports that no master has acknowledged.
    unacknowledged: Vec<AttemptReport>,
    paused: bool,
    /// Remaining time of the current attempt when the worker was paused.
    remaining: Micros,
}

/// What the journal has stored.
#[derive(Debug, Default)]
struct Journal {
    accepted: BTreeMap<TaskId, u64>,
    open: BTreeMap<TaskId, NewTask>,
    failed: Vec<(TaskId, AttemptRecord)>,
    quarantined: BTreeSet<TaskId>,
    statistics: RunStatistics,
}

/// A result that was accepted and is not stored yet.
#[derive(Debug)]
struct Pending {
    worker: WorkerId,
    attempt: AttemptId,
    children: Vec<NewTask>,
}

pub(crate) struct World {
    pub(crate) scenario: Scenario,
    pub(crate) random: Random,
    pub(crate) now: Micros,
    happenings: BinaryHeap<Reverse<(Micros, u64, usize)>>,
    details: Vec<Option<Happening>>,
    sequence: u64,
    workers: BTreeMap<WorkerId, SimWorker>,
    next_worker: u64,
    dispatcher: Option<Dispatcher>,
    generation: u32,
    next_task: u64,
    journal: Journal,
    pending: BTreeMap<TaskId, Pending>,
    wakeup_at: Option<Micros>,
    is_finished: bool,
    pub(crate) kills: u64,
    pub(crate) crashes: u64,
    pub(crate) migrations: u64,
}

impl World {
    pub(crate) fn new(scenario: Scenario, seed: u64) -> Self {
        let mut world = Self {
            random: Random::new(seed),
            scenario,
            now: 0,
            happenings: BinaryHeap::new(),
            details: Vec::new(),
            sequence: 0,
            workers: BTreeMap::new(),
            next_worker: 1,
            dispatcher: None,
            generation: 0,
            next_task: 0,
            journal: Journal::default(),
            pending: BTreeMap::new(),
            wakeup_at: None,
            is_finished: false,
            kills: 0,
            crashes: 0,
            migrations: 0,
        };
        world.start_master();
        for _ in 0..world.scenario.workers {
            world.start_worker();
        }
        world
    }

    fn schedule(&mut self, delay: Micros, happening: Happening) {
        self.sequence += 1;
        self.details.push(Some(happening));
        let entry = (self.now + delay, self.sequence, self.details.len() - 1);
        self.happenings.push(Reverse(entry));
    }

    /// Runs the world until the run is finished, and checks the results.
    pub(crate) fn run(&mut self) -> RunStatistics {
        let mut steps = 0;
        while !self.is_finished {
            let Some(Reverse((at, _, index))) = self.happenings.pop() else {
                panic!(
                    "nothing happens any more: {:?}",
                    self.dispatcher.as_ref().map(Dispatcher::progress)
                );
            };
            steps += 1;
            assert!(
                steps < STEPS_MAX,
                "no progress: {:?}",
                self.dispatcher.as_ref().map(Dispatcher::progress)
            );
            self.now = at;
            let happening = self.details[index].take().expect("happens once");
            self.happen(happening);
        }
        self.check_results();
        let dispatcher = self.dispatcher.as_ref().expect("the last master");
        dispatcher.statistics_up_to(self.now)
    }

    fn happen(&mut self, happening: Happening) {
        match happening {
            Happening::Finish(worker, attempt) => self.finish_attempt(worker, attempt),
            Happening::ToMaster(generation, message) if generation == self.generation => {
                self.tell_master(message);
            }
            Happening::ToMaster(..) => {}
            Happening::ToWorker(worker, message) => self.tell_worker(worker, message),
            Happening::Committed(generation, task) if generation == self.generation => {
                self.commit(task);
            }
            Happening::Committed(..) => {}
            Happening::Resume(worker) => self.resume(worker),
            Happening::StartMaster => self.start_master(),
            Happening::StartWorker => self.start_worker(),
            Happening::Wakeup => {
                self.wakeup_at = None;
                self.handle(Event::Tick);
            }
        }
    }

    /// Duration of a task, which depends only on the task.
    fn duration(&self, task: TaskId) -> Micros {
        let mixed = task.0.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        1 + mixed % self.scenario.duration_max
    }

    fn is_poison(&self, task: TaskId) -> bool {
        let number = task.0 & 0xffff_ffff;
        let every = self.scenario.poison_every;
        let is_of_first_master = task.0 >> 32 == 1;
        every > 0
            && is_of_first_master
            && number <= self.scenario.first_tasks
            && number.is_multiple_of(every)
    }

    fn new_tasks(&mut self, count: u64) -> Vec<NewTask> {
        let first = (u64::from(self.generation) << 32) + self.next_task + 1;
        self.next_task += count;
        let ids = first..first + count;
        ids.map(|id| NewTask {
            id: TaskId(id),
            key: Key::new((id % 7) as f64).expect("a number"),
            groups: Groups::ALL,
        })
        .collect()
    }

    fn start_master(&mut self) {
        self.generation += 1;
        self.pending.clear();
        let statistics = self.journal.statistics.clone();
        let settings = self.scenario.settings.clone();
        let mut dispatcher = Dispatcher::new(settings, self.generation, statistics, self.now);
        dispatcher.set_target(self.now, CLASS, self.scenario.workers as u32);
        if self.generation == 1 {
            let tasks = self.new_tasks(self.scenario.first_tasks);
            self.journal
                .open
                .extend(tasks.iter().map(|task| (task.id, *task)));
            dispatcher
                .add_tasks(self.now, &tasks)
                .expect("within the limits");
        } else {
            self.next_task = 0;
            let mut tasks: Vec<NewTask> = self.journal.open.values().copied().collect();
            tasks.sort_by_key(|task| (task.key, task.id));
            let greatest_id = Some(TaskId(u64::from(self.generation) << 32));
            dispatcher.restore_tasks(self.now, &tasks, greatest_id);
            for (task, record) in &self.journal.failed {
                dispatcher.restore_attempts(*task, vec![record.clone()]);
            }
        }
        self.dispatcher = Some(dispatcher);
        let workers: Vec<WorkerId> = self.workers.keys().copied().collect();
        for worker in workers {
            self.send_to_master(ToMaster::Hello(worker));
        }
        self.carry_out();
    }

    fn start_worker(&mut self) {
        let id = WorkerId(self.next_worker);
        self.next_worker += 1;
        let host = self.random.below(self.scenario.hosts);
        let worker = SimWorker {
            host: format!("h{host}").into(),
            queue: VecDeque::new(),
            current: None,
            unacknowledged: Vec::new(),
            paused: false,
            remaining: 0,
        };
        self.workers.insert(id, worker);
        self.send_to_master(ToMaster::Hello(id));
    }

    /// Sends a message to the present master. A message to a dead master is lost.
    fn send_to_master(&mut self, message: ToMaster) {
        // Messages of a worker arrive in order, so all of them take the same time.
        let delay = MESSAGE_TIME_MAX;
        self.schedule(delay, Happening::ToMaster(self.generation, message));
    }

    fn send_to_worker(&mut self, worker: WorkerId, message: ToWorker) {
        self.schedule(MESSAGE_TIME_MAX, Happening::ToWorker(worker, message));
    }

    fn handle(&mut self, event: Event) {
        let now = self.now;
        if let Some(dispatcher) = &mut self.dispatcher {
            dispatcher.handle(now, event);
            self.carry_out();
        }
    }

    fn tell_master(&mut self, message: ToMaster) {
        match message {
            ToMaster::Hello(id) => self.greet(id),
            ToMaster::Report(worker, report) => {
                self.handle(Event::Attempt { worker, report });
            }
            ToMaster::Returned(worker, attempts) => {
                self.handle(Event::TasksReturned { worker, attempts });
            }
            ToMaster::Lost(worker, reason) => self.handle(Event::WorkerLost { worker, reason }),
            ToMaster::Condition(worker, true) => self.handle(Event::WorkerPaused {
                worker,
                cause: PauseCause::Owner,
            }),
            ToMaster::Condition(worker, false) => self.handle(Event::WorkerResumed { worker }),
            ToMaster::Migrated(worker) => {
                if let Some(state) = self.workers.get(&worker) {
                    let host = state.host.clone();
                    self.handle(Event::WorkerMigrated { worker, host });
                }
            }
        }
    }

    /// A worker reports to a master for the first time.
    fn greet(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get(&id) else {
            return;
        };
        let mut held: Vec<_> = worker
            .unacknowledged
            .iter()
            .map(|r| (r.task, r.attempt))
            .collect();
        held.extend(worker.current.map(|(task, attempt, _)| (task, attempt)));
        held.extend(worker.queue.iter().copied());
        let reports = worker.unacknowledged.clone();
        let is_paused = worker.paused;
        self.handle(Event::WorkerReturned {
            worker: id,
            class: CLASS,
            groups: Groups::ALL,
            host: worker.host.clone(),
            benchmark: None,
            held_attempts: held,
        });
        if is_paused {
            self.tell_master(ToMaster::Condition(id, true));
        }
        for report in reports {
            self.handle(Event::Attempt { worker: id, report });
        }
    }

    fn carry_out(&mut self) {
        while let Some(output) = self.dispatcher.as_mut().and_then(Dispatcher::poll) {
            match output {
                Output::Dispatch {
                    worker, attempts, ..
                } => {
                    self.send_to_worker(worker, ToWorker::Tasks(attempts));
                }
                Output::Recall { worker, attempts } => {
                    self.send_to_worker(worker, ToWorker::Recall(attempts));
                }
                Output::Cancel {
                    worker, attempt, ..
                } => {
                    self.send_to_worker(worker, ToWorker::Cancel(attempt));
                }
                Output::Accept {
                    worker,
                    task,
                    attempt,
                } => self.accept(worker, task, attempt),
                Output::Discard {
                    worker, attempt, ..
                } => {
                    self.send_to_worker(worker, ToWorker::Acknowledged(attempt));
                }
                Output::AttemptFailed { task, record, .. }
                | Output::AttemptLost { task, record } => {
                    self.journal.failed.push((task, record));
                }
                Output::Quarantined { task, .. } => {
                    self.journal.open.remove(&task);
                    assert!(self.journal.quarantined.insert(task), "{task} twice");
                }
                Output::StartWorkers { count, .. } => {
                    for _ in 0..count {
                        self.schedule(50_000, Happening::StartWorker);
                    }
                }
                Output::MoveWorker { worker } => self.migrate(worker),
                Output::ReleaseWorker { worker } => {
                    self.send_to_worker(worker, ToWorker::End);
                }
                Output::AllTasksClosed | Output::TooManyQuarantined { .. } => {}
            }
        }
        let wakeup = self.dispatcher.as_ref().and_then(Dispatcher::next_wakeup);
        if let Some(at) = wakeup
            && self.wakeup_at.is_none_or(|earlier| at < earlier)
        {
            self.wakeup_at = Some(at);
            self.schedule(at.saturating_sub(self.now), Happening::Wakeup);
        }
        let dispatcher = self.dispatcher.as_ref();
        let is_open = dispatcher.is_none_or(|dispatcher| dispatcher.open_task_count() > 0);
        self.is_finished = !is_open && self.pending.is_empty();
    }

    fn accept(&mut self, worker: WorkerId, task: TaskId, attempt: AttemptId) {
        assert!(
            !self.journal.accepted.contains_key(&task),
            "{task} was accepted twice"
        );
        assert!(
            !self.pending.contains_key(&task),
            "{task} was accepted twice"
        );
        let is_first = task.0 < (1 << 32) + self.scenario.first_tasks + 1;
        let children = if is_first { self.scenario.children } else { 0 };
        let children = self.new_tasks(children);
        let now = self.now;
        if let Some(dispatcher) = &mut self.dispatcher {
            dispatcher
                .add_tasks(now, &children)
                .expect("within the limits");
        }
        self.pending.insert(
            task,
            Pending {
                worker,
                attempt,
                children,
            },
        );
        self.schedule(COMMIT_TIME, Happening::Committed(self.generation, task));
    }

    fn commit(&mut self, task: TaskId) {
        let Some(pending) = self.pending.remove(&task) else {
            return;
        };
        *self.journal.accepted.entry(task).or_default() += 1;
        self.journal.open.remove(&task);
        self.journal
            .open
            .extend(pending.children.iter().map(|task| (task.id, *task)));
        if let Some(dispatcher) = &self.dispatcher {
            self.journal.statistics = dispatcher.statistics_up_to(self.now);
        }
        self.send_to_worker(pending.worker, ToWorker::Acknowledged(pending.attempt));
        self.carry_out();
        if self.random.happens(self.scenario.crashes) {
            self.crashes += 1;
            self.dispatcher = None;
            self.is_finished = false;
            self.schedule(MASTER_DOWN_TIME, Happening::StartMaster);
        }
    }

    fn tell_worker(&mut self, id: WorkerId, message: ToWorker) {
        let Some(worker) = self.workers.get_mut(&id) else {
            return;
        };
        match message {
            ToWorker::Tasks(attempts) => worker.queue.extend(attempts),
            ToWorker::Recall(attempts) => {
                let queue = &worker.queue;
                let returned: Vec<_> = attempts.into_iter().filter(|a| queue.contains(a)).collect();
                worker.queue.retain(|attempt| !returned.contains(attempt));
                self.send_to_master(ToMaster::Returned(id, returned));
            }
            ToWorker::Cancel(canceled) => {
                let position = worker
                    .queue
                    .iter()
                    .position(|(_, attempt)| *attempt == canceled);
                if let Some(attempt) = position.and_then(|p| worker.queue.remove(p)) {
                    self.send_to_master(ToMaster::Returned(id, vec![attempt]));
                }
            }
            ToWorker::Acknowledged(acknowledged) => {
                worker
                    .unacknowledged
                    .retain(|report| report.attempt != acknowledged);
            }
            ToWorker::End => {
                self.workers.remove(&id);
            }
        }
        self.begin_next(id);
    }

    fn begin_next(&mut self, id: WorkerId) {
        let now = self.now;
        let Some(worker) = self
            .workers
            .get_mut(&id)
            .filter(|w| w.current.is_none() && !w.paused)
        else {
            return;
        };
        if let Some((task, attempt)) = worker.queue.pop_front() {
            worker.current = Some((task, attempt, now));
            let duration = self.duration(task);
            self.schedule(duration, Happening::Finish(id, attempt));
        }
    }

    fn finish_attempt(&mut self, id: WorkerId, attempt: AttemptId) {
        let now = self.now;
        let Some(worker) = self.workers.get_mut(&id).filter(|worker| !worker.paused) else {
            return;
        };
        let Some((task, current, started_at)) = worker.current else {
            return;
        };
        if current != attempt {
            return;
        }
        if self.is_poison(task) {
            return self.kill(id, LossReason::Killed { signal: 11 });
        }
        if self.random.happens(self.scenario.kills) {
            let reasons = [LossReason::Owner, LossReason::HostLost, LossReason::Drained];
            let reason = reasons[self.random.below(3) as usize];
            return self.kill(id, reason);
        }
        if self.random.happens(self.scenario.pauses) {
            return self.pause(id);
        }
        if self.random.happens(self.scenario.migrations) {
            self.migrate(id);
        }
        let report = AttemptReport {
            task,
            attempt,
            outcome: AttemptOutcome::Completed,
            cpu: self.duration(task),
            wall: now - started_at,
        };
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.current = None;
            worker.unacknowledged.push(report);
        }
        self.send_to_master(ToMaster::Report(id, report));
        self.begin_next(id);
    }

    fn kill(&mut self, id: WorkerId, reason: LossReason) {
        self.kills += 1;
        self.workers.remove(&id);
        self.send_to_master(ToMaster::Lost(id, reason));
    }

    fn pause(&mut self, id: WorkerId) {
        let pause = 1 + self.random.below(self.scenario.pause_max);
        if let Some(worker) = self.workers.get_mut(&id) {
            worker.paused = true;
            worker.remaining = 1;
        }
        self.send_to_master(ToMaster::Condition(id, true));
        self.schedule(pause, Happening::Resume(id));
    }

    fn resume(&mut self, id: WorkerId) {
        let Some(worker) = self.workers.get_mut(&id) else {
            return;
        };
        worker.paused = false;
        let remaining = worker.remaining;
        let current = worker.current;
        self.send_to_master(ToMaster::Condition(id, false));
        match current {
            Some((_, attempt, _)) => self.schedule(remaining, Happening::Finish(id, attempt)),
            None => self.begin_next(id),
        }
    }

    fn migrate(&mut self, id: WorkerId) {
        let host = self.random.below(self.scenario.hosts);
        if let Some(worker) = self.workers.get_mut(&id) {
            self.migrations += 1;
            worker.host = format!("h{host}").into();
            self.send_to_master(ToMaster::Migrated(id));
        }
    }

    /// Each task was accepted and stored once, or was quarantined because it kills workers.
    fn check_results(&self) {
        let accepted = &self.journal.accepted;
        assert!(accepted.values().all(|count| *count == 1));
        let poison = |id: &&TaskId| self.is_poison(**id);
        assert!(
            accepted.keys().find(poison).is_none(),
            "a poisonous task has a result"
        );
        let poisonous = match self.scenario.poison_every {
            0 => 0,
            every => self.scenario.first_tasks / every,
        };
        assert_eq!(self.journal.quarantined.len() as u64, poisonous);
        assert!(
            self.journal
                .quarantined
                .iter()
                .all(|id| self.is_poison(*id))
        );
        let good = self.scenario.first_tasks - poisonous;
        assert_eq!(accepted.len() as u64, good * (1 + self.scenario.children));
        assert!(self.journal.open.is_empty());
        assert_eq!(
            self.journal.statistics.counts.results_accepted,
            accepted.len() as u64
        );
    }
}
