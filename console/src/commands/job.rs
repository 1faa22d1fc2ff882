//! `job`: lists, shows, kills, suspends and resumes whole jobs.
//!
//! A job is a top-level task and all its descendants, as recorded by the resource manager.

use super::live_usage::LiveUsages;
use crate::arguments::{parse_option_value, parse_task_tid, parse_user};
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::tables::{TOTALS_HEADER, totals_columns, totals_json};
use crate::output::time::format_local;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::VirtualMachine;
use libpvm::Error;
use sempa_proto::Tid;
use sempa_proto::rm::{JobUsage, RmQuery, RmReply, SuspensionStart, TaskUsage, WaitingSpawn};
use sempa_proto::task::Request;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Time limit for the end of a killed job. A task that does not exit within ten seconds is sent
/// SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(40);
/// Interval for polling the resource manager during a kill.
const KILL_POLL_INTERVAL: Duration = Duration::from_millis(100);

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "job",
    summary: "Show, end, suspend or resume whole jobs: a task from a command line and all that it spawned",
    detail: "Syntax:  job list [ --user user ]\n         \
             job status tid\n         \
             job kill tid\n         \
             job suspend [ --task ] tid\n         \
             job resume [ --task ] tid\n\
             Any task of a job selects it. 'list' also shows waiting spawns, since when and why they wait.\n\
             'status' shows how each task ended and what it used. 'kill' ends all tasks, after ten seconds by SIGKILL,\n\
             or cancels the restart of a job that waits in the store.\n\
             Tasks of a suspended job are paused, including those that it spawns meanwhile, and can still be migrated.\n\
             Tasks started from a command line continue. With '--task' only this task is suspended or resumed.\n\
             The resource manager knows the jobs.\n",
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    completion: Completion::WordDependent(|args, _| {
        let kind = if args.len() == 1 || args.last() == Some(&"--task") {
            WordKind::Tid
        } else {
            WordKind::Unknown
        };
        (0, kind)
    }),
    ..CommandSpec::DEFAULT
};

/// A parsed `job` command.
#[derive(Clone, Debug, PartialEq, Eq)]
enum JobCommand {
    /// Lists jobs and waiting spawns.
    List {
        /// Lists only jobs of the user with this id.
        user: Option<u32>,
    },
    /// Shows a job and its tasks.
    Status(Tid),
    /// Kills all tasks of a job.
    Kill(Tid),
    /// Suspends or resumes a job with all its tasks.
    Suspend {
        job: Tid,
        /// True to suspend, false to resume.
        suspend: bool,
    },
    /// Suspends or resumes a single task.
    SuspendTask {
        tid: Tid,
        /// True to suspend, false to resume.
        suspend: bool,
    },
}

/// Parses the words after `job`.
fn parse(args: &[String]) -> Result<JobCommand, ParseError> {
    let wrong_args_error = Err(ParseError::WrongArgs("job"));
    let Some((subcommand, args)) = args.split_first() else {
        return wrong_args_error;
    };
    let parse_single_tid = || match args {
        [job] => parse_task_tid("job", job),
        _ => Err(ParseError::WrongArgs("job")),
    };
    match subcommand.as_str() {
        "list" => {
            let (mut user, mut rest) = (None, args.iter());
            while let Some(arg) = rest.next() {
                match parse_option_value("job", "--user", arg, &mut rest)? {
                    Some(word) => user = Some(parse_user("job", word)?),
                    None => return wrong_args_error,
                }
            }
            Ok(JobCommand::List { user })
        }
        "status" => parse_single_tid().map(JobCommand::Status),
        "kill" => parse_single_tid().map(JobCommand::Kill),
        word @ ("suspend" | "resume") => {
            let suspend = word == "suspend";
            match args {
                [task_option, tid] if task_option == "--task" => Ok(JobCommand::SuspendTask {
                    tid: parse_task_tid("job", tid)?,
                    suspend,
                }),
                _ => Ok(JobCommand::Suspend {
                    job: parse_single_tid()?,
                    suspend,
                }),
            }
        }
        _ => wrong_args_error,
    }
}

impl VmCommand for JobCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let machine = &session.vm;
        match self {
            Self::List { user } => list_jobs(machine, *user),
            Self::Status(tid) => job_status(machine, "job status", *tid),
            Self::Kill(tid) => kill_and_wait(machine, *tid),
            Self::Suspend { job, suspend } => suspend_job(machine, *job, *suspend),
            Self::SuspendTask { tid, suspend } => suspend_task(machine, *tid, *suspend),
        }
    }
}

/// Adds the resources that running tasks have used so far to the totals of their jobs.
fn add_live_usages(machine: &dyn VirtualMachine, jobs: &mut [JobUsage]) -> Result<(), Error> {
    let mut running_jobs = jobs
        .iter_mut()
        .filter(|job| job.ended_at.is_none())
        .peekable();
    if running_jobs.peek().is_none() {
        return Ok(());
    }
    let live_usages = LiveUsages::read(machine)?;
    for job in running_jobs {
        if let RmReply::Job { tasks, .. } = machine.ask_rm(&RmQuery::Job(job.job))? {
            live_usages.add_to_job(job, &tasks);
        }
    }
    Ok(())
}

fn list_jobs(machine: &dyn VirtualMachine, user: Option<u32>) -> Result<Outcome, Error> {
    let RmReply::Jobs(mut jobs) = machine.ask_rm(&RmQuery::Jobs { user })? else {
        return Ok(Outcome::from_error(
            "job list: the resource manager knows no jobs",
        ));
    };
    let RmReply::WaitingSpawns(waiting_spawns) =
        machine.ask_rm(&RmQuery::WaitingSpawns { user })?
    else {
        return Ok(Outcome::from_error(
            "job list: the resource manager does not report waiting spawns",
        ));
    };
    add_live_usages(machine, &mut jobs)?;
    let lines = jobs
        .iter()
        .map(job_line)
        .chain(waiting_spawns.iter().map(waiting_line));
    let json_output = json!({
        "jobs": jobs.iter().map(job_json).collect::<Vec<_>>(),
        "waiting": waiting_spawns.iter().map(waiting_json).collect::<Vec<_>>(),
    });
    Ok(Outcome::with_json(
        jobs_header() + &lines.collect::<String>(),
        json_output,
        false,
    ))
}

/// Returns a line such as "waiting: 3 of worker for job t40002, user 1000, since
/// 2026-11-21 21:40:12.031 UTC, number 1 in turn: no host is free".
fn waiting_line(spawn: &WaitingSpawn) -> String {
    let WaitingSpawn {
        program,
        task_count: count,
        job,
        user,
        queue_position: position,
        last_result: reason,
        ..
    } = spawn;
    let since_text = format_local(spawn.since);
    format!(
        "waiting: {count} of {program} for job {job}, user {user}, since {since_text}, number {position} in turn: {reason}\n"
    )
}

fn waiting_json(spawn: &WaitingSpawn) -> Value {
    json!({
        "program": spawn.program,
        "count": spawn.task_count,
        "by": spawn.requested_by.to_string(),
        "job": spawn.job.to_string(),
        "user": spawn.user,
        "since_us": spawn.since.0,
        "turn": spawn.queue_position,
        "why": spawn.last_result,
    })
}

fn jobs_header() -> String {
    format!(
        "{:>9} {:>8} {TOTALS_HEADER} {:28} {:9} PROGRAM\n",
        "JOB", "USER", "BEGAN", "STATE"
    )
}

fn job_line(job: &JobUsage) -> String {
    let program = if job.program.is_empty() {
        "-"
    } else {
        &job.program
    };
    let (tid, start_time) = (job.job.to_string(), format_local(job.started_at));
    let state = match (job.ended_at, &job.suspension) {
        (Some(_), _) => "ended",
        (None, Some(_)) => "suspended",
        (None, None) => "runs",
    };
    format!(
        "{tid:>9} {:>8} {} {start_time:28} {state:9} {program}\n",
        job.user,
        totals_columns(&job.totals)
    )
}

fn suspension_json(suspension: Option<&SuspensionStart>) -> Value {
    suspension.map_or(
        Value::Null,
        |s| json!({ "since_us": s.since.0, "why": s.to_string() }),
    )
}

/// Returns a line such as "t40003: suspended by t80001 since 2026-11-21 21:40:12.031 UTC".
fn suspension_line(subject: impl std::fmt::Display, suspension: &SuspensionStart) -> String {
    format!(
        "{subject}: {suspension} since {}\n",
        format_local(suspension.since)
    )
}

fn job_json(job: &JobUsage) -> Value {
    json!({
        "job": job.job.to_string(),
        "user": job.user,
        "program": job.program,
        "began_us": job.started_at.0,
        "ended_us": job.ended_at.map(|end_time| end_time.0),
        "sums": totals_json(&job.totals),
        "suspended": suspension_json(job.suspension.as_ref()),
    })
}

/// Returns a task as JSON.
pub(crate) fn task_json(task: &TaskUsage) -> Value {
    let status = task.end.map(|(_, outcome)| outcome.to_string());
    json!({
        "tid": task.tid.to_string(),
        "job": task.job.to_string(),
        "user": task.user,
        "program": task.program,
        "host": task.host,
        "began_us": task.started_at.0,
        "ended_us": task.end.map(|(end_time, _)| end_time.0),
        "end": status,
        "user_us": task.usage.user.0,
        "system_us": task.usage.system.0,
        "resident_max_bytes": task.usage.resident_max_bytes,
        "moves": task.migrations,
        "evictions": task.evictions,
        "suspended": suspension_json(task.suspension.as_ref()),
        "suspended_before_us": task.suspended_time.0,
    })
}

fn unknown_job_outcome(command: &str, tid: Tid) -> Outcome {
    Outcome::from_error(format!(
        "{command}: the resource manager knows no job of {tid}; 'job list' shows those that it has seen"
    ))
}

/// Shows a job and its tasks, with their exit statuses and resource usage.
pub(crate) fn job_status(
    machine: &dyn VirtualMachine,
    command: &str,
    tid: Tid,
) -> Result<Outcome, Error> {
    let RmReply::Job { mut job, mut tasks } = machine.ask_rm(&RmQuery::Job(tid))? else {
        return Ok(unknown_job_outcome(command, tid));
    };
    let live_usages = LiveUsages::read(machine)?;
    live_usages.add_to_job(&mut job, &tasks);
    tasks
        .iter_mut()
        .for_each(|task| live_usages.add_to_task(task));
    let mut text = jobs_header() + &job_line(&job);
    text += &format!(
        "\n{:>9} {:>12} {:>10} {:>9} {:>5}  {:24} PROGRAM\n",
        "TID", "HOST", "CPU S", "RSS MIB", "MOVED", "END"
    );
    text.extend(tasks.iter().map(task_line));
    let active_suspension = job.suspension.iter().filter(|_| job.ended_at.is_none());
    text.extend(
        active_suspension
            .map(|suspension| suspension_line(format_args!("job {}", job.job), suspension)),
    );
    text.extend(
        tasks
            .iter()
            .filter_map(|task| Some(suspension_line(task.tid, task.suspension.as_ref()?))),
    );
    let json_output =
        json!({ "job": job_json(&job), "tasks": tasks.iter().map(task_json).collect::<Vec<_>>() });
    Ok(Outcome::with_json(text, json_output, false))
}

fn task_line(task: &TaskUsage) -> String {
    let current_state = if task.suspension.is_some() {
        "suspended"
    } else {
        "runs"
    };
    let end = task.end.map_or_else(
        || current_state.to_string(),
        |(_, outcome)| outcome.to_string(),
    );
    let cpu_s = (task.usage.user + task.usage.system).0 as f64 / 1e6;
    let cpu_text = format!("{cpu_s:.2}");
    let resident_mib = task.usage.resident_max_bytes as f64 / f64::from(1 << 20);
    let resident_text = format!("{resident_mib:.1}");
    let program = if task.program.is_empty() {
        "-"
    } else {
        &task.program
    };
    let (tid, host) = (task.tid.to_string(), &task.host);
    format!(
        "{tid:>9} {host:>12} {cpu_text:>10} {resident_text:>9} {:>5}  {end:24} {program}\n",
        task.migrations
    )
}

/// Suspends or resumes a job through the resource manager.
fn suspend_job(machine: &dyn VirtualMachine, tid: Tid, suspend: bool) -> Result<Outcome, Error> {
    let subcommand = if suspend { "suspend" } else { "resume" };
    let RmReply::Suspended {
        job,
        tasks,
        unchanged_tasks,
    } = machine.ask_rm(&RmQuery::Suspend { job: tid, suspend })?
    else {
        return Ok(unknown_job_outcome(&format!("job {subcommand}"), tid));
    };
    let tid_texts: Vec<String> = tasks.iter().map(Tid::to_string).collect();
    let verb = if suspend {
        "are suspended"
    } else {
        "are resumed"
    };
    let mut text = format!(
        "{} tasks of job {job} {verb}: {}\n",
        tid_texts.len(),
        tid_texts.join(" ")
    );
    if tid_texts.is_empty() {
        text = format!(
            "no task of job {job} was {subcommand}{}\n",
            if suspend { "ed" } else { "d" }
        );
    }
    text.extend(
        unchanged_tasks
            .iter()
            .map(|(tid, reason)| format!("{tid} is unchanged: {reason}\n")),
    );
    let unchanged_tasks: Vec<Value> = unchanged_tasks
        .iter()
        .map(|(tid, reason)| json!({ "tid": tid.to_string(), "why": reason }))
        .collect();
    let json_output = json!({ "job": job.to_string(), "suspend": suspend, "tasks": tid_texts, "others": unchanged_tasks });
    Ok(Outcome::with_json(text, json_output, false))
}

/// Suspends or resumes one task through the daemon. No resource manager is needed.
fn suspend_task(machine: &dyn VirtualMachine, tid: Tid, suspend: bool) -> Result<Outcome, Error> {
    machine.ask(Request::Suspend {
        tid,
        suspend,
        cause: None,
    })?;
    let text = format!(
        "{tid} {}\n",
        if suspend {
            "is suspended"
        } else {
            "is resumed"
        }
    );
    Ok(Outcome::with_json(
        text,
        json!({ "tid": tid.to_string(), "suspend": suspend }),
        false,
    ))
}

/// Kills all tasks of a job, also those that the job spawns during the kill. Waits up to
/// [`KILL_TIMEOUT`] until no task remains.
fn kill_and_wait(machine: &dyn VirtualMachine, tid: Tid) -> Result<Outcome, Error> {
    let (mut reply, started_at) = (machine.ask_rm(&RmQuery::Kill(tid))?, Instant::now());
    // This request follows the kill, so that a job that is being vacated at this moment is found,
    // too.
    let vacated_outcome = cancel_vacated(machine, tid)?;
    loop {
        match reply {
            RmReply::KillProgress {
                remaining_tasks: left_count,
                ..
            } if left_count > 0 && started_at.elapsed() < KILL_TIMEOUT => {}
            RmReply::KillProgress {
                job,
                exit_requests: asked_count,
                forced_kills: forced_count,
                remaining_tasks: left_count,
                signal_failures: failures,
            } => {
                let has_no_tasks = asked_count == 0 && left_count == 0;
                if let Some(outcome) = vacated_outcome.filter(|_| has_no_tasks) {
                    return Ok(outcome);
                }
                return Ok(kill_outcome(
                    job,
                    (asked_count, forced_count, left_count),
                    &failures,
                ));
            }
            _ => return Ok(vacated_outcome.unwrap_or_else(|| unknown_job_outcome("job kill", tid))),
        }
        std::thread::sleep(KILL_POLL_INTERVAL);
        reply = machine.ask_rm(&RmQuery::KillStatus(tid))?;
        if reply == RmReply::NotFound {
            // A new resource manager does not know about the kill, so the kill is requested again.
            reply = machine.ask_rm(&RmQuery::Kill(tid))?;
        }
    }
}

/// Returns the outcome of a kill. The three numbers count the tasks that were asked to exit, the
/// tasks that were sent SIGKILL, and the tasks that still exist. `failures` lists tasks that could
/// not be killed, with reasons.
fn kill_outcome(
    job: Tid,
    (asked_count, killed_count, remaining_count): (u32, u32, u32),
    failures: &[(Tid, String)],
) -> Outcome {
    let mut text = match asked_count {
        0 => format!("job {job} has no tasks\n"),
        _ => format!("{asked_count} tasks of job {job} were asked to end"),
    };
    if asked_count > 0 {
        text += &match (remaining_count, killed_count) {
            (0, 0) => ", and have ended\n".to_string(),
            (0, _) => format!(", and have ended, {killed_count} of them by SIGKILL\n"),
            _ => format!(
                "; {remaining_count} are left, although {killed_count} were sent SIGKILL: 'job status {job}' shows them\n"
            ),
        };
    }
    let error_lines: Vec<String> = failures
        .iter()
        .map(|(tid, reason)| format!("job kill: {tid}: {reason}"))
        .collect();
    let failures: Vec<Value> = failures
        .iter()
        .map(|(tid, reason)| json!({ "tid": tid.to_string(), "why": reason }))
        .collect();
    let json_output = json!({ "job": job.to_string(), "asked": asked_count, "forced": killed_count, "left": remaining_count, "failed": failures });
    Outcome {
        errors: error_lines,
        ..Outcome::with_json(text, json_output, remaining_count > 0)
    }
}

/// Cancels the restart of a vacated job that waits in the store for free hosts. Returns `None` if
/// the job is not vacated.
fn cancel_vacated(machine: &dyn VirtualMachine, tid: Tid) -> Result<Option<Outcome>, Error> {
    let RmReply::VacatedCancelled {
        job,
        checkpoint: checkpoint_name,
        restart_started: is_starting,
    } = machine.ask_rm(&RmQuery::CancelVacated(tid))?
    else {
        return Ok(None);
    };
    let mut json_output =
        json!({ "job": job.to_string(), "set": checkpoint_name, "parked": false });
    let text = if is_starting {
        json_output["parked"] = json!(true);
        format!(
            "job {job} is being restarted from checkpoint {checkpoint_name}: kill it when it runs\n"
        )
    } else {
        format!(
            "job {job} was vacated to checkpoint {checkpoint_name} and waited for hosts: its restart is cancelled\n\
             pvm restart {checkpoint_name} restarts it; pvm checkpoints --remove {checkpoint_name} removes it\n"
        )
    };
    Ok(Some(Outcome::with_json(text, json_output, is_starting)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;

    fn parse_line(line: &str) -> Result<JobCommand, ParseError> {
        parse(&words(line))
    }

    #[test]
    fn job_arguments_parse() {
        let tid = Tid::from_raw(0x40001);
        assert_eq!(parse_line("list"), Ok(JobCommand::List { user: None }));
        assert_eq!(
            parse_line("list --user 7"),
            Ok(JobCommand::List { user: Some(7) })
        );
        assert_eq!(parse_line("status t40001"), Ok(JobCommand::Status(tid)));
        assert_eq!(parse_line("kill 40001"), Ok(JobCommand::Kill(tid)));
        assert_eq!(
            parse_line("suspend t40001"),
            Ok(JobCommand::Suspend {
                job: tid,
                suspend: true
            })
        );
        assert_eq!(
            parse_line("resume t40001"),
            Ok(JobCommand::Suspend {
                job: tid,
                suspend: false
            })
        );
        assert_eq!(
            parse_line("resume --task t40001"),
            Ok(JobCommand::SuspendTask {
                tid,
                suspend: false
            })
        );
        for line in ["", "list x", "status", "kill t40001 t40002", "bake t40001"] {
            assert_eq!(
                parse_line(line),
                Err(ParseError::WrongArgs("job")),
                "{line}"
            );
        }
    }
}
