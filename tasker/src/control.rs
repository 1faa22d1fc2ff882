//! The tasker's side of its socket to the daemon: frames in, frames out, without blocking.

use nix::errno::Errno;
use sempa_proto::frame::{FrameDecoder, FrameError, encode_control};
use sempa_proto::tasker::{FromTasker, ToTasker};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Bytes that wait for the daemon before the tasker stops reading its tasks' output (their pipes fill and they wait).
pub(crate) const OUTBOUND_BYTES_HIGH: usize = 4 << 20;
/// Bytes read from the socket at once.
const READ_BYTES: usize = 64 << 10;

/// The socket with its buffers.
#[derive(Debug)]
pub(crate) struct Control {
    socket: OwnedFd,
    decoder: FrameDecoder,
    outbound: VecDeque<u8>,
    closed: bool,
}

impl Control {
    /// Takes the socket over and makes it non-blocking.
    ///
    /// # Errors
    /// When it is not a descriptor that can be made so.
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Control> {
        nix::fcntl::fcntl(&socket, nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK))?;
        Ok(Control { socket, decoder: FrameDecoder::new(), outbound: VecDeque::new(), closed: false })
    }

    /// The socket, for polling.
    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// True when bytes wait to be written.
    pub(crate) fn wants_write(&self) -> bool {
        !self.outbound.is_empty() && !self.closed
    }

    /// True when so much waits that tasks' output should not be read now.
    pub(crate) fn is_full(&self) -> bool {
        self.outbound.len() >= OUTBOUND_BYTES_HIGH
    }

    /// True when the daemon is gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Sends what can be sent now and keeps the rest.
    pub(crate) fn send(&mut self, message: &FromTasker) {
        let frame = encode_control(message).expect("what the tasker says is far below the frame limit");
        self.outbound.extend(frame.iter());
        self.flush();
    }

    /// Writes as much as the socket takes.
    pub(crate) fn flush(&mut self) {
        while self.wants_write() {
            let (front, _) = self.outbound.as_slices();
            match nix::unistd::write(&self.socket, front) {
                Ok(written) => drop(self.outbound.drain(..written)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return,
                Err(_) => self.closed = true,
            }
        }
    }

    /// Reads what is there and returns the whole messages.
    ///
    /// # Errors
    /// When the bytes are not frames; the socket is of no use any more.
    pub(crate) fn receive(&mut self) -> Result<Vec<ToTasker>, FrameError> {
        let mut bytes = vec![0u8; READ_BYTES];
        match nix::unistd::read(&self.socket, &mut bytes) {
            Ok(0) => self.closed = true,
            Ok(read) => self.decoder.push(&bytes[..read]),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(_) => self.closed = true,
        }
        let mut messages = Vec::new();
        while let Some(frame) = self.decoder.next_frame()? {
            messages.push(frame.control()?);
        }
        Ok(messages)
    }
}
