//! Blocking adapter for a QUIC stream of a session: threads read and write it as they do a socket.

use super::limits::STALL_TIMEOUT;
use quinn::{RecvStream, SendStream};
use std::future::Future;
use std::io::{self, ErrorKind};
use std::sync::{Mutex, PoisonError};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;

/// A bidirectional stream. At most one thread reads and one thread writes at a time.
#[derive(Debug)]
pub(super) struct BlockingStream {
    send_half: Mutex<SendStream>,
    receive_half: Mutex<RecvStream>,
    aborted: watch::Sender<bool>,
    runtime: Handle,
}

impl BlockingStream {
    /// Wraps the two halves of a stream. Must be called inside the runtime that drives them.
    pub(super) fn new(send_half: SendStream, receive_half: RecvStream) -> BlockingStream {
        let (send_half, receive_half) = (Mutex::new(send_half), Mutex::new(receive_half));
        BlockingStream {
            send_half,
            receive_half,
            aborted: watch::Sender::new(false),
            runtime: Handle::current(),
        }
    }

    /// As [`io::Read::read`], with a timeout of [`STALL_TIMEOUT`].
    pub(super) fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        let mut back = self
            .receive_half
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.block_on(async { Ok(back.read(buffer).await?.unwrap_or(0)) })
    }

    /// As [`io::Write::write`], with a timeout of [`STALL_TIMEOUT`].
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut out = self
            .send_half
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.block_on(async { Ok(out.write(bytes).await?) })
    }

    /// Makes all current and future reads and writes fail. Data written before is still sent.
    pub(super) fn abort(&self) {
        self.aborted.send_replace(true);
    }

    fn block_on<T>(&self, done: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let mut cut = self.aborted.subscribe();
        self.runtime.block_on(async {
            tokio::select! {
                biased;
                _ = cut.wait_for(|cut| *cut) => Err(io::Error::new(ErrorKind::ConnectionAborted, "the transfer was \
                                                                                                  aborted")),
                done = timeout(STALL_TIMEOUT, done) => done.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into())),
            }
        })
    }
}
