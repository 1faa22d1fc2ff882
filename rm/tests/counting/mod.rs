//! Counts what the test's own thread has allocated, and what of it is not freed.
#![allow(unsafe_code)] // a counting allocator can only be written so

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    static BYTES: Cell<isize> = const { Cell::new(0) };
    static TAKEN: Cell<Taken> = const { Cell::new(Taken { blocks: 0, bytes: 0 }) };
}

/// What was allocated, also if it was freed again.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) blocks: usize,
    pub(crate) bytes: usize,
}

/// Blocks have at most `isize::MAX` bytes.
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

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size() as isize);
        take(layout.size());
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
        take(size);
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
    (
        made,
        usize::try_from(BYTES.with(Cell::get) - before).unwrap_or(0),
    )
}

/// What is allocated meanwhile.
pub(crate) fn taken(act: impl FnOnce()) -> Taken {
    let before = TAKEN.with(Cell::get);
    act();
    let after = TAKEN.with(Cell::get);
    Taken {
        blocks: after.blocks - before.blocks,
        bytes: after.bytes - before.bytes,
    }
}
