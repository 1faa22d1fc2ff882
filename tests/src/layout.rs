//! Addresses, accounts and folders of all testbeds.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// First three bytes of the hosts' IPv4 addresses. The network has no connection to other networks,
/// so the addresses cannot collide.
pub const NETWORK_PREFIX: &str = "10.77.0";
/// Uid of the ordinary user `alice`, who has an account on all hosts.
pub const ALICE_UID: u32 = 21_001;
/// Uid of the ordinary user `olga`, who is the owner of the hosts.
pub const OLGA_UID: u32 = 21_002;

/// An account that all hosts of a testbed have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    pub name: &'static str,
    /// User id, and id of the user's only group.
    pub uid: u32,
}

pub const ROOT: Account = Account {
    name: "root",
    uid: 0,
};
pub const ALICE: Account = Account {
    name: "alice",
    uid: ALICE_UID,
};
pub const BOB: Account = Account {
    name: "bob",
    uid: 21_003,
};
pub const CAROL: Account = Account {
    name: "carol",
    uid: 21_004,
};
const OLGA: Account = Account {
    name: "olga",
    uid: OLGA_UID,
};
/// The ordinary users of all hosts.
pub(crate) const ORDINARY_USERS: [Account; 4] = [ALICE, BOB, CAROL, OLGA];

/// Returns the home folder of `root` or of an ordinary user below `folder`, the testbed's folder.
pub(crate) fn home_of(folder: &Path, user: &str) -> PathBuf {
    folder.join(if user == "root" { "home" } else { user })
}

/// Returns the path of the installed programs in the hosts: `prefix` itself, or another path if
/// ordinary users cannot access `prefix`.
pub(crate) fn prefix_in_hosts(prefix: &Path) -> PathBuf {
    let is_accessible = |folder: &Path| {
        fs::metadata(folder).is_ok_and(|metadata| metadata.permissions().mode() & 0o005 == 0o005)
    };
    if prefix.ancestors().all(is_accessible) {
        prefix.to_path_buf()
    } else {
        PathBuf::from("/run/sempa-prefix")
    }
}
