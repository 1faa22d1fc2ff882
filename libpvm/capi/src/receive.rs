//! Receives messages.
//!
//! 1. [`poll_incoming`] removes all messages that have arrived from the runtime's inbox.
//! 2. Each message is dispatched in the order of arrival: a control message to the library, a
//!    message that matches a handler to this handler, any other message to the list of messages
//!    that can be received.
//! 3. A receive call searches this list, and waits for further messages if none matches.
//!
//! Only one thread at a time performs steps 1 and 2, so that the messages stay in order. No handler
//! runs inside another handler.

use crate::buffers::Buffer;
use crate::control;
use crate::data::pvmmyctx;
use crate::handlers::{Filter, HandlerFn};
use crate::session::{self, Session};
use crate::trace;
use libpvm::{Inbox, Runtime};
use sempa_proto::message::CTX_TASK_CONTROL;
use sempa_proto::trace::int_item;
use sempa_proto::{Message, PvmError, PvmResult};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

/// A matching function of the program. Its arguments are the buffer number, the requested tid and
/// the requested tag; see `pvm_recvf`.
pub(crate) type Matcher = extern "C" fn(i32, i32, i32) -> i32;

/// Time for which a receive call waits for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitMode {
    NoWait,
    Deadline(Instant),
    Forever,
}

thread_local! {
    /// True while this thread runs a message handler.
    static IN_HANDLER: Cell<bool> = const { Cell::new(false) };
}

pub(crate) fn is_in_handler() -> bool {
    IN_HANDLER.get()
}

/// The right to dispatch messages, with the queue of messages that were removed from the inbox but
/// are not dispatched yet. Only one thread at a time has this right, so that messages stay in
/// order.
pub(crate) type DispatchGuard = MutexGuard<'static, VecDeque<Message>>;

static DISPATCH_QUEUE: Mutex<VecDeque<Message>> = Mutex::new(VecDeque::new());

/// Waits for the right to dispatch messages.
pub(crate) fn lock_dispatch() -> DispatchGuard {
    DISPATCH_QUEUE
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

/// Returns the right to dispatch messages; `None` if another thread has this right.
fn try_lock_dispatch() -> Option<DispatchGuard> {
    match DISPATCH_QUEUE.try_lock() {
        Ok(dispatch_guard) => Some(dispatch_guard),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Removes all messages from the runtime's inbox and dispatches them. Does nothing inside a
/// handler.
pub(crate) fn poll_incoming(rt: &Runtime) {
    if is_in_handler() {
        return;
    }
    let mut queue = lock_dispatch();
    rt.drain_inbox_into(&mut queue);
    drop(dispatch_all(rt, queue));
}

/// Dispatches all messages of the queue, and returns the session locked.
fn dispatch_all(rt: &Runtime, mut dispatch_guard: DispatchGuard) -> MutexGuard<'static, Session> {
    let mut session = session::lock();
    while let Some(message) = dispatch_guard.pop_front() {
        if message.ctx == CTX_TASK_CONTROL || !session.handlers.is_empty() {
            drop(session);
            dispatch_message(rt, message);
            session = session::lock();
        } else {
            // An error means that the program has the maximum number of buffers (millions of
            // messages). The message is lost, because there is no call that could report the error.
            let _ = session.queue_message(message);
        }
    }
    session
}

/// Dispatches one message: to the library, to a handler, or to the list of messages that can be
/// received.
pub(crate) fn dispatch_message(rt: &Runtime, message: Message) {
    if message.ctx == CTX_TASK_CONTROL {
        return control::handle_control_message(rt, &message);
    }
    let filter = Filter {
        src: message.src.raw(),
        tag: message.tag,
        ctx: message.ctx,
    };
    let mut session = session::lock();
    // If the program has the maximum number of buffers, the message is lost: there is no call that
    // could report the error.
    match session.handlers.find(&filter) {
        Some(handler) => {
            let Ok(mid) = session.buffers.add(Buffer::from_message(message)) else {
                return;
            };
            drop(session);
            run_handler(handler, mid, filter.ctx);
        }
        None => drop(session.queue_message(message)),
    }
}

/// Runs a handler. During the run, the message is the active receive buffer, there is no active
/// send buffer, and the current context is the message's context. Afterwards the previous buffers
/// and context are active again, and the message's buffer and the buffers that the handler made
/// active are freed.
fn run_handler(handler: HandlerFn, mid: i32, ctx: i32) {
    let (saved_send_mid, saved_receive_mid) = {
        let mut session = session::lock();
        (
            std::mem::replace(&mut session.send_buffer_id, 0),
            std::mem::replace(&mut session.receive_buffer_id, mid),
        )
    };
    let ctx = pvmmyctx.swap(ctx, Relaxed);
    trace::record_event("mhf_invoke", || {
        let session = session::lock();
        let Ok(buffer) = session.buffers.get(mid) else {
            return Vec::new();
        };
        vec![
            int_item("RST", -1),
            int_item("RMC", buffer.tag),
            int_item("RCX", buffer.ctx),
            int_item("MB", mid),
            int_item("MNB", buffer.len_as_int()),
            int_item("MC", buffer.tag),
            int_item("MCX", buffer.ctx),
            int_item("SRC", buffer.src),
        ]
    });
    IN_HANDLER.set(true);
    trace::run_program_code(|| handler(mid));
    IN_HANDLER.set(false);
    pvmmyctx.store(ctx, Relaxed);
    let mut session = session::lock();
    for buffer_id in [session.send_buffer_id, session.receive_buffer_id, mid] {
        if buffer_id != saved_send_mid && buffer_id != saved_receive_mid && buffer_id > 0 {
            // The call fails if the handler has freed the buffer, or if two of these numbers are
            // equal.
            let _ = session.free_buffer(buffer_id);
        }
    }
    (session.send_buffer_id, session.receive_buffer_id) = (saved_send_mid, saved_receive_mid);
}

/// The library's own matching rule: sender, tag and current context must be equal to the sender,
/// tag and context of the message; −1 matches any value.
fn matches(buffer: &Buffer, tid: i32, tag: i32) -> bool {
    let ctx = pvmmyctx.load(Relaxed);
    (tid == -1 || tid == buffer.src)
        && (tag == -1 || tag == buffer.tag)
        && (ctx == -1 || ctx == buffer.ctx)
}

/// The library's matching function for programs: returns 1 if the message matches, else 0.
pub(crate) fn default_matcher(mid: i32, tid: i32, tag: i32) -> i32 {
    session::lock()
        .buffers
        .get(mid)
        .map_or(0, |buffer| i32::from(matches(buffer, tid, tag)))
}

/// Returns the queued message that the program's matching function ranks highest; of several
/// messages with the same rank, the first one. `None` if no message matches. Rank 1 ends the
/// search.
///
/// # Errors
/// A negative result of the matching function.
fn find_ranked(matcher: Matcher, tid: i32, tag: i32) -> Result<Option<i32>, i32> {
    let queued_mids: Vec<i32> = session::lock().receivable_mids.iter().copied().collect();
    let mut best_match: Option<(i32, i32)> = None;
    for mid in queued_mids {
        match matcher(mid, tid, tag) {
            error @ ..0 => return Err(error),
            0 => (),
            1 => return Ok(Some(mid)),
            rank if best_match.is_none_or(|(best_rank, _)| rank > best_rank) => {
                best_match = Some((rank, mid))
            }
            _ => (),
        }
    }
    Ok(best_match.map(|(_, mid)| mid))
}

/// Returns the locked session and the number of the message that the next receive call would
/// return; `None` if no message matches. The message stays in the list.
///
/// # Errors
/// A negative result of the program's matching function.
fn find_match(
    mut session: MutexGuard<'static, Session>,
    tid: i32,
    tag: i32,
) -> Result<MatchResult, i32> {
    let matching_mid = match session.matcher {
        Some(matcher) => {
            drop(session);
            let ranked_mid = find_ranked(matcher, tid, tag)?;
            session = session::lock();
            ranked_mid
        }
        None => {
            let is_match = |mid: &&i32| {
                session
                    .buffers
                    .get(**mid)
                    .is_ok_and(|buffer| matches(buffer, tid, tag))
            };
            session.receivable_mids.iter().find(is_match).copied()
        }
    };
    Ok((session, matching_mid))
}

/// The locked session, and the number of the matching message; `None` if no message matches.
type MatchResult = (MutexGuard<'static, Session>, Option<i32>);

/// True if a program may wait for messages with this sender and tag.
fn is_valid_request(tid: i32, tag: i32) -> bool {
    let allows_reserved_tids = crate::data::pvmrescode.load(Relaxed) != 0;
    let source = sempa_proto::Tid::from_raw(tid);
    allows_reserved_tids || ((tid == -1 || source.is_task() || source.is_daemon()) && tag >= -1)
}

/// Reason for the failure of a receive call.
pub(crate) enum ReceiveError {
    Pvm(PvmError),
    /// A negative result of the program's matching function.
    Matcher(i32),
}

impl From<PvmError> for ReceiveError {
    fn from(error: PvmError) -> Self {
        Self::Pvm(error)
    }
}

/// Waits for a matching message. Returns the locked session and the message's number; `None` in
/// place of the number if the wait ends without a message. The message stays in the list.
/// `on_valid_arguments` is called once, after the arguments have been checked.
fn wait_for_message(
    tid: i32,
    tag: i32,
    wait_mode: WaitMode,
    on_valid_arguments: fn(&mut Session),
) -> Result<MatchResult, ReceiveError> {
    let mut session = session::lock();
    let rt = session.runtime_or_enrol()?.clone();
    if !is_valid_request(tid, tag) {
        return Err(PvmError::BadParam.into());
    }
    if is_in_handler() && wait_mode != WaitMode::NoWait {
        return Err(PvmError::NotImpl.into());
    }
    on_valid_arguments(&mut session);
    let mut match_result = (session, None);
    if !match_result.0.needs_prompt_dispatch() {
        // Without handlers and printed output of children, newer messages need not be dispatched
        // first. Therefore the list is searched before the runtime is polled.
        match_result = find_match(match_result.0, tid, tag).map_err(ReceiveError::Matcher)?;
    }
    if match_result.1.is_none() {
        drop(match_result);
        poll_incoming(&rt);
        match_result = find_match(session::lock(), tid, tag).map_err(ReceiveError::Matcher)?;
    }
    while match_result.1.is_none() {
        let deadline = match wait_mode {
            WaitMode::NoWait => return Ok(match_result),
            WaitMode::Deadline(deadline) => Some(deadline),
            WaitMode::Forever => None,
        };
        drop(match_result);
        let Some(queue) = wait_for_arrivals(&rt, deadline)? else {
            return Ok((session::lock(), None));
        };
        match_result =
            find_match(dispatch_all(&rt, queue), tid, tag).map_err(ReceiveError::Matcher)?;
    }
    Ok(match_result)
}

/// Waits until messages arrive. Then acquires the right to dispatch messages, and moves the
/// messages from the inbox to the dispatch queue. Returns `None` at the deadline.
fn wait_for_arrivals(rt: &Runtime, deadline: Option<Instant>) -> PvmResult<Option<DispatchGuard>> {
    let mut take_messages = |inbox: &mut Inbox| {
        if inbox.is_empty() {
            return None;
        }
        let mut dispatch_guard = try_lock_dispatch();
        if let Some(dispatch_guard) = &mut dispatch_guard {
            inbox.drain_into(dispatch_guard);
        }
        Some(dispatch_guard)
    };
    let Some(dispatch_guard_result) = rt.wait_for_inbox(deadline, &mut take_messages)? else {
        return Ok(None);
    };
    // Another thread is dispatching messages, possibly the message for which this thread waits.
    // Therefore this thread waits until the dispatch has finished.
    Ok(Some(dispatch_guard_result.unwrap_or_else(|| {
        let mut dispatch_guard = lock_dispatch();
        rt.drain_inbox_into(&mut dispatch_guard);
        dispatch_guard
    })))
}

/// Receives a message, makes its buffer the active receive buffer and returns the buffer's number;
/// `None` if no message arrives in time. The previous active receive buffer is freed, even if no
/// message arrives.
pub(crate) fn receive(
    tid: i32,
    tag: i32,
    wait_mode: WaitMode,
) -> Result<Option<i32>, ReceiveError> {
    let (mut session, Some(mid)) =
        wait_for_message(tid, tag, wait_mode, Session::free_receive_buffer)?
    else {
        return Ok(None);
    };
    session.unqueue_message(mid);
    session.free_receive_buffer();
    if session.send_buffer_id == mid {
        session.send_buffer_id = 0;
    }
    session.receive_buffer_id = mid;
    Ok(Some(mid))
}

/// Returns the number of the message that a receive call would return. The message stays in the
/// list.
pub(crate) fn probe(tid: i32, tag: i32) -> Result<Option<i32>, ReceiveError> {
    Ok(wait_for_message(tid, tag, WaitMode::NoWait, |_| ())?.1)
}

/// Waits for a message and returns its buffer, without making it the active receive buffer
/// (`pvm_precv`).
pub(crate) fn receive_detached(tid: i32, tag: i32) -> Result<Buffer, ReceiveError> {
    let (mut session, matching_mid) = wait_for_message(tid, tag, WaitMode::Forever, |_| ())?;
    let mid = matching_mid.ok_or(PvmError::SysErr)?;
    session.unqueue_message(mid);
    Ok(session.buffers.remove(mid)?)
}

/// Dispatches messages until `check` returns a value; returns that value.
///
/// # Errors
/// `SysErr` if the connection to the daemon is lost, `NotImpl` inside a handler.
pub(crate) fn wait_until<R>(
    rt: &Runtime,
    mut check: impl FnMut(&mut Session) -> Option<R>,
) -> PvmResult<R> {
    loop {
        poll_incoming(rt);
        if let Some(value) = check(&mut session::lock()) {
            return Ok(value);
        }
        if is_in_handler() {
            return Err(PvmError::NotImpl);
        }
        let mut has_messages = |inbox: &mut Inbox| (!inbox.is_empty()).then_some(());
        rt.wait_for_inbox(None, &mut has_messages)?;
    }
}
