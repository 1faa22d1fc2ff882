//! The small Rust API: one call per thing a task can ask of the virtual machine.

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
use sempa_proto::migration::{Cause, Refusal, Survey};
use sempa_proto::owner::GuestsWord;
use sempa_proto::sm::{SM_EXEC, pack_exec};
use sempa_proto::suspend;
use sempa_proto::table::{AddedHost, HostTable, TaskInfo};
use sempa_proto::task::{
    AtEnd, MailboxClass, MailboxRequest, MoveReport, NotifyRequest, Reply, Request, RmServes,
    SpawnRequest,
};
use sempa_proto::{HostId, Micros, MigrationId, PvmError, Tid};
use serde::de::DeserializeOwned;
use std::time::{Duration, Instant};

/// The packed content of a message and how it is encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Body {
    /// The `enc` word of the message.
    pub enc: i32,
    /// The packed items.
    pub bytes: Bytes,
}

impl Body {
    /// A body without content.
    pub fn empty() -> Body {
        Body {
            enc: ENC_XDR,
            bytes: Bytes::new(),
        }
    }
}

impl From<&str> for Body {
    /// One string item.
    fn from(text: &str) -> Body {
        Body::items(|out| out.str(text.as_bytes()))
    }
}

impl From<Packer> for Body {
    fn from(packer: Packer) -> Body {
        Body {
            enc: packer.encoding().word(),
            bytes: packer.finish(),
        }
    }
}

/// Which messages a receive wants; `None` in a field means any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Match {
    /// The sender.
    pub src: Option<Tid>,
    /// The tag.
    pub tag: Option<i32>,
    /// The context.
    pub ctx: Option<i32>,
}

impl Match {
    /// Every message.
    pub fn any() -> Match {
        Match::default()
    }

    /// Only from this sender.
    #[must_use]
    pub fn src(self, src: Tid) -> Match {
        Match {
            src: Some(src),
            ..self
        }
    }

    /// Only with this tag.
    #[must_use]
    pub fn tag(self, tag: i32) -> Match {
        Match {
            tag: Some(tag),
            ..self
        }
    }

    /// Only in this context.
    #[must_use]
    pub fn ctx(self, ctx: i32) -> Match {
        Match {
            ctx: Some(ctx),
            ..self
        }
    }

    /// True when the message is wanted.
    pub fn wants(&self, m: &Message) -> bool {
        self.src.is_none_or(|src| src == m.src)
            && self.tag.is_none_or(|tag| tag == m.tag)
            && self.ctx.is_none_or(|ctx| ctx == m.ctx)
    }
}

/// Answer to a request for a move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MoveAnswer {
    /// It has begun.
    Started(MigrationId),
    /// It is complete.
    Done(MoveReport),
}

/// This process as a task of the virtual machine. Clones are the same task.
#[derive(Clone, Debug)]
pub struct Vm {
    runtime: Runtime,
}

/// Asks the daemon and takes the expected kind of answer apart.
macro_rules! ask {
    ($vm:expr, $what:literal, $request:expr, $pattern:pat => $value:expr) => {
        match $vm.runtime.request($request) {
            $pattern => Ok($value),
            other => Err(Error::from_reply($what, other)),
        }
    };
}

impl Vm {
    /// Joins the virtual machine of this user. When it ends, calls say so; a process that is to end with it says
    /// [`Vm::enroll_as`].
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
    pub fn enroll() -> Result<Vm, EnrollError> {
        Vm::enroll_as(AtEnd::Told)
    }

    /// Joins the virtual machine of this user. With [`AtEnd::Signalled`] a process from a command line gets SIGTERM when
    /// its daemon ends, as programs of PVM's C interface do.
    ///
    /// # Errors
    /// See [`EnrollError`].
    ///
    /// ```no_run
    /// # use libpvm::proto::task::AtEnd;
    /// # fn main() -> Result<(), libpvm::EnrollError> {
    /// // A worker that has nothing to do without the virtual machine.
    /// let vm = libpvm::Vm::enroll_as(AtEnd::Signalled)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn enroll_as(at_end: AtEnd) -> Result<Vm, EnrollError> {
        Ok(Vm {
            runtime: enroll(at_end)?,
        })
    }

    /// The API over a runtime that is connected already.
    pub fn over(runtime: Runtime) -> Vm {
        Vm { runtime }
    }

    /// What lies under this API.
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// This task's id.
    pub fn tid(&self) -> Tid {
        self.runtime.tid()
    }

    /// The task that spawned this one, if one did and wants to be known.
    pub fn parent(&self) -> Option<Tid> {
        Some(self.runtime.parent()).filter(|tid| tid.is_task())
    }

    /// The host this task runs on now.
    pub fn host(&self) -> HostId {
        self.runtime.host()
    }

    /// The host table.
    ///
    /// # Errors
    /// As the daemon, or the resource manager, says.
    pub fn config(&self) -> Result<HostTable, Error> {
        self.runtime.config()
    }

    /// The tasks that `selector` names: all ([`Tid::NONE`]), those of one host, or one.
    ///
    /// # Errors
    /// As the daemon, or the resource manager, says.
    pub fn tasks(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        self.runtime.tasks(selector)
    }

    /// Starts tasks; one result for each.
    ///
    /// # Errors
    /// When nothing was tried. Single tasks fail in their own result.
    ///
    /// ```no_run
    /// # use libpvm::proto::task::SpawnRequest;
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let vm = libpvm::Vm::enroll()?;
    /// let workers = vm.spawn(SpawnRequest { file: "worker".into(), count: 4, ..SpawnRequest::default() })?;
    /// for tid in workers.into_iter().flatten() {
    ///     println!("started {tid}");
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub fn spawn(&self, request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        self.runtime.spawn(request)
    }

    /// Adds hosts, one host-file line each; one result per line.
    ///
    /// # Errors
    /// When nothing was tried.
    pub fn add_hosts<S: AsRef<str>>(&self, lines: &[S]) -> Result<Vec<AddedHost>, Error> {
        self.runtime
            .add_hosts(lines.iter().map(|line| line.as_ref().to_string()).collect())
    }

    /// Removes hosts by name; one result per name.
    ///
    /// # Errors
    /// When nothing was tried.
    pub fn delete_hosts<S: AsRef<str>>(
        &self,
        names: &[S],
    ) -> Result<Vec<Result<(), PvmError>>, Error> {
        self.runtime
            .delete_hosts(names.iter().map(|name| name.as_ref().to_string()).collect())
    }

    /// Sends a message in the base context. Returns when the message is on its way; to a task that does not exist it
    /// vanishes, as in PVM.
    ///
    /// # Errors
    /// `BadParam` for an address that is neither task nor daemon, `SysErr` when the daemon is gone, `OutOfRes` when too
    /// much waits for this receiver.
    pub fn send(&self, tid: Tid, tag: i32, body: impl Into<Body>) -> Result<(), Error> {
        self.send_in(tid, CTX_BASE, tag, body)
    }

    /// Sends a message in a context.
    ///
    /// # Errors
    /// As [`Vm::send`].
    pub fn send_in(
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

    /// Sends a message made by hand: context, tag, wait id and encoding as given.
    ///
    /// # Errors
    /// As [`Vm::send`].
    pub fn send_message(&self, message: Message) -> Result<(), Error> {
        let tid = message.dst;
        self.runtime
            .send(message)
            .map_err(|e| Error::new(e, format!("sending to {tid}: {e}")))
    }

    /// Waits for the first message that is wanted.
    ///
    /// # Errors
    /// `SysErr` when the daemon is gone and no such message is here.
    pub fn recv(&self, wanted: Match) -> Result<Message, Error> {
        match self.recv_until(wanted, None)? {
            Some(message) => Ok(message),
            None => Err(PvmError::SysErr.into()),
        }
    }

    /// Waits for the first message for which `wanted` holds, whatever it looks at. It is asked about each waiting message
    /// whenever one has come.
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
    pub fn recv_where(&self, mut wanted: impl FnMut(&Message) -> bool) -> Result<Message, Error> {
        let mut look = |inbox: &mut Inbox| inbox.take_first(&mut wanted);
        let found = self
            .runtime
            .inbox_wait(None, &mut look)
            .map_err(|e| Error::new(e, self.runtime.why_lost()))?;
        found.ok_or_else(|| PvmError::SysErr.into())
    }

    /// Waits for a message and reads the value in it; answers the sender as well.
    ///
    /// # Errors
    /// As [`Vm::recv`]; `BadMsg` when the message holds something else. It is gone then.
    pub fn recv_value<T: DeserializeOwned>(&self, wanted: Match) -> Result<(Task, T), Error> {
        let message = self.recv(wanted)?;
        Ok((self.task(message.src), message.value()?))
    }

    /// The first wanted message if one is here.
    ///
    /// # Errors
    /// `SysErr` when the daemon is gone and no such message is here.
    pub fn try_recv(&self, wanted: Match) -> Result<Option<Message>, Error> {
        let found = self
            .runtime
            .inbox_try(&mut |inbox: &mut Inbox| inbox.take_first(|m| wanted.wants(m)));
        if found.is_none() && !self.runtime.is_connected() {
            return Err(PvmError::SysErr.into());
        }
        Ok(found)
    }

    /// From now on this task sleeps at once when it waits, and takes no processor from others meanwhile. What it waits for is heard
    /// some microseconds later. For those who serve programs that compute.
    pub fn sleep_at_once(&self) {
        self.runtime.sleep_at_once();
    }

    /// Waits for a wanted message, but no longer than `span`.
    ///
    /// # Errors
    /// `SysErr` when the daemon is gone and no such message is here.
    pub fn recv_timeout(&self, wanted: Match, span: Duration) -> Result<Option<Message>, Error> {
        self.recv_until(wanted, Instant::now().checked_add(span))
    }

    fn recv_until(
        &self,
        wanted: Match,
        deadline: Option<Instant>,
    ) -> Result<Option<Message>, Error> {
        let mut look = |inbox: &mut Inbox| inbox.take_first(|m| wanted.wants(m));
        self.runtime
            .inbox_wait(deadline, &mut look)
            .map_err(|e| Error::new(e, self.runtime.why_lost()))
    }

    /// Asks for messages about the end of tasks or the coming and going of hosts.
    ///
    /// # Errors
    /// As the daemon says.
    pub fn notify(&self, request: NotifyRequest) -> Result<(), Error> {
        self.runtime.notify(request)
    }

    /// Sends a signal to a task; no error when it has ended already.
    ///
    /// # Errors
    /// `BadParam` when `tid` is no task.
    pub fn signal(&self, tid: Tid, signal: i32) -> Result<(), Error> {
        ask!(self, "sending a signal", Request::Signal { tid, signal }, Reply::Done => ())
    }

    /// Suspends a task, or lets it go on. A suspended task stands still, also where it is moved meanwhile. `cause`: the
    /// resource manager's reason.
    ///
    /// # Errors
    /// `NoTask`; `Denied` when no daemon has started it, or it serves the virtual machine; `BadParam` when `tid` is no task.
    pub fn suspend(
        &self,
        tid: Tid,
        suspend: bool,
        cause: Option<suspend::Cause>,
    ) -> Result<(), Error> {
        ask!(self, "suspending a task", Request::Suspend { tid, suspend, cause }, Reply::Done => ())
    }

    /// Has a job checkpointed, and ended when that is complete. The event log tells what became of it.
    ///
    /// # Errors
    /// `OutOfRes` when too many jobs are checkpointed already.
    pub fn checkpoint_and_end(&self, job: Tid) -> Result<(), Error> {
        let request = Request::Checkpoint {
            job,
            pace: None,
            end: true,
            wait: false,
        };
        ask!(self, "checkpointing a job", request, Reply::Done => ())
    }

    /// Has a checkpoint started again on these hosts. The event log tells what became of it.
    ///
    /// # Errors
    /// As the daemon says.
    pub fn restart(&self, set: &str, on: &[String]) -> Result<(), Error> {
        let request = Request::Restart {
            set: set.into(),
            on: on.to_vec(),
            wait: false,
        };
        ask!(self, "starting a checkpoint again", request, Reply::Done => ())
    }

    /// Stops the whole virtual machine.
    ///
    /// # Errors
    /// As the daemon says. A connection that breaks while waiting counts as success.
    pub fn halt(&self) -> Result<(), Error> {
        match self.runtime.request(Request::Halt) {
            Reply::Done
            | Reply::Failed {
                error: PvmError::SysErr,
                ..
            } => Ok(()),
            other => Err(Error::from_reply("stopping the virtual machine", other)),
        }
    }

    /// Becomes the resource manager of this host's daemon; answers the former one, NONE without.
    ///
    /// # Errors
    /// `Already` or `Denied` when there is one.
    pub fn register_rm(&self, serves: RmServes) -> Result<Tid, Error> {
        ask!(self, "registering a resource manager", Request::RegisterRm(serves), Reply::Rm { previous } => previous)
    }

    /// Stores a message in the virtual machine's mailbox; answers its index.
    ///
    /// # Errors
    /// As the daemon says (`Denied`, `Exists`, ...).
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
    /// `NotFound`, or as the daemon says.
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

    /// Classes of the mailbox that match a pattern; all for an empty one.
    ///
    /// # Errors
    /// As the daemon says.
    pub fn mailbox_list(&self, pattern: &str) -> Result<Vec<MailboxClass>, Error> {
        let request = Request::Mailbox(MailboxRequest::List {
            pattern: pattern.into(),
        });
        ask!(self, "listing the mailbox", request, Reply::MailboxClasses(classes) => classes)
    }

    /// Moves a task to the host `to` (its name, or its tid as `t80000`). With `wait` the answer comes when the move has
    /// ended.
    ///
    /// # Errors
    /// [`MigrateError::Refused`] when nothing was begun, [`MigrateError::Failed`] when the move was begun and failed; in
    /// both cases the task goes on where it is.
    pub fn migrate(
        &self,
        tid: Tid,
        to: &str,
        cause: Option<Cause>,
        wait: bool,
    ) -> Result<MoveAnswer, MigrateError> {
        match self.runtime.request(Request::Migrate {
            tid,
            to: to.into(),
            cause,
            wait,
        }) {
            Reply::MoveStarted(id) => Ok(MoveAnswer::Started(id)),
            Reply::Moved(Ok(report)) => Ok(MoveAnswer::Done(report)),
            Reply::Moved(Err(error)) => Err(error.into()),
            other => Err(Error::from_reply("moving a task", other).into()),
        }
    }

    /// Which hosts would take a task, or whether the host `to` would (its name, or its tid as `t80000`). Nothing is frozen and
    /// nothing changes; the answer may be another one a moment later.
    ///
    /// # Errors
    /// `Denied`, or `NoTask`, when it cannot move at all, with the reason; `NoHost`.
    pub fn can_migrate(&self, tid: Tid, to: Option<&str>) -> Result<Survey, Error> {
        match self.runtime.request(Request::CanMigrate {
            tid,
            to: to.map(String::from),
        }) {
            Reply::Survey(Ok(survey)) => Ok(survey),
            Reply::Survey(Err(refusal)) => {
                let code = if refusal == Refusal::NoSuchTask {
                    PvmError::NoTask
                } else {
                    PvmError::Denied
                };
                Err(Error::new(code, format!("{tid} cannot move: {refusal}")))
            }
            other => Err(Error::from_reply("asking who would take a task", other)),
        }
    }

    /// As load watcher: what foreign tasks may do on this host from now on, as its owner wants it. The daemon of this host
    /// carries it out by itself, at once. The word counts until the next one, or until this task ends.
    ///
    /// # Errors
    /// `Denied` for a task that was spawned and is not a load watcher that the resource manager has started.
    pub fn guests(&self, word: GuestsWord) -> Result<(), Error> {
        ask!(self, "telling what foreign tasks may do here", Request::Guests(word), Reply::Done => ())
    }

    /// Entries of the event log from number `from` on, at most `limit`.
    ///
    /// # Errors
    /// As the daemon says.
    pub fn events(&self, from: u64, limit: u32) -> Result<Vec<Event>, Error> {
        ask!(self, "reading the event log", Request::Events { from, limit }, Reply::Events(events) => events)
    }

    /// From now on every new event comes as a message in this context with this tag; read it with
    /// [`Vm::event_of`].
    ///
    /// # Errors
    /// As the daemon says.
    pub fn subscribe(&self, ctx: i32, tag: i32) -> Result<(), Error> {
        ask!(self, "subscribing to events", Request::Subscribe { ctx, tag }, Reply::Done => ())
    }

    /// The event in a message that [`Vm::subscribe`] asked for; `None` when it holds something else.
    pub fn event_of(message: &Message) -> Option<Event> {
        from_bytes(&message.body).ok()
    }

    /// Adds an entry to the event log; `at` in microseconds since 1970.
    ///
    /// # Errors
    /// As the daemon says.
    pub fn record(&self, at: Micros, kind: EventKind) -> Result<(), Error> {
        ask!(self, "recording an event", Request::Record { at, kind }, Reply::Done => ())
    }

    /// As resource manager: asks the daemon of a host to start tasks for `parent`. Returns the wait id; the answer comes
    /// as a message `SM_EXECACK` with the same wait id.
    ///
    /// # Errors
    /// `SysErr` when the daemon is gone.
    pub fn exec(&self, host: HostId, parent: Tid, request: &SpawnRequest) -> Result<i32, Error> {
        let wid = self.runtime.next_wid();
        let total = i32::try_from(request.count).unwrap_or(i32::MAX);
        let body = pack_exec(parent, request, 0, total);
        let dst = host.daemon();
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

    /// Leaves the virtual machine when everything sent is on its way.
    ///
    /// # Errors
    /// `SysErr` when the daemon was gone already.
    pub fn exit(&self) -> Result<(), Error> {
        self.runtime
            .exit()
            .map_err(|e| Error::new(e, self.runtime.why_lost()))
    }

    /// A reader for the body of a received message.
    ///
    /// # Errors
    /// `BadMsg` when this machine cannot read its encoding.
    pub fn unpack(message: &Message) -> Result<Unpacker, Error> {
        let encoding = Encoding::from_word(message.enc).ok_or_else(|| {
            Error::new(
                PvmError::BadMsg,
                format!("the message from {} has an unknown encoding", message.src),
            )
        })?;
        Ok(Unpacker::new(encoding, message.body.clone()))
    }
}
