//! Sends messages to one task or to several tasks.

use crate::buffers::{Buffer, Enc};
use crate::data::{pvmmyctx, pvmrescode, pvmrouteopt};
use crate::memory::Strided;
use crate::receive;
use crate::session::{self, Session};
use bytes::Bytes;
use libpvm::Runtime;
use sempa_proto::buffer_pool;
use sempa_proto::link::INLINE_BODY_BYTES_MAX;
use sempa_proto::message::{DSIG_X86_64, encode_message_head};
use sempa_proto::{Message, PvmError, PvmResult, Tid};
use std::sync::atomic::Ordering::Relaxed;

/// Destination of a user trace event in PVM's interface.
const USER_TRACE_TID: i32 = -1111;
/// Tag of a user trace event in PVM's interface.
const USER_TRACE_TAG: i32 = -2222;
/// Value of `PvmRoute` that requests direct routes (`PvmRouteDirect`).
const ROUTE_DIRECT: i32 = 3;

fn check_destination(tid: i32, tag: i32) -> PvmResult<()> {
    let allows_reserved_tids = pvmrescode.load(Relaxed) != 0;
    let tid = Tid::from_raw(tid);
    let is_allowed = if allows_reserved_tids {
        tid.is_task() || tid.is_daemon()
    } else {
        tid.is_task() && tag >= 0
    };
    if is_allowed {
        Ok(())
    } else {
        Err(PvmError::BadParam)
    }
}

/// Sends the active send buffer (`pvm_send`).
///
/// # Errors
/// `BadParam` for a destination that is not a task or for a reserved tag, `NoBuf` without an active
/// buffer, `SysErr` without a daemon.
pub(crate) fn send_active_buffer(tid: i32, tag: i32) -> PvmResult<()> {
    let mut session = session::lock();
    if try_send_inline(&mut session, tid, tag) {
        receive::take_in_after_send(session);
        return Ok(());
    }
    session.runtime_or_enrol()?;
    drop(session);
    send_through_queue(tid, tag)
}

/// Fast path for a small message: writes the message directly to the receiver's ring. Returns false
/// without sending if the direct write is not possible.
#[inline]
fn try_send_inline(session: &mut Session, tid: i32, tag: i32) -> bool {
    let Session {
        runtime: Some(rt),
        buffers,
        send_buffer_id: active_mid,
        ..
    } = session
    else {
        return false;
    };
    let Ok(buffer) = buffers.get_mut(*active_mid) else {
        return false;
    };
    let Some(body) = buffer.small_body() else {
        return false;
    };
    if check_destination(tid, tag).is_err() {
        return false;
    }
    let (dst, ctx) = (Tid::from_raw(tid), pvmmyctx.load(Relaxed));
    let uses_direct_route = pvmrouteopt.load(Relaxed) == ROUTE_DIRECT;
    let message_head = encode_message_head(ctx, tag, buffer.wid, buffer.enc.wire_header_field());
    let is_sent = rt.try_send_inline(dst, message_head, body, uses_direct_route);
    if is_sent {
        buffer.record_sent_header(rt.tid(), dst, ctx, tag);
    }
    is_sent
}

fn send_through_queue(tid: i32, tag: i32) -> PvmResult<()> {
    let rt = session::runtime()?;
    let message = {
        let mut session = session::lock();
        if tid == USER_TRACE_TID
            && tag == USER_TRACE_TAG
            && session.send_buffer()?.enc == Enc::Trace
        {
            let event = session.send_buffer()?.wire_body()?;
            drop(session);
            crate::trace::send_user_event(&event);
            return Ok(());
        }
        check_destination(tid, tag)?;
        let ctx = pvmmyctx.load(Relaxed);
        session
            .send_buffer()?
            .make_message((rt.tid(), Tid::from_raw(tid)), ctx, tag, |len| {
                rt.allocate_body(len)
            })?
    };
    enqueue_message(&rt, message)
}

/// Runs `action` with the buffer `mid` as the active send buffer.
///
/// # Errors
/// `NoSuchBuf` or `BadParam` for a number without a buffer, and the errors of `action`.
pub(crate) fn with_send_buffer(mid: i32, action: impl FnOnce() -> PvmResult<()>) -> PvmResult<()> {
    let previous_mid = {
        let mut session = session::lock();
        session.buffers.get(mid)?;
        session.expect_header_change(mid);
        std::mem::replace(&mut session.send_buffer_id, mid)
    };
    let result = action();
    session::lock().send_buffer_id = previous_mid;
    result
}

fn enqueue_message(rt: &Runtime, message: Message) -> PvmResult<()> {
    if pvmrouteopt.load(Relaxed) == ROUTE_DIRECT {
        rt.open_route_and_wait(message.dst);
    }
    rt.send(message)?;
    receive::take_in_after_send(session::lock());
    Ok(())
}

/// Sends the active send buffer to each of several tasks once, never to the calling task
/// (`pvm_mcast`).
///
/// # Errors
/// As [`send_active_buffer`]. Nothing is sent if one of the destinations is invalid.
pub(crate) fn multicast(tids: &[i32], tag: i32) -> PvmResult<()> {
    let rt = session::runtime()?;
    if tag < 0 && pvmrescode.load(Relaxed) == 0 {
        return Err(PvmError::BadParam);
    }
    if !tids.iter().all(|tid| Tid::from_raw(*tid).is_task()) {
        return Err(PvmError::BadParam);
    }
    let mut seen_tids = std::collections::HashSet::from([rt.tid().raw()]);
    let receivers: Vec<Tid> = tids
        .iter()
        .filter(|tid| seen_tids.insert(**tid))
        .map(|tid| Tid::from_raw(*tid))
        .collect();
    let ctx = pvmmyctx.load(Relaxed);
    let message = {
        let mut session = session::lock();
        let buffer = session.send_buffer()?;
        let Some(last_receiver) = receivers.last() else {
            return Ok(());
        };
        buffer.make_message((rt.tid(), *last_receiver), ctx, tag, |len| {
            rt.allocate_body(len)
        })?
    };
    rt.send_to_many(&message, &receivers)?;
    // In PVM a multicast consists of two messages to the daemon.
    receive::take_in_after_send(session::lock());
    receive::take_in_after_send(session::lock());
    Ok(())
}

/// Sends an array as raw bytes without using the active send buffer (`pvm_psend`). A small array is
/// copied from the program's memory directly into the receiver's ring, because the receiver is
/// known before any data is packed.
///
/// # Errors
/// As [`send_active_buffer`].
pub(crate) fn send_array(tid: i32, tag: i32, items: &Strided<u8>) -> PvmResult<()> {
    let rt = session::runtime()?;
    check_destination(tid, tag)?;
    let (dst, ctx) = (Tid::from_raw(tid), pvmmyctx.load(Relaxed));
    if let Some(small_body) = items
        .as_bytes()
        .filter(|bytes| bytes.len() <= INLINE_BODY_BYTES_MAX)
    {
        let message_head = encode_message_head(ctx, tag, 0, DSIG_X86_64);
        if rt.try_send_inline(
            dst,
            message_head,
            small_body,
            pvmrouteopt.load(Relaxed) == ROUTE_DIRECT,
        ) {
            receive::take_in_after_send(session::lock());
            return Ok(());
        }
    }
    let body = copy_for_sending(&rt, items);
    enqueue_message(
        &rt,
        Message {
            src: rt.tid(),
            dst,
            ctx,
            tag,
            wid: 0,
            enc: DSIG_X86_64,
            body,
        },
    )
}

/// Copies an array into the memory from which it is sent.
fn copy_for_sending(rt: &Runtime, items: &Strided<u8>) -> Bytes {
    if let Some(bytes) = items.as_bytes()
        && let Some(mut body) = rt.allocate_body(bytes.len())
        && body.append(bytes)
    {
        return body.freeze();
    }
    let mut body = Vec::new();
    buffer_pool::reserve(&mut body, items.len());
    items.append_raw(&mut body);
    buffer_pool::freeze(body)
}

/// Returns the number of bytes of one element of a data type of `pvm_psend` (`PVM_*`).
///
/// # Errors
/// `NotImpl` for strings, `BadParam` for unknown types.
pub(crate) fn element_bytes(kind: i32) -> PvmResult<usize> {
    match kind {
        0 => Err(PvmError::NotImpl),
        1 => Ok(1),
        2 | 9 => Ok(2),
        3 | 4 | 10 => Ok(4),
        5 | 6 | 8 | 11 => Ok(8),
        7 => Ok(16),
        _ => Err(PvmError::BadParam),
    }
}

/// Returns a copy of a buffer as a message, for the mailbox and for packing into another message.
///
/// # Errors
/// `NoSuchBuf` or `BadParam` for a number without a buffer.
pub(crate) fn buffer_as_message(mid: i32) -> PvmResult<Message> {
    let mut session = session::lock();
    let buffer: &mut Buffer = session.buffers.get_mut(mid)?;
    let enc = if buffer.enc == Enc::InPlace {
        DSIG_X86_64
    } else {
        buffer.enc.header_field()
    };
    let body = buffer.wire_body()?;
    let (src, dst) = (Tid::from_raw(buffer.src), Tid::from_raw(buffer.dst));
    Ok(Message {
        src,
        dst,
        ctx: buffer.ctx,
        tag: buffer.tag,
        wid: buffer.wid,
        enc,
        body,
    })
}
