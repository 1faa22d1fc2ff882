//! Compiles the library that is loaded into CRIU; it travels inside this crate.

use std::env;
use std::path::PathBuf;

fn main() {
    const SOURCE: &str = "csrc/relay.c";
    println!("cargo:rerun-if-changed={SOURCE}");
    let library = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it")).join("relay.so");
    let compiler = cc::Build::new().opt_level(2).pic(true).warnings(true).extra_warnings(true).get_compiler();
    let status = compiler
        .to_command()
        .args(["-shared", "-fvisibility=hidden", "-Wl,-z,defs", "-o"])
        .arg(&library)
        .arg(SOURCE)
        .status()
        .expect("a C compiler is needed");
    assert!(status.success(), "{SOURCE} does not compile");
}
