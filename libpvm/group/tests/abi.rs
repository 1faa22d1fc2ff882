//! Symbols and dependencies of the group library.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The symbols that the library must export.
const EXPORTED_SYMBOLS: &str = "
    pvm_barrier pvm_bcast pvm_freezegroup pvm_gather pvm_getinst pvm_gettid pvm_gsize pvm_joingroup pvm_lvgroup
    pvm_reduce pvm_scatter PvmMax PvmMin PvmSum PvmProduct gs_getgstid gstid pvmgs_tmout pvm_gsdump pvm_grphostinfo
    pvm_grpvhostinfo";

const DEBIAN_LIBRARY: &str = "/usr/lib/x86_64-linux-gnu/libgpvm3.so.3";

/// Names of Debian's library that this library lacks: one name and its reason in each line.
const MISSING_SYMBOLS: &str = include_str!("missing.txt");

/// Returns the path of a library that the test run has built.
fn built_library(name: &str) -> PathBuf {
    let test_program = std::env::current_exe().expect("a test has a path");
    let directories = test_program.ancestors().skip(1).take(2);
    let library_path = directories
        .map(|folder| folder.join(name))
        .find(|path| path.is_file());
    library_path.unwrap_or_else(|| panic!("cargo builds {name} before these tests"))
}

fn run_program(program: &str, args: &[&str], path: &Path) -> String {
    let output = Command::new(program)
        .args(args)
        .arg(path)
        .output()
        .expect("binutils come with the C compiler");
    assert!(
        output.status.success(),
        "{program}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the symbols that `nm` prints, without versions.
fn list_symbols(args: &[&str], path: &Path) -> BTreeSet<String> {
    let text = run_program("nm", args, path);
    let symbol_names = text
        .lines()
        .filter_map(|line| line.split_whitespace().last());
    symbol_names
        .map(|symbol| symbol.split('@').next().unwrap_or(symbol).to_string())
        .collect()
}

#[test]
#[ignore = "system tier: needs gcc and binutils"]
fn library_exports_exactly_pvms_symbols() {
    let exported_symbols = list_symbols(&["-D", "--defined-only"], &built_library("libgpvm3.so"));
    assert_eq!(
        exported_symbols,
        EXPORTED_SYMBOLS
            .split_whitespace()
            .map(String::from)
            .collect()
    );
}

/// All symbols of Debian's library exist, except for the listed ones, and no others.
#[test]
#[ignore = "system tier: needs gcc and Debian's PVM"]
fn symbols_are_debians_except_for_a_list() {
    let debian_library = Path::new(DEBIAN_LIBRARY);
    assert!(
        debian_library.is_file(),
        "cannot run here: install Debian's package libpvm3"
    );
    let debian_symbols = list_symbols(&["-D", "--defined-only"], debian_library);
    assert!(debian_symbols.len() > 40, "{debian_symbols:?}");
    let mut own_symbols = list_symbols(&["-D", "--defined-only"], &built_library("libgpvm3.so"));
    let lines = MISSING_SYMBOLS
        .lines()
        .filter(|line| !line.starts_with('#') && !line.trim().is_empty());
    for line in lines {
        let (name, reason) = line.split_once(": ").expect("a name and a reason");
        assert!(!reason.trim().is_empty(), "no reason: {line}");
        assert!(
            own_symbols.insert(name.to_string()),
            "{name} is listed as missing and is exported"
        );
    }
    assert_eq!(own_symbols, debian_symbols);
}

/// Every PVM symbol that the group library imports is exported by `libpvm3`.
#[test]
#[ignore = "system tier: needs gcc and binutils"]
fn imported_symbols_exist_in_libpvm3() {
    let exported_symbols = list_symbols(&["-D", "--defined-only"], &built_library("libpvm3.so"));
    let imported_symbols = list_symbols(&["-D", "--undefined-only"], &built_library("libgpvm3.so"));
    let pvm_symbols: Vec<&String> = imported_symbols
        .iter()
        .filter(|name| {
            ["pvm", "lpvm", "sempa"]
                .iter()
                .any(|prefix| name.starts_with(prefix))
        })
        .collect();
    assert!(pvm_symbols.len() > 20, "{pvm_symbols:?}");
    assert!(
        pvm_symbols
            .iter()
            .all(|name| exported_symbols.contains(*name)),
        "{pvm_symbols:?}"
    );
    // If the group library contained the runtime of `libpvm3`, the group library would open a
    // second connection to the daemon.
    assert!(
        !list_symbols(&["--defined-only"], &built_library("libgpvm3.so"))
            .iter()
            .any(|name| name.contains("Runtime"))
    );
}

/// The library has PVM's soname and is not linked with `libpvm3`, which the program links itself.
#[test]
#[ignore = "system tier: needs gcc and binutils"]
fn soname_is_pvms_and_libpvm3_is_not_linked() {
    let dynamic_section = run_program("readelf", &["-d", "-W"], &built_library("libgpvm3.so"));
    assert!(
        dynamic_section.contains("Library soname: [libgpvm3.so.3]"),
        "{dynamic_section}"
    );
    assert!(
        !dynamic_section
            .lines()
            .any(|line| line.contains("(NEEDED)") && line.contains("pvm3")),
        "{dynamic_section}"
    );
}
