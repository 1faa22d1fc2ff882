//! Faults at each step of a migration, with real processes.
//!
//! After each fault the task runs exactly once. If its only host was lost, the task is instead
//! known to have ended. No task ever runs twice, and no message is lost. Each fault is tried once
//! at each step, with a victim that a seed selects; with `SEMPA_TEST_FULL=1` it is tried at both
//! edges of each step with each victim.

use sempa_tests::faults::{BRIEF, Fault, LONGER, Point, SHORT_LEASE, Until, is_full};
use sempa_tests::move_steps::{
    HOSTS, HeldMove, MoveFaults, Sampling, Victim, may_be_lost, sampled_points,
};
use sempa_tests::needs::testbed_with_own_engine;
use sempa_tests::rng::seed;
use sempa_tests::testbed::gone;
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Testbed, Vm};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

const PAUSABLE: [Victim; 6] = [
    Victim::Source,
    Victim::Target,
    Victim::SourceTasker,
    Victim::TargetTasker,
    Victim::ResourceManager,
    Victim::Master,
];
/// Victims whose loss the other hosts survive.
const EXPENDABLE: [Victim; 5] = [
    Victim::Source,
    Victim::Target,
    Victim::SourceTasker,
    Victim::TargetTasker,
    Victim::ResourceManager,
];

fn with_faults(
    bed: &Testbed,
    env: &[(&str, &str)],
    test: impl FnOnce(&Vm<'_>, &mut MoveFaults<'_>),
) {
    let settings = Settings {
        rm: Some("pvm-rm".into()),
        env: Settings::env_of(env),
        ..Settings::default()
    };
    let vm = Vm::start(bed, settings).expect("a virtual machine");
    let mut faults = MoveFaults::new(&vm, may_be_lost).expect("an oracle");
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
    let bed = testbed_with_own_engine(HOSTS);
    with_faults(&bed, &[SHORT_LEASE], |vm, faults| {
        faults.run(Sampling::EachStep, &EXPENDABLE, Fault::Kill);
        vm.halt().expect("halts");
    });
}

/// When the master is killed, all daemons and tasks end. Then another virtual machine can be
/// started.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn all_tasks_end_when_the_master_is_killed() {
    let bed = testbed_with_own_engine(HOSTS);
    for points in rounds_of_points(2) {
        with_faults(&bed, &[SHORT_LEASE], |vm, faults| {
            let mut moves = faults.hold(&points).sure(vm);
            let victims = vec![Victim::Master; moves.len()];
            faults
                .inject(&mut moves, &victims, Fault::Kill)
                .expect("killed");
            faults.all_has_ended().expect("all end with their master");
            for held in &moves {
                faults.oracle.ran_once(&held.name).expect("it ran once");
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
    let bed = testbed_with_own_engine(HOSTS);
    with_faults(&bed, &[], |vm, faults| {
        faults.run(Sampling::EachStep, &PAUSABLE, Fault::Pause(BRIEF));
        faults.run(Sampling::EachThirdStep, &PAUSABLE, Fault::Pause(LONGER));
        vm.halt().expect("halts");
    });
}

/// The pause lasts until the victim is lost. All victims of a round are paused at the same time.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_runs_once_when_a_paused_process_is_lost() {
    let bed = testbed_with_own_engine(HOSTS);
    with_faults(&bed, &[SHORT_LEASE], |vm, faults| {
        faults.run(
            Sampling::EachStep,
            &EXPENDABLE,
            Fault::Pause(Until::Noticed),
        );
        vm.halt().expect("halts");
    });
}

/// Injects `fault` into the master until all other hosts lose it and end. Checks that the master,
/// which has lost all hosts, halts as well.
fn master_is_lost(fault: Fault) {
    let bed = testbed_with_own_engine(HOSTS);
    with_faults(&bed, &[SHORT_LEASE], |vm, faults| {
        let points = rounds_of_points(1).swap_remove(0);
        let mut moves: Vec<HeldMove> = faults.hold(&points).sure(vm);
        let victims = vec![Victim::Master; moves.len()];
        faults
            .inject(&mut moves, &victims, fault)
            .expect("the fault is over");
        for host in &bed.hosts()[1..] {
            gone(host, "pvm", TIMEOUT).expect("it ends with its master");
        }
        for held in &moves {
            faults.oracle.ran_once(&held.name).expect("it ran once");
        }
        vm.halt().expect("halts");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn all_hosts_end_when_the_master_is_paused_too_long() {
    master_is_lost(Fault::Pause(Until::Noticed));
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn all_hosts_end_when_master_is_disconnected() {
    master_is_lost(Fault::Cut(Until::Noticed));
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn short_disconnection_at_any_step_has_no_effect() {
    let bed = testbed_with_own_engine(HOSTS);
    with_faults(&bed, &[], |vm, faults| {
        let victims = [Victim::Source, Victim::Target, Victim::Master];
        faults.run(Sampling::EachStep, &victims, Fault::Cut(BRIEF));
        faults.run(
            Sampling::EachThirdStep,
            &[Victim::Source],
            Fault::Part(BRIEF),
        );
        vm.halt().expect("halts");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_runs_once_when_host_is_disconnected() {
    let bed = testbed_with_own_engine(HOSTS);
    with_faults(&bed, &[SHORT_LEASE], |vm, faults| {
        let victims = [Victim::Source, Victim::Target];
        faults.run(Sampling::EachStep, &victims, Fault::Cut(Until::Noticed));
        vm.halt().expect("halts");
    });
}

/// The source and the target cannot reach each other; the master can reach both.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_runs_once_when_source_and_target_are_separated() {
    let bed = testbed_with_own_engine(HOSTS);
    with_faults(&bed, &[SHORT_LEASE], |vm, faults| {
        faults.run(
            Sampling::EachStep,
            &[Victim::Source],
            Fault::Part(Until::Noticed),
        );
        vm.halt().expect("halts");
    });
}
