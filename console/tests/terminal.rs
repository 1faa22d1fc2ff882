//! Tests of the console at a terminal: editing, history, completion, and output of tasks.

mod common;

use common::{PATIENCE, Terminal, started};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_tests::private_vm::PrivateVm;
use sempa_tests::wait_for;
use std::fs;
use std::os::unix::fs::PermissionsExt;

const UP: &str = "\x1b[A";
const LEFT: &str = "\x1b[D";
const CTRL_A: &str = "\x01";
const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
const CTRL_G: &str = "\x07";
/// Moves to the end of the line and deletes all before it.
const EMPTY_LINE: &str = "\x05\x15";

/// Starts a console and waits for its first prompt.
fn console(lab: &PrivateVm) -> Terminal {
    let mut terminal = Terminal::start(lab.console());
    terminal.wait_for("pvm> ");
    terminal
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn a_line_can_be_edited_before_it_is_a_command() {
    let lab = started();
    let mut terminal = console(&lab);
    terminal.keys(&format!("echo <heo{LEFT}ll"));
    terminal.keys("\x05>\r");
    terminal.wait_for("\r\n<hello>\r\n");
    terminal.wait_for("pvm> ");
    terminal.keys(&format!("no such command{CTRL_C}"));
    terminal.wait_for("\r\n");
    terminal.wait_for("pvm> ");
    terminal.keys("id\r");
    terminal.wait_for("\r\nt40");
    assert!(
        !terminal.shown().contains("not found"),
        "ctrl-c gives a line up: {:?}",
        terminal.shown()
    );
    terminal.keys(CTRL_D);
    terminal.wait_for("Console: exit handler called\r\npvmd still running.\r\n");
    assert!(terminal.end().success() && terminal.is_restored());
}

/// The next console has the history of the previous one, and only the user may read the history
/// file.
#[test]
#[ignore = "system tier: needs installed programs"]
fn history_is_kept_and_private() {
    let lab = started();
    let mut first = console(&lab);
    first.keys("echo one\r");
    first.wait_for("\r\none\r\n");
    first.keys(" echo secret\r");
    first.wait_for("\r\nsecret\r\n");
    first.keys("echo two\r");
    first.wait_for("\r\ntwo\r\n");
    first.keys(&format!("{UP}{UP}\r"));
    first.wait_for("\r\none\r\n");
    first.keys("quit\r");
    assert!(first.end().success());
    let path = lab.home().join(".pvm_history");
    assert_eq!(
        fs::metadata(&path).expect("a history").permissions().mode() & 0o777,
        0o600
    );
    let text = fs::read_to_string(&path).expect("a history");
    assert!(
        text.contains("echo two") && !text.contains("secret"),
        "a blank before it keeps a line out: {text}"
    );
    let mut second = console(&lab);
    second.keys(&format!("{UP}{UP}{UP}\r"));
    second.wait_for("\r\ntwo\r\n");
}

/// The tabulator key completes commands, hosts and options.
#[test]
#[ignore = "system tier: needs installed programs"]
fn tab_completes_commands_hosts_and_options() {
    let lab = started();
    let host = lab.pvm(&["--json", "conf"]).out;
    let host = host
        .split("\"name\":\"")
        .nth(1)
        .and_then(|rest| rest.split('"').next())
        .expect("a host")
        .to_string();
    let mut terminal = console(&lab);
    terminal.keys(&format!("mst\t{}\t\r", &host[..1]));
    terminal.wait_for(&format!("{host}  ok\r\n"));
    terminal.wait_for("pvm> ");
    terminal.keys("getopt PvmRou\t\r");
    terminal.wait_for("PvmRoute Currently Set to 1\r\n");
    terminal.keys("s\t\t");
    let list = terminal.wait_for("start");
    assert!(
        ["setenv", "setopt", "sig", "spawn"]
            .iter()
            .all(|name| list.contains(name)),
        "{list:?}"
    );
}

/// Output of tasks appears above the prompt and leaves the edited line unchanged.
#[test]
#[ignore = "system tier: needs installed programs"]
fn task_output_appears_above_the_prompt() {
    let lab = started();
    let (go, script) = (lab.path("go"), lab.path("wait.sh"));
    let text = format!(
        "while [ ! -e {} ]; do sleep 0.02; done; echo here it is",
        go.display()
    );
    fs::write(&script, text).expect("written");
    let mut terminal = console(&lab);
    terminal.keys(&format!("spawn -> /bin/sh {}\r", script.display()));
    terminal.wait_for("1 successful\r\n");
    terminal.wait_for("pvm> ");
    terminal.keys("echo <ha");
    terminal.wait_for("echo <ha");
    fs::write(&go, "").expect("written");
    terminal.wait_for("] here it is");
    terminal.wait_for("[1] finished");
    terminal.wait_for("pvm> echo <ha");
    terminal.keys("lf>\r");
    terminal.wait_for("\r\n<half>\r\n");
}

/// Keys that are typed before the prompt appears have the same effect as at the prompt.
#[test]
#[ignore = "system tier: needs installed programs"]
fn keys_typed_ahead_work_as_at_the_prompt() {
    let lab = started();
    let mut terminal = console(&lab);
    // The console waits for the stopped daemon, so its prompt does not appear.
    let daemon = Pid::from_raw(lab.daemon_pid().expect("a daemon"));
    kill(daemon, Signal::SIGSTOP).expect("ours");
    terminal.keys("conf\r");
    terminal.wait_for("conf\r");
    terminal.keys(&format!("echo <heo{LEFT}ll\x05>\r{UP}{UP}\r{CTRL_D}"));
    kill(daemon, Signal::SIGCONT).expect("ours");
    terminal.wait_for("\r\n<hello>\r\n");
    terminal.wait_for("data format\r\n");
    terminal.wait_for("Console: exit handler called\r\n");
    let shown = terminal.shown();
    assert!(
        !shown.contains("^["),
        "nothing is repeated as it was typed: {shown:?}"
    );
    assert!(terminal.end().success() && terminal.is_restored());
}

/// Output that arrives while candidates or the history are shown appears afterwards.
#[test]
#[ignore = "system tier: needs installed programs"]
fn output_waits_for_completion_and_history() {
    let lab = started();
    let mut terminal = console(&lab);
    terminal.keys("echo remembered\r");
    terminal.wait_for("\r\nremembered\r\n");
    let script = lab.path("wait.sh");
    fs::write(
        &script,
        "while [ ! -e $1 ]; do sleep 0.02; done; echo here it is; touch $1.done",
    )
    .expect("written");
    // Keys that bring the editor into a state (completion, list of candidates, search), and the
    // keys that leave the state.
    let kinds = [
        ("s\t", LEFT),
        ("s\t\t", LEFT),
        ("\x12rem", CTRL_G),
        ("echo <ha", CTRL_A),
    ];
    for (job, (keys, back)) in kinds.into_iter().enumerate() {
        let go = lab.path(&format!("go{job}"));
        terminal.keys(&format!(
            "spawn -> /bin/sh {} {}\r",
            script.display(),
            go.display()
        ));
        terminal.wait_for("1 successful\r\n");
        terminal.wait_for("pvm> ");
        terminal.keys(keys);
        terminal.wait_for(keys.trim_end_matches('\t').trim_start_matches('\x12'));
        fs::write(&go, "").expect("written");
        let done = lab.path(&format!("go{job}.done"));
        let there = || {
            if done.exists() {
                Ok(())
            } else {
                Err("the task does not go on".to_string())
            }
        };
        wait_for(PATIENCE, there).expect("it ends");
        terminal.keys(back);
        terminal.wait_for("] here it is\r\n");
        terminal.wait_for(&format!("[{}] finished\r\n", job + 1));
        terminal.keys(EMPTY_LINE);
    }
    terminal.keys("quit\r");
    assert!(terminal.end().success() && terminal.is_restored());
}

/// Much output and many keys at the same time do not block each other.
#[test]
#[ignore = "system tier: needs installed programs"]
fn much_output_and_many_keys_do_not_block() {
    const LINES: usize = 20_000;
    const KEYS: usize = 200;
    let lab = started();
    let mut terminal = console(&lab);
    terminal.keys(&format!("spawn -> /usr/bin/seq -f <%.0f> 1 {LINES}\r"));
    terminal.wait_for("1 successful\r\n");
    for n in 0..KEYS {
        terminal.keys(&format!("echo answer-{n}\r"));
    }
    terminal.wait_for_both(&format!("\r\nanswer-{}\r\n", KEYS - 1), "[1] finished\r\n");
    let shown = terminal.shown();
    let mut at = 0;
    for n in 1..=LINES {
        let line = format!("] <{n}>\r\n");
        at += shown[at..]
            .find(&line)
            .unwrap_or_else(|| panic!("line {n} is missing or late"))
            + line.len();
    }
    for n in 0..KEYS {
        assert!(shown.contains(&format!("\r\nanswer-{n}\r\n")), "answer {n}");
    }
    terminal.keys("quit\r");
    assert!(terminal.end().success() && terminal.is_restored());
}

/// A console whose virtual machine ends reports that and restores the terminal.
#[test]
#[ignore = "system tier: needs installed programs"]
fn halt_of_the_vm_restores_the_terminal() {
    let lab = started();
    let mut terminal = console(&lab);
    terminal.keys("echo unfinis");
    terminal.wait_for("unfinis");
    lab.pvm(&["halt"]).expect_success("halt").expect("it ends");
    terminal.wait_for("pvm: the virtual machine has ended: ");
    assert_eq!(terminal.end().code(), Some(1));
    assert!(terminal.is_restored());
}

/// A console that a signal ends restores the terminal.
#[test]
#[ignore = "system tier: needs installed programs"]
fn signal_restores_the_terminal() {
    let lab = started();
    let mut terminal = console(&lab);
    terminal.keys("echo");
    terminal.wait_for("echo");
    assert!(!terminal.is_restored(), "it edits");
    kill(Pid::from_raw(terminal.id()), Signal::SIGTERM).expect("ours");
    assert_eq!(terminal.end().code(), Some(143));
    assert!(terminal.is_restored());
}

/// On a terminal without editing the console reads plain lines.
#[test]
#[ignore = "system tier: needs installed programs"]
fn dumb_terminal_works_without_editing() {
    let lab = started();
    let mut command = lab.console();
    command.env("TERM", "dumb");
    let mut terminal = Terminal::start(command);
    terminal.wait_for("pvm> ");
    terminal.keys("echo <a>\n");
    terminal.wait_for("\r\n<a>\r\npvm> ");
    assert!(
        !terminal.shown().contains('\x1b'),
        "no control sequences: {:?}",
        terminal.shown()
    );
    terminal.keys("halt\n");
    assert!(terminal.end().success());
}
