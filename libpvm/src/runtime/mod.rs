//! Task runtime: the connection to the daemon, the links to other tasks, and the background threads
//! that serve the connection and the links.
//!
//! - The runtime's state does no I/O itself. One lock protects the state.
//! - Application threads read and write the socket without blocking while they hold the lock. A
//!   thread that must wait sleeps on a futex; at most one thread sleeps on the socket.
//! - The I/O thread reads and writes while the application computes. When the task migrates, the
//!   I/O thread closes the connection to the daemon (quiesces) and connects to the next daemon.
//!   While there is no connection, all calls keep working in memory.
//! - A drainer thread reads rings that are full while the application computes.

mod automatic_routes;
mod clock;
mod connect;
mod core;
mod direct;
mod direct_routes;
mod groups;
mod intake;
mod io_thread;
mod links;
mod outbox;
mod polling;
mod process;
mod redirect;
mod ring_drainer;
mod route_agreements;
mod shared;
mod shm;
mod socket_waiters;
#[cfg(test)]
mod tests;
mod wake_delay_timer;
mod zero_copy;

pub use self::connect::{EnrollOptions, runtime_paths, wait_for_daemon_answer};
pub use self::intake::IntakeFn;
pub use self::shm::SmallMessageHead;
pub use self::zero_copy::PackedBody;

pub(crate) use self::core::Core;
use self::core::OUTBOX_BACKLOG_BYTES_MAX;
use self::process::{ForkOrExitHook, ProcessOwned};
use self::shared::{SharedState, StateGuard};
use self::zero_copy::LEASED_MESSAGE_BYTES_MIN;
use crate::error::EnrollError;
use crate::inbox::Inbox;
use sempa_proto::message::MESSAGE_HEAD_BYTES;
use sempa_proto::task::{
    Claim, OnDaemonExit, Reply, Request, RmInfo, Sink, TracerSettings, Welcome,
};
use sempa_proto::{HostId, Message, Micros, PvmError, PvmResult, RequestId, Tid};
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Maximum time for which the normal exit of a process waits until the daemon has accepted the
/// messages of the process.
const EXIT_FLUSH_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum time for which `send` waits for the full socket of a direct route. A message that was
/// written to the socket is delivered even if a signal kills the process after `send`.
const DIRECT_WRITE_TIMEOUT: Duration = Duration::from_millis(100);

/// Minimum size of a message for which the wake-up of the receiver may be deferred. From this size,
/// the receiver needs more time to read the message than to wake up.
const WAKE_DEFERRAL_BYTES_MIN: usize = 256 << 10;

/// Joins the virtual machine that the environment selects. A spawned process uses its spawn token
/// once. After [`Runtime::exit`], or in a forked child whose parent used the token, the process
/// gets a new task id. `on_daemon_exit` applies only to processes that neither a daemon nor a
/// tasker has started.
///
/// # Errors
/// See [`EnrollError`].
pub fn enroll(on_daemon_exit: OnDaemonExit) -> Result<Runtime, EnrollError> {
    let mut options = EnrollOptions {
        on_daemon_exit,
        ..EnrollOptions::from_env()?
    };
    let has_claimed_token =
        matches!(options.claim, Claim::Spawned { .. }).then(connect::claim_spawn_token);
    if has_claimed_token == Some(false) {
        options.claim = Claim::NotSpawned;
    }
    let connect_result = Runtime::connect(options);
    if connect_result.is_err() && has_claimed_token == Some(true) {
        connect::release_spawn_token();
    }
    connect_result
}

/// This process as a task. Clones are cheap and stand for the same task.
///
/// When the last clone is dropped without [`Runtime::exit`], queued messages are still sent to the
/// daemon, within a few seconds. In a forked child the runtime is unusable:
/// [`Runtime::is_connected`] is false, and calls fail with `SysErr`.
#[derive(Clone, Debug)]
pub struct Runtime {
    inner: Arc<RuntimeInner>,
    /// Processes messages while a request of this handle waits ([`Runtime::with_intake`]).
    intake: Option<IntakeFn>,
}

#[derive(Debug)]
struct RuntimeInner {
    shared_state: Arc<SharedState>,
    welcome: Welcome,
    last_wid: AtomicI32,
    has_used_groups: AtomicBool,
    io_thread: Mutex<Option<ProcessOwned<JoinHandle<()>>>>,
}

impl Drop for RuntimeInner {
    fn drop(&mut self) {
        if self.shared_state.is_forked_child() {
            return;
        }
        self.shared_state
            .flush_until(Instant::now() + EXIT_FLUSH_TIMEOUT);
        self.stop_and_join();
    }
}

impl RuntimeInner {
    /// Stops the I/O thread, which closes the socket, and waits until the thread has ended.
    fn stop_and_join(&self) {
        self.shared_state.request_stop();
        let io_thread = self
            .io_thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = io_thread.and_then(ProcessOwned::into_inner) {
            // An error means that the I/O thread panicked. The panic was already reported to all
            // waiting threads.
            let _ = thread.join();
        }
    }
}

struct ExitFlushHook(Weak<SharedState>);

impl ForkOrExitHook for ExitFlushHook {
    fn is_obsolete(&self) -> bool {
        self.0.strong_count() == 0
    }

    fn prepare_for_fork(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.prepare_for_fork();
        }
    }

    fn run_at_exit(&self) {
        if let Some(shared_state) = self.0.upgrade() {
            shared_state.flush_until(Instant::now() + EXIT_FLUSH_TIMEOUT);
        }
    }
}

impl Runtime {
    /// Joins a virtual machine with these options. One process may connect several tasks; programs
    /// normally use [`enroll`].
    ///
    /// # Errors
    /// See [`EnrollError`].
    pub fn connect(options: EnrollOptions) -> Result<Self, EnrollError> {
        process::install_hooks();
        let EnrollOptions {
            socket: path,
            claim,
            program,
            on_daemon_exit: daemon_exit_action,
            has_automatic_routes,
        } = options;
        let connection =
            connect::connect_and_wait_for_welcome(&path, claim, &program, daemon_exit_action)?;
        let welcome = connection.welcome.clone();
        let io_error = |source| EnrollError::Io {
            path: path.clone(),
            source,
        };
        let shared_state = Arc::new(SharedState::new(connection).map_err(io_error)?);
        shared_state
            .lock()
            .core
            .direct_routes
            .automatic
            .set_enabled_by_user(has_automatic_routes);
        let io_thread_handle = io_thread::start(&shared_state, program).map_err(io_error)?;
        process::add_exit_hook(ExitFlushHook(Arc::downgrade(&shared_state)));
        let runtime_inner = RuntimeInner {
            shared_state,
            welcome,
            last_wid: AtomicI32::new(0),
            has_used_groups: AtomicBool::new(false),
            io_thread: Mutex::new(Some(io_thread_handle)),
        };
        Ok(Self {
            inner: Arc::new(runtime_inner),
            intake: None,
        })
    }

    /// Returns this task's id, which never changes.
    pub fn tid(&self) -> Tid {
        self.inner.welcome.tid
    }

    /// Returns the parent's tid from the daemon's welcome: `Tid::NONE` without a parent, or the raw
    /// value −35 if the parent has requested to stay unknown.
    pub fn parent_tid(&self) -> Tid {
        self.inner.welcome.parent
    }

    /// True if a daemon started this process, false if it was started from a command line.
    pub fn was_spawned(&self) -> bool {
        self.inner.welcome.spawned
    }

    /// Returns the host on which this task currently runs.
    pub fn host(&self) -> HostId {
        self.with_core(|core| core.host())
            .unwrap_or(self.inner.welcome.host)
    }

    /// Returns the data signature of the current host: PVM's code for its data layout.
    pub fn dsig(&self) -> i32 {
        self.with_core(|core| core.dsig())
            .unwrap_or(self.inner.welcome.dsig)
    }

    /// Returns the sink of this task's output, as the daemon's welcome specifies it.
    pub fn output_sink(&self) -> Sink {
        self.with_core(|core| core.output_sink())
            .unwrap_or(self.inner.welcome.output_sink)
    }

    /// Returns the sink of this task's trace records, as the daemon's welcome specifies it.
    pub fn trace_sink(&self) -> Sink {
        self.with_core(|core| core.trace_sink())
            .unwrap_or(self.inner.welcome.trace_sink)
    }

    /// Returns the tracer's settings, if trace records go to the tracer by default.
    pub fn tracer_settings(&self) -> Option<TracerSettings> {
        self.inner.welcome.tracer_settings.clone()
    }

    pub fn rm(&self) -> Option<RmInfo> {
        self.with_core(|core| core.rm()).flatten()
    }

    /// Returns a counter that increases when the resource manager changes or dies; 0 in a forked
    /// child. At each increase [`Runtime::wait_for_inbox`] calls its closure again.
    pub fn rm_generation(&self) -> u64 {
        self.with_core(|core| core.rm_generation()).unwrap_or(0)
    }

    /// False after [`Runtime::exit`], after the loss of the daemon, and in a forked child. A
    /// migrating task counts as connected.
    pub fn is_connected(&self) -> bool {
        !self.inner.shared_state.is_forked_child() && self.inner.shared_state.is_connection_alive()
    }

    /// Returns a sentence that says why the connection is lost for good. The sentence is empty
    /// while the connection is not lost.
    pub fn lost_reason(&self) -> String {
        self.with_core(|core| core.lost_reason().unwrap_or_default().to_string())
            .unwrap_or_else(|| {
                "this process was forked from a task and is not a task itself".into()
            })
    }

    /// Returns a new wait id. Wait ids are positive and start again at 1 after `i32::MAX`.
    pub fn allocate_wid(&self) -> i32 {
        let successor_of = |wid: i32| Some(if wid == i32::MAX { 1 } else { wid + 1 });
        let previous_wid =
            self.inner
                .last_wid
                .fetch_update(Ordering::Relaxed, Ordering::Relaxed, successor_of);
        successor_of(previous_wid.unwrap_or(0)).unwrap_or(1)
    }

    /// Returns a descriptor to wait on, for `pvm_getfds`: readable while an unreceived message is
    /// in the inbox, or when the connection is lost. The descriptor never changes. `None` in a
    /// forked child, or if no descriptor can be created.
    pub fn ready_fd(&self) -> Option<RawFd> {
        if self.inner.shared_state.is_forked_child() {
            return None;
        }
        self.inner.shared_state.ready_fd().ok()
    }

    /// Returns the socket to the daemon; `None` without a connection.
    #[cfg(test)]
    pub(crate) fn socket_fd(&self) -> Option<RawFd> {
        use std::os::fd::AsRawFd;
        let state = self.lock()?;
        state.socket.as_ref().map(|socket| socket.get().as_raw_fd())
    }

    /// Sends a message of at most
    /// [`INLINE_BODY_BYTES_MAX`](sempa_proto::link::INLINE_BODY_BYTES_MAX) bytes by writing the
    /// message to memory that is shared with the receiver. Returns false if another step, for
    /// example a write to the socket, is necessary. In that case nothing was sent, and the caller
    /// uses [`Runtime::send`]. With `wants_direct_route`, the call also returns false while the two
    /// tasks have not agreed yet whether they use a direct route.
    pub fn try_send_inline(
        &self,
        dst: Tid,
        head: [u8; MESSAGE_HEAD_BYTES],
        body: &[u8],
        wants_direct_route: bool,
    ) -> bool {
        !self.inner.shared_state.is_forked_child()
            && self
                .inner
                .shared_state
                .try_send_inline(dst, &head, body, wants_direct_route)
    }

    /// Sends a message to `message.dst` and sets `src`. The call returns when the message is
    /// written to the daemon, if the receiver's window and the state of the connection allow the
    /// write. Otherwise the message is queued in this process and sent later. The call never waits
    /// for the receiver. A message to a task that does not exist is dropped without an error, as in
    /// PVM.
    ///
    /// # Errors
    /// `BadParam` if the address is neither a task nor a daemon, `SysErr` if the connection to the
    /// daemon is lost, `OutOfRes` if too many bytes are queued for this receiver. After an error
    /// nothing was sent.
    pub fn send(&self, mut message: Message) -> PvmResult<()> {
        message.src = self.tid();
        let mut state = self.lock().ok_or(PvmError::SysErr)?;
        if state.core.lost_reason().is_some() {
            return Err(PvmError::SysErr);
        }
        let dst = message.dst;
        if dst == self.tid() {
            state.core.deliver(message);
        } else if dst.is_daemon() {
            state.core.send_to_daemon(message)?;
            state.core.shm_routes.expect_message_at_socket();
            self.wait_until_written(&mut state, None)?;
        } else if dst.is_task() {
            let now = state.now();
            state.core.send(now, message)?;
            state.wait_for_ring_space(dst);
            self.wait_until_written(&mut state, Some(dst))?;
        } else {
            return Err(PvmError::BadParam);
        }
        Ok(())
    }

    /// Sends one message to each of several tasks and sets `dst`; otherwise as [`Runtime::send`].
    /// Large messages to tasks on this host are copied only once.
    ///
    /// # Errors
    /// As [`Runtime::send`]. After an error the message was sent only to the tasks that precede the
    /// failing task in `receivers`.
    pub fn send_to_many(&self, message: &Message, receivers: &[Tid]) -> PvmResult<()> {
        let mut state = self.lock().ok_or(PvmError::SysErr)?;
        if state.core.lost_reason().is_some() {
            return Err(PvmError::SysErr);
        }
        let now = state.now();
        let send_result = state.core.send_to_many(now, message, receivers);
        for dst in receivers {
            state.wait_for_ring_space(*dst);
            self.wait_until_written(&mut state, Some(*dst))?;
        }
        if message.body.len() >= WAKE_DEFERRAL_BYTES_MIN {
            state.defer_wakes();
        }
        send_result
    }

    /// Returns memory for the body of a large message, which tasks on this host read where it was
    /// packed. Returns `None` if the body is small, if this task has not sent a large message to a
    /// task on its host yet, or if the memory is full. The caller then packs into memory of its
    /// own.
    pub fn allocate_body(&self, capacity: usize) -> Option<PackedBody> {
        if capacity < LEASED_MESSAGE_BYTES_MIN {
            return None;
        }
        let mut state = self.lock()?;
        let now = state.now();
        state.core.allocate_body(now, capacity)
    }

    /// Copies leased messages from shared memory into private memory, because a forked child may
    /// still read these messages. Must be called before a fork.
    pub fn prepare_for_fork(&self) {
        self.inner.shared_state.prepare_for_fork();
    }

    /// Delivers a message of the library to this program, behind those that have arrived.
    pub fn deliver_notice(&self, message: Message) {
        if let Some(mut state) = self.lock() {
            state.core.deliver(message);
        }
    }

    /// Requests a direct route to a task, unless a route was already requested, and waits for the
    /// answer. If either program refuses, messages continue to go through the daemons.
    pub fn open_route_and_wait(&self, dst: Tid) {
        let Some(mut state) = self.lock() else { return };
        loop {
            let now = state.now();
            if state.core.lost_reason().is_some() || state.core.request_route(now, dst) {
                return;
            }
            state.write_outbox();
            state.wait_for_event(None);
        }
    }

    /// Sets whether later offers of direct routes from other tasks are accepted (`PvmDontRoute`).
    /// If they are not, the routes that the library has set up on its own end.
    pub fn set_accepts_routes(&self, accepts: bool) {
        self.with_core_mut(|core, now| core.set_accepts_routes(now, accepts));
    }

    /// Sets whether the library sets up and accepts direct routes that no program has requested.
    pub fn set_automatic_routes(&self, is_enabled: bool) {
        self.with_core_mut(|core, now| core.set_automatic_routes(now, is_enabled));
    }

    /// Requests a notification of each of the next `route_count` direct routes. A notification is a
    /// message from this task to itself with the body `int tid, int fd`. A negative count requests
    /// a notification of every direct route; 0 revokes the request.
    ///
    /// # Errors
    /// `OutOfRes` if too many notifications are requested, `SysErr` in a forked child.
    pub fn notify_new_routes(&self, ctx: i32, tag: i32, route_count: i32) -> PvmResult<()> {
        let fd = if route_count == 0 {
            -1
        } else {
            self.ready_fd().unwrap_or(-1)
        };
        let mut state = self.lock().ok_or(PvmError::SysErr)?;
        let now = state.now();
        state.core.update_route_watches(now, |routes| {
            routes.watch_new_routes(ctx, tag, route_count, fd)
        })
    }

    /// Requests a notification of the end of the direct route to `peer`. The notification is a
    /// message from this task to itself with the body `int tid, int -1`. If there is no route, the
    /// notification is sent immediately. `cancel` revokes the request.
    ///
    /// # Errors
    /// `OutOfRes` if too many notifications are requested, `SysErr` in a forked child.
    pub fn notify_route_end(&self, peer: Tid, ctx: i32, tag: i32, cancel: bool) -> PvmResult<()> {
        let mut state = self.lock().ok_or(PvmError::SysErr)?;
        let now = state.now();
        state.core.update_route_watches(now, |routes| {
            if cancel {
                routes.unwatch_route_end(peer, ctx, tag);
                return Ok(());
            }
            routes.watch_route_end(peer, ctx, tag)
        })
    }

    /// Writes the queued frames, and waits while a full socket is the only obstacle to the write.
    /// If the process is killed after the call, the written messages still arrive. If `peer` is
    /// given, the call also lets the link to `peer` transmit.
    fn wait_until_written(&self, state: &mut StateGuard<'_>, peer: Option<Tid>) -> PvmResult<()> {
        let mut target_total = None;
        let (mut has_read_socket, mut may_wait_for_socket) = (false, true);
        loop {
            state.write_outbox();
            if state.core.lost_reason().is_some() {
                return Err(PvmError::SysErr);
            }
            if !state.core.is_connected() {
                return Ok(());
            }
            if peer.is_some_and(|peer| state.core.shm_routes.has_open_offer(peer)) {
                state.wait_until_written(None);
                continue;
            }
            if peer.is_some_and(|peer| state.core.direct_routes.is_blocked(peer))
                && std::mem::take(&mut may_wait_for_socket)
            {
                state.wait_until_written(Some(DIRECT_WRITE_TIMEOUT));
                continue;
            }
            if let Some(peer) = peer.filter(|_| target_total.is_none()) {
                let now = state.now();
                if state.core.waits_for_outbox(peer)
                    && state.core.outbox.backlog_bytes() < OUTBOX_BACKLOG_BYTES_MAX
                {
                    state.core.pump(now);
                    continue;
                }
                if state.core.waits_for_window(peer)
                    && !has_read_socket
                    && !state.core.shm_routes.has_ring(peer)
                {
                    // An acknowledgement that opens the window may have arrived already.
                    has_read_socket = true;
                    state.read_and_write();
                    continue;
                }
                if state.core.waits_for_outbox(peer) {
                    state.wait_until_written(None);
                    continue;
                }
            }
            let target_bytes = *target_total.get_or_insert(state.core.outbox.queued_bytes_total());
            if state.core.outbox.written_bytes_total() >= target_bytes {
                return Ok(());
            }
            state.wait_until_written(None);
        }
    }

    /// Sends a request to the daemon and waits for the reply. During a migration the request is
    /// queued. If the connection is lost for good, the reply is [`Reply::Failed`] with `SysErr`.
    /// While the request waits, the intake of this handle processes messages
    /// ([`Runtime::with_intake`]).
    pub fn request_and_wait(&self, daemon_request: Request) -> Reply {
        if let Some(intake) = self.intake {
            let plain_handle = self.with_intake(None);
            return self.request_and_wait_with(daemon_request, &mut || intake(&plain_handle));
        }
        let (mut state, id) = match self.begin_request(daemon_request) {
            Ok(begun_request) => begun_request,
            Err(failure_reply) => return failure_reply,
        };
        loop {
            if let Some(reply) = state.core.take_reply(id) {
                return reply;
            }
            state.wait_for_reply();
        }
    }

    /// Sends a request to the daemon. Returns the locked state and the number of the request.
    ///
    /// # Errors
    /// The reply to a request that cannot be sent.
    fn begin_request(&self, daemon_request: Request) -> Result<(StateGuard<'_>, RequestId), Reply> {
        let mut state = self.lock().ok_or_else(|| self.connection_lost_reply())?;
        let id = state.core.send_request(daemon_request)?;
        state.write_outbox();
        Ok((state, id))
    }

    /// Returns the reply to requests after the loss of the connection.
    fn connection_lost_reply(&self) -> Reply {
        Reply::Failed {
            error: PvmError::SysErr,
            reason: self.lost_reason(),
        }
    }

    /// Calls `f` with the inbox and returns the value that `f` returns. If `f` returns `None`,
    /// reads the frames that have arrived, and calls `f` again if there are new messages. `f` runs
    /// under the runtime's lock, so `f` must not call the runtime.
    pub fn check_inbox<R>(&self, f: &mut dyn FnMut(&mut Inbox) -> Option<R>) -> Option<R> {
        let mut state = self.lock()?;
        if let Some(value) = f(&mut state.core.inbox) {
            return Some(value);
        }
        let previous_event_seq = state.core.event_seq();
        state.poll_incoming();
        if state.core.event_seq() == previous_event_seq {
            return None;
        }
        f(&mut state.core.inbox)
    }

    /// Reads the frames that have arrived, and appends all received messages to `messages`, oldest
    /// first. Does nothing in a forked child.
    pub fn drain_inbox_into(&self, messages: &mut VecDeque<Message>) {
        let Some(mut state) = self.lock() else { return };
        state.poll_incoming();
        state.core.inbox.drain_into(messages);
    }

    /// Receives a small message that is in a ring on this host, and replaces the content of `body`
    /// by its body. `None` means that nothing was received, that the message must be received in
    /// another way, or that this is a forked child.
    #[inline]
    pub fn try_receive_small(
        &self,
        body: &mut Vec<u8>,
        looks_ahead: bool,
    ) -> Option<SmallMessageHead> {
        let shared_state = &self.inner.shared_state;
        if shared_state.is_forked_child() {
            return None;
        }
        shared_state.try_receive_small(body, looks_ahead)
    }

    /// Waits awake for a small message, if recent waits were successful. Returns true if
    /// [`Runtime::try_receive_small`] may succeed.
    pub fn spin_for_small(&self) -> bool {
        let Some(mut state) = self.lock() else {
            return false;
        };
        let has_record = state.spin_for_ring_record();
        state.release_after_wait();
        has_record
    }

    /// As [`Runtime::drain_inbox_into`], but appends only one message if the program has
    /// requested [`Runtime::ready_fd`].
    pub fn take_arrivals(&self, messages: &mut VecDeque<Message>) {
        let Some(mut state) = self.lock() else { return };
        state.poll_incoming();
        state.core.inbox.take_arrivals(messages);
    }

    /// Puts messages back that [`Runtime::take_arrivals`] has appended, so that
    /// [`Runtime::ready_fd`] shows that there are messages. Does nothing if the program has not
    /// requested this descriptor.
    pub fn put_back_if_watched(&self, messages: &mut VecDeque<Message>) {
        if messages.is_empty() || !self.inner.shared_state.has_ready_fd() {
            return;
        }
        if let Some(mut state) = self.lock() {
            state.core.inbox.put_back(std::mem::take(messages));
        }
    }

    /// Calls `f` whenever a message arrives or the resource manager changes, until `f` returns a
    /// value. Returns `None` if the deadline expires first. `f` runs under the runtime's lock, so
    /// `f` must not call the runtime.
    ///
    /// # Errors
    /// `SysErr` if the connection to the daemon is lost for good and `f` returns nothing.
    pub fn wait_for_inbox<R>(
        &self,
        deadline: Option<Instant>,
        f: &mut dyn FnMut(&mut Inbox) -> Option<R>,
    ) -> Result<Option<R>, PvmError> {
        self.wait_for_core(deadline, &mut |core| f(&mut core.inbox))
    }

    /// As [`Runtime::wait_for_inbox`], but `f` receives the whole state of the runtime.
    pub(crate) fn wait_for_core<R>(
        &self,
        deadline: Option<Instant>,
        f: &mut dyn FnMut(&mut Core) -> Option<R>,
    ) -> Result<Option<R>, PvmError> {
        let mut state = self.lock().ok_or(PvmError::SysErr)?;
        // The deadline is converted to the runtime's clock, which stays monotonic when the task
        // migrates.
        let wait_end = deadline.map(|deadline| {
            let remaining_time = deadline.saturating_duration_since(Instant::now());
            state.now() + Micros(u64::try_from(remaining_time.as_micros()).unwrap_or(u64::MAX))
        });
        let mut previous_event_seq = None;
        loop {
            let remaining_time =
                wait_end.map(|wait_end| Duration::from_micros(wait_end.since(state.now()).0));
            if previous_event_seq != Some(state.core.event_seq()) {
                previous_event_seq = Some(state.core.event_seq());
                if let Some(value) = f(&mut state.core) {
                    return Ok(Some(value));
                }
                state.poll_before_wait(remaining_time);
                continue;
            }
            if state.core.lost_reason().is_some() {
                return Err(PvmError::SysErr);
            }
            if remaining_time.is_some_and(|remaining_time| remaining_time.is_zero()) {
                return Ok(None);
            }
            if !state.spin_for_event(remaining_time) {
                state.wait_for_event(remaining_time);
            }
        }
    }

    /// Wakes the threads that wait in [`Runtime::wait_for_inbox`], so that each calls its closure
    /// again.
    pub fn wake_waiting_threads(&self) {
        if let Some(mut state) = self.lock() {
            state.core.bump_event_seq();
        }
    }

    /// Makes threads of this task sleep immediately when they wait, instead of spinning first.
    pub fn disable_spinning(&self) {
        if let Some(mut state) = self.lock() {
            state.disable_spinning();
        }
    }

    /// Leaves the virtual machine: sends all queued messages to the daemon, closes the connection,
    /// and stops the I/O thread. Messages that have arrived can still be received. During a
    /// migration the call waits until the migration has ended.
    ///
    /// # Errors
    /// `SysErr` if the connection to the daemon was lost before.
    pub fn exit(&self) -> PvmResult<()> {
        self.leave_groups();
        if self.lock().is_some_and(|mut state| state.core.begin_exit()) {
            self.request_and_wait(Request::AnnounceExit);
        }
        let flushed_watermarks = self.flush_all_for_exit();
        let exit_reply = flushed_watermarks.map(|flushed_watermarks| {
            self.request_and_wait(Request::Exit {
                watermarks: flushed_watermarks,
            })
        });
        if let Some(mut state) = self.lock() {
            state.mark_connection_lost("this task has left the virtual machine");
            drop(state);
            self.inner.stop_and_join();
        }
        match exit_reply? {
            Reply::Done => Ok(()),
            Reply::Failed { error, .. } => Err(error),
            _ => Err(PvmError::BadMsg),
        }
    }

    /// Writes all sent messages without regard to flow-control windows, and waits until the
    /// messages are written. Returns, for each link, the sequence number up to which the task has
    /// sent.
    fn flush_all_for_exit(&self) -> PvmResult<Vec<sempa_proto::task::SendWatermark>> {
        let mut state = self.lock().ok_or(PvmError::SysErr)?;
        loop {
            let now = state.now();
            state.core.disable_windows(now);
            state.write_outbox();
            let core = &state.core;
            if core.lost_reason().is_some() {
                return Err(PvmError::SysErr);
            }
            if core.is_connected() && core.outbox.is_empty() && core.has_transmitted_all() {
                return Ok(core.send_watermarks());
            }
            state.wait_until_written(None);
        }
    }

    /// Registers a request to the resource manager `rm`. The registration ends when the guard is
    /// dropped.
    pub(crate) fn register_rm_call(&self, rm: Tid, tag: i32, wid: i32) -> RmCallGuard<'_> {
        if let Some(mut state) = self.lock() {
            state.core.rm_calls.register(rm, tag, wid);
        }
        RmCallGuard { runtime: self, wid }
    }

    pub(crate) fn with_core<R>(&self, f: impl FnOnce(&Core) -> R) -> Option<R> {
        Some(f(&self.lock()?.core))
    }

    /// As [`Runtime::with_core`], with mutable access and the current time.
    pub(crate) fn with_core_mut<R>(&self, f: impl FnOnce(&mut Core, Micros) -> R) -> Option<R> {
        let mut state = self.lock()?;
        let now = state.now();
        Some(f(&mut state.core, now))
    }

    /// Locks the state; `None` in a forked child.
    fn lock(&self) -> Option<StateGuard<'_>> {
        (!self.inner.shared_state.is_forked_child()).then(|| self.inner.shared_state.lock())
    }
}

/// Registration of a thread that waits for the resource manager's answer with this wait id.
pub(crate) struct RmCallGuard<'a> {
    runtime: &'a Runtime,
    wid: i32,
}

impl Drop for RmCallGuard<'_> {
    fn drop(&mut self) {
        if let Some(mut state) = self.runtime.lock() {
            state.core.rm_calls.remove(self.wid);
        }
    }
}
