//! `checkpoint`: writes a checkpoint of a job to the store on the master's host, once or
//! periodically.

use crate::arguments::{parse_duration, parse_option_value, parse_tid, unknown_option_error};
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::progress::{Progress, Waited, ask_showing_progress};
use crate::output::transfer_amounts::TransferMeter;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::{
    VirtualMachine, no_task_line, task_has_ended, unexpected_reply_error,
};
use libpvm::Error;
use sempa_proto::checkpoint::{CheckpointFailure, CheckpointReport, CheckpointSchedule};
use sempa_proto::event::Event;
use sempa_proto::task::{Reply, Request};
use sempa_proto::{HostId, Micros, Tid};
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Maximum checkpoint interval. A longer interval is refused as a typing error.
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
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    completion: Completion::EveryWord(WordKind::Tid),
    ..CommandSpec::DEFAULT
};

/// A parsed `checkpoint` command.
#[derive(Clone, Debug, PartialEq, Eq)]
struct CheckpointCommand {
    /// The first task of the job.
    job: Tid,
    /// New schedule of the job's periodic checkpoints. `None` does not change the schedule.
    schedule: Option<CheckpointSchedule>,
    /// True if the job ends when its checkpoint is complete.
    ends_job: bool,
}

/// Parses the words after `checkpoint`.
fn parse(args: &[String]) -> Result<CheckpointCommand, ParseError> {
    const COMMAND: &str = "checkpoint";
    let wrong_args_error = || ParseError::WrongArgs(COMMAND);
    let (mut job, mut schedule, mut end_requested) = (None, None, false);
    let mut rest = args.iter();
    while let Some(arg) = rest.next() {
        let mut schedule_option = None;
        for (name, schedule_of) in [
            (
                "--every",
                CheckpointSchedule::Interval as fn(Micros) -> CheckpointSchedule,
            ),
            ("--loss", CheckpointSchedule::MaxLoss),
        ] {
            schedule_option = schedule_option
                .or(parse_option_value(COMMAND, name, arg, &mut rest)?
                    .map(|value| (schedule_of, value)));
        }
        match schedule_option {
            Some((schedule_of, value)) => {
                let expected_type = "a time such as 30s, 5m or 2h";
                let wrong_type_error = || ParseError::WrongType {
                    command: COMMAND,
                    word: value.into(),
                    expected: expected_type,
                };
                let interval = parse_duration(value)
                    .filter(|interval| *interval <= INTERVAL_MAX)
                    .ok_or_else(wrong_type_error)?;
                schedule = Some(schedule_of(Micros(interval.as_micros() as u64)));
            }
            None if arg == "--stop" => schedule = Some(CheckpointSchedule::Disabled),
            None if arg == "--end" => end_requested = true,
            None if arg.starts_with('-') => {
                return Err(unknown_option_error(arg));
            }
            None if job.is_none() => {
                let wrong_type_error = || ParseError::WrongType {
                    command: COMMAND,
                    word: arg.clone(),
                    expected: "a task's tid",
                };
                job = Some(
                    parse_tid(arg)
                        .filter(|tid| tid.is_task())
                        .ok_or_else(wrong_type_error)?,
                );
            }
            None => return Err(wrong_args_error()),
        }
    }
    if end_requested && schedule.is_some() {
        return Err(wrong_args_error());
    }
    Ok(CheckpointCommand {
        job: job.ok_or_else(wrong_args_error)?,
        schedule,
        ends_job: end_requested,
    })
}

impl VmCommand for CheckpointCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let job = self.job;
        if self.schedule == Some(CheckpointSchedule::Disabled) && !job_exists(&session.vm, job)? {
            return Ok(Outcome::from_error(format!(
                "{}; no job of it has periodic checkpoints",
                no_task_line(job)
            )));
        }
        let request = Request::Checkpoint {
            job,
            schedule: self.schedule,
            end_job: self.ends_job,
            wait_for_end: true,
        };
        let mut progress = CheckpointProgress::new(job);
        let waited =
            ask_showing_progress(&session.vm, request, &mut progress, !session.prints_json)?;
        let reply = match waited {
            Waited::Reply(reply) => reply,
            Waited::Interrupted(line) => return Ok(Outcome::from_error(line)),
        };
        match reply {
            Reply::Done => {
                let text = format!(
                    "periodic checkpoints of {job} are stopped; existing checkpoints are kept\n"
                );
                Ok(Outcome::with_json(
                    text,
                    json!({ "job": job.to_string(), "every_s": null, "loss_s": null }),
                    false,
                ))
            }
            Reply::Checkpointed(Ok(report)) => Ok(self.success_outcome(&report)),
            Reply::Checkpointed(Err(failure)) => {
                let job = job.to_string();
                let json_output = json!({ "job": job, "failed": failure.to_string() });
                Ok(Outcome {
                    json_values: vec![json_output],
                    ..Outcome::from_error(format!(
                        "no checkpoint of {job}: {failure}{}",
                        job_state_clause(&failure, "the job")
                    ))
                })
            }
            _ => Err(unexpected_reply_error()),
        }
    }
}

/// The progress of the checkpoint of a job.
struct CheckpointProgress {
    job: Tid,
    /// The tasks of the job at the first refresh, with their hosts. Most checkpoints are complete
    /// before.
    tasks: Option<BTreeMap<Tid, HostId>>,
    transfer: TransferMeter,
}

impl CheckpointProgress {
    fn new(job: Tid) -> Self {
        Self {
            job,
            tasks: None,
            transfer: TransferMeter::default(),
        }
    }
}

/// Returns the tasks of a job with their hosts; empty if the tasks cannot be listed.
fn job_tasks(machine: &dyn VirtualMachine, job: Tid) -> BTreeMap<Tid, HostId> {
    let all_tasks = machine.tasks(Tid::NONE).unwrap_or_default();
    let mut tasks = BTreeMap::new();
    // Parents may follow their children in the list.
    loop {
        let task_count = tasks.len();
        for task in &all_tasks {
            if task.tid == job || tasks.contains_key(&task.parent) {
                tasks.insert(task.tid, task.host);
            }
        }
        if tasks.len() == task_count {
            return tasks;
        }
    }
}

impl Progress for CheckpointProgress {
    fn title(&self) -> String {
        format!("checkpoint {}", self.job)
    }

    fn handle_event(&mut self, _event: &Event) -> Option<String> {
        None
    }

    fn refresh(&mut self, machine: &dyn VirtualMachine) {
        let tasks = self
            .tasks
            .get_or_insert_with(|| job_tasks(machine, self.job));
        let hosts: BTreeSet<HostId> = tasks.values().copied().collect();
        self.transfer
            .measure(machine, hosts, |tid| tasks.contains_key(&tid));
    }

    fn current_step(&self) -> String {
        self.transfer
            .describe("the job's tasks are frozen and written to the store")
    }

    fn without_waiting(&self) -> &'static str {
        "the checkpoint continues; 'pvm events' reports its end"
    }
}

/// True if the first task of the job runs, if the job waits for its restart, or if it may have a
/// checkpoint.
fn job_exists(machine: &dyn VirtualMachine, job: Tid) -> Result<bool, Error> {
    if !task_has_ended(machine, job) {
        return Ok(true);
    }
    let awaiting_tasks = machine.ask(Request::FindAwaitingRestart { tids: vec![job] })?;
    if matches!(awaiting_tasks, Reply::AwaitingRestart(tids) if !tids.is_empty()) {
        return Ok(true);
    }
    // The schedule of a job may outlast its tasks. Then the store has a checkpoint of the job.
    Ok(match machine.ask(Request::ListCheckpoints)? {
        Reply::Checkpoints(Ok(checkpoints)) => checkpoints.iter().any(|entry| entry.job == job),
        _ => true,
    })
}

impl CheckpointCommand {
    fn success_outcome(&self, report: &CheckpointReport) -> Outcome {
        let Self {
            job,
            schedule,
            ends_job,
        } = self;
        let (every, loss) = match schedule {
            Some(CheckpointSchedule::Interval(every)) => (Some(every.0 / 1_000_000), None),
            Some(CheckpointSchedule::MaxLoss(bound)) => (None, Some(bound.0 / 1_000_000)),
            Some(CheckpointSchedule::Disabled) | None => (None, None),
        };
        let tasks: Vec<String> = report.tasks.iter().map(Tid::to_string).collect();
        let task_count = if tasks.len() == 1 {
            "1 task".into()
        } else {
            format!("{} tasks", tasks.len())
        };
        let frozen_ms = report.frozen_time.0 as f64 / 1e3;
        let self_checkpointed_tids: Vec<String> = report
            .self_checkpointed_tasks
            .iter()
            .map(Tid::to_string)
            .collect();
        let self_checkpoint_text = match self_checkpointed_tids.len() {
            0 => String::new(),
            all if all == tasks.len() => " by their own checkpoints".into(),
            some => format!(", {some} of them by their own checkpoints"),
        };
        let (checkpoint_name, bytes) = (&report.name, report.stored_bytes);
        let mut text = format!(
            "{checkpoint_name}: {task_count} of job {job}{self_checkpoint_text}, {bytes} bytes, frozen {frozen_ms:.1} ms\n"
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
            text.push_str(&format!(
                "and ended; 'restart {checkpoint_name}' restarts it\n"
            ));
        }
        let json_output = json!({
            "set": checkpoint_name, "ended": ends_job, "job": job.to_string(), "tasks": tasks, "bytes": bytes,
            "own": self_checkpointed_tids, "frozen_us": report.frozen_time.0, "every_s": every, "loss_s": loss,
        });
        Outcome::with_json(text, json_output, false)
    }
}

/// Returns a clause that says what happens to a job whose checkpoint failed, or an empty text if
/// the job does not exist. `job_noun` stands for the job in that clause, such as "the job" or "it".
pub(crate) fn job_state_clause(failure: &CheckpointFailure, job_noun: &str) -> String {
    match failure {
        CheckpointFailure::NoSuchJob(_) => String::new(),
        CheckpointFailure::HostLost(_) => format!(
            "; with its tasks there; {job_noun} rolls back to its newest checkpoint, if it has one and is checkpointed periodically"
        ),
        _ => format!("; {job_noun} continues"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;
    use sempa_proto::HostId;

    #[test]
    fn checkpoint_arguments_parse_in_any_order() {
        let command = |schedule, ends_job| {
            Ok(CheckpointCommand {
                job: Tid::from_raw(0x40002),
                schedule,
                ends_job,
            })
        };
        let every = |seconds| Some(CheckpointSchedule::Interval(Micros::from_secs(seconds)));
        let loss = Some(CheckpointSchedule::MaxLoss(Micros::from_secs(60)));
        for (line, expected) in [
            ("t40002", command(None, false)),
            ("--every 5m t40002", command(every(300), false)),
            ("t40002 --every=2h", command(every(7200), false)),
            (
                "t40002 --stop",
                command(Some(CheckpointSchedule::Disabled), false),
            ),
            ("t40002 --loss 1m", command(loss, false)),
            ("--end t40002", command(None, true)),
        ] {
            assert_eq!(parse(&words(line)), expected, "{line}");
        }
    }

    /// The error reports the wrong number of words, the wrong value, or the unknown option.
    #[test]
    fn wrong_checkpoint_arguments_are_refused() {
        let parse_line = |line: &str| parse(&words(line));
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
                parse_line(line),
                Err(ParseError::WrongArgs("checkpoint")),
                "{line}"
            );
        }
        for line in ["t40002 --every 0s", "t40002 --every soon", "t80000", "x"] {
            assert!(
                matches!(
                    parse_line(line),
                    Err(ParseError::WrongType {
                        command: "checkpoint",
                        ..
                    })
                ),
                "{line}"
            );
        }
        assert_eq!(
            parse_line("-f t40002"),
            Err(ParseError::UnknownFlag("f".into()))
        );
    }

    #[test]
    fn failure_text_depends_on_cause() {
        let job = Tid::from_raw(0x40002);
        assert_eq!(
            job_state_clause(&CheckpointFailure::NoSuchJob(job), "it"),
            ""
        );
        assert_eq!(
            job_state_clause(&CheckpointFailure::InProgress, "the job"),
            "; the job continues"
        );
        let host_lost_text = job_state_clause(&CheckpointFailure::HostLost(HostId::MASTER), "it");
        assert!(
            host_lost_text.contains("it rolls back to its newest checkpoint")
                && !host_lost_text.contains("continues"),
            "{host_lost_text}"
        );
    }
}
