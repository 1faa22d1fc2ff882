//! A task lets go of its daemon and comes back while everything goes on.

use super::fake::Fake;
use super::{expect_numbered, message, next, send_numbered, until};
use crate::inbox::Inbox;
use sempa_proto::task::{Claim, LinkMark, Redirect, Reply, Request, ToDaemon, ToTask};
use sempa_proto::{HostId, MigrationId, PvmError};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

#[test]
fn a_task_lets_go_comes_back_and_keeps_its_id() {
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

#[test]
fn nothing_is_lost_doubled_or_out_of_order_when_talking_tasks_are_moved_again_and_again() {
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

#[test]
fn calls_go_on_in_memory_while_there_is_no_connection() {
    let fake = Fake::start();
    let (a, b) = (fake.join(), fake.join());
    fake.answer(|_, _| Some(Reply::Context(5)));
    fake.quiesce(a.tid(), 3);
    fake.has_let_go(a.tid(), 3);
    thread::scope(|scope| {
        // Sends return although nothing can leave.
        send_numbered(&a, b.tid(), 0..100);
        a.send(message(HostId::MASTER.daemon(), -1, "order"))
            .expect("kept");
        a.send(message(a.tid(), 8, "to myself")).expect("delivered");
        assert_eq!(next(&a).tag, 8);
        // A question and a receive wait, and are answered after the return.
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

#[test]
fn an_open_question_is_answered_after_the_move() {
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

#[test]
fn the_marks_say_how_far_each_link_has_sent() {
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

#[test]
fn a_library_that_has_let_go_finds_in_its_memory_that_it_is_to_wait_for_another_move() {
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

#[test]
fn what_was_queued_before_is_written_before_the_last_word() {
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
        // The sender is not held up by the move.
        sending.join().expect("sent");
        fake.stall(a.tid(), false);
        fake.has_let_go(a.tid(), 6);
        assert!(a.look(|core| core.outbox.is_empty()).expect("own process"));
        fake.wake(6);
    });
    expect_numbered(&b, a.tid(), 0..400);
}

#[test]
fn a_token_of_another_move_or_of_garbage_is_ignored() {
    let fake = Fake::start();
    let task = fake.join();
    fake.quiesce(task.tid(), 7);
    fake.has_let_go(task.tid(), 7);
    fake.wake_with(7, MigrationId(6), fake.socket());
    let greeted = fake.net().hellos.len();
    std::fs::write(fake.dir.path().join("nowhere"), b"\xff\xff\xff").expect("written");
    // A look at the tokens takes a millisecond; a hundred of the task's own clock ticks show that it looked.
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

#[test]
fn a_task_that_is_not_wanted_after_its_move_says_why() {
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

#[test]
fn leaving_waits_for_the_end_of_the_move() {
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

#[test]
fn a_moved_peer_is_asked_what_it_has() {
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
