//! Computes the sum of the squares of many numbers with a master and its workers.
//!
//! A user starts the master. The master spawns workers, which run the same program, and distributes
//! ranges of numbers: each worker gets its next range when it has sent the result of the previous
//! range. If a worker ends early, its range is sent to another worker.
//!
//! `cargo run --example sum -- [workers] [numbers]`, while a virtual machine runs (`pvm start`).

use anyhow::{Context, Result, bail};
use libpvm::{Content, Notice, Task, Vm};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

const TAG_WORK: i32 = 1;
const TAG_RESULT: i32 = 2;
/// Number of integers in one range.
const RANGE_LEN: u64 = 100_000;

/// Message from the master to a worker.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum WorkerMessage {
    /// Command to sum the squares of the numbers in a half-open range.
    Sum { start: u64, end: u64 },
    /// Command to exit, because there are no more ranges.
    Done,
}

/// Message from a worker to the master: the sum of the squares of the worker's range.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Sum {
    value: u128,
}

fn main() -> Result<()> {
    let vm = Vm::enroll()?;
    match vm.parent_task() {
        Some(master) => run_worker(&vm, &master)?,
        None => {
            let mut args = std::env::args().skip(1);
            let mut parse_argument =
                |default_value: u64| args.next().map_or(Ok(default_value), |arg| arg.parse());
            let (worker_count, number_count) = (parse_argument(3)?, parse_argument(1_000_000)?);
            println!(
                "{}",
                run_master(&vm, u32::try_from(worker_count)?, number_count)?
            );
        }
    }
    Ok(vm.exit()?)
}

fn run_worker(vm: &Vm, master: &Task) -> Result<()> {
    loop {
        let (_, worker_message) = vm.recv_value(master.matching().tag(TAG_WORK))?;
        match worker_message {
            WorkerMessage::Sum { start, end } => {
                let value = (start..end).map(|n| u128::from(n) * u128::from(n)).sum();
                master.send_value(TAG_RESULT, &Sum { value })?;
            }
            WorkerMessage::Done => return Ok(()),
        }
    }
}

fn run_master(vm: &Vm, workers: u32, number_count: u64) -> Result<u128> {
    let program = std::env::current_exe()?;
    let program = program
        .to_str()
        .context("the path of this program is not text")?;
    let workers = vm.spawner(program).count(workers).start()?.all()?;
    let tids: Vec<_> = workers.iter().map(Task::tid).collect();
    let mut end_notices = vm.watch_tasks(&tids)?;

    let range_starts = (0..number_count).step_by(usize::try_from(RANGE_LEN)?);
    let mut unassigned_ranges: Vec<(u64, u64)> = range_starts
        .map(|start| (start, number_count.min(start + RANGE_LEN)))
        .collect();
    let mut idle_workers = workers.clone();
    let mut assigned_ranges = BTreeMap::new();
    let mut sum = 0;
    loop {
        while !unassigned_ranges.is_empty()
            && let Some(worker) = idle_workers.pop()
        {
            let (start, end) = unassigned_ranges.pop().expect("there is one");
            worker.send_value(TAG_WORK, &WorkerMessage::Sum { start, end })?;
            assigned_ranges.insert(worker.tid(), (start, end));
        }
        if assigned_ranges.is_empty() {
            break;
        }
        let message = vm.recv_where(|message| {
            message.tag == TAG_RESULT || end_notices.is_notice_message(message)
        })?;
        if !end_notices.is_notice_message(&message) {
            sum += message.value::<Sum>()?.value;
            assigned_ranges.remove(&message.src);
            idle_workers.push(vm.task(message.src));
            continue;
        }
        for notice in end_notices.decode(&message)? {
            if let Notice::TaskEnded(tid) = notice {
                // The unfinished range of an ended worker is sent to another worker.
                unassigned_ranges.extend(assigned_ranges.remove(&tid));
                idle_workers.retain(|worker| worker.tid() != tid);
            }
        }
    }
    if !unassigned_ranges.is_empty() {
        bail!(
            "all workers have ended and {} pieces are left",
            unassigned_ranges.len()
        );
    }
    for worker in &workers {
        worker.send_value(TAG_WORK, &WorkerMessage::Done)?;
    }
    for notice in end_notices {
        notice?;
    }
    Ok(sum)
}
