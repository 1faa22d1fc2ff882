//! What moves leave behind in the allocator: images and messages under way are of many sizes, and a process that has passed on
//! many of them would keep several times what it needs.
#![allow(unsafe_code)] // mallopt and malloc_trim have no safe form

/// Has the allocator keep what is freed in so many places. With its usual number, eight for each processor, a daemon that had
/// passed on some hundred images held 130 MB. Threads share them, and [`give_back_freed`] reaches the end of the first one only.
pub fn keep_in_places(count: i32) {
    set(libc::M_ARENA_MAX, count);
}

/// Has the allocator keep up to so much that is freed, and serve larger buffers from that: a process under load would get them
/// from the kernel, page by page and zeroed, and give them back, many times a second.
pub fn keep_freed(bytes: i32) {
    set(libc::M_MMAP_THRESHOLD, bytes);
    set(libc::M_TRIM_THRESHOLD, bytes);
}

/// Gives the kernel back what the allocator keeps, also between what is in use.
pub fn give_back_freed() {
    // SAFETY: the call takes a number; the allocator works under its own locks.
    unsafe { libc::malloc_trim(0) };
}

fn set(setting: libc::c_int, value: libc::c_int) {
    // SAFETY: the call changes a number in the allocator, under its own lock.
    unsafe { libc::mallopt(setting, value) };
}
