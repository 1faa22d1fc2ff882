//! The runtime's one lock, and the operations under it: non-blocking reads and writes of the
//! socket, and blocking waits.
//!
//! A thread waits for an event in up to three stages: it spins on the rings and direct routes, then
//! it sleeps, either on the daemon's socket (one thread at a time) or on a futex in the task's
//! doorbell. Each release of the lock wakes exactly the threads for which something has changed.

use super::clock::Clock;
use super::connect::AcceptedConnection;
use super::core::{Core, Phase};
use super::process::{self, ProcessOwned};
use super::shm::{PeerWakes, ShmRoutes};
use super::socket_waiters::SocketWaiters;
use super::wake_delay_timer::WakeDelayTimer;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use sempa_proto::frame::FrameDecoder;
use sempa_proto::task::Request;
use sempa_proto::{Micros, Tid};
use sempa_ring::futex;
use sempa_ring::shared_memory::OwnDoorbell;
use sempa_socket::{PendingFds, Received, SenderReach, SpinBudget, receive};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

/// Interval at which an exiting process checks whether its daemon has confirmed the exit notice.
const EXIT_NOTICE_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Buffer space provided for one read.
const READ_BYTES: usize = 128 << 10;
/// Maximum number of bytes read under the lock in one go, so that other threads get the lock.
const READ_BYTES_MAX: usize = 2 << 20;
/// Number of ring polls between two readings of the clock.
const POLLS_PER_CLOCK_READ: u32 = 32;
/// Minimum interval between two reads of the socket by threads that also poll rings or direct
/// routes. The I/O thread watches the socket meanwhile.
const SOCKET_READ_INTERVAL: Micros = Micros(500);
/// Time for which a sender waits for a reader that frees no space in the ring.
const RING_SPACE_TIMEOUT: Duration = Duration::from_micros(50);
/// Maximum number of received descriptors whose frames have not been handled.
const DESCRIPTORS_MAX: usize = 16;
/// Minimum wait for sleeping on the socket, whose timeouts have millisecond resolution. Shorter
/// waits use the futex.
const SOCKET_WAIT_MIN: Duration = Duration::from_millis(10);
/// Time for which a fork waits for the lock. The thread that holds it may have called the fork
/// itself, further down the stack.
const FORK_LOCK_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum sleep on a futex with a deadline. After a migration to a host with another clock a sleep
/// by the old clock must not last forever.
const SLEEP_MAX: Duration = Duration::from_secs(1);
/// Maximum sleep without a deadline. Each wake-up disturbs a CPU that may be idle.
const IDLE_SLEEP_MAX: Duration = Duration::from_secs(30);

/// Conditions that wake the I/O thread from its current sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoThreadSleep {
    /// The thread is awake and checks everything before it sleeps.
    Awake,
    /// The thread sleeps until the socket is readable, or until one of these conditions holds.
    Sleeping {
        /// The socket is writable.
        write: bool,
        until: Option<Micros>,
        /// Something arrives by a direct route.
        direct: bool,
        /// The timer for deferred wake-ups expires.
        wake_timer: bool,
    },
}

/// State that all threads share under the lock.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) core: Core,
    pub(crate) clock: Clock,
    pub(crate) socket: Option<Arc<ProcessOwned<UnixStream>>>,
    pub(crate) decoder: FrameDecoder,
    /// Received descriptors that belong to frames not handled yet.
    descriptors: PendingFds,
    pub(crate) io_thread_sleep: IoThreadSleep,
    /// Decides by recent success whether waiting threads spin.
    spin: SpinBudget,
    /// Time of the last read of the socket.
    socket_read_at: Micros,
    /// The drainer thread runs.
    pub(crate) has_drainer: bool,
    /// Number of threads that sleep until the next event.
    event_waiters: usize,
    /// One more thread sleeps on the daemon's socket, and reads it.
    has_socket_waiter: bool,
    /// The last read of the socket stopped at its limit and left data unread.
    socket_has_more: bool,
    /// Number of threads that wait until bytes have been written.
    write_waiters: usize,
    /// The descriptor for programs that wait on descriptors is readable.
    ready_fd_is_set: bool,
    /// Timer that wakes the I/O thread when deferred wake-ups are due; created on first use.
    pub(crate) wake_timer: Option<Arc<WakeDelayTimer>>,
}

/// State of the runtime with its lock.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) own_tid: Tid,
    /// False when the connection is lost for good.
    alive: Arc<AtomicBool>,
    state: Mutex<State>,
    /// Number of threads that are blocked on the lock. A thread that spins while it holds the lock
    /// releases it for them.
    lock_waiters: AtomicU32,
    /// Doorbell on which threads sleep until the next event. Peers on this host ring it, too.
    doorbell: Arc<ProcessOwned<OwnDoorbell>>,
    /// Signalled when bytes were written or never will be.
    written: Condvar,
    /// Epoll sets for the daemon's socket.
    pub(crate) socket_waiters: Arc<SocketWaiters>,
    io_thread_event: ProcessOwned<EventFd>,
    /// Readable while a message can be received, for programs that wait on descriptors themselves;
    /// created on first use.
    ready_event: OnceLock<ProcessOwned<EventFd>>,
    generation: u64,
    stop: AtomicBool,
}

/// Guard of the lock. On release it wakes the waiting threads and the I/O thread if something has
/// changed for them.
pub(crate) struct StateGuard<'a> {
    shared: &'a Shared,
    state: Option<MutexGuard<'a, State>>,
    seen_event_seq: u64,
    seen_output: (u64, u64),
    was_connected: bool,
}

impl std::ops::Deref for StateGuard<'_> {
    type Target = State;
    fn deref(&self) -> &State {
        self.state.as_ref().expect("taken only on release")
    }
}

impl std::ops::DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        self.state.as_mut().expect("taken only on release")
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        self.release();
    }
}

impl<'a> StateGuard<'a> {
    fn new(shared: &'a Shared, state: MutexGuard<'a, State>) -> StateGuard<'a> {
        let (news, out, phase) = StateGuard::observe(&state);
        StateGuard {
            shared,
            state: Some(state),
            seen_event_seq: news,
            seen_output: out,
            was_connected: phase,
        }
    }

    fn observe(state: &State) -> (u64, (u64, u64), bool) {
        let core = &state.core;
        (
            core.event_seq(),
            (core.outbox.written(), core.send_event_seq()),
            core.is_connected(),
        )
    }

    /// Returns the threads for which something has changed under this lock.
    fn wake_set(&self) -> WakeSet {
        let (news, out, phase) = StateGuard::observe(self);
        let changed = phase != self.was_connected || self.core.lost_reason().is_some();
        let written = self.write_waiters > 0 && (out != self.seen_output || changed);
        let arrived = self.event_waiters > 0 && news != self.seen_event_seq;
        let seated = self.has_socket_waiter
            && (news != self.seen_event_seq || changed || !self.can_wait_at_socket());
        WakeSet {
            event_waiters: arrived,
            socket_waiter: seated,
            write_waiters: written,
            io_thread: self.io_thread_is_needed(),
        }
    }

    fn wake(shared: &Shared, wake_set: WakeSet, wakes: PeerWakes) {
        let WakeSet {
            event_waiters: arrived,
            socket_waiter: seated,
            write_waiters: written,
            io_thread,
        } = wake_set;
        wakes.wake();
        if seated {
            shared.socket_waiters.wake();
        }
        if arrived {
            shared.doorbell.get().bump_word();
            futex::wake_all(shared.doorbell.get().word());
        }
        if written {
            shared.written.notify_all();
        }
        if io_thread {
            shared.wake_io_thread();
        }
    }

    /// Makes the ready descriptor readable if a message can be received or the connection is lost,
    /// and otherwise not readable.
    fn update_ready_fd(&mut self) {
        let Some(sign) = self.shared.ready_event.get() else {
            return;
        };
        let up = !self.core.inbox.is_empty() || self.core.lost_reason().is_some();
        if up != self.ready_fd_is_set {
            self.ready_fd_is_set = up;
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
        self.update_ready_fd();
        let wake_set = self.wake_set();
        let wakes = self.take_wakes();
        drop(self.state.take());
        StateGuard::wake(self.shared, wake_set, wakes);
    }

    /// Spins for a short time if that has paid off lately. Returns true if there is an event, or if
    /// other threads want the lock.
    ///
    /// An event that has just woken this thread is found here, too, and counts as success, so the
    /// thread spins once more after each message. With many peers that alternate this rarely
    /// catches the next message, but it keeps the CPU from entering an idle state, and waking a
    /// thread on an idle CPU takes longer than a peer's turn.
    pub(crate) fn spin_for_event(&mut self, span: Option<Duration>) -> bool {
        if self.core.shm.is_empty() && self.core.direct.is_empty() {
            return false;
        }
        let reach = if self.core.direct.is_empty() {
            SenderReach::Host
        } else {
            SenderReach::RemoteTasks
        };
        let Some(budget) = self.spin.next_budget(span, reach) else {
            return false;
        };
        if self.core.shm.has_deferred_wakes() {
            self.take_wakes().wake();
        }
        // The peer that must answer ran on this CPU last: yield the CPU to it immediately, or
        // sleep.
        let shares_cpu = self.core.shm.shares_cpu();
        if shares_cpu && !self.spin.should_yield() {
            return false;
        }
        let polls = if shares_cpu { 1 } else { POLLS_PER_CLOCK_READ };
        let (mut begin, news) = (None, self.core.event_seq());
        loop {
            for _ in 0..polls {
                if self.core.shm.needs_poll() {
                    let now = self.clock.coarse_now();
                    self.core.poll_rings(now);
                    if self.core.event_seq() != news {
                        // The clock was not read in the first round, which took a negligible time.
                        let after = begin.map_or(Duration::ZERO, |begin: Instant| begin.elapsed());
                        self.spin.record_spin(after, budget);
                        return true;
                    }
                }
                if self.shared.lock_waiters.load(Ordering::Relaxed) != 0 {
                    self.yield_lock();
                    return true;
                }
                std::hint::spin_loop();
            }
            let begin = *begin.get_or_insert_with(Instant::now);
            self.spin.yield_cpu();
            let now = self.now();
            if self.poll_direct(now) && self.core.event_seq() != news {
                self.spin.record_spin(begin.elapsed(), budget);
                return true;
            }
            if begin.elapsed() >= budget {
                self.spin.record_miss();
                return false;
            }
        }
    }

    /// Makes threads of this task sleep immediately when they wait.
    pub(crate) fn disable_spinning(&mut self) {
        self.spin = SpinBudget::never();
    }

    /// Releases the lock for the threads that are blocked on it, and takes it again.
    fn yield_lock(&mut self) {
        self.release();
        std::thread::yield_now();
        self.relock();
    }

    fn relock(&mut self) {
        let state = self.shared.lock_counted();
        (self.seen_event_seq, self.seen_output, self.was_connected) = StateGuard::observe(&state);
        self.state = Some(state);
    }

    /// After a send to a full ring: writes the rest as the reader frees space, as long as the
    /// reader is active. If the reader does something else, the rest stays queued and the sender
    /// continues.
    pub(crate) fn wait_for_ring_space(&mut self, peer: Tid) {
        if !self.core.is_ring_full_for(peer) {
            return;
        }
        let mut progress_at = Instant::now();
        while self.core.is_ring_full_for(peer) {
            let now = self.now();
            if self.core.pump_one_ring(now, peer) {
                progress_at = Instant::now();
            } else if progress_at.elapsed() > RING_SPACE_TIMEOUT {
                return;
            } else if self.shared.lock_waiters.load(Ordering::Relaxed) != 0 {
                self.yield_lock();
            } else {
                self.take_wakes().wake();
                std::thread::yield_now();
            }
        }
    }

    /// Sleeps until the next event, at most for `span`.
    pub(crate) fn wait_for_event(&mut self, span: Option<Duration>) {
        self.update_ready_fd();
        let by_daemon = self.core.shm.is_empty() || !self.core.shm.expects_message();
        if by_daemon
            && !self.has_socket_waiter
            && self.can_wait_at_socket()
            && sleep_duration(span) >= SOCKET_WAIT_MIN
        {
            return self.wait_at_socket(sleep_duration(span));
        }
        let seen = self.shared.doorbell.get().prepare_sleep();
        let (now, news) = (self.now(), self.core.event_seq());
        self.core.poll_rings_before_sleep(now);
        // From here on the I/O thread watches the direct routes.
        self.core.direct.set_polled(None);
        // Changes made under the lock may matter to other threads, which must not wait until this
        // thread returns.
        let wake_set = self.wake_set();
        let wakes = self.take_wakes();
        if self.core.event_seq() != news {
            return StateGuard::wake(self.shared, wake_set, wakes);
        }
        self.event_waiters += 1;
        drop(self.state.take());
        StateGuard::wake(self.shared, wake_set, wakes);
        futex::wait(
            self.shared.doorbell.get().word(),
            seen,
            Some(sleep_duration(span)),
        );
        self.relock();
        self.event_waiters -= 1;
    }

    /// Sleeps until the next event, which is most likely the daemon's reply to a request.
    pub(crate) fn wait_for_reply(&mut self) {
        if self.has_socket_waiter || !self.can_wait_at_socket() {
            return self.wait_for_event(None);
        }
        self.update_ready_fd();
        self.wait_at_socket(SLEEP_MAX);
    }

    /// Sleeps until the daemon sends something, and reads it, or until the drainer thread has read
    /// a ring.
    fn wait_at_socket(&mut self, span: Duration) {
        let shared = self.shared;
        let bell = shared.doorbell();
        bell.set_notify_always(true);
        let (now, news) = (self.now(), self.core.event_seq());
        self.core.poll_rings_before_sleep(now);
        let (wake_set, wakes) = (self.wake_set(), self.take_wakes());
        let arrived = self.core.event_seq() != news;
        self.has_socket_waiter = !arrived;
        if !arrived {
            drop(self.state.take());
        }
        StateGuard::wake(shared, wake_set, wakes);
        if !arrived {
            shared.socket_waiters.wait(span);
            self.relock();
            self.has_socket_waiter = false;
            self.pump();
        }
        bell.set_notify_always(shared.ready_event.get().is_some());
    }

    /// Sleeps until bytes have been written or the connection has changed, at most for `span`.
    pub(crate) fn wait_written(&mut self, span: Option<Duration>) {
        self.update_ready_fd();
        let (wake_set, wakes) = (self.wake_set(), self.take_wakes());
        StateGuard::wake(self.shared, wake_set, wakes);
        let mut state = self.state.take().expect("taken only on release");
        state.write_waiters += 1;
        let (mut state, _) = self
            .shared
            .written
            .wait_timeout(state, sleep_duration(span))
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        state.write_waiters -= 1;
        (self.seen_event_seq, self.seen_output, self.was_connected) = StateGuard::observe(&state);
        self.state = Some(state);
    }
}

/// Threads to wake after a change.
#[derive(Clone, Copy, Debug, Default)]
struct WakeSet {
    /// Threads that wait for an event.
    event_waiters: bool,
    /// The thread that sleeps on the socket.
    socket_waiter: bool,
    /// Threads that wait for written bytes.
    write_waiters: bool,
    io_thread: bool,
}

fn sleep_duration(span: Option<Duration>) -> Duration {
    span.map_or(IDLE_SLEEP_MAX, |span| span.min(SLEEP_MAX))
}

impl State {
    /// True if every event for which a thread may wait comes through the daemon's socket, from
    /// other threads, or through the drainer thread.
    fn can_wait_at_socket(&self) -> bool {
        self.core.is_connected()
            && self.core.direct.is_empty()
            && (self.core.shm.is_empty() || self.has_drainer)
    }

    /// True while a thread sleeps on the doorbell, or is about to.
    #[cfg(test)]
    pub(crate) fn has_event_waiters(&self) -> bool {
        self.event_waiters > 0
    }

    /// True if the I/O thread sleeps and none of its wake conditions covers a pending change.
    fn io_thread_is_needed(&self) -> bool {
        let IoThreadSleep::Sleeping {
            write,
            until,
            direct: far,
            wake_timer: alarm,
        } = self.io_thread_sleep
        else {
            return false;
        };
        let core = &self.core;
        let closing = !core.is_connected();
        let unwritten = !core.outbox.is_empty() && !write;
        let earlier = core
            .next_timer()
            .is_some_and(|due| until.is_none_or(|until| due < until));
        let needs_drainer = core.shm.is_shared() && !self.has_drainer;
        let unwatched = core.direct.needs_io_thread() && !far;
        let unwatched_timer = self.wake_timer.is_some() && !alarm;
        closing
            || unwritten
            || earlier
            || needs_drainer
            || unwatched
            || unwatched_timer
            || self.socket_has_more
    }

    /// Returns the peers to wake; the caller wakes them without the lock.
    fn take_wakes(&mut self) -> PeerWakes {
        if self.core.shm.has_deferred_wakes()
            && let Some(alarm) = &self.wake_timer
        {
            alarm.disarm();
        }
        self.core.shm.take_wakes()
    }

    /// Defers waking peers that would run on this thread's CPU and keep it while they read a long
    /// message. They are woken when this task waits, or after a short delay.
    pub(crate) fn defer_wakes(&mut self) {
        // The I/O thread must be asleep, because it wakes the peers if the application keeps
        // computing.
        if !matches!(self.io_thread_sleep, IoThreadSleep::Sleeping { .. })
            || !self.core.shm.defer_wakes()
        {
            return;
        }
        if self.wake_timer.is_none() {
            self.wake_timer = WakeDelayTimer::new().ok().map(Arc::new);
        }
        if !self.wake_timer.as_ref().is_some_and(|alarm| alarm.arm()) {
            self.core.shm.flush_deferred_next();
        }
    }

    /// Handles what has arrived in rings and direct routes, and reads the socket unless that was
    /// done very recently.
    pub(crate) fn poll_incoming(&mut self) {
        let now = self.now();
        let news = self.core.event_seq();
        self.core.poll_rings(now);
        self.poll_direct(now);
        let others = !self.core.shm.is_empty() || !self.core.direct.is_empty();
        if self.core.event_seq() == news
            && (!others || now.since(self.socket_read_at) >= SOCKET_READ_INTERVAL)
        {
            self.pump();
        }
    }

    /// Handles what has arrived by direct routes. The I/O thread does not watch them for a while
    /// after that.
    fn poll_direct(&mut self, now: Micros) -> bool {
        if !self.core.direct.is_open() {
            return false;
        }
        self.core.direct.set_polled(Some(now));
        self.core.poll_direct(now)
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
                    self.core.outbox.skip_piece()
                }
                Err(e) => {
                    // The last frames that the daemon sent before it closed the connection are
                    // still handled.
                    self.read_all();
                    return self.lose(&format!(
                        "the connection to the daemon is lost: writing failed: {e}"
                    ));
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
            if !self.core.outbox.is_empty() || !self.core.has_queued_links() {
                return;
            }
        }
    }

    fn read_all(&mut self) {
        let Some(socket) = self.socket.clone() else {
            return;
        };
        self.socket_read_at = self.now();
        self.socket_has_more = false;
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
                &mut self.descriptors,
                MsgFlags::MSG_DONTWAIT,
            ) {
                Ok(Received { bytes: 0, .. }) => {
                    return self.lose("the daemon closed the connection");
                }
                Ok(Received {
                    bytes,
                    drained: all,
                }) => {
                    total += bytes;
                    self.handle_frames();
                    if all {
                        return;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) => {
                    return self.lose(&format!(
                        "the connection to the daemon is lost: reading failed: {e}"
                    ));
                }
            }
        }
        // After the quiesce request the daemon sends nothing that must be read.
        self.socket_has_more = self.core.is_connected();
    }

    /// Handles the frames that have been read.
    pub(crate) fn handle_frames(&mut self) {
        let now = self.now();
        loop {
            let taken = match self.decoder.next_frame() {
                Ok(Some(frame)) => self.core.handle_frame(now, frame, &mut self.descriptors),
                Ok(None) if self.descriptors.len() > DESCRIPTORS_MAX => {
                    Err("descriptors without a frame".into())
                }
                Ok(None) => return,
                Err(e) => Err(e.to_string()),
            };
            if let Err(why) = taken {
                return self.lose(&format!(
                    "the daemon sent a frame that cannot be decoded: {why}"
                ));
            }
        }
    }

    /// Marks the connection as lost for good. The I/O thread closes the socket.
    pub(crate) fn lose(&mut self, why: &str) {
        self.core.lose(why);
        self.decoder = FrameDecoder::new();
        self.descriptors.clear();
    }

    /// Closes the socket and stops watching it.
    pub(crate) fn detach_socket(&mut self, seats: &SocketWaiters) {
        if let Some(socket) = self.socket.take() {
            seats.unwatch(socket.get());
        }
    }

    /// Takes over a connection: the first one, or one after a migration.
    pub(crate) fn attach_socket(
        &mut self,
        socket: Arc<ProcessOwned<UnixStream>>,
        decoder: FrameDecoder,
        passed: PendingFds,
        seats: &SocketWaiters,
    ) -> io::Result<()> {
        seats.watch(socket.get())?;
        self.socket = Some(socket);
        (self.decoder, self.descriptors) = (decoder, passed);
        self.handle_frames();
        self.pump();
        Ok(())
    }
}

impl Shared {
    /// Creates the state of a task that a daemon has just accepted.
    pub(crate) fn new(accepted: AcceptedConnection) -> io::Result<Shared> {
        let bell =
            EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let AcceptedConnection {
            socket,
            decoder,
            passed,
            welcome,
        } = accepted;
        let listening = Arc::new(ProcessOwned::new(OwnDoorbell::new()?));
        let mut core = Core::new(&welcome);
        core.shm = ShmRoutes::new(listening.clone());
        let alive = core.alive();
        let mut state = State {
            core,
            clock: Clock::new(),
            socket: None,
            decoder: FrameDecoder::new(),
            descriptors: PendingFds::default(),
            io_thread_sleep: IoThreadSleep::Awake,
            spin: SpinBudget::new(SenderReach::Host),
            socket_read_at: Micros(0),
            has_drainer: false,
            event_waiters: 0,
            has_socket_waiter: false,
            socket_has_more: false,
            write_waiters: 0,
            ready_fd_is_set: false,
            wake_timer: None,
        };
        let seats = Arc::new(SocketWaiters::new()?);
        state.attach_socket(socket, decoder, passed, &seats)?;
        Ok(Shared {
            own_tid: welcome.tid,
            alive,
            state: Mutex::new(state),
            lock_waiters: AtomicU32::new(0),
            doorbell: listening,
            written: Condvar::new(),
            socket_waiters: seats,
            io_thread_event: ProcessOwned::new_fd(bell),
            ready_event: OnceLock::new(),
            generation: process::fork_generation(),
            stop: AtomicBool::new(false),
        })
    }

    /// True in a forked child of the task. The lock may be held there by a thread that does not
    /// exist in the child.
    pub(crate) fn is_forked_child(&self) -> bool {
        self.generation != process::fork_generation()
    }

    /// False when the connection is lost for good.
    pub(crate) fn is_alive(&self) -> bool {
        self.alive.load(Ordering::Acquire)
    }

    /// As [`Core::try_send_inline`]; also returns false if another thread holds the lock. Such a
    /// send changes nothing for which a [`StateGuard`] would wake threads, except conditions of the
    /// I/O thread's sleep.
    pub(crate) fn try_send_inline(
        &self,
        peer: Tid,
        head: &[u8],
        body: &[u8],
        direct: bool,
    ) -> bool {
        let Ok(mut state) = self.state.try_lock() else {
            return false;
        };
        let now = state.clock.coarse_now();
        let Some(wakes) = state.core.try_send_inline(now, peer, head, body, direct) else {
            return false;
        };
        let helper = state.io_thread_is_needed();
        drop(state);
        StateGuard::wake(
            self,
            WakeSet {
                io_thread: helper,
                ..WakeSet::default()
            },
            wakes,
        );
        true
    }

    /// Locks the state. Must not be called if [`Shared::is_forked_child`].
    pub(crate) fn lock(&self) -> StateGuard<'_> {
        debug_assert!(!self.is_forked_child(), "callers look before they lock");
        StateGuard::new(self, self.lock_counted())
    }

    fn lock_counted(&self) -> MutexGuard<'_, State> {
        match self.state.try_lock() {
            Ok(state) => state,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => {
                self.lock_waiters.fetch_add(1, Ordering::Relaxed);
                let state = self
                    .state
                    .lock()
                    .unwrap_or_else(|poisoned| poisoned.into_inner());
                self.lock_waiters.fetch_sub(1, Ordering::Relaxed);
                state
            }
        }
    }

    /// Locks the state; `None` if the lock is not free before the deadline. Its holder may be a
    /// caller of this function.
    pub(crate) fn lock_until(&self, deadline: Instant) -> Option<StateGuard<'_>> {
        loop {
            match self.state.try_lock() {
                Ok(state) => return Some(StateGuard::new(self, state)),
                Err(TryLockError::Poisoned(poisoned)) => {
                    return Some(StateGuard::new(self, poisoned.into_inner()));
                }
                Err(TryLockError::WouldBlock) if Instant::now() >= deadline => return None,
                Err(TryLockError::WouldBlock) => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    /// Wakes the I/O thread.
    pub(crate) fn wake_io_thread(&self) {
        // Fails if the counter is full; then a wake-up is pending.
        let _ = self.io_thread_event.get().write(1);
    }

    /// Returns a descriptor that is readable while a message can be received.
    pub(crate) fn ready_fd(&self) -> io::Result<RawFd> {
        if self.ready_event.get().is_none() {
            let fresh =
                EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
            // Fails if another thread created the descriptor first; that one is used.
            let _ = self.ready_event.set(ProcessOwned::new_fd(fresh));
        }
        let held = self.lock();
        self.doorbell.get().set_notify_always(true);
        drop(held);
        Ok(self
            .ready_event
            .get()
            .expect("just made")
            .get()
            .as_fd()
            .as_raw_fd())
    }

    /// Returns the ready descriptor if a program has requested one.
    #[cfg(test)]
    pub(crate) fn ready_event(&self) -> Option<&EventFd> {
        self.ready_event.get().map(ProcessOwned::get)
    }

    /// True while a thread sleeps on the socket, or is about to.
    #[cfg(test)]
    pub(crate) fn has_socket_waiter(&self) -> bool {
        self.lock().has_socket_waiter
    }

    /// Returns the doorbell that peers on this host ring.
    pub(crate) fn doorbell(&self) -> &OwnDoorbell {
        self.doorbell.get()
    }

    /// Returns the eventfd on which the I/O thread sleeps.
    pub(crate) fn io_thread_event(&self) -> &EventFd {
        self.io_thread_event.get()
    }

    /// True if the background threads must end.
    pub(crate) fn is_stopped(&self) -> bool {
        self.stop.load(Ordering::Acquire)
    }

    /// Asks the background threads to end.
    pub(crate) fn stop(&self) {
        self.stop.store(true, Ordering::Release);
        self.wake_io_thread();
        if self.doorbell.get().request_drainer() {
            futex::wake_all(self.doorbell.get().drainer_word());
        }
    }

    /// See [`Core::prepare_for_fork`]. Does nothing in a forked child.
    pub(crate) fn prepare_for_fork(&self) {
        if !self.is_forked_child()
            && let Some(mut state) = self.lock_until(Instant::now() + FORK_LOCK_TIMEOUT)
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
        let must_notify = state.core.begin_exit();
        let mut exit_notice = must_notify
            .then(|| state.core.send_request(Request::AboutToExit).ok())
            .flatten();
        loop {
            let now = state.now();
            exit_notice = exit_notice.filter(|id| state.core.take_reply(*id).is_none());
            if exit_notice.is_some() {
                state.flush();
                let left = deadline.saturating_duration_since(Instant::now());
                if !left.is_zero() {
                    state.wait_written(Some(left.min(EXIT_NOTICE_POLL_INTERVAL)));
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
