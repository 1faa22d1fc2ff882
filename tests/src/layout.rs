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

/// Returns the home folder of `root`, `alice` or `olga` below `folder`, the testbed's folder.
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
