//! The tasker's end of the socket to the daemon: reads and writes frames without blocking.
//!
//! All orders that have arrived are read into queues before one of them is handled, so that urgent
//! orders need not wait for others: a renewal of the lease may arrive behind hundreds of starts.

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
/// Maximum number of bytes that one read from the socket returns.
const READ_BYTES_MAX: usize = 64 << 10;
/// Number of bytes of queued orders at which the tasker stops reading orders until it has handled
/// some. The daemon then queues further orders.
const INBOUND_BYTES_HIGH_WATER: usize = 64 << 20;

/// The socket to the daemon with its buffers.
#[derive(Debug)]
pub(crate) struct DaemonSocket {
    socket: OwnedFd,
    decoder: FrameDecoder,
    /// Kept, because the main loop reads before each order.
    read_buffer: Box<[u8]>,
    outbound_queue: VecDeque<u8>,
    inbound_queue: InboundQueue,
    is_closed: bool,
}

/// Orders that were received and not handled yet.
#[derive(Debug, Default)]
struct InboundQueue {
    /// Orders that are handled before all others.
    urgent_orders: VecDeque<ToTasker>,
    /// The other orders, each with the length of its frame's body in bytes.
    orders: VecDeque<(ToTasker, usize)>,
    /// Total length of the frames of `orders`.
    bytes: usize,
}

impl InboundQueue {
    fn push(&mut self, order: ToTasker, bytes: usize) {
        match order {
            ToTasker::RenewLease { .. } | ToTasker::Ping => self.urgent_orders.push_back(order),
            _ => {
                self.bytes += bytes;
                self.orders.push_back((order, bytes));
            }
        }
    }

    fn pop(&mut self) -> Option<ToTasker> {
        let (order, bytes) = self.orders.pop_front()?;
        self.bytes -= bytes;
        Some(order)
    }
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
            read_buffer: vec![0; READ_BYTES_MAX].into(),
            outbound_queue: VecDeque::new(),
            inbound_queue: InboundQueue::default(),
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

    /// Reads all available orders into the queues without blocking, up to
    /// [`INBOUND_BYTES_HIGH_WATER`].
    ///
    /// # Errors
    /// The bytes are not valid frames. The socket can no longer be used.
    pub(crate) fn receive(&mut self) -> Result<(), FrameError> {
        while !self.is_closed && self.inbound_queue.bytes < INBOUND_BYTES_HIGH_WATER {
            match nix::unistd::read(&self.socket, &mut self.read_buffer) {
                Ok(0) => self.is_closed = true,
                Ok(read_bytes) => self.decoder.push(&self.read_buffer[..read_bytes]),
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => return Ok(()),
                Err(_) => self.is_closed = true,
            }
            while let Some(frame) = self.decoder.next_frame()? {
                let order = frame.decode_control()?;
                self.inbound_queue.push(order, frame.body.len());
            }
        }
        Ok(())
    }

    /// Returns the next received order that must not wait for others: a renewal of the lease, or a
    /// question whether the tasker handles orders.
    pub(crate) fn next_urgent_order(&mut self) -> Option<ToTasker> {
        self.inbound_queue.urgent_orders.pop_front()
    }

    /// Returns the next of the other received orders; `None` after the daemon has disconnected.
    pub(crate) fn next_order(&mut self) -> Option<ToTasker> {
        self.inbound_queue.pop().filter(|_| !self.is_closed)
    }

    /// True if a received order waits.
    pub(crate) fn has_orders(&self) -> bool {
        !self.inbound_queue.orders.is_empty() || !self.inbound_queue.urgent_orders.is_empty()
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
    use sempa_proto::{Micros, MigrationId, RequestId, Tid};
    use std::io::{Read, Write};
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

    /// A renewal of the lease does not wait for the orders that were sent before it, and these keep
    /// their order.
    #[test]
    fn renewal_is_handled_before_other_orders() {
        let (tasker_socket, mut test_socket) = UnixStream::pair().expect("a pair");
        let mut daemon_socket = DaemonSocket::new(tasker_socket.into()).expect("it can be made so");
        let renewal = ToTasker::RenewLease {
            freeze_at: Micros(1),
            kill_at: Micros(2),
        };
        let kill = |number: i32| ToTasker::Kill {
            tid: Tid::from_raw(0x40000 + number),
        };
        // More than one read returns.
        let count = i32::try_from(READ_BYTES_MAX / 4).expect("small");
        let orders = (0..count)
            .map(kill)
            .chain([renewal.clone(), ToTasker::Ping]);
        let sender = std::thread::spawn(move || {
            for order in orders {
                let frame = encode_control(&order).expect("it is short");
                test_socket.write_all(&frame).expect("it is read");
            }
            test_socket
        });
        while daemon_socket.inbound_queue.urgent_orders.len() < 2 {
            daemon_socket.receive().expect("valid frames");
        }
        let _test_socket = sender.join().expect("it has sent all");
        assert_eq!(daemon_socket.next_urgent_order(), Some(renewal));
        assert_eq!(daemon_socket.next_urgent_order(), Some(ToTasker::Ping));
        assert_eq!(daemon_socket.next_urgent_order(), None);
        for number in 0..count {
            assert_eq!(daemon_socket.next_order(), Some(kill(number)));
        }
        assert!(daemon_socket.next_order().is_none() && !daemon_socket.has_orders());
        assert_eq!(daemon_socket.inbound_queue.bytes, 0);
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
