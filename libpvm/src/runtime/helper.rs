//! I/O thread (`pvm-helper`): reads and writes while the application computes, and reconnects the
//! task after a migration.
//!
//! The thread blocks all signals and sleeps unless it is needed. While it sleeps, it polls the
//! daemon's socket, an eventfd, the epoll set of the direct routes, and a timer.
//!
//! In a migration it does the following:
//!
//! 1. When all frames are written after the daemon's quiesce request, it closes the socket.
//! 2. It polls for the token file, which names the socket of the next daemon. The file may appear
//!    in any of several paths, which a [`Redirect`] can replace.
//! 3. It connects to that daemon and resumes the links.

use super::alarm::Alarm;
use super::connect::{Accepted, greet};
use super::core::{Phase, Quiesce};
use super::ear;
use super::far::{ATTENDED, ReadySet};
use super::process::Own;
use super::redirect;
use super::shared::{Shared, Sleep, State};
use crate::error::EnrollError;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;
use sempa_proto::Micros;
use sempa_proto::frame::{FrameDecoder, from_bytes};
use sempa_proto::task::{AtEnd, Claim, Redirect, ResumeToken};
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
const TOKEN_PAUSE: Duration = Duration::from_millis(1);
/// Maximum size of a token file. Real tokens are far smaller; larger files are ignored.
const TOKEN_BYTES_MAX: u64 = 64 << 10;
/// Time after which the task gives up reaching the daemon that the token names.
const RESUME_MAX: Duration = Duration::from_secs(15);
/// Interval between two attempts to reach that daemon.
const RESUME_PAUSE: Duration = Duration::from_millis(10);

/// Starts the I/O thread with all signals blocked.
pub(crate) fn start(shared: &Arc<Shared>, program: String) -> io::Result<Own<JoinHandle<()>>> {
    let before = SigSet::all().thread_swap_mask(nix::sys::signal::SigmaskHow::SIG_SETMASK)?;
    let last_word = LastWord(Arc::clone(shared));
    let started = std::thread::Builder::new()
        .name("pvm-helper".into())
        .stack_size(STACK_BYTES)
        .spawn(move || run(&last_word.0, &program));
    before.thread_set_mask()?;
    Ok(Own::new(started?))
}

/// Reports a panic of the I/O thread to the application, so that no thread waits forever.
struct LastWord(Arc<Shared>);

impl Drop for LastWord {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0
                .lock()
                .lose("the runtime's helper thread has failed; this is an error in the library");
        }
    }
}

/// Next step of the I/O thread, decided under the lock.
enum Next {
    Sleep {
        socket: Option<Arc<Own<UnixStream>>>,
        read: bool,
        far: Option<Arc<Own<ReadySet>>>,
        alarm: Option<Arc<Alarm>>,
        span: Option<Duration>,
    },
    Await(Quiesce),
    End,
}

fn run(shared: &Arc<Shared>, program: &str) {
    sempa_socket::take_short_turns();
    let mut listener = None;
    loop {
        let (next, deaf) = {
            let mut state = shared.lock();
            state.sleep = Sleep::Awake;
            let deaf = state.core.near.is_shared() && !state.has_ear;
            state.has_ear |= deaf;
            (decide(&mut state, shared), deaf)
        };
        if deaf {
            // Without a drainer thread a full ring is noticed at the application's next call, or
            // when a link sends a probe.
            listener = ear::start(shared).ok();
        }
        match next {
            Next::Sleep {
                socket,
                read,
                far,
                alarm,
                span,
            } => {
                let (socket, far) = (
                    socket.as_ref().map(|s| s.get()),
                    far.as_ref().map(|far| far.get()),
                );
                doze(shared, socket, read, (far, alarm.as_deref()), span);
            }
            Next::Await(quiesce) => await_token(shared, quiesce, program),
            Next::End => break,
        }
    }
    shared.stop();
    if let Some(thread) = listener {
        // A panic of that thread only poisons the lock, which all users ignore.
        let _ = thread.join();
    }
}

fn decide(state: &mut State, shared: &Shared) -> Next {
    let now = state.now();
    state.core.wake(now);
    state.core.look_far(now);
    state.pump();
    if shared.is_stopped() {
        state.lose("this task has left the virtual machine");
    }
    if matches!(state.core.phase(), Phase::Quiescing(_)) && state.core.outbox.is_empty() {
        state.leave_socket(&shared.seats);
        // Freed, so that this memory is not transferred.
        state.decoder = FrameDecoder::new();
        state.alarm = None;
        state.core.let_go();
    }
    match state.core.phase() {
        Phase::Quiesced(quiesce) => return Next::Await(quiesce.clone()),
        Phase::Lost(_) => {
            state.leave_socket(&shared.seats);
            return Next::End;
        }
        Phase::Connected | Phase::Quiescing(_) => {}
    }
    let socket = state.socket.clone();
    let write = !state.core.outbox.is_empty();
    let until = state.core.earliest();
    let far = state.core.direct.to_watch(now);
    let alarm = state.alarm.clone();
    state.sleep = Sleep::On {
        write,
        until,
        far: far.is_some(),
        alarm: alarm.is_some(),
    };
    let mut span = until.map(|until| Duration::from_micros(until.since(now).0));
    if far.is_none() && state.core.direct.is_open() {
        // Another thread polls the direct routes and may stop without notice, so this sleep must be
        // short.
        let soon = Duration::from_micros(ATTENDED.0);
        span = Some(span.map_or(soon, |span| span.min(soon)));
    }
    // After the quiesce request the daemon sends nothing that must be read.
    Next::Sleep {
        socket: socket.filter(|_| write),
        read: state.core.is_connected(),
        far,
        alarm,
        span,
    }
}

fn doze(
    shared: &Shared,
    writing: Option<&UnixStream>,
    read: bool,
    (far, alarm): (Option<&ReadySet>, Option<&Alarm>),
    span: Option<Duration>,
) {
    let mut fds = vec![PollFd::new(shared.bell().as_fd(), PollFlags::POLLIN)];
    fds.extend(read.then(|| PollFd::new(shared.seats.back(), PollFlags::POLLIN)));
    fds.extend(writing.map(|socket| PollFd::new(socket.as_fd(), PollFlags::POLLOUT)));
    fds.extend(far.map(|far| PollFd::new(far.as_fd(), PollFlags::POLLIN)));
    fds.extend(alarm.map(|alarm| PollFd::new(alarm.as_fd(), PollFlags::POLLIN)));
    // Rounded up: one late wake-up is cheaper than two.
    let timeout = span.map_or(PollTimeout::NONE, |span| {
        let ms = span.as_micros().div_ceil(1000);
        PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX)
    });
    // An error counts as a spurious wake-up. Causes are a signal that a debugger injects, or a lack
    // of kernel memory.
    let _ = poll(&mut fds, timeout);
    if fds[0].any().unwrap_or(false) {
        let _ = shared.bell().read();
    }
    // The timer is the last descriptor in the list.
    if let Some(alarm) = alarm.filter(|_| fds.last().is_some_and(|fd| fd.any().unwrap_or(false))) {
        alarm.clear();
    }
}

/// Waits for the token file that names the next daemon, and connects to it.
fn await_token(shared: &Shared, mut quiesce: Quiesce, program: &str) {
    loop {
        if shared.is_stopped() {
            return;
        }
        if let Some(Redirect { migration, tokens }) = redirect::take() {
            quiesce = Quiesce { migration, tokens };
        }
        {
            // Keeps the clock's last reading close to the moment at which the process is frozen.
            let _ = shared.lock().clock.now_after_a_move();
        }
        if let Some(token) = quiesce
            .tokens
            .iter()
            .find_map(|path| read_token(path, &quiesce))
        {
            return resume(shared, &quiesce, &token, program);
        }
        std::thread::sleep(TOKEN_PAUSE);
    }
}

/// Returns the token in a file, if the file exists, is complete, and belongs to this migration.
fn read_token(path: &Path, quiesce: &Quiesce) -> Option<ResumeToken> {
    // `access` does not open the file: a process that is dumped at this moment must not have it
    // open.
    nix::unistd::access(path, nix::unistd::AccessFlags::R_OK).ok()?;
    if std::fs::metadata(path).ok()?.len() > TOKEN_BYTES_MAX {
        return None;
    }
    let token: ResumeToken = from_bytes(&std::fs::read(path).ok()?).ok()?;
    (token.migration == quiesce.migration).then_some(token)
}

fn resume(shared: &Shared, quiesce: &Quiesce, token: &ResumeToken, program: &str) {
    let deadline = Instant::now() + RESUME_MAX;
    let claim = Claim::Resume {
        tid: shared.me,
        migration: quiesce.migration,
    };
    loop {
        // A task that migrates was started by a tasker and ends with it, so the default of `at_end`
        // suffices.
        match greet(&token.socket, claim.clone(), program, AtEnd::default()) {
            Ok(accepted) if accepted.welcome.tid == shared.me => return adopt(shared, accepted),
            Ok(accepted) => {
                let tid = accepted.welcome.tid;
                return shared.lock().lose(&format!(
                    "after the move the daemon took {} for {tid}",
                    shared.me
                ));
            }
            Err(EnrollError::NoDaemon { .. } | EnrollError::Io { .. })
                if Instant::now() < deadline && !shared.is_stopped() =>
            {
                std::thread::sleep(RESUME_PAUSE);
            }
            Err(e) => return shared.lock().lose(&format!("going on after the move: {e}")),
        }
    }
}

fn adopt(shared: &Shared, accepted: Accepted) {
    let mut state = shared.lock();
    let now: Micros = state.clock.now_after_a_move();
    state.core.resume(now, &accepted.welcome);
    if let Err(e) = state.adopt(
        accepted.socket,
        accepted.decoder,
        accepted.passed,
        &shared.seats,
    ) {
        state.lose(&format!("going on after the move: {e}"));
    }
}
