//! The migration protocol as pure state machines: [`Coordinator`] on the master, [`Source`] and
//! [`Target`] on the two hosts.
//!
//! The machines do no I/O. The daemon (`pvmd`) feeds them with events and executes their outputs in
//! order.
//!
//! ```text
//! coordinator                  source                         target
//!
//! 1 Inspect  --------------->  report facts
//! 2 (queue: the smallest tasks of a host depart first)
//! 3 Prepare  ---------------------------------------------->  verdict; reserve memory
//! 4 Depart   --------------->  pre-copy  ------------------>  keep the pages
//!                             quiesce, stop, dump, send  ->  verify, restore,
//!                                                            hold before the first instruction
//! 5 commit: record the new location, announce it to all daemons
//! 6 Release  --------------->  kill and reap, forward items
//! 7 Run      ---------------------------------------------->  run, wake the library
//! 8                                                           all memory has arrived
//! ```
//!
//! The task is not disturbed before step 4. Pre-copy takes place only for large tasks with
//! post-copy.
//!
//! # Failures
//!
//! - **Before `Release` is sent**, every failure aborts the migration: a source that was ordered to
//!   let the task depart gets `Resume`, a target that was ordered to prepare gets `Discard`, and a
//!   commit that has begun is taken back. The task continues at the source.
//! - **After `Release`** there is no way back. If the target fails, the task has ended, and the
//!   target's daemon reports its exit like that of any task.
//! - **At most one copy may run at any instant.** The target never runs its copy without `Run`. The
//!   coordinator sends `Run` only when the source's copy is gone, or when the source's host is lost
//!   and the fence timeout has passed. On a lost host the copy is dead: a daemon that loses the
//!   master exits, and a tasker that loses its daemon kills its tasks.
//! - The tasker executes the orders for one task in sequence. An order to continue or to discard
//!   overtakes a running dump or restore and aborts it.
//!
//! # Post-copy and pre-copy
//!
//! With post-copy the images lack most of the memory. The source's engine keeps it when the copy
//! there is killed, and the target requests it from the restore on. After `Release` and until all
//! memory has arrived, losing the source or the connection to it ends the task: the target kills it
//! before it can continue without its memory.
//!
//! Pre-copy shortens that period: it sends memory of a large task while the task still runs at the
//! source, over the stream on which the target later requests the rest. It is skipped if the task
//! is suspended, or if its host's owner waits for it to depart. A failed pre-copy aborts the
//! migration before the task was stopped.
//!
//! # Suspension
//!
//! The coordinator decides whether the task is suspended. The source reports the suspensions with
//! the facts; from then on both ends forward each suspend request to the coordinator before they
//! acknowledge it. `Run` and `Resume` carry the result. So a suspended task runs on neither host,
//! whichever host is lost at any time.
//!
//! # Checkpoints
//!
//! Snapshots of jobs ([`Snapshots`]) and restarts from checkpoints ([`Restarts`]) use the same two
//! ends: a snapshot uses a source that resumes its task when the images are written, and a restart
//! uses a target.

mod admission_queue;
mod coordinator;
mod restart;
mod snapshot;
mod source;
mod target;

pub use admission_queue::{DEPARTURES_MAX, DEPARTURES_WITH_SMALLER_MAX, SIZE_WAIT_MAX};
pub use coordinator::{Coordinator, CoordinatorOutput, MIGRATIONS_MAX};
pub use restart::{RestartId, RestartOutput, RestartTask, Restarts};
pub use snapshot::{SnapshotId, SnapshotOutput, Snapshots};
pub use source::{InspectedTask, Source, SourceEvent, SourceOutput};
pub use target::{Target, TargetEvent, TargetOutput};
