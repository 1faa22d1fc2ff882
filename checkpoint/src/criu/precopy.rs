//! Memory that goes ahead of its task (pre-copy).
//!
//! While the task still runs its pages are sent to the target ([`send`]), which keeps them ([`Store`]). When it stands still
//! and is dumped, what is missing at the target is asked for as ever, but the source answers with those pages only whose content
//! is another one than that which it has sent ([`SentAhead`]), told by a cryptographic hash of each page.
//!
//! So nothing depends on the kernel's telling which pages were written since: CRIU could use nothing but the marks of soft-dirty
//! tracking, which many kernels are built without, and the other way (write protection by userfaultfd) has to be set up
//! inside of each process, may be in the program's own use, and costs the program two microseconds for each page. What is not
//! known to be the same is sent again, so a page that was read in the middle of a write does no harm.

mod send;
mod store;

pub(super) use send::send;
pub use send::{Hurry, SentAhead};
pub use store::Store;
pub(super) use store::take;

/// Pages of a block: what is looked up, sent and asked for at once.
pub(super) const BLOCK_PAGES: u64 = 128;

/// The block of an address, and which of its pages it is.
fn place(address: u64, page: u64) -> (u64, usize) {
    let number = address / page;
    (number / BLOCK_PAGES, (number % BLOCK_PAGES) as usize)
}

/// Bits for so many pages from this one on.
fn bits(first: usize, pages: usize) -> u128 {
    let all = if pages as u64 >= BLOCK_PAGES {
        u128::MAX
    } else {
        (1 << pages) - 1
    };
    all << first
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_page_has_its_place_in_its_block() {
        assert_eq!(place(0, 4096), (0, 0));
        assert_eq!(place(129 * 4096, 4096), (1, 1));
        assert_eq!(
            [bits(0, 128), bits(127, 1), bits(3, 2)],
            [u128::MAX, 1 << 127, 0b11000]
        );
    }
}
