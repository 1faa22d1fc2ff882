//! Calls that all members of a group make together, with one of them, the root, at the centre.
//!
//! Each member exchanges one message with the root, in the context of groups and under the program's tag. The root takes
//! the members in the order of their instances, so a result does not depend on who was faster.

use crate::pvm::{self, Aside, Data};
use sempa_proto::group::GroupCall;
use sempa_proto::{PvmError, PvmResult};
use std::ffi::{CStr, c_int};

/// The members of a group and this task's part in a collective call.
pub(crate) struct Circle {
    /// By instance, 0 where a number is free.
    members: Vec<c_int>,
    me: c_int,
    root: c_int,
    tag: c_int,
}

impl Circle {
    /// Asks who takes part.
    ///
    /// # Errors
    /// `NoGroup`, `NotInGroup`; `NoInst` when the root is no member; `BadParam` for a negative tag.
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

    /// True for the task at the centre.
    pub(crate) fn am_root(&self) -> bool {
        self.me == self.root
    }

    /// Number of instances.
    ///
    /// # Errors
    /// `NoInst` when one of the numbers is free: what belongs to it cannot be given to anybody.
    pub(crate) fn without_holes(&self) -> PvmResult<usize> {
        if self.members.contains(&0) {
            Err(PvmError::NoInst)
        } else {
            Ok(self.members.len())
        }
    }
}

/// Brings the elements of all members together at the root; `place` gives the place for an instance.
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

/// Gives every member its part of the root's elements; `part` gives what an instance gets.
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
    // Last, so that the result may lie within what is sent.
    if let Some(own) = own {
        result.copy_from(&own);
    }
    Ok(())
}

/// Combines the elements of all members into the root's; `combine` takes what has come to `spare`.
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
        // Also after an error: what a member has sent must not be left for the next call.
        aside.receive(*tid, circle.tag, spare)?;
        done = done.and_then(|()| combine());
    }
    done
}
