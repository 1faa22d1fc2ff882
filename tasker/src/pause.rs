//! Pauses tasks while the owner of the host is present.
//!
//! 1. The task runs for a short time so that its library can quiesce. During that time the
//!    program's threads have the lowest priority, and those of the library a high one.
//! 2. The task's control group is frozen; without one, all its processes are stopped by SIGSTOP.
//! 3. The pause outlasts migrations: after a failed migration the task remains stopped.
//!
//! A task that had not quiesced when it was stopped runs once more before it migrates. At first the
//! program's threads are frozen: the library can quiesce, and the program does not run while the
//! owner is present.
//!
//! The engine cannot dump a frozen control group. For a migration all processes receive SIGSTOP
//! while they are frozen, and are then thawed; none of them runs in between.

use crate::nice::{self, DeprioritizedThreads};
use crate::stop;
use crate::supervisor::Supervisor;
use crate::task::{Task, TaskPhase};
use checkpoint::criu::FrozenThreads;
use sempa_proto::tasker::FromTasker;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Time limit for a paused task to exit after SIGTERM.
const EXIT_TIMEOUT: Duration = Duration::from_millis(200);
/// Time after which processes that have not stopped are polled less often. A process that waits in
/// the kernel for a disk or a network file system executes no instructions of the program.
const FAST_POLL_WINDOW: Duration = Duration::from_secs(2);
/// Poll interval after [`FAST_POLL_WINDOW`].
const SLOW_POLL_INTERVAL: Duration = Duration::from_millis(100);

/// Progress of pausing a task.
#[derive(Debug, Default)]
pub(crate) enum Pause {
    #[default]
    NotPaused,
    /// The task still runs so that its library can quiesce.
    Quiescing {
        /// Time at which the task is stopped even if it has not quiesced.
        stop_at: Instant,
        /// The previous priorities of the task's threads.
        deprioritized: DeprioritizedThreads,
        /// Whether only the library's threads may run.
        program_freeze: ProgramThreadFreeze,
    },
    /// The task was ordered to stop, and some processes may still run.
    Stopping {
        /// Processes that received SIGSTOP; empty if a control group is frozen instead.
        signalled_pids: BTreeSet<i32>,
        /// Time at which the task was ordered to stop.
        since: Instant,
        /// The previous priorities of the task's threads.
        deprioritized: DeprioritizedThreads,
    },
    /// The task is stopped, or will remain stopped when its current migration ends.
    Paused,
}

/// Whether the program's threads of a quiescing task are frozen, so that only the library's threads
/// run.
#[derive(Debug, Default)]
pub(crate) enum ProgramThreadFreeze {
    /// The program's threads are not frozen: that was not requested or is not possible.
    #[default]
    Inactive,
    /// The program's threads are frozen.
    Active {
        /// Time at which the program's threads are released.
        until: Instant,
        /// Dropping this value releases the program's threads.
        _frozen_threads: FrozenThreads,
    },
    /// The program's threads were released because the library could not quiesce while they were
    /// frozen; they may hold a lock that it needs.
    Expired,
}

impl ProgramThreadFreeze {
    fn has_expired(&self, now: Instant) -> bool {
        matches!(self, ProgramThreadFreeze::Active { until, .. } if *until <= now)
    }
}

impl Pause {
    /// Returns the time until the next check; `None` if no check is needed. `soon` is the poll
    /// interval for a task that is being stopped.
    pub(crate) fn next_check_delay(&self, soon: Duration) -> Option<Duration> {
        match self {
            Pause::NotPaused | Pause::Paused => None,
            Pause::Quiescing {
                stop_at: until,
                program_freeze: library_only,
                ..
            } => {
                let first = if let ProgramThreadFreeze::Active {
                    until: alone_until, ..
                } = library_only
                {
                    until.min(alone_until)
                } else {
                    until
                };
                Some(first.saturating_duration_since(Instant::now()))
            }
            Pause::Stopping { since, .. } if since.elapsed() < FAST_POLL_WINDOW => Some(soon),
            Pause::Stopping { .. } => Some(SLOW_POLL_INTERVAL),
        }
    }

    /// Restores the priorities of the task's threads. Returns the processes that have received
    /// SIGSTOP.
    fn restore_priorities(self, task: &Task) -> BTreeSet<i32> {
        let (deprioritized, signalled) = match self {
            Pause::NotPaused | Pause::Paused => return BTreeSet::new(),
            Pause::Quiescing { deprioritized, .. } => (deprioritized, BTreeSet::new()),
            Pause::Stopping {
                deprioritized,
                signalled_pids: signalled,
                ..
            } => (deprioritized, signalled),
        };
        deprioritized.restore(&task.member_pids());
        signalled
    }

    pub(crate) fn is_inactive(&self) -> bool {
        matches!(self, Pause::NotPaused)
    }
}

impl Task {
    /// Pauses the task. It may run for the time `after` so that its library can quiesce.
    fn pause(&mut self, after: Duration) {
        match (&self.phase, std::mem::take(&mut self.pause)) {
            (TaskPhase::Running, pause) if after.is_zero() => self.stop_paused(pause),
            (TaskPhase::Running, pause) => {
                let until = Instant::now() + after;
                let (deprioritized, was_stopped) = match pause {
                    Pause::NotPaused => (DeprioritizedThreads::lower(&self.member_pids()), false),
                    Pause::Quiescing { deprioritized, .. } => (deprioritized, false),
                    Pause::Stopping { deprioritized, .. } => (deprioritized, true),
                    Pause::Paused => (DeprioritizedThreads::lower(&self.member_pids()), true),
                };
                if was_stopped {
                    self.continue_processes();
                }
                self.pause = Pause::Quiescing {
                    stop_at: until,
                    deprioritized,
                    program_freeze: ProgramThreadFreeze::Inactive,
                };
            }
            // The task is stopped for a migration, or soon will be. It remains stopped when the
            // migration ends.
            (_, pause) => {
                pause.restore_priorities(self);
                self.pause = Pause::Paused;
            }
        }
    }

    /// Lets a paused task run for the time `after` so that it can quiesce. For the time
    /// `library_only` only its library's threads run. A repeated call while the task runs has no
    /// effect.
    fn resume_to_quiesce(&mut self, library_only: Duration, after: Duration) {
        if !matches!(self.phase, TaskPhase::Running) || matches!(&self.pause, Pause::NotPaused) {
            return self.pause(after);
        }
        let was_stopped = match std::mem::take(&mut self.pause) {
            pause @ Pause::Quiescing {
                program_freeze: ProgramThreadFreeze::Active { .. } | ProgramThreadFreeze::Expired,
                ..
            } => return self.pause = pause,
            // Freezing a thread wakes it first, so the threads must not have the lowest priority.
            pause => {
                let was_stopped = !matches!(pause, Pause::Quiescing { .. });
                pause.restore_priorities(self);
                was_stopped
            }
        };
        if !was_stopped {
            self.record_stopped();
        }
        let (now, frozen_threads) = (Instant::now(), self.freeze_program_threads());
        let library_only = frozen_threads.map_or(ProgramThreadFreeze::Inactive, |frozen_threads| {
            ProgramThreadFreeze::Active {
                until: now + library_only,
                _frozen_threads: frozen_threads,
            }
        });
        let deprioritized = DeprioritizedThreads::lower(&self.member_pids());
        if was_stopped {
            self.continue_processes();
        }
        self.pause = Pause::Quiescing {
            stop_at: now + after,
            deprioritized,
            program_freeze: library_only,
        };
    }

    /// Lets a paused task run for [`EXIT_TIMEOUT`], in which it can exit.
    pub(crate) fn allow_exit(&mut self) {
        self.pause(EXIT_TIMEOUT);
    }

    /// Lets a paused task run for the time `time`, in which it can exit on request.
    pub(crate) fn allow_exit_within(&mut self, time: Duration) {
        self.pause(time);
    }

    /// Stops the task, whatever the state `pause` of its pause is.
    fn stop_paused(&mut self, pause: Pause) {
        let (deprioritized, library_only) = match pause {
            Pause::Paused | Pause::Stopping { .. } => return self.pause = pause,
            Pause::NotPaused => (
                DeprioritizedThreads::default(),
                ProgramThreadFreeze::Inactive,
            ),
            Pause::Quiescing {
                deprioritized,
                program_freeze: library_only,
                ..
            } => (deprioritized, library_only),
        };
        if let Some(group) = self.control_group() {
            // Fails if the group was removed. Then it has no members, and the processes are stopped
            // by signals.
            let _ = group.freeze();
        }
        // Processes that were already stopped by a signal are recorded before the freeze, because
        // all processes of a frozen group appear as stopped.
        self.record_stopped();
        let signalled = match library_only {
            ProgramThreadFreeze::Active { .. } if self.frozen_group().is_none() => {
                stop::signal_frozen(&self.processes())
            }
            _ => BTreeSet::new(),
        };
        drop(library_only);
        self.pause = Pause::Stopping {
            signalled_pids: signalled,
            since: Instant::now(),
            deprioritized,
        };
    }

    /// Freezes the program's threads; `None` if that is not possible. Processes that were already
    /// stopped are not frozen, because they do not run and must remain in that state.
    fn freeze_program_threads(&self) -> Option<FrozenThreads> {
        let threads = nice::program_threads(&stop::without_stopped_before(
            self.member_pids(),
            &self.already_stopped_pids,
        ));
        if threads.is_empty() {
            None
        } else {
            FrozenThreads::freeze(threads).ok()
        }
    }

    /// Records which processes are already stopped for reasons other than the pause.
    fn record_stopped(&mut self) {
        self.already_stopped_pids = stop::stopped_by_signal(&self.member_pids());
    }

    /// Ends the pause's control of the task, so that a migration can stop it. Returns the processes
    /// that have received SIGSTOP.
    pub(crate) fn hand_over_to_migration(&mut self) -> BTreeSet<i32> {
        let pause = std::mem::take(&mut self.pause);
        if matches!(pause, Pause::NotPaused | Pause::Quiescing { .. }) {
            self.record_stopped();
        }
        if !pause.is_inactive() {
            self.pause = Pause::Paused;
        }
        let mut signalled = match pause {
            Pause::Quiescing {
                program_freeze: ProgramThreadFreeze::Active { .. },
                ..
            } => stop::signal_frozen(&self.processes()),
            _ => BTreeSet::new(),
        };
        signalled.extend(pause.restore_priorities(self));
        if let Some(group) = self.frozen_group() {
            signalled.extend(stop::signal_frozen(&self.processes()));
            group.thaw();
        }
        signalled
    }

    /// Ends the pause of the task and lets it run, unless a migration has stopped it.
    fn end_pause(&mut self) {
        let pause = std::mem::take(&mut self.pause);
        let is_stopped = match &pause {
            Pause::NotPaused | Pause::Quiescing { .. } => false,
            Pause::Stopping { .. } => true,
            Pause::Paused => matches!(self.phase, TaskPhase::Running),
        };
        pause.restore_priorities(self);
        if is_stopped {
            self.continue_running();
        }
    }

    /// Checks a task that is being paused but was not stopped yet. Returns true if it has stopped.
    fn check_pause(&mut self) -> bool {
        let now = Instant::now();
        if let Pause::Quiescing {
            stop_at: until,
            program_freeze: library_only,
            ..
        } = &mut self.pause
        {
            if *until > now {
                if library_only.has_expired(now) {
                    *library_only = ProgramThreadFreeze::Expired;
                }
                return false;
            }
            let pause = std::mem::take(&mut self.pause);
            self.stop_paused(pause);
        }
        let Pause::Stopping {
            signalled_pids: mut signalled,
            since,
            deprioritized,
        } = std::mem::take(&mut self.pause)
        else {
            unreachable!()
        };
        let has_stopped = match self.frozen_group() {
            Some(group) => group.is_fully_frozen(),
            None => stop::stop_all(&self.processes(), &mut signalled),
        };
        if has_stopped {
            // Images include the threads' priorities, so the priorities must be restored before a
            // dump.
            deprioritized.restore(&self.member_pids());
            self.pause = Pause::Paused;
        } else {
            self.pause = Pause::Stopping {
                signalled_pids: signalled,
                since,
                deprioritized,
            };
        }
        has_stopped
    }
}

impl Supervisor {
    /// Pauses a task on the daemon's order. The task may run for the time `after` before it is
    /// stopped.
    pub(crate) fn pause_task(&mut self, tid: Tid, after: Micros) {
        self.change_pause(tid, |task| task.pause(Duration::from_micros(after.0)));
    }

    /// Lets a paused task run so that it can quiesce, on the daemon's order.
    pub(crate) fn resume_task_to_quiesce(&mut self, tid: Tid, library_only: Micros, after: Micros) {
        self.change_pause(tid, |task| {
            task.resume_to_quiesce(
                Duration::from_micros(library_only.0),
                Duration::from_micros(after.0),
            )
        });
    }

    fn change_pause(&mut self, tid: Tid, change: impl FnOnce(&mut Task)) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        change(task);
        let was_paused = matches!(task.pause, Pause::Paused);
        // A paused task does not change its memory, so pre-copying it has no advantage.
        self.migrations.pre_copies.stop_early(tid);
        if was_paused {
            self.send(&FromTasker::Paused { tid });
        }
        self.check_pauses();
    }

    /// Ends the pause of a task on the daemon's order.
    pub(crate) fn end_pause(&mut self, tid: Tid) {
        if let Some(task) = self.tasks.get_mut(&tid) {
            task.end_pause();
        }
    }

    /// Checks the tasks that are being paused but were not stopped yet.
    pub(crate) fn check_pauses(&mut self) {
        let due = |task: &Task| match &task.pause {
            Pause::Quiescing { .. } => task
                .pause
                .next_check_delay(Duration::ZERO)
                .is_some_and(|pause| pause.is_zero()),
            Pause::Stopping { .. } => true,
            Pause::NotPaused | Pause::Paused => false,
        };
        let due: Vec<Tid> = self
            .tasks
            .values()
            .filter(|task| due(task))
            .map(|task| task.tid)
            .collect();
        for tid in due {
            if self.tasks.get_mut(&tid).is_some_and(Task::check_pause) {
                self.drain_output(tid);
                self.send(&FromTasker::Paused { tid });
            }
        }
    }
}
