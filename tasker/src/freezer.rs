//! Freezes tasks by control groups (version 2).
//!
//! All processes of a control group stop at once, including processes that are being created, and a
//! program cannot detect the freeze by a signal. A task is created inside its group, so all its
//! processes are members.
//!
//! If only version 1 is mounted, the tasker mounts version 2 privately; every kernel with pidfds,
//! which the tasker needs, supports version 2. The freezer of version 1 is not used: its frozen
//! processes cannot be killed, so the tasks of a tasker that dies would remain forever. In version
//! 2 frozen processes can be killed like others.

use crate::clone_into_cgroup;
use crate::namespace_init;
use crate::sys::{self, Child};
use nix::fcntl::{Flock, FlockArg};
use nix::sched::{CloneFlags, unshare};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use sempa_proto::cgroup;
use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Prefix of the name of the directory that a tasker creates below its own control group for the
/// groups of its tasks.
const CGROUP_DIR_PREFIX: &str = "sempa-";
/// Environment variable that disables control groups if its value is `off`.
const FREEZER_VARIABLE: &str = "SEMPA_FREEZER";
/// Time limit for the processes of the probe to freeze.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Poll interval of the probe.
const PROBE_INTERVAL: Duration = Duration::from_micros(100);
/// Maximum number of attempts to create the tasker's directory. Another tasker that removes stale
/// directories may remove the new directory before it is locked.
const CREATE_DIR_ATTEMPTS_MAX: usize = 3;

/// The directory of this tasker's control groups. Dropping this value removes all the groups.
#[derive(Debug)]
pub(crate) struct Freezer {
    /// Lock of the directory while the tasker lives. Other taskers remove directories that are not
    /// locked.
    _folder: Flock<File>,
    path: PathBuf,
    /// A private mount of version 2, if one was necessary. `path` then starts at this mount.
    _mount: Option<OwnedFd>,
    /// Number of groups created so far; the name of the next group.
    created_groups: u64,
    /// Paths of dropped groups that could not be removed yet because they contained processes.
    unremoved_groups: Rc<RefCell<Vec<PathBuf>>>,
}

/// A control group for the processes of a task. It is removed when this value is dropped, or later
/// if it still contains processes then.
#[derive(Debug)]
pub(crate) struct ControlGroup {
    path: PathBuf,
    frozen: Cell<bool>,
    unremoved_groups: Rc<RefCell<Vec<PathBuf>>>,
}

/// Why paused tasks cannot be frozen on this host; they are stopped by signals. No control group
/// remains.
#[derive(Debug, Error)]
pub(crate) enum FreezerUnavailable {
    #[error("the tasker has no privileges")]
    NoPrivileges,
    #[error("{}=off", FREEZER_VARIABLE)]
    SwitchedOff,
    #[error("not done on this processor")]
    UnsupportedProcessor,
    #[error("the tasker's own control group of version 2 is not to be seen here")]
    OwnGroupNotVisible,
    #[error(
        "control groups of version 2 are not mounted here, and the tasker cannot do it for itself: {0}"
    )]
    Mount(#[source] io::Error),
    #[error("no control group can be made in {}: {source}", own.display())]
    CreateGroup { own: PathBuf, source: io::Error },
    /// The group was created and removed again.
    #[error("the freezer of control groups does not work in {}: {source}", own.display())]
    Probe { own: PathBuf, source: io::Error },
}

impl Freezer {
    /// Creates the tasker's directory, and checks that a process which is created in a group can be
    /// frozen and killed.
    ///
    /// # Errors
    /// Freezing is not possible on this host.
    pub(crate) fn new() -> Result<Freezer, FreezerUnavailable> {
        if std::env::var_os(FREEZER_VARIABLE).is_some_and(|value| value == "off") {
            return Err(FreezerUnavailable::SwitchedOff);
        }
        if !clone_into_cgroup::CLONE_INTO_CGROUP_SUPPORTED {
            return Err(FreezerUnavailable::UnsupportedProcessor);
        }
        let of_self = |name: &str| fs::read(Path::new("/proc/self").join(name)).unwrap_or_default();
        let mounts = of_self("mountinfo");
        if cgroup::find_mount_point(&mounts, None).is_some() {
            // Use the existing mount as the administrator has configured it.
            let own = cgroup::group_dir(&mounts, &of_self("cgroup"), None)
                .ok_or(FreezerUnavailable::OwnGroupNotVisible)?;
            return Freezer::create_in(&own, None);
        }
        let mount = mount_own_group().map_err(FreezerUnavailable::Mount)?;
        let own = Path::new("/proc/self/fd").join(mount.as_raw_fd().to_string());
        Freezer::create_in(&own, Some(mount))
    }

    /// Creates the tasker's directory in the control group `own`, and probes freezing.
    fn create_in(own: &Path, mount: Option<OwnedFd>) -> Result<Freezer, FreezerUnavailable> {
        remove_stale_dirs(own);
        let (path, folder) = (0..CREATE_DIR_ATTEMPTS_MAX)
            .find_map(|_| create_locked_dir(own).transpose())
            .unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
            .map_err(|source| FreezerUnavailable::CreateGroup {
                own: own.into(),
                source,
            })?;
        let mut freezer = Freezer {
            _folder: folder,
            path,
            _mount: mount,
            created_groups: 0,
            unremoved_groups: Rc::default(),
        };
        freezer
            .probe()
            .map_err(|source| FreezerUnavailable::Probe {
                own: own.into(),
                source,
            })?;
        Ok(freezer)
    }

    /// Creates an empty control group.
    ///
    /// # Errors
    /// The system's error, for example because the number of groups is limited.
    pub(crate) fn create_group(&mut self) -> io::Result<ControlGroup> {
        // Groups that still contain processes remain in the list.
        self.unremoved_groups
            .borrow_mut()
            .retain(|path| fs::remove_dir(path).is_err());
        self.created_groups += 1;
        let path = self.path.join(self.created_groups.to_string());
        fs::create_dir(&path)?;
        Ok(ControlGroup {
            path,
            frozen: Cell::new(false),
            unremoved_groups: Rc::clone(&self.unremoved_groups),
        })
    }

    fn probe(&mut self) -> io::Result<()> {
        let group = self.create_group()?;
        let (theirs, _ours) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let probe_process =
            namespace_init::start_init(theirs.as_fd(), Some(group.open()?.as_fd()))?;
        let frozen = group.freeze().and_then(|()| group.wait_until_frozen());
        kill_and_reap(&probe_process);
        frozen
    }
}

/// Kills a process, even if it is frozen, and waits until it has ended.
fn kill_and_reap(process: &Child) {
    sys::kill_pidfd(process.pidfd.as_fd());
    // The process is a child of the tasker, and only this function reaps it.
    let _ = sys::wait_and_reap(process.pid);
}

impl Drop for Freezer {
    fn drop(&mut self) {
        remove_groups(&self.path);
    }
}

impl ControlGroup {
    /// Opens the group's directory, as needed to create a process in the group. The caller should
    /// close the descriptor soon: a host has thousands of tasks and a limit on descriptors.
    ///
    /// # Errors
    /// The group was removed by another process.
    pub(crate) fn open(&self) -> io::Result<OwnedFd> {
        Ok(File::open(&self.path)?.into())
    }

    /// Returns the PIDs of the processes in the group.
    ///
    /// # Errors
    /// The group was removed by another process.
    pub(crate) fn members(&self) -> io::Result<Vec<i32>> {
        let text = fs::read_to_string(self.procs_file())?;
        // The kernel lists processes outside this PID namespace as 0.
        Ok(text
            .lines()
            .filter_map(|line| line.parse().ok())
            .filter(|pid| *pid > 0)
            .collect())
    }

    /// Returns the path of the file to which the PIDs of joining processes must be written.
    pub(crate) fn procs_file(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Starts to freeze all processes of the group. [`is_fully_frozen`](Self::is_fully_frozen)
    /// shows when the freeze is complete.
    ///
    /// # Errors
    /// The group was removed by another process.
    pub(crate) fn freeze(&self) -> io::Result<()> {
        self.write_freeze("1")?;
        self.frozen.set(true);
        Ok(())
    }

    /// Thaws all processes of the group. Programs cannot detect the thaw.
    pub(crate) fn thaw(&self) {
        if self.frozen.replace(false) {
            // Cannot fail: a group that contains frozen processes cannot be removed.
            let _ = self.write_freeze("0");
        }
    }

    /// True after [`ControlGroup::freeze`], until the group is thawed.
    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen.get()
    }

    /// True if all processes of the group are frozen.
    pub(crate) fn is_fully_frozen(&self) -> bool {
        fs::read_to_string(self.path.join("cgroup.events"))
            .is_ok_and(|text| text.lines().any(|line| line == "frozen 1"))
    }

    fn write_freeze(&self, value: &str) -> io::Result<()> {
        fs::write(self.path.join("cgroup.freeze"), value)
    }

    fn wait_until_frozen(&self) -> io::Result<()> {
        let until = Instant::now() + PROBE_TIMEOUT;
        while !self.is_fully_frozen() {
            if Instant::now() >= until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(PROBE_INTERVAL);
        }
        Ok(())
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        self.thaw();
        if fs::remove_dir(&self.path).is_err() {
            self.unremoved_groups
                .borrow_mut()
                .push(std::mem::take(&mut self.path));
        }
    }
}

/// Adds stopped processes to a control group. `procs_file` is the group's file `cgroup.procs`.
/// Adding the first process takes milliseconds, because the kernel waits for all processors.
///
/// # Errors
/// An existing process could not be added.
pub(crate) fn add_to_group(procs_file: &Path, pids: &[i32]) -> io::Result<()> {
    for pid in pids {
        match fs::write(procs_file, pid.to_string()) {
            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Mounts the tasker's own control group of version 2 without a mount point: the mount is reachable
/// only through the returned descriptor, and disappears when it is closed.
///
/// The thread that mounts enters a new cgroup namespace: in the initial cgroup namespace a mount
/// would set options such as `nsdelegate` for the whole machine.
fn mount_own_group() -> io::Result<OwnedFd> {
    let mounts = || {
        unshare(CloneFlags::CLONE_NEWCGROUP)?;
        let kind = fsopen("cgroup2", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&kind)?;
        Ok(fsmount(
            &kind,
            FsMountFlags::FSMOUNT_CLOEXEC,
            MountAttrFlags::empty(),
        )?)
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, mounts)?;
        thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread that mounts them has ended")))
    })
}

/// Creates a new directory for the groups of this tasker in `own`, and locks it. Returns `None` if
/// another tasker has removed it as stale.
fn create_locked_dir(own: &Path) -> io::Result<Option<(PathBuf, Flock<File>)>> {
    let path = nix::unistd::mkdtemp(&own.join(format!("{CGROUP_DIR_PREFIX}XXXXXX")))?;
    let Ok(file) = File::open(&path) else {
        return Ok(None);
    };
    let Ok(folder) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else {
        return Ok(None);
    };
    Ok(path.exists().then_some((path, folder)))
}

/// Removes the directories of taskers that were killed. Their tasks died with them. Groups that
/// still contain ending processes are removed by the next tasker.
fn remove_stale_dirs(own: &Path) {
    for entry in fs::read_dir(own).into_iter().flatten().flatten() {
        let path = entry.path();
        if !entry
            .file_name()
            .to_string_lossy()
            .starts_with(CGROUP_DIR_PREFIX)
        {
            continue;
        }
        let locked =
            File::open(&path).map(|file| Flock::lock(file, FlockArg::LockExclusiveNonblock));
        if let Ok(Ok(_ours_now)) = locked {
            remove_groups(&path);
        }
    }
}

/// Removes the control groups of a tasker, and its directory.
fn remove_groups(folder: &Path) {
    let is_folder = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    for group in fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter(is_folder)
    {
        // A group that contains processes remains, and so does the directory.
        let _ = fs::remove_dir(group.path());
    }
    let _ = fs::remove_dir(folder);
}
