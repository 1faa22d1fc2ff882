//! Tests programs that write their own checkpoints. Such a program is requested to exit, and is
//! started again at the target.

mod common;

use checkpoint::proc;
use common::{Tasker, is_alive, start_order, tid, wait_until};
use procfs::process::Process;
use sempa_proto::MigrationId;
use sempa_proto::engine::{AskMethod, Engine};
use sempa_proto::migration::{Failure, Usage};
use sempa_proto::tasker::{FromTasker, TaskStart, ToTasker};
use std::path::Path;

const MIGRATION_ID: MigrationId = MigrationId(7);
const SELF_CHECKPOINT: Engine = Engine::SelfCheckpoint {
    ask_method: AskMethod::Signal(10),
    exit_status: 85,
    timeout_s: 30,
};
/// Wrapper command that removes all capabilities. A tasker without capabilities may not create
/// namespaces.
const WITHOUT_CAPABILITIES: [&str; 2] = ["setpriv", "--bounding-set=-all"];

fn start_shell_order(script: &str) -> TaskStart {
    start_order(tid(1), Path::new("/bin/sh"), &["-c", script])
}

fn wait_for_restore_result(tasker: &mut Tasker) -> Result<i32, Failure> {
    tasker.wait_for_value(&mut Vec::new(), |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    })
}

/// Waits until the task has exited. Returns its output and its wait status.
fn wait_for_exit(tasker: &mut Tasker) -> (String, i32) {
    let (output, status, _) = tasker.wait_for_exit(tid(1));
    (String::from_utf8_lossy(&output).into_owned(), status)
}

/// Starts a task with a sleeping child and waits until the task prints `ready`. Returns the child's
/// PID.
fn start_with_sleeper(tasker: &mut Tasker, script: &str) -> i32 {
    tasker.send(ToTasker::Start(start_shell_order(&format!(
        "sleep 1000 & {script}"
    ))));
    let mut output = Vec::new();
    let mut task_pid = None;
    while !String::from_utf8_lossy(&output).contains("ready") {
        match tasker.wait_for_message() {
            FromTasker::Output { bytes, .. } => output.extend(bytes),
            FromTasker::Started { pid, .. } => task_pid = Some(pid),
            _ => {}
        }
    }
    let task_pid = task_pid.expect("started");
    let children = || proc::children(task_pid).expect("children");
    let is_sleeper = |pid: &i32| {
        let line = Process::new(*pid).and_then(|process| process.cmdline());
        line.is_ok_and(|line| line.starts_with(&["sleep".into(), "1000".into()]))
    };
    let find_sleeper = || children().into_iter().find(is_sleeper);
    wait_until("there is a sleeper", || find_sleeper().is_some());
    find_sleeper().expect("just seen")
}

fn test_with_and_without_capabilities(test: impl Fn(&mut Tasker)) {
    test(&mut Tasker::start());
    if nix::unistd::geteuid().is_root() {
        let mut tasker = Tasker::start_wrapped(&WITHOUT_CAPABILITIES, &[]);
        assert!(!tasker.capabilities.pid_namespaces);
        test(&mut tasker);
    }
}

/// A program that is started for a migration stops before its exec, and executes only after the
/// order to run.
#[test]
fn started_program_waits_for_the_run_order() {
    test_with_and_without_capabilities(|tasker| {
        let dir = tempfile::tempdir().expect("dir");
        let file = dir.path().join("ran");
        tasker.send(ToTasker::PrepareRestart {
            migration: MIGRATION_ID,
            start: start_shell_order(&format!("echo hello; touch {}", file.display())),
        });
        let pid = wait_for_restore_result(tasker).expect("built");
        assert_eq!(proc::stat(pid).expect("it is there").state, 'T');
        let process = Process::new(pid).expect("it is there");
        assert_eq!(process.fd_count().expect("its descriptors"), 3);
        assert!(!file.exists());
        tasker.send(ToTasker::Run {
            migration: MIGRATION_ID,
            earlier_usage: Usage::default(),
            stays_paused: false,
        });
        assert_eq!(wait_for_exit(tasker), ("hello\n".to_string(), 0));
        assert!(file.exists());
    });
}

/// A program that is started for a migration and then discarded never executes. If a program cannot
/// be started, the reason is reported.
#[test]
fn discarded_program_never_runs() {
    test_with_and_without_capabilities(|tasker| {
        tasker.send(ToTasker::PrepareRestart {
            migration: MIGRATION_ID,
            start: start_shell_order("exit 0"),
        });
        let pid = wait_for_restore_result(tasker).expect("built");
        tasker.send(ToTasker::Discard {
            migration: MIGRATION_ID,
        });
        tasker.wait_for_value(&mut Vec::new(), |m| {
            matches!(m, FromTasker::Discarded { .. }).then_some(())
        });
        wait_until("it is gone", || !is_alive(pid));
        let order = TaskStart {
            working_dir: "/nowhere/at/all".into(),
            ..start_shell_order("exit 0")
        };
        tasker.send(ToTasker::PrepareRestart {
            migration: MigrationId(8),
            start: order,
        });
        let Err(Failure::Io(why)) = wait_for_restore_result(tasker) else {
            panic!("it began")
        };
        assert!(
            why.contains("working directory /nowhere/at/all") && why.contains("No such file"),
            "{why}"
        );
        // A program file without execute permission is detected before the program's process stops.
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("no-program");
        std::fs::write(&path, "not to be run").expect("written");
        tasker.send(ToTasker::PrepareRestart {
            migration: MigrationId(9),
            start: TaskStart {
                path,
                ..start_shell_order("exit 0")
            },
        });
        let Err(Failure::Io(why)) = wait_for_restore_result(tasker) else {
            panic!("it began")
        };
        assert!(why.contains("no-program: Permission denied"), "{why}");
    });
}

/// If a program is ordered to run but to stay paused, it executes only after it is resumed.
#[test]
fn paused_program_starts_when_resumed() {
    test_with_and_without_capabilities(|tasker| {
        tasker.send(ToTasker::PrepareRestart {
            migration: MIGRATION_ID,
            start: start_shell_order("echo hello"),
        });
        let pid = wait_for_restore_result(tasker).expect("built");
        tasker.send(ToTasker::Run {
            migration: MIGRATION_ID,
            earlier_usage: Usage::default(),
            stays_paused: true,
        });
        tasker.wait_for_value(&mut Vec::new(), |m| {
            matches!(m, FromTasker::Running { .. }).then_some(())
        });
        assert_eq!(proc::stat(pid).expect("it is there").state, 'T');
        tasker.send(ToTasker::Resume { tid: tid(1) });
        assert_eq!(wait_for_exit(tasker), ("hello\n".to_string(), 0));
    });
}

/// If a program exits with the agreed status, its remaining children are killed. With any other
/// status they continue.
#[test]
fn agreed_exit_kills_remaining_children() {
    test_with_and_without_capabilities(|tasker| {
        for (exit_status, sleeper_continues) in [(85, false), (3, true)] {
            let sleeper_pid = start_with_sleeper(
                tasker,
                &format!(
                    "trap 'exit {exit_status}' USR1; echo ready; while :; do sleep 0.01; done"
                ),
            );
            tasker.send(ToTasker::RequestExit {
                tid: tid(1),
                engine: SELF_CHECKPOINT,
            });
            assert_eq!(wait_for_exit(tasker).1, exit_status << 8);
            if !sleeper_continues {
                wait_until("it is gone", || !is_alive(sleeper_pid));
            }
            assert_eq!(is_alive(sleeper_pid), sleeper_continues, "{exit_status}");
            // Without a namespace the tasker does not end the sleeping process, so the test does.
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(sleeper_pid),
                nix::sys::signal::Signal::SIGKILL,
            );
        }
    });
}

/// A program that is requested to exit by a message may exit before the message arrives. The
/// children of such a program are killed as well.
#[test]
fn exit_before_the_message_is_accepted() {
    let message_engine = Engine::SelfCheckpoint {
        ask_method: AskMethod::Message(77),
        exit_status: 85,
        timeout_s: 30,
    };
    test_with_and_without_capabilities(|tasker| {
        let dir = tempfile::tempdir().expect("dir");
        let start_file = dir.path().join("go");
        // The script has no handler for SIGUSR1, so an exit request by that signal would be
        // refused.
        let script = format!(
            "echo ready; until [ -e {} ]; do sleep 0.01; done; exit 85",
            start_file.display()
        );
        let sleeper_pid = start_with_sleeper(tasker, &script);
        tasker.send(ToTasker::RequestExit {
            tid: tid(1),
            engine: message_engine,
        });
        tasker.wait_for_value(&mut Vec::new(), |m| {
            matches!(m, FromTasker::ExitExpected { .. }).then_some(())
        });
        assert!(is_alive(sleeper_pid));
        std::fs::write(&start_file, "").expect("written");
        assert_eq!(wait_for_exit(tasker).1, 85 << 8);
        wait_until("the sleeper is ended", || !is_alive(sleeper_pid));
    });
}

/// If a program does not handle the exit signal, the signal is not sent and the refusal is
/// reported.
#[test]
fn program_without_handler_gets_no_signal() {
    test_with_and_without_capabilities(|tasker| {
        let dir = tempfile::tempdir().expect("dir");
        let file = dir.path().join("go");
        let script = format!(
            "until [ -e {} ]; do sleep 0.01; done; trap 'exit 85' USR1; echo ready; while :; do sleep 0.01; done",
            file.display()
        );
        tasker.send(ToTasker::Start(start_shell_order(&script)));
        tasker.wait_for_value(&mut Vec::new(), |m| {
            matches!(m, FromTasker::Started { .. }).then_some(())
        });
        tasker.send(ToTasker::RequestExit {
            tid: tid(1),
            engine: SELF_CHECKPOINT,
        });
        let why = tasker.wait_for_value(&mut Vec::new(), |m| match m {
            FromTasker::ExitNotRequested { reason: why, .. } => Some(why.clone()),
            _ => None,
        });
        assert!(why.contains("has no handler for signal 10"), "{why}");
        std::fs::write(&file, "").expect("written");
        let mut output = Vec::new();
        while !String::from_utf8_lossy(&output).contains("ready") {
            if let FromTasker::Output { bytes, .. } = tasker.wait_for_message() {
                output.extend(bytes);
            }
        }
        tasker.send(ToTasker::RequestExit {
            tid: tid(1),
            engine: SELF_CHECKPOINT,
        });
        assert_eq!(wait_for_exit(tasker).1, 85 << 8);
    });
}
