//! The runtime's clock: microseconds that only rise, also when the process wakes up on a host that was started later.

use sempa_proto::Micros;
use std::time::Instant;

/// A leap of the clock while the process waits for its new host is taken for time that passed up to this length, and
/// for another host's clock beyond it.
const LEAP_MAX: Micros = Micros::from_secs(120);

/// Counts from the enrolment on.
#[derive(Debug)]
pub(crate) struct Clock {
    base: Instant,
    offset: Micros,
    last: Micros,
}

impl Clock {
    /// A clock that starts now.
    pub(crate) fn new() -> Clock {
        Clock { base: Instant::now(), offset: Micros(0), last: Micros(0) }
    }

    /// Now; never earlier than what was answered before.
    pub(crate) fn now(&mut self) -> Micros {
        self.at(Instant::now())
    }

    /// As [`Clock::now`], for a process that may have changed hosts since the last look.
    pub(crate) fn now_after_a_move(&mut self) -> Micros {
        let now = Instant::now();
        if self.read(now).since(self.last) > LEAP_MAX {
            (self.base, self.offset) = (now, self.last);
        }
        self.at(now)
    }

    fn read(&self, now: Instant) -> Micros {
        self.offset + Micros(now.saturating_duration_since(self.base).as_micros() as u64)
    }

    fn at(&mut self, now: Instant) -> Micros {
        let time = self.read(now);
        if time < self.last {
            (self.base, self.offset) = (now, self.last);
            return self.last;
        }
        self.last = time;
        time
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn time_goes_on_when_the_new_host_was_started_later() {
        let mut clock = Clock::new();
        let start = clock.base;
        assert_eq!(clock.at(start + Duration::from_secs(100)), Micros::from_secs(100));
        let younger = start + Duration::from_secs(3);
        assert_eq!(clock.at(younger), Micros::from_secs(100));
        assert_eq!(clock.at(younger + Duration::from_secs(2)), Micros::from_secs(102));
    }
}
