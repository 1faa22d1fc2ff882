//! Calls to send and receive, matching functions, message handlers and contexts.

#![allow(unsafe_code)]

use super::trace_items::{
    active_bytes, apart_items, array_items, context, left_in, received_items, trace_ints,
    wanted_items,
};
use super::zero;
use crate::abi::TimeVal;
use crate::buffers::told_len;
use crate::handlers::{Filter, HandlerFn};
use crate::memory::{Out, Strided};
use crate::receive::{self, Fault, Matcher, Patience};
use crate::send;
use crate::session::{self, answer, lock, report};
use crate::trace;
use sempa_proto::trace::int;
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Sends the active send buffer.
#[unsafe(no_mangle)]
extern "C" fn pvm_send(tid: c_int, tag: c_int) -> c_int {
    trace::call(
        "send",
        || {
            vec![
                int("MNB", active_bytes()),
                int("DST", tid),
                int("MC", tag),
                int("MCX", context()),
            ]
        },
        || answer("pvm_send", zero(send::send(tid, tag))),
        trace::cc,
    )
}

/// Sends the active send buffer to several tasks.
///
/// # Safety
/// `tids` must be null or hold `count` ints.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_mcast(tids: *const c_int, count: c_int, tag: c_int) -> c_int {
    trace::call(
        "mcast",
        // SAFETY: by this function's contract.
        || unsafe {
            vec![
                int("MNB", active_bytes()),
                int("MC", tag),
                int("MCX", context()),
                trace_ints("MDL", tids, count),
            ]
        },
        || {
            // SAFETY: by this function's contract.
            let tids = unsafe { Strided::new(tids, count, 1) };
            // As in PVM, the process enrols before its arguments are checked.
            let result =
                session::runtime().and_then(|_| zero(send::multicast(&tids?.to_vec(), tag)));
            answer("pvm_mcast", result)
        },
        trace::cc,
    )
}

/// Wraps an array of a data type (`PVM_*`) as bytes.
unsafe fn array(items: *const c_void, count: c_int, kind: c_int) -> PvmResult<Strided<u8>> {
    let size = send::type_bytes(kind)?;
    let count = usize::try_from(count).map_err(|_| PvmError::BadParam)?;
    // SAFETY: the caller's array has `count` elements of this type.
    unsafe { Strided::run(items.cast(), count * size) }
}

/// Sends an array without using the active send buffer.
///
/// # Safety
/// `items` must be null or an array of `count` elements of the type.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_psend(
    tid: c_int,
    tag: c_int,
    items: *const c_void,
    count: c_int,
    kind: c_int,
) -> c_int {
    trace::call(
        "psend",
        || {
            array_items(
                vec![int("DST", tid), int("MC", tag), int("MCX", context())],
                items,
                count,
                kind,
            )
        },
        || {
            // SAFETY: by this function's contract.
            let items = unsafe { array(items, count, kind) };
            answer(
                "pvm_psend",
                items.and_then(|items| zero(send::send_array(tid, tag, &items))),
            )
        },
        trace::cc,
    )
}

/// Receives a message into an array without using the active receive buffer.
///
/// # Safety
/// `items` must be null or an array of `count` elements of the type. The other pointers must be
/// null or valid for one int.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_precv(
    tid: c_int,
    tag: c_int,
    items: *mut c_void,
    count: c_int,
    kind: c_int,
    from_tid: *mut c_int,
    from_tag: *mut c_int,
    from_len: *mut c_int,
) -> c_int {
    trace::call(
        "precv",
        || array_items(wanted_items(tid, tag), items, count, kind),
        || {
            // SAFETY: by this function's contract.
            let (items, from_tid, from_tag, from_len) = unsafe {
                (
                    array(items, count, kind),
                    Out::new(from_tid),
                    Out::new(from_tag),
                    Out::new(from_len),
                )
            };
            let receive = || {
                let items = items?;
                let mut buffer = receive::receive_apart(tid, tag)?;
                from_tid.set(buffer.src);
                from_tag.set(buffer.tag);
                // A message that this task sent to itself may have been packed in place.
                let body = buffer.wire()?;
                from_len.set(told_len(body.len()));
                items.fill_raw(&body[..body.len().min(items.len())]);
                Ok(Some(0))
            };
            received("pvm_precv", receive())
        },
        // SAFETY: by this function's contract.
        |code| unsafe {
            apart_items(
                *code,
                left_in(from_len),
                left_in(from_tag),
                left_in(from_tid),
            )
        },
    )
}

/// Converts the result of a receive: the number of the buffer, 0 for no message, or the code of the
/// error after reporting it.
fn received(place: &str, result: Result<Option<i32>, Fault>) -> c_int {
    match result {
        Ok(mid) => mid.unwrap_or(0),
        Err(Fault::Error(error)) => report(place, error.code()),
        Err(Fault::Matcher(code)) => report(place, code),
    }
}

/// Waits for a message and makes it the active receive buffer.
#[unsafe(no_mangle)]
extern "C" fn pvm_recv(tid: c_int, tag: c_int) -> c_int {
    trace::call(
        "recv",
        || wanted_items(tid, tag),
        || received("pvm_recv", receive::receive(tid, tag, Patience::Endless)),
        received_items,
    )
}

/// Receives without waiting. Returns 0 if no matching message has arrived.
#[unsafe(no_mangle)]
extern "C" fn pvm_nrecv(tid: c_int, tag: c_int) -> c_int {
    trace::call(
        "nrecv",
        || wanted_items(tid, tag),
        || received("pvm_nrecv", receive::receive(tid, tag, Patience::None)),
        received_items,
    )
}

/// Receives, and waits at most the given time; a null pointer means without limit.
///
/// # Safety
/// `time` must be null or point to a structure.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_trecv(tid: c_int, tag: c_int, time: *const TimeVal) -> c_int {
    trace::call(
        "trecv",
        // SAFETY: by this function's contract.
        || unsafe {
            {
                let mut items = wanted_items(tid, tag);
                let time = time.as_ref();
                items.extend([
                    int("MTS", time.map_or(-1, |t| t.tv_sec as c_int)),
                    int("MTU", time.map_or(-1, |t| t.tv_usec as c_int)),
                ]);
                items
            }
        },
        || {
            // SAFETY: by this function's contract.
            let patience = match unsafe { time.as_ref() } {
                None => Patience::Endless,
                Some(time) if time.tv_sec < 0 => return 0,
                Some(time) if time.tv_sec == 0 && time.tv_usec <= 0 => Patience::None,
                Some(time) => {
                    let span = Duration::from_secs(time.tv_sec as u64)
                        + Duration::from_micros(time.tv_usec.max(0) as u64);
                    Instant::now()
                        .checked_add(span)
                        .map_or(Patience::Endless, Patience::Until)
                }
            };
            received("pvm_trecv", receive::receive(tid, tag, patience))
        },
        received_items,
    )
}

/// Returns the number of the message that a receive would take, without taking it; 0 if none has
/// arrived.
#[unsafe(no_mangle)]
extern "C" fn pvm_probe(tid: c_int, tag: c_int) -> c_int {
    trace::call(
        "probe",
        || wanted_items(tid, tag),
        || received("pvm_probe", receive::probe(tid, tag)),
        trace::cc,
    )
}

extern "C" fn default_matcher(mid: c_int, tid: c_int, tag: c_int) -> c_int {
    receive::default_matcher(mid, tid, tag)
}

/// Sets the matching function and returns the previous one. Null restores the library's own.
#[unsafe(no_mangle)]
extern "C" fn pvm_recvf(matcher: Option<Matcher>) -> Option<Matcher> {
    trace::call(
        "recvf",
        trace::nothing,
        || {
            let own = default_matcher as Matcher;
            // Stored as `None`, because the library's own matching is faster without the call
            // through a pointer.
            let matcher = matcher.filter(|matcher| *matcher as usize != own as usize);
            Some(std::mem::replace(&mut lock().matcher, matcher).unwrap_or(own))
        },
        |_| trace::nothing(),
    )
}

/// Adds a message handler and returns its number.
#[unsafe(no_mangle)]
extern "C" fn pvm_addmhf(src: c_int, tag: c_int, ctx: c_int, handler: Option<HandlerFn>) -> c_int {
    trace::call(
        "addmhf",
        || vec![int("RST", src), int("RMC", tag), int("RCX", ctx)],
        || {
            let add = || {
                session::runtime()?;
                lock()
                    .handlers
                    .add(Filter { src, tag, ctx }, handler.ok_or(PvmError::BadParam)?)
            };
            answer("pvm_addmhf", add())
        },
        |id| vec![int("MHI", *id)],
    )
}

/// Removes a message handler.
#[unsafe(no_mangle)]
extern "C" fn pvm_delmhf(id: c_int) -> c_int {
    trace::call(
        "delmhf",
        || vec![int("MHI", id)],
        || answer("pvm_delmhf", zero(lock().handlers.remove(id))),
        trace::cc,
    )
}

/// Returns the current message context.
#[unsafe(no_mangle)]
extern "C" fn pvm_getcontext() -> c_int {
    trace::call(
        "getcontext",
        trace::nothing,
        || {
            drop(lock());
            crate::data::pvmmyctx.load(Relaxed)
        },
        |ctx| vec![int("CXC", *ctx)],
    )
}

/// Sets the current message context and returns the previous one.
#[unsafe(no_mangle)]
extern "C" fn pvm_setcontext(ctx: c_int) -> c_int {
    trace::call(
        "setcontext",
        || vec![int("CXS", ctx)],
        || {
            drop(lock());
            crate::data::pvmmyctx.swap(ctx, Relaxed)
        },
        trace::cc,
    )
}

/// Returns a new message context that no other task uses.
#[unsafe(no_mangle)]
extern "C" fn pvm_newcontext() -> c_int {
    trace::call(
        "newcontext",
        trace::nothing,
        || answer("pvm_newcontext", crate::ask::new_context()),
        |ctx| vec![int("CXN", *ctx)],
    )
}

/// Frees a message context.
#[unsafe(no_mangle)]
extern "C" fn pvm_freecontext(ctx: c_int) -> c_int {
    trace::call(
        "freecontext",
        || vec![int("CXF", ctx)],
        || answer("pvm_freecontext", zero(crate::ask::free_context(ctx))),
        trace::cc,
    )
}
