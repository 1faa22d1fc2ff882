//! Init data that change while the run goes on, updates of single workers, and tasks that the
//! driver abandons.

use super::restarts::{Outbox, number_in, options, raw_task};
use crate::master::{Master, MasterEvent, RunState};
use crate::protocol::{
    AttemptContent, AttemptResult, Hello, InitSource, PROTOCOL_VERSION, TaskOrder, ToMaster,
    ToWorker,
};
use crate::raw::{Failure, RawDriver, ResultInfo};
use crate::run::Run;
use crate::start::begin_run;
use bytes::Bytes;
use sempa_work_dispatch::{ClassId, Groups, TaskId, WorkerId};
use std::path::Path;

/// Size above which init data are stored once per host.
const LARGE: usize = 64 << 10;
/// Result at which the driver changes the init data for the first group.
const REFRESH: u64 = 1;
/// Result at which the driver updates the worker 2 only.
const UPDATE_ONE: u64 = 2;
/// Result at which the driver abandons what worker 2 computes.
const STOP: u64 = 3;
/// Result at which the driver closes all tasks.
const CLOSE: u64 = 4;
/// Result at which the driver adds a task.
const ADD: u64 = 5;

struct Changing {
    tasks: u64,
    /// Each byte of the init data.
    init: u8,
    results: u64,
    stopped: Option<TaskId>,
}

impl Changing {
    fn new(tasks: u64, init: u8) -> Self {
        Self {
            tasks,
            init,
            results: 0,
            stopped: None,
        }
    }

    fn data(&self) -> Bytes {
        vec![self.init; LARGE].into()
    }
}

impl RawDriver for Changing {
    fn start(&mut self, run: &mut Run) -> Result<(), Failure> {
        run.add_tasks((1..=self.tasks).map(raw_task).collect())?;
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
        Ok(self.data())
    }

    fn on_result(
        &mut self,
        run: &mut Run,
        _info: &ResultInfo,
        _task: &Bytes,
        result: &Bytes,
    ) -> Result<(), Failure> {
        self.results += 1;
        match number_in(result) {
            REFRESH => {
                self.init += 1;
                run.add_tasks((101..=103).map(raw_task).collect())?;
                run.refresh_init_data(self.data(), Groups::single(1));
            }
            UPDATE_ONE => run.send_update_to(WorkerId(2), Bytes::from_static(b"for two")),
            STOP => self.stopped = run.stop_work(WorkerId(2)),
            CLOSE => {
                run.prune(-1.0, true);
            }
            ADD => {
                run.add_tasks(vec![raw_task(104)])?;
            }
            _ => {}
        }
        Ok(())
    }
}

fn completed(order: &TaskOrder, result: u64) -> AttemptResult {
    AttemptResult {
        task: order.task,
        attempt: order.attempt,
        cpu_us: 1,
        wall_us: 1,
        content: AttemptContent::Completed {
            result: Bytes::copy_from_slice(&result.to_le_bytes()),
            returned_tasks: Vec::new(),
        },
    }
}

/// A master and the messages that its workers have not read.
struct Setup {
    master: Master<Changing>,
    outbox: Outbox,
}

fn hello(run: Option<u64>, init: Option<u64>, host: &str, group: u32) -> ToMaster {
    ToMaster::Hello(Hello {
        protocol: PROTOCOL_VERSION,
        run,
        init,
        class: ClassId(0),
        groups: Groups::single(group).expect("a group"),
        host: host.to_string(),
        benchmark_us: None,
        held_attempts: Vec::new(),
    })
}

impl Setup {
    fn new(dir: &Path, driver: Changing) -> Self {
        let mut options = options(dir);
        options.settings.look_ahead = 0;
        options.settings.second_copies = false;
        let start = begin_run(driver, &options, Box::new(|| {})).expect("begins");
        Self {
            master: start.master,
            outbox: Outbox::default(),
        }
    }

    fn send(&mut self, worker: u64, message: ToMaster) {
        let event = MasterEvent::Message(WorkerId(worker), message);
        let handled = self.master.handle(1, event, &mut self.outbox);
        handled.expect("handled");
    }

    /// Returns and removes the messages to a worker.
    fn take(&mut self, worker: u64) -> Vec<ToWorker> {
        let all = std::mem::take(&mut self.outbox.messages);
        let (taken, others): (Vec<_>, Vec<_>) = all.into_iter().partition(|(id, _)| id.0 == worker);
        self.outbox.messages = others;
        taken.into_iter().map(|(_, message)| message).collect()
    }

    /// Returns where a worker gets its init data, with their number.
    fn take_source(&mut self, worker: u64) -> Option<(InitSource, u64)> {
        self.take(worker)
            .into_iter()
            .find_map(|message| match message {
                ToWorker::Welcome(welcome) => Some((welcome.init?, welcome.init_number)),
                _ => None,
            })
    }

    fn take_tasks(&mut self, worker: u64) -> Vec<TaskOrder> {
        let messages = self.take(worker).into_iter();
        messages
            .filter_map(|message| match message {
                ToWorker::Tasks { orders, .. } => Some(orders),
                _ => None,
            })
            .flatten()
            .collect()
    }

    fn ready(&mut self, worker: u64, init: u64) {
        let benchmark_us = None;
        self.send(worker, ToMaster::Ready { init, benchmark_us });
    }

    /// A new worker comes and gets its init data. Returns its first tasks.
    fn join(&mut self, worker: u64, host: &str, group: u32) -> Vec<TaskOrder> {
        self.send(worker, hello(None, None, host, group));
        let (_, number) = self.take_source(worker).expect("init data");
        self.ready(worker, number);
        self.take_tasks(worker)
    }

    fn finish(&mut self, worker: u64, order: &TaskOrder, result: u64) {
        self.send(worker, ToMaster::Results(vec![completed(order, result)]));
    }

    /// Delivers a result. The callback waits.
    fn deliver(&mut self, worker: u64, order: &TaskOrder, result: u64) {
        let results = ToMaster::Results(vec![completed(order, result)]);
        let event = MasterEvent::Message(WorkerId(worker), results);
        let received = self.master.receive(2, event, &mut self.outbox);
        received.expect("received");
    }

    /// Runs the next callback. Returns false if none waits.
    fn run_callback(&mut self) -> bool {
        let called = self.master.run_callback(3, &mut self.outbox);
        called.expect("called")
    }

    fn has_change(&mut self, worker: u64) -> bool {
        let messages = self.take(worker);
        messages.contains(&ToWorker::InitChanged)
    }
}

fn is_message(source: &InitSource) -> bool {
    matches!(
        source,
        InitSource::Message {
            store_as: Some(_),
            ..
        }
    )
}

/// The workers of a group get new init data, once for each of their hosts; those of other groups
/// keep theirs, and new workers get the new data.
#[test]
fn new_init_data_reach_the_group_once_per_host() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut setup = Setup::new(&dir.path().join("run"), Changing::new(4, 7));
    let tasks: Vec<_> = [(1, "a", 1), (2, "a", 1), (3, "b", 2), (4, "b", 1)]
        .into_iter()
        .map(|(worker, host, group)| setup.join(worker, host, group))
        .collect();
    assert_eq!(setup.master.init_bytes_sent(), 2 * LARGE as u64);
    // Worker 6 is getting the old data when they change.
    setup.send(6, hello(None, None, "c", 1));
    let (_, old_number) = setup.take_source(6).expect("init data");

    setup.finish(1, &tasks[0][0], REFRESH);
    let messages = setup.take(1);
    let change = messages.iter().position(|m| *m == ToWorker::InitChanged);
    let task = messages
        .iter()
        .position(|m| matches!(m, ToWorker::Tasks { .. }));
    assert!(
        change < task && change.is_some(),
        "a task that the callback has added comes later: {messages:?}"
    );
    assert!(setup.has_change(2) && !setup.has_change(3) && setup.has_change(4));

    setup.send(1, ToMaster::InitWanted);
    setup.send(2, ToMaster::InitWanted);
    let (source, number) = setup.take_source(1).expect("new data");
    assert!(is_message(&source));
    assert_ne!(number, old_number);
    assert_eq!(setup.take_source(2), None, "worker 1 is storing the data");
    setup.ready(1, number);
    let (source, _) = setup.take_source(2).expect("new data");
    assert!(matches!(source, InitSource::Host { .. }), "{source:?}");
    setup.ready(2, number);
    setup.send(4, ToMaster::InitWanted);
    assert!(is_message(&setup.take_source(4).expect("new data").0));
    setup.ready(4, number);

    setup.ready(6, old_number);
    let messages = setup.take(6);
    let [ToWorker::Welcome(welcome)] = &messages[..] else {
        panic!("only the new data: {messages:?}");
    };
    assert_eq!(welcome.init_number, number);
    setup.ready(6, number);
    assert_eq!(setup.take_tasks(6).len(), 1);

    setup.send(5, hello(None, None, "b", 2));
    let (source, _) = setup.take_source(5).expect("new data");
    assert!(matches!(source, InitSource::Host { .. }), "{source:?}");
    // The old data to a, b, c, and the new ones.
    assert_eq!(setup.master.init_bytes_sent(), 6 * LARGE as u64);
}

/// A worker that asked for new data and is lost does not keep the others of its host waiting.
#[test]
fn loss_of_a_worker_with_new_init_data_frees_the_others() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut setup = Setup::new(&dir.path().join("run"), Changing::new(20, 7));
    let first = setup.join(1, "a", 1);
    setup.join(2, "a", 1);
    setup.finish(1, &first[0], REFRESH);
    setup.send(1, ToMaster::InitWanted);
    setup.send(2, ToMaster::InitWanted);
    assert_eq!(setup.take_source(2), None);
    let lost = MasterEvent::WorkerLost(WorkerId(1), sempa_work_dispatch::LossReason::HostLost);
    let handled = setup.master.handle(2, lost, &mut setup.outbox);
    handled.expect("handled");
    assert!(is_message(&setup.take_source(2).expect("new data").0));
}

/// Workers that return to a restarted master get its init data if they differ.
#[test]
fn returned_worker_gets_init_data_that_have_changed() {
    for (init, changes) in [(7, false), (8, true)] {
        let dir = tempfile::tempdir().expect("a folder");
        let dir = dir.path().join("run");
        let mut setup = Setup::new(&dir, Changing::new(20, 7));
        setup.send(1, hello(None, None, "a", 1));
        let (_, number) = setup.take_source(1).expect("init data");
        let run = setup.master.run_number;
        setup.ready(1, number);
        drop(setup);
        let mut next = Setup::new(&dir, Changing::new(20, init));
        next.send(1, hello(Some(run), Some(number), "a", 1));
        let messages = next.take(1);
        let is_welcome = |message: &ToWorker| match message {
            ToWorker::Welcome(welcome) => welcome.init.is_none(),
            _ => false,
        };
        assert!(messages.iter().any(is_welcome), "{messages:?}");
        assert_eq!(messages.contains(&ToWorker::InitChanged), changes);
    }
}

#[test]
fn update_of_one_worker_goes_to_no_other() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut setup = Setup::new(&dir.path().join("run"), Changing::new(20, 7));
    let first = setup.join(1, "a", 1);
    setup.join(2, "a", 1);
    setup.finish(1, &first[0], UPDATE_ONE);
    let updates = |messages: Vec<ToWorker>| -> Vec<Bytes> {
        let data = |message| match message {
            ToWorker::Update(update) => Some(update.data),
            _ => None,
        };
        messages.into_iter().filter_map(data).collect()
    };
    assert_eq!(updates(setup.take(1)), Vec::<Bytes>::new());
    assert_eq!(updates(setup.take(2)), ["for two"]);
}

/// The driver abandons the task of another worker; a restart does not execute the task again.
#[test]
fn abandoned_task_is_not_restarted() {
    let dir = tempfile::tempdir().expect("a folder");
    let dir = dir.path().join("run");
    let mut setup = Setup::new(&dir, Changing::new(5, 7));
    let first = setup.join(1, "a", 1);
    let abandoned = setup.join(2, "a", 1)[0].clone();
    setup.finish(1, &first[0], STOP);
    assert_eq!(setup.master.driver.stopped, Some(abandoned.task));
    let cancel = ToWorker::Cancel {
        task: abandoned.task,
        attempt: abandoned.attempt,
    };
    assert!(setup.take(2).contains(&cancel));
    setup.finish(2, &abandoned, 77);
    assert_eq!(setup.master.driver.results, 1, "a late result is discarded");
    drop(setup);
    let next = Setup::new(&dir, Changing::new(5, 7));
    assert_eq!(next.master.driver.results, 1);
    let mut open: Vec<TaskId> = next.master.run.open_tasks().map(|(id, ..)| id).collect();
    open.sort_unstable();
    assert_eq!(open.len(), 3);
    assert!(!open.contains(&abandoned.task));
}

/// The end of a run takes the statistics first, and tells all workers at once, also those that
/// compute (point 20).
#[test]
fn end_of_a_run_counts_workers_before_their_release() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut setup = Setup::new(&dir.path().join("run"), Changing::new(20, 7));
    let first = setup.join(1, "a", 1);
    setup.join(2, "a", 1);
    setup.join(3, "b", 1);
    setup.finish(1, &first[0], CLOSE);
    assert_eq!(setup.master.state, RunState::Finished);
    assert_eq!(setup.master.report().workers.len(), 3);
    let end = ToWorker::End { run_is_over: true };
    for worker in 1..=3 {
        assert!(setup.take(worker).contains(&end), "worker {worker}");
    }
}

/// The dispatcher decides about all results that have arrived before the first callback begins, so
/// that a slow callback keeps no worker waiting.
#[test]
fn tasks_are_sent_before_the_callbacks_of_results() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut setup = Setup::new(&dir.path().join("run"), Changing::new(20, 7));
    let first: Vec<TaskOrder> = (1..=3).map(|w| setup.join(w, "a", 1)[0].clone()).collect();
    for (worker, order) in (1..=3).zip(&first) {
        setup.deliver(worker, order, 77);
    }
    assert_eq!(setup.master.driver.results, 0);
    for worker in 1..=3 {
        assert_eq!(setup.take_tasks(worker).len(), 1, "worker {worker}");
    }
    for results in 1..=3 {
        assert!(setup.run_callback());
        assert_eq!(setup.master.driver.results, results);
    }
    assert!(!setup.run_callback());
}

/// All tasks were closed, a callback adds a task, and its result arrives before the run has reacted
/// to the end of the earlier tasks: the run must not end without the callback of that result.
#[test]
fn run_ends_after_the_callbacks_of_all_results() {
    let dir = tempfile::tempdir().expect("a folder");
    let mut setup = Setup::new(&dir.path().join("run"), Changing::new(1, 7));
    let first = setup.join(1, "a", 1)[0].clone();
    setup.deliver(1, &first, ADD);
    assert!(setup.run_callback());
    let added = setup.take_tasks(1);
    setup.deliver(1, &added[0], 77);
    while setup.run_callback() {}
    assert_eq!(setup.master.driver.results, 2);
    assert_eq!(setup.master.state, RunState::Finished);
}
