//! `usage`: shows the resource usage of users and jobs as recorded by the resource manager.

use super::job::job_status;
use crate::arguments::{parse_option_value, parse_task_tid, parse_user, unknown_option_error};
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::output::tables::{TOTALS_HEADER, totals_columns, totals_json};
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::Error;
use sempa_proto::Tid;
use sempa_proto::rm::{RmQuery, RmReply, UserUsage};
use serde_json::{Value, json};

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "usage",
    summary: "Show what users or jobs have used",
    detail: "Syntax:  usage [ --user user ] [ --job tid ]\n\
             Output fields:\n  \
             CPU S    processor time of tasks that have ended\n  \
             WALL S   sum of their run times\n  \
             MOVED    migrations\n  \
             EVICTED  evictions for an owner: by a migration, by its end, or with its checkpointed job\n  \
             INDEX    users with less usage have a lower index and are served first\n",
    parse: |args| parse(args).map(ParsedCommand::vm_command),
    ..CommandSpec::DEFAULT
};

/// A parsed `usage` command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct UsageCommand {
    /// Id of the only user to show. `None` shows all users.
    user: Option<u32>,
    /// Tid of the job to show with its tasks. `None` shows users.
    job: Option<Tid>,
}

/// Parses the words after `usage`.
fn parse(args: &[String]) -> Result<UsageCommand, ParseError> {
    let (mut usage, mut rest) = (UsageCommand::default(), args.iter());
    while let Some(arg) = rest.next() {
        if let Some(word) = parse_option_value("usage", "--user", arg, &mut rest)? {
            usage.user = Some(parse_user("usage", word)?);
        } else if let Some(word) = parse_option_value("usage", "--job", arg, &mut rest)? {
            usage.job = Some(parse_task_tid("usage", word)?);
        } else if arg.starts_with('-') {
            return Err(unknown_option_error(arg));
        } else {
            return Err(ParseError::WrongArgs("usage"));
        }
    }
    Ok(usage)
}

impl VmCommand for UsageCommand {
    /// Queries the resource manager and formats its reply.
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        if let Some(tid) = self.job {
            return job_status(&session.vm, "usage", tid);
        }
        let RmReply::Users(users) = session.vm.ask_rm(&RmQuery::Users { user: self.user })? else {
            return Ok(Outcome::from_error(
                "usage: the resource manager has recorded no usage",
            ));
        };
        let text = users.iter().map(user_line).collect::<String>();
        let header = format!("{:>8} {TOTALS_HEADER} {:>8}\n", "USER", "INDEX");
        let json_output = json!({ "users": users.iter().map(user_json).collect::<Vec<_>>() });
        Ok(Outcome::with_json(header + &text, json_output, false))
    }
}

fn user_line(user: &UserUsage) -> String {
    format!(
        "{:>8} {} {:>8.2}\n",
        user.user,
        totals_columns(&user.totals),
        user.up_down_index
    )
}

fn user_json(user: &UserUsage) -> Value {
    json!({ "user": user.user, "index": user.up_down_index, "sums": totals_json(&user.totals) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;

    fn parse_line(line: &str) -> Result<UsageCommand, ParseError> {
        parse(&words(line))
    }

    /// Options of `usage` select a user or a job.
    #[test]
    fn usage_arguments_parse() {
        assert_eq!(parse_line(""), Ok(UsageCommand::default()));
        assert_eq!(
            parse_line("--user 7"),
            Ok(UsageCommand {
                user: Some(7),
                job: None
            })
        );
        assert_eq!(
            parse_line("--user=root"),
            Ok(UsageCommand {
                user: Some(0),
                job: None
            })
        );
        assert_eq!(
            parse_line("--job=t40001"),
            Ok(UsageCommand {
                user: None,
                job: Some(Tid::from_raw(0x40001))
            })
        );
        assert_eq!(parse_line("--user"), Err(ParseError::WrongArgs("usage")));
        assert_eq!(
            parse_line("--users"),
            Err(ParseError::UnknownFlag("-users".into()))
        );
        assert_eq!(
            parse_line("--job nobody").map_err(|e| e.to_string()),
            Err("usage: nobody is not a task id: write it as t40001".into())
        );
        assert_eq!(parse_line("x"), Err(ParseError::WrongArgs("usage")));
    }
}
