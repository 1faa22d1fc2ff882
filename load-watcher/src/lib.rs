//! The load watcher of a host: samples its load, senses its owner, and tells the resource manager what matters.
//!
//! * [`proc`]: reads numbers out of the text of /proc files; pure.
//! * [`sampler`]: takes samples from /proc on descriptors that stay open.
//! * [`utmp`]: reads login records; pure.
//! * [`owner`]: what logins say about the owner; pure.
//! * [`watch`]: notices at once when the login records change.
//! * [`report`]: what is worth a message, and how often to look; pure.

pub mod owner;
pub mod proc;
pub mod report;
pub mod sampler;
pub mod utmp;
pub mod watch;
