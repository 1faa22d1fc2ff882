//! Calls to send and receive messages, and calls for matching functions, message handlers and
//! contexts.

#![allow(unsafe_code)]

use super::trace_items::{
    append_array_items, c_ints_item, current_context, precv_exit_items, read_int,
    receive_entry_items, receive_exit_items, send_buffer_len,
};
use super::zero_on_success;
use crate::abi::TimeVal;
use crate::buffers::len_as_int;
use crate::handlers::{Filter, HandlerFn};
use crate::memory::{OutParam, Strided};
use crate::receive::{self, Matcher, ReceiveError, WaitMode};
use crate::send;
use crate::session::{self, lock, report_error, value_or_report};
use crate::trace;
use sempa_proto::trace::int_item;
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

/// Sends the active send buffer to the task `tid` with the tag `tag`.
#[unsafe(no_mangle)]
extern "C" fn pvm_send(tid: c_int, tag: c_int) -> c_int {
    trace::traced_leaf_call(
        "send",
        || {
            vec![
                int_item("MNB", send_buffer_len()),
                int_item("DST", tid),
                int_item("MC", tag),
                int_item("MCX", current_context()),
            ]
        },
        || {
            value_or_report(
                "pvm_send",
                zero_on_success(send::send_active_buffer(tid, tag)),
            )
        },
        trace::return_code_items,
    )
}

/// Sends the active send buffer to several tasks.
///
/// # Safety
/// `tids` must be null or contain `count` ints.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_mcast(tids: *const c_int, count: c_int, tag: c_int) -> c_int {
    trace::traced_call(
        "mcast",
        // SAFETY: by this function's contract.
        || unsafe {
            vec![
                int_item("MNB", send_buffer_len()),
                int_item("MC", tag),
                int_item("MCX", current_context()),
                c_ints_item("MDL", tids, count),
            ]
        },
        || {
            // SAFETY: by this function's contract.
            let tids = unsafe { Strided::new(tids, count, 1) };
            // As in PVM, the process enrols before its arguments are checked.
            let result = session::runtime()
                .and_then(|_| zero_on_success(send::multicast(&tids?.to_vec(), tag)));
            value_or_report("pvm_mcast", result)
        },
        trace::return_code_items,
    )
}

/// Wraps an array of a data type (`PVM_*`) as bytes.
///
/// # Safety
/// `items` must be null or an array of `count` elements of the type.
unsafe fn typed_array(items: *const c_void, count: c_int, kind: c_int) -> PvmResult<Strided<u8>> {
    let element_bytes = send::element_bytes(kind)?;
    let count = usize::try_from(count).map_err(|_| PvmError::BadParam)?;
    // SAFETY: the caller's array has `count` elements of this type.
    unsafe { Strided::contiguous(items.cast(), count * element_bytes) }
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
    trace::traced_call(
        "psend",
        || {
            append_array_items(
                vec![
                    int_item("DST", tid),
                    int_item("MC", tag),
                    int_item("MCX", current_context()),
                ],
                items,
                count,
                kind,
            )
        },
        || {
            // SAFETY: by this function's contract.
            let items = unsafe { typed_array(items, count, kind) };
            value_or_report(
                "pvm_psend",
                items.and_then(|items| zero_on_success(send::send_array(tid, tag, &items))),
            )
        },
        trace::return_code_items,
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
    trace::traced_call(
        "precv",
        || append_array_items(receive_entry_items(tid, tag), items, count, kind),
        || {
            // SAFETY: by this function's contract.
            let (items, from_tid, from_tag, from_len) = unsafe {
                (
                    typed_array(items, count, kind),
                    OutParam::new(from_tid),
                    OutParam::new(from_tag),
                    OutParam::new(from_len),
                )
            };
            let receive_into_array = || {
                let items = items?;
                let mut buffer = receive::receive_detached(tid, tag)?;
                from_tid.set(buffer.src);
                from_tag.set(buffer.tag);
                // A message that this task sent to itself may have been packed in place.
                let body = buffer.wire_body()?;
                from_len.set(len_as_int(body.len()));
                items.fill_raw(&body[..body.len().min(items.len())]);
                Ok(Some(0))
            };
            receive_result("pvm_precv", receive_into_array())
        },
        // SAFETY: by this function's contract.
        |code| unsafe {
            precv_exit_items(
                *code,
                read_int(from_len),
                read_int(from_tag),
                read_int(from_tid),
            )
        },
    )
}

/// Returns the result of a receive call for the program: the number of the buffer, or 0 for no
/// message. An error is reported, and its code is returned.
fn receive_result(function_name: &str, result: Result<Option<i32>, ReceiveError>) -> c_int {
    match result {
        Ok(mid) => mid.unwrap_or(0),
        Err(ReceiveError::Pvm(error)) => report_error(function_name, error.code()),
        Err(ReceiveError::Matcher(code)) => report_error(function_name, code),
    }
}

/// Waits for a message, makes its buffer the active receive buffer and returns the buffer's number.
#[unsafe(no_mangle)]
extern "C" fn pvm_recv(tid: c_int, tag: c_int) -> c_int {
    trace::traced_leaf_call(
        "recv",
        || receive_entry_items(tid, tag),
        || receive_result("pvm_recv", receive::receive(tid, tag, WaitMode::Forever)),
        receive_exit_items,
    )
}

/// Receives a message as `pvm_recv` does, but takes in at most one message and does not wait.
/// Returns 0 if no message that was taken in matches.
#[unsafe(no_mangle)]
extern "C" fn pvm_nrecv(tid: c_int, tag: c_int) -> c_int {
    trace::traced_leaf_call(
        "nrecv",
        || receive_entry_items(tid, tag),
        || {
            receive_result(
                "pvm_nrecv",
                receive::receive(tid, tag, WaitMode::OneMessage),
            )
        },
        receive_exit_items,
    )
}

/// Receives a message as `pvm_recv` does. Waits at most `time`, or without limit if `time` is null.
/// Returns 0 if no matching message arrives in this time.
///
/// # Safety
/// `time` must be null or point to a structure.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_trecv(tid: c_int, tag: c_int, time: *const TimeVal) -> c_int {
    trace::traced_call(
        "trecv",
        // SAFETY: by this function's contract.
        || unsafe {
            {
                let mut items = receive_entry_items(tid, tag);
                let time = time.as_ref();
                items.extend([
                    int_item("MTS", time.map_or(-1, |t| t.tv_sec as c_int)),
                    int_item("MTU", time.map_or(-1, |t| t.tv_usec as c_int)),
                ]);
                items
            }
        },
        || {
            // SAFETY: by this function's contract.
            let wait_mode = match unsafe { time.as_ref() } {
                None => WaitMode::Forever,
                Some(time) if time.tv_sec < 0 => return 0,
                Some(time) if time.tv_sec == 0 && time.tv_usec <= 0 => WaitMode::NoWait,
                Some(time) => {
                    let timeout = Duration::from_secs(time.tv_sec as u64)
                        + Duration::from_micros(time.tv_usec.max(0) as u64);
                    Instant::now()
                        .checked_add(timeout)
                        .map_or(WaitMode::Forever, WaitMode::Deadline)
                }
            };
            receive_result("pvm_trecv", receive::receive(tid, tag, wait_mode))
        },
        receive_exit_items,
    )
}

/// Returns the buffer number of the message that `pvm_nrecv` would return; 0 if there is none. The
/// message stays in the list of messages that can be received.
#[unsafe(no_mangle)]
extern "C" fn pvm_probe(tid: c_int, tag: c_int) -> c_int {
    trace::traced_call(
        "probe",
        || receive_entry_items(tid, tag),
        || receive_result("pvm_probe", receive::probe(tid, tag)),
        trace::return_code_items,
    )
}

extern "C" fn default_matcher(mid: c_int, tid: c_int, tag: c_int) -> c_int {
    receive::default_matcher(mid, tid, tag)
}

/// Sets the matching function and returns the previous matching function. Null restores the
/// library's own matching function.
#[unsafe(no_mangle)]
extern "C" fn pvm_recvf(matcher: Option<Matcher>) -> Option<Matcher> {
    trace::traced_call(
        "recvf",
        trace::no_items,
        || {
            let own_matcher = default_matcher as Matcher;
            // The library's own function is stored as `None`, because the library's own matching is
            // faster without the call through a pointer.
            let matcher = matcher.filter(|matcher| *matcher as usize != own_matcher as usize);
            Some(std::mem::replace(&mut lock().matcher, matcher).unwrap_or(own_matcher))
        },
        |_| trace::no_items(),
    )
}

/// Adds a message handler and returns its number.
#[unsafe(no_mangle)]
extern "C" fn pvm_addmhf(src: c_int, tag: c_int, ctx: c_int, handler: Option<HandlerFn>) -> c_int {
    trace::traced_call(
        "addmhf",
        || {
            vec![
                int_item("RST", src),
                int_item("RMC", tag),
                int_item("RCX", ctx),
            ]
        },
        || {
            let add_handler = || {
                session::runtime()?;
                lock()
                    .handlers
                    .add(Filter { src, tag, ctx }, handler.ok_or(PvmError::BadParam)?)
            };
            value_or_report("pvm_addmhf", add_handler())
        },
        |id| vec![int_item("MHI", *id)],
    )
}

/// Removes the message handler with this number.
#[unsafe(no_mangle)]
extern "C" fn pvm_delmhf(id: c_int) -> c_int {
    trace::traced_call(
        "delmhf",
        || vec![int_item("MHI", id)],
        || value_or_report("pvm_delmhf", zero_on_success(lock().handlers.remove(id))),
        trace::return_code_items,
    )
}

#[unsafe(no_mangle)]
extern "C" fn pvm_getcontext() -> c_int {
    trace::traced_call(
        "getcontext",
        trace::no_items,
        || {
            drop(lock());
            crate::data::pvmmyctx.load(Relaxed)
        },
        |ctx| vec![int_item("CXC", *ctx)],
    )
}

/// Sets the current message context and returns the previous context.
#[unsafe(no_mangle)]
extern "C" fn pvm_setcontext(ctx: c_int) -> c_int {
    trace::traced_call(
        "setcontext",
        || vec![int_item("CXS", ctx)],
        || {
            drop(lock());
            crate::data::pvmmyctx.swap(ctx, Relaxed)
        },
        trace::return_code_items,
    )
}

/// Returns a new message context that no other task uses.
#[unsafe(no_mangle)]
extern "C" fn pvm_newcontext() -> c_int {
    trace::traced_call(
        "newcontext",
        trace::no_items,
        || value_or_report("pvm_newcontext", crate::requests::new_context()),
        |ctx| vec![int_item("CXN", *ctx)],
    )
}

/// Frees a message context that this task requested with `pvm_newcontext`.
#[unsafe(no_mangle)]
extern "C" fn pvm_freecontext(ctx: c_int) -> c_int {
    trace::traced_call(
        "freecontext",
        || vec![int_item("CXF", ctx)],
        || {
            value_or_report(
                "pvm_freecontext",
                zero_on_success(crate::requests::free_context(ctx)),
            )
        },
        trace::return_code_items,
    )
}
