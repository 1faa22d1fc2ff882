//! Worker that counts random points for `rust-pi-master`, which spawns this worker. The `pi`
//! masters in other languages can spawn this worker, too.

use anyhow::{Context, Result};
use libpvm::{Body, Content, Vm};

/// Tag of messages from the master, with the number of a piece and the number of its points.
const TAG_WORK: i32 = 1;
/// Tag of messages to the master, with the number of a piece and the number of its points within
/// the circle.
const TAG_RESULT: i32 = 2;
/// Tag of the message from the master that ends this worker, because there is no more work.
const TAG_DONE: i32 = 3;

/// Modulus of the random number generator, which replaces `x` by `x * MULTIPLIER % MODULUS`.
const MODULUS: i64 = 2_147_483_647;
/// Multiplier of the random number generator.
const MULTIPLIER: i64 = 48_271;
/// Distance between the seeds of two successive pieces. The seed depends only on the number of the
/// piece.
const SEED_STEP: i64 = 1_000_003;

fn main() -> Result<()> {
    let vm = Vm::enroll()?;
    let master = vm.parent_task().context("no task has started this one")?;
    // The worker must not wait for messages of a master that has ended.
    let end_notice = vm.watch_tasks(&[master.tid()])?;
    loop {
        let message = vm.recv_where(|message| {
            [TAG_WORK, TAG_DONE].contains(&message.tag) || end_notice.is_notice_message(message)
        })?;
        if message.tag == TAG_DONE || end_notice.is_notice_message(&message) {
            break;
        }
        let mut items = message.items()?;
        let (piece, point_count) = (items.read_int()?, items.read_int()?);
        let hit_count = count_hits(piece, point_count);
        master.send(
            TAG_RESULT,
            Body::items(|out| out.pack_int(piece).pack_int(hit_count)),
        )?;
    }
    Ok(vm.exit()?)
}

/// Returns how many points of a piece lie within the circle with the radius `MODULUS` around the
/// origin.
fn count_hits(piece: i32, point_count: i32) -> i32 {
    let mut y = 1 + i64::from(piece) * SEED_STEP;
    let mut hit_count = 0;
    for _ in 0..point_count {
        let x = y * MULTIPLIER % MODULUS;
        y = x * MULTIPLIER % MODULUS;
        if x * x + y * y < MODULUS * MODULUS {
            hit_count += 1;
        }
    }
    hit_count
}
