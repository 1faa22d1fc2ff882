//! The migration protocol as three state machines: [`Coordinator`] on the master, [`Source`] and [`Target`] at the ends.
//!
//! ```text
//! coordinator       source                        target
//!  Inspect  ------>  facts
//!  Prepare  ------------------------------------>  verdict, room made, nothing frozen so far
//!  Leave    ------>  (pre-copy) -----------------> keep what comes ahead
//!                    quiesce, stop, dump, send --> verify, restore, hold before the first instruction
//!  (record, make the new location known: the commit)
//!  Yield    ------>  kill and reap, hand over
//!  Run      ------------------------------------>  let it run, wake the library
//!                                                  (all memory is there)
//! ```
//!
//! Between Inspect and Prepare a task waits for its turn, if others are leaving the same host: the smallest go first.
//!
//! Up to the commit any failure ends in `Resume` at the source and `Discard` at the target: the task goes on where it
//! was. The target never lets the copy run without `Run`, and `Run` is only given when the source's copy is gone (or its
//! host is, whose tasker kills its tasks when it loses its daemon, and whose daemon ends when it loses the master). So at
//! every instant at most one copy may run.
//!
//! After `Yield` there is no way back: when the target fails then, the task has ended, and the target's daemon says so as
//! for any task that ends. The tasker carries out its orders for one task in order; an order to continue or discard
//! overtakes a dump or restore that is under way and ends it.
//!
//! Memory may follow the task (post-copy): if both ends can, the images lack most of it, the source's engine keeps it when the
//! copy there is killed, and the target asks for it from the restore on. Until all of it is there a lost source, or a lost way to
//! it, is the end of the task; the target kills it before it could go on without. To make that time short a large task's memory goes
//! ahead while it still runs (pre-copy), unless it is an owner who wants it away: he does not wait for that. The way on which it
//! goes is the one on which the target asks for the rest. If it fails the move is off, before anything has come of it.
//!
//! Whether the task is suspended the coordinator knows: the source says so with its facts, and from then on either end passes on
//! what somebody wants before it says that it is done. `Run` and `Resume` bring what has come of it. So a task that is
//! suspended runs nowhere, whichever end is lost, and whenever.
//!
//! Checkpoints of jobs ([`Cuts`]) and their restarts ([`Restarts`]) use the same two ends: a source that lets its task go on
//! when the images are written, and a target.
//!
//! The machines do no I/O. The daemon feeds them and carries out their outputs in order; see `pvmd`.

mod coordinator;
mod cut;
mod restart;
mod source;
mod target;
mod turns;

pub use coordinator::{Coordinator, CoordinatorOutput, MOVES_OPEN_MAX};
pub use cut::{CutId, CutOutput, Cuts};
pub use restart::{Candidate, RestartId, RestartOutput, Restarts};
pub use source::{Inspected, Source, SourceEvent, SourceOutput};
pub use target::{Target, TargetEvent, TargetOutput};
pub use turns::{GATHER_TIME, LEAVE_AT_ONCE_MAX, LEAVE_AT_ONCE_WITH_SMALLER_MAX};
