//! Detects whether a task runs twice or loses a message. The oracle uses the tasks of
//! `tests/programs/witness.c` and a director process that exchanges messages with these tasks.

use crate::run::{RunningCommand, wait_for};
use crate::vm::Vm;
use anyhow::{Context, Result, bail, ensure};
use std::collections::HashMap;
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::{ChildStdin, Stdio};
use std::time::Duration;

/// Time limit for one answer of the director on a loaded machine.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(60);

/// The director process and its files. The director ends with the virtual machine.
#[derive(Debug)]
pub struct Oracle {
    uses_direct_routes: bool,
    director: RunningCommand,
    director_input: ChildStdin,
    folder: PathBuf,
    program_path: String,
}

/// The director's count of the messages between itself and a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageCounts {
    /// Number of messages that the director has received from the task.
    pub received_count: u64,
    /// Number of lost, repeated, damaged or disordered messages that the director or the task has
    /// detected.
    pub fault_count: u64,
}

impl Oracle {
    /// Compiles the program and starts the director on h1, without direct routes.
    ///
    /// # Errors
    /// The director does not start.
    pub fn start(vm: &Vm<'_>) -> Result<Self> {
        Self::start_on(vm, 1, false)
    }

    /// As [`Oracle::start`], on host number `host_number`. If `uses_direct_routes` is true, all
    /// tasks request direct routes, and [`Oracle::spawn_and_wait`] also waits for the director's
    /// direct route to each task.
    ///
    /// # Errors
    /// The director does not start.
    pub fn start_on(vm: &Vm<'_>, host_number: usize, uses_direct_routes: bool) -> Result<Self> {
        let program = vm.compile_program("witness")?;
        // A testbed may run several virtual machines, one after another, so each oracle makes a
        // folder with a new name.
        let mut new_folders =
            (1..).map(|number| vm.testbed().folder().join(format!("witnesses-{number}")));
        let folder = new_folders
            .find(|folder| !folder.exists())
            .context("a free name")?;
        fs::create_dir_all(&folder)?;
        std::os::unix::fs::chown(&folder, Some(vm.user_id()), Some(vm.user_id()))?;
        let program_path = program.display().to_string();
        let mut command = vm.user_command(vm.testbed().host(host_number), program);
        command.args(uses_direct_routes.then_some("direct"));
        let mut director = RunningCommand::start(command, Stdio::piped())?;
        let director_input = director.take_stdin().context("its input is piped")?;
        Ok(Self {
            uses_direct_routes,
            director,
            director_input,
            folder,
            program_path,
        })
    }

    fn send_command(&mut self, line: &str) -> Result<()> {
        Ok(self
            .director_input
            .write_all(format!("{line}\n").as_bytes())?)
    }

    /// Returns the lines of the director's output that start with `prefix`, newest first. `prefix`
    /// is removed from them.
    fn output_lines(&self, prefix: &str) -> Result<Vec<String>, String> {
        let output = self
            .director
            .stdout_so_far()
            .map_err(|error| error.to_string())?;
        // The last line may be incomplete, so it is ignored.
        let complete_lines = output
            .rsplit_once('\n')
            .map_or("", |(complete_lines, _)| complete_lines);
        Ok(complete_lines
            .lines()
            .rev()
            .filter_map(|line| line.strip_prefix(prefix))
            .map(str::to_string)
            .collect())
    }

    /// Spawns one task for each (host, name) and waits until all of these tasks exchange messages.
    /// Returns their tids in the order of the arguments.
    pub fn spawn_and_wait(&mut self, hosts_and_names: &[(String, String)]) -> Result<Vec<String>> {
        for (host, name) in hosts_and_names {
            self.send_command(&format!("spawn {host} {name} {}", self.folder.display()))?;
        }
        let mut tids = Vec::new();
        for (host, name) in hosts_and_names {
            let tid = wait_for(ANSWER_TIMEOUT, || {
                if let Some(code) = self.output_lines(&format!("refused {name} "))?.pop() {
                    return Ok(Err(code));
                }
                self.output_lines(&format!("witness {name} "))?
                    .pop()
                    .map(Ok)
                    .ok_or(format!("no {name} on {host}"))
            })?;
            tids.push(tid.map_err(|code| anyhow::anyhow!("{name} on {host}: {code}"))?);
        }
        for tid in &tids {
            self.wait_for_messages(tid)?;
            if self.uses_direct_routes {
                self.wait_for_routes(tid, 1)?;
            }
        }
        Ok(tids)
    }

    /// Requests the director's count of the messages of a task, and waits for the answer.
    pub fn request_message_counts(&mut self, tid: &str) -> Result<MessageCounts> {
        let prefix = format!("account {tid} ");
        let line_count_before = self
            .output_lines(&prefix)
            .map_err(anyhow::Error::msg)?
            .len();
        self.send_command(&format!("ask {tid}"))?;
        let line = wait_for(ANSWER_TIMEOUT, || {
            let lines = self.output_lines(&prefix)?;
            if lines.len() > line_count_before {
                Ok(lines[0].clone())
            } else {
                Err("the director does not answer".to_string())
            }
        })?;
        let fields: Vec<&str> = line.split(' ').collect();
        let [
            "got",
            received_count,
            "bad",
            director_fault_count,
            "theirs",
            task_fault_count,
        ] = fields[..]
        else {
            bail!("{line}")
        };
        Ok(MessageCounts {
            received_count: received_count.parse()?,
            fault_count: director_fault_count.parse::<u64>()? + task_fault_count.parse::<u64>()?,
        })
    }

    /// Waits until a task has sent more messages than it may send without an answer. This proves
    /// that messages arrive in both directions.
    ///
    /// # Errors
    /// The task sends nothing, or a message was lost, repeated, damaged or out of order.
    pub fn wait_for_messages(&mut self, tid: &str) -> Result<()> {
        // This number is greater than the number of messages that a task sends without an answer.
        const UNANSWERED_MESSAGES_END: u64 = 12;
        let counts_before = self.request_message_counts(tid)?;
        wait_for(ANSWER_TIMEOUT, || {
            let counts = self
                .request_message_counts(tid)
                .map_err(|error| error.to_string())?;
            if counts.received_count >= counts_before.received_count + UNANSWERED_MESSAGES_END {
                Ok(())
            } else {
                Err(format!("{tid} is silent: {counts_before:?}, {counts:?}"))
            }
        })?;
        let final_counts = self.request_message_counts(tid)?;
        ensure!(final_counts.fault_count == 0, "{tid}: {final_counts:?}");
        Ok(())
    }

    /// Waits until the director has established at least `expected_count` direct routes to a task,
    /// including those that no longer exist.
    ///
    /// # Errors
    /// The director does not establish them within the time limit.
    pub fn wait_for_routes(&self, tid: &str, expected_count: usize) -> Result<()> {
        wait_for(ANSWER_TIMEOUT, || {
            let route_count = self
                .output_lines("route ")?
                .iter()
                .filter(|route_tid| *route_tid == tid)
                .count();
            if route_count >= expected_count {
                Ok(())
            } else {
                Err(format!("{route_count} routes to {tid}"))
            }
        })
    }

    /// True if the director was notified that a task has ended.
    pub fn was_notified_of_end(&self, tid: &str) -> Result<bool, String> {
        Ok(!self.output_lines(&format!("gone {tid}"))?.is_empty())
    }

    /// Ends a task and waits until the director has been notified of the end.
    pub fn end_task_and_wait(&mut self, tid: &str) -> Result<()> {
        self.send_command(&format!("stop {tid}"))?;
        wait_for(ANSWER_TIMEOUT, || {
            if self.was_notified_of_end(tid)? {
                Ok(())
            } else {
                Err(format!("{tid} does not end"))
            }
        })
    }

    /// Checks the lines of a task's file: they must be 0, 1, 2, …. Other lines prove that two
    /// copies of the task have run. Returns the number of lines.
    pub fn check_ran_once(&self, name: &str) -> Result<usize> {
        let text = fs::read_to_string(self.folder.join(name))?;
        let lines: Vec<&str> = text.lines().collect();
        for (index, line) in lines.iter().enumerate() {
            let nearby_lines = || &lines[index.saturating_sub(3)..lines.len().min(index + 4)];
            ensure!(
                *line == index.to_string(),
                "{name}, line {index}: {:?}",
                nearby_lines()
            );
        }
        Ok(lines.len())
    }

    /// Returns the number of processes of each task on all hosts, by name of the task.
    pub fn process_counts(&self) -> HashMap<String, usize> {
        let mut counts = HashMap::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let command_line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let mut arguments = command_line
                .split(|byte| *byte == 0)
                .map(String::from_utf8_lossy);
            if arguments.next().is_some_and(|program| *program == *self.program_path)
                && let Some(name) = arguments.next()
                // In the director's command line the folder is empty.
                && arguments.next().is_some_and(|folder| !folder.is_empty())
            {
                *counts.entry(name.into_owned()).or_default() += 1;
            }
        }
        counts
    }
}
