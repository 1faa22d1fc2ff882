//! `restart`: restarts a job from a checkpoint.

use crate::arguments::{parse_option_value, parse_tid, unknown_option_error};
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::progress::{PlainProgress, Waited, ask_showing_progress};
use crate::output::tables::host_name;
use crate::output::time::format_local;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::{VirtualMachine, unexpected_reply_error};
use libpvm::Error;
use sempa_proto::checkpoint::{CheckpointEntry, RestartFailure, RestartReport, StoreFailure};
use sempa_proto::task::{Reply, Request};
use sempa_proto::{PvmError, Tid};
use serde_json::{Value, json};
use std::collections::BTreeSet;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "restart",
    summary: "Restart the tasks of a checkpoint",
    detail: "Syntax:  restart checkpoint [ --on host[,host ...] ] [ --force ]\n\
             Syntax:  restart --newest [ tid ] [ --on host[,host ...] ] [ --force ]\n\
             They keep their tids and continue from the checkpoint, also in a new virtual machine.\n\
             All of them are restarted, or none. A job that runs in another virtual machine is not restarted;\n\
             --force restarts it if that virtual machine has not renewed its claim in the store for a minute, or if\n\
             it cannot be known whether it still runs.\n\
             --newest restarts the newest usable checkpoint of the job with this first task, or of all jobs that do not\n\
             run here and did not end in order. A damaged checkpoint is skipped.\n",
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    completion: Completion::WordDependent(|args, _| {
        let kind = if args.last() == Some(&"--on") {
            WordKind::Host
        } else {
            WordKind::Unknown
        };
        (0, kind)
    }),
    ..CommandSpec::DEFAULT
};

/// Which checkpoint is restarted.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Selection {
    /// The checkpoint with this name.
    Named(String),
    /// The newest usable one of this job, or of all jobs.
    Newest { job: Option<Tid> },
}

/// A parsed `restart` command.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RestartCommand {
    selection: Selection,
    /// Names of the hosts that may be used. If empty, any host may be used.
    host_names: Vec<String>,
    /// True to restart a job that, according to the store, runs in another virtual machine.
    force: bool,
}

/// Parses the words after `restart`.
fn parse(args: &[String]) -> Result<RestartCommand, ParseError> {
    let wrong_args_error = || ParseError::WrongArgs("restart");
    let (mut word, mut host_names, mut force, mut newest) = (None, Vec::new(), false, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        match parse_option_value("restart", "--on", arg, &mut rest)? {
            Some(hosts) => host_names.extend(
                hosts
                    .split(',')
                    .filter(|name| !name.is_empty())
                    .map(String::from),
            ),
            None if arg == "--force" => force = true,
            None if arg == "--newest" => newest = true,
            None if arg.starts_with('-') => {
                return Err(unknown_option_error(arg));
            }
            None if word.is_none() => word = Some(arg.clone()),
            None => return Err(wrong_args_error()),
        }
    }
    let selection = match (newest, word) {
        (false, word) => Selection::Named(word.ok_or_else(wrong_args_error)?),
        (true, None) => Selection::Newest { job: None },
        (true, Some(word)) => {
            let job = parse_tid(&word).filter(|tid| tid.is_task());
            let not_a_tid = || ParseError::NotATid {
                command: "restart",
                word: word.clone(),
            };
            Selection::Newest {
                job: Some(job.ok_or_else(not_a_tid)?),
            }
        }
    };
    Ok(RestartCommand {
        selection,
        host_names,
        force,
    })
}

impl VmCommand for RestartCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        match &self.selection {
            Selection::Named(checkpoint) => match self.restart(&session.vm, checkpoint)? {
                Ok(report) => restarted_outcome(&session.vm, &report),
                Err(failure) => Ok(failure_outcome(checkpoint, &failure)),
            },
            Selection::Newest { job } => self.restart_newest(&session.vm, *job),
        }
    }
}

impl RestartCommand {
    fn restart(
        &self,
        vm: &dyn VirtualMachine,
        checkpoint: &str,
    ) -> Result<Result<RestartReport, RestartFailure>, Error> {
        let request = Request::Restart {
            checkpoint: checkpoint.to_string(),
            host_names: self.host_names.clone(),
            wait_for_end: true,
            force: self.force,
        };
        let mut progress = PlainProgress {
            title: checkpoint.to_string(),
            step: "the tasks of the checkpoint are restored",
            without_waiting: "the restart continues; 'pvm events' reports its end",
        };
        match ask_showing_progress(vm, request, &mut progress, true)? {
            Waited::Reply(Reply::Restarted(result)) => Ok(result),
            Waited::Reply(_) => Err(unexpected_reply_error()),
            Waited::Interrupted(line) => Err(Error::new(PvmError::SysErr, line)),
        }
    }

    /// Restarts the newest usable checkpoint. If the store finds it damaged, restarts the next
    /// older one.
    fn restart_newest(&self, vm: &dyn VirtualMachine, job: Option<Tid>) -> Result<Outcome, Error> {
        let mut skipped: Vec<(String, String)> = Vec::new();
        loop {
            let checkpoints = match list_checkpoints(vm)? {
                Ok(checkpoints) => checkpoints,
                Err(reason) => {
                    return Ok(Outcome::from_error(format!(
                        "restart: the store could not be read: {reason}; nothing was restarted"
                    )));
                }
            };
            let live_tids = live_tids(vm)?;
            let mut usable = usable_checkpoints(&checkpoints, job, &live_tids);
            usable.retain(|entry| skipped.iter().all(|(name, _)| *name != entry.name));
            let Some(newest) = usable.first() else {
                return Ok(nothing_usable_outcome(&checkpoints, job, &live_tids));
            };
            let failure = match self.restart(vm, &newest.name)? {
                Ok(report) => {
                    let outcome = restarted_outcome(vm, &report)?;
                    let others = match job {
                        Some(_) => Vec::new(),
                        None => other_jobs(&usable, newest.job),
                    };
                    return Ok(newest_outcome(outcome, newest, &skipped, &others));
                }
                Err(failure) => failure,
            };
            let damage = damage_of(vm, &newest.name)?;
            match damage {
                Some(reason) => skipped.push((newest.name.clone(), reason)),
                None => return Ok(failure_outcome(&newest.name, &failure)),
            }
        }
    }
}

fn list_checkpoints(
    vm: &dyn VirtualMachine,
) -> Result<Result<Vec<CheckpointEntry>, StoreFailure>, Error> {
    match vm.ask(Request::ListCheckpoints)? {
        Reply::Checkpoints(result) => Ok(result),
        _ => Err(unexpected_reply_error()),
    }
}

fn live_tids(vm: &dyn VirtualMachine) -> Result<BTreeSet<Tid>, Error> {
    Ok(vm.tasks(Tid::NONE)?.iter().map(|task| task.tid).collect())
}

/// Returns the reason why a checkpoint is unusable, after an attempt to restart it has failed.
fn damage_of(vm: &dyn VirtualMachine, name: &str) -> Result<Option<String>, Error> {
    let checkpoints = list_checkpoints(vm)?.unwrap_or_default();
    let entry = checkpoints.into_iter().find(|entry| entry.name == name);
    Ok(entry.and_then(|entry| entry.unusable_reason))
}

/// Returns the checkpoints that may be restarted, the newest one first. A job that ended in order
/// is restarted only if it is named.
fn usable_checkpoints<'a>(
    checkpoints: &'a [CheckpointEntry],
    job: Option<Tid>,
    live_tids: &BTreeSet<Tid>,
) -> Vec<&'a CheckpointEntry> {
    let is_usable = |entry: &&CheckpointEntry| {
        entry.unusable_reason.is_none()
            && match job {
                Some(job) => entry.job == job,
                None => entry.job_ended_at.is_none() && !live_tids.contains(&entry.job),
            }
    };
    let mut usable: Vec<&CheckpointEntry> = checkpoints.iter().filter(is_usable).collect();
    usable.sort_by(|a, b| (b.created_at, &b.name).cmp(&(a.created_at, &a.name)));
    usable
}

/// Returns the newest checkpoints of all jobs except `job`.
fn other_jobs<'a>(usable: &[&'a CheckpointEntry], job: Tid) -> Vec<&'a CheckpointEntry> {
    let mut seen_jobs = BTreeSet::from([job]);
    let is_first = |entry: &&&CheckpointEntry| seen_jobs.insert(entry.job);
    usable.iter().filter(is_first).copied().collect()
}

/// Returns the reason why `--newest` finds nothing.
fn nothing_usable_outcome(
    checkpoints: &[CheckpointEntry],
    job: Option<Tid>,
    live_tids: &BTreeSet<Tid>,
) -> Outcome {
    let of_job = job.map_or(String::new(), |job| format!(" of job {job}"));
    let relevant = checkpoints
        .iter()
        .filter(|entry| job.is_none_or(|job| entry.job == job));
    let (mut reasons, mut ended_count) = (Vec::new(), 0);
    for entry in relevant {
        match &entry.unusable_reason {
            Some(reason) => reasons.push(format!("{}: {reason}", entry.name)),
            None if live_tids.contains(&entry.job) => {
                reasons.push(format!("{}: its job runs here", entry.name));
            }
            None => ended_count += 1,
        }
    }
    if ended_count > 0 {
        reasons.push(format!(
            "{ended_count} of jobs that ended in order, which are restarted only by name"
        ));
    }
    let detail = match reasons.is_empty() {
        true => "the store has none ('pvm checkpoints' lists them)".into(),
        false => reasons.join("; "),
    };
    let text = format!("there is no usable checkpoint{of_job}: {detail}; nothing was restarted");
    Outcome {
        json_values: vec![json!({ "set": Value::Null, "failed": text })],
        ..Outcome::from_error(format!("restart: {text}"))
    }
}

fn restarted_outcome(vm: &dyn VirtualMachine, report: &RestartReport) -> Result<Outcome, Error> {
    let table = vm.hosts()?;
    let lines: Vec<String> = report
        .tasks
        .iter()
        .map(|(tid, host)| format!("{tid} runs on {}\n", host_name(&table, *host)))
        .collect();
    let tasks: Vec<Value> = report
        .tasks
        .iter()
        .map(|(tid, host)| json!({ "tid": tid.to_string(), "host": host_name(&table, *host) }))
        .collect();
    Ok(Outcome::with_json(
        lines.concat(),
        json!({ "set": report.checkpoint, "tasks": tasks }),
        false,
    ))
}

/// Adds to the outcome of a restart which checkpoint was chosen, which ones were skipped, and which
/// other jobs can be restarted.
fn newest_outcome(
    outcome: Outcome,
    newest: &CheckpointEntry,
    skipped: &[(String, String)],
    others: &[&CheckpointEntry],
) -> Outcome {
    let mut text = String::new();
    for (name, reason) in skipped {
        text.push_str(&format!("{name} was skipped: {reason}\n"));
    }
    text.push_str(&format!(
        "{} of {} is restarted\n{}",
        newest.name,
        format_local(newest.created_at),
        outcome.text
    ));
    for other in others {
        text.push_str(&format!(
            "job {} can be restarted, too: pvm restart --newest {}\n",
            other.job, other.job
        ));
    }
    let mut json_values = outcome.json_values;
    for value in &mut json_values {
        value["skipped"] = skipped
            .iter()
            .map(|(name, reason)| json!({ "set": name, "why": reason }))
            .collect();
        value["others"] = others
            .iter()
            .map(|other| json!({ "set": other.name, "job": other.job.to_string() }))
            .collect();
    }
    Outcome {
        text,
        json_values,
        ..outcome
    }
}

fn failure_outcome(checkpoint: &str, failure: &RestartFailure) -> Outcome {
    let json_output = json!({ "set": checkpoint, "failed": failure.to_string() });
    let since = match failure {
        RestartFailure::RunsElsewhere { holder, .. } => {
            format!(" (it runs there since {})", format_local(holder.since))
        }
        _ => String::new(),
    };
    Outcome {
        json_values: vec![json_output],
        ..Outcome::from_error(format!(
            "{checkpoint} was not restarted: {failure}{since}; none of its tasks is running in this virtual machine"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;
    use sempa_proto::Micros;

    /// The command accepts a checkpoint and hosts in any order.
    #[test]
    fn restart_arguments_parse() {
        let parse_line = |line: &str| parse(&words(line));
        let restart_on = |host_names: &[&str]| {
            Ok(RestartCommand {
                selection: Selection::Named("s".into()),
                host_names: host_names.iter().map(|h| h.to_string()).collect(),
                force: false,
            })
        };
        assert_eq!(parse_line("s"), restart_on(&[]));
        assert_eq!(parse_line("--on h1,h2 s"), restart_on(&["h1", "h2"]));
        assert_eq!(parse_line("s --on=h1 --on h2"), restart_on(&["h1", "h2"]));
        let forced = parse_line("--force s").map(|command| command.force);
        assert_eq!(forced, Ok(true));
        for line in ["", "s t", "s --on", "--newest t40002 s"] {
            assert_eq!(
                parse_line(line),
                Err(ParseError::WrongArgs("restart")),
                "{line}"
            );
        }
        let selection = |line: &str| parse_line(line).map(|command| command.selection);
        assert_eq!(
            selection("--newest --on h1"),
            Ok(Selection::Newest { job: None })
        );
        assert_eq!(
            selection("t40002 --newest"),
            Ok(Selection::Newest { job: Some(JOB) })
        );
        assert_eq!(
            selection("--newest s"),
            Err(ParseError::NotATid {
                command: "restart",
                word: "s".into()
            })
        );
    }

    const JOB: Tid = Tid::from_raw(0x40002);
    const OTHER_JOB: Tid = Tid::from_raw(0x40003);

    fn entry(name: &str, job: Tid, second: u64) -> CheckpointEntry {
        CheckpointEntry {
            name: name.into(),
            job,
            created_at: Micros::from_secs(second),
            task_count: 1,
            stored_bytes: 1,
            unusable_reason: None,
            job_ended_at: None,
            copy_hosts: Vec::new(),
        }
    }

    /// `--newest` chooses among the intact checkpoints of jobs that neither run nor ended in order.
    /// A named job may have ended.
    #[test]
    fn newest_usable_checkpoint_comes_first() {
        let damaged = CheckpointEntry {
            unusable_reason: Some("damaged".into()),
            ..entry("damaged", JOB, 9)
        };
        let ended = CheckpointEntry {
            job_ended_at: Some(Micros(1)),
            ..entry("ended", Tid::from_raw(0x40004), 8)
        };
        let alive_job = Tid::from_raw(0x40005);
        let checkpoints = [
            entry("a", JOB, 1),
            entry("c", JOB, 3),
            entry("b", OTHER_JOB, 2),
            damaged,
            ended.clone(),
            entry("alive", alive_job, 7),
        ];
        let live_tids = BTreeSet::from([alive_job]);
        let names = |job: Option<Tid>| {
            let usable = usable_checkpoints(&checkpoints, job, &live_tids);
            usable
                .iter()
                .map(|entry| entry.name.as_str())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(None), ["c", "b", "a"]);
        assert_eq!(names(Some(OTHER_JOB)), ["b"]);
        assert_eq!(names(Some(ended.job)), ["ended"]);
        let usable = usable_checkpoints(&checkpoints, None, &live_tids);
        let others = other_jobs(&usable, JOB);
        assert_eq!(others.len(), 1);
        assert_eq!(others[0].name, "b");
    }

    /// If nothing is usable, the reason of each checkpoint is named.
    #[test]
    fn reason_is_named_if_nothing_is_usable() {
        let damaged = CheckpointEntry {
            unusable_reason: Some("it was damaged when it was last read: x".into()),
            ..entry("d", JOB, 9)
        };
        let ended = CheckpointEntry {
            job_ended_at: Some(Micros(1)),
            ..entry("e", JOB, 8)
        };
        let error = |checkpoints: &[CheckpointEntry], live_tids: &[Tid]| {
            let live_tids = live_tids.iter().copied().collect();
            let outcome = nothing_usable_outcome(checkpoints, Some(JOB), &live_tids);
            assert!(outcome.failed && outcome.json_values.len() == 1);
            outcome.errors.concat()
        };
        assert_eq!(
            error(&[], &[]),
            "restart: there is no usable checkpoint of job t40002: the store has none ('pvm checkpoints' lists them); \
             nothing was restarted"
        );
        let text = error(&[damaged, ended], &[]);
        assert!(
            text.contains("d: it was damaged") && text.contains("1 of jobs that ended in order"),
            "{text}"
        );
        let text = error(&[entry("r", JOB, 1)], &[JOB]);
        assert!(text.contains("r: its job runs here"), "{text}");
    }

    /// The outcome says which checkpoint was chosen, which were skipped, and what else is possible.
    #[test]
    fn newest_outcome_names_choice_and_rest() {
        let restarted = Outcome::with_json(
            "t40002 runs on h1\n".into(),
            json!({ "set": "a", "tasks": [] }),
            false,
        );
        let other = entry("b", OTHER_JOB, 1);
        let skipped = [("d".to_string(), "damaged".to_string())];
        let outcome = newest_outcome(restarted, &entry("a", JOB, 2), &skipped, &[&other]);
        assert_eq!(
            outcome.text,
            format!(
                "d was skipped: damaged\na of {} is restarted\nt40002 runs on h1\n\
                 job t40003 can be restarted, too: pvm restart --newest t40003\n",
                format_local(Micros(2_000_000))
            )
        );
        assert_eq!(outcome.json_values[0]["skipped"][0]["set"], "d");
        assert_eq!(outcome.json_values[0]["others"][0]["job"], "t40003");
    }
}
