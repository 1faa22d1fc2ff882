//! Post-copy between hosts. The task runs before all of its memory has arrived, and later has all
//! of its memory. If memory is lost, the task ends with a reason.

use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Step};
use sempa_tests::faults::{
    Fault, FaultEnd, LONG_DURATION, Point, SHORT_DURATION, SHORT_LEASE_ENV, StepEdge,
    tests_all_cases,
};
use sempa_tests::hold_tasks::{check_memory, wait_for_step, with_hosts};
use sempa_tests::migration_steps::{
    HOST_COUNT, MigrationFaults, StepSample, Victim, is_before_commit,
};
use sempa_tests::requirements::require_testbed_with_env;
use sempa_tests::rng::print_seed;
use sempa_tests::testbed::wait_until_no_process;
use sempa_tests::vm::VmSettings;
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
/// Transfer rate in bytes per second. At this rate the transfer of the memory takes longer than any
/// of these tests.
const SLOW_BYTES_PER_S: &str = "1000000";

/// The images do not contain the memory, all memory arrives, and the task can migrate again at
/// once.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn large_task_uses_post_copy() {
    with_hosts(3, &[], |vm| {
        let tid = vm
            .spawn_connected(&["-h2", "hold", TASK_MIB])
            .expect("spawned");
        check_memory(vm, &tid);
        for host in ["h3", "h1", "h2"] {
            vm.migrate_or_panic(&tid, host);
            check_memory(vm, &tid);
        }
        let events = vm.events().expect("events");
        let image_bytes = |kind: &EventKind| {
            if let EventKind::Migrated {
                bytes: image_bytes, ..
            } = kind
            {
                Some(*image_bytes)
            } else {
                None
            }
        };
        let image_sizes: Vec<u64> = events
            .iter()
            .filter_map(|entry| image_bytes(&entry.kind))
            .collect();
        assert_eq!(image_sizes.len(), 3);
        assert!(
            image_sizes
                .iter()
                .all(|image_bytes| *image_bytes < IMAGES_BYTES_MAX),
            "the memory is not in the images: {image_sizes:?}"
        );
        wait_until_no_process(vm.testbed().host(1), "lazy-pages", TIMEOUT)
            .expect("nothing fetches any more");
    });
}

/// A task of any size with a page that nobody can read migrates, with its memory and without.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn large_task_with_guard_pages_migrates() {
    with_hosts(2, &[], |vm| {
        for megabytes in [TASK_MIB, "1"] {
            let tid = vm
                .spawn_connected(&["-h1", "hold", megabytes, "guards"])
                .expect("spawned");
            for host in ["h2", "h1"] {
                vm.migrate_or_panic(&tid, host);
                check_memory(vm, &tid);
            }
        }
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn administrator_can_disable_post_copy() {
    with_hosts(2, &[("SEMPA_POST_COPY", "never")], |vm| {
        let tid = vm
            .spawn_connected(&["-h1", "hold", TASK_MIB])
            .expect("spawned");
        check_memory(vm, &tid);
        vm.migrate_or_panic(&tid, "h2");
        check_memory(vm, &tid);
        let has_large_images = |kind: &EventKind| matches!(kind, EventKind::Migrated { bytes, .. } if *bytes > IMAGES_BYTES_MAX);
        assert!(
            vm.events()
                .expect("events")
                .iter()
                .any(|entry| has_large_images(&entry.kind)),
            "its images have everything"
        );
    });
}

/// While a part of the task's memory is still at the source, a further migration is refused. If the
/// source dies then, the task ends, and the reason is reported.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_ends_if_its_memory_is_lost() {
    let env = [
        ("SEMPA_LEASE_MS", LEASE_MS),
        ("SEMPA_MOVE_RATE", SLOW_BYTES_PER_S),
        NO_PRE_COPY,
    ];
    with_hosts(3, &env, |vm| {
        let tid = vm
            .spawn_connected(&["-h2", "hold", TASK_MIB])
            .expect("spawned");
        check_memory(vm, &tid);
        let migrate_command = vm.start_migration(&tid, "h3").expect("it begins");
        wait_for_step(vm, &tid, Step::Run);
        assert_eq!(vm.host_of(&tid).expect("it lives"), "h3");
        let refused_output = vm.migrate(&tid, "h1").expect("the console runs");
        assert!(
            !refused_output.succeeded() && refused_output.stderr.contains("already migrating"),
            "{refused_output:?}"
        );
        vm.testbed().host(2).kill_all_processes();
        let is_memory_loss = |kind: &EventKind| match kind {
            EventKind::MigrationFailed {
                step: Step::Arrive,
                why: Failure::Images(why),
                ..
            } => why.contains("the rest of its memory cannot be fetched"),
            _ => false,
        };
        vm.wait_for_event(TIMEOUT, "the reason", |entry| is_memory_loss(&entry.kind))
            .or_panic_with_logs(vm);
        let output = migrate_command
            .wait_or_kill(TIMEOUT)
            .expect("the console ends");
        assert!(!output.succeeded(), "{output:?}");
        wait_for(TIMEOUT, || match vm.tasks() {
            Ok(tasks) if tasks.iter().all(|task| task.tid != tid) => Ok(()),
            other => Err(format!("{other:?}")),
        })
        .expect("it has ended");
        wait_until_no_process(vm.testbed().host(3), "lazy-pages", TIMEOUT)
            .expect("nothing fetches any more");
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_rolls_back_if_memory_is_lost() {
    let env = [
        ("SEMPA_LEASE_MS", LEASE_MS),
        ("SEMPA_MOVE_RATE", SLOW_BYTES_PER_S),
        POST_AND_PRE_COPY_ALWAYS[0],
        NO_PRE_COPY,
    ];
    with_hosts(3, &env, |vm| {
        // The images of the checkpoint are also sent at the low rate, so the task is small.
        let tid = vm.spawn_connected(&["-h2", "hold", "16"]).expect("spawned");
        check_memory(vm, &tid);
        let wait_for_kind = |description: &str, is_expected: &dyn Fn(&EventKind) -> bool| {
            vm.wait_for_event(TIMEOUT, description, |entry| is_expected(&entry.kind))
                .or_panic_with_logs(vm)
        };
        vm.pvm_json(&["checkpoint", "--every", "1h", &tid])
            .expect("a pace");
        wait_for_kind("a checkpoint", &|kind| {
            matches!(kind, EventKind::Checkpointed { .. })
        });
        let migrate_command = vm.start_migration(&tid, "h3").expect("it begins");
        wait_for_step(vm, &tid, Step::Run);
        vm.testbed().host(2).kill_all_processes();
        wait_for_kind("its end", &|kind| {
            matches!(
                kind,
                EventKind::MigrationFailed {
                    step: Step::Arrive,
                    ..
                }
            )
        });
        wait_for_kind("a restart", &|kind| {
            matches!(kind, EventKind::Restarted { .. })
        });
        check_memory(vm, &tid);
        assert!(
            !migrate_command
                .wait_or_kill(TIMEOUT)
                .expect("the console ends")
                .succeeded()
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn task_may_end_during_post_copy() {
    with_hosts(
        3,
        &[("SEMPA_MOVE_RATE", SLOW_BYTES_PER_S), NO_PRE_COPY],
        |vm| {
            let tid = vm
                .spawn_connected(&["-h2", "hold", TASK_MIB])
                .expect("spawned");
            check_memory(vm, &tid);
            let migrate_command = vm.start_migration(&tid, "h3").expect("it begins");
            wait_for_step(vm, &tid, Step::Run);
            vm.run_pvm(&["kill", &tid])
                .expect("the console runs")
                .expect_success("kill")
                .expect("killed");
            migrate_command
                .wait_or_kill(TIMEOUT)
                .expect("the console ends")
                .expect_success("migrate")
                .expect("it had moved");
            wait_for_step(vm, &tid, Step::Arrive);
            for host in [2, 3] {
                wait_until_no_process(vm.testbed().host(host), "criu", TIMEOUT)
                    .expect("nothing is left of the engines");
            }
        },
    );
}

/// True for points before all memory has arrived. Until then the source and the target each have a
/// part of the task's memory.
fn is_before_arrival(point: Point) -> bool {
    point < (Step::Arrive, StepEdge::After)
}

/// True if a fault may end a task that uses post-copy.
fn may_be_lost(fault: Fault, victim: Victim, point: Point) -> bool {
    match (victim, fault) {
        _ if !fault.exceeds_lease() => false,
        // From the commit on, the target fetches memory from the source.
        (_, Fault::Partition(_)) => !is_before_commit(point) && is_before_arrival(point),
        (Victim::SourceDaemon, _) | (Victim::SourceTasker, Fault::Kill) => is_before_arrival(point),
        (Victim::TargetDaemon, _) | (Victim::TargetTasker, Fault::Kill) => !is_before_commit(point),
        // The target's tasker notices the fault first. The coordinator may commit before it is
        // notified.
        (Victim::TargetEngine, _) => point >= (Step::Restore, StepEdge::After),
        _ => false,
    }
}

const VICTIMS: [Victim; 5] = [
    Victim::SourceTasker,
    Victim::TargetTasker,
    Victim::SourceDaemon,
    Victim::TargetDaemon,
    Victim::ResourceManager,
];

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_post_copy_task_runs_once_when_a_process_dies() {
    let bed = require_testbed_with_env(HOST_COUNT, &POST_AND_PRE_COPY_ALWAYS);
    with_faults(&bed, &[SHORT_LEASE_ENV], |faults| {
        faults.inject_sample(StepSample::EachStep, &VICTIMS, Fault::Kill);
    });
}

/// The transfer of the memory takes some seconds. Therefore the process that fetches the memory
/// exists at each tested point.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_post_copy_task_survives_faults_of_its_fetcher() {
    let env = [
        POST_AND_PRE_COPY_ALWAYS[0],
        NO_PRE_COPY,
        ("SEMPA_MOVE_RATE", SLOW_BYTES_PER_S),
        ("WITNESS_MIB", "3"),
    ];
    let bed = require_testbed_with_env(HOST_COUNT, &env);
    with_faults(&bed, &env, |faults| {
        let points = [
            (Step::Restore, StepEdge::After),
            (Step::Commit, StepEdge::Before),
            (Step::Commit, StepEdge::After),
            (Step::KillSource, StepEdge::After),
            (Step::Run, StepEdge::After),
        ];
        let fault_kinds = [
            Fault::Kill,
            Fault::Pause(SHORT_DURATION),
            Fault::Pause(LONG_DURATION),
            Fault::Pause(FaultEnd::LossHandled),
        ];
        let sample_index = usize::try_from(print_seed()).expect("a seed");
        for (i, point) in points.into_iter().enumerate() {
            for (j, fault) in fault_kinds.into_iter().enumerate() {
                // Each point is tried with one kind of fault; the kill is tried at two points.
                let is_chosen = (i + sample_index) % points.len() == j
                    || (i + sample_index) % points.len() == 4 && j == 0;
                if tests_all_cases() || is_chosen {
                    faults.inject_and_check_round(&[(point, Victim::TargetEngine)], fault);
                }
            }
        }
        assert!(
            faults.engine_hit_count() >= points.len(),
            "an engine was not hit"
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn short_pause_during_post_copy_has_no_effect() {
    let bed = require_testbed_with_env(HOST_COUNT, &POST_AND_PRE_COPY_ALWAYS);
    let victims = [&VICTIMS[..], &[Victim::MasterDaemon]].concat();
    with_faults(&bed, &[], |faults| {
        faults.inject_sample(StepSample::EachStep, &victims, Fault::Pause(SHORT_DURATION));
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn short_disconnection_during_post_copy_has_no_effect() {
    let bed = require_testbed_with_env(HOST_COUNT, &POST_AND_PRE_COPY_ALWAYS);
    let victims = [
        Victim::SourceDaemon,
        Victim::TargetDaemon,
        Victim::MasterDaemon,
    ];
    with_faults(&bed, &[], |faults| {
        faults.inject_sample(
            StepSample::EachThirdStep,
            &victims,
            Fault::Disconnect(SHORT_DURATION),
        );
        faults.inject_sample(
            StepSample::EachThirdStep,
            &[Victim::SourceDaemon],
            Fault::Partition(SHORT_DURATION),
        );
    });
}

/// A host is disconnected from all hosts, or only from the other host of the migration, until the
/// disconnected host is lost.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn post_copy_task_runs_once_when_host_is_disconnected() {
    let bed = require_testbed_with_env(HOST_COUNT, &POST_AND_PRE_COPY_ALWAYS);
    let victims = [Victim::SourceDaemon, Victim::TargetDaemon];
    with_faults(&bed, &[SHORT_LEASE_ENV], |faults| {
        faults.inject_sample(
            StepSample::EachStep,
            &victims,
            Fault::Disconnect(FaultEnd::LossHandled),
        );
        faults.inject_sample(
            StepSample::EachThirdStep,
            &[Victim::SourceDaemon],
            Fault::Partition(FaultEnd::LossHandled),
        );
    });
}

fn with_faults(bed: &Testbed, env: &[(&str, &str)], test: impl FnOnce(&mut MigrationFaults<'_>)) {
    let is_pre_copy_disabled = env.contains(&NO_PRE_COPY);
    let all_env = if is_pre_copy_disabled {
        env.to_vec()
    } else {
        [&POST_AND_PRE_COPY_ALWAYS[..], env].concat()
    };
    let settings = VmSettings {
        rm_command: Some("pvm-rm".into()),
        env: VmSettings::owned_env(&all_env),
        ..VmSettings::default()
    };
    let vm = Vm::start(bed, settings).expect("a virtual machine");
    let mut faults = MigrationFaults::new(&vm, may_be_lost).expect("an oracle");
    faults.uses_pre_copy = !is_pre_copy_disabled;
    test(&mut faults);
    vm.halt_and_wait().expect("halts");
}
