//! PVM's error codes, with the texts that `pvm_perror` prints.

use serde::{Deserialize, Serialize};

/// Result of an operation that fails with one of PVM's codes.
pub type PvmResult<T> = Result<T, PvmError>;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        /// The error codes of PVM 3.4 (`pvm3.h`). A failing call returns the code of its error, a
        /// negative number.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum PvmError {
            $($(#[$doc])* $name,)*
        }

        impl PvmError {
            /// Returns the number that C programs see, always negative.
            pub fn code(self) -> i32 {
                match self { $(PvmError::$name => $code,)* }
            }

            /// Returns the error with this code, or `None` for an unknown code.
            pub fn from_code(code: i32) -> Option<PvmError> {
                match code { $($code => Some(PvmError::$name),)* _ => None }
            }

            /// Returns the text that `pvm_perror` prints.
            pub fn text(self) -> &'static str {
                match self { $(PvmError::$name => $text,)* }
            }
        }
    };
}

codes! {
    /// An argument is out of range.
    BadParam = -2, "Bad parameter";
    /// The counts that members pass to a collective operation differ.
    Mismatch = -3, "Parameter mismatch";
    /// A value does not fit into the result type.
    Overflow = -4, "Value too large";
    /// Unpacking read past the end of the message.
    NoData = -5, "End of buffer";
    /// The host is not in the virtual machine, or its name does not resolve.
    NoHost = -6, "No such host";
    /// The executable was not found on the host.
    NoFile = -7, "No such file";
    /// The operation is not permitted, or a mailbox entry with this name exists and may not be
    /// replaced.
    Denied = -8, "Permission denied";
    NoMem = -10, "Malloc failed";
    /// The message cannot be decoded.
    BadMsg = -12, "Can't decode message";
    /// The local daemon cannot be reached, or the connection to it has failed.
    SysErr = -14, "Can't contact local daemon";
    /// The task has no active message buffer.
    NoBuf = -15, "No current buffer";
    /// No message buffer has this id.
    NoSuchBuf = -16, "No such buffer";
    /// The group name is empty.
    NullGroup = -17, "Null group name";
    /// The calling task joined the group earlier and is still a member.
    DupGroup = -18, "Already in group";
    /// No group with this name exists in the virtual machine.
    NoGroup = -19, "No such group";
    /// A task that the call concerns is not a member of the group.
    NotInGroup = -20, "Not in group";
    /// No member of the group has this instance number.
    NoInst = -21, "No such instance";
    /// The host failed during the operation.
    HostFail = -22, "Host failed";
    /// The task was not spawned by another task.
    NoParent = -23, "No parent task";
    /// This implementation does not have the operation.
    NotImpl = -24, "Not implemented";
    /// An internal error of the daemon.
    DSysErr = -25, "Pvmd system error";
    /// Two daemons have different versions.
    BadVersion = -26, "Version mismatch";
    /// A limit of the virtual machine or of the host was reached.
    OutOfRes = -27, "Out of resources";
    /// The host is already in the virtual machine.
    DupHost = -28, "Duplicate host";
    /// The daemon could not be started.
    CantStart = -29, "Can't start pvmd";
    /// The same operation is already in progress.
    Already = -30, "Already in progress";
    NoTask = -31, "No such task";
    /// No mailbox entry has this name.
    NotFound = -32, "Not Found";
    /// A mailbox entry with this name exists already.
    Exists = -33, "Already Exists";
    /// A task on another host than the master's tried to register as hoster.
    HosterNotMaster = -34, "Hoster must run on master host";
    /// The parent spawned the task with `PvmNoSpawnParent`, so the task may not learn the parent's
    /// tid.
    ParentNotSet = -35, "Spawning parent set PvmNoParent";
    /// The master's address is a loopback address.
    IpLoopback = -36, "Master Host IP Address is Loopback! (See pvm3/Readme)";
}

impl PvmError {
    /// Parses an error name as in `pvm3.h`, such as `PvmCantStart`; `None` for an unknown name.
    pub fn from_name(name: &str) -> Option<Self> {
        let name = name.strip_prefix("Pvm")?;
        match name {
            "HostrNMstr" => Some(Self::HosterNotMaster),
            "IPLoopback" => Some(Self::IpLoopback),
            _ => (-36..0)
                .filter_map(Self::from_code)
                .find(|error| format!("{error:?}") == name),
        }
    }
}

impl std::fmt::Display for PvmError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.text())
    }
}

impl std::error::Error for PvmError {}
