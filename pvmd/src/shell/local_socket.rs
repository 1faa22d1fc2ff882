//! A Unix socket to a task or to the tasker, as the daemon's loop uses it.
//!
//! The daemon is woken only for incoming data. An event each time the peer reads would cost a
//! wakeup per message, at the moment when the peer needs the processor. The socket is watched for
//! buffer space only while the kernel accepts no more data.

use super::sys::{OwnedSocket, register};
use bytes::BytesMut;
use nix::sys::socket::MsgFlags;
use sempa_socket::{PendingFds, Received, receive};
use std::io::{self, ErrorKind, IoSlice, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A connected socket. One tokio task may read while another one writes.
#[derive(Debug)]
pub(crate) struct LocalSocket(AsyncFd<UnixStream>);

impl LocalSocket {
    /// Takes a connected socket and makes it non-blocking.
    ///
    /// # Errors
    /// The socket cannot be registered with the runtime.
    pub(crate) fn new(socket: UnixStream) -> io::Result<LocalSocket> {
        socket.set_nonblocking(true)?;
        sempa_socket::enlarge_send_buffer(&socket);
        Ok(LocalSocket(register(socket, Interest::READABLE)?))
    }

    /// Returns the socket, which is non-blocking.
    pub(crate) fn socket(&self) -> &UnixStream {
        self.0.get_ref()
    }

    /// Appends data to `buffer` as [`receive`] does, waiting until there is some. Returns the
    /// number of bytes; 0 at the end of the stream.
    ///
    /// # Errors
    /// Those of [`receive`].
    pub(crate) async fn read(
        &self,
        buffer: &mut BytesMut,
        passed: &mut PendingFds,
    ) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            match receive(self.socket(), buffer, passed, MsgFlags::MSG_DONTWAIT) {
                Ok(Received {
                    bytes,
                    drained: all,
                }) => {
                    // Data that arrives later is signaled again, but the end of the stream is
                    // signaled only once: at the end the socket stays readable.
                    if bytes > 0 && all {
                        ready.clear_ready();
                    }
                    return Ok(bytes);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => ready.clear_ready(),
                Err(e) => return Err(e),
            }
        }
    }

    /// Runs a write operation; repeats it whenever the kernel has buffer space again.
    ///
    /// # Errors
    /// Those of `write` except `WouldBlock` and `Interrupted`.
    pub(crate) async fn write_with<T>(
        &self,
        mut write: impl FnMut(&UnixStream) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut writable_watch = None;
        loop {
            match write(self.socket()) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                done => return done,
            }
            let watched = match &writable_watch {
                Some(watched) => watched,
                None => {
                    writable_watch.insert(register(self.socket().duplicate()?, Interest::WRITABLE)?)
                }
            };
            watched.writable().await?.clear_ready();
        }
    }

    /// Writes all slices.
    ///
    /// # Errors
    /// The peer will never accept more data.
    pub(crate) async fn write_all(&self, mut slices: &mut [IoSlice<'_>]) -> io::Result<()> {
        IoSlice::advance_slices(&mut slices, 0);
        while !slices.is_empty() {
            let written = self
                .write_with(|mut socket| socket.write_vectored(slices))
                .await?;
            if written == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut slices, written);
        }
        Ok(())
    }

    /// Accepts no further data from the peer. Data sent before is still read, then the end of the
    /// stream.
    pub(crate) fn shut_down_reads(&self) {
        // A failure means that the peer is already gone.
        let _ = self.socket().shutdown(Shutdown::Read);
    }

    /// Signals the end of the stream to the peer.
    pub(crate) fn shut_down_writes(&self) {
        // A failure means that the peer is already gone.
        let _ = self.socket().shutdown(Shutdown::Write);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::sys::socket::{ControlMessage, sendmsg};
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::time::Duration;

    /// Buffer size in these tests.
    const BUFFER_BYTES: usize = 1000;

    fn pair() -> (LocalSocket, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        theirs
            .set_read_timeout(Some(Duration::from_secs(10)))
            .expect("a time");
        (LocalSocket::new(ours).expect("watched"), theirs)
    }

    /// Reads at least `bytes` bytes. Returns them and the number of descriptors received.
    async fn read(socket: &LocalSocket, bytes: usize) -> (BytesMut, usize) {
        let (mut all, mut descriptors) = (BytesMut::new(), PendingFds::default());
        while all.len() < bytes {
            all.reserve(BUFFER_BYTES);
            assert!(socket.read(&mut all, &mut descriptors).await.expect("open") > 0);
        }
        (all, descriptors.len())
    }

    /// Data that arrives after a complete read is still noticed.
    #[tokio::test]
    async fn read_sees_data_after_emptying_the_buffer() {
        let (socket, mut theirs) = pair();
        for round in [
            1,
            BUFFER_BYTES - 1,
            BUFFER_BYTES,
            BUFFER_BYTES + 1,
            5 * BUFFER_BYTES,
            7,
        ] {
            theirs.write_all(&vec![round as u8; round]).expect("room");
            assert_eq!(read(&socket, round).await.0, vec![round as u8; round]);
        }
        drop(theirs);
        assert_eq!(
            socket
                .read(
                    &mut BytesMut::with_capacity(BUFFER_BYTES),
                    &mut PendingFds::default()
                )
                .await
                .expect("an end"),
            0
        );
    }

    /// The kernel ends a read at a set of descriptors; the data after the descriptors is still
    /// read.
    #[tokio::test]
    async fn data_after_descriptors_is_read() {
        let (socket, mut theirs) = pair();
        let fds = [theirs.as_raw_fd()];
        for _ in 0..3 {
            let rights = [ControlMessage::ScmRights(&fds)];
            let with = [IoSlice::new(b"with")];
            sendmsg::<()>(theirs.as_raw_fd(), &with, &rights, MsgFlags::empty(), None)
                .expect("room");
        }
        theirs.write_all(b"without").expect("room");
        assert_eq!(
            read(&socket, 19).await,
            (b"withwithwithwithout"[..].into(), 3)
        );
    }

    /// A writer that found the buffer full continues when the peer reads.
    #[tokio::test]
    async fn blocked_writer_continues_after_read() {
        const ALL: usize = 4 << 20;
        let (socket, mut theirs) = pair();
        let reader = tokio::task::spawn_blocking(move || {
            let mut got = vec![0; ALL];
            theirs.read_exact(&mut got).map(|()| got)
        });
        let sent: Vec<u8> = (0..ALL).map(|at| (at / 1000) as u8).collect();
        let (first, second) = sent.split_at(ALL / 3);
        let mut slices = [&b""[..], first, b"", second].map(IoSlice::new);
        socket.write_all(&mut slices).await.expect("open");
        assert!(
            reader.await.expect("no panic").expect("all of it") == sent,
            "bytes are lost or out of order"
        );
    }

    /// After `shut_down_reads` the stream ends after the data sent before, even if another process
    /// holds the peer's end open.
    #[tokio::test]
    async fn shut_down_reads_ends_after_earlier_data() {
        let (socket, mut theirs) = pair();
        let held = theirs.try_clone().expect("a second one");
        theirs.write_all(&[7; 5 * BUFFER_BYTES]).expect("room");
        drop(theirs);
        let mut all = read(&socket, BUFFER_BYTES).await.0;
        socket.shut_down_reads();
        assert!(
            (&held).write(b"more").is_err(),
            "what others write is not for us"
        );
        all.unsplit(read(&socket, 5 * BUFFER_BYTES - all.len()).await.0);
        assert_eq!(all, vec![7; 5 * BUFFER_BYTES]);
        assert_eq!(
            socket
                .read(&mut all, &mut PendingFds::default())
                .await
                .expect("an end"),
            0
        );
    }

    /// A reader that waits for data sees the end of the stream after `shut_down_reads`.
    #[tokio::test]
    async fn shut_down_reads_wakes_waiting_reader() {
        let (socket, _held) = pair();
        let socket = std::sync::Arc::new(socket);
        let reader = socket.clone();
        let end = tokio::spawn(async move {
            reader
                .read(
                    &mut BytesMut::with_capacity(BUFFER_BYTES),
                    &mut PendingFds::default(),
                )
                .await
                .map_err(|e| e.kind())
        });
        // The reader is waiting from here on.
        tokio::task::yield_now().await;
        socket.shut_down_reads();
        assert_eq!(end.await.expect("no panic"), Ok(0));
    }

    #[tokio::test]
    async fn write_fails_when_peer_is_closed() {
        let (socket, theirs) = pair();
        drop(theirs);
        assert!(socket.write_all(&mut [IoSlice::new(b"x")]).await.is_err());
    }
}
