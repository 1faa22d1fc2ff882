//! Marks: messages that a task knows of and that may not have arrived yet.

use crate::ids::Tid;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Context of the messages by which the runtimes of two tasks tell each other marks. Programs
/// cannot use it: contexts of programs are not negative.
pub const CTX_ORDER: i32 = i32::MIN;

/// Names the messages of one task to another task that are in transit: all fragments of the link
/// from `sender` to `receiver` below number `end_seq`.
///
/// A *folded* mark stands for the marks of many receivers: all messages of `sender` whose stamp is
/// at most `stamp`, to any task. Its receiver is [`Tid::NONE`], and its `end_seq` is the stamp. A
/// task that hears it asks the sender, unless it has received a later message of the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    pub receiver: Tid,
    pub sender: Tid,
    /// Incarnation of the link; of the sender if the mark is folded.
    pub incarnation: u16,
    /// Incarnation of the sender, to which the stamp belongs.
    pub sender_incarnation: u16,
    pub end_seq: u64,
    /// Clock of the sender when it sent the last of these messages; [`super::STAMP_MAX`] if it is
    /// unknown, because the sender has ended.
    pub stamp: u64,
}

impl Mark {
    /// Creates a mark of all messages of a task up to a stamp.
    pub(super) fn folded(sender: Tid, incarnation: u16, stamp: u64) -> Self {
        Self {
            receiver: Tid::NONE,
            sender,
            incarnation,
            sender_incarnation: incarnation,
            end_seq: stamp,
            stamp,
        }
    }

    /// Returns the key of the mark. A list has one mark for each key.
    pub fn key(&self) -> MarkKey {
        (self.sender, self.receiver, self.incarnation)
    }

    pub(super) fn is_folded(&self) -> bool {
        self.receiver == Tid::NONE
    }

    /// True if the mark may name a message to this task.
    pub fn may_concern(&self, receiver: Tid) -> bool {
        self.receiver == receiver || self.is_folded()
    }

    /// True if everything that `other` names is named by this mark, too. A mark of another
    /// incarnation covers nothing: its messages may be void.
    pub fn covers(&self, other: &Self) -> bool {
        self.key() == other.key() && self.end_seq >= other.end_seq
    }
}

/// Sender, receiver and incarnation of a mark.
pub type MarkKey = (Tid, Tid, u16);

/// Replaces the marks of each sender that has more than `marks_max` of them by one.
pub(super) fn fold(list: Vec<Mark>, marks_max: usize) -> Vec<Mark> {
    if list.len() <= marks_max {
        return list;
    }
    let process_of = |mark: &Mark| (mark.sender, mark.sender_incarnation);
    let mut marks_by_process: BTreeMap<(Tid, u16), (usize, u64)> = BTreeMap::new();
    for mark in &list {
        let (count, stamp_max) = marks_by_process.entry(process_of(mark)).or_default();
        *count += 1;
        *stamp_max = mark.stamp.max(*stamp_max);
    }
    marks_by_process.retain(|_, (count, _)| *count > marks_max);
    if marks_by_process.is_empty() {
        return list;
    }
    let folded_marks = marks_by_process
        .iter()
        .map(|((sender, incarnation), (_, stamp))| Mark::folded(*sender, *incarnation, *stamp));
    let other_marks = list
        .iter()
        .filter(|mark| !marks_by_process.contains_key(&process_of(mark)));
    let mut marks: Vec<Mark> = folded_marks.chain(other_marks.copied()).collect();
    marks.sort_by_key(Mark::key);
    marks
}

impl OrderMessage {
    /// True if messages wait for the answer.
    pub fn is_awaited(&self) -> bool {
        matches!(
            self,
            Self::Ask {
                wants_list: false,
                ..
            }
        )
    }
}

/// The past of a request to a service, of a spawn, or of the end of a task.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Past {
    /// Lamport clock of the task.
    pub clock: u64,
    /// The messages that are in transit.
    pub marks: Vec<Mark>,
}

/// A message between the runtimes of two tasks. It travels on the link of the two tasks, in order
/// with the messages of the programs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum OrderMessage {
    /// Everything that follows on the link was sent later than the messages that these marks name.
    /// The list replaces the list of the previous such message.
    Marks {
        /// Number of this list, which the answer repeats.
        id: u64,
        marks: Vec<Mark>,
    },
    /// All messages that the list `id` names for the receiver of that list have arrived. Sent once
    /// for each list that may name its receiver.
    Arrived { id: u64 },
    /// Asks for [`OrderMessage::AllSent`], and for a list if `wants_list` is true.
    Ask { stamp: u64, wants_list: bool },
    /// Answer to [`OrderMessage::Ask`], behind everything that was sent before. The sender's clock
    /// is `clock`.
    AllSent { stamp: u64, clock: u64 },
}
