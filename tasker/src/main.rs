//! `pvm-tasker FD`: the parent of all spawned tasks of a host, and the only privileged program of
//! the virtual machine.
//!
//! The daemon starts the tasker with one end of a Unix socket pair; the argument FD is the number
//! of its descriptor. On the daemon's orders the tasker starts, signals, stops, dumps, restores and
//! reaps task processes, and reports the results. When the daemon closes the socket, the tasker
//! kills all tasks and exits.

mod binary_hashing;
mod census;
mod clone_vfork;
mod daemon_socket;
mod dump_attempt;
mod dump_retries;
mod engine_probe;
mod feasibility;
mod file_transfer;
mod freezer;
mod idle_engines;
mod image_manifest;
mod last_pid;
mod lease;
mod leftovers;
mod memory_reservations;
mod migrations;
mod namespace;
mod namespace_init;
mod nice;
mod outer_namespace;
mod pause;
mod pid_numbering;
mod post_copy;
mod pre_copy;
mod process_settings;
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
use checkpoint::capabilities::{self, CapabilitySet};
use nix::sys::signal::{SigHandler, Signal};
use std::fs::File;
use std::process::ExitCode;

/// Capabilities that the tasker retains if it runs as root. Tasks and the engine regain all of
/// root's capabilities by their exec. The engine needs them to restore tasks.
const RETAINED_CAPABILITIES: CapabilitySet = CapabilitySet::empty()
    // For writing images and the files that are transferred with a task.
    .union(CapabilitySet::CHOWN)
    .union(CapabilitySet::DAC_OVERRIDE)
    .union(CapabilitySet::DAC_READ_SEARCH)
    .union(CapabilitySet::FOWNER)
    .union(CapabilitySet::FSETID)
    // For signals to tasks that have changed their user.
    .union(CapabilitySet::KILL)
    // For inspecting tasks, and for the engine's ptrace.
    .union(CapabilitySet::SYS_PTRACE)
    // For PID namespaces, and for suspending seccomp filters while tracing.
    .union(CapabilitySet::SYS_ADMIN)
    // For lowering the priority of guests, and for raising that of the threads that migrate them.
    .union(CapabilitySet::SYS_NICE)
    // For large pipes, and for resource limits.
    .union(CapabilitySet::SYS_RESOURCE)
    // For restoring processes with their original ids, and for choosing the ids of new tasks.
    .union(CapabilitySet::CHECKPOINT_RESTORE);

const USAGE: &str = "usage: pvm-tasker FD; it is started by pvmd, not by hand, see pvm-tasker(1)";

fn main() -> ExitCode {
    sempa_logging::init_stderr("pvm-tasker");
    match run_tasker() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run_tasker() -> anyhow::Result<()> {
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
    // A second malloc arena would retain up to two mebibytes after worker threads have read images
    // and files.
    allocator::limit_arenas(1);
    let socket = sys::take_inherited_fd(fd)
        .with_context(|| format!("descriptor {fd}, the connection to the daemon, is not open"))?;
    set_signal_actions()?;
    capabilities::retain_capabilities(RETAINED_CAPABILITIES).context("cannot drop privileges")?;
    // The owner waits until this thread has stopped the guests. The thread never computes for long,
    // and its children start with normal priority.
    sempa_socket::boost_priority();
    let mut supervisor = supervisor::Supervisor::new(socket).context("cannot set up")?;
    supervisor.run_until_disconnect().context("lost the daemon")
}

/// Opens /dev/null for each missing standard descriptor. Otherwise a later descriptor would get the
/// number of a standard descriptor.
fn open_standard_descriptors() -> anyhow::Result<()> {
    loop {
        let dev_null = File::options()
            .read(true)
            .write(true)
            .open("/dev/null")
            .context("cannot open /dev/null")?;
        if std::os::fd::AsRawFd::as_raw_fd(&dev_null) > 2 {
            return Ok(());
        }
        // The descriptor stays open as the standard descriptor that was missing.
        let _ = std::os::fd::IntoRawFd::into_raw_fd(dev_null);
    }
}

/// Ignores the signals that a terminal sends, because only the daemon decides when the tasker ends.
/// Resets SIGCHLD to its default action.
fn set_signal_actions() -> anyhow::Result<()> {
    for name in [
        Signal::SIGHUP,
        Signal::SIGINT,
        Signal::SIGQUIT,
        Signal::SIGPIPE,
        Signal::SIGTSTP,
    ] {
        sys::set_signal_action(name, SigHandler::SigIgn)?;
    }
    // The parent process may have set SIGCHLD to be ignored. Then the kernel would reap children
    // before the tasker can.
    sys::set_signal_action(Signal::SIGCHLD, SigHandler::SigDfl)?;
    Ok(())
}
