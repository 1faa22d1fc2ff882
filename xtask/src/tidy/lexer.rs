//! Divides Rust source text into code, comments and string literals.
//!
//! The division is purely lexical. The lexer handles nested block comments, raw strings and
//! character literals, but no other syntax.

/// The lexical kind of a [`SourcePiece`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceKind {
    Code,
    Comment,
    Literal,
}

/// A section of a source line that contains only code, only a comment, or only a string literal.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SourcePiece {
    pub(super) kind: PieceKind,
    /// The line number, counted from 1.
    pub(super) line_number: usize,
    /// The text without comment markers and quotes.
    pub(super) text: String,
    /// True if only white space precedes the piece on its line.
    pub(super) begins_line: bool,
}

/// The construct that contains the next character.
enum ScannerState {
    Code,
    LineComment,
    /// Contains the number of nested block comments that are open.
    BlockComment(usize),
    StringLiteral,
    /// Contains the number of hash signs that end the raw string.
    RawStringLiteral(usize),
}

/// Returns the pieces of a source text in order. No piece extends beyond the end of a line.
pub(super) fn split_source(source: &str) -> Vec<SourcePiece> {
    let mut scanner = Scanner {
        state: ScannerState::Code,
        pieces: Vec::new(),
        piece_text: String::new(),
        line_number: 1,
        is_line_blank: true,
    };
    let characters: Vec<char> = source.chars().collect();
    let mut position = 0;
    while position < characters.len() {
        position += scanner.consume_next(&characters[position..]);
    }
    scanner.finish_piece();
    scanner.pieces
}

struct Scanner {
    state: ScannerState,
    pieces: Vec<SourcePiece>,
    piece_text: String,
    line_number: usize,
    /// True while the line contains only white space so far.
    is_line_blank: bool,
}

impl Scanner {
    /// Consumes the first characters of `rest` and returns their number.
    fn consume_next(&mut self, rest: &[char]) -> usize {
        let starts_with = |text: &str| {
            text.chars()
                .eq(rest.iter().copied().take(text.chars().count()))
        };
        if rest[0] == '\n' {
            self.finish_piece();
            if matches!(self.state, ScannerState::LineComment) {
                self.state = ScannerState::Code;
            }
            self.line_number += 1;
            self.is_line_blank = true;
            return 1;
        }
        match self.state {
            ScannerState::Code if starts_with("//") => {
                self.start_construct(ScannerState::LineComment, 2)
            }
            ScannerState::Code if starts_with("/*") => {
                self.start_construct(ScannerState::BlockComment(1), 2)
            }
            ScannerState::Code if rest[0] == '"' => {
                self.start_construct(ScannerState::StringLiteral, 1)
            }
            ScannerState::Code if rest[0] == '\'' => {
                self.append_to_piece(character_literal_len(rest).unwrap_or(1), rest)
            }
            ScannerState::Code if rest[0] == 'r' && !self.ends_in_word() => {
                match raw_string_hashes(rest) {
                    Some(hash_count) => self.start_construct(
                        ScannerState::RawStringLiteral(hash_count),
                        hash_count + 2,
                    ),
                    None => self.append_to_piece(1, rest),
                }
            }
            ScannerState::BlockComment(depth) if starts_with("/*") => {
                self.state = ScannerState::BlockComment(depth + 1);
                2
            }
            ScannerState::BlockComment(1) if starts_with("*/") => {
                self.start_construct(ScannerState::Code, 2)
            }
            ScannerState::BlockComment(depth) if starts_with("*/") => {
                self.state = ScannerState::BlockComment(depth - 1);
                2
            }
            ScannerState::StringLiteral if rest[0] == '\\' && rest.get(1) != Some(&'\n') => {
                self.append_to_piece(2.min(rest.len()), rest)
            }
            ScannerState::StringLiteral if rest[0] == '"' => {
                self.start_construct(ScannerState::Code, 1)
            }
            ScannerState::RawStringLiteral(hash_count) if ends_raw_string(rest, hash_count) => {
                self.start_construct(ScannerState::Code, hash_count + 1)
            }
            _ => self.append_to_piece(1, rest),
        }
    }

    fn append_to_piece(&mut self, char_count: usize, rest: &[char]) -> usize {
        self.piece_text.extend(&rest[..char_count]);
        char_count
    }

    fn start_construct(&mut self, state: ScannerState, consumed_count: usize) -> usize {
        self.finish_piece();
        self.state = state;
        consumed_count
    }

    fn ends_in_word(&self) -> bool {
        self.piece_text
            .chars()
            .last()
            .is_some_and(|c| c.is_alphanumeric() || c == '_')
    }

    fn finish_piece(&mut self) {
        let kind = match self.state {
            ScannerState::Code => PieceKind::Code,
            ScannerState::LineComment | ScannerState::BlockComment(_) => PieceKind::Comment,
            ScannerState::StringLiteral | ScannerState::RawStringLiteral(_) => PieceKind::Literal,
        };
        let text = std::mem::take(&mut self.piece_text);
        let begins_line = self.is_line_blank;
        if kind == PieceKind::Code && text.trim().is_empty() {
            return;
        }
        self.is_line_blank = false;
        self.pieces.push(SourcePiece {
            kind,
            line_number: self.line_number,
            text,
            begins_line,
        });
    }
}

/// Returns the length of the character literal at the beginning of `rest`; `None` if `rest` begins
/// with a lifetime.
fn character_literal_len(rest: &[char]) -> Option<usize> {
    if rest.get(1) == Some(&'\\') {
        let end_index = rest.iter().skip(3).take(10).position(|c| *c == '\'')?;
        return Some(end_index + 4);
    }
    (rest.get(2) == Some(&'\'')).then_some(3)
}

/// Returns the number of hash signs of the raw string at the beginning of `rest`; `None` if `rest`
/// does not begin with a raw string.
fn raw_string_hashes(rest: &[char]) -> Option<usize> {
    let hash_count = rest[1..].iter().take_while(|c| **c == '#').count();
    (rest.get(1 + hash_count) == Some(&'"')).then_some(hash_count)
}

fn ends_raw_string(rest: &[char], hash_count: usize) -> bool {
    rest[0] == '"' && rest.len() > hash_count && rest[1..=hash_count].iter().all(|c| *c == '#')
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
        let pieces = kinds("let a = \"no // comment\"; // a comment\n");
        let expected = [
            (PieceKind::Code, "let a = "),
            (PieceKind::Literal, "no // comment"),
            (PieceKind::Code, "; "),
            (PieceKind::Comment, " a comment"),
        ];
        assert_eq!(
            pieces,
            expected.map(|(kind, text)| (kind, text.to_string()))
        );
    }

    #[test]
    fn quotes_in_characters_and_raw_strings_end_nothing() {
        let pieces = kinds("f('\"', r#\"a \"quoted\" word\"#, 'x', &'a str)");
        let literals: Vec<_> = pieces
            .iter()
            .filter(|(kind, _)| *kind == PieceKind::Literal)
            .collect();
        assert_eq!(literals.len(), 1);
        assert_eq!(literals[0].1, "a \"quoted\" word");
    }

    #[test]
    fn block_comments_nest() {
        let pieces = kinds("a /* b /* c */ d */ e");
        assert_eq!(pieces.first().map(|piece| piece.1.as_str()), Some("a "));
        assert_eq!(pieces.last().map(|piece| piece.1.as_str()), Some(" e"));
    }
}
