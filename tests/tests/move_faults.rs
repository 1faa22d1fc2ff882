//! A fault at the end of each step of a move, with real processes: the task ends up running exactly once, or, when its only
//! host was lost, is known to have ended; it never runs twice, and no message is lost.
//!
//! The steps are those of the protocol, so a new one is tried by itself.

use sempa_proto::migration::Step;
use sempa_tests::needs::testbed_with_own_engine;
use sempa_tests::steps::{Cell, Fault, HOSTS, Rounds, Whom, nobody_is_left, rounds};
use sempa_tests::testbed::gone;
use sempa_tests::vm::Settings;
use sempa_tests::{Testbed, Vm};
use std::time::Duration;

/// Silence after which a host is lost, where hosts are to be lost.
const LEASE: Duration = Duration::from_secs(5);
/// Longer than that.
const UNTIL_LOST: Duration = Duration::from_secs(8);
const A_MOMENT: Duration = Duration::from_secs(1);
const A_WHILE: Duration = Duration::from_secs(5);
/// Longer than the usual silence.
const VERY_LONG: Duration = Duration::from_secs(30);
const SOON: Duration = Duration::from_secs(60);

fn with_rounds(bed: &Testbed, lease: Option<Duration>, test: impl FnOnce(&Vm<'_>, &mut Rounds<'_>)) {
    let env = lease.map(|lease| ("SEMPA_LEASE_MS".to_string(), lease.as_millis().to_string())).into_iter().collect();
    let settings = Settings { rm: Some("pvm-rm".into()), env, ..Settings::default() };
    let vm = Vm::start(bed, settings).expect("a virtual machine");
    let mut rounds = Rounds::new(&vm).expect("a director");
    test(&vm, &mut rounds);
}

/// A fault at the end of each of these steps; panics if a move ends otherwise than it may.
fn strike_at(rounds: &mut Rounds<'_>, steps: &[Step], whom: Whom, fault: Fault, may_be_lost: impl Fn(&Cell) -> bool) {
    let vm = rounds.vm;
    let done = rounds.hold(steps).and_then(|cells| {
        rounds.strike(&cells, whom, fault)?;
        rounds.judge(cells, may_be_lost)
    });
    match done {
        Ok(alive) => eprintln!("{whom:?}, {fault:?}, {steps:?}: {alive} live on"),
        Err(error) => panic!("{whom:?}, {fault:?}: {error:#}\n{}", vm.logs()),
    }
}

/// The same at the end of every step.
fn strike(rounds: &mut Rounds<'_>, whom: Whom, fault: Fault, may_be_lost: impl Fn(&Cell) -> bool) {
    for steps in self::rounds() {
        strike_at(rounds, &steps, whom, fault, &may_be_lost);
    }
}

/// The master may hear that the source is lost before it hears that the target has the whole task.
fn only_source_has_it(cell: &Cell) -> bool {
    cell.step < Step::Restore
}

/// A tasker's death is heard at once, also before the commit that is just due.
fn not_committed(cell: &Cell) -> bool {
    cell.step < Step::Commit
}

/// From the order to give the source's copy up on, there is no way back.
fn only_target_has_it(cell: &Cell) -> bool {
    cell.step >= Step::Commit
}

fn never(_: &Cell) -> bool {
    false
}

#[test]
fn whoever_is_killed_at_whatever_step_the_task_runs_once_or_is_known_to_have_ended() {
    let Some((bed, _)) = testbed_with_own_engine(HOSTS) else { return };
    with_rounds(&bed, Some(LEASE), |vm, rounds| {
        strike(rounds, Whom::ResourceManager, Fault::Kill, never);
        strike(rounds, Whom::SourceTasker, Fault::Kill, not_committed);
        strike(rounds, Whom::TargetTasker, Fault::Kill, only_target_has_it);
        strike(rounds, Whom::Source, Fault::Kill, only_source_has_it);
        strike(rounds, Whom::Target, Fault::Kill, only_target_has_it);
        vm.halt().expect("halts");
    });
    for steps in rounds() {
        with_rounds(&bed, Some(LEASE), |vm, rounds| {
            let cells = rounds.hold(&steps).unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()));
            rounds.strike(&cells, Whom::Master, Fault::Kill).expect("killed");
            nobody_is_left(rounds).expect("all end with their master");
            for cell in &cells {
                rounds.witnesses.ran_once(&cell.name).expect("it ran once");
            }
        });
    }
    with_rounds(&bed, None, |vm, _| vm.halt().expect("the next virtual machine starts and halts"));
}

#[test]
fn whoever_stands_still_for_a_moment_at_whatever_step_the_move_goes_on_or_the_task_does() {
    let Some((bed, _)) = testbed_with_own_engine(HOSTS) else { return };
    with_rounds(&bed, None, |vm, rounds| {
        let all =
            [Whom::Source, Whom::Target, Whom::SourceTasker, Whom::TargetTasker, Whom::ResourceManager, Whom::Master];
        for whom in all {
            strike(rounds, whom, Fault::Stop(A_MOMENT), never);
        }
        vm.halt().expect("halts");
    });
}

#[test]
fn whoever_stands_still_for_long_at_whatever_step_the_task_runs_once_or_is_known_to_have_ended() {
    let Some((bed, _)) = testbed_with_own_engine(HOSTS) else { return };
    with_rounds(&bed, None, |vm, rounds| {
        for whom in [Whom::Source, Whom::Target, Whom::Master] {
            strike(rounds, whom, Fault::Stop(A_WHILE), never);
        }
        // So long that daemons are lost: each step before the commit with one of those who have a part in it.
        let cells = rounds.hold(&self::rounds()[0]).unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()));
        let parts = [Whom::Source, Whom::SourceTasker, Whom::Target, Whom::TargetTasker];
        let each: Vec<(&Cell, Whom)> = cells.iter().zip(parts.into_iter().cycle()).collect();
        let lost: Vec<Step> =
            each.iter().filter(|(_, whom)| *whom == Whom::Source).map(|(cell, _)| cell.step).collect();
        rounds.strike_each(&each, Fault::Stop(VERY_LONG)).expect("stopped");
        drop(each);
        let alive = rounds.judge(cells, |cell| lost.contains(&cell.step));
        eprintln!("30 s: {} live on", alive.unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs())));
        vm.halt().expect("halts");
    });
}

#[test]
fn whoever_is_cut_off_at_whatever_step_the_task_runs_once_or_is_known_to_have_ended() {
    let Some((bed, _)) = testbed_with_own_engine(HOSTS) else { return };
    with_rounds(&bed, Some(LEASE), |vm, rounds| {
        for whom in [Whom::Source, Whom::Target] {
            strike(rounds, whom, Fault::Cut(A_MOMENT), never);
        }
        strike(rounds, Whom::Source, Fault::Part(A_MOMENT), never);
        strike(rounds, Whom::Source, Fault::Part(UNTIL_LOST), never);
        strike(rounds, Whom::Source, Fault::Cut(UNTIL_LOST), only_source_has_it);
        strike(rounds, Whom::Target, Fault::Cut(UNTIL_LOST), only_target_has_it);
        let cells = rounds.hold(&self::rounds()[0]).unwrap_or_else(|error| panic!("{error:#}\n{}", vm.logs()));
        rounds.strike(&cells, Whom::Master, Fault::Cut(UNTIL_LOST)).expect("cut off");
        // Each of the others has lost its master, and the master all others.
        for host in &bed.hosts()[1..] {
            gone(host, "pvm", SOON).expect("it ends with its master");
        }
        for cell in &cells {
            rounds.witnesses.ran_once(&cell.name).expect("it ran once");
        }
        vm.halt().expect("halts");
    });
}
