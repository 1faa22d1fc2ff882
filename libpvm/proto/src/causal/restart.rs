//! Marks after a restart from a checkpoint.

use super::mark::Mark;
use crate::ids::Tid;
use crate::link::is_later_incarnation;
use std::collections::BTreeSet;

/// A restart of tasks from a checkpoint. The links between these tasks keep their numbers in the
/// new incarnation.
#[derive(Clone, Debug)]
pub struct Restart {
    pub incarnation: u16,
    /// The tasks that were restored, including this one.
    pub members: BTreeSet<Tid>,
}

impl Restart {
    /// True if the mark is about two restored tasks and was made before the restart.
    pub(super) fn concerns(&self, mark: &Mark) -> bool {
        self.members.contains(&mark.receiver)
            && self.members.contains(&mark.sender)
            && !is_later_incarnation(mark.incarnation, self.incarnation)
    }

    /// Adapts a mark that `teller` has told after the restart. Returns false if nobody must wait
    /// for its messages.
    pub(super) fn admit(&self, teller: Tid, mark: &mut Mark) -> bool {
        // A restored teller may have encoded the list before the checkpoint. All others may know
        // marks of what was sent after the checkpoint and will never arrive.
        !self.concerns(mark)
            || mark.incarnation == self.incarnation
            || (self.members.contains(&teller) && self.renumber(mark))
    }

    /// Gives the mark the new incarnation. Returns false if it is void.
    pub(super) fn renumber(&self, mark: &mut Mark) -> bool {
        let is_valid = self.concerns(mark);
        if is_valid {
            mark.incarnation = self.incarnation;
        }
        is_valid
    }
}
