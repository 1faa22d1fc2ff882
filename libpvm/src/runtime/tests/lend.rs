//! Large messages between tasks of one host lie in the sender's store.

use super::fake::Fake;
use super::rings::{near, pair};
use super::{PATIENCE, expect_numbered, message, next, send_numbered, until};
use crate::inbox::Inbox;
use crate::runtime::Runtime;
use sempa_proto::message::Message;
use sempa_proto::{PvmError, Tid};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const LARGE: usize = 1 << 20;

fn large(n: u8) -> Vec<u8> {
    (0..LARGE)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add(n))
        .collect()
}

/// How many messages `task` has lent to `peer`.
fn lent(task: &Runtime, peer: Tid) -> usize {
    task.lock().expect("not forked").core.near.lent_to(peer)
}

/// Two tasks, of which the first can lend to the second.
fn lenders(fake: &Fake) -> (Runtime, Runtime) {
    let (a, b) = pair(fake);
    let mut n = 0;
    until("a loan", || {
        a.send(message(b.tid(), n, large(n as u8))).expect("sent");
        let got = next(&b);
        assert_eq!((got.tag, &got.body[..]), (n, &large(n as u8)[..]));
        n += 1;
        (lent(&a, b.tid()) > 0).then_some(())
    });
    (a, b)
}

#[test]
fn a_large_message_is_read_where_the_sender_put_it_and_the_place_is_used_again() {
    let fake = near();
    let (a, b) = lenders(&fake);
    let held: Vec<Message> = (0..5)
        .map(|n| {
            a.send(message(b.tid(), n, large(n as u8))).expect("sent");
            next(&b)
        })
        .collect();
    assert_eq!(
        lent(&a, b.tid()),
        5,
        "those that are held; the one before has come back"
    );
    for (n, message) in held.iter().enumerate() {
        assert_eq!(message.body[..], large(n as u8));
    }
    let places: Vec<*const u8> = held.iter().map(|message| message.body.as_ptr()).collect();
    drop(held);
    a.send(message(b.tid(), 9, large(9))).expect("sent");
    let again = next(&b);
    assert_eq!(lent(&a, b.tid()), 1);
    assert!(
        places.contains(&again.body.as_ptr()),
        "a place that was used before"
    );
}

#[test]
fn a_receiver_that_keeps_everything_gets_copies_when_the_store_is_full() {
    let fake = near();
    let (a, b) = lenders(&fake);
    let held: Vec<Message> = (0..200)
        .map(|n| {
            a.send(message(b.tid(), n, large(n as u8))).expect("sent");
            next(&b)
        })
        .collect();
    for (n, message) in held.iter().enumerate() {
        assert_eq!(message.body[..], large(n as u8));
    }
    assert!(lent(&a, b.tid()) <= 64);
}

#[test]
fn one_message_to_many_is_copied_once() {
    let fake = near();
    let a = fake.join();
    let others: Vec<Runtime> = (0..4).map(|_| fake.join()).collect();
    let tids: Vec<Tid> = others.iter().map(Runtime::tid).collect();
    let mut n = 0;
    let places = until("loans to all", || {
        a.send_to_many(&message(Tid::NONE, n, large(n as u8)), &tids)
            .expect("sent");
        let held: Vec<Message> = others.iter().map(next).collect();
        assert!(
            held.iter()
                .all(|got| (got.tag, &got.body[..]) == (n, &large(n as u8)[..]))
        );
        n += 1;
        let places = a.look(|core| core.near.places_lent()).expect("not forked");
        tids.iter().all(|tid| lent(&a, *tid) == 1).then_some(places)
    });
    assert_eq!(places, 1, "one place for all four");
    assert_eq!(
        a.send_to_many(&message(Tid::NONE, 1, ""), &[tids[0], Tid::NONE]),
        Err(PvmError::BadParam)
    );
    assert_eq!(
        next(&others[0]).tag,
        1,
        "those before the bad one were sent to"
    );
}

/// A task and others that have rings to it and read in its store.
fn lender_to(fake: &Fake, count: usize) -> (Runtime, Vec<Runtime>, Vec<Tid>) {
    let a = fake.join();
    let others: Vec<Runtime> = (0..count).map(|_| fake.join()).collect();
    let tids: Vec<Tid> = others.iter().map(Runtime::tid).collect();
    until("loans to all", || {
        a.send_to_many(&message(Tid::NONE, 0, large(0)), &tids)
            .expect("sent");
        let held: Vec<Message> = others.iter().map(next).collect();
        let all = tids.iter().all(|tid| lent(&a, *tid) == 1);
        drop(held);
        all.then_some(())
    });
    (a, others, tids)
}

/// Five of seven let go of a task that does not know it yet and multicasts to all of them.
fn to_many_of_whom_five_have_gone(fake: &Fake, a: &Runtime, tids: &[Tid]) {
    let mut held = a.lock().expect("not forked");
    for (tid, migration) in tids[1..6].iter().zip(1..) {
        fake.quiesce(*tid, migration);
        fake.has_let_go(*tid, migration);
    }
    let now = held.now();
    held.core
        .send_to_many(now, &message(Tid::NONE, 3, large(3)), tids)
        .expect("sent");
}

#[test]
fn a_store_that_is_given_up_while_a_message_goes_to_many_takes_nobody_along() {
    let fake = near();
    let (a, others, tids) = lender_to(&fake, 7);
    let held: Vec<Message> = others[1..6]
        .iter()
        .map(|other| {
            a.send(message(other.tid(), 1, vec![1; 8 << 20]))
                .expect("sent");
            next(other)
        })
        .collect();
    assert!(
        tids[1..6].iter().all(|tid| lent(&a, *tid) == 1),
        "40 MiB of 64 are lent"
    );
    let before = a.look(|core| core.near.store_id()).expect("not forked");
    to_many_of_whom_five_have_gone(&fake, &a, &tids);
    assert_ne!(
        a.look(|core| core.near.store_id()).expect("not forked"),
        before,
        "too much of it was lost"
    );
    for stays in [&others[0], &others[6]] {
        let got = next(stays);
        assert_eq!((got.tag, &got.body[..]), (3, &large(3)[..]));
    }
    (1..6).for_each(|migration| fake.wake(migration));
    for (other, held) in others[1..6].iter().zip(&held) {
        let got = next(other);
        assert_eq!((got.tag, &got.body[..]), (3, &large(3)[..]));
        assert!(
            held.body.iter().all(|byte| *byte == 1),
            "what was in hand stays whole"
        );
    }
    let mut n = 4;
    until("a loan from the new store", || {
        a.send_to_many(&message(Tid::NONE, n, large(n as u8)), &[tids[0], tids[6]])
            .expect("sent");
        let held = [next(&others[0]), next(&others[6])];
        assert!(
            held.iter()
                .all(|got| got.tag == n && got.body[..] == large(n as u8))
        );
        n += 1;
        (lent(&a, tids[0]) == 1 && lent(&a, tids[6]) == 1).then_some(())
    });
}

#[test]
fn one_message_that_five_have_taken_away_is_lost_once() {
    let fake = near();
    let (a, others, tids) = lender_to(&fake, 7);
    a.send_to_many(&message(Tid::NONE, 1, vec![1; 8 << 20]), &tids)
        .expect("sent");
    let _held: Vec<Message> = others.iter().map(next).collect();
    assert!(tids.iter().all(|tid| lent(&a, *tid) == 1));
    let before = a.look(|core| core.near.store_id()).expect("not forked");
    assert!(before.is_some());
    to_many_of_whom_five_have_gone(&fake, &a, &tids);
    assert_eq!(
        a.look(|core| core.near.store_id()).expect("not forked"),
        before,
        "8 MiB of 64 are lost"
    );
    (1..6).for_each(|migration| fake.wake(migration));
    others
        .iter()
        .for_each(|other| assert_eq!(next(other).tag, 3));
}

/// All threads that this one makes from now on share a processor with it.
fn on_one_processor() {
    let here = nix::sched::sched_getcpu().expect("this is Linux");
    let mut set = nix::sched::CpuSet::new();
    set.set(here).expect("a processor");
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set).expect("ours");
}

#[test]
fn peers_that_are_left_asleep_are_woken_though_their_sender_goes_on_and_says_nothing() {
    const ROUNDS: usize = 100;
    on_one_processor();
    let fake = near();
    let a = fake.join();
    let others: Vec<Runtime> = (0..3).map(|_| fake.join()).collect();
    let tids: Vec<Tid> = others.iter().map(Runtime::tid).collect();
    let (heard, begun, mut left_asleep) = (AtomicUsize::new(0), Instant::now(), 0);
    std::thread::scope(|scope| {
        for other in &others {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    let got = next(other);
                    heard.fetch_add(1, Ordering::Relaxed);
                    other.send(message(a.tid(), got.tag, "")).expect("sent");
                }
            });
        }
        for n in 0..ROUNDS {
            a.send_to_many(&message(Tid::NONE, n as i32, large(n as u8)), &tids)
                .expect("sent");
            // Whoever looks wakes them: every other time nobody does.
            if n % 2 == 0 {
                let held = a.lock().expect("not forked");
                if held.core.near.has_put_off() {
                    left_asleep += 1;
                    assert!(
                        held.alarm.as_ref().is_some_and(|alarm| alarm.is_on()),
                        "round {n}: nobody wakes them"
                    );
                }
            }
            while heard.load(Ordering::Relaxed) < (n + 1) * tids.len() {
                assert!(begun.elapsed() < PATIENCE, "round {n}: they sleep");
                std::thread::yield_now();
            }
            tids.iter().for_each(|_| drop(next(&a)));
        }
    });
    assert!(left_asleep > 0, "nobody was left asleep");
}

#[test]
fn messages_in_hand_stay_whole_through_moves_of_either_side() {
    let fake = near();
    for round in 1..=6u64 {
        let (a, b) = lenders(&fake);
        a.send(message(b.tid(), 1, large(1))).expect("sent");
        let held = next(&b);
        // This one is borrowed, too, and waits.
        a.send(message(b.tid(), 2, large(2))).expect("sent");
        let moved = if round % 2 == 0 { &a } else { &b };
        let stays = if round % 2 == 0 { &b } else { &a };
        fake.quiesce(moved.tid(), round);
        fake.has_let_go(moved.tid(), round);
        fake.tell(
            stays.tid(),
            sempa_proto::task::ToTask::PeerMoved { tid: moved.tid() },
        );
        fake.wake(round);
        // Whatever the lender writes from now on.
        send_numbered(&a, b.tid(), 0..50);
        assert_eq!(held.body[..], large(1));
        let waiting = next(&b);
        assert_eq!((waiting.tag, &waiting.body[..]), (2, &large(2)[..]));
        expect_numbered(&b, a.tid(), 0..50);
        assert_eq!(
            (&held.body[..], &waiting.body[..]),
            (&large(1)[..], &large(2)[..])
        );
    }
}

#[test]
fn a_lender_that_ends_leaves_what_it_has_lent() {
    let fake = near();
    let (a, b) = lenders(&fake);
    a.send(message(b.tid(), 1, large(1))).expect("sent");
    a.send(message(b.tid(), 2, large(2))).expect("sent");
    let held = next(&b);
    fake.hang_up(a.tid());
    fake.tell(
        b.tid(),
        sempa_proto::task::ToTask::PeerGone { tid: a.tid() },
    );
    drop(a);
    assert_eq!(
        (&held.body[..], &next(&b).body[..]),
        (&large(1)[..], &large(2)[..])
    );
}

#[test]
fn what_a_fork_takes_along_is_no_loan_any_more() {
    let fake = near();
    let (a, b) = lenders(&fake);
    a.send(message(b.tid(), 1, large(1))).expect("sent");
    let held = next(&b);
    b.prepare_for_fork();
    // A forked child has the same memory; what the lender writes from now on must not reach it.
    for n in 2..40 {
        a.send(message(b.tid(), n, large(n as u8))).expect("sent");
        let wanted = &mut |inbox: &mut Inbox| inbox.take_first(|m| m.tag == n);
        b.inbox_wait(Some(Instant::now() + PATIENCE), wanted)
            .expect("connected")
            .expect("in time");
        assert_eq!(held.body[..], large(1));
    }
}
