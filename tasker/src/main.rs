//! `pvm-tasker FD`: the parent of all spawned tasks of a host, and the only privileged program of
//! the virtual machine.
//!
//! The daemon starts it with one end of a Unix socket pair; the argument is the descriptor's
//! number. On the daemon's orders it starts, signals, stops, dumps, restores and reaps task
//! processes, and it reports the results. When the socket closes, it kills all tasks and exits.

mod binary_hashing;
mod clone_into_cgroup;
mod daemon_socket;
mod dump_attempt;
mod engine_probe;
mod feasibility;
mod file_transfer;
mod freezer;
mod image_manifest;
mod memory_reservations;
mod migrations;
mod namespace;
mod namespace_init;
mod nice;
mod pause;
mod post_copy;
mod pre_copy;
mod signal_disposition;
mod stop;
mod supervisor;
mod sys;
mod target;
mod task;
mod workers;
mod written_files;

use anyhow::{Context, bail};
use checkpoint::allocator;
use checkpoint::capabilities::{self, Capability};
use nix::sys::signal::{SigHandler, Signal};
use std::fs::File;
use std::process::ExitCode;

/// Capabilities that the tasker keeps if it runs as root. Tasks and the engine, which must be able
/// to build any task, regain root's capabilities by their exec.
const NEEDED_CAPABILITIES: [Capability; 11] = [
    // For files transferred with a task, and for images.
    Capability::CHOWN,
    Capability::DAC_OVERRIDE,
    Capability::DAC_READ_SEARCH,
    Capability::FOWNER,
    Capability::FSETID,
    // For tasks that have changed their user.
    Capability::KILL,
    // For inspecting tasks, and for the engine's ptrace.
    Capability::SYS_PTRACE,
    // For PID namespaces, and for suspending seccomp filters while tracing.
    Capability::SYS_ADMIN,
    // For lowering the priority of guests and raising that of threads that migrate them.
    Capability::SYS_NICE,
    // For large pipes, and for resource limits.
    Capability::SYS_RESOURCE,
    // For restoring processes with their original ids.
    Capability::CHECKPOINT_RESTORE,
];

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
    // A second arena would keep up to two mebibytes after worker threads have read images and
    // files.
    allocator::limit_arenas(1);
    let socket = sys::take_inherited_fd(fd)
        .with_context(|| format!("descriptor {fd}, the connection to the daemon, is not open"))?;
    ignore_terminal_signals()?;
    capabilities::drop_capabilities_except(capabilities::capability_set(&NEEDED_CAPABILITIES))
        .context("cannot drop privileges")?;
    let _notes = checkpoint::criu::KdatCleanup::arm();
    // The owner waits for this thread to stop the guests. It never computes for long, and its
    // children start with normal priority.
    sempa_socket::boost_priority();
    let mut supervisor = supervisor::Supervisor::new(socket).context("cannot set up")?;
    supervisor.run().context("lost the daemon")
}

/// Opens /dev/null for missing standard descriptors, so that no descriptor opened later gets one of
/// their numbers.
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
        // Stays open on purpose, in place of the missing descriptor.
        let _ = std::os::fd::IntoRawFd::into_raw_fd(null);
    }
}

/// Ignores signals of the terminal: the daemon decides when the tasker ends.
fn ignore_terminal_signals() -> anyhow::Result<()> {
    for name in [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGPIPE,
        Signal::SIGTSTP,
    ] {
        sys::set_handler(name, SigHandler::SigIgn)?;
    }
    // If SIGCHLD were ignored, as our parent may have set it, the kernel would reap children before
    // the tasker can.
    sys::set_handler(Signal::SIGCHLD, SigHandler::SigDfl)?;
    Ok(())
}
