//! Decides whether and how long a thread that waits for a message spins before it sleeps.
//!
//! Spinning saves a wake-up by the kernel if the message arrives soon; otherwise it takes the
//! processor from the thread that must produce the message. Recent waits predict the next one: a
//! miss halves the spin budget. In waits for which only the full budget can succeed, several
//! consecutive misses end the spinning instead. Once the budget is zero, spinning is retried only
//! occasionally.
//!
//! A spinning thread yields to other runnable threads on its processor, because one of them may be
//! the thread that must produce the message. If a yield costs a whole time slice, because a
//! compute-bound thread runs on that processor, the next waits spin without yielding.

use std::time::{Duration, Instant};

/// Spin budgets below this duration count as zero.
const SPIN_MIN: Duration = Duration::from_micros(2);
/// Number of waits without spinning before the first retry; each failed retry doubles the number.
const RETRY_WAITS_MIN: u32 = 16;
/// Maximum number of waits without spinning between two retries.
const RETRY_WAITS_MAX: u32 = 1024;
/// Number of consecutive misses after which spinning for a message of a remote daemon ends.
const DAEMON_MISSES_MAX: u32 = 8;

/// A yield that takes longer shows that a compute-bound thread runs on this processor; threads that
/// exchange messages run for shorter times.
const CHEAP_YIELD_MAX: Duration = Duration::from_micros(200);

/// The most distant possible sender of the awaited message. It determines for how long spinning can
/// be worthwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SenderDistance {
    /// Only tasks on this host.
    Host,
    /// Also tasks on other hosts, over direct connections. At first such a peer sleeps, too, and
    /// answers late. With shorter budgets both tasks would miss forever, although two spinning
    /// tasks would answer in a fifth of the time.
    RemoteTasks,
    /// Also the daemons of other hosts. A message and its answer wake four threads; each wake-up
    /// may cost as much as a wake-up for a message on this host.
    RemoteDaemons,
}

impl SenderDistance {
    /// Maximum spin budget. For senders on this host it is about the cost of a wake-up on another
    /// processor.
    fn budget_max(self) -> Duration {
        Duration::from_micros(match self {
            SenderDistance::Host => 50,
            SenderDistance::RemoteTasks => 120,
            SenderDistance::RemoteDaemons => 250,
        })
    }

    /// Spin budget of a retry after a period without spinning.
    fn retry_budget(self) -> Duration {
        match self {
            SenderDistance::Host => Duration::from_micros(20),
            SenderDistance::RemoteTasks | SenderDistance::RemoteDaemons => self.budget_max(),
        }
    }

    /// Spin budget after `misses` consecutive misses; `last` is the budget of the last miss.
    fn budget_after_misses(self, misses: u32, last: Duration) -> Duration {
        match self {
            SenderDistance::Host | SenderDistance::RemoteTasks => last / 2,
            // Shorter budgets would always miss while the peers sleep.
            SenderDistance::RemoteDaemons if misses < DAEMON_MISSES_MAX => last,
            SenderDistance::RemoteDaemons => Duration::ZERO,
        }
    }
}

/// Adaptive spin budget, learned from recent waits.
#[derive(Debug)]
pub struct SpinBudget {
    budget: Duration,
    /// Misses since the last success or retry.
    misses: u32,
    /// Number of waits until the next retry, while the budget is zero.
    waits_until_retry: u32,
    next_retry_waits: u32,
    /// Number of the next waits that spin without yielding.
    no_yield_waits: u32,
    /// Number of waits without yielding after the next expensive yield.
    next_no_yield_waits: u32,
    /// True if the thread must never spin, because the thread that must answer has no other
    /// processor.
    never_spin: bool,
    sender_distance: SenderDistance,
}

impl SpinBudget {
    /// Creates a budget that starts with the maximum. On a single processor the thread never spins.
    #[must_use]
    pub fn new(reach: SenderDistance) -> SpinBudget {
        // `available_parallelism` also reads the limits of control groups, which takes as long as
        // the rest of a task's enrollment.
        let alone = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).is_ok_and(|set| {
            (0..nix::sched::CpuSet::count())
                .filter(|cpu| set.is_set(*cpu) == Ok(true))
                .count()
                == 1
        });
        SpinBudget {
            never_spin: alone,
            ..SpinBudget::multiprocessor(reach)
        }
    }

    /// Creates a budget of a thread that never spins, because other threads need the processor
    /// more.
    #[must_use]
    pub fn never_spinning() -> SpinBudget {
        SpinBudget {
            never_spin: true,
            ..SpinBudget::multiprocessor(SenderDistance::Host)
        }
    }

    /// Creates a budget that starts with the maximum, on the assumption of several processors.
    #[must_use]
    pub fn multiprocessor(reach: SenderDistance) -> SpinBudget {
        let (span, pause) = (reach.budget_max(), RETRY_WAITS_MIN);
        let keeps = RETRY_WAITS_MIN;
        SpinBudget {
            budget: span,
            misses: 0,
            waits_until_retry: pause,
            next_retry_waits: pause,
            no_yield_waits: 0,
            next_no_yield_waits: keeps,
            never_spin: false,
            sender_distance: reach,
        }
    }

    /// Returns the spin budget of the next wait, at most `limit`; `None` if the thread must sleep
    /// immediately.
    pub fn next_budget(
        &mut self,
        limit: Option<Duration>,
        reach: SenderDistance,
    ) -> Option<Duration> {
        self.sender_distance = reach;
        if self.never_spin {
            return None;
        }
        if self.budget.is_zero() {
            self.waits_until_retry -= 1;
            if self.waits_until_retry > 0 {
                return None;
            }
            (self.budget, self.misses) = (reach.retry_budget(), 0);
        }
        self.no_yield_waits = self.no_yield_waits.saturating_sub(1);
        Some(limit.map_or(self.budget, |limit| limit.min(self.budget)))
    }

    /// Yields the processor to other runnable threads, unless that was expensive recently.
    pub fn yield_cpu(&mut self) {
        if self.should_yield() {
            let before = Instant::now();
            std::thread::yield_now();
            self.record_yield(before.elapsed());
        }
    }

    /// True if a spinning thread should yield the processor to other threads.
    #[must_use]
    pub fn should_yield(&self) -> bool {
        self.no_yield_waits == 0
    }

    /// Records the duration of a yield: after an expensive yield, the next waits spin without
    /// yielding.
    fn record_yield(&mut self, duration: Duration) {
        if duration > CHEAP_YIELD_MAX {
            self.no_yield_waits = self.next_no_yield_waits;
            self.next_no_yield_waits = (self.next_no_yield_waits * 2).min(RETRY_WAITS_MAX);
        } else {
            self.next_no_yield_waits = (self.next_no_yield_waits - 1).max(RETRY_WAITS_MIN);
        }
    }

    /// Records that a message arrived after spinning for the duration `after`. A duration longer
    /// than the budget counts as a miss, because the thread did not run all the time.
    pub fn record_spin(&mut self, latency: Duration, budget: Duration) {
        if latency <= budget + SPIN_MIN {
            self.record_success()
        } else {
            self.record_miss()
        }
    }

    /// Records that a message arrived after sleeping for the duration `latency`, without spinning.
    pub fn record_sleep(&mut self, latency: Duration) {
        if latency <= self.sender_distance.budget_max() {
            self.record_success();
        }
    }

    fn record_success(&mut self) {
        (self.budget, self.misses) = (self.sender_distance.budget_max(), 0);
        self.next_retry_waits = RETRY_WAITS_MIN;
    }

    /// Records that the spin budget was used up without a message.
    pub fn record_miss(&mut self) {
        self.misses += 1;
        self.budget = self
            .sender_distance
            .budget_after_misses(self.misses, self.budget);
        if self.budget < SPIN_MIN {
            self.budget = Duration::ZERO;
            self.waits_until_retry = self.next_retry_waits;
            self.next_retry_waits = (self.next_retry_waits * 2).min(RETRY_WAITS_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn multiprocessor_spin() -> SpinBudget {
        SpinBudget::multiprocessor(SenderDistance::Host)
    }

    #[test]
    fn misses_end_spinning_with_occasional_retries() {
        let mut spin = multiprocessor_spin();
        let mut awake = Duration::ZERO;
        for _ in 0..10_000 {
            if let Some(budget) = spin.next_budget(None, SenderDistance::Host) {
                awake += budget;
                spin.record_miss();
            }
        }
        assert!(awake < Duration::from_micros(1000), "{awake:?}");
        assert!(
            (0..=RETRY_WAITS_MAX).any(|_| spin.next_budget(None, SenderDistance::Host).is_some()),
            "never tried again"
        );
    }

    #[test]
    fn successful_spinning_continues() {
        let mut spin = multiprocessor_spin();
        for _ in 0..1000 {
            let budget = spin
                .next_budget(None, SenderDistance::Host)
                .expect("it paid off");
            assert!(
                (SenderDistance::Host.retry_budget()..=SenderDistance::Host.budget_max())
                    .contains(&budget)
            );
            spin.record_spin(Duration::from_nanos(300), budget);
        }
    }

    /// Yields are rare next to a compute-bound thread, and frequent again when that thread has
    /// ended.
    #[test]
    fn yields_are_rare_next_to_compute_bound_threads() {
        let mut spin = multiprocessor_spin();
        let mut slices = |took| {
            let waits = (0..10_000).map(|_| {
                let budget = spin
                    .next_budget(None, SenderDistance::Host)
                    .expect("it pays off");
                let gives_way = spin.should_yield();
                if gives_way {
                    spin.record_yield(took);
                }
                spin.record_spin(Duration::ZERO, budget);
                gives_way
            });
            waits.filter(|gives_way| *gives_way).count()
        };
        let (beside_work, afterwards) = (
            slices(Duration::from_millis(3)),
            slices(Duration::from_micros(5)),
        );
        assert!((1..=20).contains(&beside_work), "{beside_work} times");
        assert!(
            afterwards > 10_000 - RETRY_WAITS_MAX as usize - 1,
            "{afterwards} times"
        );
    }

    #[test]
    fn single_processor_never_spins() {
        assert_eq!(
            SpinBudget {
                never_spin: true,
                ..SpinBudget::new(SenderDistance::Host)
            }
            .next_budget(None, SenderDistance::Host),
            None
        );
        assert_eq!(
            SpinBudget::never_spinning().next_budget(None, SenderDistance::RemoteTasks),
            None
        );
    }

    #[test]
    fn budget_respects_the_callers_limit() {
        assert_eq!(
            multiprocessor_spin().next_budget(Some(Duration::from_micros(3)), SenderDistance::Host),
            Some(Duration::from_micros(3))
        );
    }

    /// Simulates two peers that send each other requests in turn; neither of them spins at first.
    /// Returns for each peer whether it spins at the end. An answer takes `answer_us`, plus
    /// `wakeup_us` if its sender must be woken; both are in microseconds.
    fn spinning_at_end(reach: SenderDistance, answer_us: u64, wakeup_us: u64) -> [bool; 2] {
        let mut both = [
            SpinBudget::multiprocessor(reach),
            SpinBudget::multiprocessor(reach),
        ];
        both.iter_mut()
            .for_each(|spin| (0..8).for_each(|_| spin.record_miss()));
        let mut awake = [false; 2];
        for round in 0..2000 {
            let (i, other) = (round % 2, (round + 1) % 2);
            let answer = Duration::from_micros(if awake[other] {
                answer_us
            } else {
                answer_us + wakeup_us
            });
            let budget = both[i].next_budget(None, reach);
            awake[i] = budget.is_some_and(|budget| answer <= budget);
            match budget {
                Some(budget) if awake[i] => both[i].record_spin(answer, budget),
                Some(_) => both[i].record_miss(),
                None => both[i].record_sleep(answer),
            }
        }
        awake
    }

    #[test]
    fn remote_peers_reach_mutual_spinning() {
        assert_eq!(
            spinning_at_end(SenderDistance::RemoteTasks, 16, 40),
            [true; 2]
        );
        assert_eq!(
            spinning_at_end(SenderDistance::RemoteDaemons, 50, 150),
            [true; 2]
        );
    }

    #[test]
    fn late_answers_end_spinning() {
        assert_eq!(
            spinning_at_end(SenderDistance::RemoteDaemons, 300, 150),
            [false; 2]
        );
    }
}
