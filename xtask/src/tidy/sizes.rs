//! Checks the width and length of comments, and the length of files and functions.

use super::lexer::{PieceKind, SourcePiece};
use super::{COMMENT_WIDTH_MAX, COMMENT_WORDS_MIN, FILE_LINES_MAX, FUNCTION_LINES_MAX};

/// Beginning of the comment that gives the reason for a long function.
const LONG_REASON_PREFIX: &str = "tidy: long because ";

/// Returns the findings about sizes in one file, as (line number, message).
pub(super) fn check_sizes(text: &str, pieces: &[SourcePiece]) -> Vec<(usize, String)> {
    let lines: Vec<&str> = text.lines().collect();
    let mut findings = wide_comments(&lines, pieces);
    findings.extend(short_comments(pieces));
    let code_line_count = lines.iter().filter(|line| is_code(line)).count();
    if code_line_count > FILE_LINES_MAX {
        findings.push((
            1,
            format!("the file has {code_line_count} lines of code; {FILE_LINES_MAX} are the limit"),
        ));
    }
    findings.extend(long_functions(&lines));
    findings
}

fn is_code(line: &str) -> bool {
    let line = line.trim();
    !line.is_empty() && !line.starts_with("//")
}

fn wide_comments(lines: &[&str], pieces: &[SourcePiece]) -> Vec<(usize, String)> {
    let comments = pieces
        .iter()
        .filter(|piece| piece.kind == PieceKind::Comment && piece.begins_line);
    let is_too_wide = |piece: &&SourcePiece| {
        let line = lines[piece.line_number - 1];
        let is_table = piece
            .text
            .trim_start_matches(['/', '!', ' '])
            .starts_with('|');
        line.chars().count() > COMMENT_WIDTH_MAX && !is_table && !line.contains("http")
    };
    let message = format!("the comment is wider than {COMMENT_WIDTH_MAX} columns");
    comments
        .filter(is_too_wide)
        .map(|piece| (piece.line_number, message.clone()))
        .collect()
}

/// Returns the findings about documentation comments with fewer than [`COMMENT_WORDS_MIN`] words.
/// Other comments are not checked.
fn short_comments(pieces: &[SourcePiece]) -> Vec<(usize, String)> {
    let mut findings = Vec::new();
    let doc_pieces: Vec<&SourcePiece> = pieces.iter().filter(|piece| is_doc(piece)).collect();
    for block in doc_pieces.chunk_by(|a, b| b.line_number == a.line_number + 1) {
        let texts: Vec<&str> = block
            .iter()
            .map(|piece| piece.text.trim_start_matches(['/', '!']))
            .collect();
        let word_count = texts.join(" ").split_whitespace().count();
        if word_count > 0 && word_count < COMMENT_WORDS_MIN {
            findings.push((
                block[0].line_number,
                format!("a comment of {word_count} words says nothing: give a fact or delete it"),
            ));
        }
    }
    findings
}

fn is_doc(piece: &SourcePiece) -> bool {
    piece.kind == PieceKind::Comment && piece.begins_line && piece.text.starts_with(['/', '!'])
}

fn long_functions(lines: &[&str]) -> Vec<(usize, String)> {
    let mut findings = Vec::new();
    for (line_index, line) in lines.iter().enumerate() {
        let Some(name) = function_name(line) else {
            continue;
        };
        let indent = &line[..line.len() - line.trim_start().len()];
        let closing_line = format!("{indent}}}");
        let body = lines[line_index..]
            .iter()
            .take_while(|line| line.trim_end() != closing_line);
        let code_line_count = body.filter(|line| is_code(line)).count() + 1;
        let has_end = lines[line_index..]
            .iter()
            .any(|line| line.trim_end() == closing_line);
        if has_end
            && !line.trim_end().ends_with(';')
            && code_line_count > FUNCTION_LINES_MAX
            && !has_reason(lines, line_index)
        {
            let limit = format!("{FUNCTION_LINES_MAX} are the limit");
            findings.push((
                line_index + 1,
                format!("the function {name} has {code_line_count} lines of code; {limit}"),
            ));
        }
    }
    findings
}

/// Returns the name of the function whose definition begins on this line; `None` if the line begins
/// no function.
fn function_name(line: &str) -> Option<&str> {
    let qualifiers = [
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
    while let Some(qualifier) = qualifiers.iter().find(|qualifier| {
        rest.strip_prefix(**qualifier)
            .is_some_and(|r| r.starts_with(' '))
    }) {
        rest = rest[qualifier.len()..].trim_start();
    }
    let name = rest.strip_prefix("fn ")?;
    let end = name.find(|c: char| !c.is_alphanumeric() && c != '_')?;
    Some(&name[..end])
}

/// True if a comment directly above the line with index `line_index` gives the reason for a long
/// function.
fn has_reason(lines: &[&str], line_index: usize) -> bool {
    let lines_above = lines[..line_index].iter().rev().map(|line| line.trim());
    let mut comment_lines =
        lines_above.take_while(|line| line.starts_with("//") || line.starts_with("#["));
    comment_lines.any(|line| line.contains(LONG_REASON_PREFIX))
}
