//! Memory that follows a task (post-copy), between whole hosts: the task is there before its memory, is whole in the end, and
//! ends, known to all, if what it needs is lost on the way.

use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Step};
use sempa_tests::holders::{is_whole, reached, with_hosts};
use sempa_tests::needs::testbed_with_env;
use sempa_tests::steps::{
    A_MOMENT, A_WHILE, Cell, Edge, Fault, HOSTS, Rounds, Share, UNTIL_LOST, VERY_LONG, Whom, never,
    only_target_has_it, strike, strike_at,
};
use sempa_tests::testbed::gone;
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Testbed, Vm, eventually};
use std::time::Duration;

const SOON: Duration = Duration::from_secs(60);
/// Memory of a task, and what the images of it may have in bytes when that is not in them.
const MIB: &str = "80";
const IMAGES_MAX: u64 = 8 << 20;
/// Silence after which a host is lost, where one is to be lost soon.
const LEASE_MS: &str = "5000";
/// Memory follows tasks of any size, and goes ahead of them.
const ALWAYS: [(&str, &str); 2] = [("SEMPA_POST_COPY", "always"), ("SEMPA_PRE_COPY", "always")];
/// None goes ahead: it would be on its way for longer than the tests take.
const NOTHING_AHEAD: (&str, &str) = ("SEMPA_PRE_COPY", "never");
/// So slowly, in bytes per second, that memory is on its way for longer than any of these tests takes.
const SLOWLY: &str = "1000000";

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_large_task_leaves_its_memory_behind_is_whole_in_the_end_and_can_go_on_at_once() {
    with_hosts(3, &[], |vm| {
        let tid = vm.spawn(&["-h2", "hold", MIB]).expect("spawned");
        is_whole(vm, &tid);
        for host in ["h3", "h1", "h2"] {
            vm.must_migrate(&tid, host);
            is_whole(vm, &tid);
        }
        let events = vm.events().expect("events");
        let bytes = |kind: &EventKind| {
            if let EventKind::Moved { bytes, .. } = kind {
                Some(*bytes)
            } else {
                None
            }
        };
        let moved: Vec<u64> = events
            .iter()
            .filter_map(|entry| bytes(&entry.kind))
            .collect();
        assert_eq!(moved.len(), 3);
        assert!(
            moved.iter().all(|bytes| *bytes < IMAGES_MAX),
            "the memory is not in the images: {moved:?}"
        );
        gone(vm.bed().host(1), "lazy-pages", SOON).expect("nothing fetches any more");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn an_administrator_can_say_that_memory_never_follows() {
    with_hosts(2, &[("SEMPA_POST_COPY", "never")], |vm| {
        let tid = vm.spawn(&["-h1", "hold", MIB]).expect("spawned");
        is_whole(vm, &tid);
        vm.must_migrate(&tid, "h2");
        is_whole(vm, &tid);
        let took_all = |kind: &EventKind| matches!(kind, EventKind::Moved { bytes, .. } if *bytes > IMAGES_MAX);
        assert!(
            vm.events()
                .expect("events")
                .iter()
                .any(|entry| took_all(&entry.kind)),
            "its images have everything"
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_whose_memory_was_on_a_host_that_dies_ends_and_everybody_is_told_why() {
    let env = [
        ("SEMPA_LEASE_MS", LEASE_MS),
        ("SEMPA_MOVE_RATE", SLOWLY),
        NOTHING_AHEAD,
    ];
    with_hosts(3, &env, |vm| {
        let tid = vm.spawn(&["-h2", "hold", MIB]).expect("spawned");
        is_whole(vm, &tid);
        let moving = vm.start_migrate(&tid, "h3").expect("it begins");
        reached(vm, &tid, Step::Run);
        assert_eq!(vm.host_of(&tid).expect("it lives"), "h3");
        let again = vm.migrate(&tid, "h1").expect("the console runs");
        assert!(
            !again.good() && again.err.contains("being moved already"),
            "{again:?}"
        );
        vm.bed().host(2).kill_all();
        let lost = |kind: &EventKind| match kind {
            EventKind::MoveFailed {
                step: Step::Arrive,
                why: Failure::Images(why),
                ..
            } => why.contains("its memory does not come any more"),
            _ => false,
        };
        vm.event(SOON, "the reason", |entry| lost(&entry.kind))
            .sure(vm);
        let done = moving.finish(SOON).expect("the console ends");
        assert!(!done.good(), "{done:?}");
        eventually(SOON, || match vm.tasks() {
            Ok(tasks) if tasks.iter().all(|task| task.tid != tid) => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .expect("it has ended");
        gone(vm.bed().host(3), "lazy-pages", SOON).expect("nothing fetches any more");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_goes_back_to_its_checkpoint_when_the_host_dies_that_had_memory_of_it() {
    let env = [
        ("SEMPA_LEASE_MS", LEASE_MS),
        ("SEMPA_MOVE_RATE", SLOWLY),
        ALWAYS[0],
        NOTHING_AHEAD,
    ];
    with_hosts(3, &env, |vm| {
        // The checkpoint is no faster than the move.
        let tid = vm.spawn(&["-h2", "hold", "16"]).expect("spawned");
        is_whole(vm, &tid);
        let event = |what: &str, is: &dyn Fn(&EventKind) -> bool| {
            vm.event(SOON, what, |entry| is(&entry.kind)).sure(vm)
        };
        vm.json(&["checkpoint", "--every", "1h", &tid])
            .expect("a pace");
        event("a checkpoint", &|kind| {
            matches!(kind, EventKind::Checkpointed { .. })
        });
        let moving = vm.start_migrate(&tid, "h3").expect("it begins");
        reached(vm, &tid, Step::Run);
        vm.bed().host(2).kill_all();
        event("its end", &|kind| {
            matches!(
                kind,
                EventKind::MoveFailed {
                    step: Step::Arrive,
                    ..
                }
            )
        });
        event("a restart", &|kind| {
            matches!(kind, EventKind::Restarted { .. })
        });
        is_whole(vm, &tid);
        assert!(!moving.finish(SOON).expect("the console ends").good());
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_that_ends_while_its_memory_follows_has_moved_and_ended() {
    with_hosts(3, &[("SEMPA_MOVE_RATE", SLOWLY), NOTHING_AHEAD], |vm| {
        let tid = vm.spawn(&["-h2", "hold", MIB]).expect("spawned");
        is_whole(vm, &tid);
        let moving = vm.start_migrate(&tid, "h3").expect("it begins");
        reached(vm, &tid, Step::Run);
        vm.pvm(&["kill", &tid])
            .expect("the console runs")
            .expect_good("kill")
            .expect("killed");
        moving
            .finish(SOON)
            .expect("the console ends")
            .expect_good("migrate")
            .expect("it had moved");
        reached(vm, &tid, Step::Arrive);
        for host in [2, 3] {
            gone(vm.bed().host(host), "criu", SOON).expect("nothing is left of the engines");
        }
    });
}

/// Up to the last of the memory both hosts have a part of the task, and their taskers with them.
fn not_arrived(cell: &Cell) -> bool {
    cell.point < (Step::Arrive, Edge::After)
}

/// The target's tasker has to notice first, and the commit may be over by then.
fn restored(cell: &Cell) -> bool {
    cell.point >= (Step::Restore, Edge::After)
}

/// From the commit on memory is asked for, and the task ends when it is known that some of it does not come.
fn memory_is_on_its_way(cell: &Cell) -> bool {
    only_target_has_it(cell) && not_arrived(cell)
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn whoever_is_killed_at_whatever_step_a_task_whose_memory_follows_runs_once_or_is_known_to_have_ended()
 {
    let bed = testbed_with_env(HOSTS, &ALWAYS);
    with_rounds(&bed, |vm, all| {
        strike(
            all,
            Share::Half,
            Whom::SourceTasker,
            Fault::Kill,
            not_arrived,
        );
        strike(
            all,
            Share::Half,
            Whom::TargetTasker,
            Fault::Kill,
            only_target_has_it,
        );
        strike(all, Share::Half, Whom::Source, Fault::Kill, not_arrived);
        strike(
            all,
            Share::Half,
            Whom::Target,
            Fault::Kill,
            only_target_has_it,
        );
        strike(all, Share::Few, Whom::ResourceManager, Fault::Kill, never);
        vm.halt().expect("halts");
    });
}

/// The memory needs some seconds, so that whoever fetches it is still there at each of these places.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn when_what_fetches_its_memory_is_killed_or_stands_still_a_task_runs_once_or_is_known_to_have_ended()
 {
    let env = [ALWAYS[0], NOTHING_AHEAD, ("WITNESS_MIB", "3")];
    let bed = testbed_with_env(HOSTS, &env);
    with_rounds_and(
        &bed,
        &[ALWAYS[0], NOTHING_AHEAD, ("SEMPA_MOVE_RATE", SLOWLY)],
        |vm, all| {
            let late = [Step::Restore, Step::Commit, Step::KillSource, Step::Run]
                .map(|step| (step, Edge::After));
            for (fault, may_be_lost) in [
                (Fault::Kill, restored as fn(&Cell) -> bool),
                (Fault::Stop(A_MOMENT), never),
            ] {
                for point in late.into_iter().chain([(Step::Commit, Edge::Before)]) {
                    strike_at(all, &[point], Whom::TargetEngine, fault, may_be_lost);
                }
            }
            for point in [late[0], late[3]] {
                strike_at(
                    all,
                    &[point],
                    Whom::TargetEngine,
                    Fault::Stop(A_WHILE),
                    never,
                );
            }
            strike_at(
                all,
                &[late[1]],
                Whom::TargetEngine,
                Fault::Stop(VERY_LONG),
                restored,
            );
            assert!(all.engines() > 0, "no engine was met");
            vm.halt().expect("halts");
        },
    );
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn whoever_stands_still_at_whatever_step_a_task_whose_memory_follows_runs_once() {
    let bed = testbed_with_env(HOSTS, &ALWAYS);
    let whom = [
        Whom::Source,
        Whom::Target,
        Whom::Master,
        Whom::SourceTasker,
        Whom::TargetTasker,
        Whom::ResourceManager,
    ];
    with_rounds(&bed, |vm, all| {
        for whom in whom {
            strike(all, Share::Few, whom, Fault::Stop(A_MOMENT), never);
        }
        vm.halt().expect("halts");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn whoever_is_cut_off_at_whatever_step_a_task_whose_memory_follows_runs_once_or_is_known_to_have_ended()
 {
    let bed = testbed_with_env(HOSTS, &ALWAYS);
    with_rounds(&bed, |vm, all| {
        for whom in [Whom::Source, Whom::Target, Whom::Master] {
            strike(all, Share::Few, whom, Fault::Cut(A_MOMENT), never);
        }
        strike(all, Share::Few, Whom::Source, Fault::Part(A_MOMENT), never);
        strike(
            all,
            Share::Few,
            Whom::Source,
            Fault::Part(UNTIL_LOST),
            memory_is_on_its_way,
        );
        strike(
            all,
            Share::Few,
            Whom::Source,
            Fault::Cut(UNTIL_LOST),
            not_arrived,
        );
        strike(
            all,
            Share::Few,
            Whom::Target,
            Fault::Cut(UNTIL_LOST),
            only_target_has_it,
        );
        vm.halt().expect("halts");
    });
}

fn with_rounds(bed: &Testbed, test: impl FnOnce(&Vm<'_>, &mut Rounds<'_>)) {
    with_rounds_and(bed, &ALWAYS, test);
}

fn with_rounds_and(
    bed: &Testbed,
    more: &[(&str, &str)],
    test: impl FnOnce(&Vm<'_>, &mut Rounds<'_>),
) {
    let env = more
        .iter()
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .collect();
    let settings = Settings {
        rm: Some("pvm-rm".into()),
        env,
        ..Settings::default()
    };
    let vm = Vm::start(bed, settings).expect("a virtual machine");
    let mut rounds = Rounds::new(&vm).expect("a director");
    rounds.pre_copies = !more.contains(&NOTHING_AHEAD);
    test(&vm, &mut rounds);
}
