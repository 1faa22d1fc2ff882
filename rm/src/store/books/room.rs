//! How many bytes decisions take. Their number is bounded, and most are small; a spawn of very many tasks, or one that was tried
//! again and again, is not.

use super::{Batch, Books, Change, Sheet};
use sempa_proto::rm::Decided;
use sempa_proto::text::cut;
use std::collections::BTreeMap;

/// Bytes of all decisions that are kept; of more, the oldest go.
pub const DECISIONS_BYTES_MAX: u64 = 32 << 20;
/// Searches for a place that are kept of one spawn: the first and the last ones.
pub const ATTEMPTS_MAX: usize = 16;
/// Bytes of a program's name that are kept.
pub const PROGRAM_BYTES_MAX: usize = 512;

/// The bytes of each decision, as it is written.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Room {
    sizes: BTreeMap<u64, u64>,
    all: u64,
}

impl Room {
    /// A decision is written with so many bytes, or goes.
    pub(super) fn put(&mut self, number: u64, bytes: Option<usize>) {
        let before = match bytes {
            Some(bytes) => self.sizes.insert(number, bytes as u64),
            None => self.sizes.remove(&number),
        };
        self.all = self.all + bytes.unwrap_or(0) as u64 - before.unwrap_or(0);
    }
}

/// What is kept of a decision.
pub(super) fn shortened(mut what: Decided) -> Decided {
    if let Decided::Spawn { attempts, .. } = &mut what
        && attempts.len() > ATTEMPTS_MAX
    {
        let last = attempts.len() - ATTEMPTS_MAX / 2;
        attempts.drain(ATTEMPTS_MAX / 2..last);
    }
    what
}

/// What is kept of the name of a program.
pub(super) fn program(name: &str) -> String {
    cut(name, PROGRAM_BYTES_MAX).to_string()
}

impl Books {
    /// The oldest decisions go when all together have too many bytes.
    pub(super) fn make_room(&mut self, batch: &mut Batch) {
        for Change { key, value, .. } in batch
            .iter()
            .filter(|change| change.sheet == Sheet::Decisions)
        {
            self.room.put(*key, value.as_ref().map(Vec::len));
        }
        while self.room.all > DECISIONS_BYTES_MAX && self.decisions.len() > 1 {
            let Some((key, _)) = self.decisions.pop_first() else {
                return;
            };
            self.room.put(key, None);
            // Behind what the batch may say of it before.
            batch.push(Change {
                sheet: Sheet::Decisions,
                key,
                value: None,
            });
        }
    }
}
