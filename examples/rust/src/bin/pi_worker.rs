//! Counts random points for `rust-pi-master`, which starts it. The masters in other languages can
//! use it as well.

use anyhow::{Context, Result};
use libpvm::{Body, Content, Vm};

/// From the master: the number of a piece, and how many points it has.
const TAG_WORK: i32 = 1;
/// To the master: the number of the piece, and how many points are hits.
const TAG_RESULT: i32 = 2;
/// From the master: there is no more work.
const TAG_DONE: i32 = 3;

/// The generator of random numbers: `x` becomes `x * FACTOR % MODULUS`.
const MODULUS: i64 = 2_147_483_647;
const FACTOR: i64 = 48_271;
/// The seed of a piece depends on its number only.
const SEED_STEP: i64 = 1_000_003;

fn main() -> Result<()> {
    let vm = Vm::enroll()?;
    let master = vm.parent_task().context("no task has started this one")?;
    // No worker waits for a master that is lost.
    let end = vm.watch_tasks(&[master.tid()])?;
    loop {
        let message = vm.recv_where(|message| {
            [TAG_WORK, TAG_DONE].contains(&message.tag) || end.is_notice_message(message)
        })?;
        if message.tag == TAG_DONE || end.is_notice_message(&message) {
            break;
        }
        let mut items = message.items()?;
        let (piece, points) = (items.int()?, items.int()?);
        let hits = hits_in(piece, points);
        master.send(TAG_RESULT, Body::items(|out| out.int(piece).int(hits)))?;
    }
    Ok(vm.exit()?)
}

/// Returns how many points of a piece lie in the quarter of a circle around 0 with the radius
/// `MODULUS`.
fn hits_in(piece: i32, points: i32) -> i32 {
    let mut y = 1 + i64::from(piece) * SEED_STEP;
    let mut hits = 0;
    for _ in 0..points {
        let x = y * FACTOR % MODULUS;
        y = x * FACTOR % MODULUS;
        if x * x + y * y < MODULUS * MODULUS {
            hits += 1;
        }
    }
    hits
}
