//! `pvm`: the console of a virtual machine.
//!
//! The console starts a virtual machine if none is running. Apart from that the console is an
//! ordinary task of the virtual machine.
//!
//! | module | purpose |
//! | --- | --- |
//! | [`cli`] | the program's arguments, and its modes: interactive, or one command from a shell |
//! | [`commands`] | one file per command: help, parser, execution and output |
//! | [`session`] | the state that lasts between commands |
//! | [`output`] | tables, JSON and times that several commands print; the terminal |
//! | [`daemon`] | start and end of the local daemon |
//! | [`command`], [`outcome`], [`parse_error`], [`arguments`] | what all commands share |
//! | [`lost_vms`] | what this host knows about virtual machines that were lost |
//! | [`virtual_machine`] | the operations that commands need from the virtual machine |
//!
//! The modules form layers: `cli` uses `commands`, and commands use `session`, `output` and the
//! shared modules. No module uses a module of a higher layer.
//!
//! To add a command, write a file in `commands/` and add its `SPEC` to the table in
//! `commands/mod.rs`. Parser, help and completion read this table.

mod arguments;
mod cli;
mod clock;
mod command;
mod commands;
mod daemon;
mod detach;
#[cfg(test)]
mod fixtures;
mod lost_vms;
mod outcome;
mod output;
mod parse_error;
mod service_notes;
mod session;
mod virtual_machine;

use std::process::ExitCode;

fn main() -> ExitCode {
    cli::main()
}
