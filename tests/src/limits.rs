//! Limits the processors and the memory of hosts, by a control group per host.

use crate::run::wait_for;
use crate::testbed::Host;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The folder where control groups are mounted.
const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// The period of all limits in microseconds; short, so that a process is never throttled for long.
const QUOTA_PERIOD_US: u32 = 20_000;
/// Time limit for all processes of a host to enter its control group.
const ENTER_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit for all processes of a host to exit, so that its control group can be removed.
const EXIT_TIMEOUT: Duration = Duration::from_secs(10);

/// The control groups of one host: one in version 2 of control groups, one per controller in
/// version 1. Dropping removes them, so a [`HostCgroups`] must outlive its host.
#[derive(Debug)]
pub struct HostCgroups {
    folders: Vec<PathBuf>,
}

fn write(folder: &Path, file: &str, text: &str) -> Result<()> {
    let path = folder.join(file);
    fs::write(&path, text).with_context(|| format!("{}: {text}", path.display()))
}

/// Returns why processors of hosts cannot be limited on this machine; `None` if they can.
pub fn lacks() -> Option<String> {
    let here = hierarchies().map(|all| {
        all.iter()
            .all(|root| nix::unistd::access(root, nix::unistd::AccessFlags::W_OK).is_ok())
    });
    (here != Some(true)).then(|| {
        format!("no control groups for processors that can be written below {CGROUP_ROOT}")
    })
}

fn hierarchies() -> Option<Vec<PathBuf>> {
    hierarchies_of(&["cpu", "cpuacct"])
}

/// Returns the hierarchies in which groups have the first of these controllers. In version 1 of
/// control groups each controller has its own hierarchy.
fn hierarchies_of(controllers: &[&str]) -> Option<Vec<PathBuf>> {
    let v1: Vec<PathBuf> = controllers
        .iter()
        .map(|name| Path::new(CGROUP_ROOT).join(name))
        .collect();
    if v1.iter().all(|root| root.join("cgroup.procs").exists()) {
        return Some(v1);
    }
    let there = fs::read_to_string(Path::new(CGROUP_ROOT).join("cgroup.subtree_control")).ok()?;
    there
        .split_whitespace()
        .any(|name| name == controllers[0])
        .then(|| vec![PathBuf::from(CGROUP_ROOT)])
}

/// Returns why memory of hosts cannot be limited on this machine; `None` if it can.
pub fn lacks_memory() -> Option<String> {
    let writable =
        |root: &PathBuf| nix::unistd::access(root, nix::unistd::AccessFlags::W_OK).is_ok();
    let here = hierarchies_of(&["memory"]).is_some_and(|all| all.iter().all(writable));
    (!here).then(|| format!("no control groups for memory that can be written below {CGROUP_ROOT}"))
}

/// A control group that limits the memory of one host. Dropping removes the group, so a
/// [`MemoryLimit`] must outlive its host.
#[derive(Debug)]
pub struct MemoryLimit(HostCgroups);

impl MemoryLimit {
    /// Makes a control group for a host, without a limit and without processes.
    ///
    /// # Errors
    /// The machine lacks something ([`lacks_memory`]), or the kernel refuses.
    pub fn new(host: &Host) -> Result<MemoryLimit> {
        let Some(roots) = hierarchies_of(&["memory"]) else {
            bail!("{}", lacks_memory().unwrap_or_default())
        };
        HostCgroups::below(&roots, host).map(MemoryLimit)
    }

    /// Moves all processes of the host into the group, as [`HostCgroups::add_host`].
    ///
    /// # Errors
    /// As [`HostCgroups::add_host`].
    pub fn add_host(&self, host: &Host) -> Result<()> {
        self.0.add_host(host)
    }

    /// Limits the memory of the host to its present use plus `bytes`.
    pub fn limit_above_current_use(&self, bytes: u64) -> Result<()> {
        let (used, limit) = self.usage_and_limit_files();
        let used: u64 = fs::read_to_string(self.0.folders[0].join(used))?
            .trim()
            .parse()?;
        write(&self.0.folders[0], limit, &(used + bytes).to_string())
    }

    /// Removes the limit of the group.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove_limit(&self) -> Result<()> {
        let (_, limit) = self.usage_and_limit_files();
        write(
            &self.0.folders[0],
            limit,
            if limit == "memory.max" { "max" } else { "-1" },
        )
    }

    fn usage_and_limit_files(&self) -> (&'static str, &'static str) {
        match self.0.folders[0].join("memory.max").exists() {
            true => ("memory.current", "memory.max"),
            false => ("memory.usage_in_bytes", "memory.limit_in_bytes"),
        }
    }
}

impl HostCgroups {
    /// Makes control groups for a host, without a limit and without processes.
    ///
    /// # Errors
    /// The machine lacks something ([`lacks`]), or the kernel refuses.
    pub fn new(host: &Host) -> Result<HostCgroups> {
        let Some(roots) = hierarchies() else {
            bail!("{}", lacks().unwrap_or_default())
        };
        HostCgroups::below(&roots, host)
    }

    fn below(roots: &[PathBuf], host: &Host) -> Result<HostCgroups> {
        let name = format!("sempa-testbed-{}-{}", std::process::id(), host.init_pid());
        let limit = HostCgroups {
            folders: roots.iter().map(|root| root.join(&name)).collect(),
        };
        for folder in &limit.folders {
            fs::create_dir(folder).with_context(|| folder.display().to_string())?;
        }
        Ok(limit)
    }

    /// Moves all processes of the host into the group. Their later children are in the group, too.
    ///
    /// # Errors
    /// The kernel refuses, or a process remains outside the group.
    pub fn add_host(&self, host: &Host) -> Result<()> {
        wait_for(ENTER_TIMEOUT, || {
            let outside = || {
                host.processes()
                    .into_iter()
                    .filter(|(pid, _)| !self.contains(*pid).unwrap_or(false))
            };
            let all = std::iter::once(host.init_pid()).chain(outside().map(|(pid, _)| pid));
            for (pid, folder) in
                all.flat_map(|pid| self.folders.iter().map(move |folder| (pid, folder)))
            {
                // The process may have ended since it was listed.
                let _ = fs::write(folder.join("cgroup.procs"), pid.to_string());
            }
            // A process that was forking may have a child outside the group.
            outside().next().map_or(Ok(()), |(pid, line)| {
                Err(format!("{pid} {line} is not in the group"))
            })
        })
    }

    /// True if the process `pid`, by its number on the machine, is in the group.
    pub fn contains(&self, pid: u32) -> Result<bool> {
        let processes = fs::read_to_string(self.folders[0].join("cgroup.procs"))?;
        Ok(processes.lines().any(|line| line == pid.to_string()))
    }

    /// Limits the host to this share of one processor.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn set_share(&self, share: f64) -> Result<()> {
        // The kernel accepts no quota below one millisecond.
        self.write_quota(
            &(share * f64::from(QUOTA_PERIOD_US))
                .round()
                .max(1000.0)
                .to_string(),
        )
    }

    /// Removes the limit of the group.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn remove_limit(&self) -> Result<()> {
        self.write_quota(if self.folders[0].join("cpu.max").exists() {
            "max"
        } else {
            "-1"
        })
    }

    fn write_quota(&self, quota: &str) -> Result<()> {
        let folder = &self.folders[0];
        if folder.join("cpu.max").exists() {
            return write(folder, "cpu.max", &format!("{quota} {QUOTA_PERIOD_US}"));
        }
        write(folder, "cpu.cfs_period_us", &QUOTA_PERIOD_US.to_string())?;
        write(folder, "cpu.cfs_quota_us", quota)
    }
}

impl Drop for HostCgroups {
    fn drop(&mut self) {
        for folder in &self.folders {
            let _ = wait_for(EXIT_TIMEOUT, || {
                fs::remove_dir(folder).map_err(|error| error.to_string())
            });
        }
    }
}
