//! Limits the total size of the stored decisions. A limit on their number is not sufficient,
//! because the record of a spawn with very many tasks or attempts is large.

use super::{Batch, Change, History, Table};
use sempa_proto::rm::DecisionKind;
use sempa_proto::text::truncate;
use std::collections::BTreeMap;

/// Maximum total size of the decisions in bytes. If the total size is greater, the oldest decisions
/// are removed.
pub const DECISIONS_BYTES_MAX: u64 = 32 << 20;
/// Maximum number of placement attempts that are stored per spawn. If there are more attempts, the
/// first and the last ones are stored.
pub const ATTEMPTS_MAX: usize = 16;
/// Maximum size of a program's name in bytes.
pub const PROGRAM_BYTES_MAX: usize = 512;

/// Encoded size in bytes of each stored decision, and the total of these sizes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct DecisionSizes {
    bytes_by_number: BTreeMap<u64, u64>,
    total_bytes: u64,
}

impl DecisionSizes {
    /// Sets the size of the decision with this number. `None` removes the entry.
    pub(super) fn set_bytes(&mut self, number: u64, bytes: Option<usize>) {
        let previous_bytes = match bytes {
            Some(bytes) => self.bytes_by_number.insert(number, bytes as u64),
            None => self.bytes_by_number.remove(&number),
        };
        self.total_bytes =
            self.total_bytes + bytes.unwrap_or(0) as u64 - previous_bytes.unwrap_or(0);
    }
}

/// Removes placement attempts from the middle of the list until [`ATTEMPTS_MAX`] remain.
pub(super) fn truncate_attempts(mut decision: DecisionKind) -> DecisionKind {
    if let DecisionKind::Spawn { attempts, .. } = &mut decision
        && attempts.len() > ATTEMPTS_MAX
    {
        let end = attempts.len() - ATTEMPTS_MAX / 2;
        attempts.drain(ATTEMPTS_MAX / 2..end);
    }
    decision
}

/// Truncates the name of a program to [`PROGRAM_BYTES_MAX`] bytes.
pub(super) fn limit_program_name(name: &str) -> String {
    truncate(name, PROGRAM_BYTES_MAX).to_string()
}

impl History {
    /// Removes the oldest decisions as long as the total size exceeds the limit. Appends their
    /// deletion to the batch.
    pub(super) fn drop_oldest_decisions(&mut self, batch: &mut Batch) {
        for Change { key, value, .. } in batch
            .iter()
            .filter(|change| change.table == Table::Decisions)
        {
            self.decision_sizes
                .set_bytes(*key, value.as_ref().map(Vec::len));
        }
        while self.decision_sizes.total_bytes > DECISIONS_BYTES_MAX && self.decisions.len() > 1 {
            let Some((key, _)) = self.decisions.pop_first() else {
                return;
            };
            self.decision_sizes.set_bytes(key, None);
            // The deletion is appended at the end, because the batch may contain an earlier change
            // of the same entry.
            batch.push(Change {
                table: Table::Decisions,
                key,
                value: None,
            });
        }
    }
}
