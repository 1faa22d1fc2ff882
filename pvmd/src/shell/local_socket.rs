//! A Unix socket to a task or to the tasker, as the daemon's loop uses it.
//!
//! The daemon is woken only for incoming data. If the daemon also got an event each time the peer
//! reads, each message would cost another wakeup at the moment when the peer needs the processor.
//! The socket is watched for buffer space only while the kernel accepts no more data.

use super::sys::{OwnedSocket, register_socket};
use bytes::BytesMut;
use nix::sys::socket::MsgFlags;
use sempa_socket::{PendingFds, ReadOutcome, receive};
use std::io::{self, ErrorKind, IoSlice, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A connected socket. One tokio task may read while another tokio task writes.
#[derive(Debug)]
pub(crate) struct LocalSocket(AsyncFd<UnixStream>);

impl LocalSocket {
    /// Makes a connected socket non-blocking and registers it with the runtime.
    ///
    /// # Errors
    /// The socket cannot be registered with the runtime.
    pub(crate) fn new(socket: UnixStream) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        sempa_socket::enlarge_send_buffer(&socket);
        Ok(Self(register_socket(socket, Interest::READABLE)?))
    }

    /// Returns the socket, which is non-blocking.
    pub(crate) fn socket(&self) -> &UnixStream {
        self.0.get_ref()
    }

    /// Waits for data and appends the data to `buffer` as [`receive`] does. Returns the number of
    /// bytes; 0 at the end of the stream.
    ///
    /// # Errors
    /// As [`receive`].
    pub(crate) async fn read_into(
        &self,
        buffer: &mut BytesMut,
        received_fds: &mut PendingFds,
    ) -> io::Result<usize> {
        loop {
            let mut ready_guard = self.0.readable().await?;
            match receive(self.socket(), buffer, received_fds, MsgFlags::MSG_DONTWAIT) {
                Ok(ReadOutcome {
                    byte_count: bytes,
                    is_drained,
                }) => {
                    // The kernel signals later data again, but it signals the end of the stream
                    // only once. Therefore the socket stays marked as readable at the end of the
                    // stream.
                    if bytes > 0 && is_drained {
                        ready_guard.clear_ready();
                    }
                    return Ok(bytes);
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => ready_guard.clear_ready(),
                Err(e) => return Err(e),
            }
        }
    }

    /// Runs the operation `write` and returns its result. While the kernel accepts no more data,
    /// waits for buffer space and repeats the operation.
    ///
    /// # Errors
    /// As `write`, except `WouldBlock` and `Interrupted`.
    pub(crate) async fn write_with<T>(
        &self,
        mut write: impl FnMut(&UnixStream) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut writable_watch = None;
        loop {
            match write(self.socket()) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                result => return result,
            }
            let socket_watch = match &writable_watch {
                Some(socket_watch) => socket_watch,
                None => writable_watch.insert(register_socket(
                    self.socket().duplicate()?,
                    Interest::WRITABLE,
                )?),
            };
            socket_watch.writable().await?.clear_ready();
        }
    }

    /// Writes all slices.
    ///
    /// # Errors
    /// The peer will never accept more data.
    pub(crate) async fn write_all(
        &self,
        mut unwritten_slices: &mut [IoSlice<'_>],
    ) -> io::Result<()> {
        IoSlice::advance_slices(&mut unwritten_slices, 0);
        while !unwritten_slices.is_empty() {
            let written_bytes = self
                .write_with(|mut socket| socket.write_vectored(unwritten_slices))
                .await?;
            if written_bytes == 0 {
                return Err(ErrorKind::WriteZero.into());
            }
            IoSlice::advance_slices(&mut unwritten_slices, written_bytes);
        }
        Ok(())
    }

    /// Makes the kernel refuse further data from the peer. Data that was sent before is still read;
    /// then the stream ends.
    pub(crate) fn shut_down_reads(&self) {
        // The call fails if the peer has already closed the connection.
        let _ = self.socket().shutdown(Shutdown::Read);
    }

    /// Signals the end of the stream to the peer.
    pub(crate) fn shut_down_writes(&self) {
        // The call fails if the peer has already closed the connection.
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

    fn socket_pair() -> (LocalSocket, UnixStream) {
        let (local_end, peer_end) = UnixStream::pair().expect("a pair");
        peer_end
            .set_read_timeout(Some(Duration::from_secs(10)))
            .expect("a time");
        (LocalSocket::new(local_end).expect("watched"), peer_end)
    }

    /// Waits until at least `bytes_min` bytes are read. Returns the bytes and the number of
    /// descriptors received.
    async fn read_at_least(socket: &LocalSocket, bytes_min: usize) -> (BytesMut, usize) {
        let (mut received_bytes, mut received_fds) = (BytesMut::new(), PendingFds::default());
        while received_bytes.len() < bytes_min {
            received_bytes.reserve(BUFFER_BYTES);
            assert!(
                socket
                    .read_into(&mut received_bytes, &mut received_fds)
                    .await
                    .expect("open")
                    > 0
            );
        }
        (received_bytes, received_fds.len())
    }

    /// Data that arrives after the buffer was emptied is read, too.
    #[tokio::test]
    async fn read_sees_data_after_emptying_the_buffer() {
        let (socket, mut peer_end) = socket_pair();
        for byte_count in [
            1,
            BUFFER_BYTES - 1,
            BUFFER_BYTES,
            BUFFER_BYTES + 1,
            5 * BUFFER_BYTES,
            7,
        ] {
            peer_end
                .write_all(&vec![byte_count as u8; byte_count])
                .expect("room");
            assert_eq!(
                read_at_least(&socket, byte_count).await.0,
                vec![byte_count as u8; byte_count]
            );
        }
        drop(peer_end);
        assert_eq!(
            socket
                .read_into(
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
        let (socket, mut peer_end) = socket_pair();
        let fds = [peer_end.as_raw_fd()];
        for _ in 0..3 {
            let rights = [ControlMessage::ScmRights(&fds)];
            let data = [IoSlice::new(b"with")];
            sendmsg::<()>(
                peer_end.as_raw_fd(),
                &data,
                &rights,
                MsgFlags::empty(),
                None,
            )
            .expect("room");
        }
        peer_end.write_all(b"without").expect("room");
        assert_eq!(
            read_at_least(&socket, 19).await,
            (b"withwithwithwithout"[..].into(), 3)
        );
    }

    /// A writer that is blocked by a full buffer continues when the peer reads.
    #[tokio::test]
    async fn blocked_writer_continues_after_read() {
        const TOTAL_BYTES: usize = 4 << 20;
        let (socket, mut peer_end) = socket_pair();
        let read_task = tokio::task::spawn_blocking(move || {
            let mut received_bytes = vec![0; TOTAL_BYTES];
            peer_end
                .read_exact(&mut received_bytes)
                .map(|()| received_bytes)
        });
        let content: Vec<u8> = (0..TOTAL_BYTES).map(|index| (index / 1000) as u8).collect();
        let (first_slice, second_slice) = content.split_at(TOTAL_BYTES / 3);
        let mut slices = [&b""[..], first_slice, b"", second_slice].map(IoSlice::new);
        socket.write_all(&mut slices).await.expect("open");
        assert!(
            read_task.await.expect("no panic").expect("all of it") == content,
            "bytes are lost or out of order"
        );
    }

    /// `shut_down_reads` ends the stream after the data that was sent before, even if another
    /// process has a copy of the peer's end open.
    #[tokio::test]
    async fn shut_down_reads_ends_after_earlier_data() {
        let (socket, mut peer_end) = socket_pair();
        let peer_end_copy = peer_end.try_clone().expect("a second one");
        peer_end.write_all(&[7; 5 * BUFFER_BYTES]).expect("room");
        drop(peer_end);
        let mut received_bytes = read_at_least(&socket, BUFFER_BYTES).await.0;
        socket.shut_down_reads();
        assert!(
            (&peer_end_copy).write(b"more").is_err(),
            "what others write is not for us"
        );
        received_bytes.unsplit(
            read_at_least(&socket, 5 * BUFFER_BYTES - received_bytes.len())
                .await
                .0,
        );
        assert_eq!(received_bytes, vec![7; 5 * BUFFER_BYTES]);
        assert_eq!(
            socket
                .read_into(&mut received_bytes, &mut PendingFds::default())
                .await
                .expect("an end"),
            0
        );
    }

    /// A reader that waits for data gets the end of the stream when `shut_down_reads` is called.
    #[tokio::test]
    async fn shut_down_reads_wakes_waiting_reader() {
        let (socket, _peer_end) = socket_pair();
        let socket = std::sync::Arc::new(socket);
        let reader_socket = socket.clone();
        let read_task = tokio::spawn(async move {
            reader_socket
                .read_into(
                    &mut BytesMut::with_capacity(BUFFER_BYTES),
                    &mut PendingFds::default(),
                )
                .await
                .map_err(|e| e.kind())
        });
        // After this yield, the reader is waiting.
        tokio::task::yield_now().await;
        socket.shut_down_reads();
        assert_eq!(read_task.await.expect("no panic"), Ok(0));
    }

    #[tokio::test]
    async fn write_fails_when_peer_is_closed() {
        let (socket, peer_end) = socket_pair();
        drop(peer_end);
        assert!(socket.write_all(&mut [IoSlice::new(b"x")]).await.is_err());
    }
}
