//! Makes `libfpvm3.a`, and the header that Fortran programs include.
//!
//! The archive is C: it is linked into every Fortran program, and must not bring a runtime of another language along.

use std::fmt::Write;
use std::path::PathBuf;

/// Each file is one part of the archive; a program that uses no groups does not get `groups`, which needs `libgpvm3`.
const PARTS: [&str; 5] = ["strings", "tasks", "hosts", "messages", "groups"];

/// Where statements begin in fixed form.
const INDENT: &str = "      ";

fn main() {
    let mut build = cc::Build::new();
    for part in PARTS {
        let file = format!("csrc/{part}.c");
        println!("cargo:rerun-if-changed={file}");
        build.file(file);
    }
    for file in [
        "csrc/fortran.h",
        "include/names.txt",
        "../capi/include/pvm3.h",
    ] {
        println!("cargo:rerun-if-changed={file}");
    }
    build
        .include("../capi/include")
        .flag("-std=gnu11")
        .warnings(true)
        .extra_warnings(true)
        .cargo_metadata(false);
    build.compile("fpvm3");
    let out =
        PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo gives a build script its folder"));
    let names = std::fs::read_to_string("include/names.txt")
        .expect("the list of names is beside this script");
    std::fs::write(out.join("fpvm3.h"), header(&names))
        .expect("the folder of this build can be written");
}

/// The header, in a form that fixed and free source form both take.
fn header(names: &str) -> String {
    let mut out = String::from(
        "!     fpvm3.h - the numbers of a parallel virtual machine for Fortran programs: include 'fpvm3.h'\n",
    );
    for line in names.lines().map(str::trim).filter(|line| !line.is_empty()) {
        match line.strip_prefix('#') {
            Some(title) => {
                let _ = writeln!(out, "!\n!     {}", title.trim());
            }
            None => {
                let (name, value) = line.split_once('=').expect("a name and its number");
                let (name, value) = (name.trim(), value.trim());
                let _ = writeln!(
                    out,
                    "{INDENT}integer {name}\n{INDENT}parameter ({name} = {value})"
                );
            }
        }
    }
    out
}
