//! `cargo xtask bench`: single layers, or the running system beside its peers.

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
    /// Single layers: packing, frames, the link, the daemon's forwarding; beside what was saved
    Micro,
    /// The running system beside PVM 3.4.6, Open MPI and MPICH
    Peers,
    /// What a load watcher costs its host, beside SEMPA's figures
    Load,
    /// What a decision of the resource manager costs, with up to 10,000 hosts
    Decide,
    /// A week of a thousand desktops and days of a greedy user, in virtual time, with what owners
    /// and migrate have measured
    Sim,
    /// What the resource manager adds to spawns and added hosts
    Rm,
    /// A farm of unequal tasks on unequal hosts, balanced, beside the best assignment and one in
    /// turn
    Balance,
    /// How soon guests stand still, by their own clocks, when people log in at random times
    Owners,
    /// How long tasks stand still while they are moved, by their own clocks, beside bare CRIU, also
    /// with memory that follows, and moves with all memory at once
    Migrate,
    /// Whether hundreds of moves of tasks that talk lose a message or leave anything behind
    Soak,
    /// Single layers and peers
    All,
}

/// How long people log in, and how long a load watcher is watched, unless somebody says otherwise.
const OWNERS_MINUTES: u64 = 10;
const LOAD_MINUTES: u64 = 3;

/// The words after `cargo xtask bench`.
#[derive(Args)]
pub(crate) struct Words {
    /// What to measure
    #[arg(default_value = "all")]
    what: What,
    /// peers: only these rows, such as `rtt8` or `rtt8*`; balance: only these repetitions, such as
    /// `2`, soak: only `tasks` or `moves`, beside those measured before
    #[arg(long, value_name = "ROW")]
    only: Vec<String>,
    /// micro: later runs are compared with this one
    #[arg(long)]
    save: bool,
    /// micro: what is slower than what was saved is an error
    #[arg(long)]
    strict: bool,
    /// micro: a change by less than this share is none
    #[arg(long, value_name = "PERCENT", default_value_t = 25.0)]
    share: f64,
    /// peers, rm, balance, migrate, soak: fewer repetitions and rounds
    #[arg(long)]
    quick: bool,
    /// peers, balance, migrate, owners with sizes: repetitions of each measurement
    #[arg(long, value_name = "NUMBER")]
    repetitions: Option<usize>,
    /// owners, load: for so many minutes, instead of ten and three
    #[arg(long, value_name = "NUMBER")]
    minutes: Option<u64>,
    /// migrate: MiB that the tasks hold, such as `16,512`; owners: how soon a task of so much
    /// leaves, and its memory, one size after the other
    #[arg(long, value_name = "MIB", value_delimiter = ',')]
    sizes: Vec<u32>,
    /// migrate: bytes per second that our moves may send, as with `SEMPA_MOVE_RATE`
    #[arg(long, value_name = "BYTES")]
    rate: Option<u64>,
    /// peers, rm, owners, load, balance, migrate, soak: measure what is installed here instead of
    /// building and installing it
    #[arg(long, value_name = "DIR")]
    prefix: Option<PathBuf>,
    /// micro, decide, sim, peers, rm, owners, load, balance, migrate, soak: where the table, JSON
    /// and plots go; a run of all rows goes to benches/results, one of some to target/bench
    #[arg(long, value_name = "DIR")]
    results: Option<PathBuf>,
}

/// Measures. False if something could not be measured, or is above what is allowed.
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

/// Where the programs to be measured are installed; they are built unless somebody says where they
/// are.
fn installed(words: &Words) -> Result<PathBuf> {
    Ok(match &words.prefix {
        Some(prefix) => {
            // The testbed's hosts have a program of their own. Together with this one: the same
            // features, nothing built twice.
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

/// Where results go: a whole run's to the project.
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

/// Single layers. What they print is shown as it comes, and read.
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
