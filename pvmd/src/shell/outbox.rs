//! Send queue of one stream: the daemon's loop fills it without waiting, and the stream's writer
//! empties it.
//!
//! The queue counts bytes. Link frames over a limit are dropped, because their ends retransmit
//! them. Reliable frames are never dropped; the loop checks their amount.

use bytes::{BufMut, Bytes, BytesMut};
use pvmd_machine::io::Descriptors;
use sempa_proto::frame::{FRAME_HEAD_BYTES, FrameKind, frame_head};
use sempa_proto::link::RETAINED_BYTES_MAX;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc;

/// Maximum number of bytes of link frames queued for one task or host.
///
/// Live tasks stay within their links' windows, so only many of them together come near this limit.
/// The last messages of tasks that exit are not bound by the windows; a dropped frame of such a
/// message is lost, because it is not sent again.
pub(crate) const LINK_BYTES_MAX: usize = RETAINED_BYTES_MAX;

/// Number of heads of link frames that share one allocation.
const HEADS_PER_ALLOCATION: usize = 512;

/// One item of the queue.
#[derive(Debug)]
pub(crate) enum Outgoing {
    /// A complete frame that must not be lost while the stream is open.
    Reliable(Bytes),
    /// A complete frame with file descriptors; like a reliable frame, it must not be lost.
    WithFds(Bytes, Descriptors),
    /// The body of a link frame; the ends of the link detect a loss and retransmit.
    Link(Bytes),
    /// Close the stream after all earlier items.
    Close,
}

impl Outgoing {
    fn len(&self) -> usize {
        match self {
            Outgoing::Reliable(bytes) | Outgoing::WithFds(bytes, _) | Outgoing::Link(bytes) => {
                bytes.len()
            }
            Outgoing::Close => 0,
        }
    }
}

#[derive(Debug, Default)]
struct Counters {
    reliable_bytes: AtomicUsize,
    link_bytes: AtomicUsize,
    sent_items: AtomicUsize,
}

/// The sending end of the queue; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Outbox {
    queue: mpsc::UnboundedSender<Outgoing>,
    counters: Arc<Counters>,
    link_bytes_max: usize,
}

/// The receiving end of the queue, owned by the writer.
#[derive(Debug)]
pub(crate) struct OutboxReader {
    queue: mpsc::UnboundedReceiver<Outgoing>,
    counters: Arc<Counters>,
}

/// Creates a queue that holds at most `link_bytes_max` bytes of link frames.
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
    /// Queues an item. Returns false if it was a link frame over the limit, which is dropped.
    ///
    /// Items queued after the writer has ended are dropped, too.
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
        // A failed send means that the stream has ended; its reader reports that.
        let _ = self.queue.send(item);
        true
    }

    /// Returns the number of queued bytes that must not be dropped.
    pub(crate) fn reliable_bytes(&self) -> usize {
        self.counters.reliable_bytes.load(Ordering::Relaxed)
    }

    /// Returns the number of items that have left the queue. Two equal results mean that no item
    /// has left in between.
    pub(crate) fn sent_count(&self) -> usize {
        self.counters.sent_items.load(Ordering::Relaxed)
    }
}

impl OutboxReader {
    /// Waits for items and appends up to `max` of them to `batch`. Returns their number; 0 when the
    /// sending end is dropped.
    pub(crate) async fn receive_batch(&mut self, batch: &mut Vec<Outgoing>, max: usize) -> usize {
        self.queue.recv_many(batch, max).await
    }

    /// Records that an item has been written, or will never be written.
    pub(crate) fn record_done(&self, item: &Outgoing) {
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
        self.counters.sent_items.fetch_add(1, Ordering::Relaxed);
    }
}

/// Encodes items for a stream that takes chunks without copying; link frames get their heads here.
#[derive(Debug, Default)]
pub(crate) struct ChunkEncoder {
    head_buffer: BytesMut,
}

impl ChunkEncoder {
    /// Appends the chunks of a batch to `chunks`. Returns true if the stream must be closed after
    /// them.
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
                        .put_slice(&frame_head(FrameKind::Link, body.len()));
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
        let (fill, mut read) = outbox(100);
        for _ in 0..3 {
            fill.enqueue(Outgoing::Link(Bytes::from_static(&[0; 60])));
            fill.enqueue(Outgoing::Reliable(Bytes::from_static(&[0; 600])));
        }
        assert_eq!(fill.reliable_bytes(), 1800);
        let mut batch = Vec::new();
        assert_eq!(read.receive_batch(&mut batch, 10).await, 4);
        batch.iter().for_each(|item| read.record_done(item));
        assert_eq!((fill.reliable_bytes(), fill.sent_count()), (0, 4));
        fill.enqueue(Outgoing::Link(Bytes::from_static(&[0; 60])));
        batch.clear();
        assert_eq!(read.receive_batch(&mut batch, 10).await, 1);
    }
}
