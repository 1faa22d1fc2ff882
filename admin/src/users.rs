//! Names and groups of users on this host.

use nix::unistd::{Group, User, getgrouplist};
use std::ffi::CString;

/// Returns the name of a user; the uid as text if there is no account.
pub(crate) fn user_name(uid: u32) -> String {
    let account = User::from_uid(uid.into()).ok().flatten();
    account.map_or_else(|| uid.to_string(), |account| account.name)
}

/// Returns the names of the groups of a user; `None` if the user has no account.
pub(crate) fn groups_of(user_name: &str) -> Option<Vec<String>> {
    let account = User::from_name(user_name).ok().flatten()?;
    let groups = getgrouplist(&CString::new(user_name).ok()?, account.gid).ok()?;
    let name = |group| Some(Group::from_gid(group).ok().flatten()?.name);
    Some(groups.into_iter().filter_map(name).collect())
}
