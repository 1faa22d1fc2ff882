//! Limits of processors, so that hosts of one machine are unequal, and of memory: a control group for each host that wants one.

use crate::run::eventually;
use crate::testbed::Host;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where control groups are.
const ROOT: &str = "/sys/fs/cgroup";
/// The period of all limits, in microseconds; short, so that nobody is held back for long at a time.
const PERIOD: u32 = 20_000;
/// Time for the processes of a host to be in its group.
const IN_WITHIN: Duration = Duration::from_secs(10);
/// Time for the processes of a host to be gone from its group.
const GONE_WITHIN: Duration = Duration::from_secs(10);

/// The groups of one host, in each hierarchy that there is. They are removed with it, so it has to outlive the host.
#[derive(Debug)]
pub struct Limit {
    folders: Vec<PathBuf>,
}

fn write(folder: &Path, file: &str, text: &str) -> Result<()> {
    let path = folder.join(file);
    fs::write(&path, text).with_context(|| format!("{}: {text}", path.display()))
}

/// Why hosts cannot be limited on this machine; `None` when they can.
pub fn lacks() -> Option<String> {
    let here = hierarchies().map(|all| {
        all.iter()
            .all(|root| nix::unistd::access(root, nix::unistd::AccessFlags::W_OK).is_ok())
    });
    (here != Some(true))
        .then(|| format!("no control groups for processors that can be written below {ROOT}"))
}

fn hierarchies() -> Option<Vec<PathBuf>> {
    hierarchies_of(&["cpu", "cpuacct"])
}

/// Those in which groups have the first of these controllers; in the first version of control groups they come together.
fn hierarchies_of(controllers: &[&str]) -> Option<Vec<PathBuf>> {
    let v1: Vec<PathBuf> = controllers
        .iter()
        .map(|name| Path::new(ROOT).join(name))
        .collect();
    if v1.iter().all(|root| root.join("cgroup.procs").exists()) {
        return Some(v1);
    }
    let there = fs::read_to_string(Path::new(ROOT).join("cgroup.subtree_control")).ok()?;
    there
        .split_whitespace()
        .any(|name| name == controllers[0])
        .then(|| vec![PathBuf::from(ROOT)])
}

/// Why the memory of hosts cannot be limited on this machine; `None` when it can.
pub fn lacks_memory() -> Option<String> {
    let writable =
        |root: &PathBuf| nix::unistd::access(root, nix::unistd::AccessFlags::W_OK).is_ok();
    let here = hierarchies_of(&["memory"]).is_some_and(|all| all.iter().all(writable));
    (!here).then(|| format!("no control groups for memory that can be written below {ROOT}"))
}

/// A group that limits the memory of one host. It is removed with it, so it has to outlive the host.
#[derive(Debug)]
pub struct MemoryLimit(Limit);

impl MemoryLimit {
    /// A group for a host, without a limit yet and without the host's processes.
    ///
    /// # Errors
    /// [`lacks_memory`].
    pub fn new(host: &Host) -> Result<MemoryLimit> {
        let Some(roots) = hierarchies_of(&["memory"]) else {
            bail!("{}", lacks_memory().unwrap_or_default())
        };
        Limit::below(&roots, host).map(MemoryLimit)
    }

    /// As [`Limit::take_in`].
    ///
    /// # Errors
    /// See there.
    pub fn take_in(&self, host: &Host) -> Result<()> {
        self.0.take_in(host)
    }

    /// Leaves the host so many bytes more than it has now.
    ///
    /// # Errors
    /// The kernel's.
    pub fn leave(&self, bytes: u64) -> Result<()> {
        let (used, limit) = self.files();
        let used: u64 = fs::read_to_string(self.0.folders[0].join(used))?
            .trim()
            .parse()?;
        write(&self.0.folders[0], limit, &(used + bytes).to_string())
    }

    /// Leaves the host all memory from now on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn lift(&self) -> Result<()> {
        let (_, limit) = self.files();
        write(
            &self.0.folders[0],
            limit,
            if limit == "memory.max" { "max" } else { "-1" },
        )
    }

    fn files(&self) -> (&'static str, &'static str) {
        match self.0.folders[0].join("memory.max").exists() {
            true => ("memory.current", "memory.max"),
            false => ("memory.usage_in_bytes", "memory.limit_in_bytes"),
        }
    }
}

impl Limit {
    /// A group for a host, without a limit yet and without the host's processes.
    ///
    /// # Errors
    /// [`lacks`].
    pub fn new(host: &Host) -> Result<Limit> {
        let Some(roots) = hierarchies() else {
            bail!("{}", lacks().unwrap_or_default())
        };
        Limit::below(&roots, host)
    }

    fn below(roots: &[PathBuf], host: &Host) -> Result<Limit> {
        let name = format!("sempa-testbed-{}-{}", std::process::id(), host.init());
        let limit = Limit {
            folders: roots.iter().map(|root| root.join(&name)).collect(),
        };
        for folder in &limit.folders {
            fs::create_dir(folder).with_context(|| folder.display().to_string())?;
        }
        Ok(limit)
    }

    /// Takes in all processes that the host has; what they start later is in the group, too.
    ///
    /// # Errors
    /// The kernel's; some process stays outside.
    pub fn take_in(&self, host: &Host) -> Result<()> {
        eventually(IN_WITHIN, || {
            let outside = || {
                host.processes()
                    .into_iter()
                    .filter(|(pid, _)| !self.holds(*pid).unwrap_or(false))
            };
            let all = std::iter::once(host.init()).chain(outside().map(|(pid, _)| pid));
            for (pid, folder) in
                all.flat_map(|pid| self.folders.iter().map(move |folder| (pid, folder)))
            {
                // It may have ended meanwhile.
                let _ = fs::write(folder.join("cgroup.procs"), pid.to_string());
            }
            // Who was starting a process while it was taken in may have started it outside.
            outside().next().map_or(Ok(()), |(pid, line)| {
                Err(format!("{pid} {line} is not in the group"))
            })
        })
    }

    /// True when this process, as the real machine numbers it, is in the group.
    ///
    /// # Errors
    /// The kernel's.
    pub fn holds(&self, pid: u32) -> Result<bool> {
        let processes = fs::read_to_string(self.folders[0].join("cgroup.procs"))?;
        Ok(processes.lines().any(|line| line == pid.to_string()))
    }

    /// Leaves the host this share of one processor from now on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn set(&self, share: f64) -> Result<()> {
        // The kernel takes no less than a millisecond.
        self.quota(&(share * f64::from(PERIOD)).round().max(1000.0).to_string())
    }

    /// Leaves the host all processors from now on.
    ///
    /// # Errors
    /// The kernel's.
    pub fn lift(&self) -> Result<()> {
        self.quota(if self.folders[0].join("cpu.max").exists() {
            "max"
        } else {
            "-1"
        })
    }

    fn quota(&self, quota: &str) -> Result<()> {
        let folder = &self.folders[0];
        if folder.join("cpu.max").exists() {
            return write(folder, "cpu.max", &format!("{quota} {PERIOD}"));
        }
        write(folder, "cpu.cfs_period_us", &PERIOD.to_string())?;
        write(folder, "cpu.cfs_quota_us", quota)
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        for folder in &self.folders {
            let _ = eventually(GONE_WITHIN, || {
                fs::remove_dir(folder).map_err(|error| error.to_string())
            });
        }
    }
}
