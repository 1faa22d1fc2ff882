//! Reads a socket together with the file descriptors that are passed over the socket.
#![allow(unsafe_code)] // recvmsg into room that has not been written yet has no safe form; zeroing it first costs too much

use bytes::{BufMut, BytesMut};
use nix::sys::socket::MsgFlags;
use sempa_proto::route::ROUTE_FDS_MAX;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Size of the control buffer of one read, in words of eight bytes. The buffer contains a header of
/// 16 bytes and the descriptors.
const CONTROL_WORDS: usize = 2 + (ROUTE_FDS_MAX * size_of::<RawFd>()).div_ceil(8);

/// Descriptors that arrived on a socket, in order of arrival, for messages that are not processed
/// yet. `None` stands for all lost descriptors of one read.
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

    /// Removes and returns the descriptors of the next message, which announces `announced_count`
    /// descriptors. Removes nothing if the result is [`MessageFds::Missing`].
    pub fn take_message_fds(&mut self, announced_count: usize) -> MessageFds {
        if announced_count > 0 && self.0.front().is_some_and(Option::is_none) {
            self.0.pop_front();
            return MessageFds::Lost;
        }
        if self.0.len() < announced_count
            || self.0.iter().take(announced_count).any(Option::is_none)
        {
            return MessageFds::Missing;
        }
        MessageFds::All(self.0.drain(..announced_count).flatten().collect())
    }
}

/// Result of one read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadOutcome {
    /// Number of bytes read; 0 at the end of the stream.
    pub byte_count: usize,
    /// True if the read has emptied the socket. If false, more bytes may be available, because the
    /// kernel stops a read after descriptors and at the end of the buffer.
    pub is_drained: bool,
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
) -> io::Result<ReadOutcome> {
    let mut control = [0u64; CONTROL_WORDS];
    let chunk = buffer.chunk_mut();
    let capacity = chunk.len();
    let mut io_vector = libc::iovec {
        iov_base: chunk.as_mut_ptr().cast(),
        iov_len: capacity,
    };
    // SAFETY: all-zero bytes are a valid `msghdr`: null pointers and numbers.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut io_vector;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    let flags = (flags | MsgFlags::MSG_CMSG_CLOEXEC).bits();
    // SAFETY: the kernel writes only into the buffer and the control words, within the given
    // lengths. Both live through the call, and nothing else refers to them.
    let result = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags) };
    let bytes = usize::try_from(result).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel has written the first `bytes` bytes of the buffer.
    unsafe { buffer.advance_mut(bytes) };
    let mut received_fds = Vec::new();
    // SAFETY: the kernel has filled in the message header, and the control words to which the
    // header points are still alive.
    unsafe { take_fds(&message, &mut received_fds) };
    if message.msg_flags & libc::MSG_CTRUNC == 0 {
        let is_drained = bytes < capacity && received_fds.is_empty();
        pending_fds.0.extend(received_fds.into_iter().map(Some));
        return Ok(ReadOutcome {
            byte_count: bytes,
            is_drained,
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
    Ok(ReadOutcome {
        byte_count: bytes,
        is_drained: false,
    })
}

/// Appends at most `bytes_max` of the available bytes of a stream socket to `buffer`, which does
/// not grow beyond its capacity. Does not wait. Returns the number of bytes; 0 at the end of the
/// stream.
///
/// # Errors
/// `WouldBlock` if nothing is available; any other error ends the connection.
pub fn receive_into_capacity(
    socket: &impl AsFd,
    buffer: &mut Vec<u8>,
    bytes_max: usize,
) -> io::Result<usize> {
    let length = buffer.len();
    let spare = buffer.spare_capacity_mut();
    let limit = bytes_max.min(spare.len());
    // SAFETY: the kernel writes only into the spare capacity, at most `limit` bytes of it.
    let result = unsafe {
        libc::recv(
            socket.as_fd().as_raw_fd(),
            spare.as_mut_ptr().cast(),
            limit,
            libc::MSG_DONTWAIT,
        )
    };
    let byte_count = usize::try_from(result).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel has written `byte_count` bytes behind the content, within the capacity.
    unsafe { buffer.set_len(length + byte_count) };
    Ok(byte_count)
}

/// Takes ownership of the descriptors of a message and appends the descriptors to `fds`.
///
/// # Safety
/// The kernel has filled in `message`, the control buffer of `message` is alive, and this function
/// is called once for `message`.
unsafe fn take_fds(message: &libc::msghdr, fds: &mut Vec<OwnedFd>) {
    // SAFETY: by this function's contract the kernel has filled in the control buffer, so the
    // macros stay inside the buffer.
    let mut header = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !header.is_null() {
        // SAFETY: the macro returned a header inside the buffer, which is aligned for it.
        let (level, message_type, length) = unsafe {
            (
                (*header).cmsg_level,
                (*header).cmsg_type,
                (*header).cmsg_len,
            )
        };
        if (level, message_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: as for the header; the length includes the header.
            let (data, data_bytes) =
                unsafe { (libc::CMSG_DATA(header), length - libc::CMSG_LEN(0) as usize) };
            for index in 0..data_bytes / size_of::<RawFd>() {
                // SAFETY: the kernel wrote complete integers into this range, each a new descriptor
                // that this process owns and no other code knows.
                fds.push(unsafe {
                    OwnedFd::from_raw_fd(data.cast::<RawFd>().add(index).read_unaligned())
                });
            }
        }
        // SAFETY: as for the first header: the control buffer is alive and filled in by the kernel.
        header = unsafe { libc::CMSG_NXTHDR(message, header) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{ControlMessage, sendmsg};
    use std::io::IoSlice;
    use std::os::unix::net::UnixStream;

    fn send(socket: &UnixStream, bytes: &[u8], fds: &[RawFd]) {
        let control_messages = [ControlMessage::ScmRights(fds)];
        let control_messages = if fds.is_empty() {
            &[][..]
        } else {
            &control_messages[..]
        };
        sendmsg::<()>(
            socket.as_raw_fd(),
            &[IoSlice::new(bytes)],
            control_messages,
            MsgFlags::empty(),
            None,
        )
        .expect("sent");
    }

    #[test]
    fn reads_append_bytes_and_keep_descriptor_order() {
        let (sender, receiver) = UnixStream::pair().expect("a pair");
        let files = [
            tempfile::tempfile().expect("a file"),
            tempfile::tempfile().expect("a file"),
        ];
        send(
            &sender,
            b"with",
            &files.each_ref().map(|file| file.as_raw_fd()),
        );
        let (mut buffer, mut pending_fds) = (BytesMut::from(&b"held "[..]), PendingFds::default());
        buffer.reserve(100);
        let outcome = receive(
            &receiver,
            &mut buffer,
            &mut pending_fds,
            MsgFlags::MSG_DONTWAIT,
        )
        .expect("there");
        assert_eq!(
            outcome,
            ReadOutcome {
                byte_count: 4,
                is_drained: false
            }
        );
        assert_eq!((&buffer[..], pending_fds.len()), (&b"held with"[..], 2));
        assert!(matches!(
            pending_fds.take_message_fds(3),
            MessageFds::Missing
        ));
        let MessageFds::All(received_fds) = pending_fds.take_message_fds(2) else {
            panic!("both are here")
        };
        for (file, received_fds) in files.iter().zip(&received_fds) {
            let inode = |fd| nix::sys::stat::fstat(fd).expect("open").st_ino;
            assert_eq!(inode(file.as_fd()), inode(received_fds.as_fd()));
        }
    }

    #[test]
    fn excess_descriptors_are_closed_and_refused() {
        let (sender, receiver) = UnixStream::pair().expect("a pair");
        let file = tempfile::tempfile().expect("a file");
        send(&sender, b"x", &[file.as_raw_fd(); 40]);
        let (mut buffer, mut pending_fds) = (BytesMut::with_capacity(100), PendingFds::default());
        let result = receive(&receiver, &mut buffer, &mut pending_fds, MsgFlags::empty())
            .map_err(|e| e.kind());
        assert_eq!(
            (result, pending_fds.len()),
            (Err(io::ErrorKind::InvalidData), 0)
        );
    }

    #[test]
    fn empty_socket_and_end_of_stream_differ() {
        let (sender, receiver) = UnixStream::pair().expect("a pair");
        let (mut buffer, mut pending_fds) = (BytesMut::with_capacity(100), PendingFds::default());
        let mut read_socket = || {
            receive(
                &receiver,
                &mut buffer,
                &mut pending_fds,
                MsgFlags::MSG_DONTWAIT,
            )
            .map_err(|e| e.kind())
        };
        assert_eq!(read_socket(), Err(io::ErrorKind::WouldBlock));
        drop(sender);
        assert_eq!(
            read_socket(),
            Ok(ReadOutcome {
                byte_count: 0,
                is_drained: true
            })
        );
    }
}
