//! What has a CRIU that fetches memory wait for its answers before it hears of anything else (`csrc/patience.c`).

use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// What CRIU loads. One that does not (because it is linked statically) can lose track of what it has asked for, if the task gives
/// memory back or forks just then.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/patience.so"));

/// What CRIU gets.
#[derive(Debug)]
pub(in super::super) struct Patience(File);

impl Patience {
    pub(super) fn new() -> io::Result<Patience> {
        let mut library = File::from(memfd_create(c"sempa-patience", MFdFlags::MFD_CLOEXEC)?);
        library.write_all(LIBRARY)?;
        Ok(Patience(library))
    }

    /// The descriptor, which has to keep its number in CRIU.
    pub(in super::super) fn descriptor(&self) -> &File {
        &self.0
    }

    /// What CRIU's environment has to say, if it asks on this stream.
    pub(in super::super) fn variables(&self, asks_on: &UnixStream) -> [(&'static str, String); 2] {
        [
            ("LD_PRELOAD", format!("/proc/self/fd/{}", self.0.as_raw_fd())),
            ("SEMPA_PAGES_SOCKET", asks_on.as_raw_fd().to_string()),
        ]
    }
}
