//! The loop of a worker: gets tasks, executes them in order, reports results, and waits for the
//! next master if the present one is lost.

use crate::context::{Context, TaskLink};
use crate::host_store::HostStore;
use crate::protocol::{
    AttemptContent, AttemptResult, Hello, InitSource, PROTOCOL_VERSION, TaskOrder, ToMaster,
    ToWorker, Update, Welcome,
};
use crate::raw::{Failure, RawWorker};
use bytes::Bytes;
use nix::time::{ClockId, clock_gettime};
use sempa_work_dispatch::{AttemptId, ClassId, Groups, TaskId};
use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// Time after which results of short tasks are reported although more tasks are waiting.
const REPORT_DELAY: Duration = Duration::from_millis(5);
/// Results that a worker reports at once.
const REPORTED_RESULTS_MAX: usize = 512;

/// Why a worker ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerEnd {
    /// The run has ended, or did not need the worker any more.
    Released,
    /// The master was lost, and no next master came within this time.
    NoMaster(Duration),
}

/// A message for a worker, or the loss of its master.
#[derive(Debug)]
pub(crate) enum WorkerInput {
    Message(ToWorker),
    MasterLost,
}

/// Connects a worker to its master.
pub(crate) trait WorkerPort {
    /// Returns the next input; waits for it if `waits` is true. `None` if there is none.
    ///
    /// # Errors
    /// The connection to the virtual machine is lost.
    fn next_input(&mut self, waits: bool) -> Result<Option<WorkerInput>, Failure>;
    /// Sends a message to the master. A message to a lost master is discarded.
    ///
    /// # Errors
    /// The connection to the virtual machine is lost.
    fn send(&mut self, message: &ToMaster) -> Result<(), Failure>;
    /// Waits for another master of the run. Returns false if none came within `patience`.
    ///
    /// # Errors
    /// The connection to the virtual machine is lost.
    fn find_master(&mut self, run_name: &str, patience: Duration) -> Result<bool, Failure>;
    fn host_name(&self) -> String;
    fn host_store(&self) -> Option<HostStore>;
}

/// Identity of a worker in its run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct WorkerIdentity {
    pub(crate) class: ClassId,
    pub(crate) groups: Groups,
}

/// A task that waits in the worker.
#[derive(Debug)]
struct QueuedTask {
    order: TaskOrder,
    report_each: bool,
    time_limit: Option<Duration>,
}

/// Whether the worker's init data are those of its run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InitState {
    Current,
    /// The driver has replaced the data; the worker must get them before its next task.
    Outdated,
    /// The worker has asked for the new data.
    Requested,
}

/// Tasks and results of a worker, without its program.
struct WorkerState<P> {
    port: P,
    identity: WorkerIdentity,
    queue: VecDeque<QueuedTask>,
    executing: Option<(TaskId, AttemptId)>,
    /// Results that were not sent.
    unsent: Vec<AttemptResult>,
    oldest_unsent: Instant,
    /// Results that were sent and that the master has not stored.
    unacknowledged: Vec<AttemptResult>,
    canceled: BTreeSet<AttemptId>,
    update: Option<Update>,
    /// The run whose init data the worker has.
    run: Option<u64>,
    /// Number of the init data that the worker has.
    init_number: Option<u64>,
    init_state: InitState,
    run_name: String,
    /// The worker has greeted a master that has not answered.
    awaits_welcome: bool,
    /// Number under which this host has the init data.
    stored_as: Option<u64>,
    keeps_results: bool,
    master_wait: Duration,
    benchmark_us: Option<u64>,
    welcome: Option<Box<Welcome>>,
    end: Option<WorkerEnd>,
    refusal: Option<String>,
}

/// Returns the processor time of this process.
fn processor_time() -> Duration {
    clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Executes tasks of a run until the run releases the worker.
///
/// # Errors
/// The connection to the virtual machine is lost, or the program refused the init data.
pub(crate) fn run_worker<P: WorkerPort, W: RawWorker>(
    port: P,
    worker: &mut W,
    identity: WorkerIdentity,
) -> Result<WorkerEnd, Failure> {
    let mut state = WorkerState::new(port, identity);
    state.greet()?;
    loop {
        state.handle_inputs()?;
        if let Some(why) = state.refusal.take() {
            return Err(why.into());
        }
        // Before the welcome: a worker that must end leaves no copy of the init data on its host.
        if let Some(end) = state.end.take() {
            return Ok(end);
        }
        if let Some(welcome) = state.welcome.take() {
            state.begin(worker, *welcome)?;
        }
        if let Some(task) = state.take_task() {
            state.execute(worker, task)?;
        }
    }
}

impl<P: WorkerPort> WorkerState<P> {
    fn new(port: P, identity: WorkerIdentity) -> Self {
        Self {
            port,
            identity,
            queue: VecDeque::new(),
            executing: None,
            unsent: Vec::new(),
            oldest_unsent: Instant::now(),
            unacknowledged: Vec::new(),
            canceled: BTreeSet::new(),
            update: None,
            run: None,
            init_number: None,
            init_state: InitState::Current,
            run_name: String::new(),
            awaits_welcome: false,
            stored_as: None,
            keeps_results: false,
            master_wait: Duration::ZERO,
            benchmark_us: None,
            welcome: None,
            end: None,
            refusal: None,
        }
    }

    fn greet(&mut self) -> Result<(), Failure> {
        let finished = self.unacknowledged.iter().chain(&self.unsent);
        let mut held_attempts: Vec<_> = finished.map(|r| (r.task, r.attempt)).collect();
        held_attempts.extend(self.executing);
        let queued = self
            .queue
            .iter()
            .map(|task| (task.order.task, task.order.attempt));
        held_attempts.extend(queued);
        let hello = Hello {
            protocol: PROTOCOL_VERSION,
            run: self.run,
            init: self.init_number,
            class: self.identity.class,
            groups: self.identity.groups,
            host: self.port.host_name(),
            benchmark_us: self.benchmark_us,
            held_attempts,
        };
        self.awaits_welcome = true;
        self.port.send(&ToMaster::Hello(hello))
    }

    /// True if the worker may begin a task.
    fn has_task(&self) -> bool {
        !self.queue.is_empty() && self.init_state == InitState::Current
    }

    fn take_task(&mut self) -> Option<QueuedTask> {
        match self.has_task() {
            true => self.queue.pop_front(),
            false => None,
        }
    }

    /// Asks for new init data. All results of the old ones were sent before.
    fn request_init(&mut self) -> Result<(), Failure> {
        if self.init_state != InitState::Outdated || self.awaits_welcome {
            return Ok(());
        }
        self.init_state = InitState::Requested;
        self.port.send(&ToMaster::InitWanted)
    }

    /// Handles all inputs that have arrived. Waits for one if the worker has nothing to do.
    fn handle_inputs(&mut self) -> Result<(), Failure> {
        loop {
            let is_idle = !self.has_task()
                && self.welcome.is_none()
                && self.end.is_none()
                && self.refusal.is_none();
            if is_idle {
                self.send_results()?;
                self.request_init()?;
            }
            match self.port.next_input(is_idle)? {
                Some(input) => self.handle_input(input)?,
                None if is_idle => {}
                None => return Ok(()),
            }
        }
    }

    fn handle_input(&mut self, input: WorkerInput) -> Result<(), Failure> {
        let message = match input {
            WorkerInput::Message(message) => message,
            WorkerInput::MasterLost => return self.follow_next_master(),
        };
        match message {
            ToWorker::Welcome(welcome) => self.welcome = Some(welcome),
            ToWorker::Tasks {
                report_each,
                time_limit_us,
                orders,
            } => self
                .queue
                .extend(orders.into_iter().map(|order| QueuedTask {
                    order,
                    report_each,
                    time_limit: time_limit_us.map(Duration::from_micros),
                })),
            ToWorker::Recall(attempts) => self.return_tasks(&attempts)?,
            ToWorker::InitChanged => self.init_state = InitState::Outdated,
            ToWorker::Cancel { task, attempt } => {
                self.return_tasks(&[(task, attempt)])?;
                if self.executing == Some((task, attempt)) {
                    self.canceled.insert(attempt);
                }
            }
            ToWorker::Acknowledged(attempts) => {
                let attempts: BTreeSet<AttemptId> = attempts.into_iter().collect();
                self.unacknowledged
                    .retain(|result| !attempts.contains(&result.attempt));
            }
            ToWorker::Update(update) => self.take_update(update),
            ToWorker::End { run_is_over } => {
                if let (true, Some(number), Some(store)) =
                    (run_is_over, self.stored_as, self.port.host_store())
                {
                    store.remove(number);
                }
                self.end = Some(WorkerEnd::Released);
            }
            ToWorker::Refused { why } => self.refusal = Some(why),
        }
        Ok(())
    }

    fn take_update(&mut self, update: Update) {
        let newest = self.update.as_ref().map_or(0, |update| update.number);
        if update.number > newest {
            self.update = Some(update);
        }
    }

    /// Returns those tasks to the master that the worker has not begun.
    fn return_tasks(&mut self, attempts: &[(TaskId, AttemptId)]) -> Result<(), Failure> {
        let mut returned = Vec::new();
        self.queue.retain(|queued| {
            let attempt = (queued.order.task, queued.order.attempt);
            let is_recalled = attempts.contains(&attempt);
            if is_recalled {
                returned.push(attempt);
            }
            !is_recalled
        });
        self.port.send(&ToMaster::Returned(returned))
    }

    /// Waits for the next master of the run, and offers it what the worker holds.
    fn follow_next_master(&mut self) -> Result<(), Failure> {
        if self.end.is_some() {
            return Ok(());
        }
        let patience = if self.keeps_results {
            self.master_wait
        } else {
            Duration::ZERO
        };
        if !self.port.find_master(&self.run_name, patience)? {
            self.end = Some(WorkerEnd::NoMaster(patience));
            return Ok(());
        }
        if self.init_state == InitState::Requested {
            self.init_state = InitState::Outdated;
        }
        // The next master numbers its updates from 1.
        self.update = None;
        self.greet()
    }

    /// Sends all results again that the earlier master may not have stored.
    fn send_results_again(&mut self) -> Result<(), Failure> {
        let finished = self.unacknowledged.drain(..).chain(self.unsent.drain(..));
        let results: Vec<AttemptResult> = finished.collect();
        self.unsent = results;
        self.oldest_unsent = Instant::now();
        self.send_results()
    }

    /// Forgets the tasks and results of another run.
    fn forget_tasks(&mut self) {
        self.queue.clear();
        self.unsent.clear();
        self.unacknowledged.clear();
        self.canceled.clear();
    }

    /// Takes the init data and executes the benchmark.
    fn begin<W: RawWorker>(&mut self, worker: &mut W, welcome: Welcome) -> Result<(), Failure> {
        self.run_name = welcome.run_name;
        self.keeps_results = welcome.keeps_results;
        self.master_wait = Duration::from_millis(welcome.master_wait_ms);
        if let Some(update) = welcome.update {
            self.take_update(update);
        }
        self.awaits_welcome = false;
        let Some(source) = welcome.init else {
            return self.send_results_again();
        };
        let is_new_run = self.run != Some(welcome.run);
        if is_new_run {
            self.forget_tasks();
            self.benchmark_us = None;
        }
        let Some(data) = self.take_init_data(source) else {
            return self.port.send(&ToMaster::InitDataMissing);
        };
        if let Err(error) = worker.init(data) {
            let message = error.to_string();
            self.port.send(&ToMaster::InitFailed { message })?;
            return Err(error);
        }
        self.run = Some(welcome.run);
        self.init_number = Some(welcome.init_number);
        self.init_state = InitState::Current;
        if let (Some(task), None) = (welcome.benchmark, self.benchmark_us) {
            let started_at = Instant::now();
            let mut link = WorkerLink { state: self };
            let mut context = Context::new(&mut link, TaskId(0), AttemptId(0), None);
            worker.execute(task, &mut context)?;
            self.benchmark_us = Some(micros(started_at.elapsed()));
        }
        let benchmark_us = self.benchmark_us;
        self.port.send(&ToMaster::Ready {
            init: welcome.init_number,
            benchmark_us,
        })
    }

    /// Returns the init data; `None` if they cannot be read on this host.
    fn take_init_data(&mut self, source: InitSource) -> Option<Bytes> {
        let store = self.port.host_store();
        let new_number = match &source {
            InitSource::Message { store_as, .. } => *store_as,
            InitSource::Host { stored_as, .. } => Some(*stored_as),
        };
        if let (Some(store), Some(old), true) =
            (&store, self.stored_as, self.stored_as != new_number)
        {
            store.remove(old);
        }
        self.stored_as = new_number;
        match source {
            InitSource::Message { data, store_as } => {
                if let (Some(store), Some(number)) = (store, store_as) {
                    // Without a copy, the other workers of this host report that it is missing.
                    let _ = store.write(number, &data);
                }
                Some(data)
            }
            InitSource::Host { stored_as, length } => store?.read(stored_as, length),
        }
    }

    fn execute<W: RawWorker>(&mut self, worker: &mut W, task: QueuedTask) -> Result<(), Failure> {
        let is_full = self.unsent.len() >= REPORTED_RESULTS_MAX;
        if task.report_each || is_full || self.has_overdue_results() {
            self.send_results()?;
        }
        let TaskOrder {
            task: id,
            attempt,
            payload,
        } = task.order;
        self.executing = Some((id, attempt));
        let (started_at, cpu_before) = (Instant::now(), processor_time());
        let mut link = WorkerLink { state: self };
        let mut context = Context::new(&mut link, id, attempt, task.time_limit);
        let result = worker.execute(payload, &mut context);
        let returned_tasks = std::mem::take(&mut context.returned_tasks);
        let content = match result {
            Ok(result) => AttemptContent::Completed {
                result,
                returned_tasks,
            },
            Err(error) => AttemptContent::Failed {
                message: error.to_string(),
            },
        };
        self.executing = None;
        self.canceled.remove(&attempt);
        if self.unsent.is_empty() {
            self.oldest_unsent = Instant::now();
        }
        self.unsent.push(AttemptResult {
            task: id,
            attempt,
            cpu_us: micros(processor_time().saturating_sub(cpu_before)),
            wall_us: micros(started_at.elapsed()),
            content,
        });
        Ok(())
    }

    /// True if results have been waiting for longer than [`REPORT_DELAY`].
    fn has_overdue_results(&self) -> bool {
        !self.unsent.is_empty() && self.oldest_unsent.elapsed() >= REPORT_DELAY
    }

    fn send_results(&mut self) -> Result<(), Failure> {
        if self.unsent.is_empty() || self.awaits_welcome {
            return Ok(());
        }
        let results = std::mem::take(&mut self.unsent);
        let message = ToMaster::Results(results);
        self.port.send(&message)?;
        if let (ToMaster::Results(results), true) = (message, self.keeps_results) {
            self.unacknowledged.extend(results);
        }
        Ok(())
    }
}

/// The link of an executing task.
struct WorkerLink<'a, P> {
    state: &'a mut WorkerState<P>,
}

impl<P: WorkerPort> TaskLink for WorkerLink<'_, P> {
    fn receive(&mut self) -> Result<(), Failure> {
        // Results of short tasks must not wait for the end of a long one.
        if self.state.has_overdue_results() {
            self.state.send_results()?;
        }
        while let Some(input) = self.state.port.next_input(false)? {
            self.state.handle_input(input)?;
        }
        Ok(())
    }

    fn update_after(&self, after: u64) -> Option<Update> {
        let update = self.state.update.as_ref();
        update.filter(|update| update.number > after).cloned()
    }

    fn is_canceled(&self, attempt: AttemptId) -> bool {
        self.state.end.is_some() || self.state.canceled.contains(&attempt)
    }

    fn send_partial(
        &mut self,
        task: TaskId,
        attempt: AttemptId,
        data: Bytes,
    ) -> Result<(), Failure> {
        self.state.port.send(&ToMaster::Partial {
            task,
            attempt,
            data,
        })
    }
}
