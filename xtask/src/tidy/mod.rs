//! `cargo xtask tidy`: checks the language of comments, documents and messages, and the size of
//! files, functions and comments.
//!
//! There are four kinds of findings, each with file and line:
//!
//! * words and constructions that make a sentence hard to read ([`words`]), in comments, documents
//!   and messages;
//! * words that `docs/GLOSSARY.md` replaces by another term;
//! * comments that are wider than [`COMMENT_WIDTH_MAX`] columns or shorter than
//!   [`COMMENT_WORDS_MIN`] words;
//! * files and functions that are too long.
//!
//! A function may exceed its limit if a comment `tidy: long because …` directly above it gives a
//! reason.

mod lexer;
mod sizes;
mod words;

use anyhow::{Context, Result, ensure};
use std::fmt;
use std::fs;
use std::process::Command;
use xtask_install::project_folder;

/// Maximum number of columns of a comment line, including its indentation.
pub(crate) const COMMENT_WIDTH_MAX: usize = 100;
/// Minimum number of words of a documentation comment. A shorter comment only repeats the name of
/// its item.
pub(crate) const COMMENT_WORDS_MIN: usize = 4;
/// Maximum number of lines of code in a file. Blank lines and comments do not count.
pub(crate) const FILE_LINES_MAX: usize = 800;
/// Maximum number of lines of code in a function.
pub(crate) const FUNCTION_LINES_MAX: usize = 90;

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// The path, relative to the project's folder.
    pub(crate) file: String,
    /// The line number, counted from 1.
    pub(crate) line: usize,
    pub(crate) message: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}: {}", self.file, self.line, self.message)
    }
}

/// Checks all files of the project that git does not ignore and that have a checked type. Prints
/// the findings. Returns true if there are no findings.
///
/// # Errors
/// Git does not list the files, or a file cannot be read.
pub(crate) fn run_checks() -> Result<bool> {
    let files = tracked_files()?;
    let glossary =
        fs::read_to_string(project_folder().join("docs/GLOSSARY.md")).unwrap_or_default();
    let replaced_words = words::replaced_terms(&glossary);
    let mut findings = Vec::new();
    for file in &files {
        let text = fs::read_to_string(project_folder().join(file)).with_context(|| file.clone())?;
        findings.extend(check_file(file, &text, &replaced_words));
    }
    for finding in &findings {
        println!("{finding}");
    }
    println!("tidy: {} files, {} findings", files.len(), findings.len());
    Ok(findings.is_empty())
}

fn tracked_files() -> Result<Vec<String>> {
    let mut git_command = Command::new("git");
    git_command.args(["ls-files", "--cached", "--others", "--exclude-standard"]);
    let git_output = git_command
        .current_dir(project_folder())
        .output()
        .context("git")?;
    ensure!(
        git_output.status.success(),
        "git ls-files: {}",
        String::from_utf8_lossy(&git_output.stderr).trim()
    );
    let names = String::from_utf8(git_output.stdout)?;
    let must_be_checked = |name: &&str| is_checked(name) && project_folder().join(name).is_file();
    Ok(names
        .lines()
        .filter(must_be_checked)
        .map(str::to_string)
        .collect())
}

/// True if a file is checked. The files below `xtask/src/tidy/` are not checked, because they
/// contain the forbidden words. Licence texts are not checked.
fn is_checked(file: &str) -> bool {
    let has_checked_extension = [".rs", ".md", ".1", ".7", ".toml", ".c", ".h"]
        .iter()
        .any(|ending| file.ends_with(ending));
    has_checked_extension && !file.starts_with("xtask/src/tidy/") && !file.starts_with("LICENSE")
}

/// Returns the findings in one file.
fn check_file(file: &str, text: &str, replaced_words: &[words::ReplacedWord]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut report = |line: usize, message: String| {
        let file = file.to_string();
        findings.push(Finding {
            file,
            line,
            message,
        });
    };
    if !file.ends_with(".rs") {
        // Code blocks in documents are not checked, because they contain programs and their output.
        let mut is_quoted = false;
        for (number, line) in (1..).zip(text.lines()) {
            is_quoted ^= line.trim_start().starts_with("```");
            if !is_quoted {
                words::findings_in_prose(line).for_each(|message| report(number, message));
            }
        }
        return findings;
    }
    let pieces = lexer::split_source(text);
    for piece in &pieces {
        match piece.kind {
            lexer::PieceKind::Comment => {
                words::findings_in_prose(&piece.text)
                    .for_each(|message| report(piece.line_number, message));
                words::findings_of_glossary(&piece.text, replaced_words)
                    .for_each(|message| report(piece.line_number, message));
            }
            lexer::PieceKind::Literal => words::findings_in_message(&piece.text)
                .for_each(|message| report(piece.line_number, message)),
            lexer::PieceKind::Code => {}
        }
    }
    sizes::check_sizes(text, &pieces)
        .into_iter()
        .for_each(|(line, message)| report(line, message));
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn finding_lines(text: &str) -> Vec<usize> {
        check_file("a.rs", text, &[])
            .into_iter()
            .map(|finding| finding.line)
            .collect()
    }

    #[test]
    fn plain_comment_has_no_findings() {
        assert!(
            finding_lines("/// Returns the number of waiting tasks.\nfn waiting() {}\n").is_empty()
        );
    }

    #[test]
    fn forbidden_words_in_comments_are_found() {
        assert_eq!(
            finding_lines("fn a() {}\n/// Whoever waits here begins anew later.\nfn b() {}\n"),
            [2, 2]
        );
    }

    #[test]
    fn code_is_not_prose() {
        assert!(finding_lines("fn anew() { let whoever = 1; }\n").is_empty());
    }

    #[test]
    fn short_and_wide_comments_are_found() {
        let wide_comment = format!("/// {}\nfn a() {{}}\n", "word ".repeat(30));
        assert_eq!(finding_lines(&wide_comment), [1]);
        assert_eq!(finding_lines("/// Its name.\nfn a() {}\n"), [1]);
    }

    #[test]
    fn long_functions_need_a_reason() {
        let body = "    work();\n".repeat(FUNCTION_LINES_MAX);
        assert_eq!(finding_lines(&format!("fn a() {{\n{body}}}\n")), [1]);
        assert!(
            finding_lines(&format!(
                "// tidy: long because each arm is a message\nfn a() {{\n{body}}}\n"
            ))
            .is_empty()
        );
    }
}
