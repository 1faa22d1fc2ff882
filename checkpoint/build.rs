//! Compiles the C libraries that CRIU loads. This crate embeds their binaries.

use std::env;
use std::path::PathBuf;

fn main() {
    let compiler = cc::Build::new()
        .opt_level(2)
        .pic(true)
        .warnings(true)
        .extra_warnings(true)
        .get_compiler();
    let out_dir = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets it"));
    println!("cargo:rerun-if-changed=csrc/open_mode.h");
    for library in ["relay", "uffd_batching", "file_rights"] {
        let source = format!("csrc/{library}.c");
        println!("cargo:rerun-if-changed={source}");
        let status = compiler
            .to_command()
            .args(["-shared", "-fvisibility=hidden", "-Wl,-z,defs", "-o"])
            .arg(out_dir.join(format!("{library}.so")))
            .arg(&source)
            .status()
            .expect("a C compiler is needed");
        assert!(status.success(), "{source} does not compile");
    }
}
