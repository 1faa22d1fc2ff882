//! Frames of a task's socket together with the descriptors that travel with some of them.
//!
//! Descriptors are attached to the first byte of the frame whose word announces them, and each such frame is written by a
//! call of its own. The kernel never joins two sets of descriptors in one read, so a reader that takes all whole frames
//! after each read knows for sure to which frame a set belongs.
#![allow(unsafe_code)] // recvmsg into room that has not been written yet has no safe form; zeroing it first costs too much

use crate::machine::io::Descriptors;
use bytes::{BufMut, BytesMut};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use sempa_proto::frame::{Frame, FrameDecoder};
use sempa_proto::route::WORD_DESCRIPTORS_MAX;
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use tokio::io::Interest;
use tokio::net::UnixStream;

/// Descriptors of one connection that wait for the rest of their frame: those of a frame that came in part, and of one
/// behind it.
const DESCRIPTORS_WAITING_MAX: usize = 2 * WORD_DESCRIPTORS_MAX;
/// Bytes asked from the socket at once.
const READ_BYTES: usize = 256 << 10;
/// Room for reading below which new room is made.
const READ_BYTES_MIN: usize = 16 << 10;
/// Room for the control message of one read, in words of eight bytes: its head of 16 bytes and the descriptors.
const CONTROL_WORDS: usize = 2 + (WORD_DESCRIPTORS_MAX * size_of::<RawFd>()).div_ceil(8);

/// What has been read from a task's socket and not been taken.
#[derive(Debug, Default)]
pub(crate) struct Incoming {
    decoder: FrameDecoder,
    descriptors: VecDeque<OwnedFd>,
}

impl Incoming {
    /// The next frame, `None` at the end of the stream, or why the bytes are none.
    pub(crate) async fn next_frame(&mut self, stream: &UnixStream) -> Result<Option<Frame>, String> {
        loop {
            if let Some(frame) = self.decoder.next_frame().map_err(|e| e.to_string())? {
                return Ok(Some(frame));
            }
            let left = self.descriptors.len();
            if left > DESCRIPTORS_WAITING_MAX || (left > 0 && self.decoder.is_empty()) {
                return Err("descriptors came that no word had announced".into());
            }
            let buffer = self.decoder.buffer_mut();
            if buffer.capacity() - buffer.len() < READ_BYTES_MIN {
                buffer.reserve(READ_BYTES);
            }
            let descriptors = &mut self.descriptors;
            match stream.async_io(Interest::READABLE, || receive(stream, buffer, descriptors)).await {
                Ok(0) if self.decoder.is_empty() => return Ok(None),
                Ok(0) => return Err("the stream ended in the middle of a frame".into()),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::InvalidData => return Err(e.to_string()),
                // A broken stream ends like a closed one: what was cut off never counted.
                Err(_) => return Ok(None),
            }
        }
    }

    /// The descriptors of the frame that was taken last, which announces so many.
    pub(crate) fn descriptors(&mut self, announced: usize) -> Result<Descriptors, String> {
        if self.descriptors.len() < announced {
            return Err(format!("a word announced {announced} descriptors and {} came", self.descriptors.len()));
        }
        Ok(Descriptors::new(self.descriptors.drain(..announced).collect()))
    }
}

/// Reads what is there, with its descriptors, without waiting. More of these than one word may have is invalid data.
fn receive(stream: &UnixStream, buffer: &mut BytesMut, descriptors: &mut VecDeque<OwnedFd>) -> io::Result<usize> {
    let mut control = [0u64; CONTROL_WORDS];
    let room = buffer.chunk_mut();
    let mut part = libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() };
    // SAFETY: all-zero bytes are a valid `msghdr`: null pointers and numbers.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = &raw mut part;
    message.msg_iovlen = 1;
    message.msg_control = control.as_mut_ptr().cast();
    message.msg_controllen = size_of_val(&control);
    // SAFETY: the kernel writes into the room and the control words only, within the lengths given; both live through
    // the call, and nobody else refers to them.
    let read = unsafe { libc::recvmsg(stream.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    let read = usize::try_from(read).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel has written the first `read` bytes of the room.
    unsafe { buffer.advance_mut(read) };
    // SAFETY: the header is as the kernel left it, and the control words that it points to are still here.
    unsafe { take_descriptors(&message, descriptors) };
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "more descriptors came than one word may have"));
    }
    Ok(read)
}

/// Takes over the descriptors of a message.
///
/// # Safety
/// The kernel has filled in `message`, its control buffer is alive, and this is called once for it.
unsafe fn take_descriptors(message: &libc::msghdr, into: &mut VecDeque<OwnedFd>) {
    // SAFETY: by the caller the control buffer is what the kernel wrote, so the macros stay inside of it.
    let mut head = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !head.is_null() {
        // SAFETY: the macro gave a head inside the buffer, which is aligned for it.
        let (level, kind, length) = unsafe { ((*head).cmsg_level, (*head).cmsg_type, (*head).cmsg_len) };
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: as above; the length counts the head.
            let (data, bytes) = unsafe { (libc::CMSG_DATA(head), length - libc::CMSG_LEN(0) as usize) };
            for at in 0..bytes / size_of::<RawFd>() {
                // SAFETY: the kernel wrote whole numbers there, each of a descriptor that it made for us and that nobody
                // else knows.
                into.push_back(unsafe { OwnedFd::from_raw_fd(data.cast::<RawFd>().add(at).read_unaligned()) });
            }
        }
        // SAFETY: as for the first one.
        head = unsafe { libc::CMSG_NXTHDR(message, head) };
    }
}

/// Writes the beginning of a frame with its descriptors, waiting until the socket takes some of it; says how much it took.
pub(crate) async fn send_with(stream: &UnixStream, frame: &[u8], descriptors: &Descriptors) -> io::Result<usize> {
    let raw: Vec<RawFd> = descriptors.iter().map(|fd: BorrowedFd<'_>| fd.as_raw_fd()).collect();
    let send = || {
        let control = [ControlMessage::ScmRights(&raw)];
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
        Ok(sendmsg::<()>(stream.as_raw_fd(), &[IoSlice::new(frame)], &control, flags, None)?)
    };
    stream.async_io(Interest::WRITABLE, send).await
}
