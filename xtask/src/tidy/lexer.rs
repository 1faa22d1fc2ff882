//! Divides Rust source text into code, comments and string literals.
//!
//! The division is purely lexical. The lexer handles nested block comments, raw strings and
//! character literals, but no other syntax.

/// The kind of a [`SourcePiece`] of source text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceKind {
    Code,
    Comment,
    Literal,
}

/// A piece of one line.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SourcePiece {
    pub(super) kind: PieceKind,
    /// The line number, counted from 1.
    pub(super) line: usize,
    /// The text without comment markers and quotes.
    pub(super) text: String,
    /// True if only white space precedes the piece on its line.
    pub(super) begins_line: bool,
}

/// The construct that the scanner is in.
enum ScannerState {
    Code,
    LineComment,
    /// The number of nested block comments that are open.
    BlockComment(usize),
    StringLiteral,
    /// The number of hash signs at the end of the raw string.
    RawStringLiteral(usize),
}

/// Returns the pieces of a source text in order. No piece extends beyond the end of a line.
pub(super) fn split_source(source: &str) -> Vec<SourcePiece> {
    let mut scanner = Scanner {
        state: ScannerState::Code,
        pieces: Vec::new(),
        current: String::new(),
        line: 1,
        is_line_blank: true,
    };
    let characters: Vec<char> = source.chars().collect();
    let mut at = 0;
    while at < characters.len() {
        at += scanner.step(&characters[at..]);
    }
    scanner.flush();
    scanner.pieces
}

struct Scanner {
    state: ScannerState,
    pieces: Vec<SourcePiece>,
    current: String,
    line: usize,
    /// True while only white space was found on the line.
    is_line_blank: bool,
}

impl Scanner {
    /// Consumes the next characters of `rest` and returns their number.
    fn step(&mut self, rest: &[char]) -> usize {
        let begins = |text: &str| {
            text.chars()
                .eq(rest.iter().copied().take(text.chars().count()))
        };
        if rest[0] == '\n' {
            self.flush();
            if matches!(self.state, ScannerState::LineComment) {
                self.state = ScannerState::Code;
            }
            self.line += 1;
            self.is_line_blank = true;
            return 1;
        }
        match self.state {
            ScannerState::Code if begins("//") => self.change(ScannerState::LineComment, 2),
            ScannerState::Code if begins("/*") => self.change(ScannerState::BlockComment(1), 2),
            ScannerState::Code if rest[0] == '"' => self.change(ScannerState::StringLiteral, 1),
            ScannerState::Code if rest[0] == '\'' => {
                self.take(character_literal(rest).unwrap_or(1), rest)
            }
            ScannerState::Code if rest[0] == 'r' && !self.ends_in_word() => {
                match raw_string_hashes(rest) {
                    Some(hashes) => self.change(ScannerState::RawStringLiteral(hashes), hashes + 2),
                    None => self.take(1, rest),
                }
            }
            ScannerState::BlockComment(depth) if begins("/*") => {
                self.state = ScannerState::BlockComment(depth + 1);
                2
            }
            ScannerState::BlockComment(1) if begins("*/") => self.change(ScannerState::Code, 2),
            ScannerState::BlockComment(depth) if begins("*/") => {
                self.state = ScannerState::BlockComment(depth - 1);
                2
            }
            ScannerState::StringLiteral if rest[0] == '\\' && rest.get(1) != Some(&'\n') => {
                self.take(2.min(rest.len()), rest)
            }
            ScannerState::StringLiteral if rest[0] == '"' => self.change(ScannerState::Code, 1),
            ScannerState::RawStringLiteral(hashes) if ends_raw_text(rest, hashes) => {
                self.change(ScannerState::Code, hashes + 1)
            }
            _ => self.take(1, rest),
        }
    }

    fn take(&mut self, count: usize, rest: &[char]) -> usize {
        self.current.extend(&rest[..count]);
        count
    }

    fn change(&mut self, state: ScannerState, taken: usize) -> usize {
        self.flush();
        self.state = state;
        taken
    }

    fn ends_in_word(&self) -> bool {
        self.current
            .chars()
            .last()
            .is_some_and(|c| c.is_alphanumeric() || c == '_')
    }

    fn flush(&mut self) {
        let kind = match self.state {
            ScannerState::Code => PieceKind::Code,
            ScannerState::LineComment | ScannerState::BlockComment(_) => PieceKind::Comment,
            ScannerState::StringLiteral | ScannerState::RawStringLiteral(_) => PieceKind::Literal,
        };
        let text = std::mem::take(&mut self.current);
        let begins_line = self.is_line_blank;
        if kind == PieceKind::Code && text.trim().is_empty() {
            return;
        }
        self.is_line_blank = false;
        self.pieces.push(SourcePiece {
            kind,
            line: self.line,
            text,
            begins_line,
        });
    }
}

/// Returns the length of the character literal at the beginning of `rest`; `None` if a lifetime
/// begins there.
fn character_literal(rest: &[char]) -> Option<usize> {
    if rest.get(1) == Some(&'\\') {
        let end = rest.iter().skip(3).take(10).position(|c| *c == '\'')?;
        return Some(end + 4);
    }
    (rest.get(2) == Some(&'\'')).then_some(3)
}

/// Returns the number of hash signs of the raw string at the beginning of `rest`; `None` if no raw
/// string begins there.
fn raw_string_hashes(rest: &[char]) -> Option<usize> {
    let hashes = rest[1..].iter().take_while(|c| **c == '#').count();
    (rest.get(1 + hashes) == Some(&'"')).then_some(hashes)
}

fn ends_raw_text(rest: &[char], hashes: usize) -> bool {
    rest[0] == '"' && rest.len() > hashes && rest[1..=hashes].iter().all(|c| *c == '#')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(source: &str) -> Vec<(PieceKind, String)> {
        split_source(source)
            .into_iter()
            .map(|piece| (piece.kind, piece.text))
            .collect()
    }

    #[test]
    fn comments_strings_and_code_are_divided() {
        let found = kinds("let a = \"no // comment\"; // a comment\n");
        let expected = [
            (PieceKind::Code, "let a = "),
            (PieceKind::Literal, "no // comment"),
            (PieceKind::Code, "; "),
            (PieceKind::Comment, " a comment"),
        ];
        assert_eq!(found, expected.map(|(kind, text)| (kind, text.to_string())));
    }

    #[test]
    fn quotes_in_characters_and_raw_strings_end_nothing() {
        let found = kinds("f('\"', r#\"a \"quoted\" word\"#, 'x', &'a str)");
        let literals: Vec<_> = found
            .iter()
            .filter(|(kind, _)| *kind == PieceKind::Literal)
            .collect();
        assert_eq!(literals.len(), 1);
        assert_eq!(literals[0].1, "a \"quoted\" word");
    }

    #[test]
    fn block_comments_nest() {
        let found = kinds("a /* b /* c */ d */ e");
        assert_eq!(found.first().map(|piece| piece.1.as_str()), Some("a "));
        assert_eq!(found.last().map(|piece| piece.1.as_str()), Some(" e"));
    }
}
