//! Messages between daemons, over QUIC. The control channel carries [`HostMsg`]; the data channel
//! carries [`DataMsg`], messages for tasks.
//!
//! Each channel keeps the order of its messages, except link frames of different pairs of tasks.
//! There is no order between the two channels. Items that must not overtake a task's own messages
//! (its exit, replies, notifications) therefore travel as [`DataMsg`].

use crate::causal::{Mark, Past};
use crate::checkpoint::{CHECKPOINT_VERSION, CopyFailure};
use crate::engine::{Engine, LaunchInfo};
use crate::event::EventKind;
use crate::frame::{FrameError, decode_start, from_bytes};
use crate::ids::{Epoch, HostId, Micros, MigrationId, RequestId, Tid};
use crate::message::Message;
use crate::migration::{Migration, MigrationOrder, Refusal, StepReport, TaskFacts, Verdict};
use crate::suspend::{self, Suspensions};
use crate::table::{HostTable, TaskInfo};
use crate::task::{
    ProcessHandoff, RedirectAddress, Reply, Request, RestartInfo, RmInfo, SendWatermark, Sink,
    SpawnRequest, ToTask, TracerInfo,
};
use crate::vm_summary::VmSummary;
use bytes::Bytes;
use serde::{Deserialize, Serialize};

/// Location of a task that has left its birth host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Location {
    pub tid: Tid,
    pub host: HostId,
    /// The host on which the task ran before its last migration.
    pub previous_host: HostId,
    /// Epoch of the new location; an older location never replaces a newer one.
    pub epoch: Epoch,
}

/// A request from one daemon to another. Requests of tasks that only the master can serve travel as
/// [`HostMsg::TaskRequest`] instead.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum HostRequest {
    /// Lists the tasks of the receiving host. → [`Reply::Tasks`]
    Tasks {
        /// Restricts the list to this task.
        task: Option<Tid>,
    },
    /// Starts tasks on the receiving host. → [`Reply::Spawned`]
    Exec {
        parent: Tid,
        /// The spawn request; the host part of its `where_arg` is already resolved.
        request: SpawnRequest,
    },
    /// Checks whether the receiving daemon is alive. → [`Reply::Done`]
    Ping,
    /// Checks whether a task is alive. → [`Reply::Done`] or [`Reply::Failed`]
    TaskStatus { tid: Tid },
    /// Sends a signal to a task. → [`Reply::Done`]
    Signal { tid: Tid, signal: i32 },
    /// Sends a signal to a task after the messages that these marks name have arrived there. →
    /// [`Reply::Done`]
    SignalAfter {
        tid: Tid,
        signal: i32,
        marks: Vec<Mark>,
    },
    /// Suspends or resumes a task. → [`Reply::Done`] or [`Reply::Failed`]
    Suspend(suspend::SuspendOrder),
    /// Asks whether a task is alive. If the task has ended, a [`DataMsg::TaskEnded`] follows all
    /// that was sent for the task; only a reply within one host reports the end itself. →
    /// [`HostReply::Watched`]
    Watch {
        tid: Tid,
        /// The task that requested the notification.
        watcher: Tid,
    },
    /// Inspects a task: requests its properties, or the reason why no host could accept the task. →
    /// [`HostReply::Inspected`]
    Inspect { tid: Tid },
    /// Asks whether the host would accept a task with these properties; nothing is prepared. →
    /// [`HostReply::Verdict`]
    Verdict { facts: TaskFacts },
    /// Lists the host's tasks and contexts, for a checkpoint or a restart. →
    /// [`HostReply::Inventory`]
    Inventory,
    /// From the master: asks the host to store a copy of a checkpoint. The copy is transferred like
    /// the images of a migration. → [`Reply::Done`] or [`Reply::Failed`], then
    /// [`HostMsg::CopyStored`]
    StoreCopy {
        /// Id of the transfer; taken from the same numbers as migrations.
        migration: MigrationId,
        /// Name of the checkpoint.
        checkpoint: String,
    },
    /// Assigns contexts to the tasks that owned them before a restart from a checkpoint. →
    /// [`Reply::Done`]
    ReserveContexts(Vec<(i32, Tid)>),
    /// Reads the time of day. → [`Reply::Clock`]
    Clock,
    /// Releases a context. → [`Reply::Done`] or [`Reply::Failed`]
    FreeContext {
        /// The context's owner, as far as the sender knows.
        owner: Tid,
        ctx: i32,
    },
    /// Describes the state of the host. → [`Reply::HostReport`]
    Describe {
        /// True to include the resources that each task has used.
        with_tasks: bool,
    },
}

/// A reply to a [`HostRequest`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum HostReply {
    /// A reply in the form that tasks receive.
    Reply(Reply),
    /// The task has migrated to the given host; the requester must send the request to that host.
    MigratedTo(HostId),
    /// The reply to [`HostRequest::Watch`].
    Watched {
        /// True if the task has ended or never existed, and no [`DataMsg::TaskEnded`] reports it.
        has_ended: bool,
        /// Position up to which the task had sent to the watcher; `None` if the task sent nothing.
        watermark: Option<SendWatermark>,
    },
    /// Reply to [`HostRequest::Inspect`]: the task's properties, or the reason why the task cannot
    /// migrate to any host.
    Inspected(Result<TaskFacts, Refusal>),
    /// Reply to [`HostRequest::Verdict`]: the verdict, and the engine that a migration would use if
    /// the verdict accepts the task.
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
        /// Locations of the tasks that do not run on their birth host; filled only for hosts that
        /// are new in this table.
        locations: Vec<Location>,
        rm: Option<RmInfo>,
        /// Highest local task number of the receiving host in any checkpoint; the host allocates
        /// only higher numbers.
        reserved_local_max: u32,
    },
    /// The sender has prepared the table of this epoch.
    TablePrepared { epoch: Epoch },
    /// From the master: puts the prepared table of this epoch into force. →
    /// [`HostMsg::TableCommitted`]
    CommitTable { epoch: Epoch },
    /// The table of this epoch is in force on the sender.
    TableCommitted { epoch: Epoch },
    /// From the master: a task has a new location. → [`HostMsg::TaskLocationAck`]
    TaskLocation(Location),
    /// Confirms that the sender has recorded a task's new location.
    TaskLocationAck {
        tid: Tid,
        /// Epoch of the new location.
        epoch: Epoch,
    },
    /// From the master: end all tasks, then answer [`HostMsg::Leaving`] and wait for
    /// [`HostMsg::Shutdown`].
    Halt { reason: String },
    /// The sender has no tasks left and leaves the virtual machine.
    Leaving { reason: String },
    /// From the master: exit immediately.
    Shutdown,
    /// To the master: a task's request that only the master can serve. The master sends the reply
    /// to the task, wherever the task runs.
    TaskRequest {
        tid: Tid,
        /// Id that the task chose for the request.
        id: RequestId,
        request: Request,
    },
    /// A request to another daemon. → [`HostMsg::HostReply`]
    HostRequest {
        /// Id that the sender chose; the reply has the same id.
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
    Message {
        message: Message,
        /// The past with which tasks begin that the message starts; empty for other messages.
        past: Past,
    },
    /// To the master: an event for the event log.
    Event {
        /// Time of the event by the sender's clock.
        at: Micros,
        kind: EventKind,
    },
    /// To the master: output of a task that has no other destination. The master writes the output
    /// to the master's log.
    TaskOutput { tid: Tid, bytes: Bytes },
    /// From the master: the resource manager of the virtual machine changed.
    Rm {
        /// The new resource manager; `None` if the virtual machine has none now.
        rm: Option<RmInfo>,
    },
    /// From the master: the tracer of the virtual machine changed.
    Tracer {
        /// The new tracer; `None` if the virtual machine has none now.
        tracer: Option<TracerInfo>,
    },
    /// A task has left the virtual machine; the task's process continues.
    TaskLeft { tid: Tid },
    /// From the master: end the spawned tasks, because a user requested `reset`.
    EndTasks {
        /// Tasks that must not be ended.
        exempt_tasks: Vec<Tid>,
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
        /// Id that the sender chose; the reply has the same id.
        id: RequestId,
        order: suspend::SuspendOrder,
    },
    /// From the master as migration coordinator: the suspensions of a task after a
    /// [`HostMsg::SuspendMigrating`]. These suspensions are in force whatever the outcome of the
    /// migration.
    SuspendDecided {
        migration: MigrationId,
        /// The id of the [`HostMsg::SuspendMigrating`] that is answered.
        id: RequestId,
        /// The suspensions in force. `None` if the task's daemon must decide itself, because the
        /// migration is over or the task is at another location.
        suspensions: Option<Suspensions>,
    },
    /// To the master: the outcome of [`HostRequest::StoreCopy`].
    CopyStored {
        /// Id of the transfer.
        migration: MigrationId,
        /// Name of the checkpoint.
        checkpoint: String,
        /// Ok if the copy is in the store.
        result: Result<(), CopyFailure>,
    },
    /// From the master: copies of these checkpoints are not needed any more.
    DropCopies {
        /// Names of the checkpoints.
        checkpoints: Vec<String>,
    },
    /// To the master: the sender's host sends a task a signal that usually ends the task. This
    /// message precedes the notification of the task's exit.
    EndSignalSent { tid: Tid, signal: i32 },
    /// To the master: the sender's loop runs. → [`HostMsg::HeartbeatAck`]
    Heartbeat {
        /// Number that the sender chose; ascending.
        number: u64,
    },
    /// From the master: the heartbeat with this number has arrived. The tasks of the host may run
    /// for a part of the lease, counted from the sending of the heartbeat ([`crate::lease`]).
    HeartbeatAck { number: u64 },
    /// Kill what this ended task has left behind on the receiver's host.
    KillLeftovers { tid: Tid },
    /// To the master: the past of a task's next request, as in [`crate::task::ToDaemon::Past`].
    TaskPast {
        tid: Tid,
        clock: u64,
        marks: Option<Vec<Mark>>,
    },
    /// From the master: the state of the virtual machine, for the case that the master is lost.
    Summary(Box<VmSummary>),
}

/// An item that a daemon retains until the item can be sent to its task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum PendingItem {
    /// The body of a link frame.
    Frame(Bytes),
    /// A control message of a daemon for the task.
    Control(ToTask),
}

/// The subject of one pending notification.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NotifySubject {
    /// The exit of the task with this tid.
    TaskExit(Tid),
    /// The loss of the host with this host tid, in the form in which the caller passed it.
    HostDelete(Tid),
    /// Hosts that join later.
    HostAdd {
        /// Number of notifications still to send; negative if unlimited.
        remaining_messages: i32,
    },
}

/// One pending notification of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PendingNotification {
    pub subject: NotifySubject,
    pub ctx: i32,
    pub tag: i32,
}

/// Everything that a daemon stores about a task. Transferred to the target when the task migrates.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskRecord {
    pub tid: Tid,
    /// Tid of the parent; raw value −35 if the parent requested not to be known.
    pub parent: Tid,
    /// Program name from the spawn request.
    pub name: String,
    /// Bitwise combination of `TASK_*` values.
    pub flags: i32,
    /// Spawn token with which the task's process claimed its tid; `None` for a task that was not
    /// spawned.
    pub spawn_token: Option<i32>,
    pub output_sink: Sink,
    pub trace_sink: Sink,
    /// The resource manager that is notified of the task's exit.
    pub exit_rm: Option<Tid>,
    /// Position up to which the task has sent on each link, as far as its daemons know.
    pub watermarks: Vec<SendWatermark>,
    /// Requests of the task that have no reply yet.
    pub open_requests: Vec<RequestId>,
    /// The requests of `open_requests` that wait for other tasks without a time limit.
    pub untimed_requests: Vec<RequestId>,
    /// Set if the task was restored from a checkpoint and its library has not yet received the
    /// [`RestartInfo`].
    pub restart_info: Option<RestartInfo>,
    /// How the task was started; set if engines other than CRIU are permitted.
    pub launch: Option<Box<LaunchInfo>>,
    /// Set if the task's process exits to be replaced: information for the next process.
    pub handoff: Option<Box<ProcessHandoff>>,
    /// Pending notifications that the task requested.
    pub notifications: Vec<PendingNotification>,
    /// Address in the task's memory at which its quiesced library looks for a redirect.
    pub redirect_address: RedirectAddress,
    /// Hosts that the daemon at the task's previous location knew. After the migration the task is
    /// notified of hosts that have joined since.
    pub known_hosts: Vec<HostId>,
    /// Epoch of the host table that contains `known_hosts`.
    pub hosts_epoch: Epoch,
    /// Process id of the task in its own PID namespace, which is the same on all hosts.
    pub namespace_pid: i32,
}

/// State of a task that a daemon stores in a checkpoint, in addition to the task's images.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SavedTask {
    /// Value of [`crate::checkpoint::CHECKPOINT_VERSION`] in the program that wrote the checkpoint.
    pub version: u16,
    pub record: TaskRecord,
    /// Items that were waiting for the task. For a task that wrote its own checkpoint, also the
    /// messages that its process had sent and the partial messages that it had received.
    pub waiting_items: Vec<PendingItem>,
}

impl SavedTask {
    /// Decodes the state of a task.
    ///
    /// # Errors
    /// Another version wrote the state, or it cannot be decoded.
    pub fn decode(bytes: &[u8]) -> Result<Self, SavedTaskError> {
        let version: u16 = decode_start(bytes).map_err(SavedTaskError::Decode)?;
        if version != CHECKPOINT_VERSION {
            return Err(SavedTaskError::OtherVersion(version));
        }
        from_bytes(bytes).map_err(SavedTaskError::Decode)
    }
}

/// The reason why the stored state of a task cannot be used.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum SavedTaskError {
    /// Another version wrote it, so the rest of it may have another format.
    #[error(
        "it was written with checkpoint format {0}, and this version uses {CHECKPOINT_VERSION}"
    )]
    OtherVersion(u16),
    /// It has the format of this version, and cannot be decoded.
    #[error(transparent)]
    Decode(FrameError),
}

/// A message on the data channel, for a task on the receiving host or about a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum DataMsg {
    /// The body of a link frame, as the sending task wrote it.
    Frame(Bytes),
    /// A control message of a daemon for a task.
    ControlItem { dst: Tid, item: ToTask },
    /// A task has ended. The task's host sends this message to all hosts, after everything that the
    /// task sent.
    TaskEnded {
        /// The task that ended.
        tid: Tid,
        /// Position up to which the ended task had sent on each link.
        watermarks: Vec<SendWatermark>,
        /// Clock of the ended task, as far as its daemon knows, and the messages in its past that
        /// are in transit.
        past: Past,
    },
    /// To the source of a migration: no more frames from the sender will arrive at the source for
    /// the migrated task. Everything that the sender had routed to the source precedes this
    /// message.
    RouteDrained {
        dst: Tid,
        /// Epoch of the new location.
        epoch: Epoch,
    },
    /// To the target of a migration: the task's record. The record is sent twice: first while the
    /// task is still at the source, then in its final state. The second record replaces the first.
    Record {
        dst: Tid,
        migration: MigrationId,
        record: Box<TaskRecord>,
        /// False for the first record, true for the final record.
        is_final: bool,
    },
    /// To the target of a migration: an item that was waiting at the source. The items are sent in
    /// their original order.
    Forwarded {
        dst: Tid,
        migration: MigrationId,
        item: PendingItem,
    },
    /// To the target of a migration: no more items wait at the source.
    ForwardingComplete { dst: Tid, migration: MigrationId },
}
