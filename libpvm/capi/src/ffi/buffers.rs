//! Calls for message buffers: create, activate, inspect, and pack messages into messages.

#![allow(unsafe_code)]

use super::trace_items::read_int;
use super::zero_on_success;
use crate::abi::MsgInfo;
use crate::buffers::{Buffer, Enc};
use crate::data::pvmmytid;
use crate::memory::OutParam;
use crate::pack;
use crate::process;
use crate::send;
use crate::session::{Session, lock, value_or_report};
use crate::trace;
use sempa_proto::trace::int_item;
use sempa_proto::{PvmError, PvmResult, Tid};
use std::ffi::c_int;
use std::sync::atomic::Ordering::Relaxed;

/// Creates a buffer and returns its number.
pub(super) fn create_buffer(encoding: c_int) -> PvmResult<i32> {
    create_buffer_in(&mut lock(), encoding)
}

fn create_buffer_in(session: &mut Session, encoding: c_int) -> PvmResult<i32> {
    let enc = Enc::from_arg(encoding)?;
    let mid = session.new_buffer(enc)?;
    if enc == Enc::Trace {
        let (seconds, micros) = process::unix_time();
        pack::begin_trace_event(session.buffers.get_mut(mid)?, seconds as i32, micros as i32);
    }
    Ok(mid)
}

fn create_send_buffer(encoding: c_int) -> PvmResult<i32> {
    let mut session = lock();
    if let Some(mid) = session.recreate_send_buffer(Enc::from_arg(encoding)?) {
        return Ok(mid);
    }
    let mid = create_buffer_in(&mut session, encoding)?;
    let previous_mid = std::mem::replace(&mut session.send_buffer_id, mid);
    if previous_mid != 0 {
        // The call fails if the program has already freed the previous send buffer by its number.
        let _ = session.free_buffer(previous_mid);
    }
    Ok(mid)
}

/// Creates a new send buffer and frees the previous one, for `%+` in a format of `pvm_vpackf`.
pub(super) fn restart_send_buffer(encoding: c_int) -> PvmResult<()> {
    create_send_buffer(encoding).map(drop)
}

/// Creates a buffer and returns its number.
#[unsafe(no_mangle)]
extern "C" fn pvm_mkbuf(encoding: c_int) -> c_int {
    trace::traced_call(
        "mkbuf",
        || vec![int_item("ME", encoding)],
        || value_or_report("pvm_mkbuf", create_buffer(encoding)),
        |mid| vec![int_item("MB", *mid)],
    )
}

/// Creates a buffer, makes it the active send buffer and frees the previous send buffer. Returns
/// the number of the new buffer.
#[unsafe(no_mangle)]
extern "C" fn pvm_initsend(encoding: c_int) -> c_int {
    trace::traced_leaf_call(
        "initsend",
        || vec![int_item("ME", encoding)],
        || value_or_report("pvm_initsend", create_send_buffer(encoding)),
        |mid| vec![int_item("MSB", *mid)],
    )
}

/// Frees a buffer. The number 0 has no effect.
#[unsafe(no_mangle)]
extern "C" fn pvm_freebuf(mid: c_int) -> c_int {
    trace::traced_call(
        "freebuf",
        || vec![int_item("MB", mid)],
        || {
            value_or_report(
                "pvm_freebuf",
                if mid == 0 {
                    Ok(0)
                } else {
                    zero_on_success(lock().free_buffer(mid))
                },
            )
        },
        trace::return_code_items,
    )
}

/// Returns the number of the active send buffer; 0 if there is none.
#[unsafe(no_mangle)]
extern "C" fn pvm_getsbuf() -> c_int {
    trace::traced_call(
        "getsbuf",
        trace::no_items,
        || lock().send_buffer_id,
        |mid| vec![int_item("MSB", *mid)],
    )
}

/// Returns the number of the active receive buffer; 0 if there is none.
#[unsafe(no_mangle)]
extern "C" fn pvm_getrbuf() -> c_int {
    trace::traced_call(
        "getrbuf",
        trace::no_items,
        || lock().receive_buffer_id,
        |mid| vec![int_item("MRB", *mid)],
    )
}

/// Makes a buffer the active send buffer if `for_sending` is true, otherwise the active receive
/// buffer. Returns the number of the previous active buffer. A buffer cannot be active for both
/// purposes: if `mid` was active for the other purpose, no buffer is active for that purpose
/// afterwards.
fn set_active_buffer(mid: i32, for_sending: bool) -> PvmResult<i32> {
    let mut session = lock();
    if mid != 0 {
        session.buffers.get(mid)?;
    }
    let (send_mid, receive_mid) = (session.send_buffer_id, session.receive_buffer_id);
    let (previous_mid, other_mid) = if for_sending {
        (send_mid, receive_mid)
    } else {
        (receive_mid, send_mid)
    };
    let other_mid = if other_mid == mid { 0 } else { other_mid };
    if for_sending {
        session.expect_header_change(mid);
    }
    (session.send_buffer_id, session.receive_buffer_id) = if for_sending {
        (mid, other_mid)
    } else {
        (other_mid, mid)
    };
    Ok(previous_mid)
}

/// Makes a buffer the active send buffer and returns the number of the previous send buffer.
#[unsafe(no_mangle)]
extern "C" fn pvm_setsbuf(mid: c_int) -> c_int {
    trace::traced_call(
        "setsbuf",
        || vec![int_item("MB", mid)],
        || value_or_report("pvm_setsbuf", set_active_buffer(mid, true)),
        |mid| vec![int_item("MSB", *mid)],
    )
}

/// Makes a buffer the active receive buffer and returns the number of the previous receive buffer.
#[unsafe(no_mangle)]
extern "C" fn pvm_setrbuf(mid: c_int) -> c_int {
    trace::traced_call(
        "setrbuf",
        || vec![int_item("MB", mid)],
        || value_or_report("pvm_setrbuf", set_active_buffer(mid, false)),
        |mid| vec![int_item("MRB", *mid)],
    )
}

fn source_tid(buffer: &Buffer) -> i32 {
    match buffer.src {
        0 => pvmmytid.load(Relaxed).max(0),
        src => src,
    }
}

/// Stores length, tag and source of a buffer.
///
/// # Safety
/// Each pointer must be null or valid for one int.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_bufinfo(
    mid: c_int,
    len: *mut c_int,
    tag: *mut c_int,
    src: *mut c_int,
) -> c_int {
    trace::traced_call(
        "bufinfo",
        || vec![int_item("MB", mid)],
        || {
            // SAFETY: by this function's contract.
            let (len, tag, src) =
                unsafe { (OutParam::new(len), OutParam::new(tag), OutParam::new(src)) };
            let store_info = || {
                let session = lock();
                let buffer = session.buffers.get(mid)?;
                len.set(buffer.len_as_int());
                tag.set(buffer.tag);
                src.set(source_tid(buffer));
                Ok(0)
            };
            value_or_report("pvm_bufinfo", store_info())
        },
        // SAFETY: by this function's contract.
        |code| unsafe {
            vec![
                int_item("CC", *code),
                int_item("INB", read_int(len)),
                int_item("IMC", read_int(tag)),
                int_item("IST", read_int(src)),
            ]
        },
    )
}

/// Stores the header of a buffer's message.
///
/// # Safety
/// `info` must be null or valid for one structure.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_getminfo(mid: c_int, info: *mut MsgInfo) -> c_int {
    trace::traced_call(
        "getminfo",
        || vec![int_item("MB", mid)],
        || {
            // SAFETY: by this function's contract.
            let info = unsafe { OutParam::new(info) };
            let store_info = || {
                let session = lock();
                let buffer = session.buffers.get(mid)?;
                if info.is_null() {
                    return Err(PvmError::BadParam);
                }
                info.set(MsgInfo {
                    len: buffer.len_as_int(),
                    ctx: buffer.ctx,
                    tag: buffer.tag,
                    wid: buffer.wid,
                    enc: buffer.enc.header_field(),
                    crc: 0,
                    src: source_tid(buffer),
                    dst: buffer.dst,
                });
                Ok(0)
            };
            value_or_report("pvm_getminfo", store_info())
        },
        trace::return_code_items,
    )
}

/// Sets context, tag, wait id, source and destination of a buffer.
///
/// # Safety
/// `info` must be null or point to a structure.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_setminfo(mid: c_int, info: *const MsgInfo) -> c_int {
    trace::traced_call(
        "setminfo",
        || vec![int_item("MB", mid)],
        || {
            // SAFETY: by this function's contract.
            let info = unsafe { info.as_ref() };
            let set_header = || {
                let mut session = lock();
                session.expect_header_change(mid);
                let buffer = session.buffers.get_mut(mid)?;
                let info = info.ok_or(PvmError::BadParam)?;
                (buffer.ctx, buffer.tag, buffer.wid) = (info.ctx, info.tag, info.wid);
                (buffer.src, buffer.dst) = (info.src, info.dst);
                Ok(0)
            };
            value_or_report("pvm_setminfo", set_header())
        },
        trace::return_code_items,
    )
}

fn pack_message(mid: i32) -> PvmResult<i32> {
    if lock().send_buffer_id == mid {
        return Err(PvmError::BadParam);
    }
    let mut message = send::buffer_as_message(mid)?;
    if message.src == Tid::NONE {
        message.src = Tid::from_raw(pvmmytid.load(Relaxed).max(0));
    }
    zero_on_success(pack::pack_message(lock().send_buffer()?, &message))
}

/// Packs a whole message as one item of the active send buffer. An error is returned but not
/// reported, as in PVM.
#[unsafe(no_mangle)]
extern "C" fn pvm_pkmesg(mid: c_int) -> c_int {
    pack_message(mid).unwrap_or_else(PvmError::code)
}

fn pack_body(mid: i32) -> PvmResult<i32> {
    if lock().send_buffer_id == mid {
        return Err(PvmError::BadParam);
    }
    let message = send::buffer_as_message(mid)?;
    let mut session = lock();
    let buffer = session.send_buffer()?;
    let has_same_encoding = buffer.enc.header_field() == message.enc;
    if !has_same_encoding {
        return Err(PvmError::Mismatch);
    }
    buffer.append(&message.body)?;
    Ok(0)
}

/// Appends the body of a message to the active send buffer. An error is returned but not reported,
/// as in PVM.
#[unsafe(no_mangle)]
extern "C" fn pvm_pkmesgbody(mid: c_int) -> c_int {
    pack_body(mid).unwrap_or_else(PvmError::code)
}

/// Unpacks a message that was packed as one item, and returns the number of the new buffer that
/// contains it. An error is returned but not reported, as in PVM.
#[unsafe(no_mangle)]
extern "C" fn pvm_upkmesg() -> c_int {
    let unpack = || {
        let mut session = lock();
        let message = pack::unpack_message(session.receive_buffer()?)?;
        session.buffers.add(Buffer::from_message(message).into())
    };
    unpack().unwrap_or_else(PvmError::code)
}
