//! Memory that goes ahead of a task (pre-copy), between whole hosts: the task runs meanwhile and is whole in the end, little is
//! left for later, and whoever is in its way the task loses nothing by it.

use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Step};
use sempa_tests::holders::{is_whole, reached, with_hosts};
use sempa_tests::move_steps::{Victim, process_of};
use sempa_tests::testbed::left;
use sempa_tests::{Sure, Vm, eventually};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
/// Memory of a task, as its program wants to be told, and in bytes.
const LARGE: (&str, u64) = ("96", 96 << 20);
/// So slowly, in bytes per second, that it goes ahead for longer than any of these tests takes.
const SLOWLY: (&str, &str) = ("SEMPA_MOVE_RATE", "1000000");
/// A way on which it goes ahead: on a fast one it would follow soon enough.
const SLOW: (&str, &str) = ("SEMPA_MOVE_RATE", "40000000");
/// So much has gone ahead when a fault comes.
const BEGUN: u64 = 2 << 20;

/// Bytes that went ahead of all tasks so far, move by move.
fn went_ahead(vm: &Vm) -> Vec<u64> {
    let events = vm.events().expect("events");
    let bytes = |kind: &EventKind| match kind {
        EventKind::MigrationStep {
            step: Step::PreCopy,
            bytes,
            ..
        } => Some(*bytes),
        _ => None,
    };
    events
        .iter()
        .filter_map(|entry| bytes(&entry.kind))
        .collect()
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_that_writes_while_its_memory_goes_ahead_is_whole_and_most_of_it_passes_once() {
    with_hosts(3, &[SLOW], |vm| {
        let tid = vm
            .spawn(&["-h2", "hold", LARGE.0, "writes"])
            .expect("spawned");
        is_whole(vm, &tid);
        for (from, to) in [(2, "h3"), (3, "h1"), (1, "h2")] {
            let before = left(vm.bed().host(from));
            vm.must_migrate(&tid, to);
            let bytes = left(vm.bed().host(from)) - before;
            assert!(
                bytes < LARGE.1 + LARGE.1 / 2,
                "{bytes} bytes have left for {}",
                LARGE.1
            );
            is_whole(vm, &tid);
        }
        let ahead = went_ahead(vm);
        assert!(
            ahead.len() == 3 && ahead.iter().all(|bytes| *bytes >= LARGE.1),
            "{ahead:?}"
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn nothing_goes_ahead_of_small_tasks_and_none_where_an_administrator_does_not_want_it() {
    for (size, setting) in [("20", "usual"), (LARGE.0, "never")] {
        with_hosts(2, &[("SEMPA_PRE_COPY", setting)], |vm| {
            let tid = vm.spawn(&["-h1", "hold", size]).expect("spawned");
            is_whole(vm, &tid);
            vm.must_migrate(&tid, "h2");
            is_whole(vm, &tid);
            assert_eq!(went_ahead(vm), [0; 0], "{size} MiB, {setting}");
        });
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn nobody_waits_for_memory_that_goes_ahead_of_a_task_that_is_to_stand_still() {
    with_hosts(3, &[SLOWLY], |vm| {
        let tid = vm.spawn(&["-h2", "hold", LARGE.0]).expect("spawned");
        is_whole(vm, &tid);
        let moving = vm.start_migrate(&tid, "h3").expect("it begins");
        reached(vm, &tid, Step::Prepare);
        vm.pvm(&["job", "suspend", "--task", &tid])
            .expect("the console runs")
            .expect_good("suspend")
            .expect("suspended");
        reached(vm, &tid, Step::Run);
        assert!(went_ahead(vm)[0] < LARGE.1, "not all of it");
        vm.pvm(&["kill", &tid])
            .expect("the console runs")
            .expect_good("kill")
            .expect("killed");
        moving
            .finish(SOON)
            .expect("the console ends")
            .expect_good("migrate")
            .expect("it had moved");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_whose_memory_goes_ahead_in_vain_runs_on_where_it_is_and_the_reason_is_told() {
    with_hosts(3, &[SLOWLY], |vm| {
        let strikes: [(&str, &dyn Fn()); 2] = [
            ("the target's tasker", &|| {
                let tasker =
                    process_of(vm.bed().host(3), Victim::TargetTasker).expect("it is there");
                nix::sys::signal::kill(tasker, nix::sys::signal::Signal::SIGKILL)
                    .expect("it is there");
            }),
            ("the target", &|| vm.bed().host(3).kill_all()),
        ];
        for (whom, strike) in strikes {
            let tid = vm
                .spawn(&["-h2", "hold", LARGE.0, "writes"])
                .expect("spawned");
            is_whole(vm, &tid);
            let before = left(vm.bed().host(2));
            let moving = vm.start_migrate(&tid, "h3").expect("it begins");
            eventually(SOON, || match left(vm.bed().host(2)) - before {
                bytes if bytes >= BEGUN => Ok(()),
                bytes => Err(format!("{bytes} bytes have left")),
            })
            .sure(vm);
            strike();
            let done = moving.finish(SOON).expect("the console ends");
            assert!(!done.good(), "{whom}: {done:?}");
            is_whole(vm, &tid);
            assert_eq!(vm.host_of(&tid).expect("it lives"), "h2", "{whom}");
        }
        let events = vm.events().expect("events");
        let why: Vec<&Failure> = events
            .iter()
            .filter_map(|entry| match &entry.kind {
                EventKind::MigrationFailed {
                    step: Step::PreCopy,
                    why,
                    ..
                } => Some(why),
                _ => None,
            })
            .collect();
        assert_eq!(why.len(), 2, "{why:?}");
    });
}
