//! `libgpvm3.so.3`: the group functions of PVM 3.4, a thin layer over `libpvm3.so.3`.
//!
//! The master's daemon stores the members of all groups and the barriers in progress. The task's
//! `libpvm3` sends requests to that daemon through the entry point `sempa_group_request`, and
//! records each call for a tracer through the entry point `sempa_group_traced`. Members exchange
//! the data of a collective call by ordinary messages. The group library therefore has no state and
//! no connection; the group library uses the `libpvm3` that the program has loaded.
//!
//! * [`ffi`]: the functions that programs call.
//! * `collective`: gather, scatter, reduce.
//! * `host_info`: distribution of members over hosts.
//! * `reduce_ops`: the predefined reduce functions.
//! * `server_compat`: replaces PVM's group server.
//! * `pvm`: typed access to `libpvm3`.

mod collective;
pub mod ffi;
mod host_info;
mod pvm;
mod reduce_ops;
mod server_compat;
