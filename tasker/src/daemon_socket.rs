//! The tasker's end of the socket to the daemon: reads and writes frames without blocking.

use nix::errno::Errno;
use sempa_proto::frame::{FrameDecoder, FrameError, encode_control};
use sempa_proto::migration::Refusal;
use sempa_proto::tasker::{FromTasker, ToTasker};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

/// Number of queued bytes at which the tasker stops reading the output of its tasks. The pipes of
/// the tasks then fill, and the tasks block.
pub(crate) const OUTBOUND_BYTES_HIGH_WATER: usize = 4 << 20;
/// Maximum number of bytes that one call of [`DaemonSocket::receive`] reads.
const READ_BYTES_MAX: usize = 64 << 10;

/// The socket to the daemon with its buffers.
#[derive(Debug)]
pub(crate) struct DaemonSocket {
    socket: OwnedFd,
    decoder: FrameDecoder,
    outbound_queue: VecDeque<u8>,
    is_closed: bool,
}

impl DaemonSocket {
    /// Makes the socket non-blocking and takes ownership of it.
    ///
    /// # Errors
    /// The descriptor cannot be made non-blocking.
    pub(crate) fn new(socket: OwnedFd) -> io::Result<Self> {
        nix::fcntl::fcntl(
            &socket,
            nix::fcntl::FcntlArg::F_SETFL(nix::fcntl::OFlag::O_NONBLOCK),
        )?;
        Ok(Self {
            socket,
            decoder: FrameDecoder::new(),
            outbound_queue: VecDeque::new(),
            is_closed: false,
        })
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }

    /// True if bytes are queued for writing and the daemon is still connected.
    pub(crate) fn has_queued_bytes(&self) -> bool {
        !self.outbound_queue.is_empty() && !self.is_closed
    }

    /// True if the queue has reached [`OUTBOUND_BYTES_HIGH_WATER`]. Then the output of tasks must
    /// not be read.
    pub(crate) fn is_congested(&self) -> bool {
        self.outbound_queue.len() >= OUTBOUND_BYTES_HIGH_WATER
    }

    /// True if the daemon has disconnected, or the socket was closed after an error.
    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed
    }

    /// Queues a message and writes as many bytes as the socket accepts. If the message is too long
    /// for a frame, a refusal is sent instead.
    pub(crate) fn send(&mut self, message: &FromTasker) {
        let frame = encode_control(message)
            .or_else(|error| encode_control(&refusal_for_oversized(message, &error)));
        match frame {
            Ok(frame) => self.outbound_queue.extend(frame.iter()),
            // Without a message the daemon would wait forever. If the socket closes, the daemon
            // considers the tasker dead and starts another one.
            Err(error) => {
                tracing::error!("cannot encode a message to the daemon: {error}");
                self.is_closed = true;
            }
        }
        self.flush();
    }

    /// Writes queued bytes until the socket accepts no more.
    pub(crate) fn flush(&mut self) {
        while self.has_queued_bytes() {
            let (front_bytes, _) = self.outbound_queue.as_slices();
            match nix::unistd::write(&self.socket, front_bytes) {
                Ok(written_bytes) => drop(self.outbound_queue.drain(..written_bytes)),
                Err(Errno::EINTR) => {}
                Err(Errno::EAGAIN) => return,
                Err(_) => self.is_closed = true,
            }
        }
    }

    /// Reads the available data without blocking, and returns the complete messages.
    ///
    /// # Errors
    /// The bytes are not valid frames. The socket can no longer be used.
    pub(crate) fn receive(&mut self) -> Result<Vec<ToTasker>, FrameError> {
        let mut bytes = vec![0u8; READ_BYTES_MAX];
        match nix::unistd::read(&self.socket, &mut bytes) {
            Ok(0) => self.is_closed = true,
            Ok(read_bytes) => self.decoder.push(&bytes[..read_bytes]),
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            Err(_) => self.is_closed = true,
        }
        let mut messages = Vec::new();
        while let Some(frame) = self.decoder.next_frame()? {
            messages.push(frame.decode_control()?);
        }
        Ok(messages)
    }
}

/// Returns the refusal that is sent instead of a message which is too long. For a message that
/// cannot be too long, returns a copy of the message.
fn refusal_for_oversized(message: &FromTasker, error: &FrameError) -> FromTasker {
    let refusal = || Refusal::UnsupportedResource {
        what: format!("more facts than fit into a message: {error}"),
    };
    match message {
        FromTasker::Inspected { migration, .. } => {
            let (migration, supports_post_copy, supports_pre_copy) = (*migration, false, false);
            FromTasker::Inspected {
                migration,
                result: Err(refusal()),
                supports_post_copy,
                supports_pre_copy,
            }
        }
        FromTasker::QueryInspected { query, .. } => FromTasker::QueryInspected {
            query: *query,
            result: Err(refusal()),
        },
        FromTasker::Prepared { migration, .. } => FromTasker::Prepared {
            migration: *migration,
            verdict: vec![refusal()],
            supports_post_copy: false,
        },
        FromTasker::QueryVerdict { query, .. } => FromTasker::QueryVerdict {
            query: *query,
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

    /// An oversized message is replaced by a refusal, and the socket stays usable.
    #[test]
    fn oversized_message_is_replaced_by_a_refusal() {
        let (tasker_socket, mut test_socket) = UnixStream::pair().expect("a pair");
        let mut daemon_socket = DaemonSocket::new(tasker_socket.into()).expect("it can be made so");
        let (migration, query) = (MigrationId(7), RequestId(8));
        let (supports_post_copy, supports_pre_copy) = (true, true);
        daemon_socket.send(&FromTasker::Inspected {
            migration,
            result: Ok(oversized_facts()),
            supports_post_copy,
            supports_pre_copy,
        });
        daemon_socket.send(&FromTasker::QueryInspected {
            query,
            result: Ok(oversized_facts()),
        });
        assert!(
            !daemon_socket.is_closed() && !daemon_socket.has_queued_bytes(),
            "it goes on"
        );
        drop(daemon_socket);
        let (mut bytes, mut decoder) = (Vec::new(), FrameDecoder::new());
        test_socket.read_to_end(&mut bytes).expect("it was sent");
        decoder.push(&bytes);
        let mut read_message = || {
            decoder
                .next_frame()
                .expect("a frame")
                .expect("a whole one")
                .decode_control()
                .expect("a word")
        };
        let is_size_refusal = |why: &Refusal| {
            matches!(why, Refusal::UnsupportedResource { what } if what.contains(
                "more facts than fit into a message"
            ))
        };
        match (read_message(), read_message()) {
            (
                FromTasker::Inspected {
                    migration: reply_migration,
                    result: Err(first_refusal),
                    supports_post_copy: false,
                    supports_pre_copy: false,
                },
                FromTasker::QueryInspected {
                    query: reply_query,
                    result: Err(second_refusal),
                },
            ) => assert!(
                reply_migration == migration
                    && reply_query == query
                    && is_size_refusal(&first_refusal)
                    && is_size_refusal(&second_refusal)
            ),
            other => panic!("{other:?}"),
        }
    }
}
