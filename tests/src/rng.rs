//! Reproducible pseudo-random numbers for tests.

use crate::faults::is_full;
use std::time::{SystemTime, UNIX_EPOCH};

/// Environment variable with the seed of tests that try a sample of their cases.
const SEED_ENV: &str = "SEMPA_TEST_SEED";
const SECONDS_PER_DAY: u64 = 86_400;

/// Returns the seed for this run, and prints it so that a failed run can be repeated.
///
/// Without the environment variable `SEED_ENV` the seed is the number of the day. All runs on one
/// day try the same sample; on the next day the sample is another one.
///
/// # Panics
/// The environment variable is not a number.
pub fn seed() -> u64 {
    let seed = match std::env::var(SEED_ENV) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|error| panic!("{SEED_ENV}={text:?}: {error}")),
        Err(_) => SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_secs() / SECONDS_PER_DAY),
    };
    eprintln!("seed: {SEED_ENV}={seed} repeats this sample");
    seed
}

/// Returns `count` successive cases, selected by the seed; all cases if all are requested.
/// Successive seeds select successive cases, so a few days cover all cases.
pub fn sample<T>(cases: impl IntoIterator<Item = T>, count: usize, seed: u64) -> Vec<T> {
    let mut cases: Vec<T> = cases.into_iter().collect();
    if !is_full() && !cases.is_empty() {
        let first = (seed as usize).wrapping_mul(count) % cases.len();
        cases.rotate_left(first);
        cases.truncate(count);
    }
    cases
}

/// A xorshift generator of pseudo-random numbers. The same seed gives the same numbers on every
/// machine.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the next number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % limit
    }

    /// Returns `count` different random numbers below `limit`.
    pub fn choose(&mut self, limit: usize, count: usize) -> Vec<usize> {
        let mut all: Vec<usize> = (0..limit).collect();
        for i in 0..count {
            let other = i + self.below(limit - i);
            all.swap(i, other);
        }
        all.truncate(count);
        all
    }
}
