//! `alias` and `unalias`: short names for commands.

use crate::arguments::require_args;
use crate::command::{CommandSpec, Completion, ParsedCommand, VmCommand, WordKind};
use crate::outcome::Outcome;
use crate::session::Session;
use libpvm::Error;
use serde_json::json;

pub(crate) const ALIAS: CommandSpec = CommandSpec {
    name: "alias",
    summary: "Define a short name for a command, or list them",
    detail: "Syntax:  alias [ name command [ arg ... ] ]\n",
    parse: |args| Ok(ParsedCommand::vm_command(parse(args))),
    own_word_count: |args| args.len().min(1),
    completion: Completion::WordDependent(|args, _| {
        let kind = if args.len() == 1 {
            WordKind::Command
        } else {
            WordKind::Unknown
        };
        (0, kind)
    }),
    ..CommandSpec::DEFAULT
};

pub(crate) const UNALIAS: CommandSpec = CommandSpec {
    name: "unalias",
    summary: "Remove aliases",
    detail: "Syntax:  unalias name ...\n",
    parse: |args| {
        let names = require_args("unalias", args)?;
        Ok(ParsedCommand::vm_command(UnaliasCommand { aliases: names }))
    },
    has_json: false,
    completion: Completion::EveryWord(WordKind::Alias),
    ..CommandSpec::DEFAULT
};

#[derive(Debug)]
enum AliasCommand {
    List,
    Define { name: String, words: Vec<String> },
}

#[derive(Debug)]
struct UnaliasCommand {
    aliases: Vec<String>,
}

fn parse(args: &[String]) -> AliasCommand {
    match args {
        [name, words @ ..] if !words.is_empty() => AliasCommand::Define {
            name: name.clone(),
            words: words.to_vec(),
        },
        _ => AliasCommand::List,
    }
}

impl VmCommand for AliasCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        match self {
            Self::Define { name, words } => {
                session.aliases.insert(name.clone(), words.clone());
                Ok(Outcome::default())
            }
            Self::List => {
                let text = session
                    .aliases
                    .iter()
                    .map(|(name, words)| format!("{name}\t{}\n", words.join(" ")))
                    .collect();
                let json_output = json!({ "aliases": session.aliases });
                Ok(Outcome::with_json(text, json_output, false))
            }
        }
    }
}

impl VmCommand for UnaliasCommand {
    fn run(&self, session: &mut Session) -> Result<Outcome, Error> {
        session
            .aliases
            .retain(|name, _| !self.aliases.contains(name));
        Ok(Outcome::default())
    }
}
