//! The facts that `doctor` collects. `findings` judges them.

use crate::service::ServiceState;
use std::collections::BTreeMap;
use std::path::PathBuf;

/// The result of testing an ability.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Check {
    Works,
    /// It does not work, for this reason.
    Fails(String),
    /// It was not tested, for this reason.
    NotTested(String),
}

impl Check {
    pub(super) fn from_result<E: ToString>(result: Result<(), E>) -> Self {
        match result {
            Ok(()) => Self::Works,
            Err(error) => Self::Fails(error.to_string()),
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) host: HostFacts,
    pub(super) peers: Vec<Peer>,
}

/// Facts about this machine.
#[derive(Clone, Debug)]
pub(super) struct HostFacts {
    /// Version of this program.
    pub(super) version: String,
    pub(super) is_root: bool,
    pub(super) engine: EngineFacts,
    /// A process can be in a new PID namespace and a new mount namespace.
    pub(super) namespaces: Check,
    /// `/proc` of the new PID namespace can be mounted there.
    pub(super) proc_mount: Check,
    /// The next PID of a namespace can be chosen.
    pub(super) last_pid: Check,
    /// A process can enter namespaces of another one.
    pub(super) enter_namespaces: Check,
    pub(super) userfaultfd: Check,
    pub(super) page_scan: Check,
    /// True if root has CAP_SYS_RESOURCE here.
    pub(super) has_sys_resource: bool,
    /// Value of kernel.yama.ptrace_scope; `None` without Yama.
    pub(super) ptrace_scope: Option<u8>,
    pub(super) cgroups: CgroupFacts,
    /// Path of the settings, or why they are not used.
    pub(super) settings: Result<PathBuf, String>,
    pub(super) site_key: KeyFacts,
    pub(super) service: ServiceState,
    /// The service's socket; `None` if there is none.
    pub(super) socket: Option<SocketFacts>,
    /// Users of this host, with their uids.
    pub(super) users: BTreeMap<String, u32>,
}

#[derive(Clone, Debug)]
pub(super) struct EngineFacts {
    /// Path of CRIU, or why there is none.
    pub(super) program: Result<PathBuf, String>,
    pub(super) version: Result<String, String>,
    /// A process was dumped and restored.
    pub(super) trial: Check,
}

#[derive(Clone, Debug)]
pub(super) struct CgroupFacts {
    /// Where control groups of version 2 are mounted.
    pub(super) mount: Option<PathBuf>,
    /// Controllers that version 2 has.
    pub(super) controllers: Vec<String>,
    pub(super) freezer: Check,
}

/// Facts about the site key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum KeyFacts {
    /// Identifier of the key.
    Present(String),
    Refused(String),
    /// Only root may read the key.
    NotReadable,
}

#[derive(Clone, Debug)]
pub(super) struct SocketFacts {
    pub(super) path: PathBuf,
    pub(super) owner: u32,
    /// Permissions of the socket.
    pub(super) mode: u32,
}

/// A host that was named on the command line.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) name: String,
    /// Facts, or why ssh gave none.
    pub(super) facts: Result<PeerFacts, String>,
}

/// Facts about another host, which ssh has told.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct PeerFacts {
    /// Version of `pvm-admin`; `None` if it is not installed.
    pub(super) version: Option<String>,
    /// Difference of its clock from this one's, in seconds; positive if its clock is ahead.
    pub(super) clock_offset_s: Option<f64>,
    pub(super) users: BTreeMap<String, u32>,
    /// Identifier of the site key, or why it is not known.
    pub(super) site_key: Option<Result<String, String>>,
    pub(super) udp: Option<UdpFacts>,
}

/// Which datagrams pass between two hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UdpFacts {
    /// A datagram from here arrives there, and the answer arrives here.
    pub(super) from_here: Check,
    /// A datagram from another port there arrives here.
    pub(super) from_there: Check,
}
