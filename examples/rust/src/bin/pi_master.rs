//! Estimates pi: counts how many random points of the unit square lie in a quarter of a circle.
//!
//! `rust-pi-master [WORKERS [PROGRAM]]`
//!
//! The master spawns workers and divides the work into pieces. A worker gets its next piece when it
//! has sent the result of the previous piece. If a worker ends before it has sent a result, its
//! piece is sent to another worker. The points of a piece depend only on the number of the piece,
//! so the result does not depend on the workers.

use anyhow::{Context, Result, bail};
use libpvm::proto::{PvmError, Tid};
use libpvm::{Body, Content, Notice, Task, Vm};
use std::collections::BTreeMap;

/// Tag of messages to a worker, with the number of a piece and the number of its points.
const TAG_WORK: i32 = 1;
/// Tag of messages from a worker, with the number of a piece and the number of its points within
/// the circle.
const TAG_RESULT: i32 = 2;
/// Tag of the message that ends a worker, because there is no more work.
const TAG_DONE: i32 = 3;

const PIECE_COUNT: i32 = 64;
/// Number of points in one piece.
const POINTS_PER_PIECE: i32 = 1_000_000;

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let worker_count = args.next().map_or(Ok(4), |arg| arg.parse());
    let worker_count = worker_count.context("usage: rust-pi-master [WORKERS [PROGRAM]]")?;
    let program = args.next().unwrap_or_else(|| "rust-pi-worker".to_string());

    let vm = Vm::enroll()?;
    println!("{}", run_master(&vm, worker_count, &program)?);
    Ok(vm.exit()?)
}

/// The workers and the pieces that have no result yet.
struct PieceAssignment {
    /// Workers that have no piece.
    idle_workers: Vec<Task>,
    /// Pieces that are being computed, by tid of the worker.
    assigned_pieces: BTreeMap<Tid, i32>,
    /// Numbers of the pieces that no worker has.
    unassigned_pieces: Vec<i32>,
}

impl PieceAssignment {
    /// Sends a piece to each idle worker while there are unassigned pieces.
    fn assign_pieces(&mut self) -> Result<()> {
        while !self.unassigned_pieces.is_empty()
            && let Some(worker) = self.idle_workers.pop()
        {
            let piece = self.unassigned_pieces.pop().context("there is a piece")?;
            // The message consists of PVM items, so that workers in C and Fortran can read the
            // message.
            worker.send(
                TAG_WORK,
                Body::items(|out| out.pack_int(piece).pack_int(POINTS_PER_PIECE)),
            )?;
            self.assigned_pieces.insert(worker.tid(), piece);
        }
        Ok(())
    }
}

fn run_master(vm: &Vm, worker_count: u32, program: &str) -> Result<String> {
    // If some workers are missing, the computation only takes longer. If all workers are missing,
    // the error of the first worker is reported.
    let spawn_outcome = vm.spawner(program).count(worker_count).start()?;
    let workers = spawn_outcome.tasks;
    if workers.is_empty() {
        let first_error = spawn_outcome.failed.first().copied();
        return Err(first_error.unwrap_or(PvmError::BadParam))
            .with_context(|| format!("no worker {program} was started"));
    }
    let tids: Vec<Tid> = workers.iter().map(Task::tid).collect();
    let mut end_notices = vm.watch_tasks(&tids)?;

    let mut assignment = PieceAssignment {
        idle_workers: workers.clone(),
        assigned_pieces: BTreeMap::new(),
        unassigned_pieces: (0..PIECE_COUNT).collect(),
    };
    let (mut result_count, mut hit_count, mut ended_worker_count) = (0, 0i64, 0);
    while result_count < PIECE_COUNT && ended_worker_count < workers.len() {
        assignment.assign_pieces()?;
        let message = vm.recv_where(|message| {
            message.tag == TAG_RESULT || end_notices.is_notice_message(message)
        })?;
        if !end_notices.is_notice_message(&message) {
            let mut items = message.items()?;
            let (_piece, piece_hit_count) = (items.read_int()?, items.read_int()?);
            hit_count += i64::from(piece_hit_count);
            result_count += 1;
            assignment.assigned_pieces.remove(&message.src);
            assignment.idle_workers.push(vm.task(message.src));
            continue;
        }
        for notice in end_notices.decode(&message)? {
            // The notice arrives after the last result of the worker, so no piece is counted twice.
            if let Notice::TaskEnded(tid) = notice {
                assignment
                    .unassigned_pieces
                    .extend(assignment.assigned_pieces.remove(&tid));
                assignment.idle_workers.retain(|worker| worker.tid() != tid);
                ended_worker_count += 1;
            }
        }
    }
    let missing_result_count = PIECE_COUNT - result_count;
    if missing_result_count > 0 {
        bail!(
            "all workers have ended, {missing_result_count} of {PIECE_COUNT} results are missing"
        );
    }
    for worker in &assignment.idle_workers {
        worker.send(TAG_DONE, Body::empty())?;
    }
    let point_count = i64::from(PIECE_COUNT) * i64::from(POINTS_PER_PIECE);
    Ok(format!(
        "pi is about {:.6}: {hit_count} of {point_count} points, {ended_worker_count} of {} workers lost",
        4.0 * hit_count as f64 / point_count as f64,
        workers.len()
    ))
}
