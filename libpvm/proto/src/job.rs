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
//! take precedence. `pvm spawn --job FILE` starts the tasks of the file. A program that has
//! [`JOB_ENV`] in its environment spawns its tasks with the defaults of the file that the variable
//! names.

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
pub const JOB_FILE_BYTES_MAX: usize = 64 << 10;
/// Maximum number of tasks that a job file may start.
pub const JOB_TASKS_MAX: u32 = 65_536;

/// The first error in a job file, with its line. The job file starts nothing.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{file}, line {line}: {reason}; nothing is started")]
pub struct JobError {
    /// Name of the file as the user passed it.
    pub file: String,
    /// Line number, from 1.
    pub line: usize,
    /// Description of the error.
    pub reason: String,
}

/// Content of a job file, checked and converted into the parts of a spawn request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct JobFile {
    /// Program to which the file applies; `None` if the file applies to every spawned program.
    pub program: Option<String>,
    pub arguments: Vec<String>,
    /// Number of tasks to start; `None` if the file does not specify the number.
    pub task_count: Option<u32>,
    /// `SPAWN_*` flag with the name of a host or an architecture; `None` if the file names neither.
    pub spawn_target: Option<(i32, String)>,
    pub working_dir: Option<String>,
    /// Environment variables by name, including those that contain constraints and engines.
    pub environment: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "data did not match any variant of untagged enum Number"
)]
enum WorkValue {
    Integer(u64),
    Float(f64),
    Text(String),
}

#[derive(Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "data did not match any variant of untagged enum Spread"
)]
enum SpreadValue {
    Flag(bool),
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
    pub fn parse(file: &str, text: &str) -> Result<Self, JobError> {
        let error_at = |offset: usize, description: String| JobError {
            file: file.to_string(),
            line: line_number(text, offset),
            reason: description,
        };
        if text.len() > JOB_FILE_BYTES_MAX {
            return Err(error_at(
                0,
                format!(
                    "the file has {} bytes, and {JOB_FILE_BYTES_MAX} are allowed",
                    text.len()
                ),
            ));
        }
        let job_toml = toml::from_str::<JobToml>(text).map_err(|error| {
            error_at(
                error.span().map_or(0, |span| span.start),
                error.message().trim().to_string(),
            )
        })?;
        job_toml
            .into_job_file()
            .map_err(|(span, description)| error_at(span.start, description))
    }

    /// True if the file names this program, or no program at all.
    pub fn applies_to(&self, program: &str) -> bool {
        self.program
            .as_ref()
            .is_none_or(|job_program| job_program == program)
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
        let (spawn_target, directory) = request
            .where_arg
            .split_once(':')
            .map_or((&*request.where_arg, None), |(p, d)| (p, Some(d)));
        let has_spawn_target = request.flags & (SPAWN_HOST | SPAWN_ARCH | SPAWN_COMPLEMENT) != 0
            || !spawn_target.is_empty();
        let (flags, spawn_target) = match &self.spawn_target {
            Some((flags, spawn_target)) if !has_spawn_target => (*flags, spawn_target.as_str()),
            _ => (0, spawn_target),
        };
        let directory = directory.or(self.working_dir.as_deref());
        let spawn_target = directory.map_or(spawn_target.to_string(), |directory| {
            format!("{spawn_target}:{directory}")
        });
        (request.flags, request.where_arg) = (request.flags | flags, spawn_target);
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

/// Checks that `text` is not empty and contains neither colons nor control characters, so that
/// `text` can be a part of the constraints or the name of a host or an architecture. Returns `text`
/// without surrounding spaces. `setting` names the setting in errors.
fn check_constraint_text(text: &Spanned<String>, setting: &str) -> Result<String, SpannedError> {
    let is_forbidden = |c: char| c == ':' || c.is_control();
    let trimmed_text = text.get_ref().trim();
    if trimmed_text.is_empty() || trimmed_text.contains(is_forbidden) {
        return Err((
            text.span(),
            format!("{setting} must be a non-empty text without colons and line ends"),
        ));
    }
    Ok(trimmed_text.to_string())
}

/// Checks that a name is not empty and contains no NUL character. `setting` names the setting in
/// errors.
fn check_name(text: Spanned<String>, setting: &str) -> Result<String, SpannedError> {
    match text.get_ref().trim().is_empty() || text.get_ref().contains('\0') {
        true => Err((text.span(), format!("{setting} is empty"))),
        false => Ok(text.into_inner()),
    }
}

impl JobToml {
    fn into_job_file(self) -> Result<JobFile, SpannedError> {
        let wants = self.encode_constraints()?;
        let mut environment = BTreeMap::new();
        for (name, value) in self.environment {
            let is_forbidden = |c: char| c == '=' || c == '\0';
            if name.get_ref().is_empty()
                || name.get_ref().contains(is_forbidden)
                || value.get_ref().contains('\0')
            {
                return Err((
                    name.span(),
                    format!("{:?} is not the name of a variable", name.get_ref()),
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
                        "{:?} is not one of {}",
                        files.get_ref(),
                        OPEN_FILES_POLICIES.join(", ")
                    ),
                ));
            }
            environment.insert(OPEN_FILES_ENV.to_string(), files.into_inner());
        }
        let spawn_target = match (self.host, self.arch) {
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
            .filter(|count| !(1..=JOB_TASKS_MAX).contains(count.get_ref()))
        {
            return Err((count.span(), format!("count must be 1 to {JOB_TASKS_MAX}")));
        }
        let nul_argument = self
            .arguments
            .iter()
            .find(|argument| argument.get_ref().contains('\0'));
        if let Some(argument) = nul_argument {
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
            task_count: self.count.map(Spanned::into_inner),
            spawn_target,
            working_dir: self
                .directory
                .map(|directory| check_name(directory, "directory"))
                .transpose()?,
            environment,
        })
    }

    /// Encodes the constraints of the job file as one line in the syntax of [`CONSTRAINTS_ENV`].
    fn encode_constraints(&self) -> Result<String, SpannedError> {
        let mut clauses = Vec::new();
        if let Some(wants) = &self.wants {
            clauses.push(check_constraint_text(wants, "wants")?);
        }
        if let Some(rank) = &self.rank {
            clauses.push(format!("rank = {}", check_constraint_text(rank, "rank")?));
        }
        if let Some(work) = &self.work {
            let text = match work.get_ref() {
                WorkValue::Integer(seconds) => seconds.to_string(),
                WorkValue::Float(seconds) => seconds.to_string(),
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
                    format!("{text:?} is not a duration; examples: 600, \"1.5h\""),
                ));
            }
            clauses.push(format!("work = {text}"));
        }
        match self
            .spread
            .as_ref()
            .map(|spread| (spread.get_ref(), spread.span()))
        {
            None | Some((SpreadValue::Flag(false), _)) => {}
            Some((_, span)) if self.same_host => {
                return Err((span, "spread and same-host exclude each other".to_string()));
            }
            Some((SpreadValue::Flag(true), _)) => clauses.push("spread".to_string()),
            Some((SpreadValue::Max(0), span)) => {
                return Err((span, "spread must be at least 1".to_string()));
            }
            Some((SpreadValue::Max(tasks_max), _)) => clauses.push(format!("spread = {tasks_max}")),
        }
        clauses.extend(self.same_host.then(|| "same-host".to_string()));
        clauses.extend(self.barrier.then(|| "barrier".to_string()));
        Ok(clauses.join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FULL_JOB_FILE: &str = r#"# Eight of them.
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

    fn env_strings(request: &SpawnRequest) -> Vec<String> {
        request
            .env
            .iter()
            .map(|entry| String::from_utf8_lossy(entry).into_owned())
            .collect()
    }

    /// A job file fills in only what the spawn request does not specify.
    #[test]
    fn job_file_supplies_defaults_only() {
        let job = JobFile::parse("job.toml", FULL_JOB_FILE).expect("nothing is wrong with it");
        assert_eq!(
            (job.program.as_deref(), job.task_count),
            (Some("worker"), Some(8))
        );
        assert!(job.applies_to("worker") && !job.applies_to("other"));
        let mut request = SpawnRequest {
            program: "worker".into(),
            ..SpawnRequest::default()
        };
        job.apply_to(&mut request);
        assert_eq!(
            (
                request.args.len(),
                request.flags,
                request.where_arg.as_str()
            ),
            (2, 0, ":/data")
        );
        let wants = "SEMPA_WANTS=memory >= 2G; host != h3|h4; rank = -cores; work = 1.5h; spread = 2; barrier";
        assert_eq!(
            env_strings(&request),
            [
                "COLOUR=blue",
                "SEMPA_ENGINE=criu,restart",
                "SEMPA_FILES=copy",
                "SEMPA_STATE=state-{tid}",
                wants
            ]
        );
        let own_env =
            ["COLOUR=red", "SEMPA_WANTS=", "COLOURS=x"].map(|entry| entry.as_bytes().to_vec());
        let (args, place) = (vec![b"-q".to_vec()], "h2:/tmp".to_string());
        let full_request = SpawnRequest {
            args,
            where_arg: place,
            flags: SPAWN_HOST,
            env: own_env.to_vec(),
            ..SpawnRequest::default()
        };
        let mut request = full_request.clone();
        job.apply_to(&mut request);
        assert_eq!(
            (request.args, request.flags, request.where_arg),
            (
                full_request.args,
                full_request.flags,
                full_request.where_arg
            )
        );
        assert_eq!(request.env[..3], own_env);
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
            for (place, expected_place) in [("", name.to_string()), (":/d", format!("{name}:/d"))] {
                let mut request = SpawnRequest {
                    where_arg: place.into(),
                    ..SpawnRequest::default()
                };
                job.apply_to(&mut request);
                assert_eq!((request.flags, request.where_arg), (flag, expected_place));
            }
            let mut request = SpawnRequest {
                where_arg: "?cores >= 4".into(),
                ..SpawnRequest::default()
            };
            job.apply_to(&mut request);
            assert_eq!(
                (request.flags, request.where_arg.as_str()),
                (0, "?cores >= 4")
            );
        }
    }

    #[test]
    fn errors_contain_file_line_and_reason() {
        for (text, expected_error) in [
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
                "job.toml, line 1: wants must be a non-empty text without colons",
            ),
            ("program = ' '", "job.toml, line 1: program is empty"),
            (
                "\n\nwork = 'soon'",
                "job.toml, line 3: \"soon\" is not a duration",
            ),
            ("work = 0", "job.toml, line 1: \"0\" is not a duration"),
            (
                "files = 'cpoy'",
                "job.toml, line 1: \"cpoy\" is not one of shared, copy, refuse",
            ),
            (
                "\nengine = 'steam'",
                "job.toml, line 2: SEMPA_ENGINE: \"steam\"",
            ),
            ("state = 'a:a'", "job.toml, line 1: SEMPA_STATE: \"a:a\""),
            (
                "[environment]\n'A=B' = ''",
                "job.toml, line 2: \"A=B\" is not the name of a variable",
            ),
            ("= 1", "job.toml, line 1: "),
        ] {
            let error = JobFile::parse("job.toml", text)
                .expect_err(text)
                .to_string();
            assert!(
                error.starts_with(expected_error) && error.ends_with("; nothing is started"),
                "{error}"
            );
            assert!(!error.contains('\n'), "{error:?}");
        }
        let oversized_text = "#".repeat(JOB_FILE_BYTES_MAX + 1);
        assert!(
            JobFile::parse("f", &oversized_text)
                .expect_err("too long")
                .reason
                .contains("are allowed")
        );
        assert_eq!(JobFile::parse("f", ""), Ok(JobFile::default()));
    }
}
