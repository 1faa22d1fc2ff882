//! The options of `spawn`.

use crate::parse::ParseError;
use sempa_proto::task::{SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_DEBUG, SPAWN_HOST, SPAWN_NO_PARENT, Sink, SpawnRequest};

/// What `spawn` is asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Spawn {
    /// Number of tasks.
    pub(crate) count: u32,
    /// `PvmTask*` bits; the console never tells who the parent is.
    pub(crate) flags: i32,
    /// Host or architecture; empty for any.
    pub(crate) place: String,
    /// Working directory; empty for the host's own.
    pub(crate) directory: String,
    /// Where the output goes.
    pub(crate) output: Output,
    /// Where trace records go; none: the tasks are not traced.
    pub(crate) trace: Option<TraceOutput>,
    /// The program.
    pub(crate) file: String,
    /// Its arguments.
    pub(crate) args: Vec<String>,
}

/// Where the output of spawned tasks goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Output {
    /// Into the log of the virtual machine.
    Log,
    /// To the console, as a job.
    Console,
    /// Into a file that must not exist yet.
    New(String),
    /// To the end of a file.
    Append(String),
}

/// Where trace records of spawned tasks go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TraceOutput {
    /// To the console.
    Console,
    /// Into a file that must not exist yet.
    New(String),
}

impl Spawn {
    /// The request, with output and trace records going to sinks and `env` added to the environment.
    pub(crate) fn request(&self, output: Sink, trace: Sink, env: Vec<Vec<u8>>) -> SpawnRequest {
        let place =
            if self.directory.is_empty() { self.place.clone() } else { format!("{}:{}", self.place, self.directory) };
        SpawnRequest {
            file: self.file.clone(),
            args: self.args.iter().map(|arg| arg.clone().into_bytes()).collect(),
            flags: self.flags,
            place,
            count: self.count,
            env,
            output,
            trace,
        }
    }
}

/// Reads what follows the word `spawn`.
pub(crate) fn parse(args: &[String]) -> Result<Spawn, ParseError> {
    let mut spawn = Spawn {
        count: 1,
        flags: SPAWN_NO_PARENT,
        place: String::new(),
        directory: String::new(),
        output: Output::Log,
        trace: None,
        file: String::new(),
        args: Vec::new(),
    };
    let mut rest = args;
    while let [first, more @ ..] = rest {
        let Some(option) = first.strip_prefix('-') else { break };
        spawn.option(option)?;
        rest = more;
    }
    let [file, words @ ..] = rest else { return Err(ParseError::OnlyOptions) };
    spawn.file = file.clone();
    spawn.args = words.to_vec();
    Ok(spawn)
}

impl Spawn {
    /// Takes one option without its leading `-`.
    fn option(&mut self, option: &str) -> Result<(), ParseError> {
        let unknown = || ParseError::UnknownFlag(option.to_string());
        if option.is_empty() {
            return Err(ParseError::LoneDash);
        }
        if let Some(file) = option.strip_prefix(">>") {
            self.output = nonempty(file).map_or(Output::Console, Output::Append);
        } else if let Some(file) = option.strip_prefix('>') {
            self.output = nonempty(file).map_or(Output::Console, Output::New);
        } else if let Some(file) = option.strip_prefix('@') {
            self.trace = Some(nonempty(file).map_or(TraceOutput::Console, TraceOutput::New));
        } else if option == "?" {
            self.flags |= SPAWN_DEBUG;
        } else if option == "~" {
            self.flags |= SPAWN_COMPLEMENT;
        } else if let Some(host) = option.strip_prefix("-host=") {
            self.put(SPAWN_HOST, host).ok_or_else(unknown)?;
        } else if option.starts_with(|c: char| c.is_ascii_digit()) {
            let wanted = "a number of tasks: for a host whose name starts with a digit write --host=NAME";
            let word = option.to_string();
            let count = option.parse().ok().filter(|count| *count > 0);
            self.count = count.ok_or(ParseError::NotA { command: "spawn", word, wanted })?;
        } else if let Some(directory) = option.strip_prefix(':') {
            self.directory = nonempty(directory).ok_or_else(unknown)?;
        } else if option.starts_with(|c: char| c.is_uppercase()) {
            self.put(SPAWN_ARCH, option).ok_or_else(unknown)?;
        } else if option.starts_with(|c: char| c == '.' || c.is_lowercase()) {
            self.put(SPAWN_HOST, option).ok_or_else(unknown)?;
        } else {
            return Err(unknown());
        }
        Ok(())
    }

    /// Takes `place` or `place:directory`; `None` when the place is empty.
    fn put(&mut self, flag: i32, place: &str) -> Option<()> {
        let (place, directory) = place.split_once(':').unwrap_or((place, ""));
        self.place = nonempty(place)?;
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
    use crate::words::split;

    fn spawn(line: &str) -> Spawn {
        parse(&split(line).expect(line)).expect(line)
    }

    fn error(line: &str) -> String {
        parse(&split(line).expect(line)).expect_err(line).to_string()
    }

    #[test]
    fn count_place_directory_and_arguments_are_told_apart() {
        let three = spawn("-3 hello -v --x");
        assert_eq!((three.count, three.file.as_str()), (3, "hello"));
        assert_eq!(three.args, ["-v", "--x"], "what follows the program belongs to it");
        assert_eq!(three.flags, SPAWN_NO_PARENT);
        let request = |line: &str| {
            let request = spawn(line).request(Sink::default(), Sink::default(), Vec::new());
            (request.flags & !SPAWN_NO_PARENT, request.place)
        };
        assert_eq!(request("hello"), (0, String::new()));
        assert_eq!(request("-h2 hello"), (SPAWN_HOST, "h2".into()));
        assert_eq!(request("-h2:/var hello"), (SPAWN_HOST, "h2:/var".into()));
        assert_eq!(request("-. hello"), (SPAWN_HOST, ".".into()));
        assert_eq!(request("-.:/tmp hello"), (SPAWN_HOST, ".:/tmp".into()));
        assert_eq!(request("-LINUX64 -:/var hello"), (SPAWN_ARCH, "LINUX64:/var".into()));
        assert_eq!(request("-:/var hello"), (0, ":/var".into()));
        assert_eq!(request("--host=10.0.0.2:/d hello"), (SPAWN_HOST, "10.0.0.2:/d".into()));
        assert_eq!(request("-~ -h2 -? hello"), (SPAWN_HOST | SPAWN_COMPLEMENT | SPAWN_DEBUG, "h2".into()));
        assert_eq!(request("-LINUX64 -h2 hello"), (SPAWN_HOST, "h2".into()), "the last one counts");
    }

    #[test]
    fn output_goes_to_the_log_the_console_or_a_file() {
        assert_eq!(spawn("hello").output, Output::Log);
        assert_eq!(spawn("-> hello").output, Output::Console);
        assert_eq!(spawn("->out hello").output, Output::New("out".into()));
        assert_eq!(spawn("->>out hello").output, Output::Append("out".into()));
        assert_eq!(spawn("->> hello").output, Output::Console, "as PVM's console takes it");
        assert_eq!(spawn("hello").trace, None);
        assert_eq!(spawn("-@ -> hello").trace, Some(TraceOutput::Console));
        assert_eq!(spawn("-@out hello").trace, Some(TraceOutput::New("out".into())));
    }

    #[test]
    fn mistakes_are_named() {
        for line in ["-3", "->", "-h2"] {
            assert_eq!(error(line), "incorrect arg count", "{line}");
        }
        assert!(error("- hello").starts_with("unknown flag -"));
        assert_eq!(error("-- hello"), "unknown flag --");
        for line in ["-0 hello", "-10.0.0.1 hello"] {
            assert!(error(line).contains("is not a number of tasks"), "{line}");
        }
    }
}
