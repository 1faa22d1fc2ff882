//! Symbols and dependencies of the group library.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The symbols that the library must export.
const EXPORTED_SYMBOLS: &str = "
    pvm_barrier pvm_bcast pvm_freezegroup pvm_gather pvm_getinst pvm_gettid pvm_gsize pvm_joingroup pvm_lvgroup
    pvm_reduce pvm_scatter PvmMax PvmMin PvmSum PvmProduct gs_getgstid gstid pvmgs_tmout";

/// Returns the path of a library that the test run has built.
fn built_library(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("a test has a path");
    let folders = test.ancestors().skip(1).take(2);
    let found = folders
        .map(|folder| folder.join(name))
        .find(|path| path.is_file());
    found.unwrap_or_else(|| panic!("cargo builds {name} before these tests"))
}

fn output(program: &str, args: &[&str], path: &Path) -> String {
    let done = Command::new(program)
        .args(args)
        .arg(path)
        .output()
        .expect("binutils come with the C compiler");
    assert!(
        done.status.success(),
        "{program}: {}",
        String::from_utf8_lossy(&done.stderr)
    );
    String::from_utf8_lossy(&done.stdout).into_owned()
}

/// Returns the symbols that `nm` prints, without versions.
fn symbols(args: &[&str], path: &Path) -> BTreeSet<String> {
    let text = output("nm", args, path);
    let words = text
        .lines()
        .filter_map(|line| line.split_whitespace().last());
    words
        .map(|word| word.split('@').next().unwrap_or(word).to_string())
        .collect()
}

#[test]
#[ignore = "system tier: needs gcc and binutils"]
fn library_exports_exactly_pvms_symbols() {
    let exported = symbols(&["-D", "--defined-only"], &built_library("libgpvm3.so"));
    assert_eq!(
        exported,
        EXPORTED_SYMBOLS
            .split_whitespace()
            .map(String::from)
            .collect()
    );
}

/// Every PVM symbol that the group library imports is exported by `libpvm3`.
#[test]
#[ignore = "system tier: needs gcc and binutils"]
fn imported_symbols_exist_in_libpvm3() {
    let have = symbols(&["-D", "--defined-only"], &built_library("libpvm3.so"));
    let wanted = symbols(&["-D", "--undefined-only"], &built_library("libgpvm3.so"));
    let pvms: Vec<&String> = wanted
        .iter()
        .filter(|name| {
            ["pvm", "lpvm", "sempa"]
                .iter()
                .any(|start| name.starts_with(start))
        })
        .collect();
    assert!(pvms.len() > 20, "{pvms:?}");
    assert!(pvms.iter().all(|name| have.contains(*name)), "{pvms:?}");
    // If the group library contained the runtime of `libpvm3`, it would open a second connection to
    // the daemon.
    assert!(
        !symbols(&["--defined-only"], &built_library("libgpvm3.so"))
            .iter()
            .any(|name| name.contains("Runtime"))
    );
}

/// The library has PVM's soname and is not linked with `libpvm3`, which the program links itself.
#[test]
#[ignore = "system tier: needs gcc and binutils"]
fn soname_is_pvms_and_libpvm3_is_not_linked() {
    let dynamic = output("readelf", &["-d", "-W"], &built_library("libgpvm3.so"));
    assert!(
        dynamic.contains("Library soname: [libgpvm3.so.3]"),
        "{dynamic}"
    );
    assert!(
        !dynamic
            .lines()
            .any(|line| line.contains("(NEEDED)") && line.contains("pvm3")),
        "{dynamic}"
    );
}
