//! Makes completion files for bash, zsh and fish.
//!
//! The commands and their summaries come from the console's own table, as `pvm help` prints it. The
//! words after a command are completed by the console itself: `pvm --complete LINE` uses the code
//! that completes words at the console's prompt.

use crate::process::capture;
use anyhow::{Result, bail};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A command of the console.
#[derive(Clone, Debug, PartialEq, Eq)]
struct ConsoleCommand {
    name: String,
    summary: String,
}

/// Writes the completion files of the console `pvm` below the folder `share` of an installation.
///
/// # Errors
/// The console does not list its commands, or a file cannot be written.
pub fn write_files(pvm: &Path, share: &Path) -> Result<()> {
    let commands = parse_help(&capture(Command::new(pvm).arg("help"))?);
    if commands.len() < 10 {
        bail!("{} help lists too few commands", pvm.display());
    }
    let files = [
        ("bash-completion/completions/pvm", bash(&commands)),
        ("zsh/vendor-completions/_pvm", zsh(&commands)),
        ("fish/vendor_completions.d/pvm.fish", fish(&commands)),
    ];
    for (path, text) in files {
        let path = share.join(path);
        fs::create_dir_all(path.parent().unwrap_or(share))?;
        fs::write(path, text)?;
    }
    Ok(())
}

/// Parses the list of commands that `pvm help` prints.
fn parse_help(text: &str) -> Vec<ConsoleCommand> {
    text.lines()
        .skip_while(|line| !line.starts_with("Commands are"))
        .filter_map(|line| line.strip_prefix("  ")?.split_once(char::is_whitespace))
        .map(|(name, summary)| ConsoleCommand {
            name: name.to_string(),
            summary: summary.trim().to_string(),
        })
        .collect()
}

fn bash(commands: &[ConsoleCommand]) -> String {
    let names: Vec<&str> = commands
        .iter()
        .map(|command| command.name.as_str())
        .collect();
    include_str!("completion/pvm.bash").replace("@COMMANDS@", &names.join(" "))
}

fn zsh(commands: &[ConsoleCommand]) -> String {
    let lines: Vec<String> = commands
        .iter()
        .map(|command| format!("    '{}:{}'", command.name, quoted(&command.summary)))
        .collect();
    include_str!("completion/pvm.zsh").replace("@COMMANDS@", &lines.join("\n"))
}

fn fish(commands: &[ConsoleCommand]) -> String {
    let lines: Vec<String> = commands
        .iter()
        .map(|command| {
            format!(
                "complete -c pvm -n __pvm_needs_command -f -a {} -d '{}'",
                command.name,
                command.summary.replace('\\', "\\\\").replace('\'', "\\'")
            )
        })
        .collect();
    include_str!("completion/pvm.fish").replace("@COMMANDS@", &lines.join("\n"))
}

/// Quotes a text within apostrophes of a shell.
fn quoted(text: &str) -> String {
    text.replace('\'', "'\\''").replace(':', "\\:")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn two_commands() -> Vec<ConsoleCommand> {
        parse_help(
            "help        Explain a command\nSyntax:  help [ command ]\n  or     command --help\nCommands are:\n  \
             add         Add hosts\n  id          Print the console's own tid\n",
        )
    }

    #[test]
    fn commands_are_read_from_help() {
        let names: Vec<String> = two_commands()
            .into_iter()
            .map(|command| command.name)
            .collect();
        assert_eq!(names, ["add", "id"]);
    }

    #[test]
    fn files_contain_every_command() {
        let commands = two_commands();
        assert!(bash(&commands).contains("'add id'"));
        assert!(
            zsh(&commands)
                .contains("    'add:Add hosts'\n    'id:Print the console'\\''s own tid'\n")
        );
        assert!(fish(&commands).contains("-a id -d 'Print the console\\'s own tid'\n"));
        for text in [bash(&commands), zsh(&commands), fish(&commands)] {
            assert!(!text.contains("@COMMANDS@"));
        }
    }
}
