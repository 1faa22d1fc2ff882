//! Tests of direct routes that two tasks request through the runtime's interface. The daemon is a
//! fake daemon.

use super::fake::FakeDaemon;
use super::{
    TEST_TIMEOUT, recv_and_check_numbered, send_numbered, wait_for_next_message, wait_until,
    xdr_message,
};
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

/// Returns a fake daemon and two of its tasks that count as being on different hosts.
fn remote_pair() -> (FakeDaemon, Runtime, Runtime) {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    (fake, a, b)
}

/// Waits for the next message with this tag and returns it.
pub(super) fn wait_for_tagged_message(task: &Runtime, tag: i32) -> Message {
    let take_tagged_message = &mut |inbox: &mut Inbox| inbox.take_first(|m| m.tag == tag);
    task.wait_for_inbox(Some(Instant::now() + TEST_TIMEOUT), take_tagged_message)
        .expect("connected")
        .expect("a message in time")
}

pub(super) fn unpack_two_ints(message: &Message) -> [i32; 2] {
    let mut body = Unpacker::new(Encoding::Xdr, message.body.clone());
    [
        body.read_int().expect("an int"),
        body.read_int().expect("an int"),
    ]
}

pub(super) fn direct_offer_count(fake: &FakeDaemon) -> usize {
    let is_offer = |control_message: &ToDaemon| {
        matches!(
            control_message,
            ToDaemon::Route {
                message: RouteMsg::DirectOffer { .. },
                ..
            }
        )
    };
    fake.state()
        .control_log
        .iter()
        .filter(|(_, control_message)| is_offer(control_message))
        .count()
}

pub(super) fn has_route(task: &Runtime, peer: Tid) -> bool {
    task.with_core(|core| core.direct_routes.has_route(peer))
        .expect("not forked")
}

/// Messages in both directions use the direct route and not the daemon.
#[test]
fn direct_route_bypasses_daemon() {
    let (fake, a, b) = remote_pair();
    a.open_route_and_wait(b.tid());
    wait_until("both ends", || {
        (has_route(&a, b.tid()) && has_route(&b, a.tid())).then_some(())
    });
    // From this point the fake daemon drops link frames, so messages arrive only on the direct
    // route.
    fake.state().drops_link_frames = true;
    send_numbered(&a, b.tid(), 0..300);
    send_numbered(&b, a.tid(), 0..300);
    recv_and_check_numbered(&b, a.tid(), 0..300);
    recv_and_check_numbered(&a, b.tid(), 0..300);
    // Each task sends more bytes than the socket buffers can contain, while no task receives.
    for task in [&a, &b] {
        let receiver = if task.tid() == a.tid() {
            b.tid()
        } else {
            a.tid()
        };
        task.send(xdr_message(receiver, 7, vec![5; 64 << 20]))
            .expect("kept");
    }
    assert!(
        [&a, &b]
            .iter()
            .all(|task| wait_for_tagged_message(task, 7).body.len() == 64 << 20)
    );
    assert_eq!(direct_offer_count(&fake), 1);
}

/// A route that was idle for a minute frees its buffers and stays usable.
#[test]
fn idle_route_frees_buffers_and_stays_usable() {
    let (fake, a, b) = remote_pair();
    a.open_route_and_wait(b.tid());
    wait_until("both ends", || {
        (has_route(&a, b.tid()) && has_route(&b, a.tid())).then_some(())
    });
    fake.state().drops_link_frames = true;
    let buffer_bytes = |task: &Runtime| {
        task.with_core(Core::direct_buffer_bytes)
            .expect("not forked")
    };
    let mut minutes = 0;
    for round in 0..2 {
        send_numbered(&a, b.tid(), round * 20..round * 20 + 20);
        send_numbered(&b, a.tid(), round * 20..round * 20 + 20);
        recv_and_check_numbered(&b, a.tid(), round * 20..round * 20 + 20);
        recv_and_check_numbered(&a, b.tid(), round * 20..round * 20 + 20);
        for task in [&a, &b] {
            assert!(buffer_bytes(task) > 0);
            // When the time advances, a link may have acknowledgements to send. A minute later the
            // link has none.
            wait_until("nothing on its way", || {
                minutes += 1;
                let mut state_guard = task.lock().expect("not forked");
                let advanced_time = state_guard.now() + Micros::from_secs(minutes * 61);
                state_guard.core.run_timers(advanced_time);
                (state_guard.core.direct_buffer_bytes() == 0).then_some(())
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
            scope.spawn(|| a.open_route_and_wait(b.tid()));
            scope.spawn(|| b.open_route_and_wait(a.tid()));
        });
        wait_until("both ends", || {
            (has_route(&a, b.tid()) && has_route(&b, a.tid())).then_some(())
        });
        fake.state().drops_link_frames = true;
        send_numbered(&a, b.tid(), 0..20);
        send_numbered(&b, a.tid(), 0..20);
        recv_and_check_numbered(&b, a.tid(), 0..20);
        recv_and_check_numbered(&a, b.tid(), 0..20);
    }
}

/// A program that refuses routes receives only one offer. The messages to this program go through
/// the daemons.
#[test]
fn refusing_program_gets_one_offer() {
    let (fake, a, b) = remote_pair();
    b.set_accepts_routes(false);
    for number in 0..5 {
        a.open_route_and_wait(b.tid());
        send_numbered(&a, b.tid(), number..number + 1);
    }
    recv_and_check_numbered(&b, a.tid(), 0..5);
    assert!(direct_offer_count(&fake) == 1 && !has_route(&a, b.tid()));
}

/// Programs receive notifications of new routes and of the ends of routes.
#[test]
fn programs_are_notified_of_routes_and_ends() {
    let (fake, a, b) = remote_pair();
    a.notify_route_end(b.tid(), CTX_BASE, 5, false)
        .expect("room");
    assert_eq!(
        unpack_two_ints(&wait_for_tagged_message(&a, 5)),
        [b.tid().raw(), -1],
        "there is none yet"
    );
    for task in [&a, &b] {
        task.notify_new_routes(CTX_BASE, 4, -1).expect("room");
    }
    a.open_route_and_wait(b.tid());
    for (task, peer) in [(&a, &b), (&b, &a)] {
        let notification = wait_for_tagged_message(task, 4);
        assert_eq!(
            (notification.src, unpack_two_ints(&notification)[0]),
            (task.tid(), peer.tid().raw())
        );
        assert_eq!(Some(unpack_two_ints(&notification)[1]), task.ready_fd());
        task.notify_route_end(peer.tid(), CTX_BASE, 5, false)
            .expect("room");
    }
    send_numbered(&b, a.tid(), 0..10);
    b.exit().expect("connected");
    recv_and_check_numbered(&a, b.tid(), 0..10);
    assert_eq!(
        unpack_two_ints(&wait_for_tagged_message(&a, 5)),
        [b.tid().raw(), -1]
    );
    drop(fake);
}

#[test]
fn exit_loses_no_direct_messages() {
    for round in 0..5 {
        let (_fake, a, b) = remote_pair();
        a.open_route_and_wait(b.tid());
        // If a task exits with unread input, the kernel discards output of the task that is in
        // transit. The runtime must prevent this loss.
        send_numbered(&b, a.tid(), 0..50);
        send_numbered(&a, b.tid(), 0..200 + round);
        a.exit().expect("connected");
        recv_and_check_numbered(&b, a.tid(), 0..200 + round);
    }
}

/// A migration during transfers over a direct route neither loses nor duplicates nor reorders
/// messages.
#[test]
fn migration_preserves_direct_messages() {
    let (fake, a, b) = remote_pair();
    a.notify_new_routes(CTX_BASE, 4, -1).expect("room");
    b.notify_route_end(a.tid(), CTX_BASE, 5, false)
        .expect("room");
    assert_eq!(
        unpack_two_ints(&wait_for_tagged_message(&b, 5)),
        [a.tid().raw(), -1]
    );
    for round in 1..4u32 {
        a.open_route_and_wait(b.tid());
        assert_eq!(
            unpack_two_ints(&wait_for_tagged_message(&a, 4))[0],
            b.tid().raw(),
            "round {round}"
        );
        wait_until("the other end", || has_route(&b, a.tid()).then_some(()));
        b.notify_route_end(a.tid(), CTX_BASE, 5, false)
            .expect("room");
        let (first_number, end_number) = ((round - 1) * 200, round * 200);
        std::thread::scope(|scope| {
            scope.spawn(|| send_numbered(&a, b.tid(), first_number..end_number));
            scope.spawn(|| send_numbered(&b, a.tid(), first_number..end_number));
            fake.send_quiesce(a.tid(), u64::from(round));
            fake.wait_until_quiesced(a.tid(), u64::from(round));
            assert!(
                !has_route(&a, b.tid())
                    && a.with_core(|core| !core.direct_routes.is_any_open())
                        .expect("not forked")
            );
            fake.write_resume_token(u64::from(round));
        });
        // While a task has no connection to the daemon, it requests no route.
        wait_until("the return", || a.socket_fd());
        recv_and_check_numbered(&b, a.tid(), first_number..end_number);
        recv_and_check_numbered(&a, b.tid(), first_number..end_number);
        assert_eq!(
            unpack_two_ints(&wait_for_tagged_message(&b, 5)),
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
    fake.state().is_same_host = true;
    let (a, b) = (fake.enroll(), fake.enroll());
    b.notify_new_routes(CTX_BASE, 4, 1).expect("room");
    a.open_route_and_wait(b.tid());
    assert_eq!(
        unpack_two_ints(&wait_for_next_message(&b))[0],
        a.tid().raw()
    );
    send_numbered(&a, b.tid(), 0..50);
    recv_and_check_numbered(&b, a.tid(), 0..50);
    assert!(
        !has_route(&a, b.tid())
            && a.with_core(|core| !core.direct_routes.is_any_open())
                .expect("not forked"),
        "nothing listens"
    );
}

/// State of the proxy for data in the direction of the dialing side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ProxyState {
    Open,
    /// The proxy retains all data and forwards nothing.
    Retaining,
    /// The proxy forwards the retained data and closes the connection. The kernel of a killed task
    /// does the same.
    FlushAndClose,
}

/// Proxy in a direct connection. Contains the state of the proxy and the number of retained bytes.
#[derive(Clone)]
struct RetainingProxy(Arc<Mutex<(ProxyState, usize)>>);

impl RetainingProxy {
    /// Inserts proxies into all direct connections that tasks of this fake daemon establish later.
    fn insert_proxy(fake: &FakeDaemon) -> Self {
        let proxy = Self(Arc::new(Mutex::new((ProxyState::Open, 0))));
        let proxy_clone = proxy.clone();
        fake.state().address_rewrite = Some(Box::new(move |offered_address| {
            let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
            let proxy_address = listener.local_addr().expect("it has one");
            let proxy_clone = proxy_clone.clone();
            std::thread::spawn(move || {
                proxy_clone.forward_one_connection(&listener, offered_address)
            });
            proxy_address
        }));
        proxy
    }

    fn set_state(&self, new_state: ProxyState) {
        self.0.lock().expect("no panic under the lock").0 = new_state;
    }

    fn retained_bytes(&self) -> usize {
        self.0.lock().expect("no panic under the lock").1
    }

    fn forward_one_connection(&self, listener: &TcpListener, offered_address: SocketAddr) {
        let (mut dialer_socket, _) = listener.accept().expect("it is dialled");
        let mut acceptor_socket = TcpStream::connect(offered_address).expect("it listens");
        let mut reverse_sockets = (
            dialer_socket.try_clone().expect("a socket"),
            acceptor_socket.try_clone().expect("a socket"),
        );
        std::thread::spawn(move || std::io::copy(&mut reverse_sockets.0, &mut reverse_sockets.1));
        acceptor_socket
            .set_read_timeout(Some(Duration::from_millis(1)))
            .expect("a socket");
        let (mut retained_data, mut bytes) = (Vec::new(), vec![0; 64 << 10]);
        loop {
            let read_bytes = acceptor_socket.read(&mut bytes).unwrap_or(0);
            retained_data.extend_from_slice(&bytes[..read_bytes]);
            let proxy_state = {
                let mut state_and_count = self.0.lock().expect("no panic under the lock");
                state_and_count.1 = retained_data.len();
                state_and_count.0
            };
            if proxy_state != ProxyState::Retaining {
                dialer_socket
                    .write_all(&retained_data)
                    .expect("somebody reads");
                retained_data.clear();
            }
            if proxy_state == ProxyState::FlushAndClose {
                let _ = (
                    dialer_socket.shutdown(std::net::Shutdown::Both),
                    acceptor_socket.shutdown(std::net::Shutdown::Both),
                );
                return;
            }
        }
    }
}

/// Returns a fake daemon and two tasks whose direct route goes through the returned proxy. The
/// proxy retains all data, and the fake daemon drops link frames.
fn pair_with_retaining_proxy() -> (FakeDaemon, Runtime, Runtime, RetainingProxy) {
    let (fake, a, b) = remote_pair();
    let proxy = RetainingProxy::insert_proxy(&fake);
    a.open_route_and_wait(b.tid());
    wait_until("both ends", || {
        (has_route(&a, b.tid()) && has_route(&b, a.tid())).then_some(())
    });
    fake.state().drops_link_frames = true;
    proxy.set_state(ProxyState::Retaining);
    (fake, a, b, proxy)
}

/// Reports the end of the task `ended_tid` to the task `receiver`: first with `PeerGone`, then with
/// a notification message with tag 9.
fn report_end(fake: &FakeDaemon, receiver: &Runtime, ended_tid: Tid) {
    fake.send_control(receiver.tid(), ToTask::PeerGone { tid: ended_tid });
    let delivery = |tag, watermark| ToTask::Deliver {
        message: xdr_message(receiver.tid(), tag, ""),
        deliver_after: watermark,
    };
    fake.send_control(
        receiver.tid(),
        delivery(
            9,
            Some(SendWatermark {
                peer: ended_tid,
                end_seq: 1,
            }),
        ),
    );
    // After the message with tag 8 has arrived, the task has handled both reports.
    fake.send_control(receiver.tid(), delivery(8, None));
    assert_eq!(wait_for_next_message(receiver).tag, 8);
}

/// The messages of a killed task are received before the notification of its end, even if the
/// messages arrive long after `PeerGone`.
#[test]
fn messages_of_killed_task_precede_its_end() {
    const MESSAGE_COUNT: u32 = 30;
    const BODY_BYTES: usize = 100_000;
    let (fake, a, b, proxy) = pair_with_retaining_proxy();
    for number in 0..MESSAGE_COUNT {
        let mut body = vec![number as u8; BODY_BYTES];
        body[..4].copy_from_slice(&number.to_le_bytes());
        a.send(xdr_message(b.tid(), 1, body)).expect("sent");
    }
    wait_until("all of it on the way", || {
        (proxy.retained_bytes() >= MESSAGE_COUNT as usize * BODY_BYTES).then_some(())
    });
    report_end(&fake, &b, a.tid());
    assert!(
        has_route(&b, a.tid())
            && b.check_inbox(&mut |inbox: &mut Inbox| inbox.get(0).map(|_| ()))
                .is_none()
    );
    // Messages to the ended task are dropped after `PeerGone`.
    b.send(xdr_message(a.tid(), 1, vec![1; 1 << 20]))
        .expect("as to anybody who has ended");
    proxy.set_state(ProxyState::FlushAndClose);
    for number in 0..MESSAGE_COUNT {
        let received_message = wait_for_next_message(&b);
        assert_eq!(
            (
                received_message.tag,
                received_message.body.len(),
                &received_message.body[..4]
            ),
            (1, BODY_BYTES, &number.to_le_bytes()[..])
        );
    }
    assert_eq!(wait_for_next_message(&b).tag, 9);
    assert!(
        !has_route(&b, a.tid())
            && b.with_core(|core| core.has_peer_ended(a.tid()))
                .expect("not forked")
    );
}

/// If the host of a peer dies without closing the connection, the notification of the peer's end is
/// delayed only until the silence timeout.
#[test]
fn dead_host_delays_end_notification_briefly() {
    let (fake, a, b, _proxy) = pair_with_retaining_proxy();
    a.send(xdr_message(b.tid(), 1, "lost with its host"))
        .expect("sent");
    let report_time = Instant::now();
    report_end(&fake, &b, a.tid());
    assert_eq!(wait_for_next_message(&b).tag, 9);
    assert!(report_time.elapsed() >= Duration::from_micros(DRAIN_SILENCE_TIMEOUT.0));
    assert!(
        !has_route(&b, a.tid())
            && b.with_core(|core| core.has_peer_ended(a.tid()))
                .expect("not forked")
    );
}

/// A task that migrates while it drains a connection still reports the end of the peer.
#[test]
fn migration_while_draining_reports_peer_end() {
    let (fake, a, b, _proxy) = pair_with_retaining_proxy();
    report_end(&fake, &b, a.tid());
    fake.send_quiesce(b.tid(), 1);
    fake.wait_until_quiesced(b.tid(), 1);
    assert_eq!(wait_for_next_message(&b).tag, 9);
    fake.write_resume_token(1);
    wait_until("the return", || b.socket_fd());
    assert!(
        b.with_core(|core| core.has_peer_ended(a.tid()))
            .expect("not forked")
    );
}
