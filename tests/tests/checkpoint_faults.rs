//! Faults during checkpoints and restarts of jobs, with real processes.
//!
//! After each fault the job makes progress or has rolled back to its newest checkpoint. A restart
//! starts either the whole job or no task; if it starts no task, the user can repeat the restart.
//! No task runs twice, no message is lost, and no files or processes remain. Each fault is injected
//! at some points, which a seed selects; with `SEMPA_TEST_FULL=1` it is injected at all points.

use sempa_tests::checkpoint_steps::{
    CheckpointFaults, HOST_COUNT, RoundSample, Victim, daemon_points, full_round_count,
};
use sempa_tests::fake_criu;
use sempa_tests::faults::{
    Fault, FaultEnd, LONG_DURATION, SHORT_DURATION, SHORT_LEASE_ENV, tests_all_cases,
};
use sempa_tests::requirements::require_testbed_with_own_engine;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm};

fn start_vm<'a>(bed: &'a Testbed, env: &[(&str, &str)]) -> Vm<'a> {
    let settings = VmSettings {
        rm_command: Some("pvm-rm".into()),
        env: VmSettings::owned_env(env),
        ..VmSettings::default()
    };
    Vm::start(bed, settings).expect("a virtual machine")
}

/// Starts jobs and calls `test`, which injects faults. `offset` and the seed select the points of
/// the first round. At the end all jobs must finish with the correct result.
fn with_jobs(env: &[(&str, &str)], offset: usize, test: impl FnOnce(&mut CheckpointFaults<'_>)) {
    let bed = require_testbed_with_own_engine(HOST_COUNT);
    fake_criu::install(&bed);
    let vm = start_vm(&bed, env);
    let mut faults = CheckpointFaults::start_jobs(&vm, offset).or_panic_with_logs(&vm);
    test(&mut faults);
    faults.end_and_check_jobs();
    vm.halt_and_wait().expect("halts");
}

/// The points that checkpoints and restarts reach are exactly the points of [`daemon_points`], at
/// which the tests inject faults. If a checkpoint gets a new step, its points must be added to
/// `daemon_points`.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn all_points_of_checkpoints_are_tried() {
    with_jobs(&[], 0, |faults| {
        let reached_points = faults.checkpoint_and_restart().expect("no fault");
        let tested_points = reached_points
            .each_ref()
            .map(|(operation, _)| (*operation, daemon_points(*operation)));
        assert_eq!(tested_points, reached_points);
    });
}

/// After any of the processes is killed, the job makes progress or rolls back. A restart succeeds,
/// or the user can repeat it.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn no_job_is_lost_after_kill_during_checkpoint() {
    with_jobs(&[], 0, |faults| {
        faults.inject_rounds(RoundSample::OneRound, Victim::ResourceManager, Fault::Kill);
        for victim in [
            Victim::WorkerTasker,
            Victim::WorkerEngine,
            Victim::WorkerDaemon,
        ] {
            faults.inject_rounds(RoundSample::TwoRounds, victim, Fault::Kill);
        }
        assert!(faults.engine_hit_count() > 0, "no engine was hit");
    });
}

/// After the master was killed, the next virtual machine restarts the jobs from their newest
/// checkpoints.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn jobs_restart_after_the_master_was_killed() {
    let bed = require_testbed_with_own_engine(HOST_COUNT);
    fake_criu::install(&bed);
    for offset in 4..if tests_all_cases() {
        4 + full_round_count()
    } else {
        5
    } {
        let vm = start_vm(&bed, &[SHORT_LEASE_ENV]);
        let mut faults = CheckpointFaults::start_jobs(&vm, offset).or_panic_with_logs(&vm);
        faults.kill_master_and_check().or_panic_with_logs(&vm);
        let vm = start_vm(&bed, &[SHORT_LEASE_ENV]);
        faults
            .restart_jobs(&vm)
            .or_panic_with_logs(&vm)
            .end_and_check_jobs();
        vm.halt_and_wait().expect("halts");
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn short_pause_during_checkpoint_has_no_effect() {
    let pause = Fault::Pause(SHORT_DURATION);
    with_jobs(&[], 6, |faults| {
        for victim in [
            Victim::WorkerDaemon,
            Victim::MasterDaemon,
            Victim::WorkerTasker,
            Victim::WorkerEngine,
        ] {
            faults.inject_rounds(RoundSample::OneRound, victim, pause);
        }
        faults.inject_rounds(RoundSample::OneRound, Victim::ResourceManager, pause);
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn long_pause_during_checkpoint_has_no_effect() {
    with_jobs(&[], 11, |faults| {
        let victims = [
            Victim::WorkerDaemon,
            Victim::WorkerTasker,
            Victim::MasterDaemon,
        ];
        if tests_all_cases() {
            for victim in victims {
                faults.inject_rounds(RoundSample::OneRound, victim, Fault::Pause(LONG_DURATION));
            }
        } else {
            faults.inject_rounds_with_victims(
                RoundSample::OneRound,
                &victims,
                Fault::Pause(LONG_DURATION),
            );
        }
    });
}

/// The pause lasts until the hosts are lost. All victims of a round are paused at the same time.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_rolls_back_when_paused_host_is_lost() {
    with_jobs(&[SHORT_LEASE_ENV], 14, |faults| {
        let victims = [Victim::WorkerDaemon, Victim::WorkerTasker];
        faults.inject_rounds_with_victims(
            RoundSample::OneRound,
            &victims,
            Fault::Pause(FaultEnd::LossHandled),
        );
    });
}

/// While the master is paused, all other hosts consider it lost and end. The resumed master finds
/// that all other hosts are lost.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn jobs_roll_back_when_master_loses_all_hosts() {
    with_jobs(&[SHORT_LEASE_ENV], 15, |faults| {
        faults.inject_rounds(
            RoundSample::OneRound,
            Victim::MasterDaemon,
            Fault::Pause(FaultEnd::LossHandled),
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn short_disconnection_has_no_effect() {
    with_jobs(&[], 16, |faults| {
        faults.inject_rounds(
            RoundSample::OneRound,
            Victim::WorkerDaemon,
            Fault::Disconnect(SHORT_DURATION),
        );
        faults.inject_rounds(
            RoundSample::OneRound,
            Victim::MasterDaemon,
            Fault::Disconnect(SHORT_DURATION),
        );
    });
}

/// Hosts are disconnected from the network until they are lost. In the last round the master is
/// disconnected, and loses all hosts.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_rolls_back_when_host_is_disconnected() {
    with_jobs(&[SHORT_LEASE_ENV], 18, |faults| {
        faults.inject_rounds(
            RoundSample::TwoRounds,
            Victim::WorkerDaemon,
            Fault::Disconnect(FaultEnd::LossHandled),
        );
        faults.inject_rounds(
            RoundSample::OneRound,
            Victim::MasterDaemon,
            Fault::Disconnect(FaultEnd::LossHandled),
        );
    });
}
