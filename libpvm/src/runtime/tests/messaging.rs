//! Tests of messages and requests between tasks without migrations or failures.

use super::fake::FakeDaemon;
use super::{
    TEST_TIMEOUT, recv_and_check_numbered, send_numbered, wait_for_next_message, wait_until,
    xdr_message,
};
use crate::inbox::Inbox;
use sempa_proto::link::{RETAINED_BYTES_MAX, WINDOW_BYTES_MAX};
use sempa_proto::table::HostTable;
use sempa_proto::task::{Reply, Request, SendWatermark, Sink, ToDaemon, ToTask};
use sempa_proto::{HostId, PvmError, Tid};
use std::thread;
use std::time::{Duration, Instant};

#[test]
fn message_arrives_unchanged() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    let mut sent_message = xdr_message(b.tid(), 9, "body");
    (sent_message.ctx, sent_message.wid, sent_message.enc) = (5, 6, 7);
    a.send(sent_message.clone()).expect("sent");
    sent_message.src = a.tid();
    assert_eq!(wait_for_next_message(&b), sent_message);
}

/// A message to the sending task itself is delivered without the daemon.
#[test]
fn message_to_self_stays_in_library() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    fake.set_stalled(task.tid(), true);
    task.send(xdr_message(task.tid(), 1, vec![1; 10 << 20]))
        .expect("sent");
    assert_eq!(wait_for_next_message(&task).body.len(), 10 << 20);
}

/// A message to any daemon goes to the task's own daemon in one control frame.
#[test]
fn message_to_daemon_goes_to_own_daemon() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    let daemon_tid = HostId::MASTER.daemon_tid();
    task.send(xdr_message(daemon_tid, -5, "order"))
        .expect("sent");
    let logged_message =
        fake.wait_for_log("the message", |_, control_message| match control_message {
            ToDaemon::Message(m) => Some(m.clone()),
            _ => None,
        });
    assert_eq!(
        (
            logged_message.src,
            logged_message.dst,
            logged_message.tag,
            &logged_message.body[..]
        ),
        (task.tid(), daemon_tid, -5, &b"order"[..])
    );
}

#[test]
fn messages_of_all_sizes_arrive_once_in_order() {
    let fake = FakeDaemon::start();
    let tasks: Vec<_> = (0..4).map(|_| fake.enroll()).collect();
    let tids: Vec<Tid> = tasks.iter().map(|t| t.tid()).collect();
    thread::scope(|scope| {
        for task in &tasks {
            for receiver in &tids {
                scope.spawn(move || send_numbered(task, *receiver, 0..300));
            }
            for sender in &tids {
                scope.spawn(move || recv_and_check_numbered(task, *sender, 0..300));
            }
        }
    });
}

/// Two tasks that send much data before they receive do not block each other.
#[test]
fn mutual_bulk_sends_do_not_deadlock() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    let (message_count, body_bytes) = (64, 2 * WINDOW_BYTES_MAX / 4);
    thread::scope(|scope| {
        for (task, peer) in [(&a, &b), (&b, &a)] {
            scope.spawn(move || {
                (0..message_count).for_each(|i| {
                    task.send(xdr_message(peer.tid(), i, vec![i as u8; body_bytes]))
                        .expect("sent")
                });
                for i in 0..message_count {
                    let received_message = wait_for_next_message(task);
                    assert_eq!(
                        (received_message.tag, received_message.body.len()),
                        (i, body_bytes)
                    );
                    assert!(received_message.body.iter().all(|b| *b == i as u8));
                }
            });
        }
    });
}

/// A send returns even if the receiver's window is full.
#[test]
fn send_returns_while_window_is_closed() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.state().drops_link_frames = true;
    for i in 0..8 {
        a.send(xdr_message(b.tid(), i, vec![i as u8; WINDOW_BYTES_MAX / 2]))
            .expect("sent");
    }
    fake.state().drops_link_frames = false;
    for i in 0..8 {
        assert_eq!(wait_for_next_message(&b).tag, i);
    }
}

/// A receiver that only computes still accepts messages through its I/O thread.
#[test]
fn computing_receiver_does_not_block_sender() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    // The messages exceed the window many times. All messages arrive only if the receiver's I/O
    // thread acknowledges fragments.
    for i in 0..12 {
        a.send(xdr_message(b.tid(), i, vec![0; WINDOW_BYTES_MAX / 2]))
            .expect("sent");
    }
    wait_until("everything in the receiver's memory", || {
        b.check_inbox(&mut |inbox: &mut Inbox| (inbox.len() == 12).then_some(()))
    });
}

/// A send fails when the bytes queued for its receiver exceed the limit.
#[test]
fn send_beyond_retained_limit_is_refused() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.state().drops_link_frames = true;
    let large_body = bytes::Bytes::from(vec![0; 1 << 20]);
    let retained_count_max = RETAINED_BYTES_MAX / large_body.len();
    for _ in 0..retained_count_max - 2 {
        a.send(xdr_message(b.tid(), 1, large_body.clone()))
            .expect("kept");
    }
    let send_error = (0..4).find_map(|_| a.send(xdr_message(b.tid(), 1, large_body.clone())).err());
    assert_eq!(send_error, Some(PvmError::OutOfRes));
    fake.disconnect(a.tid());
}

/// Concurrent requests of several threads each receive their own reply.
#[test]
fn concurrent_requests_get_their_own_replies() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    let responder = |_: Tid, request: &Request| match request {
        Request::Tasks { selector } => Some(Reply::Context(selector.raw())),
        Request::Config => Some(Reply::Hosts(HostTable::default())),
        _ => None,
    };
    fake.set_responder(responder);
    thread::scope(|scope| {
        for n in 0..8 {
            let task = &task;
            scope.spawn(move || {
                for i in 0..50 {
                    let selector = Tid::from_raw(n * 1000 + i);
                    assert_eq!(
                        task.request_and_wait(Request::Tasks { selector }),
                        Reply::Context(selector.raw())
                    );
                }
            });
        }
    });
    assert_eq!(
        task.request_and_wait(Request::Config),
        Reply::Hosts(HostTable::default())
    );
}

/// A request that exceeds the maximum frame size fails with `OutOfRes` and is not sent.
#[test]
fn oversized_request_fails_locally() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    let hostfile_lines = vec!["x".repeat(65 << 20)];
    assert!(matches!(
        task.request_and_wait(Request::AddHosts {
            host_file_lines: hostfile_lines
        }),
        Reply::Failed {
            error: PvmError::OutOfRes,
            ..
        }
    ));
    assert!(task.is_connected());
}

/// A wait for a message returns at its deadline, not before.
#[test]
fn wait_ends_at_deadline() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    let start = Instant::now();
    let wait_result =
        task.wait_for_inbox(Some(start + Duration::from_millis(50)), &mut |_| None::<()>);
    assert_eq!(wait_result, Ok(None));
    assert!(start.elapsed() >= Duration::from_millis(50));
    assert_eq!(
        task.wait_for_inbox(Some(start), &mut |_| None::<()>),
        Ok(None)
    );
}

/// A notification is delivered after the messages below its watermark.
#[test]
fn notification_follows_last_message() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    let notification = |peer: Tid, end_sequence: u64, tag: i32| ToTask::Deliver {
        message: xdr_message(b.tid(), tag, ""),
        deliver_after: Some(SendWatermark {
            peer,
            end_seq: end_sequence,
        }),
    };
    // Both notifications arrive before any fragment.
    fake.send_control(b.tid(), notification(a.tid(), 4, 100));
    fake.send_control(b.tid(), notification(a.tid(), 1, 99));
    for tag in 1..=3 {
        a.send(xdr_message(b.tid(), tag, "x")).expect("sent");
    }
    let tags: Vec<i32> = (0..5).map(|_| wait_for_next_message(&b).tag).collect();
    assert_eq!(tags, [99, 1, 2, 3, 100]);
}

/// A notification does not wait for messages of a task that is known to have ended.
#[test]
fn notification_does_not_wait_for_ended_peer() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    let peer = Tid::for_task(HostId::MASTER, 77).expect("a tid");
    let notification = |tag: i32| ToTask::Deliver {
        message: xdr_message(task.tid(), tag, ""),
        deliver_after: Some(SendWatermark { peer, end_seq: 50 }),
    };
    fake.send_control(task.tid(), notification(1));
    fake.send_control(task.tid(), ToTask::PeerGone { tid: peer });
    assert_eq!(wait_for_next_message(&task).tag, 1);
    fake.send_control(task.tid(), notification(2));
    assert_eq!(wait_for_next_message(&task).tag, 2);
}

/// Messages to a task that does not exist are dropped and not retained.
#[test]
fn messages_to_missing_task_are_dropped() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    let missing_tid = Tid::for_task(HostId::MASTER, 99).expect("a tid");
    for _ in 0..20 {
        a.send(xdr_message(missing_tid, 1, vec![0; 1 << 20]))
            .expect("vanishes");
    }
    wait_until("the news that nobody is there", || {
        a.with_core(|core| core.has_peer_ended(missing_tid))
            .filter(|has_ended| *has_ended)
    });
    a.send(xdr_message(b.tid(), 2, "still here")).expect("sent");
    assert_eq!(wait_for_next_message(&b).tag, 2);
    a.exit().expect("nothing is in the way");
}

/// A task is reachable even if messages were sent to its tid before the task existed.
#[test]
fn reused_tid_can_be_reached() {
    let fake = FakeDaemon::start();
    let a = fake.enroll();
    let next_tid = Tid::for_task(HostId::MASTER, 2).expect("a tid");
    a.send(xdr_message(next_tid, 1, "too early"))
        .expect("vanishes");
    wait_until("the news that nobody is there", || {
        a.with_core(|core| core.has_peer_ended(next_tid))
            .filter(|has_ended| *has_ended)
    });
    let b = fake.enroll();
    assert_eq!(b.tid(), next_tid);
    b.send(xdr_message(a.tid(), 2, "hello")).expect("sent");
    assert_eq!(wait_for_next_message(&a).tag, 2);
    a.send(xdr_message(b.tid(), 3, "hello")).expect("sent");
    assert_eq!(wait_for_next_message(&b).tag, 3);
}

#[test]
fn messages_after_peer_end_notice_are_received() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    a.send(xdr_message(b.tid(), 1, "one")).expect("sent");
    assert_eq!(wait_for_next_message(&b).tag, 1);
    fake.send_control(b.tid(), ToTask::PeerGone { tid: a.tid() });
    wait_until("the news", || {
        b.with_core(|core| core.has_peer_ended(a.tid()))
            .filter(|has_ended| *has_ended)
    });
    a.send(xdr_message(b.tid(), 2, "two")).expect("sent");
    assert_eq!(wait_for_next_message(&b).tag, 2);
}

#[test]
fn lost_frames_are_retransmitted() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.state().drops_link_frames = true;
    send_numbered(&a, b.tid(), 0..50);
    fake.state().drops_link_frames = false;
    send_numbered(&a, b.tid(), 50..100);
    recv_and_check_numbered(&b, a.tid(), 0..100);
}

#[test]
fn welcome_settings_are_reported() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    assert_eq!(
        (task.output_sink(), task.trace_sink(), task.host()),
        (Sink::default(), Sink::default(), HostId::MASTER)
    );
    assert!(!task.was_spawned() && task.is_connected() && task.socket_fd().is_some());
}

/// Threads that wait for different tags each receive the messages with their own tag.
#[test]
fn each_waiting_thread_gets_its_messages() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    thread::scope(|scope| {
        for tag in 1..=4 {
            let b = &b;
            scope.spawn(move || {
                for number in 0..100 {
                    let take_tagged_message =
                        &mut |inbox: &mut Inbox| inbox.take_first(|m| m.tag == tag);
                    let received_message = b
                        .wait_for_inbox(Some(Instant::now() + TEST_TIMEOUT), take_tagged_message)
                        .expect("connected")
                        .expect("in time");
                    assert_eq!(received_message.body[..], [number]);
                }
            });
        }
        for number in 0..100u8 {
            for tag in [3, 1, 4, 2] {
                a.send(xdr_message(b.tid(), tag, vec![number]))
                    .expect("sent");
            }
        }
    });
}
