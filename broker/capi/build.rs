//! Names the shared library, so that a program finds it by its name and not by the build's path.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libsempa_broker.so");
}
