//! `libsempa_work.so.1`: the C interface of master-worker programs (`include/sempa_work.h`), on top
//! of the crate `master-worker`. The C++ classes of `cpp/` use this interface.
//!
//! - The modules in `ffi` define the functions that C programs call, and call the programs'
//!   callbacks. They contain all `unsafe` code.
//! - The other modules convert values and errors.
//!
//! A panic never crosses the boundary: each exported function catches panics and returns an error
//! code. Callbacks must not raise C++ exceptions or jump out (`longjmp`).

mod abi;
mod errors;
mod ffi;
#[cfg(test)]
mod layout;
mod settings;
