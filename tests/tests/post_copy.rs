//! Post-copy between hosts: the task runs before all of its memory has arrived, has all of its
//! memory in the end, and ends with a reason if memory is lost.

use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Step};
use sempa_tests::faults::{
    Fault, LONG_FAULT, Point, SHORT_FAULT, SHORT_LEASE, StepEdge, Until, is_full,
};
use sempa_tests::hold_tasks::{check_memory, wait_for_step, with_hosts};
use sempa_tests::migration_steps::{HOST_COUNT, MigrationFaults, Sampling, Victim, not_committed};
use sempa_tests::requirements::testbed_with_env;
use sempa_tests::rng::seed;
use sempa_tests::testbed::wait_until_no_process;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of a task in MiB.
const TASK_MIB: &str = "80";
/// Maximum size in bytes of images that do not contain the task's memory.
const IMAGES_BYTES_MAX: u64 = 8 << 20;
/// Lease in milliseconds for tests in which a host is lost.
const LEASE_MS: &str = "5000";
/// Environment variables with which tasks of any size use post-copy and pre-copy.
const POST_AND_PRE_COPY_ALWAYS: [(&str, &str); 2] =
    [("SEMPA_POST_COPY", "always"), ("SEMPA_PRE_COPY", "always")];
/// Environment variable and value that disable pre-copy. With a low transfer rate, pre-copy would
/// take longer than the tests.
const NO_PRE_COPY: (&str, &str) = ("SEMPA_PRE_COPY", "never");
/// Transfer rate in bytes per second with which the memory takes longer than any of these tests.
const SLOW_RATE: &str = "1000000";

/// The images do not contain the memory, all memory arrives, and the task can migrate again at
/// once.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn large_task_uses_post_copy() {
    with_hosts(3, &[], |vm| {
        let tid = vm.spawn(&["-h2", "hold", TASK_MIB]).expect("spawned");
        check_memory(vm, &tid);
        for host in ["h3", "h1", "h2"] {
            vm.must_migrate(&tid, host);
            check_memory(vm, &tid);
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
            moved.iter().all(|bytes| *bytes < IMAGES_BYTES_MAX),
            "the memory is not in the images: {moved:?}"
        );
        wait_until_no_process(vm.bed().host(1), "lazy-pages", TIMEOUT)
            .expect("nothing fetches any more");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn administrator_can_disable_post_copy() {
    with_hosts(2, &[("SEMPA_POST_COPY", "never")], |vm| {
        let tid = vm.spawn(&["-h1", "hold", TASK_MIB]).expect("spawned");
        check_memory(vm, &tid);
        vm.must_migrate(&tid, "h2");
        check_memory(vm, &tid);
        let took_all = |kind: &EventKind| matches!(kind, EventKind::Migrated { bytes, .. } if *bytes > IMAGES_BYTES_MAX);
        assert!(
            vm.events()
                .expect("events")
                .iter()
                .any(|entry| took_all(&entry.kind)),
            "its images have everything"
        );
    });
}

/// The source dies before all memory has arrived. The task ends, and the reason is reported.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_ends_if_its_memory_is_lost() {
    let env = [
        ("SEMPA_LEASE_MS", LEASE_MS),
        ("SEMPA_MOVE_RATE", SLOW_RATE),
        NO_PRE_COPY,
    ];
    with_hosts(3, &env, |vm| {
        let tid = vm.spawn(&["-h2", "hold", TASK_MIB]).expect("spawned");
        check_memory(vm, &tid);
        let moving = vm.start_migrate(&tid, "h3").expect("it begins");
        wait_for_step(vm, &tid, Step::Run);
        assert_eq!(vm.host_of(&tid).expect("it lives"), "h3");
        let again = vm.migrate(&tid, "h1").expect("the console runs");
        assert!(
            !again.succeeded() && again.err.contains("already migrating"),
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
        vm.wait_for_event(TIMEOUT, "the reason", |entry| lost(&entry.kind))
            .or_panic_with_logs(vm);
        let done = moving.finish(TIMEOUT).expect("the console ends");
        assert!(!done.succeeded(), "{done:?}");
        wait_for(TIMEOUT, || match vm.tasks() {
            Ok(tasks) if tasks.iter().all(|task| task.tid != tid) => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .expect("it has ended");
        wait_until_no_process(vm.bed().host(3), "lazy-pages", TIMEOUT)
            .expect("nothing fetches any more");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_rolls_back_if_memory_is_lost() {
    let env = [
        ("SEMPA_LEASE_MS", LEASE_MS),
        ("SEMPA_MOVE_RATE", SLOW_RATE),
        POST_AND_PRE_COPY_ALWAYS[0],
        NO_PRE_COPY,
    ];
    with_hosts(3, &env, |vm| {
        // The images of the checkpoint are sent at the same low rate.
        let tid = vm.spawn(&["-h2", "hold", "16"]).expect("spawned");
        check_memory(vm, &tid);
        let event = |what: &str, is: &dyn Fn(&EventKind) -> bool| {
            vm.wait_for_event(TIMEOUT, what, |entry| is(&entry.kind))
                .or_panic_with_logs(vm)
        };
        vm.json(&["checkpoint", "--every", "1h", &tid])
            .expect("a pace");
        event("a checkpoint", &|kind| {
            matches!(kind, EventKind::Checkpointed { .. })
        });
        let moving = vm.start_migrate(&tid, "h3").expect("it begins");
        wait_for_step(vm, &tid, Step::Run);
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
        check_memory(vm, &tid);
        assert!(
            !moving
                .finish(TIMEOUT)
                .expect("the console ends")
                .succeeded()
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_may_end_during_post_copy() {
    with_hosts(3, &[("SEMPA_MOVE_RATE", SLOW_RATE), NO_PRE_COPY], |vm| {
        let tid = vm.spawn(&["-h2", "hold", TASK_MIB]).expect("spawned");
        check_memory(vm, &tid);
        let moving = vm.start_migrate(&tid, "h3").expect("it begins");
        wait_for_step(vm, &tid, Step::Run);
        vm.pvm(&["kill", &tid])
            .expect("the console runs")
            .expect_success("kill")
            .expect("killed");
        moving
            .finish(TIMEOUT)
            .expect("the console ends")
            .expect_success("migrate")
            .expect("it had moved");
        wait_for_step(vm, &tid, Step::Arrive);
        for host in [2, 3] {
            wait_until_no_process(vm.bed().host(host), "criu", TIMEOUT)
                .expect("nothing is left of the engines");
        }
    });
}

/// True while the memory has not arrived completely, so that each of the two hosts has a part of
/// the task.
fn not_arrived(point: Point) -> bool {
    point < (Step::Arrive, StepEdge::After)
}

/// True if a fault may end a task that uses post-copy.
fn may_be_lost(fault: Fault, victim: Victim, point: Point) -> bool {
    match (victim, fault) {
        _ if !fault.is_lasting() => false,
        // From the commit on, the target fetches memory from the source.
        (_, Fault::Partition(_)) => !not_committed(point) && not_arrived(point),
        (Victim::Source, _) | (Victim::SourceTasker, Fault::Kill) => not_arrived(point),
        (Victim::Target, _) | (Victim::TargetTasker, Fault::Kill) => !not_committed(point),
        // The target's tasker notices the fault first. The coordinator may commit before it is
        // notified.
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
    let bed = testbed_with_env(HOST_COUNT, &POST_AND_PRE_COPY_ALWAYS);
    with_faults(&bed, &[SHORT_LEASE], |faults| {
        faults.run(Sampling::EachStep, &VICTIMS, Fault::Kill);
    });
}

/// The transfer of the memory takes some seconds, so that the process that fetches it exists at
/// each of these points.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_post_copy_task_survives_faults_of_its_fetcher() {
    let env = [
        POST_AND_PRE_COPY_ALWAYS[0],
        NO_PRE_COPY,
        ("SEMPA_MOVE_RATE", SLOW_RATE),
        ("WITNESS_MIB", "3"),
    ];
    let bed = testbed_with_env(HOST_COUNT, &env);
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
            Fault::Pause(SHORT_FAULT),
            Fault::Pause(LONG_FAULT),
            Fault::Pause(Until::Noticed),
        ];
        let turn = usize::try_from(seed()).expect("a seed");
        for (i, point) in points.into_iter().enumerate() {
            for (j, fault) in kinds.into_iter().enumerate() {
                // Each point is tried with one kind of fault; the kill is tried at two points.
                let is_chosen =
                    (i + turn) % points.len() == j || (i + turn) % points.len() == 4 && j == 0;
                if is_full() || is_chosen {
                    faults.run_round(&[(point, Victim::TargetEngine)], fault);
                }
            }
        }
        assert!(faults.engines() >= points.len(), "an engine was not hit");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn short_pause_during_post_copy_has_no_effect() {
    let bed = testbed_with_env(HOST_COUNT, &POST_AND_PRE_COPY_ALWAYS);
    let victims = [&VICTIMS[..], &[Victim::Master]].concat();
    with_faults(&bed, &[], |faults| {
        faults.run(Sampling::EachStep, &victims, Fault::Pause(SHORT_FAULT));
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn short_disconnection_during_post_copy_has_no_effect() {
    let bed = testbed_with_env(HOST_COUNT, &POST_AND_PRE_COPY_ALWAYS);
    let victims = [Victim::Source, Victim::Target, Victim::Master];
    with_faults(&bed, &[], |faults| {
        faults.run(
            Sampling::EachThirdStep,
            &victims,
            Fault::Disconnect(SHORT_FAULT),
        );
        faults.run(
            Sampling::EachThirdStep,
            &[Victim::Source],
            Fault::Partition(SHORT_FAULT),
        );
    });
}

/// A host is disconnected from all hosts, or only from the other host of the migration, until it is
/// lost.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn post_copy_task_runs_once_when_host_is_disconnected() {
    let bed = testbed_with_env(HOST_COUNT, &POST_AND_PRE_COPY_ALWAYS);
    let victims = [Victim::Source, Victim::Target];
    with_faults(&bed, &[SHORT_LEASE], |faults| {
        faults.run(
            Sampling::EachStep,
            &victims,
            Fault::Disconnect(Until::Noticed),
        );
        faults.run(
            Sampling::EachThirdStep,
            &[Victim::Source],
            Fault::Partition(Until::Noticed),
        );
    });
}

fn with_faults(bed: &Testbed, env: &[(&str, &str)], test: impl FnOnce(&mut MigrationFaults<'_>)) {
    let nothing_ahead = env.contains(&NO_PRE_COPY);
    let all = if nothing_ahead {
        env.to_vec()
    } else {
        [&POST_AND_PRE_COPY_ALWAYS[..], env].concat()
    };
    let settings = Settings {
        rm: Some("pvm-rm".into()),
        env: Settings::env_of(&all),
        ..Settings::default()
    };
    let vm = Vm::start(bed, settings).expect("a virtual machine");
    let mut faults = MigrationFaults::new(&vm, may_be_lost).expect("an oracle");
    faults.pre_copies = !nothing_ahead;
    test(&mut faults);
    vm.halt().expect("halts");
}
