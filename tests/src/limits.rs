//! Limits the processors and the memory of hosts, by control groups for each host.

use crate::run::wait_for;
use crate::testbed::Host;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The folder below which control groups are mounted.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// The period of all processor limits in microseconds. It is short, so that a process is never
/// throttled for long.
const QUOTA_PERIOD_US: u32 = 20_000;
/// Time limit until all processes of a host are in its control group.
const CGROUP_ENTER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit until all processes of a host have exited, so that its control group can be removed.
const PROCESS_EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The control groups of one host: one in version 2 of control groups, one per controller in
/// version 1. Dropping the value removes the groups. A group with processes cannot be removed, so a
/// [`HostCgroups`] must outlive its host.
#[derive(Debug)]
pub struct HostCgroups {
    group_folders: Vec<PathBuf>,
}

fn write_control_file(folder: &Path, file: &str, text: &str) -> Result<()> {
    let path = folder.join(file);
    fs::write(&path, text).with_context(|| format!("{}: {text}", path.display()))
}

/// Returns a reason if the processors of hosts cannot be limited on this machine; `None` if they
/// can.
pub fn unmet_cpu_requirement() -> Option<String> {
    let is_available = cpu_hierarchies().map(|roots| {
        roots
            .iter()
            .all(|root| nix::unistd::access(root, nix::unistd::AccessFlags::W_OK).is_ok())
    });
    (is_available != Some(true)).then(|| {
        format!("no control groups for processors that can be written below {CGROUP_ROOT}")
    })
}

fn cpu_hierarchies() -> Option<Vec<PathBuf>> {
    hierarchies_of(&["cpu", "cpuacct"])
}

/// Returns the roots of the hierarchies in which groups have these controllers; `None` if there are
/// none. In version 1 of control groups each controller has its own hierarchy. In version 2 only
/// the first controller is checked.
fn hierarchies_of(controllers: &[&str]) -> Option<Vec<PathBuf>> {
    let v1_roots: Vec<PathBuf> = controllers
        .iter()
        .map(|name| Path::new(CGROUP_ROOT).join(name))
        .collect();
    if v1_roots
        .iter()
        .all(|root| root.join("cgroup.procs").exists())
    {
        return Some(v1_roots);
    }
    let enabled_controllers =
        fs::read_to_string(Path::new(CGROUP_ROOT).join("cgroup.subtree_control")).ok()?;
    enabled_controllers
        .split_whitespace()
        .any(|name| name == controllers[0])
        .then(|| vec![PathBuf::from(CGROUP_ROOT)])
}

/// Returns a reason if the memory of hosts cannot be limited on this machine; `None` if it can.
pub fn unmet_memory_requirement() -> Option<String> {
    let is_writable =
        |root: &PathBuf| nix::unistd::access(root, nix::unistd::AccessFlags::W_OK).is_ok();
    let is_available =
        hierarchies_of(&["memory"]).is_some_and(|roots| roots.iter().all(is_writable));
    (!is_available)
        .then(|| format!("no control groups for memory that can be written below {CGROUP_ROOT}"))
}

/// A control group that limits the memory of one host. Dropping the value removes the group. A
/// group with processes cannot be removed, so a [`HostMemoryCgroup`] must outlive its host.
#[derive(Debug)]
pub struct HostMemoryCgroup(HostCgroups);

impl HostMemoryCgroup {
    /// Makes a control group for a host, without a limit and without processes.
    ///
    /// # Errors
    /// The machine does not meet a requirement ([`unmet_memory_requirement`]), or the kernel
    /// refuses the group.
    pub fn new(host: &Host) -> Result<Self> {
        let Some(roots) = hierarchies_of(&["memory"]) else {
            bail!("{}", unmet_memory_requirement().unwrap_or_default())
        };
        HostCgroups::create_below(&roots, host).map(HostMemoryCgroup)
    }

    /// Moves all processes of the host into the group; see [`HostCgroups::add_host_processes`].
    ///
    /// # Errors
    /// As [`HostCgroups::add_host_processes`].
    pub fn add_host_processes(&self, host: &Host) -> Result<()> {
        self.0.add_host_processes(host)
    }

    /// Limits the memory of the host to its current use plus `bytes`.
    pub fn limit_to_current_use_plus(&self, bytes: u64) -> Result<()> {
        let (usage, limit_file) = self.usage_and_limit_files();
        let usage: u64 = fs::read_to_string(self.0.group_folders[0].join(usage))?
            .trim()
            .parse()?;
        write_control_file(
            &self.0.group_folders[0],
            limit_file,
            &(usage + bytes).to_string(),
        )
    }

    /// Removes the memory limit of the group.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn remove_memory_limit(&self) -> Result<()> {
        let (_, limit_file) = self.usage_and_limit_files();
        write_control_file(
            &self.0.group_folders[0],
            limit_file,
            if limit_file == "memory.max" {
                "max"
            } else {
                "-1"
            },
        )
    }

    fn usage_and_limit_files(&self) -> (&'static str, &'static str) {
        match self.0.group_folders[0].join("memory.max").exists() {
            true => ("memory.current", "memory.max"),
            false => ("memory.usage_in_bytes", "memory.limit_in_bytes"),
        }
    }
}

impl HostCgroups {
    /// Makes control groups for a host, without a limit and without processes.
    ///
    /// # Errors
    /// The machine does not meet a requirement ([`unmet_cpu_requirement`]), or the kernel refuses
    /// the groups.
    pub fn new(host: &Host) -> Result<Self> {
        let Some(roots) = cpu_hierarchies() else {
            bail!("{}", unmet_cpu_requirement().unwrap_or_default())
        };
        Self::create_below(&roots, host)
    }

    fn create_below(roots: &[PathBuf], host: &Host) -> Result<Self> {
        let group_name = format!("sempa-testbed-{}-{}", std::process::id(), host.init_pid());
        let groups = Self {
            group_folders: roots.iter().map(|root| root.join(&group_name)).collect(),
        };
        for folder in &groups.group_folders {
            fs::create_dir(folder).with_context(|| folder.display().to_string())?;
        }
        Ok(groups)
    }

    /// Moves all processes of the host into the groups. Child processes that they start later are
    /// also in the groups.
    ///
    /// # Errors
    /// The kernel refuses the move, or a process remains outside the groups.
    pub fn add_host_processes(&self, host: &Host) -> Result<()> {
        wait_for(CGROUP_ENTER_TIMEOUT, || {
            let outside_processes = || {
                host.processes()
                    .into_iter()
                    .filter(|(pid, _)| !self.contains_process(*pid).unwrap_or(false))
            };
            let pids =
                std::iter::once(host.init_pid()).chain(outside_processes().map(|(pid, _)| pid));
            for (pid, folder) in
                pids.flat_map(|pid| self.group_folders.iter().map(move |folder| (pid, folder)))
            {
                // The process may have ended already.
                let _ = fs::write(folder.join("cgroup.procs"), pid.to_string());
            }
            // A process that was forking may have a child outside the groups.
            outside_processes().next().map_or(Ok(()), |(pid, line)| {
                Err(format!("{pid} {line} is not in the group"))
            })
        })
    }

    /// True if the process whose number on the machine is `pid` is in the groups.
    pub fn contains_process(&self, pid: u32) -> Result<bool> {
        let processes = fs::read_to_string(self.group_folders[0].join("cgroup.procs"))?;
        Ok(processes.lines().any(|line| line == pid.to_string()))
    }

    /// Limits the host to a share of one processor: 0.5 is half of the processor's time. A share
    /// below 0.05 counts as 0.05.
    ///
    /// # Errors
    /// The kernel refuses the limit.
    pub fn set_processor_share(&self, processor_share: f64) -> Result<()> {
        // The kernel refuses a quota below one millisecond.
        self.write_processor_quota(
            &(processor_share * f64::from(QUOTA_PERIOD_US))
                .round()
                .max(1000.0)
                .to_string(),
        )
    }

    /// Removes the processor limit of the groups.
    ///
    /// # Errors
    /// The kernel refuses the change.
    pub fn remove_processor_limit(&self) -> Result<()> {
        self.write_processor_quota(if self.group_folders[0].join("cpu.max").exists() {
            "max"
        } else {
            "-1"
        })
    }

    fn write_processor_quota(&self, quota_text: &str) -> Result<()> {
        let folder = &self.group_folders[0];
        if folder.join("cpu.max").exists() {
            return write_control_file(
                folder,
                "cpu.max",
                &format!("{quota_text} {QUOTA_PERIOD_US}"),
            );
        }
        write_control_file(folder, "cpu.cfs_period_us", &QUOTA_PERIOD_US.to_string())?;
        write_control_file(folder, "cpu.cfs_quota_us", quota_text)
    }
}

impl Drop for HostCgroups {
    fn drop(&mut self) {
        for folder in &self.group_folders {
            let _ = wait_for(PROCESS_EXIT_TIMEOUT, || {
                fs::remove_dir(folder).map_err(|error| error.to_string())
            });
        }
    }
}
