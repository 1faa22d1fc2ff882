//! Bounded queues to threads that write slowly, for example to a disk or to the journal.
//!
//! The sender never waits: if the queue is full, the item is counted and dropped.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Interval at which `join` checks whether the thread has ended.
const JOIN_POLL_INTERVAL: Duration = Duration::from_millis(2);

/// Sending end of the queue of a writing thread. A clone is cheap and uses the same queue.
#[derive(Clone, Debug)]
pub struct WriteQueue<T> {
    /// An item `None` makes the thread end.
    items: SyncSender<Option<T>>,
    dropped_count: Arc<AtomicU64>,
}

/// The receiving end of a [`WriteQueue`], in the writing thread.
#[derive(Debug)]
pub struct QueuedItems<T> {
    items: Receiver<Option<T>>,
    dropped_count: Arc<AtomicU64>,
}

/// The thread that writes the items of a [`WriteQueue`].
#[derive(Debug)]
pub struct WriteThread<T> {
    items: SyncSender<Option<T>>,
    thread: JoinHandle<()>,
}

/// Creates a queue of at most `items_max` items, and a thread `name` that runs `write` with the
/// receiving end of the queue.
///
/// # Errors
/// The thread cannot be started.
pub fn spawn_writer<T: Send + 'static>(
    name: &str,
    items_max: usize,
    write: impl FnOnce(QueuedItems<T>) + Send + 'static,
) -> io::Result<(WriteQueue<T>, WriteThread<T>)> {
    let (queue, queued_items) = write_queue(items_max);
    let thread = std::thread::Builder::new()
        .name(name.into())
        .spawn(move || write(queued_items))?;
    let end_sender = queue.items.clone();
    Ok((
        queue,
        WriteThread {
            items: end_sender,
            thread,
        },
    ))
}

pub(crate) fn write_queue<T>(items_max: usize) -> (WriteQueue<T>, QueuedItems<T>) {
    let (sender, items) = sync_channel(items_max);
    let dropped_count = Arc::new(AtomicU64::new(0));
    let queue = WriteQueue {
        items: sender,
        dropped_count: dropped_count.clone(),
    };
    (
        queue,
        QueuedItems {
            items,
            dropped_count,
        },
    )
}

impl<T> WriteQueue<T> {
    /// Queues an item. If the queue is full or its thread has ended, counts the item as dropped.
    pub fn push(&self, item: T) {
        if self.items.try_send(Some(item)).is_err() {
            self.dropped_count.fetch_add(1, Ordering::Relaxed);
        }
    }
}

impl<T> QueuedItems<T> {
    /// Waits for the next item. Returns `None` if the thread must end.
    pub fn wait_for_item(&self) -> Option<T> {
        self.items.recv().ok().flatten()
    }

    /// Returns the number of items dropped since the last call, and resets the number to 0.
    pub fn take_dropped(&self) -> u64 {
        self.dropped_count.swap(0, Ordering::Relaxed)
    }
}

impl<T> WriteThread<T> {
    /// Ends the thread after it has written all queued items, and waits for its end, at most until
    /// `deadline`. Items that are pushed after this call are dropped.
    pub fn join(self, deadline: Instant) {
        // A full queue has no space for the end marker yet.
        let mut end_is_queued = self.items.try_send(None).is_ok();
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(JOIN_POLL_INTERVAL);
            end_is_queued = end_is_queued || self.items.try_send(None).is_ok();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Items that exceed the queue's limit are each counted once. `join` waits until the queued
    /// items are written.
    #[test]
    fn excess_items_are_counted_and_others_written() {
        let (release_sender, release_receiver) = sync_channel::<()>(0);
        let (report_sender, report_receiver) = sync_channel(8);
        let (queue, thread) = spawn_writer("test", 2, move |items: QueuedItems<u32>| {
            release_receiver.recv().expect("released");
            while let Some(item) = items.wait_for_item() {
                report_sender
                    .send((item, items.take_dropped()))
                    .expect("room");
            }
        })
        .expect("a thread");
        (1..=5).for_each(|item| queue.push(item));
        release_sender.send(()).expect("the thread waits");
        thread.join(Instant::now() + Duration::from_secs(60));
        assert_eq!(
            report_receiver.into_iter().collect::<Vec<_>>(),
            [(1, 3), (2, 0)]
        );
    }
}
