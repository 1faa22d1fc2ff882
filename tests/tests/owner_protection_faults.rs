//! Guests stop for the owner even if the master's daemon, the resource manager or the load watcher
//! is dead or stopped. The tests check the guests' own records of when they ran.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::Tid;
use sempa_proto::event::EventKind;
use sempa_tests::owner_agent::run_owner_command_as_olga;
use sempa_tests::requirements::require_testbed_with_env;
use sempa_tests::run::run_successfully;
use sempa_tests::ssh::SshLogin;
use sempa_tests::testbed::Host;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Environment variable and value that set a lease of 120 s. These tests stop a daemon for some
/// time, and no host may be lost meanwhile.
const LONG_LEASE: (&str, &str) = ("SEMPA_LEASE_MS", "120000");
/// A guest that has used no processor time for this duration, in microseconds, counts as stopped.
/// The duration is longer than the gaps that a running guest records.
const STOPPED_MIN_US: u64 = 1_000_000;

fn now_us() -> u64 {
    let elapsed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    u64::try_from(elapsed.as_micros()).expect("fits")
}

/// Returns the ids of the processes of a host that run `program`.
fn program_pids(host: &Host, program: &str) -> Vec<Pid> {
    let runs_program = |line: &str| {
        line.split(' ')
            .next()
            .and_then(|path| path.rsplit('/').next())
            == Some(program)
    };
    let matching_processes = host
        .processes()
        .into_iter()
        .filter(|(_, line)| runs_program(line));
    matching_processes
        .map(|(pid, _)| Pid::from_raw(pid.cast_signed()))
        .collect()
}

fn single_pid(host: &Host, program: &str) -> Pid {
    let pids = program_pids(host, program);
    assert_eq!(
        pids.len(),
        1,
        "{program} on {}: {:?}",
        host.name(),
        host.processes()
    );
    pids[0]
}

/// Returns the processor time that a guest has used in user and kernel mode, in clock ticks; `None`
/// if the guest has ended.
fn processor_ticks(host: &Host, pid: i32) -> Option<u64> {
    let mut command = host.root_command("cat");
    command.arg(format!("/proc/{pid}/stat"));
    let stat = run_successfully(command, TIMEOUT).ok()?.stdout;
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
    Some(fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?)
}

/// Waits until a guest that computes has used no processor time for [`STOPPED_MIN_US`]. Returns the
/// time of this observation in microseconds since 1970.
fn wait_until_stopped(host: &Host, pid: i32) -> u64 {
    let mut last_change = (processor_ticks(host, pid), now_us());
    let check = || {
        let (ticks, observed_at_us) = (processor_ticks(host, pid), now_us());
        if ticks != last_change.0 {
            last_change = (ticks, observed_at_us);
        }
        if observed_at_us - last_change.1 >= STOPPED_MIN_US {
            Ok(observed_at_us)
        } else {
            Err(format!("it runs: {ticks:?} ticks"))
        }
    };
    wait_for(TIMEOUT, check).expect("it is paused")
}

/// Runs `test` on a virtual machine with a resource manager and load watchers. `policy` is the
/// owner's policy. The arguments of `test` are the virtual machine, the tid of a guest that
/// computes on h2, and the guest's process number.
fn with_guest(policy: &str, test: impl FnOnce(&Vm, &str, i32)) {
    let bed = require_testbed_with_env(2, &[LONG_LEASE]);
    let (rm, env) = (
        Some("pvm-rm --policy load".to_string()),
        vec![(LONG_LEASE.0.into(), LONG_LEASE.1.into())],
    );
    let vm = Vm::start(
        &bed,
        VmSettings {
            rm_command: rm,
            env,
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    let policy_path = vm.user_home().join(".config/sempa/owner.toml");
    fs::create_dir_all(policy_path.parent().expect("a folder")).expect("the testbed's own home");
    fs::write(&policy_path, policy).expect("the testbed's own home");
    vm.add_hosts(&["h2"]).expect("it joins");
    (1..=2).for_each(|host| wait_for_status(&vm, host, |_| true));
    vm.compile_program("busy").expect("gcc");
    let guest_tid = vm.spawn_connected(&["-h2", "busy"]).expect("spawned");
    let tasks = vm.tasks().expect("tasks");
    let pid = tasks
        .iter()
        .find(|task| task.tid == guest_tid)
        .expect("it is there")
        .pid;
    test(&vm, &guest_tid, pid);
}

/// Waits until the status of a host's load watcher matches `is_expected`.
fn wait_for_status(vm: &Vm, host: usize, is_expected: impl Fn(&serde_json::Value) -> bool) {
    let check = || {
        let owner_reply = run_owner_command_as_olga(vm.testbed(), host, &["status"]);
        let status = owner_reply["virtual_machines"]
            .as_array()
            .and_then(|machines| machines.first().cloned());
        if status.as_ref().is_some_and(&is_expected) {
            Ok(())
        } else {
            Err(owner_reply.to_string())
        }
    };
    wait_for(TIMEOUT, check).or_panic_with_logs(vm);
}

/// Waits until a guest has used more processor time than at the call.
fn wait_until_runs(host: &Host, pid: i32) {
    let previous_ticks = processor_ticks(host, pid).expect("it is there");
    let check = || match processor_ticks(host, pid) {
        Some(ticks) if ticks > previous_ticks => Ok(()),
        other => Err(format!("{other:?} ticks as before")),
    };
    wait_for(TIMEOUT, check).expect("it runs on");
}

/// Waits until the guest has ended and the host has no process of the guest's program.
fn wait_until_ended(host: &Host, pid: i32) {
    let check = || match (processor_ticks(host, pid), program_pids(host, "busy")) {
        (None, pids) if pids.is_empty() => Ok(()),
        other => Err(format!("{other:?}")),
    };
    wait_for(TIMEOUT, check).expect("it is ended");
}

/// Waits for the event that guests were ended, and checks that it contains this guest, no other
/// task, and the host h2. Then waits for the end of the guest. Returns the owner's reason.
fn wait_for_guest_end_event(vm: &Vm, guest_tid: &str) -> String {
    let is_guest = |tid: &Tid| tid.to_string() == guest_tid;
    let end_event = vm.wait_for_event(TIMEOUT, "guests that are ended", |entry| {
        matches!(entry.kind, EventKind::GuestsEnded { .. })
    });
    let end_event = end_event.or_panic_with_logs(vm);
    let EventKind::GuestsEnded { guests, why, .. } = end_event.kind else {
        unreachable!()
    };
    assert!(
        guests.len() == 1 && is_guest(&guests[0]) && end_event.host.as_deref() == Some("h2"),
        "{guests:?}"
    );
    let is_guest_end =
        |kind: &EventKind| matches!(kind, EventKind::TaskEnded { tid, .. } if is_guest(tid));
    vm.wait_for_event(TIMEOUT, "its end", |entry| is_guest_end(&entry.kind))
        .or_panic_with_logs(vm);
    let tasks = vm.tasks().or_panic_with_logs(vm);
    assert!(tasks.iter().all(|task| task.tid != guest_tid), "{tasks:?}");
    why
}

/// Waits until a task can be spawned on h2 again.
fn wait_until_spawn_succeeds(vm: &Vm) {
    let try_spawn = || {
        vm.spawn_connected(&["-h2", "busy"])
            .map_err(|error| format!("{error:#}"))
    };
    wait_for(TIMEOUT, try_spawn).or_panic_with_logs(vm);
}

fn wait_for_pause_event(vm: &Vm) {
    vm.wait_for_event(TIMEOUT, "paused guests", |entry| {
        matches!(entry.kind, EventKind::GuestsPaused { .. })
    })
    .or_panic_with_logs(vm);
}

fn wait_for_resume_event(vm: &Vm) {
    vm.wait_for_event(TIMEOUT, "guests that go on", |entry| {
        matches!(entry.kind, EventKind::GuestsResumed { .. })
    })
    .or_panic_with_logs(vm);
}

/// Stops the master's daemon; then logs in the owner of h2. Returns the stopped process and the
/// login.
fn stop_master_and_log_in(vm: &Vm) -> (Pid, SshLogin) {
    let master_pid = single_pid(vm.testbed().host(1), "pvmd");
    kill(master_pid, Signal::SIGSTOP).expect("it is there");
    (
        master_pid,
        SshLogin::log_in(vm.testbed(), "olga", vm.testbed().host(2)).expect("a login"),
    )
}

/// Checks that a guest did not run between two times, by the guest's own clock. Both times are in
/// microseconds since 1970.
fn assert_did_not_run(vm: &Vm, guest_tid: &str, from_us: u64, to_us: u64) {
    let gaps = vm.busy_gaps_us(guest_tid).or_panic_with_logs(vm);
    assert!(
        gaps.iter().any(|gap| gap.0 <= from_us && gap.1 >= to_us),
        "{guest_tid} ran between {from_us} and {to_us}: {gaps:?}"
    );
}

/// The guest is stopped although the master's daemon is stopped when the owner logs in.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_owner_stops_guests_without_the_master() {
    with_guest("leave_after = \"never\"", |vm, guest_tid, pid| {
        let owner_host = vm.testbed().host(2);
        let (master_pid, login) = stop_master_and_log_in(vm);
        let observed_at_us = wait_until_stopped(owner_host, pid);
        let resumed_at_us = now_us();
        kill(master_pid, Signal::SIGCONT).expect("it is there");
        login.log_out().expect("logs out");
        // Only the guest's own host can have stopped the guest before the master's daemon was
        // resumed.
        assert_did_not_run(
            vm,
            guest_tid,
            observed_at_us - STOPPED_MIN_US,
            resumed_at_us,
        );
        assert_eq!(vm.host_of(guest_tid).expect("alive"), "h2");
        vm.halt_and_wait().expect("halts");
    });
}

/// The guest continues although the master's daemon is stopped when the owner logs out.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_continue_without_the_master() {
    with_guest("leave_after = 600", |vm, guest_tid, pid| {
        let owner_host = vm.testbed().host(2);
        let (master_pid, login) = stop_master_and_log_in(vm);
        let observed_at_us = wait_until_stopped(owner_host, pid);
        let end_us = now_us();
        login.log_out().expect("logs out");
        wait_until_runs(owner_host, pid);
        kill(master_pid, Signal::SIGCONT).expect("it is there");
        assert_did_not_run(vm, guest_tid, observed_at_us - STOPPED_MIN_US, end_us);
        wait_for_pause_event(vm);
        wait_for_resume_event(vm);
        vm.wait_for_event(TIMEOUT, "absent owner", |entry| {
            matches!(entry.kind, EventKind::OwnerAbsent { .. })
        })
        .or_panic_with_logs(vm);
        assert_eq!(vm.host_of(guest_tid).expect("alive"), "h2");
        vm.halt_and_wait().expect("halts");
    });
}

/// With a policy that kills guests, the guest is killed although the master's daemon is stopped.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_are_killed_without_the_master() {
    with_guest("leave_after = 1\nthen = \"kill\"", |vm, guest_tid, pid| {
        let owner_host = vm.testbed().host(2);
        let (master_pid, login) = stop_master_and_log_in(vm);
        wait_until_ended(owner_host, pid);
        kill(master_pid, Signal::SIGCONT).expect("it is there");
        wait_for_guest_end_event(vm, guest_tid);
        login.log_out().expect("logs out");
        wait_until_spawn_succeeds(vm);
        vm.halt_and_wait().expect("halts");
    });
}

/// With a policy that kills guests, the guest is killed. The event log and the output of `why`
/// contain the reason.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_are_killed_and_the_reason_is_reported() {
    with_guest("leave_after = 1\nthen = \"kill\"", |vm, guest_tid, pid| {
        let other = vm.spawn_connected(&["-h1", "busy"]).expect("spawned");
        let owner_host = vm.testbed().host(2);
        let login = SshLogin::log_in(vm.testbed(), "olga", owner_host).expect("a login");
        wait_until_ended(owner_host, pid);
        let reason = wait_for_guest_end_event(vm, guest_tid);
        assert!(reason.contains("olga"), "{reason}");
        let expected_text = format!("guests ended for the owner of h2: {guest_tid}: {reason}");
        for subject in ["h2", guest_tid] {
            // The resource manager is notified after the event is logged, so the query is repeated.
            let check_reported = || match vm.run_pvm(&["why", subject]) {
                Ok(output) if output.stdout.contains(&expected_text) => Ok(()),
                other => Err(format!("{other:?}")),
            };
            wait_for(TIMEOUT, check_reported).or_panic_with_logs(vm);
        }
        // Guests on other hosts continue.
        assert_eq!(vm.host_of(&other).expect("alive"), "h1");
        vm.busy_gaps_us(&other).or_panic_with_logs(vm);
        login.log_out().expect("logs out");
        wait_until_spawn_succeeds(vm);
        vm.halt_and_wait().expect("halts");
    });
}

/// The master's daemon is killed before the owner logs in. The guest is stopped all the same, and
/// the owner has all processors.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_owner_has_all_processors_without_the_master() {
    with_guest("leave_after = \"never\"", |vm, _, pid| {
        let owner_host = vm.testbed().host(2);
        kill(single_pid(vm.testbed().host(1), "pvmd"), Signal::SIGKILL).expect("it is there");
        wait_until_runs(owner_host, pid);
        let login = SshLogin::log_in(vm.testbed(), "olga", owner_host).expect("a login");
        wait_until_stopped(owner_host, pid);
        assert_eq!(
            program_pids(owner_host, "pvmd").len(),
            1,
            "its daemon has not given up the master yet"
        );
        assert!(
            processor_ticks(owner_host, pid).is_some(),
            "it was stopped, not ended"
        );
        drop(login);
        vm.testbed()
            .hosts()
            .iter()
            .for_each(Host::kill_all_processes);
    });
}

/// The load watcher is killed while the owner is present: first with a resource manager, then
/// without. The guests stay stopped.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_stay_stopped_without_load_watcher() {
    with_guest("leave_after = \"never\"", |vm, guest_tid, pid| {
        let owner_host = vm.testbed().host(2);
        let login = SshLogin::log_in(vm.testbed(), "olga", owner_host).expect("a login");
        wait_for_pause_event(vm);
        let begin_us = wait_until_stopped(owner_host, pid);
        let is_present = |status: &serde_json::Value| status["owner"] == "present";
        for round in 0..2 {
            if round == 1 {
                // SIGTERM is a request to exit, so the resource manager is not restarted.
                kill(single_pid(vm.testbed().host(1), "pvm-rm"), Signal::SIGTERM)
                    .expect("it is there");
                vm.wait_for_event(TIMEOUT, "no resource manager", |e| {
                    matches!(e.kind, EventKind::RmGone { .. })
                })
                .expect("seen");
            }
            let killed_watcher = single_pid(owner_host, "pvm-load-watcher");
            kill(killed_watcher, Signal::SIGKILL).expect("it is there");
            wait_for(TIMEOUT, || {
                match program_pids(owner_host, "pvm-load-watcher")[..] {
                    [pid] if pid != killed_watcher => Ok(()),
                    ref other => Err(format!("{other:?}")),
                }
            })
            .or_panic_with_logs(vm);
            wait_for_status(vm, 2, is_present);
        }
        wait_until_stopped(owner_host, pid);
        let end_us = now_us();
        login.log_out().expect("logs out");
        wait_for_resume_event(vm);
        assert_did_not_run(vm, guest_tid, begin_us, end_us);
        vm.halt_and_wait().expect("halts");
    });
}

/// The owner logs out before guests must leave. The guests continue, and none has migrated.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_stay_if_owner_leaves_early() {
    with_guest("leave_after = 600", |vm, guest_tid, pid| {
        let owner_host = vm.testbed().host(2);
        let login = SshLogin::log_in(vm.testbed(), "olga", owner_host).expect("a login");
        wait_for_pause_event(vm);
        let observed_at_us = wait_until_stopped(owner_host, pid);
        let end_us = now_us();
        login.log_out().expect("logs out");
        wait_for_resume_event(vm);
        assert_did_not_run(vm, guest_tid, observed_at_us - STOPPED_MIN_US, end_us);
        vm.wait_for_event(TIMEOUT, "absent owner", |entry| {
            matches!(entry.kind, EventKind::OwnerAbsent { .. })
        })
        .expect("seen");
        assert_eq!(vm.host_of(guest_tid).expect("alive"), "h2");
        let is_migration_text =
            |text: &str| text.contains(" migrated from ") || text.contains(" ordered because ");
        let events = vm.events().expect("events");
        let migration_events: Vec<_> = events
            .iter()
            .filter(|entry| is_migration_text(&entry.text))
            .collect();
        assert!(migration_events.is_empty(), "{migration_events:?}");
        vm.halt_and_wait().expect("halts");
    });
}
