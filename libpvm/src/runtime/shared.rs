//! The lock of the runtime's state, and the operations under the lock: non-blocking reads and
//! writes of the daemon's socket, and blocking waits.
//!
//! A thread that waits for an event first spins on the rings and direct routes. Then it sleeps,
//! either on the daemon's socket (one thread at a time) or on a futex in the task's doorbell. Each
//! release of the lock wakes exactly the threads whose condition has changed.

mod waits;

use super::clock::Clock;
use super::connect::AcceptedConnection;
use super::core::{ConnectionPhase, Core, DaemonFrameError};
use super::process::{self, ProcessOwned};
use super::shm::{PeerWakes, ShmRoutes, SmallMessageHead};
use super::socket_waiters::SocketWaiters;
use super::wake_delay_timer::WakeDelayTimer;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use sempa_proto::frame::FrameDecoder;
use sempa_proto::task::Request;
use sempa_proto::{Micros, Tid};
use sempa_ring::biased_lock::{BiasedLock, BiasedLockGuard};
use sempa_ring::futex;
use sempa_ring::shared_memory::OwnDoorbell;
use sempa_socket::{PendingFds, ReadOutcome, SenderDistance, SpinBudget, receive};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// Interval at which an exiting process checks whether its daemon has confirmed the exit notice.
const EXIT_NOTICE_POLL_INTERVAL: Duration = Duration::from_millis(10);
/// Number of bytes of buffer space that are reserved for reads of the daemon's socket. More space
/// is reserved when less than a quarter of this number is free.
const READ_BUFFER_BYTES: usize = 128 << 10;
/// Maximum number of bytes read from the socket before the lock is released, so that other threads
/// get the lock.
const READ_BYTES_MAX: usize = 2 << 20;
/// Maximum number of received descriptors whose frames have not been handled.
const UNHANDLED_DESCRIPTORS_MAX: usize = 16;
/// Maximum time for which a fork waits for the lock. The thread that holds the lock may be the
/// forking thread itself, further up the call stack.
const FORK_LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Conditions under which the I/O thread must be woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IoThreadSleep {
    /// The thread is awake and checks all conditions before it sleeps.
    Awake,
    /// The thread sleeps until the socket is readable or until the time `wake_at`. Each field below
    /// that is true adds a condition that wakes the thread.
    Sleeping {
        /// True if the thread wakes when the socket is writable.
        wakes_if_writable: bool,
        wake_at: Option<Micros>,
        /// True if the thread wakes when a frame arrives on a direct route.
        wakes_on_direct_frame: bool,
        /// True if the thread wakes when the timer for deferred wake-ups expires.
        wakes_on_timer: bool,
    },
}

/// State that all threads share under the lock.
#[derive(Debug)]
pub(crate) struct LockedState {
    pub(crate) core: Core,
    pub(crate) clock: Clock,
    pub(crate) socket: Option<Arc<ProcessOwned<UnixStream>>>,
    pub(crate) decoder: FrameDecoder,
    /// Received descriptors whose frames have not been handled.
    unhandled_descriptors: PendingFds,
    pub(crate) io_thread_sleep: IoThreadSleep,
    /// Decides from the success of recent spins whether waiting threads spin.
    spin_budget: SpinBudget,
    pub(super) last_socket_read_at: Micros,
    pub(crate) has_drainer: bool,
    /// Number of threads that sleep on the doorbell until the next event.
    event_waiter_count: usize,
    /// True if another thread, not counted in `event_waiter_count`, sleeps on the daemon's socket
    /// and reads the socket afterwards.
    has_socket_waiter: bool,
    /// True if the last read of the socket stopped at [`READ_BYTES_MAX`], so the socket may contain
    /// more data.
    socket_may_have_data: bool,
    /// Number of threads that wait until bytes have been written to the socket.
    write_waiter_count: usize,
    /// True if the ready descriptor ([`SharedState::ready_fd`]) is readable.
    is_ready_fd_readable: bool,
    /// Timer that wakes the I/O thread when deferred wake-ups are due; created on first use.
    pub(crate) wake_delay_timer: Option<Arc<WakeDelayTimer>>,
}

/// State of the runtime with its lock.
#[derive(Debug)]
pub(crate) struct SharedState {
    pub(crate) own_tid: Tid,
    /// True until the connection is lost for good.
    connection_alive: Arc<AtomicBool>,
    state: BiasedLock<LockedState>,
    /// Number of threads that are blocked on the lock. A thread that spins while it holds the lock
    /// releases the lock for these threads.
    lock_waiter_count: AtomicU32,
    /// Doorbell on which threads sleep until the next event. Peers on this host ring this doorbell,
    /// too.
    doorbell: Arc<ProcessOwned<OwnDoorbell>>,
    /// Futex word that changes when bytes were written to the socket, or when the connection
    /// changes.
    write_event_count: AtomicU32,
    /// Epoll sets that watch the daemon's socket.
    pub(crate) socket_waiters: Arc<SocketWaiters>,
    io_thread_event: ProcessOwned<EventFd>,
    /// Descriptor for programs that wait on descriptors themselves. Readable while a message can be
    /// received, and after the connection is lost; created on first use.
    ready_event: OnceLock<ProcessOwned<EventFd>>,
    fork_generation: u64,
    stop_requested: AtomicBool,
}

/// Guard of the lock. On release the guard wakes the waiting threads and the I/O thread if
/// something has changed for these threads.
pub(crate) struct StateGuard<'a> {
    shared_state: &'a SharedState,
    state: Option<BiasedLockGuard<'a, LockedState>>,
    seen_event_seq: u64,
    seen_output_counters: (u64, u64),
    was_connected: bool,
}

impl std::ops::Deref for StateGuard<'_> {
    type Target = LockedState;
    fn deref(&self) -> &LockedState {
        self.state.as_ref().expect("taken only on release")
    }
}

impl std::ops::DerefMut for StateGuard<'_> {
    fn deref_mut(&mut self) -> &mut LockedState {
        self.state.as_mut().expect("taken only on release")
    }
}

impl Drop for StateGuard<'_> {
    fn drop(&mut self) {
        if self.state.is_some() {
            self.release_and_wake();
        }
    }
}

impl<'a> StateGuard<'a> {
    fn new(shared_state: &'a SharedState, state: BiasedLockGuard<'a, LockedState>) -> Self {
        let (event_seq, output_counters, is_connected) = StateGuard::change_counters(&state);
        StateGuard {
            shared_state,
            state: Some(state),
            seen_event_seq: event_seq,
            seen_output_counters: output_counters,
            was_connected: is_connected,
        }
    }

    /// Returns the values whose changes concern waiting threads: the event counter, the counters of
    /// the output (bytes written and send events), and whether the task is connected.
    fn change_counters(state: &LockedState) -> (u64, (u64, u64), bool) {
        let core = &state.core;
        (
            core.event_seq(),
            (core.outbox.written_bytes_total(), core.send_event_seq()),
            core.is_connected(),
        )
    }

    /// Returns which threads must be woken because their condition changed while this thread held
    /// the lock.
    fn wake_set(&self) -> WakeSet {
        let (event_seq, output_counters, is_connected) = StateGuard::change_counters(self);
        let has_connection_changed =
            is_connected != self.was_connected || self.core.lost_reason().is_some();
        let has_written = self.write_waiter_count > 0
            && (output_counters != self.seen_output_counters || has_connection_changed);
        let has_new_event = self.event_waiter_count > 0 && event_seq != self.seen_event_seq;
        let is_socket_waiter_due = self.has_socket_waiter
            && (event_seq != self.seen_event_seq
                || has_connection_changed
                || !self.can_wait_at_socket());
        WakeSet {
            wakes_event_waiters: has_new_event,
            wakes_socket_waiter: is_socket_waiter_due,
            wakes_write_waiters: has_written,
            wakes_io_thread: self.must_wake_io_thread(),
        }
    }

    fn wake_threads(shared_state: &SharedState, wake_set: WakeSet, peer_wakes: PeerWakes) {
        let WakeSet {
            wakes_event_waiters: has_new_event,
            wakes_socket_waiter: is_socket_waiter_due,
            wakes_write_waiters: has_written,
            wakes_io_thread: must_wake_io_thread,
        } = wake_set;
        peer_wakes.wake_all();
        if is_socket_waiter_due {
            shared_state.socket_waiters.wake_app_thread();
        }
        if has_new_event {
            shared_state.doorbell.get().change_sleep_word();
            futex::wake_all(shared_state.doorbell.get().sleep_word());
        }
        if has_written {
            shared_state
                .write_event_count
                .fetch_add(1, Ordering::Relaxed);
            futex::wake_all(&shared_state.write_event_count);
        }
        if must_wake_io_thread {
            shared_state.wake_io_thread();
        }
    }

    /// Makes the ready descriptor readable if a message can be received or the connection is lost.
    /// Otherwise makes the ready descriptor not readable.
    fn update_ready_fd(&mut self) {
        let Some(ready_event) = self.shared_state.ready_event.get() else {
            return;
        };
        let is_ready = !self.core.inbox.is_empty() || self.core.lost_reason().is_some();
        if is_ready != self.is_ready_fd_readable {
            self.is_ready_fd_readable = is_ready;
            // The counter is 0 or 1 and changes only under the lock.
            let _ = if is_ready {
                ready_event.get().write(1).map(drop)
            } else {
                ready_event.get().read().map(drop)
            };
        }
    }

    /// Unlocks like the drop of the guard, after a wait that has mostly changed nothing.
    #[inline]
    pub(crate) fn release_after_wait(mut self) {
        let has_changed = self.core.event_seq() != self.seen_event_seq
            || self.core.order.is_waiting_for_look()
            || self.core.shm_routes.has_pending_wakes()
            || self.core.shm_routes.has_deferred_wakes()
            || self.core.is_connected() != self.was_connected
            || self.must_wake_io_thread();
        if has_changed {
            self.release_and_wake();
        }
        self.state = None;
    }

    /// Unlocks first and wakes threads afterwards, so that no thread wakes up only to block on the
    /// lock.
    fn release_and_wake(&mut self) {
        if self.core.order.is_waiting_for_look() {
            let now = self.now();
            self.core.complete_arrivals(now);
        }
        self.update_ready_fd();
        let wake_set = self.wake_set();
        let peer_wakes = self.take_peer_wakes();
        drop(self.state.take());
        StateGuard::wake_threads(self.shared_state, wake_set, peer_wakes);
    }
}

/// Threads to wake after a change. A field is true if its threads must be woken.
#[derive(Clone, Copy, Debug, Default)]
struct WakeSet {
    /// Threads that sleep until the next event.
    wakes_event_waiters: bool,
    /// Thread that sleeps on the daemon's socket.
    wakes_socket_waiter: bool,
    /// Threads that wait until bytes have been written.
    wakes_write_waiters: bool,
    wakes_io_thread: bool,
}

impl LockedState {
    /// True if every event for which a thread may wait comes through the daemon's socket, through
    /// direct connections, from other threads, or through the drainer thread.
    fn can_wait_at_socket(&self) -> bool {
        self.core.is_connected() && (self.core.shm_routes.is_empty() || self.has_drainer)
    }

    /// True while a thread sleeps on the doorbell, or is about to.
    #[cfg(test)]
    pub(crate) fn has_event_waiters(&self) -> bool {
        self.event_waiter_count > 0
    }

    /// True if the I/O thread sleeps and must handle a change that would not wake it: the end or
    /// quiescing of the connection, output, an earlier timer, a direct route, a missing drainer
    /// thread, or more data in the socket.
    #[inline]
    fn must_wake_io_thread(&self) -> bool {
        let IoThreadSleep::Sleeping {
            wakes_if_writable: watches_writable,
            wake_at: wake_time,
            wakes_on_direct_frame: watches_direct_routes,
            wakes_on_timer: watches_timer,
        } = self.io_thread_sleep
        else {
            return false;
        };
        let core = &self.core;
        let must_close = !core.is_connected();
        let has_unwatched_output = !core.outbox.is_empty() && !watches_writable;
        let has_earlier_timer = core
            .next_timer_at()
            .is_some_and(|timer_at| wake_time.is_none_or(|wake_time| timer_at < wake_time));
        let needs_drainer = core.shm_routes.is_doorbell_shared() && !self.has_drainer;
        let has_unwatched_direct_route =
            core.direct_routes.needs_io_thread() && !watches_direct_routes;
        let has_unwatched_timer = self.wake_delay_timer.is_some() && !watches_timer;
        must_close
            || has_unwatched_output
            || has_earlier_timer
            || needs_drainer
            || has_unwatched_direct_route
            || has_unwatched_timer
            || self.socket_may_have_data
            || core.direct_routes.has_unread_data()
    }

    /// Removes and returns the peers to wake; the caller wakes them without the lock.
    fn take_peer_wakes(&mut self) -> PeerWakes {
        if self.core.shm_routes.has_deferred_wakes()
            && let Some(timer) = &self.wake_delay_timer
        {
            timer.disarm();
        }
        self.core.shm_routes.take_peer_wakes()
    }

    /// Defers wake-ups of peers that would occupy this thread's CPU while they read a long message.
    /// The peers are woken when this task waits, or when the [`WakeDelayTimer`] expires.
    pub(crate) fn defer_wakes(&mut self) {
        // The I/O thread must be asleep, because the I/O thread wakes the peers if the application
        // keeps computing.
        if !matches!(self.io_thread_sleep, IoThreadSleep::Sleeping { .. })
            || !self.core.shm_routes.defer_wakes()
        {
            return;
        }
        if self.wake_delay_timer.is_none() {
            self.wake_delay_timer = WakeDelayTimer::new().ok().map(Arc::new);
        }
        if !self
            .wake_delay_timer
            .as_ref()
            .is_some_and(|timer| timer.arm())
        {
            self.core.shm_routes.release_deferred_wakes();
        }
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
            let scm_rights = [ControlMessage::ScmRights(&descriptors)];
            let control_messages = if descriptors.is_empty() {
                &[][..]
            } else {
                &scm_rights[..]
            };
            match sendmsg::<()>(fd, &slices, control_messages, flags, None) {
                Ok(n) => self.core.outbox.remove_written_bytes(n),
                Err(nix::Error::EINTR) => {}
                Err(nix::Error::EAGAIN) => return,
                // Too many descriptors of this user are in transit. The frame is dropped, and the
                // daemon carries the messages that would have used the route.
                Err(nix::Error::ETOOMANYREFS) if !descriptors.is_empty() => {
                    self.core.outbox.drop_first_piece()
                }
                Err(e) => {
                    // Frames that the daemon sent before it closed the connection are still
                    // handled.
                    self.read_socket_frames();
                    return self.mark_connection_lost(&format!(
                        "the connection to the daemon is lost: writing failed: {e}"
                    ));
                }
            }
        }
    }

    /// Reads and handles all available frames; then lets links transmit and writes what the socket
    /// accepts.
    pub(crate) fn read_and_write(&mut self) {
        self.read_socket_frames();
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

    fn read_socket_frames(&mut self) {
        let Some(socket) = self.socket.clone() else {
            return;
        };
        self.last_socket_read_at = self.now();
        self.socket_may_have_data = false;
        let mut read_bytes = 0;
        while self.core.is_connected() && read_bytes < READ_BYTES_MAX {
            let buffer = self.decoder.buffer_mut();
            // Reuses the start of the buffer if no message refers to the buffer any more, so that
            // small messages always occupy the same few pages.
            let is_reclaimed = buffer.is_empty() && buffer.try_reclaim(READ_BUFFER_BYTES);
            if !is_reclaimed && buffer.capacity() - buffer.len() < READ_BUFFER_BYTES / 4 {
                buffer.reserve(READ_BUFFER_BYTES);
            }
            match receive(
                socket.get(),
                buffer,
                &mut self.unhandled_descriptors,
                MsgFlags::MSG_DONTWAIT,
            ) {
                Ok(ReadOutcome { byte_count: 0, .. }) => {
                    return self.mark_connection_lost("the daemon closed the connection");
                }
                Ok(ReadOutcome {
                    byte_count: bytes,
                    is_drained: is_socket_empty,
                }) => {
                    read_bytes += bytes;
                    self.handle_frames();
                    if is_socket_empty {
                        return;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) => {
                    return self.mark_connection_lost(&format!(
                        "the connection to the daemon is lost: reading failed: {e}"
                    ));
                }
            }
        }
        // The limit of this call is reached. A quiesced connection needs no further reads: after
        // the quiesce request the daemon sends nothing that must be read.
        self.socket_may_have_data = self.core.is_connected();
    }

    /// Decodes and handles all complete frames in the read buffer.
    pub(crate) fn handle_frames(&mut self) {
        let now = self.now();
        loop {
            let frame_result = match self.decoder.next_frame() {
                Ok(Some(frame)) => {
                    self.core
                        .handle_frame(now, frame, &mut self.unhandled_descriptors)
                }
                Ok(None) if self.unhandled_descriptors.len() > UNHANDLED_DESCRIPTORS_MAX => {
                    Err(DaemonFrameError::UnexpectedDescriptors)
                }
                Ok(None) => return,
                Err(e) => Err(e.into()),
            };
            if let Err(error) = frame_result {
                return self.mark_connection_lost(&format!(
                    "the daemon sent a frame that cannot be decoded: {error}"
                ));
            }
        }
    }

    /// Marks the connection as lost for good. The I/O thread closes the socket.
    pub(crate) fn mark_connection_lost(&mut self, reason: &str) {
        self.core.mark_connection_lost(reason);
        self.decoder = FrameDecoder::new();
        self.unhandled_descriptors.clear();
    }

    /// Stops watching the socket and closes the socket.
    pub(crate) fn detach_socket(&mut self, socket_waiters: &SocketWaiters) {
        if let Some(socket) = self.socket.take() {
            socket_waiters.remove_socket(socket.get());
        }
    }

    /// Starts to use a connection: the first connection of the task, or a new connection after a
    /// migration. `descriptors` contains the descriptors that arrived together with the bytes in
    /// `decoder`.
    ///
    /// # Errors
    /// The socket cannot be added to the epoll sets.
    pub(crate) fn attach_socket(
        &mut self,
        socket: Arc<ProcessOwned<UnixStream>>,
        decoder: FrameDecoder,
        descriptors: PendingFds,
        socket_waiters: &SocketWaiters,
    ) -> io::Result<()> {
        socket_waiters.add_socket(socket.get())?;
        self.socket = Some(socket);
        (self.decoder, self.unhandled_descriptors) = (decoder, descriptors);
        self.handle_frames();
        self.read_and_write();
        Ok(())
    }
}

impl SharedState {
    /// Creates the state of a task that a daemon has just accepted.
    pub(crate) fn new(connection: AcceptedConnection) -> io::Result<Self> {
        let io_event =
            EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let AcceptedConnection {
            socket,
            decoder,
            unhandled_fds: received_fds,
            welcome,
        } = connection;
        let own_doorbell = Arc::new(ProcessOwned::new(OwnDoorbell::new()?));
        let mut core = Core::new(&welcome);
        core.shm_routes = ShmRoutes::new(own_doorbell.clone());
        let alive_flag = core.connection_alive_flag();
        let mut state = LockedState {
            core,
            clock: Clock::new(),
            socket: None,
            decoder: FrameDecoder::new(),
            unhandled_descriptors: PendingFds::default(),
            io_thread_sleep: IoThreadSleep::Awake,
            spin_budget: SpinBudget::for_multiprocessor(SenderDistance::Host),
            last_socket_read_at: Micros(0),
            has_drainer: false,
            event_waiter_count: 0,
            has_socket_waiter: false,
            socket_may_have_data: false,
            write_waiter_count: 0,
            is_ready_fd_readable: false,
            wake_delay_timer: None,
        };
        let waiters = Arc::new(SocketWaiters::new()?);
        state.core.direct_routes.set_app_waiters(waiters.clone());
        state.attach_socket(socket, decoder, received_fds, &waiters)?;
        Ok(Self {
            own_tid: welcome.tid,
            connection_alive: alive_flag,
            state: BiasedLock::new(state),
            lock_waiter_count: AtomicU32::new(0),
            doorbell: own_doorbell,
            write_event_count: AtomicU32::new(0),
            socket_waiters: waiters,
            io_thread_event: ProcessOwned::from_fd(io_event),
            ready_event: OnceLock::new(),
            fork_generation: process::fork_generation(),
            stop_requested: AtomicBool::new(false),
        })
    }

    /// True in a forked child of the task. The child must not lock the state: the thread that held
    /// the lock at the fork may not exist in the child.
    pub(crate) fn is_forked_child(&self) -> bool {
        self.fork_generation != process::fork_generation()
    }

    /// True until the connection is lost for good.
    pub(crate) fn is_connection_alive(&self) -> bool {
        self.connection_alive.load(Ordering::Acquire)
    }

    /// Sends a small message like [`Core::try_send_inline`]. Returns false if nothing was sent,
    /// also because another thread holds the lock. An inline send changes no condition for which a
    /// [`StateGuard`] would wake threads, except conditions of the I/O thread's sleep.
    pub(crate) fn try_send_inline(
        &self,
        peer: Tid,
        head: &[u8],
        body: &[u8],
        wants_direct_route: bool,
    ) -> bool {
        let Some(mut state) = self.state.try_lock() else {
            return false;
        };
        let now = state.clock.last_reading();
        let Some(peer_wake) = state
            .core
            .try_send_inline(now, peer, head, body, wants_direct_route)
        else {
            return false;
        };
        let needs_io_thread = state.must_wake_io_thread();
        drop(state);
        if let Some(peer_wake) = peer_wake {
            peer_wake.wake();
        }
        if needs_io_thread {
            self.wake_io_thread();
        }
        true
    }

    /// Receives a small message like [`Core::try_receive_small`]. Returns `None` if nothing was
    /// received, also because another thread holds the lock. The message concerns no other thread.
    #[inline]
    pub(crate) fn try_receive_small(
        &self,
        body: &mut Vec<u8>,
        looks_ahead: bool,
    ) -> Option<SmallMessageHead> {
        let mut state = self.state.try_lock()?;
        let now = state.clock.last_reading();
        let head = state.core.try_receive_small(now, body, looks_ahead)?;
        if state.core.shm_routes.has_pending_wakes() {
            let peer_wakes = state.take_peer_wakes();
            drop(state);
            peer_wakes.wake_all();
        }
        Some(head)
    }

    /// Locks the state. Must not be called if [`SharedState::is_forked_child`].
    pub(crate) fn lock(&self) -> StateGuard<'_> {
        debug_assert!(!self.is_forked_child(), "callers look before they lock");
        StateGuard::new(self, self.lock_as_counted_waiter())
    }

    fn lock_as_counted_waiter(&self) -> BiasedLockGuard<'_, LockedState> {
        self.state.try_lock().unwrap_or_else(|| {
            self.lock_waiter_count.fetch_add(1, Ordering::Relaxed);
            let state = self.state.lock();
            self.lock_waiter_count.fetch_sub(1, Ordering::Relaxed);
            state
        })
    }

    /// Locks the state; `None` if the lock is not free before the deadline. The deadline is
    /// necessary because the calling thread may itself hold the lock, further up the call stack.
    pub(crate) fn lock_until(&self, deadline: Instant) -> Option<StateGuard<'_>> {
        loop {
            match self.state.try_lock() {
                Some(state) => return Some(StateGuard::new(self, state)),
                None if Instant::now() >= deadline => return None,
                None => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    pub(crate) fn wake_io_thread(&self) {
        // The write fails only if the counter is full. In that case a wake-up is already pending.
        let _ = self.io_thread_event.get().write(1);
    }

    /// Returns a descriptor that is readable while a message can be received, and after the
    /// connection is lost. The first call creates the descriptor. From then on, every notification
    /// of the doorbell requests the drainer thread if no thread sleeps on the doorbell.
    pub(crate) fn ready_fd(&self) -> io::Result<RawFd> {
        if self.ready_event.get().is_none() {
            let new_event =
                EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
            // Setting fails if another thread created the descriptor first. In that case the
            // descriptor of the other thread is used.
            let _ = self.ready_event.set(ProcessOwned::from_fd(new_event));
        }
        let mut state_guard = self.lock();
        self.doorbell.get().set_notify_always(true);
        state_guard.core.inbox.set_watched();
        drop(state_guard);
        Ok(self
            .ready_event
            .get()
            .expect("just made")
            .get()
            .as_fd()
            .as_raw_fd())
    }

    /// True if the program has requested the ready descriptor.
    pub(crate) fn has_ready_fd(&self) -> bool {
        self.ready_event.get().is_some()
    }

    /// Returns the ready descriptor; `None` if the program has not requested the descriptor.
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
    pub(crate) fn is_stop_requested(&self) -> bool {
        self.stop_requested.load(Ordering::Acquire)
    }

    /// Requests that the background threads end, and wakes these threads.
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

    /// Sends all queued messages to the daemon before the process exits, and waits for the write
    /// until the deadline at the latest. If necessary, first notifies the daemon of the exit
    /// ([`Core::begin_exit`]).
    pub(crate) fn flush_until(&self, deadline: Instant) {
        let Some(mut state) = self.lock_until(deadline) else {
            return;
        };
        let must_notify = state.core.begin_exit();
        let mut exit_notice_id = must_notify
            .then(|| state.core.send_request(Request::AnnounceExit).ok())
            .flatten();
        loop {
            let now = state.now();
            exit_notice_id = exit_notice_id.filter(|id| state.core.take_reply(*id).is_none());
            if exit_notice_id.is_some() {
                state.write_outbox();
                let remaining_time = deadline.saturating_duration_since(Instant::now());
                if !remaining_time.is_zero() {
                    state.wait_until_written(Some(remaining_time.min(EXIT_NOTICE_POLL_INTERVAL)));
                    continue;
                }
            }
            state.core.disable_windows(now);
            state.write_outbox();
            let core = &state.core;
            let is_flushed =
                core.is_connected() && core.outbox.is_empty() && core.has_transmitted_all();
            let remaining_time = deadline.saturating_duration_since(Instant::now());
            if is_flushed
                || matches!(core.phase(), ConnectionPhase::Lost(_))
                || remaining_time.is_zero()
            {
                return;
            }
            state.wait_until_written(Some(remaining_time));
        }
    }
}
