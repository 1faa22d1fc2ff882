//! A PID namespace for each task. An idle init process, a child of the tasker, keeps the namespace
//! alive.
//!
//! A task that is restored in a new namespace can have its previous PIDs on any host. Killing the
//! init kills all processes in the namespace. Dumps do not include the init.
//!
//! If a freezer exists, each namespace has a control group in which its processes except the init
//! are created. A process with the right to do so can leave the group, but not the namespace.

use crate::census::{Census, CensusFailed};
use crate::freezer::{ControlGroup, Freezer};
use crate::last_pid;
use crate::namespace_init;
use crate::pid_numbering::{FirstPid, PidNumbering};
use crate::stop::{self, SeenStopped, TaskProcesses, VforkRule};
use crate::sys::{self, Child, ExecPlan, StartError, StartGuard};
use crate::task_user::with_own_file_rights;
use checkpoint::proc;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns};
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::linux::fs::MetadataExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

/// Number of spare namespaces that the idle tasker creates and keeps. Each spare namespace costs a
/// sleeping process.
const SPARE_NAMESPACES_MIN: usize = 4;
/// Maximum number of spare namespaces while tasks start and end.
const SPARE_NAMESPACES_MAX: usize = 64;
/// Time without a new task after which the tasker ends all spare namespaces except
/// [`SPARE_NAMESPACES_MIN`].
const SPARE_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
/// Idle time of the tasker after which it creates spare namespaces.
const SPARE_CREATION_DELAY: Duration = Duration::from_millis(1);

/// Interval at which the processes outside a control group are signalled while the group is not
/// frozen yet.
const OUTSIDE_SIGNAL_INTERVAL: Duration = Duration::from_millis(100);

/// The namespaces of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NamespaceKind {
    /// A PID namespace. The task sees the mounts and the `/proc` of the tasker.
    Pid,
    /// A PID namespace, and a mount namespace with the `/proc` of this PID namespace, for a task of
    /// an ordinary user. The engine runs inside both, which such a task requires.
    PidAndMount,
}

/// A PID namespace and its init. Dropping this value ends all processes in the namespace. The
/// caller must still reap the init.
#[derive(Debug)]
pub(crate) struct Namespace {
    kind: NamespaceKind,
    init: Child,
    /// Write end of the pipe from which the init reads the order to end.
    init_control: OwnedFd,
    inode: u64,
    /// True after the init was killed or ordered to end.
    end_requested: Cell<bool>,
    /// The control group for the processes in the namespace, if one could be created.
    group: Option<ControlGroup>,
    /// True if the processes in the namespace were created in the control group, or were added to
    /// it.
    members_in_group: Cell<bool>,
    /// The PID, in the namespace, of the first process of the task. `None` if the kernel chose it.
    first_pid: Cell<Option<i32>>,
    /// Processes that received SIGSTOP although the group is frozen: those outside it, and those
    /// that were signalled before it was frozen.
    stopped_outside: RefCell<BTreeSet<i32>>,
    /// Time at which the processes outside the control group were last ordered to stop.
    signalled_outside_at: Cell<Option<Instant>>,
}

impl Namespace {
    /// Creates a namespace that contains only its init, and a control group if `freezer` can create
    /// one. Must be called from the main thread: the kernel kills the init when the thread that
    /// created it ends.
    ///
    /// # Errors
    /// `EPERM` if the tasker may not create namespaces.
    pub(crate) fn new(kind: NamespaceKind, freezer: Option<&mut Freezer>) -> io::Result<Self> {
        let (control_reader, control_writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let init = match kind {
            NamespaceKind::Pid => namespace_init::start_init(control_reader.as_fd(), None)?,
            NamespaceKind::PidAndMount => {
                namespace_init::start_init_with_mounts(control_reader.as_fd())?
            }
        };
        match std::fs::metadata(namespace_path(&init)) {
            Ok(namespace_metadata) => Ok(Self {
                kind,
                inode: namespace_metadata.st_ino(),
                init,
                init_control: control_writer,
                end_requested: Cell::new(false),
                group: freezer.and_then(|freezer| freezer.create_group().ok()),
                members_in_group: Cell::new(false),
                first_pid: Cell::new(None),
                stopped_outside: RefCell::default(),
                signalled_outside_at: Cell::default(),
            }),
            Err(error) => {
                sys::kill_pidfd(init.pidfd.as_fd());
                let _ = sys::wait_and_reap(init.pid);
                Err(error)
            }
        }
    }

    /// Tests whether the tasker may create PID namespaces, by creating one. Returns the PIDs that
    /// namespaces allow; `None` if the tasker may not create namespaces.
    pub(crate) fn probe(kind: NamespaceKind) -> Option<PidNumbering> {
        let namespace = Self::new(kind, None).ok()?;
        let numbering = namespace.run_with_children_inside(PidNumbering::probe);
        namespace.kill_processes();
        sys::wait_and_reap(namespace.init.pid).ok()?;
        numbering.ok()
    }

    /// Sets the PID after which the kernel looks for the PID of the next process in the namespace.
    ///
    /// # Errors
    /// The kernel does not permit it, or no helper process can be created.
    pub(crate) fn set_last_pid(&self, pid: i32) -> io::Result<()> {
        let write_result =
            self.run_with_children_inside(|| last_pid::set_by_helper(pid, None))??;
        Ok(write_result?)
    }

    /// Returns the PID, in the namespace, of the first process of the task; `None` if the kernel
    /// chose it.
    pub(crate) fn first_pid(&self) -> Option<i32> {
        self.first_pid.get()
    }

    /// True if the init has ended; all other processes in the namespace have then ended, too.
    pub(crate) fn has_ended(&self) -> bool {
        let mut fds = [PollFd::new(self.init_pidfd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..))
    }

    /// Returns a descriptor that becomes readable when the init has ended. All other processes in
    /// the namespace have then ended, too.
    pub(crate) fn init_pidfd(&self) -> BorrowedFd<'_> {
        self.init.pidfd.as_fd()
    }

    /// Returns the inode number of the namespace, by which images identify the namespace.
    pub(crate) fn namespace_inode(&self) -> u64 {
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

    /// Opens the mount namespace; `None` if the task has that of the tasker.
    ///
    /// # Errors
    /// The init has ended.
    pub(crate) fn open_mount_namespace(&self) -> io::Result<Option<OwnedFd>> {
        match self.kind {
            NamespaceKind::Pid => Ok(None),
            NamespaceKind::PidAndMount => {
                let path = format!("/proc/{}/ns/mnt", self.init.pid);
                Ok(Some(File::open(path)?.into()))
            }
        }
    }

    /// Runs `create_process`, and returns its result. Processes that `create_process` creates are
    /// started in this namespace.
    fn run_with_children_inside<T>(&self, create_process: impl FnOnce() -> T) -> io::Result<T> {
        let own_namespace = File::open("/proc/self/ns/pid")?;
        setns(self.open()?, CloneFlags::CLONE_NEWPID)?;
        let create_result = create_process();
        // A process may always return to its own namespace.
        setns(own_namespace, CloneFlags::CLONE_NEWPID)
            .expect("the way back into one's own namespace is open");
        Ok(create_result)
    }

    /// Starts a program in the namespace, as a direct child of the tasker, with the PID `first_pid`
    /// if one is given.
    ///
    /// # Errors
    /// As [`sys::start_program`].
    pub(crate) fn start_program(
        &self,
        plan: ExecPlan<'_>,
        guard: &StartGuard,
        first_pid: Option<FirstPid>,
    ) -> Result<Child, StartError> {
        let mount_namespace = self.open_mount_namespace().map_err(StartError::NoProcess)?;
        let plan = plan.in_mount_namespace(mount_namespace);
        self.start_in_group(first_pid, |group, pid| {
            sys::start_program(&plan, guard, group, pid)
        })
    }

    /// Starts a process in the namespace as a direct child of the tasker, with the PID `first_pid`
    /// if one is given. The process waits before its exec.
    ///
    /// # Errors
    /// As [`sys::start_stopped_before_exec`].
    pub(crate) fn start_waiting(
        &self,
        plan: ExecPlan<'_>,
        first_pid: Option<FirstPid>,
    ) -> Result<Child, StartError> {
        let mount_namespace = self.open_mount_namespace().map_err(StartError::NoProcess)?;
        let plan = plan.in_mount_namespace(mount_namespace);
        self.start_in_group(first_pid, |group, pid| {
            sys::start_stopped_before_exec(&plan, group, pid)
        })
    }

    /// Creates a process in the namespace by calling `create_process`, which receives the control
    /// group and the PID. If the kernel refuses the group or the PID, `create_process` is called
    /// again without the PID, without the group, and without both. Records whether the processes in
    /// the namespace are members of the group, and the PID.
    fn start_in_group(
        &self,
        first_pid: Option<FirstPid>,
        create_process: impl Fn(Option<BorrowedFd<'_>>, Option<i32>) -> Result<Child, StartError>,
    ) -> Result<Child, StartError> {
        let set_pid = first_pid.filter(|pid| pid.is_set_by_clone());
        if let Some(first_pid) = first_pid.filter(|pid| !pid.is_set_by_clone()) {
            // If this fails, the kernel chooses the PID.
            let _ = self.set_last_pid(first_pid.pid() - 1);
        }
        let dir = self.group.as_ref().and_then(|group| group.open_dir().ok());
        let group = dir.as_ref().map(AsFd::as_fd);
        let mut attempts = creation_attempts(group, set_pid.map(FirstPid::pid)).into_iter();
        loop {
            let (group, pid) = attempts.next().expect("the last attempt returns");
            let create = || self.run_with_children_inside(|| create_process(group, pid));
            // Only root may create a process in the group.
            let creation_result = match group {
                Some(_) => with_own_file_rights(create),
                None => create(),
            };
            let creation_result = creation_result.map_err(StartError::NoProcess)?;
            match creation_result {
                Err(StartError::NoProcess(_)) if attempts.len() > 0 => {}
                other => {
                    self.members_in_group.set(group.is_some());
                    self.first_pid.set(pid);
                    return other;
                }
            }
        }
    }

    /// Returns the control group if the processes in the namespace were created in it or added to
    /// it; otherwise `None`. Processes may have left the group.
    pub(crate) fn complete_control_group(&self) -> Option<&ControlGroup> {
        self.group.as_ref().filter(|_| self.members_in_group.get())
    }

    /// Returns the PIDs of the processes in the namespace except the init.
    ///
    /// With a control group, the PIDs are read from the group, without the processes that have left
    /// it. [`Namespace::pids`] scans all processes of the host; during such a scan, tasks that must
    /// be stopped immediately would continue to run.
    pub(crate) fn member_pids(&self) -> Vec<i32> {
        self.member_pids_in(&Census::default())
    }

    /// Returns the path of the control group's file `cgroup.procs`. `None` if the namespace has no
    /// group, or if its processes are already members of the group.
    pub(crate) fn joinable_procs_file(&self) -> Option<PathBuf> {
        self.group
            .as_ref()
            .filter(|_| !self.members_in_group.get())
            .map(ControlGroup::procs_file)
    }

    /// Records that the processes in the namespace are members of the control group.
    pub(crate) fn record_group_membership(&self) {
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
        self.run_with_children_inside(|| {
            sys::start_idle_process(dir, stdin.as_fd(), output.as_fd())
        })?
    }

    /// Kills all processes in the namespace. The caller must first reap the tasker's children among
    /// them, then the init.
    pub(crate) fn kill_processes(&self) {
        self.end_requested.set(true);
        sys::kill_pidfd(self.init.pidfd.as_fd());
    }

    /// True if the namespace of an ended task contains no process except the init. `census` must
    /// be younger than the end of the task.
    fn is_reusable(&self, census: &Census) -> bool {
        !self.end_requested.get() && !self.has_ended() && !self.has_left_processes(census)
    }

    /// Orders the init to end as soon as the namespace contains no other process.
    pub(crate) fn end_when_empty(&self) {
        self.end_requested.set(true);
        // The write cannot block: the pipe never contains more than this byte. The write fails only
        // if the init has ended.
        let _ = nix::unistd::write(&self.init_control, b"e");
    }

    /// True if the namespace of an ended task contains processes except the init. `census` must be
    /// younger than the end of the task.
    ///
    /// The init adopts orphans, so one of the remaining processes is usually a child of the init.
    /// Processes that fork and exit again and again could be missing in the census. The census
    /// contains those that have another parent: the first process can create children of the tasker
    /// (CLONE_PARENT), and other programs can create processes in the namespace (setns).
    pub(crate) fn has_left_processes(&self, census: &Census) -> bool {
        let has_child = || proc::children(self.init.pid).is_none_or(|c| !c.is_empty());
        // The census may contain processes that were reaped meanwhile.
        let has_living = || {
            let pids = self.try_pids_in(census);
            pids.map_or(true, |pids| pids.iter().any(|pid| !stop::has_ended(*pid)))
        };
        !self.has_ended() && (has_child() || has_living())
    }

    /// Returns the PIDs of all processes in the namespace except the init, in the tasker's PID
    /// namespace.
    pub(crate) fn pids(&self) -> Vec<i32> {
        self.pids_in(&Census::default())
    }

    /// As [`Namespace::member_pids`]; a namespace without a control group uses the census.
    pub(crate) fn member_pids_in(&self, census: &Census) -> Vec<i32> {
        self.complete_control_group()
            .and_then(|group| group.member_pids().ok())
            .unwrap_or_else(|| self.pids_in(census))
    }

    /// As [`Namespace::pids`], from a census of the host; empty if the census has failed.
    pub(crate) fn pids_in(&self, census: &Census) -> Vec<i32> {
        self.try_pids_in(census).unwrap_or_default()
    }

    /// As [`Namespace::pids_in`]. An engine that runs inside the namespace is not included.
    ///
    /// # Errors
    /// The processes could not be read.
    pub(crate) fn try_pids_in(&self, census: &Census) -> Result<Vec<i32>, CensusFailed> {
        // After the init has ended, its PID may belong to another process.
        let metadata = proc::none_if_ended(std::fs::metadata(namespace_path(&self.init)))?;
        if metadata.is_none_or(|metadata| metadata.st_ino() != self.inode) {
            return Ok(Vec::new());
        }
        let mut pids = census.namespace_pids(self.inode)?;
        pids.retain(|&pid| pid != self.init.pid);
        if self.kind == NamespaceKind::PidAndMount {
            // The engine runs inside, too. The engine is root, and no process of the task can be.
            let is_of_user = |pid: i32| proc::status(pid).is_some_and(|status| status.euid != 0);
            pids.retain(|&pid| is_of_user(pid));
        }
        Ok(pids)
    }

    /// Returns the PIDs of the processes in the namespace that are not in its control group.
    ///
    /// # Errors
    /// The processes could not be read.
    pub(crate) fn pids_outside_group(&self, census: &Census) -> Result<Vec<i32>, CensusFailed> {
        let mut pids = self.try_pids_in(census)?;
        if let Some(group) = self.complete_control_group()
            // A group that was removed has no members.
            && let Some(group_pids) = proc::none_if_ended(group.member_pids())?
        {
            let group_pids: BTreeSet<i32> = group_pids.into_iter().collect();
            pids.retain(|pid| !group_pids.contains(pid));
        }
        Ok(pids)
    }

    /// Returns the control group if a freeze of the group has been requested; otherwise `None`.
    pub(crate) fn frozen_group(&self) -> Option<&ControlGroup> {
        self.complete_control_group()
            .filter(|group| group.is_freeze_requested())
    }

    /// Stops the processes outside the control group, whose freeze was requested, by SIGSTOP.
    /// Returns the processes outside if the group is frozen and each of them has stopped. The
    /// caller must repeat the call until then and until [`Namespace::is_frozen`] returns true.
    /// `census` must be younger than the freeze.
    pub(crate) fn signal_outside(
        &self,
        group: &ControlGroup,
        census: &Census,
    ) -> Option<SeenStopped> {
        // One process that waits in the kernel delays the freeze of the whole group. The processes
        // outside do not wait for that. While it lasts, they are looked for at intervals, because
        // a census costs more than the question whether the group is frozen.
        let was_just_signalled = self
            .signalled_outside_at
            .get()
            .is_some_and(|at| at.elapsed() < OUTSIDE_SIGNAL_INTERVAL);
        if was_just_signalled && !group.is_fully_frozen() {
            return None;
        }
        let seen = if self.pids_outside_group(census).ok()?.is_empty() {
            Some(SeenStopped::without_forks())
        } else {
            stop::signal_running(
                &TaskProcesses::OutsideGroup(self),
                census,
                &mut self.stopped_outside.borrow_mut(),
                VforkRule::ChildStops,
            )
        };
        let result = seen.filter(|_| group.is_fully_frozen());
        self.signalled_outside_at.set(Some(Instant::now()));
        result
    }

    /// Returns the processes that still run although the control group, whose freeze was requested,
    /// and the processes outside it were ordered to stop.
    pub(crate) fn unstopped_pids(&self, group: &ControlGroup, census: &Census) -> Vec<i32> {
        let outside_pids = self.pids_outside_group(census).unwrap_or_default();
        let mut pids = stop::running_pids(&outside_pids);
        if !group.is_fully_frozen() {
            pids.extend(stop::unfrozen_pids(
                &group.member_pids().unwrap_or_default(),
            ));
        }
        pids
    }

    /// True if the control group is frozen, and `seen` are all processes outside it.
    pub(crate) fn is_frozen(
        &self,
        group: &ControlGroup,
        seen: &SeenStopped,
        later_census: &Census,
    ) -> bool {
        seen.are_all(&TaskProcesses::OutsideGroup(self), later_census) && group.is_fully_frozen()
    }

    /// Returns the PIDs, in the namespace, of the processes outside the control group that were
    /// stopped by a signal before [`Namespace::signal_outside`].
    pub(crate) fn already_stopped_outside(&self, census: &Census) -> Vec<i32> {
        let mut pids = self.pids_outside_group(census).unwrap_or_default();
        pids.retain(|pid| !self.stopped_outside.borrow().contains(pid));
        stop::stopped_by_signal(&pids)
    }

    /// Records processes that have received SIGSTOP before the control group was frozen, so that
    /// [`Namespace::thaw`] continues them.
    pub(crate) fn record_signalled(&self, pids: impl IntoIterator<Item = i32>) {
        self.stopped_outside.borrow_mut().extend(pids);
    }

    /// Lets [`Namespace::signal_outside`] stop these processes again.
    pub(crate) fn forget_stopped_outside(&self, pids: &[i32]) {
        self.stopped_outside
            .borrow_mut()
            .retain(|pid| !pids.contains(pid));
    }

    /// Ends the effect of [`Namespace::signal_outside`]: thaws the group, and continues the
    /// processes outside it that received SIGSTOP. `census` must be younger than their stop.
    pub(crate) fn thaw(&self, census: &Census) {
        if let Some(group) = self.frozen_group() {
            group.thaw();
        }
        self.signalled_outside_at.set(None);
        let stopped_pids = std::mem::take(&mut *self.stopped_outside.borrow_mut());
        if stopped_pids.is_empty() {
            return;
        }
        // Another process may have the PID of a stopped process that was killed meanwhile.
        for pid in self
            .pids_in(census)
            .into_iter()
            .filter(|pid| stopped_pids.contains(pid))
        {
            let _ = sys::send_signal(pid, libc::SIGCONT);
        }
    }
}

/// Returns the control group and the PID of each attempt to create a process, without repetitions.
/// A PID that is in use, or that the kernel does not let the tasker choose, costs no group, without
/// which the task cannot be frozen.
fn creation_attempts<G: Copy>(group: Option<G>, pid: Option<i32>) -> Vec<(Option<G>, Option<i32>)> {
    let mut attempts = vec![(group, pid)];
    if pid.is_some() {
        attempts.push((group, None));
    }
    if group.is_some() {
        attempts.push((None, pid));
    }
    if group.is_some() && pid.is_some() {
        attempts.push((None, None));
    }
    attempts
}

/// Returns the path in /proc of the namespace of `init`. The path stays valid until the init is
/// reaped, because its PID is not reused before.
fn namespace_path(init: &Child) -> String {
    format!("/proc/{}/ns/pid", init.pid)
}

/// Spare namespaces for future tasks. With them, the start of a task does not wait for the creation
/// of a namespace.
///
/// Namespaces of ended tasks are reused if they are empty. The idle tasker creates missing
/// namespaces.
#[derive(Debug)]
pub(crate) struct SpareNamespaces {
    kind: NamespaceKind,
    namespaces: Vec<Namespace>,
    /// Time at which a task last took a namespace.
    last_taken_at: Instant,
    /// True if the last attempt to create a spare namespace failed. The idle tasker does not try
    /// again; the start of the next task does, and reports the error.
    creation_failed: bool,
}

impl SpareNamespaces {
    pub(crate) fn new(kind: NamespaceKind) -> Self {
        Self {
            kind,
            namespaces: Vec::new(),
            last_taken_at: Instant::now(),
            creation_failed: false,
        }
    }

    /// Returns a spare namespace, or creates one if no spare exists.
    ///
    /// # Errors
    /// `EPERM` if the tasker may not create namespaces.
    pub(crate) fn take_or_create(
        &mut self,
        freezer: Option<&mut Freezer>,
    ) -> io::Result<Namespace> {
        (self.last_taken_at, self.creation_failed) = (Instant::now(), false);
        while let Some(namespace) = self.namespaces.pop() {
            // The init may have been killed by another privileged process.
            if !namespace.has_ended() {
                return Ok(namespace);
            }
        }
        Namespace::new(self.kind, freezer)
    }

    /// Returns the kind of the namespaces of this tasker.
    pub(crate) fn kind(&self) -> NamespaceKind {
        self.kind
    }

    /// Adds the namespace of an ended task to the spare namespaces. Returns the namespace if it
    /// cannot be reused. `census` must be younger than the end of the task.
    pub(crate) fn recycle_namespace(
        &mut self,
        namespace: Namespace,
        census: &Census,
    ) -> Option<Namespace> {
        if self.namespaces.len() >= SPARE_NAMESPACES_MAX || !namespace.is_reusable(census) {
            return Some(namespace);
        }
        namespace.members_in_group.set(false);
        self.namespaces.push(namespace);
        None
    }

    /// Returns the idle time after which [`SpareNamespaces::adjust_spare_count`] must be called;
    /// `None` if no call is needed.
    pub(crate) fn maintenance_delay(&self) -> Option<Duration> {
        match self.namespaces.len() {
            spare_count if spare_count < SPARE_NAMESPACES_MIN && !self.creation_failed => {
                Some(SPARE_CREATION_DELAY)
            }
            spare_count if spare_count > SPARE_NAMESPACES_MIN => Some(SPARE_IDLE_TIMEOUT),
            _ => None,
        }
    }

    /// Creates one missing spare namespace, or ends the surplus namespaces after
    /// [`SPARE_IDLE_TIMEOUT`] without a new task. Must be called when the tasker is idle.
    pub(crate) fn adjust_spare_count(&mut self, freezer: Option<&mut Freezer>) {
        if self.namespaces.len() < SPARE_NAMESPACES_MIN {
            match Namespace::new(self.kind, freezer) {
                // Tasks take namespaces from the end of the list. The new namespace is inserted at
                // the start, so that recently used ones are taken first.
                Ok(namespace) => self.namespaces.insert(0, namespace),
                Err(_) => self.creation_failed = true,
            }
        } else if self.last_taken_at.elapsed() >= SPARE_IDLE_TIMEOUT {
            self.namespaces.truncate(SPARE_NAMESPACES_MIN);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The PID is given up before the control group, and each alone before both.
    #[test]
    fn refused_pid_costs_no_control_group() {
        let (group, pid) = (Some('g'), Some(7));
        assert_eq!(
            creation_attempts(group, pid),
            [(group, pid), (group, None), (None, pid), (None, None)]
        );
        assert_eq!(
            creation_attempts(group, None),
            [(group, None), (None, None)]
        );
        assert_eq!(creation_attempts::<char>(None, None), [(None, None)]);
    }

    /// The PID of the next process follows the one that was set. The kernel lets a tasker of root
    /// choose PIDs.
    #[test]
    #[ignore = "system tier: needs root and process-id namespaces"]
    fn next_process_has_the_chosen_pid() {
        let namespace = Namespace::new(NamespaceKind::Pid, None)
            .unwrap_or_else(|e| panic!("cannot run here: {e}"));
        let (dev_null, mut children) = (File::open("/dev/null").expect("there"), Vec::new());
        let mut start_idle = || {
            let child = namespace.start_idle_process(c"/", &dev_null, &dev_null);
            children.push(child.expect("started"));
            proc::innermost_pid(children.last().expect("one").pid)
        };
        namespace.set_last_pid(20_000).expect("permitted");
        assert_eq!((start_idle(), start_idle()), (Some(20_001), Some(20_002)));
        namespace.set_last_pid(300).expect("permitted");
        assert_eq!(start_idle(), Some(301));
        let numbering = Namespace::probe(NamespaceKind::Pid).expect("permitted");
        assert!(
            numbering
                .first_pid(sempa_proto::Tid::from_raw(0x40001))
                .is_some()
        );
        namespace.kill_processes();
        for child in children.iter().chain([&namespace.init]) {
            sys::wait_and_reap(child.pid).expect("a child");
        }
    }
}
