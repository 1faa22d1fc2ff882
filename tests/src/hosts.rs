//! The first processes of a testbed host; run by the program `sempa-host`.
//!
//! Each host has two. The outer one makes the namespaces and waits. The inner one is process 1 of
//! the host: it mounts file systems, reports that the host is ready, and reaps orphans. It ends
//! when standard input closes, and the kernel then kills all processes of the host.

use anyhow::{Context, Result, bail};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folders that are private to each host, with their modes.
const PRIVATE_FOLDERS: [(&str, u32); 5] = [
    ("/tmp", 0o1777),
    ("/run", 0o755),
    ("/dev/shm", 0o1777),
    ("/var/log", 0o755),
    ("/var/tmp", 0o1777),
];

/// The description of one host, which the first processes read from a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostPlan {
    pub name: String,
    /// Folders of the machine that stay visible although a private folder covers them, as (folder,
    /// path in the host).
    #[serde(rename = "keep")]
    pub visible_folders: Vec<(PathBuf, PathBuf)>,
    /// Files that are mounted over other files, as (file with the content, path in the host).
    #[serde(rename = "over")]
    pub replaced_files: Vec<(PathBuf, PathBuf)>,
    /// Folder that this host removes when it has ended. Only one host of a testbed has such a
    /// folder.
    pub remove_at_end: Option<PathBuf>,
}

/// Runs the outer process: makes the namespaces, starts process 1, and removes
/// [`HostPlan::remove_at_end`] when process 1 has ended. `plan_file` contains a [`HostPlan`] as
/// JSON.
///
/// # Errors
/// The kernel refuses, mostly for lack of privileges.
pub fn run_outer_process(plan_file: &Path) -> Result<()> {
    let plan: HostPlan = serde_json::from_slice(&fs::read(plan_file)?)?;
    unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWUTS | CloneFlags::CLONE_NEWPID)
        .context("new namespaces")?;
    nix::unistd::sethostname(&plan.name).context("host name")?;
    let mut init = Command::new(std::env::current_exe()?)
        .arg("init")
        .arg(plan_file)
        .spawn()?;
    print_line(&format!("pid {}", init.id()))?;
    init.wait()?;
    if let Some(folder) = &plan.remove_at_end {
        // Other hosts may still write into the folder.
        let _ = crate::run::wait_for(
            std::time::Duration::from_secs(5),
            || match fs::remove_dir_all(folder) {
                Err(error) if folder.exists() => Err(error.to_string()),
                _ => Ok(()),
            },
        );
    }
    Ok(())
}

/// Runs process 1 of the host. Returns only after an error.
pub fn run_init_process(plan_file: &Path) -> Result<()> {
    let plan: HostPlan = serde_json::from_slice(&fs::read(plan_file)?)?;
    let mut children = SigSet::empty();
    children.add(Signal::SIGCHLD);
    children.thread_block()?;
    // The outer process needs the machine's mounts to remove files, so the new mount namespace is
    // made only here.
    unshare(CloneFlags::CLONE_NEWNS).context("new mount namespace")?;
    mount_all(&plan)?;
    let up = Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .status()?;
    if !up.success() {
        bail!("the loopback device does not come up");
    }
    print_line("ready")?;
    std::thread::spawn(|| {
        let mut rest = Vec::new();
        let _ = std::io::stdin().read_to_end(&mut rest);
        std::process::exit(0);
    });
    loop {
        while !matches!(
            waitpid(None, Some(WaitPidFlag::WNOHANG)),
            Err(_) | Ok(WaitStatus::StillAlive)
        ) {}
        children.wait()?;
    }
}

fn print_line(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

const NO_MOUNT_ARG: Option<&str> = None;

fn mount_all(plan: &HostPlan) -> Result<()> {
    mount(
        NO_MOUNT_ARG,
        "/",
        NO_MOUNT_ARG,
        MsFlags::MS_REC | MsFlags::MS_PRIVATE,
        NO_MOUNT_ARG,
    )
    .context("private mounts")?;
    leave_chroot()?;
    mount(
        Some("proc"),
        "/proc",
        Some("proc"),
        MsFlags::empty(),
        NO_MOUNT_ARG,
    )
    .context("/proc")?;
    let keep: Vec<(File, &PathBuf)> = plan
        .visible_folders
        .iter()
        .filter(|(_, place)| {
            PRIVATE_FOLDERS
                .iter()
                .any(|(covered, _)| place.starts_with(covered))
        })
        .map(|(folder, place)| {
            Ok((
                File::open(folder).with_context(|| folder.display().to_string())?,
                place,
            ))
        })
        .collect::<Result<_>>()?;
    let over: Vec<(File, &PathBuf)> = plan
        .replaced_files
        .iter()
        .map(|(content, place)| Ok((File::open(content)?, place)))
        .collect::<Result<_>>()?;
    for (path, mode) in PRIVATE_FOLDERS {
        let options = format!("mode={mode:o}");
        mount(
            Some("tmpfs"),
            path,
            Some("tmpfs"),
            MsFlags::empty(),
            Some(options.as_str()),
        )
        .context(path)?;
    }
    let terminals = "newinstance,gid=5,mode=620,ptmxmode=666";
    mount(
        Some("devpts"),
        "/dev/pts",
        Some("devpts"),
        MsFlags::empty(),
        Some(terminals),
    )
    .context("/dev/pts")?;
    for (open, path) in &keep {
        fs::create_dir_all(path)?;
        bind(open, path)?;
    }
    for (open, place) in &over {
        bind(open, place)?;
    }
    fs::create_dir("/run/sshd")?;
    for records in [
        "/run/utmp",
        "/var/log/wtmp",
        "/var/log/btmp",
        "/var/log/lastlog",
    ] {
        File::create(records)?;
        fs::set_permissions(records, fs::Permissions::from_mode(0o664))?;
    }
    Ok(())
}

fn bind(open: &File, place: &Path) -> Result<()> {
    let source = format!("/proc/self/fd/{}", open.as_raw_fd());
    mount(
        Some(source.as_str()),
        place,
        NO_MOUNT_ARG,
        MsFlags::MS_BIND | MsFlags::MS_REC,
        NO_MOUNT_ARG,
    )
    .with_context(|| format!("{} over {}", source, place.display()))
}

/// Makes the root of this process the root of its mount namespace. In a chroot the two differ: a
/// process that enters the namespace would be outside of the chroot, and CRIU would find no parent
/// of a mount.
fn leave_chroot() -> Result<()> {
    let root = || fs::metadata("/").map(|meta| (meta.dev(), meta.ino()));
    // Entering a mount namespace, even one's own, changes the root of the process to that of the
    // namespace.
    let own = File::open("/proc/self/ns/mnt")?;
    let to_the_top = || setns(&own, CloneFlags::CLONE_NEWNS).context("own mount namespace");
    let (seen, inside) = (root()?, File::open("/")?);
    to_the_top()?;
    if root()? != seen {
        nix::unistd::fchdir(&inside)?;
        nix::unistd::chroot(".")?;
        mount(
            Some("/"),
            "/mnt",
            NO_MOUNT_ARG,
            MsFlags::MS_BIND | MsFlags::MS_REC,
            NO_MOUNT_ARG,
        )
        .context("root onto /mnt")?;
        let copy = File::open("/mnt")?;
        to_the_top()?;
        nix::unistd::fchdir(&copy)?;
        nix::unistd::pivot_root(".", ".").context("pivot_root")?;
        umount2(".", MntFlags::MNT_DETACH).context("the root outside")?;
    }
    Ok(std::env::set_current_dir("/")?)
}
