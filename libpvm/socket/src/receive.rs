//! Reading a socket, with the descriptors that travel on it.
#![allow(unsafe_code)] // recvmsg into room that has not been written yet has no safe form; zeroing it first costs too much

use bytes::{BufMut, BytesMut};
use nix::sys::socket::MsgFlags;
use sempa_proto::route::WORD_DESCRIPTORS_MAX;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Room for the control message of one read, in words of eight bytes: its head of 16 bytes and the descriptors.
const CONTROL_WORDS: usize = 2 + (WORD_DESCRIPTORS_MAX * size_of::<RawFd>()).div_ceil(8);

/// Descriptors that have come on a socket and belong to words that were not taken yet, in the order of these.
#[derive(Debug, Default)]
pub struct Passed(VecDeque<Option<OwnedFd>>);

/// The descriptors of a word.
#[derive(Debug)]
pub enum Taken {
    /// All that it announces.
    All(Vec<OwnedFd>),
    /// This process had no room for them, so the word comes to nothing.
    Lost,
    /// They have not come, though they come with its first byte: whoever sent it breaks the rules.
    Missing,
}

impl Passed {
    /// How many there are; a set for which there was no room counts as one.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// True when none wait.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Closes them all.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Those of the word that comes next, which announces so many.
    pub fn take(&mut self, announced: usize) -> Taken {
        if announced > 0 && self.0.front().is_some_and(Option::is_none) {
            self.0.pop_front();
            return Taken::Lost;
        }
        if self.0.len() < announced || self.0.iter().take(announced).any(Option::is_none) {
            return Taken::Missing;
        }
        Taken::All(self.0.drain(..announced).flatten().collect())
    }
}

/// What a read has brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// Bytes; 0 is the end of the stream.
    pub bytes: usize,
    /// That was all there was; otherwise more may be there, because the kernel stops behind descriptors, and where the room ends.
    pub all: bool,
}

/// Reads what is there behind what `buffer` holds, and takes the descriptors that came along; close-on-exec. Where this process may
/// have no more of them, it is noted that they are lost.
///
/// # Errors
/// `WouldBlock` when nothing is there and waiting was not wanted or took too long, `InvalidData` when more descriptors came
/// than one word may have; anything else ends the connection.
pub fn receive(
    socket: &impl AsFd,
    buffer: &mut BytesMut,
    passed: &mut Passed,
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
    // SAFETY: the kernel writes into the room and the control words only, within the lengths given; both live through
    // the call, and nobody else refers to them.
    let read = unsafe { libc::recvmsg(socket.as_fd().as_raw_fd(), &raw mut message, flags) };
    let bytes = usize::try_from(read).map_err(|_| io::Error::last_os_error())?;
    // SAFETY: the kernel has written the first `bytes` bytes of the room.
    unsafe { buffer.advance_mut(bytes) };
    let mut came = Vec::new();
    // SAFETY: the header is as the kernel left it, and the control words that it points to are still here.
    unsafe { take_descriptors(&message, &mut came) };
    if message.msg_flags & libc::MSG_CTRUNC == 0 {
        let all = bytes < room && came.is_empty();
        passed.0.extend(came.into_iter().map(Some));
        return Ok(Received { bytes, all });
    }
    if came.len() >= WORD_DESCRIPTORS_MAX {
        return Err(io::Error::new(
            io::ErrorKind::InvalidData,
            "more descriptors came than one word may have",
        ));
    }
    // There was room in the control message, so it was this process that had none.
    passed.0.push_back(None);
    Ok(Received { bytes, all: false })
}

/// Takes over the descriptors of a message.
///
/// # Safety
/// The kernel has filled in `message`, its control buffer is alive, and this is called once for it.
unsafe fn take_descriptors(message: &libc::msghdr, into: &mut Vec<OwnedFd>) {
    // SAFETY: by the caller the control buffer is what the kernel wrote, so the macros stay inside of it.
    let mut head = unsafe { libc::CMSG_FIRSTHDR(message) };
    while !head.is_null() {
        // SAFETY: the macro gave a head inside the buffer, which is aligned for it.
        let (level, kind, length) =
            unsafe { ((*head).cmsg_level, (*head).cmsg_type, (*head).cmsg_len) };
        if (level, kind) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
            // SAFETY: as above; the length counts the head.
            let (data, bytes) =
                unsafe { (libc::CMSG_DATA(head), length - libc::CMSG_LEN(0) as usize) };
            for at in 0..bytes / size_of::<RawFd>() {
                // SAFETY: the kernel wrote whole numbers there, each of a descriptor that it made for us and that nobody
                // else knows.
                into.push(unsafe {
                    OwnedFd::from_raw_fd(data.cast::<RawFd>().add(at).read_unaligned())
                });
            }
        }
        // SAFETY: as for the first one.
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
    fn bytes_come_behind_what_is_there_and_descriptors_in_the_order_sent() {
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
        let (mut buffer, mut descriptors) = (BytesMut::from(&b"held "[..]), Passed::default());
        buffer.reserve(100);
        let received =
            receive(&far, &mut buffer, &mut descriptors, MsgFlags::MSG_DONTWAIT).expect("there");
        assert_eq!(
            received,
            Received {
                bytes: 4,
                all: false
            }
        );
        assert_eq!((&buffer[..], descriptors.len()), (&b"held with"[..], 2));
        assert!(matches!(descriptors.take(3), Taken::Missing));
        let Taken::All(got) = descriptors.take(2) else {
            panic!("both are here")
        };
        for (file, got) in files.iter().zip(&got) {
            let number = |fd| nix::sys::stat::fstat(fd).expect("open").st_ino;
            assert_eq!(number(file.as_fd()), number(got.as_fd()));
        }
    }

    #[test]
    fn more_descriptors_than_a_word_may_have_are_closed_and_an_error() {
        let (near, far) = UnixStream::pair().expect("a pair");
        let file = tempfile::tempfile().expect("a file");
        send(&near, b"x", &[file.as_raw_fd(); 40]);
        let (mut buffer, mut descriptors) = (BytesMut::with_capacity(100), Passed::default());
        let refused =
            receive(&far, &mut buffer, &mut descriptors, MsgFlags::empty()).map_err(|e| e.kind());
        assert_eq!(
            (refused, descriptors.len()),
            (Err(io::ErrorKind::InvalidData), 0)
        );
    }

    #[test]
    fn nothing_there_and_the_end_of_the_stream_are_told_apart() {
        let (near, far) = UnixStream::pair().expect("a pair");
        let (mut buffer, mut descriptors) = (BytesMut::with_capacity(100), Passed::default());
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
                all: true
            })
        );
    }
}
