//! Reads a socket together with the file descriptors that are passed over it.
#![allow(unsafe_code)] // recvmsg into room that has not been written yet has no safe form; zeroing it first costs too much

use bytes::{BufMut, BytesMut};
use nix::sys::socket::MsgFlags;
use sempa_proto::route::ROUTE_FDS_MAX;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Size of the control buffer of one read, in words of eight bytes: its header of 16 bytes and the
/// descriptors.
const CONTROL_WORDS: usize = 2 + (ROUTE_FDS_MAX * size_of::<RawFd>()).div_ceil(8);

/// Descriptors that arrived on a socket for messages that are not processed yet, in order. `None`
/// stands for the lost descriptors of one read.
#[derive(Debug, Default)]
pub struct PendingFds(VecDeque<Option<OwnedFd>>);

/// The descriptors that belong to one message.
#[derive(Debug)]
pub enum MessageFds {
    /// All descriptors that the message announces.
    All(Vec<OwnedFd>),
    /// This process could not accept the descriptors because of its descriptor limit. The message
    /// must be ignored.
    Lost,
    /// The descriptors did not arrive with the first byte of the message: the sender violates the
    /// protocol.
    Missing,
}

impl PendingFds {
    /// Number of descriptors; the lost descriptors of one read count as one.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Removes and returns the descriptors of the next message, which announces this many.
    pub fn take(&mut self, announced: usize) -> MessageFds {
        if announced > 0 && self.0.front().is_some_and(Option::is_none) {
            self.0.pop_front();
            return MessageFds::Lost;
        }
        if self.0.len() < announced || self.0.iter().take(announced).any(Option::is_none) {
            return MessageFds::Missing;
        }
        MessageFds::All(self.0.drain(..announced).flatten().collect())
    }
}

/// Result of one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Number of bytes read; 0 at the end of the stream.
    pub bytes: usize,
    /// True if the read has emptied the socket. If false, more bytes may be available, because the
    /// kernel stops a read after descriptors and at the end of the buffer.
    pub drained: bool,
}

/// Appends the available bytes to `buffer`, and the descriptors that arrived with them to
/// `pending_fds`, with close-on-exec set. If the process has reached its descriptor limit, the loss
/// of descriptors is recorded.
///
/// # Errors
/// `WouldBlock` if nothing is available and the call must not wait or has timed out; `InvalidData`
/// if more descriptors arrived than one message may have. Any other error ends the connection.
pub fn receive(
    socket: &impl AsFd,
    buffer: &mut BytesMut,
    pending_fds: &mut PendingFds,
    flags: MsgFlags,
) -> io::Result<Received> {
    let mut control = [0u64; CONTROL_WORDS];
    let chunk = buffer.chunk_mut();
    let room = chunk.len();
    let mut part = libc::iovec {
        iov_base: chunk.as_mut_ptr().cast(),
        iov_len: room,
    };
    // SAFETY: all-zero bytes are a valid `msghdr`: null pointers and numbers.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let flags = (flags | MsgFlags::MSG_CMSG_CLOEXEC).bits();
    // SAFETY: the kernel writes only into the buffer and the control words, within the lengths
    // given. Both live through the call, and nothing else refers to them.
    let read = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags) };
    let bytes = usize::try_from(read).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel has written the first `bytes` bytes of the buffer.
    unsafe { buffer.advance_mut(bytes) };
    let mut received_fds = Vec::new();
    // SAFETY: the message header is as the kernel wrote it, and the control words to which it
    // points are still alive.
    unsafe { take_fds(&message, &mut received_fds) };
    if message.msg_flags & libc::MSG_CTRUNC == 0 {
        let all = bytes < room && received_fds.is_empty();
        pending_fds.0.extend(received_fds.into_iter().map(Some));
        return Ok(Received {
            bytes,
            drained: all,
        });
    }
    if received_fds.len() >= ROUTE_FDS_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "more descriptors came than one message may have",
        ));
    }
    // The control buffer had space, so the process had reached its descriptor limit.
    pending_fds.0.push_back(None);
    Ok(Received {
        bytes,
        drained: false,
    })
}

/// Takes ownership of the descriptors of a message.
///
/// # Safety
/// The kernel has filled in `message`, its control buffer is alive, and this function is called
/// once for it.
unsafe fn take_fds(message: &libc::msghdr, fds: &mut Vec<OwnedFd>) {
    // SAFETY: by this function's contract the control buffer is as the kernel wrote it, so the
    // macros stay inside it.
    let mut head = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !head.is_null() {
        // SAFETY: the macro returned a header inside the buffer, which is aligned for it.
        let (level, kind, length) =
            unsafe { ((*head).cmsg_level, (*head).cmsg_type, (*head).cmsg_len) };
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: as for the header; the length includes the header.
            let (data, bytes) =
                unsafe { (libc::CMSG_DATA(head), length - libc::CMSG_LEN(0) as usize) };
            for at in 0..bytes / size_of::<RawFd>() {
                // SAFETY: the kernel wrote complete integers into this range, each a new descriptor
                // that this process owns and no other code knows.
                fds.push(unsafe {
                    OwnedFd::from_raw_fd(data.cast::<RawFd>().add(at).read_unaligned())
                });
            }
        }
        // SAFETY: as for the first header.
        head = unsafe { libc::CMSG_NXTHDR(message, head) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{ControlMessage, sendmsg};
    use std::io::IoSlice;
    use std::os::unix::net::UnixStream;

    fn send(to: &UnixStream, bytes: &[u8], descriptors: &[RawFd]) {
        let rights = [ControlMessage::ScmRights(descriptors)];
        let rights = if descriptors.is_empty() {
            &[][..]
        } else {
            &rights[..]
        };
        sendmsg::<()>(
            to.as_raw_fd(),
            &[IoSlice::new(bytes)],
            rights,
            MsgFlags::empty(),
            None,
        )
        .expect("sent");
    }

    #[test]
    fn reads_append_bytes_and_keep_descriptor_order() {
        let (near, far) = UnixStream::pair().expect("a pair");
        let files = [
            tempfile::tempfile().expect("a file"),
            tempfile::tempfile().expect("a file"),
        ];
        send(
            &near,
            b"with",
            &files.each_ref().map(|file| file.as_raw_fd()),
        );
        let (mut buffer, mut descriptors) = (BytesMut::from(&b"held "[..]), PendingFds::default());
        buffer.reserve(100);
        let received =
            receive(&far, &mut buffer, &mut descriptors, MsgFlags::MSG_DONTWAIT).expect("there");
        assert_eq!(
            received,
            Received {
                bytes: 4,
                drained: false
            }
        );
        assert_eq!((&buffer[..], descriptors.len()), (&b"held with"[..], 2));
        assert!(matches!(descriptors.take(3), MessageFds::Missing));
        let MessageFds::All(got) = descriptors.take(2) else {
            panic!("both are here")
        };
        for (file, got) in files.iter().zip(&got) {
            let number = |fd| nix::sys::stat::fstat(fd).expect("open").st_ino;
            assert_eq!(number(file.as_fd()), number(got.as_fd()));
        }
    }

    #[test]
    fn excess_descriptors_are_closed_and_refused() {
        let (near, far) = UnixStream::pair().expect("a pair");
        let file = tempfile::tempfile().expect("a file");
        send(&near, b"x", &[file.as_raw_fd(); 40]);
        let (mut buffer, mut descriptors) = (BytesMut::with_capacity(100), PendingFds::default());
        let refused =
            receive(&far, &mut buffer, &mut descriptors, MsgFlags::empty()).map_err(|e| e.kind());
        assert_eq!(
            (refused, descriptors.len()),
            (Err(io::ErrorKind::InvalidData), 0)
        );
    }

    #[test]
    fn empty_socket_and_end_of_stream_differ() {
        let (near, far) = UnixStream::pair().expect("a pair");
        let (mut buffer, mut descriptors) = (BytesMut::with_capacity(100), PendingFds::default());
        let mut look = || {
            receive(&far, &mut buffer, &mut descriptors, MsgFlags::MSG_DONTWAIT)
                .map_err(|e| e.kind())
        };
        assert_eq!(look(), Err(io::ErrorKind::WouldBlock));
        drop(near);
        assert_eq!(
            look(),
            Ok(Received {
                bytes: 0,
                drained: true
            })
        );
    }
}
