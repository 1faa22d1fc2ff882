//! PVM's error codes, with the texts that `pvm_perror` prints.

use serde::{Deserialize, Serialize};

/// Result of an operation that fails with one of PVM's codes.
pub type PvmResult<T> = Result<T, PvmError>;

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        /// The error codes of PVM 3.4 (`pvm3.h`). A failing call returns the negative number.
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
    /// Counts of a collective operation differ.
    Mismatch = -3, "Parameter mismatch";
    /// A value does not fit.
    Overflow = -4, "Value too large";
    /// Unpacking read past the end of the message.
    NoData = -5, "End of buffer";
    /// The host is not in the virtual machine, or its name does not resolve.
    NoHost = -6, "No such host";
    /// The executable was not found on the host.
    NoFile = -7, "No such file";
    /// The operation is not permitted; also a duplicate mailbox entry.
    Denied = -8, "Permission denied";
    NoMem = -10, "Malloc failed";
    /// The message cannot be decoded.
    BadMsg = -12, "Can't decode message";
    /// The local daemon cannot be reached.
    SysErr = -14, "Can't contact local daemon";
    /// No buffer is active.
    NoBuf = -15, "No current buffer";
    /// The buffer id is unknown.
    NoSuchBuf = -16, "No such buffer";
    /// The group name is empty.
    NullGroup = -17, "Null group name";
    /// The task is already in the group.
    DupGroup = -18, "Already in group";
    /// The group does not exist.
    NoGroup = -19, "No such group";
    /// The task is not in the group.
    NotInGroup = -20, "Not in group";
    /// The group has no such instance.
    NoInst = -21, "No such instance";
    /// The host failed during the operation.
    HostFail = -22, "Host failed";
    /// The task was not spawned by another one.
    NoParent = -23, "No parent task";
    /// This implementation does not have the operation.
    NotImpl = -24, "Not implemented";
    /// An internal error of the daemon.
    DSysErr = -25, "Pvmd system error";
    /// Two daemons have different versions.
    BadVersion = -26, "Version mismatch";
    /// A limit was reached.
    OutOfRes = -27, "Out of resources";
    /// The host is already in the virtual machine.
    DupHost = -28, "Duplicate host";
    /// The daemon could not be started.
    CantStart = -29, "Can't start pvmd";
    /// Another request for the same operation is in progress.
    Already = -30, "Already in progress";
    NoTask = -31, "No such task";
    /// No entry has this name.
    NotFound = -32, "Not Found";
    /// An entry of this name exists.
    Exists = -33, "Already Exists";
    /// A hoster must run on the master's host.
    HosterNotMaster = -34, "Hoster must run on master host";
    /// The spawning parent requested not to be known to the task.
    ParentNotSet = -35, "Spawning parent set PvmNoParent";
    /// The master's address is a loopback address.
    IpLoopback = -36, "Master Host IP Address is Loopback! (See pvm3/Readme)";
}

impl PvmError {
    /// Parses an error name as in `pvm3.h`, such as `PvmCantStart`.
    pub fn from_name(name: &str) -> Option<PvmError> {
        let name = name.strip_prefix("Pvm")?;
        match name {
            "HostrNMstr" => Some(PvmError::HosterNotMaster),
            "IPLoopback" => Some(PvmError::IpLoopback),
            _ => (-36..0)
                .filter_map(PvmError::from_code)
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
