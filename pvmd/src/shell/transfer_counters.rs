//! Numbers of bytes that the transfers of this host have sent, for progress reports.

use sempa_proto::MigrationId;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Number of the bytes that one transfer has sent so far. The transfer's thread adds to it.
pub(crate) type TransferCounter = Arc<AtomicU64>;

/// The counters of the running transfers, by migration.
#[derive(Clone, Debug, Default)]
pub(crate) struct TransferCounters(Arc<Mutex<BTreeMap<MigrationId, Weak<AtomicU64>>>>);

impl TransferCounters {
    /// Returns the counter of a migration. The counter is removed when its last transfer has
    /// dropped it.
    pub(crate) fn counter(&self, migration: MigrationId) -> TransferCounter {
        let mut counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counters.retain(|_, counter| counter.strong_count() > 0);
        if let Some(counter) = counters.get(&migration).and_then(Weak::upgrade) {
            return counter;
        }
        let counter = TransferCounter::default();
        counters.insert(migration, Arc::downgrade(&counter));
        counter
    }

    /// Returns the number of bytes that the transfers of a migration have sent; 0 if none is
    /// running.
    pub(crate) fn sent_bytes(&self, migration: MigrationId) -> u64 {
        let counters = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let counter = counters.get(&migration).and_then(Weak::upgrade);
        counter.map_or(0, |counter| counter.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_end_with_their_transfers() {
        let counters = TransferCounters::default();
        let images = counters.counter(MigrationId(1));
        let memory = counters.counter(MigrationId(1));
        images.fetch_add(5, Ordering::Relaxed);
        memory.fetch_add(2, Ordering::Relaxed);
        assert_eq!(counters.sent_bytes(MigrationId(1)), 7);
        assert_eq!(counters.sent_bytes(MigrationId(2)), 0);
        drop((images, memory));
        assert_eq!(counters.sent_bytes(MigrationId(1)), 0);
    }
}
