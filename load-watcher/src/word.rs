//! The explicit word of an owner: what `pvm owner` writes for the load watchers of the machine, and how it is believed.
//!
//! A word lies in `/var/tmp/sempa-owner-UID.toml` (the folder can be set), which only that user and root can write: the folder
//! has the sticky bit, and a file counts only if it belongs to the user in its name. So an owner needs no rights in anybody's
//! virtual machine. Pure but for [`read_all`] and [`write`].

use crate::hours::Hours;
use crate::policy::{Policy, PolicyError, line_with};
use sempa_proto::Micros;
use serde::Deserialize;
use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Where words lie unless [`WORDS_ENV`] says otherwise.
pub const WORDS_DIR: &str = "/var/tmp";
/// The environment variable that names another folder for them.
pub const WORDS_ENV: &str = "SEMPA_OWNER_WORDS";
/// How names of word files begin.
pub const WORD_PREFIX: &str = "sempa-owner-";
/// A word without a time of its own ends after this.
pub const WORD_TIME: Duration = Duration::from_secs(12 * 3600);
/// Longest time that can be asked for: a week.
pub const WORD_TIME_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// How names of word files end.
const WORD_END: &str = ".toml";
/// Bytes of a word file at most.
const WORD_BYTES_MAX: u64 = 16 << 10;
/// Word files that are looked at.
const WORDS_MAX: usize = 256;

/// What an owner says of himself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// I do not need the machine.
    Away,
    /// I do.
    Here,
}

/// One owner's word.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Word {
    /// Here or away, when it was said, when it ends, and whether it ends before with the next login or logout.
    pub said: Option<Said>,
    /// Rules beside it: times without guests, a number of tasks.
    pub policy: Policy,
}

/// Here or away.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Said {
    /// Which.
    pub state: State,
    /// When it was said, in microseconds since 1970.
    pub at: Micros,
    /// When it ends.
    pub until: Micros,
    /// It ends before when somebody logs in or out.
    pub visit: bool,
}

/// The file as it is written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Text {
    state: Option<State>,
    at_us: Option<u64>,
    until_us: Option<u64>,
    #[serde(default)]
    visit: bool,
    never: Option<Vec<Hours>>,
    cores: Option<u32>,
}

impl Word {
    /// Reads a word file.
    ///
    /// # Errors
    /// As [`Policy::parse`].
    pub fn parse(file: &str, text: &str) -> Result<Word, PolicyError> {
        let said: Text =
            toml::from_str(text).map_err(|error| PolicyError::of(file, text, &error))?;
        let Text {
            state,
            at_us,
            until_us,
            visit,
            never,
            cores,
        } = said;
        let said = match (state, at_us, until_us) {
            (Some(state), Some(at), Some(until)) if at <= until => Some(Said {
                state,
                at: Micros(at),
                until: Micros(until),
                visit,
            }),
            (None, ..) => None,
            _ => {
                let (line, reason) = (
                    line_with(text, "state"),
                    "here or away without a time".to_string(),
                );
                return Err(PolicyError {
                    file: file.to_string(),
                    line,
                    reason,
                });
            }
        };
        Ok(Word {
            said,
            policy: Policy {
                never,
                cores,
                ..Policy::default()
            },
        })
    }

    /// The file that says so.
    pub fn text(&self) -> String {
        let mut out = "# Written by `pvm owner`; `pvm owner auto` takes it back.\n".to_string();
        if let Some(Said {
            state,
            at,
            until,
            visit,
        }) = self.said
        {
            let state = if state == State::Away { "away" } else { "here" };
            let (at, until) = (at.0, until.0);
            out.push_str(&format!(
                "state = \"{state}\"\nat_us = {at}\nuntil_us = {until}\nvisit = {visit}\n"
            ));
        }
        if let Some(never) = &self.policy.never {
            let all: Vec<String> = never.iter().map(|hours| format!("\"{hours}\"")).collect();
            out.push_str(&format!("never = [{}]\n", all.join(", ")));
        }
        if let Some(cores) = self.policy.cores {
            out.push_str(&format!("cores = {cores}\n"));
        }
        out
    }

    /// True when nothing is said.
    pub fn is_empty(&self) -> bool {
        *self == Word::default()
    }
}

/// The folder of the words: as set, else the usual one.
pub fn words_dir(set: Option<PathBuf>) -> PathBuf {
    set.filter(|dir| !dir.as_os_str().is_empty())
        .unwrap_or_else(|| PathBuf::from(WORDS_DIR))
}

/// The word file of a user.
pub fn word_file(dir: &Path, uid: u32) -> PathBuf {
    dir.join(format!("{WORD_PREFIX}{uid}{WORD_END}"))
}

/// The text of a file that only this user can have written; `None` when there is none. One that is longer is cut one byte behind
/// `bytes_max`.
///
/// # Errors
/// It is not the user's own, or cannot be read: one sentence.
pub(crate) fn believed(path: &Path, uid: u32, bytes_max: u64) -> Result<Option<String>, String> {
    let doubt = |why: &dyn std::fmt::Display| format!("{} is not believed: {why}", path.display());
    // A link could lead to anybody's file, a pipe could keep us waiting.
    let open = OpenOptions::new()
        .read(true)
        .custom_flags(nix::libc::O_NOFOLLOW | nix::libc::O_NONBLOCK)
        .open(path);
    let file = match open {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(doubt(&e)),
    };
    let about = file.metadata().map_err(|e| doubt(&e))?;
    if !about.is_file() || about.uid() != uid || about.mode() & 0o022 != 0 {
        return Err(doubt(&format!(
            "it is not a file that only user {uid} can write"
        )));
    }
    let mut text = String::new();
    file.take(bytes_max + 1)
        .read_to_string(&mut text)
        .map_err(|e| doubt(&e))?;
    Ok(Some(text))
}

/// The word of one user; nothing said when there is no file.
///
/// # Errors
/// The file is not the user's own, cannot be read, or cannot be understood: one sentence.
pub fn read(dir: &Path, uid: u32) -> Result<Word, String> {
    let path = word_file(dir, uid);
    let Some(text) = believed(&path, uid, WORD_BYTES_MAX)? else {
        return Ok(Word::default());
    };
    Word::parse(&path.display().to_string(), &text).map_err(|e| e.to_string())
}

/// The users that have a file in the folder whose name ends so, each once, in order.
pub(crate) fn users_with(dir: &Path, end: &str) -> Vec<u32> {
    let uid = |entry: fs::DirEntry| {
        let name = entry.file_name();
        name.to_str()?
            .strip_prefix(WORD_PREFIX)?
            .strip_suffix(end)?
            .parse::<u32>()
            .ok()
    };
    let users: BTreeSet<u32> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(uid)
        .collect();
    users.into_iter().take(WORDS_MAX).collect()
}

/// The words of all users by uid, and sentences about those that are not believed.
pub fn read_all(dir: &Path) -> (Vec<(u32, Word)>, Vec<String>) {
    let (mut words, mut wrong) = (Vec::new(), Vec::new());
    for uid in users_with(dir, WORD_END) {
        match read(dir, uid) {
            Ok(word) => words.push((uid, word)),
            Err(sentence) => wrong.push(sentence),
        }
    }
    (words, wrong)
}

/// Makes this the word of a user, as whom (or as root) this process must run. Nothing said removes the file.
///
/// # Errors
/// What the system said.
pub fn write(dir: &Path, uid: u32, word: &Word) -> io::Result<()> {
    let text = (!word.is_empty()).then(|| word.text());
    put(dir, uid, &word_file(dir, uid), text.as_deref())
}

/// Writes a file of a user, or removes it.
pub(crate) fn put(dir: &Path, uid: u32, path: &Path, text: Option<&str>) -> io::Result<()> {
    let Some(text) = text else {
        return match fs::remove_file(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        };
    };
    // Written beside it under another name, so that nobody reads half of it.
    let draft = dir.join(format!(".{WORD_PREFIX}{uid}.{}", std::process::id()));
    let written = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o644)
        .open(&draft)
        .and_then(|mut file| {
            file.set_permissions(std::os::unix::fs::PermissionsExt::from_mode(0o644))?;
            file.write_all(text.as_bytes())
        });
    written
        .and_then(|()| fs::rename(&draft, path))
        .inspect_err(|_| drop(fs::remove_file(&draft)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn own() -> u32 {
        nix::unistd::geteuid().as_raw()
    }

    fn away() -> Word {
        let said = Said {
            state: State::Away,
            at: Micros::from_secs(5),
            until: Micros::from_secs(9),
            visit: true,
        };
        Word {
            said: Some(said),
            policy: Policy {
                cores: Some(2),
                ..Policy::default()
            },
        }
    }

    #[test]
    fn a_word_is_written_read_and_taken_back() {
        let dir = tempfile::tempdir().expect("a folder");
        assert_eq!(read(dir.path(), own()), Ok(Word::default()));
        write(dir.path(), own(), &away()).expect("written");
        assert_eq!(read_all(dir.path()), (vec![(own(), away())], Vec::new()));
        write(dir.path(), own(), &Word::default()).expect("removed");
        assert_eq!(fs::read_dir(dir.path()).expect("a folder").count(), 0);
        write(dir.path(), own(), &Word::default()).expect("nothing to remove is fine");
    }

    #[test]
    fn a_file_that_somebody_else_could_have_written_is_not_believed() {
        let dir = tempfile::tempdir().expect("a folder");
        let path = word_file(dir.path(), own());
        write(dir.path(), own(), &away()).expect("written");
        fs::set_permissions(&path, fs::Permissions::from_mode(0o666)).expect("the test's own file");
        assert!(
            read(dir.path(), own())
                .expect_err("writable by all")
                .contains("not believed")
        );
        // Under another user's name.
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).expect("the test's own file");
        fs::rename(&path, word_file(dir.path(), own() + 1)).expect("the test's own file");
        let (words, wrong) = read_all(dir.path());
        assert!(words.is_empty() && wrong.len() == 1, "{words:?} {wrong:?}");
        symlink(word_file(dir.path(), own() + 1), &path).expect("a link");
        assert!(
            read(dir.path(), own())
                .expect_err("a link")
                .contains("not believed")
        );
    }

    #[test]
    fn what_is_wrong_in_a_word_is_named_with_its_line() {
        for (text, line, reason) in [
            (
                "cores = 2\nnever = [\"noon\"]\n",
                2,
                "\"noon\" is no time of the week",
            ),
            ("\n\ncorse = 2\n", 3, "unknown field `corse`"),
            (
                "cores = 2\nstate = \"here\"\n",
                2,
                "here or away without a time",
            ),
        ] {
            let error = Word::parse("w.toml", text).expect_err(text);
            assert_eq!(
                (error.file.as_str(), error.line),
                ("w.toml", line),
                "{error}"
            );
            assert!(error.reason.contains(reason), "{error}");
        }
    }

    proptest! {
        #[test]
        fn what_is_written_reads_the_same(at in 0_u64..1 << 40, span in 0_u64..1 << 20, here: bool, visit: bool, cores: u32) {
            let state = if here { State::Here } else { State::Away };
            let said = Said { state, at: Micros::from_secs(at), until: Micros::from_secs(at + span), visit };
            let never = Some(vec!["mon-fri 9-17".parse().expect("good")]);
            let word = Word { said: Some(said), policy: Policy { cores: Some(cores), never, ..Policy::default() } };
            prop_assert_eq!(Word::parse("x", &word.text()), Ok(word));
        }

        #[test]
        fn any_text_is_survived(text in "(?s).{0,100}") {
            let _ = Word::parse("x", &text);
        }
    }
}
