//! Batches messages to a resource manager that need not wake it immediately.
//!
//! A program that spawns by placement leases starts and ends hundreds of tasks a second, and each
//! task causes three messages to the resource manager: slot used, task started, task ended. Waking
//! the resource manager for each message would take processor time from the tasks that are being
//! started, and encoding each event would delay the daemon's next replies.
//!
//! No request waits for these messages. It suffices that the resource manager learns of used slots
//! before a lease is exhausted, because requests that are decided one by one use no lease. While
//! slots of a lease are being used, the messages are therefore stored, not yet encoded, until one
//! of these happens:
//!
//! - `BATCH_DELAY_MAX` has passed since the first message of the batch.
//! - The batch has `BATCH_ITEMS_MAX` messages.
//! - `UNREPORTED_SLOTS_MAX` used slots have not been reported.
//! - Any other message to the resource manager is due. Batching never changes the order of its
//!   messages.

use super::{Machine, Timer};
use sempa_proto::event::EventKind;
use sempa_proto::host::PendingItem;
use sempa_proto::sm::{LEASE_HOSTS_MAX, SM_PLACEMENT_LEASE_USED, unpack_placement_lease_use};
use sempa_proto::task::ToTask;
use sempa_proto::{Micros, Tid};

/// Time after the use of a leased slot in which further uses are likely.
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

/// Messages to the resource manager that are batched. Messages are batched only for some time after
/// a placement lease was used; the time of the last use is recorded here.
#[derive(Debug, Default)]
pub(super) struct RmBatch {
    /// The resource manager whose lease was used last, and the time at which its messages stop
    /// being batched.
    last_lease_use: Option<(Tid, Micros)>,
    /// Number of used slots in batched reports since a report was last sent without delay.
    unreported_slots: usize,
    /// Receiver of the batched messages.
    receiver: Tid,
    items: Vec<BatchedItem>,
    /// True if a timer for the batch is running.
    is_timer_set: bool,
    /// Number of messages that this daemon has batched since its start.
    #[cfg(test)]
    pub(super) batched_item_count: usize,
}

/// True for the events that spawns by a placement lease cause: the placement, the start and the end
/// of tasks. Only these events may be batched.
pub(super) fn is_batchable(kind: &EventKind) -> bool {
    matches!(
        kind,
        EventKind::Placed { .. } | EventKind::TaskStarted { .. } | EventKind::TaskEnded { .. }
    )
}

/// Returns the number of used slots in a daemon's report to the issuer of a lease; `None` if the
/// item is not such a report.
fn used_slots(item: &ToTask) -> Option<usize> {
    let ToTask::Deliver { message, .. } = item else {
        return None;
    };
    let is_use_report = message.tag == SM_PLACEMENT_LEASE_USED && message.src.is_daemon();
    is_use_report
        .then(|| unpack_placement_lease_use(message.body.clone()).ok())
        .flatten()
        .map(|lease_use| lease_use.tasks.len())
}

impl Machine {
    /// True while messages to the task `dst`, a resource manager on this host, are batched.
    pub(super) fn is_batching_for(&self, dst: Tid) -> bool {
        self.rm_batch
            .last_lease_use
            .is_some_and(|(rm, window_end)| rm == dst && self.now < window_end)
            && self.tasks.get(dst).is_some()
    }

    pub(super) fn add_event_to_batch(&mut self, dst: Tid, event_number: u64) {
        self.add_to_batch(dst, BatchedItem::Event(event_number));
    }

    /// Adds a report of used slots to the batch, unless too many slots are unreported. Any other
    /// item is returned, after the batch for its receiver was sent; the caller must send the item.
    pub(super) fn batch_for_rm(&mut self, dst: Tid, item: ToTask) -> Option<ToTask> {
        if let Some(slots) = used_slots(&item).filter(|_| self.tasks.get(dst).is_some()) {
            self.rm_batch.last_lease_use = Some((dst, self.now + LEASE_USE_WINDOW));
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
            self.rm_batch.batched_item_count += 1;
        }
        if self.rm_batch.items.len() >= BATCH_ITEMS_MAX {
            self.flush_rm_batch();
        } else if !std::mem::replace(&mut self.rm_batch.is_timer_set, true) {
            self.set_timer(BATCH_DELAY_MAX, Timer::RmBatchDue);
        }
    }

    /// Sends the batch when the delay of its first message has expired.
    pub(super) fn handle_rm_batch_timer(&mut self) {
        self.rm_batch.is_timer_set = false;
        self.flush_rm_batch();
    }

    /// Sends the batch. Events for a receiver that has ended meanwhile are dropped.
    fn flush_rm_batch(&mut self) {
        let receiver = self.rm_batch.receiver;
        for batched_item in std::mem::take(&mut self.rm_batch.items) {
            let item = match batched_item {
                BatchedItem::Control(item) => Some(item),
                BatchedItem::Event(event_number) => {
                    self.event_for_subscriber(receiver, event_number)
                }
            };
            if let Some(item) = item {
                self.route_to_task(receiver, PendingItem::Control(item));
            }
        }
    }
}
