//! Tests of zero-copy transfer: large messages between tasks on the same host stay in the sender's
//! pool.

use super::fake::FakeDaemon;
use super::rings::{ring_pair, same_host_daemon};
use super::{TEST_TIMEOUT, expect_numbered, message, recv_next, send_numbered, wait_until};
use crate::inbox::Inbox;
use crate::runtime::Runtime;
use sempa_proto::message::Message;
use sempa_proto::{PvmError, Tid};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const LARGE_BYTES: usize = 1 << 20;

fn large_body(n: u8) -> Vec<u8> {
    (0..LARGE_BYTES)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add(n))
        .collect()
}

/// Returns the number of messages that `task` has leased to `peer`.
fn lease_count(task: &Runtime, peer: Tid) -> usize {
    task.lock()
        .expect("not forked")
        .core
        .shm
        .lease_count_to(peer)
}

/// Returns two tasks; the second task has mapped the pool of the first task.
fn leasing_pair(fake: &FakeDaemon) -> (Runtime, Runtime) {
    let (a, b) = ring_pair(fake);
    let mut n = 0;
    wait_until("a loan", || {
        a.send(message(b.tid(), n, large_body(n as u8)))
            .expect("sent");
        let got = recv_next(&b);
        assert_eq!((got.tag, &got.body[..]), (n, &large_body(n as u8)[..]));
        n += 1;
        (lease_count(&a, b.tid()) > 0).then_some(())
    });
    (a, b)
}

/// A large message is read in the sender's pool, and its block is reused after the lease has been
/// returned.
#[test]
fn pool_blocks_are_leased_and_reused() {
    let fake = same_host_daemon();
    let (a, b) = leasing_pair(&fake);
    let held: Vec<Message> = (0..5)
        .map(|n| {
            a.send(message(b.tid(), n, large_body(n as u8)))
                .expect("sent");
            recv_next(&b)
        })
        .collect();
    assert_eq!(
        lease_count(&a, b.tid()),
        5,
        "those that are held; the one before has come back"
    );
    for (n, message) in held.iter().enumerate() {
        assert_eq!(message.body[..], large_body(n as u8));
    }
    let places: Vec<*const u8> = held.iter().map(|message| message.body.as_ptr()).collect();
    drop(held);
    a.send(message(b.tid(), 9, large_body(9))).expect("sent");
    let again = recv_next(&b);
    assert_eq!(lease_count(&a, b.tid()), 1);
    assert!(
        places.contains(&again.body.as_ptr()),
        "a place that was used before"
    );
}

/// If a receiver retains all messages and the pool is full, further messages are copied.
#[test]
fn full_pool_falls_back_to_copies() {
    let fake = same_host_daemon();
    let (a, b) = leasing_pair(&fake);
    let held: Vec<Message> = (0..200)
        .map(|n| {
            a.send(message(b.tid(), n, large_body(n as u8)))
                .expect("sent");
            recv_next(&b)
        })
        .collect();
    for (n, message) in held.iter().enumerate() {
        assert_eq!(message.body[..], large_body(n as u8));
    }
    assert!(lease_count(&a, b.tid()) <= 64);
}

/// A message to several tasks uses one block of the pool.
#[test]
fn multicast_uses_one_block() {
    let fake = same_host_daemon();
    let a = fake.enroll();
    let others: Vec<Runtime> = (0..4).map(|_| fake.enroll()).collect();
    let tids: Vec<Tid> = others.iter().map(Runtime::tid).collect();
    let mut n = 0;
    let places = wait_until("loans to all", || {
        a.send_to_many(&message(Tid::NONE, n, large_body(n as u8)), &tids)
            .expect("sent");
        let held: Vec<Message> = others.iter().map(recv_next).collect();
        assert!(
            held.iter()
                .all(|got| (got.tag, &got.body[..]) == (n, &large_body(n as u8)[..]))
        );
        n += 1;
        let places = a
            .with_core(|core| core.shm.pool_blocks_in_use())
            .expect("not forked");
        tids.iter()
            .all(|tid| lease_count(&a, *tid) == 1)
            .then_some(places)
    });
    assert_eq!(places, 1, "one place for all four");
    assert_eq!(
        a.send_to_many(&message(Tid::NONE, 1, ""), &[tids[0], Tid::NONE]),
        Err(PvmError::BadParam)
    );
    assert_eq!(
        recv_next(&others[0]).tag,
        1,
        "those before the bad one were sent to"
    );
}

/// Returns a task, and `count` other tasks with their tids. The other tasks have a ring to the
/// first task and have mapped its pool.
fn leasing_group(fake: &FakeDaemon, count: usize) -> (Runtime, Vec<Runtime>, Vec<Tid>) {
    let a = fake.enroll();
    let others: Vec<Runtime> = (0..count).map(|_| fake.enroll()).collect();
    let tids: Vec<Tid> = others.iter().map(Runtime::tid).collect();
    wait_until("loans to all", || {
        a.send_to_many(&message(Tid::NONE, 0, large_body(0)), &tids)
            .expect("sent");
        let held: Vec<Message> = others.iter().map(recv_next).collect();
        let all = tids.iter().all(|tid| lease_count(&a, *tid) == 1);
        drop(held);
        all.then_some(())
    });
    (a, others, tids)
}

/// Quiesces five of seven receivers, and then sends a message to all seven before the sender
/// detects that.
fn multicast_after_five_quiesced(fake: &FakeDaemon, a: &Runtime, tids: &[Tid]) {
    let mut held = a.lock().expect("not forked");
    for (tid, migration) in tids[1..6].iter().zip(1..) {
        fake.quiesce(*tid, migration);
        fake.wait_quiesced(*tid, migration);
    }
    let now = held.now();
    held.core
        .send_to_many(now, &message(Tid::NONE, 3, large_body(3)), tids)
        .expect("sent");
}

/// If a pool is dropped while a message is sent to several tasks, neither this message nor a leased
/// message is lost.
#[test]
fn pool_dropped_during_multicast_loses_nothing() {
    let fake = same_host_daemon();
    let (a, others, tids) = leasing_group(&fake, 7);
    let held: Vec<Message> = others[1..6]
        .iter()
        .map(|other| {
            a.send(message(other.tid(), 1, vec![1; 8 << 20]))
                .expect("sent");
            recv_next(other)
        })
        .collect();
    assert!(
        tids[1..6].iter().all(|tid| lease_count(&a, *tid) == 1),
        "40 MiB of 64 are lent"
    );
    let before = a.with_core(|core| core.shm.pool_id()).expect("not forked");
    multicast_after_five_quiesced(&fake, &a, &tids);
    assert_ne!(
        a.with_core(|core| core.shm.pool_id()).expect("not forked"),
        before,
        "too much of it was lost"
    );
    for stays in [&others[0], &others[6]] {
        let got = recv_next(stays);
        assert_eq!((got.tag, &got.body[..]), (3, &large_body(3)[..]));
    }
    (1..6).for_each(|migration| fake.resume(migration));
    for (other, held) in others[1..6].iter().zip(&held) {
        let got = recv_next(other);
        assert_eq!((got.tag, &got.body[..]), (3, &large_body(3)[..]));
        assert!(
            held.body.iter().all(|byte| *byte == 1),
            "what was in hand stays whole"
        );
    }
    let mut n = 4;
    wait_until("a loan from the new store", || {
        a.send_to_many(
            &message(Tid::NONE, n, large_body(n as u8)),
            &[tids[0], tids[6]],
        )
        .expect("sent");
        let held = [recv_next(&others[0]), recv_next(&others[6])];
        assert!(
            held.iter()
                .all(|got| got.tag == n && got.body[..] == large_body(n as u8))
        );
        n += 1;
        (lease_count(&a, tids[0]) == 1 && lease_count(&a, tids[6]) == 1).then_some(())
    });
}

/// A block that several receivers lease when they migrate counts as lost only once.
#[test]
fn block_lost_to_many_counts_once() {
    let fake = same_host_daemon();
    let (a, others, tids) = leasing_group(&fake, 7);
    a.send_to_many(&message(Tid::NONE, 1, vec![1; 8 << 20]), &tids)
        .expect("sent");
    let _held: Vec<Message> = others.iter().map(recv_next).collect();
    assert!(tids.iter().all(|tid| lease_count(&a, *tid) == 1));
    let before = a.with_core(|core| core.shm.pool_id()).expect("not forked");
    assert!(before.is_some());
    multicast_after_five_quiesced(&fake, &a, &tids);
    assert_eq!(
        a.with_core(|core| core.shm.pool_id()).expect("not forked"),
        before,
        "8 MiB of 64 are lost"
    );
    (1..6).for_each(|migration| fake.resume(migration));
    others
        .iter()
        .for_each(|other| assert_eq!(recv_next(other).tag, 3));
}

/// Pins this thread, and the threads that it creates after this call, to one CPU.
fn pin_to_current_cpu() {
    let here = nix::sched::sched_getcpu().expect("this is Linux");
    let mut set = nix::sched::CpuSet::new();
    set.set(here).expect("a processor");
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set).expect("ours");
}

/// Peers whose wake-up was deferred are woken even if the sender makes no further call.
#[test]
fn deferred_wakes_happen_without_sender() {
    const ROUNDS: usize = 100;
    pin_to_current_cpu();
    let fake = same_host_daemon();
    let a = fake.enroll();
    let others: Vec<Runtime> = (0..3).map(|_| fake.enroll()).collect();
    let tids: Vec<Tid> = others.iter().map(Runtime::tid).collect();
    let (heard, begun, mut left_asleep) = (AtomicUsize::new(0), Instant::now(), 0);
    std::thread::scope(|scope| {
        for other in &others {
            scope.spawn(|| {
                for _ in 0..ROUNDS {
                    let got = recv_next(other);
                    heard.fetch_add(1, Ordering::Relaxed);
                    other.send(message(a.tid(), got.tag, "")).expect("sent");
                }
            });
        }
        for n in 0..ROUNDS {
            a.send_to_many(&message(Tid::NONE, n as i32, large_body(n as u8)), &tids)
                .expect("sent");
            // Locking the state wakes the peers, so only every other round counts deferred wake-ups.
            // In the other rounds only the timer wakes the peers.
            if n % 2 == 0 {
                let held = a.lock().expect("not forked");
                left_asleep += usize::from(held.core.shm.has_deferred_wakes());
            }
            while heard.load(Ordering::Relaxed) < (n + 1) * tids.len() {
                assert!(begun.elapsed() < TEST_TIMEOUT, "round {n}: they sleep");
                std::thread::yield_now();
            }
            tids.iter().for_each(|_| drop(recv_next(&a)));
        }
    });
    assert!(left_asleep > 0, "nobody was left asleep");
}

/// Leased messages stay intact when either side migrates.
#[test]
fn leased_messages_survive_migrations() {
    let fake = same_host_daemon();
    for round in 1..=6u64 {
        let (a, b) = leasing_pair(&fake);
        a.send(message(b.tid(), 1, large_body(1))).expect("sent");
        let held = recv_next(&b);
        // This second message is leased, too, and is not received before the migration.
        a.send(message(b.tid(), 2, large_body(2))).expect("sent");
        let moved = if round % 2 == 0 { &a } else { &b };
        let stays = if round % 2 == 0 { &b } else { &a };
        fake.quiesce(moved.tid(), round);
        fake.wait_quiesced(moved.tid(), round);
        fake.send_control(
            stays.tid(),
            sempa_proto::task::ToTask::PeerMigrated { tid: moved.tid() },
        );
        fake.resume(round);
        // Later messages must not change the content of a leased message.
        send_numbered(&a, b.tid(), 0..50);
        assert_eq!(held.body[..], large_body(1));
        let waiting = recv_next(&b);
        assert_eq!((waiting.tag, &waiting.body[..]), (2, &large_body(2)[..]));
        expect_numbered(&b, a.tid(), 0..50);
        assert_eq!(
            (&held.body[..], &waiting.body[..]),
            (&large_body(1)[..], &large_body(2)[..])
        );
    }
}

/// Leased messages stay intact when the sender ends.
#[test]
fn leased_messages_survive_end_of_sender() {
    let fake = same_host_daemon();
    let (a, b) = leasing_pair(&fake);
    a.send(message(b.tid(), 1, large_body(1))).expect("sent");
    a.send(message(b.tid(), 2, large_body(2))).expect("sent");
    let held = recv_next(&b);
    fake.disconnect(a.tid());
    fake.send_control(
        b.tid(),
        sempa_proto::task::ToTask::PeerGone { tid: a.tid() },
    );
    drop(a);
    assert_eq!(
        (&held.body[..], &recv_next(&b).body[..]),
        (&large_body(1)[..], &large_body(2)[..])
    );
}

/// Preparing a fork copies leased messages into private memory.
#[test]
fn fork_turns_leases_into_private_memory() {
    let fake = same_host_daemon();
    let (a, b) = leasing_pair(&fake);
    a.send(message(b.tid(), 1, large_body(1))).expect("sent");
    let held = recv_next(&b);
    b.prepare_for_fork();
    // A forked child shares this memory, so later messages of the sender must not change the
    // memory.
    for n in 2..40 {
        a.send(message(b.tid(), n, large_body(n as u8)))
            .expect("sent");
        let wanted = &mut |inbox: &mut Inbox| inbox.take_first(|m| m.tag == n);
        b.wait_for_inbox(Some(Instant::now() + TEST_TIMEOUT), wanted)
            .expect("connected")
            .expect("in time");
        assert_eq!(held.body[..], large_body(1));
    }
}
