//! Tests of rings between tasks on the same host: automatic setup, transfer of all messages, and
//! teardown without loss.

use super::fake::FakeDaemon;
use super::{
    TEST_TIMEOUT, recv_and_check_numbered, send_numbered, wait_for_next_message, wait_until,
    xdr_message,
};
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
    fake.state().is_same_host = true;
    fake
}

fn has_ring(task: &Runtime, peer: Tid) -> bool {
    task.with_core(|core| core.shm_routes.slot(peer).is_some())
        .expect("not forked")
}

/// Returns two tasks with a ring between them.
pub(super) fn tasks_with_ring(fake: &FakeDaemon) -> (Runtime, Runtime) {
    let (a, b) = (fake.enroll(), fake.enroll());
    for n in 0..3 {
        a.send(xdr_message(b.tid(), n, "")).expect("sent");
        assert_eq!(wait_for_next_message(&b).tag, n);
    }
    wait_until("a ring", || {
        (has_ring(&a, b.tid()) && has_ring(&b, a.tid())).then_some(())
    });
    (a, b)
}

/// Two tasks that exchange messages set up a ring. The messages in transit during the setup arrive
/// in order.
#[test]
fn ring_setup_keeps_message_order() {
    let fake = same_host_daemon();
    let (a, b) = (fake.enroll(), fake.enroll());
    std::thread::scope(|scope| {
        for (task, peer) in [(&a, &b), (&b, &a)] {
            scope.spawn(|| {
                send_numbered(task, peer.tid(), 0..2000);
                recv_and_check_numbered(task, peer.tid(), 0..2000);
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
    let mut state_guard = task.lock().expect("not forked");
    let (start, core) = (state_guard.now(), &mut state_guard.core);
    let offers_ring_at = |core: &mut Core, delay_s: u64| {
        let now = start + Micros::from_secs(delay_s);
        core.offer_ring_if_due(now, peer);
        core.shm_routes.has_open_offer(peer)
    };
    let receive_refusal_at = |core: &mut Core, delay_s: u64, id: u64, is_same_host: bool| {
        let now = start + Micros::from_secs(delay_s);
        core.handle_ring_message(
            now,
            peer,
            is_same_host,
            &RouteMsg::RingRefuse { id: OfferId(id) },
            Vec::new(),
        );
    };
    assert_eq!(
        [offers_ring_at(core, 0), offers_ring_at(core, 0)],
        [false, true]
    );
    receive_refusal_at(core, 0, 1, true);
    assert_eq!(
        [offers_ring_at(core, 29), offers_ring_at(core, 30)],
        [false, true]
    );
    receive_refusal_at(core, 30, 2, false);
    assert_eq!(
        [
            offers_ring_at(core, 60),
            offers_ring_at(core, 629),
            offers_ring_at(core, 630)
        ],
        [false, false, true]
    );
    receive_refusal_at(core, 630, 3, false);
    core.remove_peer_ring(start + Micros::from_secs(631), peer);
    assert_eq!(
        [offers_ring_at(core, 631), offers_ring_at(core, 631)],
        [false, true]
    );
}

/// Messages that a peer wrote to a ring before its exit are received, even if the offer of the ring
/// was dropped before the peer's acceptance was handled.
#[test]
fn messages_in_dropped_ring_offer_are_received() {
    /// Longer than the timeout of a ring offer.
    const OFFER_AGE: Micros = Micros::from_secs(2);
    for drops_offer_first in [false, true] {
        let fake = same_host_daemon();
        let (a, b) = (fake.enroll(), fake.enroll());
        // While the lock is held, the acceptance of the offer cannot be handled.
        let mut state_guard = a.lock().expect("not forked");
        let now = state_guard.now();
        for n in 0..2 {
            state_guard
                .core
                .send(now, xdr_message(b.tid(), n, ""))
                .expect("sent");
        }
        state_guard.write_outbox();
        wait_until("a ring at one end", || has_ring(&b, a.tid()).then_some(()));
        if drops_offer_first {
            state_guard.core.run_timers(now + OFFER_AGE);
        }
        b.send(xdr_message(a.tid(), 7, "last")).expect("sent");
        b.exit().expect("its daemon is there");
        state_guard.core.run_timers(now + OFFER_AGE);
        assert!(!state_guard.core.shm_routes.has_open_offer(b.tid()));
        drop(state_guard);
        assert_eq!(
            wait_for_next_message(&a).tag,
            7,
            "given up first: {drops_offer_first}"
        );
    }
}

#[test]
fn ring_messages_bypass_daemon() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_ring(&fake);
    fake.state().drops_link_frames = true;
    send_numbered(&a, b.tid(), 0..500);
    recv_and_check_numbered(&b, a.tid(), 0..500);
}

/// A thread that sleeps on the daemon's socket is woken by a message through a ring.
#[test]
fn thread_waiting_at_socket_gets_ring_messages() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_ring(&fake);
    fake.state().drops_link_frames = true;
    // If every sleep lasted until its timeout, the test would exceed this deadline.
    let deadline = Some(Instant::now() + TEST_TIMEOUT);
    for n in 0..100 {
        b.send(xdr_message(Tid::MY_DAEMON, n, "")).expect("sent");
        std::thread::scope(|scope| {
            let receive_thread =
                scope.spawn(|| b.wait_for_inbox(deadline, &mut |inbox| inbox.take_first(|_| true)));
            wait_until("a sleeper at the socket", || {
                b.inner.shared_state.has_socket_waiter().then_some(())
            });
            a.send(xdr_message(b.tid(), n, "")).expect("sent");
            let received_message = receive_thread
                .join()
                .expect("no panic")
                .expect("connected")
                .expect("a message in time");
            assert_eq!(received_message.tag, n);
        });
    }
    assert!(has_ring(&a, b.tid()) && has_ring(&b, a.tid()));
}

/// Both tasks can send far more data than fits into a ring before either task receives.
#[test]
fn mutual_sends_beyond_ring_size_complete() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_ring(&fake);
    let body = vec![7u8; 1 << 20];
    for n in 0..64 {
        a.send(xdr_message(b.tid(), n, body.clone())).expect("sent");
        b.send(xdr_message(a.tid(), n, body.clone())).expect("sent");
    }
    for task in [&a, &b] {
        for n in 0..64 {
            let message = wait_for_next_message(task);
            assert_eq!((message.tag, message.body.len()), (n, 1 << 20));
        }
    }
}

#[test]
fn exit_loses_no_ring_messages() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_ring(&fake);
    send_numbered(&a, b.tid(), 0..300);
    a.exit().expect("left");
    fake.send_control(b.tid(), ToTask::PeerGone { tid: a.tid() });
    recv_and_check_numbered(&b, a.tid(), 0..300);
}

/// A migration closes the rings of the task. No message is lost.
#[test]
fn migrations_close_rings_without_loss() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_ring(&fake);
    for round in 1..=20u64 {
        let numbers = (round as u32 * 100)..(round as u32 * 100 + 100);
        let (migrating_task, peer) = if round % 2 == 0 { (&a, &b) } else { (&b, &a) };
        std::thread::scope(|scope| {
            scope.spawn(|| send_numbered(&a, b.tid(), numbers.clone()));
            scope.spawn(|| send_numbered(&b, a.tid(), numbers.clone()));
            fake.send_quiesce(migrating_task.tid(), round);
            fake.wait_until_quiesced(migrating_task.tid(), round);
            assert!(!has_ring(migrating_task, peer.tid()));
            fake.send_control(
                peer.tid(),
                ToTask::PeerMigrated {
                    tid: migrating_task.tid(),
                },
            );
            fake.write_resume_token(round);
        });
        recv_and_check_numbered(&a, b.tid(), numbers.clone());
        recv_and_check_numbered(&b, a.tid(), numbers);
    }
}

/// A quiesced task has no shared memory mapped or open. The messages that the task leases remain
/// readable.
#[test]
fn migrating_task_has_no_shared_memory() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_ring(&fake);
    let large_body = vec![5; 1 << 20];
    // After the first large message the receiver has the sender's pool.
    let leased_messages: Vec<_> = std::iter::repeat_with(|| {
        a.send(xdr_message(b.tid(), 1, large_body.clone()))
            .expect("sent");
        wait_for_next_message(&b)
    })
    .take(20)
    .collect();
    fake.send_quiesce(a.tid(), 1);
    fake.send_quiesce(b.tid(), 2);
    fake.wait_until_quiesced(a.tid(), 1);
    fake.wait_until_quiesced(b.tid(), 2);
    let read_maps = || std::fs::read_to_string("/proc/self/maps").expect("readable");
    // Only under nextest, which starts one process for each test, are there no rings of other tests
    // in this process.
    if std::env::var_os("NEXTEST").is_some() {
        wait_until("no shared memory", || {
            (!read_maps().contains("sempa-")).then_some(())
        });
        let open_fds = std::fs::read_dir("/proc/self/fd")
            .expect("readable")
            .flatten();
        let fd_targets = open_fds.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        assert_eq!(
            fd_targets
                .filter(|name| name.to_string_lossy().contains("sempa-"))
                .count(),
            0
        );
    }
    assert!(
        leased_messages
            .iter()
            .all(|message| message.body[..] == large_body)
    );
    fake.write_resume_token(1);
    fake.write_resume_token(2);
    a.send(xdr_message(b.tid(), 9, "")).expect("sent");
    assert_eq!(wait_for_next_message(&b).tag, 9);
}

/// Messages that a peer wrote to a ring before its death are received.
#[test]
fn messages_of_killed_peer_are_received() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_ring(&fake);
    send_numbered(&a, b.tid(), 0..50);
    fake.disconnect(a.tid());
    fake.send_control(b.tid(), ToTask::PeerGone { tid: a.tid() });
    recv_and_check_numbered(&b, a.tid(), 0..50);
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
    recv_and_check_numbered(&b, a.tid(), 0..200);
    assert!(!has_ring(&a, b.tid()) && !has_ring(&b, a.tid()));
}

/// A ring and a pool that were idle for a minute are freed. When the tasks exchange messages again,
/// a new ring is set up.
#[test]
fn idle_ring_and_pool_are_freed_and_recreated() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_ring(&fake);
    let large_body = vec![3; 1 << 20];
    wait_until("a loan", || {
        a.send(xdr_message(b.tid(), 1, large_body.clone()))
            .expect("sent");
        wait_for_next_message(&b);
        a.with_core(|core| core.shm_routes.pool_id())
            .expect("not forked")
    });
    let idle_check_time = {
        let mut state_guard = a.lock().expect("not forked");
        let idle_check_time = state_guard.now() + Micros::from_secs(61);
        state_guard.core.run_timers(idle_check_time);
        assert!(
            state_guard.core.shm_routes.slot(b.tid()).is_none(),
            "a minute has passed"
        );
        assert_eq!(state_guard.core.shm_routes.pool_id(), None);
        idle_check_time
    };
    wait_until("the other end", || (!has_ring(&b, a.tid())).then_some(()));
    if std::env::var_os("NEXTEST").is_some() {
        let maps = || std::fs::read_to_string("/proc/self/maps").expect("readable");
        wait_until("no memory", || {
            let maps = maps();
            (!maps.contains("sempa-rings") && !maps.contains("sempa-store")).then_some(())
        });
    }
    let mut state_guard = a.lock().expect("not forked");
    for n in 0..3 {
        state_guard
            .core
            .send(
                idle_check_time + Micros::from_secs(2),
                xdr_message(b.tid(), n, ""),
            )
            .expect("sent");
    }
    drop(state_guard);
    for n in 0..3 {
        assert_eq!(wait_for_next_message(&b).tag, n);
    }
    wait_until("a new ring", || {
        (has_ring(&a, b.tid()) && has_ring(&b, a.tid())).then_some(())
    });
}

/// Returns the number of rings that one poll checks.
fn polled_ring_count(task: &Runtime) -> usize {
    task.with_core(|core| core.shm_routes.polled_ring_count())
        .expect("not forked")
}

/// A task that never sleeps stops polling the rings of peers that sent only once. The task still
/// receives the next messages of these peers.
#[test]
fn polling_skips_rings_without_messages() {
    const PEER_COUNT: usize = 40;
    let fake = same_host_daemon();
    let a = fake.enroll();
    let peers: Vec<Runtime> = (0..PEER_COUNT).map(|_| fake.enroll()).collect();
    for peer in &peers {
        wait_until("a ring", || {
            peer.send(xdr_message(a.tid(), 0, "")).expect("sent");
            (has_ring(peer, a.tid()) && has_ring(&a, peer.tid())).then_some(())
        });
        peer.send(xdr_message(a.tid(), 1, "")).expect("sent");
    }
    // From this point the task only polls. A sleep would make all writers ring the doorbell again.
    wait_until("all of it", || {
        a.check_inbox(&mut |inbox| {
            (inbox.iter().filter(|m| m.tag == 1).count() == PEER_COUNT).then_some(())
        })
    });
    wait_until("few rings to look at", || {
        a.check_inbox(&mut |_| None::<()>);
        (polled_ring_count(&a) <= 4).then_some(())
    });
    // Each peer's next message is received immediately.
    for round in 2..5 {
        for peer in peers.iter().rev() {
            peer.send(xdr_message(a.tid(), round, "")).expect("sent");
            let is_expected = |m: &Message| m.src == peer.tid() && m.tag == round;
            wait_until("the next word", || {
                a.check_inbox(&mut |inbox| inbox.take_first(is_expected))
            });
        }
    }
}

/// If the ring of the last sender has ended, the next message is expected from the daemon.
#[test]
fn ended_ring_peer_is_not_expected_to_send() {
    let fake = same_host_daemon();
    let (a, running_peer) = tasks_with_ring(&fake);
    let ending_peer = fake.enroll();
    wait_until("a ring", || {
        ending_peer.send(xdr_message(a.tid(), 0, "")).expect("sent");
        wait_for_next_message(&a);
        has_ring(&a, ending_peer.tid()).then_some(())
    });
    let expects_ring_message = || {
        a.with_core(|core| core.shm_routes.expects_ring_message())
            .expect("not forked")
    };
    wait_until("a word in the ring", || {
        ending_peer.send(xdr_message(a.tid(), 1, "")).expect("sent");
        wait_for_next_message(&a);
        expects_ring_message().then_some(())
    });
    let ended_tid = ending_peer.tid();
    drop(ending_peer);
    wait_until("no ring", || (!has_ring(&a, ended_tid)).then_some(()));
    assert!(!expects_ring_message() && has_ring(&a, running_peer.tid()));
}

#[test]
fn only_full_rings_are_in_waiting_list() {
    let fake = same_host_daemon();
    let a = fake.enroll();
    let peers: Vec<Runtime> = (0..5).map(|_| fake.enroll()).collect();
    for peer in &peers {
        wait_until("a ring", || {
            a.send(xdr_message(peer.tid(), 0, "")).expect("sent");
            wait_for_next_message(peer);
            has_ring(&a, peer.tid()).then_some(())
        });
    }
    let waiting_count = || {
        a.with_core(|core| core.shm_routes.waiting_ring_count())
            .expect("not forked")
    };
    wait_until("all is written", || (waiting_count() == 0).then_some(()));
    // The test sends more bytes than the ring and the window can contain. The receiver's drainer
    // thread frees space.
    for n in 0..64 {
        a.send(xdr_message(peers[2].tid(), n, vec![n as u8; 200_000]))
            .expect("sent");
        assert!(waiting_count() <= 1, "the one that is full");
    }
    for n in 0..64 {
        let message = wait_for_next_message(&peers[2]);
        assert_eq!((message.tag, message.body.len()), (n, 200_000));
    }
    wait_until("all is written", || (waiting_count() == 0).then_some(()));
}

/// The ready descriptor becomes readable when a message arrives through a ring.
#[test]
fn ready_fd_reports_ring_messages() {
    let fake = same_host_daemon();
    let (a, b) = tasks_with_ring(&fake);
    b.ready_fd().expect("a descriptor");
    a.send(xdr_message(b.tid(), 5, "")).expect("sent");
    let ready_event = b.inner.shared_state.ready_event().expect("just made");
    let mut fds = [PollFd::new(ready_event.as_fd(), PollFlags::POLLIN)];
    assert_eq!(
        poll(&mut fds, PollTimeout::try_from(60_000u32).expect("short")),
        Ok(1)
    );
    assert_eq!(wait_for_next_message(&b).tag, 5);
}
