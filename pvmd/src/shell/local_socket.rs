//! A Unix socket to a task or the tasker, as the daemon's loop uses it. The daemon is woken for what comes in only: an event
//! each time that the other side has read something would cost a wake-up for every message, just when that side has
//! something better to do with the processor. Only while the kernel takes no more is the socket watched for room.

use super::sys::{Socket, watch};
use bytes::BytesMut;
use nix::sys::socket::MsgFlags;
use sempa_socket::{Passed, Received, receive};
use std::io::{self, ErrorKind, IoSlice, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// A connected socket. One task may read while another one writes.
#[derive(Debug)]
pub(crate) struct LocalSocket(AsyncFd<UnixStream>);

impl LocalSocket {
    /// This one.
    ///
    /// # Errors
    /// The kernel has no room for one more.
    pub(crate) fn new(socket: UnixStream) -> io::Result<LocalSocket> {
        socket.set_nonblocking(true)?;
        sempa_socket::make_room(&socket);
        Ok(LocalSocket(watch(socket, Interest::READABLE)?))
    }

    /// The socket itself; it never blocks.
    pub(crate) fn socket(&self) -> &UnixStream {
        self.0.get_ref()
    }

    /// Reads behind what `buffer` holds, as [`receive`] does, once there is something: how many bytes.
    ///
    /// # Errors
    /// As there.
    pub(crate) async fn read(
        &self,
        buffer: &mut BytesMut,
        passed: &mut Passed,
    ) -> io::Result<usize> {
        loop {
            let mut ready = self.0.readable().await?;
            match receive(self.socket(), buffer, passed, MsgFlags::MSG_DONTWAIT) {
                Ok(Received { bytes, all }) => {
                    // What comes later is announced; the end of the stream is not, a second time.
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

    /// Does something that writes, again whenever the kernel has room after it had none.
    ///
    /// # Errors
    /// What it says, but for the lack of room.
    pub(crate) async fn write_with<T>(
        &self,
        mut write: impl FnMut(&UnixStream) -> io::Result<T>,
    ) -> io::Result<T> {
        let mut room = None;
        loop {
            match write(self.socket()) {
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                done => return done,
            }
            let watched = match &room {
                Some(watched) => watched,
                None => room.insert(watch(self.socket().again()?, Interest::WRITABLE)?),
            };
            watched.writable().await?.clear_ready();
        }
    }

    /// Writes all of it.
    ///
    /// # Errors
    /// The other side takes no more, ever.
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

    /// Takes nothing more from the other side. What it has written is read as before, and then the end.
    pub(crate) fn hear_out(&self) {
        // It may be gone already.
        let _ = self.socket().shutdown(Shutdown::Read);
    }

    /// Tells the other side that nothing more comes.
    pub(crate) fn end(&self) {
        // It may be gone already.
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

    /// Bytes of a buffer in these tests.
    const ROOM: usize = 1000;

    fn pair() -> (LocalSocket, UnixStream) {
        let (ours, theirs) = UnixStream::pair().expect("a pair");
        theirs
            .set_read_timeout(Some(Duration::from_secs(10)))
            .expect("a time");
        (LocalSocket::new(ours).expect("watched"), theirs)
    }

    /// Reads until so many bytes are there; all of them and the number of descriptors that came along.
    async fn read(socket: &LocalSocket, bytes: usize) -> (BytesMut, usize) {
        let (mut all, mut descriptors) = (BytesMut::new(), Passed::default());
        while all.len() < bytes {
            all.reserve(ROOM);
            assert!(socket.read(&mut all, &mut descriptors).await.expect("open") > 0);
        }
        (all, descriptors.len())
    }

    #[tokio::test]
    async fn a_socket_hears_what_comes_after_it_has_taken_all_there_was() {
        let (socket, mut theirs) = pair();
        for round in [1, ROOM - 1, ROOM, ROOM + 1, 5 * ROOM, 7] {
            theirs.write_all(&vec![round as u8; round]).expect("room");
            assert_eq!(read(&socket, round).await.0, vec![round as u8; round]);
        }
        drop(theirs);
        assert_eq!(
            socket
                .read(&mut BytesMut::with_capacity(ROOM), &mut Passed::default())
                .await
                .expect("an end"),
            0
        );
    }

    #[tokio::test]
    async fn bytes_behind_descriptors_are_read_though_the_kernel_stops_between() {
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

    #[tokio::test]
    async fn a_writer_that_found_no_room_goes_on_when_the_other_side_has_read() {
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

    #[tokio::test]
    async fn a_socket_that_is_heard_out_ends_behind_what_was_written_though_it_is_held_open() {
        let (socket, mut theirs) = pair();
        let held = theirs.try_clone().expect("a second one");
        theirs.write_all(&[7; 5 * ROOM]).expect("room");
        drop(theirs);
        let mut all = read(&socket, ROOM).await.0;
        socket.hear_out();
        assert!(
            (&held).write(b"more").is_err(),
            "what others write is not for us"
        );
        all.unsplit(read(&socket, 5 * ROOM - all.len()).await.0);
        assert_eq!(all, vec![7; 5 * ROOM]);
        assert_eq!(
            socket
                .read(&mut all, &mut Passed::default())
                .await
                .expect("an end"),
            0
        );
    }

    #[tokio::test]
    async fn who_waits_for_a_socket_learns_that_it_is_heard_out() {
        let (socket, _held) = pair();
        let socket = std::sync::Arc::new(socket);
        let reader = socket.clone();
        let end = tokio::spawn(async move {
            reader
                .read(&mut BytesMut::with_capacity(ROOM), &mut Passed::default())
                .await
                .map_err(|e| e.kind())
        });
        // It waits from here on.
        tokio::task::yield_now().await;
        socket.hear_out();
        assert_eq!(end.await.expect("no panic"), Ok(0));
    }

    #[tokio::test]
    async fn a_writer_hears_that_nobody_will_read() {
        let (socket, theirs) = pair();
        drop(theirs);
        assert!(socket.write_all(&mut [IoSlice::new(b"x")]).await.is_err());
    }
}
