//! What holds for tasks that talk through their daemons holds on the other routes, too: rings on one host, direct connections
//! between two, and both in turn when tasks are moved. Some of the moves and steps that the default route is tried with;
//! as many as there with `SEMPA_TEST_FULL=1`.

use sempa_proto::event::EventKind;
use sempa_tests::crowd::Crowd;
use sempa_tests::dice::Dice;
use sempa_tests::needs::{testbed, testbed_with_own_engine};
use sempa_tests::speaker::Speaker;
use sempa_tests::steps::{
    A_MOMENT, Cell, Fault, HOSTS, Rounds, Share, UNTIL_LOST, Whom, is_full, never, not_committed,
    only_source_has_it, only_target_has_it, strike, strike_at,
};
use sempa_tests::vm::Settings;
use sempa_tests::witnesses::Witnesses;
use sempa_tests::{Sure, Testbed, Vm};
use std::collections::HashMap;
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
const WORKERS: usize = 6;
const EVERYBODY: [usize; WORKERS] = [0, 1, 2, 3, 4, 5];

/// `few`, or `all` if everything is to be tried.
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

/// All workers begin on `hosts`, and are moved among those that there are, one after the other, each when all have their
/// routes again.
fn moved_with_routes(vm: &Vm<'_>, hosts: &[&str], to: &[&str], moves: usize) {
    let mut crowd = Crowd::start(vm, WORKERS, 0, &["-d"], hosts).sure(vm);
    let mut had = crowd.have_routes(&EVERYBODY, &HashMap::new()).sure(vm);
    let mut dice = Dice::new(17);
    for number in 0..moves {
        let who = dice.below(WORKERS);
        let others: Vec<&str> = to
            .iter()
            .copied()
            .filter(|name| *name != crowd.workers[who].1)
            .collect();
        let host = others[dice.below(others.len())];
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
fn tasks_of_one_host_are_moved_apart_and_together_again_and_their_rings_lose_double_and_reorder_nothing()
 {
    with_hosts(2, |vm, hosts| {
        moved_with_routes(vm, &hosts[1..], hosts, times(10, 50))
    });
}

/// Several at a time, while routes are being made and end everywhere.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn crowds_with_direct_routes_are_moved_three_at_a_time_and_every_message_comes_once() {
    with_hosts(3, |vm, hosts| {
        let mut crowd = Crowd::start(vm, 2 * WORKERS, 2, &["-d"], hosts).sure(vm);
        let mut dice = Dice::new(23);
        for _ in 0..times(4, 12) {
            crowd.move_some(vm, &mut dice, 3).sure(vm);
        }
        finish(vm, crowd);
    });
}

/// The guests of a host are stopped, moved as they stand, and let go on: with rings among those that stay, and direct
/// connections to those that left.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn guests_with_rings_and_direct_routes_are_stopped_moved_and_go_on_and_every_message_comes_once() {
    with_hosts(2, |vm, hosts| {
        let mut owner = Speaker::new(vm, vm.bed().host(2), env!("CARGO_BIN_EXE_owner-speaks"));
        let mut crowd = Crowd::start(vm, WORKERS, 0, &["-d"], &hosts[1..]).sure(vm);
        crowd.have_routes(&EVERYBODY, &HashMap::new()).sure(vm);
        let mut dice = Dice::new(29);
        for number in 0..times(4, 16) {
            owner.say(&format!("stop number {number}"));
            let told = |kind: &EventKind| matches!(kind, EventKind::GuestsStopped { why, .. } if *why == format!("number {number}"));
            vm.event(SOON, "guests that stand still", |entry| told(&entry.kind))
                .sure(vm);
            let there: Vec<usize> = EVERYBODY
                .into_iter()
                .filter(|who| crowd.workers[*who].1 == "h2")
                .collect();
            let leaves = there[dice.below(there.len())];
            crowd.move_one(vm, leaves, "h1").sure(vm);
            owner.say("welcome nobody is there");
            crowd.move_one(vm, leaves, "h2").sure(vm);
        }
        finish(vm, crowd);
    });
}

fn with_rounds(bed: &Testbed, home: Option<usize>, test: impl FnOnce(&mut Rounds<'_>)) {
    let vm = Vm::start(bed, Settings::default()).expect("a virtual machine");
    if let Some(home) = home {
        vm.add(&[bed.host(home).name()]).expect("it joins");
    }
    let witnesses = Witnesses::start_on(&vm, home.unwrap_or(1), true).sure(&vm);
    let mut rounds = Rounds::with(&vm, witnesses, home).sure(&vm);
    test(&mut rounds);
    vm.halt().expect("halts");
}

/// Whether a fault at this place may cost the task.
type MayBeLost = fn(&Cell) -> bool;

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_with_a_direct_route_runs_once_or_is_known_to_have_ended_whatever_fails_at_whatever_step()
{
    let bed = testbed_with_own_engine(HOSTS);
    with_rounds(&bed, None, |rounds| {
        strike(
            rounds,
            Share::Few,
            Whom::TargetTasker,
            Fault::Kill,
            only_target_has_it,
        );
        strike(
            rounds,
            Share::Few,
            Whom::Source,
            Fault::Kill,
            only_source_has_it,
        );
        if is_full() {
            strike(
                rounds,
                Share::Few,
                Whom::SourceTasker,
                Fault::Kill,
                not_committed,
            );
            strike(
                rounds,
                Share::Few,
                Whom::Target,
                Fault::Kill,
                only_target_has_it,
            );
            strike(
                rounds,
                Share::Few,
                Whom::Target,
                Fault::Stop(A_MOMENT),
                never,
            );
            strike(
                rounds,
                Share::Few,
                Whom::Source,
                Fault::Part(UNTIL_LOST),
                never,
            );
            strike(
                rounds,
                Share::Few,
                Whom::Source,
                Fault::Cut(UNTIL_LOST),
                only_source_has_it,
            );
        }
    });
}

/// Whoever is moved leaves the host of its peer, with which it has a ring.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_with_a_ring_runs_once_or_is_known_to_have_ended_whatever_fails_at_whatever_step() {
    let bed = testbed_with_own_engine(HOSTS);
    with_rounds(&bed, Some(2), |rounds| {
        let faults: [(Whom, Fault, MayBeLost); 5] = [
            (Whom::TargetTasker, Fault::Kill, only_target_has_it),
            (Whom::Source, Fault::Stop(A_MOMENT), never),
            (Whom::Target, Fault::Kill, only_target_has_it),
            (Whom::Target, Fault::Stop(A_MOMENT), never),
            (Whom::Source, Fault::Part(A_MOMENT), never),
        ];
        for (whom, fault, may_be_lost) in faults.into_iter().take(times(3, 5)) {
            // All leave the same host, so one after the other.
            for point in rounds.next(Share::Few).into_iter().flatten() {
                strike_at(rounds, &[point], whom, fault, may_be_lost);
            }
        }
    });
}
