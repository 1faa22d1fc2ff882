//! The commands about hosts, on three of them: our console on our daemons, and PVM's console on ours, print what PVM's
//! console prints on PVM's.

mod common;

use common::{PATIENCE, PROMPT, read_all};
use sempa_tests::needs::require_program;
use sempa_tests::real::RealVm;
use sempa_tests::vm::{Settings, Vm};
use sempa_tests::{Testbed, eventually, needs};
use std::io::Write;
use std::process::{Command, Stdio};
use std::time::Duration;

/// PVM's console.
const CONSOLE: &str = "/usr/bin/pvm";
/// How often PVM may fail to start its daemons.
const ATTEMPTS: usize = 3;

/// Time for one command: PVM gives a daemon a minute to come up, and then its console looks for the reason.
const COMMAND_TIME: Duration = Duration::from_secs(180);

/// Commands in this order. What fails to start a daemon is left out: PVM's console looks for the reason by itself.
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

/// What each command printed. Of tids only the host counts: how many were used before is nobody's promise. Nor is the
/// order of lines about tasks: PVM lists hosts as they answer. A command whose answer is not final is given again.
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
        eventually(PATIENCE, || prompted(given + 1)).map_err(|error| error.to_string())?;
        // In one piece: PVM's console takes what it reads at once for a line.
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
            eventually(PATIENCE, ended).map_err(|error| error.to_string())?;
        }
        let prompts = given + usize::from(line != "quit");
        let text =
            eventually(COMMAND_TIME, || prompted(prompts)).map_err(|error| error.to_string())?;
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
        // If it never answers, it is ended with its host.
        let answer =
            eventually(PATIENCE, || ask(at, line)).unwrap_or_else(|error| panic!("{error:#}"));
        all.push((line.to_string(), answer));
    }
    // The last command was to quit.
    child.wait().expect("it has ended");
    all
}

/// An answer with hosts in place of tasks.
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

/// What PVM says in the end: it goes on to show a host that it has called deleted, and does not add one again whose old
/// daemon is still there.
fn is_pvms_last_word(at: usize, answer: &str) -> bool {
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

/// What PVM's console prints on PVM's daemons. On a loaded machine these may not come up in the time that PVM gives them;
/// then everything begins again.
fn wanted() -> Vec<(String, String)> {
    let bed = Testbed::new(3, None, &[]).expect("three hosts");
    for _ in 0..ATTEMPTS {
        let vm = RealVm::start(&bed).expect("PVM");
        let wanted = answers(vm.command(bed.host(1), CONSOLE), is_pvms_last_word);
        vm.halt().expect("it ends");
        if wanted[0].1.starts_with("2 successful") {
            return wanted;
        }
    }
    panic!("PVM starts no daemons here");
}

/// A task's tid as the number of its host. A host that joins later has a tid above those of the first three; which one
/// depends on how many attempts there were before, for ours gives none out twice.
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
    let bed = needs::testbed(3);
    let inside = needs::prefix_in_bed();
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
