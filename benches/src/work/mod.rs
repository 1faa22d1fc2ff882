//! `cargo xtask bench work`: measures what a task costs in a master-worker run, and executes the
//! same farm of busy loops with other systems.
//!
//! All systems have two resident workers on one host and alternate, so that other load on the
//! machine affects all systems equally. A task uses a given processor time (its grain).

mod own_rows;
mod peers;
mod report;

use crate::machine_info::MachineInfo;
use crate::peers_table_rows::is_selected;
use crate::systems::new_testbeds;
use anyhow::{Context, Result, bail};
use own_rows::OWN_ROWS;
use peers::PeerFolder;
use report::{PeerResult, RowResult, WorkReport};
use sempa_tests::real_pvm::RealVm;
use sempa_tests::run::run_to_end;
use sempa_tests::vm::VmSettings;
use sempa_tests::{Testbed, Vm, requirements};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

/// Debian packages that the measurement needs.
pub const WORK_PACKAGES: [&str; 6] = [
    "pvm",
    "pvm-dev",
    "coop-computing-tools",
    "coop-computing-tools-dev",
    "zlib1g-dev",
    "python3-venv",
];

/// Number of workers in each run.
const WORKER_COUNT: u32 = 2;
/// Number of hosts in the virtual machines.
const HOST_COUNT: usize = 2;
/// Number of repetitions in a full run.
const FULL_REPETITION_COUNT: usize = 5;
/// Number of repetitions in a quick run.
const QUICK_REPETITION_COUNT: usize = 1;
/// Divisor of the number of tasks in a quick run.
const QUICK_TASKS_DIVISOR: u64 = 5;
/// Time limit for one run of a farm. The slowest needs about 10 s on a quiet machine.
const RUN_TIMEOUT: Duration = Duration::from_secs(300);

/// Settings of `bench work`.
#[derive(Clone, Debug)]
pub struct WorkSettings {
    /// Folder in which the programs of Sempa are installed.
    pub prefix: PathBuf,
    /// Path of the program `work-farm`, which is master and worker.
    pub farm_program: PathBuf,
    /// True if the programs were built for this run.
    pub is_own_build: bool,
    /// True if the run has fewer repetitions and tasks than a full run.
    pub is_quick: bool,
    /// Names of the rows and systems to measure; a final `*` matches any suffix. If empty, all are
    /// measured.
    pub selected_names: Vec<String>,
    /// Number of repetitions; `None` for the default number.
    pub repetition_count: Option<usize>,
    /// Folder to which the table, the JSON file and the plots are written.
    pub results_folder: PathBuf,
    /// Folder in which the Python packages of other systems are kept for later runs.
    pub packages_folder: PathBuf,
}

impl WorkSettings {
    fn selects(&self, name: &str) -> bool {
        is_selected(name, &self.selected_names)
    }

    fn task_count(&self, full_count: u64) -> u64 {
        if self.is_quick {
            (full_count / QUICK_TASKS_DIVISOR).max(u64::from(WORKER_COUNT))
        } else {
            full_count
        }
    }
}

/// The line of JSON that a farm prints. Figures that a system does not print are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
struct FarmFigures {
    tasks: u64,
    /// Time from the first task to the last result.
    seconds: f64,
    tasks_per_second: f64,
    /// Processor time of all tasks divided by the time of all workers.
    efficiency: f64,
    /// Time from the end of a worker's task to the start of the worker's next task.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gap_median_us: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gap_p99_us: Option<f64>,
    /// Processor time of the master.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    master_us_per_task: Option<f64>,
    /// Processor time of all processes of the machine.
    machine_us_per_task: f64,
}

/// Runs a farm and returns its figures.
fn run_farm(command: Command, description: &str) -> Result<FarmFigures> {
    let output = run_to_end(command, RUN_TIMEOUT)?
        .expect_success(description)?
        .stdout;
    let line = output.lines().find(|line| line.starts_with('{'));
    let line = line.with_context(|| format!("{description} printed no figures: {output}"))?;
    serde_json::from_str(line).with_context(|| format!("{description} printed {line}"))
}

/// The running virtual machines, and the programs of other systems.
struct Bench<'a> {
    settings: &'a WorkSettings,
    pvm_testbed: &'a Testbed,
    sempa_testbed: &'a Testbed,
    pvm: RealVm<'a>,
    sempa: Vm<'a>,
    peers: PeerFolder,
}

impl Bench<'_> {
    /// Returns a command that runs the framework's farm.
    fn farm_command(&self, arguments: &[String]) -> Command {
        let host = self.sempa_testbed.host(1);
        let mut command = self.sempa.user_command(host, &self.settings.farm_program);
        command.args(arguments);
        command
    }
}

/// Runs the measurement and prints the table. Writes the table, JSON and plots. Returns true if all
/// measured goals are met.
///
/// # Errors
/// The virtual machines cannot start, or a run of Sempa fails. Failures of other systems are only
/// reported.
pub fn bench_work(settings: &WorkSettings) -> Result<bool> {
    if let Some(unmet_requirement) = requirements::unmet_requirement() {
        bail!("bench work: {unmet_requirement}");
    }
    let rows: Vec<&own_rows::OwnRow> = OWN_ROWS
        .iter()
        .filter(|row| settings.selects(row.name))
        .collect();
    let systems: Vec<peers::FarmSystem> = peers::FarmSystem::ALL
        .into_iter()
        .filter(|system| settings.selects(system.selector()))
        .collect();
    if rows.is_empty() && systems.is_empty() {
        let row_names = OWN_ROWS.iter().map(|row| row.name);
        let system_names = peers::FarmSystem::ALL
            .iter()
            .map(|system| system.selector());
        let known_names: Vec<&str> = row_names.chain(system_names).collect();
        bail!(
            "bench work: no row or system is named {}; the names are: {}",
            settings.selected_names.join(", "),
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
    let machine = MachineInfo::collect(settings.is_own_build, repetition_count, settings.is_quick);
    let (pvm_testbed, sempa_testbed) = new_testbeds(&settings.prefix, HOST_COUNT)?;
    let bench = Bench {
        settings,
        pvm: RealVm::start(&pvm_testbed)?,
        sempa: Vm::start(&sempa_testbed, VmSettings::default())?,
        peers: PeerFolder::prepare(settings, &systems, [&pvm_testbed, &sempa_testbed])?,
        pvm_testbed: &pvm_testbed,
        sempa_testbed: &sempa_testbed,
    };
    let mut report = WorkReport::new(machine);
    // The rows of one host come first, because each host that is added gets workers.
    for uses_two_hosts in [false, true] {
        if uses_two_hosts && rows.iter().any(|row| row.uses_two_hosts) {
            bench.sempa.add_hosts(&["h2"])?;
        }
        for row in rows
            .iter()
            .filter(|row| row.uses_two_hosts == uses_two_hosts)
        {
            let figures = (1..=repetition_count)
                .map(|repetition| {
                    eprintln!(
                        "bench work: {} ({repetition} of {repetition_count})",
                        row.name
                    );
                    run_farm(bench.farm_command(&row.arguments(settings)), row.name)
                })
                .collect::<Result<Vec<_>>>()?;
            report.add_row(RowResult::new(row, &figures));
        }
        if !uses_two_hosts {
            for result in measure_peers(&bench, &systems, repetition_count) {
                report.add_peer(result);
            }
        }
        report.write_files(&settings.results_folder)?;
    }
    bench.sempa.halt_and_wait()?;
    bench.pvm.halt_or_kill()?;
    println!(
        "{}written: {}",
        report.format(),
        settings.results_folder.display()
    );
    Ok(report.meets_goals())
}

/// Runs the farm with each system and each grain. Each repetition runs all systems, one after
/// another. A system whose run has failed is not run again with this grain.
fn measure_peers(
    bench: &Bench<'_>,
    systems: &[peers::FarmSystem],
    repetition_count: usize,
) -> Vec<PeerResult> {
    let mut results = Vec::new();
    for grain_us in peers::GRAINS_US {
        let mut results_of_grain: Vec<PeerResult> = systems
            .iter()
            .map(|system| PeerResult::new(*system, grain_us))
            .collect();
        for repetition in 1..=repetition_count {
            eprintln!("bench work: systems, {grain_us} us ({repetition} of {repetition_count})");
            // Every second repetition reverses the order, because caches may be cold for the system
            // that is measured first.
            if repetition % 2 == 0 {
                results_of_grain.reverse();
            }
            for result in results_of_grain
                .iter_mut()
                .filter(|result| result.failure.is_none())
            {
                match bench.run_peer(result.system, grain_us) {
                    Ok(figures) => result.repetitions.push(figures),
                    Err(error) => result.failure = Some(format!("{error:#}")),
                }
            }
        }
        results_of_grain.sort_by_key(|result| result.system);
        results.extend(results_of_grain);
    }
    results
}
