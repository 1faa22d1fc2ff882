//! Gives the shared library the name that PVM programs ask for.
//!
//! It is linked without libpvm3, as PVM's own is: programs name both, and take both from one installation.

#[path = "../unwinder.rs"]
mod unwinder;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../unwinder.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libgpvm3.so.3");
    unwinder::take_along();
}
