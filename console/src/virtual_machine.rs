//! The operations that the console needs from a virtual machine, as a trait: tests of commands
//! implement it without a daemon.

use bytes::Bytes;
use libpvm::{Error, Match, MigrateError, MigrateReply, Vm};
use sempa_proto::body::Packer;
use sempa_proto::event::Event;
use sempa_proto::message::{CTX_BASE, DSIG_X86_64, ENC_XDR};
use sempa_proto::migration::MigrationTargets;
use sempa_proto::rm::{self, CTX_RM, RmQuery, RmReply, TAG_QUERY, TAG_REPLY};
use sempa_proto::table::{AddedHost, HostTable, TASK_RM, TaskInfo};
use sempa_proto::task::{MailboxRequest, MigrationReport, Reply, Request, SpawnRequest};
use sempa_proto::{HostId, Message, PvmError, Tid};
use std::time::Duration;

/// Time limit for an answer of the resource manager.
const RM_ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Error text for a query to the resource manager when none is running.
const NO_RM_RUNNING: &str = "this needs a resource manager, and none is running: start the virtual machine with PVM_RM=pvm-rm, or 'pvm spawn pvm-rm'";

/// The virtual machine as seen by the console's task.
pub(crate) trait VirtualMachine {
    /// Returns the console's own tid.
    fn tid(&self) -> Tid;
    /// Returns the console's host.
    fn local_host(&self) -> HostId;
    fn hosts(&self) -> Result<HostTable, Error>;
    /// Returns all tasks if `selector` is [`Tid::NONE`]. Otherwise `selector` is the tid of a host,
    /// or of one task.
    fn tasks(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error>;
    fn spawn(&self, request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error>;
    /// Adds hosts, one per host-file line.
    fn add(&self, lines: &[String]) -> Result<Vec<AddedHost>, Error>;
    /// Removes the named hosts.
    fn delete(&self, names: &[String]) -> Result<Vec<Result<(), PvmError>>, Error>;
    /// Migrates a task and waits for the end of the migration.
    fn migrate(&self, tid: Tid, to: &str) -> Result<MigrationReport, MigrateError>;
    /// Returns which hosts would accept a task. If `to` is given, only that host is asked.
    fn can_migrate(&self, tid: Tid, to: Option<&str>) -> Result<MigrationTargets, Error>;
    /// Returns up to `limit` events of the log, from number `from` on.
    fn events(&self, from: u64, limit: u32) -> Result<Vec<Event>, Error>;
    /// Sends a message. A message to a task that has exited is dropped.
    fn send(&self, message: Message) -> Result<(), Error>;
    /// Sends a query to the resource manager and waits for the reply.
    fn ask_rm(&self, query: &RmQuery) -> Result<RmReply, Error>;
    /// Sends a request to the daemon and waits for the reply. [`Reply::Failed`] becomes an error.
    fn ask(&self, request: Request) -> Result<Reply, Error>;
}

impl VirtualMachine for Vm {
    fn tid(&self) -> Tid {
        Vm::tid(self)
    }

    fn local_host(&self) -> HostId {
        self.host()
    }

    fn hosts(&self) -> Result<HostTable, Error> {
        self.config()
    }

    fn tasks(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        Vm::tasks(self, selector)
    }

    fn spawn(&self, request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        Vm::spawn(self, request)
    }

    fn add(&self, lines: &[String]) -> Result<Vec<AddedHost>, Error> {
        self.add_hosts(lines)
    }

    fn delete(&self, names: &[String]) -> Result<Vec<Result<(), PvmError>>, Error> {
        self.delete_hosts(names)
    }

    fn migrate(&self, tid: Tid, to: &str) -> Result<MigrationReport, MigrateError> {
        match Vm::migrate(self, tid, to, None, true)? {
            MigrateReply::Done(report) => Ok(report),
            MigrateReply::Started(id) => {
                let reason = format!(
                    "migration {id} has begun, but the daemon did not wait for its end; see 'events'"
                );
                Err(Error::new(PvmError::BadMsg, reason).into())
            }
        }
    }

    fn can_migrate(&self, tid: Tid, to: Option<&str>) -> Result<MigrationTargets, Error> {
        Vm::can_migrate(self, tid, to)
    }

    fn events(&self, from: u64, limit: u32) -> Result<Vec<Event>, Error> {
        Vm::events(self, from, limit)
    }

    fn send(&self, message: Message) -> Result<(), Error> {
        self.send_message(message)
    }

    fn ask_rm(&self, query: &RmQuery) -> Result<RmReply, Error> {
        let rm = Vm::tasks(self, Tid::NONE)?
            .into_iter()
            .find(|task| task.flags & TASK_RM != 0);
        let rm = rm
            .map(|task| task.tid)
            .ok_or_else(|| Error::new(PvmError::NoTask, NO_RM_RUNNING))?;
        let body =
            rm::encode(query).map_err(|error| Error::new(PvmError::BadMsg, error.to_string()))?;
        let wid = std::process::id().cast_signed();
        let (src, body) = (Vm::tid(self), Bytes::from(body));
        self.send_message(Message {
            src,
            dst: rm,
            ctx: CTX_RM,
            tag: TAG_QUERY,
            wid,
            enc: DSIG_X86_64,
            body,
        })?;
        let wanted = Match::any().src(rm).ctx(CTX_RM).tag(TAG_REPLY);
        let Some(answer) = self.recv_timeout(wanted, RM_ANSWER_TIMEOUT)? else {
            let reason = format!(
                "resource manager {rm} did not answer within {} s: it is not Sempa's pvm-rm, or it hangs",
                RM_ANSWER_TIMEOUT.as_secs()
            );
            return Err(Error::new(PvmError::NotImpl, reason));
        };
        match rm::decode(&answer.body) {
            Ok(Some(RmReply::UnsupportedVersion(other))) => Err(version_mismatch(rm, other)),
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(version_mismatch(
                rm,
                rm::version_prefix(&answer.body).unwrap_or(0),
            )),
            Err(error) => Err(Error::new(
                PvmError::BadMsg,
                format!("the answer of resource manager {rm}: {error}"),
            )),
        }
    }

    fn ask(&self, request: Request) -> Result<Reply, Error> {
        match self.runtime().request(request) {
            Reply::Failed { error, reason } if reason.is_empty() => Err(error.into()),
            Reply::Failed { error, reason } => Err(Error::new(error, reason)),
            reply => Ok(reply),
        }
    }
}

/// Returns the error for a resource manager with another protocol version.
fn version_mismatch(rm: Tid, other: u16) -> Error {
    let reason = format!(
        "resource manager {rm} speaks protocol version {other}, this console version {}: use programs of one version",
        rm::RM_VERSION
    );
    Error::new(PvmError::Mismatch, reason)
}

/// Returns the error for a reply that does not belong to the request.
pub(crate) fn unexpected_reply() -> Error {
    Error::new(
        PvmError::BadMsg,
        "the daemon sent an unexpected reply: console and daemon are of different versions",
    )
}

/// Waits for a message to the console. Leaves two kinds of messages in the inbox: messages with
/// negative tags, which are replies to the library, and replies of the resource manager, for which
/// [`VirtualMachine::ask_rm`] waits.
///
/// # Errors
/// Fails if the connection to the daemon is lost; the error gives the reason.
pub(crate) fn receive(vm: &Vm) -> Result<Message, Error> {
    let runtime = vm.runtime();
    match runtime.wait_for_inbox(None, &mut |inbox| {
        inbox.take_first(|message| message.tag >= 0 && message.ctx != CTX_RM)
    }) {
        Ok(Some(message)) => Ok(message),
        Ok(None) | Err(_) => Err(Error::new(PvmError::SysErr, runtime.lost_reason())),
    }
}

/// Returns the mailbox classes that match `pattern`.
pub(crate) fn mailbox_classes(
    machine: &dyn VirtualMachine,
    pattern: &str,
) -> Result<Vec<sempa_proto::task::MailboxClass>, Error> {
    match machine.ask(Request::Mailbox(MailboxRequest::List {
        pattern: pattern.to_string(),
    }))? {
        Reply::MailboxClasses(classes) => Ok(classes),
        _ => Err(unexpected_reply()),
    }
}

/// Inserts an entry with the contents `body` into the mailbox class `name`.
pub(crate) fn put_mailbox_entry(
    machine: &dyn VirtualMachine,
    name: &str,
    flags: i32,
    body: Packer,
) -> Result<(), Error> {
    let me = machine.tid();
    let message = Message {
        src: me,
        dst: me,
        ctx: CTX_BASE,
        tag: 0,
        wid: 0,
        enc: ENC_XDR,
        body: body.finish(),
    };
    let name = name.to_string();
    machine
        .ask(Request::Mailbox(MailboxRequest::Put {
            name,
            flags,
            message,
        }))
        .map(|_| ())
}
