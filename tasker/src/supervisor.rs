//! The main loop of the tasker: handles the daemon's orders, exits and output of tasks, and results
//! of workers.
//!
//! The main thread creates, kills and reaps all processes. Worker threads (see [`crate::workers`])
//! only control an engine or read files, and report through a channel.

use crate::daemon_socket::DaemonSocket;
use crate::freezer::{ControlGroup, Freezer, FreezerUnavailable};
use crate::migrations::{EngineStatus, Migrations};
use crate::namespace::{Namespace, SpareNamespaces};
use crate::signal_disposition;
use crate::sys::{self, StartGuard, TaskStartState};
use crate::task::{
    self, EXEC_TIMEOUT, KEPT_SIGNALS_MAX, Output, StartTaskError, StartTaskFailure, Task, TaskPhase,
};
use checkpoint::allocator;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use procfs::process::Process;
use sempa_proto::engine::{AskMethod, Engine};
use sempa_proto::migration::Refusal;
use sempa_proto::tasker::{FromTasker, StartTask, TaskerCapabilities, ToTasker};
use sempa_proto::{MigrationId, Tid};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Maximum number of tasks on one host. Tids permit more tasks, but usually the process table does
/// not.
pub(crate) const TASKS_MAX: usize = 16_384;
/// Time limit for ending all processes after the daemon has disconnected.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval in milliseconds at which conditions are polled that have no descriptor, for example
/// whether a process has stopped.
const POLL_INTERVAL_MS: u16 = 1;
/// Delay from the start of the tasker to the probe of the engine, because all hosts are busy when a
/// virtual machine starts. The probe starts earlier if a migration needs the engine.
const PROBE_DELAY: Duration = Duration::from_secs(1);
/// Delay from the end of a worker until freed memory is returned to the kernel. The next step of a
/// migration might reuse the memory immediately.
const HEAP_TRIM_DELAY: Duration = Duration::from_secs(1);
/// Smallest timeout of poll(2).
const POLL_GRANULARITY: Duration = Duration::from_millis(1);

/// A namespace whose task has ended. Processes of the task still run in the namespace, or were
/// killed and are ending.
#[derive(Debug)]
struct OrphanedNamespace {
    namespace: Namespace,
    /// The task's output. It is read and discarded, so that writers neither block nor die.
    output: Option<Output>,
    /// Messages to send when the namespace is empty.
    final_messages: Vec<FromTasker>,
}

/// The complete state of the tasker.
pub(crate) struct Supervisor {
    pub(crate) daemon_socket: DaemonSocket,
    pub(crate) tasks: BTreeMap<Tid, Task>,
    pub(crate) migrations: Migrations,
    /// True if each task gets its own PID namespace.
    pub(crate) uses_namespaces: bool,
    /// Namespaces prepared for future tasks.
    pub(crate) spare_namespaces: SpareNamespaces,
    pub(crate) inherited: TaskStartState,
    start_guard: StartGuard,
    orphaned_namespaces: Vec<OrphanedNamespace>,
    /// Time of the first or next probe of the engine; `None` if no probe is planned.
    pub(crate) probe_at: Option<Instant>,
    /// Time at which freed memory is returned to the kernel.
    heap_trim_at: Option<Instant>,
    signals: SignalFd,
    /// True after SIGTERM: the main loop must end.
    must_end: bool,
    /// The freezer of paused tasks, or the reason why they are stopped by signals. Declared last,
    /// because it must be dropped after all its groups.
    pub(crate) freezer: Result<Freezer, FreezerUnavailable>,
}

/// The source of an event: the owner of a ready descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EventSource {
    Control,
    Signals,
    Workers,
    TaskExit(Tid),
    Output(Tid),
    NamespaceEnded,
    OrphanOutput(usize),
    RestoredTaskExit(MigrationId),
}

impl Supervisor {
    /// Takes ownership of the socket and prepares the process: subreaper, signals, limits. Must be
    /// called from the main thread while it is the only thread.
    ///
    /// # Errors
    /// A system call failed.
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Supervisor> {
        // Orphans of tasks must become children of the tasker and not of the host's init, where
        // they would accumulate.
        nix::sys::prctl::set_child_subreaper(true)?;
        let mut watched = SigSet::empty();
        watched.add(Signal::SIGCHLD);
        watched.add(Signal::SIGTERM);
        watched.thread_block()?;
        let signals =
            SignalFd::with_flags(&watched, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let uses_namespaces = Namespace::is_possible();
        Ok(Supervisor {
            daemon_socket: DaemonSocket::new(socket)?,
            tasks: BTreeMap::new(),
            migrations: Migrations::new(uses_namespaces)?,
            uses_namespaces,
            spare_namespaces: SpareNamespaces::new(),
            inherited: TaskStartState::prepare()?,
            start_guard: StartGuard::new(EXEC_TIMEOUT)?,
            orphaned_namespaces: Vec::new(),
            probe_at: Some(Instant::now() + PROBE_DELAY),
            heap_trim_at: None,
            signals,
            must_end: false,
            freezer: match uses_namespaces {
                true => Freezer::new(),
                false => Err(FreezerUnavailable::NoPrivileges),
            },
        })
    }

    /// Runs the main loop until the daemon disconnects, then ends every process of every task.
    ///
    /// # Errors
    /// A system call failed, or the daemon sent an invalid order.
    pub(crate) fn run(&mut self) -> anyhow::Result<()> {
        self.send(&FromTasker::Ready(self.capabilities()));
        let served = self.serve();
        self.shut_down();
        served
    }

    /// Returns the capabilities of this host that are known so far.
    pub(crate) fn capabilities(&self) -> TaskerCapabilities {
        TaskerCapabilities {
            pid_namespaces: self.uses_namespaces,
            engine: self.migrations.engine_state(),
            freezer: self
                .freezer
                .as_ref()
                .map(drop)
                .map_err(|why| why.to_string()),
        }
    }

    /// Sends a message to the daemon.
    pub(crate) fn send(&mut self, message: &FromTasker) {
        self.daemon_socket.send(message);
    }

    fn serve(&mut self) -> anyhow::Result<()> {
        while !self.must_end && !self.daemon_socket.is_closed() {
            let ready = self.poll_events()?;
            for (source, events) in &ready {
                match *source {
                    EventSource::Control => self.handle_socket(*events)?,
                    EventSource::Signals => {}
                    EventSource::Workers => {
                        self.drain_workers();
                        self.heap_trim_at
                            .get_or_insert_with(|| Instant::now() + HEAP_TRIM_DELAY);
                    }
                    EventSource::TaskExit(tid) => self.on_task_exit(tid),
                    EventSource::Output(tid) => self.forward_output(tid),
                    EventSource::NamespaceEnded => {}
                    EventSource::OrphanOutput(index) => {
                        if let Some(output) = &mut self.orphaned_namespaces[index].output {
                            output.read(drop);
                        }
                    }
                    EventSource::RestoredTaskExit(migration) => {
                        self.on_restored_task_killed(migration)
                    }
                }
            }
            if ready
                .iter()
                .any(|(source, _)| *source == EventSource::Signals)
            {
                // Handled after the exits of tasks: only children that no other code reaps are left
                // to this call.
                self.on_signal();
            }
            if ready.is_empty() && self.spare_check_delay().is_some() {
                self.spare_namespaces.maintain(self.freezer.as_mut().ok());
            }
            if self.probe_at.is_some_and(|at| at <= Instant::now()) {
                self.start_due_probe();
            }
            if self
                .heap_trim_at
                .take_if(|at| *at <= Instant::now())
                .is_some()
            {
                allocator::trim_freed();
            }
            self.remove_ended_namespaces();
            self.check_stopping();
            self.check_pauses();
        }
        Ok(())
    }

    fn handle_socket(&mut self, events: PollFlags) -> anyhow::Result<()> {
        self.daemon_socket.flush();
        if events.intersects(PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR) {
            for order in self.daemon_socket.receive()? {
                self.handle_order(order);
            }
        }
        Ok(())
    }

    /// Waits for events and returns the ready sources.
    fn poll_events(&self) -> io::Result<Vec<(EventSource, PollFlags)>> {
        let mut watched: Vec<(EventSource, BorrowedFd<'_>)> = vec![
            (EventSource::Control, self.daemon_socket.fd()),
            (EventSource::Signals, self.signals.as_fd()),
            (EventSource::Workers, self.migrations.wake_fd()),
        ];
        let room = !self.daemon_socket.is_congested();
        for task in self.tasks.values() {
            // Output is listed before the exit, so that what a task wrote before its exit is mostly
            // forwarded first.
            watched.extend(
                task.output
                    .fd()
                    .filter(|_| room)
                    .map(|fd| (EventSource::Output(task.tid), fd)),
            );
            watched.push((EventSource::TaskExit(task.tid), task.process.pidfd.as_fd()));
        }
        for (index, left) in self.orphaned_namespaces.iter().enumerate() {
            watched.push((EventSource::NamespaceEnded, left.namespace.end_fd()));
            watched.extend(
                left.output
                    .iter()
                    .filter_map(Output::fd)
                    .map(|fd| (EventSource::OrphanOutput(index), fd)),
            );
        }
        watched.extend(
            self.migrations
                .held_copies()
                .map(|(migration, fd)| (EventSource::RestoredTaskExit(migration), fd)),
        );

        let mut fds: Vec<PollFd<'_>> = watched
            .iter()
            .map(|(_, fd)| PollFd::new(*fd, PollFlags::POLLIN))
            .collect();
        if self.daemon_socket.wants_write() {
            fds[0] = PollFd::new(
                self.daemon_socket.fd(),
                PollFlags::POLLIN | PollFlags::POLLOUT,
            );
        }
        match poll(&mut fds, self.poll_timeout()) {
            Err(Errno::EINTR) => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
            Ok(_) => {}
        }
        let ready = fds.iter().zip(&watched).filter_map(|(fd, (source, _))| {
            let events = fd.revents().unwrap_or(PollFlags::POLLERR);
            (!events.is_empty()).then_some((*source, events))
        });
        Ok(ready.collect())
    }

    /// Returns the time limit for waiting for events.
    fn poll_timeout(&self) -> PollTimeout {
        if self.is_stopping() {
            return PollTimeout::from(POLL_INTERVAL_MS);
        }
        let poll_interval = Duration::from_millis(POLL_INTERVAL_MS.into());
        let pause_check = self
            .tasks
            .values()
            .filter_map(|task| task.pause.next_check_delay(poll_interval))
            .min()
            .map(|pause| pause + POLL_GRANULARITY);
        let until = |at: Instant| at.saturating_duration_since(Instant::now()) + POLL_GRANULARITY;
        let (probe, heap_trim) = (self.probe_at.map(until), self.heap_trim_at.map(until));
        let pause = [self.spare_check_delay(), probe, heap_trim, pause_check]
            .into_iter()
            .flatten()
            .min();
        pause.map_or(PollTimeout::NONE, |pause| {
            PollTimeout::try_from(pause).expect("minutes at most")
        })
    }

    fn handle_order(&mut self, order: ToTasker) {
        match order {
            ToTasker::Start(order) => self.handle_start(&order),
            ToTasker::Signal { tid, signal } => self.signal_task(tid, signal),
            ToTasker::RequestExit { tid, engine } => self.request_exit(tid, engine),
            ToTasker::CheckSignal {
                migration,
                tid,
                signal,
            } => {
                // The signal cannot harm a task that has ended.
                let handles_signal = self.tasks.get(&tid).is_none_or(|task| {
                    signal_disposition::handles_signal(task.process.pid, signal)
                });
                self.send(&FromTasker::SignalChecked {
                    migration,
                    handles_signal,
                });
            }
            ToTasker::WithdrawExitRequest { tid } => {
                if let Some(task) = self.tasks.get_mut(&tid) {
                    task.exit_requested_for = None;
                }
            }
            ToTasker::Kill { tid } => self.kill_task(tid),
            ToTasker::Pause { tid, run_for } => self.pause_task(tid, run_for),
            ToTasker::ResumeToQuiesce {
                tid,
                library_only_for: alone,
                run_for,
            } => self.resume_task_to_quiesce(tid, alone, run_for),
            ToTasker::Resume { tid } => self.end_pause(tid),
            migration_order => {
                // The order is deferred until the first probe has ended, so the probe starts
                // without its delay.
                if matches!(self.migrations.engine_status, EngineStatus::Probing(_)) {
                    self.start_due_probe();
                }
                self.handle_migration_order(migration_order);
            }
        }
    }

    fn handle_start(&mut self, order: &StartTask) {
        let tid = order.tid;
        let started = if self.tasks.contains_key(&tid) {
            Err(StartTaskError::new(order, StartTaskFailure::TidExists(tid)))
        } else if self.tasks.len() >= TASKS_MAX {
            Err(StartTaskError::new(
                order,
                StartTaskFailure::TooManyTasks(TASKS_MAX),
            ))
        } else {
            self.start_task(order)
        };
        match started {
            Ok(task) => {
                self.send(&FromTasker::Started {
                    tid,
                    pid: task.process.pid,
                });
                self.migrations
                    .binary_hasher
                    .on_process_start(task.process.pid);
                self.tasks.insert(tid, task);
            }
            Err(why) => self.send(&FromTasker::StartFailed {
                tid,
                why: why.to_string(),
            }),
        }
    }

    fn start_task(&mut self, order: &StartTask) -> Result<Task, StartTaskError> {
        let namespace = match self.uses_namespaces && !order.pinned {
            true => Some(
                self.spare_namespaces
                    .take(self.freezer.as_mut().ok())
                    .map_err(|e| StartTaskError::new(order, StartTaskFailure::Namespace(e)))?,
            ),
            false => None,
        };
        task::start_task_process(order, namespace, &self.inherited, &self.start_guard)
    }

    /// Returns the time until the spare namespaces must be checked; `None` if no check is needed,
    /// or while a task is being stopped.
    fn spare_check_delay(&self) -> Option<Duration> {
        self.spare_namespaces
            .check_delay()
            .filter(|_| self.uses_namespaces && !self.is_stopping())
    }

    fn start_due_probe(&mut self) {
        if self.probe_at.take().is_some() {
            self.start_probe();
        }
    }

    fn is_stopping(&self) -> bool {
        self.tasks
            .values()
            .any(|task| matches!(task.phase, TaskPhase::Stopping { .. }))
    }

    fn signal_task(&mut self, tid: Tid, signal: i32) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let running = matches!(task.phase, TaskPhase::Running);
        if running && task.pause.is_inactive() {
            task.send_signal(signal);
        } else if running && matches!(signal, libc::SIGKILL | libc::SIGTERM) {
            task.send_signal(signal);
            if signal == libc::SIGTERM {
                task.allow_exit();
            }
        } else if task.kept_signals.len() < KEPT_SIGNALS_MAX {
            // A stopped task must remain stopped: SIGCONT could let it run at the same time as its
            // copy at the target.
            task.kept_signals.push(signal);
        }
    }

    /// Requests a task to exit, so that its program can be restarted.
    fn request_exit(&mut self, tid: Tid, engine: Engine) {
        let (Some(task), Some((asked, wait))) = (self.tasks.get_mut(&tid), engine.exit_request())
        else {
            return;
        };
        match asked {
            AskMethod::Signal(signal)
                if matches!(engine, Engine::SelfCheckpoint { .. })
                    && !signal_disposition::handles_signal(task.process.pid, signal) =>
            {
                let why = Refusal::SignalNotHandled { signal }.to_string();
                return self.send(&FromTasker::ExitNotRequested { tid, why });
            }
            AskMethod::Signal(signal) => task.send_signal(signal),
            AskMethod::Message(_) => {}
        }
        task.exit_requested_for = Some(engine);
        if !task.pause.is_inactive() {
            task.allow_exit_within(Duration::from_secs(wait.into()));
        }
        if matches!(asked, AskMethod::Message(_)) {
            self.send(&FromTasker::ExitExpected { tid });
        }
    }

    fn kill_task(&mut self, tid: Tid) {
        if let Some(task) = self.tasks.get(&tid) {
            task.kill();
        }
    }

    fn forward_output(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let control = &mut self.daemon_socket;
        task.output
            .read(|bytes| control.send(&FromTasker::Output { tid, bytes }));
    }

    /// Forwards all output that is in the task's pipe at the time of the call, even if the queue of
    /// the daemon's socket is full.
    pub(crate) fn drain_output(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let control = &mut self.daemon_socket;
        task.output
            .drain(|bytes| control.send(&FromTasker::Output { tid, bytes }));
    }

    /// Handles the exit of a task's first process. Other processes of the task in its namespace
    /// continue until they end or the daemon disconnects.
    fn on_task_exit(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get(&tid) else {
            return;
        };
        let pid = task.process.pid;
        if task.namespace.is_none()
            && task.exit_requested_for.is_some_and(|engine| {
                sys::peek_exit_status(pid).is_some_and(|s| engine.restarts_after(s))
            })
        {
            // Without a namespace only the process group can be killed, which may miss processes.
            // The PID is not reused before the process is reaped.
            let _ = sys::kill_raw(-pid, libc::SIGKILL);
        }
        // ECHILD is not possible, because only this thread reaps the process. If it occurs
        // nevertheless, exit status 0 is reported.
        let Some((status, used)) =
            sys::reap(pid).unwrap_or(Some((0, sempa_proto::migration::Usage::default())))
        else {
            return;
        };
        self.drain_output(tid);
        let Some(mut task) = self.tasks.remove(&tid) else {
            return;
        };
        let used = task.usage_on_other_hosts.plus(used);
        self.abandon_migration_of(&task);
        self.cancel_fetch_of_exited(&task);
        if task
            .exit_requested_for
            .is_some_and(|engine| engine.restarts_after(status))
        {
            let exited = FromTasker::Exited { tid, status, used };
            return self.kill_remaining(task, exited);
        }
        // Without thawing, the task's remaining processes would stay frozen forever.
        task.frozen_group().into_iter().for_each(ControlGroup::thaw);
        self.send(&FromTasker::Exited { tid, status, used });
        if let Some(namespace) = task
            .namespace
            .take()
            .and_then(|namespace| self.spare_namespaces.recycle(namespace))
        {
            namespace.end_when_empty();
            self.orphaned_namespaces.push(OrphanedNamespace {
                namespace,
                output: Some(task.output),
                final_messages: Vec::new(),
            });
        }
    }

    /// Kills the remaining processes of a task. Sends the message `final_message` when they have
    /// ended.
    fn kill_remaining(&mut self, mut task: Task, final_message: FromTasker) {
        match task.namespace.take() {
            Some(namespace) => self.kill_namespace(namespace, vec![final_message]),
            None => self.send(&final_message),
        }
    }

    /// Kills all processes in a namespace. Sends `final_messages` when they have ended.
    pub(crate) fn kill_namespace(&mut self, namespace: Namespace, final_messages: Vec<FromTasker>) {
        namespace.kill();
        self.orphaned_namespaces.push(OrphanedNamespace {
            namespace,
            output: None,
            final_messages,
        });
    }

    fn remove_ended_namespaces(&mut self) {
        let (ended, left) = std::mem::take(&mut self.orphaned_namespaces)
            .into_iter()
            .partition(|left: &OrphanedNamespace| left.namespace.has_ended());
        self.orphaned_namespaces = left;
        let ended: Vec<OrphanedNamespace> = ended;
        for message in ended.into_iter().flat_map(|left| left.final_messages) {
            self.send(&message);
        }
    }

    fn on_signal(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            if signal.ssi_signo == Signal::SIGTERM as u32 {
                self.must_end = true;
            }
        }
        self.reap_unowned();
    }

    /// Reaps children that no other code waits for: orphans of tasks, ended inits, and processes of
    /// a failed restore.
    pub(crate) fn reap_unowned(&self) {
        let known = |pid: &i32| {
            self.tasks.values().any(|task| task.process.pid == *pid)
                || self.migrations.owns_process(*pid)
        };
        while let Some((pid, ended)) = sys::pending_child_event() {
            if !ended || known(&pid) {
                // waitid reports this child again and again until its owner has reaped it, so the
                // other children must be checked one by one.
                return self.reap_all_but(known);
            }
            let _ = sys::reap(pid);
        }
    }

    fn reap_all_but(&self, known: impl Fn(&i32) -> bool) {
        for pid in child_pids().into_iter().filter(|pid| !known(pid)) {
            // A process that still runs, or was already reaped, needs no action.
            let _ = sys::reap(pid);
        }
    }

    /// Ends every process that the tasker has started and waits until all have ended.
    fn shut_down(&mut self) {
        for task in self.tasks.values() {
            task.kill_all();
        }
        self.migrations.cancel_all();
        for left in &self.orphaned_namespaces {
            left.namespace.kill();
        }
        let until = Instant::now() + SHUTDOWN_TIMEOUT;
        while Instant::now() < until {
            // Workers end their engines and reap them.
            self.drain_workers();
            let left = child_pids();
            if left.is_empty() && self.migrations.is_idle() {
                return;
            }
            for pid in left
                .into_iter()
                .filter(|pid| !self.migrations.owns_process(*pid))
            {
                // Fails only if the process has ended.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                let _ = sys::reap(pid);
            }
            let mut fds = [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            // The call is used only as a pause. Everything is checked again afterwards.
            let _ = poll(&mut fds, PollTimeout::from(POLL_INTERVAL_MS));
        }
    }
}

/// Returns the PIDs of all children of the tasker.
fn child_pids() -> Vec<i32> {
    let threads = Process::myself().and_then(|tasker| tasker.tasks());
    threads
        .into_iter()
        .flatten()
        .flatten()
        .flat_map(|thread| thread.children().unwrap_or_default())
        .map(u32::cast_signed)
        .collect()
}
