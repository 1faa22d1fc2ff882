//! The load watcher of a host: samples its load, detects its owner, decides by the owner's policy
//! what guests may do, and reports that to the daemon and the resource manager.
//!
//! "Pure" modules perform no I/O.
//!
//! - Load: [`proc`] parses /proc files (pure). [`sampler`] takes samples. [`usage`] measures all
//!   processors cheaply. [`ours`] separates the load of our tasks from external load. [`cgroup`]
//!   measures a processor limit.
//! - Logins: [`utmp`] parses login records (pure). [`sessions`] parses logind's sessions (pure).
//!   [`logind`] queries logind over D-Bus.
//! - Owner: [`senses`] reads the sources. [`owner`] derives the verdict from them (pure).
//! - Policy: [`policy`] and [`hours`] parse policy files (pure). [`word`] and [`published`] read
//!   and write owners' overrides and policies. [`rules`] merges all sources. [`guests`] decides
//!   what guests may do (pure).
//! - Enforcement: [`confine`] confines guests to the processors that the owner allows.
//! - Communication: [`watch`] reports changes of files. [`report`] decides when to sample and to
//!   send (pure). [`status`] answers queries of users of this host.

pub mod cgroup;
pub mod confine;
pub mod guests;
pub mod hours;
pub mod logind;
pub mod ours;
pub mod owner;
pub mod policy;
pub mod proc;
pub mod published;
pub mod report;
pub mod rules;
pub mod sampler;
pub mod senses;
pub mod sessions;
pub mod status;
pub mod system;
pub mod usage;
pub mod utmp;
pub mod watch;
pub mod word;
