//! Checks that each row of the tables in docs/MIGRATION.md names an existing test, and that each
//! test has a row.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn project_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("a workspace")
        .to_path_buf()
}

/// Returns the directory that contains the tests which the page names without a directory.
fn kinds_dir() -> PathBuf {
    project_dir().join("tasker/tests/kinds")
}

fn read_page() -> String {
    fs::read_to_string(project_dir().join("docs/MIGRATION.md")).expect("the page")
}

/// Returns the rows of the page's tables.
fn table_rows(page: &str) -> Vec<&str> {
    page.lines()
        .filter(|line| {
            line.starts_with("| ") && !line.starts_with("| ---") && !line.contains("| test |")
        })
        .collect()
}

/// Returns the tests that a text names as `file.rs::name`, as pairs of file and name.
fn tests_named(text: &str) -> Vec<(String, String)> {
    let words = text.split('`').skip(1).step_by(2);
    words
        .filter_map(|word| word.split_once("::"))
        .map(|(file, name)| (file.into(), name.into()))
        .collect()
}

/// Returns the names of the test functions in a source.
fn tests_in(source: &str) -> BTreeSet<String> {
    let mut lines = source.lines().map(str::trim);
    let mut names = BTreeSet::new();
    while let Some(line) = lines.next() {
        if line == "#[test]"
            && let Some(name) = lines
                .by_ref()
                .find(|line| !line.starts_with("#["))
                .and_then(|next| next.strip_prefix("fn ")?.split('(').next())
        {
            names.insert(name.to_string());
        }
    }
    names
}

#[test]
fn each_row_names_a_test_that_exists() {
    let page = read_page();
    let rows = table_rows(&page);
    assert!(rows.len() > 50, "{} rows", rows.len());
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        assert_eq!(cells.len(), 3, "{row}");
        let named = tests_named(cells[2]);
        assert!(
            !named.is_empty() || cells[1].starts_with("not tried"),
            "without a test: {row}"
        );
        for (file, name) in named {
            let path = if file.contains('/') {
                project_dir().join(&file)
            } else {
                kinds_dir().join(&file)
            };
            let source =
                fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            assert!(
                tests_in(&source).contains(&name),
                "there is no {file}::{name}: {row}"
            );
        }
    }
}

#[test]
fn each_test_of_these_has_a_row() {
    let page = read_page();
    let named: BTreeSet<(String, String)> = tests_named(&page).into_iter().collect();
    for entry in fs::read_dir(kinds_dir()).expect("a folder") {
        let path = entry.expect("an entry").path();
        let file = path
            .file_name()
            .and_then(|name| name.to_str())
            .expect("text")
            .to_string();
        let tests = tests_in(&fs::read_to_string(&path).expect("a source"));
        for name in tests.into_iter().filter(|_| file != "table.rs") {
            assert!(
                named.contains(&(file.clone(), name.clone())),
                "docs/MIGRATION.md has no row for {file}::{name}"
            );
        }
    }
}
