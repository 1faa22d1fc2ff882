//! Tests of messages and requests between tasks without migrations or failures.

use super::fake::FakeDaemon;
use super::{TEST_TIMEOUT, expect_numbered, message, recv_next, send_numbered, wait_until};
use crate::inbox::Inbox;
use sempa_proto::link::{RETAINED_BYTES_MAX, WINDOW_BYTES_MAX};
use sempa_proto::table::HostTable;
use sempa_proto::task::{Reply, Request, SendWatermark, Sink, ToDaemon, ToTask};
use sempa_proto::{HostId, PvmError, Tid};
use std::thread;
use std::time::{Duration, Instant};

/// A message arrives with the same header and body.
#[test]
fn message_arrives_unchanged() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    let mut sent = message(b.tid(), 9, "body");
    (sent.ctx, sent.wid, sent.enc) = (5, 6, 7);
    a.send(sent.clone()).expect("sent");
    sent.src = a.tid();
    assert_eq!(recv_next(&b), sent);
}

/// A message to the sending task itself does not go through the daemon.
#[test]
fn message_to_self_stays_in_library() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    fake.set_stalled(task.tid(), true);
    task.send(message(task.tid(), 1, vec![1; 10 << 20]))
        .expect("sent");
    assert_eq!(recv_next(&task).body.len(), 10 << 20);
}

/// A message to any daemon goes to the task's own daemon in one control frame.
#[test]
fn message_to_daemon_goes_to_own_daemon() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    let to = HostId::MASTER.daemon_tid();
    task.send(message(to, -5, "order")).expect("sent");
    let got = fake.wait_for_log("the message", |_, said| match said {
        ToDaemon::Message(m) => Some(m.clone()),
        _ => None,
    });
    assert_eq!(
        (got.src, got.dst, got.tag, &got.body[..]),
        (task.tid(), to, -5, &b"order"[..])
    );
}

/// Messages of all sizes between several tasks arrive once and in order.
#[test]
fn messages_of_all_sizes_arrive_once_in_order() {
    let fake = FakeDaemon::start();
    let tasks: Vec<_> = (0..4).map(|_| fake.enroll()).collect();
    let tids: Vec<Tid> = tasks.iter().map(|t| t.tid()).collect();
    thread::scope(|scope| {
        for task in &tasks {
            for to in &tids {
                scope.spawn(move || send_numbered(task, *to, 0..300));
            }
            for from in &tids {
                scope.spawn(move || expect_numbered(task, *from, 0..300));
            }
        }
    });
}

/// Two tasks that send much data before they receive do not block each other.
#[test]
fn mutual_bulk_sends_do_not_deadlock() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    let (count, len) = (64, 2 * WINDOW_BYTES_MAX / 4);
    thread::scope(|scope| {
        for (me, peer) in [(&a, &b), (&b, &a)] {
            scope.spawn(move || {
                (0..count).for_each(|i| {
                    me.send(message(peer.tid(), i, vec![i as u8; len]))
                        .expect("sent")
                });
                for i in 0..count {
                    let got = recv_next(me);
                    assert_eq!((got.tag, got.body.len()), (i, len));
                    assert!(got.body.iter().all(|b| *b == i as u8));
                }
            });
        }
    });
}

/// A send returns even if the receiver's window is closed.
#[test]
fn send_returns_while_window_is_closed() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.state().drops_link_frames = true;
    for i in 0..8 {
        a.send(message(b.tid(), i, vec![i as u8; WINDOW_BYTES_MAX / 2]))
            .expect("sent");
    }
    fake.state().drops_link_frames = false;
    for i in 0..8 {
        assert_eq!(recv_next(&b).tag, i);
    }
}

/// A receiver that only computes still accepts messages, through its I/O thread.
#[test]
fn computing_receiver_does_not_block_sender() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    // Far more than a window: it arrives only because the receiver's I/O thread acknowledges.
    for i in 0..12 {
        a.send(message(b.tid(), i, vec![0; WINDOW_BYTES_MAX / 2]))
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
    let huge = bytes::Bytes::from(vec![0; 1 << 20]);
    let kept = RETAINED_BYTES_MAX / huge.len();
    for _ in 0..kept - 2 {
        a.send(message(b.tid(), 1, huge.clone())).expect("kept");
    }
    let refused = (0..4).find_map(|_| a.send(message(b.tid(), 1, huge.clone())).err());
    assert_eq!(refused, Some(PvmError::OutOfRes));
    fake.disconnect(a.tid());
}

/// Several concurrent requests each receive their own reply.
#[test]
fn concurrent_requests_get_their_own_replies() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    let answers = |_: Tid, what: &Request| match what {
        Request::Tasks { selector } => Some(Reply::Context(selector.raw())),
        Request::Config => Some(Reply::Hosts(HostTable::default())),
        _ => None,
    };
    fake.set_responder(answers);
    thread::scope(|scope| {
        for n in 0..8 {
            let task = &task;
            scope.spawn(move || {
                for i in 0..50 {
                    let selector = Tid::from_raw(n * 1000 + i);
                    assert_eq!(
                        task.request(Request::Tasks { selector }),
                        Reply::Context(selector.raw())
                    );
                }
            });
        }
    });
    assert_eq!(
        task.request(Request::Config),
        Reply::Hosts(HostTable::default())
    );
}

/// A request that exceeds the frame size fails without being sent.
#[test]
fn oversized_request_fails_locally() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    let lines = vec!["x".repeat(65 << 20)];
    assert!(matches!(
        task.request(Request::AddHosts { lines }),
        Reply::Failed {
            error: PvmError::OutOfRes,
            ..
        }
    ));
    assert!(task.is_connected());
}

/// A wait for a message ends at its deadline, not before.
#[test]
fn wait_ends_at_deadline() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    let start = Instant::now();
    let nothing = task.wait_for_inbox(Some(start + Duration::from_millis(50)), &mut |_| None::<()>);
    assert_eq!(nothing, Ok(None));
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
    let note = |peer: Tid, end: u64, tag: i32| ToTask::Deliver {
        message: message(b.tid(), tag, ""),
        deliver_after: Some(SendWatermark { peer, end_seq: end }),
    };
    // The notification arrives before any fragment.
    fake.send_control(b.tid(), note(a.tid(), 4, 100));
    fake.send_control(b.tid(), note(a.tid(), 1, 99));
    for tag in 1..=3 {
        a.send(message(b.tid(), tag, "x")).expect("sent");
    }
    let tags: Vec<i32> = (0..5).map(|_| recv_next(&b).tag).collect();
    assert_eq!(tags, [99, 1, 2, 3, 100]);
}

/// A notification does not wait for messages of a task that is known to have ended.
#[test]
fn notification_does_not_wait_for_ended_peer() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    let peer = Tid::task(HostId::MASTER, 77).expect("a tid");
    let note = |tag: i32| ToTask::Deliver {
        message: message(task.tid(), tag, ""),
        deliver_after: Some(SendWatermark { peer, end_seq: 50 }),
    };
    fake.send_control(task.tid(), note(1));
    fake.send_control(task.tid(), ToTask::PeerGone { tid: peer });
    assert_eq!(recv_next(&task).tag, 1);
    fake.send_control(task.tid(), note(2));
    assert_eq!(recv_next(&task).tag, 2);
}

/// Messages to a task that does not exist are dropped and not retained.
#[test]
fn messages_to_missing_task_are_dropped() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    let nobody = Tid::task(HostId::MASTER, 99).expect("a tid");
    for _ in 0..20 {
        a.send(message(nobody, 1, vec![0; 1 << 20]))
            .expect("vanishes");
    }
    wait_until("the news that nobody is there", || {
        a.with_core(|core| core.is_gone(nobody))
            .filter(|gone| *gone)
    });
    a.send(message(b.tid(), 2, "still here")).expect("sent");
    assert_eq!(recv_next(&b).tag, 2);
    a.exit().expect("nothing is in the way");
}

/// A task can be reached even if messages were sent to its tid before it existed.
#[test]
fn reused_tid_can_be_reached() {
    let fake = FakeDaemon::start();
    let a = fake.enroll();
    let next_tid = Tid::task(HostId::MASTER, 2).expect("a tid");
    a.send(message(next_tid, 1, "too early")).expect("vanishes");
    wait_until("the news that nobody is there", || {
        a.with_core(|core| core.is_gone(next_tid))
            .filter(|gone| *gone)
    });
    let b = fake.enroll();
    assert_eq!(b.tid(), next_tid);
    b.send(message(a.tid(), 2, "hello")).expect("sent");
    assert_eq!(recv_next(&a).tag, 2);
    a.send(message(b.tid(), 3, "hello")).expect("sent");
    assert_eq!(recv_next(&b).tag, 3);
}

/// Messages that arrive after the notice of their sender's end are still received.
#[test]
fn messages_after_peer_end_notice_are_received() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    a.send(message(b.tid(), 1, "one")).expect("sent");
    assert_eq!(recv_next(&b).tag, 1);
    fake.send_control(b.tid(), ToTask::PeerGone { tid: a.tid() });
    wait_until("the news", || {
        b.with_core(|core| core.is_gone(a.tid()))
            .filter(|gone| *gone)
    });
    a.send(message(b.tid(), 2, "two")).expect("sent");
    assert_eq!(recv_next(&b).tag, 2);
}

/// Frames that the daemon loses are sent again.
#[test]
fn lost_frames_are_retransmitted() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.state().drops_link_frames = true;
    send_numbered(&a, b.tid(), 0..50);
    fake.state().drops_link_frames = false;
    send_numbered(&a, b.tid(), 50..100);
    expect_numbered(&b, a.tid(), 0..100);
}

/// The runtime reports the settings from the daemon's welcome.
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
    std::thread::scope(|scope| {
        for tag in 1..=4 {
            let b = &b;
            scope.spawn(move || {
                for number in 0..100 {
                    let wanted = &mut |inbox: &mut Inbox| inbox.take_first(|m| m.tag == tag);
                    let got = b
                        .wait_for_inbox(Some(Instant::now() + TEST_TIMEOUT), wanted)
                        .expect("connected")
                        .expect("in time");
                    assert_eq!(got.body[..], [number]);
                }
            });
        }
        for number in 0..100u8 {
            for tag in [3, 1, 4, 2] {
                a.send(message(b.tid(), tag, vec![number])).expect("sent");
            }
        }
    });
}
