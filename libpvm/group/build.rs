//! Gives the shared library the name that PVM programs ask for.
//!
//! It is linked without libpvm3, as PVM's own is: programs name both, and take both from one installation.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libgpvm3.so.3");
}
