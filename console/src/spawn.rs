//! Parses `spawn` and builds the spawn request.

use crate::parse::ParseError;
use libpvm::Error;
use sempa_proto::PvmError;
use sempa_proto::job::JobFile;
use sempa_proto::task::{
    SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_DEBUG, SPAWN_HOST, SPAWN_NO_PARENT, Sink, SpawnRequest,
};

/// A parsed `spawn` command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SpawnCommand {
    /// Job file with defaults for everything that the command does not set.
    pub(crate) job_file: Option<String>,
    /// Number of tasks. Defaults to the job file's number, or 1.
    pub(crate) count: Option<u32>,
    /// `PvmTask*` bits. [`SPAWN_NO_PARENT`] is always set: the tasks do not see a parent.
    pub(crate) flags: i32,
    /// Host or architecture. Empty for any.
    pub(crate) location: String,
    /// Working directory. Empty for the host's default.
    pub(crate) directory: String,
    pub(crate) output: Output,
    /// Destination of trace records. `None` if the tasks are not traced.
    pub(crate) trace: Option<TraceOutput>,
    /// The program. May be empty if a job file names it.
    pub(crate) program: String,
    pub(crate) args: Vec<String>,
}

/// Destination of the output of spawned tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// The log of the virtual machine.
    Log,
    /// The console, which numbers the spawn as a job.
    Console,
    /// A file that must not exist yet.
    NewFile(String),
    /// A file that output is appended to.
    AppendedFile(String),
}

/// Destination of the trace records of spawned tasks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TraceOutput {
    Console,
    /// A file that must not exist yet.
    NewFile(String),
}

impl SpawnCommand {
    /// Reads the job file and returns the command with its defaults applied.
    ///
    /// # Errors
    /// Fails if the job file cannot be read or is invalid, or if no program is named.
    pub(crate) fn with_job_file(&self) -> Result<(SpawnCommand, JobFile), Error> {
        let Some(name) = &self.job_file else {
            return Ok((self.clone(), JobFile::default()));
        };
        let job = libpvm::job::read(name.as_ref())?;
        let mut spawn = self.clone();
        spawn.count = spawn.count.or(job.count);
        if spawn.program.is_empty() {
            let no_program = || {
                Error::new(
                    PvmError::BadParam,
                    format!("{name} names no program, and none was given"),
                )
            };
            spawn.program = job.program.clone().ok_or_else(no_program)?;
        }
        Ok((spawn, job))
    }

    /// Builds the request. `env` is added to the environment.
    pub(crate) fn request(
        &self,
        job: &JobFile,
        output: Sink,
        trace: Sink,
        env: Vec<Vec<u8>>,
    ) -> SpawnRequest {
        let place = if self.directory.is_empty() {
            self.location.clone()
        } else {
            format!("{}:{}", self.location, self.directory)
        };
        let mut request = SpawnRequest {
            file: self.program.clone(),
            args: self
                .args
                .iter()
                .map(|arg| arg.clone().into_bytes())
                .collect(),
            flags: self.flags,
            place,
            count: self.count.unwrap_or(1),
            env,
            output,
            trace,
        };
        job.apply_to(&mut request);
        request
    }
}

/// Returns how many words after `spawn` are options. The program and its arguments follow them.
pub(crate) fn option_count(args: &[String]) -> usize {
    let mut at = 0;
    while args.get(at).is_some_and(|word| word.starts_with('-')) {
        at += if args[at] == "--job" { 2 } else { 1 };
    }
    at.min(args.len())
}

/// Parses the words after `spawn`.
pub(crate) fn parse(args: &[String]) -> Result<SpawnCommand, ParseError> {
    let mut spawn = SpawnCommand {
        job_file: None,
        count: None,
        flags: SPAWN_NO_PARENT,
        location: String::new(),
        directory: String::new(),
        output: Output::Log,
        trace: None,
        program: String::new(),
        args: Vec::new(),
    };
    let mut rest = args;
    while let [first, more @ ..] = rest {
        let Some(option) = first.strip_prefix('-') else {
            break;
        };
        rest = more;
        if option == "-job" {
            let [file, more @ ..] = rest else {
                return Err(ParseError::OnlyOptions);
            };
            (spawn.job_file, rest) = (Some(file.clone()), more);
        } else {
            spawn.apply_option(option)?;
        }
    }
    match rest {
        [file, words @ ..] => (spawn.program, spawn.args) = (file.clone(), words.to_vec()),
        [] if spawn.job_file.is_some() => {}
        [] => return Err(ParseError::OnlyOptions),
    }
    Ok(spawn)
}

impl SpawnCommand {
    /// Applies one option, given without its leading `-`.
    fn apply_option(&mut self, option: &str) -> Result<(), ParseError> {
        let unknown = || ParseError::UnknownFlag(option.to_string());
        if option.is_empty() {
            return Err(ParseError::LoneDash);
        }
        if let Some(file) = option.strip_prefix(">>") {
            self.output = nonempty(file).map_or(Output::Console, Output::AppendedFile);
        } else if let Some(file) = option.strip_prefix('>') {
            self.output = nonempty(file).map_or(Output::Console, Output::NewFile);
        } else if let Some(file) = option.strip_prefix('@') {
            self.trace = Some(nonempty(file).map_or(TraceOutput::Console, TraceOutput::NewFile));
        } else if option == "?" {
            self.flags |= SPAWN_DEBUG;
        } else if option == "~" {
            self.flags |= SPAWN_COMPLEMENT;
        } else if let Some(file) = option.strip_prefix("-job=") {
            self.job_file = Some(nonempty(file).ok_or_else(unknown)?);
        } else if let Some(host) = option.strip_prefix("-host=") {
            self.set_location(SPAWN_HOST, host).ok_or_else(unknown)?;
        } else if option.starts_with(|c: char| c.is_ascii_digit()) {
            let wanted =
                "a number of tasks: for a host whose name starts with a digit write --host=NAME";
            let word = option.to_string();
            let count = option.parse().ok().filter(|count| *count > 0);
            self.count = Some(count.ok_or(ParseError::WrongType {
                command: "spawn",
                word,
                expected: wanted,
            })?);
        } else if let Some(directory) = option.strip_prefix(':') {
            self.directory = nonempty(directory).ok_or_else(unknown)?;
        } else if option.starts_with(|c: char| c.is_uppercase()) {
            self.set_location(SPAWN_ARCH, option).ok_or_else(unknown)?;
        } else if option.starts_with(|c: char| c == '.' || c.is_lowercase()) {
            self.set_location(SPAWN_HOST, option).ok_or_else(unknown)?;
        } else {
            return Err(unknown());
        }
        Ok(())
    }

    /// Sets the location from `place` or `place:directory`. Returns `None` if the place is empty.
    fn set_location(&mut self, flag: i32, place: &str) -> Option<()> {
        let (place, directory) = place.split_once(':').unwrap_or((place, ""));
        self.location = nonempty(place)?;
        self.flags = self.flags & !(SPAWN_HOST | SPAWN_ARCH) | flag;
        if !directory.is_empty() {
            self.directory = directory.to_string();
        }
        Some(())
    }
}

fn nonempty(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::words::split_words;

    fn spawn(line: &str) -> SpawnCommand {
        parse(&split_words(line).expect(line)).expect(line)
    }

    fn error(line: &str) -> String {
        parse(&split_words(line).expect(line))
            .expect_err(line)
            .to_string()
    }

    /// Count, location, directory and arguments are distinguished.
    #[test]
    fn spawn_options_and_arguments_parse() {
        let three = spawn("-3 hello -v --x");
        assert_eq!((three.count, three.program.as_str()), (Some(3), "hello"));
        assert_eq!(
            three.args,
            ["-v", "--x"],
            "what follows the program belongs to it"
        );
        assert_eq!(three.flags, SPAWN_NO_PARENT);
        let request = |line: &str| {
            let request = spawn(line).request(
                &JobFile::default(),
                Sink::default(),
                Sink::default(),
                Vec::new(),
            );
            (request.flags & !SPAWN_NO_PARENT, request.place)
        };
        assert_eq!(request("hello"), (0, String::new()));
        assert_eq!(request("-h2 hello"), (SPAWN_HOST, "h2".into()));
        assert_eq!(request("-h2:/var hello"), (SPAWN_HOST, "h2:/var".into()));
        assert_eq!(request("-. hello"), (SPAWN_HOST, ".".into()));
        assert_eq!(request("-.:/tmp hello"), (SPAWN_HOST, ".:/tmp".into()));
        assert_eq!(
            request("-LINUX64 -:/var hello"),
            (SPAWN_ARCH, "LINUX64:/var".into())
        );
        assert_eq!(request("-:/var hello"), (0, ":/var".into()));
        assert_eq!(
            request("--host=10.0.0.2:/d hello"),
            (SPAWN_HOST, "10.0.0.2:/d".into())
        );
        assert_eq!(
            request("-~ -h2 -? hello"),
            (SPAWN_HOST | SPAWN_COMPLEMENT | SPAWN_DEBUG, "h2".into())
        );
        assert_eq!(
            request("-LINUX64 -h2 hello"),
            (SPAWN_HOST, "h2".into()),
            "the last one counts"
        );
    }

    /// Output goes to the log, the console or a file.
    #[test]
    fn output_options_parse() {
        assert_eq!(spawn("hello").output, Output::Log);
        assert_eq!(spawn("-> hello").output, Output::Console);
        assert_eq!(spawn("->out hello").output, Output::NewFile("out".into()));
        assert_eq!(
            spawn("->>out hello").output,
            Output::AppendedFile("out".into())
        );
        assert_eq!(
            spawn("->> hello").output,
            Output::Console,
            "as PVM's console takes it"
        );
        assert_eq!(spawn("hello").trace, None);
        assert_eq!(spawn("-@ -> hello").trace, Some(TraceOutput::Console));
        assert_eq!(
            spawn("-@out hello").trace,
            Some(TraceOutput::NewFile("out".into()))
        );
    }

    /// A job file supplies what the command does not set.
    #[test]
    fn job_file_supplies_defaults() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("job.toml");
        let write = |text: &str| std::fs::write(&path, text).expect("it can be written");
        let path = path.display();
        write(
            "program = \"worker\"\narguments = [\"-v\"]\ncount = 3\nhost = \"h2\"\nwants = \"cores >= 2\"\n",
        );
        let request = |line: &str| {
            let (spawn, job) = spawn(line).with_job_file().expect(line);
            let exports = vec![b"SEMPA_WANTS=cores >= 9".to_vec()];
            let all = spawn.request(&job, Sink::default(), Sink::default(), Vec::new());
            let exported = spawn.request(&job, Sink::default(), Sink::default(), exports.clone());
            assert_eq!(exported.env, exports, "what is exported goes first");
            let words: Vec<String> = all
                .args
                .iter()
                .map(|arg| String::from_utf8_lossy(arg).into_owned())
                .collect();
            assert_eq!(all.env, [b"SEMPA_WANTS=cores >= 2"]);
            (all.file, words.join(" "), all.count, all.place)
        };
        let wanted = |file: &str, args: &str, count, place: &str| {
            (file.into(), args.into(), count, place.into())
        };
        assert_eq!(
            request(&format!("--job {path}")),
            wanted("worker", "-v", 3, "h2")
        );
        assert_eq!(
            request(&format!("--job={path}")),
            wanted("worker", "-v", 3, "h2")
        );
        assert_eq!(
            request(&format!("-2 --job {path} -h3 other")),
            wanted("other", "-v", 2, "h3")
        );
        assert_eq!(
            request(&format!("--job {path} other -q")),
            wanted("other", "-q", 3, "h2")
        );
        let options = |line: &str| option_count(&split_words(line).expect(line));
        assert_eq!(
            (
                options("--job f --json"),
                options("-3 --job f x --json"),
                options("--job")
            ),
            (3, 3, 1)
        );
        let error = |line: &str| spawn(line).with_job_file().expect_err(line).to_string();
        write("count = 3\n");
        assert!(error(&format!("--job {path}")).ends_with("names no program, and none was given"));
        write("\ncuont = 3\n");
        assert!(
            error(&format!("--job {path} x")).contains("job.toml, line 2: unknown field `cuont`")
        );
        assert!(error("--job /nowhere/at/all").contains("/nowhere/at/all cannot be read"));
    }

    /// Errors name the wrong option.
    #[test]
    fn errors_name_the_wrong_option() {
        for line in ["-3", "->", "-h2", "--job"] {
            assert_eq!(error(line), "incorrect arg count", "{line}");
        }
        assert!(error("- hello").starts_with("unknown flag -"));
        assert_eq!(error("-- hello"), "unknown flag --");
        assert_eq!(error("--job= hello"), "unknown flag --job=");
        for line in ["-0 hello", "-10.0.0.1 hello"] {
            assert!(error(line).contains("is not a number of tasks"), "{line}");
        }
    }
}
