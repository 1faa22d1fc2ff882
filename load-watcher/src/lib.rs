//! The load watcher of a host: samples its load, senses its owner, decides what guests may do by the owner's policy, and
//! tells its daemon and the resource manager.
//!
//! * [`proc`]: reads numbers out of the text of /proc files; pure.
//! * [`sampler`]: takes samples from /proc on descriptors that stay open; [`usage`]: what all processors have done, cheaply; [`ours`]: what our own tasks use, and so what others do;
//!   [`cgroup`]: what a limit of processors leaves.
//! * [`utmp`], [`sessions`]: read login records and sessions; pure. [`logind`]: asks for sessions over D-Bus.
//! * [`owner`]: what all signs say about the owner; pure.
//! * [`policy`], [`hours`], [`word`], [`published`]: what owners say about guests; [`guests`]: what follows from all that; pure.
//! * [`senses`]: reads the sources where they are; [`rules`]: the files of the policy; [`watch`]: notices at once when they change.
//! * [`confine`]: keeps guests on as many processors as the owner allows.
//! * [`report`]: what is worth a message, and how often to look; pure.
//! * [`status`]: answers those who ask what uses their machine.

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
