//! The first processes of a testbed host, which the program `sempa-host` runs.
//!
//! Each host has two first processes. The outer process makes the namespaces and waits. The inner
//! process is process 1 of the host: it mounts file systems, reports that the host is ready, and
//! reaps orphans. When the standard input of the inner process closes, it ends, and the kernel
//! kills all processes of the host.

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

/// Folders that are private to each host: path and mode.
const PRIVATE_FOLDERS: [(&str, u32); 5] = [
    ("/tmp", 0o1777),
    ("/run", 0o755),
    ("/dev/shm", 0o1777),
    ("/var/log", 0o755),
    ("/var/tmp", 0o1777),
];

/// The description of one host. The first processes read it from a file.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct HostPlan {
    pub name: String,
    /// Folders of the machine that stay visible although a private folder covers them: path on the
    /// machine, and path in the host.
    #[serde(rename = "keep")]
    pub visible_folders: Vec<(PathBuf, PathBuf)>,
    /// Files that are mounted over other files: path of the file with the content, and path in the
    /// host.
    #[serde(rename = "over")]
    pub replaced_files: Vec<(PathBuf, PathBuf)>,
    /// Folder that this host's outer process removes when the host has ended. Only one host of a
    /// testbed has such a folder.
    pub remove_at_end: Option<PathBuf>,
}

/// Runs the outer process: makes the namespaces, starts process 1, and removes
/// [`HostPlan::remove_at_end`] when process 1 has ended. `plan_file` contains a [`HostPlan`] as
/// JSON.
///
/// # Errors
/// The kernel refuses a request, in most cases because of missing privileges.
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
        // Other hosts of the testbed may still write into the folder, so the removal is repeated.
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
    let mut child_signals = SigSet::empty();
    child_signals.add(Signal::SIGCHLD);
    child_signals.thread_block()?;
    // The outer process needs the machine's mounts to remove files, so only process 1 makes a new
    // mount namespace.
    unshare(CloneFlags::CLONE_NEWNS).context("new mount namespace")?;
    mount_file_systems(&plan)?;
    let loopback_status = Command::new("ip")
        .args(["link", "set", "lo", "up"])
        .status()?;
    if !loopback_status.success() {
        bail!("the loopback device does not come up");
    }
    print_line("ready")?;
    std::thread::spawn(|| {
        let mut input = Vec::new();
        let _ = std::io::stdin().read_to_end(&mut input);
        std::process::exit(0);
    });
    loop {
        while !matches!(
            waitpid(None, Some(WaitPidFlag::WNOHANG)),
            Err(_) | Ok(WaitStatus::StillAlive)
        ) {}
        child_signals.wait()?;
    }
}

fn print_line(line: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{line}")?;
    Ok(out.flush()?)
}

const NO_MOUNT_ARG: Option<&str> = None;

fn mount_file_systems(plan: &HostPlan) -> Result<()> {
    mount(
        NO_MOUNT_ARG,
        "/",
        NO_MOUNT_ARG,
        MsFlags::MS_REC | MsFlags::MS_PRIVATE,
        NO_MOUNT_ARG,
    )
    .context("private mounts")?;
    set_root_to_namespace_root()?;
    mount(
        Some("proc"),
        "/proc",
        Some("proc"),
        MsFlags::empty(),
        NO_MOUNT_ARG,
    )
    .context("/proc")?;
    let visible_folders: Vec<(File, &PathBuf)> = plan
        .visible_folders
        .iter()
        .filter(|(_, target)| {
            PRIVATE_FOLDERS
                .iter()
                .any(|(private_folder, _)| target.starts_with(private_folder))
        })
        .map(|(folder, target)| {
            Ok((
                File::open(folder).with_context(|| folder.display().to_string())?,
                target,
            ))
        })
        .collect::<Result<_>>()?;
    let replacing_files: Vec<(File, &PathBuf)> = plan
        .replaced_files
        .iter()
        .map(|(content, target)| Ok((File::open(content)?, target)))
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
    let devpts_options = "newinstance,gid=5,mode=620,ptmxmode=666";
    mount(
        Some("devpts"),
        "/dev/pts",
        Some("devpts"),
        MsFlags::empty(),
        Some(devpts_options),
    )
    .context("/dev/pts")?;
    for (source, path) in &visible_folders {
        fs::create_dir_all(path)?;
        bind_mount(source, path)?;
    }
    for (source, target) in &replacing_files {
        bind_mount(source, target)?;
    }
    fs::create_dir("/run/sshd")?;
    for file in [
        "/run/utmp",
        "/var/log/wtmp",
        "/var/log/btmp",
        "/var/log/lastlog",
    ] {
        File::create(file)?;
        fs::set_permissions(file, fs::Permissions::from_mode(0o664))?;
    }
    Ok(())
}

fn bind_mount(source_file: &File, target: &Path) -> Result<()> {
    let source_path = format!("/proc/self/fd/{}", source_file.as_raw_fd());
    mount(
        Some(source_path.as_str()),
        target,
        NO_MOUNT_ARG,
        MsFlags::MS_BIND | MsFlags::MS_REC,
        NO_MOUNT_ARG,
    )
    .with_context(|| format!("{} over {}", source_path, target.display()))
}

/// Makes the root of this process the root of its mount namespace. In a chroot the two roots are
/// different: a process that enters the namespace would be outside of the chroot, and CRIU would
/// not find the parent of a mount.
fn set_root_to_namespace_root() -> Result<()> {
    let root_id = || fs::metadata("/").map(|metadata| (metadata.dev(), metadata.ino()));
    // When a process enters a mount namespace, even its own, the kernel changes the root of the
    // process to the root of the namespace.
    let own_namespace = File::open("/proc/self/ns/mnt")?;
    let enter_own_namespace =
        || setns(&own_namespace, CloneFlags::CLONE_NEWNS).context("own mount namespace");
    let (old_root, chroot_folder) = (root_id()?, File::open("/")?);
    enter_own_namespace()?;
    if root_id()? != old_root {
        nix::unistd::fchdir(&chroot_folder)?;
        nix::unistd::chroot(".")?;
        mount(
            Some("/"),
            "/mnt",
            NO_MOUNT_ARG,
            MsFlags::MS_BIND | MsFlags::MS_REC,
            NO_MOUNT_ARG,
        )
        .context("root onto /mnt")?;
        let mounted_root = File::open("/mnt")?;
        enter_own_namespace()?;
        nix::unistd::fchdir(&mounted_root)?;
        nix::unistd::pivot_root(".", ".").context("pivot_root")?;
        umount2(".", MntFlags::MNT_DETACH).context("the root outside")?;
    }
    Ok(std::env::set_current_dir("/")?)
}
