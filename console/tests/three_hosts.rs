//! Compares commands about hosts, with three hosts: our console and PVM's console, both on our
//! daemons, print the same as PVM's console on PVM's daemons.

mod common;

use common::{PROMPT, WAIT_TIMEOUT, read_all};
use sempa_tests::real_pvm::RealVm;
use sempa_tests::requirements::require_program;
use sempa_tests::vm::{Vm, VmSettings};
use sempa_tests::{Testbed, requirements, wait_for};
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The console of Debian's PVM.
const PVM_CONSOLE: &str = "/usr/bin/pvm";
/// Maximum number of times that the test starts PVM's daemons.
const ATTEMPTS_MAX: usize = 3;

/// Time limit for one command. PVM waits a minute for a daemon, and then searches for the reason of
/// the failure.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(180);

/// Commands, in this order. No command starts a daemon that fails, because PVM's console then needs
/// much time to find the reason.
const COMMANDS: &str = "\
add h2 h3 nohost
conf
add h2
mstat . h1 h2 nohost
spawn -7 /bin/sleep 1000
spawn -h2 /bin/sleep 1000
spawn -~ -h2 -2 /bin/sleep 1000
spawn -LINUX64 -3 /bin/sleep 1000
ps
ps -a
ps -nh2
ps -h80000
ps -ax
jobs
delete h3
conf
delete h3 nohost h1
conf
add h3
conf
quit
";

/// Returns each command with its output. Tids are replaced by their hosts, because the number of
/// earlier tids is not defined. Lines about tasks are sorted, because PVM lists hosts in the order
/// of their replies. A command is repeated until `is_final` returns true for its index and its
/// output.
fn run_commands(
    mut command: Command,
    is_final: impl Fn(usize, &str) -> bool,
) -> Vec<(String, String)> {
    let output = tempfile::tempfile().expect("a file");
    let output_handle = || Stdio::from(output.try_clone().expect("a descriptor"));
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(output_handle())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut input = child.stdin.take().expect("a pipe");
    let mut sent_count = 0;
    let mut results = Vec::new();
    let mut run_command = |index: usize, line: &str| {
        let check_prompts = |count: usize| match read_all(&output) {
            text if text.matches(PROMPT).count() >= count => Ok(text),
            text => Err(format!("no prompt: {text}")),
        };
        wait_for(WAIT_TIMEOUT, || check_prompts(sent_count + 1))
            .map_err(|error| error.to_string())?;
        // Each line is one write, because PVM's console treats the result of each read as a line.
        input
            .write_all(format!("{line}\n").as_bytes())
            .map_err(|error| error.to_string())?;
        sent_count += 1;
        if line == "quit" {
            let poll_exit = || {
                child
                    .try_wait()
                    .ok()
                    .flatten()
                    .ok_or_else(|| "it does not end".to_string())
            };
            wait_for(WAIT_TIMEOUT, poll_exit).map_err(|error| error.to_string())?;
        }
        let prompt_count = sent_count + usize::from(line != "quit");
        let text = wait_for(COMMAND_TIMEOUT, || check_prompts(prompt_count))
            .map_err(|error| error.to_string())?;
        let answer = text
            .split(PROMPT)
            .nth(sent_count)
            .and_then(|piece| piece.split_once('\n'))
            .map_or("", |(_, command_output)| command_output);
        if is_final(index, answer) {
            Ok(normalize_output(answer))
        } else {
            Err(format!("{line} goes on to say {answer}"))
        }
    };
    for (index, line) in COMMANDS.lines().enumerate() {
        // If a command fails, the test panics. The console ends together with its host of the
        // testbed.
        let answer = wait_for(WAIT_TIMEOUT, || run_command(index, line))
            .unwrap_or_else(|error| panic!("{error:#}"));
        results.push((line.to_string(), answer));
    }
    // The last command is `quit`.
    child.wait().expect("it has ended");
    results
}

/// Replaces each task in an answer by its host, and sorts the lines about tasks.
fn normalize_output(answer: &str) -> String {
    let lines = answer.lines().map(|line| {
        line.split(' ')
            .map(replace_tid)
            .collect::<Vec<_>>()
            .join(" ")
    });
    let mut lines: Vec<String> = lines.map(|line| line.trim_end().to_string()).collect();
    lines.sort_by_key(|line| {
        if line.contains("task@") {
            line.clone()
        } else {
            String::new()
        }
    });
    lines.join("\n")
}

/// True if PVM's answer is final. PVM lists a deleted host for a time, and does not add a host
/// before the host's old daemon has exited.
fn is_final_pvm_answer(index: usize, answer: &str) -> bool {
    let index_of = |command: &str| {
        COMMANDS
            .lines()
            .position(|line| line == command)
            .expect("a command")
    };
    if index == index_of("add h3") {
        return answer.starts_with("1 successful");
    }
    let deleted_range = index_of("delete h3")..index_of("add h3");
    !(deleted_range.contains(&index)
        && COMMANDS.lines().nth(index) == Some("conf")
        && answer.contains(" h3 "))
}

/// Returns the output of PVM's console on PVM's daemons. If a daemon exceeds PVM's time limit on a
/// loaded machine, all daemons are started again, up to [`ATTEMPTS_MAX`] times in total.
fn pvm_output() -> Vec<(String, String)> {
    let testbed = Testbed::new(3, None, &[]).expect("three hosts");
    for _ in 0..ATTEMPTS_MAX {
        let vm = RealVm::start(&testbed).expect("PVM");
        let output = run_commands(
            vm.command(testbed.host(1), PVM_CONSOLE),
            is_final_pvm_answer,
        );
        vm.halt_or_kill().expect("it ends");
        if output[0].1.starts_with("2 successful") {
            return output;
        }
    }
    panic!("PVM starts no daemons here");
}

/// Replaces the tid of a task by the number of its host, and the tid of a host that joined later by
/// "later". The number of such a host depends on earlier attempts, because our master assigns no
/// number twice.
fn replace_tid(word: &str) -> String {
    let digits = word.strip_prefix('t').unwrap_or(word);
    let raw_tid = if (5..=6).contains(&digits.len()) {
        u32::from_str_radix(digits, 16).ok()
    } else {
        None
    };
    match raw_tid {
        Some(raw_tid) if raw_tid >= 0x40001 && raw_tid & 0x3_ffff != 0 => {
            word.replace(digits, &format!("task@{}", raw_tid >> 18))
        }
        Some(raw_tid) if raw_tid > 0xc0000 && raw_tid & 0x3_ffff == 0 => "later".to_string(),
        _ => word.to_string(),
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn commands_about_hosts_print_what_pvm_prints() {
    require_program(PVM_CONSOLE, "pvm");
    let expected_output = pvm_output();
    let testbed = requirements::require_testbed(3);
    let prefix = requirements::require_prefix_in_hosts();
    for console in [prefix.join("bin/pvm"), PVM_CONSOLE.into()] {
        let vm = Vm::start(&testbed, VmSettings::default()).expect("ours");
        let mut command = vm.user_command(testbed.host(1), &console);
        command.env("LD_LIBRARY_PATH", prefix.join("lib"));
        let our_output = run_commands(command, |_, _| true);
        let pairs = expected_output
            .iter()
            .zip(&our_output)
            .filter(|(expected_output, our_output)| expected_output != our_output);
        let mismatches: Vec<String> = pairs
            .map(|((command, expected_output), (_, our_output))| {
                format!("{command}\nPVM:\n{expected_output}\nours:\n{our_output}")
            })
            .collect();
        assert!(
            mismatches.is_empty(),
            "{}:\n{}\n{}",
            console.display(),
            mismatches.join("\n\n"),
            vm.events_and_logs()
        );
        vm.halt_and_wait().expect("it ends");
    }
}
