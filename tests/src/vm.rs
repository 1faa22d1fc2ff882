//! A virtual machine on the hosts of a testbed. Tests use it through the console, as a user does.

use crate::layout::home_of;
use crate::programs;
use crate::run::{CommandResult, RunningCommand, run_successfully, run_to_end, wait_for};
use crate::tasker_service::TaskerServices;
use crate::testbed::{ALICE, Account, Host, ROOT, Testbed};
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

/// Environment variable with any value: the user of all virtual machines is alice, and all hosts
/// run the tasker service. Tests that need root's virtual machine fail then.
const USER_VARIABLE: &str = "SEMPA_TEST_AS_USER";
/// Time limit for one command of the console on a loaded machine. It is sufficient for migrations
/// with much memory.
pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit for a migration. A pre-copy has the lowest priority, so on a loaded machine it sends
/// only about 15 MiB/s.
const MIGRATION_TIMEOUT: Duration = Duration::from_secs(240);

/// Time limit for lost hosts to become members again.
const JOIN_TIMEOUT: Duration = Duration::from_secs(120);

/// Number of lines at the end of a host's log that are shown when a test fails.
const LOG_LINES_SHOWN_MAX: usize = 150;

/// Part of the message with which the console refuses to migrate a task that has been spawned and
/// is not enrolled yet. The refusal is temporary.
const NOT_CONNECTED_TEXT: &str = "it is not connected to its daemon";

/// Number of newest events that are shown when a test fails.
const EVENTS_SHOWN_MAX: usize = 100;

/// Formats the newest events, one per line. Omits the starts and ends of tasks that were started
/// from a command line, because most of these tasks are consoles that waiting tests start.
fn format_newest_events(events: &[EventEntry]) -> String {
    let console_tid = |entry: &EventEntry| match &entry.kind {
        EventKind::TaskStarted { tid, name, .. } if name.is_empty() => Some(*tid),
        _ => None,
    };
    let console_tid: BTreeSet<Tid> = events.iter().filter_map(console_tid).collect();
    let is_console_event = |entry: &&EventEntry| match &entry.kind {
        EventKind::TaskStarted { tid, .. } | EventKind::TaskEnded { tid, .. } => {
            console_tid.contains(tid)
        }
        _ => false,
    };
    let shown_events: Vec<&EventEntry> = events
        .iter()
        .filter(|entry| !is_console_event(entry))
        .collect();
    let format_event = |entry: &&EventEntry| {
        let host = entry.host.as_deref().unwrap_or("?");
        format!("{:.3} {host} {}", entry.at_us as f64 / 1e6, entry.text)
    };
    let lines: Vec<String> = shown_events[shown_events.len().saturating_sub(EVENTS_SHOWN_MAX)..]
        .iter()
        .map(format_event)
        .collect();
    lines.join("\n")
}

/// Settings with which a test starts a virtual machine.
#[derive(Clone, Debug, Default)]
pub struct VmSettings {
    /// The command in `PVM_RM` that starts the resource manager. If it is `None`, the daemons place
    /// tasks round robin.
    pub rm_command: Option<String>,
    /// True if the user of the virtual machine is alice; otherwise it is root.
    pub runs_as_alice: bool,
    /// Additional environment variables of daemons and commands on h1.
    pub env: Vec<(String, String)>,
}

impl VmSettings {
    /// Converts environment variables to the type of [`VmSettings::env`].
    pub fn owned_env(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
        let pairs = pairs.iter();
        pairs
            .map(|(name, value)| (name.to_string(), value.to_string()))
            .collect()
    }
}

/// One task in the output of `pvm ps -a --json`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Task {
    /// The tid as the console prints it, such as `t40001`.
    pub tid: String,
    /// Name of the host where the task runs.
    pub host: Option<String>,
    /// Name of the program; empty for a task that was started from a command line.
    pub name: String,
    /// Process id on the task's host, outside the task's PID namespace.
    #[serde(rename = "host_pid")]
    pub pid: i32,
    /// Process id that `getpid()` returns in the task.
    #[serde(rename = "pid")]
    pub namespace_pid: i32,
    /// PVM's flags; bit 4 means that the task is connected to its daemon.
    pub flags: i32,
    /// True while the task migrates.
    pub moving: bool,
    /// True if the task is paused for the owner of its host.
    pub stopped: bool,
    /// True if the task is suspended; it stays suspended until a user resumes it.
    pub suspended: bool,
    /// Number of processes that the task has left behind at its end; 0 if it has not ended.
    #[serde(default)]
    pub left_processes: u32,
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
    testbed: &'a Testbed,
    prefix_in_hosts: PathBuf,
    user: Account,
    settings: VmSettings,
}

/// A result whose value a test needs in order to continue.
pub trait OrPanicWithLogs<T> {
    /// Returns the value of `Ok`.
    ///
    /// # Panics
    /// The result is an error. The message contains the error, the newest events and the daemons'
    /// logs.
    fn or_panic_with_logs(self, vm: &Vm<'_>) -> T;
}

impl<T, E: Display> OrPanicWithLogs<T> for Result<T, E> {
    #[track_caller]
    fn or_panic_with_logs(self, vm: &Vm<'_>) -> T {
        match self {
            Ok(value) => value,
            Err(error) => panic!("{error:#}\n{}", vm.events_and_logs()),
        }
    }
}

impl<'a> Vm<'a> {
    /// Starts a virtual machine on h1 with the installed programs of the testbed. If the settings
    /// contain a command for a resource manager, waits until the resource manager has registered.
    ///
    /// # Errors
    /// The console fails, or no resource manager registers; the error contains the console's output
    /// or the newest events.
    pub fn start(testbed: &'a Testbed, settings: VmSettings) -> Result<Self> {
        let is_user_run = std::env::var_os(USER_VARIABLE).is_some();
        if is_user_run {
            TaskerServices::start_until_end_of_testbed(testbed, &settings.env)?;
        }
        let user = match settings.runs_as_alice || is_user_run {
            true => ALICE,
            false => ROOT,
        };
        Self::start_as(testbed, user, settings).map(|(vm, _)| vm)
    }

    /// As [`Vm::start`], for the user `user`, whatever the settings say. Returns the output of the
    /// `start` command, too.
    ///
    /// # Errors
    /// As [`Vm::start`].
    pub fn start_as(
        testbed: &'a Testbed,
        user: Account,
        settings: VmSettings,
    ) -> Result<(Self, CommandResult)> {
        let has_rm = settings.rm_command.is_some();
        let prefix = testbed
            .prefix()
            .context("the testbed was made without installed programs")?;
        let vm = Vm {
            testbed,
            prefix_in_hosts: crate::layout::prefix_in_hosts(prefix),
            user,
            settings,
        };
        let start_output = vm
            .run_pvm(&["start"])?
            .expect_success("starting the virtual machine")?;
        if has_rm {
            vm.wait_for_event(COMMAND_TIMEOUT, "a registered resource manager", |entry| {
                matches!(entry.kind, EventKind::RmRegistered { .. })
            })?;
        }
        Ok((vm, start_output))
    }

    pub fn testbed(&self) -> &'a Testbed {
        self.testbed
    }

    /// Returns the home folder of the virtual machine's user. All hosts share it.
    pub fn user_home(&self) -> PathBuf {
        home_of(self.testbed.folder(), self.user.name)
    }

    /// Returns the user id of the virtual machine's user.
    pub fn user_id(&self) -> u32 {
        self.user.uid
    }

    /// Returns a command that runs `program` on a host with the environment of the virtual
    /// machine's user.
    pub fn user_command(&self, host: &Host, program: impl AsRef<Path>) -> Command {
        let home = self.user_home();
        let mut command = if self.user == ROOT {
            host.root_command(program)
        } else {
            host.command_as(Some((self.user.name, self.user.uid, &home)), program)
        };
        if self.user == ROOT {
            command.env("PVM_ALLOW_ROOT", "1");
        }
        if let Some(rm) = &self.settings.rm_command {
            command.env("PVM_RM", rm);
        }
        if let Some(engine) = self.testbed.engine() {
            command.env("SEMPA_CRIU", engine);
        }
        if let Some(folder) = self.testbed.breakpoints_folder() {
            command.env("SEMPA_TEST_STEPS", folder);
        }
        command.envs(self.settings.env.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Runs the console on h1 with one command and waits for its end. A failure of the command is
    /// no error.
    pub fn run_pvm(&self, arguments: &[&str]) -> Result<CommandResult> {
        self.run_pvm_on(self.testbed.host(1), arguments)
    }

    /// As [`Vm::run_pvm`], on `host`.
    pub fn run_pvm_on(&self, host: &Host, arguments: &[&str]) -> Result<CommandResult> {
        self.run_pvm_within(host, arguments, COMMAND_TIMEOUT)
    }

    fn run_pvm_within(
        &self,
        host: &Host,
        arguments: &[&str],
        timeout: Duration,
    ) -> Result<CommandResult> {
        let mut command = self.user_command(host, self.prefix_in_hosts.join("bin/pvm"));
        command.args(arguments);
        run_to_end(command, timeout)
    }

    /// Runs the console with `--json` and one command. Returns the printed values, one per line.
    ///
    /// # Errors
    /// The command fails, or its output is not JSON.
    pub fn pvm_json(&self, arguments: &[&str]) -> Result<Vec<Value>> {
        let arguments = [&["--json"], arguments].concat();
        let result = self
            .run_pvm(&arguments)?
            .expect_success(&format!("pvm {}", arguments.join(" ")))?;
        let lines = result.stdout.lines().filter(|line| !line.trim().is_empty());
        lines
            .map(|line| serde_json::from_str(line).with_context(|| format!("not JSON: {line}")))
            .collect()
    }

    /// Adds hosts by name, with one command of the console. Succeeds only if all hosts are added.
    pub fn add_hosts(&self, hosts: &[&str]) -> Result<()> {
        let mut arguments = vec!["add"];
        arguments.extend(hosts);
        self.run_pvm(&arguments)?
            .expect_success("adding hosts")
            .map(|_| ())
    }

    /// Returns the names of all hosts in the host table, as the console's `conf` command lists
    /// them.
    ///
    /// # Errors
    /// The console fails.
    pub fn host_names(&self) -> Result<Vec<String>> {
        let json_values = self.pvm_json(&["conf"])?;
        let hosts = json_values
            .last()
            .and_then(|value| value["hosts"].as_array())
            .context("conf prints hosts")?;
        Ok(hosts
            .iter()
            .filter_map(|host| host["name"].as_str())
            .map(str::to_string)
            .collect())
    }

    /// Adds each host in `hosts` that is not in the virtual machine. Repeats the command until all
    /// are members.
    ///
    /// # Errors
    /// A host does not become a member within the time limit.
    pub fn add_missing_hosts(&self, hosts: &[&Host]) -> Result<()> {
        wait_for(JOIN_TIMEOUT, || {
            let members = self.host_names().map_err(|error| error.to_string())?;
            let names = hosts.iter().map(|host| host.name());
            let missing_names: Vec<&str> = names
                .filter(|name| !members.iter().any(|host| host == name))
                .collect();
            if missing_names.is_empty() {
                return Ok(());
            }
            // A daemon that has lost its master may still run; until it ends, its host cannot be
            // added.
            self.add_hosts(&missing_names)
                .map_err(|error| format!("{error:#}"))
        })
    }

    /// Returns the tasks of the virtual machine, as the console lists them.
    ///
    /// # Errors
    /// The console fails.
    pub fn tasks(&self) -> Result<Vec<Task>> {
        #[derive(Deserialize)]
        struct TaskList {
            tasks: Vec<Task>,
        }
        let reply = self
            .pvm_json(&["ps", "-a"])?
            .pop()
            .context("ps prints one value")?;
        Ok(serde_json::from_value::<TaskList>(reply)?.tasks)
    }

    /// Returns all events of the event log, oldest first.
    ///
    /// # Errors
    /// The console fails.
    pub fn events(&self) -> Result<Vec<EventEntry>> {
        self.events_from(0)
    }

    /// Returns the events from number `number` on.
    pub fn events_from(&self, number: u64) -> Result<Vec<EventEntry>> {
        let json_values = self.pvm_json(&["events", "--from", &number.to_string()])?;
        json_values
            .into_iter()
            .map(|value| Ok(serde_json::from_value(value)?))
            .collect()
    }

    /// Returns the number of checkpoints that the event log reports.
    ///
    /// # Panics
    /// The console fails.
    pub fn checkpoint_count(&self) -> usize {
        let events = self.events().or_panic_with_logs(self);
        let is_checkpoint =
            |entry: &&EventEntry| matches!(entry.kind, EventKind::Checkpointed { .. });
        events.iter().filter(is_checkpoint).count()
    }

    /// Waits for an event that `is_expected` accepts, and returns the event. `description`
    /// describes the event in the error.
    ///
    /// # Errors
    /// The event does not happen before the deadline; the error contains the newest events.
    pub fn wait_for_event(
        &self,
        timeout: Duration,
        description: &str,
        is_expected: impl Fn(&EventEntry) -> bool,
    ) -> Result<EventEntry> {
        wait_for(timeout, || {
            let events = self.events().map_err(|error| error.to_string())?;
            if let Some(entry) = events.iter().find(|entry| is_expected(entry)) {
                return Ok(entry.clone());
            }
            let newest_texts: Vec<&str> = events
                .iter()
                .rev()
                .take(8)
                .map(|entry| entry.text.as_str())
                .collect();
            Err(format!(
                "no {description}; newest events: {}",
                newest_texts.join(" | ")
            ))
        })
    }

    /// Waits until a job has rolled back to its newest checkpoint for the reason `reason`. Returns
    /// the event of this rollback.
    ///
    /// # Errors
    /// No job rolls back for this reason before the deadline.
    pub fn wait_for_rollback(&self, timeout: Duration, reason: &str) -> Result<EventEntry> {
        let is_expected = |entry: &EventEntry| matches!(&entry.kind, EventKind::Restarted { why, .. } if why == reason);
        self.wait_for_event(timeout, "a job that went back", is_expected)
    }

    /// Spawns one task with arguments of the console's `spawn` command, such as `-h2`. Waits until
    /// the task has connected to its daemon. Returns its tid.
    pub fn spawn_connected(&self, arguments: &[&str]) -> Result<String> {
        let mut command = vec!["spawn"];
        command.extend(arguments);
        let reply = self
            .pvm_json(&command)?
            .pop()
            .context("spawn prints one value")?;
        let Some(tid) = reply["results"][0]["tid"].as_str() else {
            bail!("spawn {}: {reply}", arguments.join(" "))
        };
        wait_for(COMMAND_TIMEOUT, || {
            let tasks = self.tasks().map_err(|error| format!("{error:#}"))?;
            let is_connected = tasks
                .iter()
                .any(|task| task.tid == tid && task.flags & TASK_CONNECTED != 0);
            if is_connected {
                Ok(tid.to_string())
            } else {
                Err(format!("{tid} does not connect: {tasks:?}"))
            }
        })
    }

    /// Migrates a task with the console and waits for the end of the migration. A failure of the
    /// migration is no error.
    ///
    /// # Errors
    /// The console does not start or does not end.
    pub fn migrate(&self, tid: &str, host: &str) -> Result<CommandResult> {
        let arguments = ["migrate", tid, host];
        self.run_pvm_within(self.testbed.host(1), &arguments, MIGRATION_TIMEOUT)
    }

    /// Migrates a task with the console. Repeats the command while the task is not connected to its
    /// daemon, for instance because an earlier migration is not complete. Any other failure of the
    /// migration is no error.
    ///
    /// # Errors
    /// The task does not connect within the time limit, or the console does not end.
    pub fn migrate_when_ready(&self, tid: &str, host: &str) -> Result<CommandResult> {
        wait_for(COMMAND_TIMEOUT, || match self.migrate(tid, host) {
            Ok(result) if result.stderr.contains(NOT_CONNECTED_TEXT) => Err(result.stderr),
            other => Ok(other),
        })?
    }

    /// Migrates a task with the console as soon as the task is connected to its daemon.
    ///
    /// # Panics
    /// The migration fails.
    pub fn migrate_or_panic(&self, tid: &str, host: &str) {
        match self.migrate_when_ready(tid, host) {
            Ok(result) if result.succeeded() => {}
            other => panic!("{tid} to {host}: {other:?}\n{}", self.events_and_logs()),
        }
    }

    /// Waits until a task can migrate to a host.
    ///
    /// # Errors
    /// The migration is still refused after `timeout`.
    pub fn wait_until_migratable(&self, tid: &str, host: &str, timeout: Duration) -> Result<()> {
        wait_for(timeout, || {
            let query_output = self
                .run_pvm(&["can-migrate", tid, host])
                .map_err(|error| error.to_string())?;
            if query_output.succeeded() {
                Ok(())
            } else {
                Err(query_output.stdout + &query_output.stderr)
            }
        })
    }

    /// Starts a migration with the console, and returns without waiting for its end.
    pub fn start_migration(&self, tid: &str, host: &str) -> Result<RunningCommand> {
        self.start_pvm(&["migrate", tid, host])
    }

    /// Starts the console on h1 with one command, and returns without waiting for its end.
    pub fn start_pvm(&self, arguments: &[&str]) -> Result<RunningCommand> {
        RunningCommand::start(self.pvm_command(arguments), Stdio::null())
    }

    /// Returns a command that runs the console on h1 with these arguments. Without arguments the
    /// console reads commands from standard input.
    pub fn pvm_command(&self, arguments: &[&str]) -> Command {
        let mut command =
            self.user_command(self.testbed.host(1), self.prefix_in_hosts.join("bin/pvm"));
        command.args(arguments);
        command
    }

    /// Returns the name of the host on which a task runs.
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

    /// Compiles a C program of `tests/programs` into the folder where `spawn` searches. Returns its
    /// path.
    pub fn compile_program(&self, name: &str) -> Result<PathBuf> {
        let prefix = self
            .testbed
            .prefix()
            .context("the testbed was made without installed programs")?;
        programs::compile_into(name, prefix, &self.user_home().join("pvm3/bin/LINUX64"))
    }

    /// Returns the intervals in which a task of the test program `busy` did not run, by the task's
    /// own clock, as (begin, end) in microseconds since 1970, oldest first.
    pub fn busy_gaps_us(&self, tid: &str) -> Result<Vec<(u64, u64)>> {
        let mut command = self.user_command(
            self.testbed.host(1),
            self.user_home().join("pvm3/bin/LINUX64/busy"),
        );
        command.args(["ask", tid]);
        let result = run_successfully(command, COMMAND_TIMEOUT)?;
        ensure!(
            result.stdout.contains("now "),
            "{tid} says something else: {result:?}"
        );
        let parse_gap = |line: &str| {
            let mut times = line.strip_prefix("gap ")?.split(' ');
            Some((times.next()?.parse().ok()?, times.next()?.parse().ok()?))
        };
        Ok(result.stdout.lines().filter_map(parse_gap).collect())
    }

    /// Returns the newest events and the end of each daemon's log, for the report of a failed test.
    pub fn events_and_logs(&self) -> String {
        let log_path = format!("/tmp/sempa-{}/pvm/pvml", self.user_id());
        let newest_lines = self.events().map_or_else(
            |error| format!("{error:#}"),
            |events| format_newest_events(&events),
        );
        let mut report = format!("--- newest events ---\n{newest_lines}\n");
        for host in self.testbed.hosts() {
            let bytes = std::fs::read(host.machine_path(&log_path))
                .unwrap_or_else(|error| error.to_string().into_bytes());
            let text = String::from_utf8_lossy(&bytes);
            let lines: Vec<&str> = text
                .lines()
                .filter(|line| !line.ends_with(" (pvm)"))
                .collect();
            let newest_lines = lines[lines.len().saturating_sub(LOG_LINES_SHOWN_MAX)..].join("\n");
            report.push_str(&format!("--- log of {} ---\n{newest_lines}\n", host.name()));
        }
        report
    }

    /// Waits until no host has a daemon or a tasker.
    ///
    /// # Errors
    /// Such a process remains at the deadline; the error contains its command line.
    pub fn wait_until_ended(&self, timeout: Duration) -> Result<()> {
        for host in self.testbed.hosts() {
            crate::testbed::wait_until_no_process(host, "pvmd", timeout)?;
            crate::testbed::wait_until_no_process(host, "pvm-tasker", timeout)?;
        }
        Ok(())
    }

    /// Halts the virtual machine and waits until no process of the virtual machine remains on any
    /// host.
    ///
    /// # Errors
    /// The `halt` command fails, or a process remains; the error contains the command's output or
    /// the command line of the process.
    pub fn halt_and_wait(&self) -> Result<()> {
        self.run_pvm(&["halt"])?.expect_success("halt")?;
        for host in self.testbed.hosts() {
            crate::testbed::wait_until_no_process(host, "pvm", COMMAND_TIMEOUT)?;
        }
        Ok(())
    }
}
