//! Settings of the memory allocator of the daemons and the tasker. Images and messages in transit
//! have many different sizes; with the default settings a process that has forwarded many of them
//! would retain several times the memory that it needs.
#![allow(unsafe_code)] // mallopt and malloc_trim have no safe form

/// Limits the number of arenas. An arena is a memory pool of the allocator that several threads
/// share and that retains freed memory.
///
/// The default limit is eight arenas for each processor; with that limit a daemon that had
/// forwarded some hundred images retained 130 MB. [`trim_freed`] trims the top of the first arena
/// only.
pub fn limit_arenas(arena_count_max: i32) {
    set_option(libc::M_ARENA_MAX, arena_count_max);
}

/// Makes the allocator retain up to `bytes_max` of freed memory and serve larger buffers from it.
/// Otherwise a process under load would obtain such buffers from the kernel, page by page and
/// zeroed, and return them, many times a second.
pub fn retain_freed_bytes(bytes_max: i32) {
    set_option(libc::M_MMAP_THRESHOLD, bytes_max);
    set_option(libc::M_TRIM_THRESHOLD, bytes_max);
}

/// Returns the freed memory to the kernel, including pages between allocations.
pub fn trim_freed() {
    // SAFETY: the call takes a number; the allocator uses its own locks.
    unsafe { libc::malloc_trim(0) };
}

fn set_option(option: libc::c_int, value: libc::c_int) {
    // SAFETY: the call changes a number in the allocator, under the allocator's lock.
    unsafe { libc::mallopt(option, value) };
}
