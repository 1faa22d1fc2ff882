//! Executes commands: one call per command, from words to output.
//!
//! A [`Session`] keeps the state that lasts between commands: aliases, options, the environment for
//! tasks, and jobs.

use crate::background_drain;
use crate::checkpoint;
use crate::collect::{JobOutput, TAG_HOSTS};
use crate::complete::CompletionNames;
use crate::drain;
use crate::format::{self, HostNames};
use crate::help;
use crate::job;
use crate::jobs::Jobs;
use crate::json;
use crate::options::{Options, TRACE_BUFFER, TRACE_DETAIL};
use crate::owner;
use crate::parse::{Command, ParseError, PsOptions, PsScope, parse, take_json};
use crate::replay;
use crate::trace::{self, TraceCommand};
use crate::usage;
use crate::virtual_machine::{self, VirtualMachine, unexpected_reply};
use crate::why;
use crate::words;
use libpvm::trace_events::EventMask;
use libpvm::{Error, MigrateError};
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::message::{CTX_BASE, ENC_XDR};
use sempa_proto::sm::NO_RESET_CLASS;
use sempa_proto::task::{MailboxRequest, NotifyRequest, NotifySubjects, Reply, Request};
use sempa_proto::{HostId, Message, PvmError, Tid};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// Tag of messages that carry events.
pub(crate) const TAG_EVENTS: i32 = 2;
/// Alias replacements per line; more of them mean a loop.
const ALIAS_DEPTH_MAX: usize = 100;
/// Mailbox flag that allows several entries in one class.
const MBOX_MULTI_INSTANCE: i32 = 2;
/// Events fetched by one request.
pub(crate) const EVENTS_BATCH_MAX: u32 = 1000;

/// What the shell does after a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum AfterCommand {
    /// Reads the next line.
    #[default]
    ReadLine,
    /// Ends the console; the virtual machine keeps running.
    Quit,
    /// Halts the virtual machine.
    Halt,
}

/// The result of a command.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    /// Text for standard output.
    pub(crate) text: String,
    /// Values for standard output in place of `text` when JSON is requested.
    pub(crate) json: Vec<Value>,
    /// True if the line requested JSON.
    pub(crate) as_json: bool,
    /// Why nothing was done, without newline. The interactive console prints it on standard output,
    /// as PVM does; a command from a shell prints it on standard error.
    pub(crate) refusal: Option<String>,
    /// Lines for standard error, without newlines.
    pub(crate) errors: Vec<String>,
    /// True if any part of the request failed.
    pub(crate) failed: bool,
    pub(crate) next: AfterCommand,
}

impl Outcome {
    pub(crate) fn from_text(text: String) -> Outcome {
        Outcome {
            text,
            ..Outcome::default()
        }
    }

    /// Creates a result with output; `failed` is true if part of the request failed.
    pub(crate) fn with_values(text: String, json: Value, failed: bool) -> Outcome {
        Outcome {
            text,
            json: vec![json],
            failed,
            ..Outcome::default()
        }
    }

    pub(crate) fn refused(line: impl std::fmt::Display) -> Outcome {
        Outcome {
            refusal: Some(line.to_string()),
            failed: true,
            ..Outcome::default()
        }
    }

    pub(crate) fn error(line: impl std::fmt::Display) -> Outcome {
        Outcome {
            errors: vec![line.to_string()],
            failed: true,
            ..Outcome::default()
        }
    }
}

/// State that lasts between commands.
pub(crate) struct Session<M> {
    pub(crate) vm: M,
    aliases: BTreeMap<String, Vec<String>>,
    pub(crate) options: Options,
    /// Event kinds that traced tasks record.
    pub(crate) event_mask: EventMask,
    env: BTreeMap<String, String>,
    pub(crate) jobs: Jobs,
    pub(crate) job_outputs: BTreeMap<u32, JobOutput>,
    /// Hosts that were announced already.
    pub(crate) announced_hosts: BTreeSet<HostId>,
    /// True for an interactive console: work that must outlive it runs in another process.
    is_interactive: bool,
    /// True if the current line requested JSON.
    as_json: bool,
}

impl<M: VirtualMachine> Session<M> {
    /// Creates a session with a copy of the environment.
    pub(crate) fn new(machine: M, env: BTreeMap<String, String>) -> Session<M> {
        Session {
            vm: machine,
            aliases: BTreeMap::new(),
            options: Options::default(),
            event_mask: trace::xpvm_mask(),
            env,
            jobs: Jobs::default(),
            job_outputs: BTreeMap::new(),
            announced_hosts: BTreeSet::new(),
            is_interactive: false,
            as_json: false,
        }
    }

    /// True while output of a job may still arrive.
    pub(crate) fn has_jobs(&self) -> bool {
        !self.jobs.is_empty() || !self.job_outputs.is_empty()
    }

    /// Returns the names that the editor can complete.
    pub(crate) fn completion_names(&self) -> CompletionNames {
        CompletionNames {
            aliases: self.aliases.keys().cloned().collect(),
            variables: self.env.keys().cloned().collect(),
        }
    }

    /// Prepares an interactive console: `reset` must spare it, it is notified of new hosts, and
    /// drains run in another process.
    ///
    /// # Errors
    /// Fails if the host table cannot be read. Errors of the two registrations are ignored.
    pub(crate) fn register_interactive(&mut self) -> Result<(), Error> {
        self.is_interactive = true;
        self.announced_hosts = self.vm.hosts()?.hosts.iter().map(|host| host.id).collect();
        let mut body = Packer::new(Encoding::Xdr);
        body.int(self.vm.tid().raw());
        // Both requests are optional. Without the first, `reset` also ends this console; without
        // the second, hosts that other consoles add are not announced.
        let _ = self.put_mailbox_entry(NO_RESET_CLASS, MBOX_MULTI_INSTANCE, body);
        let what = NotifySubjects::HostAdd { count: -1 };
        let notify = NotifyRequest {
            subjects: what,
            ctx: CTX_BASE,
            tag: TAG_HOSTS,
            cancel: false,
        };
        let _ = self.vm.ask(Request::Notify(notify));
        Ok(())
    }

    /// Executes one line of input.
    pub(crate) fn run_line(&mut self, line: &str) -> Outcome {
        match words::split_words(line) {
            Err(error) => Outcome::refused(error),
            Ok(words) => match self.unalias(words) {
                None => Outcome::refused("alias loop"),
                Some(mut words) => {
                    let as_json = take_json(&mut words);
                    self.as_json = as_json;
                    Outcome {
                        as_json,
                        ..self.run_words(&words)
                    }
                }
            },
        }
    }

    /// Executes the words of a command without replacing aliases.
    pub(crate) fn run_words(&mut self, words: &[String]) -> Outcome {
        match parse(words) {
            Ok(None) => Outcome::default(),
            Ok(Some(command)) => {
                let name = words.first().expect("a command has words");
                self.run_command(command)
                    .unwrap_or_else(|error| Outcome::error(format!("{name}: {error}")))
            }
            Err(error) => Outcome::refused(error),
        }
    }

    /// Replaces an alias at the beginning. Returns `None` if aliases form a loop.
    fn unalias(&self, mut words: Vec<String>) -> Option<Vec<String>> {
        for _ in 0..ALIAS_DEPTH_MAX {
            let Some(meaning) = words.first().and_then(|first| self.aliases.get(first)) else {
                return Some(words);
            };
            // An alias that begins with its own name only adds words.
            let is_recursive = meaning.first() == words.first();
            words.splice(..1, meaning.iter().cloned());
            if is_recursive {
                return Some(words);
            }
        }
        None
    }

    fn run_command(&mut self, command: Command) -> Result<Outcome, Error> {
        match command {
            Command::Alias { .. } | Command::Aliases | Command::Unalias(_) => {
                Ok(self.alias(command))
            }
            Command::Export(_) | Command::Unexport(_) | Command::Setenv { .. } => {
                Ok(self.environment(command))
            }
            Command::Getopt(_) | Command::Setopt { .. } => Ok(self.option(command)),
            Command::Trace(what) => Ok(self.trace(what)),
            Command::Spawn(spawn) => self.spawn(&spawn),
            Command::Jobs { long } => self.list_jobs(long),
            Command::Add(lines) => self.add(&lines),
            Command::Delete(names) => self.delete(&names),
            Command::Echo(words) => Ok(Outcome::from_text(words.join(" ") + "\n")),
            Command::Help(name) => Ok(help_outcome(name.as_deref())),
            Command::Idump => Ok(Outcome {
                errors: vec![self.memory_line()],
                ..Outcome::default()
            }),
            Command::Version => Ok(version_outcome()),
            Command::Halt => Ok(Outcome {
                next: AfterCommand::Halt,
                ..Outcome::default()
            }),
            Command::Quit => Ok(Outcome {
                next: AfterCommand::Quit,
                ..Outcome::default()
            }),
            Command::Start => Ok(Outcome::refused(
                "start: the virtual machine is running already",
            )),
            Command::Owner(what) => Ok(owner::run(&what)),
            Command::Replay(words) => Ok(replay::run(&words, false)),
            other => match self.run_rm_command(other)? {
                Ok(outcome) => Ok(outcome),
                Err(other) => self.run_daemon_command(other),
            },
        }
    }

    /// Defines, removes or lists aliases.
    fn alias(&mut self, command: Command) -> Outcome {
        match command {
            Command::Alias { name, words } => drop(self.aliases.insert(name, words)),
            Command::Unalias(names) => self.aliases.retain(|name, _| !names.contains(name)),
            _ => {
                let text = self
                    .aliases
                    .iter()
                    .map(|(name, words)| format!("{name}\t{}\n", words.join(" ")))
                    .collect();
                return Outcome::with_values(text, json::aliases(&self.aliases), false);
            }
        }
        Outcome::default()
    }

    /// Shows or sets PVM options.
    fn option(&mut self, command: Command) -> Outcome {
        match command {
            Command::Setopt { name, value } => {
                self.options
                    .set(&name, value)
                    .map_or_else(Outcome::refused, |old| {
                        let text = format!("{name} Changed from {old} to {value}\n");
                        Outcome::with_values(text, json::option_set(&name, old, value), false)
                    })
            }
            Command::Getopt(name) => {
                self.options
                    .get(name.as_deref())
                    .map_or_else(Outcome::refused, |options| {
                        let line = |(name, value)| format!("{name} Currently Set to {value}\n");
                        let text = options.iter().copied().map(line).collect();
                        Outcome::with_values(text, json::options(&options), false)
                    })
            }
            _ => Outcome::default(),
        }
    }

    /// Executes commands for the resource manager and commands on whole jobs, hosts and
    /// checkpoints. Returns any other command unchanged.
    fn run_rm_command(&mut self, command: Command) -> Result<Result<Outcome, Command>, Error> {
        Ok(Ok(match command {
            Command::Checkpoint(what) => checkpoint::checkpoint(&self.vm, &what)?,
            Command::Checkpoints(what) => checkpoint::checkpoints(&self.vm, &what)?,
            Command::Restart(what) => checkpoint::restart(&self.vm, &what)?,
            Command::Drain(what) if self.is_interactive && what.may_checkpoint() => {
                background_drain::run_from_console(self.vm.tid(), &what, self.as_json)
            }
            Command::Drain(what) => {
                let (mut text, me) = (String::new(), self.vm.tid());
                let outcome = drain::drain(&self.vm, &what, me, &mut |line| text.push_str(line))?;
                Outcome { text, ..outcome }
            }
            Command::Undrain { host } => drain::undrain(&self.vm, &host)?,
            Command::Events {
                from,
                follow: false,
            } => self.events(from)?,
            Command::Events { follow: true, .. } => Outcome::error(
                "events: --follow does not end by itself: use it from a shell, as 'pvm events --follow'",
            ),
            Command::Job(what) => job::run(&self.vm, &what)?,
            Command::Usage(what) => usage::run(&self.vm, &what)?,
            Command::Why(what) => why::run(&self.vm, &what)?,
            Command::Migrate { tid, to } => self.migrate(tid, &to),
            Command::CanMigrate { tid, to } => self.can_migrate(tid, to.as_deref())?,
            other => return Ok(Err(other)),
        }))
    }

    /// Executes commands that the daemon answers.
    fn run_daemon_command(&mut self, command: Command) -> Result<Outcome, Error> {
        Ok(match command {
            Command::Conf => {
                let table = self.vm.hosts()?;
                Outcome::with_values(format::conf(&table), json::conf(&table), false)
            }
            Command::Id => {
                let tid = self.vm.tid();
                Outcome::with_values(format!("{tid}\n"), json::id(tid), false)
            }
            Command::Kill { children, tids } => self.kill(children, &tids)?,
            Command::Mstat(names) => self.status(
                &names,
                |name| Request::HostStatus { name: name.clone() },
                |name, up| (format::mstat(name, up), json::status("host", name, up)),
            ),
            Command::Pstat(tids) => self.status(
                &tids,
                |tid| Request::TaskStatus { tid: *tid },
                |tid, up| {
                    (
                        format::pstat(*tid, up),
                        json::status("tid", &tid.to_string(), up),
                    )
                },
            ),
            Command::Names(pattern) => {
                let classes = virtual_machine::mailbox_classes(&self.vm, &pattern)?;
                Outcome::with_values(format::names(&classes), json::names(&classes), false)
            }
            Command::Ps(options) => self.ps(&options)?,
            Command::Put { name, flags } => {
                self.put_mailbox_entry(&name, flags, Packer::new(Encoding::Xdr))?;
                Outcome::default()
            }
            Command::Reset => {
                self.vm.ask(Request::Reset { kill: true })?;
                Outcome::default()
            }
            Command::ResetInfo { class, index } => {
                let name = class.unwrap_or_default();
                self.vm
                    .ask(Request::Mailbox(MailboxRequest::Clean { name, index }))?;
                Outcome::default()
            }
            Command::Sig(sig) => self.signal(&sig.tids, sig.signal, true),
            Command::Tickle(words) => match self.vm.ask(Request::DebugQuery(words))? {
                Reply::Numbers(numbers) => {
                    Outcome::with_values(format::tickle(&numbers), json::tickle(&numbers), false)
                }
                _ => return Err(unexpected_reply()),
            },
            // The callers have handled these.
            _ => Outcome::default(),
        })
    }

    fn add(&mut self, lines: &[String]) -> Result<Outcome, Error> {
        let results = self.vm.add(lines)?;
        let mut outcome = Outcome::with_values(
            format::added(lines, &results),
            json::added(lines, &results),
            false,
        );
        for (line, added) in lines.iter().zip(&results) {
            match &added.result {
                Ok(host) => {
                    self.announced_hosts.insert(host.id);
                }
                Err(error) => {
                    outcome.failed = true;
                    let reason = if added.reason.is_empty() {
                        error.text()
                    } else {
                        &added.reason
                    };
                    outcome
                        .errors
                        .push(format!("add {}: {reason}", format::host_of_line(line)));
                }
            }
        }
        Ok(outcome)
    }

    fn delete(&self, names: &[String]) -> Result<Outcome, Error> {
        let hosts = self.vm.hosts()?;
        let here = hosts.get(self.vm.local_host());
        // Only the console's own commands accept `.` for the local host.
        let named = |name: &String| {
            here.filter(|_| name == ".")
                .map_or(name, |host| &host.name)
                .clone()
        };
        let results = self
            .vm
            .delete(&names.iter().map(named).collect::<Vec<_>>())?;
        let mut outcome = Outcome::with_values(
            format::deleted(names, &results),
            json::deleted(names, &results),
            false,
        );
        for (name, error) in names
            .iter()
            .zip(&results)
            .filter_map(|(name, result)| Some((name, result.err()?)))
        {
            outcome.failed = true;
            outcome
                .errors
                .push(format!("delete {name}: {}", delete_error_text(error)));
        }
        Ok(outcome)
    }

    fn events(&self, mut from: u64) -> Result<Outcome, Error> {
        let mut names = HostNames::default();
        names.learn_table(&self.vm.hosts()?);
        let mut all = Vec::new();
        loop {
            let events = self.vm.events(from, EVENTS_BATCH_MAX)?;
            let Some(last) = events.last() else { break };
            from = last.number + 1;
            events.iter().for_each(|event| names.learn_event(event));
            all.extend(events);
        }
        let text = all
            .iter()
            .map(|event| format::event(&names, event))
            .collect();
        let json = all.iter().map(|event| json::event(&names, event)).collect();
        Ok(Outcome {
            text,
            json,
            ..Outcome::default()
        })
    }

    fn environment(&mut self, command: Command) -> Outcome {
        let exported = self.env.get("PVM_EXPORT").cloned().unwrap_or_default();
        let mut list: Vec<String> = exported
            .split(':')
            .filter(|name| !name.is_empty())
            .map(String::from)
            .collect();
        match command {
            Command::Export(names) if names.is_empty() => {
                return Outcome::with_values(
                    format!("PVM_EXPORT={exported}\n"),
                    json::exported(&list),
                    false,
                );
            }
            Command::Export(names) => {
                for name in names {
                    if !list.contains(&name) {
                        list.push(name);
                    }
                }
            }
            Command::Unexport(names) => list.retain(|name| !names.contains(name)),
            Command::Setenv {
                name: Some(name),
                value: Some(value),
            } => {
                self.env.insert(name, value);
                return Outcome::default();
            }
            Command::Setenv {
                name: Some(name), ..
            } => {
                let text = self
                    .env
                    .get(&name)
                    .map_or_else(String::new, |value| format!("{value}\n"));
                let one = self.env.get_key_value(&name);
                return Outcome::with_values(text, json::variables(one), false);
            }
            _ => {
                let text = self
                    .env
                    .iter()
                    .map(|(name, value)| format!("{name}={value}\n"))
                    .collect();
                return Outcome::with_values(text, json::variables(&self.env), false);
            }
        }
        self.env.insert("PVM_EXPORT".to_string(), list.join(":"));
        Outcome::default()
    }

    /// Executes every part of one `trace` line.
    fn trace(&mut self, requests: Vec<TraceCommand>) -> Outcome {
        let (mut outcome, mut refusals) = (Outcome::default(), Vec::new());
        for what in requests {
            match self.trace_one(what) {
                Ok(text) => outcome.text.push_str(&text),
                Err(line) => refusals.push(line),
            }
        }
        if !outcome.text.is_empty() {
            let (buffer, kind) = (
                self.options.value(TRACE_BUFFER),
                self.options.value(TRACE_DETAIL),
            );
            outcome.json = vec![trace::value(&self.event_mask, buffer, kind)];
        }
        outcome.failed = !refusals.is_empty();
        outcome.refusal = outcome.failed.then(|| refusals.join("\n"));
        outcome
    }

    /// Executes one part of a `trace` line. Returns the text to show, or the reason for a refusal.
    fn trace_one(&mut self, what: TraceCommand) -> Result<String, String> {
        let (buffer, kind) = (
            self.options.value(TRACE_BUFFER),
            self.options.value(TRACE_DETAIL),
        );
        let mut set = |name, value| match self.options.set(name, value) {
            Ok(_) => Ok(String::new()),
            Err(error) => Err(error.to_string()),
        };
        match what {
            TraceCommand::Show => Ok(trace::event_list(&self.event_mask)),
            TraceCommand::Xpvm => {
                self.event_mask = trace::xpvm_mask();
                Ok(String::new())
            }
            TraceCommand::Select { on, name } if trace::select(&mut self.event_mask, on, &name) => {
                Ok(String::new())
            }
            TraceCommand::Select { name, .. } => Err(format!("no such event \"{name}\"")),
            TraceCommand::Buffer(None) => {
                Ok(format!("\nTrace Buffering set to {buffer} bytes\n\n"))
            }
            TraceCommand::Detail(None) => Ok(format!(
                "\nTrace Options set to \"{}\"\n\n",
                trace::detail_name(kind)
            )),
            TraceCommand::Buffer(Some(bytes)) => set(TRACE_BUFFER, bytes),
            TraceCommand::Detail(Some(name)) => match trace::detail_number(&name) {
                Some(kind) => set(TRACE_DETAIL, kind),
                None => Err(format!("\nError:  Unknown Trace Option \"{name}\"\n")),
            },
        }
    }

    /// Returns the line for `idump`: the resident memory of the console. There is no separate PVM
    /// heap to report.
    fn memory_line(&self) -> String {
        const PAGE_BYTES: u64 = 4096;
        let pages = std::fs::read_to_string("/proc/self/statm").ok();
        let pages = pages
            .and_then(|text| text.split_whitespace().nth(1)?.parse::<u64>().ok())
            .unwrap_or(0);
        format!(
            "libpvm [{}]: i_dump() {} bytes total",
            self.vm.tid(),
            pages * PAGE_BYTES
        )
    }

    /// Returns the environment entries for spawned tasks: `PVM_EXPORT` and the variables it lists.
    pub(crate) fn exported_environment(&self) -> Vec<Vec<u8>> {
        let Some(list) = self.env.get("PVM_EXPORT").filter(|list| !list.is_empty()) else {
            return Vec::new();
        };
        let names =
            std::iter::once("PVM_EXPORT").chain(list.split(':').filter(|name| !name.is_empty()));
        names
            .filter_map(|name| {
                self.env
                    .get(name)
                    .map(|value| format!("{name}={value}").into_bytes())
            })
            .collect()
    }

    fn kill(&self, children: bool, tids: &[Tid]) -> Result<Outcome, Error> {
        const SIGTERM: i32 = 15;
        if !children {
            return Ok(self.signal(tids, SIGTERM, false));
        }
        let tasks = self.vm.tasks(Tid::NONE)?;
        let children: Vec<Tid> = tasks
            .iter()
            .filter(|task| tids.contains(&task.parent))
            .map(|task| task.tid)
            .collect();
        Ok(self.signal(&children, SIGTERM, false))
    }

    /// Sends a signal to tasks. The console skips itself and prints a note, unless it is included.
    fn signal(&self, tids: &[Tid], signal: i32, include_self: bool) -> Outcome {
        let (mut outcome, mut values) = (Outcome::default(), Vec::new());
        for tid in tids {
            if *tid == self.vm.tid() && !include_self {
                outcome.text.push_str(&format!("{tid}: that's me.\n"));
                values.push(json::signal_result(*tid, Some("that's me")));
            } else if let Err(error) = self.vm.ask(Request::Signal { tid: *tid, signal }) {
                outcome.failed = true;
                outcome.errors.push(format!("{tid}: {error}"));
                values.push(json::signal_result(*tid, Some(&error.reason)));
            } else {
                values.push(json::signal_result(*tid, None));
            }
        }
        outcome.json = vec![json::results(values)];
        outcome
    }

    fn migrate(&self, tid: Tid, to: &str) -> Outcome {
        match self.vm.migrate(tid, to) {
            Ok(report) => Outcome::with_values(
                format::migrated(tid, to, &report),
                json::migrated(tid, to, &report),
                false,
            ),
            Err(error) => {
                let step = match &error {
                    MigrateError::Failed(error) => Some(error.step.to_string()),
                    MigrateError::Refused(_) => None,
                };
                let json = vec![json::not_migrated(tid, to, step, &error.to_string())];
                let line = match &error {
                    // The virtual machine ended, and the task with it; on which host is unknown.
                    MigrateError::Refused(Error {
                        code: PvmError::SysErr,
                        reason,
                    }) => {
                        format!("the virtual machine ended before {tid} was on {to}: {reason}")
                    }
                    _ => format!("{tid} was not moved to {to}: {error}"),
                };
                Outcome {
                    json,
                    ..Outcome::error(line)
                }
            }
        }
    }

    fn can_migrate(&self, tid: Tid, to: Option<&str>) -> Result<Outcome, Error> {
        let table = self.vm.hosts()?;
        let survey = self.vm.can_migrate(tid, to)?;
        let failed = survey.nearest().is_none();
        Ok(Outcome::with_values(
            format::survey(&table, &survey),
            json::survey(&table, &survey),
            failed,
        ))
    }

    /// Asks the daemon about each of `items` and shows a line and a value for each.
    fn status<T>(
        &self,
        items: &[T],
        ask: impl Fn(&T) -> Request,
        show: impl Fn(&T, Result<(), PvmError>) -> (String, Value),
    ) -> Outcome {
        let (mut text, mut values, mut failed) = (String::new(), Vec::new(), false);
        for item in items {
            let status = self
                .vm
                .ask(ask(item))
                .map(|_| ())
                .map_err(|error| error.code);
            failed |= status.is_err();
            let (line, value) = show(item, status);
            text.push_str(&line);
            values.push(value);
        }
        Outcome::with_values(text, json::results(values), failed)
    }

    fn ps(&self, options: &PsOptions) -> Result<Outcome, Error> {
        let table = self.vm.hosts()?;
        let selector = match &options.scope {
            PsScope::Here => self.vm.local_host().tid(),
            PsScope::Everywhere => Tid::NONE,
            PsScope::Tid(tid) => *tid,
            PsScope::Host(name) if name == "." => self.vm.local_host().tid(),
            PsScope::Host(name) => match table.by_name(name) {
                Some(host) => host.id.tid(),
                None => return Ok(Outcome::refused(format!("unknown host {name}"))),
            },
        };
        let console = self.vm.tid();
        let mut tasks = self.vm.tasks(selector)?;
        // A task may run on another host than its home, and its home may have left the virtual
        // machine.
        if tasks.is_empty()
            && selector
                .birth_host()
                .is_some_and(|home| table.get(home).is_none())
        {
            return Ok(Outcome::error(format!(
                "ps: {selector} is on no host of the virtual machine; 'conf' lists them"
            )));
        }
        tasks.retain(|task| options.all_tasks || (task.tid != console && task.flags != 0));
        tasks.sort_by_key(|task| (task.host, task.tid));
        Ok(Outcome::with_values(
            format::ps(&table, &tasks, console, options.long),
            json::ps(&table, &tasks),
            false,
        ))
    }

    fn put_mailbox_entry(&self, name: &str, flags: i32, body: Packer) -> Result<(), Error> {
        let me = self.vm.tid();
        let message = Message {
            src: me,
            dst: me,
            ctx: CTX_BASE,
            tag: 0,
            wid: 0,
            enc: ENC_XDR,
            body: body.finish(),
        };
        let name = name.to_string();
        self.vm
            .ask(Request::Mailbox(MailboxRequest::Put {
                name,
                flags,
                message,
            }))
            .map(|_| ())
    }
}

/// Returns the output of `help`.
pub(crate) fn help_outcome(name: Option<&str>) -> Outcome {
    match help::help_text(name.unwrap_or("help")) {
        Some(text) => Outcome::from_text(text),
        None => Outcome::refused(ParseError::NotFound(name.unwrap_or_default().to_string())),
    }
}

/// Returns the output of `version`: the version of the PVM interface.
pub(crate) fn version_outcome() -> Outcome {
    Outcome::with_values("3.4.6\n".to_string(), json::version("3.4.6"), false)
}

/// Explains why a host was not deleted and what the user can do.
fn delete_error_text(error: PvmError) -> &'static str {
    match error {
        PvmError::NoHost => "there is no such host in the virtual machine; 'conf' lists them",
        PvmError::BadParam => "the master cannot leave its virtual machine; 'halt' ends it",
        PvmError::DupHost => "it was named twice",
        other => other.text(),
    }
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
