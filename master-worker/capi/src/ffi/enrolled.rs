//! Whether libpvm3 has made this process a task.

#![allow(
    unsafe_code,
    reason = "the variable of another library is looked up by its name"
)]

use std::ffi::c_int;

/// True if libpvm3 is loaded in this process and has enrolled the process. A static libpvm3 in a
/// program that does not export its names is not seen.
pub(super) fn is_task_of_libpvm3() -> bool {
    // SAFETY: the name is a string, and the default handle needs no library.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"pvmmytid".as_ptr()) };
    if address.is_null() {
        return false;
    }
    // SAFETY: `pvmmytid` is an `int` in PVM's interface, and libraries are never unloaded here.
    // Other threads may change it, so the access is atomic.
    let tid = unsafe { &*address.cast::<std::sync::atomic::AtomicI32>() };
    let tid: c_int = tid.load(std::sync::atomic::Ordering::Relaxed);
    tid > 0
}
