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

/// Most bytes of link frames queued for one task or host.
///
/// Live tasks stay within their links' windows, so only many of them together come near this limit.
/// The last messages of tasks that exit are not bound by the windows; a dropped frame of these is
/// lost, because it is not sent again.
pub(crate) const LINK_BYTES_MAX: usize = RETAINED_BYTES_MAX;

/// Heads of link frames that share one allocation.
const HEADS: usize = 512;

/// One item of the queue.
#[derive(Debug)]
pub(crate) enum Parcel {
    /// A complete frame that must not be lost while the stream is open.
    Sure(Bytes),
    /// The same, with file descriptors.
    With(Bytes, Descriptors),
    /// The body of a link frame; the ends of the link detect a loss and retransmit.
    Link(Bytes),
    /// Close the stream after all earlier items.
    End,
}

impl Parcel {
    fn len(&self) -> usize {
        match self {
            Parcel::Sure(bytes) | Parcel::With(bytes, _) | Parcel::Link(bytes) => bytes.len(),
            Parcel::End => 0,
        }
    }
}

#[derive(Debug, Default)]
struct Counters {
    sure_bytes: AtomicUsize,
    link_bytes: AtomicUsize,
    sent: AtomicUsize,
}

/// The sending end of the queue; clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Outbox {
    queue: mpsc::UnboundedSender<Parcel>,
    counters: Arc<Counters>,
    link_bytes_max: usize,
}

/// The receiving end of the queue, owned by the writer.
#[derive(Debug)]
pub(crate) struct OutboxReader {
    queue: mpsc::UnboundedReceiver<Parcel>,
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
    pub(crate) fn put(&self, parcel: Parcel) -> bool {
        let len = parcel.len();
        match &parcel {
            Parcel::Link(_)
                if self.counters.link_bytes.load(Ordering::Relaxed) + len > self.link_bytes_max =>
            {
                return false;
            }
            Parcel::Link(_) => self.counters.link_bytes.fetch_add(len, Ordering::Relaxed),
            Parcel::Sure(_) | Parcel::With(..) => {
                self.counters.sure_bytes.fetch_add(len, Ordering::Relaxed)
            }
            Parcel::End => 0,
        };
        // A failed send means that the stream has ended; its reader reports that.
        let _ = self.queue.send(parcel);
        true
    }

    /// Returns the queued bytes that must not be dropped.
    pub(crate) fn sure_bytes(&self) -> usize {
        self.counters.sure_bytes.load(Ordering::Relaxed)
    }

    /// Counts the items that have left the queue; two equal values mean no progress in between.
    pub(crate) fn progress(&self) -> usize {
        self.counters.sent.load(Ordering::Relaxed)
    }
}

impl OutboxReader {
    /// Waits for items and appends up to `max` of them to `batch`. Returns their number; 0 when the
    /// sending end is dropped.
    pub(crate) async fn take(&mut self, batch: &mut Vec<Parcel>, max: usize) -> usize {
        self.queue.recv_many(batch, max).await
    }

    /// Records that an item has been written, or will never be.
    pub(crate) fn done(&self, parcel: &Parcel) {
        match parcel {
            Parcel::Link(bytes) => self
                .counters
                .link_bytes
                .fetch_sub(bytes.len(), Ordering::Relaxed),
            Parcel::Sure(bytes) | Parcel::With(bytes, _) => self
                .counters
                .sure_bytes
                .fetch_sub(bytes.len(), Ordering::Relaxed),
            Parcel::End => 0,
        };
        self.counters.sent.fetch_add(1, Ordering::Relaxed);
    }
}

/// Encodes items for a stream that takes chunks without copying; link frames get their heads here.
#[derive(Debug, Default)]
pub(crate) struct Heads {
    room: BytesMut,
}

impl Heads {
    /// Appends the chunks of a batch to `chunks`. Returns true if the stream must be closed after
    /// them.
    pub(crate) fn cut(&mut self, batch: &[Parcel], chunks: &mut Vec<Bytes>) -> bool {
        for parcel in batch {
            match parcel {
                Parcel::Sure(frame) | Parcel::With(frame, _) => chunks.push(frame.clone()),
                Parcel::Link(body) => {
                    if self.room.capacity() < FRAME_HEAD_BYTES {
                        self.room.reserve(HEADS * FRAME_HEAD_BYTES);
                    }
                    self.room
                        .put_slice(&frame_head(FrameKind::Link, body.len()));
                    chunks.extend([self.room.split().freeze(), body.clone()]);
                }
                Parcel::End => {}
            }
        }
        batch.iter().any(|parcel| matches!(parcel, Parcel::End))
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
            fill.put(Parcel::Link(Bytes::from_static(&[0; 60])));
            fill.put(Parcel::Sure(Bytes::from_static(&[0; 600])));
        }
        assert_eq!(fill.sure_bytes(), 1800);
        let mut batch = Vec::new();
        assert_eq!(read.take(&mut batch, 10).await, 4);
        batch.iter().for_each(|parcel| read.done(parcel));
        assert_eq!((fill.sure_bytes(), fill.progress()), (0, 4));
        fill.put(Parcel::Link(Bytes::from_static(&[0; 60])));
        batch.clear();
        assert_eq!(read.take(&mut batch, 10).await, 1);
    }
}
