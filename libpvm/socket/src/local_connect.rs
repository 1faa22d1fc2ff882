//! Connects to Unix sockets of other processes.

use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

/// Connects to a listener without waiting: a listener with a full queue must not block the caller.
/// The connection is non-blocking.
///
/// # Errors
/// No process listens; `WouldBlock` if too many connections wait for the listener.
pub fn connect_without_waiting(address: &UnixAddr) -> io::Result<UnixStream> {
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(fd.as_raw_fd(), address)?;
    Ok(fd.into())
}
