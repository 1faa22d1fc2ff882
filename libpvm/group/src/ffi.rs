//! The C functions of the group library that programs call.
//!
//! Every function trusts the caller where C has no means to check: pointers are null or valid,
//! strings are terminated, and arrays have the length that follows from `count` and the group. The
//! functions check all other arguments. If membership functions, barriers and broadcasts fail, they
//! only set `pvm_errno`; collective calls also report errors as `libpvm3` does.

#![allow(unsafe_code)]

use crate::collective::{self, Collective};
use crate::host_info::{self, NO_COORDINATOR};
use crate::pvm::{self, ElementType, Elements};
use crate::reduce_ops::{ReduceOp, combine};
use crate::server_compat;
use sempa_proto::group::{GroupCall, TracedGroupCall};
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering::Relaxed};

/// A function for `pvm_reduce`. Its arguments are the element type, the first operand, the second
/// operand, the number of elements, and the error code. The function replaces the first operand by
/// the result.
pub type ReduceFn = extern "C" fn(*mut c_int, *mut c_void, *mut c_void, *mut c_int, *mut c_int);

/// Tid to which programs send messages for the group server; set by [`gs_getgstid`].
#[unsafe(no_mangle)]
pub static gstid: AtomicI32 = AtomicI32::new(-1);

/// Time limit of programs that call the group server directly; a null pointer means no limit.
#[unsafe(no_mangle)]
pub static pvmgs_tmout: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Reads a group name. Null is read as the empty name, which no group has.
///
/// # Safety
/// `group` is null or a string that lives for `'a`.
unsafe fn group_name<'a>(group: *const c_char) -> &'a CStr {
    if group.is_null() {
        c""
    } else {
        // SAFETY: the caller's contract: a string, as it is not null.
        unsafe { CStr::from_ptr(group) }
    }
}

/// Makes a traced group request that returns a number. Returns the number; on an error, sets
/// `pvm_errno` and returns the error code.
///
/// # Safety
/// `group` is null or a string.
unsafe fn request_number(
    call: GroupCall,
    event: TracedGroupCall,
    group: *const c_char,
    number: c_int,
) -> c_int {
    // SAFETY: the caller's contract: null or a string.
    let group = unsafe { group_name(group) };
    let make_request = || {
        (
            pvm::request_number(call, group, number).unwrap_or_else(pvm::set_errno),
            Vec::new(),
        )
    };
    pvm::call_traced(event, group, number, make_request)
}

/// Adds the calling task to a group; returns its instance number.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_joingroup(group: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { request_number(GroupCall::Join, TracedGroupCall::Join, group, 0) }
}

/// Removes the calling task from a group.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_lvgroup(group: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { request_number(GroupCall::Leave, TracedGroupCall::Leave, group, 0) }
}

/// Returns the instance number of a task in a group.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_getinst(group: *const c_char, tid: c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { request_number(GroupCall::Instance, TracedGroupCall::Instance, group, tid) }
}

/// Returns the tid of the member with an instance number.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_gettid(group: *const c_char, instance: c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { request_number(GroupCall::Member, TracedGroupCall::Member, group, instance) }
}

/// Returns the number of members of a group.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_gsize(group: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { request_number(GroupCall::Size, TracedGroupCall::Size, group, 0) }
}

/// Waits until `count` members have called this function; −1 means the number of current members.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_barrier(group: *const c_char, count: c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { request_number(GroupCall::Barrier, TracedGroupCall::Barrier, group, count) }
}

/// Waits until `count` members have called this function; −1 means the number of current members.
/// Afterwards the group accepts no new members.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_freezegroup(group: *const c_char, count: c_int) -> c_int {
    // SAFETY: by this function's contract.
    pvm::request_number(GroupCall::Freeze, unsafe { group_name(group) }, count)
        .unwrap_or_else(pvm::set_errno)
}

/// Sends the active send buffer to all members except the caller. The caller need not be a member.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_bcast(group: *const c_char, tag: c_int) -> c_int {
    // SAFETY: by this function's contract.
    let group = unsafe { group_name(group) };
    let receivers = || {
        let own_tid = pvm::mytid()?;
        let mut members = pvm::request_list(GroupCall::Members, group)?;
        members.retain(|tid| *tid != 0 && *tid != own_tid);
        if members.is_empty() {
            Err(PvmError::NoInst)
        } else {
            Ok(members)
        }
    };
    pvm::call_traced(TracedGroupCall::Bcast, group, tag, || match receivers() {
        Ok(receivers) => (pvm::mcast(&receivers, tag), receivers),
        Err(error) => (pvm::set_errno(error), Vec::new()),
    })
}

/// Makes a traced collective call. The tuple contains the C function's name for error reports, the
/// group and the tag. Returns 0 on success; otherwise reports the error as a function of `libpvm3`
/// does and returns the error code.
fn collective_call(
    event: TracedGroupCall,
    (function_name, group, tag): (&CStr, &CStr, c_int),
    body: impl FnOnce() -> PvmResult<()>,
) -> c_int {
    let run_call = || {
        (
            body().map_or_else(|error| pvm::report_error(function_name, error), |()| 0),
            Vec::new(),
        )
    };
    pvm::call_traced(event, group, tag, run_call)
}

/// Arrays of a gather or scatter call.
struct CollectiveArrays {
    /// Array with `count` elements of the calling member.
    member_elements: *mut c_void,
    /// Array of the root with `count` elements for each instance.
    root_elements: *mut c_void,
    count: c_int,
    kind: c_int,
}

/// A function that exchanges data between the members. Its arguments are the calling member's
/// elements and a function that returns the root's elements for an instance.
type ExchangeFn = fn(&Collective, &Elements, &dyn Fn(usize) -> Elements) -> PvmResult<()>;

/// Makes a gather or scatter call, in which `exchange` transfers the elements.
///
/// # Safety
/// `group` is null or a string; the arrays are null or have the length that [`CollectiveArrays`]
/// states.
unsafe fn gather_or_scatter(
    (event, function_name): (TracedGroupCall, &CStr),
    (group, root, tag): (*const c_char, c_int, c_int),
    arrays: CollectiveArrays,
    exchange: ExchangeFn,
) -> c_int {
    // SAFETY: by this function's contract.
    let group = unsafe { group_name(group) };
    let run_exchange = || {
        let kind = ElementType::try_from(arrays.kind)?;
        // SAFETY: by this function's contract.
        let member_elements = unsafe { Elements::new(arrays.member_elements, arrays.count, kind)? };
        let collective = Collective::query(group, root, tag)?;
        if !collective.is_root() {
            return exchange(&collective, &member_elements, &|_| member_elements);
        }
        collective.size_without_free_instances()?;
        // SAFETY: by this function's contract, because this is the root.
        let root_elements = unsafe { Elements::new(arrays.root_elements, arrays.count, kind)? };
        // SAFETY: the array has `count` elements for each instance.
        exchange(&collective, &member_elements, &|instance| unsafe {
            root_elements.instance_part(instance)
        })
    };
    collective_call(event, (function_name, group, tag), run_exchange)
}

/// Collects `count` elements of every member in the root's `result`, ordered by instance number.
///
/// # Safety
/// `group` is null or a string; `data` is null or has `count` elements; at the root `result` is
/// null or has space for `count` elements of each instance.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_gather(
    result: *mut c_void,
    data: *mut c_void,
    count: c_int,
    kind: c_int,
    tag: c_int,
    group: *const c_char,
    root: c_int,
) -> c_int {
    let arrays = CollectiveArrays {
        member_elements: data,
        root_elements: result,
        count,
        kind,
    };
    // SAFETY: by this function's contract.
    unsafe {
        gather_or_scatter(
            (TracedGroupCall::Gather, c"pvm_gather"),
            (group, root, tag),
            arrays,
            collective::gather,
        )
    }
}

/// Distributes the root's `data` to all members: `count` elements to each, ordered by instance
/// number.
///
/// # Safety
/// `group` is null or a string; `result` is null or has space for `count` elements; at the root
/// `data` is null or has `count` elements for each instance.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_scatter(
    result: *mut c_void,
    data: *mut c_void,
    count: c_int,
    kind: c_int,
    tag: c_int,
    group: *const c_char,
    root: c_int,
) -> c_int {
    let arrays = CollectiveArrays {
        member_elements: result,
        root_elements: data,
        count,
        kind,
    };
    // SAFETY: by this function's contract.
    unsafe {
        gather_or_scatter(
            (TracedGroupCall::Scatter, c"pvm_scatter"),
            (group, root, tag),
            arrays,
            collective::scatter,
        )
    }
}

/// Combines the elements of all members into the root's `data`. `function` is a function of the
/// program or one of the predefined functions.
///
/// # Safety
/// `group` is null or a string; `data` is null or has `count` elements; `function` accepts arrays
/// of `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_reduce(
    function: Option<ReduceFn>,
    data: *mut c_void,
    count: c_int,
    kind: c_int,
    tag: c_int,
    group: *const c_char,
    root: c_int,
) -> c_int {
    // SAFETY: by this function's contract.
    let group = unsafe { group_name(group) };
    let mut function_error_code = 0;
    let run_reduce = || {
        let (function, element_type) = (
            function.ok_or(PvmError::BadParam)?,
            ElementType::try_from(kind)?,
        );
        // SAFETY: by this function's contract.
        let data = unsafe { Elements::new(data, count, element_type)? };
        let collective = Collective::query(group, root, tag)?;
        let word_count = if collective.is_root() {
            (count as usize * element_type.size_bytes()).div_ceil(8)
        } else {
            1
        };
        let mut receive_memory = vec![0u64; word_count];
        // SAFETY: the memory has all elements at the root; other members do not use it.
        let received_elements =
            unsafe { Elements::new(receive_memory.as_mut_ptr().cast(), count, element_type)? };
        collective::reduce(&collective, &data, &received_elements, || {
            let (mut kind, mut count, mut info) = (kind, count, 0);
            function(
                &mut kind,
                data.as_ptr(),
                received_elements.as_ptr(),
                &mut count,
                &mut info,
            );
            function_error_code = info.min(0);
            if function_error_code == 0 {
                Ok(())
            } else {
                Err(PvmError::from_code(function_error_code).unwrap_or(PvmError::BadParam))
            }
        })
    };
    let code = collective_call(
        TracedGroupCall::Reduce,
        (c"pvm_reduce", group, tag),
        run_reduce,
    );
    // The function of the program may use error codes that PVM does not know.
    if function_error_code < 0 {
        function_error_code
    } else {
        code
    }
}

/// Executes one of the predefined reduce functions: combines `y` into `x`.
///
/// # Safety
/// `kind` and `count` point to one value each; `info` is null or points to one value; both arrays
/// have `*count` elements of this type.
unsafe fn run_predefined_reduce(
    op: ReduceOp,
    kind: *mut c_int,
    x: *mut c_void,
    y: *mut c_void,
    count: *mut c_int,
    info: *mut c_int,
) {
    // SAFETY: by this function's contract both point to one value.
    let (kind, count) = unsafe { (ElementType::try_from(*kind), *count) };
    // SAFETY: by this function's contract the arrays have this many elements.
    let result = kind
        .and_then(|kind| unsafe { combine(op, kind, x, y, usize::try_from(count).unwrap_or(0)) });
    if !info.is_null() {
        // SAFETY: `info` is not null, so it points to one value by this function's contract.
        unsafe { *info = result.map_or_else(PvmError::code, |()| 0) };
    }
}

macro_rules! reducers {
    ($($(#[$doc:meta])* $name:ident = $op:expr;)*) => {$(
        $(#[$doc])*
        /// The results replace the elements of `x`.
        ///
        /// # Safety
        /// `kind` and `count` point to one value each, `info` is null or points to one value; `x`
        /// and `y` have `*count` elements.
        #[unsafe(no_mangle)]
        #[allow(non_snake_case)] // PVM's own name.
        pub unsafe extern "C" fn $name(
            kind: *mut c_int,
            x: *mut c_void,
            y: *mut c_void,
            count: *mut c_int,
            info: *mut c_int,
        ) {
            // SAFETY: by this function's contract.
            unsafe { run_predefined_reduce($op, kind, x, y, count, info) }
        }
    )*};
}
reducers! {
    /// Selects the larger of two elements. Of two complex numbers, the number with the larger
    /// modulus is selected.
    PvmMax = ReduceOp::Max;
    /// Selects the smaller of two elements. Of two complex numbers, the number with the smaller
    /// modulus is selected.
    PvmMin = ReduceOp::Min;
    /// Adds the elements of both arrays.
    PvmSum = ReduceOp::Sum;
    /// Multiplies the elements of both arrays.
    PvmProduct = ReduceOp::Product;
}

/// Returns the tid to which programs send messages for the group server. The result is the tid of
/// the calling task, whose own library answers these messages.
#[unsafe(no_mangle)]
pub extern "C" fn gs_getgstid() -> c_int {
    let tid = server_compat::server_tid().unwrap_or_else(pvm::set_errno);
    gstid.store(tid, Relaxed);
    tid
}

/// Prints all groups to the standard error of the calling task. PVM's group server prints the same
/// to its own.
#[unsafe(no_mangle)]
pub extern "C" fn pvm_gsdump() {
    server_compat::dump_groups(c"pvm_gsdump");
}

/// Stores the coordinator and the number of members of a group on one host, and the number of hosts
/// that have members. For a host without members, and for a group that does not exist, stores −1, 0
/// and 0.
///
/// # Safety
/// `group` is null or a string; the other pointers are null or point to one value each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_grphostinfo(
    group: *const c_char,
    host_tid: c_int,
    coordinator: *mut c_int,
    member_count: *mut c_int,
    host_count: *mut c_int,
) -> c_int {
    // SAFETY: by this function's contract.
    let hosts = match unsafe { members_by_host(group) } {
        Ok(hosts) => hosts,
        Err(error) => return pvm::set_errno(error),
    };
    let host = hosts.get(&host_tid);
    let results = [
        (
            coordinator,
            host.map_or(NO_COORDINATOR, |host| host.coordinator),
        ),
        (member_count, host.map_or(0, |host| host.member_count)),
        (host_count, host.map_or(0, |_| hosts.len() as c_int)),
    ];
    for (address, value) in results {
        if !address.is_null() {
            // SAFETY: by this function's contract, as the pointer is not null.
            unsafe { address.write(value) };
        }
    }
    0
}

/// Arrays that [`pvm_grpvhostinfo`] has returned, with one element for each host.
struct HostArrays {
    coordinators: Vec<c_int>,
    member_counts: Vec<c_int>,
}

/// The arrays of the last call of [`pvm_grpvhostinfo`].
static HOST_ARRAYS: Mutex<HostArrays> = Mutex::new(HostArrays {
    coordinators: Vec::new(),
    member_counts: Vec::new(),
});

/// Stores the addresses of two arrays, with the coordinator and the number of members of a group on
/// each host that has members, sorted by the hosts' tids; stores the number of these hosts. The
/// arrays are valid until the next call.
///
/// # Safety
/// `group` is null or a string; the other pointers are null or point to one value each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_grpvhostinfo(
    group: *const c_char,
    coordinators: *mut *mut c_int,
    member_counts: *mut *mut c_int,
    host_count: *mut c_int,
) -> c_int {
    // SAFETY: by this function's contract.
    let hosts = match unsafe { members_by_host(group) } {
        Ok(hosts) => hosts,
        Err(error) => return pvm::set_errno(error),
    };
    let Ok(mut arrays) = HOST_ARRAYS.lock() else {
        return pvm::set_errno(PvmError::SysErr);
    };
    arrays.coordinators = hosts.values().map(|host| host.coordinator).collect();
    arrays.member_counts = hosts.values().map(|host| host.member_count).collect();
    // SAFETY: by this function's contract, as the pointers are not null.
    unsafe {
        if !coordinators.is_null() {
            coordinators.write(arrays.coordinators.as_mut_ptr());
        }
        if !member_counts.is_null() {
            member_counts.write(arrays.member_counts.as_mut_ptr());
        }
        if !host_count.is_null() {
            host_count.write(hosts.len() as c_int);
        }
    }
    0
}

/// Returns the members of a group by host.
///
/// # Errors
/// `BadParam` for a null pointer, and the errors of [`host_info::members_by_host`].
///
/// # Safety
/// `group` is null or a string.
unsafe fn members_by_host(
    group: *const c_char,
) -> PvmResult<std::collections::BTreeMap<c_int, host_info::HostMembers>> {
    if group.is_null() {
        return Err(PvmError::BadParam);
    }
    // SAFETY: by this function's contract, as the pointer is not null.
    host_info::members_by_host(unsafe { CStr::from_ptr(group) })
}
