//! Benchmark hooks for the path of a link frame between the state machines of two daemons, without
//! sockets and network.
//!
//! The benchmarks measure the layers that the daemon's loop calls for each frame.

use super::outbox::{ChunkEncoder, LINK_BYTES_MAX, Outbox, OutboxReader, Outgoing, outbox};
use super::session::decode_lane_entry;
use bytes::Bytes;
use pvmd_machine::pair_streams::{
    FenceReceiver, FenceSender, LaneEntry, LaneId, StreamChoice, link_ends,
};
use sempa_proto::frame::FrameDecoder;
use sempa_proto::host::DataMsg;
use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Instant;

/// The id of the only pair stream in the benchmark.
const BENCH_STREAM: LaneId = LaneId(1);
/// Maximum number of frames read from the queue at once.
const BATCH_FRAMES_MAX: usize = 64;

/// The sending side of the benchmark: the fence of a pair of tasks with its own stream, the send
/// queue, and the chunks written to the stream.
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
    fn default() -> Self {
        let (outbox_sender, queue) = outbox(LINK_BYTES_MAX);
        let (fence_sender, chunk_encoder, batch, chunks) = Default::default();
        Self {
            fence_sender,
            outbox: outbox_sender,
            queue,
            batch,
            chunk_encoder,
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
        if let Some(pair) = link_ends(&body)
            && let StreamChoice::Lane { .. } = self.fence_sender.choose_stream(pair, Instant::now())
            && self.outbox.enqueue(Outgoing::Link(body))
        {
            self.fence_sender.count_frame(pair);
            self.read_queued_frames();
            self.chunk_encoder.encode(&self.batch, &mut self.chunks);
            self.batch
                .iter()
                .for_each(|item| self.queue.record_removed(item));
        }
        &self.chunks
    }

    /// Reads the queued frames into `batch` as the stream's writer does, but without waiting.
    fn read_queued_frames(&mut self) {
        let receive_future = pin!(self.queue.receive_batch(&mut self.batch, BATCH_FRAMES_MAX));
        let _ready = receive_future.poll(&mut Context::from_waker(Waker::noop()));
    }
}

/// The receiver's side of the benchmark.
#[derive(Debug, Default)]
pub struct BenchReceiver {
    decoder: FrameDecoder,
    fence_receiver: FenceReceiver<DataMsg>,
}

impl BenchReceiver {
    /// Decodes `chunks` of the pair stream. Returns the next item for the state machine, or `None`
    /// if no item is complete or an item cannot be decoded.
    pub fn receive(&mut self, chunks: &[Bytes]) -> Option<DataMsg> {
        chunks.iter().for_each(|chunk| self.decoder.push(chunk));
        let frame = self.decoder.next_frame().ok()??;
        match decode_lane_entry(frame) {
            Ok(item @ LaneEntry::Item(_)) => self.fence_receiver.push_lane(BENCH_STREAM, item),
            Ok(LaneEntry::Barrier(_)) | Err(_) => return None,
        }
        self.fence_receiver.next_item()
    }
}
