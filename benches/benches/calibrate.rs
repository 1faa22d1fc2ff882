//! Measures a fixed amount of work that does not use our code, so its time depends only on the
//! processor and its other load. Results of different machines and times become comparable by this
//! time.

use divan::{Bencher, black_box};

/// Number of steps of the computation. Each step needs the result of the previous one.
const STEPS: u64 = 10_000;
/// Bytes that are copied in addition to the computation. The copy fits the first-level cache.
const BYTES: usize = 16 << 10;

fn main() {
    divan::main();
}

#[divan::bench]
fn a_fixed_amount_of_work(bencher: Bencher) {
    let (from, mut to) = (vec![7u8; BYTES], vec![0u8; BYTES]);
    bencher.bench_local(|| {
        let mut x = black_box(1u64);
        for step in 0..STEPS {
            x = (x ^ step)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(7);
        }
        black_box(&mut to).copy_from_slice(black_box(&from));
        x
    });
}
