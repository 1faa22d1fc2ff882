//! `libgpvm3.so.3`: the group functions of PVM 3.4, a thin layer over `libpvm3.so.3`.
//!
//! The master's daemon stores the members of all groups and the barriers in progress. The task's
//! library sends requests to that daemon through its entry point `sempa_group_request`. Its entry
//! point `sempa_group_traced` makes each call one record of a trace. Members exchange the data of a
//! collective call by ordinary messages. This library therefore has no state and no connection; it
//! uses the `libpvm3` that the program has loaded.
//!
//! * [`ffi`]: the functions that programs call.
//! * `collective`: gather, scatter, reduce.
//! * `reduce_ops`: the predefined reduce functions.
//! * `server_compat`: replaces PVM's group server.
//! * `pvm`: typed access to `libpvm3`.

mod collective;
pub mod ffi;
mod pvm;
mod reduce_ops;
mod server_compat;
