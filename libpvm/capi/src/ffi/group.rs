//! Functions for the group library (`libgpvm3.so.3`). The group library has no connection to the
//! daemon:
//!
//! - [`sempa_group_request`] sends requests to the group service.
//! - [`sempa_group_traced`] records the group library's calls for a tracer.

#![allow(unsafe_code)]

use crate::memory::{OutParam, ProgramStr};
use crate::receive;
use crate::{session, trace};
use sempa_proto::group::{GroupCall, GroupReply, TracedGroupCall, encode_group_list};
use sempa_proto::task::Reply;
use sempa_proto::trace::{int_item, ints_item, text_item};
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{c_char, c_int, c_void};

/// Sends a request to the group service and waits without limit for the reply. Messages that arrive
/// before the reply are taken in.
///
/// `call` is a [`GroupCall`]; `number` is its argument (a count, a tid or an instance). Returns a
/// number ≥ 0 or one of PVM's error codes; nothing is printed and `pvm_errno` is unchanged. If the
/// result of the call is a list, the list is stored in memory that the caller must release with
/// `free`. For all other calls null is stored.
///
/// # Safety
/// `group` must be null or a string; `list` and `count` must be null or valid for one value.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_group_request(
    call: c_int,
    group: *const c_char,
    number: c_int,
    list: *mut *mut c_int,
    count: *mut c_int,
) -> c_int {
    // SAFETY: by this function's contract.
    let (list, count) = unsafe { (OutParam::new(list), OutParam::new(count)) };
    list.set(std::ptr::null_mut());
    count.set(0);
    // SAFETY: by this function's contract.
    let group =
        unsafe { ProgramStr::new(group) }.map_or(Vec::new(), |text| text.to_bytes().to_vec());
    match send_group_request(call, group, number) {
        Ok(GroupResult::Number(number)) => number,
        Ok(GroupResult::List(_)) if list.is_null() => 0,
        Ok(GroupResult::List(integers)) => match malloc_copy(&integers) {
            Some(copy) => {
                list.set(copy);
                count.set(integers.len() as c_int);
                0
            }
            None => PvmError::NoMem.code(),
        },
        Err(error) => error.code(),
    }
}

enum GroupResult {
    Number(i32),
    List(Vec<i32>),
}

fn send_group_request(call: c_int, group: Vec<u8>, number: c_int) -> PvmResult<GroupResult> {
    let request = GroupCall::try_from(call)?.to_request(group, number);
    let rt = session::runtime()?;
    let mut take_in_messages = || receive::take_in_all(&rt);
    // Inside a handler no messages are taken in, because handlers must not interrupt each other.
    let on_arrival: Option<&mut dyn FnMut() -> bool> = if receive::is_in_handler() {
        None
    } else {
        Some(&mut take_in_messages)
    };
    let reply = rt.group_request_and_wait(request, on_arrival);
    receive::take_in_all(&rt);
    match reply {
        Reply::Group(GroupReply::Number(number)) => Ok(GroupResult::Number(number)),
        Reply::Group(GroupReply::Members(tids)) => Ok(GroupResult::List(
            tids.iter().map(|tid| tid.raw()).collect(),
        )),
        Reply::Group(GroupReply::Groups(groups)) => {
            Ok(GroupResult::List(encode_group_list(&groups)))
        }
        Reply::Failed { error, .. } => Err(error),
        _ => Err(PvmError::BadMsg),
    }
}

/// Copies integers into memory of the C library; `None` if no memory is available.
fn malloc_copy(integers: &[i32]) -> Option<*mut c_int> {
    // SAFETY: `malloc` accepts any size.
    let copy = unsafe { libc::malloc(size_of_val(integers).max(1)) }.cast::<c_int>();
    if copy.is_null() {
        return None;
    }
    // SAFETY: the memory was just allocated, has space for all integers and is aligned for any
    // type.
    unsafe { std::ptr::copy_nonoverlapping(integers.as_ptr(), copy, integers.len()) };
    Some(copy)
}

/// Runs `body` as one call of the group library and records this call for a tracer. Calls that
/// `body` makes internally produce no records.
///
/// `event` is a [`TracedGroupCall`] and `argument` is the argument of the group call. The function
/// calls `body` with `data` and returns the result. For a broadcast, `body` stores the receivers
/// through `list` and `count`, which are null for all other calls.
///
/// # Safety
/// `group` must be null or a string. It must be valid to call `body` with `data`. `list` and
/// `count` must be null or valid for one value. After `body` has run, `*list` must point to
/// `*count` integers until this function returns.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_group_traced(
    event: c_int,
    group: *const c_char,
    argument: c_int,
    body: Option<extern "C" fn(*mut c_void) -> c_int>,
    data: *mut c_void,
    list: *const *const c_int,
    count: *const c_int,
) -> c_int {
    let Some(body) = body else {
        return PvmError::BadParam.code();
    };
    let Ok(event) = TracedGroupCall::try_from(event) else {
        return body(data);
    };
    let (name, argument_item, result_item) = event.trace_names();
    let entry_items = || {
        // SAFETY: by this function's contract.
        let group =
            unsafe { ProgramStr::new(group) }.map_or(Vec::new(), |text| text.to_bytes().to_vec());
        let mut items = vec![text_item("GN", group)];
        items.extend(argument_item.map(|argument_item| int_item(argument_item, argument)));
        items
    };
    trace::traced_call(
        name,
        entry_items,
        || body(data),
        |code| {
            let mut items = vec![int_item(result_item, *code)];
            if !list.is_null() && !count.is_null() {
                // SAFETY: by this function's contract; `body` has stored both values.
                let (list, count) = unsafe { (*list, usize::try_from(*count).unwrap_or(0)) };
                let tids = if list.is_null() {
                    &[]
                } else {
                    // SAFETY: by this function's contract the list has `count` integers.
                    unsafe { std::slice::from_raw_parts(list, count) }
                };
                items.push(ints_item("MDL", tids.to_vec()));
            }
            items
        },
    )
}
