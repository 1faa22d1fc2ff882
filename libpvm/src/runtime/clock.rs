//! The runtime's clock: microseconds that only rise, also when the process wakes up on a host that was started later.

use nix::time::{ClockId, clock_gettime};
use sempa_proto::Micros;
use std::time::Duration;

/// A leap of the clock while the process waits for its new host is taken for time that passed up to this length, and
/// for another host's clock beyond it.
const LEAP_MAX: Micros = Micros::from_secs(120);

/// Counts from the enrolment on.
#[derive(Debug)]
pub(crate) struct Clock {
    base: Duration,
    offset: Micros,
    last: Micros,
}

impl Clock {
    /// A clock that starts now.
    pub(crate) fn new() -> Clock {
        Clock {
            base: time_of(ClockId::CLOCK_MONOTONIC),
            offset: Micros(0),
            last: Micros(0),
        }
    }

    /// Now; never earlier than what was answered before.
    pub(crate) fn now(&mut self) -> Micros {
        self.at(time_of(ClockId::CLOCK_MONOTONIC))
    }

    /// Now or a few milliseconds ago, for a fraction of the cost; never earlier than what [`Clock::now`] answered before.
    pub(crate) fn about(&self) -> Micros {
        self.read(time_of(ClockId::CLOCK_MONOTONIC_COARSE))
            .max(self.last)
    }

    /// As [`Clock::now`], for a process that may have changed hosts since the last look.
    pub(crate) fn now_after_a_move(&mut self) -> Micros {
        let now = time_of(ClockId::CLOCK_MONOTONIC);
        if self.read(now).since(self.last) > LEAP_MAX {
            (self.base, self.offset) = (now, self.last);
        }
        self.at(now)
    }

    fn read(&self, now: Duration) -> Micros {
        self.offset + Micros(now.saturating_sub(self.base).as_micros() as u64)
    }

    fn at(&mut self, now: Duration) -> Micros {
        let time = self.read(now);
        if time < self.last {
            (self.base, self.offset) = (now, self.last);
            return self.last;
        }
        self.last = time;
        time
    }
}

fn time_of(clock: ClockId) -> Duration {
    clock_gettime(clock)
        .expect("every kernel has these clocks")
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cheap_time_is_never_earlier_than_what_was_told() {
        let mut clock = Clock::new();
        for _ in 0..1000 {
            let now = clock.now();
            assert!(clock.about() >= now);
        }
    }

    #[test]
    fn time_goes_on_when_the_new_host_was_started_later() {
        let mut clock = Clock::new();
        let start = clock.base;
        assert_eq!(
            clock.at(start + Duration::from_secs(100)),
            Micros::from_secs(100)
        );
        let younger = start + Duration::from_secs(3);
        assert_eq!(clock.at(younger), Micros::from_secs(100));
        assert_eq!(
            clock.at(younger + Duration::from_secs(2)),
            Micros::from_secs(102)
        );
    }
}
