//! A fixed amount of work that depends only on the processor and its other load, not on our code.
//! It makes figures of different machines and times comparable.

use divan::{Bencher, black_box};

/// Steps of a chain in which each depends on the one before.
const STEPS: u64 = 10_000;
/// Bytes that are copied in addition: as many as a message that fits the first-level cache.
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
