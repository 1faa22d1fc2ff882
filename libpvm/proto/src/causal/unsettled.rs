//! The marks that a task must tell others, because it does not know yet that the messages have
//! arrived.

use super::mark::Mark;
use crate::ids::Tid;
use std::collections::BTreeMap;

/// Maximum number of remembered pairs with settled marks. When it is reached, all are forgotten:
/// their marks may be heard once more.
const SETTLED_PAIRS_MAX: usize = 4096;

/// Marks of messages in transit, one for each pair of receiver and sender.
#[derive(Clone, Debug, Default)]
pub(super) struct UnsettledMarks {
    marks_by_pair: BTreeMap<(Tid, Tid), Mark>,
    /// Marks that others have told and that are settled. Another task may tell them still; without
    /// this memory two tasks would remind each other of a settled mark again and again.
    settled_by_pair: BTreeMap<(Tid, Tid), Mark>,
    /// Number of additions since the list was created.
    version: u64,
}

impl UnsettledMarks {
    pub(super) fn is_empty(&self) -> bool {
        self.marks_by_pair.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.marks_by_pair.len()
    }

    /// Returns a counter that increases with every mark that is added or grows.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn get(&self, receiver: Tid, sender: Tid) -> Option<&Mark> {
        self.marks_by_pair.get(&(receiver, sender))
    }

    /// Returns all marks, sorted by pair.
    pub(super) fn iter(&self) -> impl Iterator<Item = Mark> {
        self.marks_by_pair.values().copied()
    }

    /// Adds a mark that another task has told, unless the mark is settled.
    pub(super) fn hear(&mut self, mark: Mark) {
        let settled_mark = self.settled_by_pair.get(&mark.pair());
        if settled_mark.is_none_or(|settled| !settled.covers(&mark)) {
            self.add(mark);
        }
    }

    /// Adds a mark, unless the list has a mark that covers it.
    pub(super) fn add(&mut self, mark: Mark) {
        let known_mark = self.marks_by_pair.get(&mark.pair());
        if known_mark.is_none_or(|known_mark| !known_mark.covers(&mark)) {
            self.version += 1;
            self.marks_by_pair.insert(mark.pair(), mark);
        }
    }

    /// Removes the mark of this pair if `settled` covers it. Marks that `settled` covers are not
    /// heard any more.
    pub(super) fn settle(&mut self, settled: &Mark) {
        let remembered = self.settled_by_pair.get(&settled.pair());
        if remembered.is_none_or(|remembered| !remembered.covers(settled)) {
            if self.settled_by_pair.len() >= SETTLED_PAIRS_MAX {
                self.settled_by_pair.clear();
            }
            self.settled_by_pair.insert(settled.pair(), *settled);
        }
        let known_mark = self.marks_by_pair.get(&settled.pair());
        if known_mark.is_some_and(|known_mark| settled.covers(known_mark)) {
            self.marks_by_pair.remove(&settled.pair());
        }
    }

    pub(super) fn remove(&mut self, receiver: Tid, sender: Tid) {
        self.marks_by_pair.remove(&(receiver, sender));
    }

    /// Removes all marks of messages to `receiver`.
    pub(super) fn remove_receiver(&mut self, receiver: Tid) {
        self.retain(|mark| mark.receiver != receiver);
    }

    pub(super) fn retain(&mut self, mut keeps: impl FnMut(&mut Mark) -> bool) {
        self.marks_by_pair.retain(|_, mark| keeps(mark));
    }
}
