//! Faults at each step of a migration, with real processes.
//!
//! After each fault the task runs exactly once. If its only host was lost, the task is instead
//! known to have ended. No task ever runs twice, and no message is lost. Each fault is tried once
//! at each step, with a victim that a seed selects; with `SEMPA_TEST_FULL=1` it is tried at both
//! edges of each step with each victim.

use sempa_tests::faults::{Fault, LONG_FAULT, Point, SHORT_FAULT, SHORT_LEASE, Until, is_full};
use sempa_tests::migration_steps::{
    HOST_COUNT, HeldMigration, MigrationFaults, Sampling, Victim, may_be_lost, sampled_points,
};
use sempa_tests::requirements::testbed_with_own_engine;
use sempa_tests::rng::seed;
use sempa_tests::testbed::wait_until_no_process;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

const PAUSE_VICTIMS: [Victim; 6] = [
    Victim::Source,
    Victim::Target,
    Victim::SourceTasker,
    Victim::TargetTasker,
    Victim::ResourceManager,
    Victim::Master,
];
/// Victims whose loss the other hosts survive.
const KILL_VICTIMS: [Victim; 5] = [
    Victim::Source,
    Victim::Target,
    Victim::SourceTasker,
    Victim::TargetTasker,
    Victim::ResourceManager,
];

fn with_faults(
    bed: &Testbed,
    env: &[(&str, &str)],
    test: impl FnOnce(&Vm<'_>, &mut MigrationFaults<'_>),
) {
    let settings = Settings {
        rm: Some("pvm-rm".into()),
        env: Settings::env_of(env),
        ..Settings::default()
    };
    let vm = Vm::start(bed, settings).expect("a virtual machine");
    let mut faults = MigrationFaults::new(&vm, may_be_lost).expect("an oracle");
    test(&vm, &mut faults);
}

/// Returns `count` rounds that the seed selects; all rounds if all cases are requested.
fn rounds_of_points(count: usize) -> Vec<Vec<Point>> {
    let turn = usize::try_from(seed()).expect("a seed");
    let mut rounds = sampled_points(turn);
    if !is_full() {
        let first = count * turn % rounds.len();
        rounds.rotate_left(first);
        rounds.truncate(count);
    }
    rounds
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_runs_once_when_a_process_is_killed() {
    let bed = testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[SHORT_LEASE], |vm, faults| {
        faults.run(Sampling::EachStep, &KILL_VICTIMS, Fault::Kill);
        vm.halt().expect("halts");
    });
}

/// When the master is killed, all daemons and tasks end. Then another virtual machine can be
/// started.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn all_tasks_end_when_the_master_is_killed() {
    let bed = testbed_with_own_engine(HOST_COUNT);
    for points in rounds_of_points(2) {
        with_faults(&bed, &[SHORT_LEASE], |vm, faults| {
            let mut moves = faults.hold(&points).or_panic_with_logs(vm);
            let victims = vec![Victim::Master; moves.len()];
            faults
                .inject(&mut moves, &victims, Fault::Kill)
                .expect("killed");
            faults
                .wait_until_all_ended()
                .expect("all end with their master");
            for held in &moves {
                faults
                    .oracle
                    .check_ran_once(&held.task_name)
                    .expect("it ran once");
            }
        });
    }
    with_faults(&bed, &[], |vm, _| {
        vm.halt()
            .expect("the next virtual machine starts and halts")
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn pause_at_any_step_has_no_effect() {
    let bed = testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[], |vm, faults| {
        faults.run(
            Sampling::EachStep,
            &PAUSE_VICTIMS,
            Fault::Pause(SHORT_FAULT),
        );
        faults.run(
            Sampling::EachThirdStep,
            &PAUSE_VICTIMS,
            Fault::Pause(LONG_FAULT),
        );
        vm.halt().expect("halts");
    });
}

/// The pause lasts until the victim is lost. All victims of a round are paused at the same time.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_runs_once_when_a_paused_process_is_lost() {
    let bed = testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[SHORT_LEASE], |vm, faults| {
        faults.run(
            Sampling::EachStep,
            &KILL_VICTIMS,
            Fault::Pause(Until::Noticed),
        );
        vm.halt().expect("halts");
    });
}

/// Injects `fault` into the master until all other hosts lose it and end. Checks that the master,
/// which has lost all hosts, halts as well.
fn check_master_loss(fault: Fault) {
    let bed = testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[SHORT_LEASE], |vm, faults| {
        let points = rounds_of_points(1).swap_remove(0);
        let mut moves: Vec<HeldMigration> = faults.hold(&points).or_panic_with_logs(vm);
        let victims = vec![Victim::Master; moves.len()];
        faults
            .inject(&mut moves, &victims, fault)
            .expect("the fault is over");
        for host in &bed.hosts()[1..] {
            wait_until_no_process(host, "pvm", TIMEOUT).expect("it ends with its master");
        }
        for held in &moves {
            faults
                .oracle
                .check_ran_once(&held.task_name)
                .expect("it ran once");
        }
        vm.halt().expect("halts");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn all_hosts_end_when_the_master_is_paused_too_long() {
    check_master_loss(Fault::Pause(Until::Noticed));
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn all_hosts_end_when_master_is_disconnected() {
    check_master_loss(Fault::Disconnect(Until::Noticed));
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn short_disconnection_at_any_step_has_no_effect() {
    let bed = testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[], |vm, faults| {
        let victims = [Victim::Source, Victim::Target, Victim::Master];
        faults.run(Sampling::EachStep, &victims, Fault::Disconnect(SHORT_FAULT));
        faults.run(
            Sampling::EachThirdStep,
            &[Victim::Source],
            Fault::Partition(SHORT_FAULT),
        );
        vm.halt().expect("halts");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_runs_once_when_host_is_disconnected() {
    let bed = testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[SHORT_LEASE], |vm, faults| {
        let victims = [Victim::Source, Victim::Target];
        faults.run(
            Sampling::EachStep,
            &victims,
            Fault::Disconnect(Until::Noticed),
        );
        vm.halt().expect("halts");
    });
}

/// The source and the target cannot reach each other; the master can reach both.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_runs_once_when_source_and_target_are_separated() {
    let bed = testbed_with_own_engine(HOST_COUNT);
    with_faults(&bed, &[SHORT_LEASE], |vm, faults| {
        faults.run(
            Sampling::EachStep,
            &[Victim::Source],
            Fault::Partition(Until::Noticed),
        );
        vm.halt().expect("halts");
    });
}
