//! A checkpoint of one job does not stop other jobs, even if the checkpoint takes long.

use sempa_tests::fake_criu::{self, misbehaviours, set_behaviour, take_misbehaviours};
use sempa_tests::requirements::require_testbed_with_own_engine;
use sempa_tests::ring_job::{RingJob, WORKER_COUNT};
use sempa_tests::run::RunningCommand;
use sempa_tests::testbed::Host;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
const HOST_NAMES: [&str; 2] = ["h1", "h2"];
/// Number of rounds that the other job must compute during the checkpoint. These rounds include
/// some barriers of its group.
const OTHER_JOB_ROUNDS: usize = 20;
/// Maximum number of attempts. The engine's timeout is ten seconds, and on a loaded machine the
/// rounds may take longer.
const ATTEMPTS_MAX: usize = 5;

/// Starts `pvm checkpoint` for a job. Returns the running command when the engines on all hosts
/// wait before their first write.
fn start_checkpoint(bed: &Testbed, vm: &Vm<'_>, job: &RingJob) -> RunningCommand {
    for host in HOST_NAMES {
        take_misbehaviours(bed, host);
        set_behaviour(bed, host, "wait");
    }
    let checkpoint_command = vm
        .start_pvm(&["--json", "checkpoint", &job.tid])
        .expect("it starts");
    for host in HOST_NAMES {
        let check_engine_waits = || match misbehaviours(bed, host) {
            calls if calls.is_empty() => Err(format!("no engine waits on {host}")),
            _ => Ok(()),
        };
        wait_for(TIMEOUT, check_engine_waits).or_panic_with_logs(vm);
    }
    checkpoint_command
}

/// Returns the number of tasks of all jobs on each host.
fn tasks_per_host(vm: &Vm<'_>) -> [usize; 2] {
    let tasks = vm.tasks().or_panic_with_logs(vm);
    let task_count_on = |name: &str| {
        tasks
            .iter()
            .filter(|t| t.name == "ring_job" && t.host.as_deref() == Some(name))
            .count()
    };
    HOST_NAMES.map(task_count_on)
}

/// Delays a checkpoint of `job` until `other_job` has computed [`OTHER_JOB_ROUNDS`] rounds, and
/// then lets the checkpoint finish. If all engines waited until then, checks that `job` computed no
/// round meanwhile and that the checkpoint succeeds, and returns true. Returns false if an engine
/// ended earlier.
fn check_other_job_during_checkpoint(
    bed: &Testbed,
    vm: &Vm<'_>,
    job: &RingJob,
    other_job: &RingJob,
) -> bool {
    let checkpoint_command = start_checkpoint(bed, vm, job);
    let round_count_before = job.computed_rounds().len();
    other_job.wait_for_rounds(vm, OTHER_JOB_ROUNDS);
    let new_round_count = job.computed_rounds().len() - round_count_before;
    let has_engine = |host: &Host| {
        host.processes()
            .iter()
            .any(|(_, line)| fake_criu::is_engine_command_line(line))
    };
    let is_delayed = bed.hosts().iter().all(has_engine);
    HOST_NAMES
        .iter()
        .for_each(|host| set_behaviour(bed, host, ""));
    let output = checkpoint_command
        .wait_or_kill(TIMEOUT)
        .or_panic_with_logs(vm);
    if is_delayed {
        assert_eq!(
            new_round_count, 0,
            "all its tasks are frozen before the first one is written"
        );
        assert!(output.succeeded(), "{output:?}\n{}", vm.events_and_logs());
        let reply: serde_json::Value = serde_json::from_str(output.stdout.trim()).expect("JSON");
        let task_count = reply["tasks"].as_array().map(Vec::len);
        assert_eq!(task_count, Some(WORKER_COUNT + 1), "{reply}");
    }
    job.wait_for_rounds(vm, 5);
    is_delayed
}

/// While the engines delay a checkpoint of a job, another job on the same hosts continues.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_checkpoint_stops_no_other_job() {
    let bed = require_testbed_with_own_engine(2);
    fake_criu::install(&bed);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    vm.add_hosts(&["h2"]).expect("it joins");
    let other_job = RingJob::start_in_folder(&vm, "outside", "-h2");
    other_job.wait_for_rounds(&vm, 5);
    let other_job_counts = tasks_per_host(&vm);
    let job = RingJob::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    let total_counts = tasks_per_host(&vm);
    let is_every_host_shared =
        other_job_counts
            .iter()
            .zip(&total_counts)
            .all(|(other_job_count, total_count)| {
                *other_job_count > 1 && total_count > other_job_count
            });
    assert!(
        is_every_host_shared,
        "both jobs are on all hosts, and talk on each: {other_job_counts:?} {total_counts:?}"
    );

    let is_delayed =
        (0..ATTEMPTS_MAX).any(|_| check_other_job_during_checkpoint(&bed, &vm, &job, &other_job));
    assert!(
        is_delayed,
        "the engines' time was over each time\n{}",
        vm.events_and_logs()
    );
    job.end_and_check(&vm);
    other_job.end_and_check(&vm);
    vm.halt_and_wait().expect("halts");
}
