//! The helper thread: reads and writes while the application computes, and lets go of the daemon for a move.
//!
//! It blocks all signals, holds no descriptor but the socket, an eventfd and an alarm, and sleeps unless needed.

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

/// Stack of the helper: small, because it travels with every move.
const STACK_BYTES: usize = 256 << 10;
/// Pause between two looks for the token at first, so that a moved task runs on at once.
const TOKEN_PAUSE: Duration = Duration::from_millis(1);
/// A token is far smaller; anything larger is none.
const TOKEN_BYTES_MAX: u64 = 64 << 10;
/// How long the daemon named by a token may be unreachable before the task gives up.
const RESUME_MAX: Duration = Duration::from_secs(15);
/// Pause between two attempts to reach it.
const RESUME_PAUSE: Duration = Duration::from_millis(10);

/// Starts the helper with all signals blocked.
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

/// Tells the application when the helper ends by a panic, so that nobody waits for ever.
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

/// What the helper does next, decided under the lock.
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
            // Without an ear a full ring is noticed by the application's next call, or when a link asks.
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
        // One that failed has left the lock poisoned, and everybody goes on.
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
        // Memory that need not travel.
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
        // Another thread looks; when it stops it may not say so.
        let soon = Duration::from_micros(ATTENDED.0);
        span = Some(span.map_or(soon, |span| span.min(soon)));
    }
    // Behind the order to let go nothing comes that has to be read now.
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
    // Rounded up: to wake a little late is cheaper than to wake twice.
    let timeout = span.map_or(PollTimeout::NONE, |span| {
        let ms = span.as_micros().div_ceil(1000);
        PollTimeout::try_from(ms).unwrap_or(PollTimeout::MAX)
    });
    // An error (a signal that a debugger injects, a lack of kernel memory) is a wake-up for nothing.
    let _ = poll(&mut fds, timeout);
    if fds[0].any().unwrap_or(false) {
        let _ = shared.bell().read();
    }
    // The last one watched, if any is.
    if let Some(alarm) = alarm.filter(|_| fds.last().is_some_and(|fd| fd.any().unwrap_or(false))) {
        alarm.clear();
    }
}

/// Waits for the file that says where the task goes on, and connects there.
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

/// The token in a file, if it is there, whole, and of this move.
fn read_token(path: &Path, quiesce: &Quiesce) -> Option<ResumeToken> {
    // A look without opening: a process that is dumped in between must not hold the file.
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
        // What moves was started by a tasker and ends with it, so the default does for `at_end`.
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
