//! The connection of `criu lazy-pages` to the proxy. The connection includes a library
//! (`csrc/uffd_batching.c`) that makes CRIU read the replies to its requests before other events.

use nix::errno::Errno;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, socketpair};
use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;

/// The compiled library. Only a dynamically linked CRIU loads the library. Without the library CRIU
/// may lose requests if the task unmaps memory or forks while requests are open. CRIU then also
/// never finishes a process that has all its memory.
const LIBRARY: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/uffd_batching.so"));

/// The descriptors that `criu lazy-pages` inherits.
#[derive(Debug)]
pub(in super::super) struct LazyPagesConnection {
    /// The stream on which CRIU requests pages.
    stream: UnixStream,
    /// The socket on which the library reports closed userfaultfds.
    close_report_socket: OwnedFd,
    library: File,
}

impl LazyPagesConnection {
    /// Creates a connection on whose `stream` CRIU requests pages. Also returns the receiver of the
    /// library's reports.
    pub(super) fn new(stream: UnixStream) -> io::Result<(Self, UffdCloseReports)> {
        let mut library = File::from(memfd_create(c"sempa-uffd-batching", MFdFlags::MFD_CLOEXEC)?);
        library.write_all(LIBRARY)?;
        let (report_receiver, report_sender) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )?;
        Ok((
            Self {
                stream,
                close_report_socket: report_sender,
                library,
            },
            UffdCloseReports(report_receiver),
        ))
    }

    /// Returns the descriptors that CRIU must inherit with the same numbers.
    pub(in super::super) fn descriptors(&self) -> [BorrowedFd<'_>; 3] {
        [
            self.stream.as_fd(),
            self.close_report_socket.as_fd(),
            self.library.as_fd(),
        ]
    }

    /// Returns the descriptor number of the stream.
    pub(in super::super) fn stream_fd(&self) -> i32 {
        self.stream.as_raw_fd()
    }

    /// Returns the environment variables with which CRIU must be started.
    pub(in super::super) fn environment(&self) -> [(&'static str, String); 3] {
        [
            (
                "LD_PRELOAD",
                format!("/proc/self/fd/{}", self.library.as_raw_fd()),
            ),
            ("SEMPA_PAGES_SOCKET", self.stream.as_raw_fd().to_string()),
            (
                "SEMPA_CLOSED_SOCKET",
                self.close_report_socket.as_raw_fd().to_string(),
            ),
        ]
    }
}

/// Receives the library's reports of userfaultfds that CRIU has closed.
#[derive(Debug)]
pub(super) struct UffdCloseReports(OwnedFd);

impl AsFd for UffdCloseReports {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl UffdCloseReports {
    /// Returns the inode numbers of the userfaultfds that were closed since the last call; `None`
    /// if CRIU has ended.
    pub(super) fn take_closed_inodes(&self) -> Option<Vec<u64>> {
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
