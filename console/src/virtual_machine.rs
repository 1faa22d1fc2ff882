//! The operations that the console needs from a virtual machine, as a trait. Tests of commands
//! implement the trait without a daemon.

use bytes::Bytes;
use libpvm::{Body, Content, Error, Match, Vm};
use sempa_proto::body::Packer;
use sempa_proto::event::Event;
use sempa_proto::message::{CTX_BASE, DSIG_X86_64, ENC_XDR};
use sempa_proto::migration::MigrationTargets;
use sempa_proto::rm::{self, CTX_RM, RmQuery, RmReply, TAG_QUERY, TAG_REPLY};
use sempa_proto::table::{HostReport, HostTable, TASK_RM, TaskInfo};
use sempa_proto::task::{MailboxRequest, Reply, Request, SpawnRequest};
use sempa_proto::{HostId, Message, PvmError, Tid};
use sempa_work_dispatch::{QUESTION_TAG, Question};
use std::ops::ControlFlow;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

/// Interval at which a long wait looks for interrupts and shows its progress.
const WAIT_INTERVAL: Duration = Duration::from_millis(200);
/// Time limit for a reply of the resource manager.
const RM_REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// Time limit for a reply of the master of a master-worker run.
const MASTER_REPLY_TIMEOUT: Duration = Duration::from_secs(10);
/// Error text for a query to the resource manager when none is running.
const NO_RM_TEXT: &str = "this needs a resource manager, and none is running: start the virtual machine with PVM_RM=pvm-rm, or 'pvm spawn pvm-rm'";

/// A virtual machine, with the operations that the console's task uses.
pub(crate) trait VirtualMachine {
    /// Returns the console's own tid.
    fn tid(&self) -> Tid;
    /// Returns the console's host.
    fn local_host(&self) -> HostId;
    fn hosts(&self) -> Result<HostTable, Error>;
    /// Returns all tasks if `selector` is [`Tid::NONE`]. Otherwise `selector` is the tid of a host,
    /// or of one task.
    fn tasks(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error>;
    /// As [`VirtualMachine::tasks`], with an entry for each ended task that has left processes
    /// behind.
    fn tasks_and_leftovers(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        self.tasks(selector)
    }
    fn spawn(&self, request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error>;
    /// Removes the named hosts.
    fn delete_hosts(&self, names: &[String]) -> Result<Vec<Result<(), PvmError>>, Error>;
    /// Returns which hosts would accept a task. If `target` is given, queries only that host.
    fn can_migrate(&self, tid: Tid, target: Option<&str>) -> Result<MigrationTargets, Error>;
    /// Returns up to `limit` events of the log, from number `from` on.
    fn events(&self, from: u64, limit: u32) -> Result<Vec<Event>, Error>;
    /// Sends a message. A message to a task that has exited is dropped.
    fn send(&self, message: Message) -> Result<(), Error>;
    /// Sends a query to the resource manager and waits for the reply.
    fn ask_rm(&self, query: &RmQuery) -> Result<RmReply, Error>;
    /// Sends a question to the master of a master-worker run, and waits for the answer, which is
    /// JSON.
    fn ask_master(&self, master: Tid, question: &Question) -> Result<String, Error>;
    /// Sends a request to the daemon and waits for the reply. [`Reply::Failed`] becomes an error.
    fn ask(&self, request: Request) -> Result<Reply, Error>;
    /// As [`VirtualMachine::ask`]. Calls `on_wait` at intervals until the reply arrives. Returns
    /// `None` if `on_wait` breaks; the daemon then still serves the request.
    fn ask_while(
        &self,
        request: Request,
        on_wait: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<Reply>, Error>;
}

impl VirtualMachine for Vm {
    fn tid(&self) -> Tid {
        Self::tid(self)
    }

    fn local_host(&self) -> HostId {
        self.host()
    }

    fn hosts(&self) -> Result<HostTable, Error> {
        self.config()
    }

    fn tasks(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        Self::tasks(self, selector)
    }

    fn tasks_and_leftovers(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        Self::tasks_and_leftovers(self, selector)
    }

    fn spawn(&self, request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        Self::spawn(self, request)
    }

    fn delete_hosts(&self, names: &[String]) -> Result<Vec<Result<(), PvmError>>, Error> {
        self.delete_hosts(names)
    }

    fn can_migrate(&self, tid: Tid, target: Option<&str>) -> Result<MigrationTargets, Error> {
        Self::can_migrate(self, tid, target)
    }

    fn events(&self, from: u64, limit: u32) -> Result<Vec<Event>, Error> {
        Self::events(self, from, limit)
    }

    fn send(&self, message: Message) -> Result<(), Error> {
        self.send_message(message)
    }

    fn ask_rm(&self, query: &RmQuery) -> Result<RmReply, Error> {
        let rm_tid = Self::tasks(self, Tid::NONE)?
            .into_iter()
            .find(|task| task.flags & TASK_RM != 0);
        let rm_tid = rm_tid
            .map(|task| task.tid)
            .ok_or_else(|| Error::new(PvmError::NoTask, NO_RM_TEXT))?;
        let body =
            rm::encode(query).map_err(|error| Error::new(PvmError::BadMsg, error.to_string()))?;
        let wid = std::process::id().cast_signed();
        let (src, body) = (Self::tid(self), Bytes::from(body));
        self.send_message(Message {
            src,
            dst: rm_tid,
            ctx: CTX_RM,
            tag: TAG_QUERY,
            wid,
            enc: DSIG_X86_64,
            body,
        })?;
        let reply_match = Match::any().src(rm_tid).ctx(CTX_RM).tag(TAG_REPLY);
        let Some(reply) = self.recv_timeout(reply_match, RM_REPLY_TIMEOUT)? else {
            let reason = format!(
                "resource manager {rm_tid} did not answer within {} s: it is not Sempa's pvm-rm, or it hangs",
                RM_REPLY_TIMEOUT.as_secs()
            );
            return Err(Error::new(PvmError::NotImpl, reason));
        };
        match rm::decode(&reply.body) {
            Ok(Some(RmReply::UnsupportedVersion(rm_version))) => {
                Err(version_mismatch_error(rm_tid, rm_version))
            }
            Ok(Some(reply)) => Ok(reply),
            Ok(None) => Err(version_mismatch_error(
                rm_tid,
                rm::version_prefix(&reply.body).unwrap_or(0),
            )),
            Err(error) => Err(Error::new(
                PvmError::BadMsg,
                format!("the answer of resource manager {rm_tid}: {error}"),
            )),
        }
    }

    fn ask_master(&self, master: Tid, question: &Question) -> Result<String, Error> {
        Self::send(self, master, QUESTION_TAG, Body::value(question)?)?;
        let from_master = Match::any().src(master).tag(QUESTION_TAG);
        let Some(answer) = self.recv_timeout(from_master, MASTER_REPLY_TIMEOUT)? else {
            let reason = format!(
                "the master {master} did not answer within {} s: a callback of its program takes \
                 long, or the program hangs; the run itself is not changed",
                MASTER_REPLY_TIMEOUT.as_secs()
            );
            return Err(Error::new(PvmError::NoData, reason));
        };
        let text = answer.items()?.read_str()?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    fn ask(&self, request: Request) -> Result<Reply, Error> {
        match self.runtime().request_and_wait(request) {
            Reply::Failed { error, reason } if reason.is_empty() => Err(error.into()),
            Reply::Failed { error, reason } => Err(Error::new(error, reason)),
            reply => Ok(reply),
        }
    }

    fn ask_while(
        &self,
        request: Request,
        on_wait: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<Option<Reply>, Error> {
        let (sender, receiver) = mpsc::channel();
        let vm = self.clone();
        // The receiver is gone if the user has interrupted the command.
        thread::spawn(move || sender.send(VirtualMachine::ask(&vm, request)));
        loop {
            match receiver.recv_timeout(WAIT_INTERVAL) {
                Ok(reply) => return reply.map(Some),
                Err(RecvTimeoutError::Timeout) => {
                    if on_wait().is_break() {
                        return Ok(None);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => return Err(unexpected_reply_error()),
            }
        }
    }
}

/// Returns the error for a resource manager with another protocol version.
fn version_mismatch_error(rm_tid: Tid, rm_version: u16) -> Error {
    let reason = format!(
        "resource manager {rm_tid} speaks protocol version {rm_version}, this console version {}: use programs of one version",
        rm::RM_VERSION
    );
    Error::new(PvmError::Mismatch, reason)
}

/// Returns the error for a reply that does not belong to the request.
pub(crate) fn unexpected_reply_error() -> Error {
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
pub(crate) fn wait_for_message(vm: &Vm) -> Result<Message, Error> {
    let runtime = vm.runtime();
    match runtime.wait_for_inbox(None, &mut |inbox| {
        inbox.take_first(|message| message.tag >= 0 && message.ctx != CTX_RM)
    }) {
        Ok(Some(message)) => Ok(message),
        Ok(None) | Err(_) => Err(Error::new(PvmError::SysErr, runtime.lost_reason())),
    }
}

/// Reason why something was not done with a task that does not exist.
pub(crate) const NO_TASK_REASON: &str =
    "there is no such task; it may have ended: 'ps -a' lists the tasks";

/// Returns the error line for a task that does not exist.
pub(crate) fn no_task_line(tid: Tid) -> String {
    format!("{tid}: {NO_TASK_REASON}")
}

/// True if the virtual machine has no task with this tid. False if the task's host does not answer.
pub(crate) fn task_has_ended(machine: &dyn VirtualMachine, tid: Tid) -> bool {
    let status = machine.ask(Request::TaskStatus { tid });
    status.is_err_and(|error| error.code == PvmError::NoTask)
}

/// Asks a host to describe its state, with the usage of its tasks if `with_tasks` is true.
pub(crate) fn describe_host(
    machine: &dyn VirtualMachine,
    host: HostId,
    with_tasks: bool,
) -> Result<HostReport, Error> {
    let request = Request::DescribeHost {
        host: host.tid(),
        with_tasks,
    };
    match machine.ask(request)? {
        Reply::HostReport(report) => Ok(*report),
        _ => Err(unexpected_reply_error()),
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
        _ => Err(unexpected_reply_error()),
    }
}

/// Inserts an entry with the contents `body` into the mailbox class `name`.
pub(crate) fn put_mailbox_entry(
    machine: &dyn VirtualMachine,
    name: &str,
    flags: i32,
    body: Packer,
) -> Result<(), Error> {
    let console = machine.tid();
    let message = Message {
        src: console,
        dst: console,
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

/// Returns the number that the next event of the log will have.
pub(crate) fn next_event_number(machine: &dyn VirtualMachine) -> u64 {
    first_missing_number(|number| {
        let events = machine.events(number, 1).unwrap_or_default();
        !events.is_empty()
    })
}

/// Returns the lowest number above 0 for which `exists_from` is false, by bisection. `exists_from`
/// must be false for all higher numbers.
fn first_missing_number(exists_from: impl Fn(u64) -> bool) -> u64 {
    let mut too_high = 1;
    while exists_from(too_high) {
        too_high *= 2;
    }
    let mut existing = too_high / 2;
    while too_high - existing > 1 {
        let middle = existing + (too_high - existing) / 2;
        if exists_from(middle) {
            existing = middle;
        } else {
            too_high = middle;
        }
    }
    too_high
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The end of a log of any length is found.
    #[test]
    fn end_of_log_is_found() {
        for last_number in [0, 1, 2, 3, 7, 8, 9, 1000, 65_537] {
            let next_number = first_missing_number(|number| number <= last_number);
            assert_eq!(next_number, last_number + 1);
        }
    }
}
