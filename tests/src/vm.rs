//! A virtual machine on the hosts of a testbed. Tests use it through the console, as a user does.

use crate::layout::home_of;
use crate::programs;
use crate::run::{CommandResult, RunningCommand, run, run_ok, wait_for};
use crate::testbed::{ALICE_UID, Host, Testbed};
use anyhow::{Context, Result, bail, ensure};
use sempa_proto::Tid;
use sempa_proto::event::EventKind;
use sempa_proto::table::TASK_CONNECTED;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

/// Time limit for one command of the console on a loaded machine. Migrations with much memory
/// finish within it.
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

/// Time limit for lost hosts to become members again.
const JOIN_TIMEOUT: Duration = Duration::from_secs(120);

/// Number of lines of a host's log that are shown when a test fails.
const LOG_LINES_SHOWN: usize = 150;

/// Part of the message with which the console refuses a task that has been spawned and is not
/// enrolled yet. The refusal is temporary.
const NOT_CONNECTED_TEXT: &str = "it is not connected to its daemon";

/// Number of events that are shown when a test fails.
const EVENTS_SHOWN: usize = 100;

/// Formats the newest events. Omits those of consoles, because a test that waits starts many
/// consoles.
fn format_newest_events(events: &[EventEntry]) -> String {
    let asking = |entry: &EventEntry| match &entry.kind {
        EventKind::TaskStarted { tid, name, .. } if name.is_empty() => Some(*tid),
        _ => None,
    };
    let asking: BTreeSet<Tid> = events.iter().filter_map(asking).collect();
    let asks = |entry: &&EventEntry| match &entry.kind {
        EventKind::TaskStarted { tid, .. } | EventKind::TaskEnded { tid, .. } => {
            asking.contains(tid)
        }
        _ => false,
    };
    let others: Vec<&EventEntry> = events.iter().filter(|entry| !asks(entry)).collect();
    let line = |entry: &&EventEntry| {
        let host = entry.host.as_deref().unwrap_or("?");
        format!("{:.3} {host} {}", entry.at_us as f64 / 1e6, entry.text)
    };
    let lines: Vec<String> = others[others.len().saturating_sub(EVENTS_SHOWN)..]
        .iter()
        .map(line)
        .collect();
    lines.join("\n")
}

/// Settings of a virtual machine.
#[derive(Clone, Debug, Default)]
pub struct Settings {
    /// The command in `PVM_RM` that starts the resource manager. If `None`, the daemons place tasks
    /// round robin.
    pub rm: Option<String>,
    /// True if the user of the virtual machine is alice; otherwise it is root.
    pub as_alice: bool,
    /// Additional environment variables of daemons and commands on h1.
    pub env: Vec<(String, String)>,
}

impl Settings {
    /// Converts environment variables to the form of [`Settings::env`].
    pub fn env_of(variables: &[(&str, &str)]) -> Vec<(String, String)> {
        let variables = variables.iter();
        variables
            .map(|(name, value)| (name.to_string(), value.to_string()))
            .collect()
    }
}

/// One line of `pvm ps -a --json`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Task {
    /// The tid as the console prints it, such as `t40001`.
    pub tid: String,
    /// Name of the host where the task runs.
    pub host: Option<String>,
    /// Name of the program; empty for a task that was started from a command line.
    pub name: String,
    /// Process number on the task's host.
    pub pid: i32,
    /// PVM's flags; the bit 4 means that the task is connected to its daemon.
    pub flags: i32,
    /// True while the task migrates.
    pub moving: bool,
    /// True if the task is paused for the owner of its host.
    pub stopped: bool,
    /// True if the task is suspended, until a user resumes it.
    pub suspended: bool,
}

/// One line of `pvm events --json`.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct EventEntry {
    pub number: u64,
    /// The time in microseconds since 1970.
    pub at_us: u64,
    pub host: Option<String>,
    pub text: String,
    pub kind: EventKind,
}

/// A virtual machine with its master on h1.
#[derive(Debug)]
pub struct Vm<'a> {
    bed: &'a Testbed,
    prefix: PathBuf,
    settings: Settings,
}

/// A result that a test needs in order to continue.
pub trait OrPanicWithLogs<T> {
    /// Returns the value.
    ///
    /// # Panics
    /// There is no value. The message has the reason, the newest events and the daemons' logs.
    fn or_panic_with_logs(self, vm: &Vm<'_>) -> T;
}

impl<T, E: Display> OrPanicWithLogs<T> for Result<T, E> {
    #[track_caller]
    fn or_panic_with_logs(self, vm: &Vm<'_>) -> T {
        match self {
            Ok(value) => value,
            Err(error) => panic!("{error:#}\n{}", vm.logs()),
        }
    }
}

impl<'a> Vm<'a> {
    /// Starts a virtual machine on h1 with the installed programs of the testbed.
    ///
    /// # Errors
    /// The console fails; the error has its output.
    pub fn start(bed: &'a Testbed, settings: Settings) -> Result<Vm<'a>> {
        let with_rm = settings.rm.is_some();
        let prefix = bed
            .prefix()
            .context("the testbed was made without installed programs")?;
        let vm = Vm {
            bed,
            prefix: crate::layout::prefix_in_hosts(prefix),
            settings,
        };
        vm.pvm(&["start"])?
            .expect_success("starting the virtual machine")?;
        if with_rm {
            vm.wait_for_event(COMMAND_TIMEOUT, "a registered resource manager", |entry| {
                matches!(entry.kind, EventKind::RmRegistered { .. })
            })?;
        }
        Ok(vm)
    }

    pub fn bed(&self) -> &'a Testbed {
        self.bed
    }

    /// Returns the home folder of the virtual machine's user. All hosts share it.
    pub fn home(&self) -> PathBuf {
        let user = if self.settings.as_alice {
            "alice"
        } else {
            "root"
        };
        home_of(self.bed.folder(), user)
    }

    /// Returns a command that runs `program` on a host with the environment of the virtual
    /// machine's user.
    pub fn command(&self, host: &Host, program: impl AsRef<Path>) -> Command {
        let home = self.home();
        let mut command = if self.settings.as_alice {
            host.command_as(Some(("alice", ALICE_UID, &home)), program)
        } else {
            host.command(program)
        };
        if !self.settings.as_alice {
            command.env("PVM_ALLOW_ROOT", "1");
        }
        if let Some(rm) = &self.settings.rm {
            command.env("PVM_RM", rm);
        }
        if let Some(engine) = self.bed.engine() {
            command.env("SEMPA_CRIU", engine);
        }
        if let Some(steps) = self.bed.breakpoints_folder() {
            command.env("SEMPA_TEST_STEPS", steps);
        }
        command.envs(self.settings.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs the console on h1 with one command. A failure of the command is no error.
    pub fn pvm(&self, words: &[&str]) -> Result<CommandResult> {
        self.pvm_on(self.bed.host(1), words)
    }

    /// As [`Vm::pvm`], on any host.
    pub fn pvm_on(&self, host: &Host, words: &[&str]) -> Result<CommandResult> {
        let mut command = self.command(host, self.prefix.join("bin/pvm"));
        command.args(words);
        run(command, COMMAND_TIMEOUT)
    }

    /// Runs the console with `--json` and one command. Returns the printed values.
    ///
    /// # Errors
    /// The command fails, or its output is not JSON.
    pub fn json(&self, words: &[&str]) -> Result<Vec<Value>> {
        let words = [&["--json"], words].concat();
        let done = self
            .pvm(&words)?
            .expect_success(&format!("pvm {}", words.join(" ")))?;
        let lines = done.out.lines().filter(|line| !line.trim().is_empty());
        lines
            .map(|line| serde_json::from_str(line).with_context(|| format!("not JSON: {line}")))
            .collect()
    }

    /// Adds hosts by name, with one command of the console.
    pub fn add(&self, hosts: &[&str]) -> Result<()> {
        let mut words = vec!["add"];
        words.extend(hosts);
        self.pvm(&words)?.expect_success("adding hosts").map(|_| ())
    }

    /// Returns the names of the hosts of the virtual machine.
    ///
    /// # Errors
    /// The console fails.
    pub fn hosts(&self) -> Result<Vec<String>> {
        let values = self.json(&["conf"])?;
        let hosts = values
            .last()
            .and_then(|value| value["hosts"].as_array())
            .context("conf prints hosts")?;
        Ok(hosts
            .iter()
            .filter_map(|host| host["name"].as_str())
            .map(str::to_string)
            .collect())
    }

    /// Adds the hosts of `hosts` that are not in the virtual machine. Repeats the command until all
    /// are members.
    ///
    /// # Errors
    /// A host is no member within the time limit.
    pub fn add_missing(&self, hosts: &[&Host]) -> Result<()> {
        wait_for(JOIN_TIMEOUT, || {
            let here = self.hosts().map_err(|error| error.to_string())?;
            let names = hosts.iter().map(|host| host.name());
            let missing: Vec<&str> = names
                .filter(|name| !here.iter().any(|host| host == name))
                .collect();
            if missing.is_empty() {
                return Ok(());
            }
            // A daemon that has lost its master may still run; then the host cannot be added yet.
            self.add(&missing).map_err(|error| format!("{error:#}"))
        })
    }

    /// Returns all tasks.
    ///
    /// # Errors
    /// The console fails.
    pub fn tasks(&self) -> Result<Vec<Task>> {
        #[derive(Deserialize)]
        struct Answer {
            tasks: Vec<Task>,
        }
        let answer = self
            .json(&["ps", "-a"])?
            .pop()
            .context("ps prints one value")?;
        Ok(serde_json::from_value::<Answer>(answer)?.tasks)
    }

    /// Returns the event log.
    ///
    /// # Errors
    /// The console fails.
    pub fn events(&self) -> Result<Vec<EventEntry>> {
        self.events_from(0)
    }

    /// Returns the events with this number and later ones.
    pub fn events_from(&self, number: u64) -> Result<Vec<EventEntry>> {
        let values = self.json(&["events", "--from", &number.to_string()])?;
        values
            .into_iter()
            .map(|value| Ok(serde_json::from_value(value)?))
            .collect()
    }

    /// Waits for an event that `is_it` accepts, and returns it. `what` describes the event in the
    /// error.
    ///
    /// # Errors
    /// The event does not happen before the deadline; the error has the newest events.
    pub fn wait_for_event(
        &self,
        deadline: Duration,
        what: &str,
        is_it: impl Fn(&EventEntry) -> bool,
    ) -> Result<EventEntry> {
        wait_for(deadline, || {
            let events = self.events().map_err(|error| error.to_string())?;
            if let Some(entry) = events.iter().find(|entry| is_it(entry)) {
                return Ok(entry.clone());
            }
            let last: Vec<&str> = events
                .iter()
                .rev()
                .take(8)
                .map(|entry| entry.text.as_str())
                .collect();
            Err(format!("no {what}; newest events: {}", last.join(" | ")))
        })
    }

    /// Waits until a job has rolled back to its newest checkpoint for this reason. Returns the
    /// event.
    ///
    /// # Errors
    /// No job rolls back for this reason before the deadline.
    pub fn wait_for_rollback(&self, deadline: Duration, reason: &str) -> Result<EventEntry> {
        let is_it = |entry: &EventEntry| matches!(&entry.kind, EventKind::Restarted { why, .. } if why == reason);
        self.wait_for_event(deadline, "a job that went back", is_it)
    }

    /// Spawns one task with arguments of the console's `spawn` command, such as `-h2`. Waits until
    /// the task has connected to its daemon. Returns its tid.
    pub fn spawn(&self, words: &[&str]) -> Result<String> {
        let mut all = vec!["spawn"];
        all.extend(words);
        let answer = self.json(&all)?.pop().context("spawn prints one value")?;
        let Some(tid) = answer["results"][0]["tid"].as_str() else {
            bail!("spawn {}: {answer}", words.join(" "))
        };
        wait_for(COMMAND_TIMEOUT, || {
            let tasks = self.tasks().map_err(|error| format!("{error:#}"))?;
            let connected = tasks
                .iter()
                .any(|task| task.tid == tid && task.flags & TASK_CONNECTED != 0);
            if connected {
                Ok(tid.to_string())
            } else {
                Err(format!("{tid} does not connect: {tasks:?}"))
            }
        })
    }

    /// Migrates a task with the console. A failure of the migration is no error.
    ///
    /// # Errors
    /// The console does not start or does not end.
    pub fn migrate(&self, tid: &str, host: &str) -> Result<CommandResult> {
        self.pvm(&["migrate", tid, host])
    }

    /// Migrates a task with the console. Repeats the command while the task is not connected to its
    /// daemon, for instance because an earlier migration is not complete. A failure of the
    /// migration is no error.
    ///
    /// # Errors
    /// The task does not connect within the time limit, or the console does not end.
    pub fn migrate_when_ready(&self, tid: &str, host: &str) -> Result<CommandResult> {
        wait_for(COMMAND_TIMEOUT, || match self.migrate(tid, host) {
            Ok(done) if done.err.contains(NOT_CONNECTED_TEXT) => Err(done.err),
            other => Ok(other),
        })?
    }

    /// Migrates a task with the console as soon as the task is connected to its daemon.
    pub fn must_migrate(&self, tid: &str, host: &str) {
        match self.migrate_when_ready(tid, host) {
            Ok(done) if done.succeeded() => {}
            other => panic!("{tid} to {host}: {other:?}\n{}", self.logs()),
        }
    }

    /// Starts a migration with the console, and returns without waiting for its end.
    pub fn start_migrate(&self, tid: &str, host: &str) -> Result<RunningCommand> {
        self.start_pvm(&["migrate", tid, host])
    }

    /// Starts the console on h1 with one command, and returns without waiting for its end.
    pub fn start_pvm(&self, words: &[&str]) -> Result<RunningCommand> {
        RunningCommand::start(self.pvm_command(words), Stdio::null())
    }

    /// Returns a command that runs the console on h1 with these arguments. Without arguments the
    /// console reads commands from standard input.
    pub fn pvm_command(&self, words: &[&str]) -> Command {
        let mut command = self.command(self.bed.host(1), self.prefix.join("bin/pvm"));
        command.args(words);
        command
    }

    /// Returns the host on which a task runs.
    ///
    /// # Errors
    /// There is no such task.
    pub fn host_of(&self, tid: &str) -> Result<String> {
        let tasks = self.tasks()?;
        let task = tasks
            .iter()
            .find(|task| task.tid == tid)
            .with_context(|| format!("no task {tid}: {tasks:?}"))?;
        task.host
            .clone()
            .with_context(|| format!("{tid} runs on no known host"))
    }

    /// Compiles a C program of the tests into the folder where `spawn` searches. Returns its path.
    pub fn compile_program(&self, name: &str) -> Result<PathBuf> {
        let prefix = self
            .bed
            .prefix()
            .context("the testbed was made without installed programs")?;
        programs::compile(name, prefix, &self.home().join("pvm3/bin/LINUX64"))
    }

    /// Returns the intervals in which a task of the test program `busy` did not run, by the task's
    /// own clock, as (begin, end) in microseconds since 1970, oldest first.
    pub fn busy_gaps(&self, tid: &str) -> Result<Vec<(u64, u64)>> {
        let mut command = self.command(self.bed.host(1), self.home().join("pvm3/bin/LINUX64/busy"));
        command.args(["ask", tid]);
        let done = run_ok(command, COMMAND_TIMEOUT)?;
        ensure!(
            done.out.contains("now "),
            "{tid} says something else: {done:?}"
        );
        let gap = |line: &str| {
            let mut words = line.strip_prefix("gap ")?.split(' ');
            Some((words.next()?.parse().ok()?, words.next()?.parse().ok()?))
        };
        Ok(done.out.lines().filter_map(gap).collect())
    }

    /// Returns the newest events and the daemons' logs of all hosts, for the report of a failed
    /// test.
    pub fn logs(&self) -> String {
        let uid = if self.settings.as_alice { ALICE_UID } else { 0 };
        let place = format!("/tmp/sempa-{uid}/pvm/pvml");
        let newest = self.events().map_or_else(
            |error| format!("{error:#}"),
            |events| format_newest_events(&events),
        );
        let mut all = format!("--- newest events ---\n{newest}\n");
        for host in self.bed.hosts() {
            let bytes = std::fs::read(host.machine_path(&place))
                .unwrap_or_else(|error| error.to_string().into_bytes());
            let text = String::from_utf8_lossy(&bytes);
            let lines: Vec<&str> = text
                .lines()
                .filter(|line| !line.ends_with(" (pvm)"))
                .collect();
            let newest = lines[lines.len().saturating_sub(LOG_LINES_SHOWN)..].join("\n");
            all.push_str(&format!("--- log of {} ---\n{newest}\n", host.name()));
        }
        all
    }

    /// Waits until no host has a daemon or a tasker.
    ///
    /// # Errors
    /// Such a process remains at the deadline; the error names it.
    pub fn wait_until_gone(&self, deadline: Duration) -> Result<()> {
        for host in self.bed.hosts() {
            crate::testbed::wait_until_no_process(host, "pvmd", deadline)?;
            crate::testbed::wait_until_no_process(host, "pvm-tasker", deadline)?;
        }
        Ok(())
    }

    /// Halts the virtual machine and waits until no process of it remains on any host.
    ///
    /// # Errors
    /// A process remains; the error names it.
    pub fn halt(&self) -> Result<()> {
        self.pvm(&["halt"])?.expect_success("halt")?;
        for host in self.bed.hosts() {
            crate::testbed::wait_until_no_process(host, "pvm", COMMAND_TIMEOUT)?;
        }
        Ok(())
    }
}
