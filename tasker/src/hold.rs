//! Pauses tasks while the owner of the host needs it.
//!
//! 1. The task runs for a short time so that its library can quiesce. Its threads have the lowest
//!    priority meanwhile, those of the library a high one.
//! 2. Its control group is frozen; without one, all its processes are stopped by signal.
//! 3. The pause outlives migrations: after a failed migration the task stays stopped.
//!
//! A task that had not quiesced when it was stopped runs once more before it migrates. The
//! program's threads are frozen at first: the library gets its time, and the program does not run
//! while the owner is present.
//!
//! The engine cannot dump a frozen control group. For a migration all processes get SIGSTOP while
//! they are frozen, and are then thawed; none of them runs in between.

use crate::ease::{self, Lowered};
use crate::stop;
use crate::supervisor::Supervisor;
use crate::task::{Phase, Task};
use checkpoint::criu::FrozenThreads;
use sempa_proto::tasker::FromTasker;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Time limit for the exit of a paused task after SIGTERM.
const END_ALLOWED: Duration = Duration::from_millis(200);
/// Time after which processes that have not stopped are polled less often: one that waits in the
/// kernel for a disk or a network file system executes nothing of the program.
const STOPS_SOON: Duration = Duration::from_secs(2);
/// Poll interval after [`STOPS_SOON`].
const LOOK_LATER: Duration = Duration::from_millis(100);

/// Progress of pausing a task.
#[derive(Debug, Default)]
pub(crate) enum Hold {
    #[default]
    Free,
    /// The task still runs so that its library can quiesce.
    Easing {
        /// When the task is stopped.
        until: Instant,
        /// The threads' previous priorities.
        lowered: Lowered,
        /// Whether only the library's threads run.
        alone: Alone,
    },
    /// The task was ordered to stop.
    Stopping {
        /// Processes that got SIGSTOP, if no control group freezes them.
        told: BTreeSet<i32>,
        since: Instant,
        /// The threads' previous priorities.
        lowered: Lowered,
    },
    /// The task is stopped, or will stay stopped when its current migration ends.
    Still,
}

/// Whether only the library's threads of a quiescing task run.
#[derive(Debug, Default)]
pub(crate) enum Alone {
    /// Not requested, or not possible.
    #[default]
    Not,
    /// The program's threads are frozen.
    Until {
        /// When the program may run.
        until: Instant,
        /// Dropping it lets the program's threads run.
        _pinned: FrozenThreads,
    },
    /// The time of the library alone is over: it needs something that the program's threads hold.
    Over,
}

impl Alone {
    fn is_over(&self, now: Instant) -> bool {
        matches!(self, Alone::Until { until, .. } if *until <= now)
    }
}

impl Hold {
    /// Returns the time until the next check, if one is needed.
    pub(crate) fn pause(&self, soon: Duration) -> Option<Duration> {
        match self {
            Hold::Free | Hold::Still => None,
            Hold::Easing { until, alone, .. } => {
                let first = if let Alone::Until { until: alone, .. } = alone {
                    until.min(alone)
                } else {
                    until
                };
                Some(first.saturating_duration_since(Instant::now()))
            }
            Hold::Stopping { since, .. } if since.elapsed() < STOPS_SOON => Some(soon),
            Hold::Stopping { .. } => Some(LOOK_LATER),
        }
    }

    /// Restores the threads' priorities. Returns the processes that got SIGSTOP.
    fn restore(self, task: &Task) -> BTreeSet<i32> {
        let (lowered, told) = match self {
            Hold::Free | Hold::Still => return BTreeSet::new(),
            Hold::Easing { lowered, .. } => (lowered, BTreeSet::new()),
            Hold::Stopping { lowered, told, .. } => (lowered, told),
        };
        lowered.restore(&task.members());
        told
    }

    /// True if the task is not paused.
    pub(crate) fn is_free(&self) -> bool {
        matches!(self, Hold::Free)
    }
}

impl Task {
    /// Pauses the task; it may still run for `after`.
    fn hold(&mut self, after: Duration) {
        match (&self.phase, std::mem::take(&mut self.hold)) {
            (Phase::Running, hold) if after.is_zero() => self.stop_held(hold),
            (Phase::Running, hold) => {
                let until = Instant::now() + after;
                let (lowered, stood) = match hold {
                    Hold::Free => (Lowered::now(&self.members()), false),
                    Hold::Easing { lowered, .. } => (lowered, false),
                    Hold::Stopping { lowered, .. } => (lowered, true),
                    Hold::Still => (Lowered::now(&self.members()), true),
                };
                if stood {
                    self.let_run();
                }
                self.hold = Hold::Easing {
                    until,
                    lowered,
                    alone: Alone::Not,
                };
            }
            // The task is stopped for a migration, or soon will be; it stays stopped when the
            // migration ends.
            (_, hold) => {
                hold.restore(self);
                self.hold = Hold::Still;
            }
        }
    }

    /// Lets a paused task run for `after`, at first (`alone`) only its library. A repeated call
    /// while it runs changes nothing.
    fn ease(&mut self, alone: Duration, after: Duration) {
        if !matches!(self.phase, Phase::Running) || matches!(&self.hold, Hold::Free) {
            return self.hold(after);
        }
        let stood = match std::mem::take(&mut self.hold) {
            hold @ Hold::Easing {
                alone: Alone::Until { .. } | Alone::Over,
                ..
            } => return self.hold = hold,
            // Freezing a thread wakes it first, so the threads must not have the lowest priority.
            hold => {
                let stood = !matches!(hold, Hold::Easing { .. });
                hold.restore(self);
                stood
            }
        };
        if !stood {
            self.note_stopped();
        }
        let (now, pinned) = (Instant::now(), self.pin_program());
        let alone = pinned.map_or(Alone::Not, |pinned| Alone::Until {
            until: now + alone,
            _pinned: pinned,
        });
        let lowered = Lowered::now(&self.members());
        if stood {
            self.let_run();
        }
        self.hold = Hold::Easing {
            until: now + after,
            lowered,
            alone,
        };
    }

    /// Gives a paused task a short time in which it can exit.
    pub(crate) fn let_end(&mut self) {
        self.hold(END_ALLOWED);
    }

    /// Gives a paused task time to exit on request.
    pub(crate) fn let_run_for(&mut self, time: Duration) {
        self.hold(time);
    }

    /// Stops the task from any state of its pause.
    fn stop_held(&mut self, hold: Hold) {
        let (lowered, alone) = match hold {
            Hold::Still | Hold::Stopping { .. } => return self.hold = hold,
            Hold::Free => (Lowered::default(), Alone::Not),
            Hold::Easing { lowered, alone, .. } => (lowered, alone),
        };
        if let Some(group) = self.group() {
            // Fails if the group was removed; then it has no members, and signals stop them.
            let _ = group.freeze();
        }
        // Processes stopped by signal before show as stopped in a frozen group, too.
        self.note_stopped();
        let told = match alone {
            Alone::Until { .. } if self.frozen().is_none() => stop::stop_frozen(&self.crowd()),
            _ => BTreeSet::new(),
        };
        drop(alone);
        self.hold = Hold::Stopping {
            told,
            since: Instant::now(),
            lowered,
        };
    }

    /// Freezes the program's threads; `None` if that is impossible. Processes that had been stopped
    /// before are left out: they do not run, and must be found in that state.
    fn pin_program(&self) -> Option<FrozenThreads> {
        let threads = ease::of_programs(&stop::that_ran(self.members(), &self.stopped_before));
        if threads.is_empty() {
            None
        } else {
            FrozenThreads::freeze(threads).ok()
        }
    }

    /// Records which processes are already stopped for other reasons.
    fn note_stopped(&mut self) {
        self.stopped_before = stop::stopped_now(&self.members());
    }

    /// Hands the stopping of the task over to a migration. Returns the processes that got SIGSTOP.
    pub(crate) fn hold_for_move(&mut self) -> BTreeSet<i32> {
        let hold = std::mem::take(&mut self.hold);
        if matches!(hold, Hold::Free | Hold::Easing { .. }) {
            self.note_stopped();
        }
        if !hold.is_free() {
            self.hold = Hold::Still;
        }
        let mut told = match hold {
            Hold::Easing {
                alone: Alone::Until { .. },
                ..
            } => stop::stop_frozen(&self.crowd()),
            _ => BTreeSet::new(),
        };
        told.extend(hold.restore(self));
        if let Some(group) = self.frozen() {
            told.extend(stop::stop_frozen(&self.crowd()));
            group.thaw();
        }
        told
    }

    /// Ends the pause of the task.
    fn free(&mut self) {
        let hold = std::mem::take(&mut self.hold);
        let stands = match &hold {
            Hold::Free | Hold::Easing { .. } => false,
            Hold::Stopping { .. } => true,
            Hold::Still => matches!(self.phase, Phase::Running),
        };
        hold.restore(self);
        if stands {
            self.go_on();
        }
    }

    /// Checks a task that is paused but not stopped yet. Returns true if it has stopped.
    fn look_at_hold(&mut self) -> bool {
        let now = Instant::now();
        if let Hold::Easing { until, alone, .. } = &mut self.hold {
            if *until > now {
                if alone.is_over(now) {
                    *alone = Alone::Over;
                }
                return false;
            }
            let hold = std::mem::take(&mut self.hold);
            self.stop_held(hold);
        }
        let Hold::Stopping {
            mut told,
            since,
            lowered,
        } = std::mem::take(&mut self.hold)
        else {
            unreachable!()
        };
        let still = match self.frozen() {
            Some(group) => group.is_still(),
            None => stop::all_still(&self.crowd(), &mut told),
        };
        if still {
            // Images include the threads' priorities, so they must be restored before a dump.
            lowered.restore(&self.members());
            self.hold = Hold::Still;
        } else {
            self.hold = Hold::Stopping {
                told,
                since,
                lowered,
            };
        }
        still
    }
}

impl Supervisor {
    /// Pauses a task on the daemon's order.
    pub(crate) fn hold(&mut self, tid: Tid, after: Micros) {
        self.hold_by(tid, |task| task.hold(Duration::from_micros(after.0)));
    }

    /// Lets a paused task run so that it can quiesce.
    pub(crate) fn ease(&mut self, tid: Tid, alone: Micros, after: Micros) {
        self.hold_by(tid, |task| {
            task.ease(
                Duration::from_micros(alone.0),
                Duration::from_micros(after.0),
            )
        });
    }

    fn hold_by(&mut self, tid: Tid, hold: impl FnOnce(&mut Task)) {
        let Some(task) = self.tasks.get_mut(&tid) else {
            return;
        };
        hold(task);
        let is_still = matches!(task.hold, Hold::Still);
        // A paused task does not change its memory, so sending it before the dump gains nothing.
        self.moves.pre_copies.hurry_up(tid);
        if is_still {
            self.say(&FromTasker::Held { tid });
        }
        self.look_at_holds();
    }

    /// Ends the pause of a task on the daemon's order.
    pub(crate) fn free(&mut self, tid: Tid) {
        if let Some(task) = self.tasks.get_mut(&tid) {
            task.free();
        }
    }

    /// Checks the tasks that are paused but not stopped yet.
    pub(crate) fn look_at_holds(&mut self) {
        let due = |task: &Task| match &task.hold {
            Hold::Easing { .. } => task
                .hold
                .pause(Duration::ZERO)
                .is_some_and(|pause| pause.is_zero()),
            Hold::Stopping { .. } => true,
            Hold::Free | Hold::Still => false,
        };
        let due: Vec<Tid> = self
            .tasks
            .values()
            .filter(|task| due(task))
            .map(|task| task.tid)
            .collect();
        for tid in due {
            if self.tasks.get_mut(&tid).is_some_and(Task::look_at_hold) {
                self.drain_output(tid);
                self.say(&FromTasker::Held { tid });
            }
        }
    }
}
