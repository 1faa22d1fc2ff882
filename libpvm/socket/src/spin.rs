//! Decides whether and how long a thread spins before it sleeps.
//!
//! Spinning saves a wake-up through the kernel if the answer comes soon; otherwise it takes the
//! processor from the thread that must produce the answer. Recent waits predict the next one: a
//! miss halves the spin budget. Where only the full budget can succeed, several misses in a row end
//! the spinning instead. Once the budget is zero, spinning is retried only occasionally.
//!
//! A spinning thread yields to other runnable threads on its processor, because one of them may be
//! the one that produces the answer. If a yield costs a whole time slice, because a compute-bound
//! thread runs there, the next waits spin without yielding.

use std::time::{Duration, Instant};

/// Smaller budgets count as zero.
const SPIN_MIN: Duration = Duration::from_micros(2);
/// Waits without spinning before the first retry; each failed retry doubles the number.
const PAUSE_MIN: u32 = 16;
/// Largest number of waits between two retries.
const PAUSE_MAX: u32 = 1024;
/// Consecutive misses after which spinning for daemons ends.
const DAEMONS_TRIES: u32 = 8;

/// A longer yield means that a compute-bound thread runs on this processor; threads that exchange
/// messages run for shorter times.
const TURN_MAX: Duration = Duration::from_micros(200);

/// The most distant sender of the awaited message. It determines for how long spinning can pay off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Only tasks on this host.
    Host,
    /// Also tasks on other hosts, over direct connections. At first such a peer sleeps, too, and
    /// answers late. With shorter budgets both sides would miss forever, although two spinning
    /// sides would answer in a fifth of the time.
    Tasks,
    /// Also the daemons of other hosts. A message and its answer wake four threads, and each
    /// wake-up may cost as much as one on this host.
    Daemons,
}

impl Reach {
    /// Longest spin budget. For one host: about the cost of a wake-up on another processor.
    fn longest(self) -> Duration {
        Duration::from_micros(match self {
            Reach::Host => 50,
            Reach::Tasks => 120,
            Reach::Daemons => 250,
        })
    }

    /// Spin budget of a retry.
    fn again(self) -> Duration {
        match self {
            Reach::Host => Duration::from_micros(20),
            Reach::Tasks | Reach::Daemons => self.longest(),
        }
    }

    /// Next spin budget after consecutive misses, the last of them with budget `last`.
    fn after_in_vain(self, misses: u32, last: Duration) -> Duration {
        match self {
            Reach::Host | Reach::Tasks => last / 2,
            // Shorter budgets would always miss while the peers sleep.
            Reach::Daemons if misses < DAEMONS_TRIES => last,
            Reach::Daemons => Duration::ZERO,
        }
    }
}

/// Adaptive spin budget, learned from recent waits.
#[derive(Debug)]
pub struct Spin {
    span: Duration,
    /// Misses since the last success or retry.
    misses: u32,
    /// Waits until the next retry, while the budget is zero.
    pause: u32,
    next_pause: u32,
    /// Waits left that spin without yielding, and their number after the next expensive yield.
    keeps: u32,
    next_keeps: u32,
    /// Never spin: there is no other processor for the thread that must answer.
    alone: bool,
    reach: Reach,
}

impl Spin {
    /// Starts with the longest budget, or with no spinning on a single processor.
    #[must_use]
    pub fn new(reach: Reach) -> Spin {
        // `available_parallelism` also reads the limits of control groups, which takes as long as
        // the rest of a task's enrollment.
        let alone = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).is_ok_and(|set| {
            (0..nix::sched::CpuSet::count())
                .filter(|cpu| set.is_set(*cpu) == Ok(true))
                .count()
                == 1
        });
        Spin {
            alone,
            ..Spin::with_company(reach)
        }
    }

    /// Never spins, because other threads need the processor more.
    #[must_use]
    pub fn never() -> Spin {
        Spin {
            alone: true,
            ..Spin::with_company(Reach::Host)
        }
    }

    /// Starts with the longest budget, on the assumption of several processors.
    #[must_use]
    pub fn with_company(reach: Reach) -> Spin {
        let (span, pause) = (reach.longest(), PAUSE_MIN);
        let keeps = PAUSE_MIN;
        Spin {
            span,
            misses: 0,
            pause,
            next_pause: pause,
            keeps: 0,
            next_keeps: keeps,
            alone: false,
            reach,
        }
    }

    /// Returns the spin budget of the next wait, at most `span`; `None`: sleep immediately.
    pub fn budget(&mut self, span: Option<Duration>, reach: Reach) -> Option<Duration> {
        self.reach = reach;
        if self.alone {
            return None;
        }
        if self.span.is_zero() {
            self.pause -= 1;
            if self.pause > 0 {
                return None;
            }
            (self.span, self.misses) = (reach.again(), 0);
        }
        self.keeps = self.keeps.saturating_sub(1);
        Some(span.map_or(self.span, |span| span.min(self.span)))
    }

    /// Yields the processor to other runnable threads, unless that was expensive recently.
    pub fn give_way(&mut self) {
        if self.gives_way() {
            let before = Instant::now();
            std::thread::yield_now();
            self.gave_way(before.elapsed());
        }
    }

    /// True while spinning should yield the processor to others.
    #[must_use]
    pub fn gives_way(&self) -> bool {
        self.keeps == 0
    }

    /// Records the duration of a yield.
    fn gave_way(&mut self, took: Duration) {
        if took > TURN_MAX {
            self.keeps = self.next_keeps;
            self.next_keeps = (self.next_keeps * 2).min(PAUSE_MAX);
        } else {
            self.next_keeps = (self.next_keeps - 1).max(PAUSE_MIN);
        }
    }

    /// Records a message that came after spinning for this time. A time longer than the budget
    /// means that this thread did not run meanwhile.
    pub fn ended(&mut self, after: Duration, budget: Duration) {
        if after <= budget + SPIN_MIN {
            self.paid_off()
        } else {
            self.was_in_vain()
        }
    }

    /// Records a message that came after this time without spinning.
    pub fn slept(&mut self, after: Duration) {
        if after <= self.reach.longest() {
            self.paid_off();
        }
    }

    fn paid_off(&mut self) {
        (self.span, self.misses) = (self.reach.longest(), 0);
        self.next_pause = PAUSE_MIN;
    }

    /// Records a spin without a message.
    pub fn was_in_vain(&mut self) {
        self.misses += 1;
        self.span = self.reach.after_in_vain(self.misses, self.span);
        if self.span < SPIN_MIN {
            self.span = Duration::ZERO;
            self.pause = self.next_pause;
            self.next_pause = (self.next_pause * 2).min(PAUSE_MAX);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shared_machine() -> Spin {
        Spin::with_company(Reach::Host)
    }

    #[test]
    fn misses_end_spinning_with_occasional_retries() {
        let mut spin = shared_machine();
        let mut awake = Duration::ZERO;
        for _ in 0..10_000 {
            if let Some(budget) = spin.budget(None, Reach::Host) {
                awake += budget;
                spin.was_in_vain();
            }
        }
        assert!(awake < Duration::from_micros(1000), "{awake:?}");
        assert!(
            (0..=PAUSE_MAX).any(|_| spin.budget(None, Reach::Host).is_some()),
            "never tried again"
        );
    }

    #[test]
    fn successful_spinning_continues() {
        let mut spin = shared_machine();
        for _ in 0..1000 {
            let budget = spin.budget(None, Reach::Host).expect("it paid off");
            assert!((Reach::Host.again()..=Reach::Host.longest()).contains(&budget));
            spin.ended(Duration::from_nanos(300), budget);
        }
    }

    /// Yields are rare next to a compute-bound thread and frequent again after its end.
    #[test]
    fn yields_are_rare_next_to_compute_bound_threads() {
        let mut spin = shared_machine();
        let mut slices = |took| {
            let waits = (0..10_000).map(|_| {
                let budget = spin.budget(None, Reach::Host).expect("it pays off");
                let gives_way = spin.gives_way();
                if gives_way {
                    spin.gave_way(took);
                }
                spin.ended(Duration::ZERO, budget);
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
            afterwards > 10_000 - PAUSE_MAX as usize - 1,
            "{afterwards} times"
        );
    }

    #[test]
    fn single_processor_never_spins() {
        assert_eq!(
            Spin {
                alone: true,
                ..Spin::new(Reach::Host)
            }
            .budget(None, Reach::Host),
            None
        );
        assert_eq!(Spin::never().budget(None, Reach::Tasks), None);
    }

    #[test]
    fn budget_respects_the_callers_limit() {
        assert_eq!(
            shared_machine().budget(Some(Duration::from_micros(3)), Reach::Host),
            Some(Duration::from_micros(3))
        );
    }

    /// Simulates two peers that ask each other in turn, both without spinning at first. Returns
    /// which of them spin at the end. An answer takes `way`, plus `waking` if its sender must be
    /// woken.
    fn awake_in_the_end(reach: Reach, way: u64, waking: u64) -> [bool; 2] {
        let mut both = [Spin::with_company(reach), Spin::with_company(reach)];
        both.iter_mut()
            .for_each(|spin| (0..8).for_each(|_| spin.was_in_vain()));
        let mut awake = [false; 2];
        for round in 0..2000 {
            let (i, other) = (round % 2, (round + 1) % 2);
            let answer = Duration::from_micros(if awake[other] { way } else { way + waking });
            let budget = both[i].budget(None, reach);
            awake[i] = budget.is_some_and(|budget| answer <= budget);
            match budget {
                Some(budget) if awake[i] => both[i].ended(answer, budget),
                Some(_) => both[i].was_in_vain(),
                None => both[i].slept(answer),
            }
        }
        awake
    }

    #[test]
    fn remote_peers_reach_mutual_spinning() {
        assert_eq!(awake_in_the_end(Reach::Tasks, 16, 40), [true; 2]);
        assert_eq!(awake_in_the_end(Reach::Daemons, 50, 150), [true; 2]);
    }

    #[test]
    fn late_answers_end_spinning() {
        assert_eq!(awake_in_the_end(Reach::Daemons, 300, 150), [false; 2]);
    }
}
