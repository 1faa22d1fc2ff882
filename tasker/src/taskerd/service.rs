//! The main loop of the service.

use crate::machine_watcher::MachineWatcher;
use crate::pending::{PendingConnection, PendingConnections};
use crate::registry::SessionRegistry;
use anyhow::Context;
use checkpoint::seal::SITE_KEY_VARIABLE;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use sempa_proto::tasker_service::{
    BODY_BYTES_MAX, HEAD_BYTES, PROTOCOL_VERSION, ServiceRefusal, ServiceReply, ServiceRequest,
    SessionId, encode,
};
use sempa_service_settings::SETTINGS_VARIABLE;
use sempa_service_settings::host_account::{ACCOUNT_DIR_VARIABLE, account_dir};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

/// Maximum number of connections that are accepted before other events are handled.
const ACCEPTS_PER_ROUND_MAX: usize = 64;
/// Variables of the service's environment that taskers get. Nothing else reaches them: a tasker
/// must not depend on who has started the service.
const PASSED_VARIABLES: [&str; 8] = [
    "PATH",
    "SEMPA_CRIU",
    SITE_KEY_VARIABLE,
    SETTINGS_VARIABLE,
    ACCOUNT_DIR_VARIABLE,
    "SEMPA_FREEZER",
    "SEMPA_PRE_COPY",
    "SEMPA_POST_COPY",
];
/// Name of the tasker's program.
const TASKER_PROGRAM: &str = "pvm-tasker";
/// Name of the load watcher's program.
const WATCHER_PROGRAM: &str = "pvm-load-watcher";

#[derive(Debug)]
pub(crate) struct Service {
    listener: UnixListener,
    signals: SignalFd,
    pending: PendingConnections<UnixStream>,
    registry: SessionRegistry,
    tasker_path: PathBuf,
    machine_watcher: MachineWatcher,
}

impl Service {
    /// Creates the service. Must be called while the process has only one thread.
    ///
    /// # Errors
    /// The program's own path is not known, or a system call failed.
    pub(crate) fn new(listener: UnixListener, registry: SessionRegistry) -> anyhow::Result<Self> {
        let mut handled_signals = SigSet::empty();
        handled_signals.add(Signal::SIGCHLD);
        handled_signals.add(Signal::SIGTERM);
        handled_signals.add(Signal::SIGINT);
        handled_signals.thread_block().context("signals")?;
        let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
        let own_path = std::env::current_exe().context("the path of this program")?;
        let socket_address = listener.local_addr().context("the socket")?;
        let socket_dir = socket_address.as_pathname().and_then(Path::parent);
        let machine_watcher = MachineWatcher::new(
            program_path(&own_path, WATCHER_PROGRAM),
            socket_dir.context("the socket has no path")?.to_path_buf(),
            account_dir(std::env::var_os(ACCOUNT_DIR_VARIABLE)),
        );
        Ok(Self {
            listener,
            signals: SignalFd::with_flags(&handled_signals, flags).context("signals")?,
            pending: PendingConnections::default(),
            registry,
            tasker_path: program_path(&own_path, TASKER_PROGRAM),
            machine_watcher,
        })
    }

    /// Serves daemons until SIGTERM. The taskers go on.
    ///
    /// # Errors
    /// A system call failed.
    pub(crate) fn run(mut self) -> anyhow::Result<()> {
        tracing::info!("serving the daemons of all users of this host");
        loop {
            self.machine_watcher.check(Instant::now());
            let ready = self.wait_for_events()?;
            if ready.signal && self.handle_signals() {
                self.machine_watcher.end();
                return Ok(());
            }
            let now = Instant::now();
            if ready.machine_watcher {
                self.machine_watcher.read(now);
            }
            let ready_connections = self.pending.take_ready(|index| ready.pending[index]);
            for connection in ready_connections {
                self.read_request(connection);
            }
            self.pending.remove_expired(now);
            if ready.listener {
                self.accept_connections(now);
            }
        }
    }

    fn wait_for_events(&self) -> io::Result<ReadySources> {
        let mut fds = vec![
            PollFd::new(self.signals.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.listener.as_fd(), PollFlags::POLLIN),
        ];
        let pending_fds = self.pending.sockets();
        fds.extend(pending_fds.map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLIN)));
        let pending_end = fds.len();
        fds.extend(
            self.machine_watcher
                .fd()
                .map(|fd| PollFd::new(fd, PollFlags::POLLIN)),
        );
        let now = Instant::now();
        let watcher_timeout = self.machine_watcher.next_timeout(now);
        let timeout = self.pending.next_timeout(now);
        let timeout = timeout.map_or(watcher_timeout, |timeout| timeout.min(watcher_timeout));
        let timeout = PollTimeout::try_from(timeout.as_millis() + 1).unwrap_or(PollTimeout::MAX);
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
        let is_ready = |fd: &PollFd<'_>| fd.any().unwrap_or(true);
        Ok(ReadySources {
            signal: is_ready(&fds[0]),
            listener: is_ready(&fds[1]),
            pending: fds[2..pending_end].iter().map(is_ready).collect(),
            machine_watcher: fds.get(pending_end).is_some_and(is_ready),
        })
    }

    /// Reaps taskers that have ended. Returns true if the service must end.
    fn handle_signals(&mut self) -> bool {
        let mut must_end = false;
        while let Ok(Some(signal)) = self.signals.read_signal() {
            must_end |= signal.ssi_signo != Signal::SIGCHLD as u32;
        }
        loop {
            match waitpid(None, Some(WaitPidFlag::WNOHANG)) {
                Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..))
                    if self.machine_watcher.handle_end(pid, Instant::now()) => {}
                Ok(WaitStatus::Exited(pid, _) | WaitStatus::Signaled(pid, ..)) => {
                    self.registry.remove(SessionId(pid.as_raw()));
                }
                Ok(WaitStatus::StillAlive) | Err(_) => break,
                Ok(_) => {}
            }
        }
        must_end
    }

    fn accept_connections(&mut self, now: Instant) {
        for _ in 0..ACCEPTS_PER_ROUND_MAX {
            let Ok((socket, _)) = self.listener.accept() else {
                return;
            };
            // A connection that cannot be used is closed.
            if socket.set_nonblocking(true).is_ok()
                && let Ok(peer) = getsockopt(&socket, PeerCredentials)
            {
                let _ = self.pending.add(socket, peer.uid(), now);
            }
        }
    }

    /// Reads what has arrived on a connection, and handles the request if it is complete.
    fn read_request(&mut self, mut connection: PendingConnection<UnixStream>) {
        let mut buffer = [0; HEAD_BYTES + BODY_BYTES_MAX];
        let request = match connection.socket.read(&mut buffer) {
            Ok(0) => return,
            Ok(bytes) => connection.receive(&buffer[..bytes]),
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) =>
            {
                Ok(None)
            }
            Err(_) => return,
        };
        let (socket, uid) = (&connection.socket, connection.uid);
        let reply = match request {
            Ok(None) => return self.pending.put_back(connection),
            Ok(Some(ServiceRequest::Start { protocol, version })) => {
                self.start_session(socket, uid, protocol, version)
            }
            Ok(Some(ServiceRequest::Kill { session })) => self.kill_session(session, uid),
            Err(_) => ServiceReply::Refused(ServiceRefusal::Malformed),
        };
        match &reply {
            // A user could fill the log with these.
            ServiceReply::Refused(ServiceRefusal::Malformed) => {}
            ServiceReply::Refused(why) => tracing::warn!("user {uid}: {why}"),
            ServiceReply::Started { .. } | ServiceReply::Killed => {}
        }
        if !matches!(reply, ServiceReply::Started { .. }) {
            // The socket's buffer is empty, so the write cannot block. If the daemon has ended,
            // nobody waits for the reply.
            let _ = connection.socket.write_all(&encode(&reply));
        }
    }

    /// Starts a tasker for the daemon of the user `uid` at the other end of `socket`.
    fn start_session(
        &mut self,
        socket: &UnixStream,
        uid: u32,
        protocol: u32,
        version: String,
    ) -> ServiceReply {
        if protocol != PROTOCOL_VERSION {
            return ServiceReply::Refused(ServiceRefusal::OtherVersion {
                service: env!("CARGO_PKG_VERSION").into(),
                service_protocol: PROTOCOL_VERSION,
                daemon: version,
                daemon_protocol: protocol,
            });
        }
        if let Err(refusal) = self.registry.check_limits(uid) {
            return ServiceReply::Refused(refusal);
        }
        let start_failure = |e: io::Error| {
            ServiceReply::Refused(ServiceRefusal::StartFailed(format!(
                "{}: {e}",
                self.tasker_path.display()
            )))
        };
        let session = match self.spawn_tasker(socket, uid) {
            Ok(session) => session,
            Err(error) => return start_failure(error),
        };
        if let Err(error) = self.registry.add(session, uid) {
            // Without a record it could not be killed later.
            let _ = kill(Pid::from_raw(session.0), Signal::SIGKILL);
            return start_failure(error);
        }
        tracing::info!("user {uid}: tasker {} has started", session.0);
        ServiceReply::Started { session }
    }

    /// Starts the program of the tasker with the connection, on which the reply precedes all its
    /// messages.
    fn spawn_tasker(&self, socket: &UnixStream, uid: u32) -> io::Result<SessionId> {
        let tasker_end = OwnedFd::from(socket.try_clone()?);
        let fd = tasker_end.as_raw_fd();
        let mut command = Command::new(&self.tasker_path);
        command
            .arg(fd.to_string())
            .env_clear()
            .envs(
                PASSED_VARIABLES
                    .iter()
                    .filter_map(|name| Some((name, std::env::var_os(name)?))),
            )
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .process_group(0);
        if uid != 0 {
            command.args(["--user", &uid.to_string()]);
        }
        prepare_child(&mut command, tasker_end);
        let child = command.spawn()?;
        Ok(SessionId(child.id().cast_signed()))
    }

    fn kill_session(&mut self, session: SessionId, uid: u32) -> ServiceReply {
        // The record has just been compared with the process. A tasker of an earlier service may
        // end in between; the kernel reuses its PID only after all other PIDs.
        let is_killed = self.registry.may_kill(session, uid)
            && kill(Pid::from_raw(session.0), Signal::SIGKILL).is_ok();
        match is_killed {
            true => ServiceReply::Killed,
            false => ServiceReply::Refused(ServiceRefusal::NoSuchSession),
        }
    }
}

/// Returns the path of another program: in the directory of this program, or in `bin` of the same
/// prefix.
fn program_path(own_path: &Path, program: &str) -> PathBuf {
    let beside = own_path.with_file_name(program);
    let in_bin = own_path
        .parent()
        .and_then(Path::parent)
        .map(|prefix| prefix.join("bin").join(program));
    match in_bin {
        Some(in_bin) if !beside.exists() => in_bin,
        _ => beside,
    }
}

/// Makes the child inherit the connection, send the reply on it, and block no signal.
#[allow(unsafe_code)] // What a child does between fork and exec has no safe interface.
fn prepare_child(command: &mut Command, connection: OwnedFd) {
    let prepare = move || {
        SigSet::empty().thread_set_mask()?;
        let session = SessionId(nix::unistd::getpid().as_raw());
        send_started(&connection, session)?;
        fcntl(&connection, FcntlArg::F_SETFD(FdFlag::empty()))?;
        Ok(())
    };
    // SAFETY: the service has one thread, so no lock can be held by a thread that the child lacks.
    unsafe { command.pre_exec(prepare) };
}

/// Sends the reply to a daemon whose tasker is about to be executed.
fn send_started(connection: &OwnedFd, session: SessionId) -> io::Result<()> {
    let reply = encode(&ServiceReply::Started { session });
    match nix::unistd::write(connection, &reply)? {
        written if written == reply.len() => Ok(()),
        _ => Err(ErrorKind::WriteZero.into()),
    }
}

/// The event sources that are ready.
struct ReadySources {
    signal: bool,
    listener: bool,
    /// One element for each pending connection, in their order.
    pending: Vec<bool>,
    machine_watcher: bool,
}
