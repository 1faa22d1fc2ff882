//! Freezes tasks by control groups (version 2).
//!
//! All processes of a control group stop at once, including processes that are being created. A
//! program cannot detect the freeze, because it receives no signal. A task is created inside its
//! group, so all its processes are members.
//!
//! If only version 1 is mounted, the tasker mounts version 2 privately; every kernel with pidfds,
//! which the tasker needs, supports version 2. The freezer of version 1 is not used: its frozen
//! processes cannot be killed, so after the death of a tasker its frozen tasks would remain
//! forever. In version 2 frozen processes can be killed like others.

use crate::clone_vfork;
use crate::host_account::HostAccount;
use crate::locked_dir;
use crate::namespace_init;
use crate::sys::{self, Child};
use crate::task_user::{TaskUser, with_own_file_rights};
use nix::fcntl::Flock;
use nix::sched::{CloneFlags, unshare};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};
use sempa_proto::cgroup;
use sempa_service_settings::LimitKind;
use std::cell::{Cell, RefCell};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};
use thiserror::Error;

/// Prefix of the name of the directory for the groups of one tasker's tasks. The tasker creates the
/// directory below its own control group, or in that of its user.
const CGROUP_DIR_PREFIX: &str = "sempa-";
/// Prefix of the name of the group of an ordinary user, which contains the directories of all
/// taskers that run tasks of this user. The UID follows.
const USER_GROUP_PREFIX: &str = "sempa-user-";
/// Name of the group that contains the processes of the tasker service, but no tasks
/// (`DelegateSubgroup` in the unit of systemd). The kernel enables the memory controller only below
/// a group without processes.
const SERVICE_GROUP: &str = "taskers";
/// Part of the limit of memory by which the kernel's limit is greater. The tasker, which gives a
/// reason, kills first unless memory grows fast, and the kernel counts its own memory, too.
const KERNEL_MARGIN_DIVISOR: u64 = 8;
/// Maximum number of attempts to create a directory in the group of a user. The last tasker of the
/// user may remove the group at the same time.
const CREATE_ATTEMPTS_MAX: usize = 10;
/// Environment variable that disables control groups if its value is `off`.
const FREEZER_VARIABLE: &str = "SEMPA_FREEZER";
/// File of a control group that lists its processes.
const PROCS_FILE: &str = "cgroup.procs";
/// Maximum number of control groups below a task's group whose processes count as frozen with it. A
/// pause of a task with more is reported as late.
const NESTED_GROUPS_MAX: usize = 256;
/// Time limit for the probe process to freeze.
const PROBE_TIMEOUT: Duration = Duration::from_secs(2);
/// Poll interval of the probe.
const PROBE_INTERVAL: Duration = Duration::from_micros(100);

/// The directory of this tasker's control groups. Dropping this value removes all groups that
/// contain no processes.
#[derive(Debug)]
pub(crate) struct Freezer {
    /// Lock of the directory during the life of the tasker. Other taskers remove directories that
    /// are not locked.
    _dir_lock: Flock<File>,
    dir: PathBuf,
    /// The group of the user that contains `dir`; `None` for root's tasks.
    user_dir: Option<PathBuf>,
    /// Number of processes of the user that the kernel had killed for lack of memory at the last
    /// call of [`Freezer::take_kernel_kill`].
    kernel_kill_count: u64,
    /// A private mount of version 2, if one was necessary. `dir` is then a path below this mount.
    _mount: Option<OwnedFd>,
    /// Number of groups that were created so far. The number is also the name of the newest group.
    created_group_count: u64,
    /// Where groups are claimed; `None` if their number is not limited.
    account: Option<HostAccount>,
    /// Paths of dropped groups that still contained processes and could not be removed yet.
    unremoved_groups: Rc<RefCell<Vec<PathBuf>>>,
    reserve: Rc<DescriptorReserve>,
}

/// A descriptor that is closed for a moment when no other is free, so that tasks can be frozen and
/// thawed nevertheless.
#[derive(Debug)]
struct DescriptorReserve(RefCell<Option<File>>);

impl DescriptorReserve {
    fn new() -> Self {
        Self(RefCell::new(File::open("/dev/null").ok()))
    }

    /// Calls `operation`, which opens one descriptor at a time, and calls it again with the reserve
    /// if no descriptor is free.
    fn run<T>(&self, operation: impl Fn() -> io::Result<T>) -> io::Result<T> {
        let is_exhausted =
            |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE));
        match operation() {
            Err(error) if is_exhausted(&error) => {
                drop(self.0.take());
                let result = operation();
                self.0.replace(File::open("/dev/null").ok());
                result
            }
            result => result,
        }
    }
}

/// A control group for the processes of a task. Dropping this value removes the group. If the group
/// then still contains processes, it is removed later.
#[derive(Debug)]
pub(crate) struct ControlGroup {
    path: PathBuf,
    freeze_requested: Cell<bool>,
    unremoved_groups: Rc<RefCell<Vec<PathBuf>>>,
    reserve: Rc<DescriptorReserve>,
}

/// Why tasks cannot be frozen on this host; paused tasks are then stopped by signals.
#[derive(Debug, Error)]
pub(crate) enum FreezerUnavailable {
    #[error("the tasker has no privileges")]
    NoPrivileges,
    #[error("{}=off", FREEZER_VARIABLE)]
    Disabled,
    #[error("not done on this processor")]
    UnsupportedProcessor,
    #[error("the tasker's own control group of version 2 is not to be seen here")]
    OwnGroupNotVisible,
    #[error(
        "control groups of version 2 are not mounted here, and the tasker cannot do it for itself: {0}"
    )]
    MountFailed(#[source] io::Error),
    #[error("no control group can be made in {}: {source}", own.display())]
    CreateGroupFailed { own: PathBuf, source: io::Error },
    /// Freezing failed in the probe. The probe's group has been removed again.
    #[error("the freezer of control groups does not work in {}: {source}", own.display())]
    ProbeFailed { own: PathBuf, source: io::Error },
}

/// The control group of an ordinary user. An administrator sees and limits all tasks of the user
/// there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct UserGroup {
    uid: u32,
    /// Maximum memory in bytes.
    memory_bytes_max: Option<u64>,
}

impl UserGroup {
    pub(crate) fn new(user: &TaskUser) -> Self {
        let memory_bytes_max = user.service_limit(LimitKind::Memory);
        Self {
            uid: user.uid(),
            memory_bytes_max: (memory_bytes_max != u64::MAX).then_some(memory_bytes_max),
        }
    }

    /// Creates a tasker's directory in the group of this user, which is created if there is none.
    /// Returns the group, the directory and its lock.
    fn create_dir(self, own_group: &Path) -> io::Result<(PathBuf, PathBuf, Flock<File>)> {
        let group = own_group.join(format!("{USER_GROUP_PREFIX}{}", self.uid));
        for _ in 0..CREATE_ATTEMPTS_MAX {
            match fs::create_dir(&group) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(error),
                _ => {}
            }
            match locked_dir::create(&group, CGROUP_DIR_PREFIX) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                result => {
                    let (dir, lock) = result?;
                    self.limit_memory(own_group, &group);
                    return Ok((group, dir, lock));
                }
            }
        }
        Err(io::ErrorKind::WouldBlock.into())
    }

    /// Makes the kernel limit the memory of the user's tasks, where it can: a group below one that
    /// contains processes has no memory controller, unless the latter is the outermost group. The
    /// tasker measures the memory in any case. The kernel permits an eighth more.
    fn limit_memory(self, own_group: &Path, group: &Path) {
        let limit_file = group.join("memory.max");
        if self.memory_bytes_max.is_some() && !limit_file.exists() {
            let _ = fs::write(own_group.join("cgroup.subtree_control"), "+memory");
        }
        if limit_file.exists() {
            let limit = self.memory_bytes_max;
            let text = limit.map_or_else(|| "max".into(), |bytes| kernel_limit(bytes).to_string());
            if let Err(error) = fs::write(&limit_file, text) {
                tracing::warn!("{}: {error}", limit_file.display());
            }
        }
    }
}

impl Freezer {
    /// Creates the tasker's directory, and probes that a process which is created in a group can be
    /// frozen and killed.
    ///
    /// # Errors
    /// Freezing is not possible on this host.
    pub(crate) fn new(
        user_group: Option<UserGroup>,
        account: Option<HostAccount>,
    ) -> Result<Self, FreezerUnavailable> {
        with_own_file_rights(|| {
            let mut freezer = Self::create(user_group)?;
            freezer.account = account;
            Ok(freezer)
        })
    }

    fn create(user_group: Option<UserGroup>) -> Result<Self, FreezerUnavailable> {
        if std::env::var_os(FREEZER_VARIABLE).is_some_and(|value| value == "off") {
            return Err(FreezerUnavailable::Disabled);
        }
        if !clone_vfork::IS_SUPPORTED {
            return Err(FreezerUnavailable::UnsupportedProcessor);
        }
        let read_own_proc_file =
            |name: &str| fs::read(Path::new("/proc/self").join(name)).unwrap_or_default();
        let mounts = read_own_proc_file("mountinfo");
        if cgroup::find_mount_point(&mounts, None).is_some() {
            // An existing mount is used with the administrator's configuration.
            let own_group = cgroup::group_dir(&mounts, &read_own_proc_file("cgroup"), None)
                .ok_or(FreezerUnavailable::OwnGroupNotVisible)?;
            return Self::create_in(parent_of_tasks(&own_group), None, user_group);
        }
        let mount = mount_own_group().map_err(FreezerUnavailable::MountFailed)?;
        let own_group = Path::new("/proc/self/fd").join(mount.as_raw_fd().to_string());
        Self::create_in(&own_group, Some(mount), user_group)
    }

    /// Creates the tasker's directory in the control group `own_group`, and probes freezing.
    /// `mount` is the private mount that contains `own_group`, if any.
    fn create_in(
        own_group: &Path,
        mount: Option<OwnedFd>,
        user_group: Option<UserGroup>,
    ) -> Result<Self, FreezerUnavailable> {
        remove_stale_groups(own_group);
        let create_result = match user_group {
            Some(user_group) => user_group
                .create_dir(own_group)
                .map(|(user_dir, dir, lock)| (Some(user_dir), dir, lock)),
            None => locked_dir::create(own_group, CGROUP_DIR_PREFIX)
                .map(|(dir, lock)| (None, dir, lock)),
        };
        let (user_dir, dir, dir_lock) =
            create_result.map_err(|source| FreezerUnavailable::CreateGroupFailed {
                own: own_group.into(),
                source,
            })?;
        let mut freezer = Self {
            _dir_lock: dir_lock,
            dir,
            kernel_kill_count: user_dir.as_deref().map_or(0, read_kernel_kills),
            user_dir,
            _mount: mount,
            created_group_count: 0,
            account: None,
            unremoved_groups: Rc::default(),
            reserve: Rc::new(DescriptorReserve::new()),
        };
        freezer
            .probe_freezing()
            .map_err(|source| FreezerUnavailable::ProbeFailed {
                own: own_group.into(),
                source,
            })?;
        Ok(freezer)
    }

    /// Returns true if the kernel has killed processes of the user, because the user's group is
    /// over its limit of memory, since the last call.
    pub(crate) fn take_kernel_kill(&mut self) -> bool {
        let Some(user_dir) = &self.user_dir else {
            return false;
        };
        let count = with_own_file_rights(|| read_kernel_kills(user_dir));
        std::mem::replace(&mut self.kernel_kill_count, count) < count
    }

    /// Returns the number of groups that exist.
    pub(crate) fn group_count(&self) -> u64 {
        let group_count = Rc::strong_count(&self.unremoved_groups) - 1;
        (group_count + self.unremoved_groups.borrow().len()) as u64
    }

    /// Creates an empty control group.
    ///
    /// # Errors
    /// The system's error, for example because the number of groups is limited.
    pub(crate) fn create_group(&mut self) -> io::Result<ControlGroup> {
        with_own_file_rights(|| {
            // Only the groups that still contain processes remain in the list.
            self.unremoved_groups
                .borrow_mut()
                .retain(|path| remove_group(path).is_err());
        });
        let group_count = self.group_count() + 1;
        let account = self.account.as_ref();
        if account.is_some_and(|account| !account.claim_control_groups(group_count)) {
            return Err(io::Error::from_raw_os_error(libc::EDQUOT));
        }
        self.created_group_count += 1;
        let path = self.dir.join(self.created_group_count.to_string());
        with_own_file_rights(|| fs::create_dir(&path))?;
        Ok(ControlGroup {
            path,
            freeze_requested: Cell::new(false),
            unremoved_groups: Rc::clone(&self.unremoved_groups),
            reserve: Rc::clone(&self.reserve),
        })
    }

    fn probe_freezing(&mut self) -> io::Result<()> {
        let group = self.create_group()?;
        let (control_reader, _control_writer) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC)?;
        let probe_process =
            namespace_init::start_init(control_reader.as_fd(), Some(group.open_dir()?.as_fd()))?;
        let freeze_result = group
            .start_freeze()
            .and_then(|()| group.wait_until_frozen());
        kill_and_reap(&probe_process);
        freeze_result
    }
}

/// Kills a process, even if it is frozen, and waits until it has ended.
fn kill_and_reap(process: &Child) {
    sys::kill_pidfd(process.pidfd.as_fd());
    // Reaping cannot fail: the process is a child of the tasker, and only this function reaps it.
    let _ = sys::wait_and_reap(process.pid);
}

impl Drop for Freezer {
    fn drop(&mut self) {
        with_own_file_rights(|| {
            remove_groups(&self.dir);
            if let Some(user_dir) = &self.user_dir {
                // Fails while another tasker of the user runs.
                let _ = fs::remove_dir(user_dir);
            }
        });
    }
}

impl ControlGroup {
    /// Opens the group's directory for [`sys::clone3`], which creates a process in the group. The
    /// caller should close the descriptor soon: a host has thousands of tasks and a limit on
    /// descriptors.
    ///
    /// # Errors
    /// The group was removed by another process.
    pub(crate) fn open_dir(&self) -> io::Result<OwnedFd> {
        Ok(with_own_file_rights(|| File::open(&self.path))?.into())
    }

    /// Returns the PIDs of the processes in the group and in the groups below it, which are frozen
    /// with it, in the tasker's PID namespace.
    ///
    /// # Errors
    /// The group was removed by another process.
    pub(crate) fn member_pids(&self) -> io::Result<Vec<i32>> {
        let text = with_own_file_rights(|| {
            let mut text = fs::read_to_string(self.procs_file())?;
            for dir in nested_groups(&self.path) {
                // A group that the task has just removed has no processes. A group that the task
                // has made threaded has no list; the list of the group above contains its
                // processes.
                text.push_str(&fs::read_to_string(dir.join(PROCS_FILE)).unwrap_or_default());
            }
            io::Result::Ok(text)
        })?;
        // The kernel lists processes outside the tasker's PID namespace as 0.
        Ok(text
            .lines()
            .filter_map(|line| line.parse().ok())
            .filter(|pid| *pid > 0)
            .collect())
    }

    /// Returns the path of the file `cgroup.procs`. Writing a PID to the file adds the process to
    /// the group.
    pub(crate) fn procs_file(&self) -> PathBuf {
        self.path.join(PROCS_FILE)
    }

    /// Starts to freeze all processes of the group. [`is_fully_frozen`](Self::is_fully_frozen)
    /// returns true when the freeze is complete.
    ///
    /// # Errors
    /// The group was removed by another process, or no descriptor is free.
    pub(crate) fn start_freeze(&self) -> io::Result<()> {
        self.write_freeze("1")?;
        self.freeze_requested.set(true);
        Ok(())
    }

    /// Thaws all processes of the group. Programs cannot detect the thaw.
    pub(crate) fn thaw(&self) {
        if self.freeze_requested.replace(false) {
            // Cannot fail: a group that contains frozen processes cannot be removed, and the
            // reserve provides the descriptor.
            let _ = self.write_freeze("0");
        }
    }

    /// True from [`ControlGroup::start_freeze`] on, until the group is thawed. Some processes may
    /// not be frozen yet.
    pub(crate) fn is_freeze_requested(&self) -> bool {
        self.freeze_requested.get()
    }

    /// True if the kernel reports that all processes of the group are frozen.
    pub(crate) fn is_fully_frozen(&self) -> bool {
        let path = self.path.join("cgroup.events");
        with_own_file_rights(|| self.reserve.run(|| fs::read_to_string(&path)))
            .is_ok_and(|text| text.lines().any(|line| line == "frozen 1"))
    }

    fn write_freeze(&self, freeze_value: &str) -> io::Result<()> {
        let path = self.path.join("cgroup.freeze");
        with_own_file_rights(|| self.reserve.run(|| fs::write(&path, freeze_value)))
    }

    fn wait_until_frozen(&self) -> io::Result<()> {
        let deadline = Instant::now() + PROBE_TIMEOUT;
        while !self.is_fully_frozen() {
            if Instant::now() >= deadline {
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
        if with_own_file_rights(|| remove_group(&self.path)).is_err() {
            self.unremoved_groups
                .borrow_mut()
                .push(std::mem::take(&mut self.path));
        }
    }
}

/// Adds stopped processes to a control group. `procs_file` is the group's file `cgroup.procs`.
/// Adding the first process takes milliseconds, because the kernel waits for all processors.
/// Processes that have ended are skipped.
///
/// # Errors
/// An existing process could not be added.
pub(crate) fn add_to_group(procs_file: &Path, pids: &[i32]) -> io::Result<()> {
    with_own_file_rights(|| {
        for pid in pids {
            match fs::write(procs_file, pid.to_string()) {
                Err(error) if error.raw_os_error() != Some(libc::ESRCH) => return Err(error),
                _ => {}
            }
        }
        Ok(())
    })
}

/// Mounts the tasker's own control group of version 2 without a mount point. The mount is reachable
/// only through the returned descriptor, and the kernel unmounts it when the descriptor is closed.
///
/// The thread that mounts enters a new cgroup namespace: in the initial cgroup namespace a mount
/// would set options such as `nsdelegate` for the whole machine.
fn mount_own_group() -> io::Result<OwnedFd> {
    let mount_group = || {
        unshare(CloneFlags::CLONE_NEWCGROUP)?;
        let file_system = fsopen("cgroup2", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_create(&file_system)?;
        Ok(fsmount(
            &file_system,
            FsMountFlags::FSMOUNT_CLOEXEC,
            MountAttrFlags::empty(),
        )?)
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, mount_group)?;
        thread
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("the thread that mounts them has ended")))
    })
}

/// Returns the kernel's limit of the memory of a user, in bytes, for the administrator's limit.
pub(crate) fn kernel_limit(bytes: u64) -> u64 {
    bytes.saturating_add(bytes / KERNEL_MARGIN_DIVISOR)
}

/// Returns the group in which the groups for tasks are created.
fn parent_of_tasks(own_group: &Path) -> &Path {
    let parent = own_group.parent();
    parent
        .filter(|_| own_group.ends_with(SERVICE_GROUP))
        .unwrap_or(own_group)
}

/// Returns the number of processes in a group and below that the kernel has killed because a limit
/// of memory is exceeded; 0 without the memory controller.
fn read_kernel_kills(group: &Path) -> u64 {
    let text = fs::read_to_string(group.join("memory.events")).unwrap_or_default();
    let count = text.lines().find_map(|line| line.strip_prefix("oom_kill "));
    count.and_then(|count| count.parse().ok()).unwrap_or(0)
}

/// Removes the directories of killed taskers, and the groups of users that have become empty. The
/// tasks of killed taskers were killed with the taskers. Groups that still contain ending processes
/// are removed by the next tasker.
fn remove_stale_groups(own_group: &Path) {
    let is_user_group = |dir: &Path| {
        let name = dir.file_name().map(|name| name.to_string_lossy());
        name.is_some_and(|name| name.starts_with(USER_GROUP_PREFIX))
    };
    for entry in fs::read_dir(own_group).into_iter().flatten().flatten() {
        let dir = entry.path();
        if is_user_group(&dir) {
            locked_dir::remove_stale(&dir, CGROUP_DIR_PREFIX, remove_groups);
            let _ = fs::remove_dir(&dir);
        }
    }
    locked_dir::remove_stale(own_group, CGROUP_DIR_PREFIX, |dir| {
        if !is_user_group(dir) {
            remove_groups(dir);
        }
    });
}

/// Removes the directory `dir` of a tasker with its control groups.
fn remove_groups(dir: &Path) {
    let is_dir = |entry: &fs::DirEntry| entry.file_type().is_ok_and(|kind| kind.is_dir());
    for group in fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter(is_dir)
    {
        // Removing a group that contains processes fails. Then the directory remains, too.
        let _ = remove_group(&group.path());
    }
    let _ = fs::remove_dir(dir);
}

/// Removes a task's control group and the groups that the task has made below it.
///
/// # Errors
/// A group contains a process.
fn remove_group(path: &Path) -> io::Result<()> {
    for dir in nested_groups(path).into_iter().rev() {
        // If this fails, removing the surrounding group fails, too.
        let _ = fs::remove_dir(dir);
    }
    fs::remove_dir(path)
}

/// Returns the control groups below a group, each after the one that contains it; at most
/// [`NESTED_GROUPS_MAX`].
fn nested_groups(path: &Path) -> Vec<PathBuf> {
    let mut dirs = Vec::new();
    let mut next_dir = Some(path.to_path_buf());
    let mut next_index = 0;
    while let Some(dir) = next_dir {
        // A directory with two links has no directories; some file systems do not count links.
        let has_no_groups = fs::metadata(&dir).is_ok_and(|metadata| metadata.nlink() == 2);
        let dir = Some(dir).filter(|_| !has_no_groups);
        let entries = dir.and_then(|dir| fs::read_dir(dir).ok());
        let entries = entries.into_iter().flatten().flatten();
        let nested = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
        let room = NESTED_GROUPS_MAX - dirs.len();
        dirs.extend(nested.map(|entry| entry.path()).take(room));
        next_dir = dirs.get(next_index).cloned();
        next_index += 1;
    }
    dirs
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nested groups are listed after those that contain them, up to a limit.
    #[test]
    fn nested_groups_follow_surrounding_ones() {
        let dir = tempfile::tempdir().expect("a directory");
        let inner = dir.path().join("a/b/c");
        fs::create_dir_all(&inner).expect("the test's own directory");
        fs::write(dir.path().join("a/file"), "").expect("the test's own directory");
        let names = ["a", "a/b", "a/b/c"].map(|name| dir.path().join(name));
        assert_eq!(nested_groups(dir.path()), names);
        for number in 0..NESTED_GROUPS_MAX {
            fs::create_dir(inner.join(number.to_string())).expect("the test's own directory");
        }
        assert_eq!(nested_groups(dir.path()).len(), NESTED_GROUPS_MAX);
    }

    fn freezer_in(parent: &Path, account: Option<HostAccount>) -> Freezer {
        let (dir, lock) = locked_dir::create(parent, CGROUP_DIR_PREFIX).expect("unlocked");
        Freezer {
            _dir_lock: lock,
            dir,
            user_dir: None,
            kernel_kill_count: 0,
            _mount: None,
            created_group_count: 0,
            account,
            unremoved_groups: Rc::default(),
            reserve: Rc::new(DescriptorReserve::new()),
        }
    }

    /// The directory of a tasker is in the group of its user, which ends with the last tasker.
    #[test]
    fn user_group_ends_with_its_last_tasker() {
        let own_group = tempfile::tempdir().expect("a directory");
        let user_group = UserGroup {
            uid: 1000,
            memory_bytes_max: Some(5),
        };
        let create = || {
            let (group, dir, lock) = user_group.create_dir(own_group.path()).expect("created");
            assert!(dir.starts_with(&group) && group.ends_with("sempa-user-1000"));
            let mut freezer = freezer_in(&group, None);
            let _ = fs::remove_dir(std::mem::replace(&mut freezer.dir, dir));
            freezer.user_dir = Some(group);
            (freezer, lock)
        };
        let (first, second) = (create(), create());
        let group = own_group.path().join("sempa-user-1000");
        drop(first);
        remove_stale_groups(own_group.path());
        assert!(second.0.dir.exists());
        drop(second);
        assert!(!group.exists());
        fs::create_dir_all(group.join("sempa-killed/1")).expect("the test's own directory");
        remove_stale_groups(own_group.path());
        assert!(!group.exists());
    }

    /// The kernel limits the memory of a user where the group has the controller.
    #[test]
    fn memory_is_limited_where_possible() {
        let own_group = tempfile::tempdir().expect("a directory");
        let group = own_group.path().join("sempa-user-1000");
        fs::create_dir(&group).expect("the test's own directory");
        let limit_file = group.join("memory.max");
        let limit_memory = |memory_bytes_max| {
            let user_group = UserGroup {
                uid: 1000,
                memory_bytes_max,
            };
            user_group.limit_memory(own_group.path(), &group);
        };
        limit_memory(Some(4096));
        assert!(!limit_file.exists());
        for (limit, text) in [(Some(4096), "4608"), (None, "max")] {
            fs::write(&limit_file, "").expect("the test's own directory");
            limit_memory(limit);
            assert_eq!(fs::read_to_string(&limit_file).expect("written"), text);
        }
    }

    #[test]
    fn tasks_are_not_below_the_processes_of_the_service() {
        let unit = Path::new("/sys/fs/cgroup/system.slice/sempa-taskerd.service");
        assert_eq!(parent_of_tasks(&unit.join("taskers")), unit);
        assert_eq!(parent_of_tasks(unit), unit);
    }

    /// Each kill by the kernel is reported once.
    #[test]
    fn kills_by_the_kernel_are_counted() {
        let parent = tempfile::tempdir().expect("a directory");
        let mut freezer = freezer_in(parent.path(), None);
        assert!(!freezer.take_kernel_kill());
        let group = tempfile::tempdir().expect("a directory");
        freezer.user_dir = Some(group.path().to_path_buf());
        assert!(!freezer.take_kernel_kill());
        let events = group.path().join("memory.events");
        fs::write(&events, "low 0\noom 4\noom_kill 1\noom_group_kill 0\n").expect("written");
        assert!(freezer.take_kernel_kill() && !freezer.take_kernel_kill());
    }

    /// A group that could not be removed at its end counts until it can be removed.
    #[test]
    fn removable_groups_do_not_count() {
        let parent = tempfile::tempdir().expect("a directory");
        let account_dir = tempfile::tempdir().expect("a directory");
        let account = HostAccount::with_group_limit(account_dir.path(), 1);
        let mut freezer = freezer_in(parent.path(), Some(account));
        let is_refused = |freezer: &mut Freezer| {
            let error = freezer.create_group().err();
            error.is_some_and(|error| error.raw_os_error() == Some(libc::EDQUOT))
        };
        let group = freezer.create_group().expect("the first");
        assert!(is_refused(&mut freezer));
        // The file keeps the directory as a process keeps a group.
        let file = group.path.join("process");
        fs::write(&file, "").expect("the test's own directory");
        drop(group);
        assert!(is_refused(&mut freezer));
        fs::remove_file(&file).expect("it is there");
        assert!(!is_refused(&mut freezer));
    }
}
