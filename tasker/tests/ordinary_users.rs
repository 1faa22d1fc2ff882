//! Tasks of an ordinary user that a tasker of root runs, as the system service does.

mod common;

use checkpoint::proc;
use common::migration_steps::*;
use common::{Tasker, pause_and_wait, shell_path, start_order, tid, user_dir, wait_until};
use procfs::process::{LimitValue, Process};
use sempa_proto::Micros;
use sempa_proto::tasker::{FromTasker, ToTasker};
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

/// An ordinary user with an account on every machine, without a home directory.
const NOBODY: u32 = 65_534;

/// Runs a shell script as a task. Returns its output.
fn output_of(tasker: &mut Tasker, script: &str) -> String {
    tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", script]);
    let (output, status, _) = tasker.wait_for_exit(tid(1));
    let output = String::from_utf8(output).expect("text");
    assert_eq!(status, 0, "{output}");
    output
}

/// Returns the value of a field of /proc/PID/status in `status`.
fn status_field<'a>(status: &'a str, name: &str) -> Vec<&'a str> {
    let line = status.lines().find(|line| line.starts_with(name));
    line.expect("the field")
        .split_whitespace()
        .skip(1)
        .collect()
}

/// A task has the ids and groups of its user, no capability, no way to gain one, and the limits of
/// its daemon.
#[test]
#[ignore = "system tier: needs root and namespaces"]
fn task_has_exactly_the_rights_of_its_user() {
    let mut tasker = Tasker::start_for_user(NOBODY);
    let status = output_of(&mut tasker, "cat /proc/self/status");
    let id = NOBODY.to_string();
    for name in ["Uid:", "Gid:"] {
        assert_eq!(status_field(&status, name), [&id; 4], "{status}");
    }
    assert_eq!(status_field(&status, "Groups:"), [&id], "{status}");
    for name in ["CapInh:", "CapPrm:", "CapEff:", "CapAmb:"] {
        assert_eq!(
            status_field(&status, name),
            ["0000000000000000"],
            "{status}"
        );
    }
    assert_eq!(status_field(&status, "NoNewPrivs:"), ["1"], "{status}");
    let limits = output_of(&mut tasker, "cat /proc/self/limits");
    let own_limits = Process::myself()
        .and_then(|process| process.limits())
        .expect("own limits");
    let LimitValue::Value(open_files) = own_limits.max_open_files.hard_limit else {
        panic!("the kernel limits descriptors");
    };
    let open_files_line = limits
        .lines()
        .find(|line| line.starts_with("Max open files"));
    assert!(
        open_files_line.is_some_and(|line| line.contains(&open_files.to_string())),
        "{limits}"
    );
    tasker.stop_and_wait();
}

/// A task sees its own processes in /proc, and neither those of the host nor those of other tasks.
#[test]
#[ignore = "system tier: needs root and namespaces"]
fn task_sees_only_its_own_processes() {
    let mut tasker = Tasker::start_for_user(NOBODY);
    tasker.start_task_and_wait(tid(2), &shell_path(), &["-c", "exec sleep 60"]);
    let script = "cat /proc/[0-9]*/comm; test \"$(readlink /proc/self)\" -gt 1 && echo seen";
    let names = output_of(&mut tasker, script);
    assert!(
        names.contains("pvm-init") && names.contains("seen"),
        "{names}"
    );
    assert!(
        !names.contains("pvm-tasker") && !names.contains("sleep"),
        "{names}"
    );
    tasker.stop_and_wait();
}

/// The working directory and the program are those that the user may use, not those of root.
#[test]
#[ignore = "system tier: needs root and namespaces"]
fn roots_directories_and_programs_are_refused() {
    let dir = tempfile::tempdir().expect("a directory");
    let secret_dir = dir.path().join("secret");
    fs::create_dir(&secret_dir).expect("the test's own directory");
    fs::set_permissions(&secret_dir, PermissionsExt::from_mode(0o700)).expect("permissions");
    fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o755)).expect("permissions");
    let program = dir.path().join("program");
    fs::copy(shell_path(), &program).expect("copied");
    fs::set_permissions(&program, PermissionsExt::from_mode(0o700)).expect("permissions");
    let mut tasker = Tasker::start_for_user(NOBODY);
    let mut in_secret_dir = start_order(tid(1), &shell_path(), &["-c", "pwd"]);
    in_secret_dir.working_dir = secret_dir;
    let secret_program = start_order(tid(1), &program, &["-c", "id"]);
    for (order, part) in [
        (in_secret_dir, "working directory"),
        (secret_program, "denied"),
    ] {
        tasker.send(ToTasker::Start(order));
        let reason = tasker.wait_for_value(&mut Vec::new(), |message| match message {
            FromTasker::StartFailed { reason, .. } => Some(reason.clone()),
            FromTasker::Started { .. } => panic!("it was started"),
            _ => None,
        });
        assert!(reason.contains(part), "{reason}");
    }
    tasker.stop_and_wait();
}

/// A task of a user is paused and resumed like one of root.
#[test]
#[ignore = "system tier: needs root and namespaces"]
fn task_is_paused_and_resumed() {
    let mut tasker = Tasker::start_for_user(NOBODY);
    let script = "while :; do :; done";
    let pid = tasker.start_task_and_wait(tid(1), &shell_path(), &["-c", script]);
    common::wait_until_runs(pid);
    pause_and_wait(&mut tasker, Micros(0), &mut Vec::new());
    let ticks = common::cpu_ticks(pid);
    assert_eq!(tasker.capabilities.freezer, Ok(()));
    assert_eq!(common::cpu_ticks(pid), ticks);
    tasker.send(ToTasker::Resume { tid: tid(1) });
    common::wait_until_runs(pid);
    assert_eq!(
        Path::new("/proc")
            .join(pid.to_string())
            .metadata()
            .expect("it runs")
            .uid(),
        NOBODY
    );
    tasker.stop_and_wait();
    wait_until("the task has ended with the tasker", || {
        proc::stat(pid).is_none()
    });
}

/// A counter of an ordinary user, with threads and pipes, migrates there and back three times, and
/// loses no line.
#[test]
#[ignore = "system tier: needs root, CRIU and gcc"]
fn counter_of_a_user_migrates_without_loss() {
    require_migration();
    let dir = user_dir(Some(NOBODY));
    let counter = compile_program(dir.path(), "counter");
    let mut taskers = [
        Tasker::start_for_user(NOBODY),
        Tasker::start_for_user(NOBODY),
    ];
    taskers[0].start_task_and_wait(tid(1), &counter, &[]);
    let mut output = Vec::new();
    taskers[0].wait_for_output(tid(1), &mut output, |text| count_lines(text) > 100);
    for round in 1..=6 {
        let [first, second] = &mut taskers;
        let (source, target) = match round % 2 {
            1 => (first, second),
            _ => (second, first),
        };
        migrate_task(source, target, tid(1), round, &mut output);
        let line_count = count_lines(&output) + 200;
        target.wait_for_output(tid(1), &mut output, |text| count_lines(text) > line_count);
    }
    assert_no_line_lost(&output);
    taskers.into_iter().for_each(Tasker::stop_and_wait);
}
