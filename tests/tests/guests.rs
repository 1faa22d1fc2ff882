//! Directives of an owner agent stop guests. The tests use real processes and check the guests' own
//! records of when they ran.

use sempa_proto::event::EventKind;
use sempa_tests::owner_agent::TestOwnerAgent;
use sempa_tests::requirements::require_testbed;
use sempa_tests::run::run_successfully;
use sempa_tests::testbed::Host;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const TIMEOUT: Duration = Duration::from_secs(60);
/// Path of the program that acts as an owner agent.
const OWNER_AGENT_PROGRAM: &str = env!("CARGO_BIN_EXE_owner-speaks");
/// Number of times the owner agent stops the guests.
const STOP_COUNT: usize = 5;
/// Minimum duration of a stop of the guests, in microseconds. It is longer than the gaps that
/// running guests record.
const STOP_DURATION_MIN_US: u64 = 300_000;

fn now_us() -> u64 {
    let elapsed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    u64::try_from(elapsed.as_micros()).expect("fits")
}

/// Returns the intervals in which a guest did not run, by its own clock, as (begin, end) in
/// microseconds since 1970.
fn guest_gaps(vm: &Vm, tid: &str) -> Vec<(u64, u64)> {
    vm.busy_gaps_us(tid).or_panic_with_logs(vm)
}

/// Returns the processor time that a process has used in user and kernel mode, in clock ticks.
fn processor_ticks(host: &Host, pid: i32) -> u64 {
    let mut command = host.root_command("cat");
    command.arg(format!("/proc/{pid}/stat"));
    let stat = run_successfully(command, TIMEOUT)
        .expect("it is there")
        .stdout;
    let fields: Vec<&str> = stat[stat.rfind(')').expect("a name") + 1..]
        .split_whitespace()
        .collect();
    fields[11].parse::<u64>().expect("a number") + fields[12].parse::<u64>().expect("a number")
}

fn stopped_guest_tids(vm: &Vm, tids: &[String]) -> Vec<String> {
    let tasks = vm.tasks().or_panic_with_logs(vm);
    tasks
        .into_iter()
        .filter(|t| t.stopped && tids.contains(&t.tid))
        .map(|t| t.tid)
        .collect()
}

/// Returns the number of events so far that report that all guests of a host have stopped.
fn stop_event_count(vm: &Vm) -> usize {
    let events = vm.events().expect("events");
    events
        .iter()
        .filter(|entry| matches!(entry.kind, EventKind::GuestsPaused { .. }))
        .count()
}

fn with_guests(guest_count: usize, test: impl FnOnce(&Vm, &[String])) {
    let bed = require_testbed(3);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    vm.compile_program("busy").expect("gcc");
    let guest_tids: Vec<String> = (0..guest_count)
        .map(|_| vm.spawn_connected(&["-h2", "busy"]).expect("spawned"))
        .collect();
    test(&vm, &guest_tids);
    vm.halt_and_wait().expect("halts");
}

/// Guests that use all processors stop, and continue when the owner permits guests again.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn stopped_guests_do_not_run_by_their_clocks() {
    with_guests(4, |vm, guest_tids| {
        let mut owner_agent = TestOwnerAgent::start(vm, vm.testbed().host(2), OWNER_AGENT_PROGRAM);
        let mut directive_times_us = Vec::new();
        for round in 0..STOP_COUNT {
            let stop_us = owner_agent.send_directive(&format!("stop round {round}"));
            wait_for(TIMEOUT, || {
                if stop_event_count(vm) > round {
                    Ok(())
                } else {
                    Err("guests run".to_string())
                }
            })
            .or_panic_with_logs(vm);
            assert_eq!(stopped_guest_tids(vm, guest_tids).len(), guest_tids.len());
            wait_for(TIMEOUT, || {
                if now_us() > stop_us + STOP_DURATION_MIN_US {
                    Ok(())
                } else {
                    Err("she stays".to_string())
                }
            })
            .expect("time passes");
            directive_times_us.push((
                stop_us,
                owner_agent.send_directive("welcome nobody is there"),
            ));
        }
        let mut delays_us = Vec::new();
        for tid in guest_tids {
            let gaps = guest_gaps(vm, tid);
            for (stop_us, welcome_us) in &directive_times_us {
                // One gap begins before guests were permitted again and ends afterwards.
                let stop_gap = gaps
                    .iter()
                    .find(|(gap_start, gap_end)| gap_start < welcome_us && gap_end >= welcome_us);
                let (gap_start, _) = stop_gap.unwrap_or_else(|| {
                    panic!("{tid} ran between {stop_us} and {welcome_us}: {gaps:?}")
                });
                delays_us.push(gap_start.saturating_sub(*stop_us));
            }
        }
        delays_us.sort_unstable();
        let (median_us, worst_us) = (
            delays_us[delays_us.len() / 2],
            delays_us[delays_us.len() - 1],
        );
        eprintln!(
            "word to standing still, by the guests' clocks: median {median_us} us, worst {worst_us} us"
        );
        let events = vm.events().expect("events");
        let durations_us = events.iter().filter_map(|entry| match &entry.kind {
            EventKind::GuestsPaused {
                duration: durations_us,
                ..
            } => Some(durations_us.0),
            _ => None,
        });
        let mut durations_us: Vec<u64> = durations_us.collect();
        durations_us.sort_unstable();
        eprintln!(
            "word to all seen stopped, by the daemon: median {} us, all {durations_us:?}",
            durations_us[durations_us.len() / 2]
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_are_stopped_by_signals_without_freezer() {
    let bed = require_testbed(1);
    let env = vec![("SEMPA_FREEZER".into(), "off".into())];
    let vm = Vm::start(
        &bed,
        VmSettings {
            env,
            ..VmSettings::default()
        },
    )
    .expect("a virtual machine");
    vm.compile_program("busy").expect("gcc");
    let guest_tids: Vec<String> = (0..2)
        .map(|_| vm.spawn_connected(&["-h1", "busy"]).expect("spawned"))
        .collect();
    let mut owner_agent = TestOwnerAgent::start(&vm, vm.testbed().host(1), OWNER_AGENT_PROGRAM);
    let stop_us = owner_agent.send_directive("stop olga is there");
    wait_for(TIMEOUT, || {
        if stop_event_count(&vm) > 0 {
            Ok(())
        } else {
            Err("guests run".to_string())
        }
    })
    .or_panic_with_logs(&vm);
    wait_for(TIMEOUT, || {
        if now_us() > stop_us + STOP_DURATION_MIN_US {
            Ok(())
        } else {
            Err("she stays".to_string())
        }
    })
    .expect("time passes");
    let welcome_us = owner_agent.send_directive("welcome olga has left");
    for tid in &guest_tids {
        let gaps = guest_gaps(&vm, tid);
        assert!(
            gaps.iter()
                .any(|(gap_start, gap_end)| *gap_start < welcome_us && *gap_end >= welcome_us),
            "{tid} ran meanwhile: {gaps:?}"
        );
    }
    let logs = vm.events_and_logs();
    assert!(
        logs.contains("guests are paused by signals, not by the cgroup freezer: SEMPA_FREEZER=off"),
        "{logs}"
    );
    vm.halt_and_wait().expect("halts");
}

/// Stopped guests get no processor time. They migrate, and continue at the target.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn stopped_guests_move_without_running() {
    with_guests(3, |vm, guest_tids| {
        let mut owner_agent = TestOwnerAgent::start(vm, vm.testbed().host(2), OWNER_AGENT_PROGRAM);
        owner_agent.send_directive("stop olga is there");
        wait_for(TIMEOUT, || {
            if stop_event_count(vm) > 0 {
                Ok(())
            } else {
                Err("guests run".to_string())
            }
        })
        .expect("they stop");
        let stopped_at_us = now_us();
        let pids: Vec<i32> = vm
            .tasks()
            .expect("tasks")
            .iter()
            .filter(|t| guest_tids.contains(&t.tid))
            .map(|t| t.pid)
            .collect();
        let ticks_before: Vec<u64> = pids
            .iter()
            .map(|pid| processor_ticks(vm.testbed().host(2), *pid))
            .collect();
        let spawn_output = vm
            .run_pvm(&["spawn", "-h2", "busy"])
            .expect("the console works");
        assert!(
            !spawn_output.succeeded(),
            "no guest is started there: {spawn_output:?}"
        );
        let migration_times_us: Vec<(u64, u64)> = guest_tids[..2]
            .iter()
            .map(|tid| {
                let start_us = now_us();
                vm.migrate_or_panic(tid, "h3");
                assert_eq!(vm.host_of(tid).expect("alive"), "h3");
                (start_us, now_us())
            })
            .collect();
        let refused_output = vm.migrate(&guest_tids[0], "h2").expect("the console works");
        assert!(
            !refused_output.succeeded() && refused_output.stderr.contains("olga is there"),
            "{refused_output:?}"
        );
        let ticks_after = processor_ticks(vm.testbed().host(2), pids[2]);
        assert_eq!(ticks_after, ticks_before[2], "it does not run");
        for (tid, (start_us, end_us)) in guest_tids[..2].iter().zip(migration_times_us) {
            let gaps = guest_gaps(vm, tid);
            // One gap begins before all guests had stopped and ends during the migration.
            let spans_start = |(gap_start_us, gap_end_us): &(u64, u64)| {
                *gap_start_us <= stopped_at_us && *gap_end_us >= start_us && *gap_end_us <= end_us
            };
            assert!(
                gaps.iter().any(spans_start),
                "{tid}: {gaps:?}; all stood at {stopped_at_us}, it moved from {start_us} to {end_us}"
            );
        }
        owner_agent.send_directive("welcome olga has left");
        for tid in guest_tids {
            guest_gaps(vm, tid);
        }
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_continue_when_the_owners_agent_dies() {
    with_guests(2, |vm, guest_tids| {
        let mut owner_agent = TestOwnerAgent::start(vm, vm.testbed().host(2), OWNER_AGENT_PROGRAM);
        owner_agent.send_directive("stop olga is there");
        wait_for(TIMEOUT, || {
            if stop_event_count(vm) > 0 {
                Ok(())
            } else {
                Err("guests run".to_string())
            }
        })
        .expect("they stop");
        owner_agent.kill_and_wait();
        vm.wait_for_event(TIMEOUT, "continued guests", |entry| {
            matches!(entry.kind, EventKind::GuestsResumed { .. })
        })
        .or_panic_with_logs(vm);
        for tid in guest_tids {
            guest_gaps(vm, tid);
        }
        assert!(stopped_guest_tids(vm, guest_tids).is_empty());
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn overdue_guests_are_ended_if_the_owner_wants_it() {
    with_guests(2, |vm, guest_tids| {
        let mut owner_agent = TestOwnerAgent::start(vm, vm.testbed().host(2), OWNER_AGENT_PROGRAM);
        owner_agent.send_directive("kill 1500 olga wants her machine");
        vm.wait_for_event(TIMEOUT, "guests that are ended", |entry| {
            matches!(entry.kind, EventKind::GuestsEnded { .. })
        })
        .expect("told");
        wait_for(TIMEOUT, || {
            let remaining_tasks = vm.tasks().map_err(|error| format!("{error:#}"))?;
            let remaining_tasks: Vec<_> = remaining_tasks
                .into_iter()
                .filter(|t| guest_tids.contains(&t.tid))
                .collect();
            if remaining_tasks.is_empty() {
                Ok(())
            } else {
                Err(format!("{remaining_tasks:?}"))
            }
        })
        .expect("they end");
        owner_agent.send_directive("welcome olga has left");
        vm.spawn_connected(&["-h2", "busy"])
            .expect("the host is used again");
    });
}
