//! A stream of a session, both ways, for threads that read and write as they do with a socket.

use super::bulk::SILENCE_MAX;
use quinn::{RecvStream, SendStream};
use std::future::Future;
use std::io::{self, ErrorKind};
use std::sync::{Mutex, PoisonError};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;

/// The stream. One thread at a time reads, and one writes.
#[derive(Debug)]
pub(super) struct Stream {
    out: Mutex<SendStream>,
    back: Mutex<RecvStream>,
    cut: watch::Sender<bool>,
    runtime: Handle,
}

impl Stream {
    /// Of these two halves; for use by threads of the runtime that calls.
    pub(super) fn new(out: SendStream, back: RecvStream) -> Stream {
        let (out, back) = (Mutex::new(out), Mutex::new(back));
        Stream {
            out,
            back,
            cut: watch::Sender::new(false),
            runtime: Handle::current(),
        }
    }

    /// As [`io::Read::read`].
    pub(super) fn read(&self, room: &mut [u8]) -> io::Result<usize> {
        let mut back = self.back.lock().unwrap_or_else(PoisonError::into_inner);
        self.wait(async { Ok(back.read(room).await?.unwrap_or(0)) })
    }

    /// As [`io::Write::write`].
    pub(super) fn write(&self, bytes: &[u8]) -> io::Result<usize> {
        let mut out = self.out.lock().unwrap_or_else(PoisonError::into_inner);
        self.wait(async { Ok(out.write(bytes).await?) })
    }

    /// Ends it now: whoever reads or writes gets an error. What was written is sent all the same.
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
