//! Describes the machine and its load during a measurement.

use procfs::{CpuInfo, Current, LoadAverage, Meminfo};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

/// Load averages of the kernel over one, five and fifteen minutes, as text.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct LoadAverages(String);

impl LoadAverages {
    /// Reads the current load averages.
    fn now() -> LoadAverages {
        LoadAverages(LoadAverage::current().map_or_else(
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
    /// Versions of the measured systems, by package name.
    pub(crate) versions: BTreeMap<String, String>,
    /// Load before the first measurement.
    pub(crate) load_before: LoadAverages,
    /// Load after the last measurement. The measurement itself is a part of this load.
    pub(crate) load_after: LoadAverages,
    /// Number of repetitions of each measurement.
    pub(crate) repetitions: usize,
    /// True if the run used fewer repetitions or rounds than a full run.
    pub(crate) quick: bool,
}

impl MachineInfo {
    /// Collects the facts about this machine. `own_build` is true if the programs were built for
    /// this run.
    pub(crate) fn describe(own_build: bool, repetitions: usize, quick: bool) -> MachineInfo {
        let processor = CpuInfo::current()
            .ok()
            .and_then(|info| info.model_name(0).map(String::from));
        let memory_bytes = Meminfo::current().map_or(0, |memory| memory.mem_total);
        let mut versions: BTreeMap<String, String> = ["pvm", "openmpi-bin", "mpich", "netpipe-pvm"]
            .map(|name| (name.to_string(), debian_version(name)))
            .into();
        versions.insert("sempa".to_string(), sempa_version(own_build));
        MachineInfo {
            at: SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0, |since| since.as_secs()),
            processor: processor.unwrap_or_default(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_gb: memory_bytes >> 30,
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")
                .unwrap_or_default()
                .trim()
                .to_string(),
            versions,
            load_before: LoadAverages::now(),
            load_after: LoadAverages::now(),
            repetitions,
            quick,
        }
    }

    /// Sets [`MachineInfo::load_after`] to the current load.
    pub(crate) fn update_load(&mut self) {
        self.load_after = LoadAverages::now();
    }

    /// Formats the facts as text.
    pub(crate) fn text(&self) -> String {
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

fn debian_version(name: &str) -> String {
    first_line(Command::new("dpkg-query").args(["-W", "-f", "${Version}", name]))
}

/// Returns the version of Sempa. If the programs were built for this run, the version includes the
/// revision of the sources.
fn sempa_version(own_build: bool) -> String {
    if !own_build {
        return format!("{} (as installed)", env!("CARGO_PKG_VERSION"));
    }
    let revision = first_line(
        Command::new("git")
            .args(["describe", "--always", "--dirty"])
            .current_dir(env!("CARGO_MANIFEST_DIR")),
    );
    format!("{} ({revision})", env!("CARGO_PKG_VERSION"))
}

fn first_line(command: &mut Command) -> String {
    let stdout = command
        .output()
        .map(|done| String::from_utf8_lossy(&done.stdout).into_owned())
        .unwrap_or_default();
    stdout
        .lines()
        .next()
        .unwrap_or("unknown")
        .trim()
        .to_string()
}
