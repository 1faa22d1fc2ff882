//! Tests of programs that write their own checkpoints: they are asked to end, and started again.

mod common;

use common::{Tasker, is_alive, order, tid, wait_until};
use sempa_proto::MigrationId;
use sempa_proto::engine::{AskMethod, Engine};
use sempa_proto::migration::{Failure, Usage};
use sempa_proto::tasker::{FromTasker, StartTask, ToTasker};
use std::path::Path;

const MOVE: MigrationId = MigrationId(7);
const OWN: Engine = Engine::SelfCheckpoint {
    ask_method: AskMethod::Signal(10),
    exit_status: 85,
    timeout_s: 30,
};
/// Removes all capabilities: an ordinary user may not make namespaces.
const WITHOUT_RIGHTS: [&str; 2] = ["setpriv", "--bounding-set=-all"];

fn shell(script: &str) -> StartTask {
    order(tid(1), Path::new("/bin/sh"), &["-c", script])
}

fn restored(tasker: &mut Tasker) -> Result<i32, Failure> {
    tasker.until(&mut Vec::new(), |m| match m {
        FromTasker::Restored { result, .. } => Some(result.clone()),
        _ => None,
    })
}

/// Returns the output of the task and its wait status.
fn end(tasker: &mut Tasker) -> (String, i32) {
    let (out, status, _) = tasker.follow_to_the_end(tid(1));
    (String::from_utf8_lossy(&out).into_owned(), status)
}

/// Starts a task with a sleeping child, waits for `ready`, and returns the child's pid.
fn with_sleeper(tasker: &mut Tasker, script: &str) -> i32 {
    tasker.send(ToTasker::Start(shell(&format!("sleep 1000 & {script}"))));
    let mut out = Vec::new();
    let mut task = None;
    while !String::from_utf8_lossy(&out).contains("ready") {
        match tasker.next() {
            FromTasker::Output { bytes, .. } => out.extend(bytes),
            FromTasker::Started { pid, .. } => task = Some(pid),
            _ => {}
        }
    }
    let task = task.expect("started");
    let children =
        || std::fs::read_to_string(format!("/proc/{task}/task/{task}/children")).expect("children");
    let is_sleeper = |pid: &i32| {
        std::fs::read(format!("/proc/{pid}/cmdline"))
            .is_ok_and(|line| line.starts_with(b"sleep\x001000\x00"))
    };
    let find = || {
        children()
            .split(' ')
            .filter_map(|pid| pid.parse().ok())
            .find(is_sleeper)
    };
    wait_until("there is a sleeper", || find().is_some());
    find().expect("just seen")
}

fn with_and_without_rights(test: impl Fn(&mut Tasker)) {
    test(&mut Tasker::start());
    if nix::unistd::geteuid().is_root() {
        let mut tasker = Tasker::start_by(&WITHOUT_RIGHTS, &[]);
        assert!(!tasker.ready.pid_namespaces);
        test(&mut tasker);
    }
}

/// A program that is built runs only after `Run`.
#[test]
fn built_program_waits_for_run() {
    with_and_without_rights(|tasker| {
        let dir = tempfile::tempdir().expect("dir");
        let file = dir.path().join("ran");
        tasker.send(ToTasker::PrepareRestart {
            migration: MOVE,
            start: shell(&format!("echo hello; touch {}", file.display())),
        });
        let pid = restored(tasker).expect("built");
        let state = checkpoint::status::ProcStatus::of(pid).expect("it is there");
        assert!(
            state
                .field("State")
                .is_some_and(|state| state.starts_with('T')),
            "{state:?}"
        );
        assert_eq!(
            std::fs::read_dir(format!("/proc/{pid}/fd"))
                .expect("its descriptors")
                .count(),
            3
        );
        assert!(!file.exists());
        tasker.send(ToTasker::Run {
            migration: MOVE,
            used: Usage::default(),
            paused: false,
        });
        assert_eq!(end(tasker), ("hello\n".to_string(), 0));
        assert!(file.exists());
    });
}

/// A program that is built and discarded never runs; one that cannot be started is reported.
#[test]
fn discarded_program_never_runs() {
    with_and_without_rights(|tasker| {
        tasker.send(ToTasker::PrepareRestart {
            migration: MOVE,
            start: shell("exit 0"),
        });
        let pid = restored(tasker).expect("built");
        tasker.send(ToTasker::Discard { migration: MOVE });
        tasker.until(&mut Vec::new(), |m| {
            matches!(m, FromTasker::Discarded { .. }).then_some(())
        });
        wait_until("it is gone", || !is_alive(pid));
        let start = StartTask {
            working_dir: "/nowhere/at/all".into(),
            ..shell("exit 0")
        };
        tasker.send(ToTasker::PrepareRestart {
            migration: MigrationId(8),
            start,
        });
        let Err(Failure::Io(why)) = restored(tasker) else {
            panic!("it began")
        };
        assert!(
            why.contains("working directory /nowhere/at/all") && why.contains("No such file"),
            "{why}"
        );
        // Refused before any resource is taken.
        let dir = tempfile::tempdir().expect("dir");
        let path = dir.path().join("no-program");
        std::fs::write(&path, "not to be run").expect("written");
        tasker.send(ToTasker::PrepareRestart {
            migration: MigrationId(9),
            start: StartTask {
                path,
                ..shell("exit 0")
            },
        });
        let Err(Failure::Io(why)) = restored(tasker) else {
            panic!("it began")
        };
        assert!(why.contains("no-program: Permission denied"), "{why}");
    });
}

/// A program that is held at `Run` begins when it is freed.
#[test]
fn held_program_begins_when_freed() {
    with_and_without_rights(|tasker| {
        tasker.send(ToTasker::PrepareRestart {
            migration: MOVE,
            start: shell("echo hello"),
        });
        let pid = restored(tasker).expect("built");
        tasker.send(ToTasker::Run {
            migration: MOVE,
            used: Usage::default(),
            paused: true,
        });
        tasker.until(&mut Vec::new(), |m| {
            matches!(m, FromTasker::Running { .. }).then_some(())
        });
        let state = checkpoint::status::ProcStatus::of(pid).expect("it is there");
        assert!(
            state
                .field("State")
                .is_some_and(|state| state.starts_with('T')),
            "{state:?}"
        );
        tasker.send(ToTasker::Resume { tid: tid(1) });
        assert_eq!(end(tasker), ("hello\n".to_string(), 0));
    });
}

/// Children that a program leaves are ended if it ends with the agreed code, and only then.
#[test]
fn agreed_exit_ends_children_left_behind() {
    with_and_without_rights(|tasker| {
        for (code, stays) in [(85, false), (3, true)] {
            let sleeper = with_sleeper(
                tasker,
                &format!("trap 'exit {code}' USR1; echo ready; while :; do sleep 0.01; done"),
            );
            tasker.send(ToTasker::RequestExit {
                tid: tid(1),
                engine: OWN,
            });
            assert_eq!(end(tasker).1, code << 8);
            if !stays {
                wait_until("it is gone", || !is_alive(sleeper));
            }
            assert_eq!(is_alive(sleeper), stays, "{code}");
            // Without a namespace nothing else ends it.
            let _ = nix::sys::signal::kill(
                nix::unistd::Pid::from_raw(sleeper),
                nix::sys::signal::Signal::SIGKILL,
            );
        }
    });
}

/// A program that is asked by a message may end as soon as that is expected, and no child remains.
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
        // Without a handler for SIGUSR1 the tasker would not ask it by the signal.
        let script = format!(
            "echo ready; until [ -e {} ]; do sleep 0.01; done; exit 85",
            go.display()
        );
        let sleeper = with_sleeper(tasker, &script);
        tasker.send(ToTasker::RequestExit {
            tid: tid(1),
            engine: by_message,
        });
        tasker.until(&mut Vec::new(), |m| {
            matches!(m, FromTasker::ExitExpected { .. }).then_some(())
        });
        assert!(is_alive(sleeper));
        std::fs::write(&go, "").expect("written");
        assert_eq!(end(tasker).1, 85 << 8);
        wait_until("the sleeper is ended", || !is_alive(sleeper));
    });
}

/// A program that the signal would end is not asked.
#[test]
fn program_without_handler_gets_no_signal() {
    with_and_without_rights(|tasker| {
        let dir = tempfile::tempdir().expect("dir");
        let file = dir.path().join("go");
        let script = format!(
            "until [ -e {} ]; do sleep 0.01; done; trap 'exit 85' USR1; echo ready; while :; do sleep 0.01; done",
            file.display()
        );
        tasker.send(ToTasker::Start(shell(&script)));
        tasker.until(&mut Vec::new(), |m| {
            matches!(m, FromTasker::Started { .. }).then_some(())
        });
        tasker.send(ToTasker::RequestExit {
            tid: tid(1),
            engine: OWN,
        });
        let why = tasker.until(&mut Vec::new(), |m| match m {
            FromTasker::ExitNotRequested { why, .. } => Some(why.clone()),
            _ => None,
        });
        assert!(why.contains("has no handler for signal 10"), "{why}");
        std::fs::write(&file, "").expect("written");
        let mut out = Vec::new();
        while !String::from_utf8_lossy(&out).contains("ready") {
            if let FromTasker::Output { bytes, .. } = tasker.next() {
                out.extend(bytes);
            }
        }
        tasker.send(ToTasker::RequestExit {
            tid: tid(1),
            engine: OWN,
        });
        assert_eq!(end(tasker).1, 85 << 8);
    });
}
