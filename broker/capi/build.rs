//! Sets the soname against which C programs link.

#[path = "../../libpvm/unwinder.rs"]
mod unwinder;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../../libpvm/unwinder.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libsempa_broker.so.1");
    // Every import must resolve when the library is linked, not when a user's program starts.
    println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
    unwinder::link_static_unwinder();
}
