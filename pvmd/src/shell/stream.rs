//! Blocking adapter for a QUIC stream of a session: threads read and write it as they do a socket.

use super::bulk::SILENCE_MAX;
use quinn::{RecvStream, SendStream};
use std::future::Future;
use std::io::{self, ErrorKind};
use std::sync::{Mutex, PoisonError};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;

/// A bidirectional stream. At most one thread reads and one thread writes at a time.
#[derive(Debug)]
pub(super) struct Stream {
    out: Mutex<SendStream>,
    back: Mutex<RecvStream>,
    cut: watch::Sender<bool>,
    runtime: Handle,
}

impl Stream {
    /// Wraps the two halves of a stream. Must be called inside the runtime that drives them.
    pub(super) fn new(out: SendStream, back: RecvStream) -> Stream {
        let (out, back) = (Mutex::new(out), Mutex::new(back));
        Stream {
            out,
            back,
            cut: watch::Sender::new(false),
            runtime: Handle::current(),
        }
    }

    /// As [`io::Read::read`], with a timeout of [`SILENCE_MAX`].
    pub(super) fn read(&self, room: &mut [u8]) -> io::Result<usize> {
        let mut back = self.back.lock().unwrap_or_else(PoisonError::into_inner);
        self.wait(async { Ok(back.read(room).await?.unwrap_or(0)) })
    }

    /// As [`io::Write::write`], with a timeout of [`SILENCE_MAX`].
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        self.wait(async { Ok(out.write(bytes).await?) })
    }

    /// Makes all current and future reads and writes fail. Data written before is still sent.
    pub(super) fn cut(&self) {
        self.cut.send_replace(true);
    }

    fn wait<T>(&self, done: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let mut cut = self.cut.subscribe();
        self.runtime.block_on(async {
            tokio::select! {
                biased;
                _ = cut.wait_for(|cut| *cut) => Err(io::Error::new(ErrorKind::ConnectionAborted, "it was broken off")),
                done = timeout(SILENCE_MAX, done) => done.unwrap_or_else(|_| Err(ErrorKind::TimedOut.into())),
            }
        })
    }
}
