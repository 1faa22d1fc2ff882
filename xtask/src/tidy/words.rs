//! Finds words and constructions that the project avoids in comments, documents and messages.

/// Words that are forbidden in comments, documents and messages.
const FORBIDDEN_WORDS: [&str; 13] = [
    "anew",
    "whoever",
    "whomever",
    "so many",
    "so soon",
    "stand still",
    "stands still",
    "stood still",
    "let go",
    "lets go",
    "letting go",
    "by and by",
    "thereof",
];

/// Words that are additionally forbidden in comments and documents, but permitted in messages.
const WORDS_FORBIDDEN_IN_PROSE: [&str; 8] = [
    "has to",
    "have to",
    "had to",
    "beside",
    "becomes of",
    "become of",
    "came of",
    "somebody",
];

/// A word that the glossary replaces by a term.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ReplacedWord {
    /// The replaced word, in lower case.
    word: String,
    term: String,
}

/// Returns the findings about forbidden words in a line of a comment or document.
pub(super) fn findings_in_prose(line: &str) -> impl Iterator<Item = String> {
    let line = line.to_lowercase();
    let words = FORBIDDEN_WORDS.iter().chain(&WORDS_FORBIDDEN_IN_PROSE);
    words
        .filter(move |forbidden_word| contains_words(&line, forbidden_word))
        .map(|forbidden_word| format!("\"{forbidden_word}\": say it in plain words"))
}

/// Returns the findings about forbidden words in a string literal.
pub(super) fn findings_in_message(text: &str) -> impl Iterator<Item = String> {
    let text = text.to_lowercase();
    FORBIDDEN_WORDS
        .iter()
        .filter(move |forbidden_word| contains_words(&text, forbidden_word))
        .map(|forbidden_word| format!("\"{forbidden_word}\" in a message: say it in plain words"))
}

/// Returns the findings about those words of a line that the glossary replaces by other terms.
pub(super) fn findings_of_glossary(
    line: &str,
    replaced_words: &[ReplacedWord],
) -> impl Iterator<Item = String> {
    let line = line.to_lowercase();
    let found_words = replaced_words
        .iter()
        .filter(move |replaced_words| contains_words(&line, &replaced_words.word));
    found_words.map(|replaced_words| {
        format!(
            "\"{}\": the glossary's term is \"{}\"",
            replaced_words.word, replaced_words.term
        )
    })
}

/// Returns the words in the last column of the glossary's table, each with the term of its row.
/// Commas separate the words in the table.
pub(super) fn replaced_terms(glossary: &str) -> Vec<ReplacedWord> {
    let rows = glossary
        .lines()
        .filter(|line| line.starts_with('|') && !line.starts_with("| ---"));
    let mut replaced_words = Vec::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [term, _, _, replaced_text] = cells[..] else {
            continue;
        };
        let replaced_list = replaced_text
            .split(',')
            .map(str::trim)
            .filter(|replaced_text| !replaced_text.is_empty() && *replaced_text != "not");
        replaced_words.extend(replaced_list.map(|replaced_text| ReplacedWord {
            word: replaced_text.to_lowercase(),
            term: term.to_string(),
        }));
    }
    replaced_words
}

/// True if `line` contains `words`, not as a part of longer words.
fn contains_words(line: &str, words: &str) -> bool {
    let is_border = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '_');
    line.match_indices(words).any(|(offset, _)| {
        is_border(line[..offset].chars().next_back())
            && is_border(line[offset + words.len()..].chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_count_only_as_whole_words() {
        assert!(contains_words("it begins anew.", "anew"));
        assert!(!contains_words("renewed and canewood", "anew"));
        assert!(!contains_words("the_beside_field", "beside"));
    }

    #[test]
    fn glossary_rows_give_the_terms_they_replace() {
        let glossary = "| term | meaning | type | not |\n| --- | --- | --- | --- |\n| drainer | reads rings | `Drainer` | ear, Ear |\n";
        let replaced_words = replaced_terms(glossary);
        assert_eq!(
            replaced_words
                .iter()
                .map(|r| r.word.as_str())
                .collect::<Vec<_>>(),
            ["ear", "ear"]
        );
        assert_eq!(
            findings_of_glossary(" The ear sleeps.", &replaced_words[..1]).count(),
            1
        );
    }
}
