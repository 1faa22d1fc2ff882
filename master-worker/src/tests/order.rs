//! A restart reads the order of tasks, and tasks in each stage.

use super::restarts::{Outbox, number_in, options, raw_task};
use crate::master::{Master, MasterEvent};
use crate::protocol::{
    AttemptContent, AttemptResult, Hello, PROTOCOL_VERSION, RawTask, TaskOrder, ToMaster, ToWorker,
};
use crate::raw::{Failure, RawDriver, ResultInfo};
use crate::run::Run;
use crate::start::{MasterOptions, begin_run};
use bytes::Bytes;
use sempa_work_dispatch::{AttemptRecord, ClassId, Groups, TaskId, WorkerId};
use std::path::Path;

const WORKER: WorkerId = WorkerId(1);
/// A result of this task changes keys and adds tasks.
const FIRST: u64 = 1;
/// Workers fail this task.
const POISON: u64 = 9;

fn keyed(number: u64, key: f64) -> RawTask {
    RawTask {
        key,
        ..raw_task(number)
    }
}

/// Gives its tasks keys that only the first start and the first result set.
#[derive(Default)]
struct Sorter {
    ids: Vec<TaskId>,
    results: u64,
    quarantined: u64,
    has_benchmark: bool,
}

impl RawDriver for Sorter {
    fn start(&mut self, run: &mut Run) -> Result<(), Failure> {
        let keys = [(FIRST, -9.0), (2, 5.0), (3, 1.0), (4, 3.0), (5, 3.0)];
        let tasks = keys.map(|(number, key)| keyed(number, key)).to_vec();
        self.ids = run.add_tasks(tasks)?;
        Ok(())
    }

    fn save(&self) -> Result<Bytes, Failure> {
        Ok(Bytes::copy_from_slice(&self.results.to_le_bytes()))
    }

    fn restore(&mut self, state: &[u8]) -> Result<(), Failure> {
        self.results = number_in(state);
        Ok(())
    }

    fn init_data(&mut self) -> Result<Bytes, Failure> {
        Ok(Bytes::new())
    }

    fn benchmark(&mut self) -> Option<Bytes> {
        self.has_benchmark.then(|| Bytes::from_static(b"benchmark"))
    }

    fn on_result(
        &mut self,
        run: &mut Run,
        _info: &ResultInfo,
        task: &Bytes,
        _result: &Bytes,
    ) -> Result<(), Failure> {
        self.results += 1;
        if number_in(task) == FIRST {
            run.add_tasks_in_front(vec![keyed(6, 3.0), keyed(7, 3.0)])?;
            run.add_tasks(vec![keyed(8, 3.0)])?;
            if let Some(second) = self.ids.get(1) {
                run.set_key(*second, 0.0);
            }
        }
        Ok(())
    }

    fn on_quarantined(
        &mut self,
        _run: &mut Run,
        _task: TaskId,
        _payload: &Bytes,
        _history: &[AttemptRecord],
    ) -> Result<(), Failure> {
        self.quarantined += 1;
        Ok(())
    }
}

fn quiet_options(dir: &Path) -> MasterOptions {
    let mut options = options(dir);
    options.settings.look_ahead = 0;
    options.settings.second_copies = false;
    options.settings.retry.attempts_max = 1;
    options
}

fn begin(dir: &Path, driver: Sorter) -> Master<Sorter> {
    let start = begin_run(driver, &quiet_options(dir), Box::new(|| {})).expect("begins");
    start.master
}

fn send(master: &mut Master<Sorter>, outbox: &mut Outbox, message: ToMaster) {
    let event = MasterEvent::Message(WORKER, message);
    master.handle(1, event, outbox).expect("handled");
}

/// A new worker comes and is ready.
fn join(master: &mut Master<Sorter>, outbox: &mut Outbox) {
    let hello = ToMaster::Hello(Hello {
        protocol: PROTOCOL_VERSION,
        run: None,
        init: None,
        class: ClassId(0),
        groups: Groups::ALL,
        host: "a".to_string(),
        benchmark_us: None,
        held_attempts: Vec::new(),
    });
    send(master, outbox, hello);
    let init = master.init.number();
    let benchmark_us = master.benchmark.is_some().then_some(5);
    send(master, outbox, ToMaster::Ready { init, benchmark_us });
}

/// Returns the newest task that was sent.
fn next_task(outbox: &mut Outbox) -> Option<TaskOrder> {
    let messages = std::mem::take(&mut outbox.messages).into_iter();
    let orders = messages.filter_map(|(_, message)| match message {
        ToWorker::Tasks { orders, .. } => Some(orders),
        _ => None,
    });
    orders.flatten().last()
}

fn finish(master: &mut Master<Sorter>, outbox: &mut Outbox, order: &TaskOrder) {
    let content = match number_in(&order.payload) {
        POISON => AttemptContent::Failed {
            message: "poison".to_string(),
        },
        _ => AttemptContent::Completed {
            result: Bytes::new(),
            returned_tasks: Vec::new(),
        },
    };
    let result = AttemptResult {
        task: order.task,
        attempt: order.attempt,
        cpu_us: 1,
        wall_us: 1,
        content,
    };
    send(master, outbox, ToMaster::Results(vec![result]));
}

/// Executes tasks one after the other and returns their numbers.
fn execute(master: &mut Master<Sorter>, outbox: &mut Outbox, count: usize) -> Vec<u64> {
    let mut numbers = Vec::new();
    while numbers.len() < count
        && let Some(order) = next_task(outbox)
    {
        numbers.push(number_in(&order.payload));
        finish(master, outbox, &order);
    }
    numbers
}

/// The order of tasks survives a restart without any call of the driver: keys, keys that were
/// changed, and tasks that were added in front (point 10).
#[test]
fn restart_keeps_the_order_of_tasks() {
    for killed_after in 1..=5 {
        // Task 3 is dispatched before the first result changes the keys. A master that is killed
        // then begins with the better task.
        let expected = match killed_after {
            1 => [2, 3, 6, 7, 4, 5, 8],
            _ => [3, 2, 6, 7, 4, 5, 8],
        };
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path().join("run");
        let mut outbox = Outbox::default();
        let mut master = begin(&dir, Sorter::default());
        join(&mut master, &mut outbox);
        let mut order = execute(&mut master, &mut outbox, killed_after);
        drop(master);
        // The task that ran is executed again, at its old place.
        outbox.messages.clear();
        let mut master = begin(&dir, Sorter::default());
        join(&mut master, &mut outbox);
        order.extend(execute(&mut master, &mut outbox, usize::MAX));
        assert_eq!(order[0], FIRST);
        assert_eq!(order[1..], expected, "killed after {killed_after} results");
    }
}

/// Open tasks of each stage are there after a restart, quarantined ones are quarantined, and the
/// benchmark is no task of the run (point 11).
#[test]
fn restart_reads_running_and_quarantined_tasks_and_no_benchmark() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path().join("run");
    let mut outbox = Outbox::default();
    let driver = || Sorter {
        has_benchmark: true,
        ..Sorter::default()
    };
    let mut master = begin(&dir, driver());
    let poison = master.run.add_tasks(vec![keyed(POISON, -10.0)]);
    let poison = poison.expect("added")[0];
    join(&mut master, &mut outbox);
    assert_eq!(execute(&mut master, &mut outbox, 2), [POISON, FIRST]);
    let running = next_task(&mut outbox).expect("a running task");
    assert_eq!(master.run.dispatcher.is_running(running.task), Some(true));
    let open_before = master.run.dispatcher.open_task_count();
    drop(master);

    let mut master = begin(&dir, driver());
    assert_eq!(master.run.dispatcher.open_task_count(), open_before);
    assert_eq!(master.run.dispatcher.is_running(running.task), Some(false));
    let quarantined = master.run.quarantined_tasks();
    assert_eq!(quarantined.len(), 1);
    assert_eq!(quarantined[0].task, poison);
    assert_eq!(quarantined[0].history.len(), 1);
    outbox.messages.clear();
    join(&mut master, &mut outbox);
    assert_eq!(
        execute(&mut master, &mut outbox, usize::MAX).len(),
        open_before
    );
    assert_eq!((master.driver.results, master.driver.quarantined), (8, 1));
}
