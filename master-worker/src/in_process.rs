//! A run in one process without a virtual machine, to debug drivers and workers.

use crate::master::{Master, MasterEvent, MasterParts, RunError, RunState, Transport};
use crate::protocol::{ToMaster, ToWorker};
use crate::raw::{Failure, RawDriver, RawWorker};
use crate::run::{Run, WorkerProgram};
use crate::start::RunOutcome;
use crate::worker_loop::{WorkerIdentity, WorkerInput, WorkerPort, run_worker};
use sempa_work_dispatch::{ClassId, Dispatcher, RunStatistics, Settings, WorkerId};
use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Number of the only worker.
const WORKER: WorkerId = WorkerId(1);

/// Messages to the worker.
#[derive(Default)]
struct Mailbox {
    to_worker: VecDeque<ToWorker>,
}

impl Transport for Mailbox {
    fn send(&mut self, _worker: WorkerId, message: &ToWorker) {
        self.to_worker.push_back(message.clone());
    }

    fn start_workers(&mut self, _class: ClassId, _program: &WorkerProgram, _count: u32) {}

    fn move_worker(&mut self, _worker: WorkerId) {}
}

/// The master and the messages to its worker.
struct Shared<D> {
    master: Master<D>,
    mailbox: Mailbox,
    clock: Instant,
    error: Option<RunError>,
}

impl<D: RawDriver> Shared<D> {
    fn tell(&mut self, event: MasterEvent) {
        let begun = Instant::now();
        let now = u64::try_from(self.clock.elapsed().as_micros()).unwrap_or(u64::MAX);
        if let Err(error) = self.master.handle(now, event, &mut self.mailbox) {
            self.error = Some(error);
        }
        self.master.add_busy(begun.elapsed());
    }
}

/// The worker's connection: each message is handled by the master at once.
struct LocalPort<D> {
    shared: Rc<RefCell<Shared<D>>>,
}

impl<D: RawDriver> WorkerPort for LocalPort<D> {
    fn next_input(&mut self, waits: bool) -> Result<Option<WorkerInput>, Failure> {
        let mut shared = self.shared.borrow_mut();
        loop {
            if let Some(message) = shared.mailbox.to_worker.pop_front() {
                return Ok(Some(WorkerInput::Message(message)));
            }
            if !waits {
                return Ok(None);
            }
            if shared.error.is_some() || shared.master.state != RunState::Running {
                let end = ToWorker::End { run_is_over: true };
                return Ok(Some(WorkerInput::Message(end)));
            }
            // A failed task waits for its next attempt.
            std::thread::sleep(Duration::from_millis(1));
            shared.tell(MasterEvent::Tick);
        }
    }

    fn send(&mut self, message: &ToMaster) -> Result<(), Failure> {
        let event = MasterEvent::Message(WORKER, message.clone());
        self.shared.borrow_mut().tell(event);
        Ok(())
    }

    fn find_master(&mut self, _run_name: &str, _patience: Duration) -> Result<bool, Failure> {
        Ok(false)
    }

    fn host_name(&self) -> String {
        "localhost".to_string()
    }

    fn host_store(&self) -> Option<crate::host_store::HostStore> {
        None
    }
}

/// Carries out a run with one worker in this process. Driver and worker exchange the same messages
/// as in a virtual machine; there is no journal.
///
/// # Errors
/// The driver or the worker failed.
pub fn run_in_process<D: RawDriver + 'static, W: RawWorker>(
    mut driver: D,
    worker: &mut W,
    settings: Settings,
) -> Result<(RunOutcome, D), RunError> {
    let start_error = |error: Failure| {
        RunError::Start(format!("the run was not begun: the driver failed: {error}"))
    };
    let dispatcher = Dispatcher::new(settings, 1, RunStatistics::default(), 0);
    let mut run = Run::new(dispatcher, 1, 0);
    driver.start(&mut run).map_err(start_error)?;
    driver.configure(&mut run).map_err(start_error)?;
    let master = Master::new(MasterParts {
        driver,
        run,
        run_number: 1,
        run_name: "in-process".to_string(),
        journal: None,
        master_wait: Duration::ZERO,
    })?;
    let shared = Rc::new(RefCell::new(Shared {
        master,
        mailbox: Mailbox::default(),
        clock: Instant::now(),
        error: None,
    }));
    shared.borrow_mut().tell(MasterEvent::Tick);
    let port = LocalPort {
        shared: Rc::clone(&shared),
    };
    let worked = run_worker(port, worker, WorkerIdentity::default());
    let Some(shared) = Rc::into_inner(shared) else {
        return Err(RunError::Start(
            "the worker's connection is still in use".into(),
        ));
    };
    let shared = shared.into_inner();
    if let Some(error) = shared.error {
        return Err(error);
    }
    worked.map_err(|error| RunError::Start(format!("the worker failed: {error}")))?;
    let outcome = RunOutcome {
        is_finished: shared.master.state == RunState::Finished,
        statistics: shared.master.report(),
        generation: 1,
        repeated_results: 0,
        init_bytes_sent: shared.master.init_bytes_sent(),
        master_busy_s: shared.master.busy().as_secs_f64(),
        callback_s: shared.master.callback_time().as_secs_f64(),
    };
    Ok((outcome, shared.master.driver))
}
