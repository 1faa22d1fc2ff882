//! Assembles a reply of the source from the parts in which it is read.

use super::super::page_server_wire::{HeaderLayout, PageHeader, bitmap_bytes};
use std::collections::VecDeque;
use std::ops::Range;
use thiserror::Error;

/// The source has sent something other than the expected reply. Nothing of the reply was passed on;
/// the memory that is still missing cannot be fetched.
#[derive(Debug, Error)]
pub(super) enum UnexpectedReply {
    #[error("the source has sent {0:?} in reply to a request for nothing")]
    Unasked(PageHeader),
    #[error(
        "the source has sent {reply:?} in reply to a request for {pages} pages at {address:#x} of process {process}"
    )]
    Different {
        process: u64,
        address: u64,
        pages: u64,
        reply: PageHeader,
    },
    #[error("the source has sent more changed pages than the {0} requested")]
    TooManyChangedPages(usize),
}

#[derive(Debug)]
pub(super) enum IncomingReply {
    Header {
        bytes: [u8; HeaderLayout::BYTES_MAX],
        filled: usize,
    },
    /// The bitmap of a reply with changed pages. The bitmap selects those of the `pages` pages
    /// whose content follows; `known` contains the pre-copied content of all of them.
    Bitmap {
        known: Vec<u8>,
        pages: u64,
        bitmap: Vec<u8>,
        filled: usize,
    },
    Pages {
        bytes: Vec<u8>,
        /// The ranges of `bytes` that are not filled yet, in order.
        rest: VecDeque<Range<usize>>,
    },
}

impl Default for IncomingReply {
    fn default() -> IncomingReply {
        IncomingReply::Header {
            bytes: [0; HeaderLayout::BYTES_MAX],
            filled: 0,
        }
    }
}

impl IncomingReply {
    /// Returns the buffer into which the next bytes must be read. `head_bytes` is the size of a
    /// header.
    pub(super) fn buffer(&mut self, head_bytes: usize) -> &mut [u8] {
        match self {
            IncomingReply::Header { bytes, filled } => &mut bytes[*filled..head_bytes],
            IncomingReply::Bitmap { bitmap, filled, .. } => &mut bitmap[*filled..],
            IncomingReply::Pages { bytes, rest } => {
                &mut bytes[rest.front().cloned().unwrap_or_default()]
            }
        }
    }

    /// Processes `bytes` bytes that were read into the buffer.
    pub(super) fn advance(&mut self, bytes: usize) {
        match self {
            IncomingReply::Header { filled, .. } | IncomingReply::Bitmap { filled, .. } => {
                *filled += bytes
            }
            IncomingReply::Pages { rest, .. } => {
                if let Some(first) = rest.front_mut() {
                    first.start += bytes;
                }
                if rest.front().is_some_and(Range::is_empty) {
                    rest.pop_front();
                }
            }
        }
    }

    /// Returns the header if it is complete and the content after it is not determined yet.
    pub(super) fn header(&self, layout: HeaderLayout) -> Option<PageHeader> {
        match self {
            IncomingReply::Header { bytes, filled } if *filled == layout.bytes() => {
                Some(layout.read(bytes))
            }
            _ => None,
        }
    }

    /// Expects the content of all pages next. It is read into `body`, which has the size of the
    /// pages.
    pub(super) fn expect_pages(&mut self, body: Vec<u8>) {
        let rest = std::iter::once(0..body.len()).collect();
        *self = IncomingReply::Pages { bytes: body, rest };
    }

    /// Expects a bitmap next, and then those of the `pages` pages that have changed. `known` is the
    /// pre-copied content of all pages.
    pub(super) fn expect_bitmap(&mut self, known: Vec<u8>, pages: u64) {
        *self = IncomingReply::Bitmap {
            known,
            pages,
            bitmap: vec![0; bitmap_bytes(pages)],
            filled: 0,
        };
    }

    /// Once the bitmap is complete, prepares to read the pages whose bits are set.
    ///
    /// # Errors
    /// The bitmap has bits beyond the requested pages.
    pub(super) fn apply_bitmap(&mut self, page: u64) -> Result<(), UnexpectedReply> {
        let IncomingReply::Bitmap {
            known,
            pages,
            bitmap,
            filled,
        } = self
        else {
            return Ok(());
        };
        if *filled < bitmap.len() {
            return Ok(());
        }
        let (count, page) = (*pages as usize, page as usize);
        let has_changed = |number: usize| bitmap[number / 8] & (1 << (number % 8)) != 0;
        if (count..bitmap.len() * 8).any(has_changed) {
            return Err(UnexpectedReply::TooManyChangedPages(count));
        }
        let mut rest = VecDeque::<Range<usize>>::new();
        for number in (0..count).filter(|number| has_changed(*number)) {
            let (start, end) = (number * page, (number + 1) * page);
            match rest.back_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => rest.push_back(start..end),
            }
        }
        *self = IncomingReply::Pages {
            bytes: std::mem::take(known),
            rest,
        };
        Ok(())
    }

    /// Returns the pages if all of them have arrived; then expects the header of the next reply.
    pub(super) fn take_pages(&mut self) -> Option<Vec<u8>> {
        match self {
            IncomingReply::Pages { bytes, rest } if rest.is_empty() => {
                let bytes = std::mem::take(bytes);
                *self = IncomingReply::default();
                Some(bytes)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4;

    fn receive_bytes(coming: &mut IncomingReply, bytes: &[u8]) {
        for byte in bytes {
            coming.buffer(24)[0] = *byte;
            coming.advance(1);
            coming.apply_bitmap(PAGE).expect("they are no more");
        }
    }

    /// Changed pages replace the pre-copied content of exactly those pages.
    #[test]
    fn changed_pages_replace_known_pages() {
        let mut coming = IncomingReply::default();
        coming.expect_bitmap(vec![1; 40], 10);
        receive_bytes(&mut coming, &[0b1000_0110, 0b10]);
        assert_eq!(coming.take_pages(), None);
        receive_bytes(&mut coming, &[2; 15]);
        assert_eq!(coming.take_pages(), None);
        receive_bytes(&mut coming, &[2]);
        let body = coming.take_pages().expect("all is here");
        let pages: Vec<u8> = body
            .chunks(PAGE as usize)
            .map(|page| page[0] * page[3])
            .collect();
        assert_eq!(pages, [1, 4, 4, 1, 1, 1, 1, 4, 1, 4]);
        assert!(matches!(coming, IncomingReply::Header { filled: 0, .. }));
    }

    /// An empty bitmap completes the reply. Bits beyond the requested pages are an error.
    #[test]
    fn bits_beyond_the_range_are_an_error() {
        let mut coming = IncomingReply::default();
        coming.expect_bitmap(vec![1; 12], 3);
        receive_bytes(&mut coming, &[0]);
        assert_eq!(coming.take_pages(), Some(vec![1; 12]));
        coming.expect_bitmap(vec![1; 12], 3);
        coming.buffer(24)[0] = 0b1000;
        coming.advance(1);
        assert!(coming.apply_bitmap(PAGE).is_err());
    }
}
