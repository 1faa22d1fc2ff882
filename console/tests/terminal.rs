//! Tests of the console at a terminal: editing, history, completion, and output of tasks.

mod common;

use common::{Terminal, WAIT_TIMEOUT, running_vm};
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
/// Keys that move the cursor to the end of the line and delete the line.
const CLEAR_LINE: &str = "\x05\x15";

/// Starts a console and waits for its first prompt.
fn start_console(vm: &PrivateVm) -> Terminal {
    let mut terminal = Terminal::start(vm.console_command());
    terminal.wait_for("pvm> ");
    terminal
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn a_line_can_be_edited_before_it_is_a_command() {
    let vm = running_vm();
    let mut terminal = start_console(&vm);
    terminal.type_keys(&format!("echo <heo{LEFT}ll"));
    terminal.type_keys("\x05>\r");
    terminal.wait_for("\r\n<hello>\r\n");
    terminal.wait_for("pvm> ");
    terminal.type_keys(&format!("no such command{CTRL_C}"));
    terminal.wait_for("\r\n");
    terminal.wait_for("pvm> ");
    terminal.type_keys("id\r");
    terminal.wait_for("\r\nt40");
    assert!(
        !terminal.output_text().contains("not found"),
        "ctrl-c gives a line up: {:?}",
        terminal.output_text()
    );
    terminal.type_keys(CTRL_D);
    terminal.wait_for("Console: exit handler called\r\npvmd still running.\r\n");
    assert!(terminal.wait_for_exit().success() && terminal.is_restored());
}

/// At a terminal the console starts with its version.
#[test]
#[ignore = "system tier: needs installed programs"]
fn console_greets_with_version() {
    let vm = running_vm();
    let mut terminal = start_console(&vm);
    let banner = concat!("Sempa ", env!("CARGO_PKG_VERSION"), ", PVM interface 3.4.6");
    assert!(
        terminal.output_text().contains(banner),
        "{:?}",
        terminal.output_text()
    );
    terminal.type_keys(CTRL_D);
    assert!(terminal.wait_for_exit().success());
}

/// The next console has the history of the previous console, and only the user may read the history
/// file.
#[test]
#[ignore = "system tier: needs installed programs"]
fn history_is_kept_and_private() {
    let vm = running_vm();
    let mut first_console = start_console(&vm);
    first_console.type_keys("echo one\r");
    first_console.wait_for("\r\none\r\n");
    first_console.type_keys(" echo secret\r");
    first_console.wait_for("\r\nsecret\r\n");
    first_console.type_keys("echo two\r");
    first_console.wait_for("\r\ntwo\r\n");
    first_console.type_keys(&format!("{UP}{UP}\r"));
    first_console.wait_for("\r\none\r\n");
    first_console.type_keys("quit\r");
    assert!(first_console.wait_for_exit().success());
    let history_path = vm.home().join(".pvm_history");
    assert_eq!(
        fs::metadata(&history_path)
            .expect("a history")
            .permissions()
            .mode()
            & 0o777,
        0o600
    );
    let text = fs::read_to_string(&history_path).expect("a history");
    assert!(
        text.contains("echo two") && !text.contains("secret"),
        "a blank before it keeps a line out: {text}"
    );
    let mut second_console = start_console(&vm);
    second_console.type_keys(&format!("{UP}{UP}{UP}\r"));
    second_console.wait_for("\r\ntwo\r\n");
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn tab_completes_commands_hosts_and_options() {
    let vm = running_vm();
    let host = vm.run_console(&["--json", "conf"]).stdout;
    let host = host
        .split("\"name\":\"")
        .nth(1)
        .and_then(|rest| rest.split('"').next())
        .expect("a host")
        .to_string();
    let mut terminal = start_console(&vm);
    terminal.type_keys(&format!("mst\t{}\t\r", &host[..1]));
    terminal.wait_for(&format!("{host}  ok\r\n"));
    terminal.wait_for("pvm> ");
    terminal.type_keys("getopt PvmRou\t\r");
    terminal.wait_for("PvmRoute Currently Set to 1\r\n");
    terminal.type_keys("s\t\t");
    let candidates = terminal.wait_for("start");
    assert!(
        ["setenv", "setopt", "sig", "spawn"]
            .iter()
            .all(|name| candidates.contains(name)),
        "{candidates:?}"
    );
}

/// Output of tasks appears above the prompt and leaves the edited line unchanged.
#[test]
#[ignore = "system tier: needs installed programs"]
fn task_output_appears_above_the_prompt() {
    let vm = running_vm();
    let (go_file, script) = (vm.path_below("go"), vm.path_below("wait.sh"));
    let text = format!(
        "while [ ! -e {} ]; do sleep 0.02; done; echo here it is",
        go_file.display()
    );
    fs::write(&script, text).expect("written");
    let mut terminal = start_console(&vm);
    terminal.type_keys(&format!("spawn -> /bin/sh {}\r", script.display()));
    terminal.wait_for("1 successful\r\n");
    terminal.wait_for("pvm> ");
    terminal.type_keys("echo <ha");
    terminal.wait_for("echo <ha");
    fs::write(&go_file, "").expect("written");
    terminal.wait_for("] here it is");
    terminal.wait_for("[1] finished");
    terminal.wait_for("pvm> echo <ha");
    terminal.type_keys("lf>\r");
    terminal.wait_for("\r\n<half>\r\n");
}

/// Keys that are typed before the prompt appears have the same effect as at the prompt.
#[test]
#[ignore = "system tier: needs installed programs"]
fn keys_typed_ahead_work_as_at_the_prompt() {
    let vm = running_vm();
    let mut terminal = start_console(&vm);
    // The console waits for the stopped daemon, so its prompt does not appear.
    let daemon = Pid::from_raw(vm.daemon_pid().expect("a daemon"));
    kill(daemon, Signal::SIGSTOP).expect("ours");
    terminal.type_keys("conf\r");
    terminal.wait_for("conf\r");
    terminal.type_keys(&format!("echo <heo{LEFT}ll\x05>\r{UP}{UP}\r{CTRL_D}"));
    kill(daemon, Signal::SIGCONT).expect("ours");
    terminal.wait_for("\r\n<hello>\r\n");
    terminal.wait_for("data format\r\n");
    terminal.wait_for("Console: exit handler called\r\n");
    let output = terminal.output_text();
    assert!(
        !output.contains("^["),
        "nothing is repeated as it was typed: {output:?}"
    );
    assert!(terminal.wait_for_exit().success() && terminal.is_restored());
}

/// Output that arrives while the user completes a word, edits a line or searches the history
/// appears at the latest after the key that ends this activity.
#[test]
#[ignore = "system tier: needs installed programs"]
fn output_waits_for_completion_and_history() {
    let vm = running_vm();
    let mut terminal = start_console(&vm);
    terminal.type_keys("echo remembered\r");
    terminal.wait_for("\r\nremembered\r\n");
    let script = vm.path_below("wait.sh");
    fs::write(
        &script,
        "while [ ! -e $1 ]; do sleep 0.02; done; echo here it is; touch $1.done",
    )
    .expect("written");
    // Keys that start a completion, a list of candidates, or a search, or that type text, each with
    // the key that ends it.
    let key_pairs = [
        ("s\t", LEFT),
        ("s\t\t", LEFT),
        ("\x12rem", CTRL_G),
        ("echo <ha", CTRL_A),
    ];
    for (job, (keys, end_keys)) in key_pairs.into_iter().enumerate() {
        let go_file = vm.path_below(&format!("go{job}"));
        terminal.type_keys(&format!(
            "spawn -> /bin/sh {} {}\r",
            script.display(),
            go_file.display()
        ));
        terminal.wait_for("1 successful\r\n");
        terminal.wait_for("pvm> ");
        terminal.type_keys(keys);
        terminal.wait_for(keys.trim_end_matches('\t').trim_start_matches('\x12'));
        fs::write(&go_file, "").expect("written");
        let done_file = vm.path_below(&format!("go{job}.done"));
        let check_task_continued = || {
            if done_file.exists() {
                Ok(())
            } else {
                Err("the task does not go on".to_string())
            }
        };
        wait_for(WAIT_TIMEOUT, check_task_continued).expect("it ends");
        terminal.type_keys(end_keys);
        terminal.wait_for("] here it is\r\n");
        terminal.wait_for(&format!("[{}] finished\r\n", job + 1));
        terminal.type_keys(CLEAR_LINE);
    }
    terminal.type_keys("quit\r");
    assert!(terminal.wait_for_exit().success() && terminal.is_restored());
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn much_output_and_many_keys_do_not_block() {
    const LINE_COUNT: usize = 20_000;
    const COMMAND_COUNT: usize = 200;
    let vm = running_vm();
    let mut terminal = start_console(&vm);
    terminal.type_keys(&format!("spawn -> /usr/bin/seq -f <%.0f> 1 {LINE_COUNT}\r"));
    terminal.wait_for("1 successful\r\n");
    for n in 0..COMMAND_COUNT {
        terminal.type_keys(&format!("echo answer-{n}\r"));
    }
    terminal.wait_for_both(
        &format!("\r\nanswer-{}\r\n", COMMAND_COUNT - 1),
        "[1] finished\r\n",
    );
    let output = terminal.output_text();
    let mut line_end = 0;
    for n in 1..=LINE_COUNT {
        let line = format!("] <{n}>\r\n");
        line_end += output[line_end..]
            .find(&line)
            .unwrap_or_else(|| panic!("line {n} is missing or late"))
            + line.len();
    }
    for n in 0..COMMAND_COUNT {
        assert!(
            output.contains(&format!("\r\nanswer-{n}\r\n")),
            "answer {n}"
        );
    }
    terminal.type_keys("quit\r");
    assert!(terminal.wait_for_exit().success() && terminal.is_restored());
}

/// If the virtual machine ends, the console reports the end and restores the terminal.
#[test]
#[ignore = "system tier: needs installed programs"]
fn halt_of_the_vm_restores_the_terminal() {
    let vm = running_vm();
    let mut terminal = start_console(&vm);
    terminal.type_keys("echo unfinis");
    terminal.wait_for("unfinis");
    vm.run_console(&["halt"])
        .expect_success("halt")
        .expect("it ends");
    terminal.wait_for("pvm: the virtual machine has ended: ");
    assert_eq!(terminal.wait_for_exit().code(), Some(1));
    assert!(terminal.is_restored());
}

/// A console that a signal ends restores the terminal.
#[test]
#[ignore = "system tier: needs installed programs"]
fn signal_restores_the_terminal() {
    let vm = running_vm();
    let mut terminal = start_console(&vm);
    terminal.type_keys("echo");
    terminal.wait_for("echo");
    assert!(!terminal.is_restored(), "it edits");
    kill(Pid::from_raw(terminal.process_id()), Signal::SIGTERM).expect("ours");
    assert_eq!(terminal.wait_for_exit().code(), Some(143));
    assert!(terminal.is_restored());
}

/// On a terminal without editing the console reads plain lines.
#[test]
#[ignore = "system tier: needs installed programs"]
fn dumb_terminal_works_without_editing() {
    let vm = running_vm();
    let mut command = vm.console_command();
    command.env("TERM", "dumb");
    let mut terminal = Terminal::start(command);
    terminal.wait_for("pvm> ");
    terminal.type_keys("echo <a>\n");
    terminal.wait_for("\r\n<a>\r\npvm> ");
    assert!(
        !terminal.output_text().contains('\x1b'),
        "no control sequences: {:?}",
        terminal.output_text()
    );
    terminal.type_keys("halt\n");
    assert!(terminal.wait_for_exit().success());
}
