//! I/O thread (`pvm-helper`): reads and writes while the application computes, and reconnects the
//! task after a migration.
//!
//! The thread blocks all signals and sleeps unless it is needed. While it sleeps, it polls the
//! daemon's socket, an eventfd, the epoll set of the direct routes, and a timer.
//!
//! In a migration the I/O thread performs these steps:
//!
//! 1. When all frames are written after the daemon's quiesce request, it closes the socket.
//! 2. It polls for the token file, which names the socket of the next daemon. The file may appear
//!    in any of several paths, which a [`Redirect`] can replace.
//! 3. It connects to the next daemon and resumes the links.

use super::connect::{AcceptedConnection, handshake};
use super::core::{Phase, QuiesceRequest};
use super::direct_routes::{POLLED_BY_THREAD_WINDOW, ReadySet};
use super::process::ProcessOwned;
use super::redirect;
use super::ring_drainer;
use super::shared::{IoThreadSleep, Shared, State};
use super::wake_delay_timer::WakeDelayTimer;
use crate::error::EnrollError;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;
use sempa_proto::Micros;
use sempa_proto::frame::{FrameDecoder, from_bytes};
use sempa_proto::task::{Claim, OnDaemonExit, Redirect, ResumeToken};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Stack size of the I/O thread. Small, because the stack is transferred with every migration.
const STACK_BYTES: usize = 256 << 10;
/// Interval of the search for the token file. Short, because the migrated task continues only when
/// the file is found.
const TOKEN_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum size of a token file. Real tokens are far smaller; larger files are ignored.
const TOKEN_BYTES_MAX: u64 = 64 << 10;
/// Timeout for the connection to the daemon that the token names. After the timeout the connection
/// is lost for good.
const RESUME_TIMEOUT: Duration = Duration::from_secs(15);
/// Interval between two attempts to connect to the daemon that the token names.
const RESUME_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Starts the I/O thread with all signals blocked.
pub(crate) fn start(
    shared: &Arc<Shared>,
    program: String,
) -> io::Result<ProcessOwned<JoinHandle<()>>> {
    let old_mask = SigSet::all().thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_SETMASK)?;
    let reporter = PanicReporter(Arc::clone(shared));
    let started = std::thread::Builder::new()
        .name("pvm-helper".into())
        .stack_size(STACK_BYTES)
        .spawn(move || run_io_thread(&reporter.0, &program));
    old_mask.thread_set_mask()?;
    Ok(ProcessOwned::new(started?))
}

/// Reports a panic of the I/O thread to the application, so that no thread waits forever.
struct PanicReporter(Arc<Shared>);

impl Drop for PanicReporter {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.lock().mark_connection_lost(
                "the runtime's helper thread has failed; this is an error in the library",
            );
        }
    }
}

/// Next step of the I/O thread, decided under the lock.
enum NextStep {
    Sleep {
        socket: Option<Arc<ProcessOwned<UnixStream>>>,
        watch_readable: bool,
        direct_routes: Option<Arc<ProcessOwned<ReadySet>>>,
        wake_timer: Option<Arc<WakeDelayTimer>>,
        timeout: Option<Duration>,
    },
    AwaitToken(QuiesceRequest),
    Exit,
}

fn run_io_thread(shared: &Arc<Shared>, program: &str) {
    sempa_socket::request_short_slice();
    let mut drainer = None;
    loop {
        let (next, needs_drainer) = {
            let mut state = shared.lock();
            state.io_thread_sleep = IoThreadSleep::Awake;
            let needs_drainer = state.core.shm.is_shared() && !state.has_drainer;
            state.has_drainer |= needs_drainer;
            (decide_next_step(&mut state, shared), needs_drainer)
        };
        if needs_drainer {
            // Without a drainer thread a full ring is noticed at the application's next call, or
            // when a link sends a probe.
            drainer = ring_drainer::start(shared).ok();
        }
        match next {
            NextStep::Sleep {
                socket,
                watch_readable: read,
                direct_routes: direct,
                wake_timer,
                timeout,
            } => {
                let (socket, direct) = (
                    socket.as_ref().map(|s| s.get()),
                    direct.as_ref().map(|direct| direct.get()),
                );
                sleep(
                    shared,
                    socket,
                    read,
                    (direct, wake_timer.as_deref()),
                    timeout,
                );
            }
            NextStep::AwaitToken(quiesce) => await_token(shared, quiesce, program),
            NextStep::Exit => break,
        }
    }
    shared.request_stop();
    if let Some(thread) = drainer {
        // A panic of the drainer thread only poisons the lock, and all users of the lock ignore
        // that.
        let _ = thread.join();
    }
}

fn decide_next_step(state: &mut State, shared: &Shared) -> NextStep {
    let now = state.now();
    state.core.run_timers(now);
    state.core.poll_direct(now);
    state.read_and_write();
    if shared.is_stopped() {
        state.mark_connection_lost("this task has left the virtual machine");
    }
    if matches!(state.core.phase(), Phase::Quiescing(_)) && state.core.outbox.is_empty() {
        state.detach_socket(&shared.socket_waiters);
        // Freed, so that the migration does not transfer this memory.
        state.decoder = FrameDecoder::new();
        state.wake_timer = None;
        state.core.mark_quiesced();
    }
    match state.core.phase() {
        Phase::Quiesced(quiesce) => return NextStep::AwaitToken(quiesce.clone()),
        Phase::Lost(_) => {
            state.detach_socket(&shared.socket_waiters);
            return NextStep::Exit;
        }
        Phase::Connected | Phase::Quiescing(_) => {}
    }
    let socket = state.socket.clone();
    let write = !state.core.outbox.is_empty();
    let until = state.core.next_timer();
    let direct = state.core.direct.ready_set_to_watch(now);
    let wake_timer = state.wake_timer.clone();
    state.io_thread_sleep = IoThreadSleep::Sleeping {
        wakes_if_writable: write,
        wake_at: until,
        wakes_on_direct: direct.is_some(),
        wakes_on_timer: wake_timer.is_some(),
    };
    let mut timeout = until.map(|until| Duration::from_micros(until.since(now).0));
    if direct.is_none() && state.core.direct.is_open() {
        // Another thread polls the direct routes and may stop without notice, so this sleep must be
        // short.
        let soon = Duration::from_micros(POLLED_BY_THREAD_WINDOW.0);
        timeout = Some(timeout.map_or(soon, |timeout| timeout.min(soon)));
    }
    // After the quiesce request the daemon sends nothing that must be read.
    NextStep::Sleep {
        socket: socket.filter(|_| write),
        watch_readable: state.core.is_connected(),
        direct_routes: direct,
        wake_timer,
        timeout,
    }
}

fn sleep(
    shared: &Shared,
    writing: Option<&UnixStream>,
    read: bool,
    (direct, wake_timer): (Option<&ReadySet>, Option<&WakeDelayTimer>),
    max_wait: Option<Duration>,
) {
    let mut fds = vec![PollFd::new(
        shared.io_thread_event().as_fd(),
        PollFlags::POLLIN,
    )];
    fds.extend(read.then(|| PollFd::new(shared.socket_waiters.io_thread_fd(), PollFlags::POLLIN)));
    fds.extend(writing.map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLOUT)));
    fds.extend(direct.map(|direct| PollFd::new(direct.as_fd(), PollFlags::POLLIN)));
    fds.extend(wake_timer.map(|wake_timer| PollFd::new(wake_timer.as_fd(), PollFlags::POLLIN)));
    // Rounded up: one late wake-up is cheaper than two.
    let timeout = max_wait.map_or(PollTimeout::NONE, |max_wait| {
        let ms = max_wait.as_micros().div_ceil(1000);
        PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX)
    });
    // An error counts as a spurious wake-up. Causes are a signal that a debugger injects, or a lack
    // of kernel memory.
    let _ = poll(&mut fds, timeout);
    if fds[0].any().unwrap_or(false) {
        let _ = shared.io_thread_event().read();
    }
    // The timer is the last descriptor in the list.
    if let Some(wake_timer) =
        wake_timer.filter(|_| fds.last().is_some_and(|fd| fd.any().unwrap_or(false)))
    {
        wake_timer.clear();
    }
}

/// Waits for the token file that names the next daemon, and connects to it.
fn await_token(shared: &Shared, mut quiesce: QuiesceRequest, program: &str) {
    loop {
        if shared.is_stopped() {
            return;
        }
        if let Some(Redirect { migration, tokens }) = redirect::take() {
            quiesce = QuiesceRequest { migration, tokens };
        }
        {
            // Keeps the clock's last reading close to the moment at which the process is frozen.
            let _ = shared.lock().clock.now_after_migration();
        }
        if let Some(token) = quiesce
            .tokens
            .iter()
            .find_map(|path| read_token(path, &quiesce))
        {
            return connect_to_next_daemon(shared, &quiesce, &token, program);
        }
        std::thread::sleep(TOKEN_POLL_INTERVAL);
    }
}

/// Returns the token in a file, if the file exists, is complete, and belongs to this migration.
fn read_token(path: &Path, quiesce: &QuiesceRequest) -> Option<ResumeToken> {
    // `access` does not open the file: a process that is dumped at this moment must not have it
    // open.
    nix::unistd::access(path, nix::unistd::AccessFlags::R_OK).ok()?;
    if std::fs::metadata(path).ok()?.len() > TOKEN_BYTES_MAX {
        return None;
    }
    let token: ResumeToken = from_bytes(&std::fs::read(path).ok()?).ok()?;
    (token.migration == quiesce.migration).then_some(token)
}

fn connect_to_next_daemon(
    shared: &Shared,
    quiesce: &QuiesceRequest,
    token: &ResumeToken,
    program: &str,
) {
    let deadline = Instant::now() + RESUME_TIMEOUT;
    let claim = Claim::Resume {
        tid: shared.own_tid,
        migration: quiesce.migration,
    };
    loop {
        // `OnDaemonExit` does not matter here: a task that migrates was started by a tasker and
        // always ends with its daemon.
        match handshake(
            &token.socket,
            claim.clone(),
            program,
            OnDaemonExit::default(),
        ) {
            Ok(accepted) if accepted.welcome.tid == shared.own_tid => {
                return adopt_connection(shared, accepted);
            }
            Ok(accepted) => {
                let tid = accepted.welcome.tid;
                return shared.lock().mark_connection_lost(&format!(
                    "after the move the daemon took {} for {tid}",
                    shared.own_tid
                ));
            }
            Err(EnrollError::NoDaemon { .. } | EnrollError::Io { .. })
                if Instant::now() < deadline && !shared.is_stopped() =>
            {
                std::thread::sleep(RESUME_RETRY_INTERVAL);
            }
            Err(e) => {
                return shared
                    .lock()
                    .mark_connection_lost(&format!("going on after the move: {e}"));
            }
        }
    }
}

fn adopt_connection(shared: &Shared, accepted: AcceptedConnection) {
    let mut state = shared.lock();
    let now: Micros = state.clock.now_after_migration();
    state.core.resume(now, &accepted.welcome);
    if let Err(e) = state.attach_socket(
        accepted.socket,
        accepted.decoder,
        accepted.passed,
        &shared.socket_waiters,
    ) {
        state.mark_connection_lost(&format!("going on after the move: {e}"));
    }
}
