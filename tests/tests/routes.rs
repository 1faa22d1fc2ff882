//! Migrations of tasks that exchange messages on direct routes: on rings within a host, on
//! connections between two hosts, and on both in turn. With `SEMPA_TEST_FULL=1` there are as many
//! migrations and faults as in the tests of the default route.

use sempa_proto::event::EventKind;
use sempa_tests::crowd::Crowd;
use sempa_tests::faults::{BRIEF, Fault, SHORT_LEASE, Until, is_full};
use sempa_tests::move_steps::{HOSTS, MoveFaults, Sampling, Victim, may_be_lost};
use sempa_tests::needs::{testbed, testbed_with_own_engine};
use sempa_tests::oracle::Oracle;
use sempa_tests::rng::Rng;
use sempa_tests::speaker::Speaker;
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Vm};
use std::collections::HashMap;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
const WORKERS: usize = 6;
const ALL: [usize; WORKERS] = [0, 1, 2, 3, 4, 5];

/// Returns `all` if all cases are requested, otherwise `few`.
fn times(few: usize, all: usize) -> usize {
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

fn finish(vm: &Vm<'_>, crowd: Crowd) {
    crowd.all_in_place(vm).sure(vm);
    let account = crowd.finish().sure(vm);
    assert!(account.is_good(), "{account:?}\n{}", vm.logs());
    eprintln!("{account:?}");
}

/// Starts all workers on `hosts` and migrates random workers to the hosts `to`, one after another.
/// Before each migration, all routes of the previously migrated worker are restored.
fn moved_with_routes(vm: &Vm<'_>, hosts: &[&str], to: &[&str], moves: usize) {
    let mut crowd = Crowd::start(vm, WORKERS, 0, &["-d"], hosts).sure(vm);
    let mut had = crowd.have_routes(&ALL, &HashMap::new()).sure(vm);
    let mut rng = Rng::new(17);
    for number in 0..moves {
        let who = rng.below(WORKERS);
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
        crowd.move_one(vm, who, host).sure(vm);
        had = crowd.have_routes(&[who], &had).sure(vm);
    }
    finish(vm, crowd);
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn rings_deliver_once_when_tasks_separate_and_rejoin() {
    with_hosts(2, |vm, hosts| {
        moved_with_routes(vm, &hosts[1..], hosts, times(10, 50));
    });
}

/// Three tasks migrate at the same time, while routes are made and closed on all hosts.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn direct_routes_deliver_once_in_parallel_moves() {
    with_hosts(3, |vm, hosts| {
        let mut crowd = Crowd::start(vm, 2 * WORKERS, 2, &["-d"], hosts).sure(vm);
        let mut rng = Rng::new(23);
        for _ in 0..times(4, 12) {
            crowd.move_some(vm, &mut rng, 3).sure(vm);
        }
        finish(vm, crowd);
    });
}

/// The guests of a host are stopped, some migrate while they are stopped, and all are resumed. They
/// have rings to guests on the same host, and connections to those on other hosts.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn direct_routes_deliver_once_to_stopped_guests() {
    with_hosts(2, |vm, hosts| {
        let mut owner = Speaker::new(vm, vm.bed().host(2), env!("CARGO_BIN_EXE_owner-speaks"));
        let mut crowd = Crowd::start(vm, WORKERS, 0, &["-d"], &hosts[1..]).sure(vm);
        crowd.have_routes(&ALL, &HashMap::new()).sure(vm);
        let mut rng = Rng::new(29);
        for number in 0..times(4, 16) {
            owner.say(&format!("stop number {number}"));
            let told = |kind: &EventKind| matches!(kind, EventKind::GuestsPaused { why, .. } if *why == format!("number {number}"));
            vm.event(TIMEOUT, "stopped guests", |entry| told(&entry.kind))
                .sure(vm);
            let there: Vec<usize> = ALL
                .into_iter()
                .filter(|who| crowd.workers[*who].1 == "h2")
                .collect();
            let leaves = there[rng.below(there.len())];
            crowd.move_one(vm, leaves, "h1").sure(vm);
            owner.say("welcome nobody is there");
            crowd.move_one(vm, leaves, "h2").sure(vm);
        }
        finish(vm, crowd);
    });
}

/// Runs `test` with migrations that use direct routes. `home` is the host from which all tasks
/// migrate, if it is always the same one; the director runs on that host.
fn with_faults(env: &[(&str, &str)], home: Option<usize>, test: impl FnOnce(&mut MoveFaults<'_>)) {
    let bed = testbed_with_own_engine(HOSTS);
    let settings = Settings {
        env: Settings::env_of(env),
        ..Settings::default()
    };
    let vm = Vm::start(&bed, settings).expect("a virtual machine");
    if let Some(home) = home {
        vm.add(&[bed.host(home).name()]).expect("it joins");
    }
    let oracle = Oracle::start_on(&vm, home.unwrap_or(1), true).sure(&vm);
    let mut faults = MoveFaults::with(&vm, oracle, may_be_lost, home).sure(&vm);
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
            faults.run(Sampling::EachThirdStep, ends, Fault::Pause(BRIEF));
            faults.run(
                Sampling::EachThirdStep,
                &ends[..1],
                Fault::Part(Until::Noticed),
            );
            faults.run(Sampling::EachThirdStep, ends, Fault::Cut(Until::Noticed));
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
        faults.run(Sampling::EachThirdStep, &ends, Fault::Pause(BRIEF));
        if is_full() {
            faults.run(Sampling::EachThirdStep, &ends[..1], Fault::Part(BRIEF));
        }
    });
}
