//! Every file of an installation has a package.

use sempa_tests::requirements::installed_prefix;
use std::path::{Path, PathBuf};
use xtask_package::contents::{destination_of, is_left_out};

/// Returns the files below `root/folder`, relative to `root`, without links.
fn files_below(root: &Path, folder: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(root.join(folder))
        .expect("a folder")
        .flatten()
    {
        let path = folder.join(entry.file_name());
        let kind = entry.file_type().expect("a type");
        if kind.is_dir() {
            files.extend(files_below(root, &path));
        } else if kind.is_file() {
            files.push(path);
        }
    }
    files
}

#[test]
#[ignore = "system tier: needs installed programs"]
fn every_installed_file_has_a_package() {
    let prefix = installed_prefix().unwrap_or_else(|error| panic!("cannot run here: {error:#}"));
    let files: Vec<PathBuf> = files_below(&prefix, Path::new(""))
        .into_iter()
        // Tests install programs for all users there.
        .filter(|path| !path.starts_with("bin/LINUX64"))
        .collect();
    assert!(files.len() > 30, "{files:?}");
    let forgotten: Vec<&PathBuf> = files
        .iter()
        .filter(|path| !is_left_out(path) && destination_of(path, "1").is_none())
        .collect();
    assert_eq!(forgotten, Vec::<&PathBuf>::new());
}
