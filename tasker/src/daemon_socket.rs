//! The tasker's end of the socket to the daemon: reads and writes frames without blocking.

use nix::errno::Errno;
use sempa_proto::frame::{FrameDecoder, FrameError, encode_control};
use sempa_proto::migration::Refusal;
use sempa_proto::tasker::{FromTasker, ToTasker};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Number of queued bytes from which on the tasker does not read its tasks' output. The pipes fill
/// and the tasks wait.
pub(crate) const OUTBOUND_BYTES_HIGH_WATER: usize = 4 << 20;
/// Maximum number of bytes that are read from the socket at once.
const READ_BYTES: usize = 64 << 10;

/// The socket to the daemon with its buffers.
#[derive(Debug)]
pub(crate) struct DaemonSocket {
    socket: OwnedFd,
    decoder: FrameDecoder,
    outbound_bytes: VecDeque<u8>,
    closed: bool,
}

impl DaemonSocket {
    /// Makes the socket non-blocking and takes ownership of it.
    ///
    /// # Errors
    /// The descriptor cannot be made non-blocking.
    pub(crate) fn new(socket: OwnedFd) -> io::Result<DaemonSocket> {
        nix::fcntl::fcntl(
            &socket,
            nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK),
        )?;
        Ok(DaemonSocket {
            socket,
            decoder: FrameDecoder::new(),
            outbound_bytes: VecDeque::new(),
            closed: false,
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// True if bytes are queued for writing and the daemon is still connected.
    pub(crate) fn wants_write(&self) -> bool {
        !self.outbound_bytes.is_empty() && !self.closed
    }

    /// True if the queue has reached its high-water mark: the tasks' output must not be read.
    pub(crate) fn is_congested(&self) -> bool {
        self.outbound_bytes.len() >= OUTBOUND_BYTES_HIGH_WATER
    }

    /// True if the daemon has disconnected, or the socket was closed after an error.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed
    }

    /// Queues a message and writes as many bytes as the socket accepts. A message that does not fit
    /// into a frame is replaced by a refusal.
    pub(crate) fn send(&mut self, message: &FromTasker) {
        let frame = encode_control(message)
            .or_else(|error| encode_control(&substitute_for(message, &error)));
        match frame {
            Ok(frame) => self.outbound_bytes.extend(frame.iter()),
            // Without this message the daemon would wait forever. If the socket closes, the daemon
            // considers the tasker dead and starts another one.
            Err(error) => {
                tracing::error!("cannot encode a message to the daemon: {error}");
                self.closed = true;
            }
        }
        self.flush();
    }

    /// Writes queued bytes until the socket accepts no more.
    pub(crate) fn flush(&mut self) {
        while self.wants_write() {
            let (front, _) = self.outbound_bytes.as_slices();
            match nix::unistd::write(&self.socket, front) {
                Ok(written) => drop(self.outbound_bytes.drain(..written)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return,
                Err(_) => self.closed = true,
            }
        }
    }

    /// Reads the available data and returns the complete messages.
    ///
    /// # Errors
    /// The bytes are not valid frames. The socket can no longer be used.
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
            messages.push(frame.decode_control()?);
        }
        Ok(messages)
    }
}

/// Returns the refusal that replaces a message which is too long. Only the messages listed here can
/// be too long.
fn substitute_for(message: &FromTasker, error: &FrameError) -> FromTasker {
    let refusal = || Refusal::UnsupportedResource {
        what: format!("more facts than fit into a message: {error}"),
    };
    match message {
        FromTasker::Inspected { migration, .. } => {
            let (migration, memory_can_follow, can_pre_copy) = (*migration, false, false);
            FromTasker::Inspected {
                migration,
                result: Err(refusal()),
                supports_post_copy: memory_can_follow,
                supports_pre_copy: can_pre_copy,
            }
        }
        FromTasker::QueryInspected {
            query: question, ..
        } => FromTasker::QueryInspected {
            query: *question,
            result: Err(refusal()),
        },
        FromTasker::Prepared { migration, .. } => FromTasker::Prepared {
            migration: *migration,
            verdict: vec![refusal()],
            supports_post_copy: false,
        },
        FromTasker::QueryVerdict {
            query: question, ..
        } => FromTasker::QueryVerdict {
            query: *question,
            verdict: vec![refusal()],
        },
        other => other.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::frame::FRAME_BYTES_MAX;
    use sempa_proto::migration::{FileRequirement, RequiredFile, TaskFacts};
    use sempa_proto::{MigrationId, RequestId};
    use std::io::Read;
    use std::os::unix::net::UnixStream;

    /// Returns facts that do not fit into a frame.
    fn oversized_facts() -> TaskFacts {
        let path = "x".repeat(4096);
        let file = |n: usize| RequiredFile {
            path: format!("/{n}/{path}").into(),
            bytes: 1,
            requirement: FileRequirement::Exists,
        };
        TaskFacts {
            files: (0..=FRAME_BYTES_MAX / 4096).map(file).collect(),
            ..TaskFacts::default()
        }
    }

    /// A message that does not fit into a frame is replaced by a refusal, and the socket stays
    /// usable.
    #[test]
    fn oversized_message_is_replaced_by_a_refusal() {
        let (here, mut there) = UnixStream::pair().expect("a pair");
        let mut daemon_socket = DaemonSocket::new(here.into()).expect("it can be made so");
        let (migration, question) = (MigrationId(7), RequestId(8));
        let (memory_can_follow, can_pre_copy) = (true, true);
        daemon_socket.send(&FromTasker::Inspected {
            migration,
            result: Ok(oversized_facts()),
            supports_post_copy: memory_can_follow,
            supports_pre_copy: can_pre_copy,
        });
        daemon_socket.send(&FromTasker::QueryInspected {
            query: question,
            result: Ok(oversized_facts()),
        });
        assert!(
            !daemon_socket.is_closed() && !daemon_socket.wants_write(),
            "it goes on"
        );
        drop(daemon_socket);
        let (mut bytes, mut decoder) = (Vec::new(), FrameDecoder::new());
        there.read_to_end(&mut bytes).expect("it was sent");
        decoder.push(&bytes);
        let mut next = || {
            decoder
                .next_frame()
                .expect("a frame")
                .expect("a whole one")
                .decode_control()
                .expect("a word")
        };
        let refused = |why: &Refusal| {
            matches!(why, Refusal::UnsupportedResource { what } if what.contains(
                "more facts than fit into a message"
            ))
        };
        match (next(), next()) {
            (
                FromTasker::Inspected {
                    migration: of,
                    result: Err(first),
                    supports_post_copy: false,
                    supports_pre_copy: false,
                },
                FromTasker::QueryInspected {
                    query: to,
                    result: Err(second),
                },
            ) => assert!(of == migration && to == question && refused(&first) && refused(&second)),
            other => panic!("{other:?}"),
        }
    }
}
