//! A queue of things to send, filled by the daemon's loop without waiting and emptied by the writer of one stream. It
//! counts bytes, so that what may be dropped is dropped over a limit and what may not is noticed.

use bytes::{BufMut, Bytes, BytesMut};
use pvmd_machine::io::Descriptors;
use sempa_proto::frame::{FRAME_HEAD_BYTES, FrameKind, frame_head};
use sempa_proto::link::RETAINED_BYTES_MAX;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::mpsc;

/// Bytes of link frames that wait for one task or host at most. Tasks that live hold themselves to their links' windows,
/// so it takes many of them to come near; beyond the windows are the last words of tasks that end, and a frame of these
/// that is dropped is lost, for nobody sends it again.
pub(crate) const LINK_BYTES_MAX: usize = RETAINED_BYTES_MAX;

/// Heads of link frames that share one allocation.
const HEADS: usize = 512;

/// One thing to send.
#[derive(Debug)]
pub(crate) enum Parcel {
    /// A whole frame that must not be lost while the stream lives.
    Sure(Bytes),
    /// The same, with descriptors.
    With(Bytes, Descriptors),
    /// The body of a link frame; its ends notice a loss and send again.
    Link(Bytes),
    /// Close the stream after what came before.
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

/// The filling end.
#[derive(Clone, Debug)]
pub(crate) struct Outbox {
    queue: mpsc::UnboundedSender<Parcel>,
    counters: Arc<Counters>,
    link_bytes_max: usize,
}

/// The emptying end.
#[derive(Debug)]
pub(crate) struct OutboxReader {
    queue: mpsc::UnboundedReceiver<Parcel>,
    counters: Arc<Counters>,
}

/// A queue that holds at most `link_bytes_max` bytes of link frames.
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
    /// Queues something; a link frame over the limit is dropped (false), and what comes after the writer has gone is too.
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

    /// Bytes waiting that must not be dropped.
    pub(crate) fn sure_bytes(&self) -> usize {
        self.counters.sure_bytes.load(Ordering::Relaxed)
    }

    /// Counts what has left the queue; two equal values mean that the writer got nowhere between them.
    pub(crate) fn progress(&self) -> usize {
        self.counters.sent.load(Ordering::Relaxed)
    }
}

impl OutboxReader {
    /// Waits for something to send and takes up to `max` parcels into `batch`; 0 when nothing will come any more.
    pub(crate) async fn take(&mut self, batch: &mut Vec<Parcel>, max: usize) -> usize {
        self.queue.recv_many(batch, max).await
    }

    /// Notes that a parcel has been written (or will never be).
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

/// What parcels are on a stream that takes pieces without copying them: link frames get their heads here.
#[derive(Debug, Default)]
pub(crate) struct Heads {
    room: BytesMut,
}

impl Heads {
    /// Adds the pieces of a batch to `chunks`; true if the stream is to end behind them.
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

    #[tokio::test]
    async fn link_frames_over_the_limit_are_dropped_and_sure_ones_never() {
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
