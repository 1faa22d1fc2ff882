//! Limits the size of the decisions. Their number is limited, and most are small, but a spawn of
//! very many tasks, or one with very many attempts, is not.

use super::{Batch, History, Change, Table};
use sempa_proto::rm::DecisionKind;
use sempa_proto::text::truncate;
use std::collections::BTreeMap;

/// Maximum total size of the decisions in bytes. Beyond it, the oldest are dropped.
pub const DECISIONS_BYTES_MAX: u64 = 32 << 20;
/// Maximum number of placement attempts kept per spawn: the first and the last ones.
pub const ATTEMPTS_MAX: usize = 16;
/// Maximum size of a program's name in bytes.
pub const PROGRAM_BYTES_MAX: usize = 512;

/// Sizes of the decisions in bytes, as written.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct DecisionSizes {
    sizes: BTreeMap<u64, u64>,
    total: u64,
}

impl DecisionSizes {
    /// Sets the size of a decision; `None` removes it.
    pub(super) fn set(&mut self, number: u64, bytes: Option<usize>) {
        let before = match bytes {
            Some(bytes) => self.sizes.insert(number, bytes as u64),
            None => self.sizes.remove(&number),
        };
        self.total = self.total + bytes.unwrap_or(0) as u64 - before.unwrap_or(0);
    }
}

/// Drops attempts of a decision beyond the limit.
pub(super) fn limit_attempts(mut what: DecisionKind) -> DecisionKind {
    if let DecisionKind::Spawn { attempts, .. } = &mut what
        && attempts.len() > ATTEMPTS_MAX
    {
        let last = attempts.len() - ATTEMPTS_MAX / 2;
        attempts.drain(ATTEMPTS_MAX / 2..last);
    }
    what
}

/// Truncates the name of a program to its limit.
pub(super) fn limit_program_name(name: &str) -> String {
    truncate(name, PROGRAM_BYTES_MAX).to_string()
}

impl History {
    /// Drops the oldest decisions while all together exceed the limit.
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
            // After any change of the same entry in the batch.
            batch.push(Change {
                table: Table::Decisions,
                key,
                value: None,
            });
        }
    }
}
