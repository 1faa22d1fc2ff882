//! The few system calls that neither std nor nix offer: making processes by `clone3`, waiting with resource use, and
//! the little that a new process does before it becomes an idle init or the task's program.
//!
//! The tasker may have threads when it makes a process, so the child must not allocate or take a lock: everything that
//! it needs lies ready in a plan made before.
#![allow(unsafe_code)] // Raw process creation has no safe interface.

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{SigHandler, Signal};
use sempa_proto::Micros;
use sempa_proto::migration::Usage;
use std::ffi::{CStr, CString, c_char};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

/// What goes through the report pipe when a new process cannot become its program: a stage and an errno.
pub(crate) const REPORT_BYTES: usize = 8;

/// A process just made.
#[derive(Debug)]
pub(crate) struct Child {
    /// Its number as the tasker sees it.
    pub(crate) pid: i32,
    /// Becomes readable when it ends.
    pub(crate) pidfd: OwnedFd,
}

/// How far a new process came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    /// Its standard descriptors.
    Stdio,
    /// The working directory.
    Dir,
    /// The program.
    Exec,
}

/// A new process that could not become its program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StageError {
    /// Where it failed.
    pub(crate) stage: Stage,
    /// Why.
    pub(crate) errno: nix::errno::Errno,
}

impl StageError {
    /// Reads what [`exec_child`] wrote; `None` if the bytes are not from there.
    pub(crate) fn decode(bytes: &[u8]) -> Option<StageError> {
        let bytes: &[u8; REPORT_BYTES] = bytes.try_into().ok()?;
        let (stage, errno) = bytes.split_at(4);
        let stage = match i32::from_ne_bytes(stage.try_into().ok()?) {
            0 => Stage::Stdio,
            1 => Stage::Dir,
            2 => Stage::Exec,
            _ => return None,
        };
        let errno = nix::errno::Errno::from_raw(i32::from_ne_bytes(errno.try_into().ok()?));
        Some(StageError { stage, errno })
    }
}

/// A program with all that `execve` wants, in the form it wants it.
#[derive(Debug)]
pub(crate) struct Program {
    path: CString,
    dir: CString,
    argv: Vec<CString>,
    env: Vec<CString>,
}

impl Program {
    /// Copies the strings.
    ///
    /// # Errors
    /// A sentence when one of them has a zero byte inside.
    pub(crate) fn new(path: &Path, dir: &Path, argv: &[Vec<u8>], env: &[Vec<u8>]) -> Result<Program, String> {
        let zero = |what: &str| format!("{what} contains a zero byte");
        let all = |list: &[Vec<u8>], what: &str| -> Result<Vec<CString>, String> {
            list.iter().map(|s| CString::new(s.as_slice()).map_err(|_| zero(what))).collect()
        };
        Ok(Program {
            path: CString::new(path.as_os_str().as_bytes()).map_err(|_| zero("the program's path"))?,
            dir: CString::new(dir.as_os_str().as_bytes()).map_err(|_| zero("the working directory"))?,
            argv: all(argv, "an argument")?,
            env: all(env, "an environment string")?,
        })
    }
}

/// Everything a new process needs to become its program. Made before the process is.
pub(crate) struct ExecPlan<'a> {
    program: &'a Program,
    argv: Vec<*const c_char>,
    env: Vec<*const c_char>,
    stdin: RawFd,
    output: RawFd,
    report: RawFd,
    files_limit: libc::rlimit,
    /// Kill it when the tasker dies (for processes that have no namespace that would be killed).
    die_with_parent: bool,
}

impl<'a> ExecPlan<'a> {
    /// `report` has to be close-on-exec: its end of file says that the program was started.
    pub(crate) fn new(
        program: &'a Program,
        stdin: BorrowedFd<'_>,
        output: BorrowedFd<'_>,
        report: BorrowedFd<'_>,
        files_limit: FilesLimit,
        die_with_parent: bool,
    ) -> ExecPlan<'a> {
        let pointers = |list: &[CString]| {
            list.iter().map(|s| s.as_ptr()).chain(std::iter::once(std::ptr::null())).collect::<Vec<_>>()
        };
        ExecPlan {
            argv: pointers(&program.argv),
            env: pointers(&program.env),
            program,
            stdin: stdin.as_raw_fd(),
            output: output.as_raw_fd(),
            report: report.as_raw_fd(),
            files_limit: libc::rlimit { rlim_cur: files_limit.soft, rlim_max: files_limit.hard },
            die_with_parent,
        }
    }
}

/// The limit on open descriptors as the tasker found it; tasks get it back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FilesLimit {
    soft: u64,
    hard: u64,
}

/// Raises the tasker's own limit on open descriptors as far as it may (it holds a few for each task) and returns what it was.
pub(crate) fn raise_files_limit() -> io::Result<FilesLimit> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    nix::sys::resource::setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
    Ok(FilesLimit { soft, hard })
}

/// Makes a process like `fork`, with these further clone flags; `None` in the new process.
///
/// # Safety
/// The new process must not allocate, lock, or return from the caller's scope: it has to end in [`exec_child`],
/// [`init_child`] or [`exit_child`].
unsafe fn clone3(flags: i32) -> io::Result<Option<Child>> {
    let mut pidfd: RawFd = -1;
    let args = libc::clone_args {
        flags: (flags | libc::CLONE_PIDFD) as u64,
        pidfd: &raw mut pidfd as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: 0,
    };
    // SAFETY: without CLONE_VM and without a stack this behaves like fork; `args` lives through the call and `pidfd`
    // is where the kernel may write. What the child may do is the caller's promise.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) };
    match pid {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        // SAFETY: the kernel has just made this descriptor for us; nobody else owns it.
        pid => Ok(Some(Child { pid: pid as i32, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } })),
    }
}

/// Makes the idle init of a new process-id namespace. It holds `control` and nothing else: a byte on it means "end when
/// nobody else is left here", its end of file means "end now", which ends everybody in the namespace.
///
/// # Errors
/// What `clone3` says; `EPERM` when the tasker may not make namespaces.
pub(crate) fn start_init(control: BorrowedFd<'_>) -> io::Result<Child> {
    let control = control.as_raw_fd();
    // SAFETY: the new process goes straight into `init_child`, which never returns.
    match unsafe { clone3(libc::CLONE_NEWPID) }? {
        Some(child) => Ok(child),
        // SAFETY: this is the new process.
        None => unsafe { init_child(control) },
    }
}

/// Makes a process that becomes the program of `plan`, in the namespace that the calling thread's children go to.
///
/// # Errors
/// What `clone3` says. Whether the program could be started comes through the plan's report pipe.
pub(crate) fn start_program(plan: &ExecPlan<'_>) -> io::Result<Child> {
    // SAFETY: the new process goes straight into `exec_child`, which never returns.
    match unsafe { clone3(0) }? {
        Some(child) => Ok(child),
        // SAFETY: this is the new process.
        None => unsafe { exec_child(plan) },
    }
}

/// Makes a process that only waits in this directory to be dumped and killed; for trying the engine out. When this returns
/// it has nothing of ours any more.
///
/// # Errors
/// What `clone3` says.
pub(crate) fn start_sleeper(dir: &CStr, stdin: BorrowedFd<'_>, output: BorrowedFd<'_>) -> io::Result<Child> {
    let (stdin, output) = (stdin.as_raw_fd(), output.as_raw_fd());
    // Its end of this pipe is closed when it has its own descriptors and no others.
    let (ready, held) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    // SAFETY: the new process only makes async-signal-safe calls and never leaves this block.
    match unsafe { clone3(0) }? {
        Some(child) => {
            drop(held);
            while nix::unistd::read(&ready, &mut [0u8]) == Err(Errno::EINTR) {}
            Ok(child)
        }
        // SAFETY: as above; dup2, close_range, setsid and pause touch no memory of ours.
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

/// The life of an idle init.
///
/// # Safety
/// Only in a process made by [`clone3`]; only async-signal-safe calls are made here.
unsafe fn init_child(control: RawFd) -> ! {
    const NAME: &CStr = c"pvm-init";
    // SAFETY: plain system calls on values of this process; the buffer is a local byte.
    unsafe {
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        libc::prctl(libc::PR_SET_NAME, NAME.as_ptr());
        libc::setsid();
        libc::chdir(c"/".as_ptr());
        // Orphans of the task end up here; ignoring SIGCHLD lets the kernel reap them.
        libc::signal(libc::SIGCHLD, libc::SIG_IGN);
        libc::dup2(control, 0);
        libc::syscall(libc::SYS_close_range, 1, u32::MAX, 0);
        let mut byte = 0u8;
        loop {
            match libc::read(0, (&raw mut byte).cast(), 1) {
                0 => libc::_exit(0),
                1 => break,
                _ if *libc::__errno_location() == libc::EINTR => {}
                _ => libc::_exit(1),
            }
        }
        // With SIGCHLD ignored this returns only when no child is left.
        while libc::waitpid(-1, std::ptr::null_mut(), libc::__WALL) != -1 || *libc::__errno_location() == libc::EINTR {}
        libc::_exit(0)
    }
}

/// Becomes the program, or reports why not and ends with status 1, as PVM's daemon does.
///
/// # Safety
/// Only in a process made by [`clone3`]; only async-signal-safe calls are made here.
unsafe fn exec_child(plan: &ExecPlan<'_>) -> ! {
    // SAFETY: plain system calls; all pointers come from strings that the plan keeps alive.
    unsafe {
        if plan.die_with_parent {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        }
        libc::setsid();
        if libc::dup2(plan.stdin, 0) < 0 || libc::dup2(plan.output, 1) < 0 || libc::dup2(plan.output, 2) < 0 {
            exit_child(plan.report, Stage::Stdio);
        }
        if libc::chdir(plan.program.dir.as_ptr()) != 0 {
            exit_child(plan.report, Stage::Dir);
        }
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC);
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const plan.files_limit);
        // By the bare call: the C library refuses to touch the signals that it uses itself. All zero is the default action.
        let default = [0u64; 4];
        for signal in 1..=64 {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), std::ptr::null::<u8>(), 8);
        }
        // As PVM's daemon leaves them to its tasks.
        libc::signal(libc::SIGHUP, libc::SIG_IGN);
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        let mut none = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::execve(plan.program.path.as_ptr(), plan.argv.as_ptr(), plan.env.as_ptr());
        exit_child(plan.report, Stage::Exec)
    }
}

/// Reports the current errno and ends.
///
/// # Safety
/// Only in a process made by [`clone3`].
unsafe fn exit_child(report: RawFd, stage: Stage) -> ! {
    // SAFETY: errno is this thread's; the buffer is local and as long as said.
    unsafe {
        let errno = *libc::__errno_location();
        let bytes: [i32; 2] = [stage as i32, errno];
        libc::write(report, bytes.as_ptr().cast(), REPORT_BYTES);
        libc::_exit(1)
    }
}

/// Waits for one child without blocking: its wait status and what it used, or `None` while it runs.
///
/// # Errors
/// `ECHILD` when it is no child (any more).
pub(crate) fn reap(pid: i32) -> io::Result<Option<(i32, Usage)>> {
    wait4(pid, libc::WNOHANG)
}

/// Waits for one child that is known to end at once (it was killed or has ended).
///
/// # Errors
/// `ECHILD` when it is no child (any more).
pub(crate) fn reap_wait(pid: i32) -> io::Result<(i32, Usage)> {
    loop {
        match wait4(pid, 0) {
            Ok(Some(end)) => return Ok(end),
            Ok(None) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

fn wait4(pid: i32, flags: i32) -> io::Result<Option<(i32, Usage)>> {
    let mut status = 0;
    // SAFETY: rusage is plain numbers; the kernel fills both through valid pointers.
    let (got, used) = unsafe {
        let mut used = std::mem::zeroed::<libc::rusage>();
        (libc::wait4(pid, &raw mut status, flags | libc::__WALL, &raw mut used), used)
    };
    match got {
        -1 => Err(io::Error::last_os_error()),
        0 => Ok(None),
        _ => Ok(Some((status, usage(&used)))),
    }
}

fn usage(used: &libc::rusage) -> Usage {
    let micros = |t: libc::timeval| Micros(t.tv_sec as u64 * 1_000_000 + t.tv_usec as u64);
    Usage {
        user: micros(used.ru_utime),
        system: micros(used.ru_stime),
        resident_max_bytes: used.ru_maxrss as u64 * 1024,
    }
}

/// A descriptor for a child that exists (it may have ended, but was not reaped).
///
/// # Errors
/// What `pidfd_open` says.
pub(crate) fn pidfd_of(pid: i32) -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved; the result is checked before it is owned.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made this descriptor (close-on-exec) for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Kills the process of a pidfd. That it has ended already is no error.
pub(crate) fn kill_by(pidfd: BorrowedFd<'_>) {
    // SAFETY: no siginfo is passed; the kernel checks the descriptor.
    unsafe { libc::syscall(libc::SYS_pidfd_send_signal, pidfd.as_raw_fd(), libc::SIGKILL, std::ptr::null::<u8>(), 0) };
}

/// `kill(2)` with any signal number, also realtime ones.
///
/// # Errors
/// What the system says.
pub(crate) fn kill_raw(pid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: no memory is involved.
    match unsafe { libc::kill(pid, signal) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Bytes that lie in a pipe now.
pub(crate) fn bytes_in_pipe(pipe: BorrowedFd<'_>) -> usize {
    let mut bytes: libc::c_int = 0;
    // SAFETY: FIONREAD writes one int through a valid pointer.
    let done = unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
    if done == 0 { bytes.max(0) as usize } else { 0 }
}

/// Takes over a descriptor that was inherited under this number.
///
/// # Errors
/// `EBADF` when there is none.
pub(crate) fn inherited(fd: RawFd) -> io::Result<OwnedFd> {
    // SAFETY: F_GETFD takes no pointer and fails cleanly on a number that is not open.
    if fd < 3 || unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: it is open, and whoever started us gave it to us by this number; called once, at the start.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Ignores a signal or gives it its default action; never runs code of ours.
///
/// # Errors
/// For a signal that cannot be handled.
pub(crate) fn set_handler(name: Signal, handler: SigHandler) -> nix::Result<()> {
    assert!(matches!(handler, SigHandler::SigIgn | SigHandler::SigDfl), "no handler runs in the tasker");
    // SAFETY: no handler function is installed, so nothing can run at a bad moment.
    unsafe { nix::sys::signal::signal(name, handler) }.map(drop)
}
