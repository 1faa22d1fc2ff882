//! `add`: adds hosts to the virtual machine.

use crate::arguments::one_or_more;
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::output::json;
use crate::session::Session;
use libpvm::Error;
use sempa_proto::table::AddedHost;
use serde_json::{Value, json};

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "add",
    summary: "Add hosts to the virtual machine",
    detail: "Syntax:  add host ...\n  or     add 'host option=value ...' ...\n\
                 Options: lo=user dx=daemon ep=path wd=dir sp=speed ip=address bx=debugger\n",
    parse: |args| one_or_more("add", args).map(|lines| ParsedCommand::on_vm(AddCommand { lines })),
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct AddCommand {
    /// One line in host-file format for each host.
    lines: Vec<String>,
}

impl VmCommand for AddCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let lines = &self.lines;
        let results = session.vm.add(lines)?;
        let mut outcome =
            Outcome::with_values(text(lines, &results), value(lines, &results), false);
        for (line, added) in lines.iter().zip(&results) {
            match &added.result {
                Ok(host) => {
                    session.skip_announcement(host.id);
                }
                Err(error) => {
                    outcome.failed = true;
                    let reason = if added.reason.is_empty() {
                        error.text()
                    } else {
                        &added.reason
                    };
                    outcome
                        .errors
                        .push(format!("add {}: {reason}", host_of_line(line)));
                }
            }
        }
        Ok(outcome)
    }
}

/// Returns the name of the host in a host-file line.
fn host_of_line(line: &str) -> &str {
    line.split_whitespace().next().unwrap_or(line)
}

/// Formats the output of `add`.
fn text(lines: &[String], results: &[AddedHost]) -> String {
    let mut out = format!(
        "{} successful\n",
        results.iter().filter(|added| added.result.is_ok()).count()
    );
    out += &format!("{:>24} {:>8}\n", "HOST", "DTID");
    for (line, added) in lines.iter().zip(results) {
        out += &match &added.result {
            Ok(host) => format!("{:>24} {:>8x}\n", host.name, host.id.tid()),
            Err(error) => format!("{line:>24} {:>8}\n", error.text()),
        };
    }
    out
}

/// Returns the value of `add`.
fn value(lines: &[String], results: &[AddedHost]) -> Value {
    let one = |(line, added): (&String, &AddedHost)| match &added.result {
        Ok(entry) => json!({ "line": line, "host": json::host(entry) }),
        Err(code) => json!({ "line": line, "error": json::error(*code), "reason": added.reason }),
    };
    json!({ "results": lines.iter().zip(results).map(one).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::host;
    use sempa_proto::PvmError;

    /// `add` has the columns of PVM.
    #[test]
    fn add_layout_matches_pvm() {
        let lines: Vec<String> = ["ha2 sp=2000", "ha3", "nohost"].map(String::from).to_vec();
        let ok = |index, name| AddedHost {
            result: Ok(host(index, name)),
            reason: String::new(),
        };
        let failed = AddedHost {
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
            text(&lines, &[ok(2, "ha2"), ok(3, "ha3"), failed]),
            expected
        );
    }

    /// A failure has code, text and reason.
    #[test]
    fn failure_has_code_text_and_reason() {
        let failed = AddedHost {
            result: Err(PvmError::CantStart),
            reason: "ssh: no route".into(),
        };
        let added = value(&["h9".to_string()], &[failed]);
        assert_eq!(added["results"][0]["error"]["code"], -29);
        assert_eq!(added["results"][0]["reason"], "ssh: no route");
    }
}
