//! Migrations of tasks that exchange messages on direct routes: on rings within a host, on
//! connections between two hosts, and on both in turn. With `SEMPA_TEST_FULL=1` there are as many
//! migrations and faults as in the tests of the default route.

use sempa_proto::event::EventKind;
use sempa_tests::crowd::Crowd;
use sempa_tests::faults::{Fault, SHORT_FAULT, SHORT_LEASE, Until, is_full};
use sempa_tests::migration_steps::{HOST_COUNT, MigrationFaults, Sampling, Victim, may_be_lost};
use sempa_tests::oracle::Oracle;
use sempa_tests::owner_agent::OwnerAgent;
use sempa_tests::requirements::{testbed, testbed_with_own_engine};
use sempa_tests::rng::Rng;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Vm};
use std::collections::HashMap;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
const WORKER_COUNT: usize = 6;
const ALL_WORKERS: [usize; WORKER_COUNT] = [0, 1, 2, 3, 4, 5];

/// Returns `all` if all cases are requested, otherwise `few`.
fn few_or_all(few: usize, all: usize) -> usize {
    if is_full() { all } else { few }
}

fn with_hosts(count: usize, test: impl FnOnce(&Vm<'_>, &[&str])) {
    let bed = testbed(count);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    let names: Vec<&str> = bed.hosts().iter().map(|host| host.name()).collect();
    vm.add(&names[1..]).expect("the others join");
    test(&vm, &names);
    vm.halt().expect("halts");
}

fn finish_and_check(vm: &Vm<'_>, crowd: Crowd) {
    crowd.check_hosts(vm).or_panic_with_logs(vm);
    let account = crowd.finish().or_panic_with_logs(vm);
    assert!(account.is_faultless(), "{account:?}\n{}", vm.logs());
    eprintln!("{account:?}");
}

/// Starts all workers on `hosts` and migrates random workers to the hosts `to`, one after another.
/// Before each migration, all routes of the previously migrated worker are restored.
fn migrate_with_routes(vm: &Vm<'_>, hosts: &[&str], to: &[&str], moves: usize) {
    let mut crowd = Crowd::start(vm, WORKER_COUNT, 0, &["-d"], hosts).or_panic_with_logs(vm);
    let mut had = crowd
        .wait_for_new_routes(&ALL_WORKERS, &HashMap::new())
        .or_panic_with_logs(vm);
    let mut rng = Rng::new(17);
    for number in 0..moves {
        let who = rng.below(WORKER_COUNT);
        let others: Vec<&str> = to
            .iter()
            .copied()
            .filter(|name| *name != crowd.workers[who].1)
            .collect();
        let host = others[rng.below(others.len())];
        eprintln!(
            "move {number}: worker {who} from {} to {host}",
            crowd.workers[who].1
        );
        crowd.migrate_worker(vm, who, host).or_panic_with_logs(vm);
        had = crowd
            .wait_for_new_routes(&[who], &had)
            .or_panic_with_logs(vm);
    }
    finish_and_check(vm, crowd);
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn rings_deliver_once_when_tasks_separate_and_rejoin() {
    with_hosts(2, |vm, hosts| {
        migrate_with_routes(vm, &hosts[1..], hosts, few_or_all(10, 50));
    });
}

/// Three tasks migrate at the same time, while routes are made and closed on all hosts.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn direct_routes_deliver_once_in_parallel_moves() {
    with_hosts(3, |vm, hosts| {
        let mut crowd =
            Crowd::start(vm, 2 * WORKER_COUNT, 2, &["-d"], hosts).or_panic_with_logs(vm);
        let mut rng = Rng::new(23);
        for _ in 0..few_or_all(4, 12) {
            crowd.migrate_random(vm, &mut rng, 3).or_panic_with_logs(vm);
        }
        finish_and_check(vm, crowd);
    });
}

/// The guests of a host are stopped, some migrate while they are stopped, and all are resumed. They
/// have rings to guests on the same host, and connections to those on other hosts.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn direct_routes_deliver_once_to_stopped_guests() {
    with_hosts(2, |vm, hosts| {
        let mut owner = OwnerAgent::new(vm, vm.bed().host(2), env!("CARGO_BIN_EXE_owner-speaks"));
        let mut crowd =
            Crowd::start(vm, WORKER_COUNT, 0, &["-d"], &hosts[1..]).or_panic_with_logs(vm);
        crowd
            .wait_for_new_routes(&ALL_WORKERS, &HashMap::new())
            .or_panic_with_logs(vm);
        let mut rng = Rng::new(29);
        for number in 0..few_or_all(4, 16) {
            owner.direct(&format!("stop number {number}"));
            let told = |kind: &EventKind| matches!(kind, EventKind::GuestsPaused { why, .. } if *why == format!("number {number}"));
            vm.wait_for_event(TIMEOUT, "stopped guests", |entry| told(&entry.kind))
                .or_panic_with_logs(vm);
            let there: Vec<usize> = ALL_WORKERS
                .into_iter()
                .filter(|who| crowd.workers[*who].1 == "h2")
                .collect();
            let leaves = there[rng.below(there.len())];
            crowd
                .migrate_worker(vm, leaves, "h1")
                .or_panic_with_logs(vm);
            owner.direct("welcome nobody is there");
            crowd
                .migrate_worker(vm, leaves, "h2")
                .or_panic_with_logs(vm);
        }
        finish_and_check(vm, crowd);
    });
}

/// Runs `test` with migrations that use direct routes. `home` is the host from which all tasks
/// migrate, if it is always the same one; the director runs on that host.
fn with_faults(
    env: &[(&str, &str)],
    home: Option<usize>,
    test: impl FnOnce(&mut MigrationFaults<'_>),
) {
    let bed = testbed_with_own_engine(HOST_COUNT);
    let settings = Settings {
        env: Settings::env_of(env),
        ..Settings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    if let Some(home) = home {
        vm.add(&[bed.host(home).name()]).expect("it joins");
    }
    let oracle = Oracle::start_on(&vm, home.unwrap_or(1), true).or_panic_with_logs(&vm);
    let mut faults =
        MigrationFaults::with_oracle(&vm, oracle, may_be_lost, home).or_panic_with_logs(&vm);
    test(&mut faults);
    vm.halt().expect("halts");
}

const VICTIMS: [Victim; 4] = [
    Victim::Source,
    Victim::Target,
    Victim::SourceTasker,
    Victim::TargetTasker,
];

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_with_a_direct_route_survives_faults() {
    with_faults(&[SHORT_LEASE], None, |faults| {
        faults.run(Sampling::EachThirdStep, &VICTIMS, Fault::Kill);
        if is_full() {
            let ends = &VICTIMS[..2];
            faults.run(Sampling::EachThirdStep, ends, Fault::Pause(SHORT_FAULT));
            faults.run(
                Sampling::EachThirdStep,
                &ends[..1],
                Fault::Partition(Until::Noticed),
            );
            faults.run(
                Sampling::EachThirdStep,
                ends,
                Fault::Disconnect(Until::Noticed),
            );
        }
    });
}

/// Each task that migrates leaves the host of its peer, to which it had a ring.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_with_ring_survives_faults_in_migration() {
    with_faults(&[SHORT_LEASE], Some(2), |faults| {
        // The peer is on the source, too, so the source is only paused.
        let mortal = [Victim::TargetTasker, Victim::Target];
        faults.run(Sampling::EachThirdStep, &mortal, Fault::Kill);
        let ends = [Victim::Source, Victim::Target];
        faults.run(Sampling::EachThirdStep, &ends, Fault::Pause(SHORT_FAULT));
        if is_full() {
            faults.run(
                Sampling::EachThirdStep,
                &ends[..1],
                Fault::Partition(SHORT_FAULT),
            );
        }
    });
}
