//! Measures the resources that a virtual machine uses on the hosts of a testbed: memory,
//! descriptors, threads, processes and files.

use crate::testbed::Host;
use crate::vm::Vm;
use procfs::process::Process;
use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Names of the kinds of processes. The last kind is for tasks: all processes that belong to no
/// other kind.
pub const KIND_NAMES: [&str; 6] = [
    "master",
    "daemons",
    "taskers",
    "resource manager",
    "load watchers",
    "tasks",
];
/// Index in [`KIND_NAMES`] of the kind for tasks.
pub const TASK_KIND_INDEX: usize = KIND_NAMES.len() - 1;

/// Name in tables of the value [`Footprint::records_kib`].
pub const RECORDS_KIB_NAME: &str = "records: KiB";
/// Upper bound of [`Footprint::records_kib`]: the resource manager's history, and two files of 1
/// MiB each with committed migrations.
pub const RECORDS_KIB_MAX: u64 = (pvm_rm::store::file::FILE_BYTES_MAX >> 10) + 2 * 1024;

/// The total resources of a set of processes: all processes of one kind, or a single process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ProcessResources {
    pub process_count: u64,
    pub thread_count: u64,
    pub descriptor_count: u64,
    /// Memory in KiB. File pages and shared memory count in proportion (the kernel's `Pss`).
    /// Private pages count in full even while they are shared after a fork; otherwise the memory of
    /// a process would seem to grow when another process writes to its pages or ends.
    pub memory_kib: u64,
}

/// The resources that a virtual machine uses at the time of the measurement.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Footprint {
    /// Resources of the processes, in the order of [`KIND_NAMES`].
    pub resources_by_kind: [ProcessResources; KIND_NAMES.len()],
    /// Number of files in the daemons' folders and the shared memory, on all hosts.
    pub file_count: u64,
    /// Disk space in KiB of these files, excluding those in `records_kib` and `store_kib`.
    pub files_kib: u64,
    /// Disk space in KiB of the records: the resource manager's history and the files of committed
    /// migrations. The sizes of these files are bounded.
    pub records_kib: u64,
    /// Disk space of the checkpoint store in KiB.
    pub store_kib: u64,
}

impl Footprint {
    /// Measures the resources on all hosts. A process that ends during the measurement is not
    /// counted.
    pub fn measure(vm: &Vm<'_>) -> Self {
        let mut footprint = Self::default();
        let mut process_kinds = HashMap::new();
        for host in vm.testbed().hosts() {
            for (pid, line) in host.processes() {
                process_kinds.insert(pid, kind_index(host, &line));
            }
            for (path, kib) in daemon_files(host) {
                let is_record = path
                    .extension()
                    .is_some_and(|extension| extension == "redb")
                    || path.ends_with("moves");
                footprint.file_count += 1;
                *(if is_record {
                    &mut footprint.records_kib
                } else {
                    &mut footprint.files_kib
                }) += kib;
            }
        }
        for (pid, kind) in process_kinds {
            let Some(kind) = kind else { continue };
            if let Some(resources) = process_resources(pid) {
                let total = &mut footprint.resources_by_kind[kind];
                total.process_count += 1;
                total.thread_count += resources.thread_count;
                total.descriptor_count += resources.descriptor_count;
                total.memory_kib += resources.memory_kib;
            }
        }
        let mut checkpoint_files = Vec::new();
        collect_files(
            &vm.user_home().join(".local/state/sempa/checkpoints"),
            &mut checkpoint_files,
        );
        footprint.store_kib = checkpoint_files.iter().map(|(_, kib)| kib).sum();
        footprint
    }

    /// Returns all values with their names, for tables.
    pub fn named_values(&self) -> Vec<(String, u64)> {
        let mut values = Vec::new();
        for (name, resources) in KIND_NAMES.iter().zip(&self.resources_by_kind) {
            for (unit, value) in [
                ("memory KiB", resources.memory_kib),
                ("descriptors", resources.descriptor_count),
                ("threads", resources.thread_count),
                ("processes", resources.process_count),
            ] {
                values.push((format!("{name}: {unit}"), value));
            }
        }
        values.push(("files of daemons".to_string(), self.file_count));
        values.push(("files of daemons: KiB".to_string(), self.files_kib));
        values.push((RECORDS_KIB_NAME.to_string(), self.records_kib));
        values.push(("store: KiB".to_string(), self.store_kib));
        values
    }
}

/// Returns the files in the daemons' folders and in the shared memory of a host: path on the
/// machine, and disk space in KiB.
pub fn daemon_files(host: &Host) -> Vec<(PathBuf, u64)> {
    let mut files = Vec::new();
    for entry in fs::read_dir(host.machine_path("/tmp"))
        .into_iter()
        .flatten()
        .flatten()
    {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with("sempa-") && !name.starts_with("sempa-testbed-") {
            collect_files(&entry.path(), &mut files);
        }
    }
    collect_files(&host.machine_path("/dev/shm"), &mut files);
    files
}

/// Returns the index in [`KIND_NAMES`] of the kind of the process with this command line; `None`
/// for processes of the testbed and for the commands that measure.
fn kind_index(host: &Host, command_line: &str) -> Option<usize> {
    let program = command_line
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
        _ => Some(TASK_KIND_INDEX),
    }
}

fn process_resources(pid: u32) -> Option<ProcessResources> {
    let process = Process::new(pid.cast_signed()).ok()?;
    let memory_map = process.smaps_rollup().ok()?.memory_map_rollup;
    let memory_sizes = &memory_map.0.first()?.extension.map;
    let memory_parts = ["Anonymous", "Pss_File", "Pss_Shmem"].map(|name| memory_sizes.get(name));
    Some(ProcessResources {
        process_count: 1,
        thread_count: process.status().ok()?.threads,
        descriptor_count: process.fd_count().ok()? as u64,
        memory_kib: memory_parts.into_iter().sum::<Option<u64>>()? / 1024,
    })
}

fn collect_files(folder: &Path, files: &mut Vec<(PathBuf, u64)>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let Ok(metadata) = entry.metadata() else {
            continue;
        };
        if metadata.is_dir() {
            collect_files(&entry.path(), files);
        } else {
            use std::os::unix::fs::MetadataExt;
            files.push((entry.path(), metadata.blocks().div_ceil(2)));
        }
    }
}
