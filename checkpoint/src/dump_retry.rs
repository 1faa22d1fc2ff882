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
/// Time after the first attempt at which a dump that still collides fails. Well below the dump
/// timeout of a migration.
pub const COLLISION_TIMEOUT: Micros = Micros::from_secs(30);

/// The retry state of one dump.
#[derive(Clone, Copy, Debug)]
pub struct DumpRetry {
    next_delay_max: Micros,
}

impl Default for DumpRetry {
    fn default() -> DumpRetry {
        DumpRetry {
            next_delay_max: FIRST_DELAY_MAX,
        }
    }
}

impl DumpRetry {
    /// Returns the delay before the next attempt; `None` if the dump must not be retried. `elapsed`
    /// is the time since the first attempt started. `roll` is any random number.
    pub fn next_delay(&mut self, elapsed: Micros, roll: u64) -> Option<Micros> {
        let remaining = COLLISION_TIMEOUT.since(elapsed);
        let delay = Micros(1 + roll % self.next_delay_max.0).min(remaining);
        self.next_delay_max = Micros(self.next_delay_max.0 * 2).min(DELAY_MAX);
        (remaining > Micros(0)).then_some(delay)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Dice(u64);

    impl Dice {
        fn roll(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0 >> 16
        }
    }

    /// Simulates dumps that start at the same moment in one directory. Each attempt runs for
    /// `start` before the engine needs the directory, and then occupies the directory for `hold`.
    /// An attempt that needs an occupied directory collides and is retried. Returns the number of
    /// attempts of each dump. Panics if a dump must not be retried.
    fn attempts(dumps: usize, start: Micros, hold: Micros, seed: u64) -> Vec<u32> {
        let mut dice = Dice(seed);
        let mut waiting: Vec<(Micros, usize, DumpRetry, u32)> = (0..dumps)
            .map(|dump| (start, dump, DumpRetry::default(), 1))
            .collect();
        let (mut attempts_of, mut free_at) = (vec![0; dumps], Micros(0));
        while let Some(at) = (0..waiting.len()).min_by_key(|at| waiting[*at].0) {
            let (now, dump, retry, count) = &mut waiting[at];
            if free_at <= *now {
                free_at = *now + hold;
                attempts_of[*dump] = *count;
                waiting.swap_remove(at);
                continue;
            }
            let delay = retry
                .next_delay(*now, dice.roll())
                .unwrap_or_else(|| panic!("dump {dump} of {dumps} gives up"));
            *now = *now + delay + start;
            *count += 1;
        }
        attempts_of
    }

    /// Two dumps that start at the same moment both succeed within eight attempts.
    #[test]
    fn two_dumps_collide_at_most_eight_times() {
        for seed in 1..200 {
            let taken = attempts(2, Micros::from_millis(30), Micros::from_millis(1), seed);
            assert!(
                taken.iter().all(|count| *count <= 8),
                "{taken:?} (seed {seed})"
            );
        }
    }

    /// 64 concurrent dumps, the maximum, all succeed, even if each occupies the directory for 100
    /// ms.
    #[test]
    fn all_64_concurrent_dumps_succeed() {
        for hold in [1, 10, 100] {
            for seed in 1..20 {
                let taken = attempts(64, Micros::from_millis(30), Micros::from_millis(hold), seed);
                let most = taken.iter().max().copied().unwrap_or(0);
                assert!(most <= 64, "{most} attempts (hold {hold} ms, seed {seed})");
            }
        }
    }

    /// The maximum delay doubles up to its limit, and the last delay ends at the collision timeout.
    #[test]
    fn delays_grow_to_limit_and_end_in_time() {
        let mut retry = DumpRetry::default();
        let longest: Vec<u64> = (0..9)
            .map_while(|_| {
                retry.next_delay(Micros(0), u64::MAX - u64::MAX % retry.next_delay_max.0 - 1)
            })
            .map(|p| p.0)
            .collect();
        assert_eq!(longest[..3], [8_000, 16_000, 32_000]);
        assert_eq!(longest[8], DELAY_MAX.0);
        assert_eq!(
            retry.next_delay(COLLISION_TIMEOUT.since(Micros(5)), 77_777),
            Some(Micros(5)),
            "the last one ends in time"
        );
        assert_eq!(retry.next_delay(COLLISION_TIMEOUT, 1), None);
    }
}
