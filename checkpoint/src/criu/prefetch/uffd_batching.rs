//! The connection of `criu lazy-pages` to the proxy, with a library that makes CRIU read the
//! replies to its requests before other events (`csrc/uffd_batching.c`).

use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, socketpair};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// The library. A statically linked CRIU does not load it. Such a CRIU may lose requests if the
/// task unmaps memory or forks at that moment, and does not finish with processes that have all
/// their memory.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/uffd_batching.so"));

/// What `criu lazy-pages` inherits.
#[derive(Debug)]
pub(in super::super) struct LazyPagesConnection {
    /// CRIU requests pages on this stream.
    stream: UnixStream,
    /// The library reports closed userfaultfds on this socket.
    closed: OwnedFd,
    library: File,
}

impl LazyPagesConnection {
    /// Creates the connection for requests on this stream, and the receiver of the library's
    /// reports.
    pub(super) fn new(stream: UnixStream) -> io::Result<(LazyPagesConnection, ClosedUffds)> {
        let mut library = File::from(memfd_create(c"sempa-uffd-batching", MFdFlags::MFD_CLOEXEC)?);
        library.write_all(LIBRARY)?;
        let (ours, closed) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )?;
        Ok((
            LazyPagesConnection {
                stream,
                closed,
                library,
            },
            ClosedUffds(ours),
        ))
    }

    /// Returns the descriptors that CRIU must inherit with the same numbers.
    pub(in super::super) fn descriptors(&self) -> [BorrowedFd<'_>; 3] {
        [
            self.stream.as_fd(),
            self.closed.as_fd(),
            self.library.as_fd(),
        ]
    }

    /// Returns the number of the stream's descriptor.
    pub(in super::super) fn stream(&self) -> i32 {
        self.stream.as_raw_fd()
    }

    /// Returns the environment variables for CRIU.
    pub(in super::super) fn environment(&self) -> [(&'static str, String); 3] {
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

/// Receives reports of userfaultfds that CRIU has closed.
#[derive(Debug)]
pub(super) struct ClosedUffds(OwnedFd);

impl AsFd for ClosedUffds {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl ClosedUffds {
    /// Returns the inodes of the userfaultfds that were closed since the last call; `None` if CRIU
    /// has ended.
    pub(super) fn take_inodes(&self) -> Option<Vec<u64>> {
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
