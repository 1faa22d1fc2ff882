//! Frames of a task's socket, and the file descriptors that some of these frames carry.
//!
//! A frame that carries descriptors is written by a separate call, with the descriptors attached to
//! the frame's first byte. The kernel never merges two sets of descriptors in one read. Therefore a
//! reader that decodes all complete frames after each read can assign each set to its frame.

use super::local_socket::LocalSocket;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use pvmd_machine::io::Descriptors;
use sempa_proto::frame::{Frame, FrameDecoder, FrameError};
use sempa_proto::route::ROUTE_FDS_MAX;
use sempa_socket::{MessageFds, PendingFds};
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;
use thiserror::Error;

/// Maximum number of received descriptors of one connection whose frame is still incomplete. The
/// limit suffices for the descriptors of a partly received frame and of the next frame.
const DESCRIPTORS_PENDING_MAX: usize = 2 * ROUTE_FDS_MAX;
/// Buffer space reserved for a read.
const READ_SPACE_BYTES: usize = 256 << 10;
/// Minimum free space in the buffer. If less space is free, the buffer is enlarged.
const READ_SPACE_BYTES_MIN: usize = 16 << 10;

/// Data and descriptors that were read from a task's socket and not yet returned to the caller.
#[derive(Debug, Default)]
pub(crate) struct TaskFrameReader {
    decoder: FrameDecoder,
    received_fds: PendingFds,
}

/// Reason why no frame can be read from a task's socket. Earlier frames were processed. The stream
/// is unusable after the error.
#[derive(Debug, Error)]
pub(crate) enum ReadFrameError {
    #[error(transparent)]
    Decode(FrameError),
    #[error("received descriptors that no control frame had announced")]
    UnannouncedDescriptors,
    #[error("the stream ended in the middle of a frame")]
    EndedInFrame,
    #[error(transparent)]
    Read(io::Error),
    #[error("a control frame announced {announced} descriptors, but {received} arrived")]
    MissingDescriptors { announced: usize, received: usize },
}

impl TaskFrameReader {
    /// Waits for the next frame and returns the frame, or `None` at the end of the stream or if the
    /// stream is unreadable.
    ///
    /// # Errors
    /// The bytes are not a frame, or the descriptors do not match the frames.
    pub(crate) async fn next_frame(
        &mut self,
        socket: &LocalSocket,
    ) -> Result<Option<Frame>, ReadFrameError> {
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(ReadFrameError::Decode)? {
                return Ok(Some(frame));
            }
            let pending_fd_count = self.received_fds.len();
            if pending_fd_count > DESCRIPTORS_PENDING_MAX
                || (pending_fd_count > 0 && self.decoder.is_empty())
            {
                return Err(ReadFrameError::UnannouncedDescriptors);
            }
            let buffer = self.decoder.buffer_mut();
            if buffer.capacity() - buffer.len() < READ_SPACE_BYTES_MIN {
                buffer.reserve(READ_SPACE_BYTES);
            }
            match socket.read_into(buffer, &mut self.received_fds).await {
                Ok(0) if self.decoder.is_empty() => return Ok(None),
                Ok(0) => return Err(ReadFrameError::EndedInFrame),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::InvalidData => {
                    return Err(ReadFrameError::Read(e));
                }
                // An unreadable stream is treated like a closed stream, because an incomplete frame
                // never takes effect.
                Err(_) => return Ok(None),
            }
        }
    }

    /// Returns the bytes that were read but are not part of a returned frame.
    pub(crate) fn unread(&mut self) -> &[u8] {
        self.decoder.buffer_mut()
    }

    /// Returns the descriptors of the frame that [`TaskFrameReader::next_frame`] returned last.
    /// This frame announces `announced_count` descriptors.
    ///
    /// Returns no descriptors if the kernel has dropped them because this daemon has reached its
    /// limit of open files.
    ///
    /// # Errors
    /// The task has sent fewer descriptors than announced.
    pub(crate) fn take_descriptors(
        &mut self,
        announced_count: usize,
    ) -> Result<Descriptors, ReadFrameError> {
        match self.received_fds.take_message_fds(announced_count) {
            MessageFds::All(fds) => Ok(Descriptors::new(fds)),
            MessageFds::Lost => Ok(Descriptors::default()),
            MessageFds::Missing => Err(ReadFrameError::MissingDescriptors {
                announced: announced_count,
                received: self.received_fds.len(),
            }),
        }
    }
}

/// Writes the first bytes of a frame together with its descriptors. Waits until the socket accepts
/// at least one byte. Returns the number of bytes written.
///
/// If too many descriptors of this user are in flight (ETOOMANYREFS), the frame is dropped and
/// reported as written. Such frames offer or accept a route: without a reply, both tasks forget the
/// route, and the daemons continue to forward the messages.
pub(crate) async fn send_with_descriptors(
    socket: &LocalSocket,
    frame: &[u8],
    descriptors: &Descriptors,
) -> io::Result<usize> {
    let raw_fds: Vec<RawFd> = descriptors
        .iter()
        .map(|fd: BorrowedFd<'_>| fd.as_raw_fd())
        .collect();
    let control = [ControlMessage::ScmRights(&raw_fds)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    let send_frame = |socket: &UnixStream| match sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(frame)],
        &control,
        flags,
        None,
    ) {
        Err(Errno::ETOOMANYREFS) => Ok(frame.len()),
        send_result => Ok(send_result?),
    };
    socket.write_with(send_frame).await
}
