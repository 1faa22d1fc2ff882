//! The load watcher of a host: samples the host's load, detects its owner, decides by the owner's
//! policy whether guests may run, and reports to the daemon and the resource manager.
//!
//! Modules marked "pure" perform no I/O.
//!
//! - Load: [`proc`] parses /proc files (pure). [`sampler`] takes samples. [`cpu_usage`] measures
//!   the time of all processors at low cost. [`load_attribution`] separates the load of the virtual
//!   machine's tasks from external load. [`cgroup`] measures the use of a processor limit.
//! - Logins: [`utmp`] parses login records (pure). [`sessions`] parses logind's sessions (pure).
//!   [`logind`] queries logind over D-Bus.
//! - Owner: [`probes`] reads session files, terminals and interrupt counters. [`owner`] derives the
//!   owner verdict from all sources (pure).
//! - Policy: [`policy`] and [`hours`] parse policy files (pure). [`owner_override`] and
//!   [`published_policy`] read and write owners' overrides and policies. [`host_policy`] merges all
//!   sources. [`guests`] decides whether guests may run (pure), [`eviction`] whether they can leave
//!   (pure). [`shared_limit`] shares a limit of guests among virtual machines (pure).
//! - Enforcement: [`cpu_confinement`] confines guests to the processors that the owner allows.
//! - Communication: [`file_watcher`] reports changes of files. [`report`] decides when to sample
//!   and to send a report (pure). [`machine_link`] connects the load watcher of a machine with
//!   those of its virtual machines. [`status`] answers queries of users of this host;
//!   [`host_daemons`] finds daemons of this host without a load watcher that answers.
//! - [`user_files`]: files of users in a directory that all users share. `file_users` selects the
//!   users if there are too many; `accounts` looks up accounts without waiting.
//! - [`system`]: clocks and nice levels.

mod accounts;
pub mod cgroup;
pub mod cpu_confinement;
pub mod cpu_usage;
pub mod eviction;
mod file_users;
pub mod file_watcher;
pub mod guests;
pub mod host_daemons;
pub mod host_policy;
pub mod hours;
pub mod load_attribution;
pub mod logind;
pub mod machine_link;
pub mod owner;
pub mod owner_override;
pub mod policy;
pub mod probes;
pub mod proc;
pub mod published_policy;
pub mod report;
pub mod sampler;
pub mod sessions;
pub mod shared_limit;
pub mod status;
pub mod system;
pub mod user_files;
pub mod utmp;
