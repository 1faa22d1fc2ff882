//! Blocking adapter for a QUIC stream of a session. Threads read and write the stream as they read
//! and write a socket.

use super::limits::STALL_TIMEOUT;
use quinn::{RecvStream, SendStream};
use std::future::Future;
use std::io::{self, ErrorKind};
use std::sync::{Mutex, PoisonError};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;

/// A bidirectional stream. At most one thread may read and at most one thread may write at a time.
#[derive(Debug)]
pub(super) struct BlockingStream {
    send_half: Mutex<SendStream>,
    receive_half: Mutex<RecvStream>,
    is_aborted: watch::Sender<bool>,
    runtime: Handle,
}

impl BlockingStream {
    /// Wraps the two halves of a stream. Must be called inside the runtime that drives the stream.
    pub(super) fn new(send_half: SendStream, receive_half: RecvStream) -> Self {
        let (send_half, receive_half) = (Mutex::new(send_half), Mutex::new(receive_half));
        Self {
            send_half,
            receive_half,
            is_aborted: watch::Sender::new(false),
            runtime: Handle::current(),
        }
    }

    /// As [`io::Read::read`], with a timeout of [`STALL_TIMEOUT`].
    pub(super) fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut receive_half = self
            .receive_half
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.block_on(async { Ok(receive_half.read(buffer).await?.unwrap_or(0)) })
    }

    /// As [`io::Write::write`], with a timeout of [`STALL_TIMEOUT`].
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut send_half = self
            .send_half
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.block_on(async { Ok(send_half.write(bytes).await?) })
    }

    /// Makes all current and future reads and writes fail. Data that was already written is still
    /// sent.
    pub(super) fn abort(&self) {
        self.is_aborted.send_replace(true);
    }

    fn block_on<T>(&self, operation: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let mut abort_flag = self.is_aborted.subscribe();
        self.runtime.block_on(async {
            tokio::select! {
                biased;
                _ = abort_flag.wait_for(|abort_flag| *abort_flag) => Err(io::Error::new(ErrorKind::ConnectionAborted, "the transfer was \
                                                                                                  aborted")),
                operation = timeout(STALL_TIMEOUT, operation) => operation.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into())),
            }
        })
    }
}
