//! What a master-worker run does with tasks that kill workers, updates, init data and pauses. The
//! program is `tests/src/bin/work-probe.rs`.

use sempa_tests::requirements::{build_folder, panic_if_unmet, require_testbed};
use sempa_tests::run::{RunningCommand, run_successfully};
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);

fn install_probe(vm: &Vm) -> PathBuf {
    let built = build_folder().expect("a folder").join("work-probe");
    let missing = "work-probe is not built: run cargo build -p sempa-tests".to_string();
    panic_if_unmet((!built.exists()).then_some(missing));
    let program = vm.user_home().join("work-probe");
    fs::copy(built, &program).expect("a copy");
    program
}

/// Facts that the driver has printed.
struct Facts(String);

impl Facts {
    fn number(&self, name: &str) -> u64 {
        let prefix = format!("{name} ");
        let value = self.0.lines().find_map(|line| line.strip_prefix(&prefix));
        let value = value.unwrap_or_else(|| panic!("no {name} in:\n{}", self.0));
        value.parse().expect("a number")
    }
}

fn probe_command(vm: &Vm, arguments: &[&str]) -> Command {
    let mut command = vm.user_command(vm.testbed().host(1), install_probe(vm));
    command.args(arguments);
    command
}

/// Runs the program on a virtual machine with two hosts, and returns the driver's facts.
fn run_probe(arguments: &[&str]) -> Facts {
    let bed = require_testbed(2);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("h2 joins");
    let result = run_successfully(probe_command(&vm, arguments), TIMEOUT).or_panic_with_logs(&vm);
    vm.halt_and_wait().expect("halts");
    for host in bed.hosts() {
        let files = host.leftover_files(bed.folder());
        assert_eq!(files, Vec::<PathBuf>::new(), "{}", host.name());
    }
    Facts(result.stdout)
}

/// Tasks that kill their workers are quarantined with the reason of each attempt; all others have
/// results.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn poisonous_tasks_are_quarantined() {
    let facts = run_probe(&["poison", "2"]);
    assert_eq!(facts.number("results"), 27);
    assert_eq!(facts.number("sum"), 465 - 60);
    let quarantined: Vec<&str> = facts
        .0
        .lines()
        .filter_map(|line| line.strip_prefix("quarantined "))
        .collect();
    assert_eq!(quarantined.len(), 3, "{}", facts.0);
    let signal = format!(
        "signal {} killed the worker",
        nix::sys::signal::Signal::SIGABRT as i32
    );
    for reasons in quarantined {
        // One more if the task was one of several suspects at first, which does not count.
        let attempts = reasons.matches(&signal).count();
        assert!((5..=6).contains(&attempts), "{reasons}");
    }
    let lost = facts.number("lost");
    assert!((15..=18).contains(&lost), "{lost} workers were lost");
}

/// An update reaches tasks that are being executed.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn update_reaches_running_tasks() {
    let facts = run_probe(&["update", "3"]);
    assert_eq!(facts.number("results"), 3);
    assert_eq!(facts.number("sum"), 3 * 4_711);
}

/// Large init data are sent once per host, whatever the number of workers.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn init_data_are_sent_once_per_host() {
    let facts = run_probe(&["init", "6"]);
    let sum: u64 = (0..1 << 20).map(|index: u64| index & 0xff).sum();
    let results = facts.number("results");
    assert_eq!((results, facts.number("sum")), (120, 120 * sum));
    assert!(facts.number("ready") > 2, "{}", facts.0);
    let copies = facts.number("init bytes") >> 20;
    assert!((1..=2).contains(&copies), "{copies} copies for two hosts");
}

/// The driver replaces the init data in the middle of the run. No later task sees the old ones, and
/// the new ones are sent once per host.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn new_init_data_reach_all_workers_before_their_next_task() {
    let facts = run_probe(&["refresh", "4"]);
    let old_sum: u64 = (0..1 << 20).map(|index: u64| index & 0xff).sum();
    let new_sum = 2 << 20;
    assert_eq!(facts.number("results"), 160);
    assert_eq!(facts.number("sum"), 80 * (old_sum + new_sum));
    let copies = facts.number("init bytes") >> 20;
    assert!(
        (2..=4).contains(&copies),
        "{copies} copies of two data for two hosts"
    );
}

/// The driver abandons the task of one worker, and updates only the other worker.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn driver_stops_one_worker_and_updates_another() {
    let facts = run_probe(&["stop", "2"]);
    assert_eq!((facts.number("results"), facts.number("sum")), (1, 4_711));
    assert_eq!((facts.number("pruned"), facts.number("lost")), (1, 0));
}

/// A worker executes the tasks that it holds ahead while a callback of the driver runs.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn worker_continues_during_a_callback() {
    let facts = run_probe(&["slow", "1"]);
    assert_eq!(facts.number("results"), 200);
    assert!(facts.number("overlapped") >= 5, "{}", facts.0);
}

/// A host that vanishes without a word is noticed, and its tasks are executed elsewhere (point 20
/// of the faults of earlier systems).
#[test]
#[ignore = "system tier: needs root and hosts"]
fn tasks_of_a_vanished_host_are_executed_elsewhere() {
    let bed = require_testbed(2);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("h2 joins");
    let command = probe_command(&vm, &["long", "4"]);
    let run = RunningCommand::start(command, Stdio::null()).expect("starts");
    let is_on_h2 = || {
        let workers = vm
            .pvm_json(&["work", "workers", "probe"])
            .map_err(|e| e.to_string())?;
        let workers = workers.first().map(|answer| answer["workers"].clone());
        let workers = workers.and_then(|workers| workers.as_array().cloned());
        let on_h2 = workers.unwrap_or_default().into_iter().filter(|worker| {
            worker["host"] == "h2" && worker["held_tasks"].as_u64().unwrap_or_default() > 0
        });
        match on_h2.count() {
            0 => Err("no task is executed on h2".to_string()),
            _ => Ok(()),
        }
    };
    wait_for(TIMEOUT, is_on_h2).or_panic_with_logs(&vm);
    bed.set_connected(2, false).expect("cut");
    let result = run.wait_or_kill(TIMEOUT).or_panic_with_logs(&vm);
    let facts = Facts(result.stdout);
    assert_eq!((facts.number("results"), facts.number("sum")), (40, 40));
    assert!(facts.number("lost") >= 1, "{}", facts.0);
    bed.set_connected(2, true).expect("connected");
    vm.halt_and_wait().expect("halts");
}

/// The task of a suspended worker is executed by another worker, which would be idle otherwise.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn task_of_a_suspended_worker_gets_a_second_copy() {
    let facts = run_probe(&["pause", "2"]);
    assert_eq!((facts.number("results"), facts.number("sum")), (2, 2));
    assert_eq!((facts.number("pauses"), facts.number("copies")), (1, 1));
}

/// `pvm work` shows a run, its workers and its end.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn console_shows_and_stops_a_run() {
    let bed = require_testbed(2);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("h2 joins");
    let nothing = vm.run_pvm(&["work", "list"]).expect("runs");
    assert_eq!(nothing.stdout, "no master-worker run is going on\n");
    let unknown = vm.run_pvm(&["work", "status", "probe"]).expect("runs");
    assert!(
        unknown.stderr.contains("no master-worker run is going on"),
        "{unknown:?}"
    );
    // The tasks of this mode wait for an update that needs three workers.
    let command = probe_command(&vm, &["update", "2"]);
    let run = RunningCommand::start(command, Stdio::null()).expect("starts");
    let two_workers = || {
        let status = vm
            .pvm_json(&["work", "status", "probe"])
            .map_err(|e| e.to_string())?;
        match status
            .first()
            .map(|status| status["progress"]["computing_workers"].clone())
        {
            Some(count) if count == 2 => Ok(()),
            other => Err(format!("{other:?}")),
        }
    };
    wait_for(TIMEOUT, two_workers).or_panic_with_logs(&vm);
    let list = vm.run_pvm(&["work", "list"]).expect("runs");
    assert!(
        list.stdout
            .starts_with("probe: 0 finished, 2 running, 1 waiting"),
        "{list:?}"
    );
    let status = vm.run_pvm(&["work", "status", "probe"]).expect("runs");
    assert!(
        status.stdout.contains("\nW ") && status.succeeded(),
        "{status:?}"
    );
    let workers = vm.run_pvm(&["work", "workers", "probe"]).expect("runs");
    assert_eq!(workers.stdout.matches("task ").count(), 2, "{workers:?}");
    let quarantine = vm.run_pvm(&["work", "quarantine", "probe"]).expect("runs");
    assert_eq!(quarantine.stdout, "no task is quarantined\n");
    let retry = vm.run_pvm(&["work", "retry", "probe", "77"]).expect("runs");
    assert_eq!(retry.status.code(), Some(1), "{retry:?}");
    let stop = vm.run_pvm(&["work", "stop", "probe"]).expect("runs");
    assert!(
        stop.stdout
            .contains("3 open tasks and its results are lost"),
        "{stop:?}"
    );
    let result = run.wait_or_kill(TIMEOUT).or_panic_with_logs(&vm);
    assert!(result.stdout.contains("results 0"), "{result:?}");
    vm.halt_and_wait().expect("halts");
}
