//! The runtime's one lock, and what is done under it: reading and writing without waiting, and waiting on futexes.

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

/// How often a process that ends looks whether its daemon knows that.
const LAST_WORDS_LOOK: Duration = Duration::from_millis(10);
/// Room made for one read.
const READ_BYTES: usize = 128 << 10;
/// Bytes read under the lock in one go, so that others get their turn.
const READ_BYTES_MAX: usize = 2 << 20;
/// Looks at the rings between two looks at the clock.
const LOOKS_PER_TIME: u32 = 32;
/// The socket is not read more often than this by threads that have something else to look at; the helper watches it.
const READ_PAUSE: Micros = Micros(500);
/// How long a sender waits for a reader that makes no room.
const ROOM_PATIENCE: Duration = Duration::from_micros(50);
/// Descriptors that may wait for their frames.
const DESCRIPTORS_MAX: usize = 16;
/// A wait shorter than this needs a finer clock than the socket's.
const SEAT_MIN: Duration = Duration::from_millis(10);
/// How long a fork waits for a thread that has the lock: it may be below the fork on the same stack.
const FORK_PATIENCE: Duration = Duration::from_secs(1);
/// Longest sleep on a futex: after a move to a host with another clock a sleep by the old one must not last for ever.
const NAP_MAX: Duration = Duration::from_secs(1);
/// The same for who sleeps until there is news, and otherwise for ever. It wakes a processor that may have nothing else to do.
const LONG_NAP: Duration = Duration::from_secs(30);

/// What the helper thread has gone to sleep with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sleep {
    /// It is awake, and looks at everything before it sleeps.
    Awake,
    /// It sleeps until the socket can be read, or (`write`) written, or until the time.
    On {
        /// Also wakes when the socket can be written.
        write: bool,
        /// Wakes at this time.
        until: Option<Micros>,
        /// Also wakes when something comes by a direct route.
        far: bool,
        /// Also wakes when the alarm goes.
        alarm: bool,
    },
}

/// All that threads share, under the lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) core: Core,
    pub(crate) clock: Clock,
    pub(crate) socket: Option<Arc<Own<UnixStream>>>,
    pub(crate) decoder: FrameDecoder,
    /// Descriptors that were read and belong to frames that were not taken yet.
    passed: Passed,
    pub(crate) sleep: Sleep,
    /// Whether waiting for news awake has paid off lately.
    spin: Spin,
    /// When the socket was read last.
    read_at: Micros,
    /// The ear listens.
    pub(crate) has_ear: bool,
    /// Threads that wait for news.
    awaiting_news: usize,
    /// One more waits at the daemon's socket, and reads it.
    seated: bool,
    /// It has left something unread.
    unread: bool,
    /// Threads that wait until something has been written.
    awaiting_writes: usize,
    /// The sign for programs that wait on descriptors is up.
    sign_is_up: bool,
    /// Wakes the helper when peers have been left asleep for long enough; made when there are such.
    pub(crate) alarm: Option<Arc<Alarm>>,
}

/// The state with its lock.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) me: Tid,
    /// False once the connection is gone for good.
    alive: Arc<AtomicBool>,
    state: Mutex<State>,
    /// Threads that have found the lock taken. Who holds it while he waits lets them have it.
    wanted: AtomicU32,
    /// Where threads sleep until something has happened that they may wait for; peers on this host wake them, too.
    listening: Arc<Own<OwnBell>>,
    /// Bytes were written, or will never be.
    written: Condvar,
    /// Who is woken by the daemon.
    pub(crate) seats: Arc<Seats>,
    bell: Own<EventFd>,
    /// Readable while something is here, for programs that wait on descriptors themselves; made when one asks for it.
    sign: OnceLock<Own<EventFd>>,
    generation: u64,
    stop: AtomicBool,
}

/// The lock, held. On release the waiting threads and the helper are told what concerns them.
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

    /// Whom the changes made under this lock concern: threads that wait for news, threads that wait for writing, the helper.
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

    /// Puts the sign up while something can be received, or the connection is gone, and takes it down otherwise.
    fn show(&mut self) {
        let Some(sign) = self.shared.sign.get() else {
            return;
        };
        let up = !self.core.inbox.is_empty() || self.core.lost().is_some();
        if up != self.sign_is_up {
            self.sign_is_up = up;
            // The counter is 0 or 1, and only changed under the lock.
            let _ = if up {
                sign.get().write(1).map(drop)
            } else {
                sign.get().read().map(drop)
            };
        }
    }

    /// Unlocks, then wakes whom it concerns, so that nobody wakes up only to find the lock taken.
    fn release(&mut self) {
        self.show();
        let concerned = self.concerned();
        let wakes = self.take_wakes();
        drop(self.state.take());
        Held::tell(self.shared, concerned, wakes);
    }

    /// Waits awake for a little while, if that has paid off lately; true when there is news, or others want the lock.
    ///
    /// What has just woken this thread is found here, too, and counts as paid off: after each message that it hears it stays
    /// awake once more. With many that take turns that rarely helps itself, but it keeps its processor from falling asleep,
    /// for which whoever is woken there next would have to wait longer than for a turn.
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
        // Whoever has to answer needs this very processor: he gets it at once, or this thread sleeps.
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
                        // In the first round nobody has looked at the clock: it was short enough.
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

    /// From now on nobody waits awake.
    pub(crate) fn sleep_at_once(&mut self) {
        self.spin = Spin::never();
    }

    /// Lets those have the lock who have found it taken.
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

    /// After a send: while the ring of this task is full and its reader is at it, the rest is written as room comes. A reader
    /// that does something else finds the ring full later; the rest waits here then, and the sender goes on.
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

    /// Sleeps until there is news, or for `span` at most.
    pub(crate) fn wait_arrived(&mut self, span: Option<Duration>) {
        self.show();
        let by_daemon = self.core.near.is_empty() || !self.core.near.is_expected();
        if by_daemon && !self.seated && self.can_sit() && nap(span) >= SEAT_MIN {
            return self.wait_at_socket(nap(span));
        }
        let seen = self.shared.listening.get().about_to_sleep();
        let (now, news) = (self.now(), self.core.news());
        self.core.look_before_sleep(now);
        // From here on the helper watches.
        self.core.direct.attend(None);
        // What was done since the lock was taken may concern others, who must not wait for our return.
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

    /// Sleeps until there is news, which is most likely the daemon's answer to what it was asked.
    pub(crate) fn wait_for_reply(&mut self) {
        if self.seated || !self.can_sit() {
            return self.wait_arrived(None);
        }
        self.show();
        self.wait_at_socket(NAP_MAX);
    }

    /// Sleeps until the daemon says something, and hears it, or until the ear has heard something in a ring.
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

    /// Sleeps until bytes have been written or the connection has changed, or for `span` at most.
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

/// Whom a change concerns.
#[derive(Clone, Copy, Debug, Default)]
struct Concerned {
    /// Threads that wait for news.
    arrived: bool,
    /// The one that waits at the socket.
    seated: bool,
    /// Threads that wait for writing.
    written: bool,
    helper: bool,
}

fn nap(span: Option<Duration>) -> Duration {
    span.map_or(LONG_NAP, |span| span.min(NAP_MAX))
}

impl State {
    /// True when all that a thread may wait for comes by the daemon's socket, from other threads, or through the ear.
    fn can_sit(&self) -> bool {
        self.core.is_connected()
            && self.core.direct.is_empty()
            && (self.core.near.is_empty() || self.has_ear)
    }

    /// True while a thread sleeps on the bell, or is about to.
    #[cfg(test)]
    pub(crate) fn is_awaited(&self) -> bool {
        self.awaiting_news > 0
    }

    /// True when the helper sleeps through something that has come up.
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

    /// Whom to wake; to be done without the lock.
    fn take_wakes(&mut self) -> Wakes {
        if self.core.near.has_put_off()
            && let Some(alarm) = &self.alarm
        {
            alarm.unset();
        }
        self.core.near.take_wakes()
    }

    /// Lets peers sleep on that would take this thread's processor from it and keep it while they read something long: until
    /// this task waits, or for a moment.
    pub(crate) fn put_off_wakes(&mut self) {
        // Who is to wake them if the application computes has to be there.
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

    /// Takes in what has arrived in rings, and from the socket unless that was done just now.
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

    /// Takes in what has come by direct routes; the helper leaves them to this thread for a while.
    fn look_far(&mut self, now: Micros) -> bool {
        if !self.core.direct.is_open() {
            return false;
        }
        self.core.direct.attend(Some(now));
        self.core.look_far(now)
    }

    /// Now, by the runtime's clock.
    pub(crate) fn now(&mut self) -> Micros {
        self.clock.now()
    }

    /// Writes what the socket takes without waiting.
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
                // Of this user's; the word comes to nothing, and the daemon carries what would have gone by its route.
                Err(nix::Error::ETOOMANYREFS) if !descriptors.is_empty() => {
                    self.core.outbox.skip_word()
                }
                Err(e) => {
                    // What the daemon said before it closed is still worth reading.
                    self.read_all();
                    return self.lose(&format!("the daemon is gone: writing to it: {e}"));
                }
            }
        }
    }

    /// Reads what is there and acts on it; afterwards links have answered and what fits has been written.
    pub(crate) fn pump(&mut self) {
        self.read_all();
        let now = self.now();
        // Whoever reads at the same time may take all that there was room for, and nobody would be told that there is room again.
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
            // From the front again, if nobody has parts of it any more: the same few pages serve all that is small.
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
        // After an order to let go nothing comes that has to be read.
        self.unread = self.core.is_connected();
    }

    /// Acts on the frames that have been read.
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

    /// The connection is gone for good. The helper closes the socket.
    pub(crate) fn lose(&mut self, why: &str) {
        self.core.lose(why);
        self.decoder = FrameDecoder::new();
        self.passed.clear();
    }

    /// Closes the socket, which nobody watches any more.
    pub(crate) fn leave_socket(&mut self, seats: &Seats) {
        if let Some(socket) = self.socket.take() {
            seats.take(socket.get());
        }
    }

    /// Takes over a connection, the first or one after a move.
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
    /// The state of a task that has just been accepted.
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

    /// True in a child that was forked off the task: the lock may be held by a thread that does not exist here.
    pub(crate) fn is_foreign(&self) -> bool {
        self.generation != process::generation()
    }

    /// False once the connection is gone for good.
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// See [`Core::send_at_once`]; false also when another thread has the lock. Such a send changes nothing that [`Held`]
    /// would have to tell of but what the helper sleeps through.
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

    /// The lock; never to be taken when [`Shared::is_foreign`].
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

    /// The lock, or `None` when it cannot be had until the deadline (its holder may be below us on this very stack).
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

    /// Wakes the helper.
    pub(crate) fn ring(&self) {
        // Full means rung already.
        let _ = self.bell.get().write(1);
    }

    /// A descriptor that is readable while something can be received.
    pub(crate) fn sign_fd(&self) -> io::Result<RawFd> {
        if self.sign.get().is_none() {
            let fresh =
                EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
            // Another thread may have been faster; its sign counts then.
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

    /// The sign, once somebody has asked for it.
    #[cfg(test)]
    pub(crate) fn sign(&self) -> Option<&EventFd> {
        self.sign.get().map(Own::get)
    }

    /// True while a thread sleeps at the socket, or is about to.
    #[cfg(test)]
    pub(crate) fn is_seated(&self) -> bool {
        self.lock().seated
    }

    /// Where peers on this host call.
    pub(crate) fn listening(&self) -> &OwnBell {
        self.listening.get()
    }

    /// The bell, for the helper.
    pub(crate) fn bell(&self) -> &EventFd {
        self.bell.get()
    }

    /// True when the helper is to end.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Asks the helper to end.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.ring();
        if self.listening.get().call_ear() {
            futex::wake_all(self.listening.get().ear());
        }
    }

    /// See [`Core::prepare_for_fork`]; nothing in a forked child.
    pub(crate) fn prepare_for_fork(&self) {
        if !self.is_foreign()
            && let Some(mut state) = self.lock_until(Instant::now() + FORK_PATIENCE)
        {
            let now = state.now();
            state.core.prepare_for_fork(now);
        }
    }

    /// Hands everything that was sent to the daemon as far as that is possible until the deadline: the process ends.
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
