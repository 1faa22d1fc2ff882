//! Tests of C programs that use the library: without a daemon, and with a fake daemon that serves
//! one task.

mod common;

use common::{FakeDaemon, Program, assert_success, include_dir, require_file};
use std::process::Stdio;

const DEBIAN_HEADER: &str = "/usr/include/pvm3.h";

#[test]
#[ignore = "system tier: needs gcc"]
fn buffers_and_options_work_without_a_daemon() {
    let empty_dir = tempfile::tempdir().expect("a directory");
    let program = Program::compile("offline", &include_dir());
    assert_success(&program.command(empty_dir.path()).output().expect("runs"));
}

#[test]
#[ignore = "system tier: needs gcc"]
fn calls_of_single_task_return_documented_results() {
    let daemon = FakeDaemon::start();
    let program = Program::compile("alone", &include_dir());
    assert_success(&program.command(daemon.tmp()).output().expect("runs"));
}

#[test]
#[ignore = "system tier: needs gcc and Debian's PVM"]
fn programs_compiled_with_debians_header_run() {
    require_file(DEBIAN_HEADER, "pvm-dev");
    // Without this project's header directory the compiler uses Debian's header, which does not
    // declare some calls.
    let (daemon, empty_dir) = (
        FakeDaemon::start(),
        tempfile::tempdir().expect("a directory"),
    );
    for (name, tmp) in [("offline", empty_dir.path()), ("alone", daemon.tmp())] {
        let program = Program::compile_with(name, empty_dir.path(), &["-w"]);
        assert_success(&program.command(tmp).output().expect("runs"));
    }
}

/// A missing daemon is reported in one line, and each error of a call in another line.
#[test]
#[ignore = "system tier: needs gcc"]
fn missing_daemon_is_reported_in_one_line() {
    let empty_dir = tempfile::tempdir().expect("a directory");
    let program = Program::compile("offline", &include_dir());
    let mut command = program.command(empty_dir.path());
    command
        .arg("lines")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = command.spawn().expect("runs");
    let pid = child.id();
    let output = child.wait_with_output().expect("ends");
    assert_eq!(String::from_utf8_lossy(&output.stdout), "-14\n");
    let stderr_text = String::from_utf8_lossy(&output.stderr).into_owned();
    let lines: Vec<&str> = stderr_text.lines().collect();
    assert!(
        lines[0].starts_with(&format!("libpvm [pid{pid}] ")),
        "{stderr_text}"
    );
    assert!(
        lines[0].contains(&*empty_dir.path().to_string_lossy()),
        "{stderr_text}"
    );
    assert_eq!(
        lines[1],
        format!("libpvm [pid{pid}]: pvm_mytid(): Can't contact local daemon")
    );
    assert_eq!(
        lines[2],
        format!("libpvm [pid{pid}]: I: Can't contact local daemon")
    );
    assert_eq!(
        lines[3],
        format!("libpvm [pid{pid}]: pvm_freebuf(): No such buffer")
    );
    assert_eq!(lines.len(), 4, "{stderr_text}");
    // With the value 2 of `PvmAutoErr` the program exits with the error code as its status.
    assert_eq!(output.status.code(), Some(-16 & 255));
}

/// A task that runs as root without permission is refused, with one line of output.
#[test]
#[ignore = "system tier: needs root and gcc"]
fn root_without_permission_is_refused() {
    let user_id = std::fs::metadata("/proc/self")
        .map(|file_info| std::os::unix::fs::MetadataExt::uid(&file_info))
        .expect("this process");
    assert_eq!(user_id, 0, "cannot run here: only root is refused");
    let daemon = FakeDaemon::start();
    let program = Program::compile("alone", &include_dir());
    let output = program
        .command(daemon.tmp())
        .env_remove("PVM_ALLOW_ROOT")
        .output()
        .expect("runs");
    assert_eq!(output.status.code(), Some(1));
    let stdout_text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        stdout_text.contains("PVM_ALLOW_ROOT") && stdout_text.lines().count() == 1,
        "{stdout_text}"
    );
}

/// The output of children is printed line by line until the children end, with or without their
/// tids.
#[test]
#[ignore = "system tier: needs gcc"]
fn output_of_children_is_printed_by_line() {
    let daemon = FakeDaemon::start();
    let program = Program::compile("alone", &include_dir());
    let output = program
        .command(daemon.tmp())
        .arg("catch")
        .output()
        .expect("runs");
    assert_success(&output);
    let stdout_text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(
        stdout_text,
        "[t40002] BEGIN\n[t40002] one\n[t40002] two\n[t40002] EOF\n"
    );
    let output = program
        .command(daemon.tmp())
        .args(["catch", "bare"])
        .output()
        .expect("runs");
    assert_success(&output);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "one\ntwo\n");
}

/// The output of a child that exits without the end of its output ends with a line that says so,
/// and `pvm_exit` returns. Without tids the line is written to standard error.
#[test]
#[ignore = "system tier: needs gcc"]
fn output_of_a_lost_child_ends() {
    let daemon = FakeDaemon::start();
    let program = Program::compile("alone", &include_dir());
    let output = program
        .command(daemon.tmp())
        .args(["catch", "lost"])
        .output()
        .expect("runs");
    assert_success(&output);
    assert_eq!(
        String::from_utf8_lossy(&output.stdout),
        "[t40002] BEGIN\n[t40002] one\n[t40002] half\n\
         [t40002] lost with its host: the last lines may be missing\n[t40002] EOF\n"
    );
    let output = program
        .command(daemon.tmp())
        .args(["catch", "lost", "bare"])
        .stderr(Stdio::piped())
        .output()
        .expect("runs");
    assert_success(&output);
    assert_eq!(String::from_utf8_lossy(&output.stdout), "one\nhalf\n");
    let stderr_text = String::from_utf8_lossy(&output.stderr);
    assert!(
        stderr_text.ends_with("t40002 was lost with its host: the last lines may be missing\n"),
        "{stderr_text}"
    );
}

/// A task whose parent has exited before it sent the list of siblings does not wait for this list.
#[test]
#[ignore = "system tier: needs gcc"]
fn siblings_are_not_awaited_from_an_exited_parent() {
    let parent = sempa_proto::Tid::from_raw(common::EXITED_PARENT_TID);
    let daemon = FakeDaemon::with_parent(parent);
    let program = Program::compile("alone", &include_dir());
    assert_success(
        &program
            .command(daemon.tmp())
            .arg("orphan")
            .output()
            .expect("runs"),
    );
}

/// The parent's library sends a spawned task the tids of its siblings.
#[test]
#[ignore = "system tier: needs gcc"]
fn spawned_task_receives_its_siblings() {
    let daemon = FakeDaemon::with_parent(sempa_proto::Tid::from_raw(0x40009));
    let program = Program::compile("alone", &include_dir());
    assert_success(
        &program
            .command(daemon.tmp())
            .arg("siblings")
            .output()
            .expect("runs"),
    );
}

/// A program that is linked with the static library runs without the shared library.
#[test]
#[ignore = "system tier: needs gcc"]
fn static_program_needs_no_shared_library() {
    let empty_dir = tempfile::tempdir().expect("a directory");
    let program = empty_dir.path().join("offline");
    let library = common::built_library().with_file_name("libpvm3.a");
    common::compile_and_link(
        &common::source_path("offline"),
        &include_dir(),
        &["-Wno-stringop-overread"],
        &library,
        &program,
    );
    let mut command = std::process::Command::new(program);
    command
        .env("PVM_TMP", empty_dir.path())
        .env("PVM_ALLOW_ROOT", "1")
        .env_remove("PVMSOCK")
        .env_remove("PVM_VMID");
    assert_success(&command.output().expect("runs"));
}

/// Several threads may call the library at the same time. Each forked child is a separate task.
#[test]
#[ignore = "system tier: needs gcc"]
fn threads_may_call_and_forked_children_enrol() {
    let daemon = FakeDaemon::start();
    let program =
        Program::compile_with("threads", &include_dir(), &["-Wall", "-Werror", "-pthread"]);
    assert_success(&program.command(daemon.tmp()).output().expect("runs"));
}
