//! Worker that counts random points for `rust-pi-master`, which spawns it. The masters in other
//! languages can spawn it, too.

use anyhow::{Context, Result};
use libpvm::{Body, Content, Vm};

/// Tag of messages from the master, with the number of a piece and the number of its points.
const TAG_WORK: i32 = 1;
/// Tag of messages to the master, with the number of a piece and the number of its points within
/// the circle.
const TAG_RESULT: i32 = 2;
/// Tag of the message from the master that there is no more work.
const TAG_DONE: i32 = 3;

/// Modulus of the random number generator, which replaces `x` by `x * FACTOR % MODULUS`.
const MODULUS: i64 = 2_147_483_647;
/// Multiplier of the random number generator.
const FACTOR: i64 = 48_271;
/// Distance between the seeds of two successive pieces. The seed depends only on the number of the
/// piece.
const SEED_STEP: i64 = 1_000_003;

fn main() -> Result<()> {
    let vm = Vm::enroll()?;
    let master = vm.parent_task().context("no task has started this one")?;
    // The worker must not wait for messages of a master that has ended.
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

/// Returns how many points of a piece lie within the circle around 0 with the radius `MODULUS`.
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
