//! Direct routes between tasks, as the programs ask for them.

use super::fake::Fake;
use super::{PATIENCE, expect_numbered, message, next, send_numbered, until};
use crate::inbox::Inbox;
use crate::runtime::Runtime;
use sempa_proto::body::{Encoding, Unpacker};
use sempa_proto::message::CTX_BASE;
use sempa_proto::route::RouteWord;
use sempa_proto::task::ToDaemon;
use sempa_proto::{Message, Tid};
use std::time::Instant;

/// Two tasks of different hosts.
fn two() -> (Fake, Runtime, Runtime) {
    let fake = Fake::start();
    let (a, b) = (fake.join(), fake.join());
    (fake, a, b)
}

/// The next message with this tag.
fn tagged(task: &Runtime, tag: i32) -> Message {
    let wanted = &mut |inbox: &mut Inbox| inbox.take_first(|m| m.tag == tag);
    task.inbox_wait(Some(Instant::now() + PATIENCE), wanted).expect("connected").expect("a message in time")
}

fn ints(message: &Message) -> [i32; 2] {
    let mut body = Unpacker::new(Encoding::Xdr, message.body.clone());
    [body.int().expect("an int"), body.int().expect("an int")]
}

fn offers(fake: &Fake) -> usize {
    let is_offer = |said: &ToDaemon| matches!(said, ToDaemon::Route { word: RouteWord::DirectOffer { .. }, .. });
    fake.net().log.iter().filter(|(_, said)| is_offer(said)).count()
}

fn leads(task: &Runtime, to: Tid) -> bool {
    task.look(|core| core.direct.leads_to(to)).expect("not forked")
}

#[test]
fn messages_go_both_ways_without_the_daemon() {
    let (fake, a, b) = two();
    a.open_route(b.tid());
    until("both ends", || (leads(&a, b.tid()) && leads(&b, a.tid())).then_some(()));
    // What the daemon carries is lost now.
    fake.net().lossy = true;
    send_numbered(&a, b.tid(), 0..300);
    send_numbered(&b, a.tid(), 0..300);
    expect_numbered(&b, a.tid(), 0..300);
    expect_numbered(&a, b.tid(), 0..300);
    // More than any socket takes, while nobody receives.
    for task in [&a, &b] {
        let to = if task.tid() == a.tid() { b.tid() } else { a.tid() };
        task.send(message(to, 7, vec![5; 64 << 20])).expect("kept");
    }
    assert!([&a, &b].iter().all(|task| tagged(task, 7).body.len() == 64 << 20));
    assert_eq!(offers(&fake), 1);
}

#[test]
fn both_may_ask_at_once() {
    for _ in 0..10 {
        let (fake, a, b) = two();
        std::thread::scope(|scope| {
            scope.spawn(|| a.open_route(b.tid()));
            scope.spawn(|| b.open_route(a.tid()));
        });
        until("both ends", || (leads(&a, b.tid()) && leads(&b, a.tid())).then_some(()));
        fake.net().lossy = true;
        send_numbered(&a, b.tid(), 0..20);
        send_numbered(&b, a.tid(), 0..20);
        expect_numbered(&b, a.tid(), 0..20);
        expect_numbered(&a, b.tid(), 0..20);
    }
}

#[test]
fn a_program_that_wants_no_route_is_asked_once_and_reached_by_the_daemons() {
    let (fake, a, b) = two();
    b.allow_routes(false);
    for number in 0..5 {
        a.open_route(b.tid());
        send_numbered(&a, b.tid(), number..number + 1);
    }
    expect_numbered(&b, a.tid(), 0..5);
    assert!(offers(&fake) == 1 && !leads(&a, b.tid()));
}

#[test]
fn programs_are_told_of_routes_and_of_their_ends() {
    let (fake, a, b) = two();
    a.tell_of_route_end(b.tid(), CTX_BASE, 5, false).expect("room");
    assert_eq!(ints(&tagged(&a, 5)), [b.tid().raw(), -1], "there is none yet");
    for task in [&a, &b] {
        task.tell_of_routes(CTX_BASE, 4, -1).expect("room");
    }
    a.open_route(b.tid());
    for (task, other) in [(&a, &b), (&b, &a)] {
        let note = tagged(task, 4);
        assert_eq!((note.src, ints(&note)[0]), (task.tid(), other.tid().raw()));
        assert_eq!(Some(ints(&note)[1]), task.ready_fd());
        task.tell_of_route_end(other.tid(), CTX_BASE, 5, false).expect("room");
    }
    send_numbered(&b, a.tid(), 0..10);
    b.exit().expect("connected");
    expect_numbered(&a, b.tid(), 0..10);
    assert_eq!(ints(&tagged(&a, 5)), [b.tid().raw(), -1]);
    drop(fake);
}

#[test]
fn a_task_that_leaves_takes_nothing_along_that_it_has_sent() {
    for round in 0..5 {
        let (_fake, a, b) = two();
        a.open_route(b.tid());
        // Something that it never reads makes the kernel forget what is on its way.
        send_numbered(&b, a.tid(), 0..50);
        send_numbered(&a, b.tid(), 0..200 + round);
        a.exit().expect("connected");
        expect_numbered(&b, a.tid(), 0..200 + round);
    }
}

#[test]
fn a_move_in_the_middle_of_a_stream_loses_doubles_and_reorders_nothing() {
    let (fake, a, b) = two();
    a.tell_of_routes(CTX_BASE, 4, -1).expect("room");
    b.tell_of_route_end(a.tid(), CTX_BASE, 5, false).expect("room");
    assert_eq!(ints(&tagged(&b, 5)), [a.tid().raw(), -1]);
    for round in 1..4u32 {
        a.open_route(b.tid());
        assert_eq!(ints(&tagged(&a, 4))[0], b.tid().raw(), "round {round}");
        until("the other end", || leads(&b, a.tid()).then_some(()));
        b.tell_of_route_end(a.tid(), CTX_BASE, 5, false).expect("room");
        let (from, to) = ((round - 1) * 200, round * 200);
        std::thread::scope(|scope| {
            scope.spawn(|| send_numbered(&a, b.tid(), from..to));
            scope.spawn(|| send_numbered(&b, a.tid(), from..to));
            fake.quiesce(a.tid(), u64::from(round));
            fake.has_let_go(a.tid(), u64::from(round));
            assert!(!leads(&a, b.tid()) && a.look(|core| !core.direct.is_open()).expect("not forked"));
            fake.wake(u64::from(round));
        });
        expect_numbered(&b, a.tid(), from..to);
        expect_numbered(&a, b.tid(), from..to);
        assert_eq!(ints(&tagged(&b, 5)), [a.tid().raw(), -1], "round {round}");
    }
    assert_eq!(offers(&fake), 3);
}

#[test]
fn on_one_host_the_rings_are_the_direct_route() {
    let fake = Fake::start();
    fake.net().near = true;
    let (a, b) = (fake.join(), fake.join());
    b.tell_of_routes(CTX_BASE, 4, 1).expect("room");
    a.open_route(b.tid());
    assert_eq!(ints(&next(&b))[0], a.tid().raw());
    send_numbered(&a, b.tid(), 0..50);
    expect_numbered(&b, a.tid(), 0..50);
    assert!(!leads(&a, b.tid()) && a.look(|core| !core.direct.is_open()).expect("not forked"), "nothing listens");
}
