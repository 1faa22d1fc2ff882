//! The daemons' UDP port, as the QUIC library uses it.
//!
//! A datagram costs mostly the system call that carries it and the wakeup that announces it.
//! Therefore this port
//!
//! - wakes the daemon only for incoming data, not for each datagram that has left,
//! - reads again only if more datagrams may be queued,
//! - joins runs of equal datagrams, which the library makes ten at a time, into one system call of
//!   the kernel's maximum size.

use super::limits::DATAGRAM_BYTES_MAX;
use super::sys::register;
use quinn::udp::{EcnCodepoint, RecvMeta, Transmit, UdpSocketState};
use quinn::{AsyncTimer, AsyncUdpSocket, Runtime, TokioRuntime, UdpPoller};
use std::future::{Future, poll_fn};
use std::io::{self, ErrorKind, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Instant;
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

/// Number of datagrams that the library passes in one call when it has more to send.
const RUN_DATAGRAMS: usize = 10;
/// Maximum number of bytes sent by one system call: the longest UDP payload over IPv4.
const SEND_BYTES_MAX: usize = 65_507;
/// Maximum number of datagrams, or runs joined by the kernel, received at once. More of them would
/// leave the processor's cache before they are decrypted.
const RECEIVE_BATCH_MAX: usize = 4;
/// Maximum number of bytes that the kernel joins on receipt (GRO).
const GRO_BYTES_MAX: usize = 64 << 10;

/// The tokio runtime, with this port as its UDP socket.
#[derive(Debug)]
pub(crate) struct PortRuntime;

impl Runtime for PortRuntime {
    fn new_timer(&self, at: Instant) -> Pin<Box<dyn AsyncTimer>> {
        TokioRuntime.new_timer(at)
    }

    fn spawn(&self, future: Pin<Box<dyn Future<Output = ()> + Send>>) {
        TokioRuntime.spawn(future);
    }

    fn wrap_udp_socket(&self, socket: UdpSocket) -> io::Result<Arc<dyn AsyncUdpSocket>> {
        Ok(Arc::new(BatchingPort::new(socket)?))
    }

    fn now(&self) -> Instant {
        TokioRuntime.now()
    }
}

/// The socket and the datagrams collected for its next system call.
#[derive(Debug)]
struct BatchingPort {
    /// State shared with the flush task.
    shared: Arc<PortState>,
}

#[derive(Debug)]
struct PortState {
    /// Registered for reading only: a writable event for every datagram sent would cost a wakeup
    /// each.
    socket: AsyncFd<UdpSocket>,
    state: UdpSocketState,
    batch: Mutex<DatagramBatch>,
    /// True if the last send found the kernel's buffer full.
    send_blocked: AtomicBool,
}

/// Datagrams of equal length and destination that are sent together.
#[derive(Debug)]
struct DatagramBatch {
    bytes: Vec<u8>,
    /// Length of each datagram; the last may be shorter.
    segment_bytes: usize,
    destination: SocketAddr,
    ecn: Option<EcnCodepoint>,
    source_ip: Option<IpAddr>,
    /// True if a flush task is running, which will send the datagrams.
    flush_pending: bool,
}

impl DatagramBatch {
    fn new() -> DatagramBatch {
        let to = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        DatagramBatch {
            bytes: Vec::new(),
            segment_bytes: 1,
            destination: to,
            ecn: None,
            source_ip: None,
            flush_pending: false,
        }
    }

    /// True if the datagrams of a transmit may be sent by the same system call as this batch.
    fn accepts(&self, transmit: &Transmit<'_>, segments_max: usize) -> bool {
        let fits = match transmit.segment_size {
            Some(segment) => segment == self.segment_bytes,
            None => transmit.contents.len() <= self.segment_bytes,
        };
        // Only the last datagram may be shorter than the others.
        let is_even = self.bytes.len().is_multiple_of(self.segment_bytes);
        fits && is_even
            && (transmit.destination, transmit.ecn, transmit.src_ip)
                == (self.destination, self.ecn, self.source_ip)
            && self.has_room(transmit.contents.len(), segments_max)
    }

    fn has_room(&self, bytes: usize, segments_max: usize) -> bool {
        let bytes = self.bytes.len() + bytes;
        bytes <= SEND_BYTES_MAX && bytes.div_ceil(self.segment_bytes) <= segments_max
    }

    fn add(&mut self, transmit: &Transmit<'_>) {
        if self.bytes.is_empty() {
            self.segment_bytes = transmit.segment_size.unwrap_or(transmit.contents.len());
            (self.destination, self.ecn, self.source_ip) =
                (transmit.destination, transmit.ecn, transmit.src_ip);
        }
        self.bytes.extend_from_slice(transmit.contents);
    }
}

impl BatchingPort {
    fn new(socket: UdpSocket) -> io::Result<BatchingPort> {
        socket.set_nonblocking(true)?;
        let state = UdpSocketState::new((&socket).into())?;
        let socket = register(socket, Interest::READABLE)?;
        let (batch, send_blocked) = (Mutex::new(DatagramBatch::new()), AtomicBool::new(false));
        Ok(BatchingPort {
            shared: Arc::new(PortState {
                socket,
                state,
                batch,
                send_blocked,
            }),
        })
    }
}

impl PortState {
    fn lock_batch(&self) -> MutexGuard<'_, DatagramBatch> {
        // After a panic the datagrams are still valid; lost ones are retransmitted.
        self.batch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send_now(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let sent = self.state.send(self.socket.get_ref().into(), transmit);
        if sent.is_err() {
            self.send_blocked.store(true, Ordering::Relaxed);
        }
        sent
    }

    /// Sends the collected datagrams. They are kept if the kernel's buffer is full.
    fn flush(&self, batch: &mut DatagramBatch) -> io::Result<()> {
        if batch.bytes.is_empty() {
            return Ok(());
        }
        let transmit = Transmit {
            destination: batch.destination,
            ecn: batch.ecn,
            contents: &batch.bytes,
            segment_size: (batch.bytes.len() > batch.segment_bytes).then_some(batch.segment_bytes),
            src_ip: batch.source_ip,
        };
        self.send_now(&transmit)?;
        batch.bytes.clear();
        Ok(())
    }

    fn send_or_batch(self: &Arc<PortState>, transmit: &Transmit<'_>) -> io::Result<()> {
        let segments_max = self.state.max_gso_segments();
        let mut batch = self.lock_batch();
        if !batch.accepts(transmit, segments_max) {
            self.flush(&mut batch)?;
        }
        let length = transmit.contents.len();
        let more_follows = transmit
            .segment_size
            .is_some_and(|s| length.is_multiple_of(s) && length >= RUN_DATAGRAMS * s);
        if batch.bytes.is_empty() && !more_follows {
            return self.send_now(transmit);
        }
        batch.add(transmit);
        if more_follows && batch.has_room(length, segments_max) || self.flush(&mut batch).is_err() {
            // The library may not call again, so a task must send what is collected.
            if !std::mem::replace(&mut batch.flush_pending, true) {
                tokio::spawn(flush_when_idle(self.clone()));
            }
        }
        Ok(())
    }
}

/// Sends the collected datagrams once no more were added while all other tasks ran.
async fn flush_when_idle(port: Arc<PortState>) {
    let mut before = 0;
    loop {
        yield_once().await;
        {
            let mut batch = port.lock_batch();
            let now = batch.bytes.len();
            if now <= before && port.flush(&mut batch).is_ok() {
                batch.flush_pending = false;
                return;
            }
            before = now;
        }
        if port.send_blocked.load(Ordering::Relaxed) {
            let mut writable = WritablePoller {
                port: port.clone(),
                watch: None,
            };
            // A socket error shows at the next send.
            let _ = poll_fn(|cx| Pin::new(&mut writable).poll_writable(cx)).await;
        }
    }
}

/// Waits until every runnable task has run once, without polling the sockets.
async fn yield_once() {
    let mut waited = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut waited, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

impl AsyncUdpSocket for BatchingPort {
    fn create_io_poller(self: Arc<Self>) -> Pin<Box<dyn UdpPoller>> {
        Box::pin(WritablePoller {
            port: self.shared.clone(),
            watch: None,
        })
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.shared.send_or_batch(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let PortState { socket, state, .. } = &*self.shared;
        let batch_max = RECEIVE_BATCH_MAX.min(bufs.len());
        loop {
            let mut ready = ready!(socket.poll_read_ready(cx))?;
            match state.recv(
                socket.get_ref().into(),
                &mut bufs[..batch_max],
                &mut meta[..batch_max],
            ) {
                Ok(count) => {
                    if count < batch_max {
                        // The kernel's queue was empty, and later datagrams are signaled again.
                        ready.clear_ready();
                    }
                    return Poll::Ready(Ok(count));
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => ready.clear_ready(),
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.shared.socket.get_ref().local_addr()
    }

    fn may_fragment(&self) -> bool {
        self.shared.state.may_fragment()
    }

    fn max_transmit_segments(&self) -> usize {
        self.shared.state.max_gso_segments()
    }

    fn max_receive_segments(&self) -> usize {
        // The kernel joins at most one maximal datagram. More buffer space would be megabytes,
        // cleared at every start of a daemon.
        self.shared
            .state
            .gro_segments()
            .min(GRO_BYTES_MAX.div_ceil(usize::from(DATAGRAM_BYTES_MAX)))
    }
}

/// Waits until the kernel accepts datagrams again. Watches the socket only while its buffer is
/// full.
#[derive(Debug)]
struct WritablePoller {
    port: Arc<PortState>,
    watch: Option<AsyncFd<UdpSocket>>,
}

impl UdpPoller for WritablePoller {
    fn poll_writable(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.port.send_blocked.load(Ordering::Relaxed) {
            if self.watch.is_none() {
                let again = self.port.socket.get_ref().try_clone();
                let Ok(watch) = again.and_then(|socket| register(socket, Interest::WRITABLE))
                else {
                    // Out of descriptors: poll again after the other tasks, until one is free.
                    self.port.send_blocked.store(false, Ordering::Relaxed);
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                };
                self.watch = Some(watch);
            }
            if let Some(watch) = &self.watch {
                let _ready = ready!(watch.poll_write_ready(cx))?;
            }
            self.port.send_blocked.store(false, Ordering::Relaxed);
        }
        self.watch = None;
        Poll::Ready(Ok(()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Length of the datagrams in the tests.
    const SEGMENT: usize = 1000;

    /// Returns a port, and an ordinary socket to which it sends.
    fn pair() -> (BatchingPort, UdpSocket) {
        let any = (Ipv4Addr::LOCALHOST, 0);
        let receiver = UdpSocket::bind(any).expect("a socket");
        receiver
            .set_read_timeout(Some(Duration::from_secs(10)))
            .expect("a time");
        (
            BatchingPort::new(UdpSocket::bind(any).expect("a socket")).expect("a port"),
            receiver,
        )
    }

    /// Sends datagrams in one transmit, each filled with its number.
    fn send(port: &BatchingPort, to: &UdpSocket, lengths: &[usize], next: &mut u8) {
        let mut contents = Vec::new();
        for length in lengths {
            contents.extend(std::iter::repeat_n(*next, *length));
            *next += 1;
        }
        let segment_size = (lengths.len() > 1).then_some(lengths[0]);
        let destination = to.local_addr().expect("an address");
        let transmit = Transmit {
            destination,
            ecn: None,
            contents: &contents,
            segment_size,
            src_ip: None,
        };
        port.try_send(&transmit)
            .expect("the kernel takes a few datagrams");
    }

    fn receive(receiver: &UdpSocket) -> (usize, u8) {
        let mut buffer = [0; 2 * SEGMENT];
        let length = receiver.recv(&mut buffer).expect("a datagram");
        assert!(
            buffer[..length].iter().all(|byte| *byte == buffer[0]),
            "one datagram holds another one's bytes"
        );
        (length, buffer[0])
    }

    #[tokio::test]
    async fn batched_datagrams_arrive_singly_and_in_order() {
        let (port, receiver) = pair();
        let run = [SEGMENT; RUN_DATAGRAMS];
        let sent: [&[usize]; 9] = [
            &[70],
            &run,
            &run,
            &run,
            &[SEGMENT, SEGMENT, 30],
            &run,
            &[2 * SEGMENT - 1],
            &run,
            &[SEGMENT],
        ];
        let mut next = 0;
        sent.iter()
            .for_each(|lengths| send(&port, &receiver, lengths, &mut next));
        for (number, length) in sent.concat().into_iter().enumerate() {
            assert_eq!(receive(&receiver), (length, number as u8));
        }
    }

    #[test]
    fn shorter_datagram_ends_a_batch() {
        let (run, short) = ([1; 3 * SEGMENT], [2; 30]);
        let transmit = |contents, segment_size| {
            let destination = SocketAddr::from((Ipv4Addr::LOCALHOST, 1));
            Transmit {
                destination,
                ecn: None,
                contents,
                segment_size,
                src_ip: None,
            }
        };
        let mut batch = DatagramBatch::new();
        batch.add(&transmit(&run, Some(SEGMENT)));
        assert!(
            batch.accepts(&transmit(&run, Some(SEGMENT)), 64)
                && batch.accepts(&transmit(&short, None), 64)
        );
        // The kernel's buffer is assumed to be full, so the datagrams stay collected.
        batch.add(&transmit(&short, None));
        assert!(
            !batch.accepts(&transmit(&run, Some(SEGMENT)), 64)
                && !batch.accepts(&transmit(&short, None), 64)
        );
    }

    #[tokio::test]
    async fn last_run_is_flushed_without_another_send() {
        let (port, receiver) = pair();
        send(&port, &receiver, &[SEGMENT; RUN_DATAGRAMS], &mut 0);
        let read = tokio::task::spawn_blocking(move || {
            std::array::from_fn::<_, RUN_DATAGRAMS, _>(|_| receive(&receiver))
        });
        let expected = std::array::from_fn(|number| (SEGMENT, number as u8));
        assert_eq!(read.await.expect("all of them"), expected);
    }

    #[tokio::test]
    async fn full_port_sends_when_writable_again() {
        let (port, receiver) = pair();
        let shared = port.shared.clone();
        let mut poller = Arc::new(port).create_io_poller();
        for _ in 0..2 {
            shared.send_blocked.store(true, Ordering::Relaxed);
            poll_fn(|cx| poller.as_mut().poll_writable(cx))
                .await
                .expect("a socket");
            assert!(!shared.send_blocked.load(Ordering::Relaxed));
        }
        send(&BatchingPort { shared }, &receiver, &[70], &mut 0);
        assert_eq!(receive(&receiver), (70, 0));
    }

    #[tokio::test]
    async fn datagrams_after_an_empty_queue_are_received() {
        let (port, sender) = pair();
        let to = port.local_addr().expect("an address");
        let mut room = vec![0; RECEIVE_BATCH_MAX * (64 << 10)];
        for round in 0..2 * RECEIVE_BATCH_MAX + 3 {
            // Fewer datagrams than one receive call takes, equally many, and more.
            for number in 0..=round {
                sender.send_to(&[number as u8], to).expect("room");
            }
            let mut seen = 0;
            while seen <= round {
                let mut bufs: Vec<IoSliceMut<'_>> =
                    room.chunks_mut(64 << 10).map(IoSliceMut::new).collect();
                let mut meta = [RecvMeta::default(); RECEIVE_BATCH_MAX];
                let count = poll_fn(|cx| port.poll_recv(cx, &mut bufs, &mut meta))
                    .await
                    .expect("datagrams");
                seen += meta[..count].iter().map(|m| m.len).sum::<usize>();
            }
            assert_eq!(seen, round + 1);
        }
    }
}
