//! Distribution of a group's members over hosts, as collective calls of PVM use it.

use crate::pvm;
use sempa_proto::group::GroupCall;
use sempa_proto::{PvmError, PvmResult};
use std::collections::BTreeMap;
use std::ffi::{CStr, c_int};

/// Coordinator of a host without members.
pub(crate) const NO_COORDINATOR: c_int = -1;

/// Members of a group on one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostMembers {
    /// The member with the lowest tid.
    pub(crate) coordinator: c_int,
    pub(crate) member_count: c_int,
}

/// Returns the members of a group, sorted by the tid of their host. A group that does not exist has
/// no members.
///
/// # Errors
/// `SysErr` if the daemon cannot be reached.
pub(crate) fn members_by_host(group: &CStr) -> PvmResult<BTreeMap<c_int, HostMembers>> {
    pvm::mytid()?;
    let members = match pvm::request_list(GroupCall::Members, group) {
        Err(PvmError::NoGroup | PvmError::NullGroup) => Vec::new(),
        result => result?,
    };
    let mut hosts = BTreeMap::new();
    // The tid 0 stands for a free instance.
    for tid in members.into_iter().filter(|tid| *tid != 0) {
        let host = hosts.entry(pvm::pvm_tidtohost(tid)).or_insert(HostMembers {
            coordinator: tid,
            member_count: 0,
        });
        host.coordinator = host.coordinator.min(tid);
        host.member_count += 1;
    }
    Ok(hosts)
}
