//! The testbed: hosts of a virtual machine on one machine, and tools for tests and the demo.
//!
//! A host is a set of namespaces (network, host name, process ids, mounts) with its own `/tmp`,
//! `/run`, terminals and `sshd`. A host does not change the network or the files of the machine.
//! The host ends with the process that made it, even if that process is killed. A testbed needs
//! root; the functions of [`requirements`] report what the machine lacks.

pub mod all_to_all;
pub mod assignment;
pub mod broker_vm;
pub mod causal_order;
pub mod checkpoint_steps;
pub mod conformance;
pub mod fake_criu;
pub mod farm;
pub mod faults;
pub mod footprint;
pub mod hold_tasks;
pub mod hosts;
mod layout;
pub mod limits;
pub mod logind;
mod machine;
pub mod matrix;
pub mod migration_steps;
pub mod oracle;
pub mod owner_agent;
pub mod private_vm;
pub mod programs;
pub mod pvm_examples;
pub mod real_pvm;
pub mod requirements;
pub mod ring_job;
pub mod rng;
pub mod run;
pub mod screen;
pub mod source_packages;
pub mod ssh;
mod ssh_settings;
pub mod tablix;
pub mod tasker_service;
pub mod testbed;
pub mod timetable;
pub mod utmp;
pub mod vm;

pub use requirements::{installed_prefix, unmet_requirement};
pub use run::{CommandResult, wait_for};
pub use testbed::{Host, Testbed};
pub use vm::{OrPanicWithLogs, Vm};
