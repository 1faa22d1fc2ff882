//! The manual pages of the C interface: one for each function, free of errors.

use std::path::Path;
use std::process::Command;
use xtask_install::project_folder;

/// Writes all pages to a folder below `root` and returns their names.
fn write_pages(root: &Path) -> Vec<String> {
    let folder = root.join("man3");
    xtask_package::manual::write_pages(&project_folder(), &folder).expect("pages");
    let entries = std::fs::read_dir(&folder).expect("a folder");
    entries
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

#[test]
fn every_function_has_a_page() {
    let root = tempfile::tempdir().expect("a folder");
    let names = write_pages(root.path());
    assert!(names.len() > 100, "{names:?}");
    for name in ["pvm_send.3", "pvm_upkulong.3", "pvm_recvf.3", "PvmMax.3"] {
        assert!(names.iter().any(|other| other == name), "{name}");
    }
}

/// No page has an error or a warning. Remarks about style, such as long lines, are not counted.
#[test]
#[ignore = "system tier: needs mandoc"]
fn pages_have_no_errors() {
    let root = tempfile::tempdir().expect("a folder");
    for name in write_pages(root.path()) {
        // Pages name others relative to the root.
        let output = Command::new("mandoc")
            .args(["-T", "lint"])
            .arg(Path::new("man3").join(&name))
            .current_dir(root.path())
            .output()
            .expect("mandoc is installed");
        let remarks = String::from_utf8_lossy(&output.stdout).into_owned();
        let faults: Vec<&str> = remarks
            .lines()
            .filter(|line| {
                [": ERROR: ", ": WARNING: ", ": UNSUPP: "]
                    .iter()
                    .any(|level| line.contains(level))
                    && !line.contains(".so is fragile")
                    // Pages of other packages and of other parts are not in the folder.
                    && !line.contains("referenced manual not found")
            })
            .collect();
        assert_eq!(faults, [""; 0], "{name}");
    }
}
