//! At the target: what has come ahead.

use super::super::images::page_size;
use super::super::words::{AHEAD, ALL_AHEAD, Form, Head};
use super::{BLOCK_PAGES, bits, place};
use sempa_proto::migration::Failure;
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

/// Pages that follow each other and begin where such a block begins.
#[derive(Debug)]
struct Block {
    /// Those that are here.
    here: u128,
    /// Of all pages of the block.
    bytes: Vec<u8>,
}

/// Pages that came ahead of their task.
#[derive(Debug, Default)]
pub struct Store {
    page: u64,
    /// By process and block.
    blocks: BTreeMap<(u64, u64), Block>,
    /// By process: blocks before this one are not kept any more.
    forgotten: BTreeMap<u64, u64>,
    /// Pages that are here.
    pages: u64,
}

impl Store {
    pub(crate) fn new(page: u64) -> Store {
        Store { page, blocks: BTreeMap::new(), forgotten: BTreeMap::new(), pages: 0 }
    }

    /// Tells the source that all that it has sent ahead on this stream is here.
    ///
    /// # Errors
    /// It does not listen any more.
    pub fn acknowledge(&self, stream: &OwnedFd) -> io::Result<()> {
        let head = Head { command: ALL_AHEAD, pages: self.pages, address: 0, process: 0 };
        UnixStream::from(stream.try_clone()?).write_all(&Form::Long.write(&head))
    }

    /// Bytes that are here.
    pub fn bytes(&self) -> u64 {
        self.pages * self.page
    }

    /// Where the bytes of these pages go, which are within one block; `None` if they are not.
    pub(crate) fn room(&mut self, process: u64, address: u64, pages: u64) -> Option<&mut [u8]> {
        let page = self.page;
        let (block, first) = place(address, page);
        let fits = address.is_multiple_of(page) && pages > 0 && pages <= BLOCK_PAGES - first as u64;
        fits.then(|| {
            // What is never filled of this takes no memory.
            let fresh = || Block { here: 0, bytes: vec![0; (BLOCK_PAGES * page) as usize] };
            let block = self.blocks.entry((process, block)).or_insert_with(fresh);
            let come = bits(first, pages as usize);
            self.pages += u64::from((come & !block.here).count_ones());
            block.here |= come;
            let start = first * page as usize;
            &mut block.bytes[start..start + (pages * page) as usize]
        })
    }

    /// What is here of these pages, one behind the other, with zeros for those that are not. `None` if the other host would have to
    /// know more than which pages it has sent: when some may have been forgotten. Also if none is here, or it is more than goes
    /// at once.
    pub(crate) fn get(&self, process: u64, address: u64, pages: u64) -> Option<Vec<u8>> {
        let page = self.page;
        if pages == 0 || pages > BLOCK_PAGES || !address.is_multiple_of(page) {
            return None;
        }
        let parts = parts(address, pages, page);
        let forgotten = self.forgotten.get(&process).copied().unwrap_or(0);
        let here = |part: &Part| self.blocks.get(&(process, part.block)).filter(|block| block.here & part.bits() != 0);
        if parts[0].block < forgotten || !parts.iter().any(|part| here(part).is_some()) {
            return None;
        }
        let mut found = Vec::with_capacity((pages * page) as usize);
        for part in &parts {
            let (start, length) = (part.first * page as usize, part.pages * page as usize);
            match here(part) {
                Some(block) => found.extend_from_slice(&block.bytes[start..start + length]),
                None => found.resize(found.len() + length, 0),
            }
        }
        Some(found)
    }

    /// Pages before this address are not needed any more; whole blocks of them are given back.
    pub(crate) fn forget_before(&mut self, process: u64, address: u64) {
        let (block, _) = place(address, self.page.max(1));
        let forgotten = self.forgotten.entry(process).or_default();
        while let Some((&key, _)) = self.blocks.range((process, *forgotten)..(process, block.max(*forgotten))).next() {
            let gone = self.blocks.remove(&key).map_or(0, |block| block.here.count_ones());
            self.pages -= u64::from(gone);
        }
        *forgotten = block.max(*forgotten);
    }
}

/// Pages of one block.
struct Part {
    block: u64,
    first: usize,
    pages: usize,
}

impl Part {
    fn bits(&self) -> u128 {
        bits(self.first, self.pages)
    }
}

/// The blocks over which these pages go.
fn parts(address: u64, pages: u64, page: u64) -> Vec<Part> {
    let (mut at, end) = (address / page, address / page + pages);
    let mut parts = Vec::new();
    while at < end {
        let (block, first) = place(at * page, page);
        let pages = (end - at).min(BLOCK_PAGES - first as u64);
        parts.push(Part { block, first, pages: pages as usize });
        at += pages;
    }
    parts
}

/// Takes what comes ahead on this stream until all of it is here. No more than this is kept.
///
/// # Errors
/// The stream ended before, or something else came than pages, or more of them.
pub(in super::super) fn take(stream: &OwnedFd, bytes_max: u64) -> Result<Store, Failure> {
    let failed = |what: String| Failure::Images(format!("memory that is to go ahead does not come: {what}"));
    let mut stream = UnixStream::from(stream.try_clone().map_err(|e| failed(e.to_string()))?);
    let mut store = Store::new(page_size());
    loop {
        let mut head = [0; Form::Long.bytes()];
        stream.read_exact(&mut head).map_err(|e| failed(e.to_string()))?;
        let Head { command, pages, address, process } = Form::Long.read(&head);
        match command {
            ALL_AHEAD => return Ok(store),
            AHEAD => {
                let room = store.room(process, address, pages);
                let room = room.ok_or_else(|| failed(format!("{pages} pages at {address:#x}")))?;
                stream.read_exact(room).map_err(|e| failed(e.to_string()))?;
            }
            other => return Err(failed(format!("the source says {other:#x}"))),
        }
        if store.bytes() > bytes_max {
            return Err(failed(format!("there is more of it than {bytes_max} bytes, for which it was accepted")));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 16;

    fn put(store: &mut Store, address: u64, pages: u64, with: u8) {
        store.room(1, address, pages).expect("it is within a block").fill(with);
    }

    #[test]
    fn what_came_last_is_kept_until_it_is_not_needed_any_more() {
        let mut store = Store::new(PAGE);
        put(&mut store, 0, 4, 1);
        put(&mut store, 2 * PAGE, 1, 2);
        put(&mut store, BLOCK_PAGES * PAGE, 2, 3);
        assert_eq!(store.bytes(), 6 * PAGE);
        for _ in 0..2 {
            assert_eq!(store.get(1, PAGE, 2), Some([[1; PAGE as usize], [2; PAGE as usize]].concat()));
        }
        assert_eq!((store.get(2, 0, 1), store.get(1, 9 * PAGE, 1)), (None, None), "nobody has sent these");
        store.forget_before(1, (BLOCK_PAGES - 1) * PAGE);
        assert!(store.get(1, 0, 1).is_some(), "a part of the block may be needed");
        store.forget_before(1, (BLOCK_PAGES + 1) * PAGE);
        store.forget_before(1, PAGE);
        assert_eq!((store.get(1, 0, 1), store.bytes()), (None, 2 * PAGE));
        assert!(store.get(1, BLOCK_PAGES * PAGE, 2).is_some());
        put(&mut store, PAGE, 1, 3);
        assert_eq!(store.get(1, PAGE, 1), None, "it was forgotten before");
    }

    #[test]
    fn pages_of_two_blocks_are_found_at_once_with_zeros_for_what_is_not_here() {
        let mut store = Store::new(PAGE);
        let border = BLOCK_PAGES * PAGE;
        put(&mut store, border - PAGE, 1, 1);
        put(&mut store, border + PAGE, 1, 2);
        let found = store.get(1, border - PAGE, 3).expect("some are here");
        assert_eq!(found.chunks(PAGE as usize).map(|page| page[0]).collect::<Vec<u8>>(), [1, 0, 2]);
    }

    #[test]
    fn what_is_no_page_or_goes_over_a_block_is_refused() {
        let mut store = Store::new(PAGE);
        let refused = [(0, 0), (1, 1), (0, BLOCK_PAGES + 1), (PAGE, BLOCK_PAGES), (0, u64::MAX)];
        assert!(refused.iter().all(|(address, pages)| store.room(1, *address, *pages).is_none()));
        put(&mut store, 0, BLOCK_PAGES, 1);
        assert!(store.get(1, 0, BLOCK_PAGES + 1).is_none() && store.get(1, 1, 1).is_none());
        assert!(store.get(1, 0, BLOCK_PAGES).is_some());
    }

    #[test]
    fn whoever_sends_something_else_or_too_much_is_told_from_who_sends_pages() {
        let page = page_size();
        let say = |words: &[(u32, u64, u64)], bytes_max| {
            let (mut theirs, ours) = UnixStream::pair().expect("descriptors");
            for (command, pages, address) in words {
                let head = Head { command: *command, pages: *pages, address: *address, process: 7 };
                theirs.write_all(&Form::Long.write(&head)).expect("there is room");
                theirs
                    .write_all(&vec![5; if *command == AHEAD { (pages.min(&2) * page) as usize } else { 0 }])
                    .expect("room");
            }
            drop(theirs);
            take(&ours.into(), bytes_max).map(|store| store.bytes())
        };
        let good = [(AHEAD, 2, 0), (AHEAD, 1, page), (ALL_AHEAD, 0, 0)];
        assert_eq!(say(&good, 2 * page), Ok(2 * page));
        assert!(matches!(say(&good, page), Err(Failure::Images(why)) if why.contains("more of it")));
        for bad in [&good[..2], &[(AHEAD, 1, 5)], &[(AHEAD, 1 << 60, 0)], &[(7, 1, 0)], &[]] {
            assert!(matches!(say(bad, 9 * page), Err(Failure::Images(_))), "{bad:?}");
        }
    }
}
