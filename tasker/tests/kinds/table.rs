//! Checks the tables in docs/MIGRATION.md: each row must name an existing test, and each test must
//! have a row.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

fn project_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("a workspace")
        .to_path_buf()
}

/// Returns the directory of the tests that docs/MIGRATION.md names by file name alone.
fn kinds_dir() -> PathBuf {
    project_dir().join("tasker/tests/kinds")
}

fn read_migration_page() -> String {
    fs::read_to_string(project_dir().join("docs/MIGRATION.md")).expect("the page")
}

/// Returns the rows of the tables in `page`, the text of docs/MIGRATION.md.
fn table_rows(page: &str) -> Vec<&str> {
    page.lines()
        .filter(|line| {
            line.starts_with("| ") && !line.starts_with("| ---") && !line.contains("| test |")
        })
        .collect()
}

/// Returns the tests that a text names as `file.rs::name`, as pairs of file and test name.
fn referenced_tests(text: &str) -> Vec<(String, String)> {
    let code_spans = text.split('`').skip(1).step_by(2);
    code_spans
        .filter_map(|code_span| code_span.split_once("::"))
        .map(|(file, name)| (file.into(), name.into()))
        .collect()
}

/// Returns the names of the test functions in the text of a source file.
fn defined_tests(source: &str) -> BTreeSet<String> {
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
    let page = read_migration_page();
    let rows = table_rows(&page);
    assert!(rows.len() > 50, "{} rows", rows.len());
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split(" | ").collect();
        assert_eq!(cells.len(), 3, "{row}");
        let row_tests = referenced_tests(cells[2]);
        assert!(
            !row_tests.is_empty() || cells[1].starts_with("not tried"),
            "without a test: {row}"
        );
        for (file, name) in row_tests {
            let path = if file.contains('/') {
                project_dir().join(&file)
            } else {
                kinds_dir().join(&file)
            };
            let source =
                fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
            assert!(
                defined_tests(&source).contains(&name),
                "there is no {file}::{name}: {row}"
            );
        }
    }
}

#[test]
fn each_test_of_these_has_a_row() {
    let page = read_migration_page();
    let tests_with_row: BTreeSet<(String, String)> = referenced_tests(&page).into_iter().collect();
    for entry in fs::read_dir(kinds_dir()).expect("a folder") {
        let path = entry.expect("an entry").path();
        let file = path
            .file_name()
            .and_then(|name| name.to_str())
            .expect("text")
            .to_string();
        let test_names = defined_tests(&fs::read_to_string(&path).expect("a source"));
        for name in test_names.into_iter().filter(|_| file != "table.rs") {
            assert!(
                tests_with_row.contains(&(file.clone(), name.clone())),
                "docs/MIGRATION.md has no row for {file}::{name}"
            );
        }
    }
}
