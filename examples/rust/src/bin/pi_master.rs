//! Estimates pi: counts how many random points of the unit square lie in a quarter of a circle.
//!
//! `rust-pi-master [WORKERS [PROGRAM]]`
//!
//! The master spawns workers and sends them the work in pieces. A worker gets its next piece when
//! it has sent the result of the previous one. If a worker ends before that, its piece is sent to
//! another worker. The points of a piece depend only on the number of the piece, so the result does
//! not depend on the workers.

use anyhow::{Context, Result, bail};
use libpvm::proto::{PvmError, Tid};
use libpvm::{Body, Content, Notice, Task, Vm};
use std::collections::BTreeMap;

/// Tag of messages to a worker, with the number of a piece and the number of its points.
const TAG_WORK: i32 = 1;
/// Tag of messages from a worker, with the number of a piece and the number of its points within
/// the circle.
const TAG_RESULT: i32 = 2;
/// Tag of the message to a worker that there is no more work.
const TAG_DONE: i32 = 3;

const PIECE_COUNT: i32 = 64;
/// Number of points in one piece.
const POINTS_PER_PIECE: i32 = 1_000_000;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let wanted = args.next().map_or(Ok(4), |word| word.parse());
    let wanted = wanted.context("usage: rust-pi-master [WORKERS [PROGRAM]]")?;
    let program = args.next().unwrap_or_else(|| "rust-pi-worker".to_string());

    let vm = Vm::enroll()?;
    println!("{}", run_farm(&vm, wanted, &program)?);
    Ok(vm.exit()?)
}

/// The workers and the pieces that have no result yet.
struct Farm {
    /// Workers that have no piece.
    idle: Vec<Task>,
    /// Pieces that are being computed, by tid of the worker.
    busy: BTreeMap<Tid, i32>,
    /// Numbers of the pieces that no worker has.
    unassigned: Vec<i32>,
}

impl Farm {
    /// Sends a piece to each idle worker until no pieces are left.
    fn assign_pieces(&mut self) -> Result<()> {
        while !self.unassigned.is_empty()
            && let Some(worker) = self.idle.pop()
        {
            let piece = self.unassigned.pop().context("there is a piece")?;
            // The message consists of PVM items, so that workers in C and Fortran can read it.
            worker.send(
                TAG_WORK,
                Body::items(|out| out.int(piece).int(POINTS_PER_PIECE)),
            )?;
            self.busy.insert(worker.tid(), piece);
        }
        Ok(())
    }
}

fn run_farm(vm: &Vm, wanted: u32, program: &str) -> Result<String> {
    // If some workers are missing, the computation only takes longer. If all are missing, the error
    // of the first one is reported.
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
        unassigned: (0..PIECE_COUNT).collect(),
    };
    let (mut results, mut hits, mut lost) = (0, 0i64, 0);
    while results < PIECE_COUNT && lost < workers.len() {
        farm.assign_pieces()?;
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
            // The notice arrives after the last result of the worker, so no piece is counted twice.
            if let Notice::TaskEnded(tid) = notice {
                farm.unassigned.extend(farm.busy.remove(&tid));
                farm.idle.retain(|worker| worker.tid() != tid);
                lost += 1;
            }
        }
    }
    let missing = PIECE_COUNT - results;
    if missing > 0 {
        bail!("all workers have ended, {missing} of {PIECE_COUNT} results are missing");
    }
    for worker in &farm.idle {
        worker.send(TAG_DONE, Body::empty())?;
    }
    let points = i64::from(PIECE_COUNT) * i64::from(POINTS_PER_PIECE);
    Ok(format!(
        "pi is about {:.6}: {hits} of {points} points, {lost} of {} workers lost",
        4.0 * hits as f64 / points as f64,
        workers.len()
    ))
}
