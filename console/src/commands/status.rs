//! `mstat` and `pstat`: show whether hosts are up and whether tasks run.

use crate::arguments::{parse_tid, require_args};
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::json::{error, results};
use crate::parse_error::ParseError;
use crate::session::Session;
use libpvm::Error;
use sempa_proto::task::Request;
use sempa_proto::{PvmError, Tid};
use serde_json::{Value, json};

pub(crate) const MSTAT: CommandSpec = CommandSpec {
    name: "mstat",
    summary: "Show whether hosts are up",
    detail: "Syntax:  mstat host ...\n",
    parse: |args| {
        require_args("mstat", args)
            .map(|hosts| ParsedCommand::vm_command(MstatCommand { host_names: hosts }))
    },
    completion: Completion::EveryWord(WordKind::Host),
    ..CommandSpec::DEFAULT
};

pub(crate) const PSTAT: CommandSpec = CommandSpec {
    name: "pstat",
    summary: "Show whether tasks run",
    detail: "Syntax:  pstat tid ...\n",
    parse: |args| parse_pstat(args).map(ParsedCommand::vm_command),
    completion: Completion::EveryWord(WordKind::Tid),
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct MstatCommand {
    /// Names of the hosts.
    host_names: Vec<String>,
}

#[derive(Debug, PartialEq, Eq)]
struct PstatCommand {
    /// The tasks. A word that is no tid becomes [`Tid::NONE`].
    tids: Vec<Tid>,
}

fn parse_pstat(args: &[String]) -> Result<PstatCommand, ParseError> {
    let words = require_args("pstat", args)?;
    let tids = words
        .iter()
        .map(|word| parse_tid(word).unwrap_or(Tid::NONE))
        .collect();
    Ok(PstatCommand { tids })
}

impl VmCommand for MstatCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        Ok(query_status(
            session,
            &self.host_names,
            |name| Request::HostStatus { name: name.clone() },
            |name, status| (host_line(name, status), status_json("host", name, status)),
        ))
    }
}

impl VmCommand for PstatCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        Ok(query_status(
            session,
            &self.tids,
            |tid| Request::TaskStatus { tid: *tid },
            |tid, status| {
                (
                    task_line(*tid, status),
                    status_json("tid", &tid.to_string(), status),
                )
            },
        ))
    }
}

/// Sends the request that `request_for` returns for each item to the daemon. The outcome contains
/// the line and the JSON value that `format_status` returns for each item.
fn query_status<T>(
    session: &Session,
    items: &[T],
    request_for: impl Fn(&T) -> Request,
    format_status: impl Fn(&T, Result<(), PvmError>) -> (String, Value),
) -> Outcome {
    let (mut text, mut values, mut failed) = (String::new(), Vec::new(), false);
    for item in items {
        let status = session
            .vm
            .ask(request_for(item))
            .map(|_| ())
            .map_err(|error| error.code);
        failed |= status.is_err();
        let (line, value) = format_status(item, status);
        text.push_str(&line);
        values.push(value);
    }
    Outcome::with_json(text, results(values), failed)
}

/// Formats one line of `mstat`.
fn host_line(name: &str, status: Result<(), PvmError>) -> String {
    format!(
        "{name:>24}  {}\n",
        status.map_or_else(PvmError::text, |()| "ok")
    )
}

/// Formats one line of `pstat`.
fn task_line(tid: Tid, status: Result<(), PvmError>) -> String {
    format!(
        "t{tid:>8x}  {}\n",
        status.map_or_else(PvmError::text, |()| "run")
    )
}

/// Returns the status of one host or task as JSON. The object contains `name` under the key `key`.
fn status_json(key: &str, name: &str, status: Result<(), PvmError>) -> Value {
    match status {
        Ok(()) => json!({ key: name, "up": true }),
        Err(code) => json!({ key: name, "up": false, "error": error(code) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_layouts_match_pvm() {
        assert_eq!(host_line("ha2", Ok(())), "                     ha2  ok\n");
        assert_eq!(
            host_line("nohost", Err(PvmError::NoHost)),
            "                  nohost  No such host\n"
        );
        assert_eq!(
            task_line(Tid::from_raw(0x40001), Ok(())),
            "t   40001  run\n"
        );
        assert_eq!(
            task_line(Tid::from_raw(0x80002), Err(PvmError::NoTask)),
            "t   80002  No such task\n"
        );
    }

    #[test]
    fn word_that_is_no_tid_becomes_none() {
        let tids = vec![Tid::NONE];
        assert_eq!(parse_pstat(&["zz".to_string()]), Ok(PstatCommand { tids }));
    }
}
