//! `usage`: shows the resource usage of users and jobs as recorded by the resource manager.

use crate::job;
use crate::parse::{ParseError, parse_task_tid};
use crate::session::Outcome;
use crate::virtual_machine::VirtualMachine;
use libpvm::Error;
use sempa_proto::Tid;
use sempa_proto::rm::{RmQuery, RmReply, UsageTotals, UserUsage};
use serde_json::{Value, json};

/// A parsed `usage` command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UsageCommand {
    /// Only this user's usage.
    user: Option<u32>,
    /// Shows this job and its tasks.
    job: Option<Tid>,
}

/// Parses a user id or user name.
pub(crate) fn parse_user(command: &'static str, word: &str) -> Result<u32, ParseError> {
    let named = || {
        nix::unistd::User::from_name(word)
            .ok()
            .flatten()
            .map(|user| user.uid.as_raw())
    };
    let wanted = "a user";
    word.parse()
        .ok()
        .or_else(named)
        .ok_or_else(|| ParseError::WrongType {
            command,
            word: word.to_string(),
            expected: wanted,
        })
}

/// Returns the value of an option written as `--name value` or `--name=value`. Returns `None` if
/// `word` is not that option.
pub(crate) fn option_value<'a>(
    command: &'static str,
    name: &str,
    word: &'a str,
    rest: &mut impl Iterator<Item = &'a String>,
) -> Result<Option<&'a str>, ParseError> {
    match word.strip_prefix(name) {
        Some("") => rest
            .next()
            .map(|value| Some(value.as_str()))
            .ok_or(ParseError::WrongArgs(command)),
        Some(value) => Ok(value.strip_prefix('=')),
        None => Ok(None),
    }
}

/// Parses the words after the command.
pub(crate) fn parse(args: &[String]) -> Result<UsageCommand, ParseError> {
    let (mut usage, mut rest) = (UsageCommand::default(), args.iter());
    while let Some(arg) = rest.next() {
        if let Some(word) = option_value("usage", "--user", arg, &mut rest)? {
            usage.user = Some(parse_user("usage", word)?);
        } else if let Some(word) = option_value("usage", "--job", arg, &mut rest)? {
            usage.job = Some(parse_task_tid("usage", word)?);
        } else if arg.starts_with('-') {
            return Err(ParseError::UnknownFlag(
                arg.trim_start_matches('-').to_string(),
            ));
        } else {
            return Err(ParseError::WrongArgs("usage"));
        }
    }
    Ok(usage)
}

/// Asks the resource manager and formats its answer.
pub(crate) fn run(machine: &impl VirtualMachine, usage: &UsageCommand) -> Result<Outcome, Error> {
    if let Some(tid) = usage.job {
        return job::job_status(machine, "usage", tid);
    }
    let RmReply::Users(users) = machine.ask_rm(&RmQuery::Users { user: usage.user })? else {
        return Ok(Outcome::error(
            "usage: the resource manager has counted nothing",
        ));
    };
    let text = users.iter().map(user_line).collect::<String>();
    let head = format!("{:>8} {SUMS_HEADER} {:>8}\n", "USER", "INDEX");
    let value = json!({ "users": users.iter().map(user_value).collect::<Vec<_>>() });
    Ok(Outcome::with_values(head + &text, value, false))
}

/// Headings of the columns that [`sums_columns`] writes.
pub(crate) const SUMS_HEADER: &str =
    " TASKS RUNNING  FAILED      CPU S     WALL S  MOVED EVICTED   RSS MIB";

/// Returns usage sums as columns.
pub(crate) fn sums_columns(sums: &UsageTotals) -> String {
    let seconds = |micros: u64| micros as f64 / 1e6;
    let UsageTotals {
        tasks,
        running,
        failed,
        used,
        wall_time: wall,
        migrations: moves,
        evictions,
    } = sums;
    let cpu = seconds((used.user + used.system).0);
    let mib = used.resident_max_bytes as f64 / f64::from(1 << 20);
    format!(
        "{tasks:>6} {running:>7} {failed:>7} {cpu:>10.2} {:>10.2} {moves:>6} {evictions:>7} {mib:>9.1}",
        seconds(wall.0)
    )
}

/// Returns usage sums as JSON.
pub(crate) fn sums_value(sums: &UsageTotals) -> Value {
    json!({
        "tasks": sums.tasks,
        "running": sums.running,
        "failed": sums.failed,
        "user_us": sums.used.user.0,
        "system_us": sums.used.system.0,
        "resident_max_bytes": sums.used.resident_max_bytes,
        "wall_us": sums.wall_time.0,
        "moves": sums.migrations,
        "evictions": sums.evictions,
    })
}

fn user_line(user: &UserUsage) -> String {
    format!(
        "{:>8} {} {:>8.2}\n",
        user.user,
        sums_columns(&user.totals),
        user.index
    )
}

fn user_value(user: &UserUsage) -> Value {
    json!({ "user": user.user, "index": user.index, "sums": sums_value(&user.totals) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Result<UsageCommand, ParseError> {
        parse(
            &line
                .split(' ')
                .filter(|word| !word.is_empty())
                .map(String::from)
                .collect::<Vec<_>>(),
        )
    }

    /// Options of `usage` select a user or a job.
    #[test]
    fn usage_arguments_parse() {
        assert_eq!(words(""), Ok(UsageCommand::default()));
        assert_eq!(
            words("--user 7"),
            Ok(UsageCommand {
                user: Some(7),
                job: None
            })
        );
        assert_eq!(
            words("--user=root"),
            Ok(UsageCommand {
                user: Some(0),
                job: None
            })
        );
        assert_eq!(
            words("--job=t40001"),
            Ok(UsageCommand {
                user: None,
                job: Some(Tid::from_raw(0x40001))
            })
        );
        assert_eq!(words("--user"), Err(ParseError::WrongArgs("usage")));
        assert_eq!(
            words("--users"),
            Err(ParseError::UnknownFlag("users".into()))
        );
        assert_eq!(
            words("--job nobody").map_err(|e| e.to_string()),
            Err("usage: nobody is not a task id: write it as t40001".into())
        );
        assert_eq!(words("x"), Err(ParseError::WrongArgs("usage")));
    }
}
