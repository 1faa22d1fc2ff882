//! The functions that C programs call, grouped by topic, and the callbacks of C programs.
//!
//! Each function relies on the caller for conditions that C cannot express: pointers are null or
//! valid, strings end with a zero byte, arrays have the length that is passed with them, and a
//! handle is used by the thread that got it, before the call that created it returns. All other
//! conditions are checked.

mod buffer;
mod context;
mod driver;
mod enrolled;
mod entry;
mod memory;
mod run;
mod worker;

/// Returns checks of the structures with callbacks, as C code.
#[cfg(test)]
pub(crate) fn callback_checks() -> String {
    driver::Callbacks::layout_checks() + &worker::Callbacks::layout_checks()
}
