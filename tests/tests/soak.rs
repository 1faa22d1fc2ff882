//! Tasks that exchange messages migrate many times. Every message arrives once, and no files,
//! processes or other resources of a migration remain.

use sempa_tests::all_to_all::AllToAllJob;
use sempa_tests::footprint::{Footprint, KIND_NAMES, TASK_KIND_INDEX};
use sempa_tests::requirements::require_testbed;
use sempa_tests::rng::Rng;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
const HOST_NAMES: [&str; 4] = ["h1", "h2", "h3", "h4"];
const WORKER_COUNT: usize = 12;
/// Number of neighbours on each side with which a worker exchanges messages.
const NEIGHBOURS_PER_SIDE: usize = 2;
/// Measured migrations, as (number of migrations at the same time, repetitions).
const MEASURED_MIGRATIONS: [(usize, usize); 2] = [(1, 12), (3, 4)];

/// Migrations before the first measurement, as (number of migrations at the same time,
/// repetitions). Hosts retain some resources after their first migrations.
const WARM_UP_MIGRATIONS: [(usize, usize); 1] = [(4, 3)];
/// Number of descriptors that a tasker holds for a spare process-id namespace and its process.
/// Taskers retain some namespaces for future tasks.
const SPARE_NAMESPACE_DESCRIPTORS: u64 = 3;

/// Returns the numbers of descriptors and threads of the virtual machine's own processes, as (kind
/// of process, [descriptors, threads]). The descriptors and threads of spare namespaces are
/// subtracted.
fn resource_counts(footprint: &Footprint) -> Vec<(&'static str, [u64; 2])> {
    let count = |kind: usize| {
        let sum = &footprint.resources_by_kind[kind];
        let spare_namespace_count = if KIND_NAMES[kind] == "taskers" {
            sum.process_count - HOST_NAMES.len() as u64
        } else {
            0
        };
        (
            KIND_NAMES[kind],
            [
                sum.descriptor_count - SPARE_NAMESPACE_DESCRIPTORS * spare_namespace_count,
                sum.thread_count - spare_namespace_count,
            ],
        )
    };
    (0..TASK_KIND_INDEX).map(count).collect()
}

/// Starts tasks that exchange messages, and migrates the tasks. Checks that the tasks are on the
/// target hosts and that every message arrived once, and waits until all tasks have ended.
fn migrate_crowd(vm: &Vm, rounds: &[(usize, usize)], rng: &mut Rng) {
    let mut job = AllToAllJob::start(vm, WORKER_COUNT, NEIGHBOURS_PER_SIDE, &[], &HOST_NAMES)
        .or_panic_with_logs(vm);
    for (parallel_count, repetition_count) in rounds {
        for _ in 0..*repetition_count {
            job.migrate_random_workers(vm, rng, *parallel_count)
                .or_panic_with_logs(vm);
        }
    }
    job.check_worker_hosts(vm)
        .expect("where they were moved to");
    let report = job.end_and_report().or_panic_with_logs(vm);
    assert!(
        report.is_faultless(),
        "{report:?}\n{}",
        vm.events_and_logs()
    );
    eprintln!("{report:?}");
    wait_for(TIMEOUT, || {
        match Footprint::measure(vm).resources_by_kind[TASK_KIND_INDEX].process_count {
            0 => Ok(()),
            task_count => Err(format!("{task_count} tasks are left")),
        }
    })
    .expect("all end");
}

/// Twelve tasks exchange messages. 24 migrations lose no messages and leave no files, processes or
/// other resources.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn many_moves_lose_nothing_and_leave_nothing() {
    let bed = require_testbed(HOST_NAMES.len());
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&HOST_NAMES[1..]).expect("the others join");
    let mut rng = Rng::new(5);
    migrate_crowd(&vm, &WARM_UP_MIGRATIONS, &mut rng);
    let first_footprint = Footprint::measure(&vm);
    migrate_crowd(&vm, &MEASURED_MIGRATIONS, &mut rng);
    // Idle threads exit only after some time, so the measurement is repeated.
    let wait_result = wait_for(TIMEOUT, || {
        let footprint = Footprint::measure(&vm);
        let (counts_before, counts_after) = (
            resource_counts(&first_footprint),
            resource_counts(&footprint),
        );
        let increased_kinds = counts_before.iter().zip(&counts_after).filter(
            |((_, counts_before), (_, counts_after))| {
                counts_before.iter().zip(counts_after).any(|(b, a)| a > b)
            },
        );
        let mut leaks: Vec<String> = increased_kinds
            .map(|(counts_before, counts_after)| format!("{counts_before:?}, now {counts_after:?}"))
            .collect();
        leaks.extend(
            (footprint.file_count > first_footprint.file_count).then(|| {
                format!(
                    "{} files, now {}",
                    first_footprint.file_count, footprint.file_count
                )
            }),
        );
        if leaks.is_empty() {
            Ok(())
        } else {
            Err(leaks.join("; "))
        }
    });
    wait_result.unwrap_or_else(|error| panic!("{error:#}"));
    vm.halt_and_wait().expect("halts");
}
