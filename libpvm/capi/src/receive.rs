//! Receives messages.
//!
//! 1. [`pump`] takes all messages that have arrived from the runtime.
//! 2. Each message is dispatched in the order of arrival: a control message to the library, a
//!    message that matches a handler to that handler, any other message to the list of messages
//!    that can be received.
//! 3. A receive call searches that list, and waits for further messages if none matches.
//!
//! Only one thread at a time takes and dispatches messages, so that their order is kept. No handler
//! runs inside a handler.

use crate::buffers::Buffer;
use crate::control;
use crate::data::pvmmyctx;
use crate::handlers::{Filter, HandlerFn};
use crate::session::{self, Session};
use crate::trace;
use libpvm::{Inbox, Runtime};
use sempa_proto::message::CTX_TASK_CONTROL;
use sempa_proto::trace::int;
use sempa_proto::{Message, PvmError, PvmResult};
use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

/// A matching function of the program with the arguments buffer number, wanted tid and wanted tag;
/// see `pvm_recvf`.
pub(crate) type Matcher = extern "C" fn(i32, i32, i32) -> i32;

/// How long a receive call waits for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    None,
    Until(Instant),
    Endless,
}

thread_local! {
    /// True while this thread runs a message handler.
    static IN_HANDLER: Cell<bool> = const { Cell::new(false) };
}

pub(crate) fn in_handler() -> bool {
    IN_HANDLER.get()
}

/// The right to dispatch messages, with the queue of messages that were taken but not yet
/// dispatched. One thread holds it at a time, so that messages keep their order.
pub(crate) type Turn = MutexGuard<'static, VecDeque<Message>>;

static TURN: Mutex<VecDeque<Message>> = Mutex::new(VecDeque::new());

/// Waits for the right to dispatch messages.
pub(crate) fn turn() -> Turn {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the right to dispatch messages unless another thread holds it.
fn turn_at_once() -> Option<Turn> {
    match TURN.try_lock() {
        Ok(turn) => Some(turn),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Takes all messages that have arrived and dispatches them. Does nothing inside a handler.
pub(crate) fn pump(rt: &Runtime) {
    if in_handler() {
        return;
    }
    let mut turn = turn();
    rt.take_arrived_into(&mut turn);
    drop(take_in(rt, turn));
}

/// Dispatches all messages of the queue, and returns the session locked.
fn take_in(rt: &Runtime, mut turn: Turn) -> MutexGuard<'static, Session> {
    let mut session = session::lock();
    while let Some(message) = turn.pop_front() {
        if message.ctx == CTX_TASK_CONTROL || !session.handlers.is_empty() {
            drop(session);
            arrive(rt, message);
            session = session::lock();
        } else {
            // An error means that the program holds the maximum number of buffers (millions of
            // messages). The message is lost, because there is no call that could report it.
            let _ = session.queue(message);
        }
    }
    session
}

/// Dispatches one message: to the library, to a handler, or to the list of messages that can be
/// received.
pub(crate) fn arrive(rt: &Runtime, message: Message) {
    if message.ctx == CTX_TASK_CONTROL {
        return control::take(rt, &message);
    }
    let filter = Filter {
        src: message.src.raw(),
        tag: message.tag,
        ctx: message.ctx,
    };
    let mut session = session::lock();
    // If the program holds the maximum number of buffers, the message is lost: there is no call
    // that could report it.
    match session.handlers.find(&filter) {
        Some(handler) => {
            let Ok(mid) = session.buffers.add(Buffer::of_message(message)) else {
                return;
            };
            drop(session);
            run_handler(handler, mid, filter.ctx);
        }
        None => drop(session.queue(message)),
    }
}

/// Runs a handler. Meanwhile the message is the active receive buffer, there is no active send
/// buffer, and the current context is the message's context.
fn run_handler(handler: HandlerFn, mid: i32, ctx: i32) {
    let (sbuf, rbuf) = {
        let mut session = session::lock();
        (
            std::mem::replace(&mut session.sbuf, 0),
            std::mem::replace(&mut session.rbuf, mid),
        )
    };
    let ctx = pvmmyctx.swap(ctx, Relaxed);
    trace::once("mhf_invoke", || {
        let session = session::lock();
        let Ok(buffer) = session.buffers.get(mid) else {
            return Vec::new();
        };
        vec![
            int("RST", -1),
            int("RMC", buffer.tag),
            int("RCX", buffer.ctx),
            int("MB", mid),
            int("MNB", buffer.told_len()),
            int("MC", buffer.tag),
            int("MCX", buffer.ctx),
            int("SRC", buffer.src),
        ]
    });
    IN_HANDLER.set(true);
    trace::outside(|| handler(mid));
    IN_HANDLER.set(false);
    pvmmyctx.store(ctx, Relaxed);
    let mut session = session::lock();
    for made in [session.sbuf, session.rbuf, mid] {
        if made != sbuf && made != rbuf && made > 0 {
            // Fails if the handler has freed the buffer, or if two of these numbers are equal.
            let _ = session.free(made);
        }
    }
    (session.sbuf, session.rbuf) = (sbuf, rbuf);
}

/// The library's own matching rule: sender, tag and current context must be equal to the message's;
/// −1 matches anything.
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

/// Returns the queued message that the program's matching function ranks highest, the first one of
/// equal rank. Rank 1 ends the search. A negative result of the function is returned as an error.
fn find_ranked(matcher: Matcher, tid: i32, tag: i32) -> Result<Option<i32>, i32> {
    let waiting: Vec<i32> = session::lock().arrived.iter().copied().collect();
    let mut best: Option<(i32, i32)> = None;
    for mid in waiting {
        match matcher(mid, tid, tag) {
            error @ ..0 => return Err(error),
            0 => (),
            1 => return Ok(Some(mid)),
            rank if best.is_none_or(|(top, _)| rank > top) => best = Some((rank, mid)),
            _ => (),
        }
    }
    Ok(best.map(|(_, mid)| mid))
}

/// Returns the message that a receive would take next, without taking it, together with the locked
/// session.
fn find(mut session: MutexGuard<'static, Session>, tid: i32, tag: i32) -> Result<Found, i32> {
    let found = match session.matcher {
        Some(matcher) => {
            drop(session);
            let ranked = find_ranked(matcher, tid, tag)?;
            session = session::lock();
            ranked
        }
        None => {
            let wanted = |mid: &&i32| {
                session
                    .buffers
                    .get(**mid)
                    .is_ok_and(|buffer| matches(buffer, tid, tag))
            };
            session.arrived.iter().find(wanted).copied()
        }
    };
    Ok((session, found))
}

/// The locked session, and the number of the matching message if there is one.
type Found = (MutexGuard<'static, Session>, Option<i32>);

/// True if a program may wait for messages with this sender and tag.
fn askable(tid: i32, tag: i32) -> bool {
    let reserved = crate::data::pvmrescode.load(Relaxed) != 0;
    let source = sempa_proto::Tid::from_raw(tid);
    reserved || ((tid == -1 || source.is_task() || source.is_daemon()) && tag >= -1)
}

/// Reason for the failure of a receive call.
pub(crate) enum Fault {
    Error(PvmError),
    /// A negative result of the program's matching function.
    Matcher(i32),
}

impl From<PvmError> for Fault {
    fn from(error: PvmError) -> Fault {
        Fault::Error(error)
    }
}

/// Waits for a matching message and leaves it in the list. `before` runs once, after the arguments
/// have been checked.
fn wait(tid: i32, tag: i32, patience: Patience, before: fn(&mut Session)) -> Result<Found, Fault> {
    let mut session = session::lock();
    let rt = session.enrolled()?.clone();
    if !askable(tid, tag) {
        return Err(PvmError::BadParam.into());
    }
    if in_handler() && patience != Patience::None {
        return Err(PvmError::NotImpl.into());
    }
    before(&mut session);
    let mut found = (session, None);
    if !found.0.is_attended() {
        // No handler or caught output must see newer messages first, so the list can be searched
        // before the runtime is polled.
        found = find(found.0, tid, tag).map_err(Fault::Matcher)?;
    }
    if found.1.is_none() {
        drop(found);
        pump(&rt);
        found = find(session::lock(), tid, tag).map_err(Fault::Matcher)?;
    }
    while found.1.is_none() {
        let deadline = match patience {
            Patience::None => return Ok(found),
            Patience::Until(deadline) => Some(deadline),
            Patience::Endless => None,
        };
        drop(found);
        let Some(turn) = wait_for_some(&rt, deadline)? else {
            return Ok((session::lock(), None));
        };
        found = find(take_in(&rt, turn), tid, tag).map_err(Fault::Matcher)?;
    }
    Ok(found)
}

/// Waits until messages arrive, and takes them together with the right to dispatch them. Returns
/// `None` at the deadline.
fn wait_for_some(rt: &Runtime, deadline: Option<Instant>) -> PvmResult<Option<Turn>> {
    let mut take = |inbox: &mut Inbox| {
        if inbox.is_empty() {
            return None;
        }
        let mut turn = turn_at_once();
        if let Some(turn) = &mut turn {
            inbox.take_all_into(turn);
        }
        Some(turn)
    };
    let Some(taken) = rt.inbox_wait(deadline, &mut take)? else {
        return Ok(None);
    };
    // Another thread is dispatching messages. One of them may be the message that this thread waits
    // for, so wait until it has finished.
    Ok(Some(taken.unwrap_or_else(|| {
        let mut turn = turn();
        rt.take_arrived_into(&mut turn);
        turn
    })))
}

/// Receives a message and makes it the active receive buffer. The previous active receive buffer is
/// freed, even if no message arrives.
pub(crate) fn receive(tid: i32, tag: i32, patience: Patience) -> Result<Option<i32>, Fault> {
    let (mut session, Some(mid)) = wait(tid, tag, patience, Session::free_rbuf)? else {
        return Ok(None);
    };
    session.unqueue(mid);
    session.free_rbuf();
    if session.sbuf == mid {
        session.sbuf = 0;
    }
    session.rbuf = mid;
    Ok(Some(mid))
}

/// Returns the number of the message that a receive would take, and leaves it in the list.
pub(crate) fn probe(tid: i32, tag: i32) -> Result<Option<i32>, Fault> {
    Ok(wait(tid, tag, Patience::None, |_| ())?.1)
}

/// Receives a message without making it the active receive buffer (`pvm_precv`).
pub(crate) fn receive_apart(tid: i32, tag: i32) -> Result<Buffer, Fault> {
    let (mut session, found) = wait(tid, tag, Patience::Endless, |_| ())?;
    let mid = found.ok_or(PvmError::SysErr)?;
    session.unqueue(mid);
    Ok(session.buffers.remove(mid)?)
}

/// Dispatches messages until `done` returns a value, and returns it.
///
/// # Errors
/// `SysErr` if the connection to the daemon is lost, `NotImpl` inside a handler.
pub(crate) fn wait_for<R>(
    rt: &Runtime,
    mut done: impl FnMut(&mut Session) -> Option<R>,
) -> PvmResult<R> {
    loop {
        pump(rt);
        if let Some(found) = done(&mut session::lock()) {
            return Ok(found);
        }
        if in_handler() {
            return Err(PvmError::NotImpl);
        }
        let mut any = |inbox: &mut Inbox| (!inbox.is_empty()).then_some(());
        rt.inbox_wait(None, &mut any)?;
    }
}
