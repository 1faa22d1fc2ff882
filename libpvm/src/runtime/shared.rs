//! The lock of the runtime's state, and the operations under the lock: non-blocking reads and
//! writes of the daemon's socket, and blocking waits.
//!
//! A thread that waits for an event first spins on the rings and direct routes. Then it sleeps,
//! either on the daemon's socket (one thread at a time) or on a futex in the task's doorbell. Each
//! release of the lock wakes exactly the threads whose condition has changed.

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
use sempa_socket::{PendingFds, Received, SenderDistance, SpinBudget, receive};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, TryLockError};
use std::time::{Duration, Instant};

/// Interval at which an exiting process checks whether its daemon has confirmed the exit notice.
const EXIT_NOTICE_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Free buffer space that is provided for one read of the daemon's socket.
const READ_BUFFER_BYTES: usize = 128 << 10;
/// Maximum number of bytes read from the socket before the lock is released, so that other threads
/// get the lock.
const READ_BYTES_MAX: usize = 2 << 20;
/// Number of ring polls between two readings of the clock.
const POLLS_PER_CLOCK_READ: u32 = 32;
/// Minimum interval between two reads of the socket by threads that also poll rings or direct
/// routes. Between these reads the I/O thread watches the socket.
const SOCKET_READ_INTERVAL: Micros = Micros(500);
/// Time for which a sender to a full ring waits while the reader frees no space.
const RING_SPACE_TIMEOUT: Duration = Duration::from_micros(50);
/// Maximum number of received descriptors whose frames have not been handled.
const UNHANDLED_DESCRIPTORS_MAX: usize = 16;
/// Minimum duration of a wait that sleeps on the socket, because socket timeouts have millisecond
/// resolution. Shorter waits use the futex.
const SOCKET_WAIT_MIN: Duration = Duration::from_millis(10);
/// Maximum time for which a fork waits for the lock. The thread that holds the lock may be the
/// forking thread itself, further up the call stack.
const FORK_LOCK_TIMEOUT: Duration = Duration::from_secs(1);
/// Maximum sleep on a futex with a deadline. After a migration to a host with another clock a sleep
/// by the old clock must not last forever.
const DEADLINE_SLEEP_MAX: Duration = Duration::from_secs(1);
/// Maximum sleep without a deadline. Each wake-up disturbs a CPU that may be idle.
const IDLE_SLEEP_MAX: Duration = Duration::from_secs(30);

/// Conditions under which the I/O thread must be woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoThreadSleep {
    /// The thread is awake and checks all conditions before it sleeps.
    Awake,
    /// The thread sleeps until the socket is readable, until the time `until`, or until a condition
    /// with the value true holds.
    Sleeping {
        /// The socket is writable.
        wakes_if_writable: bool,
        wake_at: Option<Micros>,
        /// A frame arrives on a direct route.
        wakes_on_direct: bool,
        /// The timer for deferred wake-ups expires.
        wakes_on_timer: bool,
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
    spin_budget: SpinBudget,
    socket_read_at: Micros,
    pub(crate) has_drainer: bool,
    /// Number of threads that sleep until the next event.
    event_waiters: usize,
    /// True if one more thread sleeps on the daemon's socket, and reads the socket.
    has_socket_waiter: bool,
    /// The last read of the socket stopped at its limit, so the socket may contain more data.
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
    /// True until the connection is lost for good.
    connection_alive: Arc<AtomicBool>,
    state: Mutex<State>,
    /// Number of threads that are blocked on the lock. A thread that spins while it holds the lock
    /// releases it for them.
    lock_waiters: AtomicU32,
    /// Doorbell on which threads sleep until the next event. Peers on this host ring it, too.
    doorbell: Arc<ProcessOwned<OwnDoorbell>>,
    /// Signalled when bytes were written to the socket, or when the connection changes.
    write_condvar: Condvar,
    /// Epoll sets for the daemon's socket.
    pub(crate) socket_waiters: Arc<SocketWaiters>,
    io_thread_event: ProcessOwned<EventFd>,
    /// Readable while a message can be received, for programs that wait on descriptors themselves;
    /// created on first use.
    ready_event: OnceLock<ProcessOwned<EventFd>>,
    fork_generation: u64,
    stop_requested: AtomicBool,
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
        let (news, out, phase) = StateGuard::change_counters(&state);
        StateGuard {
            shared,
            state: Some(state),
            seen_event_seq: news,
            seen_output: out,
            was_connected: phase,
        }
    }

    fn change_counters(state: &State) -> (u64, (u64, u64), bool) {
        let core = &state.core;
        (
            core.event_seq(),
            (core.outbox.written_bytes_total(), core.send_event_seq()),
            core.is_connected(),
        )
    }

    /// Returns the threads that must be woken because their condition changed while this thread
    /// held the lock.
    fn wake_set(&self) -> WakeSet {
        let (news, out, phase) = StateGuard::change_counters(self);
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
        wakes.wake_all();
        if seated {
            shared.socket_waiters.wake_app_thread();
        }
        if arrived {
            shared.doorbell.get().change_sleep_word();
            futex::wake_all(shared.doorbell.get().sleep_word());
        }
        if written {
            shared.write_condvar.notify_all();
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

    /// Spins for a short time if recent spins were successful. Returns true if there is an event,
    /// or if other threads are blocked on the lock.
    ///
    /// An event that has just woken this thread is found by this call, too, and counts as success,
    /// so the thread spins once more after each message. If many peers send in turn, this spin
    /// rarely receives the next message, but it keeps the CPU from entering an idle state. Waking a
    /// thread on an idle CPU takes longer than a peer needs for its answer.
    pub(crate) fn spin_for_event(&mut self, timeout: Option<Duration>) -> bool {
        if self.core.shm.is_empty() && self.core.direct.is_empty() {
            return false;
        }
        let reach = if self.core.direct.is_empty() {
            SenderDistance::Host
        } else {
            SenderDistance::RemoteTasks
        };
        let Some(budget) = self.spin_budget.next_budget(timeout, reach) else {
            return false;
        };
        if self.core.shm.has_deferred_wakes() {
            self.take_wakes().wake_all();
        }
        // The peer that must answer last ran on this CPU: yield the CPU to the peer immediately, or
        // sleep.
        let shares_cpu = self.core.shm.shares_cpu();
        if shares_cpu && !self.spin_budget.should_yield() {
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
                        // `begin` is not set if the event was found in the first round, which takes
                        // negligible time.
                        let after = begin.map_or(Duration::ZERO, |begin: Instant| begin.elapsed());
                        self.spin_budget.record_spin(after, budget);
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
            self.spin_budget.yield_cpu();
            let now = self.now();
            if self.poll_direct(now) && self.core.event_seq() != news {
                self.spin_budget.record_spin(begin.elapsed(), budget);
                return true;
            }
            if begin.elapsed() >= budget {
                self.spin_budget.record_miss();
                return false;
            }
        }
    }

    /// Makes threads of this task sleep immediately when they wait.
    pub(crate) fn disable_spinning(&mut self) {
        self.spin_budget = SpinBudget::never_spinning();
    }

    /// Releases the lock for the threads that are blocked on it, and acquires it again.
    fn yield_lock(&mut self) {
        self.release();
        std::thread::yield_now();
        self.relock();
    }

    fn relock(&mut self) {
        let state = self.shared.lock_counted();
        (self.seen_event_seq, self.seen_output, self.was_connected) =
            StateGuard::change_counters(&state);
        self.state = Some(state);
    }

    /// After a send to a full ring: waits for space and writes the queued frames while the reader
    /// keeps reading. If the reader stops reading, returns and leaves the frames queued.
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
                self.take_wakes().wake_all();
                std::thread::yield_now();
            }
        }
    }

    /// Sleeps until the next event, at most for `span`.
    pub(crate) fn wait_for_event(&mut self, timeout: Option<Duration>) {
        self.update_ready_fd();
        let by_daemon = self.core.shm.is_empty() || !self.core.shm.expects_message();
        if by_daemon
            && !self.has_socket_waiter
            && self.can_wait_at_socket()
            && sleep_duration(timeout) >= SOCKET_WAIT_MIN
        {
            return self.wait_at_socket(sleep_duration(timeout));
        }
        let seen = self.shared.doorbell.get().prepare_sleep();
        let (now, news) = (self.now(), self.core.event_seq());
        self.core.poll_rings_before_sleep(now);
        // While this thread sleeps, the I/O thread watches the direct routes.
        self.core.direct.record_polling(None);
        // Wakes other threads for changes that were made under the lock, because this thread may
        // sleep for a long time.
        let wake_set = self.wake_set();
        let wakes = self.take_wakes();
        if self.core.event_seq() != news {
            return StateGuard::wake(self.shared, wake_set, wakes);
        }
        self.event_waiters += 1;
        drop(self.state.take());
        StateGuard::wake(self.shared, wake_set, wakes);
        futex::wait(
            self.shared.doorbell.get().sleep_word(),
            seen,
            Some(sleep_duration(timeout)),
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
        self.wait_at_socket(DEADLINE_SLEEP_MAX);
    }

    /// Sleeps until the socket is readable and reads it, or until the drainer thread has read a
    /// ring.
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
            shared.socket_waiters.wait_for_socket(span);
            self.relock();
            self.has_socket_waiter = false;
            self.read_and_write();
        }
        bell.set_notify_always(shared.ready_event.get().is_some());
    }

    /// Sleeps until bytes have been written or the connection has changed, at most for `span`.
    pub(crate) fn wait_until_written(&mut self, timeout: Option<Duration>) {
        self.update_ready_fd();
        let (wake_set, wakes) = (self.wake_set(), self.take_wakes());
        StateGuard::wake(self.shared, wake_set, wakes);
        let mut state = self.state.take().expect("taken only on release");
        state.write_waiters += 1;
        let (mut state, _) = self
            .shared
            .write_condvar
            .wait_timeout(state, sleep_duration(timeout))
            .unwrap_or_else(|poisoned| poisoned.into_inner());
        state.write_waiters -= 1;
        (self.seen_event_seq, self.seen_output, self.was_connected) =
            StateGuard::change_counters(&state);
        self.state = Some(state);
    }
}

/// Threads to wake after a change. A field is true if the threads of that kind must be woken.
#[derive(Clone, Copy, Debug, Default)]
struct WakeSet {
    /// Threads that sleep until an event.
    event_waiters: bool,
    /// Thread that sleeps on the daemon's socket.
    socket_waiter: bool,
    /// Threads that wait until bytes have been written.
    write_waiters: bool,
    io_thread: bool,
}

fn sleep_duration(span: Option<Duration>) -> Duration {
    span.map_or(IDLE_SLEEP_MAX, |span| span.min(DEADLINE_SLEEP_MAX))
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
            wakes_if_writable: write,
            wake_at: until,
            wakes_on_direct: far,
            wakes_on_timer: alarm,
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

    /// Removes and returns the peers to wake; the caller wakes them without the lock.
    fn take_wakes(&mut self) -> PeerWakes {
        if self.core.shm.has_deferred_wakes()
            && let Some(alarm) = &self.wake_timer
        {
            alarm.disarm();
        }
        self.core.shm.take_wakes()
    }

    /// Defers wake-ups of peers that would occupy this thread's CPU while they read a long message.
    /// The peers are woken when this task waits, or after a short delay.
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
            self.core.shm.release_deferred_wakes();
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
            self.read_and_write();
        }
    }

    /// Handles what has arrived on direct routes. After that, the I/O thread does not watch the
    /// direct routes for a few milliseconds.
    fn poll_direct(&mut self, now: Micros) -> bool {
        if !self.core.direct.is_open() {
            return false;
        }
        self.core.direct.record_polling(Some(now));
        self.core.poll_direct(now)
    }

    pub(crate) fn now(&mut self) -> Micros {
        self.clock.now()
    }

    /// Writes as much of the outbox as the socket accepts without blocking.
    pub(crate) fn write_outbox(&mut self) {
        let Some(socket) = &self.socket else { return };
        let fd = socket.get().as_raw_fd();
        while !self.core.outbox.is_empty() {
            let (slices, descriptors) = self.core.outbox.next_write();
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            let rights = [ControlMessage::ScmRights(&descriptors)];
            let control = if descriptors.is_empty() {
                &[][..]
            } else {
                &rights[..]
            };
            match sendmsg::<()>(fd, &slices, control, flags, None) {
                Ok(n) => self.core.outbox.remove_written(n),
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
                    return self
                        .mark_connection_lost(&format!("the daemon is gone: writing to it: {e}"));
                }
            }
        }
    }

    /// Reads and handles all available frames; then lets links transmit and writes what the socket
    /// accepts.
    pub(crate) fn read_and_write(&mut self) {
        self.read_all();
        let now = self.now();
        // The daemon reads concurrently and may empty the outbox while links still wait for space
        // in the outbox. No later event would resume these links, so the loop continues.
        loop {
            self.core.pump(now);
            self.write_outbox();
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
            // Reuses the start of the buffer if no message refers to the buffer any more, so that
            // small messages always occupy the same few pages.
            let fresh = buffer.is_empty() && buffer.try_reclaim(READ_BUFFER_BYTES);
            if !fresh && buffer.capacity() - buffer.len() < READ_BUFFER_BYTES / 4 {
                buffer.reserve(READ_BUFFER_BYTES);
            }
            match receive(
                socket.get(),
                buffer,
                &mut self.descriptors,
                MsgFlags::MSG_DONTWAIT,
            ) {
                Ok(Received { bytes: 0, .. }) => {
                    return self.mark_connection_lost("the daemon closed the connection");
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
                    return self.mark_connection_lost(&format!(
                        "the daemon is gone: reading from it: {e}"
                    ));
                }
            }
        }
        // After the quiesce request the daemon sends nothing that must be read.
        self.socket_has_more = self.core.is_connected();
    }

    /// Decodes and handles all complete frames in the read buffer.
    pub(crate) fn handle_frames(&mut self) {
        let now = self.now();
        loop {
            let taken = match self.decoder.next_frame() {
                Ok(Some(frame)) => self.core.handle_frame(now, frame, &mut self.descriptors),
                Ok(None) if self.descriptors.len() > UNHANDLED_DESCRIPTORS_MAX => {
                    Err("descriptors that nothing belongs to".into())
                }
                Ok(None) => return,
                Err(e) => Err(e.to_string()),
            };
            if let Err(why) = taken {
                return self.mark_connection_lost(&format!(
                    "the daemon said something that cannot be understood: {why}"
                ));
            }
        }
    }

    /// Marks the connection as lost for good. The I/O thread closes the socket.
    pub(crate) fn mark_connection_lost(&mut self, reason: &str) {
        self.core.mark_connection_lost(reason);
        self.decoder = FrameDecoder::new();
        self.descriptors.clear();
    }

    /// Closes the socket and stops watching it.
    pub(crate) fn detach_socket(&mut self, socket_waiters: &SocketWaiters) {
        if let Some(socket) = self.socket.take() {
            socket_waiters.remove_socket(socket.get());
        }
    }

    /// Starts to use a connection: the first one, or a new one after a migration.
    pub(crate) fn attach_socket(
        &mut self,
        socket: Arc<ProcessOwned<UnixStream>>,
        decoder: FrameDecoder,
        passed: PendingFds,
        socket_waiters: &SocketWaiters,
    ) -> io::Result<()> {
        socket_waiters.add_socket(socket.get())?;
        self.socket = Some(socket);
        (self.decoder, self.descriptors) = (decoder, passed);
        self.handle_frames();
        self.read_and_write();
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
        let alive = core.connection_alive_flag();
        let mut state = State {
            core,
            clock: Clock::new(),
            socket: None,
            decoder: FrameDecoder::new(),
            descriptors: PendingFds::default(),
            io_thread_sleep: IoThreadSleep::Awake,
            spin_budget: SpinBudget::new(SenderDistance::Host),
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
            connection_alive: alive,
            state: Mutex::new(state),
            lock_waiters: AtomicU32::new(0),
            doorbell: listening,
            write_condvar: Condvar::new(),
            socket_waiters: seats,
            io_thread_event: ProcessOwned::new_fd(bell),
            ready_event: OnceLock::new(),
            fork_generation: process::fork_generation(),
            stop_requested: AtomicBool::new(false),
        })
    }

    /// True in a forked child of the task. A thread that does not exist in the child may hold the
    /// child's copy of the lock.
    pub(crate) fn is_forked_child(&self) -> bool {
        self.fork_generation != process::fork_generation()
    }

    /// True until the connection is lost for good.
    pub(crate) fn is_alive(&self) -> bool {
        self.connection_alive.load(Ordering::Acquire)
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

    /// Locks the state; `None` if the lock is not free before the deadline. The calling thread may
    /// itself hold the lock, further up the call stack.
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
        self.stop_requested.load(Ordering::Acquire)
    }

    /// Requests the background threads to end, and wakes them.
    pub(crate) fn request_stop(&self) {
        self.stop_requested.store(true, Ordering::Release);
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

    /// Sends all queued messages to the daemon before the process exits, until the deadline.
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
                state.write_outbox();
                let left = deadline.saturating_duration_since(Instant::now());
                if !left.is_zero() {
                    state.wait_until_written(Some(left.min(EXIT_NOTICE_POLL_INTERVAL)));
                    continue;
                }
            }
            state.core.disable_windows(now);
            state.write_outbox();
            let core = &state.core;
            let idle = core.is_connected() && core.outbox.is_empty() && core.all_transmitted();
            let left = deadline.saturating_duration_since(Instant::now());
            if idle || matches!(core.phase(), Phase::Lost(_)) || left.is_zero() {
                return;
            }
            state.wait_until_written(Some(left));
        }
    }
}
