//! A global allocator that counts the allocations of the test's thread, and the bytes that they
//! occupy.
#![allow(unsafe_code)] // a counting allocator can only be written so

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct CountingAllocator;

thread_local! {
    static LIVE_BYTES: Cell<isize> = const { Cell::new(0) };
    static ALLOCATED: Cell<Allocations> = const { Cell::new(Allocations { blocks: 0, bytes: 0 }) };
}

/// Number and size of allocations, including memory that was freed again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocations {
    pub(crate) blocks: usize,
    pub(crate) bytes: usize,
}

/// The cast is lossless: a block has at most `isize::MAX` bytes.
fn add_live_bytes(bytes: isize) {
    LIVE_BYTES.with(|sum| sum.set(sum.get() + bytes));
}

fn count_block(size: usize) {
    ALLOCATED.with(|sum| {
        sum.set(Allocations {
            blocks: sum.get().blocks + 1,
            bytes: sum.get().bytes + size,
        })
    });
}

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add_live_bytes(layout.size() as isize);
        count_block(layout.size());
        // SAFETY: the caller upholds the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        add_live_bytes(-(layout.size() as isize));
        // SAFETY: the caller upholds the contract of `dealloc`.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add_live_bytes(size as isize - layout.size() as isize);
        count_block(size);
        // SAFETY: the caller upholds the contract of `realloc`.
        unsafe { System.realloc(block, layout, size) }
    }
}

#[global_allocator]
static COUNTING: CountingAllocator = CountingAllocator;

/// Returns the result of `make` and the number of heap bytes that the result occupies.
pub(crate) fn bytes_kept<T>(make: impl FnOnce() -> T) -> (T, usize) {
    let before = LIVE_BYTES.with(Cell::get);
    let made = make();
    (
        made,
        usize::try_from(LIVE_BYTES.with(Cell::get) - before).unwrap_or(0),
    )
}

/// Returns the number and size of the allocations that `act` makes.
pub(crate) fn count_allocations(act: impl FnOnce()) -> Allocations {
    let before = ALLOCATED.with(Cell::get);
    act();
    let after = ALLOCATED.with(Cell::get);
    Allocations {
        blocks: after.blocks - before.blocks,
        bytes: after.bytes - before.bytes,
    }
}
