//! Messages between daemons, over QUIC: control messages, and messages for tasks on the data
//! channel.
//!
//! Each channel keeps its order, except link frames of different pairs of tasks; there is no order
//! between the two channels. Items that must not overtake a task's own messages (its exit, replies,
//! notifications) therefore travel as [`DataMsg`].

use crate::engine::{Engine, LaunchInfo};
use crate::event::EventKind;
use crate::ids::{Epoch, HostId, Micros, MigrationId, RequestId, Tid};
use crate::message::Message;
use crate::migration::{Migration, MigrationOrder, Refusal, StepReport, TaskFacts, Verdict};
use crate::suspend::{self, Suspensions};
use crate::table::{HostTable, TaskInfo};
use crate::task::{
    ProcessHandoff, RedirectAddress, Reply, Request, RestartInfo, RmInfo, SendWatermark, Sink,
    SpawnRequest, ToTask, TracerInfo,
};
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Location of a task that has left its birth host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Location {
    pub tid: Tid,
    pub host: HostId,
    /// The host on which it ran before.
    pub from: HostId,
    /// Epoch of the decision; an older location never replaces a newer one.
    pub epoch: Epoch,
}

/// A request from one daemon to another. Requests that only the master can serve travel as
/// [`HostMsg::TaskRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum HostRequest {
    /// Lists the tasks of the host. → [`Reply::Tasks`]
    Tasks {
        /// Restricts the list to this task.
        task: Option<Tid>,
    },
    /// Starts tasks on the receiving host. → [`Reply::Spawned`]
    Exec {
        parent: Tid,
        /// The request; the host part of `place` is already resolved.
        request: SpawnRequest,
    },
    /// Checks whether the host is alive. → [`Reply::Done`]
    Ping,
    /// Checks whether a task is alive. → [`Reply::Done`] or [`Reply::Failed`]
    TaskStatus { tid: Tid },
    /// Sends a signal to a task. → [`Reply::Done`]
    Signal { tid: Tid, signal: i32 },
    /// Suspends or resumes a task. → [`Reply::Done`] or [`Reply::Failed`]
    Suspend(suspend::SuspendOrder),
    /// Asks whether a task is alive and, if not, how far it had sent. → [`HostReply::Watched`]
    Watch {
        tid: Tid,
        /// The task that requested the notification.
        watcher: Tid,
    },
    /// Inspects a task and checks whether it can migrate at all. → [`HostReply::Inspected`]
    Inspect { tid: Tid },
    /// Asks whether the host would accept such a task; nothing is prepared. → [`HostReply::Verdict`]
    Verdict { facts: TaskFacts },
    /// Lists the host's tasks and contexts, for a checkpoint or a restart. → [`HostReply::Inventory`]
    Inventory,
    /// From the master: asks the host to store a copy of a checkpoint. The copy is transferred like
    /// images, under this migration id. → [`Reply::Done`] or [`Reply::Failed`], then
    /// [`HostMsg::CopyStored`]
    StoreCopy {
        /// Id of the transfer.
        migration: MigrationId,
        /// Name of the checkpoint.
        checkpoint: String,
    },
    /// Assigns contexts again to tasks that are restarted from a checkpoint. → [`Reply::Done`]
    ReserveContexts(Vec<(i32, Tid)>),
    /// Reads the time of day. → [`Reply::Clock`]
    Clock,
    /// Releases a context. → [`Reply::Done`] or [`Reply::Failed`]
    FreeContext {
        /// Its owner, as far as the sender knows.
        owner: Tid,
        ctx: i32,
    },
}

/// A reply to a [`HostRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum HostReply {
    /// The same reply as to a task.
    Reply(Reply),
    /// The task has migrated; ask this host.
    MovedTo(HostId),
    /// The reply to [`HostRequest::Watch`].
    Watched {
        /// True if the task has ended or never existed.
        gone: bool,
        /// Position up to which it had sent to the watcher, if it sent anything.
        after: Option<SendWatermark>,
    },
    /// Reply to [`HostRequest::Inspect`]: the task's properties, or why it cannot migrate at all.
    Inspected(Result<TaskFacts, Refusal>),
    /// Reply to [`HostRequest::Verdict`], and the engine that would be used.
    Verdict(Verdict, Engine),
    /// The reply to [`HostRequest::Inventory`].
    Inventory {
        /// The tasks of the host.
        tasks: Vec<TaskInfo>,
        /// Contexts that the host has allocated, with their owners on any host.
        contexts: Vec<(i32, Tid)>,
    },
}

/// A message on the control channel.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum HostMsg {
    /// From the master: prepares the next host table. → [`HostMsg::TablePrepared`]
    PrepareTable {
        /// The table with its epoch.
        table: HostTable,
        /// Tasks that do not run on their birth host; only for hosts that are new in this table.
        locations: Vec<Location>,
        rm: Option<RmInfo>,
        /// Highest task number of the receiving host that occurs in a checkpoint; the host
        /// allocates only higher ones.
        reserved_ids_max: u32,
    },
    /// The table of this epoch is prepared.
    TablePrepared { epoch: Epoch },
    /// From the master: puts the prepared table of this epoch into force. → [`HostMsg::TableCommitted`]
    CommitTable { epoch: Epoch },
    /// The table of this epoch is in force on the sender.
    TableCommitted { epoch: Epoch },
    /// From the master: a task has a new location. → [`HostMsg::TaskLocationAck`]
    TaskLocation(Location),
    /// The sender knows the new location of a task.
    TaskLocationAck {
        tid: Tid,
        /// Epoch of the new location.
        epoch: Epoch,
    },
    /// From the master: end all tasks, then answer [`HostMsg::Leaving`] and wait for
    /// [`HostMsg::Shutdown`].
    Halt { why: String },
    /// The sender has no task left and leaves the virtual machine in an orderly way.
    Leaving { why: String },
    /// From the master: exit immediately.
    Shutdown,
    /// To the master: a task's request that only the master can serve. The reply goes to the task,
    /// wherever it runs.
    TaskRequest {
        tid: Tid,
        /// Id that the task chose.
        id: RequestId,
        request: Request,
    },
    /// A request to another daemon. → [`HostMsg::HostReply`]
    HostRequest {
        /// Chosen by the sender.
        id: RequestId,
        request: HostRequest,
    },
    /// The reply to [`HostMsg::HostRequest`].
    HostReply {
        /// Id of the request.
        id: RequestId,
        reply: HostReply,
    },
    /// A task's message to the receiving daemon.
    Message(Message),
    /// To the master: an entry for the event log.
    Event {
        /// Time of the event by the sender's clock.
        at: Micros,
        kind: EventKind,
    },
    /// To the master: output without a collector.
    TaskOutput { tid: Tid, bytes: Bytes },
    /// From the master: the resource manager of the virtual machine changed.
    Rm {
        /// The new one; `None`: there is none.
        rm: Option<RmInfo>,
    },
    /// From the master: the tracer of the virtual machine changed.
    Tracer {
        /// The new one; `None`: there is none.
        tracer: Option<TracerInfo>,
    },
    /// A task has left the virtual machine; its process continues.
    TaskLeft { tid: Tid },
    /// From the master: end the spawned tasks (`reset`).
    EndTasks {
        /// Tasks that must not be ended.
        except: Vec<Tid>,
    },
    /// From the master as migration coordinator: an order to the source or the target.
    MigrationOrder {
        migration: Migration,
        order: MigrationOrder,
    },
    /// To the master: a report of the source or the target.
    StepReport {
        migration: MigrationId,
        report: StepReport,
    },
    /// To the master: a request to suspend or resume a task that is migrating. →
    /// [`HostMsg::SuspendDecided`]
    SuspendMigrating {
        migration: MigrationId,
        /// Chosen by the sender.
        id: RequestId,
        order: suspend::SuspendOrder,
    },
    /// From the master as migration coordinator: the suspension state that is now in force,
    /// whatever the outcome of the migration.
    SuspendDecided {
        migration: MigrationId,
        /// The id of the request, copied from [`HostMsg::SuspendMoving`].
        id: RequestId,
        /// `None`: the task's daemon must decide again, because the migration is over or the task
        /// is at another location.
        suspensions: Option<Suspensions>,
    },
    /// To the master: the outcome of [`HostRequest::StoreCopy`].
    CopyStored {
        /// Id of the transfer.
        migration: MigrationId,
        /// Name of the checkpoint.
        checkpoint: String,
        /// Ok if the copy is in the store.
        result: Result<(), String>,
    },
    /// From the master: copies of these checkpoints are not needed any more.
    DropCopies {
        /// Names of the checkpoints.
        checkpoints: Vec<String>,
    },
    /// To the master: a signal that usually ends a task is being sent to this task on the sender's
    /// host. Precedes the task's exit.
    EndSignalSent { tid: Tid, signal: i32 },
}

/// An item that is waiting for a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum PendingItem {
    /// A link frame's body.
    Frame(Bytes),
    /// A control message of a daemon for the task.
    Control(ToTask),
}

/// The subject of one pending notification.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NotifySubject {
    /// The exit of this task.
    TaskExit(Tid),
    /// The loss of this host; host tid as the caller passed it.
    HostDelete(Tid),
    /// Hosts that join later.
    HostAdd {
        /// Messages left; negative: unlimited.
        count: i32,
    },
}

/// One pending notification of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingNotify {
    pub kind: NotifySubject,
    pub ctx: i32,
    pub tag: i32,
}

/// Everything that a daemon knows about a task. Transferred when the task migrates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskRecord {
    pub tid: Tid,
    /// A task, or raw −35 if the parent requested not to be known.
    pub parent: Tid,
    /// Name given to spawn.
    pub name: String,
    /// Bitwise combination of `TASK_*` values.
    pub flags: i32,
    /// Number by which the task claimed its tid.
    pub spawn_token: Option<i32>,
    pub output: Sink,
    pub trace: Sink,
    /// The resource manager to notify of its exit.
    pub rm: Option<Tid>,
    /// Send position of each link, as the task's daemons saw it.
    pub watermarks: Vec<SendWatermark>,
    /// Requests without a reply.
    pub requests: Vec<RequestId>,
    /// Those of `requests` that wait for other tasks without a time limit.
    pub untimed_requests: Vec<RequestId>,
    /// Information that its library still needs, if it was restored from a checkpoint.
    pub restart: Option<RestartInfo>,
    /// How it was started, if it permits engines other than CRIU.
    pub launch: Option<Box<LaunchInfo>>,
    /// Information that its next process needs about the previous one.
    pub handoff: Option<Box<ProcessHandoff>>,
    /// Pending notifications that the task requested.
    pub notifications: Vec<PendingNotify>,
    /// Address at which its quiesced library looks for a redirect.
    pub redirect_address: RedirectAddress,
    /// Hosts known at its previous location; the task is notified of hosts that joined since.
    pub known_hosts: Vec<HostId>,
    /// Epoch of the host table from which `hosts` is.
    pub hosts_epoch: Epoch,
}

/// State that a task's daemon had of it, stored next to its images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedTask {
    /// Value of [`CHECKPOINT_VERSION`](crate::checkpoint::CHECKPOINT_VERSION) when it was written.
    pub version: u16,
    pub record: TaskRecord,
    /// Items that were waiting for the task. For a task that wrote its own checkpoint, also the
    /// messages that its process had sent and partial messages that it had received.
    pub waiting: Vec<PendingItem>,
}

/// A message on the data channel: for a task on the receiving host, or about one.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum DataMsg {
    /// A link frame's body as the sending task wrote it.
    Frame(Bytes),
    /// A control message of a daemon for a task.
    Item { dst: Tid, item: ToTask },
    /// A task has ended. Its host sends this to all hosts, after everything that the task sent.
    Ended {
        /// The task that ended.
        dst: Tid,
        /// Send position of each link.
        watermarks: Vec<SendWatermark>,
    },
    /// To the source of a migration: everything that the sender has routed to the task's old
    /// location precedes this.
    RouteDrained {
        dst: Tid,
        /// Epoch of the new location.
        epoch: Epoch,
    },
    /// To the target of a migration: the task's record. It is sent twice; the complete one replaces
    /// the first.
    Record {
        dst: Tid,
        migration: MigrationId,
        record: Box<TaskRecord>,
        /// False while the task is still at the source.
        complete: bool,
    },
    /// To the target of a migration: an item that was waiting at the source. Items keep their
    /// order.
    Forwarded {
        dst: Tid,
        migration: MigrationId,
        item: PendingItem,
    },
    /// To the target of a migration: no more items wait at the source.
    ForwardedAll { dst: Tid, migration: MigrationId },
}
