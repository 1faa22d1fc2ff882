//! Completes words of a command line. Pure except for the queries of [`NameSource`].
//!
//! The table of commands determines the kind of name that a word stands for.

use crate::command::{Completion, WordKind};
use crate::commands::{COMMANDS, find_command};
use crate::session::CompletionNames;
use std::path::Path;

/// Source of the names to which words are completed.
pub(crate) trait NameSource {
    /// Returns the names of aliases and variables that the session had at the last prompt.
    fn session_names(&self) -> &CompletionNames;
    fn hosts(&self) -> Vec<String>;
    /// Returns the tids of all tasks except the console.
    fn tids(&self) -> Vec<String>;
    /// Returns the entries of the folder `dir`: the name of each entry, and true if the entry is a
    /// folder.
    fn folder_entries(&self, dir: &Path) -> Vec<(String, bool)>;
}

/// Returns the byte position where the last word of `line` begins, and the sorted completions of
/// that word. If there is only one completion and it is not a folder, the completion ends with a
/// space.
pub(crate) fn complete(line: &str, source: &impl NameSource) -> (usize, Vec<String>) {
    let word_start = line
        .rfind(char::is_whitespace)
        .map_or(0, |space_index| space_index + 1);
    let word = &line[word_start..];
    let previous_words: Vec<&str> = line[..word_start].split_whitespace().collect();
    // Quoted words and comments are not completed.
    if word.contains(['\'', '"', '\\']) || previous_words.iter().any(|word| word.starts_with('#')) {
        return (word_start, Vec::new());
    }
    let (prefix, kind) = word_kind(&previous_words, word);
    let stem = &word[prefix.len()..];
    let mut candidates: Vec<String> = match kind {
        WordKind::Unknown => Vec::new(),
        WordKind::Command => {
            let names = COMMANDS.iter().map(|entry| entry.name.to_string());
            names
                .chain(source.session_names().aliases.iter().cloned())
                .collect()
        }
        WordKind::Alias => source.session_names().aliases.clone(),
        WordKind::Variable => source.session_names().variables.clone(),
        WordKind::Host => source.hosts(),
        WordKind::Tid => source.tids(),
        WordKind::OneOf(words) => words(),
        WordKind::File => return (word_start, complete_files(prefix, stem, source)),
    };
    candidates.retain(|name| name.starts_with(stem));
    (word_start, format_candidates(candidates, prefix, " "))
}

fn format_candidates(mut candidates: Vec<String>, prefix: &str, suffix: &str) -> Vec<String> {
    candidates.sort_unstable();
    candidates.dedup();
    candidates
        .iter_mut()
        .for_each(|name| name.insert_str(0, prefix));
    if let [single_candidate] = candidates.as_mut_slice()
        && !single_candidate.ends_with('/')
    {
        single_candidate.push_str(suffix);
    }
    candidates
}

fn complete_files(prefix: &str, stem: &str, source: &impl NameSource) -> Vec<String> {
    let (dir, name) = stem
        .rsplit_once('/')
        .map_or(("", stem), |(dir, name)| (dir, name));
    let folder = match (dir, stem.starts_with('/')) {
        ("", true) => "/",
        ("", false) => ".",
        (dir, _) => dir,
    };
    let path = &stem[..stem.len() - name.len()];
    let names = source
        .folder_entries(Path::new(folder))
        .into_iter()
        .filter(|(entry, _)| entry.starts_with(name));
    // Hidden files are offered only if the typed name begins with a dot.
    let names = names.filter(|(entry, _)| name.starts_with('.') || !entry.starts_with('.'));
    let candidates =
        names.map(|(entry, dir)| format!("{path}{entry}{}", if dir { "/" } else { "" }));
    format_candidates(candidates.collect(), prefix, " ")
}

/// Returns the kind of the name in `word`, and the start of `word` that belongs to an option and
/// precedes the name; the start may be empty. `previous_words` contains the words in front of
/// `word`.
fn word_kind<'a>(previous_words: &[&str], word: &'a str) -> (&'a str, WordKind) {
    let [command, args @ ..] = previous_words else {
        return ("", WordKind::Command);
    };
    match find_command(command).map_or(Completion::None, |spec| spec.completion) {
        Completion::FirstWord(kind) if args.is_empty() => ("", kind),
        Completion::None | Completion::FirstWord(_) => ("", WordKind::Unknown),
        Completion::EveryWord(kind) => ("", kind),
        Completion::WordDependent(kind_of) => {
            let (prefix_bytes, kind) = kind_of(args, word);
            (&word[..prefix_bytes], kind)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct FakeNames(CompletionNames);

    impl NameSource for FakeNames {
        fn session_names(&self) -> &CompletionNames {
            &self.0
        }

        fn hosts(&self) -> Vec<String> {
            vec!["ha2".into(), "ha1".into(), "hb1".into()]
        }

        fn tids(&self) -> Vec<String> {
            vec!["t40002".into(), "t80001".into()]
        }

        fn folder_entries(&self, dir: &Path) -> Vec<(String, bool)> {
            match dir.to_str() {
                Some("/") => vec![("etc".into(), true), ("bin".into(), true)],
                Some(".") => vec![("work".into(), false), (".hidden".into(), false)],
                Some("/bin") => vec![("true".into(), false), ("tr".into(), false)],
                _ => Vec::new(),
            }
        }
    }

    fn completions(line: &str) -> Vec<String> {
        let names = CompletionNames {
            aliases: vec!["conflict".into()],
            variables: vec!["HOME".into(), "HOST".into()],
        };
        complete(line, &FakeNames(names)).1
    }

    #[test]
    fn first_word_completes_to_command_or_alias() {
        assert_eq!(completions("con"), ["conf", "conflict"]);
        assert_eq!(completions("mig"), ["migrate "]);
        assert_eq!(completions("help mst"), ["mstat "]);
        assert!(completions("").len() > 20);
        assert_eq!(completions("unalias c"), ["conflict "]);
    }

    #[test]
    fn arguments_complete_by_command() {
        assert_eq!(completions("delete ha"), ["ha1", "ha2"]);
        assert_eq!(completions("delete ha1 hb"), ["hb1 "]);
        assert_eq!(completions("kill t4"), ["t40002 "]);
        assert_eq!(completions("sig KI"), ["KILL "]);
        assert_eq!(completions("sig KILL t8"), ["t80001 "]);
        assert_eq!(completions("migrate t80001 hb"), ["hb1 "]);
        assert_eq!(completions("getopt PvmRou"), ["PvmRoute "]);
        assert_eq!(completions("setenv HO"), ["HOME", "HOST"]);
        assert_eq!(completions("ps -nhb"), ["-nhb1 "]);
        assert_eq!(completions("trace joing"), ["joingroup "]);
        assert_eq!(completions("echo x"), [""; 0]);
        assert_eq!(
            completions("delete 'ha"),
            [""; 0],
            "quoted words are not completed"
        );
        assert_eq!(completions("# delete ha"), [""; 0]);
    }

    /// `spawn` completes hosts in options, and files in options for files, programs and arguments.
    #[test]
    fn spawn_completes_hosts_and_files() {
        assert_eq!(completions("spawn -hb"), ["-hb1 "]);
        assert_eq!(completions("spawn --host=ha2"), ["--host=ha2 "]);
        assert_eq!(completions("spawn -3 /bi"), ["/bin/"]);
        assert_eq!(completions("spawn -3 /bin/t"), ["/bin/tr", "/bin/true"]);
        assert_eq!(completions("spawn ->>wo"), ["->>work "]);
        assert_eq!(completions("spawn --job=wo"), ["--job=work "]);
        assert_eq!(completions("spawn x /et"), ["/etc/"]);
        assert_eq!(
            completions("spawn "),
            ["work "],
            "hidden files only when they are asked for"
        );
        assert_eq!(completions("spawn ."), [".hidden "]);
    }

    /// A completion starts at the beginning of the unfinished word.
    #[test]
    fn completion_replaces_whole_word() {
        assert_eq!(
            complete("delete ha1 hb", &FakeNames(CompletionNames::default())).0,
            11
        );
        assert_eq!(
            complete("conf", &FakeNames(CompletionNames::default())),
            (0, vec!["conf ".into()])
        );
    }
}
