//! An xorshift random number generator. The seed determines the sequence of numbers.

pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// Returns a number that is uniformly distributed in [0, 1).
    pub(crate) fn next_uniform(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Returns a number that is exponentially distributed with this mean.
    pub(crate) fn next_exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.next_uniform()).ln()
    }
}
