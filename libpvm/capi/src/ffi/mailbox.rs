//! Calls for the mailbox of the virtual machine.

#![allow(unsafe_code)]

use super::returned_lists::{RecordList, ReturnedList};
use super::trace_items::c_string_item;
use crate::abi::MboxInfo;
use crate::buffers::Buffer;
use crate::data::pvmmytid;
use crate::memory::{COwnedMemory, OutParam, ProgramStr};
use crate::requests;
use crate::send;
use crate::session::{self, lock, value_or_report, value_or_report_except};
use crate::trace;
use sempa_proto::trace::int_item;
use sempa_proto::{PvmError, PvmResult, Tid};
use std::ffi::{c_char, c_int};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, PoisonError};

/// Reads the name of a mailbox class. Enrols the process first if it is not a task.
///
/// # Safety
/// `class_name` must be null or a string.
unsafe fn enrol_and_read_name(class_name: *const c_char) -> PvmResult<String> {
    session::runtime()?;
    // SAFETY: the caller's contract: null or a string.
    Ok(unsafe { ProgramStr::new(class_name)? }.to_string_lossy())
}

/// Stores a copy of a message in a mailbox class and returns the index of the new entry.
///
/// # Safety
/// `class_name` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_putinfo(class_name: *const c_char, mid: c_int, flags: c_int) -> c_int {
    trace::traced_call(
        "putinfo",
        // SAFETY: by this function's contract.
        || unsafe {
            vec![
                c_string_item("CN", class_name),
                int_item("CI", 0),
                int_item("CF", flags),
                int_item("CD", mid),
            ]
        },
        || {
            let put_message = || {
                // SAFETY: by this function's contract.
                let name = unsafe { enrol_and_read_name(class_name)? };
                let mut message = send::buffer_as_message(mid)?;
                if message.src == Tid::NONE {
                    message.src = Tid::from_raw(pvmmytid.load(Relaxed));
                }
                requests::mailbox_put(name, message, flags)
            };
            value_or_report_except(
                "pvm_putinfo",
                put_message(),
                &[PvmError::Denied, PvmError::Exists],
            )
        },
        trace::return_code_items,
    )
}

/// Fetches a message from a mailbox class, makes its buffer the active receive buffer, and returns
/// the buffer's number.
///
/// # Safety
/// `class_name` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_recvinfo(class_name: *const c_char, index: c_int, flags: c_int) -> c_int {
    trace::traced_call(
        "getinfo",
        // SAFETY: by this function's contract.
        || unsafe {
            vec![
                c_string_item("CN", class_name),
                int_item("CI", index),
                int_item("CF", flags),
            ]
        },
        || {
            let receive_message = || {
                // SAFETY: by this function's contract.
                let name = unsafe { enrol_and_read_name(class_name)? };
                lock().free_receive_buffer();
                let message = requests::mailbox_take(name, index, flags)?;
                let mut session = lock();
                let mid = session.buffers.add(Buffer::from_message(message).into())?;
                session.free_receive_buffer();
                session.receive_buffer_id = mid;
                Ok(mid)
            };
            value_or_report_except("pvm_recvinfo", receive_message(), &[PvmError::NotFound])
        },
        |mid| vec![int_item("CC", (*mid).min(0)), int_item("CR", *mid)],
    )
}

/// Removes an entry of a mailbox class and returns the entry's index.
///
/// # Safety
/// `class_name` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_delinfo(class_name: *const c_char, index: c_int, flags: c_int) -> c_int {
    trace::traced_call(
        "delinfo",
        // SAFETY: by this function's contract.
        || unsafe {
            vec![
                c_string_item("CN", class_name),
                int_item("CI", index),
                int_item("CF", flags),
            ]
        },
        || {
            // SAFETY: by this function's contract.
            let delete_entry =
                || requests::mailbox_delete(unsafe { enrol_and_read_name(class_name)? }, index);
            // On success the index is returned, as in PVM.
            value_or_report_except(
                "pvm_delinfo",
                delete_entry().map(|()| index),
                &[PvmError::Denied, PvmError::NotFound],
            )
        },
        trace::return_code_items,
    )
}

/// The arrays of ints to which the entries of [`CLASSES`] point.
static CLASS_ARRAYS: Mutex<COwnedMemory<Vec<Vec<c_int>>>> = Mutex::new(COwnedMemory(Vec::new()));
static CLASSES: ReturnedList<MboxInfo> = ReturnedList::new();

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
    trace::traced_call(
        "getmboxinfo",
        // SAFETY: by this function's contract.
        || unsafe { vec![c_string_item("CN", pattern)] },
        || {
            // SAFETY: by this function's contract.
            let (pattern, count, list) = unsafe {
                (
                    ProgramStr::new(pattern),
                    OutParam::new(count),
                    OutParam::new(classes),
                )
            };
            let store_classes = || {
                let classes = requests::mailbox_list(
                    pattern
                        .map(|pattern| pattern.to_string_lossy())
                        .unwrap_or_default(),
                )?;
                let mut records = RecordList::new();
                let mut arrays = Vec::new();
                for class in classes {
                    let mut field_array = |field_of_entry: fn(&(i32, Tid, i32)) -> i32| {
                        let field_array: Vec<c_int> =
                            class.entries.iter().map(field_of_entry).collect();
                        let pointer = field_array.as_ptr();
                        arrays.push(field_array);
                        pointer
                    };
                    let (indices, owners, flags) = (
                        field_array(|e| e.0),
                        field_array(|e| e.1.raw()),
                        field_array(|e| e.2),
                    );
                    let name = records.add_text(&class.name);
                    records.push(MboxInfo {
                        name,
                        entries: class.entries.len() as c_int,
                        indices,
                        owners,
                        flags,
                    });
                }
                count.set(records.len());
                list.set(CLASSES.store(records));
                *CLASS_ARRAYS.lock().unwrap_or_else(PoisonError::into_inner) = COwnedMemory(arrays);
                Ok(0)
            };
            value_or_report("pvm_getmboxinfo", store_classes())
        },
        trace::return_code_items,
    )
}

/// Stores one int in a mailbox class and returns the index of the entry.
///
/// # Safety
/// `class_name` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_insert(class_name: *const c_char, index: c_int, value: c_int) -> c_int {
    trace::traced_call(
        "insert",
        // SAFETY: by this function's contract.
        || unsafe {
            vec![
                c_string_item("CN", class_name),
                int_item("CI", index),
                int_item("CD", value),
            ]
        },
        || {
            let insert_value = || {
                // SAFETY: by this function's contract.
                let class_name = unsafe { enrol_and_read_name(class_name)? };
                requests::mailbox_insert(class_name, index, value)
            };
            value_or_report_except("pvm_insert", insert_value(), &[PvmError::Denied])
        },
        trace::return_code_items,
    )
}

/// Stores one int of a mailbox class in `value`. Returns the index of the entry; 0 if `index` is
/// −1.
///
/// # Safety
/// `class_name` must be null or a string, and `value` null or valid for one int.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_lookup(
    class_name: *const c_char,
    index: c_int,
    value: *mut c_int,
) -> c_int {
    trace::traced_call(
        "lookup",
        // SAFETY: by this function's contract.
        || unsafe { vec![c_string_item("CN", class_name), int_item("CI", index)] },
        || {
            // SAFETY: by this function's contract.
            let target = unsafe { OutParam::new(value) };
            let look_up_value = || {
                // SAFETY: by this function's contract.
                let class_name = unsafe { enrol_and_read_name(class_name)? };
                let (index, stored_value) = requests::mailbox_lookup(class_name, index)?;
                target.set(stored_value);
                Ok(index)
            };
            value_or_report_except("pvm_lookup", look_up_value(), &[PvmError::NotFound])
        },
        trace::return_code_items,
    )
}

/// Removes one int from a mailbox class and returns the index of the entry.
///
/// # Safety
/// `class_name` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_delete(class_name: *const c_char, index: c_int) -> c_int {
    trace::traced_call(
        "delete",
        // SAFETY: by this function's contract.
        || unsafe { vec![c_string_item("CN", class_name), int_item("CI", index)] },
        || {
            // SAFETY: by this function's contract.
            let delete_entry =
                || requests::mailbox_delete(unsafe { enrol_and_read_name(class_name)? }, index);
            // On success the index is returned, as in PVM.
            value_or_report("pvm_delete", delete_entry().map(|()| index))
        },
        trace::return_code_items,
    )
}

static NO_RESET_TIDS: ReturnedList<c_int> = ReturnedList::new();

/// Stores the tids of the tasks that a reset does not end, and the number of these tasks.
///
/// # Safety
/// Each pointer must be null or valid for one value.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_getnoresets(tids: *mut *mut c_int, count: *mut c_int) -> c_int {
    // SAFETY: by this function's contract.
    let (tids, count) = unsafe { (OutParam::new(tids), OutParam::new(count)) };
    let store_tids = || {
        let mut records = RecordList::new();
        requests::no_reset_tasks()?
            .into_iter()
            .for_each(|tid| records.push(tid));
        count.set(records.len());
        tids.set(NO_RESET_TIDS.store(records));
        Ok(0)
    };
    value_or_report("pvm_getnoresets", store_tids())
}
