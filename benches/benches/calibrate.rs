//! Measures the time of a fixed amount of work that uses no code of Sempa. This time depends only
//! on the processor and on other load of the machine. Results of different machines and times are
//! divided by this time before they are compared.

use divan::{Bencher, black_box};

/// Number of steps of the computation. Each step needs the result of the previous step.
const STEP_COUNT: u64 = 10_000;
/// Number of bytes that are copied in addition to the computation. The copy fits the first-level
/// cache.
const COPY_BYTES: usize = 16 << 10;

fn main() {
    divan::main();
}

#[divan::bench]
fn a_fixed_amount_of_work(bencher: Bencher) {
    let (source, mut destination) = (vec![7u8; COPY_BYTES], vec![0u8; COPY_BYTES]);
    bencher.bench_local(|| {
        let mut x = black_box(1u64);
        for step in 0..STEP_COUNT {
            x = (x ^ step)
                .wrapping_mul(0x9e37_79b9_7f4a_7c15)
                .rotate_left(7);
        }
        black_box(&mut destination).copy_from_slice(black_box(&source));
        x
    });
}
