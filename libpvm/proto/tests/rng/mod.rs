//! Reproducible random numbers for tests. Other crates' tests include this file, too.

/// A small generator (xorshift). The same seed gives the same sequence.
#[derive(Debug)]
pub(crate) struct Rng(pub(crate) u64);

impl Rng {
    /// Returns a pseudorandom number that is less than `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}
