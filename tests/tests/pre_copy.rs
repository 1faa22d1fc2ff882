//! Pre-copy between hosts. Memory is sent while the task still runs, and the task's memory is
//! complete at the target. The task survives a failed pre-copy.

use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Step};
use sempa_tests::hold_tasks::{check_memory, wait_for_step, with_hosts};
use sempa_tests::migration_steps::{Victim, victim_process};
use sempa_tests::testbed::sent_bytes_total;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of a large task, as (argument of its program in MiB, bytes).
const LARGE_TASK_MEMORY: (&str, u64) = ("96", 96 << 20);
/// Environment variable and transfer rate in bytes per second. At this rate the transfer of the
/// memory takes longer than any of these tests.
const VERY_SLOW_RATE: (&str, &str) = ("SEMPA_MOVE_RATE", "1000000");
/// Environment variable and transfer rate in bytes per second. At this rate migrations use
/// pre-copy; at a much higher rate they use post-copy.
const PRE_COPY_RATE: (&str, &str) = ("SEMPA_MOVE_RATE", "40000000");
/// Number of bytes that the source must have sent before the test injects a fault.
const SENT_BEFORE_FAULT_BYTES: u64 = 2 << 20;
/// Number of bytes that the program writes each time it increments its counter: four pages.
const BYTES_PER_COUNT: u64 = 4 * 4096;
/// Maximum size in bytes of images without memory, plus the messages between the hosts.
const OVERHEAD_BYTES_MAX: u64 = 8 << 20;

/// Returns the number of bytes that pre-copy has sent, for each migration so far.
fn pre_copied_bytes(vm: &Vm) -> Vec<u64> {
    let events = vm.events().expect("events");
    let bytes = |kind: &EventKind| match kind {
        EventKind::MigrationStep {
            step: Step::PreCopy,
            bytes,
            ..
        } => Some(*bytes),
        _ => None,
    };
    events
        .iter()
        .filter_map(|entry| bytes(&entry.kind))
        .collect()
}

/// Pre-copy sends all memory once. Afterwards the source sends only the pages that the task has
/// written in the meantime.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_that_writes_during_pre_copy_is_whole() {
    with_hosts(3, &[PRE_COPY_RATE], |vm| {
        let tid = vm
            .spawn_connected(&["-h2", "hold", LARGE_TASK_MEMORY.0, "writes"])
            .expect("spawned");
        let mut counter = check_memory(vm, &tid);
        for (source_number, target) in [(2, "h3"), (3, "h1"), (1, "h2")] {
            let bytes_before = sent_bytes_total(vm.testbed().host(source_number));
            vm.migrate_or_panic(&tid, target);
            let bytes = sent_bytes_total(vm.testbed().host(source_number)) - bytes_before;
            let previous_counter = std::mem::replace(&mut counter, check_memory(vm, &tid));
            // The source sends all memory once, and then at most the pages that the task has
            // written in the meantime.
            let bytes_limit = LARGE_TASK_MEMORY.1
                + (counter - previous_counter) * BYTES_PER_COUNT
                + OVERHEAD_BYTES_MAX;
            assert!(
                bytes < bytes_limit,
                "{bytes} bytes have left, bound {bytes_limit}"
            );
        }
        let pre_copy_byte_counts = pre_copied_bytes(vm);
        assert!(
            pre_copy_byte_counts.len() == 3
                && pre_copy_byte_counts
                    .iter()
                    .all(|bytes| *bytes >= LARGE_TASK_MEMORY.1),
            "{pre_copy_byte_counts:?}"
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn pre_copy_is_for_large_tasks_and_can_be_disabled() {
    for (size_mib, setting) in [("20", "usual"), (LARGE_TASK_MEMORY.0, "never")] {
        with_hosts(2, &[("SEMPA_PRE_COPY", setting)], |vm| {
            let tid = vm
                .spawn_connected(&["-h1", "hold", size_mib])
                .expect("spawned");
            check_memory(vm, &tid);
            vm.migrate_or_panic(&tid, "h2");
            check_memory(vm, &tid);
            assert_eq!(pre_copied_bytes(vm), [0; 0], "{size_mib} MiB, {setting}");
        });
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_suspended_task_does_not_wait_for_pre_copy() {
    with_hosts(3, &[VERY_SLOW_RATE], |vm| {
        let tid = vm
            .spawn_connected(&["-h2", "hold", LARGE_TASK_MEMORY.0])
            .expect("spawned");
        check_memory(vm, &tid);
        let migrate_command = vm.start_migration(&tid, "h3").expect("it begins");
        wait_for_step(vm, &tid, Step::Prepare);
        vm.run_pvm(&["job", "suspend", "--task", &tid])
            .expect("the console runs")
            .expect_success("suspend")
            .expect("suspended");
        wait_for_step(vm, &tid, Step::Run);
        assert!(
            pre_copied_bytes(vm)[0] < LARGE_TASK_MEMORY.1,
            "not all memory"
        );
        vm.run_pvm(&["kill", &tid])
            .expect("the console runs")
            .expect_success("kill")
            .expect("killed");
        migrate_command
            .wait_or_kill(TIMEOUT)
            .expect("the console ends")
            .expect_success("migrate")
            .expect("it had moved");
    });
}

/// The target's tasker or the whole target is killed during pre-copy. The task continues at the
/// source, and the reason of the failure is reported.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_failed_pre_copy_leaves_the_task_at_the_source() {
    with_hosts(3, &[VERY_SLOW_RATE], |vm| {
        let faults: [(&str, &dyn Fn()); 2] = [
            ("the target's tasker", &|| {
                let tasker_pid = victim_process(vm.testbed().host(3), Victim::TargetTasker)
                    .expect("it is there");
                nix::sys::signal::kill(tasker_pid, nix::sys::signal::Signal::SIGKILL)
                    .expect("it is there");
            }),
            ("the target", &|| vm.testbed().host(3).kill_all_processes()),
        ];
        for (victim, inject_fault) in faults {
            let tid = vm
                .spawn_connected(&["-h2", "hold", LARGE_TASK_MEMORY.0, "writes"])
                .expect("spawned");
            check_memory(vm, &tid);
            let bytes_before = sent_bytes_total(vm.testbed().host(2));
            let migrate_command = vm.start_migration(&tid, "h3").expect("it begins");
            wait_for(TIMEOUT, || {
                match sent_bytes_total(vm.testbed().host(2)) - bytes_before {
                    bytes if bytes >= SENT_BEFORE_FAULT_BYTES => Ok(()),
                    bytes => Err(format!("{bytes} bytes have left")),
                }
            })
            .or_panic_with_logs(vm);
            inject_fault();
            let output = migrate_command
                .wait_or_kill(TIMEOUT)
                .expect("the console ends");
            assert!(!output.succeeded(), "{victim}: {output:?}");
            check_memory(vm, &tid);
            assert_eq!(vm.host_of(&tid).expect("it lives"), "h2", "{victim}");
        }
        let events = vm.events().expect("events");
        let why: Vec<&Failure> = events
            .iter()
            .filter_map(|entry| match &entry.kind {
                EventKind::MigrationFailed {
                    step: Step::PreCopy,
                    why,
                    ..
                } => Some(why),
                _ => None,
            })
            .collect();
        assert_eq!(why.len(), 2, "{why:?}");
    });
}
