//! Determines in which PID namespace another one was created.
#![allow(unsafe_code)] // The ioctl has no safe interface.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::linux::fs::MetadataExt;

/// The ioctl of ioctl_ns(2) that opens the parent of a hierarchical namespace: `_IO(0xb7, 2)`.
const NS_GET_PARENT: libc::c_ulong = 0xb702;

/// Returns the inode number of the PID namespace in which the PID namespace of a process was
/// created; `None` if it was created outside the namespace of the tasker.
///
/// # Errors
/// The process has ended, or no descriptor is available.
pub(crate) fn outer_namespace_inode(pid: i32) -> io::Result<Option<u64>> {
    let namespace = File::open(format!("/proc/{pid}/ns/pid"))?;
    // SAFETY: the ioctl has no argument; it returns a new descriptor or an error.
    let outer_fd = unsafe { libc::ioctl(namespace.as_raw_fd(), NS_GET_PARENT as _) };
    if outer_fd < 0 {
        let error = io::Error::last_os_error();
        // The kernel hides namespaces that are not inside the caller's own.
        return match error.raw_os_error() {
            Some(libc::EPERM) => Ok(None),
            _ => Err(error),
        };
    }
    // SAFETY: the descriptor is new, and nothing else owns it.
    let outer_namespace = File::from(unsafe { OwnedFd::from_raw_fd(outer_fd) });
    Ok(Some(outer_namespace.metadata()?.st_ino()))
}
