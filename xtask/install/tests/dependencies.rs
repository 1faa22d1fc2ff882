//! An installation compiles the packages of the installed programs, and nothing for tests or
//! benchmarks. Cargo lists what it would compile; nothing is built.

use std::collections::BTreeSet;
use std::process::Command;
use xtask_install::{INSTALLED_PACKAGES, project_folder};

/// Packages that an installation compiles in addition to those of the programs.
const ADDITIONAL_PACKAGES: [&str; 2] = ["fpvm3", "xtask-install"];

/// Returns the packages, with version and features, that a build of `packages` compiles.
fn compiled_packages(packages: &[&str]) -> BTreeSet<String> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command
        .args(["tree", "--locked", "--offline", "--prefix", "none"])
        .args(["--edges", "normal,build", "--no-dedupe"])
        .args(["--format", "{p} {f}"])
        .args(packages.iter().flat_map(|name| ["--package", name]))
        .current_dir(project_folder());
    let output = command.output().expect("cargo runs");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    text.lines()
        .filter(|line| !line.is_empty())
        .map(str::to_string)
        .collect()
}

fn name_of(package_line: &str) -> &str {
    package_line.split(' ').next().unwrap_or_default()
}

#[test]
fn installation_compiles_only_the_product() {
    let product = compiled_packages(&INSTALLED_PACKAGES);
    let packages: Vec<&str> = INSTALLED_PACKAGES
        .into_iter()
        .chain(["xtask-install"])
        .collect();
    let installation = compiled_packages(&packages);
    let additional: Vec<&str> = installation
        .difference(&product)
        .map(|line| name_of(line))
        .collect();
    assert_eq!(
        additional, ADDITIONAL_PACKAGES,
        "packages, or packages with other features, beside those of the programs"
    );
    for test_package in ["sempa-tests", "sempa-benches", "divan", "loom", "proptest"] {
        assert!(
            installation
                .iter()
                .all(|line| name_of(line) != test_package),
            "{test_package} is compiled by an installation"
        );
    }
}

/// The launcher is compiled with another profile, so each of its dependencies would be compiled in
/// addition.
#[test]
fn launcher_depends_on_nothing() {
    let packages = compiled_packages(&["xtask-launcher"]);
    let names: Vec<&str> = packages.iter().map(|line| name_of(line)).collect();
    assert_eq!(names, ["xtask-launcher"]);
}
