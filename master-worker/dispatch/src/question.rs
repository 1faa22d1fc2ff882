//! Questions about a run, which the console sends to the run's master.

use serde::{Deserialize, Serialize};

/// Tag of questions and answers. A question is one packed value, an answer one string with JSON.
pub const QUESTION_TAG: i32 = 0x5357_4d03;
/// Prefix of the name under which a master is registered in the mailbox of the virtual machine. The
/// entry contains the tid of the master.
pub const MAILBOX_PREFIX: &str = "sempa-work:";

/// A question about a run, or a request to its master.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Question {
    Status,
    Workers,
    Quarantine,
    /// End the run. Open tasks stay in the journal.
    Stop,
    /// Let a quarantined task wait again.
    Retry(u64),
}
