//! The task runtime: the connection to the daemon, the links to other tasks, and the helper thread that keeps them going.
//!
//! All state is a value (`core`, without any I/O) under one lock (`shared`). Application threads read and write the
//! socket without waiting while they hold the lock, and otherwise wait on futexes only. A helper thread (`helper`) reads
//! and writes while they compute, and lets go of the daemon when the task is to be moved: then every call goes on working
//! on memory until the task is connected again, here or elsewhere.

mod alarm;
mod clock;
mod connect;
mod core;
mod direct;
mod ear;
mod far;
mod groups;
mod helper;
mod lend;
mod near;
mod outbox;
mod process;
mod redirect;
mod routes;
mod seat;
mod shared;
#[cfg(test)]
mod tests;

pub use self::connect::{EnrollOptions, is_served};

use self::core::BACKLOG_BYTES_MAX;
pub(crate) use self::core::Core;
use self::process::{ExitHook, Own};
use self::shared::{Held, Shared};
use crate::error::EnrollError;
use crate::inbox::Inbox;
use sempa_proto::message::MESSAGE_HEAD_BYTES;
use sempa_proto::task::{AtEnd, Claim, Reply, Request, RmInfo, Sink, TracerSettings, Welcome};
use sempa_proto::{HostId, Message, Micros, PvmError, PvmResult, Tid};
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the normal end of a process may be delayed by messages that the daemon has not taken yet.
const EXIT_FLUSH_MAX: Duration = Duration::from_secs(5);

/// How long a message waits for a direct route's socket, so that a process that ends by a signal has sent it.
const SOCKET_PATIENCE: Duration = Duration::from_millis(100);

/// A message from which on each receiver reads for longer than it takes to wake it.
const LONG_READING_BYTES_MIN: usize = 256 << 10;

/// Joins the virtual machine of this user, as the environment says. A spawned process takes its place once; after
/// [`Runtime::exit`], and in a forked child whose parent has taken it, the process gets a task id of its own. `at_end` is
/// for processes from a command line.
///
/// # Errors
/// See [`EnrollError`].
pub fn enroll(at_end: AtEnd) -> Result<Runtime, EnrollError> {
    let mut options = EnrollOptions {
        at_end,
        ..EnrollOptions::from_env()?
    };
    let claim = matches!(options.claim, Claim::Spawned { .. }).then(connect::take_claim);
    if claim == Some(false) {
        options.claim = Claim::New;
    }
    let enrolled = Runtime::connect(options);
    if enrolled.is_err() && claim == Some(true) {
        connect::give_claim_back();
    }
    enrolled
}

/// This process as a task. Clones are the same task; cheap.
///
/// When the last clone goes without [`Runtime::exit`], what was sent is still handed to the daemon, within some seconds.
/// In a forked child the runtime is dead: [`Runtime::is_connected`] is false, and calls fail with `SysErr`.
#[derive(Clone, Debug)]
pub struct Runtime(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    shared: Arc<Shared>,
    welcome: Welcome,
    last_wid: AtomicI32,
    /// The task has asked the group service something.
    grouped: AtomicBool,
    helper: Mutex<Option<Own<JoinHandle<()>>>>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        if self.shared.is_foreign() {
            return;
        }
        self.shared.flush_until(Instant::now() + EXIT_FLUSH_MAX);
        self.stop();
    }
}

impl Handle {
    /// Ends the helper, which closes the socket.
    fn stop(&self) {
        self.shared.stop();
        let helper = self
            .helper
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = helper.and_then(Own::into_inner) {
            // A helper that failed has said so to everybody who waited.
            let _ = thread.join();
        }
    }
}

struct FlushAtExit(Weak<Shared>);

impl ExitHook for FlushAtExit {
    fn is_done(&self) -> bool {
        self.0.strong_count() == 0
    }

    fn before_fork(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.prepare_for_fork();
        }
    }

    fn run(&self) {
        if let Some(shared) = self.0.upgrade() {
            shared.flush_until(Instant::now() + EXIT_FLUSH_MAX);
        }
    }
}

impl Runtime {
    /// Joins a virtual machine as `options` say. A process may be several tasks in this way; [`enroll`] is what programs
    /// want.
    ///
    /// # Errors
    /// See [`EnrollError`].
    pub fn connect(options: EnrollOptions) -> Result<Runtime, EnrollError> {
        process::install_hooks();
        let EnrollOptions {
            socket: path,
            claim,
            program,
            at_end,
        } = options;
        let accepted = connect::greet(&path, claim, &program, at_end)?;
        let welcome = accepted.welcome.clone();
        let io_error = |source| EnrollError::Io {
            path: path.clone(),
            source,
        };
        let shared = Arc::new(Shared::new(accepted).map_err(io_error)?);
        let helper = helper::start(&shared, program).map_err(io_error)?;
        process::add_exit_hook(FlushAtExit(Arc::downgrade(&shared)));
        let handle = Handle {
            shared,
            welcome,
            last_wid: AtomicI32::new(0),
            grouped: AtomicBool::new(false),
            helper: Mutex::new(Some(helper)),
        };
        Ok(Runtime(Arc::new(handle)))
    }

    /// This task's id, for life.
    pub fn tid(&self) -> Tid {
        self.0.welcome.tid
    }

    /// The parent as in the daemon's welcome: NONE, a task, or raw −35 when the parent asked not to be known.
    pub fn parent(&self) -> Tid {
        self.0.welcome.parent
    }

    /// True when a daemon started this process.
    pub fn spawned(&self) -> bool {
        self.0.welcome.spawned
    }

    /// The host this task runs on now.
    pub fn host(&self) -> HostId {
        self.look(|core| core.host()).unwrap_or(self.0.welcome.host)
    }

    /// Data signature of that host.
    pub fn dsig(&self) -> i32 {
        self.look(|core| core.dsig()).unwrap_or(self.0.welcome.dsig)
    }

    /// Where this task's output goes, as the daemon said at the welcome.
    pub fn output(&self) -> Sink {
        self.look(|core| core.output())
            .unwrap_or(self.0.welcome.output)
    }

    /// Where this task's trace records go, as the daemon said at the welcome.
    pub fn trace(&self) -> Sink {
        self.look(|core| core.trace())
            .unwrap_or(self.0.welcome.trace)
    }

    /// What the tracer wants, when the trace goes to it because nothing else was asked for.
    pub fn tracer(&self) -> Option<TracerSettings> {
        self.0.welcome.tracer.clone()
    }

    /// The resource manager to ask, if there is one.
    pub fn rm(&self) -> Option<RmInfo> {
        self.look(|core| core.rm()).flatten()
    }

    /// Rises whenever the resource manager changes or dies; [`Runtime::inbox_wait`] looks again then.
    pub fn rm_generation(&self) -> u64 {
        self.look(|core| core.rm_generation()).unwrap_or(0)
    }

    /// True until [`Runtime::exit`], the loss of the daemon, or a fork (seen from the child). A task that is being moved is
    /// connected.
    pub fn is_connected(&self) -> bool {
        !self.0.shared.is_foreign() && self.0.shared.is_alive()
    }

    /// One sentence: why the connection is gone for good. Empty while it is not.
    pub fn why_lost(&self) -> String {
        self.look(|core| core.lost().unwrap_or_default().to_string())
            .unwrap_or_else(|| "this process was forked off a task and is none itself".into())
    }

    /// A fresh wait id, positive.
    pub fn next_wid(&self) -> i32 {
        let next = |wid: i32| Some(if wid == i32::MAX { 1 } else { wid + 1 });
        let before = self
            .0
            .last_wid
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        next(before.unwrap_or(0)).unwrap_or(1)
    }

    /// A descriptor to wait on, for `pvm_getfds`: readable as long as something has arrived that was not taken, or the
    /// connection is gone. It stays the same for life. `None` in a forked child, or when the system has none left.
    pub fn ready_fd(&self) -> Option<RawFd> {
        if self.0.shared.is_foreign() {
            return None;
        }
        self.0.shared.sign_fd().ok()
    }

    /// The socket to the daemon; `None` while there is none.
    #[cfg(test)]
    pub(crate) fn socket_fd(&self) -> Option<RawFd> {
        use std::os::fd::AsRawFd;
        let state = self.lock()?;
        state.socket.as_ref().map(|socket| socket.get().as_raw_fd())
    }

    /// Sends a message of at most [`SMALL_BYTES_MAX`](sempa_proto::link::SMALL_BYTES_MAX) bytes, if that needs nothing but
    /// memory shared with its receiver; false, and nothing was sent, otherwise: [`Runtime::send`] sends it then.
    /// `direct`: only if it has been agreed with the receiver whether there is a direct route.
    pub fn send_at_once(
        &self,
        dst: Tid,
        head: [u8; MESSAGE_HEAD_BYTES],
        body: &[u8],
        direct: bool,
    ) -> bool {
        !self.0.shared.is_foreign() && self.0.shared.send_at_once(dst, &head, body, direct)
    }

    /// Sends a message to `message.dst`; `src` is set. Returns when the message is with the daemon, as far as the
    /// receiver's window and the state of the connection allow; otherwise it is kept here and sent by and by. Never waits
    /// for the receiver. To a task that does not exist the message vanishes, as in PVM.
    ///
    /// # Errors
    /// `BadParam` for an address that is neither task nor daemon, `SysErr` when the daemon is gone, `OutOfRes` when too
    /// much waits for this receiver. Nothing was sent then.
    pub fn send(&self, mut message: Message) -> PvmResult<()> {
        message.src = self.tid();
        let mut state = self.lock().ok_or(PvmError::SysErr)?;
        if state.core.lost().is_some() {
            return Err(PvmError::SysErr);
        }
        let dst = message.dst;
        if dst == self.tid() {
            state.core.deliver(message);
        } else if dst.is_daemon() {
            state.core.tell(message)?;
            state.core.near.spoke_elsewhere();
            self.wait_until_out(&mut state, None)?;
        } else if dst.is_task() {
            let now = state.now();
            state.core.send(now, message)?;
            state.make_room(dst);
            self.wait_until_out(&mut state, Some(dst))?;
        } else {
            return Err(PvmError::BadParam);
        }
        Ok(())
    }

    /// Sends the same message to several tasks, once to each; `dst` is set. Otherwise as [`Runtime::send`]; large messages to
    /// tasks on this host are copied once for all.
    ///
    /// # Errors
    /// As [`Runtime::send`]: tasks before the one that it concerns were sent to.
    pub fn send_to_many(&self, message: &Message, to: &[Tid]) -> PvmResult<()> {
        let mut state = self.lock().ok_or(PvmError::SysErr)?;
        if state.core.lost().is_some() {
            return Err(PvmError::SysErr);
        }
        let now = state.now();
        let sent = state.core.send_to_many(now, message, to);
        for dst in to {
            state.make_room(*dst);
            self.wait_until_out(&mut state, Some(*dst))?;
        }
        if message.body.len() >= LONG_READING_BYTES_MIN {
            state.put_off_wakes();
        }
        sent
    }

    /// To be called before a fork: messages that a forked child may go on reading become memory of this process.
    pub fn prepare_for_fork(&self) {
        self.0.shared.prepare_for_fork();
    }

    /// Has a direct route to this task if both programs agree: asks it unless that was done before, and waits for the
    /// answer. Without a route messages go by the daemons.
    pub fn open_route(&self, dst: Tid) {
        let Some(mut state) = self.lock() else { return };
        loop {
            let now = state.now();
            if state.core.lost().is_some() || state.core.want_route(now, dst) {
                return;
            }
            state.flush();
            state.wait_arrived(None);
        }
    }

    /// What is said to tasks that ask for a direct route from now on.
    pub fn allow_routes(&self, allow: bool) {
        if let Some(mut state) = self.lock() {
            state.core.direct.routes.willing = allow;
        }
    }

    /// Tells of the next `count` direct routes by messages `int tid, int fd` from this task itself; of all if `count` is
    /// negative, of none if it is 0.
    ///
    /// # Errors
    /// `OutOfRes` when too much is watched already, `SysErr` in a forked child.
    pub fn tell_of_routes(&self, ctx: i32, tag: i32, count: i32) -> PvmResult<()> {
        let fd = if count == 0 {
            -1
        } else {
            self.ready_fd().unwrap_or(-1)
        };
        let mut state = self.lock().ok_or(PvmError::SysErr)?;
        let now = state.now();
        state
            .core
            .watch_routes(now, |routes| routes.watch_new(ctx, tag, count, fd))
    }

    /// Tells of the end of the direct route to `peer` by a message `int tid, int -1` from this task itself, at once if
    /// there is none; or (`cancel`) no longer.
    ///
    /// # Errors
    /// `OutOfRes` when too much is watched already, `SysErr` in a forked child.
    pub fn tell_of_route_end(&self, peer: Tid, ctx: i32, tag: i32, cancel: bool) -> PvmResult<()> {
        let mut state = self.lock().ok_or(PvmError::SysErr)?;
        let now = state.now();
        state.core.watch_routes(now, |routes| {
            if cancel {
                routes.unwatch_end(peer, ctx, tag);
                return Ok(());
            }
            routes.watch_end(peer, ctx, tag)
        })
    }

    /// Writes what was queued just now, and waits while only the socket is in the way: a process that is killed after a
    /// send has then still sent.
    fn wait_until_out(&self, state: &mut Held<'_>, peer: Option<Tid>) -> PvmResult<()> {
        let mut out = None;
        let (mut heard, mut patient) = (false, true);
        loop {
            state.flush();
            if state.core.lost().is_some() {
                return Err(PvmError::SysErr);
            }
            if !state.core.is_connected() {
                return Ok(());
            }
            if peer.is_some_and(|peer| state.core.near.is_offered(peer)) {
                state.wait_written(None);
                continue;
            }
            if peer.is_some_and(|peer| state.core.direct.is_blocked(peer))
                && std::mem::take(&mut patient)
            {
                state.wait_written(Some(SOCKET_PATIENCE));
                continue;
            }
            if let Some(peer) = peer.filter(|_| out.is_none()) {
                let now = state.now();
                if state.core.waits_for_room(peer)
                    && state.core.outbox.backlog() < BACKLOG_BYTES_MAX
                {
                    state.core.pump(now);
                    continue;
                }
                if state.core.waits_for_window(peer) && !heard && !state.core.near.leads_to(peer) {
                    // The receiver's word may be here already.
                    heard = true;
                    state.pump();
                    continue;
                }
                if state.core.waits_for_room(peer) {
                    state.wait_written(None);
                    continue;
                }
            }
            let end = *out.get_or_insert(state.core.outbox.queued());
            if state.core.outbox.written() >= end {
                return Ok(());
            }
            state.wait_written(None);
        }
    }

    /// Asks the daemon and waits for its answer. During a move the question waits, too. When the connection is gone for
    /// good the answer is [`Reply::Failed`] with `SysErr`.
    pub fn request(&self, what: Request) -> Reply {
        let Some(mut state) = self.lock() else {
            return Reply::Failed {
                error: PvmError::SysErr,
                reason: self.why_lost(),
            };
        };
        let id = match state.core.ask(what) {
            Ok(id) => id,
            Err(refused) => return refused,
        };
        state.flush();
        loop {
            if let Some(reply) = state.core.take_reply(id) {
                return reply;
            }
            state.wait_for_reply();
        }
    }

    /// One look at what has arrived. `f` runs under the runtime's lock: it must not call the runtime. It may be called a
    /// second time when something came in meanwhile.
    pub fn inbox_try<R>(&self, f: &mut dyn FnMut(&mut Inbox) -> Option<R>) -> Option<R> {
        let mut state = self.lock()?;
        if let Some(found) = f(&mut state.core.inbox) {
            return Some(found);
        }
        let news = state.core.news();
        state.take_in();
        if state.core.news() == news {
            return None;
        }
        f(&mut state.core.inbox)
    }

    /// Puts all that has arrived behind what `to` holds, first arrived first. Nothing in a forked child.
    pub fn take_arrived_into(&self, to: &mut VecDeque<Message>) {
        let Some(mut state) = self.lock() else { return };
        state.take_in();
        state.core.inbox.take_all_into(to);
    }

    /// Looks again whenever something arrived or the resource manager changed, until `f` answers or the deadline has come
    /// (`None`). `f` runs under the runtime's lock: it must not call the runtime.
    ///
    /// # Errors
    /// `SysErr` when the daemon is gone for good and `f` finds nothing.
    pub fn inbox_wait<R>(
        &self,
        deadline: Option<Instant>,
        f: &mut dyn FnMut(&mut Inbox) -> Option<R>,
    ) -> Result<Option<R>, PvmError> {
        self.core_wait(deadline, &mut |core| f(&mut core.inbox))
    }

    /// As [`Runtime::inbox_wait`], with all of the runtime's state before `f`.
    pub(crate) fn core_wait<R>(
        &self,
        deadline: Option<Instant>,
        f: &mut dyn FnMut(&mut Core) -> Option<R>,
    ) -> Result<Option<R>, PvmError> {
        let mut state = self.lock().ok_or(PvmError::SysErr)?;
        // Counted by the runtime's clock from here on, which goes on evenly when the task changes hosts.
        let end = deadline.map(|deadline| {
            let left = deadline.saturating_duration_since(Instant::now());
            state.now() + Micros(u64::try_from(left.as_micros()).unwrap_or(u64::MAX))
        });
        let mut seen = None;
        loop {
            if seen != Some(state.core.news()) {
                seen = Some(state.core.news());
                if let Some(found) = f(&mut state.core) {
                    return Ok(Some(found));
                }
                state.take_in();
                continue;
            }
            if state.core.lost().is_some() {
                return Err(PvmError::SysErr);
            }
            let left = end.map(|end| Duration::from_micros(end.since(state.now()).0));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            if !state.wait_awake(left) {
                state.wait_arrived(left);
            }
        }
    }

    /// From now on nobody waits awake.
    pub fn sleep_at_once(&self) {
        if let Some(mut state) = self.lock() {
            state.sleep_at_once();
        }
    }

    /// Leaves the virtual machine: everything sent is handed to the daemon, then the connection is closed and the helper
    /// ended. Messages that have arrived can still be received. During a move this waits for its end.
    ///
    /// # Errors
    /// `SysErr` when the daemon was gone already.
    pub fn exit(&self) -> PvmResult<()> {
        self.leave_groups();
        if self
            .lock()
            .is_some_and(|mut state| state.core.begin_to_end())
        {
            self.request(Request::LastWords);
        }
        let marks = self.hand_over();
        let reply = marks.map(|marks| self.request(Request::Exit { marks }));
        if let Some(mut state) = self.lock() {
            state.lose("this task has left the virtual machine");
            drop(state);
            self.0.stop();
        }
        match reply? {
            Reply::Done => Ok(()),
            Reply::Failed { error, .. } => Err(error),
            _ => Err(PvmError::BadMsg),
        }
    }

    /// Writes everything that was sent, without regard to windows.
    fn hand_over(&self) -> PvmResult<Vec<sempa_proto::task::LinkMark>> {
        let mut state = self.lock().ok_or(PvmError::SysErr)?;
        loop {
            let now = state.now();
            state.core.lift_windows(now);
            state.flush();
            let core = &state.core;
            if core.lost().is_some() {
                return Err(PvmError::SysErr);
            }
            if core.is_connected() && core.outbox.is_empty() && core.all_transmitted() {
                return Ok(core.marks());
            }
            state.wait_written(None);
        }
    }

    /// Notes that a thread is about to ask a resource manager, until the guard goes.
    pub(crate) fn open_question(&self, rm: Tid, tag: i32, wid: i32) -> OpenQuestion<'_> {
        if let Some(mut state) = self.lock() {
            state.core.questions.open(rm, tag, wid);
        }
        OpenQuestion { runtime: self, wid }
    }

    pub(crate) fn look<R>(&self, f: impl FnOnce(&Core) -> R) -> Option<R> {
        Some(f(&self.lock()?.core))
    }

    /// As [`Runtime::look`], for what changes, and with the time.
    pub(crate) fn timed<R>(&self, f: impl FnOnce(&mut Core, Micros) -> R) -> Option<R> {
        let mut state = self.lock()?;
        let now = state.now();
        Some(f(&mut state.core, now))
    }

    /// The lock; `None` in a forked child.
    fn lock(&self) -> Option<Held<'_>> {
        (!self.0.shared.is_foreign()).then(|| self.0.shared.lock())
    }
}

/// A thread waits for the answer with this wait id.
pub(crate) struct OpenQuestion<'a> {
    runtime: &'a Runtime,
    wid: i32,
}

impl Drop for OpenQuestion<'_> {
    fn drop(&mut self) {
        if let Some(mut state) = self.runtime.lock() {
            state.core.questions.close(self.wid);
        }
    }
}
