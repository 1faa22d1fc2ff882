//! Control messages between a task's library and the daemon of its host, over a Unix stream socket.
//!
//! The task's first frame is [`ToDaemon::Hello`]; the daemon answers [`ToTask::Welcome`] or
//! [`ToTask::Refused`]. Afterwards both sides send control frames and link frames ([`crate::link`])
//! at any time. The socket is reliable, so control messages are not numbered. Requests carry an id,
//! because replies come when they are ready, possibly from another daemon after the task has
//! migrated.

pub use crate::spawn::{
    LeasedSpawn, SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_DEBUG, SPAWN_HOST, SPAWN_NO_PARENT,
    SPAWN_PINNED, Sink, SpawnRequest,
};

use crate::checkpoint::{
    CheckpointEntry, CheckpointFailure, CheckpointReport, CheckpointSchedule, RemovalResults,
    RemovalSelection, RestartFailure, RestartReport,
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
use crate::table::{AddedHost, HostTable, TaskInfo};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::PathBuf;

/// First bytes of a [`Hello`]. They distinguish a task from any other program that connects to the
/// socket.
pub const TASK_MAGIC: [u8; 4] = *b"SMPT";

/// Unanswered requests that a task may have; the daemon refuses more with [`PvmError::OutOfRes`].
pub const REQUESTS_OPEN_MAX: usize = 4096;
/// Largest size of each name, pattern and host line that a task may send.
pub const NAME_BYTES_MAX: usize = 64 << 10;

/// File status flag (`O_APPEND`) by which a task's library marks its connections to the daemon and
/// to other tasks. It has no effect on a socket. An inspector of the task recognizes by it the
/// connections that the library closes before a migration and in a forked child.
pub const LIBRARY_SOCKET_FLAG: i32 = 0o2000;

/// Number by which a spawned process claims its tid (environment variable `PVMEPID`); always
/// positive.
pub type SpawnToken = i32;

/// Position up to which one end of a link has sent. Orders notifications after messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SendWatermark {
    pub peer: Tid,
    /// Number after the last fragment sent to the peer.
    pub end_seq: u64,
}

/// Identity of a connecting process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Claim {
    /// A probe for a running daemon. A running daemon refuses it; a daemon that is ending sends no
    /// answer.
    Probe,
    /// A process that the virtual machine did not start.
    New,
    /// A process that the daemon started.
    Spawned {
        /// The number from the environment of the process.
        spawn_token: SpawnToken,
    },
    /// A task that closed its daemon connection for a migration, on this host or another one.
    Resume { tid: Tid, migration: MigrationId },
}

/// Behavior of a task from a command line when its daemon ends. Tasks that a daemon or a tasker
/// started always end with it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum OnDaemonExit {
    /// SIGTERM, as in PVM: a program of PVM's interface expects nothing else.
    #[default]
    Terminate,
    /// No signal; subsequent PVM calls return `PvmSysErr`. For a process that has other work to do.
    FailCalls,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// Must be equal to [`TASK_MAGIC`].
    pub magic: [u8; 4],
    /// Must be equal to [`crate::WIRE_VERSION`].
    pub version: u16,
    pub claim: Claim,
    /// Process id in the process's own PID namespace.
    pub own_pid: i32,
    pub program: String,
    /// Behavior when the daemon ends.
    pub on_daemon_exit: OnDaemonExit,
}

/// The subject of a notification (`pvm_notify`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NotifySubjects {
    /// One message for each of these tasks when it ends.
    TaskExit(Vec<Tid>),
    /// One message for each host that leaves; host tids as the caller passed them.
    HostDelete(Vec<Tid>),
    /// One message whenever hosts join.
    HostAdd {
        /// Number of messages; −1: unlimited, 0: cancel.
        count: i32,
    },
}

/// A request of `pvm_notify`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotifyRequest {
    pub subjects: NotifySubjects,
    pub ctx: i32,
    pub tag: i32,
    /// Cancels an earlier request instead.
    pub cancel: bool,
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
        /// Mailbox class; empty for all classes.
        name: String,
        /// Restricts the removal to this index.
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

/// Requests that a resource manager serves; the daemon continues to serve all others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RmServices {
    /// Placement of spawns (`SM_SPAWN`).
    pub spawn: bool,
    /// All others: `SM_CONFIG`, `SM_ADDHOST`, `SM_DELHOST`, `SM_TASK`, `SM_NOTIFY`.
    pub others: bool,
    /// Exits of its tasks (`SM_TASKX`). A resource manager that follows the event log does not need
    /// them.
    pub task_exits: bool,
}

/// The resource manager that a task must ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RmInfo {
    pub tid: Tid,
    pub serves: RmServices,
}

/// A service that a task provides instead of its daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Service {
    /// Starts daemons on other hosts (`pvm_reg_hoster`); only on the master.
    Hoster,
    /// Starts tasks on its host (`pvm_reg_tasker`).
    Tasker,
}

/// Settings of a tracer (`pvm_reg_tracer`) for tasks without another destination for output and
/// trace records.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracerSettings {
    pub trace_ctx: i32,
    pub trace_tag: i32,
    pub out_ctx: i32,
    pub out_tag: i32,
    /// Traced events, encoded as in `PVMTMASK`.
    pub mask: Vec<u8>,
    /// Bytes that a task buffers before it sends trace records.
    pub buffer: i32,
    /// One of the `PvmTrace*` values.
    pub options: i32,
}

/// The tracer of the virtual machine.
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

/// Largest number of integers in one `pvm_tickle`.
pub const DEBUG_QUERY_WORDS_MAX: usize = 10;

/// A request of a task to its daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// Leaves the virtual machine (`pvm_exit`). Everything that the task sent precedes this request
    /// on the socket. → [`Reply::Done`]
    Exit {
        /// Send position of each link.
        watermarks: Vec<SendWatermark>,
    },
    /// Lists the hosts. → [`Reply::Hosts`]
    Config,
    /// Lists the tasks of all hosts (0) or of one host (host tid), or one task. → [`Reply::Tasks`]
    Tasks {
        /// 0, a host tid or a task.
        selector: Tid,
    },
    /// Places and starts tasks without a resource manager. → [`Reply::Spawned`]
    Spawn(SpawnRequest),
    /// Adds hosts by host-file lines. → [`Reply::HostsAdded`]
    AddHosts {
        /// One line per host.
        lines: Vec<String>,
    },
    /// Removes hosts by name. → [`Reply::HostsDeleted`]
    DelHosts { names: Vec<String> },
    /// Checks whether a host is alive. → [`Reply::Done`] or [`Reply::Failed`]
    HostStatus {
        /// Host name; `.` is the task's own.
        name: String,
    },
    /// Checks whether a task is alive. → [`Reply::Done`] or [`Reply::Failed`]
    TaskStatus { tid: Tid },
    /// Sends a signal to a task. → [`Reply::Done`]
    Signal { tid: Tid, signal: i32 },
    /// Suspends a task until a request resumes it; it stays suspended when it migrates. Fails for a
    /// task from a command line and for one that serves the virtual machine. → [`Reply::Done`],
    /// also if the state does not change, or [`Reply::Failed`]
    Suspend {
        tid: Tid,
        /// False: resumes the task.
        suspend: bool,
        /// Reason of the resource manager; `None`: the caller requests it.
        cause: Option<crate::suspend::SuspendCause>,
    },
    /// Requests or cancels notifications. → [`Reply::Done`]
    Notify(NotifyRequest),
    /// Stops the whole virtual machine. → [`Reply::Done`], then the socket closes.
    Halt,
    /// Registers the task as the resource manager of this daemon. → [`Reply::Rm`]
    RegisterRm(RmServices),
    /// Accesses the mailbox. → [`Reply::Mailbox`], [`Reply::MailboxIndex`],
    /// [`Reply::MailboxClasses`], [`Reply::Done`]
    Mailbox(MailboxRequest),
    /// Asks the group service. → [`Reply::Group`]
    Group(GroupRequest),
    /// Allocates a context. → [`Reply::Context`]
    NewContext,
    /// Releases a context. → [`Reply::Done`] or [`Reply::Failed`]
    FreeContext { ctx: i32 },
    /// Reads the clock of a host. → [`Reply::Clock`]
    HostSync {
        /// The host's tid without a local part.
        host: Tid,
    },
    /// Sets the destination of this task's own output. → [`Reply::Done`]
    SetOutput(Sink),
    /// Resets the virtual machine: removes persistent mailbox entries without an owner. →
    /// [`Reply::Done`]
    Reset {
        /// Also ends all spawned tasks except the caller, the resource manager and those that
        /// requested exemption.
        kill: bool,
    },
    /// Migrates a task. → [`Reply::MigrationStarted`] immediately, or with `wait` [`Reply::Migrated`] when
    /// the migration has ended.
    Migrate {
        tid: Tid,
        /// Host name, or host tid in hex as `t80000`.
        to: String,
        /// Reason of the resource manager; `None`: the caller requests it.
        cause: Option<crate::migration::MigrationCause>,
        /// Reply only when the migration has ended.
        wait: bool,
    },
    /// Asks which hosts would accept a task; nothing changes. → [`Reply::MigrationTargets`]
    CanMigrate {
        tid: Tid,
        /// Asks only this host: its name, or its host tid in hex as `t80000`.
        to: Option<String>,
    },
    /// Sets the permissions of guests on this host; sent by a load watcher for the host's owner. →
    /// [`Reply::Done`]
    SetGuestDirective(crate::owner::GuestDirective),
    /// Reads the event log. → [`Reply::Events`]
    Events {
        /// Number of the first event to return.
        from: u64,
        /// Largest number of events to return.
        limit: u32,
    },
    /// Requests a message for every new event. Body: [`Event`] in postcard as raw bytes. →
    /// [`Reply::Done`]
    Subscribe { ctx: i32, tag: i32 },
    /// Adds an entry to the event log (resource managers and load watchers). → [`Reply::Done`]
    RecordEvent { at: Micros, kind: EventKind },
    /// Starts to provide a service for this daemon; stops if the task already provides it. →
    /// [`Reply::Serving`]
    Serve(Service),
    /// Registers the task as the tracer of the virtual machine; unregisters it if it is. →
    /// [`Reply::Serving`]
    ServeTracer(TracerSettings),
    /// Sets the destination of this task's own trace records. → [`Reply::Done`]
    SetTrace(Sink),
    /// Queries internal state of the daemon (`pvm_tickle`). → [`Reply::Numbers`]
    DebugQuery(Vec<i32>),
    /// Asks how this host pauses guests. → [`Reply::Freezer`]
    Freezer,
    /// Checkpoints all tasks of a job at one moment. → [`Reply::Checkpointed`]
    Checkpoint {
        /// First task of the job. The job consists of this task and all its descendants.
        job: Tid,
        /// Schedule of further checkpoints. If there is one, the job is restarted from its newest
        /// checkpoint when a host is lost.
        schedule: Option<CheckpointSchedule>,
        /// Ends the job's tasks when the checkpoint is complete, wherever they run by then; the job
        /// can be restarted from it. If the checkpoint fails, the tasks continue.
        end_job: bool,
        /// False: [`Reply::Done`] comes immediately, and the event log reports the outcome.
        wait: bool,
    },
    /// Lists the checkpoints in the store. → [`Reply::Checkpoints`]
    ListCheckpoints,
    /// Restarts the tasks of a checkpoint. → [`Reply::Restarted`]
    Restart {
        /// Name of the checkpoint.
        checkpoint: String,
        /// Names of the hosts to start them on. Empty: the hosts on which they ran, or others where
        /// that is impossible.
        on: Vec<String>,
        /// False: [`Reply::Done`] comes immediately, and the event log reports the outcome.
        wait: bool,
    },
    /// Removes checkpoints from the store. → [`Reply::CheckpointsRemoved`]
    RemoveCheckpoints {
        which: RemovalSelection,
        /// Permits the removal of checkpoints that other virtual machines made.
        include_foreign: bool,
    },
    /// The program is about to exit. An earlier migration had asked it to exit and was cancelled.
    /// If the daemon still accepts that exit, [`ToTask::TakeNothing`] precedes the reply. →
    /// [`Reply::Done`]
    AboutToExit,
    /// Starts tasks on the hosts of a placement lease. → [`Reply::Spawned`], or [`Reply::Failed`]
    /// if the lease's issuer is not the resource manager any more
    SpawnLeased {
        request: SpawnRequest,
        lease: LeasedSpawn,
    },
}

/// Outcome of a successful migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationReport {
    pub id: MigrationId,
    /// Size of the images.
    pub bytes: u64,
    /// Time for which the task was stopped.
    pub frozen: Micros,
    pub engine: Engine,
}

/// A reply of a daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    Done,
    Failed {
        error: PvmError,
        /// One sentence: the attempt, its failure and a remedy.
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
        /// The previous resource manager, which PVM returns; [`Tid::NONE`] if there was none.
        previous: Tid,
    },
    /// A message from the mailbox.
    Mailbox(Message),
    /// Index of a stored mailbox entry.
    MailboxIndex(i32),
    MailboxClasses(Vec<MailboxClass>),
    /// Reply of the group service.
    Group(GroupReply),
    /// A newly allocated context.
    Context(i32),
    /// The host's time of day, in microseconds since 1970.
    Clock(Micros),
    /// The migration has begun.
    MigrationStarted(MigrationId),
    /// The migration has ended.
    Migrated(Result<MigrationReport, MigrationError>),
    /// The hosts that would accept the task, or why it cannot migrate at all.
    MigrationTargets(Result<MigrationTargets, Refusal>),
    /// Entries of the log, oldest first.
    Events(Vec<Event>),
    /// True: the task provides the service from now on. False: it has stopped.
    Serving(bool),
    Numbers(Vec<i32>),
    /// The completed checkpoint, or why there is none.
    Checkpointed(Result<CheckpointReport, CheckpointFailure>),
    /// The checkpoints in the store, oldest first.
    Checkpoints(Result<Vec<CheckpointEntry>, String>),
    /// The restarted tasks, or why they were not restarted.
    Restarted(Result<RestartReport, RestartFailure>),
    /// Ok: control groups freeze the guests of this host. Err: why signals stop them instead.
    /// `None`: no tasker has reported yet.
    Freezer(Option<Result<(), String>>),
    /// The outcome for each checkpoint, or why the store is not readable.
    CheckpointsRemoved(Result<RemovalResults, String>),
}

/// A failed migration; the task continues at the source.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{step} failed: {why}")]
pub struct MigrationError {
    pub step: Step,
    pub why: Failure,
}

/// Information for the library of an accepted task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    pub tid: Tid,
    /// NONE, a task, or raw −35 if the parent requested not to be known.
    pub parent: Tid,
    pub host: HostId,
    /// Addresses of this host for the task's own routes, most useful first.
    pub addresses: Vec<IpAddr>,
    pub rm: Option<RmInfo>,
    pub output: Sink,
    pub trace: Sink,
    /// Data signature of the host.
    pub dsig: i32,
    /// True if the task was spawned; the daemon collects its standard output.
    pub spawned: bool,
    /// Settings of the tracer, if `trace` leads to it because the task has no other destination.
    pub tracer: Option<TracerSettings>,
    /// The process was restored from a checkpoint, and this is its first message since then.
    pub restart: Option<RestartInfo>,
    /// The process replaces an earlier one of the same task, and this is its first message.
    pub handoff: Option<Box<ProcessHandoff>>,
}

/// Information for a library whose process replaces one that has ended. The frames that the old
/// process had sent follow the welcome, with the task itself as their source.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessHandoff {
    /// Incarnation of new links.
    pub incarnation: u16,
    /// Number of earlier processes of the task.
    pub restart_count: u32,
    /// States of the links to continue.
    pub links: Vec<LinkState>,
}

/// Information for a library whose process was restored from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestartInfo {
    /// The tasks restarted together with it, and their incarnation.
    pub group: RestartGroup,
    /// Requests that will get no reply unless they are repeated.
    pub requests_to_repeat: Vec<RequestId>,
}

/// From a task to its daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToDaemon {
    /// Must be the first frame.
    Hello(Hello),
    /// A request to be answered with [`ToTask::Reply`].
    Request {
        /// Chosen by the task, unique for it.
        id: RequestId,
        request: Request,
    },
    /// A message to a daemon's address (`SM_*`).
    Message(Message),
    /// The task has no connection outside its process any more; the socket closes after this frame.
    /// Everything that the library had to write precedes it on the socket.
    Quiesced {
        migration: MigrationId,
        /// Send position of each link.
        watermarks: Vec<SendWatermark>,
        /// Address at which the library looks for a [`Redirect`].
        redirect_address: RedirectAddress,
    },
    /// First answer to [`ToTask::PrepareExit`]: the state of the task's links.
    ///
    /// The link frames that the next process needs follow: partial messages from peers, with the
    /// peers as sources, and everything that peers have not acknowledged.
    /// [`ToDaemon::ReadyToExit`] ends the handoff.
    Handoff {
        migration: MigrationId,
        /// Incarnation of new links.
        incarnation: u16,
        /// State of each link.
        links: Vec<LinkState>,
        /// Notifications that wait for the last messages of peers.
        deferred_notifications: Vec<(SendWatermark, Message)>,
    },
    /// The task has handed off its state: from now on it may exit at any time without losing
    /// anything.
    ReadyToExit { migration: MigrationId },
    /// Answer to [`ToTask::PrepareExit`] without a migration: the task continues, and an exit
    /// would lose messages again.
    ExitCancelled {
        /// The migration of the earlier [`ToTask::PrepareExit`].
        migration: MigrationId,
    },
    /// A message to another task about a route between the two.
    Route {
        /// Task that receives the message.
        to: Tid,
        /// Its descriptors travel with the frame.
        message: RouteMsg,
    },
}

/// From a daemon to a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToTask {
    /// The daemon accepts the task.
    Welcome(Welcome),
    /// The daemon refuses the task; the socket closes after this frame.
    Refused {
        /// The cause and a remedy.
        reason: String,
    },
    /// The reply to a request.
    Reply { id: RequestId, reply: Reply },
    /// A message made by a daemon. With `after`, the library delivers it only after it has received
    /// everything up to that position, or when the peer's link has ended. So a notification follows
    /// the task's last message.
    Deliver {
        message: Message,
        /// Position that must be reached before the delivery.
        after: Option<SendWatermark>,
    },
    /// This task has ended or never existed: messages retained for it can be dropped.
    PeerGone { tid: Tid },
    /// This task has migrated: frames in flight to it may be lost.
    PeerMigrated { tid: Tid },
    /// The resource manager changed or died.
    RmChanged {
        /// The new one; `None`: it died.
        rm: Option<RmInfo>,
    },
    /// The program is about to be asked to exit, for a restart. Messages that other tasks send from
    /// now on are for the next process: only replies are delivered to this one. →
    /// [`ToDaemon::Handoff`]
    PrepareExit {
        /// The migration that restarts it. `None` cancels the request, and delivery continues. →
        /// [`ToDaemon::ExitCancelled`]
        migration: Option<MigrationId>,
    },
    /// Close all connections outside the process: answer [`ToDaemon::Quiesced`], close the socket,
    /// then wait until one of these files contains a [`ResumeToken`], and connect again with
    /// [`Claim::Resume`].
    Quiesce {
        migration: MigrationId,
        /// Files to watch: at the source, at the target.
        tokens: Vec<PathBuf>,
    },
    /// A message from another task about a route between the two.
    Route {
        /// Task that sent the message.
        from: Tid,
        /// True if it runs on this host.
        same_host: bool,
        /// Its descriptors travel with the frame.
        message: RouteMsg,
    },
}

/// Largest size of a [`Redirect`] in a library's memory.
pub const REDIRECT_BYTES_MAX: usize = 12 << 10;

/// Address of a buffer of [`REDIRECT_BYTES_MAX`] bytes in a library's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedirectAddress {
    /// Process id in its own PID namespace, which is the same on all hosts.
    pub pid: i32,
    /// Address in that process.
    pub address: u64,
}

/// Replaces the token files for which a quiesced library waits.
///
/// The library was stopped before its next location was known, and it must not run to receive a
/// message. Its daemon therefore writes this into the stopped library's memory: the length as eight
/// bytes in native byte order, then this value in postcard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Redirect {
    pub migration: MigrationId,
    /// Files in one of which a [`ResumeToken`] will appear.
    pub tokens: Vec<PathBuf>,
}

impl Redirect {
    /// Encodes the value as it is stored in memory.
    ///
    /// # Errors
    /// It is longer than [`REDIRECT_BYTES_MAX`].
    pub fn encode(&self) -> Result<Vec<u8>, String> {
        let text = crate::frame::to_bytes(self).map_err(|e| e.to_string())?;
        let bytes: Vec<u8> = (text.len() as u64)
            .to_ne_bytes()
            .into_iter()
            .chain(text.iter().copied())
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
    /// The library ignores a token of another migration.
    pub migration: MigrationId,
    /// The daemon's socket to connect to.
    pub socket: PathBuf,
}
