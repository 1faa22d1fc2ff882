//! A global allocator that counts the allocations of the test's thread, and the bytes that they
//! occupy.
#![allow(unsafe_code)] // a counting allocator can only be written so

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static BYTES: Cell<isize> = const { Cell::new(0) };
    static TAKEN: Cell<Taken> = const { Cell::new(Taken { blocks: 0, bytes: 0 }) };
}

/// Number and size of allocations, including memory that was freed again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) blocks: usize,
    pub(crate) bytes: usize,
}

/// The cast is lossless: a block has at most `isize::MAX` bytes.
fn add(bytes: isize) {
    BYTES.with(|sum| sum.set(sum.get() + bytes));
}

fn take(size: usize) {
    TAKEN.with(|sum| {
        sum.set(Taken {
            blocks: sum.get().blocks + 1,
            bytes: sum.get().bytes + size,
        })
    });
}

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        take(layout.size());
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        add(-(layout.size() as isize));
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size as isize - layout.size() as isize);
        take(size);
        // SAFETY: the caller upholds the contract of `realloc`.
        unsafe { System.realloc(block, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Returns the result of `make` and the number of heap bytes that the result occupies.
pub(crate) fn bytes_kept<T>(make: impl FnOnce() -> T) -> (T, usize) {
    let before = BYTES.with(Cell::get);
    let made = make();
    (
        made,
        usize::try_from(BYTES.with(Cell::get) - before).unwrap_or(0),
    )
}

/// Returns the number and size of the allocations that `act` makes.
pub(crate) fn taken(act: impl FnOnce()) -> Taken {
    let before = TAKEN.with(Cell::get);
    act();
    let after = TAKEN.with(Cell::get);
    Taken {
        blocks: after.blocks - before.blocks,
        bytes: after.bytes - before.bytes,
    }
}
