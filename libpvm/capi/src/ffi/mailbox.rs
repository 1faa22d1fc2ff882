//! Calls for the mailbox of the virtual machine.

#![allow(unsafe_code)]

use super::lent::{Records, Shelf};
use super::trace_items::trace_text;
use crate::abi::MboxInfo;
use crate::ask;
use crate::buffers::Buffer;
use crate::data::pvmmytid;
use crate::memory::{Lent, Out, Text};
use crate::send;
use crate::session::{self, answer, answer_quietly, lock};
use crate::trace;
use sempa_proto::trace::int;
use sempa_proto::{PvmError, PvmResult, Tid};
use std::ffi::{c_char, c_int};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};

/// Reads the name of a mailbox class and enrols the process if necessary.
///
/// # Safety
/// `text` must be null or a string.
unsafe fn name(text: *const c_char) -> PvmResult<String> {
    session::runtime()?;
    // SAFETY: the caller's contract: null or a string.
    Ok(unsafe { Text::new(text)? }.string())
}

/// Stores a copy of a message in a mailbox class and returns its index.
///
/// # Safety
/// `text` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_putinfo(text: *const c_char, mid: c_int, flags: c_int) -> c_int {
    trace::call(
        "putinfo",
        // SAFETY: by this function's contract.
        || unsafe {
            vec![
                trace_text("CN", text),
                int("CI", 0),
                int("CF", flags),
                int("CD", mid),
            ]
        },
        || {
            let put = || {
                // SAFETY: by this function's contract.
                let name = unsafe { name(text)? };
                let mut message = send::copy_of(mid)?;
                if message.src == Tid::NONE {
                    message.src = Tid::from_raw(pvmmytid.load(Relaxed));
                }
                ask::put(name, message, flags)
            };
            answer_quietly("pvm_putinfo", put(), &[PvmError::Denied, PvmError::Exists])
        },
        trace::cc,
    )
}

/// Fetches a message, makes it the active receive buffer and returns its number.
///
/// # Safety
/// `text` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_recvinfo(text: *const c_char, index: c_int, flags: c_int) -> c_int {
    trace::call(
        "getinfo",
        // SAFETY: by this function's contract.
        || unsafe { vec![trace_text("CN", text), int("CI", index), int("CF", flags)] },
        || {
            let receive = || {
                // SAFETY: by this function's contract.
                let name = unsafe { name(text)? };
                lock().free_rbuf();
                let message = ask::take(name, index, flags)?;
                let mut session = lock();
                let mid = session.buffers.add(Buffer::of_message(message))?;
                session.free_rbuf();
                session.rbuf = mid;
                Ok(mid)
            };
            answer_quietly("pvm_recvinfo", receive(), &[PvmError::NotFound])
        },
        |mid| vec![int("CC", (*mid).min(0)), int("CR", *mid)],
    )
}

/// Removes an entry of a mailbox class.
///
/// # Safety
/// `text` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_delinfo(text: *const c_char, index: c_int, flags: c_int) -> c_int {
    trace::call(
        "delinfo",
        // SAFETY: by this function's contract.
        || unsafe { vec![trace_text("CN", text), int("CI", index), int("CF", flags)] },
        || {
            // SAFETY: by this function's contract.
            let delete = || ask::delete(unsafe { name(text)? }, index);
            // On success the index is returned, as in PVM.
            answer_quietly(
                "pvm_delinfo",
                delete().map(|()| index),
                &[PvmError::Denied, PvmError::NotFound],
            )
        },
        trace::cc,
    )
}

/// The arrays of ints to which the listed classes point.
static NUMBERS: Mutex<Lent<Vec<Vec<c_int>>>> = Mutex::new(Lent(Vec::new()));
static CLASSES: Shelf<MboxInfo> = Shelf::new();

/// Lists the classes whose names match a pattern, with their entries.
///
/// # Safety
/// `pattern` must be null or a string. The other pointers must be null or valid for one value.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_getmboxinfo(
    pattern: *const c_char,
    count: *mut c_int,
    classes: *mut *mut MboxInfo,
) -> c_int {
    trace::call(
        "getmboxinfo",
        // SAFETY: by this function's contract.
        || unsafe { vec![trace_text("CN", pattern)] },
        || {
            // SAFETY: by this function's contract.
            let (pattern, count, list) =
                unsafe { (Text::new(pattern), Out::new(count), Out::new(classes)) };
            let ask = || {
                let classes =
                    ask::list(pattern.map(|pattern| pattern.string()).unwrap_or_default())?;
                let mut records = Records::new();
                let mut numbers = Vec::new();
                for class in classes {
                    let mut column = |numbers_of: fn(&(i32, Tid, i32)) -> i32| {
                        let column: Vec<c_int> = class.entries.iter().map(numbers_of).collect();
                        let place = column.as_ptr();
                        numbers.push(column);
                        place
                    };
                    let (indices, owners, flags) =
                        (column(|e| e.0), column(|e| e.1.raw()), column(|e| e.2));
                    let name = records.text(&class.name);
                    records.push(MboxInfo {
                        name,
                        entries: class.entries.len() as c_int,
                        indices,
                        owners,
                        flags,
                    });
                }
                count.set(records.len());
                list.set(CLASSES.lend(records));
                *NUMBERS.lock().unwrap_or_else(PoisonError::into_inner) = Lent(numbers);
                Ok(0)
            };
            answer("pvm_getmboxinfo", ask())
        },
        trace::cc,
    )
}

/// Stores one int in a mailbox class and returns its index.
///
/// # Safety
/// `text` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_insert(text: *const c_char, index: c_int, value: c_int) -> c_int {
    trace::call(
        "insert",
        // SAFETY: by this function's contract.
        || unsafe { vec![trace_text("CN", text), int("CI", index), int("CD", value)] },
        || {
            // SAFETY: by this function's contract.
            let insert = || ask::insert(unsafe { name(text)? }, index, value);
            answer_quietly("pvm_insert", insert(), &[PvmError::Denied])
        },
        trace::cc,
    )
}

/// Reads one int from a mailbox class.
///
/// # Safety
/// `text` must be null or a string, and `value` null or valid for one int.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_lookup(text: *const c_char, index: c_int, value: *mut c_int) -> c_int {
    trace::call(
        "lookup",
        // SAFETY: by this function's contract.
        || unsafe { vec![trace_text("CN", text), int("CI", index)] },
        || {
            // SAFETY: by this function's contract.
            let place = unsafe { Out::new(value) };
            let lookup = || {
                // SAFETY: by this function's contract.
                let found = ask::lookup(unsafe { name(text)? }, index)?;
                place.set(found);
                Ok(if index == -1 { 0 } else { index })
            };
            answer_quietly("pvm_lookup", lookup(), &[PvmError::NotFound])
        },
        trace::cc,
    )
}

/// Removes one int from a mailbox class.
///
/// # Safety
/// `text` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_delete(text: *const c_char, index: c_int) -> c_int {
    trace::call(
        "delete",
        // SAFETY: by this function's contract.
        || unsafe { vec![trace_text("CN", text), int("CI", index)] },
        || {
            // SAFETY: by this function's contract.
            let delete = || ask::delete(unsafe { name(text)? }, index);
            // On success the index is returned, as in PVM.
            answer("pvm_delete", delete().map(|()| index))
        },
        trace::cc,
    )
}

static NO_RESETS: Shelf<c_int> = Shelf::new();

/// Lists the tasks that a reset does not end.
///
/// # Safety
/// Each pointer must be null or valid for one value.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_getnoresets(tids: *mut *mut c_int, count: *mut c_int) -> c_int {
    // SAFETY: by this function's contract.
    let (tids, count) = unsafe { (Out::new(tids), Out::new(count)) };
    let ask = || {
        let mut records = Records::new();
        ask::no_resets()?
            .into_iter()
            .for_each(|tid| records.push(tid));
        count.set(records.len());
        tids.set(NO_RESETS.lend(records));
        Ok(0)
    };
    answer("pvm_getnoresets", ask())
}
