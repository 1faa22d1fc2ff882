//! The own task and others: enrolling, leaving, starting, asking, signals, notifications, output.

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

/// This task's id.
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

/// The task that spawned this one.
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

/// Starts tasks; answers how many.
///
/// # Safety
/// `file` is null or a string, `args` null or a list of strings that ends with null, `place` null or a string, `tids`
/// null or room for `count` ints.
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
                    // SAFETY: as above; there are never more results than were asked for.
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

/// The tasks of the spawn this one belongs to; answers how many.
///
/// # Safety
/// `tids` is null or good for one pointer.
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

/// The tasks of all hosts, one host, or one task.
///
/// # Safety
/// `count` is null or good for one int, `tasks` null or good for one pointer.
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

/// Is the task there? 0 or an error.
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

/// Ends a task with SIGTERM.
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

/// Kinds of notification whose count says how many messages, not how many tids.
const COUNTED: [c_int; 2] = [3, 4];

/// Asks for messages about the end of tasks, or the coming and going of hosts.
///
/// # Safety
/// `vals` is null or holds `count` ints, except for added hosts and routes, where it is not looked at.
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

/// Prints the output of tasks that are spawned from now on; null: no longer.
///
/// # Safety
/// `stream` is null or stays open as long as children write.
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

/// The descriptors to watch for messages; answers how many.
///
/// # Safety
/// `fds` is null or good for one pointer.
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
/// `args` is null or holds `count` strings.
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
