//! A PID namespace for each task. An idle init process, a child of the tasker, keeps the namespace
//! alive.
//!
//! PIDs in the namespace never collide with those of another host, so the task can be restored on
//! any host. Killing the init kills all processes in the namespace. The init is not part of dumps.
//!
//! If a freezer exists, each namespace has a control group that contains all its processes except
//! the init.

use crate::freezer::{ControlGroup, Freezer};
use crate::namespace_init;
use crate::sys::{self, Child, ExecPlan, StartError, StartGuard};
use checkpoint::proc;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns};
use std::cell::Cell;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Minimum number of spare namespaces. Each costs a sleeping process.
const SPARE_NAMESPACES_MIN: usize = 4;
/// Maximum number of spare namespaces while tasks start and end.
const SPARE_NAMESPACES_MAX: usize = 64;
/// Time without a new task after which only [`SPARE_NAMESPACES_MIN`] spare namespaces are kept.
const SPARE_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Idle time of the tasker after which it creates spare namespaces.
const IDLE_DELAY: Duration = Duration::from_millis(1);

/// A PID namespace and its init. Dropping this value ends all processes in the namespace; the init
/// must still be reaped.
#[derive(Debug)]
pub(crate) struct Namespace {
    init: Child,
    /// Write end of the pipe on which the init waits for the order to end.
    init_control: OwnedFd,
    inode: u64,
    /// True if the init was ordered to end.
    ending: Cell<bool>,
    /// The control group for the processes in the namespace, if one could be created.
    group: Option<ControlGroup>,
    /// True if the processes in the namespace are members of the control group.
    members_in_group: Cell<bool>,
}

impl Namespace {
    /// Creates a namespace that contains only its init, and a control group if the freezer can
    /// create one. Must be called from the main thread: the kernel kills the init when that thread
    /// dies.
    ///
    /// # Errors
    /// `EPERM` if the tasker may not create namespaces.
    pub(crate) fn new(freezer: Option<&mut Freezer>) -> io::Result<Namespace> {
        let (theirs, ours) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let init = namespace_init::start_init(theirs.as_fd(), None)?;
        match std::fs::metadata(namespace_path(&init)) {
            Ok(about) => Ok(Namespace {
                inode: about.st_ino(),
                init,
                init_control: ours,
                ending: Cell::new(false),
                group: freezer.and_then(|freezer| freezer.create_group().ok()),
                members_in_group: Cell::new(false),
            }),
            Err(error) => {
                sys::kill_pidfd(init.pidfd.as_fd());
                let _ = sys::wait_and_reap(init.pid);
                Err(error)
            }
        }
    }

    /// Tests whether the tasker may create PID namespaces, by creating one.
    pub(crate) fn is_possible() -> bool {
        let Ok(namespace) = Namespace::new(None) else {
            return false;
        };
        namespace.kill();
        sys::wait_and_reap(namespace.init.pid).is_ok()
    }

    /// True when the init has ended, and with it all processes in the namespace.
    pub(crate) fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(self.end_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..))
    }

    /// Returns a descriptor that becomes readable when the init has ended, and with it all
    /// processes in the namespace.
    pub(crate) fn end_fd(&self) -> BorrowedFd<'_> {
        self.init.pidfd.as_fd()
    }

    /// Returns the inode number of the namespace, by which images refer to it.
    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    /// Opens the namespace for the engine. The caller should close the descriptor soon: a host has
    /// thousands of tasks and a limit on descriptors.
    ///
    /// # Errors
    /// The init has ended.
    pub(crate) fn open(&self) -> io::Result<OwnedFd> {
        Ok(File::open(namespace_path(&self.init))?.into())
    }

    /// Runs `make`. Processes that `make` creates belong to this namespace.
    fn with_children_inside<T>(&self, make: impl FnOnce() -> T) -> io::Result<T> {
        let own = File::open("/proc/self/ns/pid")?;
        setns(self.open()?, CloneFlags::CLONE_NEWPID)?;
        let made = make();
        // A process may always return to its own namespace.
        setns(own, CloneFlags::CLONE_NEWPID)
            .expect("the way back into one's own namespace is open");
        Ok(made)
    }

    /// Starts a program in the namespace, as a direct child of the tasker.
    ///
    /// # Errors
    /// As [`sys::start_program`].
    pub(crate) fn start_program(
        &self,
        plan: &ExecPlan<'_>,
        guard: &StartGuard,
    ) -> Result<Child, StartError> {
        self.start_in_group(|group| sys::start_program(plan, guard, group))
    }

    /// Starts a process in the namespace that waits before its exec, as a direct child of the
    /// tasker.
    ///
    /// # Errors
    /// As [`sys::start_waiting`].
    pub(crate) fn start_waiting(
        &self,
        plan: &ExecPlan<'_>,
        allowed: Duration,
    ) -> Result<Child, StartError> {
        self.start_in_group(|group| sys::start_waiting(plan, allowed, group))
    }

    /// Creates a process in the namespace by calling `make`, in the control group if possible.
    fn start_in_group(
        &self,
        make: impl Fn(Option<BorrowedFd<'_>>) -> Result<Child, StartError>,
    ) -> Result<Child, StartError> {
        let start = |group: Option<BorrowedFd<'_>>| {
            self.with_children_inside(|| make(group))
                .map_err(StartError::NoProcess)?
        };
        self.members_in_group.set(false);
        if let Some(folder) = self.group.as_ref().and_then(|group| group.open().ok()) {
            match start(Some(folder.as_fd())) {
                // The kernel refused this control group; try without it.
                Err(StartError::NoProcess(_)) => {}
                other => {
                    self.members_in_group.set(true);
                    return other;
                }
            }
        }
        start(None)
    }

    /// Returns the control group if all processes in the namespace are members of it.
    pub(crate) fn control_group(&self) -> Option<&ControlGroup> {
        self.group.as_ref().filter(|_| self.members_in_group.get())
    }

    /// Returns the PIDs of all processes in the namespace except the init.
    ///
    /// With a control group this reads the group's list. [`Namespace::pids`] scans all processes of
    /// the host; during such a scan, tasks that must be stopped immediately would continue to run.
    pub(crate) fn members(&self) -> Vec<i32> {
        self.control_group()
            .and_then(|group| group.members().ok())
            .unwrap_or_else(|| self.pids())
    }

    /// Returns the path of the control group's file `cgroup.procs`, if the processes in the
    /// namespace are not members of the group yet.
    pub(crate) fn group_to_join(&self) -> Option<PathBuf> {
        self.group
            .as_ref()
            .filter(|_| !self.members_in_group.get())
            .map(ControlGroup::procs_file)
    }

    /// Records that the processes in the namespace are members of the control group.
    pub(crate) fn set_in_group(&self) {
        self.members_in_group.set(true);
    }

    /// Starts a process in the namespace that sleeps in the directory `dir`.
    ///
    /// # Errors
    /// A system call failed.
    pub(crate) fn start_idle_process(
        &self,
        dir: &CStr,
        stdin: &impl AsFd,
        output: &impl AsFd,
    ) -> io::Result<Child> {
        self.with_children_inside(|| sys::start_idle_process(dir, stdin.as_fd(), output.as_fd()))?
    }

    /// Kills all processes in the namespace. The caller must first reap the tasker's children among
    /// them, then the init.
    pub(crate) fn kill(&self) {
        self.ending.set(true);
        sys::kill_pidfd(self.init.pidfd.as_fd());
    }

    /// True if no process remains in the namespace after its task has ended. The init adopts
    /// orphans, so a remaining process would be a child of the init.
    fn is_reusable(&self) -> bool {
        !self.ending.get()
            && !self.has_ended()
            && proc::children(self.init.pid).is_some_and(|children| children.is_empty())
    }

    /// Orders the init to end when the namespace is empty.
    pub(crate) fn end_when_empty(&self) {
        self.ending.set(true);
        // The pipe never contains more than this byte, so it has space. A failure means that the
        // init has ended.
        let _ = nix::unistd::write(&self.init_control, b"e");
    }

    /// Returns the PIDs of all processes in the namespace except the init, in the tasker's PID
    /// namespace.
    pub(crate) fn pids(&self) -> Vec<i32> {
        // After the init has ended, its PID may belong to another process.
        if !std::fs::metadata(namespace_path(&self.init))
            .is_ok_and(|about| about.st_ino() == self.inode)
        {
            return Vec::new();
        }
        proc::process_ids()
            .into_iter()
            .filter(|&pid| pid != self.init.pid)
            .filter(|pid| {
                std::fs::metadata(format!("/proc/{pid}/ns/pid"))
                    .is_ok_and(|m| m.st_ino() == self.inode)
            })
            .collect()
    }
}

/// Returns the path in /proc of the namespace of an init. The PID is not reused before the init is
/// reaped.
fn namespace_path(init: &Child) -> String {
    format!("/proc/{}/ns/pid", init.pid)
}

/// Namespaces that are prepared for future tasks, so that starting a task does not wait for the
/// creation of a namespace. Namespaces of ended tasks are reused if they are empty, and some
/// namespaces are created while the tasker is idle.
#[derive(Debug)]
pub(crate) struct SpareNamespaces {
    ready: Vec<Namespace>,
    /// Time at which the last namespace was taken.
    last_taken: Instant,
    /// True if the last attempt to create a namespace failed. The start of the next task reports
    /// the reason.
    creation_failed: bool,
}

impl SpareNamespaces {
    pub(crate) fn new() -> SpareNamespaces {
        SpareNamespaces {
            ready: Vec::new(),
            last_taken: Instant::now(),
            creation_failed: false,
        }
    }

    /// Returns a spare namespace, or creates one if no spare exists.
    ///
    /// # Errors
    /// `EPERM` if the tasker may not create namespaces.
    pub(crate) fn take(&mut self, freezer: Option<&mut Freezer>) -> io::Result<Namespace> {
        (self.last_taken, self.creation_failed) = (Instant::now(), false);
        while let Some(namespace) = self.ready.pop() {
            // Any privileged process may have killed the init.
            if !namespace.has_ended() {
                return Ok(namespace);
            }
        }
        Namespace::new(freezer)
    }

    /// Adds the namespace of an ended task to the spare namespaces. Returns the namespace if it
    /// cannot be reused.
    pub(crate) fn recycle(&mut self, namespace: Namespace) -> Option<Namespace> {
        if self.ready.len() >= SPARE_NAMESPACES_MAX || !namespace.is_reusable() {
            return Some(namespace);
        }
        namespace.members_in_group.set(false);
        self.ready.push(namespace);
        None
    }

    /// Returns the idle time after which [`SpareNamespaces::maintain`] must be called; `None` if no
    /// call is needed.
    pub(crate) fn check_delay(&self) -> Option<Duration> {
        match self.ready.len() {
            ready if ready < SPARE_NAMESPACES_MIN && !self.creation_failed => Some(IDLE_DELAY),
            ready if ready > SPARE_NAMESPACES_MIN => Some(SPARE_IDLE_TIMEOUT),
            _ => None,
        }
    }

    /// Creates a missing spare namespace, or ends namespaces that were not needed for
    /// [`SPARE_IDLE_TIMEOUT`]. Must be called when the tasker is idle.
    pub(crate) fn maintain(&mut self, freezer: Option<&mut Freezer>) {
        if self.ready.len() < SPARE_NAMESPACES_MIN {
            match Namespace::new(freezer) {
                // Insert the new namespace before those that were used recently, which are taken
                // first.
                Ok(namespace) => self.ready.insert(0, namespace),
                Err(_) => self.creation_failed = true,
            }
        } else if self.last_taken.elapsed() >= SPARE_IDLE_TIMEOUT {
            self.ready.truncate(SPARE_NAMESPACES_MIN);
        }
    }
}
