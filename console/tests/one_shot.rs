//! Tests of single console commands, starts and ends: exit statuses and error messages.

mod common;

use common::{PATIENCE, Terminal, lab, script, started};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_tests::run::{RunningCommand, run};
use serde_json::Value;
use std::fs::{self, OpenOptions};
use std::process::Stdio;

/// A console that cannot write its output reports the error and fails.
#[test]
#[ignore = "system tier: needs installed programs"]
fn unwritable_output_is_reported() {
    let lab = started();
    let full = || {
        OpenOptions::new()
            .write(true)
            .open("/dev/full")
            .expect("a full device")
    };
    let done = lab
        .console()
        .arg("conf")
        .stdin(Stdio::null())
        .stdout(full())
        .output()
        .expect("it starts");
    assert_eq!(done.status.code(), Some(1));
    let said = String::from_utf8_lossy(&done.stderr);
    assert_eq!(
        said,
        "pvm: standard output cannot be written: No space left on device (os error 28)\n"
    );
}

/// Errors about the command line begin with the name of the program.
#[test]
#[ignore = "system tier: needs installed programs"]
fn usage_errors_begin_with_the_program_name() {
    let lab = lab();
    for (words, said) in [
        (
            &["--json", "halt"][..],
            "pvm: --json belongs to a command that prints something; halt prints nothing",
        ),
        (&["nosuch"], "pvm: nosuch: not found"),
        (&["conf"], "pvm: no virtual machine is running here"),
    ] {
        let done = lab.pvm(words);
        assert!(
            !done.succeeded() && done.out.is_empty() && done.err.starts_with(said),
            "{words:?}: {done:?}"
        );
    }
}

/// Several consoles that halt at the same time all report success.
#[test]
#[ignore = "system tier: needs installed programs"]
fn concurrent_halts_all_succeed() {
    let lab = started();
    let halts: Vec<RunningCommand> = (0..6)
        .map(|_| {
            let mut command = lab.console();
            command.arg("halt");
            RunningCommand::start(command, Stdio::null()).expect("it starts")
        })
        .collect();
    let done: Vec<_> = halts
        .into_iter()
        .map(|halt| halt.finish(PATIENCE).expect("it ends"))
        .collect();
    assert!(!lab.daemon_folder().exists(), "nothing is left");
    assert!(done.iter().any(|done| done.succeeded()), "{done:?}");
    for done in done {
        // The last console may find that the virtual machine has ended.
        let late = done
            .err
            .starts_with("pvm: no virtual machine is running here");
        assert!(
            (done.succeeded() && done.err.is_empty()) || late,
            "{done:?}"
        );
    }
}

/// A daemon closes the locks and pipes that it inherits from the process that started it.
#[test]
#[ignore = "system tier: needs installed programs"]
fn daemon_keeps_no_locks_or_pipes_of_its_starter() {
    let lab = lab();
    let start_under_a_lock = |how: &str, program: &str| {
        let mut command = lab.command("flock");
        command
            .args([how, "lock", program])
            .args((program != "true").then_some("start"));
        run(command, PATIENCE).expect("it ends")
    };
    assert!(start_under_a_lock("--exclusive", "pvm").succeeded());
    assert!(lab.daemon_pid().is_some(), "it runs");
    let next = start_under_a_lock("--nonblock", "true");
    assert!(next.succeeded(), "the lock is free again: {next:?}");
}

/// After a daemon is killed the console reports that none runs, and the next start repairs the
/// files.
#[test]
#[ignore = "system tier: needs installed programs"]
fn start_after_a_killed_daemon_repairs_its_files() {
    let lab = started();
    kill(
        Pid::from_raw(lab.daemon_pid().expect("a daemon")),
        Signal::SIGKILL,
    )
    .expect("ours");
    let none = sempa_tests::wait_for(PATIENCE, || {
        let done = lab.pvm(&["conf"]);
        // A daemon that is being killed may still accept a connection and close it.
        if done.err.contains("no virtual machine") {
            Ok(done)
        } else {
            Err(format!("{done:?}"))
        }
    });
    let none = none.expect("it is dead");
    assert!(
        none.err
            .starts_with("pvm: no virtual machine is running here: start one with `pvm`"),
        "{none:?}"
    );
    let halt = lab.pvm(&["halt"]);
    assert!(
        !halt.succeeded()
            && halt
                .err
                .starts_with("pvm: no virtual machine is running here"),
        "{halt:?}"
    );
    let start = lab.pvm(&["start"]);
    assert!(
        start.succeeded() && start.out.is_empty(),
        "it does not think that one runs: {start:?}"
    );
    assert!(lab.pvm(&["conf"]).out.starts_with("1 host, "));
    lab.pvm(&["halt"]).expect_success("halt").expect("it ends");
    assert!(!lab.daemon_folder().exists(), "nothing is left");
}

/// A daemon that is started while the previous daemon ends is usable.
#[test]
#[ignore = "system tier: needs installed programs"]
fn start_during_a_halt_gives_a_working_daemon() {
    let lab = started();
    for _ in 0..20 {
        kill(
            Pid::from_raw(lab.daemon_pid().expect("a daemon")),
            Signal::SIGKILL,
        )
        .expect("ours");
        let start = lab.pvm(&["start"]);
        assert!(start.succeeded() && start.out.is_empty(), "{start:?}");
        assert!(lab.pvm(&["conf"]).out.starts_with("1 host, "));
    }
    // The daemon listens, but is dead before it accepts.
    let daemon = Pid::from_raw(lab.daemon_pid().expect("a daemon"));
    kill(daemon, Signal::SIGSTOP).expect("ours");
    let mut command = lab.console();
    command.arg("start");
    let start = RunningCommand::start(command, Stdio::null()).expect("it starts");
    let waits = || match fs::read_to_string(format!("/proc/{}/syscall", start.id())) {
        Ok(call) if call.starts_with(&format!("{} ", nix::libc::SYS_recvmsg)) => Ok(()),
        other => Err(format!("{other:?}")),
    };
    sempa_tests::wait_for(PATIENCE, waits).expect("it waits for an answer");
    kill(daemon, Signal::SIGKILL).expect("ours");
    let start = start.finish(PATIENCE).expect("it ends");
    assert!(start.succeeded() && start.out.is_empty(), "{start:?}");
    lab.pvm(&["halt"]).expect_success("halt").expect("it ends");
}

/// The console that starts a daemon reports the errors of the host file.
#[test]
#[ignore = "system tier: needs installed programs"]
fn start_reports_errors_of_the_host_file() {
    let lab = lab();
    let hosts = lab.path("hosts");
    fs::write(
        &hosts,
        "# mine\nh2.invalid zz=1\n& h3.invalid sp=2\nh4.invalid\n",
    )
    .expect("written");
    let mut command = lab.console();
    command
        .args(["start", "hosts"])
        .env("PVM_RSH", "/bin/false");
    let done = run(command, PATIENCE).expect("it ends");
    assert_eq!(
        done.status.code(),
        Some(1),
        "not all of it was done: {done:?}"
    );
    let lines: Vec<&str> = done.err.lines().collect();
    assert_eq!(lines.len(), 2, "{done:?}");
    assert!(
        lines[0].starts_with("pvm: h2.invalid zz=1 was not added: ") && lines[0].contains("zz"),
        "{done:?}"
    );
    assert!(
        lines[1].starts_with("pvm: h4.invalid was not added: cannot start a daemon on h4.invalid"),
        "{done:?}"
    );
    assert!(
        lab.pvm(&["conf"]).out.starts_with("1 host, "),
        "it runs all the same"
    );
    let again = lab.pvm(&["start", "hosts"]);
    assert_eq!(
        (again.succeeded(), again.out.as_str()),
        (true, "pvmd already running.\n")
    );
}

/// With --json the console prints one JSON value on each line.
#[test]
#[ignore = "system tier: needs installed programs"]
fn json_output_is_one_value_per_line() {
    let lab = started();
    let value = |words: &[&str]| -> Value {
        let done = lab.pvm(&[&["--json"], words].concat());
        serde_json::from_str(done.out.trim())
            .unwrap_or_else(|error| panic!("{words:?}: {error}: {done:?}"))
    };
    let host = value(&["conf"])["hosts"][0]["name"]
        .as_str()
        .expect("a name")
        .to_string();
    assert_eq!(
        value(&["mstat", &host, "nohost"])["results"][1]["error"]["code"],
        -6
    );
    assert_eq!(value(&["pstat", "t40077"])["results"][0]["up"], false);
    assert_eq!(value(&["getopt", "PvmRoute"])["options"]["PvmRoute"], 1);
    assert!(
        value(&["id"])["tid"]
            .as_str()
            .is_some_and(|tid| tid.starts_with("t40"))
    );
    assert_eq!(value(&["names"])["classes"], Value::Array(Vec::new()));
    assert_eq!(value(&["trace"])["options"], "full");
    assert_eq!(value(&["version"])["interface"], "3.4.6");
    assert_eq!(
        value(&["spawn", "/bin/true"])["results"][0]["tid"]
            .as_str()
            .map(|tid| &tid[..1]),
        Some("t")
    );
    let text = script(lab.console(), "conf --json\nquit\n", true);
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
    let lab = started();
    fs::write(
        lab.home().join(".pvmrc"),
        "# mine\nalias greet echo hello\ngreet 1\n",
    )
    .expect("written");
    let text = script(lab.console(), "greet 2\n", true);
    let wanted = "pvmd already running.\n# mine\nalias greet echo hello\ngreet 1\nhello 1\npvm> greet 2\nhello 2\npvm> quit\n\n\
                  Console: exit handler called\npvmd still running.\n";
    assert_eq!(text, wanted);
    let mut terminal = Terminal::start(lab.console());
    terminal.wait_for("hello 1\r\n");
    terminal.wait_for("pvm> ");
    terminal.keys("greet 3\r");
    terminal.wait_for("\r\nhello 3\r\n");
}
