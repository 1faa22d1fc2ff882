//! A PID namespace for one task, kept alive by an idle init that is a child of the tasker.
//!
//! Process ids inside never collide with those of another host, so the task can be rebuilt on any
//! host. Killing the init reliably kills all processes inside. The init is not part of dumps.
//!
//! If there is a freezer, the namespace has a control group that contains all processes inside
//! except the init.

use crate::freezer::{ControlGroup, Freezer};
use crate::namespace_init;
use crate::sys::{self, Child, ExecPlan, StartError, StartGuard};
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

/// Namespaces kept ready; each costs a sleeping process.
const SPARE_MIN: usize = 4;
/// Most namespaces kept while tasks come and go.
const SPARE_MAX: usize = 64;
/// Time without a new task after which only [`SPARE_MIN`] namespaces are kept.
const SPARE_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Idle time after which spare namespaces are created.
const IDLE_DELAY: Duration = Duration::from_millis(1);

/// A namespace and its init. Dropping it ends all processes inside; the init must still be reaped.
#[derive(Debug)]
pub(crate) struct Namespace {
    init: Child,
    control: OwnedFd,
    inode: u64,
    /// The init was ordered to end.
    ending: Cell<bool>,
    /// The control group for the processes inside.
    group: Option<ControlGroup>,
    /// The processes inside are in the control group.
    in_group: Cell<bool>,
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
                control: ours,
                ending: Cell::new(false),
                group: freezer.and_then(|freezer| freezer.create_group().ok()),
                in_group: Cell::new(false),
            }),
            Err(error) => {
                sys::kill_pidfd(init.pidfd.as_fd());
                let _ = sys::reap_wait(init.pid);
                Err(error)
            }
        }
    }

    /// True if the tasker may create namespaces: it creates one and ends it.
    pub(crate) fn is_possible() -> bool {
        let Ok(namespace) = Namespace::new(None) else {
            return false;
        };
        namespace.kill();
        sys::reap_wait(namespace.init.pid).is_ok()
    }

    /// True once the init has ended, and with it all processes inside.
    pub(crate) fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(self.end_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..))
    }

    /// Becomes readable when the init has ended, and with it all processes inside.
    pub(crate) fn end_fd(&self) -> BorrowedFd<'_> {
        self.init.pidfd.as_fd()
    }

    /// Returns the inode number of the namespace, which identifies it in images.
    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    /// Opens the namespace, for the engine. Close the descriptor soon: a host has thousands of
    /// tasks and a limit on descriptors.
    ///
    /// # Errors
    /// The init has ended.
    pub(crate) fn open(&self) -> io::Result<OwnedFd> {
        Ok(File::open(namespace_path(&self.init))?.into())
    }

    /// Runs `make`; processes that it creates belong to this namespace.
    fn with_children_inside<T>(&self, make: impl FnOnce() -> T) -> io::Result<T> {
        let own = File::open("/proc/self/ns/pid")?;
        setns(self.open()?, CloneFlags::CLONE_NEWPID)?;
        let made = make();
        // A process can always return to its own namespace.
        setns(own, CloneFlags::CLONE_NEWPID)
            .expect("the way back into one's own namespace is open");
        Ok(made)
    }

    /// Starts a program inside, as a direct child of the tasker.
    ///
    /// # Errors
    /// As [`sys::start_program`].
    pub(crate) fn start(
        &self,
        plan: &ExecPlan<'_>,
        guard: &StartGuard,
    ) -> Result<Child, StartError> {
        self.start_in_group(|group| sys::start_program(plan, guard, group))
    }

    /// Starts a process inside that stops before its exec, as a direct child of the tasker.
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

    /// Creates a process inside, in the control group if possible.
    fn start_in_group(
        &self,
        make: impl Fn(Option<BorrowedFd<'_>>) -> Result<Child, StartError>,
    ) -> Result<Child, StartError> {
        let start = |group: Option<BorrowedFd<'_>>| {
            self.with_children_inside(|| make(group))
                .map_err(StartError::NoProcess)?
        };
        self.in_group.set(false);
        if let Some(folder) = self.group.as_ref().and_then(|group| group.open().ok()) {
            match start(Some(folder.as_fd())) {
                // The kernel refused this group; try without it.
                Err(StartError::NoProcess(_)) => {}
                other => {
                    self.in_group.set(true);
                    return other;
                }
            }
        }
        start(None)
    }

    /// Returns the control group if all processes inside are in it.
    pub(crate) fn group(&self) -> Option<&ControlGroup> {
        self.group.as_ref().filter(|_| self.in_group.get())
    }

    /// Returns the ids of all processes inside except the init.
    ///
    /// With a control group this reads the group's list. [`Namespace::pids`] scans all processes of
    /// the host; during such a scan, other tasks that must be stopped immediately would continue to
    /// run.
    pub(crate) fn members(&self) -> Vec<i32> {
        self.group()
            .and_then(|group| group.members().ok())
            .unwrap_or_else(|| self.pids())
    }

    /// Returns the file through which the processes inside can join the control group, if they were
    /// not created in it.
    pub(crate) fn group_to_join(&self) -> Option<PathBuf> {
        self.group
            .as_ref()
            .filter(|_| !self.in_group.get())
            .map(ControlGroup::procs_file)
    }

    /// Records that the processes inside have joined the control group.
    pub(crate) fn set_in_group(&self) {
        self.in_group.set(true);
    }

    /// Starts a process inside that only waits, in this directory.
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

    /// Kills all processes inside. First the children of the tasker among them, then the init must
    /// be reaped.
    pub(crate) fn kill(&self) {
        self.ending.set(true);
        sys::kill_pidfd(self.init.pidfd.as_fd());
    }

    /// True if the ended task left no process inside: the init adopts orphans, so it would have
    /// children.
    fn is_reusable(&self) -> bool {
        let children = format!("/proc/{0}/task/{0}/children", self.init.pid);
        !self.ending.get()
            && !self.has_ended()
            && std::fs::read(children).is_ok_and(|list| list.is_empty())
    }

    /// Orders the init to end as soon as the namespace is empty.
    pub(crate) fn end_when_empty(&self) {
        self.ending.set(true);
        // The pipe has space for the only byte it ever gets. A failure means that the init is gone.
        let _ = nix::unistd::write(&self.control, b"e");
    }

    /// Returns the ids of all processes inside except the init, as the tasker sees them.
    pub(crate) fn pids(&self) -> Vec<i32> {
        // After the init's end its pid may belong to another process.
        if !std::fs::metadata(namespace_path(&self.init))
            .is_ok_and(|about| about.st_ino() == self.inode)
        {
            return Vec::new();
        }
        let Ok(proc) = std::fs::read_dir("/proc") else {
            return Vec::new();
        };
        proc.flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
            .filter(|&pid| pid != self.init.pid)
            .filter(|pid| {
                std::fs::metadata(format!("/proc/{pid}/ns/pid"))
                    .is_ok_and(|m| m.st_ino() == self.inode)
            })
            .collect()
    }
}

/// Returns the path of an init's namespace in /proc. The pid is not reused before the init is
/// reaped.
fn namespace_path(init: &Child) -> String {
    format!("/proc/{}/ns/pid", init.pid)
}

/// Namespaces prepared for future tasks, so that starting a task does not wait for one. Namespaces
/// of tasks that left no process are reused, and a few are created in idle moments.
#[derive(Debug)]
pub(crate) struct SpareNamespaces {
    ready: Vec<Namespace>,
    /// When one was last taken.
    last_taken: Instant,
    /// The last attempt to create one failed; the start of the next task reports why.
    failed: bool,
}

impl SpareNamespaces {
    pub(crate) fn new() -> SpareNamespaces {
        SpareNamespaces {
            ready: Vec::new(),
            last_taken: Instant::now(),
            failed: false,
        }
    }

    /// Returns a namespace; creates one if none is ready.
    ///
    /// # Errors
    /// `EPERM` if the tasker may not create namespaces.
    pub(crate) fn take(&mut self, freezer: Option<&mut Freezer>) -> io::Result<Namespace> {
        (self.last_taken, self.failed) = (Instant::now(), false);
        while let Some(namespace) = self.ready.pop() {
            // Any privileged process may have killed the init.
            if !namespace.has_ended() {
                return Ok(namespace);
            }
        }
        Namespace::new(freezer)
    }

    /// Keeps the namespace of an ended task for reuse, or returns it if it cannot be reused.
    pub(crate) fn recycle(&mut self, namespace: Namespace) -> Option<Namespace> {
        if self.ready.len() >= SPARE_MAX || !namespace.is_reusable() {
            return Some(namespace);
        }
        namespace.in_group.set(false);
        self.ready.push(namespace);
        None
    }

    /// Returns the idle time after which [`SpareNamespaces::maintain`] must be called, if at all.
    pub(crate) fn check_delay(&self) -> Option<Duration> {
        match self.ready.len() {
            ready if ready < SPARE_MIN && !self.failed => Some(IDLE_DELAY),
            ready if ready > SPARE_MIN => Some(SPARE_IDLE_TIMEOUT),
            _ => None,
        }
    }

    /// Called when idle: creates a missing namespace, or ends those that were not needed for long.
    pub(crate) fn maintain(&mut self, freezer: Option<&mut Freezer>) {
        if self.ready.len() < SPARE_MIN {
            match Namespace::new(freezer) {
                // Inserted below namespaces that were used recently, which are taken first.
                Ok(namespace) => self.ready.insert(0, namespace),
                Err(_) => self.failed = true,
            }
        } else if self.last_taken.elapsed() >= SPARE_IDLE_TIMEOUT {
            self.ready.truncate(SPARE_MIN);
        }
    }
}
