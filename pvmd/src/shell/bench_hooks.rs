//! Benchmark hooks: the path of a link frame between the state machines of two daemons, without
//! sockets and network.
//!
//! Benchmarks use them to measure the layers that the daemon's loop runs through.

use super::outbox::{ChunkEncoder, LINK_BYTES_MAX, Outbox, OutboxReader, Outgoing, outbox};
use super::session::pair_stream_item;
use bytes::Bytes;
use pvmd_machine::pair_streams::{
    FenceReceiver, FenceSender, LaneEntry, LaneId, StreamChoice, ends_of,
};
use sempa_proto::frame::FrameDecoder;
use sempa_proto::host::DataMsg;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Instant;

/// The id of the only pair stream in the benchmark.
const BENCH_STREAM: LaneId = LaneId(1);
/// Maximum number of frames taken from the queue at once.
const BATCH_FRAMES_MAX: usize = 64;

/// The sender's side: a pair of tasks with a stream of its own, the send queue, and the chunks
/// written to the stream.
#[derive(Debug)]
pub struct BenchSender {
    fence_sender: FenceSender,
    outbox: Outbox,
    queue: OutboxReader,
    batch: Vec<Outgoing>,
    chunk_encoder: ChunkEncoder,
    chunks: Vec<Bytes>,
}

impl Default for BenchSender {
    fn default() -> BenchSender {
        let (fill, queue) = outbox(LINK_BYTES_MAX);
        let (fork, encoder, batch, chunks) = Default::default();
        BenchSender {
            fence_sender: fork,
            outbox: fill,
            queue,
            batch,
            chunk_encoder: encoder,
            chunks,
        }
    }
}

impl BenchSender {
    /// Sends a link frame and returns the chunks that are written to the stream for it.
    ///
    /// Returns no chunks while the pair has no stream, or if the frame cannot be decoded.
    pub fn send(&mut self, body: Bytes) -> &[Bytes] {
        self.batch.clear();
        self.chunks.clear();
        if let Some(ends) = ends_of(&body)
            && let StreamChoice::Lane { .. } = self.fence_sender.choose_stream(ends, Instant::now())
            && self.outbox.enqueue(Outgoing::Link(body))
        {
            self.fence_sender.count_frame(ends);
            self.take_queued();
            self.chunk_encoder.encode(&self.batch, &mut self.chunks);
            self.batch
                .iter()
                .for_each(|item| self.queue.record_done(item));
        }
        &self.chunks
    }

    /// Takes the queued frames as the stream's writer does, but does not wait for more.
    fn take_queued(&mut self) {
        let taken = pin!(self.queue.receive_batch(&mut self.batch, BATCH_FRAMES_MAX));
        let _ready = taken.poll(&mut Context::from_waker(Waker::noop()));
    }
}

/// The receiver's side of the benchmark.
#[derive(Debug, Default)]
pub struct BenchReceiver {
    decoder: FrameDecoder,
    fence_receiver: FenceReceiver<DataMsg>,
}

impl BenchReceiver {
    /// Takes chunks from the pair stream. Returns the next item for the state machine if it is
    /// complete.
    pub fn receive(&mut self, chunks: &[Bytes]) -> Option<DataMsg> {
        chunks.iter().for_each(|chunk| self.decoder.push(chunk));
        let frame = self.decoder.next_frame().ok()??;
        match pair_stream_item(frame) {
            Ok(item @ LaneEntry::Item(_)) => self.fence_receiver.push_lane(BENCH_STREAM, item),
            Ok(LaneEntry::Barrier(_)) | Err(_) => return None,
        }
        self.fence_receiver.pop()
    }
}
