//! The main loop of the tasker. It handles orders of the daemon, exits and output of tasks, and
//! results of worker threads.
//!
//! The main thread creates, kills and reaps all processes except engines. Worker threads (see
//! [`crate::workers`]) only control an engine or read files, and report through a channel.

use crate::census::Census;
use crate::daemon_socket::DaemonSocket;
use crate::freezer::{Freezer, FreezerUnavailable, UserGroup};
use crate::host_account::{self, HostAccount, MemoryWatch};
use crate::image_vault::ImageVault;
use crate::lease::Lease;
use crate::leftovers::Leftovers;
use crate::migrations::{EngineStatus, Migrations};
use crate::namespace::{Namespace, NamespaceKind, SpareNamespaces};
use crate::pid_numbering::{FirstPid, PidNumbering};
use crate::signal_disposition;
use crate::sys::{self, StartGuard, TaskStartState};
use crate::task::{self, DEFERRED_SIGNALS_MAX, StartTaskError, StartTaskFailure, Task, TaskPhase};
use crate::task_user::TaskUser;
use checkpoint::allocator;
use checkpoint::boot_clock;
use checkpoint::proc;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use sempa_proto::engine::{AskMethod, Engine};
use sempa_proto::migration::Refusal;
use sempa_proto::tasker::{self, FromTasker, TaskStart, TaskerCapabilities, ToTasker};
use sempa_proto::{MigrationId, Tid};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};
use thiserror::Error;

/// Maximum number of tasks on one host, with the ended tasks that have left processes: these need
/// the same descriptors. Tids permit more tasks, but the process table of a typical system does
/// not.
pub(crate) const TASKS_MAX: usize = 16_384;
/// Time limit for ending all processes after the daemon has disconnected.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval in milliseconds at which the main loop polls conditions without a descriptor, for
/// example whether a process has stopped.
const POLL_INTERVAL_MS: u16 = 1;
/// Delay from the start of the tasker to the first probe of the engine: all hosts are busy when a
/// virtual machine starts. The probe starts earlier if a migration needs the engine.
const PROBE_DELAY: Duration = Duration::from_secs(1);
/// Delay from the end of a worker to the return of freed memory to the kernel. The next step of a
/// migration might reuse the memory immediately.
const HEAP_TRIM_DELAY: Duration = Duration::from_secs(1);
/// Resolution of the timeout of poll(2). Timeouts are extended by this duration, so that a deadline
/// has passed when poll(2) returns.
const POLL_GRANULARITY: Duration = Duration::from_millis(1);
/// Time after which the main loop interrupts the handling of orders for other events. Orders that
/// were received and not handled yet are handled afterwards.
const ORDERS_TIME_MAX: Duration = Duration::from_millis(100);

/// The daemon has not renewed its lease. All tasks are killed, and the tasker exits.
#[derive(Debug, Error)]
#[error("all tasks end: {0}")]
struct LeaseExpired(String);

/// The complete state of the tasker.
pub(crate) struct Supervisor {
    pub(crate) daemon_socket: DaemonSocket,
    pub(crate) tasks: BTreeMap<Tid, Task>,
    pub(crate) migrations: Migrations,
    /// Capabilities that this process needs as root and lacks.
    missing_capabilities: Vec<String>,
    /// The PIDs that the PID namespaces of tasks allow; `None` if tasks get no namespaces.
    pub(crate) pid_numbering: Option<PidNumbering>,
    /// Namespaces prepared for future tasks.
    pub(crate) spare_namespaces: SpareNamespaces,
    pub(crate) task_start_state: TaskStartState,
    /// Keeps the images of another user's tasks; `None` for tasks of the tasker's own user.
    pub(crate) image_vault: Option<ImageVault>,
    pub(crate) start_guard: StartGuard,
    pub(crate) lease: Lease,
    /// True if a pause was ordered since the last check. One check serves all pauses that are
    /// ordered together, because it reads all processes of the host.
    pub(crate) must_check_pauses: bool,
    /// What ended tasks have left behind.
    pub(crate) leftovers: Leftovers,
    /// Time of the first or next probe of the engine; `None` if no probe is planned.
    pub(crate) probe_at: Option<Instant>,
    /// What this tasker uses, in the account of the host; `None` for a tasker without the rights of
    /// root.
    pub(crate) account: Option<HostAccount>,
    pub(crate) memory_watch: MemoryWatch,
    /// Time at which freed memory is returned to the kernel.
    heap_trim_at: Option<Instant>,
    signals: SignalFd,
    /// True after SIGTERM; the main loop then ends.
    termination_requested: bool,
    /// The freezer of paused tasks, or the reason why paused tasks are stopped by signals instead.
    /// Declared last, because it must be dropped after all its groups.
    pub(crate) freezer: Result<Freezer, FreezerUnavailable>,
}

/// The source of an event: the owner of a ready descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum EventSource {
    DaemonSocket,
    Signals,
    WorkerResults,
    LeaseTimer,
    TaskExit(Tid),
    TaskOutput(Tid),
    NamespaceEnded,
    LeftoverOutput(usize),
    RestoredTaskExit(MigrationId),
}

impl Supervisor {
    /// Takes ownership of the socket and prepares the process: subreaper, signals, limits. Must be
    /// called from the main thread while it is the only thread.
    ///
    /// # Errors
    /// A system call failed.
    pub(crate) fn new(
        socket: OwnedFd,
        user: Option<TaskUser>,
        missing_capabilities: Vec<String>,
    ) -> io::Result<Self> {
        // Orphans of tasks must become children of the tasker. As children of the host's init they
        // would not be killed when the tasker ends.
        nix::sys::prctl::set_child_subreaper(true)?;
        let mut handled_signals = SigSet::empty();
        handled_signals.add(Signal::SIGCHLD);
        handled_signals.add(Signal::SIGTERM);
        handled_signals.thread_block()?;
        let signals = SignalFd::with_flags(
            &handled_signals,
            SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK,
        )?;
        let namespace_kind = match user {
            Some(_) => NamespaceKind::PidAndMount,
            None => NamespaceKind::Pid,
        };
        let account = host_account::open_account(user.as_ref())?;
        let image_vault = match (&user, &account) {
            (Some(user), Some(account)) => Some(ImageVault::create(user, account.clone())?),
            _ => None,
        };
        let user_group = user.as_ref().map(UserGroup::new);
        let pid_numbering = Namespace::probe(namespace_kind);
        let uses_namespaces = pid_numbering.is_some();
        Ok(Self {
            daemon_socket: DaemonSocket::new(socket)?,
            tasks: BTreeMap::new(),
            migrations: Migrations::new(uses_namespaces, image_vault.as_ref())?,
            missing_capabilities,
            pid_numbering,
            spare_namespaces: SpareNamespaces::new(namespace_kind),
            task_start_state: TaskStartState::prepare(user)?,
            image_vault,
            start_guard: StartGuard::new()?,
            lease: Lease::new()?,
            must_check_pauses: false,
            leftovers: Leftovers::default(),
            probe_at: Some(Instant::now() + PROBE_DELAY),
            account: account.clone(),
            memory_watch: MemoryWatch::default(),
            heap_trim_at: None,
            signals,
            termination_requested: false,
            freezer: match uses_namespaces {
                true => Freezer::new(user_group, account),
                false => Err(FreezerUnavailable::NoPrivileges),
            },
        })
    }

    /// Runs the main loop until the daemon disconnects, its lease runs out or SIGTERM arrives, then
    /// ends every process of every task.
    ///
    /// # Errors
    /// A system call failed, the daemon sent an invalid order, or its lease has run out.
    pub(crate) fn run_until_disconnect(&mut self) -> anyhow::Result<()> {
        self.send(&FromTasker::Ready(self.capabilities()));
        let loop_result = self.run_main_loop();
        self.shut_down();
        loop_result
    }

    /// True if each task gets its own PID namespace.
    pub(crate) fn uses_namespaces(&self) -> bool {
        self.pid_numbering.is_some()
    }

    /// Returns the PID with which the task `tid` starts in its namespace; `None` if the kernel
    /// chooses it.
    pub(crate) fn first_pid(&self, tid: Tid) -> Option<FirstPid> {
        self.pid_numbering.as_ref()?.first_pid(tid)
    }

    /// Returns the capabilities of this host that are known so far.
    pub(crate) fn capabilities(&self) -> TaskerCapabilities {
        TaskerCapabilities {
            pid_namespaces: self.uses_namespaces(),
            engine_version: self.migrations.engine_state(),
            freezer: self
                .freezer
                .as_ref()
                .map(drop)
                .map_err(|why| tasker::FreezerUnavailable(why.to_string())),
            missing_capabilities: self.missing_capabilities.clone(),
        }
    }

    /// Sends a message to the daemon.
    pub(crate) fn send(&mut self, message: &FromTasker) {
        self.daemon_socket.send(message);
    }

    fn run_main_loop(&mut self) -> anyhow::Result<()> {
        while !self.termination_requested && !self.daemon_socket.is_closed() {
            let ready_sources = self.poll_events()?;
            // Younger than the end of each task that has ended so far. It is read at the first end,
            // and serves all of them: many tasks may end at the same time.
            let census = Census::default();
            for source in &ready_sources {
                match *source {
                    EventSource::DaemonSocket => self.handle_daemon_socket()?,
                    EventSource::Signals => {}
                    EventSource::LeaseTimer => self.lease.clear_timer(),
                    EventSource::WorkerResults => {
                        self.handle_worker_results();
                        self.heap_trim_at
                            .get_or_insert_with(|| Instant::now() + HEAP_TRIM_DELAY);
                    }
                    EventSource::TaskExit(tid) => self.on_task_exit(tid, &census),
                    EventSource::TaskOutput(tid) => self.forward_output(tid),
                    EventSource::NamespaceEnded => {}
                    EventSource::LeftoverOutput(index) => self.leftovers.discard_output(index),
                    EventSource::RestoredTaskExit(migration) => {
                        self.on_restored_task_ended(migration)
                    }
                }
            }
            if ready_sources.contains(&EventSource::Signals) {
                // Signals are handled after the exits of tasks, so that `handle_signals` finds only
                // children that no other code reaps.
                self.handle_signals();
            }
            if ready_sources.is_empty() && self.spare_check_delay().is_some() {
                self.spare_namespaces
                    .adjust_spare_count(self.freezer.as_mut().ok());
            }
            if self.probe_at.is_some_and(|at| at <= Instant::now()) {
                self.start_planned_probe();
            }
            self.migrations.idle_dumps.end_expired(Instant::now());
            if self
                .heap_trim_at
                .take_if(|at| *at <= Instant::now())
                .is_some()
            {
                allocator::trim_freed();
            }
            self.check_leftovers();
            self.report_stopped_tasks();
            self.check_pauses();
            self.check_memory_limit();
            self.record_usage();
            self.handle_urgent_orders()?;
        }
        Ok(())
    }

    /// Handles received orders, for [`ORDERS_TIME_MAX`] at most. An order may take long, for
    /// example a start from a slow file system, so urgent orders and the lease come before each.
    fn handle_daemon_socket(&mut self) -> anyhow::Result<()> {
        self.daemon_socket.flush();
        let started_at = Instant::now();
        loop {
            self.handle_urgent_orders()?;
            if started_at.elapsed() >= ORDERS_TIME_MAX {
                return Ok(());
            }
            match self.daemon_socket.next_order() {
                Some(order) => {
                    // Other orders may take long.
                    if self.must_check_pauses && !matches!(order, ToTasker::Pause { .. }) {
                        self.check_pauses();
                    }
                    self.handle_order(order);
                }
                None => return Ok(()),
            }
        }
    }

    /// Receives the available orders, handles those that are urgent, and enforces the lease.
    ///
    /// # Errors
    /// The daemon sent an invalid order, or its lease has run out and all tasks are killed.
    fn handle_urgent_orders(&mut self) -> anyhow::Result<()> {
        // The lease is enforced as of a time before the reading. If this whole process hung, the
        // daemon may have renewed the lease meanwhile.
        let now = boot_clock::now();
        self.daemon_socket.receive()?;
        while let Some(order) = self.daemon_socket.next_urgent_order() {
            self.handle_order(order);
        }
        if let Some(reason) = self.enforce_lease(now) {
            self.end_expired_lease(reason.clone());
            return Err(LeaseExpired(reason).into());
        }
        Ok(())
    }

    /// Waits for events. Returns each ready source. The daemon's socket is ready, too, while
    /// received orders wait.
    fn poll_events(&self) -> io::Result<Vec<EventSource>> {
        let mut sources: Vec<(EventSource, BorrowedFd<'_>)> = vec![
            (EventSource::DaemonSocket, self.daemon_socket.fd()),
            (EventSource::Signals, self.signals.as_fd()),
            (
                EventSource::WorkerResults,
                self.migrations.worker_results_fd(),
            ),
            (EventSource::LeaseTimer, self.lease.timer_fd()),
        ];
        let accepts_output = !self.daemon_socket.is_congested();
        for task in self.tasks.values() {
            // Output precedes the exit in the list. Output that a task wrote before its exit is
            // therefore usually forwarded before the exit is reported.
            sources.extend(
                task.output
                    .fd()
                    .filter(|_| accepts_output)
                    .map(|fd| (EventSource::TaskOutput(task.tid), fd)),
            );
            sources.push((EventSource::TaskExit(task.tid), task.process.pidfd.as_fd()));
        }
        let namespace_ends = self.leftovers.namespace_ends();
        sources.extend(namespace_ends.map(|fd| (EventSource::NamespaceEnded, fd)));
        let outputs = self.leftovers.outputs();
        sources.extend(outputs.map(|(index, fd)| (EventSource::LeftoverOutput(index), fd)));
        sources.extend(
            self.migrations
                .restored_tasks()
                .map(|(migration, fd)| (EventSource::RestoredTaskExit(migration), fd)),
        );

        let mut fds: Vec<PollFd<'_>> = sources
            .iter()
            .map(|(_, fd)| PollFd::new(*fd, PollFlags::POLLIN))
            .collect();
        if self.daemon_socket.has_queued_bytes() {
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
        let ready_sources = fds.iter().zip(&sources).filter_map(|(fd, (source, _))| {
            let is_ready = fd.any().unwrap_or(true)
                || (*source == EventSource::DaemonSocket && self.daemon_socket.has_orders());
            is_ready.then_some(*source)
        });
        Ok(ready_sources.collect())
    }

    /// Returns the time limit for waiting for events.
    fn poll_timeout(&self) -> PollTimeout {
        if self.daemon_socket.has_orders() {
            return PollTimeout::ZERO;
        }
        if self.has_stopping_task() {
            return PollTimeout::from(POLL_INTERVAL_MS);
        }
        let poll_interval = Duration::from_millis(POLL_INTERVAL_MS.into());
        let pause_check_delay = self
            .tasks
            .values()
            .filter_map(|task| task.pause.next_check_delay(poll_interval))
            .min()
            .map(|timeout| timeout + POLL_GRANULARITY);
        let delay_until =
            |at: Instant| at.saturating_duration_since(Instant::now()) + POLL_GRANULARITY;
        let (probe_delay, heap_trim_delay, idle_engine_delay) = (
            self.probe_at.map(delay_until),
            self.heap_trim_at.map(delay_until),
            self.migrations.idle_dumps.next_expiry().map(delay_until),
        );
        let timeout = [
            self.spare_check_delay(),
            probe_delay,
            heap_trim_delay,
            idle_engine_delay,
            pause_check_delay,
            self.memory_watch
                .delay()
                .map(|delay| delay + POLL_GRANULARITY),
            self.leftovers
                .check_delay()
                .map(|delay| delay + POLL_GRANULARITY),
        ]
        .into_iter()
        .flatten()
        .min();
        timeout.map_or(PollTimeout::NONE, |timeout| {
            PollTimeout::try_from(timeout).expect("minutes at most")
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
                // If the task has ended, the signal has no effect, so it counts as handled.
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
            ToTasker::Pause {
                tid,
                run_time: run_duration,
            } => self.pause_task(tid, run_duration),
            ToTasker::ResumeToQuiesce {
                tid,
                library_run_time: library_run_duration,
                run_time: run_duration,
            } => self.resume_task_to_quiesce(tid, library_run_duration, run_duration),
            ToTasker::Resume { tid } => self.end_pause(tid),
            ToTasker::RenewLease { freeze_at, kill_at } => self.renew_lease(freeze_at, kill_at),
            ToTasker::Ping => self.send(&FromTasker::Pong),
            ToTasker::StopLeftovers { tid } => self.stop_leftovers(tid),
            ToTasker::ResumeLeftovers { tid } => self.resume_leftovers(tid),
            ToTasker::KillLeftovers { tid } => self.kill_leftovers(tid),
            migration_order => {
                // The order is deferred until the first probe has ended, so the probe is started
                // immediately instead of after its delay.
                if matches!(self.migrations.engine_status, EngineStatus::Probing(_)) {
                    self.start_planned_probe();
                }
                self.handle_migration_order(migration_order);
            }
        }
    }

    fn handle_start(&mut self, order: &TaskStart) {
        let tid = order.tid;
        let start_result = if self.tasks.contains_key(&tid) {
            Err(StartTaskError::new(order, StartTaskFailure::TidExists(tid)))
        } else if let Some(failure) =
            task_limit_failure(self.tasks.len(), self.leftovers.len(), TASKS_MAX)
        {
            Err(StartTaskError::new(order, failure))
        } else if let Err(error) = self.claim_start(order.pinned) {
            Err(StartTaskError::new(order, StartTaskFailure::Claim(error)))
        } else if self.lease.is_frozen() {
            Err(StartTaskError::new(
                order,
                StartTaskFailure::LeaseNotRenewed,
            ))
        } else {
            self.start_task(order)
        };
        match start_result {
            Ok(task) => {
                self.send(&FromTasker::Started {
                    tid,
                    pid: task.process.pid,
                    namespace_pid: task.namespace_pid(),
                });
                self.migrations
                    .binary_hasher
                    .enqueue_process(task.process.pid);
                self.tasks.insert(tid, task);
            }
            Err(why) => self.send(&FromTasker::StartFailed {
                tid,
                reason: why.to_string(),
            }),
        }
    }

    fn start_task(&mut self, order: &TaskStart) -> Result<Task, StartTaskError> {
        let namespace = match self.uses_namespaces() && !order.pinned {
            true => {
                let namespace = self
                    .spare_namespaces
                    .take_or_create(self.freezer.as_mut().ok())
                    .map_err(|e| {
                        StartTaskError::new(order, StartTaskFailure::CreateNamespace(e))
                    })?;
                Some((namespace, self.first_pid(order.tid)))
            }
            false => None,
        };
        let (state, guard) = (&self.task_start_state, &self.start_guard);
        task::start_task_process(order, namespace, state, guard, self.exec_time_limit())
    }

    /// Returns the time for which the exec of a program may block the main thread now.
    pub(crate) fn exec_time_limit(&self) -> Duration {
        task::exec_time_limit(self.lease.time_until_freeze())
    }

    /// Returns the time until the spare namespaces must be checked; `None` if no check is needed,
    /// or while a task is being stopped.
    fn spare_check_delay(&self) -> Option<Duration> {
        self.spare_namespaces
            .maintenance_delay()
            .filter(|_| self.uses_namespaces() && !self.has_stopping_task())
    }

    fn start_planned_probe(&mut self) {
        if self.probe_at.take().is_some() {
            self.start_probe();
        }
    }

    fn has_stopping_task(&self) -> bool {
        self.tasks
            .values()
            .any(|task| matches!(task.phase, TaskPhase::Stopping { .. }))
    }

    fn signal_task(&mut self, tid: Tid, signal: i32) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let is_running = matches!(task.phase, TaskPhase::Running);
        if is_running && task.pause.is_inactive() {
            task.send_signal(signal);
        } else if is_running && matches!(signal, libc::SIGKILL | libc::SIGTERM) {
            task.send_signal(signal);
            if signal == libc::SIGTERM && !self.lease.is_frozen() {
                task.resume_to_exit_briefly();
            }
        } else if task.deferred_signals.len() < DEFERRED_SIGNALS_MAX {
            // A stopped task must remain stopped: SIGCONT could let it run at the same time as its
            // copy at the target.
            task.deferred_signals.push(signal);
        }
    }

    /// Requests a task to exit, so that its program can be restarted. Sends the signal that the
    /// engine requires. If the program does not handle the signal of a self-checkpoint, no signal
    /// is sent and the daemon is notified. If the request is a message, the daemon sends the
    /// message after the tasker has recorded the request.
    fn request_exit(&mut self, tid: Tid, engine: Engine) {
        let (Some(task), Some((method, wait_s))) =
            (self.tasks.get_mut(&tid), engine.exit_request())
        else {
            return;
        };
        match method {
            AskMethod::Signal(signal)
                if matches!(engine, Engine::SelfCheckpoint { .. })
                    && !signal_disposition::handles_signal(task.process.pid, signal) =>
            {
                let why = Refusal::SignalNotHandled { signal }.to_string();
                return self.send(&FromTasker::ExitNotRequested { tid, reason: why });
            }
            AskMethod::Signal(signal) => task.send_signal(signal),
            AskMethod::Message(_) => {}
        }
        task.exit_requested_for = Some(engine);
        if !task.pause.is_inactive() && !self.lease.is_frozen() {
            task.resume_to_exit(Duration::from_secs(wait_s.into()));
        }
        if matches!(method, AskMethod::Message(_)) {
            self.send(&FromTasker::ExitExpected { tid });
        }
    }

    pub(crate) fn kill_task(&mut self, tid: Tid) {
        if let Some(task) = self.tasks.get(&tid) {
            task.kill_processes(&Census::default());
        }
    }

    fn forward_output(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let daemon_socket = &mut self.daemon_socket;
        task.output
            .read_chunks(|bytes| daemon_socket.send(&FromTasker::Output { tid, bytes }));
    }

    /// Forwards all output that is in the task's pipe at the time of the call, even if the queue of
    /// the daemon's socket is full.
    pub(crate) fn forward_all_output(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let daemon_socket = &mut self.daemon_socket;
        task.output
            .read_all(|bytes| daemon_socket.send(&FromTasker::Output { tid, bytes }));
    }

    /// Handles the exit of a task's first process: reaps the process and reports the exit. If the
    /// task has exited as its engine requires for a restart, all remaining processes are killed,
    /// and the exit is reported when they have ended. Otherwise the remaining processes stay
    /// guests, as the module `leftovers` describes. `census` must be younger than the exit.
    fn on_task_exit(&mut self, tid: Tid, census: &Census) {
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
            let _ = sys::send_signal(-pid, libc::SIGKILL);
        }
        // ECHILD is not possible, because only this thread reaps the process. If it occurs
        // nevertheless, the exit is reported with status 0.
        let Some((status, usage)) =
            sys::reap_if_ended(pid).unwrap_or(Some((0, sempa_proto::migration::Usage::default())))
        else {
            return;
        };
        self.forward_all_output(tid);
        let Some(task) = self.tasks.remove(&tid) else {
            return;
        };
        let usage = task.usage_on_other_hosts.merged_with(usage);
        self.report_kernel_kill(tid, status);
        self.end_migration_step_of_exited(&task);
        self.cancel_fetch_of_exited(&task);
        if task
            .exit_requested_for
            .is_some_and(|engine| engine.restarts_after(status))
        {
            let exit_message = FromTasker::Exited { tid, status, usage };
            return self.kill_remaining(task, exit_message);
        }
        self.take_over_leftovers(task, census);
        self.send(&FromTasker::Exited { tid, status, usage });
    }

    /// Kills the remaining processes of a task, and sends the message `final_message` when they
    /// have ended. Without a namespace no process is killed, and the message is sent immediately.
    fn kill_remaining(&mut self, mut task: Task, final_message: FromTasker) {
        match task.namespace.take() {
            Some(namespace) => self.kill_namespace(namespace, vec![final_message]),
            None => self.send(&final_message),
        }
    }

    fn handle_signals(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            if signal.ssi_signo == Signal::SIGTERM as u32 {
                self.termination_requested = true;
            }
        }
        self.leftovers.record_child_end();
        self.reap_unowned();
    }

    /// Reaps children that no other code waits for: orphans of tasks, ended init processes, and
    /// processes of a failed restore.
    pub(crate) fn reap_unowned(&self) {
        let is_owned = |pid: &i32| {
            self.tasks.values().any(|task| task.process.pid == *pid)
                || self.migrations.owns_process(*pid)
        };
        while let Some((pid, ended)) = sys::pending_child_event() {
            if !ended || is_owned(&pid) {
                // Until the owner of this child has reaped it, waitid reports only this child.
                // Therefore the other children are reaped one by one.
                return self.reap_each_unowned(is_owned);
            }
            let _ = sys::reap_if_ended(pid);
        }
    }

    /// True if the tasker has a child that is neither a task's first process nor an engine, or if
    /// its children cannot be read.
    pub(crate) fn has_unowned_child(&self) -> bool {
        let is_unowned = |pid: &i32| {
            !self.tasks.values().any(|task| task.process.pid == *pid)
                && !self.migrations.owns_process(*pid)
        };
        child_pids().map_or(true, |pids| pids.iter().any(is_unowned))
    }

    fn reap_each_unowned(&self, is_owned: impl Fn(&i32) -> bool) {
        // Children that cannot be read now are reaped after a later signal.
        let pids = child_pids().unwrap_or_default();
        for pid in pids.into_iter().filter(|pid| !is_owned(pid)) {
            // A process that still runs, or was already reaped, needs no action.
            let _ = sys::reap_if_ended(pid);
        }
    }

    /// Ends every process that the tasker has started and waits until all have ended.
    fn shut_down(&mut self) {
        let census = Census::default();
        for task in self.tasks.values() {
            task.kill_immediately(&census);
        }
        let _running_probe = self.migrations.cancel_all();
        self.leftovers.kill_all();
        let deadline = Instant::now() + SHUTDOWN_TIMEOUT;
        while Instant::now() < deadline {
            // Workers end their engines and reap them.
            self.handle_worker_results();
            let remaining = child_pids();
            let is_none_left = remaining.as_ref().is_ok_and(Vec::is_empty);
            if is_none_left && self.migrations.is_idle() {
                return;
            }
            for pid in remaining
                .unwrap_or_default()
                .into_iter()
                .filter(|pid| !self.migrations.owns_process(*pid))
            {
                // Fails only if the process has ended.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                let _ = sys::reap_if_ended(pid);
            }
            let mut fds = [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            // The call is used only as a delay. All conditions are checked again afterwards.
            let _ = poll(&mut fds, PollTimeout::from(POLL_INTERVAL_MS));
        }
    }
}

/// Returns why no further task may start on a host with these numbers of tasks and of ended tasks
/// that have left processes; `None` if one may.
fn task_limit_failure(tasks: usize, leftovers: usize, limit: usize) -> Option<StartTaskFailure> {
    match leftovers {
        _ if tasks + leftovers < limit => None,
        0 => Some(StartTaskFailure::TooManyTasks(limit)),
        _ => Some(StartTaskFailure::TooManyWithLeftovers {
            tasks,
            leftovers,
            limit,
        }),
    }
}

/// Returns the PIDs of all children of the tasker.
///
/// # Errors
/// They cannot be read, for example because no descriptor is free.
fn child_pids() -> io::Result<Vec<i32>> {
    let own_pid = std::process::id().cast_signed();
    let mut pids = Vec::new();
    for (thread, _) in proc::thread_states(own_pid)? {
        let path = format!("/proc/{own_pid}/task/{thread}/children");
        if let Some(text) = proc::none_if_ended(std::fs::read_to_string(path))? {
            pids.extend(
                text.split_ascii_whitespace()
                    .filter_map(|pid| pid.parse::<i32>().ok()),
            );
        }
    }
    Ok(pids)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ended tasks that have left processes count like tasks, and the reason names their number.
    #[test]
    fn leftovers_count_as_tasks() {
        assert!(task_limit_failure(TASKS_MAX - 3, 2, TASKS_MAX).is_none());
        let reason = |tasks, leftovers| {
            let failure = task_limit_failure(tasks, leftovers, TASKS_MAX);
            failure.expect("the limit is reached").to_string()
        };
        assert_eq!(reason(TASKS_MAX, 0), "this host has 16384 tasks, the limit");
        assert!(reason(0, TASKS_MAX).contains("16384 ended tasks have left processes"));
        assert!(reason(TASKS_MAX - 1, 1).contains("1 ended tasks have left processes"));
    }
}
