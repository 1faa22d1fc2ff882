//! The identity of a process across process ids, boots and machines.

use procfs::process::{Process, Stat};
use serde::{Deserialize, Serialize};
use std::fs;

/// A process of one of the machines of a user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    pub machine_id: String,
    pub boot_id: String,
    pub pid_namespace: String,
    pub pid: i32,
    /// Start time of the process in clock ticks since the boot of its machine.
    pub start_ticks: u64,
}

/// State of a process, as far as another process can tell.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProcessState {
    /// The process may live: it is on another machine, or it lives on this one.
    MayLive,
    /// The process was on this machine and has ended.
    Ended,
    /// A machine of the same name and machine id has booted since. A copied machine may have both
    /// in common with the machine of a process that lives.
    HasProbablyRebooted,
}

fn stat(pid: i32) -> Option<Stat> {
    Process::new(pid).ok()?.stat().ok()
}

impl ProcessIdentity {
    pub fn of_this_process() -> Self {
        let read = |path: &str| {
            fs::read_to_string(path)
                .unwrap_or_default()
                .trim()
                .to_string()
        };
        let pid_namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        let pid = std::process::id().cast_signed();
        Self {
            machine_id: read("/etc/machine-id"),
            boot_id: read("/proc/sys/kernel/random/boot_id"),
            pid_namespace: pid_namespace.to_string_lossy().into_owned(),
            pid,
            start_ticks: stat(pid).map_or(0, |stat| stat.starttime),
        }
    }

    /// Returns the identity as one text, for [`ProcessIdentity::decode`].
    pub fn encode(&self) -> String {
        format!(
            "{}/{}/{}/{}/{}",
            self.machine_id, self.boot_id, self.pid_namespace, self.pid, self.start_ticks
        )
    }

    /// Returns the identity in a text; `None` if the text has another format.
    pub fn decode(text: &str) -> Option<Self> {
        let parts: Vec<&str> = text.split('/').collect();
        let [machine_id, boot_id, pid_namespace, pid, start_ticks] = parts[..] else {
            return None;
        };
        Some(Self {
            machine_id: machine_id.into(),
            boot_id: boot_id.into(),
            pid_namespace: pid_namespace.into(),
            pid: pid.parse().ok()?,
            start_ticks: start_ticks.parse().ok()?,
        })
    }

    /// Returns what this process can tell about another one. `is_same_host` is true if both are on
    /// a host of the same name.
    pub fn state_of(&self, other: &Self, is_same_host: bool) -> ProcessState {
        if self.boot_id.is_empty() || other.boot_id.is_empty() {
            return ProcessState::MayLive;
        }
        if self.boot_id != other.boot_id {
            let has_rebooted =
                is_same_host && !self.machine_id.is_empty() && self.machine_id == other.machine_id;
            return match has_rebooted {
                true => ProcessState::HasProbablyRebooted,
                false => ProcessState::MayLive,
            };
        }
        // A process of another namespace cannot be looked up.
        if self.pid_namespace.is_empty() || self.pid_namespace != other.pid_namespace {
            return ProcessState::MayLive;
        }
        let is_alive = stat(other.pid)
            .is_some_and(|stat| stat.starttime == other.start_ticks && stat.state != 'Z');
        match is_alive {
            true => ProcessState::MayLive,
            false => ProcessState::Ended,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that has ended on this machine is recognized; one that lives does, and one on
    /// another machine may.
    #[test]
    fn ended_process_of_this_machine_is_recognized() {
        let own = ProcessIdentity::of_this_process();
        assert_eq!(ProcessIdentity::decode(&own.encode()), Some(own.clone()));
        assert_eq!(own.state_of(&own, true), ProcessState::MayLive);
        let reused_pid = ProcessIdentity {
            start_ticks: own.start_ticks + 1,
            ..own.clone()
        };
        assert_eq!(own.state_of(&reused_pid, true), ProcessState::Ended);
        let other_namespace = ProcessIdentity {
            pid_namespace: "pid:[1]".into(),
            ..reused_pid
        };
        assert_eq!(own.state_of(&other_namespace, true), ProcessState::MayLive);
        let machine = ProcessIdentity {
            machine_id: "m".into(),
            ..own.clone()
        };
        let earlier_boot = ProcessIdentity {
            boot_id: "earlier".into(),
            ..machine.clone()
        };
        assert_eq!(
            machine.state_of(&earlier_boot, true),
            ProcessState::HasProbablyRebooted
        );
        assert_eq!(
            machine.state_of(&earlier_boot, false),
            ProcessState::MayLive
        );
        let unknown = ProcessIdentity::default();
        assert_eq!(own.state_of(&unknown, true), ProcessState::MayLive);
    }
}
