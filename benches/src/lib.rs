//! Benchmarks that `cargo xtask bench` runs. They report figures and do not test correctness,
//! because a loaded machine is slow without a defect.
//!
//! | command | measures |
//! | --- | --- |
//! | `bench micro` | single layers without I/O (`benches/*.rs`), compared with saved figures |
//! | `bench peers` | the running system, PVM 3.4.6, Open MPI and MPICH, in one run on one machine |
//! | `bench rm` | the same operations with and without the resource manager |
//! | `bench balance` | a task farm with and without rebalancing |
//! | `bench migrate` | migrations by Sempa and by bare CRIU |
//! | `bench owners --sizes` | evictions of tasks when an owner logs in |
//! | `bench soak` | hundreds of migrations of communicating tasks, and the resources they leak |
//!
//! The library also stores the results of `bench decide` and `bench sim`.

mod balancing;
mod curves;
mod eviction;
mod figures;
mod floor;
mod machine_info;
mod micro;
mod migration;
mod netpipe;
mod plot;
mod report;
mod rm_overhead;
mod rows;
mod simulation;
mod soak;
mod systems;

use anyhow::{Context, Result, bail};
use std::fs;
use std::path::PathBuf;

pub use balancing::{BalanceSettings, bench_balance};
pub use eviction::{EvictionSettings, bench_evictions};
pub use figures::System;
pub use micro::MicroSettings;
pub use migration::{MigrationSettings, bench_migrations};
pub use rm_overhead::bench_rm;
pub use simulation::{store_decide, store_sim};
pub use soak::{SoakSettings, bench_soak};

/// Debian packages of the measured systems.
pub const PACKAGES: [&str; 7] = [
    "pvm",
    "pvm-dev",
    "openmpi-bin",
    "libopenmpi-dev",
    "mpich",
    "libmpich-dev",
    "netpipe-pvm",
];

/// Number of repetitions in a full run.
const REPETITIONS_FULL: usize = 5;
/// Number of repetitions in a quick run.
const REPETITIONS_QUICK: usize = 2;

/// Settings of `bench peers`.
#[derive(Clone, Debug)]
pub struct PeersSettings {
    /// Folder in which our programs are installed.
    pub prefix: PathBuf,
    /// True if the programs were built from these sources for this run.
    pub own_build: bool,
    /// Reduces the number of repetitions and rounds.
    pub quick: bool,
    /// Names of the rows and curves to measure; a final `*` matches any suffix. If empty, all are
    /// measured.
    pub only: Vec<String>,
    /// Number of repetitions; `None` for the default.
    pub repetitions: Option<usize>,
    /// Folder to which the JSON file and the plots are written.
    pub results: PathBuf,
}

impl PeersSettings {
    /// Returns the command line that repeats this measurement.
    fn command_line(&self) -> String {
        let mut words = "cargo xtask bench peers".to_string();
        if self.quick {
            words.push_str(" --quick");
        }
        if let Some(repetitions) = self.repetitions {
            words.push_str(&format!(" --repetitions {repetitions}"));
        }
        self.only
            .iter()
            .for_each(|name| words.push_str(&format!(" --only '{name}'")));
        words
    }
}

/// Runs the measurement, prints the table and writes the results. Returns true if all measurements
/// of our system succeeded, whether fast or slow. Failures of other systems are only reported.
pub fn bench_peers(settings: &PeersSettings) -> Result<bool> {
    let only = &settings.only;
    let chosen = rows::select_measurements(only);
    let curves: Vec<&str> = curves::NAMES
        .into_iter()
        .filter(|name| only.is_empty() || rows::matches_any(name, only))
        .collect();
    let with_floor = only.is_empty() || rows::matches_any(floor::SELECTOR_NAME, only);
    if chosen.is_empty() && curves.is_empty() && !with_floor {
        let names = [
            rows::names(),
            curves::NAMES.to_vec(),
            vec![floor::SELECTOR_NAME],
        ]
        .concat();
        bail!(
            "bench peers: no row is named {}; the names are: {}",
            only.join(", "),
            names.join(", ")
        );
    }
    let repetitions = settings.repetitions.unwrap_or(if settings.quick {
        REPETITIONS_QUICK
    } else {
        REPETITIONS_FULL
    });
    fs::create_dir_all(&settings.results)
        .with_context(|| settings.results.display().to_string())?;
    let machine =
        machine_info::MachineInfo::describe(settings.own_build, repetitions, settings.quick);
    let mut report = report::Report::new(machine, settings.command_line());
    // The results are written after each part, so that an interrupted run keeps the results of its
    // complete parts.
    report.add_rows(
        &chosen,
        systems::measure(&settings.prefix, &chosen, repetitions, settings.quick)?,
    );
    report.write(&settings.results)?;
    if with_floor {
        report.add_floor(floor::measure_floor(settings.quick)?);
        report.write(&settings.results)?;
    }
    for name in curves {
        report.add_curves(curves::measure(&settings.prefix, name, settings.quick)?);
        report.write(&settings.results)?;
    }
    println!("{}written: {}", report.text(), settings.results.display());
    Ok(!report.has_own_failure())
}
