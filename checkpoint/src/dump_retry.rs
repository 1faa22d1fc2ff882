//! Delays between the attempts of a dump that collides with other dumps in the same working
//! directory.
//!
//! The delays grow exponentially and are random, so that two colliding dumps are unlikely to
//! collide again. Retrying ends after [`COLLISION_TIMEOUT`].

use sempa_proto::Micros;

/// Maximum of the first delay. The maximum doubles with each further delay, up to [`DELAY_MAX`].
const FIRST_DELAY_MAX: Micros = Micros::from_millis(8);
/// Maximum of every delay.
const DELAY_MAX: Micros = Micros::from_millis(500);
/// Time after the first attempt at which a dump that still collides fails. The time is well below
/// the dump timeout of a migration.
pub const COLLISION_TIMEOUT: Micros = Micros::from_secs(30);

/// The retry state of one dump.
#[derive(Clone, Copy, Debug)]
pub struct DumpRetry {
    next_delay_max: Micros,
}

impl Default for DumpRetry {
    fn default() -> Self {
        Self {
            next_delay_max: FIRST_DELAY_MAX,
        }
    }
}

impl DumpRetry {
    /// Returns the delay before the next attempt; `None` if the dump must not be retried. `elapsed`
    /// is the time since the first attempt started. `random_number` is any random number.
    pub fn next_delay(&mut self, elapsed: Micros, random_number: u64) -> Option<Micros> {
        let remaining_time = COLLISION_TIMEOUT.since(elapsed);
        let delay = Micros(1 + random_number % self.next_delay_max.0).min(remaining_time);
        self.next_delay_max = Micros(self.next_delay_max.0 * 2).min(DELAY_MAX);
        (remaining_time > Micros(0)).then_some(delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct NumberGenerator(u64);

    impl NumberGenerator {
        fn next_number(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 >> 16
        }
    }

    /// Simulates dumps that start at the same moment in one directory. Each attempt runs for
    /// `start_time` before the engine needs the directory, and then occupies the directory for
    /// `occupation_time`. An attempt that needs an occupied directory collides and is retried.
    /// Returns the number of attempts of each dump. Panics if a dump must not be retried any more.
    fn count_attempts(
        dump_count: usize,
        start_time: Micros,
        occupation_time: Micros,
        seed: u64,
    ) -> Vec<u32> {
        let mut generator = NumberGenerator(seed);
        let mut pending_attempts: Vec<(Micros, usize, DumpRetry, u32)> = (0..dump_count)
            .map(|dump| (start_time, dump, DumpRetry::default(), 1))
            .collect();
        let (mut attempt_counts, mut free_at) = (vec![0; dump_count], Micros(0));
        while let Some(index) =
            (0..pending_attempts.len()).min_by_key(|index| pending_attempts[*index].0)
        {
            let (now, dump, retry, attempt_count) = &mut pending_attempts[index];
            if free_at <= *now {
                free_at = *now + occupation_time;
                attempt_counts[*dump] = *attempt_count;
                pending_attempts.swap_remove(index);
                continue;
            }
            let delay = retry
                .next_delay(*now, generator.next_number())
                .unwrap_or_else(|| panic!("dump {dump} of {dump_count} gives up"));
            *now = *now + delay + start_time;
            *attempt_count += 1;
        }
        attempt_counts
    }

    /// Two dumps that start at the same moment both succeed within eight attempts.
    #[test]
    fn two_dumps_collide_at_most_eight_times() {
        for seed in 1..200 {
            let attempt_counts =
                count_attempts(2, Micros::from_millis(30), Micros::from_millis(1), seed);
            assert!(
                attempt_counts.iter().all(|count| *count <= 8),
                "{attempt_counts:?} (seed {seed})"
            );
        }
    }

    /// 64 concurrent dumps, the maximum, all succeed, even if each occupies the directory for 100
    /// ms.
    #[test]
    fn all_64_concurrent_dumps_succeed() {
        for occupation_ms in [1, 10, 100] {
            for seed in 1..20 {
                let attempt_counts = count_attempts(
                    64,
                    Micros::from_millis(30),
                    Micros::from_millis(occupation_ms),
                    seed,
                );
                let attempts_max = attempt_counts.iter().max().copied().unwrap_or(0);
                assert!(
                    attempts_max <= 64,
                    "{attempts_max} attempts (hold {occupation_ms} ms, seed {seed})"
                );
            }
        }
    }

    /// The maximum delay doubles up to its limit, and the last delay ends at the collision timeout.
    #[test]
    fn delays_grow_to_limit_and_end_in_time() {
        let mut retry = DumpRetry::default();
        let longest_delays: Vec<u64> = (0..9)
            .map_while(|_| {
                retry.next_delay(Micros(0), u64::MAX - u64::MAX % retry.next_delay_max.0 - 1)
            })
            .map(|p| p.0)
            .collect();
        assert_eq!(longest_delays[..3], [8_000, 16_000, 32_000]);
        assert_eq!(longest_delays[8], DELAY_MAX.0);
        assert_eq!(
            retry.next_delay(COLLISION_TIMEOUT.since(Micros(5)), 77_777),
            Some(Micros(5)),
            "the last one ends in time"
        );
        assert_eq!(retry.next_delay(COLLISION_TIMEOUT, 1), None);
    }
}
