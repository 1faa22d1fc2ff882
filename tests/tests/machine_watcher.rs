//! One load watcher of the tasker service observes a host for the virtual machines of all users.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::event::EventKind;
use sempa_tests::owner_agent::run_owner_command_as_olga;
use sempa_tests::requirements::require_testbed;
use sempa_tests::ssh::SshLogin;
use sempa_tests::tasker_service::TaskerServices;
use sempa_tests::testbed::{Host, Testbed};
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(90);

/// Two virtual machines, of root and of alice, on the same two hosts.
struct TwoUsers<'a> {
    testbed: &'a Testbed,
    of_root: Vm<'a>,
    of_alice: Vm<'a>,
}

impl<'a> TwoUsers<'a> {
    fn start(testbed: &'a Testbed) -> Self {
        let start = |runs_as_alice| {
            let settings = VmSettings {
                runs_as_alice,
                ..VmSettings::default()
            };
            let vm = Vm::start(testbed, settings).expect("a virtual machine");
            vm.add_hosts(&["h2"]).expect("h2 joins");
            vm.compile_program("busy").expect("gcc");
            vm
        };
        Self {
            testbed,
            of_root: start(false),
            of_alice: start(true),
        }
    }

    fn vms(&self) -> [&Vm<'a>; 2] {
        [&self.of_root, &self.of_alice]
    }

    /// Waits until both virtual machines report a status on h2 that `is_expected` accepts.
    fn wait_for_statuses(&self, description: &str, is_expected: impl Fn(&Value) -> bool) {
        let check = || {
            let reply = run_owner_command_as_olga(self.testbed, 2, &["status"]);
            let machines = reply["virtual_machines"].as_array().cloned();
            match machines.as_deref() {
                Some(statuses @ [_, _]) if statuses.iter().all(&is_expected) => Ok(()),
                _ => Err(format!("not {description}: {reply}")),
            }
        };
        wait_for(TIMEOUT, check).or_panic_with_logs(&self.of_alice);
    }

    fn halt(self) {
        let result = self.of_root.run_pvm(&["halt"]).expect("the console runs");
        assert!(result.succeeded(), "{result:?}");
        self.of_alice.halt_and_wait().expect("halts");
    }
}

fn start_services(testbed: &Testbed) -> TaskerServices<'_> {
    let key_dir = Path::new(env!("CARGO_TARGET_TMPDIR"));
    TaskerServices::start(testbed, key_dir).expect("the services")
}

fn comes_from_the_machine(status: &Value) -> bool {
    status["machine_sense"] == true
}

fn observes_alone(status: &Value) -> bool {
    status["machine_sense"] == false
}

/// Returns the process id of the load watcher of the whole host.
fn machine_watcher(host: &Host) -> Option<Pid> {
    let is_watcher = |line: &str| line.contains("pvm-load-watcher --machine");
    let processes = host.processes();
    let (pid, _) = processes.iter().find(|(_, line)| is_watcher(line))?;
    Some(Pid::from_raw(pid.cast_signed()))
}

fn spawn_on_h2(vm: &Vm) -> anyhow::Result<String> {
    vm.spawn_connected(&["-h2", "busy"])
}

/// Waits until a guest may start on h2, and returns its tid.
fn spawn_when_possible(vm: &Vm) -> String {
    let spawn = || spawn_on_h2(vm).map_err(|error| format!("{error:#}"));
    wait_for(TIMEOUT, spawn).or_panic_with_logs(vm)
}

/// Waits until no guest may start on h2, because the owner allows two.
fn wait_until_full(vm: &Vm) {
    let check = || match spawn_on_h2(vm) {
        Err(error) if format!("{error:#}").contains("its owner allows 2 tasks") => Ok(()),
        Err(error) => Err(format!("{error:#}")),
        Ok(tid) => {
            let result = vm.run_pvm(&["kill", &tid]);
            Err(format!("{tid} was started: {result:?}"))
        }
    };
    wait_for(TIMEOUT, check).or_panic_with_logs(vm);
}

/// The load watcher of the host runs without the rights of root, and serves both users. The owner's
/// limit counts the guests of both, and a login stops the guests of both.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn owner_is_served_once_for_all_users() {
    let testbed = require_testbed(2);
    let _services = start_services(&testbed);
    let users = TwoUsers::start(&testbed);
    users.wait_for_statuses("of the machine's load watcher", comes_from_the_machine);
    let watcher = machine_watcher(testbed.host(2)).expect("it runs");
    let status = std::fs::read_to_string(format!("/proc/{watcher}/status")).expect("it runs");
    let line = |name: &str| status.lines().find(|line| line.starts_with(name));
    assert!(!line("Uid:").expect("a line").contains("\t0"), "{status}");
    assert_eq!(line("CapEff:"), Some("CapEff:\t0000000000000000"));

    run_owner_command_as_olga(&testbed, 2, &["limit", "2", "cores"]);
    users.wait_for_statuses("limited", |status| {
        status["policy"]
            .as_array()
            .is_some_and(|policy| policy.iter().any(|setting| setting["name"] == "cores"))
    });
    let first = spawn_on_h2(&users.of_alice).or_panic_with_logs(&users.of_alice);
    let second = spawn_on_h2(&users.of_root).or_panic_with_logs(&users.of_root);
    wait_until_full(&users.of_root);
    wait_until_full(&users.of_alice);
    let result = users.of_alice.run_pvm(&["kill", &first]);
    assert!(
        result.as_ref().is_ok_and(|result| result.succeeded()),
        "{result:?}"
    );
    spawn_when_possible(&users.of_root);
    wait_until_full(&users.of_alice);
    run_owner_command_as_olga(&testbed, 2, &["limit", "none"]);
    let third = spawn_when_possible(&users.of_alice);

    let login = SshLogin::log_in(&testbed, "olga", testbed.host(2)).expect("a login");
    users.wait_for_statuses("stopped", |status| status["guests"] == "stopped");
    for (vm, tid) in [(&users.of_root, &second), (&users.of_alice, &third)] {
        let is_pause = |kind: &EventKind| matches!(kind, EventKind::GuestsPaused { .. });
        vm.wait_for_event(TIMEOUT, "stopped guests", |entry| is_pause(&entry.kind))
            .or_panic_with_logs(vm);
        let tasks = vm.tasks().or_panic_with_logs(vm);
        assert!(tasks.iter().any(|task| task.tid == *tid && task.stopped));
    }
    login.log_out().expect("logs out");
    users.wait_for_statuses("welcome", |status| status["guests"] == "welcome");
    users.halt();
}

/// If the load watcher of the host hangs or dies, or its service ends, each virtual machine
/// observes the host itself, and follows the next load watcher of the host.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn lost_load_watcher_of_the_host_is_replaced() {
    let testbed = require_testbed(2);
    let mut services = start_services(&testbed);
    let users = TwoUsers::start(&testbed);
    for vm in users.vms() {
        spawn_on_h2(vm).or_panic_with_logs(vm);
    }
    users.wait_for_statuses("of the machine's load watcher", comes_from_the_machine);
    let host = testbed.host(2);
    let watcher = machine_watcher(host).expect("it runs");
    kill(watcher, Signal::SIGSTOP).expect("it is there");
    users.wait_for_statuses("of the own load watchers", observes_alone);
    let login = SshLogin::log_in(&testbed, "olga", host).expect("a login");
    users.wait_for_statuses("stopped", |status| status["guests"] == "stopped");
    login.log_out().expect("logs out");
    users.wait_for_statuses("of the next load watcher", comes_from_the_machine);
    let next = machine_watcher(host).expect("it runs");
    assert_ne!(next, watcher);
    services.restart(2).expect("another one");
    users.wait_for_statuses("of the next service's load watcher", |status| {
        comes_from_the_machine(status) && machine_watcher(host).is_some_and(|pid| pid != next)
    });
    users.halt();
}
