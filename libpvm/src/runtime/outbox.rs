//! Queue of bytes to be written to the daemon's socket, in FIFO order.

use super::process::ProcessOwned;
use bytes::{Buf, Bytes};
use sempa_proto::frame::{FrameKind, encode_frame, encode_link};
use sempa_proto::link::{LINK_HEAD_BYTES, LinkFrame};
use std::collections::VecDeque;
use std::io::IoSlice;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// Payloads up to this size are copied after their header. Larger payloads are queued as separate
/// pieces without copying.
const COPIED_PAYLOAD_BYTES_MAX: usize = 4 << 10;

/// Descriptors that are sent with a frame.
pub(crate) type FrameDescriptors = Vec<Arc<ProcessOwned<OwnedFd>>>;

/// Queue of byte pieces, with counters of all bytes that were ever queued and written.
#[derive(Debug, Default)]
pub(crate) struct Outbox {
    pieces: VecDeque<Bytes>,
    /// Lists of descriptors. A list must be sent with the piece that begins at the offset of the
    /// list. The offset counts all bytes ever queued.
    descriptor_lists: VecDeque<(u64, FrameDescriptors)>,
    queued_bytes_total: u64,
    written_bytes_total: u64,
}

impl Outbox {
    /// Appends an encoded frame.
    pub(crate) fn push_frame(&mut self, piece: Bytes) {
        self.queued_bytes_total += piece.len() as u64;
        self.pieces.push_back(piece);
    }

    /// Appends an encoded frame. The descriptors are sent with the first byte of the frame.
    pub(crate) fn push_with_descriptors(&mut self, piece: Bytes, descriptors: FrameDescriptors) {
        if !descriptors.is_empty() {
            self.descriptor_lists
                .push_back((self.queued_bytes_total, descriptors));
        }
        self.push_frame(piece);
    }

    /// Encodes and appends a link frame.
    pub(crate) fn push_link(&mut self, frame: &LinkFrame) {
        if frame.payload.len() <= COPIED_PAYLOAD_BYTES_MAX {
            return self.push_frame(encode_link(frame));
        }
        let head = frame.encode_head();
        let mut frame_bytes = encode_frame(FrameKind::Link, &[&head]).to_vec();
        let frame_len = (1 + LINK_HEAD_BYTES + frame.payload.len()) as u32;
        frame_bytes[..4].copy_from_slice(&frame_len.to_le_bytes());
        self.push_frame(frame_bytes.into());
        self.push_frame(frame.payload.clone());
    }

    /// Returns the number of bytes not written yet.
    pub(crate) fn backlog_bytes(&self) -> usize {
        (self.queued_bytes_total - self.written_bytes_total) as usize
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.pieces.is_empty()
    }

    /// Returns the total number of bytes ever queued. When [`Outbox::written_bytes_total`] reaches
    /// this number, everything that is queued now is written.
    pub(crate) fn queued_bytes_total(&self) -> u64 {
        self.queued_bytes_total
    }

    /// Returns the total number of bytes ever written.
    pub(crate) fn written_bytes_total(&self) -> u64 {
        self.written_bytes_total
    }

    /// Returns the first pieces for one vectored write, and the descriptors to send with these
    /// pieces.
    pub(crate) fn next_write(&self) -> (Vec<IoSlice<'_>>, Vec<RawFd>) {
        /// Maximum number of pieces in one write.
        const PIECES_MAX: usize = 64;
        let (mut slices, mut offset) = (Vec::new(), self.written_bytes_total);
        let mut lists = self.descriptor_lists.iter();
        let first_list = self
            .descriptor_lists
            .front()
            .filter(|(list_offset, _)| *list_offset == offset);
        let descriptors = first_list
            .map(|(_, fds)| fds.iter().map(|fd| fd.get().as_raw_fd()).collect())
            .unwrap_or_default();
        // The kernel passes descriptors with the first byte of a write, so a write must end before
        // the next piece that has descriptors.
        let end_offset = lists
            .find(|(list_offset, _)| *list_offset > offset)
            .map(|(list_offset, _)| *list_offset);
        for piece in self.pieces.iter().take(PIECES_MAX) {
            if Some(offset) == end_offset {
                break;
            }
            slices.push(IoSlice::new(piece));
            offset += piece.len() as u64;
        }
        (slices, descriptors)
    }

    /// Removes `bytes` bytes that have been written.
    pub(crate) fn remove_written_bytes(&mut self, mut bytes: usize) {
        self.written_bytes_total += bytes as u64;
        while self
            .descriptor_lists
            .front()
            .is_some_and(|(list_offset, _)| *list_offset < self.written_bytes_total)
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

    /// Drops the first piece and its descriptors. No byte of the piece may be written yet. The
    /// piece counts as written.
    pub(crate) fn drop_first_piece(&mut self) {
        let length = self.pieces.front().map_or(0, Bytes::len);
        self.remove_written_bytes(length);
    }

    /// Drops all pieces. The pieces count as written, so that no thread waits for these pieces any
    /// longer.
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

    /// Skipping a frame also drops its descriptors. Later frames are still written.
    #[test]
    fn skipping_frame_drops_its_descriptors() {
        let mut outbox = Outbox::default();
        let file = Arc::new(ProcessOwned::from_fd(OwnedFd::from(
            std::fs::File::open("/dev/null").expect("there is one"),
        )));
        outbox.push_frame(Bytes::from_static(b"before"));
        outbox.push_with_descriptors(Bytes::from_static(b"word"), vec![file.clone()]);
        outbox.push_with_descriptors(Bytes::from_static(b"another"), vec![file]);
        let next_bytes_and_fd_count = |outbox: &Outbox| {
            let (slices, descriptors) = outbox.next_write();
            (
                slices
                    .iter()
                    .flat_map(|slice| slice.to_vec())
                    .collect::<Vec<u8>>(),
                descriptors.len(),
            )
        };
        assert_eq!(next_bytes_and_fd_count(&outbox), (b"before".to_vec(), 0));
        outbox.remove_written_bytes(6);
        assert_eq!(next_bytes_and_fd_count(&outbox), (b"word".to_vec(), 1));
        outbox.drop_first_piece();
        assert_eq!(next_bytes_and_fd_count(&outbox), (b"another".to_vec(), 1));
        outbox.drop_first_piece();
        assert_eq!((outbox.backlog_bytes(), outbox.is_empty()), (0, true));
    }

    /// Frames of every size are decoded unchanged when a write stops after any number of bytes.
    #[test]
    fn frames_survive_partial_writes() {
        let link_frame = |len: usize| LinkFrame {
            src: Tid::from_raw(0x40001),
            dst: Tid::from_raw(0x40002),
            kind: LinkKind::Data { is_last: true },
            seq: len as u64,
            ack: 1,
            incarnation: 0,
            payload: vec![len as u8; len].into(),
        };
        let payload_sizes = [
            0,
            1,
            COPIED_PAYLOAD_BYTES_MAX,
            COPIED_PAYLOAD_BYTES_MAX + 1,
            60_000,
        ];
        for write_bytes_max in [61, 4096, usize::MAX] {
            let mut outbox = Outbox::default();
            payload_sizes
                .iter()
                .for_each(|len| outbox.push_link(&link_frame(*len)));
            let mut decoder = FrameDecoder::new();
            while !outbox.is_empty() {
                let bytes: Vec<u8> = outbox
                    .next_write()
                    .0
                    .iter()
                    .flat_map(|s| s.to_vec())
                    .collect();
                let n = write_bytes_max.min(bytes.len());
                decoder.push(&bytes[..n]);
                outbox.remove_written_bytes(n);
            }
            assert_eq!(
                (outbox.backlog_bytes(), outbox.written_bytes_total()),
                (0, outbox.queued_bytes_total())
            );
            for len in payload_sizes {
                let decoded_frame = decoder
                    .next_frame()
                    .expect("good")
                    .expect("there")
                    .decode_link()
                    .expect("a link frame");
                assert_eq!(decoded_frame, link_frame(len));
            }
        }
    }
}
