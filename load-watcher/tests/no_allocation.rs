//! A sample of the real /proc allocates nothing. This test has a process of its own, because it counts all allocations.
#![allow(unsafe_code)] // a counting allocator can only be written so

use pvm_load_watcher::sampler::Sampler;
use sempa_proto::Micros;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::path::Path;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: everything is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|n| n.set(n.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_sample_allocates_nothing() {
    let mut sampler = Sampler::open(Path::new("/proc")).expect("this is Linux");
    let before = ALLOCATIONS.with(Cell::get);
    let mut cores = 0;
    for i in 0..10 {
        cores = sampler.sample(Micros(i)).expect("this is Linux").cores;
    }
    assert_eq!(ALLOCATIONS.with(Cell::get), before);
    assert!(cores > 0);
}
