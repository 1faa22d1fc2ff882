//! `restart`: restarts a job from a checkpoint.

use crate::arguments::{parse_option_value, unknown_option_error};
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::tables::host_name;
use crate::output::time::format_local;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::unexpected_reply_error;
use libpvm::Error;
use sempa_proto::checkpoint::RestartFailure;
use sempa_proto::task::{Reply, Request};
use serde_json::{Value, json};

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "restart",
    summary: "Restart the tasks of a checkpoint",
    detail: "Syntax:  restart checkpoint [ --on host[,host ...] ] [ --force ]\n\
             They keep their tids and continue from the checkpoint, also in a new virtual machine.\n\
             All of them are restarted, or none. A job that runs in another virtual machine is not restarted;\n\
             --force restarts it if that virtual machine has not renewed its claim in the store for a minute.\n",
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

/// A parsed `restart` command.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RestartCommand {
    /// Name of the checkpoint in the store.
    checkpoint: String,
    /// Names of the hosts that may be used. If empty, any host may be used.
    host_names: Vec<String>,
    /// True to restart a job that, according to the store, runs in another virtual machine.
    force: bool,
}

/// Parses the words after `restart`.
fn parse(args: &[String]) -> Result<RestartCommand, ParseError> {
    let wrong_args_error = || ParseError::WrongArgs("restart");
    let (mut checkpoint_name, mut host_names, mut force) = (None, Vec::new(), false);
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
            None if arg.starts_with('-') => {
                return Err(unknown_option_error(arg));
            }
            None if checkpoint_name.is_none() => checkpoint_name = Some(arg.clone()),
            None => return Err(wrong_args_error()),
        }
    }
    Ok(RestartCommand {
        checkpoint: checkpoint_name.ok_or_else(wrong_args_error)?,
        host_names,
        force,
    })
}

impl VmCommand for RestartCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let checkpoint_name = &self.checkpoint;
        match session.vm.ask(Request::Restart {
            checkpoint: checkpoint_name.clone(),
            host_names: self.host_names.clone(),
            wait_for_end: true,
            force: self.force,
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
                Ok(Outcome::with_json(
                    lines.concat(),
                    json!({ "set": checkpoint_name, "tasks": tasks }),
                    false,
                ))
            }
            Reply::Restarted(Err(failure)) => {
                let json_output = json!({ "set": checkpoint_name, "failed": failure.to_string() });
                let since = match &failure {
                    RestartFailure::RunsElsewhere { holder, .. } => {
                        format!(" (it runs there since {})", format_local(holder.since))
                    }
                    _ => String::new(),
                };
                Ok(Outcome {
                    json_values: vec![json_output],
                    ..Outcome::from_error(format!(
                        "{checkpoint_name} was not restarted: {failure}{since}; none of its tasks is running in this virtual machine"
                    ))
                })
            }
            _ => Err(unexpected_reply_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;

    /// The command accepts a checkpoint and hosts in any order.
    #[test]
    fn restart_arguments_parse() {
        let parse_line = |line: &str| parse(&words(line));
        let restart_on = |host_names: &[&str]| {
            Ok(RestartCommand {
                checkpoint: "s".into(),
                host_names: host_names.iter().map(|h| h.to_string()).collect(),
                force: false,
            })
        };
        assert_eq!(parse_line("s"), restart_on(&[]));
        assert_eq!(parse_line("--on h1,h2 s"), restart_on(&["h1", "h2"]));
        assert_eq!(parse_line("s --on=h1 --on h2"), restart_on(&["h1", "h2"]));
        let forced = parse_line("--force s").map(|command| command.force);
        assert_eq!(forced, Ok(true));
        for line in ["", "s t", "s --on"] {
            assert_eq!(
                parse_line(line),
                Err(ParseError::WrongArgs("restart")),
                "{line}"
            );
        }
    }
}
