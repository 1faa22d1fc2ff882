//! `cargo xtask bench broker`: measures the message broker of sessions: messages and joins per
//! second, the cost of a probe, memory and descriptors of a broker, many sessions at once, and the
//! time to the end of the last member.
//!
//! The broker and the foreman run on h1. Members inside the virtual machine are tasks on h1;
//! members outside dial the broker's TLS port.

mod measurements;
mod report;

use crate::machine_info::MachineInfo;
use crate::peers_table_rows::is_selected;
use anyhow::{Context, Result, bail};
use measurements::{Bench, MEASUREMENTS, Measurement, needed_host_count};
use report::{BrokerReport, RowResult};
use sempa_tests::vm::VmSettings;
use sempa_tests::{Testbed, Vm, requirements};
use std::fs;
use std::path::PathBuf;

/// Number of repetitions in a full run.
const FULL_REPETITION_COUNT: usize = 5;
/// Number of repetitions in a quick run.
const QUICK_REPETITION_COUNT: usize = 1;

/// Settings of `bench broker`.
#[derive(Clone, Debug)]
pub struct BrokerSettings {
    /// Folder in which the programs of Sempa are installed.
    pub prefix: PathBuf,
    /// The program `broker-load`, as it was built.
    pub load_program: PathBuf,
    /// True if the programs were built for this run.
    pub is_own_build: bool,
    /// True if the run has fewer repetitions, messages and sessions than a full run.
    pub is_quick: bool,
    /// Names of the rows to measure; a final `*` matches any suffix. If empty, all are measured.
    pub selected_names: Vec<String>,
    /// Number of repetitions; `None` for the default number.
    pub repetition_count: Option<usize>,
    /// Folder to which the table, the JSON file and the plot are written.
    pub results_folder: PathBuf,
}

impl BrokerSettings {
    fn selects(&self, measurement: &Measurement) -> bool {
        is_selected(measurement.name, &self.selected_names)
            && !(self.is_quick && measurement.is_only_in_full_runs())
    }
}

/// Runs the measurement and prints the table. Writes the table, JSON and the plot.
///
/// # Errors
/// The virtual machine cannot start, or a measurement fails.
pub fn bench_broker(settings: &BrokerSettings) -> Result<()> {
    if let Some(unmet_requirement) = requirements::unmet_requirement() {
        bail!("bench broker: {unmet_requirement}");
    }
    let measurements: Vec<&Measurement> = MEASUREMENTS
        .iter()
        .filter(|measurement| settings.selects(measurement))
        .collect();
    if measurements.is_empty() {
        let names: Vec<&str> = MEASUREMENTS.iter().map(|row| row.name).collect();
        bail!(
            "bench broker: no row is named {}; the names are: {}",
            settings.selected_names.join(", "),
            names.join(", ")
        );
    }
    let repetition_count = settings.repetition_count.unwrap_or(if settings.is_quick {
        QUICK_REPETITION_COUNT
    } else {
        FULL_REPETITION_COUNT
    });
    fs::create_dir_all(&settings.results_folder)
        .with_context(|| settings.results_folder.display().to_string())?;
    let machine = MachineInfo::collect(settings.is_own_build, repetition_count, settings.is_quick);
    let testbed = Testbed::new(
        needed_host_count(&measurements),
        Some(&settings.prefix),
        &[],
    )?;
    let vm = Vm::start(&testbed, VmSettings::default())?;
    let mut bench = Bench::new(&vm, settings)?;
    let mut report = BrokerReport::new(machine);
    for measurement in measurements {
        let mut repetitions = Vec::new();
        for repetition in 1..=repetition_count {
            eprintln!(
                "bench broker: {} ({repetition} of {repetition_count})",
                measurement.name
            );
            let figures = bench.measure(measurement);
            // The virtual machine's logs disappear with the testbed.
            repetitions.push(
                figures
                    .with_context(|| format!("{}\n{}", measurement.name, vm.events_and_logs()))?,
            );
        }
        report.add(RowResult::new(measurement, repetitions));
        report.write_files(&settings.results_folder)?;
    }
    vm.halt_and_wait()?;
    println!(
        "{}written: {}",
        report.format(),
        settings.results_folder.display()
    );
    Ok(())
}
