//! Tests of direct routes that two tasks request through the runtime's interface, with a fake
//! daemon.

use super::fake::FakeDaemon;
use super::{TEST_TIMEOUT, expect_numbered, message, recv_next, send_numbered, wait_until};
use crate::inbox::Inbox;
use crate::runtime::direct_routes::DRAIN_SILENCE_TIMEOUT;
use crate::runtime::{Core, Runtime};
use sempa_proto::body::{Encoding, Unpacker};
use sempa_proto::message::CTX_BASE;
use sempa_proto::route::RouteMsg;
use sempa_proto::task::{SendWatermark, ToDaemon, ToTask};
use sempa_proto::{Message, Micros, Tid};
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Returns two tasks on different hosts.
fn remote_pair() -> (FakeDaemon, Runtime, Runtime) {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    (fake, a, b)
}

/// Waits for the next message with this tag and returns it.
fn recv_tagged(task: &Runtime, tag: i32) -> Message {
    let wanted = &mut |inbox: &mut Inbox| inbox.take_first(|m| m.tag == tag);
    task.wait_for_inbox(Some(Instant::now() + TEST_TIMEOUT), wanted)
        .expect("connected")
        .expect("a message in time")
}

fn ints(message: &Message) -> [i32; 2] {
    let mut body = Unpacker::new(Encoding::Xdr, message.body.clone());
    [body.int().expect("an int"), body.int().expect("an int")]
}

fn direct_offer_count(fake: &FakeDaemon) -> usize {
    let is_offer = |said: &ToDaemon| {
        matches!(
            said,
            ToDaemon::Route {
                message: RouteMsg::DirectOffer { .. },
                ..
            }
        )
    };
    fake.state()
        .control_log
        .iter()
        .filter(|(_, said)| is_offer(said))
        .count()
}

fn has_route(task: &Runtime, to: Tid) -> bool {
    task.with_core(|core| core.direct.has_route(to))
        .expect("not forked")
}

/// Messages over a direct route go in both directions without the daemon.
#[test]
fn direct_route_bypasses_daemon() {
    let (fake, a, b) = remote_pair();
    a.open_route(b.tid());
    wait_until("both ends", || {
        (has_route(&a, b.tid()) && has_route(&b, a.tid())).then_some(())
    });
    // From this point the fake daemon drops link frames, so only the direct route delivers.
    fake.state().drops_link_frames = true;
    send_numbered(&a, b.tid(), 0..300);
    send_numbered(&b, a.tid(), 0..300);
    expect_numbered(&b, a.tid(), 0..300);
    expect_numbered(&a, b.tid(), 0..300);
    // The tasks send more than socket buffers contain, while neither task receives.
    for task in [&a, &b] {
        let to = if task.tid() == a.tid() {
            b.tid()
        } else {
            a.tid()
        };
        task.send(message(to, 7, vec![5; 64 << 20])).expect("kept");
    }
    assert!(
        [&a, &b]
            .iter()
            .all(|task| recv_tagged(task, 7).body.len() == 64 << 20)
    );
    assert_eq!(direct_offer_count(&fake), 1);
}

/// A route that was idle for a minute frees its buffers and stays usable.
#[test]
fn idle_route_frees_buffers_and_stays() {
    let (fake, a, b) = remote_pair();
    a.open_route(b.tid());
    wait_until("both ends", || {
        (has_route(&a, b.tid()) && has_route(&b, a.tid())).then_some(())
    });
    fake.state().drops_link_frames = true;
    let buffers = |task: &Runtime| {
        task.with_core(Core::direct_buffer_bytes)
            .expect("not forked")
    };
    let mut minutes = 0;
    for round in 0..2 {
        send_numbered(&a, b.tid(), round * 20..round * 20 + 20);
        send_numbered(&b, a.tid(), round * 20..round * 20 + 20);
        expect_numbered(&b, a.tid(), round * 20..round * 20 + 20);
        expect_numbered(&a, b.tid(), round * 20..round * 20 + 20);
        for task in [&a, &b] {
            assert!(buffers(task) > 0);
            // A link may have acknowledgements to send when time advances; a minute later it has
            // none.
            wait_until("nothing on its way", || {
                minutes += 1;
                let mut held = task.lock().expect("not forked");
                let later = held.now() + Micros::from_secs(minutes * 61);
                held.core.run_timers(later);
                (held.core.direct_buffer_bytes() == 0).then_some(())
            });
        }
        assert!(has_route(&a, b.tid()) && has_route(&b, a.tid()));
    }
    assert_eq!(direct_offer_count(&fake), 1);
}

/// Two tasks that request a route to each other at the same time establish one route.
#[test]
fn crossing_offers_establish_one_route() {
    for _ in 0..10 {
        let (fake, a, b) = remote_pair();
        std::thread::scope(|scope| {
            scope.spawn(|| a.open_route(b.tid()));
            scope.spawn(|| b.open_route(a.tid()));
        });
        wait_until("both ends", || {
            (has_route(&a, b.tid()) && has_route(&b, a.tid())).then_some(())
        });
        fake.state().drops_link_frames = true;
        send_numbered(&a, b.tid(), 0..20);
        send_numbered(&b, a.tid(), 0..20);
        expect_numbered(&b, a.tid(), 0..20);
        expect_numbered(&a, b.tid(), 0..20);
    }
}

/// A program that refuses routes receives one offer only, and its messages go through the daemons.
#[test]
fn refusing_program_is_asked_once() {
    let (fake, a, b) = remote_pair();
    b.set_accepts_routes(false);
    for number in 0..5 {
        a.open_route(b.tid());
        send_numbered(&a, b.tid(), number..number + 1);
    }
    expect_numbered(&b, a.tid(), 0..5);
    assert!(direct_offer_count(&fake) == 1 && !has_route(&a, b.tid()));
}

/// Programs are notified of new routes and of their ends.
#[test]
fn programs_are_notified_of_routes_and_ends() {
    let (fake, a, b) = remote_pair();
    a.notify_route_end(b.tid(), CTX_BASE, 5, false)
        .expect("room");
    assert_eq!(
        ints(&recv_tagged(&a, 5)),
        [b.tid().raw(), -1],
        "there is none yet"
    );
    for task in [&a, &b] {
        task.notify_new_routes(CTX_BASE, 4, -1).expect("room");
    }
    a.open_route(b.tid());
    for (task, other) in [(&a, &b), (&b, &a)] {
        let note = recv_tagged(task, 4);
        assert_eq!((note.src, ints(&note)[0]), (task.tid(), other.tid().raw()));
        assert_eq!(Some(ints(&note)[1]), task.ready_fd());
        task.notify_route_end(other.tid(), CTX_BASE, 5, false)
            .expect("room");
    }
    send_numbered(&b, a.tid(), 0..10);
    b.exit().expect("connected");
    expect_numbered(&a, b.tid(), 0..10);
    assert_eq!(ints(&recv_tagged(&a, 5)), [b.tid().raw(), -1]);
    drop(fake);
}

/// A task that exits loses no message that it sent over a direct route.
#[test]
fn exit_loses_no_direct_messages() {
    for round in 0..5 {
        let (_fake, a, b) = remote_pair();
        a.open_route(b.tid());
        // Input that the exiting task never reads makes its kernel discard output in transit.
        send_numbered(&b, a.tid(), 0..50);
        send_numbered(&a, b.tid(), 0..200 + round);
        a.exit().expect("connected");
        expect_numbered(&b, a.tid(), 0..200 + round);
    }
}

/// A migration during transfers over a direct route loses, duplicates and reorders nothing.
#[test]
fn migration_preserves_direct_messages() {
    let (fake, a, b) = remote_pair();
    a.notify_new_routes(CTX_BASE, 4, -1).expect("room");
    b.notify_route_end(a.tid(), CTX_BASE, 5, false)
        .expect("room");
    assert_eq!(ints(&recv_tagged(&b, 5)), [a.tid().raw(), -1]);
    for round in 1..4u32 {
        a.open_route(b.tid());
        assert_eq!(ints(&recv_tagged(&a, 4))[0], b.tid().raw(), "round {round}");
        wait_until("the other end", || has_route(&b, a.tid()).then_some(()));
        b.notify_route_end(a.tid(), CTX_BASE, 5, false)
            .expect("room");
        let (from, to) = ((round - 1) * 200, round * 200);
        std::thread::scope(|scope| {
            scope.spawn(|| send_numbered(&a, b.tid(), from..to));
            scope.spawn(|| send_numbered(&b, a.tid(), from..to));
            fake.quiesce(a.tid(), u64::from(round));
            fake.wait_quiesced(a.tid(), u64::from(round));
            assert!(
                !has_route(&a, b.tid())
                    && a.with_core(|core| !core.direct.is_open())
                        .expect("not forked")
            );
            fake.resume(u64::from(round));
        });
        // While a task has no connection to the daemon, it requests no route.
        wait_until("the return", || a.socket_fd());
        expect_numbered(&b, a.tid(), from..to);
        expect_numbered(&a, b.tid(), from..to);
        assert_eq!(
            ints(&recv_tagged(&b, 5)),
            [a.tid().raw(), -1],
            "round {round}"
        );
    }
    assert_eq!(direct_offer_count(&fake), 3);
}

/// On the same host a direct route uses the ring, and no task listens.
#[test]
fn same_host_route_uses_rings() {
    let fake = FakeDaemon::start();
    fake.state().same_host = true;
    let (a, b) = (fake.enroll(), fake.enroll());
    b.notify_new_routes(CTX_BASE, 4, 1).expect("room");
    a.open_route(b.tid());
    assert_eq!(ints(&recv_next(&b))[0], a.tid().raw());
    send_numbered(&a, b.tid(), 0..50);
    expect_numbered(&b, a.tid(), 0..50);
    assert!(
        !has_route(&a, b.tid())
            && a.with_core(|core| !core.direct.is_open())
                .expect("not forked"),
        "nothing listens"
    );
}

/// State of the proxy for data to the dialing side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProxyState {
    Open,
    /// The proxy retains the data and forwards nothing.
    Retaining,
    /// The proxy forwards the retained data and closes the connection, as the kernel does for a
    /// killed task.
    FlushAndClose,
}

/// Proxy in a direct connection: its state, and the number of bytes that it retains.
#[derive(Clone)]
struct RetainingProxy(Arc<Mutex<(ProxyState, usize)>>);

impl RetainingProxy {
    /// Inserts a proxy into the direct connections of this daemon's tasks.
    fn insert(fake: &FakeDaemon) -> RetainingProxy {
        let way = RetainingProxy(Arc::new(Mutex::new((ProxyState::Open, 0))));
        let gate = way.clone();
        fake.state().address_rewrite = Some(Box::new(move |offered| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
            let own = listener.local_addr().expect("it has one");
            let gate = gate.clone();
            std::thread::spawn(move || gate.run(&listener, offered));
            own
        }));
        way
    }

    fn set_state(&self, gate: ProxyState) {
        self.0.lock().expect("no panic under the lock").0 = gate;
    }

    fn held_bytes(&self) -> usize {
        self.0.lock().expect("no panic under the lock").1
    }

    fn run(&self, listener: &TcpListener, offered: SocketAddr) {
        let (mut dialled, _) = listener.accept().expect("it is dialled");
        let mut offering = TcpStream::connect(offered).expect("it listens");
        let mut back = (
            dialled.try_clone().expect("a socket"),
            offering.try_clone().expect("a socket"),
        );
        std::thread::spawn(move || std::io::copy(&mut back.0, &mut back.1));
        offering
            .set_read_timeout(Some(Duration::from_millis(1)))
            .expect("a socket");
        let (mut kept, mut bytes) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            let got = offering.read(&mut bytes).unwrap_or(0);
            kept.extend_from_slice(&bytes[..got]);
            let gate = {
                let mut state = self.0.lock().expect("no panic under the lock");
                state.1 = kept.len();
                state.0
            };
            if gate != ProxyState::Retaining {
                dialled.write_all(&kept).expect("somebody reads");
                kept.clear();
            }
            if gate == ProxyState::FlushAndClose {
                let _ = (
                    dialled.shutdown(std::net::Shutdown::Both),
                    offering.shutdown(std::net::Shutdown::Both),
                );
                return;
            }
        }
    }
}

/// Returns two tasks whose direct route goes through a proxy that retains all data. The daemon
/// drops link frames.
fn pair_with_retaining_proxy() -> (FakeDaemon, Runtime, Runtime, RetainingProxy) {
    let (fake, a, b) = remote_pair();
    let way = RetainingProxy::insert(&fake);
    a.open_route(b.tid());
    wait_until("both ends", || {
        (has_route(&a, b.tid()) && has_route(&b, a.tid())).then_some(())
    });
    fake.state().drops_link_frames = true;
    way.set_state(ProxyState::Retaining);
    (fake, a, b, way)
}

/// Reports the end of a task to `to`: first with `PeerGone`, then with the notification message
/// with tag 9.
fn report_end(fake: &FakeDaemon, to: &Runtime, ended: Tid) {
    fake.send_control(to.tid(), ToTask::PeerGone { tid: ended });
    let deliver = |tag, after| ToTask::Deliver {
        message: message(to.tid(), tag, ""),
        deliver_after: after,
    };
    fake.send_control(
        to.tid(),
        deliver(
            9,
            Some(SendWatermark {
                peer: ended,
                end_seq: 1,
            }),
        ),
    );
    // When the message with tag 8 has arrived, both reports have been handled.
    fake.send_control(to.tid(), deliver(8, None));
    assert_eq!(recv_next(to).tag, 8);
}

/// The messages of a killed task are received before the notification of its end, however late they
/// arrive.
#[test]
fn messages_of_killed_task_precede_its_end() {
    const COUNT: u32 = 30;
    const BYTES: usize = 100_000;
    let (fake, a, b, way) = pair_with_retaining_proxy();
    for number in 0..COUNT {
        let mut body = vec![number as u8; BYTES];
        body[..4].copy_from_slice(&number.to_le_bytes());
        a.send(message(b.tid(), 1, body)).expect("sent");
    }
    wait_until("all of it on the way", || {
        (way.held_bytes() >= COUNT as usize * BYTES).then_some(())
    });
    report_end(&fake, &b, a.tid());
    assert!(
        has_route(&b, a.tid())
            && b.check_inbox(&mut |inbox: &mut Inbox| inbox.get(0).map(|_| ()))
                .is_none()
    );
    // Messages to the ended task are dropped after `PeerGone`.
    b.send(message(a.tid(), 1, vec![1; 1 << 20]))
        .expect("as to anybody who has ended");
    way.set_state(ProxyState::FlushAndClose);
    for number in 0..COUNT {
        let got = recv_next(&b);
        assert_eq!(
            (got.tag, got.body.len(), &got.body[..4]),
            (1, BYTES, &number.to_le_bytes()[..])
        );
    }
    assert_eq!(recv_next(&b).tag, 9);
    assert!(
        !has_route(&b, a.tid())
            && b.with_core(|core| core.is_gone(a.tid()))
                .expect("not forked")
    );
}

/// If the host of a peer dies silently, the notification of the peer's end is delayed only until
/// the silence timeout.
#[test]
fn dead_host_delays_end_notification_briefly() {
    let (fake, a, b, _way) = pair_with_retaining_proxy();
    a.send(message(b.tid(), 1, "lost with its host"))
        .expect("sent");
    let told = Instant::now();
    report_end(&fake, &b, a.tid());
    assert_eq!(recv_next(&b).tag, 9);
    assert!(told.elapsed() >= Duration::from_micros(DRAIN_SILENCE_TIMEOUT.0));
    assert!(
        !has_route(&b, a.tid())
            && b.with_core(|core| core.is_gone(a.tid()))
                .expect("not forked")
    );
}

/// A task that migrates while it drains a connection still reports the end of the peer.
#[test]
fn migration_while_draining_reports_peer_end() {
    let (fake, a, b, _way) = pair_with_retaining_proxy();
    report_end(&fake, &b, a.tid());
    fake.quiesce(b.tid(), 1);
    fake.wait_quiesced(b.tid(), 1);
    assert_eq!(recv_next(&b).tag, 9);
    fake.resume(1);
    wait_until("the return", || b.socket_fd());
    assert!(
        b.with_core(|core| core.is_gone(a.tid()))
            .expect("not forked")
    );
}
