//! Finds words and constructions that the project avoids in its texts.

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
const FORBIDDEN_IN_PROSE: [&str; 8] = [
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
    old: String,
    term: String,
}

/// Returns the findings about forbidden words in a line of a comment or document.
pub(super) fn findings_in_prose(line: &str) -> impl Iterator<Item = String> {
    let line = line.to_lowercase();
    let words = FORBIDDEN_WORDS.iter().chain(&FORBIDDEN_IN_PROSE);
    words
        .filter(move |word| contains(&line, word))
        .map(|word| format!("\"{word}\": say it in plain words"))
}

/// Returns the findings about forbidden words in a string literal.
pub(super) fn findings_in_message(text: &str) -> impl Iterator<Item = String> {
    let text = text.to_lowercase();
    FORBIDDEN_WORDS
        .iter()
        .filter(move |word| contains(&text, word))
        .map(|word| format!("\"{word}\" in a message: say it in plain words"))
}

/// Returns the findings about words in a line that the glossary replaces.
pub(super) fn findings_of_glossary(
    line: &str,
    replaced: &[ReplacedWord],
) -> impl Iterator<Item = String> {
    let line = line.to_lowercase();
    let found = replaced
        .iter()
        .filter(move |replaced| contains(&line, &replaced.old));
    found.map(|replaced| {
        format!(
            "\"{}\": the glossary's term is \"{}\"",
            replaced.old, replaced.term
        )
    })
}

/// Returns the replaced words in the last column of the glossary's table, each with the term of its
/// row. Commas separate the words.
pub(super) fn replaced_terms(glossary: &str) -> Vec<ReplacedWord> {
    let rows = glossary
        .lines()
        .filter(|line| line.starts_with('|') && !line.starts_with("| ---"));
    let mut all = Vec::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').map(str::trim).collect();
        let [term, _, _, old] = cells[..] else {
            continue;
        };
        let olds = old
            .split(',')
            .map(str::trim)
            .filter(|old| !old.is_empty() && *old != "not");
        all.extend(olds.map(|old| ReplacedWord {
            old: old.to_lowercase(),
            term: term.to_string(),
        }));
    }
    all
}

/// True if `line` contains `words` as whole words.
fn contains(line: &str, words: &str) -> bool {
    let is_border = |c: Option<char>| c.is_none_or(|c| !c.is_alphanumeric() && c != '_');
    line.match_indices(words).any(|(at, _)| {
        is_border(line[..at].chars().next_back())
            && is_border(line[at + words.len()..].chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_count_only_as_whole_words() {
        assert!(contains("it begins anew.", "anew"));
        assert!(!contains("renewed and canewood", "anew"));
        assert!(!contains("the_beside_field", "beside"));
    }

    #[test]
    fn glossary_rows_give_the_terms_they_replace() {
        let glossary = "| term | meaning | type | not |\n| --- | --- | --- | --- |\n| drainer | reads rings | `Drainer` | ear, Ear |\n";
        let found = replaced_terms(glossary);
        assert_eq!(
            found.iter().map(|r| r.old.as_str()).collect::<Vec<_>>(),
            ["ear", "ear"]
        );
        assert_eq!(
            findings_of_glossary(" The ear sleeps.", &found[..1]).count(),
            1
        );
    }
}
