//! Ends the virtual machine and waits until the local daemon has exited.

use super::process::DaemonProcess;
use crate::output::terminal::Terminal;
use libpvm::Vm;
use std::path::PathBuf;
use std::process::{Child, ExitCode};

/// The lock file of this host's daemon, and the daemon's process if this process started the
/// daemon.
#[derive(Debug)]
pub(crate) struct LocalDaemon {
    /// Path of the daemon's lock file.
    pub(crate) lock_path: PathBuf,
    /// The daemon's process, if this process started it.
    pub(crate) child: Option<Child>,
}

/// Halts the virtual machine and waits for the local daemon to exit. Prints an error and returns a
/// failure if the request fails, a host has not confirmed the end of its tasks, or the daemon does
/// not exit in time.
pub(crate) fn halt_and_wait(vm: &Vm, daemon: &mut LocalDaemon) -> ExitCode {
    let daemon_process = DaemonProcess::from_lock_file(daemon.lock_path.clone());
    let missing_hosts = match vm.halt_and_report() {
        Ok(missing_hosts) => missing_hosts.unwrap_or_default(),
        Err(error) => {
            Terminal.print_error(&format!("halt: {error}"));
            return ExitCode::FAILURE;
        }
    };
    if let Some(line) = missing_hosts_line(&missing_hosts) {
        Terminal.print_error(&line);
    }
    if !daemon_process.wait_for_exit(daemon.child.as_mut()) {
        Terminal.print_error(&format!(
            "halt: the daemon was asked to end and is still there; its process number is in {}",
            daemon.lock_path.display()
        ));
        return ExitCode::FAILURE;
    }
    match missing_hosts.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

/// Returns the line about hosts that have not confirmed the end of their tasks; `None` if all have.
fn missing_hosts_line(missing_hosts: &[String]) -> Option<String> {
    let names = missing_hosts.join(", ");
    (!missing_hosts.is_empty()).then(|| {
        format!(
            "halt: the virtual machine has ended, but these hosts did not answer: {names}. They end their tasks by \
             themselves when their lease is over (SEMPA_LEASE_MS, 10 s by default); a host that was stopped or cut off \
             may need a look: 'pgrep -a pvm' there"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hosts that did not answer are named, with what that means.
    #[test]
    fn missing_hosts_are_named() {
        assert_eq!(missing_hosts_line(&[]), None);
        let line = missing_hosts_line(&["h2".into(), "h3".into()]).expect("a line");
        assert!(
            line.contains("did not answer: h2, h3. They end their tasks by themselves"),
            "{line}"
        );
    }
}
