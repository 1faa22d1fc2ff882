//! Collective calls: all members of a group call them, and one member is the root.
//!
//! Each member exchanges one message with the root, in the context of groups and with the program's
//! tag. The root processes the members in the order of their instances, so the result does not
//! depend on timing.

use crate::pvm::{self, Aside, Data};
use sempa_proto::group::GroupCall;
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{CStr, c_int};

/// A collective call: the members of the group and this task's role.
pub(crate) struct Circle {
    /// Members by instance, 0 for a free instance.
    members: Vec<c_int>,
    me: c_int,
    root: c_int,
    tag: c_int,
}

impl Circle {
    /// Queries the members of the group.
    ///
    /// # Errors
    /// `NoGroup`, `NotInGroup`; `NoInst` if the root is not a member; `BadParam` for a negative
    /// tag.
    pub(crate) fn of(group: &CStr, root: c_int, tag: c_int) -> PvmResult<Circle> {
        if tag < 0 {
            return Err(PvmError::BadParam);
        }
        let me = pvm::mytid()?;
        let members = pvm::list(GroupCall::Members, group)?;
        if !members.contains(&me) {
            return Err(PvmError::NotInGroup);
        }
        let root = usize::try_from(root)
            .ok()
            .and_then(|root| members.get(root))
            .filter(|tid| **tid != 0);
        let root = *root.ok_or(PvmError::NoInst)?;
        Ok(Circle {
            members,
            me,
            root,
            tag,
        })
    }

    /// True if this task is the root.
    pub(crate) fn am_root(&self) -> bool {
        self.me == self.root
    }

    /// Returns the number of instances.
    ///
    /// # Errors
    /// `NoInst` if an instance is free, because its elements have no receiver.
    pub(crate) fn without_holes(&self) -> PvmResult<usize> {
        if self.members.contains(&0) {
            Err(PvmError::NoInst)
        } else {
            Ok(self.members.len())
        }
    }
}

/// Collects the elements of all members at the root; `place` returns the destination for an
/// instance.
pub(crate) fn gather(circle: &Circle, data: &Data, place: &dyn Fn(usize) -> Data) -> PvmResult<()> {
    let aside = Aside::begin();
    if !circle.am_root() {
        return aside.send(circle.root, circle.tag, data);
    }
    for (instance, tid) in circle.members.iter().enumerate() {
        if *tid == circle.me {
            place(instance).copy_from(data);
        } else {
            aside.receive(*tid, circle.tag, &place(instance))?;
        }
    }
    Ok(())
}

/// Distributes the root's elements to all members; `part` returns the elements for an instance.
pub(crate) fn scatter(
    circle: &Circle,
    result: &Data,
    part: &dyn Fn(usize) -> Data,
) -> PvmResult<()> {
    let aside = Aside::begin();
    if !circle.am_root() {
        return aside.receive(circle.root, circle.tag, result);
    }
    let mut own = None;
    for (instance, tid) in circle.members.iter().enumerate() {
        if *tid == circle.me {
            own = Some(part(instance));
        } else {
            aside.send(*tid, circle.tag, &part(instance))?;
        }
    }
    // Must be last, because `result` may be within the array to send.
    if let Some(own) = own {
        result.copy_from(&own);
    }
    Ok(())
}

/// Combines the elements of all members into the root's; `combine` processes each set received in
/// `spare`.
pub(crate) fn reduce(
    circle: &Circle,
    data: &Data,
    spare: &Data,
    mut combine: impl FnMut() -> PvmResult<()>,
) -> PvmResult<()> {
    let aside = Aside::begin();
    if !circle.am_root() {
        return aside.send(circle.root, circle.tag, data);
    }
    let mut done = Ok(());
    for tid in circle
        .members
        .iter()
        .filter(|tid| **tid != circle.me && **tid != 0)
    {
        // Continue after an error, too: an unread message would be received by the next call.
        aside.receive(*tid, circle.tag, spare)?;
        done = done.and_then(|()| combine());
    }
    done
}
