//! Gives the shared library the name that PVM programs ask for, and compiles the few lines that only C can express.

#[path = "../unwinder.rs"]
mod unwinder;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed=../unwinder.rs");
    println!("cargo:rerun-if-changed=csrc/variadic.c");
    println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libpvm3.so.3");
    // Every import must resolve when the library is made, not when a program of a user starts. What a fuzzer's compiler
    // adds to the code is only found in the fuzzer.
    if std::env::var_os("CARGO_CFG_FUZZING").is_none() {
        println!("cargo:rustc-cdylib-link-arg=-Wl,-z,defs");
    }
    unwinder::take_along();
    cc::Build::new()
        .file("csrc/variadic.c")
        .flag("-fvisibility=hidden")
        .warnings(true)
        .compile("pvm3_variadic");
}
