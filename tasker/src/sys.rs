//! The few system calls that neither std nor nix offer: making processes, waiting with resource use, and the little that a
//! new process does before it becomes the task's program.
//!
//! The tasker may have threads when it makes a process, so the child must not allocate or take a lock: everything that
//! it needs lies ready in a plan made before.
//!
//! What becomes a program borrows the tasker's memory until then (as after `vfork`), because copying it costs more than all
//! the rest of a start. The calling thread stands still meanwhile; [`StartGuard`] sees to it that this has an end.
#![allow(unsafe_code)] // Raw process creation has no safe interface.

use crate::birth;
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

/// Stack of a new process until it is its program: it makes a few calls of the system there.
const CHILD_STACK_BYTES: usize = 32 << 10;
/// The highest signal.
const SIGNAL_MAX: i32 = 64;
/// Words of the kernel's form of a signal's action.
const SIGACTION_WORDS: usize = 4;
/// How often a process is looked at that is about to stand still.
const WAITING_LOOK: Duration = Duration::from_micros(100);
/// No descriptor.
const NO_FD: RawFd = -1;

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
    /// The same, looked at beforehand.
    Access,
}

/// Exit status of a process that waits, or was to, and could not.
const NOT_BEGUN: i32 = 1;
/// Exit statuses from here on are errors of looking at the program.
const NO_PROGRAM: i32 = 0x80;
/// Exit status for what is wrong with the standard descriptors.
const NO_STDIO: i32 = 0x7f;

impl StageError {
    /// The exit status that says so. Errors that files and folders cause are small numbers.
    fn status(self) -> i32 {
        match self.stage {
            Stage::Stdio => NO_STDIO,
            Stage::Dir => (self.errno as i32).min(NO_STDIO - 1),
            Stage::Access => NO_PROGRAM | (self.errno as i32).min(NO_STDIO),
            Stage::Exec => NOT_BEGUN,
        }
    }

    /// What an exit status says.
    fn of_status(status: i32) -> StageError {
        let (stage, errno) = match status {
            NO_STDIO => (Stage::Stdio, Errno::UnknownErrno),
            NO_PROGRAM.. => (Stage::Access, Errno::from_raw(status & !NO_PROGRAM)),
            _ => (Stage::Dir, Errno::from_raw(status)),
        };
        StageError { stage, errno }
    }
}

/// A new process that could not become its program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StageError {
    /// Where it failed.
    pub(crate) stage: Stage,
    /// Why.
    pub(crate) errno: nix::errno::Errno,
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
    pub(crate) fn new(
        path: &Path,
        dir: &Path,
        argv: &[Vec<u8>],
        env: &[Vec<u8>],
    ) -> Result<Program, String> {
        let zero = |what: &str| format!("{what} contains a zero byte");
        let all = |list: &[Vec<u8>], what: &str| -> Result<Vec<CString>, String> {
            list.iter()
                .map(|s| CString::new(s.as_slice()).map_err(|_| zero(what)))
                .collect()
        };
        Ok(Program {
            path: CString::new(path.as_os_str().as_bytes())
                .map_err(|_| zero("the program's path"))?,
            dir: CString::new(dir.as_os_str().as_bytes())
                .map_err(|_| zero("the working directory"))?,
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
    inherited: &'a Inherited,
    /// Kill it when the tasker dies (for processes that have no namespace that would be killed).
    die_with_parent: bool,
    /// It stops before it becomes its program, with nothing open but what the program gets.
    waits: bool,
    /// Where it failed and with which errno, written by the new process.
    failed: Cell<Option<StageError>>,
}

impl<'a> ExecPlan<'a> {
    /// A plan; the descriptors have to stay open until it is carried out.
    pub(crate) fn new(
        program: &'a Program,
        stdin: BorrowedFd<'_>,
        output: BorrowedFd<'_>,
        inherited: &'a Inherited,
        die_with_parent: bool,
    ) -> ExecPlan<'a> {
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
            stdin: stdin.as_raw_fd(),
            output: output.as_raw_fd(),
            inherited,
            die_with_parent,
            waits: false,
            failed: Cell::new(None),
        }
    }

    /// The same for a process that is to wait; see [`start_waiting`].
    pub(crate) fn waiting(mut self) -> ExecPlan<'a> {
        self.waits = true;
        self
    }
}

/// What a program would inherit from the tasker and must not.
#[derive(Debug)]
pub(crate) struct Inherited {
    /// The limit on open descriptors as the tasker found it; tasks get it back.
    files_limit: libc::rlimit,
    /// Signals that the tasker ignores. All others are at their default after `execve` anyway.
    ignored: Vec<i32>,
}

impl Inherited {
    /// Raises the tasker's own limit on open descriptors as far as it may (it holds a few for each task), and notes what a
    /// task gets instead. To be called when the tasker ignores what it means to.
    ///
    /// # Errors
    /// What the system said.
    pub(crate) fn prepare() -> io::Result<Inherited> {
        let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
        nix::sys::resource::setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?;
        let files_limit = libc::rlimit {
            rlim_cur: soft,
            rlim_max: hard,
        };
        Ok(Inherited {
            files_limit,
            ignored: (1..=SIGNAL_MAX)
                .filter(|signal| is_ignored(*signal))
                .collect(),
        })
    }
}

fn is_ignored(signal: i32) -> bool {
    let mut now = [0usize; SIGACTION_WORDS];
    // By the bare call: the C library does not speak of the signals that it uses itself.
    // SAFETY: the kernel writes its form of an action, which has so many words and begins with the handler.
    let done = unsafe {
        libc::syscall(
            libc::SYS_rt_sigaction,
            signal,
            std::ptr::null::<u8>(),
            now.as_mut_ptr(),
            8,
        )
    };
    done == 0 && now[0] == libc::SIG_IGN
}

/// Makes a process like `fork`, with these further clone flags, in this control group if there is one; `None` in the new
/// process.
///
/// # Safety
/// The new process must not allocate, lock, or return from the caller's scope.
pub(crate) unsafe fn clone3(
    flags: i32,
    group: Option<BorrowedFd<'_>>,
) -> io::Result<Option<Child>> {
    let mut pidfd: RawFd = -1;
    let into = group.map_or(0, |_| birth::INTO_CGROUP);
    let args = libc::clone_args {
        flags: (flags | libc::CLONE_PIDFD) as u64 | into,
        pidfd: &raw mut pidfd as u64,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: libc::SIGCHLD as u64,
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: 0,
        set_tid_size: 0,
        cgroup: group.map_or(0, |folder| folder.as_raw_fd() as u64),
    };
    // SAFETY: without CLONE_VM and without a stack this behaves like fork; `args` lives through the call and `pidfd`
    // is where the kernel may write. What the child may do is the caller's promise.
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

/// Why there is no process that has become a program.
#[derive(Debug)]
pub(crate) enum NotStarted {
    /// There was never a process.
    NoProcess(io::Error),
    /// It could not become the program, and has ended.
    Failed(StageError),
    /// It was killed because the system did not begin the program in time.
    TooLate,
}

/// Makes a process that becomes the program of `plan`, in the namespace that the calling thread's children go to, and in the
/// control group of this folder if there is one. Returns when it has.
///
/// # Errors
/// Why not. The process, if there was one, has ended but was not reaped.
pub(crate) fn start_program(
    plan: &ExecPlan<'_>,
    guard: &StartGuard,
    group: Option<BorrowedFd<'_>>,
) -> Result<Child, NotStarted> {
    let mut stack = vec![0u128; CHILD_STACK_BYTES / size_of::<u128>()];
    let watch = guard.watch().map_err(NotStarted::NoProcess)?;
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::CLONE_PIDFD | libc::SIGCHLD;
    // SAFETY: the new process runs `exec_child` on a stack of its own, which like the plan outlives it: this thread goes on
    // only when the process has another program or none. The kernel writes the pidfd where the guard looks for it.
    let made = unsafe {
        let plan = std::ptr::from_ref(plan).cast_mut().cast();
        match group {
            Some(group) => birth::into_group(exec_child, plan, &mut stack, guard.pidfd(), group),
            None => {
                let top = stack.as_mut_ptr_range().end;
                match libc::clone(exec_child, top.cast(), flags, plan, guard.pidfd()) {
                    -1 => Err(io::Error::last_os_error()),
                    pid => Ok(pid),
                }
            }
        }
    };
    let pidfd = watch.end();
    let pid = match made {
        Ok(pid) => pid,
        Err(failure) => {
            // A number that the kernel has taken back.
            let _ = pidfd.map(OwnedFd::into_raw_fd);
            return Err(NotStarted::NoProcess(failure));
        }
    };
    match (pidfd, plan.failed.get()) {
        (None, _) => Err(NotStarted::TooLate),
        (Some(_), Some(error)) => Err(NotStarted::Failed(error)),
        (Some(pidfd), None) => Ok(Child { pid, pidfd }),
    }
}

/// Makes a process that stops before it becomes the program of `plan`, which is one for waiting, and becomes it at the next
/// SIGCONT. It is otherwise as that of [`start_program`], but has a copy of the tasker's memory as long as it waits. Returns
/// when it stands still.
///
/// # Errors
/// Why not. The process, if there was one, has ended or was killed, but was not reaped.
pub(crate) fn start_waiting(
    plan: &ExecPlan<'_>,
    allowed: Duration,
    group: Option<BorrowedFd<'_>>,
) -> Result<Child, NotStarted> {
    // SAFETY: the new process goes straight into `exec_child`, which makes async-signal-safe calls only and never comes back;
    // the copy of the plan lives as long as it does.
    let child = match unsafe { clone3(0, group) }.map_err(NotStarted::NoProcess)? {
        Some(child) => child,
        // SAFETY: this is the new process.
        None => unsafe { libc::_exit(exec_child(std::ptr::from_ref(plan).cast_mut().cast())) },
    };
    let until = Instant::now() + allowed;
    loop {
        let news = WaitPidFlag::WEXITED
            | WaitPidFlag::WSTOPPED
            | WaitPidFlag::WNOHANG
            | WaitPidFlag::WNOWAIT;
        match waitid(Id::Pid(Pid::from_raw(child.pid)), news) {
            Ok(WaitStatus::Stopped(..)) => return Ok(child),
            Ok(WaitStatus::Exited(_, status)) => {
                return Err(NotStarted::Failed(StageError::of_status(status)));
            }
            Ok(WaitStatus::Signaled(..)) | Err(_) => return Err(NotStarted::TooLate),
            Ok(_) if Instant::now() >= until => {
                kill_by(child.pidfd.as_fd());
                return Err(NotStarted::TooLate);
            }
            Ok(_) => std::thread::sleep(WAITING_LOOK),
        }
    }
}

/// Makes a process that only waits in this directory to be dumped and killed; for trying the engine out. When this returns
/// it has nothing of ours any more.
///
/// # Errors
/// What `clone3` says.
pub(crate) fn start_sleeper(
    dir: &CStr,
    stdin: BorrowedFd<'_>,
    output: BorrowedFd<'_>,
) -> io::Result<Child> {
    let (stdin, output) = (stdin.as_raw_fd(), output.as_raw_fd());
    // Its end of this pipe is closed when it has its own descriptors and no others.
    let (ready, held) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    // SAFETY: the new process only makes async-signal-safe calls and never leaves this block.
    match unsafe { clone3(0, None) }? {
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

/// Becomes the program, or notes why not and ends with status 1, as PVM's daemon does. Only for a process made by
/// [`start_program`]; only async-signal-safe calls are made here.
extern "C" fn exec_child(plan: *mut libc::c_void) -> i32 {
    // SAFETY: the maker's plan, which nobody else touches as long as this process has not ended or become its program.
    let plan = unsafe { &*plan.cast::<ExecPlan<'_>>() };
    // SAFETY: plain system calls; all pointers come from strings that the plan keeps alive.
    unsafe {
        if plan.die_with_parent {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        }
        libc::setsid();
        if libc::dup2(plan.stdin, 0) < 0
            || libc::dup2(plan.output, 1) < 0
            || libc::dup2(plan.output, 2) < 0
        {
            give_up(plan, Stage::Stdio);
        }
        if libc::chdir(plan.program.dir.as_ptr()) != 0 {
            give_up(plan, Stage::Dir);
        }
        // What waits must not keep anything open that others wait for to be closed.
        let close = if plan.waits {
            0
        } else {
            libc::CLOSE_RANGE_CLOEXEC
        };
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, close);
        libc::setrlimit(libc::RLIMIT_NOFILE, &raw const plan.inherited.files_limit);
        // By the bare call: the C library refuses to touch the signals that it uses itself. All zero is the default action.
        let default = [0usize; SIGACTION_WORDS];
        for &signal in &plan.inherited.ignored {
            libc::syscall(
                libc::SYS_rt_sigaction,
                signal,
                default.as_ptr(),
                std::ptr::null::<u8>(),
                8,
            );
        }
        // As PVM's daemon leaves them to its tasks.
        libc::signal(libc::SIGHUP, libc::SIG_IGN);
        libc::signal(libc::SIGPIPE, libc::SIG_IGN);
        let mut none = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        // Whether it can be started has to be known before anybody relies on it.
        if plan.waits && libc::access(plan.program.path.as_ptr(), libc::X_OK) != 0 {
            give_up(plan, Stage::Access);
        }
        if plan.waits {
            // By the bare calls: the C library remembers the numbers of the process that this one is a copy of.
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
        give_up(plan, Stage::Exec)
    }
}

/// Notes the current errno and ends. Only for a process made by [`start_program`], or by [`start_waiting`], whose notes nobody
/// sees.
fn give_up(plan: &ExecPlan<'_>, stage: Stage) -> ! {
    let errno = Errno::last();
    let error = StageError { stage, errno };
    plan.failed.set(Some(error));
    let status = if plan.waits {
        error.status()
    } else {
        NOT_BEGUN
    };
    // SAFETY: ends this process and nothing else.
    unsafe { libc::_exit(status) }
}

/// Ends a new process that the system does not make its program in time (its file may lie on a file system that hangs): the
/// thread that started it stands still until then. Another thread sleeps for this on a timer.
#[derive(Debug)]
pub(crate) struct StartGuard {
    timer: Arc<TimerFd>,
    /// Descriptor of the process being started. Whoever takes it out closes it.
    pidfd: Arc<AtomicI32>,
    allowed: Duration,
}

impl StartGuard {
    /// Starts the thread; every start may take so long.
    ///
    /// # Errors
    /// The system has no thread or descriptor left.
    pub(crate) fn new(allowed: Duration) -> io::Result<StartGuard> {
        let timer = Arc::new(TimerFd::new(
            ClockId::CLOCK_MONOTONIC,
            TimerFlags::TFD_CLOEXEC,
        )?);
        let pidfd = Arc::new(AtomicI32::new(NO_FD));
        let (its_timer, its_pidfd) = (Arc::clone(&timer), Arc::clone(&pidfd));
        std::thread::Builder::new()
            .name("start-guard".into())
            .spawn(move || {
                loop {
                    // An interrupted wait is one for nothing.
                    if its_timer.wait().is_ok()
                        && let Some(pidfd) = take_fd(&its_pidfd)
                    {
                        kill_by(pidfd.as_fd());
                    }
                }
            })?;
        Ok(StartGuard {
            timer,
            pidfd,
            allowed,
        })
    }

    fn watch(&self) -> io::Result<Watch<'_>> {
        self.timer.set(
            Expiration::OneShot(TimeSpec::from_duration(self.allowed)),
            TimerSetTimeFlags::empty(),
        )?;
        Ok(Watch(self))
    }

    fn pidfd(&self) -> *mut i32 {
        self.pidfd.as_ptr()
    }
}

/// A start that is being watched.
struct Watch<'a>(&'a StartGuard);

impl Watch<'_> {
    /// The process's descriptor; `None` if it was killed, or never was.
    fn end(self) -> Option<OwnedFd> {
        // A timer that rings late finds nothing.
        let _ = self.0.timer.unset();
        take_fd(&self.0.pidfd)
    }
}

fn take_fd(place: &AtomicI32) -> Option<OwnedFd> {
    let fd = place.swap(NO_FD, Ordering::AcqRel);
    // SAFETY: the kernel put it there for us, and nobody else finds it there again.
    (fd != NO_FD).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A child that there is something to hear of, if there is one, and whether it has ended. Nothing is taken from anybody who
/// waits for it: it may be stopped under the eyes of an engine.
pub(crate) fn child_with_news() -> Option<(i32, bool)> {
    let look =
        WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT | WaitPidFlag::__WALL;
    let status = waitid(Id::All, look).ok()?;
    Some((
        status.pid()?.as_raw(),
        matches!(status, WaitStatus::Exited(..) | WaitStatus::Signaled(..)),
    ))
}

/// Waits for one child without blocking: its wait status and what it used, or `None` while it runs.
///
/// # Errors
/// `ECHILD` when it is no child (any more).
pub(crate) fn reap(pid: i32) -> io::Result<Option<(i32, Usage)>> {
    wait4(pid, libc::WNOHANG)
}

/// The wait status of a child that has ended, which stays to be waited for; `None` if it has not, or is no child.
pub(crate) fn ended_as(pid: i32) -> Option<i32> {
    let look = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    match waitid(Id::Pid(Pid::from_raw(pid)), look) {
        Ok(WaitStatus::Exited(_, code)) => Some(code << 8),
        Ok(WaitStatus::Signaled(_, signal, _)) => Some(signal as i32),
        _ => None,
    }
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
        (
            libc::wait4(pid, &raw mut status, flags | libc::__WALL, &raw mut used),
            used,
        )
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

/// How urgent a thread is: −20 (most) to 19; `None` when it has ended.
pub(crate) fn nice_of(thread: i32) -> Option<i32> {
    // SAFETY: plain system call; the bare one, because its answer, 20 − nice, is never an error's number.
    let answer = unsafe { libc::syscall(libc::SYS_getpriority, libc::PRIO_PROCESS, thread) };
    (answer > 0).then(|| 20 - answer as i32)
}

/// Makes a thread so urgent. That it has ended, or that there is no right to do so, changes nothing.
pub(crate) fn set_nice(thread: i32, nice: i32) {
    // SAFETY: no memory is involved.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, thread.cast_unsigned(), nice) };
}

/// True if this process may make others more urgent again.
pub(crate) fn may_raise() -> bool {
    /// Bit of `CAP_SYS_NICE`.
    const SYS_NICE: u64 = 1 << 23;
    static MAY: OnceLock<bool> = OnceLock::new();
    *MAY.get_or_init(|| {
        let effective = checkpoint::status::Status::of(std::process::id().cast_signed())
            .and_then(|status| u64::from_str_radix(status.field("CapEff")?, 16).ok());
        effective.is_some_and(|bits| bits & SYS_NICE != 0)
    })
}

/// True if these two processes have one memory, as a child has its parent's between `vfork` and `execve`.
pub(crate) fn share_memory(one: i32, other: i32) -> bool {
    /// Compare memory, in the words of kcmp(2).
    const KCMP_VM: i32 = 1;
    // SAFETY: no pointer is passed.
    let answer = unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_VM, 0, 0) };
    answer == 0
}

/// Writes into the memory of a stopped process.
///
/// # Errors
/// There is no such memory, or no right to do so.
pub(crate) fn write_memory(pid: i32, at: u64, bytes: &[u8]) -> io::Result<()> {
    use std::os::unix::fs::FileExt;
    std::fs::OpenOptions::new()
        .write(true)
        .open(format!("/proc/{pid}/mem"))?
        .write_all_at(bytes, at)
}

/// Takes all capabilities from the calling thread: what it does with files from now on it does as its user.
///
/// # Errors
/// The kernel did not do it.
pub(crate) fn give_up_rights() -> io::Result<()> {
    checkpoint::rights::keep_only(0)
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
    assert!(
        matches!(handler, SigHandler::SigIgn | SigHandler::SigDfl),
        "no handler runs in the tasker"
    );
    // SAFETY: no handler function is installed, so nothing can run at a bad moment.
    unsafe { nix::sys::signal::signal(name, handler) }.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_that_does_not_become_its_program_in_time_is_killed() {
        let guard = StartGuard::new(Duration::from_millis(20)).expect("a thread");
        let mut child = std::process::Command::new("sleep")
            .arg("60")
            .spawn()
            .expect("sleep");
        let watch = guard.watch().expect("a timer");
        let pidfd = pidfd_of(child.id() as i32).expect("it exists");
        guard.pidfd.store(pidfd.into_raw_fd(), Ordering::Release);
        let status = child.wait().expect("a child");
        assert!(!status.success(), "{status}");
        assert!(watch.end().is_none(), "the guard has taken it");
    }

    #[test]
    fn a_process_that_becomes_its_program_in_time_is_left_alone() {
        let guard = StartGuard::new(Duration::from_millis(20)).expect("a thread");
        let mut child = std::process::Command::new("sleep")
            .arg("0.2")
            .spawn()
            .expect("sleep");
        let watch = guard.watch().expect("a timer");
        let pidfd = pidfd_of(child.id() as i32).expect("it exists");
        guard.pidfd.store(pidfd.into_raw_fd(), Ordering::Release);
        assert!(watch.end().is_some(), "it is still there");
        assert!(child.wait().expect("a child").success());
    }
}
