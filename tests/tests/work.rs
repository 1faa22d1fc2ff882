//! Master-worker runs on hosts: workers and masters are killed and migrated, and the number of
//! nodes of a proof shows that each task counts once.

use sempa_tests::faults::tests_all_cases;
use sempa_tests::requirements::{build_folder, panic_if_unmet, require_testbed};
use sempa_tests::run::{RunningCommand, run_successfully};
use sempa_tests::vm::VmSettings;
use sempa_tests::{CommandResult, OrPanicWithLogs, Testbed, Vm, wait_for};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(1_200);
const POLL_TIMEOUT: Duration = Duration::from_secs(60);

/// Bound of Gilmore and Lawler, with which a search has many cheap nodes.
const GILMORE_LAWLER: &str = "gl";
/// The bound that is faster for the size of the instance.
const AUTOMATIC: &str = "auto";

/// Number of nodes of the sequential search for the instance `name`, whose first bound is the
/// optimum.
fn sequential_nodes(program: &Path, (name, bound): (&str, &str)) -> u64 {
    let mut command = Command::new(program);
    command.args([
        name,
        "--bound",
        bound,
        "--sequential",
        "--first-bound",
        "optimum",
    ]);
    let output = run_successfully(command, TIMEOUT).expect("the sequential search");
    let nodes = output
        .stdout
        .lines()
        .find_map(|line| line.strip_prefix("nodes "));
    nodes.expect("a number of nodes").parse().expect("a number")
}

/// Copies the program `qap` of the build to a folder that all hosts share.
fn install_qap(vm: &Vm) -> PathBuf {
    let built = build_folder().expect("a folder").join("qap");
    let missing = "qap is not built: run cargo build -p sempa-qap".to_string();
    panic_if_unmet((!built.exists()).then_some(missing));
    let program = vm.user_home().join("qap");
    fs::copy(built, &program).expect("a copy");
    program
}

/// A proof whose master runs on h1.
struct ProofRun<'a> {
    vm: &'a Vm<'a>,
    program: PathBuf,
    arguments: Vec<String>,
}

impl<'a> ProofRun<'a> {
    fn new(vm: &'a Vm<'a>, (instance, bound): (&str, &str), workers: u32) -> Self {
        let workers = workers.to_string();
        let arguments = [
            instance,
            "--bound",
            bound,
            "--first-bound",
            "optimum",
            "--json",
            "--run",
            "proof",
            "--workers",
            &workers,
            "--attempts",
            "1000",
        ];
        Self {
            vm,
            program: install_qap(vm),
            arguments: arguments.map(str::to_string).to_vec(),
        }
    }

    fn with_journal(mut self, dir: &Path) -> Self {
        self.arguments.push("--journal".to_string());
        self.arguments.push(dir.display().to_string());
        self
    }

    fn start(&self) -> RunningCommand {
        let mut command = self
            .vm
            .user_command(self.vm.testbed().host(1), &self.program);
        command.args(&self.arguments);
        RunningCommand::start(command, Stdio::null()).expect("starts")
    }

    /// Waits for the end of the proof and returns its result.
    fn result(&self, command: RunningCommand) -> Value {
        let result = command.wait_or_kill(TIMEOUT).or_panic_with_logs(self.vm);
        self.parse(&result)
    }

    fn parse(&self, result: &CommandResult) -> Value {
        assert!(
            result.succeeded(),
            "{result:?}\n{}",
            self.vm.events_and_logs()
        );
        serde_json::from_str(&result.stdout).expect("JSON")
    }
}

/// Returns the processes of workers on all hosts: host number, process id.
fn worker_processes(bed: &Testbed, run: &ProofRun) -> Vec<(usize, u32)> {
    let program = run.program.display().to_string();
    let is_worker = |line: &str| line.trim() == program;
    let mut found = Vec::new();
    for (index, host) in bed.hosts().iter().enumerate() {
        let processes = host.processes().into_iter();
        found.extend(
            processes
                .filter(|(_, line)| is_worker(line))
                .map(|(pid, _)| (index + 1, pid)),
        );
    }
    found
}

/// Waits until at least `count` workers run.
fn wait_for_workers(bed: &Testbed, run: &ProofRun, count: usize) -> Vec<(usize, u32)> {
    wait_for(POLL_TIMEOUT, || {
        let workers = worker_processes(bed, run);
        if workers.len() >= count {
            Ok(workers)
        } else {
            Err(format!("{} workers", workers.len()))
        }
    })
    .or_panic_with_logs(run.vm)
}

fn kill(pid: u32) {
    let pid = nix::unistd::Pid::from_raw(pid.cast_signed());
    // Fails only if the worker has ended.
    let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
}

fn count(result: &Value, name: &str) -> u64 {
    result["statistics"]["counts"][name]
        .as_u64()
        .expect("a number")
}

/// A proof on three hosts counts the nodes of the sequential search. Nothing remains of it.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn proof_counts_the_nodes_of_the_sequential_search() {
    let bed = require_testbed(3);
    let vm = start_on_all_hosts(&bed);
    let run = ProofRun::new(&vm, ("nug15", AUTOMATIC), 4);
    let result = run.result(run.start());
    assert_eq!(
        result["nodes"],
        sequential_nodes(&run.program, ("nug15", AUTOMATIC))
    );
    assert_eq!(result["finished"], true);
    for value in [
        "pool_performance",
        "average_workers",
        "efficiency",
        "normalized_per_wall",
    ] {
        assert!(
            result["statistics"][value]
                .as_f64()
                .is_some_and(|v| v > 0.0),
            "{result}"
        );
    }
    assert_eq!(
        count(&result, "results_discarded"),
        count(&result, "second_copies")
    );
    wait_for(POLL_TIMEOUT, || {
        let workers = worker_processes(&bed, &run);
        if workers.is_empty() {
            Ok(())
        } else {
            Err(format!("{workers:?}"))
        }
    })
    .or_panic_with_logs(&vm);
    vm.halt_and_wait().expect("halts");
    for host in bed.hosts() {
        assert_eq!(
            host.leftover_files(bed.folder()),
            Vec::<PathBuf>::new(),
            "{}",
            host.name()
        );
    }
}

/// Starts a virtual machine with all hosts.
fn start_on_all_hosts(bed: &Testbed) -> Vm<'_> {
    let vm = Vm::start(bed, VmSettings::default()).expect("a virtual machine");
    let others: Vec<&str> = bed.hosts()[1..].iter().map(|host| host.name()).collect();
    vm.add_hosts(&others).expect("the others join");
    vm
}

/// Workers that are killed all the time lose only their attempts: each node counts once.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn killed_workers_change_no_count() {
    let (host_count, workers, kills, instance) = if tests_all_cases() {
        (8, 61, 122, ("nug18", AUTOMATIC))
    } else {
        (4, 8, 24, ("nug16a", AUTOMATIC))
    };
    let bed = require_testbed(host_count);
    let vm = start_on_all_hosts(&bed);
    let run = ProofRun::new(&vm, instance, workers);
    let mut command = run.start();
    let mut killed = 0;
    while killed < kills && command.poll_status().expect("readable").is_none() {
        // Some workers of each round, so that the others make progress.
        let found = worker_processes(&bed, &run);
        let victims = found
            .iter()
            .skip(killed % 8)
            .step_by(8)
            .take(kills - killed);
        for (_, pid) in victims {
            kill(*pid);
            killed += 1;
        }
    }
    let result = run.result(command);
    assert_eq!(result["nodes"], sequential_nodes(&run.program, instance));
    println!("{killed} kills: {}", result["statistics"]["counts"]);
    assert!(killed > 0 && count(&result, "workers_lost") > 0);
    vm.halt_and_wait().expect("halts");
}

/// Workers that migrate all the time keep their tasks: no attempt is lost.
#[test]
#[ignore = "system tier: needs root, hosts and CRIU"]
fn migrated_workers_keep_their_tasks() {
    let (host_count, workers, moves, instance) = if tests_all_cases() {
        // Long enough for all migrations.
        (8, 61, 122, ("nug18", GILMORE_LAWLER))
    } else {
        (3, 4, 12, ("nug17", GILMORE_LAWLER))
    };
    let bed = require_testbed(host_count);
    let vm = start_on_all_hosts(&bed);
    let run = ProofRun::new(&vm, instance, workers);
    let mut command = run.start();
    wait_for_workers(&bed, &run, workers.min(4) as usize);
    let (mut moved, mut round) = (0u64, 0);
    while moved < moves && command.poll_status().expect("readable").is_none() {
        round += 1;
        let tasks = vm.tasks().or_panic_with_logs(&vm);
        let workers = tasks.iter().filter(|task| task.name.contains("qap"));
        let chosen: Vec<_> = workers.skip(round % 4).step_by(4).take(16).collect();
        let target = |index: usize| format!("h{}", 1 + (round + index) % host_count);
        let migrations: Vec<RunningCommand> = chosen
            .iter()
            .enumerate()
            .map(|(index, worker)| {
                vm.start_migration(&worker.tid, &target(index))
                    .expect("starts")
            })
            .collect();
        for migration in migrations {
            // A worker may end at the end of the proof, or be at the target already.
            let result = migration.wait_or_kill(TIMEOUT).or_panic_with_logs(&vm);
            moved += u64::from(result.succeeded());
        }
    }
    let result = run.result(command);
    assert_eq!(result["nodes"], sequential_nodes(&run.program, instance));
    println!("{moved} migrations: {}", result["statistics"]["counts"]);
    // The master may end before it hears of the last migrations.
    assert!(
        (1..=moved).contains(&count(&result, "worker_migrations")),
        "{result}"
    );
    assert_eq!(count(&result, "attempts_lost"), 0);
    assert_eq!(count(&result, "attempts_failed"), 0);
    vm.halt_and_wait().expect("halts");
}

/// A master that is killed again and again continues with its journal: the workers wait for the
/// next master, and each node counts once. The finished run leaves no journal.
#[test]
#[ignore = "system tier: needs root and hosts"]
fn killed_masters_lose_nothing() {
    let bed = require_testbed(3);
    let vm = start_on_all_hosts(&bed);
    let journal = vm.user_home().join("journal");
    let run = ProofRun::new(&vm, ("nug16a", AUTOMATIC), 4).with_journal(&journal);
    let mut masters = 0;
    let result = loop {
        let mut command = run.start();
        masters += 1;
        wait_for_workers(&bed, &run, 1);
        // The master is killed when its log has grown; the last one may finish.
        let size_before = journal_size(&journal);
        let has_progress = wait_for(POLL_TIMEOUT, || {
            let has_ended = command.poll_status().is_ok_and(|status| status.is_some());
            let has_grown = journal_size(&journal) > size_before + 2_000;
            if has_ended || has_grown {
                Ok(())
            } else {
                Err("no progress".to_string())
            }
        });
        has_progress.or_panic_with_logs(&vm);
        if masters == 6 || command.poll_status().expect("readable").is_some() {
            break run.result(command);
        }
        command.kill_children_and_wait().expect("killed");
    };
    assert_eq!(
        result["nodes"],
        sequential_nodes(&run.program, ("nug16a", AUTOMATIC)),
        "{result}"
    );
    assert_eq!(result["masters"], masters);
    assert!(masters > 1, "the proof was finished before the first kill");
    assert!(!journal.exists(), "a finished run leaves no journal");
    vm.halt_and_wait().expect("halts");
}

/// Size of all files of a journal in bytes.
fn journal_size(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some(entry.metadata().ok()?.len()))
        .sum()
}
