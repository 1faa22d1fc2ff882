//! `cargo xtask bench`: selects and runs the benchmarks, and builds the programs that they measure.

use crate::{bench_broker, bench_load, bench_owners, bench_virtual, setup};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use sempa_benches::{DEBIAN_PACKAGES, MicroSettings, PeersSettings};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::Stdio;
use xtask_install::{self as install, BuildParts};

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
    /// The cost of a task of a master-worker run, compared with Dask, Ray, HyperQueue, Work Queue
    /// and a farm written with PVM calls
    Work,
    /// The message broker of sessions: messages and joins per second, the cost of a probe, memory,
    /// up to 480 sessions at once, and the time to the end of the last member
    Broker,
    /// Whether hundreds of migrations of tasks that exchange messages lose a message or leak
    /// resources
    Soak,
    /// Single layers and peers
    All,
}

/// Default duration of `bench owners` in minutes.
const OWNERS_MINUTES_DEFAULT: u64 = 10;
/// Default duration of `bench load` in minutes.
const LOAD_MINUTES_DEFAULT: u64 = 3;

#[derive(Args)]
pub(crate) struct BenchArgs {
    /// The measurement to run
    #[arg(default_value = "all")]
    what: BenchTarget,
    /// peers: only these rows, such as `rtt8` or `rtt8*`; balance: only these repetitions, such as
    /// `2`; soak: only `tasks` or `moves`; all other stored results are retained. work,
    /// broker: only these rows and systems, such as `grain*`, `dask` or `pair8*`
    #[arg(long, value_name = "ROW")]
    pub(crate) only: Vec<String>,
    /// micro: save this run for later comparisons
    #[arg(long)]
    save: bool,
    /// micro: fail if a result is slower than the saved one
    #[arg(long)]
    strict: bool,
    /// micro: changes below this percentage do not count
    #[arg(long, value_name = "PERCENT", default_value_t = 25.0)]
    share: f64,
    /// peers, rm, work, broker, balance, migrate, soak: reduce repetitions and rounds
    #[arg(long)]
    pub(crate) quick: bool,
    /// peers, work, broker, balance, migrate, owners with sizes: number of repetitions of each
    /// measurement
    #[arg(long, value_name = "NUMBER")]
    pub(crate) repetitions: Option<usize>,
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
    /// peers, rm, work, broker, owners, load, balance, migrate, soak: measure the programs
    /// installed under this prefix; build and install nothing
    #[arg(long, value_name = "DIR")]
    pub(crate) prefix: Option<PathBuf>,
    /// micro, decide, sim, peers, rm, work, broker, owners, load, balance, migrate, soak: folder of
    /// the table, JSON and plots; by default benches/results for all rows, target/bench for some
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
}

/// Runs the selected measurements. Returns false if a measurement fails or exceeds its limit.
pub(crate) fn run(args: &BenchArgs) -> Result<bool> {
    if args.what == BenchTarget::Load {
        setup::set_up_all()?;
        return bench_load::run(
            &installed_prefix(args)?,
            args.minutes.unwrap_or(LOAD_MINUTES_DEFAULT),
            &results_folder(args)?,
        );
    }
    if args.what == BenchTarget::Decide {
        return bench_virtual::measure_decisions(&results_folder(args)?);
    }
    if args.what == BenchTarget::Sim {
        return bench_virtual::simulate_days(&results_folder(args)?);
    }
    if args.what == BenchTarget::Rm {
        return measure_rm(args);
    }
    if args.what == BenchTarget::Balance {
        return measure_balance(args);
    }
    if args.what == BenchTarget::Migrate {
        return measure_migrations(args);
    }
    if args.what == BenchTarget::Soak {
        return run_soak(args);
    }
    if args.what == BenchTarget::Broker {
        return bench_broker::run(args);
    }
    if args.what == BenchTarget::Work {
        return measure_work(args);
    }
    if args.what == BenchTarget::Owners {
        setup::set_up_all()?;
        if !args.sizes.is_empty() {
            return measure_evictions(args);
        }
        return bench_owners::run(
            &installed_prefix(args)?,
            args.minutes.unwrap_or(OWNERS_MINUTES_DEFAULT),
            &results_folder(args)?,
        );
    }
    let mut succeeded = true;
    if args.what != BenchTarget::Peers {
        succeeded &= measure_layers(args)?;
    }
    if args.what != BenchTarget::Micro {
        succeeded &= measure_peers(args)?;
    }
    Ok(succeeded)
}

/// Builds the programs of the measurements that are not installed, such as `sempa-host`, which the
/// hosts of the testbed need. One cargo call builds all of them, so that cargo selects the same
/// features and compiles nothing twice.
fn build_measuring_programs() -> Result<()> {
    let mut build = install::cargo_command(&["build", "--locked", "--release"])?;
    build.args(["-p", "xtask", "-p", "sempa-tests", "-p", "sempa-benches"]);
    if !build.status()?.success() {
        bail!("the build of the measuring programs failed");
    }
    Ok(())
}

/// Returns the folder of the installed programs. If the command line does not name a folder, builds
/// and installs the programs first.
pub(crate) fn installed_prefix(args: &BenchArgs) -> Result<PathBuf> {
    Ok(match &args.prefix {
        Some(prefix) => {
            build_measuring_programs()?;
            prefix.clone()
        }
        None => {
            install::build(install::RELEASE_PROFILE, BuildParts::ProgramsAndHosts)?;
            let prefix = install::target_folder()?.join("sempa-prefix");
            install::install_files(&prefix, install::RELEASE_PROFILE)?;
            prefix
        }
    }
    .canonicalize()?)
}

/// Returns the folder for results: the folder on the command line; without it, a folder of the
/// project for a complete run, or a folder below the target folder for a partial run.
pub(crate) fn results_folder(args: &BenchArgs) -> Result<PathBuf> {
    let is_complete_run =
        args.only.is_empty() && args.sizes.is_empty() && args.rate.is_none() && !args.quick;
    let default_folder = if is_complete_run {
        xtask_install::project_folder().join("benches/results")
    } else {
        install::target_folder()?.join("bench")
    };
    Ok(args.results.clone().unwrap_or(default_folder))
}

fn measure_balance(args: &BenchArgs) -> Result<bool> {
    let parse_repetition = |text: &String| {
        text.parse()
            .with_context(|| format!("{text:?} is not the number of a repetition"))
    };
    let selected_repetitions = args
        .only
        .iter()
        .map(parse_repetition)
        .collect::<Result<_>>()?;
    let default_folder = if args.quick {
        install::target_folder()?.join("bench")
    } else {
        xtask_install::project_folder().join("benches/results")
    };
    sempa_benches::bench_balance(&sempa_benches::BalanceSettings {
        prefix: installed_prefix(args)?,
        is_own_build: args.prefix.is_none(),
        is_quick: args.quick,
        repetition_count: args.repetitions,
        selected_numbers: selected_repetitions,
        results_folder: args.results.clone().unwrap_or(default_folder),
    })
}

fn measure_migrations(args: &BenchArgs) -> Result<bool> {
    setup::set_up_all()?;
    sempa_benches::bench_migrations(&sempa_benches::MigrationSettings {
        prefix: installed_prefix(args)?,
        is_own_build: args.prefix.is_none(),
        is_quick: args.quick,
        sizes_mib: args.sizes.clone(),
        bytes_per_second_max: args.rate,
        repetition_count: args.repetitions,
        results_folder: results_folder(args)?,
    })
}

fn measure_evictions(args: &BenchArgs) -> Result<bool> {
    sempa_benches::bench_evictions(&sempa_benches::EvictionSettings {
        prefix: installed_prefix(args)?,
        is_own_build: args.prefix.is_none(),
        sizes_mib: args.sizes.clone(),
        login_count: args.repetitions,
        results_folder: results_folder(args)?,
    })?;
    Ok(true)
}

fn run_soak(args: &BenchArgs) -> Result<bool> {
    setup::set_up_all()?;
    let default_folder = if args.quick {
        install::target_folder()?.join("bench")
    } else {
        xtask_install::project_folder().join("benches/results")
    };
    sempa_benches::bench_soak(&sempa_benches::SoakSettings {
        prefix: installed_prefix(args)?,
        is_own_build: args.prefix.is_none(),
        is_quick: args.quick,
        selected_parts: args.only.clone(),
        results_folder: args.results.clone().unwrap_or(default_folder),
    })
}

fn measure_work(args: &BenchArgs) -> Result<bool> {
    setup::ensure_packages(&DEBIAN_PACKAGES)?;
    setup::ensure_packages(&sempa_benches::WORK_PACKAGES)?;
    let prefix = installed_prefix(args)?;
    build_measuring_programs()?;
    let target_folder = install::target_folder()?;
    sempa_benches::bench_work(&sempa_benches::WorkSettings {
        prefix,
        farm_program: target_folder
            .join(install::RELEASE_PROFILE)
            .join("work-farm"),
        is_own_build: args.prefix.is_none(),
        is_quick: args.quick,
        selected_names: args.only.clone(),
        repetition_count: args.repetitions,
        results_folder: results_folder(args)?,
        packages_folder: target_folder.join("bench-packages"),
    })
}

fn measure_rm(args: &BenchArgs) -> Result<bool> {
    setup::ensure_packages(&DEBIAN_PACKAGES)?;
    sempa_benches::bench_rm(
        &installed_prefix(args)?,
        args.prefix.is_none(),
        args.quick,
        &results_folder(args)?,
    )
}

/// Runs the benchmarks of single layers. Prints each line of their output when the line arrives.
/// Evaluates the whole output at the end, and returns false if a result is too slow.
fn measure_layers(args: &BenchArgs) -> Result<bool> {
    let mut bench_process = install::cargo_command(&["bench", "--locked", "-p", "sempa-benches"])?
        .stdout(Stdio::piped())
        .spawn()?;
    let mut bench_output = String::new();
    for line in BufReader::new(bench_process.stdout.take().context("no output")?).lines() {
        let line = line?;
        println!("{line}");
        bench_output.push_str(&line);
        bench_output.push('\n');
    }
    if !bench_process.wait()?.success() {
        return Ok(false);
    }
    let default_folder = xtask_install::project_folder().join("benches/results");
    let results = args.results.as_ref().unwrap_or(&default_folder);
    MicroSettings {
        results_folder: results,
        saves_figures: args.save,
        is_strict: args.strict,
        change_fraction_max: args.share / 100.0,
    }
    .compare_and_save(&bench_output)
}

fn measure_peers(args: &BenchArgs) -> Result<bool> {
    setup::ensure_packages(&DEBIAN_PACKAGES)?;
    sempa_benches::bench_peers(&PeersSettings {
        prefix: installed_prefix(args)?,
        is_own_build: args.prefix.is_none(),
        is_quick: args.quick,
        selected_names: args.only.clone(),
        repetition_count: args.repetitions,
        results_folder: results_folder(args)?,
    })
}
