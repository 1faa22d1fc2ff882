//! Waits for the hosts of the host file with which the virtual machine was started, and reports the
//! hosts that did not join.

use crate::output::terminal::Terminal;
use libpvm::Vm;
use sempa_proto::event::EventKind;
use std::ffi::OsString;
use std::os::unix::ffi::OsStrExt;
use std::thread;
use std::time::{Duration, Instant};

/// Time limit for all hosts of a host file to join. The time limits for each single host are
/// shorter.
const JOIN_TIMEOUT: Duration = Duration::from_secs(300);
/// Interval for polling the event log.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// Maximum number of events in the reply to one request.
const EVENTS_BATCH_MAX: u32 = 1000;

/// True if a daemon started with these arguments reads a host file.
pub(crate) fn has_host_file(args: &[OsString]) -> bool {
    args.iter().any(|arg| !arg.as_bytes().starts_with(b"-"))
        || std::env::var_os("PVMHOSTFILE").is_some_and(|path| !path.is_empty())
}

/// Waits until every host of the host file has joined or failed, as `pvm_start_pvmd` does, and
/// reports failures. Returns true if all hosts have joined within [`JOIN_TIMEOUT`].
pub(crate) fn await_hosts(vm: &Vm) -> bool {
    let (deadline, mut next_event, mut all_joined) = (Instant::now() + JOIN_TIMEOUT, 0, true);
    while Instant::now() < deadline {
        let events = match vm.events(next_event, EVENTS_BATCH_MAX) {
            Ok(events) => events,
            Err(error) => {
                Terminal.print_error(&format!(
                    "pvm: the result of the host file is unknown: {error}"
                ));
                return false;
            }
        };
        for event in &events {
            next_event = event.number + 1;
            match &event.kind {
                EventKind::HostRefused { .. } => {
                    Terminal.print_error(&format!("pvm: {}", event.kind));
                    all_joined = false;
                }
                EventKind::HostFileProcessed { .. } => return all_joined,
                _ => {}
            }
        }
        if events.is_empty() {
            thread::sleep(POLL_INTERVAL);
        }
    }
    let seconds = JOIN_TIMEOUT.as_secs();
    Terminal.print_error(&format!(
        "pvm: hosts of the host file have not joined within {seconds} s; 'pvm conf' lists those that have"
    ));
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_option_argument_is_host_file() {
        assert!(has_host_file(&["-d0".into(), "hosts".into()]));
        assert!(!has_host_file(&["-d0".into(), "-nh1".into()]));
    }
}
