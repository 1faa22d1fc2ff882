//! The task runtime: the connection to the daemon, the links to other tasks, and the helper thread that keeps them going.

use crate::error::EnrollError;
use crate::inbox::Inbox;
use sempa_proto::task::{Reply, Request, RmInfo, Sink};
use sempa_proto::{HostId, Message, PvmError, PvmResult, Tid};
use std::os::fd::RawFd;
use std::time::Instant;

/// Joins the virtual machine of this user, as the environment says.
///
/// # Errors
/// See [`EnrollError`].
pub fn enroll() -> Result<Runtime, EnrollError> {
    Err(EnrollError::Refused("not built yet".into()))
}

/// This process as a task. Clones are the same task; cheap.
#[derive(Clone, Debug)]
pub struct Runtime(());

impl Runtime {
    /// This task's id, for life.
    pub fn tid(&self) -> Tid {
        Tid::NONE
    }
    /// The parent as in the daemon's welcome: NONE, a task, or raw −35.
    pub fn parent(&self) -> Tid {
        Tid::NONE
    }
    /// The host this task runs on now.
    pub fn host(&self) -> HostId {
        HostId::MASTER
    }
    /// Data signature of that host.
    pub fn dsig(&self) -> i32 {
        0
    }
    /// Where this task's output goes.
    pub fn output(&self) -> Sink {
        Sink::default()
    }
    /// Where this task's trace records go.
    pub fn trace(&self) -> Sink {
        Sink::default()
    }
    /// True when a daemon started this process.
    pub fn spawned(&self) -> bool {
        false
    }
    /// The resource manager to ask, if there is one.
    pub fn rm(&self) -> Option<RmInfo> {
        None
    }
    /// Rises whenever the resource manager changes or dies.
    pub fn rm_generation(&self) -> u64 {
        0
    }
    /// True until `exit`, the loss of the daemon, or a fork (seen from the child).
    pub fn is_connected(&self) -> bool {
        false
    }
    /// One sentence: why the connection is gone.
    pub fn why_lost(&self) -> String {
        String::new()
    }
    /// A fresh wait id, positive.
    pub fn next_wid(&self) -> i32 {
        0
    }
    /// Sends a message; sets its `src`.
    ///
    /// # Errors
    /// `BadParam` for an address that is neither task nor daemon, `SysErr` when the daemon is gone, `OutOfRes` when too
    /// much waits for this receiver.
    pub fn send(&self, _message: Message) -> PvmResult<()> {
        Err(PvmError::NotImpl)
    }
    /// Asks the daemon and waits for its answer.
    pub fn request(&self, _what: Request) -> Reply {
        Reply::Failed { error: PvmError::NotImpl, reason: String::new() }
    }
    /// One look at what has arrived.
    pub fn inbox_try<R>(&self, _f: &mut dyn FnMut(&mut Inbox) -> Option<R>) -> Option<R> {
        None
    }
    /// Looks again whenever something arrived, until `f` answers or the deadline has come (`None`).
    ///
    /// # Errors
    /// `SysErr` when the daemon is gone for good and `f` finds nothing.
    pub fn inbox_wait<R>(
        &self,
        _deadline: Option<Instant>,
        _f: &mut dyn FnMut(&mut Inbox) -> Option<R>,
    ) -> Result<Option<R>, PvmError> {
        Err(PvmError::NotImpl)
    }
    /// The socket to the daemon, for `pvm_getfds`; `None` while there is none.
    pub fn socket_fd(&self) -> Option<RawFd> {
        None
    }
    /// Leaves the virtual machine: everything sent is handed to the daemon first.
    ///
    /// # Errors
    /// `SysErr` when the daemon was gone already.
    pub fn exit(&self) -> PvmResult<()> {
        Err(PvmError::NotImpl)
    }
}
