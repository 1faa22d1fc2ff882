//! System calls that neither std nor nix offers: creating processes, waiting with resource usage,
//! and the steps of a new process before its exec.
//!
//! The tasker may have threads when it creates a process, so the new process must neither allocate
//! nor take a lock. All data that the process needs is in an [`ExecPlan`] that was created before.
//!
//! Until its exec, a new process shares the tasker's memory (as after `vfork`), because copying the
//! memory costs more than all other steps of a start. The calling thread is suspended until the
//! exec; [`StartGuard`] limits that time.
#![allow(unsafe_code)] // Raw process creation has no safe interface.

use crate::clone_vfork::{self, SetTid};
use crate::last_pid::LastPid;
use crate::task_user::TaskUser;
use checkpoint::capabilities::CapabilitySet;
use checkpoint::facts::EnginePlace;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{SigHandler, Signal};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};
use nix::sys::wait::{Id, WaitPidFlag, WaitStatus, waitid};
use nix::unistd::Pid;
use sempa_proto::Micros;
use sempa_proto::migration::Usage;
use std::cell::Cell;
use std::ffi::{CStr, CString, c_char};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Size in bytes of the stack of a new process until its exec. The process makes only a few system
/// calls.
const CHILD_STACK_BYTES: usize = 32 << 10;
/// Highest signal number of Linux.
const SIGNAL_MAX: i32 = 64;
/// Size of the kernel's `struct sigaction` in machine words.
const SIGACTION_WORDS: usize = 4;
/// Poll interval while waiting for a new process to stop.
const STOP_POLL_INTERVAL: Duration = Duration::from_micros(100);
const NO_FD: RawFd = -1;

/// A process that was created by the tasker and not reaped yet.
#[derive(Debug)]
pub(crate) struct Child {
    /// PID of the process in the tasker's PID namespace.
    pub(crate) pid: i32,
    /// Descriptor that becomes readable when the process ends.
    pub(crate) pidfd: OwnedFd,
}

/// The step at which the start of a new process failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExecStage {
    /// Entering the mount namespace.
    MountNamespace,
    /// Taking on the ids, groups and limits of the user.
    User,
    /// Setting up the standard descriptors.
    StandardDescriptors,
    /// Changing to the working directory.
    WorkingDir,
    /// The exec of the program.
    Exec,
    /// Checking that the program can be executed. Only a process that stops before its exec has
    /// this step.
    ProgramCheck,
}

/// Exit status of a process whose exec failed, or that failed earlier and has recorded the error in
/// its plan.
const STATUS_NOT_STARTED: i32 = 1;
/// Smallest exit status that encodes a failed check of the program. Its lower bits contain the
/// errno.
const STATUS_PROGRAM_ERROR_BASE: i32 = 0x80;
/// Exit status of a process that failed while it set up the standard descriptors. The errno is
/// lost.
const STATUS_STDIO_ERROR: i32 = 0x7f;
/// As [`STATUS_STDIO_ERROR`], while it took on the ids of the user.
const STATUS_USER_ERROR: i32 = 0x7e;
/// As [`STATUS_STDIO_ERROR`], while it entered the mount namespace.
const STATUS_MOUNT_ERROR: i32 = 0x7d;

impl ExecError {
    /// Encodes the error as an exit status. The errno of a failed access to a file or directory is
    /// small enough for this encoding.
    fn exit_status(self) -> i32 {
        match self.stage {
            ExecStage::StandardDescriptors => STATUS_STDIO_ERROR,
            ExecStage::User => STATUS_USER_ERROR,
            ExecStage::MountNamespace => STATUS_MOUNT_ERROR,
            ExecStage::WorkingDir => (self.errno as i32).min(STATUS_MOUNT_ERROR - 1),
            ExecStage::ProgramCheck => {
                STATUS_PROGRAM_ERROR_BASE | (self.errno as i32).min(STATUS_STDIO_ERROR)
            }
            ExecStage::Exec => STATUS_NOT_STARTED,
        }
    }

    /// Decodes an exit status of [`ExecError::exit_status`].
    fn from_exit_status(status: i32) -> Self {
        let (stage, errno) = match status {
            STATUS_STDIO_ERROR => (ExecStage::StandardDescriptors, Errno::UnknownErrno),
            STATUS_USER_ERROR => (ExecStage::User, Errno::UnknownErrno),
            STATUS_MOUNT_ERROR => (ExecStage::MountNamespace, Errno::UnknownErrno),
            STATUS_PROGRAM_ERROR_BASE.. => (
                ExecStage::ProgramCheck,
                Errno::from_raw(status & !STATUS_PROGRAM_ERROR_BASE),
            ),
            _ => (ExecStage::WorkingDir, Errno::from_raw(status)),
        };
        Self { stage, errno }
    }
}

/// The reason why a new process could not execute its program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ExecError {
    pub(crate) stage: ExecStage,
    pub(crate) errno: Errno,
}

/// A program with its arguments and environment, in the form that `execve` requires.
#[derive(Debug)]
pub(crate) struct Program {
    path: CString,
    dir: CString,
    argv: Vec<CString>,
    env: Vec<CString>,
}

/// A string of a program contains a zero byte. `execve` would truncate the string there. The value
/// names the string.
#[derive(Debug, thiserror::Error)]
#[error("{0} contains a zero byte")]
pub(crate) struct ZeroByteError(&'static str);

impl Program {
    /// Copies the strings into a new value.
    ///
    /// # Errors
    /// A string contains a zero byte.
    pub(crate) fn new(
        path: &Path,
        dir: &Path,
        argv: &[Vec<u8>],
        env: &[Vec<u8>],
    ) -> Result<Self, ZeroByteError> {
        let to_c_strings = |list: &[Vec<u8>], string_role| -> Result<Vec<CString>, ZeroByteError> {
            list.iter()
                .map(|s| CString::new(s.as_slice()).map_err(|_| ZeroByteError(string_role)))
                .collect()
        };
        Ok(Self {
            path: CString::new(path.as_os_str().as_bytes())
                .map_err(|_| ZeroByteError("the program's path"))?,
            dir: CString::new(dir.as_os_str().as_bytes())
                .map_err(|_| ZeroByteError("the working directory"))?,
            argv: to_c_strings(argv, "an argument")?,
            env: to_c_strings(env, "an environment string")?,
        })
    }
}

/// All data that a new process needs until its exec. The plan is created before the process.
pub(crate) struct ExecPlan<'a> {
    program: &'a Program,
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    stdin_fd: RawFd,
    output_fd: RawFd,
    /// The mount namespace that the process enters; `None` if it stays in that of the tasker.
    mount_namespace: Option<OwnedFd>,
    task_start_state: &'a TaskStartState,
    /// True if the kernel must kill the process when the tasker dies. False for processes in a
    /// namespace, which are killed with the namespace.
    die_with_parent: bool,
    /// True if the process must stop before its exec and close all descriptors except those of the
    /// program.
    wait_before_exec: bool,
    /// The number after which the PIDs of the process's children begin: its own PID. `None` if the
    /// kernel has chosen the PID.
    last_pid: Option<LastPid>,
    /// Time limit of the start, in which the calling thread is blocked.
    time_limit: Duration,
    /// The error of a failed start. The new process writes it into the memory that it shares with
    /// the tasker.
    error: Cell<Option<ExecError>>,
}

impl<'a> ExecPlan<'a> {
    /// Creates a plan. The descriptors must stay open until the plan is executed.
    pub(crate) fn new(
        program: &'a Program,
        stdin: BorrowedFd<'_>,
        output: BorrowedFd<'_>,
        start_state: &'a TaskStartState,
        die_with_parent: bool,
        time_limit: Duration,
    ) -> Self {
        let pointers = |list: &[CString]| {
            list.iter()
                .map(|s| s.as_ptr())
                .chain(std::iter::once(std::ptr::null()))
                .collect::<Vec<_>>()
        };
        ExecPlan {
            argv: pointers(&program.argv),
            env: pointers(&program.env),
            program,
            stdin_fd: stdin.as_raw_fd(),
            output_fd: output.as_raw_fd(),
            mount_namespace: None,
            task_start_state: start_state,
            die_with_parent,
            wait_before_exec: false,
            last_pid: None,
            time_limit,
            error: Cell::new(None),
        }
    }

    /// Makes the PIDs of the children follow `first_pid`, the PID of the process in its namespace.
    pub(crate) fn numbering_children_from(mut self, first_pid: Option<i32>) -> Self {
        self.last_pid = first_pid.map(LastPid::new);
        self
    }

    /// Makes the process enter a mount namespace, if one is given.
    pub(crate) fn in_mount_namespace(mut self, mount_namespace: Option<OwnedFd>) -> Self {
        self.mount_namespace = mount_namespace;
        self
    }

    /// Makes the process stop before its exec; see [`start_stopped_before_exec`].
    pub(crate) fn stopping_before_exec(mut self) -> Self {
        self.wait_before_exec = true;
        self
    }
}

/// The limits and signal actions with which a task must start. They differ from those of the
/// tasker.
#[derive(Debug)]
pub(crate) struct TaskStartState {
    /// The limit on open descriptors with which the tasker was started. Tasks start with the same
    /// limit.
    descriptor_limit: libc::rlimit,
    /// Signals that the tasker ignores, and that a task must not ignore. `execve` itself resets all
    /// signals with a handler.
    ignored_signals: Vec<i32>,
    /// The user that tasks belong to; `None` for the user of the tasker.
    user: Option<TaskUser>,
}

impl TaskStartState {
    /// Raises the tasker's limit on open descriptors to the hard limit, because the tasker needs a
    /// few for each task. Records the state with which tasks start. Must be called after the tasker
    /// has set the signals that it ignores.
    ///
    /// # Errors
    /// A system call failed.
    pub(crate) fn prepare(user: Option<TaskUser>) -> io::Result<Self> {
        let (soft_limit, hard_limit) = getrlimit(Resource::RLIMIT_NOFILE)?;
        nix::sys::resource::setrlimit(Resource::RLIMIT_NOFILE, hard_limit, hard_limit)?;
        let descriptor_limit = libc::rlimit {
            rlim_cur: soft_limit,
            rlim_max: hard_limit,
        };
        Ok(Self {
            descriptor_limit,
            ignored_signals: (1..=SIGNAL_MAX)
                .filter(|signal| signal_is_ignored(*signal))
                .collect(),
            user,
        })
    }

    /// Returns where the engine runs that dumps and restores tasks.
    pub(crate) fn engine_place(&self) -> EnginePlace {
        self.user
            .as_ref()
            .map_or(EnginePlace::Outside, |user| EnginePlace::Inside {
                uid: user.uid(),
                gid: user.gid(),
            })
    }

    /// Returns the user that tasks belong to; `None` for the user of the tasker.
    pub(crate) fn user(&self) -> Option<&TaskUser> {
        self.user.as_ref()
    }
}

fn signal_is_ignored(signal: i32) -> bool {
    let mut action = [0usize; SIGACTION_WORDS];
    // A raw system call: the C library hides the signals that it uses itself.
    //
    // SAFETY: the kernel writes its `struct sigaction`, which has [`SIGACTION_WORDS`] words and
    // begins with the handler.
    let result = unsafe {
        libc::syscall(
            libc::SYS_rt_sigaction,
            signal,
            std::ptr::null::<u8>(),
            action.as_mut_ptr(),
            8,
        )
    };
    result == 0 && action[0] == libc::SIG_IGN
}

/// Creates a process like `fork`, with the additional clone flags `flags`, in the control group
/// `group` if one is given, and with the PID `namespace_pid` in its own PID namespace if one is
/// given. Returns `None` in the new process.
///
/// # Safety
/// The new process must not allocate, lock, or return from the caller's scope.
pub(crate) unsafe fn clone3(
    flags: i32,
    group: Option<BorrowedFd<'_>>,
    namespace_pid: Option<i32>,
) -> io::Result<Option<Child>> {
    let mut pidfd: RawFd = -1;
    let set_tid = SetTid::new(namespace_pid);
    let group_flag = group.map_or(0, |_| clone_vfork::CLONE_INTO_CGROUP);
    let args = libc::clone_args {
        flags: (flags | libc::CLONE_PIDFD) as u64 | group_flag,
        pidfd: &raw mut pidfd as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: set_tid.address(),
        set_tid_size: set_tid.count(),
        cgroup: group.map_or(0, |group_dir| group_dir.as_raw_fd() as u64),
    };
    // SAFETY: without CLONE_VM and without a stack this behaves like fork; `args` and `set_tid`
    // live through the call and the kernel may write to `pidfd`. The caller guarantees what the
    // child does.
    let pid = unsafe {
        libc::syscall(
            libc::SYS_clone3,
            &raw const args,
            size_of::<libc::clone_args>(),
        )
    };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        pid => Ok(Some(Child {
            pid: pid as i32,
            // SAFETY: the kernel has just made this descriptor; nothing else owns it.
            pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) },
        })),
    }
}

/// The reason why a program could not be started.
#[derive(Debug)]
pub(crate) enum StartError {
    /// No process could be created.
    NoProcess(io::Error),
    /// The process could not execute the program, and has ended.
    Failed(ExecError),
    /// The process was killed because its exec took longer than this time limit.
    TimedOut(Duration),
}

/// Creates a process that executes the program of `plan`. The process is created in the PID
/// namespace that is set for the calling thread's children, with the PID `namespace_pid` there, and
/// in the control group `group`; each if one is given. Returns after the exec.
///
/// # Errors
/// The reason of the failure. If a process was created, it has ended but was not reaped.
pub(crate) fn start_program(
    plan: &ExecPlan<'_>,
    guard: &StartGuard,
    group: Option<BorrowedFd<'_>>,
    namespace_pid: Option<i32>,
) -> Result<Child, StartError> {
    let mut stack = vec![0u128; CHILD_STACK_BYTES / size_of::<u128>()];
    let guarded_start = guard
        .start_timer(plan.time_limit)
        .map_err(StartError::NoProcess)?;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    // SAFETY: the new process runs `exec_child` on its own stack. The stack and the plan outlive
    // their use by the new process: this thread continues only after the exec or the end of that
    // process. The kernel writes the pidfd to the address that the guard reads.
    let creation_result = unsafe {
        let plan = std::ptr::from_ref(plan).cast_mut().cast();
        match (group, namespace_pid) {
            (Some(_), _) | (_, Some(_)) => clone_vfork::clone_vfork(
                exec_child,
                plan,
                &mut stack,
                guard.pidfd_pointer(),
                group,
                namespace_pid,
            ),
            (None, None) => {
                let stack_top = stack.as_mut_ptr_range().end;
                match libc::clone(
                    exec_child,
                    stack_top.cast(),
                    flags,
                    plan,
                    guard.pidfd_pointer(),
                ) {
                    -1 => Err(io::Error::last_os_error()),
                    pid => Ok(pid),
                }
            }
        }
    };
    let pidfd = guarded_start.stop_timer();
    let pid = match creation_result {
        Ok(pid) => pid,
        Err(failure) => {
            // `pidfd` is the number of a descriptor that the kernel has already closed, so it must
            // not be closed again.
            let _ = pidfd.map(OwnedFd::into_raw_fd);
            return Err(StartError::NoProcess(failure));
        }
    };
    match (pidfd, plan.error.get()) {
        (None, _) => Err(StartError::TimedOut(plan.time_limit)),
        (Some(_), Some(error)) => Err(StartError::Failed(error)),
        (Some(pidfd), None) => Ok(Child { pid, pidfd }),
    }
}

/// Creates a process that stops before its exec, and that executes the program of `plan` at the
/// next SIGCONT. The plan must be created by [`ExecPlan::stopping_before_exec`]. The process has a
/// copy of the tasker's memory while it is stopped; in [`start_program`] it shares the memory.
/// Returns when the process has stopped.
///
/// # Errors
/// The reason of the failure. If a process was created, it has ended or was killed, but was not
/// reaped.
pub(crate) fn start_stopped_before_exec(
    plan: &ExecPlan<'_>,
    group: Option<BorrowedFd<'_>>,
    namespace_pid: Option<i32>,
) -> Result<Child, StartError> {
    // SAFETY: the new process immediately calls `exec_child`, which makes only async-signal-safe
    // calls and never returns; the copy of the plan lives as long as the process does.
    let child = match unsafe { clone3(0, group, namespace_pid) }.map_err(StartError::NoProcess)? {
        Some(child) => child,
        // SAFETY: this is the new process.
        None => unsafe { libc::_exit(exec_child(std::ptr::from_ref(plan).cast_mut().cast())) },
    };
    let deadline = Instant::now() + plan.time_limit;
    loop {
        let wait_flags = WaitPidFlag::WEXITED
            | WaitPidFlag::WSTOPPED
            | WaitPidFlag::WNOHANG
            | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(Pid::from_raw(child.pid)), wait_flags) {
            Ok(WaitStatus::Stopped(..)) => return Ok(child),
            Ok(WaitStatus::Exited(_, status)) => {
                return Err(StartError::Failed(ExecError::from_exit_status(status)));
            }
            Ok(WaitStatus::Signaled(..)) | Err(_) => {
                return Err(StartError::TimedOut(plan.time_limit));
            }
            Ok(_) if Instant::now() >= deadline => {
                kill_pidfd(child.pidfd.as_fd());
                return Err(StartError::TimedOut(plan.time_limit));
            }
            Ok(_) => std::thread::sleep(STOP_POLL_INTERVAL),
        }
    }
}

/// Creates a process that sleeps in the directory `dir`, for the probe of the engine. Returns after
/// the process has closed all descriptors of the tasker.
///
/// # Errors
/// Those of `clone3`.
pub(crate) fn start_idle_process(
    dir: &CStr,
    stdin: BorrowedFd<'_>,
    output: BorrowedFd<'_>,
) -> io::Result<Child> {
    let (stdin, output) = (stdin.as_raw_fd(), output.as_raw_fd());
    // End of file on this pipe shows that the child has closed all descriptors of the tasker, among
    // them its end of the pipe.
    let (ready_reader, child_writer) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    // SAFETY: the new process only makes async-signal-safe calls and never leaves this block.
    match unsafe { clone3(0, None, None) }? {
        Some(child) => {
            drop(child_writer);
            while nix::unistd::read(&ready_reader, &mut [0u8]) == Err(Errno::EINTR) {}
            Ok(child)
        }
        // SAFETY: as above; dup2, close_range, setsid and pause access no memory of the tasker.
        None => unsafe {
            libc::setsid();
            libc::chdir(dir.as_ptr());
            libc::dup2(stdin, 0);
            libc::dup2(output, 1);
            libc::dup2(output, 2);
            libc::syscall(libc::SYS_close_range, 3, u32::MAX, 0);
            loop {
                libc::pause();
            }
        },
    }
}

/// Executes the program of `plan`. If the exec fails, records the reason and exits with status 1,
/// like PVM's daemon. Must be called only in a process that was created by [`start_program`] or
/// [`start_stopped_before_exec`]; makes only async-signal-safe calls.
extern "C" fn exec_child(plan: *mut libc::c_void) -> i32 {
    // SAFETY: the pointer refers to the creator's plan, which no other code accesses until this
    // process has ended or executed its program.
    let plan = unsafe { &*plan.cast::<ExecPlan<'_>>() };
    // SAFETY: plain system calls; all pointers come from strings that the plan keeps alive.
    unsafe {
        if let Some(last_pid) = &plan.last_pid {
            // If this fails, the children have the first PIDs of the namespace.
            let _ = last_pid.write();
        }
        libc::setsid();
        if let Some(mount_namespace) = &plan.mount_namespace
            && libc::setns(mount_namespace.as_raw_fd(), libc::CLONE_NEWNS) != 0
        {
            exit_child_with_error(plan, ExecStage::MountNamespace);
        }
        if !set_up_standard_descriptors(plan) {
            exit_child_with_error(plan, ExecStage::StandardDescriptors);
        }
        // A process that stops before its exec closes all other descriptors now, because other code
        // may wait until they are closed.
        let close_flags = if plan.wait_before_exec {
            0
        } else {
            libc::CLOSE_RANGE_CLOEXEC
        };
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, close_flags);
        match &plan.task_start_state.user {
            Some(user) => {
                if !user.become_user() {
                    exit_child_with_error(plan, ExecStage::User);
                }
            }
            None => {
                libc::setrlimit(
                    libc::RLIMIT_NOFILE,
                    &raw const plan.task_start_state.descriptor_limit,
                );
            }
        }
        // After the change of the user, which clears this setting.
        if plan.die_with_parent {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        }
        // As the user, who may have no access to the directory, or the only one.
        if libc::chdir(plan.program.dir.as_ptr()) != 0 {
            exit_child_with_error(plan, ExecStage::WorkingDir);
        }
        // A raw system call: the C library refuses to change the signals that it uses internally. A
        // zeroed structure selects the default action.
        let default_action = [0usize; SIGACTION_WORDS];
        for &signal in &plan.task_start_state.ignored_signals {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default_action.as_ptr(),
                std::ptr::null::<u8>(),
                8,
            );
        }
        // Tasks ignore these signals, like the tasks of PVM's daemon.
        libc::signal(libc::SIGHUP, libc::SIG_IGN);
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        let mut empty_mask = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut empty_mask);
        libc::sigprocmask(
            libc::SIG_SETMASK,
            &raw const empty_mask,
            std::ptr::null_mut(),
        );
        // The caller relies on the exec of a stopped process, so the program is checked before the
        // process stops.
        if plan.wait_before_exec && libc::access(plan.program.path.as_ptr(), libc::X_OK) != 0 {
            exit_child_with_error(plan, ExecStage::ProgramCheck);
        }
        if plan.wait_before_exec {
            // Raw system calls: this process is a copy of the tasker, and the C library caches the
            // tasker's PID and thread id.
            libc::syscall(
                libc::SYS_kill,
                libc::syscall(libc::SYS_getpid),
                libc::SIGSTOP,
            );
        }
        libc::execve(
            plan.program.path.as_ptr(),
            plan.argv.as_ptr(),
            plan.env.as_ptr(),
        );
        exit_child_with_error(plan, ExecStage::Exec)
    }
}

/// Connects the standard descriptors of a new process. Returns false if the kernel refuses.
///
/// # Safety
/// As for [`exec_child`].
unsafe fn set_up_standard_descriptors(plan: &ExecPlan<'_>) -> bool {
    // SAFETY: plain system calls on descriptors of this process and a constant path.
    unsafe {
        // The engine finds no mount for a descriptor that was opened outside the mount namespace.
        let stdin_fd = match plan.mount_namespace {
            Some(_) => libc::open(c"/dev/null".as_ptr(), libc::O_RDONLY | libc::O_CLOEXEC),
            None => plan.stdin_fd,
        };
        libc::dup2(stdin_fd, 0) >= 0
            && libc::dup2(plan.output_fd, 1) >= 0
            && libc::dup2(plan.output_fd, 2) >= 0
    }
}

/// Records the current errno and exits. Must be called only in a process that was created by
/// [`start_program`] or [`start_stopped_before_exec`]. With [`start_stopped_before_exec`] the exit
/// status contains the error.
fn exit_child_with_error(plan: &ExecPlan<'_>, stage: ExecStage) -> ! {
    let errno = Errno::last();
    let error = ExecError { stage, errno };
    plan.error.set(Some(error));
    let status = if plan.wait_before_exec {
        error.exit_status()
    } else {
        STATUS_NOT_STARTED
    };
    // SAFETY: ends this process and does nothing else.
    unsafe { libc::_exit(status) }
}

/// Kills a new process whose exec takes too long, for example because its file is on a file system
/// that hangs. The thread that starts the process is suspended until the exec, so a separate thread
/// waits for a timer.
#[derive(Debug)]
pub(crate) struct StartGuard {
    timer: Arc<TimerFd>,
    /// Pidfd of the process that is being started, or [`NO_FD`]. The thread that replaces the
    /// descriptor by [`NO_FD`] owns it.
    pidfd: Arc<AtomicI32>,
}

impl StartGuard {
    /// Starts the guard's thread.
    ///
    /// # Errors
    /// No thread or descriptor can be created.
    pub(crate) fn new() -> io::Result<Self> {
        let timer = Arc::new(TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_CLOEXEC,
        )?);
        let pidfd = Arc::new(AtomicI32::new(NO_FD));
        let (thread_timer, thread_pidfd) = (Arc::clone(&timer), Arc::clone(&pidfd));
        std::thread::Builder::new()
            .name("start-guard".into())
            .spawn(move || {
                loop {
                    // If the wait was interrupted, the loop repeats it.
                    if thread_timer.wait().is_ok()
                        && let Some(pidfd) = take_pidfd(&thread_pidfd)
                    {
                        kill_pidfd(pidfd.as_fd());
                    }
                }
            })?;
        Ok(Self { timer, pidfd })
    }

    fn start_timer(&self, time_limit: Duration) -> io::Result<GuardedStart<'_>> {
        self.timer.set(
            Expiration::OneShot(TimeSpec::from_duration(time_limit)),
            TimerSetTimeFlags::empty(),
        )?;
        Ok(GuardedStart(self))
    }

    fn pidfd_pointer(&self) -> *mut i32 {
        self.pidfd.as_ptr()
    }
}

/// A start whose duration the guard's timer limits.
struct GuardedStart<'a>(&'a StartGuard);

impl GuardedStart<'_> {
    /// Ends the time limit. Returns the pidfd of the new process; `None` if the process was killed
    /// or could not be created.
    fn stop_timer(self) -> Option<OwnedFd> {
        // If the timer cannot be stopped, its expiry has no effect, because the pidfd has been
        // removed.
        let _ = self.0.timer.unset();
        take_pidfd(&self.0.pidfd)
    }
}

fn take_pidfd(fd_slot: &AtomicI32) -> Option<OwnedFd> {
    let fd = fd_slot.swap(NO_FD, Ordering::AcqRel);
    // SAFETY: the kernel has stored the descriptor for this process, and the swap removes it, so it
    // has one owner.
    (fd != NO_FD).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Returns the PID of a child with a pending wait event, and true if the child has ended; `None` if
/// no event is pending. The event is not consumed, because an engine's worker may wait for it.
pub(crate) fn pending_child_event() -> Option<(i32, bool)> {
    let wait_flags =
        WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT | WaitPidFlag::__WALL;
    let status = waitid(Id::All, wait_flags).ok()?;
    Some((
        status.pid()?.as_raw(),
        matches!(status, WaitStatus::Exited(..) | WaitStatus::Signaled(..)),
    ))
}

/// Reaps a child without blocking. Returns the child's wait status and resource usage; `None` if
/// the child still runs.
///
/// # Errors
/// `ECHILD` if the process is not a child, or was already reaped.
pub(crate) fn reap_if_ended(pid: i32) -> io::Result<Option<(i32, Usage)>> {
    wait_with_usage(pid, libc::WNOHANG)
}

/// Returns the wait status of a child that has ended, without reaping it; `None` if the process
/// runs or is not a child.
pub(crate) fn peek_exit_status(pid: i32) -> Option<i32> {
    let wait_flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    match waitid(Id::Pid(Pid::from_raw(pid)), wait_flags) {
        Ok(WaitStatus::Exited(_, code)) => Some(code << 8),
        Ok(WaitStatus::Signaled(_, signal, _)) => Some(signal as i32),
        _ => None,
    }
}

/// Waits until a child has ended, and reaps it. Returns the child's wait status and resource usage.
/// Blocks without a time limit, so the child must have been killed or be about to end.
///
/// # Errors
/// `ECHILD` if the process is not a child, or was already reaped.
pub(crate) fn wait_and_reap(pid: i32) -> io::Result<(i32, Usage)> {
    loop {
        match wait_with_usage(pid, 0) {
            Ok(Some(status_and_usage)) => return Ok(status_and_usage),
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn wait_with_usage(pid: i32, flags: i32) -> io::Result<Option<(i32, Usage)>> {
    let mut status = 0;
    // SAFETY: rusage is plain numbers; the kernel fills both through valid pointers.
    let (result, usage) = unsafe {
        let mut usage = std::mem::zeroed::<libc::rusage>();
        (
            libc::wait4(pid, &raw mut status, flags | libc::__WALL, &raw mut usage),
            usage,
        )
    };
    match result {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        _ => Ok(Some((status, usage_from_rusage(&usage)))),
    }
}

fn usage_from_rusage(raw_usage: &libc::rusage) -> Usage {
    let micros = |t: libc::timeval| Micros(t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64);
    Usage {
        user: micros(raw_usage.ru_utime),
        system: micros(raw_usage.ru_stime),
        resident_max_bytes: raw_usage.ru_maxrss as u64 * 1024,
    }
}

/// Opens a pidfd for a child that was not reaped yet. The child may have ended.
///
/// # Errors
/// Those of `pidfd_open`.
pub(crate) fn pidfd_of(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call accesses no memory; the result is checked before it is owned.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor (close-on-exec) for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Kills the process to which a pidfd refers. A process that has already ended is not an error.
pub(crate) fn kill_pidfd(pidfd: BorrowedFd<'_>) {
    // SAFETY: no siginfo is passed; the kernel checks the descriptor.
    unsafe {
        libc::syscall(
            libc::SYS_pidfd_send_signal,
            pidfd.as_raw_fd(),
            libc::SIGKILL,
            std::ptr::null::<u8>(),
            0,
        )
    };
}

/// Calls `kill(2)` with any signal number, including realtime signals.
///
/// # Errors
/// Those of `kill(2)`.
pub(crate) fn send_signal(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: the call accesses no memory.
    match unsafe { libc::kill(pid, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sends a signal to one thread of a process, as `tgkill(2)`.
///
/// # Errors
/// Those of `tgkill(2)`.
pub(crate) fn send_thread_signal(pid: i32, thread: i32, signal: i32) -> io::Result<()> {
    // SAFETY: the call accesses no memory.
    match unsafe { libc::syscall(libc::SYS_tgkill, pid, thread, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Returns the nice value of a thread, from -20 (highest priority) to 19; `None` if the thread has
/// ended.
pub(crate) fn nice_of(tid: i32) -> Option<i32> {
    // SAFETY: plain system call; the raw one, because its result, 20 - nice, never collides with an
    // error.
    let result = unsafe { libc::syscall(libc::SYS_getpriority, libc::PRIO_PROCESS, tid) };
    (result > 0).then(|| 20 - result as i32)
}

/// Sets the nice value of a thread. Has no effect if the thread has ended or the tasker lacks the
/// capability.
pub(crate) fn set_nice(tid: i32, nice: i32) {
    // SAFETY: the call accesses no memory.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, tid.cast_unsigned(), nice) };
}

/// True if the tasker may raise the priority of processes.
pub(crate) fn can_raise_priority() -> bool {
    static CAN_RAISE: OnceLock<bool> = OnceLock::new();
    *CAN_RAISE.get_or_init(|| {
        checkpoint::proc::status(std::process::id().cast_signed()).is_some_and(|status| {
            let effective_set = CapabilitySet::from_bits_retain(status.capeff);
            effective_set.contains(CapabilitySet::SYS_NICE)
        })
    })
}

/// Writes bytes to the address `address` in the memory of a stopped process.
///
/// # Errors
/// The memory does not exist, or access is denied.
pub(crate) fn write_memory(pid: i32, address: u64, bytes: &[u8]) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    std::fs::OpenOptions::new()
        .write(true)
        .open(format!("/proc/{pid}/mem"))?
        .write_all_at(bytes, address)
}

/// Drops all capabilities of the calling thread. File accesses of the thread then have only the
/// rights of its user.
///
/// # Errors
/// The kernel refused.
pub(crate) fn drop_capabilities() -> io::Result<()> {
    checkpoint::capabilities::retain_capabilities(CapabilitySet::empty())
}

/// Returns the number of bytes in a pipe; 0 if the number cannot be read.
pub(crate) fn bytes_in_pipe(pipe: BorrowedFd<'_>) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int through a valid pointer.
    let result = unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    if result == 0 {
        bytes.max(0) as usize
    } else {
        0
    }
}

/// Takes ownership of the descriptor with the number `fd`, which was inherited.
///
/// # Errors
/// `EBADF` if the descriptor is not open or is a standard descriptor.
pub(crate) fn take_inherited_fd(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_SETFD takes no pointer and returns an error for a number that is not open.
    if fd < 3 || unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: the descriptor is open, and the parent passed it to this process by this number; the
    // function is called once, at the start.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Ignores a signal, or restores its default action. Panics if `handler` is a handler function.
///
/// # Errors
/// The signal cannot be changed.
pub(crate) fn set_signal_action(changed_signal: Signal, handler: SigHandler) -> nix::Result<()> {
    assert!(
        matches!(handler, SigHandler::SigIgn | SigHandler::SigDfl),
        "no handler runs in the tasker"
    );
    // SAFETY: no handler function is installed, so no code runs asynchronously.
    unsafe { nix::sys::signal::signal(changed_signal, handler) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn start_guard_kills_late_process() {
        let guard = StartGuard::new().expect("a thread");
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        let guarded_start = guard
            .start_timer(Duration::from_millis(20))
            .expect("a timer");
        let pidfd = pidfd_of(child.id() as i32).expect("it exists");
        guard.pidfd.store(pidfd.into_raw_fd(), Ordering::Release);
        let status = child.wait().expect("a child");
        assert!(!status.success(), "{status}");
        assert!(
            guarded_start.stop_timer().is_none(),
            "the guard has taken it"
        );
    }

    #[test]
    fn start_guard_spares_timely_process() {
        let guard = StartGuard::new().expect("a thread");
        let mut child = std::process::Command::new("sleep")
            .arg("0.2")
            .spawn()
            .expect("sleep");
        let guarded_start = guard
            .start_timer(Duration::from_millis(20))
            .expect("a timer");
        let pidfd = pidfd_of(child.id() as i32).expect("it exists");
        guard.pidfd.store(pidfd.into_raw_fd(), Ordering::Release);
        assert!(guarded_start.stop_timer().is_some(), "it is still there");
        assert!(child.wait().expect("a child").success());
    }
}
