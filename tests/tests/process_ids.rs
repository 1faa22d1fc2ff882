//! Process ids differ between the tasks of a virtual machine, and a task keeps its own.

use sempa_tests::requirements::require_testbed;
use sempa_tests::run::run_successfully;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
const TASKS_PER_HOST: usize = 8;

/// The numbers that a task of the test program `process_ids` has reported, by name.
type ReportedNumbers = BTreeMap<String, i32>;

fn start_vm<'a>(testbed: &'a Testbed, slaves: &[&str], settings: VmSettings) -> Vm<'a> {
    let vm = Vm::start(testbed, settings).expect("a virtual machine");
    if !slaves.is_empty() {
        vm.add_hosts(slaves).expect("the others join");
    }
    vm.compile_program("process_ids").expect("gcc");
    vm
}

fn ask(vm: &Vm, tid: &str) -> ReportedNumbers {
    let program = vm.user_home().join("pvm3/bin/LINUX64/process_ids");
    let mut command = vm.user_command(vm.testbed().host(1), program);
    command.args(["ask", tid]);
    let answer = run_successfully(command, TIMEOUT)
        .or_panic_with_logs(vm)
        .stdout;
    let words: Vec<&str> = answer.split_whitespace().collect();
    let numbers: ReportedNumbers = words
        .chunks_exact(2)
        .map(|pair| (pair[0].to_string(), pair[1].parse().expect("a number")))
        .collect();
    assert_eq!(numbers.len(), 5, "{answer}");
    numbers
}

/// Asks all tasks. Checks that all ids of processes and threads differ, that the seeds differ, and
/// that `pvm_tasks` and `pvm ps` list what `getpid()` returns.
fn ask_and_check_all(vm: &Vm, tids: &[String]) -> Vec<ReportedNumbers> {
    let reports: Vec<ReportedNumbers> = tids.iter().map(|tid| ask(vm, tid)).collect();
    let distinct_count = |names: &[&str]| {
        let values = reports
            .iter()
            .flat_map(|report| names.iter().map(|name| report[*name]));
        values.collect::<BTreeSet<i32>>().len()
    };
    assert_eq!(
        distinct_count(&["pid", "child", "thread"]),
        3 * tids.len(),
        "{reports:?}"
    );
    assert_eq!(distinct_count(&["seed"]), tids.len(), "{reports:?}");
    let listed_tasks = vm.tasks().or_panic_with_logs(vm);
    for (tid, report) in tids.iter().zip(&reports) {
        assert_eq!(report["listed"], report["pid"], "{report:?}");
        let task = listed_tasks
            .iter()
            .find(|task| task.tid == *tid)
            .expect("listed");
        assert_eq!(task.namespace_pid, report["pid"], "{task:?}");
    }
    reports
}

/// All tasks of three hosts have different process ids, and so have their children and threads. A
/// task keeps its id when it migrates; its next children have other ids than those of all tasks.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn tasks_of_three_hosts_have_different_process_ids() {
    let testbed = require_testbed(3);
    let vm = start_vm(&testbed, &["h2", "h3"], VmSettings::default());
    let mut tids = Vec::new();
    for host in ["-h1", "-h2", "-h3"] {
        tids.extend(
            (0..TASKS_PER_HOST)
                .map(|_| vm.spawn_connected(&[host, "process_ids"]).expect("spawned")),
        );
    }
    let reports = ask_and_check_all(&vm, &tids);
    for (task, target) in [(0, "h2"), (TASKS_PER_HOST, "h3"), (0, "h3")] {
        vm.migrate_or_panic(&tids[task], target);
        assert_eq!(ask(&vm, &tids[task])["pid"], reports[task]["pid"]);
    }
    let later_reports = ask_and_check_all(&vm, &tids);
    for (report, later_report) in reports.iter().zip(&later_reports) {
        assert_eq!(report["pid"], later_report["pid"]);
        assert!(later_report["child"] > report["pid"], "{later_report:?}");
    }
    vm.halt_and_wait().expect("halts");
}

/// A job that is restarted from a checkpoint has the process ids that it had.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn restarted_task_keeps_its_process_id() {
    let testbed = require_testbed(2);
    let vm = start_vm(&testbed, &["h2"], VmSettings::default());
    let tid = vm
        .spawn_connected(&["-h2", "process_ids"])
        .expect("spawned");
    let report = ask(&vm, &tid);
    let end_values = vm
        .pvm_json(&["checkpoint", "--end", &tid])
        .or_panic_with_logs(&vm);
    let name = end_values[0]["set"].as_str().expect("a name");
    let wait_result = wait_for(TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| error.to_string())?;
        match tasks.iter().any(|task| task.tid == tid) {
            true => Err(format!("{tasks:?}")),
            false => Ok(()),
        }
    });
    wait_result.or_panic_with_logs(&vm);
    let restart_result = vm.run_pvm(&["restart", name, "--on", "h1"]).expect("ends");
    assert!(restart_result.succeeded(), "{restart_result:?}");
    let later_reports = ask_and_check_all(&vm, std::slice::from_ref(&tid));
    assert_eq!(later_reports[0]["pid"], report["pid"]);
    assert_eq!(vm.host_of(&tid).expect("alive"), "h1");
    vm.halt_and_wait().expect("halts");
}

/// Tasks of an ordinary user have no PID namespaces, so their process ids are those of their host.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn ordinary_users_tasks_have_different_process_ids() {
    let testbed = require_testbed(1);
    let settings = VmSettings {
        runs_as_alice: true,
        ..VmSettings::default()
    };
    let vm = start_vm(&testbed, &[], settings);
    let tids: Vec<String> = (0..TASKS_PER_HOST)
        .map(|_| vm.spawn_connected(&["process_ids"]).expect("spawned"))
        .collect();
    ask_and_check_all(&vm, &tids);
    for task in vm.tasks().expect("tasks") {
        assert_eq!(task.namespace_pid, task.pid, "{task:?}");
    }
    vm.halt_and_wait().expect("halts");
}
