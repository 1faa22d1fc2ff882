//! The ways by which a task can be taken from one host to another one, and how a task says which it wants.
//!
//! CRIU takes any process as it is, between hosts that are alike, and needs privileges. A program can do it itself: it is
//! asked by a signal or a message, writes what it needs, and ends with an agreed code; then it is started again. And what loses nothing
//! worth keeping is just ended and started again. The last two work between any two hosts, and without privileges.

use crate::ids::Tid;
use crate::task::SpawnRequest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use thiserror::Error;

/// Environment of a spawn: how its tasks want to be taken elsewhere.
pub const ENGINE_ENV: &str = "SEMPA_ENGINE";
/// Environment of a spawn: the files of which a program's own checkpoint consists, separated by colons. Those that do not
/// begin with a slash are in its working directory; [`STATE_TID`] stands for the task's tid.
pub const STATE_ENV: &str = "SEMPA_STATE";
/// Where the tid of the task belongs in [`STATE_ENV`].
pub const STATE_TID: &str = "{tid}";
/// Files that [`STATE_ENV`] may name.
pub const STATE_FILES_MAX: usize = 64;
/// Environment of a program that was started again: how often it has been.
pub const AGAIN_ENV: &str = "SEMPA_AGAIN";
/// A program that was asked to write its state ends with this, if it has not said otherwise: it is to be started again.
pub const EXIT_AGAIN: u8 = 85;
/// It gets so many seconds for that, if it has not said otherwise.
pub const OWN_WAIT: u32 = 60;
/// A task that is just started again gets so many seconds to end by itself.
pub const RESTART_WAIT: u32 = 5;
/// Nobody gets more seconds.
pub const WAIT_MAX: u32 = 3600;
/// SIGUSR1: what a program is asked by, if it has not said otherwise.
const SIGUSR1: i32 = 10;
/// SIGTERM.
const SIGTERM: i32 = 15;
/// Signals that a program can be asked by, by name. Those that it cannot catch, or that stop it, are not among them.
const SIGNALS: [(&str, i32); 9] = [
    ("HUP", 1),
    ("INT", 2),
    ("QUIT", 3),
    ("USR1", SIGUSR1),
    ("USR2", 12),
    ("ALRM", 14),
    ("TERM", SIGTERM),
    ("URG", 23),
    ("WINCH", 28),
];

/// How a program is asked to write its state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Asked {
    /// By this signal.
    Signal(i32),
    /// By a message with this tag, from its daemon: how many seconds it gets, an integer.
    Message(i32),
}

impl fmt::Display for Asked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Asked::Signal(signal) => write!(f, "by signal {signal}"),
            Asked::Message(tag) => write!(f, "by a message with tag {tag}"),
        }
    }
}

/// A way to take a task elsewhere.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Engine {
    /// CRIU writes the process and builds it again.
    #[default]
    Criu,
    /// The program writes its own state and is started again.
    Own {
        /// How it is asked.
        asked: Asked,
        /// The exit status by which it says that it has done so.
        exit: u8,
        /// How many seconds it gets.
        wait: u32,
    },
    /// The task is ended and started again.
    Restart {
        /// How many seconds it gets to end by itself.
        wait: u32,
    },
}

/// A word that is no way to take a task elsewhere.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{ENGINE_ENV}: \"{0}\" is not understood; it is a list of criu, \
     own[:signal=NAME|:message=TAG][:exit=CODE][:wait=SECONDS] and restart[:wait=SECONDS], each setting once"
)]
pub struct EngineError(pub String);

/// A text that does not name the files of a program's own checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{STATE_ENV}: \"{0}\" is not understood; it names up to {STATE_FILES_MAX} files, each once, separated by colons, in which \
     {STATE_TID} stands for the tid"
)]
pub struct StateError(pub String);

/// The files that a text names of which a program's own checkpoint consists, as they are named.
///
/// # Errors
/// One is empty, or named twice, or a directory by its name, or there are too many.
pub fn state_files(text: &str) -> Result<Vec<String>, StateError> {
    let files: Vec<String> = text
        .split(':')
        .map(|file| file.trim().to_string())
        .collect();
    let is_file = |file: &String| !file.is_empty() && !file.ends_with('/') && !file.contains('\0');
    let known: BTreeSet<&String> = files.iter().collect();
    match files.iter().all(is_file) && known.len() == files.len() && files.len() <= STATE_FILES_MAX
    {
        true => Ok(files),
        false => Err(StateError(text.to_string())),
    }
}

/// What the environment of a spawn says under a name, unless that is nothing. Of two entries the later one counts, as for the
/// program.
fn said(env: &[Vec<u8>], name: &str) -> Option<String> {
    let of = |entry: &Vec<u8>| {
        let text = entry
            .strip_prefix(name.as_bytes())?
            .strip_prefix(b"=")?
            .to_vec();
        Some(String::from_utf8_lossy(&text).into_owned())
    };
    env.iter()
        .rev()
        .find_map(of)
        .filter(|text| !text.trim().is_empty())
}

impl Engine {
    /// Reads a list: the first that both hosts can do is taken.
    ///
    /// # Errors
    /// The word that is not understood.
    pub fn list(text: &str) -> Result<Vec<Engine>, EngineError> {
        let words = text.split(',').map(str::trim);
        let list = words
            .map(Engine::parse)
            .collect::<Result<Vec<Engine>, EngineError>>()?;
        let twice = |engine: &Engine| {
            list.iter()
                .filter(|other| other.name() == engine.name())
                .count()
                > 1
        };
        match list.iter().find(|engine| twice(engine)) {
            Some(engine) => Err(EngineError(format!("{} twice", engine.name()))),
            None => Ok(list),
        }
    }

    fn parse(word: &str) -> Result<Engine, EngineError> {
        let wrong = || EngineError(word.to_string());
        let mut parts = word.split(':').map(str::trim);
        let mut engine = match parts.next() {
            Some("criu") => Engine::Criu,
            Some("own") => Engine::Own {
                asked: Asked::Signal(SIGUSR1),
                exit: EXIT_AGAIN,
                wait: OWN_WAIT,
            },
            Some("restart") => Engine::Restart { wait: RESTART_WAIT },
            _ => return Err(wrong()),
        };
        let mut said = Vec::new();
        for part in parts {
            let (name, value) = part
                .split_once('=')
                .map(|(n, v)| (n.trim(), v.trim()))
                .ok_or_else(wrong)?;
            // Either says how the program is asked.
            let what = if name == "message" { "signal" } else { name };
            if said.contains(&what) {
                return Err(wrong());
            }
            said.push(what);
            match (&mut engine, name) {
                (Engine::Own { asked, .. }, "signal") => {
                    *asked = Asked::Signal(signal_named(value).ok_or_else(wrong)?)
                }
                (Engine::Own { asked, .. }, "message") => {
                    let tag = value
                        .parse()
                        .ok()
                        .filter(|tag| *tag >= 0)
                        .ok_or_else(wrong)?;
                    *asked = Asked::Message(tag);
                }
                (Engine::Own { exit, .. }, "exit") => *exit = value.parse().map_err(|_| wrong())?,
                (Engine::Own { wait, .. } | Engine::Restart { wait }, "wait") => {
                    *wait = value
                        .parse()
                        .ok()
                        .filter(|wait| (1..=WAIT_MAX).contains(wait))
                        .ok_or_else(wrong)?;
                }
                _ => return Err(wrong()),
            }
        }
        Ok(engine)
    }

    /// What the environment of a spawn says; by CRIU alone if it says nothing.
    ///
    /// # Errors
    /// The word that is not understood.
    pub fn wanted(env: &[Vec<u8>]) -> Result<Vec<Engine>, EngineError> {
        said(env, ENGINE_ENV).map_or_else(|| Ok(vec![Engine::Criu]), |text| Engine::list(&text))
    }

    fn name(&self) -> &'static str {
        match self {
            Engine::Criu => "criu",
            Engine::Own { .. } => "own",
            Engine::Restart { .. } => "restart",
        }
    }

    /// How the program is asked, and the seconds that it gets; none for CRIU.
    pub fn asks(&self) -> Option<(Asked, u32)> {
        match *self {
            Engine::Criu => None,
            Engine::Own { asked, wait, .. } => Some((asked, wait)),
            Engine::Restart { wait } => Some((Asked::Signal(SIGTERM), wait)),
        }
    }

    /// True if a process that was asked, and has ended with this wait status, is to be started again.
    pub fn goes_on_after(&self, status: i32) -> bool {
        match *self {
            Engine::Criu => false,
            Engine::Own { exit, .. } => status == i32::from(exit) << 8,
            Engine::Restart { .. } => true,
        }
    }
}

fn signal_named(text: &str) -> Option<i32> {
    let name = text.strip_prefix("SIG").unwrap_or(text);
    let by_name = SIGNALS
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, number)| *number);
    by_name.or_else(|| {
        let number = text.parse().ok()?;
        // The realtime ones are anybody's, but for the few that the C library keeps for itself.
        ((35..=64).contains(&number) || SIGNALS.iter().any(|(_, known)| *known == number))
            .then_some(number)
    })
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Engine::Criu => f.write_str("CRIU"),
            Engine::Own { .. } => f.write_str("its own checkpoint"),
            Engine::Restart { .. } => f.write_str("restart"),
        }
    }
}

/// How a program was started, so that it can be started again, and how it wants to be taken elsewhere.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Begin {
    /// In this order.
    pub engines: Vec<Engine>,
    /// What was asked for.
    pub request: SpawnRequest,
    /// How often it was started again.
    pub count: u32,
    /// The files of which its own checkpoint consists, as [`STATE_ENV`] names them; none if that says nothing.
    pub state: Vec<String>,
}

impl Begin {
    /// Of a program that is spawned like this.
    ///
    /// # Errors
    /// Words in its environment that are not understood.
    pub fn of(request: &SpawnRequest) -> Result<Begin, String> {
        let engines = Engine::wanted(&request.env).map_err(|error| error.to_string())?;
        let state = said(&request.env, STATE_ENV)
            .map(|text| state_files(&text))
            .transpose();
        let state = state
            .map_err(|error| error.to_string())?
            .unwrap_or_default();
        Ok(Begin {
            engines,
            request: SpawnRequest {
                count: 1,
                ..request.clone()
            },
            count: 0,
            state,
        })
    }

    /// Its own checkpoint, if that is one of the ways.
    pub fn own(&self) -> Option<Engine> {
        self.engines
            .iter()
            .copied()
            .find(|engine| matches!(engine, Engine::Own { .. }))
    }

    /// The files of which its own checkpoint consists, for the task with this tid.
    pub fn state_of(&self, tid: Tid) -> Vec<PathBuf> {
        self.state
            .iter()
            .map(|file| file.replace(STATE_TID, &tid.to_string()).into())
            .collect()
    }

    /// True if its own checkpoint is one of the ways, and CRIU does not come before all others.
    pub fn own_first(&self) -> bool {
        self.own().is_some() && self.engines.first() != Some(&Engine::Criu)
    }

    /// True if CRIU is one of the ways.
    pub fn by_criu(&self) -> bool {
        self.engines.contains(&Engine::Criu)
    }

    /// The first way that starts the program again.
    pub fn anew(&self) -> Option<Engine> {
        self.engines
            .iter()
            .copied()
            .find(|engine| *engine != Engine::Criu)
    }

    /// The working directory that was asked for.
    pub fn dir(&self) -> Option<&str> {
        self.request
            .place
            .split_once(':')
            .map(|(_, dir)| dir)
            .filter(|dir| !dir.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn own(asked: Asked) -> Engine {
        Engine::Own {
            asked,
            exit: EXIT_AGAIN,
            wait: OWN_WAIT,
        }
    }

    const OWN: Engine = own(Asked::Signal(SIGUSR1));

    #[test]
    fn a_list_names_ways_in_order_with_what_is_different() {
        let list = |text| Engine::list(text).expect("good");
        assert_eq!(list("criu"), [Engine::Criu]);
        assert_eq!(
            list(" own , restart:wait=9 "),
            [OWN, Engine::Restart { wait: 9 }]
        );
        let other = Engine::Own {
            asked: Asked::Signal(12),
            exit: 3,
            wait: 7,
        };
        assert_eq!(
            list("criu,own:signal=USR2:exit=3:wait=7"),
            [Engine::Criu, other]
        );
        assert_eq!(list("own:wait=7:signal=SIGUSR2:exit=3"), [other]);
        assert_eq!(list("own:signal=40"), [own(Asked::Signal(40))]);
        assert_eq!(list("own:message=0"), [own(Asked::Message(0))]);
    }

    #[test]
    fn what_is_not_understood_is_named() {
        for word in [
            "",
            "own,",
            "crio",
            "own:",
            "own:signal",
            "own:signal=KILL",
            "own:signal=9",
            "own:signal=33",
            "own:message=-1",
            "own:message=USR1",
            "own:exit=256",
            "own:wait=0",
            "own:wait=3601",
            "restart:exit=3",
            "criu:wait=3",
            "own,own:wait=3",
            "own:wait=3:wait=3",
            "restart:wait=3:wait=4",
            "own:signal=USR1:message=7",
            "own:message=7:exit=3:message=8",
        ] {
            let error = Engine::list(word).expect_err(word).to_string();
            assert!(error.starts_with("SEMPA_ENGINE: \""), "{word}: {error}");
        }
    }

    #[test]
    fn the_environment_of_a_spawn_says_it_and_without_a_word_it_is_criu() {
        let env = |words: &[&str]| {
            words
                .iter()
                .map(|word| word.as_bytes().to_vec())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            Engine::wanted(&env(&["SEMPA_ENGINES=x", "A=b"])),
            Ok(vec![Engine::Criu])
        );
        assert_eq!(
            Engine::wanted(&env(&["SEMPA_ENGINE="])),
            Ok(vec![Engine::Criu])
        );
        assert_eq!(
            Engine::wanted(&env(&["SEMPA_ENGINE=x", "SEMPA_ENGINE=own"])),
            Ok(vec![OWN])
        );
        assert!(Engine::wanted(&env(&["SEMPA_ENGINE=x"])).is_err());
    }

    #[test]
    fn the_files_of_a_checkpoint_are_named_each_once_and_may_have_the_tid_in_their_names() {
        let env = |state: &str| SpawnRequest {
            env: vec![format!("SEMPA_STATE={state}").into()],
            ..SpawnRequest::default()
        };
        let begin = Begin::of(&env("state-{tid}: /data/{tid}/{tid}.log")).expect("good");
        let tid = Tid::from_raw(0x40007);
        assert_eq!(
            begin.state_of(tid),
            [
                PathBuf::from("state-t40007"),
                "/data/t40007/t40007.log".into()
            ]
        );
        assert_eq!(
            (Begin::of(&env("")).expect("nothing").state, begin.own()),
            (vec![], None)
        );
        let many = (0..=STATE_FILES_MAX)
            .map(|n| n.to_string())
            .collect::<Vec<_>>()
            .join(":");
        for text in ["a::b", "a:a", "a:", "dir/", &many] {
            let why = Begin::of(&env(text)).expect_err(text);
            assert!(
                why.starts_with("SEMPA_STATE: \"") && why.contains(text),
                "{why}"
            );
        }
        assert!(state_files(&many[2..]).is_ok(), "as many as may be");
    }

    #[test]
    fn only_the_agreed_end_of_a_program_that_was_asked_begins_it_again() {
        assert!(OWN.goes_on_after(85 << 8) && !OWN.goes_on_after(0) && !OWN.goes_on_after(85));
        assert!(
            Engine::Restart { wait: 1 }.goes_on_after(9) && !Engine::Criu.goes_on_after(85 << 8)
        );
    }
}
