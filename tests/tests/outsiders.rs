//! A checkpoint of a job stops no other job, however long it takes.

use sempa_tests::fake_criu::{self, behave, misbehaved, take_misbehaved};
use sempa_tests::needs::testbed_with_own_engine;
use sempa_tests::ring_job::{Job, WORKERS};
use sempa_tests::run::Running;
use sempa_tests::testbed::Host;
use sempa_tests::vm::Settings;
use sempa_tests::{Sure, Testbed, Vm, eventually};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(120);
const HOSTS: [&str; 2] = ["h1", "h2"];
/// Rounds of the other job during the checkpoint: some barriers of its group, too.
const ROUNDS: usize = 20;
/// Attempts: an engine has ten seconds, and on a loaded machine the rounds may take longer.
const TRIES: usize = 5;

/// Starts `pvm checkpoint` of a job, and returns when its engines wait before they write anything.
fn start_checkpoint(bed: &Testbed, vm: &Vm<'_>, job: &Job) -> Running {
    for host in HOSTS {
        take_misbehaved(bed, host);
        behave(bed, host, "wait");
    }
    let running = vm
        .start_pvm(&["--json", "checkpoint", &job.tid])
        .expect("it starts");
    for host in HOSTS {
        let waits = || match misbehaved(bed, host) {
            none if none.is_empty() => Err(format!("no engine waits on {host}")),
            _ => Ok(()),
        };
        eventually(TIMEOUT, waits).sure(vm);
    }
    running
}

/// Returns how many tasks of both jobs run on each host.
fn spread(vm: &Vm<'_>) -> [usize; 2] {
    let tasks = vm.tasks().sure(vm);
    let is_on = |name: &str| {
        tasks
            .iter()
            .filter(|t| t.name == "ring_job" && t.host.as_deref() == Some(name))
            .count()
    };
    HOSTS.map(is_on)
}

/// Holds a checkpoint of the job until the other job has made progress. Returns true if it was held
/// until then; then it succeeds.
fn goes_on_beside(bed: &Testbed, vm: &Vm<'_>, job: &Job, outside: &Job) -> bool {
    let checkpoint = start_checkpoint(bed, vm, job);
    let before = job.marks().len();
    outside.go_on(vm, ROUNDS);
    let rounds = job.marks().len() - before;
    let waits = |host: &Host| {
        host.processes()
            .iter()
            .any(|(_, line)| fake_criu::is_engine(line))
    };
    let held = bed.hosts().iter().all(waits);
    HOSTS.iter().for_each(|host| behave(bed, host, ""));
    let done = checkpoint.finish(TIMEOUT).sure(vm);
    if held {
        assert_eq!(
            rounds, 0,
            "all its tasks are frozen before the first one is written"
        );
        assert!(done.good(), "{done:?}\n{}", vm.logs());
        let said: serde_json::Value = serde_json::from_str(done.out.trim()).expect("JSON");
        let written = said["tasks"].as_array().map(Vec::len);
        assert_eq!(written, Some(WORKERS + 1), "{said}");
    }
    job.go_on(vm, 5);
    held
}

/// Another job on the same hosts computes on while the checkpoint is held.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn a_checkpoint_stops_no_other_job() {
    let bed = testbed_with_own_engine(2);
    fake_criu::install(&bed);
    let vm = Vm::start(&bed, Settings::default()).expect("a virtual machine");
    vm.add(&["h2"]).expect("it joins");
    let outside = Job::start_beside(&vm, "outside", "-h2");
    outside.go_on(&vm, 5);
    let of_outside = spread(&vm);
    let job = Job::start(&vm, "-h2");
    job.go_on(&vm, 5);
    let of_both = spread(&vm);
    let share_all = of_outside
        .iter()
        .zip(&of_both)
        .all(|(one, both)| *one > 1 && both > one);
    assert!(
        share_all,
        "both jobs are on all hosts, and talk on each: {of_outside:?} {of_both:?}"
    );

    let held = (0..TRIES).any(|_| goes_on_beside(&bed, &vm, &job, &outside));
    assert!(held, "the engines' time was over each time\n{}", vm.logs());
    job.finish(&vm);
    outside.finish(&vm);
    vm.halt().expect("halts");
}
