//! Freezes tasks by control groups (version 2).
//!
//! All processes of a group stop at once, including those being created, and a program cannot
//! detect the freeze by a signal. A task is created inside its group, so none of its processes can
//! be outside.
//!
//! If only version 1 is mounted, the tasker mounts version 2 privately; every kernel with pidfds,
//! which the tasker needs, supports it. The freezer of version 1 is not used: its frozen processes
//! cannot be killed, so a tasker that dies would leave them behind forever. In version 2 they die
//! like others.

use crate::birth;
use crate::init;
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

/// Prefix of the name of a tasker's folder of groups, within its own group.
const FOLDER_NAME: &str = "sempa-";
/// Variable that disables control groups if it is `off`.
const SWITCH: &str = "SEMPA_FREEZER";
/// Time limit of the probe.
const TRIAL_ALLOWED: Duration = Duration::from_secs(2);
/// Poll interval of the probe.
const TRIAL_LOOK: Duration = Duration::from_micros(100);
/// Attempts to create the folder: another tasker that cleans up may take a new folder for a stale
/// one.
const FOLDER_TRIES: usize = 3;

/// The folder of this tasker's groups. Dropping it removes them.
#[derive(Debug)]
pub(crate) struct Freezer {
    /// Locked while the tasker lives: other taskers remove unlocked folders.
    _folder: Flock<File>,
    path: PathBuf,
    /// A private mount of version 2, if there is one; `path` leads through it.
    _mount: Option<OwnedFd>,
    made: u64,
    /// Dropped groups that could not be removed yet because processes were inside.
    given_up: Rc<RefCell<Vec<PathBuf>>>,
}

/// A control group for the processes of a task. It is removed when dropped, or later if processes
/// are still inside.
#[derive(Debug)]
pub(crate) struct ControlGroup {
    path: PathBuf,
    frozen: Cell<bool>,
    given_up: Rc<RefCell<Vec<PathBuf>>>,
}

impl Freezer {
    /// Creates the folder, and checks that a process created in a group can be frozen and killed.
    ///
    /// # Errors
    /// One sentence why freezing is not possible here.
    pub(crate) fn new() -> Result<Freezer, String> {
        if std::env::var_os(SWITCH).is_some_and(|value| value == "off") {
            return Err(format!("{SWITCH}=off"));
        }
        if !birth::KNOWN {
            return Err("not done on this processor".into());
        }
        let of_self = |name: &str| fs::read(Path::new("/proc/self").join(name)).unwrap_or_default();
        let mounts = of_self("mountinfo");
        if cgroup::mount_point(&mounts, None).is_some() {
            // An existing mount is used as the administrator has configured it.
            let own = cgroup::folder(&mounts, &of_self("cgroup"), None)
                .ok_or("the tasker's own control group of version 2 is not to be seen here")?;
            return Freezer::within(&own, None);
        }
        let mount = mount_own_group().map_err(|e| {
            format!("control groups of version 2 are not mounted here, and the tasker cannot do it for itself: {e}")
        })?;
        let own = Path::new("/proc/self/fd").join(mount.as_raw_fd().to_string());
        Freezer::within(&own, Some(mount))
    }

    /// Creates the folder within this group and probes it.
    fn within(own: &Path, mount: Option<OwnedFd>) -> Result<Freezer, String> {
        remove_left_behind(own);
        let (path, folder) = (0..FOLDER_TRIES)
            .find_map(|_| make_folder(own).transpose())
            .unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
            .map_err(|e| format!("no control group can be made in {}: {e}", own.display()))?;
        let mut freezer = Freezer {
            _folder: folder,
            path,
            _mount: mount,
            made: 0,
            given_up: Rc::default(),
        };
        freezer.trial().map_err(|e| {
            format!(
                "the freezer of control groups does not work in {}: {e}",
                own.display()
            )
        })?;
        Ok(freezer)
    }

    /// Creates an empty group.
    ///
    /// # Errors
    /// The system's error; there may be a limit on groups.
    pub(crate) fn group(&mut self) -> io::Result<ControlGroup> {
        // Groups that still have processes stay in the list.
        self.given_up
            .borrow_mut()
            .retain(|path| fs::remove_dir(path).is_err());
        self.made += 1;
        let path = self.path.join(self.made.to_string());
        fs::create_dir(&path)?;
        Ok(ControlGroup {
            path,
            frozen: Cell::new(false),
            given_up: Rc::clone(&self.given_up),
        })
    }

    fn trial(&mut self) -> io::Result<()> {
        let group = self.group()?;
        let (theirs, _ours) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let guinea_pig = init::start(theirs.as_fd(), Some(group.open()?.as_fd()))?;
        let frozen = group.freeze().and_then(|()| group.wait_still());
        end(&guinea_pig);
        frozen
    }
}

/// Kills a process, which may be frozen, and waits until it has ended.
fn end(process: &Child) {
    sys::kill_by(process.pidfd.as_fd());
    // A child of ours, reaped only here.
    let _ = sys::reap_wait(process.pid);
}

impl Drop for Freezer {
    fn drop(&mut self) {
        remove_groups(&self.path);
    }
}

impl ControlGroup {
    /// Opens the group's folder, in which a process can be created. Close it soon: a host has
    /// thousands of tasks and a limit on descriptors.
    ///
    /// # Errors
    /// The group was removed by another process.
    pub(crate) fn open(&self) -> io::Result<OwnedFd> {
        Ok(File::open(&self.path)?.into())
    }

    /// Returns the processes in the group.
    ///
    /// # Errors
    /// The group was removed by another process.
    pub(crate) fn members(&self) -> io::Result<Vec<i32>> {
        let text = fs::read_to_string(self.entrance())?;
        // The kernel lists processes outside this PID namespace as 0.
        Ok(text
            .lines()
            .filter_map(|line| line.parse().ok())
            .filter(|pid| *pid > 0)
            .collect())
    }

    /// Returns the file to which the ids of joining processes are written.
    pub(crate) fn entrance(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Starts to freeze all processes of the group.
    ///
    /// # Errors
    /// The group was removed by another process.
    pub(crate) fn freeze(&self) -> io::Result<()> {
        self.order("1")?;
        self.frozen.set(true);
        Ok(())
    }

    /// Thaws all processes. Programs do not notice that.
    pub(crate) fn thaw(&self) {
        if self.frozen.replace(false) {
            // Cannot fail: a group that contains frozen processes exists.
            let _ = self.order("0");
        }
    }

    /// True after [`ControlGroup::freeze`], until it is thawed.
    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen.get()
    }

    /// True if all processes of the group are frozen.
    pub(crate) fn is_still(&self) -> bool {
        fs::read_to_string(self.path.join("cgroup.events"))
            .is_ok_and(|text| text.lines().any(|line| line == "frozen 1"))
    }

    fn order(&self, word: &str) -> io::Result<()> {
        fs::write(self.path.join("cgroup.freeze"), word)
    }

    fn wait_still(&self) -> io::Result<()> {
        let until = Instant::now() + TRIAL_ALLOWED;
        while !self.is_still() {
            if Instant::now() >= until {
                return Err(io::ErrorKind::TimedOut.into());
            }
            std::thread::sleep(TRIAL_LOOK);
        }
        Ok(())
    }
}

impl Drop for ControlGroup {
    fn drop(&mut self) {
        self.thaw();
        if fs::remove_dir(&self.path).is_err() {
            self.given_up
                .borrow_mut()
                .push(std::mem::take(&mut self.path));
        }
    }
}

/// Adds stopped processes to the group with this `cgroup.procs` file. The first one takes
/// milliseconds, because the kernel waits for all processors.
///
/// # Errors
/// An existing process could not be added.
pub(crate) fn bring_in(entrance: &Path, pids: &[i32]) -> io::Result<()> {
    for pid in pids {
        match fs::write(entrance, pid.to_string()) {
            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Mounts the tasker's own group of version 2 without a mount point: it is reachable only through
/// this descriptor, and disappears with it.
///
/// The thread that mounts is in a cgroup namespace of its own: in the initial one a mount would set
/// options such as `nsdelegate` for the whole machine.
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

/// Creates a new folder within `own` and locks it. Returns `None` if another tasker has removed it
/// as stale.
fn make_folder(own: &Path) -> io::Result<Option<(PathBuf, Flock<File>)>> {
    let path = nix::unistd::mkdtemp(&own.join(format!("{FOLDER_NAME}XXXXXX")))?;
    let Ok(file) = File::open(&path) else {
        return Ok(None);
    };
    let Ok(folder) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else {
        return Ok(None);
    };
    Ok(path.exists().then_some((path, folder)))
}

/// Removes the folders of taskers that were killed. Their tasks died with them; groups that still
/// have processes, which are about to end, are left to the next tasker.
fn remove_left_behind(own: &Path) {
    for entry in fs::read_dir(own).into_iter().flatten().flatten() {
        let path = entry.path();
        if !entry.file_name().to_string_lossy().starts_with(FOLDER_NAME) {
            continue;
        }
        let locked =
            File::open(&path).map(|file| Flock::lock(file, FlockArg::LockExclusiveNonblock));
        if let Ok(Ok(_ours_now)) = locked {
            remove_groups(&path);
        }
    }
}

/// Removes the groups of a tasker, and its folder.
fn remove_groups(folder: &Path) {
    let is_folder = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    for group in fs::read_dir(folder)
        .into_iter()
        .flatten()
        .flatten()
        .filter(is_folder)
    {
        // A group that contains processes stays, and the folder with it.
        let _ = fs::remove_dir(group.path());
    }
    let _ = fs::remove_dir(folder);
}
