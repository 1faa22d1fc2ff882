//! The lease: how long the tasks of a host may run after the last heartbeat of their daemon that
//! the master has acknowledged.
//!
//! All times count from the *sending* of that heartbeat, so the host's times are never later than
//! the master's, which count from its arrival. The order of the times makes sure that a task has
//! ended before anything takes its place:
//!
//! | part of the lease | default | who | what |
//! | --- | --- | --- | --- |
//! | 0.6 | 6 s | tasker | freezes the tasks; they continue if the lease is renewed |
//! | 0.8 | 8 s | tasker | ends the tasks |
//! | 1.0 | 10 s | master | declares the host lost |
//! | 1.2 | 12 s | master | starts copies of the tasks elsewhere |
//!
//! Lease clocks count CLOCK_BOOTTIME, which includes the time for which the machine sleeps.
//!
//! The tasks of a virtual machine with a single host are only frozen: no other host takes their
//! place, so they may continue after their daemon hung or their machine slept.

use crate::ids::Micros;

/// Number of heartbeats that a daemon sends within a lease.
pub const HEARTBEATS_PER_LEASE: u64 = 10;

/// Time at which tasks are ended that are only frozen.
pub const NEVER: Micros = Micros(u64::MAX);

fn tenths(lease: Micros, count: u64) -> Micros {
    Micros(lease.0 / 10 * count)
}

/// Returns the interval between two heartbeats.
#[must_use]
pub fn heartbeat_interval(lease: Micros) -> Micros {
    Micros((lease.0 / HEARTBEATS_PER_LEASE).max(1))
}

/// Returns the time from the last acknowledged heartbeat until the tasks are frozen.
#[must_use]
pub fn freeze_delay(lease: Micros) -> Micros {
    tenths(lease, 6)
}

/// Returns the time from the last acknowledged heartbeat until the tasks are ended.
#[must_use]
pub fn kill_delay(lease: Micros) -> Micros {
    tenths(lease, 8)
}

/// Returns the time from the last heartbeat that the master has received until copies of the tasks
/// may run elsewhere.
#[must_use]
pub fn replacement_delay(lease: Micros) -> Micros {
    tenths(lease, 12)
}

/// Returns the time from the declaration that a host is lost until copies of its tasks may run
/// elsewhere, if the host was silent for a whole lease.
#[must_use]
pub fn replacement_margin(lease: Micros) -> Micros {
    replacement_delay(lease).since(lease)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_end_before_they_are_replaced() {
        let default_lease = Micros::from_secs(10);
        let times = [freeze_delay, kill_delay, replacement_delay].map(|delay| delay(default_lease));
        assert_eq!(times, [6, 8, 12].map(Micros::from_secs));
        assert_eq!(replacement_margin(default_lease), Micros::from_secs(2));
        for lease in [200, 3000, 3_600_000].map(Micros::from_millis) {
            assert!(heartbeat_interval(lease) < freeze_delay(lease));
            assert!(freeze_delay(lease) < kill_delay(lease) && kill_delay(lease) < lease);
            assert!(lease < replacement_delay(lease));
        }
    }
}
