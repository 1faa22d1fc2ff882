//! Control messages between a task's library and the daemon of its host, over a Unix stream socket.
//!
//! The task's first frame is [`ToDaemon::Hello`]; the daemon answers [`ToTask::Welcome`] or
//! [`ToTask::Refused`]. Afterwards task and daemon may send control frames and link frames
//! ([`crate::link`]) at any time. The socket is reliable, so control messages are not numbered.
//! Each request has an id, because replies may arrive in any order. After a migration, the daemon
//! of another host sends the replies.

pub use crate::spawn::{
    LeasedSpawn, SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_DEBUG, SPAWN_HOST, SPAWN_NO_PARENT,
    SPAWN_PINNED, SPAWN_STRICT_DIR, Sink, SpawnRequest,
};

use crate::causal::{Mark, Past};
use crate::checkpoint::{
    CheckpointEntry, CheckpointFailure, CheckpointReport, CheckpointSchedule, RemovalResults,
    RemovalSelection, RestartFailure, RestartReport, StoreFailure,
};
use crate::engine::Engine;
use crate::error::PvmError;
use crate::event::{Event, EventKind};
use crate::group::{GroupReply, GroupRequest};
use crate::ids::{HostId, Micros, MigrationId, RequestId, Tid};
use crate::link::LinkState;
use crate::message::Message;
use crate::migration::{Failure, MigrationTargets, Refusal, RestartGroup, Step};
use crate::route::RouteMsg;
use crate::table::{AddedHost, HostReport, HostTable, TaskInfo};
use crate::tasker::{EngineUnavailable, FreezerUnavailable};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::PathBuf;

/// First bytes of a [`Hello`]. They distinguish a task from other programs that connect to the
/// socket.
pub const TASK_MAGIC: [u8; 4] = *b"SMPT";

/// Maximum number of unanswered requests of a task; the daemon refuses more with
/// [`PvmError::OutOfRes`].
pub const OPEN_REQUESTS_MAX: usize = 4096;
/// Maximum size in bytes of each name, pattern and host-file line that a task may send.
pub const TEXT_FIELD_BYTES_MAX: usize = 64 << 10;

/// File status flag (`O_APPEND`) with which a task's library marks its sockets to the daemon and to
/// other tasks. The flag has no effect on a socket. By the flag, the inspection before a migration
/// recognizes the sockets that the library will close, and a forked child recognizes the library's
/// sockets.
pub const LIBRARY_SOCKET_FLAG: i32 = 0o2000;

/// Number by which a spawned process claims its tid (environment variable `PVMEPID`); always
/// positive.
pub type SpawnToken = i32;

/// Sequence number up to which a task has sent to one peer. A library delivers a notification that
/// has a watermark only after it has received all messages below this number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendWatermark {
    pub peer: Tid,
    /// Sequence number of the last fragment sent to the peer, plus one.
    pub end_seq: u64,
}

/// The identity that a connecting process claims.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Claim {
    /// Tests whether a daemon is running. A running daemon refuses the connection; a daemon that is
    /// exiting sends no answer.
    DaemonTest,
    /// A process that the virtual machine did not start.
    NotSpawned,
    /// A process that the daemon started.
    Spawned {
        /// The spawn token from the environment of the process.
        spawn_token: SpawnToken,
    },
    /// A task that closed its daemon connection for a migration. The task may be on the same host
    /// as before or on another host.
    Resume { tid: Tid, migration: MigrationId },
}

/// Effect of the daemon's exit on a task that was started from a command line. A task that a daemon
/// or a tasker started always ends when its daemon exits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnDaemonExit {
    /// The daemon sends SIGTERM, as PVM does. Programs written for PVM expect this signal.
    #[default]
    Terminate,
    /// No signal is sent; subsequent PVM calls return `PvmSysErr`. Suits a process that also has
    /// work outside the virtual machine.
    FailCalls,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Must be equal to [`TASK_MAGIC`].
    pub magic: [u8; 4],
    /// Must be equal to [`crate::WIRE_VERSION`].
    pub version: u16,
    pub claim: Claim,
    /// Process id of the connecting process, in its own PID namespace.
    pub namespace_pid: i32,
    pub program: String,
    /// Behavior of the task when the daemon exits.
    pub on_daemon_exit: OnDaemonExit,
}

/// The subjects of a notification request (`pvm_notify`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NotifySubjects {
    /// Requests one message for each of these tasks, when the task ends.
    TaskExit(Vec<Tid>),
    /// Requests one message for each of these hosts, when the host leaves the virtual machine. The
    /// host tids are stored exactly as the caller passed them.
    HostDelete(Vec<Tid>),
    /// Requests a message each time hosts join the virtual machine.
    HostAdd {
        /// Maximum number of messages; −1: unlimited, 0: cancels the request.
        messages_max: i32,
    },
}

/// A request of `pvm_notify`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotifyRequest {
    pub subjects: NotifySubjects,
    pub ctx: i32,
    pub tag: i32,
    /// True to cancel an earlier request with the same subjects, context and tag.
    pub is_cancellation: bool,
}

/// An operation on the mailbox of the virtual machine (`pvm_putinfo` and related calls).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MailboxRequest {
    Put {
        name: String,
        /// Bitwise combination of `PvmMbox*` values.
        flags: i32,
        message: Message,
    },
    Take {
        name: String,
        index: i32,
        /// Bitwise combination of `PvmMbox*` values.
        flags: i32,
    },
    Delete {
        name: String,
        index: i32,
    },
    /// Removes persistent entries that have no owner.
    Clean {
        /// Class whose entries are removed; empty for all classes.
        name: String,
        /// If set, only the entry with this index is removed.
        index: Option<i32>,
    },
    /// Lists the classes that match a pattern.
    List {
        /// Pattern; empty for all classes.
        pattern: String,
    },
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailboxClass {
    pub name: String,
    /// Index, owner and flags of each entry.
    pub entries: Vec<(i32, Tid, i32)>,
}

/// The kinds of requests that a resource manager serves; the daemon serves all other requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RmServices {
    /// Placement of spawns (`SM_SPAWN`).
    pub placement: bool,
    /// The requests `SM_CONFIG`, `SM_ADDHOST`, `SM_DELHOST`, `SM_TASK` and `SM_NOTIFY`.
    pub vm_requests: bool,
    /// Notifications of the exits of the resource manager's tasks (`SM_TASKX`). A resource manager
    /// that reads the event log does not need these notifications.
    pub task_exits: bool,
}

/// The resource manager to which a task must send its requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RmInfo {
    pub tid: Tid,
    pub services: RmServices,
}

/// A service that a task provides in place of its daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Service {
    /// Starts daemons on other hosts (`pvm_reg_hoster`); available only to a task on the master's
    /// host.
    Hoster,
    /// Starts tasks on its host (`pvm_reg_tasker`).
    Tasker,
}

/// Settings of a tracer (`pvm_reg_tracer`). These settings apply to tasks that have no other
/// destination for output and trace records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracerSettings {
    pub trace_ctx: i32,
    pub trace_tag: i32,
    pub out_ctx: i32,
    pub out_tag: i32,
    /// Traced events, encoded as in `PVMTMASK`.
    pub event_mask: Vec<u8>,
    /// Number of bytes that a task buffers before it sends trace records.
    pub buffer_bytes: i32,
    /// One of the `PvmTrace*` values.
    pub trace_option: i32,
}

/// The tracer of the virtual machine, and the settings with which the tracer was registered.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracerInfo {
    pub tid: Tid,
    pub settings: TracerSettings,
}

impl TracerInfo {
    pub fn trace_sink(&self) -> Sink {
        Sink {
            tid: self.tid,
            ctx: self.settings.trace_ctx,
            tag: self.settings.trace_tag,
        }
    }

    pub fn output_sink(&self) -> Sink {
        Sink {
            tid: self.tid,
            ctx: self.settings.out_ctx,
            tag: self.settings.out_tag,
        }
    }
}

/// Maximum number of integers in one `pvm_tickle` request.
pub const DEBUG_QUERY_INTS_MAX: usize = 10;

/// A request of a task to its daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// Leaves the virtual machine (`pvm_exit`). Everything that the task has sent precedes this
    /// request on the socket. → [`Reply::Done`]
    Exit {
        /// Position up to which the task has sent on each link.
        watermarks: Vec<SendWatermark>,
    },
    /// Lists the hosts. → [`Reply::Hosts`]
    Config,
    /// Lists the tasks that `selector` selects. → [`Reply::Tasks`]
    Tasks {
        /// [`Tid::NONE`] for the tasks of all hosts, a host's tid for the tasks of that host, or
        /// the tid of one task.
        selector: Tid,
    },
    /// Places and starts tasks without the resource manager. → [`Reply::Spawned`]
    Spawn(SpawnRequest),
    /// Adds the hosts that host-file lines describe. → [`Reply::HostsAdded`]
    AddHosts {
        /// Host-file lines, one per host.
        host_file_lines: Vec<String>,
    },
    /// Removes hosts by name. → [`Reply::HostsDeleted`]
    DelHosts { host_names: Vec<String> },
    /// Checks whether a host is alive. → [`Reply::Done`] or [`Reply::Failed`]
    HostStatus {
        /// Host name; `.` stands for the task's own host.
        name: String,
    },
    /// Checks whether a task is alive. → [`Reply::Done`] or [`Reply::Failed`]
    TaskStatus { tid: Tid },
    /// Sends a signal to a task. → [`Reply::Done`]
    Signal { tid: Tid, signal: i32 },
    /// Suspends or resumes a task. A suspended task stays suspended when it migrates. Fails for a
    /// task from a command line and for a task that serves the virtual machine. → [`Reply::Done`],
    /// also if the state does not change, or [`Reply::Failed`]
    Suspend {
        tid: Tid,
        /// True to suspend the task, false to resume it.
        suspend: bool,
        /// Cause that the resource manager reports; `None` if the calling task itself requests the
        /// change.
        cause: Option<crate::suspend::SuspendCause>,
    },
    /// Requests or cancels notifications. → [`Reply::Done`]
    Notify(NotifyRequest),
    /// Stops the whole virtual machine. → [`Reply::Done`], then the socket closes.
    Halt,
    /// Registers the task as the resource manager of its daemon; the resource manager of the
    /// master's daemon serves the whole virtual machine. → [`Reply::Rm`]
    RegisterRm(RmServices),
    /// Accesses the mailbox. → [`Reply::Mailbox`], [`Reply::MailboxIndex`],
    /// [`Reply::MailboxClasses`], [`Reply::Done`]
    Mailbox(MailboxRequest),
    /// Sends a request to the group service. → [`Reply::Group`]
    Group(GroupRequest),
    /// Allocates a context. → [`Reply::Context`]
    NewContext,
    /// Releases a context. → [`Reply::Done`] or [`Reply::Failed`]
    FreeContext { ctx: i32 },
    /// Reads the clock of a host. → [`Reply::Clock`]
    HostSync {
        /// Tid of the host; its local part is 0.
        host: Tid,
    },
    /// Sets the destination of this task's own output. → [`Reply::Done`]
    SetOutput(Sink),
    /// Resets the virtual machine: removes persistent mailbox entries without an owner. →
    /// [`Reply::Done`]
    Reset {
        /// True to end also all spawned tasks, except the caller, the resource manager and tasks
        /// that requested an exemption.
        kill_tasks: bool,
    },
    /// Migrates a task. → [`Reply::MigrationStarted`] immediately, or [`Reply::Migrated`] at the
    /// end of the migration if `wait_for_end` is set.
    Migrate {
        tid: Tid,
        /// Name of the target, or its host tid in hex as `t80000`.
        target: String,
        /// Cause that the resource manager reports; `None` if the calling task itself requests the
        /// migration.
        cause: Option<crate::migration::MigrationCause>,
        /// True if the daemon must send the reply only at the end of the migration.
        wait_for_end: bool,
    },
    /// Asks which hosts would accept a task; nothing changes. → [`Reply::MigrationTargets`]
    FindMigrationTargets {
        tid: Tid,
        /// Restricts the query to this host: its name, or its host tid in hex as `t80000`.
        target: Option<String>,
    },
    /// Sets the permissions of guests on the host of the calling task, which is a load watcher or
    /// another owner agent. → [`Reply::Done`]
    SetGuestDirective(crate::owner::GuestDirective),
    /// Reads the event log. → [`Reply::Events`]
    Events {
        /// Number of the first event to return.
        first_number: u64,
        /// Maximum number of events to return.
        events_max: u32,
    },
    /// Requests a message for every new event. The body of such a message is an [`Event`] in
    /// postcard, as raw bytes. → [`Reply::Done`]
    Subscribe { ctx: i32, tag: i32 },
    /// Adds an entry to the event log (resource managers and load watchers). → [`Reply::Done`]
    RecordEvent { at: Micros, kind: EventKind },
    /// Starts to provide a service for this daemon, or stops if the task provides the service
    /// already. → [`Reply::Serving`]
    Serve(Service),
    /// Registers the task as the tracer of the virtual machine, or unregisters the task if it is
    /// the tracer already. → [`Reply::Serving`]
    ServeTracer(TracerSettings),
    /// Sets the destination of this task's own trace records. → [`Reply::Done`]
    SetTrace(Sink),
    /// Queries internal state of the daemon (`pvm_tickle`). → [`Reply::DebugValues`]
    DebugQuery(Vec<i32>),
    /// Asks whether control groups or signals stop the guests of this host. → [`Reply::Freezer`]
    QueryFreezer,
    /// Checkpoints all tasks of a job at one moment. → [`Reply::Checkpointed`]
    Checkpoint {
        /// First task of the job. The job consists of this task and all its descendants.
        job: Tid,
        /// Schedule of further checkpoints; `None` leaves the schedule unchanged. With a schedule,
        /// the job is restarted from its newest checkpoint when a host is lost.
        schedule: Option<CheckpointSchedule>,
        /// True to end the job's tasks on all hosts when the checkpoint is complete. The job can
        /// later be restarted from the checkpoint. If the checkpoint fails, the tasks continue.
        end_job: bool,
        /// True if the daemon must send the reply when the checkpoint has ended. Otherwise the
        /// daemon sends [`Reply::Done`] immediately, and the event log reports the outcome.
        wait_for_end: bool,
    },
    /// Lists the checkpoints in the store. → [`Reply::Checkpoints`]
    ListCheckpoints,
    /// Restarts the tasks of a checkpoint. → [`Reply::Restarted`]
    Restart {
        /// Name of the checkpoint.
        checkpoint: String,
        /// Names of the hosts on which the tasks are started. If empty, each task starts on the
        /// host on which it ran, or on another host if that is impossible.
        host_names: Vec<String>,
        /// True if the daemon must send the reply when the restart has ended. Otherwise the daemon
        /// sends [`Reply::Done`] immediately, and the event log reports the outcome.
        wait_for_end: bool,
        /// True to restart the job although the store says that it runs in another virtual
        /// machine, if the record of that has not been renewed for its validity.
        force: bool,
    },
    /// Removes checkpoints from the store. → [`Reply::CheckpointsRemoved`]
    RemoveCheckpoints {
        selection: RemovalSelection,
        /// True to remove also selected checkpoints that other virtual machines made.
        include_foreign: bool,
    },
    /// Announces that the program is about to exit. A migration had asked the program to exit, but
    /// has been cancelled since. If the daemon can still restart the program after its exit, the
    /// daemon sends a [`ToTask::PrepareExit`] before the reply. → [`Reply::Done`]
    AnnounceExit,
    /// Starts tasks on the hosts of a placement lease. → [`Reply::Spawned`]; [`Reply::Failed`] if
    /// the task that granted the lease is no longer the resource manager
    SpawnLeased {
        request: SpawnRequest,
        lease: LeasedSpawn,
    },
    /// Kills the processes that an ended task has left behind, on all hosts. → [`Reply::Done`]
    KillLeftovers { tid: Tid },
    /// Asks which of these tasks wait for the restart of their job from a checkpoint: the job rolls
    /// back after the loss of a host. → [`Reply::AwaitingRestart`]
    FindAwaitingRestart { tids: Vec<Tid> },
    /// Asks a host to describe its state. → [`Reply::HostReport`]
    DescribeHost {
        /// Tid of the host; its local part is 0.
        host: Tid,
        /// True to include the resources that each task has used.
        with_tasks: bool,
    },
    /// Asks whether the tasks of this host can be dumped, so that they can migrate.
    /// → [`Reply::Engine`]
    QueryEngine,
    /// Ends the virtual machine, as [`Request::Halt`], with a reply when all hosts have ended their
    /// tasks or the time limit has passed. → [`Reply::Halted`]
    HaltAndReport,
}

/// Results of a successful migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationReport {
    pub id: MigrationId,
    /// Size of the images, in bytes.
    pub image_bytes: u64,
    /// Time for which the task was stopped.
    pub frozen_time: Micros,
    pub engine: Engine,
}

/// A reply of a daemon to a [`Request`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    Done,
    Failed {
        error: PvmError,
        /// One sentence with the failed operation, the reason and a remedy.
        reason: String,
    },
    Hosts(HostTable),
    Tasks(Vec<TaskInfo>),
    /// One result per requested task.
    Spawned(Vec<Result<Tid, PvmError>>),
    /// One result per host-file line.
    HostsAdded(Vec<AddedHost>),
    /// One result per host name.
    HostsDeleted(Vec<Result<(), PvmError>>),
    /// The task is registered as resource manager.
    Rm {
        /// The previous resource manager, which `pvm_reg_rm` returns; [`Tid::NONE`] if there was
        /// none.
        previous_rm: Tid,
    },
    /// A message from the mailbox.
    Mailbox(Message),
    /// Index of a stored mailbox entry.
    MailboxIndex(i32),
    MailboxClasses(Vec<MailboxClass>),
    /// The reply of the group service.
    Group(GroupReply),
    /// A newly allocated context.
    Context(i32),
    /// The host's time of day, in microseconds since 1970.
    Clock(Micros),
    /// The migration has begun.
    MigrationStarted(MigrationId),
    /// The migration has ended.
    Migrated(Result<MigrationReport, MigrationError>),
    /// The hosts that would accept the task, or the reason why the task cannot migrate to any host.
    MigrationTargets(Result<MigrationTargets, Refusal>),
    /// Entries of the log, oldest first.
    Events(Vec<Event>),
    /// True if the task provides the service from now on; false if the task has stopped providing
    /// the service.
    Serving(bool),
    /// Numbers that answer a [`Request::DebugQuery`]; empty if the query only writes to the log or
    /// changes a setting.
    DebugValues(Vec<i32>),
    /// Result of the completed checkpoint, or the reason why the checkpoint failed.
    Checkpointed(Result<CheckpointReport, CheckpointFailure>),
    /// The checkpoints in the store, oldest first.
    Checkpoints(Result<Vec<CheckpointEntry>, StoreFailure>),
    /// The restarted tasks, or the reason why the restart failed.
    Restarted(Result<RestartReport, RestartFailure>),
    /// `Ok` if control groups freeze the guests of this host; `Err` with the reason why signals
    /// stop the guests instead. `None` if no tasker has reported yet.
    Freezer(Option<Result<(), FreezerUnavailable>>),
    /// The outcome for each checkpoint, or the reason why the store is not readable.
    CheckpointsRemoved(Result<RemovalResults, StoreFailure>),
    /// The tasks whose job rolls back. The event log reports the end of each restart.
    AwaitingRestart(Vec<Tid>),
    /// The state of a host.
    HostReport(Box<HostReport>),
    /// `Ok` with the version of the dump engine of this host, or the reason why there is none.
    /// `None` if no tasker has reported yet.
    Engine(Option<Result<String, EngineUnavailable>>),
    /// The virtual machine ends.
    Halted {
        /// Names of the hosts that have not reported the end of their tasks.
        missing_hosts: Vec<String>,
    },
}

/// Error of a failed migration; the task continues at the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{step} failed: {failure}")]
pub struct MigrationError {
    pub step: Step,
    pub failure: Failure,
}

/// Information for the library of a task that the daemon has accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    pub tid: Tid,
    /// Tid of the parent; [`Tid::NONE`] for a task that was not spawned, raw value −35 if the
    /// parent requested not to be known.
    pub parent: Tid,
    pub host: HostId,
    /// Addresses of this host on which the task may listen for direct routes, in order of
    /// preference.
    pub addresses: Vec<IpAddr>,
    /// True if the library may request and accept direct routes that its program has not requested.
    pub allows_automatic_routes: bool,
    pub rm: Option<RmInfo>,
    pub output_sink: Sink,
    pub trace_sink: Sink,
    /// Data signature of the host.
    pub dsig: i32,
    /// True if the task was spawned. The daemon collects the standard output of spawned tasks.
    pub spawned: bool,
    /// Settings of the tracer; set if the task's trace records are sent to the tracer because the
    /// task has no other destination.
    pub tracer_settings: Option<TracerSettings>,
    /// Clock of the task's spawn, and the messages in its past that are in transit; only in the
    /// first welcome.
    pub past: Box<Past>,
    /// Set if the process was restored from a checkpoint and this is the first welcome since the
    /// restart.
    pub restart_info: Option<RestartInfo>,
    /// Set if the process replaces an earlier process of the same task and this is the first
    /// welcome of the process.
    pub handoff: Option<Box<ProcessHandoff>>,
}

/// Information for the library of a process that replaces an exited process of the same task. The
/// frames that the exited process had sent follow the welcome; their source is the task itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessHandoff {
    /// Incarnation for links that the process creates.
    pub incarnation: u16,
    /// Number of earlier processes of the task.
    pub restart_count: u32,
    /// States of the links to continue.
    pub links: Vec<LinkState>,
    /// The past of the earlier process.
    pub past: Past,
}

/// Information for a library whose process was restored from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartInfo {
    /// The tasks that were restarted together with this task, and their incarnation.
    pub restart_group: RestartGroup,
    /// Requests without a reply that the library must send again, because the original requests
    /// will not be answered.
    pub requests_to_repeat: Vec<RequestId>,
}

/// A message from a task to its daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToDaemon {
    /// Must be the first frame.
    Hello(Hello),
    /// A request to be answered with [`ToTask::Reply`].
    Request {
        /// Id chosen by the task, unique among its requests.
        id: RequestId,
        request: Request,
    },
    /// A PVM message to the address of a daemon (`SM_*`).
    Message(Message),
    /// The library has closed all connections out of the process; the socket closes after this
    /// frame. All earlier frames of the library precede this frame on the socket.
    Quiesced {
        migration: MigrationId,
        /// Position up to which the task has sent on each link.
        watermarks: Vec<SendWatermark>,
        /// Address at which the library looks for a [`Redirect`].
        redirect_address: RedirectAddress,
    },
    /// First answer to [`ToTask::PrepareExit`]: the state of the task's links.
    ///
    /// The link frames that the next process needs follow: the fragments of partial messages from
    /// peers, with the peers as sources, and all frames that peers have not acknowledged.
    /// [`ToDaemon::ReadyToExit`] ends the handoff.
    Handoff {
        migration: MigrationId,
        /// Incarnation for links that the next process creates.
        incarnation: u16,
        /// State of each link.
        links: Vec<LinkState>,
        /// The past of the task.
        past: Past,
        /// Notifications that the library defers until earlier messages of a peer arrive. Each
        /// entry contains the watermark to wait for and the notification.
        deferred_notifications: Vec<(SendWatermark, Message)>,
    },
    /// The task has handed off its state. From now on the task may exit at any time without loss of
    /// messages.
    ReadyToExit { migration: MigrationId },
    /// Answer to a [`ToTask::PrepareExit`] without a migration: the task continues. As before the
    /// handoff, an exit of the process would lose messages.
    ExitCancelled {
        /// The migration of the earlier [`ToTask::PrepareExit`].
        migration: MigrationId,
    },
    /// A message to another task about a route between the two tasks.
    Route {
        /// The task that receives the message.
        receiver: Tid,
        /// The message; its descriptors are passed with the frame.
        message: RouteMsg,
    },
    /// The past of the request that follows ([`crate::causal`]). Services that order events pass it
    /// on.
    Past {
        /// Lamport clock of the task.
        clock: u64,
        /// The messages that are in transit; `None` if they have not changed.
        marks: Option<Vec<Mark>>,
    },
    /// Answer to [`ToTask::AwaitMarks`]: the messages have arrived.
    MarksArrived { wait_number: u64 },
    /// The task no longer waits for messages of this number of senders, which neither end nor
    /// answer. These messages may be received too late.
    MarksOverdue { count: u64 },
}

/// A message from a daemon to a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToTask {
    /// The daemon accepts the task.
    Welcome(Welcome),
    /// The daemon refuses the task; the socket closes after this frame.
    Refused {
        /// The reason for the refusal, and a remedy.
        reason: String,
    },
    /// The reply to a request.
    Reply { id: RequestId, reply: Reply },
    /// A message created by a daemon. If `deliver_after` is set, the library delivers the message
    /// only after the library has received everything up to that watermark, or after the link to
    /// the watermark's peer has ended. A notification of an exit is thus delivered after the last
    /// message of the exited task.
    Deliver {
        message: Message,
        /// Watermark that must be reached before the delivery; `None` for immediate delivery.
        deliver_after: Option<SendWatermark>,
    },
    /// The task with this tid has ended or never existed; messages retained for this task can be
    /// dropped.
    PeerGone { tid: Tid },
    /// The task with this tid has migrated; frames in flight to this task may be lost.
    PeerMigrated { tid: Tid },
    /// The resource manager changed or died.
    RmChanged {
        /// The new resource manager; `None` if the virtual machine has none now.
        rm: Option<RmInfo>,
    },
    /// The daemon will ask the program to exit so that the program can be restarted. Messages that
    /// other tasks send from now on are queued for the next process; only replies are delivered to
    /// this process. → [`ToDaemon::Handoff`]
    PrepareExit {
        /// The migration that restarts the program. `None` cancels the earlier request, and
        /// messages are delivered again. → [`ToDaemon::ExitCancelled`]
        migration: Option<MigrationId>,
    },
    /// Close all connections out of the process: answer [`ToDaemon::Quiesced`], close the socket,
    /// wait until one of the files in `token_paths` contains a [`ResumeToken`], and connect again
    /// with [`Claim::Resume`].
    Quiesce {
        migration: MigrationId,
        /// Paths of the resume token at the source and at the target.
        token_paths: Vec<PathBuf>,
    },
    /// A message from another task about a route between the two tasks.
    Route {
        /// The task that sent the message.
        sender: Tid,
        /// True if the sending task runs on the same host.
        same_host: bool,
        /// The message; its descriptors are passed with the frame.
        message: RouteMsg,
    },
    /// The past of the replies and notifications that follow. The library holds them back until the
    /// messages to this task have arrived that the marks name.
    Past(Past),
    /// Asks for an answer when the messages that these marks name have arrived. →
    /// [`ToDaemon::MarksArrived`]
    AwaitMarks { wait_number: u64, marks: Vec<Mark> },
}

/// Maximum size in bytes of an encoded [`Redirect`] in a library's memory.
pub const REDIRECT_BYTES_MAX: usize = 12 << 10;

/// Address of a buffer of [`REDIRECT_BYTES_MAX`] bytes in a library's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedirectAddress {
    /// Process id in the task's PID namespace, which is the same on all hosts.
    pub pid: i32,
    /// Address in the memory of that process.
    pub address: u64,
}

/// Replaces the paths of the resume token for which a quiesced library waits.
///
/// A stopped library cannot receive a message. If its next host becomes known only after the stop,
/// its daemon writes the redirect into the memory of the stopped library: the length as eight bytes
/// in native byte order, then this value in postcard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Redirect {
    pub migration: MigrationId,
    /// Paths of the resume token; one of these files will appear.
    pub token_paths: Vec<PathBuf>,
}

impl Redirect {
    /// Encodes the redirect in the form in which it is written into memory.
    ///
    /// # Errors
    /// The encoding is longer than [`REDIRECT_BYTES_MAX`].
    pub fn encode(&self) -> Result<Vec<u8>, String> {
        let content = crate::frame::to_bytes(self).map_err(|e| e.to_string())?;
        let bytes: Vec<u8> = (content.len() as u64)
            .to_ne_bytes()
            .into_iter()
            .chain(content.iter().copied())
            .collect();
        if bytes.len() > REDIRECT_BYTES_MAX {
            return Err(format!(
                "the paths of the tokens need {} bytes, {REDIRECT_BYTES_MAX} is the most",
                bytes.len()
            ));
        }
        Ok(bytes)
    }
}

/// Content of the file that wakes a quiesced library (postcard, written under a temporary name and
/// renamed).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumeToken {
    /// The migration for which the token is valid; the library ignores a token of another
    /// migration.
    pub migration: MigrationId,
    /// Path of the daemon's socket to which the library must connect.
    pub socket_path: PathBuf,
}
