//! Tests of spawned jobs: their environment, output and trace records.

use super::*;
use crate::session::job_output::{TAG_CLOSE_JOB_BASE, TAG_EVENTS, TAG_EXIT_BASE, TAG_TRACE_BASE};
use bytes::Bytes;
use libpvm::Vm;
use libpvm::spawn::TC_SIBLINGS;
use sempa_proto::frame::to_bytes;
use sempa_proto::message::CTX_TASK_CONTROL;
use sempa_proto::task::{NotifySubjects, Sink};

#[test]
fn exported_variables_reach_spawned_tasks() {
    let mut session = session();
    assert_eq!(run_successfully(&mut session, "export"), "PVM_EXPORT=\n");
    run_successfully(&mut session, "export COLOUR MISSING COLOUR");
    assert_eq!(
        run_successfully(&mut session, "export"),
        "PVM_EXPORT=COLOUR:MISSING\n"
    );
    run_successfully(&mut session, "setenv COLOUR blue");
    assert_eq!(run_successfully(&mut session, "setenv COLOUR"), "blue\n");
    run_successfully(&mut session, "spawn hello -v");
    run_successfully(&mut session, "unexport COLOUR");
    assert_eq!(
        run_successfully(&mut session, "export"),
        "PVM_EXPORT=MISSING\n"
    );
    let spawn_requests = session.vm.spawn_requests.borrow();
    let env: Vec<&[u8]> = spawn_requests[0].env.iter().map(Vec::as_slice).collect();
    assert_eq!(env, [&b"PVM_EXPORT=COLOUR:MISSING"[..], b"COLOUR=blue"]);
    assert_eq!(spawn_requests[0].args, [b"-v"]);
    assert_eq!(spawn_requests[0].output_sink, Sink::default());
}

#[test]
fn job_output_is_shown_until_end() {
    let mut session = session();
    assert_eq!(
        run_successfully(&mut session, "spawn -> hello"),
        "[1]\n1 successful\nt80001\n"
    );
    let sink = session.vm.spawn_requests.borrow()[0].output_sink;
    assert_eq!(sink.tid, CONSOLE);
    assert_eq!(run_successfully(&mut session, "jobs"), " 1: t80001\n");
    let shown_text = |session: &mut Session<FakeVm>, words: &[i32], bytes: &[u8]| {
        let shown_text = handle_message(session, &output_message(sink.tag, 0x80001, words, bytes));
        String::from_utf8(shown_text).expect("text")
    };
    assert_eq!(shown_text(&mut session, &[-1, 0], b""), "");
    assert_eq!(
        shown_text(&mut session, &[6], b"hello\n"),
        "[1:t80001] hello\n"
    );
    assert_eq!(
        shown_text(&mut session, &[0], b""),
        "[1:t80001] EOF\n[1] finished\n"
    );
    assert!(!as_session(&mut session).has_jobs());
    assert_eq!(run_successfully(&mut session, "jobs"), "");
}

/// `spawn ->FILE` refuses an existing file, and `spawn ->>FILE` accepts it.
#[test]
fn output_file_is_never_overwritten() {
    let path = std::env::temp_dir().join(format!("pvm-console-job-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let path_text = path.display().to_string();
    let mut session = session();
    assert_eq!(
        run_successfully(&mut session, &format!("spawn ->{path_text} hello")),
        "[1]\n1 successful\nt80001\n"
    );
    let tag = session.vm.spawn_requests.borrow()[0].output_sink.tag;
    assert_eq!(
        handle_message(&mut session, &output_message(tag, 0x80001, &[3], b"abc")),
        b""
    );
    assert_eq!(
        handle_message(&mut session, &output_message(tag, 0x80001, &[0], b"")),
        b"[1] finished\n"
    );
    assert_eq!(
        std::fs::read_to_string(&path).expect("written"),
        "[1:t80001] abc\n[1:t80001] EOF\n"
    );
    let second_outcome = run_line(&mut session, &format!("spawn ->{path_text} hello"));
    assert_eq!(
        second_outcome.refusal,
        Some(format!("{path_text}: File exists"))
    );
    run_successfully(&mut session, &format!("spawn ->>{path_text} hello"));
    std::fs::remove_file(&path).expect("ours");
}

fn exit_message(tid: i32) -> Message {
    output_message(TAG_EXIT_BASE + 1, tid, &[], b"")
}

/// Returns the event that a task was restarted from a checkpoint.
fn restart_event_message(tid: Tid) -> Message {
    let event = Event {
        number: 1,
        at: Micros(1),
        host: HostId::MASTER,
        kind: EventKind::Restarted {
            checkpoint: "c1".into(),
            job: tid,
            tasks: vec![(tid, HostId::MASTER)],
            why: "h2 was lost".into(),
        },
    };
    Message {
        body: to_bytes(&event).expect("small").into(),
        ..output_message(TAG_EVENTS, 0, &[], b"")
    }
}

/// A task that exits without the end of its output is lost.
#[test]
fn lost_task_ends_its_job() {
    let mut session = session();
    run_successfully(&mut session, "spawn -> hello");
    session.vm.requests.borrow_mut().clear();
    session
        .vm
        .exited_tasks
        .borrow_mut()
        .push(Tid::from_raw(0x80001));
    let shown_bytes = handle_message(&mut session, &exit_message(0x80001));
    assert_eq!(
        String::from_utf8_lossy(&shown_bytes),
        "[1:t80001] lost with its host: the last lines may be missing\n[1:t80001] EOF\n\
         [1] finished\n"
    );
    assert!(session.first_job_failure != 0);
}

/// The job of a lost task that rolls back continues after its restart, and ends with the task.
#[test]
fn job_that_rolls_back_is_not_lost() {
    let mut session = session();
    run_successfully(&mut session, "spawn -> hello");
    let tag = session.vm.spawn_requests.borrow()[0].output_sink.tag;
    let tid = Tid::from_raw(0x80001);
    session.vm.awaiting_tasks.borrow_mut().push(tid);
    let shown_bytes = handle_message(&mut session, &exit_message(0x80001));
    assert_eq!(
        String::from_utf8_lossy(&shown_bytes),
        "[1:t80001] waits for the restart of its job from the last checkpoint\n"
    );
    session.vm.awaiting_tasks.borrow_mut().clear();
    session.vm.requests.borrow_mut().clear();
    let event_message = restart_event_message(tid);
    assert_eq!(handle_message(&mut session, &event_message), b"");
    let requests = session.vm.requests.take();
    let watches = |r: &Request| matches!(r, Request::Notify(n) if n.subjects == NotifySubjects::TaskExit(vec![tid]));
    assert!(requests.iter().any(watches), "{requests:?}");
    assert!(as_session(&mut session).has_jobs() && session.first_job_failure == 0);
    let shown_bytes = handle_message(&mut session, &output_message(tag, 0x80001, &[0], b""));
    assert_eq!(
        String::from_utf8_lossy(&shown_bytes),
        "[1:t80001] EOF\n[1] finished\n"
    );
}

/// A rollback kills the tasks on the remaining hosts. The end of such a task is not the end of the
/// job.
#[test]
fn task_killed_for_rollback_does_not_end_its_job() {
    let mut session = session();
    run_successfully(&mut session, "spawn -> hello");
    let tag = session.vm.spawn_requests.borrow()[0].output_sink.tag;
    let tid = Tid::from_raw(0x80001);
    let end_message = output_message(tag, 0x80001, &[0], b"");
    session.vm.awaiting_tasks.borrow_mut().push(tid);
    let shown_bytes = handle_message(&mut session, &end_message);
    assert_eq!(
        String::from_utf8_lossy(&shown_bytes),
        "[1:t80001] waits for the restart of its job from the last checkpoint\n"
    );
    assert_eq!(handle_message(&mut session, &exit_message(0x80001)), b"");
    assert!(as_session(&mut session).has_jobs());
    session.vm.awaiting_tasks.borrow_mut().clear();
    assert_eq!(
        handle_message(&mut session, &restart_event_message(tid)),
        b""
    );
    let shown_bytes = handle_message(
        &mut session,
        &output_message(tag, 0x80001, &[6], b"again\n"),
    );
    assert_eq!(shown_bytes, b"[1:t80001] again\n");
    assert_eq!(
        handle_message(&mut session, &end_message),
        b"[1:t80001] EOF\n[1] finished\n"
    );
    assert!(session.first_job_failure == 0);
}

/// A console that handles the exit of a task only after the restart of its job continues with the
/// restarted task.
#[test]
fn restarted_task_is_not_lost_for_late_console() {
    let mut session = session();
    run_successfully(&mut session, "spawn -> hello");
    let tag = session.vm.spawn_requests.borrow()[0].output_sink.tag;
    handle_message(&mut session, &output_message(tag, 0x80001, &[4], b"half"));
    session.vm.requests.borrow_mut().clear();
    assert_eq!(
        handle_message(&mut session, &exit_message(0x80001)),
        b"[1:t80001] half\n"
    );
    let tids = vec![Tid::from_raw(0x80001)];
    let watches = |r: &Request| matches!(r, Request::Notify(n) if n.subjects == NotifySubjects::TaskExit(tids.clone()));
    let requests = session.vm.requests.take();
    assert!(requests.iter().any(watches), "{requests:?}");
    assert!(as_session(&mut session).has_jobs() && session.first_job_failure == 0);
    assert_eq!(
        handle_message(&mut session, &output_message(tag, 0x80001, &[0], b"")),
        b"[1:t80001] EOF\n[1] finished\n"
    );
}

#[test]
fn missing_program_error_gives_advice() {
    let mut session = session();
    let outcome = run_line(&mut session, "spawn -> nofile");
    assert_eq!(outcome.text, "[1]\n0 successful\nNo such file\n");
    assert!(outcome.failed && !as_session(&mut session).has_jobs());
    assert_eq!(outcome.errors.len(), 1);
    assert!(outcome.errors[0].starts_with("spawn nofile: it is not in the search path"));
    let debugger_outcome = run_line(&mut session, "spawn -? nofile");
    assert!(debugger_outcome.errors[0].starts_with("spawn nofile: the program, or the debugger"));
    let write_refusal = run_line(&mut session, "spawn ->/nonexistent/file hello").refusal;
    assert_eq!(
        write_refusal.as_deref(),
        Some("/nonexistent/file: No such file or directory")
    );
}

#[test]
fn spawned_tasks_receive_siblings() {
    let mut session = session();
    run_successfully(&mut session, "spawn hello");
    let messages = session.vm.sent_messages.borrow();
    assert_eq!(messages.len(), 1);
    assert_eq!(
        (messages[0].dst, messages[0].ctx, messages[0].tag),
        (Tid::from_raw(0x80001), CTX_TASK_CONTROL, TC_SIBLINGS)
    );
    let mut body = Vm::unpack(&messages[0]).expect("readable");
    assert_eq!((body.read_int(), body.read_int()), (Ok(1), Ok(0x80001)));
}

/// The console accepts job output only from daemons. A message from a task is ignored, even if the
/// message has the tag of a job.
#[test]
fn forged_output_is_ignored() {
    let mut session = session();
    run_successfully(&mut session, "spawn -> hello");
    let tag = session.vm.spawn_requests.borrow()[0].output_sink.tag;
    let forged_message = Message {
        src: Tid::from_raw(0x40002),
        ..output_message(tag, 0x80001, &[6], b"forged")
    };
    assert_eq!(handle_message(&mut session, &forged_message), b"");
}

/// The request to spawn a traced job contains the event mask, the trace settings and the
/// destination of records. The console shows records about the hosts.
#[test]
fn traced_spawn_requests_records() {
    let mut session = session();
    run_successfully(&mut session, "trace buf 100");
    run_successfully(&mut session, "trace opt count");
    run_successfully(&mut session, "trace - *");
    run_successfully(&mut session, "trace + addhosts");
    let shown_text = run_successfully(&mut session, "spawn -@ hello");
    assert!(
        shown_text.starts_with("[1]\n[T1:t40001] /*\n[T1:t40001]  * \"Creation Date\" \""),
        "{shown_text}"
    );
    assert!(
        shown_text.contains("\n[T1:tc0000] \"host_add(0)\" { "),
        "{shown_text}"
    );
    assert!(
        shown_text.ends_with(", 1000 };;\n1 successful\nt80001\n"),
        "{shown_text}"
    );
    assert_eq!(run_successfully(&mut session, "jobs"), "T1: t80001\n");
    let spawn_requests = session.vm.spawn_requests.borrow();
    assert!(
        spawn_requests[0].env[0].starts_with(b"PVMTMASK=A@@@"),
        "addhosts"
    );
    assert_eq!(
        spawn_requests[0].env[0]["PVMTMASK=".len() + 75 / 4],
        b'@' + 8,
        "newtask is always in it"
    );
    assert_eq!(
        spawn_requests[0].env[1..3],
        [&b"PVMTRCBUF=100"[..], b"PVMTRCOPT=3"]
    );
    assert_eq!(
        (
            spawn_requests[0].output_sink.tid,
            spawn_requests[0].trace_sink.tid
        ),
        (CONSOLE, CONSOLE)
    );
    assert_eq!(spawn_requests[0].trace_sink.tag, TAG_TRACE_BASE + 1);
}

/// The console shows the records that tasks send, and adds records about the start, the output and
/// the end of each task. To learn that the last records have arrived, it requests a notification of
/// the exit; it lists no tasks and sends nothing to itself.
#[test]
fn traced_job_shows_records() {
    let mut session = session();
    run_successfully(&mut session, "spawn -@ hello");
    let (output_tag, trace_tag) = {
        let spawn_requests = session.vm.spawn_requests.borrow();
        (
            spawn_requests[0].output_sink.tag,
            spawn_requests[0].trace_sink.tag,
        )
    };
    let mut shown_text =
        |message: &Message| String::from_utf8(handle_message(&mut session, message)).expect("text");
    let connect_text = shown_text(&output_message(output_tag, 0x80001, &[-2, 0], b""));
    assert!(
        connect_text
            .starts_with("[1] libpvmtrc: Task TID=0x80001 Connected to Console\n[T1:t80001] \n"),
        "{connect_text}"
    );
    assert!(
        connect_text.ends_with(" 524289, [9] { \"CREATION\" } };;\n"),
        "{connect_text}"
    );
    let mut body = Packer::new(Encoding::Xdr);
    body.pack_items([-5, 75]).pack_str(b"newtask").pack_int(-6);
    let record_message = Message {
        src: Tid::from_raw(0x80001),
        body: body.finish(),
        ..output_message(trace_tag, 0, &[], b"")
    };
    assert_eq!(
        shown_text(&record_message),
        "[T1:t80001] \n[T1:t80001] #1150: \"newtask(0)\"\n[T1:t80001] {\n[T1:t80001] };;\n[T1:t80001] \n\
         [T1:t80001] \"newtask(0)\" {  };;\n"
    );
    let malformed_message = Message {
        body: Bytes::from_static(&[0; 4]),
        ..record_message
    };
    assert!(
        shown_text(&malformed_message).starts_with("[1] trace records of t80001 cannot be read: ")
    );
    let output_text = shown_text(&output_message(output_tag, 0x80001, &[6], b"hello\n"));
    assert!(
        output_text.ends_with(", [6] { \"hello\" } };;\n"),
        "the output is in the trace and not shown: {output_text}"
    );
    let end_text = shown_text(&output_message(output_tag, 0x80001, &[0], b""));
    assert!(
        end_text.ends_with("{ \"GOTEOF\" } };;\n[1] libpvmtrc: Trace File Complete\n"),
        "{end_text}"
    );
    let close_tag = TAG_CLOSE_JOB_BASE + 1;
    let is_exit_request = |r: &Request| matches!(r, Request::Notify(n) if n.tag == close_tag);
    {
        let requests = session.vm.requests.borrow();
        assert!(requests.iter().any(is_exit_request));
        assert!(
            !requests.iter().any(|r| matches!(r, Request::Tasks { .. })),
            "{requests:?}"
        );
        let sent_messages = session.vm.sent_messages.borrow();
        assert!(sent_messages.iter().all(|m| m.dst != CONSOLE));
    }
    let close_message = output_message(close_tag, 0x80001, &[], b"");
    assert!(
        as_session(&mut session).has_jobs(),
        "the last records arrive after the end of the output"
    );
    let forged_message = Message {
        src: Tid::from_raw(0x40009),
        ..close_message.clone()
    };
    assert_eq!(handle_message(&mut session, &forged_message), b"");
    assert_eq!(
        handle_message(&mut session, &close_message),
        b"[1] finished\n"
    );
    assert!(!as_session(&mut session).has_jobs());
}

/// A trace file has mode 600.
#[test]
fn trace_file_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let path = std::env::temp_dir().join(format!("pvm-console-trace-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let mut session = session();
    assert_eq!(
        run_successfully(
            &mut session,
            &format!("spawn -> -@{} hello", path.display())
        ),
        "[1]\n1 successful\nt80001\n"
    );
    let tag = session.vm.spawn_requests.borrow()[0].output_sink.tag;
    let shown_bytes = handle_message(&mut session, &output_message(tag, 0x80001, &[3], b"abc"));
    assert_eq!(
        String::from_utf8_lossy(&shown_bytes),
        "[1] libpvmtrc: Task TID=0x80001 Connected to Console\n"
    );
    let shown_bytes = handle_message(&mut session, &output_message(tag, 0x80001, &[0], b""));
    assert!(
        shown_bytes.starts_with(b"[1:t80001] abc\n[1:t80001] EOF\n"),
        "{}",
        String::from_utf8_lossy(&shown_bytes)
    );
    let trace_text = std::fs::read_to_string(&path).expect("written");
    assert!(
        trace_text.starts_with("/*\n") && trace_text.contains("{ \"abc\" } };;\n"),
        "{trace_text}"
    );
    assert_eq!(
        std::fs::metadata(&path)
            .expect("there")
            .permissions()
            .mode()
            & 0o777,
        0o600
    );
    std::fs::remove_file(&path).expect("ours");
}

#[test]
fn trace_settings_match_pvm() {
    let mut session = session();
    assert_eq!(
        run_successfully(&mut session, "trace buf"),
        "\nTrace Buffering set to 0 bytes\n\n"
    );
    assert_eq!(
        run_successfully(&mut session, "trace opt"),
        "\nTrace Options set to \"full\"\n\n"
    );
    assert_eq!(run_successfully(&mut session, "trace opt time"), "");
    assert_eq!(
        run_successfully(&mut session, "getopt PvmTraceOptions"),
        "PvmTraceOptions Currently Set to 2\n"
    );
    let option_refusal = run_line(&mut session, "trace opt foo").refusal;
    assert_eq!(
        option_refusal.as_deref(),
        Some("\nError:  Unknown Trace Option \"foo\"\n")
    );
    assert_eq!(
        run_line(&mut session, "trace nosuch").refusal.as_deref(),
        Some("no such event \"nosuch\"")
    );
    assert_eq!(run_successfully(&mut session, "trace").lines().count(), 26);
    let outcome = run_line(&mut session, "trace - * nosuch + send opt");
    assert_eq!(
        outcome.text, "\nTrace Options set to \"time\"\n\n",
        "what is known is done"
    );
    assert_eq!(outcome.refusal.as_deref(), Some("no such event \"nosuch\""));
    assert_eq!(
        run_successfully(&mut session, "trace").matches('*').count(),
        1
    );
}
