//! A fault before each step of a move and at its end, with real processes: the task ends up running exactly once, or, when its
//! only host was lost, is known to have ended; it never runs twice, and no message is lost.
//!
//! The steps are those of the protocol, so a new one is tried by itself. The faults share the places out among themselves; with
//! `SEMPA_TEST_FULL=1` each is tried at each place.

use sempa_tests::needs::testbed_with_own_engine;
use sempa_tests::steps::{
    A_MOMENT, A_WHILE, Cell, Fault, HOSTS, Point, Rounds, Share, UNTIL_LOST, VERY_LONG, Whom,
    is_full, never, nobody_is_left, not_committed, only_source_has_it, only_target_has_it, places,
    strike,
};
use sempa_tests::testbed::gone;
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Testbed, Vm};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);

fn with_rounds(bed: &Testbed, test: impl FnOnce(&Vm<'_>, &mut Rounds<'_>)) {
    let settings = Settings {
        rm: Some("pvm-rm".into()),
        ..Settings::default()
    };
    let vm = Vm::start(bed, settings).expect("a virtual machine");
    let mut rounds = Rounds::new(&vm).expect("a director");
    test(&vm, &mut rounds);
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn whoever_is_killed_at_whatever_step_the_task_runs_once_or_is_known_to_have_ended() {
    let bed = testbed_with_own_engine(HOSTS);
    with_rounds(&bed, |vm, rounds| {
        strike(
            rounds,
            Share::Half,
            Whom::ResourceManager,
            Fault::Kill,
            never,
        );
        strike(
            rounds,
            Share::Half,
            Whom::SourceTasker,
            Fault::Kill,
            not_committed,
        );
        strike(
            rounds,
            Share::Half,
            Whom::TargetTasker,
            Fault::Kill,
            only_target_has_it,
        );
        strike(
            rounds,
            Share::Half,
            Whom::Source,
            Fault::Kill,
            only_source_has_it,
        );
        strike(
            rounds,
            Share::Half,
            Whom::Target,
            Fault::Kill,
            only_target_has_it,
        );
        vm.halt().expect("halts");
    });
    for at in places(Share::Half) {
        with_rounds(&bed, |vm, rounds| {
            let cells = rounds.hold(&at).sure(vm);
            rounds
                .strike(&cells, Whom::Master, Fault::Kill)
                .expect("killed");
            all_end_with_the_master(rounds, &cells);
        });
    }
    with_rounds(&bed, |vm, _| {
        vm.halt()
            .expect("the next virtual machine starts and halts")
    });
}

fn all_end_with_the_master(rounds: &Rounds<'_>, cells: &[Cell]) {
    nobody_is_left(rounds).expect("all end with their master");
    for cell in cells {
        rounds.witnesses.ran_once(&cell.name).expect("it ran once");
    }
}

/// All that can be stopped for a while without anybody being lost.
const ALL: [Whom; 6] = [
    Whom::Source,
    Whom::Target,
    Whom::SourceTasker,
    Whom::TargetTasker,
    Whom::ResourceManager,
    Whom::Master,
];

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn whoever_stands_still_for_a_moment_at_whatever_step_the_move_goes_on_or_the_task_does() {
    let bed = testbed_with_own_engine(HOSTS);
    with_rounds(&bed, |vm, rounds| {
        for whom in ALL {
            strike(rounds, Share::Half, whom, Fault::Stop(A_MOMENT), never);
        }
        vm.halt().expect("halts");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn whoever_stands_still_for_a_while_at_whatever_step_the_task_runs_once() {
    let bed = testbed_with_own_engine(HOSTS);
    with_rounds(&bed, |vm, rounds| {
        for whom in ALL {
            strike(rounds, Share::Few, whom, Fault::Stop(A_WHILE), never);
        }
        vm.halt().expect("halts");
    });
}

/// So long that daemons are lost. Those of one round are stopped together.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn whoever_stands_still_for_long_at_whatever_step_the_task_runs_once_or_is_known_to_have_ended() {
    let bed = testbed_with_own_engine(HOSTS);
    let parts = [
        Whom::Source,
        Whom::SourceTasker,
        Whom::Target,
        Whom::TargetTasker,
        Whom::ResourceManager,
    ];
    let may_be_lost = |cell: &Cell, whom: Whom| match whom {
        Whom::Source => only_source_has_it(cell),
        Whom::Target => only_target_has_it(cell),
        _ => false,
    };
    with_rounds(&bed, |vm, rounds| {
        for turn in 0..if is_full() { parts.len() } else { 1 } {
            for (n, at) in rounds.next(Share::Few).into_iter().enumerate() {
                let cells = rounds.hold(&at).sure(vm);
                let mut whom = parts.into_iter().cycle().skip(turn + n);
                let each: Vec<(&Cell, Whom)> = cells
                    .iter()
                    .map(|cell| (cell, whom.next().expect("a circle")))
                    .collect();
                let lost: Vec<Point> = each
                    .iter()
                    .filter(|(cell, whom)| may_be_lost(cell, *whom))
                    .map(|(cell, _)| cell.point)
                    .collect();
                rounds
                    .strike_each(&each, Fault::Stop(VERY_LONG))
                    .expect("stopped");
                drop(each);
                let alive = rounds.judge(cells, |cell| lost.contains(&cell.point));
                eprintln!("30 s, {at:?}: {} live on", alive.sure(vm));
            }
        }
        vm.halt().expect("halts");
    });
    // All others give a master up that says nothing for so long; it finds none of them.
    with_rounds(&bed, |vm, rounds| {
        let at = rounds.next(Share::Few).swap_remove(0);
        let cells = rounds.hold(&at).sure(vm);
        rounds
            .strike(&cells, Whom::Master, Fault::Stop(VERY_LONG))
            .expect("stopped");
        all_but_the_master_end(&bed, rounds, &cells);
        vm.halt().expect("halts");
    });
}

/// Each of the others has lost its master, and the master all others.
fn all_but_the_master_end(bed: &Testbed, rounds: &Rounds<'_>, cells: &[Cell]) {
    for host in &bed.hosts()[1..] {
        gone(host, "pvm", SOON).expect("it ends with its master");
    }
    for cell in cells {
        rounds.witnesses.ran_once(&cell.name).expect("it ran once");
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn whoever_is_cut_off_at_whatever_step_the_task_runs_once_or_is_known_to_have_ended() {
    let bed = testbed_with_own_engine(HOSTS);
    with_rounds(&bed, |vm, rounds| {
        for whom in [Whom::Source, Whom::Target, Whom::Master] {
            strike(rounds, Share::Few, whom, Fault::Cut(A_MOMENT), never);
        }
        strike(
            rounds,
            Share::Few,
            Whom::Source,
            Fault::Part(A_MOMENT),
            never,
        );
        strike(
            rounds,
            Share::Half,
            Whom::Source,
            Fault::Part(UNTIL_LOST),
            never,
        );
        strike(
            rounds,
            Share::Half,
            Whom::Source,
            Fault::Cut(UNTIL_LOST),
            only_source_has_it,
        );
        strike(
            rounds,
            Share::Half,
            Whom::Target,
            Fault::Cut(UNTIL_LOST),
            only_target_has_it,
        );
        let at = rounds.next(Share::Half).swap_remove(0);
        let cells = rounds.hold(&at).sure(vm);
        rounds
            .strike(&cells, Whom::Master, Fault::Cut(UNTIL_LOST))
            .expect("cut off");
        all_but_the_master_end(&bed, rounds, &cells);
        vm.halt().expect("halts");
    });
}
