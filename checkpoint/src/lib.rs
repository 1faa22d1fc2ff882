//! Moving and checkpointing of tasks: the protocol (pure), and the engines that dump and restore processes.
//!
//! * [`again`]: when a dump that met another one is begun again.
//! * [`carried`]: files that came with a task that does not run yet.
//! * [`engine`]: the contract of whatever dumps and restores processes.
//! * [`criu`]: the engine that works for any process.
//! * [`facts`]: what a task is and holds, and whether a host can take it.
//! * [`heap`]: what moves leave behind in the allocator.
//! * [`rights`]: what a process may do, given up.
//! * [`state`]: what a program has written that checkpoints itself.
//! * [`status`]: what the kernel tells of a process.
//! * [`store`]: where the checkpoints of jobs are kept.

pub mod again;
pub mod carried;
pub mod criu;
pub mod engine;
pub mod facts;
pub mod heap;
pub mod rights;
pub mod state;
pub mod status;
pub mod store;
