//! Tests of migrations: a task quiesces and reconnects without losing messages or requests.

use super::fake::FakeDaemon;
use super::{expect_numbered, message, recv_next, send_numbered, wait_until};
use crate::inbox::Inbox;
use sempa_proto::task::{Claim, Redirect, Reply, Request, SendWatermark, ToDaemon, ToTask};
use sempa_proto::{HostId, MigrationId, PvmError};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// A task quiesces, reconnects with a resume claim, and keeps its tid.
#[test]
fn task_keeps_tid_through_migration() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    let tid = task.tid();
    fake.quiesce(tid, 1);
    fake.wait_quiesced(tid, 1);
    assert!(task.is_connected() && task.socket_fd().is_none());
    fake.resume(1);
    wait_until("the return", || task.socket_fd());
    let claim = fake.state().hellos.last().map(|hello| hello.claim.clone());
    assert_eq!(
        claim,
        Some(Claim::Resume {
            tid,
            migration: MigrationId(1)
        })
    );
    assert_eq!(task.tid(), tid);
}

/// Repeated migrations of communicating tasks lose, duplicate and reorder no message.
#[test]
fn repeated_migrations_preserve_messages() {
    let fake = FakeDaemon::start();
    let (a, b, c) = (fake.enroll(), fake.enroll(), fake.enroll());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let mover = scope.spawn(|| {
            let mut migration = 0;
            while !done.load(Ordering::Relaxed) {
                for task in [&a, &b] {
                    migration += 1;
                    fake.quiesce(task.tid(), migration);
                    fake.wait_quiesced(task.tid(), migration);
                    fake.resume(migration);
                    wait_until("the return", || task.socket_fd());
                }
            }
            migration
        });
        let tasks = [&a, &b, &c];
        let mut talkers = Vec::new();
        for me in tasks {
            for peer in tasks {
                talkers.push(scope.spawn(move || send_numbered(me, peer.tid(), 0..1000)));
                talkers.push(scope.spawn(move || expect_numbered(me, peer.tid(), 0..1000)));
            }
        }
        let results: Vec<_> = talkers.into_iter().map(|talker| talker.join()).collect();
        done.store(true, Ordering::Relaxed);
        assert!(mover.join().expect("moved") >= 2);
        assert!(results.into_iter().all(|result| result.is_ok()));
    });
}

/// Sends return and requests wait while the task has no connection.
#[test]
fn calls_work_while_quiesced() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.set_responder(|_, _| Some(Reply::Context(5)));
    fake.quiesce(a.tid(), 3);
    fake.wait_quiesced(a.tid(), 3);
    thread::scope(|scope| {
        // Sends return although nothing can be transmitted.
        send_numbered(&a, b.tid(), 0..100);
        a.send(message(HostId::MASTER.daemon_tid(), -1, "order"))
            .expect("kept");
        a.send(message(a.tid(), 8, "to myself")).expect("delivered");
        assert_eq!(recv_next(&a).tag, 8);
        // A request and a receive block until the task has reconnected.
        let asking = scope.spawn(|| a.request(Request::NewContext));
        let receiving = scope.spawn(|| recv_next(&a));
        b.send(message(a.tid(), 9, "for later")).expect("sent");
        fake.resume(3);
        assert_eq!(asking.join().expect("answered"), Reply::Context(5));
        assert_eq!(receiving.join().expect("received").tag, 9);
    });
    expect_numbered(&b, a.tid(), 0..100);
    fake.wait_for_log("the order", |_, said| {
        matches!(said, ToDaemon::Message(m) if m.tag == -1).then_some(())
    });
}

/// A request that has no reply when a migration begins is answered after the migration.
#[test]
fn open_request_is_answered_after_migration() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    thread::scope(|scope| {
        let asking = scope.spawn(|| task.request(Request::Config));
        let id = fake.wait_for_request("the question", |what| *what == Request::Config);
        fake.quiesce(task.tid(), 4);
        fake.wait_quiesced(task.tid(), 4);
        fake.reply(task.tid(), id, Reply::Done);
        assert!(!asking.is_finished());
        fake.resume(4);
        assert_eq!(asking.join().expect("answered"), Reply::Done);
    });
}

/// The watermarks of a quiesced task report how far each link has sent.
#[test]
fn watermarks_report_sent_fragments() {
    let fake = FakeDaemon::start();
    let (a, b, c) = (fake.enroll(), fake.enroll(), fake.enroll());
    (0..3).for_each(|tag| a.send(message(b.tid(), tag, "x")).expect("sent"));
    c.send(message(a.tid(), 1, "only heard")).expect("sent");
    recv_next(&a);
    fake.quiesce(a.tid(), 5);
    let marks = fake.wait_for_log("the marks", |_, said| match said {
        ToDaemon::Quiesced {
            watermarks: marks, ..
        } => Some(marks.clone()),
        _ => None,
    });
    assert_eq!(
        marks,
        [SendWatermark {
            peer: b.tid(),
            end_seq: 4
        }]
    );
    fake.resume(5);
}

/// A redirect that is written into the memory of a quiesced task replaces the token file for which
/// the task waits.
#[test]
fn redirect_in_memory_changes_awaited_migration() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    fake.quiesce(task.tid(), 8);
    let place = fake.wait_for_log("where it looks", |_, said| match said {
        ToDaemon::Quiesced {
            redirect_address: redirect_at,
            ..
        } => Some(*redirect_at),
        _ => None,
    });
    assert_eq!(place.pid, std::process::id().cast_signed());
    fake.wait_quiesced(task.tid(), 8);
    let redirect = Redirect {
        migration: MigrationId(9),
        tokens: vec![fake.token_path(9)],
    };
    let memory = std::fs::OpenOptions::new()
        .write(true)
        .open("/proc/self/mem")
        .expect("ours");
    memory
        .write_all_at(&redirect.encode().expect("it fits"), place.address)
        .expect("mapped");
    fake.resume(9);
    wait_until("the return", || task.socket_fd());
    let claim = fake.state().hellos.last().map(|hello| hello.claim.clone());
    assert_eq!(
        claim,
        Some(Claim::Resume {
            tid: task.tid(),
            migration: MigrationId(9)
        })
    );
}

/// Frames that were queued before the quiesce request are written before the last frame.
#[test]
fn queued_frames_precede_quiesced_frame() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.set_stalled(a.tid(), true);
    thread::scope(|scope| {
        let sending = scope.spawn(|| send_numbered(&a, b.tid(), 0..400));
        wait_until("a full socket", || {
            a.with_core(|core| core.outbox.backlog_bytes() > 0)
                .filter(|full| *full)
        });
        fake.quiesce(a.tid(), 6);
        // The migration does not block the sender.
        sending.join().expect("sent");
        fake.set_stalled(a.tid(), false);
        fake.wait_quiesced(a.tid(), 6);
        assert!(
            a.with_core(|core| core.outbox.is_empty())
                .expect("own process")
        );
        fake.resume(6);
    });
    expect_numbered(&b, a.tid(), 0..400);
}

/// A token of another migration and a malformed token are ignored.
#[test]
fn foreign_and_malformed_tokens_are_ignored() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    fake.quiesce(task.tid(), 7);
    fake.wait_quiesced(task.tid(), 7);
    fake.write_token(7, MigrationId(6), fake.socket());
    let greeted = fake.state().hellos.len();
    std::fs::write(fake.dir.path().join("nowhere"), b"\xff\xff\xff").expect("written");
    // The task polls for tokens every millisecond. 100 waits of 1 ms in the same process show that
    // the task has polled during these waits.
    for _ in 0..100 {
        task.wait_for_inbox(
            Some(std::time::Instant::now() + std::time::Duration::from_millis(1)),
            &mut |_| None::<()>,
        )
        .expect("connected");
    }
    assert_eq!(fake.state().hellos.len(), greeted);
    fake.resume(7);
    wait_until("the return", || task.socket_fd());
}

/// If the daemon refuses a migrated task, its calls fail with the reason.
#[test]
fn refusal_after_migration_is_reported() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    fake.quiesce(task.tid(), 8);
    fake.wait_quiesced(task.tid(), 8);
    fake.state().refusal_reason = Some("no such move".into());
    fake.resume(8);
    assert_eq!(
        task.wait_for_inbox(None, &mut |_| None::<()>),
        Err(PvmError::SysErr)
    );
    assert!(
        task.lost_reason().contains("no such move"),
        "{}",
        task.lost_reason()
    );
}

/// An exit during a migration waits until the migration has ended.
#[test]
fn exit_waits_for_migration() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.quiesce(a.tid(), 9);
    fake.wait_quiesced(a.tid(), 9);
    thread::scope(|scope| {
        send_numbered(&a, b.tid(), 0..200);
        let leaving = scope.spawn(|| a.exit());
        fake.resume(9);
        leaving.join().expect("left").expect("left in good order");
    });
    expect_numbered(&b, a.tid(), 0..200);
}

/// After the migration of a peer, lost fragments are sent again.
#[test]
fn migrated_peer_is_probed() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.state().drops_link_frames = true;
    a.send(message(b.tid(), 1, "lost on the way"))
        .expect("sent");
    fake.state().drops_link_frames = false;
    fake.send_control(a.tid(), ToTask::PeerMigrated { tid: b.tid() });
    assert_eq!(recv_next(&b).tag, 1);
    assert!(
        b.check_inbox(&mut |inbox: &mut Inbox| inbox.get(0).map(|_| ()))
            .is_none()
    );
}
