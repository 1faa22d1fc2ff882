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
mod dump_work;
mod engine_probe;
mod feasibility;
mod file_transfer;
mod freezer;
mod host_account;
mod idle_engines;
mod image_manifest;
mod image_vault;
mod last_pid;
mod lease;
mod leftovers;
mod locked_dir;
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
mod task_user;
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

/// Additional capabilities of a tasker that runs the tasks of another user.
const USER_CAPABILITIES: CapabilitySet = CapabilitySet::empty()
    // For giving tasks the ids of their user.
    .union(CapabilitySet::SETUID)
    .union(CapabilitySet::SETGID)
    // For entering mount namespaces.
    .union(CapabilitySet::SYS_CHROOT)
    // For finding out who uses System V semaphores.
    .union(CapabilitySet::IPC_OWNER);

const USAGE: &str = "usage: pvm-tasker FD [--user UID]; it is started by pvmd or pvm-taskerd, not by hand, see \
                     pvm-tasker(1)";

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

/// Argument of a process that only sleeps.
pub(crate) const IDLE_ARGUMENT: &str = "--idle";

/// The command line of a tasker.
#[derive(Debug)]
enum CommandLine {
    Help,
    Version,
    /// Sleep until killed: the process of a probe of the engine.
    Idle,
    Serve {
        /// Descriptor of the socket to the daemon.
        socket_fd: i32,
        /// The user whose tasks are run; `None` for the user of the tasker.
        uid: Option<u32>,
    },
}

impl CommandLine {
    fn parse(args: &[String]) -> anyhow::Result<Self> {
        let parse_fd = |fd: &str| {
            fd.parse()
                .with_context(|| format!("{fd:?} is not the number of a descriptor"))
        };
        let args: Vec<&str> = args.iter().map(String::as_str).collect();
        match args[..] {
            ["--help" | "-h"] => Ok(Self::Help),
            ["--version" | "-V"] => Ok(Self::Version),
            [IDLE_ARGUMENT] => Ok(Self::Idle),
            [fd] => Ok(Self::Serve {
                socket_fd: parse_fd(fd)?,
                uid: None,
            }),
            [fd, "--user", uid] => Ok(Self::Serve {
                socket_fd: parse_fd(fd)?,
                uid: Some(
                    uid.parse()
                        .with_context(|| format!("{uid:?} is not the id of a user"))?,
                ),
            }),
            _ => bail!("{USAGE}"),
        }
    }
}

fn run_tasker() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match CommandLine::parse(&args)? {
        CommandLine::Help => println!("{USAGE}"),
        CommandLine::Idle => loop {
            std::thread::park();
        },
        CommandLine::Version => println!("pvm-tasker {}", env!("CARGO_PKG_VERSION")),
        CommandLine::Serve { socket_fd, uid } => return serve_daemon(socket_fd, uid),
    }
    Ok(())
}

fn serve_daemon(socket_fd: i32, uid: Option<u32>) -> anyhow::Result<()> {
    open_standard_descriptors()?;
    // A second malloc arena would retain up to two mebibytes after worker threads have read images
    // and files.
    allocator::limit_arenas(1);
    let socket = sys::take_inherited_fd(socket_fd).with_context(|| {
        format!("descriptor {socket_fd}, the connection to the daemon, is not open")
    })?;
    set_signal_actions()?;
    let user = uid
        .map(|uid| task_user::serve_user(uid, &socket))
        .transpose()
        .context("cannot run tasks for this user")?;
    let needed_capabilities = match user {
        Some(_) => RETAINED_CAPABILITIES.union(USER_CAPABILITIES),
        None => RETAINED_CAPABILITIES,
    };
    let missing_capabilities =
        missing_capabilities(needed_capabilities).context("cannot read its privileges")?;
    capabilities::retain_capabilities(needed_capabilities).context("cannot drop privileges")?;
    // The owner waits until this thread has stopped the guests. The thread never computes for long,
    // and its children start with normal priority.
    sempa_socket::boost_priority();
    let mut supervisor =
        supervisor::Supervisor::new(socket, user, missing_capabilities).context("cannot set up")?;
    supervisor.run_until_disconnect().context("lost the daemon")
}

/// Returns the names of the capabilities in `needed` that this process does not have; none if its
/// user is not root, which cannot have them.
fn missing_capabilities(needed: CapabilitySet) -> std::io::Result<Vec<String>> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(Vec::new());
    }
    let missing = needed - capabilities::permitted_capabilities()?;
    Ok(missing
        .iter_names()
        .map(|(name, _)| format!("CAP_{name}"))
        .collect())
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
