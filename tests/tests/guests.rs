//! Guests are stopped by directives of an owner agent. The tests use real processes and check the
//! guests' own records of when they ran.

use sempa_proto::event::EventKind;
use sempa_tests::owner_agent::OwnerAgent;
use sempa_tests::requirements::testbed;
use sempa_tests::run::run_ok;
use sempa_tests::testbed::Host;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Path of the program that acts as an owner agent.
const OWNER_AGENT_PROGRAM: &str = env!("CARGO_BIN_EXE_owner-speaks");
/// Number of times the guests are stopped.
const STOP_COUNT: usize = 5;
/// Minimum duration in microseconds for which guests are stopped. It is longer than the gaps that
/// running guests record.
const STOPPED_MIN_US: u64 = 300_000;

fn now_us() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    u64::try_from(since.as_micros()).expect("fits")
}

/// Returns the times in which a guest did not run, by its own clock, as (begin, end) in
/// microseconds since 1970.
fn gaps(vm: &Vm, tid: &str) -> Vec<(u64, u64)> {
    vm.busy_gaps(tid).or_panic_with_logs(vm)
}

/// Returns the processor time that a process has used, in ticks.
fn used_ticks(host: &Host, pid: i32) -> u64 {
    let mut command = host.command("cat");
    command.arg(format!("/proc/{pid}/stat"));
    let stat = run_ok(command, TIMEOUT).expect("it is there").out;
    let fields: Vec<&str> = stat[stat.rfind(')').expect("a name") + 1..]
        .split_whitespace()
        .collect();
    fields[11].parse::<u64>().expect("a number") + fields[12].parse::<u64>().expect("a number")
}

fn stopped_tids(vm: &Vm, tids: &[String]) -> Vec<String> {
    let tasks = vm.tasks().or_panic_with_logs(vm);
    tasks
        .into_iter()
        .filter(|t| t.stopped && tids.contains(&t.tid))
        .map(|t| t.tid)
        .collect()
}

/// Returns the number of events so far that report that all guests of a host are stopped.
fn stop_event_count(vm: &Vm) -> usize {
    let events = vm.events().expect("events");
    events
        .iter()
        .filter(|entry| matches!(entry.kind, EventKind::GuestsPaused { .. }))
        .count()
}

fn with_guests(count: usize, test: impl FnOnce(&Vm, &[String])) {
    let bed = testbed(3);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2", "h3"]).expect("the others join");
    vm.compile_program("busy").expect("gcc");
    let guests: Vec<String> = (0..count)
        .map(|_| vm.spawn(&["-h2", "busy"]).expect("spawned"))
        .collect();
    test(&vm, &guests);
    vm.halt().expect("halts");
}

/// Guests that occupy all processors stop, and continue when the owner permits guests again.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn stopped_guests_do_not_run_by_their_clocks() {
    with_guests(4, |vm, guests| {
        let mut owner = OwnerAgent::new(vm, vm.bed().host(2), OWNER_AGENT_PROGRAM);
        let mut words = Vec::new();
        for round in 0..STOP_COUNT {
            let said = owner.direct(&format!("stop round {round}"));
            wait_for(TIMEOUT, || {
                if stop_event_count(vm) > round {
                    Ok(())
                } else {
                    Err("guests run".to_string())
                }
            })
            .or_panic_with_logs(vm);
            assert_eq!(stopped_tids(vm, guests).len(), guests.len());
            wait_for(TIMEOUT, || {
                if now_us() > said + STOPPED_MIN_US {
                    Ok(())
                } else {
                    Err("she stays".to_string())
                }
            })
            .expect("time passes");
            words.push((said, owner.direct("welcome nobody is there")));
        }
        let mut waits = Vec::new();
        for tid in guests {
            let gaps = gaps(vm, tid);
            for (said, welcome) in &words {
                // The guest did not run from some time until guests were permitted again.
                let last = gaps
                    .iter()
                    .find(|(from, to)| from < welcome && to >= welcome);
                let (from, _) = last
                    .unwrap_or_else(|| panic!("{tid} ran between {said} and {welcome}: {gaps:?}"));
                waits.push(from.saturating_sub(*said));
            }
        }
        waits.sort_unstable();
        let (median, worst) = (waits[waits.len() / 2], waits[waits.len() - 1]);
        eprintln!(
            "word to standing still, by the guests' clocks: median {median} us, worst {worst} us"
        );
        let events = vm.events().expect("events");
        let took = events.iter().filter_map(|entry| match &entry.kind {
            EventKind::GuestsPaused { duration: took, .. } => Some(took.0),
            _ => None,
        });
        let mut took: Vec<u64> = took.collect();
        took.sort_unstable();
        eprintln!(
            "word to all seen stopped, by the daemon: median {} us, all {took:?}",
            took[took.len() / 2]
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_are_stopped_by_signals_without_freezer() {
    let bed = testbed(1);
    let env = vec![("SEMPA_FREEZER".into(), "off".into())];
    let vm = Vm::start(
        &bed,
        Settings {
            env,
            ..Settings::default()
        },
    )
    .expect("a virtual machine");
    vm.compile_program("busy").expect("gcc");
    let guests: Vec<String> = (0..2)
        .map(|_| vm.spawn(&["-h1", "busy"]).expect("spawned"))
        .collect();
    let mut owner = OwnerAgent::new(&vm, vm.bed().host(1), OWNER_AGENT_PROGRAM);
    let said = owner.direct("stop olga is there");
    wait_for(TIMEOUT, || {
        if stop_event_count(&vm) > 0 {
            Ok(())
        } else {
            Err("guests run".to_string())
        }
    })
    .or_panic_with_logs(&vm);
    wait_for(TIMEOUT, || {
        if now_us() > said + STOPPED_MIN_US {
            Ok(())
        } else {
            Err("she stays".to_string())
        }
    })
    .expect("time passes");
    let welcome = owner.direct("welcome olga has left");
    for tid in &guests {
        let gaps = gaps(&vm, tid);
        assert!(
            gaps.iter()
                .any(|(from, to)| *from < welcome && *to >= welcome),
            "{tid} ran meanwhile: {gaps:?}"
        );
    }
    let logs = vm.logs();
    assert!(
        logs.contains("guests are stopped by signals, not by a freezer: SEMPA_FREEZER=off"),
        "{logs}"
    );
    vm.halt().expect("halts");
}

/// Stopped guests get no processor time. They migrate, and continue at the target.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn stopped_guests_move_without_running() {
    with_guests(3, |vm, guests| {
        let mut owner = OwnerAgent::new(vm, vm.bed().host(2), OWNER_AGENT_PROGRAM);
        owner.direct("stop olga is there");
        wait_for(TIMEOUT, || {
            if stop_event_count(vm) > 0 {
                Ok(())
            } else {
                Err("guests run".to_string())
            }
        })
        .expect("they stop");
        let stand = now_us();
        let pids: Vec<i32> = vm
            .tasks()
            .expect("tasks")
            .iter()
            .filter(|t| guests.contains(&t.tid))
            .map(|t| t.pid)
            .collect();
        let before: Vec<u64> = pids
            .iter()
            .map(|pid| used_ticks(vm.bed().host(2), *pid))
            .collect();
        let spawn = vm
            .pvm(&["spawn", "-h2", "busy"])
            .expect("the console works");
        assert!(!spawn.succeeded(), "no guest is started there: {spawn:?}");
        let moved: Vec<(u64, u64)> = guests[..2]
            .iter()
            .map(|tid| {
                let began = now_us();
                vm.must_migrate(tid, "h3");
                assert_eq!(vm.host_of(tid).expect("alive"), "h3");
                (began, now_us())
            })
            .collect();
        let back = vm.migrate(&guests[0], "h2").expect("the console works");
        assert!(
            !back.succeeded() && back.err.contains("olga is there"),
            "{back:?}"
        );
        let here = used_ticks(vm.bed().host(2), pids[2]);
        assert_eq!(here, before[2], "it does not run");
        for (tid, (began, ended)) in guests[..2].iter().zip(moved) {
            let gaps = gaps(vm, tid);
            // One gap begins before all guests were stopped and ends during the migration.
            let over = |(from, to): &(u64, u64)| *from <= stand && *to >= began && *to <= ended;
            assert!(
                gaps.iter().any(over),
                "{tid}: {gaps:?}; all stood at {stand}, it moved from {began} to {ended}"
            );
        }
        owner.direct("welcome olga has left");
        for tid in guests {
            gaps(vm, tid);
        }
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_continue_when_the_owners_agent_dies() {
    with_guests(2, |vm, guests| {
        let mut owner = OwnerAgent::new(vm, vm.bed().host(2), OWNER_AGENT_PROGRAM);
        owner.direct("stop olga is there");
        wait_for(TIMEOUT, || {
            if stop_event_count(vm) > 0 {
                Ok(())
            } else {
                Err("guests run".to_string())
            }
        })
        .expect("they stop");
        owner.kill();
        vm.wait_for_event(TIMEOUT, "continued guests", |entry| {
            matches!(entry.kind, EventKind::GuestsResumed { .. })
        })
        .or_panic_with_logs(vm);
        for tid in guests {
            gaps(vm, tid);
        }
        assert!(stopped_tids(vm, guests).is_empty());
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn overdue_guests_are_ended_if_the_owner_wants_it() {
    with_guests(2, |vm, guests| {
        let mut owner = OwnerAgent::new(vm, vm.bed().host(2), OWNER_AGENT_PROGRAM);
        owner.direct("kill 1500 olga wants her machine");
        vm.wait_for_event(TIMEOUT, "guests that are ended", |entry| {
            matches!(entry.kind, EventKind::GuestsEnded { .. })
        })
        .expect("told");
        wait_for(TIMEOUT, || {
            let left = vm.tasks().map_err(|error| format!("{error:#}"))?;
            let left: Vec<_> = left
                .into_iter()
                .filter(|t| guests.contains(&t.tid))
                .collect();
            if left.is_empty() {
                Ok(())
            } else {
                Err(format!("{left:?}"))
            }
        })
        .expect("they end");
        owner.direct("welcome olga has left");
        vm.spawn(&["-h2", "busy"]).expect("the host is used again");
    });
}
