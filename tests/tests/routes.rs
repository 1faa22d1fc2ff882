//! Migrations of tasks that exchange messages on direct routes: on rings within a host, on
//! connections between two hosts, and on both in turn. With `SEMPA_TEST_FULL=1` there are as many
//! migrations and faults as in the tests of the default route.

use sempa_proto::event::EventKind;
use sempa_tests::all_to_all::AllToAllJob;
use sempa_tests::faults::{Fault, FaultEnd, SHORT_DURATION, SHORT_LEASE_ENV, tests_all_cases};
use sempa_tests::migration_steps::{
    HOST_COUNT, MigrationFaults, StepSample, Victim, task_may_be_lost,
};
use sempa_tests::oracle::Oracle;
use sempa_tests::owner_agent::TestOwnerAgent;
use sempa_tests::requirements::{require_testbed, require_testbed_with_own_engine};
use sempa_tests::rng::Rng;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm};
use std::collections::HashMap;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
const WORKER_COUNT: usize = 6;
const ALL_WORKERS: [usize; WORKER_COUNT] = [0, 1, 2, 3, 4, 5];

/// Returns `full_count` with `SEMPA_TEST_FULL=1`, otherwise `default_count`.
fn default_or_full(default_count: usize, full_count: usize) -> usize {
    if tests_all_cases() {
        full_count
    } else {
        default_count
    }
}

fn with_hosts(host_count: usize, test: impl FnOnce(&Vm<'_>, &[&str])) {
    let bed = require_testbed(host_count);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    let host_names: Vec<&str> = bed.hosts().iter().map(|host| host.name()).collect();
    vm.add_hosts(&host_names[1..]).expect("the others join");
    test(&vm, &host_names);
    vm.halt_and_wait().expect("halts");
}

fn finish_and_check(vm: &Vm<'_>, job: AllToAllJob) {
    job.check_worker_hosts(vm).or_panic_with_logs(vm);
    let report = job.end_and_report().or_panic_with_logs(vm);
    assert!(
        report.is_faultless(),
        "{report:?}\n{}",
        vm.events_and_logs()
    );
    eprintln!("{report:?}");
}

/// Starts all workers on `hosts` and migrates random workers, one after another, to random hosts of
/// the list `target_names`. After each migration waits until all routes of the migrated worker are
/// restored. At the end checks that every message arrived once.
fn migrate_with_routes(vm: &Vm<'_>, hosts: &[&str], target_names: &[&str], migration_count: usize) {
    let mut job = AllToAllJob::start(vm, WORKER_COUNT, 0, &["-d"], hosts).or_panic_with_logs(vm);
    let mut route_counts = job
        .wait_for_new_routes(&ALL_WORKERS, &HashMap::new())
        .or_panic_with_logs(vm);
    let mut rng = Rng::new(17);
    for number in 0..migration_count {
        let worker = rng.next_below(WORKER_COUNT);
        let other_hosts: Vec<&str> = target_names
            .iter()
            .copied()
            .filter(|name| *name != job.workers_and_hosts[worker].1)
            .collect();
        let target = other_hosts[rng.next_below(other_hosts.len())];
        eprintln!(
            "move {number}: worker {worker} from {} to {target}",
            job.workers_and_hosts[worker].1
        );
        job.migrate_worker(vm, worker, target)
            .or_panic_with_logs(vm);
        route_counts = job
            .wait_for_new_routes(&[worker], &route_counts)
            .or_panic_with_logs(vm);
    }
    finish_and_check(vm, job);
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn rings_deliver_once_when_tasks_separate_and_rejoin() {
    with_hosts(2, |vm, hosts| {
        migrate_with_routes(vm, &hosts[1..], hosts, default_or_full(10, 50));
    });
}

/// Three tasks migrate at the same time, while routes are made and closed on all hosts.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn direct_routes_deliver_once_in_parallel_moves() {
    with_hosts(3, |vm, hosts| {
        let mut job =
            AllToAllJob::start(vm, 2 * WORKER_COUNT, 2, &["-d"], hosts).or_panic_with_logs(vm);
        let mut rng = Rng::new(23);
        for _ in 0..default_or_full(4, 12) {
            job.migrate_random_workers(vm, &mut rng, 3)
                .or_panic_with_logs(vm);
        }
        finish_and_check(vm, job);
    });
}

/// The guests of a host are stopped. Some guests migrate while they are stopped, and then all
/// guests are resumed. Guests have rings to guests on the same host and connections to guests on
/// other hosts.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn direct_routes_deliver_once_to_stopped_guests() {
    with_hosts(2, |vm, hosts| {
        let mut owner_agent =
            TestOwnerAgent::start(vm, vm.testbed().host(2), env!("CARGO_BIN_EXE_owner-speaks"));
        let mut job =
            AllToAllJob::start(vm, WORKER_COUNT, 0, &["-d"], &hosts[1..]).or_panic_with_logs(vm);
        job.wait_for_new_routes(&ALL_WORKERS, &HashMap::new())
            .or_panic_with_logs(vm);
        let mut rng = Rng::new(29);
        for number in 0..default_or_full(4, 16) {
            owner_agent.send_directive(&format!("stop number {number}"));
            let is_stop_event = |kind: &EventKind| matches!(kind, EventKind::GuestsPaused { why, .. } if *why == format!("number {number}"));
            vm.wait_for_event(TIMEOUT, "stopped guests", |entry| {
                is_stop_event(&entry.kind)
            })
            .or_panic_with_logs(vm);
            let workers_on_h2: Vec<usize> = ALL_WORKERS
                .into_iter()
                .filter(|worker| job.workers_and_hosts[*worker].1 == "h2")
                .collect();
            let migrating_worker = workers_on_h2[rng.next_below(workers_on_h2.len())];
            job.migrate_worker(vm, migrating_worker, "h1")
                .or_panic_with_logs(vm);
            owner_agent.send_directive("welcome nobody is there");
            job.migrate_worker(vm, migrating_worker, "h2")
                .or_panic_with_logs(vm);
        }
        finish_and_check(vm, job);
    });
}

/// Runs `test` with migrations that use direct routes. `source_number` is the number of the host
/// from which all tasks migrate and on which the director runs. If `source_number` is `None`, tasks
/// migrate from several hosts and the director runs on h1.
fn with_faults(
    env: &[(&str, &str)],
    source_number: Option<usize>,
    test: impl FnOnce(&mut MigrationFaults<'_>),
) {
    let bed = require_testbed_with_own_engine(HOST_COUNT);
    let settings = VmSettings {
        env: VmSettings::owned_env(env),
        ..VmSettings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    if let Some(source_number) = source_number {
        vm.add_hosts(&[bed.host(source_number).name()])
            .expect("it joins");
    }
    let oracle = Oracle::start_on(&vm, source_number.unwrap_or(1), true).or_panic_with_logs(&vm);
    let mut faults = MigrationFaults::with_oracle(&vm, oracle, task_may_be_lost, source_number)
        .or_panic_with_logs(&vm);
    test(&mut faults);
    vm.halt_and_wait().expect("halts");
}

const VICTIMS: [Victim; 4] = [
    Victim::SourceDaemon,
    Victim::TargetDaemon,
    Victim::SourceTasker,
    Victim::TargetTasker,
];

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_with_a_direct_route_survives_faults() {
    with_faults(&[SHORT_LEASE_ENV], None, |faults| {
        faults.inject_sample(StepSample::EachThirdStep, &VICTIMS, Fault::Kill);
        if tests_all_cases() {
            let source_and_target = &VICTIMS[..2];
            faults.inject_sample(
                StepSample::EachThirdStep,
                source_and_target,
                Fault::Pause(SHORT_DURATION),
            );
            faults.inject_sample(
                StepSample::EachThirdStep,
                &source_and_target[..1],
                Fault::Partition(FaultEnd::LossHandled),
            );
            faults.inject_sample(
                StepSample::EachThirdStep,
                source_and_target,
                Fault::Disconnect(FaultEnd::LossHandled),
            );
        }
    });
}

/// Each task that migrates leaves the host of its peer, to which it had a ring.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_with_ring_survives_faults_in_migration() {
    with_faults(&[SHORT_LEASE_ENV], Some(2), |faults| {
        // The peer is on the source, too, so the source is only paused.
        let kill_victims = [Victim::TargetTasker, Victim::TargetDaemon];
        faults.inject_sample(StepSample::EachThirdStep, &kill_victims, Fault::Kill);
        let pause_victims = [Victim::SourceDaemon, Victim::TargetDaemon];
        faults.inject_sample(
            StepSample::EachThirdStep,
            &pause_victims,
            Fault::Pause(SHORT_DURATION),
        );
        if tests_all_cases() {
            faults.inject_sample(
                StepSample::EachThirdStep,
                &pause_victims[..1],
                Fault::Partition(SHORT_DURATION),
            );
        }
    });
}
