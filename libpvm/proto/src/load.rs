//! What a load watcher says about its host.

use crate::ids::{HostId, Micros};
use crate::owner::Guests;
use serde::{Deserialize, Serialize};

/// Name of the mailbox class under which the resource manager tells watchers where to report.
pub const LOAD_CLASS: &str = "###_SEMPA_LOAD_###";

/// Program of the load watchers.
pub const WATCHER_PROGRAM: &str = "pvm-load-watcher";

/// Memory that a host is to have to spare for each task that is put there, in bytes, unless a request names an amount.
pub const HEADROOM_BYTES: u64 = 64 << 20;

/// Tag, in the resource manager's context, of what a resource manager says to a load watcher that an earlier one has started: report
/// to me, as you were told when you were started. There is nothing in it.
pub const TAG_REPORT_TO: i32 = 7;

/// True if a program, named with or without its path, is a load watcher.
pub fn is_watcher(program: &str) -> bool {
    program.rsplit('/').next() == Some(WATCHER_PROGRAM)
}

/// Numbers read from /proc at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadSample {
    /// When it was read, in microseconds since 1970.
    pub at: Micros,
    /// Processors that are online.
    pub cores: u32,
    /// Processors that a limit (a control group's) leaves to this host's programs; 0: all that are online. The numbers below are
    /// about these programs then, not about the whole machine.
    pub share: f32,
    /// Runnable threads at this instant; with a limit, that ran or were held back since the sample before.
    pub running: u32,
    /// Load average over one minute.
    pub load1: f32,
    /// Share of processor time used since the sample before, 0.0 to 1.0 over all cores.
    pub busy: f32,
    /// Memory that can be had without swapping, in bytes.
    pub available_bytes: u64,
    /// Share of time in which some task waited for a processor, 0.0 to 1.0 over ten seconds; 0 where the kernel does not say.
    pub pressure: f32,
    /// Processors that our own tasks, all their processes, and the daemon have used since the sample before; `None` where it was
    /// not measured, as on a host that does nothing.
    pub ours: Option<f32>,
}

impl LoadSample {
    /// Processors that the host's programs may use.
    pub fn processors(&self) -> f32 {
        if self.share > 0.0 {
            self.share
        } else {
            self.cores.max(1) as f32
        }
    }
}

/// Somebody who is logged in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Login {
    /// User name of the record.
    pub user: String,
    /// Terminal of the record.
    pub line: String,
    /// Where the login came from; empty for a local one.
    pub from: String,
    /// Time of the record, in microseconds since 1970.
    pub at: Micros,
}

/// What the owner's signs of life add up to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OwnerVerdict {
    /// Nobody uses the machine.
    Absent {
        /// When the last one left, if anybody was seen.
        since: Option<Micros>,
    },
    /// Somebody may: guests stay, new ones go elsewhere first.
    Maybe {
        /// Since when it looks so.
        since: Micros,
    },
    /// Somebody does.
    Present {
        /// The earliest login that still lasts, or the owner's own word.
        since: Micros,
        /// When the watcher learned of it.
        seen: Micros,
    },
}

impl Default for OwnerVerdict {
    fn default() -> OwnerVerdict {
        OwnerVerdict::Absent { since: None }
    }
}

/// What the owner of a host allows guests while they are welcome.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct GuestLimits {
    /// So many of them at once at most.
    pub cores: Option<u32>,
    /// Memory in bytes that stays free for the owner.
    pub memory_free: u64,
    /// Programs that are not to run here: names, in which `*` stands for anything.
    pub programs: Vec<String>,
    /// Users whose tasks are not to run here.
    pub users: Vec<u32>,
}

impl GuestLimits {
    /// The pattern that blocks a program, given by its path or name.
    pub fn blocked(&self, program: &str) -> Option<&str> {
        let name = program.rsplit('/').next().unwrap_or(program);
        self.programs
            .iter()
            .map(String::as_str)
            .find(|pattern| fits(pattern, name) || fits(pattern, program))
    }
}

/// True when a name is what the pattern says; `*` stands for anything.
fn fits(pattern: &str, name: &str) -> bool {
    let Some((head, mut rest)) = pattern.split_once('*') else {
        return pattern == name;
    };
    let Some(mut name) = name.strip_prefix(head) else {
        return false;
    };
    while let Some((part, behind)) = rest.split_once('*') {
        let Some(at) = name.find(part) else {
            return false;
        };
        (name, rest) = (&name[at + part.len()..], behind);
    }
    name.ends_with(rest)
}

/// A message of a load watcher to the resource manager.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// The host it speaks of.
    pub host: HostId,
    /// When it was written, in microseconds since 1970.
    pub at: Micros,
    /// The newest sample.
    pub sample: LoadSample,
    /// The verdict on the owner.
    pub owner: OwnerVerdict,
    /// How sure that is, in percent.
    pub confidence: u8,
    /// One plain sentence that says why.
    pub why: String,
    /// The logins behind it.
    pub logins: Vec<Login>,
    /// What guests may do now.
    pub guests: Guests,
    /// One plain sentence that says why they may do no more; empty when they may work.
    pub guests_why: String,
    /// What they may have while they may work.
    pub limits: GuestLimits,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blocked_program_is_recognised_by_name_path_and_pattern() {
        let limits = |programs: &[&str]| GuestLimits {
            programs: programs.iter().map(|p| p.to_string()).collect(),
            ..GuestLimits::default()
        };
        assert_eq!(
            limits(&["miner"]).blocked("/home/bob/bin/miner"),
            Some("miner")
        );
        assert_eq!(limits(&["miner"]).blocked("mine"), None);
        assert_eq!(limits(&["x", "*min*r"]).blocked("examiner"), Some("*min*r"));
        assert_eq!(
            limits(&["/home/bob/*"]).blocked("/home/bob/bin/miner"),
            Some("/home/bob/*")
        );
        assert_eq!(limits(&["a*a"]).blocked("a"), None, "one letter is not two");
        assert_eq!(limits(&["*"]).blocked("anything"), Some("*"));
        assert_eq!(limits(&[]).blocked("anything"), None);
    }
}
