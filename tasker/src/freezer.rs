//! Control groups (version 2) that freeze tasks: everybody inside stands still at once, also whoever is just being made, and no
//! program can tell by a signal. A task is born in its group, so it cannot have got anybody out of it before.
//!
//! Where only version 1 is mounted the tasker mounts version 2 for itself, where nobody else sees it: each kernel that knows process
//! descriptors, as the tasker needs them, has its freezer. Version 1's own is not used: what it has frozen cannot even be killed, so a
//! tasker that dies would leave processes behind for ever. In version 2 they die like others.

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

/// Beginning of the name of a tasker's folder of groups, within its own group.
const FOLDER_NAME: &str = "sempa-";
/// `off`: no control groups.
const SWITCH: &str = "SEMPA_FREEZER";
/// How long the trial may take.
const TRIAL_ALLOWED: Duration = Duration::from_secs(2);
/// How often that is looked at.
const TRIAL_LOOK: Duration = Duration::from_micros(100);
/// Another tasker that tidies up may take a new folder for one that was left behind, so often at most.
const FOLDER_TRIES: usize = 3;

/// The folder of this tasker's groups. Dropping it removes them.
#[derive(Debug)]
pub(crate) struct Freezer {
    /// Locked as long as the tasker lives: others remove folders that nobody has locked.
    _folder: Flock<File>,
    path: PathBuf,
    /// Version 2, where the tasker has mounted it for itself: the path leads through it.
    _mount: Option<OwnedFd>,
    made: u64,
    /// Groups in which somebody had not ended when they were given up.
    given_up: Rc<RefCell<Vec<PathBuf>>>,
}

/// A control group for the processes of a task. Dropping it removes it, if everybody inside has ended, or else later.
#[derive(Debug)]
pub(crate) struct ControlGroup {
    path: PathBuf,
    frozen: Cell<bool>,
    given_up: Rc<RefCell<Vec<PathBuf>>>,
}

impl Freezer {
    /// Makes the folder, and tries whether what is born in a group can be frozen and killed.
    ///
    /// # Errors
    /// One sentence: why there can be none here.
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
            // What is mounted, and how, is as the administrator wants it.
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

    /// In a folder of its own within this group.
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

    /// A new group with nobody inside.
    ///
    /// # Errors
    /// What the system said; there may be a limit on groups.
    pub(crate) fn group(&mut self) -> io::Result<ControlGroup> {
        // What is still not over stays in the list.
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

/// Kills it and waits until it has ended. It may be frozen.
fn end(process: &Child) {
    sys::kill_by(process.pidfd.as_fd());
    // A child of ours, which nobody else reaps.
    let _ = sys::reap_wait(process.pid);
}

impl Drop for Freezer {
    fn drop(&mut self) {
        remove_groups(&self.path);
    }
}

impl ControlGroup {
    /// The folder, in which a process can be born. Nobody keeps it open for long: a host has thousands of tasks and a limit of
    /// descriptors.
    ///
    /// # Errors
    /// Somebody has removed it.
    pub(crate) fn open(&self) -> io::Result<OwnedFd> {
        Ok(File::open(&self.path)?.into())
    }

    /// Who is inside.
    ///
    /// # Errors
    /// Somebody has removed the group.
    pub(crate) fn members(&self) -> io::Result<Vec<i32>> {
        let text = fs::read_to_string(self.entrance())?;
        // Whom the kernel does not name here it calls 0.
        Ok(text
            .lines()
            .filter_map(|line| line.parse().ok())
            .filter(|pid| *pid > 0)
            .collect())
    }

    /// The file that takes the numbers of processes that are to come in.
    pub(crate) fn entrance(&self) -> PathBuf {
        self.path.join("cgroup.procs")
    }

    /// Begins to freeze everybody inside.
    ///
    /// # Errors
    /// Somebody has removed the group.
    pub(crate) fn freeze(&self) -> io::Result<()> {
        self.order("1")?;
        self.frozen.set(true);
        Ok(())
    }

    /// Lets everybody go on. No program learns of it.
    pub(crate) fn thaw(&self) {
        if self.frozen.replace(false) {
            // A group that was frozen by us with somebody inside is there.
            let _ = self.order("0");
        }
    }

    /// It was told to freeze, and not to thaw since.
    pub(crate) fn is_frozen(&self) -> bool {
        self.frozen.get()
    }

    /// True if nobody inside runs.
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

/// Brings processes, of which none runs, into the group with this entrance. The first one takes milliseconds, because the
/// kernel waits until all its processors have come by.
///
/// # Errors
/// One that is still there could not be brought in.
pub(crate) fn bring_in(entrance: &Path, pids: &[i32]) -> io::Result<()> {
    for pid in pids {
        match fs::write(entrance, pid.to_string()) {
            Err(error) if error.raw_os_error() != Some(libc::ESRCH) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Mounts the tasker's own group of version 2 nowhere: it can be reached through this descriptor only, and is gone with it. A thread
/// does it that is in a namespace of control groups of its own: in the first one a mount sets options (`nsdelegate` and others) for
/// the whole machine.
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

/// A new folder within `own`, locked; `None` if another tasker came between and has taken it for one left behind.
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

/// Removes the folders of taskers that were killed. Their tasks have died with them; groups that still have somebody inside, who
/// is about to end, are left to the next tasker.
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
        // One with somebody inside stays, and the folder with it.
        let _ = fs::remove_dir(group.path());
    }
    let _ = fs::remove_dir(folder);
}
