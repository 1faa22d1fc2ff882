//! Messages between daemons, over QUIC: control messages, and what is carried for tasks on the data channel.
//!
//! Each channel keeps its order, but for link frames of different pairs of tasks; between the two nothing is promised. What
//! must not overtake a task's own messages (its end, replies, notifications) therefore travels as [`Carried`].

use crate::engine::{Begin, Engine};
use crate::event::EventKind;
use crate::ids::{Epoch, HostId, Micros, MigrationId, RequestId, Tid};
use crate::message::Message;
use crate::migration::{Move, Order, Refusal, Report, TaskFacts, Verdict};
use crate::suspend::{self, Holds};
use crate::table::{HostTable, TaskInfo};
use crate::task::{
    LinkMark, RedirectAt, Reply, Request, Restart, RmInfo, Sink, SpawnRequest, Successor, ToTask,
    TracerInfo,
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Where a task runs that has left its birth host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Location {
    /// The task.
    pub tid: Tid,
    /// Where it runs.
    pub host: HostId,
    /// Where it ran before.
    pub from: HostId,
    /// When it was decided; an older one never replaces a newer one.
    pub epoch: Epoch,
}

/// What one daemon asks another one. Questions that only the master can answer travel as [`HostMsg::Request`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Question {
    /// The tasks of the host, or only this one. → [`Reply::Tasks`]
    Tasks {
        /// Only this one.
        only: Option<Tid>,
    },
    /// Start tasks here. → [`Reply::Spawned`]
    Exec {
        /// Their parent.
        parent: Tid,
        /// What; the host part of `place` has been dealt with.
        request: SpawnRequest,
    },
    /// Is this host alive? → [`Reply::Done`]
    Ping,
    /// Is this task alive? → [`Reply::Done`] or [`Reply::Failed`]
    TaskStatus {
        /// The task.
        tid: Tid,
    },
    /// Send a signal. → [`Reply::Done`]
    Signal {
        /// The task.
        tid: Tid,
        /// Signal number.
        signal: i32,
    },
    /// Suspend a task, or let it go on. → [`Reply::Done`] or [`Reply::Failed`]
    Suspend(suspend::Order),
    /// Is this task alive, and if not, how far had it sent? → [`Answer::Watched`]
    Watch {
        /// The task.
        tid: Tid,
        /// Who wants to know.
        watcher: Tid,
    },
    /// What is this task, and could it move at all? → [`Answer::Facts`]
    Facts {
        /// The task.
        tid: Tid,
    },
    /// Would this host take such a task? Nothing is made ready. → [`Answer::Verdict`]
    Verdict {
        /// What it is.
        facts: TaskFacts,
    },
    /// What tasks are there, and what belongs to them? For a checkpoint or a restart. → [`Answer::Count`]
    Count,
    /// Master: would this host keep a copy of a set in its store? It comes as images do, under this number. → [`Reply::Done`] or
    /// [`Reply::Failed`], then [`HostMsg::CopyKept`]
    KeepCopy {
        /// The transfer.
        migration: MigrationId,
        /// Name of the set.
        set: String,
    },
    /// These contexts belong to tasks again that are started from a checkpoint.
    /// → [`Reply::Done`]
    HoldContexts(Vec<(i32, Tid)>),
    /// Time of day. → [`Reply::Clock`]
    Clock,
    /// → [`Reply::Done`] or [`Reply::Failed`]
    FreeContext {
        /// Its owner, as far as the asker knows.
        owner: Tid,
        /// The context.
        ctx: i32,
    },
}

/// What is answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Answer {
    /// As to a task.
    Reply(Reply),
    /// The task in question has moved on; ask there.
    Elsewhere(HostId),
    /// To [`Question::Watch`].
    Watched {
        /// True when the task has ended, or never was.
        gone: bool,
        /// How far it had sent to the watcher, if anything.
        after: Option<LinkMark>,
    },
    /// To [`Question::Facts`]: what it is, or why it cannot move at all.
    Facts(Result<TaskFacts, Refusal>),
    /// To [`Question::Verdict`], and by which way the task would come.
    Verdict(Verdict, Engine),
    /// To [`Question::Count`].
    Count {
        /// The tasks of the host.
        tasks: Vec<TaskInfo>,
        /// Contexts that it has given out, with their owners, wherever these are.
        contexts: Vec<(i32, Tid)>,
    },
}

/// On the control channel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum HostMsg {
    /// Master: this is the next host table. → [`HostMsg::Prepared`]
    Prepare {
        /// The table, with its epoch.
        table: HostTable,
        /// Tasks that do not run on their birth host; only for hosts that are new in this table.
        locations: Vec<Location>,
        /// The resource manager of the virtual machine.
        rm: Option<RmInfo>,
        /// Tasks in checkpoints have numbers up to this on the receiving host; it gives out higher ones.
        spared: u32,
    },
    /// The table of this epoch has been understood.
    Prepared {
        /// Its epoch.
        epoch: Epoch,
    },
    /// Master: the table that was prepared under this epoch is in force. → [`HostMsg::Committed`]
    Commit {
        /// Its epoch.
        epoch: Epoch,
    },
    /// The table of this epoch is in force here.
    Committed {
        /// Its epoch.
        epoch: Epoch,
    },
    /// Master: a task runs elsewhere now. → [`HostMsg::LocatedAck`]
    Located(Location),
    /// The new place of a task is known here.
    LocatedAck {
        /// The task.
        tid: Tid,
        /// The epoch of the order.
        epoch: Epoch,
    },
    /// Master: end all tasks here, then answer [`HostMsg::Leaving`] and wait for [`HostMsg::Shutdown`].
    Halt {
        /// Why.
        why: String,
    },
    /// The sender has no task left and leaves the virtual machine in good order.
    Leaving {
        /// Why.
        why: String,
    },
    /// Master: end now.
    Shutdown,
    /// To the master: a task's request that only the master can serve. The reply goes to the task, wherever it is.
    Request {
        /// The task.
        tid: Tid,
        /// Its request.
        id: RequestId,
        /// What.
        what: Request,
    },
    /// A question. → [`HostMsg::Answer`]
    Ask {
        /// Chosen by the asker.
        id: RequestId,
        /// What.
        question: Question,
    },
    /// The answer to [`HostMsg::Ask`].
    Answer {
        /// The question.
        id: RequestId,
        /// The answer.
        answer: Answer,
    },
    /// A task's message to the receiving daemon.
    Message(Message),
    /// To the master: for the event log.
    Event {
        /// When it happened, by the sender's clock.
        at: Micros,
        /// What.
        kind: EventKind,
    },
    /// To the master: output that nobody collects.
    TaskOutput {
        /// The task.
        tid: Tid,
        /// The bytes.
        bytes: Bytes,
    },
    /// Master: the resource manager of the virtual machine changed.
    Rm {
        /// The new one.
        rm: Option<RmInfo>,
    },
    /// Master: the tracer of the virtual machine changed.
    Tracer {
        /// The new one.
        tracer: Option<TracerInfo>,
    },
    /// A task has left the virtual machine; its process lives on.
    Left {
        /// The task.
        tid: Tid,
    },
    /// Master: end the spawned tasks, but for these (`reset`).
    EndTasks {
        /// Tasks to spare.
        spare: Vec<Tid>,
    },
    /// Master, as coordinator of moves: an order to one end.
    Order {
        /// The move.
        of: Move,
        /// The order.
        order: Order,
    },
    /// To the master: a report of one end.
    Report {
        /// The move.
        migration: MigrationId,
        /// The report.
        report: Report,
    },
    /// To the master: somebody wants a task suspended, or to go on, that is changing hosts. → [`HostMsg::SuspendDecided`]
    SuspendMoving {
        /// The move.
        migration: MigrationId,
        /// Chosen by the sender.
        id: RequestId,
        /// What is wanted.
        order: suspend::Order,
    },
    /// Master, as coordinator of moves: what holds by now, whatever becomes of the move.
    SuspendDecided {
        /// The move.
        migration: MigrationId,
        /// To what.
        id: RequestId,
        /// `None`: the task's daemon decides again, because the move is over, or its place is another one by now.
        suspended: Option<Holds>,
    },
    /// To the master: what has become of [`Question::KeepCopy`].
    CopyKept {
        /// The transfer.
        migration: MigrationId,
        /// Name of the set.
        set: String,
        /// Whether it is in the store, or why not.
        result: Result<(), String>,
    },
    /// Master: the copies of these sets are not needed any more.
    DropCopies {
        /// Their names.
        sets: Vec<String>,
    },
    /// To the master: somebody sends this task, which is here, a signal of which tasks end. Comes before the end.
    ToldToEnd {
        /// The task.
        tid: Tid,
        /// The signal.
        signal: i32,
    },
}

/// Something that waited for a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Held {
    /// A link frame's body.
    Link(Bytes),
    /// What a daemon has for the task.
    Item(ToTask),
}

/// What a notification request waits for, one entry each.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum WatchKind {
    /// The end of this task.
    TaskExit(Tid),
    /// The loss of this host, as given by the caller.
    HostDelete(Tid),
    /// Hosts that join; so many messages, negative without end.
    HostAdd {
        /// Messages left.
        count: i32,
    },
}

/// One pending notification of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watch {
    /// For what.
    pub kind: WatchKind,
    /// Context of the message.
    pub ctx: i32,
    /// Tag of the message.
    pub tag: i32,
}

/// All that a daemon knows about a task; goes with it when it moves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskRecord {
    /// The task.
    pub tid: Tid,
    /// Its parent, or raw −35.
    pub parent: Tid,
    /// Name as given to spawn.
    pub name: String,
    /// `TASK_*` bits.
    pub flags: i32,
    /// The number by which it claimed its tid.
    pub epid: Option<i32>,
    /// Where its output goes.
    pub output: Sink,
    /// Where its trace records go.
    pub trace: Sink,
    /// The resource manager that is told of its end.
    pub rm: Option<Tid>,
    /// How far each of its links has sent, as its daemons saw it.
    pub marks: Vec<LinkMark>,
    /// Requests without a reply so far.
    pub requests: Vec<RequestId>,
    /// Those of them by which it waits for others, for as long as that takes.
    pub meetings: Vec<RequestId>,
    /// What its library does not know yet, if it was started again from a checkpoint.
    pub restart: Option<Restart>,
    /// How it was started, if it wants to be taken elsewhere by other ways than CRIU.
    pub begin: Option<Box<Begin>>,
    /// What its next process has to know of the one before.
    pub successor: Option<Box<Successor>>,
    /// Its notifications.
    pub watches: Vec<Watch>,
    /// Where its library looks for news while it has let go.
    pub redirect_at: RedirectAt,
    /// Hosts that its host knew, so that those which joined meanwhile are told.
    pub hosts: Vec<HostId>,
    /// Epoch of the host table they are from.
    pub epoch: Epoch,
}

/// On the data channel: for a task on the receiving host, or about one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Carried {
    /// A link frame's body as it came from the sending task.
    Link(Bytes),
    /// What a daemon has for a task.
    Item {
        /// The task.
        dst: Tid,
        /// What.
        item: ToTask,
    },
    /// A task has ended. Sent by its host to all hosts, behind everything that the task sent.
    Ended {
        /// The task that ended.
        dst: Tid,
        /// How far each of its links had sent.
        marks: Vec<LinkMark>,
    },
    /// To the source of a move: what the sender had for the task under its old place is on its way in front of this.
    Passed {
        /// The task.
        dst: Tid,
        /// Epoch of the new place.
        epoch: Epoch,
    },
    /// To the target of a move: what the task is. It comes twice; the one that counts is complete.
    Record {
        /// The task.
        dst: Tid,
        /// The move.
        migration: MigrationId,
        /// The record.
        record: Box<TaskRecord>,
        /// False while the task is still at the source.
        complete: bool,
    },
    /// To the target of a move: something that waited at the source, in order.
    Handed {
        /// The task.
        dst: Tid,
        /// The move.
        migration: MigrationId,
        /// What waited.
        held: Held,
    },
    /// To the target of a move: nothing more waits at the source.
    HandedAll {
        /// The task.
        dst: Tid,
        /// The move.
        migration: MigrationId,
    },
}
