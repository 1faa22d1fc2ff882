//! Benchmark hooks: the path of a link frame between the state machines of two daemons, without
//! sockets and network.
//!
//! Benchmarks use them to measure the layers that the daemon's loop runs through.

use super::outbox::{Heads, LINK_BYTES_MAX, Outbox, OutboxReader, Parcel, outbox};
use super::session::lane_parcel;
use bytes::Bytes;
use pvmd_machine::pair_streams::{
    FenceReceiver, FenceSender, LaneEntry, LaneId, StreamChoice, ends_of,
};
use sempa_proto::frame::FrameDecoder;
use sempa_proto::host::Carried;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Instant;

/// The id of the only pair stream in the benchmark.
const LANE: LaneId = LaneId(1);
/// Most frames taken from the queue at once.
const TAKEN_MAX: usize = 64;

/// The sender's side: a pair of tasks with a stream of its own, the send queue, and the chunks
/// written to the stream.
#[derive(Debug)]
pub struct Sending {
    fork: FenceSender,
    fill: Outbox,
    queue: OutboxReader,
    batch: Vec<Parcel>,
    heads: Heads,
    chunks: Vec<Bytes>,
}

impl Default for Sending {
    fn default() -> Sending {
        let (fill, queue) = outbox(LINK_BYTES_MAX);
        let (fork, heads, batch, chunks) = Default::default();
        Sending {
            fork,
            fill,
            queue,
            batch,
            heads,
            chunks,
        }
    }
}

impl Sending {
    /// Sends a link frame and returns the chunks that the stream gets for it.
    ///
    /// Returns nothing while its pair has no stream, or if the frame cannot be decoded.
    pub fn send(&mut self, body: Bytes) -> &[Bytes] {
        self.batch.clear();
        self.chunks.clear();
        if let Some(ends) = ends_of(&body)
            && let StreamChoice::Lane { .. } = self.fork.choose_stream(ends, Instant::now())
            && self.fill.put(Parcel::Link(body))
        {
            self.fork.count_frame(ends);
            self.take();
            self.heads.cut(&self.batch, &mut self.chunks);
            self.batch.iter().for_each(|parcel| self.queue.done(parcel));
        }
        &self.chunks
    }

    /// Takes the queued frames as the stream's writer does, but does not wait for more.
    fn take(&mut self) {
        let taken = pin!(self.queue.take(&mut self.batch, TAKEN_MAX));
        let _nothing_else_to_wait_for = taken.poll(&mut Context::from_waker(Waker::noop()));
    }
}

/// The receiver's side of the benchmark.
#[derive(Debug, Default)]
pub struct Receiving {
    decoder: FrameDecoder,
    join: FenceReceiver<Carried>,
}

impl Receiving {
    /// Takes chunks from the pair stream. Returns the next item for the state machine if it is
    /// complete.
    pub fn receive(&mut self, chunks: &[Bytes]) -> Option<Carried> {
        chunks.iter().for_each(|chunk| self.decoder.push(chunk));
        let frame = self.decoder.next_frame().ok()??;
        match lane_parcel(frame) {
            Ok(parcel @ LaneEntry::Item(_)) => self.join.push_lane(LANE, parcel),
            Ok(LaneEntry::Barrier(_)) | Err(_) => return None,
        }
        self.join.pop()
    }
}
