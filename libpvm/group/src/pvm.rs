//! Typed access to `libpvm3`. Its symbols are resolved when the program is loaded.

// Calling C functions is what this module is for.
#![allow(unsafe_code)]

use sempa_proto::group::{GroupCall, GroupEvent};
use sempa_proto::message::CTX_GROUPS;
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicI32, Ordering::Relaxed};

/// Context of notifications about members; programs do not use it.
const CTX_NOTES: c_int = CTX_GROUPS - 1;
/// PVM's constant `PvmTaskExit` for `pvm_notify`.
const TASK_EXIT: c_int = 1;
/// PVM's constant `PvmNotifyCancel` for `pvm_notify`.
const NOTIFY_CANCEL: c_int = 256;
/// PVM's constant `PvmDataDefault`, XDR encoding.
const DATA_DEFAULT: c_int = 0;
/// Time to wait for a member's message before its exit is checked.
const PATIENCE: TimeVal = TimeVal {
    seconds: 1,
    micros: 0,
};
/// Time to wait for the answer to a cancelled notification. A later answer is recognized by its tag
/// and dropped.
const CANCEL_TIME: TimeVal = TimeVal {
    seconds: 5,
    micros: 0,
};

/// The C type `struct timeval`.
#[repr(C)]
pub(crate) struct TimeVal {
    seconds: i64,
    micros: i64,
}

/// Type of a message handler.
pub(crate) type Handler = extern "C" fn(c_int) -> c_int;
type Matcher = extern "C" fn(c_int, c_int, c_int) -> c_int;

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
    safe fn pvm_mkbuf(encoding: c_int) -> c_int;
    safe fn pvm_freebuf(mid: c_int) -> c_int;
    safe fn pvm_setsbuf(mid: c_int) -> c_int;
    safe fn pvm_setrbuf(mid: c_int) -> c_int;
    safe fn pvm_setcontext(ctx: c_int) -> c_int;
    safe fn pvm_recvf(matcher: Option<Matcher>) -> Option<Matcher>;
    safe fn pvm_send(tid: c_int, tag: c_int) -> c_int;
    safe fn pvm_nrecv(tid: c_int, tag: c_int) -> c_int;
    safe fn pvm_addmhf(src: c_int, tag: c_int, ctx: c_int, handler: Option<Handler>) -> c_int;
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

/// Converts a result of PVM: negative numbers are error codes.
fn good(answer: c_int) -> PvmResult<c_int> {
    if answer >= 0 {
        Ok(answer)
    } else {
        Err(PvmError::from_code(answer).unwrap_or(PvmError::SysErr))
    }
}

/// Makes a group request whose reply is a number.
pub(crate) fn number(call: GroupCall, group: &CStr, number: c_int) -> PvmResult<c_int> {
    let null = std::ptr::null_mut();
    // SAFETY: the name is a string, and no list is requested.
    good(unsafe {
        sempa_group_request(
            call as c_int,
            group.as_ptr(),
            number,
            null,
            std::ptr::null_mut(),
        )
    })
}

/// Makes a group request whose reply is a list.
pub(crate) fn list(call: GroupCall, group: &CStr) -> PvmResult<Vec<c_int>> {
    let (mut place, mut count) = (std::ptr::null_mut(), 0);
    // SAFETY: the name is a string, and the pointers point to one value each.
    good(unsafe { sempa_group_request(call as c_int, group.as_ptr(), 0, &mut place, &mut count) })?;
    if place.is_null() {
        return Ok(Vec::new());
    }
    // SAFETY: the library stored `count` integers there, which this function may read and must
    // free.
    unsafe {
        let words = std::slice::from_raw_parts(place, count.max(0) as usize).to_vec();
        free(place.cast());
        Ok(words)
    }
}

/// Makes a call that can be traced. `body` executes it and returns the result and, for a broadcast,
/// its receivers.
pub(crate) fn traced<F>(event: GroupEvent, group: &CStr, argument: c_int, body: F) -> c_int
where
    F: FnOnce() -> (c_int, Vec<c_int>),
{
    let mut call = Call {
        body: Some(body),
        receivers: Vec::new(),
        list: std::ptr::null(),
        count: 0,
    };
    let place: *mut Call<F> = &mut call;
    // SAFETY: `run` gets the call that it expects, and nothing else uses it meanwhile. The
    // receivers live as long as the call.
    unsafe {
        let (mut list, mut count) = (std::ptr::null(), std::ptr::null());
        if event == GroupEvent::Bcast {
            (list, count) = (&raw const (*place).list, &raw const (*place).count);
        }
        sempa_group_traced(
            event as c_int,
            group.as_ptr(),
            argument,
            run::<F>,
            place.cast(),
            list,
            count,
        )
    }
}

/// A call in progress, and the data for the trace record of its end.
struct Call<F> {
    body: Option<F>,
    receivers: Vec<c_int>,
    list: *const c_int,
    count: c_int,
}

extern "C" fn run<F: FnOnce() -> (c_int, Vec<c_int>)>(data: *mut c_void) -> c_int {
    // SAFETY: `traced` passes its own call, and only to this function.
    let call = unsafe { &mut *data.cast::<Call<F>>() };
    let Some(body) = call.body.take() else {
        return PvmError::SysErr.code();
    };
    let (answer, receivers) = body();
    call.receivers = receivers;
    (call.list, call.count) = (call.receivers.as_ptr(), call.receivers.len() as c_int);
    answer
}

pub(crate) fn mytid() -> PvmResult<c_int> {
    good(pvm_mytid())
}

/// Reports an error as a function of `libpvm3` does; returns its code.
pub(crate) fn report(place: &CStr, error: PvmError) -> c_int {
    // SAFETY: the name is a string.
    unsafe { lpvmerr(place.as_ptr(), error.code()) }
}

/// Sets `pvm_errno` without a report; returns the code.
pub(crate) fn note(error: PvmError) -> c_int {
    // SAFETY: an int of `libpvm3` that both libraries access atomically.
    unsafe { pvm_errno.store(error.code(), Relaxed) };
    error.code()
}

/// Sends the active send buffer to several tasks; the library reports errors.
pub(crate) fn mcast(tids: &[c_int], tag: c_int) -> c_int {
    // SAFETY: pointer and length belong to one slice.
    unsafe { pvm_mcast(tids.as_ptr(), tids.len() as c_int, tag) }
}

/// Adds a message handler in the context of groups; returns its id.
pub(crate) fn add_handler(src: c_int, tag: c_int, handler: Handler) -> PvmResult<c_int> {
    good(pvm_addmhf(src, tag, CTX_GROUPS, Some(handler)))
}

/// Removes a message handler by its id.
pub(crate) fn remove_handler(id: c_int) {
    pvm_delmhf(id);
}

/// Element types that collective calls support.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Byte,
    Short,
    Int,
    Float,
    Cplx,
    Double,
    Dcplx,
    Long,
}

impl TryFrom<c_int> for Kind {
    type Error = PvmError;

    /// Converts a code of `pvm3.h`; collective calls do not support strings and unsigned types.
    fn try_from(code: c_int) -> PvmResult<Kind> {
        Ok(match code {
            1 => Kind::Byte,
            2 => Kind::Short,
            3 => Kind::Int,
            4 => Kind::Float,
            5 => Kind::Cplx,
            6 => Kind::Double,
            7 => Kind::Dcplx,
            8 => Kind::Long,
            _ => return Err(PvmError::BadParam),
        })
    }
}

impl Kind {
    /// Size of one element in bytes.
    pub(crate) fn size(self) -> usize {
        match self {
            Kind::Byte => 1,
            Kind::Short => 2,
            Kind::Int | Kind::Float => 4,
            Kind::Cplx | Kind::Double | Kind::Long => 8,
            Kind::Dcplx => 16,
        }
    }
}

/// Elements in the program's memory.
#[derive(Clone, Copy)]
pub(crate) struct Data {
    place: *mut c_void,
    count: c_int,
    kind: Kind,
}

impl Data {
    /// Wraps the program's array.
    ///
    /// # Errors
    /// `BadParam` if the array is null or empty.
    ///
    /// # Safety
    /// `place` is null or points to `count` elements that live as long as this value. Only
    /// [`Data::unpack`] and [`Data::copy_from`] write them.
    pub(crate) unsafe fn new(place: *mut c_void, count: c_int, kind: Kind) -> PvmResult<Data> {
        if place.is_null() || count <= 0 {
            Err(PvmError::BadParam)
        } else {
            Ok(Data { place, count, kind })
        }
    }

    /// Address of the first element.
    pub(crate) fn place(&self) -> *mut c_void {
        self.place
    }

    /// Returns the part of a longer array that belongs to an instance.
    ///
    /// # Safety
    /// The array has `(instance + 1) * count` elements.
    pub(crate) unsafe fn part(&self, instance: usize) -> Data {
        let bytes = self.count as usize * self.kind.size();
        Data {
            // SAFETY: the part is within the array by this function's contract.
            place: unsafe { self.place.byte_add(instance * bytes) },
            ..*self
        }
    }

    /// Copies the same number of elements; the arrays may overlap.
    pub(crate) fn copy_from(&self, other: &Data) {
        let bytes = self.count as usize * self.kind.size();
        // SAFETY: both arrays have `count` elements by the contract of `new`.
        unsafe { std::ptr::copy(other.place.cast::<u8>(), self.place.cast::<u8>(), bytes) };
    }

    fn pack(&self) -> PvmResult<()> {
        let pack = match self.kind {
            Kind::Byte => pvm_pkbyte,
            Kind::Short => pvm_pkshort,
            Kind::Int => pvm_pkint,
            Kind::Float => pvm_pkfloat,
            Kind::Cplx => pvm_pkcplx,
            Kind::Double => pvm_pkdouble,
            Kind::Dcplx => pvm_pkdcplx,
            Kind::Long => pvm_pklong,
        };
        // SAFETY: `count` elements of this kind by the contract of `new`.
        good(unsafe { pack(self.place, self.count, 1) }).map(|_| ())
    }

    fn unpack(&self) -> PvmResult<()> {
        let unpack = match self.kind {
            Kind::Byte => pvm_upkbyte,
            Kind::Short => pvm_upkshort,
            Kind::Int => pvm_upkint,
            Kind::Float => pvm_upkfloat,
            Kind::Cplx => pvm_upkcplx,
            Kind::Double => pvm_upkdouble,
            Kind::Dcplx => pvm_upkdcplx,
            Kind::Long => pvm_upklong,
        };
        // SAFETY: there is space for `count` elements of this type by the contract of `new`.
        good(unsafe { unpack(self.place, self.count, 1) }).map(|_| ())
    }
}

/// Messages between members that do not disturb the program's own. The program's buffers, context
/// and matching function are saved, and restored on drop.
pub(crate) struct Aside {
    sbuf: c_int,
    rbuf: c_int,
    ctx: c_int,
    matcher: Option<Matcher>,
}

impl Aside {
    /// Saves the program's state and enters the context of groups.
    pub(crate) fn begin() -> Aside {
        Aside {
            sbuf: pvm_setsbuf(0),
            rbuf: pvm_setrbuf(0),
            ctx: pvm_setcontext(CTX_GROUPS),
            matcher: pvm_recvf(None),
        }
    }

    pub(crate) fn send(&self, tid: c_int, tag: c_int, data: &Data) -> PvmResult<()> {
        self.message(tid, tag, || data.pack())
    }

    /// Sends a message that `fill` packs.
    pub(crate) fn message(
        &self,
        tid: c_int,
        tag: c_int,
        fill: impl FnOnce() -> PvmResult<()>,
    ) -> PvmResult<()> {
        let mid = good(pvm_mkbuf(DATA_DEFAULT))?;
        pvm_setsbuf(mid);
        let sent = fill().and_then(|()| good(pvm_send(tid, tag)));
        pvm_setsbuf(0);
        pvm_freebuf(mid);
        sent.map(|_| ())
    }

    /// Waits for the elements that a member sends. After a timeout the member's exit is checked,
    /// too; messages that it sent before are still received.
    ///
    /// # Errors
    /// `NoInst` if the member has ended without sending its elements.
    pub(crate) fn receive(&self, tid: c_int, tag: c_int, data: &Data) -> PvmResult<()> {
        let mut watch = None;
        loop {
            // SAFETY: the time lives as long as the call.
            if good(unsafe { pvm_trecv(tid, tag, &PATIENCE) })? > 0 {
                break;
            }
            let watch = watch.get_or_insert_with(|| Watch::begin(tid));
            if watch.has_ended() {
                // The notification of the exit comes after the member's last message.
                if good(pvm_nrecv(tid, tag))? == 0 {
                    return Err(PvmError::NoInst);
                }
                break;
            }
        }
        let unpacked = data.unpack();
        pvm_freebuf(pvm_setrbuf(0));
        unpacked
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        pvm_recvf(self.matcher);
        pvm_setcontext(self.ctx);
        pvm_setrbuf(self.rbuf);
        pvm_setsbuf(self.sbuf);
    }
}

/// Packs integers into the active send buffer.
pub(crate) fn pack_ints(words: &[c_int]) -> PvmResult<()> {
    // SAFETY: pointer and length belong to one slice.
    good(unsafe { pvm_pkint(words.as_ptr().cast(), words.len() as c_int, 1) }).map(|_| ())
}

/// Packs a string into the active send buffer.
pub(crate) fn pack_text(text: &CStr) -> PvmResult<()> {
    // SAFETY: the text is a string.
    good(unsafe { pvm_pkstr(text.as_ptr()) }).map(|_| ())
}

/// A notification of a task's exit, with a unique tag.
struct Watch {
    tid: c_int,
    tag: c_int,
    open: bool,
}

impl Watch {
    fn begin(tid: c_int) -> Watch {
        static LAST: AtomicI32 = AtomicI32::new(0);
        let mut watch = Watch {
            tid,
            tag: LAST.fetch_add(1, Relaxed) & c_int::MAX,
            open: false,
        };
        // Without a notification the wait continues unchanged.
        watch.open = watch.in_notes(|| watch.ask(TASK_EXIT)) >= 0;
        watch
    }

    /// Calls `f` in the context of notifications.
    fn in_notes<R>(&self, f: impl FnOnce() -> R) -> R {
        pvm_setcontext(CTX_NOTES);
        let answer = f();
        pvm_setcontext(CTX_GROUPS);
        answer
    }

    fn ask(&self, what: c_int) -> c_int {
        // SAFETY: the pointer points to one tid.
        unsafe { pvm_notify(what, self.tag, 1, &self.tid) }
    }

    /// True if the task's exit has been notified.
    fn has_ended(&mut self) -> bool {
        let came = self.open && self.in_notes(|| pvm_nrecv(-1, self.tag)) > 0;
        if came {
            self.open = false;
            pvm_freebuf(pvm_setrbuf(0));
        }
        came
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.open {
            return;
        }
        // A cancelled notification is sent immediately.
        let message = pvm_setrbuf(0);
        self.in_notes(|| {
            self.ask(TASK_EXIT | NOTIFY_CANCEL);
            // SAFETY: the time lives as long as the call.
            unsafe { pvm_trecv(-1, self.tag, &CANCEL_TIME) }
        });
        pvm_freebuf(pvm_setrbuf(message));
    }
}
