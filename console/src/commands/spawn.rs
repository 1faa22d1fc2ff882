//! `spawn`: starts tasks, as a job if their output or trace records are collected.

use crate::command::{CommandSpec, Completion, ParsedCommand, ShellOptions, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::json;
use crate::output::tables::host_name;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::session::job_output::{
    JobOutput, OutputDestination, TAG_OUTPUT_BASE, TAG_TRACE_BASE, TraceDestination, console_sink,
};
use crate::virtual_machine::{VirtualMachine, next_event_number};
use libpvm::spawn::{TC_SIBLINGS, siblings_body};
use libpvm::{Body, Error};
use sempa_proto::event::EventKind;
use sempa_proto::job::JobFile;
use sempa_proto::message::CTX_TASK_CONTROL;
use sempa_proto::rm::{DecisionKind, PlacementRule, RmQuery, RmReply};
use sempa_proto::table::HostTable;
use sempa_proto::task::{
    SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_DEBUG, SPAWN_HOST, SPAWN_NO_PARENT, SPAWN_STRICT_DIR, Sink,
    SpawnRequest,
};
use sempa_proto::{Message, PvmError, Tid};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::io;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "spawn",
    summary: "Start tasks",
    detail: "Syntax:  spawn [ options ] file [ arg ... ]\n\
                 Options:  -(count)       number of tasks, 1 by default\n          \
                 -(host)        on this host; -. is the console's own\n          \
                 -(ARCH)        on hosts of this architecture\n          \
                 -(host):(wd)   there, in directory wd\n          \
                 -:(wd)         anywhere, in directory wd\n          \
                 --host=(name)  as -(host), for names that start with a digit\n          \
                 -~             on any host except that one\n          \
                 -?             under the debugger\n          \
                 ->             show the output here, as a job\n          \
                 ->(file)       write the output to a new file\n          \
                 ->>(file)      append the output to a file\n          \
                 --raw          as ->, without the task's number before each line\n          \
                 -@             trace the job, show the records here\n          \
                 -@(file)       trace the job, write the records to a new file\n          \
                 --job (file)   take what is not given here from a job file: program, arguments, count, constraints ...\n\
                 In a shell, '->' needs quotes; 'pvm spawn' then ends with the tasks. Its exit status is 0 if all\n\
                 tasks that it started end with 0, otherwise the status of the first one listed that does not:\n\
                 the task's own, 128 plus the number of a signal, or 1 if the task was lost with its host.\n",
    parse: |args| {
        if args.is_empty() {
            return Err(ParseError::WrongArgs("spawn"));
        }
        parse(args).map(ParsedCommand::vm_command)
    },
    own_word_count: option_count,
    completion: Completion::WordDependent(|args, word| {
        if args.iter().all(|arg| arg.starts_with('-')) {
            option_or_program_kind(word)
        } else {
            (0, WordKind::File)
        }
    }),
    ..CommandSpec::DEFAULT
};

/// Number of the newest events among which the reasons of a refused spawn are found.
const REFUSAL_EVENTS_MAX: u32 = 256;

/// A parsed `spawn` command.
#[derive(Clone, Debug, PartialEq, Eq)]
struct SpawnCommand {
    /// Job file with defaults for all values that the command does not set.
    job_file: Option<String>,
    /// Number of tasks. Defaults to the job file's number, or 1.
    task_count: Option<u32>,
    /// `PvmTask*` bits. [`SPAWN_NO_PARENT`] is always set: the tasks do not see a parent.
    /// [`SPAWN_STRICT_DIR`] is always set: a missing working directory is an error.
    flags: i32,
    /// Name of a host or of an architecture, depending on `flags`. Empty if any host may be used.
    location: String,
    /// Working directory. Empty for the host's default.
    working_dir: String,
    output: OutputDestination,
    /// True if the lines of the output have no prefix.
    is_raw: bool,
    /// Destination of trace records. `None` if the tasks are not traced.
    trace: Option<TraceDestination>,
    /// The program. May be empty if a job file names it.
    program: String,
    args: Vec<String>,
}

/// Returns how many words after `spawn` are options. The program and its arguments follow the
/// options.
fn option_count(args: &[String]) -> usize {
    let mut count = 0;
    while args.get(count).is_some_and(|word| word.starts_with('-')) {
        count += if args[count] == "--job" { 2 } else { 1 };
    }
    count.min(args.len())
}

/// Returns the number of bytes before the name in an option or in the program of `spawn`, and the
/// kind of the name.
fn option_or_program_kind(word: &str) -> (usize, WordKind) {
    let prefixes = [
        ("->>", WordKind::File),
        ("->", WordKind::File),
        ("-@", WordKind::File),
        ("--host=", WordKind::Host),
        ("--job=", WordKind::File),
        ("-", WordKind::Host),
    ];
    prefixes
        .into_iter()
        .find(|(prefix, _)| word.starts_with(prefix))
        .map_or((0, WordKind::File), |(prefix, kind)| (prefix.len(), kind))
}

/// Parses the words after `spawn`.
fn parse(args: &[String]) -> Result<SpawnCommand, ParseError> {
    let mut spawn = SpawnCommand {
        job_file: None,
        task_count: None,
        flags: SPAWN_NO_PARENT | SPAWN_STRICT_DIR,
        location: String::new(),
        working_dir: String::new(),
        output: OutputDestination::Log,
        is_raw: false,
        trace: None,
        program: String::new(),
        args: Vec::new(),
    };
    let mut rest = args;
    while let [first_word, remaining_words @ ..] = rest {
        let Some(option) = first_word.strip_prefix('-') else {
            break;
        };
        rest = remaining_words;
        if option == "-job" {
            let [file, remaining_words @ ..] = rest else {
                return Err(ParseError::OnlyOptions);
            };
            (spawn.job_file, rest) = (Some(file.clone()), remaining_words);
        } else {
            spawn.apply_option(option)?;
        }
    }
    if spawn.is_raw && spawn.output == OutputDestination::Log {
        spawn.output = OutputDestination::Console;
    }
    match rest {
        [file, words @ ..] => (spawn.program, spawn.args) = (file.clone(), words.to_vec()),
        [] if spawn.job_file.is_some() => {}
        [] => return Err(ParseError::OnlyOptions),
    }
    Ok(spawn)
}

impl SpawnCommand {
    /// Applies `option`, which is given without its leading `-`.
    fn apply_option(&mut self, option: &str) -> Result<(), ParseError> {
        let unknown_flag_error = || ParseError::UnknownFlag(option.to_string());
        if option.is_empty() {
            return Err(ParseError::LoneDash);
        }
        if let Some(file) = option.strip_prefix(">>") {
            self.output = nonempty_text(file)
                .map_or(OutputDestination::Console, OutputDestination::AppendedFile);
        } else if let Some(file) = option.strip_prefix('>') {
            self.output =
                nonempty_text(file).map_or(OutputDestination::Console, OutputDestination::NewFile);
        } else if let Some(file) = option.strip_prefix('@') {
            self.trace = Some(
                nonempty_text(file).map_or(TraceDestination::Console, TraceDestination::NewFile),
            );
        } else if option == "-raw" {
            self.is_raw = true;
        } else if option == "?" {
            self.flags |= SPAWN_DEBUG;
        } else if option == "~" {
            self.flags |= SPAWN_COMPLEMENT;
        } else if let Some(file) = option.strip_prefix("-job=") {
            self.job_file = Some(nonempty_text(file).ok_or_else(unknown_flag_error)?);
        } else if let Some(host) = option.strip_prefix("-host=") {
            self.set_location(SPAWN_HOST, host)
                .ok_or_else(unknown_flag_error)?;
        } else if option.starts_with(|c: char| c.is_ascii_digit()) {
            let expected_type =
                "a number of tasks: for a host whose name starts with a digit write --host=NAME";
            let word = option.to_string();
            let count = option.parse().ok().filter(|count| *count > 0);
            self.task_count = Some(count.ok_or(ParseError::WrongType {
                command: "spawn",
                word,
                expected: expected_type,
            })?);
        } else if let Some(directory) = option.strip_prefix(':') {
            self.working_dir = nonempty_text(directory).ok_or_else(unknown_flag_error)?;
        } else if option.starts_with(|c: char| c.is_uppercase()) {
            self.set_location(SPAWN_ARCH, option)
                .ok_or_else(unknown_flag_error)?;
        } else if option.starts_with(|c: char| c == '.' || c.is_lowercase()) {
            self.set_location(SPAWN_HOST, option)
                .ok_or_else(unknown_flag_error)?;
        } else {
            return Err(unknown_flag_error());
        }
        Ok(())
    }

    /// Sets the location from `location`, which may have the form `LOCATION:DIRECTORY`. `flag` is
    /// the `PvmTask*` bit for a host or an architecture. Returns `None` if the location is empty.
    fn set_location(&mut self, flag: i32, location: &str) -> Option<()> {
        let (location, directory) = location.split_once(':').unwrap_or((location, ""));
        self.location = nonempty_text(location)?;
        self.flags = self.flags & !(SPAWN_HOST | SPAWN_ARCH) | flag;
        if !directory.is_empty() {
            self.working_dir = directory.to_string();
        }
        Some(())
    }

    /// Reads the job file and returns the command with its defaults applied.
    ///
    /// # Errors
    /// Fails if the job file cannot be read or is invalid, or if no program is named.
    fn apply_job_file(&self) -> Result<(Self, JobFile), Error> {
        let Some(name) = &self.job_file else {
            return Ok((self.clone(), JobFile::default()));
        };
        let job = libpvm::job::read(name.as_ref())?;
        let mut spawn = self.clone();
        spawn.task_count = spawn.task_count.or(job.task_count);
        if spawn.program.is_empty() {
            let no_program_error = || {
                Error::new(
                    PvmError::BadParam,
                    format!("{name} names no program, and none was given"),
                )
            };
            spawn.program = job.program.clone().ok_or_else(no_program_error)?;
        }
        Ok((spawn, job))
    }

    /// Builds the request. `job` supplies values that this command does not set. `env` contains
    /// environment entries as `NAME=VALUE`; these entries precede the entries of the job file.
    fn build_request(
        &self,
        job: &JobFile,
        output: Sink,
        trace: Sink,
        env: Vec<Vec<u8>>,
    ) -> SpawnRequest {
        let location_text = if self.working_dir.is_empty() {
            self.location.clone()
        } else {
            format!("{}:{}", self.location, self.working_dir)
        };
        let mut request = SpawnRequest {
            program: self.program.clone(),
            args: self
                .args
                .iter()
                .map(|arg| arg.clone().into_bytes())
                .collect(),
            flags: self.flags,
            where_arg: location_text,
            task_count: self.task_count.unwrap_or(1),
            env,
            output_sink: output,
            trace_sink: trace,
            past: Default::default(),
        };
        job.apply_to(&mut request);
        request
    }
}

fn nonempty_text(text: &str) -> Option<String> {
    (!text.is_empty()).then(|| text.to_string())
}

impl VmCommand for SpawnCommand {
    fn run_before_joining(&self, options: ShellOptions) -> io::Result<Option<Outcome>> {
        let shows_output = self.output == OutputDestination::Console
            || self.trace == Some(TraceDestination::Console);
        Ok((options.prints_json && shows_output).then(|| {
            Outcome::from_error(
                "spawn: output and records of tasks are not JSON: write them to files with ->FILE and -@FILE",
            )
        }))
    }

    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let (spawn, job_file) = &self.apply_job_file()?;
        let job_output = match JobOutput::open(&spawn.output, spawn.is_raw, spawn.trace.as_ref()) {
            Ok(opened) => opened,
            Err(line) => return Ok(Outcome::from_refusal(line)),
        };
        let is_job = spawn.output != OutputDestination::Log || job_output.is_traced();
        let job = is_job.then(|| session.jobs.create_job());
        let console = session.vm.tid();
        let sink = |base: i32| {
            job.map_or_else(Sink::default, |job| {
                console_sink(console, base + job.cast_signed())
            })
        };
        let is_traced = job_output.is_traced();
        let trace = if is_traced {
            sink(TAG_TRACE_BASE)
        } else {
            Sink::default()
        };
        let mut env = session.exported_environment();
        if is_traced {
            env.splice(..0, session.trace_variables());
        }
        let results =
            session
                .vm
                .spawn(spawn.build_request(job_file, sink(TAG_OUTPUT_BASE), trace, env));
        let mut text = String::new();
        if let Some(job) = job {
            session.job_outputs.insert(job, job_output);
            text.push_str(&format!("[{job}]\n"));
            text.push_str(&session.start_trace(job));
            let tids = results.iter().flatten().flatten().copied();
            // Messages are handled only between commands. Therefore no output of the job has been
            // handled yet, and `session.jobs` has recorded no end of a task of the job.
            session.jobs.record_spawn(job, tids);
            session.watch_tasks(job);
            if !session.jobs.contains(job) {
                session.job_outputs.remove(&job);
            }
        }
        let results = results?;
        send_siblings(&session.vm, &results);
        text.push_str(&results_text(&results));
        if spawn.is_raw && !session.is_interactive {
            // Standard output contains only what the tasks write. Errors go to standard error.
            text.clear();
        }
        let mut outcome = Outcome::with_json(
            text,
            results_json(job, &results),
            results.iter().any(Result::is_err),
        );
        let refusals = if outcome.failed {
            read_refusals(&session.vm, spawn)?
        } else {
            Vec::new()
        };
        if !refusals.is_empty() {
            outcome.errors.extend(refusals);
            return Ok(outcome);
        }
        let errors: BTreeSet<i32> = results
            .iter()
            .filter_map(|result| result.err().map(PvmError::code))
            .collect();
        for error in errors.into_iter().filter_map(PvmError::from_code) {
            let limit = (error == PvmError::OutOfRes)
                .then(|| exceeded_limit(&session.vm))
                .flatten();
            outcome.errors.push(match limit {
                Some(limit) => format!("spawn {}: {limit}", spawn.program),
                None => spawn_error_text(spawn, error),
            });
        }
        if results.contains(&Err(PvmError::NoHost)) {
            let table = session.vm.hosts()?;
            outcome.errors.extend(location_hint(spawn, &table));
        }
        Ok(outcome)
    }
}

/// Returns the limit of the resource manager that has refused the console's last spawn; `None` if
/// another reason has, or if there is no resource manager.
fn exceeded_limit(machine: &dyn VirtualMachine) -> Option<String> {
    let console = machine.tid();
    let reply = machine.ask_rm(&RmQuery::TaskDecisions(console)).ok()?;
    let RmReply::Decisions { decisions, .. } = reply else {
        return None;
    };
    let newest_attempts = decisions
        .iter()
        .rev()
        .find_map(|decision| match &decision.kind {
            DecisionKind::Spawn {
                requested_by,
                attempts,
                ..
            } if *requested_by == console => Some(attempts),
            _ => None,
        });
    let last_attempt = newest_attempts?.last()?;
    (last_attempt.rule == PlacementRule::Limit).then(|| format!("refused: {}", last_attempt.reason))
}

/// Sends the tids of all tasks of a spawn to each of these tasks, as the library of a parent does.
fn send_siblings(machine: &dyn VirtualMachine, results: &[Result<Tid, PvmError>]) {
    let tids: Vec<Tid> = results.iter().flatten().copied().collect();
    let (src, Body { enc, bytes }) = (machine.tid(), siblings_body(&tids));
    for dst in tids {
        let (ctx, tag, body) = (CTX_TASK_CONTROL, TC_SIBLINGS, bytes.clone());
        // A task that has already ended needs no siblings.
        let _ = machine.send(Message {
            src,
            dst,
            ctx,
            tag,
            wid: 0,
            enc,
            body,
        });
    }
}

/// Formats the results of `spawn`, which follow the number of the job in the output.
fn results_text(results: &[Result<Tid, PvmError>]) -> String {
    let mut out = format!(
        "{} successful\n",
        results.iter().filter(|result| result.is_ok()).count()
    );
    for result in results {
        match result {
            Ok(tid) => out += &format!("{tid}\n"),
            Err(error) => out += &format!("{error}\n"),
        }
    }
    out
}

/// Returns the output of `spawn` as JSON. `job` is the job's number if output or records are
/// collected.
fn results_json(job: Option<u32>, results: &[Result<Tid, PvmError>]) -> Value {
    let result_json = |result: &Result<Tid, PvmError>| match result {
        Ok(tid) => json!({ "tid": tid.to_string() }),
        Err(code) => json!({ "error": json::error(*code) }),
    };
    json!({ "job": job, "results": results.iter().map(result_json).collect::<Vec<_>>() })
}

/// Returns the reasons that hosts and the resource manager have recorded for the refusal of the
/// spawn, each once.
fn read_refusals(machine: &dyn VirtualMachine, spawn: &SpawnCommand) -> Result<Vec<String>, Error> {
    let table = machine.hosts()?;
    let first_number = next_event_number(machine).saturating_sub(u64::from(REFUSAL_EVENTS_MAX));
    let events = machine.events(first_number, REFUSAL_EVENTS_MAX)?;
    let refusals = events.into_iter().filter_map(|event| match event.kind {
        EventKind::SpawnRefused {
            host,
            spawner,
            name,
            why,
        } if spawner == machine.tid() && name == spawn.program => Some(format!(
            "spawn {name}: {}: {why}; nothing was started there",
            host_name(&table, host)
        )),
        _ => None,
    });
    let distinct_refusals: BTreeSet<String> = refusals.collect();
    Ok(distinct_refusals.into_iter().collect())
}

/// Explains the options for a location after a spawn that found no host. `None` if the spawn named
/// no host.
fn location_hint(spawn: &SpawnCommand, table: &HostTable) -> Option<String> {
    if spawn.flags & SPAWN_HOST == 0 || table.find_by_name(&spawn.location).is_some() {
        return None;
    }
    let location = &spawn.location;
    // Options of other programs begin with a letter before the name of the host.
    let meant_host = table
        .hosts
        .iter()
        .find(|host| location.ends_with(&host.name) && !host.name.is_empty());
    let suggestion = meant_host
        .map(|host| format!("; did you mean -{}?", host.name))
        .unwrap_or_default();
    Some(format!(
        "no host is named {location}{suggestion}\nThe host follows the dash: -h2 is host h2, -. is the console's own host, -LINUX64 is an architecture."
    ))
}

/// Returns the reason why a spawn failed, and what the user can do.
fn spawn_error_text(spawn: &SpawnCommand, error: PvmError) -> String {
    let file = &spawn.program;
    let reason = match error {
        PvmError::NoFile if spawn.flags & SPAWN_DEBUG != 0 => {
            "the program, or the debugger that was to run it, is not on that host: PVM_DEBUGGER, or bx= when adding the \
             host, names a debugger"
        }
        PvmError::NoFile if file.contains('/') => {
            "there is no such program on the host that was to run it"
        }
        PvmError::NoFile => {
            "it is not in the search path of the host that was to run it: give its full path, or the path with ep= when \
             adding the host"
        }
        PvmError::NoHost => "no host matches the request; 'conf' lists the hosts",
        PvmError::OutOfRes => {
            "no host accepts it now: each is full or its owner is present; 'events' shows the reason for each"
        }
        other => other.text(),
    };
    format!("spawn {file}: {reason}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;

    fn parse_line(line: &str) -> SpawnCommand {
        parse(&words(line)).expect(line)
    }

    fn parse_error_text(line: &str) -> String {
        parse(&words(line)).expect_err(line).to_string()
    }

    /// Count, location, directory and arguments are distinguished.
    #[test]
    fn spawn_options_and_arguments_parse() {
        let three_task_command = parse_line("-3 hello -v --x");
        assert_eq!(
            (
                three_task_command.task_count,
                three_task_command.program.as_str()
            ),
            (Some(3), "hello")
        );
        assert_eq!(
            three_task_command.args,
            ["-v", "--x"],
            "what follows the program belongs to it"
        );
        assert_eq!(three_task_command.flags, SPAWN_NO_PARENT | SPAWN_STRICT_DIR);
        let request = |line: &str| {
            let request = parse_line(line).build_request(
                &JobFile::default(),
                Sink::default(),
                Sink::default(),
                Vec::new(),
            );
            (
                request.flags & !(SPAWN_NO_PARENT | SPAWN_STRICT_DIR),
                request.where_arg,
            )
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
        assert_eq!(parse_line("hello").output, OutputDestination::Log);
        assert_eq!(parse_line("-> hello").output, OutputDestination::Console);
        assert_eq!(
            parse_line("->out hello").output,
            OutputDestination::NewFile("out".into())
        );
        assert_eq!(
            parse_line("->>out hello").output,
            OutputDestination::AppendedFile("out".into())
        );
        assert_eq!(
            parse_line("->> hello").output,
            OutputDestination::Console,
            "as in PVM's console"
        );
        assert_eq!(parse_line("hello").trace, None);
        assert_eq!(
            parse_line("-@ -> hello").trace,
            Some(TraceDestination::Console)
        );
        assert_eq!(
            parse_line("-@out hello").trace,
            Some(TraceDestination::NewFile("out".into()))
        );
    }

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
            let (spawn, job) = parse_line(line).apply_job_file().expect(line);
            let exports = vec![b"SEMPA_WANTS=cores >= 9".to_vec()];
            let plain_request =
                spawn.build_request(&job, Sink::default(), Sink::default(), Vec::new());
            let export_request =
                spawn.build_request(&job, Sink::default(), Sink::default(), exports.clone());
            assert_eq!(
                export_request.env, exports,
                "exported variables precede those of the job file"
            );
            let words: Vec<String> = plain_request
                .args
                .iter()
                .map(|arg| String::from_utf8_lossy(arg).into_owned())
                .collect();
            assert_eq!(plain_request.env, [b"SEMPA_WANTS=cores >= 2"]);
            (
                plain_request.program,
                words.join(" "),
                plain_request.task_count,
                plain_request.where_arg,
            )
        };
        let expected_values = |file: &str, args: &str, count, directory: &str| {
            (file.into(), args.into(), count, directory.into())
        };
        assert_eq!(
            request(&format!("--job {path}")),
            expected_values("worker", "-v", 3, "h2")
        );
        assert_eq!(
            request(&format!("--job={path}")),
            expected_values("worker", "-v", 3, "h2")
        );
        assert_eq!(
            request(&format!("-2 --job {path} -h3 other")),
            expected_values("other", "-v", 2, "h3")
        );
        assert_eq!(
            request(&format!("--job {path} other -q")),
            expected_values("other", "-q", 3, "h2")
        );
        let count_options = |line: &str| option_count(&words(line));
        assert_eq!(
            (
                count_options("--job f --json"),
                count_options("-3 --job f x --json"),
                count_options("--job")
            ),
            (3, 3, 1)
        );
        let error_text = |line: &str| {
            parse_line(line)
                .apply_job_file()
                .expect_err(line)
                .to_string()
        };
        write("count = 3\n");
        assert!(
            error_text(&format!("--job {path}")).ends_with("names no program, and none was given")
        );
        write("\ncuont = 3\n");
        assert!(
            error_text(&format!("--job {path} x"))
                .contains("job.toml, line 2: unknown field `cuont`")
        );
        assert!(error_text("--job /nowhere/at/all").contains("/nowhere/at/all cannot be read"));
    }

    /// A location that is no host is explained, with the host that was probably meant.
    #[test]
    fn unknown_host_is_explained() {
        let table = crate::fixtures::table();
        let hint = |line: &str| location_hint(&parse_line(line), &table);
        let hint_for_ha2 = hint("-hha2 x").expect("a hint");
        assert!(
            hint_for_ha2.starts_with("no host is named hha2; did you mean -ha2?\n"),
            "{hint_for_ha2}"
        );
        assert!(
            hint("-nosuch x").is_some_and(|text| text.starts_with("no host is named nosuch\n"))
        );
        assert_eq!(hint("-ha2 x"), None);
        assert_eq!(hint("-LINUX64 x"), None);
    }

    /// The text has the layout of PVM, and the JSON output contains the error.
    #[test]
    fn spawn_layout_matches_pvm() {
        let results = [Ok(Tid::from_raw(0x80001)), Err(PvmError::NoFile)];
        assert_eq!(
            results_text(&results),
            "1 successful\nt80001\nNo such file\n"
        );
        assert_eq!(
            results_json(None, &results)["results"][1]["error"]["text"],
            "No such file"
        );
    }

    #[test]
    fn errors_name_the_wrong_option() {
        for line in ["-3", "->", "-h2", "--job"] {
            assert_eq!(parse_error_text(line), "incorrect arg count", "{line}");
        }
        assert!(parse_error_text("- hello").starts_with("unknown flag -"));
        assert_eq!(parse_error_text("-- hello"), "unknown flag --");
        assert_eq!(parse_error_text("--job= hello"), "unknown flag --job=");
        for line in ["-0 hello", "-10.0.0.1 hello"] {
            assert!(
                parse_error_text(line).contains("is not a number of tasks"),
                "{line}"
            );
        }
    }
}
