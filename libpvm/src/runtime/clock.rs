//! Monotonic clock of the runtime, in microseconds. The time never decreases, even if the process
//! migrates to a host that booted later.

use nix::time::{ClockId, clock_gettime};
use sempa_proto::Micros;
use std::time::Duration;

/// Maximum forward jump of the kernel's clock that counts as elapsed time while the process waits
/// for its next daemon. A larger jump means that the process now reads another host's clock.
const CLOCK_JUMP_MAX: Micros = Micros::from_secs(120);

/// Clock that starts at zero when the runtime is created.
#[derive(Debug)]
pub(crate) struct Clock {
    kernel_time_at_start: Duration,
    migration_offset: Micros,
    last_reading: Micros,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self {
            kernel_time_at_start: kernel_time(ClockId::CLOCK_MONOTONIC),
            migration_offset: Micros(0),
            last_reading: Micros(0),
        }
    }

    /// Returns the time; never less than an earlier result.
    pub(crate) fn now(&mut self) -> Micros {
        self.advance_to(kernel_time(ClockId::CLOCK_MONOTONIC))
    }

    /// Returns the last result of [`Clock::now`]. The runtime's timers read the clock at least
    /// every few seconds.
    #[inline]
    pub(crate) fn last_reading(&self) -> Micros {
        self.last_reading
    }

    /// Returns a time that may be a few milliseconds old, but is never before the last result of
    /// [`Clock::now`]. This call takes a fraction of the time that [`Clock::now`] takes.
    pub(crate) fn coarse_now(&self) -> Micros {
        self.elapsed_at(kernel_time(ClockId::CLOCK_MONOTONIC_COARSE))
            .max(self.last_reading)
    }

    /// Returns the time like [`Clock::now`], for a process that may have migrated since the last
    /// call. A jump of the kernel's clock by more than [`CLOCK_JUMP_MAX`] does not count as elapsed
    /// time.
    pub(crate) fn now_after_migration(&mut self) -> Micros {
        let kernel_now = kernel_time(ClockId::CLOCK_MONOTONIC);
        if self.elapsed_at(kernel_now).since(self.last_reading) > CLOCK_JUMP_MAX {
            (self.kernel_time_at_start, self.migration_offset) = (kernel_now, self.last_reading);
        }
        self.advance_to(kernel_now)
    }

    fn elapsed_at(&self, kernel_now: Duration) -> Micros {
        self.migration_offset
            + Micros(
                kernel_now
                    .saturating_sub(self.kernel_time_at_start)
                    .as_micros() as u64,
            )
    }

    fn advance_to(&mut self, kernel_now: Duration) -> Micros {
        let elapsed_time = self.elapsed_at(kernel_now);
        if elapsed_time < self.last_reading {
            (self.kernel_time_at_start, self.migration_offset) = (kernel_now, self.last_reading);
            return self.last_reading;
        }
        self.last_reading = elapsed_time;
        elapsed_time
    }
}

fn kernel_time(clock: ClockId) -> Duration {
    clock_gettime(clock)
        .expect("every kernel has these clocks")
        .into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coarse_time_is_never_before_last_exact_time() {
        let mut clock = Clock::new();
        for _ in 0..1000 {
            let now = clock.now();
            assert!(clock.coarse_now() >= now);
        }
    }

    /// The clock continues from its last reading when the new host has a shorter uptime.
    #[test]
    fn time_continues_on_host_that_booted_later() {
        let mut clock = Clock::new();
        let start = clock.kernel_time_at_start;
        assert_eq!(
            clock.advance_to(start + Duration::from_secs(100)),
            Micros::from_secs(100)
        );
        let time_on_new_host = start + Duration::from_secs(3);
        assert_eq!(clock.advance_to(time_on_new_host), Micros::from_secs(100));
        assert_eq!(
            clock.advance_to(time_on_new_host + Duration::from_secs(2)),
            Micros::from_secs(102)
        );
    }
}
