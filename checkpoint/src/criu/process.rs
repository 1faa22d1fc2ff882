//! Processes of CRIU: [`Swrk`] executes requests over a socket, [`CriuCommand`] executes a command
//! line.
//!
//! Each process runs in its own process group, which is killed as a whole. Every wait for a process
//! has a deadline.
#![allow(unsafe_code)] // What a child does between fork and exec has no safe interface.

use super::{STDERR, criu_log, options};
use crate::engine::{CallLimits, VersionError};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
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
/// Nice value for work whose result no operation waits for. Not the lowest priority, because a
/// thread without CPU time may hold locks of the kernel.
const LOW_PRIORITY_NICE: i32 = 10;
/// Timeout for `criu --version`.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);

/// A message from CRIU.
#[derive(Debug)]
pub(super) enum SwrkMessage {
    /// CRIU has reached a point at which it waits for an acknowledgement.
    Notify {
        /// CRIU's name of the point, for example `post-restore`.
        point: String,
        /// PID of the restored root if CRIU reports it at this point, otherwise 0.
        pid: i32,
    },
    /// CRIU has executed the request successfully.
    Done,
}

/// A running `criu swrk`. Dropping it kills and reaps it.
pub(super) struct Swrk {
    child: Child,
    pidfd: OwnedFd,
    socket: OwnedFd,
    /// The image directory. CRIU opens it through the descriptor of this process, so the descriptor
    /// must remain open.
    _images: File,
    log: PathBuf,
    stderr: PathBuf,
    /// Time at which the current call started.
    call_started: Instant,
    /// Time limit for CRIU to exit after a cancellation, before it is killed.
    cancel_grace: Duration,
    /// Time at which the call was canceled; `None` if it was not.
    canceled_at: Option<Instant>,
    reaped: bool,
}

impl Swrk {
    /// Starts CRIU and sends it the request. CRIU inherits `inherit` and `images` with the same
    /// descriptor numbers, and no other descriptor.
    pub(super) fn start(
        program: &Path,
        dir: &Path,
        images: File,
        log: &str,
        inherit: &[BorrowedFd<'_>],
        variables: &[(&'static str, String)],
        request: &[u8],
    ) -> Result<Swrk, Failure> {
        let failed = |what: &str, e: &dyn std::fmt::Display| {
            Failure::Engine(format!("cannot start the engine: {what}: {e}"))
        };
        let (ours, theirs) = socketpair(
            AddressFamily::Unix,
            SockType::SeqPacket,
            None,
            SockFlag::SOCK_CLOEXEC,
        )
        .map_err(|e| failed("socket pair", &e))?;
        let stderr = dir.join(STDERR);
        let errors = File::create(&stderr).map_err(|e| failed("its error file", &e))?;
        let mut inherited_fds: Vec<RawFd> = inherit.iter().map(|fd| fd.as_raw_fd()).collect();
        inherited_fds.extend([theirs.as_raw_fd(), images.as_raw_fd()]);
        let mut command = Command::new(program);
        command.arg("swrk").arg(theirs.as_raw_fd().to_string());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .process_group(0);
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        // SAFETY: the closure makes only system calls on descriptors that it owns; it neither
        // allocates nor locks.
        unsafe { command.pre_exec(move || prepare_child(&inherited_fds)) };
        let (child, pidfd) = spawn_with_pidfd(&mut command)
            .map_err(|e| failed(&program.display().to_string(), &e))?;
        let swrk = Swrk {
            child,
            pidfd,
            socket: ours,
            _images: images,
            log: dir.join(log),
            stderr,
            call_started: Instant::now(),
            cancel_grace: Duration::ZERO,
            canceled_at: None,
            reaped: false,
        };
        send(swrk.socket.as_raw_fd(), request, MsgFlags::MSG_NOSIGNAL)
            .map_err(|e| failed("request", &e))?;
        Ok(swrk)
    }

    /// Raises CRIU's priority above all ordinary processes, so that CRIU does not wait for CPU time
    /// while it has stopped the task.
    pub(super) fn raise_priority(&self) {
        // SAFETY: the call accesses no memory. Without the privilege the priority remains
        // unchanged.
        unsafe { libc::setpriority(libc::PRIO_PGRP, self.child.id(), HIGH_PRIORITY_NICE) };
    }

    /// Sets the time limit for CRIU to exit after a cancellation, before it is killed.
    pub(super) fn set_cancel_grace(&mut self, grace: Duration) {
        self.cancel_grace = grace;
    }

    /// Returns CRIU's PID, which is also the id of its process group.
    pub(super) fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Restarts the timeout for the next call.
    pub(super) fn restart_timeout(&mut self) {
        self.call_started = Instant::now();
    }

    /// Waits for the next message. After an error the process is dead and reaped.
    pub(super) fn receive(&mut self, limits: &CallLimits) -> Result<SwrkMessage, Failure> {
        let result = self.try_receive(limits);
        if result.is_err() {
            self.kill();
        }
        result
    }

    fn try_receive(&mut self, limits: &CallLimits) -> Result<SwrkMessage, Failure> {
        let socket = self.socket.as_raw_fd();
        self.wait(limits, true)?;
        let mut bytes = vec![0u8; REPLY_BYTES_MAX];
        let read = match recv(socket, &mut bytes, MsgFlags::MSG_DONTWAIT) {
            Ok(0) | Err(Errno::EAGAIN | Errno::ECONNRESET) => return Err(self.exit_failure(limits)),
            Ok(read) => read,
            Err(e) => return Err(Failure::Engine(format!("cannot read from the engine: {e}"))),
        };
        let answer = Criu_resp::parse_from_bytes(&bytes[..read])
            .map_err(|e| Failure::Engine(format!("the engine's reply is malformed: {e}")))?;
        if answer.type_() == Criu_req_type::NOTIFY {
            let notify = answer.notify.get_or_default();
            return Ok(SwrkMessage::Notify {
                point: notify.script().to_string(),
                pid: notify.pid(),
            });
        }
        // CRIU may set the error text after a success, too; only this field counts.
        match answer.success() {
            true => Ok(SwrkMessage::Done),
            false => {
                Err(self
                    .failure_from_log(format!("it failed with error number {}", answer.cr_errno())))
            }
        }
    }

    /// Replies to a notification. Sending fails only if CRIU is exiting, which the next
    /// [`receive`](Self::receive) reports.
    pub(super) fn acknowledge(&mut self, success: bool) {
        let _ = send(
            self.socket.as_raw_fd(),
            &options::encode_acknowledgement(success),
            MsgFlags::MSG_NOSIGNAL,
        );
    }

    /// Acknowledges all further notifications until CRIU has exited. Fails if CRIU reports an
    /// error.
    pub(super) fn finish(&mut self, limits: &CallLimits) -> Result<(), Failure> {
        while let SwrkMessage::Notify { .. } = self.receive(limits)? {
            self.acknowledge(true);
        }
        self.wait_for_exit(limits)
    }

    /// Waits for the exit after [`SwrkMessage::Done`].
    pub(super) fn wait_for_exit(&mut self, limits: &CallLimits) -> Result<(), Failure> {
        let ended = self.wait(limits, false);
        if ended.is_err() {
            self.kill();
            return ended;
        }
        // The exit status does not count: CRIU has reported success.
        self.reap()
            .map_err(|e| Failure::Engine(format!("cannot wait for the engine: {e}")))?;
        self.canceled_at.map_or(Ok(()), |_| Err(canceled()))
    }

    /// Kills the process group and reaps CRIU.
    pub(super) fn kill(&mut self) {
        if !self.reaped {
            let _ = self.reap();
        }
    }

    /// Kills the other processes of the process group, then CRIU itself. If CRIU has already
    /// exited, its exit status is returned unchanged.
    fn reap(&mut self) -> io::Result<ExitStatus> {
        self.reaped = true;
        reap_group(&mut self.child)
    }

    /// Waits until CRIU has exited or, with `or_message`, has sent a message. Fails at the timeout,
    /// or after a cancellation.
    fn wait(&mut self, limits: &CallLimits, or_message: bool) -> Result<(), Failure> {
        loop {
            let mut deadline = self.call_started + limits.timeout;
            let mut fds = vec![PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
            match self.canceled_at {
                Some(at) => deadline = deadline.min(at + self.cancel_grace),
                None => fds.push(PollFd::new(limits.cancel.fd(), PollFlags::POLLIN)),
            }
            if or_message {
                fds.push(PollFd::new(self.socket.as_fd(), PollFlags::POLLIN));
            }
            let left = deadline.saturating_duration_since(Instant::now());
            // Rounded up, so that the last wait does not spin.
            let left_ms = left.as_millis().saturating_add(1).min(i32::MAX as u128) as i32;
            match poll(
                &mut fds,
                PollTimeout::try_from(left_ms).unwrap_or(PollTimeout::MAX),
            ) {
                Ok(0) if left.is_zero() => {
                    let allowed =
                        Micros(u64::try_from(limits.timeout.as_micros()).unwrap_or(u64::MAX));
                    return Err(self
                        .canceled_at
                        .map_or(Failure::Deadline { allowed }, |_| canceled()));
                }
                Ok(0) | Err(Errno::EINTR) => {}
                Err(e) => return Err(Failure::Engine(format!("cannot wait for the engine: {e}"))),
                Ok(_) => {
                    let ready =
                        |index: usize| fds.get(index).is_some_and(|fd| fd.any().unwrap_or(true));
                    let (ended, second, third) = (ready(0), ready(1), ready(2));
                    let is_cancel = self.canceled_at.is_none() && second;
                    if ended || third || (second && !is_cancel) {
                        return Ok(());
                    }
                    self.canceled_at = Some(Instant::now());
                }
            }
        }
    }

    /// Waits for CRIU's exit after it has closed the socket. Returns why it ended without a reply.
    fn exit_failure(&mut self, limits: &CallLimits) -> Failure {
        if let Err(failure) = self.wait(limits, false) {
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

    fn failure_from_log(&self, otherwise: String) -> Failure {
        Failure::Engine(criu_log::failure_reason(&self.log, &self.stderr).unwrap_or(otherwise))
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

fn canceled() -> Failure {
    Failure::Cancelled("the migration was cancelled".into())
}

/// Prepares a child process before it executes CRIU: only the owner can read the images that it
/// writes, it dies with its parent, no signal is blocked, and it inherits only the descriptors in
/// `inherited_fds`.
fn prepare_child(inherited_fds: &[RawFd]) -> io::Result<()> {
    // SAFETY: only system calls; the signal set and the limit are local values.
    unsafe {
        libc::umask(0o077);
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        let mut none = std::mem::zeroed::<libc::sigset_t>();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        libc::signal(libc::SIGPIPE, libc::SIG_DFL);
        // CRIU needs two descriptors for each megabyte of memory that it transfers lazily.
        let mut files = std::mem::zeroed::<libc::rlimit>();
        if libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut files) == 0 {
            files.rlim_cur = files.rlim_max;
            libc::setrlimit(libc::RLIMIT_NOFILE, &raw const files);
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

/// Starts a child and opens its pidfd. If opening fails, the child is killed.
fn spawn_with_pidfd(command: &mut Command) -> io::Result<(Child, OwnedFd)> {
    let mut child = command.spawn()?;
    match pidfd_of(&child) {
        Ok(pidfd) => Ok((child, pidfd)),
        Err(e) => {
            let _ = child.kill();
            let _ = child.wait();
            Err(e)
        }
    }
}

fn pidfd_of(child: &Child) -> io::Result<OwnedFd> {
    // SAFETY: no memory is involved; the result is checked before it is owned.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, child.id(), 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just created this descriptor (close-on-exec) for this process.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Takes ownership of a descriptor that was received in a message.
pub(super) fn take_ownership(descriptor: RawFd) -> OwnedFd {
    // SAFETY: the kernel has just created this descriptor for this process, and nothing else knows
    // its number.
    unsafe { OwnedFd::from_raw_fd(descriptor) }
}

/// A CRIU process that executes one command line and exits. Dropping it kills and reaps the
/// process.
pub(super) struct CriuCommand {
    child: Child,
    pidfd: OwnedFd,
    reaped: bool,
}

impl CriuCommand {
    /// Starts CRIU. Its standard error is written to a file in `dir`. CRIU inherits the descriptors
    /// `inherit`, and no other descriptor.
    pub(super) fn start<'a>(
        criu: &Path,
        arguments: impl Iterator<Item = &'a OsStr>,
        dir: &Path,
        inherit: &[BorrowedFd<'_>],
        variables: &[(&'static str, String)],
    ) -> Result<CriuCommand, Failure> {
        let failed = |e: io::Error| {
            Failure::Engine(format!("cannot start the engine: {}: {e}", criu.display()))
        };
        let inherited_fds: Vec<RawFd> = inherit.iter().map(|fd| fd.as_raw_fd()).collect();
        let errors = File::create(dir.join(STDERR)).map_err(failed)?;
        let mut command = Command::new(criu);
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .process_group(0);
        command.envs(variables.iter().map(|(name, value)| (name, value)));
        // SAFETY: as for `Swrk::start`.
        unsafe { command.pre_exec(move || prepare_child(&inherited_fds)) };
        let (child, pidfd) = spawn_with_pidfd(&mut command).map_err(failed)?;
        Ok(CriuCommand {
            child,
            pidfd,
            reaped: false,
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

    /// Waits for the exit, and kills CRIU at the deadline or on cancellation. `log` is the path of
    /// CRIU's log, from which the reason of a failure is read.
    pub(super) fn finish(&mut self, limits: &CallLimits, log: &Path) -> Result<(), Failure> {
        let why = wait_readable(&self.pidfd, limits, "the engine").err();
        let status = self
            .reap()
            .map_err(|e| Failure::Engine(format!("cannot wait for the engine: {e}")))?;
        match (why, status.signal()) {
            (Some(why), _) => Err(why),
            (None, Some(signal)) => Err(Failure::Killed { signal }),
            (None, None) if status.success() => Ok(()),
            (None, None) => {
                let stderr = log.with_file_name(STDERR);
                Err(Failure::Engine(
                    criu_log::failure_reason(log, &stderr)
                        .unwrap_or_else(|| format!("it failed, {status}")),
                ))
            }
        }
    }

    /// Kills the other processes of the process group, then CRIU itself. If CRIU has already
    /// exited, its exit status is returned unchanged.
    fn reap(&mut self) -> io::Result<ExitStatus> {
        self.reaped = true;
        reap_group(&mut self.child)
    }
}

impl Drop for CriuCommand {
    fn drop(&mut self) {
        if !self.reaped {
            // No caller remains that could handle the error.
            let _ = self.reap();
        }
    }
}

/// Waits until the descriptor `readable` is readable. `what` describes the awaited event in error
/// messages.
///
/// # Errors
/// The timeout has expired, or the call was canceled.
pub(super) fn wait_readable(
    readable: impl AsFd,
    limits: &CallLimits,
    what: &str,
) -> Result<(), Failure> {
    let deadline = Instant::now() + limits.timeout;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let mut fds =
            [readable.as_fd(), limits.cancel.fd()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        let left_ms = left.as_millis().saturating_add(1).min(i32::MAX as u128) as i32;
        match poll(
            &mut fds,
            PollTimeout::try_from(left_ms).unwrap_or(PollTimeout::MAX),
        ) {
            Ok(0) if left.is_zero() => {
                let allowed = Micros(u64::try_from(limits.timeout.as_micros()).unwrap_or(u64::MAX));
                return Err(Failure::Deadline { allowed });
            }
            Ok(0) | Err(Errno::EINTR) => {}
            Err(e) => return Err(Failure::Engine(format!("cannot wait for {what}: {e}"))),
            Ok(_) if fds[0].any().unwrap_or(true) => return Ok(()),
            Ok(_) => return Err(canceled()),
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
/// The program cannot be executed, or prints no query_version.
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
    let pidfd = pidfd_of(&child);
    let ended = pidfd.and_then(|pidfd| {
        let mut fds = [PollFd::new(pidfd.as_fd(), PollFlags::POLLIN)];
        let allowed = PollTimeout::try_from(VERSION_TIMEOUT).unwrap_or(PollTimeout::MAX);
        Ok(poll(&mut fds, allowed)? > 0)
    });
    if !matches!(ended, Ok(true)) {
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
            let errors = String::from_utf8_lossy(&output.stderr).into_owned();
            let first = errors
                .lines()
                .chain(text.lines())
                .map(str::trim)
                .find(|line| !line.is_empty());
            Err(VersionError::Failed {
                status: output.status,
                first_line: first.unwrap_or("no output").into(),
            })
        }
    }
}
