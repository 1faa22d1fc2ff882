//! Typed access to `libpvm3`. Its symbols are resolved when the program is loaded.

// This module exists to call C functions.
#![allow(unsafe_code)]

use sempa_proto::group::{GroupCall, TracedGroupCall};
use sempa_proto::message::CTX_GROUPS;
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

/// Context of the notifications about members that the group library requests. Programs do not use
/// this context.
const CTX_NOTIFICATIONS: c_int = CTX_GROUPS - 1;
/// PVM's constant `PvmTaskExit` for `pvm_notify`.
const NOTIFY_TASK_EXIT: c_int = 1;
/// PVM's constant `PvmNotifyCancel` for `pvm_notify`.
const NOTIFY_CANCEL: c_int = 256;
/// PVM's constant `PvmDataDefault`, XDR encoding.
const DATA_DEFAULT: c_int = 0;
/// Time limit of one wait for a member's message. When the limit expires, the library checks
/// whether the member has exited.
const EXIT_CHECK_INTERVAL: TimeVal = TimeVal {
    seconds: 1,
    micros: 0,
};
/// Time limit for the final message of a cancelled notification. A message that arrives later is
/// recognized by its tag and dropped.
const CANCEL_TIMEOUT: TimeVal = TimeVal {
    seconds: 5,
    micros: 0,
};

/// The C type `struct timeval`.
#[repr(C)]
pub(crate) struct TimeVal {
    seconds: i64,
    micros: i64,
}

/// A function that `libpvm3` calls for a message, with the id of its buffer.
pub(crate) type MessageHandler = extern "C" fn(c_int) -> c_int;
type MatchFunction = extern "C" fn(c_int, c_int, c_int) -> c_int;

unsafe extern "C" {
    static pvm_errno: AtomicI32;

    fn sempa_group_request(
        call: c_int,
        group: *const c_char,
        number: c_int,
        list: *mut *mut c_int,
        count: *mut c_int,
    ) -> c_int;
    fn sempa_group_traced(
        event: c_int,
        group: *const c_char,
        argument: c_int,
        body: extern "C" fn(*mut c_void) -> c_int,
        data: *mut c_void,
        list: *const *const c_int,
        count: *const c_int,
    ) -> c_int;
    fn free(place: *mut c_void);
    fn lpvmerr(place: *const c_char, code: c_int) -> c_int;

    safe fn pvm_mytid() -> c_int;
    pub(crate) safe fn pvm_tidtohost(tid: c_int) -> c_int;
    safe fn pvm_mkbuf(encoding: c_int) -> c_int;
    safe fn pvm_freebuf(mid: c_int) -> c_int;
    safe fn pvm_setsbuf(mid: c_int) -> c_int;
    safe fn pvm_setrbuf(mid: c_int) -> c_int;
    safe fn pvm_setcontext(ctx: c_int) -> c_int;
    safe fn pvm_recvf(matcher: Option<MatchFunction>) -> Option<MatchFunction>;
    safe fn pvm_send(tid: c_int, tag: c_int) -> c_int;
    safe fn pvm_nrecv(tid: c_int, tag: c_int) -> c_int;
    safe fn pvm_addmhf(
        src: c_int,
        tag: c_int,
        ctx: c_int,
        handler: Option<MessageHandler>,
    ) -> c_int;
    safe fn pvm_delmhf(id: c_int) -> c_int;
    fn pvm_trecv(tid: c_int, tag: c_int, time: *const TimeVal) -> c_int;
    fn pvm_mcast(tids: *const c_int, count: c_int, tag: c_int) -> c_int;
    fn pvm_notify(what: c_int, tag: c_int, count: c_int, tids: *const c_int) -> c_int;

    fn pvm_pkstr(text: *const c_char) -> c_int;
    fn pvm_pkbyte(items: *const c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_pkshort(items: *const c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_pkint(items: *const c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_pkfloat(items: *const c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_pkcplx(items: *const c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_pkdouble(items: *const c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_pkdcplx(items: *const c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_pklong(items: *const c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_upkbyte(items: *mut c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_upkshort(items: *mut c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_upkint(items: *mut c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_upkfloat(items: *mut c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_upkcplx(items: *mut c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_upkdouble(items: *mut c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_upkdcplx(items: *mut c_void, count: c_int, stride: c_int) -> c_int;
    fn pvm_upklong(items: *mut c_void, count: c_int, stride: c_int) -> c_int;
}

/// Converts a return value of a PVM function. Negative numbers are error codes.
fn check_code(return_value: c_int) -> PvmResult<c_int> {
    if return_value >= 0 {
        Ok(return_value)
    } else {
        Err(PvmError::from_code(return_value).unwrap_or(PvmError::SysErr))
    }
}

/// Makes a group request whose reply is a number, and returns the number.
pub(crate) fn request_number(call: GroupCall, group: &CStr, number: c_int) -> PvmResult<c_int> {
    let null_list = std::ptr::null_mut();
    // SAFETY: the name is a string, and no list is requested.
    check_code(unsafe {
        sempa_group_request(
            call as c_int,
            group.as_ptr(),
            number,
            null_list,
            std::ptr::null_mut(),
        )
    })
}

/// Makes a group request whose reply is a list, and returns a copy of the list.
pub(crate) fn request_list(call: GroupCall, group: &CStr) -> PvmResult<Vec<c_int>> {
    let (mut list, mut count) = (std::ptr::null_mut(), 0);
    // SAFETY: the name is a string, and the pointers point to one value each.
    check_code(unsafe {
        sempa_group_request(call as c_int, group.as_ptr(), 0, &mut list, &mut count)
    })?;
    if list.is_null() {
        return Ok(Vec::new());
    }
    // SAFETY: the library stored `count` integers there, which this function may read and must
    // free.
    unsafe {
        let integers = std::slice::from_raw_parts(list, count.max(0) as usize).to_vec();
        free(list.cast());
        Ok(integers)
    }
}

/// Executes `body` as a traced call. `body` returns the result of the call and, for a broadcast,
/// the tids of its receivers.
pub(crate) fn call_traced<F>(
    event: TracedGroupCall,
    group: &CStr,
    argument: c_int,
    body: F,
) -> c_int
where
    F: FnOnce() -> (c_int, Vec<c_int>),
{
    let mut call = TracedCall {
        body: Some(body),
        receivers: Vec::new(),
        list: std::ptr::null(),
        count: 0,
    };
    let call_pointer: *mut TracedCall<F> = &mut call;
    // SAFETY: `run_traced` gets the call that it expects, and no other code uses the call until
    // `run_traced` returns. The receivers live as long as the call.
    unsafe {
        let (mut list, mut count) = (std::ptr::null(), std::ptr::null());
        if event == TracedGroupCall::Bcast {
            (list, count) = (
                &raw const (*call_pointer).list,
                &raw const (*call_pointer).count,
            );
        }
        sempa_group_traced(
            event as c_int,
            group.as_ptr(),
            argument,
            run_traced::<F>,
            call_pointer.cast(),
            list,
            count,
        )
    }
}

/// A call in progress, and the list of receivers for the trace record of its end.
struct TracedCall<F> {
    body: Option<F>,
    receivers: Vec<c_int>,
    list: *const c_int,
    count: c_int,
}

extern "C" fn run_traced<F: FnOnce() -> (c_int, Vec<c_int>)>(data: *mut c_void) -> c_int {
    // SAFETY: `call_traced` passes its own call, and only to this function.
    let call = unsafe { &mut *data.cast::<TracedCall<F>>() };
    let Some(body) = call.body.take() else {
        return PvmError::SysErr.code();
    };
    let (return_value, receivers) = body();
    call.receivers = receivers;
    (call.list, call.count) = (call.receivers.as_ptr(), call.receivers.len() as c_int);
    return_value
}

pub(crate) fn mytid() -> PvmResult<c_int> {
    check_code(pvm_mytid())
}

/// Reports an error as a function of `libpvm3` does; returns the error code.
pub(crate) fn report_error(function_name: &CStr, error: PvmError) -> c_int {
    // SAFETY: the name is a string.
    unsafe { lpvmerr(function_name.as_ptr(), error.code()) }
}

/// Sets `pvm_errno` without a report; returns the error code.
pub(crate) fn set_errno(error: PvmError) -> c_int {
    // SAFETY: an int of `libpvm3` that both libraries access atomically.
    unsafe { pvm_errno.store(error.code(), Relaxed) };
    error.code()
}

/// Sends the active send buffer to several tasks; `libpvm3` reports errors.
pub(crate) fn mcast(tids: &[c_int], tag: c_int) -> c_int {
    // SAFETY: pointer and length belong to one slice.
    unsafe { pvm_mcast(tids.as_ptr(), tids.len() as c_int, tag) }
}

/// Adds a message handler in the context of groups; returns its id.
pub(crate) fn add_handler(src: c_int, tag: c_int, handler: MessageHandler) -> PvmResult<c_int> {
    check_code(pvm_addmhf(src, tag, CTX_GROUPS, Some(handler)))
}

pub(crate) fn remove_handler(id: c_int) {
    pvm_delmhf(id);
}

/// Element types that collective calls support.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ElementType {
    Byte,
    Short,
    Int,
    Float,
    Cplx,
    Double,
    Dcplx,
    Long,
}

impl TryFrom<c_int> for ElementType {
    type Error = PvmError;

    /// Converts an element type code of `pvm3.h`; collective calls do not support strings and
    /// unsigned types.
    fn try_from(code: c_int) -> PvmResult<Self> {
        Ok(match code {
            1 => Self::Byte,
            2 => Self::Short,
            3 => Self::Int,
            4 => Self::Float,
            5 => Self::Cplx,
            6 => Self::Double,
            7 => Self::Dcplx,
            8 => Self::Long,
            _ => return Err(PvmError::BadParam),
        })
    }
}

impl ElementType {
    /// Size of one element in bytes.
    pub(crate) fn size_bytes(self) -> usize {
        match self {
            Self::Byte => 1,
            Self::Short => 2,
            Self::Int | Self::Float => 4,
            Self::Cplx | Self::Double | Self::Long => 8,
            Self::Dcplx => 16,
        }
    }
}

/// An array of elements in the program's memory.
#[derive(Clone, Copy)]
pub(crate) struct Elements {
    address: *mut c_void,
    count: c_int,
    element_type: ElementType,
}

impl Elements {
    /// Wraps an array of the program.
    ///
    /// # Errors
    /// `BadParam` if the array is null or empty.
    ///
    /// # Safety
    /// `address` is null or points to `count` elements that live as long as the returned
    /// [`Elements`]. Only [`Elements::unpack`] and [`Elements::copy_from`] write to the elements.
    pub(crate) unsafe fn new(
        address: *mut c_void,
        count: c_int,
        element_type: ElementType,
    ) -> PvmResult<Self> {
        if address.is_null() || count <= 0 {
            Err(PvmError::BadParam)
        } else {
            Ok(Self {
                address,
                count,
                element_type,
            })
        }
    }

    pub(crate) fn as_ptr(&self) -> *mut c_void {
        self.address
    }

    /// Returns the elements of an instance in a longer array that contains `count` elements per
    /// instance.
    ///
    /// # Safety
    /// The array has `(instance + 1) * count` elements.
    pub(crate) unsafe fn instance_part(&self, instance: usize) -> Self {
        let instance_bytes = self.count as usize * self.element_type.size_bytes();
        Self {
            // SAFETY: the part is within the array by this function's contract.
            address: unsafe { self.address.byte_add(instance * instance_bytes) },
            ..*self
        }
    }

    /// Copies `count` elements from `source`; the arrays may overlap.
    pub(crate) fn copy_from(&self, source: &Self) {
        let total_bytes = self.count as usize * self.element_type.size_bytes();
        // SAFETY: both arrays have `count` elements by the contract of `new`.
        unsafe {
            std::ptr::copy(
                source.address.cast::<u8>(),
                self.address.cast::<u8>(),
                total_bytes,
            )
        };
    }

    fn pack(&self) -> PvmResult<()> {
        let pack = match self.element_type {
            ElementType::Byte => pvm_pkbyte,
            ElementType::Short => pvm_pkshort,
            ElementType::Int => pvm_pkint,
            ElementType::Float => pvm_pkfloat,
            ElementType::Cplx => pvm_pkcplx,
            ElementType::Double => pvm_pkdouble,
            ElementType::Dcplx => pvm_pkdcplx,
            ElementType::Long => pvm_pklong,
        };
        // SAFETY: there are `count` elements of this type by the contract of `new`.
        check_code(unsafe { pack(self.address, self.count, 1) }).map(|_| ())
    }

    fn unpack(&self) -> PvmResult<()> {
        let unpack = match self.element_type {
            ElementType::Byte => pvm_upkbyte,
            ElementType::Short => pvm_upkshort,
            ElementType::Int => pvm_upkint,
            ElementType::Float => pvm_upkfloat,
            ElementType::Cplx => pvm_upkcplx,
            ElementType::Double => pvm_upkdouble,
            ElementType::Dcplx => pvm_upkdcplx,
            ElementType::Long => pvm_upklong,
        };
        // SAFETY: there is space for `count` elements of this type by the contract of `new`.
        check_code(unsafe { unpack(self.address, self.count, 1) }).map(|_| ())
    }
}

/// Exchanges messages between members without an effect on the program's own messages. The
/// program's buffers, context and matching function are saved when the channel is opened, and
/// restored when the channel is dropped.
pub(crate) struct MemberChannel {
    saved_send_buffer: c_int,
    saved_receive_buffer: c_int,
    saved_context: c_int,
    saved_match_function: Option<MatchFunction>,
}

impl MemberChannel {
    /// Saves the program's state and enters the context of groups.
    pub(crate) fn open() -> Self {
        Self {
            saved_send_buffer: pvm_setsbuf(0),
            saved_receive_buffer: pvm_setrbuf(0),
            saved_context: pvm_setcontext(CTX_GROUPS),
            saved_match_function: pvm_recvf(None),
        }
    }

    pub(crate) fn send(&self, tid: c_int, tag: c_int, data: &Elements) -> PvmResult<()> {
        self.send_packed(tid, tag, || data.pack())
    }

    /// Sends a message that `pack_content` packs.
    pub(crate) fn send_packed(
        &self,
        tid: c_int,
        tag: c_int,
        pack_content: impl FnOnce() -> PvmResult<()>,
    ) -> PvmResult<()> {
        let mid = check_code(pvm_mkbuf(DATA_DEFAULT))?;
        pvm_setsbuf(mid);
        let result = pack_content().and_then(|()| check_code(pvm_send(tid, tag)));
        pvm_setsbuf(0);
        pvm_freebuf(mid);
        result.map(|_| ())
    }

    /// Waits for the elements that a member sends, and unpacks the elements into `data`. If the
    /// elements do not arrive within a second, the library also checks whether the member has
    /// exited; messages that the member sent before its exit are still received.
    ///
    /// # Errors
    /// `NoInst` if the member has ended without sending its elements.
    pub(crate) fn receive(&self, tid: c_int, tag: c_int, data: &Elements) -> PvmResult<()> {
        let mut exit_watch = None;
        loop {
            // SAFETY: the time lives as long as the call.
            if check_code(unsafe { pvm_trecv(tid, tag, &EXIT_CHECK_INTERVAL) })? > 0 {
                break;
            }
            let exit_watch = exit_watch.get_or_insert_with(|| ExitWatch::request(tid));
            if exit_watch.poll_exit() {
                // The notification of the exit arrives after the member's last message.
                if check_code(pvm_nrecv(tid, tag))? == 0 {
                    return Err(PvmError::NoInst);
                }
                break;
            }
        }
        let result = data.unpack();
        pvm_freebuf(pvm_setrbuf(0));
        result
    }
}

impl Drop for MemberChannel {
    fn drop(&mut self) {
        pvm_recvf(self.saved_match_function);
        pvm_setcontext(self.saved_context);
        pvm_setrbuf(self.saved_receive_buffer);
        pvm_setsbuf(self.saved_send_buffer);
    }
}

/// Packs integers into the active send buffer.
pub(crate) fn pack_ints(integers: &[c_int]) -> PvmResult<()> {
    // SAFETY: pointer and length belong to one slice.
    check_code(unsafe { pvm_pkint(integers.as_ptr().cast(), integers.len() as c_int, 1) })
        .map(|_| ())
}

/// Packs a string into the active send buffer.
pub(crate) fn pack_text(text: &CStr) -> PvmResult<()> {
    // SAFETY: the text is a string.
    check_code(unsafe { pvm_pkstr(text.as_ptr()) }).map(|_| ())
}

/// A requested notification of a task's exit, with a unique tag. The request is cancelled on drop.
struct ExitWatch {
    tid: c_int,
    tag: c_int,
    is_pending: bool,
}

impl ExitWatch {
    fn request(tid: c_int) -> Self {
        static NEXT_TAG: AtomicI32 = AtomicI32::new(0);
        let mut watch = Self {
            tid,
            tag: NEXT_TAG.fetch_add(1, Relaxed) & c_int::MAX,
            is_pending: false,
        };
        // If the notification cannot be requested, the library waits for the message without a
        // check.
        watch.is_pending =
            watch.run_in_notification_context(|| watch.notify(NOTIFY_TASK_EXIT)) >= 0;
        watch
    }

    /// Calls `f` in the context of the library's notifications.
    fn run_in_notification_context<R>(&self, f: impl FnOnce() -> R) -> R {
        pvm_setcontext(CTX_NOTIFICATIONS);
        let result = f();
        pvm_setcontext(CTX_GROUPS);
        result
    }

    fn notify(&self, kind_code: c_int) -> c_int {
        // SAFETY: the pointer points to one tid.
        unsafe { pvm_notify(kind_code, self.tag, 1, &self.tid) }
    }

    /// Checks, without waiting, whether the notification of the task's exit has arrived. If so,
    /// removes the notification and returns true.
    fn poll_exit(&mut self) -> bool {
        let has_arrived =
            self.is_pending && self.run_in_notification_context(|| pvm_nrecv(-1, self.tag)) > 0;
        if has_arrived {
            self.is_pending = false;
            pvm_freebuf(pvm_setrbuf(0));
        }
        has_arrived
    }
}

impl Drop for ExitWatch {
    fn drop(&mut self) {
        if !self.is_pending {
            return;
        }
        // After the cancellation the daemon sends the notification immediately.
        let receive_mid = pvm_setrbuf(0);
        self.run_in_notification_context(|| {
            self.notify(NOTIFY_TASK_EXIT | NOTIFY_CANCEL);
            // SAFETY: the time lives as long as the call.
            unsafe { pvm_trecv(-1, self.tag, &CANCEL_TIMEOUT) }
        });
        pvm_freebuf(pvm_setrbuf(receive_mid));
    }
}
