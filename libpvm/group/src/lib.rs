//! `libgpvm3.so.3`: the group functions of PVM 3.4, a thin layer over `libpvm3.so.3`.
//!
//! Who is in which group, and who waits for whom, the master's daemon knows; the library of the task asks it through one
//! entry, `sempa_group_request`, and makes each call one record of a trace through another, `sempa_group_traced`. What
//! members send each other in a collective call are ordinary messages. So this library has no state and no connection:
//! everything it needs it takes from the `libpvm3` that the program has loaded.
//!
//! * [`ffi`]: the functions that programs call.
//! * `collect`: gather, scatter, reduce.
//! * `combine`: the reduce functions that come with the library.
//! * `server`: what programs that speak to PVM's group server get instead of one.
//! * `pvm`: what is used of `libpvm3`.

mod collect;
mod combine;
pub mod ffi;
mod pvm;
mod server;
