//! Handle of another task in the virtual machine.

use crate::error::{Error, MigrateError};
use crate::vm::{Body, Match, MigrateReply, Vm};
use sempa_proto::task::{MigrationReport, Reply, Request};
use sempa_proto::{Message, PvmError, Tid};
use serde::Serialize;
use std::fmt;

/// Handle of another task. Creating a handle sends no request, so the task may have ended.
///
/// ```no_run
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let vm = libpvm::Vm::enroll()?;
/// if let Some(parent) = vm.parent_task() {
///   parent.send_value(1, "here I am")?;
///   let answer = vm.recv(parent.matching().tag(2))?;
///   println!("{} bytes from {parent}", answer.body.len());
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
    /// Returns a handle of the task with this id.
    pub fn task(&self, tid: Tid) -> Task {
        Task {
            vm: self.clone(),
            tid,
        }
    }

    /// Returns the task that spawned this task. `None` without a parent, or if the parent has
    /// requested to stay unknown.
    pub fn parent_task(&self) -> Option<Task> {
        self.parent().map(|tid| self.task(tid))
    }
}

impl Task {
    pub fn tid(&self) -> Tid {
        self.tid
    }

    /// Sends a message to the task.
    ///
    /// # Errors
    /// As [`Vm::send`]. A message to a task that has ended is dropped without an error.
    pub fn send(&self, tag: i32, body: impl Into<Body>) -> Result<(), Error> {
        self.vm.send(self.tid, tag, body)
    }

    /// Sends a value to the task.
    ///
    /// # Errors
    /// As [`Body::value`] and [`Vm::send`].
    pub fn send_value<T: Serialize + ?Sized>(&self, tag: i32, value: &T) -> Result<(), Error> {
        self.send(tag, Body::value(value)?)
    }

    /// Returns a selector for messages that this task has sent.
    pub fn matching(&self) -> Match {
        Match::any().src(self.tid)
    }

    /// Waits for a message with this tag from the task.
    ///
    /// # Errors
    /// As [`Vm::recv`]. If the task ends without sending such a message, the call never returns:
    /// request a notice with [`Vm::watch_tasks`] to be notified of the end.
    pub fn recv(&self, tag: i32) -> Result<Message, Error> {
        self.vm.recv(self.matching().tag(tag))
    }

    /// True while the task runs.
    ///
    /// # Errors
    /// Returns the daemon's error.
    pub fn is_running(&self) -> Result<bool, Error> {
        match self
            .vm
            .runtime()
            .request_and_wait(Request::TaskStatus { tid: self.tid })
        {
            Reply::Done => Ok(true),
            Reply::Failed {
                error: PvmError::NoTask,
                ..
            } => Ok(false),
            other => Err(Error::from_reply("asking for a task", other)),
        }
    }

    /// Sends a signal to the task. If the task has ended, the call succeeds without effect.
    ///
    /// # Errors
    /// As [`Vm::signal`].
    pub fn signal(&self, signal: i32) -> Result<(), Error> {
        self.vm.signal(self.tid, signal)
    }

    /// Suspends the task until [`Task::resume`]. The task stays suspended if it migrates.
    ///
    /// # Errors
    /// As [`Vm::suspend`].
    pub fn suspend(&self) -> Result<(), Error> {
        self.vm.suspend(self.tid, true, None)
    }

    /// Resumes the task after [`Task::suspend`].
    ///
    /// # Errors
    /// As [`Vm::suspend`].
    pub fn resume(&self) -> Result<(), Error> {
        self.vm.suspend(self.tid, false, None)
    }

    /// Sends `SIGTERM` to the task.
    ///
    /// # Errors
    /// As [`Vm::signal`].
    pub fn kill(&self) -> Result<(), Error> {
        const SIGTERM: i32 = 15;
        self.signal(SIGTERM)
    }

    /// Migrates the task to the host with this name and waits for the result.
    ///
    /// # Errors
    /// As [`Vm::migrate`]; the task then continues on its host.
    pub fn migrate(&self, target_host: &str) -> Result<MigrationReport, MigrateError> {
        match self.vm.migrate(self.tid, target_host, None, true)? {
            MigrateReply::Done(report) => Ok(report),
            MigrateReply::Started(id) => {
                let reason = format!(
                    "the migration {id} has begun, but the daemon did not wait for its end"
                );
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
    fn eq(&self, other: &Self) -> bool {
        self.tid == other.tid
    }
}

impl Eq for Task {}
