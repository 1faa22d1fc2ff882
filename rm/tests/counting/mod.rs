//! Counts the bytes that the test's own thread has allocated and not freed.
#![allow(unsafe_code)] // a counting allocator can only be written so

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static BYTES: Cell<isize> = const { Cell::new(0) };
}

/// Blocks have at most `isize::MAX` bytes.
fn add(bytes: isize) {
    BYTES.with(|sum| sum.set(sum.get() + bytes));
}

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        add(-(layout.size() as isize));
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(block, layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        add(size as isize - layout.size() as isize);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(block, layout, size) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// What `make` makes, and the bytes that it keeps outside itself.
pub(crate) fn bytes_kept<T>(make: impl FnOnce() -> T) -> (T, usize) {
    let before = BYTES.with(Cell::get);
    let made = make();
    (made, usize::try_from(BYTES.with(Cell::get) - before).unwrap_or(0))
}
