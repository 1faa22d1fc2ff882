//! The resource manager: an ordinary task that places spawned tasks and migrates tasks off hosts
//! whose owner is present.
//!
//! * [`decide`]: decisions, as pure functions of a snapshot.
//! * [`model`]: the known state of hosts and tasks, updated by messages and events.
//! * [`spawns`]: spawn requests that are being carried out.
//! * [`grants`]: placements given in advance to tasks that spawn repeatedly.
//! * [`watchers`]: one load watcher per host, restarted when it ends.
//! * [`store`]: persistent history: usage, decisions, learned values.
//! * [`policy`], [`policy_file`]: the policy, as a file that may change at any time.
//! * [`recording`], [`replay`]: recorded input, and running it again under another policy.
//! * [`service`]: the loop that feeds these values and carries out their output through
//!   [`api::VmApi`].
//!
//! Only [`api`] accesses the virtual machine. Everything else is a value with inputs and outputs.

pub mod api;
pub mod decide;
pub mod grants;
pub mod model;
pub mod policy;
pub mod policy_file;
mod recent;
pub mod recording;
pub mod replay;
pub mod service;
pub mod spawns;
pub mod store;
pub mod watchers;
