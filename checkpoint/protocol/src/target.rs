//! The end that a task moves to.

use sempa_proto::engine::Engine;
use sempa_proto::migration::{
    Cause, Failure, Move, Order, Parting, Report, Step, TaskFacts, Verdict,
};
use std::collections::VecDeque;
use std::path::PathBuf;

/// What happens at the target.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetEvent {
    /// The coordinator's order.
    Order(Order),
    /// The answer to [`TargetOutput::Prepare`].
    Prepared {
        /// Empty: it would take the task.
        verdict: Verdict,
        /// Memory can follow a task to here.
        memory_can_follow: bool,
        /// The way by which the task is to come.
        engine: Engine,
    },
    /// What came ahead is gone, with the tasker that had it, or does not come.
    PreCopyLost(Failure),
    /// The images, or the record that takes their place, are here and their hashes are right, or not.
    Received(Result<u64, Failure>),
    /// The tasker's answer to [`TargetOutput::Restore`].
    Restored(Result<(), Failure>),
    /// The tasker's answer to [`TargetOutput::Run`].
    Ran(Result<(), Failure>),
    /// All memory of the task is here, or some of it will not come and the task was killed.
    Arrived(Result<(), Failure>),
    /// The tasker's answer to [`TargetOutput::Discard`].
    Discarded,
}

/// What the target's daemon has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetOutput {
    /// Report to the coordinator.
    Report(Report),
    /// Ask the tasker for a verdict on such a task.
    Prepare(TaskFacts),
    /// Have the tasker keep the memory that comes ahead, once images are expected.
    TakePreCopy,
    /// Accept the images of this move from the source.
    ExpectImages,
    /// Have the tasker rebuild the task, or start its program anew, up to the point where nothing of it runs yet.
    Restore,
    /// The task is ours from now on; have the tasker let it run.
    Run(Parting),
    /// Write the token that brings the library to this daemon.
    WakeHere,
    /// Have the tasker throw away what there is.
    Discard,
    /// Delete the images here.
    DropImages,
    /// Nothing is left to do: forget the move.
    Done,
}

impl TargetOutput {
    /// The step that begins with this.
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

/// Where the target stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Judging,
    Receiving,
    Restoring,
    Holding,
    Starting,
    /// It runs, and its memory follows.
    Arriving,
    Discarding,
    Done,
}

/// One move as its target sees it.
#[derive(Debug)]
pub struct Target {
    of: Move,
    /// Where the token will be written.
    token: PathBuf,
    /// The source could let the memory follow; from the verdict on: it will.
    memory_follows: bool,
    /// If it does, a part of it goes ahead.
    pre_copies: bool,
    state: State,
    out: VecDeque<TargetOutput>,
}

impl Target {
    /// The coordinator's order [`Order::Prepare`] has come.
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

    /// The move.
    pub fn of(&self) -> &Move {
        &self.of
    }

    /// True while the task is to be rebuilt, or is being rebuilt.
    pub fn is_restoring(&self) -> bool {
        self.state == State::Restoring
    }

    /// True while it was ordered to run, and does not yet.
    pub fn is_starting(&self) -> bool {
        self.state == State::Starting
    }

    /// True if most of the memory does not come with the images. Known from [`TargetOutput::ExpectImages`] on.
    pub fn memory_follows(&self) -> bool {
        self.memory_follows
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<TargetOutput> {
        self.out.pop_front()
    }

    /// Takes an event. What does not fit the state belongs to a step that was given up and is ignored.
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
                // What comes from the store has images in any case.
                let has_images = engine == Engine::Criu || self.of.cause == Cause::Restart;
                match (refuses, has_images) {
                    (true, _) => self.go(State::Done, [report, O::Discard, O::Done]),
                    // Expect first: the source may be faster than our answer is.
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
            // An engine that is being ended may still write there before.
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
