//! Tests of direct routes that the library sets up on its own. The daemon is a fake daemon.

use super::direct::{direct_offer_count, has_route, unpack_two_ints, wait_for_tagged_message};
use super::fake::FakeDaemon;
use super::{
    recv_and_check_numbered, send_numbered, wait_for_next_message, wait_until, xdr_message,
};
use crate::inbox::Inbox;
use crate::runtime::Runtime;
use sempa_proto::Tid;
use sempa_proto::message::CTX_BASE;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};

/// Number of messages after which a library that may request a route has requested it.
const MANY_MESSAGES: u32 = 20;

/// Returns a fake daemon and two of its tasks that count as being on different hosts, and whose
/// libraries set up direct routes.
fn automatic_pair() -> (FakeDaemon, Runtime, Runtime) {
    let fake = FakeDaemon::start();
    let a = fake.enroll_with_automatic_routes();
    let b = fake.enroll_with_automatic_routes();
    (fake, a, b)
}

fn wait_for_route(a: &Runtime, b: &Runtime) {
    wait_until("both ends of a route", || {
        (has_route(a, b.tid()) && has_route(b, a.tid())).then_some(())
    });
}

/// Sends messages from `a` to `b` one after the other, until the route is there. Returns the number
/// of the next message.
fn exchange_until_route(a: &Runtime, b: &Runtime, first_number: u32) -> u32 {
    let mut number = first_number;
    wait_until("a route", || {
        send_numbered(a, b.tid(), number..number + 1);
        recv_and_check_numbered(b, a.tid(), number..number + 1);
        number += 1;
        (has_route(a, b.tid()) && has_route(b, a.tid())).then_some(())
    });
    number
}

/// The third message requests the route. Later messages in both directions pass no daemon, and the
/// program is notified of nothing.
#[test]
fn third_message_sets_up_route() {
    let (fake, a, b) = automatic_pair();
    for task in [&a, &b] {
        task.notify_new_routes(CTX_BASE, 4, -1).expect("room");
    }
    send_numbered(&a, b.tid(), 0..2);
    recv_and_check_numbered(&b, a.tid(), 0..2);
    assert_eq!(direct_offer_count(&fake), 0);
    send_numbered(&a, b.tid(), 2..3);
    recv_and_check_numbered(&b, a.tid(), 2..3);
    wait_for_route(&a, &b);
    fake.state().drops_link_frames = true;
    send_numbered(&a, b.tid(), 3..300);
    send_numbered(&b, a.tid(), 0..300);
    recv_and_check_numbered(&b, a.tid(), 3..300);
    recv_and_check_numbered(&a, b.tid(), 0..300);
    assert_eq!(direct_offer_count(&fake), 1);
    for task in [&a, &b] {
        let has_message = task.check_inbox(&mut |inbox: &mut Inbox| inbox.get(0).map(|_| ()));
        assert!(has_message.is_none(), "a route that nobody requested");
    }
}

/// The route comes while both tasks send. Every message arrives once and in order.
#[test]
fn route_comes_under_traffic() {
    const MESSAGE_COUNT: u32 = 1500;
    for _ in 0..3 {
        let (_fake, a, b) = automatic_pair();
        std::thread::scope(|scope| {
            for (task, peer) in [(&a, &b), (&b, &a)] {
                scope.spawn(|| send_numbered(task, peer.tid(), 0..MESSAGE_COUNT));
                scope.spawn(|| recv_and_check_numbered(task, peer.tid(), 0..MESSAGE_COUNT));
            }
        });
        wait_for_route(&a, &b);
    }
}

/// Route changes in the middle of a message of many fragments, and a message that fills the socket.
#[test]
fn route_comes_in_the_middle_of_a_message() {
    let (_fake, a, b) = automatic_pair();
    send_numbered(&a, b.tid(), 0..2);
    for task in [&a, &b] {
        let peer = if task.tid() == a.tid() { &b } else { &a };
        for _ in 0..3 {
            task.send(xdr_message(peer.tid(), 7, vec![5; 24 << 20]))
                .expect("kept");
        }
    }
    for task in [&a, &b] {
        for _ in 0..3 {
            let message = wait_for_tagged_message(task, 7);
            assert!(message.body.len() == 24 << 20 && message.body.iter().all(|byte| *byte == 5));
        }
    }
    wait_for_route(&a, &b);
}

/// A thread that waits on a direct route sleeps on the connection itself, and is woken by it.
#[test]
fn waiting_thread_sleeps_on_connection() {
    let (fake, a, b) = automatic_pair();
    exchange_until_route(&a, &b, 0);
    fake.state().drops_link_frames = true;
    b.disable_spinning();
    std::thread::scope(|scope| {
        let receiver = scope.spawn(|| wait_for_tagged_message(&b, 7));
        wait_until("a sleeping thread", || {
            b.inner.shared_state.has_socket_waiter().then_some(())
        });
        a.send(xdr_message(b.tid(), 7, "wakes")).expect("sent");
        assert_eq!(receiver.join().expect("no panic").body, "wakes");
    });
}

/// Nobody requests a route if the program, the user or the daemon of one of the tasks forbids it,
/// or forbids to accept it.
#[test]
fn nobody_requests_forbidden_routes() {
    let forbid_in_program = |task: &Runtime| task.set_accepts_routes(false);
    let forbid_by_user = |task: &Runtime| task.set_automatic_routes(false);
    let forbids: [fn(&Runtime); 2] = [forbid_in_program, forbid_by_user];
    for forbid in forbids {
        let (fake, a, b) = automatic_pair();
        forbid(&a);
        send_numbered(&a, b.tid(), 0..MANY_MESSAGES);
        recv_and_check_numbered(&b, a.tid(), 0..MANY_MESSAGES);
        assert_eq!(direct_offer_count(&fake), 0);
        // The peer asks once, and remembers the refusal.
        send_numbered(&b, a.tid(), 0..MANY_MESSAGES);
        recv_and_check_numbered(&a, b.tid(), 0..MANY_MESSAGES);
        wait_until("the refusal", || {
            let has_agreement =
                |core: &crate::runtime::Core| core.direct_routes.agreements.has_agreement(a.tid());
            (!b.with_core(has_agreement).expect("not forked")).then_some(())
        });
        send_numbered(&b, a.tid(), MANY_MESSAGES..2 * MANY_MESSAGES);
        recv_and_check_numbered(&a, b.tid(), MANY_MESSAGES..2 * MANY_MESSAGES);
        assert_eq!(direct_offer_count(&fake), 1);
        assert!(!has_route(&a, b.tid()) && !has_route(&b, a.tid()));
    }
}

/// The administrator forbids automatic routes by the daemon; a program may still request a route.
#[test]
fn daemon_forbids_only_automatic_routes() {
    let fake = FakeDaemon::start();
    fake.state().forbids_automatic_routes = true;
    let a = fake.enroll_with_automatic_routes();
    let b = fake.enroll_with_automatic_routes();
    for (task, peer) in [(&a, &b), (&b, &a)] {
        send_numbered(task, peer.tid(), 0..MANY_MESSAGES);
        recv_and_check_numbered(peer, task.tid(), 0..MANY_MESSAGES);
    }
    assert_eq!(direct_offer_count(&fake), 0);
    a.open_route_and_wait(b.tid());
    wait_for_route(&a, &b);
}

/// A program that forbids direct routes loses the automatic one without losing a message.
#[test]
fn forbidding_ends_route_without_loss() {
    let (fake, a, b) = automatic_pair();
    let number = exchange_until_route(&a, &b, 0);
    send_numbered(&a, b.tid(), number..number + 200);
    send_numbered(&b, a.tid(), 0..200);
    b.set_accepts_routes(false);
    assert!(!has_route(&b, a.tid()));
    send_numbered(&a, b.tid(), number + 200..number + 300);
    recv_and_check_numbered(&b, a.tid(), number..number + 300);
    recv_and_check_numbered(&a, b.tid(), 0..200);
    wait_until("the other end", || (!has_route(&a, b.tid())).then_some(()));
    drop(fake);
}

/// Connections are refused. Messages arrive all the same, nothing is reported to the program, and
/// the attempt is not repeated.
#[test]
fn blocked_connection_is_not_tried_again() {
    let (fake, a, b) = automatic_pair();
    fake.state().address_rewrite = Some(Box::new(|_| {
        // The port is closed as soon as the listener is dropped.
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        listener.local_addr().expect("it has one")
    }));
    send_numbered(&a, b.tid(), 0..3);
    recv_and_check_numbered(&b, a.tid(), 0..3);
    wait_until("the end of the attempt", || {
        let has_agreement =
            |core: &crate::runtime::Core| core.direct_routes.agreements.has_agreement(b.tid());
        let has_ended = !a.with_core(has_agreement).expect("not forked");
        (has_ended && direct_offer_count(&fake) == 1).then_some(())
    });
    // Neither task tries again: the hosts of both cannot be reached from the other one.
    for (task, peer, first_number) in [(&a, &b, 3), (&b, &a, 0)] {
        let numbers = first_number..first_number + MANY_MESSAGES;
        send_numbered(task, peer.tid(), numbers.clone());
        recv_and_check_numbered(peer, task.tid(), numbers);
    }
    assert_eq!(direct_offer_count(&fake), 1);
    assert!(!has_route(&a, b.tid()) && !has_route(&b, a.tid()));
}

/// A firewall drops the connection silently. Messages flow while the attempt lasts.
#[test]
fn messages_flow_while_connection_hangs() {
    let (fake, a, b) = automatic_pair();
    // The kernel accepts connections to this listener, but nobody answers the handshake.
    let silent_listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
    let silent_address: SocketAddr = silent_listener.local_addr().expect("it has one");
    fake.state().address_rewrite = Some(Box::new(move |_| silent_address));
    send_numbered(&a, b.tid(), 0..200);
    send_numbered(&b, a.tid(), 0..200);
    recv_and_check_numbered(&b, a.tid(), 0..200);
    recv_and_check_numbered(&a, b.tid(), 0..200);
    assert!(!has_route(&a, b.tid()) && !has_route(&b, a.tid()));
}

/// At its limit a task gives up the least recently used route for a new one. Messages on the route
/// that is given up are not lost.
#[test]
fn least_recently_used_route_makes_room() {
    let (fake, a, b) = automatic_pair();
    let c = fake.enroll_with_automatic_routes();
    a.with_core_mut(|core, _| core.direct_routes.automatic.set_routes_max(1));
    let b_number = exchange_until_route(&a, &b, 0);
    send_numbered(&a, b.tid(), b_number..b_number + 100);
    let c_number = exchange_until_route(&a, &c, 0);
    assert!(!has_route(&a, b.tid()));
    send_numbered(&a, b.tid(), b_number + 100..b_number + 120);
    recv_and_check_numbered(&b, a.tid(), b_number..b_number + 120);
    send_numbered(&a, c.tid(), c_number..c_number + 20);
    recv_and_check_numbered(&c, a.tid(), c_number..c_number + 20);
}

/// A task at its limit accepts a route only in place of one that is not in use.
#[test]
fn task_without_room_refuses_routes() {
    let (fake, a, b) = automatic_pair();
    b.with_core_mut(|core, _| core.direct_routes.automatic.set_routes_max(0));
    send_numbered(&a, b.tid(), 0..MANY_MESSAGES);
    send_numbered(&b, a.tid(), 0..MANY_MESSAGES);
    recv_and_check_numbered(&b, a.tid(), 0..MANY_MESSAGES);
    recv_and_check_numbered(&a, b.tid(), 0..MANY_MESSAGES);
    assert!(!has_route(&a, b.tid()) && !has_route(&b, a.tid()));
    // The limit is not one of explicit routes.
    b.open_route_and_wait(a.tid());
    wait_for_route(&a, &b);
    drop(fake);
}

/// A program that requests a route to a peer to which there is an automatic one gets a route of
/// which both programs are notified.
#[test]
fn requested_route_replaces_automatic_route() {
    let (_fake, a, b) = automatic_pair();
    let number = exchange_until_route(&a, &b, 0);
    for task in [&a, &b] {
        task.notify_new_routes(CTX_BASE, 4, -1).expect("room");
    }
    send_numbered(&a, b.tid(), number..number + 50);
    a.open_route_and_wait(b.tid());
    send_numbered(&a, b.tid(), number + 50..number + 100);
    for (task, peer) in [(&a, &b), (&b, &a)] {
        let notification = wait_for_tagged_message(task, 4);
        assert_eq!(unpack_two_ints(&notification)[0], peer.tid().raw());
    }
    recv_and_check_numbered(&b, a.tid(), number..number + 100);
    wait_for_route(&a, &b);
}

/// A migration during transfers closes the route and loses nothing. The next messages set up a new
/// route.
#[test]
fn migration_preserves_messages_and_sets_up_next_route() {
    let (fake, a, b) = automatic_pair();
    let (mut a_number, mut b_number) = (exchange_until_route(&a, &b, 0), 0);
    for migration in 1..4 {
        std::thread::scope(|scope| {
            scope.spawn(|| send_numbered(&a, b.tid(), a_number..a_number + 200));
            scope.spawn(|| send_numbered(&b, a.tid(), b_number..b_number + 200));
            fake.send_quiesce(a.tid(), migration);
            fake.wait_until_quiesced(a.tid(), migration);
            let is_any_open = |core: &crate::runtime::Core| core.direct_routes.is_any_open();
            assert!(!a.with_core(is_any_open).expect("not forked"));
            fake.write_resume_token(migration);
        });
        wait_until("the return", || a.socket_fd());
        fake.send_control(
            b.tid(),
            sempa_proto::task::ToTask::PeerMigrated { tid: a.tid() },
        );
        recv_and_check_numbered(&b, a.tid(), a_number..a_number + 200);
        recv_and_check_numbered(&a, b.tid(), b_number..b_number + 200);
        (a_number, b_number) = (a_number + 200, b_number + 200);
        a_number = exchange_until_route(&a, &b, a_number);
    }
}

/// A task that exits right after its sends loses nothing, and the receiver learns of the end after
/// the messages.
#[test]
fn exit_loses_no_message() {
    for _ in 0..3 {
        let (_fake, a, b) = automatic_pair();
        let number = exchange_until_route(&a, &b, 0);
        send_numbered(&b, a.tid(), 0..50);
        send_numbered(&a, b.tid(), number..number + 200);
        a.exit().expect("connected");
        recv_and_check_numbered(&b, a.tid(), number..number + 200);
    }
}

/// Tasks on the same host have rings, and no automatic route.
#[test]
fn same_host_has_no_automatic_route() {
    let fake = FakeDaemon::start();
    fake.state().is_same_host = true;
    let a = fake.enroll_with_automatic_routes();
    let b = fake.enroll_with_automatic_routes();
    send_numbered(&a, b.tid(), 0..MANY_MESSAGES);
    send_numbered(&b, a.tid(), 0..MANY_MESSAGES);
    recv_and_check_numbered(&b, a.tid(), 0..MANY_MESSAGES);
    recv_and_check_numbered(&a, b.tid(), 0..MANY_MESSAGES);
    assert_eq!(direct_offer_count(&fake), 0);
}

/// Messages to a task that has ended set up no route.
#[test]
fn ended_peer_gets_no_request() {
    let (fake, a, b) = automatic_pair();
    let ended_tid: Tid = b.tid();
    send_numbered(&a, ended_tid, 0..1);
    wait_for_next_message(&b);
    b.exit().expect("connected");
    fake.send_control(
        a.tid(),
        sempa_proto::task::ToTask::PeerGone { tid: ended_tid },
    );
    wait_until("the end", || {
        a.with_core(|core| core.has_peer_ended(ended_tid))
            .expect("not forked")
            .then_some(())
    });
    send_numbered(&a, ended_tid, 1..MANY_MESSAGES);
    assert_eq!(direct_offer_count(&fake), 0);
}
