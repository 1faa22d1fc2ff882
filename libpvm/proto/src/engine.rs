//! Migration engines: the methods to migrate a task, and the syntax by which a task selects
//! engines.
//!
//! - `criu`: CRIU dumps the task's processes and restores them. Needs similar hosts and privileges.
//! - `own`: the program writes its own checkpoint on request, by a signal or a message. It exits
//!   with an agreed status and is restarted. Works between any two hosts, without privileges.
//! - `restart`: the program is ended and restarted; its state is lost. Works between any two hosts,
//!   without privileges.

use crate::ids::Tid;
use crate::spawn::SpawnRequest;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;
use thiserror::Error;

/// Environment variable of a spawn that lists the engines permitted for its tasks.
pub const ENGINE_ENV: &str = "SEMPA_ENGINE";
/// Environment variable of a spawn that lists the files of a program's own checkpoint, separated by
/// colons. Relative names refer to the working directory; [`STATE_TID_PLACEHOLDER`] stands for the
/// task's tid.
pub const STATE_ENV: &str = "SEMPA_STATE";
/// Placeholder for the task's tid in [`STATE_ENV`].
pub const STATE_TID_PLACEHOLDER: &str = "{tid}";
/// Largest number of files in [`STATE_ENV`].
pub const STATE_FILES_MAX: usize = 64;
/// Environment variable of a restarted program that contains the number of its restarts.
pub const RESTART_COUNT_ENV: &str = "SEMPA_AGAIN";
/// Default exit status by which a program reports that it has written its own checkpoint and must
/// be restarted.
pub const RESTART_EXIT_STATUS: u8 = 85;
/// Default time limit, in seconds, for a program to write its own checkpoint and exit.
pub const SELF_CHECKPOINT_TIMEOUT_S: u32 = 60;
/// Default time limit, in seconds, for a program to exit before it is restarted.
pub const RESTART_TIMEOUT_S: u32 = 5;
/// Maximum of the time limits that an engine list may set, in seconds.
pub const TIMEOUT_S_MAX: u32 = 3600;
/// Default signal that asks a program to write its own checkpoint.
const SIGUSR1: i32 = 10;
const SIGTERM: i32 = 15;
/// Signals by which a program may be asked for its own checkpoint: name and number. Signals that
/// cannot be caught, or that stop a process, are excluded.
const CATCHABLE_SIGNALS: [(&str, i32); 9] = [
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

/// How a program is asked for its own checkpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum AskMethod {
    /// The tasker sends a signal with this number.
    Signal(i32),
    /// The task's daemon sends a message with this tag. The message contains the time limit in
    /// seconds, as an integer.
    Message(i32),
}

impl fmt::Display for AskMethod {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Signal(signal) => write!(f, "by signal {signal}"),
            Self::Message(tag) => write!(f, "by a message with tag {tag}"),
        }
    }
}

/// An engine with its settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Engine {
    /// CRIU dumps the processes and restores them.
    #[default]
    Criu,
    /// The program writes its own checkpoint and is restarted.
    #[serde(rename = "Own")]
    SelfCheckpoint {
        #[serde(rename = "asked")]
        ask_method: AskMethod,
        /// Exit status by which the program reports success.
        #[serde(rename = "exit")]
        exit_status: u8,
        /// Time limit for the checkpoint and the exit, in seconds.
        #[serde(rename = "wait")]
        timeout_s: u32,
    },
    /// The program is ended and restarted.
    Restart {
        /// Time limit for the exit, in seconds. Afterwards the program is killed.
        #[serde(rename = "wait")]
        timeout_s: u32,
    },
}

/// Error of an engine list; contains the invalid part of the list.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{ENGINE_ENV}: \"{0}\" is not understood; it is a list of criu, \
     own[:signal=NAME|:message=TAG][:exit=CODE][:wait=SECONDS] and restart[:wait=SECONDS], each setting once"
)]
pub struct EngineListError(pub String);

/// Error of a list of state files; contains the invalid list.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error(
    "{STATE_ENV}: \"{0}\" is invalid; it must name up to {STATE_FILES_MAX} files, each once, separated by colons; \
     {STATE_TID_PLACEHOLDER} in a name stands for the tid"
)]
pub struct StateFilesError(pub String);

/// Error in the environment of a spawn request.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum LaunchInfoError {
    /// The engine list is invalid. The request cannot start a task.
    #[error(transparent)]
    EngineList(#[from] EngineListError),
    /// The list of state files is invalid. The request cannot start a task.
    #[error(transparent)]
    StateFiles(#[from] StateFilesError),
}

/// Parses the value of [`STATE_ENV`] into file names; does not replace [`STATE_TID_PLACEHOLDER`].
///
/// # Errors
/// A name is empty, repeated, ends with a slash or contains a NUL, or there are too many names.
pub fn parse_state_files(text: &str) -> Result<Vec<String>, StateFilesError> {
    let files: Vec<String> = text
        .split(':')
        .map(|file| file.trim().to_string())
        .collect();
    let is_valid_name =
        |file: &String| !file.is_empty() && !file.ends_with('/') && !file.contains('\0');
    let unique_files: BTreeSet<&String> = files.iter().collect();
    match files.iter().all(is_valid_name)
        && unique_files.len() == files.len()
        && files.len() <= STATE_FILES_MAX
    {
        true => Ok(files),
        false => Err(StateFilesError(text.to_string())),
    }
}

/// Returns the value of the variable `name` in the environment of a spawn; `None` if the variable
/// is empty or not set. If the variable is set several times, the last entry applies, as in the
/// spawned program.
fn env_value(env: &[Vec<u8>], name: &str) -> Option<String> {
    let value_in = |entry: &Vec<u8>| {
        let text = entry
            .strip_prefix(name.as_bytes())?
            .strip_prefix(b"=")?
            .to_vec();
        Some(String::from_utf8_lossy(&text).into_owned())
    };
    env.iter()
        .rev()
        .find_map(value_in)
        .filter(|text| !text.trim().is_empty())
}

impl Engine {
    /// Parses an engine list. Migrations use the first engine of the list that source and target
    /// support.
    ///
    /// # Errors
    /// Contains the first invalid part of the list.
    pub fn parse_list(text: &str) -> Result<Vec<Self>, EngineListError> {
        let items = text.split(',').map(str::trim);
        let list = items
            .map(Self::parse)
            .collect::<Result<Vec<Self>, EngineListError>>()?;
        let is_repeated = |engine: &Self| {
            list.iter()
                .filter(|other| other.name() == engine.name())
                .count()
                > 1
        };
        match list.iter().find(|engine| is_repeated(engine)) {
            Some(engine) => Err(EngineListError(format!("{} twice", engine.name()))),
            None => Ok(list),
        }
    }

    fn parse(item: &str) -> Result<Self, EngineListError> {
        let invalid_item = || EngineListError(item.to_string());
        let mut parts = item.split(':').map(str::trim);
        let mut engine = match parts.next() {
            Some("criu") => Self::Criu,
            Some("own") => Self::SelfCheckpoint {
                ask_method: AskMethod::Signal(SIGUSR1),
                exit_status: RESTART_EXIT_STATUS,
                timeout_s: SELF_CHECKPOINT_TIMEOUT_S,
            },
            Some("restart") => Self::Restart {
                timeout_s: RESTART_TIMEOUT_S,
            },
            _ => return Err(invalid_item()),
        };
        let mut seen_settings = Vec::new();
        for part in parts {
            let (name, value) = part
                .split_once('=')
                .map(|(n, v)| (n.trim(), v.trim()))
                .ok_or_else(invalid_item)?;
            // `signal` and `message` both determine how the program is asked, so only one of them
            // is permitted.
            let setting = if name == "message" { "signal" } else { name };
            if seen_settings.contains(&setting) {
                return Err(invalid_item());
            }
            seen_settings.push(setting);
            match (&mut engine, name) {
                (
                    Self::SelfCheckpoint {
                        ask_method: method, ..
                    },
                    "signal",
                ) => *method = AskMethod::Signal(parse_signal(value).ok_or_else(invalid_item)?),
                (
                    Self::SelfCheckpoint {
                        ask_method: method, ..
                    },
                    "message",
                ) => {
                    let tag = value
                        .parse()
                        .ok()
                        .filter(|tag| *tag >= 0)
                        .ok_or_else(invalid_item)?;
                    *method = AskMethod::Message(tag);
                }
                (
                    Self::SelfCheckpoint {
                        exit_status: status,
                        ..
                    },
                    "exit",
                ) => *status = value.parse().map_err(|_| invalid_item())?,
                (Self::SelfCheckpoint { timeout_s, .. } | Self::Restart { timeout_s }, "wait") => {
                    *timeout_s = value
                        .parse()
                        .ok()
                        .filter(|limit_s| (1..=TIMEOUT_S_MAX).contains(limit_s))
                        .ok_or_else(invalid_item)?;
                }
                _ => return Err(invalid_item()),
            }
        }
        Ok(engine)
    }

    /// Returns the engines listed in the environment of a spawn; only CRIU if the environment lists
    /// none.
    ///
    /// # Errors
    /// Contains the first invalid part of the list.
    pub fn list_from_env(env: &[Vec<u8>]) -> Result<Vec<Self>, EngineListError> {
        env_value(env, ENGINE_ENV)
            .map_or_else(|| Ok(vec![Self::Criu]), |text| Self::parse_list(&text))
    }

    fn name(&self) -> &'static str {
        match self {
            Self::Criu => "criu",
            Self::SelfCheckpoint { .. } => "own",
            Self::Restart { .. } => "restart",
        }
    }

    /// Returns the method by which the program is asked to exit, and the time limit in seconds;
    /// `None` for CRIU.
    pub fn exit_request(&self) -> Option<(AskMethod, u32)> {
        match *self {
            Self::Criu => None,
            Self::SelfCheckpoint {
                ask_method,
                timeout_s: limit_s,
                ..
            } => Some((ask_method, limit_s)),
            Self::Restart { timeout_s } => Some((AskMethod::Signal(SIGTERM), timeout_s)),
        }
    }

    /// True if a program that was asked to exit must be restarted when its process has ended with
    /// this wait status.
    pub fn restarts_after(&self, wait_status: i32) -> bool {
        match *self {
            Self::Criu => false,
            Self::SelfCheckpoint {
                exit_status: status,
                ..
            } => wait_status == i32::from(status) << 8,
            Self::Restart { .. } => true,
        }
    }
}

fn parse_signal(text: &str) -> Option<i32> {
    let name = text.strip_prefix("SIG").unwrap_or(text);
    let named_signal = CATCHABLE_SIGNALS
        .iter()
        .find(|(signal, _)| *signal == name)
        .map(|(_, number)| *number);
    named_signal.or_else(|| {
        let number = text.parse().ok()?;
        // Programs may use realtime signals, except a few that the C library reserves.
        ((35..=64).contains(&number)
            || CATCHABLE_SIGNALS
                .iter()
                .any(|(_, signal)| *signal == number))
        .then_some(number)
    })
}

impl fmt::Display for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Criu => f.write_str("CRIU"),
            Self::SelfCheckpoint { .. } => f.write_str("its own checkpoint"),
            Self::Restart { .. } => f.write_str("restart"),
        }
    }
}

/// Description of how a program was started, from which the program can be restarted, with the
/// engines that are permitted for the program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LaunchInfo {
    /// Engines in order of preference.
    pub engines: Vec<Engine>,
    /// The spawn request, reduced to one task.
    pub request: SpawnRequest,
    /// Number of restarts so far.
    pub restart_count: u32,
    /// Files of the program's own checkpoint as listed in [`STATE_ENV`], with placeholders; empty
    /// if none are listed.
    pub state_files: Vec<String>,
}

impl LaunchInfo {
    /// Derives the launch information from a spawn request.
    ///
    /// # Errors
    /// The engine list or the list of state files in the request's environment is invalid.
    pub fn from_request(request: &SpawnRequest) -> Result<Self, LaunchInfoError> {
        let engines = Engine::list_from_env(&request.env)?;
        let state_files = env_value(&request.env, STATE_ENV)
            .map(|text| parse_state_files(&text))
            .transpose()?
            .unwrap_or_default();
        Ok(Self {
            engines,
            request: SpawnRequest {
                task_count: 1,
                past: Default::default(),
                ..request.clone()
            },
            restart_count: 0,
            state_files,
        })
    }

    /// Returns the engine [`Engine::SelfCheckpoint`] with its settings; `None` if this engine is
    /// not permitted.
    pub fn self_checkpoint(&self) -> Option<Engine> {
        self.engines
            .iter()
            .copied()
            .find(|engine| matches!(engine, Engine::SelfCheckpoint { .. }))
    }

    /// Returns the files of the program's own checkpoint, with `tid` in place of the placeholder.
    pub fn state_paths(&self, tid: Tid) -> Vec<PathBuf> {
        self.state_files
            .iter()
            .map(|file| file.replace(STATE_TID_PLACEHOLDER, &tid.to_string()).into())
            .collect()
    }

    /// True if [`Engine::SelfCheckpoint`] is permitted and CRIU is not the first permitted engine.
    pub fn prefers_self_checkpoint(&self) -> bool {
        self.self_checkpoint().is_some() && self.engines.first() != Some(&Engine::Criu)
    }

    /// True if CRIU is one of the permitted engines.
    pub fn allows_criu(&self) -> bool {
        self.engines.contains(&Engine::Criu)
    }

    /// Returns the first permitted engine that restarts the program; `None` if only CRIU is
    /// permitted.
    pub fn restart_engine(&self) -> Option<Engine> {
        self.engines
            .iter()
            .copied()
            .find(|engine| *engine != Engine::Criu)
    }

    /// Returns the working directory that the spawn request names; `None` if the request names no
    /// working directory.
    pub fn working_dir(&self) -> Option<&str> {
        self.request
            .where_arg
            .split_once(':')
            .map(|(_, dir)| dir)
            .filter(|dir| !dir.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn self_checkpoint_by(ask_method: AskMethod) -> Engine {
        Engine::SelfCheckpoint {
            ask_method,
            exit_status: RESTART_EXIT_STATUS,
            timeout_s: SELF_CHECKPOINT_TIMEOUT_S,
        }
    }

    const SELF_CHECKPOINT: Engine = self_checkpoint_by(AskMethod::Signal(SIGUSR1));

    #[test]
    fn engine_list_parses_with_settings() {
        let parse = |text| Engine::parse_list(text).expect("good");
        assert_eq!(parse("criu"), [Engine::Criu]);
        assert_eq!(
            parse(" own , restart:wait=9 "),
            [SELF_CHECKPOINT, Engine::Restart { timeout_s: 9 }]
        );
        let custom_engine = Engine::SelfCheckpoint {
            ask_method: AskMethod::Signal(12),
            exit_status: 3,
            timeout_s: 7,
        };
        assert_eq!(
            parse("criu,own:signal=USR2:exit=3:wait=7"),
            [Engine::Criu, custom_engine]
        );
        assert_eq!(parse("own:wait=7:signal=SIGUSR2:exit=3"), [custom_engine]);
        assert_eq!(
            parse("own:signal=40"),
            [self_checkpoint_by(AskMethod::Signal(40))]
        );
        assert_eq!(
            parse("own:message=0"),
            [self_checkpoint_by(AskMethod::Message(0))]
        );
    }

    #[test]
    fn invalid_engine_is_named_in_the_error() {
        for item in [
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
            let error = Engine::parse_list(item).expect_err(item).to_string();
            assert!(error.starts_with("SEMPA_ENGINE: \""), "{item}: {error}");
        }
    }

    /// The engine list comes from the spawn's environment; the default is CRIU.
    #[test]
    fn engine_comes_from_environment_or_is_criu() {
        let env = |variables: &[&str]| {
            variables
                .iter()
                .map(|word| word.as_bytes().to_vec())
                .collect::<Vec<_>>()
        };
        assert_eq!(
            Engine::list_from_env(&env(&["SEMPA_ENGINES=x", "A=b"])),
            Ok(vec![Engine::Criu])
        );
        assert_eq!(
            Engine::list_from_env(&env(&["SEMPA_ENGINE="])),
            Ok(vec![Engine::Criu])
        );
        assert_eq!(
            Engine::list_from_env(&env(&["SEMPA_ENGINE=x", "SEMPA_ENGINE=own"])),
            Ok(vec![SELF_CHECKPOINT])
        );
        assert!(Engine::list_from_env(&env(&["SEMPA_ENGINE=x"])).is_err());
    }

    /// State files must be named once each; their names may contain the tid.
    #[test]
    fn state_files_are_unique_and_may_contain_tid() {
        let request_with_state = |state: &str| SpawnRequest {
            env: vec![format!("SEMPA_STATE={state}").into()],
            ..SpawnRequest::default()
        };
        let launch =
            LaunchInfo::from_request(&request_with_state("state-{tid}: /data/{tid}/{tid}.log"))
                .expect("good");
        let tid = Tid::from_raw(0x40007);
        assert_eq!(
            launch.state_paths(tid),
            [
                PathBuf::from("state-t40007"),
                "/data/t40007/t40007.log".into()
            ]
        );
        assert_eq!(
            (
                LaunchInfo::from_request(&request_with_state(""))
                    .expect("nothing")
                    .state_files,
                launch.self_checkpoint()
            ),
            (vec![], None)
        );
        let too_many_files = (0..=STATE_FILES_MAX)
            .map(|n| n.to_string())
            .collect::<Vec<_>>()
            .join(":");
        for text in ["a::b", "a:a", "a:", "dir/", &too_many_files] {
            let error = LaunchInfo::from_request(&request_with_state(text))
                .expect_err(text)
                .to_string();
            assert!(
                error.starts_with("SEMPA_STATE: \"") && error.contains(text),
                "{error}"
            );
        }
        assert!(
            parse_state_files(&too_many_files[2..]).is_ok(),
            "as many as may be"
        );
    }

    #[test]
    fn only_agreed_exit_status_restarts_program() {
        assert!(
            SELF_CHECKPOINT.restarts_after(85 << 8)
                && !SELF_CHECKPOINT.restarts_after(0)
                && !SELF_CHECKPOINT.restarts_after(85)
        );
        assert!(
            Engine::Restart { timeout_s: 1 }.restarts_after(9)
                && !Engine::Criu.restarts_after(85 << 8)
        );
    }
}
