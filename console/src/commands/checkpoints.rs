//! `checkpoints`: lists or removes checkpoints in the store on the master's host.

use crate::arguments::{parse_option_value, parse_tid, unknown_option_error};
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::output::time::format_local;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::{VirtualMachine, unexpected_reply_error};
use libpvm::Error;
use sempa_proto::checkpoint::{CheckpointEntry, RemovalResults, RemovalSelection};
use sempa_proto::task::{Reply, Request};
use serde_json::{Value, json};

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "checkpoints",
    summary: "List the checkpoints in the store, or remove some",
    detail: "Syntax:  checkpoints [ --remove checkpoint ... | --remove-job tid ] [ --any ]\n\
             Lists the oldest first. When the store is full, checkpoints of jobs that finished or were killed are\n\
             removed first, then the oldest ones, but never the newest one of a job that may still need it.\n\
             --remove removes the named checkpoints, --remove-job all of a job, except those that are being restarted\n\
             and those that a job would roll back to. --any includes checkpoints of your other virtual machines.\n",
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    ..CommandSpec::DEFAULT
};

/// A parsed `checkpoints` command.
#[derive(Clone, Debug, PartialEq, Eq)]
enum CheckpointsCommand {
    /// Lists the checkpoints in the store.
    List,
    /// Removes checkpoints from the store.
    Remove {
        selection: RemovalSelection,
        /// True to remove also checkpoints that other virtual machines made.
        include_foreign: bool,
    },
}

/// Parses the words after `checkpoints`.
fn parse(args: &[String]) -> Result<CheckpointsCommand, ParseError> {
    const COMMAND: &str = "checkpoints";
    let wrong_args_error = || ParseError::WrongArgs(COMMAND);
    let (mut names, mut job, mut includes_foreign) = (None::<Vec<String>>, None, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        if let Some(word) = parse_option_value(COMMAND, "--remove-job", arg, &mut rest)? {
            let wrong_type_error = || ParseError::WrongType {
                command: COMMAND,
                word: word.into(),
                expected: "a task's tid",
            };
            let tid = parse_tid(word)
                .filter(|tid| tid.is_task())
                .ok_or_else(wrong_type_error)?;
            job.replace(tid)
                .map_or(Ok(()), |_| Err(wrong_args_error()))?;
        } else if let Some(name) = parse_option_value(COMMAND, "--remove", arg, &mut rest)? {
            names.get_or_insert_default().push(name.to_string());
        } else if arg == "--any" {
            includes_foreign = true;
        } else if arg.starts_with('-') {
            return Err(unknown_option_error(arg));
        } else {
            // More names may follow the name after `--remove`.
            names
                .as_mut()
                .ok_or_else(wrong_args_error)?
                .push(arg.clone());
        }
    }
    match (names, job) {
        (None, None) if !includes_foreign => Ok(CheckpointsCommand::List),
        (Some(names), None) => Ok(CheckpointsCommand::Remove {
            selection: RemovalSelection::Checkpoints(names),
            include_foreign: includes_foreign,
        }),
        (None, Some(job)) => Ok(CheckpointsCommand::Remove {
            selection: RemovalSelection::Job(job),
            include_foreign: includes_foreign,
        }),
        _ => Err(wrong_args_error()),
    }
}

impl VmCommand for CheckpointsCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let Self::Remove {
            selection: removed_selection,
            include_foreign,
        } = self
        else {
            return list_checkpoints(&session.vm);
        };
        match session.vm.ask(Request::RemoveCheckpoints {
            selection: removed_selection.clone(),
            include_foreign: *include_foreign,
        })? {
            Reply::CheckpointsRemoved(Ok(results)) => {
                Ok(removal_outcome(removed_selection, &results))
            }
            Reply::CheckpointsRemoved(Err(reason)) => {
                Ok(Outcome::from_error(format!("checkpoints: {reason}")))
            }
            _ => Err(unexpected_reply_error()),
        }
    }
}

fn removal_outcome(selection: &RemovalSelection, results: &RemovalResults) -> Outcome {
    if let (RemovalSelection::Job(job), []) = (selection, &results[..]) {
        return Outcome {
            json_values: vec![json!({ "removed": [], "kept": [] })],
            ..Outcome::from_error(format!(
                "there is no checkpoint of job {job} that this virtual machine has made"
            ))
        };
    }
    let (mut text, mut removed_json, mut kept_json) = (String::new(), Vec::new(), Vec::new());
    for (checkpoint_name, result) in results {
        match result {
            Ok(bytes) => {
                text.push_str(&format!("{checkpoint_name} removed, {bytes} bytes\n"));
                removed_json.push(json!({ "set": checkpoint_name, "bytes": bytes }));
            }
            Err(reason) => {
                text.push_str(&format!("{checkpoint_name} is kept: {reason}\n"));
                kept_json.push(json!({ "set": checkpoint_name, "why": reason.to_string() }));
            }
        }
    }
    let failed = !kept_json.is_empty();
    Outcome::with_json(
        text,
        json!({ "removed": removed_json, "kept": kept_json }),
        failed,
    )
}

/// Returns a table of the checkpoints in the store, as text and as JSON. If the store cannot be
/// read, returns an outcome with the reason.
fn list_checkpoints(machine: &dyn VirtualMachine) -> Result<Outcome, Error> {
    match machine.ask(Request::ListCheckpoints)? {
        Reply::Checkpoints(Ok(checkpoints)) => {
            let json_output: Vec<Value> = checkpoints.iter().map(entry_json).collect();
            Ok(Outcome::with_json(
                checkpoints_text(&checkpoints),
                json!({ "sets": json_output }),
                false,
            ))
        }
        Reply::Checkpoints(Err(reason)) => {
            Ok(Outcome::from_error(format!("checkpoints: {reason}")))
        }
        _ => Err(unexpected_reply_error()),
    }
}

fn entry_json(checkpoint: &CheckpointEntry) -> Value {
    match &checkpoint.unusable_reason {
        Some(reason) => json!({ "set": checkpoint.name, "broken": reason }),
        None => json!({
            "set": checkpoint.name, "job": checkpoint.job.to_string(), "made_us": checkpoint.created_at.0, "tasks": checkpoint.task_count, "bytes": checkpoint.stored_bytes,
            "ended_us": checkpoint.job_ended_at.map(|end_time| end_time.0), "copies": checkpoint.copy_hosts,
        }),
    }
}

/// Heading of the column of checkpoint names.
const NAME_HEADER: &str = "CHECKPOINT";

fn checkpoints_text(checkpoints: &[CheckpointEntry]) -> String {
    if checkpoints.is_empty() {
        return "no checkpoints\n".into();
    }
    let width = checkpoints
        .iter()
        .map(|checkpoint_name| checkpoint_name.name.len())
        .max()
        .unwrap_or_default()
        .max(NAME_HEADER.len());
    let mut text = format!(
        "{NAME_HEADER:width$}  {:>8}  {:28}  {:>5}  {:>12}\n",
        "JOB", "MADE", "TASKS", "BYTES"
    );
    for CheckpointEntry {
        name: checkpoint_name,
        job,
        created_at,
        task_count: tasks,
        stored_bytes: bytes,
        unusable_reason: reason,
        job_ended_at: job_end,
        copy_hosts: copies_text,
    } in checkpoints
    {
        text.push_str(&match reason {
            Some(reason_text) => format!("{checkpoint_name:width$}  cannot be used: {reason_text}\n"),
            None => {
                let job_end = job_end
                    .map(|end_time| format!("  the job ended {}", format_local(end_time)))
                    .unwrap_or_default();
                let copies_text = if copies_text.is_empty() {
                    String::new()
                } else {
                    format!("  copies: {}", copies_text.join(" "))
                };
                let job = job.to_string();
                format!(
                    "{checkpoint_name:width$}  {job:>8}  {:28}  {tasks:>5}  {bytes:>12}{copies_text}{job_end}\n",
                    format_local(*created_at)
                )
            }
        });
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;
    use sempa_proto::checkpoint::RemovalRefusal;
    use sempa_proto::{Micros, Tid};

    /// The list shows usable checkpoints, and the reason for each checkpoint that cannot be used.
    #[test]
    fn list_shows_usable_and_broken_checkpoints() {
        let job = Tid::from_raw(0x40002);
        let (unusable, job_end, no_copies) = (None, None, Vec::new());
        let usable_entry = CheckpointEntry {
            name: "a-1".into(),
            job,
            created_at: Micros(0),
            task_count: 3,
            stored_bytes: 4096,
            unusable_reason: unusable,
            job_ended_at: job_end,
            copy_hosts: no_copies,
        };
        let entry_with_copies = CheckpointEntry {
            copy_hosts: vec!["h2".into(), "h3".into()],
            ..usable_entry.clone()
        };
        let unusable = CheckpointEntry {
            name: "b".into(),
            unusable_reason: Some("another key".into()),
            ..usable_entry.clone()
        };
        let ended_job_entry = CheckpointEntry {
            job_ended_at: Some(Micros(0)),
            ..usable_entry.clone()
        };
        assert_eq!(
            entry_json(&entry_with_copies)["copies"],
            json!(["h2", "h3"])
        );
        let text = checkpoints_text(&[usable_entry, unusable, ended_job_entry, entry_with_copies]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5);
        assert!(lines[4].ends_with("4096  copies: h2 h3"), "{text}");
        let epoch = format_local(Micros(0));
        assert!(
            lines[3].ends_with(&format!("4096  the job ended {epoch}")),
            "{text}"
        );
        assert!(
            lines[1].starts_with(&format!("a-1           t40002  {epoch}"))
                && lines[1].ends_with("4096"),
            "{text}"
        );
        assert_eq!(lines[2], "b           cannot be used: another key");
    }

    #[test]
    fn removal_selects_by_name_or_job() {
        let parse_line = |line: &str| parse(&words(line));
        let remove_command = |names: &[&str], with_foreign| {
            let selection =
                RemovalSelection::Checkpoints(names.iter().map(|name| name.to_string()).collect());
            Ok(CheckpointsCommand::Remove {
                selection,
                include_foreign: with_foreign,
            })
        };
        assert_eq!(parse_line(""), Ok(CheckpointsCommand::List));
        assert_eq!(parse_line("--remove a"), remove_command(&["a"], false));
        assert_eq!(
            parse_line("--remove a b --any c"),
            remove_command(&["a", "b", "c"], true)
        );
        assert_eq!(
            parse_line("--remove=a --remove b"),
            remove_command(&["a", "b"], false)
        );
        let job = RemovalSelection::Job(Tid::from_raw(0x40002));
        assert_eq!(
            parse_line("--remove-job t40002"),
            Ok(CheckpointsCommand::Remove {
                selection: job,
                include_foreign: false
            })
        );
        for line in [
            "a",
            "--any",
            "--remove",
            "--remove-job",
            "--remove-job t40002 a",
            "--remove a --remove-job t40002",
            "--remove-job t40002 --remove-job t40003",
        ] {
            assert_eq!(
                parse_line(line),
                Err(ParseError::WrongArgs("checkpoints")),
                "{line}"
            );
        }
        assert!(matches!(
            parse_line("--remove-job x"),
            Err(ParseError::WrongType {
                command: "checkpoints",
                ..
            })
        ));
        assert_eq!(
            parse_line("--all"),
            Err(ParseError::UnknownFlag("-all".into()))
        );
    }

    /// The report of a removal lists the removed checkpoints, and for each other checkpoint the
    /// reason why it was not removed.
    #[test]
    fn removal_reports_each_checkpoint() {
        let job = Tid::from_raw(0x40002);
        let results: RemovalResults = vec![
            ("a".into(), Ok(7)),
            ("b".into(), Err(RemovalRefusal::OnlyRestartPoint(job))),
        ];
        let outcome = removal_outcome(&RemovalSelection::Job(job), &results);
        assert!(
            outcome.failed
                && outcome.text.starts_with(
                    "a removed, 7 bytes\nb is kept: job t40002 needs it if a host is lost"
                )
        );
        assert_eq!(
            outcome.json_values[0]["removed"],
            json!([{ "set": "a", "bytes": 7 }])
        );
        assert_eq!(outcome.json_values[0]["kept"][0]["set"], "b");
        assert!(!removal_outcome(&RemovalSelection::Job(job), &results[..1].to_vec()).failed);
        assert!(
            removal_outcome(&RemovalSelection::Job(job), &Vec::new()).failed,
            "no checkpoint of the job exists"
        );
    }
}
