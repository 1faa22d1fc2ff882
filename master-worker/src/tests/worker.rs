//! The loop of a worker with a connection that records its messages.

use crate::context::Context;
use crate::host_store::HostStore;
use crate::protocol::{InitSource, TaskOrder, ToMaster, ToWorker, Welcome};
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
