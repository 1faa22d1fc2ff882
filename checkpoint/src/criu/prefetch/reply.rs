//! Assembles a reply of the source from the parts in which it is read.

use super::super::page_server_wire::{HeaderLayout, PageHeader, bitmap_bytes};
use std::collections::VecDeque;
use std::ops::Range;
use thiserror::Error;

/// The source has sent something other than the expected reply. No data of this reply was delivered
/// to CRIU, and the memory that is still missing cannot be fetched.
#[derive(Debug, Error)]
pub(super) enum UnexpectedReply {
    #[error("the source has sent {0:?} in reply to a request for nothing")]
    Unrequested(PageHeader),
    #[error(
        "the source has sent {reply:?} in reply to a request for {pages} pages at {address:#x} of process {process}"
    )]
    Mismatch {
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
        filled_bytes: usize,
    },
    /// The bitmap of a reply with changed pages. The bitmap selects those of the `page_count`
    /// requested pages whose content follows. `pre_copied` contains the pre-copied content of all
    /// requested pages.
    Bitmap {
        pre_copied: Vec<u8>,
        page_count: u64,
        bitmap: Vec<u8>,
        filled_bytes: usize,
    },
    Pages {
        bytes: Vec<u8>,
        /// The ranges of `bytes` that are not filled yet, in order.
        unfilled_ranges: VecDeque<Range<usize>>,
    },
}

impl Default for IncomingReply {
    fn default() -> Self {
        Self::Header {
            bytes: [0; HeaderLayout::BYTES_MAX],
            filled_bytes: 0,
        }
    }
}

impl IncomingReply {
    /// Returns the buffer into which the next bytes must be read. `header_bytes` is the size of a
    /// header.
    pub(super) fn buffer(&mut self, header_bytes: usize) -> &mut [u8] {
        match self {
            Self::Header {
                bytes,
                filled_bytes: filled_len,
            } => &mut bytes[*filled_len..header_bytes],
            Self::Bitmap {
                bitmap,
                filled_bytes: filled_len,
                ..
            } => &mut bitmap[*filled_len..],
            Self::Pages {
                bytes,
                unfilled_ranges: open_ranges,
            } => &mut bytes[open_ranges.front().cloned().unwrap_or_default()],
        }
    }

    /// Processes `byte_count` bytes that were read into the buffer.
    pub(super) fn advance(&mut self, byte_count: usize) {
        match self {
            Self::Header {
                filled_bytes: filled_len,
                ..
            }
            | Self::Bitmap {
                filled_bytes: filled_len,
                ..
            } => *filled_len += byte_count,
            Self::Pages {
                unfilled_ranges: open_ranges,
                ..
            } => {
                if let Some(first_range) = open_ranges.front_mut() {
                    first_range.start += byte_count;
                }
                if open_ranges.front().is_some_and(Range::is_empty) {
                    open_ranges.pop_front();
                }
            }
        }
    }

    /// Returns the header of the reply. `None` if the header is incomplete, or if
    /// [`expect_pages`](Self::expect_pages) or [`expect_bitmap`](Self::expect_bitmap) was already
    /// called.
    pub(super) fn header(&self, layout: HeaderLayout) -> Option<PageHeader> {
        match self {
            Self::Header {
                bytes,
                filled_bytes: filled_len,
            } if *filled_len == layout.bytes() => Some(layout.decode(bytes)),
            _ => None,
        }
    }

    /// Expects the content of all pages next, which is read into `body`. The length of `body` is
    /// the total size of the pages.
    pub(super) fn expect_pages(&mut self, body: Vec<u8>) {
        let unfilled_ranges = std::iter::once(0..body.len()).collect();
        *self = Self::Pages {
            bytes: body,
            unfilled_ranges,
        };
    }

    /// Expects a bitmap of `page_count` pages next, and then the content of the changed pages.
    /// `pre_copied` is the pre-copied content of all pages.
    pub(super) fn expect_bitmap(&mut self, pre_copied: Vec<u8>, page_count: u64) {
        *self = Self::Bitmap {
            pre_copied,
            page_count,
            bitmap: vec![0; bitmap_bytes(page_count)],
            filled_bytes: 0,
        };
    }

    /// Once the bitmap is complete, prepares to read the pages whose bits are set.
    ///
    /// # Errors
    /// The bitmap has bits beyond the requested pages.
    pub(super) fn apply_bitmap(&mut self, page_size: u64) -> Result<(), UnexpectedReply> {
        let Self::Bitmap {
            pre_copied: known_content,
            page_count: pages,
            bitmap,
            filled_bytes: filled_len,
        } = self
        else {
            return Ok(());
        };
        if *filled_len < bitmap.len() {
            return Ok(());
        }
        let (page_count, page_size) = (*pages as usize, page_size as usize);
        let has_changed = |index: usize| bitmap[index / 8] & (1 << (index % 8)) != 0;
        if (page_count..bitmap.len() * 8).any(has_changed) {
            return Err(UnexpectedReply::TooManyChangedPages(page_count));
        }
        let mut unfilled_ranges = VecDeque::<Range<usize>>::new();
        for index in (0..page_count).filter(|index| has_changed(*index)) {
            let (start, end) = (index * page_size, (index + 1) * page_size);
            match unfilled_ranges.back_mut() {
                Some(last_range) if last_range.end == start => last_range.end = end,
                _ => unfilled_ranges.push_back(start..end),
            }
        }
        *self = Self::Pages {
            bytes: std::mem::take(known_content),
            unfilled_ranges,
        };
        Ok(())
    }

    /// Returns the pages and expects the header of the next reply; `None` if not all pages have
    /// arrived.
    pub(super) fn take_pages(&mut self) -> Option<Vec<u8>> {
        match self {
            Self::Pages {
                bytes,
                unfilled_ranges: open_ranges,
            } if open_ranges.is_empty() => {
                let bytes = std::mem::take(bytes);
                *self = Self::default();
                Some(bytes)
            }
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE_BYTES: u64 = 4;

    fn receive_bytes(reply: &mut IncomingReply, bytes: &[u8]) {
        for byte in bytes {
            reply.buffer(24)[0] = *byte;
            reply.advance(1);
            reply.apply_bitmap(PAGE_BYTES).expect("they are no more");
        }
    }

    /// Changed pages replace the pre-copied content of exactly those pages.
    #[test]
    fn changed_pages_replace_known_pages() {
        let mut reply = IncomingReply::default();
        reply.expect_bitmap(vec![1; 40], 10);
        receive_bytes(&mut reply, &[0b1000_0110, 0b10]);
        assert_eq!(reply.take_pages(), None);
        receive_bytes(&mut reply, &[2; 15]);
        assert_eq!(reply.take_pages(), None);
        receive_bytes(&mut reply, &[2]);
        let body = reply.take_pages().expect("all is here");
        let pages: Vec<u8> = body
            .chunks(PAGE_BYTES as usize)
            .map(|page| page[0] * page[3])
            .collect();
        assert_eq!(pages, [1, 4, 4, 1, 1, 1, 1, 4, 1, 4]);
        assert!(matches!(
            reply,
            IncomingReply::Header {
                filled_bytes: 0,
                ..
            }
        ));
    }

    /// An empty bitmap completes the reply. Bits beyond the requested pages are an error.
    #[test]
    fn bits_beyond_the_range_are_an_error() {
        let mut reply = IncomingReply::default();
        reply.expect_bitmap(vec![1; 12], 3);
        receive_bytes(&mut reply, &[0]);
        assert_eq!(reply.take_pages(), Some(vec![1; 12]));
        reply.expect_bitmap(vec![1; 12], 3);
        reply.buffer(24)[0] = 0b1000;
        reply.advance(1);
        assert!(reply.apply_bitmap(PAGE_BYTES).is_err());
    }
}
