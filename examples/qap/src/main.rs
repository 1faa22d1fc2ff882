//! `qap`: proves the optimum of a quadratic assignment problem.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use clap::{Parser, ValueEnum};
use master_worker::{ProgramOptions, RunOutcome};
use nix::sys::resource::{UsageWho, getrusage};
use sempa_qap::distributed::{self, ProofDriver};
use sempa_qap::heuristic::{TabuOptions, tabu_search};
use sempa_qap::instance::{Cost, Instance, Solution};
use sempa_qap::nugent;
use sempa_qap::proof::{FirstBound, Optimum, Proof, ProofOptions, solve};
use sempa_qap::search::{BoundKind, Directive};

/// Proves the optimum of a quadratic assignment problem.
#[derive(Parser)]
#[command(name = "qap", version)]
struct Arguments {
    /// Embedded instance: nug12, nug14, nug15, nug16a, nug16b, nug17, nug18, nug20, nug21, nug22,
    /// nug24, nug25, nug27, nug28 or nug30
    #[arg(required_unless_present = "file", conflicts_with = "file")]
    name: Option<String>,
    /// File in the data format of QAPLIB
    #[arg(long, value_name = "FILE")]
    file: Option<PathBuf>,
    /// Lower bound: Gilmore-Lawler (gl), Hahn-Grant (hg), or the faster one for the size
    #[arg(long, value_enum, default_value_t = BoundChoice::Auto)]
    bound: BoundChoice,
    /// Search in this process only, without a virtual machine
    #[arg(long)]
    sequential: bool,
    /// Number of worker processes on the virtual machine
    #[arg(long, value_name = "N", default_value_t = 2)]
    workers: u32,
    /// Name of the run, for `pvm work`; the default is the instance
    #[arg(long, value_name = "NAME")]
    run: Option<String>,
    /// Directory of the journal: a killed master continues when it is started again
    #[arg(long, value_name = "DIR")]
    journal: Option<PathBuf>,
    /// Counted losses of its worker after which a subproblem is given up
    #[arg(long, value_name = "N", default_value_t = 5)]
    attempts: u32,
    /// Print a progress line every N seconds
    #[arg(long, value_name = "SECONDS")]
    progress: Option<u64>,
    /// Print the result and all statistics as JSON
    #[arg(long)]
    json: bool,
    /// First upper bound: heuristic, optimum (of an embedded instance), or a value
    #[arg(long, value_name = "BOUND", default_value = "heuristic")]
    first_bound: String,
}

#[derive(Clone, Copy, ValueEnum)]
enum BoundChoice {
    Gl,
    Hg,
    Auto,
}

fn main() -> Result<()> {
    if master_worker::is_worker() {
        return distributed::run_as_worker().map_err(|error| anyhow!(error));
    }
    let arguments = Arguments::parse();
    let (instance, known) = read_instance(&arguments)?;
    let bound = match arguments.bound {
        BoundChoice::Gl => BoundKind::GilmoreLawler,
        BoundChoice::Hg => BoundKind::HahnGrant,
        BoundChoice::Auto => BoundKind::for_instance(&instance),
    };
    let first_bound = first_bound(&arguments.first_bound, known)?;
    if !arguments.sequential {
        return prove_with_workers(&arguments, instance, bound, &first_bound);
    }
    let options = ProofOptions { bound, first_bound };
    let proof = solve(&instance, &options, |_| Directive::Continue)?;
    print_proof(&proof);
    println!("processor-seconds {:.3}", processor_seconds()?);
    Ok(())
}

fn print_proof(proof: &Proof) {
    match &proof.optimum {
        Optimum::Solution(solution) => {
            println!("optimum {}", solution.value);
            println!("permutation {}", permutation_text(solution));
        }
        Optimum::AtLeast(value) => println!("no permutation costs less than {value}"),
    }
    println!("nodes {}", proof.nodes);
}

/// Returns the permutation as QAPLIB prints it: numbers from 1.
fn permutation_text(solution: &Solution) -> String {
    let numbers = solution
        .permutation
        .iter()
        .map(|facility| (facility + 1).to_string());
    numbers.collect::<Vec<_>>().join(" ")
}

/// Proves the optimum with workers on the virtual machine, and prints the proof and the statistics
/// of the run.
fn prove_with_workers(
    arguments: &Arguments,
    instance: Instance,
    bound: BoundKind,
    first_bound: &FirstBound,
) -> Result<()> {
    let (best_value, first_solution) = match first_bound {
        FirstBound::Value(value) => (*value, None),
        FirstBound::Heuristic(options) => {
            let solution = tabu_search(&instance, *options);
            (solution.value, Some(solution))
        }
    };
    let run_name = arguments.run.clone().or_else(|| arguments.name.clone());
    let run_name = run_name.unwrap_or_else(|| "qap".to_string());
    let mut options = ProgramOptions::new(run_name, arguments.workers);
    options.master.journal.clone_from(&arguments.journal);
    options.master.progress_interval = arguments.progress.map(Duration::from_secs);
    options.master.settings.retry.attempts_max = arguments.attempts;
    let driver = ProofDriver::new(instance, bound, best_value, first_solution);
    let (driver, outcome) = distributed::prove(driver, &options).map_err(|error| anyhow!(error))?;
    let proof = driver.into_proof();
    if arguments.json {
        println!("{}", json_result(&proof, &outcome));
    } else if outcome.is_finished {
        print_proof(&proof);
        println!("{}", outcome.statistics);
    }
    if !outcome.is_finished {
        bail!("the run was stopped before the proof was complete: nothing is proved");
    }
    Ok(())
}

fn json_result(proof: &Proof, outcome: &RunOutcome) -> serde_json::Value {
    let permutation = match &proof.optimum {
        Optimum::Solution(solution) => Some(permutation_text(solution)),
        Optimum::AtLeast(_) => None,
    };
    serde_json::json!({
        "finished": outcome.is_finished,
        "optimum": proof.optimum.value(),
        "permutation": permutation,
        "nodes": proof.nodes,
        "masters": outcome.generation,
        "repeated_results": outcome.repeated_results,
        "statistics": outcome.statistics,
    })
}

/// Returns the instance, and its optimum if it is an embedded one.
fn read_instance(arguments: &Arguments) -> Result<(Instance, Option<Cost>)> {
    if let Some(file) = &arguments.file {
        let text = std::fs::read_to_string(file)
            .with_context(|| format!("cannot read the instance {}", file.display()))?;
        let instance = Instance::parse(&text)
            .with_context(|| format!("{} is not in the data format of QAPLIB", file.display()))?;
        return Ok((instance, None));
    }
    let name = arguments.name.as_deref().unwrap_or_default();
    let Some(nugent) = nugent::find(name) else {
        let names: Vec<&str> = nugent::INSTANCES.iter().map(|nugent| nugent.name).collect();
        bail!(
            "there is no embedded instance \"{name}\": use one of {}, or --file",
            names.join(", ")
        );
    };
    Ok((nugent.instance(), Some(nugent.optimum)))
}

fn first_bound(text: &str, known: Option<Cost>) -> Result<FirstBound> {
    match text {
        "heuristic" => Ok(FirstBound::Heuristic(TabuOptions::DEFAULT)),
        "optimum" => known.map(FirstBound::Value).context(
            "the optimum of an instance from a file is not known: use --first-bound VALUE",
        ),
        value => Ok(FirstBound::Value(value.parse().with_context(|| {
            format!("--first-bound {value}: use heuristic, optimum or a whole number")
        })?)),
    }
}

/// Returns the processor time of this process.
fn processor_seconds() -> Result<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).context("cannot read the processor time")?;
    let time = usage.user_time();
    Ok(time.tv_sec() as f64 + time.tv_usec() as f64 / 1e6)
}
