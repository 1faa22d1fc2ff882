//! `add`: adds hosts to the virtual machine.

use crate::arguments::require_args;
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::output::json;
use crate::output::progress::{Progress, Waited, ask_showing_progress};
use crate::session::Session;
use crate::virtual_machine::unexpected_reply_error;
use libpvm::Error;
use sempa_proto::PvmError;
use sempa_proto::event::{Event, EventKind};
use sempa_proto::table::AddedHost;
use sempa_proto::task::{Reply, Request};
use serde_json::{Value, json};
use std::collections::BTreeSet;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "add",
    summary: "Add hosts to the virtual machine",
    detail: "Syntax:  add host ...\n  or     add 'host option=value ...' ...\n\
                 Options: lo=user dx=daemon ep=path wd=dir sp=speed ip=address bx=debugger\n",
    parse: |args| {
        require_args("add", args)
            .map(|lines| ParsedCommand::vm_command(AddCommand { host_lines: lines }))
    },
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct AddCommand {
    /// One line in host-file format for each host.
    host_lines: Vec<String>,
}

impl VmCommand for AddCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let lines = &self.host_lines;
        let request = Request::AddHosts {
            host_file_lines: lines.clone(),
        };
        let mut progress = AddProgress::new(lines);
        let waited =
            ask_showing_progress(&session.vm, request, &mut progress, !session.prints_json)?;
        let results = match waited {
            Waited::Reply(Reply::HostsAdded(results)) => results,
            Waited::Reply(_) => return Err(unexpected_reply_error()),
            Waited::Interrupted(line) => return Ok(Outcome::from_error(line)),
        };
        let mut outcome = Outcome::with_json(
            results_text(lines, &results),
            results_json(lines, &results),
            false,
        );
        for (line, add_result) in lines.iter().zip(&results) {
            match &add_result.result {
                Ok(host) => {
                    session.skip_announcement(host.id);
                }
                Err(error) => {
                    outcome.failed = true;
                    let reason = failure_reason(add_result, *error);
                    outcome
                        .errors
                        .push(format!("add {}: {reason}", host_name_in_line(line)));
                }
            }
        }
        Ok(outcome)
    }
}

/// The hosts of one `add` that have neither joined nor failed.
struct AddProgress {
    waiting_hosts: BTreeSet<String>,
}

impl AddProgress {
    fn new(lines: &[String]) -> Self {
        let names = lines.iter().map(|line| host_name_in_line(line).to_string());
        Self {
            waiting_hosts: names.collect(),
        }
    }
}

impl Progress for AddProgress {
    fn title(&self) -> String {
        "add".to_string()
    }

    fn handle_event(&mut self, event: &Event) -> Option<String> {
        match &event.kind {
            EventKind::HostAdded { name, .. } if self.waiting_hosts.remove(name) => {
                Some(format!("{name} has joined"))
            }
            EventKind::HostRefused { name, why } if self.waiting_hosts.remove(name) => {
                Some(format!("{name} was not added: {why}"))
            }
            _ => None,
        }
    }

    fn current_step(&self) -> String {
        let names: Vec<&str> = self.waiting_hosts.iter().map(String::as_str).collect();
        format!("waiting for {}", names.join(" "))
    }

    fn without_waiting(&self) -> &'static str {
        "hosts that have joined stay, and the others join when they answer; 'pvm events' reports it"
    }
}

/// Returns the reason why a host was not added; the text of the error code if the daemon has given
/// no reason.
fn failure_reason(added_host: &AddedHost, error: PvmError) -> &str {
    match added_host.reason.trim() {
        "" => error.text(),
        reason => reason,
    }
}

/// Returns the name of the host in a host-file line.
fn host_name_in_line(line: &str) -> &str {
    line.split_whitespace().next().unwrap_or(line)
}

/// Formats the output of `add`.
fn results_text(lines: &[String], results: &[AddedHost]) -> String {
    let mut out = format!(
        "{} successful\n",
        results
            .iter()
            .filter(|add_result| add_result.result.is_ok())
            .count()
    );
    out += &format!("{:>24} {:>8}\n", "HOST", "DTID");
    for (line, add_result) in lines.iter().zip(results) {
        out += &match &add_result.result {
            Ok(host) => format!("{:>24} {:>8x}\n", host.name, host.id.tid()),
            Err(error) => format!("{line:>24} {:>8}\n", error.text()),
        };
    }
    out
}

/// Returns the output of `add` as JSON.
fn results_json(lines: &[String], results: &[AddedHost]) -> Value {
    let result_json = |(line, add_result): (&String, &AddedHost)| match &add_result.result {
        Ok(entry) => json!({ "line": line, "host": json::host(entry) }),
        Err(code) => {
            let reason = failure_reason(add_result, *code);
            json!({ "line": line, "error": json::error(*code), "reason": reason })
        }
    };
    json!({ "results": lines.iter().zip(results).map(result_json).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::host;

    #[test]
    fn add_layout_matches_pvm() {
        let lines: Vec<String> = ["ha2 sp=2000", "ha3", "nohost"].map(String::from).to_vec();
        let added_host = |index, name| AddedHost {
            result: Ok(host(index, name)),
            reason: String::new(),
        };
        let failed_host = AddedHost {
            result: Err(PvmError::NoHost),
            reason: "no such name".into(),
        };
        let expected = "\
2 successful
                    HOST     DTID
                     ha2    80000
                     ha3    c0000
                  nohost No such host
";
        assert_eq!(
            results_text(
                &lines,
                &[added_host(2, "ha2"), added_host(3, "ha3"), failed_host]
            ),
            expected
        );
    }

    #[test]
    fn failure_has_code_text_and_reason() {
        let failed_host = AddedHost {
            result: Err(PvmError::CantStart),
            reason: "ssh: no route".into(),
        };
        let results = results_json(&["h9".to_string()], &[failed_host]);
        assert_eq!(results["results"][0]["error"]["code"], -29);
        assert_eq!(results["results"][0]["reason"], "ssh: no route");
        let unexplained_host = AddedHost {
            result: Err(PvmError::DupHost),
            reason: " ".into(),
        };
        let results = results_json(&["h9".to_string()], &[unexplained_host]);
        assert_eq!(results["results"][0]["reason"], PvmError::DupHost.text());
    }
}
