//! `libsempa_broker`: the C interface `smbl.h` over the Rust client.

mod calls;
pub mod ffi;
