//! The Rust API: one method for each request that a task can send to the virtual machine.

use crate::content::Content;
use crate::error::{EnrollError, Error, MigrateError};
use crate::inbox::Inbox;
use crate::runtime::{Runtime, enroll};
use crate::task::Task;
use bytes::Bytes;
use sempa_proto::body::{Encoding, Packer, Unpacker};
use sempa_proto::event::{Event, EventKind};
use sempa_proto::frame::from_bytes;
use sempa_proto::message::{CTX_BASE, ENC_XDR, Message};
use sempa_proto::migration::{MigrationCause, MigrationTargets, Refusal};
use sempa_proto::owner::GuestDirective;
use sempa_proto::sm::{SM_EXEC, pack_exec};
use sempa_proto::suspend;
use sempa_proto::table::{AddedHost, HostTable, TaskInfo};
use sempa_proto::task::{
    MailboxClass, MailboxRequest, MigrationReport, NotifyRequest, OnDaemonExit, Reply, Request,
    RmServices, SpawnRequest,
};
use sempa_proto::{HostId, Micros, MigrationId, PvmError, Tid};
use serde::de::DeserializeOwned;
use std::time::{Duration, Instant};

/// Packed message content and its encoding.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    /// Number of the encoding, as in the message header.
    pub enc: i32,
    pub bytes: Bytes,
}

impl Body {
    pub fn empty() -> Self {
        Self {
            enc: ENC_XDR,
            bytes: Bytes::new(),
        }
    }
}

impl From<&str> for Body {
    /// Packs the text as one string item.
    fn from(text: &str) -> Self {
        Self::items(|out| out.pack_str(text.as_bytes()))
    }
}

impl From<Packer> for Body {
    fn from(packer: Packer) -> Self {
        Self {
            enc: packer.encoding().enc_field(),
            bytes: packer.finish(),
        }
    }
}

/// Selects messages to receive; `None` in a field matches any value.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    pub src: Option<Tid>,
    pub tag: Option<i32>,
    pub ctx: Option<i32>,
}

impl Match {
    /// Matches every message, whatever its sender, tag and context.
    pub fn any() -> Self {
        Self::default()
    }

    /// Restricts the selection to this sender.
    #[must_use]
    pub fn src(self, src: Tid) -> Self {
        Self {
            src: Some(src),
            ..self
        }
    }

    /// Restricts the selection to this tag.
    #[must_use]
    pub fn tag(self, tag: i32) -> Self {
        Self {
            tag: Some(tag),
            ..self
        }
    }

    /// Restricts the selection to this context.
    #[must_use]
    pub fn ctx(self, ctx: i32) -> Self {
        Self {
            ctx: Some(ctx),
            ..self
        }
    }

    /// True if sender, tag and context of the message match.
    pub fn matches(&self, message: &Message) -> bool {
        self.src.is_none_or(|src| src == message.src)
            && self.tag.is_none_or(|tag| tag == message.tag)
            && self.ctx.is_none_or(|ctx| ctx == message.ctx)
    }
}

/// Result of a migration request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MigrateReply {
    /// The migration has begun and has not ended yet.
    Started(MigrationId),
    Done(MigrationReport),
}

/// This process as a task of the virtual machine. Clones represent the same task.
#[derive(Clone, Debug)]
pub struct Vm {
    runtime: Runtime,
}

/// Sends a request to the daemon and extracts the value from the expected kind of reply.
macro_rules! ask {
    ($vm:expr, $what:literal, $request:expr, $pattern:pat => $value:expr) => {
        match $vm.runtime.request_and_wait($request) {
            $pattern => Ok($value),
            other => Err(Error::from_reply($what, other)),
        }
    };
}

impl Vm {
    /// Joins this user's virtual machine. After the virtual machine has ended, calls return errors;
    /// a process that must end together with the virtual machine uses [`Vm::enroll_as`].
    ///
    /// # Errors
    /// See [`EnrollError`]; each variant is a sentence for the user.
    ///
    /// ```no_run
    /// # fn main() -> Result<(), libpvm::EnrollError> {
    /// let vm = libpvm::Vm::enroll()?;
    /// println!("I am {}", vm.tid());
    /// # Ok(())
    /// # }
    /// ```
    pub fn enroll() -> Result<Self, EnrollError> {
        Self::enroll_as(OnDaemonExit::FailCalls)
    }

    /// Joins this user's virtual machine. With [`OnDaemonExit::Terminate`] a process that was
    /// started from a command line gets SIGTERM when its daemon ends, as programs of PVM's C
    /// interface do.
    ///
    /// # Errors
    /// See [`EnrollError`].
    ///
    /// ```no_run
    /// # use libpvm::proto::task::OnDaemonExit;
    /// # fn main() -> Result<(), libpvm::EnrollError> {
    /// // A worker that has nothing to do without the virtual machine.
    /// let vm = libpvm::Vm::enroll_as(OnDaemonExit::Terminate)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn enroll_as(on_daemon_exit: OnDaemonExit) -> Result<Self, EnrollError> {
        Ok(Self {
            runtime: enroll(on_daemon_exit)?,
        })
    }

    pub fn from_runtime(runtime: Runtime) -> Self {
        Self { runtime }
    }

    /// Returns the runtime below this API.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    pub fn tid(&self) -> Tid {
        self.runtime.tid()
    }

    /// Returns the task that spawned this task. `None` without a parent, or if the parent has
    /// requested to stay unknown.
    pub fn parent(&self) -> Option<Tid> {
        Some(self.runtime.parent_tid()).filter(|tid| tid.is_task())
    }

    /// Returns the host on which this task currently runs.
    pub fn host(&self) -> HostId {
        self.runtime.host()
    }

    /// Returns the host table.
    ///
    /// # Errors
    /// Returns the error of the daemon or the resource manager.
    pub fn config(&self) -> Result<HostTable, Error> {
        self.runtime.config()
    }

    /// Returns the tasks that `selector` selects: all tasks ([`Tid::NONE`]), the tasks of one host,
    /// or one task.
    ///
    /// # Errors
    /// Returns the error of the daemon or the resource manager.
    pub fn tasks(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        self.runtime.tasks(selector)
    }

    /// As [`Vm::tasks`], with an entry for each ended task that has left processes behind
    /// ([`TaskInfo::is_leftover`]).
    ///
    /// # Errors
    /// As [`Vm::tasks`].
    pub fn tasks_and_leftovers(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        self.runtime.tasks_and_leftovers(selector)
    }

    /// Starts tasks and returns one result for each task.
    ///
    /// # Errors
    /// The whole request failed. Errors of single tasks are in their results.
    ///
    /// ```no_run
    /// # use libpvm::proto::task::SpawnRequest;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vm = libpvm::Vm::enroll()?;
    /// let request =
    ///     SpawnRequest { program: "worker".into(), task_count: 4, ..SpawnRequest::default() };
    /// let workers = vm.spawn(request)?;
    /// for tid in workers.into_iter().flatten() {
    ///   println!("started {tid}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn spawn(&self, request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        self.runtime.spawn(request)
    }

    /// Adds hosts. Each line has the format of a host-file line. Returns one result for each line.
    ///
    /// # Errors
    /// The whole request failed. Errors of single hosts are in their results.
    pub fn add_hosts<S: AsRef<str>>(&self, lines: &[S]) -> Result<Vec<AddedHost>, Error> {
        self.runtime
            .add_hosts(lines.iter().map(|line| line.as_ref().to_string()).collect())
    }

    /// Removes hosts by name and returns one result for each name.
    ///
    /// # Errors
    /// The whole request failed. Errors of single hosts are in their results.
    pub fn delete_hosts<S: AsRef<str>>(
        &self,
        names: &[S],
    ) -> Result<Vec<Result<(), PvmError>>, Error> {
        self.runtime
            .delete_hosts(names.iter().map(|name| name.as_ref().to_string()).collect())
    }

    /// Sends a message in the base context. Returns when the message is written to its route, or
    /// queued in this process. A message to a task that does not exist is dropped without an error,
    /// as in PVM.
    ///
    /// # Errors
    /// `BadParam` if the address is neither a task nor a daemon, `SysErr` if the connection to the
    /// daemon is lost, `OutOfRes` if too many bytes are queued for this receiver.
    pub fn send(&self, tid: Tid, tag: i32, body: impl Into<Body>) -> Result<(), Error> {
        self.send_in_context(tid, CTX_BASE, tag, body)
    }

    /// Sends a message in a context.
    ///
    /// # Errors
    /// As [`Vm::send`].
    pub fn send_in_context(
        &self,
        tid: Tid,
        ctx: i32,
        tag: i32,
        body: impl Into<Body>,
    ) -> Result<(), Error> {
        let Body { enc, bytes } = body.into();
        let message = Message {
            src: self.tid(),
            dst: tid,
            ctx,
            tag,
            wid: 0,
            enc,
            body: bytes,
        };
        self.runtime
            .send(message)
            .map_err(|e| Error::new(e, format!("sending to {tid}: {e}")))
    }

    /// Sends a message with the context, tag, wait id and encoding that it contains.
    ///
    /// # Errors
    /// As [`Vm::send`].
    pub fn send_message(&self, message: Message) -> Result<(), Error> {
        let tid = message.dst;
        self.runtime
            .send(message)
            .map_err(|e| Error::new(e, format!("sending to {tid}: {e}")))
    }

    /// Waits for the first selected message.
    ///
    /// # Errors
    /// `SysErr` if the connection to the daemon is lost and no such message has arrived.
    pub fn recv(&self, selection: Match) -> Result<Message, Error> {
        match self.recv_until(selection, None)? {
            Some(message) => Ok(message),
            None => Err(PvmError::SysErr.into()),
        }
    }

    /// Waits for the first message for which `predicate` is true. `predicate` is called for each
    /// unreceived message whenever a message arrives.
    ///
    /// # Errors
    /// As [`Vm::recv`].
    ///
    /// ```no_run
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vm = libpvm::Vm::enroll()?;
    /// let large = vm.recv_where(|message| message.body.len() > 1000)?;
    /// println!("{} bytes from {}", large.body.len(), large.src);
    /// # Ok(())
    /// # }
    /// ```
    pub fn recv_where(
        &self,
        mut predicate: impl FnMut(&Message) -> bool,
    ) -> Result<Message, Error> {
        let mut take_message = |inbox: &mut Inbox| inbox.take_first(&mut predicate);
        let message = self
            .runtime
            .wait_for_inbox(None, &mut take_message)
            .map_err(|e| Error::new(e, self.runtime.lost_reason()))?;
        message.ok_or_else(|| PvmError::SysErr.into())
    }

    /// Waits for a message; returns the message's sender and the value that the message contains.
    ///
    /// # Errors
    /// As [`Vm::recv`]; `BadMsg` if the message contains no value of type `T`. That message is then
    /// lost.
    pub fn recv_value<T: DeserializeOwned>(&self, selection: Match) -> Result<(Task, T), Error> {
        let message = self.recv(selection)?;
        Ok((self.task(message.src), message.value()?))
    }

    /// Returns the first selected message, or `None` if no such message has arrived.
    ///
    /// # Errors
    /// `SysErr` if the connection to the daemon is lost and no such message has arrived.
    pub fn try_recv(&self, selection: Match) -> Result<Option<Message>, Error> {
        let message = self
            .runtime
            .check_inbox(&mut |inbox: &mut Inbox| inbox.take_first(|m| selection.matches(m)));
        if message.is_none() && !self.runtime.is_connected() {
            return Err(PvmError::SysErr.into());
        }
        Ok(message)
    }

    /// Makes this task sleep immediately whenever it waits, instead of spinning first. Messages are
    /// then received some microseconds later, but a waiting task takes no CPU time from other
    /// processes. Meant for services on hosts where programs compute.
    pub fn disable_spinning(&self) {
        self.runtime.disable_spinning();
    }

    /// Sets whether the library sets up direct routes to tasks on other hosts that no program has
    /// requested. The default is the environment variable `SEMPA_DIRECT_ROUTES`. Meant for services
    /// that exchange few messages with many hosts.
    pub fn set_automatic_routes(&self, is_enabled: bool) {
        self.runtime.set_automatic_routes(is_enabled);
    }

    /// Waits for a selected message; returns `None` if the timeout expires first.
    ///
    /// # Errors
    /// `SysErr` if the connection to the daemon is lost and no such message has arrived.
    pub fn recv_timeout(
        &self,
        selection: Match,
        timeout: Duration,
    ) -> Result<Option<Message>, Error> {
        self.recv_until(selection, Instant::now().checked_add(timeout))
    }

    fn recv_until(
        &self,
        selection: Match,
        deadline: Option<Instant>,
    ) -> Result<Option<Message>, Error> {
        let mut take_message = |inbox: &mut Inbox| inbox.take_first(|m| selection.matches(m));
        self.runtime
            .wait_for_inbox(deadline, &mut take_message)
            .map_err(|e| Error::new(e, self.runtime.lost_reason()))
    }

    /// Requests messages about tasks that end, or hosts that join or leave.
    ///
    /// # Errors
    /// Returns the daemon's error.
    pub fn notify(&self, request: NotifyRequest) -> Result<(), Error> {
        self.runtime.notify(request)
    }

    /// Sends a signal to a task. If the task has ended, the call succeeds without effect.
    ///
    /// # Errors
    /// `BadParam` if `tid` is not a task.
    pub fn signal(&self, tid: Tid, signal: i32) -> Result<(), Error> {
        ask!(self, "sending a signal", Request::Signal { tid, signal }, Reply::Done => ())
    }

    /// Suspends a task if `suspend` is true, otherwise resumes it. A suspended task stays suspended
    /// if it migrates. `cause` is the reason that a resource manager gives; other tasks pass
    /// `None`.
    ///
    /// # Errors
    /// `NoTask`; `Denied` if the task was not started by a daemon or serves the virtual machine;
    /// `BadParam` if `tid` is not a task.
    pub fn suspend(
        &self,
        tid: Tid,
        suspend: bool,
        cause: Option<suspend::SuspendCause>,
    ) -> Result<(), Error> {
        ask!(self, "suspending a task", Request::Suspend { tid, suspend, cause }, Reply::Done => ())
    }

    /// Starts a checkpoint of a job and ends the job when the checkpoint is complete. The event log
    /// reports the outcome.
    ///
    /// # Errors
    /// `OutOfRes` if too many jobs are being checkpointed.
    pub fn checkpoint_and_end(&self, job: Tid) -> Result<(), Error> {
        let request = Request::Checkpoint {
            job,
            schedule: None,
            end_job: true,
            wait_for_end: false,
        };
        ask!(self, "checkpointing a job", request, Reply::Done => ())
    }

    /// Restarts the job of a checkpoint on these hosts. The event log reports the outcome.
    ///
    /// # Errors
    /// Returns the daemon's error.
    pub fn restart_checkpoint(&self, checkpoint: &str, host_names: &[String]) -> Result<(), Error> {
        let request = Request::Restart {
            checkpoint: checkpoint.into(),
            host_names: host_names.to_vec(),
            wait_for_end: false,
            force: false,
        };
        ask!(self, "restarting a checkpoint", request, Reply::Done => ())
    }

    /// Stops the whole virtual machine.
    ///
    /// # Errors
    /// Returns the daemon's error. A connection that breaks while this call waits counts as
    /// success.
    pub fn halt(&self) -> Result<(), Error> {
        match self.runtime.request_and_wait(Request::Halt) {
            Reply::Done
            | Reply::Failed {
                error: PvmError::SysErr,
                ..
            } => Ok(()),
            other => Err(Error::from_reply("stopping the virtual machine", other)),
        }
    }

    /// Stops the whole virtual machine and waits until all hosts have ended their tasks, or a time
    /// limit has passed. Returns the names of the hosts that have not reported the end of their
    /// tasks; `None` if the connection broke before the report.
    ///
    /// # Errors
    /// Returns the daemon's error.
    pub fn halt_and_report(&self) -> Result<Option<Vec<String>>, Error> {
        match self.runtime.request_and_wait(Request::HaltAndReport) {
            Reply::Halted { missing_hosts } => Ok(Some(missing_hosts)),
            Reply::Failed {
                error: PvmError::SysErr,
                ..
            } => Ok(None),
            other => Err(Error::from_reply("stopping the virtual machine", other)),
        }
    }

    /// Registers this task as resource manager at its daemon. Returns the tid of the previous
    /// resource manager; NONE if there was none.
    ///
    /// # Errors
    /// `Already` or `Denied` if there is a resource manager.
    pub fn register_rm(&self, services: RmServices) -> Result<Tid, Error> {
        ask!(self, "registering a resource manager", Request::RegisterRm(services), Reply::Rm { previous_rm: previous } => previous)
    }

    /// Stores a message in the virtual machine's mailbox and returns its index.
    ///
    /// # Errors
    /// Returns the daemon's error (`Denied`, `Exists`, ...).
    pub fn mailbox_put(&self, name: &str, flags: i32, body: impl Into<Body>) -> Result<i32, Error> {
        let Body { enc, bytes } = body.into();
        let message = Message {
            src: self.tid(),
            dst: self.tid(),
            ctx: CTX_BASE,
            tag: 0,
            wid: 0,
            enc,
            body: bytes,
        };
        let request = Request::Mailbox(MailboxRequest::Put {
            name: name.into(),
            flags,
            message,
        });
        ask!(self, "storing in the mailbox", request, Reply::MailboxIndex(index) => index)
    }

    /// Fetches a message from the mailbox.
    ///
    /// # Errors
    /// `NotFound`, or another error of the daemon.
    pub fn mailbox_take(&self, name: &str, index: i32, flags: i32) -> Result<Message, Error> {
        let request = Request::Mailbox(MailboxRequest::Take {
            name: name.into(),
            index,
            flags,
        });
        ask!(self, "fetching from the mailbox", request, Reply::Mailbox(message) => message)
    }

    /// Removes an entry of the mailbox.
    ///
    /// # Errors
    /// `NotFound`, `Denied`.
    pub fn mailbox_delete(&self, name: &str, index: i32) -> Result<(), Error> {
        let request = Request::Mailbox(MailboxRequest::Delete {
            name: name.into(),
            index,
        });
        ask!(self, "deleting from the mailbox", request, Reply::Done => ())
    }

    /// Returns the mailbox classes that match a pattern. The empty pattern matches all classes.
    ///
    /// # Errors
    /// Returns the daemon's error.
    pub fn mailbox_list(&self, pattern: &str) -> Result<Vec<MailboxClass>, Error> {
        let request = Request::Mailbox(MailboxRequest::List {
            pattern: pattern.into(),
        });
        ask!(self, "listing the mailbox", request, Reply::MailboxClasses(classes) => classes)
    }

    /// Migrates a task to the host `target_host`, given as its name or as its tid in the form
    /// `t80000`. If `wait_for_end` is true, the call returns when the migration has ended,
    /// otherwise when it has begun.
    ///
    /// # Errors
    /// [`MigrateError::Refused`] if the migration did not begin, [`MigrateError::Failed`] if it
    /// began and failed; in both cases the task continues on its host.
    pub fn migrate(
        &self,
        tid: Tid,
        target_host: &str,
        cause: Option<MigrationCause>,
        wait_for_end: bool,
    ) -> Result<MigrateReply, MigrateError> {
        match self.runtime.request_and_wait(Request::Migrate {
            tid,
            target: target_host.into(),
            cause,
            wait_for_end,
        }) {
            Reply::MigrationStarted(id) => Ok(MigrateReply::Started(id)),
            Reply::Migrated(Ok(report)) => Ok(MigrateReply::Done(report)),
            Reply::Migrated(Err(error)) => Err(error.into()),
            other => Err(Error::from_reply("migrating a task", other).into()),
        }
    }

    /// Returns the hosts that would accept a task. `target_host` limits the query to one host,
    /// given as its name or as its tid in the form `t80000`; `None` queries all hosts. The call
    /// neither pauses the task nor changes anything; the answer may be outdated a moment later.
    ///
    /// # Errors
    /// `Denied` or `NoTask` if the task cannot migrate at all, with the reason; `NoHost`.
    pub fn can_migrate(
        &self,
        tid: Tid,
        target_host: Option<&str>,
    ) -> Result<MigrationTargets, Error> {
        match self
            .runtime
            .request_and_wait(Request::FindMigrationTargets {
                tid,
                target: target_host.map(String::from),
            }) {
            Reply::MigrationTargets(Ok(targets)) => Ok(targets),
            Reply::MigrationTargets(Err(refusal)) => {
                let code = if refusal == Refusal::NoSuchTask {
                    PvmError::NoTask
                } else {
                    PvmError::Denied
                };
                Err(Error::new(code, format!("{tid} cannot migrate: {refusal}")))
            }
            other => Err(Error::from_reply(
                "asking which hosts would accept a task",
                other,
            )),
        }
    }

    /// For load watchers: sets, on behalf of the owner, what guests may do on this host. The daemon
    /// of this host applies the directive immediately, without asking another host. The directive
    /// is in force until the next directive, or until this task ends.
    ///
    /// # Errors
    /// `Denied` if this task was spawned and is not a load watcher that the resource manager
    /// started.
    pub fn set_guest_directive(&self, directive: GuestDirective) -> Result<(), Error> {
        ask!(self, "setting what guest tasks may do on this host", Request::SetGuestDirective(directive), Reply::Done => ())
    }

    /// Returns at most `limit` entries of the event log, beginning with the entry whose number is
    /// `first_number`.
    ///
    /// # Errors
    /// Returns the daemon's error.
    pub fn events(&self, first_number: u64, limit: u32) -> Result<Vec<Event>, Error> {
        ask!(self, "reading the event log", Request::Events { first_number, events_max: limit }, Reply::Events(events) => events)
    }

    /// Subscribes to new events. Each event arrives as a message with this context and tag, which
    /// [`Vm::decode_event`] decodes.
    ///
    /// # Errors
    /// Returns the daemon's error.
    pub fn subscribe_events(&self, ctx: i32, tag: i32) -> Result<(), Error> {
        ask!(self, "subscribing to events", Request::Subscribe { ctx, tag }, Reply::Done => ())
    }

    /// Decodes the event in a message that [`Vm::subscribe_events`] requested; `None` if the
    /// message contains no event.
    pub fn decode_event(message: &Message) -> Option<Event> {
        from_bytes(&message.body).ok()
    }

    /// Adds an entry to the event log; `at` is in microseconds since 1970.
    ///
    /// # Errors
    /// Returns the daemon's error.
    pub fn record_event(&self, at: Micros, kind: EventKind) -> Result<(), Error> {
        ask!(self, "recording an event", Request::RecordEvent { at, kind }, Reply::Done => ())
    }

    /// For resource managers: requests the daemon of a host to start tasks for `parent`. Returns
    /// the wait id of the request; the answer is a message `SM_EXECACK` with the same wait id.
    ///
    /// # Errors
    /// `SysErr` if the connection to the daemon is lost.
    pub fn request_exec(
        &self,
        host: HostId,
        parent: Tid,
        request: &SpawnRequest,
    ) -> Result<i32, Error> {
        let wid = self.runtime.allocate_wid();
        let task_count = i32::try_from(request.task_count).unwrap_or(i32::MAX);
        let body = pack_exec(parent, request, 0, task_count);
        let dst = host.daemon_tid();
        self.send_message(Message {
            src: self.tid(),
            dst,
            ctx: CTX_BASE,
            tag: SM_EXEC,
            wid,
            enc: ENC_XDR,
            body,
        })?;
        Ok(wid)
    }

    /// Waits until all sent messages are written to the daemon, then leaves the virtual machine.
    ///
    /// # Errors
    /// `SysErr` if the connection to the daemon was lost before.
    pub fn exit(&self) -> Result<(), Error> {
        self.runtime
            .exit()
            .map_err(|e| Error::new(e, self.runtime.lost_reason()))
    }

    /// Returns a reader for the body of a received message.
    ///
    /// # Errors
    /// `BadMsg` if this host cannot read the encoding of the message.
    pub fn unpack(message: &Message) -> Result<Unpacker, Error> {
        let encoding = Encoding::from_enc_field(message.enc).ok_or_else(|| {
            Error::new(
                PvmError::BadMsg,
                format!("the message from {} has an unknown encoding", message.src),
            )
        })?;
        Ok(Unpacker::new(encoding, message.body.clone()))
    }
}
