//! The daemon's lease on the tasks: the daemon says until when the tasks may run, and renews the
//! time. See [`sempa_proto::lease`].
//!
//! An open connection does not show that the daemon runs: a daemon that hangs, in a disk or under a
//! debugger, keeps the connection open. The other hosts then consider this host lost and may start
//! copies of its tasks. So the tasker ends the tasks by itself when the lease runs out:
//!
//! 1. Without a renewal until `freeze_at`, all tasks are stopped. A renewal lets those run again
//!    that neither the owner nor a user has stopped.
//! 2. Without a renewal until `kill_at`, the tasker ends all tasks and itself. This time never
//!    comes in a virtual machine with a single host.
//! 3. If the main thread is blocked at that time, for example by a program on a file system that
//!    hangs, a second thread kills the tasker a little later. The kernel then kills the tasks in
//!    PID namespaces. Of other tasks it kills only the first processes, so the thread first kills
//!    everything that descends from the tasker. The main thread may be blocked with a lock of the
//!    allocator or of the log, for example by a debugger. Therefore a timer of the kernel kills the
//!    tasker if the second thread waits for such a lock.

use crate::census::Census;
use crate::pause::Pause;
use crate::supervisor::Supervisor;
use crate::task::{Task, TaskPhase};
use checkpoint::boot_clock;
use checkpoint::descendants::kill_descendants;
use nix::sys::signal::{SigEvent, SigevNotify, Signal, kill};
use nix::sys::time::TimeSpec;
use nix::sys::timer::Timer;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::unistd::Pid;
use sempa_proto::Micros;
use sempa_proto::lease::NEVER;
use sempa_proto::tasker::FromTasker;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Divisor of the time from `freeze_at` to `kill_at`. The quotient is the time that the main thread
/// has after `kill_at` to kill the tasks: half of that time, so that the tasks have ended after
/// nine tenths of the lease.
const LAST_RESORT_DIVISOR: u64 = 2;

/// Maximum time in which the second thread kills the descendants of the tasker.
const LAST_RESORT_TIMEOUT: Duration = Duration::from_millis(200);

/// Until when the tasks may run, on CLOCK_BOOTTIME.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Deadlines {
    freeze_at: Micros,
    kill_at: Micros,
}

/// What the lease permits at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Permission {
    Run,
    /// The tasks must be stopped.
    Freeze,
    /// The tasks must end.
    End,
}

impl Deadlines {
    fn permission(self, now: Micros) -> Permission {
        if now < self.freeze_at {
            Permission::Run
        } else if now < self.kill_at {
            Permission::Freeze
        } else {
            Permission::End
        }
    }

    /// Returns the deadline at which the tasker must act next; `None` if there is none.
    /// `has_processes` is true if a process of a task may exist.
    fn next(self, now: Micros, has_processes: bool) -> Option<Micros> {
        match self.permission(now) {
            Permission::Run => Some(self.freeze_at),
            // A new tasker may get a lease that has run out. It has no tasks to end.
            Permission::End if !has_processes => None,
            Permission::Freeze | Permission::End => Some(self.kill_at),
        }
    }

    /// Returns the time that the main thread has after `kill_at`.
    fn last_resort_delay(self) -> Micros {
        if self.kill_at == NEVER {
            return Micros(0);
        }
        Micros(self.kill_at.since(self.freeze_at).0 / LAST_RESORT_DIVISOR)
    }
}

/// The part of the lease that the second thread reads.
#[derive(Debug)]
struct LastResort {
    /// Fires at `kill_at`, and wakes the second thread.
    timer: TimerFd,
    /// The deadline `kill_at` in microseconds; [`NEVER`] if no kill is planned.
    kill_at_us: AtomicU64,
    delay_us: AtomicU64,
}

impl LastResort {
    fn new() -> io::Result<Self> {
        Ok(Self {
            timer: new_timer(TimerFlags::TFD_CLOEXEC)?,
            kill_at_us: AtomicU64::new(NEVER.0),
            delay_us: AtomicU64::new(0),
        })
    }

    /// Kills the tasker when the main thread has not acted in time.
    fn run(&self) {
        let mut kill_timer = new_kill_timer()
            .inspect_err(|error| tracing::warn!("the tasker has no timer to end itself: {error}"))
            .ok();
        loop {
            // An interrupted wait is repeated.
            if self.timer.wait().is_err() {
                continue;
            }
            // If the whole tasker hung, the daemon may have renewed the lease meanwhile: the main
            // thread must get the time to read this.
            let delay = Micros(self.delay_us.load(Ordering::Relaxed));
            std::thread::sleep(Duration::from_micros(delay.0));
            let kill_at = Micros(self.kill_at_us.load(Ordering::Relaxed));
            if kill_at + delay <= boot_clock::now() {
                kill_self_after(kill_timer.as_mut(), || {
                    tracing::error!(
                        "the lease of the daemon has run out and the tasker is blocked: it kills itself and all tasks"
                    );
                    kill_descendants(std::process::id().cast_signed());
                });
            }
        }
    }

    fn disarm(&self) {
        self.kill_at_us.store(NEVER.0, Ordering::Relaxed);
        // Never fails: the descriptor is a timer.
        let _ = self.timer.unset();
    }
}

/// The lease, and the timers that enforce it.
#[derive(Debug)]
pub(crate) struct Lease {
    /// `None` until the daemon has sent a lease.
    deadlines: Option<Deadlines>,
    /// Time since which the tasks are frozen; `None` while they may run.
    frozen_since: Option<Micros>,
    /// Wakes the main thread at the next deadline. Timers of CLOCK_BOOTTIME that have expired while
    /// the machine slept fire when it wakes; the timeout of poll(2) would continue to count.
    timer: TimerFd,
    last_resort: Arc<LastResort>,
}

impl Lease {
    /// Creates an unlimited lease, and starts the second thread.
    ///
    /// # Errors
    /// No thread or descriptor can be created.
    pub(crate) fn new() -> io::Result<Self> {
        let last_resort = Arc::new(LastResort::new()?);
        let thread_last_resort = Arc::clone(&last_resort);
        std::thread::Builder::new()
            .name("lease".into())
            .spawn(move || thread_last_resort.run())?;
        Ok(Self {
            deadlines: None,
            frozen_since: None,
            timer: new_timer(TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK)?,
            last_resort,
        })
    }

    /// Returns the descriptor that becomes readable when [`Supervisor::enforce_lease`] must be
    /// called, until [`Lease::clear_timer`].
    pub(crate) fn timer_fd(&self) -> BorrowedFd<'_> {
        self.timer.as_fd()
    }

    pub(crate) fn clear_timer(&self) {
        // Fails only if the timer was set again and has not expired since.
        let _ = self.timer.wait();
    }

    /// Returns the time until the tasks must be frozen, zero if it has passed; `None` without a
    /// lease.
    pub(crate) fn time_until_freeze(&self) -> Option<Duration> {
        let freeze_at = self.deadlines?.freeze_at;
        Some(Duration::from_micros(freeze_at.since(boot_clock::now()).0))
    }

    /// True while the lease does not permit any task to run.
    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen_since.is_some()
    }

    /// Sets the timers; a deadline that has passed fires at once. `has_processes` is true if a
    /// process of a task may exist. If a timer cannot be set, the main thread's other deadlines
    /// still check the lease, so the error is only logged.
    fn set_timers(&self, now: Micros, has_processes: bool) {
        let Some(deadlines) = self.deadlines else {
            return;
        };
        let Some(next_deadline) = deadlines.next(now, has_processes) else {
            return self.last_resort.disarm();
        };
        let last_resort = &self.last_resort;
        let kill_at = deadlines.kill_at;
        last_resort
            .delay_us
            .store(deadlines.last_resort_delay().0, Ordering::Relaxed);
        last_resort.kill_at_us.store(kill_at.0, Ordering::Relaxed);
        for (timer, expiry) in [(&self.timer, next_deadline), (&last_resort.timer, kill_at)] {
            let result = if expiry == NEVER {
                timer.unset()
            } else {
                let expiry = TimeSpec::from_duration(Duration::from_micros(expiry.0.max(1)));
                let flags = TimerSetTimeFlags::TFD_TIMER_ABSTIME;
                timer.set(Expiration::OneShot(expiry), flags)
            };
            if let Err(error) = result {
                tracing::error!("the timer of the daemon's lease cannot be set: {error}");
            }
        }
    }
}

fn new_timer(flags: TimerFlags) -> nix::Result<TimerFd> {
    TimerFd::new(ClockId::CLOCK_BOOTTIME, flags)
}

/// Creates a timer that kills this process. No thread of the process can prevent this.
fn new_kill_timer() -> nix::Result<Timer> {
    let signal = Signal::SIGKILL;
    let notification = SigevNotify::SigevSignal {
        signal,
        si_value: 0,
    };
    Timer::new(
        nix::time::ClockId::CLOCK_MONOTONIC,
        SigEvent::new(notification),
    )
}

/// Kills this process when `kill_tasks` has ended, at the latest after [`LAST_RESORT_TIMEOUT`].
fn kill_self_after(kill_timer: Option<&mut Timer>, kill_tasks: impl FnOnce()) {
    if let Some(timer) = kill_timer {
        let expiry = Expiration::OneShot(TimeSpec::from_duration(LAST_RESORT_TIMEOUT));
        // Never fails: the timer exists, and the time is valid.
        let _ = timer.set(expiry, TimerSetTimeFlags::empty());
    }
    kill_tasks();
    // Never fails: a process may always kill itself.
    let _ = kill(Pid::this(), Signal::SIGKILL);
}

impl Task {
    /// Stops a task that is in no migration step because the lease does not permit it to run. A
    /// task in a migration step is stopped, or will be examined again when the step ends.
    fn hold(&mut self, census: &Census) {
        if !matches!(self.phase, TaskPhase::Running) {
            return;
        }
        match self.pause {
            Pause::NotPaused => {
                self.is_held = true;
                self.stop_now(census);
            }
            // The task was about to be stopped.
            Pause::Quiescing { .. } => self.stop_now(census),
            Pause::Stopping { .. } | Pause::Paused => {}
        }
    }
}

impl Supervisor {
    /// Renews the lease on the daemon's order. Lets the tasks run that are stopped only because the
    /// lease had not been renewed.
    pub(crate) fn renew_lease(&mut self, freeze_at: Micros, kill_at: Micros) {
        let now = boot_clock::now();
        let deadlines = Deadlines { freeze_at, kill_at };
        self.lease.deadlines = Some(deadlines);
        self.lease.set_timers(now, self.has_processes());
        let mut frozen_time = Micros::default();
        if deadlines.permission(now) != Permission::Run {
            // The tasks are stopped after this order, and further orders start none.
            self.lease.frozen_since.get_or_insert(now);
        } else if let Some(frozen_since) = self.lease.frozen_since.take() {
            frozen_time = now.since(frozen_since).max(Micros(1));
            let census = Census::default();
            for task in self.tasks.values_mut().filter(|task| task.is_held) {
                task.is_held = false;
                task.end_pause(&census);
            }
            self.leftovers.resume_held();
        }
        self.send(&FromTasker::LeaseRenewed { frozen_time });
    }

    /// Stops all running tasks if the lease did not permit them to run at the time `now`. Returns
    /// the reason to end the tasker if the lease had run out then. All orders that had arrived at
    /// that time must have been received.
    ///
    /// Must be called after each event: an event may have let a task run.
    pub(crate) fn enforce_lease(&mut self, now: Micros) -> Option<String> {
        let deadlines = self.lease.deadlines?;
        match deadlines.permission(now) {
            Permission::Run => None,
            // Without tasks the tasker waits for the next lease, and starts no task before.
            Permission::End if !self.has_processes() => {
                self.lease.frozen_since.get_or_insert(now);
                self.lease.last_resort.disarm();
                None
            }
            Permission::Freeze => {
                if self.lease.frozen_since.is_none() {
                    tracing::warn!(
                        "the daemon has not renewed its lease: {} tasks are frozen",
                        self.tasks.len()
                    );
                    self.lease.frozen_since = Some(now);
                    self.lease.set_timers(now, self.has_processes());
                }
                let census = Census::default();
                self.tasks.values_mut().for_each(|task| task.hold(&census));
                self.leftovers.hold_all();
                self.check_pauses();
                self.check_leftovers();
                None
            }
            Permission::End => Some(format!(
                "its daemon hung or had lost the master, and has not renewed its lease for {} ms after the \
                 tasks had to be frozen",
                now.since(deadlines.freeze_at).0 / 1000
            )),
        }
    }

    /// True if a process of a task may exist.
    fn has_processes(&self) -> bool {
        !self.tasks.is_empty()
            || !self.leftovers.is_empty()
            || !self.migrations.incoming_tasks.is_empty()
    }

    /// Kills all tasks at once because the lease has run out, and reports the reason.
    pub(crate) fn end_expired_lease(&mut self, reason: String) {
        let census = Census::default();
        for task in self.tasks.values() {
            task.kill_immediately(&census);
        }
        self.leftovers.kill_all();
        // The tasks are dead. The tasker may need more time to remove what they leave behind.
        self.lease.last_resort.disarm();
        self.send(&FromTasker::LeaseExpired { reason });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    /// Not a test: this is the code of the process that the next test starts.
    #[test]
    #[ignore = "child process of another test"]
    fn subprocess_blocks_while_it_kills_tasks() {
        let mut timer = new_kill_timer().expect("a timer");
        kill_self_after(Some(&mut timer), || {
            loop {
                std::thread::park();
            }
        });
    }

    /// A tasker whose second thread waits for a lock that the main thread holds is killed.
    #[test]
    fn blocked_last_resort_ends_the_tasker() {
        let status = std::process::Command::new(std::env::current_exe().expect("a path"))
            .args([
                "--exact",
                "lease::tests::subprocess_blocks_while_it_kills_tasks",
                "--ignored",
            ])
            .stdout(std::process::Stdio::null())
            .status()
            .expect("a process");
        assert_eq!(status.signal(), Some(Signal::SIGKILL as i32));
    }

    /// The tasks are frozen, then killed, and the last resort follows before the end of the lease.
    #[test]
    fn permission_ends_in_two_steps() {
        let second = Micros::from_secs;
        let deadlines = Deadlines {
            freeze_at: second(6),
            kill_at: second(8),
        };
        assert_eq!(deadlines.permission(Micros(5_999_999)), Permission::Run);
        assert_eq!(deadlines.permission(second(6)), Permission::Freeze);
        assert_eq!(deadlines.permission(Micros(7_999_999)), Permission::Freeze);
        assert_eq!(deadlines.permission(second(8)), Permission::End);
        assert_eq!(deadlines.last_resort_delay(), second(1));
    }

    /// A lease that has already run out when it arrives ends the tasks at once, if there are any.
    #[test]
    fn late_lease_ends_tasks() {
        let second = Micros::from_secs;
        let deadlines = Deadlines {
            freeze_at: second(6),
            kill_at: second(8),
        };
        assert_eq!(deadlines.next(second(5), false), Some(second(6)));
        assert_eq!(deadlines.next(second(7), false), Some(second(8)));
        assert_eq!(deadlines.next(second(9), true), Some(second(8)));
        assert_eq!(deadlines.next(second(9), false), None);
    }

    /// Tasks without a time to end stay frozen.
    #[test]
    fn tasks_without_kill_time_are_only_frozen() {
        let deadlines = Deadlines {
            freeze_at: Micros::from_secs(6),
            kill_at: NEVER,
        };
        let permission = deadlines.permission(Micros::from_secs(1_000_000_000));
        assert_eq!(permission, Permission::Freeze);
        assert_eq!(deadlines.last_resort_delay(), Micros(0));
    }
}
