//! Checks of the user, the groups and the capabilities of a process.

use super::inspect::unsupported_resource;
use crate::capabilities::CapabilitySet;
use crate::proc::{self, Status};
use sempa_proto::migration::Refusal;

/// Checks that the process has the capabilities that the engine needs in it. A capability that the
/// tasker does not have is not required.
pub(super) fn check_capabilities(status: Option<&Status>) -> Result<(), Refusal> {
    let (Some(status), Some(own_status)) = (status, proc::status(std::process::id() as i32)) else {
        return Ok(());
    };
    let has_capability = |status: &Status, capability| {
        CapabilitySet::from_bits_retain(status.capeff).contains(capability)
    };
    // The engine makes the process mount a file system temporarily.
    if has_capability(&own_status, CapabilitySet::SYS_ADMIN)
        && !has_capability(status, CapabilitySet::SYS_ADMIN)
    {
        let uid = status.euid;
        return Err(unsupported_resource(format!(
            "a process without root's capabilities (its user is {uid}), which the engine cannot dump"
        )));
    }
    // The engine reads the resource limits of the process. The kernel permits this only if all user
    // and group IDs are equal, or with CAP_SYS_RESOURCE.
    let user_ids = [status.ruid, status.euid, status.suid];
    let group_ids = [status.rgid, status.egid, status.sgid];
    let differing_user = user_ids.into_iter().find(|id| *id != own_status.ruid);
    let differing_group = group_ids.into_iter().find(|id| *id != own_status.rgid);
    if let (false, Some(id)) = (
        has_capability(&own_status, CapabilitySet::SYS_RESOURCE),
        differing_user.or(differing_group),
    ) {
        return Err(unsupported_resource(format!(
            "another user or group ({id}), for which the tasker needs CAP_SYS_RESOURCE"
        )));
    }
    Ok(())
}

/// Checks that the process has only the rights of its user. The engine, which is root's, may
/// restore no others.
pub(super) fn check_ids(status: &Status, uid: u32, gid: u32) -> Result<(), Refusal> {
    let user_ids = [status.ruid, status.euid, status.suid, status.fuid];
    let group_ids = [status.rgid, status.egid, status.sgid, status.fgid];
    let other_user = user_ids.into_iter().find(|id| *id != uid);
    let other_group = group_ids.into_iter().find(|id| *id != gid);
    if let Some(id) = other_user.or(other_group) {
        return Err(unsupported_resource(format!(
            "a process with another user or group ({id})"
        )));
    }
    match status.capprm | status.capeff | status.capinh | status.capamb.unwrap_or(0) {
        0 => Ok(()),
        _ => Err(unsupported_resource("a process with capabilities")),
    }
}
