//! Pauses tasks while the owner of the host is present.
//!
//! 1. The task runs for a short time so that its library can quiesce. During that time the
//!    program's threads have the lowest priority, and those of the library a high one.
//! 2. The task's control group is frozen. Without a control group, all its processes are stopped by
//!    SIGSTOP, and so are processes that have left the control group. The task counts as stopped
//!    when all processes of its PID namespace were seen stopped.
//! 3. The pause outlasts migrations: after a failed migration the task remains stopped. The group
//!    is frozen again, and the stop is verified and reported again.
//!
//! A task that had not quiesced when it was stopped runs once more before it migrates. In the first
//! part of this time the program's threads are frozen: the library can quiesce, and the program
//! does not run while the owner is present.
//!
//! The engine cannot dump a frozen control group. For a migration all processes receive SIGSTOP
//! while they are frozen, and are then thawed; none of them runs in between.

use crate::census::Census;
use crate::nice::{self, DeprioritizedThreads};
use crate::stop::{self, SeenStopped, VforkRule};
use crate::supervisor::Supervisor;
use crate::task::{Task, TaskPhase};
use checkpoint::criu::FrozenThreads;
use sempa_proto::tasker::{FromTasker, REPORTED_PIDS_MAX};
use sempa_proto::{Micros, Tid};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Time for which a paused task may run to exit after SIGTERM.
const EXIT_GRACE: Duration = Duration::from_millis(200);
/// Time from the order to stop during which processes that have not stopped are polled at the short
/// interval. A process that waits in the kernel for a disk or a network file system may need
/// longer, but executes no instructions of the program.
const FAST_POLL_DURATION: Duration = Duration::from_secs(2);
/// Poll interval for processes that have not stopped within [`FAST_POLL_DURATION`].
const SLOW_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Progress of pausing a task.
#[derive(Debug, Default)]
pub(crate) enum Pause {
    #[default]
    NotPaused,
    /// The task still runs so that its library can quiesce.
    Quiescing {
        /// Time at which the task is stopped, even if it has not quiesced.
        stop_at: Instant,
        /// The previous priorities of the task's threads.
        deprioritized: DeprioritizedThreads,
        /// Whether only the library's threads may run.
        program_freeze: ProgramThreadFreeze,
    },
    /// The task was ordered to stop. Some of its processes may still run.
    Stopping {
        /// Processes that received SIGSTOP and must receive no second one. While a control group
        /// is frozen the set is empty: [`Namespace::thaw`](crate::namespace::Namespace::thaw)
        /// continues the processes that have received SIGSTOP then.
        signalled_pids: BTreeSet<i32>,
        /// Time at which the task was ordered to stop.
        ordered_at: Instant,
        /// The previous priorities of the task's threads.
        deprioritized: DeprioritizedThreads,
        /// True after a report that the task has not stopped.
        is_delay_reported: bool,
    },
    /// The task is stopped, or is stopped by a migration and will remain stopped when that
    /// migration ends.
    Paused,
}

/// Whether the program's threads of a quiescing task are frozen, so that only the library's threads
/// run.
#[derive(Debug, Default)]
pub(crate) enum ProgramThreadFreeze {
    /// The program's threads are not frozen: freezing was not requested or is not possible.
    #[default]
    Inactive,
    /// The program's threads are frozen.
    Active {
        /// Time at which the program's threads are unfrozen.
        unfreeze_at: Instant,
        /// Dropping this value unfreezes the program's threads.
        _frozen_threads: FrozenThreads,
    },
    /// The program's threads were unfrozen because the library could not quiesce while they were
    /// frozen. A frozen thread may hold a lock that the library needs.
    Expired,
}

impl ProgramThreadFreeze {
    fn has_expired(&self, now: Instant) -> bool {
        matches!(self, Self::Active { unfreeze_at: until, .. } if *until <= now)
    }
}

impl Pause {
    /// Returns the time until the pause must be checked again; `None` if no check is needed.
    /// `stop_poll_interval` is the poll interval for a task that is being stopped.
    pub(crate) fn next_check_delay(&self, stop_poll_interval: Duration) -> Option<Duration> {
        match self {
            Self::NotPaused | Self::Paused => None,
            Self::Quiescing {
                stop_at,
                program_freeze,
                ..
            } => {
                let next_check_at =
                    if let ProgramThreadFreeze::Active { unfreeze_at, .. } = program_freeze {
                        stop_at.min(unfreeze_at)
                    } else {
                        stop_at
                    };
                Some(next_check_at.saturating_duration_since(Instant::now()))
            }
            Self::Stopping {
                ordered_at: since, ..
            } if since.elapsed() < FAST_POLL_DURATION => Some(stop_poll_interval),
            Self::Stopping { .. } => Some(SLOW_POLL_INTERVAL),
        }
    }

    /// Restores the priorities of the task's threads. Returns the PIDs of the processes that have
    /// received SIGSTOP.
    pub(crate) fn restore_priorities(self, task: &Task, census: &Census) -> BTreeSet<i32> {
        let (deprioritized, signalled_pids) = match self {
            Self::NotPaused | Self::Paused => return BTreeSet::new(),
            Self::Quiescing { deprioritized, .. } => (deprioritized, BTreeSet::new()),
            Self::Stopping {
                deprioritized,
                signalled_pids,
                ..
            } => (deprioritized, signalled_pids),
        };
        deprioritized.restore_priorities(&task.member_pids_in(census));
        signalled_pids
    }

    pub(crate) fn is_inactive(&self) -> bool {
        matches!(self, Self::NotPaused)
    }
}

impl Task {
    /// Pauses the task. The task may run for the time `run_time` so that its library can quiesce.
    fn pause(&mut self, run_time: Duration) {
        let census = Census::default();
        match (&self.phase, std::mem::take(&mut self.pause)) {
            (TaskPhase::Running, pause) if run_time.is_zero() => self.stop_paused(pause, &census),
            (TaskPhase::Running, pause) => {
                let stop_at = Instant::now() + run_time;
                let (deprioritized, was_stopped) = match pause {
                    Pause::NotPaused => (
                        DeprioritizedThreads::change_priorities(&self.member_pids_in(&census)),
                        false,
                    ),
                    Pause::Quiescing { deprioritized, .. } => (deprioritized, false),
                    Pause::Stopping { deprioritized, .. } => (deprioritized, true),
                    Pause::Paused => (
                        DeprioritizedThreads::change_priorities(&self.member_pids_in(&census)),
                        true,
                    ),
                };
                if was_stopped {
                    self.continue_processes(&census);
                }
                self.pause = Pause::Quiescing {
                    stop_at,
                    deprioritized,
                    program_freeze: ProgramThreadFreeze::Inactive,
                };
            }
            // The task is stopped or being stopped for a migration. It remains stopped when the
            // migration ends.
            (_, pause) => {
                pause.restore_priorities(self, &census);
                self.pause = Pause::Paused;
            }
        }
    }

    /// Lets a paused task run for the time `run_time` so that the task can quiesce. In the first
    /// part of this time, which is `library_phase` long, only the library's threads run. A repeated
    /// call while the task runs has no effect. A task that is not paused, or that is stopped for a
    /// migration, is paused instead, as by [`Task::pause`].
    fn resume_to_quiesce(&mut self, library_phase: Duration, run_time: Duration) {
        if !matches!(self.phase, TaskPhase::Running) || matches!(&self.pause, Pause::NotPaused) {
            return self.pause(run_time);
        }
        let census = Census::default();
        let was_stopped = match std::mem::take(&mut self.pause) {
            pause @ Pause::Quiescing {
                program_freeze: ProgramThreadFreeze::Active { .. } | ProgramThreadFreeze::Expired,
                ..
            } => return self.pause = pause,
            // Freezing a thread wakes it first, so the threads must not have the lowest priority.
            pause => {
                let was_stopped = !matches!(pause, Pause::Quiescing { .. });
                pause.restore_priorities(self, &census);
                was_stopped
            }
        };
        if !was_stopped {
            self.record_already_stopped(&census);
        }
        let (now, frozen_threads) = (Instant::now(), self.freeze_program_threads());
        let library_phase =
            frozen_threads.map_or(ProgramThreadFreeze::Inactive, |frozen_threads| {
                ProgramThreadFreeze::Active {
                    unfreeze_at: now + library_phase,
                    _frozen_threads: frozen_threads,
                }
            });
        let deprioritized = DeprioritizedThreads::change_priorities(&self.member_pids_in(&census));
        if was_stopped {
            self.continue_processes(&census);
        }
        self.pause = Pause::Quiescing {
            stop_at: now + run_time,
            deprioritized,
            program_freeze: library_phase,
        };
    }

    /// Lets a paused task run for [`EXIT_GRACE`], in which it can exit.
    pub(crate) fn resume_to_exit_briefly(&mut self) {
        self.pause(EXIT_GRACE);
    }

    /// Lets a paused task run for the duration `run_time`, in which it can exit on request.
    pub(crate) fn resume_to_exit(&mut self, run_time: Duration) {
        self.pause(run_time);
    }

    /// Stops the task, even if it has not quiesced.
    pub(crate) fn stop_now(&mut self, census: &Census) {
        let pause = std::mem::take(&mut self.pause);
        self.stop_paused(pause, census);
    }

    /// Stops the task. `pause` is the pause's current state, which may be any.
    fn stop_paused(&mut self, pause: Pause, census: &Census) {
        let (deprioritized, program_freeze) = match pause {
            Pause::Paused | Pause::Stopping { .. } => return self.pause = pause,
            Pause::NotPaused => (
                DeprioritizedThreads::default(),
                ProgramThreadFreeze::Inactive,
            ),
            Pause::Quiescing {
                deprioritized,
                program_freeze,
                ..
            } => (deprioritized, program_freeze),
        };
        self.start_freeze();
        // Processes that were already stopped by a signal must be recorded before any process
        // receives SIGSTOP. Afterwards they could not be distinguished from the other processes.
        self.record_already_stopped(census);
        let signalled_pids = match program_freeze {
            ProgramThreadFreeze::Active { .. } if self.frozen_group().is_none() => {
                stop::send_stop_to_frozen(&self.processes())
            }
            _ => BTreeSet::new(),
        };
        drop(program_freeze);
        self.pause = Pause::Stopping {
            signalled_pids,
            ordered_at: Instant::now(),
            deprioritized,
            is_delay_reported: false,
        };
    }

    /// Starts to freeze the task's control group, if it has one and is not frozen. Returns true if
    /// the freeze was started. If it fails because the group was removed, or because no descriptor
    /// is free, the processes are stopped by signals until the freeze succeeds.
    fn start_freeze(&self) -> bool {
        self.control_group()
            .is_some_and(|group| !group.is_freeze_requested() && group.start_freeze().is_ok())
    }

    /// Freezes the control group of a task that was ordered to stop, if this has failed before.
    fn retry_freeze(&mut self) {
        if !matches!(self.pause, Pause::Stopping { .. }) || !self.start_freeze() {
            return;
        }
        if let (Pause::Stopping { signalled_pids, .. }, Some(namespace)) =
            (&mut self.pause, &self.namespace)
        {
            namespace.record_signalled(std::mem::take(signalled_pids));
        }
    }

    /// Orders a task to stop that is paused, but of which processes may run. `signalled_pids` are
    /// processes that have received SIGSTOP and may not have stopped yet.
    pub(crate) fn begin_stopping_again(
        &mut self,
        mut signalled_pids: BTreeSet<i32>,
        census: &Census,
    ) {
        if self.frozen_group().is_none() {
            let pids = self.processes().pids_in(census);
            let pids = stop::without_already_stopped(pids, &self.already_stopped_pids);
            match &self.namespace {
                // Each process may have received SIGSTOP for a migration.
                Some(namespace) if self.start_freeze() => {
                    signalled_pids.clear();
                    namespace.record_signalled(pids);
                }
                _ => {
                    let stopped = pids.into_iter().filter(|p| stop::is_stopped_by_signal(*p));
                    signalled_pids.extend(stopped);
                }
            }
        }
        self.pause = Pause::Stopping {
            signalled_pids,
            ordered_at: Instant::now(),
            deprioritized: DeprioritizedThreads::default(),
            is_delay_reported: false,
        };
    }

    /// Freezes the program's threads; `None` if freezing is not possible. Processes that were
    /// already stopped are not frozen, because they do not run and must stay stopped.
    fn freeze_program_threads(&self) -> Option<FrozenThreads> {
        let threads = nice::program_threads(&stop::without_already_stopped(
            self.member_pids(),
            &self.already_stopped_pids,
        ));
        if threads.is_empty() {
            None
        } else {
            FrozenThreads::freeze(threads).ok()
        }
    }

    /// Records the processes that were stopped for other reasons than the pause.
    fn record_already_stopped(&mut self, census: &Census) {
        self.already_stopped_pids = stop::stopped_by_signal(&self.member_pids_in(census));
    }

    /// Prepares the task for being stopped by a migration: restores the priorities of its threads,
    /// and replaces the freeze of its processes by SIGSTOP. A paused task stays marked as paused,
    /// so that it remains stopped when the migration ends. Returns the PIDs of the processes that
    /// have received SIGSTOP.
    pub(crate) fn end_pause_for_migration(&mut self) -> BTreeSet<i32> {
        let pause = std::mem::take(&mut self.pause);
        let census = Census::default();
        if matches!(pause, Pause::NotPaused | Pause::Quiescing { .. }) {
            self.record_already_stopped(&census);
        }
        if !pause.is_inactive() {
            self.pause = Pause::Paused;
        }
        let mut signalled_pids = match pause {
            Pause::Quiescing {
                program_freeze: ProgramThreadFreeze::Active { .. },
                ..
            } => stop::send_stop_to_frozen(&self.processes()),
            Pause::Stopping { .. } | Pause::Paused => {
                stop::continue_vfork_children(&self.processes().pids_in(&census));
                BTreeSet::new()
            }
            _ => BTreeSet::new(),
        };
        signalled_pids.extend(pause.restore_priorities(self, &census));
        if let Some(group) = self.frozen_group() {
            signalled_pids.extend(stop::send_stop_to_frozen(&self.processes()));
            group.thaw();
        }
        signalled_pids
    }

    /// Ends the pause of the task and lets it run, unless a migration has stopped it. `census` must
    /// be younger than the stop.
    pub(crate) fn end_pause(&mut self, census: &Census) {
        let pause = std::mem::take(&mut self.pause);
        let is_stopped = match &pause {
            Pause::NotPaused | Pause::Quiescing { .. } => false,
            Pause::Stopping { .. } => true,
            Pause::Paused => matches!(self.phase, TaskPhase::Running),
        };
        pause.restore_priorities(self, census);
        if is_stopped {
            self.continue_after_migration(census);
        }
    }

    /// Stops a task that is being paused, if its time to quiesce has passed.
    fn stop_if_due(&mut self, census: &Census) {
        let now = Instant::now();
        if let Pause::Quiescing {
            stop_at,
            program_freeze,
            ..
        } = &mut self.pause
        {
            if *stop_at > now {
                if program_freeze.has_expired(now) {
                    *program_freeze = ProgramThreadFreeze::Expired;
                }
                return;
            }
            self.stop_now(census);
        }
    }

    /// Stops the processes of a task that was ordered to stop, as far as signals must do it.
    /// Returns the processes if each of them has stopped. `census` must be younger than the order.
    fn signal_running(&mut self, census: &Census) -> Option<SeenStopped> {
        let mut pause = std::mem::take(&mut self.pause);
        let seen = match (&self.namespace, self.frozen_group(), &mut pause) {
            (Some(namespace), Some(group), Pause::Stopping { .. }) => {
                namespace.signal_outside(group, census)
            }
            (_, _, Pause::Stopping { signalled_pids, .. }) => stop::signal_running(
                &self.processes(),
                census,
                signalled_pids,
                VforkRule::ChildStops,
            ),
            _ => None,
        };
        self.pause = pause;
        seen
    }

    /// True if `seen` are all processes of the task, which was ordered to stop: no process of its
    /// namespace runs, whether or not it is in the control group.
    fn has_stopped(&self, seen: &SeenStopped, later_census: &Census) -> bool {
        match (&self.namespace, self.frozen_group()) {
            (Some(namespace), Some(group)) => namespace.is_frozen(group, seen, later_census),
            _ => seen.are_all(&self.processes(), later_census),
        }
    }

    /// Concludes the check of a task that was ordered to stop. `seen` is the result of
    /// [`Task::signal_running`], and `census` has begun after that call.
    fn conclude_check(&mut self, seen: Option<&SeenStopped>, census: &Census) -> StopProgress {
        let has_stopped = seen.is_some_and(|seen| self.has_stopped(seen, census));
        let Pause::Stopping {
            signalled_pids,
            ordered_at,
            deprioritized,
            mut is_delay_reported,
        } = std::mem::take(&mut self.pause)
        else {
            unreachable!()
        };
        if has_stopped {
            self.record_already_stopped_outside(census);
            // Images include the threads' priorities, so the priorities must be restored before a
            // dump.
            deprioritized.restore_priorities(&self.member_pids_in(census));
            self.pause = Pause::Paused;
            return StopProgress::Stopped;
        }
        // The daemon has not ordered a stop of a held task. If it does later, it gets the report.
        let is_late =
            !self.is_held && !is_delay_reported && ordered_at.elapsed() >= FAST_POLL_DURATION;
        is_delay_reported |= is_late;
        self.pause = Pause::Stopping {
            signalled_pids,
            ordered_at,
            deprioritized,
            is_delay_reported,
        };
        if is_late {
            StopProgress::Late(self.unstopped_pids(census))
        } else {
            StopProgress::Unfinished
        }
    }

    /// Records the processes outside the control group that were stopped for other reasons than the
    /// pause.
    fn record_already_stopped_outside(&mut self, census: &Census) {
        let Some(namespace) = self
            .namespace
            .as_ref()
            .filter(|n| n.frozen_group().is_some())
        else {
            return;
        };
        for pid in namespace.already_stopped_outside(census) {
            if !self.already_stopped_pids.contains(&pid) {
                self.already_stopped_pids.push(pid);
            }
        }
    }

    /// Returns the processes that still run although the task was ordered to stop.
    fn unstopped_pids(&self, census: &Census) -> Vec<i32> {
        match (&self.namespace, self.frozen_group()) {
            (Some(namespace), Some(group)) => namespace.unstopped_pids(group, census),
            _ => stop::running_pids(&self.processes().pids_in(census)),
        }
    }

    /// Stops a paused task again if one of its processes runs: a process that another program has
    /// moved out of the frozen control group, or has continued by a signal. Returns true if the
    /// task is being stopped, also because its processes could not be read.
    fn stop_again_if_running(&mut self, census: &Census) -> bool {
        let is_paused =
            matches!(self.pause, Pause::Paused) && matches!(self.phase, TaskPhase::Running);
        if !is_paused {
            return false;
        }
        let pids = self.processes().without_frozen().try_pids_in(census);
        // If the processes cannot be read, the task does not count as stopped.
        let running_pids = pids.map(|pids| stop::executing_pids(&pids));
        let runs = !running_pids.as_ref().is_ok_and(Vec::is_empty);
        if let (Ok(pids), Some(namespace)) = (&running_pids, &self.namespace) {
            namespace.forget_stopped_outside(pids);
        }
        if runs {
            self.begin_stopping_again(BTreeSet::new(), census);
        }
        runs
    }
}

/// What a check of a task that was ordered to stop has found.
enum StopProgress {
    /// No process of the task runs any more.
    Stopped,
    /// Some processes may run.
    Unfinished,
    /// These processes still run after [`FAST_POLL_DURATION`]. Reported once.
    Late(Vec<i32>),
}

impl Supervisor {
    /// Pauses a task on the daemon's order. The task may run for the time `run_time` so that its
    /// library can quiesce. While the lease permits no task to run, the task is stopped at once.
    pub(crate) fn pause_task(&mut self, tid: Tid, run_time: Micros) {
        let run_time = match self.lease.is_frozen() {
            true => Duration::ZERO,
            false => Duration::from_micros(run_time.0),
        };
        self.change_pause(tid, |task| task.pause(run_time));
    }

    /// Lets a paused task run on the daemon's order, so that the task can quiesce. `library_phase`
    /// and `run_time` are durations as in [`Task::resume_to_quiesce`]. While the lease permits no
    /// task to run, the task stays stopped.
    pub(crate) fn resume_task_to_quiesce(
        &mut self,
        tid: Tid,
        library_phase: Micros,
        run_time: Micros,
    ) {
        if self.lease.is_frozen() {
            return self.pause_task(tid, run_time);
        }
        self.change_pause(tid, |task| {
            task.resume_to_quiesce(
                Duration::from_micros(library_phase.0),
                Duration::from_micros(run_time.0),
            )
        });
    }

    fn change_pause(&mut self, tid: Tid, change: impl FnOnce(&mut Task)) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        change(task);
        // From now on the task is stopped because the daemon has ordered this.
        task.is_held = false;
        let was_paused = matches!(task.pause, Pause::Paused);
        // A paused task does not change its memory, so pre-copying it has no advantage.
        self.migrations.pre_copies.stop_early_for_task(tid);
        if was_paused {
            self.send(&FromTasker::Paused { tid });
        }
        self.must_check_pauses = true;
    }

    /// Ends the pause of a task on the daemon's order. While the lease permits no task to run, a
    /// stopped task stays stopped until the lease is renewed.
    pub(crate) fn end_pause(&mut self, tid: Tid) {
        let is_frozen = self.lease.is_frozen();
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        let is_stopped = matches!(task.phase, TaskPhase::Running)
            && matches!(task.pause, Pause::Stopping { .. } | Pause::Paused);
        task.is_held = is_frozen && is_stopped;
        if !task.is_held {
            task.end_pause(&Census::default());
        }
    }

    /// Checks the tasks that are being paused, and reports those that have stopped.
    pub(crate) fn check_pauses(&mut self) {
        self.must_check_pauses = false;
        let due_tids = |task: &Task| match &task.pause {
            Pause::Quiescing { .. } => task
                .pause
                .next_check_delay(Duration::ZERO)
                .is_some_and(|delay| delay.is_zero()),
            Pause::Stopping { .. } => true,
            Pause::NotPaused | Pause::Paused => false,
        };
        let due_tids: Vec<Tid> = self
            .tasks
            .values()
            .filter(|task| due_tids(task))
            .map(|task| task.tid)
            .collect();
        // All tasks are frozen before the processes of the host are read for the first check.
        let census = Census::default();
        for tid in &due_tids {
            if let Some(task) = self.tasks.get_mut(tid) {
                task.stop_if_due(&census);
                task.retry_freeze();
            }
        }
        let census = Census::default();
        let mut checks = Vec::new();
        for tid in due_tids {
            if let Some(task) = self.tasks.get_mut(&tid)
                && matches!(task.pause, Pause::Stopping { .. })
            {
                checks.push((tid, task.signal_running(&census)));
            }
        }
        let later_census = Census::default();
        for (tid, seen) in checks {
            let Some(task) = self.tasks.get_mut(&tid) else {
                continue;
            };
            let progress = task.conclude_check(seen.as_ref(), &later_census);
            // The daemon has not ordered a stop of a held task, so it expects no report.
            if task.is_held {
                continue;
            }
            match progress {
                StopProgress::Stopped => {
                    self.forward_all_output(tid);
                    self.send(&FromTasker::Paused { tid });
                }
                StopProgress::Late(pids) => self.report_not_stopped(tid, pids),
                StopProgress::Unfinished => {}
            }
        }
    }

    /// Reports processes that still run although they were ordered to stop.
    pub(crate) fn report_not_stopped(&mut self, tid: Tid, mut pids: Vec<i32>) {
        pids.truncate(REPORTED_PIDS_MAX);
        self.send(&FromTasker::NotStopped { tid, pids });
    }

    /// Stops paused tasks again whose processes run.
    pub(crate) fn verify_pauses(&mut self, census: &Census) {
        for task in self.tasks.values_mut() {
            if task.stop_again_if_running(census) {
                tracing::warn!(
                    "a process of {} ran although it was stopped, or cannot be read; it is stopped again",
                    task.tid
                );
            }
        }
    }

    /// True if a task is paused, so that [`Supervisor::verify_pauses`] must be called periodically.
    pub(crate) fn has_paused_task(&self) -> bool {
        self.tasks
            .values()
            .any(|task| matches!(task.pause, Pause::Paused))
    }
}
