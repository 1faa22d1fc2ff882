//! Migration and checkpointing of tasks on one host: inspecting, dumping and restoring processes,
//! and storing checkpoints. The protocol between the hosts is the crate `checkpoint_protocol`.
//!
//! * [`dump_retry`][]: delays between attempts of a dump that collided with another dump.
//! * [`file_transfer_journal`][]: journal of files that were copied to the target for a task that
//!   does not run yet.
//! * [`engine`][]: the interface of dump engines.
//! * [`criu`][]: the dump engine CRIU, which can dump any process.
//! * [`facts`][]: properties and resources of a task, and the verdict of a host on them.
//! * [`allocator`][]: settings of the memory allocator.
//! * [`boot_clock`][]: the clock of leases.
//! * [`capabilities`][]: dropping of capabilities.
//! * [`descendants`][]: the end of everything that a tasker has started.
//! * [`proc`][]: facts about processes from /proc.
//! * [`seal`][]: sealed images of tasks, which only the hosts of one site can create and read.
//! * [`state_files`][]: state files of programs that write their own checkpoints.
//! * [`store`][]: the store for checkpoints of jobs.

pub mod allocator;
pub mod boot_clock;
pub mod capabilities;
pub mod criu;
pub mod descendants;
pub mod dump_retry;
pub mod engine;
pub mod facts;
pub mod file_transfer_journal;
pub mod proc;
pub mod seal;
mod sealed_stream;
pub mod state_files;
pub mod store;
mod zero_runs;
