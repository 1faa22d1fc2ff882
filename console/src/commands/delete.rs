//! `delete`: removes hosts from the virtual machine.

use crate::arguments::require_args;
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::output::json;
use crate::session::Session;
use libpvm::Error;
use sempa_proto::PvmError;
use serde_json::{Value, json};

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "delete",
    summary: "Remove hosts from the virtual machine",
    detail: "Syntax:  delete host ...\n\
             Tasks that run there are ended.\n",
    parse: |args| {
        require_args("delete", args)
            .map(|names| ParsedCommand::vm_command(DeleteCommand { host_names: names }))
    },
    completion: Completion::EveryWord(WordKind::Host),
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct DeleteCommand {
    /// Names of the hosts to remove. The name `.` stands for the local host.
    host_names: Vec<String>,
}

impl VmCommand for DeleteCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let names = &self.host_names;
        let hosts = session.vm.hosts()?;
        let local_host = hosts.get(session.vm.local_host());
        // The daemon does not accept `.`, so the console replaces `.` by the name of the local
        // host.
        let resolve_name = |name: &String| {
            local_host
                .filter(|_| name == ".")
                .map_or(name, |host| &host.name)
                .clone()
        };
        let results = session
            .vm
            .delete_hosts(&names.iter().map(resolve_name).collect::<Vec<_>>())?;
        let mut outcome = Outcome::with_json(
            results_text(names, &results),
            results_json(names, &results),
            false,
        );
        for (name, error) in names
            .iter()
            .zip(&results)
            .filter_map(|(name, result)| Some((name, result.err()?)))
        {
            outcome.failed = true;
            outcome
                .errors
                .push(format!("delete {name}: {}", delete_error_text(error)));
        }
        Ok(outcome)
    }
}

/// Returns the reason why a host was not deleted, and what the user can do.
fn delete_error_text(error: PvmError) -> &'static str {
    match error {
        PvmError::NoHost => "there is no such host in the virtual machine; 'conf' lists them",
        PvmError::BadParam => "the master cannot leave its virtual machine; 'halt' ends it",
        PvmError::DupHost => "it was named twice",
        other => other.text(),
    }
}

fn results_text(names: &[String], results: &[Result<(), PvmError>]) -> String {
    let mut out = format!(
        "{} successful\n",
        results.iter().filter(|result| result.is_ok()).count()
    );
    out += &format!("{:>24}  STATUS\n", "HOST");
    for (name, result) in names.iter().zip(results) {
        out += &format!(
            "{name:>24}  {}\n",
            result.map_or_else(PvmError::text, |()| "deleted")
        );
    }
    out
}

fn results_json(names: &[String], results: &[Result<(), PvmError>]) -> Value {
    let result_json = |(name, result): (&String, &Result<(), PvmError>)| match result {
        Ok(()) => json!({ "name": name, "deleted": true }),
        Err(code) => json!({ "name": name, "deleted": false, "error": json::error(*code) }),
    };
    json!({ "results": names.iter().zip(results).map(result_json).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delete_layout_matches_pvm() {
        let names: Vec<String> = ["ha3", "nohost"].map(String::from).to_vec();
        let expected = "\
1 successful
                    HOST  STATUS
                     ha3  deleted
                  nohost  No such host
";
        assert_eq!(
            results_text(&names, &[Ok(()), Err(PvmError::NoHost)]),
            expected
        );
    }
}
