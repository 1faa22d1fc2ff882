//! Job files in TOML: a program to start, the number of its tasks and their constraints.
//!
//! ```toml
//! program = "worker"
//! arguments = ["-v"]
//! count = 8
//! wants = "memory >= 2G; host != h3|h4"
//! rank = "speed"
//! work = "1.5h"
//! spread = 2
//! engine = "criu,restart"
//! files = "copy"
//! [environment]
//! COLOUR = "blue"
//! ```
//!
//! A job file supplies defaults only: arguments of a call or a command line and exported variables
//! take precedence. `pvm spawn --job FILE` starts its tasks; the spawns of a program with
//! [`JOB_ENV`] in its environment get its defaults.

use crate::engine::{ENGINE_ENV, Engine, STATE_ENV, parse_state_files};
use crate::task::{SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_HOST, SpawnRequest};
use crate::text::line_number;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::ops::Range;
use thiserror::Error;
use toml::Spanned;

/// Environment variable that names a job file for the spawns of a program.
pub const JOB_ENV: &str = "SEMPA_JOB";
/// Environment variable of a spawn that contains its constraints.
pub const CONSTRAINTS_ENV: &str = "SEMPA_WANTS";
/// Environment variable of a spawn that selects how the open files of its tasks are handled in a
/// migration.
pub const OPEN_FILES_ENV: &str = "SEMPA_FILES";
/// Valid values of [`OPEN_FILES_ENV`].
const OPEN_FILES_POLICIES: [&str; 3] = ["shared", "copy", "refuse"];
/// Maximum size of a job file, in bytes.
pub const JOB_BYTES_MAX: usize = 64 << 10;
/// Maximum number of tasks that a job file may start.
pub const JOB_COUNT_MAX: u32 = 65_536;

/// An error in a job file.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{file}, line {line}: {reason}; nothing is started")]
pub struct JobError {
    /// Name of the file as the user gave it.
    pub file: String,
    /// Line number, from 1.
    pub line: usize,
    /// Description of the error.
    pub reason: String,
}

/// Content of a job file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobFile {
    /// Program to which the file applies; `None` if it applies to every spawned program.
    pub program: Option<String>,
    pub arguments: Vec<String>,
    /// Number of tasks to start.
    pub count: Option<u32>,
    /// `SPAWN_*` flag, and the name of a host or an architecture.
    pub place: Option<(i32, String)>,
    pub directory: Option<String>,
    /// Environment variables by name, including those that contain constraints and engines.
    pub environment: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "data did not match any variant of untagged enum Number"
)]
enum WorkValue {
    Whole(u64),
    Fractional(f64),
    Text(String),
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "data did not match any variant of untagged enum Spread"
)]
enum SpreadValue {
    Enabled(bool),
    Max(u32),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct JobToml {
    program: Option<Spanned<String>>,
    #[serde(default)]
    arguments: Vec<Spanned<String>>,
    count: Option<Spanned<u32>>,
    host: Option<Spanned<String>>,
    arch: Option<Spanned<String>>,
    directory: Option<Spanned<String>>,
    wants: Option<Spanned<String>>,
    rank: Option<Spanned<String>>,
    work: Option<Spanned<WorkValue>>,
    spread: Option<Spanned<SpreadValue>>,
    #[serde(default)]
    same_host: bool,
    #[serde(default)]
    barrier: bool,
    engine: Option<Spanned<String>>,
    state: Option<Spanned<String>>,
    files: Option<Spanned<String>>,
    #[serde(default)]
    environment: BTreeMap<Spanned<String>, Spanned<String>>,
}

/// Byte range of an error in the job file, and a description of the error.
type SpannedError = (Range<usize>, String);

impl JobFile {
    /// Parses the text of a job file; errors contain `file` as its name.
    ///
    /// # Errors
    /// The first error, with its line number.
    pub fn parse(file: &str, text: &str) -> Result<JobFile, JobError> {
        let wrong = |at: usize, why: String| JobError {
            file: file.to_string(),
            line: line_number(text, at),
            reason: why,
        };
        if text.len() > JOB_BYTES_MAX {
            return Err(wrong(
                0,
                format!(
                    "the file has {} bytes, and {JOB_BYTES_MAX} are allowed",
                    text.len()
                ),
            ));
        }
        let read = toml::from_str::<JobToml>(text).map_err(|error| {
            wrong(
                error.span().map_or(0, |span| span.start),
                error.message().trim().to_string(),
            )
        })?;
        read.into_job_file()
            .map_err(|(span, why)| wrong(span.start, why))
    }

    /// True if the file names this program, or no program at all.
    pub fn applies_to(&self, program: &str) -> bool {
        self.program.as_ref().is_none_or(|own| own == program)
    }

    /// Fills in defaults from the job file for everything that the request does not specify.
    pub fn apply_to(&self, request: &mut SpawnRequest) {
        if request.args.is_empty() {
            request.args = self
                .arguments
                .iter()
                .map(|argument| argument.clone().into_bytes())
                .collect();
        }
        let (place, directory) = request
            .place
            .split_once(':')
            .map_or((&*request.place, None), |(p, d)| (p, Some(d)));
        let has_place =
            request.flags & (SPAWN_HOST | SPAWN_ARCH | SPAWN_COMPLEMENT) != 0 || !place.is_empty();
        let (flags, place) = match &self.place {
            Some((flags, place)) if !has_place => (*flags, place.as_str()),
            _ => (0, place),
        };
        let directory = directory.or(self.directory.as_deref());
        let place = directory.map_or(place.to_string(), |directory| {
            format!("{place}:{directory}")
        });
        (request.flags, request.place) = (request.flags | flags, place);
        for (name, value) in &self.environment {
            let is_set = |entry: &Vec<u8>| {
                entry
                    .strip_prefix(name.as_bytes())
                    .is_some_and(|v| v.starts_with(b"="))
            };
            if !request.env.iter().any(is_set) {
                request.env.push(format!("{name}={value}").into_bytes());
            }
        }
    }
}

/// Checks that a text can be a part of the constraints; returns it without surrounding spaces.
/// `what` names the setting in errors.
fn check_constraint_text(text: &Spanned<String>, what: &str) -> Result<String, SpannedError> {
    let bad = |c: char| c == ':' || c.is_control();
    let inner = text.get_ref().trim();
    if inner.is_empty() || inner.contains(bad) {
        return Err((
            text.span(),
            format!("{what} must be a text without colons and line ends, and not empty"),
        ));
    }
    Ok(inner.to_string())
}

/// Checks that a name is neither empty nor contains a NUL character. `what` names the setting in
/// errors.
fn check_name(text: Spanned<String>, what: &str) -> Result<String, SpannedError> {
    match text.get_ref().trim().is_empty() || text.get_ref().contains('\0') {
        true => Err((text.span(), format!("{what} is empty"))),
        false => Ok(text.into_inner()),
    }
}

impl JobToml {
    fn into_job_file(self) -> Result<JobFile, SpannedError> {
        let wants = self.constraint_line()?;
        let mut environment = BTreeMap::new();
        for (name, value) in self.environment {
            let bad = |c: char| c == '=' || c == '\0';
            if name.get_ref().is_empty()
                || name.get_ref().contains(bad)
                || value.get_ref().contains('\0')
            {
                return Err((
                    name.span(),
                    format!("{:?} is no name of a variable", name.get_ref()),
                ));
            }
            environment.insert(name.into_inner(), value.into_inner());
        }
        if !wants.is_empty() {
            environment.insert(CONSTRAINTS_ENV.to_string(), wants);
        }
        if let Some(engine) = self.engine {
            Engine::parse_list(engine.get_ref())
                .map_err(|error| (engine.span(), error.to_string()))?;
            environment.insert(ENGINE_ENV.to_string(), engine.into_inner());
        }
        if let Some(state) = self.state {
            parse_state_files(state.get_ref())
                .map_err(|error| (state.span(), error.to_string()))?;
            environment.insert(STATE_ENV.to_string(), state.into_inner());
        }
        if let Some(files) = self.files {
            if !OPEN_FILES_POLICIES.contains(&files.get_ref().as_str()) {
                return Err((
                    files.span(),
                    format!(
                        "{:?} is none of {}",
                        files.get_ref(),
                        OPEN_FILES_POLICIES.join(", ")
                    ),
                ));
            }
            environment.insert(OPEN_FILES_ENV.to_string(), files.into_inner());
        }
        let place = match (self.host, self.arch) {
            (Some(_), Some(arch)) => {
                return Err((arch.span(), "host and arch exclude each other".to_string()));
            }
            (Some(host), None) => Some((SPAWN_HOST, check_constraint_text(&host, "host")?)),
            (None, Some(arch)) => Some((SPAWN_ARCH, check_constraint_text(&arch, "arch")?)),
            (None, None) => None,
        };
        if let Some(count) = self
            .count
            .as_ref()
            .filter(|count| !(1..=JOB_COUNT_MAX).contains(count.get_ref()))
        {
            return Err((count.span(), format!("count must be 1 to {JOB_COUNT_MAX}")));
        }
        let nul = self
            .arguments
            .iter()
            .find(|argument| argument.get_ref().contains('\0'));
        if let Some(argument) = nul {
            return Err((argument.span(), "an argument has a zero byte".to_string()));
        }
        Ok(JobFile {
            program: self
                .program
                .map(|program| check_name(program, "program"))
                .transpose()?,
            arguments: self
                .arguments
                .into_iter()
                .map(Spanned::into_inner)
                .collect(),
            count: self.count.map(Spanned::into_inner),
            place,
            directory: self
                .directory
                .map(|directory| check_name(directory, "directory"))
                .transpose()?,
            environment,
        })
    }

    /// Encodes the constraints of the job file as one line in the syntax of [`CONSTRAINTS_ENV`].
    fn constraint_line(&self) -> Result<String, SpannedError> {
        let mut parts = Vec::new();
        if let Some(wants) = &self.wants {
            parts.push(check_constraint_text(wants, "wants")?);
        }
        if let Some(rank) = &self.rank {
            parts.push(format!("rank = {}", check_constraint_text(rank, "rank")?));
        }
        if let Some(work) = &self.work {
            let text = match work.get_ref() {
                WorkValue::Whole(seconds) => seconds.to_string(),
                WorkValue::Fractional(seconds) => seconds.to_string(),
                WorkValue::Text(text) => text.trim().to_string(),
            };
            let digits = text.trim_end_matches(['s', 'm', 'h']).trim();
            if text.len() > digits.len() + 2
                || !digits
                    .parse::<f64>()
                    .is_ok_and(|n| n.is_finite() && n > 0.0)
            {
                return Err((
                    work.span(),
                    format!("{text:?} is no time: 600, or \"1.5h\""),
                ));
            }
            parts.push(format!("work = {text}"));
        }
        match self
            .spread
            .as_ref()
            .map(|spread| (spread.get_ref(), spread.span()))
        {
            None | Some((SpreadValue::Enabled(false), _)) => {}
            Some((_, span)) if self.same_host => {
                return Err((span, "spread and same-host exclude each other".to_string()));
            }
            Some((SpreadValue::Enabled(true), _)) => parts.push("spread".to_string()),
            Some((SpreadValue::Max(0), span)) => {
                return Err((span, "spread must be at least 1".to_string()));
            }
            Some((SpreadValue::Max(most), _)) => parts.push(format!("spread = {most}")),
        }
        parts.extend(self.same_host.then(|| "same-host".to_string()));
        parts.extend(self.barrier.then(|| "barrier".to_string()));
        Ok(parts.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: &str = r#"# Eight of them.
program = "worker"
arguments = ["-v", "two words"]
count = 8
directory = "/data"
wants = "memory >= 2G; host != h3|h4"
rank = "-cores"
work = "1.5h"
spread = 2
barrier = true
engine = "criu,restart"
state = "state-{tid}"
files = "copy"

[environment]
COLOUR = "blue"
"#;

    fn env(request: &SpawnRequest) -> Vec<String> {
        request
            .env
            .iter()
            .map(|entry| String::from_utf8_lossy(entry).into_owned())
            .collect()
    }

    /// A job file fills in only what the spawn request does not specify.
    #[test]
    fn job_file_supplies_defaults_only() {
        let job = JobFile::parse("job.toml", ALL).expect("nothing is wrong with it");
        assert_eq!(
            (job.program.as_deref(), job.count),
            (Some("worker"), Some(8))
        );
        assert!(job.applies_to("worker") && !job.applies_to("other"));
        let mut request = SpawnRequest {
            file: "worker".into(),
            ..SpawnRequest::default()
        };
        job.apply_to(&mut request);
        assert_eq!(
            (request.args.len(), request.flags, request.place.as_str()),
            (2, 0, ":/data")
        );
        let wants = "SEMPA_WANTS=memory >= 2G; host != h3|h4; rank = -cores; work = 1.5h; spread = 2; barrier";
        assert_eq!(
            env(&request),
            [
                "COLOUR=blue",
                "SEMPA_ENGINE=criu,restart",
                "SEMPA_FILES=copy",
                "SEMPA_STATE=state-{tid}",
                wants
            ]
        );
        let own =
            ["COLOUR=red", "SEMPA_WANTS=", "COLOURS=x"].map(|entry| entry.as_bytes().to_vec());
        let (args, place) = (vec![b"-q".to_vec()], "h2:/tmp".to_string());
        let said = SpawnRequest {
            args,
            place,
            flags: SPAWN_HOST,
            env: own.to_vec(),
            ..SpawnRequest::default()
        };
        let mut request = said.clone();
        job.apply_to(&mut request);
        assert_eq!(
            (request.args, request.flags, request.place),
            (said.args, said.flags, said.place)
        );
        assert_eq!(request.env[..3], own);
        assert_eq!(request.env.len(), 6, "engine, files and state");
    }

    #[test]
    fn host_or_arch_applies_if_spawn_names_none() {
        for (text, flag, name) in [
            ("host = 'h2'", SPAWN_HOST, "h2"),
            ("arch = 'LINUX64'", SPAWN_ARCH, "LINUX64"),
        ] {
            let job = JobFile::parse("f", text).expect(text);
            assert!(job.applies_to("anything"));
            for (place, filled) in [("", name.to_string()), (":/d", format!("{name}:/d"))] {
                let mut request = SpawnRequest {
                    place: place.into(),
                    ..SpawnRequest::default()
                };
                job.apply_to(&mut request);
                assert_eq!((request.flags, request.place), (flag, filled));
            }
            let mut request = SpawnRequest {
                place: "?cores >= 4".into(),
                ..SpawnRequest::default()
            };
            job.apply_to(&mut request);
            assert_eq!((request.flags, request.place.as_str()), (0, "?cores >= 4"));
        }
    }

    #[test]
    fn errors_contain_file_line_and_reason() {
        for (text, said) in [
            (
                "program = 'x'\n\ncolour = 1\n",
                "job.toml, line 3: unknown field `colour`",
            ),
            ("count = 0", "job.toml, line 1: count must be 1 to 65536"),
            ("\ncount = -1", "job.toml, line 2: invalid value"),
            (
                "host = 'h2'\narch = 'X'",
                "job.toml, line 2: host and arch exclude each other",
            ),
            ("spread = 0", "job.toml, line 1: spread must be at least 1"),
            (
                "same-host = true\nspread = true",
                "job.toml, line 2: spread and same-host exclude each other",
            ),
            (
                "wants = 'memory >= 2G:/tmp'",
                "job.toml, line 1: wants must be a text without colons",
            ),
            ("program = ' '", "job.toml, line 1: program is empty"),
            ("\n\nwork = 'soon'", "job.toml, line 3: \"soon\" is no time"),
            ("work = 0", "job.toml, line 1: \"0\" is no time"),
            (
                "files = 'cpoy'",
                "job.toml, line 1: \"cpoy\" is none of shared, copy, refuse",
            ),
            (
                "\nengine = 'steam'",
                "job.toml, line 2: SEMPA_ENGINE: \"steam\"",
            ),
            ("state = 'a:a'", "job.toml, line 1: SEMPA_STATE: \"a:a\""),
            (
                "[environment]\n'A=B' = ''",
                "job.toml, line 2: \"A=B\" is no name of a variable",
            ),
            ("= 1", "job.toml, line 1: "),
        ] {
            let error = JobFile::parse("job.toml", text)
                .expect_err(text)
                .to_string();
            assert!(
                error.starts_with(said) && error.ends_with("; nothing is started"),
                "{error}"
            );
            assert!(!error.contains('\n'), "{error:?}");
        }
        let long = "#".repeat(JOB_BYTES_MAX + 1);
        assert!(
            JobFile::parse("f", &long)
                .expect_err("too long")
                .reason
                .contains("are allowed")
        );
        assert_eq!(JobFile::parse("f", ""), Ok(JobFile::default()));
    }
}
