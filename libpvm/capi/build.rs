//! Build script of `libpvm3.so.3`. Sets the soname that PVM programs link against. Compiles
//! `csrc/variadic.c`, which defines the variadic functions that only C can express.

#[path = "../unwinder.rs"]
mod unwinder;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../unwinder.rs");
    println!("cargo:rerun-if-changed=csrc/variadic.c");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libpvm3.so.3");
    // Every import must resolve when the library is linked, not when a user's program starts. A
    // fuzzing build is exempt: the instrumentation that the fuzzer's compiler inserts is defined
    // only in the fuzzer's executable.
    if std::env::var_os("CARGO_CFG_FUZZING").is_none() {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
    }
    unwinder::link_static_unwinder();
    cc::Build::new()
        .file("csrc/variadic.c")
        .flag("-fvisibility=hidden")
        .warnings(true)
        .compile("pvm3_variadic");
}
