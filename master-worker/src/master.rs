//! The master of a run: passes events to the dispatcher, calls the driver, and keeps the journal.
//! A [`Transport`] carries its messages.

use crate::arrivals::{WaitingWorker, init_number};
use crate::callbacks::{AcceptedResult, Deferred, stored_task, stored_tasks};
use crate::init_hosts::InitHosts;
use crate::journal::Record;
use crate::journal_state::JournalState;
use crate::protocol::{AttemptContent, AttemptResult, TaskOrder, ToMaster, ToWorker};
use crate::raw::{Failure, PoolEvent, RawDriver};
use crate::recovery::encode;
use crate::run::{Run, WorkerProgram};
use crate::status;
use bytes::Bytes;
use sempa_work_dispatch::{
    AttemptId, AttemptOutcome, AttemptReport, ClassId, Event, Key, LossReason, Micros, NewTask,
    Output, PauseCause, Question, StatisticsReport, TaskId, WorkerId,
};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Why a run ended before its tasks were finished.
#[derive(Debug, Error)]
pub enum RunError {
    #[error(
        "the driver failed in {callback}: {source}; the open tasks are in the journal, if the run has one"
    )]
    Driver {
        callback: &'static str,
        source: Failure,
    },
    #[error(
        "the journal cannot be written: {0}; results since the last stored one are lost, and a restart repeats their tasks"
    )]
    Journal(String),
    #[error(
        "{count} tasks are quarantined, which is the limit: the program of the workers is probably wrong; `pvm work quarantine` showed the reasons"
    )]
    TooManyQuarantined { count: usize },
    #[error(
        "the connection to the virtual machine is lost: {0}; a run with a journal can be started again"
    )]
    Disconnected(String),
    #[error("{0}")]
    Start(String),
}

/// Carries the messages of a master.
pub(crate) trait Transport {
    /// Sends a message. A worker that cannot be reached is reported as lost by another event.
    fn send(&mut self, worker: WorkerId, message: &ToWorker);
    fn start_workers(&mut self, class: ClassId, program: &WorkerProgram, count: u32);
    fn move_worker(&mut self, worker: WorkerId);
}

/// What happens to a master besides messages of workers.
#[derive(Debug)]
pub(crate) enum MasterEvent {
    Message(WorkerId, ToMaster),
    WorkerLost(WorkerId, LossReason),
    WorkerPaused(WorkerId, PauseCause),
    WorkerResumed(WorkerId),
    WorkerMigrated(WorkerId, Arc<str>),
    HostAdded(Arc<str>),
    HostLost(Arc<str>),
    /// A host became free for guests.
    HostAvailable,
    StartFailed(ClassId, u32),
    Tick,
}

/// How a run stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RunState {
    Running,
    Finished,
    Stopped,
}

pub(crate) struct Master<D> {
    pub(crate) driver: D,
    pub(crate) run: Run,
    pub(crate) run_number: u64,
    pub(crate) run_name: String,
    pub(crate) journal: Option<JournalState>,
    pub(crate) init: InitHosts,
    pub(crate) benchmark: Option<Bytes>,
    /// Time for which workers wait for the next master.
    pub(crate) master_wait: Duration,
    /// Workers that have no init data, or old ones and have asked for the new ones.
    pub(crate) waiting_workers: BTreeMap<WorkerId, WaitingWorker>,
    /// The result that the dispatcher examines.
    current: Option<AttemptResult>,
    /// Callbacks that wait for their call.
    pub(crate) deferred: VecDeque<Deferred>,
    pub(crate) state: RunState,
    final_report: Option<StatisticsReport>,
    busy: Duration,
    /// Part of `busy` that the driver's callbacks have used.
    pub(crate) callback_time: Duration,
}

/// Parts of a master that exist before its first event.
pub(crate) struct MasterParts<D> {
    pub(crate) driver: D,
    pub(crate) run: Run,
    pub(crate) run_number: u64,
    pub(crate) run_name: String,
    pub(crate) journal: Option<JournalState>,
    pub(crate) master_wait: Duration,
}

pub(crate) fn driver_error(callback: &'static str) -> impl FnOnce(Failure) -> RunError {
    move |source| RunError::Driver { callback, source }
}

impl<D: RawDriver> Master<D> {
    /// Creates the master of a run whose driver has started or was restored.
    pub(crate) fn new(mut parts: MasterParts<D>) -> Result<Self, RunError> {
        let data = parts
            .driver
            .init_data()
            .map_err(driver_error("init_data"))?;
        let number = init_number(parts.run_number, &data);
        let benchmark = parts.driver.benchmark();
        let mut settings = parts.run.dispatcher.settings().clone();
        settings.has_benchmark = benchmark.is_some();
        parts.run.set_settings(settings);
        Ok(Self {
            driver: parts.driver,
            run: parts.run,
            run_number: parts.run_number,
            run_name: parts.run_name,
            journal: parts.journal,
            init: InitHosts::new(data, number),
            benchmark,
            master_wait: parts.master_wait,
            waiting_workers: BTreeMap::new(),
            current: None,
            deferred: VecDeque::new(),
            state: RunState::Running,
            final_report: None,
            busy: Duration::ZERO,
            callback_time: Duration::ZERO,
        })
    }

    /// Handles an event, calls the driver, and sends what follows from both.
    pub(crate) fn handle(
        &mut self,
        now: Micros,
        event: MasterEvent,
        transport: &mut dyn Transport,
    ) -> Result<(), RunError> {
        self.receive(now, event, transport)?;
        while self.run_callback(now, transport)? {}
        self.settle(now, transport)
    }

    /// Handles an event and sends what the dispatcher decides. Callbacks of the driver wait for
    /// [`Master::run_callback`].
    pub(crate) fn receive(
        &mut self,
        now: Micros,
        event: MasterEvent,
        transport: &mut dyn Transport,
    ) -> Result<(), RunError> {
        self.run.now = now;
        match event {
            MasterEvent::Message(worker, message) => {
                self.handle_message(worker, message, transport)?;
            }
            MasterEvent::WorkerLost(worker, reason) => {
                self.lose_worker(worker, reason, transport)?
            }
            MasterEvent::WorkerPaused(worker, cause) => {
                if self.run.dispatcher.has_worker(worker) {
                    self.tell_dispatcher(Event::WorkerPaused { worker, cause }, transport)?;
                    self.report_pool_event(PoolEvent::WorkerPaused { worker, cause });
                }
            }
            MasterEvent::WorkerResumed(worker) => {
                if self.run.dispatcher.has_worker(worker) {
                    self.tell_dispatcher(Event::WorkerResumed { worker }, transport)?;
                    self.report_pool_event(PoolEvent::WorkerResumed { worker });
                }
            }
            MasterEvent::WorkerMigrated(worker, host) => {
                if self.run.dispatcher.has_worker(worker) {
                    let migrated = Event::WorkerMigrated {
                        worker,
                        host: host.clone(),
                    };
                    self.tell_dispatcher(migrated, transport)?;
                    self.report_pool_event(PoolEvent::WorkerMigrated { worker, host });
                }
            }
            MasterEvent::HostAdded(host) => {
                self.tell_dispatcher(Event::HostAvailable, transport)?;
                self.report_pool_event(PoolEvent::HostAdded { host });
            }
            MasterEvent::HostLost(host) => {
                self.init.forget_copy(&host);
                self.report_pool_event(PoolEvent::HostLost { host });
            }
            MasterEvent::HostAvailable => self.tell_dispatcher(Event::HostAvailable, transport)?,
            MasterEvent::StartFailed(class, count) => {
                self.tell_dispatcher(Event::StartFailed { class, count }, transport)?;
            }
            MasterEvent::Tick => self.tell_dispatcher(Event::Tick, transport)?,
        }
        self.carry_out(transport)
    }

    /// Stores what is due, and ends the run if it was stopped. No callback waits.
    pub(crate) fn settle(
        &mut self,
        now: Micros,
        transport: &mut dyn Transport,
    ) -> Result<(), RunError> {
        self.run.now = now;
        self.finish_callbacks(transport)?;
        self.carry_out(transport)?;
        self.acknowledge_stored(transport);
        self.maintain_journal()?;
        if self.run.is_stopped && self.state == RunState::Running {
            self.end(RunState::Stopped, transport);
        }
        Ok(())
    }

    fn handle_message(
        &mut self,
        worker: WorkerId,
        message: ToMaster,
        transport: &mut dyn Transport,
    ) -> Result<(), RunError> {
        match message {
            ToMaster::Hello(hello) => self.greet(worker, hello, transport),
            ToMaster::InitDataMissing => {
                if let Some(waiting) = self.waiting_workers.get(&worker) {
                    self.init.forget_copy(&waiting.host);
                    self.welcome(worker, transport);
                }
                Ok(())
            }
            ToMaster::InitWanted => {
                self.send_new_init(worker, transport);
                Ok(())
            }
            ToMaster::Ready { init, benchmark_us } => {
                self.mark_ready(worker, init, benchmark_us, transport)
            }
            ToMaster::InitFailed { message } => {
                let reason = LossReason::Failed;
                self.lose_worker(worker, reason, transport)?;
                Err(RunError::Start(format!(
                    "a worker could not use the init data: {message}; no task was lost"
                )))
            }
            // A worker that is not part of this run may have results of another run of this name,
            // whose tasks have the same numbers.
            ToMaster::Results(_) | ToMaster::Partial { .. } if !self.is_member(worker) => Ok(()),
            ToMaster::Results(results) => {
                for result in results {
                    self.handle_result(worker, result, transport)?;
                }
                Ok(())
            }
            ToMaster::Partial { task, data, .. } => {
                self.deferred.push_back(Deferred::Partial { task, data });
                Ok(())
            }
            ToMaster::Returned(attempts) => {
                self.tell_dispatcher(Event::TasksReturned { worker, attempts }, transport)
            }
        }
    }

    fn lose_worker(
        &mut self,
        worker: WorkerId,
        reason: LossReason,
        transport: &mut dyn Transport,
    ) -> Result<(), RunError> {
        self.waiting_workers.remove(&worker);
        for other in self.init.forget_worker(worker) {
            self.welcome(other, transport);
        }
        if !self.run.dispatcher.has_worker(worker) {
            return Ok(());
        }
        self.tell_dispatcher(Event::WorkerLost { worker, reason }, transport)?;
        self.report_pool_event(PoolEvent::WorkerLost {
            worker,
            reason: reason.to_string(),
        });
        Ok(())
    }

    fn handle_result(
        &mut self,
        worker: WorkerId,
        result: AttemptResult,
        transport: &mut dyn Transport,
    ) -> Result<(), RunError> {
        let report = AttemptReport {
            task: result.task,
            attempt: result.attempt,
            outcome: match result.content {
                AttemptContent::Completed { .. } => AttemptOutcome::Completed,
                AttemptContent::Failed { .. } => AttemptOutcome::Failed,
            },
            cpu: result.cpu_us,
            wall: result.wall_us,
        };
        self.current = Some(result);
        self.tell_dispatcher(Event::Attempt { worker, report }, transport)?;
        self.current = None;
        Ok(())
    }

    pub(crate) fn tell_dispatcher(
        &mut self,
        event: Event,
        transport: &mut dyn Transport,
    ) -> Result<(), RunError> {
        let now = self.run.now;
        self.run.dispatcher.handle(now, event);
        self.carry_out(transport)
    }

    /// Carries out the dispatcher's outputs.
    pub(crate) fn carry_out(&mut self, transport: &mut dyn Transport) -> Result<(), RunError> {
        while let Some(output) = self.run.dispatcher.poll() {
            match output {
                Output::Dispatch {
                    worker,
                    attempts,
                    report_each,
                } => self.send_tasks(worker, &attempts, report_each, transport),
                Output::Recall { worker, attempts } => {
                    transport.send(worker, &ToWorker::Recall(attempts));
                }
                Output::Accept { worker, .. } => {
                    self.deferred.extend(self.current.take().map(|result| {
                        let factor = self.run.dispatcher.worker_factor(worker);
                        Deferred::Accepted(AcceptedResult {
                            worker,
                            factor,
                            result,
                        })
                    }))
                }
                Output::Discard {
                    worker, attempt, ..
                } => self.acknowledge(worker, vec![attempt], transport),
                Output::Cancel {
                    worker,
                    task,
                    attempt,
                } => transport.send(worker, &ToWorker::Cancel { task, attempt }),
                Output::AttemptFailed { task, record, .. } => {
                    self.acknowledge(record.worker, vec![record.attempt], transport);
                    self.deferred
                        .push_back(Deferred::AttemptFailed { task, record });
                }
                Output::AttemptLost { task, record } => self
                    .deferred
                    .push_back(Deferred::AttemptFailed { task, record }),
                Output::Quarantined { task, history } => self
                    .deferred
                    .push_back(Deferred::Quarantined { task, history }),
                Output::StartWorkers { class, count } => {
                    if let Some(program) = self.run.programs.get(&class) {
                        transport.start_workers(class, program, count);
                    }
                }
                Output::MoveWorker { worker } => transport.move_worker(worker),
                Output::ReleaseWorker { worker } => {
                    self.waiting_workers.remove(&worker);
                    transport.send(worker, &ToWorker::End { run_is_over: false });
                    self.report_pool_event(PoolEvent::WorkerLost {
                        worker,
                        reason: LossReason::Released.to_string(),
                    });
                }
                Output::AllTasksClosed => self.deferred.push_back(Deferred::AllClosed),
                Output::TooManyQuarantined { count } => {
                    return Err(RunError::TooManyQuarantined { count });
                }
            }
        }
        Ok(())
    }

    fn send_tasks(
        &self,
        worker: WorkerId,
        attempts: &[(TaskId, AttemptId)],
        report_each: bool,
        transport: &mut dyn Transport,
    ) {
        let order = |(task, attempt): &(TaskId, AttemptId)| {
            let stored = self.run.payloads.get(task)?;
            Some(TaskOrder {
                task: *task,
                attempt: *attempt,
                payload: stored.task.payload.clone(),
            })
        };
        let dispatcher = &self.run.dispatcher;
        let counts = (
            dispatcher.waiting_task_count(),
            dispatcher.computing_worker_count(),
        );
        let message = ToWorker::Tasks {
            report_each,
            time_limit_us: self.run.grain.map(|g| g.time_limit(counts.0, counts.1)),
            orders: attempts.iter().filter_map(order).collect(),
        };
        transport.send(worker, &message);
    }

    /// Takes the statistics, then releases all workers.
    pub(crate) fn end(&mut self, state: RunState, transport: &mut dyn Transport) {
        self.state = state;
        let now = self.run.now;
        self.final_report = Some(self.run.dispatcher.report(now));
        if state == RunState::Stopped {
            return;
        }
        self.run.dispatcher.release_all(now);
        for worker in std::mem::take(&mut self.waiting_workers).into_keys() {
            transport.send(worker, &ToWorker::End { run_is_over: true });
        }
        while let Some(output) = self.run.dispatcher.poll() {
            if let Output::ReleaseWorker { worker } = output {
                transport.send(worker, &ToWorker::End { run_is_over: true });
            }
        }
    }

    pub(crate) fn report(&self) -> StatisticsReport {
        let report = self.final_report.clone();
        report.unwrap_or_else(|| self.run.dispatcher.report(self.run.now))
    }

    fn acknowledge(
        &self,
        worker: WorkerId,
        attempts: Vec<AttemptId>,
        transport: &mut dyn Transport,
    ) {
        if self.journal.is_some() {
            transport.send(worker, &ToWorker::Acknowledged(attempts));
        }
    }

    /// Acknowledges the results that the journal has stored.
    pub(crate) fn acknowledge_stored(&mut self, transport: &mut dyn Transport) {
        let Some(journal) = &mut self.journal else {
            return;
        };
        let stored = journal.take_stored();
        for (worker, attempts) in stored {
            self.acknowledge(worker, attempts, transport);
        }
    }

    /// Stores statistics and snapshots from time to time.
    fn maintain_journal(&mut self) -> Result<(), RunError> {
        let now = self.run.now;
        let Some(journal) = &mut self.journal else {
            return Ok(());
        };
        if journal.take_statistics_turn(now) {
            let statistics = self.run.dispatcher.statistics_up_to(now);
            journal.append(Record::Statistics {
                statistics: encode(&statistics)?,
            })?;
        }
        if journal.take_snapshot_turn(now) {
            self.begin_snapshot()?;
        }
        Ok(())
    }

    /// Stores the first tasks and the driver's state of a new run, and waits until they are
    /// durable: no result may come before. `abandoned_tasks` are those of a master that was killed
    /// before its state was stored.
    pub(crate) fn store_start(
        &mut self,
        abandoned_tasks: Vec<u64>,
        patience: Duration,
    ) -> Result<(), RunError> {
        let added = std::mem::take(&mut self.run.added);
        let Some(journal) = &self.journal else {
            return Ok(());
        };
        if !abandoned_tasks.is_empty() {
            journal.append(Record::Pruned {
                tasks: abandoned_tasks,
            })?;
        }
        let tasks = stored_tasks(&added);
        journal.append(Record::TasksAdded { tasks })?;
        self.begin_snapshot()?;
        let Some(journal) = &self.journal else {
            return Ok(());
        };
        journal.wait_for_first_snapshot(patience)
    }

    /// Adds time that the master has spent with work, and for which messages waited.
    pub(crate) fn add_busy(&mut self, busy: Duration) {
        self.busy += busy;
        let micros = u64::try_from(busy.as_micros()).unwrap_or(u64::MAX);
        self.run.dispatcher.note_busy(micros);
    }

    pub(crate) fn busy(&self) -> Duration {
        self.busy
    }

    /// Time that the driver's callbacks have used.
    pub(crate) fn callback_time(&self) -> Duration {
        self.callback_time
    }

    /// Share of its time in which the master works; `None` at the start.
    pub(crate) fn busy_share(&self) -> Option<f64> {
        self.share(self.busy)
    }

    /// Share of its time that the master spends in the driver's callbacks.
    pub(crate) fn callback_share(&self) -> Option<f64> {
        self.share(self.callback_time)
    }

    fn share(&self, time: Duration) -> Option<f64> {
        let now = self.run.now as f64;
        (now > 0.0).then(|| time.as_micros() as f64 / now)
    }

    /// Begins a snapshot of the run in the journal.
    pub(crate) fn begin_snapshot(&mut self) -> Result<(), RunError> {
        let Some(journal) = &self.journal else {
            return Ok(());
        };
        let state = self.driver.save().map_err(driver_error("save"))?;
        let statistics = self.run.dispatcher.statistics_up_to(self.run.now);
        let counters = encode(&statistics)?;
        let begun = journal.journal.begin_snapshot(state, counters);
        begun.map_err(|refused| RunError::Journal(refused.to_string()))
    }

    /// Returns the time of the next [`MasterEvent::Tick`].
    pub(crate) fn next_wakeup(&self) -> Option<Micros> {
        let journal = self.journal.as_ref();
        let statistics = journal.map(JournalState::next_statistics);
        let dispatcher = self.run.dispatcher.next_wakeup();
        [statistics, dispatcher].into_iter().flatten().min()
    }

    /// Answers a question about the run with JSON.
    pub(crate) fn answer(
        &mut self,
        question: &Question,
        transport: &mut dyn Transport,
    ) -> Result<String, RunError> {
        match question {
            Question::Status => Ok(status::status(self)),
            Question::Workers => Ok(status::workers(self)),
            Question::Quarantine => Ok(status::quarantine(self)),
            Question::Stop => {
                self.run.stop();
                let now = self.run.now;
                self.handle(now, MasterEvent::Tick, transport)?;
                Ok(status::stopped(self))
            }
            Question::Retry(id) => {
                let id = TaskId(*id);
                let now = self.run.now;
                // The record of the quarantine comes first.
                while self.run_callback(now, transport)? {}
                let task = self.run.payloads.get(&id).map(|stored| NewTask {
                    id,
                    key: Key::new(stored.task.key).unwrap_or_default(),
                    groups: stored.task.groups,
                });
                let is_retried =
                    task.is_some_and(|task| self.run.dispatcher.retry_quarantined(now, &task));
                if is_retried {
                    self.store_retry(id)?;
                    self.carry_out(transport)?;
                }
                Ok(status::retried(id, is_retried))
            }
        }
    }

    /// Stores that a quarantined task waits again.
    fn store_retry(&self, id: TaskId) -> Result<(), RunError> {
        let (Some(journal), Some(stored)) = (&self.journal, self.run.payloads.get(&id)) else {
            return Ok(());
        };
        let tasks = vec![stored_task(id, &stored.task, stored.position)];
        journal.append(Record::TasksAdded { tasks }).map(|_| ())
    }

    pub(crate) fn init_bytes_sent(&self) -> u64 {
        self.init.sent_bytes()
    }
}
