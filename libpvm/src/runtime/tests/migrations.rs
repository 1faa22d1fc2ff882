//! Tests of migrations: a task quiesces and reconnects without losing messages or requests.

use super::fake::FakeDaemon;
use super::{
    recv_and_check_numbered, send_numbered, wait_for_next_message, wait_until, xdr_message,
};
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
    fake.send_quiesce(tid, 1);
    fake.wait_until_quiesced(tid, 1);
    assert!(task.is_connected() && task.socket_fd().is_none());
    fake.write_resume_token(1);
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

/// Repeated migrations of communicating tasks neither lose nor duplicate nor reorder messages.
#[test]
fn repeated_migrations_preserve_messages() {
    let fake = FakeDaemon::start();
    let (a, b, c) = (fake.enroll(), fake.enroll(), fake.enroll());
    let is_finished = AtomicBool::new(false);
    thread::scope(|scope| {
        let migration_thread = scope.spawn(|| {
            let mut migration = 0;
            while !is_finished.load(Ordering::Relaxed) {
                for task in [&a, &b] {
                    migration += 1;
                    fake.send_quiesce(task.tid(), migration);
                    fake.wait_until_quiesced(task.tid(), migration);
                    fake.write_resume_token(migration);
                    wait_until("the return", || task.socket_fd());
                }
            }
            migration
        });
        let tasks = [&a, &b, &c];
        let mut message_threads = Vec::new();
        for own_task in tasks {
            for peer in tasks {
                message_threads
                    .push(scope.spawn(move || send_numbered(own_task, peer.tid(), 0..1000)));
                message_threads.push(
                    scope.spawn(move || recv_and_check_numbered(own_task, peer.tid(), 0..1000)),
                );
            }
        }
        let join_results: Vec<_> = message_threads
            .into_iter()
            .map(|message_thread| message_thread.join())
            .collect();
        is_finished.store(true, Ordering::Relaxed);
        assert!(migration_thread.join().expect("moved") >= 2);
        assert!(join_results.into_iter().all(|result| result.is_ok()));
    });
}

/// While the task has no connection, sends return and requests wait.
#[test]
fn calls_work_while_quiesced() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.set_responder(|_, _| Some(Reply::Context(5)));
    fake.send_quiesce(a.tid(), 3);
    fake.wait_until_quiesced(a.tid(), 3);
    thread::scope(|scope| {
        // Sends return although nothing can be transmitted.
        send_numbered(&a, b.tid(), 0..100);
        a.send(xdr_message(HostId::MASTER.daemon_tid(), -1, "order"))
            .expect("kept");
        a.send(xdr_message(a.tid(), 8, "to myself"))
            .expect("delivered");
        assert_eq!(wait_for_next_message(&a).tag, 8);
        // A request and a receive block until the task has reconnected.
        let request_thread = scope.spawn(|| a.request_and_wait(Request::NewContext));
        let receive_thread = scope.spawn(|| wait_for_next_message(&a));
        b.send(xdr_message(a.tid(), 9, "for later")).expect("sent");
        fake.write_resume_token(3);
        assert_eq!(request_thread.join().expect("answered"), Reply::Context(5));
        assert_eq!(receive_thread.join().expect("received").tag, 9);
    });
    recv_and_check_numbered(&b, a.tid(), 0..100);
    fake.wait_for_log("the order", |_, control_message| {
        matches!(control_message, ToDaemon::Message(m) if m.tag == -1).then_some(())
    });
}

/// A request that has no reply when a migration begins is answered after the migration.
#[test]
fn open_request_is_answered_after_migration() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    thread::scope(|scope| {
        let request_thread = scope.spawn(|| task.request_and_wait(Request::Config));
        let id = fake.wait_for_request("the question", |request| *request == Request::Config);
        fake.send_quiesce(task.tid(), 4);
        fake.wait_until_quiesced(task.tid(), 4);
        fake.send_reply(task.tid(), id, Reply::Done);
        assert!(!request_thread.is_finished());
        fake.write_resume_token(4);
        assert_eq!(request_thread.join().expect("answered"), Reply::Done);
    });
}

/// The watermarks of a quiesced task contain, for each link, the sequence number up to which the
/// task has sent.
#[test]
fn watermarks_report_sent_fragments() {
    let fake = FakeDaemon::start();
    let (a, b, c) = (fake.enroll(), fake.enroll(), fake.enroll());
    (0..3).for_each(|tag| a.send(xdr_message(b.tid(), tag, "x")).expect("sent"));
    c.send(xdr_message(a.tid(), 1, "only heard")).expect("sent");
    wait_for_next_message(&a);
    fake.send_quiesce(a.tid(), 5);
    let reported_watermarks =
        fake.wait_for_log("the marks", |_, control_message| match control_message {
            ToDaemon::Quiesced {
                watermarks: reported_watermarks,
                ..
            } => Some(reported_watermarks.clone()),
            _ => None,
        });
    assert_eq!(
        reported_watermarks,
        [SendWatermark {
            peer: b.tid(),
            end_seq: 4
        }]
    );
    fake.write_resume_token(5);
}

/// A redirect that the test writes into the memory of a quiesced task replaces the token file for
/// which the task waits.
#[test]
fn redirect_in_memory_changes_awaited_migration() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    fake.send_quiesce(task.tid(), 8);
    let buffer_address =
        fake.wait_for_log(
            "where it looks",
            |_, control_message| match control_message {
                ToDaemon::Quiesced {
                    redirect_address: address,
                    ..
                } => Some(*address),
                _ => None,
            },
        );
    assert_eq!(buffer_address.pid, std::process::id().cast_signed());
    fake.wait_until_quiesced(task.tid(), 8);
    let redirect = Redirect {
        migration: MigrationId(9),
        token_paths: vec![fake.token_path(9)],
    };
    let memory = std::fs::OpenOptions::new()
        .write(true)
        .open("/proc/self/mem")
        .expect("ours");
    memory
        .write_all_at(&redirect.encode().expect("it fits"), buffer_address.address)
        .expect("mapped");
    fake.write_resume_token(9);
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

/// Frames that were queued before the quiesce request are written before the frame that reports the
/// quiesced task.
#[test]
fn queued_frames_precede_quiesced_frame() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.set_stalled(a.tid(), true);
    thread::scope(|scope| {
        let send_thread = scope.spawn(|| send_numbered(&a, b.tid(), 0..400));
        wait_until("a full socket", || {
            a.with_core(|core| core.outbox.backlog_bytes() > 0)
                .filter(|is_full| *is_full)
        });
        fake.send_quiesce(a.tid(), 6);
        // The migration does not block the sender.
        send_thread.join().expect("sent");
        fake.set_stalled(a.tid(), false);
        fake.wait_until_quiesced(a.tid(), 6);
        assert!(
            a.with_core(|core| core.outbox.is_empty())
                .expect("own process")
        );
        fake.write_resume_token(6);
    });
    recv_and_check_numbered(&b, a.tid(), 0..400);
}

/// A token of another migration and a malformed token are ignored.
#[test]
fn foreign_and_malformed_tokens_are_ignored() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    fake.send_quiesce(task.tid(), 7);
    fake.wait_until_quiesced(task.tid(), 7);
    fake.write_token(7, MigrationId(6), fake.socket_path());
    let hello_count = fake.state().hellos.len();
    std::fs::write(fake.runtime_dir.path().join("nowhere"), b"\xff\xff\xff").expect("written");
    // The task polls for tokens every millisecond. After 100 waits of 1 ms in the same process, the
    // task has polled several times.
    for _ in 0..100 {
        task.wait_for_inbox(
            Some(std::time::Instant::now() + std::time::Duration::from_millis(1)),
            &mut |_| None::<()>,
        )
        .expect("connected");
    }
    assert_eq!(fake.state().hellos.len(), hello_count);
    fake.write_resume_token(7);
    wait_until("the return", || task.socket_fd());
}

/// If the daemon refuses a migrated task, the calls of the task fail with the reason.
#[test]
fn refusal_after_migration_is_reported() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    fake.send_quiesce(task.tid(), 8);
    fake.wait_until_quiesced(task.tid(), 8);
    fake.state().refusal_reason = Some("no such move".into());
    fake.write_resume_token(8);
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

/// An exit that is called during a migration returns only after the migration has ended.
#[test]
fn exit_waits_for_migration() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.send_quiesce(a.tid(), 9);
    fake.wait_until_quiesced(a.tid(), 9);
    thread::scope(|scope| {
        send_numbered(&a, b.tid(), 0..200);
        let exit_thread = scope.spawn(|| a.exit());
        fake.write_resume_token(9);
        exit_thread
            .join()
            .expect("left")
            .expect("left in good order");
    });
    recv_and_check_numbered(&b, a.tid(), 0..200);
}

/// After the migration of a peer, the task sends lost fragments again.
#[test]
fn lost_fragments_are_resent_after_migration() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.state().drops_link_frames = true;
    a.send(xdr_message(b.tid(), 1, "lost on the way"))
        .expect("sent");
    fake.state().drops_link_frames = false;
    fake.send_control(a.tid(), ToTask::PeerMigrated { tid: b.tid() });
    assert_eq!(wait_for_next_message(&b).tag, 1);
    assert!(
        b.check_inbox(&mut |inbox: &mut Inbox| inbox.get(0).map(|_| ()))
            .is_none()
    );
}
