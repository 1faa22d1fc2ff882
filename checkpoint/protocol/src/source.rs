//! The source of a migration: the host that the task leaves.
//!
//! The same machine pauses and dumps a task for a snapshot of its job. The task then stays: its
//! images go to the master, and it resumes as soon as they are written.
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
    Cause, Failure, Move, Order, Refusal, Report, Step, TaskFacts, Usage,
};
use sempa_proto::suspend::Holds;
use sempa_proto::tasker::DumpReport;
use sempa_proto::{RequestId, Tid};
use std::collections::VecDeque;
use std::path::PathBuf;

/// The result of inspecting a task for a migration.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inspected {
    pub facts: TaskFacts,
    pub suspended: Holds,
    /// Post-copy pays off for this task and is possible as far as the source is concerned.
    pub memory_can_follow: bool,
    /// The task is large enough for pre-copy.
    pub can_pre_copy: bool,
}

/// An event at the source.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceEvent {
    /// An order of the coordinator.
    Order(Order),
    /// The result of [`SourceOutput::Inspect`]: from the tasker, or a refusal of the daemon itself.
    Inspected(Result<Inspected, Refusal>),
    /// The result of [`SourceOutput::PreCopy`]: the bytes sent.
    PreCopied(Result<u64, Failure>),
    /// The library has quiesced, and its socket is closed.
    Quiesced,
    /// The result of [`SourceOutput::Stop`] or [`SourceOutput::End`].
    Stopped(Result<(), Failure>),
    /// The result of [`SourceOutput::Dump`] or [`SourceOutput::Collect`]. An error may also answer
    /// [`SourceOutput::Close`]: the task must receive something first before it can be dumped.
    Dumped(Result<DumpReport, Failure>),
    /// The images are at the target, or could not be sent.
    Sent(Result<(), Failure>),
    /// The tasker has executed [`SourceOutput::Continue`].
    Continued,
    /// The wait of [`SourceOutput::Settle`] or [`SourceOutput::Close`] is over.
    Settled,
    /// The library has reconnected.
    Reconnected,
    /// The tasker has executed [`SourceOutput::KillMoved`]; the resources that the task had used.
    Gone(Usage),
    /// The task has exited or was killed.
    Ended,
}

/// An instruction to the source's daemon.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceOutput {
    Report(Report),
    /// Request the task's facts from the tasker.
    Inspect,
    /// Open the stream on which the target will request memory.
    LendMemory,
    /// Request the tasker to send memory of the running task on that stream.
    PreCopy,
    /// Discard the pre-copied memory: the migration is aborted.
    EndPreCopy,
    /// From now on buffer, in order, everything that arrives for the task.
    Hold,
    /// Request the library to quiesce. It then looks for a token file at the path that the daemon
    /// adds, and at this path.
    Quiesce {
        /// Path of the token at the target; `None` for a snapshot, after which the task always
        /// resumes here.
        token: Option<PathBuf>,
    },
    /// Snapshot: send [`SourceEvent::Settled`] when all requests of the task are answered, except
    /// for those that it can repeat.
    Settle,
    /// Snapshot: send [`SourceEvent::Settled`] when no requests of the task are open except for
    /// these, and save the daemon's state of the task at that moment.
    Close {
        /// Requests with which the task waits for other tasks.
        open: Vec<RequestId>,
        /// Tasks whose exits must be known here first.
        ended: Vec<Tid>,
    },
    /// Snapshot: copy the program's state files to the image directory; they are the images of the
    /// task. [`SourceEvent::Dumped`] is the answer.
    Collect,
    /// Snapshot: add the saved state of the task to the images and upload them to the master. The
    /// daemon owns the directory from now on.
    Deposit,
    /// Ask the program to exit, so that it can be restarted. [`SourceEvent::Stopped`] reports that
    /// it has exited and that the daemons of its peers have all its messages.
    End {
        engine: Engine,
    },
    /// Request the tasker to stop the task.
    Stop,
    /// Request the tasker to dump the task.
    Dump {
        /// Post-copy: most memory is not in the images; it is served when the target requests it.
        memory_follows: bool,
    },
    /// Start to send the images to the target while they are being written. If the dump fails, the
    /// target discards what it has received.
    SendAhead,
    /// The images are complete: send the rest of them to the target.
    SendImages,
    /// Send the task's record to the target. Nothing else remains of a task whose process has
    /// exited.
    SendRecord,
    /// Request the tasker to resume the task.
    Continue,
    /// Write the token that makes the library reconnect to this daemon.
    WakeHere,
    /// Deliver the buffered items in order and stop buffering.
    Release,
    /// Request the tasker to kill and reap the stopped task.
    KillMoved,
    /// The task now belongs to the target: send it the buffered items, an end mark, and the task's
    /// record.
    HandOver,
    /// Stop sending and delete the images.
    DropImages,
    /// Nothing remains to be done: forget the migration.
    Done,
}

impl SourceOutput {
    /// Returns the step that starts with this output.
    pub fn begins(&self) -> Option<Step> {
        match self {
            SourceOutput::Inspect => Some(Step::Inspect),
            SourceOutput::PreCopy => Some(Step::PreCopy),
            SourceOutput::Quiesce { .. } | SourceOutput::End { .. } => Some(Step::Quiesce),
            SourceOutput::Stop => Some(Step::Stop),
            SourceOutput::Dump { .. } | SourceOutput::Collect => Some(Step::Dump),
            SourceOutput::SendImages | SourceOutput::SendRecord => Some(Step::Transfer),
            SourceOutput::KillMoved => Some(Step::KillSource),
            _ => None,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Inspecting,
    Ready,
    /// Memory is being sent while the task runs.
    PreCopying,
    Quiescing,
    Stopping,
    /// The program was asked to exit, to be restarted.
    Ending,
    /// Snapshot: the task is stopped, and its open requests are being answered.
    Settling,
    /// Snapshot: the task is stopped, or its process has exited and was not restarted yet.
    Standing,
    /// Snapshot: all tasks of the job are stopped, and the last replies arrive.
    Closing,
    Dumping,
    Sending,
    /// The migration was aborted or the snapshot is dumped; the tasker is resuming the task.
    Continuing,
    /// The task runs; waiting for its library to reconnect.
    Waking,
    Killing,
    Done,
}

/// One migration at its source, or one task of a snapshot.
#[derive(Debug)]
pub struct Source {
    of: Move,
    state: State,
    /// A snapshot: the task stays here.
    keeps: bool,
    /// Snapshot: the engine that writes the images.
    engine: Engine,
    /// The images belong to the upload.
    deposited: bool,
    memory_follows: bool,
    /// Pre-copy precedes the dump.
    pre_copies: bool,
    /// Path of the token at the target, until it is passed to the library.
    token: PathBuf,
    out: VecDeque<SourceOutput>,
}

impl Source {
    /// Starts a migration or a snapshot with the order [`Order::Inspect`].
    pub fn new(of: Move) -> Source {
        let out = VecDeque::from([SourceOutput::Inspect]);
        let keeps = of.cause == Cause::Checkpoint;
        let (state, engine) = (State::Inspecting, Engine::Criu);
        Source {
            of,
            state,
            keeps,
            engine,
            deposited: false,
            memory_follows: false,
            pre_copies: false,
            token: PathBuf::new(),
            out,
        }
    }

    pub fn of(&self) -> &Move {
        &self.of
    }

    /// True while everything for the task must be buffered: from the quiesce request, or the
    /// request to exit, until the task is back or gone.
    pub fn holds(&self) -> bool {
        !matches!(
            self.state,
            State::Inspecting | State::Ready | State::PreCopying | State::Done
        )
    }

    /// True from the order to depart until the task is back or gone.
    pub fn leaves(&self) -> bool {
        self.holds() || self.state == State::PreCopying
    }

    /// True while the coordinator decides whether the task is suspended: from the inspection's
    /// report until the task is back or gone.
    pub fn is_decided_elsewhere(&self) -> bool {
        use State as S;
        !self.keeps
            && matches!(
                self.state,
                S::Ready
                    | S::PreCopying
                    | S::Quiescing
                    | S::Stopping
                    | S::Ending
                    | S::Dumping
                    | S::Sending
                    | S::Killing
            )
    }

    /// True while the program is asked to exit, to be restarted.
    pub fn is_ending(&self) -> bool {
        self.state == State::Ending
    }

    /// True while the task stays here and its library has not reconnected.
    pub fn is_waking(&self) -> bool {
        self.state == State::Waking
    }

    /// Returns the next output to execute.
    pub fn poll(&mut self) -> Option<SourceOutput> {
        self.out.pop_front()
    }

    /// Handles an event. Events that do not match the state belong to an aborted step and are
    /// ignored.
    pub fn handle(&mut self, event: SourceEvent) {
        use SourceOutput as O;
        match (self.state, event) {
            (_, SourceEvent::Ended) => self.ended(),
            (_, SourceEvent::Order(Order::Resume { .. } | Order::GoOn)) => self.resume(),
            (State::Inspecting | State::Ready | State::PreCopying, event) => self.begin(event),
            (State::Ending, SourceEvent::Stopped(Ok(()))) if self.keeps => {
                let done = [Report::Quiesced, Report::Stopped].map(O::Report);
                self.go(State::Standing, done);
            }
            (State::Ending, SourceEvent::Stopped(Ok(()))) => {
                let done = [
                    Report::Quiesced,
                    Report::Stopped,
                    Report::Dumped { bytes: 0 },
                ]
                .map(O::Report);
                self.go(State::Sending, done.into_iter().chain([O::SendRecord]));
            }
            (State::Ending, SourceEvent::Stopped(Err(why))) => self.failed(Step::Quiesce, why),
            (State::Quiescing, SourceEvent::Quiesced) => {
                self.go(State::Stopping, [O::Report(Report::Quiesced), O::Stop]);
            }
            (State::Stopping, SourceEvent::Stopped(Ok(()))) if self.keeps => {
                self.go(State::Settling, [O::Settle])
            }
            (State::Settling, SourceEvent::Settled) => {
                self.go(State::Standing, [O::Report(Report::Stopped)])
            }
            (State::Standing, SourceEvent::Order(Order::Write { open, ended })) => {
                self.go(State::Closing, [O::Close { open, ended }]);
            }
            (State::Closing, SourceEvent::Settled) => match self.engine {
                Engine::Criu => self.go(
                    State::Dumping,
                    [O::Dump {
                        memory_follows: false,
                    }],
                ),
                _ => self.go(State::Dumping, [O::Collect]),
            },
            (State::Dumping, SourceEvent::Dumped(Ok(dump))) if self.keeps => {
                self.deposited = true;
                let report = O::Report(Report::Dumped { bytes: dump.bytes });
                self.go(State::Continuing, [report, O::Deposit, O::Continue]);
            }
            (State::Stopping, SourceEvent::Stopped(Ok(()))) => {
                let memory_follows = self.memory_follows;
                self.out.push_back(O::Report(Report::Stopped));
                self.out
                    .extend((memory_follows && !self.pre_copies).then_some(O::LendMemory));
                self.go(State::Dumping, [O::Dump { memory_follows }, O::SendAhead]);
            }
            (State::Dumping, SourceEvent::Dumped(Ok(dump))) => {
                self.go(
                    State::Sending,
                    [
                        O::Report(Report::Dumped { bytes: dump.bytes }),
                        O::SendImages,
                    ],
                );
            }
            (State::Stopping, SourceEvent::Stopped(Err(why))) => self.failed(Step::Stop, why),
            (State::Closing | State::Dumping, SourceEvent::Dumped(Err(why))) => {
                self.failed(Step::Dump, why)
            }
            (State::Dumping | State::Sending, SourceEvent::Sent(Err(why))) => {
                self.failed(Step::Transfer, why)
            }
            (State::Continuing, SourceEvent::Continued) if self.deposited => {
                self.go(State::Waking, [O::WakeHere])
            }
            (State::Continuing, SourceEvent::Continued) => {
                self.go(State::Waking, [O::DropImages, O::WakeHere])
            }
            (State::Waking, SourceEvent::Reconnected) => {
                self.go(State::Done, [O::Release, O::Done])
            }
            (State::Sending, SourceEvent::Order(Order::Yield)) => {
                self.go(State::Killing, [O::KillMoved])
            }
            (State::Killing, SourceEvent::Gone(used)) => {
                self.go(
                    State::Done,
                    [
                        O::Report(Report::SourceGone(used)),
                        O::HandOver,
                        O::DropImages,
                        O::Done,
                    ],
                );
            }
            _ => {}
        }
    }

    /// Handles the events that precede the quiesce.
    fn begin(&mut self, event: SourceEvent) {
        use SourceOutput as O;
        match (self.state, event) {
            (State::Inspecting, SourceEvent::Inspected(Ok(inspected))) => {
                let Inspected {
                    facts,
                    suspended,
                    memory_can_follow,
                    can_pre_copy,
                } = inspected;
                self.engine = facts.anew().unwrap_or_default();
                let report = Report::Inspected {
                    facts,
                    suspended,
                    memory_can_follow,
                    can_pre_copy,
                };
                self.go(State::Ready, [O::Report(report)]);
            }
            (State::Inspecting, SourceEvent::Inspected(Err(refusal))) => {
                let why = Failure::Refused(vec![refusal]);
                self.go(
                    State::Done,
                    [
                        O::Report(Report::Failed {
                            step: Step::Inspect,
                            why,
                        }),
                        O::Done,
                    ],
                );
            }
            (
                State::Ready,
                SourceEvent::Order(Order::Leave {
                    token,
                    memory_follows,
                    pre_copies,
                    engine: Engine::Criu,
                }),
            ) => {
                (self.memory_follows, self.pre_copies, self.token) =
                    (memory_follows, pre_copies, token);
                match pre_copies {
                    true => self.go(State::PreCopying, [O::LendMemory, O::PreCopy]),
                    false => self.quiesce(),
                }
            }
            (State::PreCopying, SourceEvent::PreCopied(Ok(bytes))) => {
                self.out.push_back(O::Report(Report::PreCopied { bytes }));
                self.quiesce();
            }
            (State::PreCopying, SourceEvent::PreCopied(Err(why))) => {
                self.failed(Step::PreCopy, why)
            }
            (State::Ready, SourceEvent::Order(Order::Leave { engine, .. })) => {
                self.go(State::Ending, [O::End { engine }]);
            }
            (State::Ready, SourceEvent::Order(Order::Stand)) => match self.engine {
                Engine::Criu => self.go(State::Quiescing, [O::Hold, O::Quiesce { token: None }]),
                engine => self.go(State::Ending, [O::End { engine }]),
            },
            _ => {}
        }
    }

    fn go(&mut self, state: State, outputs: impl IntoIterator<Item = SourceOutput>) {
        self.state = state;
        self.out.extend(outputs);
    }

    fn quiesce(&mut self) {
        let token = Some(std::mem::take(&mut self.token));
        self.go(
            State::Quiescing,
            [SourceOutput::Hold, SourceOutput::Quiesce { token }],
        );
    }

    /// Reports a failure and waits for the coordinator to abort the migration. It may already be
    /// sending orders to the target.
    fn failed(&mut self, step: Step, why: Failure) {
        self.out
            .push_back(SourceOutput::Report(Report::Failed { step, why }));
    }

    fn resume(&mut self) {
        use SourceOutput as O;
        self.end_pre_copy();
        match self.state {
            State::Inspecting | State::Ready => self.go(State::Done, [O::Done]),
            State::PreCopying => self.go(State::Done, [O::DropImages, O::Done]),
            // A library that is still quiescing finds the token as soon as it looks for it. No
            // images exist, except for the stream of the pre-copy.
            State::Quiescing => {
                self.out.extend(self.pre_copies.then_some(O::DropImages));
                self.go(State::Waking, [O::WakeHere]);
            }
            State::Ending
            | State::Stopping
            | State::Settling
            | State::Standing
            | State::Closing
            | State::Dumping
            | State::Sending => {
                self.go(State::Continuing, [O::Continue]);
            }
            // Killing: the coordinator never gives both orders.
            State::Continuing | State::Waking | State::Killing | State::Done => {}
        }
    }

    /// Requests to discard the pre-copied memory. Harmless if it was discarded already.
    fn end_pre_copy(&mut self) {
        let takes_back = self.pre_copies && !matches!(self.state, State::Killing | State::Done);
        self.out
            .extend(takes_back.then_some(SourceOutput::EndPreCopy));
    }

    fn ended(&mut self) {
        use SourceOutput as O;
        self.end_pre_copy();
        match self.state {
            // The exit was intended; [`SourceEvent::Gone`] reports it.
            State::Killing | State::Done => {}
            State::Continuing | State::Waking => {
                self.out.extend((!self.deposited).then_some(O::DropImages));
                self.go(State::Done, [O::Release, O::Done]);
            }
            State::Inspecting
            | State::Ready
            | State::PreCopying
            | State::Quiescing
            | State::Ending
            | State::Stopping
            | State::Settling
            | State::Standing
            | State::Closing
            | State::Dumping
            | State::Sending => {
                let report = Report::Failed {
                    step: self.step(),
                    why: Failure::TaskEnded,
                };
                let release = self.holds();
                self.go(State::Done, [O::Report(report), O::DropImages]);
                self.out.extend(release.then_some(O::Release));
                self.out.push_back(O::Done);
            }
        }
    }

    /// Returns the step in progress.
    fn step(&self) -> Step {
        match self.state {
            State::Inspecting => Step::Inspect,
            State::Ready => Step::Prepare,
            State::PreCopying => Step::PreCopy,
            State::Quiescing | State::Ending => Step::Quiesce,
            State::Stopping | State::Settling => Step::Stop,
            State::Standing | State::Closing | State::Dumping => Step::Dump,
            State::Sending | State::Continuing | State::Waking => Step::Transfer,
            State::Killing | State::Done => Step::KillSource,
        }
    }
}
