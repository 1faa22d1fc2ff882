//! `libpvm3.so.3`: the C interface of PVM 3.4 on top of Sempa's task runtime (crate `libpvm`).
//!
//! - The modules in `ffi` define the functions that C programs call. They convert pointers to Rust
//!   values and results to PVM's return codes, and do nothing else.
//! - The other modules implement the calls. They contain no `unsafe` code, except where a module
//!   gives a reason.
//! - Every error is reported in the same way (`session::value_or_report`): the error code is stored
//!   in `pvm_errno`, and a line is written to standard error unless the program has disabled error
//!   lines (`PvmAutoErr`).

mod abi;
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
mod receivable;
mod receive;
mod requests;
mod send;
mod session;
mod start;
mod trace;
mod trace_names;
