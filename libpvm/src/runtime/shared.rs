//! The runtime's one lock, and the operations under it: non-blocking reads and writes of the
//! socket, and blocking waits.
//!
//! A thread waits for an event in up to three stages: it spins on the rings and direct routes, then
//! it sleeps, either on the daemon's socket (one thread at a time) or on a futex in the task's
//! doorbell. Each release of the lock wakes exactly the threads for which something has changed.

use super::alarm::Alarm;
use super::clock::Clock;
use super::connect::Accepted;
use super::core::{Core, Phase};
use super::near::{Near, Wakes};
use super::process::{self, Own};
use super::seat::Seats;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use sempa_proto::frame::FrameDecoder;
use sempa_proto::task::Request;
use sempa_proto::{Micros, Tid};
use sempa_ring::futex;
use sempa_ring::memory::OwnBell;
use sempa_socket::{Passed, Reach, Received, Spin, receive};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

/// Interval at which an exiting process checks whether its daemon has confirmed the exit notice.
const LAST_WORDS_LOOK: Duration = Duration::from_millis(10);
/// Buffer space provided for one read.
const READ_BYTES: usize = 128 << 10;
/// Maximum number of bytes read under the lock in one go, so that other threads get the lock.
const READ_BYTES_MAX: usize = 2 << 20;
/// Number of ring polls between two readings of the clock.
const LOOKS_PER_TIME: u32 = 32;
/// Minimum interval between two reads of the socket by threads that also poll rings or direct
/// routes. The I/O thread watches the socket meanwhile.
const READ_PAUSE: Micros = Micros(500);
/// Time for which a sender waits for a reader that frees no space in the ring.
const ROOM_PATIENCE: Duration = Duration::from_micros(50);
/// Maximum number of received descriptors whose frames have not been handled.
const DESCRIPTORS_MAX: usize = 16;
/// Minimum wait for sleeping on the socket, whose timeouts have millisecond resolution. Shorter
/// waits use the futex.
const SEAT_MIN: Duration = Duration::from_millis(10);
/// Time for which a fork waits for the lock. The thread that holds it may have called the fork
/// itself, further down the stack.
const FORK_PATIENCE: Duration = Duration::from_secs(1);
/// Maximum sleep on a futex with a deadline. After a migration to a host with another clock a sleep
/// by the old clock must not last forever.
const NAP_MAX: Duration = Duration::from_secs(1);
/// Maximum sleep without a deadline. Each wake-up disturbs a CPU that may be idle.
const LONG_NAP: Duration = Duration::from_secs(30);

/// Conditions that wake the I/O thread from its current sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sleep {
    /// The thread is awake and checks everything before it sleeps.
    Awake,
    /// The thread sleeps until the socket is readable, or until one of these conditions holds.
    On {
        /// The socket is writable.
        write: bool,
        until: Option<Micros>,
        /// Something arrives by a direct route.
        far: bool,
        /// The timer for deferred wake-ups expires.
        alarm: bool,
    },
}

/// State that all threads share under the lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) core: Core,
    pub(crate) clock: Clock,
    pub(crate) socket: Option<Arc<Own<UnixStream>>>,
    pub(crate) decoder: FrameDecoder,
    /// Received descriptors that belong to frames not handled yet.
    passed: Passed,
    pub(crate) sleep: Sleep,
    /// Decides by recent success whether waiting threads spin.
    spin: Spin,
    /// Time of the last read of the socket.
    read_at: Micros,
    /// The drainer thread runs.
    pub(crate) has_ear: bool,
    /// Number of threads that sleep until the next event.
    awaiting_news: usize,
    /// One more thread sleeps on the daemon's socket, and reads it.
    seated: bool,
    /// The last read of the socket stopped at its limit and left data unread.
    unread: bool,
    /// Number of threads that wait until bytes have been written.
    awaiting_writes: usize,
    /// The descriptor for programs that wait on descriptors is readable.
    sign_is_up: bool,
    /// Timer that wakes the I/O thread when deferred wake-ups are due; created on first use.
    pub(crate) alarm: Option<Arc<Alarm>>,
}

/// State of the runtime with its lock.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) me: Tid,
    /// False when the connection is lost for good.
    alive: Arc<AtomicBool>,
    state: Mutex<State>,
    /// Number of threads that are blocked on the lock. A thread that spins while it holds the lock
    /// releases it for them.
    wanted: AtomicU32,
    /// Doorbell on which threads sleep until the next event. Peers on this host ring it, too.
    listening: Arc<Own<OwnBell>>,
    /// Signalled when bytes were written or never will be.
    written: Condvar,
    /// Epoll sets for the daemon's socket.
    pub(crate) seats: Arc<Seats>,
    bell: Own<EventFd>,
    /// Readable while a message can be received, for programs that wait on descriptors themselves;
    /// created on first use.
    sign: OnceLock<Own<EventFd>>,
    generation: u64,
    stop: AtomicBool,
}

/// Guard of the lock. On release it wakes the waiting threads and the I/O thread if something has
/// changed for them.
pub(crate) struct Held<'a> {
    shared: &'a Shared,
    state: Option<MutexGuard<'a, State>>,
    news: u64,
    out: (u64, u64),
    phase: bool,
}

impl std::ops::Deref for Held<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        self.state.as_ref().expect("taken only on release")
    }
}

impl std::ops::DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect("taken only on release")
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

impl<'a> Held<'a> {
    fn new(shared: &'a Shared, state: MutexGuard<'a, State>) -> Held<'a> {
        let (news, out, phase) = Held::seen(&state);
        Held {
            shared,
            state: Some(state),
            news,
            out,
            phase,
        }
    }

    fn seen(state: &State) -> (u64, (u64, u64), bool) {
        let core = &state.core;
        (
            core.news(),
            (core.outbox.written(), core.route_news()),
            core.is_connected(),
        )
    }

    /// Returns the threads for which something has changed under this lock.
    fn concerned(&self) -> Concerned {
        let (news, out, phase) = Held::seen(self);
        let changed = phase != self.phase || self.core.lost().is_some();
        let written = self.awaiting_writes > 0 && (out != self.out || changed);
        let arrived = self.awaiting_news > 0 && news != self.news;
        let seated = self.seated && (news != self.news || changed || !self.can_sit());
        Concerned {
            arrived,
            seated,
            written,
            helper: self.helper_is_needed(),
        }
    }

    fn tell(shared: &Shared, concerned: Concerned, wakes: Wakes) {
        let Concerned {
            arrived,
            seated,
            written,
            helper,
        } = concerned;
        wakes.wake();
        if seated {
            shared.seats.kick();
        }
        if arrived {
            shared.listening.get().stir();
            futex::wake_all(shared.listening.get().word());
        }
        if written {
            shared.written.notify_all();
        }
        if helper {
            shared.ring();
        }
    }

    /// Makes the ready descriptor readable if a message can be received or the connection is lost,
    /// and otherwise not readable.
    fn show(&mut self) {
        let Some(sign) = self.shared.sign.get() else {
            return;
        };
        let up = !self.core.inbox.is_empty() || self.core.lost().is_some();
        if up != self.sign_is_up {
            self.sign_is_up = up;
            // The counter is 0 or 1 and changes only under the lock.
            let _ = if up {
                sign.get().write(1).map(drop)
            } else {
                sign.get().read().map(drop)
            };
        }
    }

    /// Unlocks first and wakes threads afterwards, so that no thread wakes up only to block on the
    /// lock.
    fn release(&mut self) {
        self.show();
        let concerned = self.concerned();
        let wakes = self.take_wakes();
        drop(self.state.take());
        Held::tell(self.shared, concerned, wakes);
    }

    /// Spins for a short time if that has paid off lately. Returns true if there is an event, or if
    /// other threads want the lock.
    ///
    /// An event that has just woken this thread is found here, too, and counts as success, so the
    /// thread spins once more after each message. With many peers that alternate this rarely
    /// catches the next message, but it keeps the CPU from entering an idle state, and waking a
    /// thread on an idle CPU takes longer than a peer's turn.
    pub(crate) fn wait_awake(&mut self, span: Option<Duration>) -> bool {
        if self.core.near.is_empty() && self.core.direct.is_empty() {
            return false;
        }
        let reach = if self.core.direct.is_empty() {
            Reach::Host
        } else {
            Reach::Tasks
        };
        let Some(budget) = self.spin.budget(span, reach) else {
            return false;
        };
        if self.core.near.has_put_off() {
            self.take_wakes().wake();
        }
        // The peer that must answer ran on this CPU last: yield the CPU to it immediately, or
        // sleep.
        let shares = self.core.near.shares_processor();
        if shares && !self.spin.gives_way() {
            return false;
        }
        let looks = if shares { 1 } else { LOOKS_PER_TIME };
        let (mut begin, news) = (None, self.core.news());
        loop {
            for _ in 0..looks {
                if self.core.near.has_something() {
                    let now = self.clock.about();
                    self.core.look(now);
                    if self.core.news() != news {
                        // The clock was not read in the first round, which took a negligible time.
                        let after = begin.map_or(Duration::ZERO, |begin: Instant| begin.elapsed());
                        self.spin.ended(after, budget);
                        return true;
                    }
                }
                if self.shared.wanted.load(Ordering::Relaxed) != 0 {
                    self.let_others();
                    return true;
                }
                std::hint::spin_loop();
            }
            let begin = *begin.get_or_insert_with(Instant::now);
            self.spin.give_way();
            let now = self.now();
            if self.look_far(now) && self.core.news() != news {
                self.spin.ended(begin.elapsed(), budget);
                return true;
            }
            if begin.elapsed() >= budget {
                self.spin.was_in_vain();
                return false;
            }
        }
    }

    /// Makes threads of this task sleep immediately when they wait.
    pub(crate) fn sleep_at_once(&mut self) {
        self.spin = Spin::never();
    }

    /// Releases the lock for the threads that are blocked on it, and takes it again.
    fn let_others(&mut self) {
        self.release();
        std::thread::yield_now();
        self.regain();
    }

    fn regain(&mut self) {
        let state = self.shared.guard();
        (self.news, self.out, self.phase) = Held::seen(&state);
        self.state = Some(state);
    }

    /// After a send to a full ring: writes the rest as the reader frees space, as long as the
    /// reader is active. If the reader does something else, the rest stays queued and the sender
    /// continues.
    pub(crate) fn make_room(&mut self, peer: Tid) {
        if !self.core.waits_for_ring(peer) {
            return;
        }
        let mut since = Instant::now();
        while self.core.waits_for_ring(peer) {
            let now = self.now();
            if self.core.pump_one_ring(now, peer) {
                since = Instant::now();
            } else if since.elapsed() > ROOM_PATIENCE {
                return;
            } else if self.shared.wanted.load(Ordering::Relaxed) != 0 {
                self.let_others();
            } else {
                self.take_wakes().wake();
                std::thread::yield_now();
            }
        }
    }

    /// Sleeps until the next event, at most for `span`.
    pub(crate) fn wait_arrived(&mut self, span: Option<Duration>) {
        self.show();
        let by_daemon = self.core.near.is_empty() || !self.core.near.is_expected();
        if by_daemon && !self.seated && self.can_sit() && nap(span) >= SEAT_MIN {
            return self.wait_at_socket(nap(span));
        }
        let seen = self.shared.listening.get().about_to_sleep();
        let (now, news) = (self.now(), self.core.news());
        self.core.look_before_sleep(now);
        // From here on the I/O thread watches the direct routes.
        self.core.direct.attend(None);
        // Changes made under the lock may matter to other threads, which must not wait until this
        // thread returns.
        let concerned = self.concerned();
        let wakes = self.take_wakes();
        if self.core.news() != news {
            return Held::tell(self.shared, concerned, wakes);
        }
        self.awaiting_news += 1;
        drop(self.state.take());
        Held::tell(self.shared, concerned, wakes);
        futex::wait(self.shared.listening.get().word(), seen, Some(nap(span)));
        self.regain();
        self.awaiting_news -= 1;
    }

    /// Sleeps until the next event, which is most likely the daemon's reply to a request.
    pub(crate) fn wait_for_reply(&mut self) {
        if self.seated || !self.can_sit() {
            return self.wait_arrived(None);
        }
        self.show();
        self.wait_at_socket(NAP_MAX);
    }

    /// Sleeps until the daemon sends something, and reads it, or until the drainer thread has read
    /// a ring.
    fn wait_at_socket(&mut self, span: Duration) {
        let shared = self.shared;
        let bell = shared.listening();
        bell.call_for_everything(true);
        let (now, news) = (self.now(), self.core.news());
        self.core.look_before_sleep(now);
        let (concerned, wakes) = (self.concerned(), self.take_wakes());
        let arrived = self.core.news() != news;
        self.seated = !arrived;
        if !arrived {
            drop(self.state.take());
        }
        Held::tell(shared, concerned, wakes);
        if !arrived {
            shared.seats.sleep(span);
            self.regain();
            self.seated = false;
            self.pump();
        }
        bell.call_for_everything(shared.sign.get().is_some());
    }

    /// Sleeps until bytes have been written or the connection has changed, at most for `span`.
    pub(crate) fn wait_written(&mut self, span: Option<Duration>) {
        self.show();
        let (concerned, wakes) = (self.concerned(), self.take_wakes());
        Held::tell(self.shared, concerned, wakes);
        let mut state = self.state.take().expect("taken only on release");
        state.awaiting_writes += 1;
        let (mut state, _) = self
            .shared
            .written
            .wait_timeout(state, nap(span))
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        state.awaiting_writes -= 1;
        (self.news, self.out, self.phase) = Held::seen(&state);
        self.state = Some(state);
    }
}

/// Threads to wake after a change.
#[derive(Clone, Copy, Debug, Default)]
struct Concerned {
    /// Threads that wait for an event.
    arrived: bool,
    /// The thread that sleeps on the socket.
    seated: bool,
    /// Threads that wait for written bytes.
    written: bool,
    helper: bool,
}

fn nap(span: Option<Duration>) -> Duration {
    span.map_or(LONG_NAP, |span| span.min(NAP_MAX))
}

impl State {
    /// True if every event for which a thread may wait comes through the daemon's socket, from
    /// other threads, or through the drainer thread.
    fn can_sit(&self) -> bool {
        self.core.is_connected()
            && self.core.direct.is_empty()
            && (self.core.near.is_empty() || self.has_ear)
    }

    /// True while a thread sleeps on the doorbell, or is about to.
    #[cfg(test)]
    pub(crate) fn is_awaited(&self) -> bool {
        self.awaiting_news > 0
    }

    /// True if the I/O thread sleeps and none of its wake conditions covers a pending change.
    fn helper_is_needed(&self) -> bool {
        let Sleep::On {
            write,
            until,
            far,
            alarm,
        } = self.sleep
        else {
            return false;
        };
        let core = &self.core;
        let closing = !core.is_connected();
        let unwritten = !core.outbox.is_empty() && !write;
        let earlier = core
            .earliest()
            .is_some_and(|due| until.is_none_or(|until| due < until));
        let deaf = core.near.is_shared() && !self.has_ear;
        let unwatched = core.direct.must_be_watched() && !far;
        let unheard = self.alarm.is_some() && !alarm;
        closing || unwritten || earlier || deaf || unwatched || unheard || self.unread
    }

    /// Returns the peers to wake; the caller wakes them without the lock.
    fn take_wakes(&mut self) -> Wakes {
        if self.core.near.has_put_off()
            && let Some(alarm) = &self.alarm
        {
            alarm.unset();
        }
        self.core.near.take_wakes()
    }

    /// Defers waking peers that would run on this thread's CPU and keep it while they read a long
    /// message. They are woken when this task waits, or after a short delay.
    pub(crate) fn put_off_wakes(&mut self) {
        // The I/O thread must be asleep, because it wakes the peers if the application keeps
        // computing.
        if !matches!(self.sleep, Sleep::On { .. }) || !self.core.near.put_off() {
            return;
        }
        if self.alarm.is_none() {
            self.alarm = Alarm::new().ok().map(Arc::new);
        }
        if !self.alarm.as_ref().is_some_and(|alarm| alarm.set()) {
            self.core.near.put_off_no_more();
        }
    }

    /// Handles what has arrived in rings and direct routes, and reads the socket unless that was
    /// done very recently.
    pub(crate) fn take_in(&mut self) {
        let now = self.now();
        let news = self.core.news();
        self.core.look(now);
        self.look_far(now);
        let others = !self.core.near.is_empty() || !self.core.direct.is_empty();
        if self.core.news() == news && (!others || now.since(self.read_at) >= READ_PAUSE) {
            self.pump();
        }
    }

    /// Handles what has arrived by direct routes. The I/O thread does not watch them for a while
    /// after that.
    fn look_far(&mut self, now: Micros) -> bool {
        if !self.core.direct.is_open() {
            return false;
        }
        self.core.direct.attend(Some(now));
        self.core.look_far(now)
    }

    /// Returns the current time of the runtime's clock.
    pub(crate) fn now(&mut self) -> Micros {
        self.clock.now()
    }

    /// Writes as much of the outbox as the socket accepts without blocking.
    pub(crate) fn flush(&mut self) {
        let Some(socket) = &self.socket else { return };
        let fd = socket.get().as_raw_fd();
        while !self.core.outbox.is_empty() {
            let (slices, descriptors) = self.core.outbox.slices();
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            let rights = [ControlMessage::ScmRights(&descriptors)];
            let control = if descriptors.is_empty() {
                &[][..]
            } else {
                &rights[..]
            };
            match sendmsg::<()>(fd, &slices, control, flags, None) {
                Ok(n) => self.core.outbox.advance(n),
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => return,
                // Too many descriptors of this user are in transit. The frame is dropped, and the
                // daemon carries the messages that would have used the route.
                Err(nix::Error::ETOOMANYREFS) if !descriptors.is_empty() => {
                    self.core.outbox.skip_word()
                }
                Err(e) => {
                    // The last frames that the daemon sent before it closed the connection are
                    // still handled.
                    self.read_all();
                    return self.lose(&format!("the daemon is gone: writing to it: {e}"));
                }
            }
        }
    }

    /// Reads and handles all available frames; then lets links transmit and writes what the socket
    /// accepts.
    pub(crate) fn pump(&mut self) {
        self.read_all();
        let now = self.now();
        // The daemon reads concurrently and may empty the outbox while links still wait for space
        // in it. No later event would resume them, so the loop continues.
        loop {
            self.core.pump(now);
            self.flush();
            if !self.core.outbox.is_empty() || !self.core.has_more() {
                return;
            }
        }
    }

    fn read_all(&mut self) {
        let Some(socket) = self.socket.clone() else {
            return;
        };
        self.read_at = self.now();
        self.unread = false;
        let mut total = 0;
        while self.core.is_connected() && total < READ_BYTES_MAX {
            let buffer = self.decoder.buffer_mut();
            // Reuses the start of the buffer if no message refers to it any more, so small messages
            // always occupy the same few pages.
            let fresh = buffer.is_empty() && buffer.try_reclaim(READ_BYTES);
            if !fresh && buffer.capacity() - buffer.len() < READ_BYTES / 4 {
                buffer.reserve(READ_BYTES);
            }
            match receive(
                socket.get(),
                buffer,
                &mut self.passed,
                MsgFlags::MSG_DONTWAIT,
            ) {
                Ok(Received { bytes: 0, .. }) => {
                    return self.lose("the daemon closed the connection");
                }
                Ok(Received { bytes, all }) => {
                    total += bytes;
                    self.take_frames();
                    if all {
                        return;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) => return self.lose(&format!("the daemon is gone: reading from it: {e}")),
            }
        }
        // After the quiesce request the daemon sends nothing that must be read.
        self.unread = self.core.is_connected();
    }

    /// Handles the frames that have been read.
    pub(crate) fn take_frames(&mut self) {
        let now = self.now();
        loop {
            let taken = match self.decoder.next_frame() {
                Ok(Some(frame)) => self.core.take_frame(now, frame, &mut self.passed),
                Ok(None) if self.passed.len() > DESCRIPTORS_MAX => {
                    Err("descriptors that nothing belongs to".into())
                }
                Ok(None) => return,
                Err(e) => Err(e.to_string()),
            };
            if let Err(why) = taken {
                return self.lose(&format!(
                    "the daemon said something that cannot be understood: {why}"
                ));
            }
        }
    }

    /// Marks the connection as lost for good. The I/O thread closes the socket.
    pub(crate) fn lose(&mut self, why: &str) {
        self.core.lose(why);
        self.decoder = FrameDecoder::new();
        self.passed.clear();
    }

    /// Closes the socket and stops watching it.
    pub(crate) fn leave_socket(&mut self, seats: &Seats) {
        if let Some(socket) = self.socket.take() {
            seats.take(socket.get());
        }
    }

    /// Takes over a connection: the first one, or one after a migration.
    pub(crate) fn adopt(
        &mut self,
        socket: Arc<Own<UnixStream>>,
        decoder: FrameDecoder,
        passed: Passed,
        seats: &Seats,
    ) -> io::Result<()> {
        seats.put(socket.get())?;
        self.socket = Some(socket);
        (self.decoder, self.passed) = (decoder, passed);
        self.take_frames();
        self.pump();
        Ok(())
    }
}

impl Shared {
    /// Creates the state of a task that a daemon has just accepted.
    pub(crate) fn new(accepted: Accepted) -> io::Result<Shared> {
        let bell =
            EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let Accepted {
            socket,
            decoder,
            passed,
            welcome,
        } = accepted;
        let listening = Arc::new(Own::new(OwnBell::new()?));
        let mut core = Core::new(&welcome);
        core.near = Near::new(listening.clone());
        let alive = core.alive();
        let mut state = State {
            core,
            clock: Clock::new(),
            socket: None,
            decoder: FrameDecoder::new(),
            passed: Passed::default(),
            sleep: Sleep::Awake,
            spin: Spin::new(Reach::Host),
            read_at: Micros(0),
            has_ear: false,
            awaiting_news: 0,
            seated: false,
            unread: false,
            awaiting_writes: 0,
            sign_is_up: false,
            alarm: None,
        };
        let seats = Arc::new(Seats::new()?);
        state.adopt(socket, decoder, passed, &seats)?;
        Ok(Shared {
            me: welcome.tid,
            alive,
            state: Mutex::new(state),
            wanted: AtomicU32::new(0),
            listening,
            written: Condvar::new(),
            seats,
            bell: Own::fd(bell),
            sign: OnceLock::new(),
            generation: process::generation(),
            stop: AtomicBool::new(false),
        })
    }

    /// True in a forked child of the task. The lock may be held there by a thread that does not
    /// exist in the child.
    pub(crate) fn is_foreign(&self) -> bool {
        self.generation != process::generation()
    }

    /// False when the connection is lost for good.
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// As [`Core::send_at_once`]; also returns false if another thread holds the lock. Such a send
    /// changes nothing for which a [`Held`] would wake threads, except conditions of the I/O
    /// thread's sleep.
    pub(crate) fn send_at_once(&self, peer: Tid, head: &[u8], body: &[u8], direct: bool) -> bool {
        let Ok(mut state) = self.state.try_lock() else {
            return false;
        };
        let now = state.clock.about();
        let Some(wakes) = state.core.send_at_once(now, peer, head, body, direct) else {
            return false;
        };
        let helper = state.helper_is_needed();
        drop(state);
        Held::tell(
            self,
            Concerned {
                helper,
                ..Concerned::default()
            },
            wakes,
        );
        true
    }

    /// Locks the state. Must not be called if [`Shared::is_foreign`].
    pub(crate) fn lock(&self) -> Held<'_> {
        debug_assert!(!self.is_foreign(), "callers look before they lock");
        Held::new(self, self.guard())
    }

    fn guard(&self) -> MutexGuard<'_, State> {
        match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.wanted.fetch_add(1, Ordering::Relaxed);
                let state = self
                    .state
                    .lock()
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
                self.wanted.fetch_sub(1, Ordering::Relaxed);
                state
            }
        }
    }

    /// Locks the state; `None` if the lock is not free before the deadline. Its holder may be a
    /// caller of this function.
    pub(crate) fn lock_until(&self, deadline: Instant) -> Option<Held<'_>> {
        loop {
            match self.state.try_lock() {
                Ok(state) => return Some(Held::new(self, state)),
                Err(TryLockError::Poisoned(poisoned)) => {
                    return Some(Held::new(self, poisoned.into_inner()));
                }
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Wakes the I/O thread.
    pub(crate) fn ring(&self) {
        // Fails if the counter is full; then a wake-up is pending.
        let _ = self.bell.get().write(1);
    }

    /// Returns a descriptor that is readable while a message can be received.
    pub(crate) fn sign_fd(&self) -> io::Result<RawFd> {
        if self.sign.get().is_none() {
            let fresh =
                EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
            // Fails if another thread created the descriptor first; that one is used.
            let _ = self.sign.set(Own::fd(fresh));
        }
        let held = self.lock();
        self.listening.get().call_for_everything(true);
        drop(held);
        Ok(self
            .sign
            .get()
            .expect("just made")
            .get()
            .as_fd()
            .as_raw_fd())
    }

    /// Returns the ready descriptor if a program has requested one.
    #[cfg(test)]
    pub(crate) fn sign(&self) -> Option<&EventFd> {
        self.sign.get().map(Own::get)
    }

    /// True while a thread sleeps on the socket, or is about to.
    #[cfg(test)]
    pub(crate) fn is_seated(&self) -> bool {
        self.lock().seated
    }

    /// Returns the doorbell that peers on this host ring.
    pub(crate) fn listening(&self) -> &OwnBell {
        self.listening.get()
    }

    /// Returns the eventfd on which the I/O thread sleeps.
    pub(crate) fn bell(&self) -> &EventFd {
        self.bell.get()
    }

    /// True if the background threads must end.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Asks the background threads to end.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.ring();
        if self.listening.get().call_ear() {
            futex::wake_all(self.listening.get().ear());
        }
    }

    /// See [`Core::prepare_for_fork`]. Does nothing in a forked child.
    pub(crate) fn prepare_for_fork(&self) {
        if !self.is_foreign()
            && let Some(mut state) = self.lock_until(Instant::now() + FORK_PATIENCE)
        {
            let now = state.now();
            state.core.prepare_for_fork(now);
        }
    }

    /// Gives all sent messages to the daemon before the process exits, as far as that is possible
    /// before the deadline.
    pub(crate) fn flush_until(&self, deadline: Instant) {
        let Some(mut state) = self.lock_until(deadline) else {
            return;
        };
        let asks = state.core.begin_to_end();
        let mut words = asks
            .then(|| state.core.ask(Request::LastWords).ok())
            .flatten();
        loop {
            let now = state.now();
            words = words.filter(|id| state.core.take_reply(*id).is_none());
            if words.is_some() {
                state.flush();
                let left = deadline.saturating_duration_since(Instant::now());
                if !left.is_zero() {
                    state.wait_written(Some(left.min(LAST_WORDS_LOOK)));
                    continue;
                }
            }
            state.core.lift_windows(now);
            state.flush();
            let core = &state.core;
            let idle = core.is_connected() && core.outbox.is_empty() && core.all_transmitted();
            let left = deadline.saturating_duration_since(Instant::now());
            if idle || matches!(core.phase(), Phase::Lost(_)) || left.is_zero() {
                return;
            }
            state.wait_written(Some(left));
        }
    }
}
