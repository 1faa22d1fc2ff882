//! Queue of bytes to be written to the daemon's socket, in FIFO order.

use super::process::ProcessOwned;
use bytes::{Buf, Bytes};
use sempa_proto::frame::{FrameKind, encode_frame, encode_link};
use sempa_proto::link::{LINK_HEAD_BYTES, LinkFrame};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Payloads up to this size are copied after their header; larger ones are queued as separate
/// pieces without copying.
const COPY_BYTES_MAX: usize = 4 << 10;

/// Descriptors that are sent with a frame.
pub(crate) type Descriptors = Vec<Arc<ProcessOwned<OwnedFd>>>;

/// Queue of byte pieces, with counters of all bytes ever queued and written.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pieces: VecDeque<Bytes>,
    /// Lists of descriptors. Each list has the offset, in all bytes ever queued, of the piece with
    /// which it must be sent.
    descriptor_lists: VecDeque<(u64, Descriptors)>,
    queued_bytes_total: u64,
    written_bytes_total: u64,
}

impl Outbox {
    /// Appends an encoded frame.
    pub(crate) fn push(&mut self, piece: Bytes) {
        self.queued_bytes_total += piece.len() as u64;
        self.pieces.push_back(piece);
    }

    /// Appends an encoded frame. The descriptors are sent with its first byte.
    pub(crate) fn push_with_descriptors(&mut self, piece: Bytes, descriptors: Descriptors) {
        if !descriptors.is_empty() {
            self.descriptor_lists
                .push_back((self.queued_bytes_total, descriptors));
        }
        self.push(piece);
    }

    /// Encodes and appends a link frame.
    pub(crate) fn push_link(&mut self, frame: &LinkFrame) {
        if frame.payload.len() <= COPY_BYTES_MAX {
            return self.push(encode_link(frame));
        }
        let head = frame.encode_head();
        let mut whole = encode_frame(FrameKind::Link, &[&head]).to_vec();
        let announced = (1 + LINK_HEAD_BYTES + frame.payload.len()) as u32;
        whole[..4].copy_from_slice(&announced.to_le_bytes());
        self.push(whole.into());
        self.push(frame.payload.clone());
    }

    /// Returns the number of bytes not written yet.
    pub(crate) fn backlog_bytes(&self) -> usize {
        (self.queued_bytes_total - self.written_bytes_total) as usize
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Returns the total number of bytes ever queued. When [`Outbox::written_bytes_total`] reaches
    /// this number, everything queued until now is written.
    pub(crate) fn queued_bytes_total(&self) -> u64 {
        self.queued_bytes_total
    }

    /// Returns the total number of bytes ever written.
    pub(crate) fn written_bytes_total(&self) -> u64 {
        self.written_bytes_total
    }

    /// Returns the first pieces for one vectored write, and the descriptors to send with them.
    pub(crate) fn next_write(&self) -> (Vec<IoSlice<'_>>, Vec<RawFd>) {
        /// Maximum number of pieces in one write.
        const PIECES_MAX: usize = 64;
        let (mut slices, mut at) = (Vec::new(), self.written_bytes_total);
        let mut attached = self.descriptor_lists.iter();
        let here = self
            .descriptor_lists
            .front()
            .filter(|(start, _)| *start == at);
        let descriptors = here
            .map(|(_, fds)| fds.iter().map(|fd| fd.get().as_raw_fd()).collect())
            .unwrap_or_default();
        // The kernel passes descriptors with the first byte of a write, so a write must end before
        // the next piece that has descriptors.
        let end = attached
            .find(|(start, _)| *start > at)
            .map(|(start, _)| *start);
        for piece in self.pieces.iter().take(PIECES_MAX) {
            if Some(at) == end {
                break;
            }
            slices.push(IoSlice::new(piece));
            at += piece.len() as u64;
        }
        (slices, descriptors)
    }

    /// Removes `bytes` bytes that have been written.
    pub(crate) fn remove_written(&mut self, mut bytes: usize) {
        self.written_bytes_total += bytes as u64;
        while self
            .descriptor_lists
            .front()
            .is_some_and(|(start, _)| *start < self.written_bytes_total)
        {
            self.descriptor_lists.pop_front();
        }
        while bytes > 0 {
            let piece = self
                .pieces
                .front_mut()
                .expect("no more is written than was queued");
            if piece.len() > bytes {
                piece.advance(bytes);
                return;
            }
            bytes -= piece.len();
            self.pieces.pop_front();
        }
    }

    /// Drops the first piece, of which nothing was written yet, and its descriptors. It counts as
    /// written.
    pub(crate) fn skip_piece(&mut self) {
        let length = self.pieces.front().map_or(0, Bytes::len);
        self.remove_written(length);
    }

    /// Drops all pieces. They count as written, so that no thread keeps waiting for them.
    pub(crate) fn clear(&mut self) {
        self.pieces.clear();
        self.descriptor_lists.clear();
        self.written_bytes_total = self.queued_bytes_total;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::Tid;
    use sempa_proto::frame::FrameDecoder;
    use sempa_proto::link::LinkKind;

    /// Skipping a frame also drops its descriptors; the frames after it are still written.
    #[test]
    fn skipped_frame_takes_its_descriptors_along() {
        let mut outbox = Outbox::default();
        let file = Arc::new(ProcessOwned::new_fd(OwnedFd::from(
            std::fs::File::open("/dev/null").expect("there is one"),
        )));
        outbox.push(Bytes::from_static(b"before"));
        outbox.push_with_descriptors(Bytes::from_static(b"word"), vec![file.clone()]);
        outbox.push_with_descriptors(Bytes::from_static(b"another"), vec![file]);
        let next = |outbox: &Outbox| {
            let (slices, descriptors) = outbox.next_write();
            (
                slices
                    .iter()
                    .flat_map(|slice| slice.to_vec())
                    .collect::<Vec<u8>>(),
                descriptors.len(),
            )
        };
        assert_eq!(next(&outbox), (b"before".to_vec(), 0));
        outbox.remove_written(6);
        assert_eq!(next(&outbox), (b"word".to_vec(), 1));
        outbox.skip_piece();
        assert_eq!(next(&outbox), (b"another".to_vec(), 1));
        outbox.skip_piece();
        assert_eq!((outbox.backlog_bytes(), outbox.is_empty()), (0, true));
    }

    /// Frames of any size are decoded unchanged, whatever the sizes of the writes.
    #[test]
    fn frames_survive_partial_writes() {
        let frame = |len: usize| LinkFrame {
            src: Tid::from_raw(0x40001),
            dst: Tid::from_raw(0x40002),
            kind: LinkKind::Data { last: true },
            seq: len as u64,
            ack: 1,
            incarnation: 0,
            payload: vec![len as u8; len].into(),
        };
        let sizes = [0, 1, COPY_BYTES_MAX, COPY_BYTES_MAX + 1, 60_000];
        for step in [61, 4096, usize::MAX] {
            let mut outbox = Outbox::default();
            sizes.iter().for_each(|len| outbox.push_link(&frame(*len)));
            let mut decoder = FrameDecoder::new();
            while !outbox.is_empty() {
                let bytes: Vec<u8> = outbox
                    .next_write()
                    .0
                    .iter()
                    .flat_map(|s| s.to_vec())
                    .collect();
                let n = step.min(bytes.len());
                decoder.push(&bytes[..n]);
                outbox.remove_written(n);
            }
            assert_eq!(
                (outbox.backlog_bytes(), outbox.written_bytes_total()),
                (0, outbox.queued_bytes_total())
            );
            for len in sizes {
                let got = decoder
                    .next_frame()
                    .expect("good")
                    .expect("there")
                    .decode_link()
                    .expect("a link frame");
                assert_eq!(got, frame(len));
            }
        }
    }
}
