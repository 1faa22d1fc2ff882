//! The migration protocol as pure state machines: [`Coordinator`] on the master, [`Source`] and
//! [`Target`] on the two hosts.
//!
//! The state machines do no I/O. The daemon (`pvmd`) feeds them with events and executes their
//! outputs in order.
//!
//! ```text
//! coordinator                  source                         target
//!
//! 1 Inspect  --------------->  report facts
//! 2 (queue: the smallest tasks of a host depart first)
//! 3 Prepare  ---------------------------------------------->  verdict; reserve memory
//! 4 Depart   --------------->  pre-copy  ------------------>  store the pages
//!                              quiesce, stop, dump, send  ->  verify, restore,
//!                                                             stop before the first instruction
//! 5 commit: record the new location, announce it to all daemons
//! 6 Release  --------------->  kill and reap, forward items
//! 7 Run      ---------------------------------------------->  run, wake the library
//! 8                                                           all memory has arrived
//! ```
//!
//! The task runs undisturbed before step 4. Only large tasks that use post-copy are pre-copied.
//!
//! # Failures
//!
//! - **Before `Release` is sent**, every failure aborts the migration: a source that was ordered to
//!   let the task depart receives `Resume`, a target that was ordered to prepare receives
//!   `Discard`, and a commit that has begun is reversed. The task continues at the source.
//! - **After `Release`** the migration cannot be undone. If the target fails, the task has ended,
//!   and the target's daemon reports its exit like that of any task.
//! - **At most one copy may run at any instant.** The target never runs its copy without `Run`. The
//!   coordinator sends `Run` only when the source's copy has ended, or when the source's host is
//!   lost and its copy is considered dead. The copy is dead after a fixed time: a daemon that loses
//!   the master exits, and a tasker that loses its daemon kills its tasks.
//! - The tasker executes the orders for one task in sequence. An order to resume or to discard the
//!   task overtakes a running dump or restore and aborts it.
//!
//! # Post-copy and pre-copy
//!
//! With post-copy the images lack most of the memory. The source's engine retains the memory when
//! the source's copy is killed. The target requests the memory as soon as it restores the task.
//! After `Release` and until all memory has arrived, the loss of the source or of the connection to
//! it ends the task: the target kills the task before it can continue without its memory.
//!
//! Pre-copy shortens that period: the source sends memory of a large task while the task still runs
//! there. The stream of the pre-copy is the one on which the target later requests the remaining
//! memory. Pre-copy is skipped if the task is suspended, or if the task must depart because of its
//! host's owner. A failed pre-copy aborts the migration before the task is stopped.
//!
//! # Suspension
//!
//! The coordinator decides whether the task is suspended. The source reports the suspensions with
//! the facts. From then on source and target forward each suspend request to the coordinator before
//! they acknowledge the request. `Run` and `Resume` contain the resulting suspensions. A suspended
//! task therefore runs on neither host, whichever host is lost at any time.
//!
//! # Checkpoints
//!
//! Snapshots of jobs ([`Snapshots`]) and restarts from checkpoints ([`Restarts`]) use the same
//! state machines: a snapshot uses a [`Source`] that resumes its task when the images are written,
//! and a restart uses a [`Target`].

mod admission_queue;
mod coordinator;
mod job_claims;
mod restart;
mod snapshot;
mod source;
mod target;

pub use admission_queue::{SIZE_WAIT_MAX, SMALLER_DEPARTURES_MAX, TOTAL_DEPARTURES_MAX};
pub use coordinator::{Coordinator, CoordinatorOutput, MIGRATIONS_MAX};
pub use job_claims::{
    CLAIM_RENEWAL_INTERVAL, CLAIM_VALIDITY, ClaimDecision, ClaimObserver, HolderState,
    OBSERVED_CLAIMS_MAX, decide_claim, is_taken_over,
};
pub use restart::{RestartId, RestartOutput, RestartTask, Restarts};
pub use snapshot::{SnapshotId, SnapshotOutput, Snapshots};
pub use source::{InspectedTask, Source, SourceEvent, SourceOutput};
pub use target::{Target, TargetEvent, TargetOutput};
