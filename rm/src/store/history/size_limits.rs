//! Limits the total size of the stored decisions. A limit on their number is not sufficient,
//! because the record of a spawn with very many tasks or attempts is large.

use super::{Batch, Change, History, Table};
use sempa_proto::rm::DecisionKind;
use sempa_proto::text::truncate;
use std::collections::BTreeMap;

/// Maximum total size of the decisions in bytes. Beyond it, the oldest decisions are dropped.
pub const DECISIONS_BYTES_MAX: u64 = 32 << 20;
/// Maximum number of placement attempts stored per spawn. Of more attempts, the first and the last
/// ones are stored.
pub const ATTEMPTS_MAX: usize = 16;
/// Maximum size of a program's name in bytes.
pub const PROGRAM_BYTES_MAX: usize = 512;

/// Encoded size in bytes of each stored decision, and the total.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct DecisionSizes {
    sizes: BTreeMap<u64, u64>,
    total: u64,
}

impl DecisionSizes {
    /// Sets the size of the decision with this number; `None` removes it.
    pub(super) fn set(&mut self, number: u64, bytes: Option<usize>) {
        let before = match bytes {
            Some(bytes) => self.sizes.insert(number, bytes as u64),
            None => self.sizes.remove(&number),
        };
        self.total = self.total + bytes.unwrap_or(0) as u64 - before.unwrap_or(0);
    }
}

/// Drops placement attempts in the middle of the list beyond [`ATTEMPTS_MAX`].
pub(super) fn limit_attempts(mut what: DecisionKind) -> DecisionKind {
    if let DecisionKind::Spawn { attempts, .. } = &mut what
        && attempts.len() > ATTEMPTS_MAX
    {
        let last = attempts.len() - ATTEMPTS_MAX / 2;
        attempts.drain(ATTEMPTS_MAX / 2..last);
    }
    what
}

/// Truncates the name of a program to [`PROGRAM_BYTES_MAX`].
pub(super) fn limit_program_name(name: &str) -> String {
    truncate(name, PROGRAM_BYTES_MAX).to_string()
}

impl History {
    /// Drops the oldest decisions as long as the total size exceeds the limit. Appends their
    /// deletion to the batch.
    pub(super) fn drop_oldest_decisions(&mut self, batch: &mut Batch) {
        for Change { key, value, .. } in batch
            .iter()
            .filter(|change| change.table == Table::Decisions)
        {
            self.decision_bytes.set(*key, value.as_ref().map(Vec::len));
        }
        while self.decision_bytes.total > DECISIONS_BYTES_MAX && self.decisions.len() > 1 {
            let Some((key, _)) = self.decisions.pop_first() else {
                return;
            };
            self.decision_bytes.set(key, None);
            // Appended at the end, because the batch may contain an earlier change of the same
            // entry.
            batch.push(Change {
                table: Table::Decisions,
                key,
                value: None,
            });
        }
    }
}
