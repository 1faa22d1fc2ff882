//! Estimates pi with a master-worker run: `rust-monte-carlo [TASKS] [JOURNAL]`.
//!
//! With `SEMPA_WORK_IN_PROCESS=1` the program needs no virtual machine.

use master_worker::{
    Driver, Failure, Nothing, ProgramOptions, RunHandle, Task, TaskContext, Worker, run_program,
};
use serde::{Deserialize, Serialize};

const POINTS_PER_TASK: u64 = 1_000_000;

/// A batch of random points; the number is the seed.
#[derive(Serialize, Deserialize)]
struct Batch(u64);

impl Task for Batch {
    type Result = u64;
}

#[derive(Serialize, Deserialize)]
struct Pi {
    tasks: u64,
    hits: u64,
}

impl Driver for Pi {
    type Task = Batch;
    type InitData = ();
    type Update = Nothing;
    type Partial = Nothing;

    fn initial_tasks(&mut self, _: &mut RunHandle<'_, Self>) -> Result<Vec<Batch>, Failure> {
        Ok((0..self.tasks).map(Batch).collect())
    }

    fn init_data(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn on_result(&mut self, _: &mut RunHandle<Self>, _: Batch, hits: u64) -> Result<(), Failure> {
        self.hits += hits;
        Ok(())
    }
}

struct Thrower;

impl Worker for Thrower {
    type Task = Batch;
    type InitData = ();
    type Update = Nothing;
    type Partial = Nothing;

    fn new(_data: ()) -> Result<Self, Failure> {
        Ok(Self)
    }

    /// Counts the points within the circle.
    fn execute(&mut self, batch: Batch, _: &mut TaskContext<Self>) -> Result<u64, Failure> {
        let mut state = batch.0 + 1;
        let is_hit = |_: &u64| random(&mut state).hypot(random(&mut state)) < 1.0;
        Ok((0..POINTS_PER_TASK).filter(is_hit).count() as u64)
    }
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
    let tasks = arguments.next().map_or(Ok(100), |text| text.parse())?;
    let mut options = ProgramOptions::new("monte-carlo", 4);
    options.master.journal = arguments.next().map(Into::into);
    options.in_process = std::env::var_os("SEMPA_WORK_IN_PROCESS").is_some();
    let (pi, outcome) = run_program::<Pi, Thrower>(Pi { tasks, hits: 0 }, &options)?;
    let points = tasks * POINTS_PER_TASK;
    println!("pi is about {:.5}", 4.0 * pi.hits as f64 / points as f64);
    println!("{}", outcome.statistics);
    Ok(())
}
