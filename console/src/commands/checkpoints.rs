//! `checkpoints`: lists or removes checkpoints in the store on the master's host.

use crate::arguments::{option_value, parse_tid, unknown_option};
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::output::time::time;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::{VirtualMachine, unexpected_reply};
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
    parse: |args| parse(args).map(ParsedCommand::on_vm),
    ..CommandSpec::DEFAULT
};

/// A parsed `checkpoints` command.
#[derive(Clone, Debug, PartialEq, Eq)]
enum CheckpointsCommand {
    /// Lists the checkpoints in the store.
    List,
    /// Removes checkpoints from the store.
    Remove {
        which: RemovalSelection,
        /// Also removes checkpoints of other virtual machines.
        include_foreign: bool,
    },
}

/// Parses the words after `checkpoints`.
fn parse(args: &[String]) -> Result<CheckpointsCommand, ParseError> {
    const COMMAND: &str = "checkpoints";
    let wrong = || ParseError::WrongArgs(COMMAND);
    let (mut names, mut job, mut any) = (None::<Vec<String>>, None, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        if let Some(word) = option_value(COMMAND, "--remove-job", arg, &mut rest)? {
            let not = || ParseError::WrongType {
                command: COMMAND,
                word: word.into(),
                expected: "a task's tid",
            };
            let tid = parse_tid(word)
                .filter(|tid| tid.is_task())
                .ok_or_else(not)?;
            job.replace(tid).map_or(Ok(()), |_| Err(wrong()))?;
        } else if let Some(name) = option_value(COMMAND, "--remove", arg, &mut rest)? {
            names.get_or_insert_default().push(name.to_string());
        } else if arg == "--any" {
            any = true;
        } else if arg.starts_with('-') {
            return Err(unknown_option(arg));
        } else {
            // A name after an earlier `--remove` selects a further checkpoint.
            names.as_mut().ok_or_else(wrong)?.push(arg.clone());
        }
    }
    match (names, job) {
        (None, None) if !any => Ok(CheckpointsCommand::List),
        (Some(names), None) => Ok(CheckpointsCommand::Remove {
            which: RemovalSelection::Checkpoints(names),
            include_foreign: any,
        }),
        (None, Some(job)) => Ok(CheckpointsCommand::Remove {
            which: RemovalSelection::Job(job),
            include_foreign: any,
        }),
        _ => Err(wrong()),
    }
}

impl VmCommand for CheckpointsCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let CheckpointsCommand::Remove {
            which,
            include_foreign,
        } = self
        else {
            return list_checkpoints(&session.vm);
        };
        match session.vm.ask(Request::RemoveCheckpoints {
            selection: which.clone(),
            include_foreign: *include_foreign,
        })? {
            Reply::CheckpointsRemoved(Ok(all)) => Ok(removal_outcome(which, &all)),
            Reply::CheckpointsRemoved(Err(why)) => {
                Ok(Outcome::error(format!("checkpoints: {why}")))
            }
            _ => Err(unexpected_reply()),
        }
    }
}

fn removal_outcome(which: &RemovalSelection, all: &RemovalResults) -> Outcome {
    if let (RemovalSelection::Job(job), []) = (which, &all[..]) {
        return Outcome {
            json: vec![json!({ "removed": [], "kept": [] })],
            ..Outcome::error(format!(
                "there is no checkpoint of job {job} that this virtual machine has made"
            ))
        };
    }
    let (mut text, mut removed, mut kept) = (String::new(), Vec::new(), Vec::new());
    for (set, result) in all {
        match result {
            Ok(bytes) => {
                text.push_str(&format!("{set} removed, {bytes} bytes\n"));
                removed.push(json!({ "set": set, "bytes": bytes }));
            }
            Err(why) => {
                text.push_str(&format!("{set} is kept: {why}\n"));
                kept.push(json!({ "set": set, "why": why.to_string() }));
            }
        }
    }
    let failed = !kept.is_empty();
    Outcome::with_values(text, json!({ "removed": removed, "kept": kept }), failed)
}

/// Lists the checkpoints in the store.
fn list_checkpoints(machine: &dyn VirtualMachine) -> Result<Outcome, Error> {
    match machine.ask(Request::ListCheckpoints)? {
        Reply::Checkpoints(Ok(sets)) => {
            let value: Vec<Value> = sets.iter().map(entry_value).collect();
            Ok(Outcome::with_values(
                list_text(&sets),
                json!({ "sets": value }),
                false,
            ))
        }
        Reply::Checkpoints(Err(why)) => Ok(Outcome::error(format!("checkpoints: {why}"))),
        _ => Err(unexpected_reply()),
    }
}

fn entry_value(checkpoint: &CheckpointEntry) -> Value {
    match &checkpoint.unusable_reason {
        Some(why) => json!({ "set": checkpoint.name, "broken": why }),
        None => json!({
            "set": checkpoint.name, "job": checkpoint.job.to_string(), "made_us": checkpoint.created.0, "tasks": checkpoint.tasks, "bytes": checkpoint.bytes,
            "ended_us": checkpoint.job_ended_at.map(|ended| ended.0), "copies": checkpoint.copy_hosts,
        }),
    }
}

/// Heading of the column with the names of checkpoints.
const NAME_HEADER: &str = "CHECKPOINT";

fn list_text(checkpoints: &[CheckpointEntry]) -> String {
    if checkpoints.is_empty() {
        return "no checkpoints\n".into();
    }
    let width = checkpoints
        .iter()
        .map(|set| set.name.len())
        .max()
        .unwrap_or_default()
        .max(NAME_HEADER.len());
    let mut text = format!(
        "{NAME_HEADER:width$}  {:>8}  {:24}  {:>5}  {:>12}\n",
        "JOB", "MADE", "TASKS", "BYTES"
    );
    for CheckpointEntry {
        name: set,
        job,
        created: made,
        tasks,
        bytes,
        unusable_reason: broken,
        job_ended_at: ended,
        copy_hosts: copies,
    } in checkpoints
    {
        text.push_str(&match broken {
            Some(why) => format!("{set:width$}  cannot be used: {why}\n"),
            None => {
                let ended = ended
                    .map(|at| format!("  the job ended {}", time(at)))
                    .unwrap_or_default();
                let copies = if copies.is_empty() {
                    String::new()
                } else {
                    format!("  copies: {}", copies.join(" "))
                };
                let job = job.to_string();
                format!(
                    "{set:width$}  {job:>8}  {:24}  {tasks:>5}  {bytes:>12}{copies}{ended}\n",
                    time(*made)
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
        let (broken, ended, copies) = (None, None, Vec::new());
        let whole = CheckpointEntry {
            name: "a-1".into(),
            job,
            created: Micros(0),
            tasks: 3,
            bytes: 4096,
            unusable_reason: broken,
            job_ended_at: ended,
            copy_hosts: copies,
        };
        let copied = CheckpointEntry {
            copy_hosts: vec!["h2".into(), "h3".into()],
            ..whole.clone()
        };
        let broken = CheckpointEntry {
            name: "b".into(),
            unusable_reason: Some("another key".into()),
            ..whole.clone()
        };
        let over = CheckpointEntry {
            job_ended_at: Some(Micros(0)),
            ..whole.clone()
        };
        assert_eq!(entry_value(&copied)["copies"], json!(["h2", "h3"]));
        let text = list_text(&[whole, broken, over, copied]);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 5);
        assert!(lines[4].ends_with("4096  copies: h2 h3"), "{text}");
        assert!(
            lines[3].ends_with("4096  the job ended 1970-01-01T00:00:00.000Z"),
            "{text}"
        );
        assert!(
            lines[1].starts_with("a-1           t40002  1970-01-01T00:00:00.000Z")
                && lines[1].ends_with("4096"),
            "{text}"
        );
        assert_eq!(lines[2], "b           cannot be used: another key");
    }

    /// Checkpoints to remove are selected by name or by job.
    #[test]
    fn removal_selects_by_name_or_job() {
        let read = |line: &str| parse(&words(line));
        let sets = |names: &[&str], any| {
            let which =
                RemovalSelection::Checkpoints(names.iter().map(|name| name.to_string()).collect());
            Ok(CheckpointsCommand::Remove {
                which,
                include_foreign: any,
            })
        };
        assert_eq!(read(""), Ok(CheckpointsCommand::List));
        assert_eq!(read("--remove a"), sets(&["a"], false));
        assert_eq!(read("--remove a b --any c"), sets(&["a", "b", "c"], true));
        assert_eq!(read("--remove=a --remove b"), sets(&["a", "b"], false));
        let job = RemovalSelection::Job(Tid::from_raw(0x40002));
        assert_eq!(
            read("--remove-job t40002"),
            Ok(CheckpointsCommand::Remove {
                which: job,
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
                read(line),
                Err(ParseError::WrongArgs("checkpoints")),
                "{line}"
            );
        }
        assert!(matches!(
            read("--remove-job x"),
            Err(ParseError::WrongType {
                command: "checkpoints",
                ..
            })
        ));
        assert_eq!(read("--all"), Err(ParseError::UnknownFlag("all".into())));
    }

    /// The report of a removal lists the removed checkpoints, and the kept ones with reasons.
    #[test]
    fn removal_reports_each_checkpoint() {
        let job = Tid::from_raw(0x40002);
        let all: RemovalResults = vec![
            ("a".into(), Ok(7)),
            ("b".into(), Err(RemovalRefusal::OnlyRestartPoint(job))),
        ];
        let outcome = removal_outcome(&RemovalSelection::Job(job), &all);
        assert!(
            outcome.failed
                && outcome.text.starts_with(
                    "a removed, 7 bytes\nb is kept: job t40002 needs it if a host is lost"
                )
        );
        assert_eq!(
            outcome.json[0]["removed"],
            json!([{ "set": "a", "bytes": 7 }])
        );
        assert_eq!(outcome.json[0]["kept"][0]["set"], "b");
        assert!(!removal_outcome(&RemovalSelection::Job(job), &all[..1].to_vec()).failed);
        assert!(
            removal_outcome(&RemovalSelection::Job(job), &Vec::new()).failed,
            "no checkpoint of the job exists"
        );
    }
}
