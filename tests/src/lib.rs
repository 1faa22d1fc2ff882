//! The testbed: hosts of a virtual machine on one machine, and tools for tests and the demo.
//!
//! A host is a set of namespaces (network, host name, process ids, mounts) with its own `/tmp`,
//! `/run`, terminals and `sshd`. It does not change the network or the files of the machine. It
//! ends with the process that made it, even if that process is killed. A testbed needs root;
//! [`lacks`] returns what the machine lacks.

pub mod assignment;
pub mod checkpoint_steps;
pub mod conformance;
pub mod crowd;
pub mod fake_criu;
pub mod faults;
pub mod footprint;
pub mod holders;
pub mod hosts;
pub mod lab;
pub mod labour;
pub mod limits;
pub mod logind;
pub mod matrix;
pub mod move_steps;
pub mod needs;
pub mod oracle;
pub mod programs;
pub mod real;
pub mod ring_job;
pub mod rng;
pub mod run;
pub mod screen;
pub mod sources;
pub mod speaker;
pub mod ssh;
pub mod testbed;
pub mod timetable;
pub mod utmp;
pub mod vm;

pub use needs::{lacks, prefix};
pub use run::{Done, eventually};
pub use testbed::{Host, Testbed};
pub use vm::{Sure, Vm};
