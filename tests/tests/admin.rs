//! The administrator's program on hosts with the tasker service: what it shows of users' virtual
//! machines, and how it drains a machine for all of them.

use sempa_tests::hold_tasks::check_memory;
use sempa_tests::requirements::{require_prefix_in_hosts, require_testbed};
use sempa_tests::run::{CommandResult, run_to_end};
use sempa_tests::tasker_service::TaskerServices;
use sempa_tests::testbed::Host;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(90);

/// Runs `pvm-admin` with these arguments as root on h2.
fn run_admin(testbed: &Testbed, arguments: &[&str]) -> CommandResult {
    run_admin_on(testbed.host(2), arguments)
}

fn run_admin_on(host: &Host, arguments: &[&str]) -> CommandResult {
    let program = require_prefix_in_hosts().join("sbin/pvm-admin");
    let mut command = host.root_command(program);
    command.args(arguments);
    run_to_end(command, TIMEOUT).expect("the program ends")
}

fn status(testbed: &Testbed) -> Value {
    let output = run_admin(testbed, &["status", "--json"]);
    serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"))
}

/// Starts a virtual machine of alice with a resource manager on both hosts.
fn start_alices_vm(testbed: &Testbed) -> Vm<'_> {
    let settings = VmSettings {
        rm_command: Some("pvm-rm --policy load".into()),
        runs_as_alice: true,
        ..VmSettings::default()
    };
    let vm = Vm::start(testbed, settings).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    vm.compile_program("hold").expect("gcc");
    vm
}

/// Waits until the only virtual machine on h2 has a load watcher that says whether guests may run.
fn wait_for_guests(testbed: &Testbed, expected: &str) -> Value {
    wait_for(TIMEOUT, || {
        let status = status(testbed);
        let vms = status["virtual_machines"].as_array().expect("a list");
        match vms.as_slice() {
            [vm] if vm["watcher"]["guests"] == expected => Ok(vm.clone()),
            _ => Err(format!("not {expected}: {status}")),
        }
    })
    .expect("one virtual machine")
}

/// A drained machine has no guest, whosever it is, and gets none; users see the reason. Afterwards
/// guests may come again.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn drained_machine_has_no_guests_of_any_user() {
    let testbed = require_testbed(2);
    let _services = TaskerServices::start(&testbed, Path::new(env!("CARGO_TARGET_TMPDIR")))
        .expect("the services");
    let vm = start_alices_vm(&testbed);
    let tid = vm
        .spawn_connected(&["-h2", "hold", "1"])
        .or_panic_with_logs(&vm);
    check_memory(&vm, &tid);
    let shown = wait_for_guests(&testbed, "welcome");
    assert_eq!(shown["user"], "alice");
    assert_eq!(shown["tasker"]["by_service"], true);
    assert_eq!(
        shown["tasker"]["tasks"].as_array().map(Vec::len),
        Some(1),
        "{shown}"
    );
    assert_eq!(status(&testbed)["service"]["state"], "answers");

    let drained = run_admin(&testbed, &["drain", "--reason", "new disks"]);
    assert!(drained.succeeded(), "{drained:?}\n{}", vm.events_and_logs());
    assert!(
        drained.stdout.contains("no guest is on this machine"),
        "{drained:?}"
    );
    assert_eq!(vm.host_of(&tid).or_panic_with_logs(&vm), "h1");
    check_memory(&vm, &tid);
    assert_eq!(status(&testbed)["drained"], "new disks");
    let shown = wait_for_guests(&testbed, "stopped");
    let why = shown["watcher"]["guests_why"].as_str().expect("a reason");
    assert!(why.ends_with("drained this machine: new disks"), "{why}");
    let newcomer = vm.spawn_connected(&["hold", "1"]).or_panic_with_logs(&vm);
    assert_eq!(vm.host_of(&newcomer).or_panic_with_logs(&vm), "h1");

    assert!(run_admin(&testbed, &["drain", "--off"]).succeeded());
    wait_for_guests(&testbed, "welcome");
    assert_eq!(status(&testbed)["drained"], Value::Null);
    vm.migrate_or_panic(&tid, "h2");
    check_memory(&vm, &tid);
    vm.halt_and_wait().expect("halts");
}

/// Returns the findings of the doctor on h1 about h2.
fn findings_about_h2(testbed: &Testbed) -> Vec<Value> {
    let output = run_admin_on(testbed.host(1), &["doctor", "--json", "h2"]);
    let findings: Vec<Value> =
        serde_json::from_str(&output.stdout).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    let about_h2 = findings.into_iter().filter(|f| f["subject"] == "h2");
    about_h2.collect()
}

/// The doctor examines another host by real ssh and real datagrams. One that is not connected is a
/// single failure.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn doctor_examines_another_host() {
    let testbed = require_testbed(2);
    let findings = findings_about_h2(&testbed);
    for part in [
        "ssh reaches it",
        "it has version",
        "its clock is right",
        "a datagram to it works",
        "a datagram from it that is no answer works",
    ] {
        let is_ok = |finding: &Value| {
            finding["level"] == "ok"
                && finding["sentence"]
                    .as_str()
                    .is_some_and(|text| text.contains(part))
        };
        assert!(findings.iter().any(is_ok), "{part}: {findings:?}");
    }
    testbed
        .set_connected(2, false)
        .expect("it is not connected");
    let findings = findings_about_h2(&testbed);
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert_eq!(findings[0]["level"], "failure");
}
