//! Calls for the hosts of the virtual machine, and calls by which a task registers as resource
//! manager, hoster, tasker or tracer.

#![allow(unsafe_code)]

use super::returned_lists::{RecordList, ReturnedList};
use super::trace_items::{c_ints_item, c_string_item, c_strings_item, read_int};
use super::zero_on_success;
use crate::abi::{HostInfo, MASK_BYTES, TimeVal};
use crate::memory::{OutParam, ProgramStr, Strided, copy_strings};
use crate::process;
use crate::requests;
use crate::session::{self, value_or_report, value_or_report_except};
use crate::trace;
use sempa_proto::table::HostEntry;
use sempa_proto::task::{DEBUG_QUERY_INTS_MAX, Service, TracerSettings};
use sempa_proto::trace::int_item;
use sempa_proto::{PvmError, PvmResult, Tid};
use std::ffi::{c_char, c_int};

fn push_host_info(records: &mut RecordList<HostInfo>, host: &HostEntry) {
    let (name, arch) = (records.add_text(&host.name), records.add_text(&host.arch));
    records.push(HostInfo {
        tid: host.id.tid().raw(),
        name,
        arch,
        speed: host.speed,
        dsig: host.dsig,
    });
}

static HOSTS: ReturnedList<HostInfo> = ReturnedList::new();

/// Stores the list of hosts, the number of hosts, and the number of different data formats of the
/// hosts.
///
/// # Safety
/// Each pointer must be null or valid for one value.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_config(
    host_count: *mut c_int,
    format_count: *mut c_int,
    list: *mut *mut HostInfo,
) -> c_int {
    trace::traced_call(
        "config",
        trace::no_items,
        || {
            // SAFETY: by this function's contract.
            let (host_count, format_count, list) = unsafe {
                (
                    OutParam::new(host_count),
                    OutParam::new(format_count),
                    OutParam::new(list),
                )
            };
            let store_hosts = || {
                let table = requests::config()?;
                let mut records = RecordList::new();
                table
                    .hosts
                    .iter()
                    .for_each(|host| push_host_info(&mut records, host));
                host_count.set(records.len());
                format_count.set(table.data_format_count() as i32);
                if !list.is_null() {
                    list.set(HOSTS.store(records));
                }
                Ok(0)
            };
            value_or_report("pvm_config", store_hosts())
        },
        // SAFETY: by this function's contract.
        |code| unsafe {
            vec![
                int_item("NH", read_int(host_count)),
                int_item("NA", read_int(format_count)),
                int_item("CC", *code),
            ]
        },
    )
}

/// Stores one status per host in `target` unless `target` is null. Returns the number of statuses
/// for which `is_success` is true.
unsafe fn store_statuses(
    target: *mut c_int,
    results: &[i32],
    is_success: fn(i32) -> bool,
) -> PvmResult<i32> {
    if !target.is_null() {
        // SAFETY: the caller's array has one element per name.
        let statuses = unsafe { Strided::new(target, results.len() as c_int, 1)? };
        results
            .iter()
            .enumerate()
            .for_each(|(i, status)| statuses.set(i, *status));
    }
    Ok(results.iter().filter(|status| is_success(**status)).count() as i32)
}

/// Copies the names of hosts. A count below 1 or above [`requests::HOSTS_PER_CALL_MAX`] is refused
/// before any name is read.
unsafe fn copy_host_names(names: *const *const c_char, count: c_int) -> PvmResult<Vec<Vec<u8>>> {
    if !(1..=requests::HOSTS_PER_CALL_MAX as c_int).contains(&count) {
        return Err(PvmError::BadParam);
    }
    // SAFETY: the caller's array has `count` strings.
    unsafe { copy_strings(names, Some(count)) }
}

/// Adds hosts and returns the number of added hosts. Stores the tid of the new host or an error
/// code for each name in `status`.
///
/// # Safety
/// `hosts` must be null or contain `count` strings, and `status` must be null or have space for
/// `count` ints.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_addhosts(
    hosts: *const *const c_char,
    count: c_int,
    status: *mut c_int,
) -> c_int {
    trace::traced_call(
        "addhosts",
        // SAFETY: by this function's contract.
        || unsafe { vec![c_strings_item("HNL", hosts, count)] },
        || {
            let add_hosts = || {
                session::runtime()?;
                // SAFETY: by this function's contract.
                let added_hosts = requests::add_hosts(unsafe { copy_host_names(hosts, count)? })?;
                let status_code = |host: &sempa_proto::table::AddedHost| {
                    host.result
                        .as_ref()
                        .map_or_else(|error| error.code(), |entry| entry.id.tid().raw())
                };
                let codes: Vec<i32> = added_hosts
                    .iter()
                    .take(count.max(0) as usize)
                    .map(status_code)
                    .collect();
                // SAFETY: as above, by this function's contract.
                unsafe { store_statuses(status, &codes, |status| status > 0) }
            };
            value_or_report("pvm_addhosts", add_hosts())
        },
        trace::return_code_items,
    )
}

/// Removes hosts and returns the number of removed hosts. Stores 0 or an error code for each name
/// in `status`.
///
/// # Safety
/// As for [`pvm_addhosts`].
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_delhosts(
    hosts: *const *const c_char,
    count: c_int,
    status: *mut c_int,
) -> c_int {
    trace::traced_call(
        "delhosts",
        // SAFETY: by this function's contract.
        || unsafe { vec![c_strings_item("HNL", hosts, count)] },
        || {
            let delete_hosts = || {
                session::runtime()?;
                // SAFETY: by this function's contract.
                let removal_results =
                    requests::delete_hosts(unsafe { copy_host_names(hosts, count)? })?;
                let status_code =
                    |result: &PvmResult<()>| result.map_or_else(PvmError::code, |()| 0);
                let codes: Vec<i32> = removal_results
                    .iter()
                    .take(count.max(0) as usize)
                    .map(status_code)
                    .collect();
                // SAFETY: as above, by this function's contract.
                unsafe { store_statuses(status, &codes, |status| status == 0) }
            };
            value_or_report("pvm_delhosts", delete_hosts())
        },
        trace::return_code_items,
    )
}

/// Returns 0 if the host is up, else an error code.
///
/// # Safety
/// `name` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_mstat(name: *const c_char) -> c_int {
    trace::traced_call(
        "mstat",
        // SAFETY: by this function's contract.
        || unsafe { vec![c_string_item("HN", name)] },
        || {
            // SAFETY: by this function's contract.
            let name = unsafe { ProgramStr::new(name) };
            let result = session::runtime()
                .and_then(|_| zero_on_success(requests::host_status(name?.to_string_lossy())));
            value_or_report_except("pvm_mstat", result, &[PvmError::NoHost, PvmError::HostFail])
        },
        |code| vec![int_item("HS", *code)],
    )
}

/// Returns the data signature of the first host with this architecture, or an error code if no host
/// has this architecture.
///
/// # Safety
/// `arch` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_archcode(arch: *const c_char) -> c_int {
    trace::traced_call(
        "archcode",
        // SAFETY: by this function's contract.
        || unsafe { vec![c_string_item("AN", arch)] },
        || {
            // SAFETY: by this function's contract.
            let arch = unsafe { ProgramStr::new(arch) };
            let result =
                session::runtime().and_then(|_| requests::arch_code(&arch?.to_string_lossy()));
            value_or_report("pvm_archcode", result)
        },
        |code| vec![int_item("AC", *code)],
    )
}

/// Returns the host part of a tid: the tid of the host on which the task was created.
#[unsafe(no_mangle)]
extern "C" fn pvm_tidtohost(tid: c_int) -> c_int {
    Tid::from_raw(tid).host_part().raw()
}

/// Stores the time of day of a host in `clock`. Stores in `delta` the time by which the local clock
/// is ahead of the host's clock.
///
/// # Safety
/// Each pointer must be null or valid for one structure.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_hostsync(host: c_int, clock: *mut TimeVal, delta: *mut TimeVal) -> c_int {
    // SAFETY: by this function's contract.
    let (clock, delta) = unsafe { (OutParam::new(clock), OutParam::new(delta)) };
    let micros = |(seconds, micros): (i64, i64)| seconds * 1_000_000 + micros;
    // `tv_usec` is never negative, even for negative times.
    let to_timeval = |time_us: i64| TimeVal {
        tv_sec: time_us.div_euclid(1_000_000),
        tv_usec: time_us.rem_euclid(1_000_000),
    };
    let store_times = || {
        session::runtime()?;
        let local_start_us = micros(process::unix_time());
        let host_time_us =
            i64::try_from(requests::host_clock(host)?).map_err(|_| PvmError::Overflow)?;
        let local_end_us = micros(process::unix_time());
        clock.set(to_timeval(host_time_us));
        delta.set(to_timeval(
            local_start_us + (local_end_us - local_start_us) / 2 - host_time_us,
        ));
        Ok(0)
    };
    value_or_report("pvm_hostsync", store_times())
}

/// Halts the virtual machine: all its tasks and daemons end.
#[unsafe(no_mangle)]
extern "C" fn pvm_halt() -> c_int {
    trace::record_event("halt", trace::no_items);
    value_or_report("pvm_halt", zero_on_success(requests::halt()))
}

static MASTER_ENTRY: ReturnedList<HostInfo> = ReturnedList::new();

/// Registers this task as the resource manager and stores the master's host entry in `master`.
/// Returns the tid of the previous resource manager; 0 if there was none.
///
/// # Safety
/// `master` must be null or valid for one pointer.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_reg_rm(master: *mut *mut HostInfo) -> c_int {
    trace::traced_call(
        "reg_rm",
        trace::no_items,
        || {
            // SAFETY: by this function's contract.
            let list = unsafe { OutParam::new(master) };
            let register_rm = || {
                let (previous_tid, host) = requests::register_rm()?;
                let mut records = RecordList::new();
                host.iter()
                    .for_each(|host| push_host_info(&mut records, host));
                if records.len() > 0 {
                    list.set(MASTER_ENTRY.store(records));
                }
                Ok(previous_tid)
            };
            value_or_report("pvm_reg_rm", register_rm())
        },
        trace::return_code_items,
    )
}

/// Registers this task to start daemons in place of the master's daemon (`SM_STHOST`). If this task
/// is registered already, unregisters it.
#[unsafe(no_mangle)]
extern "C" fn pvm_reg_hoster() -> c_int {
    trace::traced_call(
        "reg_hoster",
        trace::no_items,
        || {
            value_or_report(
                "pvm_reg_hoster",
                zero_on_success(requests::toggle_service(Service::Hoster)),
            )
        },
        trace::return_code_items,
    )
}

/// Registers this task to start the tasks of this host in place of the host's daemon (`SM_STTASK`).
/// If this task is registered already, unregisters it.
#[unsafe(no_mangle)]
extern "C" fn pvm_reg_tasker() -> c_int {
    trace::traced_call(
        "reg_tasker",
        trace::no_items,
        || {
            value_or_report(
                "pvm_reg_tasker",
                zero_on_success(requests::toggle_service(Service::Tasker)),
            )
        },
        trace::return_code_items,
    )
}

/// Registers this task as the tracer, which receives trace and output of all tasks without another
/// destination. If this task is registered already, unregisters it.
///
/// # Safety
/// `mask` must be null or a string.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_reg_tracer(
    trace_ctx: c_int,
    trace_tag: c_int,
    out_ctx: c_int,
    out_tag: c_int,
    mask: *const c_char,
    buffer_size: c_int,
    options: c_int,
) -> c_int {
    trace::traced_call(
        "reg_tracer",
        // SAFETY: by this function's contract.
        || unsafe {
            vec![
                int_item("TRC", trace_ctx),
                int_item("TRT", trace_tag),
                int_item("TRX", out_ctx),
                int_item("TRO", out_tag),
                c_string_item("TRM", mask),
                int_item("TRB", buffer_size),
                int_item("TRL", options),
            ]
        },
        || {
            // SAFETY: by this function's contract.
            let mask = unsafe { ProgramStr::new(mask) };
            let register_tracer = || {
                session::runtime()?;
                let mask = mask?
                    .to_bytes()
                    .iter()
                    .copied()
                    .take(MASK_BYTES - 1)
                    .collect();
                requests::toggle_tracer(TracerSettings {
                    trace_ctx,
                    trace_tag,
                    out_ctx,
                    out_tag,
                    event_mask: mask,
                    buffer_bytes: buffer_size,
                    trace_option: options,
                })
            };
            value_or_report("pvm_reg_tracer", zero_on_success(register_tracer()))
        },
        trace::return_code_items,
    )
}

/// Queries internal counters of the daemon, or makes the daemon write lines to its log. Stores the
/// number of returned counters in `result_count`, and at most ten counters in `result_values`.
///
/// # Safety
/// `args` must be null or contain `count` ints, `result_count` must be null or valid for one int,
/// and `result_values` must be null or have space for ten ints.
#[unsafe(no_mangle)]
unsafe extern "C" fn pvm_tickle(
    count: c_int,
    args: *const c_int,
    result_count: *mut c_int,
    result_values: *mut c_int,
) -> c_int {
    trace::traced_call(
        "tickle",
        // SAFETY: by this function's contract.
        || unsafe { vec![c_ints_item("TA", args, count)] },
        || {
            let store_counters = || {
                session::runtime()?;
                if !(1..=DEBUG_QUERY_INTS_MAX as c_int).contains(&count) {
                    return Err(PvmError::BadParam);
                }
                // SAFETY: by this function's contract.
                let (query, result_count) = unsafe {
                    (
                        Strided::new(args, count, 1)?.to_vec(),
                        OutParam::new(result_count),
                    )
                };
                let counters = requests::query_daemon_counters(query)?;
                result_count.set(counters.len() as c_int);
                if !result_values.is_null() {
                    // SAFETY: by this function's contract there is space for ten ints, and no more
                    // than ten ints are stored.
                    let target = unsafe {
                        Strided::new(
                            result_values,
                            counters.len().min(DEBUG_QUERY_INTS_MAX) as c_int,
                            1,
                        )?
                    };
                    (0..counters.len().min(DEBUG_QUERY_INTS_MAX))
                        .for_each(|i| target.set(i, counters[i]));
                }
                Ok(0)
            };
            value_or_report("pvm_tickle", store_counters())
        },
        // SAFETY: by this function's contract.
        |code| unsafe {
            vec![
                int_item("CC", *code),
                c_ints_item("TR", result_values, read_int(result_count).min(10)),
            ]
        },
    )
}
