//! Workers of a master-worker run that leave and join all the time. The program is
//! `tests/src/bin/work-churn.rs`.

use sempa_tests::faults::tests_all_cases;
use sempa_tests::requirements::{build_folder, panic_if_unmet, require_testbed};
use sempa_tests::run::RunningCommand;
use sempa_tests::vm::VmSettings;
use sempa_tests::{OrPanicWithLogs, Testbed, Vm, wait_for};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

const TIMEOUT: Duration = Duration::from_secs(1_200);
const WORKERS_TIMEOUT: Duration = Duration::from_secs(120);

/// Numbers of a run with churn.
struct ChurnCase {
    host_count: usize,
    workers: usize,
    departures: usize,
    /// Duration of a task in milliseconds.
    grain_ms: usize,
    /// Minimum time between two departures.
    pace: Duration,
}

impl ChurnCase {
    fn select() -> Self {
        if tests_all_cases() {
            // Ten minutes with one departure per second.
            Self {
                host_count: 8,
                workers: 125,
                departures: 600,
                grain_ms: 10_000,
                pace: Duration::from_secs(1),
            }
        } else {
            Self {
                host_count: 2,
                workers: 12,
                departures: 24,
                grain_ms: 400,
                pace: Duration::ZERO,
            }
        }
    }
}

fn install_program(vm: &Vm) -> PathBuf {
    let built = build_folder().expect("a folder").join("work-churn");
    let missing = "work-churn is not built: run cargo build -p sempa-tests".to_string();
    panic_if_unmet((!built.exists()).then_some(missing));
    let program = vm.user_home().join("work-churn");
    fs::copy(built, &program).expect("a copy");
    program
}

/// Returns the process ids of the workers on all hosts. The command line of a worker is the program
/// alone.
fn worker_pids(bed: &Testbed, program: &Path) -> Vec<u32> {
    let program = program.display().to_string();
    bed.hosts()
        .iter()
        .flat_map(|host| host.processes())
        .filter(|(_, line)| line.trim() == program)
        .map(|(pid, _)| pid)
        .collect()
}

/// Kills one worker after another, each when the run has all its workers again.
fn replace_workers(vm: &Vm, run: &mut RunningCommand, program: &Path, case: &ChurnCase) -> usize {
    let mut killed = 0;
    let mut latest = Instant::now();
    while killed < case.departures {
        let workers = wait_for(WORKERS_TIMEOUT, || {
            if run.poll_status().is_ok_and(|status| status.is_some()) {
                return Ok(Vec::new());
            }
            let workers = worker_pids(vm.testbed(), program);
            // At a given pace, departures do not wait for the replacements.
            let is_complete = workers.len() >= case.workers || !case.pace.is_zero();
            if is_complete && !workers.is_empty() && latest.elapsed() >= case.pace {
                Ok(workers)
            } else {
                Err(format!("{} of {} workers", workers.len(), case.workers))
            }
        })
        .or_panic_with_logs(vm);
        let Some(victim) = workers.get(killed * 7 % workers.len().max(1)) else {
            return killed;
        };
        latest = Instant::now();
        let pid = nix::unistd::Pid::from_raw(victim.cast_signed());
        if nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).is_ok() {
            killed += 1;
        }
    }
    killed
}

/// Workers that leave are replaced, each task has one result, and no worker is forgotten.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn replaced_workers_lose_no_task() {
    let case = ChurnCase::select();
    let bed = require_testbed(case.host_count);
    let vm = Vm::start(&bed, VmSettings::default()).expect("a virtual machine");
    let others: Vec<&str> = bed.hosts()[1..].iter().map(|host| host.name()).collect();
    vm.add_hosts(&others).expect("the others join");
    let program = install_program(&vm);
    // Enough work that the run outlasts the departures at the given pace.
    let rounds = case.departures * case.pace.as_millis().max(100) as usize / case.grain_ms + 2;
    let tasks = case.workers * rounds;
    let mut command = vm.user_command(bed.host(1), &program);
    command.args([case.workers, tasks, case.grain_ms].map(|number| number.to_string()));
    let mut run = RunningCommand::start(command, Stdio::null()).expect("starts");
    wait_for(WORKERS_TIMEOUT, || {
        let count = worker_pids(&bed, &program).len();
        if count >= case.workers {
            Ok(())
        } else {
            Err(format!("{count} of {} workers", case.workers))
        }
    })
    .or_panic_with_logs(&vm);
    let killed = replace_workers(&vm, &mut run, &program, &case);
    let result = run.wait_or_kill(TIMEOUT).or_panic_with_logs(&vm);
    assert!(result.succeeded(), "{result:?}\n{}", vm.events_and_logs());
    let report: Value = serde_json::from_str(&result.stdout).expect("JSON");
    println!("{killed} departures, {tasks} tasks: {report}");
    let number = |name: &str| report[name].as_u64().expect("a number");
    assert!(killed > 0, "the run ended before the first departure");
    assert_eq!(number("results"), tasks as u64, "{report}");
    assert_eq!(number("repeated_results"), 0, "{report}");
    assert_eq!(number("quarantined"), 0, "{report}");
    // A worker that is killed before it is ready, or when the run ends, does not count as lost.
    let (ready, lost) = (number("ready_workers"), number("lost_workers"));
    assert!(
        (killed as u64 / 2..=killed as u64).contains(&lost),
        "{report}"
    );
    let present = ready.checked_sub(lost).expect("a lost worker was ready");
    assert!((1..=case.workers as u64).contains(&present), "{report}");
    wait_for(WORKERS_TIMEOUT, || {
        let workers = worker_pids(&bed, &program);
        if workers.is_empty() {
            Ok(())
        } else {
            Err(format!("workers remain: {workers:?}"))
        }
    })
    .or_panic_with_logs(&vm);
    vm.halt_and_wait().expect("halts");
    for host in bed.hosts() {
        let files = host.leftover_files(bed.folder());
        assert_eq!(files, Vec::<PathBuf>::new(), "{}", host.name());
    }
}
