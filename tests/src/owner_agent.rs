//! Runs an owner agent on a host: a program that directs the guests on behalf of the owner, as a
//! load watcher does.

use crate::run::{RunningCommand, run_to_end, wait_for};
use crate::testbed::{Host, OLGA_UID, Testbed};
use crate::vm::{COMMAND_TIMEOUT, Vm};
use serde_json::Value;
use std::io::Write;
use std::process::{ChildStdin, Stdio};

/// The running program `owner-speaks` on a host. Its last directive applies until the program ends.
#[derive(Debug)]
pub struct TestOwnerAgent {
    program: RunningCommand,
    program_input: Option<ChildStdin>,
    directive_count: usize,
}

impl TestOwnerAgent {
    /// Starts the program on a host and waits until it has enrolled. `built_program` is the path of
    /// the program on the machine.
    ///
    /// # Panics
    /// The program does not start or does not enrol.
    pub fn start(vm: &Vm, host: &Host, built_program: &str) -> Self {
        let installed_program = vm.user_home().join("owner-speaks");
        if !installed_program.exists() {
            std::fs::copy(built_program, &installed_program).expect("copied");
        }
        let mut running_program =
            RunningCommand::start(vm.user_command(host, installed_program), Stdio::piped())
                .expect("it starts");
        let input = running_program.take_stdin();
        let agent = Self {
            program: running_program,
            program_input: input,
            directive_count: 0,
        };
        agent.wait_for_answer(0);
        agent
    }

    /// Waits for the program's output line number `line_index`, counted from 0. Returns the time in
    /// the line in microseconds since 1970; 0 for a line without a time.
    fn wait_for_answer(&self, line_index: usize) -> u64 {
        let answer = wait_for(COMMAND_TIMEOUT, || {
            let out = self
                .program
                .stdout_so_far()
                .map_err(|error| error.to_string())?;
            let complete_lines = out.rfind('\n').map_or("", |end| &out[..end]);
            let timeout_error = || {
                format!(
                    "no answer {line_index}: {out} {}",
                    self.program.stderr_so_far().unwrap_or_default()
                )
            };
            complete_lines
                .lines()
                .nth(line_index)
                .map(String::from)
                .ok_or_else(timeout_error)
        });
        answer
            .expect("it answers")
            .strip_prefix("done ")
            .map_or(0, |time| time.parse().expect("a time"))
    }

    /// Writes a directive to the program's input and waits until the daemon has received it.
    /// Returns the time of the directive in microseconds since 1970.
    pub fn send_directive(&mut self, directive: &str) -> u64 {
        self.directive_count += 1;
        let mut input = self.program_input.as_ref().expect("it listens");
        input
            .write_all(format!("{directive}\n").as_bytes())
            .expect("it listens");
        self.wait_for_answer(self.directive_count)
    }

    /// Kills the program and waits for its end.
    ///
    /// # Panics
    /// The program does not end.
    pub fn kill_and_wait(self) {
        self.program.kill_children_and_wait().expect("it ends");
    }
}

/// Runs `pvm owner` with these arguments on a host as olga, who has no virtual machine. Returns the
/// output as JSON.
pub fn run_owner_command_as_olga(
    testbed: &Testbed,
    host_number: usize,
    arguments: &[&str],
) -> Value {
    let olga_home = testbed.folder().join("olga");
    let mut command = testbed
        .host(host_number)
        .command_as(Some(("olga", OLGA_UID, &olga_home)), "pvm");
    command.arg("--json").arg("owner").args(arguments);
    let result = run_to_end(command, COMMAND_TIMEOUT).expect("the console runs");
    assert!(result.succeeded(), "pvm owner {arguments:?}: {result:?}");
    serde_json::from_str(result.stdout.trim()).unwrap_or_else(|error| panic!("{error}: {result:?}"))
}
