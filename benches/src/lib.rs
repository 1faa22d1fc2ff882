//! Benchmarks that `cargo xtask bench` runs. They report figures and compare them with goals. They
//! do not replace tests, because a loaded machine is slow without a defect.
//!
//! | command | measures |
//! | --- | --- |
//! | `bench micro` | single layers without I/O (`benches/*.rs`), compared with saved figures |
//! | `bench peers` | Sempa, PVM 3.4.6, Open MPI and MPICH, in one run on one machine |
//! | `bench rm` | spawns and additions of hosts, with and without the resource manager |
//! | `bench balance` | a task farm with and without rebalancing |
//! | `bench migrate` | migrations by Sempa and by bare CRIU |
//! | `bench owners --sizes` | evictions of tasks when an owner logs in |
//! | `bench work` | what a task of a master-worker run costs, and the same farm in other systems |
//! | `bench broker` | sessions of members that come and go: messages, joins, memory, many at once |
//! | `bench soak` | hundreds of migrations of communicating tasks, and the resources they leak |
//!
//! The library also stores the results of `bench decide` and `bench sim`.

mod balancing;
mod broker;
mod curves;
mod eviction;
mod figures;
mod floor;
mod machine_info;
mod micro;
mod migration;
mod netpipe;
mod peers_table_rows;
mod plot;
mod report;
mod rm_overhead;
mod simulation;
mod soak;
mod systems;
mod work;

use anyhow::{Context, Result, bail};
use std::fs;
use std::path::PathBuf;

pub use balancing::{BalanceSettings, bench_balance};
pub use broker::{BrokerSettings, bench_broker};
pub use eviction::{EvictionSettings, bench_evictions};
pub use figures::System;
pub use micro::MicroSettings;
pub use migration::{MigrationSettings, bench_migrations};
pub use rm_overhead::bench_rm;
pub use simulation::{store_decide, store_sim};
pub use soak::{SoakSettings, bench_soak};
pub use work::{WORK_PACKAGES, WorkSettings, bench_work};

/// Debian packages that the benchmarks need: the measured systems and their tools.
pub const DEBIAN_PACKAGES: [&str; 7] = [
    "pvm",
    "pvm-dev",
    "openmpi-bin",
    "libopenmpi-dev",
    "mpich",
    "libmpich-dev",
    "netpipe-pvm",
];

/// Number of repetitions in a full run.
const FULL_REPETITION_COUNT: usize = 5;
/// Number of repetitions in a quick run.
const QUICK_REPETITION_COUNT: usize = 2;

/// Settings of `bench peers`.
#[derive(Clone, Debug)]
pub struct PeersSettings {
    /// Folder in which the programs of Sempa are installed.
    pub prefix: PathBuf,
    /// True if the programs were built for this run.
    pub is_own_build: bool,
    /// True if the run has fewer repetitions and rounds than a full run.
    pub is_quick: bool,
    /// Names of the rows and curves to measure; a final `*` matches any suffix. If empty, all rows
    /// and curves are measured.
    pub selected_names: Vec<String>,
    /// Number of repetitions; `None` for the default number.
    pub repetition_count: Option<usize>,
    /// Folder to which the JSON file and the plots are written.
    pub results_folder: PathBuf,
}

impl PeersSettings {
    /// Returns the command line that repeats this measurement.
    fn command_line(&self) -> String {
        let mut command_line = "cargo xtask bench peers".to_string();
        if self.is_quick {
            command_line.push_str(" --quick");
        }
        if let Some(repetitions) = self.repetition_count {
            command_line.push_str(&format!(" --repetitions {repetitions}"));
        }
        self.selected_names
            .iter()
            .for_each(|name| command_line.push_str(&format!(" --only '{name}'")));
        command_line
    }
}

/// Runs the measurement, prints the table and writes the results. Returns true if all measurements
/// of Sempa succeeded, even if they missed their goals. Failures of other systems are only
/// reported.
pub fn bench_peers(settings: &PeersSettings) -> Result<bool> {
    let selected_names = &settings.selected_names;
    let measurements = peers_table_rows::select_measurements(selected_names);
    let curve_names: Vec<&str> = curves::CURVE_NAMES
        .into_iter()
        .filter(|name| peers_table_rows::is_selected(name, selected_names))
        .collect();
    let includes_floor = peers_table_rows::is_selected(floor::SELECTOR_NAME, selected_names);
    if measurements.is_empty() && curve_names.is_empty() && !includes_floor {
        let known_names = [
            peers_table_rows::row_names(),
            curves::CURVE_NAMES.to_vec(),
            vec![floor::SELECTOR_NAME],
        ]
        .concat();
        bail!(
            "bench peers: no row is named {}; the names are: {}",
            selected_names.join(", "),
            known_names.join(", ")
        );
    }
    let repetition_count = settings.repetition_count.unwrap_or(if settings.is_quick {
        QUICK_REPETITION_COUNT
    } else {
        FULL_REPETITION_COUNT
    });
    fs::create_dir_all(&settings.results_folder)
        .with_context(|| settings.results_folder.display().to_string())?;
    let machine = machine_info::MachineInfo::collect(
        settings.is_own_build,
        repetition_count,
        settings.is_quick,
    );
    let mut report = report::Report::new(machine, settings.command_line());
    // The results are written after each part, so that an interrupted run retains the results of
    // its complete parts.
    report.add_rows(
        &measurements,
        systems::measure_rows(
            &settings.prefix,
            &measurements,
            repetition_count,
            settings.is_quick,
        )?,
    );
    report.write_files(&settings.results_folder)?;
    if includes_floor {
        report.add_floor(floor::measure_floor(settings.is_quick)?);
        report.write_files(&settings.results_folder)?;
    }
    for name in curve_names {
        report.add_curves(curves::measure_curve(
            &settings.prefix,
            name,
            settings.is_quick,
        )?);
        report.write_files(&settings.results_folder)?;
    }
    println!(
        "{}written: {}",
        report.format_report(),
        settings.results_folder.display()
    );
    Ok(!report.has_sempa_failure())
}
