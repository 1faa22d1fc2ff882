//! Another task of the virtual machine, as something to talk to.

use crate::error::{Error, MigrateError};
use crate::vm::{Body, Match, MoveAnswer, Vm};
use sempa_proto::task::{MoveReport, Reply, Request};
use sempa_proto::{Message, PvmError, Tid};
use serde::Serialize;
use std::fmt;

/// A task, and how this one reaches it. Making one asks nobody: the task may have ended.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let vm = libpvm::Vm::enroll()?;
/// if let Some(parent) = vm.parent_task() {
///     parent.send_value(1, "here I am")?;
///     let answer = vm.recv(parent.matching().tag(2))?;
///     println!("{} bytes from {parent}", answer.body.len());
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Task {
    vm: Vm,
    tid: Tid,
}

impl Vm {
    /// The task with this id.
    pub fn task(&self, tid: Tid) -> Task {
        Task {
            vm: self.clone(),
            tid,
        }
    }

    /// The task that spawned this one, if one did and wants to be known.
    pub fn parent_task(&self) -> Option<Task> {
        self.parent().map(|tid| self.task(tid))
    }
}

impl Task {
    /// Its id.
    pub fn tid(&self) -> Tid {
        self.tid
    }

    /// Sends it a message.
    ///
    /// # Errors
    /// As [`Vm::send`]. To a task that has ended the message vanishes.
    pub fn send(&self, tag: i32, body: impl Into<Body>) -> Result<(), Error> {
        self.vm.send(self.tid, tag, body)
    }

    /// Sends it a value.
    ///
    /// # Errors
    /// As [`Body::value`] and [`Vm::send`].
    pub fn send_value<T: Serialize + ?Sized>(&self, tag: i32, value: &T) -> Result<(), Error> {
        self.send(tag, Body::value(value)?)
    }

    /// Messages from it.
    pub fn matching(&self) -> Match {
        Match::any().src(self.tid)
    }

    /// Waits for a message from it with this tag.
    ///
    /// # Errors
    /// As [`Vm::recv`]. A task that ends without a word is waited for until this one ends: ask for a notice
    /// ([`Vm::watch_tasks`]) to hear of it.
    pub fn recv(&self, tag: i32) -> Result<Message, Error> {
        self.vm.recv(self.matching().tag(tag))
    }

    /// True while it runs.
    ///
    /// # Errors
    /// As the daemon says.
    pub fn is_running(&self) -> Result<bool, Error> {
        match self
            .vm
            .runtime()
            .request(Request::TaskStatus { tid: self.tid })
        {
            Reply::Done => Ok(true),
            Reply::Failed {
                error: PvmError::NoTask,
                ..
            } => Ok(false),
            other => Err(Error::from_reply("asking for a task", other)),
        }
    }

    /// Sends it a signal; no error when it has ended.
    ///
    /// # Errors
    /// As [`Vm::signal`].
    pub fn signal(&self, signal: i32) -> Result<(), Error> {
        self.vm.signal(self.tid, signal)
    }

    /// Has it stand still, also where it is moved, until it is resumed.
    ///
    /// # Errors
    /// As [`Vm::suspend`].
    pub fn suspend(&self) -> Result<(), Error> {
        self.vm.suspend(self.tid, true, None)
    }

    /// Lets it go on after [`Task::suspend`].
    ///
    /// # Errors
    /// As [`Vm::suspend`].
    pub fn resume(&self) -> Result<(), Error> {
        self.vm.suspend(self.tid, false, None)
    }

    /// Ends it (`SIGTERM`).
    ///
    /// # Errors
    /// As [`Vm::signal`].
    pub fn kill(&self) -> Result<(), Error> {
        const SIGTERM: i32 = 15;
        self.signal(SIGTERM)
    }

    /// Moves it to another host, by name, and waits for the end.
    ///
    /// # Errors
    /// As [`Vm::migrate`]; the task goes on where it is.
    pub fn migrate(&self, to: &str) -> Result<MoveReport, MigrateError> {
        match self.vm.migrate(self.tid, to, None, true)? {
            MoveAnswer::Done(report) => Ok(report),
            MoveAnswer::Started(id) => {
                let reason =
                    format!("the move {id} has begun, but the daemon did not wait for its end");
                Err(Error::new(PvmError::BadMsg, reason).into())
            }
        }
    }
}

impl fmt::Display for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.tid.fmt(f)
    }
}

impl PartialEq for Task {
    fn eq(&self, other: &Task) -> bool {
        self.tid == other.tid
    }
}

impl Eq for Task {}
