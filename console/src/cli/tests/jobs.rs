//! Tests of spawned jobs: their environment, output and trace records.

use super::*;
use crate::session::job_output::{TAG_CLOSE_JOB, TAG_TRACES};
use bytes::Bytes;
use libpvm::Vm;
use libpvm::spawn::TC_SIBLINGS;
use sempa_proto::message::CTX_TASK_CONTROL;
use sempa_proto::task::Sink;

/// Exported variables are in the environment of spawned tasks.
#[test]
fn exported_variables_reach_spawned_tasks() {
    let mut session = session();
    assert_eq!(run_ok(&mut session, "export"), "PVM_EXPORT=\n");
    run_ok(&mut session, "export COLOUR MISSING COLOUR");
    assert_eq!(
        run_ok(&mut session, "export"),
        "PVM_EXPORT=COLOUR:MISSING\n"
    );
    run_ok(&mut session, "setenv COLOUR blue");
    assert_eq!(run_ok(&mut session, "setenv COLOUR"), "blue\n");
    run_ok(&mut session, "spawn hello -v");
    run_ok(&mut session, "unexport COLOUR");
    assert_eq!(run_ok(&mut session, "export"), "PVM_EXPORT=MISSING\n");
    let spawned = session.vm.spawned.borrow();
    let env: Vec<&[u8]> = spawned[0].env.iter().map(Vec::as_slice).collect();
    assert_eq!(env, [&b"PVM_EXPORT=COLOUR:MISSING"[..], b"COLOUR=blue"]);
    assert_eq!(spawned[0].args, [b"-v"]);
    assert_eq!(spawned[0].output, Sink::default());
}

/// Output of a job is shown until the job has finished.
#[test]
fn job_output_is_shown_until_end() {
    let mut session = session();
    assert_eq!(
        run_ok(&mut session, "spawn -> hello"),
        "[1]\n1 successful\nt80001\n"
    );
    let sink = session.vm.spawned.borrow()[0].output;
    assert_eq!(sink.tid, CONSOLE);
    assert_eq!(run_ok(&mut session, "jobs"), " 1: t80001\n");
    let shown = |session: &mut Session<FakeVm>, words: &[i32], bytes: &[u8]| {
        let shown = handle_message(session, &output_message(sink.tag, 0x80001, words, bytes));
        String::from_utf8(shown).expect("text")
    };
    assert_eq!(shown(&mut session, &[-1, 0], b""), "");
    assert_eq!(shown(&mut session, &[6], b"hello\n"), "[1:t80001] hello\n");
    assert_eq!(
        shown(&mut session, &[0], b""),
        "[1:t80001] EOF\n[1] finished\n"
    );
    assert!(!as_session(&mut session).has_jobs());
    assert_eq!(run_ok(&mut session, "jobs"), "");
}

/// Output can go to a file, and an existing file is not overwritten.
#[test]
fn output_file_is_never_overwritten() {
    let path = std::env::temp_dir().join(format!("pvm-console-job-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let path_text = path.display().to_string();
    let mut session = session();
    assert_eq!(
        run_ok(&mut session, &format!("spawn ->{path_text} hello")),
        "[1]\n1 successful\nt80001\n"
    );
    let tag = session.vm.spawned.borrow()[0].output.tag;
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
    let again = run_line(&mut session, &format!("spawn ->{path_text} hello"));
    assert_eq!(again.refusal, Some(format!("{path_text}: File exists")));
    run_ok(&mut session, &format!("spawn ->>{path_text} hello"));
    std::fs::remove_file(&path).expect("ours");
}

/// The error about a missing program says what to do.
#[test]
fn missing_program_error_gives_advice() {
    let mut session = session();
    let outcome = run_line(&mut session, "spawn -> nofile");
    assert_eq!(outcome.text, "[1]\n0 successful\nNo such file\n");
    assert!(outcome.failed && !as_session(&mut session).has_jobs());
    assert_eq!(outcome.errors.len(), 1);
    assert!(outcome.errors[0].starts_with("spawn nofile: it is not in the search path"));
    let debugged = run_line(&mut session, "spawn -? nofile");
    assert!(debugged.errors[0].starts_with("spawn nofile: the program, or the debugger"));
    let unwritable = run_line(&mut session, "spawn ->/nonexistent/file hello").refusal;
    assert_eq!(
        unwritable.as_deref(),
        Some("/nonexistent/file: No such file or directory")
    );
}

/// Spawned tasks receive the tids of their siblings.
#[test]
fn spawned_tasks_receive_siblings() {
    let mut session = session();
    run_ok(&mut session, "spawn hello");
    let sent = session.vm.sent.borrow();
    assert_eq!(sent.len(), 1);
    assert_eq!(
        (sent[0].dst, sent[0].ctx, sent[0].tag),
        (Tid::from_raw(0x80001), CTX_TASK_CONTROL, TC_SIBLINGS)
    );
    let mut body = Vm::unpack(&sent[0]).expect("readable");
    assert_eq!((body.int(), body.int()), (Ok(1), Ok(0x80001)));
}

/// Only daemons report output: a message from a task is ignored, even with the tag of a job.
#[test]
fn forged_output_is_ignored() {
    let mut session = session();
    run_ok(&mut session, "spawn -> hello");
    let tag = session.vm.spawned.borrow()[0].output.tag;
    let forged = Message {
        src: Tid::from_raw(0x40002),
        ..output_message(tag, 0x80001, &[6], b"forged")
    };
    assert_eq!(handle_message(&mut session, &forged), b"");
}

/// The spawn of a traced job has the selected events, the settings and the destination of records,
/// and the console shows the records of the hosts.
#[test]
fn traced_spawn_requests_records() {
    let mut session = session();
    run_ok(&mut session, "trace buf 100");
    run_ok(&mut session, "trace opt count");
    run_ok(&mut session, "trace - *");
    run_ok(&mut session, "trace + addhosts");
    let shown = run_ok(&mut session, "spawn -@ hello");
    assert!(
        shown.starts_with("[1]\n[T1:t40001] /*\n[T1:t40001]  * \"Creation Date\" \""),
        "{shown}"
    );
    assert!(
        shown.contains("\n[T1:tc0000] \"host_add(0)\" { "),
        "{shown}"
    );
    assert!(
        shown.ends_with(", 1000 };;\n1 successful\nt80001\n"),
        "{shown}"
    );
    assert_eq!(run_ok(&mut session, "jobs"), "T1: t80001\n");
    let spawned = session.vm.spawned.borrow();
    assert!(spawned[0].env[0].starts_with(b"PVMTMASK=A@@@"), "addhosts");
    assert_eq!(
        spawned[0].env[0]["PVMTMASK=".len() + 75 / 4],
        b'@' + 8,
        "newtask is always in it"
    );
    assert_eq!(
        spawned[0].env[1..3],
        [&b"PVMTRCBUF=100"[..], b"PVMTRCOPT=3"]
    );
    assert_eq!(
        (spawned[0].output.tid, spawned[0].trace.tid),
        (CONSOLE, CONSOLE)
    );
    assert_eq!(spawned[0].trace.tag, TAG_TRACES + 1);
}

/// A traced job shows the records of its tasks and those that the console adds.
#[test]
fn traced_job_shows_records() {
    let mut session = session();
    run_ok(&mut session, "spawn -@ hello");
    let (output_tag, trace_tag) = {
        let spawned = session.vm.spawned.borrow();
        (spawned[0].output.tag, spawned[0].trace.tag)
    };
    let mut shown =
        |message: &Message| String::from_utf8(handle_message(&mut session, message)).expect("text");
    let met = shown(&output_message(output_tag, 0x80001, &[-2, 0], b""));
    assert!(
        met.starts_with("[1] libpvmtrc: Task TID=0x80001 Connected to Console\n[T1:t80001] \n"),
        "{met}"
    );
    assert!(
        met.ends_with(" 524289, [9] { \"CREATION\" } };;\n"),
        "{met}"
    );
    let mut body = Packer::new(Encoding::Xdr);
    body.items([-5, 75]).str(b"newtask").int(-6);
    let record = Message {
        src: Tid::from_raw(0x80001),
        body: body.finish(),
        ..output_message(trace_tag, 0, &[], b"")
    };
    assert_eq!(
        shown(&record),
        "[T1:t80001] \n[T1:t80001] #1150: \"newtask(0)\"\n[T1:t80001] {\n[T1:t80001] };;\n[T1:t80001] \n\
         [T1:t80001] \"newtask(0)\" {  };;\n"
    );
    let rubbish = Message {
        body: Bytes::from_static(&[0; 4]),
        ..record
    };
    assert!(shown(&rubbish).starts_with("[1] trace records of t80001 cannot be read: "));
    let line = shown(&output_message(output_tag, 0x80001, &[6], b"hello\n"));
    assert!(
        line.ends_with(", [6] { \"hello\" } };;\n"),
        "the output is in the trace and not shown: {line}"
    );
    let end = shown(&output_message(output_tag, 0x80001, &[0], b""));
    assert!(
        end.ends_with("{ \"GOTEOF\" } };;\n[1] libpvmtrc: Trace File Complete\n"),
        "{end}"
    );
    let reminder = session
        .vm
        .sent
        .borrow()
        .last()
        .cloned()
        .expect("sent to itself");
    assert_eq!((reminder.dst, reminder.tag), (CONSOLE, TAG_CLOSE_JOB + 1));
    assert!(
        as_session(&mut session).has_jobs(),
        "the last records arrive after the end of the output"
    );
    let forged = Message {
        src: Tid::from_raw(0x40009),
        ..reminder.clone()
    };
    assert_eq!(handle_message(&mut session, &forged), b"");
    assert_eq!(handle_message(&mut session, &reminder), b"[1] finished\n");
    assert!(!as_session(&mut session).has_jobs());
}

/// A trace can go to a file that only its owner can read.
#[test]
fn trace_file_is_private() {
    use std::os::unix::fs::PermissionsExt;
    let path = std::env::temp_dir().join(format!("pvm-console-trace-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let mut session = session();
    assert_eq!(
        run_ok(
            &mut session,
            &format!("spawn -> -@{} hello", path.display())
        ),
        "[1]\n1 successful\nt80001\n"
    );
    let tag = session.vm.spawned.borrow()[0].output.tag;
    let shown = handle_message(&mut session, &output_message(tag, 0x80001, &[3], b"abc"));
    assert_eq!(
        String::from_utf8_lossy(&shown),
        "[1] libpvmtrc: Task TID=0x80001 Connected to Console\n"
    );
    let shown = handle_message(&mut session, &output_message(tag, 0x80001, &[0], b""));
    assert!(
        shown.starts_with(b"[1:t80001] abc\n[1:t80001] EOF\n"),
        "{}",
        String::from_utf8_lossy(&shown)
    );
    let written = std::fs::read_to_string(&path).expect("written");
    assert!(
        written.starts_with("/*\n") && written.contains("{ \"abc\" } };;\n"),
        "{written}"
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

/// Trace settings are shown as in PVM.
#[test]
fn trace_settings_match_pvm() {
    let mut session = session();
    assert_eq!(
        run_ok(&mut session, "trace buf"),
        "\nTrace Buffering set to 0 bytes\n\n"
    );
    assert_eq!(
        run_ok(&mut session, "trace opt"),
        "\nTrace Options set to \"full\"\n\n"
    );
    assert_eq!(run_ok(&mut session, "trace opt time"), "");
    assert_eq!(
        run_ok(&mut session, "getopt PvmTraceOptions"),
        "PvmTraceOptions Currently Set to 2\n"
    );
    let unknown = run_line(&mut session, "trace opt foo").refusal;
    assert_eq!(
        unknown.as_deref(),
        Some("\nError:  Unknown Trace Option \"foo\"\n")
    );
    assert_eq!(
        run_line(&mut session, "trace nosuch").refusal.as_deref(),
        Some("no such event \"nosuch\"")
    );
    assert_eq!(run_ok(&mut session, "trace").lines().count(), 26);
    let both = run_line(&mut session, "trace - * nosuch + send opt");
    assert_eq!(
        both.text, "\nTrace Options set to \"time\"\n\n",
        "what is known is done"
    );
    assert_eq!(both.refusal.as_deref(), Some("no such event \"nosuch\""));
    assert_eq!(run_ok(&mut session, "trace").matches('*').count(), 1);
}
