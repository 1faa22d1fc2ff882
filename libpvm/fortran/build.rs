//! Builds `libfpvm3.a` and the header that Fortran programs include.
//!
//! The archive is written in C: it is linked into every Fortran program and must not require the
//! runtime of another language.

use std::fmt::Write;
use std::path::PathBuf;

/// C files, each an object of the archive. A program without groups does not link `groups`, which
/// needs `libgpvm3`.
const C_SOURCES: [&str; 5] = ["strings", "tasks", "hosts", "messages", "groups"];

/// First column of statements in fixed source form.
const INDENT: &str = "      ";

fn main() {
    let mut build = cc::Build::new();
    for source_name in C_SOURCES {
        let file = format!("csrc/{source_name}.c");
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
    let out_dir =
        PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo gives a build script its folder"));
    let constant_names = std::fs::read_to_string("include/names.txt")
        .expect("include/names.txt exists next to this script");
    std::fs::write(out_dir.join("fpvm3.h"), generate_header(&constant_names))
        .expect("the folder of this build can be written");
}

/// Generates the header in a form that is valid in fixed and free source form.
fn generate_header(constant_names: &str) -> String {
    let mut header_text = String::from(
        "!     fpvm3.h - the numbers of a parallel virtual machine for Fortran programs: include 'fpvm3.h'\n",
    );
    for line in constant_names
        .lines()
        .map(str::trim)
        .filter(|line| !line.is_empty())
    {
        match line.strip_prefix('#') {
            Some(title) => {
                let _ = writeln!(header_text, "!\n!     {}", title.trim());
            }
            None => {
                let (name, value) = line.split_once('=').expect("a name and its number");
                let (name, value) = (name.trim(), value.trim());
                let _ = writeln!(
                    header_text,
                    "{INDENT}integer {name}\n{INDENT}parameter ({name} = {value})"
                );
            }
        }
    }
    header_text
}
