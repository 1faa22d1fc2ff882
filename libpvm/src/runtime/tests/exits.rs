//! Tests of refused enrollment, exits, daemons that die or violate the protocol, and forks.
#![allow(unsafe_code)] // A test of fork must fork.

use super::fake::FakeDaemon;
use super::{
    recv_and_check_numbered, send_numbered, wait_for_next_message, wait_until, xdr_message,
};
use crate::error::EnrollError;
use crate::inbox::Inbox;
use crate::runtime::{EnrollOptions, Runtime};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, fork};
use sempa_proto::frame::encode_control;
use sempa_proto::link::WINDOW_BYTES_MAX;
use sempa_proto::task::{Claim, OnDaemonExit, Reply, Request, SendWatermark, ToDaemon, ToTask};
use sempa_proto::{PvmError, Tid};
use std::io::Write;
use std::os::unix::net::UnixListener;
use std::thread;

/// The error for a missing daemon tells the user what to do.
#[test]
fn missing_daemon_error_says_what_to_do() {
    let dir = tempfile::TempDir::new().expect("a directory");
    let options_for = |name: &str| EnrollOptions {
        socket: dir.path().join(name),
        claim: Claim::NotSpawned,
        program: "x".into(),
        on_daemon_exit: OnDaemonExit::FailCalls,
        has_automatic_routes: false,
    };
    let missing_error = Runtime::connect(options_for("missing")).expect_err("nobody there");
    assert!(matches!(missing_error, EnrollError::NoDaemon { .. }));
    assert!(
        missing_error
            .to_string()
            .contains("start a virtual machine"),
        "{missing_error}"
    );
    drop(UnixListener::bind(dir.path().join("stale")).expect("a socket"));
    assert!(matches!(
        Runtime::connect(options_for("stale")),
        Err(EnrollError::NoDaemon { .. })
    ));
}

#[test]
fn refusal_reason_is_returned() {
    let fake = FakeDaemon::start();
    fake.state().refusal_reason = Some("the virtual machine is stopping".into());
    let refusal_error = Runtime::connect(fake.enroll_options()).expect_err("refused");
    assert!(
        matches!(&refusal_error, EnrollError::Refused(why) if why == "the virtual machine is stopping")
    );
}

/// The task receives a refusal even if the daemon does not read the hello.
#[test]
fn refusal_before_hello_is_understood() {
    let dir = tempfile::TempDir::new().expect("a directory");
    let socket = dir.path().join("s");
    let listener = UnixListener::bind(&socket).expect("a socket");
    let server = thread::spawn(move || {
        let refusal_frame = encode_control(&ToTask::Refused {
            reason: "not you".into(),
        })
        .expect("small");
        (0..100).for_each(|_| {
            listener
                .accept()
                .expect("a caller")
                .0
                .write_all(&refusal_frame)
                .expect("written")
        });
    });
    for _ in 0..100 {
        let options = EnrollOptions {
            socket: socket.clone(),
            claim: Claim::NotSpawned,
            program: "x".into(),
            on_daemon_exit: OnDaemonExit::FailCalls,
            has_automatic_routes: false,
        };
        let error = Runtime::connect(options).expect_err("refused");
        assert!(
            matches!(&error, EnrollError::Refused(why) if why == "not you"),
            "{error}"
        );
    }
    server.join().expect("served");
}

/// A listener with another protocol or protocol version is rejected with
/// [`EnrollError::VersionMismatch`]. A listener that sends nothing is rejected with another error.
#[test]
fn listener_of_other_protocol_is_rejected() {
    for (answer, is_version_mismatch) in [
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
            claim: Claim::NotSpawned,
            program: "x".into(),
            on_daemon_exit: OnDaemonExit::FailCalls,
            has_automatic_routes: false,
        });
        server.join().expect("served");
        let error = error.expect_err("no daemon");
        assert_eq!(
            matches!(error, EnrollError::VersionMismatch { .. }),
            is_version_mismatch,
            "{error}"
        );
    }
}

/// The hello contains process id, program name and claim.
#[test]
fn hello_identifies_process() {
    let fake = FakeDaemon::start();
    let options = EnrollOptions {
        claim: Claim::Spawned { spawn_token: 31 },
        ..fake.enroll_options()
    };
    let task = Runtime::connect(options).expect("welcome");
    assert!(task.was_spawned());
    let state = fake.state();
    let hello = state.hellos.last().expect("greeted");
    assert_eq!(
        (hello.namespace_pid as u32, hello.program.as_str()),
        (std::process::id(), "test")
    );
    assert_eq!(hello.claim, Claim::Spawned { spawn_token: 31 });
}

/// The death of the daemon ends all waits. Messages that have arrived can still be received.
#[test]
fn daemon_death_ends_waits_and_keeps_messages() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    b.send(xdr_message(a.tid(), 1, "kept")).expect("sent");
    wait_until("the message", || {
        a.check_inbox(&mut |inbox: &mut Inbox| inbox.get(0).map(|_| ()))
    });
    thread::scope(|scope| {
        let request_thread = scope.spawn(|| a.request_and_wait(Request::Config));
        let receive_thread = scope.spawn(|| {
            a.wait_for_inbox(None, &mut |inbox: &mut Inbox| {
                inbox.take_first(|m| m.tag == 2)
            })
        });
        fake.wait_for_request("the question", |request| *request == Request::Config);
        fake.disconnect(a.tid());
        assert!(matches!(
            request_thread.join().expect("ended"),
            Reply::Failed {
                error: PvmError::SysErr,
                ..
            }
        ));
        assert_eq!(receive_thread.join().expect("ended"), Err(PvmError::SysErr));
    });
    assert!(!a.is_connected());
    assert_eq!(wait_for_next_message(&a).tag, 1);
    assert_eq!(a.send(xdr_message(b.tid(), 1, "")), Err(PvmError::SysErr));
    assert!(matches!(
        a.request_and_wait(Request::Config),
        Reply::Failed {
            error: PvmError::SysErr,
            ..
        }
    ));
    assert_eq!(a.exit(), Err(PvmError::SysErr));
    assert!(a.lost_reason().contains("daemon"), "{}", a.lost_reason());
}

/// The death of the daemon ends a send that waits for the socket.
#[test]
fn daemon_death_ends_blocked_send() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.set_stalled(a.tid(), true);
    thread::scope(|scope| {
        let send_thread =
            scope.spawn(|| a.send(xdr_message(b.tid(), 1, vec![0; WINDOW_BYTES_MAX])));
        wait_until("a full socket", || {
            a.with_core(|core| core.outbox.backlog_bytes() > 0)
                .filter(|is_full| *is_full)
        });
        fake.disconnect(a.tid());
        assert_eq!(send_thread.join().expect("ended"), Err(PvmError::SysErr));
    });
    fake.set_stalled(a.tid(), false);
}

/// A malformed frame from the daemon ends the connection with a reason that the task reports.
#[test]
fn malformed_frames_end_connection() {
    let malformed_frames: [&[u8]; 4] = [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff\xff\xff\xff",
        b"\x03\0\0\0\0\xff\xff",
        b"\x03\0\0\0\x01ab",
    ];
    for bytes in malformed_frames {
        let fake = FakeDaemon::start();
        let task = fake.enroll();
        fake.send_raw(task.tid(), bytes.to_vec());
        assert_eq!(
            task.wait_for_inbox(None, &mut |_| None::<()>),
            Err(PvmError::SysErr)
        );
        assert!(
            task.lost_reason().contains("cannot be decoded"),
            "{}",
            task.lost_reason()
        );
    }
}

/// Replies without a request and notices about unknown tasks have no effect.
#[test]
fn stray_control_frames_are_ignored() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.send_reply(a.tid(), sempa_proto::RequestId(99), Reply::Done);
    fake.send_control(a.tid(), ToTask::PeerGone { tid: a.tid() });
    fake.send_control(
        a.tid(),
        ToTask::PeerMigrated {
            tid: Tid::from_raw(0x40077),
        },
    );
    b.send(xdr_message(a.tid(), 4, "good")).expect("sent");
    assert_eq!(wait_for_next_message(&a).tag, 4);
}

/// An exit writes all sent messages before it sends the exit request.
#[test]
fn exit_flushes_all_messages_first() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    // The receiver acknowledges no fragment. All fragments are therefore sent only if the exit
    // disables the window.
    fake.send_quiesce(b.tid(), 1);
    fake.wait_until_quiesced(b.tid(), 1);
    send_numbered(&a, b.tid(), 0..1000);
    a.send(xdr_message(b.tid(), 2, vec![7; 3 * WINDOW_BYTES_MAX]))
        .expect("sent");
    let end_seq = a
        .with_core(|core| core.send_watermarks())
        .expect("own process")[0]
        .end_seq;
    a.exit().expect("left");
    let watermarks_at_exit =
        fake.wait_for_log("leaving", |_, control_message| match control_message {
            ToDaemon::Request {
                request:
                    Request::Exit {
                        watermarks: watermarks_at_exit,
                    },
                ..
            } => Some(watermarks_at_exit.clone()),
            _ => None,
        });
    assert_eq!(
        watermarks_at_exit,
        [SendWatermark {
            peer: b.tid(),
            end_seq
        }]
    );
    wait_until("the closed socket", || {
        fake.is_closed(a.tid()).then_some(())
    });
    assert!(!a.is_connected() && a.socket_fd().is_none());
    fake.write_resume_token(1);
    recv_and_check_numbered(&b, a.tid(), 0..1000);
    assert_eq!(wait_for_next_message(&b).body.len(), 3 * WINDOW_BYTES_MAX);
}

#[test]
fn messages_can_be_received_after_exit() {
    let fake = FakeDaemon::start();
    let task = fake.enroll();
    task.send(xdr_message(task.tid(), 3, "")).expect("sent");
    task.exit().expect("left");
    assert_eq!(wait_for_next_message(&task).tag, 3);
    assert_eq!(task.exit(), Err(PvmError::SysErr));
}

#[test]
fn dropping_last_clone_flushes_messages() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    fake.send_quiesce(b.tid(), 1);
    fake.wait_until_quiesced(b.tid(), 1);
    let tid = a.tid();
    a.send(xdr_message(b.tid(), 2, vec![7; 3 * WINDOW_BYTES_MAX]))
        .expect("sent");
    drop(a.clone());
    assert!(!fake.is_closed(tid));
    drop(a);
    wait_until("the closed socket", || fake.is_closed(tid).then_some(()));
    fake.write_resume_token(1);
    assert_eq!(wait_for_next_message(&b).body.len(), 3 * WINDOW_BYTES_MAX);
}

/// Runs `child` in a forked process, waits for the process, and checks that `child` returned true.
fn check_in_forked_child(child: impl FnOnce() -> bool) {
    // SAFETY: the child ends with `_exit`. The C library ensures that the allocator and the locks
    // of std are usable in the child.
    match unsafe { fork() }.expect("forked") {
        ForkResult::Child => {
            let is_successful =
                std::panic::catch_unwind(std::panic::AssertUnwindSafe(child)).unwrap_or(false);
            // SAFETY: `_exit` has no preconditions.
            unsafe { libc::_exit(if is_successful { 0 } else { 1 }) }
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

/// A forked child is not a task, but it can enroll as a new task.
#[test]
fn forked_child_can_enroll_as_new_task() {
    let fake = FakeDaemon::start();
    let (a, b) = (fake.enroll(), fake.enroll());
    let fd = a.socket_fd().expect("connected");
    check_in_forked_child(|| {
        let fd_flags_result = nix::fcntl::fcntl(
            // SAFETY: the call only checks whether the number is an open descriptor.
            unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) },
            nix::fcntl::FcntlArg::F_GETFD,
        );
        let is_disconnected =
            fd_flags_result.is_err() && !a.is_connected() && a.socket_fd().is_none();
        let are_calls_refused = a.send(xdr_message(b.tid(), 1, "")) == Err(PvmError::SysErr)
            && matches!(
                a.request_and_wait(Request::Config),
                Reply::Failed {
                    error: PvmError::SysErr,
                    ..
                }
            )
            && a.wait_for_inbox(None, &mut |_| None::<()>) == Err(PvmError::SysErr)
            && a.exit() == Err(PvmError::SysErr);
        drop(a.clone());
        let new_task = fake.enroll();
        let has_new_tid = new_task.tid() != a.tid();
        new_task
            .send(xdr_message(b.tid(), 7, "from the child"))
            .expect("sent");
        is_disconnected && are_calls_refused && has_new_tid && new_task.exit().is_ok()
    });
    assert_eq!(wait_for_next_message(&b).tag, 7);
    a.send(xdr_message(b.tid(), 8, "the parent goes on"))
        .expect("sent");
    assert_eq!(wait_for_next_message(&b).tag, 8);
}

/// Messages are received even if their sender ends without an exit call or destructors.
#[test]
fn sent_messages_survive_sudden_exit() {
    let fake = FakeDaemon::start();
    let b = fake.enroll();
    check_in_forked_child(|| {
        let child_task = fake.enroll();
        send_numbered(&child_task, b.tid(), 0..100);
        // The process ends at this point without an exit call or destructors.
        true
    });
    let sender = fake
        .state()
        .tasks
        .keys()
        .copied()
        .find(|tid| *tid != b.tid())
        .expect("seated");
    recv_and_check_numbered(&b, sender, 0..100);
}

/// A process that ends normally without an exit call still writes all its messages, even if the
/// messages exceed the window.
#[test]
fn process_exit_flushes_beyond_window() {
    let fake = FakeDaemon::start();
    let b = fake.enroll();
    fake.send_quiesce(b.tid(), 1);
    fake.wait_until_quiesced(b.tid(), 1);
    check_in_forked_child(|| {
        let child_task = fake.enroll();
        child_task
            .send(xdr_message(b.tid(), 2, vec![7; 3 * WINDOW_BYTES_MAX]))
            .expect("sent");
        std::mem::forget(child_task);
        // SAFETY: `exit` runs the exit hooks, and no other thread of this child calls `exit`.
        unsafe { libc::exit(0) }
    });
    fake.write_resume_token(1);
    assert_eq!(wait_for_next_message(&b).body.len(), 3 * WINDOW_BYTES_MAX);
}
