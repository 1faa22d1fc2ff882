//! Refusals, exits, a daemon that dies or talks nonsense, and forks.
#![allow(unsafe_code)] // A test of fork has to fork.

use super::fake::Fake;
use super::{expect_numbered, message, next, send_numbered, until};
use crate::error::EnrollError;
use crate::inbox::Inbox;
use crate::runtime::{EnrollOptions, Runtime};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use sempa_proto::frame::encode_control;
use sempa_proto::link::WINDOW_BYTES_MAX;
use sempa_proto::task::{AtEnd, Claim, LinkMark, Reply, Request, ToDaemon, ToTask};
use sempa_proto::{PvmError, Tid};
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::thread;

#[test]
fn no_daemon_is_said_with_what_to_do() {
    let dir = tempfile::TempDir::new().expect("a directory");
    let options = |name: &str| EnrollOptions {
        socket: dir.path().join(name),
        claim: Claim::New,
        program: "x".into(),
        at_end: AtEnd::Told,
    };
    let missing = Runtime::connect(options("missing")).expect_err("nobody there");
    assert!(matches!(missing, EnrollError::NoDaemon { .. }));
    assert!(
        missing.to_string().contains("start a virtual machine"),
        "{missing}"
    );
    drop(UnixListener::bind(dir.path().join("stale")).expect("a socket"));
    assert!(matches!(
        Runtime::connect(options("stale")),
        Err(EnrollError::NoDaemon { .. })
    ));
}

#[test]
fn a_refusal_is_handed_on() {
    let fake = Fake::start();
    fake.net().refuse = Some("the virtual machine is stopping".into());
    let refused = Runtime::connect(fake.options()).expect_err("refused");
    assert!(
        matches!(&refused, EnrollError::Refused(why) if why == "the virtual machine is stopping")
    );
}

#[test]
fn a_daemon_that_refuses_without_listening_is_understood() {
    let dir = tempfile::TempDir::new().expect("a directory");
    let socket = dir.path().join("s");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let server = thread::spawn(move || {
        let no = encode_control(&ToTask::Refused {
            reason: "not you".into(),
        })
        .expect("small");
        (0..100).for_each(|_| {
            listener
                .accept()
                .expect("a caller")
                .0
                .write_all(&no)
                .expect("written")
        });
    });
    for _ in 0..100 {
        let options = EnrollOptions {
            socket: socket.clone(),
            claim: Claim::New,
            program: "x".into(),
            at_end: AtEnd::Told,
        };
        let error = Runtime::connect(options).expect_err("refused");
        assert!(
            matches!(&error, EnrollError::Refused(why) if why == "not you"),
            "{error}"
        );
    }
    server.join().expect("served");
}

#[test]
fn a_listener_that_is_no_daemon_is_not_believed() {
    for (answer, version) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], true),
        (b"\x01\0\0\0\0", true),
        (b"", false),
    ] {
        let dir = tempfile::TempDir::new().expect("a directory");
        let socket = dir.path().join("s");
        let listener = UnixListener::bind(&socket).expect("a socket");
        let server = thread::spawn(move || {
            listener
                .accept()
                .expect("a caller")
                .0
                .write_all(answer)
                .expect("written")
        });
        let error = Runtime::connect(EnrollOptions {
            socket,
            claim: Claim::New,
            program: "x".into(),
            at_end: AtEnd::Told,
        });
        server.join().expect("served");
        let error = error.expect_err("no daemon");
        assert_eq!(
            matches!(error, EnrollError::Version { .. }),
            version,
            "{error}"
        );
    }
}

#[test]
fn the_hello_tells_who_comes() {
    let fake = Fake::start();
    let options = EnrollOptions {
        claim: Claim::Spawned { epid: 31 },
        ..fake.options()
    };
    let task = Runtime::connect(options).expect("welcome");
    assert!(task.spawned());
    let net = fake.net();
    let hello = net.hellos.last().expect("greeted");
    assert_eq!(
        (hello.pid as u32, hello.program.as_str()),
        (std::process::id(), "test")
    );
    assert_eq!(hello.claim, Claim::Spawned { epid: 31 });
}

#[test]
fn when_the_daemon_dies_every_wait_ends_and_arrived_messages_stay() {
    let fake = Fake::start();
    let (a, b) = (fake.join(), fake.join());
    b.send(message(a.tid(), 1, "kept")).expect("sent");
    until("the message", || {
        a.inbox_try(&mut |inbox: &mut Inbox| inbox.get(0).map(|_| ()))
    });
    thread::scope(|scope| {
        let asking = scope.spawn(|| a.request(Request::Config));
        let receiving = scope.spawn(|| {
            a.inbox_wait(None, &mut |inbox: &mut Inbox| {
                inbox.take_first(|m| m.tag == 2)
            })
        });
        fake.asked("the question", |what| *what == Request::Config);
        fake.hang_up(a.tid());
        assert!(matches!(
            asking.join().expect("ended"),
            Reply::Failed {
                error: PvmError::SysErr,
                ..
            }
        ));
        assert_eq!(receiving.join().expect("ended"), Err(PvmError::SysErr));
    });
    assert!(!a.is_connected());
    assert_eq!(next(&a).tag, 1);
    assert_eq!(a.send(message(b.tid(), 1, "")), Err(PvmError::SysErr));
    assert!(matches!(
        a.request(Request::Config),
        Reply::Failed {
            error: PvmError::SysErr,
            ..
        }
    ));
    assert_eq!(a.exit(), Err(PvmError::SysErr));
    assert!(a.why_lost().contains("daemon"), "{}", a.why_lost());
}

#[test]
fn a_sender_that_waits_for_the_socket_learns_that_the_daemon_is_dead() {
    let fake = Fake::start();
    let (a, b) = (fake.join(), fake.join());
    fake.stall(a.tid(), true);
    thread::scope(|scope| {
        let sending = scope.spawn(|| a.send(message(b.tid(), 1, vec![0; WINDOW_BYTES_MAX])));
        until("a full socket", || {
            a.look(|core| core.outbox.backlog() > 0)
                .filter(|full| *full)
        });
        fake.hang_up(a.tid());
        assert_eq!(sending.join().expect("ended"), Err(PvmError::SysErr));
    });
    fake.stall(a.tid(), false);
}

#[test]
fn nonsense_from_the_daemon_ends_the_connection_with_a_reason() {
    let nonsense: [&[u8]; 4] = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x03\0\0\0\0\xff\xff",
        b"\x03\0\0\0\x01ab",
    ];
    for bytes in nonsense {
        let fake = Fake::start();
        let task = fake.join();
        fake.raw(task.tid(), bytes.to_vec());
        assert_eq!(
            task.inbox_wait(None, &mut |_| None::<()>),
            Err(PvmError::SysErr)
        );
        assert!(
            task.why_lost().contains("cannot be understood"),
            "{}",
            task.why_lost()
        );
    }
}

#[test]
fn answers_to_nobody_and_frames_for_others_change_nothing() {
    let fake = Fake::start();
    let (a, b) = (fake.join(), fake.join());
    fake.reply(a.tid(), sempa_proto::RequestId(99), Reply::Done);
    fake.tell(a.tid(), ToTask::PeerGone { tid: a.tid() });
    fake.tell(
        a.tid(),
        ToTask::PeerMoved {
            tid: Tid::from_raw(0x40077),
        },
    );
    b.send(message(a.tid(), 4, "good")).expect("sent");
    assert_eq!(next(&a).tag, 4);
}

#[test]
fn leaving_hands_over_all_that_was_sent_before_it_says_so() {
    let fake = Fake::start();
    let (a, b) = (fake.join(), fake.join());
    // Nothing is acknowledged: only a lifted window lets all of it out.
    fake.quiesce(b.tid(), 1);
    fake.has_let_go(b.tid(), 1);
    send_numbered(&a, b.tid(), 0..1000);
    a.send(message(b.tid(), 2, vec![7; 3 * WINDOW_BYTES_MAX]))
        .expect("sent");
    let end = a.look(|core| core.marks()).expect("own process")[0].end;
    a.exit().expect("left");
    let marks = fake.logged("leaving", |_, said| match said {
        ToDaemon::Request {
            what: Request::Exit { marks },
            ..
        } => Some(marks.clone()),
        _ => None,
    });
    assert_eq!(marks, [LinkMark { peer: b.tid(), end }]);
    until("the closed socket", || {
        fake.is_closed(a.tid()).then_some(())
    });
    assert!(!a.is_connected() && a.socket_fd().is_none());
    fake.wake(1);
    expect_numbered(&b, a.tid(), 0..1000);
    assert_eq!(next(&b).body.len(), 3 * WINDOW_BYTES_MAX);
}

#[test]
fn arrived_messages_can_be_received_after_leaving() {
    let fake = Fake::start();
    let task = fake.join();
    task.send(message(task.tid(), 3, "")).expect("sent");
    task.exit().expect("left");
    assert_eq!(next(&task).tag, 3);
    assert_eq!(task.exit(), Err(PvmError::SysErr));
}

#[test]
fn the_last_clone_hands_over_what_was_sent() {
    let fake = Fake::start();
    let (a, b) = (fake.join(), fake.join());
    fake.quiesce(b.tid(), 1);
    fake.has_let_go(b.tid(), 1);
    let tid = a.tid();
    a.send(message(b.tid(), 2, vec![7; 3 * WINDOW_BYTES_MAX]))
        .expect("sent");
    drop(a.clone());
    assert!(!fake.is_closed(tid));
    drop(a);
    until("the closed socket", || fake.is_closed(tid).then_some(()));
    fake.wake(1);
    assert_eq!(next(&b).body.len(), 3 * WINDOW_BYTES_MAX);
}

/// Runs `child` in a forked process; its answer is the exit status.
fn in_child(child: impl FnOnce() -> bool) {
    // SAFETY: the child ends by `_exit`; what it uses (allocator, std's own locks) is made fit for it by the C library.
    match unsafe { fork() }.expect("forked") {
        ForkResult::Child => {
            let good =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
            // SAFETY: `_exit` has no preconditions.
            unsafe { libc::_exit(if good { 0 } else { 1 }) }
        }
        ForkResult::Parent { child } => {
            assert_eq!(
                waitpid(child, None).expect("waited"),
                WaitStatus::Exited(child, 0),
                "the child's own checks"
            );
        }
    }
}

#[test]
fn a_forked_child_is_no_task_and_may_become_one_of_its_own() {
    let fake = Fake::start();
    let (a, b) = (fake.join(), fake.join());
    let fd = a.socket_fd().expect("connected");
    in_child(|| {
        let closed = nix::fcntl::fcntl(
            // SAFETY: only asks whether the number is open.
            unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) },
            nix::fcntl::FcntlArg::F_GETFD,
        );
        let dead = closed.is_err() && !a.is_connected() && a.socket_fd().is_none();
        let refused = a.send(message(b.tid(), 1, "")) == Err(PvmError::SysErr)
            && matches!(
                a.request(Request::Config),
                Reply::Failed {
                    error: PvmError::SysErr,
                    ..
                }
            )
            && a.inbox_wait(None, &mut |_| None::<()>) == Err(PvmError::SysErr)
            && a.exit() == Err(PvmError::SysErr);
        drop(a.clone());
        let own = fake.join();
        let differs = own.tid() != a.tid();
        own.send(message(b.tid(), 7, "from the child"))
            .expect("sent");
        dead && refused && differs && own.exit().is_ok()
    });
    assert_eq!(next(&b).tag, 7);
    a.send(message(b.tid(), 8, "the parent goes on"))
        .expect("sent");
    assert_eq!(next(&b).tag, 8);
}

#[test]
fn what_was_sent_survives_a_sudden_end() {
    let fake = Fake::start();
    let b = fake.join();
    in_child(|| {
        let own = fake.join();
        send_numbered(&own, b.tid(), 0..100);
        // No exit, no destructor.
        true
    });
    let from = fake
        .net()
        .seats
        .keys()
        .copied()
        .find(|tid| *tid != b.tid())
        .expect("seated");
    expect_numbered(&b, from, 0..100);
}

#[test]
fn a_normal_end_without_leaving_hands_over_more_than_a_window() {
    let fake = Fake::start();
    let b = fake.join();
    fake.quiesce(b.tid(), 1);
    fake.has_let_go(b.tid(), 1);
    in_child(|| {
        let own = fake.join();
        own.send(message(b.tid(), 2, vec![7; 3 * WINDOW_BYTES_MAX]))
            .expect("sent");
        std::mem::forget(own);
        // SAFETY: `exit` runs the exit hooks; no other thread of this child is in one.
        unsafe { libc::exit(0) }
    });
    fake.wake(1);
    assert_eq!(next(&b).body.len(), 3 * WINDOW_BYTES_MAX);
}
