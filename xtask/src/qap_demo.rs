//! `cargo xtask demo --only qap`: a proof of optimality on four hosts, while owners log in and the
//! master is killed.
//!
//! The number of nodes proves that each subproblem counted once: it must be that of the sequential
//! search with the same first bound.

use crate::demo::{
    add_hosts, build_and_install, halt_and_check_leftovers, save_json, with_test_hosts,
};
use crate::demo_output::print_demo_line;
use anyhow::{Context, Result, bail, ensure};
use sempa_tests::run::{RunningCommand, run_successfully};
use sempa_tests::ssh::SshLogin;
use sempa_tests::{Testbed, Vm, requirements, wait_for};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use xtask_install as install;

const INSTANCE: &str = "nug18";
/// Value of the optimal permutation, as QAPLIB states it.
const OPTIMUM: u64 = 1_930;
const HOST_COUNT: usize = 4;
const WORKERS: &str = "6";
/// Numbers of the hosts whose owners log in, one after the other.
const OWNED_HOSTS: [usize; 2] = [2, 3];
const WAIT_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit of the proof, long enough for a loaded machine.
const PROOF_TIMEOUT: Duration = Duration::from_secs(1_800);
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// Columns of the plot.
const PLOT_WIDTH: usize = 72;

/// Workers at one time of the run.
#[derive(Clone, Debug, Serialize)]
struct Sample {
    seconds: f64,
    workers: u64,
    computing: u64,
    finished_tasks: u64,
}

/// The results of the demo, as they are written to the JSON file.
#[derive(Debug, Serialize)]
struct QapOutcome {
    good: bool,
    reasons: Vec<String>,
    sequential_nodes: u64,
    result: Value,
    samples: Vec<Sample>,
}

/// Runs the demo. Writes the results to the file `json_file`. Returns false if a check fails.
///
/// # Errors
/// A step cannot be performed.
pub(crate) fn run(json_file: &Path) -> Result<bool> {
    let prefix = build_and_install(&["sempa-qap"])?;
    if let Some(missing_requirement) = requirements::unmet_requirement() {
        bail!("the demo needs several hosts, and {missing_requirement}");
    }
    with_test_hosts(&prefix, HOST_COUNT, |vm| {
        let outcome = run_scenario(vm).inspect_err(|_| eprintln!("{}", vm.events_and_logs()))?;
        save_json(json_file, &outcome)?;
        for reason in &outcome.reasons {
            println!("demo: NOT GOOD: {reason}");
        }
        if outcome.good {
            print_demo_line("everything held");
        }
        Ok(outcome.good)
    })
}

/// A proof with its journal.
struct ProofRun<'a> {
    vm: &'a Vm<'a>,
    program: PathBuf,
    journal: PathBuf,
    began: Instant,
    samples: Vec<Sample>,
}

impl ProofRun<'_> {
    fn start(&self) -> Result<RunningCommand> {
        let mut command = self
            .vm
            .user_command(self.vm.testbed().host(1), &self.program);
        command
            .args([
                INSTANCE,
                "--first-bound",
                "optimum",
                "--json",
                "--workers",
                WORKERS,
            ])
            .arg("--journal")
            .arg(&self.journal);
        RunningCommand::start(command, Stdio::null())
    }

    /// Asks the master how far the run is. `None` while no master runs.
    fn status(&self) -> Option<Value> {
        let status = self.vm.pvm_json(&["work", "status", INSTANCE]).ok()?;
        status.into_iter().next()
    }

    fn sample(&mut self) {
        let status = self.status().unwrap_or_default();
        let number = |name: &str| status["progress"][name].as_u64().unwrap_or(0);
        self.samples.push(Sample {
            seconds: self.began.elapsed().as_secs_f64(),
            workers: number("workers"),
            computing: number("computing_workers"),
            finished_tasks: number("finished"),
        });
    }

    /// Takes samples until `is_reached` is true for the newest one, or the master has ended.
    fn sample_until(
        &mut self,
        master: &mut RunningCommand,
        what: &str,
        is_reached: impl Fn(&Sample) -> bool,
    ) -> Result<()> {
        let deadline = Instant::now() + PROOF_TIMEOUT;
        while Instant::now() < deadline {
            self.sample();
            let newest = self.samples.last().context("a sample")?;
            if is_reached(newest) || master.poll_status()?.is_some() {
                return Ok(());
            }
            std::thread::sleep(SAMPLE_INTERVAL);
        }
        bail!("{what}: not reached within {} s", PROOF_TIMEOUT.as_secs())
    }
}

/// Returns the number of nodes of the sequential search.
fn sequential_nodes(program: &Path) -> Result<u64> {
    let mut command = Command::new(program);
    command.args([INSTANCE, "--sequential", "--first-bound", "optimum"]);
    let output = run_successfully(command, PROOF_TIMEOUT)?;
    let nodes = output
        .stdout
        .lines()
        .find_map(|line| line.strip_prefix("nodes "));
    Ok(nodes.context("a number of nodes")?.parse()?)
}

fn run_scenario(vm: &Vm) -> Result<QapOutcome> {
    let built = install::target_folder()?
        .join(install::build_profile()?)
        .join("qap");
    let program = vm.user_home().join("qap");
    fs::copy(&built, &program).with_context(|| built.display().to_string())?;
    add_hosts(vm, print_demo_line)?;
    let mut run = ProofRun {
        vm,
        program,
        journal: vm.user_home().join("qap-journal"),
        began: Instant::now(),
        samples: Vec::new(),
    };
    print_demo_line(&format!(
        "alice proves the optimum of {INSTANCE} with {WORKERS} workers on {HOST_COUNT} hosts"
    ));
    let mut master = run.start()?;
    run.sample_until(&mut master, "all workers", |sample| sample.computing >= 3)?;
    for number in OWNED_HOSTS {
        log_in_for_a_while(&mut run, &mut master, vm.testbed(), number)?;
    }
    if master.poll_status()?.is_none() {
        print_demo_line("the master is killed; its workers wait for the next one");
        master.kill_children_and_wait()?;
        run.sample();
        print_demo_line("the master is started again and reads its journal");
        master = run.start()?;
    }
    run.sample_until(&mut master, "the end of the proof", |_| false)?;
    let ended = master.wait_or_kill(PROOF_TIMEOUT)?;
    ensure!(ended.succeeded(), "the proof failed: {ended:?}");
    let result: Value = serde_json::from_str(&ended.stdout).context("the result of the proof")?;
    print_demo_line("the sequential search counts the nodes again, for comparison");
    let sequential_nodes = sequential_nodes(&run.program)?;
    let mut reasons = check_result(&result, sequential_nodes);
    print_plot(&run.samples);
    print_result(&result, sequential_nodes);
    let samples = run.samples;
    halt_and_check_leftovers(vm, &mut reasons)?;
    Ok(QapOutcome {
        good: reasons.is_empty(),
        reasons,
        sequential_nodes,
        result,
        samples,
    })
}

/// Lets an owner log in on a host, and out again when the host has no worker left.
fn log_in_for_a_while(
    run: &mut ProofRun,
    master: &mut RunningCommand,
    testbed: &Testbed,
    number: usize,
) -> Result<()> {
    let host = testbed.host(number);
    if master.poll_status()?.is_some() {
        return Ok(());
    }
    print_demo_line(&format!("olga logs into {} over ssh", host.name()));
    let login = SshLogin::log_in(testbed, "olga", host)?;
    let program = run.program.display().to_string();
    wait_for(WAIT_TIMEOUT, || {
        let guests: Vec<u32> = host
            .processes()
            .into_iter()
            .filter(|(_, line)| line.trim() == program)
            .map(|(pid, _)| pid)
            .collect();
        match guests.is_empty() {
            true => Ok(()),
            false => Err(format!("workers remain on {}: {guests:?}", host.name())),
        }
    })?;
    print_demo_line(&format!(
        "{} is clean; olga works, then logs out",
        host.name()
    ));
    for _ in 0..5 {
        run.sample();
        std::thread::sleep(SAMPLE_INTERVAL);
    }
    login.log_out()
}

fn check_result(result: &Value, sequential_nodes: u64) -> Vec<String> {
    let mut reasons = Vec::new();
    if result["optimum"] != OPTIMUM {
        reasons.push(format!(
            "the optimum is {OPTIMUM}, not {}",
            result["optimum"]
        ));
    }
    if result["nodes"] != sequential_nodes {
        reasons.push(format!(
            "{} nodes were counted, but the sequential search counts {sequential_nodes}",
            result["nodes"]
        ));
    }
    reasons
}

/// Prints the number of workers over time: `#` computes, `.` is paused or waits.
fn print_plot(samples: &[Sample]) {
    let (Some(last), Some(most)) = (
        samples.last(),
        samples.iter().map(|sample| sample.workers).max(),
    ) else {
        return;
    };
    let duration = last.seconds.max(1.0);
    let mut columns: BTreeMap<usize, &Sample> = BTreeMap::new();
    for sample in samples {
        let column = (sample.seconds / duration * (PLOT_WIDTH - 1) as f64) as usize;
        columns.insert(column, sample);
    }
    println!("workers over {duration:.0} s (# computing, . paused or starting):");
    for level in (1..=most).rev() {
        let mut line = String::new();
        let mut newest = None;
        for column in 0..PLOT_WIDTH {
            newest = columns.get(&column).copied().or(newest);
            line.push(match newest {
                Some(sample) if sample.computing >= level => '#',
                Some(sample) if sample.workers >= level => '.',
                _ => ' ',
            });
        }
        println!("{level:>3} |{line}");
    }
    println!("    +{}", "-".repeat(PLOT_WIDTH));
}

fn print_result(result: &Value, sequential_nodes: u64) {
    let (statistics, counts) = (&result["statistics"], &result["statistics"]["counts"]);
    let number = |value: &Value| {
        value
            .as_f64()
            .map_or("-".to_string(), |v| format!("{v:.2}"))
    };
    print_demo_line(&format!(
        "proved: no permutation of {INSTANCE} costs less than {}; {} nodes, as many as the \
         sequential search ({sequential_nodes})",
        result["optimum"], result["nodes"]
    ));
    print_demo_line(&format!(
        "W {} s, T {} s, N {} s, P {}, A {}, efficiency {}; {} masters, {} attempts, {} \
         migrations, {} workers lost",
        number(&statistics["wall_s"]),
        number(&statistics["cpu_s"]),
        number(&statistics["normalized_s"]),
        number(&statistics["pool_performance"]),
        number(&statistics["average_workers"]),
        number(&statistics["efficiency"]),
        result["masters"],
        counts["attempts"],
        counts["worker_migrations"],
        counts["workers_lost"],
    ));
}
