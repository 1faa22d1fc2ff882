//! `names` and `put`: the mailbox of the virtual machine.

use crate::arguments::parse_number;
use crate::command::{CommandSpec, ParsedCommand, VmCommand};
use crate::outcome::Outcome;
use crate::parse_error::ParseError;
use crate::session::Session;
use crate::virtual_machine::{mailbox_classes, put_mailbox_entry};
use libpvm::Error;
use sempa_proto::Tid;
use sempa_proto::body::{Encoding, Packer};
use sempa_proto::task::MailboxClass;
use serde_json::{Value, json};

pub(crate) const NAMES: CommandSpec = CommandSpec {
    name: "names",
    summary: "List the mailbox of the virtual machine",
    detail: "Syntax:  names [ pattern ]\n",
    parse: |args| parse_names(args).map(ParsedCommand::vm_command),
    ..CommandSpec::DEFAULT
};

pub(crate) const PUT: CommandSpec = CommandSpec {
    name: "put",
    summary: "Put an empty entry into the mailbox",
    detail: "Syntax:  put name flags\n",
    parse: |args| parse_put(args).map(ParsedCommand::vm_command),
    has_json: false,
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
struct NamesCommand {
    /// Pattern for the names of the classes. An empty pattern matches all classes.
    pattern: String,
}

/// Inserts an empty entry into a mailbox class.
#[derive(Debug)]
struct PutCommand {
    class: String,
    flags: i32,
}

fn parse_names(args: &[String]) -> Result<NamesCommand, ParseError> {
    match args {
        [] => Ok(NamesCommand {
            pattern: String::new(),
        }),
        [pattern] => Ok(NamesCommand {
            pattern: pattern.clone(),
        }),
        _ => Err(ParseError::WrongArgs("names")),
    }
}

fn parse_put(args: &[String]) -> Result<PutCommand, ParseError> {
    match args {
        // PVM's console requires a third word and ignores it.
        [class, flags] | [class, flags, _] => Ok(PutCommand {
            class: class.clone(),
            flags: parse_number("put", flags)?,
        }),
        _ => Err(ParseError::WrongArgs("put")),
    }
}

impl VmCommand for NamesCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        let classes = mailbox_classes(&session.vm, &self.pattern)?;
        Ok(Outcome::with_json(
            classes_text(&classes),
            classes_json(&classes),
            false,
        ))
    }
}

impl VmCommand for PutCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        put_mailbox_entry(
            &session.vm,
            &self.class,
            self.flags,
            Packer::new(Encoding::Xdr),
        )?;
        Ok(Outcome::default())
    }
}

fn classes_text(classes: &[MailboxClass]) -> String {
    let mut out = String::new();
    for class in classes {
        out += &format!("<{}>:\n", class.name);
        for (index, owner, flags) in &class.entries {
            out += &format!(
                "\tindex={index} owner=0x{owner:x}/{} flags=0x{flags:x}\n",
                owner.raw()
            );
        }
        out.push('\n');
    }
    out
}

fn classes_json(classes: &[MailboxClass]) -> Value {
    let entry_json = |(index, owner, flags): &(i32, Tid, i32)| json!({ "index": index, "owner": owner.is_task().then(|| owner.to_string()), "flags": flags });
    let class = |class: &MailboxClass| json!({ "name": class.name, "entries": class.entries.iter().map(entry_json).collect::<Vec<_>>() });
    json!({ "classes": classes.iter().map(class).collect::<Vec<_>>() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_layout_matches_pvm() {
        let entries = vec![(0, Tid::from_raw(0x40001), 2)];
        let class = MailboxClass {
            name: "###_PVM_NO_RESET_###".into(),
            entries,
        };
        assert_eq!(
            classes_text(&[class]),
            "<###_PVM_NO_RESET_###>:\n\tindex=0 owner=0x40001/262145 flags=0x2\n\n"
        );
    }
}
