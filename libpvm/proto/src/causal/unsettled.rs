//! The marks that a task must tell others, because it does not know yet that the messages have
//! arrived.

use super::mark::{Mark, MarkKey};
use crate::ids::Tid;
use std::collections::BTreeMap;
use std::ops::Bound;

/// Marks of messages in transit, one for each [`MarkKey`].
#[derive(Clone, Debug, Default)]
pub(super) struct UnsettledMarks {
    marks_by_key: BTreeMap<MarkKey, Mark>,
    /// Number of additions since the list was created.
    version: u64,
}

impl UnsettledMarks {
    pub(super) fn is_empty(&self) -> bool {
        self.marks_by_key.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.marks_by_key.len()
    }

    /// Returns a counter that increases with every mark that is added or grows.
    pub(super) fn version(&self) -> u64 {
        self.version
    }

    pub(super) fn contains(&self, mark: &Mark) -> bool {
        self.marks_by_key.contains_key(&mark.key())
    }

    /// Returns the marks of messages of this task.
    pub(super) fn of_sender(&self, sender: Tid) -> impl Iterator<Item = &Mark> {
        self.from(sender, Tid::NONE)
            .take_while(move |mark| mark.sender == sender)
    }

    /// Returns the marks of messages from one task to another, one for each incarnation.
    pub(super) fn of_pair(&self, sender: Tid, receiver: Tid) -> impl Iterator<Item = &Mark> {
        self.from(sender, receiver)
            .take_while(move |mark| (mark.sender, mark.receiver) == (sender, receiver))
    }

    fn from(&self, sender: Tid, receiver: Tid) -> impl Iterator<Item = &Mark> {
        let marks = self.marks_by_key.range((sender, receiver, 0)..);
        marks.map(|(_, mark)| mark)
    }

    /// Returns the marks of messages of all other tasks.
    pub(super) fn of_others(&self, sender: Tid) -> impl Iterator<Item = Mark> {
        let first_key = (sender, Tid::NONE, 0);
        let last_key = (sender, Tid::from_raw(i32::MAX), u16::MAX);
        let earlier_marks = self.marks_by_key.range(..first_key);
        let after_sender = (Bound::Excluded(last_key), Bound::Unbounded);
        let marks = earlier_marks.chain(self.marks_by_key.range(after_sender));
        marks.map(|(_, mark)| *mark)
    }

    /// Returns all marks, sorted by key.
    pub(super) fn iter(&self) -> impl Iterator<Item = Mark> {
        self.marks_by_key.values().copied()
    }

    /// Adds a mark, unless the list has a mark that covers it.
    pub(super) fn add(&mut self, mark: Mark) {
        let known_mark = self.marks_by_key.get(&mark.key());
        if known_mark.is_none_or(|known_mark| !known_mark.covers(&mark)) {
            self.version += 1;
            self.marks_by_key.insert(mark.key(), mark);
        }
    }

    /// Removes a mark that `settled` covers.
    pub(super) fn settle(&mut self, settled: &Mark) {
        let known_mark = self.marks_by_key.get(&settled.key());
        if known_mark.is_some_and(|known_mark| settled.covers(known_mark)) {
            self.marks_by_key.remove(&settled.key());
        }
    }

    pub(super) fn remove(&mut self, mark: &Mark) {
        self.marks_by_key.remove(&mark.key());
    }

    /// Removes all marks of messages to `receiver`.
    pub(super) fn remove_receiver(&mut self, receiver: Tid) {
        self.retain(|mark| mark.receiver != receiver);
    }

    pub(super) fn retain(&mut self, mut keeps: impl FnMut(&Mark) -> bool) {
        self.marks_by_key.retain(|_, mark| keeps(mark));
    }

    /// Changes marks, and their keys with them.
    pub(super) fn change(&mut self, change: impl Fn(&mut Mark)) {
        for (_, mut mark) in std::mem::take(&mut self.marks_by_key) {
            change(&mut mark);
            self.add(mark);
        }
    }
}
