//! Frames of a task's socket together with the descriptors that travel with some of them.
//!
//! Descriptors are attached to the first byte of the frame whose word announces them, and each such frame is written by a
//! call of its own. The kernel never joins two sets of descriptors in one read, so a reader that takes all whole frames
//! after each read knows for sure to which frame a set belongs.

use super::local_socket::LocalSocket;
use nix::errno::Errno;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use pvmd_machine::io::Descriptors;
use sempa_proto::frame::{Frame, FrameDecoder};
use sempa_proto::route::WORD_DESCRIPTORS_MAX;
use sempa_socket::{Passed, Taken};
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::net::UnixStream;

/// Descriptors of one connection that wait for the rest of their frame: those of a frame that came in part, and of one
/// behind it.
const DESCRIPTORS_WAITING_MAX: usize = 2 * WORD_DESCRIPTORS_MAX;
/// Bytes asked from the socket at once.
const READ_BYTES: usize = 256 << 10;
/// Room for reading below which new room is made.
const READ_BYTES_MIN: usize = 16 << 10;

/// What has been read from a task's socket and not been taken.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    decoder: FrameDecoder,
    passed: Passed,
}

impl Incoming {
    /// The next frame, `None` at the end of the stream, or why the bytes are none.
    pub(crate) async fn next_frame(
        &mut self,
        socket: &LocalSocket,
    ) -> Result<Option<Frame>, String> {
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(|e| e.to_string())? {
                return Ok(Some(frame));
            }
            let left = self.passed.len();
            if left > DESCRIPTORS_WAITING_MAX || (left > 0 && self.decoder.is_empty()) {
                return Err("descriptors came that no word had announced".into());
            }
            let buffer = self.decoder.buffer_mut();
            if buffer.capacity() - buffer.len() < READ_BYTES_MIN {
                buffer.reserve(READ_BYTES);
            }
            match socket.read(buffer, &mut self.passed).await {
                Ok(0) if self.decoder.is_empty() => return Ok(None),
                Ok(0) => return Err("the stream ended in the middle of a frame".into()),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::InvalidData => return Err(e.to_string()),
                // A broken stream ends like a closed one: what was cut off never counted.
                Err(_) => return Ok(None),
            }
        }
    }

    /// The descriptors of the frame that was taken last, which announces so many; none if this daemon may have no more of them.
    pub(crate) fn descriptors(&mut self, announced: usize) -> Result<Descriptors, String> {
        match self.passed.take(announced) {
            Taken::All(all) => Ok(Descriptors::new(all)),
            Taken::Lost => Ok(Descriptors::default()),
            Taken::Missing => Err(format!(
                "a word announced {announced} descriptors and {} came",
                self.passed.len()
            )),
        }
    }
}

/// Writes the beginning of a frame with its descriptors, waiting until the socket takes some of it; says how much it took. It
/// takes all of a frame that comes to nothing because too many descriptors of this user are on their way: what offers or
/// accepts a route is forgotten by both sides when no answer comes, and the daemons go on carrying their messages.
pub(crate) async fn send_with(
    socket: &LocalSocket,
    frame: &[u8],
    descriptors: &Descriptors,
) -> io::Result<usize> {
    let raw: Vec<RawFd> = descriptors
        .iter()
        .map(|fd: BorrowedFd<'_>| fd.as_raw_fd())
        .collect();
    let control = [ControlMessage::ScmRights(&raw)];
    let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
    let send = |socket: &UnixStream| match sendmsg::<()>(
        socket.as_raw_fd(),
        &[IoSlice::new(frame)],
        &control,
        flags,
        None,
    ) {
        Err(Errno::ETOOMANYREFS) => Ok(frame.len()),
        sent => Ok(sent?),
    };
    socket.write_with(send).await
}
