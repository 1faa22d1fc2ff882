//! The variables that `libpvm3.so.3` exports.
//!
//! If PVM stores a setting in a variable, this library stores the setting only in the same
//! variable. Programs that access the variable and programs that use the calls therefore see the
//! same value.

// Rust counts a symbol with a fixed name as unsafe, because two crates could define the same
// symbol.
#![allow(unsafe_code)]
#![allow(non_upper_case_globals)]

use crate::abi::{DataId, EventInfo, Tracer};
use crate::ffi::trace_table::PUT_ITEM_TABLE;
use crate::trace_names::{EVENT_NAMES, ITEM_NAMES};
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64};

/// Wrapper that makes a table of pointers `Sync`. The pointers never change.
#[repr(transparent)]
pub(crate) struct SyncTable<T>(pub(crate) T);

// SAFETY: the pointers in the tables below refer to string constants, which are never written; all
// mutable fields are atomic.
unsafe impl<T> Sync for SyncTable<T> {}

macro_rules! ints {
    ($($(#[$doc:meta])* $name:ident = $value:expr;)*) => {$(
        $(#[$doc])*
        // SAFETY: no other library of a PVM program defines this name.
        #[unsafe(no_mangle)]
        pub(crate) static $name: AtomicI32 = AtomicI32::new($value);
    )*};
}

ints! {
    /// Code of the last error, negative; 0 before the first error.
    pvm_errno = 0;
    /// Number of texts in `pvm_errlist`.
    pvm_nerr = 37;
    /// Tid of this task; −1 while the process is not enrolled.
    pvmmytid = -1;
    /// The parent's tid as the daemon reported it; −1 while the process is not enrolled.
    pvmmyptid = -1;
    /// Pid of the process at enrolment.
    pvmmyupid = -1;
    /// Uid of the process at enrolment.
    pvm_useruid = -1;
    /// Value of the option `PvmAutoErr`.
    pvmautoerr = 1;
    /// Value of the option `PvmShowTids`.
    pvmshowtaskid = 1;
    /// Nonzero outside of group functions. Group functions set the variable to 0 during a call, so
    /// that their inner calls are not traced.
    pvmtoplvl = 1;
    /// Number of siblings; −1 while the number is unknown.
    pvmnsibs = -1;
    /// Index of this task's entry in the no-reset class of the mailbox; −1 if this task has no
    /// entry.
    pvmnoresetindex = -1;
    /// Value of the option `PvmRoute`.
    pvmrouteopt = 2;
    /// Value of the option `PvmFragSize`.
    pvmfrgsiz = 4080;
    /// Maximum datagram size between daemons in PVM; not used in this library.
    pvmudpmtu = 4080;
    pvmmyctx = 0;
    /// Data signature of this machine.
    pvmmydsig = 0;
    /// Tid of this task's resource manager; 0 if the task has no resource manager.
    pvmschedtid = 0;
    /// Value of the option `PvmResvTids`.
    pvmrescode = 0;
    /// Value of the option `PvmDebugMask`.
    pvmdebmask = 0;
    /// Value of the option `PvmNoReset`.
    pvmnoreset = 0;
    /// Size of PVM's buffer table; not used in this library.
    pvmmidhsiz = 0;
    /// Scratch variable of PVM's trace macros.
    pvmtrcdesc = 0;
    /// Scratch variable of PVM's trace macros.
    pvmtrctmp = 0;
    /// Scratch variable of PVM's trace macros.
    pvmtrcsavekind = 0;
    /// Scratch variable of PVM's trace macros.
    pvmtrcsbf = 0;
    /// Scratch variable of PVM's trace macros.
    pvmtrcsbfsave = 0;
}

macro_rules! pointers {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        // SAFETY: no other library of a PVM program defines this name.
        #[unsafe(no_mangle)]
        pub(crate) static $name: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    )*};
}

pointers! {
    /// Tids of the siblings; null while the siblings are unknown.
    pvmsibtids;
    /// Name that the program set with `pvmsettaskname`.
    pvmmytaskname;
    /// PVM's list of received messages; always null in this library.
    pvmrxlist;
    /// PVM's active receive buffer; always null in this library.
    pvmrbuf;
    /// PVM's active send buffer; always null in this library.
    pvmsbuf;
    /// PVM's list of outstanding waits; always null in this library.
    waitlist;
    /// PVM's mailbox classes; always null in this library.
    pvmmboxclasses;
    /// PVM's message in `pvm_precv`; always null in this library.
    pvm_inprecv;
    /// PVM's buffer table; always null in this library.
    pvmmidh;
    /// Scratch variable of PVM's trace macros.
    pvmtrcmp;
}

/// Table of the functions that append items to trace records.
// SAFETY: no other library of a PVM program defines this name.
#[unsafe(no_mangle)]
pub(crate) static pvmtrccodef: AtomicPtr<c_void> =
    AtomicPtr::new((&raw const PUT_ITEM_TABLE).cast_mut().cast());

/// A zero time for PVM's trace macros.
// SAFETY: no other library of a PVM program defines this name.
#[unsafe(no_mangle)]
pub(crate) static pvmtrcztv: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Trace and output settings for tasks that this task spawns.
// SAFETY: no other library of a PVM program defines this name.
#[unsafe(no_mangle)]
pub(crate) static pvmctrc: Tracer = Tracer::new();

/// Trace and output settings of this task.
// SAFETY: no other library of a PVM program defines this name.
#[unsafe(no_mangle)]
pub(crate) static pvmtrc: Tracer = Tracer::new();

/// Error texts, indexed by the negated error code. Unassigned codes have a text too, as in PVM.
pub(crate) const ERROR_TEXTS: [&CStr; 37] = [
    c"Error 0",
    c"Error 1",
    c"Bad parameter",
    c"Parameter mismatch",
    c"Value too large",
    c"End of buffer",
    c"No such host",
    c"No such file",
    c"Permission denied",
    c"Error 9",
    c"Malloc failed",
    c"Error 11",
    c"Can't decode message",
    c"Error 13",
    c"Can't contact local daemon",
    c"No current buffer",
    c"No such buffer",
    c"Null group name",
    c"Already in group",
    c"No such group",
    c"Not in group",
    c"No such instance",
    c"Host failed",
    c"No parent task",
    c"Not implemented",
    c"Pvmd system error",
    c"Version mismatch",
    c"Out of resources",
    c"Duplicate host",
    c"Can't start pvmd",
    c"Already in progress",
    c"No such task",
    c"Not Found",
    c"Already Exists",
    c"Hoster must run on master host",
    c"Spawning parent set PvmNoParent",
    c"Master Host IP Address is Loopback! (See pvm3/Readme)",
];

/// Returns the text of an error code; `Unknown Error` for a code outside of the table.
pub(crate) fn error_text(code: i32) -> &'static CStr {
    let index = usize::try_from(code.saturating_neg()).unwrap_or(usize::MAX);
    ERROR_TEXTS.get(index).copied().unwrap_or(c"Unknown Error")
}

const fn pointers_to<const N: usize>(texts: [&'static CStr; N]) -> [*const c_char; N] {
    let mut out = [std::ptr::null(); N];
    let mut i = 0;
    while i < N {
        out[i] = texts[i].as_ptr();
        i += 1;
    }
    out
}

/// Error texts for programs that index the table themselves.
// SAFETY: no other library of a PVM program defines this name.
#[unsafe(no_mangle)]
pub(crate) static pvm_errlist: SyncTable<[*const c_char; 37]> = SyncTable(pointers_to(ERROR_TEXTS));

const fn event_table() -> [EventInfo; EVENT_NAMES.len()] {
    let mut out = [const {
        EventInfo {
            name: std::ptr::null(),
            desc_status: AtomicI32::new(0),
            mark: [0; 2],
            total: [0; 2],
            count: AtomicI32::new(0),
        }
    }; EVENT_NAMES.len()];
    let mut i = 0;
    while i < EVENT_NAMES.len() {
        out[i].name = EVENT_NAMES[i].as_ptr();
        i += 1;
    }
    out
}

/// Names of the trace events, by event number.
// SAFETY: no other library of a PVM program defines this name.
#[unsafe(no_mangle)]
pub(crate) static pvmtevinfo: SyncTable<[EventInfo; EVENT_NAMES.len()]> = SyncTable(event_table());

const fn data_id_table() -> [DataId; ITEM_NAMES.len()] {
    let mut out = [const {
        DataId {
            name: std::ptr::null(),
            desc: std::ptr::null(),
        }
    }; ITEM_NAMES.len()];
    let mut i = 0;
    while i < ITEM_NAMES.len() {
        out[i] = DataId {
            name: ITEM_NAMES[i].as_ptr(),
            desc: ITEM_NAMES[i].as_ptr(),
        };
        i += 1;
    }
    out
}

/// Names of the data items of trace events, by item number.
// SAFETY: no other library of a PVM program defines this name.
#[unsafe(no_mangle)]
pub(crate) static pvmtevdidlist: SyncTable<[DataId; ITEM_NAMES.len()]> = SyncTable(data_id_table());

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::PvmError;

    /// Every error code has PVM's text, and unassigned codes have numbered texts. Codes outside of
    /// the table are unknown errors.
    #[test]
    fn error_texts_match_pvm() {
        for code in -36..0 {
            match PvmError::from_code(code) {
                Some(error) => assert_eq!(error_text(code).to_str(), Ok(error.text())),
                None => assert_eq!(
                    error_text(code).to_str(),
                    Ok(format!("Error {}", -code).as_str())
                ),
            }
        }
        assert_eq!(error_text(-37), c"Unknown Error");
        assert_eq!(error_text(5), c"Unknown Error");
        assert_eq!(error_text(i32::MIN), c"Unknown Error");
    }
}
