//! The target of a migration: the host that receives the task.
//!
//! The phases in order: report the verdict, receive the images, restore the task in a stopped
//! state, wait for the order to run, run the task, and await the remaining memory (post-copy). A
//! failure or the order `Discard` discards everything. A restart from a checkpoint uses the same
//! state machine; its images come from the master's store.

use sempa_proto::engine::Engine;
use sempa_proto::migration::{
    Failure, FinalSourceState, Migration, MigrationCause, MigrationOrder, Step, StepReport,
    TaskFacts, Verdict,
};
use std::collections::VecDeque;
use std::path::PathBuf;

/// An event at the target.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetEvent {
    /// An order of the coordinator.
    Order(MigrationOrder),
    /// The result of [`TargetOutput::Prepare`].
    Prepared {
        /// The reasons to refuse the task; empty if the target accepts it.
        verdict: Verdict,
        /// True if this host supports post-copy.
        supports_post_copy: bool,
        /// The engine that this host has chosen for the migration.
        engine: Engine,
    },
    /// Pre-copy has failed, or the pre-copied memory was lost because the tasker ended.
    PreCopyLost(Failure),
    /// All images have arrived and are verified, or the transfer failed. `Ok` contains their size
    /// in bytes. With an engine other than CRIU, the task's record arrives instead of images.
    ImagesReceived(Result<u64, Failure>),
    /// The result of [`TargetOutput::Restore`].
    Restored(Result<(), Failure>),
    /// The result of [`TargetOutput::Run`].
    RunCompleted(Result<(), Failure>),
    /// All memory of the task has arrived. `Err`: some memory will not arrive, and the task was
    /// killed.
    MemoryArrived(Result<(), Failure>),
    /// The tasker has executed [`TargetOutput::Discard`].
    Discarded,
}

/// An instruction to the target's daemon.
#[derive(Clone, Debug, PartialEq)]
pub enum TargetOutput {
    Report(StepReport),
    /// Request a verdict on this task.
    Prepare(TaskFacts),
    /// Order the tasker to store the memory that pre-copy sends. Follows
    /// [`TargetOutput::ExpectImages`].
    ReceivePreCopy,
    /// Accept the images of this migration from the source.
    ExpectImages,
    /// Order the tasker to rebuild the task, or to restart its program, and to stop it before it
    /// executes any instruction.
    Restore,
    /// This host now owns the task: order the tasker to run the task.
    Run(FinalSourceState),
    /// Write the token that makes the library connect to this daemon.
    WriteResumeToken,
    /// Order the tasker to discard everything that belongs to this migration.
    Discard,
    DropImages,
    /// The migration needs no further action: delete its state.
    Done,
}

impl TargetOutput {
    /// Returns the migration step that starts with this output; `None` if no step does.
    pub fn started_step(&self) -> Option<Step> {
        match self {
            Self::Prepare(_) => Some(Step::Prepare),
            Self::Restore => Some(Step::Restore),
            Self::Run(_) => Some(Step::Run),
            Self::WriteResumeToken => Some(Step::Arrive),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TargetState {
    AwaitingVerdict,
    Receiving,
    Restoring,
    Restored,
    Starting,
    /// The task runs, and its memory may be incomplete (post-copy).
    AwaitingMemory,
    Discarding,
    Done,
}

/// One migration at its target.
#[derive(Debug)]
pub struct Target {
    migration: Migration,
    /// Path of the token file that will wake the library.
    resume_token: PathBuf,
    /// True if post-copy is used. Before the verdict: true if the source supports post-copy.
    post_copy: bool,
    /// True if pre-copy precedes the transfer of the images.
    pre_copy: bool,
    state: TargetState,
    outputs: VecDeque<TargetOutput>,
}

impl Target {
    /// Starts a migration or a restart with the order [`MigrationOrder::Prepare`].
    pub fn new(
        migration: Migration,
        facts: TaskFacts,
        resume_token: PathBuf,
        supports_post_copy: bool,
        pre_copy: bool,
    ) -> Self {
        let (post_copy, outputs) = (
            supports_post_copy,
            VecDeque::from([TargetOutput::Prepare(facts)]),
        );
        Self {
            migration,
            resume_token,
            post_copy,
            pre_copy,
            state: TargetState::AwaitingVerdict,
            outputs,
        }
    }

    pub fn migration(&self) -> &Migration {
        &self.migration
    }

    /// True while the task is being restored from its images.
    pub fn is_restoring(&self) -> bool {
        self.state == TargetState::Restoring
    }

    /// True while the order to run is being executed.
    pub fn is_starting(&self) -> bool {
        self.state == TargetState::Starting
    }

    /// True if post-copy is used. Final from [`TargetOutput::ExpectImages`] on.
    pub fn uses_post_copy(&self) -> bool {
        self.post_copy
    }

    /// Returns the next output that the daemon must execute; `None` if no output is pending.
    pub fn poll(&mut self) -> Option<TargetOutput> {
        self.outputs.pop_front()
    }

    /// Handles an event. Events that do not match the state belong to an aborted step and are
    /// ignored.
    pub fn handle(&mut self, event: TargetEvent) {
        use TargetEvent as E;
        use TargetOutput as O;
        use TargetState as S;
        match (self.state, event) {
            (_, E::Order(MigrationOrder::Discard)) => self.discard(),
            (
                S::AwaitingVerdict,
                E::Prepared {
                    verdict,
                    supports_post_copy,
                    engine,
                },
            ) => self.handle_verdict(verdict, supports_post_copy, engine),
            (S::Receiving, E::ImagesReceived(Ok(bytes))) => {
                self.enter_state(
                    S::Restoring,
                    [
                        O::Report(StepReport::Received { image_bytes: bytes }),
                        O::Restore,
                    ],
                );
            }
            (S::Restoring, E::Restored(Ok(()))) => {
                self.enter_state(S::Restored, [O::Report(StepReport::Restored)]);
            }
            (S::Restored, E::Order(MigrationOrder::Run(source_state))) => {
                self.enter_state(S::Starting, [O::Run(source_state)])
            }
            (S::Starting, E::RunCompleted(Ok(()))) => {
                self.enter_state(
                    S::AwaitingMemory,
                    [O::WriteResumeToken, O::Report(StepReport::Running)],
                );
                if !self.post_copy {
                    self.handle(E::MemoryArrived(Ok(())));
                }
            }
            (S::AwaitingMemory, E::MemoryArrived(result)) => {
                let to_failed_report = |failure| StepReport::Failed {
                    step: Step::Arrive,
                    failure,
                };
                let report = result.map_or_else(to_failed_report, |()| StepReport::Arrived);
                self.enter_state(S::Done, [O::Report(report), O::DropImages, O::Done]);
            }
            (S::Receiving, E::PreCopyLost(failure)) if self.pre_copy => {
                self.report_failure(Step::PreCopy, failure)
            }
            (S::Receiving, E::ImagesReceived(Err(failure))) => {
                self.report_failure(Step::Transfer, failure)
            }
            (S::Restoring | S::Restored, E::Restored(Err(failure))) => {
                self.report_failure(Step::Restore, failure)
            }
            (S::Starting, E::RunCompleted(Err(failure))) => {
                let report = StepReport::Failed {
                    step: Step::Run,
                    failure,
                };
                self.enter_state(S::Discarding, [O::Report(report), O::Discard]);
            }
            // Delete the images last: an engine that is being aborted may still write them.
            (S::Discarding, E::Discarded) => self.enter_state(S::Done, [O::DropImages, O::Done]),
            _ => {}
        }
    }

    /// Reports the verdict of the tasker. Then the target waits for the images or the state of the
    /// task, or ends if the verdict refuses the task.
    fn handle_verdict(&mut self, verdict: Verdict, supports_post_copy: bool, engine: Engine) {
        use TargetOutput as O;
        use TargetState as S;
        self.post_copy &= supports_post_copy && engine == Engine::Criu;
        self.pre_copy &= self.post_copy;
        let (is_refused, uses_post_copy) = (!verdict.is_empty(), self.post_copy);
        let report = O::Report(StepReport::Prepared {
            verdict,
            resume_token_path: self.resume_token.clone(),
            post_copy: uses_post_copy,
            engine,
        });
        // A restart from the store always receives images.
        let has_images = engine == Engine::Criu || self.migration.cause == MigrationCause::Restart;
        match (is_refused, has_images) {
            (true, _) => self.enter_state(S::Done, [report, O::Discard, O::Done]),
            // Expect the images before sending the report: the source may start to send
            // immediately after the report.
            (false, true) => {
                let receive_pre_copy = self.pre_copy.then_some(O::ReceivePreCopy);
                self.enter_state(
                    S::Receiving,
                    [O::ExpectImages]
                        .into_iter()
                        .chain(receive_pre_copy)
                        .chain([report]),
                );
            }
            (false, false) => self.enter_state(S::Receiving, [report]),
        }
    }

    fn enter_state(&mut self, state: TargetState, outputs: impl IntoIterator<Item = TargetOutput>) {
        self.state = state;
        self.outputs.extend(outputs);
    }

    fn report_failure(&mut self, step: Step, failure: Failure) {
        let report = StepReport::Failed { step, failure };
        self.enter_state(
            TargetState::Discarding,
            [TargetOutput::Report(report), TargetOutput::Discard],
        );
    }

    fn discard(&mut self) {
        // `Starting`: the coordinator never orders to discard a task that it has ordered to run.
        if matches!(
            self.state,
            TargetState::AwaitingVerdict
                | TargetState::Receiving
                | TargetState::Restoring
                | TargetState::Restored
        ) {
            self.enter_state(TargetState::Discarding, [TargetOutput::Discard]);
        }
    }
}
