//! Whether to wait awake for news, and for how long.
//!
//! Waiting awake saves a sleeper's way through the kernel when the answer comes at once, and takes the processor from whoever
//! has to give the answer when it does not. Nobody can know beforehand; what has paid off lately is the best guess. A wait in
//! vain halves the time, or, where it takes all of it to hear anything, some in a row end it; once it is down to nothing only
//! every now and then is it tried again.
//!
//! Who waits awake gives way to whoever else is ready on his processor, because that may be the one who has to answer, or one
//! of many who take turns. From one who computes he would not get the processor back before the end of a time slice, so when
//! that has happened he keeps it for some waits.

use std::time::{Duration, Instant};

/// Shorter than this is nothing.
const SPIN_MIN: Duration = Duration::from_micros(2);
/// After so many waits asleep it is tried again; doubled with each try in vain.
const PAUSE_MIN: u32 = 16;
/// It is tried again at least this often.
const PAUSE_MAX: u32 = 1024;
/// Waits for daemons in vain, one after the other, until there are no more.
const DAEMONS_TRIES: u32 = 8;

/// Giving way for longer than this means that somebody computes on this processor: turns of those who talk are shorter.
const TURN_MAX: Duration = Duration::from_micros(200);

/// From where the news come, and so how long it may be worth waiting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reach {
    /// Tasks on this host only.
    Host,
    /// Direct connections to tasks on other hosts, too. Such an answer comes from a task that sleeps, too, at first: shorter
    /// waits would all be in vain, on both sides for ever, although both awake would hear in a fifth of the time.
    Tasks,
    /// The daemons of other hosts. Between a message and its answer there are four to be woken, each of which may cost as
    /// much as it costs here.
    Daemons,
}

impl Reach {
    /// The longest time awake. On one host: about what it costs to be woken on another processor.
    fn longest(self) -> Duration {
        Duration::from_micros(match self {
            Reach::Host => 50,
            Reach::Tasks => 120,
            Reach::Daemons => 250,
        })
    }

    /// The time of a new try.
    fn again(self) -> Duration {
        match self {
            Reach::Host => Duration::from_micros(20),
            Reach::Tasks | Reach::Daemons => self.longest(),
        }
    }

    /// The next time awake after so many in vain, the last one of this length.
    fn after_in_vain(self, misses: u32, last: Duration) -> Duration {
        match self {
            Reach::Host | Reach::Tasks => last / 2,
            // Shorter ones would be in vain for sure as long as the others sleep.
            Reach::Daemons if misses < DAEMONS_TRIES => last,
            Reach::Daemons => Duration::ZERO,
        }
    }
}

/// What has been learnt.
#[derive(Debug)]
pub struct Spin {
    span: Duration,
    /// Waits in vain since one that paid off, or since the pause.
    misses: u32,
    /// Waits until the next try, while the span is nothing.
    pause: u32,
    next_pause: u32,
    /// So many waits awake without giving way, and how many the next time that it costs a time slice.
    keeps: u32,
    next_keeps: u32,
    /// It never waits awake: no other processor is there for whoever answers.
    alone: bool,
    reach: Reach,
}

impl Spin {
    /// Nothing learnt.
    #[must_use]
    pub fn new(reach: Reach) -> Spin {
        // The standard library's count also reads the limits of control groups, which takes as long as all the rest of a
        // task's enrolment.
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

    /// Never awake: whoever answers, or anybody else, needs the processor more.
    #[must_use]
    pub fn never() -> Spin {
        Spin {
            alone: true,
            ..Spin::with_company(Reach::Host)
        }
    }

    /// Nothing learnt, on a machine with more than one processor.
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

    /// How long to wait awake now, and no longer than `span`; `None`: not at all.
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

    /// Lets whoever else is ready on this processor have it, unless that has cost too much lately.
    pub fn give_way(&mut self) {
        if self.gives_way() {
            let before = Instant::now();
            std::thread::yield_now();
            self.gave_way(before.elapsed());
        }
    }

    /// True while waiting awake leaves the processor to others.
    #[must_use]
    pub fn gives_way(&self) -> bool {
        self.keeps == 0
    }

    /// Giving way took so long.
    fn gave_way(&mut self, took: Duration) {
        if took > TURN_MAX {
            self.keeps = self.next_keeps;
            self.next_keeps = (self.next_keeps * 2).min(PAUSE_MAX);
        } else {
            self.next_keeps = (self.next_keeps - 1).max(PAUSE_MIN);
        }
    }

    /// News came after so long. Longer than the budget means that this thread was not running meanwhile.
    pub fn ended(&mut self, after: Duration, budget: Duration) {
        if after <= budget + SPIN_MIN {
            self.paid_off()
        } else {
            self.was_in_vain()
        }
    }

    /// News came after so long, while nobody waited awake.
    pub fn slept(&mut self, after: Duration) {
        if after <= self.reach.longest() {
            self.paid_off();
        }
    }

    fn paid_off(&mut self) {
        (self.span, self.misses) = (self.reach.longest(), 0);
        self.next_pause = PAUSE_MIN;
    }

    /// None came.
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
    fn waits_in_vain_end_soon_and_are_tried_again_now_and_then() {
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
    fn what_pays_off_goes_on() {
        let mut spin = shared_machine();
        for _ in 0..1000 {
            let budget = spin.budget(None, Reach::Host).expect("it paid off");
            assert!((Reach::Host.again()..=Reach::Host.longest()).contains(&budget));
            spin.ended(Duration::from_nanos(300), budget);
        }
    }

    #[test]
    fn beside_somebody_who_computes_giving_way_is_rare_and_comes_back_when_he_has_ended() {
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
    fn with_one_processor_nobody_waits_awake() {
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
    fn no_longer_than_the_caller_wants() {
        assert_eq!(
            shared_machine().budget(Some(Duration::from_micros(3)), Reach::Host),
            Some(Duration::from_micros(3))
        );
    }

    /// Two that ask each other in turn, asleep at first; whether they are awake at the end. An answer takes `way`, and
    /// `waking` more when whoever gives it has to be woken.
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
    fn two_that_sleep_on_different_hosts_find_each_other_awake() {
        assert_eq!(awake_in_the_end(Reach::Tasks, 16, 40), [true; 2]);
        assert_eq!(awake_in_the_end(Reach::Daemons, 50, 150), [true; 2]);
    }

    #[test]
    fn answers_that_come_late_leave_everybody_asleep() {
        assert_eq!(awake_in_the_end(Reach::Daemons, 300, 150), [false; 2]);
    }
}
