//! The resource manager: an ordinary task that places what others spawn and moves tasks off hosts whose owner is there.
//!
//! * [`decide`]: what is to be done, as pure functions of a snapshot.
//! * [`model`]: what is known of hosts and tasks, kept up to date by messages and events.
//! * [`spawns`]: spawn requests that are being carried out.
//! * [`watchers`]: one load watcher per host, started again when it ends.
//! * [`store`]: what outlives it: usage, decisions, what was learned.
//! * [`policy`], [`policy_file`]: the policy as a file that may change at any time.
//! * [`recording`], [`replay`]: what it was told, and the same under another policy.
//! * [`service`]: the loop that feeds these values and carries out what they ask for, over [`api::VmApi`].
//!
//! Only [`api`] touches the virtual machine; everything else is a value that is fed and asked.

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
