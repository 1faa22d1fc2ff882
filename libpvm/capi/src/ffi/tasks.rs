//! Calls that concern this task and other tasks: enrol, leave, spawn, query, signal, notify, print
//! output.

#![allow(unsafe_code)]

use super::returned_lists::{RecordList, ReturnedList};
use super::trace_items::{c_ints_item, c_string_item, c_strings_item, read_int};
use super::zero_on_success;
use crate::abi::TaskInfo;
use crate::data::{pvmnsibs, pvmsibtids};
use crate::memory::{OutParam, ProgramStr, Stream, Strided, copy_strings};
use crate::session::{self, lock, value_or_report, value_or_report_except};
use crate::trace;
use crate::{leave, output, receive, requests, start};
use sempa_proto::trace::int_item;
use sempa_proto::{PvmError, PvmResult, Tid};
use std::ffi::{c_char, c_int};
use std::sync::atomic::Ordering::Relaxed;

/// Returns this task's tid. Enrols the process first if it is not a task.
#[unsafe(no_mangle)]
extern "C" fn pvm_mytid() -> c_int {
    trace::traced_call(
        "mytid",
        trace::no_items,
        || value_or_report("pvm_mytid", session::runtime().map(|rt| rt.tid().raw())),
        |tid| vec![int_item("MT", *tid)],
    )
}

fn parent_tid() -> PvmResult<i32> {
    match session::runtime()?.parent_tid().raw() {
        0 => Err(PvmError::NoParent),
        code if code == PvmError::ParentNotSet.code() => Err(PvmError::ParentNotSet),
        tid => Ok(tid),
    }
}

/// Returns the tid of the task that spawned this task, or an error code if this task has no parent.
#[unsafe(no_mangle)]
extern "C" fn pvm_parent() -> c_int {
    trace::traced_call(
        "parent",
        trace::no_items,
        || {
            value_or_report_except(
                "pvm_parent",
                parent_tid(),
                &[PvmError::NoParent, PvmError::ParentNotSet],
            )
        },
        |tid| vec![int_item("PT", *tid)],
    )
}

/// Leaves the virtual machine; the process continues to run.
#[unsafe(no_mangle)]
extern "C" fn pvm_exit() -> c_int {
    trace::record_event("exit", trace::no_items);
    leave::leave_vm();
    0
}

/// Starts tasks and returns the number of started tasks. Stores the tid or the error code of each
/// task in `tids`.
///
/// # Safety
/// `file` and `selection` must be null or strings, `args` null or a list of strings that ends with
/// null, and `tids` null or have space for `count` ints.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_spawn(
    file: *const c_char,
    args: *const *const c_char,
    flags: c_int,
    selection: *const c_char,
    count: c_int,
    tids: *mut c_int,
) -> c_int {
    trace::traced_call(
        "spawn",
        // SAFETY: by this function's contract.
        || unsafe {
            vec![
                c_string_item("SE", file),
                c_string_item("SW", selection),
                int_item("SF", flags),
                int_item("SC", count),
            ]
        },
        || {
            let spawn_tasks = || {
                session::runtime()?;
                // SAFETY: by this function's contract.
                let (file, args, selection) = unsafe {
                    (
                        ProgramStr::new(file)?,
                        copy_strings(args, None)?,
                        ProgramStr::new(selection),
                    )
                };
                let selection = selection
                    .map(|selection| selection.to_string_lossy())
                    .unwrap_or_default();
                let results =
                    requests::spawn(file.to_string_lossy(), args, flags, selection, count)?;
                if !tids.is_null() {
                    // SAFETY: as above. There are never more results than tasks were requested.
                    let target = unsafe { Strided::new(tids, count, 1)? };
                    for (i, result) in results.iter().take(target.len()).enumerate() {
                        target.set(i, result.map_or_else(PvmError::code, Tid::raw));
                    }
                }
                Ok(results.iter().filter(|result| result.is_ok()).count() as i32)
            };
            value_or_report("pvm_spawn", spawn_tasks())
        },
        // SAFETY: by this function's contract.
        |n| unsafe { vec![int_item("CC", *n), c_ints_item("STL", tids, *n)] },
    )
}

static SIBLINGS: ReturnedList<c_int> = ReturnedList::new();

/// Stores the tids of all tasks of the spawn that started this task, and returns their number.
///
/// # Safety
/// `tids` must be null or valid for one pointer.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_siblings(tids: *mut *mut c_int) -> c_int {
    trace::traced_call(
        "siblings",
        trace::no_items,
        || {
            // SAFETY: by this function's contract.
            let tids = unsafe { OutParam::new(tids) };
            let store_siblings = || {
                let mut records = RecordList::new();
                requests::wait_for_siblings()?
                    .into_iter()
                    .for_each(|tid| records.push(tid.raw()));
                let count = records.len();
                let list = SIBLINGS.store(records);
                pvmnsibs.store(count, Relaxed);
                pvmsibtids.store(list.cast(), Relaxed);
                tids.set(list);
                Ok(count)
            };
            value_or_report("pvm_siblings", store_siblings())
        },
        // SAFETY: by this function's contract.
        |n| unsafe { vec![c_ints_item("SIB", pvmsibtids.load(Relaxed).cast(), *n)] },
    )
}

static TASKS: ReturnedList<TaskInfo> = ReturnedList::new();

/// Lists the tasks of all hosts, the tasks of one host, or one task, as `selector` requests.
///
/// # Safety
/// `count` must be null or valid for one int, and `tasks` null or valid for one pointer.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_tasks(
    selector: c_int,
    count: *mut c_int,
    tasks: *mut *mut TaskInfo,
) -> c_int {
    trace::traced_call(
        "tasks",
        || vec![int_item("TW", selector)],
        || {
            // SAFETY: by this function's contract.
            let (count, list) = unsafe { (OutParam::new(count), OutParam::new(tasks)) };
            let store_tasks = || {
                let mut records = RecordList::new();
                for task in requests::tasks(selector)? {
                    let program = records.add_text(&task.name);
                    records.push(TaskInfo {
                        tid: task.tid.raw(),
                        parent: task.parent.raw(),
                        host: task.host.tid().raw(),
                        flag: task.flags,
                        program,
                        pid: task.namespace_pid,
                    });
                }
                count.set(records.len());
                list.set(TASKS.store(records));
                Ok(0)
            };
            value_or_report("pvm_tasks", store_tasks())
        },
        // SAFETY: by this function's contract.
        |code| unsafe { vec![int_item("CC", *code), int_item("TNT", read_int(count))] },
    )
}

/// Returns 0 if the task exists, else an error code.
#[unsafe(no_mangle)]
extern "C" fn pvm_pstat(tid: c_int) -> c_int {
    trace::traced_call(
        "pstat",
        || vec![int_item("TT", tid)],
        || {
            value_or_report_except(
                "pvm_pstat",
                zero_on_success(requests::task_status(tid)),
                &[PvmError::NoTask],
            )
        },
        |code| vec![int_item("TST", *code)],
    )
}

/// Sends SIGTERM to a task. Succeeds without effect if the task has already exited.
#[unsafe(no_mangle)]
extern "C" fn pvm_kill(tid: c_int) -> c_int {
    trace::traced_call(
        "kill",
        || vec![int_item("TT", tid)],
        || {
            value_or_report(
                "pvm_kill",
                zero_on_success(requests::send_signal(tid, libc::SIGTERM)),
            )
        },
        trace::return_code_items,
    )
}

/// Sends a signal to a task. Succeeds without effect if the task has already exited.
#[unsafe(no_mangle)]
extern "C" fn pvm_sendsig(tid: c_int, signal: c_int) -> c_int {
    trace::traced_call(
        "sendsig",
        || vec![int_item("TT", tid), int_item("SN", signal)],
        || {
            value_or_report(
                "pvm_sendsig",
                zero_on_success(requests::send_signal(tid, signal)),
            )
        },
        trace::return_code_items,
    )
}

/// Event codes (`PvmHostAdd`, `PvmRouteAdd`) for which `count` is the number of messages and not
/// the number of tids.
const MESSAGE_COUNT_EVENTS: [c_int; 2] = [3, 4];

/// Requests messages about the exit of tasks, or about hosts and routes that are added or deleted.
///
/// # Safety
/// `vals` must be null or contain `count` ints, except for added hosts and routes: for these events
/// `vals` is not read.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_notify(
    what: c_int,
    tag: c_int,
    count: c_int,
    vals: *const c_int,
) -> c_int {
    trace::traced_call(
        "notify",
        // SAFETY: by this function's contract.
        || unsafe {
            vec![
                int_item("NE", what),
                int_item("NMC", tag),
                c_ints_item(
                    "NTL",
                    vals,
                    if MESSAGE_COUNT_EVENTS.contains(&(what & 0xff)) {
                        0
                    } else {
                        count
                    },
                ),
            ]
        },
        || {
            let request_notices = || {
                let vals = if MESSAGE_COUNT_EVENTS.contains(&(what & 0xff)) {
                    Vec::new()
                } else {
                    // SAFETY: by this function's contract.
                    unsafe { Strided::new(vals, count, 1)? }.to_vec()
                };
                zero_on_success(requests::notify(what, tag, count, &vals))
            };
            value_or_report(
                "pvm_notify",
                session::runtime().and_then(|_| request_notices()),
            )
        },
        trace::return_code_items,
    )
}

/// Sets the stream on which the output of children is printed. With null nothing is printed any
/// more, and the output of tasks that are spawned later is sent to the destination of this task's
/// own output.
///
/// # Safety
/// `stream` must be null, or stay open while children write.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_catchout(stream: *mut libc::FILE) -> c_int {
    // SAFETY: by this function's contract.
    let stream = unsafe { Stream::new(stream) };
    let result = session::runtime().map(|_| {
        let mut session = lock();
        let begins_printing = stream.is_some();
        output::set_stream(&mut session, stream);
        if begins_printing {
            receive::take_in_after_send(session);
        }
        0
    });
    value_or_report("pvm_catchout", result)
}

static READY_FDS: ReturnedList<c_int> = ReturnedList::new();

/// Stores the file descriptors that become readable when messages arrive, and returns their number.
///
/// # Safety
/// `fds` must be null or valid for one pointer.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_getfds(fds: *mut *mut c_int) -> c_int {
    trace::traced_call(
        "getfds",
        trace::no_items,
        || {
            // SAFETY: by this function's contract.
            let list = unsafe { OutParam::new(fds) };
            let store_fds = || {
                let fd = receive::ready_fd(&session::runtime()?).ok_or(PvmError::SysErr)?;
                if list.is_null() {
                    return Err(PvmError::BadParam);
                }
                let mut records = RecordList::new();
                records.push(fd);
                list.set(READY_FDS.store(records));
                Ok(1)
            };
            value_or_report("pvm_getfds", store_fds())
        },
        // SAFETY: by this function's contract.
        |n| unsafe {
            vec![
                int_item("CC", *n),
                c_ints_item(
                    "FDS",
                    fds.as_ref()
                        .map_or(std::ptr::null(), |list| list.cast_const()),
                    *n,
                ),
            ]
        },
    )
}

/// Starts the first daemon of a virtual machine with the arguments `args`, and enrols. If `block`
/// is nonzero, also waits until all hosts of the host file have been added or have failed.
///
/// # Safety
/// `args` must be null or contain `count` strings.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_start_pvmd(
    count: c_int,
    args: *const *const c_char,
    block: c_int,
) -> c_int {
    trace::traced_call(
        "start_pvmd",
        // SAFETY: by this function's contract.
        || unsafe { vec![int_item("BF", block), c_strings_item("AS", args, count)] },
        || {
            // SAFETY: by this function's contract.
            let args = unsafe { copy_strings(args, Some(count.max(0))) };
            value_or_report(
                "pvm_start_pvmd",
                args.and_then(|args| zero_on_success(start::start_daemon(&args, block != 0))),
            )
        },
        trace::return_code_items,
    )
}
