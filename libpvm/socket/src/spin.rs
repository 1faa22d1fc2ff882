//! Decides whether and how long a thread that waits for a message spins before it sleeps.
//!
//! Spinning saves a wake-up by the kernel if the message arrives soon. Otherwise spinning takes the
//! processor from the thread that must produce the message. Recent waits predict the next wait: a
//! miss halves the spin budget. Where only the full budget can succeed, the budget is not halved;
//! instead, several consecutive misses end the spinning. Once the budget is zero, spinning is
//! retried only occasionally.
//!
//! A spinning thread yields to other runnable threads on its processor, because one of them may be
//! the thread that must produce the message. If a yield costs a whole time slice, because a
//! compute-bound thread runs on that processor, the next waits spin without yielding.

use std::time::{Duration, Instant};

/// Spin budgets below this duration count as zero.
const SPIN_BUDGET_MIN: Duration = Duration::from_micros(2);
/// Number of waits without spinning before the first retry; each failed retry doubles the number.
const RETRY_WAITS_MIN: u32 = 16;
/// Maximum number of waits without spinning between two retries.
const RETRY_WAITS_MAX: u32 = 1024;
/// Number of consecutive misses after which spinning for a message of a remote daemon ends.
const DAEMON_MISSES_MAX: u32 = 8;

/// Maximum duration of a cheap yield. A longer yield shows that a compute-bound thread runs on this
/// processor; threads that exchange messages run for shorter times.
const CHEAP_YIELD_DURATION_MAX: Duration = Duration::from_micros(200);

/// The most distant possible sender of the awaited message. The distance determines for how long
/// spinning can be worthwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SenderDistance {
    /// Only tasks on this host.
    Host,
    /// Tasks on this host, and tasks on other hosts over direct connections. At first a peer on
    /// another host sleeps, too, and answers late. With shorter budgets both tasks would miss
    /// forever, although two spinning tasks answer within a fifth of the time.
    RemoteTasks,
    /// Tasks on any host, and the daemons of other hosts. A message and its answer wake four
    /// threads; each wake-up may cost as much as a wake-up for a message on this host.
    RemoteDaemons,
}

impl SenderDistance {
    /// Maximum spin budget. For senders on this host the maximum is about the cost of a wake-up on
    /// another processor.
    fn budget_max(self) -> Duration {
        Duration::from_micros(match self {
            Self::Host => 50,
            Self::RemoteTasks => 120,
            Self::RemoteDaemons => 250,
        })
    }

    /// Spin budget of a retry after a period without spinning.
    fn retry_budget(self) -> Duration {
        match self {
            Self::Host => Duration::from_micros(20),
            Self::RemoteTasks | Self::RemoteDaemons => self.budget_max(),
        }
    }

    /// Spin budget after `miss_count` consecutive misses; `last_budget` is the budget of the last
    /// miss.
    fn budget_after_misses(self, miss_count: u32, last_budget: Duration) -> Duration {
        match self {
            Self::Host | Self::RemoteTasks => last_budget / 2,
            // Shorter budgets would always miss while the peers sleep.
            Self::RemoteDaemons if miss_count < DAEMON_MISSES_MAX => last_budget,
            Self::RemoteDaemons => Duration::ZERO,
        }
    }
}

/// Adaptive spin budget, learned from recent waits.
#[derive(Debug)]
pub struct SpinBudget {
    budget: Duration,
    /// Number of consecutive misses since the last success or retry.
    consecutive_misses: u32,
    /// Number of waits until the next retry, while the budget is zero.
    waits_until_retry: u32,
    next_retry_waits: u32,
    /// Number of waits, beginning with the next wait, that spin without yielding.
    no_yield_waits: u32,
    /// Number of waits without yielding that will follow the next expensive yield.
    next_no_yield_waits: u32,
    /// True if the thread must never spin, because the thread that must answer has no other
    /// processor.
    never_spin: bool,
    sender_distance: SenderDistance,
}

impl SpinBudget {
    /// Creates a budget that starts with the maximum. On a single processor the thread never spins.
    #[must_use]
    pub fn new(sender_distance: SenderDistance) -> Self {
        // `available_parallelism` also reads the limits of control groups, which takes as long as
        // all other steps of a task's enrollment together.
        let has_one_processor = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0))
            .is_ok_and(|cpu_set| {
                (0..nix::sched::CpuSet::count())
                    .filter(|cpu| cpu_set.is_set(*cpu) == Ok(true))
                    .count()
                    == 1
            });
        Self {
            never_spin: has_one_processor,
            ..Self::for_multiprocessor(sender_distance)
        }
    }

    /// Creates a budget of a thread that never spins, because other threads need the processor
    /// more.
    #[must_use]
    pub fn without_spinning() -> Self {
        Self {
            never_spin: true,
            ..Self::for_multiprocessor(SenderDistance::Host)
        }
    }

    /// Creates a budget that starts with the maximum, on the assumption of several processors.
    #[must_use]
    pub fn for_multiprocessor(sender_distance: SenderDistance) -> Self {
        let (budget, retry_waits) = (sender_distance.budget_max(), RETRY_WAITS_MIN);
        let yield_waits = RETRY_WAITS_MIN;
        Self {
            budget,
            consecutive_misses: 0,
            waits_until_retry: retry_waits,
            next_retry_waits: retry_waits,
            no_yield_waits: 0,
            next_no_yield_waits: yield_waits,
            never_spin: false,
            sender_distance,
        }
    }

    /// Returns the spin budget of the next wait, at most `budget_limit`; `None` if the thread must
    /// sleep immediately. `sender_distance` is the distance of the senders for whose message the
    /// thread waits.
    pub fn next_budget(
        &mut self,
        budget_limit: Option<Duration>,
        sender_distance: SenderDistance,
    ) -> Option<Duration> {
        self.sender_distance = sender_distance;
        if self.never_spin {
            return None;
        }
        if self.budget.is_zero() {
            self.waits_until_retry -= 1;
            if self.waits_until_retry > 0 {
                return None;
            }
            (self.budget, self.consecutive_misses) = (sender_distance.retry_budget(), 0);
        }
        self.no_yield_waits = self.no_yield_waits.saturating_sub(1);
        Some(budget_limit.map_or(self.budget, |budget_limit| budget_limit.min(self.budget)))
    }

    /// Yields the processor to other runnable threads, unless a recent yield was expensive.
    pub fn yield_cpu(&mut self) {
        if self.should_yield() {
            let yield_start = Instant::now();
            std::thread::yield_now();
            self.record_yield(yield_start.elapsed());
        }
    }

    /// True if a spinning thread should yield the processor to other threads.
    #[must_use]
    pub fn should_yield(&self) -> bool {
        self.no_yield_waits == 0
    }

    /// Records the duration of a yield. After an expensive yield, the next waits spin without
    /// yielding.
    fn record_yield(&mut self, duration: Duration) {
        if duration > CHEAP_YIELD_DURATION_MAX {
            self.no_yield_waits = self.next_no_yield_waits;
            self.next_no_yield_waits = (self.next_no_yield_waits * 2).min(RETRY_WAITS_MAX);
        } else {
            self.next_no_yield_waits = (self.next_no_yield_waits - 1).max(RETRY_WAITS_MIN);
        }
    }

    /// Records that a message arrived after spinning for the duration `latency`. If `latency` is
    /// longer than the budget, the wait counts as a miss, because the thread did not run all the
    /// time.
    pub fn record_spin(&mut self, latency: Duration, budget: Duration) {
        if latency <= budget + SPIN_BUDGET_MIN {
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
        (self.budget, self.consecutive_misses) = (self.sender_distance.budget_max(), 0);
        self.next_retry_waits = RETRY_WAITS_MIN;
    }

    /// Records that the spin budget was used up without a message.
    pub fn record_miss(&mut self) {
        self.consecutive_misses += 1;
        self.budget = self
            .sender_distance
            .budget_after_misses(self.consecutive_misses, self.budget);
        if self.budget < SPIN_BUDGET_MIN {
            self.budget = Duration::ZERO;
            self.waits_until_retry = self.next_retry_waits;
            self.next_retry_waits = (self.next_retry_waits * 2).min(RETRY_WAITS_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host_spin_budget() -> SpinBudget {
        SpinBudget::for_multiprocessor(SenderDistance::Host)
    }

    #[test]
    fn misses_end_spinning_with_occasional_retries() {
        let mut spin_budget = host_spin_budget();
        let mut spin_time = Duration::ZERO;
        for _ in 0..10_000 {
            if let Some(budget) = spin_budget.next_budget(None, SenderDistance::Host) {
                spin_time += budget;
                spin_budget.record_miss();
            }
        }
        assert!(spin_time < Duration::from_micros(1000), "{spin_time:?}");
        assert!(
            (0..=RETRY_WAITS_MAX).any(|_| spin_budget
                .next_budget(None, SenderDistance::Host)
                .is_some()),
            "never tried again"
        );
    }

    #[test]
    fn successful_spinning_continues() {
        let mut spin_budget = host_spin_budget();
        for _ in 0..1000 {
            let budget = spin_budget
                .next_budget(None, SenderDistance::Host)
                .expect("it paid off");
            assert!(
                (SenderDistance::Host.retry_budget()..=SenderDistance::Host.budget_max())
                    .contains(&budget)
            );
            spin_budget.record_spin(Duration::from_nanos(300), budget);
        }
    }

    /// Yields are rare next to a compute-bound thread, and frequent again when that thread has
    /// ended.
    #[test]
    fn yields_are_rare_next_to_compute_bound_threads() {
        let mut spin_budget = host_spin_budget();
        let mut count_yields = |yield_duration| {
            let yield_decisions = (0..10_000).map(|_| {
                let budget = spin_budget
                    .next_budget(None, SenderDistance::Host)
                    .expect("it pays off");
                let should_yield = spin_budget.should_yield();
                if should_yield {
                    spin_budget.record_yield(yield_duration);
                }
                spin_budget.record_spin(Duration::ZERO, budget);
                should_yield
            });
            yield_decisions.filter(|should_yield| *should_yield).count()
        };
        let (yields_beside_work, yields_afterwards) = (
            count_yields(Duration::from_millis(3)),
            count_yields(Duration::from_micros(5)),
        );
        assert!(
            (1..=20).contains(&yields_beside_work),
            "{yields_beside_work} times"
        );
        assert!(
            yields_afterwards > 10_000 - RETRY_WAITS_MAX as usize - 1,
            "{yields_afterwards} times"
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
            SpinBudget::without_spinning().next_budget(None, SenderDistance::RemoteTasks),
            None
        );
    }

    #[test]
    fn budget_respects_the_callers_limit() {
        assert_eq!(
            host_spin_budget().next_budget(Some(Duration::from_micros(3)), SenderDistance::Host),
            Some(Duration::from_micros(3))
        );
    }

    /// Simulates two peers that send each other requests in turn; neither of them spins at first.
    /// Returns for each peer whether it spins at the end. An answer takes `answer_us`, plus
    /// `wakeup_us` if the answering peer must be woken; both are in microseconds.
    fn simulate_spinning(
        sender_distance: SenderDistance,
        answer_us: u64,
        wakeup_us: u64,
    ) -> [bool; 2] {
        let mut spin_budgets = [
            SpinBudget::for_multiprocessor(sender_distance),
            SpinBudget::for_multiprocessor(sender_distance),
        ];
        spin_budgets
            .iter_mut()
            .for_each(|spin_budget| (0..8).for_each(|_| spin_budget.record_miss()));
        let mut is_awake = [false; 2];
        for round in 0..2000 {
            let (i, other_index) = (round % 2, (round + 1) % 2);
            let answer_time = Duration::from_micros(if is_awake[other_index] {
                answer_us
            } else {
                answer_us + wakeup_us
            });
            let budget = spin_budgets[i].next_budget(None, sender_distance);
            is_awake[i] = budget.is_some_and(|budget| answer_time <= budget);
            match budget {
                Some(budget) if is_awake[i] => spin_budgets[i].record_spin(answer_time, budget),
                Some(_) => spin_budgets[i].record_miss(),
                None => spin_budgets[i].record_sleep(answer_time),
            }
        }
        is_awake
    }

    #[test]
    fn remote_peers_reach_mutual_spinning() {
        assert_eq!(
            simulate_spinning(SenderDistance::RemoteTasks, 16, 40),
            [true; 2]
        );
        assert_eq!(
            simulate_spinning(SenderDistance::RemoteDaemons, 50, 150),
            [true; 2]
        );
    }

    #[test]
    fn late_answers_end_spinning() {
        assert_eq!(
            simulate_spinning(SenderDistance::RemoteDaemons, 300, 150),
            [false; 2]
        );
    }
}
