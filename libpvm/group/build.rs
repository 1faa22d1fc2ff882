//! Sets the soname that PVM programs expect for the shared library of the group functions.
//!
//! The library is linked without `libpvm3`, like PVM's own group library: programs name both
//! libraries and load both from one installation.

#[path = "../unwinder.rs"]
mod unwinder;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../unwinder.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libgpvm3.so.3");
    unwinder::link_static_unwinder();
}
