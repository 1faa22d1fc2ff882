//! Guests stop for the owner of their host without any resource manager: each daemon has a load
//! watcher and carries out its verdict. The logins are real ones, over ssh.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::event::EventKind;
use sempa_tests::owner_agent::run_owner_command_as_olga;
use sempa_tests::requirements::require_testbed_with_env;
use sempa_tests::run::{CommandResult, run_to_end};
use sempa_tests::ssh::SshLogin;
use sempa_tests::testbed::{Host, OLGA_UID, Testbed};
use sempa_tests::utmp::read_logins;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use serde_json::Value;
use std::fs;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Environment variable and value that set a lease of 120 s, so that no host is lost while its
/// daemon is stopped.
const LONG_LEASE: (&str, &str) = ("SEMPA_LEASE_MS", "120000");

/// Runs `test` on a virtual machine of two hosts without a resource manager, and with a guest that
/// computes on h2. Its tid is an argument of `test`.
fn with_guest(bed: &Testbed, runs_as_alice: bool, test: impl FnOnce(&Vm, &str)) {
    let settings = VmSettings {
        runs_as_alice,
        env: VmSettings::owned_env(&[LONG_LEASE]),
        ..VmSettings::default()
    };
    let vm = Vm::start(bed, settings).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("h2 joins");
    wait_for_status(&vm, "a load watcher", |_| true);
    vm.compile_program("busy").expect("gcc");
    let guest_tid = vm.spawn_connected(&["-h2", "busy"]).or_panic_with_logs(&vm);
    test(&vm, &guest_tid);
    vm.halt_and_wait().expect("halts");
}

/// Runs `pvm owner` with these arguments on h2 as olga, who has no virtual machine. The command may
/// fail.
fn try_owner_command(vm: &Vm, arguments: &[&str]) -> CommandResult {
    let olga_home = vm.testbed().folder().join("olga");
    let mut command = vm
        .testbed()
        .host(2)
        .command_as(Some(("olga", OLGA_UID, &olga_home)), "pvm");
    command.arg("owner").args(arguments);
    run_to_end(command, TIMEOUT).expect("the console runs")
}

/// Waits until the only load watcher on h2 reports a status that `is_expected` accepts.
fn wait_for_status(vm: &Vm, description: &str, is_expected: impl Fn(&Value) -> bool) -> Value {
    let check = || {
        let reply = run_owner_command_as_olga(vm.testbed(), 2, &["status"]);
        let machines = reply["virtual_machines"].as_array().cloned();
        match machines.as_deref() {
            Some([status]) if is_expected(status) => Ok(status.clone()),
            _ => Err(format!("not {description}: {reply}")),
        }
    };
    wait_for(TIMEOUT, check).or_panic_with_logs(vm)
}

fn are_stopped(status: &Value) -> bool {
    status["guests"] == "stopped"
}

fn are_welcome(status: &Value) -> bool {
    status["guests"] == "welcome"
}

/// Waits for an event after the first `event_count` events. Returns its time in microseconds since
/// 1970.
fn wait_for_new_event(
    vm: &Vm,
    event_count: usize,
    description: &str,
    is_expected: impl Fn(&EventKind) -> bool,
) -> u64 {
    let check = || {
        let events = vm.events().map_err(|error| format!("{error:#}"))?;
        let mut new_events = events.into_iter().skip(event_count);
        new_events
            .find(|entry| is_expected(&entry.kind))
            .map(|entry| entry.at_us)
            .ok_or_else(|| format!("no {description}"))
    };
    wait_for(TIMEOUT, check).or_panic_with_logs(vm)
}

fn is_pause(kind: &EventKind) -> bool {
    matches!(kind, EventKind::GuestsPaused { .. })
}

fn is_resumption(kind: &EventKind) -> bool {
    matches!(kind, EventKind::GuestsResumed { .. })
}

fn is_stopped(vm: &Vm, tid: &str) -> bool {
    let tasks = vm.tasks().or_panic_with_logs(vm);
    tasks.iter().any(|task| task.tid == tid && task.stopped)
}

/// Returns the process id of the load watcher of a host.
fn watcher_pid(host: &Host) -> Option<Pid> {
    let is_watcher = |line: &str| {
        line.split(' ')
            .next()
            .is_some_and(|path| path.ends_with("pvm-load-watcher"))
    };
    let processes = host.processes();
    let (pid, _) = processes.iter().find(|(_, line)| is_watcher(line))?;
    Some(Pid::from_raw(pid.cast_signed()))
}

/// Returns the text of `pvm owner` as olga sees it on h2.
fn owner_text(vm: &Vm) -> String {
    let result = try_owner_command(vm, &["status"]);
    assert!(result.succeeded(), "{result:?}");
    result.stdout
}

/// The owner logs in: the guest stops, is not said to leave, and no task is placed on the host. The
/// owner logs out: the guest continues.
fn check_login(vm: &Vm, guest_tid: &str) {
    let event_count = vm.events().expect("events").len();
    let login = SshLogin::log_in(vm.testbed(), "olga", vm.testbed().host(2)).expect("a login");
    let stopped_at_us = wait_for_new_event(vm, event_count, "stopped guest", is_pause);
    assert!(is_stopped(vm, guest_tid));
    let logins = read_logins(vm.testbed().host(2)).expect("the login records");
    let login_at_us = logins.iter().map(|login| login.at_us).max().unwrap_or(0);
    // sshd writes the record some milliseconds after the time in it.
    println!(
        "guests stopped {:.1} ms after the time in the login record",
        stopped_at_us.saturating_sub(login_at_us) as f64 / 1e3
    );
    let status = wait_for_status(vm, "stopped", are_stopped);
    assert!(
        status["cannot_leave"]
            .as_str()
            .is_some_and(|reason| reason.contains("no resource manager runs")),
        "{status}"
    );
    let text = owner_text(vm);
    for part in [
        "they cannot leave: no resource manager runs",
        "they are stopped and hold ",
        "'pvm owner end' ends them",
        guest_tid,
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("they leave at"), "{text}");
    for _ in 0..3 {
        let tid = vm.spawn_connected(&["busy"]).or_panic_with_logs(vm);
        assert_eq!(vm.host_of(&tid).expect("alive"), "h1");
    }
    assert!(vm.spawn_connected(&["-h2", "busy"]).is_err(), "not by name");
    login.log_out().expect("logs out");
    wait_for_new_event(vm, event_count, "guest that continues", is_resumption);
    assert!(!is_stopped(vm, guest_tid));
    assert_eq!(vm.host_of(guest_tid).expect("alive"), "h2");
}

/// What the owner states is confirmed when it holds, and the hours are stated with their zone. A
/// guest that cannot leave is ended by the command that the status names.
fn check_statements(vm: &Vm, guest_tid: &str) {
    let event_count = vm.events().expect("events").len();
    let result = try_owner_command(vm, &["never", "always"]);
    assert!(
        result.succeeded()
            && result
                .stdout
                .contains("in the time zone of this machine; it is ")
            && result
                .stdout
                .contains("read by the load watcher of virtual machine"),
        "{result:?}"
    );
    wait_for_new_event(vm, event_count, "stopped guest", is_pause);
    assert!(is_stopped(vm, guest_tid));
    assert!(try_owner_command(vm, &["never", "none"]).succeeded());
    wait_for_new_event(vm, event_count, "guest that continues", is_resumption);
    assert!(try_owner_command(vm, &["here"]).succeeded());
    wait_for_status(vm, "stopped", are_stopped);
    assert!(try_owner_command(vm, &["end"]).succeeded());
    wait_for_new_event(
        vm,
        event_count,
        "guest that is ended",
        |kind| matches!(kind, EventKind::TaskEnded { tid, .. } if tid.to_string() == guest_tid),
    );
    assert!(try_owner_command(vm, &["end", "none"]).succeeded());
    assert!(try_owner_command(vm, &["auto"]).succeeded());
    wait_for_status(vm, "welcome", are_welcome);
}

/// A load watcher that hangs, or dies, is replaced, and programs see neither of them.
fn check_replacement(vm: &Vm, guest_tid: &str) {
    let host = vm.testbed().host(2);
    for signal in [Signal::SIGSTOP, Signal::SIGKILL] {
        let old_pid = watcher_pid(host).expect("it runs");
        kill(old_pid, signal).expect("it is there");
        let check = || match watcher_pid(host) {
            Some(pid) if pid != old_pid => Ok(()),
            other => Err(format!("{other:?} after {signal}")),
        };
        wait_for(TIMEOUT, check).or_panic_with_logs(vm);
        wait_for_status(vm, "welcome", are_welcome);
    }
    let tasks = vm.tasks().or_panic_with_logs(vm);
    let is_watcher = |name: &str| name.contains("load-watcher");
    assert!(
        !tasks.iter().any(|task| is_watcher(&task.name)),
        "{tasks:?}"
    );
    // The guest was the first task on h2.
    assert_eq!(guest_tid, "t80001");
    let next_tid = vm.spawn_connected(&["-h2", "busy"]).or_panic_with_logs(vm);
    assert_eq!(next_tid, "t80002", "{tasks:?}");
    let started_names = vm.events().expect("events").into_iter();
    let started_names = started_names.filter_map(|entry| match entry.kind {
        EventKind::TaskStarted { name, .. } => Some(name),
        _ => None,
    });
    let started_watchers: Vec<String> = started_names.filter(|name| is_watcher(name)).collect();
    assert_eq!(started_watchers, Vec::<String>::new());
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn roots_guests_stop_without_resource_manager() {
    let bed = require_testbed_with_env(2, &[LONG_LEASE]);
    with_guest(&bed, false, |vm, guest_tid| {
        check_replacement(vm, guest_tid);
        check_login(vm, guest_tid);
        check_statements(vm, guest_tid);
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn ordinary_users_guests_stop_without_resource_manager() {
    let bed = require_testbed_with_env(2, &[LONG_LEASE]);
    with_guest(&bed, true, |vm, guest_tid| {
        check_login(vm, guest_tid);
        check_statements(vm, guest_tid);
    });
}

/// With a resource manager, guests of an ordinary user cannot be dumped, so they are not said to
/// leave either.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_that_cannot_be_dumped_are_not_said_to_leave() {
    let bed = require_testbed_with_env(2, &[LONG_LEASE]);
    let settings = VmSettings {
        rm_command: Some("pvm-rm --policy load".to_string()),
        runs_as_alice: true,
        env: VmSettings::owned_env(&[LONG_LEASE]),
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("h2 joins");
    wait_for_status(&vm, "a load watcher", |_| true);
    vm.compile_program("busy").expect("gcc");
    vm.spawn_connected(&["-h2", "busy"]).or_panic_with_logs(&vm);
    let login = SshLogin::log_in(&bed, "olga", bed.host(2)).expect("a login");
    wait_for_status(&vm, "an obstacle", |status| {
        let reason = status["cannot_leave"].as_str().unwrap_or_default();
        are_stopped(status) && reason.contains("tasks cannot be migrated from here: ")
    });
    let text = owner_text(&vm);
    assert!(
        text.contains("they cannot leave: tasks cannot be migrated")
            && !text.contains("they leave at"),
        "{text}"
    );
    login.log_out().expect("logs out");
    vm.halt_and_wait().expect("halts");
}

/// The user of the virtual machine logs in: the tasks are this user's own, and go on.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn own_login_stops_nothing() {
    let bed = require_testbed_with_env(2, &[LONG_LEASE]);
    with_guest(&bed, true, |vm, guest_tid| {
        let login = SshLogin::log_in(vm.testbed(), "alice", vm.testbed().host(2));
        let login = login.expect("a login");
        let status = wait_for_status(vm, "the login", |status| {
            status["why"] == "only alice is logged in, whose virtual machine this is"
        });
        assert!(are_welcome(&status), "{status}");
        assert!(!is_stopped(vm, guest_tid));
        login.log_out().expect("logs out");
    });
}

/// A load watcher and its daemon hang: `pvm owner` does not succeed, and names the virtual machine
/// that has not confirmed. When they continue, what was written comes into force.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn unconfirmed_statement_is_reported() {
    let bed = require_testbed_with_env(2, &[LONG_LEASE]);
    with_guest(&bed, false, |vm, guest_tid| {
        let host = vm.testbed().host(2);
        let is_daemon = |line: &str| {
            line.split(' ')
                .next()
                .is_some_and(|path| path.ends_with("/pvmd") || path == "pvmd")
        };
        let daemon_pids: Vec<Pid> = host
            .processes()
            .into_iter()
            .filter(|(_, line)| is_daemon(line))
            .map(|(pid, _)| Pid::from_raw(pid.cast_signed()))
            .collect();
        let pids = [&daemon_pids[..], &[watcher_pid(host).expect("it runs")]].concat();
        pids.iter()
            .for_each(|pid| kill(*pid, Signal::SIGSTOP).expect("it is there"));
        let result = try_owner_command(vm, &["never", "always"]);
        pids.iter()
            .for_each(|pid| kill(*pid, Signal::SIGCONT).expect("it is there"));
        assert!(
            !result.succeeded()
                && result.stderr.contains("does not answer")
                && result
                    .stderr
                    .contains("virtual machine of root, daemon process")
                && result.stderr.contains("may still run against it"),
            "{result:?}"
        );
        wait_for_status(vm, "stopped", are_stopped);
        let check = || match is_stopped(vm, guest_tid) {
            true => Ok(()),
            false => Err("it runs".to_string()),
        };
        wait_for(TIMEOUT, check).or_panic_with_logs(vm);
        assert!(try_owner_command(vm, &["never", "none"]).succeeded());
    });
}

/// The administrator ends the protection of owners: no load watcher runs, and guests go on. `pvm
/// owner` says so.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn administrator_switches_the_watch_off() {
    let admin_policy_path = "/tmp/admin-owner.toml";
    let bed = require_testbed_with_env(2, &[("SEMPA_ADMIN_POLICY", admin_policy_path), LONG_LEASE]);
    with_guest(&bed, false, |vm, guest_tid| {
        let host = vm.testbed().host(2);
        fs::write(host.machine_path(admin_policy_path), "watch = false\n").expect("written");
        wait_for_status(vm, "switched off", |status| {
            status["switched_off_by"] == admin_policy_path
        });
        let check = || match watcher_pid(host) {
            None => Ok(()),
            Some(pid) => Err(format!("{pid} runs")),
        };
        wait_for(TIMEOUT, check).or_panic_with_logs(vm);
        let login = SshLogin::log_in(vm.testbed(), "olga", host).expect("a login");
        let text = owner_text(vm);
        assert!(
            text.contains("no load watcher of this virtual machine answers")
                && text.contains("busy"),
            "{text}"
        );
        assert!(!try_owner_command(vm, &["never", "always"]).succeeded());
        assert!(!is_stopped(vm, guest_tid));
        login.log_out().expect("logs out");
        assert!(!try_owner_command(vm, &["never", "none"]).succeeded());
    });
}
