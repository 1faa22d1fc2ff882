//! Processes of CRIU: [`Swrk`] executes requests over a socket, [`CriuCommand`] executes a command
//! line.
//!
//! Each process runs in its own process group, which is killed as a whole. Every wait for a process
//! has a deadline.
#![allow(unsafe_code)] // What a child does between fork and exec has no safe interface.

use super::criu_log::{self, MemoryLog};
use super::{STDERR_FILE, kdat, options};
use crate::engine::{CallLimits, TaskNamespaces, VersionError};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, setns};
use nix::sys::socket::{AddressFamily, MsgFlags, SockFlag, SockType, recv, send, socketpair};
use protobuf::Message;
use rust_criu::rust_criu_protobuf::rpc::{Criu_req_type, Criu_resp};
use sempa_proto::Micros;
use sempa_proto::migration::Failure;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Maximum length of a reply in bytes. Real replies have a few hundred bytes.
const REPLY_BYTES_MAX: usize = 64 << 10;
/// Nice value of the highest priority of ordinary scheduling.
const HIGH_PRIORITY_NICE: i32 = -20;
/// Nice value for work whose result no operation waits for. This is not the lowest priority,
/// because a thread without CPU time may hold locks of the kernel.
const LOW_PRIORITY_NICE: i32 = 10;
/// Timeout for `criu --version`.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);

/// A message from CRIU.
#[derive(Debug)]
pub(super) enum SwrkMessage {
    /// CRIU has reached a point at which it waits for an acknowledgement.
    Notification {
        /// CRIU's name of the point, for example `post-restore`.
        point: String,
        /// PID of the restored root if CRIU reports it at this point, otherwise 0.
        root_pid: i32,
    },
    /// CRIU has executed the request successfully.
    Done,
}

/// A running `criu swrk` process. Dropping this value kills and reaps the process.
pub(super) struct Swrk {
    child: Child,
    pidfd: OwnedFd,
    socket: OwnedFd,
    log: MemoryLog,
    stderr_log: MemoryLog,
    /// The file for the log in the image directory; `None` until the request is sent.
    log_path: Option<PathBuf>,
    /// Time at which the current call started.
    call_started_at: Instant,
    /// Time limit for CRIU to exit after a cancellation, before it is killed.
    cancel_timeout: Duration,
    /// Time at which the call was canceled; `None` if the call was not canceled.
    canceled_at: Option<Instant>,
    is_reaped: bool,
}

impl Swrk {
    /// Starts CRIU, which then waits for its request, inside the namespaces `inside` if they are
    /// given. CRIU inherits the descriptors `inherited_descriptors` with the same numbers, and no
    /// other descriptor.
    pub(super) fn start(
        program: &Path,
        inherited_descriptors: &[BorrowedFd<'_>],
        variables: &[(&'static str, String)],
        inside: Option<&TaskNamespaces>,
    ) -> Result<Self, Failure> {
        kdat::remove_stale_temporary();
        let (own_socket, criu_socket) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .map_err(|e| start_failure("socket pair", &e))?;
        let new_log = || MemoryLog::new().map_err(|e| start_failure("its log", &e));
        let (log, stderr_log) = (new_log()?, new_log()?);
        let log_writer = |log: &MemoryLog| log.writer().map_err(|e| start_failure("its log", &e));
        let mut inherited_fds: Vec<RawFd> = inherited_descriptors
            .iter()
            .map(|fd| fd.as_raw_fd())
            .collect();
        inherited_fds.push(criu_socket.as_raw_fd());
        let mut command = Command::new(program);
        command.arg("swrk").arg(criu_socket.as_raw_fd().to_string());
        command
            .stdin(Stdio::null())
            .stdout(log_writer(&log)?)
            .stderr(log_writer(&stderr_log)?)
            .process_group(0);
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        // SAFETY: the closure makes only system calls on descriptors that it owns; it neither
        // allocates nor locks.
        unsafe { command.pre_exec(move || prepare_child(&inherited_fds)) };
        if let Some(inside) = inside {
            let mount_namespace = inside.mount_namespace.clone();
            // SAFETY: the closure makes one system call on a descriptor that it owns. The new
            // process shares its file system information with no thread.
            unsafe {
                command.pre_exec(move || Ok(setns(&*mount_namespace, CloneFlags::CLONE_NEWNS)?))
            };
        }
        let (child, pidfd) = spawn_inside(&mut command, inside)
            .map_err(|e| start_failure(&program.display().to_string(), &e))?;
        Ok(Self {
            child,
            pidfd,
            socket: own_socket,
            log,
            stderr_log,
            log_path: None,
            call_started_at: Instant::now(),
            cancel_timeout: Duration::ZERO,
            canceled_at: None,
            is_reaped: false,
        })
    }

    /// Sends the encoded request `request`. After a failure CRIU's log is written to the file
    /// `log_path`.
    pub(super) fn send_request(
        &mut self,
        request: &[u8],
        log_path: PathBuf,
    ) -> Result<(), Failure> {
        self.log_path = Some(log_path);
        self.restart_timeout();
        send(self.socket.as_raw_fd(), request, MsgFlags::MSG_NOSIGNAL)
            .map_err(|e| start_failure("request", &e))?;
        Ok(())
    }

    /// True if CRIU has exited. It is not reaped yet.
    pub(super) fn has_exited(&self) -> bool {
        let mut fds = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        !matches!(poll(&mut fds, PollTimeout::ZERO), Ok(0))
    }

    /// Raises CRIU's priority above all ordinary processes, so that CRIU does not wait for CPU time
    /// while it has stopped the task.
    pub(super) fn raise_priority(&self) {
        // SAFETY: the call accesses no memory. Without the privilege the priority remains
        // unchanged.
        unsafe { libc::setpriority(libc::PRIO_PGRP, self.child.id(), HIGH_PRIORITY_NICE) };
    }

    /// Sets the time limit for CRIU to exit after a cancellation, before it is killed.
    pub(super) fn set_cancel_timeout(&mut self, timeout: Duration) {
        self.cancel_timeout = timeout;
    }

    /// Returns CRIU's PID, which is also the id of its process group.
    pub(super) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Restarts the timeout for the next call.
    pub(super) fn restart_timeout(&mut self) {
        self.call_started_at = Instant::now();
    }

    /// Waits for the next message. After an error the process is dead and reaped.
    pub(super) fn wait_for_message(&mut self, limits: &CallLimits) -> Result<SwrkMessage, Failure> {
        let result = self.receive_message(limits);
        if result.is_err() {
            self.kill();
            self.save_log();
        }
        result
    }

    fn receive_message(&mut self, limits: &CallLimits) -> Result<SwrkMessage, Failure> {
        let socket = self.socket.as_raw_fd();
        self.wait_until_exit(limits, true)?;
        let mut bytes = vec![0u8; REPLY_BYTES_MAX];
        let byte_count = match recv(socket, &mut bytes, MsgFlags::MSG_DONTWAIT) {
            Ok(0) | Err(Errno::EAGAIN | Errno::ECONNRESET) => {
                return Err(self.wait_for_exit_failure(limits));
            }
            Ok(byte_count) => byte_count,
            Err(e) => return Err(Failure::Engine(format!("cannot read from the engine: {e}"))),
        };
        let response = Criu_resp::parse_from_bytes(&bytes[..byte_count])
            .map_err(|e| Failure::Engine(format!("the engine's reply is malformed: {e}")))?;
        if response.type_() == Criu_req_type::NOTIFY {
            let notification = response.notify.get_or_default();
            return Ok(SwrkMessage::Notification {
                point: notification.script().to_string(),
                root_pid: notification.pid(),
            });
        }
        // CRIU may set the error text after a success, too. Only the field `success` is decisive.
        match response.success() {
            true => Ok(SwrkMessage::Done),
            false => Err(self.failure_from_log(format!(
                "it failed with error number {}",
                response.cr_errno()
            ))),
        }
    }

    /// Replies to a notification. Sending fails only if CRIU is exiting, which the next
    /// [`wait_for_message`](Self::wait_for_message) reports.
    pub(super) fn acknowledge(&mut self, success: bool) {
        let _ = send(
            self.socket.as_raw_fd(),
            &options::encode_acknowledgement(success),
            MsgFlags::MSG_NOSIGNAL,
        );
    }

    /// Acknowledges all further notifications until CRIU has exited.
    ///
    /// # Errors
    /// CRIU reports an error or does not exit in time.
    pub(super) fn wait_until_finished(&mut self, limits: &CallLimits) -> Result<(), Failure> {
        while let SwrkMessage::Notification { .. } = self.wait_for_message(limits)? {
            self.acknowledge(true);
        }
        self.wait_for_exit(limits)
    }

    /// Waits for the exit after [`SwrkMessage::Done`]. Fails if CRIU does not exit in time, or if
    /// the call was canceled.
    pub(super) fn wait_for_exit(&mut self, limits: &CallLimits) -> Result<(), Failure> {
        let wait_result = self.wait_until_exit(limits, false);
        if wait_result.is_err() {
            self.kill();
            self.save_log();
            return wait_result;
        }
        // The exit status is ignored, because CRIU has already reported success.
        self.reap()
            .map_err(|e| Failure::Engine(format!("cannot wait for the engine: {e}")))?;
        self.canceled_at.map_or(Ok(()), |_| Err(canceled_failure()))
    }

    /// Kills the process group and reaps CRIU.
    pub(super) fn kill(&mut self) {
        if !self.is_reaped {
            let _ = self.reap();
        }
    }

    /// Kills the other processes of the process group, then CRIU itself. If CRIU has already
    /// exited, its exit status is returned unchanged.
    fn reap(&mut self) -> io::Result<ExitStatus> {
        self.is_reaped = true;
        reap_group(&mut self.child)
    }

    /// Waits until CRIU has exited or, with `or_message`, has sent a message. Fails when the
    /// timeout has expired. After a cancellation CRIU has at most the cancel timeout to exit; then
    /// the wait fails.
    fn wait_until_exit(&mut self, limits: &CallLimits, or_message: bool) -> Result<(), Failure> {
        loop {
            let mut deadline = self.call_started_at + limits.timeout;
            let mut fds = vec![PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
            match self.canceled_at {
                Some(canceled_at) => deadline = deadline.min(canceled_at + self.cancel_timeout),
                None => fds.push(PollFd::new(limits.cancel.fd(), PollFlags::POLLIN)),
            }
            if or_message {
                fds.push(PollFd::new(self.socket.as_fd(), PollFlags::POLLIN));
            }
            let remaining_time = deadline.saturating_duration_since(Instant::now());
            // The time is rounded up, so that the last wait does not spin.
            let remaining_ms = remaining_time
                .as_millis()
                .saturating_add(1)
                .min(i32::MAX as u128) as i32;
            match poll(
                &mut fds,
                PollTimeout::try_from(remaining_ms).unwrap_or(PollTimeout::MAX),
            ) {
                Ok(0) if remaining_time.is_zero() => {
                    let timeout =
                        Micros(u64::try_from(limits.timeout.as_micros()).unwrap_or(u64::MAX));
                    return Err(self
                        .canceled_at
                        .map_or(Failure::Deadline { allowed: timeout }, |_| {
                            canceled_failure()
                        }));
                }
                Ok(0) | Err(Errno::EINTR) => {}
                Err(e) => return Err(Failure::Engine(format!("cannot wait for the engine: {e}"))),
                Ok(_) => {
                    let is_ready =
                        |index: usize| fds.get(index).is_some_and(|fd| fd.any().unwrap_or(true));
                    let (has_exited, is_second_ready, is_third_ready) =
                        (is_ready(0), is_ready(1), is_ready(2));
                    let is_cancel = self.canceled_at.is_none() && is_second_ready;
                    if has_exited || is_third_ready || (is_second_ready && !is_cancel) {
                        return Ok(());
                    }
                    self.canceled_at = Some(Instant::now());
                }
            }
        }
    }

    /// Waits for CRIU's exit after it has closed the socket. Returns the reason why CRIU ended
    /// without a reply.
    fn wait_for_exit_failure(&mut self, limits: &CallLimits) -> Failure {
        if let Err(failure) = self.wait_until_exit(limits, false) {
            return failure;
        }
        match self.reap() {
            Err(e) => Failure::Engine(format!("cannot wait for the engine: {e}")),
            Ok(status) => match status.signal() {
                Some(signal) => Failure::Killed { signal },
                None => self.failure_from_log(format!("it ended without a reply, {status}")),
            },
        }
    }

    fn failure_from_log(&self, default_reason: String) -> Failure {
        Failure::Engine(
            criu_log::failure_reason_in_memory(&self.log, &self.stderr_log)
                .unwrap_or(default_reason),
        )
    }

    /// Writes CRIU's log to its file, for a person who looks for the cause of a failure.
    fn save_log(&self) {
        if let Some(path) = &self.log_path {
            // The directory may be full or gone. The cause is part of the failure in any case.
            let _ = self.log.save(path);
        }
    }
}

impl Drop for Swrk {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Raises the priority of the calling thread above all ordinary threads.
pub(super) fn raise_thread_priority() {
    // SAFETY: the call accesses no memory. Without the privilege the priority remains unchanged.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, HIGH_PRIORITY_NICE) };
}

/// Lowers the priority of the calling thread.
pub(super) fn lower_thread_priority() {
    // SAFETY: the call accesses no memory. Lowering the priority needs no privilege.
    unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, LOW_PRIORITY_NICE) };
}

fn start_failure(object: &str, error: &dyn std::fmt::Display) -> Failure {
    Failure::Engine(format!("cannot start the engine: {object}: {error}"))
}

fn canceled_failure() -> Failure {
    Failure::Cancelled("the migration was cancelled".into())
}

/// Prepares a child process before it executes CRIU. Afterwards only the owner can read the images
/// that the child writes, the child dies with its parent, no signal is blocked, the limit on open
/// files is as high as possible, and the child inherits only the descriptors in `inherited_fds`.
fn prepare_child(inherited_fds: &[RawFd]) -> io::Result<()> {
    // SAFETY: only system calls; the signal set and the limit are local values.
    unsafe {
        libc::umask(0o077);
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        let mut empty_set = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut empty_set);
        libc::sigprocmask(
            libc::SIG_SETMASK,
            &raw const empty_set,
            std::ptr::null_mut(),
        );
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        // CRIU needs two descriptors for each megabyte of memory that it transfers lazily.
        let mut file_limit = std::mem::zeroed::<libc::rlimit>();
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut file_limit) == 0 {
            file_limit.rlim_cur = file_limit.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const file_limit);
        }
        libc::syscall(
            libc::SYS_close_range,
            3,
            u32::MAX,
            libc::CLOSE_RANGE_CLOEXEC,
        );
        for &fd in inherited_fds {
            if libc::fcntl(fd, libc::F_SETFD, 0) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

/// Starts a child in the PID namespace of `inside`, if it is given, and opens its pidfd.
fn spawn_inside(
    command: &mut Command,
    inside: Option<&TaskNamespaces>,
) -> io::Result<(Child, OwnedFd)> {
    let Some(inside) = inside else {
        return spawn_with_pidfd(command);
    };
    let own_namespace = File::open("/proc/self/ns/pid")?;
    setns(&*inside.pid_namespace, CloneFlags::CLONE_NEWPID)?;
    let spawn_result = spawn_with_pidfd(command);
    setns(own_namespace, CloneFlags::CLONE_NEWPID)
        .expect("the way back into one's own namespace is open");
    spawn_result
}

/// Starts a child and opens its pidfd. If opening fails, the child is killed.
fn spawn_with_pidfd(command: &mut Command) -> io::Result<(Child, OwnedFd)> {
    let mut child = command.spawn()?;
    match open_pidfd(&child) {
        Ok(pidfd) => Ok((child, pidfd)),
        Err(e) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(e)
        }
    }
}

fn open_pidfd(child: &Child) -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved; the result is checked before it is owned.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor (close-on-exec) for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Takes ownership of a descriptor that was received in a message.
pub(super) fn take_ownership(fd: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just created this descriptor for this process, and no other code uses
    // its number.
    unsafe { OwnedFd::from_raw_fd(fd) }
}

/// A CRIU process that executes one command line and exits. Dropping this value kills and reaps the
/// process.
pub(super) struct CriuCommand {
    child: Child,
    pidfd: OwnedFd,
    is_reaped: bool,
}

impl CriuCommand {
    /// Starts CRIU. Its standard error is written to a file in `dir`. CRIU inherits the descriptors
    /// `inherited_descriptors`, and no other descriptor.
    pub(super) fn start<'a>(
        criu_path: &Path,
        arguments: impl Iterator<Item = &'a OsStr>,
        dir: &Path,
        inherited_descriptors: &[BorrowedFd<'_>],
        variables: &[(&'static str, String)],
    ) -> Result<Self, Failure> {
        let to_failure = |e: io::Error| {
            Failure::Engine(format!(
                "cannot start the engine: {}: {e}",
                criu_path.display()
            ))
        };
        let inherited_fds: Vec<RawFd> = inherited_descriptors
            .iter()
            .map(|fd| fd.as_raw_fd())
            .collect();
        let stderr_file = File::create(dir.join(STDERR_FILE)).map_err(to_failure)?;
        let mut command = Command::new(criu_path);
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(stderr_file)
            .process_group(0);
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        // SAFETY: as for `Swrk::start`.
        unsafe { command.pre_exec(move || prepare_child(&inherited_fds)) };
        let (child, pidfd) = spawn_with_pidfd(&mut command).map_err(to_failure)?;
        Ok(Self {
            child,
            pidfd,
            is_reaped: false,
        })
    }

    /// Returns CRIU's PID, which is also the id of its process group.
    pub(super) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Returns a descriptor that is readable when CRIU has exited.
    ///
    /// # Errors
    /// No file descriptor is available.
    pub(super) fn exit_descriptor(&self) -> io::Result<OwnedFd> {
        self.pidfd.try_clone()
    }

    /// Waits for the exit, and kills CRIU at the deadline or on cancellation. `log_path` is the
    /// path of CRIU's log, from which the reason of a failure is read.
    pub(super) fn wait_until_exit(
        &mut self,
        limits: &CallLimits,
        log_path: &Path,
    ) -> Result<(), Failure> {
        let failure = wait_until_readable(&self.pidfd, limits, "the engine").err();
        let status = self
            .reap()
            .map_err(|e| Failure::Engine(format!("cannot wait for the engine: {e}")))?;
        match (failure, status.signal()) {
            (Some(failure), _) => Err(failure),
            (None, Some(signal)) => Err(Failure::Killed { signal }),
            (None, None) if status.success() => Ok(()),
            (None, None) => {
                let stderr = log_path.with_file_name(STDERR_FILE);
                Err(Failure::Engine(
                    criu_log::failure_reason(log_path, &stderr)
                        .unwrap_or_else(|| format!("it failed, {status}")),
                ))
            }
        }
    }

    /// Kills the other processes of the process group, then CRIU itself. If CRIU has already
    /// exited, its exit status is returned unchanged.
    fn reap(&mut self) -> io::Result<ExitStatus> {
        self.is_reaped = true;
        reap_group(&mut self.child)
    }
}

impl Drop for CriuCommand {
    fn drop(&mut self) {
        if !self.is_reaped {
            // No caller remains that could handle the error.
            let _ = self.reap();
        }
    }
}

/// Waits until the descriptor `event_fd` is readable. `event_name` is the name of the awaited event
/// in error messages.
///
/// # Errors
/// The timeout has expired, or the call was canceled.
pub(super) fn wait_until_readable(
    event_fd: impl AsFd,
    limits: &CallLimits,
    event_name: &str,
) -> Result<(), Failure> {
    let deadline = Instant::now() + limits.timeout;
    loop {
        let remaining_time = deadline.saturating_duration_since(Instant::now());
        let mut fds =
            [event_fd.as_fd(), limits.cancel.fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let remaining_ms = remaining_time
            .as_millis()
            .saturating_add(1)
            .min(i32::MAX as u128) as i32;
        match poll(
            &mut fds,
            PollTimeout::try_from(remaining_ms).unwrap_or(PollTimeout::MAX),
        ) {
            Ok(0) if remaining_time.is_zero() => {
                let timeout = Micros(u64::try_from(limits.timeout.as_micros()).unwrap_or(u64::MAX));
                return Err(Failure::Deadline { allowed: timeout });
            }
            Ok(0) | Err(Errno::EINTR) => {}
            Err(e) => {
                return Err(Failure::Engine(format!(
                    "cannot wait for {event_name}: {e}"
                )));
            }
            Ok(_) if fds[0].any().unwrap_or(true) => return Ok(()),
            Ok(_) => return Err(canceled_failure()),
        }
    }
}

/// Kills the process group that this child leads, and reaps the child.
fn reap_group(child: &mut Child) -> io::Result<ExitStatus> {
    // The group id cannot have been reused, because its leader is not reaped yet.
    let _ = nix::sys::signal::killpg(
        nix::unistd::Pid::from_raw(child.id() as i32),
        nix::sys::signal::SIGKILL,
    );
    child.wait()
}

/// Runs `criu --version` and returns the version.
///
/// # Errors
/// The program cannot be executed, does not exit in time, or prints no version.
pub(super) fn query_version(program: &Path) -> Result<String, VersionError> {
    let mut command = Command::new(program);
    command
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0);
    // SAFETY: as for `Swrk::start`.
    unsafe { command.pre_exec(|| prepare_child(&[])) };
    let mut child = command.spawn().map_err(VersionError::Start)?;
    let pidfd = open_pidfd(&child);
    let has_exited = pidfd.and_then(|pidfd| {
        let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        let timeout = PollTimeout::try_from(VERSION_TIMEOUT).unwrap_or(PollTimeout::MAX);
        Ok(poll(&mut fds, timeout)? > 0)
    });
    if !matches!(has_exited, Ok(true)) {
        let _ = reap_group(&mut child);
        return Err(VersionError::TimedOut(VERSION_TIMEOUT));
    }
    let output = child.wait_with_output().map_err(VersionError::ReadOutput)?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let version = text
        .lines()
        .find_map(|line| line.strip_prefix("Version:"))
        .map(|v| v.trim().to_string());
    match version {
        Some(version) if output.status.success() => Ok(version),
        _ => {
            let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
            let first_line = stderr
                .lines()
                .chain(text.lines())
                .map(str::trim)
                .find(|line| !line.is_empty());
            Err(VersionError::Failed {
                status: output.status,
                first_line: first_line.unwrap_or("no output").into(),
            })
        }
    }
}
