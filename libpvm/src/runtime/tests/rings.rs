//! Rings between tasks of one host: they come about by themselves, carry everything, and end without a trace.

use super::fake::Fake;
use super::{PATIENCE, expect_numbered, message, next, send_numbered, until};
use crate::runtime::Runtime;
use crate::runtime::core::Core;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use sempa_proto::route::{OfferId, RouteWord};
use sempa_proto::task::ToTask;
use sempa_proto::{Message, Micros, Tid};
use std::os::fd::AsFd;
use std::time::Instant;

/// A daemon whose tasks may have rings.
pub(super) fn near() -> Fake {
    let fake = Fake::start();
    fake.net().near = true;
    fake
}

fn has_ring(task: &Runtime, peer: Tid) -> bool {
    task.look(|core| core.near.slot(peer).is_some())
        .expect("not forked")
}

/// Two tasks with a ring between them.
pub(super) fn pair(fake: &Fake) -> (Runtime, Runtime) {
    let (a, b) = (fake.join(), fake.join());
    for n in 0..3 {
        a.send(message(b.tid(), n, "")).expect("sent");
        assert_eq!(next(&b).tag, n);
    }
    until("a ring", || {
        (has_ring(&a, b.tid()) && has_ring(&b, a.tid())).then_some(())
    });
    (a, b)
}

#[test]
fn tasks_that_talk_get_a_ring_and_what_was_under_way_keeps_its_order() {
    let fake = near();
    let (a, b) = (fake.join(), fake.join());
    std::thread::scope(|scope| {
        for (one, other) in [(&a, &b), (&b, &a)] {
            scope.spawn(|| {
                send_numbered(one, other.tid(), 0..2000);
                expect_numbered(one, other.tid(), 0..2000);
            });
        }
    });
    assert!(has_ring(&a, b.tid()) && has_ring(&b, a.tid()));
}

#[test]
fn who_is_far_is_offered_a_ring_rarely_who_has_refused_soon_again_and_who_moves_at_once() {
    let fake = near();
    let task = fake.join();
    let peer = Tid::from_raw(task.tid().raw() + 77);
    let mut held = task.lock().expect("not forked");
    let (begin, core) = (held.now(), &mut held.core);
    let offers = |core: &mut Core, after: u64| {
        let now = begin + Micros::from_secs(after);
        core.consider_ring(now, peer);
        core.near.is_offered(peer)
    };
    let refuse = |core: &mut Core, after: u64, id: u64, near: bool| {
        let now = begin + Micros::from_secs(after);
        core.take_ring_word(
            now,
            peer,
            near,
            &RouteWord::RingRefuse { id: OfferId(id) },
            Vec::new(),
        );
    };
    assert_eq!([offers(core, 0), offers(core, 0)], [false, true]);
    refuse(core, 0, 1, true);
    assert_eq!([offers(core, 29), offers(core, 30)], [false, true]);
    refuse(core, 30, 2, false);
    assert_eq!(
        [offers(core, 60), offers(core, 629), offers(core, 630)],
        [false, false, true]
    );
    refuse(core, 630, 3, false);
    core.forget_near(begin + Micros::from_secs(631), peer);
    assert_eq!([offers(core, 631), offers(core, 631)], [false, true]);
}

#[test]
fn of_who_leaves_behind_an_offer_that_was_given_up_meanwhile_the_last_words_are_heard() {
    /// Longer than an offer is waited for.
    const LATE: Micros = Micros::from_secs(2);
    for gives_up_first in [false, true] {
        let fake = near();
        let (a, b) = (fake.join(), fake.join());
        // While this is held the word that the offer is accepted does not arrive.
        let mut held = a.lock().expect("not forked");
        let now = held.now();
        for n in 0..2 {
            held.core.send(now, message(b.tid(), n, "")).expect("sent");
        }
        held.flush();
        until("a ring at one end", || has_ring(&b, a.tid()).then_some(()));
        if gives_up_first {
            held.core.wake(now + LATE);
        }
        b.send(message(a.tid(), 7, "last")).expect("sent");
        b.exit().expect("its daemon is there");
        held.core.wake(now + LATE);
        assert!(!held.core.near.is_offered(b.tid()));
        drop(held);
        assert_eq!(next(&a).tag, 7, "given up first: {gives_up_first}");
    }
}

#[test]
fn what_goes_through_a_ring_does_not_pass_the_daemon() {
    let fake = near();
    let (a, b) = pair(&fake);
    fake.net().lossy = true;
    send_numbered(&a, b.tid(), 0..500);
    expect_numbered(&b, a.tid(), 0..500);
}

#[test]
fn who_waits_for_the_daemon_hears_a_ring_all_the_same() {
    let fake = near();
    let (a, b) = pair(&fake);
    fake.net().lossy = true;
    // Far less than all the sleeps together would take, were each of them slept through.
    let deadline = Some(Instant::now() + PATIENCE);
    for n in 0..100 {
        b.send(message(Tid::MY_DAEMON, n, "")).expect("sent");
        std::thread::scope(|scope| {
            let hearing =
                scope.spawn(|| b.inbox_wait(deadline, &mut |inbox| inbox.take_first(|_| true)));
            until("a sleeper at the socket", || {
                b.0.shared.is_seated().then_some(())
            });
            a.send(message(b.tid(), n, "")).expect("sent");
            let heard = hearing
                .join()
                .expect("no panic")
                .expect("connected")
                .expect("a message in time");
            assert_eq!(heard.tag, n);
        });
    }
    assert!(has_ring(&a, b.tid()) && has_ring(&b, a.tid()));
}

#[test]
fn both_send_far_more_than_a_ring_holds_before_either_receives() {
    let fake = near();
    let (a, b) = pair(&fake);
    let body = vec![7u8; 1 << 20];
    for n in 0..64 {
        a.send(message(b.tid(), n, body.clone())).expect("sent");
        b.send(message(a.tid(), n, body.clone())).expect("sent");
    }
    for task in [&a, &b] {
        for n in 0..64 {
            let got = next(task);
            assert_eq!((got.tag, got.body.len()), (n, 1 << 20));
        }
    }
}

#[test]
fn a_task_that_leaves_has_sent_what_it_sent() {
    let fake = near();
    let (a, b) = pair(&fake);
    send_numbered(&a, b.tid(), 0..300);
    a.exit().expect("left");
    fake.tell(b.tid(), ToTask::PeerGone { tid: a.tid() });
    expect_numbered(&b, a.tid(), 0..300);
}

#[test]
fn moves_take_rings_down_and_lose_nothing() {
    let fake = near();
    let (a, b) = pair(&fake);
    for round in 1..=20u64 {
        let numbers = (round as u32 * 100)..(round as u32 * 100 + 100);
        let (mover, stays) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        std::thread::scope(|scope| {
            scope.spawn(|| send_numbered(&a, b.tid(), numbers.clone()));
            scope.spawn(|| send_numbered(&b, a.tid(), numbers.clone()));
            fake.quiesce(mover.tid(), round);
            fake.has_let_go(mover.tid(), round);
            assert!(!has_ring(mover, stays.tid()));
            fake.tell(stays.tid(), ToTask::PeerMoved { tid: mover.tid() });
            fake.wake(round);
        });
        expect_numbered(&a, b.tid(), numbers.clone());
        expect_numbered(&b, a.tid(), numbers);
    }
}

#[test]
fn nothing_of_a_ring_is_mapped_or_open_while_a_task_is_moved() {
    let fake = near();
    let (a, b) = pair(&fake);
    let large = vec![5; 1 << 20];
    // By the second one it is known that the first task lends.
    let held: Vec<_> = std::iter::repeat_with(|| {
        a.send(message(b.tid(), 1, large.clone())).expect("sent");
        next(&b)
    })
    .take(20)
    .collect();
    fake.quiesce(a.tid(), 1);
    fake.quiesce(b.tid(), 2);
    fake.has_let_go(a.tid(), 1);
    fake.has_let_go(b.tid(), 2);
    let maps = || std::fs::read_to_string("/proc/self/maps").expect("readable");
    // Other tests of this process may have rings of their own; under a runner with one process for each test none have.
    if std::env::var_os("NEXTEST").is_some() {
        until("no shared memory", || {
            (!maps().contains("sempa-")).then_some(())
        });
        let open = std::fs::read_dir("/proc/self/fd")
            .expect("readable")
            .flatten();
        let names = open.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        assert_eq!(
            names
                .filter(|name| name.to_string_lossy().contains("sempa-"))
                .count(),
            0
        );
    }
    assert!(held.iter().all(|message| message.body[..] == large));
    fake.wake(1);
    fake.wake(2);
    a.send(message(b.tid(), 9, "")).expect("sent");
    assert_eq!(next(&b).tag, 9);
}

#[test]
fn a_peer_that_dies_in_the_middle_leaves_what_it_had_written() {
    let fake = near();
    let (a, b) = pair(&fake);
    send_numbered(&a, b.tid(), 0..50);
    fake.hang_up(a.tid());
    fake.tell(b.tid(), ToTask::PeerGone { tid: a.tid() });
    expect_numbered(&b, a.tid(), 0..50);
    until("the end of the ring", || {
        (!has_ring(&b, a.tid())).then_some(())
    });
}

#[test]
fn tasks_on_different_hosts_go_on_through_their_daemons() {
    let fake = Fake::start();
    let (a, b) = (fake.join(), fake.join());
    send_numbered(&a, b.tid(), 0..200);
    expect_numbered(&b, a.tid(), 0..200);
    assert!(!has_ring(&a, b.tid()) && !has_ring(&b, a.tid()));
}

#[test]
fn a_ring_and_a_store_that_nobody_uses_for_a_minute_are_given_back_and_come_again() {
    let fake = near();
    let (a, b) = pair(&fake);
    let large = vec![3; 1 << 20];
    until("a loan", || {
        a.send(message(b.tid(), 1, large.clone())).expect("sent");
        next(&b);
        a.look(|core| core.near.store_id()).expect("not forked")
    });
    let later = {
        let mut held = a.lock().expect("not forked");
        let later = held.now() + Micros::from_secs(61);
        held.core.wake(later);
        assert!(
            held.core.near.slot(b.tid()).is_none(),
            "a minute has passed"
        );
        assert_eq!(held.core.near.store_id(), None);
        later
    };
    until("the other end", || (!has_ring(&b, a.tid())).then_some(()));
    if std::env::var_os("NEXTEST").is_some() {
        let maps = || std::fs::read_to_string("/proc/self/maps").expect("readable");
        until("no memory", || {
            let maps = maps();
            (!maps.contains("sempa-rings") && !maps.contains("sempa-store")).then_some(())
        });
    }
    let mut held = a.lock().expect("not forked");
    for n in 0..3 {
        held.core
            .send(later + Micros::from_secs(2), message(b.tid(), n, ""))
            .expect("sent");
    }
    drop(held);
    for n in 0..3 {
        assert_eq!(next(&b).tag, n);
    }
    until("a new ring", || {
        (has_ring(&a, b.tid()) && has_ring(&b, a.tid())).then_some(())
    });
}

/// How many rings a look at what is here looks at.
fn looked_at(task: &Runtime) -> usize {
    task.look(|core| core.near.rung()).expect("not forked")
}

#[test]
fn who_never_sleeps_looks_no_more_at_peers_that_spoke_once() {
    const PEERS: usize = 40;
    let fake = near();
    let a = fake.join();
    let peers: Vec<Runtime> = (0..PEERS).map(|_| fake.join()).collect();
    for peer in &peers {
        until("a ring", || {
            peer.send(message(a.tid(), 0, "")).expect("sent");
            (has_ring(peer, a.tid()) && has_ring(&a, peer.tid())).then_some(())
        });
        peer.send(message(a.tid(), 1, "")).expect("sent");
    }
    // From here on it only tries: who sleeps makes all of them ring again.
    until("all of it", || {
        a.inbox_try(&mut |inbox| {
            (inbox.iter().filter(|m| m.tag == 1).count() == PEERS).then_some(())
        })
    });
    until("few rings to look at", || {
        a.inbox_try(&mut |_| None::<()>);
        (looked_at(&a) <= 4).then_some(())
    });
    // Each of them is heard again, at once and in order.
    for round in 2..5 {
        for peer in peers.iter().rev() {
            peer.send(message(a.tid(), round, "")).expect("sent");
            let wanted = |m: &Message| m.src == peer.tid() && m.tag == round;
            until("the next word", || {
                a.inbox_try(&mut |inbox| inbox.take_first(wanted))
            });
        }
    }
}

#[test]
fn when_the_peer_that_spoke_last_has_ended_the_next_word_is_expected_from_the_daemon() {
    let fake = near();
    let (a, stays) = pair(&fake);
    let ends = fake.join();
    until("a ring", || {
        ends.send(message(a.tid(), 0, "")).expect("sent");
        next(&a);
        has_ring(&a, ends.tid()).then_some(())
    });
    let expected = || a.look(|core| core.near.is_expected()).expect("not forked");
    until("a word in the ring", || {
        ends.send(message(a.tid(), 1, "")).expect("sent");
        next(&a);
        expected().then_some(())
    });
    let gone = ends.tid();
    drop(ends);
    until("no ring", || (!has_ring(&a, gone)).then_some(()));
    assert!(!expected() && has_ring(&a, stays.tid()));
}

#[test]
fn rings_with_nothing_to_write_are_not_gone_through_when_one_has_room_again() {
    let fake = near();
    let a = fake.join();
    let others: Vec<Runtime> = (0..5).map(|_| fake.join()).collect();
    for other in &others {
        until("a ring", || {
            a.send(message(other.tid(), 0, "")).expect("sent");
            next(other);
            has_ring(&a, other.tid()).then_some(())
        });
    }
    let waiting = || a.look(|core| core.near.waiting()).expect("not forked");
    until("all is written", || (waiting() == 0).then_some(()));
    // More than a ring and the window hold; its receiver's ear makes room for it.
    for n in 0..64 {
        a.send(message(others[2].tid(), n, vec![n as u8; 200_000]))
            .expect("sent");
        assert!(waiting() <= 1, "the one that is full");
    }
    for n in 0..64 {
        let got = next(&others[2]);
        assert_eq!((got.tag, got.body.len()), (n, 200_000));
    }
    until("all is written", || (waiting() == 0).then_some(()));
}

#[test]
fn a_program_that_waits_on_its_descriptor_sees_what_comes_through_a_ring() {
    let fake = near();
    let (a, b) = pair(&fake);
    b.ready_fd().expect("a descriptor");
    a.send(message(b.tid(), 5, "")).expect("sent");
    let sign = b.0.shared.sign().expect("just made");
    let mut fds = [PollFd::new(sign.as_fd(), PollFlags::POLLIN)];
    assert_eq!(
        poll(&mut fds, PollTimeout::try_from(60_000u32).expect("short")),
        Ok(1)
    );
    assert_eq!(next(&b).tag, 5);
}
