//! Reads extended attributes of files (xattr(7)).
#![allow(unsafe_code)] // The call has no safe interface in the crates that are used here.

use std::ffi::{CStr, CString};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// Reads the attribute `name` of a file into `buffer`, following symbolic links. Returns the part
/// of the buffer that contains the value.
///
/// # Errors
/// The file does not exist, it has no such attribute, or the value is longer than the buffer.
pub(super) fn read_attribute<'a>(
    path: &Path,
    name: &CStr,
    buffer: &'a mut [u8],
) -> io::Result<&'a [u8]> {
    let path = CString::new(path.as_os_str().as_bytes())?;
    // SAFETY: both strings end with a zero byte, and the kernel writes at most `buffer.len()` bytes
    // into the buffer. All three live until the call returns.
    let length = unsafe {
        libc::getxattr(
            path.as_ptr(),
            name.as_ptr(),
            buffer.as_mut_ptr().cast(),
            buffer.len(),
        )
    };
    let length = usize::try_from(length).map_err(|_| io::Error::last_os_error())?;
    Ok(&buffer[..length])
}
