//! The end that a task leaves.

use sempa_proto::engine::Engine;
use sempa_proto::migration::{
    Cause, Failure, Move, Order, Refusal, Report, Step, TaskFacts, Usage,
};
use sempa_proto::suspend::Holds;
use sempa_proto::tasker::DumpReport;
use sempa_proto::{RequestId, Tid};
use std::collections::VecDeque;
use std::path::PathBuf;

/// What the source knows of a task that is to move.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Inspected {
    /// What it is and holds.
    pub facts: TaskFacts,
    /// For whom it stands still.
    pub suspended: Holds,
    /// Its memory could follow it, and that would be worth while.
    pub memory_can_follow: bool,
    /// A part of it could go ahead, and that would be worth while.
    pub can_pre_copy: bool,
}

/// What happens at the source.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceEvent {
    /// The coordinator's order.
    Order(Order),
    /// The answer to [`SourceOutput::Inspect`]: the tasker's, or the daemon's own refusal.
    Inspected(Result<Inspected, Refusal>),
    /// The tasker's answer to [`SourceOutput::PreCopy`].
    PreCopied(Result<u64, Failure>),
    /// The library has let go and its socket is closed.
    Quiesced,
    /// The tasker's answer to [`SourceOutput::Stop`].
    Stopped(Result<(), Failure>),
    /// The tasker's answer to [`SourceOutput::Dump`], or that to [`SourceOutput::Collect`]; or that to [`SourceOutput::Close`] when
    /// the task has to take something in before it can be written.
    Dumped(Result<DumpReport, Failure>),
    /// The images are at the target, or could not be sent.
    Sent(Result<(), Failure>),
    /// The tasker's answer to [`SourceOutput::Continue`].
    Continued,
    /// Nothing that the task has asked for is open any more ([`SourceOutput::Settle`]).
    Settled,
    /// The library has connected again.
    Reconnected,
    /// The tasker's answer to [`SourceOutput::KillMoved`]: what it had used.
    Gone(Usage),
    /// The task ended by itself or was killed.
    Ended,
}

/// What the source's daemon has to do.
#[derive(Clone, Debug, PartialEq)]
pub enum SourceOutput {
    /// Report to the coordinator.
    Report(Report),
    /// Ask the tasker what the task is.
    Inspect,
    /// Open the way on which the target will ask for memory.
    LendMemory,
    /// Have the tasker send memory of the running task ahead, on that way.
    PreCopy,
    /// What went ahead is of no use any more.
    EndPreCopy,
    /// From now on keep everything that comes for the task, in order.
    Hold,
    /// Tell the library to let go; it is to look for a token here (the daemon adds its own path) or at this path.
    Quiesce {
        /// The target's token; none when the task goes on here in any case.
        token: Option<PathBuf>,
    },
    /// For a checkpoint: say [`SourceEvent::Settled`] when everything that the task has asked for is answered, but for what
    /// it can ask again.
    Settle,
    /// For a checkpoint: say [`SourceEvent::Settled`] when of what the task has asked for nothing is open but these, and keep
    /// what is known of the task at that moment.
    Close {
        /// Requests by which it waits for others.
        open: Vec<RequestId>,
        /// Tasks whose ends are to be known here before.
        ended: Vec<Tid>,
    },
    /// For a checkpoint: copy the files into which the program has written its state to where images are; they are the task's
    /// images. [`SourceEvent::Dumped`] is the answer.
    Collect,
    /// For a checkpoint: put what is known of the task beside the images and bring them to the master; the directory is
    /// the daemon's from now on.
    Deposit,
    /// Have the program asked to end, so that it can be started again; [`SourceEvent::Stopped`] tells that it has ended, and
    /// that all that it has said is with its peers' daemons.
    End {
        /// By which way.
        engine: Engine,
    },
    /// Have the tasker stop the task.
    Stop,
    /// Have the tasker dump the task.
    Dump {
        /// Most of its memory stays, and is handed out when the target asks for it.
        memory_follows: bool,
    },
    /// Begin to send the images to the target while they are being written. What of them is there when the dump fails is of no
    /// use.
    SendAhead,
    /// Send the images to the target, or what of them was not sent ahead: they are complete.
    SendImages,
    /// Send the task's record to the target: all that is left of a task whose process has ended.
    SendRecord,
    /// Have the tasker let the task go on.
    Continue,
    /// Write the token that brings the library back to this daemon.
    WakeHere,
    /// Hand over what was kept, in order, and stop keeping.
    Release,
    /// Have the tasker kill and reap the stopped task.
    KillMoved,
    /// The task lives at the target: send what was kept there, with an end mark, and the task's record.
    HandOver,
    /// Stop sending and delete the images here.
    DropImages,
    /// Nothing is left to do: forget the move.
    Done,
}

impl SourceOutput {
    /// The step that begins with this.
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

/// Where the source stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Inspecting,
    Ready,
    /// Memory goes ahead; the task runs as ever.
    PreCopying,
    Quiescing,
    Stopping,
    /// It was asked to end, and is to be started again.
    Ending,
    /// For a checkpoint: it stands still, and what it has asked for is being answered.
    Settling,
    /// For a checkpoint: it stands still, or its process has ended and the next one has not begun.
    Standing,
    /// For a checkpoint: all tasks of the job stand still, and the last answers come in.
    Closing,
    Dumping,
    Sending,
    /// The move is off; the tasker is letting the task go on.
    Continuing,
    /// The move is off; waiting for the library to come back.
    Waking,
    Killing,
    Done,
}

/// One move as its source sees it.
#[derive(Debug)]
pub struct Source {
    of: Move,
    state: State,
    /// The task does not leave: its images are for a checkpoint.
    keeps: bool,
    /// For a checkpoint: by which way the task is written.
    engine: Engine,
    /// The images are deposited.
    deposited: bool,
    /// Most of the memory does not go with the images.
    memory_follows: bool,
    /// Memory goes or went ahead.
    pre_copies: bool,
    /// Where the target will wake it, until its library knows.
    token: PathBuf,
    out: VecDeque<SourceOutput>,
}

impl Source {
    /// The coordinator's first order, [`Order::Inspect`], has come.
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

    /// The move.
    pub fn of(&self) -> &Move {
        &self.of
    }

    /// True from the order to let go until the task is back or gone: everything for it has to be kept.
    pub fn holds(&self) -> bool {
        !matches!(
            self.state,
            State::Inspecting | State::Ready | State::PreCopying | State::Done
        )
    }

    /// True from the order to leave until the task is back or gone.
    pub fn leaves(&self) -> bool {
        self.holds() || self.state == State::PreCopying
    }

    /// True while the coordinator decides whether the task is suspended: from the report on it until the task is back or gone.
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

    /// True while the task was asked to end, to begin again.
    pub fn is_ending(&self) -> bool {
        self.state == State::Ending
    }

    /// True while the task stays and its library has not come back.
    pub fn is_waking(&self) -> bool {
        self.state == State::Waking
    }

    /// The next thing to do.
    pub fn poll(&mut self) -> Option<SourceOutput> {
        self.out.pop_front()
    }

    /// Takes an event. What does not fit the state belongs to a step that was given up and is ignored.
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

    /// Up to the moment at which the task is to let go.
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

    /// Reports a failure and waits for the coordinator to call the move off: it may be telling the target already.
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
            // The library may still be letting go: it finds the token as soon as it looks for it. The way on which memory went
            // ahead is all that there is of images.
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

    /// Also when nobody has to be told any more: it does no harm then.
    fn end_pre_copy(&mut self) {
        let takes_back = self.pre_copies && !matches!(self.state, State::Killing | State::Done);
        self.out
            .extend(takes_back.then_some(SourceOutput::EndPreCopy));
    }

    fn ended(&mut self) {
        use SourceOutput as O;
        self.end_pre_copy();
        match self.state {
            // Its end is what was wanted; Gone tells it.
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

    /// The step that is under way.
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
