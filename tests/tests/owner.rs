//! The main purpose of Sempa: guests migrate off a host whose owner logs in, and continue on other
//! hosts. After the owner has logged out, the host is used again.

use sempa_proto::event::EventKind;
use sempa_tests::requirements::require_testbed;
use sempa_tests::run::run_successfully;
use sempa_tests::ssh::SshLogin;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

fn read_counter(vm: &Vm, tid: &str) -> u64 {
    let mut command = vm.user_command(
        vm.testbed().host(1),
        vm.user_home().join("pvm3/bin/LINUX64/hold"),
    );
    command.args(["ask", tid]);
    let output = run_successfully(command, TIMEOUT).or_panic_with_logs(vm);
    assert!(output.stdout.contains("sum GOOD"), "{output:?}");
    output
        .stdout
        .split(' ')
        .nth(1)
        .and_then(|count| count.parse().ok())
        .unwrap_or_else(|| panic!("{output:?}"))
}

fn with_policy(policy: &str, host_count: usize, test: impl FnOnce(&Vm)) {
    let bed = require_testbed(host_count);
    let rm_command = format!("pvm-rm --policy {policy}");
    let vm = Vm::start(
        &bed,
        VmSettings {
            rm_command: Some(rm_command),
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    let other_hosts: Vec<&str> = bed.hosts()[1..].iter().map(|host| host.name()).collect();
    vm.add_hosts(&other_hosts).expect("the others join");
    wait_for(TIMEOUT, || {
        let tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
        let watcher_count = tasks
            .iter()
            .filter(|task| task.name.ends_with("pvm-load-watcher"))
            .count();
        if watcher_count == host_count {
            Ok(())
        } else {
            Err(format!(
                "{watcher_count} watchers: {tasks:?}\n{}",
                vm.events_and_logs()
            ))
        }
    })
    .expect("a load watcher on every host");
    vm.compile_program("hold").expect("gcc");
    test(&vm);
    vm.halt_and_wait().expect("halts");
}

/// Guests leave the host when the owner logs in. After the logout, tasks are placed on the host
/// again.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_leave_when_the_owner_logs_in() {
    with_policy("load", 3, |vm| {
        let guest_tids: Vec<String> = (0..2)
            .map(|_| vm.spawn_connected(&["-h2", "hold", "16"]).expect("spawned"))
            .collect();
        let unaffected_tid = vm.spawn_connected(&["-h3", "hold", "1"]).expect("spawned");
        let counts: Vec<u64> = guest_tids.iter().map(|tid| read_counter(vm, tid)).collect();
        let login = SshLogin::log_in(vm.testbed(), "olga", vm.testbed().host(2)).expect("a login");
        vm.wait_for_event(TIMEOUT, "clean host", |entry| {
            matches!(entry.kind, EventKind::HostVacated { .. })
        })
        .or_panic_with_logs(vm);
        for (tid, count) in guest_tids.iter().zip(counts) {
            assert_ne!(vm.host_of(tid).expect("alive"), "h2");
            assert!(read_counter(vm, tid) > count, "{tid} has gone on counting");
        }
        assert_eq!(
            vm.host_of(&unaffected_tid).expect("alive"),
            "h3",
            "nobody else was moved"
        );
        let remaining_processes: Vec<_> = vm
            .testbed()
            .host(2)
            .processes()
            .into_iter()
            .filter(|(_, line)| line.contains("hold"))
            .collect();
        assert!(remaining_processes.is_empty(), "{remaining_processes:?}");
        login.log_out().expect("logs out");
        vm.wait_for_event(TIMEOUT, "absent owner", |entry| {
            matches!(entry.kind, EventKind::OwnerAbsent { .. })
        })
        .expect("seen");
        wait_for(TIMEOUT, || {
            let tid = vm
                .spawn_connected(&["hold", "1"])
                .map_err(|error| format!("{error:#}"))?;
            let host = vm.host_of(&tid).map_err(|error| format!("{error:#}"))?;
            if host == "h2" {
                Ok(())
            } else {
                Err(format!("placed on {host}"))
            }
        })
        .expect("h2 is used again");
        for tid in &guest_tids {
            assert_ne!(
                vm.host_of(tid).expect("alive"),
                "h2",
                "nobody is moved back without need"
            );
        }
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn no_task_is_placed_while_the_owner_is_present() {
    with_policy("load", 2, |vm| {
        let login = SshLogin::log_in(vm.testbed(), "olga", vm.testbed().host(2)).expect("a login");
        vm.wait_for_event(TIMEOUT, "present owner", |entry| {
            matches!(entry.kind, EventKind::OwnerPresent { .. })
        })
        .expect("seen");
        for _ in 0..4 {
            let tid = vm.spawn_connected(&["hold", "1"]).expect("spawned");
            assert_eq!(vm.host_of(&tid).expect("alive"), "h1");
        }
        login.log_out().expect("logs out");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn spawns_succeed_after_kill_of_resource_manager() {
    with_policy("load", 2, |vm| {
        let processes = vm.testbed().host(1).processes();
        let (rm_pid, _) = processes
            .iter()
            .find(|(_, line)| line.contains("pvm-rm"))
            .expect("it runs");
        let pid = nix::unistd::Pid::from_raw(rm_pid.cast_signed());
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).expect("it is there");
        vm.wait_for_event(TIMEOUT, "lost resource manager", |entry| {
            matches!(entry.kind, EventKind::RmGone { .. })
        })
        .expect("seen");
        for _ in 0..3 {
            let tid = vm
                .spawn_connected(&["hold", "1"])
                .expect("spawned without a resource manager");
            read_counter(vm, &tid);
        }
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn round_robin_places_in_turn() {
    with_policy("round-robin", 2, |vm| {
        let mut hosts: Vec<String> = (0..4)
            .map(|_| vm.spawn_connected(&["hold", "1"]).expect("spawned"))
            .map(|tid| vm.host_of(&tid).expect("alive"))
            .collect();
        hosts.sort();
        assert_eq!(hosts, ["h1", "h1", "h2", "h2"]);
    });
}
