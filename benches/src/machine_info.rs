//! Describes the machine, and its load during a measurement.

use procfs::{CpuInfo, Current, LoadAverage, Meminfo};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

/// The kernel's load averages over one, five and fifteen minutes, as text.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LoadAverages(String);

impl LoadAverages {
    /// Reads the current load averages.
    fn read_current() -> Self {
        Self(LoadAverage::current().map_or_else(
            |_| String::new(),
            |load| format!("{:.2} {:.2} {:.2}", load.one, load.five, load.fifteen),
        ))
    }
}

/// Facts about the machine and the run that are stored with the results.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct MachineInfo {
    /// Start of the run, in seconds since 1970.
    pub(crate) at: u64,
    /// The model name of the processor.
    pub(crate) processor: String,
    /// Number of processors that the program may use.
    pub(crate) cores: usize,
    pub(crate) memory_gb: u64,
    /// Release of the kernel.
    pub(crate) kernel: String,
    /// Versions of the measured systems, by name of the package.
    pub(crate) versions: BTreeMap<String, String>,
    /// Load before the first measurement.
    pub(crate) load_before: LoadAverages,
    /// Load after the last measurement. The measurement itself contributes to this load.
    pub(crate) load_after: LoadAverages,
    /// Number of repetitions of each measurement.
    pub(crate) repetitions: usize,
    /// True if the run used fewer repetitions or rounds than a full run.
    pub(crate) quick: bool,
}

impl MachineInfo {
    /// Collects the facts about this machine. `is_own_build` is true if the programs were built for
    /// this run. Both load fields are set to the current load.
    pub(crate) fn collect(is_own_build: bool, repetition_count: usize, is_quick: bool) -> Self {
        let processor = CpuInfo::current()
            .ok()
            .and_then(|info| info.model_name(0).map(String::from));
        let memory_bytes = Meminfo::current().map_or(0, |memory_info| memory_info.mem_total);
        let mut versions: BTreeMap<String, String> = ["pvm", "openmpi-bin", "mpich", "netpipe-pvm"]
            .map(|name| (name.to_string(), debian_version(name)))
            .into();
        versions.insert("sempa".to_string(), sempa_version(is_own_build));
        Self {
            at: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |elapsed| elapsed.as_secs()),
            processor: processor.unwrap_or_default(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gb: memory_bytes >> 30,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_string(),
            versions,
            load_before: LoadAverages::read_current(),
            load_after: LoadAverages::read_current(),
            repetitions: repetition_count,
            quick: is_quick,
        }
    }

    /// Sets [`MachineInfo::load_after`] to the current load.
    pub(crate) fn update_load_after(&mut self) {
        self.load_after = LoadAverages::read_current();
    }

    /// Formats the facts as text.
    pub(crate) fn format(&self) -> String {
        let versions: Vec<String> = self
            .versions
            .iter()
            .map(|(name, version)| format!("{name} {version}"))
            .collect();
        format!(
            "machine: {}, {} cores, {} GB, Linux {}\nversions: {}\n\
             load: {} before, {} after; {} repetitions{}, medians of their medians\n",
            self.processor,
            self.cores,
            self.memory_gb,
            self.kernel,
            versions.join(", "),
            self.load_before.0,
            self.load_after.0,
            self.repetitions,
            if self.quick { ", quick" } else { "" },
        )
    }
}

fn debian_version(package: &str) -> String {
    first_output_line(Command::new("dpkg-query").args(["-W", "-f", "${Version}", package]))
}

/// Returns the version of Sempa. If the programs were built for this run, the version includes the
/// revision of the sources.
fn sempa_version(is_own_build: bool) -> String {
    if !is_own_build {
        return format!("{} (as installed)", env!("CARGO_PKG_VERSION"));
    }
    let revision = first_output_line(
        Command::new("git")
            .args(["describe", "--always", "--dirty"])
            .current_dir(env!("CARGO_MANIFEST_DIR")),
    );
    format!("{} ({revision})", env!("CARGO_PKG_VERSION"))
}

fn first_output_line(command: &mut Command) -> String {
    let stdout = command
        .output()
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    stdout
        .lines()
        .next()
        .unwrap_or("unknown")
        .trim()
        .to_string()
}
