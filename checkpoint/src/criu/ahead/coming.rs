//! Reads a reply of the source in parts.

use super::super::words::{Form, Head, marks_bytes};
use std::collections::VecDeque;
use std::ops::Range;

#[derive(Debug)]
pub(super) enum Coming {
    Head {
        bytes: [u8; Form::BYTES_MAX],
        have: usize,
    },
    /// The bitmap of a reply with changed pages. It tells which of `pages` pages follow; `known`
    /// has the pre-copied content of all of them.
    Marks {
        known: Vec<u8>,
        pages: u64,
        marks: Vec<u8>,
        have: usize,
    },
    Body {
        bytes: Vec<u8>,
        /// The unfilled parts of `bytes`, in order.
        rest: VecDeque<Range<usize>>,
    },
}

impl Default for Coming {
    fn default() -> Coming {
        Coming::Head {
            bytes: [0; Form::BYTES_MAX],
            have: 0,
        }
    }
}

impl Coming {
    /// Returns the buffer for the next bytes. `head_bytes` is the size of a header.
    pub(super) fn room(&mut self, head_bytes: usize) -> &mut [u8] {
        match self {
            Coming::Head { bytes, have } => &mut bytes[*have..head_bytes],
            Coming::Marks { marks, have, .. } => &mut marks[*have..],
            Coming::Body { bytes, rest } => &mut bytes[rest.front().cloned().unwrap_or_default()],
        }
    }

    /// Processes bytes that were read into this buffer.
    pub(super) fn came(&mut self, bytes: usize) {
        match self {
            Coming::Head { have, .. } | Coming::Marks { have, .. } => *have += bytes,
            Coming::Body { rest, .. } => {
                if let Some(first) = rest.front_mut() {
                    first.start += bytes;
                }
                if rest.front().is_some_and(Range::is_empty) {
                    rest.pop_front();
                }
            }
        }
    }

    /// Returns the complete header, until the caller has decided what to expect after it.
    pub(super) fn head(&self, form: Form) -> Option<Head> {
        match self {
            Coming::Head { bytes, have } if *have == form.bytes() => Some(form.read(bytes)),
            _ => None,
        }
    }

    /// Expects the content of all pages of `body`.
    pub(super) fn expect_all(&mut self, body: Vec<u8>) {
        let rest = std::iter::once(0..body.len()).collect();
        *self = Coming::Body { bytes: body, rest };
    }

    /// Expects a bitmap and then the changed ones of these pages.
    pub(super) fn expect_marks(&mut self, known: Vec<u8>, pages: u64) {
        *self = Coming::Marks {
            known,
            pages,
            marks: vec![0; marks_bytes(pages)],
            have: 0,
        };
    }

    /// Once the bitmap is complete, prepares to read the pages whose bits are set.
    ///
    /// # Errors
    /// The bitmap has bits beyond the requested pages.
    pub(super) fn look_at_marks(&mut self, page: u64) -> Result<(), String> {
        let Coming::Marks {
            known,
            pages,
            marks,
            have,
        } = self
        else {
            return Ok(());
        };
        if *have < marks.len() {
            return Ok(());
        }
        let (count, page) = (*pages as usize, page as usize);
        let comes = |number: usize| marks[number / 8] & (1 << (number % 8)) != 0;
        if (count..marks.len() * 8).any(comes) {
            return Err(format!(
                "asked for what has changed of {count} pages the source has more"
            ));
        }
        let mut rest = VecDeque::<Range<usize>>::new();
        for number in (0..count).filter(|number| comes(*number)) {
            let (start, end) = (number * page, (number + 1) * page);
            match rest.back_mut() {
                Some(last) if last.end == start => last.end = end,
                _ => rest.push_back(start..end),
            }
        }
        *self = Coming::Body {
            bytes: std::mem::take(known),
            rest,
        };
        Ok(())
    }

    /// Returns the pages if all of them have arrived. The next reply follows.
    pub(super) fn body(&mut self) -> Option<Vec<u8>> {
        match self {
            Coming::Body { bytes, rest } if rest.is_empty() => {
                let bytes = std::mem::take(bytes);
                *self = Coming::default();
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

    fn put(coming: &mut Coming, bytes: &[u8]) {
        for byte in bytes {
            coming.room(24)[0] = *byte;
            coming.came(1);
            coming.look_at_marks(PAGE).expect("they are no more");
        }
    }

    /// Changed pages replace the pre-copied content of exactly those pages.
    #[test]
    fn changed_pages_replace_known_pages() {
        let mut coming = Coming::default();
        coming.expect_marks(vec![1; 40], 10);
        put(&mut coming, &[0b1000_0110, 0b10]);
        assert_eq!(coming.body(), None);
        put(&mut coming, &[2; 15]);
        assert_eq!(coming.body(), None);
        put(&mut coming, &[2]);
        let body = coming.body().expect("all is here");
        let pages: Vec<u8> = body
            .chunks(PAGE as usize)
            .map(|page| page[0] * page[3])
            .collect();
        assert_eq!(pages, [1, 4, 4, 1, 1, 1, 1, 4, 1, 4]);
        assert!(matches!(coming, Coming::Head { have: 0, .. }));
    }

    /// An empty bitmap completes the reply; bits beyond the requested pages are an error.
    #[test]
    fn bits_beyond_the_range_are_an_error() {
        let mut coming = Coming::default();
        coming.expect_marks(vec![1; 12], 3);
        put(&mut coming, &[0]);
        assert_eq!(coming.body(), Some(vec![1; 12]));
        coming.expect_marks(vec![1; 12], 3);
        coming.room(24)[0] = 0b1000;
        coming.came(1);
        assert!(coming.look_at_marks(PAGE).is_err());
    }
}
