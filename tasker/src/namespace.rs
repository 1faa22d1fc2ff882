//! A process-id namespace for one task, held by an idle init that is a child of the tasker.
//!
//! Inside, a task's process numbers never collide with those of another host, so it can be rebuilt anywhere; and killing
//! the init kills whatever is inside for sure. The init takes no part in dumps.
//!
//! Where there is a freezer, a control group belongs to the namespace: everybody inside is in it but the init.

use crate::freezer::{ControlGroup, Freezer};
use crate::init;
use crate::sys::{self, Child, ExecPlan, NotStarted, StartGuard};
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

/// Namespaces that should lie ready; each costs a sleeping process.
const SPARE_MIN: usize = 4;
/// So many are kept while tasks come and go.
const SPARE_MAX: usize = 64;
/// After so long without a new task only the fewest are kept.
const SPARE_TIME: Duration = Duration::from_secs(60);
/// Nothing to do for so long is a quiet moment.
const QUIET: Duration = Duration::from_millis(1);

/// A namespace and its init. Dropping it ends everybody inside; the init itself still has to be reaped.
#[derive(Debug)]
pub(crate) struct Namespace {
    init: Child,
    /// Our end of the init's control pipe.
    control: OwnedFd,
    inode: u64,
    /// It was told to end.
    doomed: Cell<bool>,
    /// For those inside.
    group: Option<ControlGroup>,
    /// They are in it.
    joined: Cell<bool>,
}

impl Namespace {
    /// Makes a namespace with nobody but its init inside, and a control group for those to come if there is a freezer and it can
    /// make one. To be called from the main thread, whose death kills the init.
    ///
    /// # Errors
    /// `EPERM` without the right to make namespaces.
    pub(crate) fn new(freezer: Option<&mut Freezer>) -> io::Result<Namespace> {
        let (theirs, ours) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let init = init::start(theirs.as_fd(), None)?;
        match std::fs::metadata(path_of(&init)) {
            Ok(about) => Ok(Namespace {
                inode: about.st_ino(),
                init,
                control: ours,
                doomed: Cell::new(false),
                group: freezer.and_then(|freezer| freezer.group().ok()),
                joined: Cell::new(false),
            }),
            Err(error) => {
                sys::kill_by(init.pidfd.as_fd());
                let _ = sys::reap_wait(init.pid);
                Err(error)
            }
        }
    }

    /// True if the tasker may make namespaces: it makes one and ends it.
    pub(crate) fn possible() -> bool {
        let Ok(namespace) = Namespace::new(None) else {
            return false;
        };
        namespace.kill();
        sys::reap_wait(namespace.init.pid).is_ok()
    }

    /// True once the init has ended, and with it everybody inside.
    pub(crate) fn is_over(&self) -> bool {
        let mut fds = [PollFd::new(self.ended(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..))
    }

    /// Becomes readable when the init has ended, and with it everybody inside.
    pub(crate) fn ended(&self) -> BorrowedFd<'_> {
        self.init.pidfd.as_fd()
    }

    /// Inode number of the namespace, which names it in images.
    pub(crate) fn inode(&self) -> u64 {
        self.inode
    }

    /// The namespace itself, to be named to the engine. Nobody keeps it open for long: a host has thousands of tasks and
    /// a limit of descriptors.
    ///
    /// # Errors
    /// Its init has ended.
    pub(crate) fn open(&self) -> io::Result<OwnedFd> {
        Ok(File::open(path_of(&self.init))?.into())
    }

    /// Runs `make` so that the process it makes belongs to this namespace.
    fn inside<T>(&self, make: impl FnOnce() -> T) -> io::Result<T> {
        let own = File::open("/proc/self/ns/pid")?;
        setns(self.open()?, CloneFlags::CLONE_NEWPID)?;
        let made = make();
        // A process can always name its own namespace again as that of its children.
        setns(own, CloneFlags::CLONE_NEWPID)
            .expect("the way back into one's own namespace is open");
        Ok(made)
    }

    /// Starts a program inside; a direct child of the tasker.
    ///
    /// # Errors
    /// As [`sys::start_program`].
    pub(crate) fn start(
        &self,
        plan: &ExecPlan<'_>,
        guard: &StartGuard,
    ) -> Result<Child, NotStarted> {
        self.start_by(|group| sys::start_program(plan, guard, group))
    }

    /// Starts a process inside that waits before it becomes a program; a direct child of the tasker.
    ///
    /// # Errors
    /// As [`sys::start_waiting`].
    pub(crate) fn start_waiting(
        &self,
        plan: &ExecPlan<'_>,
        allowed: Duration,
    ) -> Result<Child, NotStarted> {
        self.start_by(|group| sys::start_waiting(plan, allowed, group))
    }

    /// Makes a process inside, in the control group if there is one.
    fn start_by(
        &self,
        make: impl Fn(Option<BorrowedFd<'_>>) -> Result<Child, NotStarted>,
    ) -> Result<Child, NotStarted> {
        let start = |group: Option<BorrowedFd<'_>>| {
            self.inside(|| make(group)).map_err(NotStarted::NoProcess)?
        };
        self.joined.set(false);
        if let Some(folder) = self.group.as_ref().and_then(|group| group.open().ok()) {
            match start(Some(folder.as_fd())) {
                // Not in this group, but perhaps without.
                Err(NotStarted::NoProcess(_)) => {}
                other => {
                    self.joined.set(true);
                    return other;
                }
            }
        }
        start(None)
    }

    /// The control group that everybody inside is in, if there is one.
    pub(crate) fn group(&self) -> Option<&ControlGroup> {
        self.group.as_ref().filter(|_| self.joined.get())
    }

    /// Numbers of everybody inside but the init; where there is a control group, as that has them. [`Namespace::pids`] looks at
    /// everybody on the host, and while the tasker does that for one task, others that have to be stopped at once run on.
    pub(crate) fn members(&self) -> Vec<i32> {
        self.group()
            .and_then(|group| group.members().ok())
            .unwrap_or_else(|| self.pids())
    }

    /// Where those inside, who were not born in the namespace's control group, can be brought into it.
    pub(crate) fn entrance(&self) -> Option<PathBuf> {
        self.group
            .as_ref()
            .filter(|_| !self.joined.get())
            .map(ControlGroup::entrance)
    }

    /// They were brought in.
    pub(crate) fn joined(&self) {
        self.joined.set(true);
    }

    /// Starts a process inside that only waits, in this directory.
    ///
    /// # Errors
    /// What the system said.
    pub(crate) fn start_sleeper(
        &self,
        dir: &CStr,
        stdin: &impl AsFd,
        output: &impl AsFd,
    ) -> io::Result<Child> {
        self.inside(|| sys::start_sleeper(dir, stdin.as_fd(), output.as_fd()))?
    }

    /// Kills everybody inside. The children among them, then the init, still have to be reaped, in this order.
    pub(crate) fn kill(&self) {
        self.doomed.set(true);
        sys::kill_by(self.init.pidfd.as_fd());
    }

    /// True if the task that was started inside, which has ended, left nobody there: whoever has lost his parent is a child
    /// of the init.
    fn is_deserted(&self) -> bool {
        let children = format!("/proc/{0}/task/{0}/children", self.init.pid);
        !self.doomed.get()
            && !self.is_over()
            && std::fs::read(children).is_ok_and(|list| list.is_empty())
    }

    /// Tells the init to end as soon as nobody else is inside.
    pub(crate) fn end_when_empty(&self) {
        self.doomed.set(true);
        // The pipe has room for the single byte it ever gets; if the init is gone there is nothing to tell.
        let _ = nix::unistd::write(&self.control, b"e");
    }

    /// Process numbers of everybody inside but the init, as the tasker sees them.
    pub(crate) fn pids(&self) -> Vec<i32> {
        // An ended namespace is empty, and its number may be another's by now.
        if !std::fs::metadata(path_of(&self.init)).is_ok_and(|about| about.st_ino() == self.inode) {
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

/// Where the kernel shows the namespace of an init. The number is its own until it is reaped.
fn path_of(init: &Child) -> String {
    format!("/proc/{}/ns/pid", init.pid)
}

/// Namespaces for tasks to come: a task that is to start now does not wait for one. Those of tasks that left nobody behind
/// are used again, and a few are made in quiet moments.
#[derive(Debug)]
pub(crate) struct Spare {
    ready: Vec<Namespace>,
    /// When one was last taken.
    used: Instant,
    /// The last attempt to make one failed; the next task will say why.
    failed: bool,
}

impl Spare {
    /// None yet.
    pub(crate) fn new() -> Spare {
        Spare {
            ready: Vec::new(),
            used: Instant::now(),
            failed: false,
        }
    }

    /// A namespace, made now if none lies ready.
    ///
    /// # Errors
    /// `EPERM` without the right to make namespaces.
    pub(crate) fn take(&mut self, freezer: Option<&mut Freezer>) -> io::Result<Namespace> {
        (self.used, self.failed) = (Instant::now(), false);
        while let Some(namespace) = self.ready.pop() {
            // Anybody with the right to do so may have killed the init.
            if !namespace.is_over() {
                return Ok(namespace);
            }
        }
        Namespace::new(freezer)
    }

    /// Keeps the namespace of a task that has ended for another one; gives it back if it is of no use for that.
    pub(crate) fn keep(&mut self, namespace: Namespace) -> Option<Namespace> {
        if self.ready.len() >= SPARE_MAX || !namespace.is_deserted() {
            return Some(namespace);
        }
        namespace.joined.set(false);
        self.ready.push(namespace);
        None
    }

    /// How long after the last event [`Spare::tend`] should be called, if at all.
    pub(crate) fn pause(&self) -> Option<Duration> {
        match self.ready.len() {
            ready if ready < SPARE_MIN && !self.failed => Some(QUIET),
            ready if ready > SPARE_MIN => Some(SPARE_TIME),
            _ => None,
        }
    }

    /// In a quiet moment: makes one that is missing, or ends those that nobody has needed for long.
    pub(crate) fn tend(&mut self, freezer: Option<&mut Freezer>) {
        if self.ready.len() < SPARE_MIN {
            match Namespace::new(freezer) {
                // Below those that have been in use just now.
                Ok(namespace) => self.ready.insert(0, namespace),
                Err(_) => self.failed = true,
            }
        } else if self.used.elapsed() >= SPARE_TIME {
            self.ready.truncate(SPARE_MIN);
        }
    }
}
