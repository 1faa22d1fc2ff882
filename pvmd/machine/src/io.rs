//! Everything that goes into the machine and comes out of it.
//!
//! The shell turns sockets, processes, files and clocks into [`Event`]s and carries out [`Output`]s in the order they come.
//! Outputs to one task, and to one host on one channel, must be carried out in order; that is all the machine relies on. On
//! the data channel link frames of different pairs of tasks may change places with each other.

use bytes::Bytes;
use checkpoint_protocol::CutId;
use sempa_proto::checkpoint::{PartRecord, Removed, SetEntry, SetMeta, Stays, Unwanted};
use sempa_proto::host::{Carried, HostMsg};
use sempa_proto::ids::{HostId, Micros, MigrationId, RequestId};
use sempa_proto::migration::{Failure, Step};
use sempa_proto::route::RouteWord;
use sempa_proto::task::{ResumeToken, ToDaemon, ToTask};
use sempa_proto::tasker::{DumpReport, FromTasker, ToTasker};
use sempa_proto::{PvmError, Tid};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;

/// One connection of a task to this daemon; never used again after it closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnId(pub u64);

/// Descriptors that travel with a word between two tasks. The machine passes them on and looks at their number only.
#[derive(Clone, Debug, Default)]
pub struct Descriptors(Arc<Vec<OwnedFd>>);

impl Descriptors {
    /// These.
    pub fn new(all: Vec<OwnedFd>) -> Descriptors {
        Descriptors(Arc::new(all))
    }

    /// How many.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Each of them, in order.
    pub fn iter(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.0.iter().map(AsFd::as_fd)
    }
}

/// One attempt to start a daemon on another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StartId(pub u64);

/// What the machine may ask the world for while it handles an event. All answers are immediate.
pub trait World {
    /// Absolute path of an executable regular file: `name` as it is if it contains a `/` (relative to `dir` or the
    /// daemon's working directory), else the first in the search path.
    ///
    /// # Errors
    /// [`PvmError::NoFile`] when there is none.
    fn find_program(&self, name: &str, dir: Option<&str>) -> Result<PathBuf, PvmError>;
    /// `dir` if it is a directory that can be entered, else the daemon's working directory for tasks.
    fn work_dir(&self, dir: Option<&str>) -> PathBuf;
    /// The environment that every task of this host starts with (daemon's own, library folder, PVM variables).
    fn base_env(&self) -> Vec<Vec<u8>>;
    /// Microseconds since 1970, for events and clocks that leave this host.
    fn unix_time(&self) -> Micros;
    /// A number nobody can guess, 1..=i32::MAX.
    fn secret(&mut self) -> i32;
}

/// A daemon to start on another host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostPlan {
    /// Index it will have.
    pub id: HostId,
    /// Name as the user wrote it; becomes its name in the host table.
    pub name: String,
    /// Name or address to contact (`ip=`), usually `name`.
    pub contact: String,
    /// Login name (`lo=`), if another one.
    pub login: Option<String>,
    /// The daemon's command there (`dx=`), if another one.
    pub command: Option<String>,
    /// Search path for executables (`ep=`), unexpanded.
    pub search_path: Option<String>,
    /// Working directory (`wd=`), unexpanded.
    pub work_dir: Option<String>,
    /// Relative speed (`sp=`).
    pub speed: i32,
    /// How the daemon is to be started (`so=`); hosters know, this daemon knows only [`HostPlan::by_hand`].
    pub start_option: Option<String>,
    /// What debugs tasks there (`bx=`), unless `PVM_DEBUGGER` is set there.
    pub debugger: Option<String>,
}

impl HostPlan {
    /// True if a person is to start the daemon.
    pub fn by_hand(&self) -> bool {
        self.start_option.as_deref() == Some("ms")
    }
}

/// What a hoster has to know to start a daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartOrder {
    /// Where to log in: `host` or `user@host`.
    pub login: String,
    /// What to run there.
    pub command: String,
    /// The secret that it gets on its standard input, as `PVM_VMID=…`.
    pub secret: String,
}

/// PVM's code and one sentence for the user.
pub type Refused = (PvmError, String);

/// What a started daemon said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StartedHost {
    /// Architecture name.
    pub arch: String,
    /// Data signature.
    pub dsig: i32,
    /// Where it listens.
    pub addresses: Vec<SocketAddr>,
}

/// What happened.
#[derive(Clone, Debug)]
pub enum Event {
    /// A process of this user connected to the socket; its hello comes as the first frame.
    TaskConnected {
        /// The connection.
        conn: ConnId,
        /// Process number by the peer credentials.
        pid: i32,
    },
    /// A control message from a task.
    TaskControl {
        /// The connection.
        conn: ConnId,
        /// The message.
        message: ToDaemon,
    },
    /// A word of a task to another one about a route of their own.
    TaskRoute {
        /// The connection.
        conn: ConnId,
        /// The other task.
        to: Tid,
        /// The word.
        word: RouteWord,
        /// As many as the word announces.
        descriptors: Descriptors,
    },
    /// A link frame from a task, as its body is on the wire ([`sempa_proto::link::LinkFrame::decode`]).
    TaskLink {
        /// The connection.
        conn: ConnId,
        /// The frame's body.
        frame: Bytes,
    },
    /// The connection closed or broke, or something was not understood (`garbage`); no event of it follows.
    TaskClosed {
        /// The connection.
        conn: ConnId,
        /// Why, when the peer did not follow the protocol.
        garbage: Option<String>,
    },
    /// The session with another daemon stands; it has proved to be this host by its certificate.
    HostConnected {
        /// The host.
        host: HostId,
    },
    /// A control message from another daemon.
    HostControl {
        /// The host.
        host: HostId,
        /// The message.
        message: HostMsg,
    },
    /// Something on the data channel from another daemon, for a task here.
    HostCarried {
        /// The host.
        host: HostId,
        /// What.
        carried: Carried,
    },
    /// The session ended or nothing was heard for the lease.
    HostLost {
        /// The host.
        host: HostId,
        /// What happened.
        why: String,
    },
    /// An attempt to start a daemon ended. On success its session may already stand or follow.
    HostStarted {
        /// The attempt.
        start: StartId,
        /// What it is, or PVM's code and one sentence for the user.
        result: Result<StartedHost, (PvmError, String)>,
    },
    /// The orders of [`Output::PrepareHosts`].
    HostsPrepared {
        /// One for each.
        orders: Vec<(StartId, Result<StartOrder, Refused>)>,
    },
    /// A message of the tasker.
    Tasker(FromTasker),
    /// The tasker's process ended; all its tasks are dead.
    TaskerGone {
        /// What happened.
        why: String,
    },
    /// Source: the target has the images, or they could not be sent.
    ImagesSent {
        /// The move.
        migration: MigrationId,
        /// Bytes sent.
        result: Result<u64, Failure>,
    },
    /// Target: the images are here as they were sent, or not.
    ImagesReceived {
        /// The move.
        migration: MigrationId,
        /// Bytes received.
        result: Result<u64, Failure>,
    },
    /// Target: what is missing of the memory of a task that came here will not come.
    MemoryLost {
        /// The move.
        migration: MigrationId,
        /// Why.
        why: String,
    },
    /// The record of [`Output::RecordMove`] is on disk, or could not be written.
    MoveRecorded {
        /// The move.
        migration: MigrationId,
        /// Whether it is there.
        result: Result<(), Failure>,
    },
    /// [`Output::BeginSet`]: there is room for a set, or why not.
    SetBegun {
        /// The attempt.
        cut: CutId,
        /// Whether there is.
        result: Result<(), String>,
    },
    /// [`Output::KeepPart`]: it is in the store, or why not.
    PartKept {
        /// The part.
        migration: MigrationId,
        /// Whether it is.
        result: Result<(), String>,
    },
    /// [`Output::SealSet`]: its name and its bytes in the store, or why there is none.
    SetSealed {
        /// The attempt.
        cut: CutId,
        /// What there is.
        result: Result<(String, u64), String>,
    },
    /// [`Output::OpenSet`]: what it is, or why it cannot be used.
    SetOpened {
        /// The attempt.
        restart: u64,
        /// What it is.
        result: Result<SetMeta, String>,
    },
    /// [`Output::ReadPart`]: what lay beside the images.
    PartRead {
        /// The part.
        migration: MigrationId,
        /// What lay there.
        result: Result<PartRecord, Failure>,
    },
    /// [`Output::CollectState`]: how many bytes there are in how many files.
    StateCollected {
        /// The part.
        migration: MigrationId,
        /// What there is.
        result: Result<DumpReport, Failure>,
    },
    /// [`Output::StageState`].
    StateStaged {
        /// The part.
        migration: MigrationId,
        /// Whether it is there.
        result: Result<(), Failure>,
    },
    /// [`Output::NameState`].
    StateNamed {
        /// The part.
        migration: MigrationId,
        /// Whether all have their names.
        result: Result<(), Failure>,
    },
    /// [`Output::RemoveSets`].
    SetsRemoved {
        /// Who asked.
        tid: Tid,
        /// His request.
        id: RequestId,
        /// What became of each set.
        result: Result<Removed, String>,
    },
    /// These sets were removed to keep the limits of the store, or because their jobs have ended long ago.
    SetsSwept {
        /// Their names.
        sets: Vec<String>,
    },
    /// [`Output::ListSets`].
    SetsListed {
        /// Who asked.
        tid: Tid,
        /// His request.
        id: RequestId,
        /// What there is.
        result: Result<Vec<SetEntry>, String>,
    },
    /// Somebody without a certificate of this virtual machine was turned away.
    Stranger {
        /// Who and why, in one sentence.
        text: String,
    },
    /// The time of [`super::Machine::next_wakeup`] has come.
    Wake,
    /// The daemon is asked to end (signal, lost master).
    Stop {
        /// Why.
        why: String,
    },
}

/// What to do.
#[derive(Clone, Debug)]
pub enum Output {
    /// Send a control message to a task.
    ToTask {
        /// The connection.
        conn: ConnId,
        /// The message.
        message: ToTask,
    },
    /// Send a control message to a task, and descriptors with it.
    RouteToTask {
        /// The connection.
        conn: ConnId,
        /// The message.
        message: ToTask,
        /// What travels with it.
        descriptors: Descriptors,
    },
    /// Send a link frame to a task. May be dropped when the connection's queue is over its limit: links re-send.
    LinkToTask {
        /// The connection.
        conn: ConnId,
        /// The frame's body as it came.
        frame: Bytes,
    },
    /// Whoever made a connection has ended: take what it has written, and nothing that others write who hold the socket.
    /// [`Event::TaskClosed`] comes behind that, however long the way to the machine is.
    HearOut {
        /// The connection.
        conn: ConnId,
    },
    /// Close a task's connection after what was sent before.
    CloseTask {
        /// The connection.
        conn: ConnId,
    },
    /// Send on the control channel of a session. Without a session it waits for one, up to a limit.
    ToHost {
        /// The host.
        host: HostId,
        /// The message.
        message: HostMsg,
    },
    /// Send on the data channel of a session. Link frames may be dropped over the limit; items may not.
    Carry {
        /// The host.
        host: HostId,
        /// What.
        carried: Carried,
    },
    /// Have a session with this host: dial unless one stands, and go on trying until [`Output::Forget`].
    Connect {
        /// The host.
        host: HostId,
        /// Where it listens.
        addresses: Vec<SocketAddr>,
    },
    /// End the session, refuse new ones of this host.
    Forget {
        /// The host.
        host: HostId,
    },
    /// Start a daemon over the remote shell and give it its certificate on standard input.
    StartHost {
        /// The attempt.
        start: StartId,
        /// What to start.
        plan: HostPlan,
    },
    /// Make these starts ready for a hoster: the daemon that it starts will ask here for its certificate.
    /// → [`Event::HostsPrepared`]
    PrepareHosts {
        /// What to start.
        plans: Vec<(StartId, HostPlan)>,
    },
    /// What a hoster heard from the daemon that it started, or the name of an error. → [`Event::HostStarted`]
    HosterHeard {
        /// The attempt.
        start: StartId,
        /// The line.
        line: String,
    },
    /// Give up an attempt that has not ended; no event follows.
    AbandonStart {
        /// The attempt.
        start: StartId,
    },
    /// This daemon is in the host table now, so tasks may come: have a tasker. Before that it would only take the
    /// processor from whatever brings the other hosts in.
    StartTasker,
    /// Tell the tasker.
    ToTasker(ToTasker),
    /// Send a signal to the process on the other end of a connection.
    Signal {
        /// The connection.
        conn: ConnId,
        /// Signal number.
        signal: i32,
    },
    /// Begin to send the image directory of a move to the target while the tasker is still writing it; [`Output::SendImages`]
    /// says that it is complete. If that fails before: → [`Event::ImagesSent`], there [`Event::ImagesReceived`]
    SendAhead {
        /// The move.
        migration: MigrationId,
        /// The target.
        to: HostId,
    },
    /// Send the image directory of a move to the target, or the rest of it. → [`Event::ImagesSent`], there
    /// [`Event::ImagesReceived`]
    SendImages {
        /// The move.
        migration: MigrationId,
        /// The target.
        to: HostId,
    },
    /// Accept the images of this move from this host; without it they are refused.
    ExpectImages {
        /// The move.
        migration: MigrationId,
        /// The source.
        from: HostId,
    },
    /// Source: from now on the tasker hands out memory at [`Place::memory_way`](sempa_proto::place::Place::memory_way); the target
    /// gets what it asks for, until the tasker's end or the target's closes.
    LendMemory {
        /// The move.
        migration: MigrationId,
        /// The target.
        to: HostId,
    },
    /// Target: from now on the tasker asks for memory at that place; it comes from this host. If the way breaks before the
    /// tasker's end closes: → [`Event::MemoryLost`]
    ExpectMemory {
        /// The move.
        migration: MigrationId,
        /// The source.
        from: HostId,
    },
    /// Stop sending or receiving and delete the images of this move on this host. Memory that is on its way
    /// comes nevertheless. Repeatable.
    DropImages {
        /// The move.
        migration: MigrationId,
    },
    /// Write the token that wakes a quiesced library.
    WriteToken {
        /// The file.
        path: PathBuf,
        /// Its content.
        token: ResumeToken,
    },
    /// Remove a token. Repeatable.
    RemoveToken {
        /// The file.
        path: PathBuf,
    },
    /// Source: put this beside the images of a part of a checkpoint and send them to the master, or, there, say that they are
    /// here. → [`Event::ImagesSent`], [`Event::ImagesReceived`]
    Deposit {
        /// The part.
        migration: MigrationId,
        /// What this daemon knows of the task.
        record: Box<PartRecord>,
        /// The master; none on the master itself.
        to: Option<HostId>,
    },
    /// Source of a part of a checkpoint: copy these files, into which a program has written its state, to where images of this
    /// part are. → [`Event::StateCollected`]
    CollectState {
        /// The part.
        migration: MigrationId,
        /// The files, relative to the directory unless they begin with a slash.
        files: Vec<PathBuf>,
        /// The working directory of the program.
        dir: PathBuf,
    },
    /// Target of a restart: copy what [`Output::CollectState`] has copied to where it belongs, under other names so far.
    /// [`Output::DropImages`] removes it. → [`Event::StateStaged`]
    StageState {
        /// The part.
        migration: MigrationId,
        /// The files, relative to the directory unless they begin with a slash.
        files: Vec<PathBuf>,
        /// The working directory of the program.
        dir: PathBuf,
    },
    /// Target of a restart: give what was staged its names; it is the task's own from now on. → [`Event::StateNamed`]
    NameState {
        /// The part.
        migration: MigrationId,
    },
    /// Target of a restart: read what lies beside the images. → [`Event::PartRead`]
    ReadPart {
        /// The part.
        migration: MigrationId,
    },
    /// Master: make room for a set in the store. → [`Event::SetBegun`]
    BeginSet {
        /// The attempt.
        cut: CutId,
        /// Whose it is.
        job: Tid,
    },
    /// Master: put the images of a part into the store. → [`Event::PartKept`]
    KeepPart {
        /// The attempt.
        cut: CutId,
        /// The part.
        migration: MigrationId,
        /// Its task.
        tid: Tid,
    },
    /// Master: complete a set. → [`Event::SetSealed`]
    SealSet {
        /// The attempt.
        cut: CutId,
        /// What it is.
        meta: Box<SetMeta>,
        /// Names of sets that must not go to make room.
        keep: Vec<String>,
    },
    /// Master: remove what there is of a set that is not complete. Repeatable.
    AbandonSet {
        /// The attempt.
        cut: CutId,
    },
    /// Master: look into a set. → [`Event::SetOpened`]
    OpenSet {
        /// The attempt.
        restart: u64,
        /// Its name.
        set: String,
    },
    /// Master: unpack a part of a set that is open, and send it to this host, or say that it is here.
    /// → [`Event::ImagesSent`], [`Event::ImagesReceived`] there
    SendPart {
        /// The attempt by which it was opened.
        restart: u64,
        /// The part.
        migration: MigrationId,
        /// Its task.
        tid: Tid,
        /// Its host; none for the master itself.
        to: Option<HostId>,
    },
    /// Master: a set is needed no more. Repeatable.
    CloseSet {
        /// The attempt by which it was opened.
        restart: u64,
    },
    /// Master: the jobs of these sets have ended for good, or run again. Earlier orders of this kind are carried out before.
    MarkSets {
        /// Their names.
        sets: Vec<String>,
        /// True if they have ended.
        ended: bool,
        /// Names of sets that must not go to make room.
        keep: Vec<String>,
    },
    /// Master: remove sets. → [`Event::SetsRemoved`]
    RemoveSets {
        /// Who asks.
        tid: Tid,
        /// His request.
        id: RequestId,
        /// Which ones.
        which: Unwanted,
        /// Also those of other virtual machines.
        any: bool,
        /// Not these.
        stay: BTreeMap<String, Stays>,
    },
    /// Master: send a set to this host, which expects it. → [`Event::ImagesSent`], [`Event::ImagesReceived`] there
    SendCopy {
        /// The transfer.
        migration: MigrationId,
        /// Name of the set.
        set: String,
        /// To whom.
        to: HostId,
    },
    /// Take a set from this host into the own store; without it it is refused. [`Output::DropImages`] gives it up.
    /// → [`Event::ImagesReceived`]
    ExpectCopy {
        /// The transfer.
        migration: MigrationId,
        /// From whom.
        from: HostId,
        /// Name of the set.
        set: String,
    },
    /// Give up a set that comes, or has just come, into the own store: nothing of it stays.
    GiveUpCopy {
        /// The transfer.
        migration: MigrationId,
        /// Name of the set.
        set: String,
    },
    /// Remove sets from the own store that nobody is to have: copies, or one that was complete too late. Repeatable.
    DropSets {
        /// Names of the sets.
        sets: Vec<String>,
    },
    /// Master: what lies in the store? → [`Event::SetsListed`]
    ListSets {
        /// Who asks.
        tid: Tid,
        /// His request.
        id: RequestId,
    },
    /// Append to the durable record of committed moves and sync it. → [`Event::MoveRecorded`]
    RecordMove {
        /// The move.
        migration: MigrationId,
        /// The task.
        tid: Tid,
        /// Where it runs from now on.
        to: HostId,
    },
    /// A step of a move is about to begin. Tests have the daemon stand still here.
    StepBegins {
        /// The task.
        tid: Tid,
        /// The step.
        step: Step,
    },
    /// A step of a move has ended, which nobody has been told yet. Tests have the daemon stand still here.
    StepEnded {
        /// The task.
        tid: Tid,
        /// The step.
        step: Step,
    },
    /// A line for the daemon's log.
    Log {
        /// The line.
        text: String,
    },
    /// Output of a task that nobody collects, for the log (master only).
    LogTaskOutput {
        /// The task.
        tid: Tid,
        /// The bytes.
        bytes: Bytes,
    },
    /// All is done: remove socket and files, end the process.
    Shutdown,
}
