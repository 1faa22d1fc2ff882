//! `kill` and `sig`: send signals to tasks.

use crate::arguments::parse_task_tids;
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::json::results;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::{NO_TASK_REASON, VirtualMachine, no_task_line, task_has_ended};
use libpvm::Error;
use nix::sys::signal::Signal;
use sempa_proto::table::TaskInfo;
use sempa_proto::task::Request;
use sempa_proto::{PvmError, Tid};
use serde_json::{Value, json};
use std::cell::OnceCell;
use std::str::FromStr;

const SIGTERM: i32 = 15;
/// Signals that end what an ended task has left behind.
const ENDING_SIGNALS: [i32; 2] = [9, SIGTERM];

pub(crate) const KILL: CommandSpec = CommandSpec {
    name: "kill",
    summary: "End tasks (SIGTERM)",
    detail: "Syntax:  kill [ -c ] tid ...\nOptions:  -c   the children of tid instead\n\
                 Processes that a task leaves behind run on, as in PVM; 'ps' lists the ended task.\n\
                 A second 'kill' with its tid ends them.\n",
    parse: |args| parse_kill(args).map(ParsedCommand::vm_command),
    completion: Completion::EveryWord(WordKind::Tid),
    ..CommandSpec::DEFAULT
};

pub(crate) const SIG: CommandSpec = CommandSpec {
    name: "sig",
    summary: "Send a signal to tasks",
    detail: "Syntax:  sig signal tid ...\nThe signal is a number or a name such as TERM.\n",
    parse: |args| match args {
        [signal, tids @ ..] if !tids.is_empty() => {
            parse_sig(signal, tids).map(ParsedCommand::vm_command)
        }
        _ => Err(ParseError::WrongArgs("sig")),
    },
    completion: Completion::WordDependent(|args, _| {
        let kind = if args.is_empty() {
            WordKind::OneOf(signal_names)
        } else {
            WordKind::Tid
        };
        (0, kind)
    }),
    ..CommandSpec::DEFAULT
};

/// Sends SIGTERM to the tasks, or to their children if `targets_children` is true.
#[derive(Debug, PartialEq, Eq)]
struct KillCommand {
    targets_children: bool,
    tids: Vec<Tid>,
}

#[derive(Debug, PartialEq, Eq)]
struct SigCommand {
    signal: i32,
    tids: Vec<Tid>,
}

/// Returns the names of all signals without `SIG`.
fn signal_names() -> Vec<String> {
    Signal::iterator()
        .map(|signal| signal.as_str()[3..].to_string())
        .collect()
}

/// Parses the arguments of `kill`.
///
/// As in PVM, options are recognized only before the tids. An option after the tids would change
/// which tasks are killed.
fn parse_kill(args: &[String]) -> Result<KillCommand, ParseError> {
    let (options, tids) = args.split_at(args.iter().take_while(|arg| arg.starts_with('-')).count());
    let mut letters = options
        .iter()
        .flat_map(|option| option[1..].chars())
        .peekable();
    let has_children_option = letters.peek().is_some();
    if let Some(unknown_letter) = letters.find(|letter| *letter != 'c') {
        return Err(ParseError::UnknownFlag(unknown_letter.to_string()));
    }
    if tids.is_empty() {
        return Err(if options.is_empty() {
            ParseError::WrongArgs("kill")
        } else {
            ParseError::OnlyOptions
        });
    }
    let tids = parse_task_tids("kill", tids)?;
    Ok(KillCommand {
        targets_children: has_children_option,
        tids,
    })
}

fn parse_sig(signal: &str, tids: &[String]) -> Result<SigCommand, ParseError> {
    let signal_by_name = || {
        let name = signal.to_uppercase();
        let name = if name.starts_with("SIG") {
            name
        } else {
            format!("SIG{name}")
        };
        Signal::from_str(&name).ok().map(|signal| signal as i32)
    };
    let signal_number = signal
        .parse::<i32>()
        .ok()
        .filter(|number| (0..=64).contains(number))
        .or_else(signal_by_name);
    let expected = "a signal";
    let signal = signal_number.ok_or_else(|| ParseError::WrongType {
        command: "sig",
        word: signal.to_string(),
        expected,
    })?;
    let tids = parse_task_tids("sig", tids)?;
    Ok(SigCommand { signal, tids })
}

impl VmCommand for KillCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        if !self.targets_children {
            return Ok(send_signal(&session.vm, &self.tids, SIGTERM, false));
        }
        let tasks = session.vm.tasks(Tid::NONE)?;
        let mut children = Vec::new();
        let mut missing_parents = Vec::new();
        for parent in &self.tids {
            let child_count = children.len();
            let is_child = |task: &&TaskInfo| task.parent == *parent;
            children.extend(tasks.iter().filter(is_child).map(|task| task.tid));
            if children.len() == child_count && task_has_ended(&session.vm, *parent) {
                missing_parents.push(*parent);
            }
        }
        let mut outcome = send_signal(&session.vm, &children, SIGTERM, false);
        outcome.failed |= !missing_parents.is_empty();
        let missing_lines = missing_parents.iter().map(|tid| no_task_line(*tid));
        outcome.errors.extend(missing_lines);
        Ok(outcome)
    }
}

impl VmCommand for SigCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        Ok(send_signal(&session.vm, &self.tids, self.signal, true))
    }
}

/// Sends a signal to tasks. If `include_self` is false, the console does not send the signal to
/// itself and prints a note.
fn send_signal(
    machine: &dyn VirtualMachine,
    tids: &[Tid],
    signal: i32,
    include_self: bool,
) -> Outcome {
    let (mut outcome, mut values) = (Outcome::default(), Vec::new());
    let leftovers = OnceCell::new();
    for tid in tids {
        if *tid == machine.tid() && !include_self {
            outcome.text.push_str(&format!("{tid}: that's me.\n"));
            values.push(signal_json(*tid, Some("that's me")));
        } else if let Err(error) = send_signal_to(machine, *tid, signal, &leftovers) {
            outcome.failed = true;
            outcome.errors.push(format!("{tid}: {error}"));
            values.push(signal_json(*tid, Some(&error.reason)));
        } else {
            values.push(signal_json(*tid, None));
        }
    }
    outcome.json_values = vec![results(values)];
    outcome
}

/// Sends a signal to a task, or ends the processes that it has left behind if it has ended.
/// `leftovers` caches the ended tasks with such processes.
fn send_signal_to(
    machine: &dyn VirtualMachine,
    tid: Tid,
    signal: i32,
    leftovers: &OnceCell<Vec<Tid>>,
) -> Result<(), Error> {
    // The list of leftovers needs all hosts. A host that does not answer must not delay the signal
    // to a running task, so the task's own host is asked first.
    let request = if !task_has_ended(machine, tid) {
        Request::Signal { tid, signal }
    } else if ENDING_SIGNALS.contains(&signal)
        && leftovers
            .get_or_init(|| tids_with_leftovers(machine))
            .contains(&tid)
    {
        Request::KillLeftovers { tid }
    } else {
        return Err(Error::new(PvmError::NoTask, NO_TASK_REASON.to_string()));
    };
    machine.ask(request).map(|_| ())
}

/// Returns the tids of the ended tasks that have left processes behind. Empty if the tasks cannot
/// be listed.
fn tids_with_leftovers(machine: &dyn VirtualMachine) -> Vec<Tid> {
    let tasks = machine.tasks_and_leftovers(Tid::NONE).unwrap_or_default();
    let leftovers = tasks.iter().filter(|task| task.is_leftover());
    leftovers.map(|task| task.tid).collect()
}

/// Returns the JSON result for one task. `failure_reason` is the reason why the signal was not
/// sent, or `None` if the signal was sent.
fn signal_json(tid: Tid, failure_reason: Option<&str>) -> Value {
    match failure_reason {
        None => json!({ "tid": tid.to_string(), "sent": true }),
        Some(reason) => json!({ "tid": tid.to_string(), "sent": false, "reason": reason }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;

    fn tid(raw: i32) -> Tid {
        Tid::from_raw(raw)
    }

    #[test]
    fn repeated_option_letters_are_accepted() {
        for options in ["-cc", "-c -c"] {
            assert_eq!(
                parse_kill(&words(&format!("{options} t40002 80001"))),
                Ok(KillCommand {
                    targets_children: true,
                    tids: vec![tid(0x40002), tid(0x80001)]
                })
            );
        }
    }

    #[test]
    fn signals_parse_by_number_and_name() {
        let tids = words("t40001");
        for word in ["9", "KILL", "sigkill", "SIGKILL"] {
            assert_eq!(
                parse_sig(word, &tids),
                Ok(SigCommand {
                    signal: 9,
                    tids: vec![tid(0x40001)]
                })
            );
        }
        let error = parse_sig("99", &tids).expect_err("no such signal");
        assert_eq!(error.to_string(), "sig: 99 is not a signal");
    }
}
