//! `lost`: shows what this host knows about virtual machines that did not end in order.

use crate::arguments::unknown_option_error;
use crate::command::{CommandSpec, LocalCommand, LocalContext, ParsedCommand};
use crate::lost_vms::LostVms;
use crate::outcome::Outcome;
use crate::parse_error::ParseError;

pub(crate) const SPEC: CommandSpec = CommandSpec {
    name: "lost",
    summary: "Show what virtual machines ran that were lost, and how to restart it",
    detail: "Syntax:  lost [ --all ] [ --dismiss ]\n\
             Each host keeps a note about its virtual machine: when the master was lost, what ran, and the newest\n\
             checkpoint of each job. The note goes when the virtual machine is halted or its jobs are restarted.\n\
             --dismiss removes the notes of this host; --all includes those about which nothing is left to do.\n\
             Works without a virtual machine.\n",
    parse: |args| parse(args).map(ParsedCommand::local_command),
    ..CommandSpec::DEFAULT
};

/// A parsed `lost` command.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct LostCommand {
    with_settled: bool,
    dismiss: bool,
}

fn parse(args: &[String]) -> Result<LostCommand, ParseError> {
    let mut command = LostCommand::default();
    for arg in args {
        match arg.as_str() {
            "--all" => command.with_settled = true,
            "--dismiss" => command.dismiss = true,
            _ if arg.starts_with('-') => return Err(unknown_option_error(arg)),
            _ => return Err(ParseError::WrongArgs("lost")),
        }
    }
    Ok(command)
}

impl LocalCommand for LostCommand {
    fn run(&self, _context: &LocalContext) -> Outcome {
        let lost_vms = LostVms::read(self.with_settled);
        let errors = match self.dismiss {
            true => lost_vms.dismiss(),
            false => Vec::new(),
        };
        let text = match lost_vms.is_empty() {
            true => "no virtual machine was lost here\n".into(),
            false if self.dismiss => format!("{}These notes were removed.\n", lost_vms.text()),
            false => lost_vms.text(),
        };
        Outcome {
            text: if errors.is_empty() {
                text
            } else {
                lost_vms.text()
            },
            json_values: lost_vms.json(),
            failed: !errors.is_empty(),
            errors: errors
                .into_iter()
                .map(|error| format!("lost: a note was not removed: {error}"))
                .collect(),
            ..Outcome::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixtures::words;

    #[test]
    fn lost_options_parse() {
        let parse_line = |line: &str| parse(&words(line));
        assert_eq!(parse_line(""), Ok(LostCommand::default()));
        let all = LostCommand {
            with_settled: true,
            dismiss: true,
        };
        assert_eq!(parse_line("--dismiss --all"), Ok(all));
        assert_eq!(parse_line("pvm"), Err(ParseError::WrongArgs("lost")));
        assert_eq!(
            parse_line("--forget"),
            Err(ParseError::UnknownFlag("-forget".into()))
        );
    }
}
