//! The master of a run as a task of the virtual machine.

use crate::events::{LossReasons, translate_event};
use crate::master::{Master, MasterEvent, RunError, RunState, Transport};
use crate::protocol::{
    CLASS_VARIABLE, RUN_VARIABLE, TO_MASTER_TAG, TO_WORKER_TAG, ToMaster, ToWorker,
};
use crate::raw::RawDriver;
use crate::run::{WorkerPlace, WorkerProgram};
use crate::spinning::SpinDecision;
use crate::start::{MasterOptions, RunOutcome, begin_run};
use libpvm::proto::task::{NotifyRequest, NotifySubjects};
use libpvm::proto::{HostId, Message, Tid};
use libpvm::{Body, Content, Inbox, Vm};
use sempa_work_dispatch::{ClassId, MAILBOX_PREFIX, Micros, QUESTION_TAG, Question, WorkerId};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

/// Tag of messages about events of the virtual machine.
const EVENT_TAG: i32 = 0x5357_4d04;
/// Tag of notices about workers that have ended.
const NOTICE_TAG: i32 = 0x5357_4d05;
const CONTEXT: i32 = 0;
/// Messages that the master takes from the library at once.
const BATCH_MAX: usize = 256;
/// Interval at which the master looks for messages between callbacks of the driver.
const RECEIVE_INTERVAL: Duration = Duration::from_millis(1);
const FINISH_PATIENCE: Duration = Duration::from_secs(60);

/// Workers that a thread has started.
struct Started {
    class: ClassId,
    tids: Vec<Tid>,
    failed_count: u32,
}

/// Sends messages through the virtual machine, and starts workers in threads.
struct VmTransport {
    vm: Vm,
    run_name: String,
    sender: Sender<Started>,
    /// Host names, for the choice of a migration's target.
    hosts: BTreeMap<HostId, String>,
}

impl Transport for VmTransport {
    fn send(&mut self, worker: WorkerId, message: &ToWorker) {
        let Some(tid) = tid_of(worker) else {
            return;
        };
        if let Ok(bytes) = postcard::to_allocvec(message) {
            let body = Body {
                bytes: bytes.into(),
                ..Body::empty()
            };
            // A lost worker is reported by a notice, a lost daemon by the next wait.
            let _ = self.vm.send(tid, TO_WORKER_TAG, body);
        }
    }

    fn start_workers(&mut self, class: ClassId, program: &WorkerProgram, count: u32) {
        let mut spawner = self
            .vm
            .spawner(program.program.clone())
            .count(count)
            .args(&program.arguments)
            .env(RUN_VARIABLE, &self.run_name)
            .env(CLASS_VARIABLE, class.0.to_string());
        spawner = match &program.place {
            WorkerPlace::Anywhere => spawner,
            WorkerPlace::Host(host) => spawner.on_host(host),
            WorkerPlace::Architecture(arch) => spawner.on_arch(arch),
        };
        let (sender, vm) = (self.sender.clone(), self.vm.clone());
        // A spawn may take seconds, and the master must serve its workers meanwhile.
        std::thread::spawn(move || {
            let started = match spawner.start() {
                Ok(outcome) => Started {
                    class,
                    tids: outcome.tasks.iter().map(libpvm::Task::tid).collect(),
                    failed_count: outcome.failed.len() as u32,
                },
                Err(_) => Started {
                    class,
                    tids: Vec::new(),
                    failed_count: count,
                },
            };
            // The master may have ended.
            let _ = sender.send(started);
            vm.runtime().wake_waiting_threads();
        });
    }

    fn move_worker(&mut self, worker: WorkerId) {
        let Some(tid) = tid_of(worker) else {
            return;
        };
        let vm = self.vm.clone();
        let hosts: Vec<String> = self.hosts.values().cloned().collect();
        std::thread::spawn(move || {
            // The first host that accepts the worker gets it; the resource manager may have moved
            // the worker already.
            hosts.iter().any(|host| vm.task(tid).migrate(host).is_ok())
        });
    }
}

fn tid_of(worker: WorkerId) -> Option<Tid> {
    i32::try_from(worker.0).ok().map(Tid::from_raw)
}

pub(crate) fn worker_of(tid: Tid) -> WorkerId {
    WorkerId(u64::from(tid.raw().cast_unsigned()))
}

/// Carries out a run, or continues the run of the journal. Returns when the run is finished or
/// stopped.
///
/// # Errors
/// The run cannot begin or cannot be continued; see [`RunError`].
pub fn run_master<D: RawDriver>(
    vm: &Vm,
    driver: D,
    options: &MasterOptions,
) -> Result<(RunOutcome, D), RunError> {
    let master_entry = MailboxEntry::register(vm, &options.run_name)?;
    let clock = Instant::now();
    let (sender, receiver) = channel();
    let hosts = vm
        .config()
        .map_err(|error| RunError::Disconnected(error.to_string()))?;
    let hosts: BTreeMap<HostId, String> = hosts.hosts.into_iter().map(|h| (h.id, h.name)).collect();
    let mut transport = VmTransport {
        vm: vm.clone(),
        run_name: options.run_name.clone(),
        sender,
        hosts,
    };
    let waker = vm.clone();
    let wake = Box::new(move || waker.runtime().wake_waiting_threads());
    let mut start = begin_run(driver, options, wake)?;
    let (generation, repeated_results) = (start.generation, start.repeated_results);
    start.master.run.set_host_count(transport.hosts.len());
    let mut shell = Shell {
        vm: vm.clone(),
        clock,
        master: start.master,
        receiver,
        watched: BTreeSet::new(),
        starting: BTreeMap::new(),
        losses: LossReasons::default(),
        progress_interval: options.progress_interval,
        next_progress: clock + options.progress_interval.unwrap_or_default(),
        spinning: SpinDecision::default(),
    };
    let subscribed = vm.subscribe_events(CONTEXT, EVENT_TAG);
    subscribed.map_err(|error| RunError::Disconnected(error.to_string()))?;
    shell.serve(&mut transport)?;
    drop(master_entry);
    shell.finish(generation, repeated_results)
}

/// The entry of a master in the mailbox of the virtual machine. Dropping this value removes the
/// entry; the daemon removes the entry of a killed master.
struct MailboxEntry {
    vm: Vm,
    name: String,
    index: i32,
}

impl MailboxEntry {
    fn register(vm: &Vm, run_name: &str) -> Result<Self, RunError> {
        let name = format!("{MAILBOX_PREFIX}{run_name}");
        let body = Body::items(|out| out.pack_int(vm.tid().raw()));
        let index = vm.mailbox_put(&name, 0, body).map_err(|error| {
            RunError::Start(format!(
                "the run {run_name} was not begun: its name cannot be registered ({error}); if \
                 another master of this name runs, choose another name or stop that run with \
                 `pvm work stop {run_name}`"
            ))
        })?;
        Ok(Self {
            vm: vm.clone(),
            name,
            index,
        })
    }
}

impl Drop for MailboxEntry {
    fn drop(&mut self) {
        // The daemon removes the entry when this task ends.
        let _ = self.vm.mailbox_delete(&self.name, self.index);
    }
}

/// What the master takes from the library at once.
enum Arrived {
    Messages(VecDeque<Message>),
    /// A thread has woken the master: results are stored or workers were started.
    Woken,
}

struct Shell<D> {
    vm: Vm,
    clock: Instant,
    master: Master<D>,
    receiver: Receiver<Started>,
    /// Tasks whose end is reported.
    watched: BTreeSet<Tid>,
    /// Workers that were spawned and have not reported.
    starting: BTreeMap<Tid, ClassId>,
    losses: LossReasons,
    progress_interval: Option<Duration>,
    next_progress: Instant,
    spinning: SpinDecision,
}

impl<D: RawDriver> Shell<D> {
    fn now(&self) -> Micros {
        u64::try_from(self.clock.elapsed().as_micros()).unwrap_or(u64::MAX)
    }

    /// Serves workers until the run is finished or stopped.
    fn serve(&mut self, transport: &mut VmTransport) -> Result<(), RunError> {
        self.tell(MasterEvent::Tick, transport)?;
        while self.master.state == RunState::Running {
            let waits_since = Instant::now();
            let arrived = self.wait()?;
            let begun = Instant::now();
            if self.spinning.note_wait(begun - waits_since) {
                self.vm.disable_spinning();
            }
            self.receive(arrived, transport)?;
            self.run_callbacks(begun, transport)?;
            self.show_progress();
        }
        Ok(())
    }

    /// Handles what has arrived, without callbacks of the driver.
    fn receive(&mut self, arrived: Arrived, transport: &mut VmTransport) -> Result<(), RunError> {
        if let Arrived::Messages(messages) = arrived {
            for message in messages {
                self.handle_message(&message, transport)?;
            }
        }
        while let Ok(started) = self.receiver.try_recv() {
            self.handle_started(started, transport)?;
        }
        for (tid, reason) in self.losses.due(Instant::now()) {
            self.lose(tid, reason, transport)?;
        }
        // After the losses, so that the workers of a lost host are not released twice.
        self.master.run.set_host_count(transport.hosts.len());
        self.tell(MasterEvent::Tick, transport)
    }

    /// Calls the driver for all events. Between the calls, handles messages that have arrived, so
    /// that a worker waits for one callback at most. `begun` is the time of the last receive.
    fn run_callbacks(
        &mut self,
        begun: Instant,
        transport: &mut VmTransport,
    ) -> Result<(), RunError> {
        let mut received_at = begun;
        loop {
            let now = self.now();
            if !self.master.run_callback(now, transport)? {
                self.master.settle(now, transport)?;
                self.master.add_busy(received_at.elapsed());
                return Ok(());
            }
            let delay = received_at.elapsed();
            if delay >= RECEIVE_INTERVAL && self.master.accepts_messages(now) {
                self.master.add_busy(delay);
                self.show_progress();
                received_at = Instant::now();
                let arrived = self.vm.runtime().check_inbox(&mut take_messages);
                self.receive(arrived.unwrap_or(Arrived::Woken), transport)?;
                self.master.acknowledge_stored(transport);
            }
        }
    }

    /// Waits for messages, for a thread, or for the time of the next check.
    fn wait(&self) -> Result<Arrived, RunError> {
        let wakeup = self.master.next_wakeup();
        let wakeup = wakeup.and_then(|at| self.clock.checked_add(Duration::from_micros(at)));
        let progress = self.progress_interval.map(|_| self.next_progress);
        let deadlines = [wakeup, progress, self.losses.next_deadline()];
        let deadline = deadlines.into_iter().flatten().min();
        let mut calls = 0;
        let mut take = |inbox: &mut Inbox| {
            calls += 1;
            // The first call is made before the wait.
            take_messages(inbox).or((calls > 1).then_some(Arrived::Woken))
        };
        let arrived = self.vm.runtime().wait_for_inbox(deadline, &mut take);
        match arrived {
            Ok(arrived) => Ok(arrived.unwrap_or(Arrived::Woken)),
            Err(_) => Err(RunError::Disconnected(self.vm.runtime().lost_reason())),
        }
    }

    fn tell(&mut self, event: MasterEvent, transport: &mut VmTransport) -> Result<(), RunError> {
        let now = self.now();
        self.master.receive(now, event, transport)
    }

    fn handle_message(
        &mut self,
        message: &Message,
        transport: &mut VmTransport,
    ) -> Result<(), RunError> {
        match message.tag {
            TO_MASTER_TAG => {
                // A message that cannot be read is not one of this version's workers.
                let Ok(content) = postcard::from_bytes::<ToMaster>(&message.body) else {
                    return Ok(());
                };
                if matches!(content, ToMaster::Hello(_)) {
                    self.starting.remove(&message.src);
                    self.watch(&[message.src])?;
                }
                let worker = worker_of(message.src);
                self.tell(MasterEvent::Message(worker, content), transport)
            }
            QUESTION_TAG => self.handle_question(message, transport),
            EVENT_TAG => {
                let Some(event) = Vm::decode_event(message) else {
                    return Ok(());
                };
                self.losses.note(&event.kind);
                for event in translate_event(&event.kind, &mut transport.hosts) {
                    self.tell(event, transport)?;
                }
                Ok(())
            }
            _ => {
                let tid = Vm::unpack(message).and_then(|mut body| Ok(body.read_int()?));
                if let Ok(tid) = tid {
                    let tid = Tid::from_raw(tid);
                    self.watched.remove(&tid);
                    self.losses.end(tid, Instant::now());
                }
                Ok(())
            }
        }
    }

    fn handle_question(
        &mut self,
        message: &Message,
        transport: &mut VmTransport,
    ) -> Result<(), RunError> {
        let Ok(question) = message.value::<Question>() else {
            return Ok(());
        };
        let answer = self.master.answer(&question, transport)?;
        // The task that asked may have ended.
        let _ = self.vm.send(message.src, QUESTION_TAG, answer.as_str());
        Ok(())
    }

    /// Requests notices about the end of tasks.
    fn watch(&mut self, tids: &[Tid]) -> Result<(), RunError> {
        let new_tids: Vec<Tid> = tids
            .iter()
            .copied()
            .filter(|tid| self.watched.insert(*tid))
            .collect();
        if new_tids.is_empty() {
            return Ok(());
        }
        let request = NotifyRequest {
            subjects: NotifySubjects::TaskExit(new_tids),
            ctx: CONTEXT,
            tag: NOTICE_TAG,
            is_cancellation: false,
        };
        let requested = self.vm.notify(request);
        requested.map_err(|error| RunError::Disconnected(error.to_string()))
    }

    fn handle_started(
        &mut self,
        started: Started,
        transport: &mut VmTransport,
    ) -> Result<(), RunError> {
        for tid in &started.tids {
            if !self.watched.contains(tid) {
                self.starting.insert(*tid, started.class);
            }
        }
        self.watch(&started.tids)?;
        if started.failed_count > 0 {
            let failed = MasterEvent::StartFailed(started.class, started.failed_count);
            self.tell(failed, transport)?;
        }
        Ok(())
    }

    fn lose(
        &mut self,
        tid: Tid,
        reason: sempa_work_dispatch::LossReason,
        transport: &mut VmTransport,
    ) -> Result<(), RunError> {
        if let Some(class) = self.starting.remove(&tid) {
            return self.tell(MasterEvent::StartFailed(class, 1), transport);
        }
        self.tell(MasterEvent::WorkerLost(worker_of(tid), reason), transport)
    }

    fn show_progress(&mut self) {
        let Some(interval) = self.progress_interval else {
            return;
        };
        if Instant::now() >= self.next_progress {
            self.next_progress = Instant::now() + interval;
            eprintln!("{}: {}", self.master.run_name, self.master.run.progress());
        }
    }

    /// Ends the journal and returns the result of the run.
    fn finish(
        mut self,
        generation: u64,
        repeated_results: usize,
    ) -> Result<(RunOutcome, D), RunError> {
        let outcome = RunOutcome {
            is_finished: self.master.state == RunState::Finished,
            statistics: self.master.report(),
            generation,
            repeated_results,
            init_bytes_sent: self.master.init_bytes_sent(),
            master_busy_s: self.master.busy().as_secs_f64(),
            callback_s: self.master.callback_time().as_secs_f64(),
        };
        if !outcome.is_finished {
            self.master.begin_snapshot()?;
        }
        if let Some(state) = self.master.journal.take()
            && outcome.is_finished
        {
            let finished = state.journal.finish(FINISH_PATIENCE);
            finished.map_err(|error| RunError::Journal(error.to_string()))?;
        }
        Ok((outcome, self.master.driver))
    }
}

/// Takes the messages that have arrived; `None` if there are none.
fn take_messages(inbox: &mut Inbox) -> Option<Arrived> {
    let mut messages = VecDeque::new();
    while messages.len() < BATCH_MAX
        && let Some(message) = inbox.take_first(is_for_master)
    {
        messages.push_back(message);
    }
    (!messages.is_empty()).then_some(Arrived::Messages(messages))
}

fn is_for_master(message: &Message) -> bool {
    message.ctx == CONTEXT
        && [TO_MASTER_TAG, QUESTION_TAG, EVENT_TAG, NOTICE_TAG].contains(&message.tag)
}
