//! Collective calls: all members of a group make the same call, and one member is the root.
//!
//! Each member exchanges one message with the root, in the context of groups and with the program's
//! tag. The root processes the members in the order of their instance numbers, so the result does
//! not depend on timing.

use crate::pvm::{self, Elements, MemberChannel};
use sempa_proto::group::GroupCall;
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{CStr, c_int};

/// The members of the group of a collective call, and the arguments that determine the calling
/// task's role.
pub(crate) struct Collective {
    /// Tids of the members by instance number; 0 for a free instance.
    members: Vec<c_int>,
    own_tid: c_int,
    root: c_int,
    tag: c_int,
}

impl Collective {
    /// Queries the members of the group and checks the arguments of the call.
    ///
    /// # Errors
    /// `NoGroup`, `NotInGroup`; `NoInst` if the root is not a member; `BadParam` for a negative
    /// tag.
    pub(crate) fn query(group: &CStr, root: c_int, tag: c_int) -> PvmResult<Self> {
        if tag < 0 {
            return Err(PvmError::BadParam);
        }
        let own_tid = pvm::mytid()?;
        let members = pvm::request_list(GroupCall::Members, group)?;
        if !members.contains(&own_tid) {
            return Err(PvmError::NotInGroup);
        }
        let root = usize::try_from(root)
            .ok()
            .and_then(|root| members.get(root))
            .filter(|tid| **tid != 0);
        let root = *root.ok_or(PvmError::NoInst)?;
        Ok(Self {
            members,
            own_tid,
            root,
            tag,
        })
    }

    pub(crate) fn is_root(&self) -> bool {
        self.own_tid == self.root
    }

    /// Returns the number of instances, which equals the number of members.
    ///
    /// # Errors
    /// `NoInst` if an instance is free, because the elements for that instance have no receiver.
    pub(crate) fn size_without_free_instances(&self) -> PvmResult<usize> {
        if self.members.contains(&0) {
            Err(PvmError::NoInst)
        } else {
            Ok(self.members.len())
        }
    }
}

/// Collects the elements of all members at the root. `destination_of` returns the memory for the
/// elements of an instance.
pub(crate) fn gather(
    collective: &Collective,
    own_elements: &Elements,
    destination_of: &dyn Fn(usize) -> Elements,
) -> PvmResult<()> {
    let channel = MemberChannel::open();
    if !collective.is_root() {
        return channel.send(collective.root, collective.tag, own_elements);
    }
    for (instance, tid) in collective.members.iter().enumerate() {
        if *tid == collective.own_tid {
            destination_of(instance).copy_from(own_elements);
        } else {
            channel.receive(*tid, collective.tag, &destination_of(instance))?;
        }
    }
    Ok(())
}

/// Distributes the root's elements to all members, each into its `result`. `instance_elements`
/// returns the elements for an instance number.
pub(crate) fn scatter(
    collective: &Collective,
    result: &Elements,
    instance_elements: &dyn Fn(usize) -> Elements,
) -> PvmResult<()> {
    let channel = MemberChannel::open();
    if !collective.is_root() {
        return channel.receive(collective.root, collective.tag, result);
    }
    let mut own_elements = None;
    for (instance, tid) in collective.members.iter().enumerate() {
        if *tid == collective.own_tid {
            own_elements = Some(instance_elements(instance));
        } else {
            channel.send(*tid, collective.tag, &instance_elements(instance))?;
        }
    }
    // The copy must be the last step, because `result` may overlap the array to send.
    if let Some(own_elements) = own_elements {
        result.copy_from(&own_elements);
    }
    Ok(())
}

/// Combines the elements of all members into the root's `combined_elements`. The root receives the
/// elements of one member after another into `received_elements`; `combine` then combines
/// `received_elements` into `combined_elements`.
pub(crate) fn reduce(
    collective: &Collective,
    combined_elements: &Elements,
    received_elements: &Elements,
    mut combine: impl FnMut() -> PvmResult<()>,
) -> PvmResult<()> {
    let channel = MemberChannel::open();
    if !collective.is_root() {
        return channel.send(collective.root, collective.tag, combined_elements);
    }
    let mut outcome = Ok(());
    for tid in collective
        .members
        .iter()
        .filter(|tid| **tid != collective.own_tid && **tid != 0)
    {
        // The loop continues after an error of `combine`. Otherwise the remaining messages would
        // stay unread, and the next call would receive them.
        channel.receive(*tid, collective.tag, received_elements)?;
        outcome = outcome.and_then(|()| combine());
    }
    outcome
}
