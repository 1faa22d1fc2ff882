//! A master-worker program for tests with workers that leave and join: `work-churn WORKERS TASKS
//! GRAIN_MS` prints what the driver has seen as a line of JSON.
//!
//! Each task waits for about GRAIN_MS milliseconds. Its result is its number, and the time that its
//! worker waited for it.

use master_worker::{
    Driver, Failure, Nothing, PoolEvent, ProgramOptions, RunHandle, Task, TaskContext, Worker,
    run_program,
};
use nix::sys::resource::{UsageWho, getrusage};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

#[derive(Serialize, Deserialize)]
struct Wait {
    number: u64,
    milliseconds: u64,
}

impl Task for Wait {
    type Result = Waited;
}

#[derive(Serialize, Deserialize)]
struct Waited {
    number: u64,
    /// Time between the worker's previous task and this one; `None` for its first task.
    gap_us: Option<u64>,
}

#[derive(Serialize, Deserialize)]
struct Churn {
    tasks: u64,
    grain_ms: u64,
    numbers: BTreeSet<u64>,
    /// Results of tasks that had a result before.
    repeated_results: u64,
    ready_workers: u64,
    lost_workers: u64,
    quarantined: u64,
    gaps_us: Vec<u64>,
}

impl Driver for Churn {
    type Task = Wait;
    type InitData = ();
    type Update = Nothing;
    type Partial = Nothing;

    fn initial_tasks(&mut self, _run: &mut RunHandle<'_, Self>) -> Result<Vec<Wait>, Failure> {
        // Durations between 80 and 120 % of the grain, so that workers do not end together.
        let task = |number| Wait {
            number,
            milliseconds: self.grain_ms * (80 + number * 7 % 41) / 100,
        };
        Ok((0..self.tasks).map(task).collect())
    }

    fn init_data(&mut self) -> Result<(), Failure> {
        Ok(())
    }

    fn on_result(
        &mut self,
        _run: &mut RunHandle<'_, Self>,
        task: Wait,
        waited: Waited,
    ) -> Result<(), Failure> {
        let is_new = waited.number == task.number && self.numbers.insert(task.number);
        self.repeated_results += u64::from(!is_new);
        self.gaps_us.extend(waited.gap_us);
        Ok(())
    }

    fn on_quarantined(
        &mut self,
        _run: &mut RunHandle<'_, Self>,
        _task: Wait,
        _history: &[master_worker::AttemptRecord],
    ) -> Result<(), Failure> {
        self.quarantined += 1;
        Ok(())
    }

    fn on_pool_event(
        &mut self,
        _run: &mut RunHandle<'_, Self>,
        event: &PoolEvent,
    ) -> Result<(), Failure> {
        match event {
            PoolEvent::WorkerReady { .. } => self.ready_workers += 1,
            PoolEvent::WorkerLost { .. } => self.lost_workers += 1,
            _ => {}
        }
        Ok(())
    }
}

struct Waiter {
    previous_end: Option<Instant>,
}

impl Worker for Waiter {
    type Task = Wait;
    type InitData = ();
    type Update = Nothing;
    type Partial = Nothing;

    fn new(_data: ()) -> Result<Self, Failure> {
        Ok(Self { previous_end: None })
    }

    fn execute(
        &mut self,
        task: Wait,
        _context: &mut TaskContext<'_, '_, Self>,
    ) -> Result<Waited, Failure> {
        let gap = self.previous_end.map(|end| end.elapsed());
        std::thread::sleep(Duration::from_millis(task.milliseconds));
        self.previous_end = Some(Instant::now());
        Ok(Waited {
            number: task.number,
            gap_us: gap.map(|gap| u64::try_from(gap.as_micros())).transpose()?,
        })
    }
}

/// Returns the value that a share of the sorted values does not exceed; `None` without values.
fn quantile(sorted: &[u64], share: f64) -> Option<u64> {
    let index = (sorted.len() as f64 * share) as usize;
    sorted.get(index.min(sorted.len().checked_sub(1)?)).copied()
}

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let mut next_number = |name: &str| -> Result<u64, Failure> {
        let text = arguments
            .next()
            .ok_or_else(|| format!("{name} is missing"))?;
        Ok(text.parse()?)
    };
    // A worker has no arguments.
    let (workers, tasks, grain_ms) = if master_worker::is_worker() {
        (0, 0, 0)
    } else {
        (
            next_number("WORKERS")?,
            next_number("TASKS")?,
            next_number("GRAIN_MS")?,
        )
    };
    let churn = Churn {
        tasks,
        grain_ms,
        numbers: BTreeSet::new(),
        repeated_results: 0,
        ready_workers: 0,
        lost_workers: 0,
        quarantined: 0,
        gaps_us: Vec::new(),
    };
    let mut options = ProgramOptions::new("churn", u32::try_from(workers)?);
    options.master.settings.retry.delay = 10_000;
    let (mut churn, outcome) = run_program::<Churn, Waiter>(churn, &options)?;
    churn.gaps_us.sort_unstable();
    let report = serde_json::json!({
        "results": churn.numbers.len(),
        "repeated_results": churn.repeated_results,
        "ready_workers": churn.ready_workers,
        "lost_workers": churn.lost_workers,
        "quarantined": churn.quarantined,
        "gap_median_us": quantile(&churn.gaps_us, 0.5),
        "gap_p99_us": quantile(&churn.gaps_us, 0.99),
        "master_kib_max": getrusage(UsageWho::RUSAGE_SELF)?.max_rss(),
        "average_workers": outcome.statistics.average_workers,
        "wall_s": outcome.statistics.wall_s,
    });
    println!("{report}");
    Ok(())
}
