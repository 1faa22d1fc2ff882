//! Estimates pi: counts random points of the unit square that lie in the quarter of a circle.
//!
//! `rust-pi-master [WORKERS [PROGRAM]]`
//!
//! The master spawns workers and hands out the work in pieces. A worker gets its next piece when it
//! has sent a result. When a worker ends too early, its piece goes to another one. The points of a
//! piece depend on the number of the piece only, so the result does not depend on the worker.

use anyhow::{Context, Result, bail};
use libpvm::proto::{PvmError, Tid};
use libpvm::{Body, Content, Notice, Task, Vm};
use std::collections::BTreeMap;

/// To a worker: the number of a piece, and how many points it has.
const TAG_WORK: i32 = 1;
/// From a worker: the number of the piece, and how many points are hits.
const TAG_RESULT: i32 = 2;
/// To a worker: there is no more work.
const TAG_DONE: i32 = 3;

const PIECES: i32 = 64;
/// Points in one piece.
const POINTS: i32 = 1_000_000;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let wanted = args.next().map_or(Ok(4), |word| word.parse());
    let wanted = wanted.context("usage: rust-pi-master [WORKERS [PROGRAM]]")?;
    let program = args.next().unwrap_or_else(|| "rust-pi-worker".to_string());

    let vm = Vm::enroll()?;
    println!("{}", lead(&vm, wanted, &program)?);
    Ok(vm.exit()?)
}

/// The workers and their work.
struct Farm {
    /// Workers without a piece.
    idle: Vec<Task>,
    /// The pieces of the others.
    busy: BTreeMap<Tid, i32>,
    /// Pieces that nobody works on.
    todo: Vec<i32>,
}

impl Farm {
    /// Gives a piece to each idle worker, as long as there are pieces.
    fn hand_out(&mut self) -> Result<()> {
        while !self.todo.is_empty()
            && let Some(worker) = self.idle.pop()
        {
            let piece = self.todo.pop().context("there is a piece")?;
            // Items are what programs in C and Fortran read.
            worker.send(TAG_WORK, Body::items(|out| out.int(piece).int(POINTS)))?;
            self.busy.insert(worker.tid(), piece);
        }
        Ok(())
    }
}

fn lead(vm: &Vm, wanted: u32, program: &str) -> Result<String> {
    // Without some of the workers it takes longer. Without any, the first one's error says why.
    let spawned = vm.spawner(program).count(wanted).start()?;
    let workers = spawned.tasks;
    if workers.is_empty() {
        let why = spawned.failed.first().copied();
        return Err(why.unwrap_or(PvmError::BadParam))
            .with_context(|| format!("no worker {program} was started"));
    }
    let tids: Vec<Tid> = workers.iter().map(Task::tid).collect();
    let mut ends = vm.watch_tasks(&tids)?;

    let mut farm = Farm {
        idle: workers.clone(),
        busy: BTreeMap::new(),
        todo: (0..PIECES).collect(),
    };
    let (mut results, mut hits, mut lost) = (0, 0i64, 0);
    while results < PIECES && lost < workers.len() {
        farm.hand_out()?;
        let message =
            vm.recv_where(|message| message.tag == TAG_RESULT || ends.is_notice_message(message))?;
        if !ends.is_notice_message(&message) {
            let mut items = message.items()?;
            let (_piece, found) = (items.int()?, items.int()?);
            hits += i64::from(found);
            results += 1;
            farm.busy.remove(&message.src);
            farm.idle.push(vm.task(message.src));
            continue;
        }
        for notice in ends.decode(&message)? {
            // This comes after the last result of that worker, so no piece counts twice.
            if let Notice::TaskEnded(tid) = notice {
                farm.todo.extend(farm.busy.remove(&tid));
                farm.idle.retain(|worker| worker.tid() != tid);
                lost += 1;
            }
        }
    }
    let missing = PIECES - results;
    if missing > 0 {
        bail!("all workers have ended, {missing} of {PIECES} results are missing");
    }
    for worker in &farm.idle {
        worker.send(TAG_DONE, Body::empty())?;
    }
    let points = i64::from(PIECES) * i64::from(POINTS);
    Ok(format!(
        "pi is about {:.6}: {hits} of {points} points, {lost} of {} workers lost",
        4.0 * hits as f64 / points as f64,
        workers.len()
    ))
}
