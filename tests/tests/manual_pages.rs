//! The installed manual pages: free of errors, and complete for the console's commands.

use sempa_tests::requirements::{installed_prefix, require_program};
use sempa_tests::run::run_to_end;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the folder of the installed manual pages.
fn manual_folder() -> PathBuf {
    require_program("mandoc", "mandoc");
    let prefix = installed_prefix().unwrap_or_else(|error| panic!("cannot run here: {error:#}"));
    prefix.join("share/man")
}

fn pages(folder: &Path) -> Vec<PathBuf> {
    let pages_in = |section: &str| -> Vec<PathBuf> {
        let entries = std::fs::read_dir(folder.join(section)).expect("installed pages");
        entries.flatten().map(|entry| entry.path()).collect()
    };
    let (user_pages, root_pages) = (pages_in("man1"), pages_in("man8"));
    assert!(user_pages.len() >= 7, "{user_pages:?}");
    assert!(root_pages.len() >= 2, "{root_pages:?}");
    [user_pages, root_pages].concat()
}

/// Runs mandoc in the folder of the pages, because pages name others relative to it.
fn mandoc(folder: &Path, arguments: &[&str], page: &Path) -> String {
    let mut command = Command::new("mandoc");
    command.current_dir(folder).args(arguments).arg(page);
    run_to_end(command, TIMEOUT).expect("mandoc ends").stdout
}

/// No page has an error or a warning. Remarks about style, such as long lines, are not counted.
#[test]
#[ignore = "system tier: needs installed programs and mandoc"]
fn pages_have_no_errors() {
    let folder = manual_folder();
    for page in pages(&folder) {
        let remarks = mandoc(&folder, &["-T", "lint"], &page);
        let is_fault = |line: &&str| {
            [": ERROR: ", ": WARNING: ", ": UNSUPP: "]
                .iter()
                .any(|level| line.contains(level))
                && !line.contains(".so is fragile")
        };
        let faults: Vec<&str> = remarks.lines().filter(is_fault).collect();
        assert_eq!(faults, [""; 0], "{}", page.display());
    }
}

/// No word of a page is taken for a macro that names another operating system.
#[test]
#[ignore = "system tier: needs installed programs and mandoc"]
fn pages_name_no_other_system() {
    let folder = manual_folder();
    for page in pages(&folder) {
        let text = mandoc(&folder, &["-T", "ascii"], &page);
        assert!(text.len() > 500, "{}", page.display());
        for name in ["AT&T UNIX", "FreeBSD", "NetBSD", "OpenBSD"] {
            assert!(!text.contains(name), "{}: {name}", page.display());
        }
    }
}

/// The page of the console describes every command that `help` lists.
#[test]
#[ignore = "system tier: needs installed programs and mandoc"]
fn console_page_describes_every_command() {
    let folder = manual_folder();
    let mut help_command = Command::new(folder.join("../../bin/pvm"));
    help_command.arg("help");
    let help = run_to_end(help_command, TIMEOUT).expect("help ends").stdout;
    let names: Vec<&str> = help
        .lines()
        .filter_map(|line| line.strip_prefix("  "))
        .filter_map(|line| line.split_whitespace().next())
        .filter(|name| *name != "or")
        .collect();
    assert!(names.len() > 30, "{help}");
    let source = std::fs::read_to_string(folder.join("man1/pvm.1")).expect("a page");
    for name in names {
        let is_described = source.lines().any(|line| {
            let is_item = line.starts_with(".It Cm ") || line.starts_with(".Cm ");
            is_item && line.split_whitespace().any(|word| word == name)
        });
        assert!(is_described, "pvm.1 does not describe {name}");
    }
}
