//! Checks the width and length of comments, and the length of files and functions.

use super::lexer::{PieceKind, SourcePiece};
use super::{COMMENT_WIDTH_MAX, COMMENT_WORDS_MIN, FILE_LINES_MAX, FUNCTION_LINES_MAX};

/// Beginning of the comment that gives the reason for a long function.
const LONG_REASON_PREFIX: &str = "tidy: long because ";

/// Returns the findings in one file, as (line number, message).
pub(super) fn check(text: &str, pieces: &[SourcePiece]) -> Vec<(usize, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut found = wide_comments(&lines, pieces);
    found.extend(short_comments(pieces));
    let code = lines.iter().filter(|line| is_code(line)).count();
    if code > FILE_LINES_MAX {
        found.push((
            1,
            format!("the file has {code} lines of code; {FILE_LINES_MAX} are the limit"),
        ));
    }
    found.extend(long_functions(&lines));
    found
}

fn is_code(line: &str) -> bool {
    let line = line.trim();
    !line.is_empty() && !line.starts_with("//")
}

fn wide_comments(lines: &[&str], pieces: &[SourcePiece]) -> Vec<(usize, String)> {
    let comments = pieces
        .iter()
        .filter(|piece| piece.kind == PieceKind::Comment && piece.begins_line);
    let wide = |piece: &&SourcePiece| {
        let line = lines[piece.line - 1];
        let is_table = piece
            .text
            .trim_start_matches(['/', '!', ' '])
            .starts_with('|');
        line.chars().count() > COMMENT_WIDTH_MAX && !is_table && !line.contains("http")
    };
    let message = format!("the comment is wider than {COMMENT_WIDTH_MAX} columns");
    comments
        .filter(wide)
        .map(|piece| (piece.line, message.clone()))
        .collect()
}

/// Returns the findings about documentation comments with too few words. Safety comments and
/// directives are not checked.
fn short_comments(pieces: &[SourcePiece]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let docs: Vec<&SourcePiece> = pieces.iter().filter(|piece| is_doc(piece)).collect();
    for block in docs.chunk_by(|a, b| b.line == a.line + 1) {
        let text: Vec<&str> = block
            .iter()
            .map(|piece| piece.text.trim_start_matches(['/', '!']))
            .collect();
        let words = text.join(" ").split_whitespace().count();
        if words > 0 && words < COMMENT_WORDS_MIN {
            found.push((
                block[0].line,
                format!("a comment of {words} words says nothing: give a fact or delete it"),
            ));
        }
    }
    found
}

fn is_doc(piece: &SourcePiece) -> bool {
    piece.kind == PieceKind::Comment && piece.begins_line && piece.text.starts_with(['/', '!'])
}

fn long_functions(lines: &[&str]) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    for (at, line) in lines.iter().enumerate() {
        let Some(name) = function_name(line) else {
            continue;
        };
        let indent = &line[..line.len() - line.trim_start().len()];
        let closing = format!("{indent}}}");
        let body = lines[at..]
            .iter()
            .take_while(|line| line.trim_end() != closing);
        let length = body.filter(|line| is_code(line)).count() + 1;
        let ends = lines[at..].iter().any(|line| line.trim_end() == closing);
        if ends
            && !line.trim_end().ends_with(';')
            && length > FUNCTION_LINES_MAX
            && !has_reason(lines, at)
        {
            let limit = format!("{FUNCTION_LINES_MAX} are the limit");
            found.push((
                at + 1,
                format!("the function {name} has {length} lines of code; {limit}"),
            ));
        }
    }
    found
}

/// Returns the name of the function whose definition begins on this line; `None` if none does.
fn function_name(line: &str) -> Option<&str> {
    let words = [
        "pub",
        "pub(crate)",
        "pub(super)",
        "const",
        "async",
        "unsafe",
        "extern",
        "\"C\"",
    ];
    let mut rest = line.trim_start();
    while let Some(word) = words.iter().find(|word| {
        rest.strip_prefix(**word)
            .is_some_and(|r| r.starts_with(' '))
    }) {
        rest = rest[word.len()..].trim_start();
    }
    let name = rest.strip_prefix("fn ")?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    Some(&name[..end])
}

/// True if a comment directly above line `at` gives the reason for a long function.
fn has_reason(lines: &[&str], at: usize) -> bool {
    let above = lines[..at].iter().rev().map(|line| line.trim());
    let mut head = above.take_while(|line| line.starts_with("//") || line.starts_with("#["));
    head.any(|line| line.contains(LONG_REASON_PREFIX))
}
