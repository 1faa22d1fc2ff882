//! The clock of leases: CLOCK_BOOTTIME, which the daemon and the tasker of a machine share.
//!
//! `std::time::Instant` is CLOCK_MONOTONIC, which stops while the machine sleeps. A lease
//! runs out on the other hosts while this machine sleeps, so its clock must include that time.

use nix::time::ClockId;
use sempa_proto::Micros;
use std::time::Duration;

/// Returns the time since the machine was booted, including the time for which it slept.
#[must_use]
pub fn now() -> Micros {
    let time = ClockId::CLOCK_BOOTTIME
        .now()
        .expect("Linux has this clock since 2.6.39");
    Micros(u64::try_from(Duration::from(time).as_micros()).unwrap_or(u64::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn boot_clock_does_not_go_back() {
        let (first, second) = (now(), now());
        assert!(first > Micros(0) && second >= first);
    }
}
