//! Tests of direct routes with real connections on the loopback address and simulated time.

use super::{
    AUTHENTICATION_TIMEOUT, Acceptor, DIAL_TIMEOUT, Dialer, FRAME_BYTES_MAX, FrameStream, Identity,
    OFFER_TIMEOUT, OFFERS_MAX, RouteEnd, SetupError, UNAUTHENTICATED_CONNECTIONS_MAX,
};
use nix::poll::{PollFd, PollTimeout, poll};
use sempa_proto::Micros;
use sempa_proto::route::{Fingerprint, OfferId};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

const OFFER_ID: OfferId = OfferId(0x1234);
/// Timeout of every wait; far more than needed, because test machines may be loaded.
const WAIT_TIMEOUT: Duration = Duration::from_secs(60);

type Outcome = Result<FrameStream, SetupError>;

fn loopback(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Deterministic random number generator.
struct Rng(u64);

impl Rng {
    fn below(&mut self, below: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % below as u64) as usize
    }
}

/// Calls `step` until it returns a value.
fn poll_until<T>(what: &str, mut step: impl FnMut() -> Option<T>) -> T {
    let end = Instant::now() + WAIT_TIMEOUT;
    loop {
        if let Some(found) = step() {
            return found;
        }
        assert!(Instant::now() < end, "never came: {what}");
        std::thread::yield_now();
    }
}

/// Returns an acceptor with one open offer, the port that it listens on, and the fingerprint of its
/// certificate.
fn acceptor_with_offer() -> (Acceptor, u16, Fingerprint) {
    let mut acceptor = Acceptor::default();
    let (port, fingerprint) = acceptor.open_offer(Micros(1), OFFER_ID).expect("a socket");
    (acceptor, port, fingerprint)
}

fn dialer(addresses: &[SocketAddr], peer: Fingerprint) -> Dialer {
    Dialer::new(Micros(1), OFFER_ID, addresses, peer).expect("a key")
}

/// Advances both sides until the dialer has a result. Returns the outcomes of the dialer and of the
/// offer.
fn run_setup(acceptor: &mut Acceptor, dialer: &mut Dialer) -> (Outcome, Option<Outcome>) {
    let mut accepted = None;
    let dialled = poll_until("an answer for the dialer", || {
        accepted = accepted
            .take()
            .or(acceptor.step(Micros(2)).pop().map(|(_, outcome)| outcome));
        let (mut fds, listens) = (Vec::new(), !acceptor.is_idle());
        dialer.add_poll_fds(&mut fds);
        acceptor.add_poll_fds(&mut fds);
        assert!(accepted.is_some() || listens, "an open offer is watched");
        let _ = poll(&mut fds, PollTimeout::from(1u8));
        dialer.step(Micros(2))
    });
    (dialled, accepted)
}

/// Establishes a route. `dial_port` maps the acceptor's port to the port to which the dialer
/// connects, which may be a proxy's. Returns the listening and the connecting end.
fn route_via(dial_port: impl FnOnce(u16) -> u16) -> (FrameStream, FrameStream) {
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    let mut dialer = dialer(&[loopback(dial_port(port))], fingerprint);
    acceptor.record_acceptance(OFFER_ID, dialer.fingerprint());
    let (dialled, accepted) = run_setup(&mut acceptor, &mut dialer);
    assert!(acceptor.is_idle(), "{acceptor:?}");
    (
        accepted.expect("the dialer was answered").expect("a route"),
        dialled.expect("a route"),
    )
}

fn route() -> (FrameStream, FrameStream) {
    route_via(|port| port)
}

/// Returns a frame of random length that begins with its number.
fn frame(dice: &mut Rng, number: u32) -> Vec<u8> {
    let length = match dice.below(4) {
        0 => 4 + dice.below(60),
        1 => 4 + dice.below(FRAME_BYTES_MAX - 4),
        2 => FRAME_BYTES_MAX,
        _ => (16 << 10) - 8 + dice.below(16),
    };
    let mut frame = vec![number as u8; length];
    frame[..4].copy_from_slice(&number.to_le_bytes());
    frame
}

/// Checks the number and content of the frames that one end receives.
#[derive(Default)]
struct FrameChecker {
    next_number: u32,
}

impl FrameChecker {
    fn check(&mut self, frame: &[u8]) {
        assert_eq!(frame[..4], self.next_number.to_le_bytes());
        assert!(
            frame[4..]
                .iter()
                .all(|byte| *byte == self.next_number as u8),
            "frame {} is not what was sent",
            self.next_number
        );
        self.next_number += 1;
    }
}

/// Sends `count` frames in both directions at once. Returns for each end the number of frames
/// received, and the reason why the route ended, if it did.
fn exchange_frames(
    ends: [&mut FrameStream; 2],
    count: u32,
    seed: u64,
) -> [(Option<RouteEnd>, u32); 2] {
    let mut dice = Rng(seed);
    let mut state = [
        (None, FrameChecker::default(), 0),
        (None, FrameChecker::default(), 0),
    ];
    let [a, b] = ends;
    poll_until("all frames", || {
        for (end, (ended, check, sent)) in [&mut *a, &mut *b].into_iter().zip(&mut state) {
            while ended.is_none() && *sent < count && end.has_room() {
                let whole = frame(&mut dice, *sent);
                let (head, payload) = whole.split_at(dice.below(30).min(whole.len()));
                assert!(end.push(&[head, payload]));
                *sent += 1;
            }
            let gone = end.read(&mut |frame| check.check(frame)).and(end.flush());
            *ended = ended.take().or(gone.err());
        }
        let all = |(ended, check, sent): &(Option<RouteEnd>, FrameChecker, u32)| {
            ended.is_some() || (check.next_number == count && *sent == count)
        };
        let flushed = !a.wants_write() && !b.wants_write();
        (state.iter().any(|s| s.0.is_some()) || (flushed && state.iter().all(all))).then_some(())
    });
    // After one end has failed, data from it may still be in transit to the other end.
    for (end, (ended, check, _)) in [a, b].into_iter().zip(&mut state) {
        if let Err(e) = end.read(&mut |frame| check.check(frame)) {
            ended.get_or_insert(e);
        }
    }
    state.map(|(ended, check, _)| (ended, check.next_number))
}

/// Starts a proxy that forwards data in chunks of random lengths, and returns its port. `tamper` is
/// called for each chunk to the listening side with the number of bytes before the chunk, and may
/// change the chunk; if `tamper` returns false, the proxy cuts the connection.
fn start_proxy(
    port: u16,
    seed: u64,
    tamper: impl Fn(usize, &mut [u8]) -> bool + Send + 'static,
) -> u16 {
    let listener = TcpListener::bind(loopback(0)).expect("a port");
    let own = listener.local_addr().expect("it has one").port();
    std::thread::spawn(move || {
        let (dialled, _) = listener.accept().expect("the dialer comes");
        let listening = TcpStream::connect(loopback(port)).expect("it listens");
        let back = (
            listening.try_clone().expect("a socket"),
            dialled.try_clone().expect("a socket"),
        );
        let one = std::thread::spawn(move || forward(dialled, listening, seed, tamper));
        forward(back.0, back.1, seed + 1, |_, _| true);
        one.join().expect("it ends");
    });
    own
}

fn forward(
    mut from: TcpStream,
    mut to: TcpStream,
    seed: u64,
    tamper: impl Fn(usize, &mut [u8]) -> bool,
) {
    let (mut dice, mut passed, mut bytes) = (Rng(seed), 0, vec![0; 100_000]);
    to.set_nodelay(true).expect("a socket");
    loop {
        let room = match dice.below(3) {
            0 => 1 + dice.below(40),
            _ => 1 + dice.below(100_000),
        };
        let got = from.read(&mut bytes[..room]).unwrap_or(0);
        if got == 0 || !tamper(passed, &mut bytes[..got]) || to.write_all(&bytes[..got]).is_err() {
            let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
            return;
        }
        passed += got;
    }
}

fn open_descriptor_count() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("/proc").count()
}

/// Frames of all lengths arrive whole and in order in both directions.
#[test]
fn frames_arrive_whole_and_in_order() {
    let (mut a, mut b) = route();
    for seed in 1..6 {
        assert_eq!(
            exchange_frames([&mut a, &mut b], 60, seed),
            [(None, 60), (None, 60)]
        );
    }
    // An empty frame is valid, too.
    assert!(a.push(&[]));
    a.flush().expect("the route stands");
    let mut empty = 0;
    poll_until("the empty frame", || {
        b.read(&mut |frame| empty += usize::from(frame.is_empty()))
            .expect("the route stands");
        (empty == 1).then_some(())
    });
}

/// Both sockets carry the mark of sockets that the library closes before a migration.
#[test]
fn both_sockets_carry_library_mark() {
    let (a, b) = route();
    for end in [&a, &b] {
        let flags = nix::fcntl::fcntl(end, nix::fcntl::FcntlArg::F_GETFL).expect("open");
        assert_ne!(flags & sempa_proto::task::LIBRARY_SOCKET_FLAG, 0);
    }
}

/// Frames arrive unchanged, however the byte stream is divided into chunks.
#[test]
fn chunk_boundaries_do_not_matter() {
    for seed in 1..8 {
        let (mut a, mut b) = route_via(|port| start_proxy(port, seed, |_, _| true));
        assert_eq!(
            exchange_frames([&mut a, &mut b], 100, seed),
            [(None, 100), (None, 100)],
            "seed {seed}"
        );
    }
}

/// Key updates in the middle of a stream do not affect the frames.
#[test]
fn key_updates_are_transparent() {
    let (mut a, mut b) = route();
    a.change_keys_after(40);
    b.change_keys_after(25);
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
        let place = 20_000 + 7919 * seed as usize;
        let flip = move |passed: usize, bytes: &mut [u8]| {
            if (passed..passed + bytes.len()).contains(&place) {
                bytes[place - passed] ^= 1 << (seed % 8);
            }
            true
        };
        let (mut a, mut b) = route_via(|port| start_proxy(port, seed, flip));
        let [(listening, came), _] = exchange_frames([&mut a, &mut b], 200, seed);
        // If a flipped bit makes a record longer, the receiver may wait for the rest until the
        // connection ends.
        assert!(
            matches!(
                listening,
                Some(RouteEnd::ProtocolError(_) | RouteEnd::Broken(_))
            ),
            "{listening:?} (seed {seed})"
        );
        assert!(came < 200, "seed {seed}");
    }
}

/// A connection that is cut passes only whole frames to the receiver.
#[test]
fn cut_connection_passes_whole_frames_only() {
    for seed in 1..10u64 {
        let cut =
            move |passed: usize, bytes: &mut [u8]| passed + bytes.len() < 30_000 * seed as usize;
        let (mut a, mut b) = route_via(|port| start_proxy(port, seed, cut));
        let [one, two] = exchange_frames([&mut a, &mut b], 400, seed);
        assert!(one.0.is_some() || two.0.is_some(), "seed {seed}");
        assert!(one.1 < 400, "seed {seed}");
    }
}

/// Each side refuses a peer with another certificate, and the offer stays open for the intended
/// peer.
#[test]
fn each_side_refuses_other_certificates() {
    let other = Identity::new().expect("a key").fingerprint();
    // The dialer connects to a peer with another certificate.
    let (mut acceptor, port, _) = acceptor_with_offer();
    let mut dialer_ = dialer(&[loopback(port)], other);
    acceptor.record_acceptance(OFFER_ID, dialer_.fingerprint());
    let (dialled, accepted) = run_setup(&mut acceptor, &mut dialer_);
    assert!(
        matches!(dialled, Err(SetupError::Unauthenticated(_))),
        "{dialled:?}"
    );
    assert!(accepted.is_none(), "{accepted:?}");
    // A dialer with another certificate connects. The offer stays open for the intended dialer.
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    let mut right = dialer(&[loopback(port)], fingerprint);
    acceptor.record_acceptance(OFFER_ID, right.fingerprint());
    let (dialled, accepted) = run_setup(&mut acceptor, &mut dialer(&[loopback(port)], fingerprint));
    assert!(
        matches!(dialled, Err(SetupError::Unauthenticated(_))),
        "{dialled:?}"
    );
    assert!(accepted.is_none(), "{accepted:?}");
    let (dialled, accepted) = run_setup(&mut acceptor, &mut right);
    assert!(
        dialled.is_ok() && matches!(accepted, Some(Ok(_))),
        "{dialled:?} {accepted:?}"
    );
}

/// Connections that send garbage are closed, and the offer stays open for the intended peer.
#[test]
fn garbage_does_not_consume_offer() {
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    let mut right = dialer(&[loopback(port)], fingerprint);
    acceptor.record_acceptance(OFFER_ID, right.fingerprint());
    let preamble = super::accept::preamble(OFFER_ID);
    let mut dice = Rng(77);
    for round in 0..60 {
        let mut garbage = match round % 4 {
            0 => b"GET / HTTP/1.1\r\n\r\n".to_vec(),
            1 => super::accept::preamble(OfferId(9)).to_vec(),
            // A data record before any handshake, then random bytes.
            2 => [&preamble[..], &[23, 3, 3, 0, 40], &[0; 40]].concat(),
            _ => preamble.to_vec(),
        };
        garbage.extend((0..dice.below(40_000)).map(|_| dice.below(256) as u8));
        let mut stranger = TcpStream::connect(loopback(port)).expect("it listens");
        // Fails if the acceptor closes the connection before all is written.
        let _ = stranger.write_all(&garbage);
        let _ = stranger.shutdown(Shutdown::Write);
        stranger.set_nonblocking(true).expect("a socket");
        poll_until("it is closed", || {
            assert!(acceptor.step(Micros(2)).is_empty(), "round {round}");
            match stranger.read(&mut [0; 1000]) {
                Ok(0) => Some(()),
                Ok(_) => None,
                Err(e) => (e.kind() != std::io::ErrorKind::WouldBlock).then_some(()),
            }
        });
    }
    let (dialled, accepted) = run_setup(&mut acceptor, &mut right);
    assert!(
        dialled.is_ok() && matches!(accepted, Some(Ok(_))),
        "{dialled:?} {accepted:?}"
    );
}

/// Connections that send nothing are limited in number and expire.
#[test]
fn silent_connections_are_bounded_and_expire() {
    let before = open_descriptor_count();
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    let strangers: Vec<TcpStream> = (0..2 * UNAUTHENTICATED_CONNECTIONS_MAX)
        .map(|_| TcpStream::connect(loopback(port)).expect("it listens"))
        .collect();
    let own = open_descriptor_count() - strangers.len();
    poll_until("they are let in", || {
        assert!(acceptor.step(Micros(2)).is_empty());
        (open_descriptor_count() - strangers.len() == own + UNAUTHENTICATED_CONNECTIONS_MAX)
            .then_some(())
    });
    // The intended peer is still accepted as a further connection.
    let mut right = dialer(&[loopback(port)], fingerprint);
    acceptor.record_acceptance(OFFER_ID, right.fingerprint());
    acceptor
        .open_offer(Micros(2), OfferId(5))
        .expect("a second offer keeps it listening");
    let (dialled, accepted) = run_setup(&mut acceptor, &mut right);
    assert!(
        dialled.is_ok() && matches!(accepted, Some(Ok(_))),
        "{dialled:?} {accepted:?}"
    );
    assert_eq!(
        acceptor.next_wakeup(),
        Some(Micros(2) + AUTHENTICATION_TIMEOUT)
    );
    assert!(acceptor.step(Micros(2) + AUTHENTICATION_TIMEOUT).is_empty());
    assert_eq!(acceptor.next_wakeup(), Some(Micros(2) + OFFER_TIMEOUT));
    let late = acceptor.step(Micros(2) + OFFER_TIMEOUT);
    assert!(
        matches!(late[..], [(OfferId(5), Err(SetupError::TimedOut))]),
        "{late:?}"
    );
    assert!(acceptor.is_idle());
    drop((strangers, dialled, accepted));
    assert_eq!(open_descriptor_count(), before, "nothing stays open");
}

/// An address that stalls in the handshake is abandoned after its timeout, and the next address is
/// tried.
#[test]
fn stalled_address_is_skipped() {
    let mute = TcpListener::bind(loopback(0)).expect("a port");
    let mute_at = mute.local_addr().expect("it has one");
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    let closed = {
        let gone = TcpListener::bind(loopback(0)).expect("a port");
        gone.local_addr().expect("it has one")
    };
    let mut dialer_ = dialer(&[closed, mute_at, loopback(port)], fingerprint);
    acceptor.record_acceptance(OFFER_ID, dialer_.fingerprint());
    let mut now = Micros(2);
    let dialled = poll_until("a route", || {
        let done = dialer_.step(now);
        now = now + Micros::from_millis(1);
        let _ = acceptor
            .step(Micros(2))
            .pop()
            .map(|(_, outcome)| outcome.map(std::mem::forget));
        done
    });
    assert!(dialled.is_ok(), "{dialled:?}");
    // None of these addresses answers.
    let mut alone = dialer(&[closed, mute_at], fingerprint);
    let refused = poll_until("the end", || {
        now = now + Micros::from_millis(10);
        alone.step(now)
    });
    assert_eq!(refused.err(), Some(SetupError::TimedOut));
    let unreachable = poll_until("the end", || dialer(&[closed], fingerprint).step(Micros(2)));
    assert!(
        matches!(unreachable, Err(SetupError::Unreachable(_))),
        "{unreachable:?}"
    );
    assert_eq!(
        dialer(&[loopback(port)], fingerprint)
            .step(Micros(1) + DIAL_TIMEOUT)
            .and_then(Result::err),
        Some(SetupError::TimedOut)
    );
}

/// A connection that arrives before the peer's acceptance of the offer stays open until the
/// acceptance arrives.
#[test]
fn early_connection_waits_for_acceptance() {
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    let mut dialer = dialer(&[loopback(port)], fingerprint);
    // The dialer's first message has arrived and is not answered.
    poll_until("it has connected", || {
        assert!(dialer.step(Micros(2)).is_none() && acceptor.step(Micros(2)).is_empty());
        (format!("{acceptor:?}").contains("strangers: 1")).then_some(())
    });
    for _ in 0..50 {
        assert!(dialer.step(Micros(2)).is_none() && acceptor.step(Micros(2)).is_empty());
    }
    acceptor.record_acceptance(OFFER_ID, dialer.fingerprint());
    let (dialled, accepted) = run_setup(&mut acceptor, &mut dialer);
    assert!(
        dialled.is_ok() && matches!(accepted, Some(Ok(_))),
        "{dialled:?} {accepted:?}"
    );
}

/// A frame over the maximum length ends the route after the frames before it were passed on.
#[test]
fn oversized_frame_ends_route() {
    let (mut a, mut b) = route();
    assert!(a.push(&[&[1; 4]]));
    a.push_bytes(&(FRAME_BYTES_MAX as u32 + 1).to_le_bytes());
    a.flush().expect("the route stands");
    let mut came = 0;
    let ended = poll_until("the end", || b.read(&mut |_| came += 1).err());
    assert_eq!(
        (ended, came),
        (RouteEnd::ProtocolError("a frame is over the limit"), 1)
    );
    assert_eq!(
        b.read(&mut |_| came += 1),
        Err(RouteEnd::ProtocolError("a frame is over the limit"))
    );
    assert_eq!(came, 1);
}

/// The output buffer is bounded while the peer does not read, and all frames arrive when the peer
/// reads.
#[test]
fn backlog_for_slow_reader_is_bounded() {
    let (mut a, mut b) = route();
    let mut sent = 0u32;
    loop {
        if a.push(&[&sent.to_le_bytes(), &[7; FRAME_BYTES_MAX - 4]]) {
            sent += 1;
            assert!(sent < 1000, "the kernel keeps less than 64 MiB");
            continue;
        }
        a.flush().expect("the route stands");
        if !a.has_room() {
            break;
        }
    }
    assert!(a.wants_write());
    let mut came = 0;
    poll_until("all of it", || {
        a.flush().expect("the route stands");
        b.read(&mut |_| came += 1).expect("the route stands");
        (!a.wants_write() && came >= sent).then_some(())
    });
}

/// An idle end has no buffers, and continues without loss when it is used again.
#[test]
fn idle_end_frees_buffers_and_continues() {
    let (mut a, mut b) = route();
    for round in 0..3u32 {
        let mut came = Vec::new();
        assert!(a.push(&[&round.to_le_bytes()]));
        a.release_buffers();
        assert!(a.buffer_bytes() > 0, "something waits in it");
        a.flush().expect("the route stands");
        poll_until("the frame", || {
            b.read(&mut |frame| came.push(frame.to_vec()))
                .expect("the route stands");
            (!came.is_empty()).then_some(())
        });
        assert_eq!(came, [round.to_le_bytes()]);
        for end in [&mut a, &mut b] {
            end.release_buffers();
            assert_eq!(end.buffer_bytes(), 0);
        }
        std::mem::swap(&mut a, &mut b);
    }
    a.release_buffers();
    a.close();
    assert_eq!(
        poll_until("the end", || b
            .read(&mut |_| panic!("nothing was sent"))
            .err()),
        RouteEnd::Closed
    );
}

/// A properly closed route and the death of the peer are reported differently.
#[test]
fn close_and_peer_death_are_distinguished() {
    let (mut a, b) = route();
    b.close();
    let ended = poll_until("the end", || {
        a.read(&mut |_| panic!("nothing was sent")).err()
    });
    assert_eq!(ended, RouteEnd::Closed);
    let (mut a, mut b) = route();
    // The peer dies with half a frame in transit and with unread input.
    b.push_bytes(&2000u32.to_le_bytes());
    b.push_bytes(&[7; 1000]);
    b.flush().expect("the route stands");
    assert!(a.push(&[&[1], &[2]]));
    a.flush().expect("the route stands");
    drop(b);
    let ended = poll_until("the end", || {
        a.read(&mut |_| panic!("no frame was whole"))
            .and(a.flush())
            .err()
    });
    assert!(matches!(ended, RouteEnd::Broken(_)), "{ended:?}");
}

/// After a write error, the frames that the peer sent before are still received.
#[test]
fn input_stays_readable_after_write_error() {
    let (mut a, mut b) = route();
    const FRAMES: u32 = 3;
    for number in 0..FRAMES {
        assert!(b.push(&[&number.to_le_bytes(), &[5; 10_000]]));
    }
    b.flush().expect("the route stands");
    assert!(!b.wants_write(), "it is more than any kernel takes");
    drop(b);
    let mute = poll_until("a refusal", || {
        assert!(a.push(&[&[1]]));
        a.flush().err()
    });
    assert!(matches!(mute, RouteEnd::Broken(_)), "{mute:?}");
    let mut came = 0u32;
    let ended = poll_until("the end", || {
        a.read(&mut |frame| {
            assert_eq!(
                (&frame[..4], frame.len()),
                (&came.to_le_bytes()[..], 10_004)
            );
            came += 1;
        })
        .err()
    });
    assert_eq!(came, FRAMES, "{ended:?}");
}

/// The number of offers is limited, and a connection to a withdrawn offer is refused.
#[test]
fn offers_are_bounded_and_can_be_withdrawn() {
    let (mut acceptor, port, fingerprint) = acceptor_with_offer();
    for n in 1..OFFERS_MAX as u64 {
        acceptor.open_offer(Micros(1), OfferId(n)).expect("room");
    }
    assert_eq!(
        acceptor.open_offer(Micros(1), OfferId(0)).err(),
        Some(SetupError::TooManyOffers)
    );
    let mut dialer = dialer(&[loopback(port)], fingerprint);
    acceptor.record_acceptance(OFFER_ID, dialer.fingerprint());
    acceptor.withdraw(OFFER_ID);
    let (dialled, accepted) = run_setup(&mut acceptor, &mut dialer);
    assert!(
        matches!(dialled, Err(SetupError::Unauthenticated(_))) && accepted.is_none(),
        "{dialled:?} {accepted:?}"
    );
    assert!(!acceptor.is_idle());
    acceptor.close();
    assert!(acceptor.is_idle());
    let mut fds: Vec<PollFd<'_>> = Vec::new();
    acceptor.add_poll_fds(&mut fds);
    assert!(fds.is_empty());
}
