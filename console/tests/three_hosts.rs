//! The commands about hosts, on three of them: our console on our daemons, and PVM's console on ours, print what PVM's
//! console prints on PVM's.

mod common;

use common::{has, script};
use sempa_tests::real::RealVm;
use sempa_tests::vm::{Settings, Vm};
use sempa_tests::{Testbed, lacks, needs};
use std::process::Command;

/// PVM's console.
const CONSOLE: &str = "/usr/bin/pvm";

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
/// order of lines about tasks: PVM lists hosts as they answer.
fn answers(command: Command) -> Vec<(String, String)> {
    let text = script(command, COMMANDS, false);
    let pieces = text.split("pvm> ").filter(|piece| !piece.trim().is_empty() && !piece.starts_with("pvmd already"));
    let plain = |answer: &str| {
        let lines = answer.lines().map(|line| line.split(' ').map(host_of).collect::<Vec<_>>().join(" "));
        let mut lines: Vec<String> = lines.map(|line| line.trim_end().to_string()).collect();
        lines.sort_by_key(|line| if line.contains("task@") { line.clone() } else { String::new() });
        lines.join("\n")
    };
    pieces
        .map(|piece| piece.split_once('\n').unwrap_or((piece, "")))
        .map(|(command, answer)| (command.to_string(), plain(answer)))
        .collect()
}

/// A task's tid as the number of its host. A host that joins later has a tid above those of the first three; which one
/// depends on how many attempts there were before, for ours gives none out twice.
fn host_of(word: &str) -> String {
    let digits = word.strip_prefix('t').unwrap_or(word);
    let raw = if (5..=6).contains(&digits.len()) { u32::from_str_radix(digits, 16).ok() } else { None };
    match raw {
        Some(raw) if raw >= 0x40001 && raw & 0x3_ffff != 0 => word.replace(digits, &format!("task@{}", raw >> 18)),
        Some(raw) if raw > 0xc0000 && raw & 0x3_ffff == 0 => "later".to_string(),
        _ => word.to_string(),
    }
}

#[test]
fn commands_about_hosts_print_what_pvm_prints() {
    if let Some(lack) = lacks() {
        eprintln!("skipped: {lack}");
        return;
    }
    if !has(CONSOLE, "pvm") {
        return;
    }
    let mut wanted = {
        let bed = Testbed::new(3, None, &[]).expect("three hosts");
        let vm = RealVm::start(&bed).expect("PVM");
        let wanted = answers(vm.command(bed.host(1), CONSOLE));
        vm.halt().expect("it ends");
        wanted
    };
    assert_eq!(wanted.len(), COMMANDS.lines().count(), "{wanted:?}");
    // PVM may show a host once more that it has just called deleted; a command later it does not.
    let deleted = wanted.iter().position(|(command, _)| command == "delete h3").expect("a command");
    wanted[deleted + 1] = wanted[deleted + 3].clone();
    let Some((bed, inside)) = needs::testbed(3) else { return };
    for console in [inside.join("bin/pvm"), CONSOLE.into()] {
        let vm = Vm::start(&bed, Settings::default()).expect("ours");
        let mut command = vm.command(bed.host(1), &console);
        command.env("LD_LIBRARY_PATH", inside.join("lib"));
        let got = answers(command);
        vm.halt().expect("it ends");
        let pairs = wanted.iter().zip(&got).filter(|(wanted, got)| wanted != got);
        let wrong: Vec<String> =
            pairs.map(|((command, wanted), (_, got))| format!("{command}\nPVM:\n{wanted}\nours:\n{got}")).collect();
        assert!(wrong.is_empty() && got.len() == wanted.len(), "{}:\n{}", console.display(), wrong.join("\n\n"));
    }
}
