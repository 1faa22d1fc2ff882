//! The functions of `smbl.h`.
#![allow(
    unsafe_code,
    reason = "C callers pass pointers, and the names are exported"
)]

use crate::calls::{self, ERR_ARG, ERR_TRUNCATED, Failure, MailFacts, SUCCESS, finish};
use std::ffi::{CStr, c_char, c_double, c_int, c_void};

/// `SMBL_Status` of `smbl.h`, with the same layout.
#[repr(C)]
#[derive(Debug)]
pub struct Status {
    source: c_int,
    kind: c_int,
    size: c_int,
    reason: c_int,
    undelivered: c_int,
}

/// Stores a value through a pointer of the caller.
///
/// # Safety
/// The pointer is null or valid for a write.
unsafe fn store<T>(target: *mut T, value: T) {
    if !target.is_null() {
        // SAFETY: the caller passes a pointer that is valid for a write.
        unsafe { target.write(value) };
    }
}

impl From<MailFacts> for Status {
    fn from(facts: MailFacts) -> Self {
        Self {
            source: facts.source,
            kind: facts.kind,
            size: facts.size,
            reason: facts.reason,
            undelivered: facts.undelivered,
        }
    }
}

fn byte_count(size: c_int, buffer_is_null: bool) -> Result<usize, Failure> {
    let size = usize::try_from(size)
        .map_err(|_| Failure::new(ERR_ARG, format!("{size} is not a number of bytes")))?;
    if buffer_is_null && size > 0 {
        return Err(Failure::new(ERR_ARG, "the buffer is NULL"));
    }
    Ok(size)
}

/// # Safety
/// `session` is null or a string that ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SMBL_Init(session: *const c_char, role: c_int) -> c_int {
    let session = if session.is_null() {
        Ok(None)
    } else {
        // SAFETY: the caller passes a string that ends with a zero byte.
        let text = unsafe { CStr::from_ptr(session) }.to_str();
        text.map(Some)
            .map_err(|_| Failure::new(ERR_ARG, "the session's name is not UTF-8"))
    };
    finish(session.and_then(|session| calls::init(session, role)))
}

#[unsafe(no_mangle)]
pub extern "C" fn SMBL_Finalize() -> c_int {
    finish(calls::finalize(false))
}

#[unsafe(no_mangle)]
pub extern "C" fn SMBL_Finalize_for_owner() -> c_int {
    finish(calls::finalize(true))
}

/// # Safety
/// `rank` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SMBL_Comm_rank(rank: *mut c_int) -> c_int {
    finish(calls::rank().map(|number| {
        // SAFETY: the caller passes a pointer that is valid for a write.
        unsafe { store(rank, number) };
        SUCCESS
    }))
}

/// # Safety
/// `size` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SMBL_Comm_size(size: *mut c_int) -> c_int {
    finish(calls::size().map(|number| {
        // SAFETY: the caller passes a pointer that is valid for a write.
        unsafe { store(size, number) };
        SUCCESS
    }))
}

/// # Safety
/// `buffer` is valid for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SMBL_Send(
    buffer: *const c_void,
    size: c_int,
    dest: c_int,
    kind: c_int,
) -> c_int {
    // SAFETY: the caller passes a buffer of this size.
    unsafe { SMBL_Send_opt(buffer, size, dest, kind, 0, 0.0) }
}

/// # Safety
/// `buffer` is valid for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SMBL_Send_opt(
    buffer: *const c_void,
    size: c_int,
    dest: c_int,
    kind: c_int,
    flags: c_int,
    seconds: c_double,
) -> c_int {
    let result = byte_count(size, buffer.is_null()).and_then(|size| {
        let mut body = vec![0_u8; size];
        if size > 0 {
            // SAFETY: the caller passes a buffer of this size, which is not null, and `body` is a
            // new allocation of the same size.
            unsafe { std::ptr::copy_nonoverlapping(buffer.cast(), body.as_mut_ptr(), size) };
        }
        calls::send(body, dest, kind, flags, seconds)
    });
    finish(result)
}

/// # Safety
/// `buffer` is valid for `capacity` bytes; `status` is null or valid for a write.
unsafe fn receive(
    buffer: *mut c_void,
    capacity: c_int,
    source: c_int,
    kind: c_int,
    seconds: Option<f64>,
    status: *mut Status,
) -> c_int {
    let result = byte_count(capacity, buffer.is_null()).and_then(|capacity| {
        let (facts, bytes) = calls::receive(source, kind, capacity, seconds)?;
        // SAFETY: the caller passes null or a valid pointer.
        unsafe { store(status, facts.into()) };
        let Some(bytes) = bytes else {
            let text = format!(
                "the message has {} bytes, the buffer {capacity}; the message is still there",
                facts.size
            );
            return Err(Failure::new(ERR_TRUNCATED, text));
        };
        if !bytes.is_empty() {
            // SAFETY: the message is not larger than the buffer, which is not null.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), buffer.cast(), bytes.len()) };
        }
        Ok(SUCCESS)
    });
    finish(result)
}

/// # Safety
/// `buffer` is valid for `capacity` bytes; `status` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SMBL_Recv(
    buffer: *mut c_void,
    capacity: c_int,
    source: c_int,
    kind: c_int,
    status: *mut Status,
) -> c_int {
    // SAFETY: the caller passes valid pointers.
    unsafe { receive(buffer, capacity, source, kind, None, status) }
}

/// # Safety
/// `buffer` is valid for `capacity` bytes; `status` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SMBL_Recv_timeout(
    buffer: *mut c_void,
    capacity: c_int,
    source: c_int,
    kind: c_int,
    seconds: c_double,
    status: *mut Status,
) -> c_int {
    // SAFETY: the caller passes valid pointers.
    unsafe { receive(buffer, capacity, source, kind, Some(seconds), status) }
}

/// # Safety
/// `status` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SMBL_Probe(source: c_int, kind: c_int, status: *mut Status) -> c_int {
    finish(calls::probe(source, kind).map(|facts| {
        // SAFETY: the caller passes null or a valid pointer.
        unsafe { store(status, facts.into()) };
        SUCCESS
    }))
}

/// # Safety
/// `flag` and `status` are null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SMBL_Iprobe(
    source: c_int,
    kind: c_int,
    flag: *mut c_int,
    status: *mut Status,
) -> c_int {
    finish(calls::iprobe(source, kind).map(|facts| {
        // SAFETY: the caller passes null or valid pointers.
        unsafe { store(flag, c_int::from(facts.is_some())) };
        if let Some(facts) = facts {
            // SAFETY: as above.
            unsafe { store(status, facts.into()) };
        }
        SUCCESS
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn SMBL_Watch(member: c_int) -> c_int {
    finish(calls::watch(member))
}

/// # Safety
/// `flag` is null or valid for a write.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn SMBL_Over(flag: *mut c_int) -> c_int {
    finish(calls::is_over().map(|is_over| {
        // SAFETY: the caller passes a pointer that is valid for a write.
        unsafe { store(flag, c_int::from(is_over)) };
        SUCCESS
    }))
}

#[unsafe(no_mangle)]
pub extern "C" fn SMBL_Finish(seconds: c_double) -> c_int {
    finish(calls::finish_session(seconds))
}

/// Returns a text that is valid until the thread's next call.
#[unsafe(no_mangle)]
pub extern "C" fn SMBL_Error_string() -> *const c_char {
    calls::with_text(|text| text.as_ptr())
}
