//! The target of a migration: the host that receives the task.
//!
//! The phases in order: give the verdict, receive the images, restore, hold the task until the
//! order to run, run, and await the rest of the memory (post-copy). A failure or `Discard` discards
//! everything. A restart from a checkpoint uses the same machine; its images come from the master's
//! store.

use sempa_proto::engine::Engine;
use sempa_proto::migration::{
    Cause, Failure, Move, Order, Parting, Report, Step, TaskFacts, Verdict,
};
use std::collections::VecDeque;
use std::path::PathBuf;

/// An event at the target.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetEvent {
    /// An order of the coordinator.
    Order(Order),
    /// The result of [`TargetOutput::Prepare`].
    Prepared {
        /// Empty if the target accepts the task.
        verdict: Verdict,
        /// This host supports post-copy.
        memory_can_follow: bool,
        /// The engine for this migration.
        engine: Engine,
    },
    /// The pre-copied memory is lost together with its tasker, or pre-copy has failed.
    PreCopyLost(Failure),
    /// All images, or the record in their place, have arrived and are verified; their size. Or they
    /// have not.
    Received(Result<u64, Failure>),
    /// The result of [`TargetOutput::Restore`].
    Restored(Result<(), Failure>),
    /// The result of [`TargetOutput::Run`].
    Ran(Result<(), Failure>),
    /// All memory of the task has arrived; or some of it will not arrive, and the task was killed.
    Arrived(Result<(), Failure>),
    /// The tasker has executed [`TargetOutput::Discard`].
    Discarded,
}

/// An instruction to the target's daemon.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetOutput {
    Report(Report),
    /// Request a verdict on this task.
    Prepare(TaskFacts),
    /// Request the tasker to keep the memory that pre-copy sends. Follows
    /// [`TargetOutput::ExpectImages`].
    TakePreCopy,
    /// Accept the images of this migration from the source.
    ExpectImages,
    /// Request the tasker to rebuild the task, or to restart its program, up to the point where
    /// none of its code runs yet.
    Restore,
    /// The task belongs to this host from now on: request the tasker to run it.
    Run(Parting),
    /// Write the token that makes the library connect to this daemon.
    WakeHere,
    /// Request the tasker to discard everything of this migration.
    Discard,
    DropImages,
    /// Nothing remains to be done: forget the migration.
    Done,
}

impl TargetOutput {
    /// Returns the step that starts with this output.
    pub fn begins(&self) -> Option<Step> {
        match self {
            TargetOutput::Prepare(_) => Some(Step::Prepare),
            TargetOutput::Restore => Some(Step::Restore),
            TargetOutput::Run(_) => Some(Step::Run),
            TargetOutput::WakeHere => Some(Step::Arrive),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Judging,
    Receiving,
    Restoring,
    Holding,
    Starting,
    /// The task runs, and its memory may be incomplete (post-copy).
    Arriving,
    Discarding,
    Done,
}

/// One migration at its target.
#[derive(Debug)]
pub struct Target {
    of: Move,
    /// Path of the token file that will wake the library.
    token: PathBuf,
    /// Post-copy is used. Before the verdict: the source supports it.
    memory_follows: bool,
    /// Pre-copy precedes the images.
    pre_copies: bool,
    state: State,
    out: VecDeque<TargetOutput>,
}

impl Target {
    /// Starts a migration or a restart with the order [`Order::Prepare`].
    pub fn new(
        of: Move,
        facts: TaskFacts,
        token: PathBuf,
        memory_can_follow: bool,
        pre_copies: bool,
    ) -> Target {
        let (memory_follows, out) = (
            memory_can_follow,
            VecDeque::from([TargetOutput::Prepare(facts)]),
        );
        Target {
            of,
            token,
            memory_follows,
            pre_copies,
            state: State::Judging,
            out,
        }
    }

    pub fn of(&self) -> &Move {
        &self.of
    }

    /// True from the arrival of the images until the task is restored.
    pub fn is_restoring(&self) -> bool {
        self.state == State::Restoring
    }

    /// True while the order to run is being executed.
    pub fn is_starting(&self) -> bool {
        self.state == State::Starting
    }

    /// True if post-copy is used. Final from [`TargetOutput::ExpectImages`] on.
    pub fn memory_follows(&self) -> bool {
        self.memory_follows
    }

    /// Returns the next output to execute.
    pub fn poll(&mut self) -> Option<TargetOutput> {
        self.out.pop_front()
    }

    /// Handles an event. Events that do not match the state belong to an aborted step and are
    /// ignored.
    pub fn handle(&mut self, event: TargetEvent) {
        use TargetOutput as O;
        match (self.state, event) {
            (_, TargetEvent::Order(Order::Discard)) => self.discard(),
            (
                State::Judging,
                TargetEvent::Prepared {
                    verdict,
                    memory_can_follow,
                    engine,
                },
            ) => {
                self.memory_follows &= memory_can_follow && engine == Engine::Criu;
                self.pre_copies &= self.memory_follows;
                let (refuses, memory_follows) = (!verdict.is_empty(), self.memory_follows);
                let report = O::Report(Report::Prepared {
                    verdict,
                    token: self.token.clone(),
                    memory_follows,
                    engine,
                });
                // A restart from the store always has images.
                let has_images = engine == Engine::Criu || self.of.cause == Cause::Restart;
                match (refuses, has_images) {
                    (true, _) => self.go(State::Done, [report, O::Discard, O::Done]),
                    // Expect the images before the report is sent: the source may start to send
                    // immediately afterwards.
                    (false, true) => {
                        let takes = self.pre_copies.then_some(O::TakePreCopy);
                        self.go(
                            State::Receiving,
                            [O::ExpectImages].into_iter().chain(takes).chain([report]),
                        );
                    }
                    (false, false) => self.go(State::Receiving, [report]),
                }
            }
            (State::Receiving, TargetEvent::Received(Ok(bytes))) => {
                self.go(
                    State::Restoring,
                    [O::Report(Report::Received { bytes }), O::Restore],
                );
            }
            (State::Restoring, TargetEvent::Restored(Ok(()))) => {
                self.go(State::Holding, [O::Report(Report::Restored)]);
            }
            (State::Holding, TargetEvent::Order(Order::Run(parting))) => {
                self.go(State::Starting, [O::Run(parting)])
            }
            (State::Starting, TargetEvent::Ran(Ok(()))) => {
                self.go(State::Arriving, [O::WakeHere, O::Report(Report::Running)]);
                if !self.memory_follows {
                    self.handle(TargetEvent::Arrived(Ok(())));
                }
            }
            (State::Arriving, TargetEvent::Arrived(result)) => {
                let failed = |why| Report::Failed {
                    step: Step::Arrive,
                    why,
                };
                let report = result.map_or_else(failed, |()| Report::Arrived);
                self.go(State::Done, [O::Report(report), O::DropImages, O::Done]);
            }
            (State::Receiving, TargetEvent::PreCopyLost(why)) if self.pre_copies => {
                self.failed(Step::PreCopy, why)
            }
            (State::Receiving, TargetEvent::Received(Err(why))) => self.failed(Step::Transfer, why),
            (State::Restoring | State::Holding, TargetEvent::Restored(Err(why))) => {
                self.failed(Step::Restore, why)
            }
            (State::Starting, TargetEvent::Ran(Err(why))) => {
                let report = Report::Failed {
                    step: Step::Run,
                    why,
                };
                self.go(State::Discarding, [O::Report(report), O::Discard]);
            }
            // Delete the images last: an engine that is being aborted may still write them.
            (State::Discarding, TargetEvent::Discarded) => {
                self.go(State::Done, [O::DropImages, O::Done])
            }
            _ => {}
        }
    }

    fn go(&mut self, state: State, outputs: impl IntoIterator<Item = TargetOutput>) {
        self.state = state;
        self.out.extend(outputs);
    }

    fn failed(&mut self, step: Step, why: Failure) {
        let report = Report::Failed { step, why };
        self.go(
            State::Discarding,
            [TargetOutput::Report(report), TargetOutput::Discard],
        );
    }

    fn discard(&mut self) {
        // Starting: the coordinator never gives both orders.
        if matches!(
            self.state,
            State::Judging | State::Receiving | State::Restoring | State::Holding
        ) {
            self.go(State::Discarding, [TargetOutput::Discard]);
        }
    }
}
