//! Faults during checkpoints and restarts, with real processes.
//!
//! After each fault the job makes progress, or has rolled back to its newest checkpoint. A restart
//! has started the whole job or nothing and can be repeated. No task runs twice, no message is
//! lost, and no files or processes remain. Each fault is tried at some points, chosen by a seed;
//! with `SEMPA_TEST_FULL=1` at all of them.

use sempa_tests::checkpoint_steps::{
    CheckpointFaults, HOSTS, Sampling, Victim, all_rounds, daemon_points,
};
use sempa_tests::fake_criu;
use sempa_tests::faults::{BRIEF, Fault, LONGER, SHORT_LEASE, Until, is_full};
use sempa_tests::needs::testbed_with_own_engine;
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Testbed, Vm};

fn start<'a>(bed: &'a Testbed, env: &[(&str, &str)]) -> Vm<'a> {
    let settings = Settings {
        rm: Some("pvm-rm".into()),
        env: Settings::env_of(env),
        ..Settings::default()
    };
    Vm::start(bed, settings).expect("a virtual machine")
}

/// Runs jobs that must finish with the right result in spite of the faults that `test` injects.
fn with_jobs(env: &[(&str, &str)], offset: usize, test: impl FnOnce(&mut CheckpointFaults<'_>)) {
    let bed = testbed_with_own_engine(HOSTS);
    fake_criu::install(&bed);
    let vm = start(&bed, env);
    let mut faults = CheckpointFaults::start(&vm, offset).sure(&vm);
    test(&mut faults);
    faults.finish();
    vm.halt().expect("halts");
}

/// Faults meet checkpoints and restarts at each point that these reach, and at no other one: a new
/// step must be added to the points that are tried.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn faults_meet_checkpoints_at_each_point() {
    with_jobs(&[], 0, |faults| {
        let reached = faults.undisturbed().expect("no fault");
        let tried = reached
            .each_ref()
            .map(|(operation, _)| (*operation, daemon_points(*operation)));
        assert_eq!(tried, reached);
    });
}

/// After the kill of any victim the job makes progress or rolls back, and a restart has happened or
/// can be repeated.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_kill_during_a_checkpoint_costs_no_job() {
    with_jobs(&[], 0, |faults| {
        faults.run(Sampling::Half, Victim::ResourceManager, Fault::Kill);
        for victim in [Victim::Tasker, Victim::Engine, Victim::Host] {
            faults.run(Sampling::Both, victim, Fault::Kill);
        }
        assert!(faults.engines() > 0, "no engine was hit");
    });
}

/// When the master is killed, the next virtual machine restarts the jobs from their newest
/// checkpoints.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn jobs_restart_after_the_master_was_killed() {
    let bed = testbed_with_own_engine(HOSTS);
    fake_criu::install(&bed);
    for offset in 4..if is_full() { 4 + all_rounds() } else { 5 } {
        let vm = start(&bed, &[SHORT_LEASE]);
        let mut faults = CheckpointFaults::start(&vm, offset).sure(&vm);
        faults.kill_master().sure(&vm);
        let vm = start(&bed, &[SHORT_LEASE]);
        faults.start_again(&vm).sure(&vm).finish();
        vm.halt().expect("halts");
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_brief_pause_during_a_checkpoint_costs_nothing() {
    let pause = Fault::Pause(BRIEF);
    with_jobs(&[], 6, |faults| {
        for victim in [Victim::Host, Victim::Master, Victim::Tasker, Victim::Engine] {
            faults.run(Sampling::Half, victim, pause);
        }
        faults.run(Sampling::Half, Victim::ResourceManager, pause);
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_longer_pause_during_a_checkpoint_costs_nothing() {
    with_jobs(&[], 11, |faults| {
        let victims = [Victim::Host, Victim::Tasker, Victim::Master];
        if is_full() {
            for victim in victims {
                faults.run(Sampling::Half, victim, Fault::Pause(LONGER));
            }
        } else {
            faults.run_mixed(Sampling::Half, &victims, Fault::Pause(LONGER));
        }
    });
}

/// A pause that lasts until the hosts are lost. Those of one round are paused together.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_goes_back_when_a_paused_host_is_lost() {
    with_jobs(&[SHORT_LEASE], 14, |faults| {
        let victims = [Victim::Host, Victim::Tasker];
        faults.run_mixed(Sampling::Half, &victims, Fault::Pause(Until::Noticed));
    });
}

/// All other hosts give a paused master up and end, and it finds them lost.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn jobs_go_back_when_a_paused_master_loses_all_hosts() {
    with_jobs(&[SHORT_LEASE], 15, |faults| {
        faults.run(Sampling::Half, Victim::Master, Fault::Pause(Until::Noticed));
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_brief_cut_during_a_checkpoint_costs_nothing() {
    with_jobs(&[], 16, |faults| {
        faults.run(Sampling::Half, Victim::Host, Fault::Cut(BRIEF));
        faults.run(Sampling::Half, Victim::Master, Fault::Cut(BRIEF));
    });
}

/// Hosts that are off the network until they are lost, and a master that loses all hosts that way.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_goes_back_when_a_host_is_cut_off() {
    with_jobs(&[SHORT_LEASE], 18, |faults| {
        faults.run(Sampling::Both, Victim::Host, Fault::Cut(Until::Noticed));
        faults.run(Sampling::Half, Victim::Master, Fault::Cut(Until::Noticed));
    });
}
