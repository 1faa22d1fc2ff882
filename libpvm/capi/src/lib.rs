//! `libpvm3.so.3`: the interface of PVM 3.4 over Sempa's task runtime.
//!
//! The modules in [`ffi`] are what C programs call. They turn pointers into values and results into PVM's numbers, and
//! do nothing else; the work is done in the safe modules beside them. Errors take one way ([`session::answer`]): the code
//! goes into `pvm_errno` and, if the program wants it, a line goes to standard error.

mod abi;
mod ask;
mod buffers;
mod control;
mod data;
mod env;
mod ffi;
mod format;
mod handlers;
mod leave;
mod memory;
mod names;
mod options;
mod output;
mod pack;
mod process;
mod receive;
mod send;
mod session;
mod start;
mod trace;
mod trace_names;
