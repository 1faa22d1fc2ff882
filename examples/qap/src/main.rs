//! `qap`: proves the optimum of a quadratic assignment problem.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::{Parser, ValueEnum};
use nix::sys::resource::{UsageWho, getrusage};
use sempa_qap::heuristic::TabuOptions;
use sempa_qap::instance::{Cost, Instance};
use sempa_qap::nugent;
use sempa_qap::proof::{FirstBound, Optimum, ProofOptions, solve};
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
    let arguments = Arguments::parse();
    let (instance, known) = read_instance(&arguments)?;
    let bound = match arguments.bound {
        BoundChoice::Gl => BoundKind::GilmoreLawler,
        BoundChoice::Hg => BoundKind::HahnGrant,
        BoundChoice::Auto => BoundKind::for_instance(&instance),
    };
    let first_bound = first_bound(&arguments.first_bound, known)?;
    let options = ProofOptions { bound, first_bound };
    let proof = solve(&instance, &options, |_| Directive::Continue)?;
    match &proof.optimum {
        Optimum::Solution(solution) => {
            let numbers: Vec<String> = solution
                .permutation
                .iter()
                .map(|facility| (facility + 1).to_string())
                .collect();
            println!("optimum {}", solution.value);
            println!("permutation {}", numbers.join(" "));
        }
        Optimum::AtLeast(value) => println!("no permutation costs less than {value}"),
    }
    println!("nodes {}", proof.nodes);
    println!("processor-seconds {:.3}", processor_seconds()?);
    Ok(())
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
