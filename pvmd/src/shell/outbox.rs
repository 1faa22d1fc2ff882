//! Send queue of one stream. The daemon's loop fills the queue without waiting, and the stream's
//! writer empties the queue.
//!
//! The queue counts bytes. Link frames that exceed the limit are dropped, because the ends of their
//! link retransmit these frames. Reliable frames are never dropped; the loop checks their total
//! size.

use bytes::{BufMut, Bytes, BytesMut};
use pvmd_machine::io::Descriptors;
use sempa_proto::frame::{FRAME_HEAD_BYTES, FrameKind, encode_frame_head};
use sempa_proto::link::RETAINED_BYTES_MAX;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc;

/// Maximum number of bytes of link frames queued for one task or host.
///
/// Each running task stays within the windows of its links, so only many tasks together approach
/// this limit. The windows do not limit the last messages of tasks that exit. A dropped frame of
/// such a message is lost, because it is not sent again.
pub(crate) const LINK_BYTES_MAX: usize = RETAINED_BYTES_MAX;

/// Number of heads of link frames that share one allocation.
const HEADS_PER_ALLOCATION: usize = 512;

/// An item of the queue.
#[derive(Debug)]
pub(crate) enum Outgoing {
    /// A complete frame that must not be lost while the stream is open.
    Reliable(Bytes),
    /// A complete frame with file descriptors. Like a reliable frame, it must not be lost.
    WithFds(Bytes, Descriptors),
    /// The body of a link frame. If the frame is lost, the ends of the link detect the loss and
    /// retransmit the frame.
    Link(Bytes),
    /// Order to close the stream after all earlier items.
    Close,
}

impl Outgoing {
    fn len(&self) -> usize {
        match self {
            Self::Reliable(bytes) | Self::WithFds(bytes, _) | Self::Link(bytes) => bytes.len(),
            Self::Close => 0,
        }
    }
}

#[derive(Debug, Default)]
struct Counters {
    reliable_bytes: AtomicUsize,
    link_bytes: AtomicUsize,
    sent_item_count: AtomicUsize,
}

/// The sending end of the queue. All clones use the same queue.
#[derive(Clone, Debug)]
pub(crate) struct Outbox {
    queue: mpsc::UnboundedSender<Outgoing>,
    counters: Arc<Counters>,
    link_bytes_max: usize,
}

/// The receiving end of the queue, owned by the stream's writer.
#[derive(Debug)]
pub(crate) struct OutboxReader {
    queue: mpsc::UnboundedReceiver<Outgoing>,
    counters: Arc<Counters>,
}

/// Creates a queue that contains at most `link_bytes_max` bytes of link frames.
pub(crate) fn outbox(link_bytes_max: usize) -> (Outbox, OutboxReader) {
    let (sender, receiver) = mpsc::unbounded_channel();
    let counters = Arc::new(Counters::default());
    (
        Outbox {
            queue: sender,
            counters: counters.clone(),
            link_bytes_max,
        },
        OutboxReader {
            queue: receiver,
            counters,
        },
    )
}

impl Outbox {
    /// Queues an item. Returns false if the item is a link frame that exceeds the limit; such a
    /// frame is dropped.
    ///
    /// Items queued after the writer has ended are dropped, too, but true is returned.
    pub(crate) fn enqueue(&self, item: Outgoing) -> bool {
        let len = item.len();
        match &item {
            Outgoing::Link(_)
                if self.counters.link_bytes.load(Ordering::Relaxed) + len > self.link_bytes_max =>
            {
                return false;
            }
            Outgoing::Link(_) => self.counters.link_bytes.fetch_add(len, Ordering::Relaxed),
            Outgoing::Reliable(_) | Outgoing::WithFds(..) => self
                .counters
                .reliable_bytes
                .fetch_add(len, Ordering::Relaxed),
            Outgoing::Close => 0,
        };
        // Sending fails only if the stream has ended; the stream's reader reports this.
        let _ = self.queue.send(item);
        true
    }

    /// Returns the number of queued bytes of frames that must not be dropped.
    pub(crate) fn reliable_bytes(&self) -> usize {
        self.counters.reliable_bytes.load(Ordering::Relaxed)
    }

    /// Returns the number of items that were removed from the queue since its creation. If two
    /// calls return the same number, no item was removed between them.
    pub(crate) fn sent_count(&self) -> usize {
        self.counters.sent_item_count.load(Ordering::Relaxed)
    }
}

impl OutboxReader {
    /// Waits for items and appends at most `items_max` items to `batch`. Returns the number of
    /// appended items; 0 when the queue is empty and all sending ends are dropped.
    pub(crate) async fn receive_batch(
        &mut self,
        batch: &mut Vec<Outgoing>,
        items_max: usize,
    ) -> usize {
        self.queue.recv_many(batch, items_max).await
    }

    /// Records that an item was written, or that it will never be written.
    pub(crate) fn record_removed(&self, item: &Outgoing) {
        match item {
            Outgoing::Link(bytes) => self
                .counters
                .link_bytes
                .fetch_sub(bytes.len(), Ordering::Relaxed),
            Outgoing::Reliable(bytes) | Outgoing::WithFds(bytes, _) => self
                .counters
                .reliable_bytes
                .fetch_sub(bytes.len(), Ordering::Relaxed),
            Outgoing::Close => 0,
        };
        self.counters
            .sent_item_count
            .fetch_add(1, Ordering::Relaxed);
    }
}

/// Encodes items as chunks, for a stream that sends chunks without copying them. Also encodes the
/// heads of link frames.
#[derive(Debug, Default)]
pub(crate) struct ChunkEncoder {
    head_buffer: BytesMut,
}

impl ChunkEncoder {
    /// Appends the chunks of a batch to `chunks`. Returns true if the stream must be closed after
    /// these chunks.
    pub(crate) fn encode(&mut self, batch: &[Outgoing], chunks: &mut Vec<Bytes>) -> bool {
        for item in batch {
            match item {
                Outgoing::Reliable(frame) | Outgoing::WithFds(frame, _) => {
                    chunks.push(frame.clone())
                }
                Outgoing::Link(body) => {
                    if self.head_buffer.capacity() < FRAME_HEAD_BYTES {
                        self.head_buffer
                            .reserve(HEADS_PER_ALLOCATION * FRAME_HEAD_BYTES);
                    }
                    self.head_buffer
                        .put_slice(&encode_frame_head(FrameKind::Link, body.len()));
                    chunks.extend([self.head_buffer.split().freeze(), body.clone()]);
                }
                Outgoing::Close => {}
            }
        }
        batch.iter().any(|item| matches!(item, Outgoing::Close))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Link frames over the limit are dropped; reliable frames are always queued.
    #[tokio::test]
    async fn only_link_frames_over_the_limit_are_dropped() {
        let (sender, mut reader) = outbox(100);
        for _ in 0..3 {
            sender.enqueue(Outgoing::Link(Bytes::from_static(&[0; 60])));
            sender.enqueue(Outgoing::Reliable(Bytes::from_static(&[0; 600])));
        }
        assert_eq!(sender.reliable_bytes(), 1800);
        let mut batch = Vec::new();
        assert_eq!(reader.receive_batch(&mut batch, 10).await, 4);
        batch.iter().for_each(|item| reader.record_removed(item));
        assert_eq!((sender.reliable_bytes(), sender.sent_count()), (0, 4));
        sender.enqueue(Outgoing::Link(Bytes::from_static(&[0; 60])));
        batch.clear();
        assert_eq!(reader.receive_batch(&mut batch, 10).await, 1);
    }
}
