//! Tests of direct routes with real connections on the loopback address and simulated time.

use super::{
    AUTHENTICATION_TIMEOUT, Acceptor, DIAL_TIMEOUT, Dialer, FRAME_BYTES_MAX, FrameSink,
    FrameStream, Identity, OFFER_TIMEOUT, OPEN_OFFERS_MAX, RouteEndReason, SetupError,
    UNAUTHENTICATED_CONNECTIONS_MAX,
};
use nix::poll::{PollFd, PollTimeout, poll};
use sempa_proto::Micros;
use sempa_proto::link::SHORT_HEAD_BYTES;
use sempa_proto::route::{Fingerprint, OfferId};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

const OFFER_ID: OfferId = OfferId(0x1234);
/// Timeout of every wait. The timeout is long because test machines may be loaded.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

type SetupOutcome = Result<FrameStream, SetupError>;

fn loopback_address(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Deterministic random number generator.
struct TestRng(u64);

impl TestRng {
    fn next_below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % limit as u64) as usize
    }
}

/// Calls `step` until `step` returns a value, and returns this value. Panics after
/// [`WAIT_TIMEOUT`].
fn poll_until<T>(awaited_event: &str, mut step: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + WAIT_TIMEOUT;
    loop {
        if let Some(outcome) = step() {
            return outcome;
        }
        assert!(Instant::now() < deadline, "never came: {awaited_event}");
        std::thread::yield_now();
    }
}

/// Returns an acceptor with one open offer, the port on which the acceptor listens, and the
/// fingerprint of the acceptor's certificate.
fn acceptor_with_offer() -> (Acceptor, u16, Fingerprint) {
    let mut acceptor = Acceptor::default();
    let (port, fingerprint) = acceptor.open_offer(Micros(1), OFFER_ID).expect("a socket");
    (acceptor, port, fingerprint)
}

fn new_dialer(addresses: &[SocketAddr], peer_fingerprint: Fingerprint) -> Dialer {
    Dialer::new(Micros(1), OFFER_ID, addresses, peer_fingerprint).expect("a key")
}

/// Advances both sides until the dialer has a result. Returns the outcome of the dialer and the
/// outcome of the offer. The outcome of the offer is `None` if the offer is still open.
fn run_setup(acceptor: &mut Acceptor, dialer: &mut Dialer) -> (SetupOutcome, Option<SetupOutcome>) {
    let mut offer_outcome = None;
    let dialer_outcome = poll_until("an answer for the dialer", || {
        offer_outcome = offer_outcome.take().or(acceptor
            .advance_connections(Micros(2))
            .pop()
            .map(|(_, outcome)| outcome));
        let (mut fds, is_listening) = (Vec::new(), !acceptor.is_idle());
        dialer.add_poll_fds(&mut fds);
        acceptor.add_poll_fds(&mut fds);
        assert!(
            offer_outcome.is_some() || is_listening,
            "an open offer is watched"
        );
        let _ = poll(&mut fds, PollTimeout::from(1u8));
        dialer.advance_attempt(Micros(2))
    });
    (dialer_outcome, offer_outcome)
}

/// Establishes a route. `dial_port` maps the acceptor's port to the port to which the dialer
/// connects, for example the port of a proxy. Returns the frame streams of the listening and the
/// connecting side.
fn connected_streams_via(dial_port: impl FnOnce(u16) -> u16) -> (FrameStream, FrameStream) {
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    let mut dialer = new_dialer(&[loopback_address(dial_port(port))], fingerprint);
    acceptor.record_acceptance(OFFER_ID, dialer.fingerprint());
    let (dialer_outcome, offer_outcome) = run_setup(&mut acceptor, &mut dialer);
    assert!(acceptor.is_idle(), "{acceptor:?}");
    (
        offer_outcome
            .expect("the dialer was answered")
            .expect("a route"),
        dialer_outcome.expect("a route"),
    )
}

pub(in crate::runtime) fn connected_streams() -> (FrameStream, FrameStream) {
    connected_streams_via(|port| port)
}

/// Returns a frame of random length that begins with the frame's number.
fn numbered_frame(rng: &mut TestRng, number: u32) -> Vec<u8> {
    let length = match rng.next_below(4) {
        0 => 4 + rng.next_below(60),
        1 => 4 + rng.next_below(FRAME_BYTES_MAX - 4),
        2 => FRAME_BYTES_MAX,
        _ => (16 << 10) - 8 + rng.next_below(16),
    };
    let mut frame = vec![number as u8; length];
    frame[..4].copy_from_slice(&number.to_le_bytes());
    frame
}

/// Checks the numbers and the content of the frames that one side receives. Most large frames are
/// written to a message; several of them form one.
#[derive(Default)]
struct FrameChecker {
    next_number: u32,
    message: Vec<u8>,
    accepted_bytes: usize,
    placed_bytes: usize,
    placed_frame_count: u32,
}

impl FrameChecker {
    fn check_parts(&mut self, head: &[u8], payload: &[u8]) {
        assert_eq!(head[..4], self.next_number.to_le_bytes());
        assert!(
            (head[4..].iter().chain(payload)).all(|byte| *byte == self.next_number as u8),
            "frame {} is not what was sent",
            self.next_number
        );
        self.next_number += 1;
    }
}

impl FrameSink for FrameChecker {
    fn on_frame(&mut self, frame: &[u8]) {
        assert_eq!(self.message.len(), self.accepted_bytes);
        self.check_parts(frame, &[]);
    }

    fn begins_placement(&mut self, head: &[u8; SHORT_HEAD_BYTES]) -> bool {
        assert_eq!(head[..4], self.next_number.to_le_bytes());
        head[0] % 5 != 4
    }

    fn continues_placement(&mut self, _: &[u8; SHORT_HEAD_BYTES], placed_bytes: usize) -> bool {
        assert_eq!(placed_bytes, self.placed_bytes);
        true
    }

    fn is_last_of_message(&self, head: &[u8; SHORT_HEAD_BYTES]) -> bool {
        head[0] % 3 == 2
    }

    fn message(&mut self) -> &mut Vec<u8> {
        &mut self.message
    }

    fn set_placed_bytes(&mut self, byte_count: usize) {
        self.placed_bytes = byte_count;
        assert_eq!(self.message.len(), self.accepted_bytes + byte_count);
    }

    fn accept_payload(&mut self, head: &[u8; SHORT_HEAD_BYTES], payload_bytes: usize) {
        let message = std::mem::take(&mut self.message);
        let payload_end = self.accepted_bytes + payload_bytes;
        self.check_parts(head, &message[self.accepted_bytes..payload_end]);
        (self.accepted_bytes, self.placed_bytes) = (payload_end, 0);
        self.placed_frame_count += 1;
        if self.is_last_of_message(head) {
            assert_eq!(message.len(), payload_end, "nothing follows");
            self.accepted_bytes = 0;
        } else {
            self.message = message;
        }
    }
}

/// Passes whole frames to a function.
struct WholeFrames<F>(F);

impl<F: FnMut(&[u8])> FrameSink for WholeFrames<F> {
    fn on_frame(&mut self, frame: &[u8]) {
        self.0(frame);
    }
    fn begins_placement(&mut self, _: &[u8; SHORT_HEAD_BYTES]) -> bool {
        false
    }
    fn continues_placement(&mut self, _: &[u8; SHORT_HEAD_BYTES], _: usize) -> bool {
        false
    }
    fn is_last_of_message(&self, _: &[u8; SHORT_HEAD_BYTES]) -> bool {
        true
    }
    fn message(&mut self) -> &mut Vec<u8> {
        unreachable!("no frame is written to its message")
    }
    fn set_placed_bytes(&mut self, _: usize) {}
    fn accept_payload(&mut self, _: &[u8; SHORT_HEAD_BYTES], _: usize) {}
}

/// Reads frames as [`FrameStream::read_frames`] does, and passes each whole frame to `on_frame`.
fn read_whole_frames(
    stream: &mut FrameStream,
    on_frame: impl FnMut(&[u8]),
) -> Result<bool, RouteEndReason> {
    stream.read_frames(&mut WholeFrames(on_frame))
}

/// Sends `count` frames in both directions at once, until all frames have arrived or a route has
/// ended. Returns for each side the reason why its route ended and the number of received frames.
/// The reason is `None` if the route is still established.
fn exchange_frames(
    streams: [&mut FrameStream; 2],
    count: u32,
    seed: u64,
) -> [(Option<RouteEndReason>, u32); 2] {
    let mut rng = TestRng(seed);
    let mut side_states = [
        (None, FrameChecker::default(), 0),
        (None, FrameChecker::default(), 0),
    ];
    let [a, b] = streams;
    poll_until("all frames", || {
        for (stream, (end_reason, checker, sent_count)) in
            [&mut *a, &mut *b].into_iter().zip(&mut side_states)
        {
            while end_reason.is_none() && *sent_count < count && stream.has_frame_space() {
                let whole_frame = numbered_frame(&mut rng, *sent_count);
                let (head, payload) =
                    whole_frame.split_at(rng.next_below(30).min(whole_frame.len()));
                // The receiver must not rely on the announced length.
                let hint = [0, 20_000, 3 * FRAME_BYTES_MAX, usize::MAX][rng.next_below(4)];
                assert!(stream.try_queue_frame(&[head, payload, &[]], hint));
                *sent_count += 1;
            }
            let io_result = stream.read_frames(checker).and(stream.write_queued());
            *end_reason = end_reason.take().or(io_result.err());
        }
        let has_all_frames =
            |(end_reason, checker, sent_count): &(Option<RouteEndReason>, FrameChecker, u32)| {
                end_reason.is_some() || (checker.next_number == count && *sent_count == count)
            };
        let is_flushed = !a.has_unwritten_data() && !b.has_unwritten_data();
        (side_states.iter().any(|s| s.0.is_some())
            || (is_flushed && side_states.iter().all(has_all_frames)))
        .then_some(())
    });
    // After one side has failed, its data may still be in transit to the other side.
    for (stream, (end_reason, checker, _)) in [a, b].into_iter().zip(&mut side_states) {
        if let Err(e) = stream.read_frames(checker) {
            end_reason.get_or_insert(e);
        }
    }
    side_states.map(|(end_reason, checker, _)| (end_reason, checker.next_number))
}

/// Starts a proxy that forwards data in chunks of random lengths, and returns its port. The proxy
/// calls `tamper` for each chunk to the listening side. `tamper` receives the number of bytes
/// before the chunk and may change the chunk. If `tamper` returns false, the proxy cuts the
/// connection.
fn start_proxy(
    port: u16,
    seed: u64,
    tamper: impl Fn(usize, &mut [u8]) -> bool + Send + 'static,
) -> u16 {
    let listener = TcpListener::bind(loopback_address(0)).expect("a port");
    let proxy_port = listener.local_addr().expect("it has one").port();
    std::thread::spawn(move || {
        let (dialer_socket, _) = listener.accept().expect("the dialer comes");
        let acceptor_socket = TcpStream::connect(loopback_address(port)).expect("it listens");
        let reverse_sockets = (
            acceptor_socket.try_clone().expect("a socket"),
            dialer_socket.try_clone().expect("a socket"),
        );
        let forward_thread = std::thread::spawn(move || {
            forward_until_cut(dialer_socket, acceptor_socket, seed, tamper)
        });
        forward_until_cut(reverse_sockets.0, reverse_sockets.1, seed + 1, |_, _| true);
        forward_thread.join().expect("it ends");
    });
    proxy_port
}

fn forward_until_cut(
    mut source: TcpStream,
    mut sink: TcpStream,
    seed: u64,
    tamper: impl Fn(usize, &mut [u8]) -> bool,
) {
    let (mut rng, mut forwarded_bytes, mut bytes) = (TestRng(seed), 0, vec![0; 100_000]);
    sink.set_nodelay(true).expect("a socket");
    loop {
        let chunk_bytes_max = match rng.next_below(3) {
            0 => 1 + rng.next_below(40),
            _ => 1 + rng.next_below(100_000),
        };
        let read_bytes = source.read(&mut bytes[..chunk_bytes_max]).unwrap_or(0);
        if read_bytes == 0
            || !tamper(forwarded_bytes, &mut bytes[..read_bytes])
            || sink.write_all(&bytes[..read_bytes]).is_err()
        {
            let _ = (
                source.shutdown(Shutdown::Both),
                sink.shutdown(Shutdown::Both),
            );
            return;
        }
        forwarded_bytes += read_bytes;
    }
}

fn open_descriptor_count() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc").count()
}

#[test]
fn frames_arrive_whole_and_in_order() {
    let (mut a, mut b) = connected_streams();
    for seed in 1..6 {
        assert_eq!(
            exchange_frames([&mut a, &mut b], 60, seed),
            [(None, 60), (None, 60)]
        );
    }
    // An empty frame is valid, too.
    assert!(a.try_queue_frame(&[&[]; 3], 0));
    a.write_queued().expect("the route stands");
    let mut empty_frame_count = 0;
    poll_until("the empty frame", || {
        read_whole_frames(&mut b, |frame| {
            empty_frame_count += usize::from(frame.is_empty())
        })
        .expect("the route stands");
        (empty_frame_count == 1).then_some(())
    });
}

/// Both sockets carry the mark of sockets that the library closes before a migration.
#[test]
fn both_sockets_carry_library_mark() {
    let (a, b) = connected_streams();
    for stream in [&a, &b] {
        let flags = nix::fcntl::fcntl(stream, nix::fcntl::FcntlArg::F_GETFL).expect("open");
        assert_ne!(flags & sempa_proto::task::LIBRARY_SOCKET_FLAG, 0);
    }
}

/// Frames arrive unchanged, regardless of the chunks into which the network divides the byte
/// stream.
#[test]
fn chunk_boundaries_do_not_change_frames() {
    for seed in 1..8 {
        let (mut a, mut b) = connected_streams_via(|port| start_proxy(port, seed, |_, _| true));
        assert_eq!(
            exchange_frames([&mut a, &mut b], 100, seed),
            [(None, 100), (None, 100)],
            "seed {seed}"
        );
    }
}

/// Key updates in the middle of a stream do not affect the frames.
#[test]
fn key_updates_do_not_change_frames() {
    let (mut a, mut b) = connected_streams();
    a.set_records_per_key(40);
    b.set_records_per_key(25);
    for seed in 1..4 {
        assert_eq!(
            exchange_frames([&mut a, &mut b], 300, seed),
            [(None, 300), (None, 300)]
        );
    }
}

/// A flipped bit ends the route, and no damaged frame is passed to the receiver.
#[test]
fn flipped_bit_ends_route() {
    for seed in 1..10u64 {
        let bit_position = 20_000 + 7919 * seed as usize;
        let flip_bit = move |forwarded_bytes: usize, bytes: &mut [u8]| {
            if (forwarded_bytes..forwarded_bytes + bytes.len()).contains(&bit_position) {
                bytes[bit_position - forwarded_bytes] ^= 1 << (seed % 8);
            }
            true
        };
        let (mut a, mut b) = connected_streams_via(|port| start_proxy(port, seed, flip_bit));
        let [(end_reason, received_count), _] = exchange_frames([&mut a, &mut b], 200, seed);
        // If a flipped bit makes a record longer, the receiver may wait for the missing bytes until
        // the connection ends.
        assert!(
            matches!(
                end_reason,
                Some(RouteEndReason::ProtocolError(_) | RouteEndReason::Broken(_))
            ),
            "{end_reason:?} (seed {seed})"
        );
        assert!(received_count < 200, "seed {seed}");
    }
}

/// If the connection is cut, the receiver gets only whole frames.
#[test]
fn cut_connection_passes_whole_frames_only() {
    for seed in 1..10u64 {
        let cut_connection = move |forwarded_bytes: usize, bytes: &mut [u8]| {
            forwarded_bytes + bytes.len() < 30_000 * seed as usize
        };
        let (mut a, mut b) = connected_streams_via(|port| start_proxy(port, seed, cut_connection));
        let [listening_result, connecting_result] = exchange_frames([&mut a, &mut b], 400, seed);
        assert!(
            listening_result.0.is_some() || connecting_result.0.is_some(),
            "seed {seed}"
        );
        assert!(listening_result.1 < 400, "seed {seed}");
    }
}

/// Each side refuses a peer with another certificate. The offer stays open for the intended peer.
#[test]
fn each_side_refuses_other_certificates() {
    let other_fingerprint = Identity::new().expect("a key").fingerprint();
    // The dialer connects to a peer whose certificate has another fingerprint.
    let (mut acceptor, port, _) = acceptor_with_offer();
    let mut misled_dialer = new_dialer(&[loopback_address(port)], other_fingerprint);
    acceptor.record_acceptance(OFFER_ID, misled_dialer.fingerprint());
    let (dialer_outcome, offer_outcome) = run_setup(&mut acceptor, &mut misled_dialer);
    assert!(
        matches!(dialer_outcome, Err(SetupError::Unauthenticated(_))),
        "{dialer_outcome:?}"
    );
    assert!(offer_outcome.is_none(), "{offer_outcome:?}");
    // A dialer with an unexpected certificate connects. The offer stays open for the intended
    // dialer.
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    let mut intended_dialer = new_dialer(&[loopback_address(port)], fingerprint);
    acceptor.record_acceptance(OFFER_ID, intended_dialer.fingerprint());
    let (dialer_outcome, offer_outcome) = run_setup(
        &mut acceptor,
        &mut new_dialer(&[loopback_address(port)], fingerprint),
    );
    assert!(
        matches!(dialer_outcome, Err(SetupError::Unauthenticated(_))),
        "{dialer_outcome:?}"
    );
    assert!(offer_outcome.is_none(), "{offer_outcome:?}");
    let (dialer_outcome, offer_outcome) = run_setup(&mut acceptor, &mut intended_dialer);
    assert!(
        dialer_outcome.is_ok() && matches!(offer_outcome, Some(Ok(_))),
        "{dialer_outcome:?} {offer_outcome:?}"
    );
}

/// Connections that send invalid data are closed. The offer stays open for the intended peer.
#[test]
fn garbage_does_not_consume_offer() {
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    let mut intended_dialer = new_dialer(&[loopback_address(port)], fingerprint);
    acceptor.record_acceptance(OFFER_ID, intended_dialer.fingerprint());
    let preamble = super::accept::encode_preamble(OFFER_ID);
    let mut rng = TestRng(77);
    for round in 0..60 {
        let mut garbage = match round % 4 {
            0 => b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            1 => super::accept::encode_preamble(OfferId(9)).to_vec(),
            // A data record before any handshake, then random bytes.
            2 => [&preamble[..], &[23, 3, 3, 0, 40], &[0; 40]].concat(),
            _ => preamble.to_vec(),
        };
        garbage.extend((0..rng.next_below(40_000)).map(|_| rng.next_below(256) as u8));
        let mut socket = TcpStream::connect(loopback_address(port)).expect("it listens");
        // The write fails if the acceptor closes the connection before all bytes are written.
        let _ = socket.write_all(&garbage);
        let _ = socket.shutdown(Shutdown::Write);
        socket.set_nonblocking(true).expect("a socket");
        poll_until("it is closed", || {
            assert!(
                acceptor.advance_connections(Micros(2)).is_empty(),
                "round {round}"
            );
            match socket.read(&mut [0; 1000]) {
                Ok(0) => Some(()),
                Ok(_) => None,
                Err(e) => (e.kind() != std::io::ErrorKind::WouldBlock).then_some(()),
            }
        });
    }
    let (dialer_outcome, offer_outcome) = run_setup(&mut acceptor, &mut intended_dialer);
    assert!(
        dialer_outcome.is_ok() && matches!(offer_outcome, Some(Ok(_))),
        "{dialer_outcome:?} {offer_outcome:?}"
    );
}

/// Connections that send nothing are limited in number and expire.
#[test]
fn silent_connections_are_bounded_and_expire() {
    let initial_fd_count = open_descriptor_count();
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    let silent_sockets: Vec<TcpStream> = (0..2 * UNAUTHENTICATED_CONNECTIONS_MAX)
        .map(|_| TcpStream::connect(loopback_address(port)).expect("it listens"))
        .collect();
    let other_fd_count = open_descriptor_count() - silent_sockets.len();
    poll_until("they are let in", || {
        assert!(acceptor.advance_connections(Micros(2)).is_empty());
        (open_descriptor_count() - silent_sockets.len()
            == other_fd_count + UNAUTHENTICATED_CONNECTIONS_MAX)
            .then_some(())
    });
    // The intended peer is still accepted, although the maximum number of connections is open.
    let mut intended_dialer = new_dialer(&[loopback_address(port)], fingerprint);
    acceptor.record_acceptance(OFFER_ID, intended_dialer.fingerprint());
    acceptor
        .open_offer(Micros(2), OfferId(5))
        .expect("a second offer keeps it listening");
    let (dialer_outcome, offer_outcome) = run_setup(&mut acceptor, &mut intended_dialer);
    assert!(
        dialer_outcome.is_ok() && matches!(offer_outcome, Some(Ok(_))),
        "{dialer_outcome:?} {offer_outcome:?}"
    );
    assert_eq!(
        acceptor.next_wakeup(),
        Some(Micros(2) + AUTHENTICATION_TIMEOUT)
    );
    assert!(
        acceptor
            .advance_connections(Micros(2) + AUTHENTICATION_TIMEOUT)
            .is_empty()
    );
    assert_eq!(acceptor.next_wakeup(), Some(Micros(2) + OFFER_TIMEOUT));
    let expired_offers = acceptor.advance_connections(Micros(2) + OFFER_TIMEOUT);
    assert!(
        matches!(
            expired_offers[..],
            [(OfferId(5), Err(SetupError::TimedOut))]
        ),
        "{expired_offers:?}"
    );
    assert!(acceptor.is_idle());
    drop((silent_sockets, dialer_outcome, offer_outcome));
    assert_eq!(
        open_descriptor_count(),
        initial_fd_count,
        "nothing stays open"
    );
}

/// An address that refuses the connection, or stalls in the handshake until the timeout, is
/// abandoned, and the next address is tried. If no address answers, the attempt fails.
#[test]
fn stalled_address_is_skipped() {
    let silent_listener = TcpListener::bind(loopback_address(0)).expect("a port");
    let silent_address = silent_listener.local_addr().expect("it has one");
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    let closed_address = {
        let dropped_listener = TcpListener::bind(loopback_address(0)).expect("a port");
        dropped_listener.local_addr().expect("it has one")
    };
    let mut route_dialer = new_dialer(
        &[closed_address, silent_address, loopback_address(port)],
        fingerprint,
    );
    acceptor.record_acceptance(OFFER_ID, route_dialer.fingerprint());
    let mut now = Micros(2);
    let dialer_outcome = poll_until("a route", || {
        let dialer_result = route_dialer.advance_attempt(now);
        now = now + Micros::from_millis(1);
        let _ = acceptor
            .advance_connections(Micros(2))
            .pop()
            .map(|(_, outcome)| outcome.map(std::mem::forget));
        dialer_result
    });
    assert!(dialer_outcome.is_ok(), "{dialer_outcome:?}");
    // None of these addresses answers.
    let mut failing_dialer = new_dialer(&[closed_address, silent_address], fingerprint);
    let timeout_outcome = poll_until("the end", || {
        now = now + Micros::from_millis(10);
        failing_dialer.advance_attempt(now)
    });
    assert_eq!(timeout_outcome.err(), Some(SetupError::TimedOut));
    let unreachable_outcome = poll_until("the end", || {
        new_dialer(&[closed_address], fingerprint).advance_attempt(Micros(2))
    });
    assert!(
        matches!(unreachable_outcome, Err(SetupError::Unreachable(_))),
        "{unreachable_outcome:?}"
    );
    assert_eq!(
        new_dialer(&[loopback_address(port)], fingerprint)
            .advance_attempt(Micros(1) + DIAL_TIMEOUT)
            .and_then(Result::err),
        Some(SetupError::TimedOut)
    );
}

/// A connection that arrives before the peer's acceptance of the offer waits for the acceptance.
#[test]
fn early_connection_waits_for_acceptance() {
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    let mut dialer = new_dialer(&[loopback_address(port)], fingerprint);
    // The dialer's first message has arrived and has not been answered.
    poll_until("it has connected", || {
        assert!(
            dialer.advance_attempt(Micros(2)).is_none()
                && acceptor.advance_connections(Micros(2)).is_empty()
        );
        (format!("{acceptor:?}").contains("strangers: 1")).then_some(())
    });
    for _ in 0..50 {
        assert!(
            dialer.advance_attempt(Micros(2)).is_none()
                && acceptor.advance_connections(Micros(2)).is_empty()
        );
    }
    acceptor.record_acceptance(OFFER_ID, dialer.fingerprint());
    let (dialer_outcome, offer_outcome) = run_setup(&mut acceptor, &mut dialer);
    assert!(
        dialer_outcome.is_ok() && matches!(offer_outcome, Some(Ok(_))),
        "{dialer_outcome:?} {offer_outcome:?}"
    );
}

/// A frame longer than [`FRAME_BYTES_MAX`] ends the route. The frames before that frame are still
/// received.
#[test]
fn oversized_frame_ends_route() {
    let (mut a, mut b) = connected_streams();
    assert!(a.try_queue_frame(&[&[1; 4], &[], &[]], 0));
    a.push_bytes(&(FRAME_BYTES_MAX as u64 + 1).to_le_bytes());
    a.write_queued().expect("the route stands");
    let mut received_count = 0;
    let end_reason = poll_until("the end", || {
        read_whole_frames(&mut b, |_| received_count += 1).err()
    });
    assert_eq!(
        (end_reason, received_count),
        (
            RouteEndReason::ProtocolError("a frame is over the limit"),
            1
        )
    );
    assert_eq!(
        read_whole_frames(&mut b, |_| received_count += 1),
        Err(RouteEndReason::ProtocolError("a frame is over the limit"))
    );
    assert_eq!(received_count, 1);
}

/// The output buffer is bounded while the peer does not read. All frames arrive when the peer
/// reads.
#[test]
fn backlog_for_slow_reader_is_bounded() {
    let (mut a, mut b) = connected_streams();
    let mut sent_count = 0u32;
    loop {
        if a.try_queue_frame(
            &[&sent_count.to_le_bytes(), &[7; FRAME_BYTES_MAX - 4], &[]],
            0,
        ) {
            sent_count += 1;
            assert!(sent_count < 1000, "the kernel keeps less than 64 MiB");
            continue;
        }
        a.write_queued().expect("the route stands");
        if !a.has_frame_space() {
            break;
        }
    }
    assert!(a.has_unwritten_data());
    let mut received_count = 0;
    poll_until("all of it", || {
        a.write_queued().expect("the route stands");
        read_whole_frames(&mut b, |_| received_count += 1).expect("the route stands");
        (!a.has_unwritten_data() && received_count >= sent_count).then_some(())
    });
}

/// An idle side has no buffers. When the side is used again, it allocates buffers without data
/// loss.
#[test]
fn idle_stream_frees_buffers_and_continues() {
    let (mut a, mut b) = connected_streams();
    for round in 0..3u32 {
        let mut received_frames = Vec::new();
        assert!(a.try_queue_frame(&[&round.to_le_bytes(), &[], &[]], 0));
        a.release_buffers();
        assert!(a.buffer_bytes() > 0, "something waits in it");
        a.write_queued().expect("the route stands");
        poll_until("the frame", || {
            read_whole_frames(&mut b, |frame| received_frames.push(frame.to_vec()))
                .expect("the route stands");
            (!received_frames.is_empty()).then_some(())
        });
        assert_eq!(received_frames, [round.to_le_bytes()]);
        for stream in [&mut a, &mut b] {
            stream.release_buffers();
            assert_eq!(stream.buffer_bytes(), 0);
        }
        std::mem::swap(&mut a, &mut b);
    }
    a.release_buffers();
    a.close();
    assert_eq!(
        poll_until("the end", || read_whole_frames(&mut b, |_| panic!(
            "nothing was sent"
        ))
        .err()),
        RouteEndReason::Closed
    );
}

/// The end of a route is reported as `Closed` after an orderly close, and as `Broken` after the
/// death of the peer.
#[test]
fn close_and_peer_death_are_distinguished() {
    let (mut a, b) = connected_streams();
    b.close();
    let end_reason = poll_until("the end", || {
        read_whole_frames(&mut a, |_| panic!("nothing was sent")).err()
    });
    assert_eq!(end_reason, RouteEndReason::Closed);
    let (mut a, mut b) = connected_streams();
    // The peer dies with an incomplete frame in transit and with unread input.
    b.push_bytes(&2000u32.to_le_bytes());
    b.push_bytes(&[7; 1000]);
    b.write_queued().expect("the route stands");
    assert!(a.try_queue_frame(&[&[1], &[2], &[]], 0));
    a.write_queued().expect("the route stands");
    drop(b);
    let end_reason = poll_until("the end", || {
        read_whole_frames(&mut a, |_| panic!("no frame was whole"))
            .and(a.write_queued())
            .err()
    });
    assert!(
        matches!(end_reason, RouteEndReason::Broken(_)),
        "{end_reason:?}"
    );
}

/// After a write error, a task still receives the frames that the peer sent earlier.
#[test]
fn input_stays_readable_after_write_error() {
    let (mut a, mut b) = connected_streams();
    const FRAME_COUNT: u32 = 3;
    for number in 0..FRAME_COUNT {
        assert!(b.try_queue_frame(&[&number.to_le_bytes(), &[5; 10_000], &[]], 0));
    }
    b.write_queued().expect("the route stands");
    assert!(!b.has_unwritten_data(), "it is more than any kernel takes");
    drop(b);
    let write_error = poll_until("a refusal", || {
        assert!(a.try_queue_frame(&[&[1], &[], &[]], 0));
        a.write_queued().err()
    });
    assert!(
        matches!(write_error, RouteEndReason::Broken(_)),
        "{write_error:?}"
    );
    let mut received_count = 0u32;
    let end_reason = poll_until("the end", || {
        read_whole_frames(&mut a, |frame| {
            assert_eq!(
                (&frame[..4], frame.len()),
                (&received_count.to_le_bytes()[..], 10_004)
            );
            received_count += 1;
        })
        .err()
    });
    assert_eq!(received_count, FRAME_COUNT, "{end_reason:?}");
}

/// The number of offers is limited to [`OPEN_OFFERS_MAX`], and a connection for a withdrawn offer
/// is refused.
#[test]
fn offers_are_bounded_and_can_be_withdrawn() {
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    for n in 1..OPEN_OFFERS_MAX as u64 {
        acceptor.open_offer(Micros(1), OfferId(n)).expect("room");
    }
    assert_eq!(
        acceptor.open_offer(Micros(1), OfferId(0)).err(),
        Some(SetupError::TooManyOffers)
    );
    let mut dialer = new_dialer(&[loopback_address(port)], fingerprint);
    acceptor.record_acceptance(OFFER_ID, dialer.fingerprint());
    acceptor.withdraw_offer(OFFER_ID);
    let (dialer_outcome, offer_outcome) = run_setup(&mut acceptor, &mut dialer);
    assert!(
        matches!(dialer_outcome, Err(SetupError::Unauthenticated(_))) && offer_outcome.is_none(),
        "{dialer_outcome:?} {offer_outcome:?}"
    );
    assert!(!acceptor.is_idle());
    acceptor.close_all();
    assert!(acceptor.is_idle());
    let mut fds: Vec<PollFd<'_>> = Vec::new();
    acceptor.add_poll_fds(&mut fds);
    assert!(fds.is_empty());
}
