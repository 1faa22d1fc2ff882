//! The source of a migration: the host that the task leaves.
//!
//! The same state machine pauses and dumps a task for a snapshot of its job. In a snapshot the task
//! stays on its host: its images are sent to the master, and it resumes as soon as they are
//! written.
//!
//! The phases in order:
//!
//! - Migration by CRIU: inspect, pre-copy (optional), quiesce, stop, dump, send, kill.
//! - Migration by restarting the program: inspect, await the exit, send, release.
//! - Snapshot by CRIU: inspect, quiesce, stop, await the replies to the task's requests, wait until
//!   the whole job is paused, await the last replies, dump, resume, await the library's connection.
//! - Snapshot of a program that writes its own checkpoint: inspect, await the exit, wait until the
//!   whole job is paused, await the last replies, copy the state files, restart, await the
//!   library's connection.
//! - After an abort: resume the task if it may be stopped, await the library's connection if it may
//!   be quiesced.

use sempa_proto::engine::Engine;
use sempa_proto::migration::{
    Failure, Migration, MigrationCause, MigrationOrder, Refusal, Step, StepReport, TaskFacts, Usage,
};
use sempa_proto::suspend::Suspensions;
use sempa_proto::tasker::DumpReport;
use sempa_proto::{RequestId, Tid};
use std::collections::VecDeque;
use std::path::PathBuf;

/// The result of inspecting a task for a migration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct InspectedTask {
    pub facts: TaskFacts,
    pub suspensions: Suspensions,
    /// True if post-copy is worthwhile for this task and the source supports it. The target may
    /// still decline.
    pub supports_post_copy: bool,
    /// True if the task is large enough for pre-copy.
    pub supports_pre_copy: bool,
}

/// An event at the source.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceEvent {
    /// An order of the coordinator.
    Order(MigrationOrder),
    /// The result of [`SourceOutput::Inspect`]: facts from the tasker, or a refusal.
    Inspected(Result<InspectedTask, Refusal>),
    /// The result of [`SourceOutput::PreCopy`]: the number of bytes sent, or the failure.
    PreCopied(Result<u64, Failure>),
    /// The library has quiesced, and its socket is closed.
    Quiesced,
    /// The result of [`SourceOutput::Stop`] or [`SourceOutput::RequestExit`].
    Stopped(Result<(), Failure>),
    /// The result of [`SourceOutput::Dump`] or [`SourceOutput::CopyStateFiles`]. An error may also
    /// answer [`SourceOutput::SaveTaskState`] if the task must receive an item before it can be
    /// dumped.
    Dumped(Result<DumpReport, Failure>),
    /// The images have arrived at the target, or the transfer failed.
    ImagesSent(Result<(), Failure>),
    /// The tasker has executed [`SourceOutput::ResumeTask`].
    TaskResumed,
    /// All requests for which [`SourceOutput::AwaitReplies`] or [`SourceOutput::SaveTaskState`]
    /// waits are answered.
    RequestsSettled,
    /// The task's library has reconnected to this daemon.
    Reconnected,
    /// The tasker has executed [`SourceOutput::KillSource`]. The value is the resources that the
    /// task had used.
    Killed(Usage),
    /// The task has exited or was killed.
    TaskExited,
}

/// An instruction to the source's daemon.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceOutput {
    Report(StepReport),
    /// Request the task's facts from the tasker.
    Inspect,
    /// Open the stream on which the target will request the task's memory.
    OpenMemoryStream,
    /// Order the tasker to send memory of the running task on the stream of
    /// [`SourceOutput::OpenMemoryStream`].
    PreCopy,
    /// Discard the pre-copied memory: the migration is aborted.
    DiscardPreCopy,
    /// From now on buffer, in order, all items that arrive for the task.
    BufferIncoming,
    /// Request the library to quiesce. The quiesced library looks for a resume token at a path on
    /// this host, which the daemon adds, and at `resume_token`.
    Quiesce {
        /// Path of the resume token at the target. `None` for a snapshot, after which the task
        /// always resumes on this host.
        resume_token: Option<PathBuf>,
    },
    /// Snapshot: send [`SourceEvent::RequestsSettled`] when all requests of the task are answered,
    /// except for requests that the task can repeat.
    AwaitReplies,
    /// Snapshot: wait until no requests of the task are open except for `open_requests`. Then save
    /// the daemon's state of the task and send [`SourceEvent::RequestsSettled`].
    SaveTaskState {
        /// Requests with which the task waits for other tasks.
        open_requests: Vec<RequestId>,
        /// Tasks whose exits this daemon must know before it saves the state.
        ended_tasks: Vec<Tid>,
    },
    /// Snapshot: copy the program's state files to the image directory; the copies are the images
    /// of the task. [`SourceEvent::Dumped`] is the answer.
    CopyStateFiles,
    /// Snapshot: add the saved state of the task to the images and upload the images to the master.
    /// From now on the daemon owns the image directory.
    Upload,
    /// Ask the program to exit, so that it can be restarted. [`SourceEvent::Stopped`] reports that
    /// the program has exited and that the daemons of its peers have all its messages.
    RequestExit {
        engine: Engine,
    },
    /// Request the tasker to stop the task.
    Stop,
    /// Request the tasker to dump the task.
    Dump {
        /// Post-copy: most memory is not written to the images; it is served when the target
        /// requests it.
        post_copy: bool,
    },
    /// Start to send the images to the target while they are being written. If the dump fails, the
    /// target discards the received images.
    StartSendingImages,
    /// The images are complete: send the remaining ones to the target.
    FinishSendingImages,
    /// Send the task's record to the target. If the process has exited, the record is all that
    /// remains of the task.
    SendRecord,
    /// Request the tasker to resume the task.
    ResumeTask,
    /// Write the token that makes the library reconnect to this daemon.
    WriteResumeToken,
    /// Deliver the buffered items in order and stop buffering.
    DeliverBuffered,
    /// Request the tasker to kill and reap the stopped task.
    KillSource,
    /// The target now owns the task: send it the buffered items, an end mark, and the task's
    /// record.
    TransferOwnership,
    /// Stop sending and delete the images.
    DropImages,
    /// The migration needs no further action: delete its state.
    Done,
}

impl SourceOutput {
    /// Returns the migration step that starts with this output; `None` if no step does.
    pub fn started_step(&self) -> Option<Step> {
        match self {
            Self::Inspect => Some(Step::Inspect),
            Self::PreCopy => Some(Step::PreCopy),
            Self::Quiesce { .. } | Self::RequestExit { .. } => Some(Step::Quiesce),
            Self::Stop => Some(Step::Stop),
            Self::Dump { .. } | Self::CopyStateFiles => Some(Step::Dump),
            Self::FinishSendingImages | Self::SendRecord => Some(Step::Transfer),
            Self::KillSource => Some(Step::KillSource),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SourceState {
    Inspecting,
    AwaitingDeparture,
    /// Memory is being sent while the task runs.
    PreCopying,
    Quiescing,
    Stopping,
    /// The program was asked to exit, so that it can be restarted.
    AwaitingExit,
    /// Snapshot: the task is stopped, and replies to its open requests are awaited.
    AwaitingReplies,
    /// Snapshot: the task is stopped, or its process has exited and is not restarted yet.
    Paused,
    /// Snapshot: all tasks of the job are stopped, and the last replies are awaited.
    SavingState,
    Dumping,
    Sending,
    /// The migration was aborted or the snapshot is dumped; the tasker is resuming the task.
    Resuming,
    /// The task runs, and the reconnect of its library is awaited.
    AwaitingReconnect,
    Killing,
    Done,
}

/// One migration at its source, or one task of a snapshot.
#[derive(Debug)]
pub struct Source {
    migration: Migration,
    state: SourceState,
    /// True for a snapshot, after which the task stays on this host.
    is_snapshot: bool,
    /// Snapshot: the engine that writes the images.
    engine: Engine,
    /// True from the start of the upload on. The upload then owns the image directory and deletes
    /// it.
    upload_owns_images: bool,
    post_copy: bool,
    /// True if pre-copy precedes the dump.
    pre_copy: bool,
    /// Path of the resume token at the target. Empty after the path was passed to the library.
    resume_token: PathBuf,
    outputs: VecDeque<SourceOutput>,
}

impl Source {
    /// Starts a migration or a snapshot with the order [`MigrationOrder::Inspect`].
    pub fn new(migration: Migration) -> Self {
        let outputs = VecDeque::from([SourceOutput::Inspect]);
        let is_snapshot = migration.cause == MigrationCause::Checkpoint;
        let (state, engine) = (SourceState::Inspecting, Engine::Criu);
        Self {
            migration,
            state,
            is_snapshot,
            engine,
            upload_owns_images: false,
            post_copy: false,
            pre_copy: false,
            resume_token: PathBuf::new(),
            outputs,
        }
    }

    pub fn migration(&self) -> &Migration {
        &self.migration
    }

    /// True while all items for the task must be buffered: from the request to quiesce or to exit,
    /// until the task's library has reconnected or the task has ended on this host.
    pub fn buffers_incoming(&self) -> bool {
        !matches!(
            self.state,
            SourceState::Inspecting
                | SourceState::AwaitingDeparture
                | SourceState::PreCopying
                | SourceState::Done
        )
    }

    /// True from the order to depart until the task's library has reconnected or the task has ended
    /// on this host.
    pub fn is_departing(&self) -> bool {
        self.buffers_incoming() || self.state == SourceState::PreCopying
    }

    /// True while the coordinator decides whether the task is suspended: from the report of the
    /// inspection until the task continues or has ended on this host.
    pub fn coordinator_decides_suspension(&self) -> bool {
        use SourceState as S;
        !self.is_snapshot
            && matches!(
                self.state,
                S::AwaitingDeparture
                    | S::PreCopying
                    | S::Quiescing
                    | S::Stopping
                    | S::AwaitingExit
                    | S::Dumping
                    | S::Sending
                    | S::Killing
            )
    }

    /// True while the program is asked to exit, so that it can be restarted.
    pub fn awaits_exit(&self) -> bool {
        self.state == SourceState::AwaitingExit
    }

    /// True while the task runs on this host and its library has not reconnected.
    pub fn awaits_reconnect(&self) -> bool {
        self.state == SourceState::AwaitingReconnect
    }

    /// Returns the next output that the daemon must execute; `None` if no output is pending.
    pub fn poll(&mut self) -> Option<SourceOutput> {
        self.outputs.pop_front()
    }

    /// Handles an event. Events that do not match the state belong to an aborted step and are
    /// ignored.
    pub fn handle(&mut self, event: SourceEvent) {
        use SourceEvent as E;
        use SourceOutput as O;
        use SourceState as S;
        match (self.state, event) {
            (_, E::TaskExited) => self.on_task_exited(),
            (_, E::Order(MigrationOrder::Resume { .. } | MigrationOrder::Abort)) => self.resume(),
            (S::Inspecting | S::AwaitingDeparture | S::PreCopying, event) => {
                self.handle_before_quiesce(event)
            }
            (S::AwaitingExit, E::Stopped(result)) => self.handle_program_exit(result),
            (S::Quiescing, E::Quiesced) => {
                self.enter_state(S::Stopping, [O::Report(StepReport::Quiesced), O::Stop]);
            }
            (S::Stopping, E::Stopped(Ok(()))) if self.is_snapshot => {
                self.enter_state(S::AwaitingReplies, [O::AwaitReplies])
            }
            (S::AwaitingReplies, E::RequestsSettled) => {
                self.enter_state(S::Paused, [O::Report(StepReport::Stopped)])
            }
            (
                S::Paused,
                E::Order(MigrationOrder::Dump {
                    open_requests,
                    ended_tasks,
                }),
            ) => {
                self.enter_state(
                    S::SavingState,
                    [O::SaveTaskState {
                        open_requests,
                        ended_tasks,
                    }],
                );
            }
            (S::SavingState, E::RequestsSettled) => match self.engine {
                Engine::Criu => self.enter_state(S::Dumping, [O::Dump { post_copy: false }]),
                _ => self.enter_state(S::Dumping, [O::CopyStateFiles]),
            },
            (S::Dumping, E::Dumped(Ok(dump_report))) if self.is_snapshot => {
                self.upload_owns_images = true;
                let report = O::Report(StepReport::Dumped {
                    image_bytes: dump_report.image_bytes,
                });
                self.enter_state(S::Resuming, [report, O::Upload, O::ResumeTask]);
            }
            (S::Stopping, E::Stopped(Ok(()))) => self.dump_and_send_images(),
            (S::Dumping, E::Dumped(Ok(dump_report))) => {
                let report = O::Report(StepReport::Dumped {
                    image_bytes: dump_report.image_bytes,
                });
                self.enter_state(S::Sending, [report, O::FinishSendingImages]);
            }
            (S::Stopping, E::Stopped(Err(why))) => self.report_failure(Step::Stop, why),
            (S::SavingState | S::Dumping, E::Dumped(Err(why))) => {
                self.report_failure(Step::Dump, why)
            }
            (S::Dumping | S::Sending, E::ImagesSent(Err(why))) => {
                self.report_failure(Step::Transfer, why)
            }
            (S::Resuming, E::TaskResumed) if self.upload_owns_images => {
                self.enter_state(S::AwaitingReconnect, [O::WriteResumeToken])
            }
            (S::Resuming, E::TaskResumed) => {
                self.enter_state(S::AwaitingReconnect, [O::DropImages, O::WriteResumeToken])
            }
            (S::AwaitingReconnect, E::Reconnected) => {
                self.enter_state(S::Done, [O::DeliverBuffered, O::Done])
            }
            (S::Sending, E::Order(MigrationOrder::Release)) => {
                self.enter_state(S::Killing, [O::KillSource])
            }
            (S::Killing, E::Killed(source_usage)) => {
                self.enter_state(
                    S::Done,
                    [
                        O::Report(StepReport::SourceKilled(source_usage)),
                        O::TransferOwnership,
                        O::DropImages,
                        O::Done,
                    ],
                );
            }
            _ => {}
        }
    }

    /// Reports that the program is stopped, opens the memory stream for a post-copy without
    /// pre-copy, and orders the dump and the sending of the images.
    fn dump_and_send_images(&mut self) {
        use SourceOutput as O;
        let post_copy = self.post_copy;
        self.outputs.push_back(O::Report(StepReport::Stopped));
        self.outputs
            .extend((post_copy && !self.pre_copy).then_some(O::OpenMemoryStream));
        self.enter_state(
            SourceState::Dumping,
            [O::Dump { post_copy }, O::StartSendingImages],
        );
    }

    /// Handles the exit of a program that was requested to exit, or the failure of the request.
    fn handle_program_exit(&mut self, result: Result<(), Failure>) {
        use SourceOutput as O;
        use SourceState as S;
        match result {
            Ok(()) if self.is_snapshot => {
                let reports = [StepReport::Quiesced, StepReport::Stopped].map(O::Report);
                self.enter_state(S::Paused, reports);
            }
            Ok(()) => {
                let reports = [
                    StepReport::Quiesced,
                    StepReport::Stopped,
                    StepReport::Dumped { image_bytes: 0 },
                ]
                .map(O::Report);
                self.enter_state(S::Sending, reports.into_iter().chain([O::SendRecord]));
            }
            Err(failure) => self.report_failure(Step::Quiesce, failure),
        }
    }

    /// Handles the events of the states that precede the quiesce.
    fn handle_before_quiesce(&mut self, event: SourceEvent) {
        use SourceEvent as E;
        use SourceOutput as O;
        use SourceState as S;
        match (self.state, event) {
            (S::Inspecting, E::Inspected(Ok(inspected_task))) => {
                let InspectedTask {
                    facts,
                    suspensions,
                    supports_post_copy,
                    supports_pre_copy,
                } = inspected_task;
                self.engine = facts.restart_engine().unwrap_or_default();
                let report = StepReport::Inspected {
                    facts,
                    suspensions,
                    supports_post_copy,
                    supports_pre_copy,
                };
                self.enter_state(S::AwaitingDeparture, [O::Report(report)]);
            }
            (S::Inspecting, E::Inspected(Err(refusal))) => {
                let failure = Failure::Refused(vec![refusal]);
                self.enter_state(
                    S::Done,
                    [
                        O::Report(StepReport::Failed {
                            step: Step::Inspect,
                            failure,
                        }),
                        O::Done,
                    ],
                );
            }
            (
                S::AwaitingDeparture,
                E::Order(MigrationOrder::Depart {
                    resume_token_path: resume_token,
                    post_copy: uses_post_copy,
                    pre_copy: uses_pre_copy,
                    engine: Engine::Criu,
                }),
            ) => {
                (self.post_copy, self.pre_copy, self.resume_token) =
                    (uses_post_copy, uses_pre_copy, resume_token);
                match uses_pre_copy {
                    true => self.enter_state(S::PreCopying, [O::OpenMemoryStream, O::PreCopy]),
                    false => self.quiesce(),
                }
            }
            (S::PreCopying, E::PreCopied(Ok(bytes))) => {
                self.outputs
                    .push_back(O::Report(StepReport::PreCopied { sent_bytes: bytes }));
                self.quiesce();
            }
            (S::PreCopying, E::PreCopied(Err(failure))) => {
                self.report_failure(Step::PreCopy, failure)
            }
            (S::AwaitingDeparture, E::Order(MigrationOrder::Depart { engine, .. })) => {
                self.enter_state(S::AwaitingExit, [O::RequestExit { engine }]);
            }
            (S::AwaitingDeparture, E::Order(MigrationOrder::Pause)) => match self.engine {
                Engine::Criu => self.enter_state(
                    S::Quiescing,
                    [O::BufferIncoming, O::Quiesce { resume_token: None }],
                ),
                engine => self.enter_state(S::AwaitingExit, [O::RequestExit { engine }]),
            },
            _ => {}
        }
    }

    fn enter_state(&mut self, state: SourceState, outputs: impl IntoIterator<Item = SourceOutput>) {
        self.state = state;
        self.outputs.extend(outputs);
    }

    fn quiesce(&mut self) {
        let resume_token = Some(std::mem::take(&mut self.resume_token));
        self.enter_state(
            SourceState::Quiescing,
            [
                SourceOutput::BufferIncoming,
                SourceOutput::Quiesce { resume_token },
            ],
        );
    }

    /// Reports a failure and waits for the coordinator to abort the migration. The coordinator may
    /// already be sending orders to the target.
    fn report_failure(&mut self, step: Step, failure: Failure) {
        self.outputs
            .push_back(SourceOutput::Report(StepReport::Failed { step, failure }));
    }

    fn resume(&mut self) {
        use SourceOutput as O;
        self.discard_pre_copy();
        match self.state {
            SourceState::Inspecting | SourceState::AwaitingDeparture => {
                self.enter_state(SourceState::Done, [O::Done])
            }
            SourceState::PreCopying => {
                self.enter_state(SourceState::Done, [O::DropImages, O::Done])
            }
            // A library that is still quiescing finds the resume token as soon as it looks for a
            // token. The only image data is the stream of the pre-copy.
            SourceState::Quiescing => {
                self.outputs.extend(self.pre_copy.then_some(O::DropImages));
                self.enter_state(SourceState::AwaitingReconnect, [O::WriteResumeToken]);
            }
            SourceState::AwaitingExit
            | SourceState::Stopping
            | SourceState::AwaitingReplies
            | SourceState::Paused
            | SourceState::SavingState
            | SourceState::Dumping
            | SourceState::Sending => {
                self.enter_state(SourceState::Resuming, [O::ResumeTask]);
            }
            // `Killing`: the coordinator never orders to resume a task that it has ordered to
            // release.
            SourceState::Resuming
            | SourceState::AwaitingReconnect
            | SourceState::Killing
            | SourceState::Done => {}
        }
    }

    /// Requests to discard the pre-copied memory if pre-copy was used and the task is not being
    /// killed. A repeated request has no effect.
    fn discard_pre_copy(&mut self) {
        let discard_output =
            self.pre_copy && !matches!(self.state, SourceState::Killing | SourceState::Done);
        self.outputs
            .extend(discard_output.then_some(SourceOutput::DiscardPreCopy));
    }

    fn on_task_exited(&mut self) {
        use SourceOutput as O;
        self.discard_pre_copy();
        match self.state {
            // The exit was intended; [`SourceEvent::Killed`] reports it.
            SourceState::Killing | SourceState::Done => {}
            SourceState::Resuming | SourceState::AwaitingReconnect => {
                self.outputs
                    .extend((!self.upload_owns_images).then_some(O::DropImages));
                self.enter_state(SourceState::Done, [O::DeliverBuffered, O::Done]);
            }
            SourceState::Inspecting
            | SourceState::AwaitingDeparture
            | SourceState::PreCopying
            | SourceState::Quiescing
            | SourceState::AwaitingExit
            | SourceState::Stopping
            | SourceState::AwaitingReplies
            | SourceState::Paused
            | SourceState::SavingState
            | SourceState::Dumping
            | SourceState::Sending => {
                let report = StepReport::Failed {
                    step: self.current_step(),
                    failure: Failure::TaskEnded,
                };
                let is_buffering = self.buffers_incoming();
                self.enter_state(SourceState::Done, [O::Report(report), O::DropImages]);
                self.outputs
                    .extend(is_buffering.then_some(O::DeliverBuffered));
                self.outputs.push_back(O::Done);
            }
        }
    }

    /// Returns the step in progress.
    fn current_step(&self) -> Step {
        match self.state {
            SourceState::Inspecting => Step::Inspect,
            SourceState::AwaitingDeparture => Step::Prepare,
            SourceState::PreCopying => Step::PreCopy,
            SourceState::Quiescing | SourceState::AwaitingExit => Step::Quiesce,
            SourceState::Stopping | SourceState::AwaitingReplies => Step::Stop,
            SourceState::Paused | SourceState::SavingState | SourceState::Dumping => Step::Dump,
            SourceState::Sending | SourceState::Resuming | SourceState::AwaitingReconnect => {
                Step::Transfer
            }
            SourceState::Killing | SourceState::Done => Step::KillSource,
        }
    }
}
