//! Tests of zero-copy transfer: a task reads large messages of a task on the same host in the
//! sender's pool.

use super::fake::FakeDaemon;
use super::rings::{same_host_daemon, tasks_with_ring};
use super::{
    TEST_TIMEOUT, recv_and_check_numbered, send_numbered, wait_for_next_message, wait_until,
    xdr_message,
};
use crate::inbox::Inbox;
use crate::runtime::{PackedBody, Runtime};
use sempa_proto::message::Message;
use sempa_proto::{PvmError, Tid};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

const LARGE_BODY_BYTES: usize = 1 << 20;

fn large_body(fill_byte: u8) -> Vec<u8> {
    (0..LARGE_BODY_BYTES)
        .map(|i| (i as u8).wrapping_mul(31).wrapping_add(fill_byte))
        .collect()
}

/// Returns the number of messages that `task` has leased to `peer`.
fn lease_count(task: &Runtime, peer: Tid) -> usize {
    task.lock()
        .expect("not forked")
        .core
        .shm_routes
        .lease_count(peer)
}

/// Returns two tasks; the second task has mapped the pool of the first task.
fn tasks_with_shared_pool(fake: &FakeDaemon) -> (Runtime, Runtime) {
    let (a, b) = tasks_with_ring(fake);
    let mut n = 0;
    wait_until("a loan", || {
        a.send(xdr_message(b.tid(), n, large_body(n as u8)))
            .expect("sent");
        let message = wait_for_next_message(&b);
        assert_eq!(
            (message.tag, &message.body[..]),
            (n, &large_body(n as u8)[..])
        );
        n += 1;
        (lease_count(&a, b.tid()) > 0).then_some(())
    });
    (a, b)
}

/// A large message is read in the sender's pool. Its block is reused after the lease has been
/// returned.
#[test]
fn pool_blocks_are_leased_and_reused() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_shared_pool(&fake);
    let leased_messages: Vec<Message> = (0..5)
        .map(|n| {
            a.send(xdr_message(b.tid(), n, large_body(n as u8)))
                .expect("sent");
            wait_for_next_message(&b)
        })
        .collect();
    assert_eq!(
        lease_count(&a, b.tid()),
        5,
        "those that are held; the one before has come back"
    );
    for (n, message) in leased_messages.iter().enumerate() {
        assert_eq!(message.body[..], large_body(n as u8));
    }
    let body_pointers: Vec<*const u8> = leased_messages
        .iter()
        .map(|message| message.body.as_ptr())
        .collect();
    drop(leased_messages);
    a.send(xdr_message(b.tid(), 9, large_body(9)))
        .expect("sent");
    let later_message = wait_for_next_message(&b);
    assert_eq!(lease_count(&a, b.tid()), 1);
    assert!(
        body_pointers.contains(&later_message.body.as_ptr()),
        "a place that was used before"
    );
}

/// If a receiver retains its messages until the pool is full, further messages are copied.
#[test]
fn full_pool_falls_back_to_copies() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_shared_pool(&fake);
    let retained_messages: Vec<Message> = (0..200)
        .map(|n| {
            a.send(xdr_message(b.tid(), n, large_body(n as u8)))
                .expect("sent");
            wait_for_next_message(&b)
        })
        .collect();
    for (n, message) in retained_messages.iter().enumerate() {
        assert_eq!(message.body[..], large_body(n as u8));
    }
    assert!(lease_count(&a, b.tid()) <= 64);
}

/// A message to several tasks uses one block of the pool. If one receiver is invalid, the receivers
/// that precede it still receive the message.
#[test]
fn multicast_uses_one_block() {
    let fake = same_host_daemon();
    let a = fake.enroll();
    let receivers: Vec<Runtime> = (0..4).map(|_| fake.enroll()).collect();
    let tids: Vec<Tid> = receivers.iter().map(Runtime::tid).collect();
    let mut n = 0;
    let used_block_count = wait_until("loans to all", || {
        a.send_to_many(&xdr_message(Tid::NONE, n, large_body(n as u8)), &tids)
            .expect("sent");
        let leased_messages: Vec<Message> = receivers.iter().map(wait_for_next_message).collect();
        assert!(
            leased_messages
                .iter()
                .all(|message| (message.tag, &message.body[..]) == (n, &large_body(n as u8)[..]))
        );
        n += 1;
        let used_block_count = a
            .with_core(|core| core.shm_routes.used_pool_block_count())
            .expect("not forked");
        tids.iter()
            .all(|tid| lease_count(&a, *tid) == 1)
            .then_some(used_block_count)
    });
    assert_eq!(used_block_count, 1, "one place for all four");
    assert_eq!(
        a.send_to_many(&xdr_message(Tid::NONE, 1, ""), &[tids[0], Tid::NONE]),
        Err(PvmError::BadParam)
    );
    assert_eq!(
        wait_for_next_message(&receivers[0]).tag,
        1,
        "those before the bad one were sent to"
    );
}

/// Returns a task, and `receiver_count` receivers with their tids. The receivers have rings to the
/// task and have mapped the pool of the task.
fn group_with_shared_pool(
    fake: &FakeDaemon,
    receiver_count: usize,
) -> (Runtime, Vec<Runtime>, Vec<Tid>) {
    let a = fake.enroll();
    let receivers: Vec<Runtime> = (0..receiver_count).map(|_| fake.enroll()).collect();
    let tids: Vec<Tid> = receivers.iter().map(Runtime::tid).collect();
    wait_until("loans to all", || {
        a.send_to_many(&xdr_message(Tid::NONE, 0, large_body(0)), &tids)
            .expect("sent");
        let leased_messages: Vec<Message> = receivers.iter().map(wait_for_next_message).collect();
        let has_leased_to_all = tids.iter().all(|tid| lease_count(&a, *tid) == 1);
        drop(leased_messages);
        has_leased_to_all.then_some(())
    });
    (a, receivers, tids)
}

/// Quiesces five of seven receivers. Then sends a message to all seven receivers before the sender
/// detects the quiesced receivers.
fn multicast_after_five_quiesced(fake: &FakeDaemon, a: &Runtime, tids: &[Tid]) {
    let mut state_guard = a.lock().expect("not forked");
    for (tid, migration) in tids[1..6].iter().zip(1..) {
        fake.send_quiesce(*tid, migration);
        fake.wait_until_quiesced(*tid, migration);
    }
    let now = state_guard.now();
    state_guard
        .core
        .send_to_many(now, &xdr_message(Tid::NONE, 3, large_body(3)), tids)
        .expect("sent");
}

/// If a pool is dropped while a message is sent to several tasks, neither this message nor a leased
/// message is lost.
#[test]
fn pool_dropped_during_multicast_loses_nothing() {
    let fake = same_host_daemon();
    let (a, receivers, tids) = group_with_shared_pool(&fake, 7);
    let leased_messages: Vec<Message> = receivers[1..6]
        .iter()
        .map(|receiver| {
            a.send(xdr_message(receiver.tid(), 1, vec![1; 8 << 20]))
                .expect("sent");
            wait_for_next_message(receiver)
        })
        .collect();
    assert!(
        tids[1..6].iter().all(|tid| lease_count(&a, *tid) == 1),
        "40 MiB of 64 are lent"
    );
    let old_pool_id = a
        .with_core(|core| core.shm_routes.pool_id())
        .expect("not forked");
    multicast_after_five_quiesced(&fake, &a, &tids);
    assert_ne!(
        a.with_core(|core| core.shm_routes.pool_id())
            .expect("not forked"),
        old_pool_id,
        "too much of it was lost"
    );
    for running_receiver in [&receivers[0], &receivers[6]] {
        let message = wait_for_next_message(running_receiver);
        assert_eq!((message.tag, &message.body[..]), (3, &large_body(3)[..]));
    }
    (1..6).for_each(|migration| fake.write_resume_token(migration));
    for (receiver, leased_messages) in receivers[1..6].iter().zip(&leased_messages) {
        let message = wait_for_next_message(receiver);
        assert_eq!((message.tag, &message.body[..]), (3, &large_body(3)[..]));
        assert!(
            leased_messages.body.iter().all(|byte| *byte == 1),
            "what was in hand stays whole"
        );
    }
    let mut n = 4;
    wait_until("a loan from the new store", || {
        a.send_to_many(
            &xdr_message(Tid::NONE, n, large_body(n as u8)),
            &[tids[0], tids[6]],
        )
        .expect("sent");
        let leased_messages = [
            wait_for_next_message(&receivers[0]),
            wait_for_next_message(&receivers[6]),
        ];
        assert!(
            leased_messages
                .iter()
                .all(|message| message.tag == n && message.body[..] == large_body(n as u8))
        );
        n += 1;
        (lease_count(&a, tids[0]) == 1 && lease_count(&a, tids[6]) == 1).then_some(())
    });
}

/// A block that several receivers lease when they migrate is counted as lost only once.
#[test]
fn block_lost_to_many_counts_once() {
    let fake = same_host_daemon();
    let (a, receivers, tids) = group_with_shared_pool(&fake, 7);
    a.send_to_many(&xdr_message(Tid::NONE, 1, vec![1; 8 << 20]), &tids)
        .expect("sent");
    let _leased_messages: Vec<Message> = receivers.iter().map(wait_for_next_message).collect();
    assert!(tids.iter().all(|tid| lease_count(&a, *tid) == 1));
    let old_pool_id = a
        .with_core(|core| core.shm_routes.pool_id())
        .expect("not forked");
    assert!(old_pool_id.is_some());
    multicast_after_five_quiesced(&fake, &a, &tids);
    assert_eq!(
        a.with_core(|core| core.shm_routes.pool_id())
            .expect("not forked"),
        old_pool_id,
        "8 MiB of 64 are lost"
    );
    (1..6).for_each(|migration| fake.write_resume_token(migration));
    receivers
        .iter()
        .for_each(|receiver| assert_eq!(wait_for_next_message(receiver).tag, 3));
}

/// Pins this thread, and the threads that it creates after this call, to one CPU.
fn pin_to_current_cpu() {
    let cpu = nix::sched::sched_getcpu().expect("this is Linux");
    let mut cpu_set = nix::sched::CpuSet::new();
    cpu_set.set(cpu).expect("a processor");
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &cpu_set).expect("ours");
}

/// Peers whose wake-up was deferred are woken even if the sender makes no further call.
#[test]
fn deferred_wakes_happen_without_sender() {
    const ROUND_COUNT: usize = 100;
    pin_to_current_cpu();
    let fake = same_host_daemon();
    let a = fake.enroll();
    let receivers: Vec<Runtime> = (0..3).map(|_| fake.enroll()).collect();
    let tids: Vec<Tid> = receivers.iter().map(Runtime::tid).collect();
    let (received_count, start, mut deferred_round_count) =
        (AtomicUsize::new(0), Instant::now(), 0);
    std::thread::scope(|scope| {
        for receiver in &receivers {
            scope.spawn(|| {
                for _ in 0..ROUND_COUNT {
                    let received_message = wait_for_next_message(receiver);
                    received_count.fetch_add(1, Ordering::Relaxed);
                    receiver
                        .send(xdr_message(a.tid(), received_message.tag, ""))
                        .expect("sent");
                }
            });
        }
        for n in 0..ROUND_COUNT {
            a.send_to_many(
                &xdr_message(Tid::NONE, n as i32, large_body(n as u8)),
                &tids,
            )
            .expect("sent");
            // Locking the state wakes the peers, so only every second round counts deferred
            // wake-ups. In the other rounds only the timer wakes the peers.
            if n % 2 == 0 {
                let state_guard = a.lock().expect("not forked");
                deferred_round_count +=
                    usize::from(state_guard.core.shm_routes.has_deferred_wakes());
            }
            while received_count.load(Ordering::Relaxed) < (n + 1) * tids.len() {
                assert!(start.elapsed() < TEST_TIMEOUT, "round {n}: they sleep");
                std::thread::yield_now();
            }
            tids.iter().for_each(|_| drop(wait_for_next_message(&a)));
        }
    });
    assert!(deferred_round_count > 0, "nobody was left asleep");
}

/// Leased messages remain unchanged when the sender or the receiver migrates.
#[test]
fn leased_messages_survive_migrations() {
    let fake = same_host_daemon();
    for round in 1..=6u64 {
        let (a, b) = tasks_with_shared_pool(&fake);
        a.send(xdr_message(b.tid(), 1, large_body(1)))
            .expect("sent");
        let leased_message = wait_for_next_message(&b);
        // The second message is leased, too. The receiver does not receive the second message
        // before the migration.
        a.send(xdr_message(b.tid(), 2, large_body(2)))
            .expect("sent");
        let migrating_task = if round % 2 == 0 { &a } else { &b };
        let other_task = if round % 2 == 0 { &b } else { &a };
        fake.send_quiesce(migrating_task.tid(), round);
        fake.wait_until_quiesced(migrating_task.tid(), round);
        fake.send_control(
            other_task.tid(),
            sempa_proto::task::ToTask::PeerMigrated {
                tid: migrating_task.tid(),
            },
        );
        fake.write_resume_token(round);
        // Later messages must not change the content of a leased message.
        send_numbered(&a, b.tid(), 0..50);
        assert_eq!(leased_message.body[..], large_body(1));
        let second_message = wait_for_next_message(&b);
        assert_eq!(
            (second_message.tag, &second_message.body[..]),
            (2, &large_body(2)[..])
        );
        recv_and_check_numbered(&b, a.tid(), 0..50);
        assert_eq!(
            (&leased_message.body[..], &second_message.body[..]),
            (&large_body(1)[..], &large_body(2)[..])
        );
    }
}

#[test]
fn leased_messages_survive_end_of_sender() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_shared_pool(&fake);
    a.send(xdr_message(b.tid(), 1, large_body(1)))
        .expect("sent");
    a.send(xdr_message(b.tid(), 2, large_body(2)))
        .expect("sent");
    let leased_message = wait_for_next_message(&b);
    fake.disconnect(a.tid());
    fake.send_control(
        b.tid(),
        sempa_proto::task::ToTask::PeerGone { tid: a.tid() },
    );
    drop(a);
    assert_eq!(
        (
            &leased_message.body[..],
            &wait_for_next_message(&b).body[..]
        ),
        (&large_body(1)[..], &large_body(2)[..])
    );
}

/// Preparing a fork copies leased messages into private memory.
#[test]
fn fork_turns_leases_into_private_memory() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_shared_pool(&fake);
    a.send(xdr_message(b.tid(), 1, large_body(1)))
        .expect("sent");
    let leased_message = wait_for_next_message(&b);
    b.prepare_for_fork();
    // A forked child would share the private memory. Later messages of the sender must not change
    // this memory.
    for n in 2..40 {
        a.send(xdr_message(b.tid(), n, large_body(n as u8)))
            .expect("sent");
        let take_tagged_message = &mut |inbox: &mut Inbox| inbox.take_first(|m| m.tag == n);
        b.wait_for_inbox(Some(Instant::now() + TEST_TIMEOUT), take_tagged_message)
            .expect("connected")
            .expect("in time");
        assert_eq!(leased_message.body[..], large_body(1));
    }
}

/// Returns a body that is packed in the pool of `task`, and fills it with `large_body(fill_byte)`
/// `copy_count` times.
fn packed_body(task: &Runtime, fill_byte: u8, copy_count: usize) -> PackedBody {
    let mut body = task
        .allocate_body(copy_count * LARGE_BODY_BYTES)
        .expect("room in the pool");
    for _ in 0..copy_count {
        assert!(body.append(&large_body(fill_byte)));
    }
    body
}

fn is_filled(body: &[u8], fill_byte: u8, copy_count: usize) -> bool {
    body.len() == copy_count * LARGE_BODY_BYTES
        && body
            .chunks(LARGE_BODY_BYTES)
            .all(|copy| copy == large_body(fill_byte))
}

fn used_block_count(task: &Runtime) -> usize {
    task.with_core(|core| core.shm_routes.used_pool_block_count())
        .expect("not forked")
}

/// Between the program that packs a body and the one that unpacks it, no byte of the body is
/// copied: packing and unpacking are two copies for each byte. All receivers read one block.
#[test]
fn packed_body_is_never_copied() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_shared_pool(&fake);
    let copied_bytes = || {
        a.with_core(|core| core.shm_routes.copied_bytes())
            .expect("not forked")
    };
    let copied_bytes_before = copied_bytes();
    a.send(xdr_message(b.tid(), 1, large_body(1)))
        .expect("sent");
    drop(wait_for_next_message(&b));
    assert_eq!(
        copied_bytes() - copied_bytes_before,
        LARGE_BODY_BYTES as u64,
        "a body that was not packed in the pool is copied once"
    );
    let body = packed_body(&a, 2, 16).freeze();
    let copied_bytes_before = copied_bytes();
    for n in 0..3 {
        a.send(xdr_message(b.tid(), n, body.clone())).expect("sent");
    }
    let messages: Vec<Message> = (0..3).map(|_| wait_for_next_message(&b)).collect();
    assert_eq!(copied_bytes(), copied_bytes_before);
    assert!(
        messages
            .iter()
            .all(|message| is_filled(&message.body, 2, 16)
                && message.body.as_ptr() == messages[0].body.as_ptr())
    );
    assert_eq!((lease_count(&a, b.tid()), used_block_count(&a)), (3, 1));
    drop((messages, body));
    wait_until("a free pool", || {
        // The link releases the body when it looks at the reader's position.
        send_numbered(&a, b.tid(), 0..1);
        recv_and_check_numbered(&b, a.tid(), 0..1);
        let has_returned_all = lease_count(&a, b.tid()) == 0;
        (has_returned_all && used_block_count(&a) == 0).then_some(())
    });
}

/// Bodies that wait for their receiver, and a body that is half packed, survive a migration of
/// their task.
#[test]
fn packed_bodies_survive_migration() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_shared_pool(&fake);
    let c = fake.enroll();
    for round in 1..=3u64 {
        let fill_byte = round as u8;
        let sent_body = packed_body(&a, fill_byte, 2).freeze();
        a.send(xdr_message(b.tid(), 1, sent_body.clone()))
            .expect("sent");
        // There is no ring to this task, so the daemon carries the body.
        a.send(xdr_message(c.tid(), 1, sent_body.clone()))
            .expect("sent");
        let mut half_packed_body = a.allocate_body(4 << 20).expect("room");
        assert!(half_packed_body.append(&large_body(fill_byte)));
        fake.send_quiesce(a.tid(), round);
        fake.wait_until_quiesced(a.tid(), round);
        assert!(half_packed_body.append(&large_body(fill_byte)));
        fake.write_resume_token(round);
        a.send(xdr_message(b.tid(), 2, half_packed_body.freeze()))
            .expect("sent");
        a.send(xdr_message(b.tid(), 3, sent_body)).expect("sent");
        for tag in 1..=3 {
            let message = wait_for_next_message(&b);
            assert_eq!(message.tag, tag);
            assert!(is_filled(&message.body, fill_byte, 2), "message {tag}");
        }
        assert!(is_filled(&wait_for_next_message(&c).body, fill_byte, 2));
        wait_until("a new pool", || {
            a.send(xdr_message(b.tid(), 4, large_body(4)))
                .expect("sent");
            let message = wait_for_next_message(&b);
            let is_leased = lease_count(&a, b.tid()) > 0;
            drop(message);
            is_leased.then_some(())
        });
    }
}

/// Preparing a fork turns the bodies that the program packs or has sent into private memory.
#[test]
fn fork_turns_packed_bodies_into_private_memory() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_shared_pool(&fake);
    let sent_body = packed_body(&a, 1, 1).freeze();
    a.send(xdr_message(b.tid(), 1, sent_body.clone()))
        .expect("sent");
    let leased_message = wait_for_next_message(&b);
    let mut half_packed_body = a.allocate_body(2 << 20).expect("room");
    assert!(half_packed_body.append(&large_body(2)));
    let old_pool_id = a.with_core(|core| core.shm_routes.pool_id());
    a.prepare_for_fork();
    assert!(half_packed_body.append(&large_body(2)));
    assert_eq!(a.with_core(|core| core.shm_routes.pool_id()), Some(None));
    wait_until("a new pool", || {
        a.send(xdr_message(b.tid(), 2, large_body(3)))
            .expect("sent");
        let message = wait_for_next_message(&b);
        assert_eq!(message.body[..], large_body(3));
        // The message that was leased before the fork is in the earlier pool.
        (lease_count(&a, b.tid()) > 1).then_some(())
    });
    assert_ne!(
        a.with_core(|core| core.shm_routes.pool_id()),
        old_pool_id,
        "peers use another pool"
    );
    assert!(is_filled(&leased_message.body, 1, 1) && is_filled(&sent_body, 1, 1));
    assert!(is_filled(half_packed_body.bytes(), 2, 2));
    a.prepare_for_fork();
    assert!(
        a.with_core(|core| core.shm_routes.pool_id().is_some())
            .expect("not forked"),
        "without bodies in it, the new pool stays"
    );
}
