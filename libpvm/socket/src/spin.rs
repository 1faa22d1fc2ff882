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
//!
//! If the last message came from a thread on the processor of the waiting thread, the answer cannot
//! arrive while this thread runs. The thread then yields after each check for a message. A thread
//! that may run on this processor only yields a few times, and sleeps if none of the yields brought
//! the message. A yield is cheaper than a sleep with its wake-up. Any other thread continues,
//! because it or the sender may be moved to another processor. The processors are compared for each
//! wait, so the rule also holds after the program has pinned its threads. The number of processors
//! on which a thread may run says nothing about its peer, so it alone never prevents spinning.

use std::time::{Duration, Instant};

/// Spin budgets below this duration count as zero.
const SPIN_BUDGET_MIN: Duration = Duration::from_micros(2);
/// Number of waits without spinning before the first retry; each failed retry doubles the number.
/// The same applies to waits without yielding.
const RETRY_WAITS_MIN: u32 = 16;
/// Maximum number of waits without spinning, or without yielding, between two retries.
const RETRY_WAITS_MAX: u32 = 1024;
/// Maximum number of yields before a thread sleeps, if the sender of the message shares its only
/// processor. The sender may need several turns: its I/O thread and the receiver's run there, too.
pub const YIELDS_MAX: u32 = 3;
/// Number of waits between two checks of the processors on which the thread may run.
const CPU_CHECK_WAITS: u32 = 64;
/// Maximum balance of useful and useless yields. A useless yield takes about as long as a useful
/// one saves, so yielding ends when useless ones prevail.
const YIELD_SCORE_MAX: u32 = 8;
/// Number of consecutive misses after which spinning for a message of a remote daemon ends.
const DAEMON_MISSES_MAX: u32 = 8;

/// Maximum duration of a cheap yield. A longer yield shows that a compute-bound thread runs on this
/// processor; threads that exchange messages run for shorter times.
const CHEAP_YIELD_DURATION_MAX: Duration = Duration::from_micros(200);
/// Maximum number of waits without yielding after an expensive yield. Such a yield costs a time
/// slice of 3 ms, and waits must not take noticeably longer for it on average.
const NO_YIELD_WAITS_MAX: u32 = 1 << 14;

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

/// Behavior of a thread that waits for a message, before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitPlan {
    /// The thread sleeps immediately.
    Sleep,
    /// The thread yields at most [`YIELDS_MAX`] times, and checks for a message after each yield.
    Yield,
    /// The thread spins for at most this duration.
    Spin(Duration),
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
    yield_record: YieldRecord,
    /// True if the waiting thread could run on one processor only at the last check.
    has_one_cpu: bool,
    waits_until_cpu_check: u32,
    /// True if the thread must never spin, because the thread that must answer has no other
    /// processor.
    never_spin: bool,
    /// True after a long sleep, until the result of a spin is recorded.
    follows_long_sleep: bool,
    sender_distance: SenderDistance,
}

impl SpinBudget {
    /// Creates a budget that starts with the maximum. A thread that may run on a single processor
    /// never spins: this constructor is for threads that do not know where their peers run.
    #[must_use]
    pub fn new(sender_distance: SenderDistance) -> Self {
        Self {
            never_spin: has_one_cpu(),
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

    /// Creates a budget that starts with the maximum, whatever the number of processors.
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
            yield_record: YieldRecord::default(),
            has_one_cpu: false,
            waits_until_cpu_check: 0,
            never_spin: false,
            follows_long_sleep: false,
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

    /// Returns what the thread does in the next wait before it sleeps. `shares_cpu` is true if the
    /// sender of the last message ran on the processor on which this thread runs now.
    /// `has_one_cpu` returns whether this thread may run on one processor only; it is called now
    /// and then. The other arguments are those of [`SpinBudget::next_budget`].
    pub fn plan_wait(
        &mut self,
        budget_limit: Option<Duration>,
        sender_distance: SenderDistance,
        shares_cpu: bool,
        has_one_cpu: impl FnOnce() -> bool,
    ) -> WaitPlan {
        if self.never_spin {
            return WaitPlan::Sleep;
        }
        if !shares_cpu {
            return self.plan_spin(budget_limit, sender_distance);
        }
        if !self.should_yield() {
            // Without a yield, the sender cannot run.
            self.no_yield_waits -= 1;
            return WaitPlan::Sleep;
        }
        if self.waits_until_cpu_check == 0 {
            (self.has_one_cpu, self.waits_until_cpu_check) = (has_one_cpu(), CPU_CHECK_WAITS);
        }
        self.waits_until_cpu_check -= 1;
        // A sender on another host does not need this processor.
        if !self.has_one_cpu || sender_distance != SenderDistance::Host {
            return self.plan_spin(budget_limit, sender_distance);
        }
        self.sender_distance = sender_distance;
        if self.yield_record.permits_yields() {
            WaitPlan::Yield
        } else {
            WaitPlan::Sleep
        }
    }

    fn plan_spin(
        &mut self,
        budget_limit: Option<Duration>,
        sender_distance: SenderDistance,
    ) -> WaitPlan {
        self.next_budget(budget_limit, sender_distance)
            .map_or(WaitPlan::Sleep, WaitPlan::Spin)
    }

    /// Records the result of a wait after [`WaitPlan::Yield`]: the number of yields after which
    /// there was no message. The message arrived during the yield after these, or not at all.
    pub fn record_yields(&mut self, useless_count: u32) {
        self.yield_record.record(useless_count);
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
            self.next_no_yield_waits = (self.next_no_yield_waits * 2).min(NO_YIELD_WAITS_MAX);
        } else {
            self.next_no_yield_waits = (self.next_no_yield_waits - 1).max(RETRY_WAITS_MIN);
        }
    }

    /// Records that a message arrived after spinning for the duration `latency`. If `latency` is
    /// longer than the budget, the wait counts as a miss, because the thread did not run all the
    /// time.
    pub fn record_spin(&mut self, latency: Duration, budget: Duration) {
        // The sleep brought the message, and the spin was none.
        if std::mem::take(&mut self.follows_long_sleep) && latency.is_zero() {
            return;
        }
        if latency <= budget + SPIN_BUDGET_MIN {
            self.record_success()
        } else {
            self.record_miss()
        }
    }

    /// Records that a thread has slept for much longer than a spin lasts. If the next spin finds a
    /// message at once, its result does not count.
    pub fn record_long_sleep(&mut self) {
        self.follows_long_sleep = true;
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

/// True if the calling thread may run on one processor only.
#[must_use]
pub fn has_one_cpu() -> bool {
    // `available_parallelism` also reads the limits of control groups, which takes as long as all
    // other steps of a task's enrollment together.
    nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).is_ok_and(|cpu_set| {
        (0..nix::sched::CpuSet::count())
            .filter(|cpu| cpu_set.is_set(*cpu) == Ok(true))
            .count()
            == 1
    })
}

/// Whether yields to a sender on the same processor have brought messages lately.
#[derive(Debug)]
struct YieldRecord {
    /// Balance of useful and useless yields: from 1 to [`YIELD_SCORE_MAX`].
    score: u32,
    /// Number of waits until the next retry; 0 while yielding pays off.
    waits_until_retry: u32,
    next_retry_waits: u32,
}

impl Default for YieldRecord {
    fn default() -> Self {
        Self {
            score: YIELD_SCORE_MAX,
            waits_until_retry: 0,
            next_retry_waits: RETRY_WAITS_MIN,
        }
    }
}

impl YieldRecord {
    /// True if the next wait may yield. Counts the wait.
    fn permits_yields(&mut self) -> bool {
        self.waits_until_retry = self.waits_until_retry.saturating_sub(1);
        self.waits_until_retry == 0
    }

    /// Records a wait with `useless_count` yields after which there was no message.
    fn record(&mut self, useless_count: u32) {
        if useless_count == 0 {
            self.score = (self.score + 1).min(YIELD_SCORE_MAX);
            if self.score == YIELD_SCORE_MAX {
                self.next_retry_waits = RETRY_WAITS_MIN;
            }
            return;
        }
        self.score = self.score.saturating_sub(useless_count);
        if self.score == 0 {
            self.score = 1;
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

    /// Messages that arrive far apart end the spinning, although each is there when the thread
    /// wakes up. Messages that arrive soon after each other begin the spinning again.
    #[test]
    fn long_sleeps_end_spinning() {
        let mut spin_budget = host_spin_budget();
        let mut spin_count = 0;
        for _ in 0..1000 {
            if let Some(budget) = spin_budget.next_budget(None, SenderDistance::Host) {
                spin_count += 1;
                spin_budget.record_miss();
                spin_budget.record_long_sleep();
                spin_budget.record_spin(Duration::ZERO, budget);
            }
        }
        assert!(spin_count < 40, "{spin_count}");
        spin_budget.record_sleep(Duration::from_micros(40));
        assert!(
            spin_budget
                .next_budget(None, SenderDistance::Host)
                .is_some()
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
        let mut count_yields = |wait_count: u32, yield_duration| {
            let yield_decisions = (0..wait_count).map(|_| {
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
            count_yields(10_000, Duration::from_millis(3)),
            count_yields(100_000, Duration::from_micros(5)),
        );
        assert!(
            (1..=20).contains(&yields_beside_work),
            "{yields_beside_work} times"
        );
        assert!(
            yields_afterwards > 100_000 - NO_YIELD_WAITS_MAX as usize - 1,
            "{yields_afterwards} times"
        );
    }

    #[test]
    fn thread_that_must_never_spin_sleeps() {
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
        for shares_cpu in [false, true] {
            assert_eq!(
                plan_on_one_cpu(&mut SpinBudget::without_spinning(), shares_cpu),
                WaitPlan::Sleep
            );
        }
    }

    /// Returns the plan of a thread that may run on one processor only.
    fn plan_on_one_cpu(spin_budget: &mut SpinBudget, shares_cpu: bool) -> WaitPlan {
        spin_budget.plan_wait(None, SenderDistance::Host, shares_cpu, || true)
    }

    /// Simulates waits for a sender on the same processor, the only one of the thread.
    /// `brings_message` tells for each wait whether yields bring the message. Returns the number of
    /// waits that yield.
    fn count_yielding_waits(
        spin_budget: &mut SpinBudget,
        wait_count: u32,
        brings_message: impl Fn(u32) -> bool,
    ) -> u32 {
        let mut yielding_waits = 0;
        for wait in 0..wait_count {
            match plan_on_one_cpu(spin_budget, true) {
                WaitPlan::Yield => {
                    yielding_waits += 1;
                    spin_budget.record_yields(if brings_message(wait) { 0 } else { YIELDS_MAX });
                }
                other => assert_eq!(other, WaitPlan::Sleep, "the sender needs the processor"),
            }
        }
        yielding_waits
    }

    #[test]
    fn thread_yields_to_a_sender_on_its_processor() {
        let mut spin_budget = host_spin_budget();
        assert_eq!(
            count_yielding_waits(&mut spin_budget, 1000, |_| true),
            1000,
            "each yield brought a message"
        );
        assert_eq!(
            plan_on_one_cpu(&mut spin_budget, false),
            WaitPlan::Spin(SenderDistance::Host.budget_max()),
            "the sender has moved to another processor"
        );
    }

    #[test]
    fn yields_without_messages_end_with_occasional_retries() {
        let mut spin_budget = host_spin_budget();
        let yielding_waits = count_yielding_waits(&mut spin_budget, 10_000, |_| false);
        assert!((8..50).contains(&yielding_waits), "{yielding_waits} waits");
        let waits_until_retry = RETRY_WAITS_MAX;
        assert!(
            count_yielding_waits(&mut spin_budget, waits_until_retry + 1000, |_| true) >= 1000,
            "one success permits yields again"
        );
    }

    #[test]
    fn yields_that_mostly_pay_off_continue() {
        let wait_count = 10_000;
        assert_eq!(
            count_yielding_waits(&mut host_spin_budget(), wait_count, |wait| wait % 6 != 0),
            wait_count
        );
    }

    #[test]
    fn yields_that_seldom_pay_off_end() {
        let yielding_waits =
            count_yielding_waits(&mut host_spin_budget(), 10_000, |wait| wait % 3 == 0);
        assert!(yielding_waits < 1000, "{yielding_waits} waits");
    }

    #[test]
    fn late_messages_count_less_than_none() {
        let mut yield_record = YieldRecord::default();
        for _ in 1..YIELD_SCORE_MAX {
            yield_record.record(1);
        }
        assert!(yield_record.permits_yields());
        yield_record.record(1);
        assert!(!yield_record.permits_yields());
    }

    /// Misses on the shared processor do not end spinning for senders elsewhere, and vice versa.
    #[test]
    fn yields_and_spins_are_learned_separately() {
        let mut spin_budget = host_spin_budget();
        count_yielding_waits(&mut spin_budget, 100, |_| false);
        assert_eq!(
            plan_on_one_cpu(&mut spin_budget, false),
            WaitPlan::Spin(SenderDistance::Host.budget_max())
        );
        let mut spin_budget = host_spin_budget();
        (0..8).for_each(|_| spin_budget.record_miss());
        assert_eq!(plan_on_one_cpu(&mut spin_budget, false), WaitPlan::Sleep);
        assert_eq!(plan_on_one_cpu(&mut spin_budget, true), WaitPlan::Yield);
    }

    /// Next to a compute-bound thread a yield costs a time slice, and a wake-up does not.
    #[test]
    fn expensive_yields_turn_into_sleeps() {
        let mut spin_budget = host_spin_budget();
        let mut yielding_waits = 0;
        for _ in 0..10_000 {
            if plan_on_one_cpu(&mut spin_budget, true) == WaitPlan::Yield {
                yielding_waits += 1;
                spin_budget.record_yield(Duration::from_millis(3));
                spin_budget.record_yields(0);
            }
        }
        assert!((1..=20).contains(&yielding_waits), "{yielding_waits} waits");
    }

    /// A thread that may run elsewhere spins, because its sender may soon run elsewhere, too.
    #[test]
    fn unpinned_threads_spin_whatever_the_last_cpu_was() {
        let mut spin_budget = host_spin_budget();
        for _ in 0..1000 {
            let plan = spin_budget.plan_wait(None, SenderDistance::Host, true, || false);
            let WaitPlan::Spin(budget) = plan else {
                panic!("{plan:?}");
            };
            spin_budget.record_spin(Duration::from_micros(1), budget);
        }
        spin_budget.record_yield(Duration::from_millis(3));
        assert_eq!(
            spin_budget.plan_wait(None, SenderDistance::Host, true, || false),
            WaitPlan::Sleep,
            "the sender cannot run before a compute-bound thread"
        );
    }

    /// A program that pins its thread, or is pinned, is noticed after some waits.
    #[test]
    fn later_pinning_changes_the_plan() {
        let mut spin_budget = host_spin_budget();
        for has_one_cpu in [false, true, false] {
            let plans: Vec<WaitPlan> = (0..=CPU_CHECK_WAITS)
                .map(|_| {
                    let plan =
                        spin_budget.plan_wait(None, SenderDistance::Host, true, || has_one_cpu);
                    spin_budget.record_yields(0);
                    plan
                })
                .collect();
            let yields = *plans.last().expect("a plan") == WaitPlan::Yield;
            assert_eq!(yields, has_one_cpu, "{plans:?}");
        }
    }

    /// A sender on another host does not need the processor, so the thread spins and yields.
    #[test]
    fn local_sender_on_the_processor_does_not_hide_remote_senders() {
        let mut spin_budget = SpinBudget::for_multiprocessor(SenderDistance::RemoteTasks);
        assert_eq!(
            spin_budget.plan_wait(None, SenderDistance::RemoteTasks, true, || true),
            WaitPlan::Spin(SenderDistance::RemoteTasks.budget_max())
        );
        spin_budget.record_yield(Duration::from_millis(3));
        assert_eq!(
            spin_budget.plan_wait(None, SenderDistance::RemoteTasks, true, || true),
            WaitPlan::Sleep
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
