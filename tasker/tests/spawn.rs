//! Tests starting, signaling and ending tasks.

mod common;

use common::{
    Tasker, WAIT_TIMEOUT, can_make_namespaces, is_alive, processes_with_text, shell_path,
    start_order, tid, wait_until,
};
use sempa_proto::Micros;
use sempa_proto::tasker::{FromTasker, OUTPUT_CHUNK_BYTES_MAX, ToTasker};
use std::path::Path;
use std::time::{Duration, Instant};

/// A task starts with the ordered arguments, environment and working directory, and its exit is
/// reported.
#[test]
fn task_gets_its_arguments_and_reports_its_exit() {
    let mut tasker = Tasker::start();
    let script = "echo $0 $1 $MARK; pwd; read x || echo eof; ls -l /proc/self/fd | wc -l; exit 7";
    let mut start = start_order(tid(1), &shell_path(), &["-c", script, "name", "arg"]);
    start.working_dir = "/usr".into();
    tasker.send(ToTasker::Start(start));
    let (output, status, _) = tasker.wait_for_exit(tid(1));
    // The count of 5: descriptors 0, 1 and 2, the directory that ls reads, and the line "total".
    assert_eq!(
        String::from_utf8_lossy(&output),
        "name arg here\n/usr\neof\n5\n"
    );
    assert_eq!(status, 7 << 8);
    tasker.stop_and_wait();
}

/// If a signal kills a task, its exit is reported with that signal.
#[test]
fn death_by_signal_is_reported() {
    let mut tasker = Tasker::start();
    tasker.start_task_and_wait(
        tid(1),
        &shell_path(),
        &["-c", "while :; do sleep 1000; done"],
    );
    tasker.send(ToTasker::Signal {
        tid: tid(1),
        signal: libc::SIGTERM,
    });
    assert_eq!(tasker.wait_for_exit(tid(1)).1, libc::SIGTERM);
    tasker.start_task_and_wait(
        tid(2),
        &shell_path(),
        &["-c", "trap '' TERM; while :; do sleep 1000; done"],
    );
    tasker.send(ToTasker::Kill { tid: tid(2) });
    assert_eq!(tasker.wait_for_exit(tid(2)).1, libc::SIGKILL);
    tasker.stop_and_wait();
}

#[test]
fn processor_time_and_memory_are_reported() {
    let mut tasker = Tasker::start();
    tasker.start_task_and_wait(
        tid(1),
        &shell_path(),
        &["-c", "i=0; while [ $i -lt 200000 ]; do i=$((i+1)); done"],
    );
    let (_, status, usage) = tasker.wait_for_exit(tid(1));
    assert_eq!(status, 0);
    assert!(
        usage.user + usage.system > Micros::from_millis(20),
        "{usage:?}"
    );
    assert!(usage.resident_max_bytes > 500 << 10, "{usage:?}");
    tasker.stop_and_wait();
}

/// The daemon receives standard output and standard error in the order in which they were written,
/// and before the exit.
#[test]
fn output_arrives_in_order_and_before_the_exit() {
    let mut tasker = Tasker::start();
    tasker.start_task_and_wait(
        tid(1),
        &shell_path(),
        &[
            "-c",
            "i=0; while [ $i -lt 3000 ]; do echo out $i; echo err $i >&2; i=$((i+1)); done",
        ],
    );
    let (output, ..) = tasker.wait_for_exit(tid(1));
    let expected: String = (0..3000).map(|i| format!("out {i}\nerr {i}\n")).collect();
    assert_eq!(String::from_utf8_lossy(&output), expected);
    tasker.stop_and_wait();
}

/// Large output arrives completely, in chunks of limited size.
#[test]
fn large_output_arrives_in_limited_chunks() {
    let mut tasker = Tasker::start();
    tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", "head -c 20000000 /dev/zero"]);
    let mut received_bytes = 0;
    loop {
        match tasker.wait_for_message() {
            FromTasker::Output { bytes: chunk, .. } => {
                assert!(!chunk.is_empty() && chunk.len() <= OUTPUT_CHUNK_BYTES_MAX);
                received_bytes += chunk.len();
            }
            FromTasker::Exited { .. } => break,
            _ => {}
        }
    }
    assert_eq!(received_bytes, 20_000_000);
    tasker.stop_and_wait();
}

/// If a program cannot be started, the report contains the reason.
#[test]
fn failed_start_is_reported_with_reason() {
    let mut tasker = Tasker::start();
    let mut start_failure = |start| {
        tasker.send(ToTasker::Start(start));
        tasker.wait_for_value(&mut Vec::new(), |m| match m {
            FromTasker::StartFailed { reason: why, .. } => Some(why.clone()),
            FromTasker::Started { .. } => panic!("it was started"),
            _ => None,
        })
    };
    let why = start_failure(start_order(tid(1), Path::new("/no/such/program"), &[]));
    assert_eq!(
        why,
        "cannot start /no/such/program: No such file or directory"
    );
    let why = start_failure(start_order(tid(2), Path::new("/etc/passwd"), &[]));
    assert_eq!(why, "cannot start /etc/passwd: Permission denied");
    let mut start = start_order(tid(3), &shell_path(), &[]);
    start.working_dir = "/no/such/folder".into();
    assert_eq!(
        start_failure(start),
        "cannot start /bin/sh: working directory /no/such/folder: No such file or directory"
    );
    let mut start = start_order(tid(4), &shell_path(), &[]);
    start.argv.push(b"a\0b".to_vec());
    assert_eq!(
        start_failure(start),
        "cannot start /bin/sh: an argument contains a zero byte"
    );
    tasker.stop_and_wait();
}

/// A new task ignores SIGHUP and SIGPIPE, and blocks no signal.
#[test]
fn new_task_ignores_hangup_and_broken_pipes() {
    let mut tasker = Tasker::start();
    tasker.start_task_and_wait(
        tid(1),
        &shell_path(),
        &["-c", "grep -E 'Sig(Blk|Ign)' /proc/self/status"],
    );
    let (output, ..) = tasker.wait_for_exit(tid(1));
    let output = String::from_utf8_lossy(&output).into_owned();
    // SIGHUP is signal 1, and SIGPIPE is signal 13.
    assert_eq!(
        output,
        "SigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n"
    );
    tasker.stop_and_wait();
}

/// Fifty tasks start and end at the same time.
#[test]
fn fifty_tasks_start_and_end() {
    let mut tasker = Tasker::start();
    let started_at = Instant::now();
    for number in 1..=50 {
        tasker.send(ToTasker::Start(start_order(
            tid(number),
            Path::new("/bin/true"),
            &[],
        )));
    }
    let (mut started_count, mut ended_count) = (0, 0);
    while ended_count < 50 {
        match tasker.wait_for_message() {
            FromTasker::Started { .. } => started_count += 1,
            FromTasker::Exited { status, .. } => {
                assert_eq!(status, 0);
                ended_count += 1;
            }
            _ => {}
        }
    }
    assert_eq!(started_count, 50);
    eprintln!("50 tasks in {:?}", started_at.elapsed());
    assert!(started_at.elapsed() < WAIT_TIMEOUT);
    tasker.stop_and_wait();
}

/// A child that outlives its task does not delay the report of the task's exit. The child ends with
/// the tasker.
#[test]
fn remaining_child_ends_with_the_tasker() {
    let mut tasker = Tasker::start();
    let started_at = Instant::now();
    tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", "sleep 31415 & echo $!"]);
    let (output, status, _) = tasker.wait_for_exit(tid(1));
    assert_eq!(status, 0);
    assert!(!output.is_empty());
    assert!(
        started_at.elapsed() < Duration::from_secs(20),
        "the open pipe delayed the exit"
    );
    wait_until("the child goes on", || {
        processes_with_text("sleep 31415").len() == 1
    });
    tasker.stop_and_wait();
    assert_eq!(processes_with_text("sleep 31415"), []);
}

#[test]
fn closed_socket_ends_all_tasks() {
    let mut tasker = Tasker::start();
    let pids: Vec<i32> = (1..=10)
        .map(|n| {
            tasker.start_task_and_wait(
                tid(n),
                &shell_path(),
                &["-c", "trap '' TERM; sleep 27182 & sleep 27182"],
            )
        })
        .collect();
    tasker.stop_and_wait();
    assert!(!pids.into_iter().any(is_alive));
    assert_eq!(processes_with_text("sleep 27182"), []);
}

#[test]
fn no_task_survives_a_killed_tasker() {
    let uses_namespaces = can_make_namespaces();
    if !uses_namespaces {
        eprintln!("without namespaces only the task itself is sure to die, not its children");
    }
    let mut tasker = Tasker::start();
    let script = if uses_namespaces {
        "setsid sleep 16180 & wait"
    } else {
        "exec sleep 16180"
    };
    let pids: Vec<i32> = (1..=5)
        .map(|n| tasker.start_task_and_wait(tid(n), &shell_path(), &["-c", script]))
        .collect();
    wait_until("all sleep", || {
        processes_with_text("sleep 16180").len() >= 5
    });
    tasker.child.kill().expect("kill");
    wait_until("they are gone", || {
        !pids.iter().any(|pid| is_alive(*pid)) && processes_with_text("sleep 16180").is_empty()
    });
}

/// Tasks and their children have different process ids, also in a namespace that is used again. The
/// tasker reports the id that the task sees.
#[test]
#[ignore = "system tier: needs root and process-id namespaces"]
fn tasks_and_children_have_different_pids() {
    assert!(
        can_make_namespaces(),
        "cannot run here: the kernel gives no process-id namespaces"
    );
    let mut tasker = Tasker::start();
    let mut pids = Vec::new();
    for number in 1..=20 {
        let script = "echo $$; sh -c 'echo $$'; sh -c 'echo $$'";
        tasker.send(ToTasker::Start(start_order(
            tid(number),
            &shell_path(),
            &["-c", script],
        )));
        let reported_pid = tasker.wait_for_value(&mut Vec::new(), |message| match message {
            FromTasker::Started { namespace_pid, .. } => Some(*namespace_pid),
            _ => None,
        });
        let output = String::from_utf8(tasker.wait_for_exit(tid(number)).0).expect("text");
        let task_pids: Vec<i32> = output
            .lines()
            .map(|line| line.parse().expect("a number"))
            .collect();
        assert_eq!(
            task_pids,
            [reported_pid, reported_pid + 1, reported_pid + 2]
        );
        pids.extend(task_pids);
    }
    pids.sort_unstable();
    pids.dedup();
    assert_eq!(pids.len(), 60);
    tasker.stop_and_wait();
}

/// If no child of a task remains, the PID namespace of the task is reused for the next task.
#[test]
#[ignore = "system tier: needs root and process-id namespaces"]
fn empty_namespace_is_reused() {
    assert!(
        can_make_namespaces(),
        "cannot run here: the kernel gives no process-id namespaces"
    );
    let mut tasker = Tasker::start();
    let mut run_and_get_namespace = |number: u32, last_command: &str| {
        let script = format!("readlink /proc/self/ns/pid; {last_command}");
        tasker.start_task_and_wait(tid(number), &shell_path(), &["-c", &script]);
        // The child that remains has the pipe open, so the output does not end.
        String::from_utf8(tasker.wait_for_exit(tid(number)).0).expect("text")
    };
    let first_namespace = run_and_get_namespace(1, "exit 3");
    assert_eq!(run_and_get_namespace(2, ""), first_namespace);
    assert_eq!(
        run_and_get_namespace(3, "setsid sleep 14142 & exit 0"),
        first_namespace
    );
    // The sleeping child runs until its namespace is killed. No other process is killed.
    let fourth_namespace = run_and_get_namespace(4, "");
    assert_ne!(fourth_namespace, first_namespace);
    wait_until("the sleeper is alone", || {
        processes_with_text("sleep 14142").len() == 1
    });
    assert_eq!(run_and_get_namespace(5, ""), fourth_namespace);
    tasker.stop_and_wait();
    wait_until("the sleeper is gone", || {
        processes_with_text("sleep 14142").is_empty()
    });
}
