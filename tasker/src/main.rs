//! `pvm-tasker FD`: the parent of all spawned tasks of a host, and the only privileged program of the virtual machine.
//!
//! The daemon starts it with one end of a Unix socket pair, whose descriptor number is the argument. It starts, signals,
//! stops, dumps, restores and reaps task processes as it is told, and reports. When its socket closes it kills all of
//! them and ends.

mod asking;
mod attempt;
mod birth;
mod carry;
mod control;
mod ease;
mod files;
mod freezer;
mod hold;
mod init;
mod learning;
mod memory;
mod moves;
mod namespace;
mod precopy;
mod promised;
mod stop;
mod supervisor;
mod sys;
mod target;
mod task;
mod trial;
mod verdict;
mod workers;
mod written;

use anyhow::{Context, bail};
use checkpoint::heap;
use checkpoint::rights::{self, Capability};
use nix::sys::signal::{SigHandler, Signal};
use std::fs::File;
use std::process::ExitCode;

/// What it needs of root's rights, if it has them. Tasks, and the engine, which has to build any task, have by their own start what
/// root has.
const NEEDED: [Capability; 11] = [
    // Files that are carried along, and images.
    Capability::CHOWN,
    Capability::DAC_OVERRIDE,
    Capability::DAC_READ_SEARCH,
    Capability::FOWNER,
    Capability::FSETID,
    // Tasks that have become another user's.
    Capability::KILL,
    // What a task is, and the traces of the engine.
    Capability::SYS_PTRACE,
    // Process-id namespaces, and filters of system calls that a trace suspends.
    Capability::SYS_ADMIN,
    // Guests give way, and who moves one does not.
    Capability::SYS_NICE,
    // Large pipes, and limits.
    Capability::SYS_RESOURCE,
    // Processes with the numbers that they had.
    Capability::CHECKPOINT_RESTORE,
];

/// What it says to people.
const USAGE: &str = "usage: pvm-tasker FD; it is started by pvmd, not by hand, see pvm-tasker(1)";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("pvm-tasker: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> anyhow::Result<()> {
    let mut args = std::env::args().skip(1);
    let (Some(fd), None) = (args.next(), args.next()) else {
        bail!("{USAGE}");
    };
    match fd.as_str() {
        "--help" | "-h" => {
            println!("{USAGE}");
            return Ok(());
        }
        "--version" | "-V" => {
            println!("pvm-tasker {}", env!("CARGO_PKG_VERSION"));
            return Ok(());
        }
        _ => {}
    }
    let fd: i32 = fd
        .parse()
        .with_context(|| format!("{fd:?} is not the number of a descriptor"))?;
    open_standard_descriptors()?;
    // In a second one up to two mebibytes stayed when its workers had read images and files.
    heap::keep_in_places(1);
    let socket = sys::inherited(fd)
        .with_context(|| format!("there is no descriptor {fd} to talk to the daemon on"))?;
    quiet_signals()?;
    rights::keep_only(rights::set(&NEEDED)).context("cannot give up rights")?;
    let _notes = checkpoint::criu::KernelNotes::look();
    // An owner waits until it has stopped the guests; nothing in this thread takes long, and its children are as urgent as usual.
    sempa_socket::come_first();
    let mut supervisor = supervisor::Supervisor::new(socket).context("cannot set up")?;
    supervisor.run().context("lost the daemon")
}

/// Makes sure that no descriptor made later gets a number that standard input, output or error should have.
fn open_standard_descriptors() -> anyhow::Result<()> {
    loop {
        let null = File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .context("cannot open /dev/null")?;
        if std::os::fd::AsRawFd::as_raw_fd(&null) > 2 {
            return Ok(());
        }
        // It stays open on purpose, in the place of the missing one.
        let _ = std::os::fd::IntoRawFd::into_raw_fd(null);
    }
}

/// The daemon decides when we end; keys pressed at a terminal do not.
fn quiet_signals() -> anyhow::Result<()> {
    for name in [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGPIPE,
        Signal::SIGTSTP,
    ] {
        sys::set_handler(name, SigHandler::SigIgn)?;
    }
    // Ignored by whoever started us, children would be reaped behind our back.
    sys::set_handler(Signal::SIGCHLD, SigHandler::SigDfl)?;
    Ok(())
}
