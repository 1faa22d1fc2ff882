//! A global allocator that counts the allocations of the test's thread, and the bytes that they
//! occupy.
#![allow(unsafe_code)] // a counting allocator can only be written so

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct CountingAllocator;

thread_local! {
    static LIVE_BYTES: Cell<isize> = const { Cell::new(0) };
    static ALLOCATION_TOTALS: Cell<Allocations> = const { Cell::new(Allocations { block_count: 0, bytes: 0 }) };
}

/// Number and total size of allocations, including memory that was freed again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Allocations {
    pub(crate) block_count: usize,
    pub(crate) bytes: usize,
}

/// Adds the size of an allocated block, or subtracts the size of a freed one (negative `bytes`).
/// The callers convert sizes without loss, because a block has at most `isize::MAX` bytes.
fn add_live_bytes(bytes: isize) {
    LIVE_BYTES.with(|sum| sum.set(sum.get() + bytes));
}

fn count_allocation(size: usize) {
    ALLOCATION_TOTALS.with(|sum| {
        sum.set(Allocations {
            block_count: sum.get().block_count + 1,
            bytes: sum.get().bytes + size,
        })
    });
}

// SAFETY: every call is forwarded unchanged to the system's allocator.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add_live_bytes(layout.size() as isize);
        count_allocation(layout.size());
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
        count_allocation(size);
        // SAFETY: the caller upholds the contract of `realloc`.
        unsafe { System.realloc(block, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Returns the result of `build` and the number of heap bytes that the result still occupies.
pub(crate) fn measure_live_bytes<T>(build: impl FnOnce() -> T) -> (T, usize) {
    let bytes_before = LIVE_BYTES.with(Cell::get);
    let result = build();
    (
        result,
        usize::try_from(LIVE_BYTES.with(Cell::get) - bytes_before).unwrap_or(0),
    )
}

/// Returns the number and size of the allocations that `action` makes.
pub(crate) fn count_allocations(action: impl FnOnce()) -> Allocations {
    let totals_before = ALLOCATION_TOTALS.with(Cell::get);
    action();
    let totals_after = ALLOCATION_TOTALS.with(Cell::get);
    Allocations {
        block_count: totals_after.block_count - totals_before.block_count,
        bytes: totals_after.bytes - totals_before.bytes,
    }
}
