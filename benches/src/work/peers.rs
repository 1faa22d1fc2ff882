//! The same farm in other systems: hand-written PVM calls, Work Queue, HyperQueue, Dask and Ray.

use super::{Bench, FarmFigures, WORKER_COUNT, WorkSettings, run_farm};
use anyhow::{Context, Result, bail};
use sempa_tests::Testbed;
use sempa_tests::run::run_successfully;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// Processor times of a task in microseconds.
pub(super) const GRAINS_US: [u64; 5] = [0, 100, 1_000, 10_000, 100_000];
/// Processor time that all tasks of one run use together, in microseconds.
const WORK_US: u64 = 6_000_000;
/// Python packages with the versions that are measured.
const PYTHON_PACKAGES: [&str; 3] = ["distributed==2026.8.0", "ray==2.60.0", "hyperqueue==0.27.0"];
/// Time limit for a compilation.
const COMPILE_TIMEOUT: Duration = Duration::from_secs(120);
/// Time limit for the installation of the Python packages.
const INSTALL_TIMEOUT: Duration = Duration::from_secs(900);
/// Tasks that a worker of the hand-written farm has in advance.
const FARM_AHEAD: &str = "4";

/// A system that executes the farm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum FarmSystem {
    /// The framework with its default settings.
    Batched,
    /// The framework with one task per message.
    Single,
    /// The hand-written farm on Sempa.
    FarmOnSempa,
    /// The hand-written farm on PVM 3.4.6.
    FarmOnPvm,
    Dask,
    Ray,
    HyperQueue,
    WorkQueue,
}

impl FarmSystem {
    pub(super) const ALL: [Self; 8] = [
        Self::Batched,
        Self::Single,
        Self::FarmOnSempa,
        Self::FarmOnPvm,
        Self::Dask,
        Self::Ray,
        Self::HyperQueue,
        Self::WorkQueue,
    ];

    /// Returns the name in the table.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Batched => "Sempa",
            Self::Single => "Sempa, one per message",
            Self::FarmOnSempa => "PVM calls on Sempa",
            Self::FarmOnPvm => "PVM calls on PVM 3.4.6",
            Self::Dask => "Dask",
            Self::Ray => "Ray",
            Self::HyperQueue => "HyperQueue (programs)",
            Self::WorkQueue => "Work Queue (programs)",
        }
    }

    /// Returns the name on the command line.
    pub(super) fn selector(self) -> &'static str {
        match self {
            Self::Batched => "sempa",
            Self::Single => "sempa-single",
            Self::FarmOnSempa => "farm-sempa",
            Self::FarmOnPvm => "farm-pvm",
            Self::Dask => "dask",
            Self::Ray => "ray",
            Self::HyperQueue => "hyperqueue",
            Self::WorkQueue => "work-queue",
        }
    }

    fn needs_python(self) -> bool {
        matches!(self, Self::Dask | Self::Ray | Self::HyperQueue)
    }

    /// Maximum number of tasks of a run, so that a run with empty tasks takes seconds.
    fn task_count_max(self) -> u64 {
        match self {
            Self::Batched | Self::Single | Self::FarmOnSempa | Self::FarmOnPvm => 100_000,
            Self::Dask | Self::Ray => 5_000,
            Self::HyperQueue | Self::WorkQueue => 1_500,
        }
    }

    /// Number of tasks with this grain.
    pub(super) fn task_count(self, grain_us: u64, settings: &WorkSettings) -> u64 {
        let count = WORK_US.checked_div(grain_us).unwrap_or(u64::MAX);
        settings.task_count(count.min(self.task_count_max()))
    }
}

/// A folder for the compiled programs and for the files of the runs. It is removed at the end.
pub(super) struct PeerFolder {
    folder: tempfile::TempDir,
    /// The Python interpreter with the packages; the error if they could not be installed.
    python: Result<PathBuf, String>,
}

fn source_folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("peers")
}

fn compile(source: &str, target: &Path, options: &[&str]) -> Result<()> {
    let mut command = Command::new("gcc");
    command.args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-o"]);
    command.arg(target);
    command.arg(source_folder().join(source)).args(options);
    run_successfully(command, COMPILE_TIMEOUT).with_context(|| format!("compiling {source}"))?;
    Ok(())
}

/// Installs the Python packages into `folder`, and returns the interpreter. Installed packages stay
/// for later runs.
fn install_python_packages(folder: &Path) -> Result<PathBuf> {
    let python = folder.join("bin/python3");
    if !python.exists() {
        let mut command = Command::new("python3");
        command.args(["-m", "venv"]).arg(folder);
        run_successfully(command, INSTALL_TIMEOUT)?;
    }
    let mut command = Command::new(&python);
    command.args(["-m", "pip", "install", "--quiet"]);
    command.args(PYTHON_PACKAGES);
    run_successfully(command, INSTALL_TIMEOUT)?;
    Ok(python)
}

impl PeerFolder {
    /// Compiles the programs that the systems need, and installs packages.
    ///
    /// # Errors
    /// A program does not compile. Packages that cannot be installed are reported by their systems.
    pub(super) fn prepare(
        settings: &WorkSettings,
        systems: &[FarmSystem],
        testbeds: [&Testbed; 2],
    ) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("bench-work-").tempdir()?;
        for testbed in testbeds {
            let program = testbed.root_home().join("pvm3/bin/LINUX64/farm");
            compile("farm.c", &program, &["-lpvm3"])?;
        }
        compile("work_loop.c", &folder.path().join("work_loop"), &[])?;
        let library = folder.path().join("libwork_loop.so");
        compile("work_loop.c", &library, &["-shared", "-fPIC"])?;
        if systems.contains(&FarmSystem::WorkQueue) {
            let options = [
                "-I/usr/include/cctools",
                "-lwork_queue",
                "-ldttools",
                "-lz",
                "-lm",
            ];
            let program = folder.path().join("work_queue_farm");
            compile("work_queue_farm.c", &program, &options)?;
        }
        let python = if systems.iter().any(|system| system.needs_python()) {
            install_python_packages(&settings.packages_folder)
                .map_err(|error| format!("its package cannot be installed: {error:#}"))
        } else {
            Err("no selected system needs Python".to_string())
        };
        Ok(Self { folder, python })
    }
}

impl Bench<'_> {
    /// Runs the farm once with a system.
    ///
    /// # Errors
    /// The system is not installed, or its run fails.
    pub(super) fn run_peer(&self, system: FarmSystem, grain_us: u64) -> Result<FarmFigures> {
        let task_count = system.task_count(grain_us, self.settings);
        let numbers = [task_count, grain_us, u64::from(WORKER_COUNT)].map(|n| n.to_string());
        let folder = self.peers.folder.path();
        let ends_file = folder.join("ends");
        if ends_file.exists() {
            std::fs::remove_file(&ends_file)?;
        }
        let command = match system {
            FarmSystem::Batched | FarmSystem::Single => {
                let flow = if system == FarmSystem::Batched {
                    "batched"
                } else {
                    "single"
                };
                self.farm_command(&[
                    format!("tasks={task_count}"),
                    format!("grain_us={grain_us}"),
                    format!("workers={WORKER_COUNT}"),
                    format!("flow={flow}"),
                ])
            }
            FarmSystem::FarmOnSempa | FarmSystem::FarmOnPvm => {
                let is_sempa = system == FarmSystem::FarmOnSempa;
                let testbed = if is_sempa {
                    self.sempa_testbed
                } else {
                    self.pvm_testbed
                };
                let program = testbed.root_home().join("pvm3/bin/LINUX64/farm");
                let mut command = if is_sempa {
                    self.sempa.user_command(testbed.host(1), program)
                } else {
                    self.pvm.command(testbed.host(1), program)
                };
                command.args(&numbers).arg(FARM_AHEAD);
                command
            }
            FarmSystem::WorkQueue => {
                let mut command = Command::new(folder.join("work_queue_farm"));
                command.args(&numbers).arg(folder);
                command
            }
            FarmSystem::Dask | FarmSystem::Ray | FarmSystem::HyperQueue => {
                let python = match &self.peers.python {
                    Ok(python) => python,
                    Err(reason) => bail!("{reason}"),
                };
                let mut command = Command::new(python);
                command.arg(source_folder().join("work_peers.py"));
                command.arg(system.selector()).args(&numbers).arg(folder);
                command
            }
        };
        run_farm(command, system.name())
    }
}
