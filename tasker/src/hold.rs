//! Tasks that stand still because the owner of the host is there.
//!
//! A held task runs for a moment yet, behind everybody else and its library's own threads before its others, so that the
//! library can let go of what leads out of the process; then its control group is frozen, or, where it has none, all its
//! processes are stopped by signal. That outlives moves: a move that fails leaves the task stopped.
//!
//! A task that had not let go by then runs once more before it moves. Then its program's threads are pinned at first: the library
//! has its moment, and the program does not run beside an owner.
//!
//! The engine cannot dump what is frozen. So for a move everybody gets SIGSTOP while frozen, and is thawed then: nobody comes
//! to run in between.

use crate::ease::{self, Lowered};
use crate::stop;
use crate::supervisor::Supervisor;
use crate::task::{Phase, Task};
use checkpoint::criu::Pinned;
use sempa_proto::tasker::FromTasker;
use sempa_proto::{Micros, Tid};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// A held task that is asked to end (SIGTERM) gets so long for it.
const END_ALLOWED: Duration = Duration::from_millis(200);
/// Processes that do not stop within this are looked at less often: one that waits in the kernel for a disk or a network
/// file system runs no program either.
const STOPS_SOON: Duration = Duration::from_secs(2);
/// So often.
const LOOK_LATER: Duration = Duration::from_millis(100);

/// Whether a task is held.
#[derive(Debug, Default)]
pub(crate) enum Hold {
    /// It is not.
    #[default]
    Free,
    /// It runs yet, until then.
    Easing {
        /// When it is to be stopped.
        until: Instant,
        /// How urgent its threads were.
        lowered: Lowered,
        /// Whether its library is alone.
        alone: Alone,
    },
    /// It was told to stop.
    Stopping {
        /// Processes that have been sent SIGSTOP, if its control group does not freeze them.
        told: BTreeSet<i32>,
        /// When.
        since: Instant,
        /// How urgent its threads were.
        lowered: Lowered,
    },
    /// Nothing of it runs, or nothing will when the move that has it lets go of it.
    Still,
}

/// Whether of a task that runs to let go only the library does.
#[derive(Debug, Default)]
pub(crate) enum Alone {
    /// Nobody has said so, or it cannot be done.
    #[default]
    Not,
    /// The program's threads do not run.
    Until {
        /// Then they may.
        until: Instant,
        /// They run when it is dropped.
        _pinned: Pinned,
    },
    /// It was, and that was not enough: it needs something that its program has.
    Over,
}

impl Alone {
    fn is_over(&self, now: Instant) -> bool {
        matches!(self, Alone::Until { until, .. } if *until <= now)
    }
}

impl Hold {
    /// How long until it has to be looked at, if at all.
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

    /// Makes the threads as urgent as they were. Answers who has been told to stop.
    fn restore(self, task: &Task) -> BTreeSet<i32> {
        let (lowered, told) = match self {
            Hold::Free | Hold::Still => return BTreeSet::new(),
            Hold::Easing { lowered, .. } => (lowered, BTreeSet::new()),
            Hold::Stopping { lowered, told, .. } => (lowered, told),
        };
        lowered.restore(&task.members());
        told
    }

    /// True unless it is held.
    pub(crate) fn is_free(&self) -> bool {
        matches!(self, Hold::Free)
    }
}

impl Task {
    /// Holds the task; it may run for so long yet.
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
            // It stands still, or will in a moment, and stays so when the move lets go of it.
            (_, hold) => {
                hold.restore(self);
                self.hold = Hold::Still;
            }
        }
    }

    /// Lets a held task run for so long, and nothing but its library at first. Said again meanwhile it changes nothing.
    fn ease(&mut self, alone: Duration, after: Duration) {
        if !matches!(self.phase, Phase::Running) || matches!(&self.hold, Hold::Free) {
            return self.hold(after);
        }
        let stood = match std::mem::take(&mut self.hold) {
            hold @ Hold::Easing {
                alone: Alone::Until { .. } | Alone::Over,
                ..
            } => return self.hold = hold,
            // Whom the kernel has to wake for that must not be behind everybody else.
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

    /// Gives a held task a moment in which it can end by itself.
    pub(crate) fn let_end(&mut self) {
        self.hold(END_ALLOWED);
    }

    /// Gives a held task so long to end as it was asked to.
    pub(crate) fn let_run_for(&mut self, time: Duration) {
        self.hold(time);
    }

    /// Stops it, from whatever it is.
    fn stop_held(&mut self, hold: Hold) {
        let (lowered, alone) = match hold {
            Hold::Still | Hold::Stopping { .. } => return self.hold = hold,
            Hold::Free => (Lowered::default(), Alone::Not),
            Hold::Easing { lowered, alone, .. } => (lowered, alone),
        };
        if let Some(group) = self.group() {
            // A group that somebody has removed holds nobody; then signals do it.
            let _ = group.freeze();
        }
        // Who had been stopped by signal shows as such in a frozen group, too.
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

    /// Keeps the program from running. Who had been stopped before does not run anyway, and is to be found like that. `None` where that
    /// cannot be done.
    fn pin_program(&self) -> Option<Pinned> {
        let threads = ease::of_programs(&stop::that_ran(self.members(), &self.stopped_before));
        if threads.is_empty() {
            None
        } else {
            Pinned::threads(threads).ok()
        }
    }

    /// Notes which processes stand still already, for their own reasons.
    fn note_stopped(&mut self) {
        self.stopped_before = stop::stopped_now(&self.members());
    }

    /// A move wants it stopped: the hold is the move's business from now on. Answers who has been told to stop.
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

    /// Not held any more.
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

    /// One look at a task that is held and does not stand still yet; true when it does now.
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
            // A dump takes the urgency of threads along.
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
    /// The owner's side wants this task held.
    pub(crate) fn hold(&mut self, tid: Tid, after: Micros) {
        self.hold_by(tid, |task| task.hold(Duration::from_micros(after.0)));
    }

    /// A held task has to let go yet.
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
        // It changes nothing of its memory any more: what has not gone ahead is not sooner there for that.
        self.moves.pre_copies.hurry_up(tid);
        if is_still {
            self.say(&FromTasker::Held { tid });
        }
        self.look_at_holds();
    }

    /// The owner does not mind any more.
    pub(crate) fn free(&mut self, tid: Tid) {
        if let Some(task) = self.tasks.get_mut(&tid) {
            task.free();
        }
    }

    /// Looks at tasks that are held and do not stand still yet.
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
