//! Reproducible pseudo-random numbers for tests.

use crate::faults::tests_all_cases;
use std::time::{SystemTime, UNIX_EPOCH};

/// Environment variable with the seed of tests that run only a sample of their cases.
const SEED_ENV: &str = "SEMPA_TEST_SEED";
const SECONDS_PER_DAY: u64 = 86_400;

/// Returns the seed for this run, and prints it so that a failed run can be repeated.
///
/// Without the environment variable `SEED_ENV` the seed is the number of the day since 1970. All
/// runs on one day test the same sample; a run on the next day tests another sample.
///
/// # Panics
/// The environment variable is not a number.
pub fn print_seed() -> u64 {
    let seed = match std::env::var(SEED_ENV) {
        Ok(text) => text
            .parse()
            .unwrap_or_else(|error| panic!("{SEED_ENV}={text:?}: {error}")),
        Err(_) => SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |elapsed| elapsed.as_secs() / SECONDS_PER_DAY),
    };
    eprintln!("seed: {SEED_ENV}={seed} repeats this sample");
    seed
}

/// Returns `case_count` successive cases, selected by the seed, or all cases if [`tests_all_cases`]
/// is true. Successive seeds select successive cases, so a few days cover all cases.
pub fn sample_cases<T>(cases: impl IntoIterator<Item = T>, case_count: usize, seed: u64) -> Vec<T> {
    let mut cases: Vec<T> = cases.into_iter().collect();
    if !tests_all_cases() && !cases.is_empty() {
        let first_index = (seed as usize).wrapping_mul(case_count) % cases.len();
        cases.rotate_left(first_index);
        cases.truncate(case_count);
    }
    cases
}

/// A xorshift generator of pseudo-random numbers. The same seed gives the same numbers on every
/// machine.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the next random number; it is at least 0 and less than `end`.
    pub fn next_below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 33) as usize % end
    }

    /// Returns `number_count` different random numbers, each less than `end`.
    pub fn choose_different(&mut self, end: usize, number_count: usize) -> Vec<usize> {
        let mut numbers: Vec<usize> = (0..end).collect();
        for i in 0..number_count {
            let swap_index = i + self.next_below(end - i);
            numbers.swap(i, swap_index);
        }
        numbers.truncate(number_count);
        numbers
    }
}
