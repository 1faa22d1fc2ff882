//! What the console needs of a virtual machine: a narrow face, so that commands can be tested without one.

use bytes::Bytes;
use libpvm::{Error, Match, MigrateError, MoveAnswer, Vm};
use sempa_proto::event::Event;
use sempa_proto::message::DSIG_X86_64;
use sempa_proto::migration::Survey;
use sempa_proto::rm::{self, Answer, CTX_RM, Question, TAG_ANSWER, TAG_ASK};
use sempa_proto::table::{AddedHost, HostTable, TASK_RM, TaskInfo};
use sempa_proto::task::{MailboxRequest, MoveReport, Reply, Request, SpawnRequest};
use sempa_proto::{HostId, Message, PvmError, Tid};
use std::time::Duration;

/// How long the resource manager may take for an answer.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(5);
/// Said when nobody can be asked.
const NO_RM: &str = "no resource manager runs, and only it knows: start the virtual machine with PVM_RM=pvm-rm, or 'pvm spawn pvm-rm'";

/// The virtual machine as this console's task sees it.
pub(crate) trait Machine {
    /// The console's own tid.
    fn tid(&self) -> Tid;
    /// The host it runs on.
    fn here(&self) -> HostId;
    /// The host table.
    fn hosts(&self) -> Result<HostTable, Error>;
    /// All tasks, those of a host, or one.
    fn tasks(&self, selector: Tid) -> Result<Vec<TaskInfo>, Error>;
    /// Starts tasks.
    fn spawn(&self, request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error>;
    /// Adds hosts.
    fn add(&self, lines: &[String]) -> Result<Vec<AddedHost>, Error>;
    /// Removes hosts.
    fn delete(&self, names: &[String]) -> Result<Vec<Result<(), PvmError>>, Error>;
    /// Moves a task and waits.
    fn migrate(&self, tid: Tid, to: &str) -> Result<MoveReport, MigrateError>;
    /// Which hosts would take a task, or whether this one would.
    fn can_migrate(&self, tid: Tid, to: Option<&str>) -> Result<Survey, Error>;
    /// The log from an entry on.
    fn events(&self, from: u64, limit: u32) -> Result<Vec<Event>, Error>;
    /// Sends a message; to a task that has ended it vanishes.
    fn send(&self, message: Message) -> Result<(), Error>;
    /// Asks the resource manager.
    fn ask_rm(&self, what: &Question) -> Result<Answer, Error>;
    /// Any other request. [`Reply::Failed`] comes as an error.
    fn ask(&self, what: Request) -> Result<Reply, Error>;
}

impl Machine for Vm {
    fn tid(&self) -> Tid {
        Vm::tid(self)
    }

    fn here(&self) -> HostId {
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

    fn migrate(&self, tid: Tid, to: &str) -> Result<MoveReport, MigrateError> {
        match Vm::migrate(self, tid, to, None, true)? {
            MoveAnswer::Done(report) => Ok(report),
            MoveAnswer::Started(id) => {
                let reason = format!(
                    "the move {id} has begun, but the daemon did not wait for its end; see 'events'"
                );
                Err(Error::new(PvmError::BadMsg, reason).into())
            }
        }
    }

    fn can_migrate(&self, tid: Tid, to: Option<&str>) -> Result<Survey, Error> {
        Vm::can_migrate(self, tid, to)
    }

    fn events(&self, from: u64, limit: u32) -> Result<Vec<Event>, Error> {
        Vm::events(self, from, limit)
    }

    fn send(&self, message: Message) -> Result<(), Error> {
        self.send_message(message)
    }

    fn ask_rm(&self, what: &Question) -> Result<Answer, Error> {
        let rm = Vm::tasks(self, Tid::NONE)?
            .into_iter()
            .find(|task| task.flags & TASK_RM != 0);
        let rm = rm
            .map(|task| task.tid)
            .ok_or_else(|| Error::new(PvmError::NoTask, NO_RM))?;
        let body =
            rm::pack(what).map_err(|error| Error::new(PvmError::BadMsg, error.to_string()))?;
        let wid = std::process::id().cast_signed();
        let (src, body) = (Vm::tid(self), Bytes::from(body));
        self.send_message(Message {
            src,
            dst: rm,
            ctx: CTX_RM,
            tag: TAG_ASK,
            wid,
            enc: DSIG_X86_64,
            body,
        })?;
        let wanted = Match::any().src(rm).ctx(CTX_RM).tag(TAG_ANSWER);
        let Some(answer) = self.recv_timeout(wanted, ANSWER_TIME_MAX)? else {
            let reason = format!(
                "resource manager {rm} did not answer within {} s: it is not Sempa's pvm-rm, or it hangs",
                ANSWER_TIME_MAX.as_secs()
            );
            return Err(Error::new(PvmError::NotImpl, reason));
        };
        match rm::unpack(&answer.body) {
            Ok(Some(Answer::Version(other))) => Err(other_version(rm, other)),
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err(other_version(rm, rm::version_of(&answer.body).unwrap_or(0))),
            Err(error) => Err(Error::new(
                PvmError::BadMsg,
                format!("the answer of resource manager {rm}: {error}"),
            )),
        }
    }

    fn ask(&self, what: Request) -> Result<Reply, Error> {
        match self.runtime().request(what) {
            Reply::Failed { error, reason } if reason.is_empty() => Err(error.into()),
            Reply::Failed { error, reason } => Err(Error::new(error, reason)),
            reply => Ok(reply),
        }
    }
}

/// The other side speaks another version.
fn other_version(rm: Tid, other: u16) -> Error {
    let reason = format!(
        "resource manager {rm} speaks version {other} of questions and answers, this console {}: use programs of one version",
        rm::RM_VERSION
    );
    Error::new(PvmError::Mismatch, reason)
}

/// An answer of the wrong kind.
pub(crate) fn misfit() -> Error {
    Error::new(
        PvmError::BadMsg,
        "the daemon gave an answer to another question: console and daemon are of different versions",
    )
}

/// Waits for a message that is for the console. Tags below zero belong to the library, which waits for its own answers, and
/// what the resource manager answers to whoever has asked.
///
/// # Errors
/// The daemon is gone; why.
pub(crate) fn receive(vm: &Vm) -> Result<Message, Error> {
    let runtime = vm.runtime();
    match runtime.inbox_wait(None, &mut |inbox| {
        inbox.take_first(|message| message.tag >= 0 && message.ctx != CTX_RM)
    }) {
        Ok(Some(message)) => Ok(message),
        Ok(None) | Err(_) => Err(Error::new(PvmError::SysErr, runtime.why_lost())),
    }
}

/// The mailbox classes that match.
pub(crate) fn names(
    machine: &impl Machine,
    pattern: &str,
) -> Result<Vec<sempa_proto::task::MailboxClass>, Error> {
    match machine.ask(Request::Mailbox(MailboxRequest::List {
        pattern: pattern.to_string(),
    }))? {
        Reply::MailboxClasses(classes) => Ok(classes),
        _ => Err(misfit()),
    }
}
