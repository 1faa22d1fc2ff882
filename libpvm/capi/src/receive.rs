//! Receives messages.
//!
//! 1. Messages that have arrived wait in [`ARRIVALS`]. No call can see them there.
//! 2. Messages are taken in one at a time, in the order of arrival: a control message goes to the
//!    library, a message that matches a handler to this handler, any other message to the list of
//!    messages that can be received.
//! 3. A receive call searches this list. If no message matches, the call takes in the next message,
//!    and examines only this message.
//!
//! Programs observe how many messages a call takes in, by the results of later calls with other
//! tags, by matching functions and by handlers. Therefore the numbers are PVM's: `pvm_nrecv` and
//! `pvm_probe` take in at most one message, other receive calls continue until a message matches,
//! and a request to the daemon takes in all messages that arrived before its reply.
//!
//! Only one thread at a time takes messages in, so that the messages stay in order. No handler runs
//! inside another handler.

use crate::buffers::Buffer;
use crate::control;
use crate::data::pvmmyctx;
use crate::handlers::{Filter, HandlerFn};
use crate::receivable::Request;
use crate::session::{self, Session, SessionGuard};
use crate::trace;
use libpvm::{Inbox, Runtime};
use sempa_proto::message::CTX_TASK_CONTROL;
use sempa_proto::trace::int_item;
use sempa_proto::{Message, PvmError, PvmResult};
use sempa_ring::biased_lock::{BiasedLock, BiasedLockGuard};
use std::cell::Cell;
use std::collections::VecDeque;
use std::os::fd::RawFd;
use std::sync::atomic::Ordering::{Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
use std::thread;
use std::time::{Duration, Instant};

/// A matching function of the program. Its arguments are the buffer number, the requested tid and
/// the requested tag; see `pvm_recvf`.
pub(crate) type Matcher = extern "C" fn(i32, i32, i32) -> i32;

/// Time for which a receive call takes in messages until one matches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitMode {
    /// The call takes in at most one message, which must have arrived.
    OneMessage,
    /// The call takes in messages that have arrived, and does not wait for others.
    NoWait,
    Deadline(Instant),
    Forever,
}

impl WaitMode {
    fn waits(self) -> bool {
        matches!(self, Self::Deadline(_) | Self::Forever)
    }

    /// True if a call that has taken in a message without a match ends.
    fn ends_after_intake(self) -> bool {
        self == Self::OneMessage || self.is_over()
    }

    /// True if the time for which the call waits is over.
    fn is_over(self) -> bool {
        matches!(self, Self::Deadline(deadline) if Instant::now() >= deadline)
    }
}

/// Time between two attempts of a thread to get the right to take in messages.
const RIGHT_POLL_INTERVAL: Duration = Duration::from_micros(500);
/// Number of attempts before a thread sleeps between them. Without handlers, another thread has the
/// right for microseconds.
const RIGHT_YIELDS_MAX: u32 = 50;

thread_local! {
    /// True while this thread runs a message handler.
    static IN_HANDLER: Cell<bool> = const { Cell::new(false) };
}

#[inline]
pub(crate) fn is_in_handler() -> bool {
    HANDLER_RUNS.load(Relaxed) && is_handler_thread()
}

#[cold]
fn is_handler_thread() -> bool {
    IN_HANDLER.get()
}

/// Messages that were removed from the runtime's inbox but are not taken in yet. The guard is the
/// right to take in messages, which only one thread at a time has.
pub(crate) type ArrivalsGuard = BiasedLockGuard<'static, VecDeque<Message>>;

static ARRIVALS: BiasedLock<VecDeque<Message>> = BiasedLock::new(VecDeque::new());
/// Number of messages in [`ARRIVALS`]. A call reads it without the lock.
static ARRIVALS_LEN: AtomicUsize = AtomicUsize::new(0);
/// True if a ring contained another message when the last small message was taken in.
static RING_HAS_MESSAGE: AtomicBool = AtomicBool::new(false);
/// True if the messages in [`ARRIVALS`] must be forgotten by the thread that has the right to take
/// in messages: it runs a handler, in which the process stops being the task that got them.
static MUST_FORGET_ARRIVALS: AtomicBool = AtomicBool::new(false);
/// True while a thread runs a message handler.
static HANDLER_RUNS: AtomicBool = AtomicBool::new(false);
/// Number of messages that were taken in. Changes only under the lock of the session.
static INTAKE_COUNT: AtomicU64 = AtomicU64::new(0);
/// Number of threads that wait until a message is taken in. Increases only under the lock of the
/// session.
static WAITING_THREADS: AtomicU32 = AtomicU32::new(0);

/// Waits for the right to take in messages.
pub(crate) fn lock_arrivals() -> ArrivalsGuard {
    let mut arrivals = ARRIVALS.lock();
    clear_if_forgotten(&mut arrivals);
    arrivals
}

/// Returns the right to take in messages; `None` if another thread has this right.
#[inline]
fn try_lock_arrivals() -> Option<ArrivalsGuard> {
    let mut arrivals = ARRIVALS.try_lock()?;
    clear_if_forgotten(&mut arrivals);
    Some(arrivals)
}

/// As [`lock_arrivals`], but returns `None` if the call must not wait any longer: after the
/// deadline of `wait_mode`, or, for a call that does not wait for messages, while a handler of the
/// program runs in another thread. That handler may itself wait for the calling thread.
fn lock_arrivals_in_time(wait_mode: WaitMode) -> Option<ArrivalsGuard> {
    if wait_mode == WaitMode::Forever {
        return Some(lock_arrivals());
    }
    let mut yield_count = 0;
    loop {
        if let Some(arrivals) = try_lock_arrivals() {
            return Some(arrivals);
        }
        if wait_mode.is_over() || !wait_mode.waits() && HANDLER_RUNS.load(Relaxed) {
            return None;
        }
        if yield_count < RIGHT_YIELDS_MAX {
            yield_count += 1;
            thread::yield_now();
        } else {
            thread::sleep(RIGHT_POLL_INTERVAL);
        }
    }
}

/// Removes and returns the oldest message.
fn pop_arrival(arrivals: &mut ArrivalsGuard) -> Option<Message> {
    clear_if_forgotten(arrivals);
    let message = arrivals.pop_front();
    ARRIVALS_LEN.store(arrivals.len(), Relaxed);
    message
}

/// Forgets the messages that have arrived: this process is no longer the task that got them.
pub(crate) fn forget_arrivals() {
    MUST_FORGET_ARRIVALS.store(true, SeqCst);
    // Without the right, the thread that has it forgets the messages before it takes in another.
    drop(try_lock_arrivals());
}

/// Completes a call of [`forget_arrivals`].
#[inline]
fn clear_if_forgotten(arrivals: &mut ArrivalsGuard) {
    if MUST_FORGET_ARRIVALS.load(Relaxed) && MUST_FORGET_ARRIVALS.swap(false, SeqCst) {
        arrivals.clear();
        ARRIVALS_LEN.store(0, Relaxed);
    }
}

/// Returns the descriptor that is readable while messages have arrived that were not taken in.
pub(crate) fn ready_fd(rt: &Runtime) -> Option<RawFd> {
    let ready_fd = rt.ready_fd();
    if !is_in_handler() {
        put_back_if_watched(rt, &mut lock_arrivals());
    }
    ready_fd
}

/// Puts the messages back into the inbox if a descriptor of the program shows whether there are
/// messages in the inbox.
fn put_back_if_watched(rt: &Runtime, arrivals: &mut ArrivalsGuard) {
    rt.put_back_if_watched(arrivals);
    ARRIVALS_LEN.store(arrivals.len(), Relaxed);
}

/// Takes in all messages that have arrived, and returns true. Does nothing and returns false inside
/// a handler, and while another thread runs a handler: the messages stay where they are.
pub(crate) fn take_in_all(rt: &Runtime) -> bool {
    if is_in_handler() {
        return false;
    }
    let Some(mut arrivals) = lock_arrivals_in_time(WaitMode::NoWait) else {
        return false;
    };
    rt.drain_inbox_into(&mut arrivals);
    let mut session = session::lock();
    while let Some(message) = pop_arrival(&mut arrivals) {
        session = take_in(rt, session, message);
    }
    true
}

/// Takes in the next message, after the call has sent messages. PVM does the same if it finds the
/// message while it writes. Without handlers the call only considers messages that an earlier call
/// has found, because the check for others would make each send slower.
#[inline]
pub(crate) fn take_in_after_send(mut session: SessionGuard) {
    let is_known_message_in_ring = RING_HAS_MESSAGE.load(Relaxed);
    if is_known_message_in_ring {
        RING_HAS_MESSAGE.store(false, Relaxed);
        if try_take_in_small(&mut session, None, true).is_some() {
            return;
        }
    }
    let takes_in =
        is_known_message_in_ring || session.has_intake_effects() || ARRIVALS_LEN.load(Relaxed) != 0;
    if takes_in && let Some(rt) = session.runtime.clone() {
        drop(take_in_next(&rt, session, WaitMode::OneMessage));
    }
}

/// What a call has taken in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Intake {
    OneMessage,
    /// Nothing that counts, but the list may have changed: another thread has taken in a message,
    /// or this thread a message that PVM does not have.
    Uncounted,
    /// Nothing: no message has arrived, and the time for which the call waits is over.
    Nothing,
}

/// Takes in the next message if one has arrived. Does nothing inside a handler, or if
/// [`lock_arrivals_in_time`] does not give this thread the right to take in messages.
fn take_in_next(
    rt: &Runtime,
    session: SessionGuard,
    wait_mode: WaitMode,
) -> (SessionGuard, Intake) {
    if is_in_handler() {
        return (session, Intake::Nothing);
    }
    // With the session locked, this thread must not wait for the right: another thread that has
    // the right may wait for the session.
    if ARRIVALS_LEN.load(Relaxed) != 0
        && let Some(mut arrivals) = try_lock_arrivals()
        && let Some(message) = pop_arrival(&mut arrivals)
    {
        return take_in_and_unlock(rt, session, arrivals, message);
    }
    drop(session);
    let Some(mut arrivals) = lock_arrivals_in_time(wait_mode) else {
        return (session::lock(), Intake::Nothing);
    };
    if arrivals.is_empty() {
        rt.take_arrivals(&mut arrivals);
    }
    match pop_arrival(&mut arrivals) {
        Some(message) => take_in_and_unlock(rt, session::lock(), arrivals, message),
        None => (session::lock(), Intake::Nothing),
    }
}

/// Takes in a message and gives up the right to take in messages.
fn take_in_and_unlock(
    rt: &Runtime,
    session: SessionGuard,
    mut arrivals: ArrivalsGuard,
    message: Message,
) -> (SessionGuard, Intake) {
    let intake = if control::is_unknown_to_pvm(&message) {
        Intake::Uncounted
    } else {
        Intake::OneMessage
    };
    let session = take_in(rt, session, message);
    if !arrivals.is_empty() {
        // The program may have requested the descriptor since these messages arrived.
        put_back_if_watched(rt, &mut arrivals);
    }
    (session, intake)
}

/// Takes in a message and wakes the threads that wait. The session is unlocked while a handler
/// runs.
fn take_in(rt: &Runtime, mut session: SessionGuard, message: Message) -> SessionGuard {
    if message.ctx == CTX_TASK_CONTROL || !session.handlers.is_empty() {
        drop(session);
        dispatch_message(rt, message);
        session = session::lock();
    } else {
        // An error means that the program has the maximum number of buffers (millions of
        // messages). The message is lost, because there is no call that could report the error.
        let _ = session.queue_message(message);
    }
    count_intake(&session);
    session
}

/// Counts a message that was taken in, and wakes the threads that wait.
#[inline]
fn count_intake(session: &SessionGuard) {
    // Only a thread that has the session changes the count, and a thread that waits has increased
    // `WAITING_THREADS` while it had the session.
    INTAKE_COUNT.store(INTAKE_COUNT.load(Relaxed) + 1, Relaxed);
    if WAITING_THREADS.load(Relaxed) != 0
        && let Some(rt) = &session.runtime
    {
        rt.wake_waiting_threads();
    }
}

/// Result of [`take_in_small`] for a receive call.
enum SmallIntake {
    /// The message that was taken in matches. It is not in the list.
    Match(i32),
    /// The list contains the message that was taken in. After [`Intake::Nothing`] the caller must
    /// take in the next message in the ordinary way.
    Other(Intake),
}

/// Takes in a small message that is in a ring on this host, and waits awake for one if `waits` is
/// true. `request` is what the receive call accepts if all messages of the list were examined and
/// there is no matching function.
#[inline]
fn take_in_small(
    mut session: SessionGuard,
    request: Option<&Request>,
    waits: bool,
) -> (SessionGuard, SmallIntake) {
    let intake_count = INTAKE_COUNT.load(Relaxed);
    if let Some(intake) = try_take_in_small(&mut session, request, true) {
        return (session, intake);
    }
    let may_wait = waits && may_take_in_small(&session);
    let Some(rt) = session.runtime.clone().filter(|_| may_wait) else {
        return (session, SmallIntake::Other(Intake::Nothing));
    };
    drop(session);
    let has_record = rt.spin_for_small();
    let mut session = session::lock();
    if INTAKE_COUNT.load(Relaxed) != intake_count {
        return (session, SmallIntake::Other(Intake::Uncounted));
    }
    let intake = has_record
        .then(|| try_take_in_small(&mut session, request, false))
        .flatten()
        .unwrap_or(SmallIntake::Other(Intake::Nothing));
    (session, intake)
}

/// True if the next message may be taken in from a ring: no earlier message waits, and no handler
/// may want it.
#[inline]
fn may_take_in_small(session: &Session) -> bool {
    session.handlers.is_empty() && ARRIVALS_LEN.load(Relaxed) == 0 && !is_in_handler()
}

/// Takes in a small message that is in a ring on this host. Returns `None` if there is none, or if
/// the message must be taken in in the ordinary way.
#[inline]
fn try_take_in_small(
    session: &mut SessionGuard,
    request: Option<&Request>,
    looks_ahead: bool,
) -> Option<SmallIntake> {
    if !may_take_in_small(session) {
        return None;
    }
    let Session {
        runtime: Some(rt),
        buffers,
        ..
    } = &mut **session
    else {
        return None;
    };
    let _right = try_lock_arrivals()?;
    let mut buffer = buffers.take_spare_buffer();
    let Some(head) = rt.try_receive_small(buffer.unsealed_memory(), looks_ahead) else {
        buffers.keep_spare_buffer(buffer);
        return None;
    };
    RING_HAS_MESSAGE.store(head.is_followed, Relaxed);
    buffer.set_small_message_head(&head, rt.tid().raw());
    // See `take_in` for errors.
    let mut intake = SmallIntake::Other(Intake::OneMessage);
    if request.is_some_and(|request| request.matches(buffer.header())) {
        if let Ok(mid) = session.buffers.add(buffer) {
            intake = SmallIntake::Match(mid);
        }
    } else {
        let _ = session.queue_buffer(buffer);
    }
    count_intake(session);
    Some(intake)
}

/// Dispatches one message: to the library, to a handler, or to the list of messages that can be
/// received.
fn dispatch_message(rt: &Runtime, message: Message) {
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
            let Ok(mid) = session.buffers.add(Buffer::from_message(message).into()) else {
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
    // No other thread runs a handler: only one thread has the right to take in messages.
    IN_HANDLER.set(true);
    HANDLER_RUNS.store(true, Relaxed);
    trace::run_program_code(|| handler(mid));
    HANDLER_RUNS.store(false, Relaxed);
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

/// Returns a request for messages of the current context.
fn request_in_context(tid: i32, tag: i32) -> Request {
    Request {
        src: tid,
        tag,
        ctx: pvmmyctx.load(Relaxed),
    }
}

/// The library's matching function for programs: returns 1 if the message matches, else 0.
pub(crate) fn default_matcher(mid: i32, tid: i32, tag: i32) -> i32 {
    session::lock().buffers.get(mid).map_or(0, |buffer| {
        i32::from(request_in_context(tid, tag).matches(buffer.header()))
    })
}

/// The search of a receive call for its message. Each message of the list is examined once.
struct Search {
    tid: i32,
    tag: i32,
    /// Messages before this number of the list were examined.
    examined_seq: u64,
}

impl Search {
    fn new(tid: i32, tag: i32) -> Self {
        Self {
            tid,
            tag,
            examined_seq: 0,
        }
    }

    /// Examines the messages that were not examined yet. Returns the locked session and the number
    /// of the message that the receive call returns; `None` if no message matches. The message
    /// stays in the list.
    ///
    /// # Errors
    /// A negative result of the program's matching function.
    fn examine_list(&mut self, mut session: SessionGuard) -> Result<MatchResult, i32> {
        let examined_seq = std::mem::replace(&mut self.examined_seq, session.receivable.next_seq());
        match session.matcher {
            Some(matcher) => {
                let mids: Vec<i32> = session.receivable.mids_since(examined_seq).collect();
                drop(session);
                let matching_mid = self.find_ranked(matcher, &mids)?;
                Ok((session::lock(), matching_mid))
            }
            None => {
                let request = request_in_context(self.tid, self.tag);
                let matching_mid = if examined_seq == 0 {
                    session.find_receivable(&request)
                } else {
                    // Only messages that this call has taken in: mostly one.
                    let is_match = |mid: &i32| {
                        session
                            .buffers
                            .get(*mid)
                            .is_ok_and(|buffer| request.matches(buffer.header()))
                    };
                    session.receivable.mids_since(examined_seq).find(is_match)
                };
                Ok((session, matching_mid))
            }
        }
    }

    /// Returns the message that the program's matching function ranks highest; of several messages
    /// with the same rank, the first one. `None` if no message matches. Rank 1 ends the search.
    fn find_ranked(&self, matcher: Matcher, mids: &[i32]) -> Result<Option<i32>, i32> {
        let mut best_match: Option<(i32, i32)> = None;
        for mid in mids {
            match matcher(*mid, self.tid, self.tag) {
                error @ ..0 => return Err(error),
                0 => (),
                1 => return Ok(Some(*mid)),
                rank if best_match.is_none_or(|(best_rank, _)| rank > best_rank) => {
                    best_match = Some((rank, *mid))
                }
                _ => (),
            }
        }
        Ok(best_match.map(|(_, mid)| mid))
    }
}

/// The locked session, and the number of the matching message; `None` if no message matches.
type MatchResult = (SessionGuard, Option<i32>);

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

/// Purpose of a wait for a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Purpose {
    /// The message stays in the list.
    Probe,
    /// The message is received. If it was not in the list before, it does not enter the list.
    Receive,
    /// As `Receive`, after [`receive_small`] has waited awake in vain.
    ReceiveAfterSpin,
}

/// Waits for a matching message. Returns the locked session and the message's number; `None` in
/// place of the number if the wait ends without a message. `on_valid_arguments` is called once,
/// after the arguments have been checked.
fn wait_for_message(
    tid: i32,
    tag: i32,
    wait_mode: WaitMode,
    purpose: Purpose,
    on_valid_arguments: fn(&mut Session),
) -> Result<MatchResult, ReceiveError> {
    let mut session = session::lock();
    session.runtime_or_enrol()?;
    if !is_valid_request(tid, tag) {
        return Err(PvmError::BadParam.into());
    }
    if is_in_handler() && wait_mode.waits() {
        return Err(PvmError::NotImpl.into());
    }
    on_valid_arguments(&mut session);
    let mut search = Search::new(tid, tag);
    let mut is_last_search = false;
    let mut has_tried_rings = purpose == Purpose::ReceiveAfterSpin;
    loop {
        let intake_count = INTAKE_COUNT.load(Relaxed);
        let matching_mid;
        (session, matching_mid) = search
            .examine_list(session)
            .map_err(ReceiveError::Matcher)?;
        if matching_mid.is_some() || is_last_search {
            return Ok((session, matching_mid));
        }
        let request = request_in_context(tid, tag);
        let takes_match = purpose != Purpose::Probe && session.matcher.is_none();
        let request = takes_match.then_some(&request);
        let small_intake;
        (session, small_intake) = if std::mem::take(&mut has_tried_rings) {
            (session, SmallIntake::Other(Intake::Nothing))
        } else {
            take_in_small(session, request, wait_mode == WaitMode::Forever)
        };
        let intake = match small_intake {
            SmallIntake::Match(mid) => return Ok((session, Some(mid))),
            SmallIntake::Other(Intake::Nothing) => {
                let rt = session.runtime.clone().ok_or(PvmError::SysErr)?;
                let intake;
                (session, intake) = take_in_or_wait(&rt, session, wait_mode, intake_count)?;
                intake
            }
            SmallIntake::Other(intake) => intake,
        };
        is_last_search = match intake {
            Intake::OneMessage => wait_mode.ends_after_intake(),
            Intake::Uncounted => wait_mode.is_over(),
            Intake::Nothing => return Ok((session, None)),
        };
    }
}

/// Takes in the next message, and waits for it as `wait_mode` states. `intake_count` is the number
/// of messages that had been taken in before the caller examined the list: if the number has
/// changed, the wait ends.
fn take_in_or_wait(
    rt: &Runtime,
    session: SessionGuard,
    wait_mode: WaitMode,
    intake_count: u64,
) -> PvmResult<(SessionGuard, Intake)> {
    if INTAKE_COUNT.load(Relaxed) != intake_count {
        return Ok((session, Intake::Uncounted));
    }
    let deadline = match wait_mode {
        // The wait also finds messages that have arrived already.
        WaitMode::Deadline(deadline) if ARRIVALS_LEN.load(Relaxed) == 0 => Some(deadline),
        WaitMode::Forever if ARRIVALS_LEN.load(Relaxed) == 0 => None,
        _ => {
            return Ok(match take_in_next(rt, session, wait_mode) {
                // Another thread has taken in what had arrived.
                (session, Intake::Nothing) if wait_mode.waits() => (session, Intake::Uncounted),
                other => other,
            });
        }
    };
    WAITING_THREADS.fetch_add(1, Relaxed);
    drop(session);
    let mut take_arrivals = |inbox: &mut Inbox| {
        if INTAKE_COUNT.load(Relaxed) != intake_count {
            return Some(WaitEnd::OtherThreadHasTakenIn);
        }
        if inbox.is_empty() {
            return None;
        }
        let Some(mut arrivals) = try_lock_arrivals() else {
            return Some(WaitEnd::OtherThreadTakesIn);
        };
        inbox.take_arrivals(&mut arrivals);
        Some(WaitEnd::Arrivals(arrivals))
    };
    let wait_result = rt.wait_for_inbox(deadline, &mut take_arrivals);
    WAITING_THREADS.fetch_sub(1, Relaxed);
    let mut arrivals = match wait_result? {
        None => return Ok((session::lock(), Intake::Nothing)),
        Some(WaitEnd::OtherThreadHasTakenIn) => {
            return Ok((session::lock(), Intake::Uncounted));
        }
        Some(WaitEnd::Arrivals(arrivals)) => arrivals,
        Some(WaitEnd::OtherThreadTakesIn) => {
            let Some(mut arrivals) = lock_arrivals_in_time(wait_mode) else {
                // The other thread may have taken in the message that this call waits for.
                return Ok((session::lock(), Intake::Uncounted));
            };
            if arrivals.is_empty() {
                rt.take_arrivals(&mut arrivals);
            }
            arrivals
        }
    };
    Ok(match pop_arrival(&mut arrivals) {
        Some(message) => take_in_and_unlock(rt, session::lock(), arrivals, message),
        None => (session::lock(), Intake::Uncounted),
    })
}

/// Event that ends the wait of a receive call.
enum WaitEnd {
    Arrivals(ArrivalsGuard),
    /// Messages have arrived while another thread has the right to take in messages.
    OtherThreadTakesIn,
    OtherThreadHasTakenIn,
}

/// Result of the first attempt of a receive call; see [`receive_small`].
enum SmallReceipt {
    /// The number of the message's buffer.
    Received(i32),
    /// The call has waited awake for a message, or may not do that. It must go on to sleep.
    NoMessage,
    /// The call must begin again in the ordinary way.
    Unknown,
}

/// Receives the next message as [`receive`] does, if the message is small, comes through a ring of
/// this host and matches, and if no message of the list matches. Waits awake for such a message. A
/// small message that does not match is in the list then.
#[inline]
fn receive_small(tid: i32, tag: i32) -> SmallReceipt {
    let mut session = session::lock();
    let is_valid = session.runtime.as_ref().is_some_and(Runtime::is_connected)
        && is_valid_request(tid, tag)
        && !is_in_handler();
    if !is_valid || session.matcher.is_some() {
        return SmallReceipt::Unknown;
    }
    let request = request_in_context(tid, tag);
    if !session.receivable.is_empty() && session.find_receivable(&request).is_some() {
        return SmallReceipt::Unknown;
    }
    session.free_receive_buffer();
    match take_in_small(session, Some(&request), true) {
        (mut session, SmallIntake::Match(mid)) => {
            session.receive_buffer_id = mid;
            SmallReceipt::Received(mid)
        }
        (_, SmallIntake::Other(Intake::Nothing)) => SmallReceipt::NoMessage,
        (_, SmallIntake::Other(_)) => SmallReceipt::Unknown,
    }
}

/// Receives a message, makes its buffer the active receive buffer and returns the buffer's number;
/// `None` if no message arrives in time. The previous active receive buffer is freed, even if no
/// message arrives.
pub(crate) fn receive(
    tid: i32,
    tag: i32,
    wait_mode: WaitMode,
) -> Result<Option<i32>, ReceiveError> {
    let mut purpose = Purpose::Receive;
    if wait_mode == WaitMode::Forever {
        match receive_small(tid, tag) {
            SmallReceipt::Received(mid) => return Ok(Some(mid)),
            SmallReceipt::NoMessage => purpose = Purpose::ReceiveAfterSpin,
            SmallReceipt::Unknown => {}
        }
    }
    let (mut session, Some(mid)) =
        wait_for_message(tid, tag, wait_mode, purpose, Session::free_receive_buffer)?
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
    Ok(wait_for_message(tid, tag, WaitMode::OneMessage, Purpose::Probe, |_| ())?.1)
}

/// Waits for a message and returns its buffer, without making it the active receive buffer
/// (`pvm_precv`).
pub(crate) fn receive_detached(tid: i32, tag: i32) -> Result<Buffer, ReceiveError> {
    let (mut session, matching_mid) =
        wait_for_message(tid, tag, WaitMode::Forever, Purpose::Receive, |_| ())?;
    let mid = matching_mid.ok_or(PvmError::SysErr)?;
    session.unqueue_message(mid);
    Ok(session.buffers.remove(mid)?)
}

/// Takes in messages until `check` returns a value; returns that value.
///
/// # Errors
/// `SysErr` if the connection to the daemon is lost, `NotImpl` inside a handler.
pub(crate) fn wait_until<R>(
    rt: &Runtime,
    mut check: impl FnMut(&mut Session) -> Option<R>,
) -> PvmResult<R> {
    let mut session = session::lock();
    loop {
        let intake_count = INTAKE_COUNT.load(Relaxed);
        if let Some(value) = check(&mut session) {
            return Ok(value);
        }
        if is_in_handler() {
            return Err(PvmError::NotImpl);
        }
        (session, _) = take_in_or_wait(rt, session, WaitMode::Forever, intake_count)?;
    }
}
