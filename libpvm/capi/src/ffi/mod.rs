//! The functions that C programs call, grouped by topic.
//!
//! Each function relies on the caller for conditions that C cannot express: pointers are null or
//! valid, strings end with a NUL, and arrays have the length that is passed with them. All other
//! conditions are checked.

mod buffers;
mod format;
mod group;
mod hosts;
mod internal;
mod legacy_exports;
mod mailbox;
mod messages;
mod options;
mod packing;
mod returned_lists;
mod tasks;
mod trace_items;
pub(crate) mod trace_table;

use sempa_proto::PvmResult;

/// Converts the result of a call without a value to PVM's return code 0; errors are unchanged.
fn zero_on_success(result: PvmResult<()>) -> PvmResult<i32> {
    result.map(|()| 0)
}
