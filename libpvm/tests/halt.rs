//! Tests what happens to programs from a command line when their virtual machine is halted, with
//! real processes and one daemon.

use libpvm::proto::task::{Claim, OnDaemonExit};
use libpvm::runtime::EnrollOptions;
use libpvm::{Match, Runtime, Vm};
use nix::sys::signal::Signal;
use sempa_tests::private_vm::PrivateVm;
use sempa_tests::run::RunningCommand;
use sempa_tests::{programs, requirements, wait_for};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, Stdio};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Environment variable that makes the test program run as a child task.
const CHILD_TASK_ENV: &str = "SEMPA_TEST_PART";
/// The mailbox class in which `pvm_reg_rm` registers.
const RM_CLASS: &str = "###_PVM_RM_###";

/// Code of the child process that other tests start; it is not a test.
#[test]
#[ignore = "child process of another test"]
fn child_enrols_and_receives() {
    if std::env::var_os(CHILD_TASK_ENV).is_none() {
        return;
    }
    let vm = Vm::enroll_as(OnDaemonExit::Terminate).expect("a daemon");
    println!("here");
    let end = vm.recv(Match::any());
    panic!("nothing was sent to it, and yet it goes on: {end:?}");
}

/// Connects this process as a task that is not ended by a halt.
fn enroll_task(lab: &PrivateVm) -> Vm {
    let options = EnrollOptions {
        socket: lab.socket(),
        claim: Claim::New,
        program: "halt".into(),
        on_daemon_exit: OnDaemonExit::FailCalls,
    };
    Vm::from_runtime(Runtime::connect(options).expect("a daemon"))
}

/// Waits until a program has written this text, and fails the test after a timeout.
fn wait_for_output(program: &RunningCommand, words: &str) {
    let said = wait_for(TIMEOUT, || match program.out_so_far() {
        Ok(text) if text.contains(words) => Ok(()),
        other => Err(format!(
            "{words:?} is not in {other:?}, {:?}",
            program.err_so_far()
        )),
    });
    said.unwrap_or_else(|error| panic!("{error:#}"));
}

fn wait_for_exit(program: RunningCommand) -> ExitStatus {
    program
        .finish(TIMEOUT)
        .unwrap_or_else(|error| panic!("{error:#}"))
        .status
}

fn exits_by_sigterm(program: RunningCommand) -> bool {
    wait_for_exit(program).signal() == Some(Signal::SIGTERM as i32)
}

/// A halt notifies or ends a task of the Rust API, depending on the task's [`OnDaemonExit`].
#[test]
#[ignore = "system tier: needs installed programs"]
fn halt_notifies_or_ends_tasks_as_they_chose() {
    let lab = PrivateVm::started(None);
    let told = enroll_task(&lab);
    let mut command = lab.command(std::env::current_exe().expect("a path"));
    command
        .args([
            "--exact",
            "child_enrols_and_receives",
            "--ignored",
            "--nocapture",
        ])
        .env(CHILD_TASK_ENV, "");
    let ended = RunningCommand::start(command, Stdio::null()).expect("a process");
    wait_for_output(&ended, "here");
    assert!(lab.pvm(&["halt"]).succeeded());
    assert!(exits_by_sigterm(ended));
    told.recv(Match::any()).expect_err("the daemon is gone");
}

#[test]
#[ignore = "system tier: needs installed programs and Debian's PVM"]
fn halt_ends_debians_console_and_rm() {
    let programs = ["/usr/bin/pvm", "/usr/bin/srm.pvm"];
    requirements::require_program(programs[0], "pvm");
    requirements::require_program(programs[1], "pvm-examples");
    let lab = PrivateVm::started(None);
    let watcher = enroll_task(&lab);
    let mut console =
        RunningCommand::start(lab.command(programs[0]), Stdio::piped()).expect("it starts");
    let mut typed = console.take_stdin().expect("piped");
    typed.write_all(b"id\n").expect("it reads");
    wait_for_output(&console, "t40002");
    let manager =
        RunningCommand::start(lab.command(programs[1]), Stdio::null()).expect("it starts");
    let registered = wait_for(TIMEOUT, || match watcher.mailbox_list(RM_CLASS) {
        Ok(classes) if !classes.is_empty() => Ok(()),
        other => Err(format!("no manager: {other:?}")),
    });
    registered.unwrap_or_else(|error| panic!("{error:#}"));
    assert!(lab.pvm(&["halt"]).succeeded());
    assert!(exits_by_sigterm(console), "the console");
    assert!(exits_by_sigterm(manager), "the resource manager");
}

/// A halt neither waits for a program that ignores SIGTERM nor kills it.
#[test]
#[ignore = "system tier: needs installed programs and gcc"]
fn halt_does_not_wait_for_ignored_sigterm() {
    let lab = PrivateVm::started(None);
    let prefix = requirements::prefix().expect("the lab has found it");
    let program = programs::compile("stubborn", &prefix, &lab.path("bin"))
        .unwrap_or_else(|error| panic!("{error:#}"));
    let mut stubborn =
        RunningCommand::start(lab.command(program), Stdio::piped()).expect("it starts");
    let word = stubborn.take_stdin().expect("piped");
    wait_for_output(&stubborn, "here");
    assert!(lab.pvm(&["halt"]).succeeded());
    assert_eq!(
        (lab.daemon_pid(), stubborn.poll().expect("our child")),
        (None, None)
    );
    drop(word);
    let done = stubborn
        .finish(TIMEOUT)
        .unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(
        (done.succeeded(), done.out.as_str()),
        (true, "here\nrecv: -14\n"),
        "{done:?}"
    );
}
