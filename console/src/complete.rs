//! What can complete a word of a command line. Pure but for the questions to [`World`].

use crate::help;
use crate::options;
use crate::trace;
use std::path::Path;

/// What the session knows and the editor offers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Known {
    /// Names of aliases.
    pub(crate) aliases: Vec<String>,
    /// Names of environment variables.
    pub(crate) variables: Vec<String>,
}

/// Where names come from.
pub(crate) trait World {
    /// What the session knew when the prompt came.
    fn known(&self) -> &Known;
    /// Names of the hosts.
    fn hosts(&self) -> Vec<String>;
    /// Tids of tasks.
    fn tids(&self) -> Vec<String>;
    /// Names in a folder, and whether each is a folder.
    fn entries(&self, dir: &Path) -> Vec<(String, bool)>;
}

/// The position where the unfinished last word of `line` begins, and what it can become, sorted. A single complete word
/// comes with a blank behind it.
pub(crate) fn complete(line: &str, world: &impl World) -> (usize, Vec<String>) {
    let begin = line.rfind(char::is_whitespace).map_or(0, |at| at + 1);
    let word = &line[begin..];
    let before: Vec<&str> = line[..begin].split_whitespace().collect();
    // The words of an alias are not looked into, nor quotes.
    if word.contains(['\'', '"', '\\']) || before.iter().any(|word| word.starts_with('#')) {
        return (begin, Vec::new());
    }
    let (prefix, kind) = wanted(&before, word);
    let stem = &word[prefix.len()..];
    let mut found: Vec<String> = match kind {
        Kind::Nothing => Vec::new(),
        Kind::Command => {
            let names = help::COMMANDS.iter().map(|entry| entry.name.to_string());
            names.chain(world.known().aliases.iter().cloned()).collect()
        }
        Kind::Alias => world.known().aliases.clone(),
        Kind::Variable => world.known().variables.clone(),
        Kind::Host => world.hosts(),
        Kind::Tid => world.tids(),
        Kind::Option => options::names().map(String::from).collect(),
        Kind::Event => trace::words().map(String::from).collect(),
        Kind::Signal => nix::sys::signal::Signal::iterator()
            .map(|signal| signal.as_str()[3..].to_string())
            .collect(),
        Kind::File => return (begin, files(prefix, stem, world)),
    };
    found.retain(|name| name.starts_with(stem));
    (begin, finish(found, prefix, " "))
}

fn finish(mut found: Vec<String>, prefix: &str, end: &str) -> Vec<String> {
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

fn files(prefix: &str, stem: &str, world: &impl World) -> Vec<String> {
    let (dir, name) = stem
        .rsplit_once('/')
        .map_or(("", stem), |(dir, name)| (dir, name));
    let folder = match (dir, stem.starts_with('/')) {
        ("", true) => "/",
        ("", false) => ".",
        (dir, _) => dir,
    };
    let path = &stem[..stem.len() - name.len()];
    let names = world
        .entries(Path::new(folder))
        .into_iter()
        .filter(|(entry, _)| entry.starts_with(name));
    // Hidden files only when they are asked for.
    let names = names.filter(|(entry, _)| name.starts_with('.') || !entry.starts_with('.'));
    let found = names.map(|(entry, dir)| format!("{path}{entry}{}", if dir { "/" } else { "" }));
    finish(found.collect(), prefix, " ")
}

/// What a word is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Nothing,
    Command,
    Alias,
    Variable,
    Host,
    Tid,
    Option,
    Event,
    Signal,
    File,
}

/// What the word after `before` is, and which part of it stands in front of the name.
fn wanted<'a>(before: &[&str], word: &'a str) -> (&'a str, Kind) {
    let [command, args @ ..] = before else {
        return ("", Kind::Command);
    };
    let first = args.is_empty();
    let kind = match *command {
        "help" if first => Kind::Command,
        "alias" if args.len() == 1 => Kind::Command,
        "unalias" => Kind::Alias,
        "delete" | "mstat" => Kind::Host,
        "kill" | "pstat" => Kind::Tid,
        "why" if word.starts_with('t') => Kind::Tid,
        "why" => Kind::Host,
        "job" if args.len() == 1 || args.last() == Some(&"--task") => Kind::Tid,
        "sig" if first => Kind::Signal,
        "sig" => Kind::Tid,
        "checkpoint" => Kind::Tid,
        "restart" if args.last() == Some(&"--on") => Kind::Host,
        "drain" | "undrain" if first => Kind::Host,
        "can-migrate" | "migrate" if first => Kind::Tid,
        "can-migrate" | "migrate" if args.len() == 1 => Kind::Host,
        "getopt" | "setopt" if first => Kind::Option,
        "export" | "unexport" => Kind::Variable,
        "setenv" if first => Kind::Variable,
        "trace" => Kind::Event,
        "ps" if word.starts_with("-n") => return (&word[..2], Kind::Host),
        "ps" if word.starts_with("-h") => return (&word[..2], Kind::Tid),
        "spawn" if args.iter().all(|arg| arg.starts_with('-')) => return spawn_word(word),
        "spawn" => Kind::File,
        _ => Kind::Nothing,
    };
    ("", kind)
}

/// An option of `spawn`, or the program.
fn spawn_word(word: &str) -> (&str, Kind) {
    let prefixes = [
        ("->>", Kind::File),
        ("->", Kind::File),
        ("-@", Kind::File),
        ("--host=", Kind::Host),
        ("--job=", Kind::File),
    ];
    for (prefix, kind) in prefixes {
        if word.starts_with(prefix) {
            return (&word[..prefix.len()], kind);
        }
    }
    if word.starts_with('-') {
        (&word[..1], Kind::Host)
    } else {
        ("", Kind::File)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake(Known);

    impl World for Fake {
        fn known(&self) -> &Known {
            &self.0
        }

        fn hosts(&self) -> Vec<String> {
            vec!["ha2".into(), "ha1".into(), "hb1".into()]
        }

        fn tids(&self) -> Vec<String> {
            vec!["t40002".into(), "t80001".into()]
        }

        fn entries(&self, dir: &Path) -> Vec<(String, bool)> {
            match dir.to_str() {
                Some("/") => vec![("etc".into(), true), ("bin".into(), true)],
                Some(".") => vec![("work".into(), false), (".hidden".into(), false)],
                Some("/bin") => vec![("true".into(), false), ("tr".into(), false)],
                _ => Vec::new(),
            }
        }
    }

    fn words(line: &str) -> Vec<String> {
        let known = Known {
            aliases: vec!["conflict".into()],
            variables: vec!["HOME".into(), "HOST".into()],
        };
        complete(line, &Fake(known)).1
    }

    #[test]
    fn the_first_word_is_a_command_or_an_alias() {
        assert_eq!(words("con"), ["conf", "conflict"]);
        assert_eq!(words("mig"), ["migrate "]);
        assert_eq!(words("help mst"), ["mstat "]);
        assert!(words("").len() > 20);
        assert_eq!(words("unalias c"), ["conflict "]);
    }

    #[test]
    fn arguments_are_what_their_command_takes() {
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
        assert_eq!(words("delete 'ha"), [""; 0], "quoted words are left alone");
        assert_eq!(words("# delete ha"), [""; 0]);
    }

    #[test]
    fn spawn_completes_hosts_in_options_and_files_elsewhere() {
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

    #[test]
    fn the_unfinished_word_is_replaced_from_its_beginning() {
        assert_eq!(complete("delete ha1 hb", &Fake(Known::default())).0, 11);
        assert_eq!(
            complete("conf", &Fake(Known::default())),
            (0, vec!["conf ".into()])
        );
    }
}
