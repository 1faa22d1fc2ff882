//! Compares commands about hosts, with three hosts: our console and PVM's console, both on our
//! daemons, print the same as PVM's console on PVM's daemons.

mod common;

use common::{PATIENCE, PROMPT, read_all};
use sempa_tests::real_pvm::RealVm;
use sempa_tests::requirements::require_program;
use sempa_tests::vm::{Settings, Vm};
use sempa_tests::{Testbed, requirements, wait_for};
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

/// The console of Debian's PVM.
const CONSOLE: &str = "/usr/bin/pvm";
/// Number of times that the test starts PVM's daemons before it fails.
const ATTEMPTS: usize = 3;

/// Time limit for one command. PVM waits a minute for a daemon, and then searches for the reason of
/// the failure.
const COMMAND_TIME: Duration = Duration::from_secs(180);

/// Commands, in this order. None starts a daemon that fails, because PVM's console then spends much
/// time to find the reason.
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
/// of their replies. A command whose answer is not final is repeated.
fn answers(mut command: Command, is_final: impl Fn(usize, &str) -> bool) -> Vec<(String, String)> {
    let output = tempfile::tempfile().expect("a file");
    let shown = || Stdio::from(output.try_clone().expect("a descriptor"));
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(shown())
        .stderr(Stdio::null())
        .spawn()
        .expect("it starts");
    let mut input = child.stdin.take().expect("a pipe");
    let mut given = 0;
    let mut all = Vec::new();
    let mut ask = |at: usize, line: &str| {
        let prompted = |count: usize| match read_all(&output) {
            text if text.matches(PROMPT).count() >= count => Ok(text),
            text => Err(format!("no prompt: {text}")),
        };
        wait_for(PATIENCE, || prompted(given + 1)).map_err(|error| error.to_string())?;
        // Each line is one write, because PVM's console treats the result of each read as a line.
        input
            .write_all(format!("{line}\n").as_bytes())
            .map_err(|error| error.to_string())?;
        given += 1;
        if line == "quit" {
            let ended = || {
                child
                    .try_wait()
                    .ok()
                    .flatten()
                    .ok_or_else(|| "it does not end".to_string())
            };
            wait_for(PATIENCE, ended).map_err(|error| error.to_string())?;
        }
        let prompts = given + usize::from(line != "quit");
        let text =
            wait_for(COMMAND_TIME, || prompted(prompts)).map_err(|error| error.to_string())?;
        let answer = text
            .split(PROMPT)
            .nth(given)
            .and_then(|piece| piece.split_once('\n'))
            .map_or("", |(_, said)| said);
        if is_final(at, answer) {
            Ok(plain(answer))
        } else {
            Err(format!("{line} goes on to say {answer}"))
        }
    };
    for (at, line) in COMMANDS.lines().enumerate() {
        // If this fails, the console ends together with its host of the testbed.
        let answer =
            wait_for(PATIENCE, || ask(at, line)).unwrap_or_else(|error| panic!("{error:#}"));
        all.push((line.to_string(), answer));
    }
    // The last command is `quit`.
    child.wait().expect("it has ended");
    all
}

/// Replaces each task in an answer by its host.
fn plain(answer: &str) -> String {
    let lines = answer
        .lines()
        .map(|line| line.split(' ').map(host_of).collect::<Vec<_>>().join(" "));
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
fn is_final_pvm_answer(at: usize, answer: &str) -> bool {
    let place = |command: &str| {
        COMMANDS
            .lines()
            .position(|line| line == command)
            .expect("a command")
    };
    if at == place("add h3") {
        return answer.starts_with("1 successful");
    }
    let deleted = place("delete h3")..place("add h3");
    !(deleted.contains(&at) && COMMANDS.lines().nth(at) == Some("conf") && answer.contains(" h3 "))
}

/// Returns what PVM's console prints on PVM's daemons. If a daemon exceeds PVM's time limit on a
/// loaded machine, all daemons are started again.
fn wanted() -> Vec<(String, String)> {
    let bed = Testbed::new(3, None, &[]).expect("three hosts");
    for _ in 0..ATTEMPTS {
        let vm = RealVm::start(&bed).expect("PVM");
        let wanted = answers(vm.command(bed.host(1), CONSOLE), is_final_pvm_answer);
        vm.halt().expect("it ends");
        if wanted[0].1.starts_with("2 successful") {
            return wanted;
        }
    }
    panic!("PVM starts no daemons here");
}

/// Replaces a task's tid by the number of its host. A host that joins later has a number above 3.
/// The number depends on earlier attempts, because our master assigns no number twice.
fn host_of(word: &str) -> String {
    let digits = word.strip_prefix('t').unwrap_or(word);
    let raw = if (5..=6).contains(&digits.len()) {
        u32::from_str_radix(digits, 16).ok()
    } else {
        None
    };
    match raw {
        Some(raw) if raw >= 0x40001 && raw & 0x3_ffff != 0 => {
            word.replace(digits, &format!("task@{}", raw >> 18))
        }
        Some(raw) if raw > 0xc0000 && raw & 0x3_ffff == 0 => "later".to_string(),
        _ => word.to_string(),
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and Debian's PVM"]
fn commands_about_hosts_print_what_pvm_prints() {
    require_program(CONSOLE, "pvm");
    let wanted = wanted();
    let bed = requirements::testbed(3);
    let inside = requirements::prefix_in_bed();
    for console in [inside.join("bin/pvm"), CONSOLE.into()] {
        let vm = Vm::start(&bed, Settings::default()).expect("ours");
        let mut command = vm.command(bed.host(1), &console);
        command.env("LD_LIBRARY_PATH", inside.join("lib"));
        let got = answers(command, |_, _| true);
        let pairs = wanted
            .iter()
            .zip(&got)
            .filter(|(wanted, got)| wanted != got);
        let wrong: Vec<String> = pairs
            .map(|((command, wanted), (_, got))| format!("{command}\nPVM:\n{wanted}\nours:\n{got}"))
            .collect();
        assert!(
            wrong.is_empty(),
            "{}:\n{}\n{}",
            console.display(),
            wrong.join("\n\n"),
            vm.logs()
        );
        vm.halt().expect("it ends");
    }
}
