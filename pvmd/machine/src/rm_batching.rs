//! Batches messages to a resource manager that need not wake it immediately.
//!
//! A program that spawns by placement leases starts and ends hundreds of tasks a second, and each
//! task causes three messages to the resource manager: slot used, task started, task ended. Waking
//! the resource manager for each of them would take processor time from the tasks that are being
//! started, and encoding each event would delay the daemon's next replies.
//!
//! No request waits for these messages. It suffices that the resource manager learns of used slots
//! before a lease is exhausted, because requests that are decided one by one use no lease. While
//! slots of a lease are being used, the messages are therefore kept, not yet encoded, until one of
//! these happens:
//!
//! - `BATCH_DELAY_MAX` has passed since the first one.
//! - `BATCH_ITEMS_MAX` of them are waiting.
//! - `UNREPORTED_SLOTS_MAX` used slots have not been reported.
//! - Any other message to the resource manager is due. Batching never changes the order of its
//!   messages.

use super::{Machine, Timer};
use sempa_proto::event::EventKind;
use sempa_proto::host::PendingItem;
use sempa_proto::sm::{LEASE_HOSTS_MAX, SM_PLACEMENT_LEASE_USED, unpack_placement_lease_use};
use sempa_proto::task::ToTask;
use sempa_proto::{Micros, Tid};

/// Time after the use of a leased slot during which another use is likely.
const LEASE_USE_WINDOW: Micros = Micros::from_secs(1);
/// Largest number of used slots that may be unreported. A resource manager issues a new lease when
/// half of a lease is used.
const UNREPORTED_SLOTS_MAX: usize = LEASE_HOSTS_MAX / 2;
/// Longest delay of a batched message.
const BATCH_DELAY_MAX: Micros = Micros::from_millis(100);
/// Largest number of messages in a batch.
const BATCH_ITEMS_MAX: usize = 256;

#[derive(Debug)]
enum BatchedItem {
    /// The event with this number in the event log.
    Event(u64),
    /// A control message of a daemon.
    Control(ToTask),
}

/// The batch, and the use of leases that keeps batching enabled.
#[derive(Debug, Default)]
pub(super) struct RmBatch {
    /// The resource manager whose lease was used last, and the end of the batching window.
    lease_in_use: Option<(Tid, Micros)>,
    /// Number of used slots that were batched since the last report that was sent without delay.
    unreported_slots: usize,
    /// Receiver of the batched messages.
    receiver: Tid,
    items: Vec<BatchedItem>,
    /// True if a timer for the batch is running.
    timer_running: bool,
    /// Total number of messages batched so far.
    #[cfg(test)]
    pub(super) batched_total: usize,
}

/// True for events about single tasks, which may be batched.
pub(super) fn is_batchable(kind: &EventKind) -> bool {
    matches!(
        kind,
        EventKind::Placed { .. } | EventKind::TaskStarted { .. } | EventKind::TaskEnded { .. }
    )
}

/// Returns the number of used slots that a daemon reports to the issuer of a lease, if the item is
/// such a report.
fn used_slots(item: &ToTask) -> Option<usize> {
    let ToTask::Deliver { message, .. } = item else {
        return None;
    };
    let is_taken = message.tag == SM_PLACEMENT_LEASE_USED && message.src.is_daemon();
    is_taken
        .then(|| unpack_placement_lease_use(message.body.clone()).ok())
        .flatten()
        .map(|taken| taken.tasks.len())
}

impl Machine {
    /// True while events for this task, a resource manager on this host, are batched.
    pub(super) fn is_batching_for(&self, dst: Tid) -> bool {
        self.rm_batch
            .lease_in_use
            .is_some_and(|(rm, until)| rm == dst && self.now < until)
            && self.tasks.get(dst).is_some()
    }

    pub(super) fn batch_event(&mut self, dst: Tid, number: u64) {
        self.add_to_batch(dst, BatchedItem::Event(number));
    }

    /// Adds a report of used slots to the batch, unless too many slots are unreported. Any other
    /// item is returned: it must be sent now, and the batch for its receiver was sent before.
    pub(super) fn batch_for_rm(&mut self, dst: Tid, item: ToTask) -> Option<ToTask> {
        if let Some(slots) = used_slots(&item).filter(|_| self.tasks.get(dst).is_some()) {
            self.rm_batch.lease_in_use = Some((dst, self.now + LEASE_USE_WINDOW));
            self.rm_batch.unreported_slots += slots;
            if self.rm_batch.unreported_slots < UNREPORTED_SLOTS_MAX {
                self.add_to_batch(dst, BatchedItem::Control(item));
                return None;
            }
            self.rm_batch.unreported_slots = 0;
        }
        if dst == self.rm_batch.receiver {
            self.flush_rm_batch();
        }
        Some(item)
    }

    fn add_to_batch(&mut self, dst: Tid, item: BatchedItem) {
        if dst != self.rm_batch.receiver {
            self.flush_rm_batch();
            self.rm_batch.receiver = dst;
        }
        self.rm_batch.items.push(item);
        #[cfg(test)]
        {
            self.rm_batch.batched_total += 1;
        }
        if self.rm_batch.items.len() >= BATCH_ITEMS_MAX {
            self.flush_rm_batch();
        } else if !std::mem::replace(&mut self.rm_batch.timer_running, true) {
            self.set_timer(BATCH_DELAY_MAX, Timer::RmBatch);
        }
    }

    /// Sends the batch, because the delay of its first message has expired.
    pub(super) fn handle_rm_batch_timer(&mut self) {
        self.rm_batch.timer_running = false;
        self.flush_rm_batch();
    }

    /// Sends the batch. Events for a receiver that has ended meanwhile are dropped.
    fn flush_rm_batch(&mut self) {
        let receiver = self.rm_batch.receiver;
        for waiting in std::mem::take(&mut self.rm_batch.items) {
            let item = match waiting {
                BatchedItem::Control(item) => Some(item),
                BatchedItem::Event(number) => self.event_for_subscriber(receiver, number),
            };
            if let Some(item) = item {
                self.route_to_task(receiver, PendingItem::Control(item));
            }
        }
    }
}
