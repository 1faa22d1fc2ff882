//! `cargo xtask bench`: selects and runs the benchmarks, and builds the programs that they measure.

use crate::install::{self, BuildParts};
use crate::{bench_load, bench_owners, bench_virtual, setup};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use sempa_benches::{MicroSettings, PACKAGES, PeersSettings};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::Stdio;

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum BenchTarget {
    /// Single layers: packing, frames, the link, the daemon's forwarding; compared with saved
    /// results
    Micro,
    /// The running system, compared with PVM 3.4.6, Open MPI and MPICH
    Peers,
    /// The cost of a load watcher for its host, compared with SEMPA's figures
    Load,
    /// The cost of a decision of the resource manager, with up to 10,000 hosts
    Decide,
    /// A simulated week of a thousand desktops, and simulated days in which one user requests far
    /// more than all others; uses the results of owners and migrate
    Sim,
    /// The time that the resource manager adds to spawns and to the addition of hosts
    Rm,
    /// A farm of unequal tasks on unequal hosts with rebalancing, compared with the best assignment
    /// and with round-robin placement
    Balance,
    /// How soon guests stop after random logins, by their own clocks
    Owners,
    /// How long tasks stop during a migration, by their own clocks, compared with CRIU alone, and
    /// with and without pre-copy and post-copy
    Migrate,
    /// Whether hundreds of migrations of tasks that exchange messages lose a message or leak
    /// resources
    Soak,
    /// Single layers and peers
    All,
}

/// Default duration of the login measurement in minutes.
const OWNERS_MINUTES: u64 = 10;
/// Default duration of the measurement of a load watcher in minutes.
const LOAD_MINUTES: u64 = 3;

#[derive(Args)]
pub(crate) struct BenchArgs {
    /// The measurement to run
    #[arg(default_value = "all")]
    what: BenchTarget,
    /// peers: only these rows, such as `rtt8` or `rtt8*`; balance: only these repetitions, such as
    /// `2`; soak: only `tasks` or `moves`; all other stored results are retained
    #[arg(long, value_name = "ROW")]
    only: Vec<String>,
    /// micro: save this run for later comparisons
    #[arg(long)]
    save: bool,
    /// micro: fail if a result is slower than the saved one
    #[arg(long)]
    strict: bool,
    /// micro: changes below this percentage do not count
    #[arg(long, value_name = "PERCENT", default_value_t = 25.0)]
    share: f64,
    /// peers, rm, balance, migrate, soak: reduce repetitions and rounds
    #[arg(long)]
    quick: bool,
    /// peers, balance, migrate, owners with sizes: number of repetitions of each measurement
    #[arg(long, value_name = "NUMBER")]
    repetitions: Option<usize>,
    /// owners, load: duration in minutes; default: 10 for owners, 3 for load
    #[arg(long, value_name = "NUMBER")]
    minutes: Option<u64>,
    /// migrate: memory of the tasks in MiB, such as `16,512`; owners: also measure how soon a task
    /// with this much memory is evicted, one size after another
    #[arg(long, value_name = "MIB", value_delimiter = ',')]
    sizes: Vec<u32>,
    /// migrate: maximum transfer rate of our migrations in bytes per second, as `SEMPA_MOVE_RATE`
    #[arg(long, value_name = "BYTES")]
    rate: Option<u64>,
    /// peers, rm, owners, load, balance, migrate, soak: measure the programs installed under this
    /// prefix; build and install nothing
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
    /// micro, decide, sim, peers, rm, owners, load, balance, migrate, soak: folder of the table,
    /// JSON and plots; by default benches/results for all rows, target/bench for some rows
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
}

/// Runs the selected measurements. Returns false if one fails or exceeds its limit.
pub(crate) fn run(words: &BenchArgs) -> Result<bool> {
    if words.what == BenchTarget::Load {
        setup::set_up_all()?;
        return bench_load::run(
            &installed_prefix(words)?,
            words.minutes.unwrap_or(LOAD_MINUTES),
            &results_folder(words)?,
        );
    }
    if words.what == BenchTarget::Decide {
        return bench_virtual::decide(&results_folder(words)?);
    }
    if words.what == BenchTarget::Sim {
        return bench_virtual::simulate(&results_folder(words)?);
    }
    if words.what == BenchTarget::Rm {
        return measure_rm(words);
    }
    if words.what == BenchTarget::Balance {
        return balance(words);
    }
    if words.what == BenchTarget::Migrate {
        return migrate(words);
    }
    if words.what == BenchTarget::Soak {
        return soak(words);
    }
    if words.what == BenchTarget::Owners {
        setup::set_up_all()?;
        if !words.sizes.is_empty() {
            return evict(words);
        }
        return bench_owners::run(
            &installed_prefix(words)?,
            words.minutes.unwrap_or(OWNERS_MINUTES),
            &results_folder(words)?,
        );
    }
    let mut good = true;
    if words.what != BenchTarget::Peers {
        good &= micro(words)?;
    }
    if words.what != BenchTarget::Micro {
        good &= peers(words)?;
    }
    Ok(good)
}

/// Returns the folder of the installed programs. Builds and installs them first, unless the command
/// line has a folder.
fn installed_prefix(words: &BenchArgs) -> Result<PathBuf> {
    Ok(match &words.prefix {
        Some(prefix) => {
            // The hosts of the testbed need a program of their own (`sempa-host`). It is built in
            // the same cargo call as the installed programs, so that cargo selects the same
            // features and compiles nothing twice.
            if !install::cargo(&[
                "build",
                "--locked",
                "--release",
                "-p",
                "xtask",
                "-p",
                "sempa-tests",
            ])?
            .status()?
            .success()
            {
                bail!("the build failed");
            }
            prefix.clone()
        }
        None => {
            install::build(install::RELEASE, BuildParts::ProgramsAndHosts)?;
            let prefix = install::target_folder()?.join("sempa-prefix");
            install::install_files(&prefix, install::RELEASE)?;
            prefix
        }
    }
    .canonicalize()?)
}

/// Returns the folder for results: the one on the command line. Without one: the folder of the
/// project for a complete run, or a folder below the target folder for a partial one.
fn results_folder(words: &BenchArgs) -> Result<PathBuf> {
    let whole =
        words.only.is_empty() && words.sizes.is_empty() && words.rate.is_none() && !words.quick;
    let usual = if whole {
        setup::project_folder().join("benches/results")
    } else {
        install::target_folder()?.join("bench")
    };
    Ok(words.results.clone().unwrap_or(usual))
}

fn balance(words: &BenchArgs) -> Result<bool> {
    let number = |word: &String| {
        word.parse()
            .with_context(|| format!("{word:?} is not the number of a repetition"))
    };
    let only = words.only.iter().map(number).collect::<Result<_>>()?;
    let usual = if words.quick {
        install::target_folder()?.join("bench")
    } else {
        setup::project_folder().join("benches/results")
    };
    sempa_benches::bench_balance(&sempa_benches::BalanceSettings {
        prefix: installed_prefix(words)?,
        own_build: words.prefix.is_none(),
        quick: words.quick,
        repetitions: words.repetitions,
        only,
        results: words.results.clone().unwrap_or(usual),
    })
}

fn migrate(words: &BenchArgs) -> Result<bool> {
    setup::set_up_all()?;
    sempa_benches::bench_migrations(&sempa_benches::MigrationSettings {
        prefix: installed_prefix(words)?,
        own_build: words.prefix.is_none(),
        quick: words.quick,
        sizes: words.sizes.clone(),
        rate: words.rate,
        repetitions: words.repetitions,
        results: results_folder(words)?,
    })
}

fn evict(words: &BenchArgs) -> Result<bool> {
    sempa_benches::bench_evictions(&sempa_benches::EvictionSettings {
        prefix: installed_prefix(words)?,
        own_build: words.prefix.is_none(),
        sizes: words.sizes.clone(),
        logins_per_task: words.repetitions,
        results: results_folder(words)?,
    })?;
    Ok(true)
}

fn soak(words: &BenchArgs) -> Result<bool> {
    setup::set_up_all()?;
    let usual = if words.quick {
        install::target_folder()?.join("bench")
    } else {
        setup::project_folder().join("benches/results")
    };
    sempa_benches::bench_soak(&sempa_benches::SoakSettings {
        prefix: installed_prefix(words)?,
        own_build: words.prefix.is_none(),
        quick: words.quick,
        only: words.only.clone(),
        results: words.results.clone().unwrap_or(usual),
    })
}

fn measure_rm(words: &BenchArgs) -> Result<bool> {
    setup::ensure_packages(&PACKAGES)?;
    sempa_benches::bench_rm(
        &installed_prefix(words)?,
        words.prefix.is_none(),
        words.quick,
        &results_folder(words)?,
    )
}

/// Runs the benchmarks of single layers. Prints each line of their output when it arrives, and
/// evaluates all of it at the end.
fn micro(words: &BenchArgs) -> Result<bool> {
    let mut benches = install::cargo(&["bench", "--locked", "-p", "sempa-benches"])?
        .stdout(Stdio::piped())
        .spawn()?;
    let mut printed = String::new();
    for line in BufReader::new(benches.stdout.take().context("no output")?).lines() {
        let line = line?;
        println!("{line}");
        printed.push_str(&line);
        printed.push('\n');
    }
    if !benches.wait()?.success() {
        return Ok(false);
    }
    let usual = setup::project_folder().join("benches/results");
    let results = words.results.as_ref().unwrap_or(&usual);
    MicroSettings {
        results,
        save: words.save,
        strict: words.strict,
        tolerance: words.share / 100.0,
    }
    .evaluate(&printed)
}

fn peers(words: &BenchArgs) -> Result<bool> {
    setup::ensure_packages(&PACKAGES)?;
    sempa_benches::bench_peers(&PeersSettings {
        prefix: installed_prefix(words)?,
        own_build: words.prefix.is_none(),
        quick: words.quick,
        only: words.only.clone(),
        repetitions: words.repetitions,
        results: results_folder(words)?,
    })
}
