//! An answer of the other host, as far as it is here.

use super::super::words::{Form, Head, marks_bytes};
use std::collections::VecDeque;
use std::ops::Range;

#[derive(Debug)]
pub(super) enum Coming {
    Head {
        bytes: [u8; Form::BYTES_MAX],
        have: usize,
    },
    /// Which pages of these come.
    Marks {
        known: Vec<u8>,
        pages: u64,
        marks: Vec<u8>,
        have: usize,
    },
    Body {
        bytes: Vec<u8>,
        /// Where what comes goes.
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
    /// Where the next bytes go, if a head has so many.
    pub(super) fn room(&mut self, head_bytes: usize) -> &mut [u8] {
        match self {
            Coming::Head { bytes, have } => &mut bytes[*have..head_bytes],
            Coming::Marks { marks, have, .. } => &mut marks[*have..],
            Coming::Body { bytes, rest } => &mut bytes[rest.front().cloned().unwrap_or_default()],
        }
    }

    /// So many bytes were put there.
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

    /// The head, if all of it is here, and what follows is not known yet.
    pub(super) fn head(&self, form: Form) -> Option<Head> {
        match self {
            Coming::Head { bytes, have } if *have == form.bytes() => Some(form.read(bytes)),
            _ => None,
        }
    }

    /// So many pages follow, all of them.
    pub(super) fn expect_all(&mut self, body: Vec<u8>) {
        let rest = std::iter::once(0..body.len()).collect();
        *self = Coming::Body { bytes: body, rest };
    }

    /// What has changed of these pages follows, behind what tells which they are.
    pub(super) fn expect_marks(&mut self, known: Vec<u8>, pages: u64) {
        *self = Coming::Marks {
            known,
            pages,
            marks: vec![0; marks_bytes(pages)],
            have: 0,
        };
    }

    /// Once all marks are here it is known which pages follow.
    ///
    /// # Errors
    /// There are marks of more pages.
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

    /// The pages, if all of them are here. Another head comes next.
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

    #[test]
    fn changed_pages_come_into_the_places_of_those_that_were_known() {
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

    #[test]
    fn where_nothing_has_changed_nothing_follows_and_marks_of_no_page_are_an_error() {
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
