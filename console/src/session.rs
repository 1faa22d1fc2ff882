//! Carries commands out: one call per command, from words to what is shown. It keeps what lasts between commands:
//! aliases, options, the environment for tasks, and jobs.

use crate::format::{self, Names};
use crate::help;
use crate::jobs::{Jobs, Written, read_output};
use crate::json;
use crate::machine::{self, Machine};
use crate::options::Options;
use crate::parse::{Command, ParseError, PsOptions, PsScope, parse};
use crate::spawn::{Output, Spawn};
use crate::words;
use libpvm::{Error, MigrateError, Vm};
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::message::{CTX_BASE, CTX_TASK_CONTROL, ENC_XDR};
use sempa_proto::sm::NO_RESET_CLASS;
use sempa_proto::task::{MailboxRequest, NotifyRequest, NotifyWhat, Request, Sink};
use sempa_proto::{HostId, Message, PvmError, Tid};
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, OpenOptions};
use std::io::Write;

/// Tag of the messages that announce hosts.
const TAG_HOSTS: i32 = 1;
/// Tag of the messages with events.
pub(crate) const TAG_EVENTS: i32 = 2;
/// Output of the tasks of job n comes with this tag plus n.
const TAG_JOBS: i32 = 16;
/// Tag of the control message that tells a task its siblings.
const TC_SIBLINGS: i32 = 0x8003_000c_u32.cast_signed();
/// Aliases that may lead to each other.
const ALIAS_STEPS_MAX: usize = 100;
/// Mailbox flag: several entries in one class.
const MBOX_MULTI_INSTANCE: i32 = 2;
/// Events fetched at once.
pub(crate) const EVENTS_AT_ONCE_MAX: u32 = 1000;

/// What the shell does after a command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Next {
    /// Goes on.
    #[default]
    Line,
    /// Leaves.
    Quit,
    /// Ends the virtual machine.
    Halt,
}

/// What a command came to.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Outcome {
    /// For standard output.
    pub(crate) text: String,
    /// For standard output instead of `text` when a machine reads: one value each.
    pub(crate) json: Vec<Value>,
    /// Why nothing was done, without newline: PVM's console says it on standard output, a command from a shell on
    /// standard error.
    pub(crate) refusal: Option<String>,
    /// For standard error, one line each, without newline.
    pub(crate) complaints: Vec<String>,
    /// True when anything that was asked for was not done.
    pub(crate) failed: bool,
    /// What comes next.
    pub(crate) next: Next,
}

impl Outcome {
    fn text(text: String) -> Outcome {
        Outcome { text, ..Outcome::default() }
    }

    /// A result of which `failed` parts were not done.
    fn done(text: String, json: Value, failed: bool) -> Outcome {
        Outcome { text, json: vec![json], failed, ..Outcome::default() }
    }

    fn refused(line: impl std::fmt::Display) -> Outcome {
        Outcome { refusal: Some(line.to_string()), failed: true, ..Outcome::default() }
    }

    fn complaint(line: impl std::fmt::Display) -> Outcome {
        Outcome { complaints: vec![line.to_string()], failed: true, ..Outcome::default() }
    }
}

/// What lasts between commands.
pub(crate) struct Session<M> {
    machine: M,
    aliases: BTreeMap<String, Vec<String>>,
    options: Options,
    env: BTreeMap<String, String>,
    jobs: Jobs,
    files: BTreeMap<u32, File>,
    /// Hosts that need no announcement.
    known: BTreeSet<HostId>,
}

impl<M: Machine> Session<M> {
    /// A session with a copy of the environment.
    pub(crate) fn new(machine: M, env: BTreeMap<String, String>) -> Session<M> {
        Session {
            machine,
            aliases: BTreeMap::new(),
            options: Options::default(),
            env,
            jobs: Jobs::default(),
            files: BTreeMap::new(),
            known: BTreeSet::new(),
        }
    }

    /// True while output of a job may still come.
    pub(crate) fn has_jobs(&self) -> bool {
        !self.jobs.is_empty()
    }

    /// What a long-lived console asks for at its start: that `reset` spares it, and that it hears of new hosts.
    ///
    /// # Errors
    /// When the host table cannot be read; the rest is a comfort that may be missing.
    pub(crate) fn settle(&mut self) -> Result<(), Error> {
        self.known = self.machine.hosts()?.hosts.iter().map(|host| host.id).collect();
        let mut body = Packer::new(Encoding::Xdr);
        body.int(self.machine.tid().raw());
        // Neither is worth refusing to work for: without the first, `reset` ends this console as well; without the
        // second, hosts that others add are not announced.
        let _ = self.put(NO_RESET_CLASS, MBOX_MULTI_INSTANCE, body);
        let what = NotifyWhat::HostAdd { count: -1 };
        let notify = NotifyRequest { what, ctx: CTX_BASE, tag: TAG_HOSTS, cancel: false };
        let _ = self.machine.ask(Request::Notify(notify));
        Ok(())
    }

    /// Carries out one line of input.
    pub(crate) fn line(&mut self, line: &str) -> Outcome {
        match words::split(line) {
            Err(error) => Outcome::refused(error),
            Ok(words) => match self.unalias(words) {
                None => Outcome::refused("alias loop"),
                Some(words) => self.words(&words),
            },
        }
    }

    /// Carries out the words of a command; aliases are not looked at.
    pub(crate) fn words(&mut self, words: &[String]) -> Outcome {
        match parse(words) {
            Ok(None) => Outcome::default(),
            Ok(Some(command)) => {
                let name = words.first().expect("a command has words");
                self.command(command).unwrap_or_else(|error| Outcome::complaint(format!("{name}: {error}")))
            }
            Err(error) => Outcome::refused(error),
        }
    }

    /// Replaces an alias at the beginning; `None` when aliases lead to each other.
    fn unalias(&self, mut words: Vec<String>) -> Option<Vec<String>> {
        for _ in 0..ALIAS_STEPS_MAX {
            let Some(meaning) = words.first().and_then(|first| self.aliases.get(first)) else { return Some(words) };
            // An alias that begins with its own name only adds words.
            let own = meaning.first() == words.first();
            words.splice(..1, meaning.iter().cloned());
            if own {
                return Some(words);
            }
        }
        None
    }

    fn command(&mut self, command: Command) -> Result<Outcome, Error> {
        Ok(match command {
            Command::Add(lines) => self.add(&lines)?,
            Command::Alias { name, words } => {
                self.aliases.insert(name, words);
                Outcome::default()
            }
            Command::Aliases => Outcome::text(
                self.aliases.iter().map(|(name, words)| format!("{name}\t{}\n", words.join(" "))).collect(),
            ),
            Command::Conf => {
                let table = self.machine.hosts()?;
                Outcome::done(format::conf(&table), json::conf(&table), false)
            }
            Command::Delete(names) => self.delete(&names)?,
            Command::Echo(words) => Outcome::text(words.join(" ") + "\n"),
            Command::Events { from, follow: false } => self.events(from)?,
            Command::Events { follow: true, .. } => Outcome::complaint(
                "events: --follow does not end by itself: use it from a shell, as 'pvm events --follow'",
            ),
            Command::Export(_) | Command::Unexport(_) | Command::Setenv { .. } => self.environment(command),
            Command::Getopt(name) => self.options.show(name.as_deref()).map_or_else(Outcome::refused, Outcome::text),
            Command::Setopt { name, value } => {
                self.options.set(&name, value).map_or_else(Outcome::refused, Outcome::text)
            }
            Command::Halt => Outcome { next: Next::Halt, ..Outcome::default() },
            Command::Help(name) => about(name.as_deref()),
            Command::Id => Outcome::text(format!("{}\n", self.machine.tid())),
            Command::Jobs { long } => self.list_jobs(long)?,
            Command::Kill { children, tids } => self.kill(children, &tids)?,
            Command::Migrate { tid, to } => self.migrate(tid, &to),
            Command::Mstat(names) => self.status(
                &names,
                |name| Request::HostStatus { name: name.clone() },
                |name, up| format::mstat(name, up),
            ),
            Command::Pstat(tids) => {
                self.status(&tids, |tid| Request::TaskStatus { tid: *tid }, |tid, up| format::pstat(*tid, up))
            }
            Command::Names(pattern) => Outcome::text(format::names(&machine::names(&self.machine, &pattern)?)),
            Command::Ps(options) => self.ps(&options)?,
            Command::Put { name, flags } => {
                self.put(&name, flags, Packer::new(Encoding::Xdr))?;
                Outcome::default()
            }
            Command::Quit => Outcome { next: Next::Quit, ..Outcome::default() },
            Command::Reset { kill } => {
                self.machine.ask(Request::Reset { kill })?;
                Outcome::default()
            }
            Command::Sig(sig) => self.signal(&sig.tids, sig.signal),
            Command::Spawn(spawn) => self.spawn(&spawn)?,
            Command::Start => Outcome::refused("start: the virtual machine is running already"),
            Command::Unalias(names) => {
                self.aliases.retain(|name, _| !names.contains(name));
                Outcome::default()
            }
            Command::Version => version(),
        })
    }

    fn add(&mut self, lines: &[String]) -> Result<Outcome, Error> {
        let results = self.machine.add(lines)?;
        let mut outcome = Outcome::done(format::added(lines, &results), json::added(lines, &results), false);
        for (line, added) in lines.iter().zip(&results) {
            match &added.result {
                Ok(host) => {
                    self.known.insert(host.id);
                }
                Err(error) => {
                    outcome.failed = true;
                    let reason = if added.reason.is_empty() { error.text() } else { &added.reason };
                    outcome.complaints.push(format!("add {}: {reason}", format::line_name(line)));
                }
            }
        }
        Ok(outcome)
    }

    fn delete(&self, names: &[String]) -> Result<Outcome, Error> {
        let results = self.machine.delete(names)?;
        let mut outcome = Outcome::done(format::deleted(names, &results), json::deleted(names, &results), false);
        for (name, error) in names.iter().zip(&results).filter_map(|(name, result)| Some((name, result.err()?))) {
            outcome.failed = true;
            outcome.complaints.push(format!("delete {name}: {}", not_deleted(error)));
        }
        Ok(outcome)
    }

    fn events(&self, mut from: u64) -> Result<Outcome, Error> {
        let mut names = Names::default();
        names.learn_table(&self.machine.hosts()?);
        let mut all = Vec::new();
        loop {
            let events = self.machine.events(from, EVENTS_AT_ONCE_MAX)?;
            let Some(last) = events.last() else { break };
            from = last.number + 1;
            events.iter().for_each(|event| names.learn(event));
            all.extend(events);
        }
        let text = all.iter().map(|event| format::event(&names, event)).collect();
        let json = all.iter().map(|event| json::event(&names, event)).collect();
        Ok(Outcome { text, json, ..Outcome::default() })
    }

    fn environment(&mut self, command: Command) -> Outcome {
        let exported = |env: &BTreeMap<String, String>| env.get("PVM_EXPORT").cloned().unwrap_or_default();
        let mut list: Vec<String> =
            exported(&self.env).split(':').filter(|name| !name.is_empty()).map(String::from).collect();
        match command {
            Command::Export(names) if names.is_empty() => {
                return Outcome::text(format!("PVM_EXPORT={}\n", exported(&self.env)));
            }
            Command::Export(names) => {
                for name in names {
                    if !list.contains(&name) {
                        list.push(name);
                    }
                }
            }
            Command::Unexport(names) => list.retain(|name| !names.contains(name)),
            Command::Setenv { name: Some(name), value: Some(value) } => {
                self.env.insert(name, value);
                return Outcome::default();
            }
            Command::Setenv { name: Some(name), .. } => {
                return Outcome::text(self.env.get(&name).map_or_else(String::new, |value| format!("{value}\n")));
            }
            _ => return Outcome::text(self.env.iter().map(|(name, value)| format!("{name}={value}\n")).collect()),
        }
        self.env.insert("PVM_EXPORT".to_string(), list.join(":"));
        Outcome::default()
    }

    /// What spawned tasks get into their environment: the exported variables, and their list.
    fn exports(&self) -> Vec<Vec<u8>> {
        let Some(list) = self.env.get("PVM_EXPORT").filter(|list| !list.is_empty()) else { return Vec::new() };
        let names = std::iter::once("PVM_EXPORT").chain(list.split(':').filter(|name| !name.is_empty()));
        names.filter_map(|name| self.env.get(name).map(|value| format!("{name}={value}").into_bytes())).collect()
    }

    fn list_jobs(&self, long: bool) -> Result<Outcome, Error> {
        let mut text = if long { format::ps_head(false) } else { String::new() };
        let (table, tasks) =
            if long { (self.machine.hosts()?, self.machine.tasks(Tid::NONE)?) } else { Default::default() };
        for (number, tids) in self.jobs.running() {
            let list: String = tids.iter().map(|tid| format!(" {tid}")).collect();
            if long {
                text.push_str(&format!(" {number}:\n"));
                let rows = tasks.iter().filter(|task| tids.contains(&task.tid));
                rows.for_each(|task| text.push_str(&format::ps_row(&table, task, self.machine.tid(), false)));
            } else {
                text.push_str(&format!(" {number}:{list}\n"));
            }
        }
        Ok(Outcome::text(text))
    }

    fn kill(&self, children: bool, tids: &[Tid]) -> Result<Outcome, Error> {
        const SIGTERM: i32 = 15;
        if !children {
            return Ok(self.signal(tids, SIGTERM));
        }
        let tasks = self.machine.tasks(Tid::NONE)?;
        let children: Vec<Tid> = tasks.iter().filter(|task| tids.contains(&task.parent)).map(|task| task.tid).collect();
        Ok(self.signal(&children, SIGTERM))
    }

    fn signal(&self, tids: &[Tid], signal: i32) -> Outcome {
        let mut outcome = Outcome::default();
        for tid in tids {
            if *tid == self.machine.tid() {
                outcome.text.push_str(&format!("{tid}: that's me.\n"));
            } else if let Err(error) = self.machine.ask(Request::Signal { tid: *tid, signal }) {
                outcome.failed = true;
                outcome.complaints.push(format!("{tid}: {error}"));
            }
        }
        outcome
    }

    fn migrate(&self, tid: Tid, to: &str) -> Outcome {
        match self.machine.migrate(tid, to) {
            Ok(report) => Outcome::done(format::moved(tid, to, &report), json::moved(tid, to, &report), false),
            Err(error) => {
                let step = match &error {
                    MigrateError::Failed(error) => Some(error.step.to_string()),
                    MigrateError::Refused(_) => None,
                };
                let json = vec![json::not_moved(tid, to, step, &error.to_string())];
                Outcome { json, ..Outcome::complaint(format!("{tid} was not moved to {to}: {error}")) }
            }
        }
    }

    /// One line for each of `items` with what the daemon says about it.
    fn status<T>(
        &self,
        items: &[T],
        ask: impl Fn(&T) -> Request,
        line: impl Fn(&T, Result<(), PvmError>) -> String,
    ) -> Outcome {
        let mut outcome = Outcome::default();
        for item in items {
            let status = self.machine.ask(ask(item)).map(|_| ()).map_err(|error| error.code);
            outcome.failed |= status.is_err();
            outcome.text.push_str(&line(item, status));
        }
        outcome
    }

    fn ps(&self, options: &PsOptions) -> Result<Outcome, Error> {
        let table = self.machine.hosts()?;
        let selector = match &options.scope {
            PsScope::Here => self.machine.here().tid(),
            PsScope::Everywhere => Tid::NONE,
            PsScope::Tid(tid) => *tid,
            PsScope::Host(name) if name == "." => self.machine.here().tid(),
            PsScope::Host(name) => match table.by_name(name) {
                Some(host) => host.id.tid(),
                None => return Ok(Outcome::refused(format!("unknown host {name}"))),
            },
        };
        let console = self.machine.tid();
        let mut tasks = self.machine.tasks(selector)?;
        tasks.retain(|task| options.all_tasks || (task.tid != console && task.flags != 0));
        tasks.sort_by_key(|task| (task.host, task.tid));
        Ok(Outcome::done(format::ps(&table, &tasks, console, options.long), json::ps(&table, &tasks), false))
    }

    fn put(&self, name: &str, flags: i32, body: Packer) -> Result<(), Error> {
        let me = self.machine.tid();
        let message = Message { src: me, dst: me, ctx: CTX_BASE, tag: 0, wid: 0, enc: ENC_XDR, body: body.finish() };
        let name = name.to_string();
        self.machine.ask(Request::Mailbox(MailboxRequest::Put { name, flags, message })).map(|_| ())
    }

    fn spawn(&mut self, spawn: &Spawn) -> Result<Outcome, Error> {
        let file = match open_output(&spawn.output) {
            Ok(file) => file,
            Err(line) => return Ok(Outcome::refused(line)),
        };
        let job = (spawn.output != Output::Log).then(|| self.jobs.open());
        let sink = job.map_or_else(Sink::default, |job| Sink {
            tid: self.machine.tid(),
            ctx: CTX_BASE,
            tag: TAG_JOBS + job.cast_signed(),
        });
        if let (Some(job), Some(file)) = (job, file) {
            self.files.insert(job, file);
        }
        let results = self.machine.spawn(spawn.request(sink, self.exports()));
        let mut text = String::new();
        if let Some(job) = job {
            text.push_str(&format!("[{job}]\n"));
            let tids = results.iter().flatten().flatten().copied();
            // Messages are looked at between commands, so no output has been seen yet and nothing can be finished.
            self.jobs.started(job, tids);
            if !self.jobs.contains(job) {
                self.files.remove(&job);
            }
        }
        let results = results?;
        self.tell_siblings(&results);
        text.push_str(&format::spawned(&results));
        let mut outcome = Outcome::done(text, json::spawned(&results), results.iter().any(Result::is_err));
        let errors: BTreeSet<i32> = results.iter().filter_map(|result| result.err().map(PvmError::code)).collect();
        let errors = errors.into_iter().filter_map(PvmError::from_code);
        outcome.complaints.extend(errors.map(|error| not_spawned(spawn, error)));
        Ok(outcome)
    }

    /// Tells the tasks of one spawn who the others are: what a parent's library does.
    fn tell_siblings(&self, results: &[Result<Tid, PvmError>]) {
        let tids: Vec<Tid> = results.iter().flatten().copied().collect();
        let mut body = Packer::new(Encoding::Xdr);
        body.int(i32::try_from(tids.len()).unwrap_or(i32::MAX)).items(tids.iter().map(|tid| tid.raw()));
        let (src, body) = (self.machine.tid(), body.finish());
        for dst in tids {
            let (ctx, tag, body) = (CTX_TASK_CONTROL, TC_SIBLINGS, body.clone());
            // A task that has ended already needs no siblings.
            let _ = self.machine.send(Message { src, dst, ctx, tag, wid: 0, enc: ENC_XDR, body });
        }
    }

    /// A message that came by itself: output of a job or new hosts. Answers what is to be shown.
    pub(crate) fn message(&mut self, message: &Message) -> Vec<u8> {
        if !message.src.is_daemon() || message.ctx != CTX_BASE {
            return Vec::new();
        }
        if message.tag == TAG_HOSTS {
            return self.announce(message).into_bytes();
        }
        let number = message.tag.checked_sub(TAG_JOBS).and_then(|number| u32::try_from(number).ok());
        let (Some(number), Ok(body)) = (number, Vm::unpack(message)) else { return Vec::new() };
        let Some((tid, what)) = read_output(body) else { return Vec::new() };
        let Written { mut lines, finished } = self.jobs.take(number, tid, what);
        if let Some(file) = self.files.get_mut(&number)
            && let Err(error) = file.write_all(&std::mem::take(&mut lines))
        {
            lines = format!("[{number}] its output cannot be written and is lost: {error}\n").into_bytes();
            self.files.remove(&number);
        }
        if finished {
            self.files.remove(&number);
            lines.extend_from_slice(format!("[{number}] finished\n").as_bytes());
        }
        lines
    }

    fn announce(&mut self, message: &Message) -> String {
        let Ok(mut body) = Vm::unpack(message) else { return String::new() };
        let Ok(tids) = body.int().and_then(|count| body.ints(count)) else { return String::new() };
        let hosts = tids.into_iter().filter_map(|tid| Tid::from_raw(tid).home());
        let new: Vec<HostId> = hosts.filter(|host| self.known.insert(*host)).collect();
        if new.is_empty() {
            return String::new();
        }
        self.machine.hosts().map(|table| format::announce(&table, &new)).unwrap_or_default()
    }
}

/// `help`.
pub(crate) fn about(name: Option<&str>) -> Outcome {
    match help::about(name.unwrap_or("help")) {
        Some(text) => Outcome::text(text),
        None => Outcome::refused(ParseError::NotFound(name.unwrap_or_default().to_string())),
    }
}

/// `version`: that of the interface.
pub(crate) fn version() -> Outcome {
    Outcome::text("3.4.6\n".to_string())
}

/// What a failed `delete` means and what to do about it.
fn not_deleted(error: PvmError) -> &'static str {
    match error {
        PvmError::NoHost => "there is no such host in the virtual machine; 'conf' lists them",
        PvmError::BadParam => "the master cannot leave its virtual machine; 'halt' ends it",
        PvmError::DupHost => "it was named twice",
        other => other.text(),
    }
}

/// What a failed `spawn` means and what to do about it.
fn not_spawned(spawn: &Spawn, error: PvmError) -> String {
    let file = &spawn.file;
    let why = match error {
        PvmError::NoFile if file.contains('/') => "there is no such program on the host that was to run it",
        PvmError::NoFile => {
            "it is not in the search path of the host that was to run it: give its full path, or the path with ep= when \
             adding the host"
        }
        PvmError::NoHost => "no host fits what was asked for; 'conf' lists them",
        PvmError::OutOfRes => {
            "no host takes it now: each is full or has its owner there; 'events' tells the reason for each"
        }
        other => other.text(),
    };
    format!("spawn {file}: {why}")
}

fn open_output(output: &Output) -> Result<Option<File>, String> {
    let (path, opened) = match output {
        Output::Log | Output::Console => return Ok(None),
        Output::New(path) => (path, OpenOptions::new().write(true).create_new(true).open(path)),
        Output::Append(path) => (path, OpenOptions::new().append(true).create(true).open(path)),
    };
    opened.map(Some).map_err(|error| {
        let why = match error.kind() {
            std::io::ErrorKind::AlreadyExists => "File exists".to_string(),
            _ => error.to_string(),
        };
        format!("{path}: {why}")
    })
}

#[cfg(test)]
#[path = "session_tests.rs"]
mod tests;
