//! Migration and checkpointing of tasks on one host: inspecting, dumping and restoring processes,
//! and storing checkpoints. The protocol between the hosts is the crate `checkpoint_protocol`.
//!
//! * [`again`]: delays between attempts of a dump that collided with another one.
//! * [`carried`]: journal of files that were copied to the target for a task that does not run yet.
//! * [`engine`]: the interface of dump engines.
//! * [`criu`]: the engine for any process.
//! * [`facts`]: properties and resources of a task, and the verdict of a host on them.
//! * [`heap`]: settings of the memory allocator.
//! * [`rights`]: dropping of capabilities.
//! * [`state`]: state files of programs that write their own checkpoints.
//! * [`status`]: `/proc/PID/status`.
//! * [`store`]: the store for checkpoints of jobs.

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
