//! The owner comes first although the master's daemon, the resource manager or the load watcher is
//! dead. Judged by the guests' own clocks.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sempa_proto::Tid;
use sempa_proto::event::EventKind;
use sempa_tests::needs::testbed_with_env;
use sempa_tests::run::must;
use sempa_tests::speaker::owner;
use sempa_tests::ssh::Login;
use sempa_tests::testbed::Host;
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Vm, eventually};
use std::fs;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const TIMEOUT: Duration = Duration::from_secs(60);
/// The lease: a daemon is stopped for a while, and no host may be lost.
const LEASE: (&str, &str) = ("SEMPA_LEASE_MS", "120000");
/// Microseconds without processor time after which a guest counts as stopped: more than the gaps
/// that it notes while it runs.
const STILL: u64 = 1_000_000;

fn now() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    u64::try_from(since.as_micros()).expect("fits")
}

/// Returns the processes of a host that run this program.
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

fn only(host: &Host, program: &str) -> Pid {
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

/// Returns the processor time of a guest in ticks; `None` if it has ended.
fn used(host: &Host, pid: i32) -> Option<u64> {
    let mut command = host.command("cat");
    command.arg(format!("/proc/{pid}/stat"));
    let stat = must(command, TIMEOUT).ok()?.out;
    let fields: Vec<&str> = stat[stat.rfind(')')? + 1..].split_whitespace().collect();
    Some(fields[11].parse::<u64>().ok()? + fields[12].parse::<u64>().ok()?)
}

/// Waits until a guest that computes has had no processor time for [`STILL`]. Returns the time when
/// that was observed.
fn stands_still(host: &Host, pid: i32) -> u64 {
    let mut since = (used(host, pid), now());
    let look = || {
        let (ticks, at) = (used(host, pid), now());
        if ticks != since.0 {
            since = (ticks, at);
        }
        if at - since.1 >= STILL {
            Ok(at)
        } else {
            Err(format!("it runs: {ticks:?} ticks"))
        }
    };
    eventually(TIMEOUT, look).expect("it is paused")
}

/// Runs a test on a virtual machine with a resource manager and load watchers, and a guest that
/// computes on h2, with its process there.
fn with_guest(policy: &str, test: impl FnOnce(&Vm, &str, i32)) {
    let bed = testbed_with_env(2, &[LEASE]);
    let (rm, env) = (
        Some("pvm-rm --policy load".to_string()),
        vec![(LEASE.0.into(), LEASE.1.into())],
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
    (1..=2).for_each(|host| watched(&vm, host, |_| true));
    vm.program("busy").expect("gcc");
    let guest = vm.spawn(&["-h2", "busy"]).expect("spawned");
    let tasks = vm.tasks().expect("tasks");
    let pid = tasks
        .iter()
        .find(|task| task.tid == guest)
        .expect("it is there")
        .pid;
    test(&vm, &guest, pid);
}

/// Waits until the load watcher of a host has a status like this.
fn watched(vm: &Vm, host: usize, is_so: impl Fn(&serde_json::Value) -> bool) {
    let look = || {
        let value = owner(vm.bed(), host, &["status"]);
        let one = value["virtual_machines"]
            .as_array()
            .and_then(|all| all.first().cloned());
        if one.as_ref().is_some_and(&is_so) {
            Ok(())
        } else {
            Err(value.to_string())
        }
    };
    eventually(TIMEOUT, look).sure(vm);
}

/// Waits until a guest has had more processor time.
fn runs_on(host: &Host, pid: i32) {
    let before = used(host, pid).expect("it is there");
    let look = || match used(host, pid) {
        Some(ticks) if ticks > before => Ok(()),
        other => Err(format!("{other:?} ticks as before")),
    };
    eventually(TIMEOUT, look).expect("it runs on");
}

/// Waits until a host has no process of a guest.
fn is_ended(host: &Host, pid: i32) {
    let look = || match (used(host, pid), processes(host, "busy")) {
        (None, left) if left.is_empty() => Ok(()),
        other => Err(format!("{other:?}")),
    };
    eventually(TIMEOUT, look).expect("it is ended");
}

/// Checks in the event log that this guest, and no other, was ended for the owner of h2. Returns
/// the owner's reason.
fn told_as_ended(vm: &Vm, guest: &str) -> String {
    let is_it = |tid: &Tid| tid.to_string() == guest;
    let ended = vm.event(TIMEOUT, "guests that are ended", |entry| {
        matches!(entry.kind, EventKind::GuestsEnded { .. })
    });
    let ended = ended.sure(vm);
    let EventKind::GuestsEnded { guests, why, .. } = ended.kind else {
        unreachable!()
    };
    assert!(
        guests.len() == 1 && is_it(&guests[0]) && ended.host.as_deref() == Some("h2"),
        "{guests:?}"
    );
    let over = |kind: &EventKind| matches!(kind, EventKind::TaskEnded { tid, .. } if is_it(tid));
    vm.event(TIMEOUT, "its end", |entry| over(&entry.kind))
        .sure(vm);
    let tasks = vm.tasks().sure(vm);
    assert!(tasks.iter().all(|task| task.tid != guest), "{tasks:?}");
    why
}

/// Waits until guests are started on h2 again.
fn is_used_again(vm: &Vm) {
    let spawn = || {
        vm.spawn(&["-h2", "busy"])
            .map_err(|error| format!("{error:#}"))
    };
    eventually(TIMEOUT, spawn).sure(vm);
}

fn stopped(vm: &Vm) {
    vm.event(TIMEOUT, "paused guests", |entry| {
        matches!(entry.kind, EventKind::GuestsPaused { .. })
    })
    .sure(vm);
}

fn continued(vm: &Vm) {
    vm.event(TIMEOUT, "guests that go on", |entry| {
        matches!(entry.kind, EventKind::GuestsResumed { .. })
    })
    .sure(vm);
}

/// Stops the master's daemon, and then logs the owner of h2 in.
fn logs_in_while_the_master_stands_still(vm: &Vm) -> (Pid, Login) {
    let master = only(vm.bed().host(1), "pvmd");
    kill(master, Signal::SIGSTOP).expect("it is there");
    (
        master,
        Login::new(vm.bed(), "olga", vm.bed().host(2)).expect("a login"),
    )
}

/// Checks that the guest did not run between these times, by its own clock.
fn assert_still(vm: &Vm, guest: &str, from: u64, to: u64) {
    let gaps = vm.gaps(guest).sure(vm);
    assert!(
        gaps.iter().any(|gap| gap.0 <= from && gap.1 >= to),
        "{guest} ran between {from} and {to}: {gaps:?}"
    );
}

/// The master's daemon is stopped when the owner logs in.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_owner_stops_guests_without_the_master() {
    with_guest("leave_after = \"never\"", |vm, guest, pid| {
        let theirs = vm.bed().host(2);
        let (master, login) = logs_in_while_the_master_stands_still(vm);
        let still = stands_still(theirs, pid);
        let resumed = now();
        kill(master, Signal::SIGCONT).expect("it is there");
        login.out().expect("logs out");
        // Only its own host can have stopped it before.
        assert_still(vm, guest, still - STILL, resumed);
        assert_eq!(vm.host_of(guest).expect("alive"), "h2");
        vm.halt().expect("halts");
    });
}

/// The owner leaves while the master's daemon is stopped.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_continue_without_the_master() {
    with_guest("leave_after = 600", |vm, guest, pid| {
        let theirs = vm.bed().host(2);
        let (master, login) = logs_in_while_the_master_stands_still(vm);
        let still = stands_still(theirs, pid);
        let end = now();
        login.out().expect("logs out");
        runs_on(theirs, pid);
        kill(master, Signal::SIGCONT).expect("it is there");
        assert_still(vm, guest, still - STILL, end);
        stopped(vm);
        continued(vm);
        vm.event(TIMEOUT, "absent owner", |entry| {
            matches!(entry.kind, EventKind::OwnerAbsent { .. })
        })
        .sure(vm);
        assert_eq!(vm.host_of(guest).expect("alive"), "h2");
        vm.halt().expect("halts");
    });
}

/// The owner's policy is to kill guests, and the master's daemon is stopped.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_are_killed_without_the_master() {
    with_guest("leave_after = 1\nthen = \"kill\"", |vm, guest, pid| {
        let theirs = vm.bed().host(2);
        let (master, login) = logs_in_while_the_master_stands_still(vm);
        is_ended(theirs, pid);
        kill(master, Signal::SIGCONT).expect("it is there");
        told_as_ended(vm, guest);
        login.out().expect("logs out");
        is_used_again(vm);
        vm.halt().expect("halts");
    });
}

/// The owner's policy is to kill guests.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_are_killed_and_the_reason_is_told() {
    with_guest("leave_after = 1\nthen = \"kill\"", |vm, guest, pid| {
        let other = vm.spawn(&["-h1", "busy"]).expect("spawned");
        let theirs = vm.bed().host(2);
        let login = Login::new(vm.bed(), "olga", theirs).expect("a login");
        is_ended(theirs, pid);
        let said = told_as_ended(vm, guest);
        assert!(said.contains("olga"), "{said}");
        let words = format!("guests ended for the owner of h2: {guest}: {said}");
        for subject in ["h2", guest] {
            // The resource manager is notified a moment later.
            let told = || match vm.pvm(&["why", subject]) {
                Ok(done) if done.out.contains(&words) => Ok(()),
                other => Err(format!("{other:?}")),
            };
            eventually(TIMEOUT, told).sure(vm);
        }
        // Guests of other hosts are not affected.
        assert_eq!(vm.host_of(&other).expect("alive"), "h1");
        vm.gaps(&other).sure(vm);
        login.out().expect("logs out");
        is_used_again(vm);
        vm.halt().expect("halts");
    });
}

/// The master's daemon was killed before the owner logs in.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_owner_has_all_processors_without_the_master() {
    with_guest("leave_after = \"never\"", |vm, _, pid| {
        let theirs = vm.bed().host(2);
        kill(only(vm.bed().host(1), "pvmd"), Signal::SIGKILL).expect("it is there");
        runs_on(theirs, pid);
        let login = Login::new(vm.bed(), "olga", theirs).expect("a login");
        stands_still(theirs, pid);
        assert_eq!(
            processes(theirs, "pvmd").len(),
            1,
            "its daemon has not given up the master yet"
        );
        assert!(used(theirs, pid).is_some(), "it was stopped, not ended");
        drop(login);
        vm.bed().hosts().iter().for_each(Host::kill_all);
    });
}

/// The load watcher is killed while the owner is present, with a resource manager and without. The
/// guests stay stopped.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_stay_stopped_without_load_watcher() {
    with_guest("leave_after = \"never\"", |vm, guest, pid| {
        let theirs = vm.bed().host(2);
        let login = Login::new(vm.bed(), "olga", theirs).expect("a login");
        stopped(vm);
        let begin = stands_still(theirs, pid);
        let present = |status: &serde_json::Value| status["owner"] == "present";
        for round in 0..2 {
            if round == 1 {
                // SIGTERM is a request to end, so it is not restarted.
                kill(only(vm.bed().host(1), "pvm-rm"), Signal::SIGTERM).expect("it is there");
                vm.event(TIMEOUT, "no resource manager", |e| {
                    matches!(e.kind, EventKind::RmGone { .. })
                })
                .expect("seen");
            }
            let dead = only(theirs, "pvm-load-watcher");
            kill(dead, Signal::SIGKILL).expect("it is there");
            eventually(
                TIMEOUT,
                || match processes(theirs, "pvm-load-watcher")[..] {
                    [pid] if pid != dead => Ok(()),
                    ref other => Err(format!("{other:?}")),
                },
            )
            .sure(vm);
            watched(vm, 2, present);
        }
        stands_still(theirs, pid);
        let end = now();
        login.out().expect("logs out");
        continued(vm);
        assert_still(vm, guest, begin, end);
        vm.halt().expect("halts");
    });
}

/// The owner leaves before the guests' time is over: they continue, and none has migrated.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_stay_if_the_owner_leaves_soon() {
    with_guest("leave_after = 600", |vm, guest, pid| {
        let theirs = vm.bed().host(2);
        let login = Login::new(vm.bed(), "olga", theirs).expect("a login");
        stopped(vm);
        let still = stands_still(theirs, pid);
        let end = now();
        login.out().expect("logs out");
        continued(vm);
        assert_still(vm, guest, still - STILL, end);
        vm.event(TIMEOUT, "absent owner", |entry| {
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
