//! The functions that C programs call, by theme.
//!
//! Every function here trusts the caller for what C cannot express (pointers are null or good, strings end, arrays have
//! the length that is given with them) and checks the rest.

mod buffers;
mod format;
mod group;
mod hosts;
mod internal;
mod kept;
mod lent;
mod mailbox;
mod messages;
mod options;
mod packing;
mod tasks;
mod trace_items;
pub(crate) mod trace_table;

use sempa_proto::PvmResult;

/// Success is 0.
fn zero(result: PvmResult<()>) -> PvmResult<i32> {
    result.map(|()| 0)
}
