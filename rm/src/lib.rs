//! The resource manager: an ordinary task that places spawned tasks and migrates tasks away from
//! hosts whose owner is present.
//!
//! * [`decide`]: decisions, as pure functions of a snapshot.
//! * [`model`]: the known state of hosts and tasks, updated by messages and events.
//! * [`spawns`]: spawn requests that are being carried out.
//! * [`grants`]: placements granted in advance to tasks that spawn repeatedly.
//! * [`watchers`]: one load watcher per host, restarted when it ends.
//! * [`store`]: persistent history: usage, decisions, learned values.
//! * [`policy`], [`policy_file`]: the policy and its file, which may change at any time.
//! * [`recording`], [`replay`]: the recording of the resource manager's input, and its replay under
//!   another policy.
//! * [`service`]: the main loop. It passes messages to the modules above and carries out their
//!   output through [`api::VmApi`].
//!
//! Only [`api`] accesses the virtual machine. All other modules are state machines and functions
//! without input or output, except for files.

pub mod api;
pub mod decide;
pub mod grants;
pub mod model;
pub mod policy;
pub mod policy_file;
mod recent_set;
pub mod recording;
pub mod replay;
pub mod service;
pub mod spawns;
pub mod store;
pub mod watchers;
