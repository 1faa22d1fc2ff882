//! Runs an owner agent on a host: a program that directs the guests on behalf of the owner, like a
//! load watcher.

use crate::run::{RunningCommand, run, wait_for};
use crate::testbed::{Host, OLGA_UID, Testbed};
use crate::vm::{COMMAND_TIMEOUT, Vm};
use serde_json::Value;
use std::io::Write;
use std::process::{ChildStdin, Stdio};

/// The running program `owner-speaks` on a host. Its last directive applies until the program ends.
#[derive(Debug)]
pub struct OwnerAgent {
    session: RunningCommand,
    input: Option<ChildStdin>,
    directives_sent: usize,
}

impl OwnerAgent {
    /// Starts the program on a host. `built` is the path of the program.
    pub fn new(vm: &Vm, host: &Host, built: &str) -> OwnerAgent {
        let program = vm.home().join("owner-speaks");
        if !program.exists() {
            std::fs::copy(built, &program).expect("copied");
        }
        let mut session =
            RunningCommand::start(vm.command(host, program), Stdio::piped()).expect("it starts");
        let input = session.take_stdin();
        let speaker = OwnerAgent {
            session,
            input,
            directives_sent: 0,
        };
        speaker.wait_for_answer(0);
        speaker
    }

    /// Waits for the program's answer number `number`. Returns the time in the answer.
    fn wait_for_answer(&self, number: usize) -> u64 {
        let heard = wait_for(COMMAND_TIMEOUT, || {
            let out = self
                .session
                .out_so_far()
                .map_err(|error| error.to_string())?;
            let whole = out.rfind('\n').map_or("", |end| &out[..end]);
            let none = || {
                format!(
                    "no answer {number}: {out} {}",
                    self.session.err_so_far().unwrap_or_default()
                )
            };
            whole.lines().nth(number).map(String::from).ok_or_else(none)
        });
        heard
            .expect("it answers")
            .strip_prefix("done ")
            .map_or(0, |at| at.parse().expect("a time"))
    }

    /// Passes a directive to the program and waits until the daemon has received it. Returns the
    /// time of the directive in microseconds since 1970.
    pub fn direct(&mut self, word: &str) -> u64 {
        self.directives_sent += 1;
        let mut input = self.input.as_ref().expect("it listens");
        input
            .write_all(format!("{word}\n").as_bytes())
            .expect("it listens");
        self.wait_for_answer(self.directives_sent)
    }

    /// Kills the program.
    ///
    /// # Panics
    /// It does not end.
    pub fn kill(self) {
        self.session.end_inside().expect("it ends");
    }
}

/// Runs `pvm owner ...` on a host as olga, who has no virtual machine. Returns the output as JSON.
pub fn run_owner_command(bed: &Testbed, host: usize, words: &[&str]) -> Value {
    let home = bed.folder().join("olga");
    let mut command = bed
        .host(host)
        .command_as(Some(("olga", OLGA_UID, &home)), "pvm");
    command.arg("--json").arg("owner").args(words);
    let done = run(command, COMMAND_TIMEOUT).expect("the console runs");
    assert!(done.succeeded(), "pvm owner {words:?}: {done:?}");
    serde_json::from_str(done.out.trim()).unwrap_or_else(|error| panic!("{error}: {done:?}"))
}
