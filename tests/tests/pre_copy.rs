//! Pre-copy between hosts: memory is sent while the task still runs, the task's memory is complete
//! at the target, and the task survives a failed pre-copy.

use sempa_proto::event::EventKind;
use sempa_proto::migration::{Failure, Step};
use sempa_tests::hold_tasks::{check_memory, wait_for_step, with_hosts};
use sempa_tests::migration_steps::{Victim, process_of};
use sempa_tests::testbed::sent_bytes;
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Memory of a large task, as (argument of its program in MiB, bytes).
const LARGE_TASK: (&str, u64) = ("96", 96 << 20);
/// Environment variable and transfer rate in bytes per second with which the memory takes longer
/// than any of these tests.
const VERY_SLOW_RATE: (&str, &str) = ("SEMPA_MOVE_RATE", "1000000");
/// Environment variable and transfer rate in bytes per second with which migrations use pre-copy.
/// On a faster network they use post-copy.
const PRE_COPY_RATE: (&str, &str) = ("SEMPA_MOVE_RATE", "40000000");
/// Number of bytes that the host must have sent before a fault.
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

/// Pre-copy sends all memory once. Afterwards only pages that the task has written since are sent.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_task_that_writes_during_pre_copy_is_whole() {
    with_hosts(3, &[PRE_COPY_RATE], |vm| {
        let tid = vm
            .spawn(&["-h2", "hold", LARGE_TASK.0, "writes"])
            .expect("spawned");
        let mut count = check_memory(vm, &tid);
        for (from, to) in [(2, "h3"), (3, "h1"), (1, "h2")] {
            let before = sent_bytes(vm.bed().host(from));
            vm.must_migrate(&tid, to);
            let bytes = sent_bytes(vm.bed().host(from)) - before;
            let earlier = std::mem::replace(&mut count, check_memory(vm, &tid));
            // All memory is sent once, and then at most the pages that were written since.
            let bound = LARGE_TASK.1 + (count - earlier) * BYTES_PER_COUNT + OVERHEAD_BYTES_MAX;
            assert!(bytes < bound, "{bytes} bytes have left, bound {bound}");
        }
        let ahead = pre_copied_bytes(vm);
        assert!(
            ahead.len() == 3 && ahead.iter().all(|bytes| *bytes >= LARGE_TASK.1),
            "{ahead:?}"
        );
    });
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn pre_copy_is_for_large_tasks_and_can_be_disabled() {
    for (size, setting) in [("20", "usual"), (LARGE_TASK.0, "never")] {
        with_hosts(2, &[("SEMPA_PRE_COPY", setting)], |vm| {
            let tid = vm.spawn(&["-h1", "hold", size]).expect("spawned");
            check_memory(vm, &tid);
            vm.must_migrate(&tid, "h2");
            check_memory(vm, &tid);
            assert_eq!(pre_copied_bytes(vm), [0; 0], "{size} MiB, {setting}");
        });
    }
}

#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_suspended_task_does_not_wait_for_pre_copy() {
    with_hosts(3, &[VERY_SLOW_RATE], |vm| {
        let tid = vm.spawn(&["-h2", "hold", LARGE_TASK.0]).expect("spawned");
        check_memory(vm, &tid);
        let moving = vm.start_migrate(&tid, "h3").expect("it begins");
        wait_for_step(vm, &tid, Step::Prepare);
        vm.pvm(&["job", "suspend", "--task", &tid])
            .expect("the console runs")
            .expect_success("suspend")
            .expect("suspended");
        wait_for_step(vm, &tid, Step::Run);
        assert!(pre_copied_bytes(vm)[0] < LARGE_TASK.1, "not all memory");
        vm.pvm(&["kill", &tid])
            .expect("the console runs")
            .expect_success("kill")
            .expect("killed");
        moving
            .finish(TIMEOUT)
            .expect("the console ends")
            .expect_success("migrate")
            .expect("it had moved");
    });
}

/// The task continues at the source, and the reason of the failure is reported.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_failed_pre_copy_leaves_the_task_at_the_source() {
    with_hosts(3, &[VERY_SLOW_RATE], |vm| {
        let kills: [(&str, &dyn Fn()); 2] = [
            ("the target's tasker", &|| {
                let tasker =
                    process_of(vm.bed().host(3), Victim::TargetTasker).expect("it is there");
                nix::sys::signal::kill(tasker, nix::sys::signal::Signal::SIGKILL)
                    .expect("it is there");
            }),
            ("the target", &|| vm.bed().host(3).kill_all()),
        ];
        for (victim, kill) in kills {
            let tid = vm
                .spawn(&["-h2", "hold", LARGE_TASK.0, "writes"])
                .expect("spawned");
            check_memory(vm, &tid);
            let before = sent_bytes(vm.bed().host(2));
            let moving = vm.start_migrate(&tid, "h3").expect("it begins");
            wait_for(TIMEOUT, || match sent_bytes(vm.bed().host(2)) - before {
                bytes if bytes >= SENT_BEFORE_FAULT_BYTES => Ok(()),
                bytes => Err(format!("{bytes} bytes have left")),
            })
            .or_panic_with_logs(vm);
            kill();
            let done = moving.finish(TIMEOUT).expect("the console ends");
            assert!(!done.succeeded(), "{victim}: {done:?}");
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
