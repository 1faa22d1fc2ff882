//! Inputs and outputs of the machine.
//!
//! The shell turns sockets, processes, files and clocks into [`Event`]s and performs [`Output`]s.
//! The machine relies on one order only: outputs to the same task, and outputs to the same host on
//! the same channel, are performed in order. On the data channel, link frames of different pairs of
//! tasks may overtake each other.

use bytes::Bytes;
use checkpoint_protocol::SnapshotId;
use sempa_proto::checkpoint::{
    CheckpointEntry, CheckpointMeta, ClaimKey, JobHolder, RemovalRefusal, RemovalResults,
    RemovalSelection, RestartFailure, StoreFailure,
};
use sempa_proto::host::SavedTask;
use sempa_proto::host::{DataMsg, HostMsg};
use sempa_proto::ids::{HostId, Micros, MigrationId, RequestId};
use sempa_proto::library_fault::ForeignLibrary;
use sempa_proto::migration::{Failure, Step, Usage};
use sempa_proto::route::RouteMsg;
use sempa_proto::table::HostUsage;
use sempa_proto::task::{ResumeToken, ToDaemon, ToTask};
use sempa_proto::tasker::{DumpReport, FromTasker, ToTasker};
use sempa_proto::tasker_service::ServiceObstacle;
use sempa_proto::vm_summary::VmSummary;
use sempa_proto::{PvmError, Tid};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

/// Importance of a line in the daemon's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogLevel {
    Error,
    Warning,
    Info,
    Debug,
}

/// How the daemon uses the tasker service of its host.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ServiceUse {
    /// The daemon is root's. Its tasks can migrate with and without the service.
    #[default]
    AsRoot,
    /// The service has started the tasker of an ordinary user's daemon.
    ForUser,
    /// The daemon of an ordinary user has started its tasker itself.
    Missing(ServiceObstacle),
}

/// Subject of a line in the daemon's log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LogSubject {
    Migration(MigrationId),
    /// A checkpoint, by its name in the store.
    Checkpoint(String),
    /// A job, by the tid of its first task.
    Job(Tid),
}

/// A connection of a task to this daemon. Ids are never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub u64);

/// File descriptors that accompany a message between two tasks. The machine only counts them and
/// forwards them.
#[derive(Clone, Debug, Default)]
pub struct Descriptors(Arc<Vec<OwnedFd>>);

impl Descriptors {
    pub fn new(fds: Vec<OwnedFd>) -> Self {
        Self(Arc::new(fds))
    }

    pub fn count(&self) -> usize {
        self.0.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd)
    }
}

/// An attempt to start a daemon on another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StartId(pub u64);

/// Access of the machine to its host while the machine handles an event. Each call returns its
/// result immediately.
pub trait World {
    /// Returns the absolute path of an executable regular file. A `name` with a `/` is a path
    /// relative to `dir` or to the daemon's working directory; any other name is searched for in
    /// the search path.
    ///
    /// # Errors
    /// [`PvmError::NoFile`] if there is no such file.
    fn find_program(&self, name: &str, dir: Option<&str>) -> Result<PathBuf, PvmError>;
    /// Returns the path of `dir` if it is a directory that can be entered, otherwise the default
    /// working directory of tasks.
    fn work_dir(&self, dir: Option<&str>) -> PathBuf;
    /// Returns the initial environment of every task on this host, as `NAME=value` entries: the
    /// daemon's environment, the library folder and the PVM variables.
    fn base_environment(&self) -> Vec<Vec<u8>>;
    /// Returns the time in microseconds since 1970, for events and clocks that other hosts see.
    fn unix_time(&self) -> Micros;
    /// Returns the load and the memory of this host; `None` if the kernel does not tell them.
    fn host_usage(&self) -> Option<HostUsage>;
    /// Returns the resources that a process and its ended children have used so far.
    fn process_usage(&self, pid: i32) -> Usage;
    /// Returns the number of bytes that this host's running transfers of a migration have sent.
    fn sent_bytes(&self, migration: MigrationId) -> u64;
    /// Returns an unpredictable number in 1..=i32::MAX.
    fn random_secret(&mut self) -> i32;
}

/// Description of a daemon to start on another host. The comments name the host file options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPlan {
    /// Index that the host will have.
    pub id: HostId,
    /// Name as the user wrote it. The host table contains the same name.
    pub name: String,
    /// Name or address to contact (`ip=`), by default `name`.
    pub contact: String,
    /// Login name (`lo=`); `None` for the user's own login name.
    pub login: Option<String>,
    /// Command that starts the daemon on that host (`dx=`); `None` for the default command.
    pub command: Option<String>,
    /// Search path for executables (`ep=`), unexpanded.
    pub search_path: Option<String>,
    /// Working directory (`wd=`), unexpanded.
    pub work_dir: Option<String>,
    /// Relative speed (`sp=`); the default is 1000.
    pub speed: i32,
    /// Start method of the daemon (`so=`). Hosters may interpret it. This daemon interprets only
    /// the method of [`HostPlan::is_manual`].
    pub start_option: Option<String>,
    /// Command that debugs tasks on that host (`bx=`). The `PVM_DEBUGGER` of that host has
    /// priority.
    pub debugger: Option<String>,
}

impl HostPlan {
    /// True if a person starts the daemon.
    pub fn is_manual(&self) -> bool {
        self.start_option.as_deref() == Some("ms")
    }
}

/// Instructions for a hoster that starts a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HosterOrder {
    /// Login target in the form `host` or `user@host`.
    pub login: String,
    /// Command to run on that host.
    pub command: String,
    /// Secret that the daemon gets on its standard input, as `PVM_VMID=…`.
    pub secret: String,
}

/// A PVM error code and one sentence for the user.
pub type StartError = (PvmError, String);

/// Properties that a started daemon has reported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartedHost {
    pub arch: String,
    pub dsig: i32,
    /// Addresses on which the daemon listens.
    pub addresses: Vec<SocketAddr>,
}

/// An input of the machine.
#[derive(Clone, Debug)]
pub enum Event {
    /// A process of this user has connected to the socket. Its hello follows as the first frame.
    TaskConnected {
        conn: ConnId,
        /// Process id from the peer credentials.
        pid: i32,
    },
    TaskControl {
        conn: ConnId,
        message: ToDaemon,
    },
    /// A message about the set-up of a route between two tasks, sent by one of them to the other.
    TaskRoute {
        conn: ConnId,
        dst: Tid,
        message: RouteMsg,
        /// File descriptors of the message, as many as the message announces. There are none if the
        /// kernel has dropped them because this daemon has too many open files.
        descriptors: Descriptors,
    },
    TaskLink {
        conn: ConnId,
        /// Encoded link frame, see [`sempa_proto::link::LinkFrame::decode`].
        frame: Bytes,
    },
    /// A task's connection is closed. No event of this connection follows.
    TaskClosed {
        conn: ConnId,
        /// The violation of the protocol for which the connection was closed; `None` if there was
        /// none.
        protocol_error: Option<String>,
    },
    /// A session with another daemon is established. Its certificate has proved that the daemon
    /// runs on this host of the virtual machine.
    HostConnected {
        host: HostId,
    },
    /// A control message from another daemon.
    HostControl {
        host: HostId,
        message: HostMsg,
    },
    /// A message on the data channel from another daemon, for a task of this host.
    HostData {
        host: HostId,
        message: DataMsg,
    },
    /// The session with a host has ended, or the host was silent for the duration of the lease.
    HostLost {
        host: HostId,
        why: String,
    },
    /// An attempt to start a daemon has ended. After a success, the session with the daemon exists
    /// or is established soon.
    HostStarted {
        start: StartId,
        /// Properties of the daemon, or a PVM error code and one sentence for the user.
        result: Result<StartedHost, (PvmError, String)>,
    },
    /// Result of [`Output::PrepareHosts`]: an order for the hoster, or an error, for each start.
    HostsPrepared {
        orders: Vec<(StartId, Result<HosterOrder, StartError>)>,
    },
    /// A tasker has been started; its messages follow.
    TaskerStarted {
        service_use: ServiceUse,
    },
    Tasker(FromTasker),
    /// The tasker's process has ended. All tasks that it had started are dead.
    TaskerEnded {
        why: String,
    },
    /// Source: the target has received the images, or the transfer failed.
    ImagesSent {
        migration: MigrationId,
        /// Number of bytes sent.
        result: Result<u64, Failure>,
    },
    /// Target: the images have arrived unchanged, or the transfer failed.
    ImagesReceived {
        migration: MigrationId,
        /// Number of bytes received.
        result: Result<u64, Failure>,
    },
    /// Target: the missing memory of a post-copied task will not arrive.
    MemoryLost {
        migration: MigrationId,
        why: String,
    },
    /// Result of [`Output::RecordMigration`]; `Ok` means that the record is on disk.
    MigrationRecorded {
        migration: MigrationId,
        result: Result<(), Failure>,
    },
    /// Result of [`Output::BeginCheckpoint`]; `Ok` means that the store has room.
    CheckpointBegun {
        snapshot: SnapshotId,
        result: Result<(), StoreFailure>,
    },
    /// Result of [`Output::StorePart`]; `Ok` means that the part is in the store.
    PartStored {
        migration: MigrationId,
        result: Result<(), StoreFailure>,
    },
    /// Result of [`Output::SealCheckpoint`]; `Ok` means that the checkpoint is complete.
    CheckpointSealed {
        snapshot: SnapshotId,
        /// Name of the checkpoint, and its size in the store in bytes.
        result: Result<(String, u64), StoreFailure>,
    },
    /// Result of [`Output::OpenCheckpoint`]: metadata, or the reason why the checkpoint is
    /// unusable.
    CheckpointOpened {
        /// Id from the request.
        restart_number: u64,
        result: Result<CheckpointMeta, RestartFailure>,
    },
    /// Another virtual machine has taken over a job of this one.
    JobTakenOver {
        key: ClaimKey,
        by: JobHolder,
    },
    /// The checkpoint of this restart is damaged or missing. Precedes the report of the step that
    /// has failed for this reason.
    CheckpointDamaged {
        /// Id from the request.
        restart_number: u64,
        /// How the damage was detected.
        why: String,
        /// True if the store has no such checkpoint.
        is_missing: bool,
    },
    /// Result of [`Output::MarkDamaged`] for a job that rolls back.
    OlderCheckpointFound {
        job: Tid,
        /// The damaged checkpoint, and how the damage was detected.
        damaged_checkpoint: String,
        why: String,
        /// The newest older checkpoint of the job that is not known to be damaged; `None` if there
        /// is none. `Err` if the store could not be read.
        result: Result<Option<String>, StoreFailure>,
    },
    /// Result of [`Output::ReadPart`]: the daemon's state of a task, which is stored next to the
    /// images.
    PartRead {
        migration: MigrationId,
        result: Result<SavedTask, Failure>,
    },
    /// Result of [`Output::CollectState`]: number of bytes and files of the program's checkpoint.
    StateCollected {
        migration: MigrationId,
        result: Result<DumpReport, Failure>,
    },
    /// Result of [`Output::StageState`]; `Ok` means that all files are copied.
    StateStaged {
        migration: MigrationId,
        result: Result<(), Failure>,
    },
    /// Result of [`Output::InstallState`]; `Ok` means that all files have their final names.
    StateInstalled {
        migration: MigrationId,
        result: Result<(), Failure>,
    },
    /// Result of [`Output::RemoveCheckpoints`], with a result for each checkpoint.
    CheckpointsRemoved {
        /// Task that sent the request.
        tid: Tid,
        id: RequestId,
        result: Result<RemovalResults, StoreFailure>,
    },
    /// The store has removed these checkpoints to comply with its limits, or because their jobs
    /// ended long ago.
    CheckpointsExpired {
        checkpoints: Vec<String>,
    },
    /// Result of [`Output::ListCheckpoints`]: all checkpoints in the store.
    CheckpointsListed {
        /// Task that sent the request.
        tid: Tid,
        id: RequestId,
        result: Result<Vec<CheckpointEntry>, StoreFailure>,
    },
    /// A peer without a certificate of this virtual machine was rejected.
    UnauthenticatedPeer {
        /// The peer and the reason, in one sentence.
        text: String,
    },
    /// A process of a task has connected to the tasks' socket with the library of another PVM. Its
    /// connection is closed.
    ForeignLibrary {
        /// The spawn token in the environment of the process.
        spawn_token: i32,
        fault: ForeignLibrary,
    },
    /// The time of [`super::Machine::next_wakeup_time`] has been reached.
    Wake,
    /// The daemon must exit, because of a signal or because the master is lost.
    Stop {
        why: String,
    },
}

/// An effect for the shell to perform. An arrow (→) names the event that reports the result.
#[derive(Clone, Debug)]
pub enum Output {
    /// Send a control message to a task.
    SendToTask {
        conn: ConnId,
        message: ToTask,
    },
    /// Send a control message with file descriptors to a task.
    SendToTaskWithFds {
        conn: ConnId,
        message: ToTask,
        descriptors: Descriptors,
    },
    /// Send a link frame to a task. The frame may be dropped if the connection's queue is over its
    /// limit, because links retransmit.
    SendFrameToTask {
        conn: ConnId,
        /// Encoded link frame, as it was received.
        frame: Bytes,
    },
    /// The process that opened this connection has exited. Read what the process has written, and
    /// ignore what other holders of the socket write. [`Event::TaskClosed`] follows after all data
    /// of the process.
    DrainConnection {
        conn: ConnId,
    },
    /// Close a task's connection after everything that was sent on it before.
    CloseTask {
        conn: ConnId,
    },
    /// Send a message on the control channel of a session. Without a session the message is queued
    /// until a session is established, up to a limit.
    SendToHost {
        host: HostId,
        message: HostMsg,
    },
    /// Send a message on the data channel of a session. Over the limit, link frames may be dropped;
    /// other messages may not.
    SendData {
        host: HostId,
        message: DataMsg,
    },
    /// Maintain a session with this host: connect until a session is established, and again when it
    /// breaks, until [`Output::Disconnect`].
    Connect {
        host: HostId,
        /// Addresses on which the host listens.
        addresses: Vec<SocketAddr>,
    },
    /// End the session and refuse new sessions of this host.
    Disconnect {
        host: HostId,
    },
    /// Start a daemon over the remote shell, with its certificate on standard input. →
    /// [`Event::HostStarted`]
    StartHost {
        start: StartId,
        plan: HostPlan,
    },
    /// Prepare these starts for a hoster. The daemons that the hoster starts will request their
    /// certificates from this daemon. → [`Event::HostsPrepared`]
    PrepareHosts {
        plans: Vec<(StartId, HostPlan)>,
    },
    /// Interpret the output line of a daemon that a hoster has started. → [`Event::HostStarted`]
    HosterReported {
        start: StartId,
        /// Output line of the daemon, or the name of an error.
        line: String,
    },
    /// Abandon a start that is in progress. No event follows.
    AbandonStart {
        start: StartId,
    },
    /// Start a tasker. This host has just entered the host table, so tasks can be spawned on it.
    /// The tasker is not started earlier, because its start would slow down the start of other
    /// daemons on the same processor.
    StartTasker,
    SendToTasker(ToTasker),
    /// Kill the tasker, because it hangs. → [`Event::TaskerEnded`]
    KillTasker {
        why: String,
    },
    /// Send a signal to the process that opened this connection.
    SendSignal {
        conn: ConnId,
        signal: i32,
    },
    /// Send the images of a migration to the target while the tasker is still writing them.
    /// [`Output::SendImages`] marks the images as complete. If the transfer fails before that
    /// output: → [`Event::ImagesSent`], at the target [`Event::ImagesReceived`]
    SendImagesEarly {
        migration: MigrationId,
        target: HostId,
    },
    /// Send the images of a migration, or those that were not sent early, to the target. →
    /// [`Event::ImagesSent`], at the target [`Event::ImagesReceived`]
    SendImages {
        migration: MigrationId,
        target: HostId,
    },
    /// Accept the images of this migration from its source. Images that are not expected are
    /// refused.
    ExpectImages {
        migration: MigrationId,
        source: HostId,
    },
    /// Source: start to serve memory for post-copy. The tasker offers the memory at the socket
    /// [`memory_socket_path`](sempa_proto::runtime_paths::RuntimePaths::memory_socket_path).
    /// Requests of the target are forwarded until source or target closes the connection.
    ServeMemory {
        migration: MigrationId,
        target: HostId,
    },
    /// Target: start to fetch memory for post-copy from the source. The tasker requests the memory
    /// at the same socket as for [`Output::ServeMemory`]. If the connection breaks before the
    /// tasker closes it: → [`Event::MemoryLost`]
    FetchMemory {
        migration: MigrationId,
        source: HostId,
    },
    /// Stop sending or receiving the images of this migration, and delete them on this host. A
    /// post-copy memory transfer in progress continues. Idempotent.
    DropImages {
        migration: MigrationId,
    },
    /// Write the resume token of a quiesced library.
    WriteToken {
        path: PathBuf,
        token: ResumeToken,
    },
    /// Remove a resume token. Idempotent.
    RemoveToken {
        path: PathBuf,
    },
    /// Source: store the record next to the images of a snapshot part, and send record and images
    /// to the master. → [`Event::ImagesSent`], on the master [`Event::ImagesReceived`]
    UploadPart {
        migration: MigrationId,
        /// The task's state as this daemon knows it.
        record: Box<SavedTask>,
        /// The master; `None` on the master itself.
        receiver: Option<HostId>,
    },
    /// Source: copy the files of a program's own checkpoint into the image directory of this
    /// snapshot part. → [`Event::StateCollected`]
    CollectState {
        migration: MigrationId,
        /// Paths of the files, relative to `dir` or absolute.
        files: Vec<PathBuf>,
        /// Working directory of the program.
        dir: PathBuf,
    },
    /// Target of a restart: copy the files of [`Output::CollectState`] to their directories, under
    /// temporary names. [`Output::DropImages`] removes them. → [`Event::StateStaged`]
    StageState {
        migration: MigrationId,
        /// Paths of the files, relative to `dir` or absolute.
        files: Vec<PathBuf>,
        /// Working directory of the program.
        dir: PathBuf,
    },
    /// Target of a restart: rename the staged files to their final names. From then on they belong
    /// to the task. → [`Event::StateInstalled`]
    InstallState {
        migration: MigrationId,
    },
    /// Target of a restart: read the record that is stored next to the images. →
    /// [`Event::PartRead`]
    ReadPart {
        migration: MigrationId,
    },
    /// Master: reserve room for a checkpoint in the store. → [`Event::CheckpointBegun`]
    BeginCheckpoint {
        snapshot: SnapshotId,
        job: Tid,
    },
    /// Master: put the images of a snapshot part into the store. → [`Event::PartStored`]
    StorePart {
        snapshot: SnapshotId,
        migration: MigrationId,
        tid: Tid,
    },
    /// Master: complete a checkpoint, and claim the job if this is its first one. →
    /// [`Event::CheckpointSealed`]
    SealCheckpoint {
        snapshot: SnapshotId,
        meta: Box<CheckpointMeta>,
        /// Names of checkpoints that must not be removed to make room.
        protected_checkpoints: Vec<String>,
    },
    /// Master: remove a checkpoint that was not completed. Idempotent.
    AbandonCheckpoint {
        snapshot: SnapshotId,
    },
    /// Master: read the metadata of a checkpoint, and claim its job. →
    /// [`Event::CheckpointOpened`]
    OpenCheckpoint {
        /// Id of the restart, chosen by the machine.
        restart_number: u64,
        checkpoint: String,
        /// Creation time of this virtual machine, in microseconds since 1970.
        vm_created_at: Micros,
        /// Claim the job although it may run in another virtual machine.
        force: bool,
    },
    /// Master: unpack a part of an open checkpoint and send the images to the part's host. →
    /// [`Event::ImagesSent`], on that host [`Event::ImagesReceived`]
    SendPart {
        /// Id under which the checkpoint was opened.
        restart_number: u64,
        migration: MigrationId,
        tid: Tid,
        /// The target; `None` for the master itself.
        receiver: Option<HostId>,
    },
    /// Master: close a checkpoint that a restart no longer needs. Idempotent.
    CloseCheckpoint {
        /// Id under which the checkpoint was opened.
        restart_number: u64,
        /// False if the restart was refused: the claim is released, unless this virtual machine had
        /// it before. True if the job runs, or if [`Output::ReleaseJob`] will follow.
        keeps_claim: bool,
    },
    /// Master: a job that has checkpoints does not run any more. Another virtual machine may
    /// restart it. Idempotent.
    ReleaseJob {
        key: ClaimKey,
    },
    /// Master: mark checkpoints as those of ended jobs, or of jobs that run again. The latter are
    /// intact, so their damage marks are removed. Outputs of this kind are performed in order.
    MarkCheckpoints {
        checkpoints: Vec<String>,
        /// True if the jobs have ended.
        has_ended: bool,
        /// Names of checkpoints that must not be removed to make room.
        protected_checkpoints: Vec<String>,
    },
    /// Master: mark a checkpoint as damaged. If its job rolls back, find the next older one. →
    /// [`Event::OlderCheckpointFound`]
    MarkDamaged {
        checkpoint: String,
        why: String,
        rollback_job: Option<ClaimKey>,
    },
    /// Master: remove checkpoints. → [`Event::CheckpointsRemoved`]
    RemoveCheckpoints {
        /// Task that sent the request.
        tid: Tid,
        id: RequestId,
        selection: RemovalSelection,
        /// Include checkpoints of other virtual machines.
        include_foreign: bool,
        /// Checkpoints that must not be removed, with the reason for each.
        refusals: BTreeMap<String, RemovalRefusal>,
    },
    /// Master: send a copy of a checkpoint to a host that expects the copy. →
    /// [`Event::ImagesSent`], on that host [`Event::ImagesReceived`]
    SendCopy {
        /// Id of the transfer.
        migration: MigrationId,
        checkpoint: String,
        receiver: HostId,
    },
    /// Receive a copy of a checkpoint from the master into the store of this host. Copies that are
    /// not expected are refused. [`Output::DropImages`] aborts the transfer. →
    /// [`Event::ImagesReceived`]
    ExpectCopy {
        /// Id of the transfer.
        migration: MigrationId,
        sender: HostId,
        checkpoint: String,
    },
    /// Abort the transfer of a checkpoint copy, or remove the copy if it has just been received.
    DiscardCopy {
        /// Id of the transfer.
        migration: MigrationId,
        checkpoint: String,
    },
    /// Remove checkpoints from this host's store: copies, or a checkpoint that was completed after
    /// its snapshot had failed. Idempotent.
    DropCheckpoints {
        checkpoints: Vec<String>,
    },
    /// Master: list the checkpoints in the store. → [`Event::CheckpointsListed`]
    ListCheckpoints {
        /// Task that sent the request.
        tid: Tid,
        id: RequestId,
    },
    /// Append to the durable record of committed migrations, and sync the record to disk. →
    /// [`Event::MigrationRecorded`]
    RecordMigration {
        migration: MigrationId,
        tid: Tid,
        /// Host that runs the task after the migration.
        target: HostId,
    },
    /// A migration step is about to begin. Tests halt the daemon at this output.
    StepStarting {
        tid: Tid,
        step: Step,
    },
    /// A migration step has ended, and no other daemon has been notified yet. Tests halt the daemon
    /// at this output.
    StepEnded {
        tid: Tid,
        step: Step,
    },
    /// Write a line to the daemon's log.
    Log {
        level: LogLevel,
        /// Migration, checkpoint or job that the line concerns; `None` if there is not exactly one.
        subject: Option<LogSubject>,
        text: String,
    },
    /// Master: write output of a task that has no collector to the log.
    LogTaskOutput {
        tid: Tid,
        bytes: Bytes,
    },
    /// Keep this summary of the virtual machine on the disk of this host, in place of the previous
    /// one. When the virtual machine ends in order, the shell removes it.
    KeepSummary {
        summary: Box<VmSummary>,
    },
    /// The master is lost: the kept summary must say so. [`Output::Shutdown`] follows.
    MasterLost {
        why: String,
    },
    /// All work of the daemon is finished: remove the socket and files, and exit.
    Shutdown,
}
