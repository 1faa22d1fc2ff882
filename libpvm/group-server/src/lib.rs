//! The group server for programs that contain PVM's own group library.
//!
//! * [`server`]: requests and replies, without any I/O.
//! * [`dump`]: the text that lists all groups.

pub mod dump;
pub mod server;
