//! Splits a console line into words, as PVM's console does.
//!
//! Whitespace separates words, `'…'` and `"…"` quote, `\` outside quotes takes the next character
//! literally, and `#` at the beginning of a word starts a comment.

/// Maximum length of a line in bytes. PVM's console allows 1023.
pub(crate) const LINE_BYTES_MAX: usize = 64 << 10;

/// Reason why a line cannot be split.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum LineError {
    /// The line has an unclosed quote, or ends with a backslash. Contains the quote or the
    /// backslash.
    #[error("unmatched {0}")]
    Unmatched(char),
    /// The line is longer than [`LINE_BYTES_MAX`].
    #[error("command too long")]
    TooLong,
}

/// Returns the words of a line. An empty line or a comment has no words.
pub(crate) fn split_words(line: &str) -> Result<Vec<String>, LineError> {
    if line.len() > LINE_BYTES_MAX {
        return Err(LineError::TooLong);
    }
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut chars = line.chars();
    while let Some(c) = chars.next() {
        match c {
            c if c.is_whitespace() => words.extend(word.take()),
            '#' if word.is_none() => break,
            '\'' | '"' => {
                let word = word.get_or_insert_default();
                loop {
                    match chars.next() {
                        None => return Err(LineError::Unmatched(c)),
                        Some(end) if end == c => break,
                        Some(inner) => word.push(inner),
                    }
                }
            }
            '\\' => word
                .get_or_insert_default()
                .push(chars.next().ok_or(LineError::Unmatched('\\'))?),
            c => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quoting_matches_pvm() {
        let words_of = |line: &str| split_words(line).expect(line);
        assert_eq!(
            words_of(r#"echo "a   b" c\ d 'x"y'"#),
            ["echo", "a   b", "c d", "x\"y"]
        );
        assert_eq!(
            words_of("add 'h2 ep=/x wd=/y'  h3\t"),
            ["add", "h2 ep=/x wd=/y", "h3"]
        );
        assert_eq!(words_of("conf # all of them"), ["conf"]);
        assert_eq!(words_of("echo a#b \\#c"), ["echo", "a#b", "#c"]);
        assert_eq!(
            words_of(r#"'a\b'"#),
            [r"a\b"],
            "inside quotes a backslash is a backslash"
        );
        assert_eq!(words_of("'' \"\""), ["", ""]);
    }

    #[test]
    fn comments_have_no_words() {
        for line in ["", "   \t", "# nothing", "  # 'unclosed"] {
            assert_eq!(split_words(line), Ok(Vec::new()), "{line:?}");
        }
    }

    /// Unclosed quotes and overlong lines are errors.
    #[test]
    fn unclosed_quotes_are_errors() {
        assert_eq!(
            split_words("echo \"abc").expect_err("open").to_string(),
            "unmatched \""
        );
        assert_eq!(
            split_words("echo 'it").expect_err("open").to_string(),
            "unmatched '"
        );
        assert_eq!(
            split_words("echo a\\").expect_err("open").to_string(),
            "unmatched \\"
        );
        assert_eq!(
            split_words(&"x".repeat(LINE_BYTES_MAX + 1)),
            Err(LineError::TooLong)
        );
    }
}
