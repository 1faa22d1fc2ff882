//! Faults during checkpoints and restarts of jobs, with real processes.
//!
//! After each fault the job makes progress, or has rolled back to its newest checkpoint. A restart
//! has started the whole job, or nothing; in that case it can be repeated. No task runs twice, no
//! message is lost, and no files or processes remain. Each fault is tried at some points, which a
//! seed selects; with `SEMPA_TEST_FULL=1` it is tried at all points.

use sempa_tests::checkpoint_steps::{
    CheckpointFaults, HOST_COUNT, Sampling, Victim, daemon_points, full_round_count,
};
use sempa_tests::fake_criu;
use sempa_tests::faults::{Fault, LONG_FAULT, SHORT_FAULT, SHORT_LEASE, Until, is_full};
use sempa_tests::requirements::testbed_with_own_engine;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm};

fn start<'a>(bed: &'a Testbed, env: &[(&str, &str)]) -> Vm<'a> {
    let settings = Settings {
        rm: Some("pvm-rm".into()),
        env: Settings::env_of(env),
        ..Settings::default()
    };
    Vm::start(bed, settings).expect("a virtual machine")
}

/// Starts jobs and calls `test`, which injects faults. Then all jobs must finish with the correct
/// result.
fn with_jobs(env: &[(&str, &str)], offset: usize, test: impl FnOnce(&mut CheckpointFaults<'_>)) {
    let bed = testbed_with_own_engine(HOST_COUNT);
    fake_criu::install(&bed);
    let vm = start(&bed, env);
    let mut faults = CheckpointFaults::start(&vm, offset).or_panic_with_logs(&vm);
    test(&mut faults);
    faults.finish();
    vm.halt().expect("halts");
}

/// The points that checkpoints and restarts reach are exactly those at which the tests inject
/// faults. If a step is added to a checkpoint, its points must be added to the list.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn all_points_of_checkpoints_are_tried() {
    with_jobs(&[], 0, |faults| {
        let reached = faults.run_without_fault().expect("no fault");
        let tried = reached
            .each_ref()
            .map(|(operation, _)| (*operation, daemon_points(*operation)));
        assert_eq!(tried, reached);
    });
}

/// After the kill of any victim the job makes progress or rolls back. A restart succeeds, or can be
/// repeated.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn no_job_is_lost_after_kill_during_checkpoint() {
    with_jobs(&[], 0, |faults| {
        faults.run(Sampling::OneRound, Victim::ResourceManager, Fault::Kill);
        for victim in [Victim::OwnTasker, Victim::Engine, Victim::OwnDaemon] {
            faults.run(Sampling::TwoRounds, victim, Fault::Kill);
        }
        assert!(faults.engines() > 0, "no engine was hit");
    });
}

/// After the master was killed, the next virtual machine restarts the jobs from their newest
/// checkpoints.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn jobs_restart_after_the_master_was_killed() {
    let bed = testbed_with_own_engine(HOST_COUNT);
    fake_criu::install(&bed);
    for offset in 4..if is_full() { 4 + full_round_count() } else { 5 } {
        let vm = start(&bed, &[SHORT_LEASE]);
        let mut faults = CheckpointFaults::start(&vm, offset).or_panic_with_logs(&vm);
        faults.kill_master().or_panic_with_logs(&vm);
        let vm = start(&bed, &[SHORT_LEASE]);
        faults.restart_jobs(&vm).or_panic_with_logs(&vm).finish();
        vm.halt().expect("halts");
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn short_pause_during_checkpoint_has_no_effect() {
    let pause = Fault::Pause(SHORT_FAULT);
    with_jobs(&[], 6, |faults| {
        for victim in [
            Victim::OwnDaemon,
            Victim::Master,
            Victim::OwnTasker,
            Victim::Engine,
        ] {
            faults.run(Sampling::OneRound, victim, pause);
        }
        faults.run(Sampling::OneRound, Victim::ResourceManager, pause);
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn long_pause_during_checkpoint_has_no_effect() {
    with_jobs(&[], 11, |faults| {
        let victims = [Victim::OwnDaemon, Victim::OwnTasker, Victim::Master];
        if is_full() {
            for victim in victims {
                faults.run(Sampling::OneRound, victim, Fault::Pause(LONG_FAULT));
            }
        } else {
            faults.run_mixed(Sampling::OneRound, &victims, Fault::Pause(LONG_FAULT));
        }
    });
}

/// The pause lasts until the hosts are lost. All victims of a round are paused at the same time.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_rolls_back_when_paused_host_is_lost() {
    with_jobs(&[SHORT_LEASE], 14, |faults| {
        let victims = [Victim::OwnDaemon, Victim::OwnTasker];
        faults.run_mixed(Sampling::OneRound, &victims, Fault::Pause(Until::Noticed));
    });
}

/// All other hosts lose a paused master and end, and the resumed master finds them lost.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn jobs_roll_back_when_master_loses_all_hosts() {
    with_jobs(&[SHORT_LEASE], 15, |faults| {
        faults.run(
            Sampling::OneRound,
            Victim::Master,
            Fault::Pause(Until::Noticed),
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn short_disconnection_has_no_effect() {
    with_jobs(&[], 16, |faults| {
        faults.run(
            Sampling::OneRound,
            Victim::OwnDaemon,
            Fault::Disconnect(SHORT_FAULT),
        );
        faults.run(
            Sampling::OneRound,
            Victim::Master,
            Fault::Disconnect(SHORT_FAULT),
        );
    });
}

/// Hosts are disconnected from the network until they are lost. In the last round the master is
/// disconnected, and loses all hosts.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_rolls_back_when_host_is_disconnected() {
    with_jobs(&[SHORT_LEASE], 18, |faults| {
        faults.run(
            Sampling::TwoRounds,
            Victim::OwnDaemon,
            Fault::Disconnect(Until::Noticed),
        );
        faults.run(
            Sampling::OneRound,
            Victim::Master,
            Fault::Disconnect(Until::Noticed),
        );
    });
}
