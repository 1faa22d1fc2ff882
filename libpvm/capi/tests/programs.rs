//! Tests of C programs with the library: without a daemon, and with a fake daemon that serves one
//! task.

mod common;

use common::{FakeDaemon, Program, include, must_succeed, require_file};
use std::process::Stdio;

const DEBIAN_HEADER: &str = "/usr/include/pvm3.h";

/// Buffers, packing, options and errors work without a daemon.
#[test]
#[ignore = "system tier: needs gcc"]
fn buffers_and_options_work_without_a_daemon() {
    let nowhere = tempfile::tempdir().expect("a directory");
    let program = Program::compile("offline", &include());
    must_succeed(&program.command(nowhere.path()).output().expect("runs"));
}

/// For a single task each call returns the documented result.
#[test]
#[ignore = "system tier: needs gcc"]
fn single_task_gets_what_the_interface_says() {
    let daemon = FakeDaemon::start();
    let program = Program::compile("alone", &include());
    must_succeed(&program.command(daemon.tmp()).output().expect("runs"));
}

#[test]
#[ignore = "system tier: needs gcc and Debian's PVM"]
fn programs_compiled_with_debians_header_run() {
    require_file(DEBIAN_HEADER, "pvm-dev");
    // Without the folder of this project's headers the compiler uses Debian's header, which leaves
    // some calls undeclared.
    let (daemon, nowhere) = (
        FakeDaemon::start(),
        tempfile::tempdir().expect("a directory"),
    );
    for (name, tmp) in [("offline", nowhere.path()), ("alone", daemon.tmp())] {
        let program = Program::compile_with(name, nowhere.path(), &["-w"]);
        must_succeed(&program.command(tmp).output().expect("runs"));
    }
}

/// A missing daemon is reported in one line, and each error of a call in another line.
#[test]
#[ignore = "system tier: needs gcc"]
fn missing_daemon_is_reported_in_one_line() {
    let nowhere = tempfile::tempdir().expect("a directory");
    let program = Program::compile("offline", &include());
    let mut command = program.command(nowhere.path());
    command
        .arg("lines")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = command.spawn().expect("runs");
    let pid = child.id();
    let done = child.wait_with_output().expect("ends");
    assert_eq!(String::from_utf8_lossy(&done.stdout), "-14\n");
    let err = String::from_utf8_lossy(&done.stderr).into_owned();
    let lines: Vec<&str> = err.lines().collect();
    assert!(
        lines[0].starts_with(&format!("libpvm [pid{pid}] ")),
        "{err}"
    );
    assert!(
        lines[0].contains(&*nowhere.path().to_string_lossy()),
        "{err}"
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
    assert_eq!(lines.len(), 4, "{err}");
    // PvmAutoErr 2 ends the program with the code.
    assert_eq!(done.status.code(), Some(-16 & 255));
}

/// Root without permission is refused in one line.
#[test]
#[ignore = "system tier: needs root and gcc"]
fn root_without_permission_is_refused() {
    let root = std::fs::metadata("/proc/self")
        .map(|of| std::os::unix::fs::MetadataExt::uid(&of))
        .expect("this process");
    assert_eq!(root, 0, "cannot run here: only root is refused");
    let daemon = FakeDaemon::start();
    let program = Program::compile("alone", &include());
    let done = program
        .command(daemon.tmp())
        .env_remove("PVM_ALLOW_ROOT")
        .output()
        .expect("runs");
    assert_eq!(done.status.code(), Some(1));
    let out = String::from_utf8_lossy(&done.stdout).into_owned();
    assert!(
        out.contains("PVM_ALLOW_ROOT") && out.lines().count() == 1,
        "{out}"
    );
}

/// The output of children is printed line by line until they end.
#[test]
#[ignore = "system tier: needs gcc"]
fn output_of_children_is_printed_by_line() {
    let daemon = FakeDaemon::start();
    let program = Program::compile("alone", &include());
    let done = program
        .command(daemon.tmp())
        .arg("catch")
        .output()
        .expect("runs");
    must_succeed(&done);
    let out = String::from_utf8_lossy(&done.stdout).into_owned();
    assert_eq!(
        out,
        "[t40002] BEGIN\n[t40002] one\n[t40002] two\n[t40002] EOF\n"
    );
    let done = program
        .command(daemon.tmp())
        .args(["catch", "bare"])
        .output()
        .expect("runs");
    must_succeed(&done);
    assert_eq!(String::from_utf8_lossy(&done.stdout), "one\ntwo\n");
}

/// A spawned task receives the tids of its siblings from its parent's library.
#[test]
#[ignore = "system tier: needs gcc"]
fn spawned_task_receives_its_siblings() {
    let daemon = FakeDaemon::with_parent(sempa_proto::Tid::from_raw(0x40009));
    let program = Program::compile("alone", &include());
    must_succeed(
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
    let nowhere = tempfile::tempdir().expect("a directory");
    let program = nowhere.path().join("offline");
    let library = common::library().with_file_name("libpvm3.a");
    common::link(
        &common::source("offline"),
        &include(),
        &["-Wno-stringop-overread"],
        &library,
        &program,
    );
    let mut command = std::process::Command::new(program);
    command
        .env("PVM_TMP", nowhere.path())
        .env("PVM_ALLOW_ROOT", "1")
        .env_remove("PVMSOCK")
        .env_remove("PVM_VMID");
    must_succeed(&command.output().expect("runs"));
}

/// Threads may call at the same time, and forked children are tasks of their own.
#[test]
#[ignore = "system tier: needs gcc"]
fn threads_may_call_and_forked_children_enrol() {
    let daemon = FakeDaemon::start();
    let program = Program::compile_with("threads", &include(), &["-Wall", "-Werror", "-pthread"]);
    must_succeed(&program.command(daemon.tmp()).output().expect("runs"));
}
