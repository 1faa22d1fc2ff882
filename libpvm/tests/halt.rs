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

/// Code of the child process that another test starts; without `SEMPA_TEST_PART` in its environment
/// the function returns immediately.
#[test]
#[ignore = "child process of another test"]
fn subprocess_enrols_and_receives() {
    if std::env::var_os(CHILD_TASK_ENV).is_none() {
        return;
    }
    let vm = Vm::enroll_as(OnDaemonExit::Terminate).expect("a daemon");
    println!("here");
    let result = vm.recv(Match::any());
    panic!("nothing was sent to it, and yet it goes on: {result:?}");
}

/// Connects this process as a task that survives a halt.
fn enroll_task(private_vm: &PrivateVm) -> Vm {
    let options = EnrollOptions {
        socket: private_vm.socket_path(),
        claim: Claim::NotSpawned,
        program: "halt".into(),
        on_daemon_exit: OnDaemonExit::FailCalls,
        has_automatic_routes: true,
    };
    Vm::from_runtime(Runtime::connect(options).expect("a daemon"))
}

/// Waits until the program has written this text. Panics if the text does not appear within
/// [`TIMEOUT`].
fn wait_for_output(program: &RunningCommand, expected_text: &str) {
    let result = wait_for(TIMEOUT, || match program.stdout_so_far() {
        Ok(text) if text.contains(expected_text) => Ok(()),
        other => Err(format!(
            "{expected_text:?} is not in {other:?}, {:?}",
            program.stderr_so_far()
        )),
    });
    result.unwrap_or_else(|error| panic!("{error:#}"));
}

fn wait_for_exit(program: RunningCommand) -> ExitStatus {
    program
        .wait_or_kill(TIMEOUT)
        .unwrap_or_else(|error| panic!("{error:#}"))
        .status
}

fn wait_for_sigterm_exit(program: RunningCommand) -> bool {
    wait_for_exit(program).signal() == Some(Signal::SIGTERM as i32)
}

/// A halt notifies or ends a task of the Rust API, depending on the task's [`OnDaemonExit`].
#[test]
#[ignore = "system tier: needs installed programs"]
fn halt_notifies_or_ends_tasks_as_they_chose() {
    let private_vm = PrivateVm::start(None);
    let notified_task = enroll_task(&private_vm);
    let mut command = private_vm.command_in_vm(std::env::current_exe().expect("a path"));
    command
        .args([
            "--exact",
            "subprocess_enrols_and_receives",
            "--ignored",
            "--nocapture",
        ])
        .env(CHILD_TASK_ENV, "");
    let child = RunningCommand::start(command, Stdio::null()).expect("a process");
    wait_for_output(&child, "here");
    assert!(private_vm.run_console(&["halt"]).succeeded());
    assert!(wait_for_sigterm_exit(child));
    notified_task
        .recv(Match::any())
        .expect_err("the daemon is gone");
}

#[test]
#[ignore = "system tier: needs installed programs and Debian's PVM"]
fn halt_ends_debians_console_and_rm() {
    let programs = ["/usr/bin/pvm", "/usr/bin/srm.pvm"];
    requirements::require_program(programs[0], "pvm");
    requirements::require_program(programs[1], "pvm-examples");
    let private_vm = PrivateVm::start(None);
    let observer = enroll_task(&private_vm);
    let mut console = RunningCommand::start(private_vm.command_in_vm(programs[0]), Stdio::piped())
        .expect("it starts");
    let mut console_input = console.take_stdin().expect("piped");
    console_input.write_all(b"id\n").expect("it reads");
    wait_for_output(&console, "t40002");
    let manager = RunningCommand::start(private_vm.command_in_vm(programs[1]), Stdio::null())
        .expect("it starts");
    let registration_result = wait_for(TIMEOUT, || match observer.mailbox_list(RM_CLASS) {
        Ok(classes) if !classes.is_empty() => Ok(()),
        other => Err(format!("no manager: {other:?}")),
    });
    registration_result.unwrap_or_else(|error| panic!("{error:#}"));
    assert!(private_vm.run_console(&["halt"]).succeeded());
    assert!(wait_for_sigterm_exit(console), "the console");
    assert!(wait_for_sigterm_exit(manager), "the resource manager");
}

/// A halt does not wait for a program that ignores SIGTERM, and does not kill the program.
#[test]
#[ignore = "system tier: needs installed programs and gcc"]
fn halt_does_not_wait_for_ignored_sigterm() {
    let private_vm = PrivateVm::start(None);
    let prefix = requirements::installed_prefix().expect("the lab has found it");
    let program = programs::compile_into("stubborn", &prefix, &private_vm.path_below("bin"))
        .unwrap_or_else(|error| panic!("{error:#}"));
    let mut stubborn_program =
        RunningCommand::start(private_vm.command_in_vm(program), Stdio::piped())
            .expect("it starts");
    let program_input = stubborn_program.take_stdin().expect("piped");
    wait_for_output(&stubborn_program, "here");
    assert!(private_vm.run_console(&["halt"]).succeeded());
    assert_eq!(
        (
            private_vm.daemon_pid(),
            stubborn_program.poll_status().expect("our child")
        ),
        (None, None)
    );
    drop(program_input);
    let output = stubborn_program
        .wait_or_kill(TIMEOUT)
        .unwrap_or_else(|error| panic!("{error:#}"));
    assert_eq!(
        (output.succeeded(), output.stdout.as_str()),
        (true, "here\nrecv: -14\n"),
        "{output:?}"
    );
}
