//! Memory that follows a task (post-copy), between hosts: the task runs before all of its memory
//! has arrived, is whole in the end, and ends with a reason if memory is lost.

use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Step};
use sempa_tests::faults::{BRIEF, Fault, LONGER, Point, SHORT_LEASE, StepEdge, Until, is_full};
use sempa_tests::holders::{is_whole, reached, with_hosts};
use sempa_tests::move_steps::{HOSTS, MoveFaults, Sampling, Victim, not_committed};
use sempa_tests::needs::testbed_with_env;
use sempa_tests::rng::seed;
use sempa_tests::testbed::gone;
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Testbed, Vm, eventually};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of a task in MiB, and the bound for the bytes of images without it.
const MIB: &str = "80";
const IMAGES_MAX: u64 = 8 << 20;
/// The lease for tests in which a host is lost.
const LEASE_MS: &str = "5000";
/// Settings with which tasks of any size use post-copy and pre-copy.
const ALWAYS: [(&str, &str); 2] = [("SEMPA_POST_COPY", "always"), ("SEMPA_PRE_COPY", "always")];
/// Setting without pre-copy: with a low rate it would take longer than the tests.
const NOTHING_AHEAD: (&str, &str) = ("SEMPA_PRE_COPY", "never");
/// Bytes per second at which memory takes longer than any of these tests.
const SLOWLY: &str = "1000000";

/// The memory is not in the images, all of it arrives, and the task can migrate again at once.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn the_memory_of_a_large_task_follows_it() {
    with_hosts(3, &[], |vm| {
        let tid = vm.spawn(&["-h2", "hold", MIB]).expect("spawned");
        is_whole(vm, &tid);
        for host in ["h3", "h1", "h2"] {
            vm.must_migrate(&tid, host);
            is_whole(vm, &tid);
        }
        let events = vm.events().expect("events");
        let bytes = |kind: &EventKind| {
            if let EventKind::Migrated { bytes, .. } = kind {
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
        gone(vm.bed().host(1), "lazy-pages", TIMEOUT).expect("nothing fetches any more");
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
        let took_all = |kind: &EventKind| matches!(kind, EventKind::Migrated { bytes, .. } if *bytes > IMAGES_MAX);
        assert!(
            vm.events()
                .expect("events")
                .iter()
                .any(|entry| took_all(&entry.kind)),
            "its images have everything"
        );
    });
}

/// The source dies before all memory has followed. The reason is reported.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_ends_if_its_memory_is_lost() {
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
            !again.good() && again.err.contains("already migrating"),
            "{again:?}"
        );
        vm.bed().host(2).kill_all();
        let lost = |kind: &EventKind| match kind {
            EventKind::MigrationFailed {
                step: Step::Arrive,
                why: Failure::Images(why),
                ..
            } => why.contains("the rest of its memory cannot be fetched"),
            _ => false,
        };
        vm.event(TIMEOUT, "the reason", |entry| lost(&entry.kind))
            .sure(vm);
        let done = moving.finish(TIMEOUT).expect("the console ends");
        assert!(!done.good(), "{done:?}");
        eventually(TIMEOUT, || match vm.tasks() {
            Ok(tasks) if tasks.iter().all(|task| task.tid != tid) => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .expect("it has ended");
        gone(vm.bed().host(3), "lazy-pages", TIMEOUT).expect("nothing fetches any more");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_goes_back_if_memory_of_it_is_lost() {
    let env = [
        ("SEMPA_LEASE_MS", LEASE_MS),
        ("SEMPA_MOVE_RATE", SLOWLY),
        ALWAYS[0],
        NOTHING_AHEAD,
    ];
    with_hosts(3, &env, |vm| {
        // The checkpoint has the same low rate.
        let tid = vm.spawn(&["-h2", "hold", "16"]).expect("spawned");
        is_whole(vm, &tid);
        let event = |what: &str, is: &dyn Fn(&EventKind) -> bool| {
            vm.event(TIMEOUT, what, |entry| is(&entry.kind)).sure(vm)
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
                EventKind::MigrationFailed {
                    step: Step::Arrive,
                    ..
                }
            )
        });
        event("a restart", &|kind| {
            matches!(kind, EventKind::Restarted { .. })
        });
        is_whole(vm, &tid);
        assert!(!moving.finish(TIMEOUT).expect("the console ends").good());
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_may_end_while_its_memory_follows() {
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
            .finish(TIMEOUT)
            .expect("the console ends")
            .expect_good("migrate")
            .expect("it had moved");
        reached(vm, &tid, Step::Arrive);
        for host in [2, 3] {
            gone(vm.bed().host(host), "criu", TIMEOUT).expect("nothing is left of the engines");
        }
    });
}

/// True until all memory has arrived: both hosts have a part of the task.
fn not_arrived(point: Point) -> bool {
    point < (Step::Arrive, StepEdge::After)
}

/// True if a fault may cost the life of a task that uses post-copy.
fn may_be_lost(fault: Fault, victim: Victim, point: Point) -> bool {
    match (victim, fault) {
        _ if !fault.is_lasting() => false,
        // From the commit on the target requests memory.
        (_, Fault::Part(_)) => !not_committed(point) && not_arrived(point),
        (Victim::Source, _) | (Victim::SourceTasker, Fault::Kill) => not_arrived(point),
        (Victim::Target, _) | (Victim::TargetTasker, Fault::Kill) => !not_committed(point),
        // The target's tasker notices first, and the commit may be over by then.
        (Victim::TargetEngine, _) => point >= (Step::Restore, StepEdge::After),
        _ => false,
    }
}

const VICTIMS: [Victim; 5] = [
    Victim::SourceTasker,
    Victim::TargetTasker,
    Victim::Source,
    Victim::Target,
    Victim::ResourceManager,
];

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_post_copy_task_runs_once_when_a_process_dies() {
    let bed = testbed_with_env(HOSTS, &ALWAYS);
    with_faults(&bed, &[SHORT_LEASE], |faults| {
        faults.run(Sampling::EachStep, &VICTIMS, Fault::Kill);
    });
}

/// The memory needs some seconds, so that the process which fetches it runs at each of these
/// points.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_post_copy_task_survives_faults_of_its_fetcher() {
    let env = [ALWAYS[0], NOTHING_AHEAD, ("WITNESS_MIB", "3")];
    let bed = testbed_with_env(HOSTS, &env);
    let env = [ALWAYS[0], NOTHING_AHEAD, ("SEMPA_MOVE_RATE", SLOWLY)];
    with_faults(&bed, &env, |faults| {
        let points = [
            (Step::Restore, StepEdge::After),
            (Step::Commit, StepEdge::Before),
            (Step::Commit, StepEdge::After),
            (Step::KillSource, StepEdge::After),
            (Step::Run, StepEdge::After),
        ];
        let kinds = [
            Fault::Kill,
            Fault::Pause(BRIEF),
            Fault::Pause(LONGER),
            Fault::Pause(Until::Noticed),
        ];
        let turn = usize::try_from(seed()).expect("a seed");
        for (i, point) in points.into_iter().enumerate() {
            for (j, fault) in kinds.into_iter().enumerate() {
                // Each point meets one kind, and the kill meets two points.
                let is_chosen =
                    (i + turn) % points.len() == j || (i + turn) % points.len() == 4 && j == 0;
                if is_full() || is_chosen {
                    faults.run_round(&[(point, Victim::TargetEngine)], fault);
                }
            }
        }
        assert!(faults.engines() > 0, "no engine was hit");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_brief_pause_costs_a_post_copy_task_nothing() {
    let bed = testbed_with_env(HOSTS, &ALWAYS);
    let victims = [&VICTIMS[..], &[Victim::Master]].concat();
    with_faults(&bed, &[], |faults| {
        faults.run(Sampling::EachStep, &victims, Fault::Pause(BRIEF));
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_brief_cut_costs_a_post_copy_task_nothing() {
    let bed = testbed_with_env(HOSTS, &ALWAYS);
    let victims = [Victim::Source, Victim::Target, Victim::Master];
    with_faults(&bed, &[], |faults| {
        faults.run(Sampling::EachThirdStep, &victims, Fault::Cut(BRIEF));
        faults.run(
            Sampling::EachThirdStep,
            &[Victim::Source],
            Fault::Part(BRIEF),
        );
    });
}

/// A host is cut off until it is lost, or its way to the other host is.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_post_copy_task_runs_once_when_a_host_is_cut() {
    let bed = testbed_with_env(HOSTS, &ALWAYS);
    let victims = [Victim::Source, Victim::Target];
    with_faults(&bed, &[SHORT_LEASE], |faults| {
        faults.run(Sampling::EachStep, &victims, Fault::Cut(Until::Noticed));
        faults.run(
            Sampling::EachThirdStep,
            &[Victim::Source],
            Fault::Part(Until::Noticed),
        );
    });
}

fn with_faults(bed: &Testbed, env: &[(&str, &str)], test: impl FnOnce(&mut MoveFaults<'_>)) {
    let nothing_ahead = env.contains(&NOTHING_AHEAD);
    let all = if nothing_ahead {
        env.to_vec()
    } else {
        [&ALWAYS[..], env].concat()
    };
    let settings = Settings {
        rm: Some("pvm-rm".into()),
        env: Settings::env_of(&all),
        ..Settings::default()
    };
    let vm = Vm::start(bed, settings).expect("a virtual machine");
    let mut faults = MoveFaults::new(&vm, may_be_lost).expect("an oracle");
    faults.pre_copies = !nothing_ahead;
    test(&mut faults);
    vm.halt().expect("halts");
}
