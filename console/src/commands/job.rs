//! `job`: lists, shows, kills, suspends and resumes whole jobs.
//!
//! A job is a top-level task and all its descendants, as recorded by the resource manager.

use crate::arguments::{option_value, parse_task_tid, parse_user};
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::tables::{TOTALS_HEADER, totals_columns, totals_value};
use crate::output::time::time;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::VirtualMachine;
use libpvm::Error;
use sempa_proto::Tid;
use sempa_proto::rm::{JobUsage, RmQuery, RmReply, SuspensionInfo, TaskUsage, WaitingSpawn};
use sempa_proto::task::Request;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Time to wait for the end of a job. Its tasks have ten seconds to exit before they are killed.
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
    parse: |args| parse(args).map(ParsedCommand::on_vm),
    completion: Completion::ByWords(|args, _| {
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

/// Parses the words after the command.
fn parse(args: &[String]) -> Result<JobCommand, ParseError> {
    let wrong = Err(ParseError::WrongArgs("job"));
    let Some((what, args)) = args.split_first() else {
        return wrong;
    };
    let only_tid = || match args {
        [job] => parse_task_tid("job", job),
        _ => Err(ParseError::WrongArgs("job")),
    };
    match what.as_str() {
        "list" => {
            let (mut user, mut rest) = (None, args.iter());
            while let Some(arg) = rest.next() {
                match option_value("job", "--user", arg, &mut rest)? {
                    Some(word) => user = Some(parse_user("job", word)?),
                    None => return wrong,
                }
            }
            Ok(JobCommand::List { user })
        }
        "status" => only_tid().map(JobCommand::Status),
        "kill" => only_tid().map(JobCommand::Kill),
        word @ ("suspend" | "resume") => {
            let suspend = word == "suspend";
            match args {
                [alone, tid] if alone == "--task" => Ok(JobCommand::SuspendTask {
                    tid: parse_task_tid("job", tid)?,
                    suspend,
                }),
                _ => Ok(JobCommand::Suspend {
                    job: only_tid()?,
                    suspend,
                }),
            }
        }
        _ => wrong,
    }
}

impl VmCommand for JobCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let machine = &session.vm;
        match self {
            JobCommand::List { user } => list_jobs(machine, *user),
            JobCommand::Status(tid) => job_status(machine, "job status", *tid),
            JobCommand::Kill(tid) => kill_job(machine, *tid),
            JobCommand::Suspend { job, suspend } => suspend_job(machine, *job, *suspend),
            JobCommand::SuspendTask { tid, suspend } => suspend_task(machine, *tid, *suspend),
        }
    }
}

fn list_jobs(machine: &dyn VirtualMachine, user: Option<u32>) -> Result<Outcome, Error> {
    let RmReply::Jobs(jobs) = machine.ask_rm(&RmQuery::Jobs { user })? else {
        return Ok(Outcome::error(
            "job list: the resource manager knows no jobs",
        ));
    };
    let RmReply::WaitingSpawns(waiting) = machine.ask_rm(&RmQuery::WaitingSpawns { user })? else {
        return Ok(Outcome::error(
            "job list: the resource manager does not report waiting spawns",
        ));
    };
    let lines = jobs
        .iter()
        .map(job_line)
        .chain(waiting.iter().map(waiting_line));
    let value = json!({
        "jobs": jobs.iter().map(job_value).collect::<Vec<_>>(),
        "waiting": waiting.iter().map(waiting_value).collect::<Vec<_>>(),
    });
    Ok(Outcome::with_values(
        jobs_header() + &lines.collect::<String>(),
        value,
        false,
    ))
}

/// Returns a line such as "waiting: 3 of worker for job t40002, user 1000, since
/// 2026-11-21T21:40:12.031Z, number 1 in turn: no host is free".
fn waiting_line(spawn: &WaitingSpawn) -> String {
    let WaitingSpawn {
        program,
        count,
        job,
        user,
        queue_position: turn,
        why,
        ..
    } = spawn;
    let since = time(spawn.since);
    format!(
        "waiting: {count} of {program} for job {job}, user {user}, since {since}, number {turn} in turn: {why}\n"
    )
}

fn waiting_value(spawn: &WaitingSpawn) -> Value {
    json!({
        "program": spawn.program,
        "count": spawn.count,
        "by": spawn.requested_by.to_string(),
        "job": spawn.job.to_string(),
        "user": spawn.user,
        "since_us": spawn.since.0,
        "turn": spawn.queue_position,
        "why": spawn.why,
    })
}

fn jobs_header() -> String {
    format!(
        "{:>9} {:>8} {TOTALS_HEADER} {:24} {:9} PROGRAM\n",
        "JOB", "USER", "BEGAN", "STATE"
    )
}

fn job_line(job: &JobUsage) -> String {
    let program = if job.program.is_empty() {
        "-"
    } else {
        &job.program
    };
    let (tid, began) = (job.job.to_string(), time(job.started));
    let state = match (job.ended, &job.suspension) {
        (Some(_), _) => "ended",
        (None, Some(_)) => "suspended",
        (None, None) => "runs",
    };
    format!(
        "{tid:>9} {:>8} {} {began:24} {state:9} {program}\n",
        job.user,
        totals_columns(&job.totals)
    )
}

fn suspended_value(suspended: Option<&SuspensionInfo>) -> Value {
    suspended.map_or(
        Value::Null,
        |s| json!({ "since_us": s.since.0, "why": s.to_string() }),
    )
}

/// Returns a line such as "t40003: suspended by t80001 since 2026-11-21T21:40:12.031Z".
fn suspended_since(what: impl std::fmt::Display, suspended: &SuspensionInfo) -> String {
    format!("{what}: {suspended} since {}\n", time(suspended.since))
}

fn job_value(job: &JobUsage) -> Value {
    json!({
        "job": job.job.to_string(),
        "user": job.user,
        "program": job.program,
        "began_us": job.started.0,
        "ended_us": job.ended.map(|at| at.0),
        "sums": totals_value(&job.totals),
        "suspended": suspended_value(job.suspension.as_ref()),
    })
}

/// Returns a task as JSON.
pub(crate) fn task_value(task: &TaskUsage) -> Value {
    let status = task.ended.map(|(_, how)| how.to_string());
    json!({
        "tid": task.tid.to_string(),
        "job": task.job.to_string(),
        "user": task.user,
        "program": task.program,
        "host": task.host,
        "began_us": task.started.0,
        "ended_us": task.ended.map(|(at, _)| at.0),
        "end": status,
        "user_us": task.used.user.0,
        "system_us": task.used.system.0,
        "resident_max_bytes": task.used.resident_max_bytes,
        "moves": task.migrations,
        "evictions": task.evictions,
        "suspended": suspended_value(task.suspension.as_ref()),
        "suspended_before_us": task.suspended_total.0,
    })
}

fn unknown_job(command: &str, tid: Tid) -> Outcome {
    Outcome::error(format!(
        "{command}: the resource manager knows no job of {tid}; 'job list' shows those that it has seen"
    ))
}

/// Shows a job and its tasks, with their exit statuses and resource usage.
pub(crate) fn job_status(
    machine: &dyn VirtualMachine,
    command: &str,
    tid: Tid,
) -> Result<Outcome, Error> {
    let RmReply::Job { job, tasks } = machine.ask_rm(&RmQuery::Job(tid))? else {
        return Ok(unknown_job(command, tid));
    };
    let mut text = jobs_header() + &job_line(&job);
    text += &format!(
        "\n{:>9} {:>12} {:>10} {:>9} {:>5}  {:24} PROGRAM\n",
        "TID", "HOST", "CPU S", "RSS MIB", "MOVED", "END"
    );
    text.extend(tasks.iter().map(task_line));
    let running = job.suspension.iter().filter(|_| job.ended.is_none());
    text.extend(
        running.map(|suspended| suspended_since(format_args!("job {}", job.job), suspended)),
    );
    text.extend(
        tasks
            .iter()
            .filter_map(|task| Some(suspended_since(task.tid, task.suspension.as_ref()?))),
    );
    let value = json!({ "job": job_value(&job), "tasks": tasks.iter().map(task_value).collect::<Vec<_>>() });
    Ok(Outcome::with_values(text, value, false))
}

fn task_line(task: &TaskUsage) -> String {
    let now = if task.suspension.is_some() {
        "suspended"
    } else {
        "runs"
    };
    let end = task
        .ended
        .map_or_else(|| now.to_string(), |(_, how)| how.to_string());
    let known = task.ended.is_some();
    let cpu = (task.used.user + task.used.system).0 as f64 / 1e6;
    let cpu = if known {
        format!("{cpu:.2}")
    } else {
        "-".to_string()
    };
    let mib = task.used.resident_max_bytes as f64 / f64::from(1 << 20);
    let mib = if known {
        format!("{mib:.1}")
    } else {
        "-".to_string()
    };
    let program = if task.program.is_empty() {
        "-"
    } else {
        &task.program
    };
    let (tid, host) = (task.tid.to_string(), &task.host);
    format!(
        "{tid:>9} {host:>12} {cpu:>10} {mib:>9} {:>5}  {end:24} {program}\n",
        task.migrations
    )
}

/// Suspends or resumes a job through the resource manager.
fn suspend_job(machine: &dyn VirtualMachine, tid: Tid, suspend: bool) -> Result<Outcome, Error> {
    let word = if suspend { "suspend" } else { "resume" };
    let RmReply::Suspended {
        job,
        tasks,
        unchanged: others,
    } = machine.ask_rm(&RmQuery::Suspend { job: tid, suspend })?
    else {
        return Ok(unknown_job(&format!("job {word}"), tid));
    };
    let list: Vec<String> = tasks.iter().map(Tid::to_string).collect();
    let verb = if suspend {
        "are suspended"
    } else {
        "are resumed"
    };
    let mut text = format!(
        "{} tasks of job {job} {verb}: {}\n",
        list.len(),
        list.join(" ")
    );
    if list.is_empty() {
        text = format!(
            "no task of job {job} was {word}{}\n",
            if suspend { "ed" } else { "d" }
        );
    }
    text.extend(
        others
            .iter()
            .map(|(tid, why)| format!("{tid} is unchanged: {why}\n")),
    );
    let others: Vec<Value> = others
        .iter()
        .map(|(tid, why)| json!({ "tid": tid.to_string(), "why": why }))
        .collect();
    let value =
        json!({ "job": job.to_string(), "suspend": suspend, "tasks": list, "others": others });
    Ok(Outcome::with_values(text, value, false))
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
    Ok(Outcome::with_values(
        text,
        json!({ "tid": tid.to_string(), "suspend": suspend }),
        false,
    ))
}

/// Kills all tasks of a job, including those it spawns meanwhile, and waits until none is left.
fn kill_job(machine: &dyn VirtualMachine, tid: Tid) -> Result<Outcome, Error> {
    let (mut answer, started) = (machine.ask_rm(&RmQuery::Kill(tid))?, Instant::now());
    // Asked after the kill, so that a job that is being vacated at this moment is found, too.
    let vacated = cancel_vacated(machine, tid)?;
    loop {
        match answer {
            RmReply::KillProgress { left, .. } if left > 0 && started.elapsed() < KILL_TIMEOUT => {}
            RmReply::KillProgress {
                job,
                asked,
                forced,
                left,
                failed,
            } => {
                let nothing = asked == 0 && left == 0;
                if let Some(outcome) = vacated.filter(|_| nothing) {
                    return Ok(outcome);
                }
                return Ok(kill_outcome(job, (asked, forced, left), &failed));
            }
            _ => return Ok(vacated.unwrap_or_else(|| unknown_job("job kill", tid))),
        }
        std::thread::sleep(KILL_POLL_INTERVAL);
        answer = machine.ask_rm(&RmQuery::KillStatus(tid))?;
        if answer == RmReply::NotFound {
            // A new resource manager does not know about the kill, so the kill is requested again.
            answer = machine.ask_rm(&RmQuery::Kill(tid))?;
        }
    }
}

/// Returns the outcome of a kill. The numbers count the tasks that were asked to exit, were sent
/// SIGKILL, and still exist. `failed` lists tasks whose kill failed, with reasons.
fn kill_outcome(
    job: Tid,
    (asked_to_exit, killed_by_signal, remaining): (u32, u32, u32),
    failed: &[(Tid, String)],
) -> Outcome {
    let mut text = match asked_to_exit {
        0 => format!("job {job} has no tasks\n"),
        _ => format!("{asked_to_exit} tasks of job {job} were asked to end"),
    };
    if asked_to_exit > 0 {
        text += &match (remaining, killed_by_signal) {
            (0, 0) => ", and have ended\n".to_string(),
            (0, _) => format!(", and have ended, {killed_by_signal} of them by SIGKILL\n"),
            _ => format!(
                "; {remaining} are left, although {killed_by_signal} were sent SIGKILL: 'job status {job}' shows them\n"
            ),
        };
    }
    let complaints: Vec<String> = failed
        .iter()
        .map(|(tid, why)| format!("job kill: {tid}: {why}"))
        .collect();
    let failed: Vec<Value> = failed
        .iter()
        .map(|(tid, why)| json!({ "tid": tid.to_string(), "why": why }))
        .collect();
    let value = json!({ "job": job.to_string(), "asked": asked_to_exit, "forced": killed_by_signal, "left": remaining, "failed": failed });
    Outcome {
        errors: complaints,
        ..Outcome::with_values(text, value, remaining > 0)
    }
}

/// Cancels the restart of a vacated job that waits in the store for free hosts. Returns `None` if
/// the job is not vacated.
fn cancel_vacated(machine: &dyn VirtualMachine, tid: Tid) -> Result<Option<Outcome>, Error> {
    let RmReply::VacatedCancelled {
        job,
        checkpoint: set,
        starting,
    } = machine.ask_rm(&RmQuery::CancelVacated(tid))?
    else {
        return Ok(None);
    };
    let mut value = json!({ "job": job.to_string(), "set": set, "parked": false });
    let text = if starting {
        value["parked"] = json!(true);
        format!("job {job} is being restarted from checkpoint {set}: kill it when it runs\n")
    } else {
        format!(
            "job {job} was vacated to checkpoint {set} and waited for hosts: its restart is cancelled\n\
             pvm restart {set} restarts it; pvm checkpoints --remove {set} removes it\n"
        )
    };
    Ok(Some(Outcome::with_values(text, value, starting)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;

    fn parse_line(line: &str) -> Result<JobCommand, ParseError> {
        parse(&words(line))
    }

    /// All forms of `job` are parsed; any task of a job selects it.
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
