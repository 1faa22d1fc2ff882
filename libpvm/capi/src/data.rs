//! The variables that `libpvm3.so.3` exports. Where PVM keeps a setting in a variable, it lives here, so that programs
//! that read or write the variable see and set the same thing as the calls.

// A symbol with a fixed name is "unsafe" because two crates could define the same one.
#![allow(unsafe_code)]
#![allow(non_upper_case_globals)]

use crate::abi::{DataId, EventInfo, Tracer};
use crate::ffi::trace_table::TABLE;
use crate::trace_names::{DATA_IDS, EVENTS};
use std::ffi::{CStr, c_char, c_void};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU64};

/// A table of pointers to text that never changes.
#[repr(transparent)]
pub(crate) struct Table<T>(pub(crate) T);

// SAFETY: the pointers in the tables below point to string constants, which nobody writes; what can change is atomic.
unsafe impl<T> Sync for Table<T> {}

macro_rules! ints {
    ($($(#[$doc:meta])* $name:ident = $value:expr;)*) => {$(
        $(#[$doc])*
        // SAFETY: the name belongs to this library in every PVM program.
        #[unsafe(no_mangle)]
        pub(crate) static $name: AtomicI32 = AtomicI32::new($value);
    )*};
}

ints! {
    /// The last error code, negative.
    pvm_errno = 0;
    /// Number of texts in `pvm_errlist`.
    pvm_nerr = 37;
    /// Own task id, −1 while the process is not enrolled.
    pvmmytid = -1;
    /// Parent task id as the daemon gave it.
    pvmmyptid = -1;
    /// Process number that enrolled.
    pvmmyupid = -1;
    /// User number that enrolled.
    pvm_useruid = -1;
    /// `PvmAutoErr`.
    pvmautoerr = 1;
    /// `PvmShowTids`.
    pvmshowtaskid = 1;
    /// Counts calls inside calls, for tracing; 1 outside.
    pvmtoplvl = 1;
    /// Number of siblings, −1 while unknown.
    pvmnsibs = -1;
    /// Mailbox index of the no-reset entry, −1 without.
    pvmnoresetindex = -1;
    /// `PvmRoute`.
    pvmrouteopt = 2;
    /// `PvmFragSize`.
    pvmfrgsiz = 4080;
    /// Largest datagram between daemons in PVM; only shown.
    pvmudpmtu = 4080;
    /// Current message context.
    pvmmyctx = 0;
    /// Data signature of this machine.
    pvmmydsig = 0;
    /// The resource manager asked by this task, 0 without.
    pvmschedtid = 0;
    /// `PvmResvTids`.
    pvmrescode = 0;
    /// `PvmDebugMask`.
    pvmdebmask = 0;
    /// `PvmNoReset`.
    pvmnoreset = 0;
    /// Size of PVM's buffer table; not used here.
    pvmmidhsiz = 0;
    /// Scratch of PVM's trace macros.
    pvmtrcdesc = 0;
    /// Scratch of PVM's trace macros.
    pvmtrctmp = 0;
    /// Scratch of PVM's trace macros.
    pvmtrcsavekind = 0;
    /// Scratch of PVM's trace macros.
    pvmtrcsbf = 0;
    /// Scratch of PVM's trace macros.
    pvmtrcsbfsave = 0;
}

macro_rules! pointers {
    ($($(#[$doc:meta])* $name:ident;)*) => {$(
        $(#[$doc])*
        // SAFETY: the name belongs to this library in every PVM program.
        #[unsafe(no_mangle)]
        pub(crate) static $name: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    )*};
}

pointers! {
    /// The siblings' task ids once they are known.
    pvmsibtids;
    /// Name given with `pvmsettaskname`.
    pvmmytaskname;
    /// PVM's list of received messages; always null here.
    pvmrxlist;
    /// PVM's active receive buffer; always null here.
    pvmrbuf;
    /// PVM's active send buffer; always null here.
    pvmsbuf;
    /// PVM's list of waits; always null here.
    waitlist;
    /// PVM's mailbox classes; always null here.
    pvmmboxclasses;
    /// PVM's message in `pvm_precv`; always null here.
    pvm_inprecv;
    /// PVM's buffer table; always null here.
    pvmmidh;
    /// Scratch of PVM's trace macros.
    pvmtrcmp;
}

/// The functions that put items into trace records.
// SAFETY: the name belongs to this library in every PVM program.
#[unsafe(no_mangle)]
pub(crate) static pvmtrccodef: AtomicPtr<c_void> =
    AtomicPtr::new((&raw const TABLE).cast_mut().cast());

/// A zero time for PVM's trace macros.
// SAFETY: the name belongs to this library in every PVM program.
#[unsafe(no_mangle)]
pub(crate) static pvmtrcztv: [AtomicU64; 2] = [const { AtomicU64::new(0) }; 2];

/// Settings for tasks that this one spawns.
// SAFETY: the name belongs to this library in every PVM program.
#[unsafe(no_mangle)]
pub(crate) static pvmctrc: Tracer = Tracer::new();

/// Settings of this task itself.
// SAFETY: the name belongs to this library in every PVM program.
#[unsafe(no_mangle)]
pub(crate) static pvmtrc: Tracer = Tracer::new();

/// Error texts by the negated code. Gaps have a text too, as in PVM.
pub(crate) const ERRORS: [&CStr; 37] = [
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

/// Text of a code; codes without one are unknown errors.
pub(crate) fn error_text(code: i32) -> &'static CStr {
    let index = usize::try_from(code.saturating_neg()).unwrap_or(usize::MAX);
    ERRORS.get(index).copied().unwrap_or(c"Unknown Error")
}

const fn pointers_of<const N: usize>(texts: [&'static CStr; N]) -> [*const c_char; N] {
    let mut out = [std::ptr::null(); N];
    let mut i = 0;
    while i < N {
        out[i] = texts[i].as_ptr();
        i += 1;
    }
    out
}

/// Error texts for programs that index them themselves.
// SAFETY: the name belongs to this library in every PVM program.
#[unsafe(no_mangle)]
pub(crate) static pvm_errlist: Table<[*const c_char; 37]> = Table(pointers_of(ERRORS));

const fn events() -> [EventInfo; EVENTS.len()] {
    let mut out = [const {
        EventInfo {
            name: std::ptr::null(),
            desc_status: AtomicI32::new(0),
            mark: [0; 2],
            total: [0; 2],
            count: AtomicI32::new(0),
        }
    }; EVENTS.len()];
    let mut i = 0;
    while i < EVENTS.len() {
        out[i].name = EVENTS[i].as_ptr();
        i += 1;
    }
    out
}

/// Names of the trace events.
// SAFETY: the name belongs to this library in every PVM program.
#[unsafe(no_mangle)]
pub(crate) static pvmtevinfo: Table<[EventInfo; EVENTS.len()]> = Table(events());

const fn data_ids() -> [DataId; DATA_IDS.len()] {
    let mut out = [const {
        DataId {
            name: std::ptr::null(),
            desc: std::ptr::null(),
        }
    }; DATA_IDS.len()];
    let mut i = 0;
    while i < DATA_IDS.len() {
        out[i] = DataId {
            name: DATA_IDS[i].as_ptr(),
            desc: DATA_IDS[i].as_ptr(),
        };
        i += 1;
    }
    out
}

/// Names of the data items of trace events.
// SAFETY: the name belongs to this library in every PVM program.
#[unsafe(no_mangle)]
pub(crate) static pvmtevdidlist: Table<[DataId; DATA_IDS.len()]> = Table(data_ids());

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::PvmError;

    #[test]
    fn every_error_code_has_the_text_that_programs_know() {
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
