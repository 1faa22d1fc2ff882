//! Guests are stopped by directives of the owner: real processes, judged by the guests' own clocks.

use sempa_proto::event::EventKind;
use sempa_tests::needs::testbed;
use sempa_tests::run::must;
use sempa_tests::speaker::Speaker;
use sempa_tests::testbed::Host;
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Vm, eventually};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const TIMEOUT: Duration = Duration::from_secs(60);
/// The program that directs guests on behalf of owners.
const SPEAKS: &str = env!("CARGO_BIN_EXE_owner-speaks");
/// How often the guests are stopped.
const ROUNDS: usize = 5;
/// Microseconds that an owner stays at least: more than the gaps that guests note while they run.
const STAY: u64 = 300_000;

fn now() -> u64 {
    let since = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    u64::try_from(since.as_micros()).expect("fits")
}

/// Returns the gaps in a guest's own time.
fn gaps(vm: &Vm, tid: &str) -> Vec<(u64, u64)> {
    vm.gaps(tid).sure(vm)
}

/// Returns the processor time of a process in ticks.
fn used(host: &Host, pid: i32) -> u64 {
    let mut command = host.command("cat");
    command.arg(format!("/proc/{pid}/stat"));
    let stat = must(command, TIMEOUT).expect("it is there").out;
    let fields: Vec<&str> = stat[stat.rfind(')').expect("a name") + 1..]
        .split_whitespace()
        .collect();
    fields[11].parse::<u64>().expect("a number") + fields[12].parse::<u64>().expect("a number")
}

fn stopped(vm: &Vm, tids: &[String]) -> Vec<String> {
    let tasks = vm.tasks().sure(vm);
    tasks
        .into_iter()
        .filter(|t| t.stopped && tids.contains(&t.tid))
        .map(|t| t.tid)
        .collect()
}

/// Returns the number of events that report that all guests of a host are stopped.
fn stops(vm: &Vm) -> usize {
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
    vm.program("busy").expect("gcc");
    let guests: Vec<String> = (0..count)
        .map(|_| vm.spawn(&["-h2", "busy"]).expect("spawned"))
        .collect();
    test(&vm, &guests);
    vm.halt().expect("halts");
}

/// Guests that occupy all processors stop, and continue when they are welcome.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn stopped_guests_stand_still_by_their_own_clocks() {
    with_guests(4, |vm, guests| {
        let mut owner = Speaker::new(vm, vm.bed().host(2), SPEAKS);
        let mut words = Vec::new();
        for round in 0..ROUNDS {
            let said = owner.say(&format!("stop round {round}"));
            eventually(TIMEOUT, || {
                if stops(vm) > round {
                    Ok(())
                } else {
                    Err("guests run".to_string())
                }
            })
            .sure(vm);
            assert_eq!(stopped(vm, guests).len(), guests.len());
            eventually(TIMEOUT, || {
                if now() > said + STAY {
                    Ok(())
                } else {
                    Err("she stays".to_string())
                }
            })
            .expect("time passes");
            words.push((said, owner.say("welcome nobody is there")));
        }
        let mut waits = Vec::new();
        for tid in guests {
            let gaps = gaps(vm, tid);
            for (said, welcome) in &words {
                // From some moment on the guest did not run until guests were welcome.
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
    vm.program("busy").expect("gcc");
    let guests: Vec<String> = (0..2)
        .map(|_| vm.spawn(&["-h1", "busy"]).expect("spawned"))
        .collect();
    let mut owner = Speaker::new(&vm, vm.bed().host(1), SPEAKS);
    let said = owner.say("stop olga is there");
    eventually(TIMEOUT, || {
        if stops(&vm) > 0 {
            Ok(())
        } else {
            Err("guests run".to_string())
        }
    })
    .sure(&vm);
    eventually(TIMEOUT, || {
        if now() > said + STAY {
            Ok(())
        } else {
            Err("she stays".to_string())
        }
    })
    .expect("time passes");
    let welcome = owner.say("welcome olga has left");
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
        logs.contains("guests are paused by signals, not by the cgroup freezer: SEMPA_FREEZER=off"),
        "{logs}"
    );
    vm.halt().expect("halts");
}

/// Stopped guests get no processor time, migrate, and continue at the target.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn stopped_guests_move_without_running() {
    with_guests(3, |vm, guests| {
        let mut owner = Speaker::new(vm, vm.bed().host(2), SPEAKS);
        owner.say("stop olga is there");
        eventually(TIMEOUT, || {
            if stops(vm) > 0 {
                Ok(())
            } else {
                Err("guests run".to_string())
            }
        })
        .expect("they stop");
        let stand = now();
        let pids: Vec<i32> = vm
            .tasks()
            .expect("tasks")
            .iter()
            .filter(|t| guests.contains(&t.tid))
            .map(|t| t.pid)
            .collect();
        let before: Vec<u64> = pids
            .iter()
            .map(|pid| used(vm.bed().host(2), *pid))
            .collect();
        let spawn = vm
            .pvm(&["spawn", "-h2", "busy"])
            .expect("the console works");
        assert!(!spawn.good(), "no guest is started there: {spawn:?}");
        let moved: Vec<(u64, u64)> = guests[..2]
            .iter()
            .map(|tid| {
                let began = now();
                vm.must_migrate(tid, "h3");
                assert_eq!(vm.host_of(tid).expect("alive"), "h3");
                (began, now())
            })
            .collect();
        let back = vm.migrate(&guests[0], "h2").expect("the console works");
        assert!(
            !back.good() && back.err.contains("olga is there"),
            "{back:?}"
        );
        let here = used(vm.bed().host(2), pids[2]);
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
        owner.say("welcome olga has left");
        for tid in guests {
            gaps(vm, tid);
        }
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_continue_when_the_owners_agent_dies() {
    with_guests(2, |vm, guests| {
        let mut owner = Speaker::new(vm, vm.bed().host(2), SPEAKS);
        owner.say("stop olga is there");
        eventually(TIMEOUT, || {
            if stops(vm) > 0 {
                Ok(())
            } else {
                Err("guests run".to_string())
            }
        })
        .expect("they stop");
        owner.kill();
        vm.event(TIMEOUT, "continued guests", |entry| {
            matches!(entry.kind, EventKind::GuestsResumed { .. })
        })
        .sure(vm);
        for tid in guests {
            gaps(vm, tid);
        }
        assert!(stopped(vm, guests).is_empty());
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn overdue_guests_are_ended_if_the_owner_wants_it() {
    with_guests(2, |vm, guests| {
        let mut owner = Speaker::new(vm, vm.bed().host(2), SPEAKS);
        owner.say("kill 1500 olga wants her machine");
        vm.event(TIMEOUT, "guests that are ended", |entry| {
            matches!(entry.kind, EventKind::GuestsEnded { .. })
        })
        .expect("told");
        eventually(TIMEOUT, || {
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
        owner.say("welcome olga has left");
        vm.spawn(&["-h2", "busy"]).expect("the host is used again");
    });
}
