//! `checkpoint`: writes a checkpoint of a job to the store on the master's host, once or
//! periodically.

use crate::arguments::{option_value, parse_duration, parse_tid, unknown_option};
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::unexpected_reply;
use libpvm::Error;
use sempa_proto::checkpoint::{CheckpointFailure, CheckpointReport, CheckpointSchedule};
use sempa_proto::task::{Reply, Request};
use sempa_proto::{Micros, Tid};
use serde_json::json;
use std::time::Duration;

/// Longest accepted checkpoint interval; a longer one is a typing error.
const INTERVAL_MAX: Duration = Duration::from_secs(30 * 24 * 3600);

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "checkpoint",
    summary: "Write a consistent checkpoint of a job to the store",
    detail: "Syntax:  checkpoint [ --every time | --loss time | --stop | --end ] tid\n\
             The job is this task and everything that it and its descendants have spawned. Its tasks are frozen while\n\
             they are written; other tasks continue.\n\
             With --every (such as 30s, 5m) checkpoints are repeated, and the job rolls back to its newest checkpoint\n\
             when a host with some of its tasks is lost. With --loss they are repeated so that at most this much work\n\
             is lost. --stop ends the repetition.\n\
             With --end the job ends when its checkpoint is complete; 'restart' restarts it.\n\
             Tasks that CRIU cannot dump may write their own state (SEMPA_ENGINE=own, SEMPA_STATE).\n\
             The store is on the master's host: $SEMPA_STORE, or ~/.local/state/sempa/checkpoints.\n",
    parse: |args| parse(args).map(ParsedCommand::on_vm),
    completion: Completion::EveryWord(WordKind::Tid),
    ..CommandSpec::DEFAULT
};

/// A parsed `checkpoint` command.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CheckpointCommand {
    /// The first task of the job.
    job: Tid,
    /// New schedule of the job's periodic checkpoints. `None` keeps the present schedule.
    schedule: Option<CheckpointSchedule>,
    /// Ends the job when its checkpoint is complete.
    ends_job: bool,
}

/// Parses the words after `checkpoint`.
fn parse(args: &[String]) -> Result<CheckpointCommand, ParseError> {
    const COMMAND: &str = "checkpoint";
    let wrong = || ParseError::WrongArgs(COMMAND);
    let (mut job, mut schedule, mut end) = (None, None, false);
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
                schedule = Some(kind(Micros(span.as_micros() as u64)));
            }
            None if arg == "--stop" => schedule = Some(CheckpointSchedule::Never),
            None if arg == "--end" => end = true,
            None if arg.starts_with('-') => {
                return Err(unknown_option(arg));
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
    if end && schedule.is_some() {
        return Err(wrong());
    }
    Ok(CheckpointCommand {
        job: job.ok_or_else(wrong)?,
        schedule,
        ends_job: end,
    })
}

impl VmCommand for CheckpointCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let job = self.job;
        match session.vm.ask(Request::Checkpoint {
            job,
            schedule: self.schedule,
            end_job: self.ends_job,
            wait: true,
        })? {
            Reply::Done => {
                let text = format!(
                    "periodic checkpoints of {job} are stopped; existing checkpoints are kept\n"
                );
                Ok(Outcome::with_values(
                    text,
                    json!({ "job": job.to_string(), "every_s": null, "loss_s": null }),
                    false,
                ))
            }
            Reply::Checkpointed(Ok(report)) => Ok(self.success(&report)),
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
}

impl CheckpointCommand {
    fn success(&self, report: &CheckpointReport) -> Outcome {
        let CheckpointCommand {
            job,
            schedule,
            ends_job,
        } = self;
        let (every, loss) = match schedule {
            Some(CheckpointSchedule::Every(every)) => (Some(every.0 / 1_000_000), None),
            Some(CheckpointSchedule::MaxLoss(bound)) => (None, Some(bound.0 / 1_000_000)),
            Some(CheckpointSchedule::Never) | None => (None, None),
        };
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
                "repeated every {every} s until 'checkpoint --stop {job}'\n"
            ));
        }
        if let Some(bound) = loss {
            text.push_str(&format!(
                "repeated so that at most {bound} s of work are lost, until 'checkpoint --stop {job}'\n"
            ));
        }
        if *ends_job {
            text.push_str(&format!("and ended; 'restart {set}' restarts it\n"));
        }
        let value = json!({
            "set": set, "ended": ends_job, "job": job.to_string(), "tasks": tasks, "bytes": bytes,
            "own": own, "frozen_us": report.frozen.0, "every_s": every, "loss_s": loss,
        });
        Outcome::with_values(text, value, false)
    }
}

/// Returns a clause that says what happens to a job whose checkpoint failed. `job_word` stands for
/// the job in that clause, such as "the job" or "it".
pub(crate) fn job_after_failure(why: &CheckpointFailure, job_word: &str) -> String {
    match why {
        CheckpointFailure::NoSuchJob(_) => String::new(),
        CheckpointFailure::HostLost(_) => format!(
            "; with its tasks there; {job_word} rolls back to its newest checkpoint, if it has one and is checkpointed periodically"
        ),
        _ => format!("; {job_word} continues"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;
    use sempa_proto::HostId;

    /// Job and options of `checkpoint` are accepted in any order.
    #[test]
    fn checkpoint_arguments_parse_in_any_order() {
        let command = |schedule, ends_job| {
            Ok(CheckpointCommand {
                job: Tid::from_raw(0x40002),
                schedule,
                ends_job,
            })
        };
        let every = |seconds| Some(CheckpointSchedule::Every(Micros::from_secs(seconds)));
        let loss = Some(CheckpointSchedule::MaxLoss(Micros::from_secs(60)));
        for (line, parsed) in [
            ("t40002", command(None, false)),
            ("--every 5m t40002", command(every(300), false)),
            ("t40002 --every=2h", command(every(7200), false)),
            (
                "t40002 --stop",
                command(Some(CheckpointSchedule::Never), false),
            ),
            ("t40002 --loss 1m", command(loss, false)),
            ("--end t40002", command(None, true)),
        ] {
            assert_eq!(parse(&words(line)), parsed, "{line}");
        }
    }

    /// Errors of `checkpoint` name what is wrong: the number of words, a value or an option.
    #[test]
    fn wrong_checkpoint_arguments_are_refused() {
        let read = |line: &str| parse(&words(line));
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
            "; the job continues"
        );
        let lost = job_after_failure(&CheckpointFailure::HostLost(HostId::MASTER), "it");
        assert!(
            lost.contains("it rolls back to its newest checkpoint") && !lost.contains("continues"),
            "{lost}"
        );
    }
}
