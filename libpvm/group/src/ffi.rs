//! The C functions that programs call.
//!
//! Every function trusts the caller where C has no means to check: pointers are null or valid,
//! strings are terminated, arrays have the length that count and group imply. It checks everything
//! else. Membership functions, barriers and broadcasts only set `pvm_errno` when they fail;
//! collective calls report errors as `libpvm3` does.

#![allow(unsafe_code)]

use crate::collect::{self, Circle};
use crate::combine::{Op, combine};
use crate::pvm::{self, Data, Kind};
use crate::server;
use sempa_proto::group::{GroupCall, GroupEvent};
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering::Relaxed};

/// A function for `pvm_reduce`: type, first operand and result, second operand, number of elements,
/// error code.
pub type Reducer = extern "C" fn(*mut c_int, *mut c_void, *mut c_void, *mut c_int, *mut c_int);

/// Tid for messages to the group server, set by [`gs_getgstid`].
#[unsafe(no_mangle)]
pub static gstid: AtomicI32 = AtomicI32::new(-1);

/// Time for which programs that use the group server directly wait for it; null: forever.
#[unsafe(no_mangle)]
pub static pvmgs_tmout: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// Reads a group name; null counts as the empty name, which no group has.
///
/// # Safety
/// `group` is null or a string that lives for `'a`.
unsafe fn name<'a>(group: *const c_char) -> &'a CStr {
    if group.is_null() {
        c""
    } else {
        // SAFETY: the caller's contract: a string, as it is not null.
        unsafe { CStr::from_ptr(group) }
    }
}

/// Makes a call that returns a number; an error only sets `pvm_errno`.
///
/// # Safety
/// `group` is null or a string.
unsafe fn quietly(
    call: GroupCall,
    event: GroupEvent,
    group: *const c_char,
    number: c_int,
) -> c_int {
    // SAFETY: the caller's contract: null or a string.
    let group = unsafe { name(group) };
    let ask = || {
        (
            pvm::number(call, group, number).unwrap_or_else(pvm::note),
            Vec::new(),
        )
    };
    pvm::traced(event, group, number, ask)
}

/// Joins a group; returns the instance number.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_joingroup(group: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { quietly(GroupCall::Join, GroupEvent::Join, group, 0) }
}

/// Leaves a group.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_lvgroup(group: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { quietly(GroupCall::Leave, GroupEvent::Leave, group, 0) }
}

/// Returns the instance number of a task.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_getinst(group: *const c_char, tid: c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { quietly(GroupCall::Instance, GroupEvent::Instance, group, tid) }
}

/// Returns the task with an instance number.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_gettid(group: *const c_char, instance: c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { quietly(GroupCall::Member, GroupEvent::Member, group, instance) }
}

/// Returns the number of members.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_gsize(group: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { quietly(GroupCall::Size, GroupEvent::Size, group, 0) }
}

/// Waits until `count` members wait; −1: all current members.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_barrier(group: *const c_char, count: c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { quietly(GroupCall::Barrier, GroupEvent::Barrier, group, count) }
}

/// Waits until `count` members call this function; then the group accepts no new members.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_freezegroup(group: *const c_char, count: c_int) -> c_int {
    // SAFETY: by this function's contract.
    pvm::number(GroupCall::Freeze, unsafe { name(group) }, count).unwrap_or_else(pvm::note)
}

/// Sends the active send buffer to all members except the caller, which need not be a member.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_bcast(group: *const c_char, tag: c_int) -> c_int {
    // SAFETY: by this function's contract.
    let group = unsafe { name(group) };
    let others = || {
        let me = pvm::mytid()?;
        let mut members = pvm::list(GroupCall::Members, group)?;
        members.retain(|tid| *tid != 0 && *tid != me);
        if members.is_empty() {
            Err(PvmError::NoInst)
        } else {
            Ok(members)
        }
    };
    pvm::traced(GroupEvent::Bcast, group, tag, || match others() {
        Ok(others) => (pvm::mcast(&others, tag), others),
        Err(error) => (pvm::note(error), Vec::new()),
    })
}

/// Makes a collective call: returns 0 on success and reports an error.
fn together(
    event: GroupEvent,
    (place, group, tag): (&CStr, &CStr, c_int),
    work: impl FnOnce() -> PvmResult<()>,
) -> c_int {
    let answer = || {
        (
            work().map_or_else(|error| pvm::report(place, error), |()| 0),
            Vec::new(),
        )
    };
    pvm::traced(event, group, tag, answer)
}

/// Arrays of a gather or scatter call.
struct Parts {
    /// `count` elements of this member.
    one: *mut c_void,
    /// At the root: `count` elements for each instance.
    all: *mut c_void,
    count: c_int,
    kind: c_int,
}

/// Exchanges data between the members: own elements, and at the root the elements of each instance.
type Exchange = fn(&Circle, &Data, &dyn Fn(usize) -> Data) -> PvmResult<()>;

/// Makes a gather or scatter call.
///
/// # Safety
/// `group` is null or a string; the arrays are null or have the length that [`Parts`] states.
unsafe fn by_instance(
    (event, place): (GroupEvent, &CStr),
    (group, root, tag): (*const c_char, c_int, c_int),
    parts: Parts,
    exchange: Exchange,
) -> c_int {
    // SAFETY: by this function's contract.
    let group = unsafe { name(group) };
    let work = || {
        let kind = Kind::try_from(parts.kind)?;
        // SAFETY: by this function's contract.
        let one = unsafe { Data::new(parts.one, parts.count, kind)? };
        let circle = Circle::of(group, root, tag)?;
        if !circle.am_root() {
            return exchange(&circle, &one, &|_| one);
        }
        circle.without_holes()?;
        // SAFETY: by this function's contract, because this is the root.
        let all = unsafe { Data::new(parts.all, parts.count, kind)? };
        // SAFETY: the array has `count` elements for each instance.
        exchange(&circle, &one, &|instance| unsafe { all.part(instance) })
    };
    together(event, (place, group, tag), work)
}

/// Collects `count` elements of every member in the root's `result`, ordered by instance.
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
    let parts = Parts {
        one: data,
        all: result,
        count,
        kind,
    };
    // SAFETY: by this function's contract.
    unsafe {
        by_instance(
            (GroupEvent::Gather, c"pvm_gather"),
            (group, root, tag),
            parts,
            collect::gather,
        )
    }
}

/// Distributes the root's `data` to all members, `count` elements to each in order of the
/// instances.
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
    let parts = Parts {
        one: result,
        all: data,
        count,
        kind,
    };
    // SAFETY: by this function's contract.
    unsafe {
        by_instance(
            (GroupEvent::Scatter, c"pvm_scatter"),
            (group, root, tag),
            parts,
            collect::scatter,
        )
    }
}

/// Combines the elements of all members into the root's `data` by a function.
///
/// # Safety
/// `group` is null or a string; `data` is null or has `count` elements; `function` accepts arrays
/// of them.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_reduce(
    function: Option<Reducer>,
    data: *mut c_void,
    count: c_int,
    kind: c_int,
    tag: c_int,
    group: *const c_char,
    root: c_int,
) -> c_int {
    // SAFETY: by this function's contract.
    let group = unsafe { name(group) };
    let mut told = 0;
    let reduce = || {
        let (function, known) = (function.ok_or(PvmError::BadParam)?, Kind::try_from(kind)?);
        // SAFETY: by this function's contract.
        let data = unsafe { Data::new(data, count, known)? };
        let circle = Circle::of(group, root, tag)?;
        let words = if circle.am_root() {
            (count as usize * known.size()).div_ceil(8)
        } else {
            1
        };
        let mut memory = vec![0u64; words];
        // SAFETY: the memory has all elements at the root; other members do not use it.
        let spare = unsafe { Data::new(memory.as_mut_ptr().cast(), count, known)? };
        collect::reduce(&circle, &data, &spare, || {
            let (mut kind, mut count, mut info) = (kind, count, 0);
            function(
                &mut kind,
                data.place(),
                spare.place(),
                &mut count,
                &mut info,
            );
            told = info.min(0);
            if told == 0 {
                Ok(())
            } else {
                Err(PvmError::from_code(told).unwrap_or(PvmError::BadParam))
            }
        })
    };
    let done = together(GroupEvent::Reduce, (c"pvm_reduce", group, tag), reduce);
    // The program's function may use error codes that PVM does not know.
    if told < 0 { told } else { done }
}

/// Executes one of the predefined reduce functions.
///
/// # Safety
/// `kind` and `count` point to one value each, `info` is null or does; both arrays have `*count`
/// elements of this type.
unsafe fn predefined(
    op: Op,
    kind: *mut c_int,
    x: *mut c_void,
    y: *mut c_void,
    count: *mut c_int,
    info: *mut c_int,
) {
    // SAFETY: by this function's contract both point to one value.
    let (kind, count) = unsafe { (Kind::try_from(*kind), *count) };
    // SAFETY: by this function's contract the arrays have this many elements.
    let done = kind
        .and_then(|kind| unsafe { combine(op, kind, x, y, usize::try_from(count).unwrap_or(0)) });
    if !info.is_null() {
        // SAFETY: by this function's contract it points to one value.
        unsafe { *info = done.map_or_else(PvmError::code, |()| 0) };
    }
}

macro_rules! reducers {
    ($($(#[$doc:meta])* $name:ident = $op:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// `kind` and `count` point to one value each, `info` is null or does; `x` and `y` have
        /// `*count` elements.
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
            unsafe { predefined($op, kind, x, y, count, info) }
        }
    )*};
}
reducers! {
    /// Selects the larger of two elements; for complex numbers the one with the larger modulus.
    PvmMax = Op::Max;
    /// Selects the smaller of two elements; for complex numbers the one with the smaller modulus.
    PvmMin = Op::Min;
    /// Adds the elements of both arrays.
    PvmSum = Op::Sum;
    /// Multiplies the elements of both arrays.
    PvmProduct = Op::Product;
}

/// Returns the tid for messages to the group server. Programs written for PVM's group server get
/// their replies from there.
#[unsafe(no_mangle)]
pub extern "C" fn gs_getgstid() -> c_int {
    let tid = server::tid().unwrap_or_else(pvm::note);
    gstid.store(tid, Relaxed);
    tid
}
