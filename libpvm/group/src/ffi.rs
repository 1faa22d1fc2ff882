//! The functions that programs call.
//!
//! Every function trusts the caller for what C cannot express (pointers are null or good, strings end, arrays are as long as
//! their count and the group say) and checks the rest. Membership, barriers and broadcasts only set `pvm_errno` when they
//! fail; collective calls report as the other library does.

#![allow(unsafe_code)]

use crate::collect::{self, Circle};
use crate::combine::{Op, combine};
use crate::pvm::{self, Data, Kind};
use crate::server;
use sempa_proto::group::{GroupCall, GroupEvent};
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering::Relaxed};

/// A function of `pvm_reduce`: type, result and first operand, second operand, number of elements, and a place for an error.
pub type Reducer = extern "C" fn(*mut c_int, *mut c_void, *mut c_void, *mut c_int, *mut c_int);

/// Tid for messages to the group server, once somebody asked for it.
#[unsafe(no_mangle)]
pub static gstid: AtomicI32 = AtomicI32::new(-1);

/// How long programs that speak to the group server wait for it; null: for ever.
#[unsafe(no_mangle)]
pub static pvmgs_tmout: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());

/// The name of a group; null is like the empty name, which no group has.
///
/// # Safety
/// `group` is null or a string that stays for `'a`.
unsafe fn name<'a>(group: *const c_char) -> &'a CStr {
    if group.is_null() {
        c""
    } else {
        // SAFETY: the caller's contract: null or a string.
        unsafe { CStr::from_ptr(group) }
    }
}

/// A call whose answer is a number, and whose error is only noted.
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

/// Becomes a member; answers the instance number.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_joingroup(group: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { quietly(GroupCall::Join, GroupEvent::Join, group, 0) }
}

/// Is a member no longer.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_lvgroup(group: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { quietly(GroupCall::Leave, GroupEvent::Leave, group, 0) }
}

/// Instance number of a task.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_getinst(group: *const c_char, tid: c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { quietly(GroupCall::Instance, GroupEvent::Instance, group, tid) }
}

/// Task of an instance number.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_gettid(group: *const c_char, instance: c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { quietly(GroupCall::Member, GroupEvent::Member, group, instance) }
}

/// Number of members.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_gsize(group: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { quietly(GroupCall::Size, GroupEvent::Size, group, 0) }
}

/// Waits until `count` members wait; −1: all members of the moment.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_barrier(group: *const c_char, count: c_int) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { quietly(GroupCall::Barrier, GroupEvent::Barrier, group, count) }
}

/// Waits until `count` members call this; then nobody joins any more.
///
/// # Safety
/// `group` is null or a string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pvm_freezegroup(group: *const c_char, count: c_int) -> c_int {
    // SAFETY: by this function's contract.
    pvm::number(GroupCall::Freeze, unsafe { name(group) }, count).unwrap_or_else(pvm::note)
}

/// Sends the active send buffer to all members but the own task, which need not be one.
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

/// A collective call: success is 0, an error is reported.
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

/// The arrays of a call in which every member has a part of what the root has.
struct Parts {
    /// `count` elements of this member.
    one: *mut c_void,
    /// At the root `count` elements for each instance.
    all: *mut c_void,
    count: c_int,
    kind: c_int,
}

/// What the members do with each other: own part, and the root's part for each instance.
type Exchange = fn(&Circle, &Data, &dyn Fn(usize) -> Data) -> PvmResult<()>;

/// A call between the root's array and everybody's part of it.
///
/// # Safety
/// `group` is null or a string; the arrays are null or as long as [`Parts`] says.
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
        // SAFETY: by this function's contract: this is the root.
        let all = unsafe { Data::new(parts.all, parts.count, kind)? };
        // SAFETY: there are elements, or room for them, for each instance.
        exchange(&circle, &one, &|instance| unsafe { all.part(instance) })
    };
    together(event, (place, group, tag), work)
}

/// Brings `count` elements of every member together in the root's `result`, by instance.
///
/// # Safety
/// `group` is null or a string; `data` is null or `count` elements; at the root `result` is null or has room for `count`
/// elements of each instance.
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

/// Gives every member `count` elements of the root's `data`, by instance.
///
/// # Safety
/// `group` is null or a string; `result` is null or has room for `count` elements; at the root `data` is null or `count`
/// elements for each instance.
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
/// `group` is null or a string; `data` is null or `count` elements; `function` works on arrays of them.
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
        // SAFETY: as many elements as the root needs; others do not use it.
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
    // The program's function may have codes of its own.
    if told < 0 { told } else { done }
}

/// One of the functions that programs give to a reduction.
///
/// # Safety
/// `kind` and `count` lead to one value each, `info` is null or does; both arrays have `*count` elements of this kind.
unsafe fn predefined(
    op: Op,
    kind: *mut c_int,
    x: *mut c_void,
    y: *mut c_void,
    count: *mut c_int,
    info: *mut c_int,
) {
    // SAFETY: the caller's contract: places for one value each.
    let (kind, count) = unsafe { (Kind::try_from(*kind), *count) };
    // SAFETY: the caller's contract: arrays of so many elements.
    let done = kind
        .and_then(|kind| unsafe { combine(op, kind, x, y, usize::try_from(count).unwrap_or(0)) });
    if !info.is_null() {
        // SAFETY: the caller's contract: a place for one value.
        unsafe { *info = done.map_or_else(PvmError::code, |()| 0) };
    }
}

macro_rules! reducers {
    ($($(#[$doc:meta])* $name:ident = $op:expr;)*) => {$(
        $(#[$doc])*
        ///
        /// # Safety
        /// `kind` and `count` are good for one value, `info` is null or is; `x` and `y` are `*count` elements.
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
    /// The larger of two elements; of complex ones the one with the larger modulus.
    PvmMax = Op::Max;
    /// The smaller of two elements; of complex ones the one with the smaller modulus.
    PvmMin = Op::Min;
    /// The sum of two elements.
    PvmSum = Op::Sum;
    /// The product of two elements.
    PvmProduct = Op::Product;
}

/// The tid for messages to the group server: programs of PVM that speak to it get their answers there.
#[unsafe(no_mangle)]
pub extern "C" fn gs_getgstid() -> c_int {
    let tid = server::tid().unwrap_or_else(pvm::note);
    gstid.store(tid, Relaxed);
    tid
}
