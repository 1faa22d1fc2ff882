//! Detects whether a task runs twice or loses a message: the tasks of `tests/programs/witness.c`
//! and the director process that exchanges messages with them.

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
const TIMEOUT: Duration = Duration::from_secs(60);

/// The director process and its files. The director ends with the virtual machine.
#[derive(Debug)]
pub struct Oracle {
    direct: bool,
    director: RunningCommand,
    director_input: ChildStdin,
    folder: PathBuf,
    program: String,
}

/// The director's account of the messages between itself and a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageAccount {
    /// Number of messages that the director has received from the task.
    pub received: u64,
    /// Number of lost, repeated, damaged or disordered messages that the director or the task has
    /// detected.
    pub faults: u64,
}

impl Oracle {
    /// Compiles the program and starts the director on h1.
    ///
    /// # Errors
    /// The director does not start.
    pub fn start(vm: &Vm<'_>) -> Result<Oracle> {
        Oracle::start_on(vm, 1, false)
    }

    /// As [`Oracle::start`], on any host. With `direct` all tasks request direct routes, and
    /// [`Oracle::spawn`] also waits for the director's direct route to each task.
    ///
    /// # Errors
    /// The director does not start.
    pub fn start_on(vm: &Vm<'_>, host: usize, direct: bool) -> Result<Oracle> {
        let program = vm.compile_program("witness")?;
        // Several virtual machines may run on one testbed, one after another, so the folder needs a
        // new name.
        let mut folders = (1..).map(|number| vm.bed().folder().join(format!("witnesses-{number}")));
        let folder = folders
            .find(|folder| !folder.exists())
            .context("a free name")?;
        fs::create_dir_all(&folder)?;
        let name = program.display().to_string();
        let mut command = vm.command(vm.bed().host(host), program);
        command.args(direct.then_some("direct"));
        let mut director = RunningCommand::start(command, Stdio::piped())?;
        let words = director.take_stdin().context("its input is piped")?;
        Ok(Oracle {
            direct,
            director,
            director_input: words,
            folder,
            program: name,
        })
    }

    fn send_command(&mut self, line: &str) -> Result<()> {
        Ok(self
            .director_input
            .write_all(format!("{line}\n").as_bytes())?)
    }

    /// Returns the lines of the director's output that start with `begin`, without `begin`, newest
    /// first.
    fn output_lines(&self, begin: &str) -> Result<Vec<String>, String> {
        let out = self
            .director
            .out_so_far()
            .map_err(|error| error.to_string())?;
        // The last line may be incomplete.
        let whole = out.rsplit_once('\n').map_or("", |(whole, _)| whole);
        Ok(whole
            .lines()
            .rev()
            .filter_map(|line| line.strip_prefix(begin))
            .map(str::to_string)
            .collect())
    }

    /// Spawns one task for each (host, name) and waits until all of them exchange messages. Returns
    /// their tids in the same order.
    pub fn spawn(&mut self, which: &[(String, String)]) -> Result<Vec<String>> {
        for (host, name) in which {
            self.send_command(&format!("spawn {host} {name} {}", self.folder.display()))?;
        }
        let mut tids = Vec::new();
        for (host, name) in which {
            let tid = wait_for(TIMEOUT, || {
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
            if self.direct {
                self.wait_for_routes(tid, 1)?;
            }
        }
        Ok(tids)
    }

    /// Requests and returns the account of a task.
    pub fn account(&mut self, tid: &str) -> Result<MessageAccount> {
        let begin = format!("account {tid} ");
        let before = self.output_lines(&begin).map_err(anyhow::Error::msg)?.len();
        self.send_command(&format!("ask {tid}"))?;
        let line = wait_for(TIMEOUT, || {
            let said = self.output_lines(&begin)?;
            if said.len() > before {
                Ok(said[0].clone())
            } else {
                Err("the director does not answer".to_string())
            }
        })?;
        let words: Vec<&str> = line.split(' ').collect();
        let ["got", got, "bad", bad, "theirs", theirs] = words[..] else {
            bail!("{line}")
        };
        Ok(MessageAccount {
            received: got.parse()?,
            faults: bad.parse::<u64>()? + theirs.parse::<u64>()?,
        })
    }

    /// Waits until a task has sent more messages than it may send without an answer. So the
    /// messages in both directions arrive.
    ///
    /// # Errors
    /// The task sends nothing, or a message was lost, repeated, damaged or out of order.
    pub fn wait_for_messages(&mut self, tid: &str) -> Result<()> {
        // Exceeds the number of messages that a task sends without an answer.
        const SOME: u64 = 12;
        let begin = self.account(tid)?;
        wait_for(TIMEOUT, || {
            let now = self.account(tid).map_err(|error| error.to_string())?;
            if now.received >= begin.received + SOME {
                Ok(())
            } else {
                Err(format!("{tid} is silent: {begin:?}, {now:?}"))
            }
        })?;
        let account = self.account(tid)?;
        ensure!(account.faults == 0, "{tid}: {account:?}");
        Ok(())
    }

    /// Waits until the director has had `count` direct routes to a task, in total.
    ///
    /// # Errors
    /// The number is not reached within the time limit.
    pub fn wait_for_routes(&self, tid: &str, count: usize) -> Result<()> {
        wait_for(TIMEOUT, || {
            let had = self
                .output_lines("route ")?
                .iter()
                .filter(|of| *of == tid)
                .count();
            if had >= count {
                Ok(())
            } else {
                Err(format!("{had} routes to {tid}"))
            }
        })
    }

    /// True if the director was notified that a task has ended.
    pub fn was_notified_of_end(&self, tid: &str) -> Result<bool, String> {
        Ok(!self.output_lines(&format!("gone {tid}"))?.is_empty())
    }

    /// Ends a task and waits until the director is notified of the end.
    pub fn end_task(&mut self, tid: &str) -> Result<()> {
        self.send_command(&format!("stop {tid}"))?;
        wait_for(TIMEOUT, || {
            if self.was_notified_of_end(tid)? {
                Ok(())
            } else {
                Err(format!("{tid} does not end"))
            }
        })
    }

    /// Checks the lines of a task's file: they must be 0, 1, 2, …. Otherwise two copies of the task
    /// have run at some time. Returns the number of lines.
    pub fn check_ran_once(&self, name: &str) -> Result<usize> {
        let text = fs::read_to_string(self.folder.join(name))?;
        let lines: Vec<&str> = text.lines().collect();
        for (number, line) in lines.iter().enumerate() {
            let around = || &lines[number.saturating_sub(3)..lines.len().min(number + 4)];
            ensure!(
                *line == number.to_string(),
                "{name}, line {number}: {:?}",
                around()
            );
        }
        Ok(lines.len())
    }

    /// Returns the number of processes of all hosts, by name of the task.
    pub fn process_counts(&self) -> HashMap<String, usize> {
        let mut found = HashMap::new();
        for entry in fs::read_dir("/proc").into_iter().flatten().flatten() {
            let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
            let mut words = line.split(|byte| *byte == 0).map(String::from_utf8_lossy);
            if words.next().is_some_and(|program| *program == *self.program)
                && let Some(name) = words.next()
                // The director's command line has no folder.
                && words.next().is_some_and(|folder| !folder.is_empty())
            {
                *found.entry(name.into_owned()).or_default() += 1;
            }
        }
        found
    }
}
