//! `checkpoint`, `checkpoints` and `restart`: writes jobs to the store on the master's host, lists
//! and removes checkpoints, and restarts jobs from them.

use crate::format::time;
use crate::parse::{ParseError, parse_tid};
use crate::session::Outcome;
use crate::virtual_machine::{VirtualMachine, unexpected_reply};
use crate::words::{option_value, parse_duration};
use libpvm::Error;
use sempa_proto::checkpoint::{
    CheckpointEntry, CheckpointFailure, CheckpointSchedule, RemovalResults, RemovalSelection,
};
use sempa_proto::task::{Reply, Request};
use sempa_proto::{HostId, Micros, Tid};
use serde_json::{Value, json};
use std::time::Duration;

/// Longest accepted checkpoint interval; a longer one is a typing error.
const INTERVAL_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

/// A parsed `checkpoint` command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CheckpointCommand {
    /// The first task of the job.
    pub(crate) job: Tid,
    /// Changes the periodic checkpoints of the job, if given.
    pub(crate) pace: Option<CheckpointSchedule>,
    /// Ends the job when its checkpoint is complete.
    pub(crate) ends_job: bool,
}

/// A parsed `restart` command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RestartCommand {
    /// Name of the checkpoint in the store.
    pub(crate) checkpoint: String,
    /// Names of the hosts to use. If empty, any host is used.
    pub(crate) hosts: Vec<String>,
}

/// A parsed `checkpoints` command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CheckpointsCommand {
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
pub(crate) fn parse_list(args: &[String]) -> Result<CheckpointsCommand, ParseError> {
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
            return Err(ParseError::UnknownFlag(
                arg.trim_start_matches('-').to_string(),
            ));
        } else {
            // Further names for an earlier `--remove`.
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

/// Parses the words after `checkpoint`.
pub(crate) fn parse(args: &[String]) -> Result<CheckpointCommand, ParseError> {
    const COMMAND: &str = "checkpoint";
    let wrong = || ParseError::WrongArgs(COMMAND);
    let (mut job, mut pace, mut end) = (None, None, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        let mut timed = None;
        for (name, kind) in [
            (
                "--every",
                CheckpointSchedule::Every as fn(Micros) -> CheckpointSchedule,
            ),
            ("--loss", CheckpointSchedule::MaxLoss),
        ] {
            timed =
                timed.or(option_value(COMMAND, name, arg, &mut rest)?.map(|value| (kind, value)));
        }
        match timed {
            Some((kind, value)) => {
                let wanted = "a time such as 30s, 5m or 2h";
                let not = || ParseError::WrongType {
                    command: COMMAND,
                    word: value.into(),
                    expected: wanted,
                };
                let span = parse_duration(value)
                    .filter(|span| *span <= INTERVAL_MAX)
                    .ok_or_else(not)?;
                pace = Some(kind(Micros(span.as_micros() as u64)));
            }
            None if arg == "--stop" => pace = Some(CheckpointSchedule::Never),
            None if arg == "--end" => end = true,
            None if arg.starts_with('-') => {
                return Err(ParseError::UnknownFlag(
                    arg.trim_start_matches('-').to_string(),
                ));
            }
            None if job.is_none() => {
                let not = || ParseError::WrongType {
                    command: COMMAND,
                    word: arg.clone(),
                    expected: "a task's tid",
                };
                job = Some(parse_tid(arg).filter(|tid| tid.is_task()).ok_or_else(not)?);
            }
            None => return Err(wrong()),
        }
    }
    if end && pace.is_some() {
        return Err(wrong());
    }
    Ok(CheckpointCommand {
        job: job.ok_or_else(wrong)?,
        pace,
        ends_job: end,
    })
}

/// Parses the words after `restart`.
pub(crate) fn parse_restart(args: &[String]) -> Result<RestartCommand, ParseError> {
    let wrong = || ParseError::WrongArgs("restart");
    let (mut set, mut on) = (None, Vec::new());
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match option_value("restart", "--on", arg, &mut rest)? {
            Some(hosts) => on.extend(
                hosts
                    .split(',')
                    .filter(|name| !name.is_empty())
                    .map(String::from),
            ),
            None if arg.starts_with('-') => {
                return Err(ParseError::UnknownFlag(
                    arg.trim_start_matches('-').to_string(),
                ));
            }
            None if set.is_none() => set = Some(arg.clone()),
            None => return Err(wrong()),
        }
    }
    Ok(RestartCommand {
        checkpoint: set.ok_or_else(wrong)?,
        hosts: on,
    })
}

/// Writes a checkpoint of a job, or stops its periodic checkpoints.
pub(crate) fn checkpoint(
    machine: &impl VirtualMachine,
    command: &CheckpointCommand,
) -> Result<Outcome, Error> {
    let CheckpointCommand {
        job,
        pace,
        ends_job,
    } = command;
    let (every, loss) = match pace {
        Some(CheckpointSchedule::Every(every)) => (Some(every.0 / 1_000_000), None),
        Some(CheckpointSchedule::MaxLoss(bound)) => (None, Some(bound.0 / 1_000_000)),
        Some(CheckpointSchedule::Never) | None => (None, None),
    };
    match machine.ask(Request::Checkpoint {
        job: *job,
        schedule: *pace,
        end_job: *ends_job,
        wait: true,
    })? {
        Reply::Done => {
            let text =
                format!("no more checkpoints of {job} by themselves; those that were made stay\n");
            Ok(Outcome::with_values(
                text,
                json!({ "job": job.to_string(), "every_s": null, "loss_s": null }),
                false,
            ))
        }
        Reply::Checkpointed(Ok(report)) => {
            let tasks: Vec<String> = report.tasks.iter().map(Tid::to_string).collect();
            let task_count = if tasks.len() == 1 {
                "1 task".into()
            } else {
                format!("{} tasks", tasks.len())
            };
            let frozen = report.frozen.0 as f64 / 1e3;
            let own: Vec<String> = report
                .self_checkpointed
                .iter()
                .map(Tid::to_string)
                .collect();
            let by_own = match own.len() {
                0 => String::new(),
                all if all == tasks.len() => " by their own checkpoints".into(),
                some => format!(", {some} of them by their own checkpoints"),
            };
            let (set, bytes) = (&report.name, report.bytes);
            let mut text = format!(
                "{set}: {task_count} of job {job}{by_own}, {bytes} bytes, frozen {frozen:.1} ms\n"
            );
            if let Some(every) = every {
                text.push_str(&format!(
                    "and again every {every} s, until 'checkpoint --stop {job}'\n"
                ));
            }
            if let Some(bound) = loss {
                text.push_str(&format!(
                    "and again so often that {bound} s of work are lost at most, until 'checkpoint --stop {job}'\n"
                ));
            }
            if *ends_job {
                text.push_str(&format!(
                    "and ended; 'restart {}' starts it again\n",
                    report.name
                ));
            }
            let value = json!({
                "set": report.name, "ended": ends_job, "job": job.to_string(), "tasks": tasks, "bytes": report.bytes,
                "own": own, "frozen_us": report.frozen.0, "every_s": every, "loss_s": loss,
            });
            Ok(Outcome::with_values(text, value, false))
        }
        Reply::Checkpointed(Err(why)) => {
            let job = job.to_string();
            let value = json!({ "job": job, "failed": why.to_string() });
            Ok(Outcome {
                json: vec![value],
                ..Outcome::error(format!(
                    "no checkpoint of {job}: {why}{}",
                    job_after_failure(&why, "the job")
                ))
            })
        }
        _ => Err(unexpected_reply()),
    }
}

/// Returns what happens to a job whose checkpoint failed, as a clause. The last argument is the
/// word for the job in that clause.
pub(crate) fn job_after_failure(why: &CheckpointFailure, job_word: &str) -> String {
    match why {
        CheckpointFailure::NoSuchJob(_) => String::new(),
        CheckpointFailure::HostLost(_) => format!(
            "; with its tasks there; {job_word} goes back to its newest checkpoint by itself, if it has one and is checkpointed again and again"
        ),
        _ => format!("; {job_word} goes on"),
    }
}

/// Lists the checkpoints in the store, or removes some.
pub(crate) fn checkpoints(
    machine: &impl VirtualMachine,
    command: &CheckpointsCommand,
) -> Result<Outcome, Error> {
    let CheckpointsCommand::Remove {
        which,
        include_foreign,
    } = command
    else {
        return list_checkpoints(machine);
    };
    match machine.ask(Request::RemoveCheckpoints {
        which: which.clone(),
        include_foreign: *include_foreign,
    })? {
        Reply::CheckpointsRemoved(Ok(all)) => Ok(removal_outcome(which, &all)),
        Reply::CheckpointsRemoved(Err(why)) => Ok(Outcome::error(format!("checkpoints: {why}"))),
        _ => Err(unexpected_reply()),
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
                text.push_str(&format!("{set} stays: {why}\n"));
                kept.push(json!({ "set": set, "why": why.to_string() }));
            }
        }
    }
    let failed = !kept.is_empty();
    Outcome::with_values(text, json!({ "removed": removed, "kept": kept }), failed)
}

/// Lists the checkpoints in the store.
fn list_checkpoints(machine: &impl VirtualMachine) -> Result<Outcome, Error> {
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

fn list_text(checkpoints: &[CheckpointEntry]) -> String {
    if checkpoints.is_empty() {
        return "no checkpoints\n".into();
    }
    let width = checkpoints
        .iter()
        .map(|set| set.name.len())
        .max()
        .unwrap_or_default();
    let mut text = format!(
        "{:width$}  {:>8}  {:24}  {:>5}  {:>12}\n",
        "SET", "JOB", "MADE", "TASKS", "BYTES"
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

/// Restarts the tasks of a checkpoint.
pub(crate) fn restart(
    machine: &impl VirtualMachine,
    command: &RestartCommand,
) -> Result<Outcome, Error> {
    let RestartCommand {
        checkpoint: set,
        hosts,
    } = command;
    match machine.ask(Request::Restart {
        checkpoint: set.clone(),
        on: hosts.clone(),
        wait: true,
    })? {
        Reply::Restarted(Ok(report)) => {
            let hosts = machine.hosts()?;
            let name = |host: HostId| {
                hosts
                    .get(host)
                    .map_or_else(|| host.to_string(), |entry| entry.name.clone())
            };
            let lines: Vec<String> = report
                .tasks
                .iter()
                .map(|(tid, host)| format!("{tid} runs on {}\n", name(*host)))
                .collect();
            let tasks: Vec<Value> = report
                .tasks
                .iter()
                .map(|(tid, host)| json!({ "tid": tid.to_string(), "host": name(*host) }))
                .collect();
            Ok(Outcome::with_values(
                lines.concat(),
                json!({ "set": set, "tasks": tasks }),
                false,
            ))
        }
        Reply::Restarted(Err(why)) => {
            let value = json!({ "set": set, "failed": why.to_string() });
            Ok(Outcome {
                json: vec![value],
                ..Outcome::error(format!("{set} was not started: {why}; nothing of it runs"))
            })
        }
        _ => Err(unexpected_reply()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sempa_proto::checkpoint::RemovalRefusal;

    fn words(line: &str) -> Vec<String> {
        line.split(' ')
            .filter(|word| !word.is_empty())
            .map(String::from)
            .collect()
    }

    /// Job and options of `checkpoint` are accepted in any order.
    #[test]
    fn checkpoint_arguments_parse_in_any_order() {
        let job = Tid::from_raw(0x40002);
        let read = |line: &str| parse(&words(line));
        let every = |seconds| Some(CheckpointSchedule::Every(Micros::from_secs(seconds)));
        assert_eq!(
            read("t40002"),
            Ok(CheckpointCommand {
                job,
                pace: None,
                ends_job: false
            })
        );
        assert_eq!(
            read("--every 5m t40002"),
            Ok(CheckpointCommand {
                job,
                pace: every(300),
                ends_job: false
            })
        );
        assert_eq!(
            read("t40002 --every=2h"),
            Ok(CheckpointCommand {
                job,
                pace: every(7200),
                ends_job: false
            })
        );
        assert_eq!(
            read("t40002 --stop"),
            Ok(CheckpointCommand {
                job,
                pace: Some(CheckpointSchedule::Never),
                ends_job: false
            })
        );
        let loss = Some(CheckpointSchedule::MaxLoss(Micros::from_secs(60)));
        assert_eq!(
            read("t40002 --loss 1m"),
            Ok(CheckpointCommand {
                job,
                pace: loss,
                ends_job: false
            })
        );
        assert_eq!(
            read("--end t40002"),
            Ok(CheckpointCommand {
                job,
                pace: None,
                ends_job: true
            })
        );
        for line in [
            "",
            "t40002 t40003",
            "t40002 --every",
            "t40002 --loss",
            "--loss 1m --end t40002",
            "t40002 --end --stop",
            "--end --every 5m t40002",
        ] {
            assert_eq!(
                read(line),
                Err(ParseError::WrongArgs("checkpoint")),
                "{line}"
            );
        }
        for line in ["t40002 --every 0s", "t40002 --every soon", "t80000", "x"] {
            assert!(
                matches!(
                    read(line),
                    Err(ParseError::WrongType {
                        command: "checkpoint",
                        ..
                    })
                ),
                "{line}"
            );
        }
        assert_eq!(read("-f t40002"), Err(ParseError::UnknownFlag("f".into())));
    }

    /// The text about a job whose checkpoint failed depends on the cause.
    #[test]
    fn failure_text_depends_on_cause() {
        let job = Tid::from_raw(0x40002);
        assert_eq!(
            job_after_failure(&CheckpointFailure::NoSuchJob(job), "it"),
            ""
        );
        assert_eq!(
            job_after_failure(&CheckpointFailure::InProgress, "the job"),
            "; the job goes on"
        );
        let lost = job_after_failure(&CheckpointFailure::HostLost(HostId::MASTER), "it");
        assert!(
            lost.contains("it goes back to its newest checkpoint") && !lost.contains("goes on"),
            "{lost}"
        );
    }

    /// `restart` accepts a checkpoint and hosts in any order.
    #[test]
    fn restart_arguments_parse() {
        let read = |line: &str| parse_restart(&words(line));
        let restart = |on: &[&str]| {
            Ok(RestartCommand {
                checkpoint: "s".into(),
                hosts: on.iter().map(|h| h.to_string()).collect(),
            })
        };
        assert_eq!(read("s"), restart(&[]));
        assert_eq!(read("--on h1,h2 s"), restart(&["h1", "h2"]));
        assert_eq!(read("s --on=h1 --on h2"), restart(&["h1", "h2"]));
        for line in ["", "s t", "s --on"] {
            assert_eq!(read(line), Err(ParseError::WrongArgs("restart")), "{line}");
        }
    }

    /// The list shows usable checkpoints, and why others cannot be used.
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
            lines[1].starts_with("a-1    t40002  1970-01-01T00:00:00.000Z")
                && lines[1].ends_with("4096"),
            "{text}"
        );
        assert_eq!(lines[2], "b    cannot be used: another key");
    }

    /// Checkpoints to remove are selected by name or by job.
    #[test]
    fn removal_selects_by_name_or_job() {
        let read = |line: &str| parse_list(&words(line));
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

    /// Removal reports each checkpoint that was removed or kept.
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
                    "a removed, 7 bytes\nb stays: job t40002 needs it if a host is lost"
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
            "none of it"
        );
    }
}
