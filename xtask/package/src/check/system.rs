//! A fresh system of Debian in a folder, with namespaces of its own for processes and mounts.

use crate::process::{capture, run};
use crate::remove_folder;
use anyhow::{Context, Result, bail};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Name of the ordinary user of a system.
pub(super) const USER: &str = "alice";
/// The last release of Debian that has PVM and programs for it. Machines that were upgraded from it
/// still have them.
const PVM_SUITE: &str = "bookworm";
/// Folder of a system that apt uses as a source of packages.
pub(super) const SOURCE_FOLDER: &str = "srv/sempa";
/// Time for a command in a system. A download over a slow line takes minutes.
const COMMAND_TIMEOUT_S: u32 = 900;
/// Time for the namespaces of a system to exist.
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A running system. Its processes end, and its folder is removed, when it is dropped.
pub(super) struct System {
    root: PathBuf,
    /// The program `unshare`, which ends all processes of the system when it ends.
    holder: Child,
    /// First process of the system, as this machine numbers it.
    init_pid: u32,
}

impl System {
    /// Copies a fresh system to a folder and starts it. The system is made, with the mirror of this
    /// machine, if the folder `cache` has none.
    ///
    /// # Errors
    /// Root's privileges, debootstrap or the network are missing.
    pub(super) fn start(suite: &str, cache: &Path, name: &str) -> Result<Self> {
        let fresh_system = ensure_fresh_system(suite, cache)?;
        let root = cache.join(format!("{suite}-{name}"));
        remove_folder(&root)?;
        run(Command::new("cp")
            .args(["-a", "--reflink=auto"])
            .arg(&fresh_system)
            .arg(&root))?;
        let mounts = "set -e; mount --rbind /dev \"$0/dev\"; mount --rbind /sys \"$0/sys\"; \
                      mount -t proc proc \"$0/proc\"; mount -t tmpfs tmpfs \"$0/run\"; \
                      exec chroot \"$0\" sleep infinity";
        let mut holder = Command::new("unshare")
            .args([
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                mounts,
            ])
            .arg(&root)
            .stdin(Stdio::null())
            .spawn()
            .context("unshare cannot be executed")?;
        let init_pid = wait_for_init(&mut holder, &root)?;
        let system = Self {
            root,
            holder,
            init_pid,
        };
        fs::copy("/etc/resolv.conf", system.root.join("etc/resolv.conf"))?;
        let host_name = capture(&mut Command::new("hostname"))?;
        let hosts = format!("127.0.0.1 localhost\n127.0.1.1 {host_name}");
        fs::write(system.root.join("etc/hosts"), hosts)?;
        if suite != PVM_SUITE {
            let source = format!("deb {} {PVM_SUITE} main\n", debian_mirror()?);
            fs::write(system.path("etc/apt/sources.list.d/pvm.list"), source)?;
        }
        system.run("apt-get -qq update")?;
        system.run("useradd --create-home --shell /bin/sh alice")?;
        Ok(system)
    }

    pub(super) fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Runs a command of the shell as root and returns its output.
    ///
    /// # Errors
    /// The command fails; the error contains its output.
    pub(super) fn run(&self, command: &str) -> Result<String> {
        self.run_as("root", "/root", command)
    }

    /// Runs a command of the shell as the ordinary user.
    ///
    /// # Errors
    /// The command fails; the error contains its output.
    pub(super) fn run_as_user(&self, command: &str) -> Result<String> {
        self.run_as(USER, "/home/alice", command)
    }

    fn run_as(&self, user: &str, home: &str, command: &str) -> Result<String> {
        let mut program = Command::new("timeout");
        program
            .arg(COMMAND_TIMEOUT_S.to_string())
            .args(["nsenter", "--mount", "--pid", "--root", "--wd"])
            .args(["--target", &self.init_pid.to_string()])
            .args(["env", "--ignore-environment"])
            .args(["PATH=/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL=C.UTF-8"])
            .args(["DEBIAN_FRONTEND=noninteractive"])
            .arg(format!("HOME={home}"))
            .arg(format!("USER={user}"))
            .args(["runuser", "-u", user, "--", "sh", "-c"])
            .arg(format!("cd {home} && {{ {command}\n}} 2>&1"));
        capture(&mut program).with_context(|| format!("as {user}: {command}"))
    }

    /// Lets apt find the packages of a folder of this machine, in addition to those that it knows.
    ///
    /// # Errors
    /// A package cannot be copied, or apt fails.
    pub(super) fn offer_packages(&self, packages: &Path) -> Result<()> {
        let folder = self.path(SOURCE_FOLDER);
        fs::create_dir_all(&folder)?;
        for entry in fs::read_dir(packages)? {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "deb") {
                fs::copy(&path, folder.join(path.file_name().unwrap_or_default()))?;
            }
        }
        let index = capture(
            Command::new("dpkg-scanpackages")
                .args(["--multiversion", "."])
                .current_dir(&folder),
        )?;
        fs::write(folder.join("Packages"), index)?;
        fs::write(
            self.path("etc/apt/sources.list.d/sempa.list"),
            format!("deb [trusted=yes] file:/{SOURCE_FOLDER} ./\n"),
        )?;
        self.run("apt-get -qq update")?;
        Ok(())
    }

    /// Installs packages with apt, without those that are only recommended.
    ///
    /// # Errors
    /// apt fails.
    pub(super) fn install(&self, packages: &str) -> Result<()> {
        self.run(&format!(
            "apt-get -qq --yes --no-install-recommends install {packages}"
        ))?;
        Ok(())
    }

    /// Returns the names of all installed packages.
    ///
    /// # Errors
    /// dpkg fails.
    pub(super) fn installed_packages(&self) -> Result<Vec<String>> {
        let text = self.run("dpkg-query -W -f '${db:Status-Status} ${Package}\\n'")?;
        Ok(text
            .lines()
            .filter_map(|line| line.strip_prefix("installed "))
            .map(str::to_string)
            .collect())
    }
}

impl Drop for System {
    fn drop(&mut self) {
        let _ = self.holder.kill();
        let _ = self.holder.wait();
        let _ = remove_folder(&self.root);
    }
}

/// Waits until the first process of a system has its root folder; returns the process's id.
fn wait_for_init(holder: &mut Child, root: &Path) -> Result<u32> {
    let holder_pid = holder.id();
    let children = format!("/proc/{holder_pid}/task/{holder_pid}/children");
    let start = Instant::now();
    loop {
        if let Some(status) = holder.try_wait()? {
            bail!(
                "the namespaces of {} cannot be made: {status}",
                root.display()
            );
        }
        let text = fs::read_to_string(&children).unwrap_or_default();
        if let Some(pid) = text
            .split_whitespace()
            .next()
            .and_then(|pid| pid.parse().ok())
        {
            let is_inside =
                fs::read_link(format!("/proc/{pid}/root")).is_ok_and(|path| path == root);
            if is_inside {
                return Ok(pid);
            }
        }
        if start.elapsed() > START_TIMEOUT {
            let _ = holder.kill();
            bail!("the system in {} does not start", root.display());
        }
        std::thread::yield_now();
    }
}

/// Returns the folder of a fresh system; makes it if necessary.
fn ensure_fresh_system(suite: &str, cache: &Path) -> Result<PathBuf> {
    let fresh_system = cache.join(suite);
    if fresh_system.exists() {
        return Ok(fresh_system);
    }
    fs::create_dir_all(cache)?;
    let unfinished = cache.join(format!("{suite}.unfinished"));
    remove_folder(&unfinished)?;
    let mirror = debian_mirror()?;
    println!("check: making a fresh system of {suite}");
    capture(
        Command::new("debootstrap")
            .args(["--variant=minbase", suite])
            .arg(&unfinished)
            .arg(&mirror),
    )?;
    fs::rename(&unfinished, &fresh_system)?;
    Ok(fresh_system)
}

/// Returns the mirror of Debian in apt's configuration of this machine.
fn debian_mirror() -> Result<String> {
    let targets = capture(Command::new("apt-get").args([
        "indextargets",
        "--format",
        "$(LABEL)\t$(COMPONENT)\t$(REPO_URI)",
        "Created-By: Packages",
    ]))?;
    targets
        .lines()
        .find_map(|line| line.strip_prefix("Debian\tmain\t"))
        .map(str::to_string)
        .context("apt's configuration names no mirror of Debian")
}
