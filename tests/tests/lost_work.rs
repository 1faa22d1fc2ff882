//! Measures how much work a job with checkpoints loses when a host dies, as counted by the job
//! itself. Also tests the death of all hosts at once.

use sempa_proto::event::EventKind;
use sempa_tests::faults::tests_all_cases;
use sempa_tests::requirements::require_testbed;
use sempa_tests::ring_job::{ComputedRound, RingJob};
use sempa_tests::rng::{Rng, print_seed};
use sempa_tests::testbed::Host;
use sempa_tests::vm::{EventEntry, VmSettings};
use sempa_tests::{OrPanicWithLogs, Vm, wait_for};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const TIMEOUT: Duration = Duration::from_secs(120);
/// Maximum computing time that a job may lose when a host is killed.
const LOST_TIME_MAX: Duration = Duration::from_secs(5);
/// Time for which each task of the job computes in a round, in microseconds.
const ROUND_WORK_US: i32 = 4000;

fn now_us() -> u64 {
    let elapsed = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .expect("after 1970");
    u64::try_from(elapsed.as_micros()).expect("fits")
}

/// Returns the complete checkpoints in the event log, as (time of completion in microseconds since
/// 1970, name).
fn complete_checkpoints(events: &[EventEntry]) -> Vec<(u64, String)> {
    let time_and_name = |entry: &EventEntry| match &entry.kind {
        EventKind::Checkpointed {
            checkpoint: name, ..
        } => Some((entry.at_us, name.clone())),
        _ => None,
    };
    events.iter().filter_map(time_and_name).collect()
}

/// Returns the names of the checkpoints to which the job has rolled back, in the order of the
/// rollbacks.
fn restored_checkpoints(events: &[EventEntry]) -> Vec<String> {
    let restored_name = |entry: &EventEntry| match &entry.kind {
        EventKind::Restarted {
            checkpoint: name, ..
        } => Some(name.clone()),
        _ => None,
    };
    events.iter().filter_map(restored_name).collect()
}

/// Returns the number of rounds that the job has lost because a host was killed at the time
/// `killed_at_us` (microseconds since 1970), and the time from the last retained round to the kill.
/// Returns `None` until the job computes again.
fn lost_work(computed_rounds: &[ComputedRound], killed_at_us: u64) -> Option<(i64, Duration)> {
    let last_index = computed_rounds
        .windows(2)
        .position(|pair| pair[1].1 > killed_at_us && pair[1].0 <= pair[0].0)?;
    let (last_round, repeated_round) =
        (computed_rounds[last_index], computed_rounds[last_index + 1]);
    let retained_round = computed_rounds[..=last_index]
        .iter()
        .rev()
        .find(|(round, _)| *round < repeated_round.0)?;
    Some((
        last_round.0 - repeated_round.0 + 1,
        Duration::from_micros(killed_at_us.saturating_sub(retained_round.1)),
    ))
}

/// The order in which the processes of a host are killed.
#[derive(Clone, Copy, PartialEq)]
enum KillOrder {
    /// All processes are killed at once.
    AllAtOnce,
    /// The tasks are killed first, so that the daemon reports their death.
    TasksFirst,
}

fn kill_host(vm: &Vm<'_>, host: &Host, kill_order: KillOrder) {
    if kill_order == KillOrder::TasksFirst {
        let is_kill_report =
            |kind: &EventKind| matches!(kind, EventKind::TaskEnded { status: 9, .. });
        let killed_task_count = || {
            let events = vm.events().or_panic_with_logs(vm);
            let reports = events.iter().filter(|entry| is_kill_report(&entry.kind));
            reports.count()
        };
        let previous_count = killed_task_count();
        host.kill_matching_processes(|line| line.contains("ring_job"));
        let check_reported = || {
            if killed_task_count() > previous_count {
                Ok(())
            } else {
                Err("the deaths are not reported".to_string())
            }
        };
        wait_for(TIMEOUT, check_reported).or_panic_with_logs(vm);
    }
    host.kill_all_processes();
}

/// Waits until a new checkpoint is complete. Returns the time of its completion in microseconds
/// since 1970.
fn wait_for_checkpoint(vm: &Vm<'_>) -> u64 {
    let previous_count = complete_checkpoints(&vm.events().or_panic_with_logs(vm)).len();
    let completion_us = wait_for(TIMEOUT, || {
        let events = vm.events().map_err(|error| error.to_string())?;
        let current_checkpoints = complete_checkpoints(&events);
        match current_checkpoints.last() {
            Some((at_us, _)) if current_checkpoints.len() > previous_count => Ok(*at_us),
            _ => Err("no newer checkpoint".to_string()),
        }
    });
    completion_us.or_panic_with_logs(vm)
}

/// Kills a host and waits until the job has rolled back to its newest checkpoint and computes
/// again. Returns the lost computing time.
fn kill_and_wait_for_rollback(
    vm: &Vm<'_>,
    job: &RingJob,
    host: &Host,
    kill_order: KillOrder,
) -> Duration {
    let events_before = vm.events().or_panic_with_logs(vm);
    let killed_at_us = now_us();
    kill_host(vm, host, kill_order);
    let restart_count = restored_checkpoints(&events_before).len();
    let restored_name = wait_for(TIMEOUT, || {
        let events = vm.events().map_err(|error| error.to_string())?;
        let restarts = restored_checkpoints(&events);
        let newest_names = restarts.last().filter(|_| restarts.len() > restart_count);
        newest_names.cloned().ok_or("no restart".to_string())
    })
    .or_panic_with_logs(vm);
    // The job may also roll back to a checkpoint that became complete after the kill.
    let current_checkpoints = complete_checkpoints(&vm.events().or_panic_with_logs(vm));
    let count_before = complete_checkpoints(&events_before).len();
    let newest_names = current_checkpoints[count_before - 1..]
        .iter()
        .map(|(_, name)| name);
    assert!(
        newest_names.clone().any(|name| *name == restored_name),
        "back to {restored_name}: {current_checkpoints:?}"
    );
    let (lost_round_count, lost_time) = wait_for(TIMEOUT, || {
        lost_work(&job.computed_rounds(), killed_at_us)
            .ok_or("the job does not compute again".to_string())
    })
    .or_panic_with_logs(vm);
    eprintln!(
        "{}: {lost_round_count} rounds and {lost_time:.2?} lost",
        host.name()
    );
    lost_time
}

/// Kills hosts at random times while a job with periodic checkpoints runs. `interval_option` is the
/// console's option for the checkpoint interval. After each kill the job must roll back to its
/// newest checkpoint, and its result must be correct at the end. The lost time depends on the
/// machine, so it is compared with [`LOST_TIME_MAX`] only with `SEMPA_TEST_FULL=1`.
fn kill_hosts_under_job(interval_option: &str, kill_order: KillOrder) {
    let bed = require_testbed(3);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    let job = RingJob::start_slow(&vm, "-h2", ROUND_WORK_US);
    job.wait_for_rounds(&vm, 5);
    vm.pvm_json(&["checkpoint", interval_option, "5s", &job.tid])
        .or_panic_with_logs(&vm);
    let (mut rng, mut lost_times) = (Rng::new(print_seed()), Vec::new());
    let kill_count = if tests_all_cases() { 6 } else { 1 };
    let first_number = rng.next_below(2);
    for number in first_number..first_number + kill_count {
        let victim = bed.host(2 + number % 2);
        // The kill follows up to six seconds after a checkpoint: before the next checkpoint is
        // complete, or within a second after its completion.
        let kill_time_us = wait_for_checkpoint(&vm) + rng.next_below(6_000_000) as u64;
        wait_for(TIMEOUT, || {
            if now_us() >= kill_time_us {
                Ok(())
            } else {
                Err("too early".to_string())
            }
        })
        .or_panic_with_logs(&vm);
        lost_times.push(kill_and_wait_for_rollback(&vm, &job, victim, kill_order));
        vm.add_hosts(&[victim.name()]).or_panic_with_logs(&vm);
    }
    job.end_and_check(&vm);
    if tests_all_cases() {
        check_lost_times(&vm, &lost_times);
    }
    vm.halt_and_wait().expect("halts");
}

/// Checks that no lost time exceeds the limit. The check is valid only on a machine without other
/// load.
fn check_lost_times(vm: &Vm<'_>, lost_times: &[Duration]) {
    /// Additional time that may be lost on a slow machine, if an event warns that checkpoints take
    /// too long.
    const SLOW_CHECKPOINT_MARGIN: Duration = Duration::from_secs(4);
    let is_warning =
        |kind: &EventKind| matches!(kind, EventKind::Note { text } if text.contains("may be lost"));
    let events = vm.events().or_panic_with_logs(vm);
    let has_warning = events.iter().any(|entry| is_warning(&entry.kind));
    let limit = if has_warning {
        LOST_TIME_MAX + SLOW_CHECKPOINT_MARGIN
    } else {
        LOST_TIME_MAX
    };
    assert!(
        lost_times.iter().all(|lost_time| *lost_time <= limit),
        "{lost_times:?}, warned: {has_warning}"
    );
}

/// With a checkpoint every five seconds, the job rolls back to the newest checkpoint and finishes
/// with the correct result.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_with_checkpoint_interval_loses_little() {
    kill_hosts_under_job("--every", KillOrder::TasksFirst);
}

/// With a bound of five seconds for lost work, the job rolls back and finishes with the correct
/// result.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn job_with_loss_bound_loses_little() {
    kill_hosts_under_job("--loss", KillOrder::AllAtOnce);
}

/// All hosts of a virtual machine are killed at once. A new virtual machine restarts the job.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_job_restarts_after_the_death_of_all_hosts() {
    let bed = require_testbed(3);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2", "h3"]).expect("the others join");
    let job = RingJob::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    vm.pvm_json(&["checkpoint", "--every", "1s", &job.tid])
        .or_panic_with_logs(&vm);
    for _ in 0..2 {
        wait_for_checkpoint(&vm);
    }
    job.wait_for_rounds(&vm, 3);
    for host in bed.hosts() {
        host.kill_all_processes();
    }
    let vm = Vm::start(&bed, VmSettings::default()).or_panic_with_logs(&vm);
    vm.add_hosts(&["h2", "h3"]).or_panic_with_logs(&vm);
    let list_output = vm.run_pvm(&["checkpoints"]).or_panic_with_logs(&vm);
    let names = list_output
        .stdout
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    let newest_name = names
        .filter(|name| name.starts_with(&job.tid))
        .max()
        .unwrap_or_else(|| panic!("{list_output:?}"));
    let restart_output = vm
        .run_pvm(&["restart", newest_name])
        .or_panic_with_logs(&vm);
    assert!(
        restart_output.succeeded(),
        "{restart_output:?}\n{}",
        vm.events_and_logs()
    );
    job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}
