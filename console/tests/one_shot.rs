//! Tests of single console commands, and of the start and the end of the virtual machine: exit
//! statuses and error messages.

mod common;

use common::{Terminal, WAIT_TIMEOUT, private_vm, run_script, running_vm};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_tests::run::{RunningCommand, run_to_end};
use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::process::Stdio;

/// A console that cannot write its output reports the error and fails.
#[test]
#[ignore = "system tier: needs installed programs"]
fn unwritable_output_is_reported() {
    let vm = running_vm();
    let full_device = || {
        OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .expect("a full device")
    };
    let output = vm
        .console_command()
        .arg("conf")
        .stdin(Stdio::null())
        .stdout(full_device())
        .output()
        .expect("it starts");
    assert_eq!(output.status.code(), Some(1));
    let stderr_text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(
        stderr_text,
        "pvm: standard output cannot be written: No space left on device (os error 28)\n"
    );
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn usage_errors_begin_with_the_program_name() {
    let vm = private_vm();
    for (words, expected_start) in [
        (
            &["--json", "halt"][..],
            "pvm: --json belongs to a command that prints something; halt prints nothing",
        ),
        (&["nosuch"], "pvm: nosuch: not found"),
        (&["conf"], "pvm: no virtual machine is running here"),
    ] {
        let output = vm.run_console(words);
        assert!(
            !output.succeeded()
                && output.stdout.is_empty()
                && output.stderr.starts_with(expected_start),
            "{words:?}: {output:?}"
        );
    }
}

/// A command that shows the output of tasks has their exit status: of the first task that failed,
/// in the order of the spawn.
#[test]
#[ignore = "system tier: needs installed programs"]
fn spawn_has_the_exit_status_of_its_tasks() {
    let vm = running_vm();
    let status = |options: &[&str], script: &str| {
        let words = [&["spawn"], options, &["/bin/sh", "-c", script]].concat();
        vm.run_console(&words).status.code()
    };
    assert_eq!(status(&["->"], "exit 0"), Some(0));
    assert_eq!(status(&["->"], "exit 3"), Some(3));
    assert_eq!(status(&["->"], "kill -9 $$"), Some(128 + 9));
    assert_eq!(status(&["-3", "->"], "exit 4"), Some(4));
    let file = vm.path_below("output");
    let file_option = format!("->{}", file.display());
    assert_eq!(status(&[&file_option], "exit 5"), Some(5));
    assert_eq!(
        status(&[], "exit 3"),
        Some(0),
        "the command does not wait for tasks whose output goes to the log"
    );
}

/// With `--raw`, standard output contains what the tasks write, and nothing else.
#[test]
#[ignore = "system tier: needs installed programs"]
fn raw_output_has_no_prefix() {
    let vm = running_vm();
    let result = vm.run_console(&[
        "spawn",
        "--raw",
        "/bin/sh",
        "-c",
        "echo hello; echo; exit 2",
    ]);
    assert_eq!(
        (
            result.stdout.as_str(),
            result.stderr.as_str(),
            result.status.code()
        ),
        ("hello\n\n", "", Some(2))
    );
}

/// A console that reads a script fails if one of its commands failed. It executes all of them.
#[test]
#[ignore = "system tier: needs installed programs"]
fn script_fails_with_its_commands() {
    let vm = running_vm();
    let run = |script: &str| {
        let file = vm.path_below("script");
        fs::write(&file, script).expect("written");
        let mut command = vm.console_command();
        command.stdin(fs::File::open(&file).expect("a script"));
        let output = command.output().expect("it starts");
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    };
    assert_eq!(run("conf\nps -a\nquit\n").0, Some(0));
    let (status, text) = run("conf\nkill t40099\nid\n");
    assert_eq!(status, Some(1));
    assert!(text.contains("pvm> id\nt4000"), "{text}");
    assert_eq!(run("nosuch\nquit\n").0, Some(1));
}

/// Signals and migrations of tasks that do not exist fail and say so.
#[test]
#[ignore = "system tier: needs installed programs"]
fn missing_tasks_are_reported() {
    let vm = running_vm();
    for words in [
        &["kill", "t40099"][..],
        &["sig", "USR1", "t40099"],
        &["kill", "-c", "t40099"],
        &["migrate", "t40099", "."],
        &["can-migrate", "t40099"],
    ] {
        let result = vm.run_console(words);
        assert!(
            result.status.code() == Some(1)
                && result.stderr.contains("t40099")
                && result.stderr.contains("no such task"),
            "{words:?}: {result:?}"
        );
    }
}

/// A spawn into a directory that does not exist is refused.
#[test]
#[ignore = "system tier: needs installed programs"]
fn spawn_into_missing_directory_is_refused() {
    let vm = running_vm();
    let result = vm.run_console(&["spawn", "-:/nowhere/at/all", "/bin/true"]);
    assert!(
        result.status.code() == Some(1)
            && result
                .stderr
                .contains("the directory /nowhere/at/all does not exist there"),
        "{result:?}"
    );
    assert!(
        vm.run_console(&["spawn", "-:/usr", "/bin/true"])
            .succeeded()
    );
}

/// If several consoles halt at the same time, each succeeds or reports that no virtual machine is
/// running.
#[test]
#[ignore = "system tier: needs installed programs"]
fn concurrent_halts_end_the_vm() {
    let vm = running_vm();
    let halts: Vec<RunningCommand> = (0..6)
        .map(|_| {
            let mut command = vm.console_command();
            command.arg("halt");
            RunningCommand::start(command, Stdio::null()).expect("it starts")
        })
        .collect();
    let output: Vec<_> = halts
        .into_iter()
        .map(|halt| halt.wait_or_kill(WAIT_TIMEOUT).expect("it ends"))
        .collect();
    assert!(!vm.daemon_folder().exists(), "nothing is left");
    assert!(output.iter().any(|output| output.succeeded()), "{output:?}");
    for output in output {
        // The last console may find that the virtual machine has ended.
        let found_no_vm = output
            .stderr
            .starts_with("pvm: no virtual machine is running here");
        assert!(
            (output.succeeded() && output.stderr.is_empty()) || found_no_vm,
            "{output:?}"
        );
    }
}

/// A daemon closes the locks and pipes that it inherits from the process that started it.
#[test]
#[ignore = "system tier: needs installed programs"]
fn daemon_keeps_no_locks_or_pipes_of_its_starter() {
    let vm = private_vm();
    let start_under_a_lock = |lock_option: &str, program: &str| {
        let mut command = vm.command_in_vm("flock");
        command
            .args([lock_option, "lock", program])
            .args((program != "true").then_some("start"));
        run_to_end(command, WAIT_TIMEOUT).expect("it ends")
    };
    assert!(start_under_a_lock("--exclusive", "pvm").succeeded());
    assert!(vm.daemon_pid().is_some(), "it runs");
    let second_run = start_under_a_lock("--nonblock", "true");
    assert!(
        second_run.succeeded(),
        "the lock is free again: {second_run:?}"
    );
}

/// After a daemon is killed, the console reports that no virtual machine is running, and the next
/// start repairs the files.
#[test]
#[ignore = "system tier: needs installed programs"]
fn start_after_a_killed_daemon_repairs_its_files() {
    let vm = running_vm();
    kill(
        Pid::from_raw(vm.daemon_pid().expect("a daemon")),
        Signal::SIGKILL,
    )
    .expect("ours");
    let conf_output = sempa_tests::wait_for(WAIT_TIMEOUT, || {
        let output = vm.run_console(&["conf"]);
        // A daemon that is being killed may still accept a connection and close the connection.
        if output.stderr.contains("no virtual machine") {
            Ok(output)
        } else {
            Err(format!("{output:?}"))
        }
    });
    let conf_output = conf_output.expect("it is dead");
    assert!(
        conf_output
            .stderr
            .starts_with("pvm: no virtual machine is running here: start one with `pvm`"),
        "{conf_output:?}"
    );
    let halt_output = vm.run_console(&["halt"]);
    assert!(
        !halt_output.succeeded()
            && halt_output
                .stderr
                .starts_with("pvm: no virtual machine is running here"),
        "{halt_output:?}"
    );
    let start_output = vm.run_console(&["start"]);
    assert!(
        start_output.succeeded() && start_output.stdout.is_empty(),
        "it does not think that one runs: {start_output:?}"
    );
    assert!(vm.run_console(&["conf"]).stdout.starts_with("1 host, "));
    vm.run_console(&["halt"])
        .expect_success("halt")
        .expect("it ends");
    assert!(!vm.daemon_folder().exists(), "nothing is left");
}

/// A daemon that is started while the previous daemon ends is usable.
#[test]
#[ignore = "system tier: needs installed programs"]
fn start_during_a_halt_gives_a_working_daemon() {
    let vm = running_vm();
    for _ in 0..20 {
        kill(
            Pid::from_raw(vm.daemon_pid().expect("a daemon")),
            Signal::SIGKILL,
        )
        .expect("ours");
        let start = vm.run_console(&["start"]);
        assert!(start.succeeded() && start.stdout.is_empty(), "{start:?}");
        assert!(vm.run_console(&["conf"]).stdout.starts_with("1 host, "));
    }
    // The daemon listens, and is killed before it accepts the connection of the new console.
    let daemon = Pid::from_raw(vm.daemon_pid().expect("a daemon"));
    kill(daemon, Signal::SIGSTOP).expect("ours");
    let mut command = vm.console_command();
    command.arg("start");
    let start = RunningCommand::start(command, Stdio::null()).expect("it starts");
    let is_receiving = || match fs::read_to_string(format!("/proc/{}/syscall", start.process_id()))
    {
        Ok(call) if call.starts_with(&format!("{} ", nix::libc::SYS_recvmsg)) => Ok(()),
        other => Err(format!("{other:?}")),
    };
    sempa_tests::wait_for(WAIT_TIMEOUT, is_receiving).expect("it waits for an answer");
    kill(daemon, Signal::SIGKILL).expect("ours");
    let start = start.wait_or_kill(WAIT_TIMEOUT).expect("it ends");
    assert!(start.succeeded() && start.stdout.is_empty(), "{start:?}");
    vm.run_console(&["halt"])
        .expect_success("halt")
        .expect("it ends");
}

/// The console that starts a daemon reports the errors of the host file.
#[test]
#[ignore = "system tier: needs installed programs"]
fn start_reports_errors_of_the_host_file() {
    let vm = private_vm();
    let host_file_path = vm.path_below("hosts");
    fs::write(
        &host_file_path,
        "# mine\nh2.invalid zz=1\n& h3.invalid sp=2\nh4.invalid\n",
    )
    .expect("written");
    let mut command = vm.console_command();
    command
        .args(["start", "hosts"])
        .env("PVM_RSH", "/bin/false");
    let output = run_to_end(command, WAIT_TIMEOUT).expect("it ends");
    assert_eq!(
        output.status.code(),
        Some(1),
        "not all of it was done: {output:?}"
    );
    let lines: Vec<&str> = output.stderr.lines().collect();
    assert_eq!(lines.len(), 2, "{output:?}");
    assert!(
        lines[0].starts_with("pvm: h2.invalid zz=1 was not added: ") && lines[0].contains("zz"),
        "{output:?}"
    );
    assert!(
        lines[1].starts_with("pvm: h4.invalid was not added: cannot start a daemon on h4.invalid"),
        "{output:?}"
    );
    assert!(
        vm.run_console(&["conf"]).stdout.starts_with("1 host, "),
        "it runs all the same"
    );
    let second_start = vm.run_console(&["start", "hosts"]);
    assert_eq!(
        (second_start.succeeded(), second_start.stdout.as_str()),
        (true, "pvmd already running.\n")
    );
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn json_output_is_one_value_per_line() {
    let vm = running_vm();
    let parse_output = |words: &[&str]| -> Value {
        let output = vm.run_console(&[&["--json"], words].concat());
        serde_json::from_str(output.stdout.trim())
            .unwrap_or_else(|error| panic!("{words:?}: {error}: {output:?}"))
    };
    let host = parse_output(&["conf"])["hosts"][0]["name"]
        .as_str()
        .expect("a name")
        .to_string();
    assert_eq!(
        parse_output(&["mstat", &host, "nohost"])["results"][1]["error"]["code"],
        -6
    );
    assert_eq!(
        parse_output(&["pstat", "t40077"])["results"][0]["up"],
        false
    );
    assert_eq!(
        parse_output(&["getopt", "PvmRoute"])["options"]["PvmRoute"],
        1
    );
    assert!(
        parse_output(&["id"])["tid"]
            .as_str()
            .is_some_and(|tid| tid.starts_with("t40"))
    );
    assert_eq!(
        parse_output(&["names"])["classes"],
        Value::Array(Vec::new())
    );
    assert_eq!(parse_output(&["trace"])["options"], "full");
    assert_eq!(parse_output(&["version"])["interface"], "3.4.6");
    assert_eq!(
        parse_output(&["spawn", "/bin/true"])["results"][0]["tid"]
            .as_str()
            .map(|tid| &tid[..1]),
        Some("t")
    );
    let text = run_script(vm.console_command(), "conf --json\nquit\n", true);
    let line = text
        .lines()
        .find(|line| line.starts_with('{'))
        .expect("a value");
    assert_eq!(
        serde_json::from_str::<Value>(line).expect("JSON")["formats"],
        1
    );
}

/// The commands in `.pvmrc` run before all other commands.
#[test]
#[ignore = "system tier: needs installed programs"]
fn start_file_runs_before_other_commands() {
    let vm = running_vm();
    fs::write(
        vm.home().join(".pvmrc"),
        "# mine\nalias greet echo hello\ngreet 1\n",
    )
    .expect("written");
    let text = run_script(vm.console_command(), "greet 2\n", true);
    let expected = "pvmd already running.\n# mine\nalias greet echo hello\ngreet 1\nhello 1\npvm> greet 2\nhello 2\npvm> quit\n\n\
                  Console: exit handler called\npvmd still running.\n";
    assert_eq!(text, expected);
    let mut terminal = Terminal::start(vm.console_command());
    terminal.wait_for("hello 1\r\n");
    terminal.wait_for("pvm> ");
    terminal.type_keys("greet 3\r");
    terminal.wait_for("\r\nhello 3\r\n");
}
