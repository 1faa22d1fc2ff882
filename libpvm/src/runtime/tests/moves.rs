//! Tests of migrations: a task quiesces and reconnects without losing anything.

use super::fake::Fake;
use super::{expect_numbered, message, next, send_numbered, until};
use crate::inbox::Inbox;
use sempa_proto::task::{Claim, LinkMark, Redirect, Reply, Request, ToDaemon, ToTask};
use sempa_proto::{HostId, MigrationId, PvmError};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

/// A task quiesces, reconnects with a resume claim, and keeps its tid.
#[test]
fn task_keeps_tid_through_migration() {
    let fake = Fake::start();
    let task = fake.join();
    let tid = task.tid();
    fake.quiesce(tid, 1);
    fake.has_let_go(tid, 1);
    assert!(task.is_connected() && task.socket_fd().is_none());
    fake.wake(1);
    until("the return", || task.socket_fd());
    let claim = fake.net().hellos.last().map(|hello| hello.claim.clone());
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
    let fake = Fake::start();
    let (a, b, c) = (fake.join(), fake.join(), fake.join());
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let mover = scope.spawn(|| {
            let mut migration = 0;
            while !done.load(Ordering::Relaxed) {
                for task in [&a, &b] {
                    migration += 1;
                    fake.quiesce(task.tid(), migration);
                    fake.has_let_go(task.tid(), migration);
                    fake.wake(migration);
                    until("the return", || task.socket_fd());
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
    let fake = Fake::start();
    let (a, b) = (fake.join(), fake.join());
    fake.answer(|_, _| Some(Reply::Context(5)));
    fake.quiesce(a.tid(), 3);
    fake.has_let_go(a.tid(), 3);
    thread::scope(|scope| {
        // Sends return although nothing can be transmitted.
        send_numbered(&a, b.tid(), 0..100);
        a.send(message(HostId::MASTER.daemon(), -1, "order"))
            .expect("kept");
        a.send(message(a.tid(), 8, "to myself")).expect("delivered");
        assert_eq!(next(&a).tag, 8);
        // A request and a receive block until the task has reconnected.
        let asking = scope.spawn(|| a.request(Request::NewContext));
        let receiving = scope.spawn(|| next(&a));
        b.send(message(a.tid(), 9, "for later")).expect("sent");
        fake.wake(3);
        assert_eq!(asking.join().expect("answered"), Reply::Context(5));
        assert_eq!(receiving.join().expect("received").tag, 9);
    });
    expect_numbered(&b, a.tid(), 0..100);
    fake.logged("the order", |_, said| {
        matches!(said, ToDaemon::Message(m) if m.tag == -1).then_some(())
    });
}

/// A request that is open at a migration is answered after it.
#[test]
fn open_request_is_answered_after_migration() {
    let fake = Fake::start();
    let task = fake.join();
    thread::scope(|scope| {
        let asking = scope.spawn(|| task.request(Request::Config));
        let id = fake.asked("the question", |what| *what == Request::Config);
        fake.quiesce(task.tid(), 4);
        fake.has_let_go(task.tid(), 4);
        fake.reply(task.tid(), id, Reply::Done);
        assert!(!asking.is_finished());
        fake.wake(4);
        assert_eq!(asking.join().expect("answered"), Reply::Done);
    });
}

/// The watermarks of a quiesced task report how far each link has sent.
#[test]
fn watermarks_report_sent_fragments() {
    let fake = Fake::start();
    let (a, b, c) = (fake.join(), fake.join(), fake.join());
    (0..3).for_each(|tag| a.send(message(b.tid(), tag, "x")).expect("sent"));
    c.send(message(a.tid(), 1, "only heard")).expect("sent");
    next(&a);
    fake.quiesce(a.tid(), 5);
    let marks = fake.logged("the marks", |_, said| match said {
        ToDaemon::Quiesced { marks, .. } => Some(marks.clone()),
        _ => None,
    });
    assert_eq!(
        marks,
        [LinkMark {
            peer: b.tid(),
            end: 4
        }]
    );
    fake.wake(5);
}

/// A redirect that is written into the memory of a quiesced task makes it wait for another
/// migration's token.
#[test]
fn redirect_in_memory_changes_awaited_migration() {
    let fake = Fake::start();
    let task = fake.join();
    fake.quiesce(task.tid(), 8);
    let place = fake.logged("where it looks", |_, said| match said {
        ToDaemon::Quiesced { redirect_at, .. } => Some(*redirect_at),
        _ => None,
    });
    assert_eq!(place.pid, std::process::id().cast_signed());
    fake.has_let_go(task.tid(), 8);
    let redirect = Redirect {
        migration: MigrationId(9),
        tokens: vec![fake.token(9)],
    };
    let memory = std::fs::OpenOptions::new()
        .write(true)
        .open("/proc/self/mem")
        .expect("ours");
    memory
        .write_all_at(&redirect.in_memory().expect("it fits"), place.at)
        .expect("mapped");
    fake.wake(9);
    until("the return", || task.socket_fd());
    let claim = fake.net().hellos.last().map(|hello| hello.claim.clone());
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
    let fake = Fake::start();
    let (a, b) = (fake.join(), fake.join());
    fake.stall(a.tid(), true);
    thread::scope(|scope| {
        let sending = scope.spawn(|| send_numbered(&a, b.tid(), 0..400));
        until("a full socket", || {
            a.look(|core| core.outbox.backlog() > 0)
                .filter(|full| *full)
        });
        fake.quiesce(a.tid(), 6);
        // The migration does not block the sender.
        sending.join().expect("sent");
        fake.stall(a.tid(), false);
        fake.has_let_go(a.tid(), 6);
        assert!(a.look(|core| core.outbox.is_empty()).expect("own process"));
        fake.wake(6);
    });
    expect_numbered(&b, a.tid(), 0..400);
}

/// A token of another migration and a malformed token are ignored.
#[test]
fn foreign_and_malformed_tokens_are_ignored() {
    let fake = Fake::start();
    let task = fake.join();
    fake.quiesce(task.tid(), 7);
    fake.has_let_go(task.tid(), 7);
    fake.wake_with(7, MigrationId(6), fake.socket());
    let greeted = fake.net().hellos.len();
    std::fs::write(fake.dir.path().join("nowhere"), b"\xff\xff\xff").expect("written");
    // The task polls for tokens every millisecond. 100 waits of 1 ms in the same process show that
    // it polled meanwhile.
    for _ in 0..100 {
        task.inbox_wait(
            Some(std::time::Instant::now() + std::time::Duration::from_millis(1)),
            &mut |_| None::<()>,
        )
        .expect("connected");
    }
    assert_eq!(fake.net().hellos.len(), greeted);
    fake.wake(7);
    until("the return", || task.socket_fd());
}

/// If the daemon refuses a migrated task, its calls fail with the reason.
#[test]
fn refusal_after_migration_is_reported() {
    let fake = Fake::start();
    let task = fake.join();
    fake.quiesce(task.tid(), 8);
    fake.has_let_go(task.tid(), 8);
    fake.net().refuse = Some("no such move".into());
    fake.wake(8);
    assert_eq!(
        task.inbox_wait(None, &mut |_| None::<()>),
        Err(PvmError::SysErr)
    );
    assert!(
        task.why_lost().contains("no such move"),
        "{}",
        task.why_lost()
    );
}

/// An exit during a migration waits for its end.
#[test]
fn exit_waits_for_migration() {
    let fake = Fake::start();
    let (a, b) = (fake.join(), fake.join());
    fake.quiesce(a.tid(), 9);
    fake.has_let_go(a.tid(), 9);
    thread::scope(|scope| {
        send_numbered(&a, b.tid(), 0..200);
        let leaving = scope.spawn(|| a.exit());
        fake.wake(9);
        leaving.join().expect("left").expect("left in good order");
    });
    expect_numbered(&b, a.tid(), 0..200);
}

/// After a peer's migration lost fragments are sent again.
#[test]
fn migrated_peer_is_probed() {
    let fake = Fake::start();
    let (a, b) = (fake.join(), fake.join());
    fake.net().lossy = true;
    a.send(message(b.tid(), 1, "lost on the way"))
        .expect("sent");
    fake.net().lossy = false;
    fake.tell(a.tid(), ToTask::PeerMoved { tid: b.tid() });
    assert_eq!(next(&b).tag, 1);
    assert!(
        b.inbox_try(&mut |inbox: &mut Inbox| inbox.get(0).map(|_| ()))
            .is_none()
    );
}
