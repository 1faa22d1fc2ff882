//! Tests of rings between tasks on the same host: automatic setup, transfer of all messages, and
//! teardown without loss.

use super::fake::FakeDaemon;
use super::{TEST_TIMEOUT, expect_numbered, message, recv_next, send_numbered, wait_until};
use crate::runtime::Runtime;
use crate::runtime::core::Core;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use sempa_proto::route::{OfferId, RouteMsg};
use sempa_proto::task::ToTask;
use sempa_proto::{Message, Micros, Tid};
use std::os::fd::AsFd;
use std::time::Instant;

/// Returns a daemon whose tasks count as being on the same host.
pub(super) fn same_host_daemon() -> FakeDaemon {
    let fake = FakeDaemon::start();
    fake.state().same_host = true;
    fake
}

fn has_ring(task: &Runtime, peer: Tid) -> bool {
    task.with_core(|core| core.shm.slot(peer).is_some())
        .expect("not forked")
}

/// Returns two tasks with a ring between them.
pub(super) fn ring_pair(fake: &FakeDaemon) -> (Runtime, Runtime) {
    let (a, b) = (fake.enroll(), fake.enroll());
    for n in 0..3 {
        a.send(message(b.tid(), n, "")).expect("sent");
        assert_eq!(recv_next(&b).tag, n);
    }
    wait_until("a ring", || {
        (has_ring(&a, b.tid()) && has_ring(&b, a.tid())).then_some(())
    });
    (a, b)
}

/// Two tasks that exchange messages set up a ring, and the messages in transit during the setup
/// stay in order.
#[test]
fn ring_setup_keeps_message_order() {
    let fake = same_host_daemon();
    let (a, b) = (fake.enroll(), fake.enroll());
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

/// A ring is offered again 30 s after a refusal, 600 s after a refusal by the daemon, and
/// immediately after a migration.
#[test]
fn ring_offers_repeat_after_refusal_windows() {
    let fake = same_host_daemon();
    let task = fake.enroll();
    let peer = Tid::from_raw(task.tid().raw() + 77);
    let mut held = task.lock().expect("not forked");
    let (begin, core) = (held.now(), &mut held.core);
    let offers = |core: &mut Core, after: u64| {
        let now = begin + Micros::from_secs(after);
        core.offer_ring_if_due(now, peer);
        core.shm.is_offered(peer)
    };
    let refuse = |core: &mut Core, after: u64, id: u64, near: bool| {
        let now = begin + Micros::from_secs(after);
        core.handle_ring_message(
            now,
            peer,
            near,
            &RouteMsg::RingRefuse { id: OfferId(id) },
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
    core.remove_peer_ring(begin + Micros::from_secs(631), peer);
    assert_eq!([offers(core, 631), offers(core, 631)], [false, true]);
}

/// Messages that a peer wrote to a ring before its exit are received, even if the offer of the ring
/// was dropped before the peer's acceptance was handled.
#[test]
fn messages_in_dropped_ring_offer_are_received() {
    /// Longer than the timeout of an offer.
    const LATE: Micros = Micros::from_secs(2);
    for gives_up_first in [false, true] {
        let fake = same_host_daemon();
        let (a, b) = (fake.enroll(), fake.enroll());
        // While the lock is held, the acceptance of the offer cannot be handled.
        let mut held = a.lock().expect("not forked");
        let now = held.now();
        for n in 0..2 {
            held.core.send(now, message(b.tid(), n, "")).expect("sent");
        }
        held.write_outbox();
        wait_until("a ring at one end", || has_ring(&b, a.tid()).then_some(()));
        if gives_up_first {
            held.core.run_timers(now + LATE);
        }
        b.send(message(a.tid(), 7, "last")).expect("sent");
        b.exit().expect("its daemon is there");
        held.core.run_timers(now + LATE);
        assert!(!held.core.shm.is_offered(b.tid()));
        drop(held);
        assert_eq!(recv_next(&a).tag, 7, "given up first: {gives_up_first}");
    }
}

/// Messages through a ring do not go through the daemon.
#[test]
fn ring_messages_bypass_daemon() {
    let fake = same_host_daemon();
    let (a, b) = ring_pair(&fake);
    fake.state().drops_link_frames = true;
    send_numbered(&a, b.tid(), 0..500);
    expect_numbered(&b, a.tid(), 0..500);
}

/// A thread that sleeps on the daemon's socket is woken by a message through a ring.
#[test]
fn thread_waiting_at_socket_gets_ring_messages() {
    let fake = same_host_daemon();
    let (a, b) = ring_pair(&fake);
    fake.state().drops_link_frames = true;
    // If each sleep lasted until its timeout, this deadline would be exceeded.
    let deadline = Some(Instant::now() + TEST_TIMEOUT);
    for n in 0..100 {
        b.send(message(Tid::MY_DAEMON, n, "")).expect("sent");
        std::thread::scope(|scope| {
            let hearing =
                scope.spawn(|| b.wait_for_inbox(deadline, &mut |inbox| inbox.take_first(|_| true)));
            wait_until("a sleeper at the socket", || {
                b.0.shared.has_socket_waiter().then_some(())
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

/// Both tasks can send far more data than fits into a ring before either task receives.
#[test]
fn mutual_sends_beyond_ring_size_complete() {
    let fake = same_host_daemon();
    let (a, b) = ring_pair(&fake);
    let body = vec![7u8; 1 << 20];
    for n in 0..64 {
        a.send(message(b.tid(), n, body.clone())).expect("sent");
        b.send(message(a.tid(), n, body.clone())).expect("sent");
    }
    for task in [&a, &b] {
        for n in 0..64 {
            let got = recv_next(task);
            assert_eq!((got.tag, got.body.len()), (n, 1 << 20));
        }
    }
}

/// Messages that a task sent through a ring before it exits are received.
#[test]
fn exit_loses_no_ring_messages() {
    let fake = same_host_daemon();
    let (a, b) = ring_pair(&fake);
    send_numbered(&a, b.tid(), 0..300);
    a.exit().expect("left");
    fake.send_control(b.tid(), ToTask::PeerGone { tid: a.tid() });
    expect_numbered(&b, a.tid(), 0..300);
}

/// Migrations close the rings of the task, and no message is lost.
#[test]
fn migrations_close_rings_without_loss() {
    let fake = same_host_daemon();
    let (a, b) = ring_pair(&fake);
    for round in 1..=20u64 {
        let numbers = (round as u32 * 100)..(round as u32 * 100 + 100);
        let (mover, stays) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        std::thread::scope(|scope| {
            scope.spawn(|| send_numbered(&a, b.tid(), numbers.clone()));
            scope.spawn(|| send_numbered(&b, a.tid(), numbers.clone()));
            fake.quiesce(mover.tid(), round);
            fake.wait_quiesced(mover.tid(), round);
            assert!(!has_ring(mover, stays.tid()));
            fake.send_control(stays.tid(), ToTask::PeerMigrated { tid: mover.tid() });
            fake.resume(round);
        });
        expect_numbered(&a, b.tid(), numbers.clone());
        expect_numbered(&b, a.tid(), numbers);
    }
}

/// A quiesced task has no shared memory mapped or open, and its leased messages stay readable.
#[test]
fn migrating_task_has_no_shared_memory() {
    let fake = same_host_daemon();
    let (a, b) = ring_pair(&fake);
    let large = vec![5; 1 << 20];
    // After the first large message the receiver has the sender's pool.
    let held: Vec<_> = std::iter::repeat_with(|| {
        a.send(message(b.tid(), 1, large.clone())).expect("sent");
        recv_next(&b)
    })
    .take(20)
    .collect();
    fake.quiesce(a.tid(), 1);
    fake.quiesce(b.tid(), 2);
    fake.wait_quiesced(a.tid(), 1);
    fake.wait_quiesced(b.tid(), 2);
    let maps = || std::fs::read_to_string("/proc/self/maps").expect("readable");
    // With one process for each test, as under nextest, no other test has rings in this process.
    if std::env::var_os("NEXTEST").is_some() {
        wait_until("no shared memory", || {
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
    fake.resume(1);
    fake.resume(2);
    a.send(message(b.tid(), 9, "")).expect("sent");
    assert_eq!(recv_next(&b).tag, 9);
}

/// Messages that a peer wrote to a ring before its death are received.
#[test]
fn messages_of_killed_peer_are_received() {
    let fake = same_host_daemon();
    let (a, b) = ring_pair(&fake);
    send_numbered(&a, b.tid(), 0..50);
    fake.disconnect(a.tid());
    fake.send_control(b.tid(), ToTask::PeerGone { tid: a.tid() });
    expect_numbered(&b, a.tid(), 0..50);
    wait_until("the end of the ring", || {
        (!has_ring(&b, a.tid())).then_some(())
    });
}

/// Tasks on different hosts set up no ring and use their daemons.
#[test]
fn tasks_on_different_hosts_get_no_ring() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    send_numbered(&a, b.tid(), 0..200);
    expect_numbered(&b, a.tid(), 0..200);
    assert!(!has_ring(&a, b.tid()) && !has_ring(&b, a.tid()));
}

/// A ring and a pool that were idle for a minute are freed, and set up again when needed.
#[test]
fn idle_ring_and_pool_are_freed_and_recreated() {
    let fake = same_host_daemon();
    let (a, b) = ring_pair(&fake);
    let large = vec![3; 1 << 20];
    wait_until("a loan", || {
        a.send(message(b.tid(), 1, large.clone())).expect("sent");
        recv_next(&b);
        a.with_core(|core| core.shm.pool_id()).expect("not forked")
    });
    let later = {
        let mut held = a.lock().expect("not forked");
        let later = held.now() + Micros::from_secs(61);
        held.core.run_timers(later);
        assert!(held.core.shm.slot(b.tid()).is_none(), "a minute has passed");
        assert_eq!(held.core.shm.pool_id(), None);
        later
    };
    wait_until("the other end", || (!has_ring(&b, a.tid())).then_some(()));
    if std::env::var_os("NEXTEST").is_some() {
        let maps = || std::fs::read_to_string("/proc/self/maps").expect("readable");
        wait_until("no memory", || {
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
        assert_eq!(recv_next(&b).tag, n);
    }
    wait_until("a new ring", || {
        (has_ring(&a, b.tid()) && has_ring(&b, a.tid())).then_some(())
    });
}

/// Returns the number of rings that one poll checks.
fn polled_rings(task: &Runtime) -> usize {
    task.with_core(|core| core.shm.polled_ring_count())
        .expect("not forked")
}

/// A task that never sleeps stops polling the rings of peers that sent only once. It still receives
/// the next messages of these peers.
#[test]
fn polling_skips_quiet_rings() {
    const PEERS: usize = 40;
    let fake = same_host_daemon();
    let a = fake.enroll();
    let peers: Vec<Runtime> = (0..PEERS).map(|_| fake.enroll()).collect();
    for peer in &peers {
        wait_until("a ring", || {
            peer.send(message(a.tid(), 0, "")).expect("sent");
            (has_ring(peer, a.tid()) && has_ring(&a, peer.tid())).then_some(())
        });
        peer.send(message(a.tid(), 1, "")).expect("sent");
    }
    // From this point the task only polls; a sleep would make all writers ring the doorbell again.
    wait_until("all of it", || {
        a.check_inbox(&mut |inbox| {
            (inbox.iter().filter(|m| m.tag == 1).count() == PEERS).then_some(())
        })
    });
    wait_until("few rings to look at", || {
        a.check_inbox(&mut |_| None::<()>);
        (polled_rings(&a) <= 4).then_some(())
    });
    // Each peer's next message is still received immediately.
    for round in 2..5 {
        for peer in peers.iter().rev() {
            peer.send(message(a.tid(), round, "")).expect("sent");
            let wanted = |m: &Message| m.src == peer.tid() && m.tag == round;
            wait_until("the next word", || {
                a.check_inbox(&mut |inbox| inbox.take_first(wanted))
            });
        }
    }
}

/// When the last sender's ring has ended, the next message is expected from the daemon.
#[test]
fn ended_ring_peer_is_not_expected_to_send() {
    let fake = same_host_daemon();
    let (a, stays) = ring_pair(&fake);
    let ends = fake.enroll();
    wait_until("a ring", || {
        ends.send(message(a.tid(), 0, "")).expect("sent");
        recv_next(&a);
        has_ring(&a, ends.tid()).then_some(())
    });
    let expected = || {
        a.with_core(|core| core.shm.expects_message())
            .expect("not forked")
    };
    wait_until("a word in the ring", || {
        ends.send(message(a.tid(), 1, "")).expect("sent");
        recv_next(&a);
        expected().then_some(())
    });
    let gone = ends.tid();
    drop(ends);
    wait_until("no ring", || (!has_ring(&a, gone)).then_some(()));
    assert!(!expected() && has_ring(&a, stays.tid()));
}

/// Only rings that had no space for all frames are in the waiting list.
#[test]
fn only_full_rings_are_in_waiting_list() {
    let fake = same_host_daemon();
    let a = fake.enroll();
    let others: Vec<Runtime> = (0..5).map(|_| fake.enroll()).collect();
    for other in &others {
        wait_until("a ring", || {
            a.send(message(other.tid(), 0, "")).expect("sent");
            recv_next(other);
            has_ring(&a, other.tid()).then_some(())
        });
    }
    let waiting = || {
        a.with_core(|core| core.shm.waiting_ring_count())
            .expect("not forked")
    };
    wait_until("all is written", || (waiting() == 0).then_some(()));
    // Sends more than the ring and the window can contain; the receiver's drainer thread frees
    // space.
    for n in 0..64 {
        a.send(message(others[2].tid(), n, vec![n as u8; 200_000]))
            .expect("sent");
        assert!(waiting() <= 1, "the one that is full");
    }
    for n in 0..64 {
        let got = recv_next(&others[2]);
        assert_eq!((got.tag, got.body.len()), (n, 200_000));
    }
    wait_until("all is written", || (waiting() == 0).then_some(()));
}

/// The ready descriptor becomes readable when a message arrives through a ring.
#[test]
fn ready_fd_reports_ring_messages() {
    let fake = same_host_daemon();
    let (a, b) = ring_pair(&fake);
    b.ready_fd().expect("a descriptor");
    a.send(message(b.tid(), 5, "")).expect("sent");
    let sign = b.0.shared.ready_event().expect("just made");
    let mut fds = [PollFd::new(sign.as_fd(), PollFlags::POLLIN)];
    assert_eq!(
        poll(&mut fds, PollTimeout::try_from(60_000u32).expect("short")),
        Ok(1)
    );
    assert_eq!(recv_next(&b).tag, 5);
}
