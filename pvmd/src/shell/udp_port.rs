//! The daemons' UDP port, as the QUIC library uses it.
//!
//! Most of the cost of a datagram is the system call that transfers the datagram and the wakeup
//! that announces the datagram. Therefore this port
//!
//! - wakes the daemon only for incoming data, not for each datagram that was sent,
//! - reads again only if more datagrams may be queued,
//! - joins runs of equally long datagrams, which the library produces ten at a time, into one
//!   system call of the kernel's maximum size.

use super::limits::DATAGRAM_BYTES_MAX;
use super::sys::register_socket;
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

/// Number of datagrams that the library passes in one call if it has more data to send.
const RUN_DATAGRAMS_MAX: usize = 10;
/// Maximum number of bytes that one system call sends: the maximum UDP payload over IPv4.
const SEND_BYTES_MAX: usize = 65_507;
/// Maximum number of datagrams received at once; a run that the kernel has joined counts as one
/// datagram. With a higher number, datagrams would be evicted from the processor's cache before
/// they are decrypted.
const RECEIVE_BATCH_MAX: usize = 4;
/// Maximum number of bytes that the kernel joins on receipt (GRO).
const GRO_BYTES_MAX: usize = 64 << 10;

/// The tokio runtime for the library. The sockets of this runtime are [`BatchingPort`]s.
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

/// The UDP port of this daemon. Collects datagrams that are sent together by the next system call.
#[derive(Debug)]
struct BatchingPort {
    /// State that the port shares with the flush task.
    port_state: Arc<PortState>,
}

#[derive(Debug)]
struct PortState {
    /// Registered for reading only: if the socket were registered for writing, each sent datagram
    /// would cost a wakeup.
    socket: AsyncFd<UdpSocket>,
    udp_state: UdpSocketState,
    batch: Mutex<DatagramBatch>,
    /// True if the kernel's buffer was full at the last send.
    is_send_blocked: AtomicBool,
}

/// Datagrams of equal length and destination that are sent together.
#[derive(Debug)]
struct DatagramBatch {
    bytes: Vec<u8>,
    /// Length of each datagram except the last, which may be shorter.
    segment_bytes: usize,
    destination: SocketAddr,
    ecn: Option<EcnCodepoint>,
    source_ip: Option<IpAddr>,
    /// True if a flush task is running. The flush task will send the collected datagrams.
    is_flush_pending: bool,
}

impl DatagramBatch {
    fn new() -> Self {
        let unspecified_address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        Self {
            bytes: Vec::new(),
            segment_bytes: 1,
            destination: unspecified_address,
            ecn: None,
            source_ip: None,
            is_flush_pending: false,
        }
    }

    /// True if the datagrams of `transmit` may be sent by the same system call as this batch.
    /// `segments_max` is the maximum number of datagrams in one system call.
    fn can_append(&self, transmit: &Transmit<'_>, segments_max: usize) -> bool {
        let is_segment_equal = match transmit.segment_size {
            Some(segment_bytes) => segment_bytes == self.segment_bytes,
            None => transmit.contents.len() <= self.segment_bytes,
        };
        // Only the last datagram may be shorter than all others.
        let ends_with_full_segment = self.bytes.len().is_multiple_of(self.segment_bytes);
        is_segment_equal
            && ends_with_full_segment
            && (transmit.destination, transmit.ecn, transmit.src_ip)
                == (self.destination, self.ecn, self.source_ip)
            && self.has_room(transmit.contents.len(), segments_max)
    }

    fn has_room(&self, bytes: usize, segments_max: usize) -> bool {
        let bytes = self.bytes.len() + bytes;
        bytes <= SEND_BYTES_MAX && bytes.div_ceil(self.segment_bytes) <= segments_max
    }

    fn append(&mut self, transmit: &Transmit<'_>) {
        if self.bytes.is_empty() {
            self.segment_bytes = transmit.segment_size.unwrap_or(transmit.contents.len());
            (self.destination, self.ecn, self.source_ip) =
                (transmit.destination, transmit.ecn, transmit.src_ip);
        }
        self.bytes.extend_from_slice(transmit.contents);
    }
}

impl BatchingPort {
    fn new(socket: UdpSocket) -> io::Result<Self> {
        socket.set_nonblocking(true)?;
        let udp_state = UdpSocketState::new((&socket).into())?;
        let socket = register_socket(socket, Interest::READABLE)?;
        let (batch, is_send_blocked) = (Mutex::new(DatagramBatch::new()), AtomicBool::new(false));
        Ok(Self {
            port_state: Arc::new(PortState {
                socket,
                udp_state,
                batch,
                is_send_blocked,
            }),
        })
    }
}

impl PortState {
    fn lock_batch(&self) -> MutexGuard<'_, DatagramBatch> {
        // The datagrams are valid even after a panic. Datagrams that are lost are retransmitted.
        self.batch.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn send_now(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        let send_result = self.udp_state.send(self.socket.get_ref().into(), transmit);
        if send_result.is_err() {
            self.is_send_blocked.store(true, Ordering::Relaxed);
        }
        send_result
    }

    /// Sends the collected datagrams. If the kernel's buffer is full, the datagrams stay in the
    /// batch.
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

    fn send_or_batch(self: &Arc<Self>, transmit: &Transmit<'_>) -> io::Result<()> {
        let segments_max = self.udp_state.max_gso_segments();
        let mut batch = self.lock_batch();
        if !batch.can_append(transmit, segments_max) {
            self.flush(&mut batch)?;
        }
        let length = transmit.contents.len();
        let more_will_follow = transmit
            .segment_size
            .is_some_and(|s| length.is_multiple_of(s) && length >= RUN_DATAGRAMS_MAX * s);
        if batch.bytes.is_empty() && !more_will_follow {
            return self.send_now(transmit);
        }
        batch.append(transmit);
        if more_will_follow && batch.has_room(length, segments_max)
            || self.flush(&mut batch).is_err()
        {
            // The library may not call again, so a tokio task must send the collected datagrams.
            if !std::mem::replace(&mut batch.is_flush_pending, true) {
                tokio::spawn(flush_when_idle(self.clone()));
            }
        }
        Ok(())
    }
}

/// Sends the collected datagrams as soon as all other tokio tasks have run without adding another
/// datagram. If the kernel's buffer is full, waits for space and tries again.
async fn flush_when_idle(port: Arc<PortState>) {
    let mut previous_bytes = 0;
    loop {
        yield_once().await;
        {
            let mut batch = port.lock_batch();
            let current_bytes = batch.bytes.len();
            if current_bytes <= previous_bytes && port.flush(&mut batch).is_ok() {
                batch.is_flush_pending = false;
                return;
            }
            previous_bytes = current_bytes;
        }
        if port.is_send_blocked.load(Ordering::Relaxed) {
            let mut writable_poller = WritablePoller {
                port: port.clone(),
                watch: None,
            };
            // The next send returns a socket error again, so an error is ignored here.
            let _ = poll_fn(|cx| Pin::new(&mut writable_poller).poll_writable(cx)).await;
        }
    }
}

/// Lets every runnable tokio task run once, without polling the sockets.
async fn yield_once() {
    let mut has_yielded = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut has_yielded, true) {
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
            port: self.port_state.clone(),
            watch: None,
        })
    }

    fn try_send(&self, transmit: &Transmit<'_>) -> io::Result<()> {
        self.port_state.send_or_batch(transmit)
    }

    fn poll_recv(
        &self,
        cx: &mut Context<'_>,
        bufs: &mut [IoSliceMut<'_>],
        meta: &mut [RecvMeta],
    ) -> Poll<io::Result<usize>> {
        let PortState {
            socket,
            udp_state: state,
            ..
        } = &*self.port_state;
        let datagrams_max = RECEIVE_BATCH_MAX.min(bufs.len());
        loop {
            let mut ready = ready!(socket.poll_read_ready(cx))?;
            match state.recv(
                socket.get_ref().into(),
                &mut bufs[..datagrams_max],
                &mut meta[..datagrams_max],
            ) {
                Ok(datagram_count) => {
                    if datagram_count < datagrams_max {
                        // The kernel's queue was empty, and the kernel signals later datagrams
                        // again.
                        ready.clear_ready();
                    }
                    return Poll::Ready(Ok(datagram_count));
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => ready.clear_ready(),
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.port_state.socket.get_ref().local_addr()
    }

    fn may_fragment(&self) -> bool {
        self.port_state.udp_state.may_fragment()
    }

    fn max_transmit_segments(&self) -> usize {
        self.port_state.udp_state.max_gso_segments()
    }

    fn max_receive_segments(&self) -> usize {
        // The kernel joins at most the bytes of one maximum datagram. A larger buffer would need
        // megabytes of memory, which every daemon would clear when it starts.
        self.port_state
            .udp_state
            .gro_segments()
            .min(GRO_BYTES_MAX.div_ceil(usize::from(DATAGRAM_BYTES_MAX)))
    }
}

/// Waits until the kernel accepts datagrams again. Watches the socket only while the socket's
/// buffer is full.
#[derive(Debug)]
struct WritablePoller {
    port: Arc<PortState>,
    watch: Option<AsyncFd<UdpSocket>>,
}

impl UdpPoller for WritablePoller {
    fn poll_writable(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.port.is_send_blocked.load(Ordering::Relaxed) {
            if self.watch.is_none() {
                let duplicate_result = self.port.socket.get_ref().try_clone();
                let Ok(watch) =
                    duplicate_result.and_then(|socket| register_socket(socket, Interest::WRITABLE))
                else {
                    // No descriptor is free. The poll is repeated after the other tokio tasks,
                    // until a descriptor is free.
                    self.port.is_send_blocked.store(false, Ordering::Relaxed);
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                };
                self.watch = Some(watch);
            }
            if let Some(watch) = &self.watch {
                let _ready = ready!(watch.poll_write_ready(cx))?;
            }
            self.port.is_send_blocked.store(false, Ordering::Relaxed);
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
    const SEGMENT_BYTES: usize = 1000;

    /// Returns a port, and an ordinary socket to which the tests send through the port.
    fn port_and_receiver() -> (BatchingPort, UdpSocket) {
        let any_port = (Ipv4Addr::LOCALHOST, 0);
        let receiver = UdpSocket::bind(any_port).expect("a socket");
        receiver
            .set_read_timeout(Some(Duration::from_secs(10)))
            .expect("a time");
        (
            BatchingPort::new(UdpSocket::bind(any_port).expect("a socket")).expect("a port"),
            receiver,
        )
    }

    /// Sends datagrams of the given lengths in one transmit. Each datagram is filled with its
    /// number; `next_number` is the next number.
    fn send_datagrams(
        port: &BatchingPort,
        receiver: &UdpSocket,
        lengths: &[usize],
        next_number: &mut u8,
    ) {
        let mut contents = Vec::new();
        for length in lengths {
            contents.extend(std::iter::repeat_n(*next_number, *length));
            *next_number += 1;
        }
        let segment_size = (lengths.len() > 1).then_some(lengths[0]);
        let destination = receiver.local_addr().expect("an address");
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

    fn receive_datagram(receiver: &UdpSocket) -> (usize, u8) {
        let mut buffer = [0; 2 * SEGMENT_BYTES];
        let length = receiver.recv(&mut buffer).expect("a datagram");
        assert!(
            buffer[..length].iter().all(|byte| *byte == buffer[0]),
            "one datagram holds another one's bytes"
        );
        (length, buffer[0])
    }

    #[tokio::test]
    async fn batched_datagrams_arrive_singly_and_in_order() {
        let (port, receiver) = port_and_receiver();
        let full_run = [SEGMENT_BYTES; RUN_DATAGRAMS_MAX];
        let transmits: [&[usize]; 9] = [
            &[70],
            &full_run,
            &full_run,
            &full_run,
            &[SEGMENT_BYTES, SEGMENT_BYTES, 30],
            &full_run,
            &[2 * SEGMENT_BYTES - 1],
            &full_run,
            &[SEGMENT_BYTES],
        ];
        let mut next_number = 0;
        transmits
            .iter()
            .for_each(|lengths| send_datagrams(&port, &receiver, lengths, &mut next_number));
        for (number, length) in transmits.concat().into_iter().enumerate() {
            assert_eq!(receive_datagram(&receiver), (length, number as u8));
        }
    }

    #[test]
    fn shorter_datagram_ends_a_batch() {
        let (full_run, short_datagram) = ([1; 3 * SEGMENT_BYTES], [2; 30]);
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
        batch.append(&transmit(&full_run, Some(SEGMENT_BYTES)));
        assert!(
            batch.can_append(&transmit(&full_run, Some(SEGMENT_BYTES)), 64)
                && batch.can_append(&transmit(&short_datagram, None), 64)
        );
        // The kernel's buffer is assumed to be full, so the datagrams stay in the batch.
        batch.append(&transmit(&short_datagram, None));
        assert!(
            !batch.can_append(&transmit(&full_run, Some(SEGMENT_BYTES)), 64)
                && !batch.can_append(&transmit(&short_datagram, None), 64)
        );
    }

    #[tokio::test]
    async fn last_run_is_flushed_without_another_send() {
        let (port, receiver) = port_and_receiver();
        send_datagrams(
            &port,
            &receiver,
            &[SEGMENT_BYTES; RUN_DATAGRAMS_MAX],
            &mut 0,
        );
        let receive_task = tokio::task::spawn_blocking(move || {
            std::array::from_fn::<_, RUN_DATAGRAMS_MAX, _>(|_| receive_datagram(&receiver))
        });
        let expected_datagrams = std::array::from_fn(|number| (SEGMENT_BYTES, number as u8));
        assert_eq!(receive_task.await.expect("all of them"), expected_datagrams);
    }

    #[tokio::test]
    async fn full_port_sends_when_writable_again() {
        let (port, receiver) = port_and_receiver();
        let port_state = port.port_state.clone();
        let mut poller = Arc::new(port).create_io_poller();
        for _ in 0..2 {
            port_state.is_send_blocked.store(true, Ordering::Relaxed);
            poll_fn(|cx| poller.as_mut().poll_writable(cx))
                .await
                .expect("a socket");
            assert!(!port_state.is_send_blocked.load(Ordering::Relaxed));
        }
        send_datagrams(&BatchingPort { port_state }, &receiver, &[70], &mut 0);
        assert_eq!(receive_datagram(&receiver), (70, 0));
    }

    #[tokio::test]
    async fn datagrams_after_an_empty_queue_are_received() {
        let (port, sender) = port_and_receiver();
        let port_address = port.local_addr().expect("an address");
        let mut buffer = vec![0; RECEIVE_BATCH_MAX * (64 << 10)];
        for round in 0..2 * RECEIVE_BATCH_MAX + 3 {
            // The number of datagrams is at first lower than the maximum of one receive call, then
            // equal to the maximum, and then higher.
            for number in 0..=round {
                sender.send_to(&[number as u8], port_address).expect("room");
            }
            let mut received_count = 0;
            while received_count <= round {
                let mut bufs: Vec<IoSliceMut<'_>> =
                    buffer.chunks_mut(64 << 10).map(IoSliceMut::new).collect();
                let mut meta = [RecvMeta::default(); RECEIVE_BATCH_MAX];
                let count = poll_fn(|cx| port.poll_recv(cx, &mut bufs, &mut meta))
                    .await
                    .expect("datagrams");
                received_count += meta[..count].iter().map(|m| m.len).sum::<usize>();
            }
            assert_eq!(received_count, round + 1);
        }
    }
}
