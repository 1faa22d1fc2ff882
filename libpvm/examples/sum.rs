//! Computes the sum of the squares of many numbers with a master and its workers.
//!
//! A user starts the master. The master spawns workers, which run the same program, and distributes
//! ranges of numbers: each worker gets another range when it has sent the result of its previous
//! range. If a worker ends early, its range is sent to another worker.
//!
//! `cargo run --example sum -- [workers] [numbers]`, while a virtual machine runs (`pvm start`).

use anyhow::{Context, Result, bail};
use libpvm::{Content, Notice, Task, Vm};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

const TAG_WORK: i32 = 1;
const TAG_RESULT: i32 = 2;
/// Number of numbers in one range.
const RANGE_LENGTH: u64 = 100_000;

/// Message from the master to a worker.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Order {
    /// Sum the squares of the numbers `from..to`.
    Sum { from: u64, to: u64 },
    /// Exit: there are no more ranges.
    Done,
}

/// Message from a worker to the master: the sum of the squares of its range.
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
            let mut number = |usual: u64| args.next().map_or(Ok(usual), |arg| arg.parse());
            let (workers, numbers) = (number(3)?, number(1_000_000)?);
            println!("{}", run_master(&vm, u32::try_from(workers)?, numbers)?);
        }
    }
    Ok(vm.exit()?)
}

fn run_worker(vm: &Vm, master: &Task) -> Result<()> {
    loop {
        let (_, order) = vm.recv_value(master.matching().tag(TAG_WORK))?;
        match order {
            Order::Sum { from, to } => {
                let value = (from..to).map(|n| u128::from(n) * u128::from(n)).sum();
                master.send_value(TAG_RESULT, &Sum { value })?;
            }
            Order::Done => return Ok(()),
        }
    }
}

fn run_master(vm: &Vm, workers: u32, numbers: u64) -> Result<u128> {
    let program = std::env::current_exe()?;
    let program = program
        .to_str()
        .context("the path of this program is not text")?;
    let workers = vm.spawner(program).count(workers).start()?.all()?;
    let tids: Vec<_> = workers.iter().map(Task::tid).collect();
    let mut ends = vm.watch_tasks(&tids)?;

    let starts = (0..numbers).step_by(usize::try_from(RANGE_LENGTH)?);
    let mut pieces: Vec<(u64, u64)> = starts
        .map(|from| (from, numbers.min(from + RANGE_LENGTH)))
        .collect();
    let mut idle = workers.clone();
    let mut busy = BTreeMap::new();
    let mut sum = 0;
    loop {
        while !pieces.is_empty()
            && let Some(worker) = idle.pop()
        {
            let (from, to) = pieces.pop().expect("there is one");
            worker.send_value(TAG_WORK, &Order::Sum { from, to })?;
            busy.insert(worker.tid(), (from, to));
        }
        if busy.is_empty() {
            break;
        }
        let message =
            vm.recv_where(|message| message.tag == TAG_RESULT || ends.is_notice_message(message))?;
        if !ends.is_notice_message(&message) {
            sum += message.value::<Sum>()?.value;
            busy.remove(&message.src);
            idle.push(vm.task(message.src));
            continue;
        }
        for notice in ends.decode(&message)? {
            if let Notice::TaskEnded(tid) = notice {
                // The unfinished range of an ended worker is sent to another worker.
                pieces.extend(busy.remove(&tid));
                idle.retain(|worker| worker.tid() != tid);
            }
        }
    }
    if !pieces.is_empty() {
        bail!(
            "all workers have ended and {} pieces are left",
            pieces.len()
        );
    }
    for worker in &workers {
        worker.send_value(TAG_WORK, &Order::Done)?;
    }
    for notice in ends {
        notice?;
    }
    Ok(sum)
}
