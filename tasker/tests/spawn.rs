//! Tests starting, signalling and ending tasks.

mod common;

use common::{
    Tasker, WAIT_TIMEOUT, can_make_namespaces, is_alive, processes_with, sh, start_order, tid,
    wait_until,
};
use sempa_proto::Micros;
use sempa_proto::tasker::{FromTasker, OUTPUT_CHUNK_BYTES_MAX, ToTasker};
use std::path::Path;
use std::time::{Duration, Instant};

/// A task gets its arguments, environment and directory, and its exit is reported.
#[test]
fn task_gets_its_arguments_and_reports_its_exit() {
    let mut tasker = Tasker::start();
    let script = "echo $0 $1 $MARK; pwd; read x || echo eof; ls -l /proc/self/fd | wc -l; exit 7";
    let mut start = start_order(tid(1), &sh(), &["-c", script, "name", "arg"]);
    start.working_dir = "/usr".into();
    tasker.send(ToTasker::Start(start));
    let (output, status, _) = tasker.wait_for_exit(tid(1));
    // Descriptors 0, 1, 2, the directory that ls reads, and the line "total".
    assert_eq!(
        String::from_utf8_lossy(&output),
        "name arg here\n/usr\neof\n5\n"
    );
    assert_eq!(status, 7 << 8);
    tasker.stop();
}

/// A task that is killed by a signal is reported with that signal.
#[test]
fn death_by_signal_is_reported() {
    let mut tasker = Tasker::start();
    tasker.run(tid(1), &sh(), &["-c", "while :; do sleep 1000; done"]);
    tasker.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGTERM,
    });
    assert_eq!(tasker.wait_for_exit(tid(1)).1, libc::SIGTERM);
    tasker.run(
        tid(2),
        &sh(),
        &["-c", "trap '' TERM; while :; do sleep 1000; done"],
    );
    tasker.send(ToTasker::Kill { tid: tid(2) });
    assert_eq!(tasker.wait_for_exit(tid(2)).1, libc::SIGKILL);
    tasker.stop();
}

#[test]
fn processor_time_and_memory_are_reported() {
    let mut tasker = Tasker::start();
    tasker.run(
        tid(1),
        &sh(),
        &["-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"],
    );
    let (_, status, used) = tasker.wait_for_exit(tid(1));
    assert_eq!(status, 0);
    assert!(
        used.user + used.system > Micros::from_millis(20),
        "{used:?}"
    );
    assert!(used.resident_max_bytes > 500 << 10, "{used:?}");
    tasker.stop();
}

/// Standard output and standard error arrive in the order in which they were written, and before
/// the exit.
#[test]
fn output_comes_in_order_and_before_the_exit() {
    let mut tasker = Tasker::start();
    tasker.run(
        tid(1),
        &sh(),
        &[
            "-c",
            "i=0; while [ $i -lt 3000 ]; do echo out $i; echo err $i >&2; i=$((i+1)); done",
        ],
    );
    let (output, ..) = tasker.wait_for_exit(tid(1));
    let expected: String = (0..3000).map(|i| format!("out {i}\nerr {i}\n")).collect();
    assert_eq!(String::from_utf8_lossy(&output), expected);
    tasker.stop();
}

/// Large output arrives completely, in chunks of limited size.
#[test]
fn large_output_arrives_in_limited_chunks() {
    let mut tasker = Tasker::start();
    tasker.run(tid(1), &sh(), &["-c", "head -c 20000000 /dev/zero"]);
    let mut bytes = 0;
    loop {
        match tasker.wait_for_message() {
            FromTasker::Output { bytes: chunk, .. } => {
                assert!(!chunk.is_empty() && chunk.len() <= OUTPUT_CHUNK_BYTES_MAX);
                bytes += chunk.len();
            }
            FromTasker::Exited { .. } => break,
            _ => {}
        }
    }
    assert_eq!(bytes, 20_000_000);
    tasker.stop();
}

/// A program that cannot be started is reported with the reason.
#[test]
fn failed_start_is_reported_with_reason() {
    let mut tasker = Tasker::start();
    let mut why_of = |start| {
        tasker.send(ToTasker::Start(start));
        tasker.wait_for(&mut Vec::new(), |m| match m {
            FromTasker::StartFailed { why, .. } => Some(why.clone()),
            FromTasker::Started { .. } => panic!("it was started"),
            _ => None,
        })
    };
    let why = why_of(start_order(tid(1), Path::new("/no/such/program"), &[]));
    assert_eq!(
        why,
        "cannot start /no/such/program: No such file or directory"
    );
    let why = why_of(start_order(tid(2), Path::new("/etc/passwd"), &[]));
    assert_eq!(why, "cannot start /etc/passwd: Permission denied");
    let mut start = start_order(tid(3), &sh(), &[]);
    start.working_dir = "/no/such/folder".into();
    assert_eq!(
        why_of(start),
        "cannot start /bin/sh: working directory /no/such/folder: No such file or directory"
    );
    let mut start = start_order(tid(4), &sh(), &[]);
    start.argv.push(b"a\0b".to_vec());
    assert_eq!(
        why_of(start),
        "cannot start /bin/sh: an argument contains a zero byte"
    );
    tasker.stop();
}

/// A new task ignores hangups and broken pipes, and blocks no signal.
#[test]
fn new_task_ignores_hangup_and_broken_pipes() {
    let mut tasker = Tasker::start();
    tasker.run(
        tid(1),
        &sh(),
        &["-c", "grep -E 'Sig(Blk|Ign)' /proc/self/status"],
    );
    let (output, ..) = tasker.wait_for_exit(tid(1));
    let output = String::from_utf8_lossy(&output).into_owned();
    // SIGHUP is 1, SIGPIPE is 13.
    assert_eq!(
        output,
        "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n"
    );
    tasker.stop();
}

/// Fifty tasks start and end at the same time.
#[test]
fn fifty_tasks_start_and_end() {
    let mut tasker = Tasker::start();
    let begin = Instant::now();
    for local in 1..=50 {
        tasker.send(ToTasker::Start(start_order(
            tid(local),
            Path::new("/bin/true"),
            &[],
        )));
    }
    let (mut started, mut ended) = (0, 0);
    while ended < 50 {
        match tasker.wait_for_message() {
            FromTasker::Started { .. } => started += 1,
            FromTasker::Exited { status, .. } => {
                assert_eq!(status, 0);
                ended += 1;
            }
            _ => {}
        }
    }
    assert_eq!(started, 50);
    eprintln!("50 tasks in {:?}", begin.elapsed());
    assert!(begin.elapsed() < WAIT_TIMEOUT);
    tasker.stop();
}

/// A child that outlives its task does not delay the report of the exit, and ends with the tasker.
#[test]
fn child_left_behind_ends_with_the_tasker() {
    let mut tasker = Tasker::start();
    let begin = Instant::now();
    tasker.run(tid(1), &sh(), &["-c", "sleep 31415 & echo $!"]);
    let (output, status, _) = tasker.wait_for_exit(tid(1));
    assert_eq!(status, 0);
    assert!(!output.is_empty());
    assert!(
        begin.elapsed() < Duration::from_secs(20),
        "the open pipe delayed the exit"
    );
    wait_until("the child goes on", || {
        processes_with("sleep 31415").len() == 1
    });
    tasker.stop();
    assert_eq!(processes_with("sleep 31415"), []);
}

#[test]
fn nothing_outlives_a_closed_socket() {
    let mut tasker = Tasker::start();
    let pids: Vec<i32> = (1..=10)
        .map(|n| {
            tasker.run(
                tid(n),
                &sh(),
                &["-c", "trap '' TERM; sleep 27182 & sleep 27182"],
            )
        })
        .collect();
    tasker.stop();
    assert!(!pids.into_iter().any(is_alive));
    assert_eq!(processes_with("sleep 27182"), []);
}

#[test]
fn no_task_survives_a_killed_tasker() {
    let held_together = can_make_namespaces();
    if !held_together {
        eprintln!("without namespaces only the task itself is sure to die, not its children");
    }
    let mut tasker = Tasker::start();
    let script = if held_together {
        "setsid sleep 16180 & wait"
    } else {
        "exec sleep 16180"
    };
    let pids: Vec<i32> = (1..=5)
        .map(|n| tasker.run(tid(n), &sh(), &["-c", script]))
        .collect();
    wait_until("all sleep", || processes_with("sleep 16180").len() >= 5);
    tasker.child.kill().expect("kill");
    wait_until("they are gone", || {
        !pids.iter().any(|pid| is_alive(*pid)) && processes_with("sleep 16180").is_empty()
    });
}

/// If no child of a task remains, the next task reuses its PID namespace.
#[test]
#[ignore = "system tier: needs root and process-id namespaces"]
fn empty_namespace_is_reused() {
    assert!(
        can_make_namespaces(),
        "cannot run here: the kernel gives no process-id namespaces"
    );
    let mut tasker = Tasker::start();
    let mut namespace_of = |number: u32, more: &str| {
        let script = format!("readlink /proc/self/ns/pid; {more}");
        tasker.run(tid(number), &sh(), &["-c", &script]);
        // A remaining child has the pipe open, so the test does not wait for the end of the output.
        String::from_utf8(tasker.wait_for_exit(tid(number)).0).expect("text")
    };
    let first = namespace_of(1, "exit 3");
    assert_eq!(namespace_of(2, ""), first);
    assert_eq!(namespace_of(3, "setsid sleep 14142 & exit 0"), first);
    // The sleeper exists, and dies with its namespace. No other process is killed.
    let fourth = namespace_of(4, "");
    assert_ne!(fourth, first);
    wait_until("the sleeper is alone", || {
        processes_with("sleep 14142").len() == 1
    });
    assert_eq!(namespace_of(5, ""), fourth);
    tasker.stop();
    wait_until("the sleeper is gone", || {
        processes_with("sleep 14142").is_empty()
    });
}
