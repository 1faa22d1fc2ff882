//! I/O thread (`pvm-helper`): reads and writes while the application computes, and reconnects the
//! task after a migration.
//!
//! The thread blocks all signals and sleeps unless it is needed. While it sleeps, it polls the
//! daemon's socket, an eventfd, the epoll set of the direct routes, and a timer.
//!
//! In a migration the I/O thread performs these steps:
//!
//! 1. After the daemon's quiesce request, the thread closes the socket when all frames are written.
//! 2. The thread polls for the token file, which names the socket of the next daemon. The file may
//!    appear at any of several paths, which a [`Redirect`] can replace.
//! 3. The thread connects to the next daemon and resumes the links.

use super::connect::{AcceptedConnection, connect_and_wait_for_welcome};
use super::core::{ConnectionPhase, QuiesceRequest};
use super::direct_routes::{ReadySet, THREAD_POLL_WINDOW};
use super::process::ProcessOwned;
use super::redirect;
use super::ring_drainer;
use super::shared::{IoThreadSleep, LockedState, SharedState};
use super::wake_delay_timer::WakeDelayTimer;
use crate::error::EnrollError;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;
use sempa_proto::Micros;
use sempa_proto::frame::{FrameDecoder, from_bytes};
use sempa_proto::task::{Claim, OnDaemonExit, Redirect, ResumeToken};
use sempa_ring::biased_lock;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Stack size of the I/O thread. Small, because the stack is transferred with every migration.
const STACK_BYTES: usize = 256 << 10;
/// Interval between two searches for the token file just after the process has continued to run.
/// The token is then there soon.
const TOKEN_POLL_INTERVAL_MIN: Duration = Duration::from_micros(100);
/// Time for which the token is searched for in the short interval.
const TOKEN_SHORT_POLL_TIME: Duration = Duration::from_millis(20);
/// Time without a search after which the process counts as having been stopped.
const TOKEN_POLL_GAP: Duration = Duration::from_millis(5);
/// Interval between two searches for the token file. The interval is short because the migrated
/// task continues only when the file is found.
const TOKEN_POLL_INTERVAL: Duration = Duration::from_millis(1);
/// Maximum size of a token file. Real tokens are far smaller; larger files are ignored.
const TOKEN_BYTES_MAX: u64 = 64 << 10;
/// Maximum time for connecting to the daemon that the token names. When the time has expired, the
/// connection is lost for good.
const RESUME_TIMEOUT: Duration = Duration::from_secs(15);
/// Interval between two attempts to connect to the daemon that the token names.
const RESUME_RETRY_INTERVAL: Duration = Duration::from_millis(10);

/// Starts the I/O thread with all signals blocked.
pub(crate) fn start(
    shared_state: &Arc<SharedState>,
    program: String,
) -> io::Result<ProcessOwned<JoinHandle<()>>> {
    if has_one_thread() {
        biased_lock::register_process();
    }
    let old_mask = SigSet::all().thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_SETMASK)?;
    let panic_guard = PanicReportGuard(Arc::clone(shared_state));
    let spawn_result = std::thread::Builder::new()
        .name("pvm-helper".into())
        .stack_size(STACK_BYTES)
        .spawn(move || run_io_thread(&panic_guard.0, &program));
    old_mask.thread_set_mask()?;
    Ok(ProcessOwned::new(spawn_result?))
}

/// Reports a panic of the I/O thread to the application, so that no thread waits forever.
struct PanicReportGuard(Arc<SharedState>);

impl Drop for PanicReportGuard {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.lock().mark_connection_lost(
                "the runtime's I/O thread has failed; this is an error in the library",
            );
        }
    }
}

/// Next step of the I/O thread, decided under the lock.
enum NextStep {
    Sleep {
        socket_to_write: Option<Arc<ProcessOwned<UnixStream>>>,
        watches_readable: bool,
        direct_ready_set: Option<Arc<ProcessOwned<ReadySet>>>,
        wake_delay_timer: Option<Arc<WakeDelayTimer>>,
        timeout: Option<Duration>,
    },
    AwaitToken(QuiesceRequest),
    Exit,
}

/// True if no other thread of this process exists. False if /proc cannot be read.
fn has_one_thread() -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() == 1)
}

fn run_io_thread(shared_state: &Arc<SharedState>, program: &str) {
    sempa_socket::request_short_slice();
    // In a process with several threads the registration takes about 10 ms. This thread waits for
    // the registration, and no call of the program does.
    biased_lock::register_process();
    let mut drainer_thread = None;
    loop {
        let (next_step, needs_drainer) = {
            let mut state = shared_state.lock();
            state.io_thread_sleep = IoThreadSleep::Awake;
            let needs_drainer = state.core.shm_routes.is_doorbell_shared() && !state.has_drainer;
            state.has_drainer |= needs_drainer;
            (decide_next_step(&mut state, shared_state), needs_drainer)
        };
        if needs_drainer {
            // Without a drainer thread a full ring is only read at the application's next call, or
            // when a link sends a probe.
            drainer_thread = ring_drainer::start(shared_state).ok();
        }
        match next_step {
            NextStep::Sleep {
                socket_to_write: socket,
                watches_readable: must_watch_readable,
                direct_ready_set: ready_set,
                wake_delay_timer: wake_timer,
                timeout,
            } => {
                let (socket, ready_set) = (
                    socket.as_ref().map(|s| s.get()),
                    ready_set.as_ref().map(|ready_set| ready_set.get()),
                );
                sleep_until_needed(
                    shared_state,
                    socket,
                    must_watch_readable,
                    (ready_set, wake_timer.as_deref()),
                    timeout,
                );
            }
            NextStep::AwaitToken(quiesce) => {
                await_token_and_reconnect(shared_state, quiesce, program)
            }
            NextStep::Exit => break,
        }
    }
    shared_state.request_stop();
    if let Some(thread) = drainer_thread {
        // A panic of the drainer thread only poisons the lock, and all users of the lock ignore the
        // poisoning.
        let _ = thread.join();
    }
}

fn decide_next_step(state: &mut LockedState, shared_state: &SharedState) -> NextStep {
    let now = state.now();
    state.core.run_timers(now);
    state.core.poll_direct_routes(now);
    state.read_and_write();
    if shared_state.is_stop_requested() {
        state.mark_connection_lost("this task has left the virtual machine");
    }
    if matches!(state.core.phase(), ConnectionPhase::Quiescing(_)) && state.core.outbox.is_empty() {
        state.detach_socket(&shared_state.socket_waiters);
        // The decoder and the timer are freed, so that the migration does not transfer their
        // memory.
        state.decoder = FrameDecoder::new();
        state.wake_delay_timer = None;
        state.core.mark_quiesced();
    }
    match state.core.phase() {
        ConnectionPhase::Quiesced(quiesce) => return NextStep::AwaitToken(quiesce.clone()),
        ConnectionPhase::Lost(_) => {
            state.detach_socket(&shared_state.socket_waiters);
            return NextStep::Exit;
        }
        ConnectionPhase::Connected | ConnectionPhase::Quiescing(_) => {}
    }
    let socket = state.socket.clone();
    let has_output = !state.core.outbox.is_empty();
    let timer_at = state.core.next_timer_at();
    let ready_set = state.core.direct_routes.ready_set_to_watch(now);
    let wake_timer = state.wake_delay_timer.clone();
    state.io_thread_sleep = IoThreadSleep::Sleeping {
        wakes_if_writable: has_output,
        wake_at: timer_at,
        wakes_on_direct_frame: ready_set.is_some(),
        wakes_on_timer: wake_timer.is_some(),
    };
    let mut timeout = timer_at.map(|timer_at| Duration::from_micros(timer_at.since(now).0));
    if ready_set.is_none() && state.core.direct_routes.is_any_open() {
        // Another thread polls the direct routes and may stop polling at any time. This sleep must
        // therefore be short.
        let poll_window = Duration::from_micros(THREAD_POLL_WINDOW.0);
        timeout = Some(timeout.map_or(poll_window, |timeout| timeout.min(poll_window)));
    }
    // After the quiesce request the daemon sends nothing that must be read.
    NextStep::Sleep {
        socket_to_write: socket.filter(|_| has_output),
        watches_readable: state.core.is_connected(),
        direct_ready_set: ready_set,
        wake_delay_timer: wake_timer,
        timeout,
    }
}

fn sleep_until_needed(
    shared_state: &SharedState,
    socket_to_write: Option<&UnixStream>,
    watches_readable: bool,
    (ready_set, wake_timer): (Option<&ReadySet>, Option<&WakeDelayTimer>),
    max_wait: Option<Duration>,
) {
    let mut fds = vec![PollFd::new(
        shared_state.io_thread_event().as_fd(),
        PollFlags::POLLIN,
    )];
    fds.extend(watches_readable.then(|| {
        PollFd::new(
            shared_state.socket_waiters.io_thread_fd(),
            PollFlags::POLLIN,
        )
    }));
    fds.extend(socket_to_write.map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLOUT)));
    fds.extend(ready_set.map(|ready_set| PollFd::new(ready_set.as_fd(), PollFlags::POLLIN)));
    fds.extend(wake_timer.map(|wake_timer| PollFd::new(wake_timer.as_fd(), PollFlags::POLLIN)));
    // The timeout is rounded up: one late wake-up is cheaper than two wake-ups.
    let timeout = max_wait.map_or(PollTimeout::NONE, |max_wait| {
        let ms = max_wait.as_micros().div_ceil(1000);
        PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX)
    });
    // An error counts as a spurious wake-up. Possible causes are a signal that a debugger injects,
    // and a lack of kernel memory.
    let _ = poll(&mut fds, timeout);
    if fds[0].any().unwrap_or(false) {
        let _ = shared_state.io_thread_event().read();
    }
    // The timer is the last descriptor in the list.
    if let Some(wake_timer) =
        wake_timer.filter(|_| fds.last().is_some_and(|fd| fd.any().unwrap_or(false)))
    {
        wake_timer.clear_expiry();
    }
}

/// Waits for the token file that names the next daemon, and connects to it.
fn await_token_and_reconnect(
    shared_state: &SharedState,
    mut quiesce: QuiesceRequest,
    program: &str,
) {
    let mut token_poll = TokenPoll::new(Instant::now());
    loop {
        if shared_state.is_stop_requested() {
            return;
        }
        if let Some(Redirect {
            migration,
            token_paths: tokens,
        }) = redirect::take_redirect()
        {
            quiesce = QuiesceRequest {
                migration,
                token_paths: tokens,
            };
        }
        {
            // The call updates the clock's last reading, so that the reading is recent when the
            // process is frozen.
            let _ = shared_state.lock().clock.now_after_migration();
        }
        if let Some(token) = quiesce
            .token_paths
            .iter()
            .find_map(|path| read_token(path, &quiesce))
        {
            return connect_to_next_daemon(shared_state, &quiesce, &token, program);
        }
        std::thread::sleep(token_poll.next_interval(Instant::now()));
    }
}

/// Selects the intervals of the search for a token. The search is frequent for a while whenever the
/// process has just continued to run, so that the program reaches its daemon soon, and costs little
/// while the process waits for its dump.
#[derive(Debug)]
struct TokenPoll {
    last_poll_at: Instant,
    short_until: Instant,
}

impl TokenPoll {
    fn new(now: Instant) -> Self {
        Self {
            last_poll_at: now,
            short_until: now + TOKEN_SHORT_POLL_TIME,
        }
    }

    /// Returns the pause after the search at the time `now`.
    fn next_interval(&mut self, now: Instant) -> Duration {
        // On another host the clock may also be behind.
        let has_gap = now < self.last_poll_at || now - self.last_poll_at > TOKEN_POLL_GAP;
        self.last_poll_at = now;
        if has_gap {
            self.short_until = now + TOKEN_SHORT_POLL_TIME;
        }
        if now < self.short_until && self.short_until - now <= TOKEN_SHORT_POLL_TIME {
            TOKEN_POLL_INTERVAL_MIN
        } else {
            TOKEN_POLL_INTERVAL
        }
    }
}

/// Returns the token in a file. `None` if the file does not exist, is incomplete, or belongs to
/// another migration.
fn read_token(path: &Path, quiesce: &QuiesceRequest) -> Option<ResumeToken> {
    // `access` does not open the file. A process must not have the token file open during its dump.
    nix::unistd::access(path, nix::unistd::AccessFlags::R_OK).ok()?;
    if std::fs::metadata(path).ok()?.len() > TOKEN_BYTES_MAX {
        return None;
    }
    let token: ResumeToken = from_bytes(&std::fs::read(path).ok()?).ok()?;
    (token.migration == quiesce.migration).then_some(token)
}

fn connect_to_next_daemon(
    shared_state: &SharedState,
    quiesce: &QuiesceRequest,
    token: &ResumeToken,
    program: &str,
) {
    let deadline = Instant::now() + RESUME_TIMEOUT;
    let claim = Claim::Resume {
        tid: shared_state.own_tid,
        migration: quiesce.migration,
    };
    loop {
        // The value of `OnDaemonExit` has no effect. A task that migrates was started by a tasker
        // and always ends with its daemon.
        match connect_and_wait_for_welcome(
            &token.socket_path,
            claim.clone(),
            program,
            OnDaemonExit::default(),
        ) {
            Ok(connection) if connection.welcome.tid == shared_state.own_tid => {
                return adopt_connection(shared_state, connection);
            }
            Ok(connection) => {
                let tid = connection.welcome.tid;
                return shared_state.lock().mark_connection_lost(&format!(
                    "after the migration the daemon took {} for {tid}",
                    shared_state.own_tid
                ));
            }
            Err(EnrollError::NoDaemon { .. } | EnrollError::Io { .. })
                if Instant::now() < deadline && !shared_state.is_stop_requested() =>
            {
                std::thread::sleep(RESUME_RETRY_INTERVAL);
            }
            Err(e) => {
                return shared_state
                    .lock()
                    .mark_connection_lost(&format!("continuing after the migration: {e}"));
            }
        }
    }
}

fn adopt_connection(shared_state: &SharedState, connection: AcceptedConnection) {
    let mut state = shared_state.lock();
    let now: Micros = state.clock.now_after_migration();
    state.core.resume(now, &connection.welcome);
    if let Err(e) = state.attach_socket(
        connection.socket,
        connection.decoder,
        connection.unhandled_fds,
        &shared_state.socket_waiters,
    ) {
        state.mark_connection_lost(&format!("continuing after the migration: {e}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The token is searched for often after the quiesce and after each stop of the process, and
    /// rarely otherwise.
    #[test]
    fn token_search_is_frequent_after_a_stop() {
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let mut token_poll = TokenPoll::new(start);
        for ms in 0..20 {
            assert_eq!(token_poll.next_interval(at(ms)), TOKEN_POLL_INTERVAL_MIN);
        }
        for ms in 20..40 {
            assert_eq!(token_poll.next_interval(at(ms)), TOKEN_POLL_INTERVAL);
        }
        assert_eq!(token_poll.next_interval(at(100)), TOKEN_POLL_INTERVAL_MIN);
        assert_eq!(token_poll.next_interval(at(105)), TOKEN_POLL_INTERVAL_MIN);
        // The clock of another host.
        assert_eq!(token_poll.next_interval(start), TOKEN_POLL_INTERVAL_MIN);
        for ms in 21..30 {
            assert_eq!(
                token_poll.next_interval(at(ms - 20)),
                TOKEN_POLL_INTERVAL_MIN
            );
        }
    }
}
