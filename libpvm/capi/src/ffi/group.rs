//! The entries for the group library (`libgpvm3.so.3`), which holds no connection of its own: one to the group service, one
//! for the trace of its calls.

#![allow(unsafe_code)]

use crate::memory::{Out, Text};
use crate::receive;
use crate::{session, trace};
use sempa_proto::group::{GroupCall, GroupEvent, GroupReply, list_words};
use sempa_proto::task::Reply;
use sempa_proto::trace::{int, ints, text};
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{c_char, c_int, c_void};

/// Asks the group service, and waits as long as the answer takes; messages are taken in meanwhile.
///
/// `call` is a [`GroupCall`]; `number` is what goes with it (a count, a tid, an instance). The answer is a number ≥ 0 or one
/// of PVM's codes; nothing is printed and `pvm_errno` stays. Calls that answer a list leave it in memory that the caller
/// frees with `free`; for the others the list is null.
///
/// # Safety
/// `group` is null or a string; `list` and `count` are null or good for one value.
#[unsafe(no_mangle)]
unsafe extern "C" fn sempa_group_request(
    call: c_int,
    group: *const c_char,
    number: c_int,
    list: *mut *mut c_int,
    count: *mut c_int,
) -> c_int {
    // SAFETY: by this function's contract.
    let (list, count) = unsafe { (Out::new(list), Out::new(count)) };
    list.set(std::ptr::null_mut());
    count.set(0);
    // SAFETY: by this function's contract.
    let group = unsafe { Text::new(group) }.map_or(Vec::new(), |text| text.bytes().to_vec());
    match ask(call, group, number) {
        Ok(Answer::Number(number)) => number,
        Ok(Answer::Words(_)) if list.is_null() => 0,
        Ok(Answer::Words(words)) => match copy(&words) {
            Some(place) => {
                list.set(place);
                count.set(words.len() as c_int);
                0
            }
            None => PvmError::NoMem.code(),
        },
        Err(error) => error.code(),
    }
}

enum Answer {
    Number(i32),
    Words(Vec<i32>),
}

fn ask(call: c_int, group: Vec<u8>, number: c_int) -> PvmResult<Answer> {
    let request = GroupCall::try_from(call)?.request(group, number);
    let rt = session::runtime()?;
    let mut pump = || receive::pump(&rt);
    // Inside a handler nothing is taken in: handlers do not interrupt each other.
    let arrived: Option<&mut dyn FnMut()> = if receive::in_handler() {
        None
    } else {
        Some(&mut pump)
    };
    match rt.group_request(request, arrived) {
        Reply::Group(GroupReply::Number(number)) => Ok(Answer::Number(number)),
        Reply::Group(GroupReply::Members(tids)) => {
            Ok(Answer::Words(tids.iter().map(|tid| tid.raw()).collect()))
        }
        Reply::Group(GroupReply::Groups(groups)) => Ok(Answer::Words(list_words(&groups))),
        Reply::Failed { error, .. } => Err(error),
        _ => Err(PvmError::BadMsg),
    }
}

/// The words in memory of the C library's.
fn copy(words: &[i32]) -> Option<*mut c_int> {
    // SAFETY: malloc takes any size.
    let place = unsafe { libc::malloc(size_of_val(words).max(1)) }.cast::<c_int>();
    if place.is_null() {
        return None;
    }
    // SAFETY: the memory is ours alone, as long as the words and aligned for any type.
    unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), place, words.len()) };
    Some(place)
}

/// Makes a call of the group library one of this library: what it does inside makes no trace records of its own, and a tracer
/// is told of it as a whole.
///
/// `event` is a [`GroupEvent`], `argument` what belongs to it. `body` does the work with `data`; its answer is the answer.
/// For a broadcast it leaves the receivers behind `list` and `count`, which are null for the other calls.
///
/// # Safety
/// `group` is null or a string; `body` may be called with `data`; `list` and `count` are null or good for one value, and
/// behind `list` are then `count` words until this function returns.
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
    let Ok(event) = GroupEvent::try_from(event) else {
        return body(data);
    };
    let (name, item, answer) = event.names();
    let entry = || {
        // SAFETY: by this function's contract.
        let group = unsafe { Text::new(group) }.map_or(Vec::new(), |text| text.bytes().to_vec());
        let mut items = vec![text("GN", group)];
        items.extend(item.map(|item| int(item, argument)));
        items
    };
    trace::call(
        name,
        entry,
        || body(data),
        |code| {
            let mut items = vec![int(answer, *code)];
            if !list.is_null() && !count.is_null() {
                // SAFETY: by this function's contract; `body` has left them there.
                let (list, count) = unsafe { (*list, usize::try_from(*count).unwrap_or(0)) };
                let tids = if list.is_null() {
                    &[]
                } else {
                    // SAFETY: by this function's contract the list has `count` words.
                    unsafe { std::slice::from_raw_parts(list, count) }
                };
                items.push(ints("MDL", tids.to_vec()));
            }
            items
        },
    )
}
