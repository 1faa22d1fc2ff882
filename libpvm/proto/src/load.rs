//! Reports of a load watcher to the resource manager: the load of its host, the presence of the
//! owner, and the permissions of guests.

use crate::ids::{HostId, Micros};
use crate::owner::GuestAccess;
use serde::{Deserialize, Serialize};

pub use crate::owner::GuestLimits;

/// Mailbox class in which the resource manager publishes the address to which load watchers must
/// send reports.
pub const LOAD_REPORT_CLASS: &str = "###_SEMPA_LOAD_###";

/// Program name of the load watchers.
pub const LOAD_WATCHER_PROGRAM: &str = "pvm-load-watcher";

/// Free memory, in bytes, that a host must have for each task placed on it, unless the spawn
/// request names an amount.
pub const FREE_BYTES_PER_TASK_MIN: u64 = 64 << 20;

/// Tag, in the resource manager's context, of an empty message to a load watcher that was started
/// under an earlier resource manager. From now on the load watcher must send its reports to the
/// sender.
pub const TAG_REPORT_ADDRESS: i32 = 7;

/// True if a program, named with or without its path, is a load watcher.
pub fn is_load_watcher(program: &str) -> bool {
    program.rsplit('/').next() == Some(LOAD_WATCHER_PROGRAM)
}

/// Load of a host at one time, as read from /proc.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadSample {
    /// Time of the sample, in microseconds since 1970.
    pub at: Micros,
    /// Number of online processors.
    pub cores: u32,
    /// Number of processors to which a control group limits the programs of this host; 0 if there
    /// is no limit. With a limit, the values below describe only these programs, not the whole
    /// machine.
    pub cpu_limit: f32,
    /// Number of runnable threads at the time of the sample. With a limit: number of threads that
    /// ran or were throttled since the previous sample.
    pub runnable_threads: u32,
    /// Load average over one minute.
    pub one_minute_load: f32,
    /// Share of processor time used since the previous sample, 0.0 to 1.0 over all cores.
    pub busy_share: f32,
    /// Bytes of memory available without swapping.
    pub available_bytes: u64,
    /// Share of time in which at least one task waited for a processor, averaged over ten seconds,
    /// 0.0 to 1.0; 0 if the kernel does not report this share.
    pub cpu_pressure: f32,
    /// Number of processors used since the previous sample by the daemon and by the virtual
    /// machine's tasks with all their processes. `None` if not measured, for example on an idle
    /// host.
    pub task_cpus: Option<f32>,
}

impl LoadSample {
    /// Returns the number of processors that the host's programs may use: the limit, or all online
    /// processors.
    pub fn usable_processors(&self) -> f32 {
        if self.cpu_limit > 0.0 {
            self.cpu_limit
        } else {
            self.cores.max(1) as f32
        }
    }
}

/// A login session of a user on the host, from the system's login records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Login {
    pub user_name: String,
    pub terminal: String,
    /// Origin of the login, such as a remote host; empty for a local login.
    pub origin: String,
    /// Time of the login record, in microseconds since 1970.
    pub at: Micros,
}

/// The load watcher's conclusion about the owner's presence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OwnerVerdict {
    /// The machine is not in use.
    Absent {
        /// Time at which the last user logged out; `None` if the load watcher has not seen a user.
        since: Option<Micros>,
    },
    /// The machine may be in use. Guests stay, and new tasks are placed on other hosts first.
    Uncertain {
        /// Time from which the machine may be in use.
        since: Micros,
    },
    /// The machine is in use.
    Present {
        /// Time of the earliest login that is still active, or of the owner's own declaration of
        /// presence.
        since: Micros,
        /// Time at which the load watcher detected the owner.
        detected_at: Micros,
    },
}

impl Default for OwnerVerdict {
    fn default() -> Self {
        Self::Absent { since: None }
    }
}

/// A message of a load watcher to the resource manager.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    pub host: HostId,
    /// Time of the report, in microseconds since 1970.
    pub at: Micros,
    pub sample: LoadSample,
    pub owner_verdict: OwnerVerdict,
    /// Confidence in `owner_verdict`, in percent.
    pub confidence_percent: u8,
    /// Reason for `owner_verdict`, in one sentence.
    pub owner_reason: String,
    /// Logins that support `owner_verdict`.
    pub logins: Vec<Login>,
    pub guest_access: GuestAccess,
    /// Reason for a restriction of `guest_access`, in one sentence; empty if guests may run.
    pub access_reason: String,
    /// Limits that apply to guests while they may run.
    pub guest_limits: GuestLimits,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_blocked_by_name_path_and_pattern() {
        let limits = |programs: &[&str]| GuestLimits {
            blocked_programs: programs.iter().map(|p| p.to_string()).collect(),
            ..GuestLimits::default()
        };
        assert_eq!(
            limits(&["miner"]).blocking_pattern("/home/bob/bin/miner"),
            Some("miner")
        );
        assert_eq!(limits(&["miner"]).blocking_pattern("mine"), None);
        assert_eq!(
            limits(&["x", "*min*r"]).blocking_pattern("examiner"),
            Some("*min*r")
        );
        assert_eq!(
            limits(&["/home/bob/*"]).blocking_pattern("/home/bob/bin/miner"),
            Some("/home/bob/*")
        );
        assert_eq!(
            limits(&["a*a"]).blocking_pattern("a"),
            None,
            "one letter is not two"
        );
        assert_eq!(limits(&["*"]).blocking_pattern("anything"), Some("*"));
        assert_eq!(limits(&[]).blocking_pattern("anything"), None);
    }
}
