//! `restart`: restarts a job from a checkpoint.

use crate::arguments::{option_value, unknown_option};
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::tables::host_name;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::unexpected_reply;
use libpvm::Error;
use sempa_proto::task::{Reply, Request};
use serde_json::{Value, json};

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "restart",
    summary: "Restart the tasks of a checkpoint",
    detail: "Syntax:  restart checkpoint [ --on host[,host ...] ]\n\
             They keep their tids and continue from the checkpoint, also in a new virtual machine.\n\
             All of them are restarted, or none.\n",
    parse: |args| parse(args).map(ParsedCommand::on_vm),
    completion: Completion::ByWords(|args, _| {
        let kind = if args.last() == Some(&"--on") {
            WordKind::Host
        } else {
            WordKind::Unknown
        };
        (0, kind)
    }),
    ..CommandSpec::DEFAULT
};

/// A parsed `restart` command.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RestartCommand {
    /// Name of the checkpoint in the store.
    checkpoint: String,
    /// Names of the hosts to use. If empty, any host is used.
    hosts: Vec<String>,
}

/// Parses the words after `restart`.
fn parse(args: &[String]) -> Result<RestartCommand, ParseError> {
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
                return Err(unknown_option(arg));
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

impl VmCommand for RestartCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let set = &self.checkpoint;
        match session.vm.ask(Request::Restart {
            checkpoint: set.clone(),
            host_names: self.hosts.clone(),
            wait: true,
        })? {
            Reply::Restarted(Ok(report)) => {
                let table = session.vm.hosts()?;
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
                    ..Outcome::error(format!(
                        "{set} was not restarted: {why}; none of its tasks is running"
                    ))
                })
            }
            _ => Err(unexpected_reply()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;

    /// `restart` accepts a checkpoint and hosts in any order.
    #[test]
    fn restart_arguments_parse() {
        let read = |line: &str| parse(&words(line));
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
}
