//! Requests that a resource manager may serve in the daemon's place (`SM_*`), with the way back to the daemon when it dies.

use crate::error::Error;
use crate::runtime::Runtime;
use sempa_proto::table::{AddedHost, HostTable, TaskInfo};
use sempa_proto::task::{NotifyRequest, SpawnRequest};
use sempa_proto::{PvmError, Tid};

impl Runtime {
    /// Starts tasks, placed by the resource manager when there is one, otherwise by the daemon.
    ///
    /// When the resource manager dies before it answers, the daemon is asked; tasks that it had started by then live on.
    ///
    /// # Errors
    /// When nothing was tried. Single tasks fail in their own result.
    pub fn spawn(&self, _request: SpawnRequest) -> Result<Vec<Result<Tid, PvmError>>, Error> {
        Err(PvmError::NotImpl.into())
    }
    /// The host table. From a resource manager it comes without addresses and epoch.
    ///
    /// # Errors
    /// As the daemon, or the resource manager, says.
    pub fn config(&self) -> Result<HostTable, Error> {
        Err(PvmError::NotImpl.into())
    }
    /// The tasks that `selector` names: all ([`Tid::NONE`]), those of one host, or one.
    ///
    /// # Errors
    /// As the daemon, or the resource manager, says.
    pub fn tasks(&self, _selector: Tid) -> Result<Vec<TaskInfo>, Error> {
        Err(PvmError::NotImpl.into())
    }
    /// Adds hosts, one host-file line each; one result per line.
    ///
    /// # Errors
    /// When nothing was tried.
    pub fn add_hosts(&self, _lines: Vec<String>) -> Result<Vec<AddedHost>, Error> {
        Err(PvmError::NotImpl.into())
    }
    /// Removes hosts by name; one result per name.
    ///
    /// # Errors
    /// When nothing was tried.
    pub fn delete_hosts(&self, _names: Vec<String>) -> Result<Vec<Result<(), PvmError>>, Error> {
        Err(PvmError::NotImpl.into())
    }
    /// Asks for messages about the end of tasks or the coming and going of hosts. A resource manager does not confirm it.
    ///
    /// # Errors
    /// As the daemon says.
    pub fn notify(&self, _request: NotifyRequest) -> Result<(), Error> {
        Err(PvmError::NotImpl.into())
    }
}
