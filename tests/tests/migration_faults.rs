//! Faults at each step of a migration, with real processes.
//!
//! After each fault the task runs exactly once. If the only host of the task was lost, the end of
//! the task is reported instead. No task ever runs twice, and no message is lost. Each fault is
//! tried once at each step, with a victim that a seed selects; with `SEMPA_TEST_FULL=1` it is tried
//! at both edges of each step with each victim.

use sempa_tests::faults::{
    Fault, FaultEnd, LONG_DURATION, Point, SHORT_DURATION, SHORT_LEASE_ENV, tests_all_cases,
};
use sempa_tests::migration_steps::{
    HOST_COUNT, HeldMigration, MigrationFaults, StepSample, Victim, sampled_points,
    task_may_be_lost,
};
use sempa_tests::requirements::require_testbed_with_own_engine;
use sempa_tests::rng::print_seed;
use sempa_tests::testbed::wait_until_no_process;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

const PAUSE_VICTIMS: [Victim; 6] = [
    Victim::SourceDaemon,
    Victim::TargetDaemon,
    Victim::SourceTasker,
    Victim::TargetTasker,
    Victim::ResourceManager,
    Victim::MasterDaemon,
];
/// Victims whose loss the other hosts survive.
const KILL_VICTIMS: [Victim; 5] = [
    Victim::SourceDaemon,
    Victim::TargetDaemon,
    Victim::SourceTasker,
    Victim::TargetTasker,
    Victim::ResourceManager,
];

fn with_faults(
    bed: &Testbed,
    env: &[(&str, &str)],
    test: impl FnOnce(&Vm<'_>, &mut MigrationFaults<'_>),
) {
    let settings = VmSettings {
        rm_command: Some("pvm-rm".into()),
        env: VmSettings::owned_env(env),
        ..VmSettings::default()
    };
    let vm = Vm::start(bed, settings).expect("a virtual machine");
    let mut faults = MigrationFaults::new(&vm, task_may_be_lost).expect("an oracle");
    test(&vm, &mut faults);
}

/// Returns `count` rounds of points, which the seed selects. With `SEMPA_TEST_FULL=1` returns all
/// rounds.
fn sampled_rounds(count: usize) -> Vec<Vec<Point>> {
    let sample_index = usize::try_from(print_seed()).expect("a seed");
    let mut rounds = sampled_points(sample_index);
    if !tests_all_cases() {
        let first_index = count * sample_index % rounds.len();
        rounds.rotate_left(first_index);
        rounds.truncate(count);
    }
    rounds
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_runs_once_when_a_process_is_killed() {
    let bed = require_testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[SHORT_LEASE_ENV], |vm, faults| {
        faults.inject_sample(StepSample::EachStep, &KILL_VICTIMS, Fault::Kill);
        vm.halt_and_wait().expect("halts");
    });
}

/// When the master is killed, all daemons and tasks end. Then another virtual machine can be
/// started.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn all_tasks_end_when_the_master_is_killed() {
    let bed = require_testbed_with_own_engine(HOST_COUNT);
    for points in sampled_rounds(2) {
        with_faults(&bed, &[SHORT_LEASE_ENV], |vm, faults| {
            let mut held_migrations = faults.start_and_hold(&points).or_panic_with_logs(vm);
            let victims = vec![Victim::MasterDaemon; held_migrations.len()];
            faults
                .inject_and_wait(&mut held_migrations, &victims, Fault::Kill)
                .expect("killed");
            faults
                .wait_until_all_ended()
                .expect("all end with their master");
            for migration in &held_migrations {
                faults
                    .oracle
                    .check_ran_once(&migration.task_name)
                    .expect("it ran once");
            }
        });
    }
    with_faults(&bed, &[], |vm, _| {
        vm.halt_and_wait()
            .expect("the next virtual machine starts and halts")
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn pause_at_any_step_has_no_effect() {
    let bed = require_testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[], |vm, faults| {
        faults.inject_sample(
            StepSample::EachStep,
            &PAUSE_VICTIMS,
            Fault::Pause(SHORT_DURATION),
        );
        faults.inject_sample(
            StepSample::EachThirdStep,
            &PAUSE_VICTIMS,
            Fault::Pause(LONG_DURATION),
        );
        vm.halt_and_wait().expect("halts");
    });
}

/// The pause lasts until the victim is lost. All victims of a round are paused at the same time.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_runs_once_when_a_paused_process_is_lost() {
    let bed = require_testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[SHORT_LEASE_ENV], |vm, faults| {
        faults.inject_sample(
            StepSample::EachStep,
            &KILL_VICTIMS,
            Fault::Pause(FaultEnd::LossHandled),
        );
        vm.halt_and_wait().expect("halts");
    });
}

/// Injects `fault` into the master. Checks that all other hosts end when they lose the master, that
/// no task has run twice, and that the master, which has lost all other hosts, can be halted.
fn check_master_loss(fault: Fault) {
    let bed = require_testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[SHORT_LEASE_ENV], |vm, faults| {
        let points = sampled_rounds(1).swap_remove(0);
        let mut held_migrations: Vec<HeldMigration> =
            faults.start_and_hold(&points).or_panic_with_logs(vm);
        let victims = vec![Victim::MasterDaemon; held_migrations.len()];
        faults
            .inject_and_wait(&mut held_migrations, &victims, fault)
            .expect("the fault is over");
        for host in &bed.hosts()[1..] {
            wait_until_no_process(host, "pvm", TIMEOUT).expect("it ends with its master");
        }
        for migration in &held_migrations {
            faults
                .oracle
                .check_ran_once(&migration.task_name)
                .expect("it ran once");
        }
        // A host that the master has not yet found lost is named, and the master ends nevertheless.
        let halt = vm.run_pvm(&["halt"]).expect("it ends");
        assert!(
            halt.succeeded() || halt.stderr.contains("these hosts did not answer: "),
            "{halt:?}"
        );
        wait_until_no_process(bed.host(1), "pvm", TIMEOUT).expect("the master ends");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn all_hosts_end_when_the_master_is_paused_too_long() {
    check_master_loss(Fault::Pause(FaultEnd::LossHandled));
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn all_hosts_end_when_master_is_disconnected() {
    check_master_loss(Fault::Disconnect(FaultEnd::LossHandled));
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn short_disconnection_at_any_step_has_no_effect() {
    let bed = require_testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[], |vm, faults| {
        let victims = [
            Victim::SourceDaemon,
            Victim::TargetDaemon,
            Victim::MasterDaemon,
        ];
        faults.inject_sample(
            StepSample::EachStep,
            &victims,
            Fault::Disconnect(SHORT_DURATION),
        );
        faults.inject_sample(
            StepSample::EachThirdStep,
            &[Victim::SourceDaemon],
            Fault::Partition(SHORT_DURATION),
        );
        vm.halt_and_wait().expect("halts");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_runs_once_when_host_is_disconnected() {
    let bed = require_testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[SHORT_LEASE_ENV], |vm, faults| {
        let victims = [Victim::SourceDaemon, Victim::TargetDaemon];
        faults.inject_sample(
            StepSample::EachStep,
            &victims,
            Fault::Disconnect(FaultEnd::LossHandled),
        );
        vm.halt_and_wait().expect("halts");
    });
}

/// The source and the target cannot reach each other; the master can reach both.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_runs_once_when_source_and_target_are_separated() {
    let bed = require_testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[SHORT_LEASE_ENV], |vm, faults| {
        faults.inject_sample(
            StepSample::EachStep,
            &[Victim::SourceDaemon],
            Fault::Partition(FaultEnd::LossHandled),
        );
        vm.halt_and_wait().expect("halts");
    });
}
