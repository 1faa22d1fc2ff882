//! The loop of a worker with a connection that records its messages.

use crate::context::Context;
use crate::host_store::HostStore;
use crate::protocol::{AttemptContent, InitSource, TaskOrder, ToMaster, ToWorker, Welcome};
use crate::raw::{Failure, RawWorker};
use crate::worker_loop::{WorkerEnd, WorkerIdentity, WorkerInput, WorkerPort, run_worker};
use bytes::Bytes;
use sempa_work_dispatch::{AttemptId, TaskId};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Time limit of a wait that ends within milliseconds.
const TIMEOUT: Duration = Duration::from_secs(60);

type Sent = Rc<RefCell<Vec<ToMaster>>>;

/// Number of results in the messages.
fn reported_count(sent: &Sent) -> usize {
    let sent = sent.borrow();
    let counts = sent.iter().map(|message| match message {
        ToMaster::Results(results) => results.len(),
        _ => 0,
    });
    counts.sum()
}

struct FakePort {
    inputs: VecDeque<ToWorker>,
    sent: Sent,
}

impl WorkerPort for FakePort {
    fn next_input(&mut self, waits: bool) -> Result<Option<WorkerInput>, Failure> {
        // A master sends tasks when the worker is ready.
        let is_ready = |message: &ToMaster| matches!(message, ToMaster::Ready { .. });
        let is_early = matches!(self.inputs.front(), Some(ToWorker::Tasks { .. }))
            && !self.sent.borrow().iter().any(is_ready);
        if is_early {
            return Ok(None);
        }
        let end = || waits.then_some(ToWorker::End { run_is_over: true });
        Ok(self
            .inputs
            .pop_front()
            .or_else(end)
            .map(WorkerInput::Message))
    }

    fn send(&mut self, message: &ToMaster) -> Result<(), Failure> {
        self.sent.borrow_mut().push(message.clone());
        Ok(())
    }

    fn find_master(&mut self, _run_name: &str, _patience: Duration) -> Result<bool, Failure> {
        Ok(false)
    }

    fn host_name(&self) -> String {
        "a".to_string()
    }

    fn host_store(&self) -> Option<HostStore> {
        None
    }
}

/// Executes a short task at once, and a long one until a result was reported.
struct Patient {
    sent: Sent,
}

impl RawWorker for Patient {
    fn init(&mut self, _data: Bytes) -> Result<(), Failure> {
        Ok(())
    }

    fn execute(&mut self, task: Bytes, context: &mut Context) -> Result<Bytes, Failure> {
        let began = Instant::now();
        while task == "long" && reported_count(&self.sent) == 0 && began.elapsed() < TIMEOUT {
            context.poll()?;
        }
        Ok(Bytes::copy_from_slice(
            &reported_count(&self.sent).to_le_bytes(),
        ))
    }
}

fn order(number: u64, payload: &'static str) -> TaskOrder {
    TaskOrder {
        task: TaskId(number),
        attempt: AttemptId(number),
        payload: Bytes::from_static(payload.as_bytes()),
    }
}

/// The result of a short task reaches the master while the worker executes a long one.
#[test]
fn result_is_reported_while_a_long_task_runs() {
    let sent = Sent::default();
    let welcome = Welcome {
        run: 1,
        run_name: "test".to_string(),
        init_number: 1,
        init: Some(InitSource::Message {
            data: Bytes::new(),
            store_as: None,
        }),
        benchmark: None,
        update: None,
        keeps_results: false,
        master_wait_ms: 0,
    };
    let tasks = ToWorker::Tasks {
        report_each: false,
        time_limit_us: None,
        orders: vec![order(1, "short"), order(2, "long")],
    };
    let port = FakePort {
        inputs: VecDeque::from([ToWorker::Welcome(Box::new(welcome)), tasks]),
        sent: Rc::clone(&sent),
    };
    let mut worker = Patient {
        sent: Rc::clone(&sent),
    };
    let end = run_worker(port, &mut worker, WorkerIdentity::default()).expect("ends");
    assert_eq!(end, WorkerEnd::Released);
    let sent = sent.borrow();
    let results: Vec<u64> = sent
        .iter()
        .filter_map(|message| match message {
            ToMaster::Results(results) => Some(results),
            _ => None,
        })
        .map(|results| results[0].task.0)
        .collect();
    assert_eq!(
        results,
        [1, 2],
        "two messages, the first during the long task"
    );
}

/// Returns the init data as the result of each task. The first task lasts until the data change.
struct Reader {
    data: Bytes,
    inputs: Rc<RefCell<VecDeque<ToWorker>>>,
}

impl RawWorker for Reader {
    fn init(&mut self, data: Bytes) -> Result<(), Failure> {
        self.data = data;
        Ok(())
    }

    fn execute(&mut self, task: Bytes, context: &mut Context) -> Result<Bytes, Failure> {
        let has_change = || self.inputs.borrow().front() == Some(&ToWorker::InitChanged);
        if task == "first" {
            context.send_partial(Bytes::new())?;
            while has_change() {
                context.poll()?;
            }
        }
        Ok(self.data.clone())
    }
}

/// A connection that has a message only when an earlier one was sent.
struct StepPort {
    inputs: Rc<RefCell<VecDeque<ToWorker>>>,
    sent: Sent,
}

impl WorkerPort for StepPort {
    fn next_input(&mut self, waits: bool) -> Result<Option<WorkerInput>, Failure> {
        let mut inputs = self.inputs.borrow_mut();
        let was_sent = |is_wanted: fn(&ToMaster) -> bool| self.sent.borrow().iter().any(is_wanted);
        let is_due = match inputs.front() {
            Some(ToWorker::Tasks { .. }) => was_sent(|m| matches!(m, ToMaster::Ready { .. })),
            Some(ToWorker::InitChanged) => was_sent(|m| matches!(m, ToMaster::Partial { .. })),
            Some(ToWorker::Welcome(welcome)) if welcome.init_number > 1 => {
                was_sent(|m| matches!(m, ToMaster::InitWanted))
            }
            _ => true,
        };
        let next = if is_due { inputs.pop_front() } else { None };
        let end = || waits.then_some(ToWorker::End { run_is_over: true });
        Ok(next.or_else(end).map(WorkerInput::Message))
    }

    fn send(&mut self, message: &ToMaster) -> Result<(), Failure> {
        self.sent.borrow_mut().push(message.clone());
        Ok(())
    }

    fn find_master(&mut self, _run_name: &str, _patience: Duration) -> Result<bool, Failure> {
        Ok(false)
    }

    fn host_name(&self) -> String {
        "a".to_string()
    }

    fn host_store(&self) -> Option<HostStore> {
        None
    }
}

fn welcome(number: u64, data: &'static str) -> ToWorker {
    ToWorker::Welcome(Box::new(Welcome {
        run: 1,
        run_name: "test".to_string(),
        init_number: number,
        init: Some(InitSource::Message {
            data: Bytes::from_static(data.as_bytes()),
            store_as: None,
        }),
        benchmark: None,
        update: None,
        keeps_results: false,
        master_wait_ms: 0,
    }))
}

/// A busy worker with tasks ahead takes new init data before its next task, and keeps these tasks.
#[test]
fn new_init_data_come_before_the_next_task() {
    let sent = Sent::default();
    let tasks = ToWorker::Tasks {
        report_each: false,
        time_limit_us: None,
        orders: vec![order(1, "first"), order(2, "second"), order(3, "third")],
    };
    let inputs = Rc::new(RefCell::new(VecDeque::from([
        welcome(1, "old"),
        tasks,
        ToWorker::InitChanged,
        welcome(2, "new"),
    ])));
    let port = StepPort {
        inputs: Rc::clone(&inputs),
        sent: Rc::clone(&sent),
    };
    let mut worker = Reader {
        data: Bytes::new(),
        inputs,
    };
    run_worker(port, &mut worker, WorkerIdentity::default()).expect("ends");
    let mut events = Vec::new();
    for message in sent.borrow().iter() {
        match message {
            ToMaster::Results(results) => {
                for result in results {
                    let AttemptContent::Completed { result, .. } = &result.content else {
                        panic!("failed");
                    };
                    events.push(String::from_utf8_lossy(result).into_owned());
                }
            }
            ToMaster::InitWanted => events.push("wanted".to_string()),
            ToMaster::Ready { init, .. } => events.push(format!("ready {init}")),
            _ => {}
        }
    }
    let expected = ["ready 1", "old", "wanted", "ready 2", "new", "new"];
    assert_eq!(events, expected);
}

/// A worker that is welcomed and released at once does not begin: it would leave a copy of the
/// init data on its host.
#[test]
fn released_worker_does_not_take_its_init_data() {
    let sent = Sent::default();
    let end = ToWorker::End { run_is_over: true };
    let inputs = Rc::new(RefCell::new(VecDeque::from([welcome(1, "old"), end])));
    let port = StepPort {
        inputs: Rc::clone(&inputs),
        sent: Rc::clone(&sent),
    };
    let mut worker = Reader {
        data: Bytes::new(),
        inputs,
    };
    let ended = run_worker(port, &mut worker, WorkerIdentity::default()).expect("ends");
    assert_eq!(ended, WorkerEnd::Released);
    assert_eq!(worker.data, "");
    assert!(matches!(sent.borrow()[..], [ToMaster::Hello(_)]));
}
