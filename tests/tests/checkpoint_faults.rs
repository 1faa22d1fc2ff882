//! A fault in the course of checkpoints and of restarts, with real processes: the job goes on, or has gone back to its newest set, or,
//! when it was to be started again, runs or does not, and may be started again; no task of it runs twice, no message is lost, and
//! nothing is left behind.
//!
//! The faults share the places out among themselves; with `SEMPA_TEST_FULL=1` each is tried at each place.

use sempa_tests::checkpoint_steps::{HOSTS, Jobs, Share, Whom, met, turns};
use sempa_tests::liar;
use sempa_tests::needs::testbed_with_own_engine;
use sempa_tests::strikes::{A_MOMENT, A_WHILE, Fault, UNTIL_LOST, VERY_LONG, is_full};
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Testbed, Vm};

fn start(bed: &Testbed) -> Vm<'_> {
    Vm::start(
        bed,
        Settings {
            rm: Some("pvm-rm".into()),
            ..Settings::default()
        },
    )
    .expect("a virtual machine")
}

/// Jobs that come to the right end whatever meets them. `turn`: which places the first fault meets.
fn with_jobs(turn: usize, test: impl FnOnce(&mut Jobs<'_>)) {
    let bed = testbed_with_own_engine(HOSTS);
    liar::put(&bed);
    let vm = start(&bed);
    let mut jobs = Jobs::start(&vm, turn).sure(&vm);
    test(&mut jobs);
    jobs.finish();
    vm.halt().expect("halts");
}

/// A step that comes to be one of theirs is to be met, too.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn faults_meet_checkpoints_and_restarts_at_each_place_that_these_come_to_and_at_no_other_one() {
    with_jobs(0, |jobs| {
        let passed = jobs.undisturbed().expect("nothing is in the way");
        assert_eq!(
            passed.each_ref().map(|(what, _)| (*what, met(*what))),
            passed
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn whoever_is_killed_the_job_goes_on_or_back_and_what_was_to_be_started_again_runs_once_or_may_be()
{
    with_jobs(0, |jobs| {
        jobs.strike(Share::Half, Whom::ResourceManager, Fault::Kill);
        for whom in [Whom::Tasker, Whom::Engine, Whom::Host] {
            jobs.strike(Share::Both, whom, Fault::Kill);
        }
        assert!(jobs.engines() > 0, "no engine was met");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn when_the_master_is_killed_the_next_virtual_machine_starts_the_newest_sets() {
    let bed = testbed_with_own_engine(HOSTS);
    liar::put(&bed);
    for turn in 4..if is_full() { 4 + turns() } else { 6 } {
        let vm = start(&bed);
        let mut jobs = Jobs::start(&vm, turn).sure(&vm);
        jobs.kill_master().sure(&vm);
        let vm = start(&bed);
        jobs.start_again(&vm).sure(&vm).finish();
        vm.halt().expect("halts");
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn whoever_stands_still_for_a_moment_the_job_goes_on() {
    with_jobs(6, |jobs| {
        for whom in [Whom::Host, Whom::Master, Whom::Tasker, Whom::Engine] {
            jobs.strike(Share::Both, whom, Fault::Stop(A_MOMENT));
        }
        jobs.strike(Share::Half, Whom::ResourceManager, Fault::Stop(A_MOMENT));
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn whoever_stands_still_for_a_while_the_job_goes_on() {
    with_jobs(11, |jobs| {
        for whom in [Whom::Host, Whom::Tasker, Whom::Master] {
            jobs.strike(Share::Half, whom, Fault::Stop(A_WHILE));
        }
    });
}

/// So long that hosts are lost. Those of one round are stopped together.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn whoever_stands_still_for_long_the_job_goes_on_or_back() {
    with_jobs(14, |jobs| {
        jobs.strike_those(
            Share::Half,
            &[Whom::Host, Whom::Tasker],
            Fault::Stop(VERY_LONG),
        )
    });
}

/// All others give it up and end, and are lost for it.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_master_that_stands_still_for_long_has_lost_all_hosts_and_the_jobs_go_back() {
    with_jobs(15, |jobs| {
        jobs.strike(Share::Half, Whom::Master, Fault::Stop(VERY_LONG))
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn whoever_is_cut_off_the_job_goes_on_or_back() {
    with_jobs(16, |jobs| {
        jobs.strike(Share::Half, Whom::Host, Fault::Cut(A_MOMENT));
        jobs.strike(Share::Half, Whom::Master, Fault::Cut(A_MOMENT));
        jobs.strike(Share::Both, Whom::Host, Fault::Cut(UNTIL_LOST));
        jobs.strike(Share::Half, Whom::Master, Fault::Cut(UNTIL_LOST));
    });
}
