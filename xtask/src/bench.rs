//! `cargo xtask bench`: measures single layers, or compares the running system with its peers.

use crate::install::{self, Parts};
use crate::{bench_load, bench_owners, bench_virtual, setup};
use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use sempa_benches::{MicroSettings, PACKAGES, PeersSettings};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::Stdio;

/// What can be measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// Single layers: packing, frames, the link, the daemon's forwarding; compared with saved
    /// results
    Micro,
    /// The running system, compared with PVM 3.4.6, Open MPI and MPICH
    Peers,
    /// What a load watcher costs its host, compared with SEMPA's figures
    Load,
    /// What a decision of the resource manager costs, with up to 10,000 hosts
    Decide,
    /// A week of a thousand desktops and days of a greedy user, in virtual time, with the results
    /// of owners and migrate
    Sim,
    /// What the resource manager adds to spawns and added hosts
    Rm,
    /// A farm of unequal tasks on unequal hosts, balanced, compared with the best assignment and
    /// with assignment in turn
    Balance,
    /// How soon guests stop, by their own clocks, when people log in at random times
    Owners,
    /// How long tasks stop during a migration, by their own clocks, compared with CRIU alone, with
    /// post-copy, and with all memory at once
    Migrate,
    /// Whether hundreds of migrations of tasks that exchange messages lose a message or leave
    /// anything behind
    Soak,
    /// Single layers and peers
    All,
}

/// Minutes of the login measurement by default. A load watcher is measured for three.
const OWNERS_MINUTES: u64 = 10;
const LOAD_MINUTES: u64 = 3;

#[derive(Args)]
pub(crate) struct Words {
    /// The measurement to run
    #[arg(default_value = "all")]
    what: What,
    /// peers: only these rows, such as `rtt8` or `rtt8*`; balance: only these repetitions, such as
    /// `2`; soak: only `tasks` or `moves`; added to the rows measured before
    #[arg(long, value_name = "ROW")]
    only: Vec<String>,
    /// micro: save this run for later comparisons
    #[arg(long)]
    save: bool,
    /// micro: fail if a result is slower than the saved one
    #[arg(long)]
    strict: bool,
    /// micro: changes below this share do not count
    #[arg(long, value_name = "PERCENT", default_value_t = 25.0)]
    share: f64,
    /// peers, rm, balance, migrate, soak: fewer repetitions and rounds
    #[arg(long)]
    quick: bool,
    /// peers, balance, migrate, owners with sizes: repetitions of each measurement
    #[arg(long, value_name = "NUMBER")]
    repetitions: Option<usize>,
    /// owners, load: minutes of the run, instead of ten and three
    #[arg(long, value_name = "NUMBER")]
    minutes: Option<u64>,
    /// migrate: MiB that the tasks hold, such as `16,512`; owners: also measure how soon a task
    /// with this much memory leaves, one size after the other
    #[arg(long, value_name = "MIB", value_delimiter = ',')]
    sizes: Vec<u32>,
    /// migrate: bytes per second that our migrations may send, as with `SEMPA_MOVE_RATE`
    #[arg(long, value_name = "BYTES")]
    rate: Option<u64>,
    /// peers, rm, owners, load, balance, migrate, soak: measure the programs installed here instead
    /// of building and installing them
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
    /// micro, decide, sim, peers, rm, owners, load, balance, migrate, soak: folder of the table,
    /// JSON and plots; by default benches/results for all rows, target/bench for some rows
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
}

/// Runs the measurements. Returns false if one fails or exceeds its limit.
///
/// # Errors
/// A build fails, or a system cannot be started.
pub(crate) fn run(words: &Words) -> Result<bool> {
    if words.what == What::Load {
        setup::everything()?;
        return bench_load::run(
            &installed(words)?,
            words.minutes.unwrap_or(LOAD_MINUTES),
            &results(words)?,
        );
    }
    if words.what == What::Decide {
        return bench_virtual::decide(&results(words)?);
    }
    if words.what == What::Sim {
        return bench_virtual::simulate(&results(words)?);
    }
    if words.what == What::Rm {
        return managed(words);
    }
    if words.what == What::Balance {
        return balance(words);
    }
    if words.what == What::Migrate {
        return migrate(words);
    }
    if words.what == What::Soak {
        return soak(words);
    }
    if words.what == What::Owners {
        setup::everything()?;
        if !words.sizes.is_empty() {
            return evict(words);
        }
        return bench_owners::run(
            &installed(words)?,
            words.minutes.unwrap_or(OWNERS_MINUTES),
            &results(words)?,
        );
    }
    let mut good = true;
    if words.what != What::Peers {
        good &= micro(words)?;
    }
    if words.what != What::Micro {
        good &= peers(words)?;
    }
    Ok(good)
}

/// Returns the folder of the installed programs. Builds and installs them unless the command line
/// names a folder.
fn installed(words: &Words) -> Result<PathBuf> {
    Ok(match &words.prefix {
        Some(prefix) => {
            // The testbed's hosts need a program of their own. One build of both uses the same
            // features and builds nothing twice.
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
            install::build(install::RELEASE, Parts::ProgramsAndHosts)?;
            let prefix = install::target()?.join("sempa-prefix");
            install::lay_out(&prefix, install::RELEASE)?;
            prefix
        }
    }
    .canonicalize()?)
}

/// Returns the folder for results: that of the project for a run of all rows.
fn results(words: &Words) -> Result<PathBuf> {
    let whole =
        words.only.is_empty() && words.sizes.is_empty() && words.rate.is_none() && !words.quick;
    let usual = if whole {
        setup::project().join("benches/results")
    } else {
        install::target()?.join("bench")
    };
    Ok(words.results.clone().unwrap_or(usual))
}

fn balance(words: &Words) -> Result<bool> {
    let number = |word: &String| {
        word.parse()
            .with_context(|| format!("{word:?} is not the number of a repetition"))
    };
    let only = words.only.iter().map(number).collect::<Result<_>>()?;
    let usual = if words.quick {
        install::target()?.join("bench")
    } else {
        setup::project().join("benches/results")
    };
    sempa_benches::bench_balance(&sempa_benches::BalanceSettings {
        prefix: installed(words)?,
        own_build: words.prefix.is_none(),
        quick: words.quick,
        repetitions: words.repetitions,
        only,
        results: words.results.clone().unwrap_or(usual),
    })
}

fn migrate(words: &Words) -> Result<bool> {
    setup::everything()?;
    sempa_benches::bench_migrations(&sempa_benches::MigrationSettings {
        prefix: installed(words)?,
        own_build: words.prefix.is_none(),
        quick: words.quick,
        sizes: words.sizes.clone(),
        rate: words.rate,
        repetitions: words.repetitions,
        results: results(words)?,
    })
}

fn evict(words: &Words) -> Result<bool> {
    sempa_benches::bench_evictions(&sempa_benches::EvictionSettings {
        prefix: installed(words)?,
        own_build: words.prefix.is_none(),
        sizes: words.sizes.clone(),
        visits: words.repetitions,
        results: results(words)?,
    })?;
    Ok(true)
}

fn soak(words: &Words) -> Result<bool> {
    setup::everything()?;
    let usual = if words.quick {
        install::target()?.join("bench")
    } else {
        setup::project().join("benches/results")
    };
    sempa_benches::bench_soak(&sempa_benches::SoakSettings {
        prefix: installed(words)?,
        own_build: words.prefix.is_none(),
        quick: words.quick,
        only: words.only.clone(),
        results: words.results.clone().unwrap_or(usual),
    })
}

fn managed(words: &Words) -> Result<bool> {
    setup::packages(&PACKAGES)?;
    sempa_benches::bench_rm(
        &installed(words)?,
        words.prefix.is_none(),
        words.quick,
        &results(words)?,
    )
}

/// Measures single layers. Prints their output as it comes, and parses it.
fn micro(words: &Words) -> Result<bool> {
    let mut benches = install::cargo(&["bench", "-p", "sempa-benches"])?
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
    let usual = setup::project().join("benches/results");
    let results = words.results.as_ref().unwrap_or(&usual);
    MicroSettings {
        results,
        save: words.save,
        strict: words.strict,
        tolerance: words.share / 100.0,
    }
    .evaluate(&printed)
}

fn peers(words: &Words) -> Result<bool> {
    setup::packages(&PACKAGES)?;
    sempa_benches::bench_peers(&PeersSettings {
        prefix: installed(words)?,
        own_build: words.prefix.is_none(),
        quick: words.quick,
        only: words.only.clone(),
        repetitions: words.repetitions,
        results: results(words)?,
    })
}
