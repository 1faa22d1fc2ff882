//! At the target: what has come ahead.

use super::super::images::page_size;
use super::super::words::{AHEAD, ALL_AHEAD, Form, Head};
use super::{BLOCK_PAGES, bits, place};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::memfd::{MFdFlags, memfd_create};
use sempa_proto::migration::Failure;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;

/// Pages that follow each other and begin where such a block begins.
#[derive(Debug)]
struct Block {
    /// Those that are here.
    here: u128,
    /// Those of them that nobody has had.
    left: u128,
    /// Which block of the file it is; `None` since all of it was had, and given back.
    number: Option<u64>,
}

/// Pages that came ahead of their task. They are in a file in memory: what was not written of it, and what is given back, takes none.
#[derive(Debug)]
pub struct Store {
    page: u64,
    file: Option<File>,
    /// By process and block.
    blocks: BTreeMap<(u64, u64), Block>,
    /// Pages that are here.
    pages: u64,
    /// Blocks that the file has had.
    numbers: u64,
}

impl Store {
    /// Nothing has come.
    pub fn empty() -> Store {
        Store::new(page_size())
    }

    pub(crate) fn new(page: u64) -> Store {
        Store {
            page,
            file: None,
            blocks: BTreeMap::new(),
            pages: 0,
            numbers: 0,
        }
    }

    /// Tells the source that all that it has sent ahead on this stream is here.
    ///
    /// # Errors
    /// It does not listen any more.
    pub fn acknowledge(&self, stream: &OwnedFd) -> io::Result<()> {
        say(&mut UnixStream::from(stream.try_clone()?), self.pages)
    }

    /// Bytes that are here.
    pub fn bytes(&self) -> u64 {
        self.pages * self.page
    }

    /// How many bytes so many pages have, which are within one block; `None` if they are not.
    fn length(&self, address: u64, pages: u64) -> Option<usize> {
        let (_, first) = place(address, self.page);
        let fits =
            address.is_multiple_of(self.page) && pages > 0 && pages <= BLOCK_PAGES - first as u64;
        fits.then(|| (pages * self.page) as usize)
    }

    /// Keeps these pages, which are within one block.
    ///
    /// # Errors
    /// There is no memory for them.
    pub(crate) fn put(&mut self, process: u64, address: u64, content: &[u8]) -> io::Result<()> {
        let (block, first) = place(address, self.page);
        let file = match &self.file {
            Some(file) => file,
            None => self.file.insert(File::from(memfd_create(
                c"sempa-ahead",
                MFdFlags::MFD_CLOEXEC,
            )?)),
        };
        let block = match self.blocks.entry((process, block)) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => {
                file.set_len((self.numbers + 1) * BLOCK_PAGES * self.page)?;
                self.numbers += 1;
                unknown.insert(Block {
                    here: 0,
                    left: 0,
                    number: Some(self.numbers - 1),
                })
            }
        };
        // What was had already nobody asks for again.
        let Some(number) = block.number else {
            return Ok(());
        };
        file.write_all_at(content, (number * BLOCK_PAGES + first as u64) * self.page)?;
        let come = bits(first, content.len() / self.page as usize);
        self.pages += u64::from((come & !block.here).count_ones());
        (block.here, block.left) = (block.here | come, block.left | come);
        Ok(())
    }

    /// What is here of these pages, one behind the other, with zeros for those that are not. `None` if the other host would have to
    /// know more than which pages it has sent: when some were given back. Also if none is here, or it is more than goes
    /// at once.
    pub(crate) fn get(&self, process: u64, address: u64, pages: u64) -> Option<Vec<u8>> {
        let page = self.page;
        if pages == 0 || pages > BLOCK_PAGES || !address.is_multiple_of(page) {
            return None;
        }
        let parts = parts(address, pages, page);
        let here = |part: &Part| {
            self.blocks
                .get(&(process, part.block))
                .filter(|block| block.here & part.bits() != 0)
        };
        let is_gone = |part: &Part| here(part).is_some_and(|block| block.number.is_none());
        if parts.iter().any(is_gone) || !parts.iter().any(|part| here(part).is_some()) {
            return None;
        }
        let mut found = vec![0; (pages * page) as usize];
        let mut rest = &mut found[..];
        for part in &parts {
            let (into, behind) = rest.split_at_mut(part.pages * page as usize);
            if let Some(block) = here(part) {
                let at = (block.number? * BLOCK_PAGES + part.first as u64) * page;
                // The source sends all that are wanted where this is of no use.
                self.file.as_ref()?.read_exact_at(into, at).ok()?;
            }
            rest = behind;
        }
        Some(found)
    }

    /// Whoever wanted these pages has them. What of a block was had is given back when all of it was.
    pub(crate) fn had(&mut self, process: u64, address: u64, pages: u64) {
        let bytes = BLOCK_PAGES * self.page;
        for part in parts(address, pages, self.page) {
            let Some(block) = self.blocks.get_mut(&(process, part.block)) else {
                continue;
            };
            block.left &= !part.bits();
            let Some(number) = block.number.take_if(|_| block.left == 0) else {
                continue;
            };
            self.pages -= u64::from(block.here.count_ones());
            let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
            // A failure keeps the memory until all of it goes.
            let _ = self
                .file
                .as_ref()
                .map(|file| fallocate(file, flags, (number * bytes) as i64, bytes as i64));
        }
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
        parts.push(Part {
            block,
            first,
            pages: pages as usize,
        });
        at += pages;
    }
    parts
}

/// Says a number of pages to the source.
fn say(stream: &mut UnixStream, pages: u64) -> io::Result<()> {
    stream.write_all(&Form::Long.write(&Head {
        command: ALL_AHEAD,
        pages,
        address: 0,
        process: 0,
    }))
}

/// Takes what comes ahead on this stream until all of it is here: no more than this, which the source is told.
///
/// # Errors
/// The stream ended before, something else came than pages, or more of them, or there is no memory for them.
pub(in super::super) fn take(stream: &OwnedFd, bytes_max: u64) -> Result<Store, Failure> {
    let failed =
        |what: String| Failure::Images(format!("memory that is to go ahead does not come: {what}"));
    let mut stream = UnixStream::from(stream.try_clone().map_err(|e| failed(e.to_string()))?);
    let mut store = Store::empty();
    let mut content = vec![0; (BLOCK_PAGES * store.page) as usize];
    say(&mut stream, bytes_max / store.page).map_err(|e| failed(e.to_string()))?;
    loop {
        let mut head = [0; Form::Long.bytes()];
        stream
            .read_exact(&mut head)
            .map_err(|e| failed(e.to_string()))?;
        let Head {
            command,
            pages,
            address,
            process,
        } = Form::Long.read(&head);
        match command {
            ALL_AHEAD => return Ok(store),
            AHEAD => {
                let length = store.length(address, pages);
                let length =
                    length.ok_or_else(|| failed(format!("{pages} pages at {address:#x}")))?;
                stream
                    .read_exact(&mut content[..length])
                    .map_err(|e| failed(e.to_string()))?;
                store
                    .put(process, address, &content[..length])
                    .map_err(|e| failed(e.to_string()))?;
            }
            other => return Err(failed(format!("the source says {other:#x}"))),
        }
        if store.bytes() > bytes_max {
            return Err(failed(format!(
                "there is more of it than {bytes_max} bytes, which it was told"
            )));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 16;

    fn put(store: &mut Store, address: u64, pages: u64, with: u8) {
        let length = store.length(address, pages).expect("it is within a block");
        store
            .put(1, address, &vec![with; length])
            .expect("there is memory");
    }

    #[test]
    fn what_came_last_is_kept_until_all_of_its_block_was_had() {
        let mut store = Store::new(PAGE);
        put(&mut store, 0, 4, 1);
        put(&mut store, 2 * PAGE, 1, 2);
        put(&mut store, BLOCK_PAGES * PAGE, 2, 3);
        assert_eq!(store.bytes(), 6 * PAGE);
        for _ in 0..2 {
            assert_eq!(
                store.get(1, PAGE, 2),
                Some([[1; PAGE as usize], [2; PAGE as usize]].concat())
            );
        }
        assert_eq!(
            (store.get(2, 0, 1), store.get(1, 9 * PAGE, 1)),
            (None, None),
            "nobody has sent these"
        );
        store.had(1, PAGE, 3);
        store.had(2, 0, 1);
        assert!(
            store.get(1, PAGE, 1).is_some(),
            "a part of the block is wanted yet"
        );
        store.had(1, 0, 5);
        assert_eq!((store.get(1, 0, 1), store.bytes()), (None, 2 * PAGE));
        assert_eq!(
            store
                .get(1, (BLOCK_PAGES - 1) * PAGE, 2)
                .map(|found| found.len()),
            Some(2 * PAGE as usize)
        );
        assert_eq!(
            store.get(1, 3 * PAGE, BLOCK_PAGES),
            None,
            "one of them was given back"
        );
        put(&mut store, PAGE, 1, 3);
        assert_eq!((store.get(1, PAGE, 1), store.bytes()), (None, 2 * PAGE));
    }

    #[test]
    fn pages_of_two_blocks_are_found_at_once_with_zeros_for_what_is_not_here() {
        let mut store = Store::new(PAGE);
        let border = BLOCK_PAGES * PAGE;
        put(&mut store, border - PAGE, 1, 1);
        put(&mut store, border + PAGE, 1, 2);
        let found = store.get(1, border - PAGE, 3).expect("some are here");
        assert_eq!(
            found
                .chunks(PAGE as usize)
                .map(|page| page[0])
                .collect::<Vec<u8>>(),
            [1, 0, 2]
        );
    }

    #[test]
    fn what_is_no_page_or_goes_over_a_block_is_refused() {
        let mut store = Store::new(PAGE);
        let refused = [
            (0, 0),
            (1, 1),
            (0, BLOCK_PAGES + 1),
            (PAGE, BLOCK_PAGES),
            (0, u64::MAX),
        ];
        assert!(
            refused
                .iter()
                .all(|(address, pages)| store.length(*address, *pages).is_none())
        );
        assert!(store.get(1, 0, 1).is_none());
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
                let head = Head {
                    command: *command,
                    pages: *pages,
                    address: *address,
                    process: 7,
                };
                theirs
                    .write_all(&Form::Long.write(&head))
                    .expect("there is room");
                theirs
                    .write_all(&vec![
                        5;
                        if *command == AHEAD {
                            (pages.min(&2) * page) as usize
                        } else {
                            0
                        }
                    ])
                    .expect("room");
            }
            theirs
                .shutdown(std::net::Shutdown::Write)
                .expect("it is open");
            take(&ours.into(), bytes_max).map(|store| store.bytes())
        };
        let good = [(AHEAD, 2, 0), (AHEAD, 1, page), (ALL_AHEAD, 0, 0)];
        assert_eq!(say(&good, 2 * page), Ok(2 * page));
        assert!(
            matches!(say(&good, page), Err(Failure::Images(why)) if why.contains("more of it"))
        );
        for bad in [
            &good[..2],
            &[(AHEAD, 1, 5)],
            &[(AHEAD, 1 << 60, 0)],
            &[(7, 1, 0)],
            &[],
        ] {
            assert!(
                matches!(say(bad, 9 * page), Err(Failure::Images(_))),
                "{bad:?}"
            );
        }
    }
}
