//! Guests yield to the owner even if the master's daemon, the resource manager or the load watcher
//! is dead or stopped. The guests' own records of when they ran prove it.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::Tid;
use sempa_proto::event::EventKind;
use sempa_tests::owner_agent::run_owner_command;
use sempa_tests::requirements::testbed_with_env;
use sempa_tests::run::run_ok;
use sempa_tests::ssh::Login;
use sempa_tests::testbed::Host;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Environment variable and value that set a lease of 120 s. A daemon is stopped for some time in
/// these tests, and no host may be lost.
const LONG_LEASE: (&str, &str) = ("SEMPA_LEASE_MS", "120000");
/// A guest that has used no processor time for this number of microseconds counts as stopped. It is
/// longer than the gaps that a running guest records.
const STOPPED_MIN_US: u64 = 1_000_000;

fn now_us() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    u64::try_from(since.as_micros()).expect("fits")
}

/// Returns the processes of a host that run the program `program`.
fn processes(host: &Host, program: &str) -> Vec<Pid> {
    let name = |line: &str| {
        line.split(' ')
            .next()
            .and_then(|path| path.rsplit('/').next())
            == Some(program)
    };
    let found = host.processes().into_iter().filter(|(_, line)| name(line));
    found
        .map(|(pid, _)| Pid::from_raw(pid.cast_signed()))
        .collect()
}

fn only_process(host: &Host, program: &str) -> Pid {
    let found = processes(host, program);
    assert_eq!(
        found.len(),
        1,
        "{program} on {}: {:?}",
        host.name(),
        host.processes()
    );
    found[0]
}

/// Returns the processor time that a guest has used, in ticks; `None` if the guest has ended.
fn used_ticks(host: &Host, pid: i32) -> Option<u64> {
    let mut command = host.command("cat");
    command.arg(format!("/proc/{pid}/stat"));
    let stat = run_ok(command, TIMEOUT).ok()?.out;
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
    Some(fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?)
}

/// Waits until a guest that computes has used no processor time for [`STOPPED_MIN_US`]. Returns the
/// time of this observation.
fn wait_until_stopped(host: &Host, pid: i32) -> u64 {
    let mut since = (used_ticks(host, pid), now_us());
    let look = || {
        let (ticks, at) = (used_ticks(host, pid), now_us());
        if ticks != since.0 {
            since = (ticks, at);
        }
        if at - since.1 >= STOPPED_MIN_US {
            Ok(at)
        } else {
            Err(format!("it runs: {ticks:?} ticks"))
        }
    };
    wait_for(TIMEOUT, look).expect("it is paused")
}

/// Runs `test` on a virtual machine with a resource manager and load watchers. `policy` is the
/// owner's policy. The arguments of `test` are the virtual machine, the tid of a guest that
/// computes on h2, and the guest's process number.
fn with_guest(policy: &str, test: impl FnOnce(&Vm, &str, i32)) {
    let bed = testbed_with_env(2, &[LONG_LEASE]);
    let (rm, env) = (
        Some("pvm-rm --policy load".to_string()),
        vec![(LONG_LEASE.0.into(), LONG_LEASE.1.into())],
    );
    let vm = Vm::start(
        &bed,
        Settings {
            rm,
            env,
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    let file = vm.home().join(".config/sempa/owner.toml");
    fs::create_dir_all(file.parent().expect("a folder")).expect("the testbed's own home");
    fs::write(&file, policy).expect("the testbed's own home");
    vm.add(&["h2"]).expect("it joins");
    (1..=2).for_each(|host| wait_for_status(&vm, host, |_| true));
    vm.compile_program("busy").expect("gcc");
    let guest = vm.spawn(&["-h2", "busy"]).expect("spawned");
    let tasks = vm.tasks().expect("tasks");
    let pid = tasks
        .iter()
        .find(|task| task.tid == guest)
        .expect("it is there")
        .pid;
    test(&vm, &guest, pid);
}

/// Waits until the status of a host's load watcher matches `is_so`.
fn wait_for_status(vm: &Vm, host: usize, is_so: impl Fn(&serde_json::Value) -> bool) {
    let look = || {
        let value = run_owner_command(vm.bed(), host, &["status"]);
        let one = value["virtual_machines"]
            .as_array()
            .and_then(|all| all.first().cloned());
        if one.as_ref().is_some_and(&is_so) {
            Ok(())
        } else {
            Err(value.to_string())
        }
    };
    wait_for(TIMEOUT, look).or_panic_with_logs(vm);
}

/// Waits until a guest has used more processor time.
fn wait_until_runs(host: &Host, pid: i32) {
    let before = used_ticks(host, pid).expect("it is there");
    let look = || match used_ticks(host, pid) {
        Some(ticks) if ticks > before => Ok(()),
        other => Err(format!("{other:?} ticks as before")),
    };
    wait_for(TIMEOUT, look).expect("it runs on");
}

/// Waits until a host has no process of the guest.
fn wait_until_ended(host: &Host, pid: i32) {
    let look = || match (used_ticks(host, pid), processes(host, "busy")) {
        (None, left) if left.is_empty() => Ok(()),
        other => Err(format!("{other:?}")),
    };
    wait_for(TIMEOUT, look).expect("it is ended");
}

/// Checks that the event log reports the end of this guest, and of no other task, for the owner of
/// h2. Returns the owner's reason.
fn check_end_is_logged(vm: &Vm, guest: &str) -> String {
    let is_it = |tid: &Tid| tid.to_string() == guest;
    let ended = vm.wait_for_event(TIMEOUT, "guests that are ended", |entry| {
        matches!(entry.kind, EventKind::GuestsEnded { .. })
    });
    let ended = ended.or_panic_with_logs(vm);
    let EventKind::GuestsEnded { guests, why, .. } = ended.kind else {
        unreachable!()
    };
    assert!(
        guests.len() == 1 && is_it(&guests[0]) && ended.host.as_deref() == Some("h2"),
        "{guests:?}"
    );
    let over = |kind: &EventKind| matches!(kind, EventKind::TaskEnded { tid, .. } if is_it(tid));
    vm.wait_for_event(TIMEOUT, "its end", |entry| over(&entry.kind))
        .or_panic_with_logs(vm);
    let tasks = vm.tasks().or_panic_with_logs(vm);
    assert!(tasks.iter().all(|task| task.tid != guest), "{tasks:?}");
    why
}

/// Waits until a task can be spawned on h2 again.
fn wait_until_host_is_used(vm: &Vm) {
    let spawn = || {
        vm.spawn(&["-h2", "busy"])
            .map_err(|error| format!("{error:#}"))
    };
    wait_for(TIMEOUT, spawn).or_panic_with_logs(vm);
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
fn stop_master_and_log_in(vm: &Vm) -> (Pid, Login) {
    let master = only_process(vm.bed().host(1), "pvmd");
    kill(master, Signal::SIGSTOP).expect("it is there");
    (
        master,
        Login::new(vm.bed(), "olga", vm.bed().host(2)).expect("a login"),
    )
}

/// Checks that a guest did not run between two times, by the guest's own clock.
fn assert_not_run(vm: &Vm, guest: &str, from: u64, to: u64) {
    let gaps = vm.busy_gaps(guest).or_panic_with_logs(vm);
    assert!(
        gaps.iter().any(|gap| gap.0 <= from && gap.1 >= to),
        "{guest} ran between {from} and {to}: {gaps:?}"
    );
}

/// The guest is stopped although the master's daemon is stopped when the owner logs in.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_owner_stops_guests_without_the_master() {
    with_guest("leave_after = \"never\"", |vm, guest, pid| {
        let theirs = vm.bed().host(2);
        let (master, login) = stop_master_and_log_in(vm);
        let still = wait_until_stopped(theirs, pid);
        let resumed = now_us();
        kill(master, Signal::SIGCONT).expect("it is there");
        login.log_out().expect("logs out");
        // Only the guest's own host can have stopped it before the master's daemon was resumed.
        assert_not_run(vm, guest, still - STOPPED_MIN_US, resumed);
        assert_eq!(vm.host_of(guest).expect("alive"), "h2");
        vm.halt().expect("halts");
    });
}

/// The guest continues although the master's daemon is stopped when the owner logs out.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_continue_without_the_master() {
    with_guest("leave_after = 600", |vm, guest, pid| {
        let theirs = vm.bed().host(2);
        let (master, login) = stop_master_and_log_in(vm);
        let still = wait_until_stopped(theirs, pid);
        let end = now_us();
        login.log_out().expect("logs out");
        wait_until_runs(theirs, pid);
        kill(master, Signal::SIGCONT).expect("it is there");
        assert_not_run(vm, guest, still - STOPPED_MIN_US, end);
        wait_for_pause_event(vm);
        wait_for_resume_event(vm);
        vm.wait_for_event(TIMEOUT, "absent owner", |entry| {
            matches!(entry.kind, EventKind::OwnerAbsent { .. })
        })
        .or_panic_with_logs(vm);
        assert_eq!(vm.host_of(guest).expect("alive"), "h2");
        vm.halt().expect("halts");
    });
}

/// With a policy that kills guests, the guest is killed although the master's daemon is stopped.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_are_killed_without_the_master() {
    with_guest("leave_after = 1\nthen = \"kill\"", |vm, guest, pid| {
        let theirs = vm.bed().host(2);
        let (master, login) = stop_master_and_log_in(vm);
        wait_until_ended(theirs, pid);
        kill(master, Signal::SIGCONT).expect("it is there");
        check_end_is_logged(vm, guest);
        login.log_out().expect("logs out");
        wait_until_host_is_used(vm);
        vm.halt().expect("halts");
    });
}

/// With a policy that kills guests, the guest is killed, and the event log and `why` have the
/// reason.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_are_killed_and_the_reason_is_reported() {
    with_guest("leave_after = 1\nthen = \"kill\"", |vm, guest, pid| {
        let other = vm.spawn(&["-h1", "busy"]).expect("spawned");
        let theirs = vm.bed().host(2);
        let login = Login::new(vm.bed(), "olga", theirs).expect("a login");
        wait_until_ended(theirs, pid);
        let said = check_end_is_logged(vm, guest);
        assert!(said.contains("olga"), "{said}");
        let words = format!("guests ended for the owner of h2: {guest}: {said}");
        for subject in ["h2", guest] {
            // The resource manager is notified after the event is logged.
            let told = || match vm.pvm(&["why", subject]) {
                Ok(done) if done.out.contains(&words) => Ok(()),
                other => Err(format!("{other:?}")),
            };
            wait_for(TIMEOUT, told).or_panic_with_logs(vm);
        }
        // Guests on other hosts continue.
        assert_eq!(vm.host_of(&other).expect("alive"), "h1");
        vm.busy_gaps(&other).or_panic_with_logs(vm);
        login.log_out().expect("logs out");
        wait_until_host_is_used(vm);
        vm.halt().expect("halts");
    });
}

/// The guest is stopped although the master's daemon is killed before the owner logs in, so the
/// owner has all processors.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_owner_has_all_processors_without_the_master() {
    with_guest("leave_after = \"never\"", |vm, _, pid| {
        let theirs = vm.bed().host(2);
        kill(only_process(vm.bed().host(1), "pvmd"), Signal::SIGKILL).expect("it is there");
        wait_until_runs(theirs, pid);
        let login = Login::new(vm.bed(), "olga", theirs).expect("a login");
        wait_until_stopped(theirs, pid);
        assert_eq!(
            processes(theirs, "pvmd").len(),
            1,
            "its daemon has not given up the master yet"
        );
        assert!(
            used_ticks(theirs, pid).is_some(),
            "it was stopped, not ended"
        );
        drop(login);
        vm.bed().hosts().iter().for_each(Host::kill_all);
    });
}

/// The load watcher is killed while the owner is present: first with a resource manager, then
/// without. The guests stay stopped.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_stay_stopped_without_load_watcher() {
    with_guest("leave_after = \"never\"", |vm, guest, pid| {
        let theirs = vm.bed().host(2);
        let login = Login::new(vm.bed(), "olga", theirs).expect("a login");
        wait_for_pause_event(vm);
        let begin = wait_until_stopped(theirs, pid);
        let present = |status: &serde_json::Value| status["owner"] == "present";
        for round in 0..2 {
            if round == 1 {
                // SIGTERM is a request to exit, so the resource manager is not restarted.
                kill(only_process(vm.bed().host(1), "pvm-rm"), Signal::SIGTERM)
                    .expect("it is there");
                vm.wait_for_event(TIMEOUT, "no resource manager", |e| {
                    matches!(e.kind, EventKind::RmGone { .. })
                })
                .expect("seen");
            }
            let dead = only_process(theirs, "pvm-load-watcher");
            kill(dead, Signal::SIGKILL).expect("it is there");
            wait_for(
                TIMEOUT,
                || match processes(theirs, "pvm-load-watcher")[..] {
                    [pid] if pid != dead => Ok(()),
                    ref other => Err(format!("{other:?}")),
                },
            )
            .or_panic_with_logs(vm);
            wait_for_status(vm, 2, present);
        }
        wait_until_stopped(theirs, pid);
        let end = now_us();
        login.log_out().expect("logs out");
        wait_for_resume_event(vm);
        assert_not_run(vm, guest, begin, end);
        vm.halt().expect("halts");
    });
}

/// The owner logs out before guests must leave. The guests continue, and none has migrated.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_stay_if_owner_leaves_early() {
    with_guest("leave_after = 600", |vm, guest, pid| {
        let theirs = vm.bed().host(2);
        let login = Login::new(vm.bed(), "olga", theirs).expect("a login");
        wait_for_pause_event(vm);
        let still = wait_until_stopped(theirs, pid);
        let end = now_us();
        login.log_out().expect("logs out");
        wait_for_resume_event(vm);
        assert_not_run(vm, guest, still - STOPPED_MIN_US, end);
        vm.wait_for_event(TIMEOUT, "absent owner", |entry| {
            matches!(entry.kind, EventKind::OwnerAbsent { .. })
        })
        .expect("seen");
        assert_eq!(vm.host_of(guest).expect("alive"), "h2");
        let moved =
            |text: &str| text.contains(" migrated from ") || text.contains(" ordered because ");
        let events = vm.events().expect("events");
        let moves: Vec<_> = events.iter().filter(|entry| moved(&entry.text)).collect();
        assert!(moves.is_empty(), "{moves:?}");
        vm.halt().expect("halts");
    });
}
