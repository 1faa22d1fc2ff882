//! Limits of processors, so that hosts of one machine are unequal: a control group for each host that wants one.

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
    let here = hierarchies()
        .map(|all| all.iter().all(|root| nix::unistd::access(root, nix::unistd::AccessFlags::W_OK).is_ok()));
    (here != Some(true)).then(|| format!("no control groups for processors that can be written below {ROOT}"))
}

fn hierarchies() -> Option<Vec<PathBuf>> {
    let v1: Vec<PathBuf> = ["cpu", "cpuacct"].map(|name| Path::new(ROOT).join(name)).to_vec();
    if v1.iter().all(|root| root.join("cgroup.procs").exists()) {
        return Some(v1);
    }
    let controllers = fs::read_to_string(Path::new(ROOT).join("cgroup.subtree_control")).ok()?;
    controllers.split_whitespace().any(|name| name == "cpu").then(|| vec![PathBuf::from(ROOT)])
}

impl Limit {
    /// A group for a host, without a limit yet and without the host's processes.
    ///
    /// # Errors
    /// [`lacks`].
    pub fn new(host: &Host) -> Result<Limit> {
        let Some(roots) = hierarchies() else { bail!("{}", lacks().unwrap_or_default()) };
        let name = format!("sempa-testbed-{}-{}", std::process::id(), host.init());
        let limit = Limit { folders: roots.iter().map(|root| root.join(&name)).collect() };
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
            let outside = || host.processes().into_iter().filter(|(pid, _)| !self.holds(*pid).unwrap_or(false));
            let all = std::iter::once(host.init()).chain(outside().map(|(pid, _)| pid));
            for (pid, folder) in all.flat_map(|pid| self.folders.iter().map(move |folder| (pid, folder))) {
                // It may have ended meanwhile.
                let _ = fs::write(folder.join("cgroup.procs"), pid.to_string());
            }
            // Who was starting a process while it was taken in may have started it outside.
            outside().next().map_or(Ok(()), |(pid, line)| Err(format!("{pid} {line} is not in the group")))
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
        self.quota(if self.folders[0].join("cpu.max").exists() { "max" } else { "-1" })
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
            let _ = eventually(GONE_WITHIN, || fs::remove_dir(folder).map_err(|error| error.to_string()));
        }
    }
}
