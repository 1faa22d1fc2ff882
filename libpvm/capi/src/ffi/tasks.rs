//! Calls for this task and other tasks: enrol, leave, spawn, query, signal, notify, catch output.

#![allow(unsafe_code)]

use super::lent::{Records, Shelf};
use super::trace_items::{left_in, trace_ints, trace_text, trace_texts};
use super::zero;
use crate::abi::TaskInfo;
use crate::data::{pvmnsibs, pvmsibtids};
use crate::memory::{Out, Stream, Strided, Text, strings};
use crate::session::{self, answer, answer_quietly, lock};
use crate::trace;
use crate::{ask, leave, output, receive, start};
use sempa_proto::trace::int;
use sempa_proto::{PvmError, PvmResult, Tid};
use std::ffi::{c_char, c_int};
use std::sync::atomic::Ordering::Relaxed;

/// Returns this task's tid.
#[unsafe(no_mangle)]
extern "C" fn pvm_mytid() -> c_int {
    trace::call(
        "mytid",
        trace::nothing,
        || answer("pvm_mytid", session::runtime().map(|rt| rt.tid().raw())),
        |tid| vec![int("MT", *tid)],
    )
}

fn parent() -> PvmResult<i32> {
    match session::runtime()?.parent().raw() {
        0 => Err(PvmError::NoParent),
        code if code == PvmError::ParentNotSet.code() => Err(PvmError::ParentNotSet),
        tid => Ok(tid),
    }
}

/// Returns the tid of the task that spawned this one.
#[unsafe(no_mangle)]
extern "C" fn pvm_parent() -> c_int {
    trace::call(
        "parent",
        trace::nothing,
        || {
            answer_quietly(
                "pvm_parent",
                parent(),
                &[PvmError::NoParent, PvmError::ParentNotSet],
            )
        },
        |tid| vec![int("PT", *tid)],
    )
}

/// Leaves the virtual machine.
#[unsafe(no_mangle)]
extern "C" fn pvm_exit() -> c_int {
    trace::once("exit", trace::nothing);
    leave::exit();
    0
}

/// Starts tasks and returns how many were started.
///
/// # Safety
/// `file` and `place` must be null or strings, `args` null or a list of strings that ends with
/// null, and `tids` null or have room for `count` ints.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_spawn(
    file: *const c_char,
    args: *const *const c_char,
    flags: c_int,
    place: *const c_char,
    count: c_int,
    tids: *mut c_int,
) -> c_int {
    trace::call(
        "spawn",
        // SAFETY: by this function's contract.
        || unsafe {
            vec![
                trace_text("SE", file),
                trace_text("SW", place),
                int("SF", flags),
                int("SC", count),
            ]
        },
        || {
            let spawn = || {
                session::runtime()?;
                // SAFETY: by this function's contract.
                let (file, args, place) =
                    unsafe { (Text::new(file)?, strings(args, None)?, Text::new(place)) };
                let place = place.map(|place| place.string()).unwrap_or_default();
                let results = ask::spawn(file.string(), args, flags, place, count)?;
                if !tids.is_null() {
                    // SAFETY: as above. There are never more results than tasks were requested.
                    let room = unsafe { Strided::new(tids, count, 1)? };
                    for (i, result) in results.iter().take(room.len()).enumerate() {
                        room.set(i, result.map_or_else(PvmError::code, Tid::raw));
                    }
                }
                Ok(results.iter().filter(|result| result.is_ok()).count() as i32)
            };
            answer("pvm_spawn", spawn())
        },
        // SAFETY: by this function's contract.
        |n| unsafe { vec![int("CC", *n), trace_ints("STL", tids, *n)] },
    )
}

static SIBLINGS: Shelf<c_int> = Shelf::new();

/// Stores the tids of all tasks of the spawn that started this task, and returns their number.
///
/// # Safety
/// `tids` must be null or valid for one pointer.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_siblings(tids: *mut *mut c_int) -> c_int {
    trace::call(
        "siblings",
        trace::nothing,
        || {
            // SAFETY: by this function's contract.
            let tids = unsafe { Out::new(tids) };
            let ask = || {
                let mut records = Records::new();
                ask::siblings()?
                    .into_iter()
                    .for_each(|tid| records.push(tid.raw()));
                let count = records.len();
                let list = SIBLINGS.lend(records);
                pvmnsibs.store(count, Relaxed);
                pvmsibtids.store(list.cast(), Relaxed);
                tids.set(list);
                Ok(count)
            };
            answer("pvm_siblings", ask())
        },
        // SAFETY: by this function's contract.
        |n| unsafe { vec![trace_ints("SIB", pvmsibtids.load(Relaxed).cast(), *n)] },
    )
}

static TASKS: Shelf<TaskInfo> = Shelf::new();

/// Lists the tasks of all hosts, of one host, or one task.
///
/// # Safety
/// `count` must be null or valid for one int, and `tasks` null or valid for one pointer.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_tasks(
    selector: c_int,
    count: *mut c_int,
    tasks: *mut *mut TaskInfo,
) -> c_int {
    trace::call(
        "tasks",
        || vec![int("TW", selector)],
        || {
            // SAFETY: by this function's contract.
            let (count, list) = unsafe { (Out::new(count), Out::new(tasks)) };
            let ask = || {
                let mut records = Records::new();
                for task in ask::tasks(selector)? {
                    let program = records.text(&task.name);
                    records.push(TaskInfo {
                        tid: task.tid.raw(),
                        parent: task.parent.raw(),
                        host: task.host.tid().raw(),
                        flag: task.flags,
                        program,
                        pid: task.pid,
                    });
                }
                count.set(records.len());
                list.set(TASKS.lend(records));
                Ok(0)
            };
            answer("pvm_tasks", ask())
        },
        // SAFETY: by this function's contract.
        |code| unsafe { vec![int("CC", *code), int("TNT", left_in(count))] },
    )
}

/// Returns 0 if the task exists, else an error code.
#[unsafe(no_mangle)]
extern "C" fn pvm_pstat(tid: c_int) -> c_int {
    trace::call(
        "pstat",
        || vec![int("TT", tid)],
        || {
            answer_quietly(
                "pvm_pstat",
                zero(ask::task_status(tid)),
                &[PvmError::NoTask],
            )
        },
        |code| vec![int("TST", *code)],
    )
}

/// Sends SIGTERM to a task.
#[unsafe(no_mangle)]
extern "C" fn pvm_kill(tid: c_int) -> c_int {
    trace::call(
        "kill",
        || vec![int("TT", tid)],
        || answer("pvm_kill", zero(ask::signal(tid, libc::SIGTERM))),
        trace::cc,
    )
}

/// Sends a signal to a task.
#[unsafe(no_mangle)]
extern "C" fn pvm_sendsig(tid: c_int, signal: c_int) -> c_int {
    trace::call(
        "sendsig",
        || vec![int("TT", tid), int("SN", signal)],
        || answer("pvm_sendsig", zero(ask::signal(tid, signal))),
        trace::cc,
    )
}

/// Events (`PvmHostAdd`, `PvmRouteAdd`) whose count is the number of messages, not of tids.
const COUNTED: [c_int; 2] = [3, 4];

/// Requests messages about the exit of tasks, or about hosts and routes that are added or deleted.
///
/// # Safety
/// `vals` must be null or hold `count` ints, except for added hosts and routes, where it is not
/// read.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_notify(
    what: c_int,
    tag: c_int,
    count: c_int,
    vals: *const c_int,
) -> c_int {
    trace::call(
        "notify",
        // SAFETY: by this function's contract.
        || unsafe {
            vec![
                int("NE", what),
                int("NMC", tag),
                trace_ints(
                    "NTL",
                    vals,
                    if COUNTED.contains(&(what & 0xff)) {
                        0
                    } else {
                        count
                    },
                ),
            ]
        },
        || {
            let ask = || {
                let vals = if COUNTED.contains(&(what & 0xff)) {
                    Vec::new()
                } else {
                    // SAFETY: by this function's contract.
                    unsafe { Strided::new(vals, count, 1)? }.to_vec()
                };
                zero(ask::notify(what, tag, count, &vals))
            };
            answer("pvm_notify", session::runtime().and_then(|_| ask()))
        },
        trace::cc,
    )
}

/// Prints the output of tasks that are spawned from now on; null turns this off.
///
/// # Safety
/// `stream` must be null, or stay open while children write.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_catchout(stream: *mut libc::FILE) -> c_int {
    // SAFETY: by this function's contract.
    let stream = unsafe { Stream::new(stream) };
    let result = session::runtime().map(|rt| {
        output::catch(&mut lock(), stream);
        receive::pump(&rt);
        0
    });
    answer("pvm_catchout", result)
}

static FDS: Shelf<c_int> = Shelf::new();

/// Stores the file descriptors that become readable when messages arrive, and returns their number.
///
/// # Safety
/// `fds` must be null or valid for one pointer.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_getfds(fds: *mut *mut c_int) -> c_int {
    trace::call(
        "getfds",
        trace::nothing,
        || {
            // SAFETY: by this function's contract.
            let list = unsafe { Out::new(fds) };
            let ask = || {
                let fd = session::runtime()?.ready_fd().ok_or(PvmError::SysErr)?;
                if list.is_null() {
                    return Err(PvmError::BadParam);
                }
                let mut records = Records::new();
                records.push(fd);
                list.set(FDS.lend(records));
                Ok(1)
            };
            answer("pvm_getfds", ask())
        },
        // SAFETY: by this function's contract.
        |n| unsafe {
            vec![
                int("CC", *n),
                trace_ints(
                    "FDS",
                    fds.as_ref()
                        .map_or(std::ptr::null(), |list| list.cast_const()),
                    *n,
                ),
            ]
        },
    )
}

/// Starts the first daemon of a virtual machine and enrols.
///
/// # Safety
/// `args` must be null or hold `count` strings.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_start_pvmd(
    count: c_int,
    args: *const *const c_char,
    block: c_int,
) -> c_int {
    trace::call(
        "start_pvmd",
        // SAFETY: by this function's contract.
        || unsafe { vec![int("BF", block), trace_texts("AS", args, count)] },
        || {
            // SAFETY: by this function's contract.
            let args = unsafe { strings(args, Some(count.max(0))) };
            answer(
                "pvm_start_pvmd",
                args.and_then(|args| zero(start::start_daemon(&args, block != 0))),
            )
        },
        trace::cc,
    )
}
