//! Control messages between a task's library and the daemon of its host, over a Unix stream socket.
//!
//! The first frame from a task is [`ToDaemon::Hello`]; the daemon answers [`ToTask::Welcome`] or [`ToTask::Refused`].
//! After that both sides send what they like: control frames and link frames ([`crate::link`]). The socket is reliable, so
//! control messages are not numbered; requests carry an id because their replies come when they are ready, possibly
//! from another daemon after the task has moved.

mod spawn;

pub use self::spawn::{
    GrantOf, SPAWN_ARCH, SPAWN_COMPLEMENT, SPAWN_DEBUG, SPAWN_HOST, SPAWN_NO_PARENT, SPAWN_PINNED,
    SpawnRequest,
};

use crate::checkpoint::{
    CutFailure, Pace, Removed, RestartFailure, RestartReport, SetEntry, SetReport, Unwanted,
};
use crate::engine::Engine;
use crate::error::PvmError;
use crate::event::{Event, EventKind};
use crate::group::{GroupReply, GroupRequest};
use crate::ids::{HostId, Micros, MigrationId, RequestId, Tid};
use crate::link::Talk;
use crate::message::Message;
use crate::migration::{Failure, Refusal, Step, Survey, Timeline};
use crate::route::RouteWord;
use crate::table::{AddedHost, HostTable, TaskInfo};
use serde::{Deserialize, Serialize};
use std::net::IpAddr;
use std::path::PathBuf;

/// First bytes of a [`Hello`]: tells a task of ours from anything else that finds the socket.
pub const TASK_MAGIC: [u8; 4] = *b"SMPT";

/// Requests a task may have unanswered; the daemon refuses more with [`PvmError::OutOfRes`].
pub const REQUESTS_OPEN_MAX: usize = 4096;
/// Names, patterns and host lines a task may send, in bytes each.
pub const NAME_BYTES_MAX: usize = 64 << 10;

/// File status flag (`O_APPEND`) by which a task's library marks its connections: to the daemon, and to other tasks. It means
/// nothing for a socket; whoever looks at the task sees by it which connections the library closes before a move, and in a forked
/// child.
pub const LIBRARY_SOCKET_FLAG: i32 = 0o2000;

/// A number that a spawned process presents to claim its tid (environment variable `PVMEPID`), always positive.
pub type ExpectedPid = i32;

/// How far one end of a link has sent, for the order of notifications.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinkMark {
    /// The other end.
    pub peer: Tid,
    /// Number after the last fragment sent to it.
    pub end: u64,
}

/// Who is connecting.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Claim {
    /// Nobody, who only wants to know whether a daemon is at work here. It refuses that; one that ends says nothing.
    Nobody,
    /// A process that was not started by the virtual machine.
    New,
    /// A process that the daemon started.
    Spawned {
        /// The number from its environment.
        epid: ExpectedPid,
    },
    /// A task that let go of its daemon for a move, here or elsewhere.
    Resume {
        /// The task.
        tid: Tid,
        /// The move.
        migration: MigrationId,
    },
}

/// What a task from a command line wants when its daemon ends. Tasks that a daemon or a tasker started end with it in any
/// case.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum AtEnd {
    /// SIGTERM, as PVM does it: a program of PVM's interface waits for nothing else.
    #[default]
    Signalled,
    /// Its calls tell it (`PvmSysErr`); its process has other things to do.
    Told,
}

/// The first frame of a task.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    /// [`TASK_MAGIC`].
    pub magic: [u8; 4],
    /// [`crate::WIRE_VERSION`].
    pub version: u16,
    /// Who it is.
    pub claim: Claim,
    /// Its process number as it sees it itself.
    pub pid: i32,
    /// Name of its program.
    pub program: String,
    /// What it wants when the daemon ends.
    pub at_end: AtEnd,
}

/// Where output or trace records of a task go: a task, a context and a tag. `tid` NONE: the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sink {
    /// The collecting task.
    pub tid: Tid,
    /// Context of the messages.
    pub ctx: i32,
    /// Tag of the messages.
    pub tag: i32,
}

/// What a notification is about (`pvm_notify`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NotifyWhat {
    /// One message for each task when it ends.
    TaskExit(Vec<Tid>),
    /// One message for each host when it leaves; host tids as given by the caller.
    HostDelete(Vec<Tid>),
    /// A message whenever hosts join; `count` messages, −1 without end, 0 cancels.
    HostAdd {
        /// How many messages.
        count: i32,
    },
}

/// A notification request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotifyRequest {
    /// About what.
    pub what: NotifyWhat,
    /// Context of the messages.
    pub ctx: i32,
    /// Tag of the messages.
    pub tag: i32,
    /// Take back an earlier request instead.
    pub cancel: bool,
}

/// Operations on the mailbox of the virtual machine (`pvm_putinfo` and friends).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MailboxRequest {
    /// Store a message.
    Put {
        /// Class.
        name: String,
        /// `PvmMbox*` bits.
        flags: i32,
        /// The message.
        message: Message,
    },
    /// Fetch a message.
    Take {
        /// Class.
        name: String,
        /// Index.
        index: i32,
        /// `PvmMbox*` bits.
        flags: i32,
    },
    /// Remove an entry.
    Delete {
        /// Class.
        name: String,
        /// Index.
        index: i32,
    },
    /// Remove persistent entries that nobody owns.
    Clean {
        /// Class; empty for all.
        name: String,
        /// Only this index.
        index: Option<i32>,
    },
    /// List classes that match a pattern.
    List {
        /// Pattern; empty for all.
        pattern: String,
    },
}

/// One class of the mailbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MailboxClass {
    /// Its name.
    pub name: String,
    /// Its entries: index, owner, flags.
    pub entries: Vec<(i32, Tid, i32)>,
}

/// Which requests a resource manager wants to serve; the daemon goes on serving the others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RmServes {
    /// Placement of spawns (`SM_SPAWN`).
    pub spawn: bool,
    /// All others: `SM_CONFIG`, `SM_ADDHOST`, `SM_DELHOST`, `SM_TASK`, `SM_NOTIFY`.
    pub others: bool,
    /// It is told of the ends of its tasks (`SM_TASKX`). One that follows the event log knows of them.
    pub ends: bool,
}

/// The resource manager that a task is to ask.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RmInfo {
    /// Its task.
    pub tid: Tid,
    /// What it serves.
    pub serves: RmServes,
}

/// A service that a task may do in the place of its daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Service {
    /// Starting daemons on other hosts (`pvm_reg_hoster`); on the master only.
    Hoster,
    /// Starting tasks on its host (`pvm_reg_tasker`).
    Tasker,
}

/// What a tracer wants of the tasks that have no other place for their output and trace (`pvm_reg_tracer`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracerSettings {
    /// Context of trace messages.
    pub trace_ctx: i32,
    /// Tag of trace messages.
    pub trace_tag: i32,
    /// Context of output messages.
    pub out_ctx: i32,
    /// Tag of output messages.
    pub out_tag: i32,
    /// The events that are wanted, as in `PVMTMASK`.
    pub mask: Vec<u8>,
    /// Bytes that a task collects before it sends.
    pub buffer: i32,
    /// `PvmTrace*` option.
    pub options: i32,
}

/// The tracer of the virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TracerInfo {
    /// Its task.
    pub tid: Tid,
    /// What it wants.
    pub settings: TracerSettings,
}

impl TracerInfo {
    /// Where trace records go.
    pub fn trace(&self) -> Sink {
        Sink {
            tid: self.tid,
            ctx: self.settings.trace_ctx,
            tag: self.settings.trace_tag,
        }
    }

    /// Where output goes.
    pub fn output(&self) -> Sink {
        Sink {
            tid: self.tid,
            ctx: self.settings.out_ctx,
            tag: self.settings.out_tag,
        }
    }
}

/// Numbers in one `pvm_tickle` at most.
pub const TICKLE_WORDS_MAX: usize = 10;

/// What a task asks its daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Request {
    /// Leave the virtual machine (`pvm_exit`). All that was sent has been put on the socket before. → [`Reply::Done`]
    Exit {
        /// How far each link has sent.
        marks: Vec<LinkMark>,
    },
    /// → [`Reply::Hosts`]
    Config,
    /// All hosts (0), one host (host tid) or one task. → [`Reply::Tasks`]
    Tasks {
        /// The filter.
        selector: Tid,
    },
    /// Place and start without a resource manager. → [`Reply::Spawned`]
    Spawn(SpawnRequest),
    /// Host-file lines. → [`Reply::HostsAdded`]
    AddHosts {
        /// One line per host.
        lines: Vec<String>,
    },
    /// → [`Reply::HostsDeleted`]
    DelHosts {
        /// Host names.
        names: Vec<String>,
    },
    /// → [`Reply::Done`] or [`Reply::Failed`]
    HostStatus {
        /// Host name; `.` is the task's own.
        name: String,
    },
    /// → [`Reply::Done`] or [`Reply::Failed`]
    TaskStatus {
        /// The task.
        tid: Tid,
    },
    /// → [`Reply::Done`]
    Signal {
        /// The task.
        tid: Tid,
        /// Signal number.
        signal: i32,
    },
    /// Has a task stand still until somebody lets it go on; it stays so through moves. A task from a command line, or
    /// one that serves the virtual machine, is not suspended. → [`Reply::Done`], also for one that is so already, or
    /// [`Reply::Failed`]
    Suspend {
        /// The task.
        tid: Tid,
        /// False: let it go on.
        suspend: bool,
        /// The resource manager's reason when it is one that asks; `None`: asked by the caller.
        cause: Option<crate::suspend::Cause>,
    },
    /// → [`Reply::Done`]
    Notify(NotifyRequest),
    /// Stop the whole virtual machine. → [`Reply::Done`], then the socket closes.
    Halt,
    /// Become the resource manager of this daemon. → [`Reply::Rm`]
    RegisterRm(RmServes),
    /// → [`Reply::Mailbox`], [`Reply::MailboxIndex`], [`Reply::MailboxClasses`], [`Reply::Done`]
    Mailbox(MailboxRequest),
    /// → [`Reply::Group`]
    Group(GroupRequest),
    /// → [`Reply::Context`]
    NewContext,
    /// → [`Reply::Done`] or [`Reply::Failed`]
    FreeContext {
        /// The context.
        ctx: i32,
    },
    /// → [`Reply::Clock`]
    HostSync {
        /// Host tid.
        host: Tid,
    },
    /// Where this task's own output goes from now on. → [`Reply::Done`]
    SetOutput(Sink),
    /// Remove what a reset removes; with `kill` end all tasks but the caller and those that asked not to be. → [`Reply::Done`]
    Reset {
        /// End tasks as well.
        kill: bool,
    },
    /// Move a task. → [`Reply::MoveStarted`] at once, or with `wait` [`Reply::Moved`] when it has ended.
    Migrate {
        /// The task.
        tid: Tid,
        /// Host name, or host tid in hex as `t80000`.
        to: String,
        /// The resource manager's reason when it is one that asks; `None`: asked by the caller.
        cause: Option<crate::migration::Cause>,
        /// Answer only when the move has ended.
        wait: bool,
    },
    /// Which hosts would take a task? Nothing changes anywhere. → [`Reply::Survey`]
    CanMigrate {
        /// The task.
        tid: Tid,
        /// Only this one: host name, or host tid in hex as `t80000`.
        to: Option<String>,
    },
    /// What foreign tasks may do on this host, as its owner wants it; from a load watcher. → [`Reply::Done`]
    Guests(crate::owner::GuestsWord),
    /// The log from an entry on. → [`Reply::Events`]
    Events {
        /// First number wanted.
        from: u64,
        /// At most so many.
        limit: u32,
    },
    /// From now on every new event comes as a message in this context with this tag; body: [`Event`] in postcard as raw
    /// bytes. → [`Reply::Done`]
    Subscribe {
        /// Context of the messages.
        ctx: i32,
        /// Tag of the messages.
        tag: i32,
    },
    /// Adds an entry to the log (resource managers and load watchers). → [`Reply::Done`]
    Record {
        /// When it happened.
        at: Micros,
        /// What happened.
        kind: EventKind,
    },
    /// Serve this daemon, or stop serving it when the task does so already. → [`Reply::Serving`]
    Serve(Service),
    /// Be the tracer of the virtual machine, or stop being it. → [`Reply::Serving`]
    ServeTracer(TracerSettings),
    /// Where this task's trace records go from now on. → [`Reply::Done`]
    SetTrace(Sink),
    /// A question about the inside of the daemon (`pvm_tickle`). → [`Reply::Numbers`]
    Tickle(Vec<i32>),
    /// How does this host stop guests? → [`Reply::Freezer`]
    Freezer,
    /// Writes all tasks of a job to the store, as they are at one moment. → [`Reply::Checkpointed`]
    Checkpoint {
        /// Its first task: it and everything that it and its descendants have spawned.
        job: Tid,
        /// Whether it goes on by itself from now on. When a host is lost the job then goes back to its newest checkpoint.
        pace: Option<Pace>,
        /// When the checkpoint is complete its tasks are ended, wherever they have got meanwhile: the job can be started again
        /// from it. If there is none, they go on.
        end: bool,
        /// False: the answer is [`Reply::Done`] and comes at once; the event log tells the rest.
        wait: bool,
    },
    /// What lies in the store. → [`Reply::Sets`]
    Sets,
    /// Starts the tasks of a set again. → [`Reply::Restarted`]
    Restart {
        /// The set.
        set: String,
        /// Names of hosts to start them on; none: where they were, and elsewhere where that cannot be.
        on: Vec<String>,
        /// False: the answer is [`Reply::Done`] and comes at once; the event log tells the rest.
        wait: bool,
    },
    /// Removes sets from the store. → [`Reply::SetsRemoved`]
    RemoveSets {
        /// Which.
        which: Unwanted,
        /// Also those that other virtual machines have made.
        any: bool,
    },
    /// The program ends, and its library was told once that it would be asked to: if it is still waited for,
    /// [`ToTask::TakeNothing`] comes before the answer. → [`Reply::Done`]
    LastWords,
    /// Start tasks where the resource manager has said beforehand. → [`Reply::Spawned`], or [`Reply::Failed`] when it
    /// is the resource manager no more
    SpawnGranted {
        /// The tasks.
        request: SpawnRequest,
        /// What was said.
        grant: GrantOf,
    },
}

/// Outcome of a move.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MoveReport {
    /// The attempt.
    pub id: MigrationId,
    /// Bytes of the images.
    pub bytes: u64,
    /// How long the task stood still.
    pub frozen: Micros,
    /// By which way it went.
    pub engine: Engine,
}

/// What a daemon answers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Reply {
    /// Done.
    Done,
    /// Not done.
    Failed {
        /// PVM's code.
        error: PvmError,
        /// One sentence: what was tried, what happened, what to do.
        reason: String,
    },
    /// The host table.
    Hosts(HostTable),
    /// Tasks.
    Tasks(Vec<TaskInfo>),
    /// One result per requested task.
    Spawned(Vec<Result<Tid, PvmError>>),
    /// One result per line.
    HostsAdded(Vec<AddedHost>),
    /// One result per name.
    HostsDeleted(Vec<Result<(), PvmError>>),
    /// The resource manager before: PVM returns its tid, or 0.
    Rm {
        /// The former one.
        previous: Tid,
    },
    /// A message from the mailbox.
    Mailbox(Message),
    /// Index of a stored entry.
    MailboxIndex(i32),
    /// Mailbox classes.
    MailboxClasses(Vec<MailboxClass>),
    /// Of the group service.
    Group(GroupReply),
    /// A new context.
    Context(i32),
    /// The host's time of day, in microseconds since 1970.
    Clock(Micros),
    /// The move has begun.
    MoveStarted(MigrationId),
    /// The move has ended.
    Moved(Result<MoveReport, MoveError>),
    /// Which hosts would take the task, or why it cannot move at all.
    Survey(Result<Survey, Refusal>),
    /// Entries of the log, oldest first.
    Events(Vec<Event>),
    /// True: the task serves from now on. False: it does so no longer.
    Serving(bool),
    /// Numbers.
    Numbers(Vec<i32>),
    /// The checkpoint is complete, or why there is none.
    Checkpointed(Result<SetReport, CutFailure>),
    /// What lies in the store, oldest first.
    Sets(Result<Vec<SetEntry>, String>),
    /// The tasks run, or why they do not.
    Restarted(Result<RestartReport, RestartFailure>),
    /// Guests of this host are frozen by control groups, or why they are stopped by signals. `None`: no tasker has said so far.
    Freezer(Option<Result<(), String>>),
    /// What became of each set, or why the store cannot be looked at.
    SetsRemoved(Result<Removed, String>),
}

/// A move that did not happen; the task goes on where it was.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error("{step} failed: {why}")]
pub struct MoveError {
    /// The step that failed.
    pub step: Step,
    /// Why.
    pub why: Failure,
}

/// What a task's library learns when it is accepted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The task's id.
    pub tid: Tid,
    /// Its parent: NONE, a task, or raw −35 when the parent asked not to be known.
    pub parent: Tid,
    /// The host it runs on.
    pub host: HostId,
    /// Addresses of this host, most useful first, for routes of the task's own.
    pub addresses: Vec<IpAddr>,
    /// The resource manager to ask.
    pub rm: Option<RmInfo>,
    /// Where its output goes.
    pub output: Sink,
    /// Where its trace records go.
    pub trace: Sink,
    /// Data signature of the host.
    pub dsig: i32,
    /// Why it runs as spawned; true when its standard output is collected by the daemon.
    pub spawned: bool,
    /// What the tracer wants, when `trace` leads to it because nothing else was asked for.
    pub tracer: Option<TracerSettings>,
    /// The process was started again from a checkpoint, and this is the first that it hears.
    pub restart: Option<Restart>,
    /// The process takes the place of another one, and this is the first that it hears.
    pub successor: Option<Box<Successor>>,
}

/// What a library has to know whose process takes the place of one that has ended. What that one had sent comes right behind
/// the welcome, in the name of the task itself.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Successor {
    /// The timeline on which links begin.
    pub line: u16,
    /// How many there were before.
    pub count: u32,
    /// Conversations that go on.
    pub talks: Vec<Talk>,
}

/// What a library has to know whose process was started again from a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Restart {
    /// Who began again with it, and on which timeline.
    pub timeline: Timeline,
    /// Requests that nobody will answer unless they are made again.
    pub again: Vec<RequestId>,
}

/// From a task to its daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToDaemon {
    /// The first frame.
    Hello(Hello),
    /// Something to be answered with [`ToTask::Reply`].
    Request {
        /// Chosen by the task, unique for it.
        id: RequestId,
        /// What.
        what: Request,
    },
    /// A message to a daemon's address (`SM_*`).
    Message(Message),
    /// Nothing of this task leads out of its process any more; the socket closes after this frame. Everything that the
    /// library had to write before is on the socket in front of it.
    Quiesced {
        /// The move.
        migration: MigrationId,
        /// How far each link has sent.
        marks: Vec<LinkMark>,
        /// Where the library looks for a [`Redirect`].
        redirect_at: RedirectAt,
    },
    /// To [`ToTask::TakeNothing`], first: where the task stands with others. Behind it come link frames that whoever takes its
    /// place has to get: halves of messages from others, in their names, and what others have not acknowledged. Then comes
    /// [`ToDaemon::TakesNothing`].
    Parting {
        /// The move.
        by: MigrationId,
        /// The timeline on which links begin.
        line: u16,
        /// Each of its links.
        talks: Vec<Talk>,
        /// Notifications that wait for the last messages of others.
        later: Vec<(LinkMark, Message)>,
    },
    /// It is ready for its end: whatever becomes of it, its daemon knows what the next process has to know.
    TakesNothing {
        /// The move.
        by: MigrationId,
    },
    /// To [`ToTask::TakeNothing`] of no move: it is no more ready for its end.
    TakesAgain {
        /// The move.
        by: MigrationId,
    },
    /// A word to another task about a route of their own.
    Route {
        /// The other task.
        to: Tid,
        /// The word. Its descriptors travel with the frame.
        word: RouteWord,
    },
}

/// From a daemon to a task.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToTask {
    /// Accepted.
    Welcome(Welcome),
    /// Not accepted; the socket closes after this frame.
    Refused {
        /// Why, and what to do.
        reason: String,
    },
    /// The answer to a request.
    Reply {
        /// The request.
        id: RequestId,
        /// The answer.
        reply: Reply,
    },
    /// A message made by a daemon. With `after`, the library hands it over only when it has got that far from that
    /// peer (or the peer's link is gone): a notification comes after the task's last message.
    Deliver {
        /// The message.
        message: Message,
        /// What has to be here before.
        after: Option<LinkMark>,
    },
    /// This task has ended for good, or never was: what is kept for it can be dropped.
    PeerGone {
        /// The task.
        tid: Tid,
    },
    /// This task runs elsewhere now: frames on their way to it may be lost.
    PeerMoved {
        /// The task.
        tid: Tid,
    },
    /// The resource manager changed (or died: `None`).
    RmChanged {
        /// The new one.
        rm: Option<RmInfo>,
    },
    /// The program is about to be asked to end, to be started again. What other tasks send from now on is for the next process:
    /// nothing but replies comes any more, until the program is not asked any more. → [`ToDaemon::Parting`] if it is
    TakeNothing {
        /// For this move. `None`: it is not asked any more. → [`ToDaemon::TakesAgain`]
        by: Option<MigrationId>,
    },
    /// Let go of everything that leads out of the process: answer [`ToDaemon::Quiesced`], close the socket, then wait
    /// until one of these files holds a [`ResumeToken`], and connect again with [`Claim::Resume`].
    Quiesce {
        /// The move.
        migration: MigrationId,
        /// Files to watch: at the source, at the target.
        tokens: Vec<PathBuf>,
    },
    /// A word of another task about a route of their own.
    Route {
        /// The other task.
        from: Tid,
        /// It runs on this host.
        near: bool,
        /// The word. Its descriptors travel with the frame.
        word: RouteWord,
    },
}

/// Bytes of a [`Redirect`] in a library's memory at most.
pub const REDIRECT_BYTES_MAX: usize = 12 << 10;

/// A place of [`REDIRECT_BYTES_MAX`] bytes in the memory of a library.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RedirectAt {
    /// The process, by the number that it sees itself: it keeps that one on all hosts.
    pub pid: i32,
    /// The address.
    pub at: u64,
}

/// What a library that has let go is to wait for instead: it was stopped before anybody knew where it would go on, and
/// nobody may let it run to tell it. It is written into its memory while it stands still: the length as eight bytes in the
/// machine's order, then this in postcard.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Redirect {
    /// The move.
    pub migration: MigrationId,
    /// Files to watch.
    pub tokens: Vec<PathBuf>,
}

impl Redirect {
    /// As it lies in memory.
    ///
    /// # Errors
    /// It is longer than [`REDIRECT_BYTES_MAX`].
    pub fn in_memory(&self) -> Result<Vec<u8>, String> {
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

/// Content of the file that wakes a quiesced library (postcard, written to a temporary name and renamed).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResumeToken {
    /// The move it belongs to; a token of another move is ignored.
    pub migration: MigrationId,
    /// The daemon's socket to connect to.
    pub socket: PathBuf,
}
