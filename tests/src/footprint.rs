//! Measures the resources that a virtual machine uses on the hosts of a testbed: memory,
//! descriptors, threads, processes and files.

use crate::testbed::Host;
use crate::vm::Vm;
use procfs::process::Process;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Names of the kinds of processes. The last one is for tasks: a process that belongs to no other
/// kind.
pub const KINDS: [&str; 6] = [
    "master",
    "daemons",
    "taskers",
    "resource manager",
    "load watchers",
    "tasks",
];
/// Index in [`KINDS`] for tasks.
pub const TASKS_KIND: usize = KINDS.len() - 1;

/// Name of the records' disk space in tables.
pub const RECORDS_KIB_NAME: &str = "records: KiB";
/// Upper bound of the records' disk space in KiB: the resource manager's history, and two files of
/// 1 MiB each with committed migrations.
pub const RECORDS_KIB_MAX: u64 = (pvm_rm::store::file::FILE_BYTES_MAX >> 10) + 2 * 1024;

/// The total resources of all processes of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessResources {
    pub processes: u64,
    pub threads: u64,
    pub descriptors: u64,
    /// Memory in KiB. File pages and shared memory count in proportion (the kernel's `Pss`).
    /// Private pages count in full even while they are shared after a fork; otherwise a process
    /// would seem to grow when another process writes to its pages or ends.
    pub memory_kib: u64,
}

/// The resources that a virtual machine used when it was measured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Resources of the processes, in the order of [`KINDS`].
    pub kinds: [ProcessResources; KINDS.len()],
    /// Number of files in the daemons' folders and the shared memory of all hosts.
    pub files: u64,
    /// Disk space of these files in KiB, without the records and the store.
    pub files_kib: u64,
    /// Disk space in KiB of the records: the resource manager's history and the files of committed
    /// migrations. The sizes of these files are bounded.
    pub records_kib: u64,
    /// Disk space of the checkpoint store in KiB.
    pub store_kib: u64,
}

impl Footprint {
    /// Measures all hosts. A process that ends during the measurement is not counted.
    pub fn measure(vm: &Vm<'_>) -> Footprint {
        let mut seen = Footprint::default();
        let mut kinds = HashMap::new();
        for host in vm.bed().hosts() {
            for (pid, line) in host.processes() {
                kinds.insert(pid, kind_of(host, &line));
            }
            for (path, kib) in host_files(host) {
                let is_record = path.extension().is_some_and(|ending| ending == "redb")
                    || path.ends_with("moves");
                seen.files += 1;
                *(if is_record {
                    &mut seen.records_kib
                } else {
                    &mut seen.files_kib
                }) += kib;
            }
        }
        for (pid, kind) in kinds {
            let Some(kind) = kind else { continue };
            if let Some(sum) = process_resources(pid) {
                let all = &mut seen.kinds[kind];
                all.processes += 1;
                all.threads += sum.threads;
                all.descriptors += sum.descriptors;
                all.memory_kib += sum.memory_kib;
            }
        }
        let mut kept = Vec::new();
        collect(&vm.home().join(".local/state/sempa/checkpoints"), &mut kept);
        seen.store_kib = kept.iter().map(|(_, kib)| kib).sum();
        seen
    }

    /// Returns all values with their names, for tables.
    pub fn figures(&self) -> Vec<(String, u64)> {
        let mut all = Vec::new();
        for (name, sum) in KINDS.iter().zip(&self.kinds) {
            for (what, value) in [
                ("memory KiB", sum.memory_kib),
                ("descriptors", sum.descriptors),
                ("threads", sum.threads),
                ("processes", sum.processes),
            ] {
                all.push((format!("{name}: {what}"), value));
            }
        }
        all.push(("files of daemons".to_string(), self.files));
        all.push(("files of daemons: KiB".to_string(), self.files_kib));
        all.push((RECORDS_KIB_NAME.to_string(), self.records_kib));
        all.push(("store: KiB".to_string(), self.store_kib));
        all
    }
}

/// Returns the files in the daemons' folders and the shared memory of a host, each with its disk
/// space in KiB.
pub fn host_files(host: &Host) -> Vec<(PathBuf, u64)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(host.machine_path("/tmp"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("sempa-") && !name.starts_with("sempa-testbed-") {
            collect(&entry.path(), &mut found);
        }
    }
    collect(&host.machine_path("/dev/shm"), &mut found);
    found
}

/// Returns the index in [`KINDS`] of the kind of the process with this command line; `None` for
/// processes of the testbed and for the commands that measure.
fn kind_of(host: &Host, line: &str) -> Option<usize> {
    let program = line
        .split(' ')
        .next()
        .unwrap_or_default()
        .rsplit('/')
        .next()
        .unwrap_or_default();
    match program {
        "pvmd" if host.name() == "h1" => Some(0),
        "pvmd" => Some(1),
        "pvm-tasker" => Some(2),
        "pvm-rm" => Some(3),
        "pvm-load-watcher" => Some(4),
        "sshd" | "sshd:" | "sempa-host" | "pvm" | "sh" | "env" | "sshd-session" | "criu" => None,
        _ => Some(TASKS_KIND),
    }
}

fn process_resources(pid: u32) -> Option<ProcessResources> {
    let process = Process::new(pid.cast_signed()).ok()?;
    let rollup = process.smaps_rollup().ok()?.memory_map_rollup;
    let sizes = &rollup.0.first()?.extension.map;
    let parts = ["Anonymous", "Pss_File", "Pss_Shmem"].map(|name| sizes.get(name));
    Some(ProcessResources {
        processes: 1,
        threads: process.status().ok()?.threads,
        descriptors: process.fd_count().ok()? as u64,
        memory_kib: parts.into_iter().sum::<Option<u64>>()? / 1024,
    })
}

fn collect(folder: &Path, found: &mut Vec<(PathBuf, u64)>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(meta) = entry.metadata() else { continue };
        if meta.is_dir() {
            collect(&entry.path(), found);
        } else {
            use std::os::unix::fs::MetadataExt;
            found.push((entry.path(), meta.blocks().div_ceil(2)));
        }
    }
}
