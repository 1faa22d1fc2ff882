//! A checkpoint of one job does not stop other jobs, even if it takes long.

use sempa_tests::fake_criu::{self, misbehaviours, set_behaviour, take_misbehaviours};
use sempa_tests::requirements::testbed_with_own_engine;
use sempa_tests::ring_job::{Job, WORKER_COUNT};
use sempa_tests::run::RunningCommand;
use sempa_tests::testbed::Host;
use sempa_tests::vm::Settings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
const HOSTS: [&str; 2] = ["h1", "h2"];
/// Number of rounds that the other job must compute during the checkpoint. They include some
/// barriers of its group.
const OTHER_JOB_ROUNDS: usize = 20;
/// Maximum number of attempts. The engine's timeout is ten seconds, and on a loaded machine the
/// rounds may take longer.
const ATTEMPTS_MAX: usize = 5;

/// Starts `pvm checkpoint` for a job. Returns when the engines on all hosts wait before they write
/// anything.
fn start_checkpoint(bed: &Testbed, vm: &Vm<'_>, job: &Job) -> RunningCommand {
    for host in HOSTS {
        take_misbehaviours(bed, host);
        set_behaviour(bed, host, "wait");
    }
    let running = vm
        .start_pvm(&["--json", "checkpoint", &job.tid])
        .expect("it starts");
    for host in HOSTS {
        let waits = || match misbehaviours(bed, host) {
            none if none.is_empty() => Err(format!("no engine waits on {host}")),
            _ => Ok(()),
        };
        wait_for(TIMEOUT, waits).or_panic_with_logs(vm);
    }
    running
}

/// Returns the number of tasks of both jobs on each host.
fn tasks_per_host(vm: &Vm<'_>) -> [usize; 2] {
    let tasks = vm.tasks().or_panic_with_logs(vm);
    let is_on = |name: &str| {
        tasks
            .iter()
            .filter(|t| t.name == "ring_job" && t.host.as_deref() == Some(name))
            .count()
    };
    HOSTS.map(is_on)
}

/// Holds a checkpoint of `job` until `outside` has computed [`ROUNDS`] rounds, and lets it finish.
/// Returns true if the checkpoint was still held at that time; in that case it must succeed.
fn other_job_runs_during_checkpoint(bed: &Testbed, vm: &Vm<'_>, job: &Job, outside: &Job) -> bool {
    let checkpoint = start_checkpoint(bed, vm, job);
    let before = job.computed_rounds().len();
    outside.wait_for_rounds(vm, OTHER_JOB_ROUNDS);
    let rounds = job.computed_rounds().len() - before;
    let waits = |host: &Host| {
        host.processes()
            .iter()
            .any(|(_, line)| fake_criu::is_engine(line))
    };
    let held = bed.hosts().iter().all(waits);
    HOSTS.iter().for_each(|host| set_behaviour(bed, host, ""));
    let done = checkpoint.finish(TIMEOUT).or_panic_with_logs(vm);
    if held {
        assert_eq!(
            rounds, 0,
            "all its tasks stand still before the first one is written"
        );
        assert!(done.succeeded(), "{done:?}\n{}", vm.logs());
        let said: serde_json::Value = serde_json::from_str(done.out.trim()).expect("JSON");
        let written = said["tasks"].as_array().map(Vec::len);
        assert_eq!(written, Some(WORKER_COUNT + 1), "{said}");
    }
    job.wait_for_rounds(vm, 5);
    held
}

/// While a checkpoint of a job is held, another job on the same hosts continues.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_checkpoint_stops_no_other_job() {
    let bed = testbed_with_own_engine(2);
    fake_criu::install(&bed);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    let outside = Job::start_in_folder(&vm, "outside", "-h2");
    outside.wait_for_rounds(&vm, 5);
    let of_outside = tasks_per_host(&vm);
    let job = Job::start(&vm, "-h2");
    job.wait_for_rounds(&vm, 5);
    let of_both = tasks_per_host(&vm);
    let share_all = of_outside
        .iter()
        .zip(&of_both)
        .all(|(one, both)| *one > 1 && both > one);
    assert!(
        share_all,
        "both jobs are on all hosts, and talk on each: {of_outside:?} {of_both:?}"
    );

    let held =
        (0..ATTEMPTS_MAX).any(|_| other_job_runs_during_checkpoint(&bed, &vm, &job, &outside));
    assert!(held, "the engines' time was over each time\n{}", vm.logs());
    job.finish(&vm);
    outside.finish(&vm);
    vm.halt().expect("halts");
}
