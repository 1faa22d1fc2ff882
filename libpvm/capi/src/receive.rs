//! Receiving: taking in what has arrived, offering it to handlers, and finding the message a call wants.

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

/// A matching function: buffer, and the tid and tag asked for; see `pvm_recvf`.
pub(crate) type Matcher = extern "C" fn(i32, i32, i32) -> i32;

/// How long a call waits for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Patience {
    /// Not at all.
    None,
    /// Until then.
    Until(Instant),
    /// For ever.
    Endless,
}

thread_local! {
    /// True while this thread runs a message handler.
    static IN_HANDLER: Cell<bool> = const { Cell::new(false) };
}

/// True while this thread runs a message handler of the program.
pub(crate) fn in_handler() -> bool {
    IN_HANDLER.get()
}

/// The turn to take messages in, with the messages on their way: one thread does so at a time, so that they keep their order.
pub(crate) type Turn = MutexGuard<'static, VecDeque<Message>>;

static TURN: Mutex<VecDeque<Message>> = Mutex::new(VecDeque::new());

/// Waits for the turn.
pub(crate) fn turn() -> Turn {
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The turn, if it is nobody's.
fn turn_at_once() -> Option<Turn> {
    match TURN.try_lock() {
        Ok(turn) => Some(turn),
        Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
        Err(TryLockError::WouldBlock) => None,
    }
}

/// Takes in all messages that have arrived and offers each to the handlers. Does nothing inside a handler.
pub(crate) fn pump(rt: &Runtime) {
    if in_handler() {
        return;
    }
    let mut turn = turn();
    rt.take_arrived_into(&mut turn);
    drop(take_in(rt, turn));
}

/// Gives what has been taken in to whom it is for. The session, as it is then.
fn take_in(rt: &Runtime, mut turn: Turn) -> MutexGuard<'static, Session> {
    let mut session = session::lock();
    while let Some(message) = turn.pop_front() {
        if message.ctx == CTX_TASK_CONTROL || !session.handlers.is_empty() {
            drop(session);
            arrive(rt, message);
            session = session::lock();
        } else {
            // At the limit of buffers the program holds millions of messages; there is no call to tell it by.
            let _ = session.queue(message);
        }
    }
    session
}

/// Gives one message to the library, to a handler, or to the list of those that can be received.
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
    // At the limit of buffers the program holds millions of messages; there is no call to tell it by.
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

/// Runs a handler: the message is the active receive buffer, nothing is being sent, the context is the message's.
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
            // The handler may have freed it, or two of them are the same.
            let _ = session.free(made);
        }
    }
    (session.sbuf, session.rbuf) = (sbuf, rbuf);
}

/// What the library matches by: sender, tag and current context, −1 meaning any.
fn matches(buffer: &Buffer, tid: i32, tag: i32) -> bool {
    let ctx = pvmmyctx.load(Relaxed);
    (tid == -1 || tid == buffer.src)
        && (tag == -1 || tag == buffer.tag)
        && (ctx == -1 || ctx == buffer.ctx)
}

/// The library's matching function, as a program may call it: 1 when the message matches.
pub(crate) fn default_matcher(mid: i32, tid: i32, tag: i32) -> i32 {
    session::lock()
        .buffers
        .get(mid)
        .map_or(0, |buffer| i32::from(matches(buffer, tid, tag)))
}

/// The first waiting message that the program's matching function ranks highest.
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

/// The message that a receive takes next, without taking it, and the session.
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

/// The session, and the message that was looked for.
type Found = (MutexGuard<'static, Session>, Option<i32>);

/// True when messages with this sender and tag may be asked for.
fn askable(tid: i32, tag: i32) -> bool {
    let reserved = crate::data::pvmrescode.load(Relaxed) != 0;
    let source = sempa_proto::Tid::from_raw(tid);
    reserved || ((tid == -1 || source.is_task() || source.is_daemon()) && tag >= -1)
}

/// Why a receive gave nothing: an error of ours, or a negative answer of the program's matching function.
pub(crate) enum Fault {
    /// One of PVM's codes.
    Error(PvmError),
    /// What the matching function said.
    Matcher(i32),
}

impl From<PvmError> for Fault {
    fn from(error: PvmError) -> Fault {
        Fault::Error(error)
    }
}

/// Waits for a message and leaves it in the list. `before` runs once, when the call is known to be good.
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
        // Nobody has to see first what may have arrived since.
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

/// Waits until messages arrive and takes them with the turn to give them out; `None` at the deadline.
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
    // Another thread is giving messages out. What it has taken may be what this one waits for.
    Ok(Some(taken.unwrap_or_else(|| {
        let mut turn = turn();
        rt.take_arrived_into(&mut turn);
        turn
    })))
}

/// Receives: the message becomes the active receive buffer. The one before is freed first, also when none comes.
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

/// The number of the message that a receive would take; it stays where it is.
pub(crate) fn probe(tid: i32, tag: i32) -> Result<Option<i32>, Fault> {
    Ok(wait(tid, tag, Patience::None, |_| ())?.1)
}

/// Receives a message beside the active receive buffer (`pvm_precv`).
pub(crate) fn receive_apart(tid: i32, tag: i32) -> Result<Buffer, Fault> {
    let (mut session, found) = wait(tid, tag, Patience::Endless, |_| ())?;
    let mid = found.ok_or(PvmError::SysErr)?;
    session.unqueue(mid);
    Ok(session.buffers.remove(mid)?)
}

/// Waits until `done` finds what it looks for in the session, taking messages in meanwhile.
///
/// # Errors
/// `SysErr` when the daemon is gone, `NotImpl` inside a handler.
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
