//! Tests programs that write their own checkpoints: they are requested to exit, and started again.

mod common;

use checkpoint::proc;
use common::{Tasker, is_alive, start_order, tid, wait_until};
use procfs::process::Process;
use sempa_proto::MigrationId;
use sempa_proto::engine::{AskMethod, Engine};
use sempa_proto::migration::{Failure, Usage};
use sempa_proto::tasker::{FromTasker, StartTask, ToTasker};
use std::path::Path;

const MIGRATION: MigrationId = MigrationId(7);
const SELF_CHECKPOINT: Engine = Engine::SelfCheckpoint {
    ask_method: AskMethod::Signal(10),
    exit_status: 85,
    timeout_s: 30,
};
/// Command that removes all capabilities; without them a process may not create namespaces.
const WITHOUT_CAPABILITIES: [&str; 2] = ["setpriv", "--bounding-set=-all"];

fn shell_order(script: &str) -> StartTask {
    start_order(tid(1), Path::new("/bin/sh"), &["-c", script])
}

fn wait_until_restored(tasker: &mut Tasker) -> Result<i32, Failure> {
    tasker.wait_for(&mut Vec::new(), |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    })
}

/// Waits until the task has exited. Returns its output and its wait status.
fn wait_for_exit(tasker: &mut Tasker) -> (String, i32) {
    let (out, status, _) = tasker.wait_for_exit(tid(1));
    (String::from_utf8_lossy(&out).into_owned(), status)
}

/// Starts a task with a sleeping child and waits until the task prints `ready`. Returns the child's
/// PID.
fn start_with_sleeper(tasker: &mut Tasker, script: &str) -> i32 {
    tasker.send(ToTasker::Start(shell_order(&format!(
        "sleep 1000 & {script}"
    ))));
    let mut out = Vec::new();
    let mut task = None;
    while !String::from_utf8_lossy(&out).contains("ready") {
        match tasker.wait_for_message() {
            FromTasker::Output { bytes, .. } => out.extend(bytes),
            FromTasker::Started { pid, .. } => task = Some(pid),
            _ => {}
        }
    }
    let task = task.expect("started");
    let children = || proc::children(task).expect("children");
    let is_sleeper = |pid: &i32| {
        let line = Process::new(*pid).and_then(|process| process.cmdline());
        line.is_ok_and(|line| line.starts_with(&["sleep".into(), "1000".into()]))
    };
    let find = || children().into_iter().find(is_sleeper);
    wait_until("there is a sleeper", || find().is_some());
    find().expect("just seen")
}

fn with_and_without_rights(test: impl Fn(&mut Tasker)) {
    test(&mut Tasker::start());
    if nix::unistd::geteuid().is_root() {
        let mut tasker = Tasker::start_wrapped(&WITHOUT_CAPABILITIES, &[]);
        assert!(!tasker.capabilities.pid_namespaces);
        test(&mut tasker);
    }
}

/// A program that is started for a migration runs only after the order to run.
#[test]
fn built_program_waits_for_run() {
    with_and_without_rights(|tasker| {
        let dir = tempfile::tempdir().expect("dir");
        let file = dir.path().join("ran");
        tasker.send(ToTasker::PrepareRestart {
            migration: MIGRATION,
            start: shell_order(&format!("echo hello; touch {}", file.display())),
        });
        let pid = wait_until_restored(tasker).expect("built");
        assert_eq!(proc::stat(pid).expect("it is there").state, 'T');
        let process = Process::new(pid).expect("it is there");
        assert_eq!(process.fd_count().expect("its descriptors"), 3);
        assert!(!file.exists());
        tasker.send(ToTasker::Run {
            migration: MIGRATION,
            used: Usage::default(),
            paused: false,
        });
        assert_eq!(wait_for_exit(tasker), ("hello\n".to_string(), 0));
        assert!(file.exists());
    });
}

/// A program that is started for a migration and discarded never runs. A program that cannot be
/// started is reported.
#[test]
fn discarded_program_never_runs() {
    with_and_without_rights(|tasker| {
        tasker.send(ToTasker::PrepareRestart {
            migration: MIGRATION,
            start: shell_order("exit 0"),
        });
        let pid = wait_until_restored(tasker).expect("built");
        tasker.send(ToTasker::Discard {
            migration: MIGRATION,
        });
        tasker.wait_for(&mut Vec::new(), |m| {
            matches!(m, FromTasker::Discarded { .. }).then_some(())
        });
        wait_until("it is gone", || !is_alive(pid));
        let start = StartTask {
            working_dir: "/nowhere/at/all".into(),
            ..shell_order("exit 0")
        };
        tasker.send(ToTasker::PrepareRestart {
            migration: MigrationId(8),
            start,
        });
        let Err(Failure::Io(why)) = wait_until_restored(tasker) else {
            panic!("it began")
        };
        assert!(
            why.contains("working directory /nowhere/at/all") && why.contains("No such file"),
            "{why}"
        );
        // The start is refused before any resource is allocated.
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("no-program");
        std::fs::write(&path, "not to be run").expect("written");
        tasker.send(ToTasker::PrepareRestart {
            migration: MigrationId(9),
            start: StartTask {
                path,
                ..shell_order("exit 0")
            },
        });
        let Err(Failure::Io(why)) = wait_until_restored(tasker) else {
            panic!("it began")
        };
        assert!(why.contains("no-program: Permission denied"), "{why}");
    });
}

/// A program that is ordered to run as paused runs only when it is resumed.
#[test]
fn held_program_begins_when_freed() {
    with_and_without_rights(|tasker| {
        tasker.send(ToTasker::PrepareRestart {
            migration: MIGRATION,
            start: shell_order("echo hello"),
        });
        let pid = wait_until_restored(tasker).expect("built");
        tasker.send(ToTasker::Run {
            migration: MIGRATION,
            used: Usage::default(),
            paused: true,
        });
        tasker.wait_for(&mut Vec::new(), |m| {
            matches!(m, FromTasker::Running { .. }).then_some(())
        });
        assert_eq!(proc::stat(pid).expect("it is there").state, 'T');
        tasker.send(ToTasker::Resume { tid: tid(1) });
        assert_eq!(wait_for_exit(tasker), ("hello\n".to_string(), 0));
    });
}

/// If a program exits with the agreed status, its remaining children are ended; with another status
/// they continue.
#[test]
fn agreed_exit_ends_children_left_behind() {
    with_and_without_rights(|tasker| {
        for (code, stays) in [(85, false), (3, true)] {
            let sleeper = start_with_sleeper(
                tasker,
                &format!("trap 'exit {code}' USR1; echo ready; while :; do sleep 0.01; done"),
            );
            tasker.send(ToTasker::RequestExit {
                tid: tid(1),
                engine: SELF_CHECKPOINT,
            });
            assert_eq!(wait_for_exit(tasker).1, code << 8);
            if !stays {
                wait_until("it is gone", || !is_alive(sleeper));
            }
            assert_eq!(is_alive(sleeper), stays, "{code}");
            // Without a namespace only this signal ends the sleeper.
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(sleeper),
                nix::sys::signal::Signal::SIGKILL,
            );
        }
    });
}

/// A program that was requested by a message to exit may exit immediately, and no child remains.
#[test]
fn exit_before_the_message_is_accepted() {
    let by_message = Engine::SelfCheckpoint {
        ask_method: AskMethod::Message(77),
        exit_status: 85,
        timeout_s: 30,
    };
    with_and_without_rights(|tasker| {
        let dir = tempfile::tempdir().expect("dir");
        let go = dir.path().join("go");
        // Without a handler for SIGUSR1 the tasker would not request the exit by the signal.
        let script = format!(
            "echo ready; until [ -e {} ]; do sleep 0.01; done; exit 85",
            go.display()
        );
        let sleeper = start_with_sleeper(tasker, &script);
        tasker.send(ToTasker::RequestExit {
            tid: tid(1),
            engine: by_message,
        });
        tasker.wait_for(&mut Vec::new(), |m| {
            matches!(m, FromTasker::ExitExpected { .. }).then_some(())
        });
        assert!(is_alive(sleeper));
        std::fs::write(&go, "").expect("written");
        assert_eq!(wait_for_exit(tasker).1, 85 << 8);
        wait_until("the sleeper is ended", || !is_alive(sleeper));
    });
}

/// The exit signal is not sent to a program that does not handle it.
#[test]
fn program_without_handler_gets_no_signal() {
    with_and_without_rights(|tasker| {
        let dir = tempfile::tempdir().expect("dir");
        let file = dir.path().join("go");
        let script = format!(
            "until [ -e {} ]; do sleep 0.01; done; trap 'exit 85' USR1; echo ready; while :; do sleep 0.01; done",
            file.display()
        );
        tasker.send(ToTasker::Start(shell_order(&script)));
        tasker.wait_for(&mut Vec::new(), |m| {
            matches!(m, FromTasker::Started { .. }).then_some(())
        });
        tasker.send(ToTasker::RequestExit {
            tid: tid(1),
            engine: SELF_CHECKPOINT,
        });
        let why = tasker.wait_for(&mut Vec::new(), |m| match m {
            FromTasker::ExitNotRequested { why, .. } => Some(why.clone()),
            _ => None,
        });
        assert!(why.contains("has no handler for signal 10"), "{why}");
        std::fs::write(&file, "").expect("written");
        let mut out = Vec::new();
        while !String::from_utf8_lossy(&out).contains("ready") {
            if let FromTasker::Output { bytes, .. } = tasker.wait_for_message() {
                out.extend(bytes);
            }
        }
        tasker.send(ToTasker::RequestExit {
            tid: tid(1),
            engine: SELF_CHECKPOINT,
        });
        assert_eq!(wait_for_exit(tasker).1, 85 << 8);
    });
}
