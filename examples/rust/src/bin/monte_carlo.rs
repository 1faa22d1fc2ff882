//! Estimates pi with a master-worker run: `rust-monte-carlo [TASKS] [JOURNAL]`.
//!
//! With `SEMPA_WORK_IN_PROCESS=1` the program needs no virtual machine.

use master_worker::{Failure, ProgramOptions, map};

const POINTS_PER_TASK: u64 = 1_000_000;

/// Counts the random points within the circle.
fn count_hits(seed: u64) -> Result<u64, Failure> {
    let mut state = seed + 1;
    let is_hit = |_: &u64| random(&mut state).hypot(random(&mut state)) < 1.0;
    Ok((0..POINTS_PER_TASK).filter(is_hit).count() as u64)
}

/// Returns a number from 0 to 1 (splitmix64).
fn random(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mixed = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let tasks: u64 = arguments.next().map_or(Ok(100), |text| text.parse())?;
    let mut options = ProgramOptions::new("monte-carlo", 4);
    options.master.journal = arguments.next().map(Into::into);
    options.in_process = std::env::var_os("SEMPA_WORK_IN_PROCESS").is_some();
    let outcome = map((0..tasks).collect(), &options, count_hits)?;
    let hits: u64 = outcome.results.into_iter().sum::<Result<_, _>>()?;
    let points = tasks * POINTS_PER_TASK;
    println!("pi is about {:.5}", 4.0 * hits as f64 / points as f64);
    println!("{}", outcome.run.statistics);
    Ok(())
}
