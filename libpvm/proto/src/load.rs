//! What a load watcher says about its host.

use crate::ids::{HostId, Micros};
use serde::{Deserialize, Serialize};

/// Name of the mailbox class under which the resource manager tells watchers where to report.
pub const LOAD_CLASS: &str = "###_SEMPA_LOAD_###";

/// Numbers read from /proc at one time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadSample {
    /// When it was read, in microseconds since 1970.
    pub at: Micros,
    /// Processors that are online.
    pub cores: u32,
    /// Runnable threads at this instant.
    pub running: u32,
    /// Load average over one minute.
    pub load1: f32,
    /// Share of processor time used since the sample before, 0.0 to 1.0 over all cores.
    pub busy: f32,
    /// Memory that can be had without swapping, in bytes.
    pub available_bytes: u64,
    /// Share of time in which some task waited for a processor, 0.0 to 1.0 over ten seconds; 0 where the kernel does not say.
    pub pressure: f32,
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
    /// Somebody does.
    Present {
        /// The earliest login that still lasts.
        since: Micros,
        /// When the watcher learned of it.
        seen: Micros,
    },
}

/// A message of a load watcher to the resource manager.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// The host it speaks of.
    pub host: HostId,
    /// The newest sample.
    pub sample: LoadSample,
    /// The verdict on the owner.
    pub owner: OwnerVerdict,
    /// One plain sentence that says why.
    pub why: String,
    /// The logins behind it.
    pub logins: Vec<Login>,
}
