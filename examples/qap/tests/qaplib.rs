//! The files of QAPLIB in Debian's package `r-cran-qap`, unpacked and not installed.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use sempa_qap::instance::{Instance, parse_solution};
use sempa_qap::nugent::INSTANCES;

/// Solution files that do not fit their instance: the value stated is not the permutation's.
const KNOWN_ERRORS: [&str; 1] = ["kra32"];

/// Downloads and unpacks the package. Returns `None`, with the reason on standard error, if this
/// machine has no Debian archive with the package.
fn unpack(folder: &Path) -> Option<PathBuf> {
    let steps: [&[&str]; 2] = [
        &["apt-get", "-qq", "download", "r-cran-qap"],
        &["sh", "-c", "exec dpkg-deb -x r-cran-qap_*.deb unpacked"],
    ];
    for step in steps {
        match Command::new(step[0])
            .args(&step[1..])
            .current_dir(folder)
            .status()
        {
            Ok(status) if status.success() => {}
            failed => {
                eprintln!(
                    "SKIPPED: no files of QAPLIB: {} gives {failed:?}",
                    step.join(" ")
                );
                return None;
            }
        }
    }
    Some(folder.join("unpacked/usr/lib/R/site-library/qap/qaplib"))
}

/// Reads all files with this ending, by the name before.
fn texts(folder: &Path, ending: &str) -> BTreeMap<String, String> {
    let mut texts = BTreeMap::new();
    for entry in fs::read_dir(folder).expect("a readable file") {
        let path = entry.expect("a readable file").path();
        if path
            .extension()
            .is_some_and(|extension| extension == ending)
        {
            let name = path
                .file_stem()
                .expect("a name in UTF-8")
                .to_str()
                .expect("a name in UTF-8")
                .to_owned();
            texts.insert(name, fs::read_to_string(&path).expect("a readable file"));
        }
    }
    texts
}

#[test]
#[ignore = "system tier: needs Debian's archive"]
fn embedded_instances_and_all_solutions_agree_with_qaplib() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    let Some(library) = unpack(folder.path()) else {
        return;
    };
    let data = texts(&library, "dat");
    let mut instances = BTreeMap::new();
    for (name, text) in &data {
        match Instance::parse(text) {
            Ok(instance) => {
                instances.insert(name.as_str(), instance);
            }
            Err(error) => eprintln!("{name}: {error}"),
        }
    }
    assert!(
        instances.len() >= 110,
        "{} of {} files",
        instances.len(),
        data.len()
    );
    for nugent in INSTANCES {
        let embedded = nugent.instance();
        let file = &instances[nugent.name];
        assert!(
            *file == embedded || *file == embedded.exchanged(),
            "{}",
            nugent.name
        );
    }
    let mut checked = 0;
    for (name, text) in texts(&library, "sln") {
        let Some(instance) = instances.get(name.as_str()) else {
            continue;
        };
        let solution = match parse_solution(&text) {
            Ok(solution) => solution,
            Err(error) => {
                eprintln!("{name}: {error}");
                continue;
            }
        };
        let values = instance.evaluate_both_ways(&solution.permutation);
        let right = values.forward == solution.value || values.inverse == solution.value;
        assert_eq!(
            right,
            !KNOWN_ERRORS.contains(&name.as_str()),
            "{name}: {values:?}"
        );
        checked += 1;
        if let Some(nugent) = INSTANCES.iter().find(|nugent| nugent.name == name) {
            assert_eq!(solution.value, nugent.optimum, "{name}");
        }
    }
    assert!(checked >= 85, "{checked} solutions");
}
