//! The tasker's loop: handles the daemon's orders, exits and output of tasks, and results of
//! workers.
//!
//! One thread makes, kills and reaps all processes. Workers (see [`crate::moves`]) only drive an
//! engine or read files, and report through a channel.

use crate::asking;
use crate::control::Control;
use crate::freezer::{ControlGroup, Freezer};
use crate::moves::{EngineState, Moves};
use crate::namespace::{Namespace, Spare};
use crate::sys::{self, Inherited, StartGuard};
use crate::task::{self, EXEC_ALLOWED, HELD_SIGNALS_MAX, Output, Phase, Task};
use checkpoint::allocator;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::Pid;
use sempa_proto::engine::{Asked, Engine};
use sempa_proto::migration::Refusal;
use sempa_proto::tasker::{Capabilities, FromTasker, StartTask, ToTasker};
use sempa_proto::{MigrationId, Tid};
use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

/// Most tasks alive on one host. A tid has room for more, but usually the process table does not.
pub(crate) const TASKS_MAX: usize = 16_384;
/// Time limit for ending all processes after the daemon is gone.
const SHUTDOWN_ALLOWED: Duration = Duration::from_secs(5);
/// Interval at which conditions are polled that have no descriptor, such as a process reaching the
/// stopped state.
const LOOK_AGAIN_MS: u16 = 1;
/// Delay from the start to the probe of the engine, unless a migration needs it earlier: all hosts
/// are busy when a virtual machine starts.
const TRIAL_PAUSE: Duration = Duration::from_secs(1);
/// Delay from the end of a worker to the release of freed memory: the next step of the migration
/// may follow.
const GIVE_BACK_PAUSE: Duration = Duration::from_secs(1);
/// Smallest timeout of poll(2).
const TIMEOUT_UNIT: Duration = Duration::from_millis(1);

/// A namespace without a task. Processes that the task left there still run, or all of them have
/// been killed.
#[derive(Debug)]
struct Leftover {
    namespace: Namespace,
    /// Output is read and dropped, so that writers neither block nor die.
    output: Option<Output>,
    /// Messages to send when the namespace is empty.
    then: Vec<FromTasker>,
}

/// The complete state of the tasker.
pub(crate) struct Supervisor {
    pub(crate) control: Control,
    pub(crate) tasks: BTreeMap<Tid, Task>,
    pub(crate) moves: Moves,
    /// True if each task gets a namespace of its own.
    pub(crate) namespaces: bool,
    /// Namespaces prepared for future tasks.
    pub(crate) spare: Spare,
    pub(crate) inherited: Inherited,
    guard: StartGuard,
    leftovers: Vec<Leftover>,
    /// When to probe the engine, for the first time or again.
    pub(crate) trial_at: Option<Instant>,
    /// When to return freed memory to the kernel.
    give_back_at: Option<Instant>,
    signals: SignalFd,
    ending: bool,
    /// Freezes paused tasks, or the reason why signals stop them. Declared last: it must be dropped
    /// after all its groups.
    pub(crate) freezer: Result<Freezer, String>,
}

/// The owner of a ready descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Control,
    Signals,
    Workers,
    End(Tid),
    Output(Tid),
    LeftoverEnd,
    LeftoverOutput(usize),
    Held(MigrationId),
}

impl Supervisor {
    /// Takes over the socket and sets up the process: subreaper, signals, limits. Must be called
    /// from the main thread while it is the only thread.
    ///
    /// # Errors
    /// A system call failed.
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Supervisor> {
        // Orphans of tasks must become our children and not the host init's, where they would
        // accumulate.
        nix::sys::prctl::set_child_subreaper(true)?;
        let mut watched = SigSet::empty();
        watched.add(Signal::SIGCHLD);
        watched.add(Signal::SIGTERM);
        watched.thread_block()?;
        let signals =
            SignalFd::with_flags(&watched, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let namespaces = Namespace::possible();
        Ok(Supervisor {
            control: Control::new(socket)?,
            tasks: BTreeMap::new(),
            moves: Moves::new(namespaces)?,
            namespaces,
            spare: Spare::new(),
            inherited: Inherited::prepare()?,
            guard: StartGuard::new(EXEC_ALLOWED)?,
            leftovers: Vec::new(),
            trial_at: Some(Instant::now() + TRIAL_PAUSE),
            give_back_at: None,
            signals,
            ending: false,
            freezer: match namespaces {
                true => Freezer::new(),
                false => Err("the tasker has no privileges".into()),
            },
        })
    }

    /// Serves until the daemon is gone, then ends every process of every task.
    ///
    /// # Errors
    /// A system call failed, or the daemon sent something that is not an order.
    pub(crate) fn run(&mut self) -> anyhow::Result<()> {
        self.say(&FromTasker::Ready(self.capabilities()));
        let served = self.serve();
        self.shut_down();
        served
    }

    /// Returns what is possible on this host, as far as that is known yet.
    pub(crate) fn capabilities(&self) -> Capabilities {
        Capabilities {
            pid_namespaces: self.namespaces,
            engine: self.moves.engine_state(),
            freezer: self.freezer.as_ref().map(drop).map_err(String::clone),
        }
    }

    /// Sends a message to the daemon.
    pub(crate) fn say(&mut self, message: &FromTasker) {
        self.control.send(message);
    }

    fn serve(&mut self) -> anyhow::Result<()> {
        while !self.ending && !self.control.is_closed() {
            let ready = self.wait()?;
            for (source, events) in &ready {
                match *source {
                    Source::Control => self.converse(*events)?,
                    Source::Signals => {}
                    Source::Workers => {
                        self.hear_workers();
                        self.give_back_at
                            .get_or_insert_with(|| Instant::now() + GIVE_BACK_PAUSE);
                    }
                    Source::End(tid) => self.ended(tid),
                    Source::Output(tid) => self.pass_output(tid),
                    Source::LeftoverEnd => {}
                    Source::LeftoverOutput(index) => {
                        if let Some(output) = &mut self.leftovers[index].output {
                            output.read(drop);
                        }
                    }
                    Source::Held(migration) => self.held_lost(migration),
                }
            }
            if ready.iter().any(|(source, _)| *source == Source::Signals) {
                // After the exits of tasks: ended children that remain now are waited for by no
                // other part of the tasker.
                self.signalled();
            }
            if ready.is_empty() && self.spare_pause().is_some() {
                self.spare.tend(self.freezer.as_mut().ok());
            }
            if self.trial_at.is_some_and(|at| at <= Instant::now()) {
                self.begin_trial_once();
            }
            if self
                .give_back_at
                .take_if(|at| *at <= Instant::now())
                .is_some()
            {
                allocator::trim_freed();
            }
            self.look_at_leftovers();
            self.look_at_stopping();
            self.look_at_holds();
        }
        Ok(())
    }

    fn converse(&mut self, events: PollFlags) -> anyhow::Result<()> {
        self.control.flush();
        if events.intersects(PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR) {
            for order in self.control.receive()? {
                self.obey(order);
            }
        }
        Ok(())
    }

    /// Waits for events and returns the ready sources.
    fn wait(&self) -> io::Result<Vec<(Source, PollFlags)>> {
        let mut watched: Vec<(Source, BorrowedFd<'_>)> = vec![
            (Source::Control, self.control.fd()),
            (Source::Signals, self.signals.as_fd()),
            (Source::Workers, self.moves.wake()),
        ];
        let room = !self.control.is_full();
        for task in self.tasks.values() {
            // Output comes before the exit, so that what a task wrote before its exit is mostly
            // forwarded first.
            watched.extend(
                task.output
                    .fd()
                    .filter(|_| room)
                    .map(|fd| (Source::Output(task.tid), fd)),
            );
            watched.push((Source::End(task.tid), task.process.pidfd.as_fd()));
        }
        for (index, left) in self.leftovers.iter().enumerate() {
            watched.push((Source::LeftoverEnd, left.namespace.ended()));
            watched.extend(
                left.output
                    .iter()
                    .filter_map(Output::fd)
                    .map(|fd| (Source::LeftoverOutput(index), fd)),
            );
        }
        watched.extend(
            self.moves
                .held()
                .map(|(migration, fd)| (Source::Held(migration), fd)),
        );

        let mut fds: Vec<PollFd<'_>> = watched
            .iter()
            .map(|(_, fd)| PollFd::new(*fd, PollFlags::POLLIN))
            .collect();
        if self.control.wants_write() {
            fds[0] = PollFd::new(self.control.fd(), PollFlags::POLLIN | PollFlags::POLLOUT);
        }
        match poll(&mut fds, self.patience()) {
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

    /// Returns how long to wait for events.
    fn patience(&self) -> PollTimeout {
        if self.is_stopping() {
            return PollTimeout::from(LOOK_AGAIN_MS);
        }
        let soon = Duration::from_millis(LOOK_AGAIN_MS.into());
        let held = self
            .tasks
            .values()
            .filter_map(|task| task.hold.pause(soon))
            .min()
            .map(|pause| pause + TIMEOUT_UNIT);
        let until = |at: Instant| at.saturating_duration_since(Instant::now()) + TIMEOUT_UNIT;
        let (trial, give_back) = (self.trial_at.map(until), self.give_back_at.map(until));
        let pause = [self.spare_pause(), trial, give_back, held]
            .into_iter()
            .flatten()
            .min();
        pause.map_or(PollTimeout::NONE, |pause| {
            PollTimeout::try_from(pause).expect("minutes at most")
        })
    }

    fn obey(&mut self, order: ToTasker) {
        match order {
            ToTasker::Start(order) => self.start(&order),
            ToTasker::Signal { tid, signal } => self.signal(tid, signal),
            ToTasker::End { tid, engine } => self.end(tid, engine),
            ToTasker::Minds {
                migration,
                tid,
                signal,
            } => {
                // A task that is gone cannot be harmed by the signal.
                let minds = self
                    .tasks
                    .get(&tid)
                    .is_none_or(|task| asking::minds(task.process.pid, signal));
                self.say(&FromTasker::Minds { migration, minds });
            }
            ToTasker::EndsForGood { tid } => {
                if let Some(task) = self.tasks.get_mut(&tid) {
                    task.ending = None;
                }
            }
            ToTasker::Kill { tid } => self.kill(tid),
            ToTasker::Hold { tid, after } => self.hold(tid, after),
            ToTasker::Ease { tid, alone, after } => self.ease(tid, alone, after),
            ToTasker::GoOn { tid } => self.free(tid),
            about_a_move => {
                // The order waits for the first probe, so the probe starts without its delay.
                if matches!(self.moves.state, EngineState::Trying(_)) {
                    self.begin_trial_once();
                }
                self.obey_move(about_a_move);
            }
        }
    }

    fn start(&mut self, order: &StartTask) {
        let tid = order.tid;
        let started = if self.tasks.contains_key(&tid) {
            Err(format!(
                "cannot start {}: {tid} exists already",
                order.path.display()
            ))
        } else if self.tasks.len() >= TASKS_MAX {
            Err(format!(
                "cannot start {}: this host has {TASKS_MAX} tasks, the limit",
                order.path.display()
            ))
        } else {
            self.start_task(order)
        };
        match started {
            Ok(task) => {
                self.say(&FromTasker::Started {
                    tid,
                    pid: task.process.pid,
                });
                self.moves.learning.begun(task.process.pid);
                self.tasks.insert(tid, task);
            }
            Err(why) => self.say(&FromTasker::StartFailed { tid, why }),
        }
    }

    fn start_task(&mut self, order: &StartTask) -> Result<Task, String> {
        let namespace = match self.namespaces && !order.pinned {
            true => Some(self.spare.take(self.freezer.as_mut().ok()).map_err(|e| {
                let path = order.path.display();
                format!("cannot start {path}: no process-id namespace: {e}")
            })?),
            false => None,
        };
        task::start(order, namespace, &self.inherited, &self.guard)
    }

    /// Returns the time until the spare namespaces must be checked; `None` while a task is being
    /// stopped.
    fn spare_pause(&self) -> Option<Duration> {
        self.spare
            .pause()
            .filter(|_| self.namespaces && !self.is_stopping())
    }

    fn begin_trial_once(&mut self) {
        if self.trial_at.take().is_some() {
            self.begin_trial();
        }
    }

    fn is_stopping(&self) -> bool {
        self.tasks
            .values()
            .any(|task| matches!(task.phase, Phase::Stopping { .. }))
    }

    fn signal(&mut self, tid: Tid, signal: i32) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let running = matches!(task.phase, Phase::Running);
        if running && task.hold.is_free() {
            task.send(signal);
        } else if running && matches!(signal, libc::SIGKILL | libc::SIGTERM) {
            task.send(signal);
            if signal == libc::SIGTERM {
                task.let_end();
            }
        } else if task.held_signals.len() < HELD_SIGNALS_MAX {
            // A stopped task must stay stopped: a SIGCONT could let it run at the same time as its
            // copy.
            task.held_signals.push(signal);
        }
    }

    /// Asks a task to exit, so that its program can be restarted.
    fn end(&mut self, tid: Tid, engine: Engine) {
        let (Some(task), Some((asked, wait))) = (self.tasks.get_mut(&tid), engine.asks()) else {
            return;
        };
        match asked {
            Asked::Signal(signal)
                if matches!(engine, Engine::Own { .. })
                    && !asking::minds(task.process.pid, signal) =>
            {
                let why = Refusal::NotMinded { signal }.to_string();
                return self.say(&FromTasker::NotAsked { tid, why });
            }
            Asked::Signal(signal) => task.send(signal),
            Asked::Message(_) => {}
        }
        task.ending = Some(engine);
        if !task.hold.is_free() {
            task.let_run_for(Duration::from_secs(wait.into()));
        }
        if matches!(asked, Asked::Message(_)) {
            self.say(&FromTasker::ExpectsEnd { tid });
        }
    }

    fn kill(&mut self, tid: Tid) {
        if let Some(task) = self.tasks.get(&tid) {
            task.kill();
        }
    }

    fn pass_output(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let control = &mut self.control;
        task.output
            .read(|bytes| control.send(&FromTasker::Output { tid, bytes }));
    }

    /// Forwards all output that is in the task's pipe now, even if the socket's queue is full.
    pub(crate) fn drain_output(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let control = &mut self.control;
        task.output
            .drain(|bytes| control.send(&FromTasker::Output { tid, bytes }));
    }

    /// Handles the exit of a task's process. Processes that it left in its namespace continue until
    /// they end or the daemon does.
    fn ended(&mut self, tid: Tid) {
        let Some(task) = self.tasks.get(&tid) else {
            return;
        };
        let pid = task.process.pid;
        if task.namespace.is_none()
            && task
                .ending
                .is_some_and(|engine| sys::ended_as(pid).is_some_and(|s| engine.goes_on_after(s)))
        {
            // Without a namespace only the process group can be killed, which may miss processes.
            // The pid is not reused before it is reaped.
            let _ = sys::kill_raw(-pid, libc::SIGKILL);
        }
        // ECHILD is not possible, because only this thread reaps the process. If it occurs, the
        // exit status is unknown.
        let Some((status, used)) =
            sys::reap(pid).unwrap_or(Some((0, sempa_proto::migration::Usage::default())))
        else {
            return;
        };
        self.drain_output(tid);
        let Some(mut task) = self.tasks.remove(&tid) else {
            return;
        };
        let used = task.used_before.plus(used);
        self.abandon_move_of(&task);
        self.memory_unneeded(&task);
        if task
            .ending
            .is_some_and(|engine| engine.goes_on_after(status))
        {
            let exited = FromTasker::Exited { tid, status, used };
            return self.end_all_of(task, exited);
        }
        // Otherwise the task's remaining processes would stay frozen forever.
        task.frozen().into_iter().for_each(ControlGroup::thaw);
        self.say(&FromTasker::Exited { tid, status, used });
        if let Some(namespace) = task
            .namespace
            .take()
            .and_then(|namespace| self.spare.keep(namespace))
        {
            namespace.end_when_empty();
            self.leftovers.push(Leftover {
                namespace,
                output: Some(task.output),
                then: Vec::new(),
            });
        }
    }

    /// Kills the remaining processes of a task; sends `then` when they are gone.
    fn end_all_of(&mut self, mut task: Task, then: FromTasker) {
        match task.namespace.take() {
            Some(namespace) => self.when_ended(namespace, vec![then]),
            None => self.say(&then),
        }
    }

    /// Kills a namespace; sends the messages when it is empty.
    pub(crate) fn when_ended(&mut self, namespace: Namespace, then: Vec<FromTasker>) {
        namespace.kill();
        self.leftovers.push(Leftover {
            namespace,
            output: None,
            then,
        });
    }

    fn look_at_leftovers(&mut self) {
        let (ended, left) = std::mem::take(&mut self.leftovers)
            .into_iter()
            .partition(|left: &Leftover| left.namespace.is_over());
        self.leftovers = left;
        let ended: Vec<Leftover> = ended;
        for message in ended.into_iter().flat_map(|left| left.then) {
            self.say(&message);
        }
    }

    fn signalled(&mut self) {
        while let Ok(Some(signal)) = self.signals.read_signal() {
            if signal.ssi_signo == Signal::SIGTERM as u32 {
                self.ending = true;
            }
        }
        self.reap_strangers();
    }

    /// Reaps children that no other part waits for: orphans of tasks, ended inits, remains of a
    /// failed restore.
    pub(crate) fn reap_strangers(&self) {
        let known = |pid: &i32| {
            self.tasks.values().any(|task| task.process.pid == *pid) || self.moves.waits_for(*pid)
        };
        while let Some((pid, ended)) = sys::child_with_news() {
            if !ended || known(&pid) {
                // waitid reports this child until its waiter has reaped it, so the others must be
                // checked one by one.
                return self.reap_all_but(known);
            }
            let _ = sys::reap(pid);
        }
    }

    fn reap_all_but(&self, known: impl Fn(&i32) -> bool) {
        for pid in children().into_iter().filter(|pid| !known(pid)) {
            // A process that still runs, or was reaped meanwhile, needs no action.
            let _ = sys::reap(pid);
        }
    }

    /// Ends every process that the tasker started and waits until they are gone.
    fn shut_down(&mut self) {
        for task in self.tasks.values() {
            task.kill_all();
        }
        self.moves.cancel_all();
        for left in &self.leftovers {
            left.namespace.kill();
        }
        let until = Instant::now() + SHUTDOWN_ALLOWED;
        while Instant::now() < until {
            // Workers end their engines and also wait for them.
            self.hear_workers();
            let left = children();
            if left.is_empty() && self.moves.is_idle() {
                return;
            }
            for pid in left.into_iter().filter(|pid| !self.moves.waits_for(*pid)) {
                // Fails only if the process has ended.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
                let _ = sys::reap(pid);
            }
            let mut fds = [PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
            // Used only as a pause; everything is checked again afterwards.
            let _ = poll(&mut fds, PollTimeout::from(LOOK_AGAIN_MS));
        }
    }
}

/// Returns the process ids of all children of this process.
fn children() -> Vec<i32> {
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    threads
        .flatten()
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|list| {
            list.split_whitespace()
                .filter_map(|pid| pid.parse().ok())
                .collect::<Vec<i32>>()
        })
        .collect()
}
