//! Completes words of a command line. Pure except for the queries of [`NameSource`].
//!
//! Which kind of name a word is follows from the table of commands.

use crate::command::{Completion, WordKind};
use crate::commands::{COMMANDS, find};
use crate::session::CompletionNames;
use std::path::Path;

/// Source of the names that exist now, for completion.
pub(crate) trait NameSource {
    /// Returns the session's names as of the last prompt.
    fn session_names(&self) -> &CompletionNames;
    fn hosts(&self) -> Vec<String>;
    /// Returns the tids of all tasks except the console.
    fn tids(&self) -> Vec<String>;
    /// Returns the names of the entries of a folder. The bool is true if the entry is a folder
    /// itself.
    fn folder_entries(&self, dir: &Path) -> Vec<(String, bool)>;
}

/// Returns the byte position where the last word of `line` begins, and the sorted completions of
/// that word. A single completion ends with a space, unless it is a folder.
pub(crate) fn complete(line: &str, source: &impl NameSource) -> (usize, Vec<String>) {
    let begin = line.rfind(char::is_whitespace).map_or(0, |at| at + 1);
    let word = &line[begin..];
    let before: Vec<&str> = line[..begin].split_whitespace().collect();
    // Quoted words and comments are not completed.
    if word.contains(['\'', '"', '\\']) || before.iter().any(|word| word.starts_with('#')) {
        return (begin, Vec::new());
    }
    let (prefix, kind) = word_kind(&before, word);
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
        WordKind::File => return (begin, complete_files(prefix, stem, source)),
    };
    candidates.retain(|name| name.starts_with(stem));
    (begin, finish_candidates(candidates, prefix, " "))
}

fn finish_candidates(mut found: Vec<String>, prefix: &str, end: &str) -> Vec<String> {
    found.sort_unstable();
    found.dedup();
    found.iter_mut().for_each(|name| name.insert_str(0, prefix));
    if let [only] = found.as_mut_slice()
        && !only.ends_with('/')
    {
        only.push_str(end);
    }
    found
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
    // Hidden files are offered only after a dot.
    let names = names.filter(|(entry, _)| name.starts_with('.') || !entry.starts_with('.'));
    let found = names.map(|(entry, dir)| format!("{path}{entry}{}", if dir { "/" } else { "" }));
    finish_candidates(found.collect(), prefix, " ")
}

/// Returns the prefix of `word` that belongs to an option, and the kind of the name after the
/// prefix. `before` contains the words in front of `word`.
fn word_kind<'a>(before: &[&str], word: &'a str) -> (&'a str, WordKind) {
    let [command, args @ ..] = before else {
        return ("", WordKind::Command);
    };
    match find(command).map_or(Completion::None, |spec| spec.completion) {
        Completion::FirstWord(kind) if args.is_empty() => ("", kind),
        Completion::None | Completion::FirstWord(_) => ("", WordKind::Unknown),
        Completion::EveryWord(kind) => ("", kind),
        Completion::ByWords(kind_of) => {
            let (prefix_bytes, kind) = kind_of(args, word);
            (&word[..prefix_bytes], kind)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake(CompletionNames);

    impl NameSource for Fake {
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

    fn words(line: &str) -> Vec<String> {
        let known = CompletionNames {
            aliases: vec!["conflict".into()],
            variables: vec!["HOME".into(), "HOST".into()],
        };
        complete(line, &Fake(known)).1
    }

    /// The first word is completed to a command or an alias.
    #[test]
    fn first_word_completes_to_command_or_alias() {
        assert_eq!(words("con"), ["conf", "conflict"]);
        assert_eq!(words("mig"), ["migrate "]);
        assert_eq!(words("help mst"), ["mstat "]);
        assert!(words("").len() > 20);
        assert_eq!(words("unalias c"), ["conflict "]);
    }

    /// Arguments are completed to names that their command accepts.
    #[test]
    fn arguments_complete_by_command() {
        assert_eq!(words("delete ha"), ["ha1", "ha2"]);
        assert_eq!(words("delete ha1 hb"), ["hb1 "]);
        assert_eq!(words("kill t4"), ["t40002 "]);
        assert_eq!(words("sig KI"), ["KILL "]);
        assert_eq!(words("sig KILL t8"), ["t80001 "]);
        assert_eq!(words("migrate t80001 hb"), ["hb1 "]);
        assert_eq!(words("getopt PvmRou"), ["PvmRoute "]);
        assert_eq!(words("setenv HO"), ["HOME", "HOST"]);
        assert_eq!(words("ps -nhb"), ["-nhb1 "]);
        assert_eq!(words("trace joing"), ["joingroup "]);
        assert_eq!(words("echo x"), [""; 0]);
        assert_eq!(
            words("delete 'ha"),
            [""; 0],
            "quoted words are not completed"
        );
        assert_eq!(words("# delete ha"), [""; 0]);
    }

    /// `spawn` completes hosts in options, and files in options for files, programs and arguments.
    #[test]
    fn spawn_completes_hosts_and_files() {
        assert_eq!(words("spawn -hb"), ["-hb1 "]);
        assert_eq!(words("spawn --host=ha2"), ["--host=ha2 "]);
        assert_eq!(words("spawn -3 /bi"), ["/bin/"]);
        assert_eq!(words("spawn -3 /bin/t"), ["/bin/tr", "/bin/true"]);
        assert_eq!(words("spawn ->>wo"), ["->>work "]);
        assert_eq!(words("spawn --job=wo"), ["--job=work "]);
        assert_eq!(words("spawn x /et"), ["/etc/"]);
        assert_eq!(
            words("spawn "),
            ["work "],
            "hidden files only when they are asked for"
        );
        assert_eq!(words("spawn ."), [".hidden "]);
    }

    /// A completion starts at the beginning of the unfinished word.
    #[test]
    fn completion_replaces_whole_word() {
        assert_eq!(
            complete("delete ha1 hb", &Fake(CompletionNames::default())).0,
            11
        );
        assert_eq!(
            complete("conf", &Fake(CompletionNames::default())),
            (0, vec!["conf ".into()])
        );
    }
}
