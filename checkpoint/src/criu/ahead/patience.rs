//! What has a CRIU that fetches memory wait for its answers before it hears of anything else (`csrc/patience.c`).

use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, socketpair};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// What CRIU loads. One that does not (because it is linked statically) can lose track of what it has asked for, if the task gives
/// memory back or forks just then, and of processes that have all their memory.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/patience.so"));

/// What CRIU gets.
#[derive(Debug)]
pub(in super::super) struct Asking {
    /// On which it asks.
    stream: UnixStream,
    /// On which the library says what it has closed.
    closed: OwnedFd,
    library: File,
}

impl Asking {
    /// For a CRIU that asks on this stream; and where it is heard what its library says.
    pub(super) fn new(stream: UnixStream) -> io::Result<(Asking, Closed)> {
        let mut library = File::from(memfd_create(c"sempa-patience", MFdFlags::MFD_CLOEXEC)?);
        library.write_all(LIBRARY)?;
        let (ours, closed) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )?;
        Ok((
            Asking {
                stream,
                closed,
                library,
            },
            Closed(ours),
        ))
    }

    /// The descriptors, which have to keep their numbers in CRIU.
    pub(in super::super) fn descriptors(&self) -> [BorrowedFd<'_>; 3] {
        [
            self.stream.as_fd(),
            self.closed.as_fd(),
            self.library.as_fd(),
        ]
    }

    /// The number of the stream.
    pub(in super::super) fn stream(&self) -> i32 {
        self.stream.as_raw_fd()
    }

    /// What CRIU's environment has to say.
    pub(in super::super) fn variables(&self) -> [(&'static str, String); 3] {
        [
            (
                "LD_PRELOAD",
                format!("/proc/self/fd/{}", self.library.as_raw_fd()),
            ),
            ("SEMPA_PAGES_SOCKET", self.stream.as_raw_fd().to_string()),
            ("SEMPA_CLOSED_SOCKET", self.closed.as_raw_fd().to_string()),
        ]
    }
}

/// Hears which of the descriptors that tell of missing memory CRIU has closed.
#[derive(Debug)]
pub(super) struct Closed(OwnedFd);

impl AsFd for Closed {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Closed {
    /// The inodes of those closed since; `None` if no more will be.
    pub(super) fn inodes(&self) -> Option<Vec<u64>> {
        let mut inodes = Vec::new();
        loop {
            let mut inode = [0; size_of::<u64>()];
            match recv(self.0.as_raw_fd(), &mut inode, MsgFlags::MSG_DONTWAIT) {
                Ok(0) => return None,
                Ok(_) => inodes.push(u64::from_ne_bytes(inode)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return Some(inodes),
                Err(_) => return None,
            }
        }
    }
}
