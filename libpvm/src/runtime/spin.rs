//! Whether to wait awake for news, and for how long.
//!
//! Waiting awake saves a sleeper's way through the kernel when the answer comes at once, and takes the processor from whoever
//! has to give the answer when it does not. Nobody can know beforehand; what has paid off lately is the best guess. A wait in
//! vain halves the time, and once it is down to nothing only every now and then is it tried again.

use std::time::Duration;

/// The longest time awake: about what it costs to be woken on another processor.
const SPIN_MAX: Duration = Duration::from_micros(50);
/// The longest time awake with direct connections to other hosts, where an answer comes from a task that sleeps, too, at
/// first: shorter waits would all be in vain, on both sides for ever, although both awake would hear in a fifth of the time.
const SPIN_FAR_MAX: Duration = Duration::from_micros(120);
/// The time of a new try, without such connections.
const SPIN_TRY: Duration = Duration::from_micros(20);
/// Shorter than this is nothing.
const SPIN_MIN: Duration = Duration::from_micros(2);
/// After so many waits asleep it is tried again; doubled with each try in vain.
const PAUSE_MIN: u32 = 16;
/// It is tried again at least this often.
const PAUSE_MAX: u32 = 1024;

/// What has been learnt.
#[derive(Debug)]
pub(crate) struct Spin {
    span: Duration,
    /// Waits until the next try, while the span is nothing.
    pause: u32,
    next_pause: u32,
    /// No other processor is there for whoever answers.
    alone: bool,
    /// Answers may come from other hosts.
    far: bool,
}

impl Spin {
    /// Nothing learnt.
    pub(crate) fn new() -> Spin {
        // The standard library's count also reads the limits of control groups, which takes as long as all the rest of a
        // task's enrolment.
        let alone = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0))
            .is_ok_and(|set| (0..nix::sched::CpuSet::count()).filter(|cpu| set.is_set(*cpu) == Ok(true)).count() == 1);
        Spin { span: SPIN_MAX, pause: PAUSE_MIN, next_pause: PAUSE_MIN, alone, far: false }
    }

    /// How long to wait awake now; `None`: not at all. `far`: there are connections to other hosts.
    pub(crate) fn budget(&mut self, span: Option<Duration>, far: bool) -> Option<Duration> {
        self.far = far;
        if self.alone {
            return None;
        }
        if self.span.is_zero() {
            self.pause -= 1;
            if self.pause > 0 {
                return None;
            }
            self.span = if far { SPIN_FAR_MAX } else { SPIN_TRY };
        }
        Some(span.map_or(self.span, |span| span.min(self.span)))
    }

    /// News came after so long. Longer than the budget means that this thread was not running meanwhile.
    pub(crate) fn ended(&mut self, after: Duration, budget: Duration) {
        if after <= budget + SPIN_MIN { self.paid_off() } else { self.was_in_vain() }
    }

    fn paid_off(&mut self) {
        self.span = if self.far { SPIN_FAR_MAX } else { SPIN_MAX };
        self.next_pause = PAUSE_MIN;
    }

    /// None came.
    pub(crate) fn was_in_vain(&mut self) {
        self.span /= 2;
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
        Spin { alone: false, ..Spin::new() }
    }

    #[test]
    fn waits_in_vain_end_soon_and_are_tried_again_now_and_then() {
        let mut spin = shared_machine();
        let mut awake = Duration::ZERO;
        for _ in 0..10_000 {
            if let Some(budget) = spin.budget(None, false) {
                awake += budget;
                spin.was_in_vain();
            }
        }
        assert!(awake < Duration::from_micros(1000), "{awake:?}");
        assert!((0..=PAUSE_MAX).any(|_| spin.budget(None, false).is_some()), "never tried again");
    }

    #[test]
    fn what_pays_off_goes_on() {
        let mut spin = shared_machine();
        for _ in 0..1000 {
            let budget = spin.budget(None, false).expect("it paid off");
            assert!((SPIN_TRY..=SPIN_MAX).contains(&budget));
            spin.ended(Duration::from_nanos(300), budget);
        }
    }

    #[test]
    fn with_one_processor_nobody_waits_awake() {
        assert_eq!(Spin { alone: true, ..Spin::new() }.budget(None, false), None);
    }

    #[test]
    fn no_longer_than_the_caller_wants() {
        assert_eq!(shared_machine().budget(Some(Duration::from_micros(3)), false), Some(Duration::from_micros(3)));
    }

    #[test]
    fn two_that_sleep_on_different_hosts_find_each_other_awake() {
        /// An answer's way, and what is added when whoever gives it, or hears it, has to be woken.
        const WAY: Duration = Duration::from_micros(16);
        const WAKING: Duration = Duration::from_micros(40);
        let mut both = [shared_machine(), shared_machine()];
        both.iter_mut().for_each(|spin| (0..8).for_each(|_| spin.was_in_vain()));
        let mut awake = [false; 2];
        for round in 0..2000 {
            let (i, other) = (round % 2, (round + 1) % 2);
            let answer = if awake[other] { WAY } else { WAY + WAKING };
            let budget = both[i].budget(None, true);
            awake[i] = budget.is_some_and(|budget| answer <= budget);
            match budget {
                Some(budget) if awake[i] => both[i].ended(answer, budget),
                Some(_) => both[i].was_in_vain(),
                None => {}
            }
        }
        assert_eq!(awake, [true; 2]);
    }
}
