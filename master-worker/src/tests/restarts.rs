//! A master that is killed after any message continues with its journal: each task counts once.

use crate::master::{Master, MasterEvent, RunError, RunState, Transport};
use crate::protocol::{
    AttemptContent, AttemptResult, Hello, PROTOCOL_VERSION, RawTask, TaskOrder, ToMaster, ToWorker,
};
use crate::raw::{Failure, RawDriver, ResultInfo};
use crate::run::{Run, WorkerProgram};
use crate::start::{MasterOptions, begin_run};
use bytes::Bytes;
use sempa_work_dispatch::{AttemptId, ClassId, Groups, LossReason, Micros, TaskId, WorkerId};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

const FIRST_TASKS: u64 = 40;
/// Each of the first tasks adds this number of tasks.
const CHILDREN: u64 = 3;
/// A subtask splits into two returned tasks until its number is below this.
const RETURNED_BELOW: u64 = 4;

pub(super) fn raw_task(number: u64) -> RawTask {
    RawTask {
        key: (number % 5) as f64,
        groups: Groups::ALL,
        payload: Bytes::copy_from_slice(&number.to_le_bytes()),
    }
}

pub(super) fn number_in(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes.try_into().expect("eight bytes"))
}

/// Counts results and adds their numbers.
#[derive(Default)]
struct Adder {
    results: u64,
    sum: u64,
}

impl RawDriver for Adder {
    fn start(&mut self, run: &mut Run) -> Result<(), Failure> {
        run.add_tasks((1..=FIRST_TASKS).map(|n| raw_task(n * 1_000)).collect())?;
        Ok(())
    }

    fn save(&self) -> Result<Bytes, Failure> {
        Ok([self.results, self.sum]
            .map(u64::to_le_bytes)
            .concat()
            .into())
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Failure> {
        (self.results, self.sum) = (number_in(&state[..8]), number_in(&state[8..]));
        Ok(())
    }

    fn init_data(&mut self) -> Result<Bytes, Failure> {
        Ok(Bytes::from_static(b"init"))
    }

    fn on_result(
        &mut self,
        run: &mut Run,
        _info: &ResultInfo,
        task: &Bytes,
        result: &Bytes,
    ) -> Result<(), Failure> {
        self.results += 1;
        self.sum += number_in(result);
        let number = number_in(task);
        if number.is_multiple_of(1_000) {
            let children = (1..=CHILDREN).map(|child| raw_task(number + child));
            run.add_tasks_in_front(children.collect())?;
        }
        Ok(())
    }
}

/// Random numbers of the generator xorshift64*.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit
    }
}

#[derive(Default)]
pub(super) struct Outbox {
    pub(super) messages: Vec<(WorkerId, ToWorker)>,
}

impl Transport for Outbox {
    fn send(&mut self, worker: WorkerId, message: &ToWorker) {
        self.messages.push((worker, message.clone()));
    }

    fn start_workers(&mut self, _class: ClassId, _program: &WorkerProgram, _count: u32) {}

    fn move_worker(&mut self, _worker: WorkerId) {}
}

/// A worker that executes one task whenever it is asked to.
#[derive(Default)]
struct SimWorker {
    run: Option<u64>,
    init: Option<u64>,
    inbox: VecDeque<ToWorker>,
    queue: VecDeque<TaskOrder>,
    unacknowledged: Vec<AttemptResult>,
}

impl SimWorker {
    fn hello(&self) -> ToMaster {
        let finished = self
            .unacknowledged
            .iter()
            .map(|result| (result.task, result.attempt));
        let queued = self.queue.iter().map(|order| (order.task, order.attempt));
        ToMaster::Hello(Hello {
            protocol: PROTOCOL_VERSION,
            run: self.run,
            init: self.init,
            class: ClassId(0),
            groups: Groups::ALL,
            host: "a".to_string(),
            benchmark_us: None,
            held_attempts: finished.chain(queued).collect(),
        })
    }

    /// Handles a message, and returns the answers.
    fn handle(&mut self, message: ToWorker) -> Vec<ToMaster> {
        match message {
            ToWorker::Welcome(welcome) if welcome.init.is_some() => {
                assert!(welcome.keeps_results);
                self.run = Some(welcome.run);
                self.queue.clear();
                self.unacknowledged.clear();
                self.init = Some(welcome.init_number);
                return vec![ToMaster::Ready {
                    init: welcome.init_number,
                    benchmark_us: None,
                }];
            }
            ToWorker::Welcome(_) => {
                return vec![ToMaster::Results(self.unacknowledged.clone())];
            }
            ToWorker::Tasks { orders, .. } => self.queue.extend(orders),
            ToWorker::Recall(attempts) => return vec![self.give_back(&attempts)],
            ToWorker::Cancel { task, attempt } => return vec![self.give_back(&[(task, attempt)])],
            ToWorker::Acknowledged(attempts) => {
                self.unacknowledged
                    .retain(|result| !attempts.contains(&result.attempt));
            }
            _ => {}
        }
        Vec::new()
    }

    fn give_back(&mut self, attempts: &[(TaskId, AttemptId)]) -> ToMaster {
        let is_recalled = |order: &TaskOrder| attempts.contains(&(order.task, order.attempt));
        let returned = self.queue.iter().filter(|order| is_recalled(order));
        let returned = returned.map(|order| (order.task, order.attempt)).collect();
        self.queue.retain(|order| !is_recalled(order));
        ToMaster::Returned(returned)
    }

    fn execute_one(&mut self) -> Option<ToMaster> {
        let order = self.queue.pop_front()?;
        let number = number_in(&order.payload);
        // A child returns two smaller tasks, which do the same.
        let part = number % 1_000;
        let returned_tasks = match part {
            0 | RETURNED_BELOW.. => Vec::new(),
            _ => vec![raw_task(number + 10), raw_task(number + 20)],
        };
        let result = AttemptResult {
            task: order.task,
            attempt: order.attempt,
            cpu_us: 1,
            wall_us: 1,
            content: AttemptContent::Completed {
                result: Bytes::copy_from_slice(&number.to_le_bytes()),
                returned_tasks,
            },
        };
        self.unacknowledged.push(result.clone());
        Some(ToMaster::Results(vec![result]))
    }
}

/// Count and sum of a run without losses.
fn expected() -> (u64, u64) {
    let mut expected = (0, 0);
    for first in (1..=FIRST_TASKS).map(|n| n * 1_000) {
        let children = (1..=CHILDREN).flat_map(|c| [first + c, first + c + 10, first + c + 20]);
        for number in std::iter::once(first).chain(children) {
            expected = (expected.0 + 1, expected.1 + number);
        }
    }
    expected
}

pub(super) fn options(dir: &Path) -> MasterOptions {
    MasterOptions {
        journal: Some(dir.to_path_buf()),
        ..MasterOptions::new("test")
    }
}

/// Carries out a run with four workers. `kill` is asked after each step whether the master is
/// killed. Returns the driver and the number of masters.
fn run_to_end(dir: &Path, random: &mut Random, kill_one_in: usize) -> (Adder, u64) {
    let mut workers: BTreeMap<WorkerId, SimWorker> = (1..=4)
        .map(|id| (WorkerId(id), SimWorker::default()))
        .collect();
    let mut masters = 0;
    let mut now: Micros = 0;
    let mut next_worker = 5;
    loop {
        let start = begin_run(Adder::default(), &options(dir), Box::new(|| {})).expect("begins");
        masters += 1;
        assert_eq!(start.generation, masters);
        let mut master = start.master;
        let mut outbox = Outbox::default();
        for (id, worker) in &mut workers {
            worker.inbox.clear();
            let hello = MasterEvent::Message(*id, worker.hello());
            master.handle(now, hello, &mut outbox).expect("handled");
        }
        while master.state == RunState::Running {
            now += 1_000;
            for (id, message) in std::mem::take(&mut outbox.messages) {
                workers.entry(id).or_default().inbox.push_back(message);
            }
            step(&mut master, &mut workers, &mut outbox, random, now);
            if random.below(500) == 0 {
                lose_worker(
                    &mut master,
                    &mut workers,
                    &mut outbox,
                    &mut next_worker,
                    now,
                );
            }
            if random.below(100) == 0 {
                // Fails while another snapshot is being written.
                let _ = master.begin_snapshot();
            }
            if random.below(kill_one_in) == 0 {
                break;
            }
        }
        if master.state == RunState::Finished {
            let journal = master.journal.take().expect("a journal");
            let patience = std::time::Duration::from_secs(60);
            journal.journal.finish(patience).expect("finished");
            return (master.driver, masters);
        }
    }
}

/// One worker handles a message or executes a task.
fn step(
    master: &mut Master<Adder>,
    workers: &mut BTreeMap<WorkerId, SimWorker>,
    outbox: &mut Outbox,
    random: &mut Random,
    now: Micros,
) {
    let ids: Vec<WorkerId> = workers.keys().copied().collect();
    let id = ids[random.below(ids.len())];
    let worker = workers.get_mut(&id).expect("there");
    let answers = match worker.inbox.pop_front() {
        Some(message) => worker.handle(message),
        None => worker.execute_one().into_iter().collect(),
    };
    for answer in answers {
        let event = MasterEvent::Message(id, answer);
        master.receive(now, event, outbox).expect("received");
    }
    // Callbacks wait while messages arrive. A master that is killed loses those that wait.
    while random.below(3) > 0 && master.run_callback(now, outbox).expect("called") {}
    if random.below(4) == 0 {
        master
            .handle(now, MasterEvent::Tick, outbox)
            .expect("handled");
    }
}

fn lose_worker(
    master: &mut Master<Adder>,
    workers: &mut BTreeMap<WorkerId, SimWorker>,
    outbox: &mut Outbox,
    next_worker: &mut u64,
    now: Micros,
) {
    let (lost, _) = workers.pop_first().expect("a worker");
    let event = MasterEvent::WorkerLost(lost, LossReason::HostLost);
    master.handle(now, event, outbox).expect("handled");
    let new = WorkerId(*next_worker);
    *next_worker += 1;
    let worker = SimWorker::default();
    let hello = MasterEvent::Message(new, worker.hello());
    workers.insert(new, worker);
    master.handle(now, hello, outbox).expect("handled");
}

#[test]
fn each_task_counts_once_however_often_the_master_is_killed() {
    for seed in 1..=12 {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path().join("run");
        let mut random = Random(0x9e37_79b9_7f4a_7c15_u64.wrapping_mul(seed));
        let (driver, masters) = run_to_end(&dir, &mut random, 60);
        assert_eq!((driver.results, driver.sum), expected(), "seed {seed}");
        assert!(masters > 3, "seed {seed}: {masters} masters");
        assert!(!dir.exists(), "a finished run leaves no journal");
    }
}

/// Changes what `on_result` adds after a restart.
struct Changed(Adder);

impl RawDriver for Changed {
    fn start(&mut self, run: &mut Run) -> Result<(), Failure> {
        self.0.start(run)
    }

    fn save(&self) -> Result<Bytes, Failure> {
        self.0.save()
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Failure> {
        self.0.restore(state)
    }

    fn init_data(&mut self) -> Result<Bytes, Failure> {
        self.0.init_data()
    }

    fn on_result(
        &mut self,
        _run: &mut Run,
        _info: &ResultInfo,
        _task: &Bytes,
        _result: &Bytes,
    ) -> Result<(), Failure> {
        Ok(())
    }
}

#[test]
fn driver_that_repeats_differently_is_refused_and_loses_nothing() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path().join("run");
    let mut random = Random(7);
    let mut workers = BTreeMap::from([(WorkerId(1), SimWorker::default())]);
    let mut outbox = Outbox::default();
    let start = begin_run(Adder::default(), &options(&dir), Box::new(|| {})).expect("begins");
    let mut master = start.master;
    let hello = MasterEvent::Message(WorkerId(1), workers[&WorkerId(1)].hello());
    master.handle(0, hello, &mut outbox).expect("handled");
    let mut now = 0;
    while master.driver.results < 5 {
        now += 1_000;
        for (id, message) in std::mem::take(&mut outbox.messages) {
            workers
                .get_mut(&id)
                .expect("there")
                .inbox
                .push_back(message);
        }
        step(&mut master, &mut workers, &mut outbox, &mut random, now);
    }
    let results = master.driver.results;
    drop(master);
    let refused = begin_run(Changed(Adder::default()), &options(&dir), Box::new(|| {}));
    let Err(RunError::Start(reason)) = refused else {
        panic!("not refused");
    };
    assert!(reason.contains("on_result added other tasks"), "{reason}");
    let again = begin_run(Adder::default(), &options(&dir), Box::new(|| {})).expect("begins");
    assert_eq!(again.master.driver.results, results);
}

#[test]
fn second_master_is_refused() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path().join("run");
    let first = begin_run(Adder::default(), &options(&dir), Box::new(|| {})).expect("begins");
    let second = begin_run(Adder::default(), &options(&dir), Box::new(|| {}));
    let Err(RunError::Start(reason)) = second else {
        panic!("not refused");
    };
    let pid = std::process::id().to_string();
    assert!(reason.contains(&pid), "{reason}");
    drop(first);
}
